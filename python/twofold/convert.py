"""Turn a GGUF model into a base that drafts and a residual that completes it (docs/format.md)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits
from tqdm import tqdm

from twofold import architecture, errors, fill, layout, shapes, whole
from twofold._native import Floats
from twofold.blocks import check_finite, decode_residual, plane_bytes, quantize
from twofold.calibration import Calibration
from twofold.layout import Split, Whole
from twofold.metadata import Gguf, fingerprint
from twofold.output import OutputFile, check_output, in_flight, row_chunks, writing
from twofold.pairfile import base_path, residual_path
from twofold.rounding import Rounding
from twofold.sensitivity import CANDIDATES, choose_types
from twofold.source import Source


@dataclass
class Error:
    """Squared sums over a tensor: of the source, of what the base alone and base + residual lose."""

    source: float = 0.0
    base: float = 0.0
    full: float = 0.0

    def add(self, other: Error) -> None:
        """Add the sums of another part."""
        self.source += other.source
        self.base += other.base
        self.full += other.full

    @property
    def relative(self) -> tuple[float, float]:
        """Relative root-mean-square error of the base and of base + residual."""
        norm = max(self.source, 1e-300)
        return float(np.sqrt(self.base / norm)), float(np.sqrt(self.full / norm))


@dataclass
class Conversion:
    """What convert did: the files, the tensors, and the error of each split one."""

    base: Path
    residual: Path
    bits: int
    group: int
    splits: list[Split]
    errors: dict[str, Error] = field(default_factory=dict)
    manners: dict[str, str] = field(default_factory=dict)  # of rounding, by tensor (rounding.py)
    choice: fill.Choice | None = None  # what fills the VRAM, where that was asked for


def convert(
    source: Path,
    name: Path,
    *,
    base_type: str = "auto",
    base_bpw: float | None = None,
    base_types: Sequence[str] = CANDIDATES,
    keep_whole: str | None = None,
    whole_type: str = "q8_0",
    vram: fill.Budget | None = None,
    bits: int = 8,
    group: int = 128,
    calibration: Calibration | None = None,
    feedback: bool = True,
    threads: int | None = None,
    force: bool = False,
    progress: bool = False,
) -> Conversion:
    """Convert a model, tensor by tensor, into ``NAME.base.gguf`` and ``NAME.residual.gguf``.

    Parameters
    ----------
    source
        GGUF file, or the first part of a split one.
    name
        Path of the pair without the endings.
    base_type
        ggml type of the base, or ``auto`` (:func:`twofold.layout.choose_base_type`).
    base_bpw, base_types
        Instead of one type (`base_type` stays ``auto``): choose for each matrix among `base_types`, within so many
        bits a weight over all of them (:func:`twofold.sensitivity.choose_types`); needs a calibration.
    keep_whole, whole_type
        Layers (``0-3,27``) or a regular expression on tensor names: these matrices stay whole in the base, drafting and
        verifying with the same bytes, as ``q8_0`` (or as they are, if that takes fewer bits) or always as in the
        ``source``.
    vram
        Instead of types and whole matrices: choose both to fill this VRAM (:func:`twofold.fill.choose`).
    bits
        4, 6 or 8: planes of the residual that are written.
    group
        Weights that share a scale in the residual: a multiple of 32.
    calibration
        What is known of the matrices' inputs (:func:`twofold.calibration.load`); default: all count alike.
    feedback
        Where the calibration has second moments, make up in later columns for what earlier ones lose. The residual
        is then at its best when read at `bits`.
    threads
        Default: one for each CPU this process may use.
    force
        Replace files that are there.
    progress
        Show a progress bar on standard error.

    Returns
    -------
    Conversion

    Raises
    ------
    ArgumentError
        for an option outside what is allowed, or files that must not be overwritten.
    FileAccessError, FormatError
        if the source cannot be read or the disk is full.
    UnsupportedError
        for an architecture that cannot be drafted and verified yet.
    NonFiniteError
        for NaN or infinity among the weights.
    MismatchError
        for a calibration of another model.
    """
    _check_types(base_type, base_bpw, base_types, calibration)
    if vram is not None and (base_type != "auto" or base_bpw is not None or keep_whole is not None):
        raise errors.ArgumentError(
            "VRAM to fill: it chooses types and whole matrices; give no --base, --base-bpw or --whole"
        )
    layout.check_residual(bits, group)
    workers = threads or len(os.sched_getaffinity(0))
    model = Source(source)
    result = Conversion(base_path(name), residual_path(base_path(name)), bits, group, [])
    for path in (result.base, result.residual):
        check_output(path, model.paths, force)
    architecture.check_architecture(source)
    kept = None if keep_whole is None else Whole(whole.find(keep_whole, model), _whole_type(whole_type))
    if vram is not None:
        result.choice = fill.choose(shapes.read(source), vram, bits, calibration)
        base_type, base_bpw = result.choice.base_type, result.choice.bpw
        kept = Whole(result.choice.whole)
    result.splits = layout.plan(model, base_type, asked=kept)
    if base_bpw is not None and calibration is not None:
        chosen = choose_types([split for split in result.splits if split.residual], calibration, base_bpw, base_types)
        result.splits = layout.plan(model, "auto", chosen, kept)
    halved = [split for split in result.splits if split.residual]
    if not halved:
        raise errors.ArgumentError(f"{source}: no tensor can be split: " + _reasons(result.splits))
    rounding = Rounding(calibration, group, bits, feedback=feedback, workers=workers)
    result.manners = _manners(rounding, halved, calibration, str(source))
    base = layout.base_header(model, result.splits)
    residual = layout.residual_header(halved, bits, group, [0] * len(halved), result.base.name)
    with writing({result.base: base, result.residual: residual}) as (base_file, residual_file):
        _write_tensors(result, rounding, base_file, residual_file, workers, progress)
        prints = _fingerprints(base_file, base, halved)
        residual_file.write_header(layout.residual_header(halved, bits, group, prints, result.base.name))
    return result


def _whole_type(asked: str) -> str:
    if asked not in whole.TYPES:
        raise errors.ArgumentError(f"type {asked} of whole tensors: {' or '.join(whole.TYPES)} is allowed")
    return asked


def _check_types(
    base_type: str, base_bpw: float | None, base_types: Sequence[str], calibration: Calibration | None
) -> None:
    layout.check_base_type(base_type)
    if base_bpw is None:
        return
    if base_type != "auto":
        raise errors.ArgumentError(f"base type {base_type} and a budget of {base_bpw:g} bits: give one of the two")
    if calibration is None:
        raise errors.ArgumentError("a budget of bits for the base needs a calibration (twofold calibrate)")
    if not base_types or "auto" in base_types:
        raise errors.ArgumentError(f"base types {','.join(base_types)!r}: give names of ggml types, not auto")
    for name in base_types:
        layout.check_base_type(name)


def _manners(rounding: Rounding, splits: list[Split], calibration: Calibration | None, model: str) -> dict[str, str]:
    for split in splits:
        rounding.check(split, model)
    manners = {split.base.name: rounding.manner(split.base.name, split.matrix[0]) for split in splits}
    if calibration is not None and set(manners.values()) == {"plain"}:
        raise errors.MismatchError(f"{calibration.origin} knows no matrix of {model}: it was made with another model")
    return manners


def _reasons(splits: list[Split]) -> str:
    return ", ".join(sorted({split.reason for split in splits}))


def _write_tensors(
    result: Conversion,
    rounding: Rounding,
    base_file: OutputFile,
    residual_file: OutputFile,
    workers: int,
    progress: bool,
) -> None:
    total = sum(split.source.weights for split in result.splits)
    bar = tqdm(total=total, unit="weights", unit_scale=True, disable=not progress, smoothing=0.05)
    with bar, threadpool_limits(1, "blas"), ThreadPoolExecutor(workers) as pool:  # a matrix product a worker
        tasks = _tasks(result, rounding, base_file, residual_file, pool)
        for split, chunk_error, weights in in_flight(tasks, 2 * workers):
            if split.residual:
                result.errors.setdefault(split.base.name, Error()).add(chunk_error)
            bar.set_postfix_str(split.base.name, refresh=False)
            bar.update(weights)
    for tensor, error in result.errors.items():
        _check_error(tensor, error)


def _check_error(tensor: str, error: Error) -> None:
    base, full = error.relative
    if not full <= max(0.5 * base, 1e-3):
        raise errors.TwofoldError(f"{tensor}: base + residual is off by {full:.2%}, the base by {base:.2%}; a bug")


Done = tuple[Split, Error, int]
Rows = tuple[Split, int, int, int]  # expert, first row, last row


def _tasks(
    result: Conversion, rounding: Rounding, base_file: OutputFile, residual_file: OutputFile, pool: ThreadPoolExecutor
) -> Iterator[Future[Done]]:
    for split in result.splits:
        if not split.residual and split.base.kind == split.source.kind:
            yield pool.submit(_copy, split, base_file)
            continue
        for chunk in row_chunks(split.matrix):
            if split.residual:
                yield pool.submit(_split, rounding, (split, *chunk), base_file, residual_file)
            else:
                yield pool.submit(_requantize, (split, *chunk), base_file)


def _copy(split: Split, base_file: OutputFile) -> Done:
    base_file.write(split.base.name, split.source.data)
    return split, Error(), split.source.weights


def _requantize(rows_of: Rows, base_file: OutputFile) -> Done:
    """Write rows of a tensor that stays whole, in another type than the source's."""
    split, expert, first, last = rows_of
    _, rows, width = split.matrix
    start = expert * rows + first
    weights = split.source.rows(start, expert * rows + last)
    check_finite(weights, f"{split.source.name}, rows {first} to {last}")
    base_file.write(split.base.name, quantize(weights, split.base.kind), start * split.base.kind.row_bytes(width))
    return split, Error(), weights.size


def _split(rounding: Rounding, rows_of: Rows, base_file: OutputFile, residual_file: OutputFile) -> Done:
    """Quantize, take the residual, encode it, check and write rows `first` to `last` of one expert."""
    split, expert, first, last = rows_of
    experts, rows, width = split.matrix
    name, kind = split.base.name, split.base.kind
    weights = split.source.rows(expert * rows + first, expert * rows + last)
    check_finite(weights, f"{split.source.name}, rows {first} to {last}")
    base_bytes, rounded = rounding.base(weights, kind, name, expert, experts)
    residual = weights - rounded
    planes = rounding.residual(residual, name, experts)
    chunk_error = Error(_square(weights), _square(residual), _square(residual - decode_residual(planes)))
    base_file.write(name, base_bytes, (expert * rows + first) * kind.row_bytes(width))
    for part, data in planes.parts().items():
        before = expert * plane_bytes(rows, width, rounding.group, part)
        within = plane_bytes(first, width, rounding.group, part)  # first is a multiple of a panel's rows
        residual_file.write(f"{name}.{part}", data, before + within)
    return split, chunk_error, weights.size


def _square(values: Floats) -> float:
    flat = values.ravel()
    return float(np.dot(flat, flat))


def _fingerprints(base_file: OutputFile, header: Gguf, halved: list[Split]) -> list[int]:
    data = np.memmap(base_file.temporary, np.uint8, "r")
    tensors = {tensor.name: tensor for tensor in header.tensors()}
    found = (tensors[split.base.name] for split in halved)
    return [fingerprint(t, np.asarray(data[t.offset : t.offset + t.bytes])) for t in found]
