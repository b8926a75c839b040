"""twofold bench: what it runs, how it counts and times, the command."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest

import twofold
from twofold import bench, benchplan, benchreport, benchrows, errors, info, prompting, prompts, separate, strategies
from twofold.cli import main
from twofold.decoder import ordinary_tokens
from twofold.ordinary import OrdinaryLlama
from twofold.pace import Auto
from twofold.propose import Lookup
from twofold.stats import Stats
from twofold.strategies import Run, Strategy

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

PROMPT = b"the people would have there about which"
GREEDY = {"temp": 0.0}
COUNT = 40


@pytest.fixture(scope="module")
def llm(tiny_pair: Path) -> Iterator[twofold.Llama]:
    model = twofold.Llama(tiny_pair, n_ctx=512, verbose=False)
    yield model
    model.close()


@pytest.fixture(scope="module")
def ordinary(tiny_llama: Path) -> Iterator[OrdinaryLlama]:
    model = prompting.load_as(OrdinaryLlama, str(tiny_llama), n_ctx=256, flash_attn=True)
    yield model
    model.close()


@pytest.fixture(scope="module")
def small(tiny_pair: Path) -> Iterator[OrdinaryLlama]:
    """The base by itself: a model that the large one often agrees with."""
    model = prompting.load_as(OrdinaryLlama, str(tiny_pair), n_ctx=256, flash_attn=True)
    yield model
    model.close()


def plain(model: OrdinaryLlama, tokens: list[int], count: int = COUNT) -> list[int]:
    model.reset()
    return list(itertools.islice(model.generate(tokens, temp=0.0), count))


# ---- a separate drafter ------------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 2, 5])
def test_separate_drafter_gives_the_targets_text(ordinary: OrdinaryLlama, small: OrdinaryLlama, length: int) -> None:
    tokens = ordinary.tokenize(PROMPT)
    text, stats = plain(ordinary, tokens), Stats()
    found = list(itertools.islice(separate.generate(ordinary.decoder, small.decoder, tokens, length, stats), COUNT))
    assert found == text
    # What the small model would draft after each part of the text, each time from an empty cache.
    origins, agreed = [False], []
    while len(origins) < COUNT:
        draft = plain(small, [*tokens, *text[: len(origins)]], length)
        same = [a == b for a, b in zip(draft, text[len(origins) :], strict=False)]
        agreed.append([*same, False].index(False))
        origins += [True] * agreed[-1] + [False]
    assert stats.from_draft == origins[:COUNT]
    assert sum(stats.from_draft) > 0
    assert stats.checks == len(agreed)
    assert stats.complete_tokens == sum(agreed[: stats.complete_checks]) + stats.complete_checks
    assert stats.complete_checks >= len(agreed) - 1
    assert min(stats.prompt_s, stats.draft_s, stats.verify_s) > 0


def test_separate_strategy(ordinary: OrdinaryLlama, small: OrdinaryLlama) -> None:
    (two,) = strategies.of_two(ordinary, "large.gguf", small, "small.gguf", [3])
    assert (two.name, two.plain) == ("large + small k=3", "large plain")
    tokens = ordinary.tokenize(PROMPT)
    first, again = (two.run(tokens, COUNT, 1) for _ in range(2))
    assert first.tokens == again.tokens == plain(ordinary, tokens)
    assert 1 < first.complete_tokens / first.complete_checks <= 4
    assert first.draft_s + first.check_s < first.seconds


# ---- llama_cpp's own ways ----------------------------------------------------------------------------


def test_plain_is_llama_cpps_text(ordinary: OrdinaryLlama, tiny_llama: Path) -> None:
    stock = llama_cpp.Llama(str(tiny_llama), n_ctx=256, flash_attn=True, verbose=False)
    tokens = stock.tokenize(PROMPT)
    expected = list(itertools.islice(stock.generate(tokens, temp=0.0), COUNT))
    stock.close()
    way, *_ = strategies.of_ordinary(ordinary, "large.gguf", [], GREEDY)
    run = way.run(tokens, COUNT, 1)
    assert run.tokens == expected
    assert (run.complete_tokens, run.complete_checks, run.draft_s) == (COUNT - 1, COUNT - 1, 0.0)
    assert 0 < run.check_s < run.seconds


def test_lookup_gives_the_same_text_and_counts_its_checks(ordinary: OrdinaryLlama, monkeypatch: Patch) -> None:
    tokens = ordinary.tokenize(PROMPT) * 3
    way, lookup = strategies.of_ordinary(ordinary, "large.gguf", [3], GREEDY)
    expected, decodes = way.run(tokens, COUNT, 1), []
    real = OrdinaryLlama.eval
    monkeypatch.setattr(OrdinaryLlama, "eval", lambda self, batch: (decodes.append(len(batch)), real(self, batch))[1])
    run = lookup.run(tokens, COUNT, 1)
    assert run.tokens == expected.tokens
    assert decodes[0] == len(tokens)
    assert max(decodes[1:]) <= 4
    assert run.complete_checks == len(decodes) - 2  # neither the prompt nor the last one
    assert COUNT - 1 - 4 <= run.complete_tokens <= COUNT - 1
    assert run.draft_s > 0
    assert (ordinary.draft_model, ordinary._logits_all) == (None, False)


def test_lookup_drafts_what_is_repeated(ordinary: OrdinaryLlama, monkeypatch: Patch) -> None:
    """A model that counts to seven again and again: most lookups are right."""
    monkeypatch.setattr(ordinary, "sample", lambda idx, **_: 10 + (idx + 1) % 7)
    (_, lookup) = strategies.of_ordinary(ordinary, "large.gguf", [4], GREEDY)
    run = lookup.run([10 + i % 7 for i in range(8)], COUNT, 1)
    assert run.tokens == [10 + i % 7 for i in range(8, 8 + COUNT)]
    assert run.complete_tokens / run.complete_checks == 5


# ---- the pair ----------------------------------------------------------------------------------------


def test_pair_strategies(llm: twofold.Llama) -> None:
    ways = list(strategies.of_pair(llm, "p.base.gguf", [8, 4], [2, 5], GREEDY))
    kinds = ["plain", "k=2", "k=5", "auto", "auto+ngram"]
    assert [way.name for way in ways] == [f"r{bits} {kind}" for bits in (8, 4) for kind in kinds]
    assert [way.plain for way in ways] == [None, *["r8 plain"] * 4, None, *["r4 plain"] * 4]
    tokens, seen = llm.tokenize(PROMPT), []
    for way in ways:
        run = way.run(tokens, COUNT, 1)
        seen.append((run.tokens, llm.residual_bits, len(llm._stats.drafted_by_position), llm._proposer))
    assert [bits for _, bits, *_ in seen] == [8] * 5 + [4] * 5
    assert [drafted for _, _, drafted, _ in (*seen[:3], *seen[5:8])] == [0, 2, 5, 0, 2, 5]
    assert [isinstance(proposer, Lookup) for *_, proposer in seen] == [False, False, False, False, True] * 2
    assert [text for text, *_ in seen[:5]] == [seen[0][0]] * 5
    assert [text for text, *_ in seen[5:]] == [seen[5][0]] * 5
    assert seen[0][0] != seen[5][0]
    llm.residual_bits = 8


def test_auto_goes_on_learning(llm: twofold.Llama) -> None:
    auto = list(strategies.of_pair(llm, "p.base.gguf", [8], [3], GREEDY))[-2]
    tokens = llm.tokenize(PROMPT)
    auto.run(tokens, 12, 1)
    pace = llm._pace
    assert isinstance(pace, Auto)
    rounds = pace._round
    next(strategies.of_pair(llm, "p.base.gguf", [8], [], GREEDY)).run(tokens, 12, 1)
    assert llm._pace is not pace
    auto.run(tokens, 12, 1)
    assert llm._pace is pace
    assert pace._round > rounds > 0


def test_sampled_texts_are_the_same_for_a_seed(llm: twofold.Llama) -> None:
    hot = benchplan.Settings(Path("p"), temp=1.5).sampling
    assert hot == {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    plainly, drafting, *_ = strategies.of_pair(llm, "p.base.gguf", [8], [3], hot)
    tokens = llm.tokenize(PROMPT)
    texts = [plainly.run(tokens, COUNT, seed).tokens for seed in (1, 2)]
    assert [drafting.run(tokens, COUNT, seed).tokens for seed in (1, 2)] == texts
    assert texts[0] != texts[1]


def test_margin_is_between_the_two_largest_logits(llm: twofold.Llama) -> None:
    eight, four = (
        next(strategies.of_pair(llm, "p.base.gguf", [bits], [], GREEDY)).margin(llm.tokenize(PROMPT)) for bits in (8, 4)
    )
    llm.residual_bits = 8
    llm.reset()
    llm.eval(llm.tokenize(PROMPT))
    top = sorted(llm._decoder.logits(-1))
    assert eight == pytest.approx(top[-1] - top[-2])
    assert four != eight


def test_time_is_taken_from_the_first_token_to_the_last(llm: twofold.Llama, monkeypatch: Patch) -> None:
    now = [0.0]
    monkeypatch.setattr(strategies.time, "perf_counter", lambda: now[0])

    def slow() -> Iterator[int]:
        for token, seconds in ((70, 100.0), (71, 1.0), (72, 2.0), (llm.token_eos(), 4.0), (73, 1000.0)):
            now[0] += seconds
            yield token

    assert strategies._take(llm, slow(), 3) == ([70, 71, 72], 3.0)
    assert strategies._take(llm, slow(), 9) == ([70, 71, 72, llm.token_eos()], 7.0)
    assert strategies._take(llm, slow(), 1) == ([70], 0.0)


# ---- turns and counts --------------------------------------------------------------------------------


class Bar:
    def update(self) -> None: ...

    def set_description(self, name: str) -> None: ...


def fake(name: str, plain: str | None, calls: list[tuple[str, int, int]], text: list[int]) -> Strategy:
    def run(tokens: Any, count: int, seed: int) -> Run:
        calls.append((name, tokens[0], seed))
        return Run(text, 1.0, 0.25, 0.5, 2, 4)

    return replace(Strategy(name, "m", 0, 8, plain, None, run))  # type: ignore[arg-type]


def test_strategies_take_turns(monkeypatch: Patch) -> None:
    calls: list[tuple[str, int, int]] = []
    ways = [fake("a", None, calls, [1, 2, 3])] + [fake(name, "a", calls, [1, 2, 3]) for name in "bcde"]
    asked = [{"id": f"chat-{n}", "kind": "chat", "prompt": ""} for n in range(6)]
    settings = benchplan.Settings(Path("p"), seed=7, repeat=2)
    plan = benchplan.Plan(settings, asked, {Path("p"): [[n] for n in range(6)]}, 256)
    records = [record for turn in bench._turns(plan, ways, Bar()) for record in turn]
    blocks = [calls[i : i + 5] for i in range(0, len(calls), 5)]
    assert [{place for _, place, _ in block} for block in blocks] == [{n % 6} for n in range(12)]
    assert all({name for name, *_ in block} == set("abcde") for block in blocks)
    assert len({tuple(name for name, *_ in block) for block in blocks}) > 6
    assert [{seed for *_, seed in block} for block in blocks] == [{7 + n % 6} for n in range(12)]
    assert [(r["strategy"], r["prompt"], r["repeat"]) for r in records[:5]] == [(c, "chat-0", 0) for c in "abcde"]
    assert {r["repeat"] for r in records[30:]} == {1}


@pytest.mark.parametrize(
    ("text", "place"), [([1, 2, 3], None), ([1, 9, 3], 1), ([1, 2], 2), ([1, 2, 3, 4], 3), ([9, 2, 3], 0)]
)
def test_divergences_are_found(text: list[int], place: int | None, monkeypatch: Patch) -> None:
    asked: list[list[int]] = []
    monkeypatch.setattr(Strategy, "margin", lambda _, tokens: asked.append(tokens) or 0.5)
    ways = [fake("a", None, [], [1, 2, 3]), fake("b", "a", [], text)]
    plan = benchplan.Plan(benchplan.Settings(Path("p")), [{"id": "x-1", "kind": "x"}], {Path("p"): [[7, 8]]}, 256)
    ((first, second),) = bench._turns(plan, ways, Bar())
    assert first["diverges_at"] is None
    assert second["diverges_at"] == place
    assert second["margin"] == (None if place is None else 0.5)
    assert asked == ([] if place is None else [[7, 8, *[1, 2, 3][:place]]])


def record(strategy: str, prompt: str, tokens: int, seconds: float, **other: Any) -> dict[str, Any]:
    return {
        **{"strategy": strategy, "prompt": prompt, "kind": prompt[0], "repeat": 0, "tokens": tokens},
        **{"seconds": seconds, "draft_s": seconds / 4, "check_s": seconds / 2},
        **{"complete_checks": 4, "complete_tokens": 10, "diverges_at": None, **other},
    }


def test_rows() -> None:
    """The machine gets slower from prompt to prompt; b is always twice as fast as a."""
    about = [{"strategy": "a", "compared": False}, {"strategy": "b", "compared": True}]
    records = []
    for number, (prompt, slow) in enumerate({"x1": 1.0, "x2": 2.0, "y1": 4.0, "y2": 8.0, "y3": 16.0}.items()):
        records += [record("a", prompt, 11, slow), record("b", prompt, 21, slow, complete_tokens=20)]
        if number > 2:
            records[-1]["diverges_at"] = 3
    rows = {(row["strategy"], row["kind"]): row for row in benchrows.rows(records, about)}
    assert list(rows) == [(s, kind) for kind in ("all", "x", "y") for s in "ab"]
    assert (rows["a", "all"]["tok_s"], rows["b", "all"]["tok_s"]) == (2.5, 5.0)
    assert [rows["a", "all"][f"tok_s_{q}"] for q in ("q1", "q3")] == [1.25, 5.0]
    assert [rows["b", "y"][key] for key in ("ratio", "ratio_q1", "ratio_q3")] == [2.0, 2.0, 2.0]
    assert (rows["a", "x"]["tok_s"], rows["a", "x"]["prompts"]) == (7.5, 2)
    assert (rows["a", "all"]["tokens_per_check"], rows["b", "all"]["tokens_per_check"]) == (2.5, 5.0)
    assert (rows["a", "all"]["draft_share"], rows["a", "all"]["check_share"]) == (0.25, 0.5)
    assert [rows["b", kind]["diverged"] for kind in ("all", "x", "y")] == [2, 0, 2]
    assert rows["a", "all"]["diverged"] is None


def test_rows_with_repetitions_and_short_texts() -> None:
    about = [{"strategy": "a", "compared": False}, {"strategy": "b", "compared": True}]
    records = [record("a", "x1", 11, 1.0, repeat=n) for n in range(3)]
    # Rates 10, 20 and 40, each beside a rate of 10 of the first strategy; one prompt whose text is a single token.
    records += [record("b", "x1", 11, 1.0 / 2**n, repeat=n, diverges_at=n or None) for n in range(3)]
    records += [record("a", "x2", 1, 0.0), record("b", "x2", 1, 0.0)]
    row = benchrows.rows(records, about)[1]
    assert (row["tok_s"], row["ratio"], row["prompts"], row["diverged"]) == (20.0, 2.0, 1, 1)
    empty = benchrows.rows(records[-2:], about)[1]
    assert (empty["tok_s"], empty["tok_s_q1"], empty["ratio"], empty["prompts"]) == (None, None, None, 0)
    assert empty["tokens_per_check"] == 2.5


# ---- prompts, plans ----------------------------------------------------------------------------------


def test_random_prompts_are_asked_for_by_name(llm: twofold.Llama) -> None:
    assert {prompt["kind"] for prompt in prompts.prompts()} == set(prompts.KINDS)
    asked = prompts.prompts(8, [*prompts.KINDS, prompts.RANDOM])
    assert [prompt["kind"] for prompt in asked][:7] == [*prompts.KINDS, "random", "code"]
    copies = prompts.prompts(kinds=[prompts.COPY])
    assert len(copies) == 10 and all(len(prompt["prompt"]) > 300 for prompt in copies)
    vocabulary = ordinary_tokens(llm)
    assert not {llm.token_bos(), llm.token_eos(), 3 + 10} & set(vocabulary)
    assert len(vocabulary) > 100
    first, other = (prompts.random_tokens(name, vocabulary) for name in ("random-01", "random-02"))
    assert first == prompts.random_tokens("random-01", vocabulary)
    assert first != other
    assert set(first) <= set(vocabulary)
    assert len(set(first)) > 40


def test_plan(tiny_pair: Path, tiny_llama: Path, monkeypatch: Patch) -> None:
    settings = benchplan.Settings(
        tiny_pair, compare=(tiny_llama,), drafter=tiny_pair, count=3, tokens=300, kinds=("random", "code"), drafts=(24,)
    )
    plan = benchplan.plan(settings)
    assert plan.settings == replace(settings, bits=(8,))
    assert [prompt["id"] for prompt in plan.asked] == ["code-01", "random-01", "code-02"]
    assert plan.tokens[tiny_pair] == plan.tokens[tiny_llama]
    longest = max(map(len, plan.tokens[tiny_pair]))
    assert plan.context % 256 == 0
    assert longest + 300 + 24 < plan.context < longest + 300 + 24 + 258
    assert len(plan.tokens[tiny_pair][1]) == 65  # BOS before the random tokens
    base = tiny_pair.stat().st_size
    residual = tiny_pair.with_name("llama.residual.gguf").stat().st_size
    assert (plan.ram["base"], plan.ram["base rearranged"]) == (base, base)
    assert residual * 0.9 < plan.ram["residual"] <= residual
    assert plan.ram[tiny_llama.name] == tiny_llama.stat().st_size
    assert "too little" not in plan.note()
    monkeypatch.setattr(info, "available_ram", lambda: 10_000)
    assert "10.0 kB are available - too little, the figures would be those of the disk" in plan.note()
    monkeypatch.setattr(info, "available_ram", lambda: None)
    assert "available" not in plan.note()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kinds": ("poems",)}, "poems.*random are allowed"),
        ({"drafts": (0,)}, "from 1 to 32 are allowed"),
        ({"lookups": (33,)}, "from 1 to 32 are allowed"),
        ({"drafter": Path("d")}, "name ordinary GGUF files with --compare"),
        ({"drafter": Path("d"), "compare": (Path("m"),), "temp": 1.0}, "leave out --drafter or --temp"),
        ({"compare": (Path("a/m"), Path("b/m"))}, "different names"),
    ],
)
def test_settings_that_make_no_sense(tiny_pair: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        benchplan.plan(replace(benchplan.Settings(tiny_pair), **changes))


def test_files_that_do_not_fit(tiny_llama: Path, tiny_pair: Path, tmp_path: Path) -> None:
    data = tiny_llama.read_bytes()
    other = tmp_path / "other.gguf"
    other.write_bytes(data.replace("▁people".encode(), "▁pebble".encode()))
    with pytest.raises(errors.MismatchError, match=r"other.gguf: another vocabulary than .*llama.base.gguf"):
        benchplan.plan(benchplan.Settings(tiny_pair, compare=(other,)))
    with pytest.raises(errors.FileAccessError, match="no such file"):
        benchplan.plan(benchplan.Settings(tiny_pair, compare=(tmp_path / "none.gguf",)))
    main(["convert", str(tiny_llama), str(tmp_path / "four"), "--residual-bits", "4"])
    with pytest.raises(errors.ArgumentError, match="holds 4 bits of residual, 8 are asked for"):
        benchplan.plan(benchplan.Settings(tmp_path / "four.base.gguf", bits=(4, 8)))


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_checkout(tmp_path: Path, monkeypatch: Patch) -> None:
    package = tmp_path / "python" / "twofold"
    package.mkdir(parents=True)
    monkeypatch.setattr(info, "__file__", str(package / "info.py"))
    assert info.checkout() is None
    git = ("git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=e@x")
    for command in (("init", "-q"), ("commit", "-q", "--allow-empty", "-m", "first")):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    assert info.checkout() == {"commit": head, "modified": False}
    (package / "info.py").touch()
    assert info.checkout() == {"commit": head, "modified": True}
    monkeypatch.setattr(info, "__file__", str(tmp_path / "python" / "info.py"))
    assert info.checkout() is None
    monkeypatch.setenv("PATH", str(tmp_path))
    assert info.checkout() is None


def test_available_ram(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:  100 kB\nMemAvailable:   42 kB\n")
    assert info.available_ram(tmp_path / "meminfo") == 42 * 1024
    assert info.available_ram(tmp_path / "none") is None


# ---- the command -------------------------------------------------------------------------------------


def test_command(capsys: Capture, tiny_pair: Path, tiny_llama: Path, tmp_path: Path) -> None:
    options = ["--prompts", "3", "-n", "12", "--drafts", "2", "--residual-bits", "8", "4", "--repeat", "2"]
    others = ["--compare", str(tiny_llama), "--drafter", str(tiny_pair), "--lookup", "3"]
    files = ["--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]
    assert main(["bench", str(tiny_pair), *options, *others, *files, "--threads", "1"]) == 0
    out, err = capsys.readouterr()
    assert err.startswith("twofold: about ")
    found = json.loads((tmp_path / "b.json").read_text())
    names = ["r8 plain", "r8 k=2", "r8 auto", "r8 auto+ngram", "r4 plain", "r4 k=2", "r4 auto", "r4 auto+ngram"]
    names += ["llama plain", "llama lookup 3", "llama + llama.base k=2"]
    rows = [row for row in found["rows"] if row["kind"] == "all"]
    assert [row["strategy"] for row in rows] == names
    assert [line.split("  ")[0] for line in out.splitlines()[3:14]] == names
    assert {row["prompts"] for row in rows} == {3}
    assert {row["kind"] for row in found["rows"]} == {"all", "code", "chat", "maths"}
    assert len(found["runs"]) == 11 * 3 * 2
    for row in rows:
        assert 0 < row["tok_s_q1"] <= row["tok_s"] <= row["tok_s_q3"]
        assert 0 < row["check_share"] <= row["draft_share"] + row["check_share"] <= 1
    assert rows[0]["ratio"] == rows[0]["ratio_q3"] == 1.0
    assert [row["diverged"] for row in rows] == [None, 0, 0, 0, None, 0, 0, 0, None, 0, 0]
    assert rows[0]["tokens_per_check"] == 1.0 < rows[1]["tokens_per_check"] <= 3
    about = found["metadata"]
    assert (about["threads"], about["seed"], about["repeat"], about["claiming"]) == (1, 1, 2, True)
    assert about["command"].startswith("twofold bench ")
    assert about["checkout"] == info.checkout()
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")
    drawn = benchreport.plot(found).axes[0]
    assert [bar.get_width() for bar in drawn.patches] == [row["tok_s"] for row in rows]
    assert [label.get_text() for label in drawn.get_yticklabels()] == names


def test_worst_case(capsys: Capture, tiny_pair: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.gguf"
    base = tmp_path / "only.base.gguf"
    base.write_bytes(tiny_pair.read_bytes())
    elsewhere.write_bytes(tiny_pair.with_name("llama.residual.gguf").read_bytes())
    options = ["--kinds", "random", "--temp", "1.5", "--prompts", "2", "-n", "16", "--drafts", "3", "--no-claim"]
    options += ["--residual", str(elsewhere), "--json", str(tmp_path / "b.json")]
    assert main(["bench", str(base), *options]) == 0
    out = capsys.readouterr().out
    assert "temperature 1.5" in out
    found = json.loads((tmp_path / "b.json").read_text())
    assert {run["kind"] for run in found["runs"]} == {"random"}
    assert {run["margin"] for run in found["runs"]} == {None}
    assert found["metadata"]["claiming"] is False


def test_divergences_are_printed() -> None:
    run = {"prompt": "code-01", "strategy": "r8 k=2", "diverges_at": 5, "margin": 0.0125}
    assert benchreport._divergences([run, {**run, "diverges_at": None}, {**run, "margin": None}]) == [
        "code-01, r8 k=2: diverges at token 5, margin of the logits 0.0125\ncode-01, r8 k=2: diverges at token 5"
    ]


def test_outputs_are_checked_before_the_work(capsys: Capture, tiny_pair: Path, tmp_path: Path) -> None:
    for option in ("--json", "--plot"):
        assert main(["bench", str(tiny_pair), option, str(tmp_path / "none" / "x.png")]) == 1
    assert main(["bench", str(tiny_pair), "--plot", str(tmp_path / "x.txt")]) == 1
    err = capsys.readouterr().err
    assert err.count("cannot be written") == 2
    assert "x.txt: end the name in one of" in err
    assert "are needed" not in err
