#!/usr/bin/env python3
"""How many sampled drafts are accepted, and how many other ways to couple draft and check would accept.

A draft token is drawn from the base's probabilities q, the full model's token from its own p. How often both are the
same depends on how the two draws are coupled:

    race      each token has the same exponential noise in both draws, the smallest noise / probability wins: twofold's
    maximal   accepted with probability min(1, p/q), else drawn from the positive part of p - q (Leviathan et al. 2023)
    inverse   the same random number runs through both cumulative distributions, in the sampler's order
    likeliest the base's likeliest token is drafted

For each temperature the loop runs with drafts of a fixed length. At the places it visits, p and q are those of the very
sampler chain, and what each way would accept there is worked out exactly, beside what the loop did accept.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm

import twofold
from chain import Ids, Probabilities, distribution
from twofold import prompting, simulate
from twofold.decoder import Decoder, end_of_generation
from twofold.pace import Fixed
from twofold.prompts import prompts

TEMPERATURES = (0.0, 0.5, 0.8, 1.0)
WAYS = ("race", "maximal", "inverse")
Drawn = tuple[Ids, Probabilities]


def both(p: Drawn, q: Drawn, token: int, way: str) -> float:
    """Probability that both draws give `token`."""
    (at_p,), (at_q,) = np.nonzero(p[0] == token), np.nonzero(q[0] == token)
    if not len(at_p) or not len(at_q):
        return 0.0
    mine, other = p[1][at_p[0]], q[1][at_q[0]]
    if way == "maximal":
        return float(min(mine, other))
    if way == "inverse":
        ends = p[1][: at_p[0] + 1].sum(), q[1][: at_q[0] + 1].sum()
        return float(max(0.0, min(ends) - max(ends[0] - mine, ends[1] - other)))
    return 1.0 / float(np.maximum(*(_spread(one, p, q) / one[1][at] for one, at in ((p, at_p[0]), (q, at_q[0])))).sum())


def _spread(one: Drawn, p: Drawn, q: Drawn) -> Probabilities:
    """Probabilities of a distribution over the tokens of both."""
    tokens = np.union1d(p[0], q[0])
    made = np.zeros(len(tokens))
    made[np.searchsorted(tokens, one[0])] = one[1]
    return made


def accepted(p: Drawn, q: Drawn, way: str) -> float:
    """Probability that a draft token drawn from q is accepted."""
    if way == "likeliest":
        return float(p[1][p[0] == q[0][np.argmax(q[1])]].sum())
    return sum(both(p, q, int(token), way) for token in np.intersect1d(p[0], q[0]))


@dataclass
class Round:
    """A draft and its check: draft tokens, the distributions they and the full model's were drawn from, tokens kept."""

    drafted: list[int] = field(default_factory=list)
    q: list[Drawn] = field(default_factory=list)
    p: list[Drawn] = field(default_factory=list)
    kept: int | None = None


class Recorder(Fixed):
    """Drafts of one length, and a record of what they were drawn from."""

    def __init__(self, length: int, decoder: Decoder, distribute: Callable[[Any], Drawn]) -> None:
        super().__init__(length)
        self._decoder, self._distribute = decoder, distribute
        self.rounds: list[Round] = []

    def begin(self, most: int) -> int:
        """Begin a record."""
        self.rounds.append(Round())
        return super().begin(most)

    def goes_on(self, confidence: Callable[[], float], *, made: bool, copied: int = 0) -> bool:
        """Take the draft token and its distribution."""
        row, token = cast(partial[float], confidence).args
        self.rounds[-1].drafted.append(token)
        self.rounds[-1].q.append(self._distribute(self._decoder.logits(row)))
        return True

    def end(self, drafted: int, draft_s: float, check_s: float) -> None:
        """Take the check's distributions."""
        self.rounds[-1].p = [self._distribute(self._decoder.logits(row)) for row in range(drafted)]

    def outcome(self, kept: int) -> None:
        """Take how many were kept."""
        self.rounds[-1].kept = kept


def record(llm: twofold.Llama, prompt: Sequence[int], count: int, settings: dict[str, float], k: int) -> list[Round]:
    """Generate, and return the rounds that were not cut short."""

    def distribute(logits: Any) -> Drawn:
        if llm._sampler is None:
            return np.array([np.argmax(logits)], np.int32), np.ones(1)
        return distribution(llm._sampler, logits)

    recorder = Recorder(k, llm.decoder, distribute)
    llm._pace = recorder
    generator = llm.generate(prompt, **settings)
    for token in itertools.islice(generator, count):
        if end_of_generation(llm, token):
            break
    generator.close()
    return [one for one in recorder.rounds if one.kept is not None and len(one.drafted) == k]


def summary(texts: Sequence[Sequence[Round]], k: int) -> dict[str, Any]:
    """Tokens a check by the loop and as expected of each way; acceptance of a draft token that the loop came to.

    What a way yields a check is expected over its random numbers, for the draft made: draft tokens are distributed by q
    whatever the way.
    """
    rounds = [one for text in texts for one in text]
    checks = np.array([len(text) for text in texts])
    found: dict[str, Any] = {"checks": len(rounds), "tokens_per_check": {}, "interval": {}, "acceptance": {}}

    def add(name: str, of_round: Callable[[Round], float]) -> None:
        tokens = np.array([sum(of_round(one) for one in text) for text in texts])
        found["tokens_per_check"][name] = float(tokens.sum() / checks.sum())
        found["interval"][name] = simulate.interval(cast(Any, tokens), checks)

    add("measured", lambda one: 1.0 + cast(int, one.kept))
    for way in WAYS:
        add(way, partial(expected, way=way))
    gain = np.array([sum(expected(one, "maximal") - expected(one, "race") for one in text) for text in texts])
    found["maximal_over_race"] = float(gain.sum() / checks.sum()) / found["tokens_per_check"]["race"]
    came_to = [(one, i) for one in rounds for i in range(min(cast(int, one.kept) + 1, k))]
    found["positions"] = len(came_to)
    found["acceptance"]["measured"] = float(np.mean([cast(int, one.kept) > i for one, i in came_to]))
    for way in (*WAYS, "likeliest"):
        found["acceptance"][way] = float(np.mean([accepted(one.p[i], one.q[i], way) for one, i in came_to]))
    return found


def expected(one: Round, way: str) -> float:
    """Tokens that a check of this draft yields on average."""
    total = path = 1.0
    for token, p, q in zip(one.drafted, one.p, one.q, strict=True):
        path *= both(p, q, token, way) / float(q[1][q[0] == token][0])
        total += path
    return total


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    ways = ("measured", *WAYS)
    lines = [
        "| temperature | checks | tokens a check: " + " | ".join(ways) + " | acceptance: " + " | ".join(ways)
        + " | likeliest | maximal over race |"
    ]  # fmt: skip
    lines.append("|---" * (2 * len(ways) + 4) + "|")
    for row in rows:
        low, high = row["interval"]["measured"]
        span = f" [{low:.2f} {high:.2f}]" if low is not None else ""
        tokens = [f"{row['tokens_per_check'][way]:.2f}" for way in ways]
        shares = [f"{row['acceptance'][way]:.3f}" for way in (*ways, "likeliest")]
        cells = [f"{row['temperature']:g}", str(row["checks"]), tokens[0] + span, *tokens[1:], *shares]
        lines.append("| " + " | ".join([*cells, f"{100 * row['maximal_over_race']:+.1f} %"]) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="NAME.base.gguf")
    parser.add_argument("--temperatures", type=float, nargs="+", default=TEMPERATURES, metavar="T")
    parser.add_argument("--top-p", type=float, default=0.95, help="cut off before the temperature (default: 0.95)")
    parser.add_argument("--top-k", type=int, default=0, help="default: 0, nothing is cut off")
    parser.add_argument("--min-p", type=float, default=0.0, help="default: 0, nothing is cut off")
    parser.add_argument("--draft", type=int, default=3, metavar="K", help="tokens of a draft, 1 to 32 (default: 3)")
    parser.add_argument("--prompts", type=int, default=20, metavar="N", help="of the package's set (default: 20)")
    parser.add_argument("-n", type=int, default=48, metavar="TOKENS", help="length of a text (default: 48)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args()
    llm = prompting.load(str(args.base), n_ctx=1024, drafter=None)
    asked = [prompting.chat_tokens(llm, [{"role": "user", "content": one["prompt"]}]) for one in prompts(args.prompts)]
    rows = []
    bar = tqdm(total=len(args.temperatures) * len(asked), unit="texts", disable=not sys.stderr.isatty())
    for temperature in args.temperatures:
        settings = {"temp": temperature, "top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p}
        texts = []
        for seed, prompt in enumerate(asked, 1):
            llm.set_seed(seed)
            texts.append(record(llm, prompt, args.n, settings, args.draft))
            bar.update()
        rows.append({"temperature": temperature, **summary(texts, args.draft)})
    bar.close()
    llm.close()
    print(table(rows))
    if args.json:
        cut = {"top_k": args.top_k, "top_p": args.top_p, "min_p": args.min_p}
        about = {"base": args.base.name, **cut, "draft": args.draft, "n": args.n, "prompts": len(asked)}
        args.json.write_text(json.dumps({**about, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
