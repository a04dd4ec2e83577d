"""Every engine of every op on the GPU: random problems of sizes 1 to 40 with all attributes, against the float64 references.

An op of many launches a problem gets fewer problems, as assembling its kernels is what takes time. Some run twice: the same bits,
of engines that say so.
"""

from __future__ import annotations

import os

import numpy as np
import pytest

from oxidnn.ops.case import format_case
from oxidnn.runtime.backend import Backend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import SAMPLES

from ..emu.test_registry import IDS, PAIRS, seed_of

pytestmark = pytest.mark.gpu
RUNS = int(os.environ.get("OXIDNN_TEST_RUNS", "40"))
LAUNCHES = 3 * RUNS  # no further problem, of those beyond a quarter, once so many launches have been tried


@pytest.mark.parametrize(("op", "engine"), PAIRS, ids=IDS)
def test_engine_on_random_problems(op: str, engine, cuda: Backend) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed_of(op, engine.id, "gpu"))
    runs = refusals = launches = 0
    while runs < RUNS and (launches < LAUNCHES or runs < RUNS // 4):
        problem = SAMPLES[op](rng, "small")
        if problem.is_empty or not engine.check_support(problem, cuda.info):
            refusals += 1
            assert refusals < 400 * max(RUNS, 40), f"{engine.id} refused {refusals} random problems"
            continue
        configs = engine.configs(problem, cuda.info)
        config = configs[runs % len(configs)]
        first = run_problem(cuda, problem, engine, config, seed=runs, aliases=runs % 4 < 2).outputs
        if runs % 10 == 3 and engine.is_deterministic:
            second = run_problem(cuda, problem, engine, config, seed=runs).outputs
            assert all(first[n].tobytes() == second[n].tobytes() for n in first), f"{config.name}: other bits. {format_case(problem)}"
        launches += len(engine.build_steps(problem, config, cuda.info).steps)
        runs += 1
