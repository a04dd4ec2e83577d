"""The Hopper loops on problems of many tiles: right against float64, and the same bits in every run."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.affine_wgmma_sm90 import WGMMA_SM90
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case
from oxidnn.runtime.backend import Backend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import execute, run_problem
from tests.emu.test_wgmma import FORMS

pytestmark = pytest.mark.gpu
LINES = (
    "gemm a=bf16[520,4096] b=bf16[4096,392] deterministic=True",
    "gemm a=bf16[2000,1000] b=bf16[1000,1608] transpose_b=False bias=f32[1608] epilogue=bias_relu deterministic=True",
    "gemm a=e4m3[520,4096] b=e5m2[392,4096] transpose_b=True scale_a=f32[1] scale_b=f32[392] deterministic=True",
    "gemm a=e4m3[521,2064] b=e4m3[400,2064] transpose_b=True scale_a=f32[521,17] scale_b=f32[17,4] deterministic=True",
    "gemm a=s8[520,4096] b=u8[393,4096] transpose_b=True deterministic=True",
    "conv_fprop x=bf16[16,64,56,56]nhwc w=bf16[64,64,3,3]nhwc padding=1 deterministic=True",
    "conv_dgrad dy=bf16[16,64,28,28]nhwc w=bf16[64,72,3,3]nhwc x_shape=(16,72,56,56) padding=1 stride=2 deterministic=True",
    "conv_wgrad dy=bf16[16,128,28,28]nhwc x=bf16[16,128,28,28]nhwc w_shape=(128,128,3,3) padding=1 deterministic=True",
    "conv_wgrad dy=bf16[16,72,56,56]nhwc x=bf16[16,136,56,56]nhwc w_shape=(72,136,3,3) padding=1 deterministic=True",
    "conv_fprop x=bf16[8,3,112,112]nhwc w=bf16[64,3,7,7]nhwc padding=3 stride=2 deterministic=True",
    "conv_wgrad dy=bf16[8,64,56,56]nhwc x=bf16[8,3,112,112]nhwc w_shape=(64,3,7,7) padding=3 stride=2 deterministic=True",
    "conv_dgrad dy=bf16[8,64,56,56]nhwc w=bf16[64,3,7,7]nhwc x_shape=(8,3,112,112) padding=3 stride=2 deterministic=True",
)
RUNS = 5


@pytest.mark.parametrize("line", LINES)
def test_right_and_the_same_bits_in_every_run(line: str, cuda: Backend) -> None:
    problem = parse_case(line)
    assert problem.policy.deterministic
    engines = [e for e in ENGINES[problem.op] if e.id.endswith("_sm90") and e.check_support(problem, cuda.info)]
    assert engines
    inputs = random_inputs(problem, np.random.default_rng(len(line)))
    for engine in engines:
        assert engine.is_deterministic
        for config in engine.configs(problem, cuda.info)[:3]:
            run_problem(cuda, problem, engine, config, seed=len(line))
            results = [execute(cuda, problem, engine, config, inputs) for _ in range(RUNS)]
            for name in results[0]:
                assert len({r[name].tobytes() for r in results}) == 1, f"{engine.id} {config.name}: runs differ"


LARGE = (
    ("gemm a=bf16[1000,4096] b=bf16[1504,4096] transpose_b=True bias=f32[1504] epilogue=bias_relu", {"streams": 132, "stages": 6}),
    ("gemm a=e4m3[2000,4096] b=e4m3[1504,4096] transpose_b=True scale_a=f32[2000,32] scale_b=f32[32,12]",
     {"promotes": True, "tile_m": 192, "stages": 4}),
    ("gemm a=bf16[3000,2048] b=bf16[2048,4000]", {"defers": True, "tile_n": 256, "stages": 4}),
)


@pytest.mark.parametrize(("line", "knobs"), [form for form in (*FORMS, *LARGE) if not form[1].get("refused")])
def test_forms(line: str, knobs: dict[str, object], cuda: Backend) -> None:
    """Those that few problems choose: stages handed round by few CTAs, k tiles dealt out, stores put off; as many runs, the same bits."""
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, WGMMA_SM90)
    config = EngineConfig.of(**{"schedule": "coop", "loader": "boxes", "tile_m": 128, "tile_n": 128, "stages": 2, "split_k": 1, **knobs})
    run_problem(cuda, problem, engine, config, seed=len(line))
    inputs = random_inputs(problem, np.random.default_rng(len(line)))
    results = [execute(cuda, problem, engine, config, inputs) for _ in range(RUNS)]
    for name in results[0]:
        assert len({r[name].tobytes() for r in results}) == 1, "runs differ"
