"""Residuals that are missing, damaged, foreign or of another version are refused with a message that helps."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

import twofold
from make_tiny import write_tiny
from twofold import errors
from twofold.convert import convert
from twofold.pairfile import base_path, open_pair, residual_bytes, residual_path


@pytest.fixture
def pair(tiny_llama: Path, tmp_path: Path) -> Path:
    return convert(tiny_llama, tmp_path / "m").base


def test_names() -> None:
    assert base_path(Path("a/m")) == base_path(Path("a/m.residual.gguf")) == Path("a/m.base.gguf")
    assert residual_path(Path("a/m.base.gguf")) == residual_path(Path("a/m.gguf")) == Path("a/m.residual.gguf")


def test_residual_bytes(pair: Path) -> None:
    tensor = open_pair(pair).completed["blk.0.ffn_up.weight"]
    weights = tensor.shape[1] * tensor.shape[2]
    assert [residual_bytes(tensor, bits) for bits in (4, 6, 8)] == [weights * (bits + 0.125) / 8 for bits in (4, 6, 8)]


def test_planes_outlive_the_pair(pair: Path) -> None:
    planes = open_pair(pair).completed["output.weight"].planes[0]
    assert int(planes.plane4.astype(int).sum()) > 0  # the mapping is still there


def test_missing(pair: Path) -> None:
    residual_path(pair).unlink()
    with pytest.raises(errors.FileAccessError, match=r"m\.residual\.gguf: the residual of .*m\.base\.gguf is missing"):
        twofold.Llama(pair)
    llm = twofold.Llama(pair, residual_bits=0, n_ctx=64, verbose=False)  # the base alone needs none
    assert len(list(llm.create_completion("the", max_tokens=4)["choices"][0]["text"])) > 0
    with pytest.raises(errors.ArgumentError, match="without its residual"):
        llm.residual_bits = 8


def test_truncated(pair: Path) -> None:
    data = residual_path(pair).read_bytes()
    for size in (0, 3, 100, 5000, len(data) // 2, len(data) - 1000):
        residual_path(pair).write_bytes(data[:size])
        with pytest.raises(errors.FormatError, match=r"m\.residual\.gguf"):
            open_pair(pair)


def test_truncated_base(pair: Path) -> None:
    pair.write_bytes(pair.read_bytes()[:400_000])
    with pytest.raises(errors.FormatError, match=r"m\.base\.gguf: truncated"):
        open_pair(pair)


def test_foreign(pair: Path, tiny_llama: Path) -> None:
    residual_path(pair).write_bytes(tiny_llama.read_bytes())
    with pytest.raises(errors.FormatError, match="not a twofold residual"):
        open_pair(pair)
    residual_path(pair).write_text("hello")
    with pytest.raises(errors.FormatError, match="not a GGUF"):
        open_pair(pair)


def test_of_another_base(pair: Path, tmp_path: Path) -> None:
    """The same model, one weight type apart, and the same shapes with other weights."""
    write_tiny(tmp_path / "other.gguf", "llama", seed=1)
    for number, base_type in enumerate(["q2_k", "q3_k"]):
        other = convert(tmp_path / "other.gguf", tmp_path / f"other{number}", base_type=base_type)
        with pytest.raises(errors.MismatchError) as caught:
            twofold.Llama(pair, residual_path=other.residual)
        assert "m.base.gguf" in str(caught.value) and f"other{number}.residual.gguf" in str(caught.value)
        assert base_type.upper() in str(caught.value).upper() and "fingerprint" in str(caught.value)


def test_another_version(pair: Path) -> None:
    data = bytearray(residual_path(pair).read_bytes())
    at = data.index(b"twofold.format_version") + len(b"twofold.format_version")
    assert struct.unpack_from("<II", data, at) == (4, 1)  # a 32-bit integer, 1
    struct.pack_into("<I", data, at + 4, 99)
    residual_path(pair).write_bytes(data)
    with pytest.raises(errors.FormatVersionError, match=r"version 99, but this twofold reads version 1"):
        open_pair(pair)
