"""Error feedback against a slow reference, and against no feedback."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from twofold import blocks, errors
from twofold.blocks import decode_residual, dequantize, encode_residual, ggml_type, quantize
from twofold.feedback import Factor, round_base, round_residual

RNG = np.random.default_rng(11)
DAMPING = 0.5
OUTERMOST = {4: 120.0, 6: 126.0, 8: 127.5}  # in 1/128 of the scale


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1, "blas"):  # such small products take longer with more
        yield


def weights(rows: int, width: int) -> np.ndarray:
    return (RNG.standard_normal((rows, width)) * 0.02).astype(np.float32)


def correlated(blocks: int, width: int) -> np.ndarray:
    """Second moments of inputs that a few directions make most of, float32 ``(blocks, width, width)``."""
    parts = []
    for _ in range(blocks):
        x = RNG.standard_normal((4 * width, width)) * 0.3 + RNG.standard_normal((4 * width, 8)) @ RNG.standard_normal(
            (8, width)
        )
        parts.append(x.T @ x)
    return np.stack(parts).astype(np.float32)


def ordered(moments: np.ndarray) -> Factor:
    """As residuals are rounded."""
    return Factor(moments, DAMPING, largest_first=True)


def identity(width: int, blocks: int = 1) -> np.ndarray:
    return np.stack([np.eye(width, dtype=np.float32)] * blocks)


def lost(error: np.ndarray, moments: np.ndarray) -> float:
    """trace(E H E^T) over blocks along the diagonal."""
    parts = np.split(error.astype(np.float64), len(moments), axis=1)
    return float(sum(np.trace(e @ h.astype(np.float64) @ e.T) for e, h in zip(parts, moments, strict=True)))


# ---- the reference: no factors, one column after the other ------------------------------------------------


def best_rest(values: np.ndarray, error: np.ndarray, moments: np.ndarray, first: int, last: int) -> None:
    """Change the columns from `last` on so that, with `error` in columns first to last, the loss is least.

    Least over d of (e, d) H (e, d)^T over the columns from `first` on: d = -e H_eR H_RR^-1.
    """
    rest = slice(last, len(moments))
    if last < len(moments):
        values[:, rest] -= error @ moments[first:last, rest] @ np.linalg.inv(moments[rest, rest])


def damped(moments: np.ndarray) -> np.ndarray:
    wide = moments.astype(np.float64)
    return wide + DAMPING * np.diagonal(wide).mean() * np.eye(len(wide))


def plain_column(column: np.ndarray, scale: np.ndarray, bits: int) -> np.ndarray:
    """Nearest value below and above on the grid of `bits`, the one of the interval that holds the weight."""
    step = 2 ** (8 - bits)
    code = np.clip(np.floor(column / scale * 128) + 128, 0, 255) // step * step
    return scale / 128 * (code + (step / 2 if bits < 8 else 0.5) - 128)


def reference_residual(residual: np.ndarray, group: int, bits: int, moments: np.ndarray) -> np.ndarray:
    """What is decoded; `moments` is one block. Columns with large inputs come first, and all later ones are made anew.

    `values - error` of a column is what was rounded, so that error is what must be made up for: with it goes the part
    that feedback moved from earlier columns to this one, already counted there.
    """
    width = residual.shape[1]
    order = np.argsort(-np.diagonal(moments))
    wide = damped(moments)[np.ix_(order, order)]
    largest = [np.abs(residual[:, first : first + group]).max(axis=1) for first in range(0, width, group)]
    scales = (np.stack(largest, 1) * 128 / OUTERMOST[bits]).astype(np.float16).astype(np.float64)
    values, rounded = residual[:, order].astype(np.float64), np.zeros(residual.shape)
    for i, column in enumerate(order):
        rounded[:, column] = plain_column(values[:, i], scales[:, column // group], bits)
        # values hold the best target given all before; the best rest goes by this column's distance from it
        best_rest(values, rounded[:, [column]] - values[:, [i]], wide, i, i + 1)
    return rounded


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_residual_is_that_of_the_slow_reference(bits: int) -> None:
    residual, moments = weights(5, 96), correlated(1, 96)
    decoded = decode_residual(round_residual(residual, 64, bits, ordered(moments)))
    expected = reference_residual(residual, 64, bits, moments[0])
    step = np.abs(residual).max() / 2 ** (bits - 1)
    # float32 may put a value on the other side of a border between two codes, after which a row goes its own way
    same = np.abs(decoded - expected).max(axis=1) < 0.02 * step
    assert same.sum() >= 4
    assert lost(decoded - residual, moments) == pytest.approx(lost(expected - residual, moments), rel=0.05)


def test_base_is_that_of_the_slow_reference() -> None:
    kind, w, moments = ggml_type("q4_0"), weights(6, 128), correlated(1, 128)
    importance = np.diagonal(moments[0]).copy()
    data, rounded = round_base(w, kind, importance, Factor(moments, DAMPING))
    np.testing.assert_array_equal(dequantize(data.reshape(-1), kind, w.shape), rounded)
    values, expected, wide = w.astype(np.float64), np.zeros_like(w), damped(moments[0])
    for first in range(0, 128, 32):
        part = np.ascontiguousarray(values[:, first : first + 32], np.float32)
        expected[:, first : first + 32] = dequantize(
            quantize(part, kind, importance[first : first + 32].copy()), kind, part.shape
        )
        best_rest(values, expected[:, first : first + 32] - values[:, first : first + 32], wide, first, first + 32)
    np.testing.assert_allclose(rounded, expected, atol=0.05 * np.abs(w).max() / 8)


# ---- with inputs that say nothing, there is nothing to make up for ----------------------------------------


@pytest.mark.parametrize(("group", "bits"), [(64, 8), (128, 6), (96, 4)])
def test_uncorrelated_inputs_give_the_plain_residual(group: int, bits: int) -> None:
    residual = weights(19, 288)
    plain, fed = encode_residual(residual, group, bits), round_residual(residual, group, bits, ordered(identity(288)))
    assert plain.parts().keys() == fed.parts().keys()
    for name, part in plain.parts().items():
        np.testing.assert_array_equal(part, fed.parts()[name], name)


@pytest.mark.parametrize("name", ["q2_k", "q3_k", "q4_k", "q6_k", "iq4_xs", "q8_0"])
def test_uncorrelated_inputs_give_the_plain_base(name: str) -> None:
    kind, w = ggml_type(name), weights(4, 512)
    importance = RNG.random(512).astype(np.float32) + 0.1
    data, rounded = round_base(w, kind, importance, Factor(identity(256, 2), DAMPING))
    np.testing.assert_array_equal(data.reshape(-1), quantize(w, kind, importance))
    np.testing.assert_array_equal(rounded, dequantize(data.reshape(-1), kind, w.shape))


# ---- with inputs that go together, less is lost -----------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 6, 8])
@pytest.mark.parametrize("blocks", [1, 2])
def test_residual_loses_less(bits: int, blocks: int) -> None:
    residual, moments = weights(16, 256), correlated(blocks, 256 // blocks)
    fed = lost(decode_residual(round_residual(residual, 64, bits, ordered(moments))) - residual, moments)
    plain = lost(decode_residual(encode_residual(residual, 64, bits)) - residual, moments)
    assert fed < 0.5 * plain


@pytest.mark.parametrize("name", ["q2_k", "q4_0"])
def test_base_loses_less(name: str) -> None:
    kind, w, moments = ggml_type(name), weights(16, 512), correlated(1, 512)
    importance = np.diagonal(moments[0]).copy()
    fed = lost(round_base(w, kind, importance, Factor(moments, DAMPING))[1] - w, moments)
    plain = lost(dequantize(quantize(w, kind, importance), kind, w.shape) - w, moments)
    assert fed < 0.6 * plain


def test_blocks_along_the_diagonal_are_apart() -> None:
    """A block is rounded as if it were alone."""
    residual, moments = weights(16, 256), correlated(2, 128)
    both = decode_residual(round_residual(residual, 64, 6, ordered(moments)))
    for i in range(2):
        part = np.ascontiguousarray(residual[:, i * 128 : (i + 1) * 128])
        alone = decode_residual(round_residual(part, 64, 6, ordered(moments[i : i + 1])))
        np.testing.assert_array_equal(both[:, i * 128 : (i + 1) * 128], alone)


def test_columns_with_large_inputs_come_first() -> None:
    """Within their block; that way less is lost than from left to right."""
    residual, moments = weights(64, 256), correlated(2, 128)
    sizes = np.geomspace(1, 30, 128)
    RNG.shuffle(sizes)
    moments *= sizes[:, None] * sizes
    factor = ordered(moments)
    for i, part in enumerate(np.split(factor.order, 2)):
        assert sorted(part) == list(range(i * 128, i * 128 + 128))
        assert (np.diff(np.diagonal(moments[i])[part - i * 128]) <= 0).all()
    kept = lost(decode_residual(round_residual(residual, 64, 6, factor)) - residual, moments)
    left_to_right = Factor(moments, DAMPING)
    np.testing.assert_array_equal(left_to_right.order, np.arange(256))
    assert kept < 0.8 * lost(decode_residual(round_residual(residual, 64, 6, left_to_right)) - residual, moments)


def test_pieces_cross_no_border() -> None:
    assert Factor(identity(96, 2), DAMPING).pieces(64) == [(0, 64), (64, 96), (96, 128), (128, 192)]
    assert Factor(identity(96), DAMPING).pieces(64) == [(0, 64), (64, 96)]
    assert Factor(identity(64, 2), DAMPING).pieces(32) == [(0, 32), (32, 64), (64, 96), (96, 128)]


def test_dead_inputs_survive() -> None:
    moments = correlated(1, 256)
    moments[:, :, 64:192] = moments[:, 64:192] = 0
    residual = weights(16, 256)
    decoded = decode_residual(round_residual(residual, 64, 8, ordered(moments)))
    assert np.abs(decoded - residual).max() < 0.05 * np.abs(residual).max()
    nothing = np.zeros((1, 256, 256), np.float32)
    for name, part in round_residual(residual, 64, 8, ordered(nothing)).parts().items():
        np.testing.assert_array_equal(part, encode_residual(residual, 64, 8).parts()[name])


@pytest.mark.parametrize("damage", [np.nan, np.inf, -1e11])
def test_damaged_moments_are_refused(damage: float) -> None:
    moments = identity(64)
    moments[0, 3, 3] = damage
    moments[0, 0, 0] = 1e12
    with pytest.raises(ValueError, match=r"finite|positive"):
        Factor(moments, DAMPING)


def test_bits_outside_the_format_are_refused() -> None:
    with pytest.raises(errors.ArgumentError, match="bits 5"):
        round_residual(weights(1, 64), 64, 5, ordered(identity(64)))
    with pytest.raises(errors.ArgumentError, match="group 48"):
        blocks.Rounder(weights(1, 96), 48, 8, np.arange(96))
