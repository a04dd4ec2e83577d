"""Local response normalisation against PyTorch's, its gradient against autograd and finite differences, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument, Unsupported
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

from .differences import central_differences


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


@pytest.mark.parametrize("shape", [(2, 16, 5, 7), (1, 3, 9), (2, 24, 3, 2, 2), (3, 40)])
@pytest.mark.parametrize("size", [1, 3, 5, 11, 33])
@pytest.mark.parametrize("last", [False, True])
def test_value_and_gradient_are_those_of_torch(h: oxidnn.DnnHandle, shape: tuple[int, ...], size: int, last: bool) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(size)
    x, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    theirs = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    padded = theirs if len(shape) > 2 else theirs[..., None]  # torch wants a spatial dimension
    want = torch.nn.functional.local_response_norm(padded, size, alpha=1.5, beta=0.6, k=1.25).reshape(shape)
    want.backward(torch.tensor(dy, dtype=torch.float64))
    if last:
        x, dy = (np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1) for a in (x, dy))
    options = {"alpha": 1.5, "beta": 0.6, "k": 1.25}
    np.testing.assert_allclose(h.lrn(x, size, **options), want.detach().numpy(), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(h.lrn_backward(dy, x, size, **options), theirs.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_even_windows_reach_one_channel_further_behind(h: oxidnn.DnnHandle) -> None:
    x = np.zeros((1, 6, 1), np.float64)
    x[0, 3] = 2.0
    y = h.lrn(x + 1e-3, 4, alpha=4.0, beta=1.0, k=1.0)  # s = 1 + sum of squares, over c - 1 to c + 2
    np.testing.assert_allclose(y[0, :, 0] < 5e-4, [False, True, True, False, True, False])
    assert y[0, 3, 0] == pytest.approx(2.001 / (1 + 2.001**2 + 3e-6), rel=1e-6)


def test_gradient_of_even_windows_by_differences(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((1, 7, 1)), rng.standard_normal((1, 7, 1))
    options = {"alpha": 2.0, "beta": 0.8, "k": 0.9}
    dx = h.lrn_backward(dy, x, 4, **options)
    for c in range(7):
        step = np.zeros_like(x)
        step[0, c] = 1e-6
        slope = ((h.lrn(x + step, 4, **options) - h.lrn(x - step, 4, **options)) * dy).sum() / 2e-6
        assert dx[0, c, 0] == pytest.approx(slope, rel=1e-6, abs=1e-8)


def test_nan_and_infinity_stay_within_their_windows(h: oxidnn.DnnHandle) -> None:
    x = np.ones((1, 12, 2), np.float32)
    x[0, 4, 0], x[0, 4, 1] = np.nan, np.inf
    y = h.lrn(x, 3)
    assert np.isnan(y[0, 3:6, 0]).all() and np.isfinite(np.delete(y[0, :, 0], [3, 4, 5])).all()
    assert np.isnan(y[0, 4, 1]) and (y[0, [3, 5], 1] == 0).all()
    dx = h.lrn_backward(np.ones_like(x), x, 3)
    assert np.isfinite(dx[0, np.r_[0:2, 7:12], 0]).all() and np.isnan(dx[0, 2:7, 0]).all()


def test_half_precision_squares_do_not_overflow(h: oxidnn.DnnHandle) -> None:
    x = np.full((1, 8, 3), 3000.0, np.float16)  # squares are past the largest f16
    np.testing.assert_allclose(h.lrn(x, 3, alpha=3.0, beta=0.5, k=1.0)[:, 1:7].astype(np.float64), 3**-0.5, rtol=1e-3)


def test_refusals(h: oxidnn.DnnHandle) -> None:
    x = np.ones((2, 4, 3), np.float32)
    with pytest.raises(InvalidArgument, match="size is 0"):
        h.lrn(x, 0)
    with pytest.raises(InvalidArgument, match="rank of x is 1"):
        h.lrn(x[0, 0])
    with pytest.raises(InvalidArgument, match="alpha is nan"):
        h.lrn(x, alpha=np.nan)
    with pytest.raises(InvalidArgument, match="shape of dy"):
        h.lrn_backward(x[:1], x)
    with pytest.raises(Unsupported, match="at most 33"):
        h.lrn(x, 34)
    with pytest.raises(InvalidArgument, match="overlaps"):
        h.lrn(x, out=x)


@pytest.mark.parametrize("shape", [(2, 3, 9), (2, 4, 6, 7), (1, 2, 5, 6, 5)])
@pytest.mark.parametrize("size", [1, 3, 5])
def test_windows_within_channels_are_average_pools_of_squares(h: oxidnn.DnnHandle, shape: tuple[int, ...], size: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(size)
    x, dy = (rng.standard_normal(shape).astype(np.float32) for _ in range(2))
    theirs = torch.tensor(x, dtype=torch.float64, requires_grad=True)
    pool = {3: torch.nn.functional.avg_pool1d, 4: torch.nn.functional.avg_pool2d, 5: torch.nn.functional.avg_pool3d}[len(shape)]
    want = theirs / (1.25 + 1.5 * pool(theirs**2, size, 1, size // 2)) ** 0.6
    want.backward(torch.tensor(dy, dtype=torch.float64))
    options = {"alpha": 1.5, "beta": 0.6, "k": 1.25, "within": True}
    for last in (False, True):
        a, b = (np.moveaxis(np.ascontiguousarray(np.moveaxis(v, 1, -1)), -1, 1) if last else v for v in (x, dy))
        np.testing.assert_allclose(h.lrn(a, size, **options), want.detach().numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(h.lrn_backward(b, a, size, **options), theirs.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_windows_within_channels_want_a_spatial_dimension(h: oxidnn.DnnHandle) -> None:
    with pytest.raises(InvalidArgument, match="rank of x is 2"):
        h.lrn(np.ones((2, 3), np.float32), within=True)


def test_local_contrast_normalisation_is_of_poolings(h: oxidnn.DnnHandle) -> None:
    """Subtractive and divisive: d = x - mean around, d / max(c, root of the mean of d^2 around), padding counted as 0."""
    x, size, c = np.random.default_rng(0).standard_normal((2, 3, 9, 8)), 5, 0.8
    around = {"stride": 1, "padding": size // 2}
    d = h.pointwise("x - m", x, h.avg_pool(x, size, **around))
    y = h.pointwise("d / maximum(sqrt(v), 0.8)", d, h.avg_pool(h.pointwise("d * d", d), size, **around))

    def mean(values: np.ndarray) -> np.ndarray:
        padded = np.pad(values, [(0, 0)] * 2 + [(size // 2, size // 2)] * 2)
        return np.lib.stride_tricks.sliding_window_view(padded, (size, size), (2, 3)).mean((-1, -2))

    want = x - mean(x)
    np.testing.assert_allclose(y, want / np.maximum(c, np.sqrt(mean(want**2))), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(("shape", "size"), [((2, 2, 7), 3), ((1, 2, 4, 5), 4), ((1, 1, 3, 3, 3), 2)])
@pytest.mark.parametrize("has_means", [False, True])
def test_divisive_normalisation_and_its_gradients(h: oxidnn.DnnHandle, shape: tuple[int, ...], size: int, has_means: bool) -> None:
    rng, attrs = np.random.default_rng(3), {"alpha": 1.5, "beta": 0.7, "k": 0.6}
    x, means, dy = rng.standard_normal(shape), rng.standard_normal(shape) if has_means else None, rng.standard_normal(shape)
    before, spatial = (size - 1) // 2, tuple(range(2, len(shape)))
    squares = (x - (means if means is not None else 0)) ** 2
    padded = np.pad(squares, [(0, 0)] * 2 + [(before, size - 1 - before)] * len(spatial))
    total = np.lib.stride_tricks.sliding_window_view(padded, (size,) * len(spatial), spatial).sum(tuple(range(-len(spatial), 0)))
    want = x / (0.6 + 1.5 / size ** len(spatial) * total) ** 0.7
    np.testing.assert_allclose(h.divisive_norm(x, means, size, **attrs), want, rtol=1e-12)
    found = h.divisive_norm_backward(dy, x, means, size, **attrs)
    for got, of in zip(found if has_means else (found,), (x, means) if has_means else (x,), strict=True):
        assert of is not None
        differences = central_differences(lambda: float((np.asarray(h.divisive_norm(x, means, size, **attrs)) * dy).sum()), of)
        np.testing.assert_allclose(got, differences, rtol=1e-6, atol=1e-8)


def test_local_contrast_is_divisive_normalisation_of_what_the_mean_leaves(h: oxidnn.DnnHandle) -> None:
    """cuDNN's recipe in two steps, beside the one of poolings above; without a floor under the deviation k takes the part of c^2."""
    x, size = np.random.default_rng(0).standard_normal((2, 3, 9, 8)), 5
    around = {"stride": 1, "padding": size // 2}
    d = h.pointwise("x - m", x, h.avg_pool(x, size, **around))
    variance = h.avg_pool(h.pointwise("d * d", d), size, **around)
    want = h.pointwise("d / sqrt(0.3 + v)", d, variance)
    np.testing.assert_allclose(h.divisive_norm(d, size=size, k=0.3), want, rtol=1e-11, atol=1e-14)


def test_refusals_of_divisive_normalisation(h: oxidnn.DnnHandle) -> None:
    x = np.ones((2, 3, 5), np.float32)
    for call, words in (
        (lambda: h.divisive_norm(np.ones((2, 3), np.float32)), "rank of x"), (lambda: h.divisive_norm(x, x[:, :2]), "shape of means"),
        (lambda: h.divisive_norm(x, x.astype(np.float64)), "type of means"), (lambda: h.divisive_norm(x, size=0), "size"),
        (lambda: h.divisive_norm_backward(x[:1], x), "shape of dy"), (lambda: h.divisive_norm(x, beta=np.inf), "beta"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            call()


@pytest.mark.parametrize("line", [
    "divisive_norm x=f32[2,3,9,7]nchw", "divisive_norm x=f32[2,3,19,7]nchw means=f32[2,3,19,7]nhwc",
    "lrn x=bf16[1,8,4,9,3]nhwc size=2 within=True",
    "divisive_norm x=f64[1,2,3,14,5]nchw means=f64[1,2,3,14,5]nchw size=2 beta=0.75", "divisive_norm x=f16[1,3,1,5]nchw size=6",
    "divisive_norm_backward dy=f32[2,3,9,7]nchw x=f32[2,3,9,7]nhwc means=f32[2,3,9,7]nchw",
    "divisive_norm_backward dy=f16[2,8,25,6]nhwc x=f16[2,8,25,6]nhwc size=4",
    "divisive_norm x=bf16[2,16,9,5]nhwc", "divisive_norm x=f32[2,8,9,5]nhwc means=f32[2,8,9,5]nhwc size=4",
    "divisive_norm_backward dy=f16[2,8,9,5]nhwc x=f16[2,8,9,5]nhwc means=f16[2,8,9,5]nhwc size=3",
    "lrn x=f32[1,4,3,5,4]nhwc within=True",
    "divisive_norm x=f32[2,3,9,8]nchw size=7", "divisive_norm x=f16[2,3,9,4]nchw means=f16[2,3,9,4]nchw size=1",
    "lrn x=bf16[2,3,5,12]nchw size=4 alpha=2.0 within=True", "divisive_norm_backward dy=f16[2,3,9,12]nchw x=f16[2,3,9,12]nchw size=5",
    "divisive_norm_backward dy=f32[2,3,9,12]nchw x=f32[2,3,9,12]nchw means=f32[2,3,9,12]nchw size=5"])
def test_strips_of_windows_within_channels(line: str) -> None:
    """Strips that do not divide the rows, windows longer than the image, walked side by side, a stride apart or in packs."""
    backend, problem = EmulatedBackend("sm_80", checkers="all"), parse_case(line)
    engine = next(e for e in ENGINES[problem.op] if e.id == "lrn.within")
    configs = engine.configs(problem, backend.info)
    assert len(configs) > 1
    for config in configs:
        run_problem(backend, problem, engine, config)
