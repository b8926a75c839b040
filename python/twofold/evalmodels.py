"""What `twofold eval` is asked to measure: settings, the models of pairs, other files, their bits a weight."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from twofold import errors
from twofold.decoder import physical_cores
from twofold.evalcache import cache_root
from twofold.pairfile import Pair, base_path, open_pair, residual_bytes
from twofold.source import Source
from twofold.windows import BATCH

MODES = ("exact", "runtime")
REFERENCE = "reference"


@dataclass(frozen=True)
class Settings:
    """What to measure, and how.

    Attributes
    ----------
    pairs, reference, compare
        base files; the GGUF file that everything is compared with; further ordinary GGUF files.
    texts
        files; default: those that come with the package.
    modes
        ``exact`` (float32 weights and activations) and ``runtime`` (as the model really runs).
    bits
        residual bits that pairs are measured at, as far as they have them; 0: the base alone.
    ctx, tokens
        tokens of a window, and most tokens of a text.
    cache
        folder for the reference's logits; None: not kept.
    scratch
        folder for float32 copies of models.
    threads, gpu_layers
        of llama.cpp; ``exact`` never uses a GPU.
    batch
        tokens of a decode of ``runtime``: kernels differ by it, on devices above all.
    """

    pairs: list[Path]
    reference: Path
    texts: list[Path] = field(default_factory=list)
    compare: list[Path] = field(default_factory=list)
    modes: tuple[str, ...] = MODES
    bits: tuple[int, ...] = (0, 4, 6, 8)
    ctx: int = 512
    tokens: int = 2048
    cache: Path | None = field(default_factory=lambda: cache_root() / "eval")
    scratch: Path = field(default_factory=lambda: cache_root() / "scratch")
    threads: int = field(default_factory=physical_cores)
    gpu_layers: int = 0
    batch: int = BATCH


@dataclass(frozen=True)
class Subject:
    """A model to measure.

    Attributes
    ----------
    label, group
        name of its rows; name of its curve in a plot (a pair's name, or ``GGUF``).
    path, pair, bits
        file; the pair it is the base of, if it is one, and the residual bits added (0: the base alone).
    ram_bpw, vram_bpw
        bits a weight over the matrices that the first pair splits.
    """

    label: str
    group: str
    path: Path
    pair: Pair | None
    bits: int
    ram_bpw: float
    vram_bpw: float


def list_subjects(settings: Settings) -> list[Subject]:
    """Return the reference; of each pair the base alone, then each number of bits; then other files.

    Raises
    ------
    ArgumentError
        if two would have the same label.
    FileAccessError, FormatError, MismatchError
        if a file cannot be read, or is of a model of another shape than the first pair's.
    """
    opened = [open_pair(path if path.exists() else base_path(path)) for path in settings.pairs]
    wide = ram_bits(settings.reference, opened[0])
    subjects = [Subject(REFERENCE, REFERENCE, settings.reference, None, 0, wide, 0.0)]
    for pair in opened:
        name = pair.base.name.removesuffix(".gguf").removesuffix(".base")
        prefix = f"{name} " if len(opened) > 1 else ""
        split = [tensor for tensor in pair.tensors if tensor.name in pair.completed]
        weights = sum(tensor.weights for tensor in split)
        vram = 8 * sum(tensor.bytes for tensor in split) / weights
        for bits in settings.bits:
            if bits <= pair.residual.bits:
                held = sum(residual_bytes(tensor, bits) for tensor in pair.completed.values()) if bits else 0
                label = prefix + (f"r{bits}" if bits else "base")
                subjects.append(Subject(label, name, pair.base, pair, bits, 8 * held / weights, vram))
    for path in settings.compare:
        subjects.append(Subject(path.stem, "GGUF", path, None, 0, ram_bits(path, opened[0]), 0.0))
    labels = [subject.label for subject in subjects]
    for label in labels:
        if labels.count(label) > 1:
            raise errors.ArgumentError(f"two models would be called {label!r} in the results; rename a file")
    return subjects


def ram_bits(path: Path, pair: Pair) -> float:
    """Bits a weight of an ordinary GGUF file over the matrices that a pair splits.

    Raises
    ------
    MismatchError
        if the file lacks one of them, or has it in another shape.
    """
    tensors = Source(path).tensors
    size = weights = 0
    for name, completed in pair.completed.items():
        tied = "token_embd.weight" if name == "output.weight" else name
        found = tensors.get(name) or tensors.get(tied)
        if found is None or found.weights != np.prod(completed.shape):
            problem = "is missing" if found is None else f"has shape {found.shape}, not {completed.shape}"
            raise errors.MismatchError(f"{path}: another model than {pair.base}: {name} {problem}")
        size += found.bytes
        weights += found.weights
    return 8 * size / weights
