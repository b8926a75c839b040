"""What `twofold bench` is asked to do, checked, and what it needs, before a model is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from twofold import errors, info, prompting, report
from twofold.architecture import vocabulary
from twofold.decoder import BaseLlama, opening, ordinary_tokens
from twofold.loop import MAX_DRAFT
from twofold.pairfile import open_pair, residual_bytes
from twofold.prompts import BY_NAME, KINDS, RANDOM, prompts, random_tokens

DRAFTS, LOOKUPS = (2, 3, 4, 6), (2, 10)


@dataclass(frozen=True)
class Settings:
    """What to measure.

    Attributes
    ----------
    pair, residual
        ``NAME.base.gguf``, and its residual (default: beside it).
    drafts
        fixed numbers of draft tokens, 1 to 32.
    bits
        of the residual; empty: all in the file.
    compare
        ordinary GGUF files.
    lookups
        lengths of llama_cpp's prompt lookup with them.
    drafter
        A small model that drafts for them.
    tokens
        most tokens of a text.
    count, kinds
        the first prompts of these kinds; None: all.
    temp, seed
        0: greedy; else drawn from the whole distribution.
    repeat
        times that everything is done.
    threads
        None: one a core.
    gpu_layers
        layers in VRAM; -1: all.
    claim
        False: base products are left to ggml.
    """

    pair: Path
    residual: Path | None = None
    drafts: tuple[int, ...] = DRAFTS
    bits: tuple[int, ...] = ()
    compare: tuple[Path, ...] = ()
    lookups: tuple[int, ...] = LOOKUPS
    drafter: Path | None = None
    tokens: int = 64
    count: int | None = 20
    kinds: tuple[str, ...] = KINDS
    temp: float = 0.0
    seed: int = 1
    repeat: int = 1
    threads: int | None = None
    gpu_layers: int = -1
    claim: bool | None = None

    @property
    def sampling(self) -> dict[str, float]:
        """Keywords of `Llama.generate`: nothing is cut off the distribution."""
        return {"temp": self.temp, **({"top_k": 0, "top_p": 1.0, "min_p": 0.0} if self.temp else {})}


@dataclass(frozen=True)
class Plan:
    """What is done and needed, known before a model is loaded.

    Attributes
    ----------
    settings
        with the bits that the pair has.
    asked
        the prompts.
    tokens
        of each prompt, by model file.
    context
        tokens of context that all models get.
    ram
        bytes for each purpose.
    """

    settings: Settings
    asked: list[dict[str, str]]
    tokens: dict[Path, list[list[int]]]
    context: int
    ram: dict[str, int] = field(default_factory=dict)

    def note(self) -> str:
        """Say how much RAM the models need, in one line."""
        needed, free = sum(self.ram.values()), info.available_ram()
        parts = ", ".join(f"{name} {report.size(count)}" for name, count in self.ram.items())
        there = "" if free is None else f"; {report.size(free)} are available"
        warning = " - too little, the figures would be those of the disk" if free is not None and free < needed else ""
        return f"about {report.size(needed)} of RAM and VRAM are needed ({parts}){there}{warning}"


def plan(settings: Settings) -> Plan:
    """Check the settings and the files, and find out what is needed.

    Raises
    ------
    ArgumentError
        for settings outside what is allowed.
    MismatchError
        if a model has another vocabulary than the pair.
    FileAccessError, FormatError, FormatVersionError, UnsupportedError
        if a file is missing, damaged, or nothing that can draft.
    """
    _check(settings)
    pair = open_pair(settings.pair, settings.residual)
    bits = settings.bits or (pair.residual.bits,)
    if max(bits) > pair.residual.bits:
        raise errors.ArgumentError(
            f"{pair.residual.path}: holds {pair.residual.bits} bits of residual, {max(bits)} are asked for"
        )
    settings = replace(settings, bits=bits)
    asked = prompts(settings.count, settings.kinds)
    others = [*settings.compare, *filter(None, [settings.drafter])]
    _check_vocabularies(settings.pair, others)
    tokens = {path: _tokens(path, asked) for path in (settings.pair, *settings.compare)}
    longest = max(len(prompt) for found in tokens.values() for prompt in found)
    room = longest + settings.tokens + max(0, *settings.drafts, *settings.lookups) + 1
    ram = {"base": settings.pair.stat().st_size}
    if pair.has_base_kernels and settings.claim is not False:
        ram["base rearranged"] = ram["base"]
    ram["residual"] = sum(residual_bytes(tensor, max(bits)) for tensor in pair.residual.tensors())
    ram |= {path.name: path.stat().st_size for path in others}
    return Plan(settings, asked, tokens, -(-room // 256) * 256, ram)


def _check(settings: Settings) -> None:
    allowed = (*KINDS, *BY_NAME)
    if not settings.kinds or not set(settings.kinds) <= set(allowed):
        raise errors.ArgumentError(f"kinds {list(settings.kinds)}: one or more of {', '.join(allowed)} are allowed")
    if not all(1 <= k <= MAX_DRAFT for k in (*settings.drafts, *settings.lookups)):
        raise errors.ArgumentError(
            f"drafts {list(settings.drafts)}, lookups {list(settings.lookups)}: integers from 1 to {MAX_DRAFT} are "
            "allowed; plain decoding is always measured"
        )
    if settings.drafter and not settings.compare:
        raise errors.ArgumentError("the drafter has nothing to draft for: name ordinary GGUF files with --compare")
    if settings.drafter and settings.temp:
        raise errors.ArgumentError("drafts of a separate model are checked greedily: leave out --drafter or --temp")
    names = [path.name for path in settings.compare]
    if len(set(names)) < len(names):
        raise errors.ArgumentError(f"files to compare {names}: give them different names, tables are read by name")


def _check_vocabularies(pair: Path, others: Sequence[Path]) -> None:
    own = vocabulary(pair)
    for path in others:
        if vocabulary(path) != own:
            raise errors.MismatchError(
                f"{path}: another vocabulary than {pair}: the two would count different tokens a second; use models "
                "of one family"
            )


def _tokens(path: Path, asked: Sequence[dict[str, str]]) -> list[list[int]]:
    """Return the prompts' tokens, in the model's chat template if it has one; random ones as they are."""
    llm = prompting.load(str(path), vocab_only=True)
    try:
        return [_prompt_tokens(llm, prompt) for prompt in asked]
    finally:
        llm.close()


def _prompt_tokens(llm: BaseLlama, prompt: dict[str, str]) -> list[int]:
    if prompt["kind"] == RANDOM:
        return [*opening(llm), *random_tokens(prompt["id"], ordinary_tokens(llm))]
    if prompting.has_template(llm):
        return prompting.chat_tokens(llm, [{"role": "user", "content": prompt["prompt"]}])
    return prompting.text_tokens(llm, prompt["prompt"])
