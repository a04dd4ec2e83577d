"""The one-launch group norm: every way to deal out a sample, groups that cut packs, uneven rows, constant groups, NaN."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.engines.channel_resident import ChannelNormResident, ChannelNormResidentBackward
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

ENGINE = ChannelNormResident()
CASES = (
    "group_norm x=bf16[2,64,6,6]nhwc gamma=f32[64] beta=f32[64] groups=4 return_stats=True",
    "group_norm x=bf16[2,80,7,6]nhwc gamma=f32[80] groups=8 return_stats=True",
    "group_norm x=f16[2,80,20,20]nhwc gamma=f32[80] groups=4 return_stats=True epilogue='silu(acc)'",
    "group_norm x=f32[2,40,30,30]nhwc gamma=f32[40] groups=4 return_stats=True",
    "group_norm x=f32[1,24,70,70]nhwc groups=12 return_stats=True",
    "group_norm x=bf16[1,320,20,20]nhwc groups=32 residual=bf16[1,320,20,20]nhwc",
    "group_norm x=bf16[1,8,301]nhwc groups=1 return_stats=True",
    "group_norm x=bf16[3,16,3]nhwc groups=8 beta=f32[16] epilogue='relu(acc)' return_mask=True",
    "instance_norm x=bf16[2,64,6,6]nhwc gamma=bf16[64] beta=bf16[64] return_stats=True",
    "batch_norm x=bf16[5,64,6,6]nhwc gamma=f32[64] beta=f32[64] running_mean=f32[64] running_var=f32[64] training=True return_stats=True",
    "batch_norm x=f16[70,40]nchw running_mean=f16[40] running_var=f16[40] training=True momentum=0.3 epilogue='silu(acc)'",
    "batch_norm x=f16[3,24,9,7]nhwc beta=f32[24] training=True return_stats=True epilogue='relu(acc)' return_mask=True",
    "batch_norm x=bf16[3,16,20,20]nhwc gamma=bf16[16] residual=bf16[3,16,20,20]nhwc training=True return_stats=True",
    "instance_norm x=f16[1,8,2,3,50]nhwc y=f16[1,8,2,3,50](2400,1,1200,400,8)",
)


@pytest.mark.parametrize("line", CASES)
def test_every_config(line: str) -> None:
    """Under one of two schedules in turn."""
    problem = parse_case(line)
    backends = [EmulatedBackend("sm_90a", checkers="all", schedule=schedule) for schedule in ("lowest_pc", ("random", 3))]
    assert ENGINE.check_support(problem, backends[0].info)
    for seed, config in enumerate(ENGINE.configs(problem, backends[0].info)):
        backend = backends[(seed + CASES.index(line)) % 2]
        run_problem(backend, problem, ENGINE, config, seed=seed, aliases=True)
        step = ENGINE.build_steps(problem, config, backend.info).steps[0]
        assert assemble(render(step.spec), "sm_90a").spill_bytes == 0, config


GRADIENT = ChannelNormResidentBackward()
GRADIENTS = (
    "group_norm_backward dy=bf16[2,64,6,6]nhwc x=bf16[2,64,6,6]nhwc mean=f32[2,4] rstd=f32[2,4] gamma=f32[64] groups=4",
    "group_norm_backward dy=bf16[2,80,7,6]nhwc x=bf16[2,80,7,6]nhwc mean=f32[2,8] rstd=f32[2,8] gamma=bf16[80] groups=8",
    "group_norm_backward dy=f16[3,80,20,20]nhwc x=f16[3,80,20,20]nhwc mean=f32[3,4] rstd=f32[3,4] groups=4",
    "group_norm_backward dy=f32[2,40,30,30]nhwc x=f32[2,40,30,30]nhwc mean=f32[2,4] rstd=f32[2,4] gamma=f32[40] groups=4",
    "group_norm_backward dy=bf16[1,16,301]nhwc x=bf16[1,16,301]nhwc mean=f32[1,8] rstd=f32[1,8] gamma=f32[16] groups=8",
    "instance_norm_backward dy=bf16[2,64,6,6]nhwc x=bf16[2,64,6,6]nhwc mean=f32[2,64] rstd=f32[2,64] gamma=f32[64]",
)


@pytest.mark.parametrize("line", GRADIENTS)
def test_every_config_of_the_gradient(line: str) -> None:
    problem = parse_case(line)
    outputs = []
    for schedule in ("lowest_pc", ("random", 3)):
        backend = EmulatedBackend("sm_90a", checkers="all", schedule=schedule)
        support = GRADIENT.check_support(problem, backend.info)
        assert support, support
        for config in GRADIENT.configs(problem, backend.info):
            outputs.append(run_problem(backend, problem, GRADIENT, config, seed=1, aliases=schedule != "lowest_pc").outputs)
            for step in GRADIENT.build_steps(problem, config, backend.info).steps if schedule == "lowest_pc" else ():
                assert assemble(render(step.spec), "sm_90a").spill_bytes == 0, config
    half = len(outputs) // 2
    for first, second in zip(outputs[:half], outputs[half:], strict=True):  # sums in a fixed order
        assert all(first[n].tobytes() == second[n].tobytes() for n in first)


def test_samples_are_dealt_out_to_one_cta_and_to_clusters() -> None:
    info = EmulatedBackend("sm_90a").info
    found = {c["cluster"] for line in CASES for c in ENGINE.configs(parse_case(line), info)}
    assert {1, 2, 8} <= found


@pytest.mark.parametrize("line", [line for line in CASES[:5] if line.startswith("group")])
def test_constant_groups_give_beta_and_nan_stays_in_its_group(line: str) -> None:
    backend = EmulatedBackend("sm_90a")
    problem = parse_case(line)
    x = np.random.default_rng(5).standard_normal(problem.desc("x").shape)
    width = problem.width  # type: ignore[attr-defined]
    x[0, :width], x[0, width, 0] = 0.7, np.nan
    inputs = {o.name: np.full(o.desc.shape, 0.25, o.desc.dtype.numpy) for o in problem.inputs}
    inputs["x"] = x.astype(problem.desc("x").dtype.numpy)
    for config in ENGINE.configs(problem, backend.info):
        out = execute(backend, problem, ENGINE, config, inputs)
        y, beta = out["y"].astype(np.float64), 0.25 if problem.has("beta") else 0.0
        assert (y[0, :width] == (0.0 if "silu" in line else beta)).all()
        assert np.isnan(y[0, width:2 * width]).all() and np.isfinite(y[0, 2 * width:]).all()
        assert out["rstd"][0, 0] == np.float32(1 / np.sqrt(np.float32(1e-5)))


@pytest.mark.parametrize(("line", "reason"), [
    ("group_norm x=bf16[2,64,6,6]nchw groups=4", "innermost"), ("group_norm x=f64[2,64,6,6]nhwc groups=4", "f32, f16 or bf16"),
    ("group_norm x=bf16[2,24,6,6]nhwc groups=8", "divide no pack"), ("group_norm x=bf16[1,16,400,400]nhwc groups=2", "more than a cluster"),
])
def test_refusals(line: str, reason: str) -> None:
    assert reason in ENGINE.check_support(parse_case(line), EmulatedBackend("sm_90a").info).reason
