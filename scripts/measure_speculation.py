#!/usr/bin/env python3
"""Speculative against plain greedy decoding of the same full model, over prompts of the repository.

For each prompt: are the tokens the same, how many tokens does a check yield, and how fast are both. Where texts
diverge, the margin between the two likeliest tokens at that place is printed: a near-tie is rounding, anything else
a fault.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import twofold
from twofold import prompting
from twofold.blocks import default_kernel
from twofold.decoder import quiet_log
from twofold.prompts import KINDS, prompts


def run(llm: Any, tokens: list[int], count: int) -> tuple[list[int], float]:
    """Generate up to `count` tokens greedily; return them and the seconds after the first one."""
    llm.reset()
    made: list[int] = []
    start = 0.0
    for token in llm.generate(tokens, temp=0.0):
        start = start or time.perf_counter()
        made.append(int(token))
        if len(made) == count or llama_cpp.llama_vocab_is_eog(llm._model.vocab, token):
            break
    return made, time.perf_counter() - start


def margin(llm: twofold.Llama, tokens: list[int], common: list[int]) -> float:
    """Difference of the two largest logits after the tokens both texts share."""
    llm.reset()
    llm.eval([*tokens, *common])
    top = np.partition(llm._decoder.logits(-1), -2)[-2:]
    return float(top[1] - top[0])


def compare(llm: twofold.Llama, prompt: dict[str, str], count: int, drafts: list[int]) -> dict[str, Any]:
    """Run one prompt plainly and with each draft length."""
    tokens = prompting.chat_tokens(llm, [{"role": "user", "content": prompt["prompt"]}])
    llm.draft_tokens = 0
    plain, plain_s = run(llm, tokens, count)
    row: dict[str, Any] = {"id": prompt["id"], "kind": prompt["kind"], "tokens": len(plain), "plain_s": plain_s}
    for draft in drafts:
        llm.draft_tokens = draft
        made, seconds = run(llm, tokens, count)
        stats = llm.stats
        row[f"k{draft}"] = {
            "seconds": seconds,
            "tokens": len(made),
            "tokens_per_check": stats["tokens_per_check"],
            "checks": stats["checks"],
            "complete_checks": stats["complete_checks"],
            "draft_s": stats["draft_s"],
            "verify_s": stats["verify_s"],
        }
        if made != plain:
            same = next((i for i, (a, b) in enumerate(zip(made, plain, strict=False)) if a != b), len(made))
            row[f"k{draft}"]["diverges_at"] = same
            row[f"k{draft}"]["margin"] = margin(llm, tokens, plain[:same])
    return row


def summary(rows: list[dict[str, Any]], drafts: list[int]) -> dict[str, Any]:
    """Totals over prompts: rates are medians over prompts of tokens a second after the first token."""
    rate = statistics.median((row["tokens"] - 1) / row["plain_s"] for row in rows if row["tokens"] > 1)
    result: dict[str, Any] = {"prompts": len(rows), "plain_tok_s": rate}
    for draft in drafts:
        found = [row[f"k{draft}"] for row in rows]
        checks = sum(f["complete_checks"] for f in found)
        made = sum(f["tokens_per_check"] * f["complete_checks"] for f in found)
        result[f"k{draft}"] = {
            "tokens_per_check": made / checks,
            "diverged": sum("diverges_at" in f for f in found),
            "tok_s": statistics.median((f["tokens"] - 1) / f["seconds"] for f in found if f["tokens"] > 1),
            "draft_share": sum(f["draft_s"] for f in found) / sum(f["seconds"] for f in found),
            "verify_share": sum(f["verify_s"] for f in found) / sum(f["seconds"] for f in found),
        }
    for kind in sorted({row["kind"] for row in rows}):
        found = [row[f"k{drafts[0]}"] for row in rows if row["kind"] == kind]
        checks = sum(f["complete_checks"] for f in found)
        per_check = sum(f["tokens_per_check"] * f["complete_checks"] for f in found) / checks
        result.setdefault(f"k{drafts[0]}_tokens_per_check_by_kind", {})[kind] = round(per_check, 3)
    return result


def other_model(path: Path, count: int, chosen: list[dict[str, str]], threads: int | None) -> dict[str, Any]:
    """Plain greedy decoding of an ordinary GGUF by llama_cpp, over the same prompts."""
    threads = threads or twofold.decoder.physical_cores()
    llm = llama_cpp.Llama(
        str(path), n_ctx=2048, n_threads=threads, n_threads_batch=threads, flash_attn=True, verbose=False
    )
    rates = []
    for prompt in chosen:
        tokens = prompting.chat_tokens(llm, [{"role": "user", "content": prompt["prompt"]}])
        made, seconds = run(llm, tokens, count)
        if len(made) > 1:
            rates.append((len(made) - 1) / seconds)
    llm.close()
    return {"model": path.name, "tok_s": statistics.median(rates)}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="NAME.base.gguf")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--drafts", type=int, nargs="+", default=[3])
    parser.add_argument("--residual-bits", type=int)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--no-claim", action="store_true", help="leave base products to ggml")
    parser.add_argument("--compare", type=Path, nargs="*", default=[], help="ordinary GGUF files, decoded plainly")
    parser.add_argument("--json", type=Path, help="write all rows here")
    args = parser.parse_args()
    quiet_log()
    chosen = prompts(args.prompts, args.kinds)
    before = [other_model(path, args.tokens, chosen, args.threads) for path in args.compare]
    options = {"n_threads": args.threads} if args.threads else {}
    llm = twofold.Llama(
        args.base,
        n_ctx=2048,
        residual_bits=args.residual_bits,
        claim=False if args.no_claim else None,
        verbose=False,
        **options,
    )
    rows = [compare(llm, prompt, args.tokens, args.drafts) for prompt in chosen]
    result = {
        "base": args.base.name,
        "residual_bits": llm.residual_bits,
        "twofold": twofold.__version__,
        "llama_cpp": llama_cpp.__version__,
        "kernel": default_kernel(),
        "machine": platform.machine(),
        "threads": llm.n_threads,
        "claim": not args.no_claim,
        **summary(rows, args.drafts),
        "others": before,
    }
    print(json.dumps(result, indent=2))
    for row in rows:
        for draft in args.drafts:
            if "diverges_at" in row[f"k{draft}"]:
                found = row[f"k{draft}"]
                print(f"{row['id']} k={draft} diverges at {found['diverges_at']}, margin {found['margin']:.5f}")
    if args.json:
        args.json.write_text(json.dumps({**result, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
