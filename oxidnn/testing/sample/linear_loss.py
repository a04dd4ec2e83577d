"""Cross-entropy of linear layers: any number of rows, features and classes, strided tensors, every attribute, sums in wider outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64, S32, S64
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.linear_loss import LinearCrossEntropyProblem
from . import Fill, Sampler
from .pointwise import view


def _linear(op: str, rng: np.random.Generator, size: str) -> Problem:
    top = 20 if size == "tiny" else 200
    rows, features, classes = (int(rng.integers(1, top)) for _ in range(3))
    if rng.random() < 0.4:  # what tensor cores take
        features, classes = 8 * int(rng.integers(1, 4)), 8 * int(rng.integers(1, 6))
    kind = (F32, F64, F16, BF16)[int(rng.integers(4))]
    wide = F64 if kind is F64 else F32
    tensors = {"x": view(rng, kind, (rows, features)), "w": view(rng, kind, (classes, features)),
               "target": view(rng, S64 if rng.random() < 0.6 else S32, (rows,))}
    if rng.random() < 0.4:
        tensors["bias"] = view(rng, kind if rng.random() < 0.6 else F32, (classes,))
    if rng.random() < 0.3:
        tensors["weight"] = view(rng, F32, (classes,))
    attrs: dict[str, Any] = {"reduction": str(rng.choice(["none", "mean", "sum"])), "ignore_index": int(rng.choice([-100, -100, 0])),
                             "label_smoothing": float(rng.choice([0.0, 0.0, 0.1]))}
    wants_gradients = True
    if op == "linear_cross_entropy":
        attrs["return_gradients"] = wants_gradients = bool(rng.random() < 0.5)
        if rng.random() < 0.3:
            tensors["loss"] = view(rng, wide, (rows,) if attrs["reduction"] == "none" else (), True)
    elif rng.random() < 0.5:
        tensors["d_loss"] = view(rng, kind, (rows,) if attrs["reduction"] == "none" else ())
    if wants_gradients and rng.random() < 0.4:
        tensors["dw"] = view(rng, wide if rng.random() < 0.5 else kind, (classes, features), True)
        tensors["dx"] = view(rng, wide if rng.random() < 0.5 else kind, (rows, features), True)
    return OPS[op].make(tensors, attrs, Policy())


def _target(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Classes with some rows ignored (never the first, so that a mean has a divisor) and, in a few problems, one that is none."""
    assert isinstance(problem, LinearCrossEntropyProblem)
    target = rng.integers(0, problem.classes, problem.rows)
    target = np.where((rng.random(problem.rows) < 0.15) & (np.arange(problem.rows) > 0), problem.ignore_index, target)
    if target.size and rng.random() < 0.1:
        target[int(rng.integers(target.size))] = int(rng.choice([-1, problem.classes]))
    return target


def _x(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    assert isinstance(problem, LinearCrossEntropyProblem)
    return rng.standard_normal((problem.rows, problem.features)) / max(problem.features, 1) ** 0.5


def _weight(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0.5, 2.0, problem.desc("weight").shape)


SAMPLES: dict[str, Sampler] = {op: partial(_linear, op) for op in ("linear_cross_entropy", "linear_cross_entropy_backward")}
FILLS: dict[tuple[str, str], Fill] = {(op, name): fill for op in SAMPLES
                                      for name, fill in (("x", _x), ("target", _target), ("weight", _weight))}
_LINES = (
    "x=bf16[37,24]nchw w=bf16[40,24]nchw target=s64[37]nchw",
    "x=f32[9,5]nchw w=f32[7,5]nchw target=s32[9]nchw bias=f32[7]nchw weight=f32[7]nchw label_smoothing=0.1",
    "x=f16[20,16]nchw w=f16[33,16]nchw target=s64[20]nchw bias=f16[33]nchw reduction=sum",
    "x=f64[6,3]nchw w=f64[4,3]nchw target=s64[6]nchw reduction=none ignore_index=1",
)
_EMPTY = "x=f32[0,5]nchw w=f32[4,5]nchw target=s64[0]nchw bias=f32[4]nchw"
CASES: dict[str, tuple[str, ...]] = {
    "linear_cross_entropy": (*(f"linear_cross_entropy {line}" for line in _LINES),
                             f"linear_cross_entropy {_LINES[0]} return_gradients=True", f"linear_cross_entropy {_EMPTY}",
                             f"linear_cross_entropy {_EMPTY} reduction=sum return_gradients=True"),
    "linear_cross_entropy_backward": (*(f"linear_cross_entropy_backward {line}" for line in _LINES),
                                      f"linear_cross_entropy_backward {_EMPTY}"),
}
