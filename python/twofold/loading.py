"""What `twofold.Llama` is given: arguments checked, the residual and its engine loaded."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Any

from twofold import errors
from twofold.decoder import SPLIT_MODE_TENSOR, keywords, physical_cores
from twofold.engine import Engine
from twofold.pairfile import open_pair

_OURS = {"draft_tokens", "residual_bits", "residual_path", "claim", "preload"}
STAGE_COLUMNS, STAGE_BYTES = 32, 64 << 20
_OURS |= {"stage_columns", "stage_bytes", "rpc_servers"}


def load_engine(
    base: Path,
    residual: str | os.PathLike[str] | None,
    arguments: dict[str, Any],
    *,
    bits: int | None,
    claim: bool | None,
    preload: bool,
    stage: tuple[int, int],
) -> Engine:
    """Open the pair, read the residual in if asked to, and make its engine.

    Raises
    ------
    FileAccessError, FormatError, FormatVersionError, MismatchError
        if the residual is missing, damaged, of another version or of another base.
    UnsupportedError
        if the plugin is active in this process.
    ArgumentError
        if `stage`, columns and bytes (Engine.stage), is not allowed.
    """
    if Engine.plugin_active():
        raise errors.UnsupportedError(
            "libggml-twofold.so is at work in this process and would add the residual a second time: unset "
            "GGML_BACKEND_PATH, or use llama_cpp.Llama, which the plugin serves"
        )
    pair = open_pair(base, Path(residual) if residual else None)
    engine = Engine(pair.residual, arguments["n_threads_batch"] or physical_cores())
    engine.stage(*stage)
    engine.claim(pair.has_base_kernels if claim is None else claim)
    lock = bool(arguments.get("use_mlock"))
    if preload or lock:
        progress = bool(arguments.get("verbose", True)) and sys.stderr.isatty()
        pair.residual.load(bits or pair.residual.bits, lock=lock, progress=progress)
    return engine


def set_bits(engine: Engine, bits: int | None) -> int:
    """Choose the verifier, by default all bits that the file holds; ArgumentError if it cannot be."""
    chosen = engine.residual.bits if bits is None else bits
    engine.set_bits(chosen)
    return chosen


def check_arguments(arguments: dict[str, Any]) -> None:
    """Refuse keywords that nobody reads, and settings with which drafts cannot be checked.

    Raises
    ------
    UnknownArgumentError, UnsupportedError
        naming the argument and what to do.
    """
    known = keywords() | _OURS
    for name in arguments:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {close[0]}?" if close else "; see help(twofold.Llama)"
            raise errors.UnknownArgumentError(f"Llama has no argument {name!r}{hint}")
    if arguments.get("split_mode") == SPLIT_MODE_TENSOR:
        raise errors.UnsupportedError(
            "split_mode tensor spreads each matrix over devices, where its residual cannot be added; "
            "use LLAMA_SPLIT_MODE_LAYER"
        )
    if arguments.get("swa_full") is False:
        raise errors.UnsupportedError(
            "swa_full=False drops cells of the sliding window that cutting a draft back needs; leave it out"
        )
    if arguments.get("draft_model") is not None:
        raise errors.UnsupportedError("draft_model: twofold drafts with its own base; use llama_cpp.Llama for others")
    if os.environ.get("GGML_CUDA_GRAPH_OPT") == "1":
        raise errors.UnsupportedError("GGML_CUDA_GRAPH_OPT=1 reorders the graph that residuals are added to; unset it")
