"""ggml's own mul_mat on the CPU, for benchmarks, through the copy of ggml that llama_cpp has loaded.

Weights lie where llama.cpp would put them: in the buffer type that rearranges them for the CPU's kernels if it takes
the type, else in an ordinary one.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt

from twofold.blocks import GgmlType

P, SIZE, INT = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
_F32 = 0


class _InitParams(ctypes.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", P), ("no_alloc", ctypes.c_bool))


def _call(name: str, result: Any, *signature: Any) -> Any:
    function = llama_cpp.llama_cpp._lib[name]
    function.restype, function.argtypes = result, signature
    return function


def _rearranging_buffer_type(device: int) -> int | None:
    registry = _call("ggml_backend_dev_backend_reg", P, P)(device)
    address = _call("ggml_backend_reg_get_proc_address", P, P, ctypes.c_char_p)(
        registry, b"ggml_backend_dev_get_extra_bufts"
    )
    if not address:
        return None
    found = ctypes.CFUNCTYPE(ctypes.POINTER(P), P)(address)(device)
    return found[0] if found and found[0] else None


def _takes(device: int, kind: GgmlType, width: int) -> bool:
    """Whether the rearranging buffer takes this type, found out with a small matrix."""
    special = _rearranging_buffer_type(device)
    if special is None:
        return False
    params = _InitParams(_call("ggml_tensor_overhead", SIZE)() * 4, None, True)
    weights, operands = (_call("ggml_init", P, _InitParams)(params) for _ in range(2))
    new_2d = _call("ggml_new_tensor_2d", P, P, INT, ctypes.c_int64, ctypes.c_int64)
    product = _call("ggml_mul_mat", P, P, P, P)(
        operands, new_2d(weights, kind.id, width, 64), new_2d(operands, _F32, width, 1)
    )
    buffer = _call("ggml_backend_alloc_ctx_tensors_from_buft", P, P, P)(weights, special)
    taken = bool(_call("ggml_backend_dev_supports_op", ctypes.c_bool, P, P)(device, product))
    _call("ggml_backend_buffer_free", None, P)(buffer)
    for context in (weights, operands):
        _call("ggml_free", None, P)(context)
    return taken


class GgmlMatmul:
    """Products of matrices of one shape with `n` columns, the matrices taking turns."""

    def __init__(
        self, data: npt.NDArray[np.uint8], shape: tuple[int, int], kind: GgmlType, *, n: int, copies: int, threads: int
    ) -> None:
        """Lay out `copies` of a matrix of `shape` ``(rows, width)`` whose quantized rows are `data`."""
        rows, width = shape
        self._device = _call("ggml_backend_dev_by_type", P, INT)(0)
        self._backend = _call("ggml_backend_cpu_init", P)()
        _call("ggml_backend_cpu_set_n_threads", None, P, INT)(self._backend, threads)
        self._context = self._new_context(copies + 2)
        self._operands = self._new_context(copies * 3 + 8)
        self._buffers: list[int] = []
        new_2d = _call("ggml_new_tensor_2d", P, P, INT, ctypes.c_int64, ctypes.c_int64)
        matrices = [new_2d(self._context, kind.id, width, rows) for _ in range(copies)]
        x = new_2d(self._operands, _F32, width, n)
        self._graphs = [self._graph(matrix, x) for matrix in matrices]
        ordinary = _call("ggml_backend_cpu_buffer_type", P)()
        self.rearranged = _takes(self._device, kind, width)
        self._allocate(self._context, _rearranging_buffer_type(self._device) if self.rearranged else ordinary)
        self._allocate(self._operands, ordinary)
        for matrix in matrices:
            self._set(matrix, data)
        self._set(x, np.random.default_rng(0).standard_normal((n, width)).astype(np.float32))

    @staticmethod
    def _new_context(tensors: int) -> int:
        overhead = _call("ggml_tensor_overhead", SIZE)() * tensors + _call("ggml_graph_overhead", SIZE)() * tensors
        return int(_call("ggml_init", P, _InitParams)(_InitParams(overhead, None, True)))

    def _graph(self, matrix: int, x: int) -> tuple[int, int]:
        product = _call("ggml_mul_mat", P, P, P, P)(self._operands, matrix, x)
        graph = _call("ggml_new_graph_custom", P, P, SIZE, ctypes.c_bool)(self._operands, 8, False)
        _call("ggml_build_forward_expand", None, P, P)(graph, product)
        return graph, product

    def _allocate(self, context: int, buffer_type: int | None) -> None:
        allocate = _call("ggml_backend_alloc_ctx_tensors_from_buft", P, P, P)
        buffer = allocate(context, buffer_type)
        if not buffer:
            raise MemoryError("ggml cannot allocate the matrices")
        self._buffers.append(buffer)

    def _set(self, tensor: int, data: npt.NDArray[Any]) -> None:
        setter = _call("ggml_backend_tensor_set", None, P, P, SIZE, SIZE)
        setter(tensor, data.ctypes.data, 0, data.nbytes)

    def time(self, repeats: int) -> npt.NDArray[np.float64]:
        """Seconds of each of `repeats` products."""
        compute = _call("ggml_backend_graph_compute", INT, P, P)
        seconds = []
        for repeat in range(repeats):
            graph, _ = self._graphs[repeat % len(self._graphs)]
            start = time.perf_counter()
            compute(self._backend, graph)
            seconds.append(time.perf_counter() - start)
        return np.array(seconds)

    def _free_buffers(self) -> None:
        for buffer in self._buffers:
            _call("ggml_backend_buffer_free", None, P)(buffer)
        self._buffers = []

    def close(self) -> None:
        """Free everything."""
        self._free_buffers()
        for context in (self._context, self._operands):
            _call("ggml_free", None, P)(context)
        _call("ggml_backend_free", None, P)(self._backend)
