"""Run a model over texts and keep what its matrices are multiplied by (calibration.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

import numpy as np
from tqdm import tqdm

from twofold import calibration, decoder, errors, layout
from twofold.architecture import check_architecture
from twofold.calibration import Calibration
from twofold.collector import Collector
from twofold.decoder import BaseLlama, physical_cores
from twofold.output import check_output
from twofold.sensitivity import measure
from twofold.source import Source

MIN_CHUNK = 32
PIECE, PIECES = 64, 2  # tokens and texts that sensitivity is measured over


def bundled_texts() -> list[Path]:
    """Paths of the texts that come with the package: chat, code, maths, summaries, languages."""
    folder = Path(str(files("twofold").joinpath("data/calibration")))
    return sorted(folder.glob("*.txt"))


def calibrate(
    source: Path,
    out: Path,
    *,
    texts: Sequence[Path] = (),
    tokens: int = 16384,
    chunk: int = 512,
    moments: bool = True,
    sensitivity: bool = False,
    threads: int | None = None,
    gpu_layers: int = 0,
    force: bool = False,
    progress: bool = False,
) -> Calibration:
    """Run `source` over texts and write an importance matrix that llama.cpp reads too.

    Parameters
    ----------
    source
        Model in GGUF, best the one to be converted.
    out
        File to write.
    texts
        Text files, UTF-8; they take turns, a chunk of each. Default: the package's own.
    tokens
        Most tokens to use.
    chunk
        Tokens that are decoded at once, from an empty context: 32 or more.
    moments
        Keep second moments as well, for error feedback: about 4 bytes for every weight of a square matrix.
    sensitivity
        Measure what errors in each matrix do to the output, for a base whose types are chosen within a budget: as
        many passes over 128 tokens as there are matrices.
    threads, gpu_layers
        As for :class:`twofold.Llama`.
    force
        Replace a file that is there.
    progress
        Show a progress bar on standard error.

    Raises
    ------
    ArgumentError
        if there is too little text, or it is not UTF-8, or files must not be overwritten.
    FileAccessError, FormatError, UnsupportedError
        if a file cannot be read or the model not be run.
    NonFiniteError
        if the model computes NaN or infinity.
    """
    if not MIN_CHUNK <= chunk <= tokens:
        raise errors.ArgumentError(
            f"chunks of {chunk} out of {tokens} tokens: chunks have {MIN_CHUNK} tokens or more, and no more than all "
            "(--chunk, --tokens)"
        )
    paths = list(texts) or bundled_texts()
    contents = [_read(path) for path in paths]
    check_output(out, [*Source(source).paths, *paths], force)
    check_architecture(source)
    collector = Collector(with_moments=moments, wanted=layout.is_matrix)
    llm = _open(source, collector, chunk, threads or physical_cores(), gpu_layers)
    try:
        chunks = list(_chunks(llm, contents, tokens, chunk))
        for part in tqdm(chunks, desc="inputs", unit="chunks", disable=not progress):
            llm.decoder.truncate(0)
            llm.decoder.decode(part, 0, all_rows=True)
        result = calibration.of_collector(collector, [path.name for path in paths], len(chunks), chunk)
        _check_finite(result, source)
        if sensitivity:
            pieces = [part[:PIECE] for part in chunks[:PIECES]]
            names = list(collector.sums)
            result.sensitivity = measure(llm.decoder, collector, pieces, names, progress=progress)
    finally:
        llm.close()
    calibration.save(result, out)
    return result


def _open(source: Path, collector: Collector, chunk: int, threads: int, gpu_layers: int) -> BaseLlama:
    return BaseLlama(
        collector,
        model_path=str(source),
        n_ctx=chunk,
        n_batch=chunk,
        n_ubatch=chunk,
        n_threads=threads,
        n_threads_batch=threads,
        n_gpu_layers=gpu_layers,
        flash_attn=True,
        verbose=False,
    )


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
        data.decode()
    except OSError as error:
        raise errors.FileAccessError(f"{path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise errors.ArgumentError(f"{path}: not UTF-8 (byte {error.start})") from error
    return data


def _chunks(llm: BaseLlama, texts: list[bytes], tokens: int, size: int) -> Iterator[list[int]]:
    """Yield chunks of the texts in turn; each begins as the model wants texts to begin."""
    start = decoder.opening(llm)
    step = size - len(start)
    rows = [list(llm.tokenize(text, add_bos=False, special=True)) for text in texts]
    longest = max(map(len, rows))
    if longest < step:
        raise errors.ArgumentError(
            f"the longest text has {longest} tokens, a chunk {step}: give longer texts, or a smaller --chunk"
        )
    left = tokens // size
    for first in range(0, longest, step):
        for row in rows:
            part = row[first : first + step]
            if left and len(part) == step:
                left -= 1
                yield [*start, *part]


def _check_finite(result: Calibration, source: Path) -> None:
    for name, sums in result.sums.items():
        if not np.isfinite(sums.squares).all():
            raise errors.NonFiniteError(f"{source}: the inputs of {name} are not finite: the model is damaged")
