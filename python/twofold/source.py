"""The model to convert: one GGUF file, or the parts of a split one, read in place."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from twofold import errors
from twofold._native import Bytes, Floats
from twofold.blocks import dequantize
from twofold.metadata import Gguf, Tensor

_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class SourceTensor(Tensor):
    """A tensor and the mapped bytes of the file that holds it."""

    data: Bytes

    def rows(self, first: int, last: int) -> Floats:
        """Return rows `first` to `last` (of all experts, one after the other) as float32 ``(rows, width)``."""
        row_bytes = self.kind.row_bytes(self.width)
        part = np.ascontiguousarray(self.data[first * row_bytes : last * row_bytes])
        return dequantize(part, self.kind, (last - first, self.width))


def part_paths(path: Path) -> list[Path]:
    """Return all files of a model, given its only or its first one.

    Raises
    ------
    ArgumentError
        if `path` is another part than the first.
    FileAccessError
        if a part is missing.
    """
    found = _PART.search(path.name)
    if found is None:
        return [path]
    number, count = int(found[1]), int(found[2])
    if number != 1:
        raise errors.ArgumentError(f"{path}: part {number} of {count}; give the first part (-00001-of-{count:05d})")
    stem = path.name[: found.start()]
    paths = [path.with_name(f"{stem}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1)]
    for part in paths:
        if not part.exists():
            raise errors.FileAccessError(f"{part}: this part of the model is missing")
    return paths


class Source:
    """Tensors of a model, by name, in file order."""

    def __init__(self, path: Path) -> None:
        """Open all parts of the model.

        Raises
        ------
        FileAccessError, FormatError
            if a file is missing, not GGUF, or shorter than its tensors.
        """
        self.paths = part_paths(path)
        self.tensors: dict[str, SourceTensor] = {}
        for number, part in enumerate(self.paths):
            gguf = Gguf(part)
            if number == 0:
                self.gguf = gguf
            for tensor in _mapped_tensors(part, gguf):
                self.tensors[tensor.name] = tensor
        self.architecture = self.gguf.string("general.architecture", "unknown")

    def hyperparameter(self, name: str, default: int) -> int:
        """Integer key of the architecture, for instance ``block_count``."""
        return self.gguf.integer(f"{self.architecture}.{name}", default)


def _mapped_tensors(path: Path, gguf: Gguf) -> Iterator[SourceTensor]:
    data = np.memmap(path, np.uint8, "r")
    for tensor in gguf.tensors():
        if tensor.offset + tensor.bytes > data.size:
            raise errors.FormatError(f"{path}: truncated, the data of {tensor.name} ends after the file does")
        view = data[tensor.offset : tensor.offset + tensor.bytes]
        yield SourceTensor(tensor.name, tensor.kind, tensor.shape, tensor.offset, tensor.bytes, view)
