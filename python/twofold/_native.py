"""The only door to the C library: loads it, checks what it is given, turns statuses into exceptions.

blocks, metadata and engine speak to C through what this module hands out.

GGUF and ggml list the dimensions of a tensor fastest first: ``ne[0]`` is the width, the input dimension.
numpy lists them slowest first. Shapes in Python are numpy's, ``(experts, rows, width)``.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any, TypeAlias

import llama_cpp  # before the extension: both must find the same ggml
import numpy as np
import numpy.typing as npt

from twofold import errors

try:
    from twofold._twofold import ffi, lib
except ImportError as error:
    raise errors.VersionError(
        f"twofold's C extension does not load beside llama-cpp-python {llama_cpp.__version__}: {error}. "
        "Reinstall twofold for this Python and llama-cpp-python (pip install --force-reinstall twofold)."
    ) from error

__all__ = ["Bytes", "Floats", "bytes_pointer", "check", "ffi", "floats_pointer", "lib", "race_sampler", "text"]

Floats: TypeAlias = npt.NDArray[np.float32]
Bytes: TypeAlias = npt.NDArray[np.uint8]

ABI = 7
LLAMA_CPP_VERSION = "0.3.36"

_EXCEPTIONS: dict[int, type[errors.TwofoldError]] = {
    lib.TF_ERR_ARGUMENT: errors.ArgumentError,
    lib.TF_ERR_IO: errors.FileAccessError,
    lib.TF_ERR_FORMAT: errors.FormatError,
    lib.TF_ERR_VERSION: errors.FormatVersionError,
    lib.TF_ERR_MEMORY: errors.OutOfMemoryError,
    lib.TF_ERR_MISSING: errors.MissingError,
    lib.TF_ERR_UNSUPPORTED: errors.UnsupportedError,
    lib.TF_ERR_NONFINITE: errors.NonFiniteError,
    lib.TF_ERR_NOT_APPLIED: errors.DecodeError,
}


def text(pointer: Any) -> str:
    """Return a C string as str."""
    return bytes(ffi.string(pointer)).decode("utf-8", "replace")


def check(status: int, context: str = "") -> None:
    """Raise the exception that belongs to a C status, unless it is TF_OK."""
    if status != lib.TF_OK:
        message = text(lib.tf_error())
        raise _EXCEPTIONS[status](f"{context}: {message}" if context else message)


def check_libraries(llama_version: str, built: str, loaded: str, abi: int) -> None:
    """Refuse libraries other than those twofold was built with.

    Raises
    ------
    VersionError
        naming the version found and the version needed.
    """
    if llama_version != LLAMA_CPP_VERSION:
        raise errors.VersionError(
            f"llama-cpp-python {llama_version} is installed, this twofold needs {LLAMA_CPP_VERSION}: "
            f"pip install llama-cpp-python=={LLAMA_CPP_VERSION}"
        )
    if built != loaded:
        raise errors.VersionError(f"ggml {loaded} is loaded, twofold was built with ggml {built}: reinstall twofold")
    if abi != ABI:
        raise errors.VersionError(f"twofold's C library has ABI {abi}, its Python needs {ABI}: reinstall twofold")


def _check_single_copy() -> None:
    ours = int(ffi.cast("intptr_t", lib.tf_ggml_address()))
    theirs = ctypes.cast(llama_cpp.llama_cpp._lib.ggml_version, ctypes.c_void_p).value
    if ours != theirs:
        raise errors.VersionError(
            "twofold and llama_cpp loaded two copies of ggml; remove other ggml libraries from the loader's path "
            f"(llama_cpp's are in {Path(llama_cpp.__file__).parent / 'lib'})"
        )


check_libraries(llama_cpp.__version__, text(lib.tf_ggml_version_built()), text(lib.tf_ggml_version()), lib.tf_abi())
_check_single_copy()


def race_sampler(init: int, seed: int) -> int:
    """Return the address of a sampler that draws by a race of the tokens (csrc/race.c).

    Parameters
    ----------
    init
        address of llama_sampler_init.

    Raises
    ------
    OutOfMemoryError
        if there is no memory for it.
    """
    address = int(ffi.cast("intptr_t", lib.tf_race_sampler(ffi.cast("void *", init), seed)))
    if not address:
        raise errors.OutOfMemoryError("no memory for a sampler")
    return address


# ---- arrays ------------------------------------------------------------------------------------------


def _pointer(array: npt.NDArray[Any], dtype: type, ctype: str) -> Any:
    """Return a C pointer to the array, which must have this dtype and be contiguous."""
    if array.dtype != np.dtype(dtype) or not array.flags.c_contiguous:
        raise errors.ArgumentError(
            f"expected a C-contiguous array of {np.dtype(dtype)}, got {array.dtype} with strides {array.strides}"
        )
    return ffi.from_buffer(f"{ctype}[]", array)


def floats_pointer(array: npt.NDArray[Any]) -> Any:
    return _pointer(array, np.float32, "float")


def bytes_pointer(array: npt.NDArray[Any]) -> Any:
    return _pointer(array, np.uint8, "uint8_t")
