"""What `twofold bench` measured, by strategy and kind of prompt: medians, quartiles, shares."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

Record = dict[str, Any]

ALL = "all"
RATE = (
    "tok_s: (tokens - 1) / seconds from the first token to the last, so without the prompt; work on drafts that the "
    "end of a text cuts off counts. Of a prompt: the median over its repetitions. Shown: median and quartiles over "
    "prompts with two tokens or more."
)
RATIO = "ratio: of the tok_s of the same prompt by the first strategy; median and quartiles of those."
OTHER = "diverged: prompts where the text is not that of plain decoding of the same model (with the same seed)."


def rate(record: Record) -> float | None:
    """Tokens a second after the first token; None for a text without others."""
    return (record["tokens"] - 1) / record["seconds"] if record["tokens"] > 1 and record["seconds"] > 0 else None


def rows(records: Sequence[Record], strategies: Sequence[Record]) -> list[Record]:
    """Return a row for each kind of prompt, and for all of them, and each strategy.

    Parameters
    ----------
    records
        a run each: ``strategy``, ``prompt``, ``kind``, ``repeat``, ``tokens``, ``seconds``, ``draft_s``, ``check_s``,
        ``complete_checks``, ``complete_tokens``, ``diverges_at`` (None: nowhere).
    strategies
        what is said of each, ``strategy`` and ``compared`` (whether its texts are compared with others) among it.
    """
    first = strategies[0]["strategy"]
    yardstick = {(r["prompt"], r["repeat"]): rate(r) for r in records if r["strategy"] == first}
    kinds = list(dict.fromkeys(record["kind"] for record in records))
    return [
        _row(
            [r for r in records if r["strategy"] == about["strategy"] and kind in (ALL, r["kind"])],
            about,
            kind,
            yardstick,
        )
        for kind in (ALL, *kinds)
        for about in strategies
    ]


def _row(records: list[Record], about: Record, kind: str, yardstick: dict[tuple[str, int], float | None]) -> Record:
    rates: dict[str, list[float]] = {}
    ratios: dict[str, list[float]] = {}
    for record in records:
        own, other = rate(record), yardstick[record["prompt"], record["repeat"]]
        if own is not None:
            rates.setdefault(record["prompt"], []).append(own)
            if other is not None:
                ratios.setdefault(record["prompt"], []).append(own / other)
    checks, seconds = _sum(records, "complete_checks"), _sum(records, "seconds")
    diverged = {record["prompt"] for record in records if record["diverges_at"] is not None}
    return {
        **{key: value for key, value in about.items() if key != "compared"},
        "kind": kind,
        "prompts": len(rates),
        **_spread("tok_s", rates.values()),
        **_spread("ratio", ratios.values()),
        "tokens_per_check": _sum(records, "complete_tokens") / checks if checks else None,
        "draft_share": _sum(records, "draft_s") / seconds if seconds else None,
        "check_share": _sum(records, "check_s") / seconds if seconds else None,
        "diverged": len(diverged) if about["compared"] else None,
    }


def _sum(records: Iterable[Record], key: str) -> float:
    return float(sum(record[key] for record in records))


def _spread(name: str, prompts: Iterable[list[float]]) -> Record:
    """Return median and quartiles over prompts, of their medians over repetitions."""
    values = [statistics.median(found) for found in prompts]
    low, middle, high = map(float, np.percentile(values, (25, 50, 75))) if values else (None, None, None)
    return {name: middle, f"{name}_q1": low, f"{name}_q3": high}
