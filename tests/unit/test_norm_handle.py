"""Layer and RMS normalisation through the handle: results, statistics, gradients by differences, epilogue operands and scalars."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn import expr


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_forward_and_gradient_agree(h: oxidnn.DnnHandle) -> None:
    """<dy, f(x + t v) - f(x - t v)> / 2t = <dx, v> in f64, and the same for gamma and beta."""
    x, gamma, beta, dy, v = normal(3, 5, 8), normal(5, 8, seed=1), normal(5, 8, seed=2), normal(3, 5, 8, seed=3), normal(3, 5, 8, seed=4)
    t = 1e-5
    y, mean, rstd = h.layer_norm(x, gamma, beta, axes=(1, 2), return_stats=True)
    np.testing.assert_allclose(mean, x.mean((1, 2)), rtol=1e-12)
    dx, dgamma, dbeta = h.layer_norm_backward(dy, x, mean, rstd, gamma, axes=(1, 2))
    ends = [h.layer_norm(x + s * t * v, gamma, beta, axes=(1, 2)) for s in (1, -1)]
    assert np.vdot(dy, ends[0] - ends[1]) / (2 * t) == pytest.approx(np.vdot(dx, v), rel=1e-7)
    assert np.vdot(dy, y) == pytest.approx(np.vdot(dgamma, gamma) + np.vdot(dbeta, beta), rel=1e-12)
    r, rstd = h.rms_norm(x, gamma, axes=(1, 2), return_stats=True)
    dx, dgamma = h.rms_norm_backward(dy, x, rstd, gamma, axes=(1, 2))
    ends = [h.rms_norm(x + s * t * v, gamma, axes=(1, 2)) for s in (1, -1)]
    assert np.vdot(dy, ends[0] - ends[1]) / (2 * t) == pytest.approx(np.vdot(dx, v), rel=1e-7)
    assert np.vdot(dy, r) == pytest.approx(np.vdot(dgamma, gamma), rel=1e-12)


def test_residual_sum_and_epilogue(h: oxidnn.DnnHandle) -> None:
    x, residual, gate = (normal(4, 32, seed=s).astype(np.float32) for s in range(3))
    y, total = h.rms_norm(x, residual=residual, return_sum=True, epilogue=expr.relu(expr.acc) * expr.arg("gate") * expr.scalar("k"),
                          operands={"gate": gate}, scalars={"k": 3.0})
    np.testing.assert_array_equal(total, x + residual)
    want = np.maximum(total / np.sqrt((total.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5), 0) * gate * 3
    np.testing.assert_allclose(y, want, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("columns", [33, 9000])
def test_in_place(h: oxidnn.DnnHandle, columns: int) -> None:
    """Rows in registers and rows that are reloaded; the gradient too, after the parameters' gradients have read what it overwrites."""
    x, dy, gamma = (normal(3, columns, seed=s).astype(np.float32) for s in (1, 2, 3))
    gamma = gamma[0].copy()
    y, mean, rstd = h.layer_norm(x, gamma, return_stats=True)
    want = h.layer_norm_backward(dy, x, mean, rstd, gamma)
    got = h.layer_norm_backward(dy, x, mean, rstd, gamma, out=(dy, np.empty_like(gamma), np.empty_like(gamma)))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_array_equal(a, b)
    np.testing.assert_array_equal(h.layer_norm(x, gamma, out=x), y)
    with pytest.raises(oxidnn.InvalidArgument, match="overlaps"):
        h.rms_norm(x, residual=y, return_sum=True, out=(x, x))
    with pytest.raises(oxidnn.InvalidArgument, match="overlaps"):
        h.rms_norm(x[:2], residual=y[:2], return_sum=True, out=(np.empty_like(x[:2]), x[1:]))


def test_adaptive_layer_norm_is_an_epilogue() -> None:
    """Scale and shift of each sample, in the one launch."""
    h, rng = oxidnn.DnnHandle("emu:sm_90a"), np.random.default_rng(0)
    x, scale, shift = rng.standard_normal((3, 5, 16)), rng.standard_normal((3, 1, 16)), rng.standard_normal((3, 1, 16))
    y = h.layer_norm(x, epilogue="acc * (1 + gain) + offset", operands={"gain": scale, "offset": shift})
    want = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * (1 + scale) + shift
    np.testing.assert_allclose(y, want, rtol=1e-11, atol=1e-12)
