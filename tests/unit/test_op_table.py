"""The ops' rows against what their problems take: inputs, optional inputs, attributes and their defaults."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from oxidnn.errors import InvalidArgument
from oxidnn.ops import OPS
from oxidnn.ops.base import Policy, Problem
from oxidnn.ops.case import parse_case
from oxidnn.tensor import TensorDesc
from oxidnn.testing.sample import CASES, SAMPLES

OPEN = {op for op, row in OPS.items() if row.takes_more_tensors}


def problems(op: str) -> Iterator[Problem]:
    rng = np.random.default_rng(3)
    yield from (parse_case(line) for line in CASES[op])
    yield from (SAMPLES[op](rng, "tiny") for _ in range(60))


def again(problem: Problem, without: str = "", **attrs: object) -> Problem:
    tensors = {o.name: o.desc for o in problem.operands if o.name != without}
    return OPS[problem.op].make(tensors, dict(problem.attrs) | attrs, problem.policy)


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_role_and_attribute_of_a_problem_stands_in_its_row(op: str) -> None:
    row, seen_inputs, seen_attrs, seen_outputs = OPS[op], set(), set(), set()
    assert set(row.optional) <= set(row.inputs) and len(dict(row.attrs)) == len(row.attrs)
    for problem in problems(op):
        names = [o.name for o in problem.inputs]
        seen_inputs |= set(names)
        seen_attrs |= {name for name, _ in problem.attrs}
        seen_outputs |= {o.name for o in problem.outputs}
        assert again(problem) == problem
        if op not in OPEN:
            assert names == [n for n in row.inputs if n in names], "operands stand in the row's order"
        assert set(row.inputs) - set(row.optional) <= set(names)
    assert seen_attrs <= set(dict(row.attrs))
    if row.outputs and op != "pointwise":  # whose expression names its tensors; steps over lists number theirs
        assert set(row.inputs) - seen_inputs <= {"indices"} and (op in OPEN or seen_inputs <= set(row.inputs))
        assert seen_outputs == set(row.outputs) or op == "attention_backward" and seen_outputs > set(row.outputs)


@pytest.mark.parametrize("op", sorted(OPS))
def test_defaults_may_be_given_and_mean_nothing(op: str) -> None:
    tried = set()
    for problem in problems(op):
        given = dict(problem.attrs)
        for name, default in OPS[op].attrs:
            if name not in given:
                assert again(problem, **{name: default}) == problem and again(problem, **{name: None}) == problem
                tried.add(name)
    needed = {"window", "kernel", "output_size", "expression", "name", "x_shape", "w_shape", "op", "groups", "training", "shape", "sizes",
              "kind", "factor", "experts", "top_k", "num_heads", "format", "scaling"}  # of every problem
    assert {name for name, _ in OPS[op].attrs} - tried <= needed | {"axes"}


@pytest.mark.parametrize("op", sorted(OPS))
def test_what_is_not_in_the_row_is_refused(op: str) -> None:
    problem = next(problems(op))
    with pytest.raises(InvalidArgument, match=f"{op}: 'sideways' is no attribute"):
        again(problem, sideways=1)
    for name in OPS[op].inputs:
        if name not in OPS[op].optional:
            with pytest.raises(InvalidArgument, match=f"{op}: {name} is missing"):
                again(problem, without=name)
    tensors = {o.name: o.desc for o in problem.operands} | {"stranger": problem.operands[0].desc}
    with pytest.raises(InvalidArgument, match="stranger"):
        OPS[op].make(tensors, dict(problem.attrs), Policy())


@pytest.mark.parametrize("op", sorted(OPS))
def test_strides_that_mean_nothing_do_not_matter(op: str) -> None:
    changed = 0
    rng = np.random.default_rng(0)
    for problem in problems(op):
        def odd(d: TensorDesc) -> TensorDesc:
            strides = tuple(int(rng.integers(0, 99)) if n == 1 else s for n, s in zip(d.shape, d.strides, strict=True))
            return TensorDesc(d.dtype, d.shape, strides, d.align)

        tensors = {o.name: odd(o.desc) for o in problem.operands}
        changed += any(tensors[o.name] != o.desc for o in problem.operands)
        assert OPS[op].make(tensors, dict(problem.attrs), problem.policy) == problem
    assert changed


@pytest.mark.parametrize("op", sorted(OPS))
def test_outputs_that_overlap_themselves_are_refused(op: str) -> None:
    tried = 0
    for problem in problems(op):
        for output in problem.outputs:
            wide = [i for i, n in enumerate(output.desc.shape) if n > 1]
            if len(wide) < 2 or output.desc.numel == 0:
                continue
            for stride in (0, 1):
                strides = tuple(stride if i in wide else s for i, s in enumerate(output.desc.strides))
                bad = TensorDesc(output.desc.dtype, output.desc.shape, strides, output.desc.align)
                with pytest.raises(InvalidArgument, match="overlap"):
                    OPS[op].make({o.name: o.desc for o in problem.operands} | {output.name: bad}, dict(problem.attrs), Policy())
                tried += 1
    assert tried or all(o.desc.rank < 2 for p in problems(op) for o in p.outputs)
