"""Two states of attention made one, in float64."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.attention_states import AttentionStatesProblem
from ...ops.base import Problem
from . import Expected, Reference


def _merge(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, AttentionStatesProblem)
    lse = [inputs[n].astype(np.float64) for n in ("lse_a", "lse_b")]
    eps = problem.accumulator.epsilon
    with np.errstate(all="ignore"):
        total = np.logaddexp(*lse)
        weights = [np.where(np.isneginf(x), 0, np.exp(x - np.where(np.isneginf(total), 0, total)))[..., None] for x in lse]
        rows = [np.where(w > 0, inputs[n], 0) for w, n in zip(weights, ("out_a", "out_b"), strict=True)]
        off = np.where(np.isneginf(lse), 0, np.abs(lse)).max(0)  # exponentials of differences between numbers of this size
    size = sum(w * np.abs(r) for w, r in zip(weights, rows, strict=True))
    slack = size * (8 * eps * (1 + off))[..., None]
    out = sum(w * r for w, r in zip(weights, rows, strict=True))
    return {"out": Expected(np.asarray(out), np.asarray(size), 2, problem.accumulator, slack=slack),
            "lse": Expected(total, None, 1, problem.accumulator, slack=8 * eps * (1 + off))}


REFERENCES: dict[str, Reference] = {"merge_attention_states": _merge}
