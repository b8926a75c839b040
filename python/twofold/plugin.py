"""`twofold plugin`: libggml-twofold.so, which completes base files in stock llama.cpp programs (docs/llama.cpp.md).

``python -m twofold.plugin MODULE ARGUMENTS`` runs a Python module, for instance ``llama_cpp.server``, with the plugin
loaded into llama_cpp's ggml, which does not read GGML_BACKEND_PATH by itself.
"""

from __future__ import annotations

import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from twofold import errors
from twofold.devices import load_backend
from twofold.pairfile import base_path

LIBRARY = "libggml-twofold.so"


def library() -> Path:
    """Return the path of the plugin, which is installed beside the C extension.

    Raises
    ------
    FileAccessError
        if this installation has none.
    """
    spec = importlib.util.find_spec("twofold._twofold")
    path = Path(spec.origin).with_name(LIBRARY) if spec and spec.origin else Path(LIBRARY)
    if not path.exists():
        raise errors.FileAccessError(f"{path}: not installed; it is built on Linux only. Reinstall twofold there")
    return path


def usage(residual: str | None) -> str:
    """Return how to use the plugin, with the line to run a server by.

    Parameters
    ----------
    residual
        The residual file to name in it; None: a placeholder.
    """
    shown = residual or "NAME.residual.gguf"
    base = base_path(Path(shown))
    return f"""{library()}

GGML_BACKEND_PATH={library()} TWOFOLD_RESIDUAL={shown} \\
    llama-server -m {base} -fa on -ot '^none$=CPU'

-ot names no tensor: it makes programs that are built with their backends (not GGML_BACKEND_DL) read GGML_BACKEND_PATH.
TWOFOLD_BITS=4|6|8, TWOFOLD_THREADS=N, TWOFOLD_LOG=0|1|2, TWOFOLD_STRICT=1: docs/llama.cpp.md"""


def load() -> None:
    """Load the plugin into the ggml of llama_cpp in this process; it reads the environment, and says what it does.

    Raises
    ------
    VersionError
        if ggml does not take it.
    """
    if not load_backend(library()):
        raise errors.VersionError(f"ggml did not take {library()}; what it found is said above")


def main(argv: Sequence[str]) -> int:
    """Load the plugin, then run the module that is named first with the other arguments."""
    if not argv:
        print("usage: python -m twofold.plugin MODULE [ARGUMENT ...]", file=sys.stderr)
        return 2
    try:
        load()
    except errors.TwofoldError as error:
        print(f"twofold: {error}", file=sys.stderr)
        return 1
    sys.argv = list(argv)
    runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
