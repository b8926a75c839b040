"""twofold.convert: what lands in the two files, and what bad input does."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
import pytest

import twofold
from make_tiny import write_tiny
from twofold import architecture, errors, layout, output, report
from twofold.convert import convert
from twofold.merge import merge
from twofold.pairfile import open_pair
from twofold.source import Source


def types(path: Path) -> dict[str, str]:
    return {tensor.name: tensor.tensor_type.name for tensor in gguf.GGUFReader(path).tensors}


def rewrite(source: Path, out: Path, change: dict[str, np.ndarray] | None = None, architecture: str = "llama") -> None:
    """Copy a float32 GGUF with gguf-py, with other data for some tensors."""
    reader, writer = gguf.GGUFReader(source), gguf.GGUFWriter(out, architecture)
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            sub = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, (change or {}).get(tensor.name, tensor.data))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def leftovers(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if path.name.endswith(".part") or "out." in path.name]


@pytest.mark.parametrize(
    ("arch", "width", "base", "expected"),
    [
        ("llama", 256, "auto", {"Q2_K"}),
        ("llama", 192, "auto", {"Q4_0"}),
        ("qwen2", 256, "q3_k", {"Q3_K"}),
        ("gemma3", 256, "iq2_xs", {"IQ2_XS"}),
        ("qwen3moe", 256, "q2_k", {"Q2_K"}),
    ],
)
def test_base_types(arch: str, width: int, base: str, expected: set[str], tmp_path: Path) -> None:
    write_tiny(tmp_path / "source.gguf", arch, width=width)
    done = convert(tmp_path / "source.gguf", tmp_path / "out", base_type=base, bits=6, group=64)
    found = types(done.base)
    pair = open_pair(done.base)
    assert {found[name] for name in pair.completed} == expected
    assert found["token_embd.weight"] == "F32"
    assert not any("norm" in name or "gate_inp" in name for name in pair.completed)
    assert pair.residual.bits == 6 and pair.residual.group == 64
    for base_error, full_error in (error.relative for error in done.errors.values()):
        assert full_error < base_error / 20
    llama_cpp.Llama(str(done.base), n_ctx=64, verbose=False).close()  # stock llama.cpp reads the base


def test_tied_head_is_split(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tied.gguf", "llama", tied=True)
    done = convert(tmp_path / "tied.gguf", tmp_path / "out")
    found = types(done.base)
    assert (found["token_embd.weight"], found["output.weight"]) == ("F32", "Q2_K")
    assert "output.weight" in open_pair(done.base).completed


def test_experts_are_split(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe.gguf", "qwen3moe")
    pair = open_pair(convert(tmp_path / "moe.gguf", tmp_path / "out").base)
    assert pair.completed["blk.0.ffn_down_exps.weight"].shape[0] == 8


# ---- whole tensors -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole_pair(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layer 1 whole as q8_0."""
    return convert(tiny_llama, tmp_path_factory.mktemp("whole") / "whole", keep_whole="1").base


def test_whole_layers_have_no_residual(whole_pair: Path, tiny_llama: Path) -> None:
    found, pair = types(whole_pair), open_pair(whole_pair)
    matrices = {name for name in found if name.startswith("blk.1.") and "norm" not in name}
    assert len(matrices) == 7 and {found[name] for name in matrices} == {"Q8_0"}
    assert not matrices & set(pair.completed) and len(pair.completed) == 8
    source, base = ({t.name: t for t in gguf.GGUFReader(path).tensors} for path in (tiny_llama, whole_pair))
    name = "blk.1.ffn_down.weight"
    weights = np.array(source[name].data, np.float32)
    expected = gguf.quants.quantize(weights, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(base[name].data, expected)
    (row,) = [row for row in report.whole(report.inspect(pair)) if row["reason"] == "whole, as asked"]
    assert (row["tensors"], row["base"]) == (7, "q8_0")
    assert row["base_bytes"] == sum(base[name].n_bytes for name in matrices)


def test_the_loop_with_whole_layers(whole_pair: Path) -> None:
    """A token of a check has the bits of the token decoded alone; so speculation is plain decoding."""
    with closing(twofold.Llama(whole_pair, n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False)) as llm:
        text = llm.tokenize(b"the people would have there about which") * 4
        llm.eval(text[:20])
        rows = {}
        for width in (1, 2, 3, 8, 20):
            llm.decoder.truncate(20)
            llm.decoder.decode(text[20 : 20 + width], 20, all_rows=True)
            rows[width] = [llm.decoder.logits(row).copy() for row in range(width)]
        for width, found in rows.items():
            for row in range(width):
                np.testing.assert_array_equal(found[row], rows[20][row])
        llm.decoder.truncate(0)
        llm.reset()
        made = {}
        for draft in (0, 3):
            llm.draft_tokens = draft
            llm.reset()
            made[draft] = llm.create_completion("the people would", max_tokens=24, temperature=0)["choices"][0]["text"]
        assert made[0] == made[3]
        assert llm.stats["accepted"] > 0


def test_whole_tensors_by_name_and_as_in_the_source(tiny_llama: Path, tmp_path: Path) -> None:
    done = convert(tiny_llama, tmp_path / "a", keep_whole=r"^output|ffn_(up|gate)", whole_type="source")
    found = types(done.base)
    asked = {s.base.name for s in done.splits if s.reason == layout.AS_ASKED}
    assert asked == {"output.weight", *(f"blk.{i}.ffn_{x}.weight" for i in (0, 1) for x in ("up", "gate"))}
    assert {found[name] for name in asked} == {"F32"}
    again = convert(done.base, tmp_path / "b")  # its source's choice is not its own
    assert not [row for row in report.whole(report.inspect(open_pair(again.base))) if "asked" in row["reason"]]
    assert layout.WHOLE_KEY not in gguf.GGUFReader(again.base).fields
    small = convert(done.base, tmp_path / "c", keep_whole="1", base_type="iq2_xs")
    assert {types(small.base)[f"blk.1.attn_{x}.weight"] for x in "qkv"} == {"Q2_K"}  # fewer bits than q8_0 has


def test_whole_experts(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe.gguf", "qwen3moe", layers=1)
    done = convert(tmp_path / "moe.gguf", tmp_path / "out", keep_whole="ffn_down_exps")
    name = "blk.0.ffn_down_exps.weight"
    source, base = ({t.name: t for t in gguf.GGUFReader(p).tensors}[name] for p in (tmp_path / "moe.gguf", done.base))
    expected = gguf.quants.quantize(np.array(source.data, np.float32), gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_array_equal(base.data, expected)


def test_a_tied_head_that_stays_whole(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tied.gguf", "llama", tied=True)
    eight = convert(tmp_path / "tied.gguf", tmp_path / "eight", keep_whole="^output")
    assert types(eight.base)["output.weight"] == "Q8_0" and "output.weight" not in open_pair(eight.base).completed
    as_is = convert(tmp_path / "tied.gguf", tmp_path / "source", keep_whole="^output", whole_type="source")
    assert "output.weight" not in types(as_is.base)  # the embedding is the head, as in the source


def test_merging_a_pair_with_whole_layers(whole_pair: Path, tmp_path: Path) -> None:
    done = merge(whole_pair, tmp_path / "m.gguf")
    found = types(tmp_path / "m.gguf")
    assert (done.completed, found["blk.1.ffn_up.weight"], found["blk.0.ffn_up.weight"]) == (8, "Q8_0", "F16")
    assert layout.WHOLE_KEY not in gguf.GGUFReader(tmp_path / "m.gguf").fields


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("0-2", "has layers 0 to 1"),
        ("7", "has layers 0 to 1"),
        ("1-0", "has layers 0 to 1"),
        ("0,,1", "is not a layer"),
        ("blk.9", "no matrix that would be split has such a name"),
        ("attn_norm", "no matrix that would be split"),
        ("(", "neither layers"),
        (".", "no tensor can be split: not a matrix product, whole, as asked"),
    ],
)
def test_whole_tensors_that_are_not_there(spec: str, message: str, tiny_llama: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        convert(tiny_llama, tmp_path / "out", keep_whole=spec)
    with pytest.raises(errors.ArgumentError, match="q8_0 or source"):
        convert(tiny_llama, tmp_path / "out", keep_whole="1", whole_type="q4_0")
    assert leftovers(tmp_path) == []


def test_source_that_is_quantized_already(tiny_llama: Path, tmp_path: Path) -> None:
    q8 = convert(tiny_llama, tmp_path / "q8", base_type="q8_0").base
    done = convert(q8, tmp_path / "again")
    assert set(types(done.base)[name] for name in done.errors) == {"Q2_K"}
    with pytest.raises(errors.ArgumentError, match=r"source has 8\.5 bits"):
        convert(q8, tmp_path / "more", base_type="q8_0")


def test_split_source(tiny_llama: Path, tmp_path: Path) -> None:
    """Two parts give the same pair as one file."""
    reader = gguf.GGUFReader(tiny_llama)
    parts = [tmp_path / f"model-0000{i}-of-00002.gguf" for i in (1, 2)]
    for number, part in enumerate(parts):
        writer = gguf.GGUFWriter(part, "llama")
        for name, field in reader.fields.items():
            if number == 0 and not name.startswith("GGUF.") and name != "general.architecture":
                writer.add_key_value(name, field.contents(), field.types[0], field.types[-1])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        writer.add_int32("split.tensors.count", len(reader.tensors))
        for tensor in reader.tensors[number::2]:
            writer.add_tensor(tensor.name, tensor.data)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    halves, whole = convert(parts[0], tmp_path / "halves"), convert(tiny_llama, tmp_path / "whole")
    one, other = open_pair(halves.base), open_pair(whole.base)
    assert {n: t.fingerprint for n, t in one.completed.items()} == {
        n: t.fingerprint for n, t in other.completed.items()
    }
    llama_cpp.Llama(str(halves.base), n_ctx=64, verbose=False).close()
    with pytest.raises(errors.ArgumentError, match="first part"):
        convert(parts[1], tmp_path / "bad")
    parts[1].unlink()
    with pytest.raises(errors.FileAccessError, match="00002-of-00002"):
        convert(parts[0], tmp_path / "bad")


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_weights_that_are_not_finite(value: float, tiny_llama: Path, tmp_path: Path) -> None:
    bad = np.array(next(t.data for t in gguf.GGUFReader(tiny_llama).tensors if t.name == "blk.1.ffn_up.weight"))
    bad[5, 7] = value
    rewrite(tiny_llama, tmp_path / "bad.gguf", {"blk.1.ffn_up.weight": bad})
    with pytest.raises(errors.NonFiniteError, match=r"blk\.1\.ffn_up"):
        convert(tmp_path / "bad.gguf", tmp_path / "out")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"base_type": "q9_z"}, "q9_z"),
        ({"base_type": "f16"}, "quantized type"),
        ({"base_type": "q8_k"}, "quantized type"),
        ({"bits": 5}, "4, 6 or 8"),
        ({"group": 48}, "multiple of 32"),
    ],
)
def test_options_outside_what_is_allowed(
    options: dict[str, object], message: str, tiny_llama: Path, tmp_path: Path
) -> None:
    with pytest.raises(errors.ArgumentError, match=message):
        convert(tiny_llama, tmp_path / "out", **options)


def test_files_that_are_not_models(tiny_llama: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.gguf"
    text.write_text("not a model")
    with pytest.raises(errors.FormatError, match="not a GGUF"):
        convert(text, tmp_path / "out")
    with pytest.raises(errors.FileAccessError, match="No such file"):
        convert(tmp_path / "absent.gguf", tmp_path / "out")
    short = tmp_path / "short.gguf"
    for size in (200, 100_000):
        short.write_bytes(tiny_llama.read_bytes()[:size])
        with pytest.raises(errors.FormatError):
            convert(short, tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_converting_onto_itself_or_onto_another_file(tiny_llama: Path, tmp_path: Path) -> None:
    source = tmp_path / "model.base.gguf"
    shutil.copy(tiny_llama, source)
    before = source.read_bytes()
    with pytest.raises(errors.ArgumentError, match="source itself"):
        convert(source, tmp_path / "model", force=True)
    assert source.read_bytes() == before
    convert(tiny_llama, tmp_path / "out")
    with pytest.raises(errors.ArgumentError, match="--force"):
        convert(tiny_llama, tmp_path / "out")
    convert(tiny_llama, tmp_path / "out", force=True)
    with pytest.raises(errors.FileAccessError, match="no such folder"):
        convert(tiny_llama, tmp_path / "nowhere" / "out")


@pytest.mark.parametrize("architecture", ["t5", "plm", "bert", "no-such-arch"])
def test_architectures_that_are_not_supported(architecture: str, tiny_llama: Path, tmp_path: Path) -> None:
    rewrite(tiny_llama, tmp_path / "other.gguf", architecture=architecture)
    with pytest.raises(
        errors.UnsupportedError, match=architecture if architecture != "no-such-arch" else "cannot load"
    ):
        convert(tmp_path / "other.gguf", tmp_path / "out")
    assert leftovers(tmp_path) == []


def test_disk_full(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel refuses to write beyond a limit on file size; nothing is left."""
    code = (
        "import resource, signal, sys; from pathlib import Path; from twofold.convert import convert\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))\n"
        f"convert(Path({str(tiny_llama)!r}), Path({str(tmp_path / 'out')!r}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "FileAccessError" in done.stderr and "nothing was kept" in done.stderr
    assert leftovers(tmp_path) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 300_000
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(output.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(errors.FileAccessError, match="free"):
        convert(tiny_llama, tmp_path / "out")
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("interrupt", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_leaves_nothing(interrupt: signal.Signals, tmp_path: Path) -> None:
    write_tiny(tmp_path / "source.gguf", "llama", width=1024, layers=6)
    command = [sys.executable, "-m", "twofold", "convert", str(tmp_path / "source.gguf"), str(tmp_path / "out")]
    process = subprocess.Popen([*command, "--base", "iq2_xs"], stderr=subprocess.PIPE)
    deadline = time.monotonic() + 60
    while not any(path.name.endswith(".part") for path in tmp_path.iterdir()):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(interrupt)
    process.communicate(timeout=60)
    assert process.returncode != 0
    assert leftovers(tmp_path) == []


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """Peak memory of converting many layers is that of converting few."""
    code = (
        "import re, sys, threading, time; from pathlib import Path; from twofold.convert import convert\n"
        "peak, done = 0, False\n"
        "def watch():\n"
        "    global peak\n"
        "    while not done:\n"
        "        peak = max(peak, int(re.search(r'RssAnon:\\s*(\\d+)', open('/proc/self/status').read())[1]))\n"
        "        time.sleep(0.002)\n"
        "watcher = threading.Thread(target=watch); watcher.start()\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), base_type='q4_0', threads=2)\n"
        "done = True; watcher.join(); print(peak * 1024)"
    )
    peaks = []
    for layers in (1, 12):
        source = tmp_path / f"layers{layers}.gguf"
        write_tiny(source, "llama", width=1024, layers=layers)
        command = [sys.executable, "-c", code, str(source), str(tmp_path / f"out{layers}")]
        peaks.append(int(subprocess.run(command, capture_output=True, text=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 100e6  # the larger model is 560 MB larger


def test_main_graph_only() -> None:
    """Blocks that only predict further tokens are not in the graph that residuals are added to."""
    ends = layout.Ends(4, 3)
    for name, inside in (("4.ffn_up", False), ("3.ffn_up", True), ("3.attn_k", False), ("3.attn_q", True)):
        split = layout._decide(f"blk.{name}.weight", _source_tensor(f"blk.{name}.weight"), "auto", ends)
        assert split.residual == inside and (split.reason == "not in the main graph") != inside


def _source_tensor(name: str) -> object:
    from twofold.blocks import ggml_type
    from twofold.source import SourceTensor

    return SourceTensor(name, ggml_type("f32"), (32, 256), 0, 32 * 256 * 4, np.zeros(32 * 256 * 4, np.uint8))


def test_check_architecture_reads_what_llama_cpp_knows(tiny_llama: Path) -> None:
    architecture.check_architecture(tiny_llama)
    assert Source(tiny_llama).architecture == "llama"
    assert os.access(tiny_llama, os.R_OK)
