"""Gated linear units: by their formulas and differences of float64, one launch each way, in place, on every axis; without spills."""

from __future__ import annotations

import math

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.pointwise_map import PointwiseMap
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.testing.sample import CASES


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def sigmoid(v: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-v))


FORMULAS = {
    "glu": lambda a, b: a * sigmoid(b), "swiglu": lambda a, b: a * sigmoid(a) * b, "reglu": lambda a, b: np.maximum(a, 0) * b,
    "geglu": lambda a, b: a * 0.5 * (1 + np.vectorize(math.erf)(a / math.sqrt(2))) * b, "bilinear": lambda a, b: a * b,
    "geglu_tanh": lambda a, b: 0.5 * a * (1 + np.tanh(math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))) * b,
}  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("name", FORMULAS)
def test_formula_and_gradient(h: oxidnn.DnnHandle, name: str, axis: int) -> None:
    rng = np.random.default_rng(3)
    x = rng.standard_normal((6, 10, 14))
    apply = lambda v: FORMULAS[name](*np.split(v, 2, axis))  # noqa: E731
    y = h.glu(x, axis, name=name)
    np.testing.assert_allclose(y, apply(x), rtol=1e-12, atol=1e-14)
    dy = rng.standard_normal(y.shape)
    dx = h.glu_backward(dy, x, axis, name=name)
    direction = rng.standard_normal(x.shape)
    step = 1e-6
    slope = ((apply(x + step * direction) - apply(x - step * direction)) * dy).sum() / (2 * step)
    np.testing.assert_allclose((dx * direction).sum(), slope, rtol=1e-7)
    if name in ("swiglu", "geglu", "reglu"):
        np.testing.assert_array_equal(getattr(h, name)(x, axis), y)
        np.testing.assert_array_equal(getattr(h, name + "_backward")(dy, x, axis), dx)


def test_far_from_zero(h: oxidnn.DnnHandle) -> None:
    a = np.array([1000, -1000, 60000, -60000, 0], np.float16)
    x = np.stack([a, np.ones(5, np.float16)], 1)
    for name in FORMULAS:
        dx = h.glu_backward(np.ones((5, 1), np.float16), x, name=name)
        assert np.isfinite(h.glu(x, name=name)).all() and np.isfinite(dx).all(), name
        if name not in ("glu", "bilinear"):
            np.testing.assert_allclose(dx[:4, 0], [1, 0, 1, 0])
            np.testing.assert_array_equal(h.glu(x, name=name)[:, 0], np.maximum(a, 0))


def test_gradient_in_the_place_of_x_and_result_in_another_type(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(0)
    x, dy = rng.standard_normal((5, 12)).astype(np.float32), rng.standard_normal((5, 6)).astype(np.float32)
    want = h.swiglu_backward(dy, x)
    np.testing.assert_array_equal(h.swiglu_backward(dy, x, out=x), want)
    half = np.empty((5, 6), np.float16)
    np.testing.assert_allclose(h.glu(x, out=half), FORMULAS["glu"](*np.split(x.astype(np.float64), 2, -1)), rtol=2e-3, atol=1e-4)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_one_launch_without_spills(arch: str) -> None:
    device, engine = known_device(arch), PointwiseMap()
    for line in (*CASES["glu"], *CASES["glu_backward"], "glu_backward dy=bf16[64,1024] x=bf16[64,2048] name=geglu"):
        problem = parse_case(line)
        for config in engine.configs(problem, device):
            steps = engine.build_steps(problem, config, device).steps
            assert len(steps) == (0 if problem.is_empty else 1)
            for step in steps:
                built = assemble(render(step.spec), arch)
                assert built.spill_bytes == 0 and built.registers <= step.spec.max_registers, (line, config.name)


@pytest.mark.parametrize(("call", "match"), [
    (lambda h, x: h.glu(x[:, :5]), "even"), (lambda h, x: h.glu(x, 2), "axis"), (lambda h, x: h.glu(x, name="swish"), "swiglu"),
    (lambda h, x: h.glu_backward(x, x), "shape of dy"), (lambda h, x: h.glu(x.astype(np.int32)), "type of x"),
    (lambda h, x: h.glu(x, out=x), "shape of y"), (lambda h, x: h.glu(np.array(3, np.float32)), "axis")])
def test_refused(h: oxidnn.DnnHandle, call, match: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(oxidnn.InvalidArgument, match=match):
        call(h, np.zeros((4, 6), np.float32))
