"""What `generate` and `chat` show beside the text: colours of its tokens, and a line of live statistics."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Callable
from types import TracebackType

from twofold import errors

AUTO, ALWAYS, NEVER = WHEN = ("auto", "always", "never")

_DRAFT, _OWN, _RESET = "\x1b[32m", "\x1b[35m", "\x1b[0m"  # green, magenta: both can be read on black and on white
_ERASE = "\r\x1b[K"
_INTERVAL_S = 0.1


def wants_colour(when: str) -> bool:
    """Decide whether text is painted.

    Raises
    ------
    ArgumentError
        for `AUTO` where standard output is nothing that shows colours.
    """
    if when != AUTO:
        return when == ALWAYS
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        raise errors.ArgumentError(
            "--colour: standard output is no terminal that shows colours; --colour=always writes them all the same"
        )
    if os.environ.get("NO_COLOR"):
        print("twofold: NO_COLOR is set, the text is not painted; --colour=always overrides it", file=sys.stderr)
        return False
    return True


def paint(text: str, from_draft: bool) -> str:
    """Return a token's text in the colour of who made it; what follows has the terminal's own colour again."""
    return f"{_DRAFT if from_draft else _OWN}{text}{_RESET}"


LEGEND = f"{paint('accepted drafts', True)}, {paint('tokens of the full model itself', False)}"


class StatusLine:
    """A line on standard error that is rewritten in place, if that is a terminal.

    Where the text goes to the same terminal the line is shown only while the text is at the beginning of a line: there
    it can be erased without a trace, wherever the terminal wraps and whatever the width of the characters.
    """

    def __init__(self, line: Callable[[], str], *, on: bool, text: bool) -> None:
        """Take what makes the line; `text` says whether text is written to standard output meanwhile."""
        self._line = line
        self._on = on and sys.stderr.isatty()
        self._beside_text = self._on and text and sys.stdout.isatty() and _same_terminal()
        self._shown, self._next = False, 0.0

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.clear()

    def clear(self) -> None:
        """Erase the line; call it before text is written."""
        if self._shown:
            self._write(_ERASE)
            self._shown = False

    def refresh(self, text: str) -> None:
        """Show the line anew, if it is time, after this text was written."""
        now = time.monotonic()
        if not self._on or now < self._next or (self._beside_text and not text.endswith("\n")):
            return
        self._next = now + _INTERVAL_S
        width = shutil.get_terminal_size().columns - 1  # the last column would wrap
        self._write(_ERASE + self._line()[:width])
        self._shown = True

    def _write(self, text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


def _same_terminal() -> bool:
    return os.path.sameopenfile(sys.stdout.fileno(), sys.stderr.fileno())
