"""Scans: threads scan a few elements each, then lanes and warps combine what they found in order, tile after tile along the axis.

Two arrangements: "row": the axis lies densely, a thread takes neighbours along it; "column": another dimension does, threads lie across it
and each takes some steps along the axis. A long axis is split: one launch reduces every part but writes nothing else, the next begins each
part from what those before it gave. Or, of rows, chained: parts are read once, each as one tile; CTAs take them in the order in which they
start, publish what theirs give together, and wait for what those before them published: sums of tiles within a group of GROUP, of groups
within a super-group of GROUP groups, and all before that. These are combined in one order, whoever comes first. What is scanned is a
table of expressions: map an element, combine two states, finish.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from ..codegen.elementary import Emitter, literal
from ..codegen.pointwise import Expression, parse
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType, dtype
from ..ops.base import Problem
from ..ops.pointwise import like
from ..ops.scan import ScanProblem, compute_type
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .collapse import by_stride, collapse
from .digits import DigitConsts, Digits, ceil_div, power_of_two

_LIMIT = 2**31
_MOST_SPLITS = 512
GROUP = 32  # tiles of a group, groups of a super-group: a warp reads what one before it published


@dataclass(frozen=True)
class Scan:
    """map: of the inputs to an element's state. combine: of a state a0, a1, ... and the one after it, b0, b1, ... finish: of e0, e1, ...
    (all before the element), s0, s1, ... (with it), and the inputs; outer, outer_map: those of an exclusive scan. neutral: the state of
    nothing; "low" and "high" are the ends of the type's range. inputs: roles; p is the exclusive product of x, head tells whether the
    element's index is its own."""

    inputs: tuple[str, ...]
    map: str
    combine: str
    finish: str
    outer: str
    neutral: tuple[float | str, ...]
    outer_map: str = ""


_LOGSUMEXP = "(m := maximum(a0, b0)), a1 * exp(where(a0 == m, 0, a0 - m)) + b1 * exp(where(b0 == m, 0, b0 - m))"
# Of the maps t -> a0 t + a1, the first first.
_AFFINE = "a0 * b0, b0 * a1 + b1"
SCANS = {
    "cumsum": Scan(("x",), "x", "a0 + b0", "s0", "e0", (0.0,)),
    "cumprod": Scan(("x",), "x", "a0 * b0", "s0", "e0", (1.0,)),
    "logcumsumexp": Scan(("x",), "x, 1", _LOGSUMEXP, "s0 + log(s1)", "e0 + log(e1)", ("low", 0.0)),
    "cummax": Scan(("x",), "", "", "", "", ("low", -1)),
    "cummin": Scan(("x",), "", "", "", "", ("high", -1)),
    # dx_i = p_i S_i, S_i = dy_i + T_(i+1), T_i = x_i S_i;  exclusive: dx_i = p_i U_i, U_(i-1) = dy_i + x_i U_i. No quotient.
    "cumprod_backward": Scan(("dy", "x", "p"), "x, x * dy", _AFFINE, "p * (dy + e1)", "p * e1", (1.0, 0.0), "x, dy"),
    # An element that is its own index gets what came after it, up to the next such one.
    "cummax_backward": Scan(("dy", "head"), "where(head != 0, 0, 1), where(head != 0, 0, dy)", _AFFINE, "where(head != 0, dy + e1, 0)", "",
                            (1.0, 0.0)),
    # dx_i = exp(x_i) sum of dy_k exp(-y_k), scaled by the largest exp(-y_k); y = -inf gives no gradient.
    "logcumsumexp_backward": Scan(("dy", "x", "y"), "where(y == -1e999, -1e999, -y), where(y == -1e999, 0, dy)", _LOGSUMEXP,
                                  "where(x == -1e999, 0, s1 * exp(s0 + x))", "where(x == -1e999, 0, e1 * exp(e0 + x))", ("low", 0.0)),
}


@dataclass(frozen=True)
class Stream:
    """An operand of a scan. piece: elements of one access, along the axis ("row") or across ("column", where it is the width or 1)."""

    name: str
    dtype: DType
    piece: int


@dataclass(frozen=True)
class ScanConsts:
    """along: threads along the axis; across: threads side by side; items: steps of a thread; width: neighbours across of a thread.

    mode: "scan", or "totals": what a part gives together. carries: parts before this one are counted in. staged: a warp hands results of
    more than 16 bytes a thread round through shared memory, so that what it stores lies side by side. chained: see above.
    """

    kind: str
    path: str
    compute: str
    states: tuple[str, ...]
    inputs: tuple[Stream, ...]
    outputs: tuple[Stream, ...]
    along: int
    across: int
    items: int
    width: int
    reverse: bool
    exclusive: bool
    digits: DigitConsts
    mode: str
    carries: bool
    staged: bool = False
    chained: bool = False

    @property
    def is_row(self) -> bool:
        return self.path == "row"

    @property
    def is_arg(self) -> bool:
        return self.kind in ("cummax", "cummin")

    @property
    def lanes(self) -> int:
        """Threads of a warp that follow one another along the axis."""
        return min(self.along, 32) if self.is_row else 32 // min(self.across, 32)

    @property
    def unit(self) -> int:
        """Lanes from one of them to the next."""
        return 1 if self.is_row else self.across

    @property
    def warps(self) -> int:
        """Warps that follow one another along the axis."""
        return self.along // self.lanes

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(8 if t in ("f64", "s64") else 4 for t in self.states)

    @property
    def words(self) -> int:
        """Words of 64 bits, each 32 bits of a state and the mark that they are there, of a published state."""
        return sum(self.sizes) // 4

    @property
    def needed(self) -> tuple[Stream, ...]:
        """The inputs that this launch reads."""
        names = set(self.expression("map").args) if not self.is_arg else {"x"}
        return tuple(s for s in self.inputs if self.mode == "scan" or s.name in names)

    def state(self, stem: str, item: int, column: int) -> list[str]:
        """The registers of a state."""
        return [f"%{stem}_{item}_{column}_{k}" for k in range(len(self.states))]

    def element(self, item: int, column: int) -> dict[str, str]:
        """The registers of an element's inputs."""
        return {s.name: f"%{s.name}_{item}_{column}" for s in self.inputs}

    def stored(self, stream: Stream, item: int) -> list[tuple[int, int]]:
        """(item, column) of one access, in the order of memory."""
        if self.is_row:
            found = [(item + j, 0) for j in range(stream.piece)]
            return found[::-1] if self.reverse else found
        return [(item, w) for w in range(self.width)]

    def loaded(self, stream: Stream, item: int) -> list[str]:
        """The registers that one access fills, in the order of memory."""
        return [f"%{stream.name}_{i}_{w}" for i, w in self.stored(stream, item)]

    def held(self, stream: Stream) -> str:
        """The type of an output's elements in registers."""
        return "s32" if self.is_arg and stream.name == "indices" else self.compute

    def stages(self, stream: Stream) -> bool:
        """Whether an output goes through shared memory."""
        wide = stream.piece * stream.dtype.num_bytes > 16
        return self.staged and self.mode == "scan" and self.is_row and self.lanes == 32 and stream.piece == self.items and wide

    @property
    def stage_bytes(self) -> int:
        """Shared memory of a thread."""
        return max((self.items * (8 if self.held(s)[1:] == "64" else 4) for s in self.outputs if self.stages(s)), default=0)

    def given(self, count: int) -> list[str]:
        return [f"%given{j}" for j in range(count)]

    def neutral(self, k: int) -> str:
        value = SCANS[self.kind].neutral[k]
        kind = self.states[k]
        if isinstance(value, str):
            low = value == "low"
            if kind[0] == "s":
                bits = int(kind[1:])
                return str(-(2 ** (bits - 1)) if low else 2 ** (bits - 1) - 1)
            value = float("-inf" if low else "inf")
        return literal(value, kind) if kind[0] == "f" else str(int(value))

    def expression(self, part: str) -> Expression:
        row = SCANS[self.kind]
        text = {"map": (row.outer_map or row.map) if self.exclusive else row.map, "combine": row.combine,
                "finish": row.outer if self.exclusive else row.finish}[part]
        return parse(text)

    def map(self, inputs: dict[str, str], state: Sequence[str]) -> str:
        """PTX: the state of an element; the index of cummax is set by the template."""
        if self.is_arg:
            return f"    mov.{_bits(self.compute)} {state[0]}, {inputs['x']};\n"
        expression = self.expression("map")
        return expression.lower({n: inputs[n] for n in expression.args}, state, self.compute)

    def combine(self, a: Sequence[str], b: Sequence[str], result: Sequence[str]) -> str:
        """PTX: result = combine(a, b), a before b; result may be either."""
        if self.is_arg:
            return self._take_later(a, b, result)
        names = {f"a{i}": r for i, r in enumerate(a)} | {f"b{i}": r for i, r in enumerate(b)}
        expression = self.expression("combine")
        return expression.lower({n: names[n] for n in expression.args}, result, self.compute)

    def _take_later(self, a: Sequence[str], b: Sequence[str], result: Sequence[str]) -> str:
        """The later one unless the earlier is better; NaN is better than all but a later NaN. Nothing has the index -1."""
        e, t, index = Emitter(), self.compute, self.states[1]
        take = e(f"setp.{'ge' if self.kind == 'cummax' else 'le'}.{t}", b[0], a[0])
        if t[0] == "f":
            take = e("or.pred", take, e(f"setp.nan.{t}", b[0], b[0]))
        take = e("and.pred", take, e(f"setp.ge.{index}", b[1], "0"))
        moves = [f"selp.{_bits(t)} {result[0]}, {b[0]}, {a[0]}, {take};", f"selp.{_bits(index)} {result[1]}, {b[1]}, {a[1]}, {take};"]
        return "\n".join(["    {", *(f"        {line}" for line in (*e.declarations(), *e.lines, *moves)), "    }", ""])

    def finish(self, before: Sequence[str], after: Sequence[str], inputs: dict[str, str], result: str) -> str:
        """PTX: an output, in the compute type."""
        expression = self.expression("finish")
        names = {f"e{i}": r for i, r in enumerate(before)} | {f"s{i}": r for i, r in enumerate(after)} | inputs
        return expression.lower({n: names[n] for n in expression.args}, [result], self.compute)


def _bits(kind: str) -> str:
    return kind if kind[0] == "f" else "b" + kind[1:]


@dataclass(frozen=True)
class Source:
    """An operand: its description, of the problem's shape, and where it lies."""

    name: str
    desc: TensorDesc
    value: ArgValue


@dataclass(frozen=True)
class _Space:
    """The collapsed dimensions across the axis, innermost last, in bytes; along: bytes of one step of each operand."""

    extents: tuple[int, ...]
    rows: dict[str, tuple[int, ...]]
    along: dict[str, int]
    steps: int

    @property
    def columns(self) -> int:
        return prod(self.extents)


def _space(sources: Sequence[Source], axis: int) -> _Space:
    first = sources[0].desc
    kept = [i for i in range(first.rank) if i != axis]
    kept = [kept[i] for i in by_stride([first.shape[k] for k in kept], [first.strides[k] for k in kept])]
    extents, rows = collapse([first.shape[i] for i in kept],
                             [[s.desc.strides[i] * s.desc.dtype.num_bytes for i in kept] for s in sources])
    return _Space(extents, {s.name: r for s, r in zip(sources, rows, strict=True)},
                  {s.name: s.desc.strides[axis] * s.desc.dtype.num_bytes for s in sources}, first.shape[axis])


def _is_aligned(desc: TensorDesc, strides: Sequence[int], count: int) -> bool:
    num_bytes = min(16, count * desc.dtype.num_bytes)
    return desc.align % num_bytes == 0 and all(s % num_bytes == 0 for s in strides)


def _row_piece(source: Source, space: _Space, items: int) -> int:
    """Elements along the axis that one access takes; of 4 bytes or more, that neighbouring accesses of 16 bytes take."""
    size = source.desc.dtype.num_bytes
    piece = items if size >= 4 else min(items, 16 // size)
    while piece > 1 and (space.along[source.name] != source.desc.dtype.num_bytes or space.steps % piece
                         or not _is_aligned(source.desc, space.rows[source.name], piece)):
        piece //= 2
    return piece


def _width(sources: Sequence[Source], space: _Space, most: int) -> int:
    """Neighbours across that every operand holds together, aligned."""
    width = most
    while width > 1 and (not space.extents or space.extents[-1] % width or any(
            space.rows[s.name][-1] != s.desc.dtype.num_bytes
            or not _is_aligned(s.desc, (*space.rows[s.name][:-1], space.along[s.name]), width) for s in sources)):
        width //= 2
    return width


class ScanBlock(Engine):
    """Every scan, on any architecture from sm_80; the same bits on every run."""

    id = "scan.block"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        if not isinstance(problem, ScanProblem):
            return refuse("not a scan")
        if prod(n for i, n in enumerate(problem.operands[0].desc.shape) if i != problem.axis) >= _LIMIT - 1024 * 32:
            return refuse("2^31 columns or more")
        return SUPPORTED

    def _sources(self, problem: ScanProblem, product: WorkspaceArg | None = None) -> list[Source]:
        """The operands; with the product p of cumprod's gradient, which lies as x does."""
        found = [Source(o.name, o.desc, TensorArg(o.name)) for o in problem.operands]
        if problem.op == "cumprod_backward":
            found.insert(2, Source("p", like(problem.desc("x"), dtype(compute_type(problem))), product or WorkspaceArg()))
        return found

    def _states(self, problem: ScanProblem) -> tuple[str, ...]:
        compute = compute_type(problem)
        if problem.op in ("cummax", "cummin"):
            return compute, "s32"
        return (compute,) * len(SCANS[problem.op].neutral)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ScanProblem)
        sources = self._sources(problem)
        space = _space(sources, problem.axis)
        states = self._states(problem)
        first = sources[0]
        others = [abs(r) for n, r in zip(space.extents, space.rows[first.name], strict=True) if n > 1 and r]
        is_dense = abs(space.along[first.name]) <= min(others, default=2**62)
        wide = any(t in ("f64", "s64") for t in states)
        found = []
        for path in ("row", "column") if is_dense or not others else ("column", "row"):
            for threads in (128, 256):
                if path == "row":
                    items = 8 // (len(states) if wide else 1) // (2 if wide else 1)
                    along = min(threads, power_of_two(ceil_div(space.steps, items)))
                    shapes = [(threads, 1) if along > 32 else (along, threads // along)]
                    width = 1
                else:
                    items = 2 if wide and len(states) > 1 else 4
                    smallest = min(s.desc.dtype.num_bytes for s in sources)
                    width = _width(sources, space, max(1, min((4 if wide else 16) // (items * len(states)), 16 // smallest)))
                    line = width * first.desc.dtype.num_bytes
                    most = 16 if line > 4 else 32  # a line of memory and more
                    across = min(most, max(4, power_of_two(ceil_div(space.columns, width))))
                    shapes = [(threads // across, across)]
                    if line * across >= 256 and ceil_div(space.columns, across * width) < 4 * device.num_sms:  # more CTAs of a line each
                        shapes.append((2 * threads // across, across // 2))
                for along, across in shapes:
                    found += self._configs_of(problem, space, device, path, threads, along, across, items, width)
        limit = problem.policy.workspace_limit
        kept = [c for c in found if limit is None or self.build_steps(problem, c, device).workspace_bytes <= limit]
        if limit is not None and not kept:
            kept = [EngineConfig(tuple((k, {"splits": 1, "chained": 0}.get(k, v)) for k, v in found[0].knobs))]
        return tuple(sorted(dict.fromkeys(kept), key=lambda config: self.estimate(problem, config, device)))

    def _configs_of(self, problem: ScanProblem, space: _Space, device: DeviceInfo, path: str, threads: int, along: int, across: int,
                    items: int, width: int) -> list[EngineConfig]:
        """Of one shape of CTAs: in one part, in several, chained; with and without staging."""
        states = self._states(problem)
        tile, ctas = along * items, ceil_div(space.columns, across * width)
        splits = max(1, min(ceil_div(4 * device.num_sms * (256 // threads), ctas), space.steps // (4 * tile), _MOST_SPLITS))
        counts = (splits, splits // 2) if splits >= 8 else (splits, 1) if splits > 1 else (1, 2) if space.steps > 2 * tile else (1,)
        # 64 bytes a thread in stores of 16 fill half a sector each; of 32 bytes no more than half are such.
        size = max(o.desc.dtype.num_bytes for o in problem.outputs)
        stages = (0,) if path == "column" or along < 32 or size * items <= 16 else (1, 0) if size * items > 32 else (0, 1)
        shape = {"path": path, "threads": threads, "along": along, "across": across, "items": items, "width": width}
        found = [EngineConfig.of(**shape, splits=n, staged=k, chained=0) for n in counts for k in stages]
        narrow = len(states) == 1 and not states[0].endswith("64")
        if path == "row" and along == threads == 256 and splits > 1 and narrow:  # fewer barriers for each byte
            found.append(EngineConfig.of(**shape | {"items": 2 * items}, splits=splits, staged=int(2 * size * items > 32), chained=0))
        # The assembler gives chains 120 registers and more before sm_90.
        if path == "row" and along == threads and splits > 1 and problem.op != "cumprod_backward" and device.at_least(9):
            each = items * 2 if narrow else items
            parts = ceil_div(space.steps, along * each)
            if parts * space.columns < _LIMIT:
                chain = shape | {"items": each, "splits": parts, "staged": int(size * each > 32), "chained": 1}
                found.append(EngineConfig.of(**chain))
        return found

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ScanProblem)
        sources = self._sources(problem)
        space = _space(sources, problem.axis)
        first = sources[0]
        others = [abs(r) for n, r in zip(space.extents, space.rows[first.name], strict=True) if n > 1 and r]
        is_dense = abs(space.along[first.name]) <= min(others, default=2**62)
        splits, tile = config["splits"], config["along"] * config["items"]
        traffic = problem.num_bytes / (device.bandwidth_gbs * 1e3) * (
            (1.15 if first.desc.dtype.num_bytes >= 4 else 1.45) if config["chained"] else 1.5 if splits > 1 else 1.0)
        traffic *= 1.0 if (config["path"] == "row") == is_dense else 4.0
        ctas = ceil_div(space.columns, config["across"] * config["width"]) * splits
        rounds = ceil_div(space.steps, tile * splits)
        at_once = device.num_sms * (2048 // config["threads"])
        # The tiles of a CTA follow one another at the latency of memory and of two barriers; the first launch of a split counts again.
        latency = 1.6 * rounds * ceil_div(ctas, at_once) * (2.0 if config["chained"] else 1.7 if splits > 1 else 1.0)
        fewer = min(1.0, ctas / (device.num_sms * 2))
        traffic *= 1.05 if config["threads"] == 256 else 1.0
        traffic *= 0.97 if splits > 1 and not config["chained"] and config["items"] > 8 else 1.0
        if config["path"] == "row" and config["along"] >= 32:
            sizes = [o.desc.dtype.num_bytes * config["items"] for o in problem.outputs]
            traffic *= 1.0 if config["staged"] else 1.0 + 0.12 * (max(sizes) > 16) + 0.38 * (max(sizes) > 32)  # H200: staged rows of f32
        begin = 7.0 if config["chained"] else 3.0 if splits == 1 else 6.0 + 0.02 * splits
        if config["chained"]:
            # How long a tile lives, as measured on an H200: longer where all wait for one row's prefixes; registers bound how many do.
            is_wide = first.desc.dtype.num_bytes >= 4
            tiles = device.num_sms * (65536 // ((56 if is_wide else 80) * config["threads"]))
            traffic /= 1.0 if is_wide else 1.45
            latency = ((5.6 if is_wide else 2.6) + 3.0 / space.columns) * ctas / tiles
        return begin + max(traffic / max(fewer, 0.02) ** 0.5, latency)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ScanProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        steps: list[Step] = []
        product = None
        if problem.op == "cumprod_backward":
            x = problem.desc("x")
            p = like(x, dtype(compute_type(problem)))
            product = scratch.take(p.num_bytes)
            forward = [Source("x", x, TensorArg("x")), Source("y", p, product)]
            steps += self._steps(problem, "cumprod", forward, problem.reverse, True, (p.dtype.name,), config, device, scratch)
        reverse = problem.reverse != problem.is_backward
        sources = self._sources(problem, product)
        steps += self._steps(problem, problem.op, sources, reverse, problem.exclusive, self._states(problem), config, device, scratch)
        return Build(tuple(steps), scratch.num_bytes)

    def _steps(self, problem: ScanProblem, kind: str, sources: Sequence[Source], reverse: bool, exclusive: bool, states: tuple[str, ...],
               config: EngineConfig, device: DeviceInfo, scratch: Scratch) -> list[Step]:
        space = _space(sources, problem.axis)
        path, items, splits, along, across = (config[k] for k in ("path", "items", "splits", "along", "across"))
        width = min(config["width"], _width(sources, space, config["width"])) if path == "column" else 1
        count = len(SCANS[kind].inputs)

        def stream(source: Source) -> Stream:
            name = "head" if source.name == "indices" and kind == "cummax_backward" else source.name
            return Stream(name, source.desc.dtype, _row_piece(source, space, items) if path == "row" else width)

        extents = (*space.extents[:-1], space.extents[-1] // width) if space.extents else (1,)
        rows = {s.name: (*space.rows[s.name][:-1], space.rows[s.name][-1] * width) if space.extents else (0,) for s in sources}
        digits = Digits(tuple(f"k{i}" for i in range(len(extents))), extents, rows)
        packs = prod(extents)
        tile = along * items
        chunk = ceil_div(ceil_div(space.steps, splits), tile) * tile
        splits = ceil_div(space.steps, chunk)
        inputs, outputs = tuple(stream(s) for s in sources[:count]), tuple(stream(s) for s in sources[count:])
        chained = bool(config["chained"])
        consts = ScanConsts(kind, path, states[0], states, inputs, outputs, along, across, items, width, reverse, exclusive,
                            digits.consts(), "scan", splits > 1 and not chained, bool(config["staged"]), chained)
        totals = [scratch.take(splits * packs * width * size) for size in consts.sizes] if consts.carries else []
        args = [Arg(f"ptr_{s.name}", "u64", s.value) for s in sources]
        args += digits.args(consts.digits.wide)
        args += [Arg(f"step_{s.name}", "s64", space.along[s.name]) for s in sources]
        args += [Arg("num_packs", "u32", packs), Arg("steps", "u32", space.steps), Arg("chunk", "u32", chunk)]
        args += [Arg(f"totals{k}", "u64", t) for k, t in enumerate(totals)]
        launches = [replace(consts, mode="totals", carries=False), consts] if consts.carries else [consts]
        grid = (packs * splits, 1, 1) if chained else (ceil_div(packs, across), splits, 1)
        begin: list[Step] = []
        if chained:  # the count of CTAs begun; then what tiles, groups and super-groups publish
            groups, supers = ceil_div(splits, GROUP), ceil_div(splits, GROUP * GROUP)
            counts = [1, *(packs * n * consts.words for n in (splits, groups, supers + 1))]
            chain = scratch.take(8 * sum(counts))
            places = [replace(chain, byte_offset=chain.byte_offset + 8 * sum(counts[:k])) for k in range(4)]
            args += [Arg("parts", "u32", splits)]
            args += [Arg(n, "u64", at) for n, at in zip(("count", "tile_states", "group_states", "super_states"), places, strict=True)]
            clear = [Arg("num_words", "u32", sum(counts)), Arg("ptr_words", "u64", chain)]
            begin = [Step.of("scan/clear", problem.op, Target.for_arch(device.arch), 256, clear, None, ceil_div(sum(counts), 256))]
        return begin + [Step.of("scan/block", problem.op, Target.for_arch(device.arch), along * across, args, c, grid,
                        suffix=f"{kind}_{path}_{c.mode}") for c in launches]


_OPS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "cumprod_backward", "cummax_backward", "logcumsumexp_backward")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (ScanBlock(),) for op in _OPS}
