"""Engines that say they are deterministic give the same bits in every run of large problems, whose sums are dealt out to many CTAs; small
problems of all engines are run twice in test_registry."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.ops.case import format_case, parse_case
from oxidnn.plan import Plan
from oxidnn.runtime.backend import Backend
from oxidnn.testing.data import random_inputs, random_scalars
from oxidnn.testing.stage import Stage

from ..emu.test_registry import seed_of

pytestmark = pytest.mark.gpu
LARGE = (
    "gemm a=bf16[64,8192] b=bf16[192,8192] transpose_b=True", "gemm a=f16[8192,200] b=f16[8192,136] transpose_a=True",
    "gemm a=f32[136,6000] b=f32[6000,72]", "gemm a=e4m3[128,4096] b=e4m3[256,4096] transpose_b=True scale_a=f32[1] scale_b=f32[1]",
    "grouped_gemm_wgrad a=bf16[4096,128] b=bf16[4096,136] group_sizes=s32[3]",
    "conv_wgrad x=bf16[8,64,28,28]nhwc dy=bf16[8,64,28,28]nhwc dw=bf16[64,64,3,3]nhwc padding=1",
    "conv_wgrad x=f32[4,19,30,30] dy=f32[4,24,30,30] dw=f32[24,19,3,3] padding=1", "conv_bgrad dy=f16[32,64,28,28]nhwc",
    "reduce x=f32[1500000] op=sum axes=(0,)", "reduce x=f16[3000,517] op=norm2 axes=(0,)",
    "batch_norm_stats x=bf16[32,64,28,28]nhwc", "cross_entropy logits=bf16[3000,1000] target=s64[3000]",
    "linear_cross_entropy x=bf16[512,256] w=bf16[5000,256] target=s64[512]",
    "linear_cross_entropy_backward x=bf16[512,256] w=bf16[5000,256] target=s64[512]",
)


def check_bits(backend: Backend, problem: Problem, engine: Engine, configs: tuple[EngineConfig, ...], rng: np.random.Generator) -> None:
    inputs, scalars = random_inputs(problem, rng), random_scalars(problem, rng)
    with Stage(backend, problem, inputs, scalars) as stage:
        for config in configs:
            plan = Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)
            first, *others = (stage.run(plan) for _ in range(3))
            for other in others:
                for name in first:
                    assert first[name].tobytes() == other[name].tobytes(), f"{engine.id} {config.name} {format_case(problem)}: {name}"


@pytest.mark.parametrize("line", LARGE)
def test_large_sums(line: str, cuda: Backend) -> None:
    """Every engine but the slowest, up to eight of its configs, from all over its list."""
    problem = parse_case(line)
    takers = [e for e in ENGINES[problem.op] if e.is_deterministic and not e.id.endswith(".direct") and e.check_support(problem, cuda.info)]
    assert takers
    for engine in takers:
        configs = engine.configs(problem, cuda.info)
        check_bits(cuda, problem, engine, configs[::-(-len(configs) // 8)], np.random.default_rng(seed_of(line, engine.id)))
