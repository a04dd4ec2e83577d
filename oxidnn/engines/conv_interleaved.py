"""The image's gradient for images of few channels, on wgmma, sm_90a: the classes of the stride are columns of one product.

Coordinate h = stride * p + a of the image meets tap r of position p - i iff r = a + padding - stride * i. So for each block of
stride x stride pixels the gradient is a sum over few offsets i and all filters, of products whose columns are (a_h, a_w, channel):
one convolution of unit stride, over which positions' gradients are read once, instead of one for each class. The filter, rearranged to
these columns (zero where r is no tap), stays in shared memory; positions come as patches, a block of 8 x 8 with all offsets around it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import BF16, F16
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from . import affine_tiling as tiling
from .affine_tma import BLOCK
from .affine_wgmma_sm90 import BARRIER_BYTES, SMEM_BYTES, RingConsts
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, TensorMapArg, refuse

SPAN = 64  # filters of a line of 128 bytes
WARPGROUPS = 3
MAX_CHANNELS = 16
MAX_COLUMNS = 64
MAX_PRODUCTS = 400  # of a tile, all unrolled
MAX_STAGES = 4 * WARPGROUPS


@dataclass(frozen=True, slots=True)
class AxisConsts:
    """A spatial dimension: offsets i = first, first + 1, ... (`offsets` of them) of a block of `stride` pixels."""

    taps: int
    stride: int
    padding: int
    first: int
    offsets: int

    @property
    def patch(self) -> int:
        return BLOCK + self.offsets - 1


@dataclass(frozen=True, slots=True)
class InterleavedConsts:
    """Consts of conv/interleaved_dgrad_sm90. Columns are (a_h, a_w, channel); a stage holds the patches of all spans of filters."""

    ring: RingConsts
    kind: str
    out: str
    tile_n: int
    warpgroups: int
    filters: int
    channels: int
    h: AxisConsts
    w: AxisConsts
    filter_at: int

    @property
    def spans(self) -> int:
        return -(-self.filters // SPAN)

    @property
    def tail(self) -> int:
        """Filters of the last span, in whole products; 0: all spans are full."""
        return -(-(self.filters % SPAN) // 16) * 16 % SPAN

    @property
    def copied_bytes(self) -> int:
        """Of a stage; nobody reads the rest."""
        return (self.spans - 1) * self.patch_bytes + self.patch_bytes // SPAN * (self.tail or SPAN)

    @property
    def columns(self) -> int:
        return self.h.stride * self.w.stride * self.channels

    @property
    def run(self) -> int:
        """Neighbouring elements of a row of the image that a block holds."""
        return self.w.stride * self.channels

    @property
    def panels(self) -> int:
        return self.spans * self.h.offsets * self.w.offsets

    @property
    def patch_bytes(self) -> int:
        return self.h.patch * self.w.patch * SPAN * 2

    @property
    def products(self) -> list[tuple[int, int]]:
        """Of a tile: where A and B of each begin, in units of 16 bytes from the patch and the filter."""
        return [(span * self.patch_bytes // 16 + (i * self.w.patch + j) * 8 + 2 * step,
                 ((span * self.h.offsets + i) * self.w.offsets + j) * self.tile_n * 8 + 2 * step)
                for span in range(self.spans) for i in range(self.h.offsets) for j in range(self.w.offsets)
                for step in range(4) if span * SPAN + 16 * step < self.filters]


def _axis(taps: int, stride: int, padding: int) -> AxisConsts:
    first = -((taps - 1 - padding) // stride)
    return AxisConsts(taps, stride, padding, first, (stride - 1 + padding) // stride - first + 1)


@lru_cache(maxsize=256)
def _plan(p: ConvProblem) -> InterleavedConsts | str:
    image, filter, result = p.desc(p.image), p.desc(p.filter), p.desc(p.result)
    if p.spatial != 2 or p.groups != 1 or p.flip or p.dilation != (1, 1) or p.epilogue is not None:
        return "two dimensions, one group, dilation 1, no flip and no epilogue are supported"
    if not result.dtype == filter.dtype or result.dtype not in (F16, BF16) or image.dtype not in (F16, BF16):
        return f"{p.result} is {result.dtype}, {p.filter} {filter.dtype} and {p.image} {image.dtype}; f16 and bf16 are supported"
    if not image.is_packed("nhwc") or not result.is_packed("nhwc"):
        return f"{p.image} and {p.result} must be packed, channels last"
    filters, channels = filter.shape[:2]
    h, w = (_axis(filter.shape[2 + i], p.stride[i], p.padding[i][0]) for i in range(2))
    columns, run = h.stride * w.stride * channels, w.stride * channels
    if channels > MAX_CHANNELS:
        return f"{channels} channels are more than {MAX_CHANNELS}"
    if columns > MAX_COLUMNS or run % 2 or image.shape[3] * channels % 2:
        return f"{columns} columns of (row, column, channel) in runs of {run} are more than {MAX_COLUMNS} or odd"
    if filters % 8 or result.align % 16 or image.align % 4:
        return f"{filters} filters are no multiple of 8, or {p.result} and {p.image} are aligned to {result.align} and {image.align} bytes"
    if image.numel >= 2**31 or result.numel >= 2**31 or tiling.reach(filter.shape, filter.strides) >= 2**31 or max(h.patch, w.patch) > 256:
        return "an offset exceeds 31 bits, or a patch is too large"
    tile_n = -(-columns // 8) * 8
    consts = InterleavedConsts(RingConsts(0, 0, 0, 1), result.dtype.name, image.dtype.name, tile_n, WARPGROUPS, filters, channels, h, w, 0)
    filter_bytes = consts.panels * tile_n * SPAN * 2
    stage_bytes = consts.spans * consts.patch_bytes
    stages = (SMEM_BYTES - 1024 - filter_bytes - 2 * BARRIER_BYTES * MAX_STAGES) // stage_bytes // WARPGROUPS * WARPGROUPS
    if stages < WARPGROUPS or len(consts.products) > MAX_PRODUCTS:
        return f"{h.offsets} x {w.offsets} offsets of {filters} filters do not fit shared memory"
    stages = min(stages, MAX_STAGES)
    filter_at = -(-stages * stage_bytes // 1024) * 1024
    return replace(consts, ring=RingConsts(stages, stage_bytes, filter_at + filter_bytes, 1), filter_at=filter_at)


def _blocks(p: ConvProblem) -> tuple[int, int, int]:
    """Images, and 8 x 8 blocks of blocks of pixels down and across."""
    n, _, height, width = p.desc(p.image).shape
    return n, -(-height // (p.stride[0] * BLOCK)), -(-width // (p.stride[1] * BLOCK))


class InterleavedGradient(Engine):
    """dgrad of images whose stride x stride pixels have at most 64 elements."""

    is_deterministic = True

    def __init__(self, op: str) -> None:
        self.id = f"{op}.interleaved_sm90"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        if device.arch != "sm_90a":
            return refuse(f"interleaved_sm90 needs sm_90a, the device is {device.arch}")
        assert isinstance(problem, ConvProblem)
        if problem.desc(problem.result).numel == 0 or problem.desc(problem.filter).numel == 0:
            return refuse("there are no products to sum: the direct engine writes zeros")
        plan = _plan(problem)
        return refuse(f"interleaved_sm90: {plan}") if isinstance(plan, str) else SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Tiles of 64 positions at the time their products read A from shared memory, over the traffic."""
        assert isinstance(problem, ConvProblem)
        c = _plan(problem)
        assert not isinstance(c, str), c
        n, down, across = _blocks(problem)
        tiles = n * down * across
        clocks = len(c.products) * max(18.5, c.tile_n / 2)
        compute_us = -(-tiles * clocks // device.num_sms) / 1620
        memory_us = problem.num_bytes / (device.bandwidth_gbs * 0.85e3)  # short stores
        if device.is_emulated:
            return 1000.0 * tiles * len(c.products)
        return max(compute_us, memory_us) + 0.1 * min(compute_us, memory_us) + 7

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        """One persistent CTA per SM."""
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, c = problem, _plan(problem)
        assert not isinstance(c, str), c
        image, filter, result = p.desc(p.image), p.desc(p.filter), p.desc(p.result)
        n, down, across = _blocks(p)
        num_ctas = min(n * down * across, device.num_sms)
        t = tiling.Arguments(False)
        t.add("num_tiles", "u32", n * down * across)
        t.add("num_ctas", "u32", num_ctas)
        for name, value in (("down", down), ("across", across)):
            t.add(name, "u32", value)
            t.divisor(name, value)
        t.add("height", "u32", image.shape[2])
        t.add("row_elements", "u32", image.shape[3] * c.channels)
        t.add("image_bytes", "u32", image.shape[2] * image.shape[3] * c.channels * 2)
        t.add("ptr_w", "u64", TensorArg(p.filter))
        for name, stride in zip(("k", "c", "r", "s"), filter.strides, strict=True):
            t.add(f"w_{name}", "s32", stride)
        t.add("ptr_dx", "u64", TensorArg(p.image))
        _, k, rows, columns = result.shape
        patches = TensorMapSpec(result.dtype.name, (k, columns, rows, n), (k * 2, columns * k * 2, rows * columns * k * 2),
                                (SPAN, c.w.patch, c.h.patch, 1), swizzle=128)
        maps = [Arg("map_dy", "tensor_map", TensorMapArg(p.result, patches))]
        if c.tail:
            maps.append(Arg("map_dy_tail", "tensor_map", TensorMapArg(p.result, replace(patches, box=(c.tail, *patches.box[1:])))))
        args = [*maps, *t.args]
        target = PtxTarget.for_arch(device.arch, (8, 0))
        return Build((Step.of("conv/interleaved_dgrad_sm90", self.op, target, 128 * (1 + c.warpgroups), args, c, num_ctas,
                              dynamic_smem=c.ring.barriers_at + 2 * BARRIER_BYTES * c.ring.stages,
                              suffix=f"{c.kind}_{c.h.taps}x{c.w.taps}x{c.columns}"),))


ENGINES: dict[str, tuple[Engine, ...]] = {op: (InterleavedGradient(op),) for op in ("conv_dgrad", "conv_transpose")}
