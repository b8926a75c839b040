"""Whether models speak of the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from twofold import errors
from twofold.architecture import vocabulary


def shared_vocabulary(paths: Sequence[Path]) -> list[bytes]:
    """Return the texts of the tokens, by id, that all of these models have.

    Raises
    ------
    MismatchError
        naming the first two models that differ, and where.
    UnsupportedError
        if llama.cpp cannot load one.
    """
    first = vocabulary(paths[0])
    for path in paths[1:]:
        other = vocabulary(path)
        if other == first:
            continue
        place = next((i for i, (a, b) in enumerate(zip(first, other, strict=False)) if a != b), None)
        what = (
            f"they have {len(first)} and {len(other)} tokens"
            if place is None
            else f"token {place} is {_show(first[place])} in one and {_show(other[place])} in the other"
        )
        raise errors.MismatchError(
            f"{path} cannot draft for {paths[0]}: their vocabularies differ, {what}; use models of one family"
        )
    return first


def _show(text: bytes) -> str:
    return repr(text.decode("utf-8", "replace"))
