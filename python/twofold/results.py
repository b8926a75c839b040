"""Where results of a measurement go: a JSON document and a plot."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from twofold import errors


def check_outputs(json_path: Path | None, plot_path: Path | None) -> None:
    """Find out before a long measurement whether its results can be written.

    Raises
    ------
    ArgumentError
        if matplotlib is missing, or the plot's name has an ending that it does not know.
    FileAccessError
        if a file cannot be written.
    """
    for path in filter(None, (json_path, plot_path)):
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise errors.FileAccessError(f"{path}: cannot be written; name a file in a folder that is there")
    if plot_path is not None:
        known = figure().canvas.get_supported_filetypes()
        if plot_path.suffix[1:].lower() not in known:
            raise errors.ArgumentError(f"{plot_path}: end the name in one of {', '.join(sorted(known))}")


def figure(width: float = 7, height: float = 4.5) -> Any:
    """Return an empty figure of matplotlib, sizes in inches; ArgumentError if it is missing."""
    try:
        from matplotlib.figure import Figure  # not pyplot: it would look for a display
    except ImportError as error:
        raise errors.ArgumentError(f"--plot needs matplotlib ({error}); pip install twofold[plot]") from error
    return Figure(figsize=(width, height), layout="constrained")


def save(
    found: dict[str, Any], json_path: Path | None, plot_path: Path | None, plot: Callable[[dict[str, Any]], Any]
) -> None:
    """Write the JSON document, and the figure that `plot` makes of it, where there is a path.

    Raises
    ------
    FileAccessError
        if a file cannot be written.
    """
    try:
        if json_path is not None:
            json_path.write_text(json.dumps(found) + "\n", "utf-8")
        if plot_path is not None:
            plot(found).savefig(plot_path, dpi=150)
    except OSError as error:
        raise errors.FileAccessError(f"{error.filename}: {error.strerror}") from error
