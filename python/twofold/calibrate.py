"""Run a model over texts and keep what its matrices are multiplied by (calibration.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.resources import files
from pathlib import Path

from tqdm import tqdm

from twofold import calibration, decoder, errors, layout
from twofold.calibration import Calibration
from twofold.collector import Collector
from twofold.decoder import BaseLlama, check_architecture, physical_cores
from twofold.output import check_output
from twofold.sensitivity import measure

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
    sensitivity: bool = True,
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
        Tokens that are decoded at once, from an empty context.
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
        if there is too little text, or files must not be overwritten.
    FileAccessError, FormatError, UnsupportedError
        if a file cannot be read or the model not be run.
    """
    paths = list(texts) or bundled_texts()
    check_output(out, [source, *paths], force)
    check_architecture(source)
    collector = Collector(with_moments=moments, wanted=layout.is_matrix)
    workers = threads or physical_cores()
    llm = BaseLlama(
        collector,
        model_path=str(source),
        n_ctx=chunk,
        n_batch=chunk,
        n_ubatch=chunk,
        n_threads=workers,
        n_threads_batch=workers,
        n_gpu_layers=gpu_layers,
        flash_attn=True,
        verbose=False,
    )
    try:
        chunks = list(_chunks(llm, [_read(path) for path in paths], tokens, chunk))
        if not chunks:
            raise errors.ArgumentError(f"the texts have no {chunk} tokens: give more text, or a smaller --chunk")
        for part in tqdm(chunks, desc="inputs", unit="chunks", disable=not progress):
            llm._decoder.truncate(0)
            llm._decoder.decode(part, 0, all_rows=True)
        result = calibration.of_collector(collector, [path.name for path in paths], len(chunks), chunk)
        if sensitivity:
            pieces = [part[:PIECE] for part in chunks[:PIECES]]
            names = list(collector.sums)
            result.sensitivity = measure(llm._decoder, collector, pieces, names, progress=progress)
    finally:
        llm.close()
    calibration.save(result, out)
    return result


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise errors.FileAccessError(f"{path}: {error.strerror}") from error


def _chunks(llm: BaseLlama, texts: list[bytes], tokens: int, size: int) -> Iterator[list[int]]:
    """Yield chunks of the texts in turn; each begins as the model wants texts to begin."""
    start = decoder.opening(llm)
    step = size - len(start)
    rows = [list(llm.tokenize(text, add_bos=False, special=True)) for text in texts]
    left = tokens // size
    for first in range(0, max(map(len, rows)), step):
        for row in rows:
            part = row[first : first + step]
            if left and len(part) == step:
                left -= 1
                yield [*start, *part]
