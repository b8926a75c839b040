"""What calibration knows of a model's inputs, and its file: llama.cpp's importance matrix in GGUF, and more.

`NAME.in_sum2` ``(experts, width)`` and `NAME.counts` ``(experts, 1)`` are llama.cpp's (tools/imatrix). It ignores what
twofold adds: `NAME.in_moments` ``(blocks, block, block)`` with the key `twofold.moments.of`, `NAME.sensitivity`.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """

    sums: dict[str, Sums]
    moments: dict[str, Floats] = field(default_factory=dict)
    moments_of: dict[str, str] = field(default_factory=dict)
    sensitivity: dict[str, float] = field(default_factory=dict)
    datasets: list[str] = field(default_factory=list)
    chunks: int = 0
    chunk_tokens: int = 0

    def knows(self, name: str) -> bool:
        """Whether any text went through the matrix."""
        sums = self._sums(name)
        return sums is not None and bool(sums.counts.any())

    def importance(self, name: str, expert: int, width: int) -> Floats | None:
        """Return the mean squares of the inputs, float32 ``(width,)``; None for a matrix that it does not know.

        An expert that was never chosen gets the mean of the others.

        Raises
        ------
        MismatchError
            if the calibration was made with another model.
        """
        sums = self._sums(name)
        if sums is None or not self.knows(name):
            return None
        if sums.squares.shape[1] != width or expert >= len(sums.counts):
            raise errors.MismatchError(
                f"the calibration was made with another model: its {name} has width {sums.squares.shape[1]} and "
                f"{len(sums.counts)} experts, this one has width {width} and more than {expert} experts"
            )
        if sums.counts[expert] > 0:
            return np.asarray(sums.squares[expert] / sums.counts[expert], np.float32)
        return np.asarray(sums.squares.sum(axis=0) / sums.counts.sum(), np.float32)

    def moments_key(self, name: str) -> str:
        """Name of the matrix whose second moments serve this one; empty: there are none."""
        first = self.moments_of.get(name) or self.moments_of.get(_TIED.get(name, ""), "")
        return first if first in self.moments else ""

    def factor(self, name: str) -> Factor:
        """Return the factor for error feedback; KeyError without moments."""
        return Factor(self.moments[self.moments_key(name)])

    def sensitivity_of(self, name: str) -> float:
        """Sensitivity of a matrix; 1 for all where none was measured.

        Raises
        ------
        MismatchError
            if others were measured, but not this one.
        """
        found = self.sensitivity.get(name, self.sensitivity.get(_TIED.get(name, "")))
        if found is None and self.sensitivity:
            raise errors.MismatchError(f"the calibration has no sensitivity of {name}: it was made with another model")
        return 1.0 if found is None else found

    def _sums(self, name: str) -> Sums | None:
        return self.sums.get(name) or self.sums.get(_TIED.get(name, ""))


def of_collector(collector: Collector, datasets: Sequence[str], chunks: int, chunk_tokens: int) -> Calibration:
    """Take over what a collector has added up."""
    return Calibration(
        collector.sums,
        collector.moments,
        collector.moments_of,
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
        if it is missing, or no importance matrix.
    """
    try:
        source = Source(path)
    except errors.FormatError as error:
        raise errors.FormatError(
            f"{error}; an importance matrix in GGUF is needed (twofold calibrate, or llama-imatrix with a name that "
            "ends in .gguf; old .dat files can be converted by llama-imatrix --in-file OLD.dat -o NEW.gguf)"
        ) from error
    arrays = {tensor.name: _floats(tensor.data, tensor.shape) for tensor in source.tensors.values()}
    names = [name.removesuffix(_SQUARES) for name in arrays if name.endswith(_SQUARES)]
    if not names or any(name + _COUNTS not in arrays for name in names):
        raise errors.FormatError(f"{path}: no importance matrix: it lacks tensors {_SQUARES} and {_COUNTS}")
    result = Calibration({})
    for name in names:
        squares = arrays[name + _SQUARES]
        squares = squares.reshape(-1, squares.shape[-1])
        result.sums[name] = Sums(squares, arrays[name + _COUNTS].reshape(-1))
    for name, array in arrays.items():
        if name.endswith(_MOMENTS):
            result.moments[name.removesuffix(_MOMENTS)] = array.reshape(-1, array.shape[-1], array.shape[-1])
        elif name.endswith(_SENSITIVITY):
            result.sensitivity[name.removesuffix(_SENSITIVITY)] = float(array.reshape(-1)[0])
    lines = source.gguf.string("twofold.moments.of", "").splitlines()
    result.moments_of = dict(line.rsplit(" ", 1) for line in lines)
    result.chunks = source.gguf.integer("imatrix.chunk_count", 0)
    result.chunk_tokens = source.gguf.integer("imatrix.chunk_size", 0)
    return result


def _floats(data: np.ndarray, shape: tuple[int, ...]) -> Floats:
    return data.view(np.float32).reshape(shape)
