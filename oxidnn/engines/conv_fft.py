"""Convolution by Fourier transforms of tiles, by way of memory: points of tiles and filters, products point by point, and back into tiles.

A tile is a window of T elements an axis; where a filter has R taps, T - R + 1 outputs of the circular correlation with it are
outputs of the convolution (overlap and save; one tile over the whole image is the plain FFT algorithm, and any extent is served by
tiles). For each point k of the transforms Y[k] = X[k] conj(F[k]), summed over channels: a complex product of tiles and filters, made as
one real product of [Re X, Im X] and conj(F) = G as [[Re G, Im G], [-Im G, Re G]] by the engines of GEMM, batched over points and groups.
As real elements have conjugate points, half of the points of one axis (and its middle) suffice. The image's gradient is the convolution
of dy with the filter turned about; the filter's gradient the correlation of windows of x with tiles of dy, whose products are summed
over tiles before they are transformed back.

With one axis of more than one tap ("line") a run of T = rows * columns elements is dealt out to columns, a column transformed, its points
turned by exp(-2 pi i k column / T), and lines of columns transformed: the same two halves as of two axes.

Errors are relative to the norms of whole tiles, not to the products of a single output: see `_loses_digits`. An infinity or NaN makes
NaN of all outputs of its tiles.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod, sqrt

from ..codegen import fourier
from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import BF16, F16, F32
from ..ops.base import Policy, Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .composition import moved, product
from .digits import DigitConsts, Digits, ceil_div
from .element_epilogue import ElementEpilogue, OperandConsts, operand_over

_LIMIT = 2**31
_MOST_BYTES = 1 << 31  # of workspace
_MOST_THREADS = 288  # of a CTA
_LEAST_TAPS = 4  # along one axis at least: below, Winograd's tiles take fewer products
_SIDES = (8, 12, 16, 20, 24, 32, 40, 48, 64)  # of tiles of two axes
_LINES = {32: (8, 4), 64: (8, 8), 128: (16, 8), 256: (16, 16), 512: (32, 16), 1024: (32, 32), 2048: (64, 32),
          4096: (64, 64)}  # T: (rows, columns)
_GROWTH = 0.3  # root mean square of errors, in epsilons of sqrt(terms * tile size) for elements of variance 1: 0.03 to 0.11 are measured


@dataclass(frozen=True, slots=True)
class Tile:
    """rows x columns elements; is_line: a run of rows * columns."""

    rows: int
    columns: int
    is_line: bool

    @property
    def extents(self) -> tuple[int, ...]:
        return (self.rows * self.columns,) if self.is_line else (self.rows, self.columns)

    @property
    def size(self) -> int:
        return self.rows * self.columns

    @property
    def points(self) -> int:
        return (self.rows // 2 + 1) * self.columns


def _items(lines: int, threads: int = _MOST_THREADS) -> int:
    """Windows a CTA transforms, each by `lines` threads."""
    return max([4, *(n for n in (8, 16, 32) if n * lines <= threads)])


@dataclass(frozen=True, slots=True)
class TransformConsts(ElementEpilogue):
    """c of conv/fft_forward and conv/fft_inverse. live: how many elements of each axis are read or written, the others being zero or not
    wanted. Byte strides of an element's row and column; steps: elements from tile to tile."""

    rows: int
    columns: int
    is_line: bool
    is_inverse: bool
    items_first: bool
    live: tuple[int, ...]
    row_bytes: int
    column_bytes: int
    is_bounded: bool
    steps: tuple[int, ...]
    form: str  # of the points: "points", "sources" and "targets" (matrices of filters by rows), "products", "channels"
    scale: float
    dtype: str  # of the tensor
    digits: DigitConsts
    operands: tuple[OperandConsts, ...] = ()
    operand_rows: tuple[int, ...] = ()  # byte strides of their rows
    epilogue: Expression | None = None
    compute: str = "f32"

    @property
    def row_pitch(self) -> int:
        """Elements from row to row."""
        return self.columns if self.is_line else 1

    @property
    def live_rows(self) -> int:
        return ceil_div(self.live[0], self.row_pitch)

    @property
    def live_columns(self) -> int:
        return min(self.columns, self.live[-1])

    @property
    def last_columns(self) -> int:
        """Of the last row."""
        return self.live[0] - (self.live_rows - 1) * self.columns if self.is_line else self.live_columns

    @property
    def lines(self) -> int:
        """Threads that an item keeps busy: columns, or points of a column."""
        return max(self.live_columns, self.rows // 2 + 1)

    @property
    def items(self) -> int:
        """Windows a CTA transforms; products are read from two rows at once, and need more registers."""
        return _items(self.lines, _MOST_THREADS if self.form != "products" else 256)

    @property
    def threads(self) -> int:
        return ceil_div(self.lines * self.items, 32) * 32

    @property
    def column_pitch(self) -> int:
        """Bytes between columns in shared memory: neighbours in a warp fall into different banks."""
        return 8 * (self.items if self.items_first else self.items + 1)

    @property
    def point_pitch(self) -> int:
        """Bytes between points of a column: congruent to the items of one, modulo all banks."""
        size = self.live_columns * self.column_pitch
        return size + (8 * self.items - size) % 128

    @property
    def smem_bytes(self) -> int:
        return (self.rows // 2 + 1) * self.point_pitch

    @property
    def row_program(self) -> fourier.Program:
        return (fourier.real_inverse if self.is_inverse else fourier.real_forward)(self.rows, self.live_rows)

    @property
    def column_program(self) -> fourier.Program:
        return (fourier.inverse if self.is_inverse else fourier.forward)(self.columns, self.live_columns)

    @property
    def factors(self) -> tuple[tuple[float, float], ...]:
        size = self.rows * self.columns
        return tuple(fourier.root(k, size) for k in range(size // 2 + 1))


@dataclass(frozen=True, slots=True)
class Geometry:
    """A problem as filters sliding over a source into a target; of wgrad over dy's tiles. Two axes; a line has its own first."""

    source: str
    target: str
    axes: tuple[int, ...]  # dimensions of tensors
    taps: tuple[int, ...]
    first: tuple[int, ...]  # source element of target element 0 (of wgrad: of dy's)
    is_turned: bool  # taps are read backwards
    contracted: int  # channels of a sum (of wgrad: images)
    is_line: bool


@lru_cache(maxsize=256)
def _geometry(p: ConvProblem) -> Geometry:
    taps = p.desc(p.filter).shape[2:]
    k, c = p.desc(p.filter).shape[:2]
    low = [lo for lo, _ in p.padding]
    used = [a for a in range(p.spatial) if taps[a] > 1 or p.padding[a] != (0, 0)]
    order = used if len(used) > 1 else [*used, *(a for a in range(p.spatial) if a not in used)]
    is_back = p.direction == "dgrad"
    first = tuple((low[a] + 1 - taps[a]) if is_back else -low[a] for a in order)
    source, target = (p.result, p.image) if is_back else (p.image, p.result)
    contracted = {"fprop": c, "dgrad": k // p.groups, "wgrad": p.desc(p.image).shape[0]}[p.direction]
    return Geometry(source, target, tuple(a + 2 for a in order), tuple(taps[a] for a in order), first, is_back != p.flip, contracted,
                    len(used) < 2)


def _least_terms(p: ConvProblem) -> int:
    """Products in the sum of the output that has the fewest."""
    count = _geometry(p).contracted
    for taps, image, result, (lo, _) in zip(p.desc(p.filter).shape[2:], p.desc(p.image).shape[2:], p.desc(p.result).shape[2:], p.padding,
                                             strict=True):
        if p.direction == "wgrad":
            ends = [min(result, image + lo - r) - max(0, lo - r) for r in (0, taps - 1)]
        elif p.direction == "fprop":
            ends = [min(taps, image + lo - i) - max(0, lo - i) for i in (0, result - 1)]
        else:
            ends = [min(taps, i + lo + 1) - max(0, i + lo - result + 1) for i in (0, image - 1)]
        count *= max(0, min(ends))
    return count


def _loses_digits(p: ConvProblem, tile: Tile) -> bool:
    """Whether results of data of even size may err more than plain f32 sums are allowed to.

    The transforms' error is about e = growth * eps * sqrt(contracted) * |tile| |filter|, alike for all outputs of a tile: with elements of
    variance 1 growth * eps * sqrt(terms * tile size). A plain sum of `terms` products is allowed 2 eps sqrt(terms) times the sum of their
    magnitudes, 2 / pi each, which at a border are as few as _least_terms. Six times e must be within that.
    """
    return 6 * _GROWTH * sqrt(tile.size) > 1.28 * _least_terms(p)


class FftEngine(Engine):
    """Two transforms, the products and the transform back; by chunks of images, where the points of all do not fit."""

    sums_coarsely = True

    def __init__(self, op: str) -> None:
        self.id = f"{op}.fft"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        p = problem
        taps, nearest = p.desc(p.filter).shape[2:], f"{self.op}.im2col takes any"
        if p.spatial > 2:
            return refuse(f"fft: {p.spatial} spatial dimensions (1 or 2 are supported; {nearest})")
        if any(s != 1 for s in (*p.stride, *p.dilation)):
            return refuse(f"fft: stride {p.stride}, dilation {p.dilation} (1 of each is supported; {nearest})")
        if max(taps) < _LEAST_TAPS:
            return refuse(f"fft: filters of {' x '.join(map(str, taps))} taps (at least {_LEAST_TAPS} along an axis; {nearest})")
        kinds = [p.desc(n).dtype for n in (p.image, p.filter, p.result)]
        if any(k not in (F32, F16, BF16) for k in kinds):
            return refuse(f"fft: types are {', '.join(map(str, kinds))} (f32, f16 and bf16 are supported; {nearest})")
        source = p.inputs[0].desc.dtype
        if source is not F32 and p.policy.math != "fast":
            return refuse(f"fft loses digits: {source} with math={p.policy.math!r} (takes any type with math=\"fast\", f32 with any)")
        if any(p.desc(n).numel == 0 for n in (p.image, p.filter, p.result)):
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if any(s < 0 for n in (p.image, p.filter, p.result) for s in p.desc(n).strides):
            return refuse("fft: a stride is negative")
        widest = max(abs(s) * o.desc.dtype.num_bytes for o in p.operands for s in (*o.desc.strides[2:], 0))
        if widest * (max(_LINES) if _geometry(p).is_line else max(_SIDES)) >= _LIMIT:
            return refuse(f"fft: a window's elements are {widest} bytes apart (a window may span 31 bits; {nearest})")
        fitting = [t for t in self._tiles_of(p) if self._fits_shared(p, t, device)]
        if not fitting:
            largest = max(_LINES) if _geometry(p).is_line else max(_SIDES)
            return refuse(f"fft: filters of {' x '.join(map(str, taps))} taps (at most {largest} along an axis; {nearest})")
        if p.policy.math != "fast":
            fitting = [t for t in fitting if not _loses_digits(p, t)]
            if not fitting:
                return refuse(f"fft loses digits: results with as few as {_least_terms(p)} products (math=\"fast\" takes them)")
        if not any(self._size_reason(p, t) == "" for t in fitting):
            return refuse(self._size_reason(p, fitting[0]))
        return SUPPORTED

    @staticmethod
    def _tiles_of(p: ConvProblem) -> Iterator[Tile]:
        """Tiles that a filter fits."""
        g = _geometry(p)
        if g.is_line:
            yield from (Tile(rows, columns, True) for size, (rows, columns) in _LINES.items() if size >= g.taps[0])
        else:
            yield from (Tile(rows, columns, False) for rows in _SIDES for columns in _SIDES if rows >= g.taps[0] and columns >= g.taps[1])

    def _fits_shared(self, p: ConvProblem, tile: Tile, device: DeviceInfo) -> bool:
        """Whether all transforms find room for their columns of points."""
        half, most = tile.rows // 2 + 1, 0
        for live in (tile.extents[-1], self._window(p, tile)[-1], _geometry(p).taps[len(tile.extents) - 1]):
            columns = min(live, tile.columns)
            most = max(most, half * (columns * 8 * (_items(max(columns, half)) + 1) + 128))
        return most <= device.smem_per_cta

    def _size_reason(self, p: ConvProblem, tile: Tile) -> str:
        """Why a tile cannot be taken, "" if it can."""
        k, c = p.desc(p.filter).shape[:2]
        total = p.desc(p.image).shape[0]
        if max(self._tile_count(p, tile) * total * max(p.desc(n).shape[1] for n in (p.image, p.result)), k * c) * 2 >= _LIMIT:
            return "fft: elements of a point exceed 31 bits"
        images = total if p.direction == "wgrad" else 1
        if images * self._image_bytes(p, tile) + self._filter_bytes(p, tile) > self._limit(p):
            return f"fft: the points of {'all images' if images > 1 else 'an image'} exceed {self._limit(p)} bytes of workspace"
        return ""

    @staticmethod
    def _limit(p: ConvProblem) -> int:
        return _MOST_BYTES if p.policy.workspace_limit is None else min(_MOST_BYTES, p.policy.workspace_limit)

    # ---- sizes ----

    def _window(self, p: ConvProblem, tile: Tile) -> tuple[int, ...]:
        """Outputs of a tile along its axes (of wgrad: elements of dy)."""
        return tuple(t - r + 1 for t, r in zip(tile.extents, _geometry(p).taps, strict=False))

    def _counts(self, p: ConvProblem, tile: Tile) -> tuple[int, int]:
        """Tiles of an image along both axes."""
        g, window = _geometry(p), self._window(p, tile)
        extents = [p.desc(g.target).shape[a] for a in g.axes]
        counts = [ceil_div(e, w) for e, w in zip(extents, window, strict=False)] + extents[len(window):]
        return counts[0], counts[1] if len(counts) > 1 else 1

    def _tile_count(self, p: ConvProblem, tile: Tile) -> int:
        return prod(self._counts(p, tile))

    def _image_bytes(self, p: ConvProblem, tile: Tile) -> int:
        """Points of one image, read and written (of wgrad: both read)."""
        return 8 * tile.points * self._tile_count(p, tile) * (p.desc(p.image).shape[1] + p.desc(p.result).shape[1])

    def _filter_bytes(self, p: ConvProblem, tile: Tile) -> int:
        return tile.points * (8 if self._is_channelwise(p) else 16) * prod(p.desc(p.filter).shape[:2])

    @staticmethod
    def _product_math(p: ConvProblem) -> str:
        """What points may be multiplied with: f32 as it is, or in TF32 parts that keep its digits; halves in TF32."""
        if p.inputs[0].desc.dtype is not F32:
            return "tf32"
        return "ieee" if p.policy.math in ("ieee", "fast") else "tf32x3"

    def _is_by_sources(self, p: ConvProblem) -> bool:
        """Whether rows of filters' matrices are those of the source's channels: columns innermost, as FMAs like it; tensor cores like k."""
        return self._product_math(p) == "ieee"

    @staticmethod
    def _is_channelwise(p: ConvProblem) -> bool:
        """Sums over one channel are made as points are transformed back."""
        return p.direction != "wgrad" and _geometry(p).contracted == 1

    # ---- choice ----

    @lru_cache(maxsize=256)  # noqa: B019 (engines live as long as the process)
    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """The three cheapest tiles; images: of a chunk, whose points fit about 512 MiB, or the L2 cache."""
        assert isinstance(problem, ConvProblem)
        p = problem
        tiles = [t for t in self._tiles_of(p) if self._fits_shared(p, t, device) and self._size_reason(p, t) == ""
                 and (p.policy.math == "fast" or not _loses_digits(p, t))]
        found = []
        for tile in sorted(tiles, key=lambda t: self._rough(p, t, device))[:3]:
            n, one, filters = p.desc(p.image).shape[0], self._image_bytes(p, tile), self._filter_bytes(p, tile)
            sizes = [n * one] if p.direction == "wgrad" else [min(512 << 20, self._limit(p) - filters), device.l2_bytes * 2 // 3]
            chunks = [min(n, max(1, size // one)) for size in sizes]
            found += [EngineConfig.of(rows=tile.rows, columns=tile.columns, images=i)
                      for i in dict.fromkeys(ceil_div(n, ceil_div(n, images)) for images in chunks)]
        costs = {config.name: self.estimate(p, config, device) for config in found}
        return tuple(sorted(found, key=lambda config: costs[config.name]))

    def _transforms_us(self, p: ConvProblem, tile: Tile, device: DeviceInfo, images: int) -> float:
        """What the transforms of all images and of the filter take: bytes, or about 14 instructions an element; lines of 64 points need
        so many registers that few threads are under way."""
        total, count = p.desc(p.image).shape[0], self._tile_count(p, tile)
        k, c = p.desc(p.filter).shape[:2]
        items = total * count * (p.desc(p.image).shape[1] + p.desc(p.result).shape[1])
        if device.is_emulated:
            return 3000.0 + 0.01 * tile.size * (items + k * c)
        rate = device.fma_tflops * (0.17e6 if max(tile.rows, tile.columns) < 64 else 0.09e6)
        cost = 0.5 if images * self._image_bytes(p, tile) < device.l2_bytes * 3 // 4 else 1.0
        moved_bytes = sum(o.desc.num_bytes for o in p.operands) + cost * total * self._image_bytes(p, tile)
        image_us = max(moved_bytes / (device.bandwidth_gbs * 0.7e3), 14 * items * tile.size / rate)
        filter_us = max(self._filter_bytes(p, tile) / (device.bandwidth_gbs * 0.5e3), 8 * k * c * tile.size / rate)
        return image_us + filter_us + 4.0 * (1 + 2 * ceil_div(total, images))

    def _rough(self, p: ConvProblem, tile: Tile, device: DeviceInfo) -> float:
        """An estimate without asking the engines of the products."""
        k, c = p.desc(p.filter).shape[:2]
        total = p.desc(p.image).shape[0]
        flops = 8 * tile.points * self._tile_count(p, tile) * total * k * c
        read = total * self._image_bytes(p, tile) + self._filter_bytes(p, tile)
        return self._transforms_us(p, tile, device, total) + max(flops / (device.fma_tflops * 0.6e6), read / (device.bandwidth_gbs * 0.8e3))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Transforms, and the products by the estimate of their engine."""
        assert isinstance(problem, ConvProblem)
        tile, images = self._tile(problem, config), config["images"]
        chunks = ceil_div(problem.desc(problem.image).shape[0], images)
        product_us = 0.0 if self._is_channelwise(problem) else self._product(problem, tile, images, device)[1]
        return self._transforms_us(problem, tile, device, images) + chunks * product_us

    # ---- steps ----

    @staticmethod
    def _tile(p: ConvProblem, config: EngineConfig) -> Tile:
        return Tile(config["rows"], config["columns"], _geometry(p).is_line)

    def _product(self, p: ConvProblem, tile: Tile, images: int, device: DeviceInfo) -> tuple[Build, float]:
        """The products of all points and groups: of a point, [tile][group][channel, part] times [group][target, part][channel, part]; of
        wgrad [group][k, part][c, part], Re and Im of dy times those of x."""
        k, c = p.desc(p.filter).shape[:2]
        points, groups, tiles = tile.points, p.groups, images * self._tile_count(p, tile)
        per_group = {"image": 2 * c, "result": 2 * k // groups}

        def strips(channels: int) -> TensorDesc:
            return TensorDesc(F32, (points, groups, tiles, channels), (tiles * groups * channels, channels, groups * channels, 1), 256)

        policy = Policy(p.policy.deterministic, self._product_math(p))
        if p.direction == "wgrad":
            operands = (("a", strips(per_group["result"])), ("b", strips(per_group["image"])),
                        ("d", TensorDesc.packed(F32, (points, groups, per_group["result"], per_group["image"]))))
            return product(operands, (("transpose_a", True),), policy, device)
        source, target = (per_group["result"], per_group["image"]) if p.direction == "dgrad" else (per_group["image"], per_group["result"])
        is_by_sources = self._is_by_sources(p)
        shape = (source, target) if is_by_sources else (target, source)
        operands = (("a", strips(source)), ("b", TensorDesc.packed(F32, (points, groups, *shape))), ("d", strips(target)))
        return product(operands, () if is_by_sources else (("transpose_b", True),), policy, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        p, tile, images, total = problem, self._tile(problem, config), config["images"], problem.desc(problem.image).shape[0]
        g, window, scratch = _geometry(p), self._window(problem, tile), Scratch()
        source, target = p.desc(g.source).shape[1], p.desc(g.target).shape[1]
        size = 8 * tile.points * images * self._tile_count(p, tile)
        at_source, at_target, at_filter = (scratch.take(n) for n in (size * source, size * target, self._filter_bytes(p, tile)))
        if p.direction == "wgrad":
            build, _ = self._product(p, tile, total, device)
            inside = scratch.take(build.workspace_bytes)
            steps = [self._windows(p, tile, g.source, at_source, tile.extents, g.first, 0, total, device),
                     self._windows(p, tile, g.target, at_target, window, (0, 0), 0, total, device, scale=1 / tile.size),
                     *moved(build, inside, a=at_target, b=at_source, d=at_filter), self._filters(p, tile, at_filter, device)]
            return Build(tuple(steps), scratch.num_bytes)
        steps = [self._filters(p, tile, at_filter, device)]
        if not self._is_channelwise(p):
            inside = scratch.take(max(self._product(p, tile, n, device)[0].workspace_bytes for n in {images, total % images or images}))
        for begin in range(0, total, images):
            count = min(images, total - begin)
            steps.append(self._windows(p, tile, g.source, at_source, tile.extents, g.first, begin, count, device))
            read: Mapping[str, WorkspaceArg] = {"source": at_source, "filter": at_filter}
            if not self._is_channelwise(p):
                build, _ = self._product(p, tile, count, device)
                steps += moved(build, inside, a=at_source, b=at_filter, d=at_target)
                read = {"source": at_target}
            steps.append(self._windows(p, tile, g.target, read, window, (0, 0), begin, count, device))
        return Build(tuple(steps), scratch.num_bytes)

    def _windows(self, p: ConvProblem, tile: Tile, name: str, place: WorkspaceArg | Mapping[str, WorkspaceArg], live: tuple[int, ...],
                 first: tuple[int, ...], begin: int, images: int, device: DeviceInfo, scale: float = 1.0) -> Step:
        """Windows of `live` elements of `images` images from `begin` on into points at `place`; or points, read from the places of a
        mapping, into the output."""
        g, desc, counts, step = _geometry(p), p.desc(name), self._counts(p, tile), self._window(p, tile)
        read = {} if isinstance(place, WorkspaceArg) else place
        channels, size, is_output = desc.shape[1], desc.dtype.num_bytes, bool(read)
        steps = (*step, 1)[:2]

        def strides_of(n: int, c: int, spatial: tuple[int, ...]) -> tuple[tuple[int, ...], int, int]:
            """Of the digits (image, tiles down and across, channel), of a row and of a column."""
            along = [spatial[a - 2] for a in g.axes] + [0]
            return ((n, steps[0] * along[0], steps[1] * along[1], c), along[0] * (tile.columns if g.is_line else 1),
                    along[0 if g.is_line else 1])

        n, c, *spatial = (s * size for s in desc.strides)
        strides, row, column = strides_of(n, c, tuple(spatial))
        offset = begin * n + sum(f * spatial[a - 2] for f, a in zip(first, g.axes[:1 if g.is_line else 2], strict=False))
        table, tensor = {"target" if is_output else "source": strides}, TensorArg(name, offset)
        operands, operand_rows, extra = list[OperandConsts](), list[int](), list[Arg]()
        if is_output and p.epilogue is not None:
            for other in (x for x in p.epilogue.args if x != "acc"):
                operand, (on, oc, oh, ow) = operand_over(p, p.epilogue, other, desc.shape, 1)
                table[other], operand_row, operand_column = strides_of(on, oc, (oh, ow))
                operands.append(replace(operand, column_bytes=operand_column))
                operand_rows.append(operand_row)
                extra.append(Arg(f"ptr_{other}", "u64", TensorArg(other, begin * on)))
            extra += [Arg(f"scalar_{x}", "f32", ScalarArg(x)) for x in p.epilogue.scalars]
        digits = Digits(("n", "down", "across", "channel"), (images, *counts, channels), table)
        bounds = [desc.shape[a] for a in g.axes] + [1]
        plane = 8 * images * prod(counts) * channels
        form = "points"
        args = [Arg("num_items", "u32", digits.size), Arg("first_row", "s32", first[0]), Arg("bound_rows", "u32", bounds[0])]
        if not g.is_line:
            args += [Arg("first_column", "s32", first[1]), Arg("bound_columns", "u32", bounds[1])]
        if is_output and self._is_channelwise(p):
            sources, shared = p.desc(g.source).shape[1], channels // p.groups
            form, plane = "channels", 8 * images * prod(counts) * sources
            args += [Arg("ptr_filter", "u64", read["filter"]), Arg("plane_filter", "u64", 8 * channels), Arg("targets", "u32", channels),
                     Arg("shared", "u32", shared), Arg("sources", "u32", sources)]
        points = place if isinstance(place, WorkspaceArg) else place["source"]
        args += [Arg("plane", "u64", plane), Arg("ptr_source", "u64", points if is_output else tensor),
                 Arg("ptr_target", "u64", tensor if is_output else points), *extra]
        consts = TransformConsts(
            tile.rows, tile.columns, g.is_line, is_output, desc.strides[1] == 1 and channels > 1, live, row, column, True,
            steps, form, scale, desc.dtype.name, digits.consts(), tuple(operands), tuple(operand_rows), p.epilogue if is_output else None)
        return self._step(consts, digits, args, device)

    def _filters(self, p: ConvProblem, tile: Tile, place: WorkspaceArg, device: DeviceInfo) -> Step:
        """Filters into points of matrices; of wgrad products of points into filters."""
        g, desc, is_output = _geometry(p), p.desc(p.filter), p.direction == "wgrad"
        k, c = desc.shape[:2]
        ks, cs, *spatial = (s * desc.dtype.num_bytes for s in desc.strides)
        along = [spatial[a - 2] for a in g.axes] + [0]
        offset = 0
        if g.is_turned:
            offset = sum((r - 1) * s for r, s in zip(g.taps, along, strict=False))
            along = [-s for s in along]
        extents, strides = (1, 1, k, c), (0, 0, ks, cs)
        if not is_output and (p.direction == "dgrad") != self._is_by_sources(p):
            extents, strides = (p.groups, c, 1, k // p.groups), (k // p.groups * ks, cs, 0, ks)
        digits = Digits(("n", "down", "across", "channel"), extents, {"target" if is_output else "source": strides})
        form = "products" if is_output else "points" if self._is_channelwise(p) else "sources" if self._is_by_sources(p) else "targets"
        tensor = TensorArg(p.filter, offset)
        args = [Arg("num_items", "u32", digits.size), Arg("plane", "u64", digits.size * (8 if form == "points" else 16)),
                Arg("ptr_source", "u64", place if is_output else tensor), Arg("ptr_target", "u64", tensor if is_output else place)]
        if form != "points":
            args.append(Arg("inner", "u32", extents[3]))
        consts = TransformConsts(
            tile.rows, tile.columns, g.is_line, is_output, False, g.taps[:1 if g.is_line else 2],
            along[0] * (tile.columns if g.is_line else 1), along[0 if g.is_line else 1], False, (0, 0), form,
            1.0 if is_output else 1 / tile.size, desc.dtype.name, digits.consts())
        return self._step(consts, digits, args, device)

    def _step(self, consts: TransformConsts, digits: Digits, args: list[Arg], device: DeviceInfo) -> Step:
        args = [*args, *digits.args(consts.digits.wide)]
        kind = "inverse" if consts.is_inverse else "forward"
        return Step.of(f"conv/fft_{kind}", self.op, Target.for_arch(device.arch), consts.threads, args, consts,
                       ceil_div(digits.size, consts.items), dynamic_smem=consts.smem_bytes,
                       suffix=f"{consts.form}_{consts.rows}x{consts.columns}_{consts.dtype}")


_OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (FftEngine(op),) for op in _OPS}
