"""Deterministic engines of the memory-bound families give the same bits under another schedule, whether deterministic=True is asked for (of
every other one) or not; no run allocates."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.dispatch.select import choose
from oxidnn.errors import Unsupported
from oxidnn.ops.base import Policy, Problem
from oxidnn.plan import Plan
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs, random_scalars
from oxidnn.testing.sample import SAMPLES
from oxidnn.testing.stage import Stage

from .test_registry import PAIRS, seed_of

MATRIX = ("gemm", "conv", "grouped_gemm")
MOVING = [(op, engine) for op, engine in PAIRS if not op.startswith(MATRIX)]
OPS = sorted({op for op, _ in MOVING})


def drawn(op: str, rng: np.random.Generator, policy: Policy) -> Problem:
    """A problem with elements in every output."""
    while True:
        problem = SAMPLES[op](rng, "tiny")
        if not problem.is_empty and all(o.desc.numel for o in problem.outputs):
            return replace(problem, policy=policy)


STEADY = [(op, engine) for op, engine in MOVING if engine.is_deterministic]


@pytest.mark.parametrize(("op", "engine"), STEADY, ids=[f"{op}-{engine.id}" for op, engine in STEADY])
def test_the_same_bits_under_every_schedule(op: str, engine, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed_of(op, engine.id, "repeat"))
    backends = [EmulatedBackend("sm_90a"), EmulatedBackend("sm_90a", schedule=("random", 3))]
    info = backends[0].info
    policy = Policy(deterministic=STEADY.index((op, engine)) % 2 == 0)
    problem = next(p for p in (drawn(op, rng, policy) for _ in range(4000)) if engine.check_support(p, info))
    configs = engine.configs(problem, info)
    config = configs[int(rng.integers(len(configs)))]
    inputs, scalars, results = random_inputs(problem, rng), random_scalars(problem, rng), []
    for backend in backends:
        with Stage(backend, problem, inputs, scalars) as stage:
            plan = Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)
            results.append(stage.run(plan))  # its workspace, and all else, is there now
            with monkeypatch.context() as patch:
                patch.setattr(backend, "allocate", lambda *_: pytest.fail("a run allocated memory"))
                results.append(stage.run(plan))
    for name, first in results[0].items():
        assert all(r[name].tobytes() == first.tobytes() for r in results), name


def test_few_engines_are_not_steady() -> None:
    others = {engine.id for _, engine in MOVING if not engine.is_deterministic}
    assert others == {"attention_backward.wgmma_sm90", "attention_backward.mma_adding"}


@pytest.mark.parametrize("op", OPS)
def test_no_more_workspace_than_the_limit(op: str) -> None:
    """A choice under a limit keeps it; where none does, the refusal says so."""
    rng, info = np.random.default_rng(seed_of(op, "limit")), EmulatedBackend("sm_90a").info
    for _ in range(4):
        problem = drawn(op, rng, Policy())
        engine, config, _ = choose(problem, info, None)
        used = engine.build_steps(problem, config, info).workspace_bytes
        for limit in {0, max(used - 1, 0), used}:
            limited = replace(problem, policy=Policy(workspace_limit=limit))
            try:
                engine, config, _ = choose(limited, info, None)
            except Unsupported as error:
                assert limit < used and "workspace" in str(error)
                continue
            assert engine in ENGINES[op] and engine.build_steps(limited, config, info).workspace_bytes <= limit
