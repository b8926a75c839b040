"""Results of `twofold eval`: a table, JSON, a plot."""

from __future__ import annotations

import shlex
from typing import Any

from twofold import divergence, info, results, windows
from twofold.evalmodels import MODES, REFERENCE, Settings
from twofold.evaluate import Row
from twofold.report import table

_KEYS = [
    *("model", "mode", "text", "ram_bpw", "vram_bpw", "kld_mean", "kld_ci_low", "kld_ci_high"),
    *("kld_median", "kld_p99", "top1", "ppl", "tokens"),
]
_MEANINGS = {
    "exact": "weights dequantized to float32, float32 activations, keys and values; plain llama.cpp, on the CPU",
    "runtime": "as it really runs: pairs by twofold, other files by llama.cpp with their own types",
    REFERENCE: "the float32 run of the reference; its divergences are what storing its logits in 16 bits costs",
}


def render(rows: list[Row], settings: Settings) -> str:
    """Return the table for people, and what its figures mean."""
    base = {row.values["text"]: row.values["ppl"] for row in rows if row.values["model"] == REFERENCE}
    lines = []
    for row in rows:
        values = row.values
        lines.append(
            {
                "model": values["model"],
                "mode": values["mode"],
                "text": values["text"],
                "RAM bits": f"{values['ram_bpw']:.2f}",
                "VRAM bits": f"{values['vram_bpw']:.2f}",
                "KLD mean": f"{values['kld_mean']:.3e}",
                "95% interval": f"{values['kld_ci_low']:.2e} .. {values['kld_ci_high']:.2e}",
                "median": f"{values['kld_median']:.2e}",
                "p99": f"{values['kld_p99']:.2e}",
                "top-1": f"{values['top1']:.2%}",
                "ppl": f"{values['ppl']:.4f}",
                "ppl ratio": f"{values['ppl'] / base[values['text']]:.5f}",
                "tokens": values["tokens"],
            }
        )
    notes = [
        f"KLD: nats from {settings.reference}. Bits: a weight, over the matrices that the pair splits.",
        *(f"{name}: {_MEANINGS[name]}." for name in (*settings.modes, REFERENCE)),
        f"Interval: {divergence.INTERVAL_METHOD}.",
        f"Tokens: {windows.SCORING} (ctx {settings.ctx}).",
    ]
    return "\n".join([table(lines), "", *notes])


def metadata(settings: Settings, command: list[str]) -> dict[str, Any]:
    """Return what is needed to measure the same again."""
    about = info.collect()
    versions = {key: about[key] for key in ("twofold", "llama_cpp_python", "ggml", "python", "platform")}
    return {
        "command": shlex.join(command),
        "versions": versions,
        "cpu": about["cpu"]["model"],
        "kernel": about["kernel"],
        "threads": settings.threads,
        "gpu_layers": settings.gpu_layers,
        "batch": settings.batch,
        "reference": str(settings.reference),
        "pairs": [str(path) for path in settings.pairs],
        "compare": [str(path) for path in settings.compare],
        "texts": [str(path) for path in settings.texts or windows.bundled_texts()],
        "modes": {name: _MEANINGS[name] for name in (*settings.modes, REFERENCE)},
        "ctx": settings.ctx,
        "tokens_limit": settings.tokens,
        "scoring": windows.SCORING,
        "interval": divergence.INTERVAL_METHOD,
    }


def as_rows(rows: list[Row]) -> list[dict[str, Any]]:
    """Return the rows for JSON."""
    return [{key: row.values[key] for key in _KEYS} for row in rows]


def plot(rows: list[Row]) -> Any:
    """Draw mean KLD over all texts against bits a weight in RAM: a panel for each mode, a colour for each pair.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ArgumentError
        if matplotlib is not installed.
    """
    pooled = [row for row in rows if row.values["text"] == "all"]
    modes = [mode for mode in MODES if any(r.values["mode"] == mode for r in pooled if r.group != REFERENCE)]
    figure = results.figure(width=6 * len(modes))
    panels = figure.subplots(1, len(modes), sharey=True, squeeze=False)
    floor = next(row.values["kld_mean"] for row in pooled if row.group == REFERENCE)
    groups = list(dict.fromkeys(row.group for row in pooled if row.group != REFERENCE))
    for panel, mode in zip(panels[0], modes, strict=True):
        for number, group in enumerate(groups):
            points = [row.values for row in pooled if row.group == group and row.values["mode"] == mode]
            _draw(panel, group, points, f"C{number}")
        panel.axhline(floor, color="grey", linestyle=":", label="noise floor")
        panel.set(yscale="log", xlabel="bits a weight in RAM", title=mode)
        panel.margins(x=0.2, y=0.12)  # room for the labels
        panel.grid(alpha=0.3)
    panels[0][0].set_ylabel("mean KL divergence (nats)")
    panels[0][-1].legend()
    return figure


def _draw(panel: Any, group: str, points: list[dict[str, Any]], colour: str) -> None:
    ordinary = group == "GGUF"
    x, y = [p["ram_bpw"] for p in points], [p["kld_mean"] for p in points]
    error = [[p["kld_mean"] - p["kld_ci_low"] for p in points], [p["kld_ci_high"] - p["kld_mean"] for p in points]]
    label = "other GGUF files" if ordinary else group
    panel.errorbar(x, y, error, fmt="s" if ordinary else "o-", color=colour, capsize=3, label=label)
    for point in points:
        panel.annotate(point["model"], (point["ram_bpw"], point["kld_mean"]), (5, 5), textcoords="offset points")
