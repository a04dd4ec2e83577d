"""Gradients of reductions against finite differences, with ties, zeros, kept and dropped dimensions, and without y."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.ops.reduce import GRADIENTS

H = oxidnn.DnnHandle("emu:sm_80")
FORWARD: dict[str, Any] = {
    "sum": np.sum, "mean": np.mean, "max": np.max, "min": np.min, "prod": np.prod,
    "norm1": lambda x, axis: np.abs(x).sum(axis),
    "norm2": lambda x, axis: np.sqrt((x * x).sum(axis)), "amax": lambda x, axis: np.abs(x).max(axis),
    "var": lambda x, axis: x.var(axis, ddof=1),
    "std": lambda x, axis: x.std(axis, ddof=1), "logsumexp": lambda x, axis: np.log(np.exp(x).sum(axis)),
    "mul_no_zeros": lambda x, axis: np.where(x == 0, 1, x).prod(axis),
}  # fmt: skip


def differences(op: str, x: np.ndarray, dy: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    dx, step = np.zeros_like(x), 1e-6
    for at in np.ndindex(*x.shape):
        up, down = x.copy(), x.copy()
        up[at] += step
        down[at] -= step
        dx[at] = ((FORWARD[op](up, axes) - FORWARD[op](down, axes)) * dy).sum() / (2 * step)
    return dx


@pytest.mark.parametrize("axes", [(1,), (0, 2), (0, 1, 2)])
@pytest.mark.parametrize("op", GRADIENTS)
def test_against_finite_differences(op: str, axes: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(op))
    x = rng.permutation(np.linspace(-1.9, 2.1, 60)).reshape(3, 4, 5)  # no ties
    y = FORWARD[op](x, axes)
    dy = rng.standard_normal(np.shape(y))
    correction = {"correction": 1} if op in ("var", "std") else {}
    want = differences(op, x, dy, axes)
    kept = tuple(1 if a in axes else n for a, n in enumerate(x.shape))
    for given in ({}, {"y": np.asarray(y)}, {"y": np.asarray(y).reshape(kept)}):
        got = H.reduce_backward(dy.reshape(kept) if given else dy, x, op, axes, **given, **correction)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)
    single = H.reduce_backward(dy.astype(np.float32), x.astype(np.float32), op, axes, **correction)
    assert single.dtype == np.float32
    np.testing.assert_allclose(single, want, rtol=2e-4, atol=2e-4 * np.abs(want).max())
    half = H.reduce_backward(dy.astype(np.float32), x.astype(np.float16), op, axes, **correction)
    assert half.dtype == np.float16


def test_ties_and_zeros() -> None:
    x = np.array([[3.0, 1, 3, 3], [2, 2, -2, 1]])
    dy = np.array([6.0, 4.0])
    np.testing.assert_array_equal(H.reduce_backward(dy, x, "max", 1), [[2, 0, 2, 2], [2, 2, 0, 0]])
    np.testing.assert_allclose(H.reduce_backward(dy, x, "amax", 1), [[2, 0, 2, 2], [4 / 3, 4 / 3, -4 / 3, 0]])
    x = np.array([[2.0, 0, 3, 4], [0, 1, 0, 5], [1, 2, 3, 4]])
    np.testing.assert_allclose(H.reduce_backward(np.ones(3), x, "prod", 1), [[0, 24, 0, 0], [0, 0, 0, 0], [24, 12, 8, 6]])
    np.testing.assert_array_equal(H.reduce_backward(np.ones(1), np.zeros((1, 3)), "norm2", 1), np.zeros((1, 3)))


def test_refusals_name_the_argument() -> None:
    x = np.zeros((2, 3))
    with pytest.raises(oxidnn.InvalidArgument, match="op is 'argmax'"):
        H.reduce_backward(np.zeros(2), x, "argmax", 1)
    with pytest.raises(oxidnn.InvalidArgument, match="shape of dy"):
        H.reduce_backward(np.zeros(3), x, "sum", 1)
    for call in (lambda: H.reduce_backward([1, 1], x, "sum", 1), lambda: H.reduce_backward(None, x), lambda: H.reduce_backward(x, None)):
        with pytest.raises(oxidnn.InvalidArgument, match="no array|missing"):
            call()
    for correction, op in (("a", "var"), (1, "sum")):
        with pytest.raises(oxidnn.InvalidArgument, match="correction"):
            H.reduce_backward(np.zeros(2), x, op, 1, correction=correction)
    with pytest.raises(oxidnn.InvalidArgument, match="axes"):
        H.reduce_backward(np.zeros(2), x, "sum", 2)
