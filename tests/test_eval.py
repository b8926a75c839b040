"""twofold eval: the models measured, in both modes, and the command's output."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest

from make_tiny import write_tiny
from plain_formulas import formula, log_softmax
from twofold import errors, evalcache, evalmodels, evalreport, evaluate, exact, windows
from twofold.cli import main
from twofold.convert import convert
from twofold.evalmodels import Settings
from twofold.evaluate import Row
from twofold.merge import merge
from twofold.pairfile import open_pair
from twofold.source import Source

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

STORY = "The people look back at the first year, and they know which work would make good use of the time. "
CTX, TOKENS = 64, 150
KEYS = {"model", "mode", "text", "ram_bpw", "vram_bpw", "kld_mean", "kld_ci_low", "kld_ci_high"}
KEYS |= {"kld_median", "kld_p99", "top1", "ppl", "tokens"}


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("texts")
    (folder / "story.txt").write_text(STORY * 8)
    (folder / "code.txt").write_text("def work(first):\n    return print(first) == 10\nimport year\n" * 8)
    return sorted(folder.iterdir())


@pytest.fixture(scope="module")
def other(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return merge(tiny_pair, tmp_path_factory.mktemp("other") / "eight.gguf", type="q8_0").path


@pytest.fixture(scope="module")
def settings(
    tiny_llama: Path, tiny_pair: Path, other: Path, texts: list[Path], tmp_path_factory: pytest.TempPathFactory
) -> Settings:
    root = tmp_path_factory.mktemp("root")
    return Settings(
        [tiny_pair],
        tiny_llama,
        texts,
        [other],
        ctx=CTX,
        tokens=TOKENS,
        cache=root / "eval",
        scratch=root / "scratch",
        threads=1,
    )


@pytest.fixture(scope="module")
def rows(settings: Settings) -> list[Row]:
    return evaluate.evaluate(settings)


def pick(rows: list[Row], model: str, mode: str, text: str = "all") -> dict[str, Any]:
    (found,) = [
        r.values for r in rows if (r.values["model"], r.values["mode"], r.values["text"]) == (model, mode, text)
    ]
    return found


# ---- models ------------------------------------------------------------------------------------------


def test_more_bits_are_nearer(rows: list[Row]) -> None:
    for text in ("story", "code", "all"):
        kld = [pick(rows, name, "exact", text)["kld_mean"] for name in ("base", "r4", "r6", "r8")]
        assert kld == sorted(kld, reverse=True)
        assert kld[0] > 5 * kld[1] > 25 * kld[2] > 50 * kld[3] > 0
    assert pick(rows, "reference", "exact")["kld_mean"] < 3e-8
    assert pick(rows, "reference", "exact")["top1"] == 1


def test_every_model_mode_and_text_has_a_row(rows: list[Row]) -> None:
    found = [(row.values["model"], row.values["mode"], row.values["text"]) for row in rows]
    expected = {("reference", "exact", text) for text in ("code", "story", "all")}
    for name in ("base", "r4", "r6", "r8", "eight"):
        expected |= {(name, mode, text) for mode in ("exact", "runtime") for text in ("code", "story", "all")}
    assert set(found) == expected
    assert len(found) == len(expected)
    each = [pick(rows, "r4", "exact", text)["tokens"] for text in ("code", "story", "all")]
    assert each == [each[0], each[0], 2 * each[0]]


def plain_logits(path: Path, text: Path, **arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """Scored logits and their next tokens, by llama_cpp alone, a window at a time, all at once."""
    llama = llama_cpp.Llama(
        str(path), n_ctx=256, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False, **arguments
    )
    tokens = llama.tokenize(text.read_bytes(), add_bos=False)[:TOKENS]
    logits, targets = [], []
    for at in range(0, TOKENS, CTX - 1):
        window = [llama.token_bos(), *tokens[at : at + CTX - 1]]
        llama.reset()
        llama.eval(window)
        logits.append(llama.scores[CTX // 4 : len(window) - 1].copy())
        targets += window[CTX // 4 + 1 :]
    llama.close()
    return np.concatenate(logits), np.array(targets)


@pytest.mark.parametrize("model", ["base", "eight"])
def test_rows_are_what_llama_cpp_and_the_formulas_say(
    model: str, rows: list[Row], settings: Settings, tmp_path: Path
) -> None:
    path = settings.pairs[0] if model == "base" else settings.compare[0]
    exact.write_float32(Source(path), tmp_path / "single.gguf")
    single = {"type_k": 0, "type_v": 0, "flash_attn": False}
    text = next(text for text in settings.texts if text.stem == "story")
    reference, targets = plain_logits(settings.reference, text, **single)
    found, _ = plain_logits(tmp_path / "single.gguf", text, **single)
    row = pick(rows, model, "exact", "story")
    kld = formula(reference, found)
    assert row["tokens"] == len(targets) == len(kld)
    assert row["kld_mean"] == pytest.approx(kld.mean(), rel=1e-3, abs=3e-8)
    assert row["kld_median"] == pytest.approx(np.median(kld), rel=1e-2, abs=3e-8)
    assert row["kld_p99"] == pytest.approx(np.quantile(kld, 0.99), rel=1e-2)
    assert row["top1"] == pytest.approx((reference.argmax(1) == found.argmax(1)).mean())
    likelihood = log_softmax(found)[np.arange(len(targets)), targets].astype(np.float64)
    assert row["ppl"] == pytest.approx(np.exp(-likelihood.mean()), rel=1e-5)
    likelihood = log_softmax(reference)[np.arange(len(targets)), targets].astype(np.float64)
    assert pick(rows, "reference", "exact", "story")["ppl"] == pytest.approx(np.exp(-likelihood.mean()), rel=1e-5)
    if model == "eight":  # and as it really runs
        runs, _ = plain_logits(path, text, flash_attn=True)
        row = pick(rows, model, "runtime", "story")
        assert row["kld_mean"] == pytest.approx(formula(reference, runs).mean(), rel=0.1)
        assert row["kld_mean"] > 1.5 * pick(rows, model, "exact", "story")["kld_mean"]


def test_runtime_is_the_pair_as_twofold_runs_it(rows: list[Row], settings: Settings, monkeypatch: Patch) -> None:
    modes: list[tuple[int, bool]] = []
    scored = windows.scored_logits

    def watch(llama: Any, *arguments: Any, draft: bool) -> Any:
        modes.append((llama.residual_bits, draft))
        return scored(llama, *arguments, draft=draft)

    monkeypatch.setattr(evaluate, "scored_logits", watch)
    again = evaluate.evaluate(replace(settings, modes=("runtime",), compare=[], texts=settings.texts[:1]))
    assert list(dict.fromkeys(modes)) == [(8, True), (4, False), (6, False), (8, False)]
    for name in ("base", "r4", "r6", "r8"):
        exactly, really = pick(rows, name, "exact", "code"), pick(rows, name, "runtime", "code")
        assert pick(again, name, "runtime", "code")["kld_mean"] == pytest.approx(really["kld_mean"], rel=1e-6)
        assert really["kld_mean"] != exactly["kld_mean"]
        assert 0.9 * exactly["kld_mean"] < really["kld_mean"] < 1.1 * exactly["kld_mean"] + 2e-3


def test_a_narrow_batch_scores_the_same_tokens(rows: list[Row], settings: Settings, monkeypatch: Patch) -> None:
    widths: set[int] = set()
    scored = windows.scored_logits

    def watch(llama: Any, *arguments: Any, draft: bool) -> Any:
        for position, logits in scored(llama, *arguments, draft=draft):
            widths.add(len(logits))
            yield position, logits

    monkeypatch.setattr(evaluate, "scored_logits", watch)
    narrow = replace(settings, modes=("runtime",), compare=[], texts=settings.texts[:1], bits=(8,), batch=5)
    (row,) = [found.values for found in evaluate.evaluate(narrow) if found.values["text"] == "code"][1:]
    assert max(widths) == 5
    wide = pick(rows, "r8", "runtime", "code")
    assert row["tokens"] == wide["tokens"]
    assert row["kld_mean"] == pytest.approx(wide["kld_mean"], rel=0.2)


def test_the_reference_against_itself_is_the_noise_floor(settings: Settings, other: Path) -> None:
    half = replace(settings, reference=other, compare=[other])
    found = evaluate.evaluate(replace(half, modes=("exact",), texts=settings.texts[:1]))
    row, floor = pick(found, "eight", "exact"), pick(found, "reference", "exact")
    assert row["kld_mean"] == pytest.approx(floor["kld_mean"], rel=0.2)
    assert row["kld_mean"] < 3e-8
    assert row["top1"] == 1
    assert row["ppl"] == pytest.approx(floor["ppl"], rel=1e-7)


def test_bits_are_those_of_the_split_matrices(rows: list[Row], settings: Settings, tmp_path: Path) -> None:
    pair = open_pair(settings.pairs[0])
    for bits in (4, 6, 8):
        assert pick(rows, f"r{bits}", "exact")["ram_bpw"] == pytest.approx(bits + 16 / 128)
        assert pick(rows, f"r{bits}", "runtime")["vram_bpw"] == pytest.approx(2.625)
    assert (pick(rows, "base", "exact")["ram_bpw"], pick(rows, "base", "exact")["vram_bpw"]) == (0, 2.625)
    assert (pick(rows, "eight", "exact")["ram_bpw"], pick(rows, "eight", "exact")["vram_bpw"]) == (8.5, 0)
    assert pick(rows, "reference", "exact")["ram_bpw"] == 32
    write_tiny(tmp_path / "tied.gguf", "llama", file_type="f16", tied=True)
    assert evalmodels.ram_bits(tmp_path / "tied.gguf", pair) == 16  # token_embd counts as the head
    write_tiny(tmp_path / "short.gguf", "llama", layers=1)
    with pytest.raises(errors.MismatchError, match=r"short\.gguf: another model than .*blk\.1\.\S+ is missing"):
        evalmodels.ram_bits(tmp_path / "short.gguf", pair)
    write_tiny(tmp_path / "wide.gguf", "llama", ff=768)
    with pytest.raises(errors.MismatchError, match=r"ffn_\S+ has shape \(768, 256\), not"):
        evalmodels.ram_bits(tmp_path / "wide.gguf", pair)


def test_several_pairs_and_pairs_of_fewer_bits(settings: Settings, tiny_llama: Path, tmp_path: Path) -> None:
    convert(tiny_llama, tmp_path / "six", base_type="q4_0", bits=6)
    both = replace(settings, pairs=[settings.pairs[0], tmp_path / "six"])
    labels = [subject.label for subject in evalmodels.list_subjects(both)]
    assert labels == [
        "reference",
        "llama base",
        "llama r4",
        "llama r6",
        "llama r8",
        "six base",
        "six r4",
        "six r6",
        "eight",
    ]
    with pytest.raises(errors.ArgumentError, match="two models would be called 'eight'"):
        evalmodels.list_subjects(replace(settings, compare=settings.compare * 2))


def test_another_tokenizer_is_refused(settings: Settings, tmp_path: Path) -> None:
    data = settings.reference.read_bytes()
    assert data.count("▁people".encode()) == 1
    (tmp_path / "odd.gguf").write_bytes(data.replace("▁people".encode(), "▁qqople".encode()))
    with pytest.raises(errors.MismatchError, match=r"odd\.gguf: it tokenizes story\.txt otherwise"):
        evaluate.evaluate(replace(settings, compare=[tmp_path / "odd.gguf"], modes=()))


def test_the_reference_runs_once_until_it_changes(settings: Settings, tmp_path: Path, monkeypatch: Patch) -> None:
    runs = []
    write = evalcache.write_entry
    monkeypatch.setattr(evaluate, "write_entry", lambda *a: (runs.append(a[0].name), write(*a)))
    reference = tmp_path / "reference.gguf"
    reference.write_bytes(settings.reference.read_bytes())
    few = replace(
        settings, reference=reference, cache=tmp_path / "eval", compare=[], modes=(), texts=settings.texts[:1]
    )
    first = evaluate.evaluate(few)
    assert len(runs) == 1
    assert [row.values for row in evaluate.evaluate(few)] == [row.values for row in first]
    assert len(runs) == 1
    write_tiny(reference, "llama", seed=1)  # other weights under the same name
    changed = evaluate.evaluate(few)
    assert len(runs) == 2
    assert pick(changed, "reference", "exact")["ppl"] != pick(first, "reference", "exact")["ppl"]
    evaluate.evaluate(replace(few, ctx=32))
    assert len(runs) == 3
    evaluate.evaluate(replace(few, cache=None, scratch=tmp_path / "scratch"))
    assert len(runs) == 4
    assert list((tmp_path / "scratch").iterdir()) == []
    assert len(list((tmp_path / "eval").iterdir())) == 3


def test_a_copy_is_removed_after_a_failure(settings: Settings, tmp_path: Path, monkeypatch: Patch) -> None:
    made = []

    def fail(*arguments: Any, **_: Any) -> None:
        made.extend(path.name for path in (tmp_path / "scratch").rglob("*.gguf"))
        raise errors.DecodeError("no luck")

    monkeypatch.setattr(evaluate, "scored_logits", fail)
    with pytest.raises(errors.DecodeError, match="no luck"):
        evaluate.evaluate(replace(settings, reference=settings.compare[0], scratch=tmp_path / "scratch"))
    assert made == ["model.gguf"]
    assert list((tmp_path / "scratch").iterdir()) == []


# ---- the command -------------------------------------------------------------------------------------


def test_command(capsys: Capture, settings: Settings, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(windows, "BUNDLED", settings.texts[0].parent)
    command = ["eval", str(settings.pairs[0]), "--reference", str(settings.reference), "--compare"]
    command += [str(settings.compare[0]), "--ctx", "64", "--tokens", "100", "--json", str(tmp_path / "out.json")]
    status = main([*command, "--threads", "1"])
    out, err = capsys.readouterr()
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split()[:3] == ["model", "mode", "text"]
    assert [line.split()[0] for line in lines[1:34:3]] == ["reference"] + ["base", "r4", "r6", "r8", "eight"] * 2
    assert "circular moving-block bootstrap" in out
    found = json.loads((tmp_path / "out.json").read_text())
    assert len(found["rows"]) == 33
    for row in found["rows"]:
        assert set(row) == KEYS
    about = found["metadata"]
    assert about["command"].startswith("twofold eval ")
    assert (about["threads"], about["reference"]) == (1, str(settings.reference))
    assert about["versions"]["llama_cpp_python"] == llama_cpp.__version__
    assert sorted(path.name.split(".")[1] for path in (tmp_path / "cache" / "eval").iterdir()) == ["code", "story"]


def test_one_mode_and_no_cache(capsys: Capture, settings: Settings, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))
    command = ["eval", str(settings.pairs[0]), "--reference", str(settings.reference), "--ctx", "64", "--no-cache"]
    command += ["--text", str(settings.texts[0]), "--mode", "exact", "--tokens", "64", "--progress", "--threads", "1"]
    assert main([*command, "--scratch", str(tmp_path / "scratch")]) == 0
    out, err = capsys.readouterr()
    assert "runtime" not in out
    assert "100%" in err
    assert not (tmp_path / "cache").exists()
    assert list((tmp_path / "scratch").iterdir()) == []


def test_plot(rows: list[Row]) -> None:
    """A panel for each mode; every model of it is named."""
    figure = evalreport.plot(rows)
    assert [panel.get_title() for panel in figure.axes] == ["exact", "runtime"]
    for panel in figure.axes:
        assert {"base", "r4", "r6", "r8", "eight"} <= {text.get_text() for text in panel.texts}


def test_what_cannot_be_written_is_told_before_the_work(
    capsys: Capture, settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: pytest.fail("it began to work"))
    command = ["eval", str(settings.pairs[0]), "--reference", str(settings.reference)]
    assert main([*command, "--json", str(tmp_path / "none" / "out.json")]) == 1
    assert f"{tmp_path}/none/out.json: cannot be written" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main([*command, "--plot", str(tmp_path / "a.png")]) == 1
    assert "pip install twofold[plot]" in capsys.readouterr().err
