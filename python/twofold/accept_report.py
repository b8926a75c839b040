"""What `twofold accept` found, as tables for people and as a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from twofold import errors, report, simulate

Row = dict[str, Any]


def render(found: dict[str, Any]) -> str:
    """Return the tables of :func:`twofold.accept.measure`'s result."""
    rows, depths = found["rows"], found["depths"]
    over_all = [row for row in rows if row["kind"] == simulate.ALL]
    single = [row for row in rows if row["kind"] != simulate.ALL]
    deepest = max(depths)
    shown = sorted({1, *depths})
    accepted = [row for row in found["accepted_by_position"] if row["kind"] == simulate.ALL]
    checks = f"{len(found['prompts'])} prompts, texts of {found['tokens']} tokens, 95% interval in brackets"
    return "\n\n".join(
        [
            f"tokens per check by depth of draft k ({checks}):",
            report.table(_pivot(over_all, ("draft", "bpw"), "k", depths, _with_interval)),
            "by kind of prompt:",
            report.table(_pivot(single, ("draft", "kind"), "k", depths, _plain)),
            f"share of the drafts of {deepest} whose first tokens, up to this position, agree:",
            report.table(_pivot(accepted, ("draft",), "position", shown, _share)),
        ]
    )


def _pivot(
    rows: Sequence[Row], keys: Sequence[str], across: str, values: Sequence[int], cell: Callable[[Row], str]
) -> list[Row]:
    """Turn rows with one value each into rows with a column for each value of `across`."""
    lines: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row[across] in values:
            line = lines.setdefault(tuple(row[key] for key in keys), {key: row[key] for key in keys})
            line[f"k={row[across]}" if across == "k" else str(row[across])] = cell(row)
    return list(lines.values())


def _plain(row: Row) -> str:
    return "-" if row["tokens_per_check"] is None else f"{row['tokens_per_check']:.2f}"


def _with_interval(row: Row) -> str:
    return _plain(row) if row["ci_low"] is None else f"{_plain(row)} [{row['ci_low']:.2f} {row['ci_high']:.2f}]"


def _share(row: Row) -> str:
    return "-" if row["accepted"] is None else f"{row['accepted']:.0%}"


def others(found: dict[str, Any]) -> list[str]:
    """Say, in one line for each, which models other than the first pair made texts."""
    return [
        f"{made['texts']} of {len(found['prompts'])} texts are by {made['model']} (fingerprint {made['fingerprint']}), "
        f"not by {found['models'][0]['draft']}: drafts are compared with that model's choices"
        for made in found["texts_by"]
        if not made["first_pair"]
    ]


# ---- files -------------------------------------------------------------------------------------------


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Find out before a long measurement whether its results can be written.

    Raises
    ------
    ArgumentError
        if matplotlib is missing, or the plot's name has an ending that it does not know.
    FileAccessError
        if a file cannot be written.
    """
    for path in filter(None, (json_path, plot_path)):
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise errors.FileAccessError(f"{path}: cannot be written; name a file in a folder that is there")
    if plot_path is not None:
        known = new_figure().canvas.get_supported_filetypes()
        if plot_path.suffix[1:].lower() not in known:
            raise errors.ArgumentError(f"{plot_path}: end the name in one of {', '.join(sorted(known))}")


def save(found: dict[str, Any], json_path: Path | None, plot_path: Path | None) -> None:
    """Write the JSON document and the plot, where there is a path.

    Raises
    ------
    FileAccessError
        if a file cannot be written.
    """
    try:
        if json_path is not None:
            json_path.write_text(json.dumps(found) + "\n", "utf-8")
        if plot_path is not None:
            plot(found).savefig(plot_path, dpi=150)
    except OSError as error:
        raise errors.FileAccessError(f"{error.filename}: {error.strerror}") from error


def new_figure(height: float = 4.5) -> Any:
    """Return an empty figure of matplotlib, `height` inches high; ArgumentError if matplotlib is missing."""
    try:
        from matplotlib.figure import Figure  # not pyplot: it would look for a display
    except ImportError as error:
        raise errors.ArgumentError(f"--plot needs matplotlib ({error}); pip install twofold[plot]") from error
    return Figure(figsize=(7, height), layout="constrained")


def plot(found: dict[str, Any]) -> Any:
    """Draw tokens per check against k, one line a draft, its interval shaded; return matplotlib's figure.

    Raises
    ------
    ArgumentError
        if matplotlib is missing.
    """
    figure = new_figure()
    axes = figure.add_subplot()
    for model in found["models"]:
        rows = [row for row in found["rows"] if (row["draft"], row["kind"]) == (model["draft"], simulate.ALL)]
        rows = sorted((row for row in rows if row["tokens_per_check"] is not None), key=lambda row: int(row["k"]))
        if not rows:
            continue
        depths = [row["k"] for row in rows]
        label = f"{model['draft']} ({model['bpw']:.2f} bits a weight)"
        (line,) = axes.plot(depths, [row["tokens_per_check"] for row in rows], marker="o", label=label)
        if all(row["ci_low"] is not None for row in rows):
            low, high = [row["ci_low"] for row in rows], [row["ci_high"] for row in rows]
            axes.fill_between(depths, low, high, color=line.get_color(), alpha=0.15, linewidth=0)
    axes.set(xlabel="draft tokens k", ylabel="tokens per check", xticks=found["depths"])
    axes.grid(alpha=0.3)
    axes.legend()
    return figure
