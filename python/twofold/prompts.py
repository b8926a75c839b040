"""The prompts that measurements use: `data/prompts.jsonl`, the kinds taking turns."""

from __future__ import annotations

import json
from collections.abc import Collection
from importlib.resources import files

KINDS = ("code", "chat", "maths", "summary", "language")


def prompts(count: int | None = None, kinds: Collection[str] = KINDS) -> list[dict[str, str]]:
    """Return the first `count` prompts of these kinds, by default all: dictionaries of ``id``, ``kind``, ``prompt``."""
    lines = files("twofold").joinpath("data/prompts.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    return [prompt for prompt in found if prompt["kind"] in kinds][:count]
