"""twofold.merge: what it writes is the sum, in every type, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

import twofold
from make_tiny import write_tiny
from twofold import errors, output
from twofold.blocks import decode_residual, encode_residual, row_planes
from twofold.convert import convert
from twofold.merge import merge
from twofold.pairfile import open_pair, residual_path

TYPES = {"f32": "F32", "f16": "F16", "bf16": "BF16", "q8_0": "Q8_0"}


def read(path: Path) -> dict[str, gguf.ReaderTensor]:
    return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}


def values(tensor: gguf.ReaderTensor) -> np.ndarray:
    return gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(tensor.shape[::-1])


def sums(base: Path, bits: int | None = None) -> dict[str, np.ndarray]:
    """Base + residual by way of gguf-py and whole matrices."""
    tensors, pair, result = read(base), open_pair(base), {}
    for name, completed in pair.completed.items():
        residual = np.stack([decode_residual(planes, bits) for planes in completed.planes])
        whole = values(tensors[name])
        result[name] = whole + residual.reshape(whole.shape)
    return result


def keys(path: Path) -> dict[str, object]:
    fields = gguf.GGUFReader(path).fields
    return {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}


@pytest.mark.parametrize("kind", TYPES)
def test_merged_tensors_hold_the_sum(kind: str, tiny_pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged.gguf"
    done = merge(tiny_pair, out, type=kind)
    merged, expected = read(out), sums(tiny_pair)
    assert done.completed == len(expected) == 15
    assert done.copied == len(merged) - 15
    assert keys(out)["general.file_type"] == {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}[kind]
    for name, total in expected.items():
        assert merged[name].tensor_type.name == TYPES[kind]
        found = values(merged[name])
        if kind == "f32":
            np.testing.assert_array_equal(found, total)
        elif kind == "f16":
            np.testing.assert_array_equal(found, total.astype(np.float16).astype(np.float32))
        elif kind == "bf16":
            np.testing.assert_allclose(found, total, rtol=2**-8)
        else:
            expected_bytes = gguf.quants.quantize(total, gguf.GGMLQuantizationType.Q8_0)
            assert merged[name].data.tobytes() == expected_bytes.tobytes()


def test_merged_model_is_close_to_the_source(tiny_llama: Path, tiny_pair: Path, tmp_path: Path) -> None:
    merge(tiny_pair, tmp_path / "merged.gguf", type="f32")
    source = read(tiny_llama)
    for name, tensor in read(tmp_path / "merged.gguf").items():
        expected = values(source[name])
        assert np.linalg.norm(values(tensor) - expected) <= 0.005 * np.linalg.norm(expected), name


def test_other_tensors_and_keys_stay(tiny_pair: Path, tmp_path: Path) -> None:
    out = tmp_path / "merged.gguf"
    merge(tiny_pair, out)
    before, after, completed = read(tiny_pair), read(out), open_pair(tiny_pair).completed
    assert list(before) == list(after)
    for name in before.keys() - completed.keys():
        assert before[name].data.tobytes() == after[name].data.tobytes(), name
    was, now = keys(tiny_pair), keys(out)
    assert "twofold.format_version" in was
    assert {k for k in was if not k.startswith("twofold.")} == set(now)
    assert {k for k in now if now[k] != was[k]} == {"general.file_type"}


def test_experts_are_merged_each_with_its_own_residual(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe.gguf", "qwen3moe", layers=1)
    base = convert(tmp_path / "moe.gguf", tmp_path / "moe").base
    merge(base, tmp_path / "merged.gguf", type="f32")
    merged, expected = read(tmp_path / "merged.gguf"), sums(base)
    assert expected["blk.0.ffn_up_exps.weight"].shape == (8, 256, 256)
    for name, total in expected.items():
        np.testing.assert_array_equal(values(merged[name]), total)


def test_chunks_make_no_difference(tiny_pair: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    merge(tiny_pair, tmp_path / "whole.gguf")
    monkeypatch.setattr(output, "CHUNK_WEIGHTS", 48 * 256)
    assert len(list(output.row_chunks((1, 512, 256)))) > 10
    merge(tiny_pair, tmp_path / "chunks.gguf")
    assert (tmp_path / "whole.gguf").read_bytes() == (tmp_path / "chunks.gguf").read_bytes()


def test_row_planes_are_the_rows() -> None:
    residual = np.random.default_rng(1).standard_normal((40, 96), dtype=np.float32)
    planes = encode_residual(residual, 64, 6)
    np.testing.assert_array_equal(decode_residual(row_planes(planes, 16, 40)), decode_residual(planes)[16:40])
    np.testing.assert_array_equal(decode_residual(row_planes(planes, 32, 40), 4), decode_residual(planes, 4)[32:40])


def test_fewer_bits(tiny_pair: Path, tmp_path: Path) -> None:
    assert merge(tiny_pair, tmp_path / "merged.gguf", type="f32", bits=4).bits == 4
    merged = read(tmp_path / "merged.gguf")
    for name, total in sums(tiny_pair, 4).items():
        np.testing.assert_array_equal(values(merged[name]), total)


def test_bits_that_the_file_lacks_are_refused(tiny_llama: Path, tmp_path: Path) -> None:
    base = convert(tiny_llama, tmp_path / "six", bits=6).base
    with pytest.raises(errors.ArgumentError, match=r"residual bits 8: .*six.residual.gguf holds 6 bits, so 4, 6 can"):
        merge(base, tmp_path / "merged.gguf", bits=8)
    with pytest.raises(errors.ArgumentError, match="residual bits 5"):
        merge(base, tmp_path / "merged.gguf", bits=5)
    assert merge(base, tmp_path / "merged.gguf").bits == 6


def test_what_must_not_be_written_is_refused(tiny_pair: Path, tmp_path: Path) -> None:
    (tmp_path / "there.gguf").write_bytes(b"precious")
    with pytest.raises(errors.ArgumentError, match=r"there\.gguf: is already there"):
        merge(tiny_pair, tmp_path / "there.gguf")
    for path in (tiny_pair, residual_path(tiny_pair)):
        before = path.read_bytes()
        with pytest.raises(errors.ArgumentError, match="is the source itself"):
            merge(tiny_pair, path, force=True)
        assert path.read_bytes() == before
    with pytest.raises(errors.FileAccessError, match="nowhere: no such folder"):
        merge(tiny_pair, tmp_path / "nowhere" / "merged.gguf")
    with pytest.raises(errors.ArgumentError, match="type 'q4_0': one of f32, f16, q8_0, bf16"):
        merge(tiny_pair, tmp_path / "merged.gguf", type="q4_0")
    assert (tmp_path / "there.gguf").read_bytes() == b"precious"
    merge(tiny_pair, tmp_path / "there.gguf", force=True)
    assert (tmp_path / "there.gguf").read_bytes()[:4] == b"GGUF"


def test_a_weight_too_large_for_f16_is_refused(tmp_path: Path) -> None:
    write_tiny(tmp_path / "large.gguf", "llama", layers=1)
    tensor = read(tmp_path / "large.gguf")["blk.0.ffn_up.weight"]
    patched = np.memmap(tmp_path / "large.gguf", np.uint8, "r+")
    patched[tensor.data_offset : tensor.data_offset + 4] = np.frombuffer(np.float32(1e5).tobytes(), np.uint8)
    patched.flush()
    base = convert(tmp_path / "large.gguf", tmp_path / "large").base
    with pytest.raises(errors.NonFiniteError, match=r"blk\.0\.ffn_up\.weight: .* use bf16 or f32"):
        merge(base, tmp_path / "merged.gguf", type="f16")
    assert {path.name for path in tmp_path.iterdir()} == {"large.gguf", "large.base.gguf", "large.residual.gguf"}
    merge(base, tmp_path / "merged.gguf", type="bf16")


def test_stock_llama_cpp_runs_it_as_the_pair_verifies(tiny_pair: Path, tmp_path: Path) -> None:
    merge(tiny_pair, tmp_path / "merged.gguf", type="f32")
    tokens = list(range(260, 300))
    stock = llama_cpp.Llama(str(tmp_path / "merged.gguf"), n_ctx=256, verbose=False, logits_all=True)
    pair = twofold.Llama(tiny_pair, n_ctx=256, verbose=False, logits_all=True)
    try:
        stock.eval(tokens)
        pair.eval(tokens)
        expected, found = stock.scores[: len(tokens)], pair.scores[: len(tokens)]
        assert np.linalg.norm(found - expected) < 0.05 * np.linalg.norm(expected)
    finally:
        stock.close()
        pair.close()
