#!/usr/bin/env python3
"""Test that sampled text has the full model's distribution: chi-square over many seeds, on a tiny random model.

The 2nd and 3rd token after a prompt come of drafts and checks. Given the tokens before them they are counted and held
against the probabilities that the same sampler chain makes of the full model's own logits, decoded without drafts.
Seeds are fixed, so a result can be had again. Prints a table of p-values for several settings of the sampler, faults
that must be found among them.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from llama_cpp import LlamaGrammar
from tqdm import tqdm

import twofold
from chain import accept, distribution
from make_tiny import write_tiny
from twofold import speculate
from twofold.convert import convert
from twofold.decoder import Decoder, make_sampler
from twofold.llama_log import quiet_log

PROMPT = "the people would have there about which"
DRAFT = 2
LENGTH = 3
ENOUGH = 5.0  # expected count of a bin, the usual least for a chi-square test
# Penalties below 0 favour what has come before, so that they matter within three tokens.
_ALL = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 0.7}
_GRAMMAR = "root ::= [a-z ]+"
SETTINGS: dict[str, dict[str, Any]] = {
    "temperature": _ALL,
    "top-k": {**_ALL, "top_k": 6, "temp": 1.0},
    "top-p": {**_ALL, "top_p": 0.5, "temp": 1.0},
    "min-p": {**_ALL, "min_p": 0.1, "temp": 1.0},
    "penalties": {
        **_ALL, "top_k": 6, "temp": 1.0, "repeat_penalty": 1.1, "frequency_penalty": -1.0, "presence_penalty": -0.5
    },
    "grammar": {**_ALL, "grammar": _GRAMMAR},
    "all of them": {
        "temp": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02, "repeat_penalty": 1.1, "frequency_penalty": -1.0,
        "presence_penalty": -0.5, "grammar": _GRAMMAR,
    },
}  # fmt: skip
Prefix = tuple[int, ...]


@dataclass(frozen=True)
class Drawn:
    """What was drawn.

    Attributes
    ----------
    texts
        one for each seed, of `LENGTH` tokens.
    tried, kept
        draft tokens that the full model chose a token beside, and those of them that were its choice.
    """

    texts: list[Prefix]
    tried: int
    kept: int


@dataclass(frozen=True)
class Result:
    """A chi-square test.

    Attributes
    ----------
    chi_square, freedom, p
        the statistic, its degrees of freedom, and how often chance alone makes it as large.
    seeds, contexts, kept_share
        texts drawn; different tokens before a token that were seen often enough; share of draft tokens kept.
    """

    chi_square: float
    freedom: int
    p: float
    seeds: int
    contexts: int
    kept_share: float


def arguments(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of `generate`; grammars are read anew, since one serves one text."""
    made = dict(settings)
    if made.get("grammar"):
        made["grammar"] = LlamaGrammar.from_string(made["grammar"], verbose=False)
    return made


def draw(llm: twofold.Llama, prompt: Sequence[int], settings: Mapping[str, Any], seeds: Sequence[int]) -> Drawn:
    """Generate `LENGTH` tokens with each seed."""
    llm.draft_tokens = DRAFT
    texts, tried, kept = [], 0, 0
    for seed in seeds:
        llm.set_seed(seed)
        generator = llm.generate(prompt, **arguments(settings))
        texts.append(tuple(int(next(generator)) for _ in range(LENGTH)))
        generator.close()
        agreed = llm._stats.from_draft[1:LENGTH]
        tried, kept = tried + len(agreed), kept + sum(agreed)
    return Drawn(texts, tried, kept)


def exact(llm: twofold.Llama, prompt: Sequence[int], settings: Mapping[str, Any], before: Prefix) -> dict[int, float]:
    """Return the probabilities of the token after `before`: the chain's, of the full model's logits without drafts."""
    sampler = make_sampler(llm, **arguments(settings))
    for token in before:
        accept(sampler, token)
    llm.reset()
    llm.eval([*prompt])
    for token in before:
        llm.eval([token])
    ids, p = distribution(sampler, llm.decoder.logits(-1))
    return dict(zip(ids.tolist(), p.tolist(), strict=True))


def bins(counts: Mapping[int, int], p: Mapping[int, float]) -> tuple[list[float], list[int]]:
    """Return expected and observed counts; tokens that are too rare share a bin, and so do those of probability 0.

    A token of probability 0 that was drawn makes its bin's expected count 0.
    """
    total = sum(counts.values())
    common = [token for token in p if p[token] * total >= ENOUGH]
    rare = sum(p[token] for token in p if p[token] * total < ENOUGH) * total
    expected, observed = [p[t] * total for t in common], [counts.get(t, 0) for t in common]
    rest = sum(counts.get(t, 0) for t in p) - sum(observed)
    if rare >= ENOUGH or not common:
        expected, observed = [*expected, rare], [*observed, rest]
    else:
        least = int(np.argmin(expected))
        expected[least] += rare
        observed[least] += rest
    impossible = total - sum(observed)
    return ([*expected, 0.0], [*observed, impossible]) if impossible else (expected, observed)


def compare(drawn: Drawn, probabilities: Callable[[Prefix], Mapping[int, float]]) -> Result:
    """Test the 2nd and 3rd tokens, given those before.

    Given a context, counts after it are multinomial, so statistics and degrees of freedom of all contexts add up.
    """
    after: dict[Prefix, Counter[int]] = {}
    for text in drawn.texts:
        for place in range(1, LENGTH):
            after.setdefault(text[:place], Counter())[text[place]] += 1
    chi_square, freedom, contexts = 0.0, 0, 0
    for before, counts in after.items():
        if counts.total() < 4 * ENOUGH:
            continue
        expected, observed = bins(counts, probabilities(before))
        if len(expected) < 2:
            continue
        contexts, freedom = contexts + 1, freedom + len(expected) - 1
        chi_square += sum((o - e) ** 2 / e if e else math.inf for e, o in zip(expected, observed, strict=True))
    p = upper_tail(chi_square, freedom)
    return Result(chi_square, freedom, p, len(drawn.texts), contexts, drawn.kept / drawn.tried)


def upper_tail(chi_square: float, freedom: int) -> float:
    """Probability that a chi-square variable is as large: the regularized upper incomplete gamma function.

    Series and continued fraction as in Abramowitz & Stegun, 6.5.29 and 6.5.31.
    """
    a, x = freedom / 2, chi_square / 2
    if x <= 0.0 or freedom < 1:
        return 1.0
    if math.isinf(x):
        return 0.0
    front = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1.0 / a
        step = 0
        while term > total * 1e-16:
            step += 1
            term *= x / (a + step)
            total += term
        return max(0.0, 1.0 - front * total)
    tail = 0.0  # from the fraction's far end to its front
    for step in range(500, 0, -1):
        tail = step * (step - a) / (x + 2 * step + 1 - a - tail)
    return front / (x + 1 - a - tail)


# ---- faults that the test has to find ----------------------------------------------------------------


@contextmanager
def base_decides() -> Iterator[None]:
    """Check with the base instead of the full model."""
    real = speculate.check

    def check(decoder: Decoder, *others: Any) -> None:
        with decoder.drafting():
            real(decoder, *others)

    with mock.patch.object(speculate, "check", check):
        yield


@contextmanager
def _choosing(fault: Callable[[Callable[[int], int], int, int], int]) -> Iterator[None]:
    """Choose a token beside a draft token by ``fault(draw, row, draft token)``."""
    real_check, real_sample = speculate.check, Decoder.sample
    draft: list[int] = []

    def check(decoder: Decoder, last: int, drafted: Sequence[int], position: int) -> None:
        draft[:] = drafted
        real_check(decoder, last, drafted, position)

    def sample(self: Decoder, sampler: Any, row: int) -> int:
        def one(place: int) -> int:
            return real_sample(self, sampler, place)

        return fault(one, row, draft[row]) if 0 <= row < len(draft) else one(row)

    with mock.patch.object(speculate, "check", check), mock.patch.object(Decoder, "sample", sample):
        yield


@contextmanager
def all_accepted() -> Iterator[None]:
    """Accept every draft token."""
    with _choosing(lambda draw, row, drafted: drafted):
        yield


@contextmanager
def second_chance() -> Iterator[None]:
    """Draw again from the same probabilities if the draft token was not drawn."""

    def fault(draw: Callable[[int], int], row: int, drafted: int) -> int:
        first = draw(row)
        return first if first == drafted else draw(row)

    with _choosing(fault):
        yield


FAULTS: dict[str, Callable[[], Any]] = {
    "the base decides": base_decides,
    "every draft is accepted": all_accepted,
    "drawn again where refused": second_chance,
}


# ---- running it --------------------------------------------------------------------------------------


def load(base: Path) -> twofold.Llama:
    """Load a tiny pair."""
    return twofold.Llama(base, n_ctx=128, n_threads=1, drafter=None, verbose=False)


def measure(llm: twofold.Llama, settings: Mapping[str, Any], seeds: Sequence[int], fault: str | None = None) -> Result:
    """Draw, faulty or not, and test."""
    prompt = llm.tokenize(PROMPT.encode())
    with ExitStack() as stack:
        if fault:
            stack.enter_context(FAULTS[fault]())
        drawn = draw(llm, prompt, settings, seeds)
    return compare(drawn, lambda before: exact(llm, prompt, settings, before))


def run(base: Path, count: int, progress: bool) -> list[dict[str, Any]]:
    """Test all settings, and all faults with the first."""
    llm = load(base)
    first = next(iter(SETTINGS))
    cases = [(name, None) for name in SETTINGS] + [(first, fault) for fault in FAULTS]
    rows = []
    for name, fault in tqdm(cases, unit="tests", disable=not progress):
        result = measure(llm, SETTINGS[name], range(1, count + 1), fault)
        rows.append({"settings": name, "fault": fault, **asdict(result)})
    llm.close()
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown."""
    lines = ["| sampler | contexts | chi-square | degrees of freedom | p | drafts kept |", "|---|---|---|---|---|---|"]
    for row in rows:
        name = f"{row['settings']}, fault: {row['fault']}" if row["fault"] else row["settings"]
        p = f"{row['p']:.3f}" if row["p"] >= 1e-3 else f"{row['p']:.1e}" if row["p"] else "< 1e-300"
        lines.append(
            f"| {name} | {row['contexts']} | {row['chi_square']:.1f} | {row['freedom']} | {p} "
            f"| {100 * row['kept_share']:.0f} % |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3000, help="texts for each setting (default: 3000)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    parser.add_argument("--progress", action="store_true", help="show a progress bar even where no terminal is")
    args = parser.parse_args()
    quiet_log()
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "tiny.gguf"
        write_tiny(source, "llama")
        rows = run(convert(source, Path(folder) / "tiny").base, args.seeds, args.progress or sys.stderr.isatty())
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"seeds": args.seeds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
