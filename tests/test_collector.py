"""twofold.collector: sums over what llama.cpp really multiplies, worked out a second time with numpy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from make_tiny import write_tiny
from twofold import errors, layout
from twofold.calibration import of_collector
from twofold.collector import Collector, Sums, moment_block
from twofold.decoder import BaseLlama

TOKENS = [1, *range(270, 301)]
SECOND = [1, *range(400, 431)]
EPS = 1e-6


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with threadpool_limits(1, "blas"):
        yield


@contextmanager
def running(path: Path, collector: Collector) -> Iterator[BaseLlama]:
    settings = {"n_ctx": 64, "n_batch": 64, "n_ubatch": 64, "n_threads": 1, "n_threads_batch": 1}
    llm = BaseLlama(collector, model_path=str(path), flash_attn=True, verbose=False, **settings)
    try:
        yield llm
    finally:
        llm.close()


def decode(llm: BaseLlama, tokens: list[int]) -> None:
    llm.decoder.truncate(0)
    llm.decoder.decode(tokens, 0, all_rows=True)


def tensors(path: Path) -> dict[str, np.ndarray]:
    return {t.name: np.array(t.data, np.float64) for t in gguf.GGUFReader(path).tensors}


def norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(axis=-1, keepdims=True) + EPS) * weight


@pytest.fixture(scope="module")
def collected(tiny_llama: Path) -> Collector:
    collector = Collector(with_moments=True, wanted=layout.is_matrix)
    with running(tiny_llama, collector) as llm:
        decode(llm, TOKENS)
        decode(llm, SECOND)
    return collector


# ---- a llama -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["attn_q", "attn_k", "attn_v"])
def test_first_inputs_are_the_normed_embeddings(name: str, collected: Collector, tiny_llama: Path) -> None:
    w = tensors(tiny_llama)
    x = norm(w["token_embd.weight"][TOKENS + SECOND], w["blk.0.attn_norm.weight"])
    found = collected.sums[f"blk.0.{name}.weight"]
    assert found.counts.tolist() == [64]
    np.testing.assert_allclose(found.squares, (x**2).sum(axis=0, keepdims=True), rtol=1e-4)
    moments = collected.moments[collected.moments_of[f"blk.0.{name}.weight"]]
    np.testing.assert_allclose(moments, (x.T @ x)[np.newaxis], rtol=1e-3, atol=1e-3)


def test_every_matrix_of_the_model_is_seen_and_no_other(collected: Collector) -> None:
    kinds = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    expected = {f"blk.{i}.{kind}.weight" for i in (0, 1) for kind in kinds} | {"output.weight"}
    assert set(collected.sums) == set(collected.moments_of) == expected
    assert all(sums.counts.tolist() == [64] for sums in collected.sums.values())


def test_moments_have_the_sums_on_their_diagonal(collected: Collector) -> None:
    for name, first in collected.moments_of.items():
        diagonal = np.diagonal(collected.moments[first], axis1=1, axis2=2).reshape(-1)
        np.testing.assert_allclose(diagonal, collected.sums[name].squares[0], rtol=1e-4)
    assert collected.moments["blk.0.ffn_down.weight"].shape == (1, 512, 512)


def test_matrices_with_the_same_inputs_share_moments(collected: Collector) -> None:
    of = collected.moments_of
    assert len({of[f"blk.0.attn_{kind}.weight"] for kind in "qkv"}) == 1
    assert len({of[f"blk.0.ffn_{kind}.weight"] for kind in ("gate", "up")}) == 1
    firsts = {name for name, first in of.items() if name == first}
    assert firsts == set(collected.moments) and len(firsts) == 2 * 4 + 1  # qkv, output, gate and up, down; the head


def test_inputs_that_only_share_a_name_do_not_share_moments(collected: Collector) -> None:
    made = of_collector(collected, [], 2, 32)
    assert made.moments_of == collected.moments_of
    name = "blk.0.attn_k.weight"
    kept = collected.sums[name]
    collected.sums[name] = Sums(kept.squares * 2, kept.counts)
    try:
        assert name not in of_collector(collected, [], 2, 32).moments_of
    finally:
        collected.sums[name] = kept


def test_without_moments_and_unwanted(tiny_llama: Path) -> None:
    collector = Collector(with_moments=False, wanted=lambda name: "blk.1." in name)
    with running(tiny_llama, collector) as llm:
        decode(llm, TOKENS)
    assert not collector.moments and not collector.moments_of
    assert len(collector.sums) == 7 and all(name.startswith("blk.1.") for name in collector.sums)


def test_a_tied_head_goes_by_the_embeddings_name(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tied.gguf", "llama", tied=True, layers=1)
    collector = Collector(with_moments=True, wanted=layout.is_matrix)
    with running(tmp_path / "tied.gguf", collector) as llm:
        decode(llm, TOKENS)
    assert "output.weight" not in collector.sums
    made = of_collector(collector, [], 1, 32)
    assert made.knows("output.weight") and made.moments_key("output.weight") == "token_embd.weight"
    np.testing.assert_array_equal(made.mean_importance("output.weight"), made.mean_importance("token_embd.weight"))


# ---- blocks of moments -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "block"),
    [
        (64, 64),
        (576, 576),
        (1792, 1792),
        (8960, 1792),
        (2048, 1024),
        (4864, 256),
        (1800, 1800),
        (8200, 0),
        (8192, 1024),
    ],
)
def test_moment_block(width: int, block: int) -> None:
    assert moment_block(width) == block
    assert not block or width % block == 0


def test_blocks_lie_along_the_diagonal(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path, collected: Collector) -> None:
    monkeypatch.setattr("twofold.collector.WHOLE", 256)
    monkeypatch.setattr("twofold.collector.MAX_WAITING", 1)  # multiplied at once instead of at the end
    collector = Collector(with_moments=True, wanted=layout.is_matrix)
    with running(tiny_llama, collector) as llm:
        decode(llm, TOKENS)
        decode(llm, SECOND)
    name = "blk.1.ffn_down.weight"
    whole, cut = collected.moments[name][0], collector.moments[name]
    assert cut.shape == (2, 256, 256)
    np.testing.assert_allclose(cut[0], whole[:256, :256], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(cut[1], whole[256:, 256:], rtol=1e-4, atol=1e-5)


def test_too_wide_for_moments(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> None:
    monkeypatch.setattr("twofold.collector.moment_block", lambda width: 0 if width > 256 else width)
    collector = Collector(with_moments=True, wanted=layout.is_matrix)
    with running(tiny_llama, collector) as llm:
        decode(llm, TOKENS)
    assert "blk.0.ffn_down.weight" in collector.sums
    assert "blk.0.ffn_down.weight" not in collector.moments_of
    assert "blk.0.ffn_up.weight" in collector.moments_of


# ---- errors ------------------------------------------------------------------------------------------


class OddError(Exception):
    pass


def test_what_the_sink_raises_comes_out_of_the_decode(tiny_llama: Path) -> None:
    failing = True

    def wanted(name: str) -> bool:
        if failing and name == "blk.1.attn_q.weight":
            raise OddError(name)
        return True

    collector = Collector(with_moments=True, wanted=wanted)
    with running(tiny_llama, collector) as llm:
        with pytest.raises(OddError, match=r"blk\.1\.attn_q"):
            decode(llm, TOKENS)
        seen = set(collector.sums)
        assert "blk.0.attn_q.weight" in seen and not any(name.startswith("blk.1.") for name in seen)
        failing = False
        decode(llm, TOKENS)  # the failure was told once
    assert "blk.1.attn_q.weight" in collector.sums


def test_stopped_without_an_exception(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Collector, "_seen", lambda self, user, seen: False)
    with (
        running(tiny_llama, Collector(with_moments=False, wanted=lambda _: True)) as llm,
        pytest.raises(errors.ArgumentError, match="stopped"),
    ):
        decode(llm, TOKENS)


# ---- experts -----------------------------------------------------------------------------------------

EXPERTS, USED = 8, 2


@pytest.fixture(scope="module")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe") / "moe.gguf"
    write_tiny(path, "qwen3moe", layers=1)
    return path


def expected_experts(w: dict[str, np.ndarray], token: int) -> tuple[list[int], np.ndarray, dict[int, np.ndarray]]:
    """Experts chosen for a text of one token, their inputs, and the inputs of their down matrices.

    Alone a token attends to itself only, so that attention gives its value.
    """
    hidden = w["token_embd.weight"][token]
    value = w["blk.0.attn_v.weight"] @ norm(hidden, w["blk.0.attn_norm.weight"])
    shared = w["blk.0.attn_output.weight"].shape[1] // len(value)  # query heads to each value head
    attended = np.repeat(value.reshape(-1, 128), shared, axis=0).reshape(-1)
    x = norm(hidden + w["blk.0.attn_output.weight"] @ attended, w["blk.0.ffn_norm.weight"])
    chosen = np.argsort(w["blk.0.ffn_gate_inp.weight"] @ x)[::-1][:USED].tolist()
    down = {}
    for e in chosen:
        gate = w["blk.0.ffn_gate_exps.weight"][e] @ x
        down[e] = gate / (1 + np.exp(-gate)) * (w["blk.0.ffn_up_exps.weight"][e] @ x)
    return chosen, x, down


def test_experts_get_the_inputs_of_their_tokens(tiny_moe: Path) -> None:
    collector = Collector(with_moments=True, wanted=layout.is_matrix)
    w, tokens = tensors(tiny_moe), list(range(280, 292))
    counts = np.zeros(EXPERTS)
    gate, down = np.zeros((EXPERTS, 256)), np.zeros((EXPERTS, 256))
    with running(tiny_moe, collector) as llm:
        for token in tokens:
            decode(llm, [token])
            chosen, x, inputs = expected_experts(w, token)
            counts[chosen] += 1
            gate[chosen] += x**2
            for expert, y in inputs.items():
                down[expert] += y**2
    assert len(set(counts)) > 2  # else experts in the wrong order might go unseen
    for kind, squares in (("gate", gate), ("up", gate), ("down", down)):
        found = collector.sums[f"blk.0.ffn_{kind}_exps.weight"]
        np.testing.assert_array_equal(found.counts, counts)
        np.testing.assert_allclose(found.squares, squares, rtol=0.02, atol=1e-3 * squares.max())
    assert not any("exps" in name for name in collector.moments_of)


def test_experts_of_a_batch_add_up(tiny_moe: Path) -> None:
    collector = Collector(with_moments=False, wanted=lambda _: True)
    with running(tiny_moe, collector) as llm:
        decode(llm, TOKENS)
    router = collector.sums["blk.0.ffn_gate_inp.weight"]
    for kind in ("gate", "up", "down"):
        sums = collector.sums[f"blk.0.ffn_{kind}_exps.weight"]
        assert sums.counts.sum() == len(TOKENS) * USED
        assert ((sums.squares.sum(axis=1) > 0) == (sums.counts > 0)).all()
        if kind != "down":  # every token goes to two experts, with the router's inputs
            np.testing.assert_allclose(sums.squares.sum(axis=0), USED * router.squares[0], rtol=1e-4)
