"""Base + residual inside llama.cpp's graph against the merged model, on the CPU and on a device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import twofold
from make_tiny import write_tiny
from measure_verifier import kl_divergence, logits_of
from twofold import _native, errors
from twofold.convert import convert
from twofold.merge import merge

TEXT = "the people would have there about which some could return self.import(10) == 20, and know first of all " * 2
SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_batch": 64, "logits_all": True, "verbose": False}


@pytest.fixture(scope="module", params=["llama", "qwen2", "gemma3", "qwen3moe"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A pair, and the logits of its merged model after each token of TEXT."""
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(folder / "source.gguf", request.param)
    base = convert(folder / "source.gguf", folder / "m").base
    merged = llama_cpp.Llama(str(merge(base, folder / "merged.gguf", type="f32").path), **SETTINGS)
    return base, logits_of(merged, merged.tokenize(TEXT.encode()))


@pytest.mark.parametrize("claim", [True, False])
@pytest.mark.parametrize("n_ubatch", [64, 7])
def test_verifier_is_the_merged_model(model: tuple[Path, np.ndarray], claim: bool, n_ubatch: int) -> None:
    """Several graphs for one batch (n_ubatch) too: each must take its own activations."""
    base, reference = model
    llm = twofold.Llama(base, claim=claim, n_ubatch=n_ubatch, **SETTINGS)
    logits = logits_of(llm, llm.tokenize(TEXT.encode()))
    divergences = np.sort(kl_divergence(reference, logits))
    assert (llm._engine.counters()["compute_s"] == 0) == claim  # claimed: nothing was left to add, of experts neither
    assert divergences[:-1].mean() < 0.002  # one token may be next to a tie of experts, and go to the other one
    drafts = logits_of(llm, llm.tokenize(TEXT.encode()), draft=True)
    assert kl_divergence(reference, drafts).mean() > 0.02  # the base alone is far off: the residual did it


def test_draft_is_stock_llama_cpp_bit_for_bit(model: tuple[Path, np.ndarray]) -> None:
    base, _ = model
    llm = twofold.Llama(base, claim=False, flash_attn=False, n_threads=2, **SETTINGS)
    stock = llama_cpp.Llama(str(base), flash_attn=False, n_threads=2, n_threads_batch=2, **SETTINGS)
    tokens = llm.tokenize(TEXT.encode())
    np.testing.assert_array_equal(logits_of(llm, tokens, draft=True), logits_of(stock, tokens))
    assert not np.array_equal(logits_of(llm, tokens), logits_of(stock, tokens))


def test_claimed_draft_is_close_to_stock_llama_cpp(model: tuple[Path, np.ndarray]) -> None:
    base, _ = model
    llm, stock = twofold.Llama(base, claim=True, **SETTINGS), llama_cpp.Llama(str(base), flash_attn=True, **SETTINGS)
    tokens = llm.tokenize(TEXT.encode())
    drafts, theirs = logits_of(llm, tokens, draft=True), logits_of(stock, tokens)
    # The median: where two experts are nearly as likely, rounding picks the other one, for one token.
    assert np.median(kl_divergence(theirs, drafts)) < 0.002
    assert not np.array_equal(drafts, theirs)  # it was claimed


@pytest.mark.parametrize("base_type", ["q3_k", "q4_k", "q5_k", "q6_k"])
def test_bases_of_all_k_types_are_claimed(tiny_llama: Path, base_type: str, tmp_path: Path) -> None:
    base = convert(tiny_llama, tmp_path / "m", base_type=base_type).base
    llm = twofold.Llama(base, **SETTINGS)
    tokens = llm.tokenize(TEXT.encode())
    merged = llama_cpp.Llama(str(merge(base, tmp_path / "merged.gguf", type="f32").path), **SETTINGS)
    assert kl_divergence(logits_of(merged, tokens), logits_of(llm, tokens)).mean() < 0.002
    stock = llama_cpp.Llama(str(base), flash_attn=True, **SETTINGS)
    drafts, theirs = logits_of(llm, tokens, draft=True), logits_of(stock, tokens)
    assert kl_divergence(theirs, drafts).mean() < 0.002
    assert not np.array_equal(drafts, theirs)  # it was claimed


def test_tokens_have_the_same_bits_in_every_batch(tmp_path: Path) -> None:
    write_tiny(tmp_path / "source.gguf", "llama")
    llm = twofold.Llama(convert(tmp_path / "source.gguf", tmp_path / "m").base, **SETTINGS)
    tokens = llm.tokenize(TEXT.encode())[:33]
    decoder, results = llm._decoder, []
    for width in (1, 2, 3, 8, 11):
        decoder.truncate(0)
        rows = []
        for position in range(0, 33 - 33 % width, width):
            decoder.decode(tokens[position : position + width], position, all_rows=True)
            rows += [decoder.logits(row).copy() for row in range(width)]
        results.append(np.array(rows))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0][: len(other)])


def test_residual_that_is_never_applied_is_an_error(tiny_pair: Path) -> None:
    llm = twofold.Llama(tiny_pair, **SETTINGS)
    llm._engine.begin(llm._engine.VERIFY)
    with pytest.raises(errors.DecodeError, match=r"residual of \S+\.weight was never applied"):
        llm._engine.end()


def test_other_library_versions_are_refused() -> None:
    with pytest.raises(errors.VersionError, match=r"0\.3\.35 is installed, this twofold needs 0\.3\.36"):
        _native.check_libraries("0.3.35", "0.25.3", "0.25.3", _native.ABI)
    with pytest.raises(errors.VersionError, match=r"0\.26\.0 is loaded, twofold was built with ggml 0\.25\.3"):
        _native.check_libraries("0.3.36", "0.25.3", "0.26.0", _native.ABI)
    with pytest.raises(errors.VersionError, match=f"ABI {_native.ABI + 1}"):
        _native.check_libraries("0.3.36", "0.25.3", "0.25.3", _native.ABI + 1)


@pytest.mark.vulkan
def test_device_whose_memory_the_host_cannot_see(model: tuple[Path, np.ndarray]) -> None:
    base, reference = model
    llm = twofold.Llama(base, n_gpu_layers=-1, flash_attn=False, **SETTINGS)
    tokens = llm.tokenize(TEXT.encode())
    logits = logits_of(llm, tokens)
    counters = llm._engine.counters()
    assert counters["from_device_bytes"] > 0 and counters["to_device_bytes"] > 0
    assert kl_divergence(reference, logits).mean() < 0.002
    stock = llama_cpp.Llama(str(base), n_gpu_layers=-1, flash_attn=False, **SETTINGS)
    np.testing.assert_array_equal(logits_of(llm, tokens, draft=True), logits_of(stock, tokens))
    assert llm._engine.counters()["to_device_bytes"] == counters["to_device_bytes"]  # drafts do not cross
    llm.reset()  # the cache holds the drafts' entries
    made = [token for token, _ in zip(llm.generate(tokens[:9], temp=0.0), range(12), strict=False)]
    assert llm.stats["checks"] > 0 and llm.stats["drafted"] > 0
    llm.draft_tokens = 0
    llm.reset()
    assert made == [token for token, _ in zip(llm.generate(tokens[:9], temp=0.0), range(12), strict=False)]
