"""Arguments about devices that commands share, and what they are to `Llama`."""

from __future__ import annotations

import argparse
from argparse import Namespace
from typing import Any

from twofold import errors, units
from twofold.argument_types import number
from twofold.loading import STAGE_BYTES, STAGE_COLUMNS


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --gpu-layers and what goes with it."""
    add = parser.add_argument
    add("--gpu-layers", type=number(int, -1), default=-1, metavar="N", help="layers in VRAM (default: -1: all)")
    columns = (
        "prompts of so many tokens or more are completed on their device, the others by the CPU; 0: all by the CPU "
        f"(default: {STAGE_COLUMNS})"
    )
    add("--stage-columns", type=number(int, 0), default=STAGE_COLUMNS, metavar="N", help=columns)
    memory = f"memory of each device taken for that (default: {STAGE_BYTES >> 20}MiB)"
    add("--stage-memory", type=_size, default=STAGE_BYTES, metavar="SIZE", help=memory)
    add("--rpc", metavar="HOST:PORT,...", help="servers of ggml's RPC backend whose devices are used too")


def options(arguments: Namespace) -> dict[str, Any]:
    """Keywords of `Llama`."""
    return {
        "n_gpu_layers": arguments.gpu_layers,
        "stage_columns": arguments.stage_columns,
        "stage_bytes": arguments.stage_memory,
        "rpc_servers": arguments.rpc,
    }


def _size(text: str) -> int:
    try:
        return units.size(text)
    except errors.ArgumentError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
