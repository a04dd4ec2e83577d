"""Every engine of every op runs in the emulator, all checkers on, on random problems, against the float64 references."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import format_case, parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import CASES, SAMPLES

PAIRS = [(op, engine) for op, engines in sorted(ENGINES.items()) for engine in engines]
IDS = [f"{op}-{engine.id}" for op, engine in PAIRS]
RUNS = 4


def seed_of(*words: object) -> int:
    return zlib.crc32(" ".join(map(str, words)).encode())


@pytest.mark.parametrize(("op", "engine"), PAIRS, ids=IDS)
def test_engine_on_random_problems(op: str, engine) -> None:  # type: ignore[no-untyped-def]
    backends = [EmulatedBackend("sm_80", checkers="all"), EmulatedBackend("sm_90a", checkers="all", schedule=("random", 7))]
    rng = np.random.default_rng(seed_of(op, engine.id))
    runs = refusals = 0
    while runs < RUNS:
        problem = SAMPLES[op](rng, "tiny")
        # In turns, but for what only one of the targets can do.
        backend = next((b for b in (backends[runs % 2], backends[1 - runs % 2]) if engine.check_support(problem, b.info)), None)
        if backend is None:
            refusals += 1
            assert refusals < 2000, f"{engine.id} refused {refusals} random problems: the sampler draws none it takes"
            continue
        if problem.is_empty:
            refusals += 1
            continue
        configs = engine.configs(problem, backend.info)
        run_problem(backend, problem, engine, configs[runs % len(configs)], seed=runs, aliases=runs % 4 < 2)
        runs += 1


@pytest.mark.parametrize("line", [line for op in sorted(CASES) for line in CASES[op]])
def test_fixed_cases_on_every_engine(line: str) -> None:
    backend = EmulatedBackend("sm_80", checkers="all")
    problem = parse_case(line)
    assert parse_case(format_case(problem)) == problem
    takers = [e for e in ENGINES[problem.op] if e.check_support(problem, backend.info)]
    assert takers, f"no engine takes {line}"
    is_long = any(extent > 65535 for o in problem.operands for extent in o.desc.shape[:1])
    for engine in takers if is_long and not problem.is_empty else ():  # only the first extent of a grid takes so many
        steps = engine.build_steps(problem, engine.configs(problem, backend.info)[0], backend.info).steps
        assert all(max(step.grid[1:]) <= 65535 for step in steps), engine.id
    if problem.is_empty or problem.num_bytes > 4e6 or is_long:
        takers = takers[-1:]
    for engine in takers:
        run_problem(backend, problem, engine)
