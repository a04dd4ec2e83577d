"""Cross-entropy of a linear layer in float64: the references of cross_entropy on logits = x @ w^T + bias, and the chain rule."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F64
from ...ops import OPS
from ...ops.base import Problem
from ...ops.linear_loss import LinearCrossEntropyProblem
from ...tensor import TensorDesc
from ..compare import accumulated_error
from . import Expected
from .epilogue import product_error
from .loss import cross_entropy, cross_entropy_backward


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    """Errors: of a logit (its sum, and its rounding to the type of x), which move a loss by at most twice as much and a probability by that
    part of it; of the logits' gradients (their rounding), which sums of products carry on."""
    p = problem
    assert isinstance(p, LinearCrossEntropyProblem)
    x, w, bias = inputs["x"], inputs["w"], inputs.get("bias", np.zeros(p.classes))
    kind, acc = p.desc("x").dtype, p.accumulator
    logits = x @ w.T + bias
    size = np.abs(x) @ np.abs(w).T + np.abs(bias)
    error = (accumulated_error(acc, p.features + 1) + product_error(p)) * size + kind.epsilon * np.abs(logits) + kind.smallest
    given = {"logits": logits} | {n: a for n, a in inputs.items() if n not in ("x", "w", "bias")}
    descs = {n: TensorDesc.packed(F64 if a.dtype == np.float64 else p.desc(n).dtype, a.shape) for n, a in given.items()}
    attrs = {"reduction": p.reduction, "label_smoothing": p.smoothing, "ignore_index": p.ignore_index}
    worst = error.max(1, initial=0.0)
    results = {}
    if p.has("loss"):
        part = OPS["cross_entropy"].make({n: d for n, d in descs.items() if n != "d_loss"}, attrs, p.policy)
        loss = cross_entropy(part, given, scalars)["loss"]
        assert loss.magnitude is not None
        unit = np.maximum(1.0, np.abs(inputs.get("weight", np.ones(1))).max())
        moved = 2 * unit * (worst if p.reduction == "none" else worst.sum() if p.reduction == "sum" else worst.max(initial=0.0))
        if p.reduction == "mean" and "weight" in inputs:
            moved = moved * unit / np.abs(inputs["weight"]).min()
        results["loss"] = Expected(loss.want, loss.magnitude, loss.terms, acc, 1e-15 if acc is F64 else 4e-6, slack=moved)
    if not p.has_gradients:
        return results
    part = OPS["cross_entropy_backward"].make(descs, attrs, p.policy)
    gradient = cross_entropy_backward(part, given, scalars)["d_logits"]
    d, magnitude = gradient.want, gradient.magnitude
    assert magnitude is not None
    approximate = 1e-14 if acc is F64 else 8e-6
    slack = magnitude * (2 * worst[:, None] + 2 * kind.epsilon + accumulated_error(acc, p.classes + p.rows) + approximate) + kind.smallest
    relative = product_error(p)
    chunks = p.rows  # each may round dw once in the type of sums

    def through(left: np.ndarray, other: np.ndarray, left_slack: np.ndarray, terms: int) -> Expected:
        size = np.abs(left) @ np.abs(other)
        return Expected(left @ other, size, terms, acc, slack=left_slack @ np.abs(other) + relative * size)

    results["dx"] = through(d, w, slack, 2 * p.classes)
    results["dw"] = through(d.T, x, slack.T, p.rows + chunks)
    if p.has("dbias"):
        results["dbias"] = Expected(d.sum(0), np.abs(d).sum(0), p.rows + chunks, acc, slack=slack.sum(0))
    return results


REFERENCES = {"linear_cross_entropy": reference, "linear_cross_entropy_backward": reference}
