#!/usr/bin/env python3
"""Time single decodes of a pair: loading, a draft token, checks by width, and Python's share of a draft token.

With --compare the same widths of an ordinary GGUF file, by llama_cpp, in the same run. Medians, in milliseconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import twofold
from twofold import speculate, timing
from twofold.decoder import physical_cores
from twofold.llama_log import quiet_log
from twofold.pace import Fixed

WIDTHS = (1, 2, 3, 4, 5, 8, 16, 32)
CONTEXT = 64


def median_ms(run: Callable[[], None], repeats: int) -> float:
    """Return the median time of `run`."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return round(float(np.median(seconds)) * 1e3, 2)


def pair_times(llm: twofold.Llama, tokens: list[int], widths: list[int], repeats: int) -> dict[str, Any]:
    """Time a draft token and checks after `CONTEXT` tokens."""
    decoder = llm._decoder
    llm.eval(tokens[:CONTEXT])

    def check(width: int) -> None:
        decoder.truncate(CONTEXT)
        decoder.decode(tokens[CONTEXT : CONTEXT + width], CONTEXT, all_rows=True)

    drafts = median_ms(
        lambda: void(speculate.draft(decoder, tokens[CONTEXT], CONTEXT, 8, speculate.Drafting(Fixed(8)))), repeats
    )
    checks = {str(width): median_ms(lambda width=width: check(width), repeats) for width in widths}
    decoder.truncate(CONTEXT)
    share = python_share(decoder, tokens, repeats)
    return {"draft_ms": round(drafts / 8, 2), "check_ms": checks, "python_share": share}


def void(_: object) -> None:
    """Drop a result."""


def python_share(decoder: Any, tokens: list[int], repeats: int) -> float:
    """Share of a draft's time that is not spent inside llama_decode."""
    inside, original = 0.0, llama_cpp.llama_decode

    def timed(*arguments: Any) -> Any:
        nonlocal inside
        start = time.perf_counter()
        result = original(*arguments)
        inside += time.perf_counter() - start
        return result

    llama_cpp.llama_decode = timed
    start = time.perf_counter()
    try:
        for _ in range(repeats):
            speculate.draft(decoder, tokens[CONTEXT], CONTEXT, 8, speculate.Drafting(Fixed(8)))
    finally:
        llama_cpp.llama_decode = original
    return round(1 - inside / (time.perf_counter() - start), 4)


def plain_times(path: Path, tokens: list[int], widths: list[int], repeats: int) -> dict[str, float]:
    """Time an ordinary model's decodes by width."""
    cores = physical_cores()
    llm = llama_cpp.Llama(str(path), n_ctx=1024, n_threads=cores, n_threads_batch=cores, flash_attn=True, verbose=False)
    llm.eval(tokens[:CONTEXT])

    def decode(width: int) -> None:
        llm.n_tokens = CONTEXT
        llm.eval(tokens[CONTEXT : CONTEXT + width])

    return {str(width): median_ms(lambda width=width: decode(width), repeats) for width in widths}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="NAME.base.gguf")
    parser.add_argument("--residual-bits", type=int)
    parser.add_argument("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="N", help="tokens of a decode")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-claim", action="store_true", help="leave products of base weights to ggml")
    parser.add_argument("--random", action="store_true", help="random tokens: pairs of random_pair.py have no texts")
    parser.add_argument("--compare", type=Path, help="an ordinary GGUF file of the same vocabulary")
    args = parser.parse_args()
    quiet_log()
    bandwidth = float(np.median(timing.read_bandwidth(np.ones(256 << 20, np.uint8), threads=physical_cores())))
    start = time.perf_counter()
    options: dict[str, Any] = {"residual_bits": args.residual_bits, "claim": False if args.no_claim else None}
    llm = twofold.Llama(args.base, n_ctx=1024, verbose=False, **options)
    result: dict[str, Any] = {"load_s": round(time.perf_counter() - start, 2), "read_gb_s": round(bandwidth / 1e9, 1)}
    count = CONTEXT + max(args.widths)
    if args.random:
        tokens = [int(token) for token in np.random.default_rng(0).integers(3, llm.n_vocab(), count)]
    else:
        tokens = llm.tokenize(Path(__file__).read_bytes())[:count]
    result |= pair_times(llm, tokens, args.widths, args.repeats)
    if args.compare:
        result["compare_ms"] = plain_times(args.compare, tokens, args.widths, args.repeats)
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
