"""Routing: logits with ties, biases, groups, capacities; ids of which some were dropped."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, S32
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.moe_route import MoeRouteProblem
from ...tensor import TensorDesc
from . import Fill, Sampler
from .tensors import random_desc

_OPS = ("moe_route", "moe_route_backward", "moe_losses", "moe_losses_backward")


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    kind = (F16, BF16, F32)[int(rng.integers(3))]
    tokens = 0 if rng.random() < 0.05 else int(rng.integers(1, 10 if size == "tiny" else 200))
    groups = int(rng.choice([1, 1, 2, 4, 8]))
    experts = groups * int(rng.choice([1, 2, 3, 8, 32]))
    top_groups = int(rng.integers(1, groups + 1))
    topk = int(rng.integers(1, min(32, experts // groups * top_groups, 9) + 1))
    tensors = {"logits": random_desc(rng, kind, (tokens, experts))}
    attrs: dict[str, Any] = {"scoring": ("softmax", "sigmoid")[int(rng.integers(2))]}
    if op.startswith("moe_route"):
        attrs |= {"renormalize": bool(rng.random() < 0.6), "scaling_factor": float(rng.choice([1.0, 2.5]))}
    if op == "moe_route":
        attrs |= {"top_k": topk, "groups": groups, "top_groups": top_groups, "group_score": ("top2", "max")[int(rng.integers(2))]}
        if rng.random() < 0.4:
            tensors["bias"] = random_desc(rng, F32, (experts,))
        if rng.random() < 0.4:
            attrs["capacity"] = int(rng.integers(0, 5))
    elif op == "moe_route_backward":
        tensors = {"dweights": random_desc(rng, F32, (tokens, topk)), **tensors, "ids": random_desc(rng, S32, (tokens, topk))}
    else:
        tensors["counts"] = random_desc(rng, S32, (experts,))
        if op.endswith("backward"):
            tensors = {n: TensorDesc.packed(F32, ()) for n in ("dbalance", "dz")} | tensors
    problem = OPS[op].make(tensors, attrs, Policy())
    for o in problem.outputs if rng.random() < 0.4 else ():
        tensors[o.name] = random_desc(rng, o.desc.dtype, o.desc.shape, is_output=True)
    return OPS[op].make(tensors, attrs, Policy())


def _logits(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Multiples of 1/8: ties are common, and exact."""
    return np.round(8 * np.clip(rng.standard_normal(problem.desc("logits").shape), -3, 3)) / 8


def _bias(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.integers(-2, 3, problem.desc("bias").shape) * 0.3


def _ids(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    assert isinstance(problem, MoeRouteProblem)
    p = problem
    ids = np.argsort(rng.random((p.tokens, p.experts)), -1)[:, : p.topk]
    return np.where(rng.random(ids.shape) < 0.15, ~ids, ids)


def _counts(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.integers(0, 40, problem.desc("counts").shape)


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in _OPS}
FILLS: dict[tuple[str, str], Fill] = {(op, "logits"): _logits for op in _OPS}
FILLS |= {("moe_route", "bias"): _bias, ("moe_route_backward", "ids"): _ids, ("moe_losses", "counts"): _counts,
          ("moe_losses_backward", "counts"): _counts}
CASES: dict[str, tuple[str, ...]] = {
    "moe_route": ("moe_route logits=bf16[9,4] top_k=2",
                  "moe_route logits=f32[5,256] bias=f32[256] top_k=8 scoring=sigmoid groups=8 top_groups=4 scaling_factor=2.5",
                  "moe_route logits=f32[0,16] top_k=2", "moe_route logits=f16[7,128] top_k=8 renormalize=False capacity=1",
                  "moe_route logits=f32[4000,4] top_k=3 capacity=2500",
                  "moe_route logits=f32[3,1000] top_k=32 scoring=sigmoid renormalize=False"),
    "moe_route_backward": ("moe_route_backward dweights=f32[9,2] logits=bf16[9,40] ids=s32[9,2]",
                           "moe_route_backward dweights=f32[5,8] logits=f32[5,256] ids=s32[5,8] scoring=sigmoid scaling_factor=2.5",
                           "moe_route_backward dweights=f32[0,8] logits=f32[0,16] ids=s32[0,8]"),
    "moe_losses": ("moe_losses logits=bf16[300,40] counts=s32[40]", "moe_losses logits=f32[0,8] counts=s32[8]",
                   "moe_losses logits=f32[7,8] counts=s32[8] scoring=sigmoid"),
    "moe_losses_backward": ("moe_losses_backward dbalance=f32[] dz=f32[] logits=f16[9,40] counts=s32[40]",
                            "moe_losses_backward dbalance=f32[] dz=f32[] logits=f32[9,8] counts=s32[8] scoring=sigmoid"),
}
