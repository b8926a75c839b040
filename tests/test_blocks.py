"""Weights and residual planes against gguf-py, against float64, and the kernels against their scalar twin."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from twofold import blocks, errors

RNG = np.random.default_rng(7)
BASES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q8_0")


def weights(rows: int, width: int, scale: float = 0.02) -> np.ndarray:
    return (RNG.standard_normal((rows, width)) * scale).astype(np.float32)


@pytest.mark.parametrize("name", ["q8_0", "q4_0", "q5_1", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "bf16", "f16"])
def test_dequantize_agrees_with_gguf_py(name: str) -> None:
    kind = blocks.ggml_type(name)
    data = blocks.quantize(weights(6, 512), kind)
    theirs = gguf.quants.dequantize(data.reshape(6, -1), gguf.GGMLQuantizationType[name.upper()])
    np.testing.assert_allclose(blocks.dequantize(data, kind, (6, 512)), theirs, rtol=1e-6, atol=1e-8)


def test_types_that_cannot_be_written_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="q2_k"):  # the message lists what is allowed
        blocks.ggml_type("q7_x")
    with pytest.raises(errors.UnsupportedError, match="q8_K"):
        blocks.quantize(weights(1, 256), blocks.ggml_type("q8_k"))
    with pytest.raises(errors.ArgumentError, match="importance matrix"):
        blocks.quantize(weights(1, 256), blocks.ggml_type("iq2_xs"))
    with pytest.raises(errors.ArgumentError, match="256"):
        blocks.quantize(weights(1, 320), blocks.ggml_type("q2_k"))


@pytest.mark.parametrize("bad", [weights(4, 64).astype(np.float64), weights(4, 128)[:, ::2], weights(4, 64).T])
def test_arrays_of_another_kind_are_refused(bad: np.ndarray) -> None:
    with pytest.raises(errors.ArgumentError, match="float32"):
        blocks.encode_residual(bad, 32, 8)


@pytest.mark.parametrize(("bits", "steps"), [(4, 15), (6, 63), (8, 255)])
def test_residual_is_within_half_a_step(bits: int, steps: int) -> None:
    residual = weights(17, 320)
    decoded = blocks.decode_residual(blocks.encode_residual(residual, 64, bits))
    largest = np.abs(residual).reshape(17, -1, 64).max(axis=2, keepdims=True)
    error = np.abs(decoded - residual).reshape(17, -1, 64)
    assert (error <= largest / steps * 1.01).all()  # half of a step of 2 * largest / steps, and float16's rounding


def test_low_planes_refine_the_same_codes() -> None:
    residual = weights(16, 256)
    planes = blocks.encode_residual(residual, 128, 8)
    errors_by_bits = [np.abs(blocks.decode_residual(planes, bits) - residual).mean() for bits in (4, 6, 8)]
    assert errors_by_bits[0] > 3.5 * errors_by_bits[1] > 12 * errors_by_bits[2]
    # Unbiased: a missing plane reads as the middle of what it can hold.
    mean = (blocks.decode_residual(planes, 6) - residual).mean()
    assert abs(mean) < 0.05 * errors_by_bits[1]


@pytest.mark.parametrize("bits", [0, 4, 6, 8])
@pytest.mark.parametrize("base", [None, *BASES])
@pytest.mark.parametrize("kernel", blocks.kernels()[1:])
def test_kernels_give_the_scalar_twins_bits(kernel: str, base: str | None, bits: int) -> None:
    if base is None and bits == 0:
        with pytest.raises(errors.ArgumentError):
            blocks.matmul(None, weights(1, 32))
        return
    rows, width = 35, 768
    x = weights(13, width, 1.0)
    x[3, 40] = 300.0  # an outlier: its block carries 16 bits
    residual = blocks.encode_residual(weights(rows, width), 128, 8) if bits else None
    matrix = None
    if base is not None:
        kind = blocks.ggml_type(base)
        matrix = blocks.BaseMatrix(kind, rows, width, blocks.quantize(weights(rows, width), kind))
    expected = blocks.matmul(residual, x, base=matrix, bits=bits or None, kernel="scalar")
    for threads in (1, 3):
        found = blocks.matmul(residual, x, base=matrix, bits=bits or None, kernel=kernel, threads=threads)
        np.testing.assert_array_equal(found, expected)
    one_by_one = [blocks.matmul(residual, x[j : j + 1], base=matrix, bits=bits or None) for j in range(len(x))]
    np.testing.assert_array_equal(np.concatenate(one_by_one), expected)


@pytest.mark.parametrize("base", BASES)
def test_products_are_close_to_float64(base: str) -> None:
    kind, rows, width = blocks.ggml_type(base), 64, 1024
    source, x = weights(rows, width), weights(8, width, 1.0)
    data = blocks.quantize(source, kind)
    whole = blocks.dequantize(data, kind, source.shape)
    residual = blocks.encode_residual(source - whole, 128, 8)
    product = blocks.matmul(residual, x, base=blocks.BaseMatrix(kind, rows, width, data))
    exact = x.astype(np.float64) @ (whole + blocks.decode_residual(residual)).T.astype(np.float64)
    assert np.linalg.norm(product - exact) / np.linalg.norm(exact) < 0.006
    alone = blocks.matmul(residual, x)
    exact = x.astype(np.float64) @ blocks.decode_residual(residual).T.astype(np.float64)
    assert np.linalg.norm(alone - exact) / np.linalg.norm(exact) < 0.006


@pytest.mark.parametrize("base", BASES)
def test_base_weights_are_ggmls(base: str) -> None:
    """One input at a time gives the weights themselves: nothing of them is rounded."""
    kind, rows, width = blocks.ggml_type(base), 35, 512
    source = weights(rows, width)
    source[7] *= 1000.0
    data = blocks.quantize(source, kind)
    whole = blocks.dequantize(data, kind, source.shape)
    product = blocks.matmul(None, np.eye(width, dtype=np.float32), base=blocks.BaseMatrix(kind, rows, width, data)).T
    largest = np.abs(whole).max(axis=1, keepdims=True)
    assert (np.abs(product - whole) <= 1e-6 * largest).all()  # float32's rounding; float16's would be 5e-4


def test_outliers_do_not_cost_accuracy() -> None:
    """One input 1000 times larger than the others would swallow them at 8 bits."""
    kind = blocks.ggml_type("q8_0")
    data = blocks.quantize(weights(32, 512), kind)
    x = weights(4, 512, 1.0)
    x[:, 100] = 1000.0
    product = blocks.matmul(None, x, base=blocks.BaseMatrix(kind, 32, 512, data))
    exact = x.astype(np.float64) @ blocks.dequantize(data, kind, (32, 512)).T.astype(np.float64)
    assert np.linalg.norm(product - exact) / np.linalg.norm(exact) < 0.0005


def test_kernel_can_be_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_KERNEL", "scalar")
    assert blocks.default_kernel() == "scalar"
    monkeypatch.setenv("TWOFOLD_KERNEL", "mmx")
    with pytest.raises(errors.ArgumentError, match="scalar"):
        blocks.matmul(blocks.encode_residual(weights(16, 32), 32, 4), weights(1, 32))


@pytest.mark.parametrize(("rows", "width", "group", "bits"), [(16, 40, 32, 8), (16, 64, 48, 8), (16, 64, 32, 5)])
def test_shapes_outside_the_format_are_refused(rows: int, width: int, group: int, bits: int) -> None:
    with pytest.raises(errors.ArgumentError):
        blocks.encode_residual(weights(rows, width), group, bits)
