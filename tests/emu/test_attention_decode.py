"""Attention of few queries: splits without keys, empty requests, values that nobody sees, rows that begin anywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxidnn.engines import attention_decode
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import compare, exact, execute, run_problem
from oxidnn.testing.reference import REFERENCES

ENGINE, BOXES = attention_decode.ENGINES["attention"]  # of both ops: by cp.async, by tensor copies
SIDES = [("sm_80", ENGINE), ("sm_90a", ENGINE), ("sm_90a", BOXES)]


def config(**knobs: Any) -> EngineConfig:
    return EngineConfig.of(**{"keys": 16, "team": 1, "warps": 4, "stages": 3, "splits": 1, **knobs})


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize(("arch", "engine"), SIDES)
def test_what_lies_beyond_lengths_is_never_used(arch: str, engine: Engine, splits: int) -> None:
    """Lengths of 0, 1, 17 and all; every unused row of keys and values is NaN."""
    problem = parse_case("attention q=bf16[4,6,1,64]nchw k=bf16[4,2,96,64]nchw v=bf16[4,2,96,64]nchw lengths_kv=s32[4] return_lse=True")
    inputs = random_inputs(problem, np.random.default_rng(1))
    inputs["lengths_kv"][:] = 0, 1, 17, 96
    want = REFERENCES["attention"](problem, exact(problem, inputs), {})
    for b, length in enumerate(inputs["lengths_kv"]):
        for name in ("k", "v"):
            inputs[name][b, :, length:] = np.nan
    got = execute(EmulatedBackend(arch, checkers="all"), problem, engine, config(splits=splits), inputs)
    compare(problem, got, want)
    assert not got["out"][0].any() and np.isneginf(got["lse"][0]).all()


@pytest.mark.parametrize("case", [
    "attention q=bf16[1,3,4,32]nchw k=bf16[1,1,50,32]nchw v=bf16[1,1,50,32]nchw mask=bool[50]",
    "attention q=f16[1,2,1,32]nchw k=f16[1,1,50,32]nchw v=f16[1,1,50,32]nchw score='where(j < 20, -inf, score)'",
    "attention q=f16[1,2,2,32]nchw k=f16[1,1,50,32]nchw v=f16[1,1,50,32]nchw causal=bottom_right window=(7,None)",
])
@pytest.mark.parametrize("engine", [ENGINE, BOXES])
def test_values_that_no_query_sees_are_never_used(case: str, engine: Engine) -> None:
    problem = parse_case(case)
    inputs = random_inputs(problem, np.random.default_rng(2))
    seen = np.arange(50) >= (20 if "score" in case else 41)
    if "mask" in inputs:
        seen = inputs["mask"] = np.arange(50) % 3 != 0
    for name in ("k", "v"):
        inputs[name][:, :, ~seen] = np.inf
    want = REFERENCES["attention"](problem, exact(problem, inputs | {n: np.where(seen[:, None], inputs[n], 0) for n in ("k", "v")}), {})
    got = execute(EmulatedBackend("sm_90a", checkers="all"), problem, engine, config(keys=32, splits=2), inputs)
    compare(problem, got, want)


@pytest.mark.parametrize(("team", "warps", "keys"), [(1, 4, 32), (1, 8, 16), (2, 4, 16), (4, 4, 32), (4, 8, 16)])
def test_teams_of_warps(team: int, warps: int, keys: int) -> None:
    """Rows that fill no tile, heads that are no power of two, a dimension of V that is not that of K, rows that no 16 bytes begin."""
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=("random", 3))
    for case in (f"attention q=bf16[1,3,{5 * team},72]nchw k=bf16[1,1,131,72]nchw v=bf16[1,1,131,40]nchw causal=bottom_right",
                 f"attention q=f16[2,4,{4 * team - 1},19]nchw k=f16[2,1,77,19]nchw v=f16[2,1,77,9]nchw sinks=f32[4] alibi=f32[4]"):
        for splits in (1, 3):
            for engine in (ENGINE, BOXES) if BOXES.check_support(parse_case(case), backend.info) else (ENGINE,):
                run_problem(backend, parse_case(case), engine, config(team=team, warps=warps, keys=keys, splits=splits))


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("kind", ["bf16", "e4m3"])
@pytest.mark.parametrize("engine", [ENGINE, BOXES])
def test_pages_whose_unused_slots_hold_nan(engine: Engine, kind: str, splits: int) -> None:
    """Pages of 16, lengths of 17 and 0; the table's unused entries are no pages. The same bits as attention over the gathered keys."""
    problem = parse_case(f"paged_attention q=bf16[2,4,1,64]nchw k_cache={kind}[9,2,16,64](2048,64,128,1) v_cache={kind}[9,2,16,64]nchw "
                         f"page_table=s32[2,4] lengths_kv=s32[2] num_splits={splits} return_lse=True")
    inputs = random_inputs(problem, np.random.default_rng(3))
    inputs["page_table"][:] = [[5, 2, -7, 1 << 30], [-1, -1, -1, -1]]
    inputs["lengths_kv"][:] = 17, 0
    for name in ("k_cache", "v_cache"):
        kept = inputs[name].copy()
        inputs[name][...] = np.nan
        inputs[name][5], inputs[name][2, :, 0] = kept[5], kept[2, :, 0]
    backend = EmulatedBackend("sm_90a", checkers="all")
    got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], inputs)
    assert not got["out"][1].any() and np.isneginf(got["lse"][1]).all()
    plain = parse_case("attention q=bf16[1,4,1,64]nchw k=bf16[1,2,17,64]nchw v=bf16[1,2,17,64]nchw return_lse=True")
    k, v = (np.concatenate((inputs[n][5], inputs[n][2, :, :1]), axis=1)[None].astype(inputs["q"].dtype) for n in ("k_cache", "v_cache"))
    gathered = {"q": inputs["q"][:1], "k": k, "v": v}
    want = REFERENCES["attention"](plain, exact(plain, gathered), {})
    compare(plain, {name: a[:1] for name, a in got.items()}, want)


@pytest.mark.parametrize("page", [16, 32])
def test_windows_over_pages(page: int) -> None:
    """Boxes begin with a page's keys, some of which no query sees; these and all unused slots hold NaN."""
    problem = parse_case(f"paged_attention q=bf16[2,4,3,64]nchw k_cache=bf16[12,2,{page},64]nchw v_cache=bf16[12,2,{page},64]nchw "
                         "page_table=s32[2,6] lengths_kv=s32[2] window=(21,None) causal=bottom_right")
    rng = np.random.default_rng(6)
    inputs = random_inputs(problem, rng)
    inputs["page_table"][:] = rng.permutation(12).reshape(2, 6)
    inputs["lengths_kv"][:] = 5 * page + 9, 40
    want = REFERENCES["paged_attention"](problem, exact(problem, inputs), {})
    for b, length in enumerate(inputs["lengths_kv"]):
        for key in (*range(length - 24), *range(length, 6 * page)):
            for name in ("k_cache", "v_cache"):
                inputs[name][inputs["page_table"][b, key // page], :, key % page] = np.nan
    for keys in (16, page):
        for knobs in ({"warps": 2, "stages": 2}, {"splits": 2}):
            got = execute(EmulatedBackend("sm_90a", checkers="all"), problem, BOXES, config(keys=keys, **knobs), inputs)
            compare(problem, got, want)


def test_prompts_and_steps_side_by_side() -> None:
    """A prompt of 40 rows, a sequence without queries, single steps, rows of no sequence before and behind."""
    problem = parse_case("paged_attention q=f16[6,50,32]nchw k_cache=f16[30,2,8,32]nchw v_cache=f16[30,2,8,32]nchw page_table=s32[4,7] "
                         "lengths_kv=s32[4] cu_seqlens_q=s32[5] causal=bottom_right return_lse=True")
    inputs = random_inputs(problem, np.random.default_rng(4))
    inputs["cu_seqlens_q"][:] = 3, 43, 43, 44, 45
    inputs["lengths_kv"][:] = 45, 9, 0, 56
    want = REFERENCES["paged_attention"](problem, exact(problem, inputs), {})
    backend = EmulatedBackend("sm_80", checkers="all")
    for knobs in ({"team": 1}, {"team": 2}, {"team": 4, "keys": 32}):
        compare(problem, execute(backend, problem, ENGINE, config(**knobs), inputs), want)


@pytest.mark.parametrize("case", [
    "attention q=bf16[1,3,2,256]nchw k=bf16[1,1,70,256]nchw v=bf16[1,1,70,256]nchw causal=bottom_right",
    "attention q=f16[1,2,1,200]nchw k=f16[1,1,40,200]nchw v=f16[1,1,40,64]nchw lengths_kv=s32[1] return_lse=True",
    "paged_attention q=bf16[2,4,1,256]nchw k_cache=e4m3[9,2,16,256]nchw v_cache=e4m3[9,2,16,256]nchw page_table=s32[2,4] lengths_kv=s32[2]",
    "paged_attention q=bf16[1,20,2,224]nchw k_cache=s8[9,1,16,224]nchw v_cache=s8[9,1,16,96]nchw page_table=s32[1,4] lengths_kv=s32[1] "
    "k_scale=f32[9,1,16] v_scale=f32[9,1,16]",
])
def test_rows_too_wide_for_registers(case: str) -> None:
    """Queries wait in shared memory, also of teams that have no keys."""
    problem = parse_case(case)
    for arch in ("sm_80", "sm_90a"):
        backend = EmulatedBackend(arch, checkers="all")
        for c in ENGINE.configs(problem, backend.info) if ENGINE.check_support(problem, backend.info) else ():
            run_problem(backend, problem, ENGINE, c)


@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_queries_beyond_what_f16_holds(size: float) -> None:
    """bf16 queries of any size meet caches of 8 bits."""
    problem = parse_case("paged_attention q=bf16[1,4,1,64]nchw k_cache=s8[3,2,16,64]nchw v_cache=s8[3,2,16,64]nchw page_table=s32[1,3] "
                         f"lengths_kv=s32[1] scale={0.01 / size!r} k_scale=f32[1] v_scale=f32[1] return_lse=True")
    inputs = random_inputs(problem, np.random.default_rng(5))
    inputs["q"] = (inputs["q"].astype(np.float64) * size).astype(inputs["q"].dtype)
    inputs["lengths_kv"][:] = 41
    want = REFERENCES["paged_attention"](problem, exact(problem, inputs), {})
    compare(problem, execute(EmulatedBackend("sm_80", checkers="all"), problem, ENGINE, config(splits=2), inputs), want)
