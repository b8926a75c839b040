"""Sizes and rates as people write them: 12GiB, 12GB, 500GB/s."""

from __future__ import annotations

import re

from twofold import errors

_UNITS = {"b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS |= {"kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
_QUANTITY = re.compile(r"(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]?i?b)(/s)?", re.IGNORECASE)


def size(text: str) -> int:
    """Return bytes of a size such as ``12GiB`` (2^30 each), ``12GB`` (10^9 each) or ``0``.

    Raises
    ------
    ArgumentError
        if there is no unit, an unknown one, or ``/s`` after it.
    """
    return round(_bytes(text, "", "a size: a number and B, kB, MB, GB, TB, KiB, MiB, GiB or TiB, such as 12GiB"))


def rate(text: str) -> float:
    """Return bytes a second of a rate such as ``500GB/s``.

    Raises
    ------
    ArgumentError
        if there is no unit, an unknown one, no ``/s`` after it, or the rate is 0.
    """
    form = "a rate: a number above 0 and kB/s, MB/s, GB/s, TB/s, KiB/s, MiB/s, GiB/s or TiB/s, such as 500GB/s"
    found = _bytes(text, "/s", form)
    if found <= 0:
        raise errors.ArgumentError(f"{text!r} is not {form}")
    return found


def _bytes(text: str, end: str, form: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None and end == "" and text.strip() == "0":
        return 0.0
    if match is None or (match[3] or "").lower() != end or match[2].lower() not in _UNITS:
        raise errors.ArgumentError(f"{text!r} is not {form}")
    return float(match[1]) * _UNITS[match[2].lower()]


def binary(count: float) -> str:
    """Bytes in binary units, for instance ``11.5 GiB``: what memory is sold in."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= scale:
            return f"{count / scale:.{2 if count < 10 * scale else 1}f} {unit}"
    return f"{count:.0f} B"
