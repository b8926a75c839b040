"""What a context can forget, and how: cells of a cache are dropped, a recurrent state has to be brought back.

A neighbour of decoder.py: it speaks of llama.cpp's memory, and nothing else does.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

import llama_cpp

from twofold import errors

SNAPSHOTS = 8  # states that a check leaves behind, where llama.cpp can: each takes the memory of a state
# Architectures for which llama.cpp can (llm_arch_supports_rs_rollback); for others it takes 0 whatever it is asked for.
_LEAVE_STATES = frozenset(
    """kimi-k3 qwen35 qwen35moe qwen4exp deepseek4 glm5-next nemotron_h nemotron_h_moe lfm2 lfm2moe
    bailingmoe3""".split()  # noqa: SIM905
)
# Decode these tokens again from a position on, in a mode of the engine.
Replay = Callable[[Sequence[int], int, int], None]
_PARTIAL_ONLY, _ON_DEVICE = 1, 2  # LLAMA_STATE_SEQ_FLAGS_* of llama.h


class Rollback(Protocol):
    """Forgets the end of the one sequence that is decoded.

    Attributes
    ----------
    seats
        whether a token may be decoded beside another one and forgotten at once, for nothing.
    """

    seats: bool

    @property
    def about(self) -> str:
        """How, in a few words; nothing where that goes without saying."""

    def note(self, tokens: Sequence[int], position: int, mode: int) -> None:
        """Take note of a decode."""

    def mark(self) -> None:
        """Prepare for cutting back to what is decoded by now, or to any later place."""

    def cut(self, position: int) -> bool:
        """Forget everything from `position` on; False if that cannot be done, and nothing is forgotten then."""

    def seat(self, batch: Any) -> None:
        """Place the second token of a llama_batch, which is to be forgotten at once."""

    def unseat(self, position: int) -> None:
        """Forget it: the memory ends before `position`."""

    def forget(self) -> None:
        """Drop what is marked: the memory was changed in other ways."""

    def spoil(self) -> None:
        """Take note that a decode failed half-way: nobody knows which tokens the memory holds."""


def prepare(params: Any, model: Any, snapshots: int, company: bool) -> None:
    """Set what the memory of a model needs in llama_context_params.

    Parameters
    ----------
    params
        those of the context to be made.
    model
        llama.cpp's.
    snapshots
        tokens at the end of a decode that can be forgotten at no cost, if llama.cpp can do that.
    company
        whether single tokens are to be decoded beside others.
    """
    if not _has_state(model):
        return
    # The states are those of tokens computed at once, and llama.cpp wants one token more.
    params.n_rs_seq = max(0, min(snapshots, params.n_ubatch - 2)) if _architecture(model) in _LEAVE_STATES else 0
    if company and not params.n_rs_seq:
        params.n_seq_max, params.kv_unified = max(params.n_seq_max, 2), True


def _has_state(model: Any) -> bool:
    return bool(llama_cpp.llama_model_is_recurrent(model) or llama_cpp.llama_model_is_hybrid(model))


def choose(context: Any, model: Any, replay: Replay) -> Rollback:
    """Return what suits a model: `Cells`, or `States` if part of its memory is a state."""
    return States(context, model, replay) if _has_state(model) else Cells(context)


class Cells:
    """A cache of keys and values: cells of later positions are dropped."""

    about = ""
    seats = True

    def __init__(self, context: Any) -> None:
        self._memory = llama_cpp.llama_get_memory(context)

    def note(self, tokens: Sequence[int], position: int, mode: int) -> None:
        """Nothing to remember."""

    def mark(self) -> None:
        """Nothing to prepare."""

    def cut(self, position: int) -> bool:
        """Drop the cells from `position` on."""
        return bool(llama_cpp.llama_memory_seq_rm(self._memory, 0, position, -1))

    def seat(self, batch: Any) -> None:
        """Leave it where it is: after the first one."""

    def unseat(self, position: int) -> None:
        """Drop its cell."""
        self.cut(position)

    def forget(self) -> None:
        """Nothing is marked."""

    def spoil(self) -> None:
        """Cells of a failed decode are dropped like others."""


class States:
    """A state that each token overwrites, alone or beside a cache.

    A copy of it is taken where drafting begins. To cut back, the copy is put back, and tokens after it that are to stay
    are decoded again, in the mode they were decoded in. The end of the last decode can be forgotten without that where
    llama.cpp keeps a state for each of its last tokens (snapshots).

    Copies are not sequences of their own (`llama_memory_seq_cp`): those would not take a rollback along that is still
    to be carried out, since llama.cpp does that in the next decode.

    Attributes
    ----------
    copied, restored, replayed, dropped
        copies taken and put back; tokens decoded again; cuts that a snapshot made.
    """

    def __init__(self, context: Any, model: Any, replay: Replay) -> None:
        self._context, self._memory = context, llama_cpp.llama_get_memory(context)
        self._replay = replay
        self._snapshots = int(llama_cpp.llama_n_rs_seq(context))
        # DeepSeek 4's state includes cells, of which llama.cpp cannot copy several ranges on a device.
        self._flags = _PARTIAL_ONLY if _architecture(model) == "deepseek4" else _PARTIAL_ONLY | _ON_DEVICE
        self.seats = self._snapshots > 0 or int(llama_cpp.llama_n_seq_max(context)) > 1
        self._copy: Any = None
        self._copied_at = 0
        self._since: list[tuple[int, int]] = []  # tokens after the copy, and their modes
        self._last = 0  # tokens of the last decode, while what it left behind may still be used
        self._spoiled = False
        self.copied = self.restored = self.replayed = self.dropped = 0

    @property
    def about(self) -> str:
        """How, in a few words."""
        again = "what was accepted is decoded again"
        if self._snapshots:
            again = f"a check leaves {self._snapshots} states behind; after longer drafts {again}"
        return f"the recurrent state is copied before each draft; {again}"

    @property
    def end(self) -> int:
        """Tokens in the memory."""
        return int(llama_cpp.llama_memory_seq_pos_max(self._memory, 0)) + 1

    def note(self, tokens: Sequence[int], position: int, mode: int) -> None:
        """Remember tokens decoded since the copy was taken."""
        self._last = len(tokens)
        if self._copy is not None:
            self._since += [(int(token), mode) for token in tokens]

    def mark(self) -> None:
        """Copy the state.

        Raises
        ------
        DecodeError
            if llama.cpp cannot.
        """
        if self._copy is not None and not self._since:
            return
        size = llama_cpp.llama_state_seq_get_size_ext(self._context, 0, self._flags)
        self._copy = (ctypes.c_uint8 * size)()
        if llama_cpp.llama_state_seq_get_data_ext(self._context, self._copy, size, 0, self._flags) != size:
            self.forget()
            raise errors.DecodeError("llama.cpp could not copy the recurrent state")
        self._copied_at, self._since = self.end, []
        self.copied += 1

    def cut(self, position: int) -> bool:
        """Bring back the state that the memory had at `position`."""
        if position < self._copied_at:
            self.forget()
        if self._spoiled and position:
            return False
        if position == 0:
            return self._empty()
        excess = self.end - position
        if excess <= 0:
            return excess == 0
        if excess <= min(self._snapshots, self._last - 1) and self._drop(position):
            return True
        return self._copy is not None and self._restore(position)

    def seat(self, batch: Any) -> None:
        """Put it into a sequence of its own, unless a snapshot can undo it."""
        if not self._snapshots:
            batch.pos[1], batch.seq_id[1][0] = 0, 1

    def unseat(self, position: int) -> None:
        """Go back by a snapshot, or drop that sequence.

        Raises
        ------
        DecodeError
            if llama.cpp cannot.
        """
        self._last = 0
        sequence, first = (0, position) if self._snapshots else (1, -1)
        if not llama_cpp.llama_memory_seq_rm(self._memory, sequence, first, -1):
            raise errors.DecodeError(f"the state after {position} tokens is lost")

    def _empty(self) -> bool:
        self.forget()
        self._spoiled = False
        llama_cpp.llama_memory_clear(self._memory, False)
        return True

    def _drop(self, position: int) -> bool:
        """Go back to a state that the last decode left behind; llama.cpp does so once a decode."""
        self._last = 0
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, position, -1):
            return False
        if self._copy is not None:
            del self._since[position - self._copied_at :]
        self.dropped += 1
        return True

    def _restore(self, position: int) -> bool:
        """Put the copy back, and decode what follows it up to `position` again."""
        size = len(self._copy)
        if llama_cpp.llama_state_seq_set_data_ext(self._context, self._copy, size, 0, self._flags) != size:
            raise errors.DecodeError("llama.cpp could not put the recurrent state back")
        if not llama_cpp.llama_memory_seq_rm(self._memory, 0, self._copied_at, -1):  # the cells beside it
            raise errors.DecodeError(f"the cache cannot be cut back to {self._copied_at} tokens")
        self.restored += 1
        self._last = 0
        stay, self._since = self._since[: position - self._copied_at], []
        for mode, tokens in _runs(stay):
            self._replay(tokens, self._copied_at + len(self._since), mode)
            self.replayed += len(tokens)
        return True

    def forget(self) -> None:
        """Throw the copy away."""
        self._copy, self._copied_at, self._since, self._last = None, 0, [], 0

    def spoil(self) -> None:
        """Trust nothing until the memory has been emptied."""
        self.forget()
        self._spoiled = True


def _runs(tokens: list[tuple[int, int]]) -> Iterator[tuple[int, list[int]]]:
    """Yield modes and the tokens decoded in them, in order."""
    for mode, run in groupby(tokens, key=lambda pair: pair[1]):
        yield mode, [token for token, _ in run]


def _architecture(model: Any) -> str:
    name = ctypes.create_string_buffer(64)
    llama_cpp.llama_model_meta_val_str(model, b"general.architecture", name, len(name))
    return name.value.decode()
