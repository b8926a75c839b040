#!/usr/bin/env python3
"""Write the header of a GGUF model of given shapes, without its data: enough for `twofold plan`.

For a model of 32B: --layers 64 --width 5120 --ff 25600 --heads 64 --kv-heads 8 --head-dim 128 --vocabulary 151936
"""

from __future__ import annotations

import argparse
from pathlib import Path

import gguf
import numpy as np

ALIGNMENT = 32


def write_header(path: Path, sizes: argparse.Namespace) -> None:
    """Write a dense transformer in float16, its head apart from the embedding unless `tied`."""
    writer = gguf.GGUFWriter(path, sizes.arch)
    writer.add_block_count(sizes.layers)
    writer.add_embedding_length(sizes.width)
    width, queries, keys = sizes.width, sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    shapes = {"token_embd": (sizes.vocabulary, width)}
    if not sizes.tied:
        shapes["output"] = (sizes.vocabulary, width)
    for layer in range(sizes.layers):
        block = f"blk.{layer}."
        shapes |= {block + "attn_q": (queries, width), block + "attn_output": (width, queries)}
        shapes |= {block + name: (keys, width) for name in ("attn_k", "attn_v")}
        shapes |= {block + name: (sizes.ff, width) for name in ("ffn_gate", "ffn_up")}
        shapes[block + "ffn_down"] = (width, sizes.ff)
    for name, (rows, inputs) in shapes.items():
        writer.add_tensor_info(name + ".weight", (rows, inputs), np.dtype(np.float16), 2 * rows * inputs)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("ab") as file:  # ggml wants the place where data would begin
        file.write(bytes(-file.tell() % ALIGNMENT))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--arch", default="llama", help="only a name here (default: llama)")
    for name in ("layers", "width", "ff", "heads", "kv-heads", "head-dim", "vocabulary"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--tied", action="store_true", help="the embedding is the head")
    args = parser.parse_args()
    write_header(args.out, args)


if __name__ == "__main__":
    main()
