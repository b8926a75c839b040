"""How much a model's output suffers from errors in each matrix, and types chosen by it within a budget of bits.

Noise of a tenth of the size of a matrix's products is added to them, one matrix at a time, and the KL divergence that
it causes is measured. To first order it grows with the noise's power, and what several matrices cause adds up, so
that the loss of a base is about the sum over matrices of sensitivity x relative error of the products.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from twofold import errors
from twofold._native import Floats
from twofold.blocks import GgmlType, check_finite, dequantize, ggml_type, quantize
from twofold.calibration import Calibration
from twofold.collector import Collector
from twofold.decoder import Decoder
from twofold.layout import Split

AMOUNT = 0.1
SAMPLED_ROWS = 64
CANDIDATES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q5_0", "q8_0")


# ---- measuring -------------------------------------------------------------------------------------


def measure(
    decoder: Decoder, collector: Collector, pieces: Sequence[Sequence[int]], names: Sequence[str], *, progress: bool
) -> dict[str, float]:
    """KL divergence (nats) that noise causes, for each matrix, over its power relative to the products.

    `pieces` are token lists, each decoded from an empty context.
    """
    with collector.disturbing("", 0.0):
        clean = [_log_softmax(logits) for logits in _logits(decoder, pieces)]
    found = {}
    for name in tqdm(names, desc="sensitivity", unit="matrices", disable=not progress):
        with collector.disturbing(name, AMOUNT):
            noisy = _logits(decoder, pieces)
            parts = [_divergence(c, _log_softmax(n)) for c, n in zip(clean, noisy, strict=True)]
        found[name] = max(0.0, float(np.concatenate(parts).mean())) / AMOUNT**2  # rounding may leave less than 0
    return found


def _logits(decoder: Decoder, pieces: Sequence[Sequence[int]]) -> Iterator[Floats]:
    for piece in pieces:
        decoder.truncate(0)
        decoder.decode(piece, 0, all_rows=True)
        yield np.stack([decoder.logits(row) for row in range(len(piece))])


def _log_softmax(logits: Floats) -> Floats:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64)), np.float32)


def _divergence(p: Floats, q: Floats) -> npt.NDArray[np.float64]:
    return np.asarray((np.exp(p) * (p - q)).sum(axis=1, dtype=np.float64))


# ---- choosing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Option:
    """A type for a matrix: bits of the whole matrix, and the loss it is expected to cause."""

    kind: str
    bits: float
    loss: float


def choose_types(
    splits: Sequence[Split], calibration: Calibration, bpw: float, candidates: Sequence[str] = CANDIDATES
) -> dict[str, str]:
    """Choose a type for each matrix so that the expected loss is least and the mean at most `bpw` bits a weight.

    Parameters
    ----------
    splits
        Those with a residual.
    calibration
        With sensitivities; without, equal relative errors count as equal losses.
    bpw
        Budget over all these matrices, in bits a weight.
    candidates
        Names of ggml types to choose from; a matrix gets one that divides its width and is smaller than its source.

    Returns
    -------
    dict
        Name of the type by the name of the tensor.

    Raises
    ------
    ArgumentError
        if the budget is below what the smallest candidates take, or no candidate fits a matrix.
    MismatchError
        if the calibration lacks sensitivities.
    NonFiniteError
        for NaN or infinity among the weights.
    """
    options = {s.base.name: _hull(_options(s, calibration, candidates)) for s in splits}
    weights = sum(s.source.weights for s in splits)
    budget = bpw * weights
    spent = sum(found[0].bits for found in options.values())
    if spent > budget:
        raise errors.ArgumentError(
            f"{bpw:g} bits a weight: the smallest of {', '.join(candidates)} that fit take {spent / weights:.3f}; "
            "raise the budget (--base-bpw) or name smaller types (--base-types iq2_xs,q2_k,...)"
        )
    return _spend(options, budget - spent)


def _spend(options: dict[str, list[Option]], left: float) -> dict[str, str]:
    """Go up from the smallest types, each time by the step that saves most for a bit."""
    place = dict.fromkeys(options, 0)
    steps = [(-_gain(found, 0), name) for name, found in options.items() if len(found) > 1]
    heapq.heapify(steps)
    while steps:
        _, name = heapq.heappop(steps)
        found, at = options[name], place[name]
        cost = found[at + 1].bits - found[at].bits
        if cost > left:
            continue  # a smaller matrix may still fit
        left, place[name] = left - cost, at + 1
        if at + 2 < len(found):
            heapq.heappush(steps, (-_gain(found, at + 1), name))
    return {name: options[name][at].kind for name, at in place.items()}


def _gain(options: Sequence[Option], at: int) -> float:
    """Loss saved by a bit when going from option `at` to the next."""
    return (options[at].loss - options[at + 1].loss) / (options[at + 1].bits - options[at].bits)


def _hull(options: list[Option]) -> list[Option]:
    """Options by bits, without those that lie above a mixture of others."""
    hull: list[Option] = []
    for option in sorted(options, key=lambda o: (o.bits, o.loss)):
        if hull and option.loss >= hull[-1].loss:
            continue
        while len(hull) > 1 and _gain([hull[-2], hull[-1]], 0) <= _gain([hull[-1], option], 0):
            hull.pop()
        hull.append(option)
    return hull


def _options(split: Split, calibration: Calibration, candidates: Sequence[str]) -> list[Option]:
    name, width, source = split.base.name, split.source.width, split.source.kind
    kinds = [kind for kind in map(ggml_type, candidates) if width % kind.block == 0 and kind.bpw < source.bpw]
    if not kinds:
        raise errors.ArgumentError(
            f"none of {', '.join(candidates)} fits {name}: width {width}, {source.bpw:.3g} bits a weight in its "
            "source; name a type that divides the width (--base-types q4_0,...: by 32) and is smaller than the source"
        )
    importance = calibration.mean_importance(name)
    scaled = np.ones(width, np.float32) if importance is None else importance
    sample, sensitivity = _sample(split), calibration.sensitivity_of(name)
    return [
        Option(kind.name, kind.bpw * split.source.weights, sensitivity * relative_loss(sample, kind, scaled))
        for kind in kinds
    ]


def relative_loss(weights: Floats, kind: GgmlType, importance: Floats) -> float:
    """Power of the error of the products over that of the products, inputs taken as uncorrelated."""
    error = weights - dequantize(quantize(weights, kind, importance), kind, weights.shape)
    return float((error**2 @ importance).sum() / max(float((weights**2 @ importance).sum()), 1e-30))


def _sample(split: Split) -> Floats:
    """Rows spread evenly over the matrix, and over its experts."""
    experts, rows, _ = split.matrix
    picked = np.linspace(0, experts * rows - 1, min(SAMPLED_ROWS, experts * rows)).astype(int)
    sample = np.concatenate([split.source.rows(int(row), int(row) + 1) for row in picked])
    check_finite(sample, split.source.name)
    return sample
