"""Speculation as it is usually done: a small model of its own drafts, a large one checks; two contexts, greedy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from twofold import speculate
from twofold.decoder import Decoder
from twofold.stats import Stats


def generate(target: Decoder, drafter: Decoder, prompt: Sequence[int], length: int, stats: Stats) -> Iterator[int]:
    """Yield the target's greedy tokens after `prompt`, checked `length` drafts at a time, until the caller stops."""
    with stats.timed("prompt_s"):
        for model in (target, drafter):
            model.truncate(0)
            speculate.feed(model, prompt, 0, all_rows=False, after=lambda *_: None)
    text = [*prompt, target.greedy(-1)]
    stats.count_token(from_draft=False)
    yield text[-1]
    known = len(prompt)  # tokens of the text in the drafter's cache
    while True:
        position = len(text) - 1  # of the last token, which the target has not decoded
        for model in (target, drafter):
            model.mark()
        with stats.timed("draft_s"):
            drafted = _draft(drafter, text, known, length)
        stats.count_draft(length)
        with stats.timed("verify_s"):
            target.decode([text[-1], *drafted], position, all_rows=True)
        for place in range(length + 1):
            text.append(target.greedy(place))
            agreed = place < length and text[-1] == drafted[place]
            stats.count_token(from_draft=agreed)
            yield text[-1]
            if not agreed:
                stats.count_outcome(place + 1)
                break
            stats.agreed_by_position[place] += 1
        target.truncate(len(text) - 1)
        known = min(position + length, len(text) - 1)  # the drafter has not decoded the last token of its draft
        drafter.truncate(known)


def _draft(drafter: Decoder, text: Sequence[int], known: int, length: int) -> list[int]:
    """Return the `length` tokens that the drafter continues the text with; it has decoded `known` tokens of it."""
    drafted: list[int] = []
    pending, position = text[known:], known
    while len(drafted) < length:
        drafter.decode(pending, position, all_rows=False)
        position += len(pending)
        drafted.append(drafter.greedy(-1))
        pending = drafted[-1:]
    return drafted
