"""Softmax and cross-entropy in float64, written from the definitions: class indices become one-hot probabilities."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F32, F64, DType
from ...ops.base import Problem
from ...ops.loss import CrossEntropyProblem, SoftmaxProblem
from . import Expected, Reference

EXP_F32 = 4e-6  # relative error of e^x in f32: about 1e-7 * |x|, for |x| up to some tens


def _accumulator(problem: Problem) -> DType:
    return F64 if problem.operands[0].desc.dtype is F64 else F32


def _approximate(problem: Problem) -> float:
    return 1e-15 if _accumulator(problem) is F64 else EXP_F32


def _log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    with np.errstate(all="ignore"):
        z = x - x.max(axis, keepdims=True, initial=-np.inf)
        return z - np.log(np.exp(z).sum(axis, keepdims=True))


def softmax(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, SoftmaxProblem)
    log_y = _log_softmax(inputs["x"], problem.axis)
    terms, acc = inputs["x"].shape[problem.axis], _accumulator(problem)
    if problem.is_log:
        return {"y": Expected(log_y, np.abs(log_y) + 1, terms, acc, _approximate(problem))}
    return {"y": Expected(np.exp(log_y), None, terms, acc, _approximate(problem))}


def softmax_backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, SoftmaxProblem)
    dy, y, axis = inputs["dy"], inputs["y"], problem.axis
    with np.errstate(all="ignore"):
        factor = np.exp(y) if problem.is_log else y
        weights = dy if problem.is_log else dy * y
        dx = dy - factor * dy.sum(axis, keepdims=True) if problem.is_log else y * (dy - weights.sum(axis, keepdims=True))
        magnitude = np.abs(dy if problem.is_log else dy * y) + np.abs(factor) * np.abs(weights).sum(axis, keepdims=True)
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
        one_hot = np.moveaxis(np.eye(classes)[np.where(valid, target, 0)], -1, 1)
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
    "softmax": softmax, "softmax_backward": softmax_backward,
    "cross_entropy": cross_entropy, "cross_entropy_backward": cross_entropy_backward, "nll": cross_entropy,
    "nll_backward": cross_entropy_backward,
}
