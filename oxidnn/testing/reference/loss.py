"""Softmax and cross-entropy in float64, written from the definitions: class indices become one-hot probabilities."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from ...dtypes import F32, F64, DType
from ...ops.base import Problem
from ...ops.epilogue import NARROW
from ...ops.loss import CrossEntropyProblem, SoftmaxProblem
from . import Expected, Reference
from .epilogue import narrowed
from .random import sources

EXP_F32 = 4e-6  # relative error of e^x in f32: about 1e-7 * |x|, for |x| up to some tens


def _accumulator(problem: Problem) -> DType:
    return F64 if problem.operands[0].desc.dtype is F64 else F32


def _approximate(problem: Problem) -> float:
    return 1e-15 if _accumulator(problem) is F64 else EXP_F32


def _log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        z = x - x.max(axis, keepdims=True, initial=-np.inf)
        return z - np.log(np.exp(z).sum(axis, keepdims=True))


def _logits(problem: SoftmaxProblem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> tuple[np.ndarray, np.ndarray]:
    """(z, what rounding and the noise's logarithms may err)."""
    x, accumulator = inputs["x"], _accumulator(problem)
    noise = np.zeros(x.shape)
    if problem.is_random:
        uniform = sources(x.shape, int(scalars["seed"]), int(scalars["offset"]))["uniform"]
        noise = -np.log(-np.log(np.maximum(uniform, 2.0**-25)))
    with np.errstate(invalid="ignore"):
        z = problem.scale * (x + noise)
        size = np.abs(problem.scale) * (np.abs(x) + np.abs(noise) + problem.is_random)
        if problem.has("mask"):
            mask = inputs["mask"]
            z = np.where(mask, z, -np.inf) if mask.dtype == np.bool_ else z + mask
            size = size + (0 if mask.dtype == np.bool_ else np.abs(mask))
    if problem.diagonal is not None:
        z = np.where(np.tri(x.shape[-2], x.shape[-1], problem.diagonal, dtype=bool), z, -np.inf)
    is_plain = problem.scale == 1 and not problem.is_random and not problem.has("mask")
    return z, np.where(np.isfinite(z), 0.0 if is_plain else 4 * accumulator.epsilon * size, 0.0)


def softmax(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, SoftmaxProblem)
    z, error = _logits(problem, inputs, scalars)
    axis = problem.axis
    log_y = _log_softmax(z, axis)
    if problem.is_masked:
        log_y = np.where((z == -np.inf).all(axis, keepdims=True), -np.inf, log_y)
    terms, acc, approximate = z.shape[axis], _accumulator(problem), _approximate(problem)
    y = np.exp(log_y)
    moved = error + (np.nan_to_num(y) * error).sum(axis, keepdims=True)  # of the logarithm
    soft = Expected(y, None, terms, acc, approximate, slack=y * moved)
    if problem.is_hard:
        largest = z.max(axis, keepdims=True, initial=-np.inf)
        first = np.argmax(z == largest, axis) if z.size else np.zeros(z.shape[:axis] + z.shape[axis + 1:], int)
        hot = np.expand_dims(first, axis) == np.arange(terms).reshape([-1 if i == axis else 1 for i in range(z.ndim)])
        with np.errstate(invalid="ignore"):
            is_close = largest - z <= 2 * error.max(axis, keepdims=True, initial=0.0)
        is_open = problem.is_random & is_close & (is_close.sum(axis, keepdims=True) > 1)
        hard = np.where(np.isnan(y.sum(axis, keepdims=True)), np.nan, hot & (y.sum(axis, keepdims=True) > 0))
        return {"y": Expected(hard, slack=is_open * 1.0)} | ({"soft": soft} if problem.has("soft") else {})
    found = {"y": soft}
    if problem.is_log:
        found = {"y": Expected(log_y, np.abs(log_y) + 1, terms, acc, approximate, slack=moved)}
    found["y"] = _narrowed(problem, found["y"])
    if problem.has("lse"):
        with np.errstate(all="ignore"):
            most = z.max(axis, keepdims=True, initial=-np.inf)
            lse = most + np.log(np.exp(z - np.where(most == -np.inf, 0.0, most)).sum(axis, keepdims=True))
            lse = np.where(most == -np.inf, np.where(np.isnan(z).any(axis, keepdims=True), np.nan, -np.inf), lse)
        shape = problem.desc("lse").shape
        bound = (np.nan_to_num(y) * error).sum(axis, keepdims=True)
        found["lse"] = Expected(lse.reshape(shape), np.abs(lse).reshape(shape) + 1, terms, acc, approximate, slack=bound.reshape(shape))
    return found


def _narrowed(problem: SoftmaxProblem, result: Expected) -> Expected:
    """In a type of 8 bits the relative error of the exponential counts before rounding."""
    if problem.desc("y").dtype not in NARROW:
        return result
    slack = 2 * result.approximate * np.abs(result.want) + (0.0 if result.slack is None else result.slack)
    return narrowed(problem, replace(result, slack=np.nan_to_num(slack, nan=0.0, posinf=0.0)))


def softmax_backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, SoftmaxProblem)
    dy, y, axis = inputs["dy"], inputs["y"], problem.axis
    if problem.masked and problem.is_log:
        dy = np.where(y == -np.inf, 0.0, dy)
    with np.errstate(all="ignore"):
        factor = np.exp(y) if problem.is_log else y
        weights = dy if problem.is_log else dy * y
        dx = dy - factor * dy.sum(axis, keepdims=True) if problem.is_log else y * (dy - weights.sum(axis, keepdims=True))
        magnitude = np.abs(dy if problem.is_log else dy * y) + np.abs(factor) * np.abs(weights).sum(axis, keepdims=True)
    dx, magnitude = problem.scale * dx, np.abs(problem.scale) * magnitude
    # The exponential's error is relative to its term, and the difference may be much smaller than that.
    slack = 2 * _approximate(problem) * magnitude if problem.is_log else None
    return {"dx": Expected(dx, magnitude, dy.shape[axis], _accumulator(problem), slack=slack)}


def _shares(problem: CrossEntropyProblem, inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray, float]:
    """(q, ignored, divisor): loss of a row = -sum over classes of q * log-softmax; ignored rows; what a mean divides by."""
    logits, target = inputs["logits"], inputs["target"]
    classes = logits.shape[1]
    weight = inputs.get("weight", np.ones(classes)).reshape(1, classes, *(1,) * (logits.ndim - 2))
    if problem.is_probability:
        probability = target
        ignored = np.zeros((logits.shape[0], *logits.shape[2:]), bool)
        divisor = float(ignored.size)
    else:
        ignored = target == problem.ignore_index
        valid = ~ignored & (target >= 0) & (target < classes)
        one_hot = (np.where(valid, target, 0)[:, None] == np.arange(classes).reshape(-1, *(1,) * (logits.ndim - 2))).astype(np.float64)
        probability = np.where((valid | ignored)[:, None], one_hot, np.nan)
        of_target = np.where(valid, np.broadcast_to(weight[0].reshape(-1), (classes,))[np.where(valid, target, 0)], np.nan)
        divisor = float(of_target[~ignored].sum())
    q = weight * (probability * (1 - problem.smoothing) + problem.smoothing / classes)
    return q, ignored, divisor


def _divided(numerator: np.ndarray, divisor: float) -> np.ndarray:
    with np.errstate(all="ignore"):
        return numerator / np.float64(divisor)


def cross_entropy(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, CrossEntropyProblem)
    q, ignored, divisor = _shares(problem, inputs)
    log_p = inputs["logits"] if problem.is_log else _log_softmax(inputs["logits"], 1)
    counts = q != 0 if not problem.is_probability and not problem.smoothing else np.ones(q.shape, bool)
    with np.errstate(all="ignore"):
        terms = np.where(counts, -q * log_p, 0.0)
        rows = np.where(ignored, 0.0, terms.sum(1))
        sizes = np.where(ignored, 0.0, (np.abs(q) * (np.abs(log_p) + 1)).sum(1))
    if not problem.is_probability and not problem.smoothing:
        invalid = ~ignored & np.isnan(q).any(1)
        rows = np.where(invalid, np.nan, rows)
        sizes = np.where(counts, np.abs(q) * (np.abs(log_p) + 1), 0.0).sum(1)
    summed, acc = q.shape[1], _accumulator(problem)
    if problem.reduction == "none":
        return {"loss": Expected(rows, sizes, summed, acc, _approximate(problem))}
    total, size = rows.sum(), sizes.sum()
    if problem.reduction == "mean":
        total, size = _divided(total, divisor), np.abs(_divided(size, divisor))
    return {"loss": Expected(np.asarray(total), np.asarray(size), summed + problem.rows, acc, _approximate(problem))}


def cross_entropy_backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, CrossEntropyProblem)
    q, ignored, divisor = _shares(problem, inputs)
    p = np.zeros(q.shape) if problem.is_log else np.exp(_log_softmax(inputs["logits"], 1))
    d_loss = inputs.get("d_loss", np.ones(()))
    gradient = np.expand_dims(d_loss, 1) if problem.reduction == "none" and d_loss.ndim else d_loss
    if problem.reduction == "mean":
        gradient = _divided(gradient, divisor)
    with np.errstate(all="ignore"):
        dx = np.where(ignored[:, None], 0.0, gradient * (p * q.sum(1, keepdims=True) - q))
        magnitude = np.abs(gradient) * (p * np.abs(q).sum(1, keepdims=True) + np.abs(q))
    acc = _accumulator(problem)
    return {"d_logits": Expected(dx, magnitude, q.shape[1] + problem.rows, acc, slack=2 * _approximate(problem) * magnitude)}


REFERENCES: dict[str, Reference] = {
    "softmax": softmax, "gumbel_softmax": softmax, "hardmax": softmax, "softmax_backward": softmax_backward,
    "cross_entropy": cross_entropy, "cross_entropy_backward": cross_entropy_backward, "nll": cross_entropy,
    "nll_backward": cross_entropy_backward,
}
