"""Sums over the inputs of a model's matrix products, taken while llama.cpp runs it (csrc/collect.c)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from twofold._native import Floats, check, ffi, lib, text

# Inputs wait for the end of the decode, so that numpy's threads do not run beside ggml's, which spin.
MAX_WAITING = 1 << 30
WHOLE, WIDEST = 1792, 8192


def moment_block(width: int) -> int:
    """Width of the blocks along the diagonal in which second moments are kept; 0: none are kept.

    Up to 1792 inputs are one block; more are cut where 256 divides them, so that no block of a ggml type is cut.
    """
    if width <= WHOLE:
        return width
    fitting = [block for block in range(256, WHOLE + 1, 256) if width % block == 0]
    return max(fitting, default=width if width <= WIDEST else 0)


@dataclass
class Sums:
    """What is known of a matrix's inputs: sums of squares, float32 ``(experts, width)``, over so many inputs each."""

    squares: Floats
    counts: Floats  # (experts,)

    def add(self, expert: int, x: Floats) -> None:
        """Add inputs ``(n, width)``."""
        self.squares[expert] += np.einsum("nw,nw->w", x, x)
        self.counts[expert] += len(x)


class Collector:
    """Stands where an engine would (:class:`twofold.engine.Engine`) and adds up what passes.

    Attributes
    ----------
    sums : dict
        :class:`Sums` by the name of the matrix.
    moments : dict
        If asked for: sums of products of inputs, float32 ``(blocks, block, block)``, by the name of the first matrix
        that has these inputs. Matrices of experts have none.
    moments_of : dict
        Name of the matrix whose moments serve, by the name of the matrix.
    """

    claiming = False

    def __init__(self, *, with_moments: bool, wanted: Callable[[str], bool]) -> None:
        """Begin with nothing; `wanted` says of a matrix's name whether its inputs matter."""
        self.sums: dict[str, Sums] = {}
        self.moments: dict[str, Floats] = {}
        self.moments_of: dict[str, str] = {}
        self._with_moments, self._wanted = with_moments, wanted
        self._first: dict[tuple[str, int], str] = {}  # matrix by name and width of its input
        self._waiting: list[tuple[Floats, Floats]] = []
        self._error: BaseException | None = None
        self._sink = ffi.callback("bool(void *, const tf_collected *)", self._seen, onerror=self._failed)
        out = ffi.new("tf_collector **")
        check(lib.tf_collector_new(self._sink, ffi.NULL, out))
        self._c: Any = ffi.gc(out[0], lib.tf_collector_free)

    def _failed(self, kind: Any, error: BaseException, trace: Any) -> bool:
        self._error = error
        return False

    def _seen(self, _: Any, seen: Any) -> bool:
        name = text(seen.weight)
        if not self._wanted(name):
            return True
        x = np.frombuffer(ffi.buffer(seen.x, seen.n * seen.width * 4), np.float32).reshape(seen.n, seen.width)
        sums = self.sums.get(name)
        if sums is None:
            sums = Sums(np.zeros((seen.experts, seen.width), np.float32), np.zeros(seen.experts, np.float32))
            self.sums[name] = sums
        sums.add(seen.expert, x)
        if self._with_moments and seen.experts == 1:
            self._add_moments(name, text(seen.input), x)
        return True

    def _add_moments(self, name: str, source: str, x: Floats) -> None:
        width = x.shape[1]
        first = self._first.setdefault((source, width), name)
        block = moment_block(width)
        if block:
            self.moments_of[name] = first
        if first != name or not block:
            return
        if name not in self.moments:
            self.moments[name] = np.zeros((width // block, block, block), np.float32)
        self._waiting.append((self.moments[name], x.copy()))
        if sum(inputs.nbytes for _, inputs in self._waiting) > MAX_WAITING:
            self._multiply()

    def _multiply(self) -> None:
        for total, x in self._waiting:
            for block, part in zip(total, np.split(x, len(total), axis=1), strict=True):
                np.add(block, part.T @ part, out=block)
        self._waiting.clear()

    @contextmanager
    def disturbing(self, name: str, amount: float) -> Iterator[None]:
        """Instead of adding up: noise of `amount`, relative, on the products of this matrix (none if it is empty)."""
        lib.tf_collector_disturb(self._c, name.encode() or b"-", amount)
        try:
            yield
        finally:
            lib.tf_collector_disturb(self._c, b"", 0.0)

    # ---- what a decoder needs of an engine -----------------------------------------------------------

    def begin(self, mode: int) -> None:
        """Nothing to prepare."""

    def end(self) -> None:
        """Report what went wrong in a llama_decode.

        Raises
        ------
        OutOfMemoryError, or what adding up raised.
        """
        status = lib.tf_collector_end(self._c)  # also makes ready for the next decode
        if self._error is not None:
            error, self._error = self._error, None
            self._waiting.clear()
            raise error
        check(status)
        self._multiply()

    @property
    def callback(self) -> int:
        """Address for llama_context_params.cb_eval."""
        return int(ffi.cast("intptr_t", lib.tf_collector_callback()))

    @property
    def user_data(self) -> int:
        """Address for llama_context_params.cb_eval_user_data."""
        return int(ffi.cast("intptr_t", self._c))
