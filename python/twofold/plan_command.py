"""`twofold plan`: its arguments, and those about machines that convert has too."""

from __future__ import annotations

import argparse
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from twofold import acceptance, errors, machine, plan_report, planning, results, shapes, units
from twofold.blocks import ggml_type
from twofold.fill import Budget
from twofold.placement import Setting
from twofold.planning import Drafter, Options

_T = TypeVar("_T")
_DEFAULT_RESERVE = 1 << 30


def _checked(parse: Callable[[str], _T]) -> Callable[[str], _T]:
    """Return an argparse type of a function that raises ArgumentError."""

    def run(text: str) -> _T:
        try:
            return parse(text)
        except errors.ArgumentError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return run


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: an integer, 1 or more")
    return int(text)


def add_machine(parser: argparse.ArgumentParser, vram: str) -> None:
    """Add what can be told of a machine; `vram` is the help of --vram."""
    size, rate, add = _checked(units.size), _checked(units.rate), parser.add_argument
    add("--vram", type=size, metavar="SIZE", help=vram)
    add("--vram-bandwidth", type=rate, metavar="RATE", help="of the VRAM, 500GB/s (default: measured)")
    add("--ram-bandwidth", type=rate, metavar="RATE", help="of the RAM, 60GB/s (default: measured)")
    add("--pcie", type=rate, metavar="RATE", help="between RAM and VRAM, 25GB/s (default: measured)")
    add("--ctx", type=_positive, default=4096, metavar="N", help="tokens of context (default: 4096)")
    reserve = "VRAM left to buffers and other programs (default: 1GiB)"
    add("--reserve", type=size, default=_DEFAULT_RESERVE, metavar="SIZE", help=reserve)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``twofold plan``."""
    add = parser.add_argument
    add("source", metavar="SRC", help="GGUF file (first part of a split one): its header is enough")
    add_machine(parser, "12GiB; 0: no GPU (default: what is free here)")
    add("--ram", type=_checked(units.size), metavar="SIZE", help="64GiB (default: of this machine)")
    cores = "CPU cores of the machine (default: of this one); kernel rates measured here are scaled by them"
    add("--cores", type=_positive, metavar="N", help=cores)
    add(
        "--filled",
        type=_positive,
        metavar="N",
        help="tokens that a decode attends to on average (default: half of --ctx)",
    )
    precision = "ggml type whose error the full model's may have at most half as much again (default: q8_0)"
    add("--precision", default="q8_0", metavar="TYPE", help=precision)
    add("--uncalibrated", action="store_true", help="acceptance of bases made without a calibration")
    add("--acceptance", metavar="FILE", help="measured acceptance in the form of the package's data/acceptance.json")
    add("--drafter-size", type=_checked(units.size), metavar="SIZE", help="of a trained drafter to compare with, 1GB")
    yields = "its tokens per check by draft tokens, 3:3.2,6:4.6 (default: those measured of a small model)"
    add("--drafter-acceptance", type=_checked(acceptance.parse_drafter), metavar="K:T,...", help=yields)
    sequential = "as if the CPU waited while the GPU works on a check (TWOFOLD_OVERLAP=0, or a single thread)"
    add("--sequential", action="store_true", help=sequential)
    add("--json", metavar="FILE", help="write everything that was worked out")
    add("--plot", metavar="FILE", help="draw tokens a second of all strategies (needs matplotlib)")


def _told(arguments: Namespace) -> machine.Told:
    fields = ("vram", "vram_bandwidth", "pcie", "ram", "ram_bandwidth", "cores")
    return machine.Told(**{name: getattr(arguments, name, None) for name in fields})


def budget(arguments: Namespace) -> Budget | None:
    """Return what convert's --vram asks for.

    Raises
    ------
    ArgumentError
        if bandwidths were not told and cannot be measured here.
    """
    if arguments.vram is None:
        return None
    if arguments.vram == 0:
        raise errors.ArgumentError("--vram 0: there is nothing to fill; leave --vram out")
    return Budget(machine.describe(_told(arguments)), arguments.ctx, arguments.reserve)


def run(arguments: Namespace) -> int:
    """Run ``twofold plan``."""
    out, picture = (Path(name) if name else None for name in (arguments.json, arguments.plot))
    results.check_outputs(out, picture)
    options = _options(arguments)
    model = shapes.read(Path(arguments.source))
    filled = arguments.ctx // 2 if arguments.filled is None else arguments.filled
    if filled > arguments.ctx:
        raise errors.ArgumentError(f"--filled {filled}: not more than --ctx, {arguments.ctx}")
    setting = Setting(model, machine.describe(_told(arguments)), arguments.ctx, filled, arguments.reserve)
    found = planning.plan(setting, options)
    print(plan_report.render(found))
    plan_report.save(found, out, picture)
    return 0


def _options(arguments: Namespace) -> Options:
    if arguments.drafter_acceptance is not None and arguments.drafter_size is None:
        raise errors.ArgumentError("--drafter-acceptance: give the drafter's size too (--drafter-size 1GB)")
    kind = ggml_type(arguments.precision)
    if kind.block == 1:
        raise errors.ArgumentError(f"--precision {kind.name}: a quantized type is needed, such as q8_0 or q6_k")
    if not kind.quantizable:
        raise errors.ArgumentError(
            f"--precision {kind.name}: a type that ggml can write is needed, such as q8_0 or q6_k"
        )
    path = Path(arguments.acceptance) if arguments.acceptance else None
    known = acceptance.load("plain" if arguments.uncalibrated else "calibrated", path)
    drafter = None
    if arguments.drafter_size is not None:
        drafter = Drafter(arguments.drafter_size, arguments.drafter_acceptance or known.drafter)
    return Options(known, drafter, kind.name, not arguments.sequential)
