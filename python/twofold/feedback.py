"""Error feedback: what rounding loses in some columns is made up for in the columns not rounded yet.

With H the second moments of a matrix's inputs, what a matrix W loses in its outputs when it becomes Q is the trace of
(W - Q) H (W - Q)^T. Once some columns of Q are fixed, the best that the others can still do is known from the factor U
of the inverse, H^-1 = U^T U (Hassibi & Stork 1993; Frantar et al. 2022, arXiv:2210.17323, section 3).
"""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

from twofold._native import Bytes, Floats
from twofold.blocks import GgmlType, Order, Planes, Rounder, dequantize, quantize

# Shares of the mean square that are added to each input's own: more trusts a short calibration less and, in the base,
# keeps the residual small. Up to here drafts lose nothing on texts other than the calibration's (docs/log.md).
BASE_DAMPING, RESIDUAL_DAMPING = 1.0, 0.5
_PIECE = 128  # columns after which losses are spread over all later ones at once


class Factor:
    """Upper factors of the inverse second moments, one for each block along the diagonal.

    Attributes
    ----------
    block
        width of the blocks.
    order
        int64 ``(width,)``, the columns in the order in which they are rounded: block by block.
    """

    def __init__(self, moments: Floats, damping: float, *, largest_first: bool = False) -> None:
        """Take float32 ``(blocks, block, block)``; sums will do, their scale does not matter.

        With `largest_first`, columns with the largest inputs come first within a block: many are left then to make up
        for what these lose (as "act-order" does in Frantar et al.'s program).

        Raises
        ------
        ValueError
            if they are not finite, or no second moments of anything.
        """
        self.block = moments.shape[1]
        orders = [_order(part, largest_first) for part in moments]
        self.order: Order = np.concatenate([i * self.block + order for i, order in enumerate(orders)])
        pairs = zip(moments, orders, strict=True)
        self._upper = [_upper_factor(part[np.ix_(order, order)], damping) for part, order in pairs]

    def spread(self, values: Floats, first: int, last: int, lost: Floats) -> None:
        """Make up in the later columns of `values` for what `first` to `last` lost (in units of the diagonal)."""
        upper, start = self._of(first)
        end = start + self.block
        if last < end:
            values[:, last:end] -= lost @ upper[first - start : last - start, last - start :]

    def corner(self, first: int, last: int) -> Floats:
        """Return the factor of columns `first` to `last` alone, float32 ``(n, n)``."""
        upper, start = self._of(first)
        return np.ascontiguousarray(upper[first - start : last - start, first - start : last - start])

    def pieces(self, step: int) -> list[tuple[int, int]]:
        """Return ``(first, last)`` of pieces of at most `step` columns that cross no block's border."""
        width = self.block * len(self._upper)
        edges = sorted({*range(0, width, step), *range(0, width, self.block), width})
        return list(itertools.pairwise(edges))

    def _of(self, column: int) -> tuple[Floats, int]:
        index = column // self.block
        return self._upper[index], index * self.block


def _order(moments: Floats, largest_first: bool) -> Order:
    return np.argsort(-np.diagonal(moments), kind="stable") if largest_first else np.arange(len(moments))


def _upper_factor(moments: Floats, damping: float) -> Floats:
    """Upper U with U^T U the inverse: where H = R R^T with R upper, U = R^-1; ValueError if there is none."""
    if not np.isfinite(moments).all():
        raise ValueError("not finite")
    damped = moments.astype(np.float64)
    mean = float(np.diagonal(damped).mean())
    damped[np.diag_indices_from(damped)] += damping * mean if mean > 0 else 1.0
    try:
        reversed_factor = np.linalg.cholesky(damped[::-1, ::-1])
    except np.linalg.LinAlgError as error:
        raise ValueError(str(error)) from error
    return np.asarray(_inverse_of_upper(np.ascontiguousarray(reversed_factor[::-1, ::-1])), np.float32)


def _inverse_of_upper(upper: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Invert by halves: a third of the work of a general inverse, all of it in matrix products."""
    n = len(upper)
    if n <= 128:
        return np.asarray(np.linalg.inv(upper), np.float64)
    half = n // 2
    out = np.zeros_like(upper)
    out[:half, :half] = _inverse_of_upper(upper[:half, :half])
    out[half:, half:] = _inverse_of_upper(upper[half:, half:])
    out[:half, half:] = -(out[:half, :half] @ upper[:half, half:]) @ out[half:, half:]
    return out


def round_base(weights: Floats, kind: GgmlType, importance: Floats, factor: Factor) -> tuple[Bytes, Floats]:
    """Quantize block by block of `kind`, with feedback from each block to the later ones.

    Parameters
    ----------
    weights
        float32 ``(rows, width)``.
    kind
        ggml type of the base; its quantizer decides within a block.
    importance
        float32 ``(width,)``, mean squares of the inputs.
    factor
        Of the inputs' second moments, in the order of the columns.

    Returns
    -------
    blocks : uint8 ``(rows, bytes of a row)``
    rounded : float32 ``(rows, width)``
        what they stand for.
    """
    values, rounded = weights.copy(), np.empty_like(weights)
    blocks = np.empty((weights.shape[0], kind.row_bytes(weights.shape[1])), np.uint8)
    for first, last in factor.pieces(kind.block):
        part = np.ascontiguousarray(values[:, first:last])
        made = quantize(part, kind, np.ascontiguousarray(importance[first:last]))
        blocks[:, kind.row_bytes(first) : kind.row_bytes(last)] = made.reshape(len(part), -1)
        rounded[:, first:last] = dequantize(made, kind, part.shape)
        corner = np.linalg.inv(factor.corner(first, last).astype(np.float64)).astype(np.float32)
        factor.spread(values, first, last, (part - rounded[:, first:last]) @ corner)
    return blocks, rounded


def round_residual(residual: Floats, group: int, bits: int, factor: Factor) -> Planes:
    """Encode float32 ``(rows, width)``, with feedback from each column to the later ones.

    Raises
    ------
    ArgumentError
        if bits or group are not ones the format allows.
    """
    rounder = Rounder(residual, group, bits, factor.order)
    for first, last in factor.pieces(_PIECE):
        factor.spread(rounder.values, first, last, rounder.round(first, last, factor.corner(first, last)))
    return rounder.planes()
