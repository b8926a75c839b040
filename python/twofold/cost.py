"""Seconds of a decode, from bytes and bandwidths (docs/plan.md has the formulas and why)."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar

import numpy as np

from twofold.machine import MOST, Machine, Times

VRAM_SHARE, RAM_SHARE = 0.8, 0.75  # of the bandwidths, that kernels reach
GGML_ALONE, GGML_SHARE = (
    0.5,
    0.21,
)  # of the 8-bit residual kernel's rate, that ggml's reach for one column and for several
SMOOTH = 6.0  # exponent of the maximum of reading and computing
VALUE = 650  # products of the residual's kernel that a value costs which goes into a matrix in RAM or comes out
GPU_LAYER, CPU_LAYER = 40e-6, 15e-6  # seconds a layer: launches, barriers, and what is not a matrix product
FETCH = 15e-6  # seconds before a copy between RAM and VRAM begins
LOOP = 150e-6  # seconds a decode in Python and llama.cpp
RESULT_COPIES = 1  # the residual's result is sent, and added on the device
_Self = TypeVar("_Self", bound="_Added")


class _Added:
    """Field by field sums."""

    def __add__(self: _Self, other: _Self) -> _Self:
        values = (getattr(self, f.name) + getattr(other, f.name) for f in fields(self))  # type: ignore[arg-type]
        return type(self)(*values)


@dataclass(frozen=True)
class Sums(_Added):
    """Matrices in one memory: bytes read always, bytes of experts by share that a token uses, the CPU's seconds."""

    dense: float = 0.0
    experts: float = 0.0
    used: float = 0.0  # bytes of experts that a token uses
    seconds: Times = field(default_factory=lambda: np.zeros(MOST + 1))  # of a batch, by its columns

    @property
    def size(self) -> float:
        """Bytes they take."""
        return self.dense + self.experts

    def read(self, tokens: int) -> float:
        """Bytes read for a batch whose tokens choose experts evenly and by themselves."""
        if self.experts == 0:
            return self.dense
        return self.dense + self.experts * (1 - (1 - self.used / self.experts) ** tokens)


@dataclass(frozen=True)
class Load(_Added):
    """What a decode works on, layer by layer added up.

    Attributes
    ----------
    gpu, cpu
        base and whole matrices in VRAM and in RAM.
    split
        the part of `gpu` that is the base of a residual and overlaps with it: no experts.
    beside, within
        residual of matrices whose base is in VRAM, and in RAM.
    gpu_layers, cpu_layers
        how many.
    crossing
        float32 values that cross the bus for a column of a check.
    fetches
        copies across the bus in a check.
    cache_gpu, cache_cpu
        bytes of cache read by a decode.
    """

    gpu: Sums = field(default_factory=Sums)
    cpu: Sums = field(default_factory=Sums)
    split: Sums = field(default_factory=Sums)
    beside: Sums = field(default_factory=Sums)
    within: Sums = field(default_factory=Sums)
    gpu_layers: int = 0
    cpu_layers: int = 0
    crossing: float = 0.0
    fetches: int = 0
    cache_gpu: float = 0.0
    cache_cpu: float = 0.0
    logits: int = 0  # values of a row of logits that come from VRAM


def smooth_max(*values: float) -> float:
    """Return a maximum that is larger where two values are close: what should overlap does so in part."""
    return float(sum(value**SMOOTH for value in values) ** (1 / SMOOTH))


def decode(load: Load, machine: Machine, tokens: int, *, residual: bool, overlap: bool = True) -> float:
    """Seconds of decoding a batch of up to ``MOST`` tokens: with the base alone, or base and residual.

    `overlap` says that the CPU multiplies the residual while the GPU multiplies its base; else it waits.
    """
    ram = machine.ram_bandwidth * RAM_SHARE
    within, beside = (load.within, load.beside) if residual else (Sums(), Sums())
    on_cpu = smooth_max(
        (load.cpu.read(tokens) + within.read(tokens) + load.cache_cpu) / ram,
        float(load.cpu.seconds[tokens] + within.seconds[tokens]),
    )
    seconds = on_cpu + load.cpu_layers * CPU_LAYER + LOOP
    if load.gpu_layers == 0 and load.gpu.size == 0:
        return seconds
    on_gpu = (load.gpu.read(tokens) + load.cache_gpu) / (machine.vram_bandwidth * VRAM_SHARE)
    added = smooth_max(beside.read(tokens) / ram, float(beside.seconds[tokens]))
    crossing = 4 * tokens * load.logits / machine.pcie
    if residual:
        crossing += 4 * tokens * load.crossing / machine.pcie + load.fetches * FETCH
    hidden = min(load.split.read(tokens) / (machine.vram_bandwidth * VRAM_SHARE), added) if overlap else 0.0
    return seconds + on_gpu + added - hidden + crossing + load.gpu_layers * GPU_LAYER


def read_by_check(load: Load, tokens: int) -> tuple[float, float]:
    """Bytes that a check of so many tokens reads in VRAM and in RAM, cache included."""
    in_ram = load.cpu.read(tokens) + load.within.read(tokens) + load.beside.read(tokens) + load.cache_cpu
    return load.gpu.read(tokens) + load.cache_gpu, in_ram
