"""llama.cpp's log: errors only."""

from __future__ import annotations

import sys
from typing import Any

import llama_cpp

LOG_ERROR = 4  # enum ggml_log_level; llama_cpp takes 3, a warning, for it and so shows warnings and hides errors


@llama_cpp.llama_log_callback  # type: ignore[untyped-decorator]
def _show_errors(level: int, message: bytes, _: Any) -> None:
    if level == LOG_ERROR:
        print(message.decode("utf-8", "replace"), end="", flush=True, file=sys.stderr)


def quiet_log() -> None:
    """Keep llama.cpp's log off standard error, errors excepted."""
    llama_cpp.llama_log_set(_show_errors, None)
