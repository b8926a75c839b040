#!/usr/bin/env python3
"""Write a pair with random weights in the shapes of a large model, as fast as the disk takes it.

    python scripts/random_pair.py big --shape 7b --base q2_k --bits 8       # big.base.gguf, big.residual.gguf

Its texts mean nothing; its sizes, types and memory traffic are those of a real pair. Weights are random bytes with
scales that keep activations finite, a block of random bytes used again and again.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass
from math import prod, sqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt

from make_tiny import write_tiny
from twofold import errors
from twofold.blocks import ggml_type, part_names, plane_bytes
from twofold.layout import Split, residual_header
from twofold.metadata import Gguf, Tensor, fingerprint
from twofold.output import OutputFile, writing
from twofold.pairfile import base_path, residual_path

Bytes = npt.NDArray[np.uint8]
GROUP, BLOB = 128, 1 << 24
RESIDUAL_SHARE = 0.15  # of the weights' deviation
# Bytes of a block, where its float16 scales are, and what they are to a deviation of 1.
_SCALES = {
    "q4_0": {0: 1 / 4.6},
    "q8_0": {0: 1 / 74.0},
    "q2_k": {80: 1 / 10.0, 82: 1.5 / 10.0},
    "q4_k": {0: 1 / 150.0, 2: 7.5 / 150.0},
}


@dataclass(frozen=True)
class Shape:
    """Dimensions of a llama, or with experts of a qwen3moe; `ff` is an expert's then."""

    layers: int
    width: int
    ff: int
    heads: int
    heads_kv: int
    vocab: int
    experts: int = 0
    used: int = 0
    head: int = 0  # 0: width / heads

    @property
    def arch(self) -> str:
        """Of llama.cpp."""
        return "qwen3moe" if self.experts else "llama"

    @property
    def head_width(self) -> int:
        """Inputs of a head."""
        return self.head or self.width // self.heads


SHAPES = {
    "tiny": Shape(2, 256, 512, 4, 2, 512),
    "tiny-moe": Shape(2, 256, 256, 4, 2, 512, experts=8, used=2),
    "135m": Shape(30, 576, 1536, 9, 3, 49152),
    "1b": Shape(16, 2048, 8192, 32, 8, 32000),
    "7b": Shape(32, 4096, 14336, 32, 8, 32000),
    "14b": Shape(40, 5120, 13824, 40, 8, 152064),
    "32b": Shape(64, 5120, 25600, 64, 8, 151936),
    "a3b": Shape(8, 2048, 768, 32, 4, 32000, experts=128, used=8, head=128),  # 8 of the 48 layers of Qwen3 30B-A3B
}


def matrices(s: Shape) -> dict[str, tuple[int, ...]]:
    """Names and shapes (rows, width), or (experts, rows, width), of the matrices that are split."""
    q, kv = s.head_width * s.heads, s.head_width * s.heads_kv
    block: dict[str, tuple[int, ...]] = {"attn_q": (q, s.width), "attn_k": (kv, s.width), "attn_v": (kv, s.width)}
    block["attn_output"] = (s.width, q)
    feed = {"ffn_gate": (s.ff, s.width), "ffn_up": (s.ff, s.width), "ffn_down": (s.width, s.ff)}
    block |= {f"{name}_exps": (s.experts, *shape) for name, shape in feed.items()} if s.experts else feed
    found = {f"blk.{i}.{name}.weight": shape for i in range(s.layers) for name, shape in block.items()}
    return found | {"output.weight": (s.vocab, s.width)}


def write_pair(name: str | Path, shape: Shape, *, base: str = "q2_k", bits: int = 8, seed: int = 0) -> Path:
    """Write NAME.base.gguf and NAME.residual.gguf; return the base's path.

    Raises
    ------
    ArgumentError
        for a type that ggml lacks.
    ValueError
        for a type that this script has no scales for, or that does not divide the widths.
    """
    if base not in _SCALES:
        raise ValueError(f"base {base!r}: {', '.join(_SCALES)} are allowed")
    kind = ggml_type(base)
    if shape.width % kind.block or shape.ff % kind.block:
        raise ValueError(f"widths {shape.width} and {shape.ff} are no multiples of {base}'s {kind.block}; take q4_0")
    path = base_path(Path(name))
    header, splits = _base_header(shape, base)
    residual = residual_header(splits, bits, GROUP, [0] * len(splits), path.name)
    blob = np.random.default_rng(seed).integers(0, 256, BLOB, np.uint8)
    with writing({path: header, residual_path(path): residual}) as (base_file, residual_file):
        for tensor in header.tensors():
            _fill_base(base_file, tensor, blob)
        for split in splits:
            _fill_residual(residual_file, split, bits, blob)
        data = np.memmap(base_file.temporary, np.uint8, "r")
        places = {tensor.name: tensor for tensor in header.tensors()}
        found = [places[split.base.name] for split in splits]
        prints = [fingerprint(t, np.asarray(data[t.offset : t.offset + t.bytes])) for t in found]
        residual_file.write_header(residual_header(splits, bits, GROUP, prints, path.name))
    return path


def _base_header(s: Shape, base: str) -> tuple[Gguf, list[Split]]:
    """Keys of a tiny model with the shape's numbers, and its tensors."""
    with tempfile.TemporaryDirectory() as folder:
        write_tiny(Path(folder) / "keys.gguf", s.arch, layers=1)
        header = Gguf(keys_of=Gguf(Path(folder) / "keys.gguf"))
    keys = {"block_count": s.layers, "embedding_length": s.width, "feed_forward_length": s.ff, "vocab_size": s.vocab}
    keys |= {"attention.head_count": s.heads, "attention.head_count_kv": s.heads_kv, "context_length": 8192}
    keys |= {"attention.key_length": s.head_width, "attention.value_length": s.head_width}
    if s.experts:
        keys |= {"expert_count": s.experts, "expert_used_count": s.used, "expert_feed_forward_length": s.ff}
    for key, value in keys.items():
        header.set(f"{s.arch}.{key}", value)
    for key in ("scores", "token_type"):  # of the tiny vocabulary; without them every token is alike
        header.remove(f"tokenizer.ggml.{key}")
    header.set_list("tokenizer.ggml.tokens", ["<unk>", "<s>", "</s>", *(f"t{i}" for i in range(3, s.vocab))])
    header.set("twofold.format_version", 1)
    splits = []
    header.add("token_embd.weight", ggml_type("q8_0"), (s.vocab, s.width))
    header.add("output_norm.weight", ggml_type("f32"), (s.width,))
    for name, shape in matrices(s).items():
        kind = ggml_type(base)
        header.add(name, kind, shape)
        tensor = Tensor(name, kind, shape, 0, prod(shape[:-1]) * kind.row_bytes(shape[-1]))
        source: Any = SimpleNamespace(shape=shape)
        splits.append(Split(tensor, source, True))
    for i in range(s.layers):
        whole: dict[str, tuple[int, ...]] = {"attn_norm": (s.width,), "ffn_norm": (s.width,)}
        if s.experts:
            whole |= {"attn_q_norm": (s.head_width,), "attn_k_norm": (s.head_width,)}
            whole["ffn_gate_inp"] = (s.experts, s.width)
        for name, shape in whole.items():
            header.add(f"blk.{i}.{name}.weight", ggml_type("f32"), shape)
    return header, splits


def _fill_base(file: OutputFile, tensor: Tensor, blob: Bytes) -> None:
    if tensor.kind.name == "f32":
        values = np.ones(tensor.shape, np.float32)  # norms
        if len(tensor.shape) > 1:  # a router, by which experts are to be told apart
            values = np.random.default_rng(0).standard_normal(tensor.shape, np.float32) / np.float32(sqrt(tensor.width))
        file.write(tensor.name, values.view(np.uint8).ravel())
        return
    block = tensor.kind.block_bytes
    blocks = blob[: BLOB // block * block].reshape(-1, block).copy()
    for at, share in _SCALES[tensor.kind.name].items():
        blocks[:, at : at + 2] = np.array([share / sqrt(tensor.width)], np.float16).view(np.uint8)
    _repeat(file, tensor.name, tensor.bytes, blocks.ravel())


def _fill_residual(file: OutputFile, split: Split, bits: int, blob: Bytes) -> None:
    experts, rows, width = split.matrix
    scale = np.array([RESIDUAL_SHARE / 0.577 / sqrt(width)], np.float16).view(np.uint8)
    for part in part_names(bits):
        size = experts * plane_bytes(rows, width, GROUP, part)
        data = np.tile(scale, min(size, BLOB) // 2) if part == "scales" else blob
        _repeat(file, f"{split.base.name}.{part}", size, data)


def _repeat(file: OutputFile, name: str, size: int, data: Bytes) -> None:
    for at in range(0, size, data.size):
        file.write(name, data[: size - at], at)


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns its status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", metavar="NAME", help="path of the pair, without the endings")
    parser.add_argument("--shape", choices=SHAPES, default="7b", help="of the model (default: 7b)")
    parser.add_argument("--base", choices=_SCALES, default="q2_k", help="type of the base (default: q2_k)")
    parser.add_argument("--bits", type=int, choices=(4, 6, 8), default=8, help="of the residual (default: 8)")
    a = parser.parse_args(argv)
    try:
        path = write_pair(a.name, SHAPES[a.shape], base=a.base, bits=a.bits)
    except (ValueError, OSError, errors.TwofoldError) as error:
        print(f"random_pair: {error}", file=sys.stderr)
        return 1
    print(json.dumps({"base": str(path), "residual": str(residual_path(path))}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
