"""Where the parts of a loaded pair lie, as the graph that runs has them, and what of it was not asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from twofold.engine import DeviceUse, Seen
from twofold.units import binary

RAM = "RAM"
_PARTS = (  # the first that fits
    (re.compile(r"token_embd\.|per_layer_token_embd\."), "embeddings"),
    (re.compile(r"output\."), "head"),
    (re.compile(r"cache_"), "KV cache"),
    (re.compile(r"blk\.\d+\."), "layers"),
    (re.compile(r".*\.(weight|bias)$"), "other weights"),
)
# Looking rows up costs next to nothing, and llama.cpp keeps that in RAM on purpose; the others compute nothing.
_FREE = {"GET_ROWS", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE", "NONE"}


@dataclass(frozen=True)
class Part:
    """Tensors of one kind in one place; `place` is a device's name or ``RAM``."""

    name: str
    place: str
    tensors: int
    size: int


@dataclass(frozen=True)
class Whereabouts:
    """Parts and places of a loaded pair.

    Attributes
    ----------
    parts
        weights and cache, by kind and place.
    computed
        nodes of the graph by the device that computes them.
    uses
        what the engine does with the devices.
    residual_bytes
        of RAM that a check reads.
    warnings
        what lies or runs on the CPU although it was to be on a device.
    """

    parts: tuple[Part, ...]
    computed: dict[str, int]
    uses: tuple[DeviceUse, ...]
    residual_bytes: int
    warnings: tuple[str, ...] = field(default=())

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        return {
            "parts": [vars(part) for part in self.parts],
            "computed": self.computed,
            "devices": [vars(use) for use in self.uses],
            "residual_bytes": self.residual_bytes,
            "warnings": list(self.warnings),
        }

    def line(self) -> str:
        """Say everything in one line, largest parts first."""
        places: dict[str, list[Part]] = {}
        for part in sorted(self.parts, key=lambda part: -part.size):
            places.setdefault(part.place, []).append(part)
        texts = [
            f"{place}: {', '.join(f'{part.name} {binary(part.size)}' for part in found)}"
            for place, found in places.items()
            if place != RAM
        ]
        ram = [f"{part.name} {binary(part.size)}" for part in places.get(RAM, [])]
        texts.append(f"{RAM}: {', '.join([*ram, f'residual {binary(self.residual_bytes)}'])}")
        return "; ".join([*texts, *map(use_line, self.uses)])


def use_line(use: DeviceUse) -> str:
    """Say what the engine does with a device."""
    adds = "results are added there" if use.adds else "results are fetched, added to in RAM and stored"
    copies = f"{'pinned' if use.pinned else 'pageable'} copies, {'asynchronous' if use.asynchronous else 'waited for'}"
    if use.stage_columns:
        stage = (
            f"prompts of {use.stage_columns} tokens or more are multiplied there ({binary(use.stage_bytes)} staging)"
        )
    else:
        stage = "prompts are completed by the CPU"
    return f"{use.name}: {adds}, {stage}, {copies}"


def locate(
    seen: Sequence[Seen], uses: Sequence[DeviceUse], residual_bytes: int, *, all_layers: bool, staging: bool
) -> Whereabouts:
    """Sort out what a survey has seen.

    Parameters
    ----------
    all_layers
        whether everything was to be on devices; what is not there is then worth a warning.
    staging
        whether prompts were to be multiplied there.
    """
    reads = {item.name: item for item in seen if item.op == "NONE"}
    totals: dict[tuple[str, str], list[int]] = {}
    for item in reads.values():
        name = next((part for pattern, part in _PARTS if pattern.match(item.name)), None)
        if name is not None:
            totals.setdefault((name, RAM if item.host else item.device), []).append(item.size)
    parts = tuple(Part(name, place, len(sizes), sum(sizes)) for (name, place), sizes in totals.items())
    nodes = [item for item in seen if item.op not in _FREE]
    computed = Counter("CPU" if item.host else item.device for item in nodes)
    warnings = tuple(_warnings(parts, nodes, uses, staging)) if all_layers else ()
    return Whereabouts(parts, dict(computed), tuple(uses), residual_bytes, warnings)


def _warnings(parts: Sequence[Part], nodes: Sequence[Seen], uses: Sequence[DeviceUse], staging: bool) -> list[str]:
    if all(part.place == RAM for part in parts) and all(node.host for node in nodes):
        return ["no device was found: everything is on the CPU (twofold info lists devices)"]
    found = [
        f"{part.name} ({part.tensors} tensors, {binary(part.size)}) in RAM, not on a device"
        for part in parts
        if part.place == RAM and part.name != "embeddings"
    ]
    ops = Counter(node.op for node in nodes if node.host)
    if ops:
        found.append(f"the CPU computes {', '.join(f'{count} {op}' for op, count in ops.most_common())}")
    for use in uses:
        if not use.adds:
            found.append(f"{use.name} cannot add results: they cross twice more")
        if staging and not use.stage_columns:
            found.append(f"{use.name} has no room or no operations for staging: the CPU completes prompts")
    return found
