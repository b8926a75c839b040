"""A model as the plan sees it: matrices by layer, and the cache; read from GGUF headers alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from twofold import errors
from twofold.blocks import GgmlType
from twofold.layout import Ends, block_number, is_split_name
from twofold.metadata import Gguf, Tensor
from twofold.source import part_paths

_CACHE_BYTES = 2  # a value of the cache, float16
_RECURRENT = ("ssm_", "shortconv", "time_mix")


@dataclass(frozen=True)
class Matrix:
    """A matrix that products are made with.

    Attributes
    ----------
    layer
        its number; None for the head.
    used
        share of it that one token is multiplied by: less than 1 for experts.
    """

    name: str
    layer: int | None
    experts: int
    rows: int
    width: int
    kind: GgmlType
    used: float = 1.0

    @property
    def weights(self) -> int:
        """Number of weights."""
        return self.experts * self.rows * self.width

    def bytes(self, kind: GgmlType) -> int:
        """Bytes in a type."""
        return self.experts * self.rows * kind.row_bytes(self.width)

    def touched(self, tokens: int) -> float:
        """Share that is read for a batch of tokens, which choose their experts evenly and by themselves."""
        return 1.0 if self.used >= 1 else 1 - (1 - self.used) ** tokens


@dataclass(frozen=True)
class Model:
    """Matrices in the order of the file; sizes of everything else, bytes.

    Attributes
    ----------
    layers, vocabulary, width
        of the model.
    tied
        whether the head is the embedding.
    embedding
        bytes of the embedding: in RAM, read by row only.
    others
        bytes of norms, routers and the like, which lie with their layers.
    cache_token
        bytes of cache of one token, over all layers.
    has_state
        whether layers keep a recurrent state.
    """

    name: str
    architecture: str
    layers: int
    vocabulary: int
    width: int
    context: int
    tied: bool
    embedding: int
    others: int
    cache_token: int
    matrices: tuple[Matrix, ...]
    has_state: bool = False

    @cached_property
    def weights(self) -> int:
        """Weights of all matrices."""
        return sum(matrix.weights for matrix in self.matrices)

    @cached_property
    def units(self) -> list[list[Matrix]]:
        """Matrices of each layer, and last of the head."""
        by_layer: dict[int | None, list[Matrix]] = {}
        for matrix in self.matrices:
            by_layer.setdefault(matrix.layer, []).append(matrix)
        head = by_layer.pop(None, [])
        return [by_layer[layer] for layer in sorted(by_layer, key=lambda layer: layer or 0)] + [head]


def read(path: Path) -> Model:
    """Read the shapes of a GGUF model, all parts of a split one; data need not be there.

    Raises
    ------
    ArgumentError
        for another part than the first of a split model, or a file without a language model's matrices.
    FileAccessError, FormatError
        if a part is missing or not GGUF.
    """
    headers = [Gguf(part) for part in part_paths(path)]
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors()}
    return describe(path.name, headers[0], tensors)


def describe(name: str, keys: Gguf, tensors: dict[str, Tensor]) -> Model:
    """Describe a model by its keys and tensors; ArgumentError if it has none that products are made with."""
    architecture = keys.string("general.architecture", "unknown")

    def key(field: str, default: int) -> int:
        try:
            return keys.integer(f"{architecture}.{field}", default)
        except errors.FormatError:  # a list, one value a layer
            return default

    ends = Ends.of(architecture, key)
    share = key("expert_used_count", 0) / max(1, key("expert_count", 0))
    matrices = [m for t in tensors.values() if (m := _matrix(t, ends, share)) is not None]
    embedding = tensors.get("token_embd.weight")
    tied = "output.weight" not in tensors and embedding is not None
    if tied and embedding is not None:
        matrices.append(Matrix("output.weight", None, 1, embedding.shape[-2], embedding.width, embedding.kind))
    if embedding is None or not any(matrix.layer is not None for matrix in matrices):
        raise errors.ArgumentError(f"{name}: no language model: it lacks an embedding or matrices of layers")
    inside = {matrix.name for matrix in matrices} | {"token_embd.weight"}
    others = sum(t.bytes for t in tensors.values() if t.name not in inside)
    layers = len({matrix.layer for matrix in matrices if matrix.layer is not None})
    return Model(
        name, architecture, layers, embedding.shape[-2], embedding.width, key("context_length", 0), tied,
        embedding.bytes, others, _cache_token(tensors, ends, key), tuple(matrices),
        any(map(_is_recurrent, tensors)),
    )  # fmt: skip


def _matrix(tensor: Tensor, ends: Ends, share: float) -> Matrix | None:
    layer = block_number(tensor.name)
    if not is_split_name(tensor.name) or not 2 <= len(tensor.shape) <= 3 or not ends.uses(tensor.name):
        return None
    experts = tensor.shape[0] if len(tensor.shape) == 3 else 1
    used = share if experts > 1 and share else 1.0
    return Matrix(tensor.name, layer, experts, tensor.shape[-2], tensor.width, tensor.kind, used)


def _is_recurrent(name: str) -> bool:
    return any(part in name for part in _RECURRENT)


def _cache_token(tensors: dict[str, Tensor], ends: Ends, key: Callable[[str, int], int]) -> int:
    """Bytes of cache a token takes: rows of the matrices that make keys and values, as float16."""
    values = 0
    latent = key("attention.kv_lora_rank", 0)
    heads, size = key("attention.head_count_kv", 0), key("attention.key_length", 0)
    for name, tensor in tensors.items():
        if block_number(name) is None or not ends.uses(name):
            continue
        if name.endswith("attn_k.weight"):
            other = tensors.get(name.replace("attn_k.", "attn_v."), tensor)  # keys may serve as values too
            values += tensor.shape[-2] + other.shape[-2]
        elif name.endswith("attn_kv_a_mqa.weight"):
            values += latent + key("rope.dimension_count", 0)
        elif name.endswith("attn_qkv.weight"):
            queries = tensors.get(name.replace("attn_qkv.", "attn_output."))
            made = 2 * heads * size if size else tensor.shape[-2] - (queries.width if queries else 0)
            values += made
    return values * _CACHE_BYTES
