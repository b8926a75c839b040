"""Calibrate and convert with it, from texts to a pair."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from make_tiny import write_tiny
from twofold import calibration, errors, output, report
from twofold.blocks import ggml_type
from twofold.calibrate import bundled_texts, calibrate
from twofold.calibration import Calibration
from twofold.cli import main
from twofold.convert import Conversion, convert
from twofold.merge import merge
from twofold.pairfile import open_pair
from twofold.source import Source

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
SETTINGS = {"tokens": 256, "chunk": 64, "threads": 1}


@pytest.fixture(scope="module")
def file(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("calibrate") / "calib.gguf"
    calibrate(tiny_llama, path, sensitivity=True, **SETTINGS)
    return path


@pytest.fixture(scope="module")
def known(file: Path) -> Calibration:
    return calibration.load(file)


@pytest.fixture(scope="module")
def fed(tiny_llama: Path, known: Calibration, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    return convert(tiny_llama, tmp_path_factory.mktemp("fed") / "pair", calibration=known, threads=1)


def data(done: Conversion) -> tuple[bytes, bytes]:
    return done.base.read_bytes(), done.residual.read_bytes()


def weights(path: Path) -> dict[str, np.ndarray]:
    return {name: tensor.rows(0, tensor.weights // tensor.width) for name, tensor in Source(path).tensors.items()}


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    try:
        status = main([str(argument) for argument in arguments])
    except SystemExit as stop:
        status = int(stop.code or 0)
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# ---- calibrate ---------------------------------------------------------------------------------------


def test_what_is_in_the_file(known: Calibration) -> None:
    assert len(known.sums) == len(known.sensitivity) == len(known.moments_of) == 15
    assert len(known.moments) == 9
    assert all(sums.counts.tolist() == [256] for sums in known.sums.values())
    assert (known.chunks, known.chunk_tokens) == (4, 64)
    assert all(value > 0 for value in known.sensitivity.values())


def test_the_same_again(tiny_llama: Path, file: Path, tmp_path: Path) -> None:
    calibrate(tiny_llama, tmp_path / "again.gguf", sensitivity=True, **SETTINGS)
    assert (tmp_path / "again.gguf").read_bytes() == file.read_bytes()


def test_texts_take_turns(tiny_llama: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    long, short = tmp_path / "long.txt", tmp_path / "short.txt"
    long.write_text("first work " * 100)
    short.write_text("people " * 40)
    seen = []
    monkeypatch.setattr("twofold.decoder.Decoder.decode", lambda self, tokens, *_, **__: seen.append(list(tokens)))
    settings = {"moments": False, "sensitivity": False, "threads": 1, "chunk": 32}
    calibrate(tiny_llama, tmp_path / "out.gguf", texts=[long, short], tokens=130, **settings)
    assert [len(part) for part in seen] == [32] * 4  # no more than 130 tokens in whole chunks
    assert all(part[0] == 1 for part in seen)  # the beginning-of-text token
    assert seen[0][1:5] == seen[2][1:5] or seen[0][1:] != seen[1][1:]
    tails = [set(part[1:]) for part in seen]
    assert tails[0] != tails[1] and tails[1] - tails[0] and tails[0] & tails[2]


def test_bundled_texts_are_many_and_long() -> None:
    assert len(bundled_texts()) >= 4
    assert all(len(path.read_text("utf-8")) > 5000 for path in bundled_texts())


def test_commands(capsys: Capture, tiny_llama: Path, tmp_path: Path) -> None:
    text, out = tmp_path / "mine.txt", tmp_path / "calib.gguf"
    text.write_text("the people would make a good first year " * 40)
    command = ["calibrate", tiny_llama, out, "--text", text, "--tokens", 64, "--chunk", 32, "--threads", 1]
    status, said, err = run(capsys, *command, "--no-moments")
    assert (status, err) == (0, "")
    assert said.endswith(
        "15 matrices over 2 chunks of 32 tokens, second moments of 0 inputs, sensitivity of 0 matrices\n"
    )
    found = calibration.load(out)
    assert not found.moments and not found.sensitivity and found.sums["output.weight"].counts.tolist() == [64]
    status, _, err = run(capsys, *command)
    assert status == 1 and "already there" in err
    assert run(capsys, *command, "--force", "--progress")[0] == 0
    assert calibration.load(out).moments and not calibration.load(out).sensitivity
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_help(capsys: Capture) -> None:
    status, said, _ = run(capsys, "calibrate", "--help")
    assert status == 0
    for option in ("--text", "--tokens", "--chunk", "--no-moments", "--sensitivity", "--force", "OUT"):
        assert option in said
    said = run(capsys, "convert", "--help")[1]
    for option in ("--calibration", "--base-bpw", "--base-types", "--no-feedback"):
        assert option in said


def refused(capsys: Capture, kind: str, *arguments: object) -> str:
    status, said, err = run(capsys, *arguments)
    assert (status, said) == (1, ""), kind
    assert err.startswith("twofold: ") and err.count("\n") == 1, err
    return err


def test_what_calibrate_refuses(capsys: Capture, tiny_llama: Path, tmp_path: Path) -> None:
    short, latin, out = tmp_path / "short.txt", tmp_path / "latin.txt", tmp_path / "out.gguf"
    short.write_text("the people")
    latin.write_bytes("déjà vu ".encode("latin-1") * 100)
    command = ["calibrate", tiny_llama, out, "--threads", 1, "--text"]
    err = refused(capsys, "too little text", *command, short)
    assert "has 4 tokens" in err or "tokens, a chunk 511" in err
    assert "not UTF-8 (byte 1)" in refused(capsys, "encoding", *command, latin)
    assert "none.txt" in refused(capsys, "no text", *command, short, tmp_path / "none.txt")
    assert "chunks of 512 out of 64" in refused(capsys, "chunk", *command, short, "--tokens", 64)
    assert "none.gguf" in refused(capsys, "no model", "calibrate", tmp_path / "none.gguf", out)
    assert "no such folder" in refused(capsys, "no folder", "calibrate", tiny_llama, tmp_path / "no" / "out.gguf")
    assert "source itself" in refused(capsys, "source", "calibrate", tiny_llama, tiny_llama, "--force")
    assert "source itself" in refused(capsys, "text", "calibrate", tiny_llama, short, "--force", "--text", short)
    with pytest.raises(errors.ArgumentError, match="chunks of 1 "):
        calibrate(tiny_llama, out, chunk=1)
    assert not out.exists()


def test_a_model_that_computes_nan_is_refused(tiny_llama: Path, tmp_path: Path) -> None:
    raw = bytearray(tiny_llama.read_bytes())
    norm = Source(tiny_llama).tensors["blk.1.attn_norm.weight"]
    raw[norm.offset : norm.offset + norm.bytes] = np.full(norm.weights, np.nan, np.float32).tobytes()
    (tmp_path / "nan.gguf").write_bytes(raw)
    with pytest.raises(errors.NonFiniteError, match=r"nan\.gguf.*blk\.1\.attn_"):
        calibrate(tmp_path / "nan.gguf", tmp_path / "out.gguf", **SETTINGS)
    assert not (tmp_path / "out.gguf").exists()


# ---- convert with it ---------------------------------------------------------------------------------


def test_errors_and_pair(fed: Conversion, tiny_llama: Path, tmp_path: Path) -> None:
    """Base + residual is near the source, and the errors are those of the files."""
    merged, source = tmp_path / "merged.gguf", weights(tiny_llama)
    merge(fed.base, merged, type="f32")
    full, base = weights(merged), weights(fed.base)
    assert len(fed.errors) == 15
    for name, error in fed.errors.items():
        norm = np.linalg.norm(source[name])
        relative = [float(np.linalg.norm(source[name] - other[name]) / norm) for other in (base, full)]
        assert error.relative == pytest.approx(relative, rel=1e-3)
        assert relative[1] < 0.01 and relative[1] < 0.05 * relative[0]


def test_feedback_takes_from_the_error_of_the_outputs(
    fed: Conversion, tiny_llama: Path, tiny_pair: Path, known: Calibration, tmp_path: Path
) -> None:
    by_importance = convert(tiny_llama, tmp_path / "imp", calibration=known, feedback=False, threads=1)
    assert data(by_importance)[0] != data(fed)[0] != tiny_pair.read_bytes() != data(by_importance)[0]
    source = weights(tiny_llama)
    lost = {}
    for kind, base in (("feedback", fed.base), ("importance", by_importance.base), ("plain", tiny_pair)):
        found = weights(base)
        total = 0.0
        for name in ("blk.0.ffn_up.weight", "blk.1.attn_q.weight", "blk.1.ffn_down.weight", "output.weight"):
            moments = known.moments[known.moments_key(name)][0]
            error = source[name] - found[name]
            total += float(np.trace(error @ moments @ error.T) / np.trace(source[name] @ moments @ source[name].T))
        lost[kind] = total
    assert lost["feedback"] < 0.95 * lost["importance"] and lost["importance"] < lost["plain"]


def test_summary(fed: Conversion, capsys: Capture, tiny_llama: Path, file: Path, tmp_path: Path) -> None:
    found = report.converted(fed)
    assert "rounding         15 matrices with error feedback, 0 by importance, 0 plainly" in report.render(found)
    assert report.as_dict(found)["rounding"] == {"feedback": 15, "importance": 0, "plain": 0}
    assert "rounding" not in report.as_dict(report.inspect(open_pair(fed.base)))
    command = ["convert", tiny_llama, tmp_path / "p", "--threads", 1, "--json", "--force"]
    status, said, _ = run(capsys, *command, "--calibration", file, "--no-feedback")
    assert status == 0 and json.loads(said)["rounding"] == {"feedback": 0, "importance": 15, "plain": 0}
    assert json.loads(run(capsys, *command)[1])["rounding"] == {"feedback": 0, "importance": 0, "plain": 15}


def test_a_calibration_that_knows_some(tiny_llama: Path, known: Calibration, tmp_path: Path) -> None:
    some = {name: sums for name, sums in known.sums.items() if "blk.1" not in name}
    of = {name: first for name, first in known.moments_of.items() if "ffn" in name}
    done = convert(tiny_llama, tmp_path / "p", calibration=Calibration(some, known.moments, of), threads=1)
    counts = report.converted(done).rounding
    assert counts == {"feedback": 3, "importance": 5, "plain": 7}


@pytest.mark.parametrize("bits", [4, 6])
def test_threads_change_nothing_and_chunks_of_rows_next_to_nothing(
    bits: int, tiny_llama: Path, known: Calibration, tmp_path: Path, monkeypatch: Patch
) -> None:
    settings = {"calibration": known, "base_type": "q4_0", "bits": bits, "group": 64}
    one = convert(tiny_llama, tmp_path / "pair", threads=1, **settings)
    first = data(one)
    assert data(convert(tiny_llama, tmp_path / "pair", threads=4, force=True, **settings)) == first
    monkeypatch.setattr(output, "CHUNK_WEIGHTS", 1 << 14)  # 32 or 64 rows
    small = convert(tiny_llama, tmp_path / "small", threads=3, **settings)
    # BLAS rounds a row otherwise in a product of other height; a value beside a border then takes another code.
    before, after = weights(one.base), weights(small.base)
    differ = sum(np.count_nonzero(before[name] != after[name]) for name in before)
    assert differ < 1e-3 * sum(values.size for values in before.values())
    for name, error in one.errors.items():
        assert small.errors[name].relative == pytest.approx(error.relative, rel=1e-3)


def test_experts_go_by_importance(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe.gguf", "qwen3moe", layers=1)
    calibrate(tmp_path / "moe.gguf", tmp_path / "calib.gguf", sensitivity=False, **SETTINGS)
    found = calibration.load(tmp_path / "calib.gguf")
    done = convert(tmp_path / "moe.gguf", tmp_path / "pair", calibration=found, threads=1)
    assert {name for name, manner in done.manners.items() if manner == "importance"} == {
        f"blk.0.ffn_{kind}_exps.weight" for kind in ("gate", "up", "down")
    }
    assert set(done.manners.values()) == {"importance", "feedback"}


# ---- what convert refuses ----------------------------------------------------------------------------


def cut(known: Calibration, block: int) -> Calibration:
    """The same with moments in smaller blocks."""
    parts = {}
    for name, moments in known.moments.items():
        width = moments.shape[0] * moments.shape[1]
        parts[name] = np.stack([moments[0, at : at + block, at : at + block] for at in range(0, width, block)])
    return Calibration(known.sums, parts, known.moments_of, origin="calib.gguf")


def test_a_group_that_crosses_blocks_of_moments(tiny_llama: Path, known: Calibration, tmp_path: Path) -> None:
    small = cut(known, 64)
    with pytest.raises(errors.ArgumentError, match=r"group 96 does not divide .* 64 inputs .* calib\.gguf"):
        convert(tiny_llama, tmp_path / "p", calibration=small, group=96, base_type="q4_0", threads=1)
    with pytest.raises(errors.ArgumentError, match="base type q2_k: its blocks of 256"):
        convert(tiny_llama, tmp_path / "p", calibration=small, group=64, threads=1)
    assert list(tmp_path.iterdir()) == []
    convert(tiny_llama, tmp_path / "p", calibration=small, group=64, base_type="q4_0", threads=1)
    convert(tiny_llama, tmp_path / "whole", calibration=known, group=96, threads=1)  # a short last group is none
    convert(tiny_llama, tmp_path / "plain", calibration=small, group=96, feedback=False, threads=1)


def test_a_calibration_of_another_model(tiny_llama: Path, known: Calibration, tmp_path: Path) -> None:
    write_tiny(tmp_path / "other.gguf", "llama", width=320)
    with pytest.raises(errors.MismatchError, match=r"calib\.gguf .*other\.gguf: .* width 256 .* width 320"):
        convert(tmp_path / "other.gguf", tmp_path / "p", calibration=known, threads=1)
    elsewhere = Calibration({"blk.7.attn_q.weight": known.sums["blk.0.attn_q.weight"]}, origin="seven.gguf")
    with pytest.raises(errors.MismatchError, match=r"seven\.gguf knows no matrix of .*llama\.gguf"):
        convert(tiny_llama, tmp_path / "p", calibration=elsewhere, threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]


# ---- types within a budget ---------------------------------------------------------------------------


def bits_of(done: Conversion) -> tuple[float, dict[str, float]]:
    splits = [split for split in done.splits if split.residual]
    total = sum(8 * split.base.bytes for split in splits) / sum(split.base.weights for split in splits)
    return total, {split.base.name: split.base.kind.bpw for split in splits}


@pytest.mark.parametrize("bpw", [2.7, 3.3, 4.6])
def test_a_budget_is_kept_and_used(bpw: float, tiny_llama: Path, known: Calibration, tmp_path: Path) -> None:
    done = convert(tiny_llama, tmp_path / "p", calibration=known, base_bpw=bpw, threads=1)
    total, kinds = bits_of(done)
    assert bpw - 0.3 < total <= bpw
    assert len(set(kinds.values())) > 1
    assert Source(done.base).gguf.integer("general.file_type") in range(41)


def test_sensitive_matrices_get_more_bits(tiny_llama: Path, known: Calibration, tmp_path: Path) -> None:
    loved = ("blk.0.attn_k.weight", "blk.1.ffn_up.weight")
    sensitivity = {name: 100.0 if name in loved else 0.01 for name in known.sums}
    partial = Calibration(known.sums, sensitivity=sensitivity)
    done = convert(tiny_llama, tmp_path / "p", calibration=partial, base_bpw=3.5, threads=1)
    kinds = bits_of(done)[1]
    assert all(kinds[name] == ggml_type("q8_0").bpw for name in loved)
    assert np.mean([kinds[name] for name in kinds if name not in loved]) < 3


def test_what_a_budget_refuses(
    capsys: Capture, tiny_llama: Path, file: Path, known: Calibration, tmp_path: Path
) -> None:
    command = ["convert", tiny_llama, tmp_path / "p", "--threads", 1]
    budget = [*command, "--calibration", file, "--base-bpw"]
    assert "needs a calibration" in refused(capsys, "no calibration", *command, "--base-bpw", 3)
    assert "take 2.625; raise" in refused(capsys, "small", *budget, 2)
    assert "q9_x" in refused(capsys, "unknown", *budget, 3, "--base-types", "q2_k,q9_x")
    assert "f16" in refused(capsys, "not quantized", *budget, 3, "--base-types", "q2_k,f16")
    assert "not auto" in refused(capsys, "auto", *budget, 3, "--base-types", "auto,q4_0")
    assert "one of the two" in refused(capsys, "both", *budget, 3, "--base", "q4_0")
    assert "is for --base-bpw" in refused(capsys, "types alone", *command, "--base-types", "q2_k")
    write_tiny(tmp_path / "other.gguf", "llama", width=320, layers=1)
    with pytest.raises(errors.ArgumentError, match=r"none of q2_k, q3_k fits .* width 320"):
        convert(
            tmp_path / "other.gguf",
            tmp_path / "p",
            calibration=Calibration({}),
            base_bpw=3,
            base_types=["q2_k", "q3_k"],
            threads=1,
        )
    less = Calibration(known.sums, sensitivity={"output.weight": 1.0}, origin="calib.gguf")
    with pytest.raises(errors.MismatchError, match=r"calib\.gguf has no sensitivity"):
        convert(tiny_llama, tmp_path / "p", calibration=less, base_bpw=3, threads=1)
    assert [path.name for path in tmp_path.iterdir()] == ["other.gguf"]
