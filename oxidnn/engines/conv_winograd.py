"""Winograd's minimal filtering F(m x m, 3 x 3), by way of memory: transformed tiles, a product for each of their points, transformed back.

Along an axis, m outputs of a filter of r taps are A'[(G g) * (B' d)] of the m + r - 1 = a inputs d they see (Lavin and Gray 2016; the
matrices after Toom and Cook, for the points 0, 1, -1, 2, -2 and infinity). So a convolution is, for each of the a x a points of a tile,
a product over channels of the points of all tiles and those of all filters: m^2 r^2 / a^2 times fewer products (2.25 for m = 2, 4 for
m = 4). In f32 results err about as plain sums do for m = 2, and ten times that for m = 4. The image's gradient is the convolution of dy
with the filter turned about; the filter's gradient filters x with tiles of dy, F(3 x 3, m x m): a product over tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import prod
from typing import Any

from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import BF16, F16, F32, DType
from ..ops.base import Policy, Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .composition import moved, product
from .digits import DigitConsts, Digits, ceil_div
from .element_epilogue import ElementEpilogue, OperandConsts, operand_over

_THREADS = 128
_TAPS = 3
_LIMIT = 2**31
_MOST_BYTES = 1 << 31  # of workspace
Matrix = tuple[tuple[float, ...], ...]
_ONE: Matrix = ((1.0,),)


@lru_cache
def toom_cook(outputs: int, taps: int) -> tuple[Matrix, Matrix, Matrix]:
    """A' (outputs x a), G (a x taps) and B' (a x a) with sum_j g[j] d[i + j] = A' [(G g) * (B' d)], a = outputs + taps - 1."""
    size = outputs + taps - 1
    points = [Fraction(p) for p in (0, 1, -1, 2, -2, Fraction(1, 2), Fraction(-1, 2))][:size - 1]

    def powers(n: int) -> list[list[Fraction]]:
        return [[p**j for j in range(n)] for p in points] + [[Fraction(int(j == n - 1)) for j in range(n)]]

    def roots(of: list[Fraction]) -> list[Fraction]:
        """Coefficients of the polynomial with these roots, and zeros up to `size` of them."""
        poly = [Fraction(1)]
        for root in of:
            poly = [(poly[i - 1] if i else 0) - root * (poly[i] if i < len(poly) else 0) for i in range(len(poly) + 1)]  # type: ignore[misc]
        return poly + [Fraction(0)] * (size - len(poly))

    others = [[q for q in points if q != p] for p in points]
    scale = [prod((p - q for q in rest), start=Fraction(1)) for p, rest in zip(points, others, strict=True)] + [Fraction(1)]
    rows = [roots(rest) for rest in others] + [roots(points)]
    def floats(matrix: list[list[Fraction]]) -> Matrix:
        return tuple(tuple(float(v) for v in row) for row in matrix)

    transform = floats([[p / s for p in row] for row, s in zip(powers(taps), scale, strict=True)])
    return tuple(zip(*floats(powers(outputs)), strict=True)), transform, floats(rows)


@dataclass(frozen=True, slots=True)
class Window:
    """What a tile reads or writes: extents (rows, columns), byte strides of both; is_bounded: only what lies within the tensor, whose
    tile (i, j) begins at `first` + i, j times `step`."""

    extents: tuple[int, int]
    strides: tuple[int, int]
    is_bounded: bool = False
    first: tuple[int, int] = (0, 0)
    step: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class TransformConsts(ElementEpilogue):
    """target = rows * source * columns' for each tile and channel; packs of `vector` channels."""

    rows: Matrix
    columns: Matrix
    source: str
    target: str
    source_window: Window
    target_window: Window
    vector: int
    digits: DigitConsts
    operands: tuple[OperandConsts, ...] = ()
    operand_rows: tuple[int, ...] = ()  # byte strides of their rows
    epilogue: Expression | None = None
    compute: str = "f32"


@dataclass(frozen=True)
class Side:
    """A tensor as tiles: name, description, and which of its dimensions are its images or filters, and its channels."""

    name: str
    desc: TensorDesc
    place: ArgValue

    @property
    def strides(self) -> tuple[int, int, int, int]:
        size = self.desc.dtype.num_bytes
        n, c, h, *w = (s * size for s in self.desc.strides)
        return n, c, h, w[0] if w else 0

    @property
    def is_channels_last(self) -> bool:
        return self.desc.strides[1] == 1


class WinogradEngine(Engine):
    """F(outputs x outputs, 3 x 3), or F(outputs, 3) of one dimension, in five launches or, by chunks of images, two and three for each."""

    sums_coarsely = True

    def __init__(self, op: str, outputs: int) -> None:
        self.id = f"{op}.winograd_f{outputs}x3"  # type: ignore[misc]
        self.op, self.outputs = op, outputs

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        p, name = problem, self.id.split(".")[1]
        if p.spatial > 2 or any(r != _TAPS for r in p.desc(p.filter).shape[2:]):
            return refuse(f"{name}: filters of {' x '.join(str(r) for r in p.desc(p.filter).shape[2:])} taps (3 or 3 x 3 are supported)")
        if any(s != 1 for s in (*p.stride, *p.dilation)) or p.groups != 1:
            return refuse(f"{name}: stride {p.stride}, dilation {p.dilation} and {p.groups} groups (1 of each is supported)")
        kinds = [p.desc(n).dtype for n in (p.image, p.filter, p.result)]
        sources = [o.desc.dtype for o in p.inputs if o.name in (p.image, p.filter, p.result)]
        if any(k not in (F32, F16, BF16) for k in kinds):
            return refuse(f"{name}: types are {', '.join(map(str, kinds))} (f32, f16 and bf16 are supported)")
        # F(2 x 2) of f32 errs as plain sums do; all else loses digits.
        if p.policy.math != "fast" and (sources[0] is not F32 or self.outputs > 2 or p.policy.math not in ("ieee", "tf32x3")):
            return refuse(f"{name} loses digits: {sources[0]} with math={p.policy.math!r} (takes any type with math=\"fast\""
                          + (", and f32 with \"ieee\" or \"tf32x3\")" if self.outputs == 2 else ")"))
        if BF16 in sources and self.outputs > 2:
            return refuse(f"{name}: the points of bf16 are too coarse")
        if any(p.desc(n).numel == 0 for n in (p.image, p.filter, p.result)):
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if any(s < 0 for n in (p.image, p.filter, p.result) for s in p.desc(n).strides):
            return refuse(f"{name}: a stride is negative")
        if self._indices(p) >= _LIMIT:
            return refuse(f"{name}: points of tiles exceed 31 bits")
        limit = _MOST_BYTES if p.policy.workspace_limit is None else min(_MOST_BYTES, p.policy.workspace_limit)
        if self._chunk_bytes(p, 1 if p.direction != "wgrad" else p.desc(p.image).shape[0]) > limit:
            one = "an image" if p.direction != "wgrad" else "all images"
            return refuse(f"{name}: the points of {one} exceed {limit} bytes of workspace")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """images: of a chunk, whose points fit the L2 cache, or about 256 MiB, or all of them."""
        assert isinstance(problem, ConvProblem)
        n = problem.desc(problem.image).shape[0]
        if problem.direction == "wgrad":
            return (EngineConfig.of(images=n),)
        limit = _MOST_BYTES if problem.policy.workspace_limit is None else min(_MOST_BYTES, problem.policy.workspace_limit)
        one = self._chunk_bytes(problem, 1)
        most = [min(n, max(1, size // one)) for size in (256 << 20, device.l2_bytes * 2 // 3, limit)]
        even = [ceil_div(n, ceil_div(n, images)) for images in most]
        return tuple(EngineConfig.of(images=i) for i in dict.fromkeys(even))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """The products, and the transforms' bytes, of which those that fit the L2 cache cost a third."""
        assert isinstance(problem, ConvProblem)
        p, images = problem, config["images"]
        total = p.desc(p.image).shape[0]
        _, product_us = self._product(p, images, device)
        if device.is_emulated:  # some 300 instructions a tile and channel
            return product_us * ceil_div(total, images) + 1.2 * self._tiles(p) * sum(p.desc(p.filter).shape[:2])
        points = self._chunk_bytes(p, images)
        chunks = ceil_div(total, images)
        cost = 0.35 if points < device.l2_bytes * 3 // 4 else 1.0
        moved_bytes = sum(o.desc.num_bytes for o in p.operands) + points * chunks * cost * 1.2
        return chunks * (product_us + 6.0) + moved_bytes / (device.bandwidth_gbs * 0.8e3)

    # ---- sizes ----

    def _tile_counts(self, p: ConvProblem) -> tuple[int, int]:
        """Tiles down and across; of the filter's gradient those of dy, else of the output."""
        extents = p.desc(p.image if p.direction == "dgrad" else p.result).shape[2:]
        counts = [ceil_div(e, self.outputs) for e in extents]
        return counts[0], counts[1] if len(counts) > 1 else 1

    def _tiles(self, p: ConvProblem) -> int:
        return p.desc(p.image).shape[0] * prod(self._tile_counts(p))

    def _points(self, p: ConvProblem) -> int:
        return int((self.outputs + _TAPS - 1) ** p.spatial)

    def _indices(self, p: ConvProblem) -> int:
        """How many points the largest transform counts."""
        return self._tiles(p) * max(p.desc(p.filter).shape[:2]) * self._points(p)

    def _kinds(self, p: ConvProblem) -> tuple[DType, DType]:
        """Types of what is multiplied, and of the products."""
        return p.inputs[0].desc.dtype, F32

    def _chunk_bytes(self, p: ConvProblem, images: int) -> int:
        k, c = p.desc(p.filter).shape[:2]
        tiles, (factor, result) = images * prod(self._tile_counts(p)), self._kinds(p)
        if p.direction == "wgrad":
            return self._points(p) * (tiles * (k + c) * factor.num_bytes + k * c * result.num_bytes)
        source, target = (k, c) if p.direction == "dgrad" else (c, k)
        return self._points(p) * ((tiles * source + k * c) * factor.num_bytes + tiles * target * result.num_bytes)

    # ---- steps ----

    def _product(self, p: ConvProblem, images: int, device: DeviceInfo) -> tuple[Build, float]:
        """The products of all points. Points of images lie [point][tile][channel], or [point][channel][tile] where channels do not lie
        innermost in the image; points of filters [point][filter][channel]."""
        k, c = p.desc(p.filter).shape[:2]
        tiles, points, (factor, result) = images * prod(self._tile_counts(p)), self._points(p), self._kinds(p)

        def packed(kind: DType, *shape: int) -> TensorDesc:
            return TensorDesc.packed(kind, (points, *shape))

        policy = Policy(p.policy.deterministic, "ieee" if p.policy.math == "fast" and factor is F32 else p.policy.math)
        image, result_side = self._sides(p)[0], self._sides(p)[1]
        if p.direction == "wgrad":  # d[k, c] = sum over tiles of dy[t, k] * x[t, c]
            a = packed(factor, tiles, k) if result_side.is_channels_last else packed(factor, k, tiles)
            b = packed(factor, tiles, c) if image.is_channels_last else packed(factor, c, tiles)
            operands = (("a", a), ("b", b), ("d", packed(result, k, c)))
            attrs: dict[str, bool] = {"transpose_a": result_side.is_channels_last, "transpose_b": not image.is_channels_last}
        else:
            source, target = (k, c) if p.direction == "dgrad" else (c, k)
            tiled = packed(factor, tiles, source) if image.is_channels_last else packed(factor, source, tiles)
            filters = packed(factor, target, source)
            if result_side.is_channels_last:
                operands = (("a", tiled), ("b", filters), ("d", packed(result, tiles, target)))
                attrs = {"transpose_a": not image.is_channels_last, "transpose_b": True}
            else:
                operands = (("a", filters), ("b", tiled), ("d", packed(result, target, tiles)))
                attrs = {"transpose_b": image.is_channels_last}
        return product(operands, tuple((n, v) for n, v in attrs.items() if v), policy, device)

    def _sides(self, p: ConvProblem) -> tuple[Side, Side, Side]:
        """What is read in tiles, what is written in tiles (of wgrad: read too), the filter."""
        names = (p.result, p.image) if p.direction == "dgrad" else (p.image, p.result)
        first, second, filter = (Side(n, p.desc(n), TensorArg(n)) for n in (*names, p.filter))
        return first, second, filter

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        p, images, total = problem, config["images"], problem.desc(problem.image).shape[0]
        k, c = p.desc(p.filter).shape[:2]
        m, points, (factor, result) = self.outputs, self._points(p), self._kinds(p)
        two = p.spatial == 2
        source, target, filter = self._sides(p)
        back, taps, window = toom_cook(m, _TAPS)
        scratch = Scratch()
        tiles = images * prod(self._tile_counts(p))
        size = points * tiles
        places = {"source": scratch.take(size * source.desc.shape[1] * factor.num_bytes)}
        low = tuple(pair[0] for pair in p.padding)
        if p.direction == "dgrad":
            low = tuple(_TAPS - 1 - pad for pad in low)
        first = (-low[0], -low[1] if two else 0)
        step = (m, m if two else 1)
        steps: list[Step] = []
        if p.direction == "wgrad":
            places |= {"target": scratch.take(size * k * factor.num_bytes), "filter": scratch.take(points * k * c * result.num_bytes)}
            outer, inner, _ = toom_cook(_TAPS, m)
            extents = (m + 2, m + 2 if two else 1)
            tiled = Window(extents, source.strides[2:], True, first, step)
            steps.append(self._tile_step(p, source, window, tiled, places["source"], factor, 0, total, device))
            tiled = Window((m, m if two else 1), target.strides[2:], True, (0, 0), step)
            steps.append(self._tile_step(p, target, inner, tiled, places["target"], factor, 0, total, device))
            build, _ = self._product(p, total, device)
            inside = scratch.take(build.workspace_bytes)
            steps += moved(build, inside, a=places["target"], b=places["source"], d=places["filter"])
            steps.append(self._filter_step(p, filter, outer, places["filter"], result, False, device))
            return Build(tuple(steps), scratch.num_bytes)
        places |= {"target": scratch.take(size * target.desc.shape[1] * result.num_bytes),
                   "filter": scratch.take(points * k * c * factor.num_bytes)}
        steps.append(self._filter_step(p, filter, taps, places["filter"], factor, p.direction == "dgrad", device))
        extents = (m + 2, m + 2 if two else 1)
        offset = scratch.take(max(self._product(p, n, device)[0].workspace_bytes for n in {images, total % images or images}))
        for begin in range(0, total, images):
            count = min(images, total - begin)
            build, _ = self._product(p, count, device)
            tiled = Window(extents, source.strides[2:], True, first, step)
            steps.append(self._tile_step(p, source, window, tiled, places["source"], factor, begin, count, device))
            names = ("source", "filter") if target.is_channels_last else ("filter", "source")
            steps += moved(build, offset, a=places[names[0]], b=places[names[1]], d=places["target"])
            out = Window((m, m if two else 1), target.strides[2:], True, (0, 0), step)
            steps.append(self._tile_step(p, target, back, out, places["target"], result, begin, count, device, is_output=True))
        return Build(tuple(steps), scratch.num_bytes)

    def _tile_step(self, p: ConvProblem, side: Side, matrix: Matrix, window: Window, place: WorkspaceArg, kind: DType, begin: int,
                   images: int, device: DeviceInfo, is_output: bool = False) -> Step:
        """Tiles of `images` images from `begin` on into points, or (is_output) points into tiles."""
        down, across = self._tile_counts(p)
        channels, tiles, size = side.desc.shape[1], images * down * across, kind.num_bytes
        n, c, h, w = side.strides
        plane = tiles * channels * size
        tile, channel = (channels * size, size) if side.is_channels_last else (size, tiles * size)
        vector = 2 if side.is_channels_last and channels % 2 == 0 and side.desc.align % (2 * side.desc.dtype.num_bytes) == 0 \
            and not any(s % (2 * side.desc.dtype.num_bytes) for s in (n, h, w)) else 1
        rows = window.extents[0] if is_output else len(matrix)
        across_points = (len(matrix[0]) if is_output else len(matrix)) if p.spatial == 2 else 1
        planes = Window((len(matrix[0]) if is_output else rows, across_points), (across_points * plane, plane))
        strides = {"tiles": (n, window.step[0] * h, window.step[1] * w, c * vector),
                   "points": (down * across * tile, across * tile, tile, channel * vector)}
        at = begin * n + window.first[0] * h + window.first[1] * w
        pointers = {"tiles": TensorArg(side.name, at), "points": place}
        operands, operand_rows, extra = [], [], []
        if is_output and p.epilogue is not None:
            for name in (x for x in p.epilogue.args if x != "acc"):
                operand, row = operand_over(p, p.epilogue, name, side.desc.shape, vector)
                operands.append(operand)
                operand_rows.append(row[2])
                strides[name] = (row[0], window.step[0] * row[2], window.step[1] * row[3], row[1] * vector)
                pointers[name] = TensorArg(name, begin * row[0])
            extra = [Arg(f"scalar_{x}", "f32", ScalarArg(x)) for x in p.epilogue.scalars]
        columns = matrix if p.spatial == 2 else _ONE
        read, written = (planes, window) if is_output else (window, planes)
        extents = (images, down, across, channels // vector)
        kinds = (kind, side.desc.dtype) if is_output else (side.desc.dtype, kind)
        order = ("points", "tiles") if is_output else ("tiles", "points")
        bounds = (side.desc.shape[2], side.desc.shape[3] if p.spatial == 2 else 1)
        return self._step(p, matrix, columns, read, written, kinds, vector, extents, strides, pointers, order, device, extra,
                          tuple(operands), tuple(operand_rows), p.epilogue if is_output else None, bounds)

    def _filter_step(self, p: ConvProblem, filter: Side, matrix: Matrix, place: WorkspaceArg, kind: DType, is_turned: bool,
                     device: DeviceInfo, pitch: int = 0) -> Step:
        """Filters into points [point][filter][channel], is_turned: [point][channel][filter] of taps read backwards; of wgrad the points
        into filters. pitch: of the last two the other way round, in lines of so many elements."""
        is_output = p.direction == "wgrad"
        k, c = filter.desc.shape[:2]
        ks, cs, h, w = filter.strides
        at, two = 0, p.spatial == 2
        if is_turned != p.flip:
            at, h, w = (_TAPS - 1) * (h + w), -h, -w
        size = kind.num_bytes
        source, target = (k, c) if is_turned else (c, k)
        plane = (pitch or source * target) * size
        columns = matrix if two else _ONE
        a, across = len(matrix[0]) if is_output else len(matrix), (len(matrix[0]) if is_output else len(matrix)) if two else 1
        planes = Window((a, across), (across * plane, plane))
        taps = Window((_TAPS, _TAPS if two else 1), (h, w))
        along_target, along_source = (size, self._points(p) * pitch * size) if pitch else (source * size, size)
        point_strides = (0, 0, *((along_source, along_target) if is_turned else (along_target, along_source)))
        strides = {"tiles": (0, 0, ks, cs), "points": point_strides}
        pointers: dict[str, Any] = {"tiles": TensorArg(filter.name, at), "points": place}
        read, written = (planes, taps) if is_output else (taps, planes)
        kinds = (kind, filter.desc.dtype) if is_output else (filter.desc.dtype, kind)
        return self._step(p, matrix, columns, read, written, kinds, 1, (1, 1, k, c), strides, pointers,
                          ("points", "tiles") if is_output else ("tiles", "points"), device)

    def _step(self, p: ConvProblem, rows: Matrix, columns: Matrix, read: Window, written: Window, kinds: tuple[DType, DType], vector: int,
              extents: tuple[int, ...], strides: Mapping[str, tuple[int, ...]], pointers: Mapping[str, Any], order: tuple[str, str],
              device: DeviceInfo, extra: list[Arg] | None = None, operands: tuple[OperandConsts, ...] = (),
              operand_rows: tuple[int, ...] = (), epilogue: Expression | None = None, bounds: tuple[int, int] = (0, 0)) -> Step:
        renamed = {"source": strides[order[0]], "target": strides[order[1]]} | {n: s for n, s in strides.items() if n not in order}
        digits = Digits(("n", "down", "across", "pack"), extents, renamed).ordered_for("source" if order[0] == "tiles" else "target")
        consts = TransformConsts(rows, columns, kinds[0].name, kinds[1].name, read, written, vector, digits.consts(), operands,
                                 operand_rows, epilogue)
        args = [Arg("ptr_source", "u64", pointers[order[0]]), Arg("ptr_target", "u64", pointers[order[1]]),
                *(Arg(f"ptr_{n}", "u64", v) for n, v in pointers.items() if n not in order),
                Arg("num_threads", "u32", digits.size), Arg("bound_rows", "s32", bounds[0]), Arg("bound_columns", "s32", bounds[1]),
                *digits.args(consts.digits.wide), *(extra or [])]
        return Step.of("conv/winograd", self.op, Target.for_arch(device.arch), _THREADS, args, consts, ceil_div(digits.size, _THREADS),
                       suffix=f"{len(rows)}x{len(rows[0])}_{consts.source}_{consts.target}_v{vector}")


_OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (WinogradEngine(op, 4), WinogradEngine(op, 2)) for op in _OPS}
