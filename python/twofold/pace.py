"""How far to draft: as far as one more token is worth its time.

A token drafted next is kept with some probability, P x a: all before it have to be kept as well. It costs the time of
one more draft token and what that adds to the check. At the rate of r tokens a second that time is worth r x cost
tokens, so drafting goes on while P x a > r x cost (the stopping rule of renewal-reward processes: Ross, Stochastic
Processes, 1996, chapter 3). Costs and acceptance are those measured so far; acceptance is kept by the draft's own
confidence. A draft costs something before its first token too (llama.cpp builds another graph), which is spent once it
has begun, so it counts only where the question is whether to draft at all.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from twofold.costs import Costs, DraftCosts

_EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.96, 0.99)  # of confidence
_PRIOR = np.array([0.1, 0.3, 0.5, 0.65, 0.75, 0.85, 0.9, 0.95, 0.98])  # acceptance in between, at first
_PRIOR_WEIGHT = 1.0  # draft tokens that each share of the prior counts for
_MEMORY = 0.99  # what a later draft token leaves of an earlier one's weight
_SMOOTH = 0.1  # share of the latest in running means of seconds
_FIRST_REST, _LONGEST_REST = 16, 128  # plain rounds before drafting is tried again
_REFRESH = 256  # rounds after which plain decoding is measured again


@dataclass(frozen=True)
class Step:
    """A step of a draft: the last token and so many guesses decoded by the base.

    Attributes
    ----------
    again
        after a step of just as many.
    usual
        whether its time tells of others.
    """

    guesses: int
    again: bool
    usual: bool = True


class Pace(Protocol):
    """Decides how many tokens are drafted."""

    def begin(self, most: int) -> int:
        """Return how many tokens this round may draft, at most `most`."""

    def guesses(self, chance: float, most: int) -> int:
        """Return how many guesses the base should check at once, if each is right so probably; at most `most`."""

    def step(self, step: Step, seconds: float) -> None:
        """Take the seconds of a step of the draft."""

    def goes_on(self, confidence: Callable[[], float], *, made: bool, copied: int = 0) -> bool:
        """Whether to draft another after a token of this probability (asked for only if it matters).

        `made`: it has been drafted already, with the same guesses, and costs only its place in the check. `copied`:
        guesses of this step if all of them were right, so that the next ones may well be.
        """

    def end(self, drafted: int, draft_s: float, check_s: float) -> None:
        """Take the seconds of the round that was drafted and checked."""

    def outcome(self, kept: int) -> None:
        """Take how many of its draft tokens were kept."""


class Fixed:
    """Always the same number, with all guesses that are right often enough."""

    _USEFUL = 0.4

    def __init__(self, length: int) -> None:
        self._length = length

    def begin(self, most: int) -> int:
        """Return the number, or `most`."""
        return min(self._length, most)

    def guesses(self, chance: float, most: int) -> int:
        """Return `most`, none if they are mostly wrong."""
        return most if chance >= self._USEFUL else 0

    def step(self, step: Step, seconds: float) -> None:
        """Nothing to learn."""

    def goes_on(self, confidence: Callable[[], float], *, made: bool, copied: int = 0) -> bool:
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
    drafts, checks
        seconds of a draft's steps, and of checks by their number of tokens.
    """

    def __init__(self, longest: int) -> None:
        self._tries = np.full(len(_PRIOR), _PRIOR_WEIGHT)
        self._kept = _PRIOR * _PRIOR_WEIGHT
        self.drafts, self.checks = DraftCosts(longest), Costs(longest + 2)
        self._longest = longest
        self._between = np.arange(longest + 1) + 1.5  # a check of so many drafts has one token more
        self._tokens, self._seconds = 0.0, 0.0  # of late, for the rate
        self._bins: list[int] = []
        self._path = 1.0
        self._round = 0
        self._rest, self._resting = _FIRST_REST, 0
        self._paid = False  # whether the last draft was worth its time
        self._seconds_of_round = 0.0
        self._seconds_of_steps = 0.0
        # What follows from the above, once a round, since questions come with every token.
        self._ahead = 0.0  # probability that a draft token is kept if those before it are, whatever its confidence
        self._begin_s = 0.0  # what a draft costs before its first token
        self._token_s = 0.0  # what a draft token costs
        self._column_s = np.zeros(longest + 1)  # what one more token costs in the check, after so many
        self._worth = 0.0  # tokens a second that its time would make otherwise

    @property
    def acceptance(self) -> np.ndarray:
        """Share of draft tokens kept, by bin of confidence."""
        return np.asarray(self._kept / self._tries)

    def begin(self, most: int) -> int:
        """Return `most` if drafting pays at all, else 0."""
        self._bins, self._path, self._seconds_of_steps = [], 1.0, 0.0
        self._round += 1
        if self._round % _REFRESH == 2:  # the first round is cold
            return 0
        if self._resting:
            self._resting -= 1
            return 0 if self._resting else most
        if not self.drafts.known:
            return min(2, most)
        if not self._paid and not self._some_length_pays():
            self._resting = self._rest
            self._rest = min(2 * self._rest, _LONGEST_REST)
            return 0
        self._rest = _FIRST_REST
        return most

    def guesses(self, chance: float, most: int) -> int:
        """Return as many as save most time, none if none saves any."""
        return self.drafts.best_guesses(chance, most)

    def step(self, step: Step, seconds: float) -> None:
        """Take the seconds of a step."""
        self._seconds_of_steps += seconds
        if step.usual:
            self.drafts.add(step.guesses, seconds, again=step.again)

    def goes_on(self, confidence: Callable[[], float], *, made: bool, copied: int = 0) -> bool:
        """Whether the next draft token is worth its time, after one of this confidence."""
        found = bisect_left(_EDGES, confidence())
        self._bins.append(found)
        self._path *= float(self._kept[found] / self._tries[found])
        if not self._token_s:
            return True
        another_s = float(self._column_s[min(len(self._bins), self._longest)])
        if not made:
            another_s += self.drafts.copied(copied) if copied else self._token_s
        return self._path * self._ahead > self._worth * another_s

    def _some_length_pays(self) -> bool:
        """Whether a draft of any length is worth its time at the rate of plain decoding, which it would give up."""
        lengths = np.arange(1, self._longest + 1)
        gained = np.cumsum(self._ahead**lengths)
        spent = self._begin_s + np.cumsum(self._token_s + self._column_s[:-1])
        return bool((gained > self._plain_rate() * spent).any())

    def _plain_rate(self) -> float:
        """Tokens a second without drafts: by the narrowest check measured."""
        narrowest = self.checks.narrowest()
        return 1.0 / narrowest if narrowest else 0.0

    def _rate(self) -> float:
        """Tokens a second: of late, at least those of plain decoding."""
        return max(self._plain_rate(), self._tokens / self._seconds if self._seconds > 0 else 0.0)

    def end(self, drafted: int, draft_s: float, check_s: float) -> None:
        """Take the seconds of a round."""
        self._seconds_of_round = draft_s + check_s
        self._paid = False
        if drafted:
            self.drafts.add_around(max(draft_s - self._seconds_of_steps, 0.0))
        self.checks.add(drafted + 1, check_s)
        self._begin_s, self._token_s = self.drafts.begin(), self.drafts.token()
        self._column_s = self.checks.slopes(self._between)
        self._worth = self._rate()
        self._ahead = float(self._kept.sum() / self._tries.sum())

    def outcome(self, kept: int) -> None:
        """Take how many draft tokens were kept."""
        for place, found in enumerate(self._bins[: kept + 1]):
            self._tries *= _MEMORY
            self._kept *= _MEMORY
            self._tries[found] += 1.0
            self._kept[found] += float(place < kept)
        self._tries, self._kept = _with_prior(self._tries, self._kept)
        self._paid = kept > 0 and kept + 1 > self._plain_rate() * self._seconds_of_round
        self._tokens = self._tokens * (1 - _SMOOTH) + (kept + 1) * _SMOOTH
        self._seconds = self._seconds * (1 - _SMOOTH) + self._seconds_of_round * _SMOOTH


def _with_prior(tries: np.ndarray, kept: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bins that have forgotten too much lean on the prior again."""
    missing = np.maximum(_PRIOR_WEIGHT / 4 - tries, 0.0)
    return tries + missing, kept + missing * _PRIOR
