"""A convolution of an expression over its input in two launches: what becomes of the image into the workspace, then the plain convolution
of that. For loops whose operands never pass through registers, wgmma's above all."""

from __future__ import annotations

from functools import lru_cache

from ..codegen import pointwise as expr
from ..device import DeviceInfo
from ..ops import OPS
from ..ops.base import Problem
from ..ops.conv import IMAGE, ConvProblem
from ..tensor import TensorDesc
from . import matmul, pointwise_map
from .base import SUPPORTED, Build, Engine, EngineConfig, Scratch, Support, TensorArg, refuse
from .composition import moved

_MAP = pointwise_map.ENGINES["pointwise"][0]


@lru_cache(maxsize=256)
def _parts(p: ConvProblem) -> tuple[Problem, ConvProblem]:
    """The map over the image, and the convolution of its result."""
    assert p.prologue is not None
    terms = {n: p.desc(n) for n in p.prologue.args if n != IMAGE}
    image = p.desc(p.image)
    is_last = image.is_packed("nhwc") and not image.is_packed("nchw")
    made = TensorDesc.packed(image.dtype, image.shape, "nhwc" if is_last else "nchw")
    by_channels = p.prologue.substitute({n: expr.arg(n, axis="c" if d.shape[0] > 1 else None) for n, d in terms.items()})
    first = OPS["pointwise"].make({IMAGE: image, **terms, "y": made}, {"expression": by_channels}, p.policy)
    tensors = {o.name: made if o.name == p.image else o.desc for o in p.operands if o.name not in terms}
    second = OPS[p.op].make(tensors, {n: v for n, v in p.attrs if n != "prologue"}, p.policy)
    assert isinstance(second, ConvProblem)
    return first, second


@lru_cache(maxsize=256)
def _second(p: ConvProblem, device: DeviceInfo) -> tuple[Engine, EngineConfig, float] | None:
    """Who executes the plain convolution."""
    found = [(e, c, e.estimate(p, c, device)) for e in matmul.ENGINES[p.op] if e.check_support(p, device)
             for c in e.configs(p, device)[:1]]
    return min(found, key=lambda choice: choice[2], default=None)


class PrologueApart(Engine):
    """Workspace: the image as it is summed, in its type, and what the convolution takes."""

    makes_by_products = True
    sums_coarsely = True  # as the convolution may

    def __init__(self, op: str) -> None:
        self.id = f"{op}.prologue_apart"  # type: ignore[misc]

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        if problem.prologue is None:
            return refuse("prologue_apart: there is no expression over the input")
        if problem.desc(problem.image).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        first, second = _parts(problem)
        support = _MAP.check_support(first, device)
        if not support:
            return support
        if _second(second, device) is None:
            return refuse("prologue_apart: no matrix engine takes the convolution of the result")
        limit = problem.policy.workspace_limit
        if limit is not None and (num_bytes := self.build_steps(problem, EngineConfig(), device).workspace_bytes) > limit:
            return refuse(f"prologue_apart: {num_bytes} bytes of workspace (the limit is {limit})")
        return SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ConvProblem)
        first, second = _parts(problem)
        found = _second(second, device)
        assert found is not None
        return _MAP.estimate(first, _MAP.configs(first, device)[0], device) + found[2]

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        first, second = _parts(problem)
        found = _second(second, device)
        assert found is not None
        scratch = Scratch()
        place = scratch.take(problem.desc(problem.image).num_bytes)
        build = _MAP.build_steps(first, _MAP.configs(first, device)[0], device)
        names = {o.name: TensorArg(problem.image if o.name == IMAGE else o.name) for o in first.inputs}
        steps = moved(build, scratch.take(build.workspace_bytes), **names, y=place)
        build = found[0].build_steps(second, found[1], device)
        others = {o.name: TensorArg(o.name) for o in second.operands if o.name != second.image}
        steps += moved(build, scratch.take(build.workspace_bytes), **others, **{second.image: place})
        return Build(tuple(steps), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (PrologueApart(op),) for op in ("conv_fprop", "conv_wgrad")}
