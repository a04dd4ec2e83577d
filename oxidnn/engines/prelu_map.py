"""The gradient of PReLU: one map gives dx and every element's share of the slope's gradient, which trees then add up."""

from __future__ import annotations

from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.prelu import PreluGradientProblem
from .base import SUPPORTED, Build, Engine, EngineConfig, Scratch, Support, TensorArg, refuse
from .pointwise_map import PointwiseMap, map_step, max_vec
from .reduce_tree import reduction_steps


class PreluGradient(Engine):
    """Any such gradient, the same bits on every run. Workspace: the shares, in f32 (f64)."""

    id = "prelu.gradient"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED if isinstance(problem, PreluGradientProblem) else refuse("not a gradient of PReLU")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, PreluGradientProblem)
        best = max_vec(problem.elements)
        return tuple(EngineConfig.of(vec=v) for v in (8, 4, 2, 1) if v <= best)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, PreluGradientProblem)
        moved = problem.num_bytes + 2 * problem.desc("x").numel * problem.accumulate.num_bytes
        return 8.0 + moved / (device.bandwidth_gbs * 1e3) * (1 + 0.5 / config["vec"])

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, PreluGradientProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        share = problem.elements.desc("share")
        place = scratch.take(share.num_bytes)
        steps = [] if problem.elements.is_empty else [map_step(problem.elements, config["vec"], device, at={"share": place})]
        target = problem.desc("dslope"), TensorArg("dslope")
        steps += reduction_steps(problem.op, (share, place), target, problem.axes, "sum", device, scratch)
        return Build(tuple(steps), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {"prelu": (PointwiseMap(),), "prelu_backward": (PreluGradient(),)}
