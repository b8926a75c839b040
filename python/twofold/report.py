"""What is in a pair, and what a conversion lost: values for JSON and tables for people."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from twofold.convert import Conversion, Error
from twofold.layout import AS_ASKED, WHOLE_KEY
from twofold.metadata import Gguf, Tensor
from twofold.pairfile import Pair, open_pair, residual_bytes
from twofold.rounding import MANNERS

_BLOCK = re.compile(r"^blk\.\d+\.|\.weight$")
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_HEADERS = {"full_error": "base+residual error"}
_LEFT = (
    "draft",
    "kind",
    "source",
    "base",
    "tensor",
    "reason",
    "kinds",
    "shape",
    "model",
    "mode",
    "text",
    "strategy",
    "note",
)


def size(count: float) -> str:
    """Bytes in decimal units, for instance ``1.23 GB``."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.{2 if count < 10 * scale else 1}f} {unit}"
    return f"{count:.0f} B"


def _count(number: float) -> str:
    for unit, scale in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= scale:
            return f"{number / scale:.{2 if number < 10 * scale else 1}f} {unit}"
    return f"{number:.0f}"


@dataclass(frozen=True)
class Entry:
    """A tensor of the base.

    Attributes
    ----------
    base
        name, type, shape and bytes in the base file.
    residual
        bytes of its residual by bits; empty if it has none.
    source_type, error
        what it was made from, and what was lost; known right after a conversion only.
    reason
        why it has no residual.
    """

    base: Tensor
    residual: dict[int, int]
    source_type: str | None = None
    error: Error | None = None
    reason: str = "no residual"

    @property
    def kind(self) -> str:
        """Name without block number and ``.weight``."""
        return _BLOCK.sub("", self.base.name)


@dataclass(frozen=True)
class Report:
    """A pair, tensor by tensor; `converted` says that sources, errors and `rounding` are known.

    `rounding` counts matrices by the manner in which they were rounded (:data:`twofold.rounding.MANNERS`).
    """

    base: str
    residual: str
    architecture: str
    bits: int
    group: int
    file_bytes: tuple[int, int]
    entries: list[Entry] = field(default_factory=list)
    converted: bool = False
    rounding: dict[str, int] = field(default_factory=dict)
    chosen: str = ""  # how the VRAM is filled, where convert was asked to

    def split(self) -> list[Entry]:
        """Tensors that the residual completes."""
        return [entry for entry in self.entries if entry.residual]

    def whole(self) -> list[Entry]:
        """Tensors that are in the base alone."""
        return [entry for entry in self.entries if not entry.residual]


def inspect(pair: Pair) -> Report:
    """Describe a pair that was opened."""
    held = pair.residual.bits
    kept = Gguf(pair.base).string(WHOLE_KEY, "").splitlines()
    entries = []
    for tensor in pair.tensors:
        completed = pair.completed.get(tensor.name)
        sizes = {b: residual_bytes(completed, b) for b in (4, 6, 8) if b <= held} if completed else {}
        entries.append(Entry(tensor, sizes, reason=AS_ASKED if tensor.name in kept else "no residual"))
    files = (pair.base.stat().st_size, pair.residual.path.stat().st_size)
    paths = (str(pair.base), str(pair.residual.path))
    return Report(*paths, pair.architecture, held, pair.residual.group, files, entries)


def converted(done: Conversion) -> Report:
    """Describe what a conversion wrote, read back from its files, with its sources and errors."""
    report = inspect(open_pair(done.base, done.residual))
    splits = {split.base.name: split for split in done.splits}
    entries = []
    for entry in report.entries:
        split = splits[entry.base.name]
        error = done.errors.get(entry.base.name)
        entries.append(Entry(entry.base, entry.residual, split.source.kind.name, error, split.reason))
    rounding = {manner: list(done.manners.values()).count(manner) for manner in MANNERS}
    chosen = done.choice.text if done.choice else ""
    return Report(**{**vars(report), "entries": entries, "converted": True, "rounding": rounding, "chosen": chosen})


# ---- values ------------------------------------------------------------------------------------------


def _grouped(entries: Iterable[Entry], key: str) -> dict[str, list[Entry]]:
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(getattr(entry, key), []).append(entry)
    return groups


def _types(names: Iterable[str | None]) -> str:
    return "+".join(sorted({name for name in names if name is not None}))


def kinds(report: Report) -> list[dict[str, Any]]:
    """Return one row for each kind of split tensor, all blocks together."""
    rows = []
    for kind, entries in _grouped(report.split(), "kind").items():
        row: dict[str, Any] = {"kind": kind, "tensors": len(entries), "weights": sum(e.base.weights for e in entries)}
        if report.converted:
            row["source"] = _types(e.source_type for e in entries)
        row["base"] = _types(e.base.kind.name for e in entries)
        if report.converted:
            total = Error()
            for entry in entries:
                total.add(entry.error or Error())
            row["base_error"], row["full_error"] = total.relative
        row["base_bytes"] = sum(e.base.bytes for e in entries)
        row["residual_bytes"] = sum(e.residual[report.bits] for e in entries)
        rows.append(row)
    return rows


def whole(report: Report) -> list[dict[str, Any]]:
    """Return one row for each reason why tensors were kept whole."""
    return [
        {
            "reason": reason,
            "tensors": len(entries),
            "weights": sum(e.base.weights for e in entries),
            "base_bytes": sum(e.base.bytes for e in entries),
            "base": _types(e.base.kind.name for e in entries),
            "kinds": list(_grouped(entries, "kind")),
        }
        for reason, entries in _grouped(report.whole(), "reason").items()
    ]


def totals(report: Report) -> dict[str, Any]:
    """Return sizes of the files, in VRAM and in RAM, and bits a weight over the split matrices."""
    split = report.split()
    weights = max(1, sum(e.base.weights for e in split))
    names = {entry.base.name for entry in report.entries}
    # llama.cpp keeps the embeddings in RAM; where they are the head as well, it puts a copy of them into VRAM.
    in_ram = {_EMBEDDING} if _HEAD in names else set()
    residual = {b: sum(e.residual[b] for e in split) for b in (4, 6, 8) if b <= report.bits}
    return {
        "base_file_bytes": report.file_bytes[0],
        "residual_file_bytes": report.file_bytes[1],
        "vram_bytes": sum(e.base.bytes for e in report.entries if e.base.name not in in_ram),
        "residual_ram_bytes": residual,
        "base_bpw": 8 * sum(e.base.bytes for e in split) / weights,
        "residual_bpw": {b: 8 * count / weights for b, count in residual.items()},
    }


def tensors(report: Report) -> list[dict[str, Any]]:
    """Return one row for each tensor of the base."""
    return [
        {
            "tensor": entry.base.name,
            "shape": list(entry.base.shape),
            "base": entry.base.kind.name,
            "bpw": entry.base.kind.bpw,
            "base_bytes": entry.base.bytes,
            "residual_bits": report.bits if entry.residual else None,
            "group": report.group if entry.residual else None,
            "residual_bytes": entry.residual.get(report.bits),
        }
        for entry in report.entries
    ]


def as_dict(report: Report, *, with_tensors: bool = False) -> dict[str, Any]:
    """Return everything for JSON."""
    values = {key: getattr(report, key) for key in ("base", "residual", "architecture", "bits", "group")}
    values |= {"kinds": kinds(report), "whole": whole(report), "totals": totals(report)}
    if report.converted:
        values |= {"rounding": report.rounding, "vram": report.chosen or None}
    return values | ({"tensors": tensors(report)} if with_tensors else {})


# ---- tables ------------------------------------------------------------------------------------------


def render(report: Report, *, with_tensors: bool = False) -> str:
    """Return the tables for people."""
    head = f"{report.base} ({report.architecture}) with {report.residual} ({report.bits} bits, group {report.group})"
    parts = [head, table(kinds(report))]
    rows = whole(report)
    if rows:
        parts.append("kept whole in the base:\n" + table(rows))
    if with_tensors:
        parts.append(table(tensors(report)))
    return "\n\n".join([*parts, _totals_text(report)])


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows with the same keys as aligned columns under their names."""
    columns = list(rows[0]) if rows else []
    cells = [[_HEADERS.get(column, column.replace("_", " ")) for column in columns]]
    cells += [[_cell(column, row[column]) for column in columns] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    aligns = ["<" if column in _LEFT else ">" for column in columns]
    layout = list(zip(aligns, widths, strict=True))
    return "\n".join(
        "  ".join(f"{text:{align}{width}}" for text, (align, width) in zip(line, layout, strict=True)).rstrip()
        for line in cells
    )


def _cell(column: str, value: Any) -> str:
    if value is None:
        return "-"
    if column.endswith("_bytes"):
        return size(value)
    if column.endswith("_error"):
        return f"{value:.3%}"
    if column == "weights":
        return _count(value)
    if isinstance(value, list):
        return (" x " if column == "shape" else " ").join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _totals_text(report: Report) -> str:
    total = totals(report)
    ram, bpw = total["residual_ram_bytes"], total["residual_bpw"]
    lines = [
        ("base file", f"{size(total['base_file_bytes'])}, of which {size(total['vram_bytes'])} in VRAM when all of it "
         "is offloaded"),
        ("residual file", size(total["residual_file_bytes"])),
        ("residual in RAM", ", ".join(f"{size(count)} at {bits} bits" for bits, count in ram.items())),
        ("bits a weight", f"base {total['base_bpw']:.2f}, residual "
         + ", ".join(f"{value:.2f} at {bits}" for bits, value in bpw.items()) + ", over the split matrices"),
    ]  # fmt: skip
    if report.converted:
        count = report.rounding
        lines.append(("rounding", f"{count['feedback']} matrices with error feedback, {count['importance']} by "
                      f"importance, {count['plain']} plainly"))  # fmt: skip
    if report.chosen:
        lines.append(("VRAM", report.chosen))
    return "\n".join(f"{name:15}  {value}" for name, value in lines)
