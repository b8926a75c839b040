"""The plugin in others' programs: two llama-servers (scripts/install_stock.sh) and llama_cpp's own server."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

import rpc_server
import twofold
from twofold import devices, plugin
from twofold.convert import convert
from twofold.merge import merge
from twofold.pairfile import residual_path

pytestmark = pytest.mark.stock

ROOT = Path(__file__).parents[1]
SERVER = ROOT / ".stock" / "bin" / "llama-server-vulkan"  # prebuilt
BUILT = ROOT / "build" / "llama-cpp" / "cmake" / "bin" / "llama-server"  # with the ggml that llama_cpp uses
PROMPTS = [
    "the people would have there", "about which", "into the good year", "know def self return", "10 20 10",
    "print import print", "people people people", "a good year for the people", "== -> ()", "would they know",
]  # fmt: skip
DEVICES = ["none", "Vulkan0"]
LOAD_ALL = ("-ot", "^none$=CPU")  # names no tensor, but makes llama.cpp read GGML_BACKEND_PATH


class Server:
    """A server process: what it says on standard error goes into `log`."""

    def __init__(self, command: list[Any], log: Path, **variables: Any) -> None:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("TWOFOLD_", "GGML_BACK"))}
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self._log = log
        with log.open("w") as out:
            self.process = subprocess.Popen(
                [str(part) for part in (*command, "--port", self.port)],
                env={**clean, "GGML_VK_VISIBLE_DEVICES": "0", **{k: str(v) for k, v in variables.items()}},
                stdout=out,
                stderr=out,
            )

    def wait(self, path: str) -> None:
        for _ in range(600):
            assert self.process.poll() is None, self._log.read_text()[-3000:]
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}").read()
                return
            time.sleep(0.1)
        raise AssertionError(self._log.read_text()[-3000:])

    def ask(self, path: str, **request: Any) -> Any:
        data = json.dumps(request).encode()
        headers = {"Content-Type": "application/json"}
        with urllib.request.urlopen(
            urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers)
        ) as answer:
            return json.load(answer)

    def tokens(self, prompt: list[int], count: int) -> list[int]:
        got = self.ask(
            "/completion", prompt=prompt, n_predict=count, temperature=0, return_tokens=True, cache_prompt=False,
            ignore_eos=True,
        )  # fmt: skip
        return list(got["tokens"])

    def logprobs(self, prompt: list[int], vocabulary: int) -> npt.NDArray[np.float64]:
        got = self.ask("/completion", prompt=prompt, n_predict=1, temperature=0, n_probs=vocabulary, cache_prompt=False)
        out = np.full(vocabulary, -100.0)
        for entry in got["completion_probabilities"][0]["top_logprobs"]:
            out[entry["id"]] = max(entry["logprob"], -100.0)
        return out

    @property
    def lines(self) -> list[str]:
        return [line for line in self._log.read_text().splitlines() if "twofold: " in line]

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(60)


@contextlib.contextmanager
def llama_server(
    base: Path, tmp_path: Path, *options: Any, device: str = "none", binary: Path = SERVER, **variables: Any
) -> Iterator[Server]:
    command = [binary, "-m", base, "-c", 256, "-np", 1, "-t", 2, "-fa", "on", "--no-ui", *LOAD_ALL, *options]
    variables = {"GGML_BACKEND_PATH": plugin.library(), **variables}
    server = Server([*command, "-ngl", 99, "-dev", device], tmp_path / "server.log", **variables)
    try:
        server.wait("/health")
        yield server
    finally:
        server.stop()


@pytest.fixture(scope="module")
def merged(tiny_pair: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("merged") / "merged.gguf"
    merge(tiny_pair, out, type="f32")
    return out


def ours(base: Path, device: str) -> twofold.Llama:
    assert device == "none" or device in {found.name for found in devices.devices()}, "GGML_VK_VISIBLE_DEVICES=0?"
    layers = 0 if device == "none" else -1
    return twofold.Llama(base, n_ctx=256, n_threads=2, n_gpu_layers=layers, draft_tokens=0, verbose=False)


def greedy(llm: twofold.Llama, prompt: list[int], count: int) -> list[int]:
    llm.reset()
    return [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(count), strict=False)]


def logits(llm: llama_cpp.Llama, tokens: list[int]) -> npt.NDArray[np.float64]:
    """Of the last token."""
    llm.reset()
    llm.eval(tokens)
    return np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)).astype(np.float64)


def log_softmax(x: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    x = x - x.max()
    return x - np.log(np.exp(x).sum())


# ---- llama-server ------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("binary", "least"), [(SERVER, 8), (BUILT, 10)], ids=["prebuilt", "source"])
def test_greedy_tokens_and_kld(
    tiny_pair: Path, merged: Path, tmp_path: Path, device: str, binary: Path, least: int
) -> None:
    """The prebuilt one's ggml is older than llama_cpp's: a token may differ where two are all but even."""
    llm, whole = ours(tiny_pair, device), llama_cpp.Llama(str(merged), n_ctx=256, verbose=False)
    same, divergences = 0, []
    residual = residual_path(tiny_pair)
    with llama_server(tiny_pair, tmp_path, device=device, binary=binary, TWOFOLD_RESIDUAL=residual) as server:
        for text in PROMPTS:
            prompt = llm.tokenize(text.encode())
            expected, found = greedy(llm, prompt, 8), server.tokens(prompt, 8)
            assert len(found) == len(expected)
            if found == expected:
                same += 1
                continue
            at = next(i for i, pair in enumerate(zip(expected, found, strict=True)) if pair[0] != pair[1])
            row = logits(llm, prompt + expected[:at])
            divergences.append(float(row[expected[at]] - row[found[at]]))
        klds = []
        for text in PROMPTS:
            prompt = llm.tokenize(text.encode())
            reference = log_softmax(logits(whole, prompt))
            klds.append((np.exp(reference) * (reference - server.logprobs(prompt, llm.n_vocab()))).sum())
        lines = server.lines
    print(f"{device}: {same} of {len(PROMPTS)} equal, margins {divergences}, KLD {np.mean(klds):.6f}")
    assert len(lines) == 1
    assert "completes its base, 8 bits" in lines[0]
    assert same >= least
    assert all(abs(margin) < 0.1 for margin in divergences)
    assert np.mean(klds) < 0.002


RPC_CLIENT = """
import json, sys, twofold
sys.path.insert(0, sys.argv[1])
from test_stock import PROMPTS, greedy
arguments = {"n_ctx": 256, "n_threads": 2, "n_gpu_layers": -1, "draft_tokens": 0, "verbose": False}
llm = twofold.Llama(sys.argv[2], rpc_servers=sys.argv[3], **arguments)
prompts = [llm.tokenize(text.encode()) for text in PROMPTS]
found = [[prompt, greedy(llm, prompt, 8)] for prompt in prompts]
print(json.dumps({"computed": llm.whereabouts.computed, "texts": found}))
"""


def test_a_device_that_appears_later(tiny_pair: Path, tmp_path: Path) -> None:
    """llama-server registers RPC devices when it reads its arguments, after the plugin was loaded."""
    with rpc_server.running() as endpoint:
        command = [sys.executable, "-c", RPC_CLIENT, str(Path(__file__).parent), str(tiny_pair), endpoint]
        done = subprocess.run(command, check=False, env=rpc_server.only_rpc(), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout.splitlines()[-1])
        assert set(answer["computed"]) == {"RPC0"}
        options = {"binary": BUILT, "device": "RPC0", "TWOFOLD_RESIDUAL": residual_path(tiny_pair), "TWOFOLD_LOG": 2}
        with llama_server(tiny_pair, tmp_path, "--rpc", endpoint, **options) as server:
            for prompt, expected in answer["texts"]:
                assert server.tokens(prompt, 8) == expected
            assert any("device RPC0 is watched" in line for line in server.lines)


def test_base_alone_is_far_from_it(tiny_pair: Path, merged: Path, tmp_path: Path) -> None:
    """What the other tests would see if nothing were added."""
    whole = llama_cpp.Llama(str(merged), n_ctx=256, verbose=False)
    with llama_server(tiny_pair, tmp_path, GGML_BACKEND_PATH="") as server:
        klds = []
        for text in PROMPTS[:4]:
            prompt = whole.tokenize(text.encode())
            reference = log_softmax(logits(whole, prompt))
            klds.append((np.exp(reference) * (reference - server.logprobs(prompt, whole.n_vocab()))).sum())
        assert server.lines == []
    assert np.mean(klds) > 0.02


def test_wrong_residual(tiny_pair: Path, tiny_llama: Path, tmp_path: Path) -> None:
    """Served is the base, with a line; or nothing at all."""
    other = convert(tiny_llama, tmp_path / "other", base_type="q4_0").base
    wrong = residual_path(other)
    llm = llama_cpp.Llama(str(tiny_pair), n_ctx=256, verbose=False)
    prompt = llm.tokenize(PROMPTS[0].encode())
    with llama_server(tiny_pair, tmp_path, GGML_BACKEND_PATH="", TWOFOLD_RESIDUAL=wrong) as server:
        alone = server.logprobs(prompt, llm.n_vocab())
    with llama_server(tiny_pair, tmp_path, "-nr", TWOFOLD_RESIDUAL=wrong, TWOFOLD_LOG=0) as server:
        assert np.abs(server.logprobs(prompt, llm.n_vocab()) - alone).max() < 0.5
        assert len(server.lines) == 1
        assert "does not belong to this model" in server.lines[0]
    with pytest.raises(AssertionError, match=r"the program ends \(TWOFOLD_STRICT\)"):  # noqa: SIM117
        with llama_server(tiny_pair, tmp_path, TWOFOLD_RESIDUAL=wrong, TWOFOLD_STRICT=1):
            pass


NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "2", "--spec-ngram-simple-size-m", "4")
SELF = ("--spec-type", "draft-simple", "-devd", "none", "-md")


@pytest.mark.parametrize("options", [NGRAM, SELF], ids=["ngram", "self"])
def test_drafts_inside_the_server(tiny_pair: Path, tmp_path: Path, options: tuple[str, ...]) -> None:
    """Text of the prompt, or the same base loaded a second time, drafts; the tokens are those of the full model."""
    extra = [tiny_pair] if "-md" in options else []
    llm = ours(tiny_pair, "none")
    prompt = llm.tokenize(b"people would have people would have people would have")
    residual = residual_path(tiny_pair)
    with llama_server(tiny_pair, tmp_path, TWOFOLD_RESIDUAL=residual) as server:
        expected = server.tokens(prompt, 48)
    with llama_server(
        tiny_pair, tmp_path, *options, *extra, TWOFOLD_RESIDUAL=residual, TWOFOLD_SELF_DRAFT=1, TWOFOLD_LOG=2
    ) as server:
        got = server.ask(
            "/completion", prompt=prompt, n_predict=48, temperature=0, return_tokens=True, ignore_eos=True
        )  # fmt: skip
    print(got["timings"])
    agree = next((i for i, pair in enumerate(zip(got["tokens"], expected, strict=True)) if pair[0] != pair[1]), 48)
    row = log_softmax(logits(llm, prompt + expected[:agree])) if agree < 48 else None
    assert row is None or row[expected[agree]] - row[got["tokens"][agree]] < 0.1
    assert got["timings"]["draft_n"] > 0
    if extra:  # the base alone is a worse model than the full one: not all that it drafts is accepted
        assert 0 < got["timings"]["draft_n_accepted"] < got["timings"]["draft_n"]


# ---- llama_cpp's server ------------------------------------------------------------------------------


def test_llama_cpp_server_gives_our_texts(tiny_pair: Path, tmp_path: Path) -> None:
    """The same ggml as ours: the texts must be the same to the letter."""
    command = [sys.executable, "-m", "twofold.plugin", "llama_cpp.server", "--model", tiny_pair, "--flash_attn", "true"]
    command += ["--n_ctx", 256, "--n_threads", 2, "--n_threads_batch", 2]
    server = Server(command, tmp_path / "server.log", TWOFOLD_RESIDUAL=residual_path(tiny_pair))
    llm = ours(tiny_pair, "none")
    try:
        server.wait("/v1/models")
        for prompt in PROMPTS:
            settings = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "repeat_penalty": 1.0}
            got = server.ask("/v1/completions", **settings)
            llm.reset()
            assert got["choices"][0]["text"] == llm.create_completion(**settings)["choices"][0]["text"]
    finally:
        server.stop()
