"""The C engine and the residual file that it works on."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from twofold._native import check, ffi, lib, text
from twofold.blocks import Planes, part_names, plane_bytes


@dataclass(frozen=True)
class ResidualTensor:
    """What the residual file says of one tensor; `planes[e]` belongs to expert e."""

    name: str
    shape: tuple[int, int, int]
    base_type: int
    fingerprint: int
    planes: tuple[Planes, ...]


class Residual:
    """A mapped residual file."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map and check the file.

        Raises
        ------
        FileAccessError, FormatError, FormatVersionError
            if it is not there, truncated, foreign, or of another version.
        """
        out = ffi.new("tf_residual **")
        check(lib.tf_residual_open(os.fsencode(path), out))
        self._c: Any = ffi.gc(out[0], lib.tf_residual_free)
        self.path = Path(path)
        self.bits = int(lib.tf_residual_bits(self._c))
        self.group = int(lib.tf_residual_group(self._c))

    def tensors(self) -> Iterator[ResidualTensor]:
        """Yield the tensors; their planes are views of the mapped file."""
        for index in range(lib.tf_residual_count(self._c)):
            out = ffi.new("tf_residual_tensor *")
            check(lib.tf_residual_get(self._c, index, out))
            shape = (out.experts, out.rows, out.width)
            planes = tuple(self._planes(lib.tf_residual_planes(out, e)) for e in range(out.experts))
            yield ResidualTensor(text(out.name), shape, out.base_type, out.fingerprint, planes)

    def load(self, bits: int, *, lock: bool, progress: bool) -> None:
        """Read the planes that `bits` needs into memory, and lock them there if asked to.

        Raises
        ------
        OutOfMemoryError
            if the system does not let this process lock that much.
        """
        out = ffi.new("tf_residual_tensor *")
        count = lib.tf_residual_count(self._c)
        for index in tqdm(range(count), desc="residual", unit="tensors", disable=not progress):
            check(lib.tf_residual_get(self._c, index, out))
            check(lib.tf_residual_load(out, bits, lock))

    def _planes(self, c: Any) -> Planes:
        parts = {
            name: np.frombuffer(ffi.buffer(getattr(c, name), plane_bytes(c.rows, c.width, c.group, name)), np.uint8)
            for name in part_names(self.bits)
        }
        return Planes(c.rows, c.width, c.group, self.bits, **parts, owner=self)


@dataclass(frozen=True)
class DeviceUse:
    """What the engine does with a device (twofold_api.h, tf_device_use); bytes of its memory."""

    name: str
    adds: bool
    pinned: bool
    asynchronous: bool
    stage_columns: int
    stage_bytes: int


@dataclass(frozen=True)
class Seen:
    """A weight, a cache or a node (op other than ``NONE``) of a graph, and where it lies."""

    name: str
    op: str
    device: str
    host: bool
    size: int
    residual: bool


class Engine:
    """Adds the residual to the base's products inside llama.cpp's graphs (csrc/engine.c)."""

    DRAFT: int = lib.TF_DRAFT
    VERIFY: int = lib.TF_VERIFY

    def __init__(self, residual: Residual, threads: int) -> None:
        out = ffi.new("tf_engine **")
        check(lib.tf_engine_new(residual._c, threads, out))
        self._c: Any = ffi.gc(out[0], lib.tf_engine_free)
        self.residual = residual  # keeps the mapping alive
        self.threads = threads
        self.claiming = False

    def set_bits(self, bits: int) -> None:
        """Choose the verifier: 0 (base alone), 4, 6 or 8 bits of residual; ArgumentError otherwise."""
        check(lib.tf_engine_set_bits(self._c, bits))

    def claim(self, on: bool) -> None:
        """Compute products of base weights in host memory with our own kernels instead of ggml's."""
        lib.tf_engine_claim(self._c, on)
        self.claiming = on

    @property
    def claims(self) -> bool:
        """Whether some products are really computed by our kernels: not so if the base is on a device."""
        return self.claiming and lib.tf_engine_counters(self._c).base_bytes > 0

    def stage(self, columns: int, size: int) -> None:
        """Multiply residuals of `columns` tokens or more on their device (0: never), with `size` bytes of its memory.

        Before the first decode.

        Raises
        ------
        ArgumentError
            for values outside what is allowed, which the message names.
        """
        check(lib.tf_engine_stage(self._c, columns, size))

    def device_uses(self) -> list[DeviceUse]:
        """Return what is done with the devices that nodes with a residual were met on."""
        uses = []
        for index in range(lib.tf_engine_device_count(self._c)):
            out = ffi.new("tf_device_use *")
            check(lib.tf_engine_device(self._c, index, out))
            uses.append(
                DeviceUse(
                    text(out.name), out.adds, out.pinned, getattr(out, "async"), out.stage_columns, out.stage_bytes
                )
            )
        return uses

    @contextmanager
    def survey(self) -> Iterator[list[Seen]]:
        """Collect where everything lies that decodes in the block compute or read."""
        found: list[Seen] = []

        @ffi.callback("tf_survey_sink")  # type: ignore[untyped-decorator]
        def sink(_: Any, c: Any) -> None:
            found.append(Seen(text(c.name), text(c.op), text(c.device), c.host, c.bytes, c.residual))

        lib.tf_engine_survey(self._c, sink, ffi.NULL)
        try:
            yield found
        finally:
            lib.tf_engine_survey(self._c, ffi.NULL, ffi.NULL)

    def begin(self, mode: int) -> None:
        """Say how the next llama_decode runs: `DRAFT` or `VERIFY`."""
        lib.tf_engine_begin(self._c, mode)

    def end(self) -> None:
        """Report what went wrong in that llama_decode.

        Raises
        ------
        DecodeError, UnsupportedError, OutOfMemoryError
            if a residual was not, or could not be, applied.
        """
        check(lib.tf_engine_end(self._c))

    def counters(self) -> dict[str, float]:
        """Totals since the engine was made: nodes, bytes and seconds (twofold_api.h, tf_counters)."""
        c = lib.tf_engine_counters(self._c)
        return {field: getattr(c, field) for field, _ in ffi.typeof("tf_counters").fields}

    @staticmethod
    def plugin_active() -> bool:
        """Whether libggml-twofold.so completes models in this process already."""
        return bool(lib.tf_plugin_active())

    @property
    def callback(self) -> int:
        """Address for llama_context_params.cb_eval."""
        return int(ffi.cast("intptr_t", lib.tf_engine_callback()))

    @property
    def user_data(self) -> int:
        """Address for llama_context_params.cb_eval_user_data."""
        return int(ffi.cast("intptr_t", self._c))
