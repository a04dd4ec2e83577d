"""cuDNN's forms of elementwise ops (op_tensor, add_tensor), PReLU with its slopes' gradient, and grids."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.testing.sample import CASES

RNG = np.random.default_rng(0)


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def test_op_tensor(h: oxidnn.DnnHandle) -> None:
    a, b = RNG.standard_normal((3, 4, 5)).astype(np.float32), RNG.standard_normal((4, 1)).astype(np.float32)
    c = RNG.standard_normal((3, 4, 5)).astype(np.float32)
    for op, apply in (("add", np.add), ("mul", np.multiply), ("min", np.minimum), ("max", np.maximum)):
        np.testing.assert_allclose(h.op_tensor(a, b, op), apply(a, b), rtol=1e-6)
        np.testing.assert_allclose(h.op_tensor(a, b, op, alpha1=0.5, alpha2=-2), apply(0.5 * a, -2 * b), rtol=1e-6, atol=1e-6)
        for beta in (1, 0.25):
            out = c.copy()
            assert h.op_tensor(a, b, op, alpha2=3, beta=beta, out=out) is out
            np.testing.assert_allclose(out, apply(a, 3 * b) + beta * c, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(h.op_tensor(a * a, op="sqrt", alpha1=4), 2 * np.abs(a), rtol=1e-5)
    np.testing.assert_allclose(h.op_tensor(a, op="not"), 1 - a, rtol=1e-6)
    odd = np.array([np.nan, 1, np.nan], np.float32)
    assert np.isnan(h.op_tensor(odd, np.array([1, 2, 3], np.float32), "max")[[0, 2]]).all()
    integers = np.arange(6, dtype=np.int32)
    assert h.op_tensor(integers, integers, "mul").dtype == np.int32


def test_add_tensor(h: oxidnn.DnnHandle) -> None:
    x, bias = RNG.standard_normal((2, 3, 4, 5)).astype(np.float16), RNG.standard_normal((1, 3, 1, 1)).astype(np.float16)
    want = 0.5 * bias.astype(np.float64) + 2 * x.astype(np.float64)
    np.testing.assert_allclose(h.add_tensor(bias, x, alpha=0.5, beta=2), want, rtol=2e-3, atol=1e-3)
    assert h.add_tensor(bias, x, alpha=0.5, beta=2, out=x) is x
    np.testing.assert_allclose(x, want, rtol=2e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(3, 4, 5), (2, 5), (7,)])
@pytest.mark.parametrize("is_one", [True, False])
def test_gradients_of_prelu(h: oxidnn.DnnHandle, shape: tuple[int, ...], is_one: bool) -> None:
    x, dy = RNG.standard_normal(shape), RNG.standard_normal(shape)
    slope = RNG.uniform(0.1, 0.5, (1,) if is_one or len(shape) == 1 else (shape[1],))
    beside = slope.reshape(-1, *(1,) * (len(shape) - 2)) if len(shape) > 1 else slope

    np.testing.assert_allclose(h.prelu(x, slope), np.where(x > 0, x, beside * x))
    dx, dslope = h.prelu_backward(dy, x, slope)
    np.testing.assert_allclose(dx, np.where(x > 0, dy, dy * beside))
    shares = np.where(x > 0, 0, dy * x)
    np.testing.assert_allclose(dslope, shares.sum(tuple(i for i in range(len(shape)) if i != 1 or len(slope) == 1)).reshape(slope.shape))
    wide = x.astype(np.float32)
    outs = wide.copy(), np.empty(slope.shape, np.float32)
    h.prelu_backward(dy.astype(np.float32), outs[0], slope.astype(np.float32), out=outs)  # dx in the place of x
    np.testing.assert_allclose(outs[0], dx, rtol=1e-5)
    np.testing.assert_allclose(outs[1], dslope, rtol=1e-4, atol=1e-5)


def test_grids(h: oxidnn.DnnHandle) -> None:
    given = [np.arange(3, dtype=np.float32), np.arange(5, dtype=np.int64)[::-1], np.array([True, False])]
    for indexing in ("ij", "xy"):
        for count in (1, 2, 3):
            for got, want in zip(h.meshgrid(given[:count], indexing), np.meshgrid(*given[:count], indexing=indexing), strict=True):
                np.testing.assert_array_equal(got, want)
                assert got.dtype == want.dtype


@pytest.mark.parametrize(("call", "match"), [
    (lambda h, x: h.op_tensor(x, x, "div"), "op is 'div'"), (lambda h, x: h.op_tensor(x), "b is missing"),
    (lambda h, x: h.op_tensor(x, x, "sqrt"), "b is given"), (lambda h, x: h.op_tensor(x, x, beta=1), "out is None"),
    (lambda h, x: h.op_tensor(x, x, alpha1="2"), "alpha1"), (lambda h, x: h.add_tensor(x, x, beta=None), "beta"),
    (lambda h, x: h.prelu(x, np.ones(3, np.float32)), "shape of slope"), (lambda h, x: h.prelu(x, x), "shape of slope"),
    (lambda h, x: h.meshgrid([]), "1 to 8"), (lambda h, x: h.meshgrid([x]), "rank of x0"),
    (lambda h, x: h.meshgrid([x[0], None]), "arrays"),
    (lambda h, x: h.meshgrid([x[0]], "ji"), "indexing")])
def test_refused(h: oxidnn.DnnHandle, call, match: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(oxidnn.InvalidArgument, match=match):
        call(h, np.ones((4, 6), np.float32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_no_spills(arch: str) -> None:
    device = known_device(arch)
    for line in (*CASES["prelu"], *CASES["prelu_backward"], *CASES["meshgrid"]):
        problem = parse_case(line)
        for engine in ENGINES[problem.op]:
            for config in engine.configs(problem, device):
                for step in engine.build_steps(problem, config, device).steps:
                    assert assemble(render(step.spec), arch).spill_bytes == 0
