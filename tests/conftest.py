"""Tiny models and pairs, made once for all tests."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

from make_tiny import write_tiny
from twofold.convert import convert


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A float32 llama of width 256."""
    path = tmp_path_factory.mktemp("tiny") / "llama.gguf"
    write_tiny(path, "llama")
    return path


@pytest.fixture(scope="session")
def tiny_pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base of the pair made from `tiny_llama`."""
    return convert(tiny_llama, tmp_path_factory.mktemp("pair") / "llama").base


@pytest.fixture(scope="session", autouse=True)
def interruptible() -> Iterator[None]:
    """A shell that starts the tests in the background makes them ignore Ctrl-C, which some of them send."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)
