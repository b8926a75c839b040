"""libggml-twofold.so in llama_cpp, a stock llama.cpp: right results, and what happens if something is wrong."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import numpy.typing as npt
import pytest

import twofold
from make_tiny import write_tiny
from plugin_host import PROMPT
from twofold import plugin
from twofold.cli import main
from twofold.convert import convert
from twofold.pairfile import residual_path

VULKAN = {"GGML_VK_VISIBLE_DEVICES": "0"}
HOST = Path(__file__).with_name("plugin_host.py")


@dataclass
class Result:
    status: int
    found: dict[str, Any]
    lines: list[str]  # the plugin's, on standard error

    @property
    def logits(self) -> npt.NDArray[np.float64]:
        return np.array(self.found["logits"])


def host(base: Path, *options: str, **variables: str | Path) -> Result:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("TWOFOLD_", "GGML_"))}
    env = {**clean, "PLUGIN": str(plugin.library()), **{name: str(value) for name, value in variables.items()}}
    done = subprocess.run([sys.executable, HOST, base, *options], env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stderr.splitlines() if line.startswith("twofold: ")]
    return Result(done.returncode, json.loads(done.stdout or "{}"), lines)


@pytest.fixture(scope="module")
def alone(tiny_pair: Path) -> Result:
    """The base without the plugin."""
    return host(tiny_pair)


@pytest.fixture(scope="module")
def other_pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair with the same shapes and other weights."""
    folder = tmp_path_factory.mktemp("other")
    write_tiny(folder / "llama.gguf", "llama", seed=7)
    return convert(folder / "llama.gguf", folder / "llama").base


def ours(
    base: Path, *, claim: bool = True, bits: int | None = None, layers: int = 0
) -> tuple[npt.NDArray[np.float64], list[int]]:
    """What `twofold.Llama` computes for the host's prompt, decoding plainly."""
    llm = twofold.Llama(
        base, n_ctx=256, n_batch=4, n_threads=2, n_threads_batch=2, verbose=False, draft_tokens=0, claim=claim,
        residual_bits=bits, n_gpu_layers=layers,
    )  # fmt: skip
    prompt = llm.tokenize(PROMPT.encode())
    llm.eval(prompt)
    logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(llm.ctx, -1), (llm.n_vocab(),)).astype(np.float64)
    llm.reset()
    made = [token for token, _ in zip(llm.generate(prompt, temp=0.0), range(12), strict=False)]
    llm.close()
    return logits, made


# ---- right results -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("claim", [True, False])
def test_gives_what_the_callback_gives(tiny_pair: Path, alone: Result, claim: bool, bits: int) -> None:
    residual = residual_path(tiny_pair)
    variables = {"TWOFOLD_RESIDUAL": residual, "TWOFOLD_BITS": str(bits), "TWOFOLD_CLAIM": str(int(claim))}
    # Without claims ggml may rearrange weights for itself, which rounds otherwise: the callback's host does so too.
    found = host(tiny_pair, "load", TWOFOLD_THREADS="2", **variables)
    logits, tokens = ours(tiny_pair, claim=claim, bits=bits)
    assert found.found["loaded"] == [True]
    assert np.array_equal(found.logits, logits)
    assert found.found["tokens"] == tokens
    assert np.abs(found.logits - alone.logits).max() > 0.01
    assert f"completes its base, {bits} bits, 2 threads" in found.lines[0]


@pytest.mark.vulkan
def test_gives_what_the_callback_gives_on_a_device(tiny_pair: Path) -> None:
    found = host(tiny_pair, "load", "gpu", TWOFOLD_RESIDUAL=residual_path(tiny_pair), TWOFOLD_LOG="2", **VULKAN)
    logits, tokens = ours(tiny_pair, layers=-1)
    assert any("Vulkan0 is watched" in line for line in found.lines)
    assert np.abs(found.logits - logits).max() < 1e-3
    assert found.found["tokens"] == tokens


def test_experts(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe.gguf", "qwen3moe")
    base = convert(tmp_path / "moe.gguf", tmp_path / "moe").base
    found = host(base, "load", TWOFOLD_RESIDUAL=residual_path(base))
    logits, tokens = ours(base)
    assert np.array_equal(found.logits, logits)
    assert found.found["tokens"] == tokens


def test_bits_0_is_the_base(tiny_pair: Path, alone: Result) -> None:
    found = host(tiny_pair, "load", TWOFOLD_RESIDUAL=residual_path(tiny_pair), TWOFOLD_BITS="0", TWOFOLD_CLAIM="0")
    assert np.array_equal(found.logits, alone.logits)


def test_is_loaded_several_times_and_serves_a_model_that_is_loaded_anew(tiny_pair: Path, alone: Result) -> None:
    found = host(
        tiny_pair, *["load"] * 3, f"then={tiny_pair}", TWOFOLD_RESIDUAL=residual_path(tiny_pair), TWOFOLD_LOG="2"
    )
    once = host(tiny_pair, "load", TWOFOLD_RESIDUAL=residual_path(tiny_pair))
    assert found.found["loaded"] == [True] * 3
    assert found.found["devices"] == alone.found["devices"]
    assert np.array_equal(found.logits, once.logits)
    assert found.found["then"] == [[once.found["logits"], once.found["tokens"]]]
    assert sum("completes its base" in line for line in found.lines) == 1


def test_only_one_front_end(tiny_pair: Path) -> None:
    found = host(tiny_pair, "load", "ours", TWOFOLD_RESIDUAL=residual_path(tiny_pair))
    assert "add the residual a second time" in found.found["ours"]
    assert host(tiny_pair, "ours").found["ours"] == "loaded"


# ---- wrong ones --------------------------------------------------------------------------------------


def refused(base: Path, alone: Result, message: str, *options: str, **variables: str | Path) -> Result:
    """It says so in one line and serves the base; or ends, if it is to be strict."""
    found = host(base, *(options or ["load"]), TWOFOLD_LOG="0", **variables)
    assert found.status == 0
    assert [message in line for line in found.lines] == [True], found.lines
    assert found.lines[0].endswith("the base is served alone")
    assert found.found["tokens"] == alone.found["tokens"]
    strict = host(base, *(options or ["load"]), TWOFOLD_STRICT="1", TWOFOLD_LOG="0", **variables)
    assert strict.status == 1
    assert strict.found == {}
    assert [message in line and "TWOFOLD_STRICT" in line for line in strict.lines] == [True]
    return found


def test_another_residual(tiny_pair: Path, other_pair: Path, alone: Result) -> None:
    residual = residual_path(other_pair)
    refused(tiny_pair, alone, "does not belong to this model: blk.0.attn_q.weight", TWOFOLD_RESIDUAL=residual)


def test_another_model_after_the_right_one(tiny_pair: Path, other_pair: Path) -> None:
    """What was known of the first model's weights must not be believed of those that lie there now."""
    found = host(tiny_pair, "load", f"then={other_pair}", TWOFOLD_RESIDUAL=residual_path(tiny_pair))
    assert [line for line in found.lines if "does not belong to this model" in line] == [found.lines[-1]]
    assert found.found["tokens"] == ours(tiny_pair)[1]
    assert found.found["then"][0][1] == host(other_pair).found["tokens"]


def test_another_residual_where_weights_are_not_claimed(tiny_pair: Path, other_pair: Path, alone: Result) -> None:
    residual = residual_path(other_pair)
    found = host(tiny_pair, "load", TWOFOLD_RESIDUAL=residual, TWOFOLD_CLAIM="0", TWOFOLD_STRICT="1")
    if found.status == 0:  # ggml keeps this type in a layout of its own on this CPU
        assert any("their bytes were not compared" in line for line in found.lines)
    else:
        assert "does not belong to this model" in found.lines[-1]


def test_missing_and_damaged_files(tiny_pair: Path, alone: Result, tmp_path: Path) -> None:
    refused(tiny_pair, alone, "none.gguf: No such file", TWOFOLD_RESIDUAL=tmp_path / "none.gguf")
    (tmp_path / "short.gguf").write_bytes(residual_path(tiny_pair).read_bytes()[:5000])
    refused(tiny_pair, alone, "short.gguf: truncated", TWOFOLD_RESIDUAL=tmp_path / "short.gguf")
    refused(tiny_pair, alone, "not a twofold residual", TWOFOLD_RESIDUAL=tiny_pair)
    refused(tiny_pair, alone, "TWOFOLD_RESIDUAL names no file")


def test_another_version_of_the_interface(tiny_pair: Path, alone: Result) -> None:
    residual = residual_path(tiny_pair)
    message = "backend interface has version 3, this plugin knows 2"
    found = refused(tiny_pair, alone, message, "version=3", "load", TWOFOLD_RESIDUAL=residual)
    assert found.found["loaded"] == [False]


def test_a_surprise_in_the_self_test(tiny_pair: Path, alone: Result) -> None:
    residual = residual_path(tiny_pair)
    message = "the CPU's backends are not made where they should (ggml "
    found = refused(tiny_pair, alone, message, "surprise", "load", TWOFOLD_RESIDUAL=residual)
    assert found.found["restored"]
    assert "nothing is changed" in found.lines[0]


@pytest.mark.parametrize(
    "variable", ["TWOFOLD_BITS=5", "TWOFOLD_BITS=all", "TWOFOLD_THREADS=0", "TWOFOLD_CLAIM=2", "TWOFOLD_SELF_DRAFT=x"]
)
def test_settings_that_are_not_allowed(tiny_pair: Path, alone: Result, variable: str) -> None:
    name, value = variable.split("=")
    message = "residual bits 5: 0, 4, 6 and 8" if value == "5" else f"{variable} is not a number that is allowed"
    found = host(tiny_pair, "load", TWOFOLD_RESIDUAL=residual_path(tiny_pair), **{name: value})
    assert message in found.lines[0]
    assert found.found["tokens"] == alone.found["tokens"]


def test_a_program_that_hides_its_ggml() -> None:
    """Built with static libraries: nothing of ggml can be found, and nothing is changed."""
    code = f"import ctypes; init = ctypes.CDLL({str(plugin.library())!r}).ggml_backend_init\n"
    code += "init.restype = ctypes.c_void_p; print(init())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "None\n"
    assert "does not give its ggml away (no function ggml_" in done.stderr


def test_exports_and_links_nothing_else() -> None:
    lib = ctypes.CDLL(str(plugin.library()))
    assert not hasattr(lib, "tf_engine_new")
    maps = subprocess.run(["ldd", plugin.library()], capture_output=True, text=True, check=True).stdout
    assert "ggml" not in maps.replace(str(plugin.library()), "")


# ---- the command -------------------------------------------------------------------------------------


def test_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugin", "--path"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert path == plugin.library()
    assert path.name == "libggml-twofold.so"
    assert main(["plugin", "--residual", "some/model.residual.gguf"]) == 0
    out = capsys.readouterr().out
    assert f"GGML_BACKEND_PATH={path} TWOFOLD_RESIDUAL=some/model.residual.gguf" in out
    assert "-m some/model.base.gguf" in out


def test_a_module_with_the_plugin(tiny_pair: Path, alone: Result, tmp_path: Path) -> None:
    (tmp_path / "hosted.py").write_text(
        "import json, sys\nfrom plugin_host import logits\nprint(json.dumps(logits(sys.argv[1], 12)))\n"
    )
    env = {**os.environ, "TWOFOLD_RESIDUAL": str(residual_path(tiny_pair))}
    env["PYTHONPATH"] = os.pathsep.join([str(tmp_path), str(HOST.parent)])
    command = [sys.executable, "-m", "twofold.plugin", "hosted", tiny_pair]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)[0] == list(ours(tiny_pair)[0])
