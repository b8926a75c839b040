"""The plan as table, JSON and plot."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

from twofold import errors, report, results
from twofold.planning import Plan, Strategy, assumptions
from twofold.units import binary

_COLORS = {"plain": "tab:gray", "drafter": "tab:orange", "twofold": "tab:blue"}


def render(found: Plan) -> str:
    """Return everything for people."""
    rows = [_row(found, strategy) for strategy in found.strategies]
    take = f"take {found.take.name}: {found.why}" if found.take else found.why
    notes = [f"- {line}" for line in assumptions(found)]
    wrapped = [textwrap.fill(line, 118, subsequent_indent="  ") for line in notes]
    return "\n\n".join([_head(found), report.table(rows), take, "assumptions:\n" + "\n".join(wrapped)])


def _head(found: Plan) -> str:
    model, machine = found.setting.model, found.setting.machine
    lines = [
        f"{model.name} ({model.architecture}): {model.layers} layers, {model.weights / 1e9:.2f} G weights in matrices, "
        f"{model.cache_token / 1024:.0f} KiB of cache a token"
    ]
    gpu = (
        f"VRAM {binary(machine.vram)} at {machine.vram_bandwidth / 1e9:.0f} GB/s, PCIe {machine.pcie / 1e9:.0f} GB/s, "
    )
    rates = " ".join(f"r{bits} {8 / times[8] / 1e9:.0f}" for bits, times in machine.residual_times.items())
    lines.append(
        f"{gpu if machine.vram else 'no GPU, '}RAM {binary(machine.ram)} at {machine.ram_bandwidth / 1e9:.0f} GB/s, "
        f"kernels in billions of weights a second, 8 columns: {rates}"
    )
    if machine.measured:
        lines.append("measured here: " + "; ".join(f"{what} ({how})" for what, how in machine.measured.items()))
    return "\n".join(lines)


def _row(found: Plan, strategy: Strategy) -> dict[str, Any]:
    low, high = found.options.acceptance.range
    doubts = [] if strategy.precise else ["less precise"]
    if not strategy.fits:
        doubts.append("RAM does not suffice")
    if strategy.bits is not None and not low - 0.1 <= strategy.bits <= high + 0.1:
        doubts.append("acceptance extrapolated")
    return {
        "model": ("> " if strategy is found.take else "  ") + strategy.name,
        "k": strategy.k,
        "VRAM": binary(strategy.vram) if strategy.vram else "-",
        "RAM": binary(strategy.ram),
        "read_vram_bytes": strategy.read_vram,
        "read_ram_bytes": strategy.read_ram,
        "draft ms": f"{strategy.draft_s * 1e3:.1f}" if strategy.k else "-",
        "check ms": f"{strategy.check_s * 1e3:.1f}",
        "tokens a check": f"{strategy.tokens_per_check:.2f}",
        "tok/s": f"{strategy.tokens_per_s:.1f}",
        "weight_error": strategy.loss**0.5,
        "note": ", ".join(doubts),
    }


def as_dict(found: Plan) -> dict[str, Any]:
    """Return everything for JSON."""
    setting = found.setting
    model = {key: value for key, value in vars(setting.model).items() if isinstance(value, int | str | bool)}
    return {
        "model": model | {"weights": setting.model.weights},
        "machine": setting.machine.document(),
        "ctx": setting.ctx,
        "filled": setting.filled,
        "reserve": setting.reserve,
        "precision": found.options.precision,
        "strategies": [vars(strategy) for strategy in found.strategies],
        "take": found.take.name if found.take else None,
        "why": found.why,
        "assumptions": assumptions(found),
    }


def save(found: Plan, json_path: Path | None, plot_path: Path | None) -> None:
    """Write the JSON document and the plot, where there is a path; FileAccessError if that fails."""
    try:
        if json_path is not None:
            json_path.write_text(json.dumps(as_dict(found)) + "\n", "utf-8")
        if plot_path is not None:
            plot(found).savefig(plot_path, dpi=150)
    except OSError as error:
        raise errors.FileAccessError(f"{error.filename}: {error.strerror}") from error


def plot(found: Plan) -> Any:
    """Draw a bar for each strategy, pale if it is less precise or does not fit; return matplotlib's figure.

    Raises
    ------
    ArgumentError
        if matplotlib is missing.
    """
    figure = results.figure(height=1.2 + 0.24 * len(found.strategies))
    axes = figure.add_subplot()
    for place, strategy in enumerate(reversed(found.strategies)):
        able = strategy.precise and strategy.fits
        axes.barh(place, strategy.tokens_per_s, color=_COLORS[strategy.kind], alpha=1 if able else 0.3)
        mark = " < take" if strategy is found.take else ""
        axes.text(strategy.tokens_per_s, place, f" {strategy.tokens_per_s:.1f}{mark}", va="center", fontsize=7)
    names = [strategy.name + (f", k={strategy.k}" if strategy.k else "") for strategy in reversed(found.strategies)]
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("predicted tok/s (pale: ruled out)")
    axes.margins(x=0.15, y=0.01)
    return figure
