"""Fractional max pooling against PyTorch's, and gradients of Lp pooling where no window reads."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn.errors import InvalidArgument


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


@pytest.mark.parametrize(("shape", "window", "size"), [
    ((2, 3, 11, 8), (2, 3), (5, 4)), ((1, 2, 25, 17), (2, 2), (17, 12)), ((1, 4, 9, 9), (3, 2), (7, 1)),
    ((2, 2, 7, 9, 6), (2, 2, 3), (4, 5, 2)), ((1, 1, 64, 3), (1, 3), (63, 1)),
])
@pytest.mark.parametrize("kind", ["float32", "float64"])
def test_windows_values_and_gradients_are_those_of_torch(h: oxidnn.DnnHandle, shape: tuple[int, ...], window: tuple[int, ...],
                                                         size: tuple[int, ...], kind: str) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(len(shape) + shape[2])
    for trial in range(3):
        x = np.round(rng.standard_normal(shape) * 3).astype(kind)  # with ties
        if trial == 2:
            x[rng.random(shape) < 0.1] = np.nan
        samples = rng.random((*shape[:2], len(window))).astype(kind)
        theirs = torch.tensor(x, requires_grad=True)
        pool = torch.nn.functional.fractional_max_pool2d if len(window) == 2 else torch.nn.functional.fractional_max_pool3d
        want, where = pool(theirs, window, output_size=size, return_indices=True, _random_samples=torch.tensor(samples))
        got, indices = h.fractional_max_pool(x, window, samples, output_size=size, return_indices=True)
        np.testing.assert_array_equal(got, want.detach().numpy())
        np.testing.assert_array_equal(indices, where.numpy())
        dy = rng.standard_normal(got.shape).astype(kind)
        want.backward(torch.tensor(dy))
        dx = h.fractional_max_pool_backward(dy, indices, shape, window, output_size=size)
        np.testing.assert_allclose(dx, theirs.grad.numpy(), rtol=1e-5, atol=1e-6)


def test_a_ratio_is_that_of_torch(h: oxidnn.DnnHandle) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, samples = rng.standard_normal((1, 2, 13, 10)).astype(np.float32), rng.random((1, 2, 2)).astype(np.float32)
    want = torch.nn.functional.fractional_max_pool2d(torch.tensor(x), 2, output_ratio=(0.7, 0.5), _random_samples=torch.tensor(samples))
    np.testing.assert_array_equal(h.fractional_max_pool(x, 2, samples, output_ratio=(0.7, 0.5)), want.numpy())
    for ratio in (1.5, (0.5,), "half"):
        with pytest.raises(InvalidArgument, match="output_ratio"):
            h.fractional_max_pool(x, 2, samples, output_ratio=ratio)
    with pytest.raises(InvalidArgument, match="output_size is None"):
        h.fractional_max_pool(x, 2, samples)


def test_samples_out_of_range_read_no_memory_beyond(h: oxidnn.DnnHandle) -> None:
    x = np.arange(20, dtype=np.float32).reshape(1, 1, 4, 5)
    for bad in (-7.0, 1.0, 50.0, np.nan, np.inf):
        y = h.fractional_max_pool(x, 2, np.full((1, 1, 2), bad, np.float32), output_size=(2, 3))
        assert np.isin(y, x).all()


def test_refusals(h: oxidnn.DnnHandle) -> None:
    x, samples = np.zeros((1, 1, 5, 5), np.float32), np.zeros((1, 1, 2), np.float32)
    with pytest.raises(InvalidArgument, match=r"output_size\[1\] is 5"):
        h.fractional_max_pool(x, 2, samples, output_size=(4, 5))
    with pytest.raises(InvalidArgument, match="shape of samples"):
        h.fractional_max_pool(x, 2, samples[..., :1], output_size=3)
    with pytest.raises(InvalidArgument, match="type of x"):
        h.fractional_max_pool(x.astype(np.int32), 2, samples, output_size=3)
    with pytest.raises(InvalidArgument, match="indices"):
        h.fractional_max_pool_backward(np.zeros((1, 1, 3, 3), np.float32), None, (1, 1, 5, 5), 2, output_size=3)


@pytest.mark.parametrize("norm", [1.0, 2.0, 3.0])
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_no_lp_window_reads_does_not_reach_its_gradient(h: oxidnn.DnnHandle, norm: float, bad: float) -> None:
    x = np.ones((1, 1, 7), np.float32)
    x[..., 2::3] = bad  # windows of 2 in steps of 3 read elements 0, 1, 3, 4 and not 2 and 5; 6 is beyond the last
    x[..., 6] = bad
    y = h.lp_pool(x, 2, stride=3, norm=norm)
    dx = h.lp_pool_backward(np.ones_like(y), x, y, 2, stride=3, norm=norm)
    assert np.isfinite(y).all()
    np.testing.assert_array_equal(dx[0, 0, [2, 5, 6]], 0)
    np.testing.assert_allclose(dx[0, 0, [0, 1, 3, 4]], 2 ** (1 / norm - 1), rtol=1e-5)


def test_a_nan_that_a_window_reads_reaches_all_of_it(h: oxidnn.DnnHandle) -> None:
    x = np.ones((1, 1, 6), np.float32)
    x[..., 0] = np.nan
    for norm in (1.0, 2.0, 3.0):
        y = h.lp_pool(x, 2, norm=norm)
        dx = h.lp_pool_backward(np.ones_like(y), x, y, 2, norm=norm)
        assert np.isnan(dx[0, 0, 0]) and np.isfinite(dx[0, 0, 2:]).all()
