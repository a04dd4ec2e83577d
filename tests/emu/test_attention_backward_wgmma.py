"""Gradients of attention with wgmma: long walks over tiles, rings that turn, numbers that nobody may use."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.engines.attention_backward_wgmma import ENGINES, WgmmaBackwardEngine
from oxidnn.engines.base import Engine
from oxidnn.ops.attention import AttentionProblem
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import execute, run_problem

ADDING = WgmmaBackwardEngine()
APART, WIDE = ENGINES["attention_backward"][1:]


def problem(heads: int, groups: int, length: int, keys: int, dim: int, more: str = "", dim_v: int = 0, kind: str = "bf16",
            batch: int = 1) -> Problem:
    wide = dim_v or dim
    return parse_case(
        f"attention_backward d_out={kind}[{batch},{heads},{length},{wide}]nchw q={kind}[{batch},{heads},{length},{dim}]nchw "
        f"k={kind}[{batch},{groups},{keys},{dim}]nchw v={kind}[{batch},{groups},{keys},{wide}]nchw "
        f"out={kind}[{batch},{heads},{length},{wide}]nchw lse=f32[{batch},{heads},{length}] {more}")


def backend(seed: int) -> EmulatedBackend:
    return EmulatedBackend("sm_90a", checkers="all", schedule=("random", seed))


@pytest.mark.parametrize(("engine", "p"), [
    (ADDING, problem(2, 1, 460, 300, 64, "causal=top_left")),
    (ADDING, problem(3, 1, 150, 201, 128, kind="f16")),
    (ADDING, problem(2, 2, 130, 70, 80, "window=(40,30)", 40, batch=2)),
    (ADDING, problem(1, 1, 50, 300, 64, "causal=top_left")),  # keys that nobody sees
    (ADDING, problem(2, 1, 330, 290, 64, "causal=bottom_right lengths_q=s32[3] lengths_kv=s32[3]", batch=3)),
    (ADDING, problem(2, 2, 200, 250, 128, "lengths_kv=s32[2]", 96, "f16", 2)),
    (ADDING, problem(2, 1, 100, 90, 64, "sinks=bf16[2] causal=bottom_right")),
    (WIDE, problem(2, 1, 60, 90, 192, "sinks=f32[2]")),
    (APART, problem(2, 1, 460, 300, 64, "causal=bottom_right")),
    (APART, problem(2, 2, 200, 260, 128, "window=(90,20)", 32, "f16")),
    (WIDE, problem(2, 1, 270, 250, 256, "causal=bottom_right")),
    (WIDE, problem(2, 2, 130, 150, 136, "window=(40,30)", 200, "f16")),
])
def test_walks(engine: Engine, p: Problem) -> None:
    device = backend(len(p.operands))
    support = engine.check_support(p, device.info)
    assert support, support.reason
    run_problem(device, p, engine, engine.configs(p, device.info)[-1], seed=5)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("more", "seen"), [("", 80), ("causal=top_left", 33)])
def test_what_nobody_sees_is_not_used(dim: int, more: str, seen: int) -> None:
    """NaN in all tensors beyond the lengths, and in keys and values behind the last query's."""
    device = backend(1)
    p = problem(2, 1, 150, 190, dim, f"{more} lengths_q=s32[1] lengths_kv=s32[1]")
    assert isinstance(p, AttentionProblem)
    inputs = random_inputs(p, np.random.default_rng(0))
    inputs["lengths_q"][:], inputs["lengths_kv"][:] = 33, 80
    config = ADDING.configs(p, device.info)[0]
    clean = execute(device, p, ADDING, config, inputs)
    for name, first in (("q", 33), ("d_out", 33), ("out", 33), ("lse", 33), ("k", seen), ("v", seen)):
        inputs[name][:, :, first:] = np.nan
    got = execute(device, p, ADDING, config, inputs)
    for name, array in got.items():
        np.testing.assert_array_equal(array.astype(np.float32), clean[name].astype(np.float32), err_msg=name)
    assert not got["dk"][:, :, seen:].any() and not got["dv"][:, :, seen:].any() and not got["dq"][:, :, 33:].any()


@pytest.mark.parametrize("more", ["", "causal=bottom_right", "window=(300,0) causal=top_left", "lengths_q=s32[2] lengths_kv=s32[2]"])
@pytest.mark.parametrize("dim", [64, 128])
def test_products_are_not_serialised(dim: int, more: str) -> None:
    p, info = problem(4, 2, 300, 333, dim, more, batch=2), backend(0).info
    for step in ADDING.build_steps(p, ADDING.configs(p, info)[0], info).steps:
        assembled = assemble(render(step.spec), "sm_90a")
        assert "C75" not in assembled.log and assembled.spill_bytes == 0
