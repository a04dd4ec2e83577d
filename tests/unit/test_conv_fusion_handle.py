"""Fused convolutions through the handle against the same in steps: batch norm, residuals in place, statistics, activations' gradients."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn import expr

SHAPE = dict(stride=1, padding=1)


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def normal(*shape: int, seed: int = 0, kind: type = np.float64) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def c(vector: np.ndarray) -> np.ndarray:
    return vector.reshape(-1, 1, 1)


def test_bias_residual_activation_in_the_residuals_place(h: oxidnn.DnnHandle) -> None:
    x, w, bias, residual = normal(2, 3, 5, 6), normal(4, 3, 3, 3, seed=1), normal(4, seed=2), normal(2, 4, 5, 6, seed=3)
    want = np.maximum(h.conv(x, w, **SHAPE) + c(bias) + residual, 0)
    y = h.conv(x, w, bias, residual=residual, epilogue="bias_residual_relu", out=residual, **SHAPE)
    assert y is residual
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)


def test_alpha_and_beta_are_of_the_accumulators_precision(h: oxidnn.DnnHandle) -> None:
    """1/3 and 1e-17 would not survive f32; y may be the blended tensor."""
    x, w, z = normal(1, 3, 4, 4), normal(2, 3, 1, 1, seed=1), normal(1, 2, 4, 4, seed=2)
    blend = expr.scalar("alpha") * expr.acc + expr.scalar("beta") * expr.arg("residual")
    want = h.conv(x, w) / 3 + 1e-17 * z
    y = h.conv(x, w, residual=z, epilogue=blend, scalars={"alpha": 1 / 3, "beta": 1e-17}, out=z)
    np.testing.assert_allclose(y, want, rtol=1e-14)


@pytest.mark.parametrize("kind", ("float8_e4m3fn", "float8_e5m2", "int8"))
def test_results_in_eight_bits_with_a_scale(h: oxidnn.DnnHandle, kind: str) -> None:
    x, w, scale = normal(2, 8, 5, 5, kind=np.float16), normal(16, 8, 3, 3, seed=1, kind=np.float16), np.array([7.5], np.float32)
    y = h.conv(x, w, epilogue="relu(acc) * scale", out_dtype=kind, operands={"scale": scale}, **SHAPE)
    high = {"float8_e4m3fn": 448, "float8_e5m2": 57344, "int8": 127}[kind]
    want = np.minimum(np.maximum(h.conv(x.astype(np.float32), w.astype(np.float32), **SHAPE), 0) * 7.5, high)
    np.testing.assert_allclose(y.astype(np.float32), want, rtol=0.13, atol=0.51)
    assert y.dtype.name == kind and float(y.astype(np.float32).max()) <= high


def test_second_output(h: oxidnn.DnnHandle) -> None:
    x, w, bias = normal(2, 3, 5, 6), normal(4, 3, 3, 3, seed=1), normal(4, seed=2)
    y, before = h.conv(x, w, bias, epilogue="silu(t := acc + bias), t", **SHAPE)
    want = h.conv(x, w, **SHAPE) + c(bias)
    np.testing.assert_allclose(before, want, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(y, want / (1 + np.exp(-want)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", (None, "relu", "silu", "hard_swish", "clamp(x, 0, 1)"))
def test_convolution_batch_norm_activation_is_one_launch(h: oxidnn.DnnHandle, activation: str | None) -> None:
    x, w, mean, var = normal(2, 3, 5, 6), normal(4, 3, 3, 3, seed=1), normal(4, seed=2), np.abs(normal(4, seed=3))
    gamma, beta, residual = normal(4, seed=4), normal(4, seed=5), normal(2, 4, 5, 6, seed=6)
    function = {None: lambda v: v, "relu": lambda v: np.maximum(v, 0), "silu": lambda v: v / (1 + np.exp(-v)),
                "hard_swish": lambda v: v * np.clip(v / 6 + 0.5, 0, 1)}.get(activation, lambda v: np.clip(v, 0, 1))
    for g, b, r in ((gamma, beta, None), (gamma, beta, residual), (None, None, None)):
        normed = (h.conv(x, w, **SHAPE) - c(mean)) / np.sqrt(c(var) + 1e-3)
        normed = normed * (1 if g is None else c(g)) + (0 if b is None else c(b)) + (0 if r is None else r)
        y = h.conv_batch_norm(x, w, mean, var, g, b, eps=1e-3, activation=activation, residual=r, **SHAPE)
        np.testing.assert_allclose(y, function(normed), rtol=1e-11, atol=1e-11)


def test_statistics_feed_batch_norm(h: oxidnn.DnnHandle) -> None:
    """Two shares of a batch: convolution with statistics, gathered, applied; as batch_norm of the whole."""
    x, w = normal(4, 3, 5, 6, kind=np.float32), normal(8, 3, 3, 3, seed=1, kind=np.float32)
    gamma, beta = normal(8, seed=2, kind=np.float32), normal(8, seed=3, kind=np.float32)
    y0, n0, mean0, m0 = h.conv(x[:1], w, return_stats=True, **SHAPE)
    y1, n1, mean1, m1 = h.conv(x[1:], w, return_stats=True, **SHAPE)
    for mine, theirs in zip((n1, mean1, m1), h.batch_norm_stats(y1), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    mean, rstd = h.batch_norm_gather(np.concatenate((n0, n1)), np.stack((mean0, mean1)), np.stack((m0, m1)))
    y = np.concatenate((y0, y1))
    got = h.batch_norm_apply(y, mean, rstd, gamma, beta, epilogue="relu")
    want = h.batch_norm(y, gamma, beta, training=True, epilogue="relu")
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    _, count, mean, m2 = h.conv_transpose(x, normal(3, 8, 3, 3, seed=4, kind=np.float32), stride=2, return_stats=True)
    assert count.tolist() == [4 * 11 * 13] and mean.shape == m2.shape == (8,)


def test_batch_norm_apply_and_relu_on_the_way_in(h: oxidnn.DnnHandle) -> None:
    """The normalised input never lies in memory; its padding is zero after the relu. The filter's gradient sees the same input."""
    x, w, scale, shift = normal(2, 3, 5, 6), normal(4, 3, 3, 3, seed=1), normal(3, seed=2), normal(3, seed=3)
    made = np.maximum(x * c(scale) + c(shift), 0)
    more = dict(prologue="relu(x * gain + offset)", operands={"gain": scale, "offset": shift}, **SHAPE)
    np.testing.assert_allclose(h.conv(x, w, **more), h.conv(made, w, **SHAPE), rtol=1e-12, atol=1e-12)
    dy = normal(2, 4, 5, 6, seed=4)
    dw, db = h.conv_wgrad(x, dy, w.shape, return_bias_grad=True, **more)
    np.testing.assert_allclose(dw, h.conv_wgrad(made, dy, w.shape, **SHAPE), rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(db, dy.sum((0, 2, 3)), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("activation", ("relu", "silu", "tanh", "elu(x, 0.5)"))
def test_image_gradient_through_an_activation(h: oxidnn.DnnHandle, activation: str) -> None:
    dy, w, saved = normal(2, 4, 5, 6), normal(4, 3, 3, 3, seed=1), normal(2, 3, 5, 6, seed=2)
    got = h.conv_dgrad_activation(dy, w, saved, activation, **SHAPE)
    dx = h.conv_dgrad(dy, w, saved.shape, **SHAPE)
    step = 1e-6
    function = {"relu": lambda v: np.maximum(v, 0), "silu": lambda v: v / (1 + np.exp(-v)), "tanh": np.tanh}.get(
        activation, lambda v: np.where(v > 0, v, 0.5 * np.expm1(v)))
    np.testing.assert_allclose(got, dx * (function(saved + step) - function(saved - step)) / (2 * step), rtol=1e-6, atol=1e-8)


def test_depthwise_separable_convolution(h: oxidnn.DnnHandle) -> None:
    x, depthwise, pointwise = normal(2, 4, 7, 6), normal(8, 1, 3, 3, seed=1), normal(5, 8, 1, 1, seed=2)
    norms = [(normal(n, seed=3), np.abs(normal(n, seed=4)), normal(n, seed=5), normal(n, seed=6)) for n in (8, 5)]
    residual = normal(2, 5, 4, 3, seed=7)
    y = h.depthwise_separable_conv(x, depthwise, pointwise, *norms, stride=2, padding=1, depthwise_activation="silu",
                                   pointwise_activation=None, residual=residual)
    between = h.conv(x, depthwise, stride=2, padding=1, groups=4)
    mean, var, gamma, beta = map(c, norms[0])
    between = (between - mean) / np.sqrt(var + 1e-5) * gamma + beta
    between = between / (1 + np.exp(-between))
    mean, var, gamma, beta = map(c, norms[1])
    want = (h.conv(between, pointwise) - mean) / np.sqrt(var + 1e-5) * gamma + beta + residual
    np.testing.assert_allclose(y, want, rtol=1e-11, atol=1e-11)
    y = h.depthwise_separable_conv(x, depthwise, pointwise, padding=1, pointwise_activation="relu6")
    want = np.clip(h.conv(np.maximum(h.conv(x, depthwise, padding=1, groups=4), 0), pointwise), 0, 6)
    np.testing.assert_allclose(y, want, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("arguments", "message"), (
    (dict(prologue="acc * 2"), "conv_fprop: prologue is acc \\* 2"), (dict(prologue="x * bias"), "prologue is .*which names bias"),
    (dict(prologue="x * gain"), "whose gain is missing"), (dict(prologue="x, x"), "prologue is .*one output"),
    (dict(prologue="x * gain", operands={"gain": np.ones(4)}), "shape of gain is \\[4\\]"),
    (dict(epilogue="acc, acc, acc"), "epilogue is an expression of 3 outputs"), (dict(return_stats=1), "return_stats is 1"),
    (dict(return_stats=True, out_dtype="int8"), "return_stats is True"), (dict(out_dtype="int16"), "out_dtype is s16"),
))
def test_what_is_wrong_is_said(h: oxidnn.DnnHandle, arguments: dict, message: str) -> None:
    with pytest.raises(oxidnn.InvalidArgument, match=message):
        h.conv(normal(1, 3, 4, 4), normal(2, 3, 1, 1), **arguments)


def test_what_is_wrong_with_an_activation_is_said(h: oxidnn.DnnHandle) -> None:
    dy, w = normal(1, 2, 4, 4), normal(2, 3, 1, 1)
    with pytest.raises(oxidnn.InvalidArgument, match="conv_dgrad_activation: activation is '.x \\+ y.'"):
        h.conv_dgrad_activation(dy, w, normal(1, 3, 4, 4), "(x + y)")
    with pytest.raises(oxidnn.InvalidArgument, match="conv_batch_norm: eps"):
        h.conv_batch_norm(dy, w, w, w, eps="a")


def test_largest_size_feeds_the_next_scale(h: oxidnn.DnnHandle) -> None:
    """Delayed scaling: the step after has the scale that this step's results ask for."""
    x, w = normal(2, 16, 5, 6, kind=np.float32), normal(16, 16, 3, 3, seed=1, kind=np.float32)
    x8, w8, scale = h.cast(x, "e4m3"), h.cast(w, "e4m3"), np.array([0.01], np.float32)
    plain = h.conv(x8, w8, out_dtype="float32", **SHAPE)
    y, amax = h.conv(x8, w8, scale_y=scale, out_dtype="e4m3", return_amax=True, **SHAPE)
    assert amax.shape == () and float(amax) == np.abs(plain).max()
    assert h.cast(y, "float32").max() == 448.0, "y saturates, the size is what it was before"
    history, scale = h.delayed_scale(np.zeros(4, np.float32), amax, np.array(0.01, np.float32), kind="e4m3")
    np.testing.assert_allclose(scale, amax / 448, rtol=1e-6)
    _, *moments, amax = h.conv(x, w, return_stats=True, return_amax=True, **SHAPE)
    assert len(moments) == 3 and amax.shape == ()
    with pytest.raises(oxidnn.InvalidArgument, match="return_amax is True"):
        h.conv(x.astype(np.float64), w.astype(np.float64), return_amax=True, **SHAPE)
