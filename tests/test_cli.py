"""The twofold command, in process; what depends on a process of its own in one."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from llama_cpp import _logger

import twofold
import twofold.rounding
from twofold import blocks, conversation, devices, errors, info, llama_log, pairfile, prompting
from twofold.cli import main

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


@pytest.fixture(scope="module")
def llm(tiny_pair: Path) -> Iterator[twofold.Llama]:
    model = twofold.Llama(tiny_pair, n_ctx=512, verbose=False)
    yield model
    model.close()


def run(capsys: Capture, *arguments: object) -> tuple[int, str, str]:
    status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


def generated(capsys: Capture, *arguments: object) -> dict[str, Any]:
    status, out, err = run(capsys, "generate", *arguments, "--json")
    assert (status, err) == (0, "")
    document = json.loads(out)  # fails if there is anything else on standard output
    assert isinstance(document, dict)
    return document


# ---- convert, inspect, merge, info -------------------------------------------------------------------


def test_convert(capsys: Capture, tiny_llama: Path, tmp_path: Path) -> None:
    status, out, err = run(capsys, "convert", tiny_llama, tmp_path / "p", "--residual-bits", 6, "--group", 64)
    assert (status, err) == (0, "")
    assert "(6 bits, group 64)" in out
    assert "kept whole in the base:" in out
    pair = pairfile.open_pair(tmp_path / "p.base.gguf")
    assert (pair.residual.bits, pair.residual.group) == (6, 64)


def test_convert_json_and_base_type(capsys: Capture, tiny_llama: Path, tmp_path: Path) -> None:
    status, out, _ = run(capsys, "convert", tiny_llama, tmp_path / "p", "--base", "q4_0", "--threads", 1, "--json")
    found = json.loads(out)
    assert status == 0
    assert {row["base"] for row in found["kinds"]} == {"q4_0"}
    assert found["base"] == str(tmp_path / "p.base.gguf")


def test_progress_goes_to_stderr_when_asked_for(capsys: Capture, tiny_llama: Path, tmp_path: Path) -> None:
    _, out, err = run(capsys, "convert", tiny_llama, tmp_path / "p", "--progress")
    assert "100%" in err
    assert "100%" not in out


def test_errors_are_one_line(capsys: Capture, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "p.base.gguf").write_bytes(b"mine")
    status, out, err = run(capsys, "convert", tiny_llama, tmp_path / "p")
    assert (status, out) == (1, "")
    assert err == f"twofold: {tmp_path}/p.base.gguf: is already there; choose another name or use --force\n"
    assert run(capsys, "convert", tiny_llama, tmp_path / "p", "--force")[0] == 0


def test_debug_shows_where_an_error_came_from(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("TWOFOLD_DEBUG", "1")
    with pytest.raises(errors.FileAccessError):
        main(["inspect", str(tmp_path / "none.gguf")])


def test_inspect(capsys: Capture, tiny_pair: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere.gguf"
    elsewhere.write_bytes(pairfile.residual_path(tiny_pair).read_bytes())
    status, out, _ = run(capsys, "inspect", tiny_pair, "--residual", elsewhere)
    assert status == 0
    assert str(elsewhere) in out
    assert "blk.0.ffn_up.weight" not in out
    assert "blk.0.ffn_up.weight" in run(capsys, "inspect", tiny_pair, "--tensors")[1]
    plain = json.loads(run(capsys, "inspect", tiny_pair, "--json")[1])
    full = json.loads(run(capsys, "inspect", tiny_pair, "--json", "--tensors")[1])
    assert full.pop("tensors")[0]["tensor"] == "token_embd.weight"
    assert plain == full


def test_merge(capsys: Capture, tiny_pair: Path, tmp_path: Path) -> None:
    status, out, _ = run(capsys, "merge", tiny_pair, tmp_path / "m.gguf", "--type", "q8_0", "--residual-bits", 4)
    assert status == 0
    assert out.endswith("15 tensors of base + 4-bit residual as q8_0, 6 copied\n")
    assert run(capsys, "merge", tiny_pair, tmp_path / "m.gguf")[0] == 1
    assert run(capsys, "merge", tiny_pair, tmp_path / "m.gguf", "--force")[0] == 0


def test_info(capsys: Capture) -> None:
    status, out, _ = run(capsys, "info", "--json")
    found = json.loads(out)
    assert status == 0
    assert found["twofold"] == twofold.__version__
    assert found["ggml"]["loaded"] == found["ggml"]["built"]
    assert (found["kernels"], found["kernel"]) == (blocks.kernels(), blocks.default_kernel())
    cpus = [device for device in found["devices"] if device["kind"] == "cpu"]
    assert cpus
    assert cpus[0]["total"] > 1e8
    assert "CPU" in found["llama_system_info"]
    status, out, _ = run(capsys, "info")
    assert status == 0
    assert f"{found['kernel']} is in use" in out
    assert len({line.index("  ") for line in out.splitlines() if line.startswith("llama-cpp-python")}) == 1


def test_cpu_of_systems_that_tell_and_that_do_not(tmp_path: Path) -> None:
    assert info.cpu(tmp_path / "none")["features"] == "unknown"
    assert info.cpu(tmp_path / "none")["model"] == "unknown"
    x86 = tmp_path / "x86"
    x86.write_text(
        "processor\t: 0\nmodel name\t: Some CPU: fast\nflags\t\t: fpu avx2 f16c avx\n\nmodel name\t: Other\n"
    )
    assert info.cpu(x86)["model"] == "Some CPU: fast"
    assert info.cpu(x86)["features"] == ["avx", "avx2", "f16c"]
    arm = tmp_path / "arm"
    arm.write_text("processor\t: 0\nFeatures\t: fp asimd asimddp\n")
    assert info.cpu(arm)["features"] == ["asimd", "asimddp"]


def test_devices_have_names() -> None:
    assert all(device.name and device.description for device in devices.devices())


# ---- generate ----------------------------------------------------------------------------------------


def test_generate_json_is_the_greedy_text(capsys: Capture, tiny_pair: Path, llm: twofold.Llama) -> None:
    found = generated(capsys, tiny_pair, "-p", "the work", "-n", 12, "--raw")
    assert set(found) == {"text", "tokens", "stats"}
    prompt = llm.tokenize(b"the work", special=True)
    expected: list[int] = []
    for token in llm.generate(prompt, temp=0.0):
        expected.append(token)
        if len(expected) == 12:
            break
    assert found["tokens"] == expected
    assert found["text"] == b"".join(prompting.piece(llm, token) for token in expected).decode()
    assert found["stats"]["tokens"] == 12
    assert found["stats"]["prompt_tokens"] == len(prompt)


def test_draft_and_bits_reach_the_model(capsys: Capture, tiny_pair: Path) -> None:
    options = (tiny_pair, "-p", "the work", "-n", 12)
    most = generated(capsys, *options, "--draft", 6)["stats"]
    assert len(most["accepted_by_position"]) == 6
    least = generated(capsys, *options, "--draft", 6, "--residual-bits", 4)["stats"]
    assert 0 < least["residual_bytes"] / least["checks"] < most["residual_bytes"] / most["checks"]
    none = generated(capsys, *options, "--residual-bits", 0)["stats"]
    assert (none["drafted"], none["residual_bytes"]) == (0, 0)


def test_sampling_options_reach_the_sampler(capsys: Capture, tiny_pair: Path) -> None:
    options = (tiny_pair, "-p", "the work", "-n", 16)
    greedy = generated(capsys, *options)["tokens"]
    hot = (*options, "--temp", 2, "--min-p", 0)
    assert generated(capsys, *hot, "--seed", 1)["tokens"] == generated(capsys, *hot, "--seed", 1)["tokens"]
    assert generated(capsys, *hot, "--seed", 1)["tokens"] != generated(capsys, *hot, "--seed", 2)["tokens"]
    for narrow in (("--top-k", 1), ("--top-p", 0), ("--min-p", 1)):
        assert generated(capsys, *options, "--temp", 2, "--min-p", 0, *narrow)["tokens"] == greedy, narrow
    once = generated(capsys, tiny_pair, "-p", "the work", "-n", 60, "--repeat-penalty", 1000)["tokens"]
    assert len(set(once)) == 60


def test_generate_streams_and_ends_with_statistics(capsys: Capture, tiny_pair: Path, monkeypatch: Patch) -> None:
    shown: list[str] = []
    show = conversation._show
    monkeypatch.setattr(conversation, "_show", lambda text: (shown.append(text), show(text)))
    status, out, err = run(capsys, "generate", tiny_pair, "-p", "the work", "-n", 8)
    assert (status, err) == (0, "")
    assert len(shown) > 1
    lines = out.removeprefix("".join(shown)).split("\n")
    assert (lines[:2], lines[3:]) == (["", ""], [""])
    assert lines[2].startswith("8 tokens, ")


def test_the_chat_template_is_used_unless_raw(capsys: Capture, tiny_pair: Path, llm: twofold.Llama) -> None:
    def prompt_tokens(text: str) -> int:
        return len(llm.tokenize(text.encode(), special=True))

    options = (tiny_pair, "-p", "the work", "-n", 1, "--system", "know")
    wrapped = "system: know\nuser: the work\nassistant:"
    assert generated(capsys, *options)["stats"]["prompt_tokens"] == prompt_tokens(wrapped)
    assert generated(capsys, *options, "--raw")["stats"]["prompt_tokens"] == prompt_tokens("know\n\nthe work")


def test_prompt_from_stdin_and_file(capsys: Capture, tiny_pair: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    options = (tiny_pair, "-n", 4, "--raw")
    expected = generated(capsys, *options, "-p", "the good year")["tokens"]
    assert generated(capsys, *options, "-p", "another")["tokens"] != expected
    monkeypatch.setattr(sys, "stdin", io.StringIO("the good year"))
    assert generated(capsys, *options, "-p", "-")["tokens"] == expected
    (tmp_path / "prompt.txt").write_text("the good year")
    assert generated(capsys, *options, "-f", tmp_path / "prompt.txt")["tokens"] == expected
    status, _, err = run(capsys, "generate", tiny_pair, "-f", tmp_path / "none.txt")
    assert (status, err) == (1, f"twofold: {tmp_path}/none.txt: No such file or directory\n")


def test_a_prompt_longer_than_the_context_is_refused(capsys: Capture, tiny_pair: Path) -> None:
    status, out, err = run(capsys, "generate", tiny_pair, "-p", "the " * 600, "--ctx", 256)
    assert (status, out) == (1, "")
    assert "tokens, the context 256; shorten it or raise --ctx" in err
    assert err.startswith("twofold: the prompt has ")


def test_generation_stops_where_the_context_is_full(capsys: Capture, tiny_pair: Path) -> None:
    found = generated(capsys, tiny_pair, "-p", "the " * 200, "-n", 10000, "--ctx", 256, "--raw")
    assert len(found["tokens"]) == 256 - found["stats"]["prompt_tokens"]


def test_a_file_that_is_no_base(capsys: Capture, tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "junk.gguf").write_bytes(b"junk, and more of it")
    status, _, err = run(capsys, "generate", tmp_path / "junk.gguf", "-p", "x")
    assert (status, "not a GGUF file" in err) == (1, True)
    status, _, err = run(capsys, "generate", tiny_llama, "-p", "x")
    assert (status, "llama.residual.gguf: the residual of" in err) == (1, True)
    status, _, err = run(capsys, "generate", tmp_path / "none.gguf", "-p", "x", "--residual-bits", 0)
    assert (status, err.startswith(f"twofold: {tmp_path}/none.gguf: llama.cpp cannot load it: ")) == (1, True)


def test_llama_cpp_says_why_it_cannot_load(capsys: Capture, tiny_pair: Path, tmp_path: Path) -> None:
    data = tiny_pair.read_bytes()
    (tmp_path / "cut.base.gguf").write_bytes(data[: len(data) // 2])
    status, _, err = run(capsys, "generate", tmp_path / "cut.base.gguf", "-p", "x", "--residual-bits", 0)
    assert status == 1
    assert err.startswith(f"twofold: {tmp_path}/cut.base.gguf: llama.cpp cannot load it: ")
    assert "corrupted or incomplete" in err


def test_errors_of_llama_cpp_are_shown_and_warnings_are_not(capsys: Capture, tiny_llama: Path, tmp_path: Path) -> None:
    data = tiny_llama.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0lxama", 1)
    (tmp_path / "m.gguf").write_bytes(data)
    llama_cpp.llama_log_set(_logger.llama_log_callback, None)  # as in a new process
    status, _, err = run(capsys, "convert", tmp_path / "m.gguf", tmp_path / "p")
    assert status == 1
    assert "unknown model architecture: 'lxama'" in err
    assert f"twofold: {tmp_path}/m.gguf: llama.cpp" in err.splitlines()[-1]
    llama_log._show_errors(3, b"a warning\n", None)
    assert capsys.readouterr().err == ""


# ---- prompting ---------------------------------------------------------------------------------------


def pieces(monkeypatch: Patch, llm: twofold.Llama, parts: list[bytes]) -> tuple[list[str], prompting.Answer]:
    """Generate as many tokens as there are parts, which stand for their bytes."""
    remaining = iter(parts)
    monkeypatch.setattr(prompting, "piece", lambda *_: next(remaining))
    answer = prompting.Answer(llm, llm.tokenize(b"the work"), prompting.Sampling(), len(parts))
    return list(answer.pieces()), answer


def test_only_whole_characters_come(llm: twofold.Llama, monkeypatch: Patch) -> None:
    found, answer = pieces(monkeypatch, llm, [b"a\xc3", b"\xa9", b"\xe2\x82", b"\xac!", b"\xf0\x9f"])
    assert found == ["a", "é", "€!"]
    assert answer.text == "aé€!"


def test_bytes_that_are_no_text_are_marked(llm: twofold.Llama, monkeypatch: Patch) -> None:
    assert pieces(monkeypatch, llm, [b"a\xff", b"b"])[0] == ["a\ufffd", "b"]


def test_the_end_of_generation_token_is_left_out(llm: twofold.Llama, monkeypatch: Patch) -> None:
    prompt = llm.tokenize(b"the work")
    whole = prompting.Answer(llm, prompt, prompting.Sampling(), 12)
    text = "".join(whole.pieces())
    end = next(i for i in range(2, 12) if whole.tokens[i] not in whole.tokens[:i])
    monkeypatch.setattr(prompting, "end_of_generation", lambda _, token: token == whole.tokens[end])
    cut = prompting.Answer(llm, prompt, prompting.Sampling(), 12)
    cut_text = "".join(cut.pieces())
    assert cut.tokens == whole.tokens[:end]
    assert text.startswith(cut_text)
    assert len(cut_text) < len(text)


def test_bos_comes_once(llm: twofold.Llama, monkeypatch: Patch) -> None:
    messages = [{"role": "user", "content": "the work"}]
    plain = prompting.chat_tokens(llm, messages)
    assert plain[0] == llm.token_bos()
    template = llm.metadata["tokenizer.chat_template"]
    monkeypatch.setitem(llm.metadata, "tokenizer.chat_template", "{{ bos_token }}" + template)
    assert prompting.chat_tokens(llm, messages) == plain


def test_a_template_that_refuses(llm: twofold.Llama, monkeypatch: Patch) -> None:
    monkeypatch.setitem(llm.metadata, "tokenizer.chat_template", "{{ raise_exception('no system here') }}")
    with pytest.raises(errors.ArgumentError, match="refuses these messages: no system here; leave out --system"):
        prompting.chat_tokens(llm, [{"role": "system", "content": "x"}])
    monkeypatch.delitem(llm.metadata, "tokenizer.chat_template")
    with pytest.raises(errors.ArgumentError, match="no chat template"):
        prompting.chat_tokens(llm, [{"role": "user", "content": "x"}])


def test_long_pieces_are_whole(llm: twofold.Llama, monkeypatch: Patch) -> None:
    def long(_vocab: Any, _token: int, buffer: Any, size: int, *_: Any) -> int:
        if size < 100:
            return -100
        buffer[:100] = b"x" * 100
        return 100

    monkeypatch.setattr(llama_cpp, "llama_token_to_piece", long)
    assert prompting.piece(llm, 300) == b"x" * 100


# ---- chat --------------------------------------------------------------------------------------------


@pytest.fixture
def asked(monkeypatch: Patch) -> list[list[str]]:
    """Contents of the messages of each prompt that chat makes."""
    seen: list[list[str]] = []
    real = prompting.chat_tokens

    def spy(llm: twofold.Llama, messages: Any) -> list[int]:
        seen.append([message["content"] for message in messages])
        return real(llm, messages)

    monkeypatch.setattr(prompting, "chat_tokens", spy)
    return seen


def talk(capsys: Capture, monkeypatch: Patch, text: str, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    return run(capsys, "chat", *arguments)


def test_chat_remembers_until_reset(
    capsys: Capture, tiny_pair: Path, monkeypatch: Patch, asked: list[list[str]]
) -> None:
    text = "the work\n\n good year \n/reset\nthe work\n"
    status, out, err = talk(capsys, monkeypatch, text, tiny_pair, "-n", 5, "--system", "know")
    assert (status, err) == (0, "")
    assert asked[0] == ["know", "the work"]
    answer = asked[1][2]
    assert answer
    assert asked[1] == ["know", "the work", answer, "good year"]
    assert asked[2] == ["know", "the work"]
    assert out.startswith(answer + "\n")
    assert out.endswith(answer + "\n")


def test_chat_commands_and_statistics(
    capsys: Capture, tiny_pair: Path, monkeypatch: Patch, asked: list[list[str]]
) -> None:
    text = "/foo\nthe work\n/quit\nmore\n"
    status, out, err = talk(capsys, monkeypatch, text, tiny_pair, "-n", 5, "--stats")
    assert (status, len(asked)) == (0, 1)
    assert err.startswith("/foo: no such command; commands: /reset ")
    assert out.splitlines()[-1].startswith("5 tokens, ")
    assert "tokens, " not in talk(capsys, monkeypatch, "the work\n", tiny_pair, "-n", 5)[1]


def test_chat_goes_on_after_a_line_without_room(
    capsys: Capture, tiny_pair: Path, monkeypatch: Patch, asked: list[list[str]]
) -> None:
    text = "the " * 600 + "\nthe work\n"
    status, out, err = talk(capsys, monkeypatch, text, tiny_pair, "-n", 5, "--ctx", 256)
    assert status == 0
    assert "the context 256; shorten it or raise --ctx; /reset forgets the conversation" in err
    assert asked[1] == ["the work"]
    assert len(out.splitlines()) == 1


def test_ctrl_c_stops_an_answer_and_the_chat_goes_on(
    capsys: Capture, tiny_pair: Path, monkeypatch: Patch, asked: list[list[str]]
) -> None:
    shown: list[str] = []

    def show(text: str) -> None:
        shown.append(text)
        if len(shown) == 2:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(conversation, "_show", show)
    before = signal.getsignal(signal.SIGINT)
    status, _, _ = talk(capsys, monkeypatch, "the work\ngood year\n", tiny_pair, "-n", 7)
    assert status == 0
    assert asked[1][:2] == ["the work", "".join(shown[:2])]
    assert len(shown) > 4
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_quits(capsys: Capture, tiny_pair: Path, monkeypatch: Patch, asked: list[list[str]]) -> None:
    def show(_: str) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(conversation, "_show", show)
    assert talk(capsys, monkeypatch, "the work\ngood year\n", tiny_pair)[0] == 130
    assert len(asked) == 1


def test_chat_needs_a_template(capsys: Capture, tiny_pair: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(prompting, "has_template", lambda _: False)
    status, _, err = talk(capsys, monkeypatch, "the work\n", tiny_pair)
    assert (status, "no chat template; use twofold generate --raw" in err) == (1, True)


# ---- signals, pipes, usage ---------------------------------------------------------------------------


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_leaves_nothing_behind(
    tiny_llama: Path, tmp_path: Path, monkeypatch: Patch, number: int, status: int
) -> None:
    real, seen = twofold.rounding.quantize, threading.Event()

    def quantize(*arguments: Any) -> np.ndarray:
        if not seen.is_set():
            seen.set()
            assert len(list(tmp_path.iterdir())) == 2
            os.kill(os.getpid(), number)
        return real(*arguments)

    monkeypatch.setattr(twofold.rounding, "quantize", quantize)
    before = signal.getsignal(number)
    try:
        found: int | str | None = main(["convert", str(tiny_llama), str(tmp_path / "p")])
    except SystemExit as leaving:
        found = leaving.code
    assert seen.is_set()
    assert found == status
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) is before


def test_commands_run_outside_the_main_thread(tiny_llama: Path, tmp_path: Path) -> None:
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(main(["convert", str(tiny_llama), str(tmp_path / "p")])))
    thread.start()
    thread.join()
    assert found == [0]


def python_m(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "twofold", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, **options)


def test_python_m_twofold() -> None:
    with python_m("--version", stdout=subprocess.PIPE) as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (0, f"twofold {twofold.__version__}\n", "")


def test_a_reader_that_goes_away_is_no_error(tiny_pair: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    with python_m("generate", tiny_pair, "-p", "the work", "-n", 4, stdout=write) as process:
        os.close(write)
        _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (141, "")


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["convert", "a"],
        ["convert", "a", "b", "--residual-bits", "5"],
        ["convert", "a", "b", "--threads", "0"],
        ["generate", "a"],
        ["generate", "a", "-p", "x", "-f", "y"],
        ["generate", "a", "-p", "x", "-n", "0"],
        ["generate", "a", "-p", "x", "--temp", "-1"],
        ["generate", "a", "-p", "x", "--temp", "nan"],
        ["generate", "a", "-p", "x", "--top-p", "2"],
        ["generate", "a", "-p", "x", "--colour=blue"],
        ["merge", "a", "b", "--type", "q4_0"],
        ["bench"],
        ["bench", "a", "--drafts", "33"],
        ["bench", "a", "--kinds", "poems"],
        ["bench", "a", "--residual-bits", "5"],
        ["nonsense"],
    ],
)
def test_usage_errors_exit_with_2(capsys: Capture, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as leaving:
        main(arguments)
    assert leaving.value.code == 2
    assert "usage: twofold" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command",
    [
        "convert",
        "calibrate",
        "inspect",
        "generate",
        "chat",
        "merge",
        "eval",
        "info",
        "accept",
        "bench",
        "plan",
        "serve",
    ],
)
def test_every_command_has_help_with_an_example(capsys: Capture, command: str) -> None:
    with pytest.raises(SystemExit) as leaving:
        main([command, "--help"])
    assert leaving.value.code == 0
    assert f"example: twofold {command}" in capsys.readouterr().out
