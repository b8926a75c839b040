"""`twofold accept`: tokens per check and acceptance of drafts, by depth, on the package's prompts.

Nothing is timed. The full model's greedy texts are fixed; what each model's drafts agree with on them gives, for every
depth at once, what the loop would have done (simulate.py).
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import llama_cpp
import numpy as np
from tqdm import tqdm

import twofold
from twofold import drafts, errors, prompting, simulate
from twofold.blocks import default_kernel
from twofold.decoder import physical_cores
from twofold.drafts import Draft
from twofold.llama import Llama
from twofold.loop import MAX_DRAFT
from twofold.prompts import KINDS, prompts
from twofold.simulate import Agreements
from twofold.texts import Text, Texts
from twofold.vocabularies import shared_vocabulary

Result = TypeVar("Result")
DEPTHS = (2, 3, 4, 6, 8, 12, 24)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    depths
        most tokens of a draft, 1 to 32, one run each.
    tokens
        length of the texts.
    count, kinds
        the first prompts of these kinds; None: all.
    residual_bits
        of the verifiers; None: all that each file holds.
    threads
        None: one a core.
    gpu_layers
        layers in VRAM; -1: all.
    texts
        file of texts; None: they are kept in memory.
    measure_pairs
        whether the bases are measured, or only other drafters on the first pair's texts.
    """

    depths: tuple[int, ...] = DEPTHS
    tokens: int = 64
    count: int | None = None
    kinds: tuple[str, ...] = KINDS
    residual_bits: int | None = None
    threads: int | None = None
    gpu_layers: int = 0
    texts: Path | None = None
    measure_pairs: bool = True


@dataclass(frozen=True)
class _Prompt:
    id: str
    kind: str
    tokens: list[int]
    hash: str


def measure(
    pairs: Sequence[Path], drafters: Sequence[Path], settings: Settings | None = None, *, progress: bool = False
) -> dict[str, Any]:
    """Measure the base of each pair, and each drafter, on the same texts.

    Parameters
    ----------
    pairs
        ``NAME.base.gguf`` files; the full model of the first makes the texts that are missing.
    drafters
        Ordinary GGUF files that draft with a cache of their own.
    settings
        Default: those of `Settings`.
    progress
        Show progress bars on standard error.

    Returns
    -------
    dict
        Values for JSON: versions and settings, ``models``, ``texts_by``, ``rows`` (tokens per check of each draft, kind
        and depth, with the 95% interval), ``accepted_by_position`` (at the largest depth), and ``per_prompt``.

    Raises
    ------
    ArgumentError
        for settings outside what is allowed.
    MismatchError
        if a model has another vocabulary than the first pair.
    FileAccessError, FormatError, UnsupportedError
        if a file is missing, damaged, or nothing that can draft.
    """
    settings = settings or Settings()
    _check(pairs, drafters, settings)
    models = _describe(pairs, drafters, settings.residual_bits)
    asked = _prompts(models[0], shared_vocabulary([m.path for m in models]), settings)
    run = _Run(models, asked, settings, progress)
    measured = {model.name: run.of(model) for model in models if settings.measure_pairs or not model.bits}
    if not any(simulate.complete(text, min(settings.depths))[1] for found in measured.values() for text in found):
        raise errors.ArgumentError(f"-n {settings.tokens}: the texts are too short for a single check; ask for more")
    return {**_about(settings, models, asked), "texts_by": run.authors(), **_results(measured, models, asked, settings)}


def _check(pairs: Sequence[Path], drafters: Sequence[Path], settings: Settings) -> None:
    depths = settings.depths
    if not depths or not all(1 <= depth <= MAX_DRAFT for depth in depths):
        raise errors.ArgumentError(f"depths {list(depths)}: one or more integers from 1 to {MAX_DRAFT} are allowed")
    if not set(settings.kinds) <= set(KINDS) or not settings.kinds:
        raise errors.ArgumentError(f"kinds {list(settings.kinds)}: one or more of {', '.join(KINDS)} are allowed")
    if not pairs:
        raise errors.ArgumentError("no pair: give one or more NAME.base.gguf; the first makes the texts")
    if not settings.measure_pairs and not drafters:
        raise errors.ArgumentError("nothing to measure: name the models with --drafter, or leave out --drafters-only")
    for files in ([path.resolve() for path in pairs], [path.resolve() for path in drafters]):
        for path in files:
            if files.count(path) > 1:
                raise errors.ArgumentError(f"{path}: given twice; name each model once")


def _describe(pairs: Sequence[Path], drafters: Sequence[Path], bits: int | None) -> list[Draft]:
    names = list({path.resolve(): path.name for path in (*pairs, *drafters)}.values())
    bases = {path.resolve() for path in pairs}

    def name(path: Path) -> str:
        return path.name if names.count(path.name) < 2 else str(path)

    def own(path: Path) -> str:
        """Name a base that also drafts by itself, without the full model's cache entries."""
        return f"{name(path)} (own cache)" if path.resolve() in bases else name(path)

    return [
        *(drafts.of_pair(name(path), path, bits) for path in pairs),
        *(drafts.of_model(own(path), path) for path in drafters),
    ]


def _prompts(model: Draft, vocabulary: Sequence[bytes], settings: Settings) -> list[_Prompt]:
    """Return the prompts in the chat template of the model, if it has one."""
    seed = hashlib.sha256(b"\0".join(vocabulary)).digest()
    found = []
    llm = prompting.load(str(model.path), vocab_only=True)
    try:
        for prompt in prompts(settings.count, settings.kinds):
            if prompting.has_template(llm):
                tokens = prompting.chat_tokens(llm, [{"role": "user", "content": prompt["prompt"]}])
            else:
                tokens = prompting.text_tokens(llm, prompt["prompt"])
            digest = hashlib.sha256(seed + np.array(tokens, "<i4").tobytes()).hexdigest()[:16]
            found.append(_Prompt(prompt["id"], prompt["kind"], tokens, digest))
    finally:
        llm.close()
    return found


class _Run:
    """The texts, made when they are first needed, and the models measured on them one after the other."""

    def __init__(self, models: list[Draft], asked: list[_Prompt], settings: Settings, progress: bool) -> None:
        self._models, self._asked, self._settings, self._progress = models, asked, settings, progress
        self._texts = Texts(settings.texts, settings.tokens)
        self._used: dict[str, Text] = {}
        for prompt in asked:
            text = self._texts.find(prompt.id, prompt.hash)
            if text:
                self._used[prompt.id] = text
        if not settings.measure_pairs and len(self._used) < len(asked):
            self._each(models[0], self._text, "texts")

    def of(self, model: Draft) -> list[Agreements]:
        """Measure one model on all texts; the first pair makes those that are missing."""
        depths = self._settings.depths

        def one(llm: Llama, prompt: _Prompt) -> Agreements:
            return drafts.agreements(llm, model, prompt.tokens, self._text(llm, prompt), depths)

        return self._each(model, one, model.name)

    def authors(self) -> list[dict[str, Any]]:
        """Count the texts by the model that made them."""
        made: dict[tuple[str, str], int] = {}
        for text in self._used.values():
            key = (text.model, text.fingerprint)
            made[key] = made.get(key, 0) + 1
        own = self._models[0].fingerprint
        return [
            {"model": name, "fingerprint": mark, "texts": count, "first_pair": mark == own}
            for (name, mark), count in made.items()
        ]

    def _each(self, model: Draft, one: Callable[[Llama, _Prompt], Result], name: str) -> list[Result]:
        settings = self._settings
        context = max(len(p.tokens) for p in self._asked) + settings.tokens + max(settings.depths) + 1
        options: dict[str, Any] = {"n_gpu_layers": settings.gpu_layers}
        if settings.threads:
            options["n_threads"] = settings.threads
        with drafts.loaded(model, context, **options) as llm:
            bar = tqdm(self._asked, desc=name, unit="prompts", disable=not self._progress)
            return [one(llm, prompt) for prompt in bar]

    def _text(self, llm: Llama, prompt: _Prompt) -> list[int]:
        if prompt.id not in self._used:
            first = self._models[0]
            tokens = drafts.make_text(llm, prompt.tokens, self._settings.tokens)
            self._used[prompt.id] = self._texts.add(prompt.id, prompt.hash, first.name, first.fingerprint, tokens)
        return self._used[prompt.id].tokens


def _about(settings: Settings, models: list[Draft], asked: list[_Prompt]) -> dict[str, Any]:
    return {
        "twofold": twofold.__version__,
        "llama_cpp_python": llama_cpp.__version__,
        "kernel": default_kernel(),
        "machine": platform.machine(),
        "threads": settings.threads or physical_cores(),
        "gpu_layers": settings.gpu_layers,
        "models": [model.as_dict() for model in models],
        "depths": list(settings.depths),
        "tokens": settings.tokens,
        "prompts": [{"prompt": prompt.id, "kind": prompt.kind, "hash": prompt.hash} for prompt in asked],
        "interval": {"share": 0.95, "method": "bootstrap over prompts", "resamples": simulate.RESAMPLES,
                     "seed": simulate.SEED},
    }  # fmt: skip


def _results(
    measured: dict[str, list[Agreements]], models: list[Draft], asked: list[_Prompt], settings: Settings
) -> dict[str, Any]:
    rows, positions, single = [], [], []
    kinds = [prompt.kind for prompt in asked]
    for model in models:
        found = measured.get(model.name)
        if found is None:
            continue
        groups = simulate.by_kind(kinds, found)
        about = {"draft": model.name, "bpw": model.bpw}
        rows += [{**about, **row} for row in simulate.rows(groups, settings.depths)]
        at_most = max(settings.depths)
        positions += [{**about, "k": at_most, **row} for row in simulate.accepted_by_position(groups, at_most)]
        single += [
            {"draft": model.name, "prompt": prompt.id, "kind": prompt.kind, **text.as_dict()}
            for prompt, text in zip(asked, found, strict=True)
        ]
    return {"rows": rows, "accepted_by_position": positions, "per_prompt": single}
