"""Convolutions by planes, in the emulator with all checkers, against float64 references, on a device of two SMs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.affine_planes_sm90 import PLANES_SM90
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble, disassemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

LINES = (
    "conv_fprop x=bf16[2,32,5,9,10]nhwc w=bf16[64,32,3,3,3]nhwc padding=1 bias=f32[64] epilogue=bias_relu",
    "conv_fprop x=f16[1,8,4,11,9]nhwc w=f16[24,8,2,3,3]nhwc padding='((1,0),(2,1),(0,2))' dilation=(1,2,1)",
    "conv_fprop x=bf16[3,72,3,8,5]nhwc w=bf16[16,72,3,2,2]nhwc padding=1 flip=True",
    "conv_fprop x=bf16[1,64,7,4,4]nhwc w=bf16[40,64,4,2,3]nhwc padding=2",
    "conv_fprop x=bf16[2,16,6,7,9]nhwc w=bf16[32,16,3,3,3]nhwc",
    "conv_fprop x=bf16[2,16,6,7,9]nhwc w=bf16[32,16,3,2,3]nhwc padding=(1,0,0) dilation=(1,2,2)",
    "conv_dgrad dy=bf16[2,64,5,9,10]nhwc w=bf16[64,32,3,3,3]nhwc dx=bf16[2,32,5,9,10]nhwc padding=1",
    "conv_dgrad dy=f16[1,24,4,8,16]nhwc w=f16[24,40,3,3,2]nhwc dx=f16[1,40,4,9,16]nhwc padding='((1,1),(0,1),(1,0))'",
    "conv_fprop x=bf16[2,80,150]nhwc w=bf16[200,80,3]nhwc padding=1 bias=f32[200] epilogue=bias_relu",
    "conv_fprop x=f16[3,40,71]nhwc w=f16[24,40,4]nhwc padding='((2,0),)' dilation=3",
    "conv_fprop x=bf16[2,16,70]nhwc w=bf16[136,16,5]nhwc",
    "conv_fprop x=bf16[2,32,9,70]nhwc w=bf16[40,32,3,3]nhwc padding=1 bias=f32[40] epilogue=bias_relu",
    "conv_fprop x=bf16[1,24,6,66]nhwc w=bf16[24,24,3,2]nhwc",
    "conv_dgrad dy=bf16[2,48,5,40]nhwc w=bf16[48,16,3,5]nhwc dx=bf16[2,16,5,40]nhwc padding=(1,2)",
    "conv_dgrad dy=bf16[2,72,130]nhwc w=bf16[72,40,3]nhwc dx=bf16[2,40,130]nhwc padding=1",
    "conv_transpose x=bf16[1,16,3,5,6]nhwc w=bf16[16,8,3,3,3]nhwc padding=1",
    "conv_transpose_dgrad dy=bf16[1,32,3,5,6]nhwc w=bf16[16,32,3,3,3]nhwc x_shape=(1,16,3,5,6) padding=1",
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, PLANES_SM90)
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    for config in engine.configs(problem, backend.info):
        run_problem(backend, problem, engine, config, seed=len(line))


@pytest.mark.parametrize("line", (
    "conv_fprop x=bf16[4,32,64,64,64]nhwc w=bf16[64,32,3,3,3]nhwc padding=1 bias=f32[64] epilogue=bias_relu",
    "conv_dgrad dy=bf16[4,64,64,64,64]nhwc w=bf16[64,32,3,3,3]nhwc dx=bf16[4,32,64,64,64]nhwc padding=1"))
def test_planes_of_the_filter_are_columns_of_a_product(line: str) -> None:
    problem, device = parse_case(line), known_device("sm_90a")
    engine = MatmulEngine(problem.op, PLANES_SM90)
    (step,) = engine.build_steps(problem, engine.configs(problem, device)[0], device).steps
    result = assemble(render(step.spec), "sm_90a")
    assert result.spill_bytes == 0
    assert "C75" not in result.log, result.log
    sass = disassemble(result.cubin)
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    channels, columns = (32, 64) if problem.op == "conv_fprop" else (64, 32)
    assert len(re.findall(rf"\bHGMMA\.64x{3 * columns}x16\.F32\.BF16", sass)) == 9 * channels // 16
