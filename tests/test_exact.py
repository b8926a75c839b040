"""twofold.exact: float32 copies hold the weights, and do not stay."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest

from make_tiny import write_tiny
from twofold import errors, exact, output
from twofold.blocks import decode_residual
from twofold.convert import convert
from twofold.merge import merge
from twofold.pairfile import open_pair

Patch = pytest.MonkeyPatch


def values(path: Path) -> dict[str, np.ndarray]:
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        found[tensor.name] = np.array(tensor.data)
    return found


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_float32_copies_hold_the_weights(bits: int, tmp_path: Path, monkeypatch: Patch) -> None:
    write_tiny(tmp_path / "half.gguf", "llama", layers=1, file_type="f16", tied=True)
    pair = open_pair(convert(tmp_path / "half.gguf", tmp_path / "half", base_type="q4_0").base)
    monkeypatch.setattr(output, "CHUNK_WEIGHTS", 48 * 256)
    with exact.float32_file(pair.base, tmp_path / "scratch", pair=pair, bits=bits) as copy:
        found = values(copy)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert "output.weight" in found
    for tensor in gguf.GGUFReader(pair.base).tensors:
        whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if bits and tensor.name in pair.completed:
            whole = whole + decode_residual(pair.completed[tensor.name].planes[0], bits)
        np.testing.assert_array_equal(found[tensor.name], whole)


def test_experts_get_their_own_residual(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe.gguf", "qwen3moe", layers=1)
    pair = open_pair(convert(tmp_path / "moe.gguf", tmp_path / "moe").base)
    merged = values(merge(pair.base, tmp_path / "merged.gguf", type="f32").path)
    with exact.float32_file(pair.base, tmp_path, pair=pair, bits=8) as copy:
        found = values(copy)
    assert list(found) == list(merged)
    for name, expected in merged.items():
        np.testing.assert_array_equal(found[name], expected)


def test_a_float32_model_needs_no_copy(tiny_llama: Path, tmp_path: Path) -> None:
    with exact.float32_file(tiny_llama, tmp_path / "scratch") as copy:
        assert copy == tiny_llama
    assert not (tmp_path / "scratch").exists()


def test_no_room_for_a_copy(tiny_pair: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage)
    with (
        pytest.raises(errors.FileAccessError, match=r"cannot write .*0\.00 GB free.*folder with --scratch"),
        exact.float32_file(tiny_pair, tmp_path / "scratch"),
    ):
        pass
    assert list((tmp_path / "scratch").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.FileAccessError, match="--scratch"), exact.float32_file(tiny_pair, tmp_path / "file"):
        pass
