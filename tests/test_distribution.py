"""Sampled text has the full model's distribution: chi-square tests with fixed seeds (scripts/sampling_test.py).

A test fails where p is below 1e-4. With seven settings a right program fails one of them with a probability of at most
7e-4, once and for all, since seeds and so results are fixed (other kernels may round otherwise and so draw otherwise).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import twofold
from sampling_test import FAULTS, PROMPT, SETTINGS, Drawn, bins, compare, draw, exact, load, measure, upper_tail

SEEDS = range(1, 1001)
LEAST_P = 1e-4
FOUND = 1e-8


@pytest.fixture(scope="module")
def llm(tiny_pair: Path) -> Iterator[twofold.Llama]:
    model = load(tiny_pair)
    yield model
    model.close()


@cache
def drawn(llm: twofold.Llama, name: str) -> Drawn:
    return draw(llm, llm.tokenize(PROMPT.encode()), SETTINGS[name], SEEDS)


@pytest.mark.parametrize("name", SETTINGS)
def test_distribution_is_the_full_models(llm: twofold.Llama, name: str) -> None:
    prompt, found = llm.tokenize(PROMPT.encode()), drawn(llm, name)
    result = compare(found, lambda before: exact(llm, prompt, SETTINGS[name], before))
    assert result.p > LEAST_P, result
    assert result.freedom > 20 and result.contexts > 8
    assert min(found.kept, found.tried - found.kept) > 300  # both ends of the loop were drawn from


@pytest.mark.parametrize(
    ("name", "forgotten"),
    [
        ("top-k", {"top_k": 0}),
        ("top-p", {"top_p": 1.0}),
        ("min-p", {"min_p": 0.0}),
        ("penalties", {"repeat_penalty": 1.0, "frequency_penalty": 0.0, "presence_penalty": 0.0}),
        ("grammar", {"grammar": None}),
        ("all of them", {"grammar": None}),
    ],
)
def test_a_setting_that_is_forgotten_is_found(llm: twofold.Llama, name: str, forgotten: dict[str, Any]) -> None:
    prompt, others = llm.tokenize(PROMPT.encode()), {**SETTINGS[name], **forgotten}
    assert compare(drawn(llm, name), lambda before: exact(llm, prompt, others, before)).p < FOUND


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(llm: twofold.Llama, fault: str) -> None:
    assert measure(llm, SETTINGS["temperature"], SEEDS, fault).p < FOUND


def test_upper_tail() -> None:
    """Quantiles from tables of the chi-square distribution, and exp(-x / 2), which is exact for 2 degrees."""
    for freedom, quantiles in {
        1: (3.841459, 10.827566),
        5: (11.070498, 20.515006),
        100: (124.342113, 149.449253),
    }.items():
        assert [upper_tail(q, freedom) for q in quantiles] == pytest.approx([0.05, 0.001], rel=1e-5)
    assert upper_tail(90.0, 2) == pytest.approx(2.8625185805493937e-20, rel=1e-9)
    assert upper_tail(1.0, 2) == pytest.approx(0.6065306597126334, rel=1e-9)
    assert (upper_tail(0.0, 3), upper_tail(float("inf"), 3), upper_tail(5.0, 0)) == (1.0, 0.0, 1.0)


def test_bins() -> None:
    p = {1: 0.5, 2: 0.4, 3: 0.06, 4: 0.04}
    assert bins({1: 30, 2: 15, 3: 5}, p) == ([25.0, 20.0, pytest.approx(5.0)], [30, 15, 5])
    assert bins({1: 10, 2: 9, 4: 1}, p) == ([10.0, pytest.approx(10.0)], [10, 10])  # too rare for a bin of their own
    assert bins({1: 10, 9: 10}, p)[0][-1] == 0.0 and bins({1: 10, 9: 10}, p)[1][-1] == 10  # 9 cannot be drawn
