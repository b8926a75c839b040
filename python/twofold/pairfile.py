"""The two files of a model: where they are, whether they belong together, what is in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twofold import errors
from twofold._native import Bytes
from twofold.blocks import ggml_types, has_base_kernel
from twofold.engine import Residual, ResidualTensor
from twofold.metadata import Gguf, Tensor, fingerprint

BASE_END, RESIDUAL_END = ".base.gguf", ".residual.gguf"


def base_path(name: Path) -> Path:
    """``NAME.base.gguf`` of NAME, or of either file's own path."""
    return name.with_name(_stem(name) + BASE_END)


def residual_path(base: Path) -> Path:
    """``NAME.residual.gguf`` beside ``NAME.base.gguf``."""
    return base.with_name(_stem(base) + RESIDUAL_END)


def _stem(path: Path) -> str:
    for end in (BASE_END, RESIDUAL_END, ".gguf"):
        if path.name.endswith(end):
            return path.name[: -len(end)]
    return path.name


@dataclass(frozen=True)
class Pair:
    """A base and the residual that was checked to belong to it."""

    base: Path
    residual: Residual
    tensors: tuple[Tensor, ...]  # of the base
    completed: dict[str, ResidualTensor]  # by name of the base tensor
    architecture: str

    @property
    def has_base_kernels(self) -> bool:
        """Whether the engine has kernels for all types of base that the residual completes."""
        return all(has_base_kernel(t.kind) for t in self.tensors if t.name in self.completed)


def open_pair(base: Path, residual: Path | None = None) -> Pair:
    """Open a base and its residual (by default the file beside it).

    Raises
    ------
    FileAccessError
        if a file is missing.
    FormatError, FormatVersionError
        if one is truncated, foreign or of another version.
    MismatchError
        if the residual was made for another base; the message names both.
    """
    gguf = Gguf(base)
    path = residual or residual_path(base)
    if not path.exists():
        raise errors.FileAccessError(
            f"{path}: the residual of {base} is missing; convert the model with twofold convert, say where it is "
            "(residual_path, --residual), or run the base alone with residual_bits=0"
        )
    opened = Residual(path)
    tensors = tuple(gguf.tensors())
    completed = {tensor.name: tensor for tensor in opened.tensors()}
    _check_belongs(base, {tensor.name: tensor for tensor in tensors}, opened, completed)
    return Pair(base, opened, tensors, completed, gguf.string("general.architecture", "unknown"))


def _check_belongs(
    base: Path, tensors: dict[str, Tensor], residual: Residual, completed: dict[str, ResidualTensor]
) -> None:
    data = np.memmap(base, np.uint8, "r")
    for name, expected in completed.items():
        found = tensors.get(name)
        if found is not None and found.offset + found.bytes > data.size:
            raise errors.FormatError(f"{base}: truncated, the data of {name} ends after the file does")
        if (
            found is None
            or found.kind.id != expected.base_type
            or fingerprint(found, np.asarray(data[found.offset : found.offset + found.bytes])) != expected.fingerprint
        ):
            type_name = ggml_types()[expected.base_type].name if expected.base_type in ggml_types() else "unknown"
            made_for = f"{name} ({type_name}, fingerprint {expected.fingerprint:016x})"
            raise errors.MismatchError(
                f"{residual.path} does not belong to {base}: it was made for a base with {made_for}, and that base's "
                f"tensor is {'missing' if found is None else 'another'}; convert the model again, or find its own pair"
            )


def parts_read(tensor: ResidualTensor, bits: int) -> Iterator[Bytes]:
    """Yield the planes and scales that a verify reads of this tensor at `bits` (all experts)."""
    needs = {"scales": 0, "plane4": 4, "plane6": 6, "plane8": 8}
    for planes in tensor.planes:
        yield from (data for name, data in planes.parts().items() if needs[name] <= bits)


def residual_bytes(tensor: ResidualTensor, bits: int) -> int:
    """Bytes of RAM that a verify reads of this tensor at `bits` (all experts)."""
    return sum(data.size for data in parts_read(tensor, bits))
