"""The direct engine on convolutions in the emulator, all checkers on: every op in every type, and values known by hand."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import DeviceInfo, known_device
from oxidnn.dtypes import F32
from oxidnn.engines.affine_direct import DIRECT
from oxidnn.engines.base import Build, EngineConfig
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.base import Problem
from oxidnn.ops.case import format_case, parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.sample import CASES, SAMPLES

OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
TYPES = ("f32", "f64", "f16", "bf16")


def backend(arch: str = "sm_80") -> EmulatedBackend:
    return EmulatedBackend(arch, checkers="all")


@pytest.mark.parametrize("op", OPS)
def test_random_problems_of_every_type(op: str) -> None:
    rng = np.random.default_rng(OPS.index(op))
    engine, backends, left = MatmulEngine(op, DIRECT), (backend(), backend("sm_90a")), dict.fromkeys(TYPES, 5)
    while any(left.values()):
        problem = SAMPLES[op](rng, "tiny")
        kind = problem.operands[0].desc.dtype.name
        if left.get(kind, 0) == 0 or problem.is_empty:
            continue
        left[kind] -= 1
        for config in engine.configs(problem, backends[0].info):
            run_problem(backends[left[kind] % 2], problem, engine, config, seed=left[kind])


@pytest.mark.parametrize("line", [line for op in OPS for line in CASES[op]])
def test_fixed_cases(line: str) -> None:
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, DIRECT)
    for config in engine.configs(problem, backend().info):
        run_problem(backend(), problem, engine, config)


@pytest.mark.parametrize("line", (
    "gemm a=f32[3,70] b=f32[70,5] bias=f32[5] epilogue=bias_relu",
    "gemm a=f64[2,3,64] b=f64[2,64,5] d=f16[2,3,5]",
    "conv_wgrad x=bf16[3,8,6,29]nhwc dy=bf16[3,8,6,29]nhwc w_shape=(8,1,3,3) padding=1 groups=8",
    "conv_wgrad x=f32[40,2,6] dy=f32[40,3,4] w_shape=(3,2,3)",
    "conv_fprop x=f16[2,40,6,7]nhwc w=f16[4,40,3,3]nhwc padding=1 bias=f32[4]",
    "conv_dgrad dy=f32[1,61,3,3] w=f32[61,2,3,3] x_shape=(1,2,6,6) stride=2 padding=1",
))
def test_a_warp_per_element(line: str) -> None:
    """Lanes share a digit of k, whose extent is no multiple of their number."""
    problem = parse_case(line)
    engine, config = MatmulEngine(problem.op, DIRECT), EngineConfig.of(lanes=32)
    assert config in engine.configs(problem, backend().info)
    for arch in ("sm_80", "sm_90a"):
        run_problem(backend(arch), problem, engine, config)
        for step in engine.build_steps(problem, config, known_device(arch)).steps:
            assert assemble(render(step.spec), arch).spill_bytes == 0


def run(line: str, **inputs: object) -> np.ndarray:
    problem = parse_case(line)
    arrays = {name: np.asarray(values, problem.desc(name).dtype.numpy) for name, values in inputs.items()}
    return execute(backend(), problem, MatmulEngine(problem.op, DIRECT), EngineConfig(), arrays)[problem.outputs[0].name]


def test_values_known_by_hand() -> None:
    ones, small = np.ones((1, 1, 9, 9)), [[[[1, 2], [3, 4]]]]
    y = run("conv_fprop x=f16[1,1,9,9] w=f16[1,1,5,5] padding=4 dilation=2", x=ones, w=np.ones((1, 1, 5, 5)))[0, 0]
    assert (y[0, 0], y[0, 4], y[4, 4]) == (9, 15, 25)
    y = run("conv_fprop x=f32[1,1,2,2] w=f32[1,1,2,2] padding=((0,1),(1,0))", x=small, w=[[[[1, 10], [100, 1000]]]])
    assert y[0, 0].tolist() == [[3010, 4321], [30, 43]]
    y = run("conv_fprop x=f32[1,1,2,2] w=f32[1,1,2,2] padding=((0,1),(1,0)) flip=True", x=small, w=[[[[1000, 100], [10, 1]]]])
    assert y[0, 0].tolist() == [[3010, 4321], [30, 43]]
    y = run("conv_transpose x=bf16[1,1,2,2] w=bf16[1,1,3,3] stride=2 padding=1 output_padding=1", x=small, w=np.ones((1, 1, 3, 3)))
    assert y[0, 0].tolist() == [[1, 3, 2, 2], [4, 10, 6, 6], [3, 7, 4, 4], [3, 7, 4, 4]]
    dw = run("conv_wgrad x=f32[0,3,4,4] dy=f32[0,2,2,2] w_shape=(2,3,3,3)", x=np.zeros((0, 3, 4, 4)), dy=np.zeros((0, 2, 2, 2)))
    assert dw.shape == (2, 3, 3, 3) and not dw.any()
    y = run("conv_fprop x=f32[2,0,4,4] w=f32[3,0,3,3] bias=f32[3]", x=np.zeros((2, 0, 4, 4)), w=np.zeros((3, 0, 3, 3)), bias=[1, 2, 3])
    assert (y == np.array([1, 2, 3]).reshape(1, 3, 1, 1)).all()
    y = run("conv_fprop x=f32[1,2,0,3] w=f32[1,2,2,1] padding=((1,1),(0,0)) bias=f32[1]", x=np.zeros((1, 2, 0, 3)),
            w=np.ones((1, 2, 2, 1)), bias=[5])
    assert y.shape == (1, 1, 1, 3) and (y == 5).all()


def test_padding_is_skipped_not_multiplied() -> None:
    """An infinite weight over padding adds nothing."""
    y = run("conv_fprop x=f32[1,1,2] w=f32[1,1,3] padding=1", x=[[[1, 2]]], w=[[[np.inf, 1, 1]]])
    assert y.tolist() == [[[3.0, np.inf]]]


class WideIndex(MatmulEngine):
    """The direct engine with a 64-bit linear index, which otherwise only outputs of 2^31 elements get."""

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        build = super().build_steps(problem, config, device)
        return Build(tuple(replace(s, spec=replace(s.spec, consts=replace(s.spec.consts, is_wide=True)))
                           if s.spec.template == "matmul/direct" else s for s in build.steps), build.workspace_bytes)


@pytest.mark.parametrize("op", OPS)
def test_linear_index_in_64_bits(op: str) -> None:
    rng = np.random.default_rng(OPS.index(op) + 100)
    for seed in range(4):
        run_problem(backend(), SAMPLES[op](rng, "tiny"), WideIndex(op, DIRECT), seed=seed)


def test_offsets_past_two_to_the_31() -> None:
    """Two images 2^31 + 8 elements (more than 2^32 bytes) apart, behind and ahead of the address given. Few pages are ever touched."""
    memory, distance = np.zeros(2**31 + 12, np.float16), 2**31 + 8
    x, w, y = np.arange(8, dtype=np.float16).reshape(2, 4), np.array([1, 10], np.float16), np.zeros((2, 3), np.float16)
    for first, stride in ((0, distance), (distance, -distance)):
        problem = parse_case(f"conv_fprop x=f16[2,1,4]({stride},4,1) w=f16[1,1,2]")
        device = backend()
        (step,) = MatmulEngine("conv_fprop", DIRECT).build_steps(problem, EngineConfig(), device.info).steps
        for i in range(2):
            memory[first + stride * i: first + stride * i + 4] = x[i]
        address, *others = (device.memory.register(array) for array in (memory, w, y))
        device.load(render(step.spec), step.spec).bind(step.grid, [address + 2 * first, *others]).launch(device.default_stream())
        assert y.tolist() == (x[:, :-1] + 10 * x[:, 1:]).tolist()


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
@pytest.mark.parametrize("op", OPS)
def test_kernels_assemble_without_spills(op: str, arch: str) -> None:
    rng, engine, device = np.random.default_rng(OPS.index(op)), MatmulEngine(op, DIRECT), known_device(arch)
    for size in ("tiny", "small", "small"):
        problem = SAMPLES[op](rng, size)
        for step in engine.build_steps(problem, EngineConfig(), device).steps[:3]:
            result = assemble(render(step.spec), arch)
            assert result.spill_bytes == 0 and result.registers <= step.spec.max_registers, format_case(problem)


def test_inner_loop_is_short() -> None:
    """A term of a 3x3 convolution costs few instructions: the emulator's speed hangs on it."""
    device = backend()
    problem = parse_case("conv_fprop x=f32[1,16,16,16] w=f32[8,16,3,3] padding=1")
    run_problem(device, problem, MatmulEngine("conv_fprop", DIRECT))
    per_term = device.counters.instructions / (problem.desc("y").numel * 16 * 9)
    assert per_term < 8, f"{per_term:.1f} instructions a term"
    assert problem.desc("y").dtype is F32


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_requantised_results_are_quotients(arch: str) -> None:
    """Ties go to even, as of the division; scales beyond the reciprocals of f32 are no NaN."""
    h = oxidnn.DnnHandle(f"emu:{arch}")
    one = np.ones((1, 1, 1, 1), np.int8)
    for number, scale in ((91, 14), (91, 26), (91, 28), (3, 2), (127, 2)):
        y = h.conv(one * np.int8(number), one, scale_y=np.array([scale], np.float32), out_dtype="int8")
        assert y.item() == np.rint(number / scale), (number, scale)
    x, w = np.ones((1, 4, 1, 1), ml_dtypes.float8_e4m3fn), np.ones((1, 4, 1, 1), ml_dtypes.float8_e4m3fn)
    for scale, number in ((1e-39, 448.0), (2e-45, 448.0), (3e38, 0.0), (np.inf, 0.0), (0.0, 448.0), (8.0, 0.5)):
        assert float(h.conv(x, w, scale_y=np.array([scale], np.float32), out_dtype="float8_e4m3fn").item()) == number, scale
    rng = np.random.default_rng(5)
    x, w = rng.integers(-128, 128, (1, 32, 6, 6)).astype(np.int8), rng.integers(-128, 128, (16, 32, 3, 3)).astype(np.int8)
    sums = h.conv(x, w, padding=1, out_dtype="int32").astype(np.float32)
    for scale in (1024.0, 777.0):
        y = h.conv(x, w, padding=1, scale_y=np.array([scale], np.float32), out_dtype="int8")
        np.testing.assert_array_equal(y, np.clip(np.rint(sums / np.float32(scale)), -128, 127))
