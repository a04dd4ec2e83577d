"""Linear layers of quantised weights in the emulator, all checkers on: every kind in the loops of few rows, groups of every size, zero
points, clusters, tails; layouts of GPTQ and AWQ against plain NumPy; through the handle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oxidnn import DnnHandle
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.engines.quantized_linear_skinny import SKINNY
from oxidnn.engines.quantized_linear_stream import STREAM
from oxidnn.engines.quantized_linear_wgmma import WGMMA
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem


def config(rows: int, blocks: int, warps: int = 4, stages: int = 2, splits: int = 1) -> EngineConfig:
    return EngineConfig.of(rows=rows, blocks=blocks, warps=warps, stages=stages, splits=splits)


@pytest.mark.parametrize(("line", "chosen"), [
    ("x=f16[1,1312] w=u8[40,656] scale=f16[40,41] kind=s4 group_size=32", config(16, 4, stages=3)),
    ("x=bf16[3,896] w=u8[40,448] scale=bf16[40,14] zero_point=u8[40,14] kind=u4 group_size=64", config(32, 4)),
    ("x=f16[9,704] w=u8[72,352] scale=f32[72,6] zero_point=s8[72,6] kind=u4 group_size=128", config(64, 4, splits=1)),
    ("x=bf16[40,416] w=u8[24,208] scale=f32[24] kind=s4 bias=f32[24] epilogue=bias_relu", config(16, 2, 4)),
    ("x=f16[2,640] w=u8[24,320] scale=f16[24,2] kind=s4 group_size=384", config(16, 4)),
    ("x=f16[2,1024] w=u8[24,512] scale=f16[24,8] zero_point=u8[24,8] kind=u4", config(16, 4, splits=2)),
    ("x=bf16[17,512] w=u8[24,256] scale=f32[24,8] kind=nf4", config(32, 2)),
    ("x=f16[5,288] w=u8[40,144] scale=f32[40,5] kind=nf4", config(16, 4, stages=4)),
    ("x=f16[4,368] w=s8[40,368] scale=f32[40,6] zero_point=s8[40,6] kind=s8 group_size=64", config(16, 2)),
    ("x=bf16[4,368] w=s8[40,368] scale=f32[40] zero_point=s8[40] kind=s8", config(32, 1)),
    ("x=bf16[64,208] w=e4m3[24,208] scale=f16[24] kind=e4m3", config(16, 2)),
    ("x=f16[1,720] w=e4m3[24,720] scale=f32[1] kind=e4m3 out_dtype=f32", config(32, 2, splits=4)),
], ids=lambda v: v.name if isinstance(v, EngineConfig) else v.split()[1] + v.split("kind=")[1].split()[0])
def test_few_rows(line: str, chosen: EngineConfig) -> None:
    problem = parse_case(f"quantized_linear {line}")
    arch = "sm_80" if chosen["splits"] == 1 and len(line) % 2 else "sm_90a"
    backend = EmulatedBackend(arch, checkers="all", schedule=("random", 3))
    support = SKINNY.check_support(problem, backend.info)
    assert support, support.reason
    run_problem(backend, problem, SKINNY, chosen, seed=len(line))


def team(warps: int, teams: int, boxes: int, stages: int, ctas: int = 1, splits: int = 1) -> EngineConfig:
    return EngineConfig.of(warps=warps, teams=teams, ctas=ctas, splits=splits, boxes=boxes, stages=stages)


@pytest.mark.parametrize(("line", "chosen"), [
    ("x=f16[1,1312] w=u8[40,656] scale=f16[40,41] kind=s4 group_size=32", team(4, 1, 1, 3)),
    ("x=bf16[3,896] w=u8[40,448] scale=bf16[40,14] zero_point=u8[40,14] kind=u4 group_size=64", team(2, 2, 2, 2)),
    ("x=f16[9,704] w=u8[72,352] scale=f32[72,6] zero_point=s8[72,6] kind=u4 group_size=128", team(1, 2, 1, 2)),
    ("x=bf16[16,416] w=u8[24,208] scale=f32[24] kind=s4 bias=f32[24] epilogue=bias_relu", team(2, 1, 1, 2)),
    ("x=f16[2,1024] w=u8[24,512] scale=f16[24,2] kind=s4 group_size=512", team(2, 1, 1, 3)),   # a group of two stages
    # One row of f16: codes as they are, sums of x by groups of every size
    ("x=f16[1,1312] w=u8[40,656] scale=f16[40,41] zero_point=u8[40,41] kind=u4 group_size=32 out_dtype=f32", team(4, 2, 1, 3)),
    ("x=f16[1,704] w=u8[40,352] scale=f32[40,6] zero_point=s8[40,6] kind=s4 group_size=128", team(2, 1, 2, 2)),
    ("x=f16[1,1024] w=u8[24,512] scale=f16[24,2] kind=s4 group_size=512 out_dtype=f32", team(2, 1, 1, 3)),
    ("x=f16[1,1024] w=u8[24,512] scale=f16[24,2] kind=s4 group_size=512", team(2, 1, 2, 2)),
    ("x=f16[2,5,704] w=u8[40,352] scale=f16[40] zero_point=u8[40] kind=u4", team(4, 1, 1, 3)),
    ("x=f16[11,1312] w=u8[40,656] scale=f16[40,41] zero_point=u8[40,41] kind=u4 group_size=32 bias=f32[40] epilogue=bias_relu",
     team(2, 2, 1, 2, splits=3)),
    ("x=bf16[5,1328] w=s8[136,1328] scale=f32[136] y=bf16[5,136](1,5) kind=s8", team(4, 1, 1, 3, splits=2)),
    ("x=bf16[7,512] w=u8[24,256] scale=f32[24,8] kind=nf4", team(16, 1, 1, 2)),   # more threads than pairs of numbers
    ("x=f16[4,368] w=s8[40,368] scale=f32[40,6] zero_point=s8[40,6] kind=s8 group_size=64", team(2, 1, 1, 2)),
    ("x=bf16[4,368] w=s8[40,368] scale=f32[40] zero_point=s8[40] kind=s8", team(2, 1, 2, 2, ctas=2)),
    ("x=f16[4,352] w=e4m3[40,352] scale=f32[40,11] kind=e4m3 group_size=32", team(2, 2, 1, 3)),
    ("x=bf16[8,208] w=e4m3[24,208] scale=f16[24] kind=e4m3 residual=f32[8,24] epilogue='relu(acc + residual)'", team(1, 2, 1, 4)),
    ("x=f16[1,1024] w=u8[24,512] scale=f16[24,8](1,24) permutation=s32[1024] kind=u4", team(4, 1, 1, 2)),
], ids=lambda v: v.name if isinstance(v, EngineConfig) else v.split()[1] + v.split("kind=")[1].split()[0])
def test_streams(line: str, chosen: EngineConfig) -> None:
    problem, backend = parse_case(f"quantized_linear {line}"), EmulatedBackend("sm_90a", checkers="all", schedule=("random", len(line)))
    support = STREAM.check_support(problem, backend.info)
    assert support, support.reason
    run_problem(backend, problem, STREAM, chosen, seed=len(line))


@pytest.mark.parametrize("kind", ["nf4", "s8"])
def test_teams_take_tiles_in_turn(kind: str) -> None:
    """Rings run ahead into the next tile; each tile has its own factors."""
    w = "u8[136,256] scale=f16[136,8]" if kind == "nf4" else "s8[136,512] scale=f16[136,4] zero_point=s8[136,4]"
    problem = parse_case(f"quantized_linear x=f16[2,512] w={w} kind={kind}")
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=("random", 2))
    backend.info = replace(backend.info, num_sms=2)
    for chosen in (team(1, 2, 1, 4), team(2, 1, 1, 3), team(1, 16, 1, 2)):
        run_problem(backend, problem, STREAM, chosen)


def tile(columns: int, row_groups: int, k_groups: int, spans: int, scaling: str, stages: int, filler: str = "warp",
         splits: int = 1) -> EngineConfig:
    return EngineConfig.of(columns=columns, row_groups=row_groups, k_groups=k_groups, splits=splits, spans=spans, scaling=scaling,
                           filler=filler, stages=stages)


@pytest.mark.parametrize(("line", "chosen"), [
    ("x=f16[5,448] w=u8[40,224] scale=f32[40] kind=s4", tile(8, 1, 1, 2, "none", 2)),
    ("x=bf16[9,448] w=u8[72,224] scale=f32[72] zero_point=u8[72] kind=u4 bias=f32[72]", tile(16, 2, 1, 4, "none", 3)),
    ("x=f16[17,1056] w=u8[40,528] scale=f16[40,9] kind=s4 group_size=128", tile(32, 1, 2, 4, "sums", 3)),
    ("x=bf16[33,448] w=u8[136,224] scale=f32[136,7] zero_point=s8[136,7] kind=u4 group_size=64", tile(64, 2, 1, 2, "sums", 2)),
    ("x=f16[100,416] w=u8[136,208] scale=f32[136,13] zero_point=s8[136,13] kind=s4 group_size=32", tile(64, 2, 1, 2, "numbers", 2)),
    ("x=bf16[130,320] w=u8[72,160] scale=bf16[72,5] kind=nf4", tile(128, 1, 1, 2, "numbers", 2)),
    ("x=f16[270,352] w=u8[136,176] scale=f16[136,3] kind=s4 group_size=128", tile(256, 2, 1, 2, "numbers", 3, "own")),
    ("x=bf16[70,864] w=s8[136,864] scale=f16[136] kind=s8", tile(64, 2, 1, 2, "none", 3, "own")),
    ("x=f16[40,864] w=u8[72,432] scale=f16[72,14] zero_point=u8[72,14] kind=u4 group_size=64", tile(64, 1, 1, 4, "sums", 3, "own", 2)),
    ("x=bf16[70,864] w=u8[136,432] scale=f16[136,7] kind=s4 group_size=128", tile(64, 2, 1, 2, "sums", 4, "own")),
    ("x=f16[5,720] w=s8[40,720] scale=f32[40] zero_point=s8[40] kind=s8", tile(8, 1, 4, 2, "none", 5)),
    ("x=f16[17,1056] w=u8[72,528] scale=f16[72,9] zero_point=u8[72,9] kind=u4 group_size=128",
     tile(32, 1, 2, 2, "sums", 3, splits=2)),
    ("x=bf16[5,1328] w=s8[136,1328] scale=f32[136] kind=s8", tile(8, 2, 1, 2, "none", 2, splits=4)),
    ("x=bf16[20,400] w=s8[72,400] scale=f32[72,4] zero_point=s8[72,4] kind=s8 group_size=128", tile(32, 1, 2, 2, "sums", 3)),
    ("x=f16[20,400] w=e4m3[72,400] scale=f32[1] kind=e4m3 out_dtype=f32", tile(32, 2, 1, 2, "none", 2)),
    ("x=f16[40,864] w=u8[264,432] scale=f16[264,14] zero_point=u8[264,14] kind=u4 group_size=64", tile(64, 4, 1, 4, "numbers", 3, "own")),
    ("x=bf16[16,1120] w=u8[200,560] scale=f32[200,35] kind=nf4 group_size=32", tile(16, 4, 1, 4, "numbers", 2)),
    ("x=bf16[2,10,400] w=e4m3[72,400] scale=f32[72,7] kind=e4m3 group_size=64 residual=f32[2,10,72] epilogue='relu(acc + residual)'",
     tile(32, 1, 1, 2, "sums", 2)),
    ("x=bf16[9,448] w=u8[72,224] scale=f32[72] permutation=s32[448] kind=nf4", tile(16, 1, 1, 2, "none", 2)),
], ids=lambda v: v.name if isinstance(v, EngineConfig) else v.split()[1] + v.split("kind=")[1].split()[0])
@pytest.mark.parametrize("schedule", ["lowest_pc", ("random", 5)], ids=["lowest", "random"])
def test_wgmma(line: str, chosen: EngineConfig, schedule: object) -> None:
    problem, backend = parse_case(f"quantized_linear {line}"), EmulatedBackend("sm_90a", checkers="all", schedule=schedule)
    support = WGMMA.check_support(problem, backend.info)
    assert support, support.reason
    more = EngineConfig((*chosen.knobs, ("overlaps", len(line) % 2 == 0)))
    run_problem(backend, problem, WGMMA, more, seed=len(line))


@pytest.mark.parametrize(("line", "engine"), [
    ("x=f16[3,2336] w=u8[40,1168] scale=f16[40,19] zero_point=u8[40,19] kind=u4 group_size=128", STREAM),
    ("x=bf16[9,2336] w=s8[72,2336] scale=f16[72] kind=s8", STREAM),
    ("x=f16[5,576] w=u8[72,288] scale=f16[72,9] kind=nf4", WGMMA), ("x=f16[100,256] w=u8[72,128] scale=f16[72,4] kind=s4", WGMMA),
], ids=lambda v: v.split()[1] if isinstance(v, str) else v.id)
def test_every_config(line: str, engine: Engine) -> None:
    problem, backend = parse_case(f"quantized_linear {line}"), EmulatedBackend("sm_90a", checkers="all")
    chosen = engine.configs(problem, backend.info)
    assert len(chosen) > 4
    for config in chosen:
        run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("line", [
    "x=f16[1,4096] w=u8[4096,2048] scale=f16[4096,32] zero_point=u8[4096,32] kind=u4",
    "x=bf16[64,4096] w=u8[4096,2048] scale=f16[4096,128] kind=s4", "x=bf16[16,4096] w=u8[4096,2048] scale=f32[4096,64] kind=nf4",
    "x=bf16[16,4096] w=s8[4096,4096] scale=f32[4096,32] zero_point=s8[4096,32] kind=s8",
    "x=f16[64,4096] w=e4m3[4096,4096] scale=f32[4096] kind=e4m3", "x=f16[4096,4096] w=u8[4096,2048] scale=f16[4096,32] kind=s4",
    "x=bf16[4096,4096] w=u8[4096,2048] scale=f16[4096,64] kind=nf4",
], ids=lambda line: line.split()[0] + line.split("kind=")[1].split()[0])
def test_tiles_assemble_without_spills(line: str) -> None:
    info = known_device("sm_90a")
    problem = parse_case(f"quantized_linear {line}")
    seen = set()
    for engine in (STREAM, SKINNY, WGMMA):
        for chosen in engine.configs(problem, info) if engine.check_support(problem, info) else ():
            key = tuple(value for name, value in chosen.knobs if name not in ("stages", "splits", "depth"))
            if key in seen:
                continue
            seen.add(key)
            spec = engine.build_steps(problem, chosen, info).steps[0].spec
            result = assemble(render(spec), "sm_90a")
            assert result.spill_bytes == 0, f"{chosen.name}: {result.spill_bytes} bytes spilled"
            assert result.registers <= spec.max_registers, f"{chosen.name}: {result.registers} registers"
            assert "serialized" not in result.log, f"{chosen.name}: {result.log}"
    assert seen


@pytest.mark.parametrize(("line", "reason"), [
    ("x=f16[65,64] w=u8[8,32] scale=f32[8] kind=s4", "at most 64 rows"), ("x=f32[2,64] w=u8[8,32] scale=f32[8] kind=s4", "f16 or bf16"),
    ("x=f16[2,40] w=u8[8,20] scale=f32[8] kind=s4", "16 bytes of w"), ("x=f16[2,64] w=u8[8,32] scale=f32[8,4] kind=s4", "multiples of 32"),
])
def test_refusals_say_why(line: str, reason: str) -> None:
    support = SKINNY.check_support(parse_case(f"quantized_linear {line}"), known_device("sm_90a"))
    assert not support and reason in support.reason


def gptq(codes: np.ndarray, zeros: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(qweight, qzeros) of codes (k, n) and zero points (groups, n), as AutoGPTQ packs them."""
    k, n = codes.shape
    qweight = np.zeros((k // 8, n), np.uint32)
    for row in range(k):
        qweight[row // 8] |= codes[row].astype(np.uint32) << 4 * (row % 8)
    qzeros = np.zeros((len(zeros), n // 8), np.uint32)
    for column in range(n):
        qzeros[:, column // 8] |= (zeros[:, column] - 1).astype(np.uint32) << 4 * (column % 8)
    return qweight.view(np.int32), qzeros.view(np.int32)


def awq(numbers: np.ndarray) -> np.ndarray:
    """Rows of numbers, eight columns a word, as AutoAWQ packs them."""
    packed = np.zeros((len(numbers), numbers.shape[1] // 8), np.uint32)
    for column in range(packed.shape[1]):
        for i, place in enumerate((0, 2, 4, 6, 1, 3, 5, 7)):
            packed[:, column] |= numbers[:, 8 * column + place].astype(np.uint32) << 4 * i
    return packed.view(np.int32)


@pytest.mark.parametrize("order", ["plain", "act-order"])
def test_gptq_layers(order: str) -> None:
    rng, (k, n, size) = np.random.default_rng(5), (128, 24, 32)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(1, 17, (k // size, n))
    scales = rng.uniform(0.01, 0.1, (k // size, n)).astype(np.float16)
    g_idx = rng.permutation(np.arange(k) // size) if order == "act-order" else np.arange(k) // size
    x = rng.standard_normal((3, k)).astype(np.float16)
    want = x.astype(np.float64) @ ((codes - zeros[g_idx]) * scales[g_idx].astype(np.float64))
    h = DnnHandle("emu:sm_80")
    permutation = np.argsort(g_idx, kind="stable").astype(np.int32) if order == "act-order" else None
    w, scale, zero = h.repack_gptq(*gptq(codes, zeros), scales, permutation)
    y = h.quantized_linear(x, w, scale, zero, kind="u4", permutation=permutation, out_dtype="f32")
    np.testing.assert_allclose(y, want, atol=2e-2, rtol=0)


def test_awq_layers() -> None:
    rng, (k, n, size) = np.random.default_rng(6), (128, 40, 64)
    codes, zeros = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // size, n))
    scales = rng.uniform(0.01, 0.1, (k // size, n)).astype(np.float16)
    x = rng.standard_normal((3, k)).astype(np.float16)
    group = np.arange(k) // size
    h = DnnHandle("emu:sm_80")
    w, scale, zero = h.repack_awq(awq(codes), awq(zeros), scales)
    assert np.array_equal(w, codes.T[:, 0::2] + 16 * codes.T[:, 1::2]) and np.array_equal(zero, zeros.T)
    y = h.quantized_linear(x, w, scale, zero, kind="u4", out_dtype="f32")
    np.testing.assert_allclose(y, x.astype(np.float64) @ ((codes - zeros[group]) * scales[group].astype(np.float64)), atol=2e-2, rtol=0)
