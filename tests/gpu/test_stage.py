"""Stage on a GPU: what a plan finds in device memory, and that what it may not write is seen."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from oxidnn.errors import NumericsError
from oxidnn.runtime.backend import POISON, Backend
from oxidnn.testing.data import Buffer
from oxidnn.testing.stage import Stage
from tests.unit.fakes import double

pytestmark = pytest.mark.gpu


def plan(execute: Callable[[Sequence[int], int, int], None], workspace: int = 0) -> Any:
    """A plan of host calls in place of kernels: (pointers of x and y, workspace, stream)."""
    return SimpleNamespace(engine=SimpleNamespace(id="test.host"), config=SimpleNamespace(name="only"), workspace_bytes=workspace,
                           execute=lambda pointers, space, stream, scalars: execute(pointers, space, stream))


def test_outputs_and_workspace_are_poison_before_every_run(cuda: Backend) -> None:
    x = np.ones(64, np.float32)
    found = np.zeros(96, np.uint8)

    def look(pointers: Sequence[int], workspace: int, stream: int) -> None:
        cuda.download(found, workspace, stream)
        cuda.synchronize(stream)
        cuda.fill(workspace, 0, 96, stream)

    def right(pointers: Sequence[int], workspace: int, stream: int) -> None:
        cuda.upload(pointers[1], 2 * x, stream)

    with Stage(cuda, double(), {"x": x}) as stage:
        assert (stage.run(plan(right))["y"] == 2).all()
        for _ in range(2):
            assert np.isnan(stage.run(plan(look, 96))["y"]).all()
            assert (found == POISON).all()


@pytest.mark.parametrize("side", ["before", "behind"])
@pytest.mark.parametrize("name", ["x", "y"])
def test_a_byte_written_beside_an_array_is_seen(cuda: Backend, name: str, side: str) -> None:
    x = np.arange(1, 65, dtype=np.float32)
    index = "xy".index(name)

    def spill(pointers: Sequence[int], workspace: int, stream: int) -> None:
        at = -1 if side == "before" else 256
        for offset in (at, at + (1 - Buffer.GUARD if side == "before" else Buffer.GUARD - 1)):  # the nearest byte and the farthest
            cuda.fill(pointers[index] + offset, POISON ^ 255, 1, stream)

    def right(pointers: Sequence[int], workspace: int, stream: int) -> None:
        cuda.upload(pointers[1], 2 * x, stream)

    with Stage(cuda, double(), {"x": x}) as stage:
        with pytest.raises(NumericsError, match=rf"test\.host only: bytes outside the elements of {name}"):
            stage.run(plan(spill))
        assert (stage.run(plan(right))["y"] == 2 * x).all()
        with pytest.raises(NumericsError, match="elements of x"):
            stage.run(plan(lambda pointers, workspace, stream: cuda.fill(pointers[0] + 100, 0x5A, 1, stream)))
