"""Attention of few queries: splits without keys, empty requests, values that nobody sees, rows that begin anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxidnn.engines import attention_decode
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import compare, exact, execute, run_problem
from oxidnn.testing.reference import REFERENCES

ENGINE = attention_decode.ENGINES["attention"][0]


def config(**knobs: Any) -> EngineConfig:
    return EngineConfig.of(**{"keys": 16, "team": 1, "warps": 4, "stages": 3, "splits": 1, **knobs})


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_what_lies_beyond_lengths_is_never_used(arch: str, splits: int) -> None:
    """Lengths of 0, 1, 17 and all; every unused row of keys and values is NaN."""
    problem = parse_case("attention q=bf16[4,6,1,64]nchw k=bf16[4,2,96,64]nchw v=bf16[4,2,96,64]nchw lengths_kv=s32[4] return_lse=True")
    inputs = random_inputs(problem, np.random.default_rng(1))
    inputs["lengths_kv"][:] = 0, 1, 17, 96
    want = REFERENCES["attention"](problem, exact(problem, inputs), {})
    for b, length in enumerate(inputs["lengths_kv"]):
        for name in ("k", "v"):
            inputs[name][b, :, length:] = np.nan
    got = execute(EmulatedBackend(arch, checkers="all"), problem, ENGINE, config(splits=splits), inputs)
    compare(problem, got, want)
    assert not got["out"][0].any() and np.isneginf(got["lse"][0]).all()


@pytest.mark.parametrize("case", [
    "attention q=bf16[1,3,4,32]nchw k=bf16[1,1,50,32]nchw v=bf16[1,1,50,32]nchw mask=bool[50]",
    "attention q=f16[1,2,1,32]nchw k=f16[1,1,50,32]nchw v=f16[1,1,50,32]nchw score='where(j < 20, -inf, score)'",
    "attention q=f16[1,2,2,32]nchw k=f16[1,1,50,32]nchw v=f16[1,1,50,32]nchw causal=bottom_right window=(7,None)",
])
def test_values_that_no_query_sees_are_never_used(case: str) -> None:
    problem = parse_case(case)
    inputs = random_inputs(problem, np.random.default_rng(2))
    seen = np.arange(50) >= (20 if "score" in case else 41)
    if "mask" in inputs:
        seen = inputs["mask"] = np.arange(50) % 3 != 0
    for name in ("k", "v"):
        inputs[name][:, :, ~seen] = np.inf
    want = REFERENCES["attention"](problem, exact(problem, inputs | {n: np.where(seen[:, None], inputs[n], 0) for n in ("k", "v")}), {})
    got = execute(EmulatedBackend("sm_90a", checkers="all"), problem, ENGINE, config(keys=32, splits=2), inputs)
    compare(problem, got, want)


@pytest.mark.parametrize(("team", "warps", "keys"), [(1, 4, 32), (1, 8, 16), (2, 4, 16), (4, 4, 32), (4, 8, 16)])
def test_teams_of_warps(team: int, warps: int, keys: int) -> None:
    """Rows that fill no tile, heads that are no power of two, a dimension of V that is not that of K, rows that no 16 bytes begin."""
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=("random", 3))
    for case in (f"attention q=bf16[1,3,{5 * team},72]nchw k=bf16[1,1,131,72]nchw v=bf16[1,1,131,40]nchw causal=bottom_right",
                 f"attention q=f16[2,4,{4 * team - 1},19]nchw k=f16[2,1,77,19]nchw v=f16[2,1,77,9]nchw sinks=f32[4] alibi=f32[4]"):
        for splits in (1, 3):
            run_problem(backend, parse_case(case), ENGINE, config(team=team, warps=warps, keys=keys, splits=splits))
