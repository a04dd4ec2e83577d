"""Numbers given with each call: their types, and the values tests and tuning give them."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.ops.base import Problem, Scalar
from oxidnn.ops.case import parse_case
from oxidnn.testing.data import random_scalars, stored_scalars
from oxidnn.testing.sample import FILLS


@pytest.mark.parametrize(("line", "kind"), [
    ('pointwise x=f32[3] expression="x * scalar(s)"', "f32"), ('pointwise x=f16[3] expression="x * scalar(s)"', "f32"),
    ('pointwise x=f64[3] expression="x * scalar(s)"', "f64"), ('pointwise x=s32[3] expression="x * scalar(s)"', "f32"),
    ('gemm a=bf16[3,4] b=bf16[4,2] epilogue="acc * scalar(s)"', "f32"), ('gemm a=f64[3,4] b=f64[4,2] epilogue="acc * scalar(s)"', "f64"),
    ('conv_fprop x=f64[1,1,3] w=f64[1,1,1] epilogue="acc * scalar(s)"', "f64"),
    ('conv_dgrad dy=f16[1,1,3] w=f16[1,1,1] x_shape=(1,1,3) epilogue="acc * scalar(s)"', "f32"),
])
def test_scalars_have_the_type_of_the_arithmetic(line: str, kind: str) -> None:
    assert parse_case(line).scalars == (Scalar("s", kind),)


def test_random_scalars_are_what_their_types_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem("op", (), scalars=tuple(Scalar(t, t) for t in ("f32", "f64", "u32", "s32", "u64", "s64")))
    seen = [random_scalars(problem, np.random.default_rng(seed)) for seed in range(50)]
    for values in seen:
        assert values["f32"] == float(np.float32(values["f32"])) and 0 <= values["s32"] < 2**31 and 0 <= values["u64"] < 2**64
        assert {type(values[t]) for t in ("f32", "f64")} == {float} and type(values["u64"]) is int
        assert stored_scalars(problem, values) == values
    assert any(v["f64"] != float(np.float32(v["f64"])) for v in seen)
    assert any(v["u64"] > 2**32 for v in seen) and any(v["u32"] < 2**16 for v in seen)
    monkeypatch.setitem(FILLS, ("op", "f32"), lambda rng, problem: 0.1)
    assert random_scalars(problem, np.random.default_rng(0))["f32"] == float(np.float32(0.1))
