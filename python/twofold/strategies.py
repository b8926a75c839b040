"""Ways of making text that `twofold bench` compares; each makes the text of a prompt and says what it took."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from twofold import errors, separate
from twofold.decoder import BaseLlama, end_of_generation
from twofold.llama import Llama
from twofold.loop import MAX_DRAFT
from twofold.ordinary import OrdinaryLlama
from twofold.pace import Auto, Fixed, Pace
from twofold.propose import Lookup, Proposer
from twofold.rollback import Cells
from twofold.stats import Stats

Tokens = Sequence[int]
Sampling = dict[str, float]


@dataclass(frozen=True)
class Run:
    """A text that was made.

    Attributes
    ----------
    tokens
        of the text, an end-of-generation token among them.
    seconds
        from the first token to the last.
    draft_s, check_s
        spent on drafts and in decodes of the full model after the first token.
    complete_checks, complete_tokens
        checks that the end of the text did not cut short, and what they yielded.
    """

    tokens: list[int]
    seconds: float
    draft_s: float
    check_s: float
    complete_checks: int
    complete_tokens: int


@dataclass(frozen=True)
class Strategy:
    """One way.

    Attributes
    ----------
    name, model, draft
        as it is called; the model's name; tokens drafted, ``"auto"``, ``"auto+ngram"``, or what else drafts.
    bits
        of the residual; None for an ordinary GGUF.
    plain
        The strategy that decodes the same model plainly, whose text this one must give; None for that one itself.
    llm
        The model that checks.
    run
        Make a text: prompt, most tokens, seed.
    """

    name: str
    model: str
    draft: int | str
    bits: int | None
    plain: str | None
    llm: BaseLlama
    run: Callable[[Tokens, int, int], Run]

    def about(self) -> dict[str, Any]:
        """Return what tells it from others, for JSON."""
        return {"strategy": self.name, "model": self.model, "residual_bits": self.bits, "draft": self.draft}

    def margin(self, tokens: Tokens) -> float:
        """Difference between the two largest logits after these tokens: near 0, rounding decides what comes next."""
        if isinstance(self.llm, Llama) and self.bits:
            self.llm.residual_bits = self.bits
        self.llm.reset()
        self.llm.eval(tokens)
        second, first = np.partition(self.llm.decoder.logits(-1), -2)[-2:]
        return float(first - second)


def of_pair(
    llm: Llama, model: str, bits: Sequence[int], drafts: Sequence[int], sampling: Sampling
) -> Iterator[Strategy]:
    """Yield, for all bits: plain decoding, each number of drafts, ``auto`` without and with n-grams."""
    for own in bits:
        plain = f"r{own} plain"

        def strategy(
            name: str, draft: int | Literal["auto", "auto+ngram"], same: str | None, own: int = own
        ) -> Strategy:
            # A pace and a proposer of its own for each, which go on learning from prompt to prompt.
            pace: Pace = Fixed(draft) if isinstance(draft, int) else Auto(MAX_DRAFT)
            proposer = Lookup() if draft == "auto+ngram" else None
            return Strategy(
                name, model, draft, own, same, llm, lambda *text: _run_pair(llm, own, pace, proposer, sampling, *text)
            )

        yield strategy(plain, 0, None)
        yield from (strategy(f"r{own} k={k}", k, plain) for k in drafts)
        yield strategy(f"r{own} auto", "auto", plain)
        yield strategy(f"r{own} auto+ngram", "auto+ngram", plain)


def of_ordinary(llm: OrdinaryLlama, model: str, lookups: Sequence[int], sampling: Sampling) -> Iterator[Strategy]:
    """Yield plain decoding by llama_cpp, and with prompt lookup of each length.

    Raises
    ------
    UnsupportedError
        for prompt lookup with a model whose state llama_cpp cannot cut back.
    """
    if lookups and not isinstance(llm.decoder.rollback, Cells):
        raise errors.UnsupportedError(
            f"{model}: llama_cpp has no prompt lookup for models with a state; give --lookup alone"
        )
    plain = f"{_short(model)} plain"
    yield Strategy(plain, model, 0, None, None, llm, lambda *text: _run_plain(llm, sampling, *text))

    def lookup(length: int) -> Strategy:
        def run(*text: Any) -> Run:
            return _run_lookup(llm, length, sampling, *text)

        return Strategy(f"{_short(model)} lookup {length}", model, f"lookup {length}", None, plain, llm, run)

    yield from map(lookup, lookups)


def of_two(
    llm: OrdinaryLlama, model: str, drafter: OrdinaryLlama, small: str, drafts: Sequence[int]
) -> Iterator[Strategy]:
    """Yield greedy decoding with drafts of a separate model, for each number of drafts."""

    def two(length: int) -> Strategy:
        def run(prompt: Tokens, count: int, _: int) -> Run:
            return _run_two(llm, drafter, length, prompt, count)

        name = f"{_short(model)} + {_short(small)} k={length}"
        return Strategy(name, model, f"{small} k={length}", None, f"{_short(model)} plain", llm, run)

    yield from map(two, drafts)


def _short(model: str) -> str:
    return model.removesuffix(".gguf")


# ---- runs --------------------------------------------------------------------------------------------


def _take(
    llm: BaseLlama, tokens: Iterator[int], count: int, at_first: Callable[[], None] = lambda: None
) -> tuple[list[int], float]:
    """Take up to `count` tokens, or up to the end of the text; return them and the seconds after the first."""
    made: list[int] = []
    start = end = 0.0
    for token in tokens:
        end = time.perf_counter()
        if not made:
            start = end
            at_first()
        made.append(int(token))
        if len(made) == count or end_of_generation(llm, token):
            break
    return made, end - start


def _run_pair(
    llm: Llama,
    bits: int,
    pace: Pace,
    proposer: Proposer | None,
    sampling: Sampling,
    prompt: Tokens,
    count: int,
    seed: int,
) -> Run:
    llm.residual_bits = bits
    llm._pace, llm._proposer = pace, proposer
    llm.set_seed(seed)
    llm.reset()
    generator = llm.generate(prompt, **sampling)  # type: ignore[arg-type]
    made, seconds = _take(llm, generator, count)
    generator.close()
    stats = llm._stats
    return Run(made, seconds, stats.draft_s, stats.verify_s, stats.complete_checks, stats.complete_tokens)


def _run_ordinary(
    llm: OrdinaryLlama, sampling: Sampling, prompt: Tokens, count: int, seed: int
) -> tuple[list[int], float]:
    def set_back() -> None:
        llm.decode_s = 0.0

    llm.set_seed(seed)
    llm.reset()
    generator = llm.generate(prompt, **sampling)
    made, seconds = _take(llm, generator, count, set_back)
    generator.close()
    return made, seconds


def _run_plain(llm: OrdinaryLlama, sampling: Sampling, *text: Any) -> Run:
    made, seconds = _run_ordinary(llm, sampling, *text)
    return Run(made, seconds, 0.0, llm.decode_s, len(made) - 1, len(made) - 1)


def _run_lookup(llm: OrdinaryLlama, length: int, sampling: Sampling, *text: Any) -> Run:
    with llm.looking_up(length) as lookup:
        made, seconds = _run_ordinary(llm, sampling, *text)
    lengths = lookup.lengths or [0]
    return Run(made, seconds, lookup.seconds, llm.decode_s, len(lengths) - 1, lengths[-1] - lengths[0])


def _run_two(llm: OrdinaryLlama, drafter: OrdinaryLlama, length: int, prompt: Tokens, count: int) -> Run:
    stats = Stats()
    tokens = separate.generate(llm.decoder, drafter.decoder, prompt, length, stats)
    made, seconds = _take(llm, tokens, count)
    return Run(made, seconds, stats.draft_s, stats.verify_s, stats.complete_checks, stats.complete_tokens)
