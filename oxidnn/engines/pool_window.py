"""Pooling engines: a thread an output of the windows, or some along a row (forward), a thread an element that gathers from the windows over
it (backward), and a warp or a CTA an output where the one window is the whole image."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F64, S32, U8, DType, dtype
from ..ops import OPS
from ..ops.base import Policy, Problem
from ..ops.pool import Axis, PoolProblem, UnpoolProblem
from ..tensor import TensorDesc, packed_strides
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .digits import DigitConsts, Digits
from .layout_copy import LayoutCopy
from .pool_plane import PLANE_GRADIENT, PLANE_UNPOOL
from .reduce_tree import reduction_configs, reduction_steps
from .rows import RowConsts, RowEngine, Rows

_LIMIT = 2**31
_SMALL_IMAGE = 64  # positions of an image of which 16 threads have a few each
_PLACED_IN_F32 = 2**19  # elements: a window's place, rounded, is less than 1/8 off
# The assembler hoists all loads of unrolled taps, so registers bound how many elements those may load (forward, backward).
_UNROLL = {False: 80, True: 32}
_SEARCHED = 24  # words of a window that is searched in registers
_ROUND = {False: 16, True: 8}  # the same for the taps one round of a loop takes


@dataclass(frozen=True, slots=True)
class AxisConsts:
    """One axis as the template sees it: see ops.pool.Axis. sharing: the most outputs whose windows span one element."""

    window: int
    stride: int
    dilation: int
    low: int
    high: int
    adaptive: bool
    sharing: int
    fractional: bool = False


@dataclass(frozen=True, slots=True)
class PoolConsts:
    """is_unrolled: all taps are; else the last axis takes `round` taps a loop. index_dtype: "" without indices.

    gathered: (operand, register suffix) of what the backward reads per output. counts_taps: indices are numbers of taps within the window.
    walked: operands whose spatial strides are parameters, of the cells. first_walked: the first axis along which a thread has a whole cell.
    overlaps: windows reach beyond their cell. along: outputs of a thread along the last axis. inside: of each axis, whether its windows
    are.
    """

    dtype: str
    compute: str
    mode: str
    axes: tuple[AxisConsts, ...]
    digits: DigitConsts
    vector: int
    is_unrolled: bool
    round: int
    index_dtype: str = ""
    write_y: bool = True
    count_include_pad: bool = True
    divisor: int | None = None
    norm: float = 2.0
    gathered: tuple[tuple[str, str], ...] = ()
    counts_taps: bool = False
    walked: tuple[str, ...] = ()
    first_walked: int = 0
    overlaps: bool = False
    samples: str = ""  # the type of fractional pooling's samples
    along: int = 1
    inside: tuple[bool, ...] = ()

    @property
    def lanes(self) -> int:
        """Outputs of a thread: of one pack of channels, or along the row."""
        return self.vector * self.along

    @property
    def itemsize(self) -> int:
        return dtype(self.dtype).num_bytes

    def guard(self, axis: int) -> str:
        """The predicate that holds where the taps along axes 0 .. axis lie inside; "" if they always do."""
        outside = [a for a in range(axis + 1) if not self.inside[a]]
        return f"%p_inside{outside[-1]}" if outside else ""

    @property
    def row(self) -> tuple[int, int]:
        """The elements of a row that a thread reads, from where its first output's cell begins on: from, to."""
        return _row(self.axes[-1], self.along)

    def sample_of(self, axis: int) -> int:
        """Where the sample of an axis stands: in two dimensions that of the last one comes first, as PyTorch's."""
        return 1 - axis if len(self.axes) == 2 else axis

    @property
    def cell(self) -> tuple[tuple[int, ...], ...]:
        """The positions of a cell."""
        return tuple(product(*(range(a.stride) for a in self.axes)))

    @property
    def shares(self) -> tuple[tuple[int, ...], ...]:
        """The outputs whose windows reach into a cell: how many cells before its own, the first output first."""
        return tuple(product(*(range(a.sharing - 1, -1, -1) for a in self.axes)))

    def sums(self, place: int) -> list[str]:
        """Registers of the position of this number in the cell."""
        return [f"%sum{place * self.vector + i}" for i in range(self.vector)]

    def tap(self, share: tuple[int, ...], position: tuple[int, ...]) -> int:
        """Which tap of the output's window the position is, flat over the window; -1 if none."""
        tap = 0
        for axis, cells, place in zip(self.axes, share, position, strict=True):
            along = cells * axis.stride + place
            if along >= axis.window:
                return -1
            tap = tap * axis.window + along
        return tap


@dataclass(frozen=True, slots=True)
class GlobalPoolConsts:
    """mode: "max" or "avg"."""

    rows: RowConsts
    mode: str


def compute_type(dtype: DType) -> str:
    """The type of the arithmetic: f32 for halves, s32 for integers."""
    return "f64" if dtype.name == "f64" else "f32" if dtype.is_float else "s32"


def _row(axis: Axis | AxisConsts, along: int) -> tuple[int, int]:
    """The elements that `along` outputs' cells and windows have, from the first cell on: from, to."""
    return -axis.low, max(along * axis.stride, (along - 1) * axis.stride - axis.low + axis.window)


def _reaches(axis: Axis, high: int) -> bool:
    """Whether a window ends behind the input and `high` elements of padding."""
    return (axis.outputs - 1) * axis.stride - axis.low + (axis.window - 1) * axis.dilation + 1 > axis.extent + high


def _is_inside(axis: Axis) -> bool:
    return not (axis.adaptive or axis.fractional or axis.low or _reaches(axis, 0))


def _divisor(problem: PoolProblem) -> int | None:
    """What an average divides by, where that is the same of all windows."""
    if problem.divisor is not None or problem.mode != "avg":
        return problem.divisor
    same = all(_is_inside(a) or (problem.count_include_pad and not a.adaptive and not _reaches(a, a.high)) for a in problem.axes)
    return prod(a.window for a in problem.axes) if same else None


def along_of(config: EngineConfig) -> int:
    return int(dict(config.knobs).get("along", 1))


def byte_strides(desc: TensorDesc) -> tuple[int, ...]:
    return tuple(s * desc.dtype.num_bytes for s in desc.strides)


def _axis_consts(axes: tuple[Axis, ...], backward: bool) -> tuple[AxisConsts, ...]:
    return tuple(AxisConsts(a.window, a.stride, a.dilation, a.low, a.high, a.adaptive, a.max_sharing if backward else 0, a.fractional)
                 for a in axes)


def vector_limit(descs: list[TensorDesc]) -> int:
    """The longest pack of channels with which every operand can be moved: 16 bytes of the first (an index pack is split into pieces)."""
    first = descs[0]
    vector = 16 // first.dtype.num_bytes
    while vector > 1:
        if all(d.strides[1] == 1 and d.shape[1] % vector == 0 and _is_aligned(d, vector) for d in descs):
            return vector
        vector //= 2
    return 1


def _is_aligned(desc: TensorDesc, vector: int) -> bool:
    size = desc.dtype.num_bytes
    piece = min(16, vector * size)
    return desc.align >= piece and all(s * size % piece == 0 for i, s in enumerate(desc.strides) if i != 1 and desc.shape[i] > 1)


class _PoolEngine(Engine):
    """What both directions share: how the index of a thread falls into digits, slices of N below 2^31 threads, vector widths."""

    threads = 128

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, PoolProblem)
        sizes = [prod(o.desc.shape[1:]) for o in problem.operands]
        if max(sizes, default=0) >= _LIMIT:
            return refuse(f"one image has {max(sizes)} elements (at most {_LIMIT - 1})")
        for axis in problem.axes:
            if (axis.extent + axis.low + axis.high + 1) * (axis.outputs + 1 if axis.adaptive or axis.fractional else 1) >= _LIMIT:
                return refuse(f"an axis of {axis.extent} elements and {axis.outputs} outputs needs 64-bit positions")
            if axis.fractional and axis.extent > _PLACED_IN_F32:
                return refuse(f"an axis of {axis.extent} elements: fractional windows are placed in f32 (at most {_PLACED_IN_F32})")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, PoolProblem)
        # Fractional windows lie elsewhere in every channel.
        vector = 1 if problem.has("samples") else vector_limit([o.desc for o in problem.operands])
        widths = [vector] + ([vector // 2, 1] if vector > 2 else [1] if vector == 2 else [])
        return tuple(EngineConfig.of(vec=v, threads=t) for v in widths for t in (128, 256))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, PoolProblem)
        efficiency = 0.8 if config["vec"] > 1 or problem.operands[0].desc.strides[1] != 1 else 0.5
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * efficiency) + problem.flops / (device.fma_tflops * 1e5)

    def _steps(self, template: str, problem: PoolProblem, config: EngineConfig, device: DeviceInfo, main: str, coordinate: str,
               operands: dict[str, tuple[TensorDesc, Any]], fields: dict[str, Any]) -> list[Step]:
        """Launches over the elements of operand `main`, whose spatial digits are called `coordinate`0.. .

        operands: name -> (description, argument value). Those that share main's extents move with its spatial digits; the others get
        their spatial strides as parameters stride_<name><axis>. fields: "cells" are the spatial extents instead, in steps of several
        elements; then all get those parameters.
        """
        vector, along = config["vec"], along_of(config)
        shape = (*operands[main][0].shape[:2], *fields.get("cells", operands[main][0].shape[2:]))
        outer, rank = 2, len(problem.axes)
        names = ("n", "c", *(f"{coordinate}{a}" for a in range(rank)))
        direct = {n for n, (d, _) in operands.items() if d.shape == shape and n not in fields["walked"] and "cells" not in fields}
        direct |= {"samples"} & set(operands)  # which have no spatial strides
        per_image = shape[1] // vector * prod(shape[2:]) // along
        images = max(1, min(shape[0], (_LIMIT - 1) // max(per_image, 1)))
        wide = any(abs(s) >= _LIMIT for d, _ in operands.values() for s in (*byte_strides(d), byte_strides(d)[1] * vector))
        steps = []
        for begin in range(0, shape[0], images):
            extents = (min(images, shape[0] - begin), shape[1] // vector, *shape[2:-1], shape[-1] // along)
            strides = {}
            for name, (desc, _) in operands.items():
                row = byte_strides(desc)
                spatial = row[2:] if name in direct - {"samples"} or ("cells" in fields and name == main) else (0,) * rank
                strides[name] = (row[0], row[1] * vector, *spatial[:-1], spatial[-1] * along)
            digits = Digits(names, extents, strides).ordered_for(main)
            args = [Arg(f"ptr_{n}", "u64", shifted(v, begin * byte_strides(d)[0])) for n, (d, v) in operands.items()]
            args.append(Arg("num_threads", "u32", digits.size))
            args += digits.args(wide)
            for a, axis in enumerate(problem.axes):
                args += [Arg(f"extent_x{a}", "u32", axis.extent), Arg(f"outputs{a}", "u32", axis.outputs)]
                args += [Arg(f"stride_{n}{a}", "s64" if wide else "s32", byte_strides(d)[outer + a])
                         for n, (d, _) in operands.items() if n not in direct]
            if "samples" in operands:
                args.append(Arg("stride_samples", "s64" if wide else "s32", byte_strides(operands["samples"][0])[2]))
            axes = _axis_consts(problem.axes, fields["backward"])
            backward = fields["backward"]
            sizes = [a.sharing if backward else a.window for a in axes]
            most = 16 if backward and problem.mode == "lp" else 32
            is_unrolled = prod(sizes) <= most and prod(sizes) * vector <= _UNROLL[backward]
            kind = problem.operands[0].desc.dtype
            consts = PoolConsts(
                kind.name, compute_type(kind), problem.mode, axes, digits.consts(wide), vector, is_unrolled,
                min(sizes[-1], max(1, _ROUND[backward] // vector), 8), fields["index_dtype"],
                fields.get("write_y", True), problem.count_include_pad, _divisor(problem), problem.norm, fields.get("gathered", ()),
                fields.get("counts_taps", False), fields["walked"] if "cells" in fields else (), fields.get("first_walked", 0),
                fields.get("overlaps", False),
                operands["samples"][0].dtype.name if "samples" in operands else "", along, tuple(map(_is_inside, problem.axes)))
            threads = config["threads"]
            steps.append(Step.of(template, problem.op, Target.for_arch(device.arch), threads, args, consts,
                                 -(-digits.size // threads), min_ctas_per_sm=512 // threads,
                                 suffix=f"{consts.dtype}_v{vector}" + f"_a{along}" * (along > 1)))
        return steps

    def _find_again(self, problem: PoolProblem, config: EngineConfig, device: DeviceInfo,
                    scratch: Scratch) -> tuple[tuple[TensorDesc, WorkspaceArg], list[Step]]:
        """The maxima's indices in the workspace, and the launches that put them there."""
        desc = _found_again(problem)
        indices = (desc, scratch.take(desc.num_bytes))
        operands: dict[str, tuple[TensorDesc, Any]] = {"x": (problem.desc("x"), TensorArg("x")), "indices": indices}
        vector = vector_limit([d for d, _ in operands.values()])
        if config["vec"] == 1:
            vector = 1
        return indices, self._steps("pool/window", problem, EngineConfig.of(vec=vector, threads=config["threads"]), device, "indices", "o",
                                    operands, {"walked": ("x",), "backward": False, "index_dtype": desc.dtype.name, "write_y": False,
                                               "counts_taps": _counts_taps(problem)})


def shifted(value: TensorArg | WorkspaceArg, num_bytes: int) -> TensorArg | WorkspaceArg:
    if isinstance(value, TensorArg):
        return TensorArg(value.name, value.byte_offset + num_bytes)
    return WorkspaceArg(value.byte_offset + num_bytes)


class WindowEngine(_PoolEngine):
    """Forward: all pooling kinds, any layout; packs of channels where they lie together, some outputs of a row where that does."""

    id = "pool.window"

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, PoolProblem)
        rows = [EngineConfig.of(vec=1, threads=t, along=n) for n in (4, 2, 8) if self._lies_along(problem, n) for t in (128, 256)]
        return tuple(sorted((*rows, *super().configs(problem, device)), key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, PoolProblem)
        along, x = along_of(config), problem.desc("x")
        if along == 1:
            return super().estimate(problem, config, device)
        # Loads of 16 bytes are best, by 1 to 3 % over two of them, by 10 to 20 % over 8 bytes (H200).
        num_bytes = along * problem.axes[-1].stride * x.dtype.num_bytes
        return super().estimate(problem, config, device) * (0.8 + 0.1 * max(0.0, 2 - num_bytes / 8) + 0.01 * max(0, num_bytes // 16 - 1))

    @staticmethod
    def _lies_along(problem: PoolProblem, along: int) -> bool:
        """Whether a thread can have `along` outputs of a row, whose cells are loaded in whole packs."""
        x, y, last = problem.desc("x"), problem.desc("y"), problem.axes[-1]
        size, rows, (begin, end) = x.dtype.num_bytes, prod(a.window for a in problem.axes[:-1]), _row(last, along)
        if any(a.adaptive or a.fractional for a in problem.axes) or last.dilation > 1 or last.low > last.stride:
            return False
        if last.outputs % along or last.outputs * last.stride > last.extent or along * y.dtype.num_bytes > 16:
            return False
        words = (end - begin) * (2 if size == 8 else 1)
        cell = along * last.stride * size
        if words > 24 or rows * words > _UNROLL[False] or rows * last.window > 32 or not (cell % 16 == 0 or cell in (4, 8)):
            return False
        packs = {"x": cell} | {o.name: along * o.desc.dtype.num_bytes for o in problem.outputs}
        return all(d.strides[-1] == 1 and d.align >= min(16, packs[n]) and all(
            s * d.dtype.num_bytes % min(16, packs[n]) == 0 for s, extent in zip(d.strides[:-1], d.shape, strict=False) if extent > 1)
            for n, d in ((o.name, o.desc) for o in problem.operands))

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, PoolProblem)
        if problem.is_empty:
            return Build(())
        operands: dict[str, tuple[TensorDesc, Any]] = {o.name: (o.desc, TensorArg(o.name)) for o in problem.operands}
        index = problem.desc("indices").dtype.name if problem.has("indices") else ""
        return Build(tuple(self._steps("pool/window", problem, config, device, "y", "o", operands,
                                       {"walked": ("x",), "backward": False, "index_dtype": index})))


def _found_again(problem: PoolProblem) -> TensorDesc:
    """Indices in the workspace: densely, in dy's order of dimensions; a byte each where they can count the taps of the window."""
    dy = problem.desc("dy")
    order = tuple(sorted(range(dy.rank), key=lambda i: abs(dy.strides[i]), reverse=True))
    return TensorDesc(U8 if _counts_taps(problem) else S32, dy.shape, packed_strides(dy.shape, order))


def _counts_taps(problem: PoolProblem) -> bool:
    return prod(a.window for a in problem.axes) <= 256 and not any(a.adaptive or a.dilation > 1 for a in problem.axes)


class GatherEngine(_PoolEngine):
    """Backward without atomics. The maximum without indices first finds them again, into the workspace."""

    id = "pool.gather"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, PoolProblem)
        if problem.is_empty:
            return Build(())
        operands: dict[str, tuple[TensorDesc, Any]] = {n: (problem.desc(n), TensorArg(n)) for n in ("dy", "dx")}
        steps: list[Step] = []
        scratch = Scratch()
        index, counts_taps = "", False
        gathered: tuple[tuple[str, str], ...] = (("dy", ""),)
        if problem.mode == "max":
            gathered += (("indices", "_indices"),)
            if problem.has("indices"):
                operands["indices"] = (problem.desc("indices"), TensorArg("indices"))
            else:
                counts_taps = _counts_taps(problem)
                operands["indices"], steps = self._find_again(problem, config, device, scratch)
            index = operands["indices"][0].dtype.name
        if problem.mode == "lp":
            operands |= {n: (problem.desc(n), TensorArg(n)) for n in ("x", "y")}
            gathered += (("y", "_y"),)
        steps += self._steps("pool/gather", problem, config, device, "dx", "i", operands,
                             {"walked": tuple(n for n, _ in gathered), "backward": True, "index_dtype": index, "gathered": gathered,
                              "counts_taps": counts_taps})
        return Build(tuple(steps), scratch.num_bytes)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, PoolProblem)
        described = [o.desc for o in problem.operands if o.name != "x" or problem.mode == "lp"]
        if problem.mode == "max" and not problem.has("indices"):
            described.append(_found_again(problem))
        vector = vector_limit(described)
        return tuple(EngineConfig.of(vec=v, threads=t) for v in dict.fromkeys((vector, 1)) for t in (128, 256))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """An element asks every window that may hold it whether it was the maximum: instructions, as measured on an H200."""
        assert isinstance(problem, PoolProblem)
        least = super().estimate(problem, config, device)
        if problem.mode != "max":
            return least
        vector, asked = config["vec"], prod(a.max_sharing for a in problem.axes)
        instructions = problem.desc("dx").numel / vector * (100 + asked * (30 + 6 * vector))
        return least + instructions / (device.fma_tflops * 5e5)


@dataclass(frozen=True, slots=True)
class UnpoolConsts:
    """phase: see ptx_templates/pool/unpool. rank: spatial dimensions. num_bytes: of an element."""

    phase: str
    digits: DigitConsts
    num_bytes: int
    rank: int
    index_dtype: str


def _fill(y: TensorDesc, value: int, device: DeviceInfo) -> list[Step]:
    """Launches that write the value everywhere in the operand y."""
    problem = OPS["fill"].make({"y": y}, {"value": value}, Policy())
    engine = LayoutCopy()
    return list(engine.build_steps(problem, engine.configs(problem, device)[0], device).steps)


class UnpoolEngine(Engine):
    """A thread an element. Elements of one place agree on the last of them by an atomic maximum of their numbers: no order counts."""

    id = "pool.unpool"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, UnpoolProblem)
        most = max(problem.near.numel, problem.far.numel)
        return refuse(f"a tensor of {most} elements (at most {_LIMIT - 1})") if most >= _LIMIT else SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 7.0 + 4 * problem.num_bytes / (device.bandwidth_gbs * 1e3)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, UnpoolProblem)
        if problem.is_empty:
            return Build(())
        if problem.has("dx"):
            return Build((self._step(problem, "gather", problem.near, ("indices", "dx"), None, device),))
        scratch = Scratch()
        steps = _fill(problem.far, 0, device)
        if problem.near.numel:
            owner = scratch.take(problem.far.numel * 4)
            steps += [replace(step, args=tuple(owner if a == TensorArg("y") else a for a in step.args))
                      for step in _fill(TensorDesc.packed(S32, (problem.far.numel,)), -1, device)]
            steps += [self._step(problem, "claim", problem.near, ("indices",), owner, device),
                      self._step(problem, "write", problem.near, ("indices", "x"), owner, device)]
        return Build(tuple(steps), scratch.num_bytes)

    @staticmethod
    def _step(problem: UnpoolProblem, phase: str, main: TensorDesc, moving: tuple[str, ...], owner: WorkspaceArg | None,
              device: DeviceInfo) -> Step:
        """The launch over main's elements. moving: operands that move with all of its digits."""
        rank, far = main.rank - 2, problem.far
        spatial = (0,) * rank
        places = prod(far.shape[2:])
        strides = {n: byte_strides(problem.desc(n)) for n in moving}
        values: dict[str, Any] = {n: TensorArg(n) for n in moving}
        if owner is not None:
            strides |= {"owner": (4 * far.shape[1] * places, 4 * places, *spatial), "flat": (0, 0, *packed_strides(main.shape[2:]))}
            values["flat"] = 0
        if owner is not None:
            values["owner"] = owner
        name = "dy" if phase == "gather" else "y"
        if phase in ("gather", "write"):
            strides[name], values[name] = (*byte_strides(far)[:2], *spatial), TensorArg(name)
        digits = Digits(("n", "c", *(f"i{a}" for a in range(rank))), main.shape, strides).ordered_for(moving[-1])
        wide = digits.consts().wide or any(abs(s) >= _LIMIT for s in byte_strides(far))
        args = [Arg(f"ptr_{n}", "u64", values[n]) for n in strides]
        args += [Arg("num_threads", "u32", digits.size), Arg("num_places", "u32", places), *digits.args(wide)]
        for a, extent in enumerate(far.shape[2:]):
            multiplier, shift = magic(max(extent, 1))
            args += [Arg(f"extent_far{a}", "u32", extent), Arg(f"multiplier_far{a}", "u32", multiplier), Arg(f"shift_far{a}", "u32", shift),
                     Arg(f"stride_far{a}", "s64" if wide else "s32", byte_strides(far)[2 + a])]
        consts = UnpoolConsts(phase, digits.consts(wide), main.dtype.num_bytes, rank, problem.desc("indices").dtype.name)
        return Step.of("pool/unpool", problem.op, Target.for_arch(device.arch), 256, args, consts, -(-digits.size // 256), suffix=phase)


class CellEngine(_PoolEngine):
    """Backward by cells of `stride` elements along each axis: what a cell takes from an output is known when the kernel is written. Windows
    that lie within their cells find their maxima again on the way, in the one launch; for others the forward kernel does first."""

    id = "pool.cell"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, PoolProblem)
        if problem.has("indices"):
            return refuse("the indices are given")
        for axis in problem.axes:
            if axis.adaptive or axis.fractional or axis.dilation > 1:
                return refuse("an axis is adaptive, fractional or dilated")
        stride = prod(a.stride for a in problem.axes[self._first_walked(problem):])
        if stride > 64:
            return refuse(f"cells of {stride} elements (at most 64 a thread)")
        most = _UNROLL[False] if self._overlaps(problem) or problem.mode != "max" else _SEARCHED
        if prod(a.max_sharing for a in problem.axes) > 16 or self._held(problem) > most or (
                problem.mode == "max" and self._overlaps(problem) and not _counts_taps(problem)):
            return refuse(f"windows of {' x '.join(str(a.window) for a in problem.axes)} elements")
        return super().check_support(problem, device)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, PoolProblem)
        found_again = problem.mode == "max" and self._overlaps(problem)
        described = [o.desc for o in problem.operands if o.name != "x" or not found_again]
        vector = vector_limit([*described, _found_again(problem)] if found_again else described)
        most = _UNROLL[True] if self._overlaps(problem) else _UNROLL[False] if problem.mode != "max" else _SEARCHED
        while vector > 1 and vector * self._held(problem) > most:
            vector //= 2
        return tuple(EngineConfig.of(vec=v, threads=t) for v in dict.fromkeys((vector, 1)) for t in (128, 256))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        # Where channels do not lie innermost neighbouring threads write a stride apart.
        assert isinstance(problem, PoolProblem)
        strided = 2.4 if problem.mode == "max" and self._overlaps(problem) else 1.4
        return (0.9 if problem.desc("dx").strides[1] == 1 else strided) * super().estimate(problem, config, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, PoolProblem)
        if problem.is_empty:
            return Build(())
        scratch, overlaps, first = Scratch(), self._overlaps(problem), self._first_walked(problem)
        steps: list[Step] = []
        operands: dict[str, tuple[TensorDesc, Any]] = {n: (problem.desc(n), TensorArg(n)) for n in ("dy", "dx")}
        if problem.mode == "max" and overlaps:
            operands["indices"], steps = self._find_again(problem, config, device, scratch)
        elif problem.mode == "max":
            operands["x"] = (problem.desc("x"), TensorArg("x"))
        cells = tuple(-(-(a.extent + a.low) // a.stride) if i >= first else a.extent for i, a in enumerate(problem.axes))
        steps += self._steps("pool/cell", problem, config, device, "dx", "i", operands, {
            "walked": tuple(operands), "backward": True, "index_dtype": operands["indices"][0].dtype.name if "indices" in operands else "",
            "cells": cells, "first_walked": first, "overlaps": overlaps})
        return Build(tuple(steps), scratch.num_bytes)

    @staticmethod
    def _overlaps(problem: PoolProblem) -> bool:
        return any(a.window > a.stride for a in problem.axes)

    def _held(self, problem: PoolProblem) -> int:
        """Registers of one channel: of the elements of a cell, or of the taps of a window that is searched."""
        size = 2 if problem.desc("dx").dtype is F64 else 1
        if self._overlaps(problem):
            return size * prod(a.stride for a in problem.axes)
        return size * prod(a.window for a in problem.axes) if problem.mode == "max" else size

    def _first_walked(self, problem: PoolProblem) -> int:
        """Of an average whose windows keep apart a thread has the cell along the last axis only: it need not know the rest."""
        return len(problem.axes) - 1 if problem.mode == "avg" and not self._overlaps(problem) else 0


class GlobalEngine(RowEngine):
    """One window that is the whole image, whose elements lie side by side: threads share it."""

    id = "pool.global_row"
    held_operands = ()  # read once

    def rows(self, problem: Problem) -> Rows:
        assert isinstance(problem, PoolProblem)
        x, y = problem.desc("x"), problem.desc("y")
        channels = TensorDesc(y.dtype, y.shape[:2], y.strides[:2], y.align)
        return Rows.of(x.shape, range(2, x.rank), {"x": x}, per_row={"y": channels})

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, PoolProblem)
        x = problem.desc("x")
        if not all(a.outputs == 1 and a.window == a.extent and a.low == a.high == 0 and a.dilation == 1 for a in problem.axes):
            return refuse("the windows are not the whole image")
        if not x.dtype.is_float or problem.mode == "lp" or problem.has("indices") or (problem.mode == "max" and x.dtype is F64):
            return refuse(f"no {problem.mode} of {x.dtype} with these outputs")
        if not TensorDesc(x.dtype, x.shape[2:], x.strides[2:]).is_packed():
            return refuse(f"the elements of an image do not lie side by side (strides {x.strides[2:]})")
        return super().check_support(problem, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, PoolProblem)
        if problem.is_empty:
            return Build(())
        kind = problem.desc("x").dtype
        divisor = Arg("divisor", compute_type(kind), float(problem.divisor or prod(a.extent for a in problem.axes)))
        rows = self.rows(problem)
        consts = GlobalPoolConsts(self.row_consts(rows, config, 1), problem.mode)
        return Build((self.row_step("pool/global", consts, problem.op, rows, config, device, [divisor]),))


class GlobalTreeEngine(Engine):
    """One window that is the whole image, in a layout where threads had better lie along the channels: a tree reduction."""

    id = "pool.global_tree"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, PoolProblem)
        x = problem.desc("x")
        if not all(a.outputs == 1 and a.window == a.extent and a.low == a.high == 0 and a.dilation == 1 for a in problem.axes):
            return refuse("the windows are not the whole image")
        if not x.dtype.is_float or problem.mode == "lp" or problem.has("indices") or problem.divisor:
            return refuse(f"no {problem.mode} of {x.dtype} with these outputs")
        if x.strides[1] != 1 and x.shape[1] > 1:
            return refuse(f"the channels do not lie side by side (stride {x.strides[1]})")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, PoolProblem)
        x = problem.desc("x")
        found = reduction_configs(x, problem.desc("y"), self._axes(problem), self._kind(problem), device)
        columns = tuple(c for c in found if c["path"] == "column")
        if not columns or prod(x.shape[2:]) > _SMALL_IMAGE:
            return columns or found[:1]
        # Of small images a thread has few elements: packs of 8 bytes or less, as long as every SM has a CTA of 32 packs, or 16.
        outputs, vector = prod(x.shape[:2]), min(columns[0]["vec"], max(1, 8 // x.dtype.num_bytes))
        while vector > 1 and outputs < 32 * vector * device.num_sms:
            vector //= 2
        along = 16 if outputs < 4 * 32 * vector * device.num_sms else 8
        return tuple(dict.fromkeys((EngineConfig.of(path="column", vec=vector, along=along, splits=1), *columns)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.9)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, PoolProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        source, target = ((problem.desc(n), TensorArg(n)) for n in ("x", "y"))
        steps = reduction_steps(problem.op, source, target, self._axes(problem), self._kind(problem), device, scratch, config)
        return Build(tuple(steps), scratch.num_bytes)

    @staticmethod
    def _axes(problem: PoolProblem) -> tuple[int, ...]:
        return tuple(range(2, problem.desc("x").rank))

    @staticmethod
    def _kind(problem: PoolProblem) -> str:
        return "max" if problem.mode == "max" else "mean"


_WINDOW, _GATHER, _CELL, _GLOBAL, _GLOBAL_TREE = WindowEngine(), GatherEngine(), CellEngine(), GlobalEngine(), GlobalTreeEngine()
_NAMES = ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool", "fractional_max_pool", "global_max_pool",
          "global_avg_pool")
ENGINES: dict[str, tuple[Engine, ...]] = {n: (_WINDOW,) for n in _NAMES}
ENGINES |= {n + "_backward": (_GATHER,) if n in ("lp_pool", "fractional_max_pool") else (_GATHER, _CELL) for n in _NAMES}
ENGINES |= {n + "_backward": (*ENGINES[n + "_backward"], PLANE_GRADIENT) for n in _NAMES if "max" in n and not n.startswith("global")}
ENGINES |= {n: (_GLOBAL, _GLOBAL_TREE, _WINDOW) for n in ("adaptive_avg_pool", "global_max_pool", "global_avg_pool")}
ENGINES |= {"max_unpool": (UnpoolEngine(), PLANE_UNPOOL), "max_unpool_backward": (UnpoolEngine(),)}
