"""Depthwise walks over channels not innermost, in no packs or of several filters, in the emulator with all checkers, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.conv_depthwise import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

LINES = (
    "conv_fprop x=bf16[2,6,9,20]nhwc w=bf16[12,1,3,3] padding=1 groups=6 "
    "epilogue='relu(acc + bias[c]) + z' bias=f32[12] z=bf16[2,12,9,20]nhwc",
    "conv_fprop x=f32[2,5,9,20] w=f32[15,1,3,3] padding=1 stride=2 groups=5",
    "conv_fprop x=f16[2,4,50] w=f16[12,1,4] padding='((3,0),)' groups=4",
    "conv_wgrad x=bf16[2,6,9,20]nhwc dy=bf16[2,12,9,20]nhwc w_shape=(12,1,3,3) padding=1 groups=6",
    "conv_wgrad x=f32[2,5,9,20] dy=f32[2,15,5,10] w_shape=(15,1,3,3) padding=1 stride=2 groups=5",
    "conv_fprop x=bf16[2,6,9,20] w=bf16[6,1,3,3] padding=1 groups=6 epilogue='relu(acc + bias[c])' bias=f32[6]",
    "conv_fprop x=f16[2,5,9,20] w=f16[5,1,5,5] padding=2 stride=2 groups=5 epilogue='acc + z' z=f16[2,5,5,10]",
    "conv_fprop x=f32[2,5,9,20] w=f32[5,1,3,3] padding=1 groups=5",
    "conv_fprop x=bf16[2,7,9,20]nhwc w=bf16[7,1,3,3] y=bf16[2,7,9,20] padding=1 groups=7",
    "conv_fprop x=bf16[2,7,50] w=bf16[7,1,4] padding='((3,0),)' groups=7",
    "conv_fprop x=bf16[2,7,50] w=bf16[7,1,5] padding=2 stride=2 groups=7 "
    "epilogue='silu(acc + bias[c]) * z' bias=f32[7] z=bf16[2,7,25]",
    "conv_dgrad dy=f32[2,7,50] w=f32[7,1,4] x_shape=(2,7,50) padding='((3,0),)' groups=7",
    "conv_wgrad x=f16[2,7,50] dy=f16[2,7,50] w_shape=(7,1,4) padding='((3,0),)' groups=7",
    "conv_dgrad dy=bf16[2,6,9,20] w=bf16[6,1,3,3] x_shape=(2,6,9,20) padding=1 groups=6",
    "conv_dgrad dy=f16[2,6,5,10] w=f16[6,1,3,3] x_shape=(2,6,9,20) padding=1 stride=2 groups=6",
    "conv_wgrad x=bf16[3,6,9,20] dy=bf16[3,6,9,20] w_shape=(6,1,3,3) padding=1 groups=6",
    "conv_wgrad x=f32[3,6,9,20] dy=f32[3,6,5,10] w_shape=(6,1,3,3) padding=1 stride=2 groups=6",
    "conv_wgrad x=f16[3,7,9,20]nhwc dy=f16[3,7,9,20]nhwc w_shape=(7,1,5,5) padding=2 groups=7",
    "conv_wgrad x=bf16[40,3,7,7] dy=bf16[40,3,7,7] w_shape=(3,1,3,3) padding=1 groups=3",
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_80", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    (engine,) = ENGINES[problem.op]
    configs = engine.configs(problem, backend.info)
    assert {c["vec"] for c in configs} == {1}
    for config in {c.name: c for c in (configs[0], configs[len(configs) // 2], configs[-1])}.values():
        run_problem(backend, problem, engine, config, seed=len(line))


@pytest.mark.parametrize("kind", ("bf16", "f32"))
@pytest.mark.parametrize("op", ("conv_fprop", "conv_dgrad", "conv_wgrad"))
def test_layers_assemble_without_spills(op: str, kind: str) -> None:
    device = known_device("sm_90a")
    x, w = f"{kind}[32,144,28,28]", f"{kind}[144,1,5,5]"
    line = {"conv_fprop": f"conv_fprop x={x} w={w}", "conv_dgrad": f"conv_dgrad dy={x} w={w} x_shape=(32,144,28,28)",
            "conv_wgrad": f"conv_wgrad x={x} dy={x} w_shape=(144,1,5,5)"}[op]
    problem = parse_case(f"{line} padding=2 groups=144")
    (engine,) = ENGINES[op]
    shapes = {}
    for config in engine.configs(problem, device):
        shapes.setdefault((config["tile"], config["depth"]), config)
    for config in shapes.values():
        step = engine.build_steps(problem, config, device).steps[0]
        assert assemble(render(step.spec), "sm_90a").spill_bytes == 0, config.name
