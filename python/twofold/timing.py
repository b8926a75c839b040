"""Times of the C kernels, for benchmarks: see scripts/bench_kernels.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from twofold import errors
from twofold._native import Floats, check, ffi, floats_pointer, lib
from twofold.blocks import Planes

Seconds = npt.NDArray[np.float64]


def time_matmul(
    matrices: Sequence[Planes], x: Floats, *, bits: int, threads: int, repeats: int, kernel: str | None = None
) -> Seconds:
    """Time products with `x`, float32 ``(n, width)``, in which matrices of one shape take turns.

    Returns
    -------
    float64 ``(repeats,)``, seconds; the activations are quantized anew each time.

    Raises
    ------
    ArgumentError
        for an unknown kernel, or shapes that differ.
    """
    if not matrices or x.shape[1] != matrices[0].width:
        raise errors.ArgumentError(f"x of shape {x.shape} does not fit the matrices")
    structs = [matrix.c_struct(bits) for matrix in matrices]
    array = ffi.new("tf_planes[]", [struct[0] for struct in structs])
    out = np.zeros((len(x), matrices[0].rows), np.float32)
    seconds = ffi.new("double[]", repeats)
    name = ffi.NULL if kernel is None else ffi.new("char[]", kernel.encode())
    check(
        lib.tf_bench_matmul(
            array, len(structs), name, threads, floats_pointer(x), len(x), floats_pointer(out), repeats, seconds
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
