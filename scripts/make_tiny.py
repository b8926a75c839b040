#!/usr/bin/env python3
"""Make tiny GGUF models with random weights that a stock llama.cpp loads.

They say nothing sensible, but they run every kind of matrix of an architecture within milliseconds, and
the same seed always gives the same bytes.
"""

from __future__ import annotations

import argparse
import os
import string
import sys
import tempfile
import zlib
from dataclasses import dataclass, field
from math import sqrt
from pathlib import Path
from typing import TypeAlias

import gguf
import numpy as np
import numpy.typing as npt

Shape: TypeAlias = tuple[int, ...]

CONTEXT_LENGTH = 2048
VOCAB_SIZE = 512
SPECIALS = ("<unk>", "<s>", "</s>")
LOGIT_STD = 3.0
# Scale of what each layer adds to the hidden state. At 1 a 2-bit copy of the model agrees on one greedy token
# in ten, so that drafts are hardly ever accepted; at 0.1 on about two in five, and context still matters.
LAYER_GAIN = 0.1
# Tokens with logits near 0, so that a greedy run neither ends early nor makes half a UTF-8 character (for
# which some callers run on beyond the length they were asked for): the specials and the bytes from 128 on.
NEVER_LIKELY = [*range(len(SPECIALS)), *range(len(SPECIALS) + 128, len(SPECIALS) + 256)]
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
# Each word adds its prefixes too, because the tokenizer only reaches a token by joining two shorter ones.
WORDS = """▁the ▁and ▁that ▁have ▁with ▁this ▁from ▁they ▁would ▁there ▁what ▁about ▁which ▁when ▁make ▁like
    ing tion ed er es ly ment return import print def self ▁▁▁▁ == -> () 10 20 ▁know ▁people ▁into ▁year ▁good
    ▁some ▁could ▁other ▁than ▁look ▁only ▁come ▁over ▁also ▁back ▁after ▁use ▁how ▁our ▁work ▁first ▁well"""


class TinyError(ValueError):
    """A tiny model cannot have what was asked for; the message says what is allowed."""


@dataclass(frozen=True)
class Arch:
    """What sets one architecture apart from a plain llama block; there are ``width // 64`` query heads."""

    head_dim: int = 64
    rope_base: float = 10000.0
    qkv_bias: bool = False
    qk_norm: bool = False
    post_norm: bool = False
    experts: int = 0
    experts_used: int = 0
    # Further keys, without the architecture's name in front.
    extra: dict[str, int] = field(default_factory=dict)


# A pattern of 2 gives two layers one with a sliding window and one without.
GEMMA_WINDOW = {"attention.sliding_window": 128, "attention.sliding_window_pattern": 2}
# A head_dim of 128 makes the attention output's matrix wider than it is high.
ARCHS: dict[str, Arch] = {
    "llama": Arch(),
    "qwen2": Arch(rope_base=1e6, qkv_bias=True),
    "gemma3": Arch(head_dim=128, rope_base=1e6, qk_norm=True, post_norm=True, extra=GEMMA_WINDOW),
    "qwen3moe": Arch(head_dim=128, rope_base=1e6, qk_norm=True, experts=8, experts_used=2),
}


@dataclass(frozen=True)
class Sizes:
    """Dimensions of a model."""

    layers: int
    width: int
    ff: int
    heads: int
    heads_kv: int


def _sizes(arch: Arch, layers: int, width: int, ff: int | None) -> Sizes:
    if layers < 1:
        raise TinyError(f"layers is {layers}; give 1 or more")
    if ff is None:
        ff = width if arch.experts else 2 * width
    for name, value in (("width", width), ("ff", ff)):
        if value < 64 or value % 64:
            raise TinyError(f"{name} is {value}; give a multiple of 64 (of 256 for K-quants), 64 or more")
    heads = width // 64
    return Sizes(layers, width, ff, heads, heads // 2 if heads % 2 == 0 else 1)


def _layer_shapes(arch: Arch, s: Sizes) -> dict[str, Shape]:
    """Tensors of one block; numpy order, so (outputs, inputs). GGUF stores these dimensions in reverse."""
    q, kv = s.heads * arch.head_dim, s.heads_kv * arch.head_dim
    shapes: dict[str, Shape] = {
        "attn_norm.weight": (s.width,),
        "attn_q.weight": (q, s.width),
        "attn_k.weight": (kv, s.width),
        "attn_v.weight": (kv, s.width),
        "attn_output.weight": (s.width, q),
        "ffn_norm.weight": (s.width,),
    }
    if arch.qkv_bias:
        shapes |= {"attn_q.bias": (q,), "attn_k.bias": (kv,), "attn_v.bias": (kv,)}
    if arch.qk_norm:
        shapes |= {"attn_q_norm.weight": (arch.head_dim,), "attn_k_norm.weight": (arch.head_dim,)}
    if arch.post_norm:
        shapes |= {"post_attention_norm.weight": (s.width,), "post_ffw_norm.weight": (s.width,)}
    suffix, lead = ("_exps", (arch.experts,)) if arch.experts else ("", ())
    if arch.experts:
        shapes["ffn_gate_inp.weight"] = (arch.experts, s.width)
    shapes[f"ffn_gate{suffix}.weight"] = (*lead, s.ff, s.width)
    shapes[f"ffn_up{suffix}.weight"] = (*lead, s.ff, s.width)
    shapes[f"ffn_down{suffix}.weight"] = (*lead, s.width, s.ff)
    return shapes


def _shapes(arch: Arch, s: Sizes, tied: bool) -> dict[str, Shape]:
    shapes: dict[str, Shape] = {"token_embd.weight": (VOCAB_SIZE, s.width), "output_norm.weight": (s.width,)}
    if not tied:
        shapes["output.weight"] = (VOCAB_SIZE, s.width)
    block = _layer_shapes(arch, s)
    return shapes | {f"blk.{i}.{name}": shape for i in range(s.layers) for name, shape in block.items()}


def _weights(name: str, shape: Shape, seed: int) -> npt.NDArray[np.float32]:
    # Seeded by name, so that a tensor's values do not depend on which others the model has.
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape, dtype=np.float32)
    if name == "output_norm.weight":
        # Signs at random: with tied embeddings a token would otherwise predict itself by a wide margin.
        return np.copysign(1 + np.float32(0.1) * np.abs(values), values)
    if "norm" in name or name.endswith(".bias"):
        return np.float32("norm" in name) + np.float32(0.1) * values
    values /= sqrt(shape[-1])
    if "attn_output" in name or "ffn_down" in name:
        values *= LAYER_GAIN
    if name in ("token_embd.weight", "output.weight"):
        # The final norm leaves elements of about 1, so these rows give logits of about this deviation.
        values *= LOGIT_STD
        values[NEVER_LIKELY] *= 0.1
    return values


def _vocabulary(size: int = VOCAB_SIZE) -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores (higher ones are joined first) and types; the byte tokens can spell any text."""
    pieces = ["▁", *(c for c in string.printable if c.isprintable() and c != " ")]
    pieces += [word[:end] for word in WORDS.split() for end in range(2, len(word) + 1)]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    tokens = [*SPECIALS, *bytes_, *dict.fromkeys(pieces)][:VOCAB_SIZE]
    tokens += ["<|endoftext|>", *(f"<more {i}>" for i in range(size))][: size - len(tokens)]
    head, rest = len(SPECIALS) + len(bytes_), size - len(SPECIALS) - len(bytes_)
    scores = [0.0] * head + [-float(i) for i in range(rest)]
    kind = gguf.TokenType
    types = [kind.UNKNOWN, kind.CONTROL, kind.CONTROL] + [kind.BYTE] * 256 + [kind.NORMAL] * rest
    return tokens, scores, [int(value) for value in types]


def _add_keys(writer: gguf.GGUFWriter, name: str, s: Sizes, seed: int) -> None:
    arch = ARCHS[name]
    keys = {"context_length": CONTEXT_LENGTH, "vocab_size": VOCAB_SIZE, "block_count": s.layers}
    keys |= {"embedding_length": s.width, "feed_forward_length": s.ff}
    keys |= {"attention.head_count": s.heads, "attention.head_count_kv": s.heads_kv}
    keys |= {"attention.key_length": arch.head_dim, "attention.value_length": arch.head_dim}
    if arch.experts:
        keys |= {"expert_count": arch.experts, "expert_used_count": arch.experts_used}
        keys["expert_feed_forward_length"] = s.ff
    for key, value in (keys | arch.extra).items():
        writer.add_uint32(f"{name}.{key}", value)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(arch.rope_base)
    writer.add_type("model")
    writer.add_name(f"tiny random {name}, seed {seed}")


def add_tokenizer(writer: gguf.GGUFWriter, size: int = VOCAB_SIZE) -> None:
    """Add a tokenizer of `size` tokens, `VOCAB_SIZE` or more; those beyond never come up in a text."""
    tokens, scores, types = _vocabulary(size)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    for kind, token in (("unknown", "<unk>"), ("bos", "<s>"), ("eos", "</s>")):
        writer.add_uint32(f"tokenizer.ggml.{kind}_token_id", SPECIALS.index(token))
    writer.add_add_bos_token(True)
    writer.add_add_eos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def write_tiny(
    path: str | os.PathLike[str],
    arch: str,
    *,
    seed: int = 0,
    layers: int = 2,
    width: int = 256,
    ff: int | None = None,
    file_type: str = "f32",
    tied: bool = False,
) -> None:
    """Write a tiny random model.

    Parameters
    ----------
    path : str or path-like
        File to write; one that is there is replaced when the new one is complete.
    arch : str
        Key of `ARCHS`.
    seed : int
        Seed of the weights, 0 or more. Tensors of one name and shape are the same in every model of a seed.
    layers : int
        Number of blocks.
    width : int
        Length of a token's hidden state, a multiple of 64.
    ff : int, optional
        Inner width of the FFN (of each expert), a multiple of 64. Default: twice `width` (experts: `width`).
    file_type : {'f32', 'f16'}
        Type of the matrices, written with shape (outputs, inputs), or (experts, outputs, inputs). Vectors and
        the expert router always stay float32.
    tied : bool
        Leave out ``output.weight``: the embeddings are the head. Greedy runs then soon go in circles.

    Raises
    ------
    TinyError
        If a parameter has a value that is not allowed, or the file's folder does not exist.
    OSError
        If the file cannot be written.
    """
    if arch not in ARCHS:
        raise TinyError(f"arch is {arch!r}; give one of {', '.join(ARCHS)}")
    if file_type not in ("f32", "f16"):
        raise TinyError(f"file_type is {file_type!r}; give f32 or f16")
    if seed < 0:
        raise TinyError(f"seed is {seed}; give 0 or more")
    sizes = _sizes(ARCHS[arch], layers, width, ff)
    half = file_type == "f16"
    target = Path(path)
    if not target.parent.is_dir():
        raise TinyError(f"path is {target}, but {target.parent} is not a folder; make it first")
    with tempfile.TemporaryDirectory(prefix=".tiny-", dir=target.parent) as work:
        unfinished = Path(work) / target.name
        writer = gguf.GGUFWriter(unfinished, arch)
        _add_keys(writer, arch, sizes, seed)
        writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32)
        add_tokenizer(writer)
        for name, shape in _shapes(ARCHS[arch], sizes, tied).items():
            values = _weights(name, shape, seed)
            matrix = len(shape) > 1 and "ffn_gate_inp" not in name
            writer.add_tensor(name, values.astype(np.float16) if half and matrix else values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        unfinished.replace(target)


def main(argv: list[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv : list of str, optional
        Arguments without the program's name; `sys.argv` by default.

    Returns
    -------
    int
        0, or 1 if the model could not be made.
    """
    parser = argparse.ArgumentParser(
        description="Make a tiny GGUF model with random weights. Widths: multiples of 64 (256 for K-quants)."
    )
    parser.add_argument("arch", metavar="ARCH", choices=ARCHS, help=f"architecture: {', '.join(ARCHS)}")
    parser.add_argument("out", metavar="OUT.gguf", type=Path, help="file to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (default: 0)")
    parser.add_argument("--layers", type=int, default=2, help="number of blocks (default: 2)")
    parser.add_argument("--width", type=int, default=256, help="width of the hidden state (default: 256)")
    parser.add_argument("--ff", type=int, help="width of the FFN (default: twice --width; experts: --width)")
    parser.add_argument("--type", choices=("f32", "f16"), default="f32", help="matrix type (default: f32)")
    parser.add_argument("--tied", action="store_true", help="no output.weight: the embeddings are the head")
    a = parser.parse_args(argv)
    try:
        write_tiny(a.out, a.arch, seed=a.seed, layers=a.layers, width=a.width, ff=a.ff, file_type=a.type, tied=a.tied)
    except (TinyError, OSError) as error:
        print(f"make_tiny: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
