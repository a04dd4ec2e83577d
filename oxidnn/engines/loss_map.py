"""Losses with one formula an element, inner products: the pointwise map; of a sum or mean it leaves each CTA's, and a tree adds them."""

from __future__ import annotations

from math import prod

from ..device import DeviceInfo
from ..dtypes import dtype
from ..ops.base import Problem
from ..ops.elementwise_loss import LossProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Build, Engine, EngineConfig, Scratch, Support, TensorArg, refuse
from .pointwise_map import THREADS, PointwiseMap, map_step, max_vec
from .reduce_tree import reduction_steps


class LossMap(PointwiseMap):
    """Any elementwise loss and gradient. Sums are made in the same order on every run."""

    id = "loss.map"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED if isinstance(problem, LossProblem) else refuse("not an elementwise loss")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LossProblem)
        if not problem.is_reduced:
            return super().configs(problem, device)
        found = [EngineConfig.of(vec=v) for v in (8, 4, 2, 1) if v <= max_vec(problem.elements)]
        kept = [c for c in found if self._fits(problem, c, device)]
        return tuple(sorted(kept or found[:1], key=lambda config: self.estimate(problem, config, device)))

    def _fits(self, problem: LossProblem, config: EngineConfig, device: DeviceInfo) -> bool:
        limit = problem.policy.workspace_limit
        return limit is None or self.build_steps(problem, config, device).workspace_bytes <= limit

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, LossProblem)
        return super().estimate(problem, config, device) + (2.5 if problem.is_reduced else 0.0)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, LossProblem)
        if not problem.is_reduced:
            return super().build_steps(problem, config, device)
        elements, kind, scratch, vec = problem.elements, dtype(problem.compute), Scratch(), config["vec"]
        count = -(-prod(problem.shape) // (THREADS * vec))
        sums = scratch.take(count * kind.num_bytes)
        steps = [map_step(elements, vec, device, dict(config.knobs).get("index") == 64, sums)] if count else []
        source, target = (TensorDesc.packed(kind, (count,)), sums), (problem.outputs[0].desc, TensorArg(problem.outputs[0].name))
        # The mean of `count` sums with this correction divides by the elements behind them.
        reduction, correction = ("sum", 0) if problem.reduction == "sum" else ("mean", count - int(problem.divisor))
        steps += reduction_steps(problem.op, source, target, (0,), reduction, device, scratch, correction=correction,
                                 follows=True)
        return Build(tuple(steps), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (LossMap(),) for op in ("loss", "loss_backward", "dot")}
