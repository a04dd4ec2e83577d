"""The mma.sync loop on what the samplers draw seldom or never: f32 by every policy, 8-bit types, every tile shape."""

from __future__ import annotations

import pytest

from oxidnn.engines.affine_mma_sm80 import MMA_SM80
from oxidnn.engines.affine_simt import SIMT
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case
from oxidnn.runtime.backend import Backend
from oxidnn.testing.harness import run_problem

pytestmark = pytest.mark.gpu

LINES = [
    *(f"{line} math={math}" for math in ("tf32", "tf32x3", "bf16x3") for line in (
        "gemm a=f32[300,520] b=f32[520,260]", "gemm a=f32[2,129,65](1,2,260) b=f32[2,65,70] bias=f32[70] epilogue=bias_relu",
        "conv_fprop x=f32[2,40,17,15]nhwc w=f32[72,40,3,3]nhwc padding=1", "conv_wgrad x=f32[2,40,17,15]nhwc dy=f32[2,72,17,15]nhwc "
        "dw=f32[72,40,3,3]nhwc padding=1")),
    "gemm a=s8[300,512] b=s8[260,512] transpose_b=True", "gemm a=u8[2,129,64] b=s8[2,70,64] transpose_b=True",
    "gemm a=s8[300,512] b=u8[260,512] transpose_b=True d=f16[300,260] scale_a=f32[300] scale_b=f32[1] alpha=0.01",
    "gemm a=e4m3[300,512] b=e5m2[260,512] transpose_b=True d=f32[300,260] scale_a=f32[1] scale_b=f32[260]",
]


@pytest.mark.parametrize("line", LINES)
def test_every_config(line: str, cuda: Backend) -> None:
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, MMA_SM80)
    support = engine.check_support(problem, cuda.info)
    assert support, support.reason
    for seed, config in enumerate(engine.configs(problem, cuda.info)):
        run_problem(cuda, problem, engine, config, seed=seed)


@pytest.mark.parametrize("line", ["gemm a=f32[300,520] b=f32[520,260]",
                                  "gemm a=f32[520,300] b=f32[260,520] transpose_a=True transpose_b=True"])
def test_every_config_of_ieee(line: str, cuda: Backend) -> None:
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, SIMT)
    for seed, config in enumerate(engine.configs(problem, cuda.info)):
        run_problem(cuda, problem, engine, config, seed=seed)
