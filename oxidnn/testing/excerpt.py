"""Excerpts: a small problem whose outputs are a part of a large one's, so that a large result can be held against the reference.

Convolution and GEMM only: an output element there is a sum over one row and one column, so a few filters of one image, or a few rows and
columns, need a small part of the work. Other ops cost little more than their bytes and are computed whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ops import OPS
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..ops.gemm import GemmProblem
from ..tensor import TensorDesc

Indices = tuple[np.ndarray, ...]  # per axis, the positions taken


@dataclass(frozen=True, slots=True)
class Excerpt:
    """problem: the small one. taken: for every operand the positions of the large one that it consists of."""

    problem: Problem
    taken: Mapping[str, Indices]

    def of(self, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The excerpt's parts of the large problem's arrays."""
        return {name: np.ascontiguousarray(a[np.ix_(*self.taken[name])]) for name, a in arrays.items()}


def has_excerpts(problem: Problem) -> bool:
    return isinstance(problem, ConvProblem | GemmProblem)


def excerpts(problem: Problem, rng: np.random.Generator, max_flops: float, count: int = 3) -> Iterator[Excerpt]:
    """`count` excerpts of at most about max_flops each: at the low end of every axis, at the high end, and at random."""
    places = [0.0, 1.0, *rng.random(max(0, count - 2))][:count]
    for place in places:
        width = 16
        while True:
            made = _conv(problem, place, width) if isinstance(problem, ConvProblem) else _gemm(problem, place, width)
            if made.problem.flops <= max_flops or width == 1:
                break
            width //= 2
        yield made


def _window(extent: int, width: int, place: float) -> np.ndarray:
    """`width` neighbouring positions of 0..extent-1, lying at `place` of the way from the low end to the high end."""
    width = min(width, extent)
    return np.arange(width) + round(place * (extent - width))


def _conv(problem: Problem, place: float, width: int) -> Excerpt:
    assert isinstance(problem, ConvProblem)
    image, filters = problem.desc(problem.image).shape, problem.desc(problem.filter).shape
    group = round(place * (problem.groups - 1))
    k_per_group, c_per_group = filters[0] // problem.groups, filters[1]
    names = problem.image, problem.filter, problem.result
    pixels, taps, places = ([np.arange(n) for n in problem.desc(name).shape[2:]] for name in names)
    n, k, c = np.arange(image[0]), np.arange(k_per_group), np.arange(c_per_group)
    if problem.direction != "wgrad":
        n = _window(image[0], 1, place)
    if problem.direction != "dgrad":
        k = _window(k_per_group, width, place)
    if problem.direction != "fprop":
        c = _window(c_per_group, width, place)
    k_all, c_all = k + group * k_per_group, c + group * c_per_group
    taken: dict[str, Indices] = {
        problem.image: (n, c_all, *pixels), problem.filter: (k_all, c, *taps), problem.result: (n, k_all, *places),
    }
    return _made(problem, taken, 1, dropped=("groups",))


def _gemm(problem: Problem, place: float, width: int) -> Excerpt:
    assert isinstance(problem, GemmProblem)
    batch = [_window(n, 1, place) for n in problem.desc("d").shape[:-2]]
    m, n, k = _window(problem.m, 4 * width, place), _window(problem.n, 4 * width, place), np.arange(problem.k)
    taken: dict[str, Indices] = {"d": (*batch, m, n)}
    for name, rows, cols, is_transposed in (("a", m, k, problem.transpose_a), ("b", k, n, problem.transpose_b)):
        shape = problem.desc(name).shape
        taken[name] = (*_broadcast(shape[:-2], batch), *((cols, rows) if is_transposed else (rows, cols)))
    return _made(problem, taken, -1)


def _broadcast(shape: Sequence[int], positions: Sequence[np.ndarray]) -> Indices:
    """The positions over the trailing axes of `shape`: 0 where an extent of 1 is repeated."""
    return tuple(np.zeros(1, np.intp) if n == 1 else p for n, p in zip(shape, positions[len(positions) - len(shape):], strict=True))


def _made(problem: Problem, taken: dict[str, Indices], channel_axis: int, dropped: tuple[str, ...] = ()) -> Excerpt:
    """The problem over the taken positions; tensors of the epilogue follow the output's."""
    out = problem.outputs[0]
    channels = out.desc.shape[channel_axis]
    tensors = {}
    for operand in problem.operands:
        shape = operand.desc.shape
        if operand.name not in taken:
            is_vector = len(shape) == 1 and shape[0] == channels
            taken[operand.name] = (taken[out.name][channel_axis],) if is_vector else _broadcast(shape, taken[out.name])
        tensors[operand.name] = TensorDesc.packed(operand.desc.dtype, tuple(len(p) for p in taken[operand.name]))
    attrs = {name: value for name, value in problem.attrs if name not in dropped}
    return Excerpt(OPS[problem.op].make(tensors, attrs, problem.policy), taken)
