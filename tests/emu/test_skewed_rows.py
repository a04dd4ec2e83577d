"""Rows that begin between the addresses of packs, moved by packs all the same: every config that does so, odd lengths, steps, every type,
NaN beside a row, in place."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.backend import Backend
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

LINES = [
    "softmax x=bf16[9,1001]",
    "softmax x=f16[17,61] log=True",
    "softmax x=f32[5,3001]",
    "softmax x=bf16[3,5,515]",
    "softmax x=bf16[2,20011]",
    "softmax_backward dy=bf16[9,1001] y=bf16[9,1001]",
    "softmax_backward dy=f32[5,777] y=f32[5,777] log=True",
    "layer_norm x=bf16[9,1001] gamma=bf16[1001] beta=bf16[1001] return_stats=True",
    "layer_norm x=f16[9,1003] gamma=f32[1003] return_stats=True",
    "layer_norm x=f32[6,3001] residual=f32[6,3001] gamma=f32[3001] return_sum=True",
    "layer_norm x=bf16[9,100](107,1) y=bf16[9,100](115,1) gamma=f16[100] beta=bf16[100]",
    "layer_norm x=bf16[1,12289] gamma=bf16[12289] epilogue='silu(acc)'",
    "rms_norm x=bf16[9,1001] gamma=bf16[1001]",
    "rms_norm x=f16[3,20011] gamma=f16[20011]",
    "cross_entropy logits=bf16[9,1001] target=s64[9] reduction=none",
    "cross_entropy logits=bf16[3,9001] target=s64[3]",
    "cross_entropy_backward logits=f16[9,1001] target=s64[9] weight=f32[1001]",
    "layer_norm_backward dy=bf16[37,1001] x=bf16[37,1001] mean=f32[37] rstd=f32[37] gamma=bf16[1001]",
    "layer_norm_backward dy=f16[19,12289] x=f16[19,12289] mean=f32[19] rstd=f32[19] gamma=f32[12289]",
    "rms_norm_backward dy=f32[21,3001] x=f32[21,3001] rstd=f32[21] gamma=f32[3001]",
    "layer_norm_backward dy=bf16[50,1033] x=bf16[50,1033] mean=f32[50] rstd=f32[50] gamma=bf16[1033]",  # CTAs' rows change their skew
    "rms_norm_backward dy=bf16[16,1537] x=bf16[16,1537] rstd=f32[16] gamma=bf16[1537]",  # a skew's rows end with a CTA's
    "rms_norm_backward dy=bf16[3,2003] x=bf16[3,2003] rstd=f32[3] gamma=bf16[2003]",
]


def skewed_configs(problem: Problem, backend: Backend) -> list[EngineConfig]:
    return [c for c in ENGINES[problem.op][0].configs(problem, backend.info) if c["home"].startswith("skewed")]


@pytest.mark.parametrize("line", LINES)
def test_every_config(line: str) -> None:
    problem = parse_case(line)
    engine = ENGINES[problem.op][0]
    for arch, schedule in (("sm_90a", ("random", 3)), ("sm_80", "lowest_pc")):
        backend = EmulatedBackend(arch, checkers="all", schedule=schedule)
        configs = skewed_configs(problem, backend)
        assert configs or arch == "sm_80"
        for seed, config in enumerate(configs):
            run_problem(backend, problem, engine, config, seed=seed, aliases=arch == "sm_80")
            for step in engine.build_steps(problem, config, backend.info).steps:
                assembled = assemble(render(step.spec), arch)
                assert assembled.spill_bytes == 0, (config, step.spec.describe())


@pytest.mark.parametrize("line", LINES)
def test_nan_stays_in_its_row(line: str) -> None:
    problem = parse_case(line)
    engine, backend = ENGINES[problem.op][0], EmulatedBackend("sm_90a")
    first = next(o for o in problem.inputs if o.desc.rank > 1 and o.desc.dtype.is_float)
    if first.desc.shape[0] < 3:
        return
    rng = np.random.default_rng(2)
    inputs = {o.name: (rng.integers(0, 50, o.desc.shape) if not o.desc.dtype.is_float else rng.uniform(0.1, 0.9, o.desc.shape)
                       ).astype(o.desc.dtype.numpy) for o in problem.inputs}
    inputs[first.name][1] = np.nan
    for config in skewed_configs(problem, backend):
        outputs = execute(backend, problem, engine, config, inputs)
        for name, out in outputs.items():
            if out.shape[:1] == first.desc.shape[:1]:
                is_nan = np.isnan(out.astype(np.float64))
                assert is_nan[1].all() and not is_nan[0].any() and not is_nan[2:].any(), name
