"""Causal convolution in float64, tap by tap over the sequence with its past before it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...dtypes import F64
from ...ops.base import Problem
from ...ops.causal_conv import CausalConvProblem
from . import Expected, Reference


def _silu(z: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """silu and its slope."""
    s = 1 / (1 + np.exp(-z))
    return z * s, s * (1 + z * (1 - s))


def _reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    p = problem
    assert isinstance(p, CausalConvProblem)
    x, w = inputs["x"], inputs["w"]
    shape, x = x.shape, x.reshape(*x.shape[:2], -1) if x.ndim == 2 else x
    batch, channels, length = x.shape
    width, past = p.width, p.width - 1
    before = inputs.get("state", np.zeros((batch, channels, past)))
    accumulate = p.accumulator
    error = 1e-14 if p.desc("x").dtype is F64 else 2e-3 if p.desc("x").dtype.num_bytes == 2 else 2e-6
    bias = inputs["bias"][None, :, None] if p.has("bias") else 0.0
    whole = np.concatenate([before, x], 2)  # element l of x is at l + past

    def convolve(whole: np.ndarray, w: np.ndarray, bias: np.ndarray | float) -> np.ndarray:
        return sum((w[None, :, k, None] * whole[:, :, k:k + length] for k in range(width)), np.zeros(x.shape)) + bias

    z, size = convolve(whole, w, bias), convolve(np.abs(whole), np.abs(w), np.abs(bias))
    reach = 4 * accumulate.epsilon * width**0.5 * size
    if not p.is_backward:
        if p.activation is None:
            found = {"y": Expected(z.reshape(shape), size.reshape(shape), width + 1, accumulate)}
        else:
            y = _silu(z)[0]
            found = {"y": Expected(y.reshape(shape), None, 0, accumulate, error, slack=(1.1 * reach + error * np.abs(y)).reshape(shape))}
        if p.final:
            found[p.final] = Expected(whole[:, :, length:], None, 1, accumulate)
        return found

    dy = inputs["dy"]
    slope = _silu(z)[1] if p.activation is not None else np.ones(z.shape)
    dz = dy * slope
    off = np.abs(dy) * (0.5 * reach + error * (1 + np.abs(slope))) if p.activation is not None else np.zeros(z.shape)
    after = inputs.get("d_final_state", np.zeros((batch, channels, past)))

    def scattered(dz: np.ndarray, w: np.ndarray, after: np.ndarray) -> np.ndarray:
        total = np.zeros((batch, channels, length + past))
        for k in range(width):
            total[:, :, k:k + length] += w[None, :, k, None] * dz
        total[:, :, length:] += after
        return total

    want, sizes, slack = (scattered(a, b, f) for a, b, f in (
        (dz, w, after), (np.abs(dz), np.abs(w), np.abs(after)), (off, np.abs(w), np.zeros(after.shape))))
    found = {"dx": Expected(want[:, :, past:], sizes[:, :, past:], width + 1, accumulate, slack=slack[:, :, past:])}
    if p.has("dstate"):
        found["dstate"] = Expected(want[:, :, :past], sizes[:, :, :past], width + 1, accumulate, slack=slack[:, :, :past])

    def summed(dz: np.ndarray, whole: np.ndarray) -> np.ndarray:
        return np.stack([(dz * whole[:, :, k:k + length]).sum((0, 2)) for k in range(width)], 1)

    terms = max(1, batch * length)
    found["dw"] = Expected(summed(dz, whole), summed(np.abs(dz), np.abs(whole)), terms, accumulate, slack=summed(off, np.abs(whole)))
    if p.has("dbias"):
        found["dbias"] = Expected(dz.sum((0, 2)), np.abs(dz).sum((0, 2)), terms, accumulate, slack=off.sum((0, 2)))
    return found


_OPS = ("causal_conv1d", "causal_conv1d_update", "causal_conv1d_backward")
REFERENCES: dict[str, Reference] = {op: _reference for op in _OPS}
