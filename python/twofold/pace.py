"""How far to draft: as far as one more token is worth its time.

A token drafted next is kept with some probability, P x a: all before it have to be kept as well. It costs the time of
a draft and what it adds to the check. At the rate of r tokens a second that time is worth r x cost tokens, so drafting
goes on while P x a > r x cost (the stopping rule of renewal-reward processes: Ross, Stochastic Processes, 1996,
chapter 3). Costs and acceptance are those measured so far; acceptance is kept by the draft's own confidence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

_EDGES = np.array([0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.96, 0.99])  # of confidence
_PRIOR = np.array([0.1, 0.3, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.98])  # acceptance in between, at first
_PRIOR_WEIGHT = 1.0  # draft tokens that each share of the prior counts for
_MEMORY = 0.99  # what a later draft token leaves of an earlier one's weight
_SMOOTH = 0.1  # share of the latest in running means of seconds
_FIRST_REST, _LONGEST_REST = 16, 64  # plain rounds before drafting is tried again
_REFRESH = 256  # rounds after which plain decoding is measured again


class Pace(Protocol):
    """Decides how many tokens are drafted."""

    def begin(self, most: int) -> int:
        """Return how many tokens this round may draft, at most `most`."""

    def goes_on(self, confidence: Callable[[], float]) -> bool:
        """Whether to draft another after a token of this probability (asked for only if it matters)."""

    def end(self, drafted: int, draft_s: float, check_s: float) -> None:
        """Take the seconds of the round that was drafted and checked."""

    def outcome(self, kept: int) -> None:
        """Take how many of its draft tokens were kept."""


class Fixed:
    """Always the same number."""

    def __init__(self, length: int) -> None:
        self._length = length

    def begin(self, most: int) -> int:
        """Return the number, or `most`."""
        return min(self._length, most)

    def goes_on(self, confidence: Callable[[], float]) -> bool:
        """Go on."""
        return True

    def end(self, drafted: int, draft_s: float, check_s: float) -> None:
        """Nothing to learn."""

    def outcome(self, kept: int) -> None:
        """Nothing to learn."""


class Auto:
    """As many as pay, none if none pays.

    Attributes
    ----------
    acceptance
        by bin of confidence: probability that a draft token is kept, if those before it are.
    draft_s, check_s
        seconds of a draft token, and of a check by its number of tokens (NaN where not measured).
    """

    def __init__(self, longest: int) -> None:
        self._tries = np.full(len(_PRIOR), _PRIOR_WEIGHT)
        self._kept = _PRIOR * _PRIOR_WEIGHT
        self.draft_s = np.nan
        self.check_s = np.full(longest + 2, np.nan)
        self._tokens, self._seconds = 0.0, 0.0  # of late, for the rate
        self._bins: list[int] = []
        self._path = 1.0
        self._round = 0
        self._rest, self._resting = _FIRST_REST, 0
        self._last = (0, 0.0)

    @property
    def acceptance(self) -> np.ndarray:
        """Share of draft tokens kept, by bin of confidence."""
        return np.asarray(self._kept / self._tries)

    def begin(self, most: int) -> int:
        """Return `most` if drafting pays at all, else 0."""
        self._bins, self._path = [], 1.0
        self._round += 1
        if self._round % _REFRESH == 2:  # the first round is cold
            return 0
        if self._resting:
            self._resting -= 1
            return 0 if self._resting else min(1, most)
        if np.isnan(self.draft_s):
            return min(2, most)
        if not self._pays(self._plain_rate()):  # what it would give up
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
            return 0
        self._rest = _FIRST_REST
        return most

    def goes_on(self, confidence: Callable[[], float]) -> bool:
        """Whether the next draft token is worth its time, after one of this confidence."""
        found = int(np.searchsorted(_EDGES, confidence()))
        self._bins.append(found)
        self._path *= float(self._kept[found] / self._tries[found])
        return bool(np.isnan(self.draft_s)) or self._pays(self._rate())

    def _pays(self, rate: float) -> bool:
        ahead = float(self._kept.sum() / self._tries.sum())
        return self._path * ahead > rate * (self.draft_s + self._slope())

    def _slope(self) -> float:
        """Seconds that one more token adds to a check: of a line through all widths measured, since each is noisy."""
        known = np.flatnonzero(~np.isnan(self.check_s))
        if len(known) < 2:
            return 0.0
        away = known - known.mean()
        return max(float(away @ self.check_s[known] / (away @ away)), 0.0)

    def _plain_rate(self) -> float:
        """Tokens a second without drafts: by the narrowest check measured."""
        known = self.check_s[~np.isnan(self.check_s)]
        return float(1.0 / known[0]) if len(known) else 0.0

    def _rate(self) -> float:
        """Tokens a second: of late, at least those of plain decoding."""
        return max(self._plain_rate(), self._tokens / self._seconds if self._seconds > 0 else 0.0)

    def end(self, drafted: int, draft_s: float, check_s: float) -> None:
        """Take the seconds of a round."""
        self._last = (drafted, draft_s + check_s)
        if drafted:
            self.draft_s = _smooth(self.draft_s, draft_s / drafted)
        self.check_s[drafted + 1] = _smooth(self.check_s[drafted + 1], check_s)

    def outcome(self, kept: int) -> None:
        """Take how many draft tokens were kept."""
        for place, found in enumerate(self._bins[: kept + 1]):
            self._tries *= _MEMORY
            self._kept *= _MEMORY
            self._tries[found] += 1.0
            self._kept[found] += float(place < kept)
        self._tries, self._kept = _with_prior(self._tries, self._kept)
        _, seconds = self._last
        self._tokens = self._tokens * (1 - _SMOOTH) + (kept + 1) * _SMOOTH
        self._seconds = self._seconds * (1 - _SMOOTH) + seconds * _SMOOTH


def _smooth(mean: float, value: float) -> float:
    """Return the running mean; one stall of a busy machine counts at most as twice the mean."""
    return value if np.isnan(mean) else float(mean + _SMOOTH * (min(value, 2.0 * mean) - mean))


def _with_prior(tries: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bins that have forgotten too much lean on the prior again."""
    missing = np.maximum(_PRIOR_WEIGHT / 4 - tries, 0.0)
    return tries + missing, kept + missing * _PRIOR
