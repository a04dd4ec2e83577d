"""Quantisation whose scales are found on the way: the threads of a scale hold its numbers, find the largest, divide and write.

Up to 32 threads a scale exchange by shuffles, more by shared memory of a CTA of their own; what registers do not hold is read twice. Scales
of more numbers than a CTA should walk over (a tensor's, a channel's) come from a reduction, and the map of given scales follows. Codes of
four bits that share a byte but no scale, too, are written by that map.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from ..device import DeviceInfo
from ..dtypes import F32, dtype
from ..ops.base import Operand, Problem
from ..ops.quantize import KINDS, Kind, QuantizeProblem
from ..tensor import TensorDesc
from . import pointwise_map, reduce_tree
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, refuse
from .composition import cheapest, moved, relocated
from .digits import DigitConsts, Digits, ceil_div, power_of_two
from .quantize_map import LIMIT, MIN_CAPABILITY, QuantizeMap, map_step, target_of
from .quantize_space import NF4, Space, halved, known_shifts, moves_packs, near_operands, nf4_cells

_MOST_LANES = 1024
_THREADS = 256  # of a CTA that has several scales
_SECTOR_BYTES = 32
_SWEEP_BYTES = 16384  # that a CTA reads at a time
_TILE = 512  # bytes of 128 x 4 scales


@dataclass(frozen=True, slots=True)
class QuantizeGroupsConsts:
    """A scale's numbers are `rows` by `columns`, in packs of vec: row_packs a row. lanes: threads a scale, packs: of each, at a time;
    loops: that is not all. vector, wide, shares_words: as of QuantizeMapConsts. form: of scales. column_at, row_at: the index compared
    with an extent beside the place within the group, "" if none; bounds: all such, of which others tell groups that lie outside. turns:
    scales of a thread, one after the other, `apart` bytes from one to the next of an operand."""

    kind: Kind
    wide: str
    vec: int
    vector: bool
    lanes: int
    packs: int
    loops: bool
    rows: int
    columns: int
    row_packs: int
    digits: DigitConsts
    form: str
    asymmetric: bool
    has_global: bool
    stochastic: bool
    shares_words: bool
    bounds: tuple[str, ...]
    column_at: str
    row_at: str
    is_whole: bool
    shifts: tuple[tuple[str, int], ...]
    near: tuple[str, ...]
    turns: int = 1
    apart: tuple[tuple[str, int], ...] = ()
    saturate: bool = True

    nf4_numbers: ClassVar[tuple[float, ...]] = NF4

    @property
    def nf4_cells(self) -> tuple[tuple[float, int], ...]:
        return nf4_cells()

    @property
    def wide_bytes(self) -> int:
        return dtype(self.wide).num_bytes

    @property
    def holds_words(self) -> bool:
        """Two numbers of 16 bits a register."""
        return self.vector and self.wide_bytes == 2

    @property
    def pack_words(self) -> int:
        return self.vec // 2 if self.holds_words else self.vec

    @property
    def code_words(self) -> int:
        return max(1, self.vec * self.kind.bits // 32)

    @property
    def by_sizes(self) -> bool:
        """Codes come from sizes and signs, eight at a time, where the scale allows it."""
        return self.kind.name == "e2m1" and self.form != "f32" and self.vec >= 8 and not self.stochastic

    @property
    def resident(self) -> int:
        """CTAs that an SM is to have room for. Of FP4 a thread has much to do between 32 bytes read and 8 written: with 40 registers, not
        48, there are threads enough that others read meanwhile. (f32 held in registers leaves no such room.)"""
        if not self.by_sizes or self.vec * self.packs > 16 or not (self.holds_words or self.form == "e8m0"):
            return 1
        return 5 if self.turns > 1 else 6

    @property
    def clamps(self) -> bool:
        """Whether quotients may be beyond the codes."""
        return self.asymmetric or self.kind.is_integer and self.kind.low == 0

    @property
    def is_apart(self) -> bool:
        """A CTA a scale."""
        return self.lanes > 32

    @property
    def keeps_column(self) -> bool:
        """A thread's packs lie one below the other, lanes / row_packs rows apart; not of pairs, the second of which may lie outside."""
        return self.rows > 1 and self.lanes % self.row_packs == 0 and (self.vector or self.kind.bits > 4)


@dataclass(frozen=True)
class Groups:
    """The digits that count scales, and those within one, both in half bytes."""

    outer: Digits
    rows: int
    columns: int
    row_steps: Mapping[str, int]
    column_steps: Mapping[str, int]
    vec: int
    vector: bool
    bounds: tuple[tuple[str, int], ...]
    column_at: str
    row_at: str
    wide_bytes: int = 4

    @property
    def row_packs(self) -> int:
        return ceil_div(self.columns, self.vec)

    @property
    def packs(self) -> int:
        return self.rows * self.row_packs


def _outputs_of_scales(problem: QuantizeProblem) -> dict[str, TensorDesc]:
    return {n: problem.desc(n) for n in ("scale", "zero_point") if problem.has(n)}


def groups_of(problem: QuantizeProblem, most: int = 8) -> Groups | None:
    """Of packs of up to `most` numbers; None where a scale's numbers are no rows and columns."""
    kind, scale = problem.kind, problem.desc("scale")
    tensors = {"x": problem.desc("x"), "y": problem.desc("y")}
    scales = _outputs_of_scales(problem)
    space = Space.of(problem, scale)
    if problem.desc("x").numel == 0:  # scales of nothing
        digits = Digits(tuple(f"d{i}" for i in range(scale.rank)), scale.shape,
                        {"x": (0,) * scale.rank, "y": (0,) * scale.rank, "index": (0,) * scale.rank}
                        | {n: tuple(2 * s * desc.dtype.num_bytes for s in desc.strides) for n, desc in scales.items()})
        return Groups(digits.collapsed("g"), 1, 0, {}, {"x": 0, "y": 0, "index": 0}, 1 + kind.is_packed, False, (), "", "")
    last = len(problem.shape) - 1
    inner = [d for d in space.digits if d.inner]
    outer = space.rows([d for d in space.digits if not d.inner], tensors, scales)
    if problem.swizzled:  # neighbours are those whose scales are: 32 threads read 128 bytes of eight rows, and write 32 scales side by side
        outer = outer.ordered_for("scale")
    outer = outer.collapsed("g")
    if kind.is_packed:
        if not inner or inner[-1].dim != last or inner[-1].extent == 1:
            return None  # two codes of one byte have scales of their own
        within = space.rows(inner, tensors, scales)
    else:
        within = space.rows(inner, tensors, scales, "x")
    within = within.collapsed("k")
    if len(within.extents) > 2:
        return None
    ragged = [(f"at{dim}", problem.shape[dim]) for dim in space.ragged]
    steps = {n: row[-1] for n, row in within.strides.items()}
    row_steps = {n: row[0] for n, row in within.strides.items()} if len(within.extents) == 2 else {}
    columns, rows = within.extents[-1], within.extents[0] if row_steps else 1
    column_at = next((n for n, _ in ragged if steps[n]), "")
    row_at = next((n for n, _ in ragged if row_steps.get(n)), "")

    def made(vec: int, vector: bool) -> Groups:
        return Groups(outer, rows, columns, row_steps, steps, vec, vector, tuple(ragged), column_at, row_at,
                      problem.desc("x").dtype.num_bytes)

    for vec in (v for v in (16, 8, 4, 2) if v <= most):
        whole = columns % vec == 0 and all(bound % vec == 0 for n, bound in ragged if n == column_at)
        if whole and all(_moves(tensors[n], outer, row_steps.get(n), rows, n, steps[n], vec, kind) for n in tensors):
            return made(vec, True)
    return made(2 if kind.is_packed else 1, False)


def _moves(desc: TensorDesc, outer: Digits, row_step: int | None, rows: int, name: str, step: int, vec: int, kind: Kind) -> bool:
    halves = kind.bits // 4 if name == "y" else 2 * desc.dtype.num_bytes
    steps, extents = (*outer.strides[name], row_step or 0), (*outer.extents, rows)
    return moves_packs(desc, steps, extents, step, vec * halves, halves)


class QuantizeGroups(Engine):
    """One launch."""

    id = "quantize.groups"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, QuantizeProblem)
        if device.capability < MIN_CAPABILITY:
            return refuse("needs sm_80")
        if problem.has("found_global"):
            return refuse("a global scale needs a pass of its own")
        return _supports(problem)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, QuantizeProblem)
        return _configs(problem, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, QuantizeProblem)
        groups = _grouped(problem, config["vec"])
        reads_twice = ceil_div(groups.packs, config["lanes"]) > config["packs"]
        moves = problem.num_bytes * (1.5 if reads_twice else 1.0) * (1.1 if groups.vector else 4.0) / (device.bandwidth_gbs * 1e3)
        # a CTA alone moves some 20 bytes a nanosecond
        own = groups.packs * groups.vec * problem.desc("x").dtype.num_bytes * (2 if reads_twice else 1) / 20e3 * (1 if groups.vector else 4)
        return 2.5 + max(moves, own)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, QuantizeProblem)
        return Build(()) if problem.is_empty else Build((_step(problem, config, device, "global_scale"),))


def _grouped(problem: QuantizeProblem, most: int) -> Groups:
    groups = groups_of(problem, most)
    assert groups is not None
    return groups


def _supports(problem: QuantizeProblem) -> Support:
    groups = groups_of(problem)
    if groups is None:
        return refuse("a scale's numbers are no rows and columns with codes side by side")
    lanes = min(_MOST_LANES, power_of_two(max(groups.packs, 1)))
    if groups.outer.size * lanes >= LIMIT - 256 or groups.rows * groups.columns >= LIMIT - 64 * _MOST_LANES:
        return refuse(f"{groups.outer.size} scales of {groups.rows} x {groups.columns} numbers (at most {LIMIT - 65537})")
    return SUPPORTED


def _configs(problem: QuantizeProblem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    """Packs of eight numbers, or of sixteen that lie together, where the eights of a group's threads would not fill a sector."""
    groups, wider = _grouped(problem, 8), _grouped(problem, 16)
    found, wide = _arrangements(groups, device), _arrangements(wider, device) if wider.vec == 16 else ()
    if wide and _takes_turns(problem, wider, wide[0]):
        wide = (EngineConfig.of(**dict(wide[0].knobs), turns=2), *wide)
    return (*wide, *found) if wide and found[0]["lanes"] * groups.vec * problem.kind.bits // 8 < _SECTOR_BYTES else (*found, *wide)


def _takes_turns(problem: QuantizeProblem, groups: Groups, config: EngineConfig) -> bool:
    """Whether FP4's threads have two scales each: in the layout 128x4, whose places take long to find (in others it gains nothing)."""
    lanes, packs = config["lanes"], config["packs"]
    if problem.kind.name != "e2m1" or problem.stochastic or not problem.swizzled or groups.rows > 1 or groups.bounds:
        return False
    if lanes > 32 or packs > 1 or groups.packs != lanes or groups.wide_bytes > 2:
        return False
    scales = _apart(halved(groups.outer), 2)[0].size
    return scales > 0 and scales * lanes % _THREADS == 0


def _arrangements(groups: Groups, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    """lanes and packs: 32 numbers a thread where a scale has many, sixteen where that would leave neighbours far from one another; eight
    where there are too few for all threads, and 64 rather than more than 256 threads that wait for one another."""
    most = min(8, 128 // (groups.vec * groups.wide_bytes)) if groups.vector else 4
    count, eighths = max(groups.packs, 1), groups.packs * max(1, groups.vec // 8)
    found = []
    for packs in (p for p in (1, 2, 4, 8) if p <= most):
        lanes = min(_MOST_LANES, power_of_two(ceil_div(count, packs)))
        if lanes * packs >= count and (lanes * (packs // 2) < count or packs == 1):
            found.append(EngineConfig.of(lanes=lanes, packs=packs, vec=groups.vec))
    if count > _MOST_LANES * most:  # read twice
        return tuple(EngineConfig.of(lanes=lanes, packs=min(4, most), vec=groups.vec) for lanes in (512, 1024))
    is_small = groups.outer.size * eighths < 4 * 1024 * device.num_sms
    wanted = 1 if is_small and eighths <= 256 else 8 if eighths > 4 * 256 and most * groups.vec >= 64 else 4 if eighths >= 16 else 2
    wanted = max(1, wanted // max(1, groups.vec // 8))
    return tuple(sorted(dict.fromkeys(found), key=lambda config: abs(config["packs"] - wanted)))


def _apart(outer: Digits, turns: int) -> tuple[Digits, dict[str, int]]:
    """The digits of a thread's first scale in the layout 128x4, and bytes to each of its others, those of the next tiles. Digits of nothing
    where tiles do not come out even."""
    tile = outer.strides["scale"]
    at = tile.index(_TILE) if _TILE in tile else -1
    pieces, rest = divmod(outer.extents[at], turns)
    extents = tuple((0 if rest or at < 0 else pieces) if i == at % len(tile) else n for i, n in enumerate(outer.extents))
    strides = {n: tuple(step * turns if i == at else step for i, step in enumerate(row)) for n, row in outer.strides.items()}
    return Digits(outer.names, extents, strides).collapsed("g"), {n: row[at] for n, row in outer.strides.items()}


def _step(problem: QuantizeProblem, config: EngineConfig, device: DeviceInfo, global_name: str) -> Step:
    groups = _grouped(problem, config["vec"])
    lanes, packs = config["lanes"], config["packs"]
    threads = _THREADS if lanes <= 32 else lanes
    outer = halved(groups.outer)
    bounds = tuple(n for n, _ in groups.bounds)
    kept = {"x", "y", "scale", "zero_point", *bounds, *(["index"] if problem.stochastic else [])}
    outer = Digits(outer.names, outer.extents, {n: row for n, row in outer.strides.items() if n in kept})
    turns = dict(config.knobs).get("turns", 1)
    outer, apart = _apart(outer, turns) if turns > 1 else (outer, {})
    has_global = problem.has(global_name)
    index_steps = (*groups.outer.strides["index"], groups.row_steps.get("index", 0))
    shares = groups.vector and groups.vec % 4 == 0 and groups.column_steps["index"] == 2 and all(s % 8 == 0 for s in index_steps)
    is_whole = groups.vector and not bounds and groups.packs == lanes * packs and outer.size * lanes % threads == 0
    consts = QuantizeGroupsConsts(problem.kind, problem.desc("x").dtype.name, groups.vec, groups.vector, lanes, packs,
                                  groups.packs > lanes * packs, groups.rows, groups.columns, groups.row_packs, outer.consts(),
                                  problem.scale_format, problem.asymmetric, has_global, problem.stochastic, shares, bounds,
                                  groups.column_at, groups.row_at, is_whole,
                                  tuple(known_shifts(outer).items()), near_operands(outer), turns, tuple(apart.items()))
    values: dict[str, ArgValue] = {n: TensorArg(n) if problem.has(n) else 0 for n in outer.strides}
    args = [Arg(f"ptr_{n}", "u64", value) for n, value in values.items()]
    if has_global:
        args.append(Arg("ptr_global", "u64", TensorArg(global_name)))
    if problem.stochastic:
        args += [Arg("ptr_state", "u64", TensorArg("state"))] if problem.has("state") else [Arg(n, "u64", ScalarArg(n))
                                                                                            for n in ("seed", "offset")]
    args += [Arg("num_groups", "u32", outer.size), *outer.args(consts.digits.wide)]
    args += [Arg(f"bound_{n}", "u32", bound) for n, bound in groups.bounds]
    moved_by = ("x", "y", *(["index"] if problem.stochastic else []))
    for n in moved_by:
        by_byte = problem.kind.is_packed and n == "y"
        args.append(Arg(f"row_{n}", "s64", groups.row_steps.get(n, 0) // 2))
        args.append(Arg(f"pack_{n}", "s64", groups.column_steps[n] * groups.vec // 2))
        args.append(Arg(f"step_{n}", "s64", groups.column_steps[n] * (2 if by_byte else 1) // 2))
    grid = ceil_div(outer.size * lanes, threads)
    return Step.of("quantize/groups", problem.op, target_of(device), threads, args, consts, grid, min_ctas_per_sm=consts.resident,
                   suffix=f"{problem.kind.name}_{consts.wide}")


class QuantizeReduced(Engine):
    """Largest numbers by a reduction, scales from them, and the map: any scaling whose blocks divide the tensor. For nvfp4 the global scale
    so, and then groups."""

    id = "quantize.reduced"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, QuantizeProblem)
        if device.capability < MIN_CAPABILITY:
            return refuse("needs sm_80")
        if problem.has("found_global"):
            return _supports(problem)
        if problem.desc("x").numel == 0:
            return refuse("no numbers")
        if problem.scale_format != "f32":
            return refuse(f"scales of {problem.scale_format}")
        if any(n % b for n, b in zip(problem.shape, problem.blocks, strict=True)):
            return refuse(f"blocks {problem.blocks} that do not divide {problem.shape}")
        if len(_split(problem)[0]) > 8:
            return refuse("more than 8 dimensions, with those of blocks")
        return QuantizeMap().check_support(_given(problem), device)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, QuantizeProblem)
        return _configs(problem, device) if problem.has("found_global") else QuantizeMap().configs(_given(problem), device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 9.0 + (problem.num_bytes + problem.operands[0].desc.num_bytes) / (device.bandwidth_gbs * 1e3 * 0.9)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, QuantizeProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        steps: list[Step] = []
        sweeps = _sweeps(problem, device)
        if problem.has("found_global"):
            _find_global(problem, scratch, device, steps)
            if problem.desc("x").numel:
                steps.append(_step(problem, config, device, "found_global"))
            return Build(tuple(steps), scratch.num_bytes)
        shape, strides, axes = _split(problem)
        x = problem.desc("x")
        view = TensorDesc(x.dtype, shape, strides, x.align)
        found = TensorDesc.packed(x.dtype, problem.desc("scale").shape)
        kind = problem.kind
        if problem.asymmetric:
            low, high = (_reduce(problem, op, view, axes, scratch, device, steps) for op in ("min", "max"))
            size = f"(maximum(high, 0) - (least := minimum(low, 0))) / {2**kind.bits - 1}"
            scale = f"(found := where(isinf(s := {size}), s - s, where(s == 0, 1, s)))"
            zero = f"round(clamp({kind.low} - least / found, {kind.low}, {kind.high}))"
            outputs = {"scale": F32, "zero_point": problem.desc("zero_point").dtype}
            _pointwise(problem, f"{scale}, {zero}", {"low": low, "high": high}, outputs, found, scratch, device, steps)
        else:
            if sweeps:
                _sweep(problem, sweeps, scratch, device, steps)
            else:
                amax = _reduce(problem, "amax", view, axes, scratch, device, steps)
                expression = f"where(isinf(amax), amax - amax, where((s := amax / {kind.largest!r}) == 0, 1, s))"
                _pointwise(problem, expression, {"amax": amax}, {"scale": F32}, found, scratch, device, steps)
        given = _given(problem)
        is_swept = sweeps is not None
        steps.append(map_step(given, QuantizeMap()._walk(given, config["vec"]), device, config["packs"], is_backward=is_swept,
                              follows=is_swept and device.at_least(9, 0)))
        return Build(tuple(steps), scratch.num_bytes)


def _sweeps(problem: QuantizeProblem, device: DeviceInfo) -> TensorDesc | None:
    """A tensor of one scale as (times, CTAs, numbers of a CTA at a time): CTAs that walk over it side by side read its end last, where the
    map begins and finds it in the L2. None where it does not come out even, or CTAs are too few."""
    x = problem.desc("x")
    is_one = problem.scale_format == "f32" and problem.desc("scale").numel == 1 and not problem.asymmetric
    if not is_one or x.strides != TensorDesc.packed(x.dtype, x.shape).strides:
        return None
    numbers = _SWEEP_BYTES // x.dtype.num_bytes
    pieces, rest = divmod(x.numel, numbers)
    ctas = next((n for n in range(4 * device.num_sms, 2 * device.num_sms, -1) if pieces % n == 0), 0)
    if rest or not pieces or not ctas:
        return None
    return TensorDesc(x.dtype, (pieces // ctas, ctas, numbers), (ctas * numbers, numbers, 1), x.align)


def _sweep(problem: QuantizeProblem, view: TensorDesc, scratch: Scratch, device: DeviceInfo, steps: list[Step]) -> None:
    """The scale: of the largest numbers of CTAs, which are a tensor that has the same scale."""
    largest = _reduce(problem, "amax", view, (0, 2), scratch, device, steps)
    few = TensorDesc.packed(view.dtype, (view.shape[1],))
    operands = {"x": few, "y": TensorDesc.packed(problem.kind.storage, few.shape), "scale": problem.desc("scale")}
    if problem.kind.is_packed:
        operands["y"] = TensorDesc.packed(problem.kind.storage, (-(-few.shape[0] // 2),))
    attrs = (("kind", problem.kind.name), ("scaling", "tensor"))
    build, _ = cheapest("dynamic_quantize", tuple(operands.items()), attrs, problem.policy, device, (QuantizeGroups(),))
    places = {"x": largest, "y": scratch.take(operands["y"].num_bytes), "scale": TensorArg("scale")}
    steps += [replace(step, spec=replace(step.spec, follows=device.at_least(9, 0)))
              for step in moved(build, scratch.take(build.workspace_bytes), **places)]


def _find_global(problem: QuantizeProblem, scratch: Scratch, device: DeviceInfo, steps: list[Step]) -> None:
    x = problem.desc("x")
    amax = _reduce(problem, "amax" if x.numel else "sum", x, tuple(range(x.rank)), scratch, device, steps)  # the sum of nothing is 0
    expression = "where(isinf(amax), amax - amax, where((s := amax / 2688) == 0, 1, s))"
    _pointwise(problem, expression, {"amax": amax}, {"found_global": F32}, TensorDesc.packed(x.dtype, ()), scratch, device, steps)


def _reduce(problem: QuantizeProblem, op: str, x: TensorDesc, axes: tuple[int, ...], scratch: Scratch, device: DeviceInfo,
            steps: list[Step]) -> Any:
    kept = tuple(n for i, n in enumerate(x.shape) if i not in axes)
    y = TensorDesc.packed(x.dtype, kept)
    build, _ = cheapest("reduce", (("x", x), ("y", y)), (("op", op), ("axes", axes)), problem.policy, device,
                        reduce_tree.ENGINES["reduce"])
    place, workspace = scratch.take(y.num_bytes), scratch.take(build.workspace_bytes)
    steps += moved(build, workspace, x=TensorArg("x"), y=place)
    return place


def _pointwise(problem: QuantizeProblem, expression: str, places: dict[str, Any], outputs: Mapping[str, Any], found: TensorDesc,
               scratch: Scratch, device: DeviceInfo, steps: list[Step]) -> None:
    names = ("y",) if len(outputs) == 1 else tuple(f"y{i}" for i in range(len(outputs)))
    operands = [(n, found) for n in places] + [(n, problem.desc(role)) for n, role in zip(names, outputs, strict=True)]
    attrs = (("expression", expression), ("dtype", tuple(t.name for t in outputs.values())))
    build, _ = cheapest("pointwise", tuple(operands), attrs, problem.policy, device, pointwise_map.ENGINES["pointwise"])
    at = places | {n: TensorArg(role) for n, role in zip(names, outputs, strict=True)}
    steps += moved(build, scratch.take(build.workspace_bytes), **at)


def _split(problem: QuantizeProblem) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """(shape and strides of x with a dimension of blocks and one within them in place of each, the ones within), in the order of scales."""
    x = problem.desc("x")
    shape: list[int] = []
    strides: list[int] = []
    axes = []
    for i, (n, block, stride) in enumerate(zip(problem.shape, problem.blocks, x.strides, strict=True)):
        if i in problem.scale_dims:
            shape.append(n // block)
            strides.append(stride * block)
        if block > 1 or i not in problem.scale_dims:
            axes.append(len(shape))
            shape.append(block if i in problem.scale_dims else n)
            strides.append(stride)
    return tuple(shape), tuple(strides), tuple(axes)


def _given(problem: QuantizeProblem) -> QuantizeProblem:
    """The same with scales that are there."""
    names = ("x", "scale", "zero_point", "state", "y")
    operands = (*(Operand(n, problem.desc(n), n == "y") for n in names if problem.has(n)), *_global_of(problem))
    return replace(problem, op="quantize", operands=operands, asymmetric=False)


class QuantizeTwice(Engine):
    """Codes of four bits whose neighbours in a byte have scales of their own: scales as of codes of a byte each, which nobody reads, and
    the map."""

    id = "quantize.twice"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, QuantizeProblem)
        if device.capability < MIN_CAPABILITY:
            return refuse("needs sm_80")
        if not problem.kind.is_packed or groups_of(problem) is not None:
            return refuse("codes side by side share their scale")
        return _supports(_of_bytes(problem)) and QuantizeMap().check_support(_given(problem), device)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, QuantizeProblem)
        return _configs(_of_bytes(problem), device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 6.0 + 4.0 * (problem.num_bytes + problem.operands[0].desc.num_bytes) / (device.bandwidth_gbs * 1e3)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, QuantizeProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        steps: list[Step] = []
        places: dict[str, Any] = {o.name: TensorArg(o.name) for o in problem.operands}
        if problem.has("found_global"):
            _find_global(problem, scratch, device, steps)
            places["global_scale"] = TensorArg("found_global")
        wide, given = _of_bytes(problem), _given(problem)
        steps.append(relocated(_step(wide, config, device, "global_scale"), places | {"y": scratch.take(wide.desc("y").num_bytes)}))
        chosen = QuantizeMap().configs(given, device)[0]
        steps.append(relocated(map_step(given, QuantizeMap()._walk(given, chosen["vec"]), device, chosen["packs"]), places))
        return Build(tuple(steps), scratch.num_bytes)


def _of_bytes(problem: QuantizeProblem) -> QuantizeProblem:
    """The same with a kind of eight bits of which scales are found alike, and a global scale that is there."""
    kind = problem.kind
    like = KINDS["e4m3" if not kind.is_integer else "s8" if kind.low else "u8"]
    like = replace(like, largest=kind.largest, low=kind.low, high=kind.high, exponent=kind.exponent)
    y = Operand("y", TensorDesc.packed(like.storage, problem.shape), True)
    operands = (problem.operands[0], *_global_of(problem), y, *(Operand(n, d, True) for n, d in _outputs_of_scales(problem).items()))
    return replace(problem, operands=operands, kind=like, stochastic=False, scalars=())


def _global_of(problem: QuantizeProblem) -> tuple[Operand, ...]:
    return tuple(Operand("global_scale", problem.desc(n)) for n in ("global_scale", "found_global") if problem.has(n))


ENGINES: dict[str, tuple[Engine, ...]] = {"dynamic_quantize": (QuantizeGroups(), QuantizeReduced(), QuantizeTwice())}
