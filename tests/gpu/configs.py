"""Every config of an engine on a device: one reference for all, each twice with the same bits."""

from __future__ import annotations

import numpy as np

from oxidnn.engines.base import Engine
from oxidnn.ops.base import Problem
from oxidnn.plan import Plan
from oxidnn.runtime.backend import Backend
from oxidnn.testing.data import random_inputs, random_scalars
from oxidnn.testing.harness import compare, exact
from oxidnn.testing.reference import REFERENCES
from oxidnn.testing.stage import Stage


def check_configs(backend: Backend, problem: Problem, engine: Engine, seed: int = 4, most: int | None = None) -> None:
    """most: only so many of the configs, the first by estimate."""
    rng = np.random.default_rng(seed)
    inputs, scalars = random_inputs(problem, rng), random_scalars(problem, rng)
    want = REFERENCES[problem.op](problem, exact(problem, inputs), scalars)
    with Stage(backend, problem, inputs, scalars) as stage:
        for config in engine.configs(problem, backend.info)[:most]:
            plan = Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)
            first, second = stage.run(plan), stage.run(plan)
            compare(problem, first, want, f"{engine.id} {config.name}", is_coarse=engine.sums_coarsely)
            assert all(first[n].tobytes() == second[n].tobytes() for n in first), f"{config.name}: other bits the second time"
