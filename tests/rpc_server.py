"""A server of ggml's RPC backend whose device is this machine's CPU: python rpc_server.py HOST:PORT."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import llama_cpp


def main(endpoint: str) -> None:
    """Serve until the process is ended."""
    llama_cpp.llama_backend_init()
    ggml = llama_cpp.llama_cpp._lib
    by_type = ggml["ggml_backend_dev_by_type"]
    by_type.restype, by_type.argtypes = ctypes.c_void_p, [ctypes.c_int]
    cpu = (ctypes.c_void_p * 1)(by_type(0))
    rpc = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-rpc.so"))
    start = rpc["ggml_backend_rpc_start_server"]
    start.restype = None
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    start(endpoint.encode(), None, 1, 1, cpu)


if __name__ == "__main__":
    main(sys.argv[1])
