"""What calibration knows of a model's inputs, and its file: llama.cpp's importance matrix in GGUF, and more.

`NAME.in_sum2` ``(experts, width)`` and `NAME.counts` ``(experts, 1)`` are llama.cpp's (tools/imatrix). It ignores what
twofold adds: `NAME.in_moments` ``(blocks, block, block)`` with the key `twofold.moments.of`, `NAME.sensitivity`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from twofold import errors
from twofold._native import Floats
from twofold.blocks import ggml_type
from twofold.collector import Collector, Sums
from twofold.feedback import Factor
from twofold.metadata import Gguf
from twofold.output import writing
from twofold.source import Source

_SQUARES, _COUNTS, _MOMENTS, _SENSITIVITY = ".in_sum2", ".counts", ".in_moments", ".sensitivity"
_SUFFIXES = (_SQUARES, _COUNTS, _MOMENTS, _SENSITIVITY)
_NEEDED = (
    "an importance matrix in GGUF is needed (twofold calibrate, or llama-imatrix with a name that ends in .gguf; "
    "llama-imatrix --in-file OLD.dat -o NEW.gguf converts old .dat files)"
)
_FLOOR = 1e-6  # of the mean: where no text reached a whole block, ggml's quantizers would make it zero
_TIED = {"output.weight": "token_embd.weight"}  # the head's inputs, where it is the embedding


@dataclass
class Calibration:
    """Sums of squares of each matrix's inputs and, of some, their second moments.

    Attributes
    ----------
    sums, moments, moments_of
        as :class:`twofold.collector.Collector` has them.
    sensitivity
        KL divergence (nats) that errors of a matrix's products cause, over their relative power (sensitivity.py).
    datasets, chunks, chunk_tokens
        the texts, and how many pieces of how many tokens of them were used.
    origin
        the file, for messages.
    """

    sums: dict[str, Sums]
    moments: dict[str, Floats] = field(default_factory=dict)
    moments_of: dict[str, str] = field(default_factory=dict)
    sensitivity: dict[str, float] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunks: int = 0
    chunk_tokens: int = 0
    origin: str = "the calibration"

    def knows(self, name: str) -> bool:
        """Whether any text went through the matrix."""
        sums = self._sums(name)
        return sums is not None and bool(sums.counts.any())

    def check(self, name: str, experts: int, width: int, model: str) -> None:
        """Refuse a matrix of `model` that has another shape than the one that was calibrated.

        Raises
        ------
        MismatchError
            naming both.
        """
        sums = self._sums(name)
        if sums is not None and sums.squares.shape != (experts, width):
            others, other = sums.squares.shape
            raise errors.MismatchError(
                f"{self.origin} was made with another model than {model}: its {name} has width {other} and {others} "
                f"experts, the model's has width {width} and {experts} experts"
            )

    def importance(self, name: str, expert: int) -> Floats | None:
        """Return the mean squares of the inputs, float32 ``(width,)``; None for a matrix that it does not know.

        An expert that was never chosen gets the mean of the others.
        """
        sums = self._sums(name)
        if sums is None or not self.knows(name):
            return None
        if sums.counts[expert] > 0:
            return _floored(sums.squares[expert] / sums.counts[expert])
        return self.mean_importance(name)

    def mean_importance(self, name: str) -> Floats | None:
        """Return the mean squares over all experts, float32 ``(width,)``; None for a matrix that it does not know."""
        sums = self._sums(name)
        if sums is None or not self.knows(name):
            return None
        return _floored(sums.squares.sum(axis=0) / sums.counts.sum())

    def moments_key(self, name: str) -> str:
        """Name of the matrix whose second moments serve this one; empty: there are none."""
        first = self.moments_of.get(name) or self.moments_of.get(_TIED.get(name, ""), "")
        return first if first in self.moments else ""

    def block(self, name: str) -> int:
        """Width of the blocks of a matrix's second moments; 0: there are none."""
        key = self.moments_key(name)
        return self.moments[key].shape[1] if key else 0

    def factor(self, name: str, damping: float, *, largest_first: bool = False) -> Factor:
        """Return the factor for error feedback of a matrix that has moments (:class:`twofold.feedback.Factor`).

        Raises
        ------
        FormatError
            if they are no second moments: not finite, or not positive.
        """
        key = self.moments_key(name)
        try:
            return Factor(self.moments[key], damping, largest_first=largest_first)
        except ValueError as error:
            raise errors.FormatError(f"{self.origin}: the second moments of {key} are damaged: {error}") from error

    def sensitivity_of(self, name: str) -> float:
        """Sensitivity of a matrix; 1 for all where none was measured.

        Raises
        ------
        MismatchError
            if others were measured, but not this one.
        """
        found = self.sensitivity.get(name, self.sensitivity.get(_TIED.get(name, "")))
        if found is None and self.sensitivity:
            raise errors.MismatchError(f"{self.origin} has no sensitivity of {name}: it was made with another model")
        return 1.0 if found is None else found

    def _sums(self, name: str) -> Sums | None:
        return self.sums.get(name) or self.sums.get(_TIED.get(name, ""))


def of_collector(collector: Collector, datasets: Sequence[str], chunks: int, chunk_tokens: int) -> Calibration:
    """Take over what a collector has added up."""
    sums = collector.sums
    # Inputs go by the name of their graph node; where an architecture names two nodes alike, their sums differ.
    shared = {n: f for n, f in collector.moments_of.items() if np.array_equal(sums[n].squares, sums[f].squares)}
    return Calibration(
        sums,
        collector.moments,
        shared,
        datasets=list(datasets),
        chunks=chunks,
        chunk_tokens=chunk_tokens,
    )


def save(calibration: Calibration, path: Path) -> None:
    """Write the file; it appears whole or not at all.

    Raises
    ------
    FileAccessError
        if it cannot be written.
    """
    header, kind = Gguf(), ggml_type("f32")
    header.set("general.type", "imatrix")
    header.set_list("imatrix.datasets", calibration.datasets)
    header.set("imatrix.chunk_count", calibration.chunks)
    header.set("imatrix.chunk_size", calibration.chunk_tokens)
    if calibration.moments:
        header.set("twofold.moments.of", "\n".join(f"{n} {first}" for n, first in calibration.moments_of.items()))
    arrays: dict[str, Floats] = {}
    for name, sums in calibration.sums.items():
        arrays[name + _SQUARES] = sums.squares
        arrays[name + _COUNTS] = sums.counts.reshape(-1, 1)
    arrays |= {name + _MOMENTS: moments for name, moments in calibration.moments.items()}
    arrays |= {name + _SENSITIVITY: np.array([s], np.float32) for name, s in calibration.sensitivity.items()}
    for name, array in arrays.items():
        header.add(name, kind, array.shape)
    with writing({path: header}) as (file,):
        for name, array in arrays.items():
            file.write(name, np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def load(path: Path) -> Calibration:
    """Read a file of ours, or an importance matrix of llama.cpp in GGUF.

    Raises
    ------
    FileAccessError, FormatError
        if it is missing, no importance matrix, or damaged.
    """
    try:
        source = Source(path)
    except errors.FormatError as error:
        raise errors.FormatError(f"{error}; {_NEEDED}") from error
    arrays = {
        name: tensor.data.view(np.float32).reshape(tensor.shape)
        for name, tensor in source.tensors.items()
        if name.endswith(_SUFFIXES) and tensor.kind.name == "f32"
    }
    result = Calibration({}, origin=str(path))
    for name, squares in _ending(arrays, _SQUARES):
        counts = arrays.get(name + _COUNTS, np.empty(0, np.float32)).reshape(-1)
        if not len(counts) or squares.size % len(counts):
            raise errors.FormatError(f"{path}: damaged: {name} has {squares.size} sums, and {len(counts)} counts")
        result.sums[name] = Sums(squares.reshape(len(counts), -1), counts)
        if not (np.isfinite(squares).all() and np.isfinite(counts).all() and squares.min() >= 0 and counts.min() >= 0):
            raise errors.FormatError(f"{path}: damaged: the sums or counts of {name} are not finite or negative")
    if not result.sums:
        raise errors.FormatError(f"{path}: no importance matrix: it has no float32 tensors NAME{_SQUARES}; {_NEEDED}")
    _load_ours(result, source, arrays)
    return result


def _load_ours(result: Calibration, source: Source, arrays: dict[str, Floats]) -> None:
    """Take what only twofold writes."""
    for name, moments in _ending(arrays, _MOMENTS):
        block = moments.shape[-1]
        if name not in result.sums or moments.size != block * result.sums[name].squares.size:
            raise errors.FormatError(f"{result.origin}: damaged: {name}{_MOMENTS} has shape {moments.shape}")
        result.moments[name] = moments.reshape(-1, block, block)
    for name, values in _ending(arrays, _SENSITIVITY):
        result.sensitivity[name] = float(values.reshape(-1)[0])
    for line in source.gguf.string("twofold.moments.of", "").splitlines():
        name, _, first = line.rpartition(" ")
        result.moments_of[name] = first
    result.chunks = source.gguf.integer("imatrix.chunk_count", 0)
    result.chunk_tokens = source.gguf.integer("imatrix.chunk_size", 0)


def _ending(arrays: dict[str, Floats], suffix: str) -> Iterator[tuple[str, Floats]]:
    return ((name.removesuffix(suffix), array) for name, array in arrays.items() if name.endswith(suffix))


def _floored(squares: Floats) -> Floats:
    """Squares with none below a millionth of their mean; ones if all are zero."""
    mean = float(squares.mean())
    return np.asarray(np.maximum(squares, _FLOOR * mean) if mean > 0 else np.ones_like(squares), np.float32)
