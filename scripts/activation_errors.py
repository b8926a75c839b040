#!/usr/bin/env python3
"""Measure what rounding activations does to a pair's products, on inputs that the model really sees.

Runs the base over a text, keeps some tokens' inputs of every matrix, and compares products with float64 ones of the
same quantized weights. A token's relative error is |y - exact| / |exact| over the rows. For each kind of matrix, its
mean over tokens and layers, in percent:

  8 bits    (base + residual) x, x rounded to 8 bits for 32 inputs
  as used   (base + residual) x by the engine: where outliers are, the base takes 8 bits more
  base      base x by the engine: what drafts are made of
  residual  residual x by the engine, against residual x: always 8 bits
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from twofold import layout
from twofold.blocks import BaseMatrix, decode_residual, default_kernel, has_base_kernel, matmul, row_planes
from twofold.calibrate import bundled_texts
from twofold.collector import Collector
from twofold.decoder import BaseLlama, physical_cores, quiet_log
from twofold.engine import ResidualTensor
from twofold.pairfile import open_pair
from twofold.source import Source, SourceTensor

Doubles = npt.NDArray[np.float64]
Singles = npt.NDArray[np.float32]
BLOCK, LARGEST = 32, 127
COLUMNS = ("8 bits", "as used", "base", "residual")


class Inputs(Collector):
    """Keeps every `step`-th token's inputs, float32 ``(tokens, width)``, of matrices without experts."""

    def __init__(self, step: int) -> None:
        super().__init__(with_moments=True, wanted=layout.is_matrix)
        self.step = step
        self.kept: dict[str, Singles] = {}

    def _add_moments(self, name: str, source: str, x: Singles) -> None:
        self.kept[name] = x[:: self.step].copy()


def collect(base: Path, text: Path, tokens: int, step: int) -> dict[str, Singles]:
    """Run the base over the beginning of a text; inputs by name of the matrix."""
    inputs = Inputs(step)
    llm = BaseLlama(
        inputs,
        model_path=str(base),
        n_ctx=tokens,
        n_batch=tokens,
        n_ubatch=tokens,
        n_threads=physical_cores(),
        n_threads_batch=physical_cores(),
        n_gpu_layers=0,
        verbose=False,
    )
    try:
        ids = llm.tokenize(text.read_bytes(), special=True)[:tokens]
        llm.decoder.decode(ids, 0, all_rows=True)
    finally:
        llm.close()
    return inputs.kept


def rounded(x: Singles) -> Doubles:
    """`x` as 8 bits hold it, one scale for 32 inputs."""
    blocks = x.astype(np.float64).reshape(len(x), -1, BLOCK)
    scale = np.abs(blocks).max(axis=2, keepdims=True) / LARGEST
    scale[scale == 0] = 1
    return (np.rint(blocks / scale) * scale).reshape(x.shape)


def relative(y: npt.NDArray[np.floating], exact: Doubles) -> Doubles:
    """Relative error of each token."""
    return np.linalg.norm(y - exact, axis=1) / np.maximum(np.linalg.norm(exact, axis=1), 1e-300)


def errors_of(tensor: SourceTensor, residual: ResidualTensor, x: Singles, bits: int, rows: int) -> dict[str, Doubles]:
    """Relative errors by name of the column, each ``(tokens,)``."""
    rows = min(rows, residual.shape[1])
    planes = row_planes(residual.planes[0], 0, rows)
    base = BaseMatrix(tensor.kind, rows, tensor.width, tensor.data[: rows * tensor.kind.row_bytes(tensor.width)].copy())
    b = tensor.rows(0, rows).astype(np.float64)
    r = decode_residual(planes, bits).astype(np.float64)
    exact = x.astype(np.float64)
    by_base, by_residual = exact @ b.T, exact @ r.T
    return {
        "8 bits": relative(rounded(x) @ (b + r).T, by_base + by_residual),
        "as used": relative(matmul(planes, x, base=base, bits=bits), by_base + by_residual),
        "base": relative(matmul(None, x, base=base), by_base),
        "residual": relative(matmul(planes, x, bits=bits), by_residual),
    }


def measure(base: Path, inputs: dict[str, Singles], bits: int | None, rows: int) -> dict[str, dict[str, list[float]]]:
    """Errors of all tokens and layers, by kind of matrix and column."""
    pair, model = open_pair(base), Source(base)
    result: dict[str, dict[str, list[float]]] = {}
    for name, residual in tqdm(pair.completed.items(), desc="errors", unit="matrices", disable=None):
        tensor = model.tensors[name]
        if name not in inputs or not has_base_kernel(tensor.kind):
            continue
        kind = re.sub(r"^blk\.\d+\.|\.weight$", "", name)
        errors = errors_of(tensor, residual, inputs[name], bits or pair.residual.bits, rows)
        for column, values in errors.items():
            result.setdefault(kind, {}).setdefault(column, []).extend(values.tolist())
    return result


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", type=Path, help="NAME.base.gguf, its residual beside it")
    parser.add_argument("--text", type=Path, help="default: the package's text of code")
    parser.add_argument("--tokens", type=int, default=384, help="tokens to run (default: %(default)s)")
    parser.add_argument("--step", type=int, default=16, help="keep every n-th of them (default: %(default)s)")
    parser.add_argument("--bits", type=int, choices=(4, 6, 8), help="of the residual; default: all it holds")
    parser.add_argument("--rows", type=int, default=1024, help="rows of each matrix to multiply (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the table here")
    args = parser.parse_args()
    quiet_log()
    text = args.text or next(path for path in bundled_texts() if "code" in path.name)
    inputs = collect(args.base, text, args.tokens, args.step)
    found = measure(args.base, inputs, args.bits, args.rows // 16 * 16)
    table = {kind: {c: float(np.mean(values[c])) for c in COLUMNS} for kind, values in found.items()}
    table["all"] = {c: float(np.mean([v for values in found.values() for v in values[c]])) for c in COLUMNS}
    print(f"{args.base.name}, {text.name}, kernel {default_kernel()}; mean relative error of products, %")
    print(f"{'matrix':14}" + "".join(f"{column:>10}" for column in COLUMNS))
    for kind, row in table.items():
        print(f"{kind:14}" + "".join(f"{row[column]:10.3%}" for column in COLUMNS))
    if args.json:
        about = {"base": args.base.name, "text": text.name, "tokens": args.tokens, "step": args.step, "bits": args.bits}
        args.json.write_text(json.dumps({**about, "kernel": default_kernel(), "errors": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
