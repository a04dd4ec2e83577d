"""Max unpooling: against PyTorch and its autograd, what its rules say of places that meet and of places outside, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute
from oxidnn.testing.sample import SAMPLES


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_values_and_gradients_are_those_of_torch(h: oxidnn.DnnHandle, rank: int) -> None:
    torch = pytest.importorskip("torch")
    rng, extents = np.random.default_rng(rank), (9, 8, 7)[:rank]
    x = rng.standard_normal((2, 3, *extents))
    y, indices = h.max_pool(x, 2, return_indices=True)
    given = torch.tensor(np.asarray(y), requires_grad=True)
    want = getattr(torch.nn.functional, f"max_unpool{rank}d")(given, torch.tensor(np.asarray(indices)), 2, output_size=extents)
    np.testing.assert_array_equal(h.max_unpool(y, indices, extents), want.detach().numpy())
    upstream = rng.standard_normal(x.shape)
    want.backward(torch.tensor(upstream))
    np.testing.assert_array_equal(h.max_unpool_backward(upstream, indices), given.grad.numpy())


def test_pooling_gives_back_what_unpooling_spread(h: oxidnn.DnnHandle) -> None:
    x = np.random.default_rng(0).uniform(1, 2, (2, 3, 8, 6)).astype(np.float32)
    y, indices = h.max_pool(x, 2, return_indices=True)
    np.testing.assert_array_equal(h.max_pool(h.max_unpool(y, indices, (8, 6)), 2), y)


@pytest.mark.parametrize("schedule", ["lowest_pc", ("random", 3), ("random", 11)])
def test_the_last_of_several_stays_whatever_runs_first(schedule: Any) -> None:
    """700 elements for 5 places: those of many warps and CTAs meet."""
    problem = parse_case("max_unpool x=f32[1,1,700]nchw indices=s64[1,1,700]nchw output_size=(5,)")
    rng = np.random.default_rng(1)
    x, indices = rng.standard_normal((1, 1, 700)).astype(np.float32), rng.integers(0, 4, (1, 1, 700))
    got = execute(EmulatedBackend("sm_80", checkers="all", schedule=schedule), problem, ENGINES["max_unpool"][0],
                  ENGINES["max_unpool"][0].configs(problem, EmulatedBackend("sm_80").info)[0], {"x": x, "indices": indices})["y"]
    want = [x[0, 0, np.flatnonzero(indices[0, 0] == place)[-1]] for place in range(4)]
    np.testing.assert_array_equal(got[0, 0], [*want, 0.0])


@pytest.mark.parametrize("outside", [-1, 6, 2**40, -(2**63)])
def test_an_index_outside_writes_nothing_and_has_no_gradient(h: oxidnn.DnnHandle, outside: int) -> None:
    x, indices = np.array([[[1.0, 2.0, 3.0]]], np.float32), np.array([[[4, outside, 0]]])
    np.testing.assert_array_equal(h.max_unpool(x, indices, (6,)), [[[3, 0, 0, 0, 1, 0]]])
    dy = np.arange(1, 7, dtype=np.float32).reshape(1, 1, 6)
    np.testing.assert_array_equal(h.max_unpool_backward(dy, indices), [[[5, 0, 1]]])


@pytest.mark.parametrize("value", [np.nan, -np.inf, -0.0])
def test_bits_are_moved(h: oxidnn.DnnHandle, value: float) -> None:
    got = np.asarray(h.max_unpool(np.full((1, 1, 1), value, np.float16), np.array([[[1]]]), (2,)))
    assert got.view(np.uint16)[0, 0].tolist() == [0, int(np.array(value, np.float16).view(np.uint16))]


def test_refusals(h: oxidnn.DnnHandle) -> None:
    x, indices = np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 3), np.int64)
    with pytest.raises(InvalidArgument, match="output_size is .*expected 1"):
        h.max_unpool(x, indices, (3, 3))
    with pytest.raises(InvalidArgument, match="type of indices"):
        h.max_unpool(x, indices.astype(np.uint8), (5,))
    with pytest.raises(InvalidArgument, match="shape of indices"):
        h.max_unpool(x, indices[:, :1], (5,))
    with pytest.raises(InvalidArgument, match="shape of indices"):
        h.max_unpool_backward(x, indices[:, :1])


def test_samples_hold_places_that_meet_and_places_outside() -> None:
    rng = np.random.default_rng(0)
    problems = [SAMPLES["max_unpool"](rng, "tiny") for _ in range(60)]
    assert any(p.desc("x").numel > p.desc("y").numel > 0 for p in problems) and any(p.desc("x").rank == 5 for p in problems)
