"""Values that break naive kernels, in every arrangement of the families they were reported for: NaN and infinities in windows, means far
from zero in every norm, targets that name no class, dropout for every pack."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import to_storage
from oxidnn.testing.harness import exact, execute
from oxidnn.testing.reference import REFERENCES


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


@pytest.mark.parametrize("line", [
    "max_pool x={k}[2,3,9,8]nchw window=3 stride=2 padding=1 ceil_mode=True return_indices=True",
    "max_pool x={k}[2,16,7,6]nhwc window=(2,3) stride=1 dilation=2 return_indices=True", "max_pool x={k}[1,8,5,4,6]nhwc window=2",
    "max_pool x={k}[2,8,11]nhwc window=3 stride=1 padding=((2,0),) return_indices=True", "max_pool x={k}[2,16,8,8]nhwc window=2",
    "adaptive_max_pool x={k}[2,8,7,5]nhwc output_size=(3,2) return_indices=True", "adaptive_max_pool x={k}[2,3,40]nchw output_size=7",
    "global_max_pool x={k}[2,16,9,7]nhwc", "global_max_pool x={k}[2,3,300]nchw",
    "fractional_max_pool x={k}[2,3,9,9]nchw samples=f32[2,3,2]nchw window=2 output_size=4 return_indices=True",
])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
def test_nan_and_infinities_in_every_window(line: str, kind: str) -> None:
    """NaN wins, -inf is a value, no index leaves the image: every engine and configuration."""
    problem, backend = parse_case(line.format(k=kind)), EmulatedBackend("sm_90a", checkers="all")
    rng = np.random.default_rng(3)
    shape = problem.desc("x").shape
    x = rng.standard_normal(shape)
    x = np.where(rng.random(shape) < 0.5, -np.inf, np.where(rng.random(shape) < 0.1, np.nan, np.where(rng.random(shape) < 0.1, np.inf, x)))
    x[0] = -np.inf  # windows of nothing else
    given = {"x": to_storage(x, problem.desc("x").dtype)}
    if problem.has("samples"):
        given["samples"] = rng.random(problem.desc("samples").shape).astype(np.float32)
    want = REFERENCES[problem.op](problem, exact(problem, given), {})
    takers = [e for e in ENGINES[problem.op] if e.check_support(problem, backend.info)]
    assert takers
    for engine in takers:
        for config in engine.configs(problem, backend.info):
            got = execute(backend, problem, engine, config, given)
            np.testing.assert_array_equal(got["y"].astype(np.float64), want["y"].want)
            if problem.has("indices"):
                np.testing.assert_array_equal(got["indices"], want["indices"].want)


def _far(shape: tuple[int, ...]) -> np.ndarray:
    """About 4096, apart by 64ths: the squares of f32 lose every digit of the difference."""
    return (4096 + np.random.default_rng(0).integers(0, 4, shape) / 64).astype(np.float32)


@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize(("norm", "axes", "attrs"), [
    ("batch_norm", (0, 2, 3), {"training": True}), ("instance_norm", (2, 3), {}), ("group_norm", None, {}), ("layer_norm", (1, 2, 3), {}),
])
def test_every_norm_far_from_zero(h: oxidnn.DnnHandle, norm: str, axes: tuple[int, ...] | None, attrs: dict[str, Any], layout: str) -> None:
    x = _far((3, 8, 9, 7))
    wide = x.astype(np.float64)
    if axes is None:
        grouped = wide.reshape(3, 4, -1)
        mean, variance = (np.repeat(f(grouped, -1, keepdims=True).reshape(3, 4), 2, 1)[:, :, None, None] for f in (np.mean, np.var))
    else:
        mean, variance = wide.mean(axes, keepdims=True), wide.var(axes, keepdims=True)
    given = np.moveaxis(np.ascontiguousarray(np.moveaxis(x, 1, -1)), -1, 1) if layout == "nhwc" else x
    more = (4,) if norm == "group_norm" else ()
    if norm == "layer_norm":
        attrs = {"axes": axes}
    y = getattr(h, norm)(given, *more, **attrs)
    rstd = 1 / np.sqrt(variance + 1e-5)
    np.testing.assert_allclose(y, (wide - mean) * rstd, rtol=1e-3, atol=2.0**-11 * rstd.max())  # the spacing of an f32 mean


def test_statistics_of_shares_far_from_zero(h: oxidnn.DnnHandle) -> None:
    x = _far((6, 4, 50))
    parts = [h.batch_norm_stats(p) for p in (x[:2], x[2:])]
    counts, means, squares = (np.stack([np.asarray(p[i]) for p in parts]) for i in range(3))
    mean, rstd = h.batch_norm_gather(counts.reshape(-1), means, squares)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(mean, wide.mean((0, 2)), rtol=2e-7)
    np.testing.assert_allclose(rstd, 1 / np.sqrt(wide.var((0, 2)) + 1e-5), rtol=2e-3)


def test_values_whose_squares_f32_does_not_hold(h: oxidnn.DnnHandle) -> None:
    """As the documentation says: y is 0 or NaN, in that row alone."""
    x = np.ones((3, 40), np.float32) * np.arange(40, dtype=np.float32)
    x[1] *= np.float32(1e20)
    for norm in (h.layer_norm, h.rms_norm):
        y = np.asarray(norm(x))
        assert np.isfinite(y[[0, 2]]).all() and ((y[1] == 0) | np.isnan(y[1])).all()


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
@pytest.mark.parametrize("columns", [2, 40, 1000, 1024, 9000, 40000])
def test_half_rows_whose_squares_the_type_does_not_hold(h: oxidnn.DnnHandle, kind: str, columns: int) -> None:
    rng = np.random.default_rng(columns)
    x = h.array(rng.choice([300.0, -400.0], (2, columns)), kind)
    wide = x.numpy().astype(np.float64)
    want = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6)
    got = h.rms_norm(x, h.array(np.ones(columns), kind), eps=1e-6).numpy().astype(np.float64)
    np.testing.assert_allclose(got, want, rtol=1e-3 if kind == "float16" else 8e-3)


@pytest.mark.parametrize("bad", [-1, 7, 2**40, -(2**63)])
def test_targets_of_no_class_read_nothing(h: oxidnn.DnnHandle, bad: int) -> None:
    """nll and the fused linear layer, as cross_entropy (tests/emu/test_loss.py): NaN for that row, the others as they are."""
    rng = np.random.default_rng(0)
    x, w, target = rng.standard_normal((4, 6)), rng.standard_normal((7, 6)), np.array([1, bad, -100, 3])
    logits = x @ w.T
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    want = [-logs[0, 1], np.nan, 0, -logs[3, 3]]
    np.testing.assert_allclose(h.nll(logs, target, reduction="none"), want, rtol=1e-12)
    np.testing.assert_allclose(h.linear_cross_entropy(x, w, target, reduction="none"), want, rtol=1e-11)
    assert np.isnan(h.nll(logs, target)) and np.isnan(h.linear_cross_entropy(x, w, target))
    dx, _ = h.linear_cross_entropy_backward(x, w, target, reduction="none", d_loss=np.ones(4))
    assert np.isnan(np.asarray(dx)[1]).all() and (np.asarray(dx)[2] == 0).all() and np.isfinite(np.asarray(dx)[[0, 3]]).all()


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
def test_dropout_of_every_pack_keeps_the_same(kind: str) -> None:
    """n = 1023 for every pack, aligned and not: the same elements, and the gradient's; another offset keeps others."""
    kept = []
    for align in (16, 2 if kind in ("f16", "bf16") else 4 if kind == "f32" else 8):
        for op, name in (("dropout", "x"), ("dropout_backward", "dy")):
            problem, backend = parse_case(f"{op} {name}={kind}[1023](1)@{align} p=0.3"), EmulatedBackend("sm_80", checkers="all")
            given = {name: to_storage(np.ones(1023), problem.desc(name).dtype)}
            engine = ENGINES[op][0]
            for config in engine.configs(problem, backend.info):
                got = execute(backend, problem, engine, config, given, {"seed": 5, "offset": 9})[problem.outputs[0].name]
                kept.append(got.astype(np.float64))
    assert len(kept) >= 4
    for other in kept[1:]:
        np.testing.assert_array_equal(other, kept[0])
    share = (kept[0] != 0).mean()
    assert abs(share - 0.7) < 4 * (0.21 / 1023) ** 0.5


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("to", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"])
def test_nan_as_an_integer_is_zero(kind: type, to: str, h: oxidnn.DnnHandle) -> None:
    """Of f64, and in 64 bits, the instruction would give 2^(bits - 1)."""
    x = np.array([np.nan, 2.5, -np.nan, 6e4, np.inf, -np.inf], kind)
    info = np.iinfo(to)
    want = [0, 2, 0, min(60000, info.max), info.max, info.min]
    assert h.pointwise("x", x, out=np.ones(6, to)).tolist() == want
    assert h.cast(x, to).tolist() == want
    if to != "uint64":
        drawn = h.cast_stochastic(x, to, seed=1)
        assert drawn.tolist() == [0, drawn[1], *want[2:]] and drawn[1] in (2, 3)
    if to == "int8":
        row = np.array([[1, np.nan, 3]], kind)
        for y in (h.layer_norm(row, out_dtype="s8"), h.rms_norm(row, out_dtype="s8"), h.softmax(row, out_dtype="s8"),
                  h.conv(row[:, None], np.ones((3, 1, 3), kind), out_dtype="s8")):
            assert not y.any()
