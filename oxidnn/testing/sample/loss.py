"""Softmax and cross-entropy problems: odd widths, any axis, plain, strided and misaligned tensors, every attribute."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64, S32, S64
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.loss import CrossEntropyProblem
from ...tensor import TensorDesc
from . import Fill, Sampler
from .pool import view

_FLOATS = (F32, F32, F16, BF16, F64)


def _columns(rng: np.random.Generator, size: str) -> int:
    return int(rng.choice([1, 2, 3, 8, 10, 31, 32, 33, 64, 100, 257, 512] if size == "tiny" else [1, 5, 70, 513, 777, 1000, 1025, 5003]))


def _softmax(name: str, rng: np.random.Generator, size: str) -> Problem:
    rank = int(rng.integers(1, 5))
    shape = [int(v) for v in rng.integers(1, 5 if size == "tiny" else 9, rank)]
    axis = int(rng.integers(rank)) if rng.random() < 0.5 else rank - 1
    shape[axis] = _columns(rng, size)
    if rng.random() < 0.04 and rank > 1:
        shape[axis - 1] = 0
    dtype = _FLOATS[int(rng.integers(len(_FLOATS)))]

    def draw() -> TensorDesc:
        return view(rng, dtype, tuple(shape)) if rank > 2 or rng.random() < 0.5 else TensorDesc.packed(dtype, tuple(shape))

    attrs: dict[str, Any] = {"axis": axis - rank if rng.random() < 0.5 else axis, "log": bool(rng.random() < 0.4)}
    inputs = ("x",) if name == "softmax" else ("dy", "y")
    tensors = {n: draw() for n in inputs}
    if rng.random() < 0.5:
        tensors["y" if name == "softmax" else "dx"] = draw()
    return OPS[name].make(tensors, attrs, Policy())


def _cross_entropy(name: str, rng: np.random.Generator, size: str) -> Problem:
    spatial = tuple(int(v) for v in rng.integers(1, 6, int(rng.choice([0, 0, 1, 2]))))
    batch = int(rng.integers(0 if rng.random() < 0.1 else 1, 40 if not spatial else 6))
    shape = (batch, _columns(rng, size), *spatial)
    rows = (batch, *spatial)
    dtype = _FLOATS[int(rng.integers(len(_FLOATS)))]
    attrs: dict[str, Any] = {"reduction": str(rng.choice(["none", "mean", "sum"])),
                             "ignore_index": int(rng.choice([-100, -100, 0, 1]))}
    tensors = {"logits": view(rng, dtype, shape)}
    indices = name.startswith("nll") or rng.random() >= 0.3
    if not name.startswith("nll"):
        attrs["label_smoothing"] = float(rng.choice([0.0, 0.0, 0.1, 0.25]))
    tensors["target"] = view(rng, dtype, shape) if not indices else view(rng, S64 if rng.random() < 0.6 else S32, rows)
    if rng.random() < 0.4:
        tensors["weight"] = view(rng, dtype if rng.random() < 0.7 else F32, shape[1:2])
    if name.endswith("_backward"):
        if rng.random() < 0.5:
            tensors["d_loss"] = view(rng, dtype, rows if attrs["reduction"] == "none" else ())
        if rng.random() < 0.5:
            tensors["d_logits"] = view(rng, dtype, shape)
    return OPS[name].make(tensors, attrs, Policy())


def _target(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Class indices with some rows ignored and, in a few problems, one outside the classes; or probabilities that sum to 1."""
    assert isinstance(problem, CrossEntropyProblem)
    shape, classes = problem.desc("target").shape, problem.desc("logits").shape[1]
    if problem.is_probability:
        p = rng.exponential(size=shape)
        return p / p.sum(1, keepdims=True)
    target = rng.integers(0, classes, shape)
    target = np.where(rng.random(shape) < 0.15, problem.ignore_index, target)
    if target.size and rng.random() < 0.15:
        target.flat[int(rng.integers(target.size))] = int(rng.choice([-1, classes, classes + 3]))
    return target


def _logits(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Normal values; in some problems far from zero, where only differences matter."""
    desc = problem.operands[0].desc
    if getattr(problem, "is_log", False) and isinstance(problem, CrossEntropyProblem):
        return -rng.exponential(2.0, desc.shape)
    values = rng.standard_normal(desc.shape) * float(rng.choice([1.0, 3.0]))
    return values + float(rng.choice([0.0, 0.0, 1e4, -1e4]))


def _weight(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0.2, 2.0, problem.desc("weight").shape)


def _softmax_result(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Probabilities over the axis, or their logarithms."""
    axis, is_log = getattr(problem, "axis", 0), getattr(problem, "is_log", False)
    p = rng.exponential(size=problem.desc("y").shape) + 1e-3
    p = p / p.sum(axis, keepdims=True)
    return np.log(p) if is_log else p


SAMPLES: dict[str, Sampler] = {n: partial(_softmax, n) for n in ("softmax", "softmax_backward")}
_ROWS = ("cross_entropy", "cross_entropy_backward", "nll", "nll_backward")
SAMPLES |= {n: partial(_cross_entropy, n) for n in _ROWS}

FILLS: dict[tuple[str, str], Fill] = {("softmax", "x"): _logits, ("softmax_backward", "y"): _softmax_result}
for _op in _ROWS:
    FILLS |= {(_op, "logits"): _logits, (_op, "target"): _target, (_op, "weight"): _weight}

CASES: dict[str, tuple[str, ...]] = {
    "softmax": (
        "softmax x=f32[2,70]nchw", "softmax x=f64[2,513]nchw", "softmax x=f16[1,777]nchw", "softmax x=f32[2,1025]nchw log=True",
        "softmax x=f64[1,999]nchw log=True", "softmax x=bf16[3,1024]nchw", "softmax x=f32[5,1]nchw", "softmax x=f32[2,7,3]nchw axis=1",
        "softmax x=bf16[2,21,6,7]nchw axis=1 log=True", "softmax x=f16[2,16,3,5]nhwc axis=1", "softmax x=f32[1,20000]nchw",
        "softmax x=bf16[1024](1)@2", "softmax x=f32[0,10]nchw",
    ),
    "softmax_backward": (
        "softmax_backward dy=f32[2,70]nchw y=f32[2,70]nchw", "softmax_backward dy=bf16[3,1024]nchw y=bf16[3,1024]nchw log=True",
        "softmax_backward dy=f64[2,7,3]nchw y=f64[2,7,3]nchw axis=1", "softmax_backward dy=f16[1,9000]nchw y=f16[1,9000]nchw",
    ),
    "cross_entropy": (
        "cross_entropy logits=f32[2,2]nchw target=s64[2]nchw label_smoothing=0.2",
        "cross_entropy logits=f32[33,10]nchw target=s32[33]nchw", "cross_entropy logits=bf16[5,1000]nchw target=s64[5]nchw reduction=none",
        "cross_entropy logits=f32[2,5,3,4]nchw target=s64[2,3,4]nchw weight=f32[5]nchw",
        "cross_entropy logits=f16[2,64,3]nhwc target=s64[2,3]nchw label_smoothing=0.1 weight=f32[64]nchw reduction=sum",
        "cross_entropy logits=f64[4,7]nchw target=f64[4,7]nchw",
        "cross_entropy logits=f32[3,16]nchw target=f32[3,16]nchw weight=f32[16]nchw label_smoothing=0.1",
        "cross_entropy logits=f32[2,20000]nchw target=s64[2]nchw", "cross_entropy logits=f32[0,10]nchw target=s64[0]nchw",
        "cross_entropy logits=f32[0,10]nchw target=s64[0]nchw reduction=sum", "cross_entropy logits=f32[5000,2]nchw target=s32[5000]nchw",
    ),
    "cross_entropy_backward": (
        "cross_entropy_backward logits=f32[33,10]nchw target=s32[33]nchw",
        "cross_entropy_backward logits=bf16[5,1000]nchw target=s64[5]nchw d_loss=bf16[5]nchw reduction=none",
        "cross_entropy_backward logits=f32[2,5,3,4]nchw target=s64[2,3,4]nchw weight=f32[5]nchw d_loss=f32[]nchw",
        "cross_entropy_backward logits=f16[2,64,3]nhwc target=s64[2,3]nchw label_smoothing=0.1 weight=f32[64]nchw reduction=sum",
        "cross_entropy_backward logits=f64[4,7]nchw target=f64[4,7]nchw",
        "cross_entropy_backward logits=f32[3,16]nchw target=f32[3,16]nchw weight=f32[16]nchw label_smoothing=0.1",
        "cross_entropy_backward logits=f32[2,20000]nchw target=s64[2]nchw",
        "cross_entropy_backward logits=f32[5000,2]nchw target=s32[5000]nchw",
    ),
    "nll": (
        "nll logits=f32[33,10]nchw target=s32[33]nchw", "nll logits=bf16[5,1000]nchw target=s64[5]nchw reduction=none",
        "nll logits=f32[2,5,3,4]nchw target=s64[2,3,4]nchw weight=f32[5]nchw", "nll logits=f32[0,10]nchw target=s64[0]nchw",
        "nll logits=f64[2,3]nchw target=s64[2]nchw reduction=sum ignore_index=1",
    ),
    "nll_backward": (
        "nll_backward logits=f32[33,10]nchw target=s32[33]nchw",
        "nll_backward logits=bf16[5,1000]nchw target=s64[5]nchw d_loss=bf16[5]nchw reduction=none",
        "nll_backward logits=f32[2,5,3,4]nchw target=s64[2,3,4]nchw weight=f32[5]nchw d_loss=f32[]nchw",
        "nll_backward logits=f16[2,3000]nchw target=s64[2]nchw reduction=sum",
    ),
}
