"""The interleaved image gradient in the emulator with all checkers, against float64 references, on a device of two SMs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.conv_interleaved import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

LINES = (
    "conv_dgrad dy=bf16[2,64,16,16]nhwc w=bf16[64,3,7,7]nhwc x_shape=(2,3,32,32) padding=3 stride=2",
    "conv_dgrad dy=f16[1,24,9,11]nhwc w=f16[24,3,3,3]nhwc x_shape=(1,3,17,22) padding=1 stride=2",
    "conv_dgrad dy=bf16[2,96,4,4]nhwc w=bf16[96,4,5,4]nhwc x_shape=(2,4,9,11) padding='((1,2),(2,1))' stride=(2,3)",
    "conv_dgrad dy=bf16[3,72,9,10]nhwc w=bf16[72,8,3,3] x_shape=(3,8,9,10) padding=1",
    "conv_dgrad dy=bf16[5,40,6,10]nhwc w=bf16[40,3,4,4]nhwc x_shape=(5,3,24,40) stride=4",
    "conv_dgrad dy=bf16[2,40,3,56]nhwc w=bf16[40,3,4,4]nhwc x_shape=(2,3,12,224) stride=4",
    "conv_dgrad dy=bf16[1,40,3,120]nhwc w=bf16[40,4,2,2]nhwc x_shape=(1,4,7,240) stride=2",
    "conv_dgrad dy=f16[3,24,8,12]nhwc w=f16[24,2,3,3]nhwc x_shape=(3,2,25,36) padding='((1,0),(0,0))' stride=3",
    "conv_dgrad dy=bf16[2,64,4,4]nhwc w=bf16[64,3,2,2]nhwc x_shape=(2,3,16,16) stride=4",
    "conv_transpose x=bf16[2,64,8,8]nhwc w=bf16[64,3,4,4]nhwc stride=2 padding=1",
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    (engine,) = ENGINES[problem.op]
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    run_problem(backend, problem, engine, engine.configs(problem, backend.info)[0], seed=len(line))


def test_the_stem_assembles_without_spills() -> None:
    problem = parse_case("conv_dgrad dy=bf16[128,64,112,112]nhwc w=bf16[64,3,7,7]nhwc x_shape=(128,3,224,224) padding=3 stride=2")
    device = known_device("sm_90a")
    (engine,) = ENGINES[problem.op]
    (step,) = engine.build_steps(problem, engine.configs(problem, device)[0], device).steps
    result = assemble(render(step.spec), "sm_90a")
    assert result.spill_bytes == 0
    assert "C75" not in result.log, result.log
