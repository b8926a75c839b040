"""What the arguments of several commands are made of."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, TypeAlias

Parsers: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def command(
    parsers: Parsers, name: str, run: Callable[[argparse.Namespace], int], about: str, example: str
) -> argparse.ArgumentParser:
    """Add a command; `about` says what it does, `example` is what follows its name."""
    parser = parsers.add_parser(
        name, help=about, description=f"{about[0].upper()}{about[1:]}.", epilog=f"example: twofold {name} {example}"
    )
    parser.set_defaults(run=run)
    return parser


def number(kind: Callable[[str], Any], least: float, most: float = float("inf")) -> Callable[[str], Any]:
    """Return an argparse type for numbers from `least` to `most`."""

    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= most:
            bounds = f"from {least:g} to {most:g}" if most != float("inf") else f"{least:g} or more"
            raise argparse.ArgumentTypeError(f"{text!r}: {'an integer' if kind is int else 'a number'}, {bounds}")
        return value

    return parse


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Add the files of a pair."""
    parser.add_argument("base", metavar="BASE", help="NAME.base.gguf")
    parser.add_argument("--residual", metavar="PATH", help="default: NAME.residual.gguf beside the base")
