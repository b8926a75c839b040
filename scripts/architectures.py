#!/usr/bin/env python3
"""Try twofold on every architecture that the pinned llama.cpp knows, with tiny random models; print a table.

For each: a model is made from hyper-parameters (arch_keys.py), converted, and loaded. Base + residual must say what the
merged model says, where the base alone is far off; greedy text with drafts must be the text without, with drafts that
are kept and drafts that are not. A refused one shows twofold's message.

Exit status: 0 if none is wrong, 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from tqdm import tqdm

import twofold
from arch_keys import NAMES, WITH_EXPERTS
from make_tiny import TinyError
from tiny_archs import header_only, write
from twofold import errors
from twofold._native import Floats
from twofold.architecture import check_architecture
from twofold.convert import convert
from twofold.decoder import BaseLlama
from twofold.llama_log import quiet_log
from twofold.merge import merge

GAIN = 0.5  # what layers add to the hidden state: enough for any wrong matrix to show
PROMPT = [260 + 37 * place % 211 for place in range(48)]  # longer than the sliding windows
LENGTH, DRAFT = 64, 4
# KL divergence of base + residual from the merged model, in nats and as a share of the base's: at most, in the median.
MOST, SHARE = 0.01, 0.02
FLIP, FLIPS = 0.05, 0.15  # more at a place: rounding chose other experts there; as often as this at most
NEAR = 0.02  # logits so near to one another that rounding may decide
SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_batch": 128, "n_threads": 2, "verbose": False, "flash_attn": True}
TIMEOUT = 300
EXPERTS = " (experts)"
ALL = [name + more for name in NAMES for more in ("", EXPERTS) if not more or name in WITH_EXPERTS]


@dataclass
class Row:
    """What became of an architecture; `outcome` is works, refused or wrong."""

    arch: str
    outcome: str
    message: str
    rollback: str = ""
    kld_base: float | None = None
    kld_full: float | None = None
    accepted: float | None = None


class WrongError(Exception):
    """twofold gave something else than it must; the message says what."""


def logits(model: BaseLlama, *, draft: bool = False) -> Floats:
    """Return the logits after each token of the prompt, ``(tokens, vocab)``."""
    decoder = model.decoder
    decoder.truncate(0)
    if draft:
        with decoder.drafting():
            decoder.decode(PROMPT, 0, all_rows=True)
    else:
        decoder.decode(PROMPT, 0, all_rows=True)
    return np.array([decoder.logits(row) for row in range(len(PROMPT))])


def divergence(reference: Floats, other: Floats) -> Any:
    """KL divergence at each place, in nats."""
    p, q = (_log_softmax(values) for values in (reference, other))
    return (np.exp(p) * (p - q)).sum(-1)


def _log_softmax(values: Floats) -> Any:
    wide = values.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def check_quality(row: Row, base: Path, folder: Path) -> None:
    """Compare base + residual, and the base alone, with the merged model."""
    merged = BaseLlama(
        None, model_path=str(merge(base, folder / "merged.gguf", type="f32", force=True).path), **SETTINGS
    )
    reference = logits(merged)
    merged.close()
    llm = twofold.Llama(base, **SETTINGS)
    row.rollback = llm.rollback
    full, alone = divergence(reference, logits(llm)), divergence(reference, logits(llm, draft=True))
    llm.close()
    row.kld_full, row.kld_base, flips = float(np.median(full)), float(np.median(alone)), float((full > FLIP).mean())
    if not row.kld_full <= min(MOST, SHARE * row.kld_base):  # nor if they are not numbers
        raise WrongError(
            f"base + residual is {row.kld_full:.2g} nats from the merged model, the base {row.kld_base:.2g}"
        )
    if not flips <= FLIPS:
        raise WrongError(f"base + residual is more than {FLIP:g} nats from the merged model at {flips:.0%} of places")
    row.message = f"other experts at {flips:.0%} of places" if flips else ""


def greedy(llm: twofold.Llama, draft: int) -> tuple[list[int], list[float]]:
    """Return greedy tokens, and by how much each was ahead of the next likely one."""
    llm.draft_tokens = draft
    llm.reset()
    made, margins = [], []
    generator = llm.generate(PROMPT, temp=0.0)
    for token in generator:
        second, first = np.partition(llm.decoder.logits(llm._row), -2)[-2:]
        made.append(int(token))
        margins.append(float(first - second))
        if len(made) == LENGTH:
            break
    generator.close()
    return made, margins


def check_text(row: Row, base: Path) -> None:
    """Compare greedy text with drafts with that without."""
    llm = twofold.Llama(base, draft_tokens=DRAFT, **SETTINGS)
    plain, margins = greedy(llm, 0)
    drafted, _ = greedy(llm, DRAFT)
    stats = llm.stats
    row.accepted = stats["accepted"] / max(1, stats["drafted"])
    llm.close()
    parted = next((place for place in range(LENGTH) if plain[place] != drafted[place]), None)
    if parted is not None and margins[parted] > NEAR:
        raise WrongError(f"text with drafts parts from plain text at token {parted}, margin {margins[parted]:.2g}")
    if not 0 < stats["accepted"] < stats["drafted"]:
        raise WrongError(f"{stats['accepted']} of {stats['drafted']} draft tokens accepted: nothing was tried")
    if parted is not None:
        row.message += f"{'; ' * bool(row.message)}rounding decided a near-tie (margin {margins[parted]:.2g})"


def try_one(arch: str, folder: Path) -> Row:
    """Make, convert and compare an architecture's model."""
    quiet_log()
    name, source = arch.removesuffix(EXPERTS), folder / "model.gguf"
    row = Row(arch, "works", "")
    try:
        header_only(source, name)
        check_architecture(source)
        write(source, name, gain=GAIN, experts=True if arch != name else None)
        check_quality(row, convert(source, folder / "pair").base, folder)
        check_text(row, convert(source, folder / "better", base_type="q4_k").base)
    except (errors.UnsupportedError, TinyError) as error:
        row.outcome, row.message = "refused", str(error).replace(f"{source}: ", "")
    except (WrongError, errors.TwofoldError) as error:
        row.outcome, row.message = "wrong", str(error).replace(str(folder), ".")
    return row


def in_child(arch: str) -> Row:
    """Try an architecture in a process of its own: llama.cpp ends the process when it is at a loss."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, __file__, "--child", arch, folder]
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=TIMEOUT)
        except subprocess.TimeoutExpired:
            return Row(arch, "wrong", f"not done after {TIMEOUT} seconds")
    if done.returncode == 0:
        return Row(**json.loads(done.stdout.splitlines()[-1]))
    lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
    said = [line for line in lines if "ASSERT" in line or "Error" in line] or lines or ["nothing"]
    last = re.sub(r"\S*/(?=[\w.-]+:\d+:)", "", said[-1])
    return Row(arch, "wrong", f"the process ended with {done.returncode}: {last}")


def table(rows: list[Row]) -> str:
    """Return the rows as Markdown, with the counts."""
    counts = Counter(row.outcome for row in rows)
    lines = [", ".join(f"{counts[outcome]} {outcome}" for outcome in ("works", "refused", "wrong")) + ".", ""]
    lines += ["| architecture | outcome | KLD base | KLD full | accepted | taken back by | message |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for row in rows:
        numbers = [f"{value:.2g}" if value is not None else "" for value in (row.kld_base, row.kld_full)]
        share = f"{row.accepted:.0%}" if row.accepted is not None else ""
        lines.append(f"| {row.arch} | {row.outcome} | {' | '.join(numbers)} | {share} | {_how(row)} | {row.message} |")
    return "\n".join(lines) + "\n"


def _how(row: Row) -> str:
    if row.outcome == "refused":
        return ""
    if not row.rollback:
        return "cells"
    return "copy, snapshots" if "leaves" in row.rollback else "copy, decoding again"


INTRODUCTION = f"""# Architectures

Written by `scripts/architectures.py --markdown docs/architectures.md`, with llama-cpp-python {llama_cpp.__version__}.

For each architecture that llama.cpp knows, a tiny random model is made from hyper-parameters, converted (base q2_k,
residual of 8 bits) and compared with the merged model: median KL divergence in nats over {len(PROMPT)} tokens, of the
base alone and of base + residual, which may be at most {MOST:g} and {SHARE:.0%} of the base's. Where two experts are
nearly as likely, rounding may choose the other: at most {FLIPS:.0%} of places may be off by more than {FLIP:g}.

Greedy text of {LENGTH} tokens with {DRAFT} draft tokens (base q4_k) must be the text without drafts; *accepted* is the
share of draft tokens that were kept. Where two logits are less than {NEAR:g} apart, rounding may decide, and the
message says so. How a draft is taken back is told in [algorithm](algorithm.md#models-with-a-state).

These are shapes and graphs, not trained models.

"""


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="REGEX", default="", help="architectures whose whole name matches")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes at a time (default: 1)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the table as a document")
    parser.add_argument("--child", nargs=2, metavar=("ARCH", "FOLDER"), help=argparse.SUPPRESS)
    a = parser.parse_args()
    if a.child:
        print(json.dumps(asdict(try_one(a.child[0], Path(a.child[1])))))
        return 0
    names = [name for name in ALL if not a.only or re.fullmatch(a.only, name)]
    with ThreadPoolExecutor(a.jobs) as pool:
        rows = list(tqdm(pool.map(in_child, names), total=len(names), unit="models", disable=not sys.stderr.isatty()))
    print(table(rows), end="")
    if a.json:
        a.json.write_text(
            json.dumps({"llama_cpp_python": llama_cpp.__version__, "rows": [asdict(r) for r in rows]}, indent=1)
        )
    if a.markdown:
        a.markdown.write_text(INTRODUCTION + table(rows))
    return int(any(row.outcome == "wrong" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
