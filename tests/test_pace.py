"""Draft lengths: against a simulated machine and text, whose best answer is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from twofold.pace import Auto, Fixed, Pace

LONGEST = 16
Text = Callable[[np.random.Generator], float]


def rate(
    pace: Pace, draft_s: float, check_s: Callable[[int], float], text: Text, rounds: int = 1500, first_s: float = 0.0
) -> float:
    """Tokens a second; `text` draws a draft token's confidence, which is also how often it is kept."""
    random = np.random.default_rng(7)
    tokens = seconds = 0.0
    for _ in range(rounds):
        most = pace.begin(LONGEST)
        drafted, kept, whole = 0, 0, True
        while drafted < most:
            sure = text(random)
            drafted += 1
            whole = whole and random.random() < sure
            kept += whole
            if not pace.goes_on(lambda sure=sure: sure):
                break
        times = drafted * draft_s + first_s * bool(drafted), check_s(drafted + 1)
        pace.end(drafted, *times)
        pace.outcome(kept)
        tokens += kept + 1
        seconds += sum(times)
    return tokens / seconds


def mixed(random: np.random.Generator) -> float:
    """Mostly sure, now and then a guess."""
    return float(random.beta(12, 1) if random.random() < 0.75 else random.beta(1, 2))


def hopeless(random: np.random.Generator) -> float:
    """Random text: nothing is foreseen."""
    return float(random.beta(1, 30))


def certain(random: np.random.Generator) -> float:
    """A copy."""
    return float(random.beta(200, 1))


@pytest.mark.parametrize("text", [mixed, hopeless, certain])
@pytest.mark.parametrize("first_s", [0.0, 0.01])
@pytest.mark.parametrize(("draft_s", "slope"), [(0.01, 0.003), (0.03, 0.02), (0.002, 0.0005), (0.012, 0.031)])
def test_auto_is_as_good_as_the_best_fixed_length(text: Text, draft_s: float, slope: float, first_s: float) -> None:
    """Within 3 % of the best of all fixed lengths, none among them, whatever that is."""

    def check_s(width: int) -> float:
        return 0.032 + slope * (width - 1)

    fixed = [rate(Fixed(k), draft_s, check_s, text, first_s=first_s) for k in range(LONGEST + 1)]
    assert rate(Auto(LONGEST), draft_s, check_s, text, first_s=first_s) > 0.97 * max(fixed)


def test_confidence_beats_every_fixed_length() -> None:
    """Stopping where the draft is unsure gains on mixed text."""
    fixed = [rate(Fixed(k), 0.01, lambda width: 0.032, mixed) for k in range(LONGEST + 1)]
    assert rate(Auto(LONGEST), 0.01, lambda width: 0.032, mixed) > 1.05 * max(fixed)


@pytest.mark.parametrize("text", [mixed, certain])
def test_checks_that_get_steep_are_not_overrun(text: Text) -> None:
    """Flat to four tokens, steep beyond: within 3 % of the best fixed length, and no line through all would be."""

    def check_s(width: int) -> float:
        return 0.032 + 0.002 * min(width, 4) + 0.03 * max(width - 4, 0)

    fixed = [rate(Fixed(k), 0.01, check_s, text) for k in range(LONGEST + 1)]
    pace = Auto(LONGEST)
    assert rate(pace, 0.01, check_s, text) > 0.97 * max(fixed)
    near, far = pace.checks.slopes(np.array([2.5, 6.5]))
    assert near < 0.012
    assert far > 0.02


def test_costs_are_learned() -> None:
    """The seconds of drafts and checks, and what one more token adds to a check."""
    pace = Auto(LONGEST)
    rate(pace, 0.01, lambda width: 0.03 + 0.002 * width, mixed, first_s=0.004)
    assert pace.drafts.line() == pytest.approx((0.004, 0.01))
    assert pace.checks.line() == pytest.approx((0.03, 0.002))
    assert pace._plain_rate() == pytest.approx(1 / 0.032)


def test_a_change_of_text_is_noticed() -> None:
    """After hopeless text drafting comes back, after good text it stops."""
    pace = Auto(LONGEST)

    def check_s(width: int) -> float:
        return 0.032 + 0.002 * width

    rate(pace, 0.01, check_s, hopeless, rounds=1000)
    best = rate(Fixed(LONGEST), 0.01, check_s, certain)
    assert rate(pace, 0.01, check_s, certain) > 0.85 * best
    assert rate(pace, 0.01, check_s, hopeless) > 0.95 * rate(Fixed(0), 0.01, check_s, hopeless)
