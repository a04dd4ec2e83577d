"""Rows whose CTAs or clusters stay: each is written once the next one's sums have gone out. More rows than stages, rows that do not fill
the threads, special values, the same bits under any schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

LINES = (
    "layer_norm x=bf16[13,4104] gamma=bf16[4104] beta=bf16[4104] return_stats=True",
    "layer_norm x=f32[13,2052] gamma=f32[2052] beta=f32[2052]",
    "layer_norm x=f16[13,2064] y=f32[13,2064] beta=f16[2064]", "layer_norm x=f64[13,1030] gamma=f64[1030]",
    "rms_norm x=bf16[13,4096] gamma=f32[4096]",
    "rms_norm x=f32[13,1100] gamma=f32[1100] zero_centered=True return_stats=True", "layer_norm x=bf16[2,4104]",
    "softmax x=bf16[13,4104]", "softmax x=f32[13,2000] log=True", "softmax x=f64[13,1026]",
    "cross_entropy_backward logits=bf16[13,4104] target=s64[13]",
    "cross_entropy_backward logits=f16[13,2064] target=s32[13] weight=f16[2064] d_loss=f16[]",
    "cross_entropy_backward logits=f32[13,2052] target=s64[13] weight=f32[2052] d_loss=f32[13] reduction=none",
    "cross_entropy_backward logits=f64[13,1030] target=s32[13] reduction=sum",
    "layer_norm_backward dy=bf16[25,4104] x=bf16[25,4104] mean=f32[25] rstd=f32[25] gamma=bf16[4104]",
    "rms_norm_backward dy=f32[25,2052] x=f32[25,2052] rstd=f32[25] gamma=f32[2052]",
)


def on_few_sms(schedule: Any) -> EmulatedBackend:
    """A CTA or cluster walks more rows than its ring has stages."""
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=schedule)
    backend.info = replace(backend.info, num_sms=2)
    return backend


def ring_configs(problem: Problem, backend: EmulatedBackend) -> list[tuple[Engine, EngineConfig]]:
    return [(e, c) for e in ENGINES[problem.op] for c in e.configs(problem, backend.info) if "behind" in dict(c.knobs)]


@pytest.mark.parametrize("line", LINES)
def test_every_config(line: str) -> None:
    """Under one of two schedules in turn."""
    problem, backends = parse_case(line), [on_few_sms(("random", 5)), on_few_sms("lowest_pc")]
    configs = ring_configs(problem, backends[0])
    assert configs
    for i, (engine, config) in enumerate(configs, LINES.index(line)):
        run_problem(backends[i % 2], problem, engine, config, seed=3)


@pytest.mark.parametrize("line", [LINES[0], LINES[7], LINES[10], LINES[14]])
def test_the_same_bits_under_any_schedule(line: str) -> None:
    problem = parse_case(line)
    rng = np.random.default_rng(1)
    inputs = {o.name: rng.integers(0, 100, o.desc.shape).astype(o.desc.dtype.numpy) if o.desc.dtype.name == "s64" else
              rng.standard_normal(o.desc.shape).astype(o.desc.dtype.numpy) for o in problem.inputs}
    backends = [on_few_sms("lowest_pc"), on_few_sms(("random", 2))]
    for engine, config in ring_configs(problem, backends[0])[::2]:
        first, second = (execute(b, problem, engine, config, inputs) for b in backends)
        assert all(first[n].tobytes() == second[n].tobytes() for n in first), config.name


def test_special_rows_of_layer_norm() -> None:
    """A constant row gives beta itself; a NaN, and an infinity, stay in their rows."""
    problem, backend = parse_case("layer_norm x=f32[9,2052] gamma=f32[2052] beta=f32[2052]"), on_few_sms("lowest_pc")
    rng = np.random.default_rng(2)
    x = rng.standard_normal((9, 2052)).astype(np.float32)
    x[1], x[4, 77], x[6, 2051] = 1000.1, np.nan, np.inf
    gamma, beta = (rng.standard_normal(2052).astype(np.float32) for _ in range(2))
    for engine, config in ring_configs(problem, backend):
        y = execute(backend, problem, engine, config, {"x": x, "gamma": gamma, "beta": beta})["y"]
        np.testing.assert_array_equal(y[1], beta)
        assert np.isnan(y[[4, 6]]).all() and np.isfinite(np.delete(y, [4, 6], 0)).all()


def test_a_large_mean_costs_no_digits() -> None:
    problem, backend = parse_case("layer_norm x=f32[3,4096] return_stats=True"), on_few_sms("lowest_pc")
    x = (np.float32(4096.0) + np.random.default_rng(3).integers(-64, 65, (3, 4096)).astype(np.float32) / 1024).astype(np.float32)
    x[:, :1024] += 8  # warps whose means differ
    want = 1 / np.sqrt(x.astype(np.float64).var(1) + 1e-5)
    for engine, config in ring_configs(problem, backend):
        got = execute(backend, problem, engine, config, {"x": x})["rstd"]
        np.testing.assert_allclose(got.reshape(-1), want, rtol=1e-6)


def test_special_rows_of_softmax() -> None:
    problem, backend = parse_case("softmax x=f32[6,2052]"), on_few_sms("lowest_pc")
    x = np.random.default_rng(4).standard_normal((6, 2052)).astype(np.float32)
    x[1, :2048], x[2], x[3, 5], x[4] = -np.inf, -np.inf, np.nan, 3e38
    for engine, config in ring_configs(problem, backend):
        y = execute(backend, problem, engine, config, {"x": x})["y"]
        assert np.isnan(y[[2, 3]]).all() and (y[1, :2048] == 0).all()
        np.testing.assert_allclose(y[[0, 1, 4, 5]].sum(1), 1, rtol=1e-5)


def test_targets_that_are_ignored_or_no_class() -> None:
    """A row of the first is 0 whatever its logits are, one of the second NaN."""
    problem = parse_case("cross_entropy_backward logits=f32[7,2052] target=s64[7] ignore_index=-100 reduction=sum")
    backend, rng = on_few_sms("lowest_pc"), np.random.default_rng(5)
    logits, target = rng.standard_normal((7, 2052)).astype(np.float32), rng.integers(0, 2052, 7)
    logits[2, 3], target[2], target[4], target[5] = np.nan, -100, 2052, -1
    for engine, config in ring_configs(problem, backend):
        d = execute(backend, problem, engine, config, {"logits": logits, "target": target})["d_logits"]
        assert (d[2] == 0).all() and np.isnan(d[[4, 5]]).all() and np.isfinite(d[[0, 1, 3, 6]]).all()
        np.testing.assert_allclose(d[[0, 1, 3, 6]].sum(1), 0, atol=1e-5)
