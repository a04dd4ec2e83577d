"""A layer of 1024 x 1024 quantised on the card by GPTQ and AWQ, with torch's arrays, then run: against float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.calibration import InputStatistics, MinMaxObserver, PercentileObserver, awq, dequantized, gptq, output_error, round_to_nearest

pytestmark = pytest.mark.gpu
K = 1024


@pytest.fixture(scope="module")
def wx(torch: Any) -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    mix = rng.standard_normal((K, K)) * np.exp(rng.standard_normal(K))[:, None] / 32
    x = rng.standard_normal((4096, K)) @ mix
    x[:, ::97] *= 30
    return torch.from_numpy(rng.standard_normal((K, K)) / 32).bfloat16().cuda(), torch.from_numpy(x).bfloat16().cuda()


@pytest.fixture(scope="module")
def seen(h: oxidnn.DnnHandle, wx: tuple[Any, Any]) -> InputStatistics:
    """Of four batches."""
    statistics = InputStatistics(h)
    for x in wx[1].reshape(4, 2, 512, K):
        statistics.update(x)
    return statistics


def relative(w: Any, found: Any, x: Any) -> float:
    wide = x.double()
    return float((wide @ (found.double() - w.double()).T).norm() / (wide @ w.double().T).norm())


def test_statistics(seen: InputStatistics, wx: tuple[Any, Any]) -> None:
    wide = wx[1].double()
    want = wide.T @ wide
    assert seen.gram.dtype.is_floating_point and seen.gram.is_cuda and seen.rows == 4096
    assert float((seen.gram.double() - want).abs().max() / want.abs().max()) < 1e-5
    assert bool((seen.amax == wx[1].abs().amax(0)).all())


@pytest.mark.parametrize("kind,act_order", [("s4", False), ("u4", True), ("s8", False)])
def test_gptq_then_the_layer(kind: str, act_order: bool, h: oxidnn.DnnHandle, seen: InputStatistics, wx: tuple[Any, Any]) -> None:
    w, x = wx
    layer = gptq(h, w, seen, kind, act_order=act_order)
    found = dequantized(h, layer)
    error, base = relative(w, found, x), relative(w, dequantized(h, round_to_nearest(h, w, kind)), x)
    assert error < 0.5 * base
    assert output_error(h, w, layer, seen) == pytest.approx(error, rel=1e-3)
    for rows in (1, 16, 512):
        y = h.quantized_linear(x[:rows], **layer).double()
        want = x[:rows].double() @ found.double().T
        assert y.shape == (rows, K) and float((y - want).norm() / want.norm()) < 2**-8  # bf16 results, and numbers where engines round them


def test_awq_then_the_layer(h: oxidnn.DnnHandle, seen: InputStatistics, wx: tuple[Any, Any]) -> None:
    w, x = wx
    layer, scale, alpha, errors = awq(h, w, seen)
    assert 0 < alpha <= 1 and min(errors) < 0.8 * errors[0]
    assert relative(w, dequantized(h, layer) / scale, x) == pytest.approx(min(errors), rel=1e-3)
    y = h.quantized_linear(h.pointwise("x / s", x, scale), **layer).double()
    want = x.double() @ w.double().T
    assert float((y - want).norm() / want.norm()) < min(errors) + 2**-7


def test_on_another_stream(torch: Any, h: oxidnn.DnnHandle, seen: InputStatistics, wx: tuple[Any, Any]) -> None:
    """Arrays are read and made in the order of torch's own stream."""
    w, x = wx
    want, stream = gptq(h, w, seen), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        late = torch.zeros_like(w)
        torch.cuda._sleep(50_000_000)
        late.copy_(w)
        layer = gptq(h, late, seen)
        same = bool((layer["w"] == want["w"]).all())
    assert same


def test_observers(torch: Any, h: oxidnn.DnnHandle, wx: tuple[Any, Any]) -> None:
    x = wx[1]
    low, high = MinMaxObserver(h, -1).update(x).range()
    np.testing.assert_array_equal(low, x.double().amin(0).cpu().numpy())
    np.testing.assert_array_equal(high, x.double().amax(0).cpu().numpy())
    observer = PercentileObserver(h, 99.9).update(x[:2048]).update(x[2048:])
    ordered = x.float().flatten().sort().values
    outside = int(x.numel() * 0.001 + 1e-6)
    assert [float(v) for v in observer.range()] == [float(ordered[outside]), float(ordered[-1 - outside])]
    scale, zero = observer.scale("u8")
    assert scale.is_cuda and zero.dtype == torch.uint8
    back = h.dequantize(h.quantize(x, "u8", scale, zero_point=zero), scale, zero)
    inside = (x >= float(ordered[outside])) & (x <= float(ordered[-1 - outside]))
    assert float((back - x.float()).abs()[inside].max()) < 0.51 * float(scale) + 1e-6
