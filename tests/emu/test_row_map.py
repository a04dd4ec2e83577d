"""Maps of rows in the emulator: against PyTorch and its autograd, finite differences, special values, every config, no spills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import CASES, SAMPLES
from oxidnn.testing.sample.row_map import SAMPLES as OPS

NAN, INF = np.nan, np.inf


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def backward(torch: Any, want: Any, rng: np.random.Generator) -> np.ndarray:
    upstream = rng.standard_normal(want.shape)
    want.backward(torch.tensor(upstream))
    return upstream


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 1.5])
@pytest.mark.parametrize(("dim", "eps"), [(-1, 1e-12), (1, 1e-12), (1, 50.0)])
def test_normalize_is_that_of_torch(h: oxidnn.DnnHandle, p: float, dim: int, eps: float) -> None:
    """eps = 50 is above every norm: the gradient does not pass through the norm."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((4, 6, 5)), requires_grad=True)
    want = torch.nn.functional.normalize(x, p, dim, eps)
    np.testing.assert_allclose(h.normalize(x.detach().numpy(), p=p, axes=dim, eps=eps), want.detach().numpy(), rtol=1e-9)
    upstream = backward(torch, want, rng)
    got = h.normalize_backward(upstream, x.detach().numpy(), p=p, axes=dim, eps=eps)
    np.testing.assert_allclose(got, x.grad.numpy(), rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("dim", [0, 1, -1, None])
def test_weight_norm_is_that_of_torch(h: oxidnn.DnnHandle, dim: int | None) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    v = torch.tensor(rng.standard_normal((6, 4, 3, 3)), requires_grad=True)
    kept = [1] * 4 if dim is None else [n if i == dim % 4 else 1 for i, n in enumerate(v.shape)]
    g = torch.tensor(rng.standard_normal(kept), requires_grad=True)
    want = torch._weight_norm(v, g, -1 if dim is None else dim % 4) if dim is None or dim % 4 in (0, 3) else \
        v * (g / v.norm(2, [i for i in range(4) if i != dim], keepdim=True))
    given = (v.detach().numpy(), g.detach().numpy() if dim is not None else g.detach().numpy().reshape(1))
    w, norm = h.weight_norm(*given, dim, return_norm=True)
    np.testing.assert_allclose(w, want.detach().numpy(), rtol=1e-10)
    np.testing.assert_allclose(np.asarray(norm).ravel(), (v.detach() / (w / g.detach())).mean(
        tuple(range(4)) if dim is None else [i for i in range(4) if i != dim % 4]).numpy().ravel(), rtol=1e-9)
    upstream = backward(torch, want, rng)
    dv, dg = h.weight_norm_backward(upstream, *given, dim)
    np.testing.assert_allclose(dv, v.grad.numpy(), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(np.asarray(dg).ravel(), g.grad.numpy().ravel(), rtol=1e-9)


def test_scale_norm_by_autograd(h: oxidnn.DnnHandle) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, g = torch.tensor(rng.standard_normal((3, 5, 8)), requires_grad=True), torch.tensor([1.7], dtype=torch.float64, requires_grad=True)
    want = g * x / x.norm(dim=-1, keepdim=True).clamp(min=1e-5)
    given = x.detach().numpy(), g.detach().numpy()
    np.testing.assert_allclose(h.scale_norm(*given), want.detach().numpy(), rtol=1e-10)
    upstream = backward(torch, want, rng)
    dx, dg = h.scale_norm_backward(upstream, *given)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-8, atol=1e-12)
    np.testing.assert_allclose(dg, g.grad.numpy(), rtol=1e-9)


@pytest.mark.parametrize("p", [1.0, 2.0, 3.0, 1.5])
def test_power_norm_by_autograd(h: oxidnn.DnnHandle, p: float) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, gamma, beta = (torch.tensor(rng.standard_normal(s), requires_grad=True) for s in ((9, 12), (12,), (12,)))
    want = x / (x.abs().pow(p).mean(-1, keepdim=True) + 1e-3).pow(1 / p) * gamma + beta
    y, rstd = h.power_norm(*(t.detach().numpy() for t in (x, gamma, beta)), p=p, eps=1e-3, return_stats=True)
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-9, atol=1e-12)
    upstream = backward(torch, want, rng)
    dx, dgamma = h.power_norm_backward(upstream, x.detach().numpy(), rstd, gamma.detach().numpy(), p=p)
    np.testing.assert_allclose(dx, x.grad.numpy(), rtol=1e-7, atol=1e-12)
    np.testing.assert_allclose(dgamma, gamma.grad.numpy(), rtol=1e-9, atol=1e-12)


def test_power_norm_of_two_is_rms_norm(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(0)
    x, gamma = rng.standard_normal((4, 33)), rng.standard_normal(33)
    np.testing.assert_allclose(h.power_norm(x, gamma), h.rms_norm(x, gamma), rtol=1e-12)


def _sparsemax(torch: Any, x: Any) -> Any:
    """Of the last dimension, by sorting; differentiable."""
    z, _ = x.sort(-1, descending=True)
    k = torch.arange(1, x.shape[-1] + 1, dtype=x.dtype)
    support = ((1 + k * z) > z.cumsum(-1)).sum(-1, keepdim=True)
    t = (z.cumsum(-1).gather(-1, support - 1) - 1) / support
    return (x - t).clamp(min=0)


@pytest.mark.parametrize("scale", [0.01, 0.5, 5.0])
def test_sparsemax_is_the_projection_and_its_gradient_autograd_s(h: oxidnn.DnnHandle, scale: float) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x = torch.tensor(rng.standard_normal((7, 40)) * scale, requires_grad=True)
    want = _sparsemax(torch, x)
    y = np.asarray(h.sparsemax(x.detach().numpy()))
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-9, atol=1e-13)
    np.testing.assert_allclose(y.sum(-1), 1, rtol=1e-12)
    upstream = backward(torch, want, rng)
    np.testing.assert_allclose(h.sparsemax_backward(upstream, y), x.grad.numpy(), rtol=1e-8, atol=1e-12)
    # nearer than any other point of the simplex that was tried
    for _ in range(20):
        other = rng.exponential(size=y.shape)
        other /= other.sum(-1, keepdims=True)
        mixed = 0.9 * y + 0.1 * other
        given = x.detach().numpy()
        assert (((given - y) ** 2).sum(-1) <= ((given - mixed) ** 2).sum(-1) + 1e-12).all()


def test_sparsemax_of_published_and_special_values(h: oxidnn.DnnHandle) -> None:
    x = [[0, 0, 0], [1, 0, -1], [0.1, 1.1, 0.2], [100, 100, 0], [1e30, 0, -1e30], [-INF, 0, 0], [-INF] * 3, [0, NAN, 1], [INF, 0, 1]]
    want = [[1 / 3] * 3, [1, 0, 0], [0, 0.95, 0.05], [0.5, 0.5, 0], [1, 0, 0], [0, 0.5, 0.5], [NAN] * 3, [NAN] * 3, [NAN] * 3]
    np.testing.assert_allclose(h.sparsemax(np.array(x, np.float32)), want, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(h.sparsemax(np.array(x).T, 0).T, want, rtol=1e-12, atol=1e-14)
    assert np.isnan(h.sparsemax_backward(np.ones((1, 3), np.float32), np.full((1, 3), NAN, np.float32))).all()


@pytest.mark.parametrize("columns", [300, 5000, 20000])
def test_a_long_row_of_equal_values_keeps_them_all(columns: int) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    y = np.asarray(h.sparsemax(np.full((2, columns), 3.5, np.float32)))
    np.testing.assert_allclose(y, np.full((2, columns), 1 / columns), rtol=2e-6)


GRADIENTS: list[tuple[str, str, dict[str, Any], dict[str, tuple[int, ...]], tuple[str, ...]]] = [
    ("normalize", "normalize_backward", {"p": 3.0, "axes": (0, 2)}, {"x": (3, 4, 5), "g": (4,)}, ("x", "g")),
    ("normalize", "normalize_backward", {"p": 1.0}, {"x": (3, 5), "g": ()}, ("x", "g")),
    ("sparsemax", "sparsemax_backward", {}, {"x": (4, 6)}, ("x",)),
]


@pytest.mark.parametrize(("op", "gradient", "attrs", "shapes", "wrt"), GRADIENTS)
def test_gradients_by_finite_differences(h: oxidnn.DnnHandle, op: str, gradient: str, attrs: dict[str, Any],
                                         shapes: dict[str, tuple[int, ...]], wrt: tuple[str, ...]) -> None:
    rng, step = np.random.default_rng(2), 1e-6
    given = {n: np.asarray(rng.standard_normal(s) + 0.1) for n, s in shapes.items()}
    upstream = rng.standard_normal(given["x"].shape)
    y = getattr(h, op)(**given, **attrs)
    found = h.sparsemax_backward(upstream, y) if op == "sparsemax" else getattr(h, gradient)(upstream, **given, **attrs)
    for name, slope in zip(wrt, found if isinstance(found, tuple) else (found,), strict=True):
        for at in list(np.ndindex(given[name].shape))[:24]:
            values = []
            for sign in (1, -1):
                moved = {n: a.copy() for n, a in given.items()}
                moved[name][at] += sign * step
                values.append(float((np.asarray(getattr(h, op)(**moved, **attrs)) * upstream).sum()))
            assert (values[0] - values[1]) / (2 * step) == pytest.approx(float(np.asarray(slope)[at]), rel=1e-5, abs=1e-7), (name, at)


def test_zero_rows_and_large_halves() -> None:
    """A row of zeros is divided by eps; squares of 60000 are no f16."""
    h = oxidnn.DnnHandle("emu:sm_80")
    np.testing.assert_array_equal(h.normalize(np.zeros((2, 4), np.float32)), np.zeros((2, 4)))
    dx = h.normalize_backward(np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32), eps=0.5)
    np.testing.assert_array_equal(dx, np.full((1, 4), 2))
    assert np.isnan(h.weight_norm(np.zeros((2, 4), np.float32), np.ones(2, np.float32))).all()
    x = h.array(np.full((1, 4), 60000.0), "f16")
    np.testing.assert_array_equal(h.normalize(x).numpy().astype(float), np.full((1, 4), 0.5))
    np.testing.assert_allclose(h.power_norm(x, p=2.0).numpy().astype(float), np.full((1, 4), 1.0), rtol=1e-3)
    big = np.array([[3e18, 4e18]], np.float32)
    np.testing.assert_allclose(h.normalize(big), [[0.6, 0.8]], rtol=1e-6)


@pytest.mark.parametrize("value", [NAN, INF])
def test_nan_and_infinity_stay_in_their_row(h: oxidnn.DnnHandle, value: float) -> None:
    x = np.random.default_rng(0).standard_normal((3, 40)).astype(np.float32)
    x[1, 7] = value
    for y in (h.normalize(x), h.power_norm(x, p=3.0), h.sparsemax(x)):
        y = np.asarray(y)
        assert np.isfinite(y[[0, 2]]).all() and np.isnan(y[1]).any()


@pytest.mark.parametrize("op", list(OPS))
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(31)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ("sm_80", "sm_90a")]
    for i in range(8):
        problem = SAMPLES[op](rng, "tiny")
        for engine in ENGINES[op]:
            for config in engine.configs(problem, backends[i % 2].info):
                run_problem(backends[i % 2], problem, engine, config, seed=i)


@pytest.mark.parametrize("line", ["sparsemax x=f32[2,20000]nchw", "sparsemax x=f16[3,6000]nchw", "normalize x=f32[2,20000]nchw g=f32[2]",
                                  "normalize_backward dy=bf16[2,40000] x=bf16[2,40000] g=bf16[1]",
                                  "power_norm_backward dy=f32[3,9001] x=f32[3,9001] rstd=f32[3] gamma=f32[9001] p=1.5"])
def test_long_rows(line: str) -> None:
    problem = parse_case(line)
    for arch in ("sm_80", "sm_90a"):
        backend = EmulatedBackend(arch, checkers="all")
        for engine in ENGINES[problem.op]:
            for config in engine.configs(problem, backend.info):
                run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("op", list(OPS))
def test_kernels_assemble_without_spills(op: str, arch: str) -> None:
    rng, device = np.random.default_rng(32), known_device(arch)
    for problem in [*map(parse_case, CASES[op]), *(SAMPLES[op](rng, "small") for _ in range(6))]:
        for engine in ENGINES[op]:
            for config in engine.configs(problem, device):
                for step in engine.build_steps(problem, config, device).steps:
                    assembled = assemble(render(step.spec), arch)
                    assert assembled.spill_bytes == 0 and assembled.registers <= step.spec.max_registers, step.spec.describe()


def test_refusals(h: oxidnn.DnnHandle) -> None:
    x = np.zeros((4, 6), np.float32)
    for call, message in ((lambda: h.normalize(x, p=0.0), "p is"), (lambda: h.normalize(x, p=-1.0), "p is"),
                          (lambda: h.normalize(x, eps=-1.0), "eps is"), (lambda: h.normalize(x, axes=()), "axes"),
                          (lambda: h.normalize(x, g=np.zeros(5, np.float32)), "shape of g"),
                          (lambda: h.normalize(np.zeros((2, 0), np.float32)), "at least one element"),
                          (lambda: h.weight_norm(x, x, 2), "dim is"), (lambda: h.power_norm(x, np.zeros(5, np.float32)), "shape of gamma"),
                          (lambda: h.power_norm_backward(x, x, np.zeros(3, np.float32)), "shape of rstd"),
                          (lambda: h.sparsemax(x, 2), "axis is"), (lambda: h.sparsemax(x.astype(np.int32)), "type of x")):
        with pytest.raises(InvalidArgument, match=message):
            call()
