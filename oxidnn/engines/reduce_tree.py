"""Tree reductions: every thread reduces some elements, then lanes, warps and, if the reduction was split, CTAs combine in a fixed order.

The index space is outputs x reduced elements, both with digits and strides, so any layout and any axes will do. Two arrangements:
"row": the lanes of a warp lie along the reduction (contiguous reductions, 16-byte loads along it);
"column": they lie along the outputs (a contiguous kept axis, 16-byte loads across outputs).
What is reduced is a table of expressions: map an element, combine two states, finish.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from ..codegen.elementary import Emitter, literal
from ..codegen.fastdiv import magic
from ..codegen.pointwise import Expression, parse
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType
from ..ops.base import Problem
from ..ops.reduce import COUNTED, FRACTIONAL, ReduceProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .collapse import by_stride, collapse
from .digits import power_of_two

THREADS = 256
UNROLL = 4


@dataclass(frozen=True)
class Reduction:
    """map: of "x" to a state. combine: of two states a0, a1, ... and b0, b1, ... finish: of a state s0, s1, ... (and the scalar
    `divisor`). neutral: the element whose state changes nothing; "low" and "high" are the ends of the type's range."""

    map: str
    combine: str
    finish: str = "s0"
    neutral: float | str = 0.0


_LOGSUMEXP = "(m := maximum(a0, b0)), a1 * exp(where(a0 == m, 0, a0 - m)) + b1 * exp(where(b0 == m, 0, b0 - m))"
# Chan's formula for (elements, mean, sum of squared differences from it): w = b0 / (a0 + b0), the new mean is a1 + (b1 - a1) w, and
# a2 + b2 + (b1 - a1)^2 a0 w, multiplied such that nothing joined to nothing stays 0.
_CHAN = "(n := a0 + b0), a1 + (d := b1 - a1) * (w := b0 / maximum(n, 1)), a2 + b2 + d * w * a0 * d"
REDUCTIONS = {
    "sum": Reduction("x", "a0 + b0"),
    "mean": Reduction("x", "a0 + b0", "s0 / scalar(divisor)"),
    "max": Reduction("x", "maximum(a0, b0)", neutral="low"),
    "min": Reduction("x", "minimum(a0, b0)", neutral="high"),
    "prod": Reduction("x", "a0 * b0", neutral=1.0),
    "amax": Reduction("abs(x)", "maximum(a0, b0)"),
    "norm1": Reduction("abs(x)", "a0 + b0"),
    "norm2": Reduction("x * x", "a0 + b0", "sqrt(s0)"),
    "mul_no_zeros": Reduction("where(x == 0, 1, x)", "a0 * b0", neutral=1.0),
    "any": Reduction("where(x != 0, 1, 0)", "maximum(a0, b0)"),
    "all": Reduction("where(x != 0, 1, 0)", "minimum(a0, b0)", neutral=1.0),
    "count_nonzero": Reduction("where(x != 0, 1, 0)", "a0 + b0"),
    "logsumexp": Reduction("x, 1", _LOGSUMEXP, "s0 + log(s1)", neutral="low"),
    # The map is of the neutral element alone: the template counts what it loads (see is_moments).
    "var": Reduction("0, x, 0", _CHAN, "s2 / scalar(divisor)"),
    "std": Reduction("0, x, 0", _CHAN, "sqrt(s2 / scalar(divisor))"),
    # Of ready states alone (see state_steps): sums of weighted values and of weights.
    "weighted_mean": Reduction("x, x", "a0 + b0, a1 + b1", "s0 / s1"),
    "argmax": Reduction("x", "", "s1", neutral="low"),
    "argmin": Reduction("x", "", "s1", neutral="high"),
    "argamax": Reduction("abs(x)", "", "s1"),
}
ARGS = ("argmax", "argmin", "argamax")


@dataclass(frozen=True)
class TreeConsts:
    """One launch of the tree.

    states: the types of a state's components. along: threads along the reduction; outputs: threads along the outputs. vec: elements a
    load takes, along the reduction ("row") or across outputs ("column"). from_partials: the source is ready states, to_partials: so is the
    target. kept, reduced: digits of the two index spaces. wide_index: 64-bit linear indices; wide_offset: 64-bit byte offsets.
    values: type of what is stored beside the indices, if anything.
    """

    kind: str
    path: str
    compute: str
    states: tuple[str, ...]
    source: DType
    target: DType
    along: int
    outputs: int
    vec: int
    kept: int
    reduced: int
    from_partials: bool
    to_partials: bool
    has_tail: bool
    packs_target: bool
    wide_index: bool
    wide_offset: bool
    values: DType | None = None
    streams: bool = False  # what is read leaves the L2 first
    most: int = UNROLL  # loads of a thread under way

    @property
    def load(self) -> str:
        return "ld.global.cs." if self.streams else "ld.global."

    @property
    def width(self) -> int:
        """Outputs of a thread."""
        return self.vec if self.path == "column" else 1

    @property
    def is_arg(self) -> bool:
        return self.kind in ARGS

    @property
    def is_moments(self) -> bool:
        """The state is (elements, mean, sum of squared differences from it), the values those of the source less its first."""
        return self.kind in ("var", "std")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of the state's components."""
        return tuple(8 if t in ("f64", "s64") else 4 for t in self.states)

    @property
    def unroll(self) -> int:
        """Loads in flight: fewer where their states (of moments: their values) would take more than 64 registers."""
        unroll = self.most
        size = self.sizes[0] if self.is_moments and not self.from_partials else sum(self.sizes)
        while unroll > 1 and unroll * self.vec * size > 256:
            unroll //= 2
        return unroll

    def literal(self, value: float) -> str:
        return literal(value, self.compute)

    def neutral(self) -> str:
        value = REDUCTIONS[self.kind].neutral
        if isinstance(value, str):
            low = value == "low"
            if self.compute[0] == "s":
                bits = int(self.compute[1:])
                return str(-(2 ** (bits - 1)) if low else 2 ** (bits - 1) - 1)
            value = float("-inf" if low else "inf")
        return literal(value, self.compute)

    @property
    def neutral_word(self) -> str:
        """Two neutral elements of a source of halves that loads move in pairs, else ""."""
        if self.source.name not in ("f16", "bf16") or self.vec < 2 or self.from_partials:
            return ""
        value = REDUCTIONS[self.kind].neutral
        number = {"low": -np.inf, "high": np.inf}[value] if isinstance(value, str) else value
        return str(int(np.asarray(number, self.source.numpy).view(np.uint16)) * 0x10001)

    def expression(self, part: str) -> Expression:
        row = REDUCTIONS[self.kind]
        return parse({"map": row.map, "combine": row.combine, "finish": row.finish}[part])

    def map(self, x: str, state: Sequence[str]) -> str:
        """PTX: state = map(x); the index component of argmax is set by the template."""
        return self.expression("map").lower({"x": x}, state[:1] if self.is_arg else state, self.compute)

    def combine(self, a: Sequence[str], b: Sequence[str]) -> str:
        """PTX: a = combine(a, b)."""
        if self.is_arg:
            return self._take_better(a, b)
        names = {f"a{i}": r for i, r in enumerate(a)} | {f"b{i}": r for i, r in enumerate(b)}
        return self.expression("combine").lower(names, a, self.compute)

    def _take_better(self, a: Sequence[str], b: Sequence[str]) -> str:
        """The larger (smaller) value, NaN above all, and among equals the smaller index."""
        e, t, index = Emitter(), self.compute, self.states[1]
        better = e(f"setp.{'lt' if self.kind == 'argmin' else 'gt'}.{t}", b[0], a[0])
        tie = e(f"setp.eq.{t}", b[0], a[0])
        if t[0] == "f":
            a_nan, b_nan = e(f"setp.nan.{t}", a[0], a[0]), e(f"setp.nan.{t}", b[0], b[0])
            better = e("or.pred", better, e("and.pred", b_nan, e("not.pred", a_nan)))
            tie = e("or.pred", tie, e("and.pred", a_nan, b_nan))
        take = e("or.pred", better, e("and.pred", tie, e(f"setp.lt.{index}", b[1], a[1])))
        moves = [f"@{take} mov.{t if t[0] == 'f' else 'b' + t[1:]} {a[0]}, {b[0]};", f"@{take} mov.b{index[1:]} {a[1]}, {b[1]};"]
        return "\n".join(["    {", *(f"        {line}" for line in (*e.declarations(), *e.lines, *moves)), "    }", ""])

    def finish(self, state: Sequence[str], result: str) -> str:
        """PTX: result = finish(state), in the compute type."""
        expression = self.expression("finish")
        names = {f"s{i}": r for i, r in enumerate(state)} | {s: f"%{s}" for s in expression.scalars}
        return expression.lower(names, [result], self.compute)

    @property
    def scalars(self) -> tuple[str, ...]:
        return () if self.to_partials else self.expression("finish").scalars


@dataclass(frozen=True)
class _Space:
    """The collapsed index spaces. kept: extents, strides in x, in y and in the values beside indices; reduced: extents, strides in x and,
    for argmax, what a step adds to the logical index."""

    kept: tuple[int, ...]
    kept_x: tuple[int, ...]
    kept_y: tuple[int, ...]
    reduced: tuple[int, ...]
    reduced_x: tuple[int, ...]
    weights: tuple[int, ...]
    kept_v: tuple[int, ...] = ()

    @property
    def num_outputs(self) -> int:
        return prod(self.kept)

    @property
    def num_reduced(self) -> int:
        return prod(self.reduced)


def _space(x: TensorDesc, y: TensorDesc, axes: Sequence[int], is_arg: bool, values: TensorDesc | None = None) -> _Space:
    kept = [i for i in range(x.rank) if i not in axes]
    columns = []
    for target in (y, *((values,) if values is not None else ())):
        y_axes = kept if target.rank == x.rank else range(len(kept))  # keepdims or not
        columns.append({k: target.strides[j] for k, j in zip(kept, y_axes, strict=True)})
    kept = [kept[i] for i in by_stride([x.shape[k] for k in kept], [x.strides[k] for k in kept])]
    shape, (kept_x, kept_y, *kept_v) = collapse([x.shape[i] for i in kept], [[x.strides[i] for i in kept],
                                                                            *([column[i] for i in kept] for column in columns)])
    weights, step = {}, 1
    for i in sorted(axes, reverse=True):
        weights[i] = step
        step *= x.shape[i]
    gone = [list(axes)[i] for i in by_stride([x.shape[a] for a in axes], [x.strides[a] for a in axes])]
    rows = [[x.strides[i] for i in gone]] + ([[weights[i] for i in gone]] if is_arg else [])
    reduced, (reduced_x, *rest) = collapse([x.shape[i] for i in gone], rows)
    return _Space(shape, kept_x, kept_y, reduced, reduced_x, rest[0] if rest else (), kept_v[0] if kept_v else ())


def _vec(space: _Space, x: TensorDesc, path: str) -> int:
    """Elements of a load: up to 16 bytes where the path's innermost dimension is contiguous and everything stays aligned."""
    extents, strides = (space.reduced, space.reduced_x) if path == "row" else (space.kept, space.kept_x)
    others = (space.kept_x if path == "row" else space.reduced_x) + strides[:-1]
    if not extents or strides[-1] != 1:
        return 1
    vec = min(8, 16 // x.dtype.num_bytes)
    # A row's last part pack is handled apart where the reduction is one run.
    whole = path == "row" and len(extents) == 1
    while vec > 1 and ((extents[-1] % vec and not whole) or extents[-1] < vec or any(s % vec for s in others)
                       or x.align % (vec * x.dtype.num_bytes)):
        vec //= 2
    return vec


def compute_type(kind: str, x: DType, y: DType) -> str:
    if kind == "count_nonzero":
        return "f64" if x.is_float else "s64"
    if x.is_float:
        return "f64" if "f64" in (x.name, y.name) else "f32"
    if kind in FRACTIONAL:
        return "f64"
    return "s64" if kind in COUNTED or x.bits == 64 or x.name == "u32" else "s32"


def reduction_configs(x: TensorDesc, y: TensorDesc, axes: Sequence[int], kind: str, device: DeviceInfo,
                      values: TensorDesc | None = None) -> tuple[EngineConfig, ...]:
    """Arrangements for one reduction, most promising first: path, vec, threads along the reduction, splits over CTAs."""
    space = _space(x, y, axes, kind in ARGS, values)
    steps = [abs(s) for s, n in zip(space.reduced_x, space.reduced, strict=True) if s and n > 1]
    along_reduction = bool(steps) and min(steps) <= min((abs(s) for s in space.kept_x if s), default=2**62)
    found: list[EngineConfig] = []
    for path in ("row", "column") if along_reduction or not space.kept else ("column", "row"):
        vec = _vec(space, x, path)
        if path == "row":
            few = 32 * vec * UNROLL * 2  # what a warp takes in two rounds
            alongs = [min(32, power_of_two(-(-space.num_reduced // (vec * 2))))] if space.num_reduced <= few else [THREADS]
            if few < space.num_reduced <= 4 * few:
                alongs = [32, THREADS] if space.num_reduced <= 2 * few else [THREADS, 32]
            # the elements beyond the last whole pack take a thread each
            alongs = [max(n, vec) if space.num_reduced % vec else n for n in alongs]
            arrangements = [(n, THREADS // n) for n in alongs]
            # Measured on an H200: 4 to 9 % faster where there are as many rows
            is_long = space.num_reduced >= 2 * THREADS * vec * UNROLL and vec * x.dtype.num_bytes == 16
            if is_long and space.num_outputs >= 2 * device.num_sms:
                found.append(EngineConfig.of(path=path, vec=vec, along=2 * THREADS, splits=1, loads=2 * UNROLL))
        else:
            outputs = min(32, power_of_two(-(-space.num_outputs // vec)))
            arrangements = [(THREADS // outputs, outputs)]
        for along, outputs in arrangements:
            tiles = -(-space.num_outputs // (outputs * (vec if path == "column" else 1)))
            per_cta = along * (vec if path == "row" else 1) * UNROLL
            splits = max(1, min(4 * device.num_sms // max(1, tiles), space.num_reduced // (2 * per_cta), 1024))
            for s in dict.fromkeys((splits, 1, 3) if along == arrangements[0][0] else (1,)):
                if s == 1 or (space.num_reduced > s and space.num_outputs <= 1 << 20):
                    found.append(EngineConfig.of(path=path, vec=vec, along=along, splits=s))
    return tuple(found)


Located = tuple[TensorDesc, ArgValue]  # a tensor and where it lies: an operand's TensorArg, or a piece of the workspace


def reduction_steps(op: str, source: Located, target: Located, axes: Sequence[int], kind: str, device: DeviceInfo, scratch: Scratch,
                    config: EngineConfig | None = None, correction: int = 0, follows: bool = False,
                    values: Located | None = None) -> list[Step]:
    """The launches that reduce `source` over `axes` into `target`; kind is a key of REDUCTIONS. config: by default the first of
    reduction_configs, whose result is the same bits on every run. follows: the source is what the launch before leaves. values: of ARGS,
    where what the indices point to goes."""
    (x, x_value), (y, y_value) = source, target
    beside = None if values is None else values[0]
    config = config or reduction_configs(x, y, axes, kind, device, beside)[0]
    is_arg = kind in ARGS
    space = _space(x, y, axes, is_arg, beside)
    compute = compute_type(kind, x.dtype, y.dtype if beside is None else beside.dtype)
    path, vec, along, splits = config["path"], config["vec"], config["along"], config["splits"]
    threads = max(THREADS, along)
    outputs = threads // along
    wide = max(space.num_outputs, space.num_reduced) + THREADS * 64 >= 2**31 or dict(config.knobs).get("index") == 64
    described = (x, y, *(() if beside is None else (beside,)))
    reach = max(max(-low, high) * d.dtype.num_bytes for d in described for low, high in [d.offset_range])
    states = (compute, "s64" if wide else "s32") if is_arg else (compute,) * parse(REDUCTIONS[kind].map).num_outputs
    width = vec if path == "column" else 1
    step = vec if path == "row" else 1
    main = space.num_reduced - space.num_reduced % step
    chunk = -(-main // (splits * step)) * step
    packs = (width > 1 and space.kept_y[-1] == 1 and all(s % width == 0 for s in space.kept_y[:-1])
             and y.align % min(16, width * y.dtype.num_bytes) == 0)
    consts = TreeConsts(kind, path, compute, states, x.dtype, y.dtype, along, outputs, vec, len(space.kept), len(space.reduced), False,
                        splits > 1, main != space.num_reduced, packs, wide, wide or reach >= 2**31,
                        None if beside is None else beside.dtype, x.num_bytes > device.l2_bytes, dict(config.knobs).get("loads", UNROLL))
    partials = [scratch.take(splits * space.num_outputs * size) for size in consts.sizes] if splits > 1 else []
    index = "u64" if wide else "u32"
    args = [Arg("x", "u64", x_value), Arg("num_outputs", index, space.num_outputs), Arg("num_reduced", index, space.num_reduced),
            Arg("main", index, main), Arg("chunk", index, max(chunk, step))]
    args += _digit_args(consts, "kept", space.kept, {"x": space.kept_x} | ({} if splits > 1 else _targets(space)))
    args += _digit_args(consts, "reduced", space.reduced, {"x": space.reduced_x} | ({"weight": space.weights} if is_arg else {}))
    results = [y_value] if values is None else [y_value, values[1]]
    args += [Arg(f"into{k}", "u64", p) for k, p in enumerate(partials)] or _result_args(results)
    args += _scalar_args(consts, space.num_reduced, correction)
    tiles = -(-space.num_outputs // (outputs * width))
    first = Step.of("reduce/tree", op, Target.for_arch(device.arch), threads, args, consts, (tiles, splits, 1),
                    follows=follows and device.at_least(9, 0))
    if splits == 1:
        return [first]
    second = replace(consts, to_partials=False)
    return [first, _state_step(op, second, partials, splits, 1, results, space, space.num_reduced, correction, device)]


def _targets(space: _Space) -> dict[str, tuple[int, ...]]:
    """Strides of what is written."""
    return {"y": space.kept_y} | ({"v": space.kept_v} if len(space.kept_v) == len(space.kept) and space.kept else {})


def _result_args(results: Sequence[ArgValue]) -> list[Arg]:
    """Where y lies, and the values beside indices."""
    return [Arg(name, "u64", value) for name, value in zip(("y", "values"), results, strict=False)]


def state_steps(op: str, states: Sequence[ArgValue], count: int, target: Located, kind: str, compute: str, device: DeviceInfo,
                scratch: Scratch) -> list[Step]:
    """The launches that combine `count` ready states of the reduction `kind` into the one element of `target`: component k of the states
    lies, in the type `compute`, side by side at states[k]. "mean" and the like are of `count` elements."""
    y, value = target
    space = _Space((), (), (), (count,), (1,), ())
    consts = TreeConsts(kind, "column", compute, (compute,) * len(states), y.dtype, y.dtype, THREADS, 1, 1, 0, 1, True, False, False, False,
                        count + THREADS * 64 >= 2**31, False)
    splits = max(1, min(4 * device.num_sms, count // (2 * THREADS * UNROLL), 1024))
    steps = []
    if splits > 1:
        partials = [scratch.take(splits * size) for size in consts.sizes]
        steps.append(_state_step(op, replace(consts, to_partials=True), states, count, splits, partials, space, count, 0, device))
        states, count = partials, splits
    return [*steps, _state_step(op, consts, states, count, 1, [value], space, space.num_reduced, 0, device)]


def _state_step(op: str, consts: TreeConsts, states: Sequence[ArgValue], count: int, splits: int,
                results: Sequence[ArgValue], space: _Space, num_reduced: int, correction: int, device: DeviceInfo) -> Step:
    """A tree over states: `count` of them are its reduced axis, outputs lie side by side. consts: of any tree of that
    reduction. results: where the target (and the values beside it) lies, or each component of states again."""
    lanes = min(32, power_of_two(space.num_outputs))
    consts = replace(consts, path="column", along=THREADS // lanes, outputs=lanes, vec=1, kept=len(space.kept), reduced=1,
                     from_partials=True, streams=False, has_tail=False, packs_target=False)
    index = "u64" if consts.wide_index else "u32"
    args = [Arg(f"partial{k}", "u64", s) for k, s in enumerate(states)]
    args += [Arg("num_outputs", index, space.num_outputs), Arg("num_reduced", index, count), Arg("main", index, count),
             Arg("chunk", index, -(-count // splits))]
    args += _digit_args(consts, "kept", space.kept, {} if consts.to_partials else _targets(space))
    args += [Arg(f"into{k}", "u64", r) for k, r in enumerate(results)] if consts.to_partials else _result_args(results)
    args += _scalar_args(consts, num_reduced, correction)
    grid = (-(-space.num_outputs // lanes), splits, 1)
    return Step.of("reduce/tree", op, Target.for_arch(device.arch), THREADS, args, consts, grid, suffix="partials",
                   follows=device.at_least(9, 0))  # never the first: states are what launches leave


def _digit_args(consts: TreeConsts, stem: str, extents: Sequence[int], rows: Mapping[str, Sequence[int]]) -> list[Arg]:
    args = []
    for d in range(1, len(extents)):
        args.append(Arg(f"{stem}_extent{d}", "u64" if consts.wide_index else "u32", extents[d]))
        if not consts.wide_index:
            multiplier, shift = magic(max(1, extents[d]))
            args += [Arg(f"{stem}_multiplier{d}", "u32", multiplier), Arg(f"{stem}_shift{d}", "u32", shift)]
    for name, row in rows.items():
        args += [Arg(f"{stem}_{name}{d}", "s64" if consts.wide_offset else "s32", s) for d, s in enumerate(row)]
    return args


def _scalar_args(consts: TreeConsts, num_reduced: int, correction: int) -> list[Arg]:
    divisor = float(max(0, num_reduced - correction))
    return [Arg(name, "f64" if consts.compute == "f64" else "f32", divisor) for name in consts.scalars]


@dataclass(frozen=True)
class _Parts:
    """What a problem asks of reduction_steps."""

    source: Located
    target: Located
    axes: tuple[int, ...]
    kind: str
    correction: int = 0
    values: Located | None = None

    def configs(self, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        beside = None if self.values is None else self.values[0]
        return reduction_configs(self.source[0], self.target[0], self.axes, self.kind, device, beside)


class ReduceTree(Engine):
    """Any reduction, and the bias gradient of a convolution, on any architecture from sm_80."""

    id = "reduce.tree"

    def _parts(self, problem: Problem) -> _Parts:
        if not isinstance(problem, ReduceProblem):
            rank = problem.desc("dy").rank
            return _Parts((problem.desc("dy"), TensorArg("dy")), (problem.desc("db"), TensorArg("db")), (0, *range(2, rank)), "sum")
        x, offset = problem.source
        source, y = (x, TensorArg("x", offset * x.dtype.num_bytes)), (problem.result, TensorArg("y"))
        if problem.has("indices"):
            return _Parts(source, (problem.desc("indices"), TensorArg("indices")), problem.axes, "arg" + problem.kind, values=y)
        return _Parts(source, y, problem.axes, problem.kind, problem.correction)

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        if not isinstance(problem, ReduceProblem) and problem.op != "conv_bgrad":
            return refuse("not a reduction")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        found = self._parts(problem).configs(device)
        limit = problem.policy.workspace_limit
        kept = [c for c in found if limit is None or c["splits"] == 1 or self.build_steps(problem, c, device).workspace_bytes <= limit]
        return tuple(sorted(kept, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        parts = self._parts(problem)
        x, _ = parts.source
        preferred = parts.configs(device)[0]
        traffic = problem.num_bytes / (device.bandwidth_gbs * 1e3) * (1.0 if config["path"] == preferred["path"] else 2.0)
        # The loads of one thread follow one another at the latency of memory.
        loads = dict(config.knobs).get("loads", UNROLL)
        in_flight = config["along"] * (config["vec"] if config["path"] == "row" else 1) * loads * config["splits"]
        reduced = prod(x.shape[a] for a in parts.axes)
        rounds = -(-reduced // in_flight)
        # Fewer than two CTAs an SM leave the memory idle at times.
        width = config["vec"] if config["path"] == "column" else 1
        ctas = config["splits"] * -(-prod(x.shape) // max(1, reduced) // (max(1, THREADS // config["along"]) * width))
        traffic *= 1 + 0.2 * max(0.0, 1 - ctas / (2 * device.num_sms))
        return (3.0 if config["splits"] == 1 else 5.5) + max(traffic * (1 + 0.3 / config["vec"]), 0.7 * rounds)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        if problem.is_empty:
            return Build(())
        p, scratch = self._parts(problem), Scratch()
        steps = reduction_steps(problem.op, p.source, p.target, p.axes, p.kind, device, scratch, config, p.correction, values=p.values)
        return Build(tuple(steps), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (ReduceTree(),) for op in ("reduce", "reduce_to", "trace", "conv_bgrad")}
