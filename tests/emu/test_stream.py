"""Streams of dense rows in the emulator, all checkers on: tails of rows, odd multiples of 8 channels, both ways the small matrix lies."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from oxidnn.device import emulated_device
from oxidnn.engines.affine_stream_sm90 import STREAM_GRADIENT_SM90, STREAM_SM90
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

LINES = (
    "conv_fprop x=bf16[3,24,9,11]nhwc w=bf16[144,24,1,1]nhwc",  # the last k step has 8; fragments of B in registers
    "conv_fprop x=bf16[3,16,19,11]nhwc w=bf16[96,16,1,1]nhwc bias=f32[96] epilogue=relu(acc+bias)",
    "conv_dgrad dy=f16[3,40,9,11]nhwc w=f16[40,240,1,1]nhwc dx=f16[3,240,9,11]nhwc",  # two chunks of columns
    "conv_fprop x=bf16[3,240,9,11]nhwc w=bf16[40,240,1,1]nhwc bias=bf16[40] epilogue=silu(acc+bias)",  # fragments from shared memory
    "conv_fprop x=bf16[1,8,3,5]nhwc w=bf16[8,8,1,1]nhwc",
    "gemm a=bf16[1001,72] b=bf16[72,88] alpha=0.5",
    "gemm a=f16[33,24] b=f16[16,24](32,1) transpose_b=True",
)


@pytest.mark.parametrize("line", LINES)
def test_every_config(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=("random", 3))
    backend.info = replace(backend.info, num_sms=2)  # rings wrap
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, STREAM_SM90)
    assert engine.check_support(problem, backend.info)
    for config in engine.configs(problem, backend.info)[::3]:
        run_problem(backend, problem, engine, config, seed=len(line))


@pytest.mark.parametrize("line", (
    "conv_wgrad x=bf16[3,24,19,31]nhwc dy=bf16[3,144,19,31]nhwc dw=bf16[144,24,1,1]nhwc",
    "conv_wgrad x=bf16[3,96,9,11]nhwc dy=bf16[3,24,9,11]nhwc dw=bf16[24,96,1,1]nhwc",  # channels make the tiles of 16
    "conv_wgrad x=f16[3,40,9,11]nhwc dy=f16[3,240,9,11]nhwc dw=f16[240,40,1,1]nhwc",
    "gemm a=bf16[1000,48] b=bf16[1000,40] transpose_a=True d=f32[48,40](1,48)",
    "gemm a=bf16[37,16] b=bf16[37,24] transpose_a=True bias=f32[24] epilogue=bias_relu",
))
def test_gradients(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=("random", 3))
    backend.info = replace(backend.info, num_sms=2)  # rings wrap
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, STREAM_GRADIENT_SM90)
    assert engine.check_support(problem, backend.info)
    for config in engine.configs(problem, backend.info)[::5]:
        run_problem(backend, problem, engine, config, seed=len(line))


def test_lines_beyond_the_last_count_for_nothing() -> None:
    """Infinities in the last line, which lines beyond it are read as."""
    line = "gemm a=bf16[37,16] b=bf16[37,24] transpose_a=True d=f32[16,24]"
    backend = EmulatedBackend("sm_90a", checkers="all")
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, STREAM_GRADIENT_SM90)
    a, b = np.ones((37, 16), ml_dtypes.bfloat16), np.ones((37, 24), ml_dtypes.bfloat16)
    b[36, 0] = np.inf
    d = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], {"a": a, "b": b})["d"]
    assert np.isposinf(d[:, 0]).all() and (d[:, 1:] == 37).all()


@pytest.mark.parametrize(("line", "reason"), (
    ("gemm a=bf16[64,20] b=bf16[20,16]", "multiples of 8"),
    ("gemm a=bf16[64,24](32,1) b=bf16[24,16]", "end to end"),
    ("gemm a=bf16[64,24] b=bf16[24,16] d=f32[64,16]", "f16 or bf16 alone"),
    ("gemm a=bf16[64,24] b=bf16[24,16] c=bf16[64,16] beta=1.0", "changes along the rows"),
    ("gemm a=bf16[64,512] b=bf16[512,512]", "find room"),
    ("conv_fprop x=bf16[1,16,5,5]nhwc w=bf16[16,16,3,3]nhwc", "plain matrices"),
))
def test_refusals(line: str, reason: str) -> None:
    problem = parse_case(line)
    support = MatmulEngine(problem.op, STREAM_SM90).check_support(problem, emulated_device("sm_90a"))
    assert not support and reason in support.reason
