"""Scan problems: rows of one element to several tiles, other axes, every type and direction; ties, NaN, zeros among factors."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.scan import ScanProblem
from ..reference.scan import cummax
from . import Fill, Sampler
from .pointwise import FLOATS, INTEGERS, view

SUMS = ("cumsum", "cumprod")


def _shape(rng: np.random.Generator, size: str) -> tuple[tuple[int, ...], int]:
    """A shape and an axis, of few to many steps."""
    rank = int(rng.integers(1, 5))
    axis = int(rng.integers(rank))
    budget = 6000 if size == "tiny" else 400_000
    shape = [1] * rank
    draw = rng.random()
    longest = 40 if draw < 0.4 else 600 if draw < 0.8 else 5000 if size == "tiny" else 60_000
    shape[axis] = int(rng.integers(1, longest + 1)) if draw < 0.7 else int(rng.choice([8, 64, 256, 1024, 2048]))
    for i in rng.permutation(rank):
        if i != axis:
            room = max(1, budget // int(np.prod(shape)))
            shape[i] = min(room, int(rng.integers(1, 20) if rng.random() < 0.7 else rng.choice([8, 16, 32, 64])))
    if rng.random() < 0.03:
        shape[int(rng.integers(rank))] = 0
    return tuple(shape), axis


def _attrs(rng: np.random.Generator, op: str, rank: int, axis: int) -> dict[str, Any]:
    attrs: dict[str, Any] = {"axis": axis - rank if rng.random() < 0.3 else axis, "reverse": bool(rng.random() < 0.4)}
    if "cummax" not in op and "cummin" not in op:
        attrs["exclusive"] = bool(rng.random() < 0.3)
    return attrs


def _draw(op: str, rng: np.random.Generator, size: str) -> Problem:
    shape, axis = _shape(rng, size)
    attrs = _attrs(rng, op, len(shape), axis)
    kinds = FLOATS if rng.random() < 0.7 or op not in (*SUMS, "cummax", "cummin") else (*INTEGERS, "bool")
    kind = dtype(str(rng.choice(kinds)))
    tensors = {name: view(rng, kind if rng.random() < 0.8 else dtype(str(rng.choice(kinds))), shape)
               for name in OPS[op].inputs if name != "indices"}
    if "indices" in OPS[op].inputs:
        tensors["indices"] = view(rng, dtype(str(rng.choice(["s64", "s32"]))), shape, True)  # repeated ones would be no cummax's
    if op in SUMS and rng.random() < 0.3:
        attrs["dtype"] = str(rng.choice(["f32", "f64"] if kind.is_float else ["s32", "s64", "f32", "f64"]))
    problem = OPS[op].make(tensors, attrs, Policy())
    if rng.random() < 0.4:
        outputs = {o.name: view(rng, o.desc.dtype if o.name != "indices" else dtype(str(rng.choice(["s64", "s32"]))), shape, True)
                   for o in problem.outputs}
        problem = OPS[op].make(tensors | outputs, attrs, Policy())
    return problem


def _factors(rng: np.random.Generator, problem: Problem, name: str) -> np.ndarray:
    """Products stay in range: factors near 1, of integers few 2s; for gradients some zeros."""
    assert isinstance(problem, ScanProblem)
    x = problem.desc(name)
    if not x.dtype.is_float:
        if x.dtype.kind == "bool":
            return rng.random(x.shape) < 0.99
        sign = rng.choice([-1, 1], x.shape) if x.dtype.kind == "int" else 1
        return sign * np.where(rng.random(x.shape) < min(1.0, 5 / max(1, problem.extent)), 2, 1)
    values = np.exp2(rng.uniform(-1, 1, x.shape) / np.sqrt(max(1, problem.extent))) * rng.choice([-1, 1], x.shape)
    if problem.is_backward and rng.random() < 0.5:
        values = np.where(rng.random(x.shape) < 1.5 / max(1, problem.extent), 0.0, values)
    return values


def _extremes(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Ties, NaN and infinities."""
    x = problem.desc("x")
    if not x.dtype.is_float:
        return rng.integers(0 if x.dtype.kind in ("uint", "bool") else -8, 2 if x.dtype.kind == "bool" else 9, x.shape)
    values = rng.standard_normal(x.shape)
    values = np.round(values * 2) if rng.random() < 0.5 else values
    if rng.random() < 0.4:
        odd = rng.random(x.shape) < 3 / max(1, x.numel)
        values = np.where(odd, rng.choice([np.nan, np.inf, -np.inf], x.shape), values)
    return np.full(x.shape, -np.inf) if rng.random() < 0.05 else values


def _indices(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Those of a cummax or cummin."""
    assert isinstance(problem, ScanProblem)
    x = np.round(rng.standard_normal(problem.desc("indices").shape) * 3)
    x = np.moveaxis(x, problem.axis, 0)
    _, found = cummax(x[::-1] if problem.reverse else x, bool(rng.random() < 0.5))
    found = problem.extent - 1 - found[::-1] if problem.reverse else found
    return np.moveaxis(found, 0, problem.axis)


def _logits(rng: np.random.Generator, problem: Problem, name: str) -> np.ndarray:
    values = rng.standard_normal(problem.desc(name).shape) * (3 if problem.op == "logcumsumexp" else 1)
    if rng.random() < 0.3:
        values = np.where(rng.random(values.shape) < 0.2, -np.inf, values)
    return values


SAMPLES: dict[str, Sampler] = {op: partial(_draw, op) for op in (
    "cumsum", "cumprod", "logcumsumexp", "cummax", "cummin", "cumprod_backward", "cummax_backward", "logcumsumexp_backward")}
FILLS: dict[tuple[str, str], Fill] = {
    ("cumprod", "x"): partial(_factors, name="x"), ("cumprod_backward", "x"): partial(_factors, name="x"), ("cummax", "x"): _extremes,
    ("cummin", "x"): _extremes, ("cummax_backward", "indices"): _indices, ("logcumsumexp", "x"): partial(_logits, name="x"),
    ("logcumsumexp_backward", "x"): partial(_logits, name="x"), ("logcumsumexp_backward", "y"): partial(_logits, name="y"),
}
CASES: dict[str, tuple[str, ...]] = {
    "cumsum": ("cumsum x=f32[3,1000]nchw", "cumsum x=f16[5,4099]nchw reverse=True", "cumsum x=bf16[37,40]nchw axis=0 exclusive=True",
               "cumsum x=f64[2,9,16]nchw axis=1 reverse=True exclusive=True", "cumsum x=f32[20001]nchw", "cumsum x=s8[3,300]nchw",
               "cumsum x=s32[9,33]nchw dtype=s32", "cumsum x=bool[600]nchw dtype=f32", "cumsum x=u32[5,8](1,5)",
               "cumsum x=f32[1000,1]nchw axis=0",
               "cumsum x=f32[0,3]nchw axis=0", "cumsum x=f32[3000,12]nchw axis=0", "cumsum x=bf16[2,8,5,7]nhwc axis=1",
               "cumsum x=f32[1]nchw"),
    "cumprod": ("cumprod x=f32[3,1000]nchw", "cumprod x=s64[4,70]nchw reverse=True", "cumprod x=f16[40,16]nchw axis=0 exclusive=True"),
    "logcumsumexp": ("logcumsumexp x=f32[3,1000]nchw", "logcumsumexp x=bf16[40,16]nchw axis=0 reverse=True",
                     "logcumsumexp x=f64[5,50]nchw exclusive=True"),
    "cummax": ("cummax x=f32[3,1000]nchw", "cummax x=s16[5,300]nchw reverse=True", "cummax x=f16[70,24]nchw axis=0",
               "cummax x=f32[7,9]nchw y=f32[7,9](1,7) indices=s32[7,9]nchw", "cummax x=bool[40]nchw", "cummax x=u32[5,40]nchw"),
    "cummin": ("cummin x=f64[3,500]nchw", "cummin x=u8[5,300]nchw reverse=True", "cummin x=bf16[70,24]nchw axis=0",
               "cummin x=f32[4,20001]nchw"),
    "cumprod_backward": ("cumprod_backward dy=f32[3,500]nchw x=f32[3,500]nchw",
                         "cumprod_backward dy=f16[40,16]nchw x=f16[40,16]nchw axis=0 reverse=True",
                         "cumprod_backward dy=f64[5,70]nchw x=f64[5,70]nchw exclusive=True",
                         "cumprod_backward dy=f32[2,9000]nchw x=f32[2,9000]nchw"),
    "cummax_backward": ("cummax_backward dy=f32[3,1000]nchw indices=s64[3,1000]nchw",
                        "cummax_backward dy=bf16[40,16]nchw indices=s32[40,16]nchw axis=0 reverse=True"),
    "logcumsumexp_backward": ("logcumsumexp_backward dy=f32[3,300]nchw x=f32[3,300]nchw y=f32[3,300]nchw",
                              "logcumsumexp_backward dy=f16[40,16]nchw x=f16[40,16]nchw y=f16[40,16]nchw axis=0 reverse=True",
                              "logcumsumexp_backward dy=f64[70]nchw x=f64[70]nchw y=f64[70]nchw exclusive=True"),
}
