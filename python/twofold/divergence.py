"""How far a model's next-token distribution is from a reference's: stored codes, divergences, statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from twofold import errors
from twofold._native import Floats

Codes: TypeAlias = npt.NDArray[np.uint16]
Doubles: TypeAlias = npt.NDArray[np.float64]
Integers: TypeAlias = npt.NDArray[np.int64]

RANGE = 32.0  # nats below certainty that a code reaches; what is less likely has probability 0
STEP = RANGE / 65535
BLOCK_ROWS = 32
RESAMPLES = 2000
INTERVAL_METHOD = (
    f"95% percentile interval of the mean by a circular moving-block bootstrap: blocks of {BLOCK_ROWS} consecutive "
    f"scored tokens (a quarter of a text's, if that is less), drawn within each text, {RESAMPLES} resamples. It covers "
    "the tokens of these texts, not the choice of the texts"
)
_PROBABILITY = np.exp(-STEP * np.arange(65536))
_PROBABILITY[65535] = 0.0


def encode(logits: Floats) -> tuple[Codes, Doubles]:
    """Store distributions as 16-bit steps of ``-log p``.

    Parameters
    ----------
    logits
        float32 ``(rows, vocab)``.

    Returns
    -------
    codes, log_sum
        uint16 ``(rows, vocab)`` in steps of ``STEP`` nats, and the logarithm of each row's sum of exponentials.

    Raises
    ------
    NonFiniteError
        for NaN or infinity among the logits.
    """
    codes = np.empty(logits.shape, np.uint16)
    sums = np.empty(len(logits))
    shifted, work = np.empty(logits.shape[1]), np.empty(logits.shape[1])
    for row, values in enumerate(logits):
        sums[row], top = _log_sum(values, shifted, work)
        np.subtract(sums[row] - top, shifted, out=work)
        np.divide(work, STEP, out=work)
        np.rint(work, out=work)
        np.clip(work, 0, 65535, out=work)
        codes[row] = work
    return codes, sums


def divergences(codes: Codes, logits: Floats) -> tuple[Doubles, Doubles]:
    """KL divergence (nats) of each row of logits from the distribution in the codes.

    The codes' probabilities are normalized again, so that their rounding counts in second order only.

    Parameters
    ----------
    codes, logits
        uint16 and float32 ``(rows, vocab)``.

    Returns
    -------
    divergences, log_sum
        float64 ``(rows,)``; the second as of :func:`encode`.

    Raises
    ------
    NonFiniteError
        for NaN or infinity among the logits.
    """
    found, sums = np.empty(len(logits)), np.empty(len(logits))
    shifted, work, terms = (np.empty(logits.shape[1]) for _ in range(3))
    for row, values in enumerate(logits):
        sums[row], top = _log_sum(values, shifted, work)
        np.take(_PROBABILITY, codes[row], out=work, mode="clip")
        mass = float(work.sum())
        np.multiply(codes[row], -STEP, out=terms)
        terms -= shifted
        terms *= work  # summed by numpy: a BLAS product would wait for its threads, which llama.cpp's keep busy
        found[row] = float(terms.sum()) / mass - np.log(mass) + sums[row] - top
    return found, sums


def _log_sum(values: Floats, shifted: Doubles, work: Doubles) -> tuple[float, float]:
    """Return the logarithm of the sum of exponentials, and the largest value, which `shifted` is relative to."""
    top = float(values.max())
    if not np.isfinite(top) or not np.isfinite(values.min()):
        raise errors.NonFiniteError("the model's logits are not finite; its weights may be damaged")
    np.subtract(values, top, out=shifted, dtype=np.float64)
    np.exp(shifted, out=work)
    total = float(work.sum())
    return top + float(np.log(total)), top


# ---- statistics --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scores:
    """What was measured at each scored token of one text, arrays of float64 (bool for `agree`) in text order.

    Attributes
    ----------
    kld
        KL divergence from the reference in nats.
    agree
        whether the likeliest token is the reference's.
    nll
        negative log-likelihood of the text's own next token in nats.
    """

    kld: Doubles
    agree: npt.NDArray[np.bool_]
    nll: Doubles


@dataclass(frozen=True)
class Summary:
    """Statistics over the scored tokens of one or several texts."""

    kld_mean: float
    kld_ci_low: float
    kld_ci_high: float
    kld_median: float
    kld_p99: float
    top1: float
    ppl: float
    tokens: int = field(default=0)


def summarize(texts: list[Scores], seed: int = 0) -> Summary:
    """Pool texts, each token with the same weight; the interval is made as ``INTERVAL_METHOD`` says."""
    kld = np.concatenate([scores.kld for scores in texts])
    low, high = interval([scores.kld for scores in texts], seed)
    return Summary(
        kld_mean=float(kld.mean()),
        kld_ci_low=low,
        kld_ci_high=high,
        kld_median=float(np.median(kld)),
        kld_p99=float(np.quantile(kld, 0.99)),
        top1=float(np.concatenate([scores.agree for scores in texts]).mean()),
        ppl=float(np.exp(np.concatenate([scores.nll for scores in texts]).mean())),
        tokens=kld.size,
    )


def interval(series: list[Doubles], seed: int = 0) -> tuple[float, float]:
    """95% confidence interval of the mean over all series, each resampled by itself in blocks."""
    rng = np.random.default_rng(seed)
    totals, drawn = np.zeros(RESAMPLES), 0
    for values in series:
        length = min(BLOCK_ROWS, max(1, values.size // 4))
        sums = np.cumsum(np.concatenate([[0.0], values, values[: length - 1]]))
        blocks = sums[length:] - sums[:-length]  # one for each start, around the end
        count = -(-values.size // length)
        mean = blocks[rng.integers(0, values.size, (RESAMPLES, count))].mean(axis=1) / length
        totals += mean * values.size
        drawn += values.size
    low, high = np.quantile(totals / drawn, [0.025, 0.975])
    return float(low), float(high)
