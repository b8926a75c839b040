"""Which tensors `convert --whole` means: layers by number, or names that a regular expression finds."""

from __future__ import annotations

import re

from twofold import errors
from twofold.layout import block_number, is_split_name
from twofold.source import Source

_LAYERS = re.compile(r"[\d,\s-]+")
_RANGE = re.compile(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?")
TYPES = ("q8_0", "source")


def find(spec: str, source: Source) -> frozenset[str]:
    """Return the names of the matrices that are to stay whole.

    Parameters
    ----------
    spec
        Layers (``0-3,27``), or a regular expression that is searched for in tensor names. Only matrices that would be
        split otherwise are meant; the head is ``output.weight``, also where it is tied to the embedding.

    Raises
    ------
    ArgumentError
        if it is neither, names a layer that the model does not have, or finds nothing.
    """
    names = [name for name in (*source.tensors, "output.weight") if is_split_name(name)]
    if _LAYERS.fullmatch(spec):
        layers = _layers(spec, source.hyperparameter("block_count", 0))
        found = {name for name in names if block_number(name) in layers}
    else:
        try:
            pattern = re.compile(spec)
        except re.error as error:
            raise errors.ArgumentError(
                f"whole {spec!r}: neither layers (0-3,27) nor a regular expression: {error}"
            ) from error
        found = {name for name in names if pattern.search(name)}
    if not found:
        raise errors.ArgumentError(
            f"whole {spec!r}: no matrix that would be split has such a name; names are like "
            f"{', '.join(names[:2] or ['blk.0.ffn_up.weight'])} (twofold inspect --tensors lists them)"
        )
    return frozenset(found)


def _layers(spec: str, count: int) -> set[int]:
    layers: set[int] = set()
    for part in spec.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise errors.ArgumentError(f"whole {spec!r}: {part!r} is not a layer (27) or a range of layers (0-3)")
        first, last = int(match[1]), int(match[2] or match[1])
        if first > last or last >= count:
            raise errors.ArgumentError(f"whole {spec!r}: {part.strip()}: this model has layers 0 to {count - 1}")
        layers |= set(range(first, last + 1))
    return layers
