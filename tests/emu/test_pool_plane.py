"""Images in shared memory: gradients of maxima, and unpooling; every layout, odd sizes, images that share a CTA, whatever runs first."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.pool_plane import apart
from oxidnn.ops.case import parse_case
from oxidnn.ops.pool import Axis
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

LINES = (
    "max_pool_backward dy=bf16[3,5,5,4]nchw x=bf16[3,5,9,7]nchw window=3 stride=2 padding=1",
    "max_pool_backward dy=f16[1,16,4,4]nhwc x=f16[1,16,8,8]nhwc window=2 stride=2",
    "max_pool_backward dy=f64[2,3,3,3]nchw x=f64[2,3,9,9]nchw window=3 dilation=2 stride=2",
    "max_pool_backward dy=f32[1,3,3,2,3]nchw x=f32[1,3,5,6,7]nchw window=(2,3,2) stride=2 padding=(1,0,0)",
    "max_pool_backward dy=f32[2,40,3]nchw x=f32[2,40,5]nchw window=3 stride=1",
    "adaptive_max_pool_backward dy=f16[2,3,3,4]nchw indices=s64[2,3,3,4]nchw output_size=(3,4) x_shape=(2,3,7,10)",
    "fractional_max_pool_backward dy=bf16[1,8,5,3,4]nhwc indices=s64[1,8,5,3,4]nhwc window=2 output_size=(5,3,4) x_shape=(1,8,9,7,6)",
    "fractional_max_pool_backward dy=f32[2,3,8,5]nchw indices=s32[2,3,8,5]nchw window=(2,3) output_size=(8,5) x_shape=(2,3,11,9)",
    "max_unpool x=bf16[2,32,5,4]nhwc indices=s64[2,32,5,4]nhwc output_size=(9,7)",
    "max_unpool x=s8[1,2,3,2,4]nchw indices=s32[1,2,3,2,4]nchw output_size=(3,5,7)",
    "max_unpool x=f64[2,5,40]nchw indices=s64[2,5,40]nchw output_size=(7,)",
)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("line", LINES)
def test_every_config(line: str, arch: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend(arch, checkers="all")
    engine = ENGINES[problem.op][-1]
    assert engine.check_support(problem, backend.info)
    for config in engine.configs(problem, backend.info):
        run_problem(backend, problem, engine, config)
    if problem.operands[0].desc.is_packed():  # several images a CTA, the last CTA fewer
        run_problem(backend, problem, engine, type(config)((("group", 4), ("threads", 64))))


@pytest.mark.parametrize("schedule", ["lowest_pc", ("random", 3), ("random", 11)])
def test_the_last_of_several_stays_whatever_runs_first(schedule: Any) -> None:
    """700 elements for 5 places."""
    problem = parse_case("max_unpool x=f32[1,1,700]nchw indices=s64[1,1,700]nchw output_size=(5,)")
    rng = np.random.default_rng(1)
    x, indices = rng.standard_normal((1, 1, 700)).astype(np.float32), rng.integers(0, 4, (1, 1, 700))
    engine, backend = ENGINES["max_unpool"][-1], EmulatedBackend("sm_80", checkers="all", schedule=schedule)
    got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], {"x": x, "indices": indices})["y"]
    want = [x[0, 0, np.flatnonzero(indices[0, 0] == place)[-1]] for place in range(4)]
    np.testing.assert_array_equal(got[0, 0], [*want, 0.0])


@pytest.mark.parametrize("outside", [-1, 6, 2**40, -(2**63)])
def test_an_index_outside_gives_nothing(outside: int) -> None:
    problem = parse_case("max_unpool x=f32[1,1,3]nchw indices=s64[1,1,3]nchw output_size=(6,)")
    engine, backend = ENGINES["max_unpool"][-1], EmulatedBackend("sm_80", checkers="all")
    given = {"x": np.array([[[1.0, 2.0, 3.0]]], np.float32), "indices": np.array([[[4, outside, 0]]])}
    got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], given)["y"]
    np.testing.assert_array_equal(got, [[[3, 0, 0, 0, 1, 0]]])


def test_outputs_that_are_apart_share_no_element() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        extent, window = int(rng.integers(3, 60)), int(rng.integers(1, 5))
        window = min(window, extent)
        outputs = int(rng.integers(1, extent - window + 2))
        axis = Axis(extent, outputs, window, fractional=True)
        for sample in (0.0, float(rng.random()), 0.999999):
            step = np.float32(extent - window) / np.float32(max(outputs - 1, 1))
            begin = ((np.arange(outputs, dtype=np.float32) + np.float32(sample)) * step).astype(int) - int(np.float32(sample) * step)
            begin[-1] = extent - window
            k = apart(axis)
            assert k >= outputs or (begin[k:] - begin[:-k] >= window).all(), (axis, sample)
