"""Gradients of depthwise filters on wgmma in the emulator with all checkers, against float64 references, on a device of two SMs."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.conv_depthwise_wgmma import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble, disassemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

LINES = (
    "conv_wgrad x=bf16[5,24,7,7]nhwc dy=bf16[5,24,7,7]nhwc w_shape=(24,1,7,7) padding=3 groups=24",
    "conv_wgrad x=bf16[2,40,14,14]nhwc dy=bf16[2,40,14,14]nhwc w_shape=(40,1,7,7) padding=3 groups=40",
    "conv_wgrad x=f16[3,64,9,20]nhwc dy=f16[3,64,9,20]nhwc w_shape=(64,1,3,3) padding=1 groups=64",
    "conv_wgrad x=bf16[2,16,11,13]nhwc dy=bf16[2,16,9,14]nhwc w_shape=(16,1,5,4) padding='((0,2),(3,1))' groups=16 flip=True",
    "conv_wgrad x=bf16[1,8,12,17]nhwc dy=bf16[1,8,7,13]nhwc w_shape=(8,1,6,5) groups=8",
    "conv_wgrad x=bf16[1,8,3,2]nhwc dy=bf16[1,8,9,6]nhwc w_shape=(8,1,3,3) padding='((4,4),(2,4))' groups=8",
    "conv_wgrad x=f16[1,8,1,3]nhwc dy=f16[1,8,1,3]nhwc w_shape=(8,1,1,1) groups=8",
    "conv_transpose_wgrad x=bf16[2,32,6,7]nhwc dy=bf16[2,32,6,7]nhwc w_shape=(32,1,3,3) padding=1 groups=32",
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    (engine,) = ENGINES[problem.op]
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    shapes = {(c["groups"], c["blocks"], c["images"], c["strip"]): c for c in engine.configs(problem, backend.info)}
    for config in shapes.values():
        run_problem(backend, problem, engine, config, seed=len(line))


def test_all_taps_are_one_product() -> None:
    problem = parse_case("conv_wgrad x=bf16[128,96,56,56]nhwc dy=bf16[128,96,56,56]nhwc w_shape=(96,1,7,7) padding=3 groups=96")
    device = known_device("sm_90a")
    (engine,) = ENGINES[problem.op]
    step, *_ = engine.build_steps(problem, engine.configs(problem, device)[0], device).steps
    result = assemble(render(step.spec), "sm_90a")
    assert result.spill_bytes == 0
    assert "C75" not in result.log, result.log
    sass = disassemble(result.cubin)
    if sass is None:
        pytest.skip("nvdisasm is not installed")
    assert len(re.findall(r"\bHGMMA\.64x56x16\.F32\.BF16", sass)) == len(step.spec.consts.products)
