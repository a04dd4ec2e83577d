"""Linear layers of quantised weights on the GPU: the loops of every kind on shapes of several tiles; launches in a row, each of which may
start before the last ends."""

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
CONFIGS = 6  # of an engine, from the fastest by estimate to the slowest
LINES = (
    "x=f16[1,1152] w=u8[1040,576] scale=f16[1040,9] kind=s4",
    "x=bf16[7,1120] w=u8[328,560] scale=f32[328,35] zero_point=u8[328,35] kind=u4",
    "x=f16[20,1152] w=u8[520,576] scale=bf16[520,9] zero_point=s8[520,9] kind=u4 bias=f32[520] epilogue=bias_gelu",
    "x=bf16[3,704] w=u8[328,352] scale=f32[328,11] kind=nf4", "x=f16[60,704] w=u8[328,352] scale=f32[328,11] kind=nf4",
    "x=f16[2,1040] w=s8[400,1040] scale=f32[400] zero_point=s8[400] kind=s8", "x=bf16[40,1088] w=s8[400,1088] scale=f32[400,17] kind=s8",
    "x=f16[5,1040] w=e4m3[400,1040] scale=f16[400] kind=e4m3", "x=bf16[300,1088] w=e4m3[400,1088] scale=f32[400,17] kind=e4m3",
    "x=f16[2,384] w=u8[34600,192] scale=f16[34600,3] kind=s4",   # teams take several tiles
    "x=bf16[16,8256] w=u8[328,4128] scale=f16[328,129] kind=nf4",   # k in splits
    "x=f16[600,1152] w=u8[520,576] scale=f16[520,9] kind=s4",
    "x=bf16[300,1152] w=s8[1040,1152] scale=f32[1040] kind=s8 permutation=s32[1152]",
)


@pytest.mark.parametrize("line", LINES, ids=lambda line: line.split()[0] + line.split("kind=")[1].split()[0])
def test_every_loop(line: str, cuda: Backend) -> None:
    problem = parse_case(f"quantized_linear {line}")
    engines = [e for e in ENGINES["quantized_linear"] if e.check_support(problem, cuda.info)]
    assert len(engines) > 1
    for engine in engines:
        configs = engine.configs(problem, cuda.info)
        for seed, config in enumerate(configs[::-(-len(configs) // CONFIGS)]):
            run_problem(cuda, problem, engine, config, seed=seed)


@pytest.mark.parametrize("m", [1, 16, 64])
def test_launches_in_a_row(m: int, cuda: Backend) -> None:
    """Each layer reads what the last one writes, and writes what the last one reads: the bits are those of launches apart."""
    size, layers = 1024, 24
    problem = parse_case(f"quantized_linear x=f16[{m},{size}] w=u8[{size},{size // 2}] scale=f16[{size},8] kind=s4 epilogue='tanh(acc)'")
    rng = np.random.default_rng(m)
    x = rng.standard_normal((m, size)).astype(np.float16)
    weights = rng.integers(0, 256, (layers, size, size // 2), np.uint8)
    scales = rng.uniform(0.003, 0.01, (size, 8)).astype(np.float16)
    stream = cuda.default_stream()
    blocks = [cuda.allocate(a.nbytes, stream) for a in (weights, scales, x, x)]
    for block, a in zip(blocks, (weights, scales), strict=False):
        cuda.upload(block.ptr, a.reshape(-1).view(np.uint8), stream)

    def run(engine: object, config: EngineConfig, apart: bool) -> bytes:
        plan = Plan(problem, engine, config, engine.build_steps(problem, config, cuda.info), cuda)  # type: ignore[arg-type, attr-defined]
        cuda.upload(blocks[2].ptr, x.reshape(-1).view(np.uint8), stream)
        for i in range(layers):
            source, target = blocks[2 + i % 2], blocks[3 - i % 2]
            plan.execute([source.ptr, blocks[0].ptr + i * weights[0].nbytes, blocks[1].ptr, target.ptr], 0, stream)
            if apart:
                cuda.synchronize(stream)
        out = np.empty(x.nbytes, np.uint8)
        cuda.download(out, blocks[2 + layers % 2].ptr, stream)
        cuda.synchronize(stream)
        return out.tobytes()

    try:
        for engine in ENGINES["quantized_linear"][:3]:
            for config in engine.configs(problem, cuda.info)[:3] if engine.check_support(problem, cuda.info) else ():
                want = run(engine, config, True)
                assert want != x.tobytes(), f"{engine.id} {config.name}: nothing is written"
                for _ in range(3):
                    assert run(engine, config, False) == want, f"{engine.id} {config.name}"
    finally:
        for block in blocks:
            block.free()
