"""What goes with a convolution: moments of the stored result on every matrix loop, expressions over the image, second outputs."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import execute, run_problem

BACKENDS = {arch: EmulatedBackend(arch, checkers="all", schedule=("random", 5)) for arch in ("sm_80", "sm_90a")}


def takers(problem: Problem, *names: str) -> list[tuple[EmulatedBackend, Engine]]:
    return [(backend, e) for backend in BACKENDS.values() for e in ENGINES[problem.op]
            if e.id.split(".")[1] in names and e.check_support(problem, backend.info)]


def check_moments(backend: EmulatedBackend, problem: Problem, engine: Engine, config: EngineConfig, seed: int) -> None:
    """Against the moments in float64 of the result as it came out: to f32's own precision, whatever the sums err."""
    rng = np.random.default_rng(seed)
    inputs = random_inputs(problem, rng)
    for name in inputs:  # far from zero, so that squares less the mean's would cancel
        if name == "offset":
            inputs[name] = (100 + inputs[name].astype(np.float64)).astype(inputs[name].dtype)
    found = execute(backend, problem, engine, config, inputs)
    y = found[problem.outputs[0].name].astype(np.float64)
    axes = (0, *range(2, y.ndim))
    count, mean = y.size // y.shape[1], y.mean(axes)
    m2 = ((y - mean.reshape(1, -1, *(1,) * (y.ndim - 2)))**2).sum(axes)
    assert found["stats_count"].tolist() == [count]
    np.testing.assert_allclose(found["stats_mean"], mean, rtol=2e-6, atol=2e-6 * np.abs(y).mean(), err_msg=f"{engine.id} {config.name}")
    np.testing.assert_allclose(found["stats_m2"], m2, rtol=2e-5, err_msg=f"{engine.id} {config.name}")


LINES = (
    'conv_fprop x=f16[3,16,9,8]nhwc w=f16[24,16,3,3]nhwc padding=1 offset=f32[24] epilogue="acc * 0.1 + offset[c]" return_stats=True',
    'conv_fprop x=bf16[2,64,9,9]nhwc w=bf16[136,64,1,1]nhwc bias=f32[136] epilogue="relu(acc + bias[c])" return_stats=True',
    'conv_fprop x=bf16[1,64,23,9]nhwc w=bf16[200,64,1,1]nhwc y=f32[1,200,23,9]nhwc return_stats=True',
    'conv_fprop x=bf16[2,8,7,6]nhwc w=bf16[16,8,3,3]nhwc y=f32[2,16,7,6]nhwc padding=1 epilogue="acc + 100, acc" return_stats=True',
    'conv_fprop x=f16[2,64,9,9]nhwc w=f16[72,64,1,1]nhwc residual=f16[2,72,9,9]nhwc return_stats=True',
    'conv_fprop x=f16[2,16,8,8] w=f16[24,16,3,3] padding=1 return_stats=True',
    'conv_fprop x=bf16[3,64,16,8]nhwc w=bf16[72,64,3,3]nhwc padding=1 return_stats=True',  # patches, a tile with one block too many
    'conv_fprop x=f32[2,6,9,7] w=f32[10,3,3,3] padding=1 groups=2 offset=f32[10] epilogue="acc * 0.1 + offset[c]" return_stats=True',
    'conv_fprop x=f32[3,8,5,7]nhwc w=f32[20,8,3,3]nhwc padding=1 return_stats=True math=tf32',
    'conv_transpose x=f16[2,16,7,6]nhwc w=f16[16,24,3,3]nhwc padding=1 return_stats=True',
    'conv_transpose x=f16[2,16,4,3]nhwc w=f16[16,8,2,2]nhwc stride=2 return_stats=True',  # columns are taps and channels
)


@pytest.mark.parametrize("line", LINES)
def test_moments_of_the_result_as_it_is_stored(line: str) -> None:
    problem, fused = parse_case(line), 0
    for backend, engine in takers(problem, "igemm_wgmma_sm90", "igemm_mma_sm80", "igemm_simt", "direct"):
        assert isinstance(engine, MatmulEngine)
        configs = engine.configs(problem, backend.info)
        writing = [c for c in configs if any(s.spec.template == "channelwise/moments"
                                             for s in engine.build_steps(problem, c, backend.info).steps)]
        chosen = [c for c in configs if c not in writing][:6:2] + writing[:1]  # beside the result, and from it
        fused += len(chosen) - len(writing[:1])
        for seed, config in enumerate(chosen):
            check_moments(backend, problem, engine, config, seed)
    assert bool(fused) == ("stride=2" not in line), "which loops write moments beside the result"


@pytest.mark.parametrize("line", (
    'conv_fprop x=f16[2,16,7,6]nhwc w=f16[16,16,3,3]nhwc padding=1 gain=f32[16] shift=f16[16] prologue="relu(x * gain + shift)"',
    'conv_fprop x=bf16[2,6,7,6] w=bf16[16,3,3,3] padding=1 groups=2 gain=f32[6] shift=bf16[1] prologue="relu(x * gain + shift)"',
    'conv_fprop x=f32[2,5,9] w=f32[7,5,3] padding=2 stride=2 gain=f32[5] shift=f64[5] prologue="silu(x * gain + shift)"',
    'conv_fprop x=f64[2,6,5,4] w=f64[9,6,2,3] padding=1 gain=f64[6] prologue="x * gain + 1"',
    'conv_fprop x=f32[2,8,7,6]nhwc w=f32[16,8,3,3]nhwc padding=1 math=tf32x3 gain=f32[8] shift=f32[8] prologue="relu(x * gain + shift)"',
    'conv_wgrad x=f32[2,6,7,6] dy=f32[2,4,7,6] w_shape=(4,3,3,3) padding=1 groups=2 gain=f32[6] shift=f32[6] '
    'prologue="relu(x * gain + shift)"',
    'conv_wgrad x=f16[2,16,7,6]nhwc dy=f16[2,8,7,6]nhwc w_shape=(8,16,3,3) padding=1 gain=f32[16] shift=f32[16] '
    'prologue="relu(x * gain + shift)"',
    'conv_wgrad x=bf16[2,5,7,6]nhwc dy=bf16[2,8,7,6]nhwc w_shape=(8,5,3,3) padding=1 gain=f32[5] shift=f32[5] '
    'prologue="relu(x * gain + shift)" return_bias_grad=True',
))
def test_expressions_over_the_image(line: str) -> None:
    problem = parse_case(line)
    found = takers(problem, "igemm_mma_sm80", "igemm_simt", "direct", "prologue_apart")
    assert len(found) >= 6
    for backend, engine in found:
        for seed, config in enumerate(engine.configs(problem, backend.info)[:4:3]):
            run_problem(backend, problem, engine, config, seed)


@pytest.mark.parametrize("engine", ("igemm_mma_sm80", "direct", "prologue_apart"))
def test_padding_is_zero_after_the_expression(engine: str) -> None:
    """An expression that makes ones of zeros: only pixels that exist count."""
    problem = parse_case('conv_fprop x=f16[1,8,3,3]nhwc w=f16[8,8,3,3]nhwc padding=1 prologue="x + 1"')
    backend, taker = takers(problem, engine)[0]
    zeros, ones = np.zeros((1, 8, 3, 3), np.float16), np.ones((8, 8, 3, 3), np.float16)
    y = execute(backend, problem, taker, taker.configs(problem, backend.info)[0], {"x": zeros, "w": ones})["y"]
    assert y[0, 0].tolist() == [[32, 48, 32], [48, 72, 48], [32, 48, 32]]


def test_what_does_not_fit_is_refused_in_words() -> None:
    problem = parse_case('conv_fprop x=f16[2,64,7,6]nhwc w=f16[64,64,3,3]nhwc padding=1 prologue="relu(x)"')
    reasons = {e.id.split(".")[1]: e.check_support(problem, BACKENDS["sm_90a"].info).reason for e in ENGINES["conv_fprop"]}
    takers_of = "(igemm_simt, igemm_mma_sm80, direct and prologue_apart do)"
    assert reasons["igemm_wgmma_sm90"] == f"wgmma_sm90 takes no expressions over its input {takers_of}"
    assert reasons["winograd_f2x3"] == f"winograd_f2x3 takes no expressions over its input {takers_of}"
    assert not reasons["igemm_mma_sm80"] and not reasons["direct"]
    problem = parse_case('conv_fprop x=f16[2,64,7,6]nhwc w=f16[64,1,3,3]nhwc padding=1 groups=64 epilogue="relu(acc), acc"')
    reasons = {e.id.split(".")[1]: e.check_support(problem, BACKENDS["sm_90a"].info).reason for e in ENGINES["conv_fprop"]}
    assert reasons["depthwise"].startswith("depthwise takes no second outputs (igemm_wgmma_sm90,")


AMAX_LINES = (
    "conv_fprop x=e4m3[2,16,3,5]nhwc w=e4m3[80,16,2,2]nhwc y=e4m3[2,80,3,5]nhwc padding=((1,0),(0,1)) scale_x=f32[1] scale_w=f32[80] "
    "scale_y=f32[1] bias=f32[80] return_amax=True",
    "conv_fprop x=e5m2[1,64,9,9]nhwc w=e4m3[136,64,1,1]nhwc y=bf16[1,136,9,9]nhwc bias=f32[136] return_amax=True",
    'conv_fprop x=bf16[1,64,9,8]nhwc w=bf16[72,64,1,1]nhwc residual=f16[1,72,9,8]nhwc epilogue="acc + residual" return_amax=True',
    "conv_fprop x=f32[2,6,9,7] w=f32[10,3,3,3] padding=1 groups=2 return_amax=True return_stats=True",
    "conv_transpose x=f16[2,16,5,4]nhwc w=f16[16,24,3,3]nhwc stride=2 epilogue=relu(acc) return_amax=True",
    "conv_fprop x=e4m3[2,0,4,4] w=e4m3[3,0,3,3] bias=f32[3] return_amax=True",
    "conv_fprop x=f16[0,8,4,4] w=f16[3,8,3,3] return_amax=True",
)


@pytest.mark.parametrize("line", AMAX_LINES)
def test_largest_size_of_the_result_before_its_scale(line: str) -> None:
    """By every loop that has it, from sums in one piece and in parts; the rows and columns of tiles beyond the result do not count."""
    problem, seen = parse_case(line), 0
    for backend, engine in takers(problem, "igemm_wgmma_sm90", "igemm_mma_sm80", "igemm_simt", "direct", "im2col"):
        configs = engine.configs(problem, backend.info)
        split = tuple(c for c in configs if dict(c.knobs).get("split_k", 1) > 1)[:1]
        for number, config in enumerate(configs[:1] if backend.info.arch == "sm_80" else configs[:3:2] + split):
            run_problem(backend, problem, engine, config, seed=number)
            seen += 1
    assert seen > 1


def test_largest_size_is_nan_where_a_result_is() -> None:
    problem = parse_case(AMAX_LINES[0])
    inputs = random_inputs(problem, np.random.default_rng(1))
    inputs["bias"][79] = np.nan
    for backend, engine in takers(problem, "igemm_wgmma_sm90", "igemm_mma_sm80", "direct"):
        found = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], inputs)
        assert np.isnan(found["amax"]), engine.id


def test_engines_that_know_no_largest_size_say_so() -> None:
    problem = parse_case("conv_fprop x=f32[1,4,12,12]nhwc w=f32[4,4,3,3] padding=1 return_amax=True")
    refusals = {e.id: e.check_support(problem, BACKENDS["sm_90a"].info) for e in ENGINES["conv_fprop"]}
    assert "largest size" in refusals["conv_fprop.winograd_f2x3"].reason


BYTE_LINES = (
    "conv_fprop x=s8[2,32,5,7]nhwc w=s8[80,32,3,3]nhwc y=s8[2,80,5,7]nhwc padding=1 scale_x=f32[1] scale_w=f32[80] scale_y=f32[1] "
    "bias=s32[80]",
    "conv_fprop x=s8[1,64,9,9]nhwc w=u8[208,64,1,1]nhwc y=u8[1,208,9,9]nhwc scale_w=f32[208] scale_y=f32[1] bias=f32[208]",
    "conv_fprop x=u8[2,32,8,8]nhwc w=s8[64,32,3,3]nhwc y=s8[2,64,8,8]nhwc padding=1",
    "conv_fprop x=s8[2,32,5,7]nhwc w=s8[80,32,3,3]nhwc y=s32[2,80,5,7]nhwc padding=1 bias=s32[80]",
    "conv_fprop x=e4m3[1,64,9,9]nhwc w=e4m3[208,64,1,1]nhwc y=e5m2[1,208,9,9]nhwc scale_x=f32[1] scale_y=f32[1]",
    'conv_fprop x=f16[1,64,9,9]nhwc w=f16[80,64,1,1]nhwc y=s8[1,80,9,9]nhwc epilogue="acc * 4"',
    "conv_fprop x=s8[2,32,5,7]nhwc w=s8[80,32,3,3]nhwc y=s8[2,80,5,7](6000,1,700,100) padding=1 scale_x=f32[1] scale_y=f32[1] bias=s32[80]",
)


@pytest.mark.parametrize("line", BYTE_LINES)
def test_results_of_8_bits_leave_by_tensor_copies(line: str) -> None:
    """Panels of 64 columns of bytes, rounded and saturated from f32 or from integers, tails of rows and columns; strides that copies
    refuse go the other way."""
    problem = parse_case(line)
    (backend, engine), = (t for t in takers(problem, "igemm_wgmma_sm90"))
    by_tiles = {(c["schedule"], c["loader"], c["tile_m"], c["tile_n"]): c for c in reversed(engine.configs(problem, backend.info))}
    for number, config in enumerate(list(by_tiles.values())[::3]):
        run_problem(backend, problem, engine, config, seed=number)
        (step, *_) = engine.build_steps(problem, config, backend.info).steps
        assert step.spec.consts.is_direct == ("6000" not in line and config["split_k"] == 1)  # type: ignore[attr-defined]
