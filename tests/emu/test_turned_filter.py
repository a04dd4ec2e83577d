"""Convolutions whose filter a copy turns for wgmma: what goes with them, what is refused, and what the launches are."""

from __future__ import annotations

import pytest

from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dispatch.select import choose, verdict
from oxidnn.engines.base import Build, Engine
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

BACKEND = EmulatedBackend("sm_90a", checkers="all", schedule=("random", 5))
LAYER = "conv_dgrad dy=f32[32,256,28,28]nhwc w=f32[256,256,3,3]nhwc x_shape=(32,256,28,28) padding=1 math=tf32"


def turned(problem: Problem) -> Engine:
    return next(e for e in ENGINES[problem.op] if e.id == f"{problem.op}.turned_filter")


def templates(build: Build) -> list[str]:
    return [step.spec.template.split("/")[1] for step in build.steps]


@pytest.mark.parametrize("line", (
    # Filters along channels and along taps, backwards, of one element a tap; rows of 6 filters, behind which there is a gap; groups.
    "conv_dgrad dy=f32[2,32,7,6]nhwc w=f32[32,24,3,3]nhwc@4 x_shape=(2,24,7,6) padding=1 math=tf32",
    "conv_dgrad dy=f32[2,32,7,6]nhwc w=f32[32,24,3,3](216,9,-3,-1) x_shape=(2,24,7,6) padding=1 flip=True math=fast",
    "conv_dgrad dy=f32[2,32,7,6]nhwc w=f32[32,24,3,3](216,9,3,0) x_shape=(2,24,7,6) padding=1 math=tf32",
    "conv_dgrad dy=f32[2,6,7,6](336,1,48,8) w=f32[6,8,3,3]nhwc x_shape=(2,8,7,6) padding=1 math=tf32",
    "conv_dgrad dy=f32[2,64,5,6]nhwc w=f32[64,16,3,3]nhwc x_shape=(2,32,5,6) padding=2 dilation=2 groups=2 math=tf32",
    # Strides: classes of pixels in one launch, one that no tap reaches, windows that tile.
    "conv_dgrad dy=f32[2,20,5,5]nhwc w=f32[20,7,3,3]nhwc x_shape=(2,7,9,9) padding=1 stride=2 math=tf32",
    "conv_dgrad dy=f32[2,32,3,3]nhwc w=f32[32,16,1,1]nhwc x_shape=(2,16,8,7) stride=3 math=tf32",
    "conv_dgrad dy=f32[2,32,4,4]nhwc w=f32[32,12,2,2]nhwc x_shape=(2,12,8,8) stride=2 math=tf32",
    "conv_dgrad dy=f32[1,16,9]nhwc w=f32[16,9,4] x_shape=(1,9,18) padding=1 stride=2 math=tf32",
    "conv_dgrad dy=f32[1,16,3,3,3]nhwc w=f32[16,5,3,3,3] x_shape=(1,5,5,5,5) padding=1 stride=2 math=tf32",
    # Other types, other directions.
    "conv_dgrad dy=bf16[2,32,7,6]nhwc w=bf16[32,24,3,3] x_shape=(2,24,7,6) padding=1",
    "conv_dgrad dy=e5m2[1,16,5,5]nhwc w=e4m3[16,8,3,3] x_shape=(1,8,10,10) padding=1 stride=2 scale_dy=f32[1] scale_w=f32[8]",
    "conv_transpose x=s8[1,16,3,3]nhwc w=s8[16,4,3,3] stride=2 scale_x=f32[1] scale_w=f32[4] scale_y=f32[1] zero_y=s8[1] bias=s32[4]",
    "conv_fprop x=u8[1,32,6,6]nhwc w=s8[16,32,3,3] padding=1",
    "conv_transpose_dgrad dy=f32[2,32,9,8]nhwc w=f32[20,32,3,3] stride=2 math=tf32",
))
def test_results(line: str) -> None:
    problem = parse_case(line)
    engine = turned(problem)
    for seed, config in enumerate(engine.configs(problem, BACKEND.info)[::3]):
        run_problem(BACKEND, problem, engine, config, seed)


@pytest.mark.parametrize(("line", "steps"), (
    ("conv_transpose x=f32[2,16,7,6]nhwc w=f32[16,24,3,3]nhwc padding=1 return_stats=True math=tf32", ["copy", "wgmma_sm90", "combine"]),
    ("conv_transpose x=f32[2,16,4,3]nhwc w=f32[16,8,2,2]nhwc stride=2 return_stats=True return_amax=True math=tf32",
     ["copy", "clear_flags", "wgmma_sm90", "moments", "combine"]),
    ('conv_transpose x=f32[2,16,5,4]nhwc w=f32[16,24,3,3]nhwc bias=f32[24] residual=f32[2,24,7,6]nhwc '
     'epilogue="relu(t := acc + bias[c] + residual), t" math=tf32', ["copy", "wgmma_sm90"]),
    ('conv_dgrad dy=f32[1,32,3,4]nhwc w=f32[32,16,3,3]nhwc x_shape=(1,16,6,7) stride=2 padding=1 saved=f32[1,16,6,7]nhwc '
     'epilogue="where(saved > 0, acc, 0), acc" math=tf32', ["copy"] + 4 * ["wgmma_sm90"]),
))
def test_what_goes_with_them(line: str, steps: list[str]) -> None:
    """By-products come from the product, expressions and their operands pass through; every product waits for the launch before."""
    problem = parse_case(line)
    engine = turned(problem)
    build = engine.build_steps(problem, engine.configs(problem, BACKEND.info)[0], BACKEND.info)
    assert templates(build) == steps
    assert all(step.spec.follows for step in build.steps if step.spec.template == "matmul/wgmma_sm90")
    run_problem(BACKEND, problem, engine, aliases=True)


@pytest.mark.parametrize(("line", "words"), (
    ("conv_dgrad dy=bf16[2,32,7,6]nhwc w=bf16[32,24,1,1]nhwc x_shape=(2,24,7,6)", "turned_filter: igemm_wgmma_sm90 takes the filter as"),
    ("conv_dgrad dy=f32[2,32,7,6]nhwc w=f32[32,24,1,1]nhwc x_shape=(2,24,7,6)", 'wgmma_sm90 rounds f32 to tf32, which math="ieee"'),
    ("conv_dgrad dy=f32[2,32,7,6] w=f32[32,24,1,1]nhwc x_shape=(2,24,7,6) math=tf32", "wgmma_sm90: dy is contiguous neither along k"),
    ("conv_dgrad dy=f32[2,6,5,4]nhwc w=f32[6,8,3,3]nhwc x_shape=(2,8,7,6) math=tf32", "wgmma_sm90: dy: its bounds need an im2col map"),
    ("conv_dgrad dy=f32[1,0,2,2] w=f32[0,2,3,3] x_shape=(1,2,4,4) math=tf32", "there are no products to sum"),
    ('conv_fprop x=f32[2,8,7,6]nhwc w=f32[16,8,3,3] math=tf32 prologue="relu(x)"', "wgmma_sm90 takes no expressions over its input"),
    (f"{LAYER} workspace_limit=2359295", "needs more workspace than workspace_limit=2359295 bytes"),
))
def test_refusals(line: str, words: str) -> None:
    problem = parse_case(line)
    support = verdict(turned(problem), problem, known_device("sm_90a"))
    assert not support
    assert support.reason.startswith(words)


def test_other_devices_have_none() -> None:
    assert turned(parse_case(LAYER)).check_support(parse_case(LAYER), known_device("sm_80")).reason.endswith("the device is sm_80")


def test_layers_in_tf32_are_turned_untuned() -> None:
    problem = parse_case(f"{LAYER} workspace_limit=2359552")  # the filter, and 256 bytes for a product that takes none
    engine, config, _ = choose(problem, known_device("sm_90a"), None)
    assert engine.id == "conv_dgrad.turned_filter"
    build = engine.build_steps(problem, config, known_device("sm_90a"))
    assert templates(build) == ["tile", "wgmma_sm90"]
    small = parse_case("conv_dgrad dy=f32[1,512,7,7]nhwc w=f32[512,512,3,3]nhwc x_shape=(1,512,7,7) padding=1 math=tf32")
    assert choose(small, known_device("sm_90a"), None)[0].id == "conv_dgrad.igemm_mma_sm80"  # turning takes longer than it saves
