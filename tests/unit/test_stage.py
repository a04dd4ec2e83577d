"""Stage: what a plan finds in memory, and what it may leave there."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.errors import NumericsError
from oxidnn.plan import Plan
from oxidnn.testing.data import Buffer
from oxidnn.testing.stage import Stage

from .fakes import FakeBackend, FakeEngine, double


class Watching(FakeBackend):
    """Notes what is poisoned."""

    def poison(self, ptr: int, num_bytes: int, stream: int) -> None:
        super().poison(ptr, num_bytes, stream)
        self.__dict__.setdefault("poisoned", []).append((ptr, num_bytes))


def plan_of(engine: FakeEngine, backend: FakeBackend) -> Plan:
    problem = double()
    config = engine.configs(problem, backend.info)[0]
    return Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)


def test_outputs_and_workspace_are_poisoned_before_every_run() -> None:
    backend, x = Watching(), np.ones(64, np.float32)
    with Stage(backend, double(), {"x": x}) as stage:
        guards = [size for _, size in backend.poisoned]  # type: ignore[attr-defined]
        assert guards == [Buffer.GUARD] * 2  # around the input: never written, for a checker of what is read
        plan = plan_of(FakeEngine("double.right", "right", workspace=96), backend)
        for run in (1, 2):
            assert (stage.run(plan)["y"] == 2).all()
            sizes = [size for _, size in backend.poisoned]  # type: ignore[attr-defined]
            assert sizes == guards + [len(stage.buffers["y"].bytes), 96] * run
        assert np.isnan(stage.run(plan_of(FakeEngine("double.lazy", "lazy"), backend))["y"]).all()
    assert not backend.blocks


def test_a_plan_that_spoils_an_input_is_named_and_the_next_finds_it_whole() -> None:
    backend, x = FakeBackend(), np.arange(1, 65, dtype=np.float32)
    with Stage(backend, double(), {"x": x}) as stage:
        with pytest.raises(NumericsError, match=r"double\.clobber variant0: bytes outside the elements of x"):
            stage.run(plan_of(FakeEngine("double.clobber", "clobber"), backend))
        assert (stage.run(plan_of(FakeEngine("double.right", "right"), backend))["y"] == 2 * x).all()
