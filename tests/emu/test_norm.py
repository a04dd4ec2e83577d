"""Norm kernels in the emulator: published values, cancellation, every config against the reference; assembled without spills."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import format_case, parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import to_storage
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.sample import CASES, SAMPLES
from oxidnn.testing.sample.norm import SAMPLES as OPS

ARCHES = ("sm_80", "sm_90a")


def outputs(line: str, config: int = 0, **inputs: object) -> dict[str, np.ndarray]:
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    engine = ENGINES[problem.op][0]
    arrays = {n: to_storage(np.asarray(v), problem.desc(n).dtype) for n, v in inputs.items()}
    configs = engine.configs(problem, backend.info)
    return {n: a.astype(np.float64) for n, a in execute(backend, problem, engine, configs[config % len(configs)], arrays).items()}


def test_no_cancellation_far_from_zero() -> None:
    y = outputs("layer_norm x=f32[1,4]nchw", x=[[4096 + i / 64 for i in range(4)]])["y"]
    np.testing.assert_allclose(y, [[-1.320185, -0.440062, 0.440062, 1.320185]], rtol=2e-6)


def test_a_long_row_far_from_zero() -> None:
    """More columns than registers hold: the moments of packs are merged."""
    x = (2.0**20 + np.arange(30000) % 4).astype(np.float32)
    got = outputs("layer_norm x=f32[1,30000]nchw return_stats=True", x=x[None])
    assert abs(got["mean"][0] - x.astype(np.float64).mean()) <= 0.125
    np.testing.assert_allclose(got["rstd"][0], 1 / np.sqrt(x.astype(np.float64).var() + 1e-5), rtol=2e-2)


@pytest.mark.parametrize("config", [0, 1])
def test_a_constant_row_gives_beta(config: int) -> None:
    beta = np.arange(64) / 7
    y = outputs("layer_norm x=f32[2,64]nchw beta=f32[64]nchw", config, x=np.full((2, 64), 0.75), beta=beta)["y"]
    np.testing.assert_array_equal(y, np.broadcast_to(beta.astype(np.float32), (2, 64)))


@pytest.mark.parametrize(("shape", "dtype", "value"), [
    ((1, 7), "f32", 3.3), ((2, 2100), "f32", 33.3), ((1, 30001), "f32", 1001.7), ((1, 17001), "f32", 33.3), ((1, 20002), "f32", 3.3),
    ((3, 1000), "f64", 3.3), ((1, 777), "bf16", 100.3), ((1, 20000), "f64", 33.3),
])
def test_the_mean_of_a_constant_row_is_its_value(shape: tuple[int, int], dtype: str, value: float) -> None:
    """The rounded sum over n is not: 1 / sqrt(eps) would make it seen. Held in registers, and read in packs."""
    line = f"layer_norm x={dtype}[{shape[0]},{shape[1]}]nchw return_stats=True"
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    engine = ENGINES["layer_norm"][0]
    for config in engine.configs(problem, backend.info):
        x = to_storage(np.full(shape, value), problem.desc("x").dtype)
        got = execute(backend, problem, engine, config, {"x": x})
        np.testing.assert_array_equal(got["y"].astype(np.float64), np.zeros(shape), err_msg=str(config))
        np.testing.assert_array_equal(got["mean"].astype(np.float64), np.full(shape[0], x.flat[0], np.float64), err_msg=str(config))


def test_rms_norm_in_half() -> None:
    y = outputs("rms_norm x=f16[1,2]nchw gamma=f16[2]nchw eps=1e-6", x=[[300, -400]], gamma=[1, 1])["y"]
    np.testing.assert_allclose(y, [[0.848528, -1.131371]], rtol=1e-3)


def test_the_sum_goes_out_rounded_and_in_unrounded() -> None:
    """1 + 2^-9 is no bf16: the sum rounds it, the norm does not."""
    x, residual = [[1, 1, 1, 1]], [[2.0**-9, 0, 0, 0]]
    got = outputs("layer_norm x=bf16[1,4]nchw residual=bf16[1,4]nchw return_sum=True eps=0.0", x=x, residual=residual)
    np.testing.assert_array_equal(got["sum"], np.ones((1, 4)))
    np.testing.assert_allclose(got["y"], [[np.sqrt(3), *[-1 / np.sqrt(3)] * 3]], rtol=4e-3)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_nan_and_infinity_stay_in_their_row(value: float) -> None:
    x = np.random.default_rng(0).standard_normal((3, 40))
    x[1, 7] = value
    got = outputs("layer_norm x=f32[3,40]nchw return_stats=True", x=x)
    assert np.isnan(got["y"][1]).all() and np.isfinite(got["y"][[0, 2]]).all()
    np.testing.assert_array_equal(got["mean"][1], value)


@pytest.mark.parametrize("line", [line for op in OPS for line in CASES[op]])
def test_cases(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    run_problem(backend, problem, ENGINES[problem.op][0])


@pytest.mark.parametrize("op", list(OPS))
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(31)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ARCHES]
    for i in range(12):
        problem = SAMPLES[op](rng, "tiny")
        assert format_case(parse_case(format_case(problem))) == format_case(problem)
        for config in ENGINES[op][0].configs(problem, backends[i % 2].info):
            run_problem(backends[i % 2], problem, ENGINES[op][0], config, seed=i)


def test_the_gradient_of_parameters_is_the_same_bits_every_time() -> None:
    problem = parse_case("layer_norm_backward dy=f32[300,24] x=f32[300,24] mean=f32[300] rstd=f32[300] gamma=f32[24]")
    engine, rng = ENGINES[problem.op][0], np.random.default_rng(1)
    inputs = {o.name: rng.standard_normal(o.desc.shape).astype(np.float32) for o in problem.inputs}
    config = engine.configs(problem, known_device("sm_80"))[0]
    results = [execute(EmulatedBackend("sm_80", checkers="all", schedule=s), problem, engine, config, inputs)
               for s in ("lowest_pc", ("random", 1), ("random", 2))]
    for name in ("dgamma", "dbeta"):
        assert len({r[name].tobytes() for r in results}) == 1


@pytest.mark.parametrize(("line", "word"), [
    ("layer_norm x=f32[2,8] gamma=f32[2]", "gamma"), ("layer_norm x=f32[2,8] axes=2", "axes"), ("layer_norm x=f32[2,0]", "at least one"),
    ("rms_norm x=f32[2,8] eps=-1.0", "eps"),
    ("layer_norm x=f32[2,8] residual=f16[2,8]", "residual"), ("layer_norm x=s32[2,8]", "type of x"),
    ("layer_norm_backward dy=f32[2,8] x=f32[2,8] rstd=f32[2]", "mean"), ("layer_norm x=f32[2,8] epilogue='acc + beta'", "beta"),
])
def test_bad_arguments_are_named(line: str, word: str) -> None:
    with pytest.raises(InvalidArgument, match=word):
        parse_case(line)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("op", list(OPS))
def test_kernels_assemble_without_spills(op: str, arch: str) -> None:
    rng, device = np.random.default_rng(32), known_device(arch)
    texts = {}
    for problem in [*map(parse_case, CASES[op]), *(SAMPLES[op](rng, "small") for _ in range(6))]:
        for config in ENGINES[op][0].configs(problem, device):
            for step in ENGINES[op][0].build_steps(problem, config, device).steps:
                texts[render(step.spec)] = step.spec
    for text, spec in texts.items():
        assembled = assemble(text, arch)
        assert assembled.spill_bytes == 0 and assembled.registers <= 128, spec.describe()


@pytest.mark.parametrize("line", [
    "layer_norm_backward dy=bf16[150,40] x=bf16[150,40] mean=f32[150] rstd=f32[150] gamma=f32[40]",
    "rms_norm_backward dy=f32[13,900] x=f32[13,900] rstd=f32[13] gamma=bf16[900]",
    "layer_norm_backward dy=f16[11,9000] x=f16[11,9000] mean=f32[11] rstd=f32[11] gamma=f16[9000]",
    "layer_norm_backward dy=bf16[16,17000] x=bf16[16,17000] mean=f32[16] rstd=f32[16] gamma=f32[17000]",
])
def test_a_ring_of_rows_wraps(line: str) -> None:
    """On one SM, or a few for clusters: a CTA walks more rows than its ring has stages."""
    problem = parse_case(line)
    for arch, schedule in (("sm_80", "lowest_pc"), ("sm_90a", ("random", 5))):
        backend = EmulatedBackend(arch, checkers="all", schedule=schedule)
        backend.info = replace(backend.info, num_sms=1 if problem.columns < 10000 else 3)
        configs = [c for c in ENGINES[problem.op][0].configs(problem, backend.info) if c["home"] == "ring"]
        assert configs or (arch, problem.columns) == ("sm_80", 17000)
        for config in configs:
            run_problem(backend, problem, ENGINES[problem.op][0], config)
