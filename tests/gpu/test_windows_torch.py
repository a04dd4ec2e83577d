"""Unfolding, folding and causal convolution on a device against torch, its autograd included; larger than the random problems are."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_unfold_and_fold(torch: Any, h: Any, kind: str) -> None:
    F = torch.nn.functional
    x = torch.randn(3, 17, 45, 38, device="cuda", dtype=getattr(torch, kind))
    for window in ({"padding": 1}, {"stride": 2, "padding": (2, 1)}, {"dilation": 2, "stride": (1, 3)}):
        columns = F.unfold(x, 3, **window)
        assert torch.equal(h.unfold(x, 3, **window), columns)
        last = h.unfold(x.to(memory_format=torch.channels_last), 3, **window)
        assert torch.equal(last, columns)
        want = F.fold(columns.double(), (45, 38), 3, **window)
        got = h.fold(columns, (45, 38), 3, **window)
        torch.testing.assert_close(got.double(), want, rtol=1e-6 if kind == "float32" else 2**-8, atol=1e-5)


@pytest.mark.parametrize("is_last", [False, True])
def test_causal_convolution_and_its_gradients(torch: Any, h: Any, is_last: bool) -> None:
    F = torch.nn.functional
    x = torch.randn(2, 96, 1003, device="cuda", dtype=torch.float64)
    x = x.transpose(1, 2).contiguous().transpose(1, 2) if is_last else x
    w, bias = torch.randn(96, 4, device="cuda", dtype=torch.float64), torch.randn(96, device="cuda", dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (x, w, bias)]
    y = F.silu(F.conv1d(F.pad(inputs[0], (3, 0)), inputs[1][:, None], inputs[2], groups=96))
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, inputs, dy)
    x, w, bias = (t.detach() for t in inputs)
    torch.testing.assert_close(h.causal_conv1d(x, w, bias, activation="silu"), y.detach())
    for got, wanted in zip(h.causal_conv1d_backward(dy, x, w, bias, activation="silu"), want, strict=True):
        torch.testing.assert_close(got, wanted)


def test_deformable_convolution_with_no_offsets(torch: Any, h: Any) -> None:
    """Gradients of x, w and bias are those of the plain convolution."""
    x = torch.randn(3, 48, 27, 31, device="cuda", dtype=torch.float64)
    w, bias = torch.randn(40, 24, 3, 3, device="cuda", dtype=torch.float64), torch.randn(40, device="cuda", dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (x, w, bias)]
    y = torch.conv2d(*inputs, 2, 1, 1, 2)
    dy = torch.randn_like(y)
    want = torch.autograd.grad(y, inputs, dy)
    x, w, bias = (t.detach() for t in inputs)
    offset, mask = (torch.full((3, n, *y.shape[2:]), v, device="cuda", dtype=torch.float64) for n, v in ((36, 0.0), (18, 1.0)))
    window = {"stride": 2, "padding": 1, "groups": 2}
    torch.testing.assert_close(h.deform_conv(x, offset, w, bias, mask=mask, **window), y.detach())
    dx, _, dw, dmask, dbias = h.deform_conv_backward(dy, x, offset, w, mask=mask, bias_gradient=True, **window)
    for got, wanted in zip((dx, dw, dbias), want, strict=True):
        torch.testing.assert_close(got, wanted)
    # y is linear in the mask
    torch.testing.assert_close((dmask * mask).sum(), (dy * (y.detach() - bias[:, None, None])).sum())
