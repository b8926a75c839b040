"""The loop (docs/algorithm.md): draft with the base, check with the full model, keep what agrees.

The cache holds verifier-quality entries for all tokens before `position`; `last` is the token at `position`, not
decoded yet. A draft decodes last, d1 .. d(k-1) in draft mode, the check decodes last, d1 .. dk over the same cells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from twofold.decoder import Decoder
from twofold.pace import Pace


def draft(decoder: Decoder, last: int, position: int, length: int, pace: Pace, sampler: Any = None) -> list[int]:
    """Return what the base continues `last` with; the cells it used are freed again.

    At most `length` tokens, fewer where `pace` sees no use in another. They are the most likely ones, or those that
    `sampler`, the chain that the full model's tokens are drawn with, would draw from the base.
    """
    tokens: list[int] = []
    try:
        with decoder.drafting(), decoder.guessing(sampler) as guess:
            for offset in range(length):
                decoder.decode([tokens[-1] if tokens else last], position + offset, all_rows=False)
                tokens.append(guess())
                if len(tokens) < length and not pace.goes_on(lambda: decoder.confidence(-1, tokens[-1])):
                    break
    finally:
        decoder.truncate(position)
    return tokens


def agreeing(decoder: Decoder, text: Sequence[int], position: int, limit: int) -> int:
    """Return how many of `draft`'s tokens after ``text[0]``, at most `limit`, are those of the text before one is not.

    Drafting ends at that one. The draft tokens that agree are the text's, so each decode takes the next token of it.
    """
    count = 0
    try:
        with decoder.drafting():
            while count < limit:
                decoder.decode([text[count]], position + count, all_rows=False)
                if decoder.greedy(-1) != text[count + 1]:
                    break
                count += 1
    finally:
        decoder.truncate(position)
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
