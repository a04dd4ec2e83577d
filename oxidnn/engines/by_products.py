"""What comes beside a convolution's result: moments of its channels, of which batch norm makes statistics, the largest size of its
elements, and the sums of dy's channels.

A matrix engine may write the moments of its tiles, as it stores them, into the workspace (affine.AffineMatmul.moments); one launch combines
them. Otherwise the result, or dy, is read again. The largest size is what elements were before they were rounded, so none but a matrix
engine has it: warps raise it in memory, which a launch has cleared. Either way the same bits come out of every run.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32
from ..ops import OPS
from ..ops.base import Problem
from ..ops.channel_norm import ChannelNormProblem
from ..ops.conv import AMAX, CONVOLUTIONS, STATS, ConvProblem
from .affine import THROUGH_INPUT
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .channel_stats import ChannelNorm, Cut, Vector
from .reduce_tree import reduction_steps

_MOMENTS = ChannelNorm()
_NAMES = ("count", "mean", "m2")


def has_moments(problem: Problem) -> bool:
    return problem.has(STATS[0])


@lru_cache(maxsize=256)
def _moments(p: ConvProblem) -> ChannelNormProblem:
    """batch_norm_stats of the result."""
    tensors = {"x": p.outputs[0].desc} | {name: p.desc(own) for name, own in zip(_NAMES, STATS, strict=True)}
    found = OPS["batch_norm_stats"].make(tensors, {}, p.policy)
    assert isinstance(found, ChannelNormProblem)
    return found


def _places(p: ConvProblem) -> dict[str, TensorArg]:
    return {"x": TensorArg(p.outputs[0].name)} | {name: TensorArg(own) for name, own in zip(_NAMES, STATS, strict=True)}


def check(p: Problem, device: DeviceInfo) -> Support:
    return _MOMENTS.check_support(_moments(p), device) if isinstance(p, ConvProblem) and has_moments(p) else SUPPORTED


def estimate(p: Problem, device: DeviceInfo) -> float:
    """Microseconds of what `with_by_products` adds."""
    if not isinstance(p, ConvProblem):
        return 0.0
    cleared_us = CLEAR_US if p.has(AMAX) else 0.0
    if p.alone is p:
        return cleared_us
    total = cleared_us + _MOMENTS.estimate(_moments(p), _MOMENTS.configs(_moments(p), device)[0], device) if has_moments(p) else 0.0
    return total + (6.0 + p.desc(p.result).num_bytes / (device.bandwidth_gbs * 0.9e3) if p.has("db") and p.direction == "wgrad" else 0.0)


def with_by_products(p: Problem, build: Build, device: DeviceInfo, has_combined: bool = False) -> Build:
    """`build`, after the launch that clears the largest size, and the launches that read the result, or dy, again. has_combined: the
    moments are there already."""
    if not isinstance(p, ConvProblem):
        return build
    build = Build(cleared(p, build.steps, device), build.workspace_bytes)
    if p.alone is p:
        return build
    from .composition import moved  # which imports the matrix engines, and these this module

    steps, size = list(build.steps), build.workspace_bytes
    if has_moments(p) and not has_combined:
        stats = _moments(p)
        more = _MOMENTS.build_steps(stats, _MOMENTS.configs(stats, device)[0], device)
        steps += moved(more, WorkspaceArg(0), **_places(p))
        size = max(size, more.workspace_bytes)
    if p.has("db") and p.direction == "wgrad":
        scratch, dy = Scratch(), p.desc(p.result)
        axes = (0, *range(2, dy.rank))
        steps += reduction_steps(p.op, (dy, TensorArg(p.result)), (p.desc("db"), TensorArg("db")), axes, "sum", device, scratch)
        size = max(size, scratch.num_bytes)
    return Build(tuple(steps), size)


def cleared(p: Problem, steps: Sequence[Step], device: DeviceInfo) -> tuple[Step, ...]:
    """The steps, behind the launch that makes zero of the largest size, if there is one to find."""
    if not p.has(AMAX):
        return tuple(steps)
    from .composition import following

    args = [Arg("ptr_flags", "u64", TensorArg(AMAX)), Arg("num_flags", "u32", 1)]
    return tuple(following((Step.of("matmul/clear_flags", p.op, Target.for_arch(device.arch), 32, args, None, 1), *steps)))


CLEAR_US = 2.5


def combine_step(p: ConvProblem, rows: int, block: int, partials: WorkspaceArg, device: DeviceInfo) -> Step:
    """The launch that combines the means and squares of blocks of `block` rows, at `partials` as [channel][block][mean, squares]."""
    from .composition import relocated

    stats, items = _moments(p), -(-rows // block)
    size = F32.num_bytes
    arrays = {name: Vector(WorkspaceArg(partials.byte_offset + i * size), F32, (2 * size, 2 * items * size))
              for i, name in enumerate(("means", "squares"))}
    extra = [Arg("eps", "f32", 0.0), Arg("total", "f32", float(rows)), *Cut(rows, block, items).count_args()]
    step = _MOMENTS.combine_step("channelwise/combine", stats, arrays, items, 1, 1, {}, {n: Vector.of(stats, n) for n in _NAMES}, device,
                                 extra, follows=True)
    return relocated(step, _places(p))


class Completed(Engine):
    """An engine that knows of neither prologues nor by-products, nor of second outputs unless it says so (takes_aux): what it cannot do is
    refused, what it leaves is read again for by-products."""

    def __init__(self, engine: Engine) -> None:
        self.id, self.is_deterministic, self.sums_coarsely = engine.id, engine.is_deterministic, engine.sums_coarsely  # type: ignore[misc]
        self.engine = engine

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        name = self.id.split(".")[1]
        if problem.prologue is not None:
            return refuse(f"{name} takes no {THROUGH_INPUT}")
        if problem.has("aux") and not getattr(self.engine, "takes_aux", False):
            return refuse(f"{name} takes no second outputs (igemm_wgmma_sm90, igemm_mma_sm80, igemm_simt, im2col and direct do)")
        if problem.has(AMAX) and not getattr(self.engine, "takes_amax", False):
            return refuse(f"{name} finds no largest size of results (igemm_wgmma_sm90, igemm_mma_sm80, igemm_simt, im2col and direct do)")
        support = self.engine.check_support(problem.alone, device)
        return check(problem, device) if support else support

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ConvProblem)
        return self.engine.configs(problem.alone, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ConvProblem)
        return self.engine.estimate(problem.alone, config, device) + estimate(problem, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        return with_by_products(problem, self.engine.build_steps(problem.alone, config, device), device)


def completed(op: str, engine: Engine) -> Engine:
    """The engine, if it serves a convolution and is no matrix engine, which knows of all that goes with one."""
    return engine if op not in CONVOLUTIONS or getattr(engine, "makes_by_products", False) else Completed(engine)
