"""twofold.Llama: the loop against plain decoding, and everything that can end or disturb it."""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

import twofold
from make_tiny import write_tiny
from twofold import errors
from twofold.convert import convert
from twofold.decoder import SPLIT_MODE_TENSOR, Decoder

PROMPT = "the people would have there about which"


@pytest.fixture(scope="module")
def llm(tiny_pair: Path) -> Iterator[twofold.Llama]:
    model = twofold.Llama(tiny_pair, n_ctx=512, n_batch=64, verbose=False, logits_all=True)
    yield model
    model.close()


@pytest.fixture(autouse=True)
def _defaults(request: pytest.FixtureRequest) -> None:
    if "llm" in request.fixturenames:
        model = request.getfixturevalue("llm")
        model.draft_tokens, model.residual_bits = 4, 8
        model.reset()


def tokens(llm: twofold.Llama, count: int = 40, text: str = PROMPT, **settings: Any) -> list[int]:
    """Generate, plainly if draft_tokens is 0."""
    made = []
    for token in llm.generate(llm.tokenize(text.encode()), **{"temp": 0.0, **settings}):
        made.append(token)
        if len(made) == count:
            break
    return made


def plain(llm: twofold.Llama, *arguments: Any, **settings: Any) -> list[int]:
    before, llm.draft_tokens = llm.draft_tokens, 0
    llm.reset()
    made = tokens(llm, *arguments, **settings)
    llm.draft_tokens = before
    llm.reset()
    return made


def assert_cache_is_right(llm: twofold.Llama) -> None:
    """What is generated from the cache as it stands equals what a fresh one gives."""
    kept = llm._input_ids.tolist()
    assert llama_cpp.llama_memory_seq_pos_max(llm._ctx.memory, 0) == len(kept) - 1
    continued = [token for token, _ in zip(llm.generate([*kept, 65], temp=0.0), range(8), strict=False)]
    llm.reset()
    llm._decoder.truncate(0)
    assert continued == [token for token, _ in zip(llm.generate([*kept, 65], temp=0.0), range(8), strict=False)]


@pytest.mark.parametrize("draft", [1, 2, 3, 7, 16, 32])
def test_greedy_is_plain_greedy(llm: twofold.Llama, draft: int) -> None:
    llm.draft_tokens = draft
    expected = plain(llm)
    assert tokens(llm) == expected
    stats = llm.stats
    assert stats["tokens"] == 40 and stats["checks"] < 39
    assert stats["tokens_per_check"] == pytest.approx(39 / stats["checks"], abs=draft / (stats["checks"] - 1))
    assert 1 < stats["tokens_per_check"] <= draft + 1
    assert len(stats["accepted_by_position"]) == draft
    assert stats["accepted_by_position"] == sorted(stats["accepted_by_position"], reverse=True)
    assert stats["residual_bytes"] > 0
    assert_cache_is_right(llm)


@pytest.mark.parametrize(
    "settings",
    [
        {"temp": 0.8},
        {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0},
        {"temp": 0.7, "top_p": 0.5, "repeat_penalty": 1.3},
        {"temp": 1.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"temp": 1.0, "mirostat_mode": 2},
        {"temp": 0.0, "repeat_penalty": 1.5},
    ],
)
def test_sampled_is_plain_sampled(llm: twofold.Llama, settings: dict[str, float]) -> None:
    """The same seed draws the same tokens: each place is drawn from once, in order, by the verifier's chain."""
    for seed in (1, 2, 3):
        llm.set_seed(seed)
        expected = plain(llm, **settings)
        assert tokens(llm, **settings) == expected
    if settings["temp"] > 0:
        llm.set_seed(4)
        assert tokens(llm, **settings) != expected


def test_auto_is_plain_greedy(llm: twofold.Llama) -> None:
    """Whatever lengths it chooses the text is the full model's, and it does choose to draft where that is cheap."""
    llm.draft_tokens = "auto"
    expected = plain(llm)
    assert llm.draft_tokens == "auto"
    assert tokens(llm) == expected
    assert llm.stats["drafted"] > 0


def test_sampled_drafts_guess_with_the_samplers_own_random_numbers(
    llm: twofold.Llama, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where base and full model are one, every draft is drawn as the full model draws it, penalties and all."""
    settings = {"temp": 1.3, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.2}
    monkeypatch.setattr(Decoder, "drafting", lambda self: nullcontext())
    llm.draft_tokens = 3
    llm.set_seed(11)
    drawn = tokens(llm, **settings)
    assert llm.stats["accepted_by_position"][2] >= 0.9
    with monkeypatch.context() as patch:
        patch.setattr(Decoder, "guessing", lambda self, sampler: nullcontext(self.greedy))
        llm.set_seed(11)
        assert tokens(llm, **settings) == drawn
        assert llm.stats["accepted_by_position"][2] < 0.5


def test_grammar_bias_and_processors(llm: twofold.Llama) -> None:
    grammar = llama_cpp.LlamaGrammar.from_string('root ::= ("ab" | "cd" | " the")+', verbose=False)
    options: dict[str, Any] = {"max_tokens": 24, "temperature": 1.0, "seed": 5}
    with_grammar = llm.create_completion(PROMPT, grammar=grammar, **options)["choices"][0]["text"]
    assert set(with_grammar.replace(" the", "").replace("ab", "").replace("cd", "")) <= set(" theabcd")
    llm.draft_tokens = 0
    llm.reset()
    assert llm.create_completion(PROMPT, grammar=grammar, **options)["choices"][0]["text"] == with_grammar
    wanted = llm.tokenize(b" people", add_bos=False)[-1]
    for draft in (0, 4):
        llm.draft_tokens = draft
        biased = llm.create_completion(PROMPT, logit_bias={wanted: 100.0}, **options)["choices"][0]["text"]
        assert biased.split() == ["people"] * 24
    seen = []

    def remember(ids: np.ndarray, logits: np.ndarray) -> np.ndarray:
        seen.append(list(ids))
        return logits

    processors = llama_cpp.LogitsProcessorList([remember])
    made = tokens(llm, 20, logits_processor=processors)
    start = llm.tokenize(PROMPT.encode())
    assert seen == [[*start, *made[:i]] for i in range(20)]  # each place sees all that is before it


def test_end_of_generation_inside_a_draft(llm: twofold.Llama) -> None:
    """EOS is made likely at one place: the text ends there and the next call starts from a right cache."""
    end = llm.token_eos()
    for place in range(1, 8):

        def push(ids: np.ndarray, logits: np.ndarray, place: int = place) -> np.ndarray:
            if len(ids) == len(llm.tokenize(PROMPT.encode())) + place:
                logits = logits.copy()
                logits[end] = 1000.0
            return logits

        done = llm.create_completion(
            PROMPT, max_tokens=32, temperature=0.0, logits_processor=llama_cpp.LogitsProcessorList([push])
        )
        assert done["choices"][0]["finish_reason"] == "stop"
        assert done["usage"]["completion_tokens"] == place
        assert_cache_is_right(llm)


def test_stop_strings_max_tokens_and_streams(llm: twofold.Llama) -> None:
    whole = llm.create_completion(PROMPT, max_tokens=48, temperature=0.0)["choices"][0]["text"]
    stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
    done = llm.create_completion(PROMPT, max_tokens=48, temperature=0.0, stop=[stop])["choices"][0]
    assert done["text"] == whole[: whole.index(stop)] and done["finish_reason"] == "stop"
    assert_cache_is_right(llm)
    for count in (1, 2, 3, 5):
        done = llm.create_completion(PROMPT, max_tokens=count, temperature=0.0)
        assert done["usage"]["completion_tokens"] == count == llm.stats["tokens"]
        assert whole.startswith(done["choices"][0]["text"])
    parts = llm.create_completion(PROMPT, max_tokens=48, temperature=0.0, stream=True)
    assert "".join(part["choices"][0]["text"] for part in parts) == whole
    messages = [{"role": "user", "content": "there would"}]
    answer = llm.create_chat_completion(messages, max_tokens=16, temperature=0.0)["choices"][0]["message"]["content"]
    streamed = llm.create_chat_completion(messages, max_tokens=16, temperature=0.0, stream=True)
    assert "".join(part["choices"][0]["delta"].get("content", "") for part in streamed) == answer


def test_logprobs(llm: twofold.Llama) -> None:
    done = {}
    for draft in (0, 4):
        llm.draft_tokens = draft
        llm.reset()
        done[draft] = llm.create_completion(PROMPT, max_tokens=20, temperature=0.0, logprobs=3)["choices"][0][
            "logprobs"
        ]
    assert done[4]["tokens"] == done[0]["tokens"]
    np.testing.assert_allclose(done[4]["token_logprobs"], done[0]["token_logprobs"], atol=1e-5)
    assert max(done[4]["token_logprobs"]) < 0.0


def test_caller_that_stops_early(llm: twofold.Llama) -> None:
    expected = plain(llm, 20)
    for count in range(1, 12):
        llm.reset()
        assert tokens(llm, count) == expected[:count]
        assert llm.n_tokens <= len(llm.tokenize(PROMPT.encode())) + count
        assert_cache_is_right(llm)
    stream = llm.create_completion(PROMPT, max_tokens=40, temperature=0.0, stream=True)
    next(stream)
    stream.close()
    assert_cache_is_right(llm)


def test_prefix_is_reused(llm: twofold.Llama) -> None:
    first = llm.tokenize(PROMPT.encode())
    made = tokens(llm, 12)
    assert llm.stats["prompt_tokens"] == len(first)
    longer = [*first, *made, 70, 71]
    continued = [token for token, _ in zip(llm.generate(longer, temp=0.0), range(10), strict=False)]
    assert llm.stats["prompt_tokens"] <= 4
    llm.reset()
    assert continued == [token for token, _ in zip(llm.generate(longer, temp=0.0), range(10), strict=False)]
    assert tokens(llm, 12) == made  # a shorter prompt cuts the cache back
    assert llm.stats["prompt_tokens"] == 1


def test_prompt_longer_than_a_batch(llm: twofold.Llama) -> None:
    text = PROMPT * 20
    assert len(llm.tokenize(text.encode())) > 2 * llm.n_batch
    expected = plain(llm, 20, text)
    assert tokens(llm, 20, text) == expected
    assert_cache_is_right(llm)


def test_empty_prompt(llm: twofold.Llama) -> None:
    assert len([token for token, _ in zip(llm.generate([], temp=0.0), range(5), strict=False)]) == 5
    assert llm.create_completion("", max_tokens=5, temperature=0.0)["usage"]["completion_tokens"] == 5


def test_context_nearly_full(llm: twofold.Llama) -> None:
    start = llm.tokenize(PROMPT.encode())
    filler = (start * 60)[: llm.n_ctx() - 6]
    llm.draft_tokens = 8
    made = []
    with pytest.raises(errors.DecodeError, match="context of 512 tokens is full"):
        made.extend(token for token in _collect(llm.generate(filler, temp=0.0), made))
    assert len(made) == 7  # one after each of the last cells, and the one that has no cell
    assert_cache_is_right_when_full(llm)
    with pytest.raises(ValueError, match="exceed context window"):
        llm.create_completion(start * 60)
    done = llm.create_completion(filler, max_tokens=None, temperature=0.0)
    assert done["choices"][0]["finish_reason"] == "length"
    assert done["usage"]["total_tokens"] == llm.n_ctx()


def _collect(source: Iterator[int], made: list[int]) -> Iterator[int]:
    for token in source:
        made.append(token)
        if False:
            yield token


def assert_cache_is_right_when_full(llm: twofold.Llama) -> None:
    assert llama_cpp.llama_memory_seq_pos_max(llm._ctx.memory, 0) == llm.n_tokens - 1


def test_tokens_sent_into_the_generator(llm: twofold.Llama) -> None:
    source = llm.generate(llm.tokenize(PROMPT.encode()), temp=0.0)
    first = next(source)
    after = source.send(np.array([90, 91]))
    source.close()
    llm.reset()
    assert after == next(llm.generate([*llm.tokenize(PROMPT.encode()), first, 90, 91], temp=0.0))


def test_stopping_criteria(llm: twofold.Llama) -> None:
    limit = len(llm.tokenize(PROMPT.encode())) + 6
    criteria = llama_cpp.StoppingCriteriaList([lambda ids, logits: len(ids) >= limit and len(logits) > 1])
    done = llm.create_completion(PROMPT, max_tokens=40, temperature=0.0, stopping_criteria=criteria)
    assert done["usage"]["completion_tokens"] == 6


def test_verifiers_differ_and_zero_bits_is_the_base(llm: twofold.Llama, tiny_pair: Path) -> None:
    logits = {}
    for bits in (4, 6, 8, 0):
        llm.residual_bits = bits
        llm.reset()
        llm.eval(llm.tokenize(PROMPT.encode()))
        logits[bits] = llm.scores[llm.n_tokens - 1].copy()
    distance = {bits: float(np.abs(logits[bits] - logits[8]).max()) for bits in (0, 4, 6)}
    assert distance[0] > 4 * distance[4] > 8 * distance[6] > 0
    stock = llama_cpp.Llama(str(tiny_pair), n_ctx=512, verbose=False, logits_all=True, flash_attn=True)
    stock.eval(stock.tokenize(PROMPT.encode()))
    np.testing.assert_allclose(logits[0], stock.scores[stock.n_tokens - 1], atol=0.3)


def test_state_can_be_saved_and_pickled(llm: twofold.Llama) -> None:
    expected = tokens(llm, 10)
    state = llm.save_state()
    llm.reset()
    llm.load_state(state)
    assert tokens(llm, 10) == expected
    llm.draft_tokens = 2
    copy = pickle.loads(pickle.dumps(llm))
    assert (copy.draft_tokens, copy.residual_bits) == (2, 8)
    assert tokens(copy, 10) == expected


def test_saved_states_of_sliding_windows(tmp_path: Path) -> None:
    """llama.cpp puts tokens after a loaded state into cells that left the window; a later prompt wants those back."""
    write_tiny(tmp_path / "gemma3.gguf", "gemma3")
    # Small batches: ggml's flash attention computes many rows at once in another way.
    base = convert(tmp_path / "gemma3.gguf", tmp_path / "g").base
    llm = twofold.Llama(base, n_ctx=512, n_batch=32, verbose=False)
    text = llm.tokenize(PROMPT.encode()) * 20
    assert len(text) > 140  # more than the window
    before = [token for token, _ in zip(llm.generate(text, temp=0.0), range(8), strict=False)]
    state = llm.save_state()
    llm.load_state(state)
    assert llm.n_tokens == state.n_tokens > 140
    after = llm.generate([*text, *before], temp=0.0)
    for _ in range(60):
        next(after)
    after.close()
    llm.n_tokens = 150
    llm.eval([90])
    cut = llm.decoder.logits(-1).copy()
    llm.reset()
    llm.eval([*text[:150], 90])
    np.testing.assert_allclose(cut, llm.decoder.logits(-1), atol=1e-5)


def test_closed_or_collected_models(tiny_pair: Path) -> None:
    """A generator that outlives its model ends quietly; further calls say that the model is closed."""
    model = twofold.Llama(tiny_pair, n_ctx=256, verbose=False)
    source = model.generate(model.tokenize(PROMPT.encode()), temp=0.0)
    next(source)
    model.close()
    source.close()
    with pytest.raises(errors.DecodeError, match="closed"):
        next(model.generate([5, 6], temp=0.0))
    model = twofold.Llama(tiny_pair, n_ctx=256, verbose=False)
    model.kept = model.generate(model.tokenize(PROMPT.encode()), temp=0.0)
    next(model.kept)
    del model
    gc.collect()


def test_continuing_without_reset(llm: twofold.Llama) -> None:
    expected = plain(llm, 12)
    for count in range(1, 10):
        llm.reset()
        tokens(llm, count)
        # The last token handed out is not in the cache: it is what follows there.
        assert next(llm.generate([], reset=False, temp=0.0)) == expected[count - 1]
        tokens(llm, count)
        assert llm.sample(temp=0.0) == expected[count - 1]
        llm.eval(expected[count - 1 : count])
        assert llm.sample(temp=0.0) == expected[count]


@pytest.mark.parametrize("settings", [{"n_batch": 1}, {"n_ctx": 100}, {"n_ctx": 100, "logits_all": True}])
def test_small_batches_and_odd_contexts(llm: twofold.Llama, tiny_pair: Path, settings: dict[str, Any]) -> None:
    expected = plain(llm, 150)
    model = twofold.Llama(tiny_pair, verbose=False, **{"n_ctx": 256, **settings})
    assert tokens(model, 150) == expected


def test_refusals_of_llama_cpp_are_named(llm: twofold.Llama) -> None:
    with pytest.raises(errors.DecodeError, match="invalid batch"):
        llm.eval([100_000])
    llm.reset()
    with pytest.raises(errors.DecodeError, match="no room in the context"):
        llm.eval([70] * 600)


def test_older_generators_leave_the_cache_alone(llm: twofold.Llama) -> None:
    expected = plain(llm, 20)
    older = llm.generate(llm.tokenize(b"which would"), temp=0.0)
    next(older)
    newer = llm.generate(llm.tokenize(PROMPT.encode()), temp=0.0)
    made = [next(newer) for _ in range(3)]
    with pytest.raises(errors.DecodeError, match="another call"):
        next(older)
    older.close()
    assert [*made, *(next(newer) for _ in range(17))] == expected


def test_states_of_another_verifier_are_not_used(llm: twofold.Llama) -> None:
    tokens(llm, 5)
    state = llm.save_state()
    llm.residual_bits = 4
    llm.load_state(state)
    tokens(llm, 5)
    assert llm.stats["prompt_tokens"] == len(llm.tokenize(PROMPT.encode()))


def test_vocab_only(tiny_pair: Path) -> None:
    model = twofold.Llama(tiny_pair, vocab_only=True, verbose=False)
    assert model.tokenize(b"the people")
    with pytest.raises(errors.UnsupportedError, match="vocab_only"):
        next(model.generate([5, 6]))


def test_memory_is_counted(llm: twofold.Llama, tiny_pair: Path) -> None:
    matrices = {name: t for name, t in ((t.name, t) for t in llm._engine.residual.tensors())}
    weights = sum(t.shape[1] * t.shape[2] for t in matrices.values())
    assert llm.memory == {"residual_bytes": weights * 8.125 / 8, "base_panel_bytes": weights * 2.625 / 8}
    llm.residual_bits = 4
    assert llm.memory["residual_bytes"] == weights * 4.125 / 8
    plain = twofold.Llama(tiny_pair, claim=False, preload=False, n_ctx=64, verbose=False)
    assert plain.memory["base_panel_bytes"] == 0


def test_residual_is_locked(tiny_pair: Path) -> None:
    def locked() -> int:
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmLck")).split()[1])

    before = locked()
    llm = twofold.Llama(tiny_pair, use_mlock=True, n_ctx=64, verbose=False)
    assert (locked() - before) * 1024 >= llm.memory["residual_bytes"]


@pytest.mark.parametrize("value", [-1, 33, 2.5, True, "4"])
def test_draft_tokens_outside_what_is_allowed(llm: twofold.Llama, value: object) -> None:
    with pytest.raises(errors.ArgumentError, match="from 0 to 32"):
        llm.draft_tokens = value


def test_residual_bits_outside_what_is_allowed(llm: twofold.Llama, tiny_pair: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="0, 4, 6 and 8"):
        llm.residual_bits = 5
    with pytest.raises(errors.ArgumentError, match="0, 4, 6 and 8"):
        twofold.Llama(tiny_pair, residual_bits=3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"n_gpu_layer": 1}, errors.UnknownArgumentError, "did you mean n_gpu_layers"),
        ({"frobnicate": 1}, TypeError, "no argument 'frobnicate'"),
        ({"split_mode": SPLIT_MODE_TENSOR}, errors.UnsupportedError, "LAYER"),
        ({"draft_model": object()}, errors.UnsupportedError, "own base"),
        ({"swa_full": False}, errors.UnsupportedError, "swa_full"),
    ],
)
def test_arguments_that_are_refused(
    arguments: dict[str, Any], error: type[Exception], message: str, tiny_pair: Path
) -> None:
    with pytest.raises(error, match=message):
        twofold.Llama(tiny_pair, **arguments)


def test_graph_that_is_reordered_is_refused(tiny_pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GGML_CUDA_GRAPH_OPT", "1")
    with pytest.raises(errors.UnsupportedError, match="GGML_CUDA_GRAPH_OPT"):
        twofold.Llama(tiny_pair)


def test_ordinary_model_is_refused(tiny_llama: Path) -> None:
    with pytest.raises(errors.FileAccessError, match="convert"):
        twofold.Llama(tiny_llama)


def test_grammar_that_cannot_be_read(llm: twofold.Llama) -> None:
    """llama_cpp puts a null pointer into the sampler chain, and the process ends."""
    for rules in ("root ::= [a-", 'other ::= "a"', 'root ::= root "a" | "b"'):
        with pytest.raises(errors.ArgumentError, match="cannot read this grammar"):
            llm.create_completion(PROMPT, grammar=llama_cpp.LlamaGrammar.from_string(rules), max_tokens=4)
    many = "".join(f"r{i} ::= r{i + 1}\n" for i in range(20000))
    with pytest.raises(errors.ArgumentError, match="more than 20000 rules"):
        grammar = llama_cpp.LlamaGrammar.from_string(f'root ::= r0\n{many}r20000 ::= "a"')
        llm.create_completion(PROMPT, grammar=grammar, max_tokens=4)
    for depth, message in ((2001, "more than 2000 parentheses"), (2000, None)):
        deep = llama_cpp.LlamaGrammar.from_string("root ::= " + "(" * depth + '"a"' + ")" * depth)
        if message:
            with pytest.raises(errors.ArgumentError, match=message):
                llm.create_completion(PROMPT, grammar=deep, max_tokens=4)
        else:
            assert llm.create_completion(PROMPT, grammar=deep, max_tokens=4)["choices"][0]["text"] == "a"
