"""Scales of tensors by their last steps, in one launch; scales quantised once more, as steps of a mean, a difference and quantisation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..ops.base import Problem
from ..ops.quantize import KINDS
from ..ops.quantize_scales import DelayedScaleProblem, DoubleProblem
from ..tensor import TensorDesc
from . import pointwise_map, reduce_tree
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .composition import cheapest, moved
from .digits import power_of_two
from .quantize_groups import QuantizeGroups
from .quantize_map import MIN_CAPABILITY, QuantizeMap


@dataclass(frozen=True, slots=True)
class DelayedConsts:
    """places: of the history. largest: of the kind. factor: 2^margin. takes_all: the largest of the history counts, not the newest."""

    places: int
    largest: float
    factor: float
    takes_all: bool


class DelayedScale(Engine):
    id = "quantize.delayed"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.2)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, DelayedScaleProblem)
        if problem.is_empty:
            return Build(())
        places = problem.desc("history").shape[0]
        args: list[Arg] = []
        for o in problem.operands:
            is_history = o.name.endswith("history")
            each = o.desc.strides[1:] if is_history else o.desc.strides
            args += [Arg(f"ptr_{o.name}", "u64", TensorArg(o.name)), Arg(f"tensor_{o.name}", "s64", 4 * each[0] if each else 0)]
            args += [Arg(f"step_{o.name}", "s64", 4 * o.desc.strides[0])] if is_history else []
        consts = DelayedConsts(places, KINDS[problem.kind].largest, 2.0**problem.margin, problem.takes_all)
        return Build((Step.of("quantize/delayed", problem.op, Target.for_arch(device.arch), max(32, power_of_two(places)), args, consts,
                              max(1, problem.desc("amax").numel)),))


class DoubleQuantize(Engine):
    """Both ways."""

    id = "quantize.double"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return refuse("needs sm_80") if device.capability < MIN_CAPABILITY else SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 9.0 + 3 * problem.num_bytes / (device.bandwidth_gbs * 1e3)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, DoubleProblem)
        if problem.is_empty:
            return Build(())
        x, y = problem.desc("x"), problem.desc("y")
        flat, one, scale = (x.numel,), TensorDesc.packed(F32, ()), problem.desc("scale")
        wide = TensorDesc.packed(F32, flat)
        codes = TensorDesc(KINDS["e4m3"].storage, flat, (1,), (x if problem.op == "double_dequantize" else y).align)
        scaling = (("kind", "e4m3"), ("scaling", ("group", problem.group)))
        scratch = Scratch()
        place = scratch.take(wide.num_bytes)
        steps: list[Step] = []

        def add(op: str, operands: dict[str, TensorDesc], attrs: tuple[tuple[str, Any], ...], engines: tuple[Engine, ...],
                **at: Any) -> None:
            build, _ = cheapest(op, tuple(operands.items()), attrs, problem.policy, device, engines)
            steps.extend(moved(build, scratch.take(build.workspace_bytes), **at))

        add_up = pointwise_map.ENGINES["pointwise"]
        x_at, y_at, scale_at, offset_at = (TensorArg(n) for n in ("x", "y", "scale", "offset"))
        if problem.op == "double_quantize":
            source = TensorDesc(F32, flat, (1,), x.align)
            mean = TensorDesc.packed(F64, ())  # no sum of f32 is beyond it
            mean_at = scratch.take(mean.num_bytes)
            add("reduce", {"x": source, "y": mean}, (("op", "mean"), ("axes", (0,))), reduce_tree.ENGINES["reduce"],
                x=x_at, y=mean_at)
            add("pointwise", {"a": mean, "y": one}, (("expression", "a"), ("dtype", "f32")), add_up, a=mean_at, y=offset_at)
            add("pointwise", {"a": source, "b": one, "y": wide}, (("expression", "a - b"),), add_up, a=x_at, b=offset_at, y=place)
            add("dynamic_quantize", {"x": wide, "y": codes, "scale": scale}, scaling, (QuantizeGroups(),), x=place, y=y_at, scale=scale_at)
        else:
            result = TensorDesc(F32, flat, (1,), y.align)
            add("dequantize", {"x": codes, "scale": scale, "y": wide}, scaling, (QuantizeMap(),), x=x_at, scale=scale_at, y=place)
            add("pointwise", {"a": wide, "b": one, "y": result}, (("expression", "a + b"),), add_up, a=place, b=offset_at, y=y_at)
        return Build(tuple(steps), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {"delayed_scale": (DelayedScale(),), "double_quantize": (DoubleQuantize(),),
                                          "double_dequantize": (DoubleQuantize(),)}
