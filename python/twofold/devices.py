"""What ggml sees of this machine: an extension of decoder.py's door to llama_cpp.

llama_cpp has no bindings for ggml's devices. Its handle of libllama finds the symbols of the libraries that libllama
depends on, so they come from the one copy of ggml that runs.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import llama_cpp

from twofold.decoder import quiet_log

_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # enum ggml_backend_dev_type


@dataclass(frozen=True)
class Device:
    """A device of ggml; memory in bytes, 0 where the device does not say."""

    name: str
    description: str
    kind: str
    free: int
    total: int


def devices() -> list[Device]:
    """Return the devices ggml can run on, in its order."""
    _start()
    get = _function("ggml_backend_dev_get", ctypes.c_void_p, ctypes.c_size_t)
    return [_device(get(index)) for index in range(_function("ggml_backend_dev_count", ctypes.c_size_t)())]


def llama_system_info() -> str:
    """Return llama.cpp's own line about its build and this CPU."""
    _start()
    return str(llama_cpp.llama_print_system_info().decode("utf-8", "replace")).strip()


def _start() -> None:
    quiet_log()
    llama_cpp.llama_backend_init()


def _device(handle: int) -> Device:
    name, description = (
        _function(f"ggml_backend_dev_{field}", ctypes.c_char_p, ctypes.c_void_p)(handle).decode("utf-8", "replace")
        for field in ("name", "description")
    )
    kind = _function("ggml_backend_dev_type", ctypes.c_int, ctypes.c_void_p)(handle)
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    size = ctypes.POINTER(ctypes.c_size_t)
    _function("ggml_backend_dev_memory", None, ctypes.c_void_p, size, size)(handle, free, total)
    return Device(name, description, _KINDS[kind] if kind < len(_KINDS) else str(kind), free.value, total.value)


def _function(name: str, result: Any, *arguments: Any) -> Any:
    # By item, not attribute: a function object of our own, whose types other users of the handle do not see.
    function = llama_cpp.llama_cpp._lib[name]
    function.restype, function.argtypes = result, arguments
    return function
