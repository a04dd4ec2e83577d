"""Softmax and cross-entropy problems: odd widths, any axis, plain, strided and misaligned tensors, every attribute."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, BOOL, E4M3, E5M2, F16, F32, F64, S8, S32, S64, DType
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.loss import CrossEntropyProblem, SoftmaxProblem
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

    def draw(kind: DType = dtype) -> TensorDesc:
        return view(rng, kind, tuple(shape)) if rank > 2 or rng.random() < 0.5 else TensorDesc.packed(kind, tuple(shape))

    attrs: dict[str, Any] = {"axis": axis - rank if rng.random() < 0.5 else axis, "log": bool(rng.random() < 0.4)}
    is_forward = not name.endswith("_backward")
    tensors = {n: draw() for n in (("x",) if is_forward else ("dy", "y"))}
    result = dtype
    if name == "softmax":
        if rng.random() < 0.2:
            result = (F32, BF16, E4M3, E5M2, S8)[int(rng.integers(5))]
            attrs["out_dtype"] = result.name
        attrs["return_lse"] = bool(rng.random() < 0.3)
    if rng.random() < 0.5:
        tensors["y" if is_forward else "dx"] = draw(result)
    if name in ("hardmax", "gumbel_softmax"):
        del attrs["log"]
    if name == "gumbel_softmax":
        attrs |= {"temperature": float(rng.choice([1.0, 0.5, 2.0])), "hard": bool(rng.random() < 0.5)}
    elif name != "hardmax" and rng.random() < 0.4:
        attrs["scale"] = float(rng.choice([0.125, -1.0, 3.7]))
    if name == "softmax_backward":
        attrs["masked"] = bool(rng.random() < 0.3)
    if name in ("softmax", "gumbel_softmax") and rng.random() < 0.5:
        extents = tuple(1 if rng.random() < 0.3 else n for n in shape[int(rng.integers(rank)):])
        tensors["mask"] = view(rng, (BOOL, BOOL, dtype, F32)[int(rng.integers(4))], extents)
    if name == "softmax" and rank > 1 and axis == rank - 1 and rng.random() < 0.4:
        attrs["diagonal"] = int(rng.choice([-2, 0, 1, shape[-1] - shape[-2]]))
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
    assert isinstance(problem, SoftmaxProblem)
    p = rng.exponential(size=problem.desc("y").shape) + 1e-3
    p = p / p.sum(problem.axis, keepdims=True)
    y = np.log(p) if problem.is_log else p
    return np.where(rng.random(y.shape) < 0.2, -np.inf, y) if problem.masked and problem.is_log else y


def _mask(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Some rows without a single element; of an added mask, numbers and -inf."""
    desc = problem.desc("mask")
    kept = rng.random(desc.shape) < 0.7
    if desc.rank:
        kept &= rng.random((*desc.shape[:-1], 1)) < 0.9
    return kept if desc.dtype is BOOL else np.where(kept, rng.standard_normal(desc.shape), -np.inf)


def _distinct(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Logits of few values, so that there are ties."""
    return np.round(rng.standard_normal(problem.desc("x").shape) * 2) / 2


SAMPLES: dict[str, Sampler] = {n: partial(_softmax, n) for n in ("softmax", "softmax_backward", "gumbel_softmax", "hardmax")}
_ROWS = ("cross_entropy", "cross_entropy_backward", "nll", "nll_backward")
SAMPLES |= {n: partial(_cross_entropy, n) for n in _ROWS}

FILLS: dict[tuple[str, str], Fill] = {("softmax", "x"): _logits, ("softmax_backward", "y"): _softmax_result, ("hardmax", "x"): _distinct,
                                      ("softmax", "mask"): _mask, ("gumbel_softmax", "mask"): _mask}
for _op in _ROWS:
    FILLS |= {(_op, "logits"): _logits, (_op, "target"): _target, (_op, "weight"): _weight}

CASES: dict[str, tuple[str, ...]] = {
    "softmax": (
        "softmax x=f32[2,70]nchw", "softmax x=f64[2,513]nchw", "softmax x=f16[1,777]nchw", "softmax x=f32[2,1025]nchw log=True",
        "softmax x=f64[1,999]nchw log=True", "softmax x=bf16[3,1024]nchw", "softmax x=f32[5,1]nchw", "softmax x=f32[2,7,3]nchw axis=1",
        "softmax x=bf16[2,21,6,7]nchw axis=1 log=True", "softmax x=f16[2,16,3,5]nhwc axis=1", "softmax x=f32[1,20000]nchw",
        "softmax x=bf16[1024](1)@2", "softmax x=f32[0,10]nchw", "softmax x=bf16[2,3,16,64]nchw mask=bool[16,64]nchw scale=0.125",
        "softmax x=f32[2,3,5,33]nchw mask=f32[2,1,1,33]nchw diagonal=0 log=True", "softmax x=f16[2,40,40]nchw diagonal=0 scale=0.3",
        "softmax x=f32[3,9000]nchw mask=bool[9000]nchw", "softmax x=f64[2,1100]nchw mask=bool[2,1]nchw scale=-1.0",
        "softmax x=bf16[2,20000]nchw mask=bf16[20000]nchw diagonal=15000 scale=2.0", "softmax x=f32[2,7,3]nchw axis=1 mask=bool[7,1]nchw",
        "softmax x=f32[3,1024]nchw out_dtype=e4m3 return_lse=True", "softmax x=bf16[2,20000]nchw mask=bool[20000]nchw return_lse=True",
        "softmax x=f32[5,33]nchw log=True out_dtype=s8 return_lse=True",
    ),
    "gumbel_softmax": (
        "gumbel_softmax x=f32[5,64]nchw", "gumbel_softmax x=bf16[3,24]nchw hard=True temperature=0.5",
        "gumbel_softmax x=f64[2,7,3]nchw axis=1 hard=True", "gumbel_softmax x=f32[2,9001]nchw temperature=0.1",
        "gumbel_softmax x=f16[2,6000]nchw hard=True mask=bool[6000]nchw", "gumbel_softmax x=f32[0,4]nchw hard=True",
        "gumbel_softmax x=f32[6,4](1,6)",
    ),
    "hardmax": ("hardmax x=f32[3,40]nchw", "hardmax x=f16[2,9,5]nchw axis=1", "hardmax x=bf16[2,6000]nchw", "hardmax x=f64[2,20000]nchw"),
    "softmax_backward": (
        "softmax_backward dy=f32[2,70]nchw y=f32[2,70]nchw", "softmax_backward dy=bf16[3,1024]nchw y=bf16[3,1024]nchw log=True",
        "softmax_backward dy=f32[2,70]nchw y=f32[2,70]nchw scale=0.5 log=True masked=True",
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
        "cross_entropy_backward logits=f16[70000,2]nchw target=s64[70000]nchw weight=f32[2]nchw",
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
