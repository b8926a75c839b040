"""scripts/coupling.py: what each way to couple two draws accepts, against drawing; records of the loop."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from coupling import Drawn, Round, accepted, both, expected, record, summary, table
from sampling_test import load

IDS = np.arange(4, dtype=np.int32)
P: Drawn = (IDS[[2, 0, 1]], np.array([0.5, 0.3, 0.2]))
Q: Drawn = (IDS[[0, 2, 3]], np.array([0.6, 0.3, 0.1]))


def drawn(one: Drawn, way: str, chance: np.random.Generator) -> np.ndarray:
    if way == "inverse":
        return one[0][np.searchsorted(np.cumsum(one[1]), chance.random(200_000))]
    noise = chance.exponential(size=(200_000, 4))  # by token
    return one[0][np.argmin(noise[:, one[0]] / one[1], axis=1)]


@pytest.mark.parametrize("way", ["inverse", "race"])
def test_acceptance_is_how_often_both_draw_the_same(way: str) -> None:
    first, second = (drawn(one, way, np.random.default_rng(1)) for one in (P, Q))
    for token in range(4):
        together = float(np.mean((first == token) & (second == token)))
        assert both(P, Q, token, way) == pytest.approx(together, abs=0.005)
    assert accepted(P, Q, way) == pytest.approx(float(np.mean(first == second)), abs=0.005)
    for one in (P, Q):
        assert accepted(one, one, way) == pytest.approx(1.0)


def test_known_acceptances() -> None:
    assert accepted(P, Q, "maximal") == pytest.approx(0.3 + 0.3)
    assert accepted(P, Q, "likeliest") == pytest.approx(0.3)  # the full model's probability of token 0
    assert accepted(P, Q, "inverse") == pytest.approx(0.1)  # 0 on 0.5 .. 0.6; 2 on 0 .. 0.5 and 0.6 .. 0.9


def test_expected_tokens_of_a_check() -> None:
    one = Round([0, 2], [Q, Q], [P, P], 1)
    assert expected(one, "maximal") == pytest.approx(1 + 0.5 + 0.5 * 1.0)
    assert expected(one, "inverse") == pytest.approx(1 + 1 / 6)
    assert expected(Round([3], [Q], [P], 0), "race") == 1.0
    found = summary([[one], [Round([0, 2], [Q, Q], [P, P], 0)]], 2)
    assert (found["checks"], found["positions"]) == (2, 3)
    assert found["tokens_per_check"]["measured"] == 1.5
    assert found["acceptance"]["measured"] == pytest.approx(1 / 3)
    cells = [cell.strip() for cell in table([{"temperature": 0.5, **found}]).splitlines()[2].split("|")]
    assert cells[1:4] == ["0.5", "2", "1.50 [1.00 2.00]"] and len(cells) == 14


def test_rounds_of_the_loop_are_recorded(tiny_pair: Path) -> None:
    llm = load(tiny_pair)
    prompt = llm.tokenize(b"the people would have")
    settings = {"temp": 1.0, "top_k": 0, "top_p": 0.9, "min_p": 0.0}
    texts = []
    for seed in range(1, 13):
        llm.set_seed(seed)
        texts.append(record(llm, prompt, 40, settings, 3))
    rounds = [one for text in texts for one in text]
    for one in rounds:
        assert len(one.drafted) == len(one.q) == len(one.p) == 3
        for token, (ids, q), (_, p) in zip(one.drafted, one.q, one.p, strict=True):
            assert token in ids and q.sum() == pytest.approx(1.0) and p.sum() == pytest.approx(1.0)
        assert one.kept is not None and all(
            both(one.p[i], one.q[i], one.drafted[i], "race") > 0 for i in range(one.kept)
        )
    found = summary(texts, 3)
    assert found["acceptance"]["measured"] == pytest.approx(found["acceptance"]["race"], abs=0.08)
    assert found["acceptance"]["inverse"] < found["acceptance"]["race"] < found["acceptance"]["maximal"]
    (greedy,) = [record(llm, prompt, 40, {"temp": 0.0}, 3)]
    for one in greedy:
        same = [p[0][0] == q[0][0] for p, q in zip(one.p, one.q, strict=True)]
        assert one.kept == (same.index(False) if False in same else 3)
    llm.close()
