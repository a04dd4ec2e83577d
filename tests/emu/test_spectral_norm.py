"""Spectral normalisation: PyTorch's and its autograd, the singular value in the end, differences, no spills, refusals."""

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


def unit(rng: np.random.Generator, n: int) -> np.ndarray:
    v = rng.standard_normal(n)
    return v / np.linalg.norm(v)


@pytest.mark.parametrize("dim", [0, 1])
def test_steps_and_gradient_are_those_of_torch(h: oxidnn.DnnHandle, dim: int) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    layer = torch.nn.Conv2d(5, 8, 3, bias=False, dtype=torch.float64)
    torch.nn.utils.spectral_norm(layer, dim=dim)  # its newer parametrization begins with u; the paper and this one with v
    u, v = layer.weight_u.numpy().copy(), layer.weight_v.numpy().copy()
    original = layer.weight_orig
    w = original.detach().numpy()
    for training, iterations in ((True, 1), (True, 1), (False, 0)):
        layer.train(training)(torch.zeros(1, 5, 3, 3, dtype=torch.float64))
        want = layer.weight
        y, sigma, *new = h.spectral_norm(w, u, v, dim, iterations=iterations)
        np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-10)
        if training:
            u, v = (np.asarray(a) for a in new)
            np.testing.assert_allclose(u, layer.weight_u.numpy(), rtol=1e-10, atol=1e-13)
            np.testing.assert_allclose(v, layer.weight_v.numpy(), rtol=1e-10, atol=1e-13)
        original.grad = None
        upstream = rng.standard_normal(w.shape)
        want.backward(torch.tensor(upstream))
        np.testing.assert_allclose(h.spectral_norm_backward(upstream, w, u, v, sigma, dim), original.grad.numpy(), rtol=1e-8, atol=1e-11)


def test_sigma_becomes_the_largest_singular_value(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(1)
    w = rng.standard_normal((12, 7)).astype(np.float32)
    w += 10 * np.outer(unit(rng, 12), unit(rng, 7)).astype(np.float32)
    y, sigma, _, _ = h.spectral_norm(w, unit(rng, 12).astype(np.float32), unit(rng, 7).astype(np.float32), iterations=30)
    np.testing.assert_allclose(np.asarray(sigma), np.linalg.svd(w)[1][0], rtol=1e-5)
    np.testing.assert_allclose(np.linalg.svd(np.asarray(y))[1][0], 1, rtol=1e-5)


def test_gradient_by_finite_differences(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(2)
    w, u, v, upstream = rng.standard_normal((4, 6)), unit(rng, 4), unit(rng, 6), rng.standard_normal((4, 6))
    _, sigma = h.spectral_norm(w, u, v, iterations=0)
    want = central_differences(lambda: float((np.asarray(h.spectral_norm(w, u, v, iterations=0)[0]) * upstream).sum()), w)
    np.testing.assert_allclose(h.spectral_norm_backward(upstream, w, u, v, sigma), want, rtol=1e-4, atol=1e-7)


def test_new_vectors_may_take_the_place_of_the_old(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(3)
    w, u, v = rng.standard_normal((6, 5)), unit(rng, 6), unit(rng, 5)
    y, sigma, new_u, new_v = (np.asarray(a).copy() for a in h.spectral_norm(w, u, v))
    placed = (np.empty_like(w), np.empty(()), u.copy(), v.copy())
    h.spectral_norm(w, placed[2], placed[3], out=placed)
    for got, want in zip(placed, (y, sigma, new_u, new_v), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_assemble_without_spills(arch: str) -> None:
    device = known_device(arch)
    for line in (*CASES["spectral_norm"], *CASES["spectral_norm_backward"], "spectral_norm w=bf16[512,4608] u=f32[512] v=f32[4608]"):
        problem = parse_case(line)
        engine = ENGINES[problem.op][0]
        for step in engine.build_steps(problem, engine.configs(problem, device)[0], device).steps:
            assembled = assemble(render(step.spec), arch)
            assert assembled.spill_bytes == 0 and assembled.registers <= step.spec.max_registers, step.spec.describe()


def test_refusals(h: oxidnn.DnnHandle) -> None:
    w, u, v = np.zeros((4, 6)), np.zeros(4), np.zeros(6)
    for call, message in ((lambda: h.spectral_norm(u, u, v), "shape of w"), (lambda: h.spectral_norm(w, v, v), "shape of u"),
                          (lambda: h.spectral_norm(w, u, u), "shape of v"), (lambda: h.spectral_norm(w, u, v, 2), "dim is"),
                          (lambda: h.spectral_norm(w, u.astype(np.float32), v), "type of u"),
                          (lambda: h.spectral_norm(w, u, v, iterations=-1), "iterations"),
                          (lambda: h.spectral_norm(w, u, v, eps=0.0), "eps"),
                          (lambda: h.spectral_norm_backward(w, w, u, v, np.zeros(1)), "shape of sigma")):
        with pytest.raises(InvalidArgument, match=message):
            call()
