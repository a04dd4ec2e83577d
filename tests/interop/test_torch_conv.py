"""Convolutions and their gradients against torch's autograd in float64, for random combinations of attributes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

import oxidnn

torch = pytest.importorskip("torch")
DEVICES = ["emu:sm_80", pytest.param("cuda:0", marks=pytest.mark.gpu)]
CONV = {1: torch.nn.functional.conv1d, 2: torch.nn.functional.conv2d, 3: torch.nn.functional.conv3d}
TRANSPOSED = {1: torch.nn.functional.conv_transpose1d, 2: torch.nn.functional.conv_transpose2d, 3: torch.nn.functional.conv_transpose3d}


class Geometry:
    """Attributes drawn at random; kernels may be larger than the image, as long as they fit its padding."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = np.random.default_rng(seed)
        self.spatial = s = 1 + seed % 3
        top = (9, 6, 3)[s - 1]

        def some(low: int, high: int) -> tuple[int, ...]:
            return tuple(int(v) for v in rng.integers(low, high + 1, s))

        self.groups = int(rng.choice((1, 1, 2, 3)))
        self.n, self.c, self.k = (int(v) for v in rng.integers(1, 4, 3))
        self.taps, self.stride, self.dilation = some(1, 3), some(1, 3), some(1, 2)
        self.padding = tuple(zip(some(0, 3), some(0, 3), strict=True))
        self.reach = [(r - 1) * d + 1 for r, d in zip(self.taps, self.dilation, strict=True)]
        self.extents = tuple(max(e, reach - lo - hi, 1) for e, reach, (lo, hi) in zip(some(1, top), self.reach, self.padding, strict=True))
        self.flip = bool(rng.random() < 0.3)

    def window(self) -> dict[str, Any]:
        return {"stride": self.stride, "padding": self.padding, "dilation": self.dilation, "groups": self.groups, "flip": self.flip}

    def draw(self, *shape: int, device: str) -> Any:
        values = torch.from_numpy(self.rng.standard_normal(shape))
        if self.rng.random() < 0.4 and len(shape) > 2:  # channels last
            values = values.movedim(1, -1).contiguous().movedim(-1, 1)
        return values.to(device).requires_grad_()


def read(w: Any, flip: bool) -> Any:
    return torch.flip(w, tuple(range(2, w.ndim))) if flip else w


def agree(got: Any, want: Any) -> None:
    assert tuple(got.shape) == tuple(want.shape) and got.dtype == torch.float64
    np.testing.assert_allclose(got.detach().cpu().numpy(), want.detach().cpu().numpy(), rtol=1e-12, atol=1e-12)


def where(device: str) -> str:
    if device == "cuda:0" and not torch.cuda.is_available():
        pytest.skip("torch has no CUDA device")
    return "cpu" if device.startswith("emu") else device


def pads(pairs: Sequence[tuple[int, int]]) -> list[int]:
    """As torch's pad wants them: the last dimension first."""
    return [v for pair in reversed(pairs) for v in pair]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(48))
def test_convolution(device: str, seed: int) -> None:
    place, g = where(device), Geometry(seed)
    h = oxidnn.DnnHandle(device)
    x, w = g.draw(g.n, g.c * g.groups, *g.extents, device=place), g.draw(g.k * g.groups, g.c, *g.taps, device=place)
    bias = g.draw(g.k * g.groups, device=place)
    padded = torch.nn.functional.pad(x, pads(g.padding))
    want = CONV[g.spatial](padded, read(w, g.flip), bias, g.stride, 0, g.dilation, g.groups)
    dy = g.draw(*want.shape, device=place)
    want.backward(dy.detach())
    x0, w0, dy0 = x.detach(), w.detach(), dy.detach()
    agree(h.conv(x0, w0, bias.detach(), **g.window()), want)
    agree(h.conv_dgrad(dy0, w0, tuple(x.shape), **g.window()), x.grad)
    agree(h.conv_wgrad(x0, dy0, tuple(w.shape), **g.window()), w.grad)
    agree(h.conv_bgrad(dy0), bias.grad)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(100, 148))
def test_transposed_convolution(device: str, seed: int) -> None:
    place, g = where(device), Geometry(seed)
    h = oxidnn.DnnHandle(device)
    more = tuple(int(g.rng.integers(0, max(s, d))) for s, d in zip(g.stride, g.dilation, strict=True))
    whole = [(e - 1) * s + r + o for e, s, r, o in zip(g.extents, g.stride, g.reach, more, strict=True)]
    g.padding = tuple((min(lo, (n - 1) // 2), min(hi, (n - 1) // 2)) for (lo, hi), n in zip(g.padding, whole, strict=True))
    x, w = g.draw(g.n, g.k * g.groups, *g.extents, device=place), g.draw(g.k * g.groups, g.c, *g.taps, device=place)
    bias = g.draw(g.c * g.groups, device=place)
    full = TRANSPOSED[g.spatial](x, read(w, g.flip), None, g.stride, 0, more, g.groups, g.dilation)
    inside = tuple(slice(lo, n - hi) for (lo, hi), n in zip(g.padding, full.shape[2:], strict=True))
    want = full[(slice(None), slice(None), *inside)] + bias.reshape(-1, *(1,) * g.spatial)
    dy = g.draw(*want.shape, device=place)
    want.backward(dy.detach())
    x0, w0, dy0 = x.detach(), w.detach(), dy.detach()
    window = g.window() | {"output_padding": more}
    agree(h.conv_transpose(x0, w0, bias.detach(), **window), want)
    agree(h.conv_transpose_dgrad(dy0, w0, tuple(x.shape), **window), x.grad)
    agree(h.conv_transpose_wgrad(x0, dy0, tuple(w.shape), **window), w.grad)
