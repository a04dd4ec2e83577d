"""Gradients of attention with mma.sync: long walks over tiles, numbers that nobody may use, results that repeat."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from oxidnn.engines.attention_backward_mma import ENGINES, AttentionBackwardMma, AttentionBackwardMmaAdding
from oxidnn.engines.base import Engine
from oxidnn.ops.attention import AttentionProblem
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import execute, run_problem

ADDING, ORDERED = AttentionBackwardMmaAdding(), AttentionBackwardMma()


def problem(heads: int, groups: int, length: int, keys: int, dim: int, more: str = "", dim_v: int = 0, kind: str = "bf16",
            batch: int = 1) -> Problem:
    wide = dim_v or dim
    return parse_case(
        f"attention_backward d_out={kind}[{batch},{heads},{length},{wide}]nchw q={kind}[{batch},{heads},{length},{dim}]nchw "
        f"k={kind}[{batch},{groups},{keys},{dim}]nchw v={kind}[{batch},{groups},{keys},{wide}]nchw "
        f"out={kind}[{batch},{heads},{length},{wide}]nchw lse=f32[{batch},{heads},{length}] {more}")


@pytest.mark.parametrize("engine", ENGINES["attention_backward"], ids=lambda e: e.id)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("p", [
    problem(4, 2, 203, 151, 64, "causal=bottom_right window=(70,None)"),
    problem(2, 1, 150, 201, 128, "causal=top_left", kind="f16"),
    problem(3, 1, 140, 190, 80, "window=(20,9) lengths_q=s32[2] lengths_kv=s32[2]", 48, batch=2),
    problem(2, 2, 97, 130, 72, "dropout=0.25 softcap=3.0 bias=bf16[1,1,130] sinks=f32[2] causal=bottom_right"),
    problem(4, 2, 231, 199, 32, "cu_seqlens_q=s32[5] cu_seqlens_kv=s32[5] causal=bottom_right bias=bf16[4,4,1,1] sinks=f32[4]"),
], ids=["groups", "f16", "lengths", "scores", "sequences"])
def test_walks(engine: Engine, arch: str, p: Problem) -> None:
    """Under two schedules in turn: every first config under both."""
    backends = [EmulatedBackend(arch, checkers="all", schedule=schedule) for schedule in ("lowest_pc", ("random", 3))]
    for i, config in enumerate(engine.configs(p, backends[0].info)[:1 if arch == "sm_80" else None]):
        run_problem(backends[(i + (arch != "sm_80")) % 2], p, engine, config, seed=5)


@pytest.mark.parametrize("p", [problem(2, 1, 70, 75, 192), problem(1, 1, 41, 70, 256, "causal=bottom_right", 130)], ids=["192", "256"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86"])
def test_long_rows(p: Problem, arch: str) -> None:
    run_problem(EmulatedBackend(arch, checkers="all"), p, ORDERED)


@pytest.mark.parametrize("bias", ["2,40,45", "1,1,40,1", "2,1,1,45", "1,2,1,1", "1", "2,2,40,45"])
@pytest.mark.parametrize("kind", ["f16", "f32"])
def test_bias_of_every_extent(bias: str, kind: str) -> None:
    p = problem(2, 1, 40, 45, 16, f"bias={kind}[{bias}] causal=top_left", kind="f16", batch=2)
    run_problem(EmulatedBackend("sm_80", checkers="all"), p, ORDERED)


@pytest.mark.parametrize("engine", ENGINES["attention_backward"], ids=lambda e: e.id)
def test_what_nobody_sees_is_not_used(engine: Engine) -> None:
    """NaN in keys and values behind the last query's, and in all tensors beyond the lengths."""
    backend = EmulatedBackend("sm_90a", checkers="all")
    p = problem(2, 1, 40, 90, 32, "causal=top_left lengths_q=s32[1] lengths_kv=s32[1]")
    assert isinstance(p, AttentionProblem)
    inputs = random_inputs(p, np.random.default_rng(0))
    inputs["lengths_q"][:], inputs["lengths_kv"][:] = 33, 80
    clean = execute(backend, p, engine, engine.configs(p, backend.info)[0], inputs)
    for name, first in (("q", 33), ("d_out", 33), ("out", 33), ("k", 33), ("v", 33)):
        inputs[name][:, :, first:] = np.nan
    inputs["lse"][:, :, 33:] = np.nan
    got = execute(backend, p, engine, engine.configs(p, backend.info)[0], inputs)
    for name, array in got.items():
        np.testing.assert_array_equal(array.astype(np.float32), clean[name].astype(np.float32), err_msg=name)
    for name in ("dk", "dv"):
        assert not got[name][:, :, 33:].any()
    assert not got["dq"][:, :, 33:].any()


def test_ordered_sums_repeat() -> None:
    p = problem(4, 2, 150, 170, 64, "causal=bottom_right bias=f32[1,4,1,1]")
    inputs = random_inputs(p, np.random.default_rng(1))
    runs = []
    for schedule in ("lowest_pc", ("random", 1), ("random", 9)):
        backend = EmulatedBackend("sm_90a", schedule=schedule)
        runs.append(execute(backend, p, ORDERED, ORDERED.configs(p, backend.info)[0], inputs))
    for run in runs[1:]:
        for name, array in run.items():
            np.testing.assert_array_equal(array, runs[0][name], err_msg=name)


def test_refusals() -> None:
    backend = EmulatedBackend("sm_80")
    assert "f32" in ADDING.check_support(problem(1, 1, 4, 4, 8, kind="f32"), backend.info).reason
    assert "at most 128" in ADDING.check_support(problem(1, 1, 4, 4, 136), backend.info).reason
    assert "at most 256" in ORDERED.check_support(problem(1, 1, 4, 4, 264), backend.info).reason
    old = dataclasses.replace(backend.info, capability=(7, 5), arch="sm_75")
    assert "sm_80" in ORDERED.check_support(problem(1, 1, 4, 4, 8), old).reason
    assert ORDERED.is_deterministic and not ADDING.is_deterministic
