"""`twofold bench`: the speed of ways to make the same texts (strategies.py), which take turns prompt by prompt."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from tqdm import tqdm

from twofold import benchrows, info, prompting, strategies
from twofold.benchplan import Plan
from twofold.decoder import physical_cores
from twofold.ordinary import OrdinaryLlama
from twofold.strategies import Run, Strategy

_WARM_UP = 4  # tokens


def measure(plan: Plan, *, progress: bool = False) -> dict[str, Any]:
    """Load all models and let the strategies take turns.

    Returns
    -------
    dict
        Values for JSON: ``metadata``, ``rows`` (benchrows.py) and ``runs``, one for each text that was made.

    Raises
    ------
    FormatError, UnsupportedError
        if a model cannot be loaded.
    DecodeError
        when llama.cpp or the engine fail.
    """
    with ExitStack() as stack:
        ways = list(_strategies(plan, stack))
        for way in ways:
            if way.draft not in ("auto", "auto+ngram"):  # they would learn from what is still cold
                way.run(plan.tokens[_file(plan, way)][0][:_WARM_UP], _WARM_UP, plan.settings.seed)
        about = [{**way.about(), "compared": way.plain is not None} for way in ways]
        total = len(ways) * len(plan.asked) * plan.settings.repeat
        with tqdm(total=total, unit="texts", disable=not progress) as bar:
            runs = [record for turn in _turns(plan, ways, bar) for record in turn]
    rows = benchrows.rows(runs, about)
    return {"metadata": _metadata(plan, ways), "rows": rows, "runs": runs}


def _strategies(plan: Plan, stack: ExitStack) -> Iterator[Strategy]:
    settings = plan.settings
    threads = settings.threads or physical_cores()
    options: dict[str, Any] = {
        **{"n_ctx": plan.context, "n_threads": threads, "n_threads_batch": threads, "flash_attn": True},
        "n_gpu_layers": settings.gpu_layers,
    }

    def ordinary(path: Path) -> OrdinaryLlama:
        return stack.enter_context(closing(prompting.load_as(OrdinaryLlama, str(path), **options)))

    llm = prompting.load(str(settings.pair), residual_path=settings.residual, claim=settings.claim, **options)
    stack.enter_context(closing(llm))
    yield from strategies.of_pair(llm, settings.pair.name, settings.bits, settings.drafts, settings.sampling)
    small = ordinary(settings.drafter) if settings.drafter else None
    for path in settings.compare:
        other = ordinary(path)
        yield from strategies.of_ordinary(other, path.name, settings.lookups, settings.sampling)
        if small and settings.drafter:
            yield from strategies.of_two(other, path.name, small, settings.drafter.name, settings.drafts)


def _file(plan: Plan, way: Strategy) -> Path:
    return plan.settings.pair if way.bits else next(p for p in plan.settings.compare if p.name == way.model)


def _turns(plan: Plan, ways: list[Strategy], bar: Any) -> Iterator[list[dict[str, Any]]]:
    """Yield the runs of each prompt; the order of the strategies changes from one to the next."""
    settings, order = plan.settings, random.Random(plan.settings.seed)
    for repeat in range(settings.repeat):
        for number in range(len(plan.asked)):
            found: dict[str, Run] = {}
            for way in order.sample(ways, len(ways)):
                bar.set_description(way.name)
                tokens = plan.tokens[_file(plan, way)][number]
                found[way.name] = way.run(tokens, settings.tokens, settings.seed + number)
                bar.update()
            yield [_record(plan, way, number, repeat, found) for way in ways]


def _record(plan: Plan, way: Strategy, number: int, repeat: int, found: dict[str, Run]) -> dict[str, Any]:
    run, prompt = found[way.name], plan.asked[number]
    place = margin = None
    if way.plain is not None:
        plain = found[way.plain].tokens
        place = parting(run.tokens, plain)
        if place is not None and not plan.settings.temp:
            margin = way.margin([*plan.tokens[_file(plan, way)][number], *plain[:place]])
    return {
        **{"strategy": way.name, "prompt": prompt["id"], "kind": prompt["kind"], "repeat": repeat},
        **{**asdict(run), "tokens": len(run.tokens)},
        **{"diverges_at": place, "margin": margin},
    }


def parting(text: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the first place where two texts differ; None if they are the same."""
    if text == other:
        return None
    differing = (i for i, (a, b) in enumerate(zip(text, other, strict=False)) if a != b)
    return next(differing, min(len(text), len(other)))


def _metadata(plan: Plan, ways: list[Strategy]) -> dict[str, Any]:
    settings, about = plan.settings, info.collect()
    return {
        **{key: about[key] for key in ("twofold", "llama_cpp_python", "ggml", "python", "platform", "cpu", "kernel")},
        "devices": [device["description"] for device in about["devices"]],
        "checkout": info.checkout(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "threads": settings.threads or physical_cores(),
        "gpu_layers": settings.gpu_layers,
        "pair": settings.pair.name,
        "claiming": bool(ways[0].llm._engine.claiming),
        "compare": [path.name for path in settings.compare],
        "drafter": settings.drafter.name if settings.drafter else None,
        "tokens": settings.tokens,
        "context": plan.context,
        "prompts": [prompt["id"] for prompt in plan.asked],
        "sampling": settings.sampling,
        "seed": settings.seed,
        "repeat": settings.repeat,
        "meaning": [benchrows.RATE, benchrows.RATIO, benchrows.OTHER],
    }
