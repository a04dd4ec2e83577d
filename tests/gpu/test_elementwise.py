"""Elementwise ops on a GPU, torch as a second opinion: gates, 8-bit casts, values with indices, slopes' gradients, draws under capture."""

from __future__ import annotations

from typing import Any

import pytest

import oxidnn

pytestmark = pytest.mark.gpu


def test_a_captured_graph_draws_by_the_state_in_memory(torch: Any, h: oxidnn.DnnHandle) -> None:
    x, state = torch.randn(1 << 16, device="cuda"), torch.tensor([3, 0], dtype=torch.int64, device="cuda")
    y = torch.empty_like(x)
    h.dropout(x, 0.3, state=state, out=y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h.dropout(x, 0.3, state=state, out=y)
    for offset in (1, 2, 2):
        state[1] = offset
        graph.replay()
        assert torch.equal(y, h.dropout(x, 0.3, seed=3, offset=offset))


@pytest.mark.parametrize("shape", [(33, 514), (256, 4096)])
def test_gates_are_those_of_torch(torch: Any, h: oxidnn.DnnHandle, shape: tuple[int, int]) -> None:
    functional = torch.nn.functional
    formulas = {"glu": lambda a, b: a * torch.sigmoid(b), "swiglu": lambda a, b: functional.silu(a) * b,
                "geglu": lambda a, b: functional.gelu(a) * b, "reglu": lambda a, b: functional.relu(a) * b}  # fmt: skip
    x = torch.randn(shape, device="cuda", dtype=torch.float64, requires_grad=True)
    for name, formula in formulas.items():
        y = formula(*x.chunk(2, -1))
        dy = torch.randn_like(y)
        (dx,) = torch.autograd.grad(y, x, dy)
        torch.testing.assert_close(h.glu(x.detach(), name=name), y.detach(), rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(h.glu_backward(dy, x.detach(), name=name), dx, rtol=1e-11, atol=1e-12)
        half = x.detach().bfloat16()
        torch.testing.assert_close(h.glu(half, name=name).double(), formula(*half.double().chunk(2, -1)), rtol=1e-2, atol=1e-3)


def test_casts_to_8_bits_are_those_of_torch(torch: Any, h: oxidnn.DnnHandle) -> None:
    """Within the range both round to nearest even; codes are read alike."""
    for name in ("float8_e4m3fn", "float8_e5m2"):
        kind = getattr(torch, name)
        codes = torch.arange(256, device="cuda", dtype=torch.uint8).view(kind)
        wide = codes.float()
        torch.testing.assert_close(h.cast(codes, "float32"), wide, rtol=0, atol=0, equal_nan=True)
        x = torch.randn(100003, device="cuda") * 30
        assert torch.equal(h.cast(x, kind).view(torch.uint8), x.to(kind).view(torch.uint8))
        assert torch.equal(h.cast(x.double(), kind, saturate=False).view(torch.uint8), x.to(kind).view(torch.uint8))


def test_values_with_indices_and_slopes(torch: Any, h: oxidnn.DnnHandle) -> None:
    x = torch.randn(70, 3001, device="cuda").round(decimals=1)
    for axis in (0, 1):
        values, indices = h.reduce(x, "max", axis, return_indices=True)
        assert torch.equal(values, x.amax(axis)) and torch.equal(x.gather(axis, indices.unsqueeze(axis)).squeeze(axis), values)
        first = (x == values.unsqueeze(axis)).int().argmax(axis)
        assert torch.equal(indices, first)
    x = torch.randn(5, 7, 9, 11, device="cuda", dtype=torch.float64, requires_grad=True)
    slope = torch.rand(7, device="cuda", dtype=torch.float64, requires_grad=True)
    y = torch.nn.functional.prelu(x, slope)
    dy = torch.randn_like(y)
    for got, want in zip(h.prelu_backward(dy, x.detach(), slope.detach()), torch.autograd.grad(y, (x, slope), dy), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)
