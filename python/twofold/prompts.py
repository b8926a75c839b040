"""The prompts that measurements use: `data/prompts.jsonl`, the kinds taking turns, and random tokens."""

from __future__ import annotations

import json
import random
from collections.abc import Collection, Sequence
from importlib.resources import files

KINDS = ("code", "chat", "maths", "summary", "language")
COPY = "copy"  # most of the answer stands in the prompt: edits, quotations
RANDOM = "random"  # the worst case of speculation
BY_NAME = (COPY, RANDOM)  # asked for by name only
_RANDOM_PROMPTS, _RANDOM_LENGTH = 20, 64


def prompts(count: int | None = None, kinds: Collection[str] = KINDS) -> list[dict[str, str]]:
    """Return the first `count` prompts of these kinds, by default all: dictionaries of ``id``, ``kind``, ``prompt``.

    Those of the kind `RANDOM` have an empty ``prompt``: their tokens are a vocabulary's (`random_tokens`).
    """
    lines = files("twofold").joinpath("data/prompts.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line) for line in lines]
    found += [{"id": f"{RANDOM}-{n:02}", "kind": RANDOM, "prompt": ""} for n in range(1, _RANDOM_PROMPTS + 1)]
    found.sort(key=lambda prompt: int(prompt["id"].rpartition("-")[2]))
    return [prompt for prompt in found if prompt["kind"] in kinds][:count]


def random_tokens(name: str, vocabulary: Sequence[int]) -> list[int]:
    """Return tokens drawn evenly from a vocabulary, always the same ones for a prompt's name."""
    return random.Random(name).choices(vocabulary, k=_RANDOM_LENGTH)
