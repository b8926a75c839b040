"""How weights become base and residual: plainly, by importance, or with error feedback."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from twofold import errors
from twofold._native import Bytes, Floats
from twofold.blocks import GgmlType, Planes, dequantize, encode_residual, quantize
from twofold.calibration import Calibration
from twofold.feedback import BASE_DAMPING, RESIDUAL_DAMPING, Factor, round_base, round_residual
from twofold.layout import Split

MANNERS = ("feedback", "importance", "plain")


class _Entry:
    """A factor to be computed by whoever needs it first, while others wait for this one only."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.factor: Factor | None = None


class Rounding:
    """Rounds rows of matrices, by what a calibration says of their inputs; safe to use from several threads."""

    def __init__(
        self, calibration: Calibration | None, group: int, bits: int, *, feedback: bool = True, workers: int = 1
    ) -> None:
        """Without a calibration all inputs count alike; without second moments there is no feedback.

        `workers` threads may use it at a time: so many matrices may be in work, whose factors are worth keeping.
        """
        self._calibration, self._feedback = calibration, feedback
        self.group, self.bits = group, bits
        self._factors: OrderedDict[tuple[str, bool], _Entry] = OrderedDict()
        self._kept = 2 * (
            workers + 1
        )  # base's and residual's: a matrix in work for each, one between two of its chunks
        self._lock = threading.Lock()

    def manner(self, name: str, experts: int) -> str:
        """One of `MANNERS`: how this matrix is rounded."""
        if self._calibration is None or not self._calibration.knows(name):
            return "plain"
        return "feedback" if self._has_feedback(name, experts) else "importance"

    def check(self, split: Split, model: str) -> None:
        """Refuse what a matrix of `model` cannot be rounded with, before any work.

        Raises
        ------
        MismatchError
            if the calibration is of another model.
        ArgumentError
            if a scale of the residual, or a block of the base, would lie in two blocks of second moments.
        """
        if self._calibration is None:
            return
        name, (experts, _, width) = split.base.name, split.matrix
        self._calibration.check(name, experts, width, model)
        block = self._calibration.block(name)
        if not self._has_feedback(name, experts) or block == width:
            return
        if block % self.group:
            raise errors.ArgumentError(
                f"group {self.group} does not divide the blocks of {block} inputs in which {self._calibration.origin} "
                f"has the second moments of {name}; take a group that does (32, 64 and 128 mostly do), or no feedback"
            )
        if block % split.base.kind.block:
            raise errors.ArgumentError(
                f"base type {split.base.kind.name}: its blocks of {split.base.kind.block} do not divide the blocks of "
                f"{block} inputs in which {self._calibration.origin} has the second moments of {name}; take another "
                "type, or no feedback"
            )

    def base(self, weights: Floats, kind: GgmlType, name: str, expert: int, experts: int) -> tuple[Bytes, Floats]:
        """Quantize rows ``(n, width)`` of one expert; return the blocks of `kind` and what they stand for.

        Raises
        ------
        FormatError
            if the calibration is damaged.
        """
        importance = None if self._calibration is None else self._calibration.importance(name, expert)
        # With an importance matrix, even one that weighs all inputs alike, ggml searches better scales: it takes a
        # tenth off the error of q2_k, and the smallest types cannot be made without.
        scaled = np.ones(weights.shape[1], np.float32) if importance is None else importance
        if self._has_feedback(name, experts):
            blocks, rounded = round_base(weights, kind, scaled, self._factor(name, of_base=True))
            return np.ravel(blocks), rounded
        flat = quantize(weights, kind, scaled)
        return flat, dequantize(flat, kind, weights.shape)

    def residual(self, residual: Floats, name: str, experts: int) -> Planes:
        """Encode what the base lost of these rows.

        Raises
        ------
        FormatError
            if the calibration is damaged.
        """
        if self._has_feedback(name, experts):
            return round_residual(residual, self.group, self.bits, self._factor(name, of_base=False))
        return encode_residual(residual, self.group, self.bits)

    def _has_feedback(self, name: str, experts: int) -> bool:
        calibration = self._calibration
        if not self._feedback or calibration is None or experts > 1:
            return False
        return calibration.knows(name) and calibration.moments_key(name) != ""

    def _factor(self, name: str, *, of_base: bool) -> Factor:
        assert self._calibration is not None
        key = self._calibration.moments_key(name), of_base
        with self._lock:
            entry = self._factors.setdefault(key, _Entry())
            self._factors.move_to_end(key)
            while len(self._factors) > self._kept:
                self._factors.popitem(last=False)
        with entry.lock:
            if entry.factor is None:
                damping = BASE_DAMPING if of_base else RESIDUAL_DAMPING
                # Blocks of a base have their own order; a residual's columns can be rounded in any.
                entry.factor = self._calibration.factor(name, damping, largest_first=not of_base)
            return entry.factor
