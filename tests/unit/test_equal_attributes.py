"""Attributes that Python counts as equal (True, 1, 1.0, NumPy's): one problem, hence one kernel, or refused. Keys of plans do not tell them
apart, so two that were taken and differed would be mixed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.errors import InvalidArgument
from oxidnn.ops import OPS
from oxidnn.ops.case import format_case, parse_case
from oxidnn.testing.sample import CASES


def alike(value: Any) -> list[Any]:
    """What equals the value, or a tuple with one of its parts so replaced, and is of another type."""
    if isinstance(value, tuple):
        return [(*value[:i], other, *value[i + 1:]) for i, part in enumerate(value) for other in alike(part)]
    if not isinstance(value, (bool, int, float)) or value != value or abs(value) >= 2**53:
        return []
    others = [float(value), np.float64(value), np.int64(int(value)), int(value), bool(value), np.bool_(value)]
    return [other for other in others if other == value and type(other) is not type(value)]


@pytest.mark.parametrize("op", sorted(OPS))
def test_equal_attributes_are_one_problem_or_refused(op: str) -> None:
    definition, seen = OPS[op], set()
    for line in CASES.get(op, ()):
        problem = parse_case(line)
        tensors = {o.name: o.desc for o in problem.operands}
        given = {n: v for n, v in definition.attrs if v is not None} | dict(problem.attrs)
        try:
            definition.make(tensors, given, problem.policy)
        except InvalidArgument:  # a default that is for another form of the op
            given = dict(problem.attrs)
        for name, value in given.items():
            for other in alike(value) if (name, repr(value)) not in seen else ():
                seen.add((name, repr(value)))
                try:
                    found = definition.make(tensors, {**given, name: other}, problem.policy)
                except InvalidArgument as error:
                    assert name in str(error) or type(other) not in (bool, np.bool_), f"{name}={other!r}: {error}"
                    continue
                assert repr(found) == repr(problem), f"{name}={other!r} for {value!r}"
                assert format_case(found) == format_case(problem) and parse_case(format_case(found)) == problem


def test_equal_attributes_share_a_plan_or_its_kernel() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x, w = np.ones((1, 2, 4, 4), np.float32), np.ones((4, 1, 3, 3), np.float32)
    first, same, pairs = (h.plan("conv_fprop", x, w, padding=p, groups=g, flip=f).plan
                          for p, g, f in ((1, 2, False), (np.int64(1), np.int32(2), np.bool_(False)), ((1, 1), 2, False)))
    assert first is not None and first is same
    assert pairs is not None and pairs.problem == first.problem and pairs.build == first.build and pairs.origin == "memory"


def test_numbers_for_flags_make_no_kernel_of_their_own() -> None:
    """A call with 1 after one with True has its plan, whichever came first, and never the other's result."""
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((2, 3), np.float32)
    for flags in ((True, False), (False, True)):
        h = oxidnn.DnnHandle("emu:sm_80")
        for flag in flags:
            want = x.T @ y if flag else x @ y.T
            np.testing.assert_array_equal(h.gemm(x, y, transpose_a=flag, transpose_b=not flag), want)
            np.testing.assert_array_equal(h.gemm(x, y, transpose_a=int(flag), transpose_b=int(not flag)), want)
            np.testing.assert_array_equal(h.gemm(x, y, transpose_a=flag, transpose_b=not flag, alpha=np.float64(1)), want)


@pytest.mark.parametrize("wrong", [{"groups": True}, {"groups": 2.0}, {"flip": 1}, {"flip": 0.0}, {"stride": True}, {"stride": 1.0}])
def test_numbers_for_flags_and_flags_for_numbers_are_refused(wrong: dict[str, Any]) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x, w = np.ones((1, 2, 4, 4), np.float32), np.ones((2, 2, 3, 3), np.float32)
    with pytest.raises(InvalidArgument, match=next(iter(wrong))):
        h.conv(x, w, **wrong)
