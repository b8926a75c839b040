"""Devices: what crosses, by formula; results added there; prompts multiplied there; where everything lies."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gpu_check
import rpc_server
import twofold
from make_tiny import ARCHS, write_tiny
from measure_devices import crossing, staged
from measure_verifier import kl_divergence, logits_of
from random_pair import SHAPES, write_pair
from twofold import devices, errors, info, whereabouts
from twofold.convert import convert
from twofold.engine import DeviceUse, Residual, Seen
from twofold.pairfile import residual_path
from twofold.stats import Stats

TEXT = "the people would have there about which some could return self.import(10) == 20, and know first of all " * 2
SETTINGS: dict[str, Any] = {"n_ctx": 256, "n_batch": 128, "logits_all": True, "verbose": False, "flash_attn": False}
VULKAN = DeviceUse("Vulkan0", True, True, True, 32, 1 << 26)


# ---- where everything lies ---------------------------------------------------------------------------


def seen(name: str, op: str = "NONE", host: bool = False) -> Seen:
    return Seen(name, op, "CPU" if host else "Vulkan0", host, 1 << 20, False)


def located(*extra: Seen, uses: tuple[DeviceUse, ...] = (VULKAN,), staging: bool = True) -> whereabouts.Whereabouts:
    usual = [seen("token_embd.weight", host=True), seen("blk.0.attn_q.weight"), seen("blk.0.attn_q.weight")]
    usual += [seen("output.weight"), seen("cache_k_l0"), seen("inp_pos"), seen("embd", "GET_ROWS", host=True)]
    return whereabouts.locate([*usual, *extra], uses, 3 << 20, all_layers=True, staging=staging)


def test_all_on_the_device_is_no_warning() -> None:
    found = located(seen("q", "MUL_MAT"))
    assert found.warnings == ()
    assert {(part.name, part.place, part.tensors) for part in found.parts} == {
        ("embeddings", "RAM", 1),
        ("layers", "Vulkan0", 1),
        ("head", "Vulkan0", 1),
        ("KV cache", "Vulkan0", 1),
    }
    assert found.computed == {"Vulkan0": 1}
    assert found.line().startswith("Vulkan0: ")
    assert "RAM: embeddings 1.00 MiB, residual 3.00 MiB; Vulkan0: results are added there" in found.line()
    json.dumps(found.as_dict())


@pytest.mark.parametrize(
    ("extra", "warning"),
    [
        (seen("output.weight2.weight", host=True), r"head \(1 tensors, 1.00 MiB\) in RAM, not on a device"),
        (seen("cache_v_l1", host=True), r"KV cache \(1 tensors, 1.00 MiB\) in RAM"),
        (seen("ffn", "MUL_MAT", host=True), r"the CPU computes 1 MUL_MAT"),
    ],
)
def test_what_is_on_the_cpu_is_told(extra: Seen, warning: str) -> None:
    (told,) = located(extra).warnings
    assert re.match(warning, told)


def test_what_a_device_cannot_do_is_told() -> None:
    lame = DeviceUse("Vulkan0", False, True, True, 0, 0)
    assert len(located(uses=(lame,)).warnings) == 2
    (told,) = located(uses=(lame,), staging=False).warnings
    assert "cannot add results" in told


def without_devices(*command: str) -> subprocess.CompletedProcess[str]:
    """Run Python where no GPU is seen, whether or not this machine has one."""
    hidden = dict.fromkeys(("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GGML_VK_VISIBLE_DEVICES"), "")
    return subprocess.run(
        [sys.executable, *command], check=True, env=os.environ | hidden, capture_output=True, text=True, timeout=300
    )


def test_info_of_a_pair_on_the_cpu(tiny_pair: Path) -> None:
    document = json.loads(without_devices("-m", "twofold", "info", str(tiny_pair), "--json").stdout)
    pair = document["pair"]
    places = {part["name"]: part["place"] for part in pair["parts"]}
    assert places == dict.fromkeys(("embeddings", "layers", "head", "KV cache", "other weights"), "RAM")
    assert pair["devices"] == []
    assert pair["warnings"] == ["no device was found: everything is on the CPU (twofold info lists devices)"]
    rows = info.render({**info.collect(), "pair": pair})
    assert "KV cache" in rows
    assert "warning" in rows


GPU_BUILD = """
import sys, warnings, twofold
from twofold import llama
llama.gpu_backends = lambda: ["CUDA"]
for layers in (-1, 0):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", twofold.errors.PlacementWarning)
        twofold.Llama(sys.argv[1], n_gpu_layers=layers, n_ctx=256, verbose=False).close()
    print(layers, [str(found.message) for found in caught if found.category is twofold.errors.PlacementWarning])
"""


def test_a_build_for_gpus_without_one_warns(tiny_pair: Path) -> None:
    all_layers, none = without_devices("-c", GPU_BUILD, str(tiny_pair)).stdout.splitlines()
    assert "no device was found" in all_layers
    assert none == "0 []"


# ---- arguments ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("columns", "size"), [(-1, 1 << 26), (32, 1000), (32, 1 << 31)])
def test_staging_that_cannot_be_is_refused(tiny_pair: Path, columns: int, size: int) -> None:
    with pytest.raises(errors.ArgumentError, match="1 to 1024 MiB"):
        twofold.Llama(tiny_pair, stage_columns=columns, stage_bytes=size, **SETTINGS)


def test_rpc_servers_that_cannot_be_are_refused(tiny_pair: Path) -> None:
    expected = errors.ArgumentError, errors.UnsupportedError  # the latter without the backend
    with pytest.raises(expected, match=r"no RPC server answers at '127.0.0.1:1'|has no RPC backend"):
        twofold.Llama(tiny_pair, rpc_servers="127.0.0.1:1", **SETTINGS)
    with pytest.raises(expected, match=r"no RPC server answers at 'nowhere'|has no RPC backend"):
        devices.add_rpc_servers("nowhere")


def test_what_crossed_is_counted_by_check_and_token() -> None:
    stats = Stats(tokens=5, checks=2)
    stats.counters = {"to_device_bytes": 100, "from_device_bytes": 50}
    stats.prompt_counters = {"to_device_bytes": 60, "from_device_bytes": 40}
    found = stats.as_dict()
    assert (found["to_device_bytes_a_check"], found["from_device_bytes_a_check"]) == (20, 5)
    assert (found["to_device_bytes_a_token"], found["from_device_bytes_a_token"]) == (10, 2.5)
    assert "to devices 0.0 MB" in stats.line()
    assert "devices" not in Stats(tokens=5, checks=2).line()


# ---- on a device -------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["llama", "qwen3moe"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    write_tiny(folder / "source.gguf", request.param)
    return convert(folder / "source.gguf", folder / "m").base


def moved(llm: twofold.Llama, tokens: list[int], *, draft: bool = False) -> tuple[dict[str, float], np.ndarray]:
    before = llm._engine.counters()
    logits = logits_of(llm, tokens, draft=draft)
    return {key: value - before[key] for key, value in llm._engine.counters().items()}, logits


def experts_used(pair: Path) -> int:
    return ARCHS["qwen3moe"].experts_used if "qwen3moe" in str(pair) else 0


@pytest.mark.vulkan
def test_what_crosses_is_the_formula(pair: Path) -> None:
    llm = twofold.Llama(pair, n_gpu_layers=-1, draft_tokens=3, **SETTINGS)
    assert [part.place for part in llm.whereabouts.parts if part.name != "embeddings"] == ["Vulkan0"] * 4
    assert llm.whereabouts.warnings == ()
    assert "CPU" not in llm.whereabouts.computed
    tokens = llm.tokenize(TEXT.encode())
    for n in (1, 5, 31):
        found, _ = moved(llm, tokens[:n])
        wanted = crossing(llm._engine.residual, n, experts_used=experts_used(pair))
        assert (found["from_device_bytes"], found["to_device_bytes"]) == wanted
        assert found["device_adds"] == found["nodes"] > 0
        found, _ = moved(llm, tokens[:n], draft=True)
        assert found["from_device_bytes"] == found["to_device_bytes"] == 0
    llm.reset()
    made = zip(llm.generate(tokens[:9], temp=0.0), range(8), strict=False)
    assert len([token for token, _ in made]) == 8
    stats, a_check = llm.stats, crossing(llm._engine.residual, 4, experts_used=experts_used(pair))
    assert stats["checks"] > 1
    assert stats["from_device_bytes_a_check"] <= a_check[0]  # the last check may be shorter
    llm.close()


@pytest.mark.vulkan
def test_products_begun_early_are_the_same(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each dense product is begun when its input exists; in the first pass, the one at load, nothing is known yet."""
    llm = twofold.Llama(pair, n_gpu_layers=-1, n_threads=2, **SETTINGS)
    tokens = llm.tokenize(TEXT.encode())[:20]
    dense, _ = staged(llm._engine.residual)
    results = []
    for n in (20, 1, 20):
        found, logits = moved(llm, tokens[:n])
        assert found["early_nodes"] == dense
        results.append(logits)
    np.testing.assert_array_equal(results[0], results[2])
    llm.close()
    monkeypatch.setenv("TWOFOLD_OVERLAP", "0")
    llm = twofold.Llama(pair, n_gpu_layers=-1, n_threads=2, **SETTINGS)
    found, logits = moved(llm, tokens)
    assert found["early_nodes"] == 0
    np.testing.assert_allclose(logits, results[0], atol=1e-3)
    llm.close()


@pytest.mark.vulkan
def test_a_device_that_cannot_add(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = twofold.Llama(pair, n_gpu_layers=-1, **SETTINGS)
    tokens = llm.tokenize(TEXT.encode())[:20]
    _, there = moved(llm, tokens)
    llm.close()
    monkeypatch.setenv("TWOFOLD_DEVICE_ADD", "0")
    with pytest.warns(errors.PlacementWarning, match="cannot add results"):
        llm = twofold.Llama(pair, n_gpu_layers=-1, **SETTINGS)
    found, here = moved(llm, tokens)
    back, to = crossing(llm._engine.residual, 20, experts_used=experts_used(pair))
    assert (found["from_device_bytes"], found["to_device_bytes"], found["device_adds"]) == (back + to, to, 0)
    np.testing.assert_allclose(here, there, atol=1e-3)
    llm.close()


@pytest.mark.vulkan
@pytest.mark.parametrize(("bits", "size"), [(8, 1 << 20), (6, 1 << 26)])
def test_prompt_through_staging_is_that_of_the_cpu(pair: Path, bits: int, size: int) -> None:
    llm = twofold.Llama(pair, n_gpu_layers=-1, residual_bits=bits, stage_columns=0, **SETTINGS)
    tokens = llm.tokenize(TEXT.encode())
    assert len(tokens) > 64
    _, by_cpu = moved(llm, tokens)
    llm.close()
    llm = twofold.Llama(pair, n_gpu_layers=-1, residual_bits=bits, stage_columns=33, stage_bytes=size, **SETTINGS)
    use = llm.whereabouts.uses[0]
    assert (use.stage_columns, use.stage_bytes) == (33, size)
    for _ in range(2):
        moved(llm, tokens)  # learns the order of the matrices, and that the first one follows the last
    found, logits = moved(llm, tokens)
    matrices, elements = staged(llm._engine.residual)
    assert found["staged_nodes"] == matrices
    assert found["staged_bytes"] == elements * (36 if bits == 8 else 34) // 32
    assert kl_divergence(by_cpu, logits).mean() < 2e-3
    drafts = logits_of(llm, tokens, draft=True)
    assert kl_divergence(by_cpu, drafts).mean() > 0.02
    found, _ = moved(llm, tokens[:32])
    assert found["staged_nodes"] == 0
    llm.close()


# ---- RPC ---------------------------------------------------------------------------------------------

CLIENT = """
import json, sys
sys.path[:0] = [sys.argv[1] + "/scripts", sys.argv[1] + "/tests"]
from test_devices import SETTINGS, TEXT, experts_used, logits_of, moved
from measure_devices import crossing
import numpy as np, twofold
from pathlib import Path
llm = twofold.Llama(sys.argv[2], n_gpu_layers=-1, rpc_servers=sys.argv[3], **SETTINGS)
tokens, found = llm.tokenize(TEXT.encode()), {}
for n in (1, 5, 31):
    draft, _ = moved(llm, tokens[:n], draft=True)
    check, _ = moved(llm, tokens[:n])
    formula = crossing(llm._engine.residual, n, experts_used=experts_used(Path(sys.argv[2])))
    found[n] = {"draft": [draft["from_device_bytes"], draft["to_device_bytes"]], "formula": formula,
                "check": [check["from_device_bytes"], check["to_device_bytes"]]}
staged, logits = moved(llm, tokens)
np.save(sys.argv[4], logits)
print(json.dumps({"found": found, "staged": staged["staged_nodes"], "computed": llm.whereabouts.computed}))
"""


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with rpc_server.running() as endpoint:
        yield endpoint


@pytest.mark.vulkan
def test_rpc_moves_what_the_formula_says(pair: Path, server: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", CLIENT, str(Path(__file__).parents[1]), str(pair), server, str(tmp_path / "l.npy")]
    done = subprocess.run(command, check=False, env=rpc_server.only_rpc(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    assert set(answer["computed"]) == {"RPC0"}
    for found in answer["found"].values():
        assert found["draft"] == [0, 0]
        assert found["check"] == found["formula"]
    assert answer["staged"] > 0
    llm = twofold.Llama(pair, n_gpu_layers=0, **SETTINGS)
    here = logits_of(llm, llm.tokenize(TEXT.encode()))
    assert kl_divergence(here, np.load(tmp_path / "l.npy")).mean() < 5e-3
    llm.close()


# ---- scripts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", ["tiny", "tiny-moe"])
def test_random_pair_is_a_pair(shape: str, tmp_path: Path) -> None:
    base = write_pair(tmp_path / "r", SHAPES[shape], base="q4_0", bits=6)
    residual = Residual(residual_path(base))  # its views of the file live as long as this
    assert all(planes.scales.any() for tensor in residual.tensors() for planes in tensor.planes)  # of every expert
    llm = twofold.Llama(base, **SETTINGS)
    tokens = list(range(3, 40))
    logits, drafts = logits_of(llm, tokens), logits_of(llm, tokens, draft=True)
    assert np.isfinite(logits).all()
    assert 0.1 < logits.std() < 10
    assert not np.array_equal(logits, drafts)
    llm.close()
    with pytest.raises(ValueError, match="q4_0, q8_0, q2_k, q4_k are allowed"):
        write_pair(tmp_path / "s", SHAPES["tiny"], base="q3_k")
    with pytest.raises(ValueError, match="take q4_0"):
        write_pair(tmp_path / "s", SHAPES["135m"], base="q2_k")


def test_gpu_check_needs_a_device() -> None:
    with pytest.raises(SystemExit, match="no device CUDA9; there are"):
        gpu_check.main(["--device", "CUDA9"])


@pytest.mark.vulkan
def test_gpu_check_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--shape", "tiny", "--base", "q4_0", "--threads", "2", "--steps", "1", "--prompt", "64", "--archs"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", errors.PlacementWarning)
        assert gpu_check.main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["failures"] == []
    assert [row["columns"] for row in found["times_2_threads"]["checks"]] == list(gpu_check.WIDTHS)
    assert found["times_2_threads"]["prompt_staged_bytes"] > 0
    assert found["times_2_threads"]["checks"][0]["early_nodes"] > 0
    assert found["times_nothing_begun_early"]["checks"][0]["early_nodes"] == 0
