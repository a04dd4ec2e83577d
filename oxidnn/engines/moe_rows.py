"""Assignments sorted by expert, and rows moved between their tokens' order and that of the experts. Nothing goes through the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..codegen import pointwise as expr
from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import S32
from ..ops.base import Problem
from ..ops.moe import MoeProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg
from .composition import Place
from .digits import ceil_div, power_of_two
from .rope import strides, vector

_SMEM = 48 * 1024
WHOLE = 2048  # assignments that one CTA sorts
_CHUNK = 1024  # of a CTA of several
_MOST_CTAS = 64
DEQUANTIZE_THREADS = 256
_VALUES = 64  # registers of a thread for what it adds up


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of a kernel: its description, and where it is."""

    desc: TensorDesc
    place: Place

    def args(self, name: str, vec: int = 0) -> list[Arg]:
        """Its address, bytes from row to row, and from column to column, or from piece to piece of `vec` columns."""
        row, column = strides(name, ("row", "column"), self.desc)
        if vec:
            column = replace(column, name=f"{name}_piece_bytes", value=vec * self.desc.strides[1] * self.desc.dtype.num_bytes)
        return [Arg(f"ptr_{name}", "u64", self.place), row, column]


@dataclass(frozen=True, slots=True)
class SortConsts:
    """ids: their type; mode: "whole", or of several CTAs "count", then "place"; limits: what is beyond a capacity is marked, not placed."""

    ids: str
    topk: int
    experts: int
    warps: int
    mode: str
    limits: bool = False
    clears: bool = False


@dataclass(frozen=True, slots=True)
class RowConsts:
    """quads: pieces of a row, of vec elements (`bytes` together); parts: CTAs of a token; packs: pieces of a thread. lets_go: the next
    launch starts at once, and waits itself for what those before this one make."""

    dtype: str
    compute: str
    vec: int
    quads: int
    parts: int
    topk: int
    packs: int = 1
    bytes: int = 0
    is_weighted: bool = False
    lets_go: bool = False

    def names(self, stem: str, first: int) -> list[str]:
        """The registers of a piece's elements."""
        return [f"%{stem}{first + i}" for i in range(self.vec)]


@dataclass(frozen=True, slots=True)
class GateConsts:
    """gate: an expert's middle over "g" and "u"."""

    dtype: str
    compute: str
    vec: int
    quads: int
    topk: int
    element_bytes: int
    gate: Expression

    def names(self, stem: str, first: int) -> list[str]:
        return [f"%{stem}{first + i}" for i in range(self.vec)]

    def _lower(self, expression: Expression, element: int, results: Sequence[str]) -> str:
        names = {"g": f"%g{element}", "u": f"%u{element}", "dy": f"%dh{element}"}
        return expression.lower(names, [f"%{r}{element}" for r in results], self.compute)

    def lower_forward(self, element: int) -> str:
        return self._lower(self.gate, element, ("h",))

    def lower_gradients(self, element: int) -> str:
        return self._lower(expr.outputs(self.gate.differentiate("g"), self.gate.differentiate("u")), element, ("dg", "du"))


@dataclass(frozen=True, slots=True)
class ExpandConsts:
    ids: str
    experts: int


@dataclass(frozen=True, slots=True)
class DequantizeConsts:
    """Of codes ("s4": two to a byte), of scales, of numbers, and how many bytes these have. A matrix has rows of `pieces`, of `vec` columns
    each, which have one scale; of those a thread makes `packs`, THREADS apart. ctas: of a matrix."""

    kind: str
    scale: str
    dtype: str
    element_bytes: int
    rows: int
    columns: int
    block: tuple[int, int]
    vec: int
    packs: int

    @property
    def pieces(self) -> int:
        return ceil_div(self.columns, self.vec)

    @property
    def code_bytes(self) -> int:
        """Of a piece."""
        return ceil_div(self.vec, 2) if self.kind == "s4" else self.vec

    @property
    def ctas(self) -> int:
        return ceil_div(self.rows * self.pieces, DEQUANTIZE_THREADS * self.packs)

    def names(self, i: int) -> list[str]:
        """The registers of a piece's numbers."""
        return [f"%number{i * self.vec + e}" for e in range(self.vec)]


def packed(desc: TensorDesc, rows: int, columns: int) -> TensorDesc:
    """Rows of the type of `desc` in the workspace, each from a multiple of 16 bytes on."""
    unit = 16 // desc.dtype.num_bytes
    return TensorDesc(desc.dtype, (rows, columns), (ceil_div(max(columns, 1), unit) * unit, 1))


def launch(template: str, op: str, threads: int, args: list[Arg], consts: Any, grid: int | tuple[int, int, int], device: DeviceInfo,
           suffix: str) -> Step:
    """A short launch, which gets ready while the one before ends where the device can do so."""
    target = Target.for_arch(device.arch)
    return Step.of(f"moe/{template}", op, target, threads, args, consts, grid, follows=target.capability >= (9, 0), suffix=suffix)


def clear_step(op: str, words: Place, step: int, count: int, device: DeviceInfo) -> Step:
    """`count` words of 32 bits, `step` bytes apart, are cleared."""
    args = [Arg("num_experts", "u32", count), Arg("ptr_counts", "u64", words), Arg("counts_bytes", "s64", step)]
    return launch("route_clear", op, 128, args, None, ceil_div(count, 128), device, "")


def _sort(op: str, experts: int, ids: Held, args: list[Arg], limits: bool, device: DeviceInfo, scratch: Scratch,
          cleared: Place | None = None, words: int = 2) -> list[Step]:
    buckets, (_, topk), rows = experts + 1, ids.desc.shape, ids.desc.numel
    num_ctas = 1 if rows <= WHOLE else min(_MOST_CTAS, ceil_div(rows, _CHUNK))
    room = power_of_two((_SMEM // (4 * buckets) - 1) // 2 + 1)  # the most warps whose counts fit beside the sums of all
    warps = max(1, min(32, room, power_of_two(ceil_div(ceil_div(rows, num_ctas), 32))))
    part = ceil_div(ceil_div(rows, num_ctas * warps), 32) * 32
    shared = [Arg("num_items", "u32", rows), Arg("chunk", "u32", part * warps), Arg("part", "u32", part), *ids.args("ids")]
    if num_ctas == 1:
        modes = [("whole", args)]
    else:
        counts = Arg("ptr_counts_of", "u64", scratch.take(4 * num_ctas * buckets))
        first = [a for a in args if a.name == "first_expert"]
        modes = [("count", [counts, *first]), ("place", [*args, counts, Arg("num_ctas", "u32", num_ctas)])]
    steps = []
    for mode, own in modes:
        clears = cleared is not None and mode != "place"
        consts = SortConsts(ids.desc.dtype.name, topk, experts, warps, mode, limits, clears)
        if cleared is not None and clears:
            own = [*own, Arg("ptr_cleared", "u64", cleared), Arg("num_cleared", "u32", words)]
        steps.append(launch("sort", op, 32 * warps, [*shared, *own], consts, num_ctas, device, mode + ("_limits" if limits else "")))
    return steps


def sort_steps(p: MoeProblem, ids: Held, order: Held, inverse: Held, counts: Held, device: DeviceInfo, scratch: Scratch,
               cleared: Place | None = None, words: int = 2) -> list[Step]:
    """order, inverse and counts of the assignments; on the way `words` of 32 bits are cleared."""
    args = [Arg("first_expert", "s64", p.first), Arg("ptr_order", "u64", order.place),
            Arg("order_bytes", "s64", 4 * order.desc.strides[0]), *inverse.args("inverse"),
            Arg("ptr_counts", "u64", counts.place), Arg("counts_bytes", "s64", 4 * counts.desc.strides[0])]
    return _sort(p.op, p.experts, ids, args, False, device, scratch, cleared, words)


def limit_steps(op: str, experts: int, capacity: int, ids: Held, weights: Held, device: DeviceInfo, scratch: Scratch) -> list[Step]:
    """ids turn into their complements, and weights into 0, beyond the first `capacity` of an expert."""
    args = [Arg("first_expert", "s64", 0), Arg("capacity", "u32", capacity), *weights.args("weights")]
    return _sort(op, experts, ids, args, True, device, scratch)


def scatter_step(p: MoeProblem, x: Held, inverse: Held, xs: Held, device: DeviceInfo, lets_go: bool = False) -> Step:
    """Rows of x copied to where their assignments lie."""
    vec = vector(0, x.desc, xs.desc)
    quads = x.desc.shape[1] // vec
    packs = min(4, ceil_div(quads, 32))
    threads = max(32, min(256, power_of_two(ceil_div(quads, packs))))
    parts = ceil_div(quads, threads * packs)
    consts = RowConsts("", "", vec, quads, parts, p.topk, packs, vec * x.desc.dtype.num_bytes, lets_go=lets_go)
    args = [*x.args("x", vec), *xs.args("xs", vec), *inverse.args("inverse")]
    return launch("scatter", p.op, threads, args, consts, p.tokens * parts, device, str(consts.bytes))


def combine_step(p: MoeProblem, ys: Held, inverse: Held, weights: Held | None, y: Held, device: DeviceInfo) -> Step:
    """Weighted (or plain) sums of the rows of each token's assignments."""
    most = max(1, _VALUES // p.topk) // (1 if p.accumulator.num_bytes == 4 else 2)
    vec = min(vector(0, ys.desc, y.desc), 1 << max(0, most.bit_length() - 1))
    quads = ys.desc.shape[1] // vec
    threads = max(32, min(256, power_of_two(quads)))
    parts = ceil_div(quads, threads)
    consts = RowConsts(ys.desc.dtype.name, p.accumulator.name, vec, quads, parts, p.topk, is_weighted=weights is not None)
    args = [*ys.args("ys", vec), *y.args("y", vec), *inverse.args("inverse"), Arg("num_rows", "u32", ys.desc.shape[0]),
            *(weights.args("weights") if weights else ())]
    return launch("combine", p.op, threads, args, consts, p.tokens * parts, device, consts.dtype + ("_weighted" if weights else ""))


def expand_step(p: MoeProblem, counts: Held, ids: Place, device: DeviceInfo) -> Step:
    """ids of rows that were exchanged."""
    pairs, threads = counts.desc.numel, 128
    args = [*counts.args("counts"), Arg("ptr_ids", "u64", ids), Arg("num_pairs", "u32", pairs), Arg("num_rows", "u32", p.tokens)]
    return launch("expand", p.op, threads, args, ExpandConsts(counts.desc.dtype.name, p.experts), max(1, ceil_div(pairs, threads // 32)),
                  device, "")


def _row_threads(quads: int) -> int:
    return max(32, min(256, power_of_two(ceil_div(quads, 2))))


def combine_gradient_step(p: MoeProblem, dy: Held, ys: Held, inverse: Held, weights: Held, dys: Held, dweights: Held,
                          device: DeviceInfo) -> Step:
    vec = vector(0, dy.desc, ys.desc, dys.desc)
    quads = dy.desc.shape[1] // vec
    consts = RowConsts(ys.desc.dtype.name, p.accumulator.name, vec, quads, 1, p.topk)
    args = [*dy.args("dy", vec), *ys.args("ys", vec), *dys.args("dys", vec), *inverse.args("inverse"), *weights.args("weights"),
            *dweights.args("dweights"), Arg("num_rows", "u32", ys.desc.shape[0])]
    return Step.of("moe/combine_gradient", p.op, Target.for_arch(device.arch), _row_threads(quads), args, consts, p.tokens,
                   suffix=consts.dtype)


def gate_gradient_step(p: MoeProblem, z: Held, dh: Held, scaled: Place, dz: Place, order: Place, weights: Held, dweights: Held,
                       device: DeviceInfo) -> Step:
    """`scaled` as dh lies, dz as z."""
    vec = vector(0, dh.desc) if p.kind.num_bytes < 8 else 1
    while p.inter * p.kind.num_bytes % (vec * p.kind.num_bytes) or p.inter % vec:
        vec //= 2
    consts = GateConsts(p.kind.name, p.accumulator.name, min(vec, 4), p.inter // min(vec, 4), p.topk, p.kind.num_bytes, p.gate)
    args = [Arg("ptr_z", "u64", z.place), Arg("z_row_bytes", "s64", z.desc.strides[0] * p.kind.num_bytes),
            Arg("ptr_dh", "u64", dh.place), Arg("h_row_bytes", "s64", dh.desc.strides[0] * p.kind.num_bytes),
            Arg("ptr_scaled", "u64", scaled), Arg("ptr_dz", "u64", dz), Arg("up_bytes", "u64", p.inter * p.kind.num_bytes),
            Arg("ptr_order", "u64", order),
            *weights.args("weights"), *dweights.args("dweights")]
    return Step.of("moe/gate_gradient", p.op, Target.for_arch(device.arch), _row_threads(consts.quads), args, consts, p.rows,
                   suffix=f"{p.activation}_{consts.dtype}")


def dequantize_step(p: MoeProblem, name: str, counts: Place, result: Held, device: DeviceInfo) -> Step:
    """The numbers of the matrices w_`name` of experts that have rows; result: (experts, rows, columns)."""
    w, scale = p.desc(f"w_{name}"), p.desc(f"scale_{name}")
    _, rows, columns = result.desc.shape
    kind = "s4" if w.dtype.name == "u8" else w.dtype.name
    steps = [*strides("w", ("expert", "row", "column"), w), *strides("scale", ("expert", "row", "column"), scale),
             *strides("result", ("expert", "row"), TensorDesc(p.kind, result.desc.shape[:2], result.desc.strides[:2]))]
    # One instruction each where they have 32 bits.
    steps = [replace(s, type="u32") if isinstance(s.value, int) and 0 <= s.value < 2**32 else s for s in steps]
    args = [Arg("ptr_counts", "u64", counts), Arg("ptr_w", "u64", TensorArg(f"w_{name}")),
            Arg("ptr_scale", "u64", TensorArg(f"scale_{name}")), Arg("ptr_result", "u64", result.place), *steps]
    # Pieces of 16 bytes of numbers or more, whose codes are whole words, where they are side by side and have one scale.
    vec = 8 if kind == "s4" else 16 // p.kind.num_bytes
    size = vec // 2 if kind == "s4" else vec
    is_dense = w.strides[2] == 1 and all(s % size == 0 for s in w.strides[:2]) and w.align % size == 0
    is_dense &= kind != "e4m3" or device.at_least(9, 0)  # which widens pairs at this version of PTX
    if not is_dense or columns % vec or (p.block[1] % vec and p.block[1] < columns):
        vec = 2 if kind == "s4" and p.block[1] % 2 == 0 else 1
    consts = DequantizeConsts(kind, scale.dtype.name, p.kind.name, p.kind.num_bytes, rows, columns, p.block, vec, 4)
    return launch("dequantize", p.op, DEQUANTIZE_THREADS, args, consts, (consts.ctas, p.experts, 1), device, f"{kind}_{consts.dtype}")


def held(p: Problem, name: str) -> Held:
    """An operand where the caller has it."""
    return Held(p.desc(name), TensorArg(name))


def index(rows: int, columns: int = 1) -> TensorDesc:
    """Numbers in the workspace."""
    return TensorDesc.packed(S32, (rows, columns))


class _Rows(Engine):
    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 5.0 + problem.num_bytes / (device.bandwidth_gbs * 800)


class MoePermute(_Rows):
    id = "moe_permute.sort"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p, scratch = problem, Scratch()
        assert isinstance(p, MoeProblem)
        steps = sort_steps(p, held(p, "ids"), held(p, "order"), held(p, "inverse"), held(p, "counts"), device, scratch)
        if p.rows * p.hidden:
            steps.append(scatter_step(p, held(p, "x"), held(p, "inverse"), held(p, "xs"), device))
        return Build(tuple(steps), scratch.num_bytes)


class MoeUnpermute(_Rows):
    id = "moe_unpermute.rows"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, MoeProblem)
        if p.is_empty:
            return Build(())
        weights = held(p, "weights") if p.has("weights") else None
        return Build((combine_step(p, held(p, "ys"), held(p, "inverse"), weights, held(p, "y"), device),))


class MoeUnpermuteBackward(_Rows):
    id = "moe_unpermute_backward.rows"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, MoeProblem)
        if p.is_empty:
            return Build(())
        dy, ys, inverse, weights, dys, dweights = (held(p, n) for n in ("dy", "ys", "inverse", "weights", "dys", "dweights"))
        return Build((combine_gradient_step(p, dy, ys, inverse, weights, dys, dweights, device),))


ENGINES: dict[str, tuple[Engine, ...]] = {"moe_permute": (MoePermute(),), "moe_unpermute": (MoeUnpermute(),),
                                          "moe_unpermute_backward": (MoeUnpermuteBackward(),)}
