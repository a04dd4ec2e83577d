"""A plan under several callers at once, and after a call that failed."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from oxidnn.dispatch.planning import plan_for
from oxidnn.errors import LaunchError
from oxidnn.plan import Plan

from .fakes import FakeBackend, FakeEngine, FakeLaunch, double, double_op  # noqa: F401

# ruff: noqa: F811


class Buffers:
    """x with values of its own, y poisoned."""

    def __init__(self, backend: FakeBackend, seed: int) -> None:
        self.x, self.y = backend.allocate(256, 0), backend.allocate(256, 0)
        self.backend = backend
        self.values = np.random.default_rng(seed).standard_normal(64).astype(np.float32)
        backend.upload(self.x.ptr, self.values, 0)
        backend.fill(self.y.ptr, 0xFF, 256, 0)

    @property
    def pointers(self) -> list[int]:
        return [self.x.ptr, self.y.ptr]

    @property
    def is_done(self) -> bool:
        return np.array_equal(self.backend.view(self.y.ptr, 256).view(np.float32), 2 * self.values)


@pytest.fixture
def plan(double_op) -> tuple[Plan, FakeBackend]:  # type: ignore[no-untyped-def]
    double_op(FakeEngine("double.right", "right"))
    backend = FakeBackend()
    return plan_for(double(), backend), backend


def test_a_call_within_a_call_has_arguments_of_its_own(plan, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plan, backend = plan
    outer, inner, after = (Buffers(backend, seed) for seed in range(3))
    launch = FakeLaunch.launch

    def interrupted(self: FakeLaunch, stream: int) -> None:
        monkeypatch.setattr(FakeLaunch, "launch", launch)
        plan.execute(inner.pointers, 0, 0)  # as another thread does between the writing of arguments and the launch
        launch(self, stream)

    monkeypatch.setattr(FakeLaunch, "launch", interrupted)
    plan.execute(outer.pointers, 0, 0)
    assert outer.is_done and inner.is_done
    plan.execute(after.pointers, 0, 0)
    assert after.is_done


def test_a_failed_call_leaves_the_plan_usable(plan, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    plan, backend = plan
    with monkeypatch.context() as patch:
        def refuse(self: FakeLaunch, stream: int) -> None:
            raise LaunchError("no")

        patch.setattr(FakeLaunch, "launch", refuse)
        for error in range(2):
            with pytest.raises(LaunchError):
                plan.execute(Buffers(backend, error).pointers, 0, 0)
    buffers = Buffers(backend, 9)
    plan.execute(buffers.pointers, 0, 0)
    assert buffers.is_done


def test_many_threads(plan) -> None:  # type: ignore[no-untyped-def]
    plan, backend = plan
    buffers = [Buffers(backend, seed) for seed in range(64)]

    def work(mine: list[Buffers]) -> None:
        for b in mine:
            plan.execute(b.pointers, 0, 0)

    threads = [threading.Thread(target=work, args=(buffers[i::8],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(b.is_done for b in buffers)
