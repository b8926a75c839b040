"""The `twofold` command: exit statuses and signals."""

from __future__ import annotations

import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from twofold import errors
from twofold.arguments import parser
from twofold.llama_log import quiet_log

_INTERRUPTED, _BROKEN_PIPE, _TERMINATED = 130, 141, 143


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Parameters
    ----------
    argv
        Arguments without the program's name; default: those of the process.

    Returns
    -------
    int
        Exit status: 0, 1 after an error, 130 after Ctrl-C, 141 if the reader of standard output went away.

    Raises
    ------
    SystemExit
        with 2 for a command line that is not understood, 143 on SIGTERM, 0 after ``--help`` and ``--version``.
    """
    arguments = parser().parse_args(argv)
    arguments.command = ["twofold", *(sys.argv[1:] if argv is None else argv)]
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character still shows the others
    quiet_log()
    try:
        with _terminable():
            status: int = arguments.run(arguments)
            sys.stdout.flush()
            return status
    except errors.TwofoldError as error:
        if os.environ.get("TWOFOLD_DEBUG") == "1":
            raise
        print(f"twofold: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:
        return _BROKEN_PIPE


@contextmanager
def _terminable() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that temporary files are removed."""
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield
        return

    def leave(*_: Any) -> None:
        raise SystemExit(_TERMINATED)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
