"""The filter's gradient of a depthwise convolution on wgmma, sm_90a: all taps of 8 channels are one product over positions.

dw(r, s, c) = sum of dy(p, q, c) * x(p + r, q + s, c). A line of shared memory holds the 8 channels of a pixel. An operand whose rows lie
along a line takes 8 of them wherever the descriptor points, so the 64 rows of A are 8 channels at 8 neighbouring pixels: the taps across.
Likewise the columns of B are 8 channels of dy in as many rows as there are taps down. Of the result the blocks (tap across, tap down) have
the taps' sums on their diagonals: 1 of 8 products is of use, as in conv_depthwise_mma, but no fragment is loaded and no register holds one.
k runs over the positions of a strip of x's rows, padded so that taps beside a row meet zeros.

Zeros off the diagonal meet the other channels of a group: an infinity or a NaN becomes a NaN in all 8 channels there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc, packed_strides
from .affine_tiling import Arguments
from .base import SUPPORTED, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .conv_depthwise import Axis, Depthwise, lower_any
from .conv_depthwise_mma import as_products
from .digits import ceil_div
from .reduce_tree import reduction_steps

TAPS = 8  # across, of a product of 64 rows
LINE = 16  # bytes
MAX_DOWN = 11  # taps: 44 sums a thread, of 80 registers
MAX_STEPS = 128  # products of a strip, and lines that a thread copies, in the text of the kernel
MAX_STAGES = 8
SMEM_BYTES = 232448
PRODUCERS = 8  # warps
BATCH = 12  # lines that a thread holds


@dataclass(frozen=True, slots=True)
class Slot:
    """Rows that warps copy: warp w row first + w of `rows`, of an image of x or dy with `extent` rows of `columns` pixels, to lines from
    `line` on."""

    image: int
    name: str
    first: int
    rows: int
    extent: int
    columns: int
    line: int


@dataclass(frozen=True, slots=True)
class WgmmaDepthwiseConsts:
    """Consts of conv/depthwise_wgmma_wgrad_sm90. groups: of 8 channels, each a warpgroup's. A stage holds for each group the lines of
    `rows` rows of x, `pitch` lines apart, then those of the rows of dy that these meet, of so many images.
    """

    kind: str
    groups: int
    down: Axis
    across: Axis
    rows: int
    images: int
    stages: int
    flip: bool

    @property
    def pitch(self) -> int:
        """x's taps beside a row lie in what parts it from the next."""
        a = self.across
        high = max(0, a.target + (a.taps - 1) * a.dilation - a.low - a.source)
        return max(a.source + max(a.low, high), a.target)

    @property
    def steps(self) -> int:
        """Of 16 positions."""
        return ceil_div((self.rows - 1) * self.pitch + self.across.target, 16)

    @property
    def dy_rows(self) -> int:
        return self.rows + (self.down.taps - 1) * self.down.dilation

    @property
    def lead(self) -> int:
        """Rows of dy that the first row of x meets before its own."""
        return (self.down.taps - 1) * self.down.dilation - self.down.low

    @property
    def x_lines(self) -> int:
        a = self.across
        lines = max(16 * self.steps + (TAPS - 1) * a.dilation, (self.rows - 1) * self.pitch + a.low + a.source)
        return ceil_div(lines, 8) * 8

    @property
    def image_lines(self) -> int:
        dy = max(16 * self.steps + (self.dy_rows - self.rows) * self.pitch, (self.dy_rows - 1) * self.pitch + self.across.target)
        return self.x_lines + ceil_div(dy, 8) * 8

    @property
    def group_bytes(self) -> int:
        """Such that lanes of a quarter of a warp, of which one has each group, store to different banks."""
        return self.images * self.image_lines * LINE + (128 // self.groups if self.groups > 1 else 0)

    @property
    def products(self) -> list[int]:
        """First lines of 16 positions."""
        return [image * self.image_lines + 16 * step for image in range(self.images) for step in range(self.steps)]

    @property
    def stage_bytes(self) -> int:
        return self.groups * self.group_bytes

    @property
    def producers(self) -> int:
        return PRODUCERS

    @property
    def batch(self) -> int:
        return BATCH

    @property
    def slots(self) -> tuple[Slot, ...]:
        found = []
        for image in range(self.images):
            for name, rows, extent, columns, line in (
                    ("x", self.rows, self.down.source, self.across.source, self.across.low),
                    ("dy", self.dy_rows, self.down.target, self.across.target, self.x_lines)):
                line += image * self.image_lines
                found += [Slot(image, name, first, rows, extent, columns, line) for first in range(0, rows, PRODUCERS)]
        return tuple(found)

    @property
    def batches(self) -> list[list[tuple[int, int, bool]]]:
        """Of lines that a thread loads before it stores them: (slot, step of so many pixels, is it the row's last)."""
        lines = []
        for i, slot in enumerate(self.slots):
            steps = ceil_div(slot.columns, self.pixels)
            lines += [(i, step, step == steps - 1) for step in range(steps)]
        return [lines[i : i + BATCH] for i in range(0, len(lines), BATCH)]

    @property
    def pixels(self) -> int:
        """That a warp copies at a time, all groups of each."""
        return 32 // self.groups

    @property
    def smem_bytes(self) -> int:
        return self.stages * self.stage_bytes + 16 * self.stages

    @property
    def columns(self) -> int:
        return 8 * self.down.taps

    @property
    def bits(self) -> tuple[str, str]:
        """Descriptors of x and dy but for their addresses: 8 lines between halves of k; between chunks of rows a tap."""
        x, dy = (f"0x{lines << 32 | 8 << 16:016X}" for lines in (self.across.dilation, self.down.dilation * self.pitch))
        return x, dy

    @property
    def sums(self) -> list[str]:
        return [f"%sum{i}" for i in range(self.columns // 2)]


def _consts(d: Depthwise, groups: int, rows: int, images: int, flip: bool) -> WgmmaDepthwiseConsts | None:
    c = WgmmaDepthwiseConsts(d.source.dtype.name, groups, d.rows, d.columns, rows, images, 0, flip)
    stages = min(MAX_STAGES, (SMEM_BYTES - 16 * MAX_STAGES) // c.stage_bytes)
    fields = max(c.across.dilation, c.down.dilation * c.pitch)
    if stages < 2 or len(c.products) > MAX_STEPS or len(c.batches) * BATCH > MAX_STEPS or fields >= 1 << 14:
        return None
    return WgmmaDepthwiseConsts(c.kind, groups, d.rows, d.columns, rows, images, stages, flip)


@lru_cache(maxsize=256)
def _lower(p: ConvProblem) -> Depthwise | str:
    d = lower_any(p)
    d = d if isinstance(d, str) else as_products(d)
    if isinstance(d, str):
        return d
    if d.source.rank != 4:
        return f"{d.source.rank - 2} dimensions (2 are supported)"
    if (d.rows.stride, d.columns.stride) != (1, 1):
        return f"stride {(d.rows.stride, d.columns.stride)} (1 is supported)"
    if d.columns.taps > TAPS or d.rows.taps > MAX_DOWN:
        return f"{d.rows.taps} x {d.columns.taps} taps (at most {MAX_DOWN} x {TAPS})"
    if any(s < 0 or s * x.dtype.num_bytes >= 2**31 for x in (d.source, d.target) for s in x.strides[1:]):
        return "a stride of rows or columns is negative or too large"
    return d


class WgmmaDepthwiseEngine(Engine):
    """The filter's gradient where groups have one channel and one filter each, of unit stride, 16-bit types and channels last."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.depthwise_wgmma_sm90"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        if device.arch != "sm_90a":
            return refuse(f"depthwise_wgmma_sm90 needs sm_90a, the device is {device.arch}")
        d = _lower(problem)
        if isinstance(d, str):
            return refuse(f"depthwise_wgmma_sm90: {d}")
        if problem.desc(problem.result).numel == 0 or problem.desc(problem.image).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if problem.epilogue is not None:
            return refuse("depthwise_wgmma_sm90 takes no epilogue")
        if not self._configs(problem, d):
            return refuse("depthwise_wgmma_sm90: rows do not fit shared memory")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        return tuple(sorted(self._configs(problem, d), key=lambda c: self.estimate(problem, c, device)))

    @staticmethod
    def _configs(problem: ConvProblem, d: Depthwise) -> list[EngineConfig]:
        """Groups of channels of a CTA, rows of a strip; several images at a time where these are small."""
        count, height = d.channels // 8, d.rows.source
        found = []
        for groups in (4, 2, 1):
            if groups > 1 and groups > count:
                continue
            for rows in sorted({ceil_div(height, parts) for parts in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32)}, reverse=True):
                for images in (1, 2, 4, 8):
                    if (images == 1 or (rows == height and images <= d.images)) and _consts(d, groups, rows, images, problem.flip):
                        found.append(EngineConfig.of(groups=groups, rows=rows, images=images))
            if len(found) >= 4:
                break
        return found

    @staticmethod
    def _parts(d: Depthwise, c: WgmmaDepthwiseConsts, device: DeviceInfo) -> tuple[int, int]:
        """CTAs that share the strips of a chunk of channels, and strips of each."""
        units, chunks = ceil_div(d.images, c.images) * ceil_div(d.rows.source, c.rows), ceil_div(d.channels // 8, c.groups)
        rounds = ceil_div(units, min(units, max(1, device.num_sms // chunks)))
        return ceil_div(units, rounds), rounds

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Strips at the time that their products or their copies take, over the traffic."""
        assert isinstance(problem, ConvProblem)
        d = _lower(problem)
        assert isinstance(d, Depthwise)
        groups = config["groups"]
        c = _consts(d, groups, config["rows"], config["images"], problem.flip)
        assert c is not None
        parts, rounds = self._parts(d, c, device)
        chunks = ceil_div(d.channels // 8, groups)
        if device.is_emulated:
            return 50.0 * parts * rounds * chunks * (len(c.products) + c.images * c.dy_rows)
        products = groups * len(c.products) * max(68, c.columns / 2)
        copies = (c.rows * ceil_div(d.columns.source, c.pixels) + c.dy_rows * ceil_div(d.columns.target, c.pixels)) * 16 * c.images
        copy_clocks = max(copies, 1500 * len(c.batches))
        compute_us = ceil_div(parts * chunks, device.num_sms) * (rounds * max(products + 150, copy_clocks) + 4000) / 1600
        bytes_us = problem.num_bytes / (device.bandwidth_gbs * 0.838e3 * (0.85 if groups < 8 and chunks > 1 else 1.0))
        return max(compute_us, bytes_us) + 0.1 * min(compute_us, bytes_us) + 11

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        p, d = problem, _lower(problem)
        assert isinstance(d, Depthwise)
        groups, rows = config["groups"], config["rows"]
        c = _consts(d, groups, rows, config["images"], p.flip)
        assert c is not None
        parts, _ = self._parts(d, c, device)
        strips, chunks = ceil_div(d.rows.source, rows), ceil_div(d.channels // 8, groups)
        taps, desc = d.rows.taps * d.columns.taps, d.filter
        scratch = Scratch()
        partial = scratch.take(parts * d.channels * taps * 4)
        t = Arguments(False)
        t.add("ptr_x", "u64", TensorArg(d.names[0]))
        t.add("ptr_dy", "u64", TensorArg(d.names[1]))
        t.add("ptr_partial", "u64", partial)
        for name, x in (("x", d.source), ("dy", d.target)):
            size = x.dtype.num_bytes
            t.add(f"{name}_image", "s64", x.strides[0] * size)
            t.add(f"{name}_row", "s32", x.strides[2] * size)
            t.add(f"{name}_column", "s32", x.strides[3] * size)
        t.add("num_images", "u32", d.images)
        t.add("num_units", "u32", ceil_div(d.images, c.images) * strips)
        t.add("parts", "u32", parts)
        t.add("strips", "u32", strips)
        t.divisor("strips", strips)
        t.add("chunks", "u32", chunks)
        t.divisor("chunks", chunks)
        t.add("channel_groups", "u32", d.channels // 8)
        target, threads = Target.for_arch(device.arch, (8, 0)), 128 * groups + 32 * PRODUCERS
        step = Step.of("conv/depthwise_wgmma_wgrad_sm90", self.op, target, threads, t.args, c, parts * chunks,
                       dynamic_smem=c.smem_bytes, suffix=f"{c.kind}_{d.rows.taps}x{d.columns.taps}_g{groups}_r{rows}_{c.images}")
        whole = TensorDesc(F32, (parts, *desc.shape), (d.channels * taps, taps, taps, *packed_strides(desc.shape[2:])))
        sums = reduction_steps(p.op, (whole, partial), (desc, TensorArg(d.names[2])), (0,), "sum", device, scratch)
        return Build((step, *sums), scratch.num_bytes)


_OPS = ("conv_wgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (WgmmaDepthwiseEngine(op),) for op in _OPS}
