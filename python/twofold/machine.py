"""What a machine can do, told or measured: memories, bandwidths, rates of kernels."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from twofold import blocks, devices, errors, timing
from twofold.blocks import BaseMatrix, encode_residual, ggml_type, quantize
from twofold.decoder import physical_cores

BITS = (4, 6, 8)
KERNEL_TYPES = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "q4_0", "q8_0")
_ROWS, _WIDTH = 512, 2048
_WIDE, _NARROW = 96, 16
_READ = 256 << 20
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
    residual_rate, base_rate
        weights times columns a second that the CPU's kernels multiply when memory does not hold them back, by
        residual bits and by type of the base.
    measured
        names of what was measured, here and now, with a word on how.
    """

    vram: int
    vram_bandwidth: float
    pcie: float
    ram: int
    ram_bandwidth: float
    residual_rate: Mapping[int, float]
    base_rate: Mapping[str, float]
    measured: Mapping[str, str] = field(default_factory=dict)


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
        ram_bandwidth = float(np.median(timing.read_bandwidth(np.ones(_READ, np.uint8), threads=threads)))
        measured["RAM bandwidth"] = f"reading {_READ >> 20} MiB, {threads} threads"
    scale = (told.cores or threads) / threads
    residual = {bits: scale * residual_rate(bits, threads) for bits in BITS}
    base = {kind: scale * base_rate(kind, threads) for kind in KERNEL_TYPES}
    how = f"this CPU, {blocks.default_kernel()}, {threads} threads"
    measured["kernel rates"] = how if told.cores is None else f"{how}, scaled to {told.cores} cores"
    return Machine(vram, vram_bandwidth, pcie, ram, ram_bandwidth, residual, base, measured)


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


# ---- kernel rates ------------------------------------------------------------------------------------


def residual_rate(bits: int, threads: int) -> float:
    """Weights times columns a second of the residual's kernel, on a matrix that stays in the caches."""
    generator = np.random.default_rng(0)
    planes = encode_residual(generator.standard_normal((_ROWS, _WIDTH), np.float32), 128, bits)
    x = generator.standard_normal((32, _WIDTH), np.float32)
    seconds = timing.time_matmul([planes], x, bits=bits, threads=threads, repeats=9)
    return _ROWS * _WIDTH * len(x) / float(np.median(seconds))


def base_rate(kind: str, threads: int) -> float:
    """Weights times columns a second of the base's kernel: what more columns cost, the rearranging left out."""
    generator = np.random.default_rng(0)
    of = ggml_type(kind)
    weights = generator.standard_normal((_ROWS, _WIDTH), np.float32)
    base = BaseMatrix(of, _ROWS, _WIDTH, quantize(weights, of))
    x = generator.standard_normal((_WIDE, _WIDTH), np.float32)
    wide = _seconds(lambda: blocks.matmul(None, x, base=base, threads=threads))
    narrow = _seconds(lambda: blocks.matmul(None, x[:_NARROW], base=base, threads=threads))
    return _ROWS * _WIDTH * (_WIDE - _NARROW) / max(wide - narrow, 1e-6)


def _seconds(run: Callable[[], object], repeats: int = 7) -> float:
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        found.append(time.perf_counter() - start)
    return min(found)  # the difference of two medians would be mostly noise on a busy machine
