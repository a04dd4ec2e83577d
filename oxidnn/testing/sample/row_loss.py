"""Losses of rows: odd widths, every layout, reduction and attribute."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.row_loss import LOSSES, RowLossProblem
from . import Fill, Sampler
from .pointwise import FLOATS, view


def _loss(op: str, rng: np.random.Generator, size: str) -> Problem:
    name, kind = str(rng.choice(list(LOSSES))), dtype(str(rng.choice(FLOATS)))
    row = LOSSES[name]
    width = int(rng.choice([1, 3, 8, 33, 64, 257] if size == "tiny" else [1, 7, 128, 1000, 4097]))
    rows = tuple(int(n) for n in rng.integers(1, 7, int(rng.integers(0, 3))))
    attrs: dict[str, Any] = {"name": name, "reduction": str(rng.choice(["none", "mean", "sum"]))}
    attrs["p"] = int(rng.choice(list(row.terms)))
    attrs |= {"margin": float(rng.choice([0.0, 0.25, 1.0]))} if "multilabel" not in name else {}
    attrs |= {"eps": 1e-3} if "multi" not in name and rng.random() < 0.3 else {}
    tensors = {n: view(rng, kind, (*rows, width)) for n in row.tensors}
    if row.target:
        integers = row.target in ("class", "classes")
        kinds = ["s64", "s32"] if integers else ["s64", "s8", "f32"] if row.target == "row" else [kind.name, "s64", "bool"]
        tensors["target"] = view(rng, dtype(str(rng.choice(kinds))), rows if row.target in ("row", "class") else (*rows, width))
    if row.takes_weight and rng.random() < 0.5:
        tensors["weight"] = view(rng, kind if rng.random() < 0.5 else dtype("f32"), (width,))
    if op == "row_loss_backward":
        if rng.random() < 0.6:
            tensors["d_loss"] = view(rng, kind, rows if attrs["reduction"] == "none" else ())
        if rng.random() < 0.5:
            tensors["dx"] = view(rng, kind, (*rows, width), True)
    return OPS[op].make(tensors, attrs, Policy())


def _target(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """1 and -1; classes, now and then one that is none; lists of them that end anywhere; 1 and 0."""
    assert isinstance(problem, RowLossProblem)
    shape, width, target = problem.desc("target").shape, problem.desc("x").shape[-1], problem.row.target
    if target == "row":
        return rng.choice([-1.0, 1.0], shape)
    if target == "full":
        return rng.integers(0, 2, shape)
    classes = rng.integers(0, width, shape)
    if target == "classes":
        classes = np.where(rng.random(shape) < (1 / width if rng.random() < 0.5 else 0.3), -1, classes)
    if classes.size and rng.random() < 0.1:
        classes.flat[int(rng.integers(classes.size))] = width
    return classes


def _weight(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.uniform(0.2, 2.0, problem.desc("weight").shape)


def _x(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    """Where slopes jump, at margins, differences are sums of thirds, which no rounding moves across."""
    assert isinstance(problem, RowLossProblem)
    x = rng.standard_normal(problem.desc("x").shape)
    return np.round(x * 4) / 4 + (1 / 8) * (rng.random(x.shape) < 0.5) if problem.row.target in ("class", "classes") else x


SAMPLES: dict[str, Sampler] = {op: partial(_loss, op) for op in ("row_loss", "row_loss_backward")}
FILLS: dict[tuple[str, str], Fill] = {(op, name): fill for op in SAMPLES
                                      for name, fill in (("target", _target), ("weight", _weight), ("x", _x))}
_COSINE = "x=f32[5,37]nchw x2=f32[5,37]nchw target=s64[5]nchw name=cosine_embedding"
_MARGIN = "x=f32[5,37]nchw target=s64[5]nchw weight=f32[37]nchw name=multi_margin"
_LISTS = "x=f32[5,37]nchw target=s64[5,37]nchw name=multilabel_margin"
_SOFT = "x=bf16[5,64]nchw target=s64[5,64]nchw weight=bf16[64]nchw name=multilabel_soft_margin"
_TRIPLET = "x=f16[3,1000]nchw x2=f16[3,1000]nchw x3=f16[3,1000]nchw name=triplet_margin"
CASES: dict[str, tuple[str, ...]] = {
    "row_loss": (f"row_loss {_COSINE} margin=0.2", f"row_loss {_TRIPLET}", f"row_loss {_TRIPLET} p=1 reduction=none",
                 f"row_loss {_MARGIN}", f"row_loss {_MARGIN} p=2 margin=0.25 reduction=none", f"row_loss {_LISTS}", f"row_loss {_SOFT}",
                 "row_loss x=f32[0,4]nchw x2=f32[0,4]nchw target=s64[0]nchw name=cosine_embedding"),
    "row_loss_backward": (f"row_loss_backward {_COSINE} margin=0.2", f"row_loss_backward {_TRIPLET} eps=0.01",
                          f"row_loss_backward {_MARGIN}", f"row_loss_backward {_MARGIN} p=2 margin=0.25",
                          f"row_loss_backward {_LISTS} reduction=sum", f"row_loss_backward {_SOFT}",
                          f"row_loss_backward {_TRIPLET} p=1 reduction=sum"),
}
