"""A model, or a pair at some bits, as a float32 GGUF file: what its weights are worth, whoever multiplies them."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from twofold import errors
from twofold.blocks import decode_residual, ggml_type, row_planes
from twofold.merge import FILE_TYPES
from twofold.metadata import Gguf
from twofold.output import OutputFile, in_flight, row_chunks, writing
from twofold.pairfile import Pair
from twofold.source import Source, SourceTensor

_KEPT = ("f32", "i8", "i16", "i32", "i64", "f64")  # nothing to gain, or no weights
# Keys of split files and of bases; ggml writes with its default alignment, whatever the key says.
DROPPED_KEYS = (
    "twofold.format_version",
    "general.alignment",
    "split.no",
    "split.count",
    "split.tensors.count",
)


def is_float32(model: Source) -> bool:
    """Whether the file can be run as it is: one part, nothing quantized or in half precision."""
    return len(model.paths) == 1 and all(tensor.kind.name in _KEPT for tensor in model.tensors.values())


@contextmanager
def float32_file(
    path: Path, scratch: Path, *, pair: Pair | None = None, bits: int = 0, progress: bool = False
) -> Iterator[Path]:
    """Hand out a float32 copy of a model for a while; a model that is float32 already is handed out itself.

    Parameters
    ----------
    path
        GGUF file of any types, or the first part of a split one; the base, if there is a pair.
    scratch
        Folder for the copy, made if it is not there; the copy is removed at the end, whatever happens.
    pair, bits
        The residual to add, read at 4, 6 or 8 bits; with 0 bits none.
    progress
        Show a progress bar on standard error.

    Yields
    ------
    Path
        of an ordinary GGUF file.

    Raises
    ------
    FileAccessError, FormatError
        if the model cannot be read, or there is no room for the copy.
    """
    model = Source(path)
    if not bits and is_float32(model):
        yield path
        return
    try:
        scratch.mkdir(parents=True, exist_ok=True)
        folder = tempfile.TemporaryDirectory(prefix="float32-", dir=scratch)
    except OSError as error:
        raise errors.FileAccessError(f"{scratch}: {error.strerror}; give another folder with --scratch") from error
    with folder as name:
        out = Path(name) / "model.gguf"
        try:
            write_float32(model, out, pair=pair, bits=bits, progress=progress)
        except errors.FileAccessError as error:
            raise errors.FileAccessError(
                f"{error} (the float32 copy of {path.name}); free some space or give another folder with --scratch"
            ) from error
        del model  # and with it the mapping of a file that is no longer read
        yield out


@dataclass(frozen=True)
class _Job:
    """What every chunk needs to know."""

    model: Source
    pair: Pair | None
    bits: int
    file: OutputFile


def write_float32(model: Source, out: Path, *, pair: Pair | None = None, bits: int = 0, progress: bool = False) -> None:
    """Write `model`, with the residual of `pair` at `bits` added if there are any, as float32.

    Raises
    ------
    FileAccessError
        if there is no room.
    """
    with writing({out: _header(model)}) as (file,):
        job = _Job(model, pair if bits else None, bits, file)
        workers = len(os.sched_getaffinity(0))
        total = sum(tensor.weights for tensor in model.tensors.values())
        bar = tqdm(
            total=total, desc="float32", unit="weights", unit_scale=True, disable=not progress, leave=False, position=1
        )
        with bar, ThreadPoolExecutor(workers) as pool:
            for weights in in_flight(_tasks(job, pool), 2 * workers):
                bar.update(weights)


def _header(model: Source) -> Gguf:
    gguf = Gguf(keys_of=model.gguf)
    for key in DROPPED_KEYS:
        gguf.remove(key)
    gguf.set("general.file_type", FILE_TYPES["f32"])
    single = ggml_type("f32")
    for tensor in model.tensors.values():
        gguf.add(tensor.name, tensor.kind if tensor.kind.name in _KEPT else single, tensor.shape)
    return gguf


def _tasks(job: _Job, pool: ThreadPoolExecutor) -> Iterator[Future[int]]:
    for tensor in job.model.tensors.values():
        if tensor.kind.name in _KEPT and (job.pair is None or tensor.name not in job.pair.completed):
            yield pool.submit(_copy, job, tensor)
            continue
        for chunk in row_chunks(_matrix(tensor)):
            yield pool.submit(_write_rows, job, tensor, chunk)


def _matrix(tensor: SourceTensor) -> tuple[int, int, int]:
    """Experts, rows, width; whatever is neither a matrix nor experts is one matrix."""
    if len(tensor.shape) == 3:
        return tensor.shape[0], tensor.shape[1], tensor.shape[2]
    return 1, tensor.weights // tensor.width, tensor.width


def _copy(job: _Job, tensor: SourceTensor) -> int:
    job.file.write(tensor.name, tensor.data)
    return tensor.weights


def _write_rows(job: _Job, tensor: SourceTensor, chunk: tuple[int, int, int]) -> int:
    expert, first, last = chunk
    _, rows, width = _matrix(tensor)
    start = expert * rows + first
    weights = tensor.rows(start, expert * rows + last)
    if job.pair is not None and tensor.name in job.pair.completed:
        planes = job.pair.completed[tensor.name].planes[expert]
        weights += decode_residual(row_planes(planes, first, last), job.bits)
    job.file.write(tensor.name, weights.view("u1").reshape(-1), start * width * 4)
    return weights.size
