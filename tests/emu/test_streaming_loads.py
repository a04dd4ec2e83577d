"""Loads that leave the L2 first, of what is larger than it: every config of the engines that read only."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oxidnn.dispatch.registry import engines_for
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem


@pytest.mark.parametrize("line", [
    "cross_entropy logits=bf16[5,1001] target=s64[5]", "cross_entropy logits=f32[9,250] target=s64[9] reduction=none",
    "cross_entropy logits=f16[3,9000] target=s64[3]", "reduce x=bf16[7,1000] op=sum axes=(1,)", "reduce x=f32[500,9] op=max axes=(0,)",
    "reduce x=f16[33,77] op=var axes=(0,1)", "loss x=bf16[9,333] target=bf16[9,333] name=mse",
])
def test_every_config(line: str) -> None:
    problem = parse_case(line)
    for arch in ("sm_80", "sm_90a"):
        backend = EmulatedBackend(arch, checkers="all")
        backend.info = replace(backend.info, l2_bytes=0)
        for engine in engines_for(problem.op):
            if engine.check_support(problem, backend.info):
                for config in engine.configs(problem, backend.info):
                    run_problem(backend, problem, engine, config)
