"""Deformable convolution: samples written out as columns in the workspace, and a 1 x 1 convolution over those.

Everything lies channels last meanwhile: x and w are copied so where they do not, and a thread moves packs of neighbouring channels.

Gradients: the 1 x 1 convolution's gives those of the columns, from which those of offsets and masks are sums over channels. The gradient of
x gathers: every pixel has a list of the samples that weigh it, counted and placed with atomics on integers, then put in the order of the
samples, so that sums are the same bits on every run. Lists serve all channels of an offset group, so making them takes little of the whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd, prod
from typing import Any

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import S32
from ..ops.base import Problem
from ..ops.deform import DeformProblem
from ..tensor import TensorDesc
from . import matmul, scan_block
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .composition import COPIES, Place, cheapest, moved, piece, shifted
from .digits import DigitConsts, Digits, ceil_div, power_of_two
from .reduce_tree import reduction_steps

THREADS = 256
_LIMIT = 2**31
_FAR = 2**28  # offsets beyond it count as that
_MOST_TURNS = 8  # log2 of how many parts images are taken in for want of workspace
_MOST_BYTES = 1 << 30  # of columns at a time

Divisor = tuple[int, tuple[int, int]]  # and its magic numbers


@dataclass(frozen=True, slots=True)
class DeformConsts:
    """stage: see the template. vector: channels of a pack, of pack_bytes. across: taps of a row. by_taps: the number of taps. per_group,
    per_offset_group: packs of one. packs: of a position's columns. lanes: threads of a sample; of columns, of a unit of channels, each with
    `share` packs. offset, mask: types; mask "" if none."""

    stage: str
    dtype: str
    compute: str
    offset: str
    mask: str
    vector: int
    pack_bytes: int
    taps: int
    across: Divisor
    by_taps: Divisor
    per_group: Divisor
    per_offset_group: Divisor
    packs: int
    stride: tuple[int, ...]
    before: tuple[int, ...]
    dilation: tuple[int, ...]
    lanes: int = 1
    share: int = 1
    digits: DigitConsts | None = None


def _divisor(n: int) -> Divisor:
    return n, magic(max(n, 1))


class _Launches:
    """The launches of some images of a problem, and what its stages share. `scratch` goes on behind `begin` bytes."""

    def __init__(self, p: DeformProblem, device: DeviceInfo, first: int, images: int, begin: int = 0) -> None:
        self.p, self.device, self.scratch = p, device, Scratch()
        self.scratch.num_bytes = begin
        self.steps: list[Step] = []
        self.images = images
        self.located: dict[str, tuple[TensorDesc, Place]] = {}
        for o in p.operands:
            desc, offset = (o.desc, 0) if o.name in ("w", "bias", "dw", "dbias") else piece(o.desc, 0, first, images)
            self.located[o.name] = desc, TensorArg(o.name, offset)
        _, self.channels, self.height, self.width = p.desc("x").shape
        kind = p.desc("x").dtype
        self.size = kind.num_bytes
        self.per_group, self.per_offset_group = self.channels // p.groups, self.channels // p.offset_groups
        both = gcd(self.per_group, self.per_offset_group)
        self.vector = next(v for v in (8, 4, 2, 1) if v * self.size <= 16 and both % v == 0)
        self.columns = TensorDesc.packed(kind, (images, p.taps * self.channels, *p.positions), "nhwc")
        self.filter = TensorDesc.packed(kind, (p.desc("w").shape[0], p.taps * self.per_group, 1, 1))
        self.policy = replace(p.policy, workspace_limit=None)

    def run(self, op: str, operands: Mapping[str, tuple[TensorDesc, Place]], attrs: Mapping[str, Any], engines: Sequence[Engine]) -> None:
        """Launches of another problem over tensors where they lie."""
        descs = tuple((name, desc) for name, (desc, _) in operands.items())
        build, _ = cheapest(op, descs, tuple(attrs.items()), self.policy, self.device, tuple(engines))
        workspace = self.scratch.take(build.workspace_bytes)
        self.steps += moved(build, workspace, **{name: place for name, (_, place) in operands.items()})

    def channels_last(self, name: str) -> Place:
        """Where the input lies channels last, aligned."""
        desc, place = self.located[name]
        if desc.is_packed("nhwc") and desc.align == 16:
            return place
        copy = self.scratch.take(desc.num_bytes)
        self.run("transform", {"x": (desc, place), "y": (TensorDesc.packed(desc.dtype, desc.shape, "nhwc"), copy)}, {}, COPIES)
        return copy

    def result(self, name: str) -> tuple[Place, bool]:
        """Where the output may be written channels last, and whether it is to be copied from there."""
        desc, place = self.located[name]
        if desc.is_packed("nhwc") and desc.align == 16:
            return place, False
        return self.scratch.take(desc.num_bytes), True

    def copy_out(self, name: str, place: Place) -> None:
        desc, target = self.located[name]
        self.run("transform", {"x": (TensorDesc.packed(desc.dtype, desc.shape, "nhwc"), place), "y": (desc, target)}, {}, COPIES)

    def stage(self, stage: str, args: Sequence[Arg], names: str = "", extents: Sequence[int] = (), threads: int = 0,
              lanes: int = 1, share: int = 1) -> None:
        """A launch of the template: a thread each of the digits `names`, or so many."""
        p = self.p
        digits = Digits(tuple(names.split()), tuple(extents), {}) if names else None
        count = digits.size if digits is not None else threads
        if not count:
            return
        kind = p.desc("x").dtype
        consts = DeformConsts(
            stage, kind.name, p.accumulator.name, p.desc("offset").dtype.name, p.desc("mask").dtype.name if p.has("mask") else "",
            self.vector, self.vector * self.size, p.taps, _divisor(p.kernel[1]), _divisor(p.taps), _divisor(self.per_group // self.vector),
            _divisor(self.per_offset_group // self.vector), p.taps * self.channels // self.vector, p.stride,
            tuple(lo for lo, _ in p.padding), p.dilation, lanes, share, digits.consts() if digits is not None else None)
        args = [*args, Arg("num_threads", "u32", count), *(digits.args(False) if digits is not None else ())]
        self.steps.append(Step.of("conv/deformable", p.op, Target.for_arch(self.device.arch), THREADS, args, consts,
                                  ceil_div(count, THREADS), suffix=f"{stage}_{kind.name}_v{self.vector}"))

    def strides(self, role: str, name: str) -> list[Arg]:
        """Byte strides of an operand as the parameters of `role`."""
        desc = self.p.desc(name)
        return [Arg(f"{role}_{axis}", "s64", s * desc.dtype.num_bytes) for axis, s in zip("ncpq", desc.strides, strict=True)]

    @property
    def samples(self) -> list[Arg]:
        """What finds a sample and its weights."""
        args = [Arg("ptr_offset", "u64", self.located["offset"][1]), *self.strides("offset", "offset")]
        if self.p.has("mask"):
            args += [Arg("ptr_mask", "u64", self.located["mask"][1]), *self.strides("mask", "mask")]
        return [*args, Arg("height", "u32", self.height), Arg("width", "u32", self.width)]

    def image(self, place: Place) -> list[Arg]:
        return [Arg("ptr_x", "u64", place), Arg("pixel_bytes", "s64", self.channels * self.size)]

    def write_columns(self, x: Place, columns: Place) -> None:
        p = self.p
        unit = gcd(self.per_group, self.per_offset_group)
        share = next(n for n in (4, 2, 1) if unit // self.vector % n == 0)
        lanes = unit // self.vector // share
        extents = (self.images, *p.positions, p.groups, p.taps, self.per_group // max(unit, 1), lanes)
        self.stage("columns", [*self.samples, *self.image(x), Arg("ptr_columns", "u64", columns)], "n p q g t u c", extents, lanes=lanes,
                   share=share)

    def write_offsets(self, x: Place, columns: Place) -> None:
        p = self.p
        args = [*self.samples, *self.image(x), Arg("ptr_columns", "u64", columns),
                Arg("position_bytes", "s64", p.taps * self.channels * self.size),
                Arg("ptr_doffset", "u64", self.located["doffset"][1]), *self.strides("doffset", "doffset")]
        if p.has("mask"):
            args += [Arg("ptr_dmask", "u64", self.located["dmask"][1]), *self.strides("dmask", "dmask")]
        lanes = min(32, power_of_two(ceil_div(self.per_offset_group // self.vector, 4)))
        self.stage("offsets", args, "n o t p q lane", (self.images, p.offset_groups, p.taps, *p.positions, lanes), lanes=lanes)

    def gather(self, columns: Place, dx: Place) -> None:
        """dx, channels last, from the gradients of the columns."""
        p, kind = self.p, self.p.accumulator
        pixels = self.images * p.offset_groups * self.height * self.width
        most = 4 * self.images * p.offset_groups * p.taps * prod(p.positions)
        if not pixels or not self.channels:
            return
        counts, ends = (self.scratch.take(8 * ceil_div(pixels, 2)) for _ in range(2))
        entries, in_order = self.scratch.take(16 * most), self.scratch.take(2 * kind.num_bytes * most)
        clear = [Arg("num_words", "u32", ceil_div(pixels, 2)), Arg("ptr_words", "u64", counts)]
        self.steps.append(Step.of("scan/clear", p.op, Target.for_arch(self.device.arch), THREADS, clear, None,
                                  ceil_div(ceil_div(pixels, 2), THREADS)))
        extents = (self.images, p.offset_groups, *p.positions, p.taps)
        self.stage("count", [*self.samples, Arg("ptr_ends", "u64", counts)], "n o p q t", extents)
        number = TensorDesc.packed(S32, (pixels,))
        self.run("cumsum", {"x": (number, counts), "y": (number, ends)}, {"exclusive": True, "dtype": "s32"}, scan_block.ENGINES["cumsum"])
        lists = [Arg("ptr_ends", "u64", ends), Arg("ptr_entries", "u64", entries)]
        self.stage("place", [*self.samples, *lists], "n o p q t", extents)
        ordered = Arg("ptr_sorted", "u64", in_order)
        self.stage("order", [*lists, ordered, Arg("last_pixel", "u32", pixels - 1)], threads=most)
        args = [Arg("ptr_ends", "u64", ends), ordered, Arg("offset_groups", "u32", p.offset_groups), Arg("ptr_columns", "u64", columns),
                Arg("image_bytes", "s64", self.columns.strides[0] * self.size), Arg("ptr_dx", "u64", dx)]
        self.stage("gather", args, "n y x c", (self.images, self.height, self.width, self.channels // self.vector))


class DeformableEngine(Engine):
    """Both directions, some images at a time. Workspace: their columns, in x's type, and copies of what lies channels first; for gradients
    some 100 bytes a sample, and the filter's gradient of each turn in the type of sums."""

    id = "conv.deformable"

    @staticmethod
    def _most(p: DeformProblem) -> int:
        """Images whose columns, samples and pixels 31 bits count."""
        _, channels, height, width = p.desc("x").shape
        samples = p.offset_groups * p.taps * prod(p.positions)
        return (_LIMIT - 1) // max(channels * p.taps * prod(p.positions), 32 * samples, height * width * max(channels, p.offset_groups), 1)

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, DeformProblem)
        if self._most(p) < 1:
            return refuse("an image's columns are more than 2^31 elements, or of more than 2^26 samples")
        reach = [n + lo + hi + u for n, (lo, hi), u in zip(p.desc("x").shape[2:], p.padding, p.stride, strict=True)]
        if max(reach) >= _FAR:
            return refuse(f"a padded extent of {max(reach)} (less than {_FAR} is supported)")
        limit = p.policy.workspace_limit
        if limit is not None and not p.is_empty and not self.configs(p, device):
            fewest = max(1, p.desc("x").shape[0] // 2**_MOST_TURNS)
            needed = self.build_steps(p, EngineConfig.of(images=min(fewest, self._most(p))), device).workspace_bytes
            return refuse(f"{needed} bytes of workspace for {fewest} images at a time (the limit is {limit})")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Images at a time: whose columns take at most _MOST_BYTES, or half of the L2 cache; fewer where workspace is limited."""
        p = problem
        assert isinstance(p, DeformProblem)
        images, limit = p.desc("x").shape[0], p.policy.workspace_limit
        of_one = max(1, p.desc("x").shape[1] * p.taps * prod(p.positions) * p.desc("x").dtype.num_bytes)
        counts = [min(self._most(p), max(1, most // of_one)) for most in (_MOST_BYTES, device.l2_bytes // 2)]
        if limit is not None:
            counts += [images // 2**k for k in range(1, _MOST_TURNS + 1)]
        found = []
        for count in dict.fromkeys(max(1, min(images, c)) for c in counts):
            turns = ceil_div(max(images, 1), count)
            config = EngineConfig.of(images=ceil_div(max(images, 1), turns))
            if limit is None or p.is_empty or self.build_steps(p, config, device).workspace_bytes <= limit:
                found.append(config)
        return tuple(dict.fromkeys(found))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, DeformProblem)
        images = p.desc("x").shape[0]
        columns = images * p.desc("x").shape[1] * p.taps * prod(p.positions) * p.desc("x").dtype.num_bytes
        peak = (device.tensor_tflops if p.desc("x").dtype.num_bytes == 2 and device.at_least(8) else device.fma_tflops) * 0.6e6
        turns = ceil_div(max(images, 1), config["images"])
        return 12.0 * turns + p.flops / peak + columns * (12 if p.is_backward else 3) / (device.bandwidth_gbs * 1e3)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, DeformProblem)
        if p.is_empty:
            return Build(())
        images, each = p.desc("x").shape[0], config["images"]
        turns = [(first, min(each, images - first)) for first in range(0, images, each)] or [(0, 0)]
        shared = _Launches(p, device, 0, 0)
        w, filter = shared.channels_last("w"), shared.filter
        parts = shared.scratch.take(len(turns) * filter.numel * p.accumulator.num_bytes if p.is_backward and len(turns) > 1 else 0)
        begin = total = shared.scratch.num_bytes
        steps = shared.steps
        for i, (first, count) in enumerate(turns):
            on = _Launches(p, device, first, count, begin)
            if p.is_backward:
                part = shifted(parts, i * filter.numel * p.accumulator.num_bytes) if len(turns) > 1 else None
                self._gradients(on, w, part)
            else:
                self._forward(on, w)
            steps += on.steps
            total = max(total, on.scratch.num_bytes)
        end = Scratch()
        end.num_bytes = begin
        if p.is_backward and len(turns) > 1 and filter.numel:
            k, c, r, s = p.desc("dw").shape
            a, b, *taps = p.desc("dw").strides
            source = TensorDesc.packed(p.accumulator, (len(turns), k, r, s, c))
            target = TensorDesc(p.desc("dw").dtype, (k, r, s, c), (a, *taps, b), p.desc("dw").align)
            steps += reduction_steps(p.op, (source, parts), (target, TensorArg("dw")), (0,), "sum", device, end)
        if p.has("dbias"):
            dy = (p.desc("dy"), TensorArg("dy"))
            steps += reduction_steps(p.op, dy, (p.desc("dbias"), TensorArg("dbias")), (0, 2, 3), "sum", device, end)
        return Build(tuple(steps), max(total, end.num_bytes))

    @staticmethod
    def _forward(on: _Launches, w: Place) -> None:
        x, columns = on.channels_last("x"), on.scratch.take(on.columns.num_bytes)
        on.write_columns(x, columns)
        operands = {"x": (on.columns, columns), "w": (on.filter, w)} | {n: on.located[n] for n in ("y", "bias") if n in on.located}
        on.run("conv_fprop", operands, {"groups": on.p.groups}, matmul.ENGINES["conv_fprop"])

    @staticmethod
    def _gradients(on: _Launches, w: Place, part: Place | None) -> None:
        """part: where these images' gradient of the filter goes, in the type of sums; None: it is the whole."""
        p, attrs = on.p, {"groups": on.p.groups}
        x, columns, dy = on.channels_last("x"), on.scratch.take(on.columns.num_bytes), on.located["dy"]
        if on.columns.numel:
            on.run("conv_dgrad", {"dy": dy, "w": (on.filter, w), "dx": (on.columns, columns)}, attrs, matmul.ENGINES["conv_dgrad"])
        on.write_offsets(x, columns)
        dx, is_elsewhere = on.result("dx")
        on.gather(columns, dx)
        if is_elsewhere:
            on.copy_out("dx", dx)
        on.write_columns(x, columns)
        if not on.filter.numel:
            return
        dw, is_elsewhere = on.result("dw") if part is None else (part, False)
        filter = on.filter if part is None else replace(on.filter, dtype=p.accumulator)
        on.run("conv_wgrad", {"x": (on.columns, columns), "dy": dy, "dw": (filter, dw)}, attrs, matmul.ENGINES["conv_wgrad"])
        if is_elsewhere:
            on.copy_out("dw", dw)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (DeformableEngine(),) for op in ("deform_conv", "deform_conv_backward")}
