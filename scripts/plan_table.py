#!/usr/bin/env python3
"""Print `twofold plan`'s answers for a model on many machines: VRAM sizes times kinds of RAM, as a Markdown table.

The kernel rates are this CPU's, measured once and scaled to --cores; all else is told. SRC may be a mere header
(scripts/make_header.py).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from twofold import acceptance, machine, planning, shapes, units
from twofold.placement import Setting
from twofold.planning import Options, Plan, Strategy

GIB = 1 << 30


def best(found: Plan, kind: str) -> Strategy | None:
    """Return the fastest of a kind that fits and is as precise as asked for."""
    able = [s for s in found.strategies if s.kind == kind and s.fits and s.precise]
    return max(able, key=lambda s: s.tokens_per_s, default=None)


def cell(found: Strategy | None) -> str:
    """Name, draft length and rate."""
    if found is None:
        return "-"
    return f"{found.name}{f', k = {found.k}' if found.k else ''}: {found.tokens_per_s:.1f}"


def row(setting: Setting, options: Options, name: str) -> Sequence[str]:
    """Return the cells of one machine."""
    found = planning.plan(setting, options)
    plain, drafter, ours = (best(found, kind) for kind in ("plain", "drafter", "twofold"))
    others = [s.tokens_per_s for s in (plain, drafter) if s is not None]
    gain = f"{ours.tokens_per_s / max(others):.2f}" if ours and others else "-"
    take = found.take.name if found.take else "-"
    return [f"{setting.machine.vram / GIB:.0f} GiB", name, cell(plain), cell(drafter), cell(ours), gain, take]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("source", type=Path, metavar="SRC", help="GGUF file or header")
    add("--vram", type=units.size, nargs="+", default=[n * GIB for n in (8, 12, 16, 24)])
    add("--vram-bandwidth", type=units.rate, nargs="+", required=True, help="of each VRAM, 500GB/s")
    add("--ram-bandwidth", type=units.rate, nargs="+", required=True, help="60GB/s 150GB/s")
    add("--pcie", type=units.rate, required=True)
    add("--ram", type=units.size, default=64 * GIB)
    add("--cores", type=int, required=True)
    add("--ctx", type=int, default=8192)
    add("--drafter-size", type=units.size, required=True, help="of a trained drafter, 1GB")
    add("--precision", default="q8_0")
    args = parser.parse_args()
    known = acceptance.load("calibrated")
    options = Options(known, planning.Drafter(args.drafter_size, known.drafter), args.precision)
    model = shapes.read(args.source)
    here = machine.describe(machine.Told(0, None, None, args.ram, args.ram_bandwidth[0], args.cores))
    head = ["VRAM", "RAM", "plain: tok/s", "with a drafter", "twofold", "gain", "take"]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for ram in args.ram_bandwidth:
        for vram, bandwidth in zip(args.vram, args.vram_bandwidth, strict=True):
            told = replace(here, vram=vram, vram_bandwidth=bandwidth, pcie=args.pcie, ram_bandwidth=ram)
            setting = Setting(model, told, args.ctx, args.ctx // 2, GIB)
            print("| " + " | ".join(row(setting, options, f"{ram / 1e9:.0f} GB/s")) + " |", flush=True)
    print(f"\nkernel rates: {here.measured['kernel rates']}")
    for line in planning.assumptions(planning.Plan(setting, options)):
        print(f"- {line}")


if __name__ == "__main__":
    main()
