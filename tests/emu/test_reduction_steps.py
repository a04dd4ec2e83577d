"""Reductions composed from memory that is no operand: workspace to workspace, workspace to operand, ready states."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.dtypes import F32
from oxidnn.engines.base import Scratch, Step, TensorArg, WorkspaceArg, constant_of
from oxidnn.engines.reduce_tree import reduction_steps, state_steps
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.tensor import TensorDesc


def run(backend: EmulatedBackend, steps: list[Step], scratch: Scratch, pieces: dict[int, np.ndarray], result: np.ndarray) -> np.ndarray:
    """Runs the steps over a poisoned workspace that holds `pieces` at their offsets; fills and returns `result`, the operand "y"."""
    workspace, target = backend.allocate(scratch.num_bytes, 0), backend.allocate(result.nbytes, 0)
    backend.fill(workspace.ptr, 0xFF, scratch.num_bytes, 0)
    for offset, values in pieces.items():
        backend.upload(workspace.ptr + offset, values.view(np.uint8).reshape(-1), 0)
    for step in steps:
        launch = backend.load(render(step.spec), step.spec).bind(step.grid, [constant_of(a) for a in step.args])
        for i, a in enumerate(step.args):
            if isinstance(a, WorkspaceArg):
                launch.set(i, workspace.ptr + a.byte_offset)
            elif isinstance(a, TensorArg):
                launch.set(i, target.ptr + a.byte_offset)
        launch.launch(0)
    backend.download(result.view(np.uint8).reshape(-1), target.ptr, 0)
    return result


def test_pieces_do_not_overlap_and_are_aligned() -> None:
    scratch = Scratch()
    offsets = [scratch.take(n).byte_offset for n in (1, 256, 257, 0, 8)]
    assert offsets == [0, 256, 512, 1024, 1280] and scratch.num_bytes == 1536


@pytest.mark.parametrize("shape", [(5, 7, 300), (70000,)])
def test_workspace_to_workspace_to_operand(shape: tuple[int, ...]) -> None:
    """The sum over the last axis, then the maximum of the sums."""
    backend, scratch = EmulatedBackend("sm_80", checkers="all"), Scratch()
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    source, middle = scratch.take(x.nbytes), scratch.take(x[..., 0].nbytes)
    rank, sums = len(shape), (TensorDesc.packed(F32, shape[:-1]), middle)
    steps = reduction_steps("test", (TensorDesc.packed(F32, shape), source), sums, (rank - 1,), "sum", backend.info, scratch)
    steps += reduction_steps("test", sums, (TensorDesc.packed(F32, ()), TensorArg("y")), range(rank - 1), "max", backend.info, scratch)
    got = run(backend, steps, scratch, {source.byte_offset: x}, np.empty(1, np.float32))
    np.testing.assert_allclose(got[0], x.astype(np.float64).sum(-1).max(), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("count", [0, 1, 77, 20000])
def test_ready_states(count: int) -> None:
    """A weighted mean from weighted values and weights; 0 / 0 of none."""
    backend, scratch = EmulatedBackend("sm_80", checkers="all"), Scratch()
    rng = np.random.default_rng(count)
    values, weights = rng.standard_normal(count).astype(np.float32), rng.uniform(0.5, 1, count).astype(np.float32)
    pieces = [scratch.take(values.nbytes), scratch.take(weights.nbytes)]
    target = (TensorDesc.packed(F32, ()), TensorArg("y"))
    steps = state_steps("test", pieces, count, target, "weighted_mean", "f32", backend.info, scratch)
    assert len(steps) == (2 if count == 20000 else 1)
    got = run(backend, steps, scratch, {p.byte_offset: a for p, a in zip(pieces, (values, weights), strict=True)}, np.empty(1, np.float32))
    with np.errstate(invalid="ignore"):
        want = values.astype(np.float64).sum() / weights.astype(np.float64).sum()
    np.testing.assert_allclose(got[0], want, rtol=1e-4, atol=1e-6)
