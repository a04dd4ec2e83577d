"""Gates and second outputs on the tiled loops in the emulator, all checkers on: every engine that takes them, in several shapes of tile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

GATES = (
    "gemm a=bf16[200,72] b=bf16[272,72] transpose_b=True gate=silu bias=f32[272]",
    "gemm a=f16[70,72] b=f16[72,144] gate=gelu d=f32[70,72]",
    "gemm a=bf16[300,136] b=bf16[136,48] gate=relu d=bf16[300,24](1,304)",
    "gemm a=f32[30,20] b=f32[20,48] gate=identity alpha=0.5",
    "gemm a=f32[130,40] b=f32[208,40] transpose_b=True gate=tanh math=tf32",
    "gemm a=f64[30,20] b=f64[48,20] transpose_b=True gate=sigmoid bias=f64[48]",
    "gemm a=e4m3[140,272] b=e5m2[144,272] transpose_b=True gate=silu scale_a=f32[140] scale_b=f32[144]",
    "gemm a=s8[3,9,64] b=s8[3,64,64] transpose_b=True gate=sigmoid scale_a=f32[1] scale_b=f32[3,1,64] out_dtype=f16",
    "gemm a=bf16[2,17,40] b=bf16[2,48,40] transpose_b=True gate=relu d=bf16[2,17,24](600,1,20)",
)
SECOND = (
    "gemm a=f16[33,40] b=f16[40,14] bias=f32[14] epilogue='relu(t := acc + bias), t' aux=f32[33,14]",
    "gemm a=bf16[150,328] b=bf16[72,328] transpose_b=True bias=f32[72] epilogue='gelu(t := acc + bias), t'",
    "gemm a=bf16[1,328] b=bf16[72,328] transpose_b=True epilogue='gelu(t := acc), t' aux=f32[1,72]",
    "gemm a=bf16[200,136] b=bf16[136,264] epilogue='silu(t := acc), t' d=f32[200,264] aux=bf16[200,264](264,1)@2",
    "gemm a=f32[40,300] b=f32[300,24] residual=f32[40,24] epilogue='(t := acc + residual) * 2, t' d=f32[40,24](1,40)",
)


def takers(arch: str, line: str) -> list:  # type: ignore[type-arg]
    device = known_device(arch)
    return [e for e in ENGINES["gemm"] if e.check_support(parse_case(line), device) and not e.id.endswith("direct")]


@pytest.mark.parametrize("line", GATES + SECOND)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_on_every_engine(line: str, arch: str) -> None:
    """Some configs of each, under one of two schedules in turn."""
    problem = parse_case(line)
    backends = [EmulatedBackend(arch, checkers="all", schedule=schedule) for schedule in (("random", 3), "lowest_pc")]
    for backend in backends:
        backend.info = replace(backend.info, num_sms=2)
    engines = takers(arch, line)
    assert engines or (arch == "sm_80" and "e4m3" in line), "only the direct engine takes it"
    for engine in engines:
        tried = set()
        for config in engine.configs(problem, backends[0].info):
            kind = (config["schedule"], config["loader"]) if "wgmma_sm90" in engine.id else len(tried)
            if kind not in tried and len(tried) < 4:
                run_problem(backends[(len(tried) + len(line)) % 2], problem, engine, config, seed=len(line))
                tried.add(kind)


def test_the_hopper_loop_takes_gates_of_weights_along_k() -> None:
    for line in (GATES[0], GATES[6], SECOND[1]):
        assert any(e.id == "gemm.wgmma_sm90" for e in takers("sm_90a", line))


@pytest.mark.parametrize("line", [
    "gemm a=bf16[4096,4096] b=bf16[8192,4096] transpose_b=True gate=silu bias=f32[8192]",
    "gemm a=bf16[4096,4096] b=bf16[4096,8192] gate=gelu",
    "gemm a=bf16[4096,4096] b=bf16[4096,4096] transpose_b=True bias=f32[4096] epilogue='gelu(t := acc + bias), t'",
    "gemm a=e4m3[4096,4096] b=e4m3[8192,4096] transpose_b=True gate=silu scale_a=f32[4096] scale_b=f32[8192]",
])
def test_no_config_spills(line: str) -> None:
    problem = parse_case(line)
    for arch in ("sm_80", "sm_90a"):
        device = known_device(arch)
        for engine in takers(arch, line):
            for config in engine.configs(problem, device)[:4]:
                assembled = assemble(render(engine.build_steps(problem, config, device).steps[0].spec), arch)
                assert assembled.spill_bytes == 0, f"{engine.id} {config.name}"
