"""A program with a llama_cpp of its own, for tests of the plugin: prints what it computed as JSON.

python plugin_host.py MODEL [OPTION ...]: what the options do is said at `main`.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from typing import Any

import llama_cpp

PROMPT = "the people would have there about which"
KEEP: list[Any] = []  # what ggml holds on to


class Registry(ctypes.Structure):
    """ggml's description of a backend."""

    _fields_ = [("api_version", ctypes.c_int), ("functions", ctypes.c_void_p * 4), ("context", ctypes.c_void_p)]


def register(version: int) -> None:
    """Make ggml hold a backend without devices of another version of the interface."""
    name = ctypes.CFUNCTYPE(ctypes.c_char_p, ctypes.c_void_p)(lambda _: b"another")
    count = ctypes.CFUNCTYPE(ctypes.c_size_t, ctypes.c_void_p)(lambda _: 0)
    functions = [ctypes.cast(f, ctypes.c_void_p).value for f in (name, count)]
    registry = Registry(version, (ctypes.c_void_p * 4)(*functions, None, None), None)
    KEEP.extend((name, count, registry))
    llama_cpp.llama_cpp._lib.ggml_backend_register(ctypes.byref(registry))


def surprise() -> Any:
    """Let the CPU's first backend fail, which is the plugin's self-test; returns whether the device is as before."""
    lib = llama_cpp.llama_cpp._lib
    lib.ggml_backend_dev_by_type.restype = ctypes.c_void_p
    slots = ctypes.cast(lib.ggml_backend_dev_by_type(0), ctypes.POINTER(ctypes.c_void_p))
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    original, calls = kind(slots[5]), []

    def init(device: int, parameters: bytes) -> int | None:
        calls.append(device)
        return None if len(calls) == 1 else original(device, parameters)

    ours = kind(init)
    KEEP.extend((original, ours))
    slots[5] = ctypes.cast(ours, ctypes.c_void_p).value
    placed = slots[5]
    return lambda: slots[5] == placed and len(calls) > 1


def logits(path: str, tokens: int, layers: int = 0) -> tuple[list[float], list[int]]:
    """The logits after the prompt, and the greedy tokens from there on."""
    # One thread would hide races; the batch is smaller than the prompt, so that it is decoded in parts.
    llm = llama_cpp.Llama(
        path, n_ctx=256, n_batch=4, n_threads=2, n_threads_batch=2, n_gpu_layers=layers, flash_attn=True, verbose=False
    )
    prompt = llm.tokenize(PROMPT.encode())
    llm.eval(prompt)
    row = llama_cpp.llama_get_logits_ith(llm.ctx, -1)
    first = [row[i] for i in range(llm.n_vocab())]
    llm.reset()
    made = []
    for token in llm.generate(prompt, temp=0.0):
        made.append(token)
        if len(made) == tokens:
            break
    llm.close()
    return first, made


def main(model: str, *options: str) -> None:
    """Options: version=N, surprise: see above; load, any number of times; gpu; then=MODEL: one more after it; ours."""
    llama_cpp.llama_backend_init()
    lib = llama_cpp.llama_cpp._lib
    lib.ggml_backend_load.restype = ctypes.c_void_p
    loaded, restored = [], None
    for option in options:
        if option.startswith("version="):
            register(int(option.removeprefix("version=")))
        elif option == "surprise":
            restored = surprise()
        elif option == "load":
            loaded.append(bool(lib.ggml_backend_load(os.environ["PLUGIN"].encode())))
    first, tokens = logits(model, 12, -1 if "gpu" in options else 0)
    found = {"loaded": loaded, "logits": first, "tokens": tokens, "devices": lib.ggml_backend_dev_count()}
    if restored:
        found["restored"] = restored()
    found["then"] = [logits(option.removeprefix("then="), 12) for option in options if option.startswith("then=")]
    if "ours" in options:
        import twofold

        try:
            twofold.Llama(model, n_ctx=64, verbose=False)
            found["ours"] = "loaded"
        except twofold.errors.UnsupportedError as error:
            found["ours"] = str(error)
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
