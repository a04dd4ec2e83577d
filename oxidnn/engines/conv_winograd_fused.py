"""Winograd's F(2 x 2, 3 x 3) in one launch behind the filters' transform: tiles are transformed, multiplied and transformed back in
registers and shared memory (Lavin and Gray 2016), so that nothing but the image, the filters' points and the result moves."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from .base import Arg, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, refuse
from .conv_winograd import Matrix, WinogradEngine, toom_cook
from .digits import DigitConsts, Digits, ceil_div
from .element_epilogue import ElementEpilogue, OperandConsts, operand_over

_THREADS = 256
_POINTS = 16
_FILTERS, _TILES = 64, 32  # of a CTA
_CHANNELS = (8, 4)  # of a round


@dataclass(frozen=True, slots=True)
class FusedConsts(ElementEpilogue):
    """Consts of conv/winograd_fused. Byte strides, but for first: rows and columns between the image and tile (0, 0)."""

    window: Matrix
    back: Matrix
    source: str
    target: str
    channels: int
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
    filters: int = _FILTERS
    tiles: int = _TILES

    @property
    def filter_blocks(self) -> int:
        return ceil_div(self.num_filters, _FILTERS)

    @property
    def rounds(self) -> int:
        return ceil_div(self.num_channels, self.channels)

    @property
    def point_bytes(self) -> int:
        """Between two points of the transformed filters in global memory."""
        return self.num_channels * self.filter_pitch

    # A stage in shared memory: tiles [point][channel][tile], filters [point][channel][filter]. Lines of tiles are longer by 4: channels
    # that neighbours store lie in other banks. Planes are longer by 16: so do the two points that a warp reads.

    @property
    def tile_line(self) -> int:
        return 4 * (_TILES + 4)

    @property
    def tile_plane(self) -> int:
        return self.channels * self.tile_line + 64

    @property
    def filters_at(self) -> int:
        return _POINTS * self.tile_plane

    @property
    def filter_line(self) -> int:
        return 4 * _FILTERS

    @property
    def filter_plane(self) -> int:
        return self.channels * self.filter_line + 64

    @property
    def stage_bytes(self) -> int:
        """A power of two more than there are bytes in a stage: stages alternate by one bit."""
        return 1 << (_POINTS * (self.tile_plane + self.filter_plane) - 1).bit_length()

    @property
    def smem_bytes(self) -> int:
        return self.stage_bytes + _POINTS * (self.tile_plane + self.filter_plane)

    @property
    def put_line(self) -> int:
        return self.tile_line

    @property
    def put_plane(self) -> int:
        return 16 * self.put_line


class WinogradFusedEngine(WinogradEngine):
    """F(2 x 2, 3 x 3) of images, forward and of the image's gradient."""

    def __init__(self, op: str) -> None:
        super().__init__(op, 2)
        self.id = f"{op}.winograd_fused_f2x3"  # type: ignore[misc]

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        p = problem
        if p.spatial != 2:
            return refuse("winograd_fused_f2x3: one spatial dimension (two are supported; winograd_f2x3 takes one)")
        if device.capability < (8, 0):
            return refuse(f"winograd_fused_f2x3: {device.arch} has no asynchronous copies (sm_80 and later are supported)")
        support = super().check_support(problem, device)
        if not support:
            return support
        if not self.configs(problem, device):
            return refuse(f"winograd_fused_f2x3: {device.smem_per_cta} bytes of shared memory (86 KiB are needed)")
        extent = max(abs(s * d.dtype.num_bytes) * n for x in (p.image, p.result) for d in (p.desc(x),)
                     for s, n in zip(d.strides[1:], d.shape[1:], strict=True))
        if extent >= 2**31:
            return refuse("winograd_fused_f2x3: an image of 2^31 bytes or more")
        return support

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """channels: of a round."""
        assert isinstance(problem, ConvProblem)
        found = [EngineConfig.of(channels=n) for n in _CHANNELS if self._consts(problem, n).smem_bytes <= device.smem_per_cta]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ConvProblem)
        p = problem
        c = self._consts(p, config["channels"])
        ctas = ceil_div(self._tiles(p), _TILES) * c.filter_blocks
        if device.is_emulated:
            instructions = c.rounds * (c.channels * 140 + 120) + 2500
            return instructions * (4.0 * ceil_div(ctas * _THREADS, 16384) + 0.002 * ctas * _THREADS)
        rate = device.fma_tflops * 1e6 / device.num_sms  # of an SM, per us
        round_us = 2 * _POINTS * _FILTERS * _TILES * c.channels / rate
        us = ceil_div(ctas, device.num_sms) * (c.rounds * round_us / (0.75 if c.channels == 8 else 0.7) + 3.0)
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

    def _consts(self, p: ConvProblem, channels: int) -> FusedConsts:
        source, target, _ = self._sides(p)
        back, _, window = toom_cook(2, 3)
        low = tuple(2 - pair[0] if p.direction == "dgrad" else pair[0] for pair in p.padding)
        names = p.epilogue.args if p.epilogue is not None else ()
        over = [operand_over(p, p.epilogue, name, target.desc.shape, 1) for name in names if name != "acc"]
        return FusedConsts(
            window, back, source.desc.dtype.name, target.desc.dtype.name, channels, source.desc.shape[1], target.desc.shape[1],
            (-low[0], -low[1]), source.strides[2:], target.strides[2:], source.strides[1], target.strides[1],
            source.is_channels_last, target.is_channels_last, self._pitch(p) * F32.num_bytes, self._digits(p).consts(),
            tuple(o for o, _ in over), tuple(row[2] for _, row in over), p.epilogue)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        p, c, digits = problem, self._consts(problem, config["channels"]), self._digits(problem)
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
        fused = Step.of("conv/winograd_fused", self.op, Target.for_arch(device.arch), _THREADS, args, c,
                        ceil_div(tiles, _TILES) * c.filter_blocks, dynamic_smem=c.smem_bytes, suffix=f"{c.source}_{c.channels}")
        return Build((transform, fused), scratch.num_bytes)


_OPS = ("conv_fprop", "conv_dgrad", "conv_transpose", "conv_transpose_dgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (WinogradFusedEngine(op),) for op in _OPS}
