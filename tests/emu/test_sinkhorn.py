"""Sinkhorn's iterations: doubly stochastic results, PyTorch's autograd, differences, special values, refusals."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.testing.sample import CASES

from .differences import central_differences


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


@pytest.mark.parametrize("n", [1, 2, 4, 5])
def test_rows_and_columns_sum_to_one(h: oxidnn.DnnHandle, n: int) -> None:
    y = np.asarray(h.sinkhorn(np.random.default_rng(0).standard_normal((50, n, n)), iterations=60, eps=0.0))
    assert (y >= 0).all()
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-12)
    np.testing.assert_allclose(y.sum(-2), 1, rtol=1e-4)


@pytest.mark.parametrize(("n", "iterations"), [(4, 20), (3, 1), (5, 7)])
def test_values_and_gradient_are_those_of_autograd(h: oxidnn.DnnHandle, n: int, iterations: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    x = torch.tensor(rng.standard_normal((9, n, n)) * 2, requires_grad=True)
    want = (x - x.detach().amax(-2, keepdim=True)).exp()
    for _ in range(iterations):
        want = want / (want.sum(-2, keepdim=True) + 1e-6)
        want = want / (want.sum(-1, keepdim=True) + 1e-6)
    given = x.detach().numpy()
    np.testing.assert_allclose(h.sinkhorn(given, iterations=iterations), want.detach().numpy(), rtol=1e-11)
    upstream = rng.standard_normal(want.shape)
    want.backward(torch.tensor(upstream))
    np.testing.assert_allclose(h.sinkhorn_backward(upstream, given, iterations=iterations), x.grad.numpy(), rtol=1e-7, atol=1e-12)


def test_gradient_by_finite_differences(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(2)
    x, upstream = rng.standard_normal((2, 4, 4)), rng.standard_normal((2, 4, 4))
    want = central_differences(lambda: float((np.asarray(h.sinkhorn(x, iterations=5)) * upstream).sum()), x)
    np.testing.assert_allclose(h.sinkhorn_backward(upstream, x, iterations=5), want, rtol=1e-4, atol=1e-7)


def test_large_numbers_and_permutations(h: oxidnn.DnnHandle) -> None:
    """Differences count; a matrix far from flat becomes a permutation; NaN stays in its matrix."""
    x = np.eye(4, dtype=np.float32)[[2, 0, 3, 1]] * 1e4
    np.testing.assert_allclose(h.sinkhorn(np.stack([x, x + 3e4]), eps=0.0), np.stack([x / 1e4] * 2), atol=1e-6)
    bad = np.zeros((2, 4, 4), np.float32)
    bad[0, 1, 2] = np.nan
    y = np.asarray(h.sinkhorn(bad))
    assert np.isnan(y[0]).any() and np.allclose(y[1], 0.25, rtol=1e-5)


def test_streams_are_mixed_as_by_torch(h: oxidnn.DnnHandle) -> None:
    """A hyper-connection: the residual streams by a doubly stochastic matrix, the layer's result onto each by 2 sigmoid."""
    rng = np.random.default_rng(3)
    streams, result = rng.standard_normal((6, 4, 32)), rng.standard_normal((6, 32))
    mixing, gates = rng.standard_normal((6, 4, 4)), rng.standard_normal((6, 4, 1))
    added = h.pointwise("2 * sigmoid(gate) * f", gates, np.broadcast_to(result[:, None], (6, 1, 32)).copy())
    y = h.gemm(h.sinkhorn(mixing), streams, c=added, beta=1.0)
    want = np.asarray(h.sinkhorn(mixing)) @ streams + 2 / (1 + np.exp(-gates)) * result[:, None]
    np.testing.assert_allclose(y, want, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_assemble_without_spills(arch: str) -> None:
    device = known_device(arch)
    for line in (*CASES["sinkhorn"], *CASES["sinkhorn_backward"], "sinkhorn_backward dy=f32[5,8,8] x=f32[5,8,8](64,1,8)"):
        problem = parse_case(line)
        engine = ENGINES[problem.op][0]
        for step in engine.build_steps(problem, engine.configs(problem, device)[0], device).steps:
            assembled = assemble(render(step.spec), arch)
            assert assembled.spill_bytes == 0 and assembled.registers <= step.spec.max_registers, step.spec.describe()


def test_refusals(h: oxidnn.DnnHandle) -> None:
    for shape, more, message in (((3, 4), {}, "shape of x"), ((2, 9, 9), {}, "shape of x"), ((4,), {}, "shape of x"),
                                 ((4, 4), {"iterations": -1}, "iterations"), ((4, 4), {"eps": -1.0}, "eps")):
        with pytest.raises(InvalidArgument, match=message):
            h.sinkhorn(np.zeros(shape, np.float32), **more)
    with pytest.raises(InvalidArgument, match="from 1 to 5"):
        h.sinkhorn(np.zeros((6, 6)))
