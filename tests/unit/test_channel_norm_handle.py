"""Batch, group and instance normalisation through the handle: against torch, gradients, running statistics, shares, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

torch = pytest.importorskip("torch")
F = torch.nn.functional


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def nhwc(a: np.ndarray) -> np.ndarray:
    """The same array with channels innermost in memory."""
    return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1)


def gradients(function: Any, dy: np.ndarray, *arrays: np.ndarray) -> list[np.ndarray]:
    leaves = [torch.from_numpy(np.ascontiguousarray(a)).requires_grad_() for a in arrays]
    return [g.numpy() for g in torch.autograd.grad(function(*leaves), leaves, torch.from_numpy(np.ascontiguousarray(dy)))]


@pytest.mark.parametrize("shape", [(4, 6), (3, 8, 7), (2, 8, 3, 5), (2, 3, 2, 3, 4)])
@pytest.mark.parametrize("layout", [np.ascontiguousarray, nhwc])
def test_batch_norm_and_gradient_agree_with_autograd(h: oxidnn.DnnHandle, shape: tuple[int, ...], layout: Any) -> None:
    x, dy, c = layout(normal(*shape)), layout(normal(*shape, seed=1)), shape[1]
    gamma, beta, running = normal(c, seed=2), normal(c, seed=3), [normal(c, seed=4), np.abs(normal(c, seed=5))]
    theirs = [torch.from_numpy(r.copy()) for r in running]

    def function(x: Any, gamma: Any, beta: Any) -> Any:
        return F.batch_norm(x, None, None, gamma, beta, True, 0.3, 1e-3)

    own, g, shift = (torch.from_numpy(np.ascontiguousarray(a)) for a in (x, gamma, beta))
    want = F.batch_norm(own, *theirs, g, shift, True, 0.3, 1e-3)
    y, mean, rstd = h.batch_norm(x, gamma, beta, *running, training=True, momentum=0.3, eps=1e-3, return_stats=True)
    np.testing.assert_allclose(y, want.numpy(), rtol=1e-11, atol=1e-12)
    for ours, other in zip(running, theirs, strict=True):
        np.testing.assert_allclose(ours, other.numpy(), rtol=1e-12)
    got = h.batch_norm_backward(dy, x, mean, rstd, gamma)
    for a, b in zip(got, gradients(function, dy, x, gamma, beta), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)
    y = h.batch_norm(x, gamma, beta, *running, training=False)
    want = F.batch_norm(own, *theirs, g, shift, False)
    np.testing.assert_allclose(y, want.numpy(), rtol=1e-11, atol=1e-12)
    constants = running[0], 1 / np.sqrt(running[1] + 1e-5)
    dx = gradients(lambda x: F.batch_norm(x, *theirs, g, None, False), dy, x)
    np.testing.assert_allclose(h.batch_norm_backward(dy, x, *constants, gamma, training=False)[0], dx[0], rtol=1e-11)


@pytest.mark.parametrize("layout", [np.ascontiguousarray, nhwc])
@pytest.mark.parametrize("groups", [1, 2, 8])
def test_group_and_instance_norm_agree_with_autograd(h: oxidnn.DnnHandle, groups: int, layout: Any) -> None:
    x, dy = layout(normal(3, 8, 4, 5)), layout(normal(3, 8, 4, 5, seed=1))
    gamma, beta = normal(8, seed=2), normal(8, seed=3)

    def function(x: Any, gamma: Any, beta: Any) -> Any:
        return F.group_norm(x, groups, gamma, beta)

    y, mean, rstd = h.group_norm(x, groups, gamma, beta, return_stats=True)
    want = function(*(torch.from_numpy(np.ascontiguousarray(a)) for a in (x, gamma, beta)))
    np.testing.assert_allclose(y, want.numpy(), rtol=1e-11, atol=1e-12)
    assert mean.shape == (3, groups)
    want = gradients(function, dy, x, gamma, beta)
    for a, b in zip(h.group_norm_backward(dy, x, mean, rstd, groups, gamma), want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)
    if groups == 8:
        np.testing.assert_array_equal(h.instance_norm(x, gamma, beta), y)
        for a, b in zip(h.instance_norm_backward(dy, x, mean, rstd, gamma), want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


@pytest.mark.parametrize("layout", [np.ascontiguousarray, nhwc])
def test_add_and_relu_and_their_gradient(h: oxidnn.DnnHandle, layout: Any) -> None:
    x, z, dy = (layout(normal(2, 8, 4, 4, seed=s)) for s in range(3))
    gamma, beta = normal(8, seed=3), normal(8, seed=4)

    def function(x: Any, gamma: Any, beta: Any, z: Any) -> Any:
        return F.relu(F.batch_norm(x, None, None, gamma, beta, True) + z)

    y, mean, rstd, mask = h.batch_norm(x, gamma, beta, training=True, residual=z, epilogue="relu(acc + residual)", return_stats=True,
                                       return_mask=True)
    assert mask.dtype == np.uint8 and mask.size == x.size // 8
    want = gradients(function, dy, x, gamma, beta, z)
    for given in ({"mask": mask}, {"y": y}):
        got = h.batch_norm_backward(dy, x, mean, rstd, gamma, return_residual=True, **given)
        for a, b in zip(got, want, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-11)


def test_shares_of_several_devices_make_the_whole(h: oxidnn.DnnHandle) -> None:
    x, dy, gamma = normal(6, 5, 7) + 100, normal(6, 5, 7, seed=1), normal(5, seed=2)
    running = normal(5, seed=3), np.abs(normal(5, seed=4))
    shares = [slice(0, 1), slice(1, 4), slice(4, 4), slice(4, 6)]
    parts = [h.batch_norm_stats(x[s]) for s in shares]
    counts, means, m2s = np.concatenate([p[0] for p in parts]), np.stack([p[1] for p in parts]), np.stack([p[2] for p in parts])
    np.testing.assert_array_equal(counts, [7, 21, 0, 14])
    mean, rstd, new_mean, new_var = h.batch_norm_gather(counts, means, m2s, *running)
    whole = [r.copy() for r in running]
    y, want_mean, want_rstd = h.batch_norm(x, gamma, None, *whole, training=True, return_stats=True)
    for a, b in ((mean, want_mean), (rstd, want_rstd), (new_mean, whole[0]), (new_var, whole[1])):
        np.testing.assert_allclose(a, b, rtol=1e-12)
    np.testing.assert_allclose(np.concatenate([h.batch_norm_apply(x[s], mean, rstd, gamma) for s in shares]), y, rtol=1e-9, atol=1e-12)
    sums = [h.batch_norm_backward_reduce(dy[s], x[s], mean, rstd) for s in shares]
    sum_dy, product = (sum(part[i] for part in sums) for i in (0, 1))
    dx, dgamma, dbeta = h.batch_norm_backward(dy, x, mean, rstd, gamma)
    np.testing.assert_allclose(sum_dy, dbeta, rtol=1e-12)
    np.testing.assert_allclose(product, dgamma, rtol=1e-10)
    got = [h.batch_norm_backward_apply(dy[s], x[s], mean, rstd, sum_dy, product, np.array([42.0]), gamma) for s in shares]
    np.testing.assert_allclose(np.concatenate(got), dx, rtol=1e-9, atol=1e-12)


def test_documented_values(h: oxidnn.DnnHandle) -> None:
    x, running = np.array([1, 2, 3, 6], np.float32).reshape(4, 1), [np.zeros(1, np.float32), np.ones(1, np.float32)]
    y = h.batch_norm(x, None, None, *running, training=True)
    np.testing.assert_allclose(y[:, 0], [-1.0690, -0.5345, 0, 1.6036], atol=1e-4)
    np.testing.assert_allclose([running[0][0], running[1][0]], [0.3, 1.3666667], rtol=1e-6)
    far = (4096 + np.arange(4) / 64).astype(np.float32).reshape(1, 1, 4)
    np.testing.assert_allclose(h.instance_norm(far)[0, 0], [-1.320185, -0.440062, 0.440062, 1.320185], rtol=1e-6)


def test_constant_channels_give_beta_and_nan_stays_in_its_channel(h: oxidnn.DnnHandle) -> None:
    x = normal(5, 4, 37).astype(np.float32)
    x[:, 1], x[2, 3, 0] = 0.7, np.nan
    beta = np.arange(4, dtype=np.float32)
    for layout in (np.ascontiguousarray, nhwc):
        y = h.batch_norm(layout(x), None, beta, training=True)
        np.testing.assert_array_equal(y[:, 1], np.ones((5, 37), np.float32))
        assert np.isnan(y[:, 3]).all() and np.isfinite(y[:, :3]).all()


def test_empty_batches(h: oxidnn.DnnHandle) -> None:
    x, running = np.empty((0, 3, 4), np.float32), [np.full(3, 2.0, np.float32), np.full(3, 5.0, np.float32)]
    y, mean, rstd = h.batch_norm(x, None, None, *running, training=True, return_stats=True)
    assert y.shape == x.shape and (running[0] == 2).all() and (running[1] == 5).all() and not mean.any() and not rstd.any()
    _, dgamma, dbeta = h.batch_norm_backward(x, x, mean, rstd, np.ones(3, np.float32))
    assert not dgamma.any() and not dbeta.any()
    _, dgamma, dbeta = h.group_norm_backward(x, x, np.empty((0, 3), np.float32), np.empty((0, 3), np.float32), 3, np.ones(3, np.float32))
    assert not dgamma.any() and not dbeta.any()


X = np.ones((2, 6, 3), np.float32)
C6, C5 = np.ones(6, np.float32), np.ones(5, np.float32)
REFUSED = {
    "one value": (lambda h: h.batch_norm(X[:1, :, :1], training=True), "more than one value a channel"),
    "one position": (lambda h: h.instance_norm(X[:, :, :1]), "more than one spatial position"),
    "no running": (lambda h: h.batch_norm(X, training=False), "running_mean"),
    "one running": (lambda h: h.batch_norm(X, None, None, C6, training=True), "running_var"),
    "training": (lambda h: h.batch_norm(X, training=1), "training"),
    "gamma": (lambda h: h.batch_norm(X, C5, training=True), "shape of gamma"),
    "stats": (lambda h: h.batch_norm(X, None, None, C6, C6, training=False, return_stats=True), "return_stats"),
    "mask": (lambda h: h.batch_norm(X, training=True, epilogue="relu(acc)", return_mask=True), "multiple of 8"),
    "both": (lambda h: h.batch_norm_backward(X, X, C6, C6, mask=np.ones((2, 6, 1), np.uint8), y=X), "either mask or y"),
    "groups": (lambda h: h.group_norm(X, 4), "divisor of the 6 channels"),
    "groups 0": (lambda h: h.group_norm(X, 0), "groups"),
    "rank": (lambda h: h.group_norm(C6, 2), "shape of x"),
    "statistics": (lambda h: h.group_norm_backward(X, X, C6, C6, 2), "shape of mean"),
    "eps": (lambda h: h.instance_norm(X, eps=-1.0), "eps"),
    "dtype": (lambda h: h.group_norm(X.astype(np.int32), 2), "type of x"),
    "mean type": (lambda h: h.batch_norm_apply(X, C6.astype(np.float64), C6), "type of mean"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, h: oxidnn.DnnHandle) -> None:
    call, match = REFUSED[name]
    with pytest.raises(oxidnn.InvalidArgument, match=match):
        call(h)


def test_statistics_of_each_activation(h: oxidnn.DnnHandle) -> None:
    """Over the batch alone: x as (N, C * positions), and its gradient."""
    x, dy, gamma = normal(6, 2, 3, 4), normal(6, 2, 3, 4), normal(24)
    flat = x.reshape(6, -1)
    y, mean, rstd = h.batch_norm(flat, gamma, None, training=True, return_stats=True)
    want = (flat - flat.mean(0)) / np.sqrt(flat.var(0) + 1e-5) * gamma
    np.testing.assert_allclose(y, want, rtol=1e-10, atol=1e-12)
    dx, _, _ = h.batch_norm_backward(dy.reshape(6, -1), flat, mean, rstd, gamma)
    np.testing.assert_allclose(np.asarray(dx).sum(0), np.zeros(24), atol=1e-10)
