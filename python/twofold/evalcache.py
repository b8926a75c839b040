"""The reference's distributions on disk: made once for a model and a text, trusted only if whole and of the same."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import llama_cpp
import numpy as np

from twofold import errors
from twofold._native import Floats
from twofold.divergence import Codes, Doubles, Integers, Scores, divergences, encode
from twofold.metadata import Gguf, fingerprint
from twofold.source import Source
from twofold.windows import Text

_MAGIC = b"twofold eval 1\n\0"
_ALIGN = 64
_CRC_BYTES = 1 << 24


def cache_root() -> Path:
    """Folder for everything that can be made again: ``$TWOFOLD_CACHE``, else ``~/.cache/twofold``."""
    return Path(os.environ.get("TWOFOLD_CACHE") or Path.home() / ".cache" / "twofold")


def identity(path: Path) -> dict[str, Any]:
    """Tell a model from others: path, size and time of its files, a hash of headers and of samples of every tensor."""
    model = Source(path)
    digest = hashlib.sha256()
    files = []
    for part in model.paths:
        about = part.stat()
        files.append([str(part.resolve()), about.st_size, about.st_mtime_ns])
        digest.update(Gguf(part).header())
    for tensor in model.tensors.values():
        digest.update(fingerprint(tensor, np.ascontiguousarray(tensor.data)).to_bytes(8, "little"))
    return {"files": files, "content": digest.hexdigest()}


def entry_key(reference: dict[str, Any], text: Text, ctx: int, limit: int) -> dict[str, Any]:
    """Everything that the stored numbers depend on."""
    windows = hashlib.sha256(json.dumps(text.windows).encode()).hexdigest()
    return {
        "mode": "exact",
        "reference": reference,
        "text": text.digest,
        "windows": windows,
        "ctx": ctx,
        "tokens": limit,
        "first": text.first,
        "llama_cpp_python": llama_cpp.__version__,
    }


@dataclass(frozen=True)
class Entry:
    """A reference's distributions for the scored rows of a text.

    Attributes
    ----------
    codes
        uint16 ``(rows, vocab)``, mapped (:func:`twofold.divergence.encode`).
    nll
        nats of the text's own next tokens, exact.
    top
        likeliest tokens.
    floor
        KL divergence of the stored distribution from the logits that it was made of.
    """

    codes: Codes
    nll: Doubles
    top: Integers
    floor: Doubles

    def itself(self) -> Scores:
        """Return the reference as a row of the results: what storing it alone seems to cost."""
        return Scores(self.floor, np.ones(len(self.floor), np.bool_), self.nll)


def entry_path(folder: Path, reference: Path, text: Text, key: dict[str, Any]) -> Path:
    """Where an entry is kept."""
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:20]
    return folder / f"{reference.stem}.{text.kind}.{name}.logits"


def read_entry(path: Path, key: dict[str, Any]) -> Entry | None:
    """Map an entry; None if it is missing, unfinished, damaged, or of another key."""
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError):
        return None
    start = len(_MAGIC)
    whole = data[:start].tobytes() == _MAGIC
    if not whole or _crc(data[:-4]) != int.from_bytes(data[-4:].tobytes(), "little"):
        return None
    length = int.from_bytes(data[start : start + 4].tobytes(), "little")
    head = json.loads(data[start + 4 : start + 4 + length].tobytes())
    if head["key"] != json.loads(json.dumps(key)):
        return None
    rows, vocab, at = head["rows"], head["vocab"], _padded(start + 4 + length)
    sizes = [rows * vocab * 2, rows * 8, rows * 8, rows * 8]
    parts = []
    for size, kind in zip(sizes, ("<u2", "<f8", "<i8", "<f8"), strict=True):
        parts.append(data[at : at + size].view(kind))
        at += _padded(size)
    return Entry(parts[0].reshape(rows, vocab), *parts[1:])


def _crc(data: Any) -> int:
    total = 0
    for at in range(0, data.size, _CRC_BYTES):
        total = zlib.crc32(data[at : at + _CRC_BYTES].data, total)
    return total


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


def write_entry(
    path: Path, key: dict[str, Any], rows: int, vocab: int, blocks: Iterable[tuple[Floats, Integers]]
) -> None:
    """Store an entry; it appears whole or not at all.

    Parameters
    ----------
    path, key
        of :func:`entry_path` and :func:`entry_key`.
    rows, vocab
        shape of all blocks together.
    blocks
        logits, float32 ``(n, vocab)``, and the text's next token after each.

    Raises
    ------
    FileAccessError
        if there is no room, or the folder cannot be written.
    """
    head = json.dumps({"key": key, "rows": rows, "vocab": vocab}).encode()
    with _appearing(path, rows * vocab * 2) as file:
        out = _Summed(file)
        out.write(_MAGIC + len(head).to_bytes(4, "little") + head)
        out.pad()
        found: list[tuple[Doubles, Integers, Doubles]] = []
        for logits, targets in blocks:
            codes, sums = encode(logits)
            out.write(codes.astype("<u2", copy=False).tobytes())
            likelihood = sums - logits[np.arange(len(logits)), targets]
            found.append((likelihood, logits.argmax(axis=1), divergences(codes, logits)[0]))
        out.pad()
        for values, kind in zip(zip(*found, strict=True), ("<f8", "<i8", "<f8"), strict=True):
            whole = np.concatenate(values).astype(kind)
            if whole.size != rows:
                raise errors.DecodeError(f"{path}: {whole.size} rows of logits came instead of {rows}; a bug")
            out.write(whole.tobytes())
            out.pad()
        file.write(out.crc.to_bytes(4, "little"))


class _Summed:
    """Writes, and keeps a checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.crc, self.size = file, 0, 0

    def write(self, data: bytes) -> None:
        self.file.write(data)
        self.crc = zlib.crc32(data, self.crc)
        self.size += len(data)

    def pad(self) -> None:
        self.write(bytes(_padded(self.size) - self.size))


@contextmanager
def _appearing(path: Path, needed: int) -> Iterator[BinaryIO]:
    """Open a temporary file that gets its name at the end, or is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < needed:
            raise errors.FileAccessError(
                f"{path.parent}: the reference's logits need {needed / 1e9:.2f} GB, the disk has {free / 1e9:.2f} GB "
                "free; use less --tokens, free some space, or set TWOFOLD_CACHE to another folder"
            )
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        if isinstance(error, errors.TwofoldError):
            raise
        raise errors.FileAccessError(f"{path}: {error.strerror or error}") from error
    finally:
        temporary.unlink(missing_ok=True)
