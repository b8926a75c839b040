"""Times of products: what is timed, and what cannot be. How long it takes is for benchmarks."""

from __future__ import annotations

import numpy as np
import pytest

from twofold import blocks, errors, timing

ROWS, WIDTH = 48, 512


def residual(rows: int = ROWS) -> blocks.Planes:
    return blocks.encode_residual(np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32), 128, 8)


def base(kind: str = "q2_k", rows: int = ROWS) -> blocks.BaseMatrix:
    of = blocks.ggml_type(kind)
    weights = np.random.default_rng(1).standard_normal((rows, WIDTH), np.float32)
    return blocks.BaseMatrix(of, rows, WIDTH, blocks.quantize(weights, of))


@pytest.mark.parametrize(("residuals", "bases"), [(2, 0), (0, 2), (2, 2)])
def test_residual_base_or_both(residuals: int, bases: int) -> None:
    x = np.ones((9, WIDTH), np.float32)
    seconds = timing.time_matmul([residual()] * residuals, x, bases=[base()] * bases, bits=6, threads=1, repeats=5)
    assert seconds.shape == (5,)
    assert (seconds > 0).all()
    assert (seconds < 10).all()


def test_what_does_not_fit_is_refused() -> None:
    x = np.ones((1, WIDTH), np.float32)
    for residuals, bases in [([], []), ([residual()], [base()] * 2), ([residual()], [base(rows=64)])]:
        with pytest.raises(errors.ArgumentError, match=r"as many of each, or none, of one shape"):
            timing.time_matmul(residuals, x, bases=bases, threads=1, repeats=1)
    with pytest.raises(errors.ArgumentError, match="does not fit"):
        timing.time_matmul([residual()], x[:, 1:], threads=1, repeats=1)
    with pytest.raises(errors.ArgumentError, match="no_such"):
        timing.time_matmul([residual()], x, threads=1, repeats=1, kernel="no_such")
    with pytest.raises(errors.ArgumentError, match="repeats are needed"):
        timing.time_matmul([residual()], x, threads=1, repeats=0)
