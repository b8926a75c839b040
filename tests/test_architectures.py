"""The matrix of architectures: a few of its rows, and that it sees what is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest

import architectures
from arch_keys import NAMES
from architectures import Row, try_one
from tiny_archs import write
from twofold import errors, layout
from twofold.architecture import check_architecture
from twofold.convert import convert
from twofold.source import Source

# Latent attention; sliding windows with shared and per-layer inputs; a head that must be the embedding; attention that
# has sinks beside experts; a state with attention; two of those that are no language models by themselves.
ROWS = {"deepseek2": "works", "gemma4": "works", "gemma2": "works", "gpt-oss": "works", "granitehybrid": "works"}
ROWS |= {"bert": "refused", "plm": "refused"}


@pytest.mark.parametrize(("arch", "outcome"), ROWS.items())
def test_rows(arch: str, outcome: str, tmp_path: Path) -> None:
    row = try_one(arch, tmp_path)
    assert (row.arch, row.outcome) == (arch, outcome)
    if outcome == "refused":
        assert f"architecture {arch} is not supported" in row.message and row.kld_full is None
    else:
        assert row.kld_full is not None and row.kld_base is not None
        assert 0 < row.kld_full < 0.01 < row.kld_base
        assert row.accepted is not None and 0 < row.accepted < 1


def test_what_is_wrong_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = architectures.twofold.Llama

    class Worse(real):  # type: ignore[misc, valid-type]
        """Verifies with four bits, which is too far from the merged model."""

        def __init__(self, *arguments: Any, **settings: Any) -> None:
            super().__init__(*arguments, residual_bits=4, **settings)

    monkeypatch.setattr(architectures.twofold, "Llama", Worse)
    row = try_one("llama", tmp_path)
    assert row.outcome == "wrong" and "nats from the merged model" in row.message
    monkeypatch.undo()
    monkeypatch.setattr(architectures, "greedy", lambda llm, draft: ([draft] * 64, [1.0] * 64))
    (tmp_path / "more").mkdir()
    row = try_one("llama", tmp_path / "more")
    assert row.outcome == "wrong" and "parts from plain text at token 0" in row.message


def test_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    files = [tmp_path / "rows.json", tmp_path / "table.md"]
    command = ["architectures.py", "--only", "clip|mamba", "--json", str(files[0]), "--markdown", str(files[1])]
    monkeypatch.setattr("sys.argv", command)
    assert architectures.main() == 0
    rows = json.loads(files[0].read_text())["rows"]
    assert [(row["arch"], row["outcome"]) for row in rows] == [("clip", "refused"), ("mamba", "works")]
    assert "| mamba | works |" in files[1].read_text() and "1 works, 1 refused, 0 wrong" in capsys.readouterr().out
    monkeypatch.setattr(architectures, "in_child", lambda arch: Row(arch, "wrong", "on purpose"))
    assert architectures.main() == 1


def test_the_child_that_dies_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(architectures.sys, "executable", "/bin/false")
    row = architectures.in_child("llama")
    assert row.outcome == "wrong" and "ended with 1" in row.message


def test_every_architecture_of_llama_cpp_is_listed() -> None:
    """Names that gguf knows and the library contains: an architecture that a newer llama.cpp brings must be tried."""
    known = set(gguf.MODEL_ARCH_NAMES.values()) - {"mmproj"}
    library = (Path(architectures.llama_cpp.__file__).parent / "lib" / "libllama.so").read_bytes()
    missing = {name for name in known if f"\0{name}\0".encode() in library} - set(NAMES)
    assert not missing and len(NAMES) == len(set(NAMES)) > 140


def test_matrices_outside_the_main_graph_stay_whole(tmp_path: Path) -> None:
    write(tmp_path / "gemma4.gguf", "gemma4")
    splits = {split.base.name: split for split in layout.plan(Source(tmp_path / "gemma4.gguf"), "auto")}
    # Layers 4 and 5 use the keys and values of layers 2 and 3.
    assert splits["blk.3.attn_k.weight"].residual and splits["blk.4.attn_q.weight"].residual
    for name in ("blk.4.attn_k.weight", "blk.5.attn_v.weight"):
        assert splits[name].reason == "not in the main graph"


def test_head_that_is_the_embedding(tmp_path: Path) -> None:
    found = write(tmp_path / "cohere2.gguf", "cohere2")
    assert "output.weight" not in found
    assert "output.weight" not in Source(convert(tmp_path / "cohere2.gguf", tmp_path / "c").base).tensors


def test_names_that_contain_embed(tmp_path: Path) -> None:
    """pangu-embedded is for small devices; llama-embed makes embeddings."""
    for arch in ("pangu-embedded", "llama-embed"):
        architectures.header_only(tmp_path / f"{arch}.gguf", arch)
    check_architecture(tmp_path / "pangu-embedded.gguf")
    with pytest.raises(errors.UnsupportedError, match="embeddings"):
        check_architecture(tmp_path / "llama-embed.gguf")
