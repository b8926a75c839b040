"""Where matrices lie and in what type, and the load that follows: the plan's arithmetic of bytes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from twofold.blocks import GgmlType, plane_bytes
from twofold.cost import GGML_ALONE, GGML_SHARE, RESULT_COPIES, VALUE, Load, Sums
from twofold.layout import choose_base_type
from twofold.machine import MOST, Machine, Times, linear
from twofold.precision import bits_of_loss, loss_of_bits, residual_loss, type_loss
from twofold.shapes import Matrix, Model

GROUP = 128
WHOLE = "q8_0"


@dataclass(frozen=True)
class Base:
    """A type for all matrices, or a mean of bits over a mixture of types (`kind` is then the nearest type below)."""

    kind: str
    bits: float | None = None

    @property
    def label(self) -> str:
        """For tables."""
        return self.kind if self.bits is None else f"{self.bits:g} bits"

    def type_of(self, matrix: Matrix) -> GgmlType | None:
        """Type in the base; None if the matrix stays whole because its source has no more bits or nothing fits."""
        kind = choose_base_type(self.kind, matrix.width)
        return None if kind is None or matrix.kind.bpw <= kind.bpw else kind

    def bytes_of(self, matrix: Matrix, kind: GgmlType) -> float:
        """Bytes of a matrix that is split."""
        return matrix.bytes(kind) if self.bits is None else max(matrix.bytes(kind), matrix.weights * self.bits / 8)

    def loss_of(self, kind: GgmlType) -> float:
        """Loss of a matrix that is split."""
        return type_loss(kind.name) if self.bits is None else loss_of_bits(max(self.bits, kind.bpw))


@dataclass(frozen=True)
class Setting:
    """What all strategies share: the model, the machine, the cache.

    Attributes
    ----------
    ctx, filled
        tokens of context that there is room for, and that a decode attends to on average.
    reserve
        bytes of VRAM left to buffers and other programs.
    """

    model: Model
    machine: Machine
    ctx: int
    filled: int
    reserve: int

    @property
    def room(self) -> int:
        """Bytes of VRAM for weights and cache."""
        return max(0, self.machine.vram - self.reserve)

    def cache(self, tokens: int) -> float:
        """Bytes of cache of one layer."""
        return self.model.cache_token * tokens / max(1, self.model.layers)

    @property
    def others(self) -> float:
        """Bytes of norms, routers and the like of one layer."""
        return self.model.others / max(1, self.model.layers)


@dataclass(frozen=True)
class Placed:
    """A choice worked out.

    Attributes
    ----------
    vram, ram
        bytes: weights, cache and reserve; weights, cache and the embedding.
    loss, base_loss
        power of the error of the full model's and of the base's weights, over that of the weights.
    split_bits
        bits a weight of the base over matrices that are split; 0 if none is.
    """

    load: Load
    vram: float
    ram: float
    loss: float
    base_loss: float
    split_bits: float
    gpu_units: int

    @property
    def bits(self) -> float:
        """Bits of a uniform base that loses as much."""
        return bits_of_loss(self.base_loss)


@dataclass
class _Total:
    """Running sums over matrices."""

    gpu: Sums = field(default_factory=Sums)
    cpu: Sums = field(default_factory=Sums)
    split: Sums = field(default_factory=Sums)
    beside: Sums = field(default_factory=Sums)
    within: Sums = field(default_factory=Sums)
    crossing: float = 0.0
    fetches: int = 0
    loss: float = 0.0
    base_loss: float = 0.0
    split_bytes: float = 0.0
    split_weights: int = 0


def whole_type(matrix: Matrix, asked: str) -> GgmlType:
    """Type of a matrix that is not split: the one asked for where it fits and is smaller than the source's."""
    kind = choose_base_type(asked, matrix.width)
    return matrix.kind if kind is None or matrix.kind.bpw <= kind.bpw else kind


def plain(setting: Setting, kind: str) -> Placed:
    """Place an ordinary model of one type: as many layers in VRAM as fit, the rest in RAM."""
    return _place(setting, None, kind, 0, frozenset())


def twofold(setting: Setting, base: Base, bits: int, whole: Collection[int] = ()) -> Placed:
    """Place a pair; `whole` are layers that are kept whole."""
    return _place(setting, base, WHOLE, bits, frozenset(whole))


def _place(setting: Setting, base: Base | None, whole: str, bits: int, layers: frozenset[int]) -> Placed:
    units = setting.model.units
    sizes = [_unit_bytes(setting, base, whole, unit, layers) for unit in units]
    on_gpu = _fit(setting, sizes)
    total = _Total()
    for number, unit in enumerate(units):
        for matrix in unit:
            kind = _split_type(base, matrix, layers)
            if kind is None or base is None:
                _add_whole(total, matrix, whole_type(matrix, whole), setting.machine, number in on_gpu)
            else:
                _add_split(total, matrix, (base, kind, bits), setting.machine, number in on_gpu)
        if number in on_gpu:
            _add_crossing(total, [matrix for matrix in unit if _split_type(base, matrix, layers)])
        else:
            _add_values(total, unit, setting.machine)
    return _placed(setting, total, sizes, on_gpu)


def _split_type(base: Base | None, matrix: Matrix, whole: frozenset[int]) -> GgmlType | None:
    """Type of a matrix in the base; None if it is not split."""
    return None if base is None or matrix.layer in whole else base.type_of(matrix)


def _unit_bytes(
    setting: Setting, base: Base | None, whole: str, unit: Sequence[Matrix], layers: frozenset[int]
) -> float:
    """Bytes of a layer or the head in VRAM: weights, and a layer's cache and norms."""
    size = 0.0
    for matrix in unit:
        kind = _split_type(base, matrix, layers)
        if base is None or kind is None:
            size += matrix.bytes(whole_type(matrix, whole))
        else:
            size += base.bytes_of(matrix, kind)
    is_layer = any(matrix.layer is not None for matrix in unit)
    return size + (setting.cache(setting.ctx) + setting.others if is_layer else 0)


def _fit(setting: Setting, sizes: Sequence[float]) -> set[int]:
    """Units that go into VRAM, as llama.cpp takes them: the head, then layers from the last on."""
    chosen: set[int] = set()
    left: float = setting.room
    for number in reversed(range(len(sizes))):
        if sizes[number] > left:
            break
        left -= sizes[number]
        chosen.add(number)
    return chosen


def _add_whole(total: _Total, matrix: Matrix, kind: GgmlType, machine: Machine, on_gpu: bool) -> None:
    sums = _sums(matrix, matrix.bytes(kind), _ggml_times(machine))
    total.gpu, total.cpu = (total.gpu + sums, total.cpu) if on_gpu else (total.gpu, total.cpu + sums)
    lost = matrix.weights * (type_loss(kind.name) if kind != matrix.kind else 0.0)
    total.loss += lost
    total.base_loss += lost


def _add_split(total: _Total, matrix: Matrix, how: tuple[Base, GgmlType, int], machine: Machine, on_gpu: bool) -> None:
    base, kind, bits = how
    sums = _sums(matrix, base.bytes_of(matrix, kind), machine.base_times.get(kind.name, _ggml_times(machine)))
    added = _sums(matrix, residual_bytes(matrix, bits), machine.residual_times[bits])
    if on_gpu:
        total.gpu, total.beside = total.gpu + sums, total.beside + added
        total.split += sums if matrix.experts == 1 else Sums()  # which experts are chosen is known too late to begin
    else:
        total.cpu, total.within = total.cpu + sums, total.within + added
    lost = base.loss_of(kind)
    total.base_loss += matrix.weights * lost
    total.loss += matrix.weights * lost * residual_loss(kind.name, bits) / max(type_loss(kind.name), 1e-30)
    total.split_bytes += sums.size
    total.split_weights += matrix.weights


def _passing(matrices: Sequence[Matrix]) -> tuple[int, int, int]:
    """Values that go in, and that come out, for a column; distinct inputs: q, k and v share one, gate and up too."""
    sharing = {"attn_q": "attn", "attn_k": "attn", "attn_v": "attn", "ffn_gate": "ffn", "ffn_up": "ffn"}
    inputs: dict[str, int] = {}
    results = 0
    for matrix in matrices:
        stem = matrix.name.removesuffix(".weight").rpartition(".")[2]
        used = max(1, round(matrix.experts * matrix.used))  # experts, each with a result of its own
        inputs[sharing.get(stem, stem)] = matrix.width * (used if "down" in stem else 1)
        results += matrix.rows * used
    return sum(inputs.values()), results, len(inputs)


def _add_crossing(total: _Total, split: Sequence[Matrix]) -> None:
    """Add what crosses the bus."""
    values, results, inputs = _passing(split)
    total.crossing += values + RESULT_COPIES * results
    total.fetches += inputs + RESULT_COPIES * len(split)


def _add_values(total: _Total, unit: Sequence[Matrix], machine: Machine) -> None:
    """Add what the CPU does to values between its matrices: rounding, norms, attention."""
    values, results, _ = _passing(unit)
    total.cpu += Sums(seconds=(values + results) * VALUE * linear(MOST / machine.residual_times[8][MOST]))


def _ggml_times(machine: Machine) -> Times:
    times = machine.residual_times[8] / GGML_SHARE
    times[1] *= GGML_SHARE / GGML_ALONE
    return times


def _sums(matrix: Matrix, size: float, times: Times) -> Sums:
    if matrix.used >= 1:
        return Sums(dense=size, seconds=matrix.weights * times)
    one_by_one = linear(1 / times[1])  # as if no two tokens of a batch had an expert in common
    return Sums(experts=size, used=size * matrix.used, seconds=matrix.weights * matrix.used * one_by_one)


def residual_bytes(matrix: Matrix, bits: int) -> float:
    """Bytes of a matrix's residual at `bits`, scales included."""
    parts = ["scales", *(f"plane{b}" for b in (4, 6, 8) if b <= bits)]
    return float(matrix.experts * sum(plane_bytes(matrix.rows, matrix.width, GROUP, part) for part in parts))


def _placed(setting: Setting, total: _Total, sizes: Sequence[float], on_gpu: set[int]) -> Placed:
    model = setting.model
    gpu_layers = len(on_gpu - {len(sizes) - 1})
    cpu_layers = model.layers - gpu_layers
    cache = setting.cache(setting.filled)
    load = Load(
        total.gpu, total.cpu, total.split, total.beside, total.within, gpu_layers, cpu_layers, total.crossing,
        total.fetches, gpu_layers * cache, cpu_layers * cache, model.vocabulary if on_gpu else 0,
    )  # fmt: skip
    in_vram = sum(sizes[number] for number in on_gpu)
    in_ram = sum(size for number, size in enumerate(sizes) if number not in on_gpu)
    in_ram += total.beside.size + total.within.size + model.embedding
    mean = max(1, model.weights)
    bits = 8 * total.split_bytes / total.split_weights if total.split_weights else 0.0
    vram = in_vram + setting.reserve if setting.machine.vram else 0.0
    return Placed(load, vram, in_ram, total.loss / mean, total.base_loss / mean, bits, len(on_gpu))


def fits(setting: Setting, placed: Placed) -> bool:
    """Whether everything of the base is in VRAM."""
    return placed.gpu_units == len(setting.model.units)


def sorted_layers(model: Model, weight: Mapping[int, float] | None = None) -> list[int]:
    """Layers in the order in which they are kept whole: those of most weight first, else from the first on."""
    layers = sorted({matrix.layer for matrix in model.matrices if matrix.layer is not None})
    return layers if weight is None else sorted(layers, key=lambda layer: (-weight.get(layer, 0.0), layer))
