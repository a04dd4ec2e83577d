"""What the tiled main loops share: from an AffineMatmul and a tile shape to loaders, epilogue, kernel arguments, raster and cost.

Everything that only Python needs to know is decided here, so that the templates loop and lay out. Extents, strides, bounds and fastdiv
magics are kernel parameters; what decides unrolling or alignment (numbers of digits, vector widths, tile shape) is a const.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod
from typing import Any

from ..codegen.fastdiv import magic
from ..codegen.spec import Target as PtxTarget
from ..device import DeviceInfo
from ..dtypes import BF16, F16, F32, F64, S32
from ..ops.gemm import FP8, INT8
from .affine import AffineMatmul, Bound, IndexSpace, Prologue, Ragged, Source, Target
from .base import Arg, ArgValue, Build, ScalarArg, Step, Support, TensorArg, WorkspaceArg, refuse

INT32_MAX = 2**31 - 1
SMALLEST_TILE = 8  # along m or n
MAX_TILE = 256  # along m
SECTOR_BYTES = 32  # of global memory
LINE_BYTES = 128  # of L2, and the width of the shared memory banks


# ---- Digits: fewer of them -------------------------------------------------------------------------------


def merge(extents: Sequence[int], weights: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """(extents, weights) with as few digits as possible; every weight vector still takes the same value at every linear index.

    A digit of extent 1 goes; two neighbours become one where each weight vector has weights[i] == extents[i + 1] * weights[i + 1].
    At least one digit stays, so that an empty space has the one digit (0,).
    """
    if prod(extents) == 0:
        return (0,), [(0,) for _ in weights]
    kept: list[int] = []
    columns: list[list[int]] = []
    for i, extent in enumerate(extents):
        if extent == 1:
            continue
        column = [w[i] for w in weights]
        if kept and all(above == extent * own for above, own in zip(columns[-1], column, strict=True)):
            kept[-1] *= extent
            columns[-1] = column
        else:
            kept.append(extent)
            columns.append(column)
    if not kept:
        return (1,), [(0,) for _ in weights]
    return tuple(kept), [tuple(c[j] for c in columns) for j in range(len(weights))]


@dataclass(frozen=True, slots=True)
class Operand:
    """A or B on merged digits: `rows` is m for A and n for B; k and batch digits are common to both. ragged: "row" | "k", along which
    tiles begin anywhere; group_stride: from the elements of a group to those of the next, of `groups`; is_gated: gated_columns. prologue:
    what becomes of its elements, with operands on merged digits."""

    source: Source
    rows: tuple[int, ...]
    row_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    batch_strides: tuple[int, ...]
    bounds: tuple[Bound, ...]
    ragged: str = ""
    group_stride: int = 0
    groups: int = 0
    is_gated: bool = False
    prologue: Prologue | None = None


@dataclass(frozen=True, slots=True)
class Digits:
    """An AffineMatmul on merged digits: the operands' spaces, and those of D and the epilogue operands (`targets`, D first, a second
    output last). is_ragged: tiles begin anywhere along m."""

    k: tuple[int, ...]
    batch: tuple[int, ...]
    a: Operand
    b: Operand
    out_m: tuple[int, ...]
    out_n: tuple[int, ...]
    targets: tuple[Target, ...]
    is_ragged: bool = False


def merged_digits(am: AffineMatmul) -> Digits:
    all_targets = (am.d, *am.operands, *((am.aux,) if am.aux is not None else ()))
    # A bound no coordinate can leave costs nothing.
    a_bounds = tuple(b for b in am.a.bounds if not _always_inside(b, am.m.extents, am.k.extents))
    b_bounds = tuple(b for b in am.b.bounds if not _always_inside(b, am.n.extents, am.k.extents))
    terms = am.prologue.operands if am.prologue is not None else ()
    k, k_weights = merge(am.k.extents, [am.a.k_strides, am.b.k_strides, *(b.k_coefs for b in a_bounds + b_bounds),
                                        *(t.k_strides for t in terms)])
    batched = (am.a.batch_strides, am.b.batch_strides, *(t.batch_strides for t in all_targets), *(t.batch_strides for t in terms))
    batch, batch_weights = merge(am.batch.extents, [_padded(strides, am.batch) for strides in batched])

    def operand(source: Source, rows: IndexSpace, bounds: tuple[Bound, ...], index: int) -> Operand:
        through = am.prologue if am.prologue is not None and am.prologue.side == "ab"[index] else None
        extents, weights = merge(rows.extents, [source.row_strides, *(b.row_coefs for b in bounds),
                                                *(t.row_strides for t in terms if through is not None)])
        k_coefs = k_weights[2 + (len(a_bounds) if index else 0):]
        merged = tuple(Bound(w, kc, b.offset, b.extent) for b, w, kc in zip(bounds, weights[1:], k_coefs, strict=False))
        side = am.ragged.side if am.ragged is not None else ""
        ragged = "k" if side == "k" else "row" if side == "m" and not index else ""
        groups = (am.ragged.b_stride, am.ragged.count) if am.ragged is not None and index else (0, 0)
        if through is not None:
            over = zip(terms, weights[1 + len(bounds):], k_weights[len(k_weights) - len(terms):],
                       batch_weights[len(batch_weights) - len(terms):], strict=True)
            operands = tuple(replace(t, row_strides=r, k_strides=kc, batch_strides=b) for t, r, kc, b in over)
            through = replace(through, operands=operands)
        return Operand(source, extents, weights[0], k_weights[index], batch_weights[index], merged, ragged, *groups,
                       am.up is not None and index == 1, through)

    b, columns = (am.b, am.n) if am.up is None else gated_columns(am)
    operand_a, operand_b = operand(am.a, am.m, a_bounds, 0), operand(b, columns, b_bounds, 1)
    out_m, m_weights = merge(am.m.extents, [t.m_strides for t in all_targets])
    out_n, n_weights = merge(am.n.extents, [t.n_strides for t in all_targets])
    targets = tuple(replace(t, m_strides=m, n_strides=n, batch_strides=b)
                    for t, m, n, b in zip(all_targets, m_weights, n_weights, batch_weights[2:2 + len(all_targets)], strict=True))
    return Digits(k, batch, operand_a, operand_b, out_m, out_n, targets, am.ragged is not None and am.ragged.side == "m")


GATE_COLUMNS = 8  # columns of a gate side by side, then those they gate


def gated_columns(am: AffineMatmul) -> tuple[Source, IndexSpace]:
    """B with the columns of both sums of a gate in turn, 8 by 8: so a tile has both, and the epilogue of one finds the other near it."""
    assert am.up is not None
    step = am.b.row_strides[0] if am.b.row_strides else 0  # of a single column nothing is left to step over
    digits = (am.n.size // GATE_COLUMNS, 2, GATE_COLUMNS)
    return replace(am.b, row_strides=(GATE_COLUMNS * step, am.up.base - am.b.base, step)), IndexSpace(digits)


def columns_of(am: AffineMatmul) -> int:
    """Columns that are summed: two for each of D's with a gate."""
    return am.n.size * (2 if am.up is not None else 1)


def _padded(strides: tuple[int, ...], space: IndexSpace) -> tuple[int, ...]:
    return strides if len(strides) == len(space.extents) else (0,) * len(space.extents)


def _always_inside(bound: Bound, rows: Sequence[int], k: Sequence[int]) -> bool:
    terms = [c * (e - 1) for c, e in zip((*bound.row_coefs, *bound.k_coefs), (*rows, *k), strict=True)]
    return bound.offset + sum(min(t, 0) for t in terms) >= 0 and bound.offset + sum(max(t, 0) for t in terms) < bound.extent


def reach(extents: Sequence[int], strides: Sequence[int]) -> int:
    """The largest |offset| within an index space."""
    return sum(abs(s) * max(e - 1, 0) for e, s in zip(extents, strides, strict=True))


def needs_wide(d: Digits) -> bool:
    """True if an element offset leaves 32 bits."""
    sources = [reach((*x.rows, *d.k, *d.batch, x.groups), (*x.row_strides, *x.k_strides, *x.batch_strides, x.group_stride))
               + abs(x.source.base) for x in (d.a, d.b)]
    sources += [reach((*x.rows, *d.k, *d.batch), (*t.row_strides, *t.k_strides, *t.batch_strides))
                for x in (d.a, d.b) if x.prologue is not None for t in x.prologue.operands]
    targets = [reach((*d.out_m, *d.out_n, *d.batch), (*t.m_strides, *t.n_strides, *t.batch_strides)) + abs(t.base) for t in d.targets]
    return max(sources + targets) > INT32_MAX


# ---- Vectorisability -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Vector:
    """`width` elements can be moved at once along `major`; `reason` says what keeps it from being wider."""

    major: str  # "k" | "row"
    width: int
    reason: str = ""


def widest_vector(x: Operand, k: Sequence[int], batch: Sequence[int], major: str) -> Vector:
    """How many neighbouring elements (16 bytes at most, a power of two) one instruction may move along `major`, and why not more.

    A vector must be contiguous, must not straddle a digit's end or the edge of a bound, and must start at a multiple of its size
    wherever it starts: the innermost extent, every other stride, the base and the address are multiples of it.
    """
    if x.ragged == major:
        return Vector(major, 1, f"groups begin anywhere along {major}")
    inner_extents, inner_strides = (k, x.k_strides) if major == "k" else (x.rows, x.row_strides)
    if inner_strides[-1] != 1:
        return Vector(major, 1, f"stride along {major} is {inner_strides[-1]}, not 1")
    if any((b.k_coefs if major == "k" else b.row_coefs)[-1] for b in x.bounds):
        return Vector(major, 1, f"a bound depends on the innermost {major} digit")
    size = x.source.dtype.num_bytes
    facts = [(inner_extents[-1], f"innermost {major} extent {inner_extents[-1]}"), (x.source.base, f"base {x.source.base}"),
             (max(1, x.source.align // size), f"alignment of {x.source.align} bytes"), (x.group_stride, f"group stride {x.group_stride}")]
    for extents, strides, what in ((k, x.k_strides, "k"), (x.rows, x.row_strides, "row"), (batch, x.batch_strides, "batch")):
        last = len(strides) - 1
        facts += [(s, f"{what} stride {s}") for i, (e, s) in enumerate(zip(extents, strides, strict=True))
                  if e > 1 and not (what == major and i == last)]
    return _widest(facts, max(1, 16 // size), major)


def _widest(facts: list[tuple[int, str]], limit: int, major: str) -> Vector:
    width, reason = limit, "16 bytes"
    for value, what in facts:
        while width > 1 and value % width:
            width, reason = width // 2, what
    return Vector(major, width, reason)


def best_vector(x: Operand, k: Sequence[int], batch: Sequence[int]) -> Vector:
    """The wider of the two directions, k where they are equal; without a contiguous one, that of the smaller stride."""
    along_k, along_row = (widest_vector(x, k, batch, major) for major in ("k", "row"))
    if along_k.width != along_row.width:
        return max(along_k, along_row, key=lambda v: v.width)
    steps = {m: abs(s[-1]) or INT32_MAX for m, s in (("k", x.k_strides), ("row", x.row_strides))}
    return along_k if steps["k"] <= steps["row"] else along_row


# ---- Loaders: global memory to a stage of shared memory --------------------------------------------------


@dataclass(frozen=True, slots=True)
class BoundConsts:
    """Which row and k digits a bound depends on."""

    row_digits: tuple[int, ...]
    k_digits: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TermConsts:
    """An operand of a prologue. by: along which it changes, "k", "row", or "" where it is one element; values: those of a vector, one for
    all elements or one each; moves_packs: whether these are loaded at once."""

    name: str
    dtype: str
    size: int
    by: str
    values: int
    moves_packs: bool


@dataclass(frozen=True, slots=True)
class PrologueConsts:
    """What becomes of a loader's elements on their way through registers. by: along which any operand changes ("k" where none does)."""

    terms: tuple[TermConsts, ...]
    expression: Any
    compute: str
    by: str

    def apply(self, element: int) -> str:
        """PTX: register %element<element> through the expression, with %term<i>_value<...>."""
        register = f"%element{element}"
        terms = {t.name: f"%term{i}_value{element if t.values > 1 else 0}" for i, t in enumerate(self.terms)}
        return str(self.expression.lower({"x": register} | terms, [register], self.compute))


def plan_prologue(x: Operand, d: Digits, major: str, vec: int) -> PrologueConsts | None:
    if x.prologue is None:
        return None
    terms = []
    for t in x.prologue.operands:
        by = "k" if any(t.k_strides) else "row" if any(t.row_strides) else ""
        assert by != "k" or not any(t.row_strides), "an operand of a prologue changes along rows or along k"
        strides = t.k_strides if by == "k" else t.row_strides
        is_each = by == major and strides[-1] != 0
        unit, size = min(16, vec * t.dtype.num_bytes), t.dtype.num_bytes
        others = [s * size % unit for s in (*strides[:-1], *t.batch_strides)]
        packs = is_each and vec > 1 and strides[-1] == 1 and t.align % unit == 0 and not any(others)
        terms.append(TermConsts(t.name, t.dtype.name, size, by, vec if is_each else 1, packs))
    return PrologueConsts(tuple(terms), x.prologue.expression, "f64" if x.source.dtype is F64 else "f32",
                          next((t.by for t in terms if t.by), "k"))


@dataclass(frozen=True, slots=True)
class LoaderConsts:
    """How the threads of a CTA bring one operand's tile into shared memory.

    The tile lies in lines along its contiguous direction: major "k" has a line per row, "row" a line per k. A thread moves `vec`
    elements at each of row_positions x k_positions places, row_step rows and k_step k's apart. Byte address of an element:
    line * pitch + (inner * size ^ phase(line) << 4), phase(line) = (line << swizzle[0] >> swizzle[1]) & swizzle[2].
    smem_places: for each (row position, k position) the address register and the constant beside it.
    """

    name: str  # "a" | "b": prefix of parameters and registers
    dtype: str
    size: int
    major: str
    vec: int
    is_async: bool
    rows: int
    row_digits: int
    k_digits: int
    batch_digits: int
    bounds: tuple[BoundConsts, ...]
    inner_threads: int
    row_positions: int
    row_step: int
    k_positions: int
    k_step: int
    smem_offset: int
    pitch: int
    swizzle: tuple[int, int, int]
    smem_places: tuple[tuple[int, int], ...]
    smem_registers: tuple[tuple[int, int], ...]  # (line, inner) displacement of each address register
    words: int  # 32-bit registers a staged vector takes
    wide: bool
    # Of cp.async: "cg" (16 bytes only) passes L1 by. Measured 2026-11-28, H100: "ca" is 5 to 60 % slower on every 3x3 layer of ResNet-50,
    # although its taps read elements again.
    cache: str
    k_name: str  # whose k digits are read: the other operand's, where a thread's k positions are the same in both
    # (bound, its number, k digit, its extent, step between the digit's bits), where a bit for each tap tells whether it is inside.
    taps: tuple[tuple[BoundConsts, int, int, int, int], ...]
    stored: str  # the direction of lines in shared memory: not `major` where elements are transposed one by one
    prologue: PrologueConsts | None = None

    @property
    def has_pointers(self) -> bool:
        """Whether rows are kept as addresses: one addition a load, where there are registers for them, instead of two and a shift."""
        return self.row_positions <= 4

    @property
    def registers(self) -> int:
        """32-bit registers of a loader, about."""
        bounds, offset = 1 if self.taps else len(self.bounds), 2 if self.wide or self.has_pointers else 1
        per_row, per_k = offset + bounds, offset + bounds + (self.k_digits if self.k_name == self.name else 0)
        staged = 0 if self.is_async else self.row_positions * self.k_positions * self.words
        if self.prologue is not None:
            positions = self.k_positions if self.prologue.by == "k" else self.row_positions
            staged += len(self.prologue.terms) * (2 * positions + sum(t.values for t in self.prologue.terms)) + self.vec + 4
        return self.row_positions * per_row + self.k_positions * per_k + 2 * len(self.smem_registers) + staged

    def place(self, row_position: int, k_position: int) -> tuple[int, int]:
        return self.smem_places[row_position * self.k_positions + k_position]


def plan_loader(name: str, x: Operand, d: Digits, vector: Vector, rows: int, tile_k: int, threads: int, smem_offset: int, pitch: int,
                swizzle: tuple[int, int, int], has_cp_async: bool, wide: bool, stored: str = "") -> LoaderConsts:
    """The loader of one operand, whose lines in shared memory lie along `stored`, by default as in memory.

    Among the thread grids that read whole lines (sectors, where vectors are short) it takes the one with the fewest registers."""
    size = x.source.dtype.num_bytes
    inner, lines = (tile_k, rows) if vector.major == "k" else (rows, tile_k)
    vec = vector.width
    while vec > 1 and (rows * tile_k // vec < threads or vec > inner):
        vec //= 2
    if rows * tile_k < threads:
        raise ValueError(f"tile of {rows} x {tile_k} elements is smaller than {threads} threads")
    bounds = tuple(BoundConsts(*(tuple(i for i, c in enumerate(coefs) if c) for coefs in (b.row_coefs, b.k_coefs))) for b in x.bounds)
    best: tuple[int, int, int, int] | None = None
    for inner_threads in (1 << i for i in range(10)):
        if inner_threads * vec > inner or inner_threads > threads or threads // inner_threads > lines:
            continue
        if inner_threads * vec < inner and inner_threads * vec * size < (LINE_BYTES if vec * size == 16 else SECTOR_BYTES):
            continue
        inner_positions, line_positions = inner // (inner_threads * vec), lines * inner_threads // threads
        in_rows, in_k = (line_positions, inner_positions) if vector.major == "k" else (inner_positions, line_positions)
        registers = in_rows * (1 + len(bounds)) + in_k * (1 + len(bounds) + len(d.k))
        if best is None or (registers, -inner_threads) < (best[0], -best[1]):
            best = (registers, inner_threads, in_rows, in_k)
    assert best is not None
    _, inner_threads, row_positions, k_positions = best
    inner_step, line_step = inner_threads * vec, threads // inner_threads
    row_step, k_step = (line_step, inner_step) if vector.major == "k" else (inner_step, line_step)
    address_registers: list[tuple[int, int]] = []
    places = []
    for i in range(row_positions):
        for j in range(k_positions):
            line, at = (i * line_step, j * inner_step) if vector.major == "k" else (j * line_step, i * inner_step)
            # The phase repeats every 8 lines and acts within 128 bytes of a line: beyond, a displacement is a constant.
            low_line, low_at = (line % 8, at % (128 // size)) if swizzle[2] else (0, 0)
            key, constant = (low_line, low_at), (line - low_line) * pitch + (at - low_at) * size
            if stored and stored != vector.major:
                key, constant = (0, 0), at * pitch + line * size
            if key not in address_registers:
                address_registers.append(key)
            places.append((address_registers.index(key), constant))
    is_async = has_cp_async and vec * size >= 4 and x.prologue is None
    return LoaderConsts(name, x.source.dtype.name, size, vector.major, vec, is_async, rows, len(x.rows), len(d.k),
                        len(d.batch), bounds, inner_threads, row_positions, row_step, k_positions, k_step, smem_offset, pitch, swizzle,
                        tuple(places), tuple(address_registers), max(1, vec * size // 4), wide,
                        "ca" if vec * size < 16 else "cg", name, plan_taps(bounds, d.k), stored or vector.major,
                        plan_prologue(x, d, vector.major, vec))


MAX_TAPS = 32


def plan_taps(bounds: tuple[BoundConsts, ...], k: Sequence[int]) -> tuple[tuple[BoundConsts, int, int, int, int], ...]:
    """LoaderConsts.taps, from the innermost digit outwards: () where a bound depends on several digits of k or on none, where bounds
    share one, or where the digits have more values together than a register has bits."""
    digits = [bound.k_digits[0] for bound in bounds if len(bound.k_digits) == 1]
    if not bounds or len(set(digits)) < len(bounds) or prod(k[digit] for digit in digits) > MAX_TAPS:
        return ()
    taps, step = [], 1
    for digit, number in sorted(zip(digits, range(len(bounds)), strict=True), reverse=True):
        taps.append((bounds[number], number, digit, k[digit], step))
        step *= k[digit]
    return tuple(taps)


def share_k(a: LoaderConsts, b: LoaderConsts) -> tuple[LoaderConsts, LoaderConsts]:
    """The loaders of both operands; B's reads A's k digits where each thread's k positions are the same."""
    same = all(getattr(a, name) == getattr(b, name) for name in ("major", "inner_threads", "k_positions", "k_step"))
    return a, replace(b, k_name=a.name) if same and (a.vec == b.vec or a.major == "row") else b


# ---- Epilogue: shared memory to D ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TargetConsts:
    """D or an epilogue operand: parameter prefix, role in the expression, and how `vec` neighbours along the inner direction are moved:
    "vector", "scalar" (each by itself), "broadcast" (one element for all)."""

    prefix: str
    name: str
    dtype: str
    size: int
    access: str
    inner_step: str = ""  # parameter holding the stride between neighbours, for "scalar"
    moves: bool = True  # from one outer index to the next


@dataclass(frozen=True, slots=True)
class EpilogueConsts:
    """How a tile of accumulators, staged in shared memory as [outer][pitch], goes to D in vectors along the inner direction."""

    inner: str  # "n" | "m": the direction along which D is contiguous
    tile_outer: int
    tile_inner: int
    pitch: int
    vec: int
    inner_threads: int
    outer_step: int
    unroll: int
    m_digits: int
    n_digits: int
    batch_digits: int
    compute: str
    acc_size: int
    targets: tuple[TargetConsts, ...]  # D first
    expression: Any
    scalars: tuple[str, ...]
    wide: bool
    acc: str  # PTX type of the staged accumulators, where it is another than `compute`: s32
    has_aux: bool = False  # the last target is a second output
    is_gated: bool = False  # a line holds both sums, 8 by 8: tile_inner counts D's columns, half of them
    addend: str = ""  # the operand, of integers, that is added to the sum before it is converted
    # The 16-byte pieces 2i and 2i + 1 of a line change places where i / 4 is odd: a warp then reads 32 bytes a lane without conflicts.
    flips: bool = False
    moments: int = 0  # rows of D of whose columns mean and squares are written beside it: those of the tile, or none
    threads: int = 0  # that write the tile
    loads_ahead: bool = False
    has_amax: bool = False  # of the expression's second output the largest size is found

    @property
    def smem_bytes(self) -> int:
        return self.tile_outer * self.pitch * self.acc_size

    @property
    def columns(self) -> int:
        return self.tile_inner if self.inner == "n" else self.tile_outer

    @property
    def moment_groups(self) -> int:
        """Groups of threads that deal out the rows of a column."""
        return max(1, self.threads // self.columns) if self.moments else 1

    @property
    def outer(self) -> str:
        return "m" if self.inner == "n" else "n"

    @property
    def operands(self) -> tuple[TargetConsts, ...]:
        """What the expression reads."""
        return self.targets[1:-1] if self.has_aux else self.targets[1:]

    @property
    def hoisted(self) -> tuple[Any, tuple[tuple[str, Any], ...]]:
        """The expression without its parts of operands of one element, and these: found once, for all elements at hand."""
        if self.expression is None:
            return None, ()
        return _hoisted(self.expression, tuple(t.name for t in self.operands if t.access == "broadcast" and t.name != self.addend))


@lru_cache(maxsize=256)
def _hoisted(expression: Any, still: tuple[str, ...]) -> tuple[Any, tuple[tuple[str, Any], ...]]:
    return expression.hoisted(still)  # type: ignore[no-any-return]


def target_vector(t: Target, d: Digits, inner: str) -> int:
    """Elements of D that one store may write along `inner`."""
    extents, strides = (d.out_n, t.n_strides) if inner == "n" else (d.out_m, t.m_strides)
    if strides[-1] != 1 or (d.is_ragged and inner == "m"):
        return 1
    others = [*zip(extents[:-1], strides[:-1], strict=True), *zip(d.batch, t.batch_strides, strict=True)]
    others += zip(d.out_m, t.m_strides, strict=True) if inner == "n" else zip(d.out_n, t.n_strides, strict=True)
    facts = [(extents[-1], "extent"), (t.base, "base"), (max(1, t.align // t.dtype.num_bytes), "alignment")]
    facts += [(stride, "stride") for extent, stride in others if extent > 1]
    return _widest(facts, 16 // t.dtype.num_bytes, inner).width


def inner_direction(d: Digits) -> str:
    """"n" or "m": along which D is written in the wider vectors, or at all contiguously."""
    out = d.targets[0]
    is_m = out.m_strides[-1] == 1 and (out.n_strides[-1] != 1 or target_vector(out, d, "m") > target_vector(out, d, "n"))
    return "m" if is_m else "n"


def plan_epilogue(d: Digits, am: AffineMatmul, tile_m: int, tile_n: int, threads: int, wide: bool, is_split: bool) -> EpilogueConsts:
    """The epilogue of a tile; of a split sum, the one that writes raw partial sums to the workspace."""
    is_gated = am.up is not None
    inner = "n" if is_gated else inner_direction(d)
    tile_inner, tile_outer = (tile_n, tile_m) if inner == "n" else (tile_m, tile_n)
    line = tile_inner
    if is_gated:
        tile_inner, tile_n = tile_inner // 2, tile_n // 2
    acc_size = am.acc.num_bytes
    vec = 16 // acc_size if is_split else target_vector(d.targets[0], d, inner)
    vec = min(vec, 8, max(1, tile_m * tile_n // threads), tile_inner)
    inner_threads = min(threads, tile_inner // vec)
    outer_step = threads // inner_threads
    while outer_step > tile_outer:  # more threads than vectors in the tile
        vec //= 2
        inner_threads = min(threads, tile_inner // vec)
        outer_step = threads // inner_threads
    # Word addresses of a warp's fragments must spread over the 32 banks: along n pairs at pitch 8 modulo 32, along m single words at 4.
    pitch = line + (8 if inner == "n" else 4)
    if is_split:
        targets: tuple[TargetConsts, ...] = (TargetConsts("d", "d", am.acc.name, acc_size, "vector"),)
    else:
        targets = tuple(_target_consts(i, t, d, inner, vec) for i, t in enumerate(d.targets))
    iterations = tile_outer // outer_step
    unroll = max(u for u in (1, 2, 4) if iterations % u == 0 and u * vec <= (32 if len(targets) == 1 else 16))
    m_digits, n_digits = (1, 1) if is_split else (len(d.out_m), len(d.out_n))
    return with_loads_ahead(EpilogueConsts(inner, tile_outer, tile_inner, pitch, vec, inner_threads, outer_step, unroll, m_digits, n_digits,
                          1 if is_split else len(d.batch), am.acc.ptx if is_split else epilogue_type(am), acc_size, targets,
                          None if is_split else am.epilogue, () if is_split else _scalars(am), wide, am.acc.ptx,
                          am.aux is not None and not is_split, is_gated, "" if is_split else am.addend,
                          moments=tile_m if am.moments and not is_split else 0, threads=threads, has_amax=am.amax and not is_split))


def epilogue_type(am: AffineMatmul) -> str:
    """The PTX type of the epilogue's arithmetic: that of the sums, but f32 for integers that become floats or bytes by an expression."""
    becomes_float = am.d.dtype.is_float or (am.epilogue is not None and am.d.dtype is not S32)
    return "f32" if am.acc is S32 and becomes_float else am.acc.ptx


def _scalars(am: AffineMatmul) -> tuple[str, ...]:
    return am.epilogue.scalars if am.epilogue is not None else ()  # type: ignore[attr-defined]


def _in_vectors(widest: int, vec: int, size: int) -> bool:
    """Whether `vec` elements come in one access, or in several of 16 bytes."""
    return (widest % vec == 0 and vec * size in (2, 4, 8, 16, 32, 64)) or (widest * size == 16 and vec % widest == 0)


def _target_consts(index: int, t: Target, d: Digits, inner: str, vec: int) -> TargetConsts:
    prefix = "d" if index == 0 else f"e{index - 1}"
    strides = t.n_strides if inner == "n" else t.m_strides
    if all(s == 0 for s in strides):
        access = "broadcast"
    elif vec > 1 and _in_vectors(target_vector(t, d, inner), vec, t.dtype.num_bytes):
        access = "vector"
    else:
        access = "scalar"
    if index == 0:
        access = "vector"
    moves = index == 0 or any(t.m_strides if inner == "n" else t.n_strides)
    return TargetConsts(prefix, t.name, t.dtype.name, t.dtype.num_bytes, access, f"{prefix}_{inner}{len(strides) - 1}", moves)


MAX_AHEAD = 320  # lines of PTX, of all that is loaded ahead: a kernel has them for each panel


def loads_ahead(e: EpilogueConsts) -> bool:
    """Whether the operands of all lines that a thread writes in turn may be under way before the first is used: those of whole vectors, or
    one element for all, in f32 arithmetic."""
    if e.expression is None or e.has_aux or e.has_amax or e.is_gated or e.compute != "f32" or e.acc not in ("f32", "s32") or e.vec * 2 < 4:
        return False
    simple = all(t.access in ("vector", "broadcast") and (t.dtype in ("f32", "f16", "bf16") or t.name == e.addend and not t.moves)
                 for t in e.operands)
    return simple and any((t.moves or e.acc == "s32") and t.access == "vector" for t in e.operands)


def with_loads_ahead(e: EpilogueConsts) -> EpilogueConsts:
    """Up to four lines at a time where operands are loaded ahead: 16 bytes of each, a thread waits for memory once."""
    if not loads_ahead(e):
        return e
    inputs = {name: f"%{name}" for name in ("acc", *e.expression.args, *e.expression.scalars)}
    size = e.vec * (e.expression.lower(inputs, ["%acc"], "f32").count("\n") + 1)  # of a line's arithmetic, in lines of PTX
    lines = e.tile_outer // e.outer_step
    return replace(e, loads_ahead=True, unroll=max((u for u in (1, 2, 4) if lines % u == 0 and u * e.vec <= 32 and u * size <= MAX_AHEAD),
                                                   default=1))


# ---- Groups of rows or terms ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RaggedConsts:
    """What a template knows of an AffineMatmul's groups (see affine.Ragged)."""

    side: str
    dtype: str
    is_cumulative: bool

    @staticmethod
    def of(am: AffineMatmul) -> RaggedConsts | None:
        r = am.ragged
        return None if r is None else RaggedConsts(r.side, r.dtype.name, r.is_cumulative)


def ragged_arguments(am: AffineMatmul, offset_type: str) -> list[Arg]:
    """The parameters of lib/groups, and the stride from a group's B to the next."""
    r = am.ragged
    if r is None:
        return []
    total = am.m.size if r.side == "m" else am.k.size
    args = [Arg("ptr_group_sizes", "u64", TensorArg(r.sizes)), Arg("groups_count", "u32", r.count), Arg("groups_total", "u32", total),
            Arg("groups_step", "s64", r.step * r.dtype.num_bytes)]
    return args + ([Arg("groups_b", offset_type, r.b_stride)] if r.side == "m" else [])


def ragged_tiles(rows: int, r: Ragged, tile_rows: int) -> int:
    """The most tiles that `rows` rows make in groups of whatever sizes: each that is not empty, and the rows of none, may end in a part
    of a tile. Of n such groups: sum of ceil(size / tile) = sum of floor((size - 1) / tile) + 1 <= floor((rows - n) / tile) + n."""
    n = min(r.count + 1, rows)
    return (rows - n) // tile_rows + n


# ---- Arguments -------------------------------------------------------------------------------------------


class Arguments:
    """The kernel's parameters in order, filled by role; templates find each as a register of the same name."""

    def __init__(self, wide: bool) -> None:
        self.args: list[Arg] = []
        self.offset_type = "s64" if wide else "s32"

    def add(self, name: str, type_: str, value: ArgValue) -> None:
        self.args.append(Arg(name, type_, value))

    def space(self, prefix: str, extents: Sequence[int]) -> None:
        """Extents of a space, and the magics to take off all digits but the first."""
        for i, extent in enumerate(extents):
            self.add(f"{prefix}_ext{i}", "u32", extent)
            if i:
                self.divisor(f"{prefix}{i}", extent)

    def divisor(self, stem: str, value: int) -> None:
        multiplier, shift = magic(max(1, value))
        self.add(f"{stem}_mul", "u32", multiplier)
        self.add(f"{stem}_shr", "u32", shift)

    def weights(self, stem: str, values: Sequence[int]) -> None:
        for i, value in enumerate(values):
            self.add(f"{stem}{i}", self.offset_type, value)


def tile_arguments(am: AffineMatmul, d: Digits, loaders: Sequence[LoaderConsts], epilogue: EpilogueConsts, grid: Grid, tile_k: int,
                   wide: bool, workspace_offset: int) -> list[Arg]:
    """The argument table of a tiled kernel."""
    t = Arguments(wide)
    if grid.n_tiles > 1:
        t.add("n_tiles", "u32", grid.n_tiles)
        t.add("group_m", "u32", grid.group_m)
        t.add("group_tail", "u32", grid.group_tail)
        t.add("last_group", "u32", grid.last_group)
        t.add("group_tiles", "u32", grid.group_m * grid.n_tiles)
        for stem, value in (("group_tiles", grid.group_m * grid.n_tiles), ("group_m", grid.group_m), ("group_tail", grid.group_tail)):
            t.divisor(stem, value)
    if grid.slices > 1:
        t.add("tiles", "u32", grid.m_tiles * grid.n_tiles)
        t.divisor("tiles", grid.m_tiles * grid.n_tiles)
    if grid.splits > 1:
        t.add("batch_size", "u32", am.batch.size)
        t.divisor("batch_size", am.batch.size)
    t.add("k_tiles", "u32", grid.k_tiles)
    t.add("k_tiles_per_split", "u32", grid.k_tiles_per_split)
    t.space("k", d.k)
    for i, step in enumerate(mixed_radix(tile_k, d.k)):
        t.add(f"k_inc{i}", "u32", step)
    t.space("batch", d.batch)
    t.args += ragged_arguments(am, t.offset_type)
    for x, loader in zip((d.a, d.b), loaders, strict=True):
        n = loader.name
        t.add(f"ptr_{n}", "u64", TensorArg(x.source.name))
        t.add(f"{n}_base", t.offset_type, x.source.base)
        t.add(f"{n}_row_last", "u32", max(0, prod(x.rows) - (loader.vec if loader.major == "row" else 1)))
        t.space(f"{n}_row", x.rows)
        t.weights(f"{n}_row_stride", x.row_strides)
        t.weights(f"{n}_k_stride", x.k_strides)
        t.weights(f"{n}_batch_stride", x.batch_strides)
        for i, (bound, shape) in enumerate(zip(x.bounds, loader.bounds, strict=True)):
            t.add(f"{n}_bound{i}_offset", "s32", bound.offset)
            t.add(f"{n}_bound{i}_extent", "u32", bound.extent)
            for j in shape.row_digits:
                t.add(f"{n}_bound{i}_row_coef{j}", "s32", bound.row_coefs[j])
            for j in shape.k_digits:
                t.add(f"{n}_bound{i}_k_coef{j}", "s32", bound.k_coefs[j])
        if x.prologue is not None and loader.prologue is not None:
            for i, (term, shape_of) in enumerate(zip(x.prologue.operands, loader.prologue.terms, strict=True)):
                t.add(f"ptr_{n}_term{i}", "u64", TensorArg(term.name, term.base * term.dtype.num_bytes))
                t.weights(f"{n}_term{i}_batch_stride", term.batch_strides)
                if shape_of.by:
                    t.weights(f"{n}_term{i}_stride", term.k_strides if shape_of.by == "k" else term.row_strides)
    if grid.splits > 1:
        _partial_arguments(t, grid, am, epilogue, workspace_offset)
    else:
        _target_arguments(t, am, d, epilogue)
    return t.args


def _target_arguments(t: Arguments, am: AffineMatmul, d: Digits, epilogue: EpilogueConsts) -> None:
    t.add("out_m_size", "u32", am.m.size)
    t.add("out_n_size", "u32", am.n.size)
    t.space("out_m", d.out_m)
    t.space("out_n", d.out_n)
    for consts, target in zip(epilogue.targets, d.targets, strict=True):
        p = consts.prefix
        t.add(f"ptr_{p}", "u64", TensorArg(target.tensor or target.name, target.base * target.dtype.num_bytes))
        t.weights(f"{p}_m", target.m_strides)
        t.weights(f"{p}_n", target.n_strides)
        t.weights(f"{p}_b", target.batch_strides)
    for name in epilogue.scalars:
        t.add(f"scalar_{name}", epilogue.compute, ScalarArg(name))
    if epilogue.has_amax:
        t.add("ptr_amax", "u64", TensorArg("amax"))
    if epilogue.moments:
        blocks = -(-am.m.size // epilogue.moments)
        t.add("ptr_moments", "u64", WorkspaceArg(0))
        t.add("moment_blocks", "u32", blocks)


def _partial_arguments(t: Arguments, grid: Grid, am: AffineMatmul, epilogue: EpilogueConsts, workspace_offset: int) -> None:
    """Partial sums lie in the workspace as [split * batch][outer][padded inner]; padding may be written, it is never read."""
    sizes = {"m": am.m.size, "n": am.n.size, epilogue.inner: grid.padded_inner}
    strides = {epilogue.inner: 1, epilogue.outer: grid.padded_inner}
    for s in ("m", "n"):
        t.add(f"out_{s}_size", "u32", sizes[s])
        t.add(f"out_{s}_ext0", "u32", sizes[s])
    t.add("ptr_d", "u64", WorkspaceArg(workspace_offset))
    for s in ("m", "n"):
        t.weights(f"d_{s}", (strides[s],))
    t.weights("d_b", (sizes["m"] * sizes["n"],))


def mixed_radix(value: int, extents: Sequence[int]) -> tuple[int, ...]:
    """The digits of `value`; the first takes the rest."""
    digits = []
    for extent in reversed(extents[1:]):
        digits.append(value % max(1, extent))
        value //= max(1, extent)
    return (value, *reversed(digits))


# ---- Grid ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Grid:
    """Tiles of the output, groups of the raster, and the split of k. CTA order: split, batch, group of m tiles, n tile, m within."""

    m_tiles: int
    n_tiles: int
    batch: int
    splits: int
    k_tiles: int
    k_tiles_per_split: int
    group_m: int
    padded_inner: int = 0
    outer_size: int = 0

    @property
    def slices(self) -> int:
        return self.splits * self.batch

    @property
    def ctas(self) -> int:
        return self.m_tiles * self.n_tiles * self.slices

    @property
    def last_group(self) -> int:
        return (self.m_tiles - 1) // self.group_m

    @property
    def group_tail(self) -> int:
        return self.m_tiles - self.last_group * self.group_m

    @property
    def partial_elements(self) -> int:
        return self.slices * self.outer_size * self.padded_inner if self.splits > 1 else 0


def plan_grid(am: AffineMatmul, tile: tuple[int, int, int], split_k: int, inner: str = "n") -> Grid:
    tile_m, tile_n, tile_k = tile
    k_size = am.k.size
    if am.ragged is not None and am.ragged.side == "k":  # of a group, about; the kernel finds out
        k_size = -(-k_size // max(1, am.ragged.count)) + tile_k // 2
    k_tiles = max(1, -(-k_size // tile_k))
    per_split = -(-k_tiles // min(split_k, k_tiles))
    m_tiles, n_tiles = -(-am.m.size // tile_m), -(-columns_of(am) // tile_n)
    if am.ragged is not None and am.ragged.side == "m":
        m_tiles = ragged_tiles(am.m.size, am.ragged, tile_m)
    sizes = {"m": am.m.size, "n": am.n.size}
    unit = 16 // am.acc.num_bytes
    # A group of m tiles times all n tiles: 8 rows of tiles keep both operands' panels of one wave in the L2 cache.
    return Grid(m_tiles, n_tiles, am.batch.size, -(-k_tiles // per_split), k_tiles, per_split, min(8, m_tiles),
                -(-sizes[inner] // unit) * unit, sizes["m" if inner == "n" else "n"])


EMULATED_BATCH = 16384  # threads the emulator advances together; below, an instruction costs the same


def split_choices(am: AffineMatmul, tile: tuple[int, int, int], threads: int, device: DeviceInfo) -> tuple[int, ...]:
    """1 and, where the tiles do not fill the device, numbers of k splits that bring one to four CTAs per SM (emulated: a full batch)."""
    whole = plan_grid(am, tile, 1)
    if whole.ctas == 0 or am.ragged is not None or am.up is not None:
        return (1,)
    wanted = [EMULATED_BATCH // threads] if device.is_emulated else [waves * device.num_sms for waves in (1, 2, 3, 4)]
    choices = {1}
    for ctas in wanted:
        splits = min(ctas // whole.ctas, whole.k_tiles // (1 if device.is_emulated else 4))
        if splits > 1 and plan_grid(am, tile, splits).partial_elements < 2**31:
            choices.add(plan_grid(am, tile, splits).splits)
    return tuple(sorted(choices))


# ---- Build -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TiledConsts:
    """Consts that the tiled loops share: the CTA's tile, the ring of stages through which k comes, what fills it and what empties the
    accumulators. has_slices: there are batches or splits; has_n_tiles: more than one tile along n; ragged: groups of rows or terms."""

    tile_m: int
    tile_n: int
    tile_k: int
    stages: int
    stage_bytes: int
    a: LoaderConsts
    b: LoaderConsts
    epilogue: EpilogueConsts
    has_slices: bool
    is_split: bool
    has_n_tiles: bool
    ragged: RaggedConsts | None

    @property
    def has_async(self) -> bool:
        return self.a.is_async or self.b.is_async

    @property
    def smem_bytes(self) -> int:
        return max(self.stages * self.stage_bytes, self.epilogue.smem_bytes)

    def part_places(self, loader: LoaderConsts, part: int, parts: int) -> list[tuple[int, list[int]]]:
        """What a thread loads of the loader's tile in part `part` of `parts`, of which A's places are the first: (k position, row
        positions)."""
        before = 0 if loader is self.a else self.a.row_positions * self.a.k_positions
        total = sum(x.row_positions * x.k_positions for x in (self.a, self.b))
        places: dict[int, list[int]] = {}
        for n in range(max(part * total // parts, before), min((part + 1) * total // parts,
                                                               before + loader.row_positions * loader.k_positions)):
            places.setdefault((n - before) // loader.row_positions, []).append((n - before) % loader.row_positions)
        return list(places.items())


def tiled_build(template: str, op: str, am: AffineMatmul, c: TiledConsts, d: Digits, grid: Grid, threads: int, target: PtxTarget,
                kind: str, workspace_offset: int, cluster: int = 1, resident: int = 0) -> Build:
    """The kernel and, where k is split, the sum of the parts. workspace_bytes counts from 0, workspace_offset included.

    cluster: CTAs that share a tile of the grid. resident: CTAs that take all tiles in turn (0: each takes one).
    """
    args = tile_arguments(am, d, (c.a, c.b), c.epilogue, grid, c.tile_k, c.a.wide, workspace_offset)
    args += [Arg("all_tiles", "u32", grid.ctas)] if resident else []
    ctas = min(grid.ctas, resident) if resident else grid.ctas * cluster
    step = Step.of(template, op, target, threads, args, c, ctas, dynamic_smem=c.smem_bytes,
                   cluster=cluster, suffix=f"{kind}_{c.tile_m}x{c.tile_n}x{c.tile_k}")
    if grid.splits == 1:
        return Build((step,))
    reduce = reduce_step(op, am, d, grid, c.epilogue, target, c.a.wide, workspace_offset)
    return Build((step, reduce), workspace_offset + grid.partial_elements * am.acc.num_bytes)


@dataclass(frozen=True, slots=True)
class ReduceConsts:
    """The second step of a split sum: partial sums added in the order of the splits, then the epilogue. sharers: threads of a CTA that
    deal out the splits of a vector."""

    epilogue: EpilogueConsts
    unroll: int
    sharers: int


REDUCE_THREADS = 128
REDUCE_UNROLL = 16  # partial sums under way at a time, at most
MAX_SHARERS = 16
BUSY_THREADS = 32768  # that keep a device's memory busy


def reduce_step(op: str, am: AffineMatmul, d: Digits, grid: Grid, tile_epilogue: EpilogueConsts, target: PtxTarget, wide: bool,
                workspace_offset: int) -> Step:
    inner = tile_epilogue.inner
    vec = min(16 // am.acc.num_bytes, target_vector(d.targets[0], d, inner))
    elements = am.batch.size * am.m.size * am.n.size
    sharers = 1
    while sharers < MAX_SHARERS and elements // vec * sharers < BUSY_THREADS and grid.splits >= 8 * sharers:
        sharers *= 2
    while vec > 1 and elements // vec * sharers < BUSY_THREADS:
        vec //= 2
    per_sharer = -(-grid.splits // sharers)
    targets = tuple(_target_consts(i, t, d, inner, vec) for i, t in enumerate(d.targets))
    epilogue = replace(tile_epilogue, vec=vec, m_digits=len(d.out_m), n_digits=len(d.out_n), batch_digits=len(d.batch), targets=targets,
                       expression=am.epilogue, scalars=_scalars(am), has_aux=am.aux is not None, has_amax=am.amax,
                       tile_outer=0, tile_inner=0, pitch=0, inner_threads=0, outer_step=0, unroll=1, loads_ahead=False)
    t = Arguments(wide)
    chunks = -(-{"m": am.m.size, "n": am.n.size}[inner] // vec)
    total = chunks * grid.outer_size * grid.batch
    t.add("ptr_partial", "u64", WorkspaceArg(workspace_offset))
    t.add("splits", "u32", grid.splits)
    if sharers > 1:
        t.add("splits_per_sharer", "u32", per_sharer)
    t.add("split_stride", "u64", grid.batch * grid.outer_size * grid.padded_inner * am.acc.num_bytes)
    t.add("padded_inner", "u32", grid.padded_inner)
    t.add("num_chunks", "u32", total)
    t.add("row_chunks", "u32", chunks)
    t.divisor("row_chunks", chunks)
    t.add("outer_size", "u32", grid.outer_size)
    t.divisor("outer_size", grid.outer_size)
    t.space("batch", d.batch)
    _target_arguments(t, am, d, epilogue)
    consts = ReduceConsts(epilogue, REDUCE_UNROLL if per_sharer > 8 else 8, sharers)
    return Step.of("matmul/split_k_reduce", op, target, REDUCE_THREADS, t.args, consts,
                   -(-total * sharers // REDUCE_THREADS), follows=target.capability >= (9, 0), suffix=am.d.dtype.name)


def may_make_moments(am: AffineMatmul) -> bool:
    """Whether a tile's moments can be taken where it is staged: in f32, of results that f32 holds."""
    blocks = -(-am.m.size // SMALLEST_TILE)
    return am.acc is F32 and am.d.dtype in (F32, F16, BF16) and am.ragged is None and blocks * am.n.size * am.batch.size < INT32_MAX


def check_common(am: AffineMatmul, device: DeviceInfo) -> Support:
    """What every tiled kernel needs: float types outside (sums of integers may stay s32), linear indices and CTA counts below 2^31."""
    if am.up is not None and (len(am.n.extents) != 1 or am.n.size % GATE_COLUMNS or am.up.row_strides != am.b.row_strides):
        return refuse(f"a gate of {am.n.size} columns; multiples of {GATE_COLUMNS} are supported")
    for target in (am.d, *am.operands, *((am.aux,) if am.aux is not None else ())):
        if target.dtype not in (F64, F32, F16, BF16, S32, *INT8) and not (target.dtype in FP8 and target is am.d):
            return refuse(f"{target.name} is {target.dtype}; f64, f32, f16, bf16, s32, s8 and u8 are supported, for results fp8 too")
        if target is am.d and target.dtype is S32 and am.acc is not S32:
            return refuse(f"{target.name} is {target.dtype} of sums in {am.acc}; floats and types of 8 bits are supported")
    for name, space in (("m", am.m), ("n", am.n), ("k", am.k), ("batch", am.batch)):
        if space.size >= 2**31 - 4096:
            return refuse(f"{name} has {space.size} points; a linear index must stay below 2^31 - 4096")
        if len(space.extents) > 8:
            return refuse(f"{name} has {len(space.extents)} digits; 8 are supported")
    if am.batch.size * -(-am.m.size // SMALLEST_TILE) * -(-am.n.size // SMALLEST_TILE) >= 2**31:
        return refuse(f"{am.batch.size} x {am.m.size} x {am.n.size} results may take 2^31 CTAs or more")
    if am.ragged is not None and am.ragged.side == "m" and ragged_tiles(am.m.size, am.ragged, MAX_TILE) * MAX_TILE >= 2**31:
        return refuse(f"{am.m.size} rows in {am.ragged.count} groups make tiles of 2^31 rows")
    for bound in (*am.a.bounds, *am.b.bounds):
        if bound.extent >= 2**30:
            return refuse(f"a bound's extent is {bound.extent}; it must stay below 2^30")
    return Support(True)


def check_halves_sm90(name: str, am: AffineMatmul, device: DeviceInfo) -> Support:
    """sm_90a; both operands f16 or both bf16, f32 sums."""
    if device.arch != "sm_90a":
        return refuse(f"{name} needs sm_90a, the device is {device.arch}")
    if am.a.dtype != am.b.dtype or am.a.dtype not in (F16, BF16) or am.acc.name != "f32":
        return refuse(f"{name} multiplies f16 or bf16 pairs in f32, not {am.a.dtype} x {am.b.dtype} in {am.acc}")
    return Support(True)


def empty_build(am: AffineMatmul) -> Build | None:
    """The build of a matmul with no output elements, else None. A k space without points is no special case: its sums are zero."""
    return Build(()) if am.m.size == 0 or am.n.size == 0 or am.batch.size == 0 else None


# ---- Cost ------------------------------------------------------------------------------------------------


def estimate_us(am: AffineMatmul, grid: Grid, tile: tuple[int, int, int], sm_flop_per_us: float, ctas_per_sm: int, device: DeviceInfo,
                efficiency: float, start_us: float = 0.0, in_turns: bool = False) -> float:
    """Closed-form time of a tiled kernel: rounds of CTAs over the SMs at the tile's arithmetic time, bounded below by the traffic.

    efficiency: fraction of sm_flop_per_us that enough resident CTAs of this tile reach. One round costs a fixed latency (first loads and
    epilogue; start_us if given), which co-resident CTAs hide from each other. in_turns: the resident CTAs take the tiles, so that the
    last ones share SMs as those before did, though others stand idle.
    """
    tile_m, tile_n, tile_k = tile
    flop = 2.0 * tile_m * tile_n * tile_k * grid.k_tiles_per_split
    rounds = -(-grid.ctas // device.num_sms)
    if in_turns:
        rounds = ctas_per_sm * -(-grid.ctas // (device.num_sms * ctas_per_sm))
    tile_us = flop / (sm_flop_per_us * efficiency)
    latency_us = start_us or 1.2 + 0.002 * tile_m * tile_n / 64
    compute_us = rounds * tile_us + latency_us * max(1.0, rounds / ctas_per_sm)
    size = am.a.dtype.num_bytes
    # Unique bytes from memory, somewhat slower than a copy; every tile's operands from L2 (measured there: about 5.5 TB/s on an H100,
    # twice memory elsewhere).
    matrices = min(am.ragged.count, am.m.size) if am.ragged is not None and am.ragged.side == "m" else 1
    matrices *= 2 if am.up is not None else 1
    unique = size * (source_elements(am.a, am.m, am.k, am.batch) + matrices * source_elements(am.b, am.n, am.k, am.batch))
    out_bytes = am.batch.size * am.m.size * am.n.size * am.d.dtype.num_bytes * (1 + len(am.operands) * 0.5)
    partial_bytes = 2.0 * grid.partial_elements * am.acc.num_bytes
    memory_us = (unique + out_bytes) / (device.bandwidth_gbs * 0.82e3)
    # Memory answers in about 1.2 us; with fewer bytes under way than it gives in that time (some 2.5 stages a CTA) it waits.
    in_flight = min(grid.ctas, device.num_sms * ctas_per_sm) * 2.5 * tile_k * (tile_m + tile_n) * size
    memory_us *= max(1.0, min(unique, device.bandwidth_gbs * 1.2e3) / in_flight)
    l2_us = (grid.ctas * grid.k_tiles_per_split * tile_k * (tile_m + tile_n) * size + partial_bytes) / (device.bandwidth_gbs * 1.8e3)
    return max(compute_us, memory_us, l2_us) + 5.0 + (2.5 + partial_bytes / (device.bandwidth_gbs * 1.5e3) if grid.splits > 1 else 0.0)


def source_elements(x: Source, rows: IndexSpace, k: IndexSpace, batch: IndexSpace) -> int:
    """Distinct elements read, at most: the smaller of the index points and the span of the offsets."""
    extents = (*rows.extents, *k.extents, *batch.extents)
    strides = (*x.row_strides, *x.k_strides, *_padded(x.batch_strides, batch))
    points = prod(e for e, s in zip(extents, strides, strict=True) if s)
    return min(points, reach(extents, strides) + 1)
