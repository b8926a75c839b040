"""Write a tiny GGUF with random weights of any architecture that llama.cpp knows, from hyper-parameters alone.

llama.cpp itself names the tensors and their shapes: a model is made from the keys in memory, with no data. The file is
then written from that list, with weights of sensible size.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import zlib
from math import sqrt
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import numpy.typing as npt

from arch_keys import Value, Wide, keys
from make_tiny import LAYER_GAIN, LOGIT_STD, NEVER_LIKELY, VOCAB_SIZE, TinyError, add_tokenizer

Shape = tuple[int, ...]
# What layers add to the hidden state: the last matrix of each block.
_LAST = ("attn_output", "attn_out", "ffn_down", "ssm_out", "shortconv.out_proj", "time_mix_output", "channel_mix_value")
# Scores of attention are not divided by the root of the heads' size. Random ones would choose single tokens, and
# rounding would choose others.
_UNSCALED = ("gemma3n", "gemma4")


class _Tensor(ctypes.Structure):
    """The head of ggml_tensor."""

    _fields_ = (("type", ctypes.c_int), ("buffer", ctypes.c_void_p), ("ne", ctypes.c_int64 * 4))


class _Init(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p))


def _ggml() -> ctypes.CDLL:
    library = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so"))
    library.gguf_init_from_file.argtypes = [ctypes.c_char_p, _Init]
    library.gguf_init_from_file.restype = ctypes.c_void_p
    library.ggml_get_name.argtypes, library.ggml_get_name.restype = [ctypes.c_void_p], ctypes.c_char_p
    library.gguf_free.argtypes = [ctypes.c_void_p]
    return library


def shapes(header: Path) -> dict[str, Shape]:
    """Return the tensors that llama.cpp wants for the keys of a GGUF file: name to (..., outputs, inputs).

    Raises
    ------
    TinyError
        if llama.cpp does not accept the keys.
    """
    ggml, found = _ggml(), dict[str, Shape]()

    @llama_cpp.llama_model_set_tensor_data_t  # type: ignore[untyped-decorator]
    def note(address: int, _: Any) -> None:
        ne = list(_Tensor.from_address(address).ne)
        while len(ne) > 1 and ne[-1] == 1:
            ne.pop()
        found[ggml.ggml_get_name(address).decode()] = tuple(reversed(ne))

    metadata = ggml.gguf_init_from_file(os.fsencode(header), _Init(True, None))
    params = llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_init_from_user(metadata, note, None, params)
    ggml.gguf_free(metadata)
    if not model:
        raise TinyError(f"llama.cpp {llama_cpp.__version__} makes no model of these keys")
    llama_cpp.llama_model_free(model)
    return found


def _wanted(arch: str, name: str) -> bool:
    """Whether a tensor is to be in the file. llama.cpp asks for all that some file of the architecture has."""
    if arch == "rwkv6qwen2" and "time_mix_first" in name:  # what tells RWKV6 proper from it
        return False
    if arch == "qwen3next" and "ssm_in." in name:  # of older files
        return False
    if arch in ("hy_v3", "mimo2", "step35") and name.endswith(("ffn_gate.weight", "ffn_up.weight", "ffn_down.weight")):
        return False  # of layers without experts
    scales = name.endswith((".scale", ".input_scale"))  # of types with one scale a matrix
    return not scales or "ffn_gate_inp" in name


def weights(name: str, shape: Shape, seed: int, gain: float = LAYER_GAIN) -> npt.NDArray[np.float32]:
    """Return random weights; those of one name, shape and seed are always the same."""
    rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
    values = rng.standard_normal(shape, dtype=np.float32)
    if name.startswith("rope_f"):
        return np.ones(shape, np.float32)
    if name == "output_norm.weight":
        return np.copysign(1 + np.float32(0.1) * np.abs(values), values)
    if ".ssm_a" in name and "norm" not in name:  # how fast a state decays: the logarithm is negative
        return -np.float32(0.1) - np.abs(values)
    if "norm" in name or "scale" in name or name.endswith("_ln.weight"):
        size = gain if "post" in name else 1.0
        return (np.float32(1) + np.float32(0.1) * values) * np.float32(size)
    if len(shape) == 1 or name.endswith(".bias"):
        return np.float32(0.1) * values
    values /= sqrt(shape[-1])
    if any(part in name for part in _LAST):
        values *= gain
    if name in ("token_embd.weight", "output.weight"):
        values *= LOGIT_STD
        values[NEVER_LIKELY] *= 0.1
    return values


def _add_keys(writer: gguf.GGUFWriter, arch: str, values: dict[str, Value]) -> None:
    kind = gguf.GGUFValueType
    for key, value in values.items():
        name = f"{arch}.{key}" if not key.startswith("xielu") else key
        if isinstance(value, list):
            inner = kind.UINT64 if isinstance(value, Wide) else kind.UINT32
            inner = kind.FLOAT32 if isinstance(value[0], float) else inner
            writer.add_key_value(name, value, kind.ARRAY, inner)
        else:
            scalar = kind.BOOL if isinstance(value, bool) else kind.UINT32 if isinstance(value, int) else kind.FLOAT32
            writer.add_key_value(name, value, scalar)


def _writer(path: Path, arch: str, values: dict[str, Value], seed: int) -> gguf.GGUFWriter:
    writer = gguf.GGUFWriter(path, arch)
    _add_keys(writer, arch, values)
    writer.add_type("model")
    writer.add_name(f"tiny random {arch}, seed {seed}")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    size = values["vocab_size"]
    add_tokenizer(writer, size if isinstance(size, int) else VOCAB_SIZE)
    return writer


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def header_only(path: Path, arch: str) -> None:
    """Write a file with an architecture's keys and vocabulary, and next to no weights."""
    writer = _writer(path, arch, keys(arch), 0)
    writer.add_tensor("token_embd.weight", np.zeros((VOCAB_SIZE, 32), np.float32))
    _finish(writer)


def write(
    path: Path, arch: str, *, seed: int = 0, experts: bool | None = None, gain: float = LAYER_GAIN, **own: Value
) -> dict[str, Shape]:
    """Write a tiny random model; return its tensors, name to (..., outputs, inputs).

    Parameters
    ----------
    path
        file to write.
    arch
        one of `arch_keys.NAMES`.
    seed
        of the weights.
    experts
        whether feed-forward layers are experts; default: as is usual for the architecture.
    gain
        what each layer adds to the hidden state; small: a rounded copy of the model says nearly the same.
    **own
        keys to change, with underscores twice for dots.

    Raises
    ------
    TinyError
        if llama.cpp makes no model of these keys. It may also end the process.
    """
    values = keys(arch, experts) | {key.replace("__", "."): value for key, value in own.items()}
    with tempfile.TemporaryDirectory(prefix=".tiny-", dir=path.parent) as work:
        header = Path(work) / "header.gguf"
        _finish(_writer(header, arch, values, seed))
        found = {name: shape for name, shape in shapes(header).items() if _wanted(arch, name)}
        unfinished = Path(work) / path.name
        writer = _writer(unfinished, arch, values, seed)
        for name, shape in found.items():
            values_of = weights(name, shape, seed, gain)
            if arch in _UNSCALED and "attn_q_norm" in name:
                values_of /= np.float32(sqrt(shape[-1]))
            writer.add_tensor(name, values_of)
        _finish(writer)
        unfinished.replace(path)
    return found
