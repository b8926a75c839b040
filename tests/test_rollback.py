"""Models with a state: drafts are taken back, and the text is that of plain decoding."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import twofold
from tiny_archs import write
from twofold import errors, separate, speculate
from twofold.cli import main
from twofold.convert import convert
from twofold.decoder import BaseLlama
from twofold.ordinary import OrdinaryLlama
from twofold.pace import Fixed
from twofold.rollback import SNAPSHOTS, Cells, States
from twofold.stats import Stats
from twofold.strategies import of_ordinary

# With and without attention beside the state; with and without snapshots of it.
ARCHS = {"mamba2": False, "rwkv7": False, "falcon-h1": False, "lfm2": True, "qwen35": True}
PROMPT = [260 + 37 * place % 211 for place in range(40)]
SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_batch": 32, "n_threads": 2, "verbose": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("states")


def make(folder: Path, name: str) -> str:
    """Write a model, unless it is there, and convert it with a good and a bad base."""
    if not (folder / f"{name}.gguf").exists():
        own = {"attention__sliding_window": 0} if name == "lfm2" else {}  # saved states lay cells of windows otherwise
        write(folder / f"{name}.gguf", name, gain=1.0 if name == "rwkv7" else 0.5, **own)
        for label, kind in (("good", "q5_k"), ("bad", "q2_k")):
            convert(folder / f"{name}.gguf", folder / f"{name}-{label}", base_type=kind)
    return name


@pytest.fixture(scope="module", params=["falcon-h1", "lfm2"])
def arch(request: pytest.FixtureRequest, folder: Path) -> str:
    """An architecture without, and one with snapshots."""
    return make(folder, str(request.param))


@pytest.fixture(scope="module")
def llm(arch: str, folder: Path) -> Iterator[twofold.Llama]:
    model = twofold.Llama(folder / f"{arch}-good.base.gguf", **SETTINGS)
    yield model
    model.close()


@pytest.fixture(autouse=True)
def _fresh(request: pytest.FixtureRequest) -> None:
    if "llm" in request.fixturenames:
        request.getfixturevalue("llm").reset()


def tokens(llm: twofold.Llama, draft: Any, count: int = 60, prompt: list[int] = PROMPT, **settings: Any) -> list[int]:
    llm.draft_tokens = draft
    generator = llm.generate(prompt, **{"temp": 0.0, **settings})
    made = [int(token) for token in islice(generator, count)]
    generator.close()
    return made


def anew(llm: twofold.Llama, draft: Any, **settings: Any) -> list[int]:
    llm.reset()
    return tokens(llm, draft, **settings)


def states(llm: BaseLlama) -> States:
    found = llm.decoder.rollback
    assert isinstance(found, States)
    return found


def right(llm: twofold.Llama) -> None:
    """The memory holds the text: what follows it is what follows it after decoding it anew."""
    text = [int(token) for token in llm.input_ids[: llm.n_tokens]]
    llm.eval([300])
    after = llm.decoder.logits(-1).copy()
    llm.reset()
    llm.eval([*text, 300])
    np.testing.assert_allclose(after, llm.decoder.logits(-1), atol=2e-3)


@pytest.mark.parametrize("base", ["good", "bad"])
@pytest.mark.parametrize("name", ARCHS)
def test_text_is_that_of_plain_decoding(name: str, folder: Path, base: str) -> None:
    make(folder, name)
    llm = twofold.Llama(folder / f"{name}-{base}.base.gguf", **SETTINGS)
    plain = tokens(llm, 0)
    rejected = 0
    for draft in (1, 4, 12):  # within the snapshots, and beyond them
        before = states(llm).restored
        assert anew(llm, draft) == plain
        stats = llm._stats
        rejected += stats.complete_checks * (draft + 1) - stats.complete_tokens
        assert stats.agreed_by_position[0] > 0 and states(llm).restored > before
    assert base == "good" or rejected > 0
    if base == "good":  # whole drafts were kept, too
        assert anew(llm, 3) == plain and llm._stats.agreed_by_position[2] > 0
    assert (states(llm).dropped > 0) == ARCHS[name]
    assert states(llm).replayed > 0 or base == "good"
    right(llm)
    llm.close()


def test_guesses_of_repeated_text(llm: twofold.Llama) -> None:
    """Guesses are checked in one batch by the base; those after the first wrong one are taken back within the draft."""
    prompt = PROMPT[:12] * 4
    plain = tokens(llm, 0, prompt=prompt)
    known, llm._proposer = llm._proposer, None
    assert anew(llm, 6, prompt=prompt) == plain
    unaided = llm._stats.agreed_by_position
    guessed = list[tuple[int, int]]()

    class Parrot:
        """Guesses the text, with a mistake after two tokens."""

        late = 0

        def propose(self, text: Any, drafted: Any, worth: Any) -> list[int]:
            at = len(text) + len(drafted) - len(prompt)
            return [*plain[at : at + 2], 7, 7][: worth(1.0)]

        def outcome(self, proposed: int, right: int) -> None:
            guessed.append((proposed, right))

    llm._proposer = Parrot()
    try:
        assert anew(llm, 6, prompt=prompt) == plain
    finally:
        llm._proposer = known
    assert any(0 < right < proposed for proposed, right in guessed)
    assert llm._stats.agreed_by_position == unaided  # the base drafts what it would have drafted alone


def test_sampled_text_is_the_same_with_and_without_drafts(llm: twofold.Llama) -> None:
    made = []
    for draft in (0, 4):
        llm.set_seed(7)
        made.append(anew(llm, draft, temp=0.8))
    assert made[0] == made[1]


def test_auto_pace(llm: twofold.Llama) -> None:
    assert anew(llm, "auto") == anew(llm, 0)


def test_prompts_that_go_on_are_not_decoded_again(llm: twofold.Llama) -> None:
    made = tokens(llm, 4, 13)
    longer = [*PROMPT, *made, 300, 301]
    going_on = tokens(llm, 4, 10, longer)
    assert llm.stats["prompt_tokens"] <= 3 + 4
    assert going_on == anew(llm, 0, count=10, prompt=longer)
    assert tokens(llm, 4, 12) == made[:12]  # a shorter prompt: the state cannot be cut so far back
    assert llm.stats["prompt_tokens"] == len(PROMPT)
    other = [*PROMPT[:20], 400, *PROMPT[21:]]
    assert tokens(llm, 4, 12, other) == anew(llm, 0, count=12, prompt=other)


@pytest.mark.parametrize("draft", [0, 4])
def test_callers_that_stop_anywhere(llm: twofold.Llama, draft: int) -> None:
    plain = tokens(llm, 0, 20)
    for count in range(1, 9):
        assert anew(llm, draft, count=count) == plain[:count]
        assert llm.n_tokens <= len(PROMPT) + count
        right(llm)
        anew(llm, draft, count=count)
        # The last token handed out is not decoded yet: it is what follows.
        assert next(llm.generate([], reset=False, temp=0.0)) == plain[count - 1]
        anew(llm, draft, count=count)
        assert llm.sample(temp=0.0) == plain[count - 1]


def test_tokens_sent_in_and_states_saved(llm: twofold.Llama) -> None:
    llm.draft_tokens = 4
    source = llm.generate(PROMPT, temp=0.0)
    first = next(source)
    after = source.send(np.array([390, 391]))  # type: ignore[arg-type]
    source.close()
    assert after == anew(llm, 0, count=1, prompt=[*PROMPT, first, 390, 391])[0]
    made = anew(llm, 4, count=30)
    state = llm.save_state()
    anew(llm, 4, prompt=PROMPT[::-1])
    llm.load_state(state)
    longer = [*PROMPT, *made]
    assert tokens(llm, 4, 20, longer) == anew(llm, 0, count=20, prompt=longer)
    made = anew(llm, 4, count=9)
    state = llm.save_state()
    anew(llm, 4, prompt=PROMPT[::-1], count=9)
    llm.load_state(state)
    assert next(llm.generate([], reset=False, temp=0.0)) == made[-1]


def test_failed_decodes_leave_nothing_behind(llm: twofold.Llama, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = tokens(llm, 0, 30)
    llm.reset()
    llm.draft_tokens = 4
    source = llm.generate(PROMPT, temp=0.0)
    made = [next(source) for _ in range(8)]
    engine = llm._engine
    monkeypatch.setattr(engine, "end", _fail)
    with pytest.raises(errors.DecodeError, match="on purpose"):
        made.extend(source)
    monkeypatch.undo()
    assert plain[: len(made)] == made
    assert tokens(llm, 4, 30) == plain
    right(llm)


def test_nothing_is_trusted_after_a_decode_that_failed_half_way(
    llm: twofold.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, real = llm.decoder, llama_cpp.llama_decode
    decoder.truncate(0)
    decoder.decode(PROMPT[:30], 0, all_rows=False)
    decoder.mark()
    monkeypatch.setattr(llama_cpp, "llama_decode", lambda *arguments: -3 - real(*arguments))
    with pytest.raises(errors.DecodeError, match="returned -3: failed"):
        decoder.decode([300], 30, all_rows=False)
    monkeypatch.undo()
    assert decoder.keep(30) == 0 == states(llm).end
    decoder.decode(PROMPT[:30], 0, all_rows=False)
    assert decoder.keep(30) == 30


def test_callers_that_set_the_length(llm: twofold.Llama) -> None:
    """llama_cpp's own way to cut a text: the state is made anew from the tokens that stay."""
    llm.eval(PROMPT)
    llm.n_tokens = 20
    llm.eval([300])
    assert llm.n_tokens == 21
    after = llm.decoder.logits(-1).copy()
    llm.reset()
    llm.eval([*PROMPT[:20], 300])
    np.testing.assert_array_equal(after, llm.decoder.logits(-1))


def _fail() -> None:
    raise errors.DecodeError("on purpose")


def test_what_was_not_marked_is_lost(llm: twofold.Llama) -> None:
    decoder = llm.decoder
    decoder.truncate(0)
    start = PROMPT[:30]
    decoder.decode(start, 0, all_rows=False)
    decoder.decode([300], len(start), all_rows=False)
    with pytest.raises(errors.DecodeError, match="the state after 20 tokens is lost"):
        decoder.truncate(20)
    assert decoder.keep(20) == 0 == states(llm).end
    decoder.decode(start, 0, all_rows=False)
    decoder.mark()
    decoder.decode([300, 301, 302], len(start), all_rows=True)
    expected = [decoder.logits(row).copy() for row in range(3)]
    for place in (2, 1, 0, 2):  # there and back again: cut, and decode what was cut off
        decoder.truncate(len(start) + place)
        assert states(llm).end == len(start) + place
        decoder.decode([300, 301, 302][place:], len(start) + place, all_rows=True)
        for row, logits in enumerate(expected[place:]):
            np.testing.assert_allclose(decoder.logits(row), logits, atol=2e-3)
    for way in ("dropped", "never decoded"):  # what a snapshot dropped is not decoded again
        decoder.truncate(len(start))
        if way == "dropped":
            decoder.decode([300, 301, 302], len(start), all_rows=False)
            decoder.truncate(len(start) + 2)
        else:
            decoder.decode([300, 301], len(start), all_rows=False)
        decoder.decode([305], len(start) + 2, all_rows=False)
        decoder.decode([306], len(start) + 3, all_rows=False)
        decoder.truncate(len(start) + 3)
        decoder.decode([306], len(start) + 3, all_rows=False)
        expected.append(decoder.logits(-1).copy())
    np.testing.assert_allclose(expected[-1], expected[-2], atol=2e-3)


def test_small_batches_have_no_snapshots(arch: str, folder: Path) -> None:
    path = folder / f"{arch}-good.base.gguf"
    for settings, most in (({"n_batch": 2}, 0), ({"n_batch": 4}, 2), ({"draft_tokens": 2}, 2), ({}, SNAPSHOTS)):
        llm = twofold.Llama(path, **{**SETTINGS, **settings})
        assert states(llm)._snapshots == (most if ARCHS[arch] else 0)
        assert ("leaves" in llm.rollback) == (ARCHS[arch] and most > 0)
        assert tokens(llm, 4, 20) == anew(llm, 0, count=20)
        llm.close()


def test_other_models_that_draft(arch: str, folder: Path) -> None:
    """A model with a state guesses for the base, and drafts as a separate model does."""
    source = folder / f"{arch}.gguf"
    llm = twofold.Llama(folder / f"{arch}-bad.base.gguf", drafter=source, **SETTINGS)
    plain = tokens(llm, 0, 30)
    assert anew(llm, 4, count=30) == plain
    llm.close()
    target, small = (OrdinaryLlama(source, n_ctx=256, n_threads=2, verbose=False) for _ in range(2))
    stats = Stats()
    made = list(islice(separate.generate(target.decoder, small.decoder, PROMPT, 3, stats), 30))
    target.reset()
    assert made == list(islice(target.generate(PROMPT, temp=0.0), 30))
    assert stats.complete_tokens == 4 * stats.complete_checks  # it drafts for itself
    with pytest.raises(errors.UnsupportedError, match="prompt lookup"):
        list(of_ordinary(target, "x", [4], {}))
    for model in (target, small):
        model.close()


def test_agreement_is_counted_without_a_trace(llm: twofold.Llama) -> None:
    text = tokens(llm, 0, 20)
    llm.reset()
    llm.eval(PROMPT)
    for place in range(0, 12, 3):
        llm.eval(text[llm.n_tokens - len(PROMPT) : place])
        count = speculate.agreeing(llm.decoder, text[place:], len(PROMPT) + place, 6)
        how = speculate.Drafting(Fixed(6))
        made = speculate.draft(llm.decoder, text[place], len(PROMPT) + place, 6, how)
        agreed = next((i for i in range(6) if made[i] != text[place + 1 + i]), 6)
        assert count == agreed
    right(llm)


def test_caches_of_keys_and_values_are_cut(tiny_pair: Path) -> None:
    llm = twofold.Llama(tiny_pair, **SETTINGS)
    assert isinstance(llm.decoder.rollback, Cells)
    assert llm.rollback == ""


def test_command_line_says_how(arch: str, folder: Path, tiny_pair: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path, said in ((folder / f"{arch}-good.base.gguf", True), (tiny_pair, False)):
        assert main(["generate", str(path), "-p", "the people", "-n", "4", "--raw"]) == 0
        assert ("the recurrent state is copied before each draft" in capsys.readouterr().err) == said
