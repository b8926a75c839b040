#!/usr/bin/env python3
"""Check and time twofold on a device; prints one JSON document. scripts/gpu_check.sh builds what it needs first.

    python scripts/gpu_check.py --shape 7b --threads 4 8 16 > gpu.json
    GGML_VK_VISIBLE_DEVICES=0 python scripts/gpu_check.py --shape 135m --base q4_0 --threads 2 --steps 2   # a dry run

Correctness is checked on tiny models, against the merged model and the formulas of docs/devices.md; times are those of
a pair with random weights. Each step that fails leaves its error in the document, and the status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import twofold
from make_tiny import ARCHS, write_tiny
from measure_devices import crossing, staged
from measure_verifier import kl_divergence, logits_of
from random_pair import SHAPES, write_pair
from twofold import devices
from twofold.convert import convert
from twofold.merge import merge

WIDTHS = (1, 2, 4, 8, 16, 31)
SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_batch": 128, "logits_all": True, "verbose": False}
# What is switched off to see what it is worth.
SWITCHES = {"results added here": "TWOFOLD_DEVICE_ADD", "nothing begun early": "TWOFOLD_OVERLAP"}


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns its status."""
    a = _parser().parse_args(argv)
    found: dict[str, Any] = {"machine": machine(a.device), "settings": vars(a), "failures": []}
    with tempfile.TemporaryDirectory(dir=a.work) as folder:
        for arch in a.archs:
            _step(found, f"correct_{arch}", lambda arch=arch: correctness(Path(folder), arch))
        if a.shape != "none":
            _step(found, "pair", lambda: random_pair(Path(folder), a))
        if "pair" in found:
            base = Path(folder) / "random.base.gguf"
            for threads in a.threads:
                _step(found, f"times_{threads}_threads", lambda threads=threads: times(base, a, threads))
            for name, variable in SWITCHES.items():
                with _environment(variable, "0"):
                    _step(found, f"times_{name}", lambda: times(base, a, a.threads[-1], prompts=False))
    print(json.dumps(found, indent=1, default=str))
    return 1 if found["failures"] else 0


def _step(found: dict[str, Any], name: str, run: Callable[[], dict[str, Any]]) -> None:
    start = time.perf_counter()
    print(f"gpu_check: {name}", file=sys.stderr, flush=True)
    try:
        found[name.replace(" ", "_")] = {**run(), "took_s": round(time.perf_counter() - start, 2)}
    except Exception as error:  # the other steps are worth running
        found["failures"].append({"step": name, "error": str(error), "trace": traceback.format_exc()})


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


def machine(device: str | None) -> dict[str, Any]:
    """Return what this runs on.

    Raises
    ------
    SystemExit
        if there is no such device.
    """
    there = devices.devices()
    if not any(d.kind != "cpu" and device in (None, d.name) for d in there):
        raise SystemExit(f"gpu_check: no device {device or 'other than the CPU'}; there are {[d.name for d in there]}")
    return {
        "devices": [vars(d) for d in there],
        "cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
        "llama_cpp": devices.llama_system_info(),
        "twofold": twofold.__version__,
    }


# ---- correctness -------------------------------------------------------------------------------------


def correctness(folder: Path, arch: str) -> dict[str, Any]:
    """Compare a tiny pair on the device with its merged model, and what crosses with the formulas."""
    write_tiny(folder / f"{arch}.gguf", arch)
    base = convert(folder / f"{arch}.gguf", folder / arch, force=True).base
    merged = llama_cpp.Llama(str(merge(base, folder / f"{arch}.merged.gguf", type="f32", force=True).path), **SETTINGS)
    llm = twofold.Llama(base, n_gpu_layers=-1, stage_columns=64, **SETTINGS)
    tokens = [int(t) for t in np.random.default_rng(1).integers(3, 512, 100)]
    reference, before = logits_of(merged, tokens), _moved(llm)
    prompt, after = logits_of(llm, tokens), _moved(llm)
    draft = logits_of(llm, tokens[:31], draft=True)
    drafted = _moved(llm)
    check = logits_of(llm, tokens[:31])
    checked = _moved(llm)
    formula = crossing(llm._engine.residual, 31, experts_used=ARCHS[arch].experts_used)
    found = {
        "kld_prompt": float(kl_divergence(reference, prompt).mean()),
        "kld_check": float(kl_divergence(reference[:31], check).mean()),
        "kld_draft": float(kl_divergence(reference[:31], draft).mean()),
        "staged_nodes": after["staged_nodes"] - before["staged_nodes"],
        "staged_nodes_expected": staged(llm._engine.residual)[0],
        "draft_moved": [drafted[k] - after[k] for k in ("from_device_bytes", "to_device_bytes")],
        "check_moved": [checked[k] - drafted[k] for k in ("from_device_bytes", "to_device_bytes")],
        "check_formula": list(formula),
        "whereabouts": llm.whereabouts.as_dict(),
    }
    llm.close()
    merged.close()
    _require(
        found["kld_prompt"] < 0.005 and found["kld_check"] < 0.005, "base + residual is not the merged model", found
    )
    _require(found["kld_draft"] > 0.02, "the draft should be far from the merged model", found)
    _require(found["staged_nodes"] == found["staged_nodes_expected"], "the prompt was not staged", found)
    _require(found["draft_moved"] == [0, 0], "a draft moved bytes", found)
    _require(found["check_moved"] == found["check_formula"], "a check moved other bytes than the formula's", found)
    return found


def _moved(llm: Any) -> dict[str, float]:
    counters: dict[str, float] = llm._engine.counters()
    return counters


def _require(condition: bool, what: str, found: dict[str, Any]) -> None:
    if not condition:
        raise AssertionError(f"{what}: {json.dumps({k: v for k, v in found.items() if k != 'whereabouts'})}")


# ---- times -------------------------------------------------------------------------------------------


def random_pair(folder: Path, a: argparse.Namespace) -> dict[str, Any]:
    """Write the pair that is timed."""
    base = write_pair(folder / "random", SHAPES[a.shape], base=a.base, bits=a.bits)
    sizes = {part: (folder / f"random.{part}.gguf").stat().st_size for part in ("base", "residual")}
    return {"path": base.name, **sizes}


def times(base: Path, a: argparse.Namespace, threads: int, *, prompts: bool = True) -> dict[str, Any]:
    """Seconds (median of some) of a draft token, of checks by width, and of a prompt both ways."""
    options: dict[str, Any] = {"n_ctx": 1024, "n_batch": 512, "n_ubatch": 512, "verbose": False, "n_threads": threads}
    llm = twofold.Llama(
        base, n_gpu_layers=-1, stage_columns=min(a.prompt, 64), stage_bytes=a.stage_mib << 20, **options
    )
    vocab, decoder = llm.n_vocab(), llm.decoder
    tokens = [int(t) for t in np.random.default_rng(2).integers(3, vocab, 600)]
    found: dict[str, Any] = {"threads": threads, "whereabouts": llm.whereabouts.as_dict()}

    def decode(n: int, position: int = 64) -> None:
        decoder.decode(tokens[:n], position, all_rows=True)
        decoder.logits(0)
        decoder.truncate(position)

    decoder.decode(tokens[:64], 0, all_rows=False)
    with decoder.drafting():
        found["draft_s"] = _median(lambda: decode(1), a.steps)
    found["checks"] = []
    for width in WIDTHS:
        before = _moved(llm)
        seconds = _median(lambda width=width: decode(width), a.steps)
        after = _moved(llm)
        row = {"columns": width, "seconds": seconds}
        for name in ("residual_bytes", "from_device_bytes", "to_device_bytes", "early_nodes", "nodes"):
            row[name] = (after[name] - before[name]) / (a.steps + 1)
        row |= {k: (after[k] - before[k]) / (a.steps + 1) for k in ("fetch_s", "compute_s", "store_s")}
        row["read_rate"] = row["residual_bytes"] / seconds
        found["checks"].append(row)
    if prompts:
        decoder.truncate(0)
        before = _moved(llm)
        found["prompt_staged_s"] = _median(lambda: _prompt(llm, tokens[: a.prompt]), min(a.steps, 3))
        found["prompt_staged_bytes"] = (_moved(llm)["staged_bytes"] - before["staged_bytes"]) / (min(a.steps, 3) + 1)
    llm.close()
    if prompts:
        llm = twofold.Llama(base, n_gpu_layers=-1, stage_columns=0, **options)
        found["prompt_cpu_s"] = _median(lambda: _prompt(llm, tokens[: a.prompt]), min(a.steps, 3))
        llm.close()
    return found


def _prompt(llm: Any, tokens: list[int]) -> None:
    llm.decoder.decode(tokens, 0, all_rows=False)
    llm.decoder.logits(-1)
    llm.decoder.truncate(0)


def _median(run: Callable[[], None], repeats: int) -> float:
    run()  # compiles, and learns the order of matrices
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--device", metavar="NAME", help="that must be there, as CUDA0 (default: any but the CPU)")
    add("--archs", nargs="*", choices=ARCHS, default=["llama", "qwen3moe"], help="tiny models for correctness")
    add("--shape", choices=(*SHAPES, "none"), default="7b", help="of the pair that is timed (default: 7b)")
    add("--base", default="q2_k", metavar="TYPE", help="of its base (default: q2_k)")
    add("--bits", type=int, choices=(4, 6, 8), default=6, help="of its residual (default: 6)")
    add("--threads", type=int, nargs="+", default=[4, 8, 16], metavar="N", help="that multiply the residual")
    add("--steps", type=int, default=7, metavar="N", help="decodes of which the median is taken (default: 7)")
    add("--prompt", type=int, default=512, metavar="N", help="tokens of the prompt, up to 512 (default: 512)")
    add("--stage-mib", type=int, default=64, metavar="N", help="MiB of staging memory (default: 64)")
    add("--work", metavar="DIR", help="for the pair; best in RAM, as /dev/shm")
    return parser


if __name__ == "__main__":
    sys.exit(main())
