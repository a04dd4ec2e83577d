"""Gradients of small filters by patches in the emulator with all checkers, against float64 references, on a device of two SMs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.affine_halo_gradient import HALO_GRADIENT_SM90
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

LINES = (
    "conv_wgrad dy=bf16[2,64,16,8]nhwc x=bf16[2,64,16,8]nhwc w_shape=(64,64,3,3) padding=1",
    "conv_wgrad dy=f16[3,72,8,24]nhwc x=f16[3,40,8,24]nhwc w_shape=(72,40,3,3) padding=1",
    "conv_wgrad dy=bf16[2,136,8,8]nhwc x=bf16[2,72,8,8]nhwc w_shape=(136,72,3,3) padding=2 dilation=2",
    "conv_wgrad dy=bf16[2,40,8,16]nhwc x=bf16[2,136,8,16]nhwc w_shape=(40,136,2,4) padding='((0,1),(1,2))'",
    "conv_wgrad dy=bf16[2,24,16,8]nhwc x=bf16[2,8,15,9]nhwc w_shape=(24,8,3,3) padding='((2,1),(1,0))'",
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=5)
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, HALO_GRADIENT_SM90)
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    for config in engine.configs(problem, backend.info):
        run_problem(backend, problem, engine, config, seed=len(line))


@pytest.mark.parametrize("line", LINES)
def test_assembles_without_spills(line: str) -> None:
    device = known_device("sm_90a")
    problem = parse_case(line)
    engine = MatmulEngine(problem.op, HALO_GRADIENT_SM90)
    for step in engine.build_steps(problem, engine.configs(problem, device)[0], device).steps:
        result = assemble(render(step.spec), "sm_90a")
        assert result.spill_bytes == 0 and not re.search(r"C75(?!04)\d\d|C76\d\d", result.log), result.log


@pytest.mark.parametrize(("line", "reason"), [
    ("conv_wgrad dy=bf16[2,64,9,8]nhwc x=bf16[2,64,9,8]nhwc w_shape=(64,64,3,3) padding=1", "whole blocks"),
    ("conv_wgrad dy=bf16[2,64,8,8]nhwc x=bf16[2,64,8,8]nhwc w_shape=(64,64,5,5) padding=2", "5 x 5"),
    ("conv_wgrad dy=bf16[2,64,8,8]nhwc x=bf16[2,64,16,16]nhwc w_shape=(64,64,3,3) padding=1 stride=2", "steps are not 1"),
    ("conv_wgrad dy=f32[2,64,8,8]nhwc x=f32[2,64,8,8]nhwc w_shape=(64,64,3,3) padding=1", "f16 or bf16"),
])
def test_refusals(line: str, reason: str) -> None:
    support = MatmulEngine("conv_wgrad", HALO_GRADIENT_SM90).check_support(parse_case(line), known_device("sm_90a"))
    assert not support and reason in support.reason
