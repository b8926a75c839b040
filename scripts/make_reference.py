#!/usr/bin/env python3
"""Make a float16 reference model with continuous weights from a quantized one.

For honest figures of quality where only quantized files are at hand. Weights that come from a 4-bit file lie on
that file's few levels; a quantizer with the same blocks finds the levels again and seems to lose nothing. Here every
quantized weight gets uniform noise of one step (the distance of neighbouring levels in its block): the result is
one of the continuous models that the quantized file could have been made of. It rounds back to the same codes, and it
is about as good a model as the quantized one, but nobody's levels are favoured. Figures measured against it are those
of a typical model of this shape; they say nothing of how good the original's weights were before they were quantized.

Tensors in float32 and float16 (norms, biases) stay as they are. The file is large: 2 bytes a weight.
"""

from __future__ import annotations

import argparse
import os
import sys
import zlib
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from twofold import errors
from twofold.blocks import GgmlType, dequantize, ggml_type
from twofold.exact import DROPPED_KEYS
from twofold.metadata import Gguf
from twofold.output import OutputFile, check_output, in_flight, row_chunks, writing
from twofold.source import Source, SourceTensor

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]

WHOLE = ("f32", "f16", "bf16", "f64", "i8", "i16", "i32", "i64")
LARGEST_HALF = 65504.0
# Where the low bits of a block's codes lie: a run of bytes, and what each holds if all codes in it are 1. Two blocks
# that are alike but for these bytes, 0 in one, are one step apart everywhere.
CODES: dict[str, tuple[int, int, int]] = {
    "q4_0": (2, 18, 0x11),
    "q4_1": (4, 20, 0x11),
    "q5_0": (6, 22, 0x11),
    "q5_1": (8, 24, 0x11),
    "q8_0": (2, 34, 0x01),
    "q2_k": (16, 80, 0x55),
    "q3_k": (32, 96, 0x55),
    "q4_k": (16, 144, 0x11),
    "q5_k": (48, 176, 0x11),
    "q6_k": (0, 128, 0x11),
}


def steps(data: Bytes, kind: GgmlType, shape: tuple[int, ...]) -> Floats:
    """Distance of neighbouring levels at each weight.

    Parameters
    ----------
    data, kind, shape
        blocks of a quantized tensor, their type (a key of ``CODES``), and the shape of the weights.

    Returns
    -------
    float32 of `shape`, not negative; 0 in blocks whose scale is 0
    """
    first, last, ones = CODES[kind.name]
    values = []
    for code in (0, 1):
        patched = data.reshape(-1, kind.block_bytes).copy()
        patched[:, first:last] = code * ones
        values.append(dequantize(patched.reshape(-1), kind, shape))
    return np.asarray(np.abs(values[1] - values[0]))


def spread(tensor: SourceTensor, first: int, last: int, seed: int) -> npt.NDArray[np.float16]:
    """Return rows `first` to `last` with noise, each weight less than half a step from where it was.

    Raises
    ------
    NonFiniteError
        for a weight that float16 cannot hold.
    """
    centre = tensor.rows(first, last)
    row_bytes = tensor.kind.row_bytes(tensor.width)
    data = np.ascontiguousarray(tensor.data[first * row_bytes : last * row_bytes])
    half = steps(data, tensor.kind, centre.shape) / 2
    if float(np.abs(centre).max() + half.max()) > LARGEST_HALF:
        raise errors.NonFiniteError(f"{tensor.name}: a weight above {LARGEST_HALF:.0f} does not fit float16")
    rng = np.random.default_rng([seed, zlib.crc32(tensor.name.encode()), first])
    noisy = (centre + half * rng.uniform(-1, 1, centre.shape).astype(np.float32)).astype(np.float16)
    # Rounding to float16 may lead over the border to the next code: then one float16 back.
    beyond = np.abs(noisy.astype(np.float32) - centre) >= half
    return np.where(beyond, np.nextafter(noisy, centre.astype(np.float16)), noisy)


def make_reference(source: Path, out: Path, *, seed: int = 1, force: bool = False, progress: bool = False) -> None:
    """Write the reference; the same seed always gives the same bytes.

    Parameters
    ----------
    source, out
        quantized GGUF file (or the first part of a split one), file to write.
    seed
        of the noise, 0 or more.
    force
        replace a file that is there.
    progress
        show a progress bar on standard error.

    Raises
    ------
    ArgumentError, FileAccessError, FormatError
        for files that cannot be read or written, and for a source of which nothing is quantized.
    UnsupportedError
        for types whose levels are not evenly spaced.
    NonFiniteError
        for a weight that float16 cannot hold.
    """
    model = Source(source)
    check_output(out, model.paths, force)
    kinds = {tensor.kind.name for tensor in model.tensors.values()} - set(WHOLE)
    if not kinds:
        raise errors.ArgumentError(f"{source}: nothing in it is quantized; it is a reference already")
    if kinds - set(CODES):
        unknown = ", ".join(sorted(kinds - set(CODES)))
        raise errors.UnsupportedError(f"{source}: types {unknown} cannot be spread, only {', '.join(CODES)}")
    workers = len(os.sched_getaffinity(0))
    total = sum(tensor.weights for tensor in model.tensors.values())
    bar = tqdm(total=total, unit="weights", unit_scale=True, disable=not progress, smoothing=0.05)
    with bar, writing({out: _header(model)}) as (file,), ThreadPoolExecutor(workers) as pool:
        for name, weights in in_flight(_tasks(model, file, pool, seed), 2 * workers):
            bar.set_postfix_str(name, refresh=False)
            bar.update(weights)


def _header(model: Source) -> Gguf:
    gguf = Gguf(keys_of=model.gguf)
    for key in DROPPED_KEYS:
        gguf.remove(key)
    gguf.set("general.file_type", 1)
    for tensor in model.tensors.values():
        gguf.add(tensor.name, ggml_type("f16") if tensor.kind.name in CODES else tensor.kind, tensor.shape)
    return gguf


def _tasks(model: Source, file: OutputFile, pool: ThreadPoolExecutor, seed: int) -> Iterator[Future[tuple[str, int]]]:
    for tensor in model.tensors.values():
        if tensor.kind.name not in CODES:
            yield pool.submit(_copy, file, tensor)
            continue
        for _, first, last in row_chunks((1, tensor.weights // tensor.width, tensor.width)):
            yield pool.submit(_write_rows, file, tensor, first, last, seed)


def _copy(file: OutputFile, tensor: SourceTensor) -> tuple[str, int]:
    file.write(tensor.name, tensor.data)
    return tensor.name, tensor.weights


def _write_rows(file: OutputFile, tensor: SourceTensor, first: int, last: int, seed: int) -> tuple[str, int]:
    weights = spread(tensor, first, last, seed)
    file.write(tensor.name, weights.reshape(-1).view(np.uint8), first * tensor.width * 2)
    return tensor.name, weights.size


def main(argv: list[str] | None = None) -> int:
    """Run from the command line; return 0, or 1 if the reference could not be made."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", metavar="SRC.gguf", type=Path, help="quantized model")
    parser.add_argument("out", metavar="OUT.gguf", type=Path, help="float16 model to write")
    parser.add_argument("--seed", type=int, default=1, help="of the noise, 0 or more (default: 1)")
    parser.add_argument("--force", action="store_true", help="replace a file that is there")
    parser.add_argument("--progress", action="store_true", help="show the progress bar even if stderr is no terminal")
    a = parser.parse_args(argv)
    if a.seed < 0:
        parser.error(f"--seed {a.seed}: 0 or more")
    try:
        make_reference(a.source, a.out, seed=a.seed, force=a.force, progress=a.progress or sys.stderr.isatty())
    except errors.TwofoldError as error:
        print(f"make_reference: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
