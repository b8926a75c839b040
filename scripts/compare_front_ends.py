"""Time decodes of the full model through both front ends: eval callback (`twofold.Llama`) and plugin (llama_cpp.Llama).

python scripts/compare_front_ends.py model.base.gguf --columns 2 4 8 --rounds 5 [--gpu-layers -1]

A process can have only one front end, so each round starts one of each, in changing order. In each, every width is
decoded --repeat times at the same place of the cache, with logits for the last token. Printed are medians over all, in
milliseconds, and the median over rounds of plugin / callback. `draft` is a decode of one token by the base alone, which
only the callback's side has. From two columns on both decode the same: a single token `twofold.Llama` decodes beside
another one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PROMPT = "A hash table is a data structure that maps keys to values. It uses a function to"


def load(args: argparse.Namespace) -> Any:
    """Return the model with the front end that is asked for."""
    settings = {
        "n_ctx": 512, "n_gpu_layers": args.gpu_layers, "n_threads": args.threads, "n_threads_batch": args.threads,
        "verbose": False, "flash_attn": True,
    }  # fmt: skip
    if args.child == "plugin":
        import llama_cpp

        from twofold import plugin

        plugin.load()
        return llama_cpp.Llama(str(args.base), **settings)
    import twofold

    return twofold.Llama(args.base, draft_tokens=0, **settings)


def plugin_decode(llm: Any, tokens: list[int], place: int) -> None:
    """Decode tokens at a place of the cache with llama_cpp."""
    llm.n_tokens = place
    llm.eval(tokens)


def callback_decode(llm: Any, tokens: list[int], place: int) -> None:
    """Do the same with twofold's decoder."""
    llm._decoder.truncate(place)
    llm._decoder.decode(tokens, place, all_rows=False)


def timed(llm: Any, decode: Any, token: int, columns: int, place: int, repeat: int) -> list[float]:
    """Seconds of decodes of so many tokens; the first, which builds the graph, does not count."""
    seconds = []
    for _ in range(repeat + 1):
        start = time.perf_counter()
        decode(llm, [token] * columns, place)
        seconds.append(time.perf_counter() - start)
    return seconds[1:]


def child(args: argparse.Namespace) -> None:
    """Print the seconds of one front end as JSON."""
    llm = load(args)
    tokens = llm.tokenize(PROMPT.encode())
    llm.eval(tokens)
    decode = plugin_decode if args.child == "plugin" else callback_decode
    found = {str(n): timed(llm, decode, tokens[-1], n, len(tokens), args.repeat) for n in args.columns}
    if args.child == "callback":
        with llm._decoder.drafting():
            found["draft"] = timed(llm, decode, tokens[-1], 1, len(tokens), args.repeat)
    print(json.dumps(found))


def run(args: argparse.Namespace, front_end: str) -> dict[str, list[float]]:
    """Seconds by width of one front end, in a process of its own."""
    residual = args.base.with_name(args.base.name.removesuffix(".base.gguf") + ".residual.gguf")
    env = {**os.environ, "TWOFOLD_RESIDUAL": str(residual), "TWOFOLD_THREADS": str(args.threads), "TWOFOLD_STRICT": "1"}
    command = [sys.executable, __file__, *sys.argv[1:], "--child", front_end]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("base", type=Path)
    parser.add_argument("--columns", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--gpu-layers", type=int, default=0)
    parser.add_argument("--child", choices=("callback", "plugin"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        child(args)
        return
    rounds = []
    for index in range(args.rounds):
        order = ("callback", "plugin") if index % 2 == 0 else ("plugin", "callback")
        rounds.append({front_end: run(args, front_end) for front_end in order})
    for width in [*map(str, args.columns), "draft"]:
        seconds = {
            front_end: [statistics.median(r[front_end][width]) for r in rounds if width in r[front_end]]
            for front_end in ("callback", "plugin")
        }
        shown = {name: f"{1e3 * statistics.median(values):8.2f} ms" for name, values in seconds.items() if values}
        both = zip(seconds["plugin"], seconds["callback"], strict=False)
        ratio = f"{statistics.median(p / c for p, c in both):.2f}" if seconds["plugin"] else "-"
        print(f"{width:>5}  callback {shown['callback']}  plugin {shown.get('plugin', '-'):>11}  ratio {ratio}")


if __name__ == "__main__":
    main()
