"""Excerpts: a small problem whose outputs are a part of a large one's, so that a large result can be held against the reference.

Convolution and GEMMs only: an output element there is a sum over one row and one column, so a few filters of one image, or a few rows and
columns, need a small part of the work; of grouped GEMM a few columns and all rows. Other ops cost little more than their bytes and are
computed whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from ..ops import OPS
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..ops.gemm import SCALES, GemmProblem
from ..ops.grouped_gemm import GroupedGemmProblem
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
    if isinstance(problem, GemmProblem):
        return problem.gate is None and not any(problem.has(name) for name in SCALES)
    return isinstance(problem, ConvProblem) or isinstance(problem, GroupedGemmProblem) and problem.gate is None


def excerpts(problem: Problem, rng: np.random.Generator, max_flops: float, count: int = 3) -> Iterator[Excerpt]:
    """`count` excerpts of at most about max_flops each: around the first output element, the last, and random ones."""
    shape = problem.outputs[0].desc.shape
    places = [tuple(0 for _ in shape), tuple(n - 1 for n in shape)]
    while len(places) < count:
        places.append(tuple(int(rng.integers(n)) for n in shape))
    for place in places[:count]:
        yield excerpt_at(problem, place, max_flops)


def excerpt_at(problem: Problem, place: Sequence[int], max_flops: float) -> Excerpt:
    """An excerpt of at most about max_flops that holds the output element at `place`."""
    width = 16
    while True:
        made = _PARTS[type(problem)](problem, place, width)
        if made.problem.flops <= max_flops or width == 1:
            return made
        width //= 2


def _window(extent: int, width: int, place: int) -> np.ndarray:
    """At most `width` neighbouring positions of 0..extent-1 with `place` among them."""
    width = min(width, extent)
    return np.arange(width) + min(max(place - width // 2, 0), extent - width)


def _conv(problem: Problem, place: Sequence[int], width: int) -> Excerpt:
    assert isinstance(problem, ConvProblem)
    image, filters = problem.desc(problem.image).shape, problem.desc(problem.filter).shape
    k_per_group, c_per_group = filters[0] // problem.groups, filters[1]
    names = problem.image, problem.filter, problem.result
    pixels, taps, positions = ([np.arange(n) for n in problem.desc(name).shape[2:]] for name in names)
    n, k, c = np.arange(image[0]), np.arange(k_per_group), np.arange(c_per_group)
    if problem.direction == "fprop":  # place is (n, k, ...)
        group, inner = divmod(place[1], k_per_group)
        n, k = _window(image[0], 1, place[0]), _window(k_per_group, width, inner)
    elif problem.direction == "dgrad":  # (n, c over all groups, ...)
        group, inner = divmod(place[1], c_per_group)
        n, c = _window(image[0], 1, place[0]), _window(c_per_group, width, inner)
    else:  # (k over all groups, c within the group, ...)
        group, inner = divmod(place[0], k_per_group)
        k, c = _window(k_per_group, width, inner), _window(c_per_group, width, place[1])
    k_all, c_all = k + group * k_per_group, c + group * c_per_group
    taken: dict[str, Indices] = {
        problem.image: (n, c_all, *pixels), problem.filter: (k_all, c, *taps), problem.result: (n, k_all, *positions),
    }
    return _made(problem, taken, 1, dropped=("groups",))


def _gemm(problem: Problem, place: Sequence[int], width: int) -> Excerpt:
    assert isinstance(problem, GemmProblem)
    batch = [np.array([p]) for p in place[:-2]]
    m, n, k = _window(problem.m, 4 * width, place[-2]), _window(problem.n, 4 * width, place[-1]), np.arange(problem.k)
    taken: dict[str, Indices] = {"d": (*batch, m, n)}
    for name, rows, cols, is_transposed in (("a", m, k, problem.transpose_a), ("b", k, n, problem.transpose_b)):
        shape = problem.desc(name).shape
        taken[name] = (*_broadcast(shape[:-2], batch), *((cols, rows) if is_transposed else (rows, cols)))
    return _made(problem, taken, -1)


def _grouped(problem: Problem, place: Sequence[int], width: int) -> Excerpt:
    assert isinstance(problem, GroupedGemmProblem)
    rows, k, groups = np.arange(problem.rows), np.arange(problem.k), np.arange(problem.groups)
    n = _window(problem.n, 4 * width, place[-1])
    taken: dict[str, Indices] = {"group_sizes": (groups,)}
    if problem.is_wgrad:
        m = _window(problem.m, 4 * width, place[-2])
        taken |= {"a": (rows, m), "b": (rows, n), "d": (groups, m, n)}
    else:
        taken |= {"a": (rows, k), "b": (groups, n, k) if problem.transpose_b else (groups, k, n), "d": (rows, n)}
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


_PARTS = {ConvProblem: _conv, GemmProblem: _gemm, GroupedGemmProblem: _grouped}
