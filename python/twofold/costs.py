"""Seconds of drafts and checks, learned while they run."""

from __future__ import annotations

import numpy as np

_SMOOTH = 0.1  # share of the latest in running means
_NEAR, _FAR = 1.5, 1e-6  # tokens within which widths tell of each other's costs; weight of all others


class Costs:
    """Running means of seconds, by number of tokens."""

    def __init__(self, longest: int) -> None:
        self._mean = np.zeros(longest + 1)
        self._weight = np.zeros(longest + 1)  # of measurements

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return bool(self._weight.any())

    def __getitem__(self, tokens: int) -> float:
        """Return the mean for so many tokens, 0 before any was measured."""
        return float(self._mean[tokens])

    def add(self, tokens: int, seconds: float) -> None:
        """Take a measurement; one stall of a busy machine counts at most as twice the mean."""
        weight = self._weight[tokens] = min(self._weight[tokens] + 1.0, 1.0 / _SMOOTH)
        most = 2.0 * self._mean[tokens] if weight > 1.0 else seconds
        self._mean[tokens] += (min(seconds, most) - self._mean[tokens]) / weight

    def times(self, tokens: int) -> float:
        """Return how often so many tokens were measured, up to what still counts."""
        return float(self._weight[tokens])

    def between(self, counts: np.ndarray, at_none: float) -> np.ndarray:
        """Return seconds for these numbers, between those measured; `at_none` for no tokens.

        Beyond the largest measured they grow as they do up to it.
        """
        found = np.flatnonzero(self._weight)
        last = int(found[-1]) if len(found) else 0
        slope = (self._mean[last] - at_none) / last if last else 0.0
        inside = np.interp(counts, [0, *found], [at_none, *self._mean[found]])
        return np.asarray(inside + slope * np.maximum(counts - last, 0))

    def narrowest(self) -> float:
        """Return the seconds for the fewest tokens that were measured, 0 before that."""
        found = np.flatnonzero(self._weight)
        return float(self._mean[found[0]]) if len(found) else 0.0

    def slopes(self, places: np.ndarray) -> np.ndarray:
        """Return seconds for one token more at each place, of lines through what was measured near it.

        A check is flat as long as memory binds, and steep where arithmetic does.
        """
        found = np.flatnonzero(self._weight)
        if len(found) < 2:
            return np.full(len(places), float(self._mean[found[0]]) / found[0] if len(found) else 0.0)
        near = self._weight[found] * np.exp(-(((found - places[:, None]) / _NEAR) ** 2)) + _FAR
        away = found - ((near @ found) / near.sum(axis=1))[:, None]
        return np.asarray(np.maximum((near * away) @ self._mean[found] / (near * away**2).sum(axis=1), 0.0))


class DraftCosts:
    """Seconds of a draft's steps: of one token, of the first, and of several guesses that the base checks at once.

    The first costs more than the next, since llama.cpp builds another graph wherever the number of tokens changes.
    """

    _FIRST, _NEXT, _AROUND = range(3)
    _TRIED, _TRIES = (7, 4, 2), 2

    def __init__(self, most_guesses: int) -> None:
        self._single = Costs(2)
        self._guessed = Costs(most_guesses)
        self._asked = dict.fromkeys(self._TRIED, 0)  # there may be fewer guesses than asked for

    @property
    def known(self) -> bool:
        """Whether anything was measured."""
        return self._single.known or self._guessed.known

    def add(self, guesses: int, seconds: float, *, again: bool) -> None:
        """Take a step of the last token and so many guesses; `again` after a step of just as many."""
        if guesses:
            self._guessed.add(guesses, seconds)
        else:
            self._single.add(self._NEXT if again else self._FIRST, seconds)

    def add_around(self, seconds: float) -> None:
        """Take what a draft took besides its steps: to keep the state of the memory, and to put it back."""
        self._single.add(self._AROUND, seconds)

    def token(self) -> float:
        """Return the seconds of one token after another; the first is dearer, but measured more often."""
        first, following = self._single[self._FIRST], self._single[self._NEXT]
        return min(first, following) if first and following else first or following

    def copied(self, guesses: int) -> float:
        """Return the seconds of a token if so many guesses are right."""
        return (self._guessed[guesses] or self.token()) / (guesses + 1)

    def change(self) -> float:
        """Return what a step costs beyond that if it is not as wide as the one before."""
        return max(self._single[self._FIRST] - self.token(), 0.0)

    def begin(self) -> float:
        """Return what a draft costs before its first token."""
        return self.change() + self._single[self._AROUND]

    def best_guesses(self, chance: float, most: int) -> int:
        """Return how many guesses save most time, if each is right so probably when those before it are; maybe none.

        Each that is right saves the time of a token, which has to be known. Then a few numbers are tried, whatever
        they cost.
        """
        if not self._single.times(self._NEXT) or most < 1:
            return 0
        for count in self._TRIED:
            if count <= most and self._asked[count] < self._TRIES:
                self._asked[count] += 1
                return count
        counts = np.arange(1, most + 1)
        saved = np.cumsum(chance**counts) * self.token()
        gain = saved - (self._guessed.between(counts, self.token()) + self.change() - self.token())
        best = int(np.argmax(gain))
        return best + 1 if gain[best] > 0 else 0
