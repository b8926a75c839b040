"""Draft lengths: against a simulated machine and text, whose best answer is known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from twofold.pace import Auto, Fixed, Pace, Step

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
            pace.step(Step(0, again=bool(drafted)), draft_s + first_s * (not drafted))
            drafted += 1
            whole = whole and random.random() < sure
            kept += whole
            if not pace.goes_on(lambda sure=sure: sure, made=False):
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
    assert (pace.drafts.begin(), pace.drafts.token()) == pytest.approx((0.004, 0.01))
    assert pace.checks.slopes(np.array([1.5, 4.5])) == pytest.approx((0.002, 0.002))
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


# ---- guesses that the base checks --------------------------------------------------------------------


def rate_of_guesses(pace: Pace, chance: float, check_s: Callable[[int], float], rounds: int = 400) -> float:
    """Tokens a second of a copy that the base and the full model are sure of, guessed right by `chance`."""
    random = np.random.default_rng(3)
    tokens = seconds = 0.0
    for _ in range(rounds):
        most, drafted, steps_s, width, goes_on = pace.begin(LONGEST), 0, 0.0, 0, True
        while goes_on and drafted < most:
            guesses = pace.guesses(chance, min(most - drafted - 1, 7)) if most - drafted > 1 else 0
            right = 0
            while right < guesses and random.random() < chance:
                right += 1
            again = width == 1 + guesses
            step_s = 0.01 + 0.002 * guesses + 0.002 * (not again)
            pace.step(Step(guesses, again), step_s)
            width, steps_s = 1 + guesses, steps_s + step_s
            for place in range(right + 1):
                drafted += 1
                copied = guesses if right == guesses else 0
                goes_on = pace.goes_on(lambda: 0.995, made=place < right, copied=copied)
                if not goes_on:
                    break
        pace.end(drafted, steps_s, check_s(drafted + 1))
        pace.outcome(drafted)
        tokens, seconds = tokens + drafted + 1, seconds + steps_s + check_s(drafted + 1)
    return tokens / seconds


class Without(Auto):
    """Asks for no guesses."""

    def guesses(self, chance: float, most: int) -> int:
        """None."""
        return 0


@pytest.mark.parametrize("chance", [0.02, 0.1, 0.3, 0.6, 0.9, 1.0])
def test_guesses_are_checked_only_where_they_save_time(chance: float) -> None:
    """Never slower than without by more than 2 %, and far faster in a copy."""

    def check_s(width: int) -> float:
        return 0.032 + 0.006 * width

    gain = rate_of_guesses(Auto(LONGEST), chance, check_s) / rate_of_guesses(Without(LONGEST), chance, check_s)
    assert gain > 0.98
    if chance > 0.8:
        assert gain > 1.15


def test_cheap_guesses_do_not_make_a_draft_token_cheap() -> None:
    """The cost of a token is that of steps without guesses."""
    pace = Auto(LONGEST)
    rate_of_guesses(pace, 0.6, lambda width: 0.03)
    for again in (False, True, True):
        pace.step(Step(0, again), 0.01 + 0.002 * (not again))
    assert pace.drafts.token() == pytest.approx(0.01)


def test_what_is_drafted_already_goes_on_where_a_new_token_would_not() -> None:
    """A token with a step of its own has to earn that too."""
    pace = Auto(LONGEST)
    rate(pace, 0.03, lambda width: 0.03 + 0.001 * width, mixed)
    pace.begin(LONGEST)
    assert pace.goes_on(lambda: 0.5, made=True)
    pace.begin(LONGEST)
    assert not pace.goes_on(lambda: 0.5, made=False)


def test_a_copy_goes_on_where_a_lone_token_would_not() -> None:
    """After a step whose guesses were all right, tokens cost what its tokens did."""
    pace = Auto(LONGEST)
    rate(pace, 0.03, lambda width: 0.03 + 0.001 * width, mixed)
    pace.step(Step(7, again=False), 0.036)
    assert pace.drafts.copied(7) == pytest.approx(0.0045)
    pace.begin(LONGEST)
    assert pace.goes_on(lambda: 0.9, made=False, copied=7)
    pace.begin(LONGEST)
    assert not pace.goes_on(lambda: 0.9, made=False)


def test_what_surrounds_a_draft_counts_before_its_first_token() -> None:
    """A recurrent state that is kept and put back, for one."""
    pace = Auto(LONGEST)
    for _ in range(20):
        pace.begin(LONGEST)
        for again in (False, True):
            pace.step(Step(0, again), 0.01)
        pace.end(2, 0.02 + 0.05, 0.03)
        pace.outcome(2)
    assert pace.drafts.begin() == pytest.approx(0.05)


def test_a_stall_at_first_is_forgotten() -> None:
    """The very first step after another one takes half a second; drafting comes back nonetheless."""
    pace = Auto(LONGEST)
    pace.begin(LONGEST)
    pace.step(Step(0, again=False), 0.012)
    pace.step(Step(0, again=True), 0.5)
    pace.end(2, 0.512, 0.03)
    pace.outcome(2)

    def check_s(width: int) -> float:
        return 0.032 + 0.002 * width

    assert rate(pace, 0.01, check_s, certain) > 0.9 * rate(Fixed(LONGEST), 0.01, check_s, certain)


def test_guesses_are_tried_where_tokens_of_their_own_do_not_pay() -> None:
    """Drafts as slow as checks, and a copy: guesses alone pay, and are found out by the tries after each rest."""
    assert rate_of_guesses(Auto(LONGEST), 1.0, lambda width: 0.008, 2000) > 1.5 / 0.008


def test_a_step_that_took_in_a_prompt_does_not_count() -> None:
    """What a drafter spends on the text itself is no cost of guesses."""
    pace = Auto(LONGEST)
    pace.step(Step(7, again=False, usual=False), 5.0)
    assert not pace.drafts.known
    pace.step(Step(7, again=False), 0.02)
    assert pace.drafts.copied(7) == pytest.approx(0.0025)


@pytest.mark.parametrize(("chance", "count"), [(0.3, 0), (0.5, 7)])
def test_fixed_drafts_take_guesses_that_are_mostly_right(chance: float, count: int) -> None:
    assert Fixed(8).guesses(chance, 7) == count
