"""The direct algorithm for affine matmuls: a thread or a warp per element of D, any type, strides and bounds. Takes what others refuse."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..codegen.fastdiv import magic
from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from ..dtypes import S32
from ..ops.epilogue import TYPES
from ..ops.gemm import FP8, INT8
from .affine import AffineMatmul, Bound, IndexSpace, Prologue, Source, Target
from .affine_tiling import RaggedConsts, epilogue_type, ragged_arguments, source_elements
from .base import SUPPORTED, Arg, Build, EngineConfig, ScalarArg, Step, Support, TensorArg, refuse

_THREADS = 128
_CTAS_PER_SM = 4  # asked of the assembler, which otherwise unrolls loops over k into more than 200 registers
_MAX_UNROLL = 8
_WARP = 32


@dataclass(frozen=True, slots=True)
class OutputDigit:
    """A digit of the thread's linear index; multiplier and shift divide by the extent."""

    extent: int
    multiplier: int
    shift: int


@dataclass(frozen=True, slots=True)
class Walk:
    """How a tensor is walked, in bytes: per output digit, per loop (advance at its end), and per unrolled step of the innermost digit."""

    dtype: str
    digit_bytes: tuple[int, ...]
    loop_bytes: tuple[int, ...] = ()
    unit_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Coordinate:
    """A bound as a running coordinate: start, coefficients as in Walk, and the loop in which it is compared (-1 before all loops,
    the number of loops in the unrolled body). is_group: it counts from the first term of the element's group to the last."""

    extent: int
    start: int
    digit_coefs: tuple[int, ...]
    loop_steps: tuple[int, ...]
    unit_step: int
    level: int
    is_group: bool = False


@dataclass(frozen=True, slots=True)
class DirectConsts:
    """lanes: neighbouring threads that share an element (the last digit). is_wide: the linear index needs 64 bits.
    loops: counts of the loops over k, outermost first; unroll: steps of the innermost k digit in the body, 0 if k is empty."""

    acc: str
    lanes: int
    total: int
    is_wide: bool
    digits: tuple[OutputDigit, ...]
    loops: tuple[int, ...]
    unroll: int
    a: Walk
    b: Walk
    d: Walk
    operands: tuple[Walk, ...]
    operand_names: tuple[str, ...]
    scalars: tuple[str, ...]
    bounds: tuple[Coordinate, ...]
    epilogue: Any = None
    compute: str = "f32"  # of the epilogue
    up: Walk | None = None  # a second operand B
    scales: tuple[Walk | None, Walk | None] = (None, None)  # of A and of B, with which each product is multiplied
    aux: Walk | None = None  # the epilogue's second output
    zeros: tuple[Walk | None, Walk | None] = (None, None)  # of A and of B, taken from each of their elements
    addend: str = ""  # the operand, of integers, that is added to the sum before it is converted
    amax: bool = False  # of the epilogue's second output the largest size is raised
    prologue: Prologue | None = None
    prologue_walks: tuple[Walk, ...] = ()
    ragged: RaggedConsts | None = None
    group_digit: int = -1  # that is a row (ragged.side "m") or a group ("k"); -1: there is only one
    group_bytes: int = 0  # from a group's B to the next

    @property
    def walks(self) -> tuple[tuple[str, Walk], ...]:
        """(name, walk) of what is read in the loops."""
        named = (("a", self.a), ("b", self.b), ("up", self.up), ("scale_a", self.scales[0]), ("scale_b", self.scales[1]))
        more = tuple((f"term{i}", walk) for i, walk in enumerate(self.prologue_walks))
        return tuple((name, walk) for name, walk in named if walk is not None) + more

    def transformed(self, step: int) -> str:
        """PTX: the prologue applied to the element of unrolled step `step`."""
        assert self.prologue is not None
        element = f"%{self.prologue.side}_value{step}"
        terms = {s.name: f"%term{i}_value{step}" for i, s in enumerate(self.prologue.operands)}
        return self.prologue.expression.lower({"x": element} | terms, [element], self.acc)

    @property
    def sums(self) -> tuple[tuple[str, str], ...]:
        """(sum, operand B) of each."""
        return (("acc", "b"), ("acc_up", "up")) if self.up is not None else (("acc", "b"),)

    @property
    def registers(self) -> dict[str, str]:
        """Registers of the names in the epilogue."""
        converted = "" if self.acc == self.compute else "_value"
        return ({"acc": f"%acc{converted}", "up": f"%acc_up{converted}"}
                | {name: f"%operand{i}" for i, name in enumerate(self.operand_names)}
                | {name: f"%scalar{i}" for i, name in enumerate(self.scalars)})

    def bounds_at(self, level: int) -> tuple[tuple[int, Coordinate], ...]:
        return tuple((i, bound) for i, bound in enumerate(self.bounds) if bound.level == level)

    def predicate(self, level: int) -> str:
        """The predicate that holds inside loop `level`: that of the innermost enclosing loop with a comparison, "" if none has."""
        for at in range(level, -2, -1):
            if self.bounds_at(at):
                return f"%p_inside{at + 1}"
        return ""


def _unroll(extent: int, byte_strides: tuple[int, int]) -> int:
    """Steps of the innermost digit in the loop body: all of a short one, else a divisor of the extent."""
    if any(abs(s) * _MAX_UNROLL >= 2**31 for s in byte_strides):  # offsets of loads are 32-bit immediates
        return 1
    return extent if extent <= _MAX_UNROLL else next((u for u in (4, 3, 2) if extent % u == 0), 1)


def _advances(strides: tuple[int, ...], counts: tuple[int, ...]) -> tuple[int, ...]:
    """What is added at the end of each loop's body: its stride less what the next inner loop has run up."""
    inner = [c * s for c, s in zip(counts[1:], strides[1:], strict=True)] + [0]
    return tuple(s - back for s, back in zip(strides, inner, strict=False))


def _lane_digit(am: AffineMatmul) -> int | None:
    """The digit of k to deal out to the lanes of a warp: of those that keep most lanes busy the one nearest in memory, if any does."""
    busy = [i for i, e in enumerate(am.k.extents) if e and 5 * e >= 3 * _WARP * -(-e // _WARP)]
    return min(busy, key=lambda i: abs(am.a.k_strides[i]) + abs(am.b.k_strides[i]), default=None)


def _deal(am: AffineMatmul, digit: int) -> AffineMatmul:
    """k digit `digit` counts in steps of a warp; what its last round has beyond the extent is outside a bound of A."""
    def scaled(weights: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(w * _WARP if i == digit else w for i, w in enumerate(weights))

    extent = am.k.extents[digit]
    extents = tuple(-(-e // _WARP) if i == digit else e for i, e in enumerate(am.k.extents))
    step = tuple(_WARP if i == digit else 0 for i in range(len(extents)))
    rest = (Bound((0,) * len(am.m.extents), step, 0, extent),) if extent % _WARP else ()
    sources: dict[str, Any] = {
        name: replace(s, k_strides=scaled(s.k_strides), bounds=tuple(replace(x, k_coefs=scaled(x.k_coefs)) for x in s.bounds))
        for name, s in (("a", am.a), ("b", am.b), ("up", am.up), ("scale_a", am.scale_a), ("scale_b", am.scale_b),
                        ("zero_a", am.zero_a), ("zero_b", am.zero_b)) if s is not None}
    sources["a"] = replace(sources["a"], bounds=sources["a"].bounds + rest)
    if am.prologue is not None:
        operands = tuple(replace(s, k_strides=scaled(s.k_strides)) for s in am.prologue.operands)
        sources["prologue"] = replace(am.prologue, operands=operands)
    return replace(am, k=IndexSpace(extents), **sources)


def _consts(am: AffineMatmul, lanes: int) -> DirectConsts:
    if am.ragged is not None and am.ragged.side == "k" and am.k.size:  # the group's own terms, of all
        own = Bound((0,) * len(am.m.extents), (1,) * len(am.k.extents), 0, am.k.size)
        am = replace(am, a=replace(am.a, bounds=(own, *am.a.bounds)))
    # Output digits, ordered so that neighbouring threads write neighbouring addresses of D; lanes are innermost.
    dealt = _lane_digit(am) if lanes > 1 else None
    if dealt is not None:
        am = _deal(am, dealt)
    spaces = [("b", i, e) for i, e in enumerate(am.batch.extents)] + [("m", i, e) for i, e in enumerate(am.m.extents)] \
        + [("n", i, e) for i, e in enumerate(am.n.extents)]
    strides_of_d = {"b": am.d.batch_strides, "m": am.d.m_strides, "n": am.d.n_strides}
    spaces.sort(key=lambda s: -abs(strides_of_d[s[0]][s[1]]))

    def over_outputs(size: int, batch: tuple[int, ...], m: tuple[int, ...], n: tuple[int, ...],
                     k: tuple[int, ...] = ()) -> tuple[int, ...]:
        table = {"b": batch, "m": m, "n": n}
        weights = tuple(size * table[space][i] if table[space] else 0 for space, i, _ in spaces)
        if dealt is None:
            return weights
        return (*weights, size * (k[dealt] // _WARP if k else 0))  # a lane is one step of the digit, of which k counts a warp's

    is_empty = am.k.size == 0
    extents, size_a, size_b = (() if is_empty else am.k.extents), am.a.dtype.num_bytes, am.b.dtype.num_bytes
    unroll = _unroll(extents[-1], (am.a.k_strides[-1] * size_a, am.b.k_strides[-1] * size_b)) if extents else 0 if is_empty else 1
    counts = (*extents[:-1], extents[-1] // unroll) if extents else ()
    looped = [i for i, count in enumerate(counts) if count > 1]

    def over_loops(size: int, k: tuple[int, ...]) -> tuple[int, ...]:
        strides = tuple(size * k[i] * (unroll if i == len(counts) - 1 else 1) for i in looped)
        return _advances(strides, tuple(counts[i] for i in looped))

    def walk_source(source: Source, batch: tuple[int, ...], m: tuple[int, ...], n: tuple[int, ...]) -> Walk:
        size = source.dtype.num_bytes
        return Walk(source.dtype.name, over_outputs(size, batch, m, n, source.k_strides), over_loops(size, source.k_strides),
                    size * source.k_strides[-1] if extents else 0)

    def walk_target(t: Target) -> Walk:
        return Walk(t.dtype.name, over_outputs(t.dtype.num_bytes, t.batch_strides, t.m_strides, t.n_strides))

    bounds: list[Coordinate] = []
    for source, is_a in ((am.a, True), (am.b, False)):
        for bound in source.bounds if not is_empty else ():
            unit = bound.k_coefs[-1] if extents else 0
            level = len(looped) if unit else max((j for j, i in enumerate(looped) if bound.k_coefs[i]), default=-1)
            m_coefs, n_coefs = (bound.row_coefs, ()) if is_a else ((), bound.row_coefs)
            over = over_outputs(1, (), m_coefs, n_coefs, bound.k_coefs)
            is_group = am.ragged is not None and am.ragged.side == "k" and not bounds
            bounds.append(Coordinate(bound.extent, bound.offset, over, over_loops(1, bound.k_coefs), unit, level, is_group))
    names = tuple(t.name for t in am.operands)

    def walk_rows(source: Source | None, is_a: bool) -> Walk | None:
        if source is None:
            return None
        m, n = (source.row_strides, ()) if is_a else ((), source.row_strides)
        return walk_source(source, source.batch_strides, m, n)

    lanes = 1 if dealt is None else _WARP
    total = am.batch.size * am.m.size * am.n.size * lanes
    group_space = "" if am.ragged is None else "m" if am.ragged.side == "m" else "b"
    digits = [e for *_, e in spaces] + ([_WARP] if dealt is not None else [])
    return DirectConsts(
        acc=am.acc.name, lanes=lanes, total=total, is_wide=total >= 2**31, digits=tuple(OutputDigit(e, *magic(e)) for e in digits),
        loops=tuple(counts[i] for i in looped), unroll=unroll,
        a=walk_source(am.a, am.a.batch_strides, am.a.row_strides, ()), b=walk_source(am.b, am.b.batch_strides, (), am.b.row_strides),
        d=walk_target(am.d), operands=tuple(walk_target(t) for t in am.operands), operand_names=names,
        scalars=am.epilogue.scalars if am.epilogue is not None else (), bounds=tuple(bounds), epilogue=am.epilogue,
        compute=epilogue_type(am),
        up=walk_rows(am.up, False), scales=(walk_rows(am.scale_a, True), walk_rows(am.scale_b, False)),
        aux=walk_target(am.aux) if am.aux is not None else None,
        zeros=(None, None) if is_empty else (walk_rows(am.zero_a, True), walk_rows(am.zero_b, False)), addend=am.addend, amax=am.amax,
        ragged=None if is_empty else RaggedConsts.of(am), prologue=am.prologue,
        prologue_walks=tuple(walk_source(s, s.batch_strides, *((s.row_strides, ()) if am.prologue.side == "a" else ((), s.row_strides)))
                             for s in am.prologue.operands) if am.prologue is not None else (),
        group_digit=next((i for i, (space, *_) in enumerate(spaces) if space == group_space), -1),
        group_bytes=am.ragged.b_stride * size_b if am.ragged is not None else 0)


def _bound_range(am: AffineMatmul) -> int:
    """The largest magnitude any bound's coordinate takes."""
    worst = 0
    for source, rows in ((am.a, am.m), (am.b, am.n)):
        for bound in source.bounds:
            pairs = zip((*bound.row_coefs, *bound.k_coefs), (*rows.extents, *am.k.extents), strict=True)
            worst = max(worst, bound.extent, abs(bound.offset) + sum(abs(c) * n for c, n in pairs))
    return worst


class DirectAlgorithm:
    """A thread per element of D, or a warp whose lanes share k; loops over k with running addresses; offsets in 64 bits."""

    name = "direct"
    is_deterministic = True
    takes_ragged = True
    takes_zeros = True
    takes_addend = True
    takes_amax = True
    takes_prologue = True

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        tensors: tuple[Source | Target, ...] = (am.a, am.b, am.d, *am.operands)
        for tensor in tensors:
            allowed = (*TYPES, *FP8, *INT8) if isinstance(tensor, Source) else (*TYPES, *FP8, *INT8, S32)
            if tensor.dtype not in allowed:
                return refuse(f"type of {tensor.name} is {tensor.dtype} (takes {', '.join(t.name for t in allowed)})")
        if max((*am.batch.extents, *am.m.extents, *am.n.extents, *am.k.extents), default=1) >= 2**31:
            return refuse("an extent is 2^31 or more")
        if am.batch.size * am.m.size * am.n.size >= 2**31 * _THREADS:
            return refuse("more than 2^31 CTAs")
        if _bound_range(am) >= 2**31 - _WARP:
            return refuse("a coordinate of the padded source is 2^31 or more")
        return SUPPORTED

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        found = [EngineConfig.of(lanes=1)]
        if _lane_digit(am) is not None and am.batch.size * am.m.size * am.n.size * _WARP < 2**31 * _THREADS:
            found.append(EngineConfig.of(lanes=_WARP))
        return tuple(sorted(found, key=lambda config: self.estimate(am, config, device)))

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        """A term costs about 12 issue slots (two loads count four each), and a thread waits for some 8 ns of each term's latency; the first
        threads for 40 ns, as nothing is in the caches yet."""
        lanes = config["lanes"]
        threads = am.batch.size * am.m.size * am.n.size * lanes
        terms, extra = am.k.size, 4
        if lanes > 1:
            digit = _lane_digit(am)
            assert digit is not None
            terms, extra = am.k.size // am.k.extents[digit] * -(-am.k.extents[digit] // lanes), 6
        if device.is_emulated:  # an instruction costs about 4 us per batch of 16384 threads, and 2 ns per thread
            instructions = 10 * extra + terms * (5 + len(am.a.bounds) + len(am.b.bounds))
            return instructions * (4.0 * -(-threads // 16384) + 0.002 * threads)
        slots = threads * (terms + extra) * (16 if am.acc.name == "f64" else 12)
        in_flight = device.num_sms * _THREADS * _CTAS_PER_SM
        read = source_elements(am.a, am.m, am.k, am.batch) * am.a.dtype.num_bytes
        read += source_elements(am.b, am.n, am.k, am.batch) * am.b.dtype.num_bytes * (2 if am.up is not None else 1)
        # Single elements come at half of the memory's speed at best.
        return 4.0 + max(slots / (device.fma_tflops * 0.5e6), terms * (0.032 + 0.008 * -(-threads // in_flight)),
                         read / (device.bandwidth_gbs * 0.5e3))

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int) -> Build:
        consts = _consts(am, config["lanes"])

        def pointer(name: str, tensor: Source | Target, is_read: bool = True) -> Arg:
            # An empty k reads neither A nor B, whose addresses may then be null.
            operand = tensor.tensor or tensor.name if isinstance(tensor, Target) else tensor.name
            return Arg(f"ptr_{name}", "u64", TensorArg(operand, tensor.base * tensor.dtype.num_bytes if is_read else 0))

        args = [pointer("a", am.a, consts.unroll > 0), pointer("b", am.b, consts.unroll > 0), pointer("d", am.d)]
        args += [pointer(name, s, consts.unroll > 0) for name, s in (("up", am.up), ("scale_a", am.scale_a), ("scale_b", am.scale_b))
                 if s is not None]
        args += [pointer(name, s) for name, s in (("zero_a", am.zero_a), ("zero_b", am.zero_b)) if s is not None and consts.unroll]
        args += [pointer(f"term{i}", s, consts.unroll > 0) for i, s in enumerate(am.prologue.operands if am.prologue is not None else ())]
        args += ragged_arguments(am, "s64") if consts.ragged is not None else []
        args += [pointer(f"operand{i}", t) for i, t in enumerate(am.operands)]
        args += [pointer("aux", am.aux)] if am.aux is not None else []
        args += [Arg("ptr_amax", "u64", TensorArg("amax"))] if am.amax else []
        args += [Arg(f"scalar{i}", consts.compute, ScalarArg(name)) for i, name in enumerate(consts.scalars)]
        grid = -(-consts.total // _THREADS)
        return Build((Step.of("matmul/direct", op, PtxTarget.for_arch(device.arch), _THREADS, args, consts, grid,
                              min_ctas_per_sm=_CTAS_PER_SM, max_registers=65536 // (_THREADS * _CTAS_PER_SM)),))


DIRECT = DirectAlgorithm()
