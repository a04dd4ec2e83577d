"""Losses of rows: odd widths, every layout, reduction and attribute."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...dtypes import dtype
from ...ops import OPS
from ...ops.base import Policy, Problem
from ...ops.row_loss import LOSSES
from . import Fill, Sampler
from .pointwise import FLOATS, view


def _loss(op: str, rng: np.random.Generator, size: str) -> Problem:
    name, kind = str(rng.choice(list(LOSSES))), dtype(str(rng.choice(FLOATS)))
    row = LOSSES[name]
    width = int(rng.choice([1, 3, 8, 33, 64, 257] if size == "tiny" else [1, 7, 128, 1000, 4097]))
    rows = tuple(int(n) for n in rng.integers(1, 7, int(rng.integers(0, 3))))
    attrs: dict[str, Any] = {"name": name, "reduction": str(rng.choice(["none", "mean", "sum"]))}
    attrs |= {"margin": float(rng.choice([0.0, 0.25, 1.0])), "p": int(rng.choice(list(row.terms)))}
    attrs |= ({"eps": 1e-3} if rng.random() < 0.3 else {})
    tensors = {n: view(rng, kind, (*rows, width)) for n in row.tensors}
    if row.has_target:
        tensors["target"] = view(rng, dtype(str(rng.choice(["s64", "s8", "f32"]))), rows)
    if op == "row_loss_backward":
        if rng.random() < 0.6:
            tensors["d_loss"] = view(rng, kind, rows if attrs["reduction"] == "none" else ())
        if rng.random() < 0.5:
            tensors["dx"] = view(rng, kind, (*rows, width), True)
    return OPS[op].make(tensors, attrs, Policy())


def _target(rng: np.random.Generator, problem: Problem) -> np.ndarray:
    return rng.choice([-1.0, 1.0], problem.desc("target").shape)


SAMPLES: dict[str, Sampler] = {op: partial(_loss, op) for op in ("row_loss", "row_loss_backward")}
FILLS: dict[tuple[str, str], Fill] = {(op, "target"): _target for op in SAMPLES}
_COSINE = "x=f32[5,37]nchw x2=f32[5,37]nchw target=s64[5]nchw name=cosine_embedding"
_TRIPLET = "x=f16[3,1000]nchw x2=f16[3,1000]nchw x3=f16[3,1000]nchw name=triplet_margin"
CASES: dict[str, tuple[str, ...]] = {
    "row_loss": (f"row_loss {_COSINE} margin=0.2", f"row_loss {_TRIPLET}", f"row_loss {_TRIPLET} p=1 reduction=none",
                 "row_loss x=f32[0,4]nchw x2=f32[0,4]nchw target=s64[0]nchw name=cosine_embedding"),
    "row_loss_backward": (f"row_loss_backward {_COSINE} margin=0.2", f"row_loss_backward {_TRIPLET} eps=0.01",
                          f"row_loss_backward {_TRIPLET} p=1 reduction=sum"),
}
