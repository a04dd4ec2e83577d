"""Reduction problems: every kind and type, any axes, any layout, and sizes that need one thread, one warp, a CTA or several."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.reduce import GRADIENTS, KINDS, NEED_ELEMENTS, ReduceGradientProblem, ReduceProblem, default_dtype
from . import Fill, Sampler
from .pointwise import FLOATS, view

TYPES = ("f32", "f16", "bf16", "f64", "f32", "f16", "bf16", "s8", "u8", "s16", "u16", "s32", "u32", "s64", "bool")


def sample_reduce(rng: np.random.Generator, size: str) -> Problem:
    kind, x_type = str(rng.choice(KINDS)), dtype(str(rng.choice(TYPES)))
    rank = int(rng.integers(1, 6))
    budget = 30_000 if size == "tiny" else 1_000_000
    shape = [1] * rank
    for i in rng.permutation(rank):
        room = budget // int(np.prod(shape))
        draw = rng.random()
        wanted = rng.integers(1, 10) if draw < 0.6 else 8 * rng.integers(1, 10) if draw < 0.8 else rng.integers(1, 3000)
        shape[i] = min(room, int(wanted))
    if rng.random() < 0.04 and kind not in NEED_ELEMENTS:
        shape[int(rng.integers(rank))] = 0
    axes = tuple(int(a) for a in np.flatnonzero(rng.random(rank) < 0.5))
    attrs: dict[str, Any] = {"op": kind, "axes": None if rng.random() < 0.15 else axes, "keepdims": bool(rng.random() < 0.3)}
    if kind in ("var", "std") and rng.random() < 0.5:
        attrs["correction"] = 1
    if kind in ("max", "min", "amax") and rng.random() < 0.3:
        attrs["return_indices"] = True
    x = view(rng, x_type, tuple(shape))
    problem = OPS["reduce"].make({"x": x}, attrs, Policy())
    if rng.random() < 0.3:
        y = problem.desc("y")
        chosen = y.dtype
        if kind in ("argmax", "argmin", "count_nonzero"):
            chosen = dtype(str(rng.choice(["s32", "u32"])))
        elif y.dtype.is_float and default_dtype(kind, x_type).is_float and rng.random() < 0.5:
            chosen = dtype(str(rng.choice(["f32", "f64"])))
        tensors = {"x": x, "y": view(rng, chosen, y.shape, True)}
        if "return_indices" in attrs:
            tensors["indices"] = view(rng, dtype(str(rng.choice(["s64", "s32", "u32"]))), y.shape, True)
        problem = OPS["reduce"].make(tensors, attrs, Policy())
    return problem


def _fill(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Ties for argmax, some NaN and infinities where the rule for them matters, factors near 1 for products."""
    assert isinstance(problem, ReduceProblem)
    x = problem.desc("x")
    if not x.dtype.is_float:
        if x.dtype.kind == "bool":
            return rng.integers(0, 2, x.shape)
        if problem.kind in ("prod", "mul_no_zeros"):  # stays within 64 bits for any number of factors
            return np.where(rng.random(x.shape) < min(1.0, 20 / max(1, problem.num_reduced)), 2, 1)
        return rng.integers(0 if x.dtype.kind == "uint" else -8, 9, x.shape)
    values = rng.standard_normal(x.shape)
    if problem.kind in ("prod", "mul_no_zeros"):
        values = np.sign(values) * np.exp2(rng.uniform(-1, 1, x.shape) / np.sqrt(max(1, problem.num_reduced)))
        if problem.kind == "mul_no_zeros":
            values = np.where(rng.random(x.shape) < 0.3, 0, values)
    elif problem.kind in ("argmax", "argmin", "max", "min"):
        values = np.round(values * 2) if rng.random() < 0.5 else values
        if rng.random() < 0.4:
            odd = rng.random(x.shape) < 2 / max(1, problem.num_reduced)
            values = np.where(odd, rng.choice([np.nan, np.inf, -np.inf]), values)
    elif problem.kind in ("any", "all", "count_nonzero"):
        values = np.where(rng.random(x.shape) < 1 / max(1, problem.num_reduced), 0.0, 1.0)
        values = 1 - values if problem.kind == "any" else values
    elif problem.kind == "logsumexp":
        values = values * float(rng.choice([1, 30, 1000])) if x.dtype.name != "f16" else values * 20
    return values


def sample_reduce_to(rng: np.random.Generator, size: str) -> Problem:
    kind, x_type = str(rng.choice(["sum", "max", "min", "prod"])), dtype(str(rng.choice(TYPES)))
    rank = int(rng.integers(1, 5))
    shape = tuple(int(n) for n in rng.integers(1, {1: 900, 2: 60, 3: 14, 4: 8}[rank] * (1 if size == "tiny" else 3), rank))
    own = tuple(1 if rng.random() < 0.5 else n for n in shape)[int(rng.integers(rank + 1)):]
    problem = OPS["reduce_to"].make({"x": view(rng, x_type, shape)}, {"shape": own, "op": kind}, Policy())
    if rng.random() < 0.3:
        tensors = {"x": problem.desc("x"), "y": view(rng, problem.desc("y").dtype, own, True)}
        problem = OPS["reduce_to"].make(tensors, {"shape": own, "op": kind}, Policy())
    return problem


def sample_trace(rng: np.random.Generator, size: str) -> Problem:
    rank = int(rng.integers(2, 5))
    shape = tuple(int(n) for n in rng.integers(1, {2: 90, 3: 14, 4: 8}[rank] * (1 if size == "tiny" else 4), rank))
    x = view(rng, dtype(str(rng.choice(TYPES))), shape)
    return OPS["trace"].make({"x": x}, {"diagonal": int(rng.integers(-5, 6))}, Policy())


def sample_reduce_backward(rng: np.random.Generator, size: str) -> Problem:
    kind, x_type = str(rng.choice(list(GRADIENTS))), dtype(str(rng.choice(FLOATS)))
    rank = int(rng.integers(1, 5))
    most = {1: 900, 2: 60, 3: 14, 4: 8}[rank] * (1 if size == "tiny" else 4)
    shape = [int(n) for n in rng.integers(1, most + 1, rank)]
    if rng.random() < 0.3:
        shape[-1] = max(8, shape[-1] // 8 * 8)
    if rng.random() < 0.04:
        shape[int(rng.integers(rank))] = 0
    axes = tuple(int(a) for a in np.flatnonzero(rng.random(rank) < 0.6))
    kept = tuple(1 if a in axes else n for a, n in enumerate(shape))
    shapes = kept, tuple(n for a, n in enumerate(shape) if a not in axes)
    attrs: dict[str, Any] = {"op": kind, "axes": None if len(axes) == rank and rng.random() < 0.5 else axes}
    if kind in ("var", "std") and rng.random() < 0.5:
        attrs["correction"] = 1
    others = [x_type if rng.random() < 0.7 else dtype(str(rng.choice(FLOATS))) for _ in range(2)]
    tensors = {"dy": view(rng, others[0], shapes[int(rng.integers(2))]), "x": view(rng, x_type, tuple(shape))}
    if rng.random() < 0.3:
        tensors["y"] = view(rng, others[1], shapes[int(rng.integers(2))])
    if rng.random() < 0.3:
        tensors["dx"] = view(rng, x_type, tuple(shape), True)
    return OPS["reduce_backward"].make(tensors, attrs, Policy())


def _fill_gradient(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Ties, zeros for the kinds that count them, and factors near 1."""
    assert isinstance(problem, ReduceGradientProblem)
    values = rng.standard_normal(problem.desc("x").shape)
    count = max(1, int(np.prod([problem.desc("x").shape[a] for a in problem.axes])))
    if problem.kind in ("max", "min", "amax"):
        values = np.round(values * 2)
    elif problem.kind in ("prod", "mul_no_zeros"):
        values = np.sign(values) * np.exp2(rng.uniform(-1, 1, values.shape) / np.sqrt(count))
        values = np.where(rng.random(values.shape) < min(0.3, 1 / count), 0, values)
    return values


SAMPLES: dict[str, Sampler] = {"reduce": sample_reduce, "reduce_to": sample_reduce_to, "trace": sample_trace,
                               "reduce_backward": sample_reduce_backward}
CASES: dict[str, tuple[str, ...]] = {
    "reduce_to": ("reduce_to x=f32[4,6,5,7]nchw shape=(6,1,7)", "reduce_to x=s8[5,300]nchw shape=() op=max",
                  "reduce_to x=f16[9,33]nchw shape=(9,33) op=prod", "reduce_to x=bf16[2,8,3,5]nhwc shape=(1,8,1,1)"),
    "trace": ("trace x=f32[9,9]nchw", "trace x=s32[3,7,12](84,1,7) diagonal=-2", "trace x=f64[5,4]nchw diagonal=9",
              "trace x=f16[2,300,400]"),
    "reduce_backward": (
        "reduce_backward dy=f32[6] x=f32[4,6,5,7]nchw op=sum axes=(0,2,3)",
        "reduce_backward dy=bf16[1,64,1,1]nchw x=bf16[4,64,3,5]nhwc op=mean axes=(0,2,3)",
        "reduce_backward dy=f16[3] x=f16[3,1024]nchw op=max axes=(1,)",
        "reduce_backward dy=f32[] x=f32[2003]nchw y=f32[]nchw op=norm2",
        "reduce_backward dy=f32[33] x=f64[17,33]nchw op=prod axes=(0,)",
        "reduce_backward dy=f64[9] x=f64[100,9]nchw op=std axes=(0,) correction=1",
        "reduce_backward dy=f32[3] x=f32[3,0]nchw op=logsumexp axes=(1,)",
    ),
    "reduce": (
        "reduce x=f32[4,6,5,7]nchw op=sum axes=(0,2,3)", "reduce x=bf16[270,16400]nchw op=sum axes=(1,)",
        "reduce x=f32[270,8200]nchw op=argmax axes=(1,)",
        "reduce x=bf16[4,64,3,5]nhwc op=sum axes=(0,2,3)",
        "reduce x=f16[3,1024]nchw op=max axes=(1,)",
        "reduce x=f32[20003]nchw op=norm2",
        "reduce x=f32[17,33]nchw op=argmax axes=(0,) keepdims=True",
        "reduce x=s8[5,300]nchw op=sum axes=(1,)",
        "reduce x=f32[3,0]nchw op=mean axes=(1,)",
        "reduce x=f32[0,3]nchw op=sum axes=(1,)",
        "reduce x=f32[2,3,4]nchw op=logsumexp axes=()",
        "reduce x=bool[9,40]nchw op=any axes=(1,)",
        "reduce x=f64[100,9]nchw op=var axes=(0,) correction=1",
        "reduce x=f16[9,300]nchw op=max axes=(1,) return_indices=True", "reduce x=f32[70,64]nchw op=min axes=(0,) return_indices=True",
        "reduce x=bf16[40003]nchw op=amax return_indices=True",
    ),
}
FILLS: dict[tuple[str, str], Fill] = {("reduce", "x"): _fill, ("reduce_to", "x"): _fill, ("reduce_backward", "x"): _fill_gradient}
