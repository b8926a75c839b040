"""twofold.report: the numbers in the tables, worked out a second time from the files."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import pytest

from make_tiny import write_tiny
from twofold import report
from twofold.blocks import ggml_type
from twofold.convert import Conversion, convert
from twofold.metadata import Tensor
from twofold.pairfile import open_pair

WIDTH, FF, VOCAB = 256, 512, 512


@pytest.fixture(scope="module")
def conversion(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversion:
    return convert(tiny_llama, tmp_path_factory.mktemp("report") / "pair", bits=8, group=64)


def residual_bytes(rows: int, width: int, bits: int, group: int = 64) -> int:
    """Codes and float16 scales; rows and widths here are whole panels and groups."""
    return rows * width * bits // 8 + rows * width // group * 2


def test_kinds_count_all_blocks(conversion: Conversion) -> None:
    rows = {row["kind"]: row for row in report.kinds(report.converted(conversion))}
    order = ["output", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]
    assert sorted(rows) == sorted(order)
    down, head = rows["ffn_down"], rows["output"]
    assert (down["tensors"], down["weights"]) == (2, 2 * WIDTH * FF)
    assert (head["tensors"], head["weights"]) == (1, WIDTH * VOCAB)
    assert (down["source"], down["base"]) == ("f32", "q2_k")
    assert down["base_bytes"] == 2 * WIDTH * FF * 84 // 256
    assert down["residual_bytes"] == 2 * residual_bytes(WIDTH, FF, 8)


def test_errors_are_those_of_the_files(conversion: Conversion, tiny_llama: Path) -> None:
    source, base = ({t.name: t for t in gguf.GGUFReader(p).tensors} for p in (tiny_llama, conversion.base))
    completed = open_pair(conversion.base).completed
    lost, norm = 0.0, 0.0
    for block in (0, 1):
        name = f"blk.{block}.ffn_down.weight"
        assert name in completed
        weights = gguf.quants.dequantize(source[name].data, source[name].tensor_type)
        drafted = gguf.quants.dequantize(base[name].data, base[name].tensor_type)
        lost += float(np.sum((weights - drafted).astype(np.float64) ** 2))
        norm += float(np.sum(weights.astype(np.float64) ** 2))
    row = {row["kind"]: row for row in report.kinds(report.converted(conversion))}["ffn_down"]
    assert row["base_error"] == pytest.approx((lost / norm) ** 0.5, rel=1e-4)
    assert 0 < row["full_error"] < 0.05 * row["base_error"]


def test_whole_tensors_are_grouped_by_reason(conversion: Conversion, tmp_path: Path) -> None:
    (row,) = report.whole(report.converted(conversion))
    assert row["reason"] == "not a matrix product"
    assert row["tensors"] == 2 + 2 * 2
    assert row["kinds"] == ["token_embd", "output_norm", "attn_norm", "ffn_norm"]
    write_tiny(tmp_path / "moe.gguf", "qwen3moe", layers=1)
    done = convert(tmp_path / "moe.gguf", tmp_path / "moe", base_type="q2_k")
    kinds = {kind for row in report.whole(report.converted(done)) for kind in row["kinds"]}
    assert "ffn_gate_inp" in kinds


def test_totals(conversion: Conversion) -> None:
    total = report.totals(report.converted(conversion))
    tensors = {t.name: t for t in gguf.GGUFReader(conversion.base).tensors}
    assert total["base_file_bytes"] == conversion.base.stat().st_size
    assert total["residual_file_bytes"] == conversion.residual.stat().st_size
    assert total["vram_bytes"] == sum(t.n_bytes for name, t in tensors.items() if name != "token_embd.weight")
    weights = WIDTH * VOCAB + 2 * (2 * WIDTH * WIDTH + 2 * WIDTH * WIDTH // 2 + 3 * WIDTH * FF)
    assert total["residual_ram_bytes"] == {b: weights * b // 8 + weights // 64 * 2 for b in (4, 6, 8)}
    assert total["base_bpw"] == pytest.approx(2.625)
    assert total["residual_bpw"] == pytest.approx({4: 4.25, 6: 6.25, 8: 8.25})


def test_embeddings_that_are_the_head_too_go_to_vram() -> None:
    kind = ggml_type("f16")
    entries = [report.Entry(Tensor(n, kind, (8, 32), 0, 512), {}) for n in ("token_embd.weight", "output_norm.weight")]
    made = report.Report("b", "r", "llama", 8, 128, (0, 0), entries)
    assert report.totals(made)["vram_bytes"] == 1024


def test_only_bits_in_the_file_are_listed(tiny_llama: Path, tmp_path: Path) -> None:
    done = convert(tiny_llama, tmp_path / "six", bits=6)
    found = report.inspect(open_pair(done.base))
    assert list(report.totals(found)["residual_ram_bytes"]) == [4, 6]
    assert "at 6 bits\n" in report.render(found)
    assert "at 8" not in report.render(found)


def test_inspect_knows_no_errors(tiny_pair: Path) -> None:
    found = report.inspect(open_pair(tiny_pair))
    assert all("base_error" not in row and "source" not in row for row in report.kinds(found))
    assert [row["reason"] for row in report.whole(found)] == ["no residual"]
    assert "error" not in report.render(found)


def test_tensors_are_listed_in_numpy_order(tiny_pair: Path) -> None:
    found = report.inspect(open_pair(tiny_pair))
    rows = {row["tensor"]: row for row in report.tensors(found)}
    assert rows["blk.1.ffn_down.weight"] == {
        "tensor": "blk.1.ffn_down.weight",
        "shape": [WIDTH, FF],
        "base": "q2_k",
        "bpw": 2.625,
        "base_bytes": WIDTH * FF * 84 // 256,
        "residual_bits": 8,
        "group": 128,
        "residual_bytes": residual_bytes(WIDTH, FF, 8, 128),
    }
    assert rows["output_norm.weight"]["residual_bits"] is None
    assert "tensors" not in report.as_dict(found)
    assert len(report.as_dict(found, with_tensors=True)["tensors"]) == len(rows)
    json.dumps(report.as_dict(found, with_tensors=True))


def test_tables_are_aligned() -> None:
    rows = [{"kind": "attn_q", "weights": 1500000, "base_bytes": 999}, {"kind": "o", "weights": 7, "base_bytes": 12345}]
    assert report.table(rows) == "\n".join(
        ["kind    weights  base bytes", "attn_q   1.50 M       999 B", "o             7     12.3 kB"]
    )
    assert report.table([]) == ""


def test_every_column_of_a_report_lines_up(conversion: Conversion) -> None:
    text = report.render(report.converted(conversion))
    lines = text.split("\n\n")[1].splitlines()
    assert len(lines) == 9
    assert len({len(line) for line in lines}) == 1  # the last column is flush right
    assert "base+residual error" in lines[0]
    assert all(line.count("%") == 2 for line in lines[1:])


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (12_345, "12.3 kB"), (2_500_000, "2.50 MB"), (7.2e10, "72.0 GB")],
)
def test_sizes_are_decimal(count: float, text: str) -> None:
    assert report.size(count) == text
