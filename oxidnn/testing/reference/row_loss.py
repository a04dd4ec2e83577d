"""Losses of rows in float64, from their definitions; gradients by the chain rule written out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.row_loss import LOSSES, RowLossProblem
from . import Expected


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    """Errors: a relative one of the sums, carried into what is made of them as an absolute one of their size."""
    assert isinstance(problem, RowLossProblem)
    attrs = dict(problem.attrs)
    row = LOSSES[attrs["name"]]
    margin, eps, p = attrs.get("margin", row.margin), attrs.get("eps", row.eps), attrs.get("p", 2)
    x, x2 = inputs["x"], inputs["x2"]
    acc = F64 if problem.desc("x").dtype is F64 else F32
    width = x.shape[-1]
    if row.has_target:
        target = inputs["target"][..., None].astype(np.float64)
        a, b = (np.sqrt((v * v).sum(-1, keepdims=True) + eps) for v in (x, x2))
        cosine = (x * x2).sum(-1, keepdims=True) / (a * b)
        losses = np.where(target == 1, 1 - cosine, np.where(target == -1, np.maximum(cosine - margin, 0), 0))
        slope = np.where(target == 1, -1.0, np.where((target == -1) & (cosine > margin), 1.0, 0.0))
        unit, unit2 = x / a, x2 / b
        gradients = [slope * (unit2 - cosine * unit) / a, slope * (unit - cosine * unit2) / b]
        sizes = [(np.abs(unit) + np.abs(unit2)) / a, (np.abs(unit) + np.abs(unit2)) / b]
        size = np.full(losses.shape, 2.0 + abs(margin))
    else:
        u, v = x - x2 + eps, x - inputs["x3"] + eps
        du, dv = ((np.abs(d) ** p).sum(-1, keepdims=True) ** (1 / p) for d in (u, v))
        losses = np.maximum(du - dv + margin, 0)
        slope = np.where(du - dv + margin > 0, 1.0, 0.0)
        to_u, to_v = (np.sign(u), np.sign(v)) if p == 1 else (u / du, v / dv)
        gradients = [slope * (to_u - to_v), -slope * to_u, slope * to_v]
        sizes = [np.abs(to_u) + np.abs(to_v) + 1e-3] * 3
        size = du + dv + abs(margin)
    if problem.op == "row_loss":
        losses, size = losses[..., 0], size[..., 0]
        if problem.reduction != "none":
            with np.errstate(all="ignore"):
                divisor = np.float64(problem.rows if problem.reduction == "mean" else 1)
                losses, size = np.asarray(losses.sum() / divisor), np.asarray(size.sum() / divisor)
        return {"loss": Expected(losses, size, width + 16, acc)}
    d_loss = inputs.get("d_loss", np.ones(()))
    upstream = (d_loss[..., None] if problem.reduction == "none" and d_loss.ndim else d_loss) / (
        max(problem.rows, 1) if problem.reduction == "mean" else 1)
    return {f"d{n}": Expected(upstream * g, np.abs(upstream) * s, width + 16, acc)
            for n, g, s in zip(problem.tensors, gradients, sizes, strict=True)}


REFERENCES = {"row_loss": reference, "row_loss_backward": reference}
