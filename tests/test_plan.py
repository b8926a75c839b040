"""twofold plan: units, acceptance, shapes, costs worked out a second time, and what is taken."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from make_header import write_header
from make_tiny import write_tiny
from twofold import acceptance, cost, devices, errors, fill, machine, placement, plan_command, planning, report, units
from twofold import precision as losses
from twofold import shapes as model_shapes
from twofold.acceptance import Depths
from twofold.blocks import ggml_type
from twofold.calibration import Calibration
from twofold.cli import main
from twofold.convert import convert
from twofold.cost import Load, Sums
from twofold.machine import Machine, Told
from twofold.pairfile import open_pair
from twofold.placement import Base, Setting
from twofold.planning import Drafter, Options
from twofold.shapes import Matrix, Model

GIB = 1 << 30
RATES = dict.fromkeys(machine.KERNEL_TYPES, machine.linear(4e11))
PC = Machine(12 * GIB, 500e9, 25e9, 64 * GIB, 60e9, dict.fromkeys((4, 6, 8), machine.linear(5e11)), RATES)
KNOWN = acceptance.load()
RATES_TOLD = ["--vram-bandwidth", "5GB/s", "--pcie", "1GB/s", "--ram-bandwidth", "1GB/s"]
TOLD = ["--vram", "1MB", *RATES_TOLD, "--reserve", "0", "--ctx", "256"]


def seven(layers: int = 32, width: int = 4096, ff: int = 11008, vocabulary: int = 32000) -> Model:
    """Shapes of a 7B llama in f16."""
    half = ggml_type("f16")
    sizes = {
        **dict.fromkeys(("attn_q", "attn_k", "attn_v", "attn_output"), (width, width)),
        **{"ffn_gate": (ff, width), "ffn_up": (ff, width), "ffn_down": (width, ff)},
    }
    found = [
        Matrix(f"blk.{layer}.{name}.weight", layer, 1, rows, inputs, half)
        for layer in range(layers)
        for name, (rows, inputs) in sizes.items()
    ]
    found.append(Matrix("output.weight", None, 1, vocabulary, width, half))
    cache = layers * 2 * width * 2
    return Model(
        "seven", "llama", layers, vocabulary, width, 4096, False, vocabulary * width * 2, 0, cache, tuple(found)
    )


def setting(of: Machine = PC, model: Model | None = None, ctx: int = 4096, reserve: int = GIB) -> Setting:
    return Setting(model or seven(), of, ctx, ctx // 2, reserve)


# ---- units -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("12GiB", 12 << 30),
        ("12GB", 12 * 10**9),
        ("1.5 MiB", 3 << 19),
        (".5kb", 500),
        ("0", 0),
        ("7B", 7),
        ("2KiB", 2048),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert units.size(text) == expected


@pytest.mark.parametrize("text", ["12", "12G", "GiB", "12GB/s", "-1GB", "1e3GB", "", "12 GiBs", "12iB"])
def test_sizes_that_are_none(text: str) -> None:
    with pytest.raises(errors.ArgumentError, match=r"is not a size.*12GiB"):
        units.size(text)


def test_rates() -> None:
    assert units.rate("500GB/s") == 500e9
    assert units.rate("1GiB/s") == 1 << 30
    for text in ("500GB", "500", "0GB/s", "500GBps"):
        with pytest.raises(errors.ArgumentError, match=r"is not a rate.*500GB/s"):
            units.rate(text)


def test_binary() -> None:
    assert [units.binary(x) for x in (0, 1023, 1024, 1.5 * GIB, 12 * GIB)] == [
        *("0 B", "1023 B"),
        *("1.00 KiB", "1.50 GiB", "12.0 GiB"),
    ]


# ---- acceptance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", acceptance.SETS)
def test_curves_pass_through_what_was_measured(chosen: str) -> None:
    """Unless more bits yielded less, as 4.5 bits did at 24 drafts beside 3.6."""
    found = acceptance.load(chosen)
    checked = 0
    for curve in found.curves:
        for k, tokens in zip(curve.depths.k, curve.depths.tokens, strict=True):
            if (chosen, curve.bits, k) != ("plain", 4.5, 24):
                assert found.tokens(curve.bits)[k] == pytest.approx(tokens, rel=1e-3)
                checked += 1
    assert checked >= 11
    assert found.tokens(4.5)[24] == pytest.approx(11.6 if chosen == "plain" else 13.86, rel=1e-3)


@pytest.mark.parametrize("chosen", acceptance.SETS)
def test_more_bits_and_longer_drafts_never_yield_less(chosen: str) -> None:
    found = acceptance.load(chosen)
    table = np.array([found.tokens(bits) for bits in np.linspace(1.8, 8.5, 60)])
    assert (np.diff(table, axis=0) >= -1e-9).all()
    assert (np.diff(table, axis=1) >= -1e-9).all()
    assert (table[:, 0] == 1).all()
    assert (table <= np.arange(acceptance.DEEPEST + 1) + 1 + 1e-9).all()
    assert table[0, 6] < table[25, 6] - 0.5  # not clamped at the ends
    assert table[-1, 6] > table[30, 6] + 0.2


def test_between_curves_is_between_their_yields() -> None:
    below, between, above = (KNOWN.tokens(bits)[12] for bits in (2.625, 2.8, 3.0))
    assert below + 0.3 < between < above - 0.3
    assert 3.58 < KNOWN.tokens(2.625)[5] < 4.22


def test_rates_of_acceptance() -> None:
    assert acceptance.acceptance_rate(1 + 0.5 + 0.25, 2) == pytest.approx(0.5)
    assert Depths((2,), (1.75,)).tokens_per_check(4) == pytest.approx(1.9375)
    assert Depths((2,), (1.75,)).tokens_per_check(0) == 1


def test_a_drafters_yields() -> None:
    found = acceptance.parse_drafter("6:4.6,3:3.2")
    assert (found.k, found.tokens) == ((3, 6), (3.2, 4.6))
    assert found.tokens_per_check(6) == pytest.approx(4.6)
    for bad in ("3", "3:5", "3:0.5", "x:2", "0:1", "3:2,3:2.5", ""):
        with pytest.raises(errors.ArgumentError, match=r"such as 3:3\.2,6:4\.6"):
            acceptance.parse_drafter(bad)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"source": "x", "drafter": {"k": [3], "tokens_per_check": [2]}, "curves": []},
        {"source": "x", "drafter": {"k": [3], "tokens_per_check": [5]}, "curves": []},
        [],
    ],
)
def test_files_that_are_not_of_acceptance(document: Any, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(document))
    with pytest.raises(errors.FormatError, match=r"a\.json"):
        acceptance.load("plain", tmp_path / "a.json")
    with pytest.raises(errors.FileAccessError, match=r"b\.json"):
        acceptance.load("plain", tmp_path / "b.json")


# ---- shapes ------------------------------------------------------------------------------------------


def test_shapes_of_a_file_and_of_its_header_alone(tiny_llama: Path, tmp_path: Path) -> None:
    found = model_shapes.read(tiny_llama)
    tensors = {t.name: t for t in gguf.GGUFReader(tiny_llama).tensors}
    products = [t for name, t in tensors.items() if len(t.shape) == 2 and name != "token_embd.weight"]
    assert found.weights == sum(int(t.n_elements) for t in products)
    assert (found.layers, found.vocabulary, found.width, found.tied, found.has_state) == (2, 512, 256, False, False)
    rows = [int(t.shape[1]) for n, t in tensors.items() if "attn_k.weight" in n or "attn_v.weight" in n]
    assert found.cache_token == 2 * sum(rows)
    assert [len(unit) for unit in found.units] == [7, 7, 1]
    header = tmp_path / "header.gguf"
    header.write_bytes(tiny_llama.read_bytes()[: min(t.data_offset for t in tensors.values())])
    assert model_shapes.read(header).matrices == found.matrices


def test_experts_tied_heads_and_recurrent_models(tmp_path: Path) -> None:
    write_tiny(tmp_path / "moe.gguf", "qwen3moe", layers=1)
    found = model_shapes.read(tmp_path / "moe.gguf")
    experts = [m for m in found.matrices if m.experts > 1]
    assert [(m.experts, m.used) for m in experts] == [(8, 0.25)] * 3
    assert experts[0].touched(1) == 0.25
    assert experts[0].touched(2) == pytest.approx(1 - 0.75**2)
    write_tiny(tmp_path / "tied.gguf", "llama", tied=True)
    tied = model_shapes.read(tmp_path / "tied.gguf")
    assert tied.tied and tied.matrices[-1].name == "output.weight"
    writer = gguf.GGUFWriter(tmp_path / "hybrid.gguf", "jamba")
    for name in ("token_embd.weight", "blk.0.ffn_up.weight", "blk.0.ssm_in.weight"):
        writer.add_tensor(name, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    hybrid = model_shapes.read(tmp_path / "hybrid.gguf")
    assert hybrid.has_state and not tied.has_state
    assert [m.name for m in hybrid.matrices] == ["blk.0.ffn_up.weight", "blk.0.ssm_in.weight", "output.weight"]
    for model, counted in ((hybrid, False), (tied, True)):
        found_plan = planning.plan(setting(model=model), Options(KNOWN))
        assert {s.kind for s in found_plan.strategies} == {"plain", "twofold"}
        assert counted != any("state is not counted" in line for line in planning.assumptions(found_plan))


def test_blocks_outside_the_main_graph_do_not_count(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "mtp.gguf", "glm4moe")
    writer.add_block_count(2)
    writer.add_nextn_predict_layers(1)
    for name in ("token_embd.weight", "blk.0.ffn_up.weight", "blk.1.ffn_up.weight", "blk.1.attn_k.weight"):
        writer.add_tensor(name, np.zeros((32, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    found = model_shapes.read(tmp_path / "mtp.gguf")
    assert [m.name for m in found.matrices] == ["blk.0.ffn_up.weight", "output.weight"]
    assert (found.layers, found.cache_token) == (1, 0)


def test_a_header_without_data(tmp_path: Path) -> None:
    sizes = {
        "layers": 64,
        "width": 5120,
        "ff": 25600,
        "heads": 64,
        "kv_heads": 8,
        "head_dim": 128,
        "vocabulary": 151936,
    }
    write_header(tmp_path / "32b.gguf", argparse.Namespace(arch="qwen3", tied=False, **sizes))
    found = model_shapes.read(tmp_path / "32b.gguf")
    assert found.weights == 64 * (2 * 5120 * 8192 + 2 * 5120 * 1024 + 3 * 5120 * 25600) + 151936 * 5120
    assert (found.layers, found.cache_token) == (64, 64 * 2 * 1024 * 2)


def test_files_without_a_model(tiny_pair: Path) -> None:
    with pytest.raises(errors.ArgumentError, match="no language model"):
        model_shapes.read(tiny_pair.with_name("llama.residual.gguf"))


# ---- costs -------------------------------------------------------------------------------------------


def test_a_decode_in_vram_by_hand() -> None:
    beside = Sums(dense=6e9, seconds=machine.linear(50))
    load = Load(gpu=Sums(dense=4e9), split=Sums(dense=3e9), gpu_layers=10, beside=beside,
                cache_gpu=1e8, crossing=50_000, fetches=30, logits=32_000)  # fmt: skip
    base = 4.1e9 / 400e9
    always = 10 * 40e-6 + 150e-6
    draft = cost.decode(load, PC, 1, residual=False)
    assert draft == pytest.approx(base + always + 4 * 32_000 / 25e9)
    read, computed = 6e9 / 45e9, 5 * 0.02
    added = (read**6 + computed**6) ** (1 / 6)
    crossing = 5 * 4 * (50_000 + 32_000) / 25e9 + 30 * 15e-6
    serial = cost.decode(load, PC, 5, residual=True, overlap=False)
    assert serial == pytest.approx(base + added + always + crossing)
    both = cost.decode(load, PC, 5, residual=True)
    assert both == pytest.approx(1.1e9 / 400e9 + max(3e9 / 400e9, added) + always + crossing)
    assert cost.read_by_check(load, 5) == (4.1e9, 6e9)


def test_a_decode_in_ram_by_hand() -> None:
    load = Load(
        cpu=Sums(dense=1e9, seconds=machine.linear(100)),
        within=Sums(dense=2e9, seconds=machine.linear(50)),
        cpu_layers=8,
        cache_cpu=1e7,
    )
    read, computed = 3.01e9 / 45e9, 4 * 0.03
    expected = (read**6 + computed**6) ** (1 / 6) + 8 * 15e-6 + 150e-6
    assert cost.decode(load, PC, 4, residual=True) == pytest.approx(expected)
    alone = (((1.01e9 / 45e9) ** 6 + 0.01**6) ** (1 / 6)) + 8 * 15e-6 + 150e-6
    assert cost.decode(load, PC, 1, residual=False) == pytest.approx(alone)
    assert planning.check_seconds(setting(), load, 0) == cost.decode(load, PC, 2, residual=True)  # never alone


def test_values_between_matrices_in_ram_take_time() -> None:
    """One layer of the model: inputs of q, k and v and of gate and up are one each."""
    model = seven(layers=1, vocabulary=1000)
    placed = placement.twofold(setting(replace(PC, vram=0), model), Base("q2_k"), 6)
    matrices = sum(matrix.weights for matrix in model.matrices)
    values = 3 * 4096 + 11008 + 4 * 4096 + 2 * 11008 + 4096 + 4096 + 1000
    assert placed.load.cpu.seconds[8] == pytest.approx(8 * matrices / 4e11 + 8 * values * cost.VALUE / 5e11)
    assert placed.load.within.seconds[8] == pytest.approx(8 * matrices / 5e11)


def test_experts_are_read_once_in_a_batch() -> None:
    sums = Sums(dense=10, experts=800, used=100) + Sums(experts=800, used=100)
    assert sums.size == 1610
    assert sums.read(1) == pytest.approx(210)
    assert sums.read(2) == pytest.approx(10 + 1600 * (1 - 0.875**2))
    assert sums.read(500) == pytest.approx(1610)


@pytest.mark.parametrize("bits", [4, 6, 8])
def test_bytes_are_those_of_the_files(bits: int, tiny_llama: Path, tmp_path: Path) -> None:
    """Placement of a pair against the pair: base and whole tensors in VRAM, residual in RAM."""
    done = convert(tiny_llama, tmp_path / "p", base_type="q3_k", bits=bits, keep_whole="1")
    total = report.totals(report.inspect(open_pair(done.base)))
    roomy = setting(model=model_shapes.read(tiny_llama), ctx=512, reserve=1000)
    placed = placement.twofold(roomy, Base("q3_k"), bits, [1])
    assert placed.vram == pytest.approx(total["vram_bytes"] + roomy.cache(512) * 2 + 1000)
    assert placed.load.beside.size == total["residual_ram_bytes"][bits]
    assert placed.ram == pytest.approx(total["residual_ram_bytes"][bits] + 512 * 256 * 4)
    assert placed.split_bits == pytest.approx(total["base_bpw"])
    assert placement.fits(roomy, placed)


def test_layers_that_do_not_fit_lie_in_ram() -> None:
    """The head goes first, then layers from the last on; what crosses the bus is of layers in VRAM alone."""
    model = seven(layers=4, width=1024, ff=2048, vocabulary=4096)
    head, layer = 1024 * 4096 * 34 // 32, (4 * 1024 * 1024 + 3 * 1024 * 2048) * 34 // 32
    cache = 512 * 2 * 1024 * 2
    small = setting(replace(PC, vram=head + 2 * (layer + cache)), model, ctx=512, reserve=0)
    placed = placement.plain(small, "q8_0")
    assert (placed.load.gpu_layers, placed.load.cpu_layers, placed.gpu_units) == (2, 2, 3)
    assert placed.load.gpu.size == head + 2 * layer
    assert placed.load.cpu.size == 2 * layer
    assert placed.vram == small.machine.vram
    assert (
        placement.plain(
            setting(replace(small.machine, vram=small.machine.vram - 1), model, 512, 0), "q8_0"
        ).load.gpu_layers
        == 1
    )
    pair = placement.twofold(small, Base("q8_0"), 8)
    inputs = 3 * 1024 + 2048
    results = 4 * 1024 + 2 * 2048 + 1024
    assert pair.load.crossing == 2 * (inputs + results) + 1024 + 4096
    assert pair.load.fetches == 2 * (4 + 7) + 1 + 1
    assert pair.load.within.size > 0 and pair.load.beside.size > 0


def test_losses() -> None:
    steps = [losses.type_loss(kind) for kind in losses.LADDER]
    assert steps == sorted(steps, reverse=True)
    assert losses.bits_of_loss(losses.type_loss("q4_k")) == pytest.approx(4.5)
    assert 3.4375 < losses.bits_of_loss(losses.type_loss("q3_k") * 0.7) < 4.5
    assert losses.residual_loss("q2_k", 4) > 10 * losses.residual_loss("q2_k", 6)
    assert losses.type_loss("f16") == 0
    placed = placement.twofold(setting(), Base("q2_k"), 8, range(16))
    assert 2.7 < placed.bits < 3.3  # half of the layers whole halves the loss: half a bit, not (2.6 + 8.5) / 2


# ---- the plan ----------------------------------------------------------------------------------------


def best(found: planning.Plan, kind: str) -> planning.Strategy:
    return max((s for s in found.strategies if s.kind == kind and s.precise and s.fits), key=lambda s: s.tokens_per_s)


def test_twofold_where_the_model_does_not_fit() -> None:
    found = planning.plan(setting(replace(PC, vram=6 * GIB)), Options(KNOWN))
    assert found.take is not None and found.take.kind == "twofold"
    assert found.take is best(found, "twofold")
    assert found.take.tokens_per_s > 1.5 * best(found, "plain").tokens_per_s
    assert found.take.vram <= 6 * GIB
    assert found.take.whole  # room is left by the smallest base
    again = planning.plan(setting(replace(PC, vram=6 * GIB)), Options(KNOWN))
    assert again.take == found.take


def test_no_twofold_where_q8_0_fits() -> None:
    found = planning.plan(setting(), Options(KNOWN))
    assert found.take is not None
    assert (found.take.kind, found.take.type) == ("plain", "q8_0")
    assert found.take.name == "q8_0, all in VRAM"
    assert "twofold" in found.why
    roomy = planning.plan(setting(replace(PC, vram=48 * GIB, ram_bandwidth=100e9)), Options(KNOWN))
    assert roomy.take is not None and roomy.take.name == "q8_0, all in VRAM"


def test_the_gain_must_be_worth_it() -> None:
    """Where a drafter makes the simpler way nearly as fast, that is taken."""
    pc = setting(replace(PC, vram=6 * GIB))
    drafter = Drafter(200 << 20, Depths((8,), (8.9,)))
    found = planning.plan(pc, Options(KNOWN, drafter))
    assert best(found, "drafter").tokens_per_s * 1.05 > best(found, "twofold").tokens_per_s
    assert found.take is best(found, "drafter")
    poor = planning.plan(pc, Options(KNOWN, Drafter(200 << 20, Depths((8,), (1.1,)))))
    assert poor.take is not None and poor.take.kind == "twofold"
    assert best(poor, "drafter").tokens_per_s <= best(poor, "plain").tokens_per_s * 1.1


def test_a_drafter_takes_room_from_layers() -> None:
    pc = setting(replace(PC, vram=6 * GIB))
    found = planning.plan(pc, Options(KNOWN, Drafter(GIB, KNOWN.drafter)))
    by_type = {(s.kind, s.type): s for s in found.strategies if s.kind != "twofold"}
    assert by_type["drafter", "q8_0"].gpu_layers < by_type["plain", "q8_0"].gpu_layers - 2
    assert by_type["drafter", "q8_0"].k > 0


def test_full_model_at_the_best_type_that_fits() -> None:
    names = [s.name for s in planning.plan(setting(replace(PC, vram=6 * GIB)), Options(KNOWN)).strategies]
    assert names[0] == "q3_k, all in VRAM"
    in_ram = planning.plan(setting(replace(PC, vram=0)), Options(KNOWN))
    assert [s.name for s in in_ram.strategies[:2]] == ["q8_0, in RAM", "q6_k, in RAM"]
    assert all(s.vram == 0 for s in in_ram.strategies)


def test_precision_and_memory_limit_the_choice() -> None:
    pc = setting(replace(PC, vram=6 * GIB))
    strict = planning.plan(pc, Options(KNOWN))
    loose = planning.plan(pc, Options(KNOWN, precision="q3_k"))
    assert loose.take is not None and loose.take.name == "q3_k, all in VRAM"
    assert not next(s for s in strict.strategies if s.name == loose.take.name).precise
    none = planning.plan(setting(replace(PC, vram=6 * GIB, ram=GIB // 4)), Options(KNOWN))
    assert none.take is None and "nothing as precise as q8_0 fits" in none.why


def test_seconds_add_up() -> None:
    for s in planning.plan(setting(replace(PC, vram=6 * GIB)), Options(KNOWN)).strategies:
        assert s.tokens_per_s == pytest.approx(s.tokens_per_check / (s.k * s.draft_s + s.check_s))
        if s.kind == "twofold":
            assert s.bits is not None and s.tokens_per_check == KNOWN.tokens(s.bits)[s.k]


def test_one_after_the_other_is_slower() -> None:
    pc = setting(replace(PC, vram=6 * GIB, vram_bandwidth=100e9))
    both, serial = (best(planning.plan(pc, Options(KNOWN, overlap=on)), "twofold") for on in (True, False))
    assert serial.tokens_per_s < both.tokens_per_s


# ---- filling VRAM ------------------------------------------------------------------------------------


def test_filling_is_the_best_of_all_that_fit() -> None:
    budget = fill.Budget(replace(PC, vram=7 * GIB), 4096, GIB)
    model = seven()
    found = fill.choose(model, budget, 8, None)
    where = setting(budget.machine)
    every = []
    known = acceptance.load("plain")
    for kind in fill.TYPES:
        for count in range(33):
            placed = placement.twofold(where, Base(kind), 8, range(count))
            if placement.fits(where, placed):
                yields = known.tokens(placed.bits)
                draft = cost.decode(placed.load, PC, 1, residual=False)
                rates = [
                    yields[k] / (k * draft + cost.decode(placed.load, PC, k + 1, residual=True)) for k in range(33)
                ]
                every.append((max(rates), kind, count))
    rate, kind, count = max(every)
    assert found.strategy.tokens_per_s == pytest.approx(rate)
    assert (found.base_type, found.bpw) == (kind, None)
    assert found.whole == {m.name for m in model.matrices if m.layer is not None and m.layer < count}
    assert 0 < count < 32
    assert f"{count} layers whole (the first ones)" in found.text


def test_sensitive_layers_are_whole_first_and_types_may_be_mixed() -> None:
    model = seven()
    sensitivity = {m.name: 9.0 if m.layer in (5, 20) else 1.0 for m in model.matrices}
    known = Calibration(sums={}, sensitivity=sensitivity, origin="here")
    assert fill._order(model, known)[:3] == [5, 20, 0]
    slow = fill.Budget(replace(PC, vram=11 * GIB // 2, ram_bandwidth=30e9), 4096, GIB)
    found = fill.choose(model, slow, 4, known)
    assert (found.base_type, found.bpw) == ("auto", 3.25)
    assert fill.choose(model, slow, 4, None).bpw is None


def test_vram_that_is_too_small() -> None:
    with pytest.raises(
        errors.ArgumentError, match=r"smallest base \(q2_k\) takes .*2\.00 GiB of it cache for 4096.*--ctx"
    ):
        fill.choose(seven(), fill.Budget(replace(PC, vram=4 * GIB), 4096, GIB), 8, None)
    assert fill.choose(seven(), fill.Budget(replace(PC, vram=4 * GIB), 512, GIB), 8, None).strategy.vram <= 4 * GIB


def test_types_below_two_and_a_half_bits_only_where_nothing_else_fits() -> None:
    known = Calibration(sums={}, origin="here")
    tight = fill.Budget(replace(PC, vram=int(4.8 * GIB)), 4096, GIB)
    with pytest.raises(errors.ArgumentError, match="smallest base"):
        fill.choose(seven(), tight, 8, None)
    assert fill.choose(seven(), tight, 8, known).base_type in ("iq2_xxs", "iq2_xs")
    assert fill.choose(seven(), fill.Budget(PC, 4096, GIB), 8, known).base_type in fill.TYPES


def test_convert_fills_vram(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["convert", str(tiny_llama), str(tmp_path / "v"), *TOLD, "--vram", "1.6MB", "--reserve", "10kB"]
    assert main([*asked, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    used = document["totals"]["vram_bytes"] + 256 * 2 * 2 * 128 * 2 + 10_000
    assert 1_000_000 < used <= 1_600_000
    assert "1.53 MiB" in document["vram"] and "whole" in document["vram"]
    assert main([*asked, "--force", "--base", "q3_k"]) == 1
    assert main([*asked, "--force", "--whole", "0"]) == 1
    assert capsys.readouterr().err.count("give no --base, --base-bpw or --whole") == 2


# ---- machines ----------------------------------------------------------------------------------------


def test_what_was_told_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_gpu", lambda: None)
    monkeypatch.setattr(machine, "residual_times", lambda bits, threads: machine.linear(1e9 * bits))
    monkeypatch.setattr(machine, "base_times", lambda kind, threads: machine.linear(2e9))
    monkeypatch.setattr(machine, "physical_cores", lambda: 2)
    found = machine.describe(Told(GIB, 1e9, 2e9, 3 * GIB, 4e9, cores=6))
    assert (found.vram, found.vram_bandwidth, found.pcie) == (GIB, 1e9, 2e9)
    assert (found.ram, found.ram_bandwidth) == (3 * GIB, 4e9)
    np.testing.assert_allclose(found.residual_times[4], machine.linear(12e9))
    np.testing.assert_allclose(found.base_times["q2_k"], machine.linear(6e9))
    assert list(found.measured) == ["kernel rates"] and "6 cores" in found.measured["kernel rates"]
    with pytest.raises(errors.ArgumentError, match="give --pcie of"):
        machine.describe(Told(vram=GIB, vram_bandwidth=1e9, ram_bandwidth=1e9))


def test_a_gpu_is_measured_where_it_was_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = devices.Device("G", "a GPU", "gpu", 5 * GIB, 8 * GIB)
    monkeypatch.setattr(machine, "_gpu", lambda: gpu)
    monkeypatch.setattr(devices, "copy_rates", lambda name, size: (100e9, 20e9))
    measured: dict[str, str] = {}
    assert machine._gpu_rates(Told(), 5 * GIB, gpu, measured) == (200e9, 20e9)  # a copy reads and writes
    assert set(measured) == {"VRAM bandwidth", "PCIe"}
    assert machine._gpu_rates(Told(vram_bandwidth=7.0), 5 * GIB, gpu, {}) == (7.0, 20e9)
    assert machine._gpu_rates(Told(), 0, gpu, {}) == (0, 0)


def test_rates_of_this_machine() -> None:
    within, across = devices.copy_rates("CPU", 1 << 20)
    assert 1e8 < across < 1e13 and 1e8 < within < 1e13
    with pytest.raises(errors.ArgumentError, match=r"there are .*CPU"):
        devices.copy_rates("none", 1 << 20)
    for times in (machine.residual_times(8, 1), machine.base_times("q4_0", 1)):
        assert times.shape == (machine.MOST + 1,)
        assert times[0] == 0
        assert (np.diff(times) >= 0).all()
        assert 1e8 < 1 / times[1] < 1e13


# ---- the command -------------------------------------------------------------------------------------


def test_the_command(tiny_llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    asked = ["plan", str(tiny_llama), *TOLD, "--drafter-size", "100kB", "--json", str(out), "--plot", str(picture)]
    assert main(asked) == 0
    text = capsys.readouterr().out
    document = json.loads(out.read_text())
    assert f"take {document['take']}: " in text
    assert f"> {document['take']}" in text
    for line in ("0 B of VRAM are left", "256 tokens", "4 prompts", "1.5 times that of q8_0"):
        assert line in " ".join(text.split())
    assert {s["kind"] for s in document["strategies"]} == {"plain", "drafter", "twofold"}
    assert document["machine"]["vram_bandwidth"] == 5e9
    assert document["model"]["weights"] == model_shapes.read(tiny_llama).weights
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filled", "500"], "not more than --ctx, 256"),
        (["--drafter-acceptance", "3:3"], "--drafter-size"),
        (["--precision", "f16"], "a quantized type is needed"),
        (["--precision", "q8_k"], "that ggml can write"),
        (["--precision", "nope"], "no ggml type"),
        (["--acceptance", "absent.json"], "absent.json"),
        (["--json", "absent/out.json"], "cannot be written"),
    ],
)
def test_what_the_command_refuses(
    arguments: list[str], message: str, tiny_llama: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(tiny_llama), *TOLD, *arguments]) == 1
    assert message in capsys.readouterr().err


def test_arguments_that_are_no_quantities() -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    plan_command.add_arguments(parser)
    for arguments, message in (
        (["--vram", "12"], "12GiB"),
        (["--pcie", "3GB"], "500GB/s"),
        (["--ctx", "0"], "1 or more"),
        (["--drafter-acceptance", "3"], "3:3.2"),
    ):
        with pytest.raises(argparse.ArgumentError, match=message):
            parser.parse_args(["x", *arguments])
