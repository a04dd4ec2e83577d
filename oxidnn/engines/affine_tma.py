"""Which tensor maps bring an operand's tiles into shared memory, and at which coordinates: decided in Python, operand by operand.

A stage holds `rows` rows by 128 bytes of k of an operand, in panels with 128-byte swizzle: "k" major (k contiguous) one panel of all
rows, "row" major (rows contiguous) a panel of 64 rows by the tile's k for each chunk of 64 rows. A box of a tensor map fetches a panel.
Every coordinate is a sum of digits times coefficients, so what a kernel computes per k tile is a few multiply-adds by one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import gcd, prod

from ..codegen.spec import TensorMapSpec
from .affine_tiling import Digits, Operand, merge

SPAN_BYTES = 128  # of the swizzle, and of k in a stage
CHUNK_ROWS = 64  # of a "row"-major panel: 128 bytes of a 16-bit type
MAX_RANK = 5
MAX_BOX = 256
MAX_PIXELS = 1024
MAX_STRIDE = 2**40
# Bits of a corner (signed) and of an offset (unsigned) of an im2col map, by rank.
CORNER_BITS = {3: 16, 4: 8, 5: 5}


@dataclass(frozen=True, slots=True)
class Walk:
    """How k is walked in tiles of tile_k, over digits of these extents.

    Along taps the last digit (channels) is padded to whole tiles, so that a tile never straddles it, and walked outermost: all taps of the
    same pixels follow each other, and what is read for the first time is spread over the sum. A linear walk takes k as it comes.
    """

    extents: tuple[int, ...]
    tile_k: int
    is_linear: bool

    @property
    def k_tiles(self) -> int:
        return -(-prod(self.extents) // self.tile_k)


def walk_taps(k: Sequence[int], tile_k: int) -> Walk:
    return Walk((*k[:-1], -(-k[-1] // tile_k) * tile_k), tile_k, len(k) == 1)


def walk_linear(k: Sequence[int], tile_k: int) -> Walk:
    return Walk(tuple(k), tile_k, True)


@dataclass(frozen=True, slots=True)
class Sum:
    """base + sum of coefficient * digit; digits by register: "row_digit<i>", "k_digit<i>", "batch_digit<i>", "k_linear"."""

    base: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    def __add__(self, other: Sum) -> Sum:
        return Sum(self.base + other.base, self.terms + other.terms)


@dataclass(frozen=True, slots=True)
class SumConsts:
    """A Sum seen by a template: parameters `<stem>_base` and, but for coefficients of 1, `<stem>_<digit>`."""

    stem: str
    row_terms: tuple[tuple[str, bool], ...]  # (digit, is its coefficient 1), fixed while a tile lasts
    k_terms: tuple[tuple[str, bool], ...]


@dataclass(frozen=True, slots=True)
class BoxesConsts:
    """What a template knows of an operand's boxes. name: prefix of parameters and registers ("a", "b")."""

    name: str
    major: str
    chunks: int  # boxes of a stage
    chunk_bytes: int
    smem_offset: int
    row_digits: int
    coordinates: tuple[SumConsts, ...]
    offsets: tuple[SumConsts, ...]  # of an im2col map
    shared_rows: int = 0  # rows that each of two CTAs brings for both; the boxes are of these

    @property
    def map(self) -> str:
        return f"map_{self.name}"


@dataclass(frozen=True, slots=True)
class Boxes:
    """The boxes of an operand: a tensor map that starts byte_offset bytes after the operand's address, and their coordinates."""

    map: TensorMapSpec
    byte_offset: int
    major: str
    rows: tuple[int, ...]  # extents of the row digits
    coordinates: tuple[Sum, ...]
    offsets: tuple[Sum, ...] = ()

    def consts(self, name: str, tile_rows: int, smem_offset: int, group: Sequence[Boxes] = ()) -> BoxesConsts:
        """group: joint boxes of the other members, with which a coefficient of 1 is only implied if it is 1 in all."""
        chunks = 1 if self.major == "k" else -(-tile_rows // CHUNK_ROWS)

        def sums(stem: str, values: Sequence[tuple[Sum, ...]]) -> tuple[SumConsts, ...]:
            found = []
            for i, alike in enumerate(zip(*values, strict=True)):
                terms = tuple((digit, all(dict(s.terms)[digit] == 1 for s in alike)) for digit, _ in alike[0].terms)
                found.append(SumConsts(f"{name}_{stem}{i}", tuple(t for t in terms if not t[0].startswith("k_")),
                                       tuple(t for t in terms if t[0].startswith("k_"))))
            return tuple(found)

        every = (self, *group)
        return BoxesConsts(name, self.major, chunks, tile_rows // chunks * SPAN_BYTES, smem_offset, len(self.rows),
                           sums("x", [b.coordinates for b in every]), sums("o", [b.offsets for b in every]))


def plan_boxes(x: Operand, d: Digits, walk: Walk, tile_rows: int) -> Boxes | str:
    """The boxes of an operand under a walk of k, or the reason why tensor maps cannot fetch it.

    Tiled maps first, which have a dimension for each digit; then im2col maps, which step through the positions of a convolution.
    """
    size = x.source.dtype.num_bytes
    if x.source.align % 16:
        return f"{x.source.name} is aligned to {x.source.align} bytes only; tensor maps need 16"
    majors = ["k"] if x.k_strides[-1] == 1 or d.k == (1,) else []
    if size == 2 and (x.row_strides[-1] == 1 or x.rows == (1,)):
        majors.append("row")
    if not majors:
        return f"{x.source.name} is contiguous neither along k nor, in 16-bit types, along its rows"
    reasons = []
    for major in majors:
        for plan in (_tiled, _im2col):
            found = plan(x, d, walk, tile_rows, major)
            if isinstance(found, Boxes):
                return found
            reasons.append(found)
    return f"{x.source.name}: " + "; ".join(dict.fromkeys(reasons))


# ---- Patches ----------------------------------------------------------------------------------------------

BLOCK = 8  # rows of 64 are a block of 8 x 8 positions: what a product takes as 8 groups of 8 lines, a patch row apart


@dataclass(frozen=True, slots=True)
class HaloConsts:
    """What a template knows of patches. A patch holds the pixels under a block's positions and all taps; a tap is a start in it.

    Descriptor units (16 bytes, 8 to a pixel): start of the first tap, step from a tap to the next of its row, step to the next row.
    """

    taps_h: int
    taps_w: int
    patch_h: int
    patch_w: int
    start: int
    step_w: int
    step_h: int
    slots: int
    patches_at: int
    blocks: int  # of a tile

    @property
    def taps(self) -> int:
        return self.taps_h * self.taps_w

    @property
    def block_bytes(self) -> int:
        return self.patch_h * self.patch_w * SPAN_BYTES

    @property
    def slot_bytes(self) -> int:
        return self.blocks * self.block_bytes


@dataclass(frozen=True, slots=True)
class Halo:
    """Patches of a unit-stride operand of two spatial dimensions with two tap digits and a channel digit in k.

    blocks: extents of (image, block row, block column). first: pixel of position 0 and its lowest tap, (row, column).
    """

    map: TensorMapSpec
    byte_offset: int
    blocks: tuple[int, int, int]
    first: tuple[int, int]
    taps: tuple[int, int]
    dilation: tuple[int, int]

    @property
    def num_blocks(self) -> int:
        return prod(self.blocks)

    def consts(self, slots: int, patches_at: int, tile_rows: int) -> HaloConsts:
        (taps_h, taps_w), (step_h, step_w) = self.taps, self.dilation
        start_h, start_w = (max(0, -step * (taps - 1)) for step, taps in zip(self.dilation, self.taps, strict=True))
        patch_h, patch_w = self.map.box[2], self.map.box[1]
        pixel = SPAN_BYTES // 16
        return HaloConsts(taps_h, taps_w, patch_h, patch_w, (start_h * patch_w + start_w) * pixel, step_w * pixel,
                          (step_h * patch_w - step_w * taps_w) * pixel, slots, patches_at, tile_rows // CHUNK_ROWS)


def plan_halo(x: Operand, d: Digits, walk: Walk) -> Halo | str:
    """Patches that hold all taps of a block of positions, or why there are none."""
    size = x.source.dtype.num_bytes
    if size != 2 or len(x.rows) != 3 or len(d.k) != 3 or d.batch != (1,) or walk.is_linear or len(x.bounds) != 2:
        return "patches are of 16-bit types, (image, row, column) along the rows, (tap row, tap column, channel) along k, no batch"
    if x.k_strides[2] != 1 or x.source.align % 16:
        return "its channels are not contiguous or not aligned to 16 bytes"
    extents, first, dilation, base = [], [], [], x.source.base
    for i, bound in enumerate(x.bounds):
        step = bound.k_coefs[i]
        if bound.row_coefs != tuple(int(j == i + 1) for j in range(3)) or bound.k_coefs != tuple(step * (j == i) for j in range(3)):
            return "its steps are not 1, or a bound ties more than one position to one tap"
        if x.k_strides[i] != step * x.row_strides[i + 1]:
            return "a tap's stride does not fit its bound"
        base -= bound.offset * x.row_strides[i + 1]
        extents.append(bound.extent)
        first.append(bound.offset + min(0, step * (d.k[i] - 1)))
        dilation.append(step)
    build = _MapBuilder(size)
    patch = [BLOCK + abs(step) * (taps - 1) for step, taps in zip(dilation, d.k[:2], strict=True)]
    if max(patch) > MAX_BOX or patch[0] * patch[1] > MAX_PIXELS:
        return f"a patch of {patch[0]} x {patch[1]} is too large"
    build.add(d.k[2], 1, walk.tile_k, Sum())
    build.add(extents[1], x.row_strides[2], patch[1], Sum())
    build.add(extents[0], x.row_strides[1], patch[0], Sum())
    build.add(x.rows[0], x.row_strides[0], 1, Sum())
    fault = build.fault(base)
    if fault or base < 0:
        return fault or "its first element lies before the operand's"
    blocks = (x.rows[0], -(-x.rows[1] // BLOCK), -(-x.rows[2] // BLOCK))
    return Halo(build.finish(map_dtype(x)), base * size, blocks, (first[0], first[1]), (d.k[0], d.k[1]), (dilation[0], dilation[1]))


# ---- Tiled maps -------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _MapBuilder:
    """Dimensions of a map in the making."""

    size: int
    dims: list[int] = field(default_factory=list)
    strides: list[int] = field(default_factory=list)  # bytes, of all dimensions
    box: list[int] = field(default_factory=list)
    coordinates: list[Sum] = field(default_factory=list)
    base: int = 0  # elements to add to the operand's base

    def add(self, extent: int, stride: int, box: int, coordinate: Sum) -> None:
        self.dims.append(extent)
        self.strides.append(stride * self.size)
        self.box.append(box)
        self.coordinates.append(coordinate)

    def add_digit(self, digit: str, extent: int, stride: int) -> None:
        """A digit that stands still within a box; a negative stride is walked from its far end."""
        if stride == 0 or extent == 1:
            return
        if stride < 0:
            self.base += stride * (extent - 1)
            self.add(extent, -stride, 1, Sum(extent - 1, ((digit, -1),)))
        else:
            self.add(extent, stride, 1, Sum(0, ((digit, 1),)))

    def fault(self, base: int) -> str:
        """Why no tensor map has these dimensions; empty if one does."""
        if len(self.dims) > MAX_RANK:
            return f"{len(self.dims)} dimensions are more than a tensor map's {MAX_RANK}"
        for extent, stride in zip(self.dims[1:], self.strides[1:], strict=True):
            if extent > 1 and (stride % 16 or not 0 < stride < MAX_STRIDE):
                return f"a stride of {stride} bytes is no positive multiple of 16"
        if max(self.dims) > 2**32:
            return "a dimension exceeds 2^32"
        if (base + self.base) * self.size % 16:
            return "the first element is not aligned to 16 bytes"
        return ""

    def finish(self, dtype: str, **extra: object) -> TensorMapSpec:
        # A dimension of one element is never stepped over: any legal stride will do.
        strides = tuple(s if e > 1 else max(16, -(-s // 16) * 16) for e, s in zip(self.dims[1:], self.strides[1:], strict=True))
        box = self.box[:2] if "corners" in extra else self.box  # im2col: channels per pixel, pixels per column
        return TensorMapSpec(dtype, tuple(self.dims), strides, tuple(box), swizzle=SPAN_BYTES, **extra)  # type: ignore[arg-type]


def map_dtype(x: Operand) -> str:
    """The map's type: tf32 for f32, bytes for 8-bit types."""
    dtype = x.source.dtype
    return "tf32" if dtype.name == "f32" else "u8" if dtype.bits == 8 else dtype.name


def _groups(extents: Sequence[int], strides: Sequence[int]) -> list[tuple[list[int], int, int]]:
    """Neighbouring digits that count one extent through: (indices, extent, stride), outermost first."""
    groups: list[tuple[list[int], int, int]] = []
    for i, (extent, stride) in enumerate(zip(extents, strides, strict=True)):
        if groups and groups[-1][2] == extent * stride:
            indices, outer, _ = groups[-1]
            groups[-1] = ([*indices, i], outer * extent, stride)
        else:
            groups.append(([i], extent, stride))
    return groups


def _tiled(x: Operand, d: Digits, walk: Walk, tile_rows: int, major: str) -> Boxes | str:
    k_end = d.k[0]
    if len(x.bounds) == 1 and len(d.k) == 1 and (x.bounds[0].k_coefs, x.bounds[0].offset) == ((1,), 0) and not any(x.bounds[0].row_coefs):
        k_end = min(k_end, x.bounds[0].extent)  # of whole tiles of k the last ends early: as the map does
    elif x.bounds:
        return "its bounds need an im2col map"
    size = x.source.dtype.num_bytes
    tile_k = walk.tile_k
    merged_k, (merged_strides,) = merge(d.k, [x.k_strides])
    is_whole = len(merged_k) == 1 and (walk.is_linear or d.k[-1] % tile_k == 0)  # k_linear is k itself
    if not is_whole and walk.is_linear:
        return "its k digits do not collapse to one"
    build = _MapBuilder(size)
    k_inner = (k_end if len(d.k) == 1 else merged_k[0], merged_strides[0], Sum(0, (("k_linear", 1),))) if is_whole else \
        (d.k[-1], x.k_strides[-1], Sum(0, ((f"k_digit{len(d.k) - 1}", 1),)))
    if k_inner[1] < 0:
        return "its innermost k stride is negative"
    last_row = Sum(0, ((f"row_digit{len(x.rows) - 1}", 1),))
    if major == "k":
        # Tiles hold all digits of a gate's columns but the first.
        if len(x.rows) > 1 and (not x.is_gated or tile_rows % prod(x.rows[1:])):
            return "its rows do not collapse to one digit"
        if tile_rows > MAX_BOX:
            return f"{tile_rows} rows exceed a box"
        build.add(k_inner[0], 1, tile_k, k_inner[2])
        for i in range(len(x.rows) - 1, -1, -1):
            if x.row_strides[i] <= 0 < x.rows[i] - 1:
                return f"its row stride {x.row_strides[i]} is not positive"
            build.add(x.rows[i], x.row_strides[i], x.rows[i] if i else tile_rows // prod(x.rows[1:]), Sum(0, ((f"row_digit{i}", 1),)))
    else:
        if len(x.rows) > 1 and x.rows[-1] % CHUNK_ROWS:
            return f"its innermost row extent {x.rows[-1]} is no multiple of {CHUNK_ROWS}"
        build.add(x.rows[-1], 1, CHUNK_ROWS, last_row)
        build.add(k_inner[0], k_inner[1], tile_k, k_inner[2])
        for i in range(len(x.rows) - 1):
            build.add_digit(f"row_digit{i}", x.rows[i], x.row_strides[i])
    if not is_whole:
        for indices, extent, stride in reversed(_groups(d.k[:-1], x.k_strides[:-1])):
            if stride <= 0 or len(indices) == 1:
                for i in indices:
                    build.add_digit(f"k_digit{i}", d.k[i], x.k_strides[i])
            else:
                weights = [prod(d.k[j] for j in indices[p + 1:]) for p in range(len(indices))]
                build.add(extent, stride, 1, Sum(0, tuple((f"k_digit{i}", w) for i, w in zip(indices, weights, strict=True))))
    for i, extent in enumerate(d.batch):
        build.add_digit(f"batch_digit{i}", extent, x.batch_strides[i])
    fault = build.fault(x.source.base)
    if fault:
        return fault
    return Boxes(build.finish(map_dtype(x)), (x.source.base + build.base) * size, major, x.rows, tuple(build.coordinates))


# ---- im2col maps ------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Dimension:
    """A spatial dimension of an im2col map: positions base, base + step, ... of a tensor of `extent`, moved by taps * dilation."""

    positions: int
    position_stride: int
    digit: str  # of the positions; empty where there is one
    step: int = 1
    stride: int = 0
    base: int = 0
    extent: int = 0
    is_bounded: bool = False
    taps: int = 1
    tap_digit: str = ""
    dilation: int = 0


def _im2col(x: Operand, d: Digits, walk: Walk, tile_rows: int, major: str) -> Boxes | str:
    """K-major the positions are rows, the taps and the channel k digits; row-major positions lie along k, taps and channel in the rows."""
    size = x.source.dtype.num_bytes
    if major == "k":
        if walk.is_linear and len(d.k) > 1:
            return "a tile of k straddles taps"
        outer, outer_strides, channels = d.k[:-1], x.k_strides[:-1], d.k[-1]
        positions, position_strides, pixels, per_pixel = x.rows, x.row_strides, tile_rows, walk.tile_k
        stems = ("row_digit", "k_digit")
    else:
        if not walk.is_linear:
            return "positions along k need a linear walk"
        if len(x.rows) > 1 and x.rows[-1] % CHUNK_ROWS:
            return f"its innermost row extent {x.rows[-1]} is no multiple of {CHUNK_ROWS}"
        outer, outer_strides, channels = x.rows[:-1], x.row_strides[:-1], x.rows[-1]
        positions, position_strides, pixels, per_pixel = d.k, x.k_strides, walk.tile_k, CHUNK_ROWS
        stems = ("k_digit", "row_digit")
    if pixels > MAX_PIXELS:
        return f"{pixels} positions exceed a box"

    # Bounds say which tap moves which position, by how much, and what lies outside.
    found = [_Dimension(e, s, f"{stems[0]}{i}") for i, (e, s) in enumerate(zip(positions, position_strides, strict=True))]
    taps = {i: (e, s) for i, (e, s) in enumerate(zip(outer, outer_strides, strict=True))}
    lone: list[_Dimension] = []  # dimensions of one position
    for bound in x.bounds:
        at, through = (bound.row_coefs, bound.k_coefs) if major == "k" else (bound.k_coefs, bound.row_coefs)
        moved = [i for i, c in enumerate(at) if c]
        movers = [i for i, c in enumerate(through) if c]
        if len(moved) > 1 or len(movers) > 1 or movers == [len(outer)]:
            return "a bound ties more than one position to one tap"
        if moved:
            dim = found[moved[0]]
            dim.step = at[moved[0]]
            if dim.is_bounded or dim.step < 0 or dim.position_stride % dim.step:
                return "a bound's step does not divide its stride"
            dim.stride = dim.position_stride // dim.step
        else:
            dim = _Dimension(1, 0, "")
            lone.append(dim)
        dim.is_bounded, dim.base, dim.extent = True, bound.offset, bound.extent
        if movers:
            if movers[0] not in taps:
                return "two bounds share a tap"
            dim.taps, tap_stride = taps.pop(movers[0])
            dim.tap_digit, dim.dilation = f"{stems[1]}{movers[0]}", through[movers[0]]
            if moved and tap_stride != dim.dilation * dim.stride:
                return "a tap's stride does not fit its bound"
            if not moved:
                dim.stride = tap_stride // dim.dilation
    # Taps that cannot leave the tensor have no bound: each moves the position whose stride is most like its own.
    for i, (extent, stride) in taps.items():
        free = [(gcd(q.position_stride, stride), at) for at, q in enumerate(found)
                if not q.is_bounded and not q.tap_digit and q.position_stride > 0]
        if not free or stride == 0:
            return "a tap moves no position"
        dim = found[max(free)[1]]
        dim.stride = gcd(dim.position_stride, stride)
        dim.step, dim.taps, dim.tap_digit, dim.dilation = dim.position_stride // dim.stride, extent, f"{stems[1]}{i}", stride // dim.stride
    for dim in found:
        if not dim.is_bounded:
            reach = dim.dilation * (dim.taps - 1)
            dim.stride = dim.stride or dim.position_stride
            dim.base = max(0, -reach)
            dim.extent = (dim.positions - 1) * dim.step + abs(reach) + 1

    # The first dimension is walked without corners: images, or none.
    image = found.pop(0) if not found[0].is_bounded and not found[0].tap_digit else None
    spatial = [*reversed(found), *lone] or [_Dimension(1, 0, "", extent=1)]
    if len(spatial) + 2 > MAX_RANK:
        return f"{len(spatial) + 2} dimensions are more than a tensor map's {MAX_RANK}"
    build = _MapBuilder(size)
    channel = Sum(0, ((f"{stems[1]}{len(outer)}", 1),))
    # Groups lie side by side along the channels.
    for i, extent in enumerate(d.batch):
        if extent > 1 and x.batch_strides[i]:
            if x.batch_strides[i] != channels or channels % per_pixel:
                return "its batch digits are no groups of whole panels of channels"
            channel += Sum(0, ((f"batch_digit{i}", channels),))
            channels *= extent
    build.add(channels, 1, per_pixel, channel)
    bits = CORNER_BITS[len(spatial) + 2]
    lower, upper, offsets = [], [], []
    base = x.source.base
    for dim in spatial:
        base -= dim.base * dim.stride
        # offset = dilation * tap, counted down from the far end where the dilation is negative
        reach = dim.dilation * (dim.taps - 1)
        first = dim.base + min(0, reach)
        last = first + (dim.positions - 1) * dim.step - (dim.extent - 1)
        if not (-(1 << bits - 1) <= min(first, last) and max(first, last) < 1 << bits - 1 and abs(reach) < 1 << bits):
            return f"corners {first}, {last} or a reach of {abs(reach)} exceed {bits} bits"
        if dim.step > 8:
            return f"a step of {dim.step} exceeds 8"
        lower.append(first)
        upper.append(last)
        offsets.append(Sum(max(0, -reach), ((dim.tap_digit, dim.dilation),) if dim.tap_digit else ()))
        build.add(dim.extent, dim.stride, 1, Sum(first, ((dim.digit, dim.step),) if dim.digit else ()))
    build.add(image.positions if image else 1, image.position_stride if image else 0, 1,
              Sum(0, ((image.digit, 1),)) if image else Sum())
    build.box[1] = pixels
    fault = build.fault(base)
    if fault:
        return fault
    if base < 0:
        return "its first element lies before the operand's"
    element_strides = (1, *(dim.step for dim in spatial), 1)
    spec = build.finish(map_dtype(x), element_strides=element_strides, corners=(tuple(lower), tuple(upper)))
    return Boxes(spec, base * size, major, x.rows, tuple(build.coordinates), tuple(offsets))
