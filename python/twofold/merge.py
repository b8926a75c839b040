"""Add the residual to the base for good: one ordinary GGUF file, of the size the verifier's precision needs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from twofold import errors
from twofold._native import Floats
from twofold.blocks import GgmlType, decode_residual, ggml_type, quantize, row_planes
from twofold.engine import ResidualTensor
from twofold.layout import WHOLE_KEY
from twofold.metadata import Gguf
from twofold.output import OutputFile, check_output, in_flight, row_chunks, writing
from twofold.pairfile import Pair, open_pair
from twofold.source import Source, SourceTensor

# Values of general.file_type (enum llama_ftype in llama.h).
FILE_TYPES = {"f32": 0, "f16": 1, "q8_0": 7, "bf16": 32}
# ggml writes with its default alignment, whatever this key says; without it readers take the default too.
_DROPPED_KEYS = ("twofold.format_version", WHOLE_KEY, "general.alignment")
_LARGEST_HALF = 65504.0


@dataclass(frozen=True)
class Merged:
    """What merge wrote: the file, the type and bits of the completed tensors, how many, and how many were copied."""

    path: Path
    type: str
    bits: int
    completed: int
    copied: int


def merge(
    base: Path,
    out: Path,
    *,
    type: str = "f16",
    residual: Path | None = None,
    bits: int | None = None,
    force: bool = False,
    progress: bool = False,
) -> Merged:
    """Write base + residual as one ordinary GGUF file that any llama.cpp runs.

    Tensors that the residual completes are written in `type`; all others are copied byte for byte.

    Parameters
    ----------
    base
        ``NAME.base.gguf``.
    out
        File to write.
    type
        ``f32``, ``f16``, ``bf16`` or ``q8_0``.
    residual
        Default: ``NAME.residual.gguf`` beside the base.
    bits
        Bits of residual to add: 4, 6 or 8; default: all that the file holds.
    force
        Replace a file that is there.
    progress
        Show a progress bar on standard error.

    Returns
    -------
    Merged

    Raises
    ------
    ArgumentError
        for a type or bits that are not allowed, or a file that must not be overwritten.
    FileAccessError, FormatError, MismatchError
        if the pair cannot be read, or the disk is full.
    NonFiniteError
        for a weight that ``f16`` cannot hold.
    """
    if type not in FILE_TYPES:
        raise errors.ArgumentError(f"type {type!r}: one of {', '.join(FILE_TYPES)} is allowed")
    pair = open_pair(base, residual)
    bits = _check_bits(pair, bits)
    check_output(out, (base, pair.residual.path), force)
    model, kind = Source(base), ggml_type(type)
    with writing({out: _header(model, pair, kind)}) as (file,):
        _write_tensors(_Job(model, pair, kind, bits, file), progress)
    return Merged(out, type, bits, len(pair.completed), len(pair.tensors) - len(pair.completed))


@dataclass(frozen=True)
class _Job:
    """What every chunk needs to know."""

    model: Source
    pair: Pair
    kind: GgmlType
    bits: int
    file: OutputFile


def _check_bits(pair: Pair, bits: int | None) -> int:
    held = pair.residual.bits
    allowed = [b for b in (4, 6, 8) if b <= held]
    if bits is not None and bits not in allowed:
        raise errors.ArgumentError(
            f"residual bits {bits}: {pair.residual.path} holds {held} bits, so {', '.join(map(str, allowed))} "
            "can be merged"
        )
    return bits or held


def _header(model: Source, pair: Pair, kind: GgmlType) -> Gguf:
    gguf = Gguf(keys_of=model.gguf)
    for key in _DROPPED_KEYS:
        gguf.remove(key)
    gguf.set("general.file_type", FILE_TYPES[kind.name])
    for tensor in model.tensors.values():
        gguf.add(tensor.name, kind if tensor.name in pair.completed else tensor.kind, tensor.shape)
    return gguf


def _write_tensors(job: _Job, progress: bool) -> None:
    workers = len(os.sched_getaffinity(0))
    total = sum(tensor.weights for tensor in job.model.tensors.values())
    bar = tqdm(total=total, unit="weights", unit_scale=True, disable=not progress, smoothing=0.05)
    with bar, ThreadPoolExecutor(workers) as pool:
        for name, weights in in_flight(_tasks(job, pool), 2 * workers):
            bar.set_postfix_str(name, refresh=False)
            bar.update(weights)


def _tasks(job: _Job, pool: ThreadPoolExecutor) -> Iterator[Future[tuple[str, int]]]:
    for tensor in job.model.tensors.values():
        completed = job.pair.completed.get(tensor.name)
        if completed is None:
            yield pool.submit(_copy, job, tensor)
            continue
        for chunk in row_chunks(completed.shape):
            yield pool.submit(_merge_rows, job, tensor, completed, chunk)


def _copy(job: _Job, tensor: SourceTensor) -> tuple[str, int]:
    job.file.write(tensor.name, tensor.data)
    return tensor.name, tensor.weights


def _merge_rows(
    job: _Job, tensor: SourceTensor, completed: ResidualTensor, chunk: tuple[int, int, int]
) -> tuple[str, int]:
    expert, first, last = chunk
    _, rows, width = completed.shape
    start = expert * rows + first
    weights = tensor.rows(start, expert * rows + last)
    weights += decode_residual(row_planes(completed.planes[expert], first, last), job.bits)
    _check_range(weights, job.kind, tensor.name)
    job.file.write(tensor.name, quantize(weights, job.kind), start * job.kind.row_bytes(width))
    return tensor.name, weights.size


def _check_range(weights: Floats, kind: GgmlType, name: str) -> None:
    if kind.name == "f16" and float(np.abs(weights).max()) > _LARGEST_HALF:
        raise errors.NonFiniteError(
            f"{name}: a weight above {_LARGEST_HALF:.0f} does not fit type f16; use bf16 or f32"
        )
