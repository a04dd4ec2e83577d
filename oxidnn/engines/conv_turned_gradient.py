"""The filter's gradient in tf32 on wgmma, sm_90a. The sum runs over positions, along which neither dy nor x lies where channels are
innermost, and wgmma takes 32-bit operands from shared memory only so. One of the two may come through registers instead.

    dw[filter, tap, channel] = sum over positions of dy[position, filter] * x[position + tap, channel]

A copy turns dy into the workspace, positions innermost: B of the product, untouched by taps. x comes as it lies, 32 positions of 32
channels a box, zero outside of the image, and its elements, one by one, become A's fragments: a row of A is a channel of a tap. CTAs sum
parts of the positions, a last launch the parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, prod

from ..codegen.spec import Target as PtxTarget
from ..codegen.spec import TensorMapSpec
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.base import Policy, Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc
from . import affine_tiling as tiling
from .affine import AffineMatmul
from .affine_tma import CORNER_BITS, SPAN_BYTES
from .affine_wgmma_sm90 import BARRIER_BYTES, MAX_STAGES, SMEM_BYTES, RingConsts
from .base import (
    Arg,
    Build,
    Engine,
    EngineConfig,
    Scratch,
    Step,
    Support,
    TensorArg,
    TensorMapArg,
    WorkspaceArg,
    WorkspaceMapArg,
    refuse,
)
from .composition import COPIES, cheapest, moved
from .matmul import lower

_NAME = "turned_gradient"
_LINE = SPAN_BYTES // 4  # positions of a k tile, and channels of a box
_TILES = ((128, 256), (256, 128), (128, 128), (256, 64), (128, 64))  # channels of taps, filters
_WARPGROUPS = 2
_WAVES = (1, 2, 3, 4)
_MAX_STEP = 8  # of an im2col map
_MOST_BYTES = 1 << 31  # of dy turned


@dataclass(frozen=True, slots=True)
class TurnedGradientConsts:
    """Consts of conv/turned_gradient_sm90. A tile has tile_m / 32 boxes of x, 32 channels of a tap each, and tile_n filters of dy; a stage
    32 positions of both, used up by each of 8 warps. late: parameters that place the sums."""

    ring: RingConsts
    tile_m: int
    tile_n: int
    spatial: int
    late: tuple[str, ...] = ()

    @property
    def boxes(self) -> int:
        return self.tile_m // _LINE

    @property
    def box_bytes(self) -> int:
        return _LINE * SPAN_BYTES

    @property
    def blocks(self) -> int:
        """Blocks of 64 rows of a warpgroup: two boxes each."""
        return self.tile_m // (64 * _WARPGROUPS)

    @property
    def products(self) -> list[tuple[int, int]]:
        """(block, step of 8 positions) in order: one is under way while the elements of the next are loaded. Of two, 168 registers hold not
        enough beside 128 sums, and the assembler serialises all."""
        return [(block, step) for step in range(4) for block in range(self.blocks)]

    @property
    def bits_b(self) -> str:
        """A descriptor but for its address: 128-byte swizzle, positions innermost, 1024 bytes between groups of 8 lines."""
        return f"0x{1 << 62 | 1024 >> 4 << 32 | 1 << 16:016X}"

    def sums(self, block: int) -> list[str]:
        return [f"%acc{block * self.tile_n // 2 + i}" for i in range(self.tile_n // 2)]


@dataclass(frozen=True, slots=True)
class _Plan:
    """pixels: the map of x; turned: dy with positions innermost; chunks: boxes of channels of a tap."""

    am: AffineMatmul
    digits: tiling.Digits
    epilogue: tiling.EpilogueConsts
    pixels: TensorMapSpec
    turned: TensorDesc
    positions: int
    chunks: int

    @property
    def k_tiles(self) -> int:
        return -(-self.positions // _LINE)

    def tiles(self, tile_m: int, tile_n: int) -> tuple[int, int]:
        """Of channels of taps, of filters."""
        rows = self.am.n.size // self.channels * self.chunks * _LINE
        return -(-rows // tile_m), -(-self.am.m.size // tile_n)

    @property
    def channels(self) -> int:
        return self.pixels.dims[0]

    def grid(self, splits: int) -> tiling.Grid:
        sizes = {"m": self.am.m.size, "n": self.am.n.size}
        inner = self.epilogue.inner
        return tiling.Grid(1, 1, 1, splits, 1, 1, 1, -(-sizes[inner] // 4) * 4, sizes[self.epilogue.outer])


def _pixels(p: ConvProblem) -> TensorMapSpec | str:
    """The map that brings pixels under consecutive positions, moved by a tap, or why there is none."""
    x, spatial = p.desc(p.image), p.spatial
    if x.strides[1] != 1 or x.align % 16:
        return f"the channels of {p.image} are not contiguous or not aligned to 16 bytes"
    bits = CORNER_BITS[spatial + 2]
    dims, strides, steps, low, high = [x.shape[1]], [1], [1], [], []
    for i in reversed(range(spatial)):
        positions, extent, step = p.desc(p.result).shape[i + 2], x.shape[i + 2], p.stride[i]
        first, reach = -p.padding[i][0], p.dilation[i] * (p.desc(p.filter).shape[i + 2] - 1)
        last = first + (positions - 1) * step - (extent - 1)
        if min(first, last) < -(1 << bits - 1) or max(first, last) >= 1 << bits - 1 or reach >= 1 << bits:
            return f"corners {first}, {last} or a reach of {reach} exceed {bits} bits"
        if step > _MAX_STEP:
            return f"a step of {step} exceeds {_MAX_STEP}"
        dims.append(extent)
        strides.append(x.strides[i + 2])
        steps.append(step)
        low.append(first)
        high.append(last)
    dims.append(x.shape[0])
    strides.append(x.strides[0])
    for i, (extent, stride) in enumerate(zip(dims[1:], strides[1:], strict=True)):
        if (extent > 1 or i == 0) and (stride <= 0 or stride % 4):  # the innermost tells channels from taps, too: see matmul.lower
            return f"a stride of {4 * stride} bytes of {p.image} is no positive multiple of 16"
    # A dimension of one element is never stepped over: any legal stride will do.
    in_bytes = tuple(4 * s if e > 1 else 16 * max(1, -(-s // 4)) for e, s in zip(dims[1:], strides[1:], strict=True))
    return TensorMapSpec("tf32", tuple(dims), in_bytes, (_LINE, _LINE), (*steps, 1), SPAN_BYTES, (tuple(low), tuple(high)))


@lru_cache(maxsize=256)
def _plan(p: ConvProblem) -> _Plan | str:
    pixels = _pixels(p)
    if isinstance(pixels, str):
        return pixels
    (am,) = lower(p)
    d = tiling.merged_digits(am)
    dy = p.desc(p.result)
    places = dy.numel // dy.shape[1]
    strides = [places // dy.shape[0], -(-places // 4) * 4]  # rows of filters begin at multiples of 16 bytes
    if 4 * dy.shape[1] * strides[1] > _MOST_BYTES:
        return f"{4 * dy.shape[1] * strides[1]} bytes of {p.result} turned (at most {_MOST_BYTES})"
    for i in range(2, dy.rank):
        strides.append(prod(dy.shape[i + 1:]))
    turned = TensorDesc(dy.dtype, dy.shape, tuple(strides))
    epilogue = tiling.plan_epilogue(d, am, 64, 64, 128, tiling.needs_wide(d), True)
    return _Plan(am, d, epilogue, pixels, turned, places, -(-pixels.dims[0] // _LINE))


class TurnedGradient(Engine):
    """Workspace: dy turned, and the parts."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.{_NAME}"  # type: ignore[misc]

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        p = problem
        if device.arch != "sm_90a":
            return refuse(f"{_NAME} needs sm_90a, the device is {device.arch}")
        if p.is_empty or p.desc(p.result).numel == 0 or p.desc(p.image).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        kinds = {p.desc(name).dtype for name in (p.image, p.result)}
        if kinds != {F32} or p.policy.math not in ("tf32", "fast"):
            found = " and ".join(sorted(k.name for k in kinds))
            return refuse(f'{_NAME} takes f32 with math="tf32" or "fast", not {found} with "{p.policy.math}"')
        if p.groups > 1:
            return refuse(f"{_NAME} takes one group, not {p.groups}")
        plan = _plan(p)
        if isinstance(plan, str):
            return refuse(f"{_NAME}: {plan}")
        common = tiling.check_common(plan.am, device)
        if common and plan.am.m.size * plan.am.n.size >= 2**31:
            return refuse(f"{_NAME}: {plan.am.m.size} x {plan.am.n.size} sums are 2^31 or more")
        return common

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """tile_m: channels of taps, tile_n: filters; splits: parts of the positions."""
        assert isinstance(problem, ConvProblem)
        plan = _plan(problem)
        assert not isinstance(plan, str), plan
        return tuple(sorted(self._candidates(plan, device), key=lambda config: self.estimate(problem, config, device)))

    def _candidates(self, plan: _Plan, device: DeviceInfo) -> Iterator[EngineConfig]:
        for tile_m, tile_n in _TILES:
            m_tiles, n_tiles = plan.tiles(tile_m, tile_n)
            if (tile_m > 128 and m_tiles == 1) or (tile_n > 64 and tile_n >= 2 * plan.am.m.size):
                continue  # much of the tile would be empty
            parts = {min(plan.k_tiles, waves * device.num_sms // (m_tiles * n_tiles)) or 1 for waves in _WAVES}
            for splits in sorted({-(-plan.k_tiles // -(-plan.k_tiles // part)) for part in parts}):
                grid = plan.grid(splits)
                if splits * grid.outer_size * grid.padded_inner < 2**31:
                    yield EngineConfig.of(tile_m=tile_m, tile_n=tile_n, splits=splits)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Rounds of CTAs at the slower of multiplying and loading, over the traffic, the copy, and the sum of the parts. Within 6 % of 80
        timings on an H200 (2026-11-29: 15 layers of 64 to 1024 channels, N=1 and 32)."""
        assert isinstance(problem, ConvProblem)
        plan = _plan(problem)
        assert not isinstance(plan, str), plan
        tile_m, tile_n, splits = config["tile_m"], config["tile_n"], config["splits"]
        num_ctas, per_split = splits * prod(plan.tiles(tile_m, tile_n)), -(-plan.k_tiles // splits)
        if device.is_emulated:  # an instruction costs about 4 us per batch of threads
            return 2000.0 + 0.02 * plan.turned.numel + 1000.0 * num_ctas * (2 * per_split + 20)
        # 2048 flop per clock and SM, of a clock of 1840 MHz; a line of a box of pixels in 3.6 clocks, 4.1 where steps skip some.
        line_clocks = 3.57 if max(problem.stride) == 1 else 4.1
        clocks = per_split * max(0.88 * tile_m * tile_n / 32, line_clocks * tile_m + 0.47 * tile_n) + 400
        read = 4.0 * (problem.desc(problem.image).numel + plan.turned.numel)
        if read > 2 * device.l2_bytes:  # tiles that walk the same positions drift apart, and what one has read leaves L2 too early
            clocks *= 1 + 0.3e-3 * max(0, per_split - 256)
        compute_us, memory_us = ceil(num_ctas / device.num_sms) * clocks / 1620, read / (device.bandwidth_gbs * 0.96e3)
        copy_us = max(_copy(problem, plan, device)[1], 3.2 + 2 * plan.turned.num_bytes / (device.bandwidth_gbs * 0.78e3))
        partial_bytes = 8.0 * splits * plan.am.m.size * plan.am.n.size
        return (copy_us + max(compute_us, memory_us) + 0.5 * min(compute_us, memory_us) + 4.7
                + partial_bytes / (device.bandwidth_gbs * 0.73e3))

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        p, plan, scratch = problem, _plan(problem), Scratch()
        assert not isinstance(plan, str), plan
        am, turned, splits = plan.am, plan.turned, config["splits"]
        tile_m, tile_n = config["tile_m"], config["tile_n"]
        m_tiles, n_tiles = plan.tiles(tile_m, tile_n)
        grid = plan.grid(splits)
        filters, pitch = am.m.size, turned.strides[1]
        place = scratch.take(4 * filters * pitch)
        parts = scratch.take(4 * splits * grid.outer_size * grid.padded_inner)
        copy = moved(_copy(p, plan, device)[0], WorkspaceArg(), x=TensorArg(p.result), y=place)

        stage_bytes = (tile_m + tile_n) * SPAN_BYTES
        stages = min(MAX_STAGES, (SMEM_BYTES - 2 * BARRIER_BYTES * MAX_STAGES) // stage_bytes)
        t = tiling.Arguments(False)
        for name, value in (("k_tiles", plan.k_tiles), ("part_tiles", -(-plan.k_tiles // splits))):
            t.add(name, "u32", value)
        for name, value in (("tiles", m_tiles * n_tiles), ("n_tiles", n_tiles), ("chunks", plan.chunks)):
            t.add(name, "u32", value)
            t.divisor(name, value)
        taps, positions = p.desc(p.filter).shape[2:], p.desc(p.result).shape[2:]
        t.add("num_boxes", "u32", prod(taps) * plan.chunks)
        for i in range(p.spatial):
            for name, value in ((f"taps{i}", taps[i]), (f"positions{i}", positions[i])):
                t.add(name, "u32", value)
                t.divisor(name, value)
            for name, value in ((f"dilation{i}", p.dilation[i]), (f"step{i}", p.stride[i]), (f"first{i}", -p.padding[i][0])):
                t.add(name, "s32", value)
        loads = len(t.args)
        t.add("channels", "u32", plan.channels)
        tiling._partial_arguments(t, grid, am, plan.epilogue, parts.byte_offset)
        ring = RingConsts(stages, stage_bytes, stages * stage_bytes, 4 * _WARPGROUPS)
        c = TurnedGradientConsts(ring, tile_m, tile_n, p.spatial, tuple(a.name for a in t.args[loads:]))
        lines = TensorMapSpec("tf32", (plan.positions, filters), (4 * pitch,), (_LINE, tile_n), swizzle=SPAN_BYTES)
        maps = [Arg("map_a", "tensor_map", TensorMapArg(p.image, plan.pixels)),
                Arg("map_b", "tensor_map", WorkspaceMapArg(lines, place.byte_offset))]
        target = PtxTarget.for_arch(device.arch, (8, 0))
        product = Step.of("conv/turned_gradient_sm90", p.op, target, 128 * (1 + _WARPGROUPS), maps + t.args, c,
                          splits * m_tiles * n_tiles, dynamic_smem=ring.barriers_at + 2 * BARRIER_BYTES * stages, follows=True,
                          suffix=f"{tile_m}x{tile_n}")
        reduce = tiling.reduce_step(p.op, am, plan.digits, grid, plan.epilogue, target, plan.epilogue.wide, parts.byte_offset)
        return Build((*copy, product, reduce), scratch.num_bytes)


def _copy(p: ConvProblem, plan: _Plan, device: DeviceInfo) -> tuple[Build, float]:
    return cheapest("transform", (("x", p.desc(p.result)), ("y", plan.turned)), (), Policy(), device, COPIES)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (TurnedGradient(op),) for op in ("conv_wgrad", "conv_transpose_wgrad")}
