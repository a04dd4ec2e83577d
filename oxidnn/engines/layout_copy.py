"""The indexed copy: every element of the target takes what a rule of each dimension finds in the source, or a value.

Dimensions that both sides step evenly through are merged, the others keep their rules. A thread writes up to 16 bytes of neighbours in the
target's memory; it reads them in one access where they are neighbours in the source, too, else one by one (neighbouring threads' reads
share lines).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import U8, U16, U32, U64, DType
from ..ops.base import Problem
from ..ops.layout import LayoutProblem, Part, bits_of
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse
from .collapse import by_stride

THREADS = 256
WIDE = 2**31  # bytes of a stride from which on offsets need 64 bits
MOST_ELEMENTS = 2**31 - 2**17  # of a launch that indexes elements; of packs as many times more
_MOST_PARTS = 16  # copies of one launch
_SEVERAL = 2**18  # bytes an SM moves, from which on its threads have several packs each
_PARAM_BYTES = 3900
BITS = {1: U8, 2: U16, 4: U32, 8: U64}


@dataclass(frozen=True, slots=True)
class Dim:
    """A dimension of a copy; strides in bytes. See ops.layout.Axis."""

    extent: int
    y: int
    x: int
    c: int = 0
    rule: str = "same"
    shift: int = 0
    size: int = 0
    step: int = 1
    mask: int = 0

    @property
    def is_plain(self) -> bool:
        return self.rule == "same" and not self.mask

    def part(self, begin: int, count: int) -> Dim:
        """`count` of its coordinates from `begin` on; of rule "same", of strides the caller moves pointers by."""
        return replace(self, extent=count, shift=self.shift + begin if self.rule != "same" else 0)


@dataclass(frozen=True, slots=True)
class AxisConsts:
    """folds: how often a coordinate of "wrap" may exceed the size; of "reflect" 1 if it stays within one period; 0: by division."""

    rule: str
    folds: int
    mask: int


class Values:
    """The registers of elements under way: of x (`value`: the type they are loaded as) and of the third operand."""

    value: str
    third_value: str

    @property
    def value_bits(self) -> str:
        return register_type(self.value)

    @property
    def third_bits(self) -> str:
        return register_type(self.third_value)

    @property
    def zero(self) -> str:
        return zero(self.value)

    @property
    def third_zero(self) -> str:
        return zero(self.third_value)


@dataclass(frozen=True)
class CopyConsts(Values):
    """source: None for a value alone. move: "bits", "cast" or "scale". value: the type that elements are loaded as. load: "pack" or "each".

    form: "packs", "ragged" or "linear", see the template. wide: strides need 64 bits. packs: of a thread.
    """

    source: DType | None
    target: DType
    move: str
    value: str
    compute: str
    vec: int
    load: str
    axes: tuple[AxisConsts, ...]
    parts: int
    form: str
    has_tail: bool
    wide: bool
    third: DType | None = None
    third_value: str = ""
    third_load: str = ""
    saturate: bool = True
    packs: int = 1

    @property
    def straddles(self) -> bool:
        return self.form == "linear" and len(self.axes) > 1

    @property
    def checks(self) -> bool:
        return any(a.rule in ("inside", "every") for a in self.axes)

    @property
    def masked(self) -> bool:
        return any(a.mask for a in self.axes)

    @property
    def words(self) -> bool:
        """A pack moves as words, untouched."""
        return self.move == "bits" and not (self.source and (self.masked or self.load == "each"))

    @property
    def is_plain(self) -> bool:
        """Packs of one tensor that become packs of the other: a thread may have several."""
        return self.words and self.source is not None and self.form == "packs" and all(a.rule == "same" for a in self.axes)

    @property
    def part_params(self) -> tuple[tuple[str, str], ...]:
        """(name, type) of the parameters that every copy has, besides pointers and count."""
        stride = "s64" if self.wide else "s32"
        found: list[tuple[str, str]] = [("row", "u32")] if self.form == "ragged" else []
        for d, axis in enumerate(self.axes):
            if d:
                found += [(f"extent{d}", "u32"), (f"multiplier{d}", "u32"), (f"shift{d}", "u32")]
            found += [(f"x{d}", stride)] if self.source else []
            found += [] if self.form == "linear" else [(f"y{d}", stride)]
            found += [(f"c{d}", stride)] if self.third else []
            if axis.rule != "same":
                found += [(f"offset{d}", "s32"), (f"size{d}", "s32")]
            if axis.rule == "every":
                found.append((f"step{d}", "s32"))
            if axis.rule == "every" or (axis.rule in ("wrap", "reflect") and not axis.folds):
                found += [(f"period_multiplier{d}", "u32"), (f"period_shift{d}", "u32")]
        return tuple(found)


def register_type(value: str) -> str:
    """The type of a register that holds a loaded value."""
    return value if value in ("f32", "f64") else "b64" if value in ("s64", "u64") else "b32"


def zero(value: str) -> str:
    return {"f32": "0f00000000", "f64": "0d0000000000000000"}.get(value, "0")


def loaded_as(kind: DType) -> str:
    """The type whose values hold those of `kind` exactly, as registers keep them."""
    if kind.is_float:
        return "f64" if kind.name == "f64" else "f32"
    return kind.name if kind.bits == 64 or kind.name == "u32" else "s32"


def arithmetic(kinds: Sequence[DType]) -> str:
    """What scaling computes in: f64 where an operand has more digits than f32."""
    return "f64" if any(k.name == "f64" or (not k.is_float and k.bits >= 32) for k in kinds) else "f32"


def movement(problem: LayoutProblem) -> str:
    """"bits", "cast" or "scale"."""
    if problem.alpha != 1.0 or problem.has("c"):
        return "scale"
    source = problem.parts[0].source
    return "bits" if source is None or problem.desc(source).dtype == problem.outputs[0].desc.dtype else "cast"


@dataclass(frozen=True)
class Geometry:
    """A part with its dimensions in the order of the target's memory, merged; offsets in bytes."""

    source: str | None
    target: str
    dims: tuple[Dim, ...]
    x_offset: int
    y_offset: int
    c_offset: int = 0
    mask_offset: int = 0

    @property
    def is_plain(self) -> bool:
        return all(d.is_plain for d in self.dims)


def geometry(problem: LayoutProblem, part: Part) -> Geometry:
    y_size = problem.desc(part.target).dtype.num_bytes
    x_size = problem.desc(part.source).dtype.num_bytes if part.source is not None else 0
    c_size = problem.desc("c").dtype.num_bytes if problem.has("c") else 0
    x_at, y_at, c_at = part.source_offset * x_size, part.target_offset * y_size, 0
    dims = []
    for a in part.axes:
        dim = Dim(a.extent, a.target * y_size, a.source * x_size, a.third * c_size, a.rule, a.shift, a.size, a.step, a.mask)
        if dim.extent == 1 and dim.is_plain:
            continue
        if dim.is_plain and dim.y < 0:  # walk the target upwards
            x_at, y_at, c_at = (at + (dim.extent - 1) * s for at, s in ((x_at, dim.x), (y_at, dim.y), (c_at, dim.c)))
            dim = replace(dim, x=-dim.x, y=-dim.y, c=-dim.c)
        dims.append(dim)
    dims = [dims[i] for i in by_stride([d.extent for d in dims], [d.y for d in dims])]
    merged: list[Dim] = []
    for dim in dims:
        outer = merged[-1] if merged else None
        if (outer is not None and outer.is_plain and dim.is_plain
                and (outer.y, outer.x, outer.c) == (dim.y * dim.extent, dim.x * dim.extent, dim.c * dim.extent)):
            merged[-1] = replace(dim, extent=outer.extent * dim.extent)
        else:
            merged.append(dim)
    return Geometry(part.source, part.target, tuple(merged or [Dim(1, y_size, x_size, c_size)]), x_at, y_at, c_at)


def pieces(shape: Geometry, limit: int, unit: int = 1, at: int = 0) -> Iterator[Geometry]:
    """Geometries of at most `limit` elements each, cut along dimension `at` (those before have one coordinate) or, if one coordinate of it
    is too much, further in; of the innermost dimension multiples of `unit` elements."""
    dim, inner = shape.dims[at], prod(d.extent for d in shape.dims[at + 1:])
    if dim.extent * inner <= limit:
        yield shape
        return
    count = max(1, limit // max(inner, 1))
    if at == len(shape.dims) - 1:
        count = max(unit, count // unit * unit)
    for begin in range(0, dim.extent, count):
        part = dim.part(begin, min(count, dim.extent - begin))
        moved = replace(shape, dims=(*shape.dims[:at], part, *shape.dims[at + 1:]), y_offset=shape.y_offset + begin * dim.y,
                        x_offset=shape.x_offset + (begin * dim.x if dim.rule == "same" else 0), c_offset=shape.c_offset + begin * dim.c,
                        mask_offset=shape.mask_offset + dim.mask * begin)
        if inner <= limit:
            yield moved
        else:
            yield from pieces(moved, limit, unit, at + 1)


def _aligned(kind: DType, align: int, offset: int, strides: Sequence[int], vec: int) -> bool:
    num_bytes = min(16, vec * kind.num_bytes)
    return align % num_bytes == 0 and offset % num_bytes == 0 and all(s % num_bytes == 0 for s in strides)


def _loads_packs(problem: LayoutProblem, name: str, offset: int, dims: Sequence[Dim], strides: Sequence[int], vec: int) -> bool:
    """Whether `vec` neighbours of the target are neighbours of this operand, in memory that takes one access, all there or none."""
    desc, inner = problem.desc(name), dims[-1]
    if strides[-1] != desc.dtype.num_bytes and vec > 1:
        return False
    if inner.rule == "inside":
        if inner.shift % vec or inner.size % vec:
            return False
    elif inner.rule != "same":
        return vec == 1
    return _aligned(desc.dtype, desc.align, offset, strides[:-1], vec)


def arrangements(problem: LayoutProblem, shape: Geometry) -> list[tuple[int, str, str]]:
    """(vec, load, form) that serve a part, the widest first; of each vec one. Conversions to narrower types may take several loads, of
    up to 64 bytes together, for one store."""
    target = problem.desc(shape.target)
    size, dims = target.dtype.num_bytes, shape.dims
    sizes = [size] + ([problem.desc(shape.source).dtype.num_bytes] if shape.source else [])
    inner = dims[-1]
    dense, step = True, size
    for d in reversed(dims):
        dense, step = dense and d.y == step, step * d.extent
    found = []
    widest = max(sizes)
    vec = min(16 // size, 64 // widest) if movement(problem) == "cast" else 16 // widest
    while vec:
        is_aligned = vec == 1 or (inner.y == size and _aligned(target.dtype, target.align, shape.y_offset, [d.y for d in dims[:-1]], vec))
        if vec == 1 or (is_aligned and inner.extent % vec == 0):
            is_pack = shape.source is None or _loads_packs(problem, shape.source, shape.x_offset, dims, [d.x for d in dims], vec)
            found.append((vec, "pack" if is_pack else "each", "packs"))
        elif dense and inner.extent >= vec and _aligned(target.dtype, target.align, shape.y_offset, [], vec):
            is_flat = len(dims) == 1 and (shape.source is None or _loads_packs(problem, shape.source, shape.x_offset, dims, [inner.x], vec))
            found.append((vec, "pack" if is_flat else "each", "linear"))
        elif inner.y == size and inner.extent >= 4 * vec and all(d.y % size == 0 for d in dims):
            found.append((vec, "each", "ragged"))
        vec //= 2
    return found


# Time over that of 16-byte accesses, by bytes a thread moves at a time: as measured on an H100.
_BY_WIDTH = {1: 4.0, 2: 2.2, 4: 1.4, 8: 1.07, 16: 1.0, 32: 0.97, 64: 0.975}


def _cost(problem: LayoutProblem, shape: Geometry, vec: int, load: str, form: str) -> float:
    """Time over that of a copy with 16-byte accesses."""
    size = problem.desc(shape.target).dtype.num_bytes
    if shape.source is None:
        return _BY_WIDTH[vec * size]
    cost = _BY_WIDTH[vec * max(size, problem.desc(shape.source).dtype.num_bytes)]
    cost += 0.03 * (load == "each") + 0.1 * (form == "ragged")
    return cost + 2.0 * (abs(shape.dims[-1].x) > 32)  # neighbours lie lines apart


class LayoutCopy(Engine):
    """Every copy, on any architecture from sm_80."""

    id = "layout.copy"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        if not isinstance(problem, LayoutProblem) or problem.sums:
            return refuse("not a copy")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LayoutProblem)
        vecs = {vec for part in problem.parts for vec, _, _ in arrangements(problem, geometry(problem, part))} or {1}
        found = [EngineConfig.of(vec=v) for v in sorted(vecs, reverse=True)]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, LayoutProblem)
        total = 0.0
        for part in problem.parts:
            shape = geometry(problem, part)
            total += prod(d.extent for d in shape.dims) * _cost(problem, shape, *self._arrangement(problem, shape, config["vec"]))
        if len(problem.parts) > 1 and config["vec"] * problem.outputs[0].desc.dtype.num_bytes == 16:
            total *= 1.09  # of copies of several parts, with as many bytes a thread, those by 8 bytes are faster
        elements = sum(prod(a.extent for a in part.axes) for part in problem.parts)
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3) * total / max(elements, 1)

    def _arrangement(self, problem: LayoutProblem, shape: Geometry, vec: int) -> tuple[int, str, str]:
        """The widest of the part that is not above vec."""
        return next(found for found in arrangements(problem, shape) if found[0] <= vec or found[0] == 1)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, LayoutProblem)
        grouped: dict[CopyConsts, list[Geometry]] = {}
        for part in problem.parts:
            if any(a.extent == 0 for a in part.axes):
                continue
            whole = geometry(problem, part)
            vec, _, form = self._arrangement(problem, whole, config["vec"])
            for shape in pieces(whole, MOST_ELEMENTS * (vec if form == "packs" else 1), vec):
                arrangement = self._arrangement(problem, shape, vec)  # a piece of rows may begin less aligned
                grouped.setdefault(self._consts(problem, shape, arrangement), []).append(shape)
        steps = []
        for consts, shapes in grouped.items():
            each = sum({"u32": 4, "s32": 4}.get(t, 8) for _, t in consts.part_params) + 32
            most = max(1, min(_MOST_PARTS, _PARAM_BYTES // each))
            is_single = consts.masked  # the diagonal moves with the piece
            if consts.is_plain and len(shapes) > 1 and problem.num_bytes >= _SEVERAL * device.num_sms:
                # What a copy must know of its part costs more than the pack it moves.
                consts = replace(consts, packs=max(2, min(4, 32 // (consts.vec * consts.target.num_bytes))))
            for begin in range(0, len(shapes), 1 if is_single else most):
                chosen = shapes[begin:begin + (1 if is_single else most)]
                steps.append(self._step(problem, replace(consts, parts=len(chosen)), chosen, device))
        return Build(tuple(steps))

    def _consts(self, problem: LayoutProblem, shape: Geometry, arrangement: tuple[int, str, str]) -> CopyConsts:
        vec, load, form = arrangement
        target = problem.desc(shape.target)
        source = problem.desc(shape.source).dtype if shape.source is not None else None
        move = movement(problem)
        third = problem.desc("c").dtype if problem.has("c") else None
        kinds = [target.dtype, *([source] if source else []), *([third] if third else [])]
        if move == "bits":
            source, moved = BITS[target.dtype.num_bytes] if source else None, BITS[target.dtype.num_bytes]
        else:
            moved = target.dtype
        assert move == "bits" or source is not None
        value = moved.name if move == "bits" else loaded_as(source)  # type: ignore[arg-type]
        strides = [s for d in shape.dims for s in (d.x, d.y * vec, d.c)]
        third_load = ""
        if third:
            is_pack = _loads_packs(problem, "c", shape.c_offset, shape.dims, [d.c for d in shape.dims], vec)
            third_load = "pack" if is_pack and load == "pack" else "each"
        has_tail = form == "ragged" or (form == "linear" and prod(d.extent for d in shape.dims) % vec != 0)
        axes = tuple(_axis_consts(d) for d in shape.dims)
        return CopyConsts(source, moved, move, value, arithmetic(kinds), vec, load, axes, 1, form, has_tail,
                          any(abs(s) >= WIDE for s in strides), third, loaded_as(third) if third else "", third_load, problem.saturate)

    def _step(self, problem: LayoutProblem, consts: CopyConsts, shapes: Sequence[Geometry], device: DeviceInfo) -> Step:
        args: list[Arg] = []
        ctas = 0
        vec = consts.vec
        for k, shape in enumerate(shapes):
            count, row = prod(d.extent for d in shape.dims), shape.dims[-1].extent
            packs_of_row = (row + vec - 2) // vec + 1 if consts.form == "ragged" else row // vec  # of one that begins anywhere
            packs = -(-count // vec) if consts.form == "linear" else count // row * packs_of_row
            values: dict[str, int] = {"row": row}
            for d, dim in enumerate(shape.dims):
                is_inner = d == len(shape.dims) - 1
                values |= {f"x{d}": dim.x, f"y{d}": dim.y * (vec if is_inner else 1), f"c{d}": dim.c}
                extent = packs_of_row if is_inner and consts.form != "linear" else dim.extent
                values[f"extent{d}"] = extent
                if d:
                    values[f"multiplier{d}"], values[f"shift{d}"] = magic(extent)
                values |= _rule_values(d, dim, consts.axes[d])
            if shape.source is not None:
                args.append(Arg(f"ptr_x_{k}", "u64", TensorArg(shape.source, shape.x_offset)))
            args.append(Arg(f"ptr_y_{k}", "u64", TensorArg(shape.target, shape.y_offset)))
            if consts.third:
                args.append(Arg(f"ptr_c_{k}", "u64", TensorArg("c", shape.c_offset)))
            args.append(Arg(f"count_{k}", "u32", count if consts.form == "linear" else packs))
            if consts.parts > 1:
                args.append(Arg(f"begin_{k}", "u32", ctas))
            ctas += -(-packs // (THREADS * consts.packs))
            args += [Arg(f"{name}_{k}", kind, values[name]) for name, kind in consts.part_params]
        if consts.masked:
            args.append(Arg("diagonal", "s32", (problem.diagonal or 0) + shapes[0].mask_offset))
        if consts.move == "bits":
            kind = problem.desc(shapes[0].target).dtype
            bits = bits_of(problem.value, kind)
            for width in (8, 16, 32):
                bits = bits | bits << width if kind.num_bytes * 8 <= width else bits
            args += [Arg("fill_low", "u32", bits & 0xFFFFFFFF), Arg("fill_high", "u32", bits >> 32 & 0xFFFFFFFF)]
        if consts.move == "scale":
            args += [Arg("alpha", consts.compute, problem.alpha)] + ([Arg("beta", consts.compute, problem.beta)] if consts.third else [])
        return Step.of("layout/copy", problem.op, Target.for_arch(device.arch), THREADS, args, consts, ctas,
                       suffix=f"{consts.target.name}_v{vec}_{consts.load}")


def _axis_consts(dim: Dim) -> AxisConsts:
    folds = 0
    if dim.rule == "wrap":
        folds = (dim.extent - 1 + dim.shift % dim.size) // dim.size
        folds = max(folds, 1) if folds <= 2 else 0
    elif dim.rule == "reflect":
        folds = 1 if dim.shift >= 1 - dim.size and dim.extent - 1 + dim.shift <= 2 * (dim.size - 1) else 0
    return AxisConsts(dim.rule, folds, dim.mask)


def _rule_values(d: int, dim: Dim, axis: AxisConsts) -> dict[str, int]:
    if dim.rule == "same":
        return {}
    offset, size, period = dim.shift, dim.size, dim.step
    if dim.rule == "clamp":
        size -= 1
    elif dim.rule == "wrap":
        offset, period = offset % size, size
    elif dim.rule == "reflect":
        size = period = 2 * (size - 1)
        offset = offset if axis.folds else offset % size
    multiplier, shift = magic(max(period, 1))
    return {f"offset{d}": offset, f"size{d}": size, f"step{d}": dim.step, f"period_multiplier{d}": multiplier, f"period_shift{d}": shift}


_OPS = ("permute", "transform", "cast", "conv_reorder", "broadcast_to", "flip", "roll", "slice", "slice_backward", "tile", "triu", "tril",
        "pad", "concat", "split", "fill", "pad_backward", "meshgrid")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (LayoutCopy(),) for op in _OPS}
