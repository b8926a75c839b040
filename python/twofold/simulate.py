"""Runs of the loop (docs/algorithm.md) worked out from what drafts agree with, for any depth of draft.

A text of n tokens is fixed; token 0 comes from the prompt. At *place* p token p is known and not decoded yet (`last` in
the loop), and drafts are compared with tokens p + 1, p + 2, ... A check at p that agrees with a of k drafts moves to
place p + min(a, k) + 1. The run ends where the last token of the text is reached.

What counts is what `Stats.complete_checks` counts: every check but the last one of a text. The caller stops taking
tokens there, be it at the length asked for or at an end-of-generation token (which is a token of the text), so it is
not known what that check would have yielded. It is the long ones that are cut short, so texts should be many times as
long as the deepest draft.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

RESAMPLES, SEED = 2000, 1
ALL = "all"

Counts: TypeAlias = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Agreements:
    """What the drafts of one text agreed with.

    Attributes
    ----------
    length
        tokens of the text.
    limits, agreed
        by place: most drafts that any depth needed there, and how many of them agreed before the first that did not.
    """

    length: int
    limits: dict[int, int]
    agreed: dict[int, int]

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON, as lists in the order of the places."""
        places = sorted(self.agreed)
        return {
            "length": self.length,
            "places": places,
            "limits": [self.limits[place] for place in places],
            "agreed": [self.agreed[place] for place in places],
        }


def explore(depths: Sequence[int], length: int, draft: Callable[[int, int], int]) -> Agreements:
    """Draft at every place that a run of one of these depths visits.

    Parameters
    ----------
    depths
        Most tokens of a draft, one run for each.
    length
        Tokens of the text.
    draft
        Given a place and a limit, returns how many drafts agree there, at most the limit. It is called once for each
        place, in ascending order; the limit never reaches beyond the text.
    """
    limits: dict[int, int] = {}
    agreed: dict[int, int] = {}
    waiting = {0: list(depths)}
    while waiting:
        place = min(waiting)
        visiting = waiting.pop(place)
        if place >= length - 1:
            continue
        limits[place] = min(max(visiting), length - 1 - place)
        agreed[place] = draft(place, limits[place])
        for depth in visiting:
            waiting.setdefault(place + min(agreed[place], depth) + 1, []).append(depth)
    return Agreements(length, limits, agreed)


def advances(found: Agreements, depth: int) -> list[tuple[int, int]]:
    """Return all checks of a run, the last one included: place, and tokens that it yields if nobody stops it."""
    checks = []
    place = 0
    while place < found.length - 1:
        step = min(found.agreed[place], depth) + 1
        checks.append((place, step))
        place += step
    return checks


def complete(found: Agreements, depth: int) -> tuple[int, int]:
    """Return the tokens that complete checks yield, and the number of these checks."""
    steps = [step for _, step in advances(found, depth)[:-1]]
    return sum(steps), len(steps)


def interval(tokens: Counts, checks: Counts) -> tuple[float, float] | tuple[None, None]:
    """Return the 95% interval of ``sum(tokens) / sum(checks)``, by bootstrap over prompts (the same draws each time).

    Parameters
    ----------
    tokens, checks
        by prompt, ``(prompts,)``. With fewer than two prompts there is no interval.
    """
    if len(checks) < 2 or not checks.any():
        return None, None
    draws = np.random.default_rng(SEED).integers(0, len(checks), (RESAMPLES, len(checks)))
    total, count = tokens[draws].sum(axis=1), checks[draws].sum(axis=1)
    low, high = np.percentile(total[count > 0] / count[count > 0], (2.5, 97.5))
    return float(low), float(high)


def by_kind(kinds: Sequence[str], found: Sequence[Agreements]) -> dict[str, list[Agreements]]:
    """Return the texts under `ALL` and under each kind of prompt, in the order they first come in."""
    groups: dict[str, list[Agreements]] = {ALL: list(found)}
    for kind, text in zip(kinds, found, strict=True):
        groups.setdefault(kind, []).append(text)
    return groups


def rows(groups: dict[str, list[Agreements]], depths: Sequence[int]) -> list[dict[str, Any]]:
    """Return tokens per check, with their interval, for each kind and depth."""
    result = []
    for kind, texts in groups.items():
        for depth in depths:
            tokens, checks = np.array([complete(text, depth) for text in texts], np.int64).T
            low, high = interval(tokens, checks)
            count = int(checks.sum())
            result.append(
                {
                    "kind": kind,
                    "k": depth,
                    "tokens_per_check": int(tokens.sum()) / count if count else None,
                    "ci_low": low,
                    "ci_high": high,
                    "checks": count,
                    "prompts": len(texts),
                }
            )
    return result


def accepted_by_position(groups: dict[str, list[Agreements]], depth: int) -> list[dict[str, Any]]:
    """Return the share of drafts whose first `position` tokens agree, for each kind and position.

    Drafts of the run with this depth are taken, and of these the ones that the text is long enough to judge.
    """
    result = []
    for kind, texts in groups.items():
        visited = [(text, place) for text in texts for place, _ in advances(text, depth)]
        for position in range(1, depth + 1):
            judged = [text.agreed[place] for text, place in visited if place + position < text.length]
            share = sum(agreed >= position for agreed in judged) / len(judged) if judged else None
            result.append({"kind": kind, "position": position, "accepted": share, "drafts": len(judged)})
    return result
