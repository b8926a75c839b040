"""Exceptions. Each also inherits the built-in that a caller would expect."""

from __future__ import annotations


class TwofoldError(Exception):
    """Base of everything that twofold raises on purpose."""


class ArgumentError(TwofoldError, ValueError):
    """A value outside what is allowed."""


class UnknownArgumentError(TwofoldError, TypeError):
    """A keyword that `twofold.Llama` does not have."""


class FileAccessError(TwofoldError, OSError):
    """A file cannot be read or written."""


class FormatError(TwofoldError, ValueError):
    """Not GGUF, truncated, damaged, or not what its name says."""


class FormatVersionError(FormatError):
    """A residual written in a format version that this twofold does not read."""


class MismatchError(FormatError):
    """A residual that belongs to another base."""


class MissingError(TwofoldError, KeyError):
    """No such key or tensor."""

    def __str__(self) -> str:
        return str(self.args[0]) if self.args else ""


class UnsupportedError(TwofoldError, NotImplementedError):
    """An architecture, type or setting that twofold cannot handle."""


class NonFiniteError(TwofoldError, ArithmeticError):
    """NaN or infinity where weights should be."""


class OutOfMemoryError(TwofoldError, MemoryError):
    """Memory ran out in the C library."""


class VersionError(TwofoldError, ImportError):
    """The libraries found are not the ones twofold was built with."""


class DecodeError(TwofoldError, RuntimeError):
    """llama.cpp could not decode a batch, or a residual could not be applied."""


class PlacementWarning(UserWarning):
    """Something is on the CPU that was to be on a device."""
