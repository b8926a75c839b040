"""Texts to measure on: tokenized, cut into windows, and the logits of a model for them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofold import errors
from twofold._native import Floats
from twofold.decoder import opening

BATCH = 128  # tokens of one decode by default: so many rows of logits are in memory at a time
BUNDLED = Path(__file__).parent / "data" / "texts"
SCORING = (
    "each text is cut into windows of ctx tokens, the first a beginning-of-text token if the model uses one; each "
    "window is decoded from an empty cache; scored are its predictions at positions ctx/4 to the last but one"
)


@dataclass(frozen=True)
class Text:
    """A text in windows.

    Attributes
    ----------
    kind
        what it is called in results: the file's name without ending.
    digest
        SHA-256 of the file.
    windows
        tokens of each window.
    first
        first position of a window whose prediction is scored.
    """

    kind: str
    digest: str
    windows: tuple[tuple[int, ...], ...]
    first: int

    @property
    def tokens(self) -> int:
        """Tokens that are decoded."""
        return sum(map(len, self.windows))

    @property
    def rows(self) -> int:
        """Predictions that are scored."""
        return sum(len(window) - 1 - self.first for window in self.windows)


def bundled_texts() -> list[Path]:
    """Return the texts that come with the package.

    Raises
    ------
    ArgumentError
        if there are none.
    """
    found = sorted(BUNDLED.glob("*.txt"))
    if not found:
        raise errors.ArgumentError(f"{BUNDLED}: no texts are installed; give some with --text")
    return found


def load_texts(paths: Sequence[Path], llama: Any, ctx: int, limit: int) -> list[Text]:
    """Read texts and cut them into windows of `ctx` tokens, at most `limit` tokens of each text.

    Raises
    ------
    ArgumentError
        for two texts of one name, or one that is not UTF-8 or too short to be scored.
    FileAccessError
        if a text cannot be read.
    """
    texts: dict[str, Text] = {}
    for path in paths:
        kind = path.stem
        if kind in texts or kind == "all":
            raise errors.ArgumentError(f"{path}: another row of the results is called {kind!r}; rename the file")
        texts[kind] = _load(path, llama, ctx, limit)
    return list(texts.values())


def _load(path: Path, llama: Any, ctx: int, limit: int) -> Text:
    try:
        data = path.read_bytes()
        data.decode()
    except OSError as error:
        raise errors.FileAccessError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise errors.ArgumentError(f"{path}: not UTF-8 (byte {error.start})") from error
    start, first = opening(llama), ctx // 4
    body = ctx - len(start)
    tokens = llama.tokenize(data, add_bos=False, special=True)[:limit]
    windows = [(*start, *tokens[at : at + body]) for at in range(0, len(tokens), body)]
    windows = [window for window in windows if len(window) > first + 1]
    if not windows:
        raise errors.ArgumentError(
            f"{path}: {len(tokens)} tokens; more than {first + 1} are needed to score some, or a smaller --ctx"
        )
    return Text(path.stem, hashlib.sha256(data).hexdigest(), tuple(windows), first)


def check_tokens(text: Text, path: Path, llama: Any, label: str, ctx: int, limit: int) -> None:
    """Raise MismatchError unless a model cuts the text at `path` into the very same windows."""
    if _load(path, llama, ctx, limit).windows != text.windows:
        raise errors.MismatchError(
            f"{label}: it tokenizes {path.name} otherwise than the reference; only models with the same tokenizer can "
            "be compared"
        )


def scored_logits(
    llama: Any, window: Sequence[int], first: int, *, draft: bool = False
) -> Iterator[tuple[int, Floats]]:
    """Decode a window from an empty cache.

    Parameters
    ----------
    llama
        A model; so many tokens are decoded at a time as its batch holds.
    window, first
        tokens, and the first position that is scored.
    draft
        Decode with the base of a pair alone.

    Yields
    ------
    position, logits
        of a run of scored positions: the first of them, and float32 ``(positions, vocab)`` in llama.cpp's memory,
        which the next step overwrites.
    """
    decoder = llama.decoder
    decoder.truncate(0)
    with decoder.drafting() if draft else nullcontext():
        for at in range(0, len(window), llama.n_batch):
            batch = window[at : at + llama.n_batch]
            begin, end = max(first - at, 0), min(len(batch), len(window) - 1 - at)
            decoder.decode(batch, at, all_rows=begin < end)
            if begin < end:
                yield at + begin, decoder.block(len(batch))[begin:end]
