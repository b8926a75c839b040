"""Tokens that a check yields, by bits of the base and draft tokens: interpolated between measured curves.

A curve is turned into a rate of acceptance a for each k: the one with which tokens per check, 1 + a + ... + a^k, are
what was measured. Rates are interpolated in log(k + 1) and kept beyond the ends. Between bits the share of misses,
1 - a, is interpolated in its logarithm, and beyond the ends extended with the mean slope over all curves; more bits
never yield less. So tokens per check lie between 1 and k + 1 and rise with k and with bits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from twofold import errors

SETS = ("calibrated", "plain")
DEEPEST = 32
_LEAST_MISS, _MOST_MISS = 1e-4, 0.999


@dataclass(frozen=True)
class Depths:
    """Tokens per check by draft tokens, as measured: k ascending, each with 1 to k + 1 tokens."""

    k: tuple[int, ...]
    tokens: tuple[float, ...]

    def __post_init__(self) -> None:
        ascending = all(a < b for a, b in zip(self.k, self.k[1:], strict=False))
        if not self.k or len(self.k) != len(self.tokens) or self.k[0] < 1 or not ascending:
            raise errors.FormatError(
                f"draft tokens {list(self.k)}: ascending integers from 1 on are needed, one a value"
            )
        for k, tokens in zip(self.k, self.tokens, strict=True):
            if not 1 <= tokens <= k + 1:
                raise errors.FormatError(f"{tokens:g} tokens per check of {k} drafts: 1 to {k + 1} are possible")

    def rate(self, k: int) -> float:
        """Rate of acceptance that explains what `k` drafts yield."""
        rates = [acceptance_rate(tokens, depth) for depth, tokens in zip(self.k, self.tokens, strict=True)]
        return float(np.interp(np.log(k + 1), np.log(np.array(self.k) + 1), rates))

    def tokens_per_check(self, k: int) -> float:
        """Tokens of a check of `k` drafts; 1 for none."""
        return max((tokens_per_check(self.rate(depth), depth) for depth in range(1, k + 1)), default=1.0)


@dataclass(frozen=True)
class Curve:
    """What bases of so many bits a weight yield."""

    bits: float
    depths: Depths


@dataclass(frozen=True)
class Acceptance:
    """Curves of bases by ascending bits, a drafter's, and where the figures come from."""

    curves: tuple[Curve, ...]
    drafter: Depths
    source: str

    @cached_property
    def _misses(self) -> np.ndarray[Any, Any]:
        """Logarithm of the share of misses, ``(curves, DEEPEST)``; never more misses for more bits."""
        rates = np.array([[curve.depths.rate(k) for k in range(1, DEEPEST + 1)] for curve in self.curves])
        return np.minimum.accumulate(np.log(np.clip(1 - rates, _LEAST_MISS, _MOST_MISS)), axis=0)

    @property
    def range(self) -> tuple[float, float]:
        """Fewest and most bits that were measured; others are extrapolated."""
        return self.curves[0].bits, self.curves[-1].bits

    def tokens(self, bits: float) -> list[float]:
        """Tokens per check of 0 to `DEEPEST` drafts of a base of so many bits a weight."""
        known = np.array([curve.bits for curve in self.curves])
        slope = (self._misses[-1] - self._misses[0]) / (known[-1] - known[0])
        inside = np.array([np.interp(bits, known, column) for column in self._misses.T])
        beyond = bits - float(np.clip(bits, known[0], known[-1]))
        misses = np.clip(np.exp(inside + beyond * slope), _LEAST_MISS, _MOST_MISS)
        found = [1.0]
        for k in range(1, DEEPEST + 1):
            found.append(max(found[-1], tokens_per_check(1 - float(misses[k - 1]), k)))
        return found


def tokens_per_check(rate: float, k: int) -> float:
    """``1 + rate + ... + rate^k``."""
    return float(sum(rate**i for i in range(k + 1)))


def acceptance_rate(tokens: float, k: int) -> float:
    """Invert :func:`tokens_per_check`, by halving."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if tokens_per_check(middle, k) < tokens else (low, middle)
    return (low + high) / 2


def load(chosen: str = "calibrated", path: Path | None = None) -> Acceptance:
    """Read the package's curves, or those of a file of the same form.

    Raises
    ------
    FormatError
        if the file is not of this form, or has fewer than two curves of the set.
    FileAccessError
        if it cannot be read.
    """
    origin = str(path or "twofold/data/acceptance.json")
    try:
        file = path or resources.files("twofold") / "data" / "acceptance.json"
        document = json.loads(file.read_text("utf-8"))
        curves = [Curve(float(c["bits"]), _depths(c)) for c in document["curves"] if chosen in c["sets"]]
        drafter, source = _depths(document["drafter"]), str(document["source"])
    except OSError as error:
        raise errors.FileAccessError(f"{origin}: {error.strerror}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise errors.FormatError(f"{origin}: not a file of measured acceptance: {error!r}") from error
    curves.sort(key=lambda curve: curve.bits)
    if len({curve.bits for curve in curves}) != len(curves) or len(curves) < 2:
        raise errors.FormatError(f"{origin}: two curves or more of the set {chosen!r} are needed, each of other bits")
    return Acceptance(tuple(curves), drafter, source)


def _depths(curve: Mapping[str, Any]) -> Depths:
    return Depths(tuple(int(k) for k in curve["k"]), tuple(float(tokens) for tokens in curve["tokens_per_check"]))


def parse_drafter(text: str) -> Depths:
    """Read ``3:3.2,6:4.6``: tokens per check by draft tokens, of a trained drafter.

    Raises
    ------
    ArgumentError
        if it is not of that form.
    """
    try:
        pairs: Sequence[tuple[str, str]] = sorted(
            (tuple(part.split(":")) for part in text.split(",")),  # type: ignore[misc]
            key=lambda pair: int(pair[0]),
        )
        return Depths(tuple(int(k) for k, _ in pairs), tuple(float(tokens) for _, tokens in pairs))
    except (ValueError, IndexError) as error:
        raise errors.ArgumentError(
            f"drafter's acceptance {text!r}: give tokens per check by draft tokens, such as 3:3.2,6:4.6 ({error})"
        ) from error
