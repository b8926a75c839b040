"""Measure pairs and ordinary GGUF files against the logits of a reference model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from twofold import errors
from twofold._native import Floats
from twofold.blocks import ggml_type
from twofold.decoder import BaseLlama
from twofold.divergence import Integers, Scores, divergences, summarize
from twofold.evalcache import Entry, entry_key, entry_path, identity, read_entry, write_entry
from twofold.evalmodels import Settings, Subject, list_subjects
from twofold.exact import float32_file
from twofold.llama import Llama
from twofold.pairfile import Pair
from twofold.windows import BATCH, Text, bundled_texts, check_tokens, load_texts, scored_logits


@dataclass(frozen=True)
class Row:
    """Results of one model in one mode on one text, or on ``all``."""

    group: str
    values: dict[str, Any]


def evaluate(settings: Settings, *, progress: bool = False) -> list[Row]:
    """Measure every model in every mode on every text.

    Returns
    -------
    list of Row
        the reference's first: its stored logits against those they were made of, the least that can be measured.

    Raises
    ------
    ArgumentError, FileAccessError, FormatError, MismatchError
        for settings or files that cannot be used; for models with another tokenizer than the reference's.
    DecodeError, NonFiniteError
        if llama.cpp fails, or yields NaN.
    """
    subjects = list_subjects(settings)
    paths = settings.texts or bundled_texts()
    with closing(_load(settings.reference, vocab_only=True)) as llama:
        texts = load_texts(paths, llama, settings.ctx, settings.tokens)
        vocab = int(llama.n_vocab())
    for path in dict.fromkeys(subject.path for subject in subjects):
        _check_vocabulary(path, settings, texts, paths)
    passes = 1 + (len(subjects) - 1) * len(settings.modes)
    bar = tqdm(total=passes * sum(t.tokens for t in texts), unit="tokens", unit_scale=True, disable=not progress)
    with bar, ExitStack() as stack:
        folder = settings.cache or Path(stack.enter_context(_scratch(settings.scratch)))
        run = _Run(settings, texts, {}, bar, progress)
        run.entries.update(_reference_entries(run, folder, vocab))
        itself = {text.kind: run.entries[text.kind].itself() for text in texts}
        rows = _rows(subjects[0], "exact", itself)
        for subject, mode, measured in _measure_all(run, subjects[1:]):
            rows += _rows(subject, mode, measured)
    return rows


@contextmanager
def _scratch(parent: Path) -> Iterator[str]:
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="reference-", dir=parent) as folder:
        yield folder


def _rows(subject: Subject, mode: str, measured: dict[str, Scores]) -> list[Row]:
    about = {"model": subject.label, "mode": mode}
    bits = {"ram_bpw": subject.ram_bpw, "vram_bpw": subject.vram_bpw}
    parts = [(kind, [scores]) for kind, scores in measured.items()] + [("all", list(measured.values()))]
    return [Row(subject.group, about | {"text": kind} | bits | vars(summarize(scores))) for kind, scores in parts]


def _check_vocabulary(path: Path, settings: Settings, texts: list[Text], paths: list[Path]) -> None:
    with closing(_load(path, vocab_only=True)) as llama:
        for text, file in zip(texts, paths, strict=True):
            check_tokens(text, file, llama, str(path), settings.ctx, settings.tokens)


# ---- runs --------------------------------------------------------------------------------------------


@dataclass
class _Run:
    """What every measurement needs."""

    settings: Settings
    texts: list[Text]
    entries: dict[str, Entry]
    bar: Any
    progress: bool


def _load(path: Path, **arguments: Any) -> BaseLlama:
    try:
        return BaseLlama(None, model_path=str(path), verbose=False, **arguments)
    except ValueError as error:
        raise errors.UnsupportedError(f"{path}: llama.cpp cannot load this model ({error})") from error


def _arguments(settings: Settings, batch: int) -> dict[str, Any]:
    return {
        "n_ctx": settings.ctx,
        "n_batch": batch,
        "n_ubatch": batch,
        "n_threads": settings.threads,
        "n_threads_batch": settings.threads,
    }


@contextmanager
def _exact(run: _Run, path: Path, pair: Pair | None = None, bits: int = 0) -> Iterator[BaseLlama]:
    """Load a float32 copy, with float32 keys and values: llama.cpp's flash attention would round those to float16."""
    single = ggml_type("f32").id
    off = {"n_gpu_layers": 0, "offload_kqv": False, "op_offload": False, "flash_attn": False}
    with float32_file(path, run.settings.scratch, pair=pair, bits=bits, progress=run.progress) as copy:
        arguments = _arguments(run.settings, BATCH) | off | {"type_k": single, "type_v": single}
        with closing(_load(copy, **arguments)) as llama:
            yield llama


def _reference_entries(run: _Run, folder: Path, vocab: int) -> dict[str, Entry]:
    """Read the reference's logits, or make those that are not there."""
    settings = run.settings
    about = identity(settings.reference)
    run.bar.set_description_str("reference")
    entries: dict[str, Entry] = {}
    missing: list[tuple[Text, Path, dict[str, Any]]] = []
    for text in run.texts:
        key = entry_key(about, text, settings.ctx, settings.tokens)
        path = entry_path(folder, settings.reference, text, key)
        found = read_entry(path, key)
        if found is None:
            missing.append((text, path, key))
        else:
            entries[text.kind] = found
            run.bar.update(text.tokens)
    if missing:
        with _exact(run, settings.reference) as llama:
            for text, path, key in missing:
                write_entry(path, key, text.rows, vocab, _with_targets(run, llama, text, draft=False))
                made = read_entry(path, key)
                if made is None:
                    raise errors.FormatError(f"{path}: it was written, but does not read back; check the disk")
                entries[text.kind] = made
    return entries


def _with_targets(run: _Run, llama: Any, text: Text, *, draft: bool) -> Iterator[tuple[Floats, Integers]]:
    """Yield the logits of a text's scored rows, and the next token after each."""
    for window in text.windows:
        for position, logits in scored_logits(llama, window, text.first, draft=draft):
            yield logits, np.asarray(window[position + 1 : position + 1 + len(logits)], np.int64)
        run.bar.update(len(window))


def _measure(run: _Run, llama: Any, *, draft: bool = False) -> dict[str, Scores]:
    measured = {}
    for text in run.texts:
        entry, parts, row = run.entries[text.kind], [], 0
        for logits, targets in _with_targets(run, llama, text, draft=draft):
            count = len(logits)
            kld, sums = divergences(entry.codes[row : row + count], logits)
            likelihood = sums - logits[np.arange(count), targets]
            parts.append((kld, logits.argmax(axis=1) == entry.top[row : row + count], likelihood))
            row += count
        measured[text.kind] = Scores(*map(np.concatenate, zip(*parts, strict=True)))
    return measured


def _measure_all(run: _Run, subjects: list[Subject]) -> Iterator[tuple[Subject, str, dict[str, Scores]]]:
    runs: dict[str, Callable[[_Run, Subject], dict[str, Scores]]] = {"exact": _run_exact, "runtime": _run_as_it_runs}
    for mode in run.settings.modes:
        for subject in subjects:
            run.bar.set_description_str(f"{mode} {subject.label}")
            yield subject, mode, runs[mode](run, subject)


def _run_exact(run: _Run, subject: Subject) -> dict[str, Scores]:
    with _exact(run, subject.path, subject.pair, subject.bits) as llama:
        return _measure(run, llama)


def _run_as_it_runs(run: _Run, subject: Subject) -> dict[str, Scores]:
    arguments = _arguments(run.settings, run.settings.batch) | {
        "n_gpu_layers": run.settings.gpu_layers,
        "flash_attn": True,
    }
    if subject.pair is None:
        with closing(_load(subject.path, **arguments)) as llama:
            return _measure(run, llama)
    # The base alone is run as drafts are: by the engine of the pair, not by stock llama.cpp.
    bits = subject.bits or None
    with closing(Llama(subject.path, residual_bits=bits, verbose=False, preload=False, **arguments)) as llama:
        return _measure(run, llama, draft=not subject.bits)
