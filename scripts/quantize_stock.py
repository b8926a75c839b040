#!/usr/bin/env python3
"""Quantize a GGUF file as llama.cpp itself does, to compare with: llama_model_quantize, no importance matrix."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import llama_cpp

from twofold.llama_log import quiet_log

TYPES = {
    "q8_0": llama_cpp.LLAMA_FTYPE_MOSTLY_Q8_0,
    "q6_k": llama_cpp.LLAMA_FTYPE_MOSTLY_Q6_K,
    "q5_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q5_K_M,
    "q4_k_m": llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_K_M,
}


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="GGUF file in float16 or float32")
    parser.add_argument("stem", help="writes STEM.TYPE.gguf for each type")
    parser.add_argument("types", nargs="+", choices=TYPES)
    args = parser.parse_args()
    quiet_log()
    for name in args.types:
        params = llama_cpp.llama_model_quantize_default_params()
        params.ftype = TYPES[name]
        out = f"{args.stem}.{name}.gguf"
        if llama_cpp.llama_model_quantize(os.fsencode(args.source), os.fsencode(out), params) != 0:
            raise SystemExit(f"llama.cpp could not quantize {args.source} to {name}")
        print(f"{out}: {Path(out).stat().st_size / 1e9:.2f} GB")


if __name__ == "__main__":
    main()
