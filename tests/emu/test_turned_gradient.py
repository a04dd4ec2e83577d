"""Filter gradients in tf32 of dy turned by a copy, in the emulator with all checkers, against float64 references, on a device of two SMs:
rings wrap, and several tiles have several parts."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dispatch.select import choose
from oxidnn.engines.base import Engine
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem


def turned(problem: Problem) -> Engine:
    return next(e for e in ENGINES[problem.op] if e.id == f"{problem.op}.turned_gradient")


@pytest.mark.parametrize("line", (
    # Channels and filters that end within boxes, tiles and lines; positions that end within a k tile; rings twice over.
    "conv_wgrad x=f32[2,36,9,8]nhwc dy=f32[2,70,7,8]nhwc w_shape=(70,36,3,2) padding=((1,1),(0,2)) dilation=(2,2) math=fast",
    "conv_wgrad x=f32[2,40,8,9]nhwc dy=f32[2,136,8,9]nhwc w_shape=(136,40,2,1) padding=((1,0),(0,0)) math=tf32",
    "conv_wgrad x=f32[4,8,13,11]nhwc dy=f32[4,5,13,11]nhwc w_shape=(5,8,1,1) math=tf32",
    # Steps, taps that never leave the image, single positions; one and three dimensions; dy in another order.
    "conv_wgrad x=f32[2,20,7,6]nhwc dy=f32[2,24,4,3]nhwc w_shape=(24,20,3,3) padding=1 stride=2 math=tf32",
    "conv_wgrad x=f32[2,8,7,6]nhwc dy=f32[2,8,5,4] w_shape=(8,8,3,3) math=tf32",
    "conv_wgrad x=f32[2,4,5,6]nhwc dy=f32[2,3,1,1] w_shape=(3,4,5,6) math=tf32",
    "conv_wgrad x=f32[2,8,10]nhwc dy=f32[2,5,5] w_shape=(5,8,4) padding=((1,1),) stride=2 math=tf32",
    "conv_wgrad x=f32[1,8,5,4,5]nhwc dy=f32[1,16,3,2,3]nhwc w_shape=(16,8,3,3,3) padding=1 stride=2 math=tf32",
    # Gaps behind the channels; flipped taps; gradients in another type and order, with the bias's.
    "conv_wgrad x=f32[2,6,7,6](336,1,48,8) dy=f32[2,8,7,6]nhwc w_shape=(8,6,3,3) padding=1 math=tf32",
    "conv_wgrad x=f32[2,32,7,6]nhwc dy=f32[2,24,7,6]nhwc dw=f32[24,32,3,3]nhwc padding=1 flip=True math=tf32",
    "conv_wgrad x=f32[2,32,7,6]nhwc dy=f32[2,24,7,6]nhwc dw=bf16[24,32,3,3](1,24,2304,768) padding=1 math=tf32 return_bias_grad=True",
    "conv_transpose_wgrad dy=f32[2,32,9,9]nhwc x=f32[2,20,5,5]nhwc w_shape=(20,32,3,3) stride=2 padding=1 math=tf32",
))
def test_results(line: str) -> None:
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=("random", 5))
    backend.info = replace(backend.info, num_sms=2)
    problem = parse_case(line)
    engine = turned(problem)
    for seed, config in enumerate({(c["tile_m"], c["tile_n"]): c for c in engine.configs(problem, backend.info)}.values()):
        run_problem(backend, problem, engine, config, seed)


LAYER = "conv_wgrad x=f32[32,256,28,28]nhwc dy=f32[32,256,28,28]nhwc w_shape=(256,256,3,3) padding=1 math=tf32"


def test_every_tile_assembles_without_spills_and_keeps_products_under_way() -> None:
    device, problem = known_device("sm_90a"), parse_case(LAYER)
    engine, tiles = turned(problem), {}
    for config in engine.configs(problem, device):
        tiles.setdefault((config["tile_m"], config["tile_n"]), config)
    assert len(tiles) == 5
    for config in tiles.values():
        product = engine.build_steps(problem, config, device).steps[1]
        assert product.spec.follows
        result = assemble(render(product.spec), "sm_90a")
        assert result.spill_bytes == 0 and not re.search(r"C75(?!04)\d\d|C76\d\d", result.log), result.log


def test_layers_in_tf32_take_it_untuned() -> None:
    problem = parse_case(LAYER)
    engine, config, _ = choose(problem, known_device("sm_90a"), None)
    assert engine.id == "conv_wgrad.turned_gradient"
    steps = engine.build_steps(problem, config, known_device("sm_90a")).steps
    assert [s.spec.template for s in steps] == ["layout/tile", "conv/turned_gradient_sm90", "matmul/split_k_reduce"]


@pytest.mark.parametrize(("line", "words"), (
    ("x=f32[2,8,7,6]nhwc dy=f32[2,8,7,6]nhwc w_shape=(8,8,1,1)", 'takes f32 with math="tf32" or "fast", not f32 with "ieee"'),
    ("x=bf16[2,8,7,6]nhwc dy=bf16[2,8,7,6]nhwc w_shape=(8,8,1,1) math=tf32", 'takes f32 with math="tf32" or "fast", not bf16'),
    ("x=f32[2,8,7,6]nhwc dy=f32[2,8,7,6]nhwc w_shape=(8,4,1,1) groups=2 math=tf32", "takes one group, not 2"),
    ("x=f32[2,8,7,6] dy=f32[2,8,7,6]nhwc w_shape=(8,8,1,1) math=tf32", "the channels of x are not contiguous"),
    ("x=f32[2,6,7,6]nhwc dy=f32[2,8,7,6]nhwc w_shape=(8,6,1,1) math=tf32", "a stride of 24 bytes of x is no positive multiple of 16"),
    ("x=f32[2,8,7,19]nhwc dy=f32[2,8,7,3]nhwc w_shape=(8,8,1,1) stride=(1,9) math=tf32", "a step of 9 exceeds 8"),
    ("x=f32[65,8,1024,1024]nhwc dy=f32[65,8,1024,1024]nhwc w_shape=(8,8,1,1) math=tf32", "2181038080 bytes of dy turned (at most 2"),
    ('x=f32[2,8,7,6]nhwc dy=f32[2,8,7,6]nhwc w_shape=(8,8,1,1) math=tf32 prologue="relu(x)"', "takes no expressions over its input"),
    ("x=f32[0,8,7,6]nhwc dy=f32[0,8,7,6]nhwc w_shape=(8,8,1,1) math=tf32", "there are no products to sum"),
))
def test_refusals(line: str, words: str) -> None:
    problem = parse_case(f"conv_wgrad {line}")
    support = turned(problem).check_support(problem, known_device("sm_90a"))
    assert not support
    assert words in support.reason
