"""Skinny products in the emulator, all checkers on: weights along k and rows, rings and registers, clusters, tails, both sides, epilogues;
wgmma with the weights as rows, turned or made for them; and the assembler's word on every shape of tile."""

from __future__ import annotations

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.affine_skinny import SKINNY_MMA
from oxidnn.engines.affine_skinny_wgmma import SKINNY_WGMMA
from oxidnn.engines.affine_turned import WGMMA_SM90_TURNED
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.matmul import MatmulEngine, lower
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

ENGINE = MatmulEngine("gemm", SKINNY_MMA)


def config(rows: int, warps: int, stages: int, splits: int = 1, weights: str = "ring") -> EngineConfig:
    return EngineConfig.of(rows=rows, warps=warps, stages=stages, splits=splits, weights=weights)


def run(line: str, chosen: EngineConfig, arch: str = "sm_90a", schedule: object = ("random", 3)) -> None:
    problem, backend = parse_case(line), EmulatedBackend(arch, checkers="all", schedule=schedule)
    support = ENGINE.check_support(problem, backend.info)
    assert support, support.reason
    run_problem(backend, problem, ENGINE, chosen, seed=len(line), aliases=True)


@pytest.mark.parametrize("chosen", [config(16, 4, 2), config(32, 4, 3), config(64, 4, 3), config(16, 4, 4, weights="registers"),
                                    config(32, 8, 3, weights="registers")], ids=lambda c: c.name)
@pytest.mark.parametrize("line", [
    "gemm a=bf16[1,328] b=bf16[72,328] transpose_b=True",  # rows and k that are no multiple of a tile
    "gemm a=f16[9,64] b=f16[40,64] transpose_b=True bias=f32[40] epilogue=bias_relu",
    "gemm a=bf16[40,520] b=bf16[3,520] transpose_b=True",  # the weights on the left
    "gemm a=bf16[2,5,136] b=bf16[2,24,136] transpose_b=True d=f32[2,5,24](120,1,5) alpha=0.5 beta=1.0 c=f32[2,5,24]",
], ids=lambda line: line.split()[1])
def test_weights_along_k(line: str, chosen: EngineConfig) -> None:
    run(line, chosen)


@pytest.mark.parametrize("chosen", [config(16, 4, 2), config(32, 4, 3), config(64, 4, 3)], ids=lambda c: c.name)
@pytest.mark.parametrize("line", [
    "gemm a=bf16[1,328] b=bf16[328,72]", "gemm a=f16[33,72] b=f16[72,40](48,1) d=f32[33,40]",
    "gemm a=bf16[136,40] b=bf16[4,136] transpose_a=True transpose_b=True",  # the weights on the left, along m
    "gemm a=f16[2,5,136] b=f16[136,24] residual=f16[2,5,24] epilogue='relu(acc + residual)'",
], ids=lambda line: line.split()[1])
def test_weights_along_rows(line: str, chosen: EngineConfig) -> None:
    run(line, chosen)


@pytest.mark.parametrize("splits", [2, 4])
@pytest.mark.parametrize("line", ["gemm a=bf16[3,904] b=bf16[40,904] transpose_b=True", "gemm a=f16[20,904] b=f16[904,40] bias=f32[40]"])
@pytest.mark.parametrize("schedule", ["lowest_pc", ("random", 7)])
def test_clusters_add_their_parts(line: str, splits: int, schedule: object) -> None:
    run(line, config(16, 4, 2, splits), schedule=schedule)


def test_before_clusters() -> None:
    for c in (config(32, 4, 2), config(16, 4, 3, weights="registers")):
        run("gemm a=bf16[5,328] b=bf16[72,328] transpose_b=True", c, arch="sm_80")


@pytest.mark.parametrize(("line", "reason"), [
    ("gemm a=bf16[65,64] b=bf16[72,64] transpose_b=True", "at most 64 columns"), ("gemm a=f32[5,64] b=f32[72,64] transpose_b=True", "f32"),
    ("gemm a=bf16[5,60] b=bf16[72,60] transpose_b=True", "columns in 16 bytes"), ("gemm a=bf16[5,64] b=bf16[64,70]", "weights in 16 bytes"),
    ("gemm a=bf16[5,64] b=bf16[72,64]@8 transpose_b=True", "weights in 16 bytes"),
])
def test_refusals_say_why(line: str, reason: str) -> None:
    support = ENGINE.check_support(parse_case(line), known_device("sm_90a"))
    assert not support and reason in support.reason


@pytest.mark.parametrize("line", [
    "gemm a=bf16[1,136] b=bf16[72,136] transpose_b=True", "gemm a=f16[17,136] b=f16[136,264] bias=f32[264] epilogue=bias_relu",
    "gemm a=bf16[64,64] b=bf16[200,64] transpose_b=True d=f32[64,200] alpha=0.5 beta=1.0 c=f32[64,200]",
], ids=lambda line: line.split()[1])
def test_turned(line: str) -> None:
    engine, problem = MatmulEngine("gemm", WGMMA_SM90_TURNED), parse_case(line)
    backend = EmulatedBackend("sm_90a", checkers="all")
    assert engine.check_support(problem, backend.info)
    run_problem(backend, problem, engine, seed=3)


WGMMA = MatmulEngine("gemm", SKINNY_WGMMA)


@pytest.mark.parametrize(("rows", "stages", "splits"),
                         [(64, 2, 1), (64, 3, 2), (64, 2, 4), (128, 2, 1), (128, 4, 2), (192, 3, 1), (256, 2, 1)])
@pytest.mark.parametrize("line", [
    "gemm a=bf16[1,456] b=bf16[72,456] transpose_b=True",  # rows and k that are no multiple of a tile
    "gemm a=f16[9,200] b=f16[136,200] transpose_b=True bias=f32[136] epilogue=bias_relu",
    "gemm a=bf16[200,520] b=bf16[3,520] transpose_b=True",  # the weights on the left
    "gemm a=bf16[2,20,264] b=bf16[2,136,264] transpose_b=True d=f32[2,20,136](2880,136,1) alpha=0.5 beta=1.0 c=f32[2,20,136]",
    "gemm a=bf16[100,328] b=bf16[328,136]", "gemm a=f16[33,264] b=f16[264,72](80,1) residual=f16[33,72] epilogue='relu(acc + residual)'",
    "gemm a=bf16[264,200] b=bf16[4,264] transpose_a=True transpose_b=True",  # on the left, along m
    "gemm a=f16[17,264] b=f16[264,72] d=f16[17,72](1,17)",
], ids=lambda line: line.split()[1])
@pytest.mark.parametrize("schedule", ["lowest_pc", ("random", 5)], ids=["lowest", "random"])
def test_wgmma(line: str, rows: int, stages: int, splits: int, schedule: object) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all", schedule=schedule)
    support = WGMMA.check_support(problem, backend.info)
    assert support, support.reason
    k_tiles = -(-problem.k // 64)
    if (splits - 1) * -(-k_tiles // splits) >= k_tiles:
        pytest.skip("a CTA would have nothing to sum")
    run_problem(backend, problem, WGMMA, EngineConfig.of(rows=rows, stages=stages, splits=splits), seed=len(line), aliases=True)


@pytest.mark.parametrize("line", [
    "gemm a=bf16[9,200] b=bf16[272,200] transpose_b=True gate=silu bias=f32[272]",
    "gemm a=f16[33,264] b=f16[264,144] gate=gelu d=f32[33,72]",
    "gemm a=bf16[2,100,136] b=bf16[2,240,136] transpose_b=True gate=relu d=bf16[2,100,120](15000,1,100) alpha=0.5",
    "gemm a=e4m3[20,400] b=e5m2[144,400] transpose_b=True gate=sigmoid scale_a=f32[20] scale_b=f32[144]",
    "gemm a=bf16[120,72] b=bf16[16,72] transpose_b=True gate=tanh",  # fewer columns than rows
], ids=lambda line: line.split()[1])
def test_wgmma_gates(line: str) -> None:
    run_every_shape(line)


@pytest.mark.parametrize("line", [
    "gemm a=e4m3[9,400] b=e5m2[136,400] transpose_b=True bias=f32[136] epilogue=bias_relu scale_a=f32[9] scale_b=f32[1]",
    "gemm a=e5m2[136,912] b=e5m2[100,912] transpose_b=True d=f32[136,100] math=fast", "gemm a=u8[33,400] b=s8[136,400] transpose_b=True",
    "gemm a=s8[200,272] b=u8[3,272] transpose_b=True scale_a=f32[200] scale_b=f32[3] d=f16[200,3]",
    "gemm a=f32[17,200] b=f32[136,200] transpose_b=True math=tf32", "gemm a=f32[2,72,100] b=f32[2,5,100] transpose_b=True math=tf32",
], ids=lambda line: line.split()[1])
def test_wgmma_of_other_types(line: str) -> None:
    run_every_shape(line)


@pytest.mark.parametrize("line", [
    "gemm a=e4m3[9,512] b=e4m3[136,512] transpose_b=True scale_a=f32[9,4] scale_b=f32[4,2]",  # as of language models
    "gemm a=e4m3[200,256] b=e5m2[40,256] transpose_b=True scale_a=f32[200,2](1,200) scale_b=f32[2,1] bias=f32[40] epilogue=bias_relu",
    "gemm a=e4m3[2,33,384] b=e4m3[2,72,384] transpose_b=True scale_a=f32[2,1,3] scale_b=f32[2,3,72] d=f32[2,33,72]",
    "gemm a=s8[17,256] b=u8[260,256] transpose_b=True scale_a=f32[17,2] scale_b=f32[2,3] d=f16[17,260]",
    "gemm a=e4m3[100,256] b=e4m3[136,256] transpose_b=True scale_a=f32[1,2] scale_b=f32[2,136]",
    "gemm a=e4m3[3,128] b=e4m3[130,128] transpose_b=True scale_b=f32[1,2]",
    "gemm a=e4m3[128,512] b=e4m3[300,512] transpose_b=True scale_a=f32[128,4] scale_b=f32[4,3]",
], ids=lambda line: line.split()[1])
def test_wgmma_block_scales(line: str) -> None:
    run_every_shape(line)


def run_every_shape(line: str) -> None:
    """As for a GPU: each tile, with and without clusters and promoted sums."""
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all", schedule=("random", 5))
    support = WGMMA.check_support(problem, backend.info)
    assert support, support.reason
    configs = {(c["rows"], c["splits"] > 1, dict(c.knobs).get("promotes")): c for c in WGMMA.configs(problem, known_device("sm_90a"))}
    assert configs
    for seed, chosen in enumerate(configs.values()):
        run_problem(backend, problem, WGMMA, chosen, seed=seed, aliases=True)


@pytest.mark.parametrize("line", ["gemm a=bf16[9,456] b=bf16[72,456] transpose_b=True bias=f32[72] epilogue=bias_relu",
                                  "gemm a=f16[33,264] b=f16[264,136] residual=f16[33,136] epilogue='relu(acc + residual)'"])
@pytest.mark.parametrize("splits", [1, 2])
@pytest.mark.parametrize("stages", [2, 4])
def test_wgmma_waits_for_the_launch_before(line: str, splits: int, stages: int) -> None:
    config = EngineConfig.of(rows=64, stages=stages, splits=splits, overlaps=True)
    run_problem(EmulatedBackend("sm_90a", checkers="all", schedule=("random", 5)), parse_case(line), WGMMA, config, seed=4)


@pytest.mark.parametrize(("line", "reason"), [
    ("gemm a=bf16[129,64] b=bf16[256,64] transpose_b=True", "at most 128 columns"),
    ("gemm a=f32[5,64] b=f32[72,64] transpose_b=True", "f32"),
    ("gemm a=bf16[5,60] b=bf16[72,60] transpose_b=True", "multiple of 16"),
    ("gemm a=bf16[64,5] b=bf16[64,72] transpose_a=True", "along k"),
])
def test_wgmma_refusals_say_why(line: str, reason: str) -> None:
    support = WGMMA.check_support(parse_case(line), known_device("sm_90a"))
    assert not support and reason in support.reason


@pytest.mark.parametrize("m", [1, 16, 64, 128])
@pytest.mark.parametrize("more", ["b=bf16[4096,7168] transpose_b=True bias=f32[4096] epilogue=bias_relu",
                                  "b=bf16[7168,4096] bias=f32[4096] epilogue=bias_relu", "b=bf16[7168,4096] gate=silu",
                                  "b=e4m3[4096,7168] transpose_b=True scale_a=f32[1] scale_b=f32[4096]",
                                  "b=e4m3[4096,7168] transpose_b=True scale_a=f32[1] scale_b=f32[4096] gate=gelu math=fast",
                                  "b=e4m3[4096,7168] transpose_b=True scale_b=f32[56,32]",
                                  "b=s8[4096,7168] transpose_b=True scale_a=f32[1] scale_b=f32[4096] out_dtype=bf16"])
def test_no_wgmma_config_spills(m: int, more: str) -> None:
    (am,) = lower(parse_case(f"gemm a={more[2:].split('[')[0]}[{m},7168] {more}"))
    device, seen = known_device("sm_90a"), set()
    for c in SKINNY_WGMMA.configs(am, device):
        key = (c["rows"], c["splits"], dict(c.knobs).get("promotes"))
        if key not in seen:
            seen.add(key)
            assembled = assemble(render(SKINNY_WGMMA.build("gemm", am, c, device).steps[0].spec), "sm_90a")
            assert assembled.spill_bytes == 0, c.name


@pytest.mark.parametrize("line", ["gemm a=s8[33,1040] b=u8[400,1040] transpose_b=True",
                                  "gemm a=u8[33,1040] b=s8[400,1040] transpose_b=True",
                                  "gemm a=u8[33,1024] b=s8[400,1024] transpose_b=True scale_a=f32[33,8] scale_b=f32[8,4]",
                                  "gemm a=e4m3[33,1040] b=e5m2[400,1040] transpose_b=True gate=silu"])
def test_wgmma_of_mixed_types_is_assembled(line: str) -> None:
    device = known_device("sm_90a")
    (am, *_) = lower(parse_case(line))
    for c in SKINNY_WGMMA.configs(am, device)[:3]:
        assert assemble(render(SKINNY_WGMMA.build("gemm", am, c, device).steps[0].spec), "sm_90a").spill_bytes == 0, c.name


@pytest.mark.parametrize("m", [1, 16, 32, 64])
@pytest.mark.parametrize("weights", ["bf16[4096,7168] transpose_b=True", "bf16[7168,4096]"])
def test_no_config_spills(m: int, weights: str) -> None:
    (am,) = lower(parse_case(f"gemm a=bf16[{m},7168] b={weights}"))
    for arch in ("sm_80", "sm_90a"):
        seen = set()
        for c in SKINNY_MMA.configs(am, known_device(arch)):
            key = (c["rows"], c["warps"], c["weights"], c["stages"] if c["weights"] == "registers" else 0)
            if c["splits"] == 1 and key not in seen:
                seen.add(key)
                assembled = assemble(render(SKINNY_MMA.build("gemm", am, c, known_device(arch)).steps[0].spec), arch)
                assert assembled.spill_bytes == 0, c.name
