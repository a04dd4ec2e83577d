"""Depthwise convolution by tensor copies in the emulator with all checkers, against float64 references, on a device of two SMs: every
shape of tile, more strips than CTAs, boxes that hang over in every direction, columns parted into even and odd."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.conv_depthwise_tma import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

LINES = (
    "conv_fprop x=bf16[2,64,9,20]nhwc w=bf16[64,1,3,3] padding=1 groups=64",
    "conv_fprop x=f16[3,40,14,14]nhwc w=f16[40,1,5,5] padding=2 groups=40",
    "conv_fprop x=bf16[5,24,7,7]nhwc w=bf16[24,1,7,7] padding=3 groups=24",
    "conv_fprop x=bf16[2,48,20,38]nhwc w=bf16[48,1,3,3] padding=1 stride=2 groups=48",
    "conv_fprop x=bf16[2,48,21,38]nhwc w=bf16[48,1,4,3] padding='((0,2),(2,1))' stride=2 groups=48",
    "conv_fprop x=bf16[1,16,21,37]nhwc w=bf16[16,1,5,5] padding=2 stride=2 groups=16",
    "conv_fprop x=bf16[1,72,12,70]nhwc w=bf16[72,1,3,3] padding='((2,0),(0,3))' dilation=2 groups=72",
    "conv_fprop x=bf16[1,32,5,9]nhwc w=bf16[32,1,3,2] padding='((9,8),(0,1))' groups=32 epilogue='relu(acc + bias[c])' bias=bf16[32]",
    "conv_fprop x=bf16[3,40,6,7]nhwc w=bf16[40,1,3,3] y=f16[3,40,6,7]nhwc padding=1 groups=40 epilogue='acc * 2 + z' z=f32[3,40,6,7]nhwc",
    "conv_fprop x=bf16[2,32,40]nhwc w=bf16[32,1,5] padding=2 groups=32",
    "conv_fprop x=bf16[2,40,139]nhwc w=bf16[40,1,4] padding='((3,0),)' groups=40 "
    "epilogue='silu(acc + bias[c]) + z' bias=f32[40] z=bf16[2,40,139]nhwc",
    "conv_fprop x=bf16[2,40,5,6,20]nhwc w=bf16[40,1,3,3,3] padding=1 groups=40 epilogue='relu(acc + bias[c])' bias=f32[40]",
    "conv_fprop x=f16[1,24,7,9,21]nhwc w=f16[24,1,3,2,3] padding='((2,0),(0,1),(1,1))' stride=2 groups=24",
    "conv_dgrad dy=bf16[2,24,4,6,9]nhwc w=bf16[24,1,3,3,3]nhwc x_shape=(2,24,4,6,9) padding=1 groups=24",
    "conv_wgrad x=bf16[2,40,4,6,20]nhwc dy=bf16[2,40,4,6,20]nhwc w_shape=(40,1,3,3,3) padding=1 groups=40",
    "conv_wgrad x=bf16[1,24,5,9,21]nhwc dy=bf16[1,24,3,5,11]nhwc w_shape=(24,1,2,3,3) padding=1 stride=2 groups=24",
    "conv_dgrad dy=f16[3,24,70]nhwc w=f16[24,1,4] x_shape=(3,24,70) padding='((3,0),)' groups=24",
    "conv_wgrad x=bf16[3,72,70]nhwc dy=bf16[3,72,35]nhwc w_shape=(72,1,5) padding=2 stride=2 groups=72",
    "conv_dgrad dy=bf16[2,64,9,20]nhwc w=bf16[64,1,3,3] x_shape=(2,64,9,20) padding=1 groups=64",
    "conv_dgrad dy=bf16[3,40,14,14]nhwc w=bf16[40,1,5,5]nhwc x_shape=(3,40,14,14) padding=2 groups=40",
    "conv_wgrad x=bf16[2,64,9,20]nhwc dy=bf16[2,64,9,20]nhwc w_shape=(64,1,3,3) padding=1 groups=64",
    "conv_wgrad x=f16[5,40,14,14]nhwc dy=f16[5,40,14,14]nhwc w_shape=(40,1,5,5) padding=2 groups=40",
    "conv_wgrad x=bf16[5,24,7,7]nhwc dy=bf16[5,24,7,7]nhwc w_shape=(24,1,7,7) padding=3 groups=24",
    "conv_wgrad x=bf16[2,48,20,38]nhwc dy=bf16[2,48,10,19]nhwc w_shape=(48,1,3,3) padding=1 stride=2 groups=48",
    "conv_wgrad x=bf16[1,16,21,37]nhwc dy=bf16[1,16,11,19]nhwc w_shape=(16,1,5,5) padding=2 stride=2 groups=16",
)


@pytest.mark.parametrize("line", LINES)
def test_against_the_reference(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    (engine,) = ENGINES[problem.op]
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    shapes = {}
    for config in engine.configs(problem, backend.info):
        shapes.setdefault((config["tiles"], config["segments"], config["groups"] > 4), config)
    first = dict(next(iter(shapes.values())).knobs)
    variants = [first | {"frees": True}] if problem.op.endswith("wgrad") else []
    for config in (*shapes.values(), *(EngineConfig.of(**knobs) for knobs in variants)):
        run_problem(backend, problem, engine, config, seed=len(line))


@pytest.mark.parametrize("layer", ("112,32,3,1", "112,96,3,2", "28,240,5,1", "14,672,5,2", "56,96,7,1", "7,768,7,1"))
@pytest.mark.parametrize("op", ("conv_fprop", "conv_wgrad"))
def test_layers_assemble_without_spills(op: str, layer: str) -> None:
    """CTAs of an SM are counted by an estimate of registers, which bounds what the assembler may take."""
    size, channels, taps, stride = map(int, layer.split(","))
    out = (size - 1) // stride + 1
    x, y = (f"bf16[128,{channels},{n},{n}]nhwc" for n in (size, out))
    attributes = f"stride={stride} padding={taps // 2} groups={channels}"
    problem = parse_case(f"conv_fprop x={x} w=bf16[{channels},1,{taps},{taps}] {attributes}" if op == "conv_fprop" else
                         f"conv_wgrad x={x} dy={y} w_shape=({channels},1,{taps},{taps}) {attributes}")
    device = known_device("sm_90a")
    (engine,) = ENGINES[op]
    shapes = {}
    for config in engine.configs(problem, device):
        shapes.setdefault((config["groups"], config["tiles"], config["segments"]), config)
    for config in shapes.values():
        step = engine.build_steps(problem, config, device).steps[0]
        assert assemble(render(step.spec), "sm_90a").spill_bytes == 0, config.name
