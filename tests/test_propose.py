"""Guesses for the base: what is looked up, what another model says, and that the text stays the full model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import twofold
from twofold import errors
from twofold.decoder import Decoder
from twofold.engine import Engine
from twofold.pace import Fixed
from twofold.propose import Lookup, Model, Worth

PROMPT = [40, 41, 42, 43, 44, 45, 46, 47, 48, 49] * 3
SETTINGS: dict[str, Any] = {"n_ctx": 512, "verbose": False, "draft_tokens": 6}


def upto(most: int) -> Worth:
    """So many guesses, whatever their chance."""
    return lambda chance: most


def generate(llm: twofold.Llama, count: int = 60) -> list[int]:
    """Greedy continuation of PROMPT."""
    llm.reset()
    return [int(token) for token, _ in zip(llm.generate(PROMPT, temp=0.0), range(count), strict=False)]


# ---- lookup ------------------------------------------------------------------------------------------


def test_what_followed_the_latest_occurrence() -> None:
    text = [1, 2, 3, 4, 5, 9, 1, 2, 3, 4, 6, 7, 8, 1, 2, 3, 4]
    assert Lookup().propose(text, [], upto(3)) == [6, 7, 8]
    assert Lookup().propose(text, [], upto(1)) == [6]
    assert Lookup().propose(text[:-1], [4, 6], upto(2)) == [7, 8]  # drafted tokens count as text
    assert Lookup().propose(text, [99], upto(3)) == []
    assert Lookup().propose([1, 2], [], upto(3)) == []
    assert Lookup().propose(text, [], upto(0)) == []
    assert len(Lookup().propose(list(range(100)) * 2, [], upto(50))) == 50


def test_the_longest_match_wins() -> None:
    assert Lookup().propose([1, 2, 3, 4, 5, 0, 3, 4, 6, 0, 1, 2, 3, 4], [], upto(1)) == [5]


def test_text_that_grows_and_text_that_changes() -> None:
    lookup = Lookup()
    text = np.array([7, 8, 9, 5, 7, 8, 9], np.intc)
    for end in range(1, len(text) + 1):
        found = lookup.propose(text[:end], [], upto(2))
    assert found == [5, 7]
    assert lookup.propose(np.array([7, 8, 9, 6, 7, 8, 9], np.intc), [], upto(1)) == [6]
    assert lookup.propose(np.array([7, 8], np.intc), [], upto(1)) == []


def test_useless_lengths_rest_and_come_back() -> None:
    """A match whose guesses are wrong is left alone, and tried again later."""
    lookup, text = Lookup(), [1, 2, 3, 4, 5, 1, 2, 3, 4]
    asked = []
    for _ in range(200):
        guesses = lookup.propose(text, [], lambda chance: Fixed(2).guesses(chance, 1))
        asked.append(bool(guesses))
        lookup.outcome(len(guesses), 0)
    assert asked[:5] == [True] * 5
    assert 0 < sum(asked[100:]) < 40


def test_the_chance_of_a_guess() -> None:
    """Each guess counts whose predecessors were right; the last of three is half of the time not."""
    lookup, text, chances = Lookup(), [1, 2, 3, 4, 5, 6, 7, 1, 2, 3, 4], list[float]()

    def worth(chance: float) -> int:
        chances.append(chance)
        return 3

    for turn in range(400):
        assert lookup.propose(text, [], worth) == [5, 6, 7]
        lookup.outcome(3, 3 - turn % 2)
    assert chances[0] == 1.0
    assert np.mean(chances[100:]) == pytest.approx(5 / 6, abs=0.03)


# ---- in the loop -------------------------------------------------------------------------------------


def test_text_is_the_same_with_fewer_drafting_decodes(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that repeats itself: several draft tokens come of one decode, and none differs."""
    decodes: list[int] = []
    real = Decoder.decode

    def decode(self: Decoder, tokens: Any, position: int, *, all_rows: bool) -> None:
        if self._mode == Engine.DRAFT:
            decodes.append(len(tokens))
        real(self, tokens, position, all_rows=all_rows)

    monkeypatch.setattr(Decoder, "decode", decode)
    made = {}
    for drafter in (None, "ngram"):
        decodes.clear()
        llm = twofold.Llama(tiny_pair, drafter=drafter, **SETTINGS)
        made[drafter] = generate(llm), llm.stats["drafted"], len(decodes)
        llm.close()
    plain, guessed = made[None], made["ngram"]
    assert plain[:2] == guessed[:2]
    assert plain[2] == plain[1] and guessed[2] < guessed[1]


class Scripted:
    """Guesses what it is told, and writes down how it did."""

    def __init__(self, guesses: list[int]) -> None:
        self.guesses, self.outcomes, self.late = guesses, list[tuple[int, int]](), 0

    def propose(self, text: Any, drafted: Any, worth: Worth) -> list[int]:
        """Return the guesses."""
        return self.guesses[: worth(1.0)]

    def outcome(self, proposed: int, right: int) -> None:
        """Write it down."""
        self.outcomes.append((proposed, right))


def test_wrong_guesses_change_nothing(tiny_pair: Path) -> None:
    """The draft is what the base alone drafts: only its own tokens up to the first wrong guess are taken."""
    llm = twofold.Llama(tiny_pair, drafter=None, **SETTINGS)
    expected, stats = generate(llm), llm.stats
    llm._proposer = wrong = Scripted([5, 6, 7])
    assert generate(llm) == expected
    assert [llm.stats[key] for key in ("drafted", "accepted")] == [stats[key] for key in ("drafted", "accepted")]
    assert set(wrong.outcomes) >= {(3, 0)} and all(right == 0 for _, right in wrong.outcomes)


def test_a_model_guesses(tiny_pair: Path, tiny_llama: Path) -> None:
    """The source itself as drafter: the same text, and the base agrees with most guesses."""
    llm = twofold.Llama(tiny_pair, drafter=tiny_llama, **SETTINGS)
    expected = twofold.Llama(tiny_pair, drafter=None, **SETTINGS)
    assert generate(llm) == generate(expected)
    assert generate(llm) == generate(expected)  # with what is in its cache by now
    assert isinstance(llm._proposer, Model)


def test_a_models_guesses_are_its_greedy_text(tiny_llama: Path) -> None:
    """Whatever the cache holds from before: a longer text, another one, a shorter one."""
    model = Model(str(tiny_llama), n_ctx=256)
    for text, drafted in ((PROMPT, []), (PROMPT, [40]), (PROMPT[:7], []), ([50, *PROMPT], [1, 2]), (PROMPT[:7], [])):
        fresh = Model(str(tiny_llama), n_ctx=256)
        expected = [int(t) for t, _ in zip(_greedy(fresh, [*text, *drafted]), range(4), strict=False)]
        assert model.propose(text, drafted, upto(4)) == expected
        fresh.close()
    model.close()


def _greedy(model: Model, tokens: list[int]) -> Any:
    model._llama.reset()
    return model._llama.generate(tokens, temp=0.0)


def test_what_cannot_guess_is_refused(tiny_pair: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.FileAccessError, match=r"missing\.gguf: no such file"):
        twofold.Llama(tiny_pair, drafter=tmp_path / "missing.gguf", **SETTINGS)


def test_vocabularies_are_compared(tiny_pair: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the model is loaded; tests of accept show what counts as the same."""
    seen: list[list[Path]] = []
    monkeypatch.setattr("twofold.llama.shared_vocabulary", seen.append)
    twofold.Llama(tiny_pair, drafter=tiny_llama, **SETTINGS)
    assert seen == [[tiny_pair, tiny_llama]]
