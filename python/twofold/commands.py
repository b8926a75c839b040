"""Subcommands about files, models and this machine; each a thin layer over a module of its own."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from pathlib import Path

from twofold import accept as acceptance
from twofold import (
    accept_report,
    benchplan,
    benchreport,
    calibration,
    errors,
    evalcache,
    evalmodels,
    evalreport,
    hub,
    plan_command,
    plugin,
    report,
    results,
)
from twofold import bench as benchmark
from twofold import evaluate as evaluation
from twofold import info as machine
from twofold.calibrate import calibrate as run_calibration
from twofold.convert import convert as convert_model
from twofold.decoder import physical_cores
from twofold.devices import add_rpc_servers
from twofold.merge import merge as merge_pair
from twofold.pairfile import open_pair
from twofold.sensitivity import CANDIDATES


def convert(arguments: Namespace) -> int:
    """Run ``twofold convert``."""
    if arguments.base_types and arguments.base_bpw is None:
        raise errors.ArgumentError("--base-types is for --base-bpw, a budget of bits; for one type give --base")
    source = hub.resolve(arguments.source)
    done = convert_model(
        source,
        Path(arguments.name),
        base_type=arguments.base,
        base_bpw=arguments.base_bpw,
        base_types=arguments.base_types.split(",") if arguments.base_types else CANDIDATES,
        vram=plan_command.budget(arguments),
        keep_whole=arguments.whole,
        whole_type=arguments.whole_type,
        calibration=_calibration(arguments, source),
        feedback=not arguments.no_feedback,
        bits=arguments.residual_bits,
        group=arguments.group,
        threads=arguments.threads,
        force=arguments.force,
        progress=_progress(arguments),
    )
    found = report.converted(done)
    print(json.dumps(report.as_dict(found)) if arguments.json else report.render(found))
    return 0


def _calibration(arguments: Namespace, source: Path) -> calibration.Calibration | None:
    """Load what --calibration names; ``auto`` makes NAME.calibration.gguf where it is not there yet."""
    if arguments.calibration is None:
        return None
    if arguments.calibration != "auto":
        return calibration.load(Path(arguments.calibration))
    path = Path(f"{arguments.name}.calibration.gguf")
    if path.exists():
        return calibration.load(path)
    return run_calibration(
        source,
        path,
        sensitivity=arguments.base_bpw is not None or arguments.vram is not None,
        threads=arguments.threads,
        progress=_progress(arguments),
    )


def calibrate(arguments: Namespace) -> int:
    """Run ``twofold calibrate``."""
    made = run_calibration(
        hub.resolve(arguments.source),
        Path(arguments.out),
        texts=[Path(text) for text in arguments.text],
        tokens=arguments.tokens,
        chunk=arguments.chunk,
        moments=not arguments.no_moments,
        sensitivity=arguments.sensitivity,
        threads=arguments.threads,
        gpu_layers=arguments.gpu_layers,
        force=arguments.force,
        progress=_progress(arguments),
    )
    print(
        f"{arguments.out}: {len(made.sums)} matrices over {made.chunks} chunks of {made.chunk_tokens} tokens, second "
        f"moments of {len(made.moments)} inputs, sensitivity of {len(made.sensitivity)} matrices"
    )
    return 0


def inspect(arguments: Namespace) -> int:
    """Run ``twofold inspect``."""
    found = report.inspect(open_pair(Path(arguments.base), _path(arguments.residual)))
    if arguments.json:
        print(json.dumps(report.as_dict(found, with_tensors=arguments.tensors)))
    else:
        print(report.render(found, with_tensors=arguments.tensors))
    return 0


def merge(arguments: Namespace) -> int:
    """Run ``twofold merge``."""
    done = merge_pair(
        Path(arguments.base),
        Path(arguments.out),
        type=arguments.type,
        residual=_path(arguments.residual),
        bits=arguments.residual_bits,
        force=arguments.force,
        progress=_progress(arguments),
    )
    print(
        f"{done.path}: {report.size(done.path.stat().st_size)}, {done.completed} tensors of base + {done.bits}-bit "
        f"residual as {done.type}, {done.copied} copied"
    )
    return 0


def evaluate(arguments: Namespace) -> int:
    """Run ``twofold eval``."""
    cache = evalcache.cache_root()
    settings = evalmodels.Settings(
        pairs=[Path(pair) for pair in arguments.pairs],
        reference=hub.resolve(arguments.reference),
        texts=[Path(text) for text in arguments.text],
        compare=[Path(other) for other in arguments.compare],
        modes=evalmodels.MODES if arguments.mode == "both" else (arguments.mode,),
        bits=tuple(sorted(set(arguments.bits))),
        ctx=arguments.ctx,
        tokens=arguments.tokens,
        cache=None if arguments.no_cache else cache / "eval",
        scratch=Path(arguments.scratch) if arguments.scratch else cache / "scratch",
        threads=arguments.threads or physical_cores(),
        gpu_layers=arguments.gpu_layers,
        batch=arguments.batch,
    )
    out, picture = _path(arguments.json), _path(arguments.plot)
    results.check_outputs(out, picture)
    rows = evaluation.evaluate(settings, progress=_progress(arguments))
    print(evalreport.render(rows, settings))
    found = {"metadata": evalreport.metadata(settings, arguments.command), "rows": evalreport.as_rows(rows)}
    results.save(found, out, picture, lambda _: evalreport.plot(rows))
    return 0


def info(arguments: Namespace) -> int:
    """Run ``twofold info``."""
    if arguments.rpc:
        add_rpc_servers(arguments.rpc)
    found = machine.collect()
    if arguments.base is not None:
        found["pair"] = machine.locate_pair(arguments.base, arguments.residual, arguments.ctx, arguments)
    print(json.dumps(found) if arguments.json else machine.render(found))
    return 0


def show_plugin(arguments: Namespace) -> int:
    """Run ``twofold plugin``."""
    print(plugin.library() if arguments.path else plugin.usage(arguments.residual))
    return 0


def accept(arguments: Namespace) -> int:
    """Run ``twofold accept``."""
    out, picture = _path(arguments.json), _path(arguments.plot)
    results.check_outputs(out, picture)
    settings = acceptance.Settings(
        depths=tuple(sorted(set(arguments.depths))),
        tokens=arguments.tokens,
        count=arguments.prompts,
        kinds=tuple(arguments.kinds),
        residual_bits=arguments.residual_bits,
        threads=arguments.threads,
        gpu_layers=arguments.gpu_layers,
        texts=_path(arguments.texts),
        measure_pairs=not arguments.drafters_only,
    )
    pairs, drafters = ([Path(name) for name in names] for names in (arguments.pairs, arguments.drafter))
    found = acceptance.measure(pairs, drafters, settings, progress=_progress(arguments))
    for others in accept_report.others(found):
        print(f"twofold: {others}", file=sys.stderr)
    print(accept_report.render(found))
    results.save(found, out, picture, accept_report.plot)
    return 0


def bench(arguments: Namespace) -> int:
    """Run ``twofold bench``."""
    out, picture = _path(arguments.json), _path(arguments.plot)
    results.check_outputs(out, picture)
    plan = benchplan.plan(
        benchplan.Settings(
            pair=Path(arguments.base),
            residual=_path(arguments.residual),
            drafts=tuple(dict.fromkeys(arguments.drafts)),
            bits=tuple(dict.fromkeys(arguments.residual_bits)),
            compare=tuple(map(Path, arguments.compare)),
            lookups=tuple(dict.fromkeys(arguments.lookup)),
            drafter=_path(arguments.drafter),
            tokens=arguments.tokens,
            count=arguments.prompts,
            kinds=tuple(arguments.kinds),
            temp=arguments.temp,
            seed=arguments.seed,
            repeat=arguments.repeat,
            threads=arguments.threads,
            gpu_layers=arguments.gpu_layers,
            claim=False if arguments.no_claim else None,
        )
    )
    print(f"twofold: {plan.note()}", file=sys.stderr)
    found = benchmark.measure(plan, progress=_progress(arguments))
    found["metadata"]["command"] = shlex.join(arguments.command)
    print(benchreport.render(found))
    results.save(found, out, picture, benchreport.plot)
    return 0


def _path(text: str | None) -> Path | None:
    return Path(text) if text else None


def _progress(arguments: Namespace) -> bool:
    return bool(arguments.progress) or sys.stderr.isatty()
