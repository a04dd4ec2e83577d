"""Skinny products on the GPU: every config on every kind of operands; launches in a row, each of which may start before the last ends."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.plan import Plan
from oxidnn.runtime.backend import Backend
from oxidnn.testing.harness import run_problem

pytestmark = pytest.mark.gpu
LINES = (
    "gemm a=bf16[1,1160] b=bf16[328,1160] transpose_b=True", "gemm a=f16[120,520] b=f16[520,392] bias=f32[392] epilogue=bias_gelu",
    "gemm a=bf16[600,520] b=bf16[30,520] transpose_b=True d=f32[600,30](1,600) alpha=0.5 beta=1.0 c=f32[600,30]",
    "gemm a=bf16[2,60,328] b=bf16[2,264,328] transpose_b=True epilogue='gelu(t := acc), t' aux=f32[2,60,264]",
    "gemm a=bf16[9,520] b=bf16[1040,520] transpose_b=True gate=silu bias=f32[1040]", "gemm a=f16[128,264] b=f16[264,528] gate=gelu",
    "gemm a=e4m3[40,1040] b=e5m2[400,1040] transpose_b=True scale_a=f32[40] scale_b=f32[1] epilogue=relu math=fast",
    "gemm a=e4m3[60,1024] b=e4m3[400,1024] transpose_b=True scale_a=f32[60,8] scale_b=f32[8,4]",
    "gemm a=s8[33,1040] b=u8[400,1040] transpose_b=True", "gemm a=f32[17,520] b=f32[400,520] transpose_b=True math=tf32",
)
SKINNY = [e for e in ENGINES["gemm"] if ".skinny" in e.id]


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[1] + line.split()[2])
def test_every_config(line: str, cuda: Backend) -> None:
    problem = parse_case(line)
    engines = [e for e in SKINNY if e.check_support(problem, cuda.info)]
    assert engines
    for engine in engines:
        for seed, config in enumerate(engine.configs(problem, cuda.info)):
            run_problem(cuda, problem, engine, config, seed=seed)


@pytest.mark.parametrize("m", [1, 16, 128])
def test_launches_in_a_row(m: int, cuda: Backend) -> None:
    """Each layer reads what the last one writes, and writes what the last one reads: the bits are those of launches apart."""
    size, layers = 1024, 24
    problem = parse_case(f"gemm a=bf16[{m},{size}] b=bf16[{size},{size}] transpose_b=True epilogue='tanh(acc)'")
    engine = next(e for e in SKINNY if e.id == "gemm.skinny_wgmma")
    rng = np.random.default_rng(m)
    bf16 = problem.desc("a").dtype.numpy
    x = rng.standard_normal((m, size)).astype(bf16)
    weights = (rng.standard_normal((layers, size, size)) / 20).astype(bf16)
    stream = cuda.default_stream()
    blocks = [cuda.allocate(a.nbytes, stream) for a in (weights, x, x)]
    cuda.upload(blocks[0].ptr, weights.reshape(-1).view(np.uint8), stream)

    def run(config: EngineConfig, apart: bool) -> bytes:
        plan = Plan(problem, engine, config, engine.build_steps(problem, config, cuda.info), cuda)
        cuda.upload(blocks[1].ptr, x.reshape(-1).view(np.uint8), stream)
        for i in range(layers):
            source, target = blocks[1 + i % 2], blocks[2 - i % 2]
            plan.execute([source.ptr, blocks[0].ptr + i * weights[0].nbytes, target.ptr], 0, stream)
            if apart:
                cuda.synchronize(stream)
        out = np.empty(x.nbytes, np.uint8)
        cuda.download(out, blocks[1].ptr, stream)
        cuda.synchronize(stream)
        return out.tobytes()

    try:
        for config in engine.configs(problem, cuda.info)[:6]:
            want = run(EngineConfig.of(**dict(config.knobs), overlaps=False), True)
            for overlaps in (False, True, True, True):
                assert run(EngineConfig.of(**dict(config.knobs), overlaps=overlaps), False) == want, (config.name, overlaps)
    finally:
        for block in blocks:
            block.free()
