"""Pooling kernels in the emulator: published values, special values, wide strides, every config; assembled without spills."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import to_storage
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.sample import CASES, SAMPLES
from oxidnn.testing.sample.pool import SAMPLES as OPS

ARCHES = ("sm_80", "sm_90a")


def outputs(line: str, arch: str = "sm_80", **inputs: object) -> dict[str, np.ndarray]:
    """The op on given values, in the storage types, by its first engine; floats come back as float64."""
    problem, backend = parse_case(line), EmulatedBackend(arch, checkers="all")
    engine = ENGINES[problem.op][0]
    arrays = {n: to_storage(np.asarray(v), problem.desc(n).dtype) for n, v in inputs.items()}
    got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], arrays)
    return {n: a.astype(np.float64) if problem.desc(n).dtype.is_float else a for n, a in got.items()}


def test_ceil_mode_windows_start_inside_the_input() -> None:
    got = outputs("max_pool x=f32[1,1,5]nchw window=1 stride=3 ceil_mode=True return_indices=True", x=[[[10.0, 20, 30, 40, 50]]])
    assert got["y"].tolist() == [[[10, 40]]] and got["indices"].tolist() == [[[0, 3]]]


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("indexed", [False, True])
def test_nan_wins_and_minus_infinity_stays(kind: str, indexed: bool) -> None:
    line = f"max_pool x={kind}[1,1,6]nchw window=2 return_indices={indexed}"
    got = outputs(line, x=[[[1, np.nan, 2, 3, -np.inf, -np.inf]]])
    np.testing.assert_array_equal(got["y"], [[[np.nan, 3, -np.inf]]])
    if indexed:
        assert got["indices"].tolist() == [[[1, 3, 4]]]


@pytest.mark.parametrize("extent", [3, 50, 5000])
def test_global_pools_of_special_values(extent: int) -> None:
    x = np.full((2, 2, extent), -np.inf)
    x[0, 1, extent - 1] = np.nan
    x[1, 0, 1] = 2
    np.testing.assert_array_equal(outputs(f"global_max_pool x=f32[2,2,{extent}]nchw", x=x)["y"], [[[-np.inf], [np.nan]], [[2], [-np.inf]]])
    ones = np.ones((2, 2, extent))
    np.testing.assert_array_equal(outputs(f"global_avg_pool x=bf16[2,2,{extent}]nchw", x=ones)["y"], ones[:, :, :1])


def test_integer_extremes() -> None:
    assert outputs("max_pool x=s8[1,1,4]nchw window=2", x=[[[-128, -128, -1, 127]]])["y"].tolist() == [[[-128, 127]]]
    assert outputs("max_pool x=u8[1,1,4]nchw window=2", x=[[[0, 0, 200, 255]]])["y"].tolist() == [[[0, 255]]]
    assert outputs("max_pool x=s32[1,1,2]nchw window=2 return_indices=True", x=[[[-(2**31), -(2**31)]]])["indices"].tolist() == [[[0]]]


def test_average_divisors() -> None:
    x = [[[2.0, 4, 6, 8, 10]]]
    assert outputs("avg_pool x=f32[1,1,5]nchw window=3 ceil_mode=True", x=x)["y"].tolist() == [[[4, 9]]]
    line = "avg_pool x=f64[1,1,5]nchw window=3 ceil_mode=True divisor_override=10 count_include_pad=False"
    np.testing.assert_allclose(outputs(line, x=x)["y"], [[[1.2, 1.8]]])
    # windows [., 2, 4], [6, 8, 10], the second of three with its overhang cut: padding counts only if asked, overhang never
    line = "avg_pool x=f32[1,1,5]nchw window=3 stride=3 padding=1 ceil_mode=True"
    np.testing.assert_allclose(outputs(line, x=x)["y"], [[[2, 8]]])
    np.testing.assert_allclose(outputs(line + " count_include_pad=False", x=x)["y"], [[[3, 8]]])
    line = "avg_pool x=f32[1,1,5]nchw window=3 stride=1 padding=((0,2),)"
    np.testing.assert_allclose(outputs(line, x=x)["y"], [[[4, 6, 8, 6, 10 / 3]]], rtol=1e-7)
    np.testing.assert_allclose(outputs(line + " count_include_pad=False", x=x)["y"], [[[4, 6, 8, 9, 10]]])


def test_gradients_of_dilated_windows() -> None:
    """Windows {0, 2}, {1, 3}, {2, 4}: element 1 lies between the taps of the first."""
    line = "avg_pool_backward dy=f32[1,1,3]nchw window=2 dilation=2 stride=1 x_shape=(1,1,5)"
    assert outputs(line, dy=[[[2.0, 20, 200]]])["dx"].tolist() == [[[1, 10, 101, 10, 100]]]


def test_adaptive_gradient() -> None:
    line = "adaptive_avg_pool_backward dy=f32[1,1,3]nchw output_size=3 x_shape=(1,1,5)"
    np.testing.assert_allclose(outputs(line, dy=np.ones((1, 1, 3)))["dx"], [[[1 / 2, 5 / 6, 1 / 3, 5 / 6, 1 / 2]]], rtol=1e-7)


def test_overlapping_maxima_add_up() -> None:
    line = "max_pool_backward dy=f32[1,1,3]nchw indices=s64[1,1,3]nchw window=3 stride=1 x_shape=(1,1,5)"
    got = outputs(line, dy=[[[1.0, 2, 4]]], indices=[[[2, 2, 3]]])
    assert got["dx"].tolist() == [[[0, 0, 3, 4, 0]]]


@pytest.mark.parametrize("line", [
    f"max_pool x=f32[1,2,5,6]({2**30},30,6,1) window=2 return_indices=True",
    f"avg_pool_backward dy=f32[1,2,2,3]({2**30},6,3,1) window=2 x_shape=(1,2,5,6)",
    f"max_pool_backward dy=f16[1,8,2,3]({2**31},1,24,8) indices=s64[1,8,2,3]nhwc window=2 x_shape=(1,8,5,6)",
    "max_pool x=f32[1,2,5,6](60,-30,6,-1) window=2 stride=1",
    "max_pool_backward dy=f32[2,8,2,3](0,1,8,0) x=f32[2,8,4,6]nhwc window=2",
    "avg_pool_backward dy=f32[2,8,2,3](0,0,0,0) window=2 x_shape=(2,8,5,6)",
])
def test_wide_negative_and_zero_strides(line: str) -> None:
    """A dimension of size 1 may have any stride: here one that no 32-bit register holds."""
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    run_problem(backend, problem, ENGINES[problem.op][0])


def test_the_gradient_is_the_same_bits_every_time() -> None:
    line = "max_pool_backward dy=f16[2,8,9,9]nhwc indices=s64[2,8,9,9]nhwc window=3 stride=1 padding=1 x_shape=(2,8,9,9)"
    problem = parse_case(line)
    runs = [run_problem(EmulatedBackend("sm_80", schedule=s), problem, ENGINES[problem.op][0], seed=3).outputs["dx"]
            for s in ("lowest_pc", ("random", 1), ("random", 2))]
    assert all(run.tobytes() == runs[0].tobytes() for run in runs)


@pytest.mark.parametrize("op", list(OPS))
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(21)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ARCHES]
    for i in range(6):
        problem = SAMPLES[op](rng, "tiny")
        for engine in ENGINES[op]:
            if not engine.check_support(problem, backends[i % 2].info):
                continue
            for config in engine.configs(problem, backends[i % 2].info)[::2]:
                run_problem(backends[i % 2], problem, engine, config, seed=i)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("op", list(OPS))
def test_kernels_assemble_without_spills(op: str, arch: str) -> None:
    rng, device = np.random.default_rng(22), known_device(arch)
    for problem in [*map(parse_case, CASES[op]), *(SAMPLES[op](rng, "small") for _ in range(5))]:
        for engine in ENGINES[op]:
            if not engine.check_support(problem, device):
                continue
            for step in engine.build_steps(problem, engine.configs(problem, device)[0], device).steps:
                text = render(step.spec)
                assert len(text.splitlines()) <= 6000
                assembled = assemble(text, arch)
                assert assembled.spill_bytes == 0 and assembled.registers <= 128, step.spec.describe()


@pytest.mark.parametrize("line", ["global_avg_pool x=f64[3,4,12,12,10]nchw", "global_max_pool x=f32[2,3,60,65]nchw",
                                  "global_avg_pool x=bf16[2,2,33,99]nchw"])
def test_every_config_of_whole_images(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    problem = parse_case(line)
    for engine in ENGINES[problem.op]:
        if engine.check_support(problem, backend.info):
            for config in engine.configs(problem, backend.info):
                run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("line", [
    "avg_pool x=f32[2,3,8,8]nchw window=2", "avg_pool x=f32[2,3,9,16]nchw window=3 stride=2 padding=1 count_include_pad=False",
    "avg_pool x=f16[2,3,9,16]nchw window=3 stride=2 padding=1", "avg_pool x=f32[2,3,8,24]nchw window=3",
    "avg_pool x=f32[2,3,9,16]nchw window=2 ceil_mode=True", "avg_pool x=f32[2,3,9,16]nchw window=4 stride=2 padding=1 ceil_mode=True",
    "avg_pool x=bf16[2,3,9,16]nchw window=(2,3) stride=2 padding=1 divisor_override=7",
    "max_pool x=bf16[2,3,7,16]nchw window=3 stride=2 padding=1 return_indices=True", "max_pool x=s8[2,3,8,16]nchw window=2",
    "max_pool x=f64[1,2,4,5,8]nchw window=(2,2,3) stride=(1,2,2) padding=(0,1,1) return_indices=True",
    "max_pool x=f32[2,3,32]nchw window=2 return_indices=True", "max_pool x=f32[1,2,4,16]nchw window=(1,2) stride=(1,4)",
    "lp_pool x=f32[2,3,8,20]nchw window=(2,5) stride=2 norm=3.0", "lp_pool x=f16[2,3,7,16]nchw window=3 stride=2 padding=1 norm=1.0"])
def test_outputs_along_a_row(line: str) -> None:
    """Windows that overlap within a thread's row, reach out of its cells or out of the input: any number of outputs a thread."""
    backend, problem = EmulatedBackend("sm_80", checkers="all"), parse_case(line)
    engine = next(e for e in ENGINES[problem.op] if e.id == "pool.window")
    configs = [c for c in engine.configs(problem, backend.info) if dict(c.knobs).get("along", 1) > 1 and c["threads"] == 128]
    assert configs
    for config in configs:
        run_problem(backend, problem, engine, config)


def test_rows_that_no_packs_serve() -> None:
    """An odd number of outputs, rows that begin between packs, windows apart from their cells, outputs that need not lie along the row."""
    backend = EmulatedBackend("sm_80")
    for line in ("avg_pool x=f32[2,3,8,10]nchw window=2", "avg_pool x=f32[2,3,8,18]nchw window=2", "avg_pool x=f32[2,8,8,8]nhwc window=2",
                 "max_pool x=f32[2,3,8,16]nchw window=2 dilation=2", "adaptive_avg_pool x=f32[2,3,8,16]nchw output_size=(3,7)"):
        problem = parse_case(line)
        engine = next(e for e in ENGINES[problem.op] if e.id == "pool.window")
        assert all(dict(c.knobs).get("along", 1) < 4 for c in engine.configs(problem, backend.info)), line
