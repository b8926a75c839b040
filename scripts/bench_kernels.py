#!/usr/bin/env python3
"""Time the kernels of residuals and bases, and ggml's mul_mat, in one run, as shares of what this machine can read.

For each shape, format and number of columns: milliseconds (median), 99th percentile, GB/s of weights, share of the
read bandwidth probed beside it, and for wide products the share of the peak rate of byte dot products, probed beside
it too: on a shared machine both come and go. Matrices take turns, so that none is found in a cache. "best" compares
with the fastest ggml type of the same or more bits.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

import twofold
from ggml_matmul import GgmlMatmul
from twofold import blocks, timing
from twofold.decoder import physical_cores
from twofold.llama_log import quiet_log
from twofold.machine import KERNEL_TYPES

SHAPES = {
    "1.5b-ffn_up": (8960, 1536),
    "1.5b-ffn_down": (1536, 8960),
    "31b-ffn_up": (21504, 5376),
    "study": (8192, 5376),
}
COLUMNS = (1, 2, 4, 6, 8, 16, 24, 32)
GGML_TYPES = ("q4_0", "q6_k", "q8_0")
BITS = (4, 6, 8)
GROUP = 128


@dataclass
class Row:
    """One line of the table; see the module's docstring."""

    kernel: str
    format: str
    shape: str
    m: int
    k: int
    n: int
    threads: int
    ms: float
    ms_p99: float
    gb_s: float
    share_of_bandwidth: float
    bits: float
    share_of_peak: float = 0.0
    rearranged: bool = False


class Bench:
    """Makes rows, each beside a reading of the bandwidth and of the peak."""

    def __init__(self, threads: int, repeats: int, cache_bytes: int) -> None:
        self.threads, self.repeats, self.cache_bytes = threads, repeats, cache_bytes
        self._probe = np.ones(256 << 20, np.uint8)
        self.bandwidths: list[float] = []
        self.peaks: list[float] = []

    def peak(self) -> float:
        """Operations a second on registers, best of a few readings of some milliseconds; 0: the kernel has no peak."""
        try:
            self.peaks.append(timing.peak_operations(threads=self.threads, rounds=1_000_000))
        except twofold.TwofoldError:
            return 0.0
        return self.peaks[-1]

    def bandwidth(self, threads: int | None = None) -> float:
        """Best bytes a second of a few readings of 256 MB."""
        best = float(timing.read_bandwidth(self._probe, threads=threads or self.threads, repeats=5).max())
        if threads in (None, self.threads):
            self.bandwidths.append(best)
        return best

    def copies(self, weight_bytes: float) -> int:
        """How many matrices have to take turns so that none stays in the last-level cache."""
        return max(2, int(np.ceil(4 * self.cache_bytes / weight_bytes)))

    def row(self, kernel: str, form: str, shape: str, n: int, bits: float, seconds: np.ndarray) -> Row:
        """Turn times into a row."""
        m, k = SHAPES[shape]
        median = float(np.median(seconds))
        bandwidth, peak = self.bandwidth(), self.peak()
        rate = m * k * bits / 8 / median
        p99 = float(np.quantile(seconds, 0.99))
        return Row(
            kernel=kernel,
            format=form,
            shape=shape,
            m=m,
            k=k,
            n=n,
            threads=self.threads,
            ms=median * 1e3,
            ms_p99=p99 * 1e3,
            gb_s=rate / 1e9,
            share_of_bandwidth=rate / bandwidth,
            bits=bits,
            share_of_peak=2 * m * k * n / median / peak if peak else 0.0,
        )


def residuals(shape: str, count: int) -> list[blocks.Planes]:
    """Return residuals of 8 bits with codes at random."""
    m, k = SHAPES[shape]
    rng = np.random.default_rng(1)
    parts = {
        name: rng.integers(0, 256, blocks.plane_bytes(m, k, GROUP, name), np.uint8) for name in blocks.part_names(8)
    }
    parts["scales"] = np.full(parts["scales"].size // 2, np.float16(0.01)).view(np.uint8)
    return [blocks.Planes(m, k, GROUP, 8, **{name: data.copy() for name, data in parts.items()}) for _ in range(count)]


def base_data(kind: blocks.GgmlType, shape: str) -> np.ndarray:
    """Return weights of a type."""
    m, k = SHAPES[shape]
    part = np.random.default_rng(2).standard_normal((64, k)).astype(np.float32) * 0.02
    return np.tile(blocks.quantize(part, kind), m // 64)


def our_rows(bench: Bench, shape: str, columns: list[int], kinds: list[str]) -> list[Row]:
    """Time r4, r6 and r8, bases, and these with r6 in one pass, as a check has them."""
    m, k = SHAPES[shape]
    completed = residuals(shape, bench.copies(m * k * 0.5))
    rng, rows = np.random.default_rng(3), []

    def add(form: str, n: int, width: float, **arguments: Any) -> None:
        x = rng.standard_normal((n, k)).astype(np.float32)
        seconds = timing.time_matmul(x=x, threads=bench.threads, repeats=bench.repeats, **arguments)
        rows.append(bench.row("ours", form, shape, n, width, seconds))

    for n in columns:
        for bits in BITS:
            add(f"r{bits}", n, bits + 16 / GROUP, residuals=completed, bits=bits)
    for kind in (blocks.ggml_type(name) for name in kinds):
        data = base_data(kind, shape)
        bases = [blocks.BaseMatrix(kind, m, k, data.copy()) for _ in range(bench.copies(m * k * kind.bpw / 8))]
        for n in columns:
            both = min(len(bases), len(completed))
            add(kind.name, n, kind.bpw, residuals=[], bases=bases)
            six = {"residuals": completed[:both], "bases": bases[:both], "bits": 6}
            add(f"{kind.name}+r6", n, kind.bpw + 6 + 16 / GROUP, **six)
    return rows


def ggml_rows(bench: Bench, shape: str, columns: list[int], kinds: list[str]) -> list[Row]:
    """Time ggml's mul_mat."""
    m, k = SHAPES[shape]
    rows = []
    for kind in (blocks.ggml_type(name) for name in dict.fromkeys((*kinds, *GGML_TYPES))):
        data = base_data(kind, shape)
        for n in columns:
            product = GgmlMatmul(
                data, (m, k), kind, n=n, copies=bench.copies(m * k * kind.bpw / 8), threads=bench.threads
            )
            product.time(3)
            row = bench.row("ggml", kind.name, shape, n, kind.bpw, product.time(bench.repeats))
            row.rearranged = product.rearranged
            rows.append(row)
            product.close()
    return rows


def against_ggml(rows: list[Row]) -> list[tuple[Row, float]]:
    """For each of our rows, how many times faster than ggml's best type of the same or more bits it is."""
    result = []
    for row in rows:
        if row.kernel != "ours":
            continue
        whole = int(row.bits)
        rivals = [
            other.ms
            for other in rows
            if other.kernel == "ggml" and (other.shape, other.n) == (row.shape, row.n) and other.bits >= whole
        ]
        result.append((row, min(rivals) / row.ms if rivals else float("nan")))
    return result


def error_on_gaussian() -> dict[str, float]:
    """Relative error against float64 of the same quantized weights, x Gaussian."""
    rng = np.random.default_rng(3)
    residual = blocks.encode_residual(rng.standard_normal((256, 4096)).astype(np.float32) * 0.02, GROUP, 8)
    x = rng.standard_normal((64, 4096)).astype(np.float32)
    result = {}
    for bits in BITS:
        exact = x.astype(np.float64) @ blocks.decode_residual(residual, bits).T.astype(np.float64)
        product = blocks.matmul(residual, x, bits=bits)
        result[f"r{bits}"] = float(np.linalg.norm(product - exact) / np.linalg.norm(exact))
    return result


def print_table(rows: list[Row]) -> None:
    """Print all rows, ours with the ratio."""
    ratio = {id(row): value for row, value in against_ggml(rows)}
    names = ("n", "ms", "p99", "GB/s", "of read", "of peak", "best")
    widths = (4, 9, 9, 8, 9, 9, 7)
    heads = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    print(f"{'shape':14}{'kernel':8}{'format':10}{heads}")
    for row in rows:
        best = f"{ratio[id(row)]:.2f}x" if id(row) in ratio else ""
        print(
            f"{row.shape:14}{row.kernel:8}{row.format:10}{row.n:4}{row.ms:9.3f}{row.ms_p99:9.3f}{row.gb_s:8.1f}"
            f"{row.share_of_bandwidth:9.0%}{row.share_of_peak:9.0%}{best:>7}"
        )


def plot(rows: list[Row], path: Path) -> None:
    """Draw milliseconds against columns, one panel a shape (needs matplotlib)."""
    from matplotlib import pyplot

    shapes = list(dict.fromkeys(row.shape for row in rows))
    figure, axes = pyplot.subplots(1, len(shapes), figsize=(5 * len(shapes), 4), squeeze=False)
    for axis, shape in zip(axes[0], shapes, strict=True):
        for form in dict.fromkeys(row.format for row in rows):
            chosen = [row for row in rows if (row.shape, row.format) == (shape, form)]
            style = "-o" if chosen and chosen[0].kernel == "ours" else "--x"
            axis.plot([row.n for row in chosen], [row.ms for row in chosen], style, label=form)
        axis.set(title=shape, xlabel="columns", ylabel="ms", xscale="log", yscale="log")
        axis.grid(True, which="both", alpha=0.3)
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(path)


def cache_size() -> int:
    """Bytes of the last-level cache, 32 MB if the system does not say."""
    size = os.sysconf("SC_LEVEL3_CACHE_SIZE") if "SC_LEVEL3_CACHE_SIZE" in os.sysconf_names else 0
    return size if size > 0 else 32 << 20


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=physical_cores())
    parser.add_argument("--columns", type=int, nargs="+", default=list(COLUMNS))
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=list(SHAPES))
    parser.add_argument("--base", nargs="+", choices=KERNEL_TYPES, default=["q2_k"], help="types of bases")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--quick", action="store_true", help="one shape, few columns, under a minute")
    parser.add_argument("--json", type=Path, help="write the rows here, one JSON object a line")
    parser.add_argument("--plot", type=Path, help="draw the rows into this file (needs matplotlib)")
    args = parser.parse_args()
    quiet_log()
    if args.quick:
        args.shapes, args.columns, args.repeats = ["study"], [1, 4, 8], 9
    bench = Bench(args.threads, args.repeats, cache_size())
    one, every, peak = bench.bandwidth(1) / 1e9, bench.bandwidth() / 1e9, bench.peak() / 1e12
    print(
        f"twofold {twofold.__version__}, llama-cpp-python {llama_cpp.__version__}, {platform.machine()}, kernel "
        f"{blocks.default_kernel()}, {args.threads} threads\n"
        f"reads {one:.1f} GB/s with one thread, {every:.1f} with all; peak {peak:.2f} Tops"
    )
    rows: list[Row] = []
    for shape in args.shapes:
        kinds = [name for name in args.base if SHAPES[shape][1] % blocks.ggml_type(name).block == 0]
        rows += our_rows(bench, shape, args.columns, kinds) + ggml_rows(bench, shape, args.columns, kinds)
        print(f"{shape} done", file=sys.stderr)
    print_table(rows)
    print("error on Gaussian x:", {name: f"{value:.3%}" for name, value in error_on_gaussian().items()})
    for name, unit, factor, probes in (
        ("bandwidth", "GB/s", 1e9, bench.bandwidths),
        ("peak", "Tops", 1e12, bench.peaks),
    ):
        if probes:
            print(f"{name} probed beside the rows: {min(probes) / factor:.2f} to {max(probes) / factor:.2f} {unit}")
    if args.json:
        args.json.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    if args.plot:
        plot(rows, args.plot)


if __name__ == "__main__":
    main()
