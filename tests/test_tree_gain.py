"""scripts/tree_gain.py: what chains and trees yield, by hand and against the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import twofold
from sampling_test import load
from tree_gain import (
    BUDGETS,
    Costs,
    Found,
    Odds,
    Place,
    by_columns,
    by_time,
    chain,
    follow,
    ideal,
    least_confident,
    record,
    tables,
    weighed,
)
from twofold.drafts import make_text

DEEP = max(BUDGETS) - 1


def text(agreed: list[int], second: bool = True, unsure: int = 1) -> list[Place]:
    """Places of these agreements, and as many more as the deepest draft needs to be judged."""
    confidence = [0.5 if i == unsure else 0.95 for i in range(DEEP)]
    return [Place(confidence, a, second) for a in agreed] + [Place(confidence, 0, False)] * DEEP


def test_chains_and_trees_by_hand() -> None:
    found = follow([text([1, 1, 1, 1])], chain(3))  # checks at 0 and 2
    assert (found.tokens.tolist(), found.checks.tolist(), found.drafted, found.columns) == ([4], [2], 3.0, 3.0)
    found = follow([text([1, 1, 1, 1])], least_confident(3, 1))  # the sibling is right: 0 and 3
    assert (found.tokens.tolist(), found.checks.tolist(), found.columns) == ([6], [2], 4.0)
    assert follow([text([1, 1, 1, 0])], least_confident(3, 1)).tokens.tolist() == [4]
    assert follow([text([3, 3, 3, 3])], ideal(3)).tokens.tolist() == [4]  # all were kept
    for places in (text([1] * 4, second=False), text([1] * 4, unsure=2)):  # wrong, or in another place
        assert follow([places], least_confident(3, 1)).tokens.tolist() == [4]
    assert follow([text([1] * 4, unsure=2)], ideal(3)).tokens.tolist() == [6]
    assert follow([text([5] * 4)], ideal(3)).tokens.tolist() == [4]  # nothing was refused
    assert follow([text([5] * 4)], chain(2)).yielded == 3.0


def test_odds_and_rules() -> None:
    odds = Odds([text([1] * 400)])
    kept, second = odds.values(Place([0.95, 0.5], 0, False))
    assert kept[0] > 0.9 and kept[1] < 0.1 and second[0] < 0.01 and second[1] > 0.9
    place, half = text([1])[0], odds.ahead
    assert half == pytest.approx(0.5, abs=0.01)
    assert weighed(odds, 0.6, 0.5, DEEP)(place) == (0, set())
    assert weighed(odds, 0.4, 0.5, DEEP)(place) == (2, {1})  # the third has hardly a chance
    assert weighed(odds, 0.4, 2.0, DEEP)(place) == (2, set())
    assert weighed(odds, 0.4, 0.5, 2)(place) == (2, set())  # no column is left
    row = by_columns([text([1] * 40)], odds, 4)
    assert row["chain"] == 2.0 and row["most_valuable"]["yielded"] == row["ideal"] == 3.0
    assert row["most_valuable"]["gain"] == pytest.approx(0.5)
    timed = by_time([text([1] * 40)], odds, Costs(1.0, 5.0, 0.0, 1), DEEP)
    assert [one["tokens_per_check"] for one in timed] == pytest.approx([2.0, 3.0, 2.0, 3.0])
    assert timed[1]["tokens_per_s"] == pytest.approx(1e3 * 3 / 7) and timed[1]["shape"] == "k = 2, 1 beside"
    assert len(tables({"by_columns": [row], "by_time": timed}).splitlines()) == 10


def test_costs() -> None:
    found = Found(np.array([30]), np.array([10]), drafted=2.0, columns=4.0)
    assert Costs(1.0, 5.0, 0.5, 3).rate(found) == pytest.approx(1e3 * 3 / (2 + 5 + 2 * 0.5))


def test_records_are_the_loops(tiny_pair: Path) -> None:
    llm = load(tiny_pair)
    prompt = llm.tokenize(b"the people would have")
    made = make_text(llm, prompt, 40)
    places = record(llm, prompt, 40, DEEP)
    assert len(places) == 39 and all(len(place.confidence) == DEEP for place in places)
    assert any(place.second for place in places) and any(place.agreed for place in places)
    llm.draft_tokens = 3
    generator, steps = llm.generate(prompt, temp=0.0), []
    for _ in made:
        next(generator)
    steps = [int(mark) for mark in llm._stats.from_draft]
    generator.close()
    place, expected = 0, [0]
    while place < len(places):
        kept = min(places[place].agreed, 3)
        expected += [1] * kept + [0]
        place += kept + 1
    assert steps == expected[: len(steps)]
    llm.close()


def test_seconds_are_the_bases_second_choices(tiny_pair: Path) -> None:
    llm: twofold.Llama = load(tiny_pair)
    prompt = llm.tokenize(b"the people would have")
    made, places = make_text(llm, prompt, 20), record(llm, prompt, 20, DEEP)
    for number in range(0, 16, 3):
        refused = number + 1 + places[number].agreed
        llm.reset()
        llm.eval([*prompt, *made[:number]])
        with llm.decoder.drafting():
            llm.decoder.decode(made[number:refused], len(prompt) + number, all_rows=False)
        second = int(np.argsort(llm.decoder.logits(-1))[-2])
        llm.decoder.truncate(len(prompt) + number)
        assert places[number].second == (refused < len(made) and second == made[refused])
    llm.close()
