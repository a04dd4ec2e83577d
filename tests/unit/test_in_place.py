"""Runs with an output in an input's memory: what the harness must see."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import NumericsError
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.sample import SAMPLES

from .fakes import FakeBackend, FakeEngine, double, double_op  # noqa: F401

# ruff: noqa: F811


def test_pairs_name_the_output_and_the_input() -> None:
    line = "conv_fprop x=f32[1,2,4,4] w=f32[2,2,1,1] residual=f32[1,2,4,4]"
    assert parse_case(line).aliases == (("y", "residual"),)
    assert parse_case("gemm a=f32[2,3] b=f32[3,4] c=f32[2,4] beta=1.0 bias=f32[4]").aliases == (("d", "c"),)
    two = parse_case('pointwise x=f32[4] y=f32[4] expression="x + y, x - y"')
    assert two.aliases == (("y0", "x"), ("y0", "y"), ("y1", "x"), ("y1", "y"))
    assert parse_case("softmax x=f32[2,3]").aliases == (("y", "x"),)
    assert parse_case("softmax_backward dy=f32[2,3] y=f32[2,3]").aliases == (("dx", "dy"), ("dx", "y"))
    assert parse_case("cumsum x=f32[2,3]").aliases == ()


@pytest.mark.parametrize("op", ["gemm", "conv_fprop", "pointwise", "activation"])
def test_samples_hold_outputs_that_may_lie_on_inputs(op: str) -> None:
    rng = np.random.default_rng(0)
    problems = [SAMPLES[op](rng, "tiny") for _ in range(200)]
    assert sum(any(p.desc(a) == p.desc(b) for a, b in p.aliases) for p in problems) >= 3


@pytest.mark.parametrize("line", ["gemm a=f32[5,6] b=f32[6,7] c=f32[5,7] beta=2.0",
                                  'pointwise x=bf16[3,4](5,1) y=f32[4] out=bf16[3,4](5,1) expression="x * y" dtype=bf16'])
def test_engines_run_in_place(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_80")
    engine = ENGINES[problem.op][-1]
    assert any(problem.desc(a) == problem.desc(b) for a, b in problem.aliases)
    run_problem(backend, problem, engine, aliases=True)


@pytest.mark.parametrize("body", ["right", "wrong", "overrun", "short"])
def test_an_output_on_an_input_is_checked_as_any_other(double_op, monkeypatch, body: str) -> None:  # type: ignore[no-untyped-def]
    problem, engine = double(), FakeEngine("double.any", body)
    monkeypatch.setattr(type(problem), "aliases", (("y", "x"),))
    x = np.ones(64, np.float32)
    if body == "overrun":
        with pytest.raises(NumericsError, match="outside the elements"):
            execute(FakeBackend(), problem, engine, engine.configs(problem, FakeBackend().info)[0], {"x": x}, {}, {"y": "x"})
        return
    got = execute(FakeBackend(), problem, engine, engine.configs(problem, FakeBackend().info)[0], {"x": x}, {}, {"y": "x"})["y"]
    assert (got == {"right": [2.0] * 64, "wrong": [2.5] * 64, "short": [2.0] * 63 + [1.0]}[body]).all()
    if body == "right":
        run_problem(FakeBackend(), problem, engine, aliases=True)


def test_an_output_may_lie_in_the_gaps_of_an_input() -> None:
    """As a densely connected block does: every layer writes the next channels of the array whose first channels it reads."""
    h, rng = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(0)
    w = rng.standard_normal((3, 5, 3, 3)).astype(np.float32)
    for strides_of in (lambda a: a, lambda a: np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1)):
        block = strides_of(rng.standard_normal((2, 9, 4, 6)).astype(np.float32))
        before = block.copy()
        h.conv(block[:, :5], w, padding=1, out=block[:, 5:8])
        np.testing.assert_allclose(block[:, 5:8], h.conv(before[:, :5].copy(), w, padding=1), atol=1e-5)
        np.testing.assert_array_equal(block[:, [0, 1, 2, 3, 4, 8]], before[:, [0, 1, 2, 3, 4, 8]])
        with pytest.raises(oxidnn.InvalidArgument, match="overlaps 'x'"):
            h.conv(block[:, :5], w, padding=1, out=block[:, 4:7])


def test_overlaps_are_found_and_gaps_mostly_too() -> None:
    """Random views of one array: what shares an element is refused, whatever its strides; slices along one dimension are told apart."""
    h, rng = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(1)
    accepted = refused = 0
    for _ in range(300):
        memory = np.zeros((4, 3, 8), np.float32).transpose(rng.permutation(3))
        shape = tuple(int(rng.integers(1, n + 1)) for n in memory.shape)
        views = []
        for _ in range(2):
            index = []
            for n, m in zip(memory.shape, shape, strict=True):
                step = int(rng.integers(1, max((n - 1) // max(m - 1, 1), 1) + 1))
                start = int(rng.integers(0, n - (m - 1) * step))
                index.append(slice(start, start + (m - 1) * step + 1, step))
            views.append(memory[tuple(index)][tuple(slice(None, None, int(rng.choice([1, 1, -1]))) for _ in shape)])
        x, y = views
        is_same = x.ctypes.data == y.ctypes.data and all(n == 1 or s == t for n, s, t in zip(shape, x.strides, y.strides, strict=True))
        try:
            h.activation(x, "relu", out=y)
        except oxidnn.InvalidArgument:
            refused += 1
        else:
            accepted += 1
            assert is_same or not np.shares_memory(x, y)
    assert accepted > 60 and refused > 30
