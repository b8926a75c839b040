"""Guesses for the base to check: the draft's own draft, from the text so far or from another model.

The base checks several guesses in one batch for little more than the price of one token; what it agrees with is
drafted, and so are its own token after them. The full model checks the draft as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeAlias

from twofold.decoder import BaseLlama, Decoder

NGRAM = "ngram"
MATCHES = (4, 3, 2)  # lengths of repeated text that are looked for, the longest first
MOST = 7  # guesses at once: with the token before them what a CPU checks in one block of columns
_SMOOTH = 0.15  # share of the latest guess in a running chance
_FORGIVE = 0.004  # added to a chance each time that it was too small

Worth: TypeAlias = Callable[[float], int]  # guesses that pay, by the chance of each


class Proposer(Protocol):
    """Guesses how a text goes on.

    Attributes
    ----------
    late
        tokens of the text that were taken in for the last guesses: a prompt is no part of what guesses cost.
    """

    late: int

    def propose(self, text: Sequence[int], drafted: Sequence[int], worth: Worth) -> list[int]:
        """Return tokens that may follow `text` and `drafted`, at most as many as pay; none is always right."""

    def outcome(self, proposed: int, right: int) -> None:
        """Take how many of the last guesses the base agreed with."""


class _Chance:
    """The chance that a guess is right if those before it are, at first 1."""

    def __init__(self) -> None:
        self._value = 1.0

    def worth(self, worth: Worth) -> int:
        """Return how many guesses pay; a chance too small for any grows, so that it is tried again some time."""
        count = worth(self._value)
        if not count:
            self._value = min(self._value + _FORGIVE, 1.0)
        return count

    def learn(self, proposed: int, right: int) -> None:
        """Take how many of so many guesses were right."""
        for place in range(min(right + 1, proposed)):
            self._value += _SMOOTH * (float(place < right) - self._value)


class Lookup:
    """Where the last tokens have occurred before, what followed them then (Saxena 2023, prompt lookup decoding).

    The chance that a guess is right is kept by the length of the repetition.
    """

    late = 0  # that costs nothing here

    def __init__(self) -> None:
        self._text: list[int] = []
        self._ends: dict[tuple[int, ...], int] = {}  # end of the latest occurrence
        self._chances = {length: _Chance() for length in MATCHES}
        self._match = 0

    def _follow(self, text: Sequence[int]) -> None:
        """Take in what has been added to the text, or begin again where it is another."""
        known = len(self._text)
        if len(text) < known or list(text[max(known - 16, 0) : known]) != self._text[-16:]:
            self._text, self._ends, known = [], {}, 0
        self._text.extend(int(token) for token in text[known:])
        # The last position is left out: it has no continuation yet.
        for end in range(max(known, 1), len(self._text)):
            for length in MATCHES:
                if end >= length:
                    self._ends[tuple(self._text[end - length : end])] = end

    def propose(self, text: Sequence[int], drafted: Sequence[int], worth: Worth) -> list[int]:
        """Return what followed the latest occurrence of the last 4, 3 or 2 tokens."""
        self._follow(text)
        recent = [*self._text[-max(MATCHES) :], *drafted]
        for self._match in MATCHES:
            end = self._ends.get(tuple(recent[-self._match :])) if len(recent) >= self._match else None
            if end is not None and (count := self._chances[self._match].worth(worth)):
                return self._text[end : end + count]
        return []

    def outcome(self, proposed: int, right: int) -> None:
        """Learn how many guesses were right."""
        self._chances[self._match].learn(proposed, right)


class Model:
    """An ordinary GGUF with the same vocabulary that guesses greedily, in a cache of its own."""

    def __init__(self, path: str, **arguments: Any) -> None:
        """Load the model; arguments as of llama_cpp.Llama."""
        self._llama = BaseLlama(None, model_path=path, verbose=False, **arguments)
        self._decoder: Decoder = self._llama._decoder
        self._cached: list[int] = []
        self._chance = _Chance()
        self.late = 0

    def propose(self, text: Sequence[int], drafted: Sequence[int], worth: Worth) -> list[int]:
        """Return its most likely continuation."""
        self.late = 0
        most = self._chance.worth(worth)
        if not most:
            return []
        tokens = [*map(int, text), *drafted]
        keep = 0
        for known, token in zip(self._cached, tokens[:-1], strict=False):
            if known != token:
                break
            keep += 1
        keep = self._decoder.keep(keep)
        self._cached = tokens[:keep]
        if keep < len(text):  # what is drafted, and guessed, may be taken back
            self.late = len(text) - keep
            keep = self._feed(tokens[keep : len(text)], keep)
            self._decoder.mark()
        fresh, guesses = tokens[keep:], list[int]()
        room = self._llama.n_ctx() - len(tokens)
        while len(guesses) < min(most, room):
            keep = self._feed(fresh, keep)
            guesses.append(self._decoder.greedy(-1))
            fresh = guesses[-1:]
        self._cached = [*tokens, *guesses][:keep]
        return guesses

    def _feed(self, tokens: Sequence[int], position: int) -> int:
        """Decode tokens from a position on; return the position after them."""
        for first in range(0, len(tokens), self._decoder.max_batch):
            self._decoder.decode(tokens[first : first + self._decoder.max_batch], position + first, all_rows=False)
        return position + len(tokens)

    def outcome(self, proposed: int, right: int) -> None:
        """Learn how many guesses were right."""
        self._chance.learn(proposed, right)

    def close(self) -> None:
        """Free the model."""
        self._llama.close()


def make(drafter: str | None, **arguments: Any) -> Proposer | None:
    """Return what ``drafter`` names: ``ngram``, a GGUF file, or None for nothing.

    Raises
    ------
    FileAccessError, FormatError, UnsupportedError
        if the file cannot be loaded.
    """
    if drafter is None:
        return None
    return Lookup() if drafter == NGRAM else Model(drafter, **arguments)
