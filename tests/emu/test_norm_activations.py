"""Norms with zero-centred gamma, and the gradients of norms that an activation follows: against the forward's own differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import to_storage
from oxidnn.testing.harness import execute, run_problem

from .differences import central_differences


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def _forward(h: oxidnn.DnnHandle, norm: str, x: Any, gamma: Any, beta: Any, **attrs: Any) -> Any:
    return getattr(h, norm)(x, gamma, beta, eps=1e-3, **attrs)


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("activation", ["relu", "silu(acc)", "gelu(acc)", "leaky_relu(acc, 0.2)", None])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
def test_gradients_by_finite_differences(h: oxidnn.DnnHandle, norm: str, activation: str | None, zero_centered: bool) -> None:
    rng = np.random.default_rng(1)
    x, gamma, beta, dy = (rng.standard_normal(s) for s in ((4, 9), 9, 9, (4, 9)))
    attrs: dict[str, Any] = {"epilogue": activation, "zero_centered": zero_centered}
    y, *stats = _forward(h, norm, x, gamma, beta, return_stats=True, **attrs)
    pivot = x if norm == "rms_norm" else x - x.mean(-1, keepdims=True)
    acc = pivot / np.sqrt((pivot**2).mean(-1, keepdims=True) + 1e-3) * (gamma + zero_centered) + beta
    plain = _forward(h, norm, x, gamma, beta, zero_centered=zero_centered)
    np.testing.assert_allclose(plain, acc, rtol=1e-12, atol=1e-13)
    backward = getattr(h, norm + "_backward")
    takes_beta = norm == "rms_norm" or activation is not None
    found = backward(dy, x, *stats, gamma, beta if takes_beta else None, **attrs)
    for got, of in zip(found, (x, gamma, beta), strict=True):
        want = central_differences(lambda: float((dy * _forward(h, norm, x, gamma, beta, **attrs)).sum()), of, 1e-6)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(("shape", "own"), [((3, 4, 9), (3, 1, 9)), ((3, 4, 9), (1, 4, 9)), ((3, 4, 9), (3, 4, 9)), ((3, 4, 9), (1, 1, 9)),
                                            ((2, 2, 3, 6), (2, 1, 3, 6))])
@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("activation", [None, "silu(acc)"])
def test_adaptive_norms_and_their_gradients(h: oxidnn.DnnHandle, norm: str, activation: str | None, shape: tuple[int, ...],
                                            own: tuple[int, ...]) -> None:
    """A scale and a shift of each sample, and theirs summed over the rest, whichever dimensions count samples."""
    rng = np.random.default_rng(6)
    x, gamma, beta, dy = rng.standard_normal(shape), rng.standard_normal(own), rng.standard_normal(own), rng.standard_normal(shape)
    attrs: dict[str, Any] = {"epilogue": activation, "zero_centered": True}
    _, *stats = _forward(h, norm, x, gamma, beta, return_stats=True, **attrs)
    pivot = x if norm == "rms_norm" else x - x.mean(-1, keepdims=True)
    acc = pivot / np.sqrt((pivot**2).mean(-1, keepdims=True) + 1e-3) * (gamma + 1) + beta
    np.testing.assert_allclose(_forward(h, norm, x, gamma, beta, zero_centered=True), acc, rtol=1e-11, atol=1e-12)
    takes_beta = norm == "rms_norm" or activation is not None
    found = getattr(h, norm + "_backward")(dy, x, *stats, gamma, beta if takes_beta else None, **attrs)
    for got, of in zip(found, (x, gamma, beta), strict=True):
        assert got.shape == of.shape
        want = central_differences(lambda: float((dy * _forward(h, norm, x, gamma, beta, **attrs)).sum()), of, 1e-6)
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("line", [
    "layer_norm_backward dy={x} x={x} mean={s} rstd={s} gamma=bf16[{c}]nchw beta=bf16[{c}]nchw epilogue='silu(acc)'",
    "layer_norm_backward dy={x} x={x} mean={s} rstd={s} gamma=bf16[{c}]nchw zero_centered=True",
    "rms_norm_backward dy={x} x={x} rstd={s} gamma=bf16[{c}]nchw beta=bf16[{c}]nchw",
    "rms_norm_backward dy={x} x={x} rstd={s} gamma=bf16[{c}]nchw beta=bf16[{c}]nchw zero_centered=True epilogue='relu(acc)'",
])  # fmt: skip
@pytest.mark.parametrize("rows, columns", [(37, 96), (9, 1000), (5, 1001), (5, 4096)])  # of every home
def test_every_config(line: str, rows: int, columns: int) -> None:
    problem = parse_case(line.format(x=f"bf16[{rows},{columns}]nchw", s=f"f32[{rows}]nchw", c=columns))
    backend, engine = EmulatedBackend("sm_90a", checkers="all"), ENGINES[problem.op][0]
    for config in engine.configs(problem, backend.info):
        run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("columns", [96, 1001, 20000])
def test_every_config_of_adaptive_norms(columns: int) -> None:
    """Samples outermost, innermost and between; runs of rows that are no whole number of groups."""
    for x, s, own in ((f"bf16[2,5,{columns}]nchw", "f32[2,5]nchw", f"f32[2,1,{columns}]nchw"),
                      (f"f32[5,3,{columns}]nchw", "f32[5,3]nchw", f"f32[1,3,{columns}]nchw")):
        for line in (f"rms_norm x={x} gamma={own} beta={own} return_stats=True",
                     f"layer_norm_backward dy={x} x={x} mean={s} rstd={s} gamma={own} zero_centered=True",
                     f"rms_norm_backward dy={x} x={x} rstd={s} gamma={own} beta={own} epilogue='silu(acc)'"):
            problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
            engine = ENGINES[problem.op][0]
            for config in engine.configs(problem, backend.info):
                run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("norm", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("columns", [8, 70, 1001, 4096, 20000])
def test_a_residual_stream_is_updated_in_place(norm: str, columns: int) -> None:
    """residual += x, x = norm(residual), as inference engines want it: both outputs where the inputs were, of rows held anywhere."""
    line = f"{norm} x=bf16[3,{columns}]nchw residual=bf16[3,{columns}]nchw gamma=bf16[{columns}]nchw return_sum=True"
    problem, backend, engine = parse_case(line), EmulatedBackend("sm_90a", checkers="all"), ENGINES[norm][0]
    rng = np.random.default_rng(columns)
    given = {n: to_storage(rng.standard_normal(problem.desc(n).shape), problem.desc(n).dtype) for n in ("x", "residual", "gamma")}
    for config in engine.configs(problem, backend.info):
        apart = execute(backend, problem, engine, config, given)
        for places in ({"y": "x", "sum": "residual"}, {"y": "residual", "sum": "x"}, {"sum": "residual"}):
            together = execute(backend, problem, engine, config, given, {}, places)
            for name, values in apart.items():
                assert values.tobytes() == together[name].tobytes(), (dict(config.knobs), places, name)


def test_in_place_by_the_handle(h: oxidnn.DnnHandle) -> None:
    x, residual, gamma = (np.random.default_rng(2).standard_normal(s) for s in ((4, 9), (4, 9), 9))
    total = x + residual
    want = total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-5) * gamma
    h.rms_norm(x, gamma, residual=residual, return_sum=True, out=(x, residual))
    np.testing.assert_allclose(x, want, rtol=1e-12)
    np.testing.assert_array_equal(residual, total)


def test_refusals(h: oxidnn.DnnHandle) -> None:
    x, s, c = np.ones((3, 5)), np.ones(3), np.ones(5)
    for call, words in (
        (lambda: h.layer_norm(x, zero_centered=True), "zero_centered"), (lambda: h.rms_norm(x, c, zero_centered=1), "zero_centered"),
        (lambda: h.layer_norm_backward(x, x, s, s, zero_centered=True), "zero_centered"),
        (lambda: h.layer_norm_backward(x, x, s, s, c, c), "beta"), (lambda: h.rms_norm_backward(x, x, s, None, c), "beta"),
        (lambda: h.rms_norm_backward(x, x, s, c, epilogue="acc * scalar(a)"), "epilogue"),
        (lambda: h.rms_norm_backward(x, x, s, c, epilogue="acc * z"), "epilogue"),
        (lambda: h.rms_norm_backward(x, x, s, c, epilogue="relu(acc), acc"), "epilogue"),
        (lambda: h.rms_norm_backward(x, x, s, c, epilogue=3), "epilogue"),
        (lambda: h.layer_norm(x, np.ones((2, 5))), "shape of gamma"), (lambda: h.layer_norm(x, np.ones((3, 1))), "shape of gamma"),
        (lambda: h.rms_norm_backward(x, x, s, np.ones((3, 5)), c), "shape of beta"),
    ):
        with pytest.raises(InvalidArgument, match=words):
            call()
