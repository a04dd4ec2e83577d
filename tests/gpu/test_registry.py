"""Every engine of every op on the GPU: random problems of sizes 1 to 40 with all attributes, against the float64 references."""

from __future__ import annotations

import os

import numpy as np
import pytest

from oxidnn.runtime.backend import Backend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import SAMPLES

from ..emu.test_registry import IDS, PAIRS, seed_of

pytestmark = pytest.mark.gpu
RUNS = int(os.environ.get("OXIDNN_TEST_RUNS", "40"))


@pytest.mark.parametrize(("op", "engine"), PAIRS, ids=IDS)
def test_engine_on_random_problems(op: str, engine, cuda: Backend) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed_of(op, engine.id, "gpu"))
    runs = refusals = 0
    while runs < RUNS:
        problem = SAMPLES[op](rng, "small")
        if problem.is_empty or not engine.check_support(problem, cuda.info):
            refusals += 1
            assert refusals < 400 * RUNS, f"{engine.id} refused {refusals} random problems"
            continue
        configs = engine.configs(problem, cuda.info)
        run_problem(cuda, problem, engine, configs[runs % len(configs)], seed=runs, aliases=runs % 4 < 2)
        runs += 1
