"""The wgmma main loop in the emulator with all checkers, against float64 references, on a device of two SMs: CTAs walk several tiles."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from oxidnn.codegen.render import render
from oxidnn.engines import affine_wgmma_sm90
from oxidnn.engines.affine_wgmma_sm90 import WGMMA_SM90, _plan, promotes_of
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.matmul import MatmulEngine, lower
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

LINES = (
    "gemm a=bf16[300,200] b=bf16[200,264] transpose_b=False",
    "gemm a=bf16[600,136] b=bf16[136,136] transpose_b=True",
    "gemm a=f16[136,300](304,1) b=f16[136,328] transpose_a=True bias=f32[328] epilogue=bias_relu",
    "gemm a=bf16[3,130,72] b=bf16[3,72,144]",
    "gemm a=bf16[200,264] b=bf16[264,136] c=bf16[200,136] beta=0.5 bias=f32[136] epilogue=bias_gelu",
    "gemm a=f32[200,100] b=f32[136,100] transpose_b=True math=tf32",
    "gemm a=bf16[200,104] b=bf16[104,135](136,1)",
    "gemm a=bf16[200,104] b=bf16[104,136] d=f32[200,136](1,200)",
    "gemm a=e4m3[300,400] b=e4m3[139,400] transpose_b=True d=f32[300,139]",
    "gemm a=e4m3[301,272] b=e5m2[136,272] transpose_b=True scale_a=f32[1] scale_b=f32[136] bias=f32[136] epilogue=bias_relu",
    "gemm a=e5m2[2,131,96] b=e5m2[2,200,96] transpose_b=True scale_a=f32[131] scale_b=f32[200]",
    "gemm a=e5m2[200,400] b=e4m3[264,400] transpose_b=True scale_a=f32[1] scale_b=f32[1] out_dtype=f16 math=fast",
    "gemm a=s8[201,400] b=s8[139,400] transpose_b=True",
    "gemm a=u8[2,131,272] b=s8[2,200,272] transpose_b=True d=s32[2,131,200]",
    "gemm a=s8[201,144] b=u8[264,144] transpose_b=True scale_a=f32[1] scale_b=f32[264] out_dtype=bf16",
    "gemm a=u8[201,144] b=u8[264,144] transpose_b=True scale_a=f32[201] scale_b=f32[264] bias=f32[264] epilogue=bias_relu",
    "gemm a=e4m3[300,400] b=e4m3[264,400] transpose_b=True scale_a=f32[300,4] scale_b=f32[4,3]",
    "gemm a=e4m3[140,1296] b=e5m2[128,1296] transpose_b=True scale_a=f32[140,11](1,144) scale_b=f32[11,1] d=f32[140,128]",
    "gemm a=e5m2[2,131,272] b=e4m3[2,139,272] transpose_b=True scale_a=f32[2,2,3] scale_b=f32[2,3,2] bias=f32[139] epilogue=bias_relu",
    "gemm a=e4m3[131,272] b=e4m3[139,272] transpose_b=True scale_a=f32[131,3] scale_b=f32[139]",
    "gemm a=s8[131,272] b=u8[140,272] transpose_b=True scale_a=f32[1] scale_b=f32[3,2] out_dtype=bf16",
    "gemm a=bf16[40,136] b=bf16[27,136] transpose_b=True d=f32[40,27]",
    "gemm a=e4m3[9,272] b=e4m3[200,272] transpose_b=True scale_a=f32[1] scale_b=f32[200]",
    "gemm a=f32[3,1,72] b=f32[3,88,72] transpose_b=True math=tf32",
    "conv_fprop x=bf16[2,48,9,10]nhwc w=bf16[40,48,1,1]nhwc bias=f32[40] epilogue=bias_relu",
    "conv_fprop x=bf16[3,64,9,10]nhwc w=bf16[72,64,3,3]nhwc padding=1",
    "conv_fprop x=bf16[2,64,9,10]nhwc w=bf16[72,64,3,3]nhwc padding=1 stride=2 bias=f32[72] epilogue=bias_relu",
    "conv_fprop x=f16[2,40,12,10]nhwc w=f16[72,40,3,3]nhwc padding=2 dilation=2",
    "conv_fprop x=bf16[1,128,9,10]nhwc w=bf16[80,64,3,3]nhwc padding=1 groups=2",
    "conv_fprop x=bf16[3,64,17,20]nhwc w=bf16[136,64,3,3]nhwc padding=1",
    "conv_fprop x=bf16[2,40,17,10]nhwc w=bf16[136,40,5,3]nhwc padding=2 dilation=2 bias=f32[136] epilogue=bias_relu",
    "conv_dgrad dy=f16[2,72,9,20]nhwc w=f16[72,72,5,5]nhwc x_shape=(2,72,9,20) padding=2",
    "conv_dgrad dy=bf16[3,64,9,10]nhwc w=bf16[64,72,3,3]nhwc x_shape=(3,72,9,10) padding=1",
    "conv_dgrad dy=bf16[4,64,9,9]nhwc w=bf16[64,72,3,3]nhwc x_shape=(4,72,17,18) padding=1 stride=2",
    "conv_dgrad dy=bf16[2,64,3,5]nhwc w=bf16[64,72,3,3]nhwc x_shape=(2,72,9,10) padding=1 stride=(3,2)",
    "conv_dgrad dy=bf16[2,64,5,5]nhwc w=bf16[64,72,1,1]nhwc x_shape=(2,72,9,10) stride=2",
    "conv_dgrad dy=bf16[3,128,9,9]nhwc w=bf16[128,72,1,1]nhwc x_shape=(3,72,18,18) stride=2",
    "conv_dgrad dy=f16[2,128,5]nhwc w=f16[128,40,3]nhwc x_shape=(2,40,9) padding=1 stride=2",
    "conv_wgrad dy=bf16[2,72,9,10]nhwc x=bf16[2,64,9,10]nhwc w_shape=(72,64,3,3) padding=1",
    "conv_transpose x=bf16[2,64,5,5]nhwc w=bf16[64,72,2,2]nhwc stride=2 padding=0",
    "conv_dgrad dy=bf16[3,72,5,7]nhwc w=bf16[72,32,2,2]nhwc x_shape=(3,32,10,14) stride=2",  # parts of rows by tensor copies
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    """The first config of every schedule and loader, and the first that splits k."""
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, WGMMA_SM90)
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    tried = set()
    for config in engine.configs(problem, backend.info):
        kind = (config["schedule"], config["loader"], config["split_k"] > 1, promotes_of(config))
        if kind not in tried:
            tried.add(kind)
            run_problem(backend, problem, engine, config, seed=len(line))
    assert tried


def test_prefetched_k_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The only kernels that send boxes to L2 ahead: long sums, tiles that share rows and columns, of much memory."""
    monkeypatch.setattr(affine_wgmma_sm90, "MIN_PREFETCHED_BYTES", 0)
    backend = EmulatedBackend("sm_90a", checkers="all")
    problem = parse_case("gemm a=bf16[390,776] b=bf16[776,264] bias=f32[264] epilogue=bias_relu")
    engine = MatmulEngine(problem.op, WGMMA_SM90)
    config = EngineConfig.of(schedule="coop", loader="boxes", tile_m=128, tile_n=64, stages=3, split_k=1)
    plan = _plan(lower(problem)[0], config)
    assert not isinstance(plan, str) and plan.consts.prefetches
    backend.info = replace(backend.info, num_sms=3)
    run_problem(backend, problem, engine, config, seed=3)


FORMS = (
    ("gemm a=bf16[600,264] b=bf16[392,264] transpose_b=True", {"shares": "b"}),
    ("gemm a=bf16[264,600] b=bf16[264,392] transpose_a=True bias=f32[392] epilogue=bias_relu", {"shares": "b", "group": 2}),
    ("gemm a=bf16[600,264] b=bf16[392,264] transpose_b=True", {"shares": "b", "schedule": "pingpong"}),
    ("gemm a=bf16[600,264] b=bf16[264,392] d=f32[600,392]", {"shares": "b", "group": 2}),
    ("gemm a=bf16[600,264] b=bf16[392,264] transpose_b=True", {"defers": True}),
    ("gemm a=bf16[600,264] b=bf16[392,264] transpose_b=True bias=f32[392] epilogue=bias_relu",
     {"defers": True, "tile_n": 256}),
    ("gemm a=f16[264,600] b=f16[264,392] transpose_a=True", {"defers": True, "tile_m": 256, "shares": "b"}),
    ("gemm a=bf16[3,264,304] b=bf16[3,264,392] transpose_a=True", {"defers": True}),
    ("gemm a=bf16[264,600] b=bf16[264,136] transpose_a=True", {"defers": True, "split_k": 2, "refused": True}),
    ("gemm a=e4m3[300,656] b=e4m3[264,656] transpose_b=True scale_a=f32[300,6] scale_b=f32[6,3]", {"promotes": True, "tile_m": 192}),
    ("gemm a=e4m3[300,656] b=e5m2[264,656] transpose_b=True scale_a=f32[1] scale_b=f32[264]",
     {"promotes": True, "tile_m": 192, "shares": "b"}),
    ("gemm a=e4m3[300,656] b=e4m3[264,656] transpose_b=True", {"promotes": True, "tile_m": 256, "refused": True}),
    ("gemm a=e4m3[300,656] b=e4m3[264,656] transpose_b=True", {"promotes": True, "defers": True, "refused": True}),
    ("gemm a=s8[201,544] b=u8[264,544] transpose_b=True scale_a=f32[1] scale_b=f32[264] out_dtype=bf16", {"defers": True}),
    ("conv_fprop x=bf16[3,64,9,10]nhwc w=bf16[136,64,3,3]nhwc padding=1 bias=f32[136] epilogue=bias_relu",
     {"defers": True}),
    ("gemm a=bf16[600,264] b=bf16[392,264] transpose_b=True", {"tile_m": 192, "tile_n": 256}),
    ("conv_dgrad dy=f16[3,264,13,14]nhwc w=f16[264,136,1,1]nhwc dx=f16[3,136,13,14]nhwc", {"tile_m": 192, "tile_n": 256}),
    ("gemm a=bf16[600,264] b=bf16[264,392]", {"schedule": "pingpong", "tile_m": 64, "tile_n": 192}),
    ("gemm a=bf16[200,520] b=bf16[264,520] transpose_b=True bias=f32[264] epilogue=bias_relu", {"streams": 7}),
    ("gemm a=f16[200,520] b=f16[520,264] d=f32[200,264]", {"streams": 5, "tile_n": 256}),
    ("gemm a=bf16[3,100,456] b=bf16[3,456,72]", {"streams": 16, "tile_n": 64, "stages": 3}),
    ("gemm a=bf16[100,200] b=bf16[200,64]", {"streams": 6, "tile_n": 64}),  # more CTAs than k tiles
    ("gemm a=bf16[100,512] b=bf16[512,200]", {"streams": 8, "tile_n": 64}),  # CTAs end where a tile does
    ("gemm a=e4m3[140,656] b=e4m3[136,656] transpose_b=True scale_a=f32[140,6] scale_b=f32[6,2]", {"streams": 9, "promotes": True}),
    ("gemm a=f32[200,200] b=f32[72,200] transpose_b=True math=tf32", {"streams": 5, "tile_n": 64}),
    ("conv_wgrad dy=bf16[2,72,9,10]nhwc x=bf16[2,64,9,10]nhwc w_shape=(72,64,3,3) padding=1", {"streams": 4, "tile_n": 192}),
    ("gemm a=bf16[300,176] b=bf16[136,176] transpose_b=True", {}),  # the second k tile repeats 16 k's
    ("gemm a=f16[3,200,72] b=f16[3,72,144]", {}),  # 8 k's are no whole step
    ("gemm a=f16[3,200,80] b=f16[3,80,144] d=f32[3,200,144]", {}),
    ("gemm a=bf16[432,200] b=bf16[432,136] transpose_a=True bias=f32[136] epilogue=bias_relu", {"defers": True}),
    ("gemm a=bf16[300,112] b=bf16[136,112] transpose_b=True", {"schedule": "pingpong", "tile_m": 64}),
    ("gemm a=bf16[600,304] b=bf16[264,304] transpose_b=True", {"tile_m": 192, "tile_n": 256}),
    ("gemm a=bf16[300,304] b=bf16[264,304] transpose_b=True", {"lead": 1}),
    ("gemm a=f32[200,88] b=f32[136,88] transpose_b=True math=tf32", {}),
    ("gemm a=s8[201,224] b=s8[139,224] transpose_b=True", {}),
    ("gemm a=bf16[40,144] b=bf16[56,144] transpose_b=True", {}),
    ("conv_fprop x=bf16[3,240,9,10]nhwc w=bf16[136,240,1,1]nhwc bias=f32[136] epilogue=bias_relu", {"defers": True}),
    ("conv_fprop x=bf16[2,144,9,9]nhwc w=bf16[72,144,1,1]nhwc stride=2", {}),
    ("conv_wgrad dy=bf16[2,72,4,10]nhwc x=bf16[2,64,4,10]nhwc w_shape=(72,64,1,1)", {}),
    ("gemm a=bf16[300,200] b=bf16[80,200] transpose_b=True", {"defers": True}),  # boxes of 80 rows
    ("gemm a=f16[40,200] b=f16[264,200] transpose_b=True", {"tile_m": 192, "tile_n": 256}),
    ("gemm a=e4m3[40,656] b=e4m3[72,656] transpose_b=True scale_a=f32[40,6] scale_b=f32[6,1]", {"promotes": True, "tile_m": 192}),
    ("gemm a=bf16[40,520] b=bf16[72,520] transpose_b=True", {"streams": 7}),
    ("conv_fprop x=bf16[3,64,9,10]nhwc w=bf16[72,64,3,3]nhwc padding=1", {"loader": "halo"}),
    ("gemm a=bf16[200,136] b=bf16[136,264]", {"streams": 6, "refused": True}),  # as many tiles
    ("conv_dgrad dy=bf16[5,136,6,7]nhwc w=bf16[136,96,2,2]nhwc x_shape=(5,96,12,14) stride=2", {"keeps": True, "schedule": "pingpong"}),
    ("conv_dgrad dy=bf16[5,72,6,7]nhwc w=bf16[72,96,2,2]nhwc x_shape=(5,96,12,14) stride=2", {"keeps": True, "tile_n": 192}),
    ("conv_fprop x=bf16[5,64,12,14]nhwc w=bf16[136,64,2,2]nhwc stride=2", {"keeps": True, "tile_n": 64}),
    ("conv_fprop x=bf16[5,128,9,10]nhwc w=bf16[192,128,1,1]nhwc bias=f32[192] epilogue=bias_relu", {"keeps": True, "tile_n": 64}),
    ("gemm a=bf16[600,136] b=bf16[264,136] transpose_b=True", {"keeps": True, "tile_m": 192, "tile_n": 256, "refused": True}),
)


@pytest.mark.parametrize(("line", "knobs"), FORMS)
def test_forms(line: str, knobs: dict[str, Any]) -> None:
    """Operands shared by two CTAs, stores put off, rings filled by a thread that multiplies, k tiles dealt out; short rings wrap."""
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, WGMMA_SM90)
    knobs = {"schedule": "coop", "loader": "boxes", "tile_m": 128, "tile_n": 128, "stages": 2, "split_k": 1, **knobs}
    is_refused = knobs.pop("refused", False)
    config = EngineConfig.of(**knobs)
    plan = _plan(lower(problem)[0], config)
    assert isinstance(plan, str) == is_refused, plan
    if not isinstance(plan, str):
        run_problem(backend, problem, engine, config, seed=len(line))
        for step in engine.build_steps(problem, config, backend.info).steps:
            result = assemble(render(step.spec), "sm_90a")
            assert result.spill_bytes == 0 and not re.search(r"C75(?!04)\d\d|C76\d\d", result.log), result.log
