"""The sampler that draws by a race (csrc/race.c), inside llama.cpp's chain."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import llama_cpp
import numpy as np
import pytest

import twofold
from sampling_test import load
from twofold.decoder import make_sampler

OPEN = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "temp": 1.0}
GOLDEN, MASK = 0x9E3779B97F4A7C15, 2**64 - 1


@pytest.fixture(scope="module")
def llm(tiny_pair: Path) -> Iterator[twofold.Llama]:
    model = load(tiny_pair)
    yield model
    model.close()


def names(sampler: object) -> list[bytes]:
    chain = sampler.sampler  # type: ignore[attr-defined]
    count = llama_cpp.llama_sampler_chain_n(chain)
    return [llama_cpp.llama_sampler_name(llama_cpp.llama_sampler_chain_get(chain, i)) for i in range(count)]


def draw(sampler: object, logits: np.ndarray) -> int:
    data = (llama_cpp.llama_token_data * len(logits))(*((i, float(x), 0.0) for i, x in enumerate(logits)))
    array = llama_cpp.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
    llama_cpp.llama_sampler_apply(sampler.sampler, ctypes.byref(array))  # type: ignore[attr-defined]
    return int(array.data[array.selected].id)


def mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def by_definition(seed: int, number: int, logits: np.ndarray) -> int:
    """The winner with every token's noise worked out."""
    with np.errstate(over="ignore"):
        key = mix(mix(np.array([(seed + GOLDEN) & MASK], np.uint64)) + np.uint64(number))
        own = mix(key + np.uint64(GOLDEN) * np.arange(1, len(logits) + 1, dtype=np.uint64))
    rest = ((own >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    return int(np.argmax(logits.astype(np.float64) - np.log(-np.log1p(-rest))))


def test_only_the_draw_is_replaced(llm: twofold.Llama) -> None:
    assert names(make_sampler(llm, **OPEN))[-1] == b"race" and b"dist" not in names(make_sampler(llm, **OPEN))
    assert names(make_sampler(llm, temp=0.0))[-1] == b"greedy"
    assert names(make_sampler(llm, mirostat_mode=2))[-1] == b"mirostat-v2"


def test_draws_are_those_of_the_definition(llm: twofold.Llama) -> None:
    chance = np.random.default_rng(1)
    llm.set_seed(4242)
    sampler = make_sampler(llm, **OPEN)
    for number in range(300):
        logits = (chance.standard_normal(512) * chance.choice([0.1, 1.0, 8.0])).astype(np.float32)
        assert draw(sampler, logits) == by_definition(4242, number, logits)


def test_seeds_are_those_of_llama_cpp(llm: twofold.Llama) -> None:
    """The default seed means one by chance, as it does to llama.cpp."""
    logits = np.zeros(512, np.float32)
    llm.set_seed(llama_cpp.LLAMA_DEFAULT_SEED)
    first, second = (make_sampler(llm, **OPEN) for _ in range(2))
    assert [draw(first, logits) for _ in range(8)] != [draw(second, logits) for _ in range(8)]
    llm.set_seed(5)
    first, second = (make_sampler(llm, **OPEN) for _ in range(2))
    assert [draw(first, logits) for _ in range(8)] == [draw(second, logits) for _ in range(8)]
