"""A server of ggml's RPC backend whose device is this machine's CPU: python rpc_server.py HOST:PORT."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import llama_cpp

from twofold import devices


@contextlib.contextmanager
def running() -> Iterator[str]:
    """Run the server in a process of its own, yield HOST:PORT."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"127.0.0.1:{free.getsockname()[1]}"
    silent = subprocess.DEVNULL
    with subprocess.Popen(
        [sys.executable, __file__, endpoint], env=only_rpc(), stdout=silent, stderr=silent
    ) as process:
        try:
            for _ in range(100):
                if process.poll() is not None:
                    raise AssertionError(f"the RPC server ended with {process.returncode}")
                if devices._listens(endpoint):
                    break
                time.sleep(0.1)
            yield endpoint
        finally:
            process.terminate()


def only_rpc() -> dict[str, str]:
    """Environment in which no other device is seen."""
    return {name: value for name, value in os.environ.items() if name != "GGML_VK_VISIBLE_DEVICES"}


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
