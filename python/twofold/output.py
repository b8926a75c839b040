"""Files that appear whole or not at all: written under a temporary name, renamed at the end."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from twofold import errors
from twofold._native import Bytes
from twofold.layout import PANEL_ROWS
from twofold.metadata import Gguf

CHUNK_WEIGHTS = 1 << 21  # 8 MB as float32; each thread holds about five such arrays
Done = TypeVar("Done")


class OutputFile:
    """A GGUF file being written; tensors may be written from several threads, in any order."""

    def __init__(self, path: Path, header: Gguf) -> None:
        self.path = path
        self.temporary = _temporary(path)
        self._tensors = {t.name: t for t in header.tensors()}
        self.bytes = max((_end(t.offset + t.bytes, header.alignment) for t in self._tensors.values()), default=0)
        self._file = os.open(self.temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        try:
            self.write_header(header)
            os.ftruncate(self._file, self.bytes)
        except BaseException:
            self.discard()
            raise

    def write_header(self, header: Gguf) -> None:
        """Write (again) what comes before the data; its size must not change."""
        self._write(header.header(), 0)

    def write(self, name: str, data: Bytes, at: int = 0) -> None:
        """Write bytes of a tensor, `at` bytes into it."""
        self._write(data.data, self._tensors[name].offset + at)

    def _write(self, data: bytes | memoryview, offset: int) -> None:
        view = memoryview(data)
        while view.nbytes:
            written = os.pwrite(self._file, view, offset)
            view, offset = view[written:], offset + written

    def sync(self) -> None:
        """Wait until the data is on the disk."""
        os.fsync(self._file)

    def finish(self) -> None:
        """Give the file its name."""
        os.replace(self.temporary, self.path)

    def discard(self) -> None:
        """Close the file; remove what was written, unless it is finished."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self.temporary.unlink(missing_ok=True)


def _end(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


@contextmanager
def writing(files: dict[Path, Gguf]) -> Iterator[list[OutputFile]]:
    """Open the files; on success all of them get their names, on any failure none of them stays.

    Raises
    ------
    FileAccessError
        if the disk is full or a file cannot be written, naming the folder and the space needed.
    """
    outputs: list[OutputFile] = []
    folder = next(iter(files)).absolute().parent
    try:
        for path, header in files.items():
            outputs.append(OutputFile(path, header))
        _check_space(folder, sum(output.bytes for output in outputs))
        yield outputs
        for output in outputs:
            output.sync()
        for output in outputs:  # nothing slow between the renames, where a signal would leave one of two files
            output.finish()
    except OSError as error:
        needed = sum(output.bytes for output in outputs)
        raise errors.FileAccessError(
            f"{folder}: cannot write {needed / 1e9:.2f} GB: {error.strerror or error}; nothing was kept"
        ) from error
    finally:
        for output in outputs:
            output.discard()
        for path in files:  # a signal may come between a file's creation and its place in the list
            _temporary(path).unlink(missing_ok=True)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.part")


def _check_space(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OSError(0, f"the disk has {free / 1e9:.2f} GB free")


def check_output(path: Path, inputs: Iterable[Path], force: bool) -> None:
    """Refuse to write over a file that is read, over any file without `force`, or into no folder.

    Raises
    ------
    ArgumentError, FileAccessError
        naming the path.
    """
    if any(path.exists() and path.samefile(part) for part in inputs):
        raise errors.ArgumentError(f"{path}: the output is the source itself; choose another name")
    if path.exists() and not force:
        raise errors.ArgumentError(f"{path}: is already there; choose another name or use --force")
    if not path.absolute().parent.is_dir():
        raise errors.FileAccessError(f"{path.absolute().parent}: no such folder")


def row_chunks(matrix: tuple[int, int, int]) -> Iterator[tuple[int, int, int]]:
    """Yield ``(expert, first row, last row)`` of pieces of `matrix`, each of whole panels but the last."""
    experts, rows, width = matrix
    step = max(PANEL_ROWS, CHUNK_WEIGHTS // width // PANEL_ROWS * PANEL_ROWS)
    for expert in range(experts):
        for first in range(0, rows, step):
            yield expert, first, min(first + step, rows)


def in_flight(tasks: Iterator[Future[Done]], limit: int) -> Iterator[Done]:
    """Yield results as they come, with at most `limit` chunks in memory."""
    running: set[Future[Done]] = set()
    for task in tasks:
        running.add(task)
        while len(running) >= limit:
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)
    yield from (future.result() for future in running)
