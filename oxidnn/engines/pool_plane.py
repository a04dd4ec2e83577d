"""Gradients of maxima, and unpooling, of whole images in shared memory: memory sees every operand once, in its order. No atomics on
numbers: outputs whose windows may meet add in turns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.pool import Axis, PoolProblem, UnpoolProblem
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse

_LIMIT = 2**31
_MOST_CLASSES = 16
_MOST_TAPS = 32
_GROUP_BYTES = 48 << 10  # of shared memory, of several small images of a CTA
_PLACED = 0.25  # fractional windows are placed in f32: an eighth of an element, twice


@dataclass(frozen=True, slots=True)
class PlaneConsts:
    """mode: see ptx_templates/pool/plane. group: channels of a CTA. classes: along each axis, outputs so far apart share no element.
    vector: elements of a pack of the image. unroll: outputs a thread has under way; fetch: elements of x. The windows are those of
    "search"."""

    mode: str
    dtype: str
    num_bytes: int
    compute: str
    group: int
    channels_last: bool
    classes: tuple[int, ...]
    vector: int
    unroll: int
    fetch: int
    index_dtype: str
    window: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    low: tuple[int, ...] = ()

    @property
    def class_list(self) -> range:
        return range(prod(self.classes))

    def class_stride(self, axis: int) -> int:
        return prod(self.classes[axis + 1:])

    @property
    def results(self) -> list[str]:
        return [f"%result{i}" for i in range(self.vector)]


def apart(axis: Axis) -> int:
    """The least k such that outputs k or more from each other share no element."""
    if not axis.fractional:
        return min(axis.max_sharing, axis.outputs)
    # Windows o and o + k begin at least k * step less a rounding apart, step = (extent - window) / (outputs - 1).
    k = 1
    while k < axis.outputs and k * (axis.extent - axis.window) < (axis.window + _PLACED) * (axis.outputs - 1):
        k += 1
    return k


class _PlaneEngine(Engine):
    """What gradients and unpooling share: which images a CTA has, and their launch."""

    def _parts(self, problem: Any) -> tuple[str, str, str]:
        """The mode, and the operands of the image and of the outputs."""
        raise NotImplementedError

    def _axes(self, problem: Any) -> Sequence[Axis]:
        return ()

    def _image_bytes(self, problem: Any) -> int:
        """Shared memory of one channel of one image."""
        mode, far, _ = self._parts(problem)
        desc = problem.desc(far)
        acc = 8 if mode != "unpool" and desc.dtype.name == "f64" else 4
        return prod(desc.shape[2:]) * (acc + (desc.dtype.num_bytes if mode == "search" else 0))

    @staticmethod
    def _layout(problem: Problem) -> str:
        """"nchw" or "nhwc", that every operand lies in densely; "" if they do not."""
        return next((layout for layout in ("nchw", "nhwc") if all(o.desc.is_packed(layout) for o in problem.operands)), "")

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        _, far, near = self._parts(problem)
        layout, shape = self._layout(problem), problem.desc(far).shape
        if not layout:
            return refuse("the operands do not all lie densely in NCHW or in NHWC")
        if layout == "nhwc" and self._group(problem, device, 8) == 0:
            return refuse(f"{shape[1]} channels that lie innermost do not fall into groups of 8 that shared memory holds")
        if self._image_bytes(problem) + 256 > device.smem_per_cta - 1024:
            return refuse(f"an image takes {self._image_bytes(problem)} bytes of shared memory (of {device.smem_per_cta})")
        if max(prod(shape), prod(problem.desc(near).shape)) >= _LIMIT * 16 or prod(shape[:2]) >= _LIMIT:
            return refuse("a tensor of too many elements")
        return SUPPORTED

    def _group(self, problem: Problem, device: DeviceInfo, least: int = 1) -> int:
        """Channels of a CTA: channels last at least so many (0: there are none), else as many small images as leave every SM some CTAs."""
        _, far, _ = self._parts(problem)
        shape, each = problem.desc(far).shape, self._image_bytes(problem)
        if self._layout(problem) == "nhwc":
            most = device.smem_per_cta - 2048
            return max((g for g in (8, 16, 32) if g >= least and shape[1] % g == 0 and g * each <= most), default=0)
        planes = shape[0] * shape[1]
        return max(1, min(_GROUP_BYTES // max(each, 1), planes // (4 * device.num_sms), 64))

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        best = self._group(problem, device)
        groups = [best] + [g for g in (16, 8) if self._layout(problem) == "nhwc" and g < best]
        elements = best * prod(problem.desc(self._parts(problem)[1]).shape[2:])
        widths = (512, 256) if elements >= 4096 else (256, 128)
        if self._parts(problem)[0] == "scatter" and best == 1:  # fewer wait at the barriers between turns
            widths = widths[::-1]
        found = [EngineConfig.of(group=g, threads=t) for g in groups for t in widths]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        planes = prod(problem.desc(self._parts(problem)[1]).shape[:2])
        each = self._image_bytes(problem) * config["group"]
        at_once = device.num_sms * max(1, min(device.smem_per_sm // (each + 1024), 2048 // config["threads"]))
        ctas = max(1, planes // config["group"])
        fill = ctas / (-(-ctas // at_once) * at_once)  # a device with idle SMs, and SMs with one CTA that waits at its barriers
        speed = 0.8 if at_once > device.num_sms else 0.55
        classes = prod(apart(a) for a in self._axes(problem))
        speed /= 1 + 0.02 * (classes - 1)
        if self._parts(problem)[0] == "search":
            speed /= 1.3 + 0.07 * prod(a.window for a in self._axes(problem))
        return 4.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * speed * max(fill, 0.05))

    def _step(self, problem: Any, config: EngineConfig, device: DeviceInfo) -> Step:
        mode, far, near = self._parts(problem)
        shape, outputs, kind = problem.desc(far).shape, problem.desc(near).shape[2:], problem.desc(far).dtype
        channels_last = self._layout(problem) == "nhwc"
        group, threads, axes = config["group"], config["threads"], self._axes(problem)
        num_near, num_far = prod(outputs), prod(shape[2:])
        index = problem.desc("indices").dtype.name if problem.has("indices") else ""
        vector = min(16 // kind.num_bytes, group) if channels_last else 16 // kind.num_bytes
        if problem.desc(far).align < 16:
            vector = 1
        args = [Arg(f"ptr_{n}", "u64", TensorArg(n)) for n in (o.name for o in problem.operands)]
        args += [Arg("num_near", "u32", num_near), Arg("num_far", "u32", num_far)]
        if channels_last:
            groups = shape[1] // group
            ctas, (multiplier, shift) = shape[0] * groups, magic(groups)
            args += [Arg("channels", "u32", shape[1]), Arg("groups", "u32", groups), Arg("multiplier_groups", "u32", multiplier),
                     Arg("shift_groups", "u32", shift)]
        else:
            ctas, (multiplier, shift) = -(-shape[0] * shape[1] // group), magic(num_near)
            args += [Arg("planes", "u32", shape[0] * shape[1]), Arg("multiplier_near", "u32", multiplier), Arg("shift_near", "u32", shift)]
        for a, extent in enumerate(outputs):
            multiplier, shift = magic(extent)
            args += [Arg(f"outputs{a}", "u32", extent), Arg(f"multiplier_outputs{a}", "u32", multiplier),
                     Arg(f"shift_outputs{a}", "u32", shift)]
        classes = tuple(apart(a) for a in axes) or (1,) * len(outputs)
        windows: dict[str, Any] = {}
        if mode == "search":
            args += [Arg(f"extent{a}", "u32", axis.extent) for a, axis in enumerate(axes)]
            windows = {n: tuple(getattr(a, n) for a in axes) for n in ("window", "stride", "dilation", "low")}
        compute = "f64" if kind.name == "f64" else "f32"
        unroll = 2 if mode == "search" else 4
        consts = PlaneConsts(mode, kind.name, kind.num_bytes, compute, group, channels_last, classes, vector, unroll, 8, index,
                             **windows)
        acc = 8 if mode != "unpool" and compute == "f64" else 4
        smem = (num_far * group * acc + 2 * vector * acc + 15) // 16 * 16
        if mode == "search":
            smem += num_far * group * kind.num_bytes
        resident = max(1, min(4, device.smem_per_sm // (smem + 1024), 1536 // threads))
        return Step.of("pool/plane", problem.op, Target.for_arch(device.arch), threads, args, consts, ctas, dynamic_smem=smem,
                       min_ctas_per_sm=resident, suffix=f"{mode}_{kind.name}_g{group}")


class PlaneGradient(_PlaneEngine):
    """Gradients of maxima: by indices, or of windows whose maxima it finds again."""

    id = "pool.plane"

    def _parts(self, problem: PoolProblem) -> tuple[str, str, str]:
        return "scatter" if problem.has("indices") else "search", "dx", "dy"

    def _axes(self, problem: PoolProblem) -> Sequence[Axis]:
        return problem.axes

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, PoolProblem)
        if problem.mode != "max":
            return refuse(f"no gradient of {problem.mode}")
        classes = prod(apart(a) for a in problem.axes)
        if classes > _MOST_CLASSES:
            return refuse(f"outputs add in {classes} turns (at most {_MOST_CLASSES})")
        if not problem.has("indices"):
            if any(a.adaptive or a.fractional for a in problem.axes):
                return refuse("adaptive windows without indices")
            if prod(a.window for a in problem.axes) > _MOST_TAPS:
                return refuse(f"windows of {prod(a.window for a in problem.axes)} elements (at most {_MOST_TAPS}) without indices")
        return super().check_support(problem, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, PoolProblem)
        return Build(()) if problem.is_empty else Build((self._step(problem, config, device),))


class PlaneUnpool(_PlaneEngine):
    """Unpooling: the image holds the number of the element that each place gets, the largest that asks for it."""

    id = "pool.unpool_plane"

    def _parts(self, problem: UnpoolProblem) -> tuple[str, str, str]:
        return "unpool", "y", "x"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, UnpoolProblem)
        if problem.has("dx"):
            return refuse("a gradient only gathers")
        if prod(problem.near.shape) == 0:
            return refuse("no element to place")
        return super().check_support(problem, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, UnpoolProblem)
        return Build(()) if problem.is_empty else Build((self._step(problem, config, device),))


PLANE_GRADIENT, PLANE_UNPOOL = PlaneGradient(), PlaneUnpool()
