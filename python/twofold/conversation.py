"""Subcommands that run the model: generate and chat."""

from __future__ import annotations

import json
import signal
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from twofold import device_arguments, errors, prompting, terminal
from twofold.llama import Llama

_HELP = "commands: /reset forgets the conversation, /quit ends"


def generate(arguments: Namespace) -> int:
    """Run ``twofold generate``."""
    if arguments.json and arguments.colour != terminal.NEVER:
        raise errors.ArgumentError("--json prints no text to paint: leave out --colour")
    painted = terminal.wants_colour(arguments.colour)
    text = _prompt(arguments)
    llm = _load(arguments)
    try:
        if arguments.raw or not prompting.has_template(llm):
            tokens = prompting.text_tokens(llm, _with_system(arguments.system, text))
        else:
            tokens = prompting.chat_tokens(llm, [*_system(arguments), {"role": "user", "content": text}])
        answer = prompting.Answer(llm, tokens, _sampling(arguments), arguments.tokens)
        with terminal.StatusLine(answer.live_statistics, on=arguments.stats, text=not arguments.json) as status:
            for piece, from_draft in answer.spans():
                if not arguments.json:
                    status.clear()
                    _show(terminal.paint(piece, from_draft) if painted else piece)
                status.refresh(piece)
        if arguments.json:
            print(json.dumps({"text": answer.text, "tokens": answer.tokens, "stats": llm.stats}))
        else:
            print(f"\n\n{answer.statistics()}")
            if painted:
                print(terminal.LEGEND)
    finally:
        llm.close()
    return 0


def chat(arguments: Namespace) -> int:
    """Run ``twofold chat``: read lines and answer them until they end."""
    painted = terminal.wants_colour(arguments.colour)
    llm = _load(arguments)
    try:
        if not prompting.has_template(llm):
            raise errors.UnsupportedError(
                f"{arguments.base}: the model has no chat template; use twofold generate --raw"
            )
        interactive = sys.stdin.isatty()
        if interactive:
            import readline  # noqa: F401  # gives input() line editing and history

            print(_HELP, file=sys.stderr)
        if painted:
            print(terminal.LEGEND)
        _Conversation(llm, arguments, painted).run(interactive)
    finally:
        llm.close()
    return 0


def _prompt(arguments: Namespace) -> str:
    if arguments.file is not None:
        try:
            return Path(arguments.file).read_text("utf-8", "replace")
        except OSError as error:
            raise errors.FileAccessError(f"{arguments.file}: {error.strerror}") from error
    return sys.stdin.read() if arguments.prompt == "-" else str(arguments.prompt)


def _load(arguments: Namespace) -> Llama:
    optional: dict[str, Any] = {"seed": arguments.seed, "n_threads": arguments.threads}
    llm = prompting.load(
        arguments.base,
        draft_tokens=arguments.draft,
        drafter=None if arguments.drafter == "none" else arguments.drafter,
        residual_bits=arguments.residual_bits,
        residual_path=arguments.residual,
        n_ctx=arguments.ctx,
        **device_arguments.options(arguments),
        **{name: value for name, value in optional.items() if value is not None},
    )
    if llm.rollback:
        print(f"twofold: {llm.rollback}", file=sys.stderr)
    return llm


def _sampling(arguments: Namespace) -> prompting.Sampling:
    return prompting.Sampling(
        arguments.temp, arguments.top_k, arguments.top_p, arguments.min_p, arguments.repeat_penalty
    )


def _system(arguments: Namespace) -> list[dict[str, str]]:
    return [{"role": "system", "content": arguments.system}] if arguments.system else []


def _with_system(system: str | None, text: str) -> str:
    return f"{system}\n\n{text}" if system else text


def _show(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


class _Conversation:
    """Messages so far, and the loop that adds to them."""

    def __init__(self, llm: Llama, arguments: Namespace, painted: bool) -> None:
        self._llm, self._arguments, self._painted = llm, arguments, painted
        self._messages = _system(arguments)

    def run(self, interactive: bool) -> None:
        for line in _lines("> " if interactive else ""):
            if line == "/quit":
                return
            if line == "/reset":
                self._messages = _system(self._arguments)
            elif line.startswith("/"):
                print(f"{line}: no such command; {_HELP}", file=sys.stderr)
            elif line:
                self._answer(line)

    def _answer(self, line: str) -> None:
        """Answer a line; it is forgotten again where it has no room."""
        messages = [*self._messages, {"role": "user", "content": line}]
        tokens = prompting.chat_tokens(self._llm, messages)
        try:
            answer = prompting.Answer(self._llm, tokens, _sampling(self._arguments), self._arguments.tokens)
        except errors.ArgumentError as error:
            print(f"twofold: {error}; /reset forgets the conversation", file=sys.stderr)
            return
        with _interruptible() as stop:
            for piece, from_draft in answer.spans(stop):
                _show(terminal.paint(piece, from_draft) if self._painted else piece)
        print()
        self._messages = [*messages, {"role": "assistant", "content": answer.text}]
        if self._arguments.stats:
            print(answer.statistics())


def _lines(prompt: str) -> Iterator[str]:
    """Yield lines of standard input; Ctrl-C at the prompt drops the line being typed."""
    while True:
        try:
            line = input(prompt)
        except EOFError:
            if prompt:
                print()
            return
        except KeyboardInterrupt:
            if not prompt:
                raise
            print()
            continue
        yield line.strip()


@contextmanager
def _interruptible() -> Iterator[Callable[[], bool]]:
    """Let the first Ctrl-C stop an answer between two tokens, where the cache is in order, and the next one quit."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # only that one may set handlers
        yield pressed.is_set
        return

    def stop(*_: Any) -> None:
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()

    before = signal.signal(signal.SIGINT, stop)
    try:
        yield pressed.is_set
    finally:
        signal.signal(signal.SIGINT, before)
