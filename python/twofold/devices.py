"""What ggml sees of this machine: an extension of decoder.py's door to llama_cpp.

llama_cpp has no bindings for ggml's devices. Its handle of libllama finds the symbols of the libraries that libllama
depends on, so they come from the one copy of ggml that runs.
"""

from __future__ import annotations

import ctypes
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp

from twofold import errors
from twofold.llama_log import quiet_log

_KINDS = ("cpu", "gpu", "igpu", "accel", "meta")  # enum ggml_backend_dev_type
_FLOAT32 = 0  # enum ggml_type
_NO_GPU = ("CPU", "RPC", "BLAS")
_rpc_servers: set[str] = set()  # that ggml knows


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


def load_backend(path: Path) -> bool:
    """Load a library into ggml as a backend; False if ggml does not take it."""
    _start()
    return bool(_function("ggml_backend_load", ctypes.c_void_p, ctypes.c_char_p)(os.fsencode(path)))


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


def add_rpc_servers(endpoints: str) -> None:
    """Make the devices of RPC servers known to ggml, for the rest of this process.

    Parameters
    ----------
    endpoints
        ``HOST:PORT``, several separated by commas.

    Raises
    ------
    UnsupportedError
        if llama-cpp-python was built without ggml's RPC backend.
    ArgumentError
        if a server cannot be reached.
    """
    _start()
    rpc = _function("ggml_backend_reg_by_name", ctypes.c_void_p, ctypes.c_char_p)(b"RPC")
    if not rpc:
        raise errors.UnsupportedError("this llama-cpp-python has no RPC backend; build it with -DGGML_RPC=ON")
    address = _function("ggml_backend_reg_get_proc_address", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    add = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_char_p)(address(rpc, b"ggml_backend_rpc_add_server"))
    register = _function("ggml_backend_register", None, ctypes.c_void_p)
    for endpoint in (text.strip() for text in endpoints.split(",")):
        if endpoint in _rpc_servers:
            continue
        server = add(endpoint.encode()) if _listens(endpoint) else None
        if not server:
            raise errors.ArgumentError(f"no RPC server answers at {endpoint!r}; give HOST:PORT of a running one")
        register(server)
        _rpc_servers.add(endpoint)


def _listens(endpoint: str) -> bool:
    """Whether anyone listens there: ggml ends the process if nobody does."""
    host, _, port = endpoint.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError, OverflowError):
        return False
    return True


def gpu_backends() -> list[str]:
    """Names of the backends that llama-cpp-python was built with and that run on GPUs, whether or not there is one."""
    _start()
    get = _function("ggml_backend_reg_get", ctypes.c_void_p, ctypes.c_size_t)
    name = _function("ggml_backend_reg_name", ctypes.c_char_p, ctypes.c_void_p)
    count = _function("ggml_backend_reg_count", ctypes.c_size_t)()
    return [found for index in range(count) if (found := name(get(index)).decode()).split("[")[0] not in _NO_GPU]


# ---- copies ------------------------------------------------------------------------------------------


def copy_rates(name: str, size: int, repeats: int = 5) -> tuple[float, float]:
    """Bytes a second copied within a device, and between it and RAM (the slower way), of `size` bytes each time.

    Raises
    ------
    ArgumentError
        if there is no such device.
    OutOfMemoryError
        if it has no room for three times `size`.
    """
    _start()
    get = _function("ggml_backend_dev_by_name", ctypes.c_void_p, ctypes.c_char_p)
    device = get(name.encode())
    if not device:
        raise errors.ArgumentError(f"no device {name!r}; there are {', '.join(d.name for d in devices())}")
    backend = _function("ggml_backend_dev_init", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(device, None)
    try:
        with _two_tensors(backend, size) as (one, other):
            return _time_copies(backend, one, other, size, repeats)
    finally:
        _function("ggml_backend_free", None, ctypes.c_void_p)(backend)


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


@contextmanager
def _two_tensors(backend: int, size: int) -> Iterator[tuple[int, int]]:
    """Two tensors of `size` bytes (a multiple of 4) in the backend's memory."""
    context = _function("ggml_init", ctypes.c_void_p, _InitParams)(_InitParams(1 << 16, None, True))
    try:
        new = _function("ggml_new_tensor_1d", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
        tensors = new(context, _FLOAT32, size // 4), new(context, _FLOAT32, size // 4)
        allocate = _function("ggml_backend_alloc_ctx_tensors", ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
        buffer = allocate(context, backend)
        if not buffer:
            raise errors.OutOfMemoryError(
                f"the device has no room for two blocks of {size} bytes to measure copies with"
            )
        try:
            yield tensors
        finally:
            _function("ggml_backend_buffer_free", None, ctypes.c_void_p)(buffer)
    finally:
        _function("ggml_free", None, ctypes.c_void_p)(context)


def _time_copies(backend: int, one: int, other: int, size: int, repeats: int) -> tuple[float, float]:
    data = ctypes.create_string_buffer(size)
    pointer, count = ctypes.c_void_p, ctypes.c_size_t
    put = _function("ggml_backend_tensor_set", None, pointer, pointer, count, count)
    get = _function("ggml_backend_tensor_get", None, pointer, pointer, count, count)
    copy = _function("ggml_backend_tensor_copy", None, pointer, pointer)
    wait = _function("ggml_backend_synchronize", None, pointer)

    def rate(run: Callable[[], None]) -> float:
        best = float("inf")
        for _ in range(repeats + 1):  # the first one also pays for memory that was never touched
            start = time.perf_counter()
            run()
            wait(backend)
            best = min(best, time.perf_counter() - start)
        return size / best

    up = rate(lambda: put(one, data, 0, size))
    within = rate(lambda: copy(one, other))
    down = rate(lambda: get(other, data, 0, size))
    return within, min(up, down)
