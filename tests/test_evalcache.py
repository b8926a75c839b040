"""twofold.evalcache: what is stored, and what is not trusted."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plain_formulas import log_softmax, random_logits
from twofold import errors, evalcache
from twofold.divergence import divergences, encode
from twofold.source import Source
from twofold.windows import Text

Patch = pytest.MonkeyPatch


KEY = {"mode": "exact", "ctx": 64, "reference": {"files": [["a", 1, 2]]}}


def blocks() -> list[tuple[np.ndarray, np.ndarray]]:
    return [(random_logits(n, 500, n), np.arange(n)) for n in (3, 5)]


def test_entries_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.logits"
    evalcache.write_entry(path, KEY, 8, 500, blocks())
    entry = evalcache.read_entry(path, KEY)
    assert entry is not None
    logits = np.concatenate([part for part, _ in blocks()])
    targets = np.concatenate([part for _, part in blocks()])
    np.testing.assert_array_equal(entry.codes, encode(logits)[0])
    np.testing.assert_array_equal(entry.top, logits.argmax(axis=1))
    np.testing.assert_allclose(entry.nll, -log_softmax(logits)[np.arange(8), targets].astype(np.float64), rtol=1e-9)
    np.testing.assert_array_equal(entry.floor, divergences(entry.codes, logits)[0])
    assert 0 < entry.floor.max() < 3e-8
    assert [item.name for item in path.parent.iterdir()] == ["a.logits"]


def test_entries_of_something_else_or_damaged_ones_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.logits"
    assert evalcache.read_entry(path, KEY) is None
    evalcache.write_entry(path, KEY, 8, 500, blocks())
    whole = path.read_bytes()
    assert evalcache.read_entry(path, KEY) is not None
    assert evalcache.read_entry(path, KEY | {"ctx": 65}) is None
    assert evalcache.read_entry(path, KEY | {"reference": {"files": [["a", 1, 3]]}}) is None
    for place in (0, 20, 40, 600, len(whole) - 30, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert evalcache.read_entry(path, KEY) is None, place
    for size in (0, 10, 18, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert evalcache.read_entry(path, KEY) is None, size
    path.write_bytes(whole + b"\0")
    assert evalcache.read_entry(path, KEY) is None
    path.write_bytes(whole)
    assert evalcache.read_entry(path, KEY) is not None


def test_keys_tell_everything_apart() -> None:
    text = Text("story", "digest", ((1, 2, 3), (4, 5)), 1)
    key = evalcache.entry_key({"content": "a"}, text, 64, 100)
    assert key == evalcache.entry_key({"content": "a"}, replace(text, kind="other"), 64, 100)
    others = [
        evalcache.entry_key({"content": "b"}, text, 64, 100),
        evalcache.entry_key({"content": "a"}, text, 65, 100),
    ]
    others.append(evalcache.entry_key({"content": "a"}, text, 64, 101))
    for changed in ({"digest": "x"}, {"windows": ((1, 2, 3), (4, 6))}, {"first": 2}):
        others.append(evalcache.entry_key({"content": "a"}, replace(text, **changed), 64, 100))
    paths = {evalcache.entry_path(Path("f"), Path("model.gguf"), text, each) for each in [key, *others]}
    assert len(paths) == 7
    assert all(path.name.startswith("model.story.") for path in paths)


def test_an_entry_that_is_not_finished_leaves_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    def stop() -> Any:
        yield blocks()[0]
        raise KeyboardInterrupt

    path = tmp_path / "a.logits"
    with pytest.raises(KeyboardInterrupt):
        evalcache.write_entry(path, KEY, 8, 500, stop())
    with pytest.raises(errors.DecodeError, match="3 rows of logits came instead of 8"):
        evalcache.write_entry(path, KEY, 8, 500, blocks()[:1])
    monkeypatch.setattr(evalcache.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(errors.FileAccessError, match="use less --tokens, free some space, or set TWOFOLD_CACHE"):
        evalcache.write_entry(path, KEY, 8, 500, blocks())
    assert list(tmp_path.iterdir()) == []


def test_models_are_told_apart_by_content_too(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama.read_bytes())
    before, about = evalcache.identity(path), path.stat()
    assert before == evalcache.identity(path)
    tensor = list(Source(path).tensors.values())[3]
    for place in (200, tensor.offset + 5):  # a key, a weight
        data = bytearray(tiny_llama.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        try:
            changed = evalcache.identity(path)
        except errors.FormatError:
            continue
        assert changed["files"] == before["files"]
        assert changed["content"] != before["content"]
    os.utime(path, ns=(1, 1))
    assert evalcache.identity(path)["files"] != before["files"]
