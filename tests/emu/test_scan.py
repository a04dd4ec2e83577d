"""Scans in the emulator: published values, ties and NaN, ends of ranges, parts of long axes, the same bits every time, gradients."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

ARCHES = ("sm_80", "sm_90a")
KINDS = ("cumsum", "cumprod", "logcumsumexp", "cummax", "cummin")


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def test_directions(h: oxidnn.DnnHandle) -> None:
    x = np.array([1, 2, 3, 4], np.float32)
    assert h.cumsum(x).tolist() == [1, 3, 6, 10] and h.cumsum(x, reverse=True).tolist() == [10, 9, 7, 4]
    assert h.cumsum(x, exclusive=True).tolist() == [0, 1, 3, 6] and h.cumsum(x, reverse=True, exclusive=True).tolist() == [9, 7, 4, 0]
    assert h.cumprod(x).tolist() == [1, 2, 6, 24] and h.cumprod(x, reverse=True, exclusive=True).tolist() == [24, 12, 4, 1]
    assert h.logcumsumexp(np.zeros(3), exclusive=True).tolist() == [-np.inf, 0, pytest.approx(np.log(2), rel=1e-15)]


def test_ties_and_nan(h: oxidnn.DnnHandle) -> None:
    """PyTorch's: of equals the last, NaN wins and the last NaN's index."""
    nan, inf = np.nan, np.inf
    x = np.array([1, 3, 3, 2, nan, 5, nan, inf], np.float32)
    values, indices = h.cummax(x)
    np.testing.assert_array_equal(values, [1, 3, 3, 3, nan, nan, nan, nan])
    assert indices.tolist() == [0, 1, 2, 2, 4, 4, 6, 6] and indices.dtype == np.int64
    values, indices = h.cummin(np.array([3, 1, 1, 2, -inf, -inf], np.float16))
    assert values.tolist() == [3, 1, 1, 1, -inf, -inf] and indices.tolist() == [0, 1, 2, 2, 4, 5]
    values, indices = h.cummax(np.array([2, 7, 7, 1]), reverse=True)
    assert values.tolist() == [7, 7, 7, 1] and indices.tolist() == [1, 1, 2, 3]
    values, indices = h.cummax(np.full(300, -inf, np.float32))  # what nothing is worth, too
    assert (values == -inf).all() and indices.tolist() == list(range(300))
    values, indices = h.cummin(np.full((2, 300), np.iinfo(np.int32).max, np.int32))
    assert (values == np.iinfo(np.int32).max).all() and indices[1].tolist() == list(range(300))


def test_integers_are_exact(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(2)
    x = rng.integers(-(2**62), 2**62, (3, 200))
    for axis in (0, 1):
        np.testing.assert_array_equal(h.cumsum(x, axis), x.cumsum(axis))  # modulo 2^64
        np.testing.assert_array_equal(h.cumprod(x, axis), x.cumprod(axis))
    narrow = rng.integers(-(2**31), 2**31, (3, 200)).astype(np.int32)
    np.testing.assert_array_equal(h.cumsum(narrow), narrow.cumsum(1, np.int64))
    np.testing.assert_array_equal(h.cumsum(narrow, dtype="int32"), narrow.cumsum(1, np.int32))
    big = np.array([2**24 + 1, 1, 1], np.int32)  # f32 would lose them
    assert h.cumsum(big).tolist() == [2**24 + 1, 2**24 + 2, 2**24 + 3]
    assert h.cumsum(np.full(300, 255, np.uint8)).tolist() == list(range(255, 255 * 301, 255))
    assert h.cumsum(np.ones(40, bool)).dtype == np.int64


def test_logcumsumexp_does_not_overflow(h: oxidnn.DnnHandle) -> None:
    for kind in (np.float32, np.float64):
        x: Any = np.array([1000, 1000, -1000, 5000, -np.inf, 5000], kind)
        np.testing.assert_allclose(h.logcumsumexp(x), np.logaddexp.accumulate(x.astype(np.float64)), rtol=1e-6)
        np.testing.assert_array_equal(h.logcumsumexp(np.full(40, -np.inf, kind)), np.full(40, -np.inf))
        assert h.logcumsumexp(np.array([0, np.inf, 1], kind)).tolist() == [0, np.inf, np.inf]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64])
def test_infinities_and_nan_reach_only_what_follows(h: oxidnn.DnnHandle, kind: Any) -> None:
    x = np.ones((2, 700), kind)
    x[0, 350], x[1, 500] = np.inf, np.nan
    for axis, view in ((1, x), (0, np.ascontiguousarray(x.T))):
        y = h.cumsum(view, axis)
        y = y if axis else y.T
        assert (y[0, :350] == np.arange(1, 351)).all() and np.isinf(y[0, 350:]).all()
        assert np.isfinite(y[1, :500]).all() and np.isnan(y[1, 500:]).all()


def every_config(problem: Any, info: Any) -> list[EngineConfig]:
    """Those of the list, one of each path with three parts, and of rows one that reads its parts once."""
    found = list(ENGINES[problem.op][0].configs(problem, info))
    rows = [dict(c.knobs) for c in found if c["path"] == "row" and c["along"] == c["threads"] and problem.op != "cumprod_backward"]
    for knobs in rows[:2]:
        parts = -(-problem.extent // (knobs["along"] * knobs["items"]))
        found.append(EngineConfig.of(**(knobs | {"splits": parts, "chained": 1})))
    for path in ("row", "column"):
        like = next((dict(c.knobs) for c in found if c["path"] == path), None)
        if like:
            found.append(EngineConfig.of(**(like | {"splits": 3})))
    return list(dict.fromkeys(found))


@pytest.mark.parametrize("line", [
    "cumsum x=f32[3,3001]nchw", "cumsum x=bf16[2,4096]nchw reverse=True", "cumprod x=f32[900,24]nchw axis=0 exclusive=True",
    "cummax x=bf16[2,2312]nchw reverse=True", "cumsum x=f32[2,2056]nchw reverse=True exclusive=True", "cumsum x=u8[3,1204]nchw",
    "logcumsumexp x=f16[700,8]nchw axis=0 reverse=True", "cummax x=f32[2,3000]nchw", "cummin x=s64[999,5]nchw axis=0 reverse=True",
    "cumprod_backward dy=f32[2,2500]nchw x=f32[2,2500]nchw", "cumprod_backward dy=f64[400,6]nchw x=f64[400,6]nchw axis=0 exclusive=True",
    "cummax_backward dy=f32[2,3000]nchw indices=s64[2,3000]nchw reverse=True",
    "logcumsumexp_backward dy=f32[2,2200]nchw x=f32[2,2200]nchw y=f32[2,2200]nchw exclusive=True",
])
def test_every_arrangement_and_parts(line: str) -> None:
    problem = parse_case(line)
    for i, arch in enumerate(ARCHES):
        backends = [EmulatedBackend(arch, checkers="all", schedule=schedule) for schedule in (("random", 5), "lowest_pc")]
        for j, config in enumerate(every_config(problem, backends[0].info)[i::2]):
            run_problem(backends[(i + j) % 2], problem, ENGINES[problem.op][0], config, seed=i)


@pytest.mark.parametrize("line", ["cumsum x=f32[1,67000]nchw", "cummax x=f16[2,8200]nchw reverse=True",
                                  "cumprod x=s64[3,2050]nchw exclusive=True"])
def test_chains_over_groups_of_tiles(line: str) -> None:
    """Of 1047, 65 and 17 tiles: groups of 32, super-groups of 32 groups."""
    problem = parse_case(line)
    items = 1 if problem.extent > 10000 else 2
    parts = -(-problem.extent // (64 * items))
    config = EngineConfig.of(path="row", threads=64, along=64, across=1, items=items, width=1, splits=parts, staged=0, chained=1)
    outputs = [run_problem(EmulatedBackend("sm_90a", checkers="all", schedule=s), problem, ENGINES[problem.op][0], config, seed=2).outputs
               for s in ("lowest_pc", ("random", 5))]
    assert all(outputs[0][n].tobytes() == outputs[1][n].tobytes() for n in outputs[0])


def test_lengths_around_every_edge() -> None:
    backend = EmulatedBackend("sm_80", checkers="all")
    for n in (1, 2, 7, 8, 9, 31, 32, 33, 63, 65, 255, 256, 257, 1023, 1025, 2047, 2049):
        for line in (f"cumsum x=f16[3,{n}]nchw", f"cumsum x=f32[{n},9]nchw axis=0", f"cummax x=s8[2,{n}]nchw"):
            problem = parse_case(line)
            run_problem(backend, problem, ENGINES[problem.op][0])


@pytest.mark.parametrize("op", [*KINDS, "cumprod_backward"])
def test_the_same_bits_every_time(op: str) -> None:
    shape = "f32[2,3000]nchw"
    problem = parse_case(f"{op} dy={shape} x={shape}" if op.endswith("_backward") else f"{op} x={shape}")
    engine = ENGINES[op][0]
    for config in every_config(problem, known_device("sm_80"))[:2]:
        runs = [run_problem(EmulatedBackend("sm_80", schedule=s), problem, engine, config, seed=3).outputs
                for s in ("lowest_pc", ("random", 1), ("random", 2))]
        assert all(r[name].tobytes() == runs[0][name].tobytes() for r in runs for name in r)


Function = Callable[[np.ndarray], np.ndarray]


def numeric_gradient(f: Function, x: np.ndarray, dy: np.ndarray) -> np.ndarray:
    dx, step = np.zeros_like(x), 1e-6
    for at in np.ndindex(x.shape):
        e = np.zeros_like(x)
        e[at] = step
        dx[at] = ((f(x + e) - f(x - e)) * dy).sum() / (2 * step)
    return dx


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
def test_gradients_are_those_of_the_forward(h: oxidnn.DnnHandle, axis: int, reverse: bool) -> None:
    rng = np.random.default_rng(4)
    x, dy = rng.uniform(0.5, 1.5, (4, 5)) * rng.choice([-1, 1], (4, 5)), rng.standard_normal((4, 5))
    x[2, 3] = x[3, 0] = 0.0  # a product's quotient would be none
    flags: dict[str, Any] = {"axis": axis, "reverse": reverse}
    for more in ({"exclusive": False}, {"exclusive": True}):
        def cumprod(v: np.ndarray, more: Any = more) -> np.ndarray:
            return h.cumprod(v, **flags, **more)

        np.testing.assert_allclose(h.cumprod_backward(dy, x, **flags, **more), numeric_gradient(cumprod, x, dy), atol=1e-8)

        def cumsum(v: np.ndarray, more: Any = more) -> np.ndarray:
            return h.cumsum(v, **flags, **more)

        np.testing.assert_allclose(h.cumsum_backward(dy, **flags, **more), numeric_gradient(cumsum, x, dy), atol=1e-8)

    def logcumsumexp(v: np.ndarray) -> np.ndarray:
        return h.logcumsumexp(v, **flags)

    np.testing.assert_allclose(h.logcumsumexp_backward(dy, x, logcumsumexp(x), **flags), numeric_gradient(logcumsumexp, x, dy), atol=1e-8)

    def before(v: np.ndarray) -> np.ndarray:
        return np.nan_to_num(h.logcumsumexp(v, exclusive=True, **flags), neginf=0.0)  # the first is constant

    got = h.logcumsumexp_backward(dy, x, h.logcumsumexp(x, exclusive=True, **flags), exclusive=True, **flags)
    np.testing.assert_allclose(got, numeric_gradient(before, x, dy), atol=1e-8)
    for forward in (h.cummax, h.cummin):
        _, indices = forward(x, **flags)

        def values(v: np.ndarray, forward: Any = forward) -> np.ndarray:
            return forward(v, **flags)[0]

        np.testing.assert_allclose(h.cummax_backward(dy, indices, **flags), numeric_gradient(values, x, dy), atol=1e-8)


@pytest.mark.parametrize("arch", ARCHES)
def test_no_spills(arch: str) -> None:
    device, seen = known_device(arch), set()
    for op in ENGINES:
        if [e.id for e in ENGINES[op]] != ["scan.block"]:
            continue
        for kind in ("bf16", "f32", "f64", "s64") if op in ("cumsum", "cummax") else ("bf16", "f64"):
            for shape, axis in (("[4096,8192]", 1), ("[8192,4096]", 0), ("[3,1048576]", 1), ("[100000,33]", 1)):
                names = [n for n in ("dy", "x", "y") if n in {"cumprod_backward": "dy x", "cummax_backward": "dy",
                                                                "logcumsumexp_backward": "dy x y"}.get(op, "x").split()]
                line = f"{op} " + " ".join(f"{n}={kind}{shape}" for n in names) + f" axis={axis}"
                problem = parse_case(line + (f" indices=s64{shape}" if op == "cummax_backward" else ""))
                for config in ENGINES[op][0].configs(problem, device)[:3]:
                    for step in ENGINES[op][0].build_steps(problem, config, device).steps:
                        if step.spec not in seen:
                            seen.add(step.spec)
                            assembled = assemble(render(step.spec), arch)
                            assert assembled.spill_bytes == 0 and assembled.registers <= (232 if kind == "f64" else 192), line
