#!/usr/bin/env python3
"""Whether small trees would pay: a draft of k tokens with the base's second choices beside some of them in the check.

Such a sibling costs a column of the check and no draft token. Where the draft is first refused and the sibling is what
the full model chose, the check yields one token more: the sibling's row gives the token after it. Nothing is built for
it; this works out from recorded drafts what it would give.

Along greedy texts of the full model a draft is made at every place, as deep as the widest check asks for, and kept with
the base's two likeliest tokens (--record FILE keeps that for another run with other costs). From it follow tokens per
check for the same number of columns, and with costs in milliseconds the tokens a second of the best chain and the best
tree. Costs of a machine: scripts/time_decodes.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
from tqdm import tqdm

import twofold
from twofold import drafts, prompting, simulate, speculate
from twofold.pace import Fixed
from twofold.prompts import prompts

BUDGETS = (4, 6, 8, 12, 16)
EDGES = (0.2, 0.4, 0.6, 0.75, 0.85, 0.92, 0.96, 0.99)  # of confidence, as in pace.py
RATES = np.geomspace(0.002, 2.0, 40)  # tokens a millisecond, tried for rules that weigh a token against its time


@dataclass(frozen=True)
class Place:
    """A draft made at a place of a text.

    Attributes
    ----------
    confidence
        probability that the base gives each of its draft tokens.
    agreed
        draft tokens that are the text's before the first that is not, or before the text's end.
    second
        whether the base's second choice is the text's token where the draft is first refused.
    """

    confidence: list[float]
    agreed: int
    second: bool


Text = list[Place]  # by place; the last token of a text has none


class Recorder(Fixed):
    """Drafts of one length, with the base's second choices."""

    def __init__(self, length: int, llm: twofold.Llama) -> None:
        super().__init__(length)
        self._llm = llm
        self.confidence: list[float] = []
        self.seconds: list[int] = []

    def goes_on(self, confidence: Callable[[], float], *, made: bool, copied: int = 0) -> bool:
        """Keep what the base gives this row's two likeliest tokens."""
        row, first = cast(partial[float], confidence).args
        likely = np.argpartition(self._llm.decoder.logits(row), -2)[-2:]
        self.confidence.append(confidence())
        self.seconds.append(int(likely[0] if likely[0] != first else likely[1]))
        return True


def record(llm: twofold.Llama, prompt: Sequence[int], count: int, depth: int) -> Text:
    """Make a greedy text and a draft at each of its places."""
    text = drafts.make_text(llm, prompt, count)
    llm.reset()
    llm.eval(prompt)
    places = []
    for place in range(len(text) - 1):
        pace = Recorder(depth, llm)
        made = speculate.draft(llm.decoder, text[place], llm.n_tokens, depth, speculate.Drafting(pace))
        agreed = 0
        for token, wanted in zip(made, text[place + 1 :], strict=False):
            if token != wanted:
                break
            agreed += 1
        refused = place + 1 + agreed
        second = agreed < depth and refused < len(text) and pace.seconds[agreed] == text[refused]
        places.append(Place(pace.confidence, agreed, second))
        llm.eval([text[place]])
    return places


# ---- what a check yields -----------------------------------------------------------------------------


class Odds:
    """By confidence of a draft token, if those before it are kept: that it is kept, that the second choice is right."""

    def __init__(self, texts: Sequence[Text]) -> None:
        tries, kept, second = (np.full(len(EDGES) + 1, start) for start in (1.0, 0.5, 0.1))
        for text in texts:
            for number, place in enumerate(text):
                judged = min(len(place.confidence), len(text) - number)
                for i in range(min(place.agreed + 1, judged)):
                    found = bisect_left(EDGES, place.confidence[i])
                    tries[found] += 1
                    kept[found] += i < place.agreed
                    second[found] += i == place.agreed and place.second
        self.kept, self.second, self.tries = kept / tries, second / tries, tries
        self.ahead = float(kept.sum() / tries.sum())  # of a draft token that is not made yet

    def values(self, place: Place) -> tuple[np.ndarray, np.ndarray]:
        """Return for each position what a draft token adds to the check on average, and what a sibling adds."""
        found = [bisect_left(EDGES, confidence) for confidence in place.confidence]
        path = np.cumprod(self.kept[found])
        return path, np.concatenate(([1.0], path[:-1])) * self.second[found]


Plan = Callable[[Place], tuple[int, set[int]]]  # draft tokens, and at which of them (from 0) a sibling stands


def chain(k: int) -> Plan:
    """Draft k tokens, no siblings."""
    return lambda place: (k, set())


def least_confident(k: int, siblings: int) -> Plan:
    """Put siblings where the base is least sure of itself."""
    return lambda place: (k, {int(i) for i in np.argsort(place.confidence[:k])[:siblings]})


def most_valuable(odds: Odds, k: int, siblings: int) -> Plan:
    """Put siblings where they add most on average."""
    return lambda place: (k, {int(i) for i in np.argsort(-odds.values(place)[1][:k])[:siblings]})


def ideal(k: int) -> Plan:
    """Put one sibling, always where the draft is refused: more than any rule can know."""
    return lambda place: (k, {place.agreed})


def weighed(odds: Odds, token_cost: float, sibling_cost: float, most: int) -> Plan:
    """Draft as long as another token adds more than it costs, as pace.py does; then put siblings by the same measure.

    Costs are in tokens. Draft tokens and siblings are at most `most` together.
    """

    def plan(place: Place) -> tuple[int, set[int]]:
        path, siblings = odds.values(place)
        before = np.concatenate(([1.0], path[:-1]))  # what is known when a token is about to be drafted
        k = min(int((before * odds.ahead > token_cost).sum()), most)
        worth = [int(i) for i in np.argsort(-siblings[:k]) if siblings[i] > sibling_cost]
        return k, set(worth[: most - k])

    return plan


@dataclass(frozen=True)
class Found:
    """By text tokens and checks; on average over all checks draft tokens, and columns beside the first."""

    tokens: np.ndarray
    checks: np.ndarray
    drafted: float
    columns: float

    @property
    def yielded(self) -> float:
        """Tokens per check."""
        return float(self.tokens.sum() / self.checks.sum())


def follow(texts: Sequence[Text], plan: Plan) -> Found:
    """Run through all texts; checks that begin too near the end for the deepest draft do not count."""
    tokens, checks, drafted, columns = [], [], 0, 0
    for text in texts:
        steps, place = [], 0
        while place <= len(text) - max(BUDGETS):
            k, siblings = plan(text[place])
            kept = min(text[place].agreed, k)
            more = kept < k and kept in siblings and text[place].second
            steps.append((kept + 1 + more, k, k + len(siblings)))
            place += kept + 1 + more
        tokens.append(sum(step[0] for step in steps))
        checks.append(len(steps))
        drafted += sum(step[1] for step in steps)
        columns += sum(step[2] for step in steps)
    count = sum(checks)
    return Found(np.array(tokens), np.array(checks), drafted / count, columns / count)


def gain_interval(new: Found, old: Found) -> tuple[float, float]:
    """95 % interval of the ratio of tokens per check, by bootstrap over texts."""
    count = len(new.checks)
    draws = np.random.default_rng(simulate.SEED).integers(0, count, (simulate.RESAMPLES, count))
    one, other = (f.tokens[draws].sum(axis=1) / f.checks[draws].sum(axis=1) for f in (new, old))
    low, high = np.percentile(one / other - 1, (2.5, 97.5))
    return float(low), float(high)


def by_columns(texts: Sequence[Text], odds: Odds, budget: int) -> dict[str, Any]:
    """Compare a chain with trees of as many columns."""
    most = budget - 1
    plain = follow(texts, chain(most))
    row: dict[str, Any] = {"columns": budget, "chain": plain.yielded}
    makers: dict[str, Callable[[int, int], Plan]] = {
        "least_confident": least_confident,
        "most_valuable": partial(most_valuable, odds),
    }
    for name, make in makers.items():
        found = {s: follow(texts, make(most - s, s)) for s in range(1, most // 2 + 1)}
        best = max(found, key=lambda s: found[s].yielded)
        low, high = gain_interval(found[best], plain)
        row[name] = {
            "siblings": best, "yielded": found[best].yielded, "gain": found[best].yielded / plain.yielded - 1,
            "low": low, "high": high,
        }  # fmt: skip
    row["ideal"] = follow(texts, ideal(most - 1)).yielded
    return row


# ---- with costs --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Costs:
    """Milliseconds of a draft token, a check of one column, and each further one after `free` columns."""

    draft: float
    check: float
    column: float
    free: int

    def rate(self, found: Found) -> float:
        """Tokens a second; columns are counted on average, as if the cost were a line from `free` on."""
        wider = max(0.0, found.columns + 1 - self.free)
        return 1e3 * found.yielded / (found.drafted * self.draft + self.check + wider * self.column)


def by_time(texts: Sequence[Text], odds: Odds, costs: Costs, most: int) -> list[dict[str, Any]]:
    """Find the best chain and tree, of fixed shape and weighed place by place."""
    shapes = [(k, s) for k in range(most + 1) for s in range(min(k, most - k) + 1)]
    kinds: dict[str, list[tuple[str, Plan]]] = {
        "chain, fixed": [(f"k = {k}", chain(k)) for k in range(most + 1)],
        "tree, fixed": [(f"k = {k}, {s} beside", most_valuable(odds, k, s)) for k, s in shapes],
        "chain, weighed": [("", weighed(odds, r * (costs.draft + costs.column), 2.0, most)) for r in RATES],
        "tree, weighed": [("", weighed(odds, r * (costs.draft + costs.column), r * costs.column, most)) for r in RATES],
    }
    rows = []
    for name, plans in kinds.items():
        tried = [(label, follow(texts, plan)) for label, plan in plans]
        label, best = max(tried, key=lambda one: costs.rate(one[1]))
        shape = label or f"k = {best.drafted:.1f}, {best.columns - best.drafted:.1f} beside, on average"
        rows.append({"way": name, "shape": shape, "tokens_per_check": best.yielded, "tokens_per_s": costs.rate(best)})
    return rows


def tables(result: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        "| columns | chain | siblings at the least confident | siblings where they add most | gain | ideal sibling |",
        "|---|---|---|---|---|---|",
    ]
    for row in result["by_columns"]:
        least, most = row["least_confident"], row["most_valuable"]
        lines.append(
            f"| {row['columns']} | {row['chain']:.2f} | {least['yielded']:.2f} ({least['siblings']}) "
            f"| {most['yielded']:.2f} ({most['siblings']}) "
            f"| {100 * most['gain']:+.1f} % [{100 * most['low']:+.1f} {100 * most['high']:+.1f}] | {row['ideal']:.2f} |"
        )
    lines += ["", "| | shape | tokens a check | tok/s |", "|---|---|---|---|"]
    for row in result["by_time"]:
        lines.append(f"| {row['way']} | {row['shape']} | {row['tokens_per_check']:.2f} | {row['tokens_per_s']:.1f} |")
    return "\n".join(lines)


def load_or_record(args: argparse.Namespace) -> list[Text]:
    """Return the recorded drafts, made now if they are not in a file."""
    if args.record and args.record.exists():
        return [[Place(**place) for place in text] for text in json.loads(args.record.read_text())]
    llm = prompting.load(str(args.base), n_ctx=1024, drafter=None)
    texts = []
    for one in tqdm(prompts(args.prompts), unit="prompts", disable=not sys.stderr.isatty()):
        prompt = prompting.chat_tokens(llm, [{"role": "user", "content": one["prompt"]}])
        texts.append(record(llm, prompt, args.n, max(BUDGETS) - 1))
    llm.close()
    if args.record:
        args.record.write_text(json.dumps([[vars(place) for place in text] for text in texts]) + "\n")
    return texts


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, metavar="NAME.base.gguf")
    parser.add_argument("--prompts", type=int, default=20, metavar="N", help="of the package's set (default: 20)")
    parser.add_argument("-n", type=int, default=64, metavar="TOKENS", help="length of a text (default: 64)")
    parser.add_argument("--draft-ms", type=float, default=10.5, help="a draft token (default: 10.5)")
    parser.add_argument("--check-ms", type=float, default=32.0, help="a check of one column (default: 32)")
    parser.add_argument("--column-ms", type=float, default=7.0, help="each further column (default: 7)")
    parser.add_argument("--free-columns", type=int, default=3, help="columns for the price of one (default: 3)")
    parser.add_argument("--most", type=int, default=max(BUDGETS) - 1, help="tokens beside the first in a check")
    parser.add_argument(
        "--record", type=Path, metavar="FILE", help="recorded drafts: read if it is there, else written"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there too")
    args = parser.parse_args()
    if not 1 <= args.most < max(BUDGETS):
        parser.error(f"--most {args.most}: 1 to {max(BUDGETS) - 1} are allowed")
    texts = load_or_record(args)
    odds = Odds(texts)
    costs = Costs(args.draft_ms, args.check_ms, args.column_ms, args.free_columns)
    bins = {"edges": EDGES, "tries": odds.tries.tolist(), "kept": odds.kept.tolist(), "second": odds.second.tolist()}
    result: dict[str, Any] = {
        "base": args.base.name, "n": args.n, "prompts": len(texts), "costs_ms": vars(costs), "odds": bins,
        "by_columns": [by_columns(texts, odds, budget) for budget in BUDGETS],
        "by_time": by_time(texts, odds, costs, args.most),
    }  # fmt: skip
    print(tables(result))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
