"""Philox 4x32-10 in NumPy, from its publication (Salmon et al., SC 2011), and what ops draw with it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ...ops.base import Problem
from ...ops.random import RandomProblem
from . import Expected
from .pointwise import reference as pointwise

MULTIPLIERS, WEYL = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)


def philox(counter: np.ndarray, key: tuple[int, int]) -> np.ndarray:
    """The four words of each counter: counter (..., 4) of 32-bit words, key two of them."""
    c = np.asarray(counter, np.uint64)
    low = np.uint64(0xFFFFFFFF)
    for turn in range(10):
        products = [c[..., 2 * i] * np.uint64(MULTIPLIERS[i]) for i in range(2)]
        keys = [np.uint64((key[i] + turn * WEYL[i]) & 0xFFFFFFFF) for i in range(2)]
        c = np.stack([products[1] >> np.uint64(32) ^ c[..., 1] ^ keys[0], products[1] & low,
                      products[0] >> np.uint64(32) ^ c[..., 3] ^ keys[1], products[0] & low], -1)
    return c.astype(np.uint32)


def words(shape: tuple[int, ...], seed: int, offset: int) -> np.ndarray:
    """(elements in the order of dimensions, 4): the words of the group that each lies in."""
    group = np.arange(int(np.prod(shape, dtype=np.int64)), dtype=np.uint64) // np.uint64(4)
    high = np.broadcast_to(np.array([offset & 0xFFFFFFFF, offset >> 32], np.uint64), (len(group), 2))
    counter = np.concatenate([np.stack([group & np.uint64(0xFFFFFFFF), group >> np.uint64(32)], -1), high], -1)
    return philox(counter, (seed & 0xFFFFFFFF, seed >> 32))


def sources(shape: tuple[int, ...], seed: int, offset: int) -> dict[str, np.ndarray]:
    """The numbers that expressions take: uniform in [0, 1), the radius and the angle (in turns) of a pair."""
    drawn = words(shape, seed, offset)
    lane = np.arange(len(drawn)) % 4
    own, even, odd = (drawn[np.arange(len(drawn)), i] for i in (lane, lane // 2 * 2, lane // 2 * 2 + 1))
    radius = (even.astype(np.float32).astype(np.float64) * 2.0**-32 + 2.0**-33).astype(np.float32)
    numbers = {"uniform": (own >> 8) * 2.0**-24, "radius": radius.astype(np.float64), "angle": (odd >> 8) * 2.0**-24 - lane % 2 * 0.25}
    return {name: values.reshape(shape) for name, values in numbers.items()}


def reference(problem: Problem, inputs: Mapping[str, np.ndarray], scalars: Mapping[str, float]) -> dict[str, Expected]:
    assert isinstance(problem, RandomProblem)
    seed, offset = (int(v) % 2**64 for v in inputs["state"]) if "state" in inputs else (int(scalars["seed"]), int(scalars["offset"]))
    return pointwise(problem, {**inputs, **sources(problem.shape, seed, offset)}, scalars)


REFERENCES = {op: reference for op in ("dropout", "dropout_backward", "random", "bernoulli", "poisson", "rrelu", "rrelu_backward",
                                      "cast_stochastic")}
