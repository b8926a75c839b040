"""twofold eval: the numbers, the cache of the reference, the models measured, the command's output."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
import numpy as np
import pytest

from make_tiny import write_tiny
from twofold import divergence, errors, evalcache, evalreport, evaluate, exact, output, windows
from twofold.blocks import decode_residual
from twofold.cli import main
from twofold.convert import convert
from twofold.divergence import STEP, Scores, divergences, encode, interval, summarize
from twofold.evaluate import Row, Settings
from twofold.merge import merge
from twofold.pairfile import open_pair
from twofold.source import Source

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch

STORY = "The people look back at the first year, and they know which work would make good use of the time. "
CTX, TOKENS = 64, 150
KEYS = {"model", "mode", "text", "ram_bpw", "vram_bpw", "kld_mean", "kld_ci_low", "kld_ci_high"}
KEYS |= {"kld_median", "kld_p99", "top1", "ppl", "tokens"}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    exact_ = logits.astype(np.longdouble)
    shifted = exact_ - exact_.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def formula(reference: np.ndarray, other: np.ndarray) -> np.ndarray:
    p, q = log_softmax(reference), log_softmax(other)
    return (np.exp(p) * (p - q)).sum(axis=1).astype(np.float64)


def random_logits(rows: int, vocab: int, seed: int, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, vocab)) * spread).astype(np.float32)


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


# ---- numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", [0.01, 0.3, 3.0])
def test_divergences_are_the_formula(distance: float) -> None:
    reference = random_logits(20, 3000, 1)
    near = reference + distance * random_logits(20, 3000, 2, 1.0)
    found, sums = divergences(encode(reference)[0], near)
    true = formula(reference, near)
    np.testing.assert_allclose(found, true, rtol=2e-3, atol=0.3 * STEP * (true.mean() ** 0.5))
    assert found.mean() == pytest.approx(true.mean(), rel=1e-2)
    expected = np.log(np.exp(near.astype(np.float64)).sum(axis=1))
    np.testing.assert_allclose(sums, expected, rtol=1e-12)


def test_a_shift_of_all_logits_changes_nothing_and_itself_is_the_noise_floor() -> None:
    reference = random_logits(20, 3000, 3)
    codes, _ = encode(reference)
    found, _ = divergences(codes, reference + np.float32(64))
    assert 0 < found.max() < 3e-8
    assert found.min() > -1e-12


def test_codes_are_within_half_a_step_of_the_logarithm() -> None:
    reference = random_logits(20, 3000, 4, 6.0)
    codes, sums = encode(reference)
    true = -log_softmax(reference).astype(np.float64)
    near = true < divergence.RANGE - STEP
    assert 0.5 < near.mean() < 1
    assert np.abs(codes * STEP - true)[near].max() <= STEP / 2 * (1 + 1e-9)
    assert (codes[true > divergence.RANGE] == 65535).all()
    np.testing.assert_allclose(sums, np.log(np.exp(reference.astype(np.float64)).sum(axis=1)), rtol=1e-12)


def test_logits_that_are_not_finite_are_an_error() -> None:
    good = random_logits(2, 100, 5)
    for value in (np.nan, np.inf, -np.inf):
        bad = good.copy()
        bad[1, 7] = value
        with pytest.raises(errors.NonFiniteError, match="not finite"):
            divergences(encode(good)[0], bad)
        with pytest.raises(errors.NonFiniteError):
            encode(bad)


def test_summaries_are_the_formulas() -> None:
    rng = np.random.default_rng(6)
    parts = [Scores(rng.exponential(size=n), rng.random(n) < 0.7, rng.exponential(2.0, n)) for n in (300, 40)]
    found = summarize(parts)
    kld, nll = (np.concatenate([getattr(part, name) for part in parts]) for name in ("kld", "nll"))
    assert found.kld_mean == pytest.approx(sum(kld) / 340)
    assert found.kld_median == pytest.approx(np.median(kld))
    assert found.kld_p99 == pytest.approx(np.percentile(kld, 99))
    assert found.top1 == pytest.approx((parts[0].agree.sum() + parts[1].agree.sum()) / 340)
    assert found.ppl == pytest.approx(np.exp(sum(nll) / 340))
    assert found.tokens == 340
    assert found.kld_ci_low < found.kld_mean < found.kld_ci_high


def test_the_interval_is_that_of_the_mean_and_wider_for_correlated_tokens() -> None:
    rng = np.random.default_rng(7)
    noise = rng.standard_normal(4000)
    low, high = interval([noise[:3000], noise[3000:]])
    assert (high - low) / 2 == pytest.approx(1.96 * noise.std() / np.sqrt(4000), rel=0.15)
    assert (high + low) / 2 == pytest.approx(noise.mean(), abs=0.005)
    walk = np.zeros(4000)
    for i in range(1, 4000):
        walk[i] = 0.8 * walk[i - 1] + noise[i]
    low, high = interval([walk])
    true = 1.96 * walk.std() * 3 / np.sqrt(4000)  # sqrt((1 + 0.8) / (1 - 0.8)) = 3
    assert 0.75 * true < (high - low) / 2 < 1.25 * true
    few = rng.random(3)
    low, high = interval([few])
    assert few.min() - 1e-12 < low < high < few.max() + 1e-12


def test_texts_differ_in_level_but_that_does_not_widen_the_interval() -> None:
    rng = np.random.default_rng(8)
    one, two = rng.standard_normal(1000), 100 + rng.standard_normal(1000)
    low, high = interval([one, two])
    assert high - low < 0.2
    assert low < (one.mean() + two.mean()) / 2 < high


# ---- windows -----------------------------------------------------------------------------------------


def test_windows_hold_the_text_after_its_opening(tiny_llama: Path, texts: list[Path]) -> None:
    llama = llama_cpp.Llama(str(tiny_llama), vocab_only=True, verbose=False)
    found = windows.load_texts(texts, llama, CTX, TOKENS)
    assert [text.kind for text in found] == ["code", "story"]
    for text, path in zip(found, texts, strict=True):
        assert [len(window) for window in text.windows] == [CTX, CTX, TOKENS - 2 * (CTX - 1) + 1]
        assert all(window[0] == llama.token_bos() for window in text.windows)
        tokens = llama.tokenize(path.read_bytes(), add_bos=False)[:TOKENS]
        assert [token for window in text.windows for token in window[1:]] == tokens
        assert text.first == CTX // 4
        assert text.rows == 2 * (CTX - 1 - 16) + (TOKENS - 2 * (CTX - 1)) - 16
    llama.close()


def test_texts_that_cannot_be_scored_are_refused(tiny_llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    llama = llama_cpp.Llama(str(tiny_llama), vocab_only=True, verbose=False)
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    (tmp_path / "all.txt").write_text(STORY)
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "short.txt").write_text(STORY)

    def load(*names: str) -> None:
        windows.load_texts([tmp_path / name for name in names], llama, 64, 100)

    with pytest.raises(errors.ArgumentError, match=r"short\.txt: .* tokens; more than 17 are needed"):
        load("short.txt")
    with pytest.raises(errors.ArgumentError, match=r"latin\.txt: not UTF-8 \(byte 3\)"):
        load("latin.txt")
    with pytest.raises(errors.ArgumentError, match="another row of the results is called 'all'"):
        load("all.txt")
    with pytest.raises(errors.ArgumentError, match="called 'short'"):
        load("deep/short.txt", "short.txt")
    with pytest.raises(errors.FileAccessError, match=r"none\.txt: No such file"):
        load("none.txt")
    monkeypatch.setattr(windows, "BUNDLED", tmp_path / "none")
    with pytest.raises(errors.ArgumentError, match="no texts are installed; give some with --text"):
        windows.bundled_texts()
    monkeypatch.setattr(windows, "BUNDLED", tmp_path)
    assert [path.name for path in windows.bundled_texts()] == ["all.txt", "latin.txt", "short.txt"]
    llama.close()


# ---- float32 copies ----------------------------------------------------------------------------------


def values(path: Path) -> dict[str, np.ndarray]:
    found = {}
    for tensor in gguf.GGUFReader(path).tensors:
        assert tensor.tensor_type == gguf.GGMLQuantizationType.F32
        found[tensor.name] = np.array(tensor.data)
    return found


@pytest.mark.parametrize("bits", [0, 4, 8])
def test_float32_copies_hold_the_weights(bits: int, tmp_path: Path, monkeypatch: Patch) -> None:
    write_tiny(tmp_path / "half.gguf", "llama", layers=1, file_type="f16", tied=True)
    pair = open_pair(convert(tmp_path / "half.gguf", tmp_path / "half", base_type="q4_0").base)
    monkeypatch.setattr(output, "CHUNK_WEIGHTS", 48 * 256)
    with exact.float32_file(pair.base, tmp_path / "scratch", pair=pair, bits=bits) as copy:
        found = values(copy)
    assert list((tmp_path / "scratch").iterdir()) == []
    assert "output.weight" in found
    for tensor in gguf.GGUFReader(pair.base).tensors:
        whole = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if bits and tensor.name in pair.completed:
            whole = whole + decode_residual(pair.completed[tensor.name].planes[0], bits)
        np.testing.assert_array_equal(found[tensor.name], whole)


def test_experts_get_their_own_residual(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe.gguf", "qwen3moe", layers=1)
    pair = open_pair(convert(tmp_path / "moe.gguf", tmp_path / "moe").base)
    merged = values(merge(pair.base, tmp_path / "merged.gguf", type="f32").path)
    with exact.float32_file(pair.base, tmp_path, pair=pair, bits=8) as copy:
        found = values(copy)
    assert list(found) == list(merged)
    for name, expected in merged.items():
        np.testing.assert_array_equal(found[name], expected)


def test_a_float32_model_needs_no_copy(tiny_llama: Path, tmp_path: Path) -> None:
    with exact.float32_file(tiny_llama, tmp_path / "scratch") as copy:
        assert copy == tiny_llama
    assert not (tmp_path / "scratch").exists()


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


def test_no_room_for_a_copy(tiny_pair: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    usage = type("usage", (), {"free": 1000})
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage)
    with (
        pytest.raises(errors.FileAccessError, match=r"cannot write .*0\.00 GB free.*folder with --scratch"),
        exact.float32_file(tiny_pair, tmp_path / "scratch"),
    ):
        pass
    assert list((tmp_path / "scratch").iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(errors.FileAccessError, match="--scratch"), exact.float32_file(tiny_pair, tmp_path / "file"):
        pass


# ---- the cache ---------------------------------------------------------------------------------------

KEY = {"mode": "exact", "ctx": 64, "reference": {"files": [["a", 1, 2]]}}


def blocks() -> list[tuple[np.ndarray, np.ndarray]]:
    return [(random_logits(n, 500, n), np.arange(n)) for n in (3, 5)]


def test_entries_read_back(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "a.logits"
    evalcache.write_entry(path, KEY, 8, 500, blocks())
    entry = evalcache.read_entry(path, KEY)
    assert entry is not None
    logits = np.concatenate([part for part, _ in blocks()])
    targets = np.concatenate([part for _, part in blocks()])
    np.testing.assert_array_equal(entry.codes, encode(logits)[0])
    np.testing.assert_array_equal(entry.top, logits.argmax(axis=1))
    np.testing.assert_allclose(entry.nll, -log_softmax(logits)[np.arange(8), targets].astype(np.float64), rtol=1e-9)
    np.testing.assert_array_equal(entry.floor, divergences(entry.codes, logits)[0])
    assert 0 < entry.floor.max() < 3e-8
    assert [item.name for item in path.parent.iterdir()] == ["a.logits"]


def test_entries_of_something_else_or_damaged_ones_are_not_used(tmp_path: Path) -> None:
    path = tmp_path / "a.logits"
    assert evalcache.read_entry(path, KEY) is None
    evalcache.write_entry(path, KEY, 8, 500, blocks())
    whole = path.read_bytes()
    assert evalcache.read_entry(path, KEY) is not None
    assert evalcache.read_entry(path, KEY | {"ctx": 65}) is None
    assert evalcache.read_entry(path, KEY | {"reference": {"files": [["a", 1, 3]]}}) is None
    for place in (0, 20, 40, 600, len(whole) - 30, len(whole) - 1):
        damaged = bytearray(whole)
        damaged[place] ^= 1
        path.write_bytes(damaged)
        assert evalcache.read_entry(path, KEY) is None, place
    for size in (0, 10, 18, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        assert evalcache.read_entry(path, KEY) is None, size
    path.write_bytes(whole + b"\0")
    assert evalcache.read_entry(path, KEY) is None
    path.write_bytes(whole)
    assert evalcache.read_entry(path, KEY) is not None


def test_an_entry_that_is_not_finished_leaves_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    def stop() -> Any:
        yield blocks()[0]
        raise KeyboardInterrupt

    path = tmp_path / "a.logits"
    with pytest.raises(KeyboardInterrupt):
        evalcache.write_entry(path, KEY, 8, 500, stop())
    with pytest.raises(errors.DecodeError, match="3 rows of logits came instead of 8"):
        evalcache.write_entry(path, KEY, 8, 500, blocks()[:1])
    monkeypatch.setattr(evalcache.shutil, "disk_usage", lambda _: type("usage", (), {"free": 1000}))
    with pytest.raises(errors.FileAccessError, match="use less --tokens, free some space, or set TWOFOLD_CACHE"):
        evalcache.write_entry(path, KEY, 8, 500, blocks())
    assert list(tmp_path.iterdir()) == []


def test_models_are_told_apart_by_content_too(tiny_llama: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(tiny_llama.read_bytes())
    before, about = evalcache.identity(path), path.stat()
    assert before == evalcache.identity(path)
    tensor = list(Source(path).tensors.values())[3]
    for place in (200, tensor.offset + 5):  # a key, a weight
        data = bytearray(tiny_llama.read_bytes())
        data[place] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
        try:
            changed = evalcache.identity(path)
        except errors.FormatError:
            continue
        assert changed["files"] == before["files"]
        assert changed["content"] != before["content"]
    os.utime(path, ns=(1, 1))
    assert evalcache.identity(path)["files"] != before["files"]


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
    llama = llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, verbose=False, **arguments)
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
        assert really["kld_mean"] < 1.1 * exactly["kld_mean"] + 2e-3


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
    assert evaluate.ram_bits(tmp_path / "tied.gguf", pair) == 16  # token_embd counts as the head
    write_tiny(tmp_path / "short.gguf", "llama", layers=1)
    with pytest.raises(errors.MismatchError, match=r"short\.gguf: another model than .*blk\.1\.\S+ is missing"):
        evaluate.ram_bits(tmp_path / "short.gguf", pair)
    write_tiny(tmp_path / "wide.gguf", "llama", ff=768)
    with pytest.raises(errors.MismatchError, match=r"ffn_\S+ has shape \(768, 256\), not"):
        evaluate.ram_bits(tmp_path / "wide.gguf", pair)


def test_several_pairs_and_pairs_of_fewer_bits(settings: Settings, tiny_llama: Path, tmp_path: Path) -> None:
    convert(tiny_llama, tmp_path / "six", base_type="q4_0", bits=6)
    both = replace(settings, pairs=[settings.pairs[0], tmp_path / "six"])
    labels = [subject.label for subject in evaluate.list_subjects(both)]
    assert labels == ["llama base", "llama r4", "llama r6", "llama r8", "six base", "six r4", "six r6", "eight"]
    with pytest.raises(errors.ArgumentError, match="two models would be called 'eight'"):
        evaluate.list_subjects(replace(settings, compare=settings.compare * 2))


def test_another_tokenizer_is_refused(settings: Settings, tmp_path: Path) -> None:
    data = settings.reference.read_bytes()
    assert data.count("▁people".encode()) == 1
    (tmp_path / "odd.gguf").write_bytes(data.replace("▁people".encode(), "▁qqople".encode()))
    with pytest.raises(errors.MismatchError, match=r"odd\.gguf: it tokenizes story\.txt otherwise"):
        evaluate.evaluate(replace(settings, compare=[tmp_path / "odd.gguf"], modes=()))


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


def test_plot(rows: list[Row], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    evalreport.plot(tmp_path / "a.png", rows)
    assert (tmp_path / "a.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    with pytest.raises(errors.FileAccessError):
        evalreport.plot(tmp_path / "none" / "a.png", rows)


def test_what_cannot_be_written_is_told_before_the_work(
    capsys: Capture, settings: Settings, tmp_path: Path, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(evaluate, "evaluate", lambda *_, **__: pytest.fail("it began to work"))
    command = ["eval", str(settings.pairs[0]), "--reference", str(settings.reference)]
    assert main([*command, "--json", str(tmp_path / "none" / "out.json")]) == 1
    assert capsys.readouterr().err == f"twofold: {tmp_path}/none: no such folder\n"
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([*command, "--plot", str(tmp_path / "a.png")]) == 1
    assert capsys.readouterr().err == "twofold: --plot needs matplotlib: pip install twofold[plot]\n"
