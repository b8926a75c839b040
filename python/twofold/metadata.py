"""Keys and tensor lists of GGUF files, through ggml's own reader and writer.

gguf-py's GGUFReader takes seconds for the vocabulary of a large model and refuses types it does not know.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twofold import errors
from twofold._native import Bytes, bytes_pointer, check, ffi, lib, text
from twofold.blocks import GgmlType, ggml_type


@dataclass(frozen=True)
class Tensor:
    """A tensor of a GGUF file: numpy shape, bytes and where they start in the file."""

    name: str
    kind: GgmlType
    shape: tuple[int, ...]
    offset: int
    bytes: int

    @property
    def width(self) -> int:
        """Inputs of the matrix."""
        return self.shape[-1]

    @property
    def weights(self) -> int:
        """Number of values."""
        return int(np.prod(self.shape))


class Gguf:
    """Keys and tensor list of a GGUF file, by ggml's own reader and writer."""

    def __init__(
        self, path: str | os.PathLike[str] | None = None, keys_of: Gguf | None = None, alignment: int = 32
    ) -> None:
        """Open `path`, or start a new file: with keys and alignment of another, or with none and this alignment.

        Raises
        ------
        FileAccessError, FormatError
            if the file is not there, or not GGUF.
        """
        out = ffi.new("tf_gguf **")
        if path is None:
            check(lib.tf_gguf_new(keys_of._c if keys_of else ffi.NULL, alignment, out))
        else:
            _check_magic(Path(path))
            check(lib.tf_gguf_open(os.fsencode(path), out), str(path))
        self._c: Any = ffi.gc(out[0], lib.tf_gguf_free)

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors in the order of the file."""
        out = ffi.new("tf_tensor *")
        data_offset = lib.tf_gguf_data_offset(self._c)
        for index in range(lib.tf_gguf_tensor_count(self._c)):
            check(lib.tf_gguf_tensor(self._c, index, out))
            shape = list(out.ne)
            while len(shape) > 1 and shape[-1] == 1:
                shape.pop()
            yield Tensor(
                text(out.name), ggml_type(out.type), tuple(reversed(shape)), data_offset + out.offset, out.bytes
            )

    def integer(self, key: str, default: int | None = None) -> int:
        """Value of an integer or bool key; MissingError if there is neither key nor default."""
        out = ffi.new("int64_t *")
        status = lib.tf_gguf_int(self._c, key.encode(), out)
        if status == lib.TF_ERR_MISSING and default is not None:
            return default
        check(status)
        return int(out[0])

    def string(self, key: str, default: str | None = None) -> str:
        """Value of a string key; MissingError if there is neither key nor default."""
        out = ffi.new("char **")
        status = lib.tf_gguf_string(self._c, key.encode(), ffi.cast("const char **", out))
        if status == lib.TF_ERR_MISSING and default is not None:
            return default
        check(status)
        return text(out[0])

    def set(self, key: str, value: int | str) -> None:
        """Set an unsigned 32-bit or string key."""
        if isinstance(value, int):
            check(lib.tf_gguf_set_u32(self._c, key.encode(), value))
        else:
            check(lib.tf_gguf_set_string(self._c, key.encode(), value.encode()))

    def set_list(self, key: str, values: Sequence[int] | Sequence[str]) -> None:
        """Set an array of unsigned 64-bit integers or of strings."""
        if values and isinstance(values[0], str):
            strings = [ffi.new("char[]", str(value).encode()) for value in values]
            check(lib.tf_gguf_set_strings(self._c, key.encode(), ffi.new("const char *[]", strings), len(strings)))
        else:
            check(lib.tf_gguf_set_u64s(self._c, key.encode(), ffi.new("uint64_t[]", list(values)), len(values)))

    def remove(self, key: str) -> None:
        """Remove a key; nothing happens if it is not there."""
        check(lib.tf_gguf_remove(self._c, key.encode()))

    def add(self, name: str, kind: GgmlType, shape: tuple[int, ...]) -> None:
        """Append a tensor to a new file's list.

        Raises
        ------
        ArgumentError
            if the name is too long or taken, or the type does not fit the width.
        """
        check(lib.tf_gguf_add(self._c, name.encode(), kind.id, len(shape), list(reversed(shape))))

    def header(self) -> bytes:
        """Return everything that comes before the tensors' data, padded to the alignment."""
        out = np.zeros(lib.tf_gguf_meta_bytes(self._c), np.uint8)
        check(lib.tf_gguf_meta(self._c, bytes_pointer(out), out.size))
        return out.tobytes()

    @property
    def alignment(self) -> int:
        """Every tensor's data starts at a multiple of this many bytes."""
        return int(lib.tf_gguf_alignment(self._c))


def _check_magic(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(4)
    except OSError as error:
        raise errors.FileAccessError(f"{path}: {error.strerror}") from error
    if magic != b"GGUF":
        raise errors.FormatError(f"{path}: not a GGUF file (it starts with {magic!r})")


def fingerprint(tensor: Tensor, data: Bytes) -> int:
    """64-bit fingerprint of a base tensor (csrc/residual_file.c, tf_fingerprint)."""
    ne = list(reversed(tensor.shape)) + [1] * (4 - len(tensor.shape))
    return int(lib.tf_fingerprint(tensor.kind.id, ne, bytes_pointer(data), data.size))
