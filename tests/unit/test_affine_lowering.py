"""Lowerings evaluated by a small NumPy interpreter of AffineMatmul agree with the references: strides, bounds, sublattices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest

from oxidnn.engines.affine import AffineMatmul, Source, Target
from oxidnn.engines.matmul import lower
from oxidnn.ops.base import Problem
from oxidnn.ops.case import format_case, parse_case
from oxidnn.ops.conv import ConvProblem
from oxidnn.testing.data import Buffer, random_inputs
from oxidnn.testing.harness import compare
from oxidnn.testing.reference import REFERENCES
from oxidnn.testing.sample import CASES, SAMPLES

OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad", "gemm")
SCALARS: dict[str, float] = {}


def digits(extents: tuple[int, ...]) -> np.ndarray:
    """(points, digits) of an index space."""
    if not extents:
        return np.zeros((1, 0), np.int64)
    return np.indices(extents, np.int64).reshape(len(extents), -1).T


def dot(points: np.ndarray, weights: tuple[int, ...]) -> np.ndarray:
    return points @ np.array(weights, np.int64) if weights else np.zeros(len(points), np.int64)


class Memory:
    """The operand's buffer as float64 by element offset from its base address."""

    def __init__(self, buffer: Buffer) -> None:
        self.buffer = buffer
        low, high = buffer.desc.offset_range
        self.low, self.flat = low, np.full(max(0, high - low + 1), np.nan)

    def fill(self, values: np.ndarray) -> Memory:
        for index in np.ndindex(*values.shape):
            self.flat[sum(i * s for i, s in zip(index, self.buffer.desc.strides, strict=True)) - self.low] = values[index]
        return self


def matrix(source: Source, memory: Memory, rows: np.ndarray, ks: np.ndarray, batch: np.ndarray,
           zero: np.ndarray | float = 0.0, through: Callable[[np.ndarray], np.ndarray] = lambda values: values) -> np.ndarray:
    """(batch, rows, k) values of A or B, less their zero point, through a prologue; what is within bounds must lie within the operand."""
    offset = source.base + dot(batch, source.batch_strides)[:, None, None] + dot(rows, source.row_strides)[None, :, None] \
        + dot(ks, source.k_strides)[None, None, :]
    inside = np.ones((1, len(rows), len(ks)), bool)
    for bound in source.bounds:
        at = bound.offset + dot(rows, bound.row_coefs)[:, None] + dot(ks, bound.k_coefs)[None, :]
        inside &= (0 <= at) & (at < bound.extent)
    inside = np.broadcast_to(inside, offset.shape)
    values = np.zeros(offset.shape)
    values[inside] = (memory.flat[offset[inside] - memory.low] - np.broadcast_to(zero, offset.shape)[inside])
    assert (offset[inside] >= memory.low).all() and not np.isnan(values).any(), "an element outside the operand is read"
    return np.where(inside, through(values), 0.0)


def places(target: Target, m: np.ndarray, n: np.ndarray, batch: np.ndarray) -> np.ndarray:
    return target.base + dot(batch, target.batch_strides)[:, None, None] + dot(m, target.m_strides)[None, :, None] \
        + dot(n, target.n_strides)[None, None, :]


def interpret(am: AffineMatmul, memories: dict[str, Memory], written: dict[str, np.ndarray]) -> None:
    m, n, k, batch = (digits(space.extents) for space in (am.m, am.n, am.k, am.batch))
    zeros = [0.0 if z is None else matrix(z, memories[z.name], rows, k, batch) for z, rows in ((am.zero_a, m), (am.zero_b, n))]

    def through(side: str, rows: np.ndarray, values: np.ndarray) -> np.ndarray:
        if am.prologue is None or am.prologue.side != side:
            return values
        terms = {t.name: matrix(t, memories[t.name], rows, k, batch) for t in am.prologue.operands}
        return am.prologue.expression.evaluate({"x": values} | terms)[0]

    a, b = (matrix(x, memories[x.name], rows, k, batch, zero, partial(through, side, rows))
            for side, x, rows, zero in zip("ab", (am.a, am.b), (m, n), zeros, strict=True))
    if am.scale_a is not None:
        a = a * matrix(am.scale_a, memories[am.scale_a.name], m, k, batch)
    if am.scale_b is not None:
        b = b * matrix(am.scale_b, memories[am.scale_b.name], n, k, batch)
    arrays = {"acc": a @ b.swapaxes(1, 2)}
    if am.up is not None:
        arrays["up"] = a @ matrix(am.up, memories[am.up.name], n, k, batch).swapaxes(1, 2)
    for operand in am.operands:
        memory = memories[operand.tensor or operand.name]
        arrays[operand.name] = memory.flat[places(operand, m, n, batch) - memory.low]
    if am.addend:
        arrays["acc"] = arrays["acc"] + arrays[am.addend]
    results = (arrays["acc"],) if am.epilogue is None else am.epilogue.evaluate(arrays, SCALARS)
    if am.amax:
        *results, sizes = results
        memories["amax"].flat[:] = np.maximum(memories["amax"].flat, np.abs(sizes).max(initial=0.0))  # gaps stay NaN
    for target, result in zip((am.d, am.aux) if am.aux is not None else (am.d,), results, strict=True):
        where = places(target, m, n, batch) - memories[target.name].low
        kind = target.dtype
        if kind.num_bytes == 1:  # what the conversion does
            result = np.clip(result if kind.is_float else np.rint(result), 0 if kind.kind == "uint" else -kind.max - (kind.kind == "int"),
                             kind.max)
        memories[target.name].flat[where] = np.broadcast_to(result, where.shape)
        np.add.at(written[target.name], where, 1)


def check(problem: Problem, seed: int) -> None:
    problem = problem.alone if isinstance(problem, ConvProblem) else problem  # by-products come of launches of their own
    inputs = random_inputs(problem, np.random.default_rng(seed))
    exact = {name: array.astype(np.float64) for name, array in inputs.items()}
    memories = {o.name: Memory(Buffer(o.desc)) for o in problem.operands}
    for name, values in exact.items():
        memories[name].fill(values)
    written = {o.name: np.zeros(len(memories[o.name].flat), np.int64) for o in problem.outputs}
    if "amax" in written:  # a launch of its own clears it
        written["amax"] += np.isfinite(memories["amax"].fill(np.zeros(())).flat)
    for am in lower(problem):
        interpret(am, memories, written)
    want = REFERENCES[problem.op](problem, exact, SCALARS)
    found = {}
    for output in problem.outputs:
        # Every element exactly once, nothing in between.
        want_written = Memory(Buffer(output.desc)).fill(np.ones(output.desc.shape))
        assert np.array_equal(written[output.name], np.nan_to_num(want_written.flat)), format_case(problem)
        got = found[output.name] = np.zeros(output.desc.shape)
        memory = memories[output.name]
        for index in np.ndindex(*got.shape):
            got[index] = memory.flat[sum(i * s for i, s in zip(index, output.desc.strides, strict=True)) - memory.low]
        if output.desc.dtype.is_float:
            np.testing.assert_allclose(got, want[output.name].want, rtol=1e-9, atol=1e-9, err_msg=format_case(problem))
        else:
            found[output.name] = got.astype(output.desc.dtype.numpy)
    compare(problem, found, want)


@pytest.mark.parametrize("op", OPS)
def test_random_problems(op: str) -> None:
    rng = np.random.default_rng(OPS.index(op))
    for seed in range(300):
        problem = SAMPLES[op](rng, "tiny")
        assert parse_case(format_case(problem)) == problem
        check(problem, seed)


@pytest.mark.parametrize("line", [line for op in OPS for line in CASES[op] if "65537" not in line])
def test_fixed_cases(line: str) -> None:
    check(parse_case(line), 1)


def test_digits_merge_and_bounds_vanish_where_they_can() -> None:
    """A dense 1x1 convolution is a plain matrix product; so is a convolution whose windows tile the image, and its gradient."""
    (am,) = lower(parse_case("conv_fprop x=bf16[4,16,7,7]nhwc w=bf16[8,16,1,1]nhwc"))
    assert (am.m.extents, am.n.extents, am.k.extents, am.a.bounds) == ((4 * 49,), (8,), (16,), ())
    (am,) = lower(parse_case("conv_dgrad dy=bf16[4,8,7,7]nhwc w=bf16[8,16,2,2]nhwc x_shape=(4,16,14,14) stride=2"))
    assert (am.m.size, am.n.size, am.k.extents, am.a.bounds) == (4 * 49, 64, (8,), ())
    (am,) = lower(parse_case("gemm a=f32[2,3,4,5] b=f32[5,6]"))
    assert (am.m.extents, am.n.extents, am.k.extents, am.batch.extents) == ((24,), (6,), (5,), ())
    (am,) = lower(parse_case("gemm a=f32[4,5] b=f32[3,6,5] transpose_b=True"))
    assert (am.m.extents, am.n.extents, am.k.extents, am.batch.extents, am.b.row_strides) == ((4,), (3, 6), (5,), (), (30, 5))


def test_one_matmul_per_class_of_the_stride_and_few_without_taps() -> None:
    ams = lower(parse_case("conv_dgrad dy=f32[1,2,4,4] w=f32[2,2,3,3] x_shape=(1,2,8,8) stride=2 padding=1"))
    assert sorted(am.k.size for am in ams) == [2, 4, 4, 8]
    ams = lower(parse_case("conv_dgrad dy=f32[1,2,2,2,2] w=f32[2,2,1,1,1] x_shape=(1,2,16,16,16) stride=8"))
    assert sorted(am.k.size for am in ams) == [0, 0, 0, 2]
