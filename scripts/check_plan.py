#!/usr/bin/env python3
"""Predict a pair's tokens a second on this machine's CPU with the plan's cost model, measure them, print the errors.

The bandwidth of the RAM is read beside each measurement. Plain decoding and drafts of 2, 4 and 8 tokens, at each
number of residual bits. "pred" uses acceptance from the package's curves, "pred P" the tokens per check that were
measured here, so that it shows the error of the times alone. All cores that it may use are taken (taskset restricts
them).
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import twofold
from twofold import acceptance, machine, placement, planning, report, shapes, speculate
from twofold.blocks import GgmlType
from twofold.cost import Load, decode
from twofold.decoder import physical_cores
from twofold.llama_log import quiet_log
from twofold.metadata import Gguf
from twofold.pace import Fixed
from twofold.pairfile import Pair, open_pair
from twofold.prompts import prompts as packaged_prompts
from twofold.shapes import Matrix

DRAFTS = (0, 2, 4, 8)
CONTEXT = 64


@dataclass(frozen=True)
class FileBase(placement.Base):
    """The types that a base file has."""

    types: dict[str, GgmlType] = field(default_factory=dict)

    def type_of(self, matrix: Matrix) -> GgmlType | None:
        """Type of a matrix that the residual completes."""
        return self.types.get(matrix.name)


def setting_of(pair: Pair) -> placement.Setting:
    """Describe the pair's shapes and this machine without its GPU."""
    model = shapes.describe(pair.base.name, Gguf(pair.base), {tensor.name: tensor for tensor in pair.tensors})
    here = machine.describe(machine.Told(vram=0))
    return placement.Setting(model, here, 1024, CONTEXT, 0)


def measure(llm: twofold.Llama, prompts: list[str], tokens: int) -> dict[int, dict[str, float]]:
    """Return tokens a second and tokens per check by number of drafts, over all prompts."""
    found = {}
    for k in DRAFTS:
        llm.draft_tokens = k
        made, seconds, checks, yielded = 0, 0.0, 0, 0.0
        for prompt in prompts:
            llm.reset()
            llm.create_completion(prompt, max_tokens=tokens, temperature=0)
            stats = llm.stats
            made += stats["tokens"] - 1  # the first one is the prompt's
            seconds += stats["draft_s"] + stats["verify_s"]
            checks += stats["complete_checks"]
            yielded += stats["tokens_per_check"] * stats["complete_checks"]
        found[k] = {"tok_s": made / seconds, "tokens_per_check": yielded / max(1, checks)}
    return found


def decodes(llm: twofold.Llama, repeats: int) -> tuple[float, dict[int, float]]:
    """Median seconds of a draft token, and of checks by k."""
    decoder = llm._decoder
    text = llm.tokenize(Path(__file__).read_bytes())[: CONTEXT + max(DRAFTS) + 1]
    llm.eval(text[:CONTEXT])

    def median(run: Any) -> float:
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
            decoder.truncate(CONTEXT)
        return float(np.median(seconds))

    longest = max(DRAFTS)
    how = speculate.Drafting(Fixed(longest))
    draft = median(lambda: speculate.draft(decoder, text[CONTEXT], CONTEXT, longest, how)) / longest
    checks = {
        k: median(lambda k=k: decoder.decode(text[CONTEXT : CONTEXT + k + 1], CONTEXT, all_rows=True)) for k in DRAFTS
    }
    return draft, checks


def bandwidth() -> float:
    """Bytes a second that this machine reads now: shared machines change from minute to minute."""
    return machine.read_bandwidth(physical_cores())


def rows(
    setting: placement.Setting, placed: placement.Placed, bits: int, measured: dict[int, dict[str, float]], timed: Any
) -> list[dict[str, Any]]:
    """Return one row for each number of drafts."""
    load: Load = placed.load
    yields = acceptance.load().tokens(placed.bits)
    draft, found = decode(load, setting.machine, 1, residual=False), []
    for k in DRAFTS:
        check = planning.check_seconds(setting, load, k)
        real = measured[k]["tok_s"]
        by_curve = yields[k] / (k * draft + check)
        by_checks = measured[k]["tokens_per_check"] / (k * draft + check)
        found.append(
            {
                "residual": f"r{bits}",
                "GB/s": round(setting.machine.ram_bandwidth / 1e9, 1),
                "k": k,
                "draft ms": round(draft * 1e3, 2),
                "measured draft": round(timed[0] * 1e3, 2),
                "check ms": round(check * 1e3, 2),
                "measured check": round(timed[1][k] * 1e3, 2),
                "P curve": round(yields[k], 2),
                "P": round(measured[k]["tokens_per_check"], 2),
                "tok/s": round(real, 1),
                "pred": round(by_curve, 1),
                "off": f"{by_curve / real - 1:+.0%}",
                "pred P": round(by_checks, 1),
                "off P": f"{by_checks / real - 1:+.0%}",
            }
        )
    return found


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="NAME.base.gguf")
    parser.add_argument("--residual-bits", type=int, nargs="+", choices=(4, 6, 8), help="default: all in the file")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet_log()
    pair = open_pair(args.base)
    setting = setting_of(pair)
    base = FileBase(
        "auto", types={tensor.name: tensor.kind for tensor in pair.tensors if tensor.name in pair.completed}
    )
    prompts = [prompt["prompt"] for prompt in packaged_prompts(args.prompts)]
    llm = twofold.Llama(args.base, n_ctx=1024, n_gpu_layers=0, drafter=None, verbose=False)
    table = []
    for bits in args.residual_bits or [pair.residual.bits]:
        llm.residual_bits = bits
        placed = placement.twofold(setting, base, bits)
        llm.reset()
        readings = [bandwidth()]
        timed = decodes(llm, args.repeats)
        readings.append(bandwidth())
        measured = measure(llm, prompts, args.tokens)
        readings.append(bandwidth())
        here = replace(setting.machine, ram_bandwidth=float(np.median(readings)))
        table += rows(replace(setting, machine=here), placed, bits, measured, timed)
    print(f"{args.base.name}: base {placed.split_bits:.2f} bits")
    print(report.table(table))
    if args.json:
        args.json.write_text(json.dumps({"rows": table, "machine": setting.machine.document()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
