"""Noise on products, the divergence it causes, and types chosen by it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from plain_formulas import formula
from twofold import errors, layout, sensitivity
from twofold.blocks import dequantize, ggml_type, quantize
from twofold.calibration import Calibration
from twofold.collector import Collector, Sums
from twofold.decoder import BaseLlama
from twofold.layout import Split
from twofold.metadata import Tensor
from twofold.sensitivity import choose_types, measure, relative_loss
from twofold.source import SourceTensor

PIECE = [1, *range(270, 301)]
NAMES = ["blk.0.attn_v.weight", "blk.1.ffn_down.weight", "output.weight"]
RNG = np.random.default_rng(3)


@pytest.fixture(scope="module")
def running(tiny_llama: Path) -> Iterator[tuple[BaseLlama, Collector]]:
    collector = Collector(with_moments=False, wanted=layout.is_matrix)
    settings = {"n_ctx": 64, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}
    llm = BaseLlama(collector, model_path=str(tiny_llama), flash_attn=True, verbose=False, **settings)
    yield llm, collector
    llm.close()


Running = tuple[BaseLlama, Collector]


def logits(running: Running, name: str, amount: float) -> np.ndarray:
    llm, collector = running
    with collector.disturbing(name, amount):
        llm.decoder.truncate(0)
        llm.decoder.decode(PIECE, 0, all_rows=True)
        return llm.decoder.block(len(PIECE)).copy()


# ---- noise -------------------------------------------------------------------------------------------


def test_noise_is_the_same_each_time(running: Running) -> None:
    first, again = (logits(running, NAMES[0], 0.1) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - logits(running, "", 0.0)).max() > 1e-3


def test_noise_has_the_size_asked_for(running: Running) -> None:
    """On the head it can be seen: `amount` times the root mean square of each column, and uniform."""
    clean = logits(running, "", 0.0)
    noise = logits(running, "output.weight", 0.25) - clean
    size = np.sqrt((clean**2).mean(axis=1))
    np.testing.assert_allclose(np.sqrt((noise**2).mean(axis=1)), 0.25 * size, rtol=0.1)
    assert np.abs(noise).max(axis=1) == pytest.approx(0.25 * 3**0.5 * size, rel=0.02)
    assert abs(noise.mean()) < 0.04 * np.abs(noise).mean()
    assert len({round(float(row[0] / s), 4) for row, s in zip(noise, size, strict=True)}) > 20  # other noise in each


@pytest.mark.parametrize(("name", "amount"), [("blk.9.attn_v.weight", 0.5), ("blk.0.attn_v", 0.5), (NAMES[0], 0.0)])
def test_what_changes_nothing(running: Running, name: str, amount: float) -> None:
    np.testing.assert_array_equal(logits(running, name, amount), logits(running, "", 0.0))


def test_inputs_are_not_added_up_meanwhile_and_are_afterwards(running: Running) -> None:
    llm, collector = running
    for name in ("", NAMES[0], "none"):
        logits(running, name, 0.1)
        assert not collector.sums
    llm.decoder.truncate(0)
    llm.decoder.decode(PIECE, 0, all_rows=True)
    assert collector.sums[NAMES[0]].counts.tolist() == [len(PIECE)]
    collector.sums.clear()


# ---- measuring ---------------------------------------------------------------------------------------


def test_it_is_the_divergence_over_the_noises_power(running: Running) -> None:
    llm, collector = running
    found = measure(llm.decoder, collector, [PIECE], NAMES, progress=False)
    clean = logits(running, "", 0.0)
    for name in NAMES:
        expected = formula(clean, logits(running, name, sensitivity.AMOUNT)).mean() / sensitivity.AMOUNT**2
        assert found[name] == pytest.approx(expected, rel=1e-3)
    assert measure(llm.decoder, collector, [PIECE], ["none"], progress=False) == {"none": 0.0}


@pytest.mark.parametrize("name", NAMES)
def test_divergence_grows_with_the_power(running: Running, name: str) -> None:
    clean = logits(running, "", 0.0)
    small, large = (formula(clean, logits(running, name, amount)).mean() for amount in (0.03, 0.06))
    assert 3.4 < large / small < 4.6


def test_several_pieces_are_averaged(running: Running) -> None:
    llm, collector = running
    pieces = [PIECE, PIECE[:8]]
    found = measure(llm.decoder, collector, pieces, NAMES[2:], progress=False)[NAMES[2]]
    assert found > 0
    twice = measure(llm.decoder, collector, [PIECE, PIECE], NAMES[2:], progress=False)[NAMES[2]]
    assert twice != found


# ---- choosing ----------------------------------------------------------------------------------------


def split(name: str, rows: int, width: int, kind: str = "f32", spread: float = 0.02) -> Split:
    source = ggml_type(kind)
    values = (RNG.standard_normal((rows, width)) * spread).astype(np.float32)
    data = quantize(values, source) if kind != "f32" else values.reshape(-1).view(np.uint8)
    tensor = SourceTensor(name, source, (rows, width), 0, data.size, data)
    return Split(Tensor(name, ggml_type("q4_0"), (rows, width), 0, 0), tensor, True)


def expected_loss(splits: list[Split], chosen: dict[str, str], known: Calibration) -> float:
    total = 0.0
    for s in splits:
        w = s.source.rows(0, s.matrix[1])
        kind, importance = ggml_type(chosen[s.base.name]), known.mean_importance(s.base.name)
        ones = np.ones(w.shape[1], np.float32) if importance is None else importance
        total += known.sensitivity_of(s.base.name) * relative_loss(w, kind, ones)
    return total


def bits(splits: list[Split], chosen: dict[str, str]) -> float:
    return sum(ggml_type(chosen[s.base.name]).bpw * s.source.weights for s in splits)


def test_no_choice_within_the_budget_is_much_better() -> None:
    """All of them are tried. The greedy way may miss what fits the last bits of the budget exactly."""
    kinds = ("q2_k", "q4_k", "q8_0")
    splits = [split(f"m{i}", 64, width) for i, width in enumerate((256, 512, 256, 768))]
    known = Calibration({}, sensitivity={"m0": 5.0, "m1": 1.0, "m2": 0.1, "m3": 2.0})
    weights = sum(s.source.weights for s in splits)
    for bpw in (3.0, 4.0, 5.5):
        chosen = choose_types(splits, known, bpw, kinds)
        assert bits(splits, chosen) <= bpw * weights
        best = min(
            expected_loss(splits, trial, known)
            for picked in itertools.product(kinds, repeat=4)
            if bits(splits, trial := dict(zip(chosen, picked, strict=True))) <= bpw * weights
        )
        assert expected_loss(splits, chosen, known) <= 2 * best
    assert set(choose_types(splits, known, 8.5, kinds).values()) == {"q8_0"}
    assert set(choose_types(splits, known, 2.625, kinds).values()) == {"q2_k"}


def test_a_type_fits_the_width_and_saves_bits() -> None:
    splits = [split("narrow", 32, 96), split("packed", 32, 256, "q4_0"), split("wide", 32, 256)]
    chosen = choose_types(splits, Calibration({}), 9.0)
    assert chosen == {"narrow": "q8_0", "packed": "q3_k", "wide": "q8_0"}


def test_importance_counts_in_the_loss() -> None:
    w = RNG.standard_normal((32, 256)).astype(np.float32)
    importance = np.full(256, 1e-3, np.float32)
    importance[:16] = 1.0
    kind = ggml_type("q4_0")
    error = w - dequantize(quantize(w, kind, importance), kind, w.shape)
    expected = (error**2 * importance).sum() / (w**2 * importance).sum()
    assert relative_loss(w, kind, importance) == pytest.approx(float(expected), rel=1e-4)
    assert relative_loss(w, ggml_type("q8_0"), importance) < 0.01 * expected
    assert relative_loss(np.zeros_like(w), kind, importance) == 0.0


def test_importance_of_experts_is_that_of_all() -> None:
    sums = Sums(np.stack([np.arange(1, 65), np.zeros(64)]).astype(np.float32), np.array([4, 0], np.float32))
    np.testing.assert_allclose(Calibration({"m": sums}).mean_importance("m"), np.arange(1, 65) / 4, rtol=1e-6)


def test_what_is_refused() -> None:
    with pytest.raises(errors.ArgumentError, match=r"2 bits a weight.*q2_k.* take 2\.625; .*--base-bpw"):
        choose_types([split("m", 32, 256)], Calibration({}), 2.0, ["q4_0", "q2_k"])
    with pytest.raises(errors.ArgumentError, match=r"none of q2_k fits m: width 96"):
        choose_types([split("m", 32, 96)], Calibration({}), 4.0, ["q2_k"])
    bad = split("m", 32, 256)
    bad.source.data.view(np.float32)[5] = np.nan
    with pytest.raises(errors.NonFiniteError, match="m"):
        choose_types([bad], Calibration({}), 4.0)
