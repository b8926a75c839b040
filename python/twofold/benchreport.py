"""What `twofold bench` found, as tables for people and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from twofold import benchrows, report, results

Row = dict[str, Any]


def render(found: dict[str, Any]) -> str:
    """Return the tables of :func:`twofold.bench.measure`'s result."""
    rows, about = found["rows"], found["metadata"]
    over_all = [row for row in rows if row["kind"] == benchrows.ALL]
    drawn = f"temperature {about['sampling']['temp']}" if about["sampling"]["temp"] else "greedy"
    parts = [
        f"{len(about['prompts'])} prompts, up to {about['tokens']} tokens, {drawn}, {about['threads']} threads, "
        f"{about['repeat']} x; quartiles in brackets:",
        report.table([_line(row) for row in over_all]),
        "tok/s (tokens per check) by kind of prompt:",
        report.table(_by_kind(rows)),
        *_divergences(found["runs"]),
        "\n".join(about["meaning"]),
    ]
    return "\n\n".join(parts)


def _line(row: Row) -> Row:
    return {
        "strategy": row["strategy"],
        "tok/s": _spread(row, "tok_s", 1),
        "ratio": _spread(row, "ratio", 2),
        "tokens/check": _number(row["tokens_per_check"], 2),
        "drafts": _share(row["draft_share"]),
        "checks": _share(row["check_share"]),
        "prompts": row["prompts"],
        "diverged": row["diverged"],
    }


def _by_kind(rows: Sequence[Row]) -> list[Row]:
    lines: dict[str, Row] = {}
    for row in rows:
        if row["kind"] != benchrows.ALL:
            line = lines.setdefault(row["strategy"], {"strategy": row["strategy"]})
            line[row["kind"]] = f"{_number(row['tok_s'], 1)} ({_number(row['tokens_per_check'], 2)})"
    return list(lines.values())


def _divergences(runs: Sequence[Row]) -> list[str]:
    """Return, as one text, the places where texts part, and how near to a tie the full model was there."""
    lines = [
        f"{run['prompt']}, {run['strategy']}: diverges at token {run['diverges_at']}"
        + ("" if run["margin"] is None else f", margin of the logits {run['margin']:.4f}")
        for run in runs
        if run["diverges_at"] is not None
    ]
    return ["\n".join(lines)] if lines else []


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _spread(row: Row, key: str, digits: int) -> str:
    middle, low, high = (_number(row[name], digits) for name in (key, f"{key}_q1", f"{key}_q3"))
    return f"{middle} [{low} {high}]"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def plot(found: dict[str, Any]) -> Any:
    """Draw a bar for each strategy, its quartiles as a line, its ratio beside it; return matplotlib's figure.

    Raises
    ------
    ArgumentError
        if matplotlib is missing.
    """
    about = found["metadata"]
    rows = [row for row in found["rows"] if row["kind"] == benchrows.ALL and row["tok_s"] is not None]
    figure = results.figure(9, 1.2 + 0.4 * len(rows))
    axes = figure.add_subplot()
    models = list(dict.fromkeys(row["model"] for row in rows))
    for place, row in enumerate(rows):
        spread = [[row["tok_s"] - row["tok_s_q1"]], [row["tok_s_q3"] - row["tok_s"]]]
        axes.barh(place, row["tok_s"], xerr=spread, capsize=3, color=f"C{models.index(row['model'])}", alpha=0.8)
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}x"
        axes.annotate(ratio, (row["tok_s_q3"], place), (6, 0), textcoords="offset points", va="center")
    axes.set_yticks(range(len(rows)), [row["strategy"] for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.15 * max((row["tok_s_q3"] for row in rows), default=1.0))  # room for the ratios
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    prompts = f"{len(about['prompts'])} prompts, {about['threads']} threads, {about['cpu']['model']}"
    axes.set(xlabel="tokens a second, median and quartiles over prompts", title=prompts)
    return figure
