#!/usr/bin/env python3
"""Measure what crosses to and from a device, and from how many tokens on a prompt is better completed there.

    python scripts/measure_devices.py model.base.gguf --json devices.json

Bytes are compared with the formulas of docs/devices.md. The same tokens are decoded in batches of several widths with
the residual multiplied by the CPU and on the device; their logits are compared too.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import twofold
from measure_verifier import kl_divergence
from twofold import device_arguments, prompts
from twofold.engine import Residual, ResidualTensor

WIDTHS = (8, 16, 32, 64, 128, 256, 512)
_SHARED = {"attn_k": "attn_q", "attn_v": "attn_q", "ffn_gate": "ffn_up", "ffn_gate_exps": "ffn_up_exps"}


def crossing(residual: Residual, n: int, *, experts_used: int = 0, logits: int | None = None) -> tuple[int, int]:
    """Return the bytes from and to the device that a check of `n` tokens moves, for blocks like llama's.

    Parameters
    ----------
    experts_used
        experts that work on a token, in models that have them.
    logits
        rows that the head computes; default: all.
    """
    back = to = 0
    inputs: set[str] = set()
    for tensor in residual.tensors():
        layer, _, kind = tensor.name.removesuffix(".weight").rpartition(".")
        columns = n if kind != "output" or logits is None else logits
        experts, rows, width = tensor.shape
        shared = f"{layer}.{_SHARED.get(kind, kind)}"
        if experts > 1:
            to += columns * experts_used * rows * 4
            if shared not in inputs:
                back += columns * (experts_used if kind == "ffn_down_exps" else 1) * width * 4
            if layer not in inputs:  # which experts: the best of all, read in place, once a layer
                back += ((n - 1) * experts + experts_used) * 4
            inputs |= {layer}
        else:
            to += columns * rows * 4
            back += columns * width * 4 if shared not in inputs else 0
        inputs.add(shared)
    return back, to


def staged(residual: Residual) -> tuple[int, int]:
    """Return how many matrices a staged prompt sends to the device, and their weights; experts stay here."""
    sent: list[ResidualTensor] = [tensor for tensor in residual.tensors() if tensor.shape[0] == 1]
    return len(sent), sum(tensor.shape[1] * tensor.shape[2] for tensor in sent)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns its status."""
    arguments = _parser().parse_args(argv)
    found = measure(arguments)
    text = json.dumps(found, indent=1)
    print(text)
    if arguments.json:
        Path(arguments.json).write_text(text + "\n", "utf-8")
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return bytes, seconds by width and differences of logits."""
    options = {**device_arguments.options(arguments), "verbose": False, "logits_all": True}
    options |= {"n_ctx": max(arguments.widths) + 8, "n_batch": max(arguments.widths)}
    options |= {"n_ubatch": max(arguments.widths), "residual_bits": arguments.residual_bits}
    options |= {"n_threads": arguments.threads} if arguments.threads else {}
    found: dict[str, Any] = {"pair": arguments.base, "options": {k: v for k, v in options.items() if v is not None}}
    logits: dict[str, Any] = {}
    rows: dict[int, dict[str, Any]] = {width: {"columns": width} for width in arguments.widths}
    for way, columns in (("cpu", 0), ("device", 1)):
        llm = twofold.Llama(arguments.base, **{**options, "stage_columns": columns})
        tokens = _tokens(llm, max(arguments.widths))
        if way == "cpu":
            found["whereabouts"] = llm.whereabouts.as_dict() if llm.whereabouts else None
            found["draft"] = _bytes(llm, tokens[:1], draft=True)
            found["check"] = _bytes(llm, tokens[:8]) | _formula(llm, 8)
        for width in arguments.widths:
            rows[width][f"{way}_s"] = _seconds(llm, tokens[:width], arguments.repeats)
        found.setdefault("prompt", {})[way] = _bytes(llm, tokens)
        logits[way] = np.array(llm.scores[: len(tokens)])
        llm.close()
    found["widths"] = list(rows.values())
    found["threshold"] = next((w for w, row in rows.items() if row["device_s"] < row["cpu_s"]), None)
    found["prompt"]["kld_mean"] = float(kl_divergence(logits["cpu"], logits["device"]).mean())
    found["prompt"]["kld_max"] = float(kl_divergence(logits["cpu"], logits["device"]).max())
    same = logits["cpu"].argmax(-1) == logits["device"].argmax(-1)
    found["prompt"]["same_top"] = float(same.mean())
    return found


def _tokens(llm: Any, count: int) -> list[int]:
    text = "\n".join(prompt["prompt"] for prompt in prompts.prompts())
    tokens = list(llm.tokenize(text.encode()))
    return (tokens * (count // len(tokens) + 1))[:count]


def _decode(llm: Any, tokens: list[int]) -> None:
    llm.reset()
    llm.eval(tokens)


def _seconds(llm: Any, tokens: list[int], repeats: int) -> float:
    best = float("inf")
    for _ in range(repeats + 1):  # the first one also compiles kernels and learns the order of matrices
        start = time.perf_counter()
        _decode(llm, tokens)
        best = min(best, time.perf_counter() - start)
    return best


def _bytes(llm: Any, tokens: list[int], *, draft: bool = False) -> dict[str, int]:
    before = llm._engine.counters()
    if draft:
        with llm._decoder.drafting():
            _decode(llm, tokens)
    else:
        _decode(llm, tokens)
    after = llm._engine.counters()
    names = ("from_device_bytes", "to_device_bytes", "staged_bytes", "staged_nodes", "nodes")
    return {"tokens": len(tokens), **{name: int(after[name] - before[name]) for name in names}}


def _formula(llm: Any, n: int) -> dict[str, int]:
    used = next((int(v) for k, v in llm.metadata.items() if k.endswith(".expert_used_count")), 0)
    back, to = crossing(llm._engine.residual, n, experts_used=used)
    return {"formula_from": back, "formula_to": to}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("base", metavar="BASE", help="NAME.base.gguf")
    add("--residual-bits", type=int, choices=(4, 6, 8), help="default: all in the file")
    add("--widths", type=int, nargs="+", default=list(WIDTHS), metavar="N", help="tokens decoded together")
    add("--repeats", type=int, default=3, metavar="N", help="best of so many (default: 3)")
    add("--threads", type=int, metavar="N", help="default: one for each core")
    device_arguments.add_arguments(parser)
    add("--json", metavar="FILE", help="write the figures here too")
    return parser


if __name__ == "__main__":
    sys.exit(main())
