"""Gradients of reductions: what the reduction found, in the workspace, by trees; then one map over the elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..codegen.pointwise import parse
from ..device import DeviceInfo
from ..dtypes import BOOL, S64, dtype
from ..ops.base import Operand, Policy, Problem
from ..ops.pointwise import PointwiseProblem, View, pointwise_problem
from ..ops.reduce import GRADIENTS, ReduceGradientProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, ArgValue, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .pointwise_map import map_step, max_vec
from .reduce_tree import reduction_steps

_HITS = {"zeros": "x == 0", "ties": "x == y"}  # what is counted of the elements; of amax, of their sizes


class ReduceGradient(Engine):
    """Any gradient of a reduction, the same bits on every run."""

    id = "reduce.gradient"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED if isinstance(problem, ReduceGradientProblem) else refuse("not a gradient of a reduction")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ReduceGradientProblem)
        best = max_vec(self._elements(problem, {}))
        return tuple(EngineConfig.of(vec=v) for v in (16, 8, 4, 2, 1) if v <= best)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ReduceGradientProblem)
        passes = len(problem.missing) + sum(name in _HITS for name in problem.missing)
        x = problem.desc("x").num_bytes
        moved = problem.num_bytes + passes * x - (0 if "x" in parse(problem.expression).args else x)
        return 3.0 + 3.0 * passes + moved / (device.bandwidth_gbs * 1e3) * (1 + 0.5 / config["vec"])

    def _elements(self, problem: ReduceGradientProblem, found: Mapping[str, TensorDesc]) -> PointwiseProblem:
        """The map: every operand as it lies beside the elements, repeated along the reduced axes."""
        dx = problem.desc("dx")

        def beside(desc: TensorDesc) -> TensorDesc:
            strides = problem.kept_strides(desc)
            return TensorDesc(desc.dtype, dx.shape, strides, desc.align)

        expression = parse(problem.expression)
        kind = dtype(problem.accumulate)
        seen = {"dy": beside(problem.desc("dy")), "x": problem.desc("x")}
        for name in GRADIENTS[problem.kind][1:]:
            given = problem.desc("y") if name == "y" and problem.has("y") else found.get(name)
            seen[name] = beside(given or TensorDesc.packed(S64 if name in _HITS else kind, problem.kept))
        seen = {name: desc for name, desc in seen.items() if name in expression.args} | {"dx": dx}
        made = pointwise_problem(problem.op, expression, expression.args, seen, (), ("dx",), None, Policy())
        views = tuple(View(Operand(o.name, o.desc, o.is_output), o.name) for o in made.operands)
        return replace(made, views=views)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ReduceGradientProblem)
        if problem.is_empty:
            return Build(())
        scratch, steps = Scratch(), []
        x, kind = problem.desc("x"), dtype(problem.accumulate)
        at: dict[str, ArgValue] = {}
        found: dict[str, TensorDesc] = {}
        for name in problem.missing:
            if name in _HITS:
                hits, place = self._hits(problem, name, at, found, scratch, device)
                steps.append(hits)
                source, part, how = (TensorDesc.packed(BOOL, x.shape), place), TensorDesc.packed(S64, problem.kept), "count_nonzero"
            else:
                source, part = (x, TensorArg("x")), TensorDesc.packed(kind, problem.kept)
                how = problem.kind if name == "y" else name
            found[name], at[name] = part, scratch.take(part.num_bytes)
            correction = problem.correction if how in ("var", "std") else 0
            steps += reduction_steps(problem.op, source, (part, at[name]), problem.axes, how, device, scratch, correction=correction)
        elements = self._elements(problem, found)
        steps.append(map_step(elements, config["vec"], device, dict(config.knobs).get("index") == 64, at=at))
        return Build(tuple(steps), scratch.num_bytes)

    def _hits(self, problem: ReduceGradientProblem, name: str, at: Mapping[str, ArgValue], found: Mapping[str, TensorDesc],
              scratch: Scratch, device: DeviceInfo) -> tuple[Step, ArgValue]:
        """The launch that marks the elements to be counted, and where the marks lie."""
        x = problem.desc("x")
        text = _HITS[name].replace("x ==", "abs(x) ==") if problem.kind == "amax" else _HITS[name]
        tensors = {"x": x, "hit": TensorDesc.packed(BOOL, x.shape)}
        if name == "ties":
            y = problem.desc("y") if problem.has("y") else found["y"]
            tensors["y"] = TensorDesc(y.dtype, x.shape, problem.kept_strides(y), y.align)
        expression = parse(text)
        made = pointwise_problem(problem.op, expression, expression.args, tensors, (), ("hit",), None, Policy())
        place = scratch.take(x.numel)
        return map_step(made, max_vec(made), device, at={**at, "hit": place}), place


ENGINES: dict[str, tuple[Engine, ...]] = {"reduce_backward": (ReduceGradient(),)}
