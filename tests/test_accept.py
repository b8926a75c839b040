"""twofold accept: the simulation against the loop it stands for, the texts it uses, the command."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import twofold
from make_tiny import write_tiny
from twofold import accept, accept_report, architecture, drafts, errors, simulate, speculate
from twofold.cli import main
from twofold.convert import convert
from twofold.pace import Fixed
from twofold.prompts import KINDS, prompts
from twofold.simulate import Agreements
from twofold.speculate import Drafting
from twofold.stats import Stats
from twofold.texts import Texts
from twofold.vocabularies import shared_vocabulary

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

QUICK = accept.Settings(depths=(3, 6), tokens=24, count=2)
PROMPT = list(b"the people would have there about which")  # ids that every tiny model has


@pytest.fixture(scope="module")
def llm(tiny_pair: Path) -> Iterator[twofold.Llama]:
    model = twofold.Llama(tiny_pair, n_ctx=1024, verbose=False)
    yield model
    model.close()


# ---- simulation --------------------------------------------------------------------------------------


def looped(longest: list[int], depth: int) -> Stats:
    """Count, token by token and with the real counters, as `Llama._rounds` does for a caller who stops at the end."""
    stats, length, place = Stats(tokens=1), len(longest), 0
    while place < length - 1:
        stats.count_draft(depth)
        for step in range(depth + 1):
            place += 1
            stats.tokens += 1
            if place == length - 1:
                return stats  # the caller has what it wanted: the loop is not resumed
            if step == depth or longest[place - step - 1] <= step:
                stats.count_outcome(step + 1)
                break
            stats.agreed_by_position[step] += 1
    return stats


@pytest.mark.parametrize("seed", range(20))
def test_simulation_is_the_loop(seed: int) -> None:
    chance = random.Random(seed)
    length, depths = chance.randint(1, 90), chance.sample(range(1, 33), 4)
    longest = [chance.choice((0, 1, 2, 5, 30)) for _ in range(length)]
    asked = []

    def draft(place: int, limit: int) -> int:
        asked.append(place)
        assert 1 <= limit <= min(max(depths), length - 1 - place)
        return min(longest[place], limit)

    found = simulate.explore(depths, length, draft)
    assert asked == sorted(set(asked))
    for depth in depths:
        stats = looped(longest, depth)
        assert simulate.complete(found, depth) == (stats.complete_tokens, stats.complete_checks)
        assert len(simulate.advances(found, depth)) == stats.checks


def test_drafts_are_no_deeper_than_the_runs_that_come_by_need() -> None:
    """Depth 8 goes on from place 9, depth 2 visits 0, 3, 6, ... on its own, and both meet at the end of the text."""
    found = simulate.explore([2, 8], 13, lambda place, limit: limit)
    assert found.limits == {0: 8, 3: 2, 6: 2, 9: 3}
    assert found.as_dict() == {"length": 13, "places": [0, 3, 6, 9], "limits": [8, 2, 2, 3], "agreed": [8, 2, 2, 3]}


def test_rows_by_kind_and_interval() -> None:
    good = simulate.explore([4], 64, lambda _, limit: limit)
    bad = simulate.explore([4], 64, lambda *_: 0)
    groups = simulate.by_kind(["code", "chat"], [good, bad])
    rows = {row["kind"]: row for row in simulate.rows(groups, [4])}
    assert list(rows) == ["all", "code", "chat"]
    assert rows["code"] == {
        **{"kind": "code", "k": 4, "tokens_per_check": 5.0, "ci_low": None, "ci_high": None},
        **{"checks": 12, "prompts": 1},
    }
    assert rows["all"]["tokens_per_check"] == (60 + 62) / (12 + 62)
    assert (rows["all"]["ci_low"], rows["all"]["ci_high"]) == (1.0, 5.0)  # the resamples of one text twice


def test_interval_covers_and_repeats() -> None:
    """Checks of 1 to 5 tokens, 3 on average: about 95% of intervals hold the mean."""
    rng = np.random.default_rng(7)
    hits = 0
    for _ in range(200):
        checks = rng.integers(10, 20, 30)
        tokens = np.array([rng.integers(1, 6, count).sum() for count in checks])
        low, high = simulate.interval(tokens, checks)
        assert (low, high) == simulate.interval(tokens, checks)
        assert low is not None and high is not None
        hits += low <= 3 <= high
    assert 176 <= hits <= 199


def test_accepted_by_position_judges_only_what_the_text_shows() -> None:
    found = Agreements(8, {0: 4, 3: 4}, {0: 2, 3: 4})  # the second draft agrees up to the end of the text
    rows = simulate.accepted_by_position({"all": [found]}, 4)
    assert [(row["accepted"], row["drafts"]) for row in rows] == [(1.0, 2), (1.0, 2), (0.5, 2), (0.5, 2)]
    assert simulate.accepted_by_position({"all": [replace(found, length=7)]}, 4)[3]["drafts"] == 1


# ---- drafts ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def measured(tiny_pair: Path, tiny_llama: Path) -> dict[str, Any]:
    return accept.measure([tiny_pair], [tiny_llama], replace(QUICK, count=6, tokens=48))


@pytest.mark.parametrize("depth", [3, 6])
def test_what_the_loop_really_does(measured: dict[str, Any], llm: twofold.Llama, depth: int) -> None:
    llm.draft_tokens = depth
    seen = set()
    for prompt, row in zip(prompts(6), measured["per_prompt"], strict=False):
        tokens = twofold.prompting.chat_tokens(llm, [{"role": "user", "content": prompt["prompt"]}])
        llm.reset()
        for count, _ in enumerate(llm.generate(tokens, temp=0.0), 1):
            if count == 48:
                break
        found = Agreements(row["length"], {}, dict(zip(row["places"], row["agreed"], strict=True)))
        total, checks = simulate.complete(found, depth)
        assert (row["prompt"], row["length"]) == (prompt["id"], 48)
        assert checks == llm.stats["complete_checks"] > 0
        assert total / checks == llm.stats["tokens_per_check"]
        seen.add(total / checks)
    assert len(seen) > 1


@pytest.mark.parametrize("own", [False, True])
def test_agreements_are_those_of_drafts_from_a_fresh_cache(llm: twofold.Llama, tiny_pair: Path, own: bool) -> None:
    text = drafts.make_text(llm, PROMPT, 40)
    model = drafts.of_model("own cache", tiny_pair) if own else drafts.of_pair("pair", tiny_pair, None)
    with drafts.loaded(model, 512) as fresh:
        found = drafts.agreements(fresh, model, PROMPT, text, [2, 9])
        assert drafts.agreements(fresh, model, PROMPT, text, [2, 9]) == found  # now with the prompt in the cache
        for place, limit in found.limits.items():
            fresh.reset()
            fresh.eval([*PROMPT, *text[:place]])
            made = speculate.draft(fresh._decoder, text[place], len(PROMPT) + place, limit, Drafting(Fixed(limit)))
            same = [a == b for a, b in zip(made, text[place + 1 :], strict=False)]
            assert found.agreed[place] == [*same, False].index(False)
    assert len(found.agreed) > 5 and len(set(found.agreed.values())) > 2


def test_a_drafter_with_the_verifiers_weights_agrees_everywhere(tiny_pair: Path) -> None:
    model = drafts.of_model("itself", tiny_pair)
    with drafts.loaded(model, 512) as llm:
        text = drafts.make_text(llm, PROMPT, 60)
        found = drafts.agreements(llm, model, PROMPT, text, [4, 12])
    assert found.agreed == found.limits
    assert simulate.complete(found, 4) == (55, 11)


def test_an_end_of_generation_token_is_the_last_of_the_text(llm: twofold.Llama, monkeypatch: Patch) -> None:
    text = drafts.make_text(llm, PROMPT, 20)
    end = text[7]
    monkeypatch.setattr(drafts, "end_of_generation", lambda _, token: token == end)
    assert drafts.make_text(llm, PROMPT, 20) == text[: text.index(end) + 1]


def test_models_are_described(tiny_pair: Path, tiny_llama: Path) -> None:
    pair, four, other = (
        drafts.of_pair("p", tiny_pair, None), drafts.of_pair("p", tiny_pair, 4), drafts.of_model("m", tiny_llama)
    )  # fmt: skip
    assert (pair.bits, four.bits, other.bits) == (8, 4, 0)
    assert len({pair.fingerprint, four.fingerprint, other.fingerprint}) == 3
    assert drafts.of_pair("q", tiny_pair, None).fingerprint == pair.fingerprint
    assert (pair.bpw, other.bpw) == (pytest.approx(2.625, abs=0.8), 32.0)


def test_more_bits_than_the_residual_has(tiny_llama: Path, tmp_path: Path) -> None:
    base = convert(tiny_llama, tmp_path / "six", bits=6).base
    with pytest.raises(errors.ArgumentError, match=r"six\.residual\.gguf: holds 6 bits of residual, 8 are asked for"):
        drafts.of_pair("six", base, 8)


# ---- vocabularies ------------------------------------------------------------------------------------


def changed(source: Path, path: Path, change: Callable[[gguf.GGUFReader], None]) -> Path:
    path.write_bytes(source.read_bytes())
    reader = gguf.GGUFReader(path, "r+")
    change(reader)
    reader.data.flush()
    return path


def test_another_vocabulary_is_refused(tiny_pair: Path, tiny_llama: Path, tmp_path: Path) -> None:
    def rename(reader: gguf.GGUFReader) -> None:
        field = reader.fields["tokenizer.ggml.tokens"]
        field.parts[field.data[511]][0] ^= 1

    other = changed(tiny_llama, tmp_path / "other.gguf", rename)
    with pytest.raises(errors.MismatchError) as caught:
        accept.measure([tiny_pair], [tiny_llama, other], QUICK)
    text = str(caught.value)
    assert text.startswith(f"{other} cannot draft for {tiny_pair}: their vocabularies differ, token 511 is ")


def test_unused_tokens_at_the_end_are_padding(tiny_llama: Path, tmp_path: Path) -> None:
    def kind_of_last(value: int) -> Callable[[gguf.GGUFReader], None]:
        def change(reader: gguf.GGUFReader) -> None:
            field = reader.fields["tokenizer.ggml.token_type"]
            for token in (100, 509, 510, 511):
                field.parts[field.data[token]][0] = value

        return change

    padded = changed(tiny_llama, tmp_path / "padded.gguf", kind_of_last(gguf.TokenType.UNUSED))
    known = architecture.vocabulary(tiny_llama)
    assert (len(known), architecture.vocabulary(padded)) == (512, known[:509])
    models = [drafts.of_model("a", tiny_llama), drafts.of_model("b", padded)]
    with pytest.raises(errors.MismatchError, match="they have 512 and 509 tokens"):
        shared_vocabulary([m.path for m in models])
    assert shared_vocabulary([m.path for m in models[1:] * 2]) == known[:509]


# ---- texts -------------------------------------------------------------------------------------------


def test_texts_are_kept_and_used_again(tiny_pair: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    settings = replace(QUICK, texts=tmp_path / "texts.jsonl")
    first = accept.measure([tiny_pair], [], settings)
    lines = [json.loads(line) for line in (tmp_path / "texts.jsonl").read_text().splitlines()]
    assert [(line["id"], line["n"], len(line["tokens"])) for line in lines] == [
        ("code-01", 24, 24),
        ("chat-01", 24, 24),
    ]
    assert first["texts_by"] == [
        {"model": tiny_pair.name, "fingerprint": lines[0]["fingerprint"], "texts": 2, "first_pair": True}
    ]
    accept.measure([tiny_pair], [], replace(settings, count=3))
    assert len((tmp_path / "texts.jsonl").read_text().splitlines()) == 3
    monkeypatch.setattr(drafts, "make_text", None)  # nothing is missing any more
    again = accept.measure([tiny_pair], [tiny_llama], settings)
    assert [row for row in again["rows"] if row["draft"] == tiny_pair.name] == first["rows"]
    shorter = accept.measure([tiny_pair], [], replace(settings, tokens=16))
    assert {row["length"] for row in shorter["per_prompt"]} == {16}


def test_texts_of_another_model_are_used_and_named(
    tiny_pair: Path, tiny_llama: Path, tmp_path: Path, capsys: Capture
) -> None:
    other = convert(tiny_llama, tmp_path / "other", bits=4).base
    options = ["--prompts", "2", "-n", "16", "--texts", str(tmp_path / "texts.jsonl")]
    assert main(["accept", str(other), *options]) == 0
    assert capsys.readouterr().err == ""
    assert main(["accept", str(tiny_pair), *options, "--json", str(tmp_path / "out.json")]) == 0
    assert "twofold: 2 of 2 texts are by other.base.gguf (fingerprint " in capsys.readouterr().err
    made = json.loads((tmp_path / "out.json").read_text())["texts_by"]
    assert [(row["model"], row["texts"], row["first_pair"]) for row in made] == [("other.base.gguf", 2, False)]


def test_texts_are_found_by_prompt_and_length(tmp_path: Path) -> None:
    path = tmp_path / "texts.jsonl"
    Texts(path, 4).add("code-01", "aa", "model", "ff", [1, 2, 3])
    assert [Texts(path, n).find("code-01", "aa") is None for n in (3, 4, 5)] == [False, False, True]
    assert Texts(path, 2).find("code-01", "aa").tokens == [1, 2]  # type: ignore[union-attr]
    assert Texts(path, 4).find("code-01", "ab") is Texts(path, 4).find("code-02", "aa") is None
    Texts(path, 4).add("code-01", "aa", "later", "fe", [9])
    assert Texts(path, 4).find("code-01", "aa").model == "model"  # type: ignore[union-attr]


@pytest.mark.parametrize("line", ["{", "[]", "7", '{"id": "a"}', '{"id":"a","prompt":"b","n":4,"tokens":["x"]}'])
def test_damaged_texts_are_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "texts.jsonl"
    Texts(path, 4).add("code-01", "aa", "model", "ff", [1])
    with path.open("a") as file:
        file.write(line + "\n")
    with pytest.raises(errors.FormatError, match=r"texts\.jsonl, line 2: not a text of twofold accept"):
        Texts(path, 4)


def test_texts_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(errors.FileAccessError, match="No such file"):
        Texts(tmp_path / "none" / "texts.jsonl", 4)


# ---- the command -------------------------------------------------------------------------------------


def test_prompts_are_balanced_and_filtered() -> None:
    assert [prompt["kind"] for prompt in prompts(10)] == [*KINDS, *KINDS]
    assert len(prompts()) == 60
    assert {prompt["kind"] for prompt in prompts(5, ["maths"])} == {"maths"}


def test_command(tiny_pair: Path, tiny_llama: Path, tmp_path: Path, capsys: Capture) -> None:
    out, picture = tmp_path / "out.json", tmp_path / "out.png"
    options = ["--depths", "8", "3", "3", "-n", "24", "--prompts", "3", "--kinds", "code", "maths", "--threads", "1"]
    command = ["accept", str(tiny_pair), "--drafter", str(tiny_llama), *options, "--progress"]
    assert main([*command, "--json", str(out), "--plot", str(picture)]) == 0
    shown, bars = capsys.readouterr()
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"{tiny_pair.name}: 100%" in bars
    found = json.loads(out.read_text())
    assert found["depths"] == [3, 8]
    assert [(model["draft"], model["kind"]) for model in found["models"]] == [
        (tiny_pair.name, "pair"),
        (tiny_llama.name, "drafter"),
    ]
    keys = {"draft", "bpw", "kind", "k", "tokens_per_check", "ci_low", "ci_high", "checks", "prompts"}
    assert all(set(row) == keys for row in found["rows"])
    assert len(found["rows"]) == 2 * 3 * 2  # drafts, kinds with "all", depths
    assert len(found["accepted_by_position"]) == 2 * 3 * 8
    assert [row["prompt"] for row in found["per_prompt"]] == ["code-01", "maths-01", "code-02"] * 2
    best = next(row for row in found["rows"] if (row["draft"], row["kind"], row["k"]) == (tiny_llama.name, "all", 8))
    cell = f"{best['tokens_per_check']:.2f} [{best['ci_low']:.2f} {best['ci_high']:.2f}]"
    assert shown.splitlines()[2].split() == ["draft", "bpw", "k=3", "k=8"]
    assert shown.splitlines()[4].endswith(cell)
    assert "by kind of prompt:" in shown and "share of the drafts of 8" in shown


def test_only_drafters(tiny_pair: Path, tiny_llama: Path, tmp_path: Path) -> None:
    both = accept.measure([tiny_pair], [tiny_llama], QUICK)
    alone = accept.measure([tiny_pair], [tiny_llama], replace(QUICK, measure_pairs=False))
    assert alone["rows"] == [row for row in both["rows"] if row["draft"] == tiny_llama.name] != []


def test_models_of_one_name_are_told_apart(tiny_llama: Path, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        convert(tiny_llama, tmp_path / folder / "m")
    bases = [tmp_path / folder / "m.base.gguf" for folder in ("a", "b")]
    found = accept.measure(bases, bases[:1], replace(QUICK, count=1))
    names = [str(bases[0]), str(bases[1]), f"{bases[0]} (own cache)"]
    assert [model["draft"] for model in found["models"]] == names
    assert [row["draft"] for row in found["per_prompt"]] == names


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"depths": (0, 3)}, "depths"),
        ({"depths": ()}, "depths"),
        ({"kinds": ("verse",)}, "kinds"),
        ({"measure_pairs": False}, "nothing to measure"),
        ({"tokens": 2}, "too short for a single check"),
    ],
)
def test_settings_outside_what_is_allowed(tiny_pair: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.ArgumentError, match=said):
        accept.measure([tiny_pair], [], replace(QUICK, **change))


def test_models_given_twice_or_not_at_all(tiny_pair: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="given twice"):
        accept.measure([tiny_pair, tiny_pair], [], QUICK)
    with pytest.raises(errors.ArgumentError, match="no pair"):
        accept.measure([], [tiny_pair], QUICK)


def test_outputs_are_checked_first(tiny_pair: Path, tmp_path: Path, capsys: Capture, monkeypatch: Patch) -> None:
    monkeypatch.setattr(accept, "measure", None)
    command = ["accept", str(tiny_pair)]
    assert main([*command, "--json", str(tmp_path / "none" / "x.json")]) == 1
    assert "x.json: cannot be written" in capsys.readouterr().err
    assert main([*command, "--plot", str(tmp_path / "x.bmp")]) == 1
    assert "x.bmp: end the name in one of" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*command, "--plot", str(tmp_path / "x.png")]) == 1
    assert "pip install twofold[plot]" in capsys.readouterr().err


def test_plot_has_a_line_for_each_draft(measured: dict[str, Any]) -> None:
    axes = accept_report.plot(measured).axes[0]
    expected = [row["tokens_per_check"] for row in measured["rows"] if row["kind"] == "all"]
    assert [list(line.get_xdata()) for line in axes.lines] == [[3, 6], [3, 6]]
    assert [float(y) for line in axes.lines for y in line.get_ydata()] == expected


def test_a_model_of_another_kind(tiny_pair: Path, tmp_path: Path) -> None:
    write_tiny(tmp_path / "qwen.gguf", "qwen2")
    found = accept.measure([tiny_pair], [tmp_path / "qwen.gguf"], replace(QUICK, count=1))
    assert {row["draft"] for row in found["rows"]} == {tiny_pair.name, "qwen.gguf"}


@pytest.mark.parametrize("wrong", [[], ["a", "--depths", "0"], ["a", "--depths", "33"], ["a", "-n", "2"]])
def test_usage_errors(capsys: Capture, wrong: list[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(["accept", *wrong])
    assert leaving.value.code == 2
    assert "usage: twofold accept" in capsys.readouterr().err


def test_help_has_an_example(capsys: Capture) -> None:
    with pytest.raises(SystemExit):
        main(["accept", "--help"])
    assert "example: twofold accept" in capsys.readouterr().out
