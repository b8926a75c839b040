"""The arguments of `twofold eval`, `accept` and `bench`."""

from __future__ import annotations

from twofold import commands
from twofold.accept import DEPTHS
from twofold.argument_types import Parsers, add_pair, command, number
from twofold.benchplan import DRAFTS, LOOKUPS
from twofold.loop import MAX_DRAFT
from twofold.prompts import BY_NAME, COPY, KINDS, RANDOM
from twofold.windows import BATCH


def add_eval(parsers: Parsers) -> None:
    """Add ``twofold eval``."""
    about = "measure pairs and other GGUF files against a reference model: KL divergence, top-1 agreement, perplexity"
    example = "model.base.gguf --reference model.f16.gguf --compare model.Q8_0.gguf --plot quality.png"
    parser = command(parsers, "eval", commands.evaluate, about, example)
    add = parser.add_argument
    add("pairs", metavar="PAIR", nargs="+", help="NAME.base.gguf, its residual beside it")
    add("--reference", required=True, metavar="SRC", help="GGUF file to compare with; it is always run in float32")
    add(
        "--text",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="texts in UTF-8 (default: those that come with twofold)",
    )
    add("--compare", nargs="+", action="extend", default=[], metavar="OTHER", help="other GGUF files to measure")
    modes = "exact: weights and activations in float32; runtime: as the model really runs (default: both)"
    add("--mode", choices=("exact", "runtime", "both"), default="both", help=modes)
    bits = "residual bits that pairs are measured at; 0: the base alone (default: all that a file holds)"
    add("--bits", type=int, nargs="+", choices=(0, 4, 6, 8), default=[0, 4, 6, 8], help=bits)
    add("--ctx", type=number(int, 8), default=512, metavar="N", help="tokens of a window (default: 512)")
    add("--tokens", type=number(int, 8), default=2048, metavar="N", help="most tokens of a text (default: 2048)")
    scratch = (
        "folder for float32 copies of models, 4 bytes a weight, removed afterwards (default: scratch beside the cache)"
    )
    add("--scratch", metavar="DIR", help=scratch)
    cache = "do not keep the reference's logits (kept in $TWOFOLD_CACHE/eval, by default ~/.cache/twofold/eval)"
    add("--no-cache", action="store_true", help=cache)
    add("--threads", type=number(int, 1), metavar="N", help="default: one for each core")
    layers = "layers in VRAM, runtime only (default: 0; llama.cpp then still sends batches of 32 and more to a GPU)"
    add("--gpu-layers", type=number(int, -1), default=0, metavar="N", help=layers)
    batch = f"tokens of a decode, runtime only: kernels differ by it (default: {BATCH})"
    add("--batch", type=number(int, 1), default=BATCH, metavar="N", help=batch)
    add("--json", metavar="FILE", help="write rows and metadata as JSON")
    add("--plot", metavar="FILE", help="draw KLD against bits a weight in RAM (needs twofold[plot])")
    add("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")


def add_accept(parsers: Parsers) -> None:
    """Add ``twofold accept``."""
    about = "measure tokens per check by depth of draft, and acceptance by position; nothing is timed"
    parser = command(parsers, "accept", commands.accept, about, "model.base.gguf --drafter small.gguf --json out.json")
    add = parser.add_argument
    add("pairs", metavar="PAIR", nargs="+", help="NAME.base.gguf; the full model of the first makes the texts")
    drafter = "ordinary GGUF files that draft with a cache of their own; same vocabulary"
    add("--drafter", metavar="GGUF", nargs="+", action="extend", default=[], help=drafter)
    add("--drafters-only", action="store_true", help="do not measure the bases of the pairs")
    depths = f"tokens of a draft, 1 to {MAX_DRAFT} (default: {' '.join(map(str, DEPTHS))})"
    add("--depths", metavar="K", nargs="+", type=number(int, 1, MAX_DRAFT), default=list(DEPTHS), help=depths)
    add("-n", "--tokens", type=number(int, 3), default=64, help="most tokens of a text (default: 64)")
    add("--prompts", type=number(int, 1), metavar="N", help="the first N prompts of the package's set (default: all)")
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="kinds of prompts (default: all)")
    texts = "JSON lines: texts found here are used, whoever made them; missing ones are made and added"
    add("--texts", metavar="FILE", help=texts)
    add("--residual-bits", type=int, choices=(4, 6, 8), help="bits verified with (default: all in the file)")
    add("--threads", type=number(int, 1), metavar="N", help="default: one for each core")
    add("--gpu-layers", type=number(int, -1), default=-1, metavar="N", help="layers in VRAM (default: -1: all)")
    add("--json", metavar="FILE", help="write everything that was measured here, for each prompt too")
    add("--plot", metavar="FILE", help="draw tokens per check against the depth (needs matplotlib)")
    add("--progress", action="store_true", help="show progress bars even if stderr is no terminal")


def add_bench(parsers: Parsers) -> None:
    """Add ``twofold bench``."""
    about = "measure tokens a second: plain decoding, numbers of drafts, other GGUF files, taking turns"
    example = "model.base.gguf --compare model.Q8_0.gguf --drafter small.gguf --plot speed.png"
    parser = command(parsers, "bench", commands.bench, about, example)
    add_pair(parser)
    add = parser.add_argument
    compare = "ordinary GGUF files of the same vocabulary, run by llama-cpp-python: plain and with prompt lookup"
    add("--compare", nargs="+", action="extend", default=[], metavar="OTHER", help=compare)
    add("--drafter", metavar="SMALL", help="ordinary small GGUF that drafts for those of --compare, with its own cache")
    drafts = f"numbers of draft tokens beside plain and auto, 1 to {MAX_DRAFT} (default: {' '.join(map(str, DRAFTS))})"
    add("--drafts", metavar="K", nargs="*", type=number(int, 1, MAX_DRAFT), default=list(DRAFTS), help=drafts)
    lookup = f"lengths of prompt lookup (default: {' '.join(map(str, LOOKUPS))}); none: without"
    add("--lookup", metavar="K", nargs="*", type=number(int, 1, MAX_DRAFT), default=list(LOOKUPS), help=lookup)
    bits = "bits verified with, one or several (default: all in the file)"
    add("--residual-bits", type=int, nargs="+", choices=(4, 6, 8), default=[], help=bits)
    add("-n", "--tokens", type=number(int, 2), default=64, help="most tokens of a text (default: 64)")
    add("--prompts", type=number(int, 1), default=20, metavar="N", help="the first N of the kinds (default: 20)")
    kinds = (
        f"kinds of prompts (default: all but {COPY}: edits and quotations, and {RANDOM}: random tokens, the worst case "
        "with --temp 1.5)"
    )
    add("--kinds", nargs="+", choices=(*KINDS, *BY_NAME), default=list(KINDS), help=kinds)
    temp = "temperature, nothing cut off the distribution (default: 0: greedy)"
    add("--temp", type=number(float, 0), default=0.0, help=temp)
    add("--seed", type=number(int, 1, 2**31), default=1, help="of samplers and of the order of turns (default: 1)")
    add("--repeat", type=number(int, 1), default=1, metavar="N", help="do everything N times (default: 1)")
    add("--threads", type=number(int, 1), metavar="N", help="default: one for each core")
    add("--gpu-layers", type=number(int, -1), default=-1, metavar="N", help="layers in VRAM (default: -1: all)")
    add("--no-claim", action="store_true", help="leave products of base weights to ggml")
    add("--json", metavar="FILE", help="write rows, every run and metadata")
    add("--plot", metavar="FILE", help="draw bars of tokens a second (needs twofold[plot])")
    add("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")
