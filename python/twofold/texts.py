"""Texts that drafts are measured on, kept in a file of JSON lines so that later runs use the same ones."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from twofold import errors


@dataclass(frozen=True)
class Text:
    """Greedy continuation of a prompt.

    Attributes
    ----------
    id, prompt
        of the prompt in the package's set, and a hash of its tokens and of the vocabulary.
    n
        tokens that were asked for; there are fewer where an end-of-generation token came before.
    model, fingerprint
        of the full model that made the text.
    tokens
        the text, its end-of-generation token included.
    """

    id: str
    prompt: str
    n: int
    model: str
    fingerprint: str
    tokens: list[int]


class Texts:
    """Texts by prompt, in memory and in a file if there is one."""

    def __init__(self, path: Path | None, n: int) -> None:
        """Read the file; texts of `n` tokens are wanted.

        Raises
        ------
        FileAccessError, FormatError
            if it cannot be read or written, or a line is not one of these.
        """
        self._path, self._n = path, n
        self._texts: list[Text] = []
        if path is not None:
            try:
                path.touch()
                lines = path.read_text("utf-8").splitlines()
            except OSError as error:
                raise errors.FileAccessError(f"{path}: {error.strerror}") from error
            self._texts = [_parse(path, number, line) for number, line in enumerate(lines, 1)]

    def find(self, id: str, prompt: str) -> Text | None:
        """Return the first text of this prompt that is long enough, cut to the length wanted, whoever made it."""
        for text in self._texts:
            if (text.id, text.prompt) == (id, prompt) and text.n >= self._n:
                return Text(**{**vars(text), "n": self._n, "tokens": text.tokens[: self._n]})
        return None

    def add(self, id: str, prompt: str, model: str, fingerprint: str, tokens: Sequence[int]) -> Text:
        """Keep a text, and append it to the file.

        Raises
        ------
        FileAccessError
            if it cannot be written.
        """
        text = Text(id, prompt, self._n, model, fingerprint, list(tokens))
        self._texts.append(text)
        if self._path is not None:
            try:
                with self._path.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(text)) + "\n")
            except OSError as error:
                raise errors.FileAccessError(f"{self._path}: {error.strerror}") from error
        return text


def _parse(path: Path, number: int, line: str) -> Text:
    try:
        text = Text(**json.loads(line))
        strings = (text.id, text.prompt, text.model, text.fingerprint)
        good = all(isinstance(s, str) for s in strings) and all(isinstance(t, int) for t in (text.n, *text.tokens))
    except (ValueError, TypeError):
        good = False
    if not good or not text.tokens:
        raise errors.FormatError(f"{path}, line {number}: not a text of twofold accept; remove the line or the file")
    return text
