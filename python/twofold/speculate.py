"""The loop (docs/algorithm.md): draft with the base, check with the full model, keep what agrees.

The cache holds verifier-quality entries for all tokens before `position`; `last` is the token at `position`, not
decoded yet. A draft decodes last, d1 .. d(k-1) in draft mode, the check decodes last, d1 .. dk over the same cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

from twofold import pace
from twofold.decoder import Decoder
from twofold.propose import MOST, Proposer


@dataclass(frozen=True)
class Drafting:
    """How to draft.

    Attributes
    ----------
    pace
        says when to stop.
    sampler
        chain that the full model's tokens are drawn with; None: the likeliest are taken.
    proposer, text
        guesses for the base to check, and the text that they go by, `last` included.
    """

    pace: pace.Pace
    sampler: Any = None
    proposer: Proposer | None = None
    text: Sequence[int] = ()


@contextmanager
def _taken_back(decoder: Decoder, position: int) -> Iterator[None]:
    """Cut back to `position`, where the memory ends, when all is done."""
    decoder.mark()
    try:
        yield
    except BaseException:
        decoder.keep(position)  # what failed is what is told
        raise
    decoder.truncate(position)


def draft(decoder: Decoder, last: int, position: int, length: int, how: Drafting) -> list[int]:
    """Return what the base continues `last` with; the cells it used are freed again.

    At most `length` tokens. They are the most likely ones, or those that the sampler would draw from the base.
    """
    tokens: list[int] = []
    width = 0  # of the step before
    goes_on = True
    with _taken_back(decoder, position), decoder.drafting(), decoder.guessing(how.sampler) as guess:
        while goes_on and len(tokens) < length:
            begun = perf_counter()
            before = tokens[-1] if tokens else last
            guesses = _guesses(how, tokens, length - len(tokens) - 1)
            made = _step(decoder, before, guesses, position + len(tokens), guess)
            copied = len(guesses) if len(made) > len(guesses) else 0
            for place, token in enumerate(made, 1):
                tokens.append(token)
                confidence = partial(decoder.confidence, place - 1 if guesses else -1, token)
                goes_on = how.pace.goes_on(confidence, made=place < len(made), copied=copied)
                if not goes_on:
                    break
            late = 0
            if guesses and how.proposer is not None:
                late = how.proposer.late
                how.proposer.outcome(len(guesses), len(made) - 1)
            step = pace.Step(len(guesses), again=width == 1 + len(guesses), usual=late <= 2 * MOST)
            how.pace.step(step, perf_counter() - begun)
            width = 1 + len(guesses)
    return tokens


def _guesses(how: Drafting, drafted: Sequence[int], room: int) -> list[int]:
    """Return guesses for the base to check, as many as pay."""
    if how.proposer is None or room < 1:
        return []
    return how.proposer.propose(how.text, drafted, lambda chance: how.pace.guesses(chance, min(room, MOST)))


def _step(
    decoder: Decoder, before: int, guesses: Sequence[int], position: int, guess: Callable[[int], int]
) -> list[int]:
    """Decode one token, and guesses after it; return the base's tokens up to the first that is no guess."""
    decoder.truncate(position)  # of the guesses before, those that were wrong
    decoder.decode([before, *guesses], position, all_rows=bool(guesses))
    if not guesses:
        return [guess(-1)]
    made: list[int] = []
    for row in range(len(guesses) + 1):
        made.append(guess(row))
        if row == len(guesses) or made[row] != guesses[row]:
            break
    return made


def agreeing(decoder: Decoder, text: Sequence[int], position: int, limit: int) -> int:
    """Return how many of `draft`'s tokens after ``text[0]``, at most `limit`, are those of the text before one is not.

    Drafting ends at that one. The draft tokens that agree are the text's, so each decode takes the next token of it.
    """
    count = 0
    with _taken_back(decoder, position), decoder.drafting():
        while count < limit:
            decoder.decode([text[count]], position + count, all_rows=False)
            if decoder.greedy(-1) != text[count + 1]:
                break
            count += 1
    return count


def check(decoder: Decoder, last: int, drafted: Sequence[int], position: int) -> None:
    """Decode `last` and the draft with the full model: row i holds what follows drafted[:i]."""
    decoder.decode([last, *drafted], position, all_rows=True)


def feed(
    decoder: Decoder,
    tokens: Sequence[int],
    position: int,
    *,
    all_rows: bool,
    after: Callable[[Sequence[int], int], None],
) -> None:
    """Decode a prompt in batches with the full model; `after` sees each batch and its position."""
    for first in range(0, len(tokens), decoder.max_batch):
        batch = tokens[first : first + decoder.max_batch]
        decoder.decode(batch, position + first, all_rows=all_rows)
        after(batch, position + first)
