"""Routing: a warp a token, whose registers hold the scores of all experts. Integers alone are added up in any order."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen import elementary
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.moe_route import MoeRouteProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg
from .digits import ceil_div
from .moe_rows import clear_step, held, limit_steps

_WARPS = 4  # of a CTA, a token each
_MOST_CTAS = 132  # whose sums are added up


@dataclass(frozen=True, slots=True)
class RouteConsts:
    """held: scores of a lane. by_logits: experts are chosen by these; of: which of a template's kernels."""

    dtype: str
    experts: int
    topk: int
    score: str
    renormalize: bool
    groups: int = 1
    top_groups: int = 1
    group_score: str = ""
    by_logits: bool = True
    has_bias: bool = False
    of: str = ""

    @property
    def held(self) -> int:
        return ceil_div(self.experts, 32)

    @property
    def group_size(self) -> int:
        return self.experts // self.groups

    def function(self, name: str, register: str) -> str:
        """PTX: register = exp, log or sigmoid of it."""
        emit = elementary.Emitter("%ef_")
        result = getattr(elementary, f"{name}_f32")(emit, register)
        lines = [*emit.declarations(), *emit.lines, f"mov.f32 {register}, {result};"]
        return "\n".join(["    {", *("        " + line for line in lines), "    }"])


def _consts(p: MoeRouteProblem, of: str = "") -> RouteConsts:
    return RouteConsts(p.desc("logits").dtype.name, p.experts, p.topk, p.scoring, p.renormalize, p.groups, p.top_groups, p.group_score,
                       p.chooses_by_logits, p.has("bias"), of)


def _counts(desc: TensorDesc) -> list[Arg]:
    return [Arg("ptr_counts", "u64", TensorArg("counts")), Arg("counts_bytes", "s64", 4 * desc.strides[0])]


def _step(p: MoeRouteProblem, template: str, args: list[Arg], consts: RouteConsts, grid: int, device: DeviceInfo,
          warps: int = _WARPS) -> Step:
    suffix = "_".join(filter(None, (p.scoring, consts.dtype, consts.of)))
    return Step.of(f"moe/{template}", p.op, Target.for_arch(device.arch), 32 * warps, args, consts, grid, suffix=suffix)


class _Route(Engine):
    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 6.0 + problem.num_bytes / (device.bandwidth_gbs * 500)


class MoeRoute(_Route):
    id = "moe_route.warp"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p, scratch = problem, Scratch()
        assert isinstance(p, MoeRouteProblem)
        counts = _counts(p.desc("counts"))
        steps = [clear_step(p.op, TensorArg("counts"), 4 * p.desc("counts").strides[0], p.experts, device)]
        if p.tokens:
            args = [*held(p, "logits").args("logits"), *held(p, "ids").args("ids"), *held(p, "weights").args("weights"), *counts,
                    Arg("num_tokens", "u32", p.tokens), Arg("scaling", "f32", p.scaling_factor)]
            if p.has("bias"):
                args += [Arg("ptr_bias", "u64", TensorArg("bias")), Arg("bias_bytes", "s64", 4 * p.desc("bias").strides[0])]
            steps.append(_step(p, "route", args, _consts(p), ceil_div(p.tokens, _WARPS), device))
            if p.capacity is not None:
                steps += limit_steps(p.op, p.experts, p.capacity, held(p, "ids"), held(p, "weights"), device, scratch)
        return Build(tuple(steps), scratch.num_bytes)


class MoeRouteBackward(_Route):
    id = "moe_route_backward.warp"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, MoeRouteProblem)
        if p.is_empty:
            return Build(())
        args = [a for n in ("dweights", "logits", "ids", "dlogits") for a in held(p, n).args(n)]
        args += [Arg("num_tokens", "u32", p.tokens), Arg("scaling", "f32", p.scaling_factor)]
        return Build((_step(p, "route_gradient", args, _consts(p, "weights"), ceil_div(p.tokens, _WARPS), device),))


class MoeLosses(_Route):
    id = "moe_losses.warp"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p, scratch = problem, Scratch()
        assert isinstance(p, MoeRouteProblem)
        num_ctas = max(1, min(_MOST_CTAS, ceil_div(p.tokens, 4 * _WARPS)))
        parts = Arg("ptr_parts", "u64", scratch.take(4 * num_ctas * (p.experts + 1)))
        shared = [parts, Arg("num_ctas", "u32", num_ctas)]
        args = [*held(p, "logits").args("logits"), *shared, Arg("num_tokens", "u32", p.tokens)]
        last = [*shared, *_counts(p.desc("counts")), Arg("ptr_balance", "u64", TensorArg("balance")), Arg("ptr_z", "u64", TensorArg("z")),
                Arg("experts_per_token", "f32", p.experts / max(1, p.tokens)), Arg("one_per_token", "f32", 1 / max(1, p.tokens))]
        return Build((_step(p, "route_losses", args, _consts(p, "parts"), num_ctas, device),
                      _step(p, "route_losses", last, _consts(p, "losses"), 1, device, 8)), scratch.num_bytes)


class MoeLossesBackward(_Route):
    id = "moe_losses_backward.warp"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, MoeRouteProblem)
        if p.is_empty:
            return Build(())
        args = [a for n in ("logits", "dlogits") for a in held(p, n).args(n)]
        args += [*_counts(p.desc("counts")), *(Arg(f"ptr_{n}", "u64", TensorArg(n)) for n in ("dbalance", "dz")),
                 Arg("num_tokens", "u32", p.tokens), Arg("experts_per_token", "f32", p.experts / p.tokens),
                 Arg("two_per_token", "f32", 2 / p.tokens)]
        return Build((_step(p, "route_gradient", args, _consts(p, "losses"), ceil_div(p.tokens, _WARPS), device),))


ENGINES: dict[str, tuple[Engine, ...]] = {"moe_route": (MoeRoute(),), "moe_route_backward": (MoeRouteBackward(),),
                                          "moe_losses": (MoeLosses(),), "moe_losses_backward": (MoeLossesBackward(),)}
