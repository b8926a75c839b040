"""What a machine can do, told or measured: memories, bandwidths, rates of kernels."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from twofold import blocks, devices, errors, timing
from twofold.blocks import BaseMatrix, Planes, encode_residual, ggml_type, quantize
from twofold.decoder import physical_cores

BITS = (4, 6, 8)
KERNEL_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q8_0")
COLUMNS = (
    1,
    2,
    4,
    8,
    9,
    16,
    17,
    24,
    25,
    32,
    33,
)  # kernels take blocks of 8: one more column may cost as much as several
MOST = COLUMNS[-1]
Times: TypeAlias = npt.NDArray[np.float64]  # seconds a weight of a batch, by its columns from 0 to MOST
_ROWS, _WIDTH = 2048, 2048  # in the caches; large enough that starting threads does not show
_READ = 256 << 20
_TIMES = ("residual_times", "base_times")
_COPY = 64 << 20


@dataclass(frozen=True)
class Machine:
    """A machine as the plan sees it.

    Attributes
    ----------
    vram
        bytes; 0: no GPU.
    vram_bandwidth, ram_bandwidth, pcie
        bytes a second that are reached when reading, and when copying one way between RAM and VRAM.
    ram
        bytes.
    residual_times, base_times
        seconds a weight that the CPU's kernels take for a batch when memory does not hold them back, float64
        ``(MOST + 1,)`` by its columns, by residual bits and by type of the base.
    measured
        names of what was measured, here and now, with a word on how.
    """

    vram: int
    vram_bandwidth: float
    pcie: float
    ram: int
    ram_bandwidth: float
    residual_times: Mapping[int, Times]
    base_times: Mapping[str, Times]
    measured: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        times = {name: {key: at.tolist() for key, at in vars(self)[name].items()} for name in _TIMES}
        return {**vars(self), **times}


@dataclass(frozen=True)
class Told:
    """What the user says of the machine; None is measured. `cores` scales the kernel rates of this machine."""

    vram: int | None = None
    vram_bandwidth: float | None = None
    pcie: float | None = None
    ram: int | None = None
    ram_bandwidth: float | None = None
    cores: int | None = None


def describe(told: Told) -> Machine:
    """Complete what was told by measuring this machine.

    Raises
    ------
    ArgumentError
        if there is VRAM whose bandwidths were not told and cannot be measured here.
    """
    measured: dict[str, str] = {}
    threads = physical_cores()
    device = _gpu()
    vram = told.vram
    if vram is None:
        vram = device.free if device else 0
        measured["VRAM"] = f"free on {device.name}" if device else "no GPU"
    vram_bandwidth, pcie = _gpu_rates(told, vram, device, measured)
    ram, ram_bandwidth = told.ram, told.ram_bandwidth
    if ram is None:
        ram = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        measured["RAM"] = "of this machine"
    if ram_bandwidth is None:
        ram_bandwidth = read_bandwidth(threads)
        measured["RAM bandwidth"] = f"reading {_READ >> 20} MiB, {threads} threads"
    scale = (told.cores or threads) / threads
    residual = {bits: residual_times(bits, threads) / scale for bits in BITS}
    base = {kind: base_times(kind, threads) / scale for kind in KERNEL_TYPES}
    how = f"this CPU, {blocks.default_kernel()}, {threads} threads"
    measured["kernel rates"] = how if told.cores is None else f"{how}, scaled to {told.cores} cores"
    return Machine(vram, vram_bandwidth, pcie, ram, ram_bandwidth, residual, base, measured)


def read_bandwidth(threads: int) -> float:
    """Bytes a second of reading RAM, the median of a few times."""
    return float(np.median(timing.read_bandwidth(np.ones(_READ, np.uint8), threads=threads)))


def _gpu() -> devices.Device | None:
    found = [device for device in devices.devices() if device.kind in ("gpu", "igpu") and device.total]
    return max(found, key=lambda device: device.total, default=None)


def _gpu_rates(told: Told, vram: int, device: devices.Device | None, measured: dict[str, str]) -> tuple[float, float]:
    bandwidth, pcie = told.vram_bandwidth, told.pcie
    if vram == 0:
        return 0.0, 0.0
    if (bandwidth is None or pcie is None) and device is None:
        missing = [name for name, value in (("--vram-bandwidth", bandwidth), ("--pcie", pcie)) if value is None]
        raise errors.ArgumentError(
            f"there is no GPU here to measure: give {' and '.join(missing)} of the one with that VRAM "
            "(for instance --vram-bandwidth 500GB/s --pcie 25GB/s), or --vram 0"
        )
    if device is not None and (bandwidth is None or pcie is None):
        copied, crossed = devices.copy_rates(device.name, _COPY)
        if bandwidth is None:
            bandwidth, measured["VRAM bandwidth"] = 2 * copied, f"copy on {device.name}, read and write counted"
        if pcie is None:
            pcie, measured["PCIe"] = crossed, f"copies to and from {device.name}"
    assert bandwidth is not None and pcie is not None
    return bandwidth, pcie


# ---- kernels -----------------------------------------------------------------------------------------


def linear(rate: float) -> Times:
    """Return times of a kernel that multiplies `rate` weights times columns a second, whatever the columns."""
    times: Times = np.arange(MOST + 1) / rate
    return times


def residual_times(bits: int, threads: int) -> Times:
    """Seconds a weight of the residual's kernel, on a matrix that stays in the caches."""
    return _times([encode_residual(_weights(), 128, bits)], [], bits, threads)


def base_times(kind: str, threads: int) -> Times:
    """Seconds a weight of the base's kernel, on a matrix that stays in the caches."""
    of = ggml_type(kind)
    part = 64  # rows: quantizing them all would take seconds
    data = np.tile(quantize(_weights()[:part], of), _ROWS // part)
    return _times([], [BaseMatrix(of, _ROWS, _WIDTH, data)], 8, threads)


def _weights() -> npt.NDArray[np.float32]:
    return np.random.default_rng(0).standard_normal((_ROWS, _WIDTH), np.float32)


def _times(residuals: Sequence[Planes], bases: Sequence[BaseMatrix], bits: int, threads: int) -> Times:
    x = np.random.default_rng(1).standard_normal((MOST, _WIDTH), np.float32)

    def median(n: int) -> float:
        return float(
            np.median(timing.time_matmul(residuals, x[:n], bases=bases, bits=bits, threads=threads, repeats=9))
        )

    times = np.interp(np.arange(MOST + 1), (0, *COLUMNS), (0.0, *map(median, COLUMNS))) / (_ROWS * _WIDTH)
    return np.maximum.accumulate(times)  # more columns never take less time but by chance
