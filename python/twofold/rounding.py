"""How weights become base and residual: plainly, by importance, or with error feedback."""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np

from twofold._native import Bytes, Floats
from twofold.blocks import GgmlType, Planes, dequantize, encode_residual, quantize
from twofold.calibration import Calibration
from twofold.feedback import Factor, round_base, round_residual

_KEPT_FACTORS = 4  # of the matrices in work; the widest have hundreds of megabytes


class Rounding:
    """Rounds rows of matrices, by what a calibration says of their inputs; safe to use from several threads."""

    def __init__(self, calibration: Calibration | None, group: int, bits: int, *, feedback: bool = True) -> None:
        """Without a calibration all inputs count alike; without second moments there is no feedback."""
        self._calibration, self._feedback = calibration, feedback
        self.group, self.bits = group, bits
        self._factors: OrderedDict[str, Factor] = OrderedDict()
        self._lock = threading.Lock()

    def manner(self, name: str, experts: int) -> str:
        """``feedback``, ``importance`` or ``plain``: how this matrix is rounded."""
        if self._calibration is None or not self._calibration.knows(name):
            return "plain"
        return "feedback" if self._has_feedback(name, experts) else "importance"

    def base(self, weights: Floats, kind: GgmlType, name: str, expert: int, experts: int) -> tuple[Bytes, Floats]:
        """Quantize rows ``(n, width)`` of one expert; return the blocks of `kind` and what they stand for.

        Raises
        ------
        MismatchError
            if the calibration is of another model.
        """
        importance = self._importance(name, expert, weights.shape[1])
        # With an importance matrix, even one that weighs all inputs alike, ggml searches better scales: it takes a
        # tenth off the error of q2_k, and the smallest types cannot be made without.
        scaled = np.ones(weights.shape[1], np.float32) if importance is None else importance
        if importance is not None and self._has_feedback(name, experts):
            blocks, rounded = round_base(weights, kind, scaled, self._factor(name))
            return np.ravel(blocks), rounded
        flat = quantize(weights, kind, scaled)
        return flat, dequantize(flat, kind, weights.shape)

    def residual(self, residual: Floats, name: str, experts: int) -> Planes:
        """Encode what the base lost of these rows."""
        if self._has_feedback(name, experts):
            return round_residual(residual, self.group, self.bits, self._factor(name))
        return encode_residual(residual, self.group, self.bits)

    def _importance(self, name: str, expert: int, width: int) -> Floats | None:
        return None if self._calibration is None else self._calibration.importance(name, expert, width)

    def _has_feedback(self, name: str, experts: int) -> bool:
        known = self._calibration is not None and self._calibration.moments_key(name) != ""
        return self._feedback and known and experts == 1

    def _factor(self, name: str) -> Factor:
        assert self._calibration is not None
        key = self._calibration.moments_key(name)
        with self._lock:
            if key not in self._factors:
                self._factors[key] = self._calibration.factor(name)
                if len(self._factors) > _KEPT_FACTORS:
                    self._factors.popitem(last=False)
            self._factors.move_to_end(key)
            return self._factors[key]
