"""Strategies to run a model on a machine, each at its best, and which one to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from twofold import cost, placement
from twofold.acceptance import DEEPEST, Acceptance, Depths
from twofold.cost import Load, Sums, decode, read_by_check
from twofold.placement import Base, Placed, Setting
from twofold.precision import type_loss
from twofold.units import binary

FULL_TYPES = ("q8_0", "q6_k", "q5_k", "q4_k", "q3_k", "q2_k", "iq2_xs", "iq2_xxs")
BASE_TYPES = ("iq2_xxs", "iq2_xs", "q2_k", "iq3_xxs", "q3_k", "q4_k")
PARTIAL_TYPES = ("q8_0", "q6_k")
BITS = (4, 6, 8)
PRECISION_SLACK = 2.25  # in power: an error 1.5 times as large still counts as equal, half a bit
WORTH = 1.05  # twofold must be this much faster than what is simpler
_DRAFTER_LAYERS = 0.25  # launches of a drafter, in those of the model


@dataclass(frozen=True)
class Drafter:
    """A trained drafter: its bytes, and what it yields."""

    size: int
    depths: Depths


@dataclass(frozen=True)
class Options:
    """What is asked: acceptance, a drafter, precision (a ggml type), whether CPU and GPU work at the same time."""

    acceptance: Acceptance
    drafter: Drafter | None = None
    precision: str = "q8_0"
    overlap: bool = True


@dataclass(frozen=True)
class Strategy:
    """A way to run the model, worked out: bytes, seconds, tokens a second.

    Attributes
    ----------
    read_vram, read_ram
        bytes that a check (without drafts: a token) reads.
    loss
        power of the error of the full model's weights, over that of the weights.
    precise, fits
        whether that is near enough to the precision asked for, and whether RAM and VRAM suffice.
    bits
        of a uniform base that loses as much: where acceptance was read.
    """

    name: str
    kind: str  # plain, drafter, twofold
    type: str
    residual_bits: int
    k: int
    whole: tuple[int, ...]
    gpu_layers: int
    vram: float
    ram: float
    read_vram: float
    read_ram: float
    draft_s: float
    check_s: float
    tokens_per_check: float
    tokens_per_s: float
    loss: float
    precise: bool
    fits: bool
    bits: float | None = None


@dataclass(frozen=True)
class Plan:
    """All strategies, and the one to take."""

    setting: Setting
    options: Options
    strategies: list[Strategy] = field(default_factory=list)
    take: Strategy | None = None
    why: str = ""


def plan(setting: Setting, options: Options) -> Plan:
    """Work out all strategies and choose."""
    found = list(_plain(setting, options))
    for kind in BASE_TYPES:
        for bits in BITS:
            pair = best_pair(setting, options, Base(kind), bits)
            if pair is not None:
                found.append(pair)
    take, why = _choose(found, options.precision)
    return Plan(setting, options, found, take, why)


def _choose(found: Sequence[Strategy], precision: str) -> tuple[Strategy | None, str]:
    """Take the fastest that fits and is precise; what is simpler if that is nearly as fast."""
    able = [strategy for strategy in found if strategy.fits and strategy.precise]
    if not able:
        return None, f"nothing as precise as {precision} fits: take more memory or ask for less (--precision)"
    best = max(able, key=lambda strategy: strategy.tokens_per_s)
    others = [strategy for strategy in able if strategy.kind != "twofold"]
    simple = max(others, key=lambda strategy: strategy.tokens_per_s, default=None)
    if best.kind != "twofold":
        tried = "; twofold would be no faster" if any(s.kind == "twofold" for s in able) else ""
        return best, f"the fastest that is as precise as {precision}{tried}"
    if simple is None:
        return best, f"the only one that fits and is as precise as {precision}"
    gain = best.tokens_per_s / simple.tokens_per_s
    if gain < WORTH:
        return simple, f"twofold would be {gain:.2f} times as fast, which is not worth a second file"
    return best, f"{gain:.2f} times as fast as {simple.name}, the fastest other that is as precise as {precision}"


# ---- without twofold ---------------------------------------------------------------------------------


def _plain(setting: Setting, options: Options) -> Iterator[Strategy]:
    partial = {kind: placement.plain(setting, kind) for kind in PARTIAL_TYPES}
    if setting.room:
        fitting = ((kind, placement.plain(setting, kind)) for kind in FULL_TYPES)
        full = next(((kind, placed) for kind, placed in fitting if placement.fits(setting, placed)), None)
        if full is not None:
            yield _plain_strategy(setting, options, f"{full[0]}, all in VRAM", *full)
            partial.pop(full[0], None)
    for kind, placed in partial.items():
        where = "all in VRAM" if placement.fits(setting, placed) else _where(setting, placed)
        yield _plain_strategy(setting, options, f"{kind}, {where}", kind, placed)
    if options.drafter is not None:
        for kind in PARTIAL_TYPES:
            yield _with_drafter(setting, options, options.drafter, kind)


def _where(setting: Setting, placed: Placed) -> str:
    layers = placed.load.gpu_layers
    return f"{layers} of {setting.model.layers} layers in VRAM" if layers else "in RAM"


def _plain_strategy(setting: Setting, options: Options, name: str, kind: str, placed: Placed) -> Strategy:
    seconds = decode(placed.load, setting.machine, 1, residual=False)
    return _strategy(setting, options, placed, name, "plain", kind, tokens=1.0, times=(0.0, seconds))


def _with_drafter(setting: Setting, options: Options, drafter: Drafter, kind: str) -> Strategy:
    """Give VRAM to a drafter instead of layers; it drafts k tokens, each of which reads it once."""
    in_vram = drafter.size <= setting.room
    taken = drafter.size if in_vram else 0
    placed = placement.plain(
        Setting(setting.model, setting.machine, setting.ctx, setting.filled, setting.reserve + taken), kind
    )
    layers = round(_DRAFTER_LAYERS * setting.model.layers)
    sums = Sums(dense=drafter.size)
    small = Load(gpu=sums, gpu_layers=layers) if in_vram else Load(cpu=sums, cpu_layers=layers)
    draft = decode(small, setting.machine, 1, residual=False)
    times = [(k, decode(placed.load, setting.machine, k + 1, residual=False)) for k in range(1, DEEPEST + 1)]
    k, check = max(times, key=lambda t: drafter.depths.tokens_per_check(t[0]) / (t[0] * draft + t[1]))
    name = f"{kind} and a drafter of {drafter.size / 1e9:.2f} GB, {_where(setting, placed)}"
    tokens = drafter.depths.tokens_per_check(k)
    return _strategy(setting, options, placed, name, "drafter", kind, tokens=tokens, times=(draft, check), k=k)


# ---- with twofold ------------------------------------------------------------------------------------


def best_pair(
    setting: Setting, options: Options, base: Base, bits: int, order: Sequence[int] | None = None
) -> Strategy | None:
    """Find the fastest number of draft tokens and of whole layers for a base; None if nothing can be split.

    Layers are kept whole in this `order` (default: from the first on), and only while all of the base fits in VRAM.
    """
    layers = list(order if order is not None else placement.sorted_layers(setting.model))
    best = _pair(setting, options, base, bits, ())
    if best is None or best.gpu_layers < setting.model.layers:
        return best
    for count in range(1, len(layers) + 1):
        found = _pair(setting, options, base, bits, tuple(layers[:count]))
        if found is None:
            break
        if found.tokens_per_s > best.tokens_per_s:
            best = found
    return best


def _pair(setting: Setting, options: Options, base: Base, bits: int, whole: tuple[int, ...]) -> Strategy | None:
    placed = placement.twofold(setting, base, bits, whole)
    if placed.split_bits == 0:
        return None
    if whole and not placement.fits(setting, placed):
        return None
    yields = options.acceptance.tokens(placed.bits)
    draft = decode(placed.load, setting.machine, 1, residual=False)
    times = [(k, check_seconds(setting, placed.load, k, overlap=options.overlap)) for k in range(DEEPEST + 1)]
    k, check = max(times, key=lambda t: yields[t[0]] / (t[0] * draft + t[1]))
    name = f"twofold {base.label} + r{bits}"
    if whole:
        name += f", {len(whole)} layers whole"
    elif setting.machine.vram:
        name += "" if placement.fits(setting, placed) else f", {_where(setting, placed)}"
    return _strategy(
        setting, options, placed, name, "twofold", base.label,
        tokens=yields[k], times=(draft, check), k=k, bits=bits, whole=whole,
    )  # fmt: skip


def check_seconds(setting: Setting, load: Load, k: int, *, overlap: bool = True) -> float:
    """Seconds of a check of `k` drafts; in RAM a token is never verified alone, but beside another one."""
    columns = 2 if k == 0 and load.cpu_layers else k + 1
    return decode(load, setting.machine, columns, residual=True, overlap=overlap)


def _strategy(
    setting: Setting,
    options: Options,
    placed: Placed,
    name: str,
    kind: str,
    type_name: str,
    *,
    tokens: float,
    times: tuple[float, float],
    k: int = 0,
    bits: int = 0,
    whole: tuple[int, ...] = (),
) -> Strategy:
    draft, check = times
    read_vram, read_ram = read_by_check(placed.load, k + 1)
    limit = PRECISION_SLACK * type_loss(options.precision)
    return Strategy(
        name, kind, type_name, bits, k, whole, placed.load.gpu_layers, placed.vram, placed.ram, read_vram, read_ram,
        draft, check, tokens, tokens / (k * draft + check), placed.loss, placed.loss <= limit,
        placed.ram <= setting.machine.ram, placed.bits if kind == "twofold" else None,
    )  # fmt: skip


def assumptions(found: Plan) -> list[str]:
    """Everything that the figures rest on, a line each."""
    setting, options = found.setting, found.options
    low, high = options.acceptance.range
    power = f"{cost.SMOOTH:g}"
    overlap = (
        "the CPU multiplies the residual while the GPU multiplies its base (--sequential: afterwards)"
        if options.overlap
        else "the GPU multiplies the base, then the CPU the residual"
    )
    lines = [
        f"kernels reach {cost.VRAM_SHARE:.0%} of the VRAM's and {cost.RAM_SHARE:.0%} of the RAM's bandwidth as given; "
        "other work on the machine is none",
        f"a decode takes {cost.LOOP * 1e6:.0f} us besides, a layer {cost.GPU_LAYER * 1e6:.0f} us on the GPU and "
        f"{cost.CPU_LAYER * 1e6:.0f} us on the CPU, a copy across the bus {cost.FETCH * 1e6:.0f} us before it begins",
        f"reading (a) and computing (b) on the CPU overlap in part: (a^{power} + b^{power})^(1/{power}); "
        f"ggml's own CPU kernels compute at {cost.GGML_SHARE:g} of the 8-bit residual kernel's rate, one token at "
        f"{cost.GGML_ALONE:g}; a value between matrices costs the CPU {cost.VALUE} products of that kernel; the GPU's "
        f"arithmetic never limits batches of up to {DEEPEST + 1} tokens",
        f"in a check {overlap}; inputs cross the bus once, the residual's results too",
        f"float16 cache of {setting.ctx} tokens, {setting.filled} of them read by a decode; {binary(setting.reserve)} "
        "of VRAM are left for buffers",
        f"greedy text; acceptance from: {options.acceptance.source}",
        f"acceptance is interpolated in bits and k, and extrapolated outside {low:g} to {high:g} bits; whole "
        "layers raise it as a uniform base of the same loss would; guesses by n-grams come on top and are not counted",
        f"error: root mean square, relative, of Gaussian weights quantized here; up to {PRECISION_SLACK**0.5:g} "
        f"times that of {options.precision} counts as equal",
        "experts are chosen evenly and independently; prompts are not planned for",
    ]
    if options.drafter is not None:
        lines.append(f"a drafter has {_DRAFTER_LAYERS:g} of the model's layers, and no cache")
    if setting.model.has_state:
        lines.append(
            "the recurrent state is not counted: its memory, its copies, and tokens decoded again after a check"
        )
    return lines
