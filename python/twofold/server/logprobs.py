"""Log-probabilities of the tokens of an answer, taken as they are made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from twofold._native import Floats
from twofold.prompting import piece


class Recorder:
    """Collects what OpenAI's ``logprobs`` holds.

    Parameters
    ----------
    llm
        whose tokens they are.
    count
        likeliest tokens to list beside the chosen one.
    prompt
        text, or tokens, that offsets are counted after.
    """

    def __init__(self, llm: Any, count: int, prompt: str | list[int]) -> None:
        self._llm, self._count = llm, count
        self._start = len(prompt) if isinstance(prompt, str) else 0
        self._waiting: list[tuple[int, dict[str, Any]]] = []  # end of the token in bytes, its entry
        self._text = b""

    def add(self, token: int, logits: Floats) -> None:
        """Note a token and the logits it was chosen from, float32 ``(n_vocab,)``."""
        shifted = logits.astype(np.float64) - logits.max()
        values = shifted - np.log(np.exp(shifted).sum())
        likeliest: Any = np.argpartition(-values, self._count)[: self._count] if self._count else []
        top = {self._name(int(i)): float(values[i]) for i in sorted(likeliest, key=lambda i: -values[i])}
        entry = {
            "token": self._name(token),
            "offset": self._start + len(self._text.decode("utf-8", "ignore")),
            "logprob": float(values[token]),
            "top": {**top, self._name(token): float(values[token])},
        }
        self._text += piece(self._llm, token)
        self._waiting.append((len(self._text), entry))

    def _name(self, token: int) -> str:
        return piece(self._llm, token).decode("utf-8", "replace")

    def take(self, length: int, finish_reason: str | None) -> dict[str, list[Any]]:
        """Return the entries of tokens within the first `length` bytes; all of them where the length ended the text.

        Tokens of a stop string, which the text does not have, are left out.
        """
        count = sum(end <= length or finish_reason == "length" for end, _ in self._waiting)
        taken = [entry for _, entry in self._waiting[:count]]
        del self._waiting[:count]
        return {
            "tokens": [entry["token"] for entry in taken],
            "text_offset": [entry["offset"] for entry in taken],
            "token_logprobs": [entry["logprob"] for entry in taken],
            "top_logprobs": [entry["top"] for entry in taken],
        }

    def stream(self, chunks: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        """Give each chunk of a stream the entries of its tokens."""
        sent = 0
        for chunk in chunks:
            choice = chunk["choices"][0]
            sent += len(choice["text"].encode())
            entries = self.take(sent, choice["finish_reason"])
            choice["logprobs"] = entries if entries["tokens"] else None
            yield chunk
