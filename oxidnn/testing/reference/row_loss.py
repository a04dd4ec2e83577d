"""Losses of rows in float64, from their definitions; gradients by the chain rule written out."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32, F64
from ...ops.base import Problem
from ...ops.row_loss import LOSSES, RowLossProblem
from . import Expected

_Parts = tuple[np.ndarray, list[np.ndarray], np.ndarray, list[np.ndarray]]  # losses, gradients, and the sizes behind both


def _multi_margin(x: np.ndarray, target: np.ndarray, weight: np.ndarray, margin: float, p: int) -> _Parts:
    width = x.shape[-1]
    is_class = (target >= 0) & (target < width)
    index = np.where(is_class, target, 0)[..., None].astype(np.int64)
    scale = np.where(is_class[..., None], weight[index] / width, np.nan)
    hit = np.arange(width) == index
    z = np.where(hit, 0.0, np.maximum(margin - np.take_along_axis(x, index, -1) + x, 0))
    slopes = np.where(z > 0, p * z ** (p - 1), 0.0)
    slopes = slopes - hit * slopes.sum(-1, keepdims=True)
    reach = np.where(hit, 0.0, np.abs(x) + np.abs(np.take_along_axis(x, index, -1)) + abs(margin)) * (1 if p == 1 else 2 * z + 1e-3)
    behind = np.abs(slopes) + (0 if p == 1 else reach + hit * reach.sum(-1, keepdims=True))
    return scale * (z**p).sum(-1, keepdims=True), [scale * slopes], np.abs(scale) * reach.sum(-1, keepdims=True), [np.abs(scale) * behind]


def _multilabel_margin(x: np.ndarray, target: np.ndarray) -> _Parts:
    width = x.shape[-1]
    rows, lists = x.reshape(-1, width), target.reshape(-1, width)
    losses, sizes, gradient = np.zeros((len(rows), 1)), np.zeros((len(rows), 1)), np.zeros(rows.shape)
    for n, (row, classes) in enumerate(zip(rows, lists, strict=True)):
        ends = np.flatnonzero(classes < 0)
        held = classes[:ends[0]] if len(ends) else classes
        if (held >= width).any():
            losses[n], gradient[n] = np.nan, np.nan
            continue
        others = np.setdiff1d(np.arange(width), held)
        for y in held.astype(np.int64):
            z = 1 - row[y] + row[others]
            losses[n] += np.maximum(z, 0).sum() / width
            sizes[n] += (1 + abs(row[y]) + np.abs(row[others])).sum() / width
            gradient[n, others] += (z > 0) / width
            gradient[n, y] -= (z > 0).sum() / width
    shape = (*x.shape[:-1], 1)
    return losses.reshape(shape), [gradient.reshape(x.shape)], sizes.reshape(shape), [np.abs(gradient).reshape(x.shape)]


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    """Errors: a relative one of the sums, carried into what is made of them as an absolute one of their size."""
    assert isinstance(problem, RowLossProblem)
    attrs = dict(problem.attrs)
    row = LOSSES[attrs["name"]]
    margin, eps, p = attrs.get("margin", row.margin), attrs.get("eps", row.eps), attrs.get("p", row.p)
    x = inputs["x"]
    acc = F64 if problem.desc("x").dtype is F64 else F32
    width = x.shape[-1]
    weight = inputs.get("weight", np.ones(width))
    if row.target == "class":
        losses, gradients, size, sizes = _multi_margin(x, inputs["target"], weight, margin, p)
    elif row.target == "classes":
        losses, gradients, size, sizes = _multilabel_margin(x, inputs["target"])
    elif row.target == "full":
        target = inputs["target"].astype(np.float64)
        softplus = np.logaddexp(0, -x), np.logaddexp(0, x)
        terms = weight * (target * softplus[0] + (1 - target) * softplus[1])
        losses, size = (a.mean(-1, keepdims=True) for a in (terms, weight * (np.abs(target) + np.abs(1 - target)) * (softplus[1] + 1)))
        chance = np.exp(-softplus[0])  # sigmoid
        gradients = [weight * (chance - target) / width]
        sizes = [weight * (np.abs(target) + np.abs(1 - target)) * 2 / width]
    elif row.target == "row":
        x2 = inputs["x2"]
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
        u, v = x - inputs["x2"] + eps, x - inputs["x3"] + eps
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
