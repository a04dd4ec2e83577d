"""Routing of mixtures of experts: which experts each token goes to, with which weights, and the losses that keep experts busy alike.

    moe_route logits=bf16[T,E] top_k=K                              ids, weights, counts
    moe_route logits=f32[T,E] bias=f32[E] top_k=8 scoring=sigmoid groups=8 top_groups=4 scaling_factor=2.5        as DeepSeek-V3
    moe_route_backward dweights=f32[T,K] logits ids                 dlogits
    moe_losses logits counts=s32[E]                                 balance, z
    moe_losses_backward dbalance=f32[] dz=f32[] logits counts       dlogits

scoring: softmax over the experts, or sigmoid. The experts are the top_k of score + bias, the lower index first among equals; NaN comes
last. With groups (of E / groups neighbours), of the top_groups best ones alone, a group being as good as its two best together (group_score
"top2") or its best ("max"). Weights are the scores without bias, divided by their sum with renormalize (of sigmoids by 1e-20 more), times
scaling_factor. counts: assignments to each expert. capacity: those of an expert that come after so many, by token, are dropped: weight 0,
and ~id in the place of the id; counts counts them too.

    balance = E * sum over e of (counts[e] / all) * mean over tokens of p[t, e]         p: scores, sigmoids divided by their sum
    z = mean over tokens of log(sum over e of e^logits)^2
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import BF16, F16, F32, S32
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import MAX_EXTENT, check_bool, check_choice, check_integer, check_number, check_reach, describe, operand, output
from .moe import MAX_TOPK

SCORES = ("softmax", "sigmoid")
MAX_ROUTED = 1024  # experts: a warp's registers hold their scores
_KINDS = (F32, F16, BF16)


@dataclass(frozen=True, kw_only=True)
class MoeRouteProblem(Problem):
    tokens: int
    experts: int
    topk: int = 0
    scoring: str = "softmax"
    renormalize: bool = True
    groups: int = 1
    top_groups: int = 1
    group_score: str = "top2"
    scaling_factor: float = 1.0
    capacity: int | None = None

    @property
    def chooses_by_logits(self) -> bool:
        """Scores order experts as logits do: nothing is added to them or summed."""
        return not self.has("bias") and (self.groups == 1 or self.group_score == "max")

    @property
    def flops(self) -> int:
        return 8 * self.tokens * self.experts


def _logits(op: str, tensors: Mapping[str, TensorDesc]) -> TensorDesc:
    logits = operand(op, "logits", tensors, _KINDS)
    context = describe(tensors)
    if logits.rank != 2:
        raise expected(op, "rank of logits", logits.rank, "2: (tokens, experts)", context)
    check_reach(op, "logits", logits, context)
    check_integer(op, "experts (columns of logits)", logits.shape[1], 1, MAX_ROUTED, context)
    check_integer(op, "tokens (rows of logits)", logits.shape[0], 0, MAX_EXTENT // (2 * MAX_TOPK), context)
    return logits


def _shared(op: str, attrs: Mapping[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any]]]:
    values = {"scoring": check_choice(op, "scoring", attrs.get("scoring", "softmax"), SCORES),
              "renormalize": check_bool(op, "renormalize", attrs.get("renormalize", True)),
              "scaling_factor": check_number(op, "scaling_factor", attrs.get("scaling_factor", 1.0), F32)}
    defaults = {"scoring": "softmax", "renormalize": True, "scaling_factor": 1.0}
    return values, [(n, v) for n, v in values.items() if v != defaults[n]]


def make_route(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeRouteProblem:
    op, context = "moe_route", describe(tensors)
    logits = _logits(op, tensors)
    tokens, experts = logits.shape
    operands = [Operand("logits", logits)]
    if "bias" in tensors:
        operands.append(Operand("bias", operand(op, "bias", tensors, (F32,), (experts,))))
    values, normal = _shared(op, attrs)
    groups = check_integer(op, "groups", attrs.get("groups", 1), 1, 32)
    if experts % groups:
        raise expected(op, "groups", groups, f"a divisor of {experts} experts", context)
    top_groups = check_integer(op, "top_groups", attrs.get("top_groups", groups), 1, groups)
    group_score = check_choice(op, "group_score", attrs.get("group_score", "top2"), ("top2", "max"))
    if "top_k" not in attrs:
        raise expected(op, "top_k", "missing", "how many experts a token goes to", context)
    chosen_from = top_groups * (experts // groups)
    topk = check_integer(op, "top_k", attrs["top_k"], 1, context=context)
    if topk > chosen_from and top_groups < groups:
        raise expected(op, "top_k", topk, f"at most {chosen_from}: groups = {groups} of {experts // groups} experts each, of which a token "
                       f"goes to top_groups = {top_groups}", context)
    check_integer(op, "top_k", topk, 1, min(MAX_TOPK, chosen_from), context)
    capacity = attrs.get("capacity")
    if capacity is not None:
        capacity = check_integer(op, "capacity", capacity, 0)
    normal = [("top_k", topk), *normal]
    normal += [(n, v) for n, v, default in (("groups", groups, 1), ("top_groups", top_groups, groups), ("group_score", group_score, "top2"),
                                            ("capacity", capacity, None)) if v != default]
    for name, kind, shape in (("ids", S32, (tokens, topk)), ("weights", F32, (tokens, topk)), ("counts", S32, (experts,))):
        operands.append(Operand(name, output(op, name, tensors, (kind,), shape, logits), True))
    return MoeRouteProblem(op, tuple(operands), tuple(normal), policy=policy, tokens=tokens, experts=experts, topk=topk, groups=groups,
                           top_groups=top_groups, group_score=group_score, capacity=capacity, **values)


def make_route_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeRouteProblem:
    """ids and attributes as of the forward; dlogits in the type of logits. What was dropped has no gradient, but counts in the sum that
    weights were divided by."""
    op = "moe_route_backward"
    logits = _logits(op, tensors)
    dweights, ids = operand(op, "dweights", tensors, (F32,)), operand(op, "ids", tensors, (S32,))
    if ids.rank != 2 or ids.shape[0] != logits.shape[0] or not 1 <= ids.shape[1] <= MAX_TOPK:
        raise expected(op, "shape of ids", list(ids.shape), [logits.shape[0], f"1 to {MAX_TOPK}"], describe(tensors))
    operand(op, "dweights", tensors, (F32,), ids.shape)
    values, normal = _shared(op, attrs)
    dlogits = output(op, "dlogits", tensors, (logits.dtype,), logits.shape, logits)
    return MoeRouteProblem(op, (Operand("dweights", dweights), Operand("logits", logits), Operand("ids", ids),
                                Operand("dlogits", dlogits, True)), tuple(normal), policy=policy, tokens=logits.shape[0],
                           experts=logits.shape[1], topk=ids.shape[1], **values)


def _losses(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeRouteProblem:
    logits = _logits(op, tensors)
    counts = operand(op, "counts", tensors, (S32,), (logits.shape[1],))
    scoring = check_choice(op, "scoring", attrs.get("scoring", "softmax"), SCORES)
    operands = [Operand("logits", logits), Operand("counts", counts)]
    if op.endswith("backward"):
        operands[:0] = [Operand(n, operand(op, n, tensors, (F32,), ())) for n in ("dbalance", "dz")]
        operands.append(Operand("dlogits", output(op, "dlogits", tensors, (logits.dtype,), logits.shape, logits), True))
    else:
        operands += [Operand(n, output(op, n, tensors, (F32,), (), logits), True) for n in ("balance", "z")]
    return MoeRouteProblem(op, tuple(operands), (("scoring", scoring),) if scoring != "softmax" else (), policy=policy,
                           tokens=logits.shape[0], experts=logits.shape[1], scoring=scoring)


def make_losses(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeRouteProblem:
    """Both are 0 of no tokens; balance is 0 of no assignments."""
    return _losses("moe_losses", tensors, attrs, policy)


def make_losses_backward(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> MoeRouteProblem:
    return _losses("moe_losses_backward", tensors, attrs, policy)


_SHARED = (("scoring", "softmax"), ("renormalize", True), ("scaling_factor", 1.0))
DEFINITIONS: tuple[OpDef, ...] = (
    OpDef("moe_route", ("logits", "bias"), ("ids", "weights", "counts"), make_route, ("bias",),
          (("top_k", None), *_SHARED, ("groups", 1), ("top_groups", None), ("group_score", "top2"), ("capacity", None))),
    OpDef("moe_route_backward", ("dweights", "logits", "ids"), ("dlogits",), make_route_backward, attrs=_SHARED),
    OpDef("moe_losses", ("logits", "counts"), ("balance", "z"), make_losses, attrs=(("scoring", "softmax"),)),
    OpDef("moe_losses_backward", ("dbalance", "dz", "logits", "counts"), ("dlogits",), make_losses_backward,
          attrs=(("scoring", "softmax"),)),
)
