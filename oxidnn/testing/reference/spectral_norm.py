"""Spectral normalisation in float64, as products of a matrix with vectors."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.epilogue import accumulator_of
from ...ops.spectral_norm import SpectralNormProblem
from . import Expected, Reference


def _matrix(problem: SpectralNormProblem, w: np.ndarray) -> np.ndarray:
    return np.moveaxis(w, problem.dim, 0).reshape(w.shape[problem.dim], -1)


def forward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    """Each product errs by about eps times the product of sizes; a direction by that over the product's length."""
    assert isinstance(problem, SpectralNormProblem)
    w, u, v, kind = inputs["w"], inputs["u"], inputs["v"], accumulator_of(problem.desc("w").dtype)
    matrix = _matrix(problem, w)
    sizes = np.abs(matrix)
    error = {"u": 0.0, "v": 0.0}  # of each element of the vectors
    unit = 2 * kind.epsilon * max(matrix.shape) ** 0.5
    for _ in range(problem.iterations):
        for target in ("v", "u"):
            given, other, m, s = (u, "u", matrix.T, sizes.T) if target == "v" else (v, "v", matrix, sizes)
            product = m @ given
            length = max(float(np.sqrt((product**2).sum())), problem.eps)
            lost = float(np.max(unit * (s @ np.abs(given)) + error[other] * s.sum(1)))
            error[target] = (lost + lost * len(product) ** 0.5) / length + 4 * kind.epsilon
            if target == "v":
                v = product / length
            else:
                u = product / length
    sigma = float(u @ matrix @ v)
    size = float(np.abs(u) @ sizes @ np.abs(v))
    spread = unit * size + error["u"] * float((sizes @ np.abs(v)).sum()) + error["v"] * float((np.abs(u) @ sizes).sum())
    spread += 4 * kind.epsilon * abs(sigma)
    y = w / sigma
    found = {"y": Expected(y, terms=0, accumulate=kind, slack=np.abs(y) * (spread / abs(sigma) + 2 * kind.epsilon)),
             "sigma": Expected(np.asarray(sigma), terms=0, slack=np.asarray(spread))}
    if problem.iterations:
        found |= {f"new_{n}": Expected(a, terms=0, slack=np.full(a.shape, error[n])) for n, a in (("u", u), ("v", v))}
    return found


def backward(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, SpectralNormProblem)
    dy, w, u, v, sigma = (inputs[n] for n in ("dy", "w", "u", "v", "sigma"))
    kind, shape = accumulator_of(problem.desc("w").dtype), np.moveaxis(w, problem.dim, 0).shape
    outer = np.moveaxis(np.outer(u, v).reshape(shape), 0, problem.dim)
    dw = dy / sigma - (dy * w).sum() / sigma**2 * outer
    size = np.abs(dy / sigma) + np.abs(dy * w).sum() / sigma**2 * np.abs(outer)
    return {"dw": Expected(dw, 4 * size, w.size, kind)}


REFERENCES: dict[str, Reference] = {"spectral_norm": forward, "spectral_norm_backward": backward}
