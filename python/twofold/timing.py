"""Times of the C kernels, for benchmarks: see scripts/bench_kernels.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twofold import errors
from twofold._native import Floats, check, ffi, floats_pointer, lib
from twofold.blocks import BaseMatrix, Planes

Seconds = npt.NDArray[np.float64]


def time_matmul(
    residuals: Sequence[Planes],
    x: Floats,
    *,
    bases: Sequence[BaseMatrix] = (),
    bits: int = 8,
    threads: int,
    repeats: int,
    kernel: str | None = None,
) -> Seconds:
    """Time products of residuals, of bases, or of both in one pass, with `x`, float32 ``(n, width)``.

    Matrices of one shape take turns.

    Returns
    -------
    float64 ``(repeats,)``, seconds; the activations are quantized anew each time, bases rearranged once before.

    Raises
    ------
    ArgumentError
        for an unknown kernel, or shapes or numbers of matrices that differ.
    """
    shapes = {(matrix.rows, matrix.width) for matrix in residuals} | {(base.rows, base.width) for base in bases}
    if len(shapes) != 1 or len({len(part) for part in (residuals, bases) if part}) != 1:
        counts = f"{len(residuals)} residuals and {len(bases)} bases"
        raise errors.ArgumentError(f"{counts} of shapes {sorted(shapes)}: as many of each, or none, of one shape")
    ((rows, width),) = shapes
    if x.shape[1] != width:
        raise errors.ArgumentError(f"x of shape {x.shape} does not fit the matrices")
    residual_structs = [matrix.c_struct(bits) for matrix in residuals]
    base_structs = [matrix.c_struct() for matrix in bases]
    out = np.zeros((len(x), rows), np.float32)
    seconds = ffi.new("double[]", repeats)
    check(
        lib.tf_bench_matmul(
            ffi.new("tf_planes[]", [struct[0] for struct in residual_structs]) if residuals else ffi.NULL,
            ffi.new("tf_base_data[]", [struct[0] for struct in base_structs]) if bases else ffi.NULL,
            len(residuals or bases),
            ffi.NULL if kernel is None else ffi.new("char[]", kernel.encode()),
            threads,
            floats_pointer(x),
            len(x),
            floats_pointer(out),
            repeats,
            seconds,
        )
    )
    return np.array(list(seconds))


def read_bandwidth(data: npt.NDArray[np.uint8], *, threads: int, repeats: int = 7) -> Seconds:
    """Bytes a second of reading `data`, float64 ``(repeats,)``; it should be far larger than the caches."""
    seconds = ffi.new("double[]", repeats)
    check(lib.tf_bench_read(ffi.from_buffer(data), data.size, threads, repeats, seconds))
    return data.size / np.array(list(seconds))


def peak_operations(*, threads: int, kernel: str | None = None, rounds: int = 20_000_000) -> float:
    """Byte operations a second that the kernel's multiply-add reaches on registers, two a multiply-add.

    Raises
    ------
    UnsupportedError
        if the kernel has no such instruction.
    """
    rate = ffi.new("double *")
    name = ffi.NULL if kernel is None else ffi.new("char[]", kernel.encode())
    check(lib.tf_bench_peak(name, threads, rounds, rate))
    return float(rate[0])
