"""`convert --vram`: which layers stay whole, and the type of the base, so that VRAM is filled and put to best use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from twofold import acceptance, errors, placement
from twofold.blocks import ggml_type
from twofold.calibration import Calibration
from twofold.machine import Machine
from twofold.placement import Base, Setting
from twofold.planning import Options, Strategy, best_pair
from twofold.shapes import Model
from twofold.units import binary

TYPES = ("q2_k", "q3_k", "q4_k", "q5_k")
_SMALLER = ("iq2_xxs", "iq2_xs")  # where no other fits, and with a calibration: their acceptance was never measured
_MIXTURES = tuple(2.75 + 0.25 * step for step in range(12))


@dataclass(frozen=True)
class Budget:
    """A machine with the VRAM to fill, tokens of context, and bytes of VRAM to leave alone."""

    machine: Machine
    ctx: int
    reserve: int


@dataclass(frozen=True)
class Choice:
    """What fills the VRAM.

    Attributes
    ----------
    base_type, bpw
        type of the base; or bits a weight within which types are chosen, where that is not None.
    whole
        names of the matrices that stay whole.
    text
        why, for the summary.
    """

    base_type: str
    bpw: float | None
    whole: frozenset[str]
    strategy: Strategy
    text: str


def choose(model: Model, budget: Budget, bits: int, calibration: Calibration | None) -> Choice:
    """Choose what makes most tokens a second by the plan's cost model.

    All types, with sensitivities mixtures of them too, compete with all numbers of layers kept whole: with
    sensitivities the most sensitive first, else from the first on.

    Raises
    ------
    ArgumentError
        if the smallest base does not fit beside the cache and the reserve, or nothing can be split.
    """
    setting = Setting(model, budget.machine, budget.ctx, budget.ctx // 2, budget.reserve)
    known = acceptance.load("plain" if calibration is None else "calibrated")
    sensitive = calibration is not None and bool(calibration.sensitivity)
    order = _order(model, calibration if sensitive else None)

    def fitting_of(bases: Sequence[Base]) -> list[tuple[Base, Strategy]]:
        pairs = [(base, best_pair(setting, Options(known), base, bits, order)) for base in bases]
        return [(base, pair) for base, pair in pairs if pair is not None and pair.gpu_layers == model.layers]

    bases, smaller = _bases(model, sensitive), [Base(kind) for kind in _SMALLER] if calibration is not None else []
    if not any(base.type_of(matrix) for base in bases for matrix in model.matrices):
        raise errors.ArgumentError(f"{model.name}: no tensor can be split: its matrices have no more bits than a base")
    fitting = fitting_of(bases) or fitting_of(smaller)
    if not fitting:
        raise errors.ArgumentError(_too_small(setting, [*bases, *smaller], bits))
    base, best = max(fitting, key=lambda pair: pair[1].tokens_per_s)
    names = frozenset(matrix.name for matrix in model.matrices if matrix.layer in best.whole)
    text = _text(setting, base, best, sensitive, len(fitting))
    return Choice("auto" if base.bits else base.kind, base.bits, names, best, text)


def _bases(model: Model, sensitive: bool) -> list[Base]:
    bases = [Base(kind) for kind in TYPES]
    smallest = ggml_type("q2_k").block
    if sensitive and all(matrix.width % smallest == 0 for matrix in model.matrices):
        bases += [Base("q2_k", bits) for bits in _MIXTURES]
    return bases


def _order(model: Model, calibration: Calibration | None) -> list[int]:
    if calibration is None:
        return placement.sorted_layers(model)
    weight: dict[int, float] = {}
    for matrix in model.matrices:
        if matrix.layer is not None:
            weight[matrix.layer] = weight.get(matrix.layer, 0.0) + calibration.sensitivity_of(matrix.name)
    return placement.sorted_layers(model, weight)


def _too_small(setting: Setting, bases: Sequence[Base], bits: int) -> str:
    roomy = Setting(setting.model, _with_vram(setting.machine, 1 << 60), setting.ctx, setting.filled, setting.reserve)
    need = min((placement.twofold(roomy, base, bits).vram, base.label) for base in bases)
    cache = setting.cache(setting.ctx) * setting.model.layers
    return (
        f"{binary(setting.machine.vram)} of VRAM: the smallest base ({need[1]}) takes {binary(need[0])}, "
        f"{binary(cache)} of it cache for {setting.ctx} tokens and {binary(setting.reserve)} reserve; give more VRAM "
        "or a smaller --ctx, or convert without --vram and run with fewer --gpu-layers"
    )


def _with_vram(machine: Machine, vram: int) -> Machine:
    return Machine(**{**vars(machine), "vram": vram})


def _text(setting: Setting, base: Base, best: Strategy, sensitive: bool, fitting: int) -> str:
    order = "the most sensitive ones" if sensitive else "the first ones"
    count = len(best.whole)
    whole = f"{count} layer{'s' if count > 1 else ''} whole ({order})" if count else "no layer whole"
    text = (
        f"{binary(setting.machine.vram)}: base {base.label} and {whole} take {binary(best.vram)}, the cache of "
        f"{setting.ctx} tokens and {binary(setting.reserve)} of reserve included; predicted "
        f"{best.tokens_per_s:.1f} tok/s at {best.k} draft tokens, the most of {fitting} bases that fit"
    )
    if placement.fits(setting, placement.plain(setting, placement.WHOLE)):
        text += f"; all of the model fits as {placement.WHOLE}, and needs no residual (twofold plan compares)"
    return text
