"""What types and residuals lose, on Gaussian weights: the plan's measure of precision."""

from __future__ import annotations

from functools import cache

import numpy as np

from twofold._native import Floats
from twofold.blocks import decode_residual, dequantize, encode_residual, ggml_type, quantize

LADDER = ("iq2_xxs", "iq2_xs", "q2_k", "iq3_xxs", "q3_k", "q4_k", "q5_k", "q6_k", "q8_0")
_ROWS, _WIDTH, _GROUP = 16, 1024, 128


@cache
def type_loss(kind: str) -> float:
    """Power of the error of a ggml type over that of the weights; 0 for types that are not quantized."""
    of = ggml_type(kind)
    if of.block == 1:
        return 0.0
    weights = _weights()
    return _power(weights - _rounded(kind)) / _power(weights)


@cache
def residual_loss(kind: str, bits: int) -> float:
    """Power of the error of base + residual over that of the weights."""
    weights = _weights()
    residual = np.ascontiguousarray(weights - _rounded(kind))
    return _power(residual - decode_residual(encode_residual(residual, _GROUP, bits))) / _power(weights)


@cache
def _ladder() -> tuple[list[float], list[float]]:
    """Bits and logarithm of the loss, which falls."""
    steps = sorted((ggml_type(kind).bpw, type_loss(kind)) for kind in LADDER)
    return [bits for bits, _ in steps], [float(np.log(loss)) for _, loss in steps]


def loss_of_bits(bits: float) -> float:
    """Loss of a base of so many bits a weight, between those of the types."""
    known, logs = _ladder()
    return float(np.exp(np.interp(bits, known, logs)))


def bits_of_loss(loss: float) -> float:
    """Bits a weight of a uniform base that loses as much: what curves of acceptance are read at."""
    known, logs = _ladder()
    return float(np.interp(np.log(max(loss, 1e-30)), logs[::-1], known[::-1]))


@cache
def _weights() -> Floats:
    return np.random.default_rng(7).standard_normal((_ROWS, _WIDTH), np.float32)


@cache
def _rounded(kind: str) -> Floats:
    of, weights = ggml_type(kind), _weights()
    return dequantize(quantize(weights, of, np.ones(_WIDTH, np.float32)), of, weights.shape)


def _power(values: Floats) -> float:
    return float((values.astype(np.float64) ** 2).mean())
