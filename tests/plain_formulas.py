"""Divergences by the book, to compare with."""

from __future__ import annotations

import numpy as np


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact_ = logits.astype(np.longdouble)
    shifted = exact_ - exact_.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def formula(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=1).astype(np.float64)


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)
