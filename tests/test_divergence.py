"""twofold.divergence against plain formulas."""

from __future__ import annotations

import numpy as np
import pytest

from plain_formulas import formula, log_softmax, random_logits
from twofold import divergence, errors
from twofold.divergence import STEP, Scores, divergences, encode, interval, summarize


@pytest.mark.parametrize("distance", [0.01, 0.3, 3.0])
def test_divergences_are_the_formula(distance: float) -> None:
    reference = random_logits(20, 3000, 1)
    near = reference + distance * random_logits(20, 3000, 2, 1.0)
    found, sums = divergences(encode(reference)[0], near)
    true = formula(reference, near)
    np.testing.assert_allclose(found, true, rtol=2e-3, atol=0.3 * STEP * (true.mean() ** 0.5))
    assert found.mean() == pytest.approx(true.mean(), rel=1e-2)
    expected = np.log(np.exp(near.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(sums, expected, rtol=1e-12)


def test_a_shift_of_all_logits_changes_nothing_and_itself_is_the_noise_floor() -> None:
    reference = random_logits(20, 3000, 3)
    codes, _ = encode(reference)
    found, _ = divergences(codes, reference + np.float32(64))
    assert 0 < found.max() < 3e-8
    assert found.min() > -1e-12


def test_codes_are_within_half_a_step_of_the_logarithm() -> None:
    reference = random_logits(20, 3000, 4, 6.0)
    codes, sums = encode(reference)
    true = -log_softmax(reference).astype(np.float64)
    near = true < divergence.RANGE - STEP
    assert 0.5 < near.mean() < 1
    assert np.abs(codes * STEP - true)[near].max() <= STEP / 2 * (1 + 1e-9)
    assert (codes[true > divergence.RANGE] == 65535).all()
    np.testing.assert_allclose(sums, np.log(np.exp(reference.astype(np.float64)).sum(axis=1)), rtol=1e-12)


def test_many_tokens_beyond_the_range_count_for_nothing() -> None:
    reference = np.full((1, 150000), -40, np.float32)
    reference[0, 0] = 0
    other = reference * np.float32(1.5)
    assert 0 < formula(reference, other)[0] < 1e-10
    assert abs(divergences(encode(reference)[0], other)[0][0]) < 1e-9


def test_logits_that_are_not_finite_are_an_error() -> None:
    good = random_logits(2, 100, 5)
    for value in (np.nan, np.inf, -np.inf):
        bad = good.copy()
        bad[1, 7] = value
        with pytest.raises(errors.NonFiniteError, match="not finite"):
            divergences(encode(good)[0], bad)
        with pytest.raises(errors.NonFiniteError):
            encode(bad)


def test_summaries_are_the_formulas() -> None:
    rng = np.random.default_rng(6)
    parts = [Scores(rng.exponential(size=n), rng.random(n) < 0.7, rng.exponential(2.0, n)) for n in (300, 40)]
    found = summarize(parts)
    kld, nll = (np.concatenate([getattr(part, name) for part in parts]) for name in ("kld", "nll"))
    assert found.kld_mean == pytest.approx(sum(kld) / 340)
    assert found.kld_median == pytest.approx(np.median(kld))
    assert found.kld_p99 == pytest.approx(np.percentile(kld, 99))
    assert found.top1 == pytest.approx((parts[0].agree.sum() + parts[1].agree.sum()) / 340)
    assert found.ppl == pytest.approx(np.exp(sum(nll) / 340))
    assert found.tokens == 340
    assert found.kld_ci_low < found.kld_mean < found.kld_ci_high


def test_the_interval_is_that_of_the_mean_and_wider_for_correlated_tokens() -> None:
    rng = np.random.default_rng(7)
    noise = rng.standard_normal(4000)
    low, high = interval([noise[:3000], noise[3000:]])
    assert (high - low) / 2 == pytest.approx(1.96 * noise.std() / np.sqrt(4000), rel=0.15)
    assert (high + low) / 2 == pytest.approx(noise.mean(), abs=0.005)
    walk = np.zeros(4000)
    for i in range(1, 4000):
        walk[i] = 0.8 * walk[i - 1] + noise[i]
    low, high = interval([walk])
    true = 1.96 * walk.std() * 3 / np.sqrt(4000)  # sqrt((1 + 0.8) / (1 - 0.8)) = 3
    assert 0.75 * true < (high - low) / 2 < 1.25 * true
    few = rng.random(3)
    low, high = interval([few])
    assert few.min() - 1e-12 < low < high < few.max() + 1e-12


def test_texts_differ_in_level_but_that_does_not_widen_the_interval() -> None:
    rng = np.random.default_rng(8)
    one, two = rng.standard_normal(1000), 100 + rng.standard_normal(1000)
    low, high = interval([one, two])
    assert high - low < 0.2
    assert low < (one.mean() + two.mean()) / 2 < high
