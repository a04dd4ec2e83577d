"""Gradients of copies that repeat elements: an element adds up all that its copies got, one after another, so without atomics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from math import prod

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.layout import LayoutProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .digits import DigitConsts, Digits
from .layout_copy import WIDE, Geometry, geometry
from .reduce_tree import reduction_configs, reduction_steps

THREADS = 256
MOST_THREADS = 2**31 - THREADS  # of a launch


@dataclass(frozen=True)
class SumConsts:
    """rules: per digit, "same" or how the copies lie along it. vec: neighbours of a thread along the last digit, which x holds densely, and
    y, too, unless it is folded. in_pairs: an element has one or two copies along every folded dimension."""

    dtype: str
    compute: str
    vec: int
    rules: tuple[str, ...]
    digits: DigitConsts
    in_pairs: bool

    @property
    def folded(self) -> tuple[int, ...]:
        return tuple(d for d, rule in enumerate(self.rules) if rule != "same")

    @property
    def outer(self) -> tuple[int, ...]:
        """The folded dimensions along which the neighbours of a thread agree."""
        return tuple(d for d in self.folded if d < len(self.rules) - 1)

    @property
    def folds_inner(self) -> bool:
        return self.rules[-1] != "same"

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """Which of the two copies along each dimension of `outer`, in the order of sums."""
        return tuple(product((0, 1), repeat=len(self.outer)))


class LayoutSum(Engine):
    """Gradients of reflecting, replicating and circular padding."""

    id = "layout.sum"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        if not isinstance(problem, LayoutProblem) or not problem.sums or problem.op == "tile_backward":
            return refuse("not a gradient of padding that sums")
        shape = geometry(problem, problem.parts[0])
        if prod(d.extent for d in shape.dims if d.rule != "same") >= MOST_THREADS:
            return refuse("2^31 elements or more along padded dimensions")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LayoutProblem)
        best = self._vec(problem)
        return tuple(EngineConfig.of(vec=v) for v in (8, 4, 2, 1) if v <= best)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3) * (1.1 + 0.5 / config["vec"])

    def _vec(self, problem: LayoutProblem) -> int:
        """The most neighbours that lie densely and aligned in dx and, along a dimension that is not padded, in dy; along one that is, dy's
        are taken one by one."""
        shape, size = geometry(problem, problem.parts[0]), problem.desc("dx").dtype.num_bytes
        inner, vec = shape.dims[-1], min(8, 16 // size)
        folds = inner.rule != "same"
        if inner.y != size or (inner.x != size and not folds) or (folds and not _in_pairs(shape)):
            return 1
        places = [d.y for d in shape.dims[:-1]] + [shape.y_offset, problem.desc("dx").align]
        if not folds:
            places += [d.x for d in shape.dims[:-1]] + [shape.x_offset, problem.desc("dy").align]
        while vec > 1 and (inner.extent % vec or any(n % (vec * size) for n in places)):
            vec //= 2
        return vec

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, LayoutProblem)
        if problem.is_empty:
            return Build(())
        vec = config["vec"]
        shape = geometry(problem, problem.parts[0])
        inner = shape.dims[-1]
        in_pairs = _in_pairs(shape)
        x = inner.x * (vec if inner.rule == "same" else 1)
        shape = replace(shape, dims=(*shape.dims[:-1], replace(inner, extent=inner.extent // vec, x=x, y=inner.y * vec)))
        return Build(tuple(self._step(problem, piece, vec, in_pairs, device) for piece in _pieces(shape)))

    def _step(self, problem: LayoutProblem, shape: Geometry, vec: int, in_pairs: bool, device: DeviceInfo) -> Step:
        """shape: of packs along the last dimension."""
        dims = shape.dims
        names = tuple(f"d{i}" for i in range(len(dims)))
        digits = Digits(names, tuple(d.extent for d in dims),
                        {"x": tuple(d.x if d.rule == "same" else 0 for d in dims), "y": tuple(d.y for d in dims)})
        consts = digits.consts(digits.consts().wide or any(abs(d.x) >= WIDE for d in dims))
        args = [Arg("ptr_x", "u64", TensorArg("dy", shape.x_offset)), Arg("ptr_y", "u64", TensorArg("dx", shape.y_offset)),
                Arg("num_threads", "u32", digits.size), *digits.args(consts.wide)]
        for i, dim in enumerate(dims):
            if dim.rule != "same":
                extent = dim.extent * (vec if i == len(dims) - 1 else 1)
                period = {"wrap": extent, "reflect": 2 * (extent - 1), "clamp": 1}[dim.rule]
                shift = -dim.shift if dim.rule == "clamp" else -dim.shift % period  # where element 0 is copied to
                args += [Arg(f"begin{i}", "s32", shift), Arg(f"taps{i}", "s32", dim.size), Arg(f"period{i}", "s32", period),
                         Arg(f"last{i}", "s32", extent - 1), Arg(f"tap_stride{i}", "s64" if consts.wide else "s32", dim.x)]
        dtype = problem.desc("dx").dtype.name
        spec = SumConsts(dtype, "f64" if dtype == "f64" else "f32", vec, tuple(d.rule for d in dims), consts, in_pairs)
        return Step.of("layout/sum", problem.op, Target.for_arch(device.arch), THREADS, args, spec, -(-digits.size // THREADS),
                       suffix=f"{dtype}_v{vec}")


def _in_pairs(shape: Geometry) -> bool:
    """Whether an element has no more than two copies along any padded dimension: padding is shorter than what it repeats."""
    folded = [d for d in shape.dims if d.rule != "same"]
    longest = {"wrap": 0, "reflect": 2}
    return 0 < len(folded) <= 3 and all(d.rule in longest and d.shift <= 0 and d.size >= d.extent - d.shift
                                        and d.size - d.extent <= d.extent - longest[d.rule] for d in folded)


def _pieces(shape: Geometry) -> Iterator[Geometry]:
    """Geometries of fewer than 2^31 threads, cut along dimensions without a rule."""
    if prod(d.extent for d in shape.dims) < MOST_THREADS:
        yield shape
        return
    at, dim = max(((i, d) for i, d in enumerate(shape.dims) if d.rule == "same"), key=lambda found: found[1].extent)
    for begin, count in ((0, dim.extent // 2), (dim.extent // 2, dim.extent - dim.extent // 2)):
        yield from _pieces(replace(shape, dims=(*shape.dims[:at], replace(dim, extent=count), *shape.dims[at + 1:]),
                                   x_offset=shape.x_offset + begin * dim.x, y_offset=shape.y_offset + begin * dim.y))


class LayoutReduce(Engine):
    """The gradient of tiling: a reduction over the dimensions that the copies make."""

    id = "layout.reduce"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        if not isinstance(problem, LayoutProblem) or problem.op != "tile_backward":
            return refuse("not a gradient of tiling")
        return SUPPORTED

    def _descs(self, problem: LayoutProblem) -> tuple[TensorDesc, TensorDesc, tuple[int, ...]]:
        """dy with a dimension of copies before each of dx, dx, and those dimensions."""
        axes = problem.parts[0].axes
        dy, dx = problem.desc("dy"), problem.desc("dx")
        shape = tuple(n for a in axes for n in (a.size // max(a.extent, 1), a.extent))
        strides = tuple(s for a in axes for s in (a.source * a.extent, a.source))
        target = TensorDesc(dx.dtype, tuple(a.extent for a in axes), tuple(a.target for a in axes), dx.align)
        return TensorDesc(dy.dtype, shape, strides, dy.align), target, tuple(range(0, 2 * len(axes), 2))

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LayoutProblem)
        source, target, axes = self._descs(problem)
        found = reduction_configs(source, target, axes, "sum", device)
        limit = problem.policy.workspace_limit
        return tuple(c for c in found if limit is None or c["splits"] == 1 or self.build_steps(problem, c, device).workspace_bytes <= limit)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, LayoutProblem)
        preferred = self.configs(problem, device)[0]
        return 3.0 + 2.5 * (config["splits"] > 1) + problem.num_bytes / (device.bandwidth_gbs * 1e3) * (1.2 if config == preferred else 2.0)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, LayoutProblem)
        if problem.is_empty:
            return Build(())
        (source, target, axes), scratch = self._descs(problem), Scratch()
        steps = reduction_steps(problem.op, (source, TensorArg("dy")), (target, TensorArg("dx")), axes, "sum", device, scratch, config)
        return Build(tuple(steps), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {"pad_backward": (LayoutSum(),), "tile_backward": (LayoutReduce(),)}
