"""Weights in ggml's types and residual planes: quantize, encode, decode, multiply."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from twofold import errors
from twofold._native import Bytes, Floats, bytes_pointer, check, ffi, floats_pointer, lib, text

Order: TypeAlias = npt.NDArray[np.intp]  # of columns


@dataclass(frozen=True)
class GgmlType:
    """A ggml tensor type.

    Attributes
    ----------
    id, name
        as in ggml.h (``enum ggml_type``) and in lower case.
    block, block_bytes
        weights and bytes of one block.
    quantizable, needs_imatrix
        whether ggml writes it from float32, and only with an importance matrix.
    """

    id: int
    name: str
    block: int
    block_bytes: int
    quantizable: bool
    needs_imatrix: bool

    @property
    def bpw(self) -> float:
        """Bits a weight."""
        return 8 * self.block_bytes / self.block

    def row_bytes(self, width: int) -> int:
        """Bytes of a row of `width` weights."""
        return width // self.block * self.block_bytes


@cache
def ggml_types() -> dict[int, GgmlType]:
    """Return every type of the loaded ggml by its number."""
    types = {}
    out = ffi.new("tf_type *")
    for number in range(lib.tf_type_count()):
        if lib.tf_type_get(number, out) == lib.TF_OK:
            types[number] = GgmlType(
                number, text(out.name).lower(), out.block, out.block_bytes, out.quantizable, out.needs_imatrix
            )
    return types


def ggml_type(name_or_id: str | int) -> GgmlType:
    """Look a type up by name or number.

    Raises
    ------
    ArgumentError
        if the loaded ggml has no such type.
    """
    for candidate in ggml_types().values():
        if name_or_id == candidate.id or (isinstance(name_or_id, str) and name_or_id.lower() == candidate.name):
            return candidate
    known = ", ".join(t.name for t in ggml_types().values() if t.quantizable)
    raise errors.ArgumentError(f"no ggml type {name_or_id!r}; types that can be written: {known}")


def dequantize(data: Bytes, kind: GgmlType, shape: tuple[int, ...]) -> Floats:
    """Return weights of any type as float32 of `shape`.

    Raises
    ------
    ArgumentError
        if the bytes do not hold that many weights.
    """
    out = np.empty(shape, np.float32)
    check(lib.tf_dequantize(kind.id, bytes_pointer(data), data.size, floats_pointer(out), out.size))
    return out


def quantize(weights: Floats, kind: GgmlType, imatrix: Floats | None = None) -> Bytes:
    """Quantize float32 ``(rows, width)`` with ggml's quantizer; imatrix is float32 ``(width,)``.

    Raises
    ------
    ArgumentError, UnsupportedError
        if the type does not fit the width, needs an imatrix, or has no quantizer.
    """
    rows, width = weights.shape
    out = np.empty(rows * kind.row_bytes(width), np.uint8)
    importance = ffi.NULL if imatrix is None else floats_pointer(imatrix)
    check(lib.tf_quantize(kind.id, floats_pointer(weights), rows, width, importance, bytes_pointer(out), out.size))
    return out


def check_finite(weights: Floats, name: str) -> None:
    """Raise NonFiniteError, naming the tensor, unless every value is finite."""
    check(lib.tf_check_finite(floats_pointer(weights), weights.size), name)


@dataclass(frozen=True)
class Planes:
    """One encoded residual matrix (docs/format.md); the planes are uint8, the scales float16 bits."""

    rows: int
    width: int
    group: int
    bits: int
    scales: Bytes
    plane4: Bytes
    plane6: Bytes | None = None
    plane8: Bytes | None = None
    owner: object = None  # keeps memory alive that the arrays are views of

    def parts(self) -> dict[str, Bytes]:
        """Return the arrays by the suffix of their tensors in a residual file."""
        parts = {"scales": self.scales, "plane4": self.plane4, "plane6": self.plane6, "plane8": self.plane8}
        return {name: data for name, data in parts.items() if data is not None}

    def c_struct(self, bits: int) -> Any:
        """Return a tf_planes that points into these arrays."""
        c = ffi.new("tf_planes *", {"rows": self.rows, "width": self.width, "group": self.group, "bits": bits})
        c.scales = ffi.cast("uint16_t *", bytes_pointer(self.scales))
        c.plane4 = bytes_pointer(self.plane4)
        c.plane6 = ffi.NULL if self.plane6 is None else bytes_pointer(self.plane6)
        c.plane8 = ffi.NULL if self.plane8 is None else bytes_pointer(self.plane8)
        return c


def plane_bytes(rows: int, width: int, group: int, part: str) -> int:
    """Bytes of ``scales``, ``plane4``, ``plane6`` or ``plane8`` of a matrix."""
    return int(lib.tf_plane_bytes(rows, width, group, 0 if part == "scales" else int(part[-1])))


def part_names(bits: int) -> list[str]:
    """Names of the parts that a residual of `bits` consists of."""
    return ["scales"] + [f"plane{b}" for b in (4, 6, 8) if b <= bits]


def encode_residual(residual: Floats, group: int, bits: int) -> Planes:
    """Encode float32 ``(rows, width)``.

    Raises
    ------
    ArgumentError
        if bits, group or width are not ones the format allows.
    """
    planes = _empty_planes(residual.shape, group, bits)
    check(lib.tf_residual_encode(floats_pointer(residual), planes.c_struct(bits)))
    return planes


def _empty_planes(shape: tuple[int, ...], group: int, bits: int) -> Planes:
    rows, width = shape
    parts = {name: np.empty(plane_bytes(rows, width, group, name), np.uint8) for name in part_names(bits)}
    return Planes(rows, width, group, bits, **parts)


class Rounder:
    """Rounds a residual column by column in any order, so that what one loses can be made up for in later ones."""

    def __init__(self, residual: Floats, group: int, bits: int, order: Order) -> None:
        """Take float32 ``(rows, width)`` and the order of its columns, int64 ``(width,)``.

        The scales are those of plain rounding, whatever is made up for later.

        Attributes
        ----------
        values
            float32 ``(rows, width)``, the columns in that order; :meth:`round` and its caller change them.

        Raises
        ------
        ArgumentError
            if bits, group or width are not ones the format allows.
        """
        rows, width = residual.shape
        self._group, self._bits, self._order = group, bits, order
        self._scales = np.empty((rows, -(-width // group)), np.uint16)
        scales = ffi.from_buffer("uint16_t[]", self._scales)
        check(lib.tf_residual_scales(floats_pointer(residual), rows, width, group, bits, scales))
        self.values = np.ascontiguousarray(residual[:, order])
        self._column_scales = np.ascontiguousarray(self._scales[:, order // group])
        self._codes = np.empty((rows, width), np.uint8)

    def round(self, first: int, last: int, factor: Floats) -> Floats:
        """Round columns `first` to `last` of the order; return what they lost, float32 ``(rows, last - first)``.

        `factor` is the upper triangle ``(n, n)`` of these columns, whose rows say how each loss is spread over the
        columns after it; losses are in units of its diagonal.
        """
        rows, width = self.values.shape
        lost = np.empty((rows, last - first), np.float32)
        check(
            lib.tf_residual_round(
                floats_pointer(self.values) + first,
                rows,
                width,
                last - first,
                floats_pointer(factor),
                factor.shape[1],
                self._bits,
                ffi.from_buffer("uint16_t[]", self._column_scales) + first,
                bytes_pointer(self._codes) + first,
                floats_pointer(lost),
            )
        )
        return lost

    def planes(self) -> Planes:
        """Put the codes of all columns into planes."""
        codes = np.empty_like(self._codes)
        codes[:, self._order] = self._codes
        planes = _empty_planes(self.values.shape, self._group, self._bits)
        scales = ffi.from_buffer("uint16_t[]", self._scales)
        check(lib.tf_residual_pack(bytes_pointer(codes), scales, planes.c_struct(self._bits)))
        return planes


def decode_residual(planes: Planes, bits: int | None = None) -> Floats:
    """Return the residual as float32 ``(rows, width)``, read at `bits` (default: all it holds)."""
    out = np.empty((planes.rows, planes.width), np.float32)
    check(lib.tf_residual_decode(planes.c_struct(bits or planes.bits), floats_pointer(out)))
    return out


def row_planes(planes: Planes, first: int, last: int) -> Planes:
    """Return rows `first`, which must begin a panel, to `last` of an encoded matrix, as views."""
    parts = {
        name: data[plane_bytes(first, planes.width, planes.group, name) :][
            : plane_bytes(last - first, planes.width, planes.group, name)
        ]
        for name, data in planes.parts().items()
    }
    return Planes(last - first, planes.width, planes.group, planes.bits, **parts)


@dataclass(frozen=True)
class BaseMatrix:
    """A base matrix as ggml lays it out, of a type that :func:`has_base_kernel`."""

    kind: GgmlType
    rows: int
    width: int
    data: Bytes

    def c_struct(self) -> Any:
        """Return a tf_base_data that points into the array."""
        if self.data.size != self.rows * self.kind.row_bytes(self.width):
            shape = f"{self.rows} x {self.width} {self.kind.name}"
            raise errors.ArgumentError(f"{self.data.size} bytes do not hold {shape}")
        c = ffi.new("tf_base_data *", {"type": self.kind.id, "rows": self.rows, "width": self.width})
        c.data = bytes_pointer(self.data)
        return c


def has_base_kernel(kind: GgmlType) -> bool:
    """Whether the engine can compute a base of this type itself, in memory the host can see."""
    return bool(lib.tf_base_has_kernel(kind.id))


def matmul(
    residual: Planes | None,
    x: Floats,
    *,
    base: BaseMatrix | None = None,
    bits: int | None = None,
    kernel: str | None = None,
    threads: int = 1,
) -> Floats:
    """Return ``x @ (B + R).T`` as the engine computes it: x float32 ``(n, width)``, result ``(n, rows)``.

    Either of base and residual may be None.

    Raises
    ------
    ArgumentError
        for an unknown kernel or a shape that does not fit.
    """
    matrix = residual if residual is not None else base
    if matrix is None or x.shape[1] != matrix.width:
        raise errors.ArgumentError(f"x of shape {x.shape} does not fit the matrix")
    n = x.shape[0]
    out = np.zeros((n, matrix.rows), np.float32)
    planes = ffi.NULL if residual is None else residual.c_struct(bits or residual.bits)
    base_data = ffi.NULL if base is None else base.c_struct()
    name = ffi.NULL if kernel is None else ffi.new("char[]", kernel.encode())
    check(lib.tf_matmul(planes, base_data, name, threads, floats_pointer(x), n, floats_pointer(out)))
    return out


def kernels() -> list[str]:
    """Names of the kernels this CPU can run, slowest first."""
    return [text(lib.tf_kernel_name(i)) for i in range(lib.tf_kernel_count())]


def default_kernel() -> str:
    """Name of the kernel in use: TWOFOLD_KERNEL if set, else the fastest."""
    return text(lib.tf_kernel_default())
