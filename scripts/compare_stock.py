#!/usr/bin/env python3
"""Compare greedy texts of an unmodified llama-server with the plugin to those of `twofold.Llama`.

python scripts/compare_stock.py build/llama-cpp/cmake/bin/llama-server model.base.gguf -n 64 [--device Vulkan0]

Prompts are the first tokens of the package's prompts. Where texts part, the margin of the two tokens' logits is shown:
near-ties are decided by rounding, which another version of ggml does otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import twofold
from twofold import plugin
from twofold.decoder import end_of_generation
from twofold.llama_log import quiet_log
from twofold.pairfile import residual_path
from twofold.prompts import prompts as packaged_prompts

OPENING = 24  # tokens of a prompt


@contextlib.contextmanager
def served(args: argparse.Namespace) -> Iterator[str]:
    """Run the server, return its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    plugged = {"GGML_BACKEND_PATH": str(plugin.library()), "TWOFOLD_RESIDUAL": str(residual_path(args.base))}
    command = [args.server, "-m", args.base, "-c", 1024, "-np", 1, "-t", args.threads, "-fa", "on", "--no-ui"]
    command += ["-dev", args.device, "-ngl", 99, "-ot", "^none$=CPU", "--port", address.rpartition(":")[2]]
    log = subprocess.DEVNULL if not args.verbose else None
    process = subprocess.Popen([str(part) for part in command], env=os.environ | plugged, stdout=log, stderr=log)
    try:
        wait(process, f"http://{address}/health")
        yield f"http://{address}/completion"
    finally:
        process.terminate()
        process.wait(60)


def wait(process: subprocess.Popen[bytes], address: str) -> None:
    """Wait until the server answers; RuntimeError if it ends before."""
    while process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, ConnectionError):
            urllib.request.urlopen(address).read()
            return
        time.sleep(0.2)
    raise RuntimeError("the server has ended; --verbose shows what it says")


def tokens_of(address: str, prompt: list[int], count: int) -> list[int]:
    """Ask for a greedy text; an end-of-generation token that ends it is one of its tokens."""
    asked = {"prompt": prompt, "n_predict": count, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    request = urllib.request.Request(address, json.dumps(asked).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return list(json.load(answer)["tokens"])


def our_tokens(llm: twofold.Llama, prompt: list[int], count: int) -> list[int]:
    """Make the same text."""
    llm.reset()
    found: list[int] = []
    for token in llm.generate(prompt, temp=0.0):
        found.append(int(token))
        if end_of_generation(llm, token) or len(found) == count:
            break
    return found


def margin(llm: twofold.Llama, text: list[int], ours: int, theirs: int) -> float:
    """Return how far the logits of two tokens lie apart after a text."""
    llm.reset()
    llm.eval(text)
    row = llm.decoder.logits(-1)
    return float(row[ours] - row[theirs])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("server", type=Path, help="llama-server")
    parser.add_argument("base", type=Path, help="NAME.base.gguf")
    parser.add_argument("--device", default="none", help="of the server and ours (default: none, the CPU)")
    parser.add_argument("-n", "--tokens", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--verbose", action="store_true", help="show what the server says")
    args = parser.parse_args()
    quiet_log()
    layers = 0 if args.device == "none" else -1
    llm = twofold.Llama(
        args.base, n_ctx=1024, n_threads=args.threads, n_gpu_layers=layers, draft_tokens=0, verbose=False
    )
    same = 0
    with served(args) as address:
        for prompt in packaged_prompts(args.prompts):
            text = llm.tokenize(prompt["prompt"].encode())[:OPENING]
            theirs = tokens_of(address, text, args.tokens)
            ours = our_tokens(llm, text, args.tokens)
            same += ours == theirs
            at = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
            if at is not None:
                apart = margin(llm, text + ours[:at], ours[at], theirs[at])
                print(f"{prompt['id']}: token {at} differs, logits {apart:.3f} apart", flush=True)
            elif ours != theirs:
                print(f"{prompt['id']}: {len(ours)} and {len(theirs)} tokens", flush=True)
    print(f"{same} of {args.prompts} texts of up to {args.tokens} tokens are equal")


if __name__ == "__main__":
    main()
