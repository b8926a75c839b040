#!/usr/bin/env python3
"""Time prompts on the CPU: the full model of a pair, and ordinary GGUF files by llama-cpp-python, taking turns.

Prints medians and quartiles of tokens a second, and the median of their ratio to the first ordinary file, turn by turn.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import twofold
from twofold import info, report
from twofold.decoder import physical_cores
from twofold.llama_log import quiet_log
from twofold.windows import bundled_texts

LENGTHS = (64, 512)


def seconds(llm: Any, prompt: list[int]) -> float:
    """Evaluate a prompt from scratch."""
    llm.reset()
    llm._ctx.kv_cache_clear()
    start = time.perf_counter()
    llm.eval(prompt)
    return time.perf_counter() - start


def rows(models: dict[str, Any], text: list[int], length: int, repeats: int) -> list[dict[str, Any]]:
    """Return one row for each model; ratios are to the first ordinary one."""
    prompt = text[:length]
    length = len(prompt)
    for llm in models.values():
        seconds(llm, prompt)
    rates = {name: np.zeros(repeats) for name in models}
    for turn in range(repeats):
        for name, llm in models.items():
            rates[name][turn] = length / seconds(llm, prompt)
    compared = list(rates.values())[min(1, len(rates) - 1)]
    return [
        {
            "model": name,
            "tokens": length,
            "tok/s": round(float(np.median(rate)), 1),
            "quartiles": [round(float(x), 1) for x in np.quantile(rate, [0.25, 0.75])],
            "ratio": round(float(np.median(rate / compared)), 3),
        }
        for name, rate in rates.items()
    ]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="NAME.base.gguf")
    parser.add_argument("--compare", type=Path, nargs="+", default=[], help="ordinary GGUF files, same vocabulary")
    parser.add_argument("--residual-bits", type=int)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    quiet_log()
    cores = physical_cores()
    settings: dict[str, Any] = {
        "n_ctx": max(args.lengths) + 64,
        "n_threads": cores,
        "n_threads_batch": cores,
        "flash_attn": True,
        "verbose": False,
    }
    pair = twofold.Llama(args.base, residual_bits=args.residual_bits, n_gpu_layers=0, **settings)
    models: dict[str, Any] = {f"{args.base.name} r{pair.residual_bits}": pair}
    for path in args.compare:
        models[path.name] = llama_cpp.Llama(str(path), n_gpu_layers=0, **settings)
    text = pair.tokenize(b"\n".join(path.read_bytes() for path in bundled_texts()))
    table = [row for length in args.lengths for row in rows(models, text, length, args.repeats)]
    print(f"{info.cpu()['model']}, {cores} threads, {args.repeats} turns")
    print(report.table(table))
    if args.json:
        args.json.write_text(json.dumps(table, indent=1) + "\n")


if __name__ == "__main__":
    main()
