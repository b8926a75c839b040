"""Which tensors are split, into what, and where they go in the two files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from twofold import errors
from twofold.blocks import GgmlType, ggml_type, part_names, plane_bytes
from twofold.metadata import Gguf, Tensor
from twofold.source import Source, SourceTensor

FORMAT_VERSION = 1
PANEL_ROWS = 16
# Weights that llama.cpp multiplies by activations in a matrix product of their own. Others (embeddings, norms,
# routers, convolutions, position tables, weights used through a view) stay whole.
_SPLIT = re.compile(
    r"(?:output|blk\.\d+\.(?:attn_(?:q|k|v|qkv|output|gate|q_a|q_b|kv|kv_a_mqa|kv_b|output_b)"
    r"|ffn_(?:(?:gate|up|down)(?:_exps|_chexps|_shexp)?|gate_up_exps|(?:latent|routed)_(?:down|up))"
    r"|ssm_(?:in|out)|shortconv\.(?:in|out)_proj"
    r"|time_mix_(?:key|value|receptance|gate|output)|channel_mix_(?:key|value|receptance)))\.weight"
)
# general.file_type (enum llama_ftype in llama.h) by the type of most matrices; llama.cpp only prints it.
_FILE_TYPES = {"q4_0": 2, "q4_1": 3, "q8_0": 7, "q5_0": 8, "q5_1": 9, "q2_k": 10, "q3_k": 12, "q4_k": 15, "q5_k": 17}
_FILE_TYPES |= {"q6_k": 18, "iq2_xxs": 19, "iq2_xs": 20, "iq3_xxs": 23, "iq1_s": 24, "iq4_nl": 25, "iq3_s": 26}
_FILE_TYPES |= {"iq2_s": 28, "iq4_xs": 30, "iq1_m": 31}
# llama.cpp multiplies by the embedding itself here, and refuses a file with a head beside it.
_HEAD_IS_EMBEDDING = frozenset(["bitnet", "cohere2", "command-r", "gemma", "gemma2", "openelm", "pockettts"])
_BLOCK = re.compile(r"blk\.(\d+)\.")
AS_ASKED = "whole, as asked"
WHOLE_KEY = "twofold.whole"  # of the base file: names of the tensors that are whole because that was asked for


@dataclass(frozen=True)
class Whole:
    """Matrices that are to stay whole: their names, and ``q8_0`` or another type, or ``source`` for the source's."""

    names: frozenset[str]
    kind: str = "q8_0"


@dataclass(frozen=True)
class Split:
    """A tensor of the base file, and what is to become of it.

    Attributes
    ----------
    base
        name, type and shape in the base file.
    source
        the tensor it is made from; another name only for a head tied to the embedding.
    residual
        whether the residual file completes it.
    reason
        why it stays whole, if it does.
    """

    base: Tensor
    source: SourceTensor
    residual: bool
    reason: str = ""

    @property
    def matrix(self) -> tuple[int, int, int]:
        """Experts, rows, width."""
        shape = self.source.shape
        return (shape[0] if len(shape) == 3 else 1, shape[-2], shape[-1])


def is_split_name(name: str) -> bool:
    """Whether a tensor of this name is split, unless its type, shape or place forbids it."""
    return _SPLIT.fullmatch(name) is not None


def block_number(name: str) -> int | None:
    """Layer that a tensor belongs to; None for the head, embeddings and the like."""
    found = _BLOCK.match(name)
    return None if found is None else int(found[1])


def is_matrix(name: str) -> bool:
    """Whether activations are multiplied by this weight, the embedding included: it may be the head."""
    return is_split_name(name) or name == "token_embd.weight"


def may_have_head(architecture: str) -> bool:
    """Whether llama.cpp takes a head of its own for this architecture, instead of the embedding."""
    return architecture not in _HEAD_IS_EMBEDDING


@dataclass(frozen=True)
class Ends:
    """Where a model's main graph ends.

    Attributes
    ----------
    blocks
        layers of it; those behind only predict further tokens.
    cached
        layers with keys and values of their own; the others use those of one of these, and may still hold matrices.
    """

    blocks: int
    cached: int

    @classmethod
    def of(cls, architecture: str, key: Callable[[str, int], int]) -> Ends:
        """Read them from a model's keys; `key` takes the name of one, without the architecture, and a default."""
        layers = key("block_count", 1 << 31)
        # llama.cpp has no key for Gemma 3n.
        cached = 20 if architecture == "gemma3n" else layers - key("attention.shared_kv_layers", 0)
        return cls(layers - key("nextn_predict_layers", 0), cached)

    def uses(self, name: str) -> bool:
        """Whether the main graph uses a tensor."""
        block = block_number(name)
        if block is None:
            return True
        own = block < self.cached or not name.endswith(("attn_k.weight", "attn_v.weight"))
        return block < self.blocks and own


def choose_base_type(asked: str, width: int) -> GgmlType | None:
    """Type of the base for a width; None if nothing fits.

    ``auto`` is q2_k where 256 divides the width, else q4_0 (blocks of 32). A type asked for by name that does
    not fit gives way in the same manner.
    """
    wanted = ["q2_k", "q4_0"] if asked == "auto" else [asked, "q4_0"]
    for kind in map(ggml_type, wanted):
        if width % kind.block == 0 and width % 32 == 0:
            return kind
    return None


def check_base_type(asked: str) -> None:
    """Raise ArgumentError unless `asked` is auto or a quantized type that ggml can write."""
    if asked == "auto":
        return
    kind = ggml_type(asked)
    if not kind.quantizable or kind.bpw >= 16:
        raise errors.ArgumentError(f"base type {asked}: a quantized type that ggml can write is needed, or auto")


def check_residual(bits: int, group: int) -> None:
    """Raise ArgumentError unless the format has these bits and this group."""
    if bits not in (4, 6, 8):
        raise errors.ArgumentError(f"residual bits {bits}: 4, 6 or 8 are allowed")
    if group % 32 or not 32 <= group <= 1024:
        raise errors.ArgumentError(f"group {group}: a multiple of 32 from 32 to 1024 is allowed")


def plan(
    source: Source, base_type: str, chosen: Mapping[str, str] | None = None, asked: Whole | None = None
) -> list[Split]:
    """Decide for every tensor; a head tied to the embedding is added as ``output.weight``.

    `chosen` names types of tensors for which `base_type` does not hold; those in `asked` stay whole.
    """
    types, ends = chosen or {}, Ends.of(source.architecture, source.hyperparameter)
    splits = [_decide(t.name, t, types.get(t.name, base_type), ends, asked) for t in source.tensors.values()]
    embedding = source.tensors.get("token_embd.weight")
    tied = "output.weight" not in source.tensors and may_have_head(source.architecture)
    if embedding is not None and tied:
        head = _decide("output.weight", embedding, types.get("output.weight", base_type), ends, asked)
        if head.residual or head.base.kind != embedding.kind:
            splits.append(head)
    return splits


def _decide(name: str, source: SourceTensor, asked: str, ends: Ends, kept: Whole | None = None) -> Split:
    whole = Tensor(name, source.kind, source.shape, 0, source.bytes)
    if not is_split_name(name) or not 2 <= len(source.shape) <= 3:
        return Split(whole, source, False, "not a matrix product")
    if not ends.uses(name):
        return Split(whole, source, False, "not in the main graph")
    if kept is not None and name in kept.names:
        return _whole(name, source, kept.kind)
    kind = choose_base_type(asked, source.width)
    if kind is None:
        return Split(whole, source, False, f"no type fits width {source.width}")
    if source.kind.bpw <= kind.bpw:
        return Split(whole, source, False, f"source has {source.kind.bpw:.3g} bits")
    return Split(_typed(name, source, kind), source, True)


def _whole(name: str, source: SourceTensor, asked: str) -> Split:
    """Keep a matrix whole: in the type asked for if that is smaller than the source's and fits, else as it is."""
    kind = source.kind if asked == "source" else ggml_type(asked)
    if kind.bpw >= source.kind.bpw or source.width % kind.block:
        kind = source.kind
    return Split(_typed(name, source, kind), source, False, AS_ASKED)


def _typed(name: str, source: SourceTensor, kind: GgmlType) -> Tensor:
    rows = source.weights // source.width
    return Tensor(name, kind, source.shape, 0, rows * kind.row_bytes(source.width))


def base_header(source: Source, splits: list[Split]) -> Gguf:
    """Keys and tensor list of the base file."""
    gguf = Gguf(keys_of=source.gguf)
    for key in ("split.no", "split.count", "split.tensors.count"):
        gguf.remove(key)
    gguf.set("twofold.format_version", FORMAT_VERSION)
    gguf.set("general.quantization_version", 2)
    gguf.remove(WHOLE_KEY)
    kept = [split.base.name for split in splits if split.reason == AS_ASKED]
    if kept:
        gguf.set(WHOLE_KEY, "\n".join(kept))
    kinds = Counter(split.base.kind.name for split in splits if split.residual)
    if kinds and kinds.most_common(1)[0][0] in _FILE_TYPES:
        gguf.set("general.file_type", _FILE_TYPES[kinds.most_common(1)[0][0]])
    for split in splits:
        gguf.add(split.base.name, split.base.kind, split.base.shape)
    return gguf


def residual_header(splits: list[Split], bits: int, group: int, fingerprints: list[int], base_name: str) -> Gguf:
    """Keys and tensor list of the residual file; `splits` are those with a residual."""
    gguf = Gguf(alignment=64)
    gguf.set("general.architecture", "twofold-residual")
    gguf.set("twofold.format_version", FORMAT_VERSION)
    gguf.set("twofold.bits", bits)
    gguf.set("twofold.group", group)
    gguf.set("twofold.base", base_name)
    gguf.set_list("twofold.tensor.names", [s.base.name for s in splits])
    gguf.set_list("twofold.tensor.experts", [s.matrix[0] for s in splits])
    gguf.set_list("twofold.tensor.rows", [s.matrix[1] for s in splits])
    gguf.set_list("twofold.tensor.widths", [s.matrix[2] for s in splits])
    gguf.set_list("twofold.tensor.base_types", [s.base.kind.id for s in splits])
    gguf.set_list("twofold.tensor.fingerprints", fingerprints)
    kind = ggml_type("i8")
    for split in splits:
        experts, rows, width = split.matrix
        for part in part_names(bits):
            gguf.add(f"{split.base.name}.{part}", kind, (experts * plane_bytes(rows, width, group, part),))
    return gguf
