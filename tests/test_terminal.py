"""Who made a token, its colour, and the line of live statistics."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import twofold
from twofold import errors, prompting, speculate, stats, terminal
from twofold.cli import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

GREEN, MAGENTA, RESET = "\x1b[32m", "\x1b[35m", "\x1b[0m"


@pytest.fixture(scope="module")
def llm(tiny_pair: Path) -> Iterator[twofold.Llama]:
    model = twofold.Llama(tiny_pair, n_ctx=256, draft_tokens=3, verbose=False)
    yield model
    model.close()


class Terminal:
    """A pseudoterminal, and what a screen without end shows of it."""

    def __init__(self) -> None:
        self._master, slave = os.openpty()
        self.file = os.fdopen(slave, "w", encoding="utf-8", newline="\n")
        self.raw = b""
        self._reader = threading.Thread(target=self._read, daemon=True)  # a failed test leaves it behind
        self._reader.start()

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._master, 4096)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            self.raw += data

    def close(self) -> str:
        self.file.close()
        self._reader.join()
        os.close(self._master)
        return self.raw.decode()


def screen(written: str) -> str:
    lines, column = [""], 0
    plain = re.sub(r"\x1b\[[0-9]*m", "", written)
    for part in re.findall(r"\x1b\[K|\r|\n|[^\x1b\r\n]", plain):
        if part == "\r":
            column = 0
        elif part == "\n":
            lines.append("")
        elif part == "\x1b[K":
            lines[-1] = lines[-1][:column]
        else:
            lines[-1] = lines[-1][:column] + part + lines[-1][column + 1 :]
            column += 1
    return "\n".join(line.rstrip() for line in lines)


@contextmanager
def on_terminal(monkeypatch: Patch, *names: str) -> Iterator[Terminal]:
    opened = Terminal()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with monkeypatch.context() as patch:
        for name in names:
            patch.setattr(sys, name, opened.file)
        yield opened


@pytest.fixture
def wordy(monkeypatch: Patch) -> None:
    """Tokens are words, some of them at the ends of lines; nothing waits for the next tenth of a second."""
    monkeypatch.setattr(prompting, "piece", lambda _, token: b"w%d%s" % (token, b"\n" if token % 3 == 0 else b" "))
    monkeypatch.setattr(terminal, "_INTERVAL_S", 0.0)


# ---- who made a token --------------------------------------------------------------------------------


def test_origins_are_the_drafts_that_were_kept(llm: twofold.Llama, monkeypatch: Patch) -> None:
    made: list[list[int]] = []
    real = speculate.draft

    def spy(*arguments: Any) -> list[int]:
        made.append(real(*arguments))
        return made[-1]

    monkeypatch.setattr(speculate, "draft", spy)
    generator = llm.generate(llm.tokenize(b"the work"), temp=0.0)
    tokens = [next(generator) for _ in range(40)]
    generator.close()
    expected, drafts = [False], iter(made)
    while len(expected) < 40:
        place = len(expected)
        agreed = [a == b for a, b in zip(next(drafts), tokens[place:], strict=False)]
        kept = [*agreed, False].index(False)
        expected += [True] * kept + [False]
    assert llm._stats.from_draft == expected[:40]
    assert 5 < sum(llm._stats.from_draft) < 35


def test_plain_decoding_has_no_drafts(llm: twofold.Llama) -> None:
    llm.draft_tokens = 0
    generator = llm.generate(llm.tokenize(b"the work"), temp=0.0)
    for _ in range(5):
        next(generator)
    generator.close()
    llm.draft_tokens = 3
    assert llm._stats.from_draft == [False] * 5


def test_a_character_is_the_tokens_that_completes_it(llm: twofold.Llama, monkeypatch: Patch) -> None:
    parts = [b"a\xc3", b"\xa9!", b"\xf0\x9f", b"\x98", b"\x80", b"b"]
    made = [False, True, True, True, False, True]
    remaining, origins = iter(parts), iter(made)
    monkeypatch.setattr(prompting, "piece", lambda *_: next(remaining))
    real = stats.Stats.count_token
    monkeypatch.setattr(stats.Stats, "count_token", lambda self, from_draft: real(self, next(origins)))
    answer = prompting.Answer(llm, llm.tokenize(b"the work"), prompting.Sampling(), len(parts))
    assert list(answer.spans()) == [("a", False), ("é!", True), ("\U0001f600", False), ("b", True)]
    assert answer.text == "aé!\U0001f600b"


# ---- colours -----------------------------------------------------------------------------------------


def test_colours_on_a_terminal(tiny_pair: Path, monkeypatch: Patch) -> None:
    with on_terminal(monkeypatch, "stdout") as opened:
        status = main(["generate", str(tiny_pair), "-p", "the work", "-n", "12", "--draft", "3", "--colour"])
    painted = opened.close().replace("\r\n", "\n")
    assert status == 0
    text, _, legend = painted.partition("\n\n")
    spans = re.findall(r"\x1b\[(32|35)m([^\x1b]+)\x1b\[0m", text)
    assert "".join(f"\x1b[{code}m{span}{RESET}" for code, span in spans) == text  # nothing is left unpainted
    model = prompting.load(str(tiny_pair), n_ctx=256, draft_tokens=3)
    prompt = prompting.chat_tokens(model, [{"role": "user", "content": "the work"}])
    expected = list(prompting.Answer(model, prompt, prompting.Sampling(), 12).spans())
    model.close()
    assert [(span, code == "32") for code, span in spans] == expected
    assert {made for _, made in expected} == {True, False}
    assert legend.endswith(f"{terminal.LEGEND}\n")


def test_colours_elsewhere_only_if_forced(capsys: Capture, tiny_pair: Path) -> None:
    options = ["generate", str(tiny_pair), "-p", "the work", "-n", "4"]
    assert main([*options, "--colour"]) == 1
    assert capsys.readouterr().err == (
        "twofold: --colour: standard output is no terminal that shows colours; "
        "--colour=always writes them all the same\n"
    )
    assert main([*options, "--color=always"]) == 0
    assert MAGENTA in capsys.readouterr().out
    assert main([*options, "--colour=never"]) == 0
    assert "\x1b" not in capsys.readouterr().out
    assert main([*options, "--colour=always", "--json"]) == 1
    assert "--json prints no text to paint" in capsys.readouterr().err


def test_no_color(capsys: Capture, monkeypatch: Patch) -> None:
    with on_terminal(monkeypatch, "stdout") as opened:
        assert terminal.wants_colour("auto")
        monkeypatch.setenv("NO_COLOR", "1")
        assert not terminal.wants_colour("auto")
        assert terminal.wants_colour("always")
        monkeypatch.setenv("TERM", "dumb")
        with pytest.raises(errors.ArgumentError, match="no terminal"):
            terminal.wants_colour("auto")
    assert opened.close() == ""
    assert "NO_COLOR is set" in capsys.readouterr().err


def test_chat_paints(capsys: Capture, tiny_pair: Path, monkeypatch: Patch) -> None:
    lines = iter(["the work"])
    monkeypatch.setattr("twofold.conversation._lines", lambda _: lines)
    assert main(["chat", str(tiny_pair), "-n", "6", "--draft", "3", "--colour=always"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(terminal.LEGEND)
    assert out.count(MAGENTA) + out.count(GREEN) > 6


# ---- live statistics ---------------------------------------------------------------------------------


def generate(pair: Path, *options: str) -> int:
    return main(["generate", str(pair), "-p", "the work", "-n", "30", "--draft", "3", *options])


@pytest.mark.usefixtures("wordy")
def test_live_line_leaves_no_trace_in_the_text(capsys: Capture, tiny_pair: Path, monkeypatch: Patch) -> None:
    assert generate(tiny_pair) == 0
    text = capsys.readouterr().out.rpartition("\n\n")[0]
    with on_terminal(monkeypatch, "stdout", "stderr") as opened:
        status = generate(tiny_pair, "--stats", "--colour")
    written = opened.close().replace("\r\n", "\n")
    assert status == 0
    assert re.search(r"\r\x1b\[K\d+ tokens, [\d.]+ tok/s, [\d.]+ tokens a check, \d+% of drafts accepted", written)
    shown = screen(written)
    assert shown.startswith("\n".join(line.rstrip() for line in text.split("\n")) + "\n")
    assert shown.count("tok/s") == 1  # the last line


@pytest.mark.usefixtures("wordy")
def test_live_line_alone_on_its_terminal_is_always_new(capsys: Capture, tiny_pair: Path, monkeypatch: Patch) -> None:
    with on_terminal(monkeypatch, "stderr") as opened:
        status = generate(tiny_pair, "--stats")
    written = opened.close()
    assert (status, written.count("tok/s"), screen(written)) == (0, 30, "")
    assert "30 tokens, " in capsys.readouterr().out


def test_no_live_line_without_a_terminal_or_a_wish(capsys: Capture, tiny_pair: Path, monkeypatch: Patch) -> None:
    assert generate(tiny_pair, "--stats") == 0
    assert capsys.readouterr().err == ""
    with on_terminal(monkeypatch, "stderr") as opened:
        assert generate(tiny_pair) == 0
    assert opened.close() == ""


def long_line() -> str:
    return "x" * 50


def test_live_line_is_cut_to_the_terminal_and_not_too_frequent(monkeypatch: Patch) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    with on_terminal(monkeypatch, "stderr") as opened, terminal.StatusLine(long_line, on=True, text=False) as line:
        line.refresh("a")
        line.refresh("b")
    assert opened.close() == "\r\x1b[K" + "x" * 19 + "\r\x1b[K"
