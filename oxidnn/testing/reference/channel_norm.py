"""Normalisation by channel in float64, from the definitions."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import DType
from ...ops.base import Problem
from ...ops.channel_norm import ChannelNormProblem, channels_innermost
from ...ops.epilogue import accumulator_of
from . import Expected, Reference
from .epilogue import finish, narrowed

Inputs = Mapping[str, np.ndarray]


def _split(p: ChannelNormProblem, a: np.ndarray) -> np.ndarray:
    """(batches, statistics, channels of one, rows) of a tensor of x's shape."""
    if p.groups:
        return a.reshape(p.batches, p.groups if p.channels else 0, max(p.width, 1), p.rows)
    return np.moveaxis(a, 1, 0).reshape(1, p.channels, 1, p.rows)


def _join(p: ChannelNormProblem, a: np.ndarray) -> np.ndarray:
    if p.groups:
        return a.reshape(p.shape)
    return np.moveaxis(np.broadcast_to(a, (1, p.channels, 1, p.rows)).reshape(p.channels, p.shape[0], *p.shape[2:]), 0, 1)


def _spread(p: ChannelNormProblem, inputs: Inputs, name: str, default: float) -> np.ndarray:
    """A parameter (C,), for arrays of _split."""
    if name not in inputs:
        return np.full((1, 1, 1, 1), default)
    return inputs[name].reshape(1, p.channels // max(p.width, 1), max(p.width, 1), 1)


def _given(p: ChannelNormProblem, values: np.ndarray) -> np.ndarray:
    """Statistics, for arrays of _split."""
    return values.reshape(p.batches, min(p.groups, p.channels) if p.groups else p.channels, 1, 1)


def _bits(p: ChannelNormProblem, a: np.ndarray) -> np.ndarray:
    """The mask's bytes of a boolean array of x's shape."""
    if channels_innermost(p.desc("x")):
        packed = a.reshape(p.shape[0], p.shape[1] // 8, 8, *p.shape[2:])
        return np.packbits(packed, axis=2, bitorder="little")[:, :, 0]
    return np.packbits(a.reshape(*p.shape[:2], -1), axis=2, bitorder="little")


def _unpacked(p: ChannelNormProblem, mask: np.ndarray) -> np.ndarray:
    along = 1 if channels_innermost(p.desc("x")) else 2
    return np.unpackbits(mask.astype(np.uint8), axis=along, bitorder="little").reshape(p.shape).astype(bool)


def _statistics(p: ChannelNormProblem, x: np.ndarray, kind: DType) -> dict[str, Expected]:
    """mean, rstd, and the biased variance, of _split's shape without rows; their magnitudes say how far each may be off."""
    n = x.shape[2] * x.shape[3]
    if not n:
        zero = np.zeros((*x.shape[:2], 1, 1))
        return dict.fromkeys(("mean", "rstd", "var"), Expected(zero))
    mean = x.mean((2, 3), keepdims=True)
    var = ((x - mean) ** 2).mean((2, 3), keepdims=True)
    with np.errstate(all="ignore"):
        rstd = 1 / np.sqrt(var + p.eps)
        size = np.abs(x) + np.abs(x).mean((2, 3), keepdims=True)
        # as of the layer norm: differences err by eps * size, the root of their squares' mean by eps * spread in relation
        spread = 1 + (s := np.sqrt((size**2).mean((2, 3), keepdims=True)) * rstd) + kind.epsilon * s**2
    return {"mean": Expected(mean, np.abs(x).mean((2, 3), keepdims=True), n, kind), "rstd": Expected(rstd, rstd * spread, n, kind),
            "var": Expected(var, 2 * spread * (var + p.eps), n, kind)}


def _running(p: ChannelNormProblem, inputs: Inputs, mean: Expected, var: Expected, n: float, kind: DType) -> dict[str, Expected]:
    found = {}
    for name, statistic, factor in (("running_mean", mean, 1.0), ("running_var", var, n / (n - 1) if n > 1 else np.nan)):
        if p.has(f"new_{name}"):
            old = inputs[name]
            if not n:
                found[f"new_{name}"] = Expected(old)
                continue
            want = (1 - p.momentum) * old + p.momentum * factor * statistic.want.reshape(-1)
            assert statistic.magnitude is not None
            size = np.abs(1 - p.momentum) * np.abs(old) + p.momentum * factor * statistic.magnitude.reshape(-1)
            found[f"new_{name}"] = Expected(want, size, statistic.terms, kind)
    return found


def forward(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, ChannelNormProblem)
    p, kind = problem, accumulator_of(problem.desc("x").dtype)
    x = _split(p, inputs["x"])
    n, results = p.rows * p.width, dict[str, Expected]()
    found = _statistics(p, x, kind) if p.is_training else {}
    if found:
        for k in ("mean", "rstd"):
            if any(o.name == k for o in p.outputs):
                shape, size = p.desc(k).shape, found[k].magnitude
                results[k] = Expected(found[k].want.reshape(shape), None if size is None else size.reshape(shape), max(n, 1), kind)
        results |= _running(p, inputs, found["mean"], found["var"], n, kind)
    if not x.size:
        return results | {o.name: Expected(np.zeros(o.desc.shape)) for o in p.outputs if o.name in ("y", "mask")}
    with np.errstate(all="ignore"):
        if found:
            mean, rstd, size = found["mean"].want, found["rstd"].want, np.abs(x) + np.abs(x).mean((2, 3), keepdims=True)
            assert found["rstd"].magnitude is not None
            spread = found["rstd"].magnitude / rstd
        else:
            mean = _given(p, inputs["mean" if p.has("mean") else "running_mean"])
            rstd = _given(p, inputs["rstd"] if p.has("rstd") else 1 / np.sqrt(inputs["running_var"] + p.eps))
            size, spread = np.abs(x) + np.abs(mean), np.float64(4.0)
        gamma, beta = _spread(p, inputs, "gamma", 1.0), _spread(p, inputs, "beta", 0.0)
        acc = (x - mean) * rstd * gamma + beta
        magnitude = rstd * np.abs(gamma) * (size + np.abs(x - mean) * spread) + np.abs(beta)
    y = finish(p, p.epilogue, _join(p, acc), _join(p, magnitude + 0 * acc), None, n if found else 1, inputs, scalars, 1)
    results["y"] = narrowed(p, y)
    if p.has("mask"):
        results["mask"] = Expected(_bits(p, ~(y.want <= 0)))
    return results


def stats(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, ChannelNormProblem)
    p, kind = problem, accumulator_of(problem.desc("x").dtype)
    found, n = _statistics(p, _split(p, inputs["x"]), kind), p.rows
    mean, var = found["mean"], found["var"]
    return {"count": Expected(np.array([float(n)])),
            "mean": Expected(mean.want.reshape(-1), None if mean.magnitude is None else mean.magnitude.reshape(-1), max(n, 1), kind),
            "m2": Expected(var.want.reshape(-1) * n, None if var.magnitude is None else var.magnitude.reshape(-1) * n, max(n, 1), kind)}


def gather(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, ChannelNormProblem)
    p, kind = problem, problem.desc("means").dtype
    count, mean_of = inputs["counts"][:, None], inputs["means"]
    m2_of = np.where(count > 0, inputs["m2s"], 0.0)
    n = float(count.sum())
    if not n:
        zero = Expected(np.zeros(p.channels))
        return {"mean": zero, "rstd": zero} | _running(p, inputs, zero, zero, 0.0, kind)
    mean = (count * mean_of).sum(0) / n
    d, size = mean_of - mean, np.abs(mean_of) + (count * np.abs(mean_of)).sum(0) / n
    var = (m2_of + count * d**2).sum(0) / n
    off = (m2_of + count * (d**2 + 2 * np.abs(d) * size + kind.epsilon * size**2)).sum(0) / n
    rstd, terms = 1 / np.sqrt(var + p.eps), len(mean_of) + 1
    found = {"mean": Expected(mean, size.max(0), terms, kind),
             "rstd": Expected(rstd, rstd * (1 + off * rstd**2), terms, kind)}
    return found | _running(p, inputs, found["mean"], Expected(var, off, terms, kind), n, kind)


def backward(problem: Problem, inputs: Inputs, scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, ChannelNormProblem)
    p, kind, dy = problem, accumulator_of(problem.desc("x").dtype), inputs["dy"]
    if p.has("mask"):
        dy = np.where(_unpacked(p, inputs["mask"]), dy, 0.0)
    if p.has("y"):
        dy = np.where(inputs["y"] <= 0, 0.0, dy)
    x, dz = _split(p, inputs["x"]), _split(p, dy)
    mean, rstd = _given(p, inputs["mean"]), _given(p, inputs["rstd"])
    z, z_size = (x - mean) * rstd, (np.abs(x) + np.abs(mean)) * np.abs(rstd)
    results = {}
    for names, values, sizes in ((("dbeta", "sum_dy"), dz, np.abs(dz)), (("dgamma", "sum_dy_xhat"), dz * z, np.abs(dz) * z_size)):
        for name in names:
            if any(o.name == name for o in p.outputs):
                results[name] = Expected(values.sum((0, 3)).reshape(-1), sizes.sum((0, 3)).reshape(-1), max(1, p.batches * p.rows), kind)
    if p.has("d_residual"):
        results["d_residual"] = Expected(dy)
    if not p.has("dx"):
        return results
    gamma = _spread(p, inputs, "gamma", 1.0)
    g, terms = dz * gamma, max(1, p.rows * p.width)
    n = float(terms)
    if p.has("sum_dy"):
        n, terms = float(inputs["count"][0]), 1
        total, product = (_given(p, inputs[name]) * gamma for name in ("sum_dy", "sum_dy_xhat"))
        sizes = np.abs(total) + z_size * np.abs(product)
    else:
        total, product = g.sum((2, 3), keepdims=True), (g * z).sum((2, 3), keepdims=True)
        sizes = np.abs(g).sum((2, 3), keepdims=True) + z_size * (np.abs(g) * z_size).sum((2, 3), keepdims=True)
    if not p.is_training:
        total, product, sizes = 0 * total, 0 * product, 0 * sizes
    dx = rstd * (g - (total + z * product) / n)
    results["dx"] = Expected(_join(p, dx), _join(p, np.abs(rstd) * (np.abs(g) + sizes / n)), terms, kind)
    return results


_FORWARD = ("batch_norm", "batch_norm_apply", "group_norm", "instance_norm")
_BACKWARD = ("batch_norm_backward", "group_norm_backward", "instance_norm_backward", "batch_norm_backward_reduce",
             "batch_norm_backward_apply")
REFERENCES: dict[str, Reference] = {**dict.fromkeys(_FORWARD, forward), **dict.fromkeys(_BACKWARD, backward), "batch_norm_stats": stats,
                                    "batch_norm_gather": gather}
