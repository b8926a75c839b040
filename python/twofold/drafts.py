"""What drafts, and how many of its drafts agree with a fixed text: the base of a pair, or a model of its own."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twofold import errors, prompting, report, speculate
from twofold.decoder import end_of_generation
from twofold.llama import Llama
from twofold.pairfile import open_pair, parts_read
from twofold.simulate import Agreements, explore
from twofold.source import Source

_HEAD = 4096  # bytes of each matrix that a fingerprint covers; whole files would take minutes
_TEXT_DRAFT = 3  # draft tokens while a text is made: they change its speed, not the text


@dataclass(frozen=True)
class Draft:
    """A model that drafts.

    Attributes
    ----------
    name, path
        as it is called in tables, and its file.
    bits
        of the residual that verifies; 0 for a model of its own, which has none.
    bpw
        bits a weight: of the split matrices of a base, of the whole file of another model.
    vram_bytes
        what it takes in VRAM when all of it is offloaded, without the KV cache.
    fingerprint
        of shapes, types and the beginnings of all tensors, and of the residual.
    """

    name: str
    path: Path
    bits: int
    bpw: float
    vram_bytes: int
    fingerprint: str

    def as_dict(self) -> dict[str, Any]:
        """Return everything for JSON."""
        kind = "pair" if self.bits else "drafter"
        values = {key: getattr(self, key) for key in ("bpw", "vram_bytes", "fingerprint")}
        return {"draft": self.name, "kind": kind, "residual_bits": self.bits, **values}


def of_pair(name: str, path: Path, bits: int | None) -> Draft:
    """Describe the base of a pair.

    Raises
    ------
    ArgumentError
        if the residual has fewer bits than asked for.
    FileAccessError, FormatError, FormatVersionError, MismatchError
        as `open_pair` does.
    """
    pair = open_pair(path)
    bits = bits or pair.residual.bits
    if bits > pair.residual.bits:
        raise errors.ArgumentError(
            f"{pair.residual.path}: holds {pair.residual.bits} bits of residual, {bits} are asked for; "
            "give --residual-bits what all pairs have, or convert the model again"
        )
    totals = report.totals(report.inspect(pair))
    digest = _digest(Source(path))
    for tensor in pair.completed.values():
        for part in parts_read(tensor, bits):
            digest.update(part.reshape(-1)[:_HEAD].tobytes())
    return Draft(name, path, bits, totals["base_bpw"], totals["vram_bytes"], digest.hexdigest()[:16])


def of_model(name: str, path: Path) -> Draft:
    """Describe an ordinary GGUF.

    Raises
    ------
    FileAccessError, FormatError
        if a file is missing, not GGUF, or shorter than its tensors.
    """
    source = Source(path)
    tensors = source.tensors.values()
    count = sum(tensor.bytes for tensor in tensors)
    weights = sum(tensor.weights for tensor in tensors)
    return Draft(name, path, 0, 8 * count / max(1, weights), count, _digest(source).hexdigest()[:16])


def _digest(source: Source) -> Any:
    digest = hashlib.sha256()
    for tensor in source.tensors.values():
        digest.update(f"{tensor.name} {tensor.kind.name} {tensor.shape}".encode())
        digest.update(tensor.data[:_HEAD].tobytes())
    return digest


@contextmanager
def loaded(draft: Draft, context: int, **options: Any) -> Iterator[Llama]:
    """Load a model with room for `context` tokens, and close it at the end."""
    llm = prompting.load(str(draft.path), residual_bits=draft.bits, n_ctx=context, **options)
    try:
        yield llm
    finally:
        llm.close()


def make_text(llm: Llama, prompt: Sequence[int], count: int) -> list[int]:
    """Return up to `count` greedy tokens of the full model; an end-of-generation token ends them and is one of them."""
    llm.draft_tokens = _TEXT_DRAFT
    llm.reset()
    made: list[int] = []
    generator = llm.generate(prompt, temp=0.0)
    for token in generator:
        made.append(int(token))
        if len(made) == count or end_of_generation(llm, token):
            break
    generator.close()
    return made


def agreements(
    llm: Llama, draft: Draft, prompt: Sequence[int], text: Sequence[int], depths: Sequence[int]
) -> Agreements:
    """Draft at every place of the text that a run of one of these depths visits."""
    _feed_prompt(llm, prompt)
    count = _base_drafts(llm, len(prompt), text) if draft.bits else _own_drafts(llm, len(prompt), text)
    return explore(depths, len(text), count)


def _feed_prompt(llm: Llama, prompt: Sequence[int]) -> None:
    """Leave the entries of just this prompt in the cache; those of a text that was made from it are kept."""
    known = llm.longest_token_prefix(llm._input_ids.tolist(), prompt)
    if known == len(prompt) and llm._decoder.keep(known) == known:
        llm.n_tokens = known
    else:
        llm.reset()
        llm.eval(prompt)


def _base_drafts(llm: Llama, start: int, text: Sequence[int]) -> Callable[[int, int], int]:
    """Return what counts agreeing drafts of the base; places must ascend, so each token is verified only once."""

    def count(place: int, limit: int) -> int:
        llm.eval(text[llm.n_tokens - start : place])
        return speculate.agreeing(llm._decoder, text[place:], start + place, limit)

    return count


def _own_drafts(llm: Llama, start: int, text: Sequence[int]) -> Callable[[int, int], int]:
    """Return what counts agreeing drafts of a model with a cache of its own.

    All its entries are its own, so the draft after a text does not depend on where drafting began: one token at a time
    over the text gives the drafts of all places.
    """
    runs = [0] * len(text)  # agreeing drafts from each place on
    agrees = []
    for place in range(len(text) - 1):
        llm._decoder.decode([text[place]], start + place, all_rows=False)
        agrees.append(llm._decoder.greedy(-1) == text[place + 1])
    for place in reversed(range(len(agrees))):
        runs[place] = runs[place + 1] + 1 if agrees[place] else 0
    return lambda place, limit: min(runs[place], limit)
