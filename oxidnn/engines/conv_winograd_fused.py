"""Winograd's F(2 x 2, 3 x 3) in one launch behind the filters' transform: tiles are transformed, multiplied and transformed back in
registers and shared memory (Lavin and Gray 2016), so that nothing but the image, the filters' points and the result moves."""

from __future__ import annotations

from dataclasses import dataclass, fields

from ..codegen.pointwise import Expression
from ..codegen.spec import Target, TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc
from .base import (
    SUPPORTED,
    Arg,
    Build,
    Engine,
    EngineConfig,
    ScalarArg,
    Scratch,
    Step,
    Support,
    TensorArg,
    WorkspaceArg,
    WorkspaceMapArg,
    refuse,
)
from .composition import Place, shifted
from .conv_winograd import Matrix, Side, WinogradEngine, toom_cook
from .digits import DigitConsts, Digits, ceil_div, power_of_two
from .element_epilogue import ElementEpilogue, OperandConsts, operand_over
from .reduce_tree import reduction_steps

_THREADS = 256
_POINTS = 16
_WIDE, _NARROW = 64, 32  # results of a CTA at a point
_DEPTHS = (8, 4)  # of a round
_MOST_SPLITS = 512
_STAGES = 3  # of a ring
_RING_SPREAD = 3


def _spread(depth: int, is_channels_last: bool) -> int:
    """As measured on an H200, by 1 to 7 percent; all at once costs 5 to 9."""
    return 3 if depth < 8 else 2 if is_channels_last else 1


class PointLayout:
    """Where points lie in shared memory (conv/winograd_points): a stage is [point][depth][32] (narrow) and [point][depth][64] (wide), f32,
    `depth` what is summed over in a round. Lines are longer by 4 where a warp stores columns: neighbours lie in other banks."""

    __slots__ = ()
    depth: int
    wide_pad: int = 0
    spread: int  # parts of what a round does for later ones, between 16 products each

    @property
    def narrow_line(self) -> int:
        return 4 * (_NARROW + 4)

    @property
    def narrow_plane(self) -> int:
        return self.depth * self.narrow_line

    @property
    def wide_at(self) -> int:
        return _POINTS * self.narrow_plane

    @property
    def wide_line(self) -> int:
        return 4 * (_WIDE + self.wide_pad)

    @property
    def wide_plane(self) -> int:
        return self.depth * self.wide_line

    @property
    def stage(self) -> int:
        """Bytes of a stage."""
        return _POINTS * (self.narrow_plane + self.depth * 4 * (_WIDE + self.wide_pad))

    @property
    def stage_bytes(self) -> int:
        """A power of two that is not below what a stage takes: stages alternate by one bit."""
        return power_of_two(self.stage)

    @property
    def smem_bytes(self) -> int:
        return self.stage_bytes + self.stage

    # At the end: [point][16 of wide][narrow].

    @property
    def put_line(self) -> int:
        return self.narrow_line

    @property
    def put_plane(self) -> int:
        return 16 * self.put_line


@dataclass(frozen=True, slots=True)
class FusedConsts(PointLayout, ElementEpilogue):
    """Consts of conv/winograd_fused: narrow are tiles, wide are filters, summed over channels. Byte strides, but for first: rows and
    columns between the image and tile (0, 0)."""

    window: Matrix
    back: Matrix
    source: str
    target: str
    depth: int  # channels of a round
    spread: int
    num_channels: int
    num_filters: int
    first: tuple[int, int]
    source_strides: tuple[int, int]  # rows, columns
    target_strides: tuple[int, int]
    source_channel: int
    target_channel: int
    source_channels_last: bool
    target_channels_last: bool
    filter_pitch: int
    digits: DigitConsts
    operands: tuple[OperandConsts, ...] = ()
    operand_rows: tuple[int, ...] = ()
    epilogue: Expression | None = None
    compute: str = "f32"
    tiles: int = _NARROW
    filters: int = _WIDE

    @property
    def is_idle(self) -> bool:
        """A round has fewer tiles and channels than there are threads."""
        return self.depth * self.tiles < _THREADS

    @property
    def idle_at(self) -> int:
        """How much further on those store that have none: behind the stages."""
        return self.stage_bytes + self.stage - self.depth * self.narrow_line

    @property
    def smem_bytes(self) -> int:
        return self.stage_bytes + _POINTS * (self.narrow_plane * (2 if self.is_idle else 1) + self.wide_plane)

    @property
    def filter_blocks(self) -> int:
        return ceil_div(self.num_filters, _WIDE)

    @property
    def rounds(self) -> int:
        return ceil_div(self.num_channels, self.depth)

    @property
    def filter_channel(self) -> int:
        """Bytes between two channels of the transformed filters in global memory, [channel][point][filter]."""
        return _POINTS * self.filter_pitch


@dataclass(frozen=True, slots=True)
class RingConsts(FusedConsts):
    """Consts of conv/winograd_fused_sm90: stages, then two places where points meet, then a barrier for each stage. The wide points of a
    channel lie side by side, as a box of them comes: [depth][point][64]."""

    source_pairs: bool = False  # neighbours of a row that begin at an even column are 8 aligned bytes; no row ends between them
    target_pairs: bool = False
    stages: int = _STAGES

    @property
    def wide_line(self) -> int:
        return 4 * _WIDE * _POINTS

    @property
    def wide_plane(self) -> int:
        return 4 * _WIDE

    @property
    def filter_bytes(self) -> int:
        """Of a round's box of filters' points."""
        return self.depth * self.wide_line

    @property
    def source_packs(self) -> tuple[tuple[int, ...], ...]:
        """Columns of a window that a load takes together; it begins at `first` plus an even number."""
        if not self.source_pairs:
            return ((0,), (1,), (2,), (3,))
        return ((0,), (1, 2), (3,)) if self.first[1] % 2 else ((0, 1), (2, 3))

    @property
    def exchange_at(self) -> int:
        return self.stages * self.stage

    @property
    def exchange_bytes(self) -> int:
        return _POINTS * self.put_plane

    @property
    def barriers_at(self) -> int:
        return self.exchange_at + 2 * self.exchange_bytes

    @property
    def smem_bytes(self) -> int:
        return self.barriers_at + 8 * self.stages


@dataclass(frozen=True, slots=True)
class GradientConsts(PointLayout):
    """Consts of conv/winograd_fused_wgrad: narrow are channels of x, wide are those of dy (filters), summed over tiles. Byte strides."""

    window: Matrix  # of x
    inner: Matrix  # of dy
    outer: Matrix  # back
    x: str
    dy: str
    target: str
    first: tuple[int, int]
    x_strides: tuple[int, int]  # rows, columns
    dy_strides: tuple[int, int]
    target_strides: tuple[int, int]
    x_channel: int
    dy_channel: int
    target_channel: int
    target_filter: int
    split_bytes: int  # of the target
    channels_last: bool
    num_channels: int
    num_filters: int
    digits: DigitConsts
    spread: int
    depth: int = 8
    wide_pad: int = 4
    channels: int = _NARROW
    filters: int = _WIDE

    @property
    def channel_blocks(self) -> int:
        return ceil_div(self.num_channels, _NARROW)

    @property
    def blocks(self) -> int:
        return ceil_div(self.num_filters, _WIDE) * self.channel_blocks


def _has_pairs(side: Side) -> bool:
    n, c, h, w = side.strides
    is_even = side.desc.shape[3] % 2 == 0 and side.desc.align % 8 == 0 and not any(s % 8 for s in (n, c, h))
    return side.desc.dtype is F32 and w == 4 and is_even


def check_kind(p: ConvProblem) -> Support:
    """f32 images of two dimensions."""
    if p.spatial != 2:
        return refuse(f"winograd_fused_f2x3: {p.spatial} spatial dimensions (2 are supported; winograd_f2x3 takes 1)")
    kinds = [o.desc.dtype for o in p.inputs if o.name in (p.image, p.filter, p.result)]
    if any(k is not F32 for k in kinds):
        return refuse(f"winograd_fused_f2x3 reads f32, not {' and '.join(map(str, kinds))} (winograd_f2x3 takes halves)")
    return SUPPORTED


def check_extent(p: ConvProblem) -> Support:
    """Refuses images whose offsets do not fit an instruction."""
    for desc in (p.desc(p.image), p.desc(p.result)):
        if any(s * desc.dtype.num_bytes * n >= 2**31 for s, n in zip(desc.strides[1:], desc.shape[1:], strict=True)):
            return refuse("winograd_fused_f2x3: an image of 2^31 bytes or more")
    return SUPPORTED


class WinogradFusedEngine(WinogradEngine):
    """F(2 x 2, 3 x 3) of images, forward and of the image's gradient."""

    def __init__(self, op: str) -> None:
        super().__init__(op, 2)
        self.id = f"{op}.winograd_fused_f2x3"  # type: ignore[misc]

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        p = problem
        refusal = check_kind(p)
        if not refusal:
            return refusal
        if device.capability < (8, 0):
            return refuse(f"winograd_fused_f2x3: {device.arch} has no asynchronous copies (sm_80 and later are supported)")
        support = super().check_support(problem, device)
        if not support:
            return support
        return check_extent(p)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """depth: channels of a round. stages: of a ring that tensor copies fill, where the device has them and it fits, of f32 results (for
        others there are too few registers)."""
        assert isinstance(problem, ConvProblem)
        ring = EngineConfig.of(depth=8, stages=_STAGES)
        has_copies = device.capability >= (9, 0) and self._sides(problem)[1].desc.dtype is F32
        if has_copies and self._consts(problem, ring).smem_bytes <= device.smem_per_cta:
            return (ring,)
        found = [EngineConfig.of(depth=n) for n in _DEPTHS
                 if self._consts(problem, EngineConfig.of(depth=n)).smem_bytes <= device.smem_per_cta]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ConvProblem)
        p = problem
        c = self._consts(p, config)
        ctas = ceil_div(self._tiles(p), _NARROW) * c.filter_blocks
        if device.is_emulated:
            instructions = c.rounds * (c.depth * 140 + 120) + 2500
            return instructions * (4.0 * ceil_div(ctas * _THREADS, 16384) + 0.002 * ctas * _THREADS)
        rate = device.fma_tflops * 1e6 / device.num_sms  # of an SM, per us
        round_us = 2 * _POINTS * _WIDE * _NARROW * c.depth / rate
        # Measured on an H200. Rounds of 4 have half as many products to a barrier, and pixels of 4 neighbouring channels are half a sector.
        if isinstance(c, RingConsts):
            efficiency, block_us = 0.80, 1.7
        else:
            efficiency, block_us = 0.74 if c.depth == 8 else 0.66 if c.source_channels_last else 0.71, 2.1
        us = ceil_div(ctas, device.num_sms) * (c.rounds * round_us / efficiency + block_us)
        return max(us, sum(o.desc.num_bytes for o in p.operands) / (device.bandwidth_gbs * 0.8e3)) + 6.0

    # ---- sizes ----

    def _indices(self, p: ConvProblem) -> int:
        return self._tiles(p)

    def _pitch(self, p: ConvProblem) -> int:
        """Elements of a line of the transformed filters: 16-byte pieces."""
        k, c = p.desc(p.filter).shape[:2]
        return 4 * ceil_div(c if p.direction == "dgrad" else k, 4)

    def _chunk_bytes(self, p: ConvProblem, images: int) -> int:
        k, c = p.desc(p.filter).shape[:2]
        return _POINTS * (k if p.direction == "dgrad" else c) * self._pitch(p) * F32.num_bytes

    # ---- steps ----

    def _digits(self, p: ConvProblem) -> Digits:
        source, target, _ = self._sides(p)
        down, across = self._tile_counts(p)
        strides = {side: (x.strides[0], 2 * x.strides[2], 2 * x.strides[3]) for side, x in (("source", source), ("target", target))}
        if p.epilogue is not None:
            for name in (x for x in p.epilogue.args if x != "acc"):
                row = operand_over(p, p.epilogue, name, target.desc.shape, 1)[1]
                strides[name] = (row[0], 2 * row[2], 2 * row[3])
        return Digits(("n", "down", "across"), (p.desc(p.image).shape[0], down, across), strides)

    def _consts(self, p: ConvProblem, config: EngineConfig) -> FusedConsts:
        source, target, _ = self._sides(p)
        back, _, window = toom_cook(2, 3)
        low = tuple(2 - pair[0] if p.direction == "dgrad" else pair[0] for pair in p.padding)
        names = p.epilogue.args if p.epilogue is not None else ()
        over = [operand_over(p, p.epilogue, name, target.desc.shape, 1) for name in names if name != "acc"]
        depth, is_ring = config["depth"], "stages" in dict(config.knobs)
        spread = _RING_SPREAD if is_ring else _spread(depth, source.is_channels_last)
        consts = FusedConsts(
            window, back, source.desc.dtype.name, target.desc.dtype.name, depth, spread, source.desc.shape[1], target.desc.shape[1],
            (-low[0], -low[1]), source.strides[2:], target.strides[2:], source.strides[1], target.strides[1],
            source.is_channels_last, target.is_channels_last, self._pitch(p) * F32.num_bytes, self._digits(p).consts(),
            tuple(o for o, _ in over), tuple(row[2] for _, row in over), p.epilogue)
        if not is_ring:
            return consts
        return RingConsts(**{f.name: getattr(consts, f.name) for f in fields(consts)},
                          source_pairs=_has_pairs(source), target_pairs=_has_pairs(target))

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        p, c, digits = problem, self._consts(problem, config), self._digits(problem)
        source, target, filter = self._sides(p)
        scratch = Scratch()
        points = scratch.take(self._chunk_bytes(p, 1))
        taps = toom_cook(2, 3)[1]
        transform = self._filter_step(p, filter, taps, points, F32, p.direction == "dgrad", device, self._pitch(p))
        tiles = self._tiles(p)
        at = c.first[0] * source.strides[2] + c.first[1] * source.strides[3]
        args = [Arg("ptr_source", "u64", TensorArg(source.name, at)), Arg("ptr_target", "u64", TensorArg(target.name)),
                Arg("ptr_filter", "u64", points), *(Arg(f"ptr_{o.name}", "u64", TensorArg(o.name)) for o in c.operands),
                Arg("num_tiles", "u32", tiles), Arg("source_rows", "u32", source.desc.shape[2]),
                Arg("source_columns", "u32", source.desc.shape[3]), Arg("num_rows", "u32", target.desc.shape[2]),
                Arg("num_columns", "u32", target.desc.shape[3]), *digits.args(c.digits.wide),
                *(Arg(f"scalar_{x}", "f32", ScalarArg(x)) for x in c.epilogue_scalars)]
        blocks = ceil_div(tiles, _NARROW) * c.filter_blocks
        if isinstance(c, RingConsts):
            boxes = TensorMapSpec("f32", (c.num_filters, _POINTS, c.num_channels), (c.filter_pitch, c.filter_channel),
                                  (_WIDE, _POINTS, c.depth))
            args[2] = Arg("map_filter", "tensor_map", WorkspaceMapArg(boxes, points.byte_offset))
            args.append(Arg("num_blocks", "u32", blocks))
            fused = Step.of("conv/winograd_fused_sm90", self.op, Target.for_arch(device.arch), _THREADS, args, c,
                            min(blocks, device.num_sms), dynamic_smem=c.smem_bytes, suffix=c.source)
            return Build((transform, fused), scratch.num_bytes)
        fused = Step.of("conv/winograd_fused", self.op, Target.for_arch(device.arch), _THREADS, args, c,
                        blocks, dynamic_smem=c.smem_bytes, suffix=f"{c.source}_{c.depth}")
        return Build((transform, fused), scratch.num_bytes)


class WinogradFusedGradientEngine(WinogradEngine):
    """F(3 x 3, 2 x 2): the filter's gradient, and the sum of what several CTAs have of one filter."""

    def __init__(self, op: str) -> None:
        super().__init__(op, 2)
        self.id = f"{op}.winograd_fused_f2x3"  # type: ignore[misc]

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        refusal = check_kind(problem)
        if not refusal:
            return refusal
        support = super().check_support(problem, device)
        if support and self._consts(problem, 1).smem_bytes > device.smem_per_cta:
            return refuse(f"winograd_fused_f2x3: {device.smem_per_cta} bytes of shared memory "
                          f"({self._consts(problem, 1).smem_bytes} are needed)")
        return check_extent(problem) if support else support

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """splits: of the tiles, each summed by CTAs of its own."""
        assert isinstance(problem, ConvProblem)
        blocks, rounds = self._consts(problem, 1).blocks, ceil_div(self._tiles(problem), 8)
        limit = _MOST_SPLITS if problem.policy.workspace_limit is None else problem.policy.workspace_limit // self._split_bytes(problem)
        wanted = (1, *(waves * device.num_sms // blocks for waves in (1, 2)), *(device.num_sms // (2 * blocks), ))
        found = {ceil_div(rounds, ceil_div(rounds, n)) for n in wanted if n == 1 or 1 < n <= min(rounds, max(1, limit))}
        return tuple(sorted((EngineConfig.of(splits=n) for n in found), key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ConvProblem)
        p, splits = problem, config["splits"]
        c = self._consts(p, splits)
        ctas, rounds = splits * c.blocks, ceil_div(ceil_div(self._tiles(p), 8), splits)
        if device.is_emulated:
            instructions = rounds * (c.depth * 140 + 400) + 2500
            return instructions * (4.0 * ceil_div(ctas * _THREADS, 16384) + 0.002 * ctas * _THREADS) + 3000.0 * (splits > 1)
        rate = device.fma_tflops * 1e6 / device.num_sms  # of an SM, per us
        round_us = 2 * _POINTS * _WIDE * _NARROW * c.depth / rate
        us = ceil_div(ctas, device.num_sms) * (rounds * round_us / 0.68 + 4.0)
        us = max(us, sum(o.desc.num_bytes for o in p.operands) / (device.bandwidth_gbs * 0.8e3))
        return us + 3.0 + (3.0 + 1.2 * splits * self._split_bytes(p) / (device.bandwidth_gbs * 0.8e3) if splits > 1 else 0.0)

    # ---- sizes ----

    def _indices(self, p: ConvProblem) -> int:
        return self._tiles(p)

    def _chunk_bytes(self, p: ConvProblem, images: int) -> int:
        return 0

    def _split_bytes(self, p: ConvProblem) -> int:
        return p.desc(p.filter).numel * F32.num_bytes

    # ---- steps ----

    def _partials(self, p: ConvProblem, splits: int) -> TensorDesc:
        """What the CTAs write where there are several to sum: [split][row][column][filter][channel], in dw's order of dimensions."""
        k, c = p.desc(p.filter).shape[:2]
        return TensorDesc(F32, (splits, k, c, 3, 3), (9 * k * c, c, 1, 3 * k * c, k * c))

    def _consts(self, p: ConvProblem, splits: int) -> GradientConsts:
        x, dy, dw = self._sides(p)
        outer, inner, _ = toom_cook(3, 2)
        target = self._partials(p, splits) if splits > 1 else TensorDesc(dw.desc.dtype, (1, *dw.desc.shape), (0, *dw.desc.strides))
        size = target.dtype.num_bytes
        split, k, c, h, w = (s * size for s in target.strides)
        if p.flip:
            h, w = -h, -w
        return GradientConsts(
            toom_cook(2, 3)[2], inner, outer, x.desc.dtype.name, dy.desc.dtype.name, target.dtype.name,
            (-p.padding[0][0], -p.padding[1][0]), x.strides[2:], dy.strides[2:], (h, w), x.strides[1], dy.strides[1], c, k, split,
            x.is_channels_last and dy.is_channels_last, x.desc.shape[1], dy.desc.shape[1], self._digits(p).consts(),
            _spread(8, x.is_channels_last and dy.is_channels_last))

    def _digits(self, p: ConvProblem) -> Digits:
        x, dy, _ = self._sides(p)
        strides = {side: (s.strides[0], 2 * s.strides[2], 2 * s.strides[3]) for side, s in (("x", x), ("dy", dy))}
        return Digits(("n", "down", "across"), (x.desc.shape[0], *self._tile_counts(p)), strides)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        p, splits, digits = problem, config["splits"], self._digits(problem)
        c = self._consts(p, splits)
        x, dy, dw = self._sides(p)
        scratch, tiles = Scratch(), self._tiles(p)
        flipped = -2 * (c.target_strides[0] + c.target_strides[1]) if p.flip else 0
        place: Place = shifted(scratch.take(splits * c.split_bytes), flipped) if splits > 1 else TensorArg(dw.name, flipped)
        at = c.first[0] * c.x_strides[0] + c.first[1] * c.x_strides[1]
        args = [Arg("ptr_x", "u64", TensorArg(x.name, at)), Arg("ptr_dy", "u64", TensorArg(dy.name)), Arg("ptr_dw", "u64", place),
                Arg("num_tiles", "u32", tiles), Arg("tiles_per_part", "u32", 8 * ceil_div(ceil_div(tiles, 8), splits)),
                *(Arg(f"{n}_{side}", "u32", s.desc.shape[axis]) for n, s in (("x", x), ("dy", dy))
                  for side, axis in (("rows", 2), ("columns", 3))), *digits.args(c.digits.wide)]
        steps = [Step.of("conv/winograd_fused_wgrad", self.op, Target.for_arch(device.arch), _THREADS, args, c, splits * c.blocks,
                         dynamic_smem=c.smem_bytes, suffix=c.x)]
        if splits > 1:
            partial = (self._partials(p, splits), WorkspaceArg())
            steps += reduction_steps(self.op, partial, (dw.desc, TensorArg(dw.name)), (0,), "sum", device, scratch)
        return Build(tuple(steps), scratch.num_bytes)


_OPS = ("conv_fprop", "conv_dgrad", "conv_transpose", "conv_transpose_dgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (WinogradFusedEngine(op),) for op in _OPS}
ENGINES |= {op: (WinogradFusedGradientEngine(op),) for op in ("conv_wgrad", "conv_transpose_wgrad")}
