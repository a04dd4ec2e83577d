"""The tolerance law: what passes, what fails, and by how much."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.dtypes import BF16, E4M3, E5M2, F16, F32, F64, S32, TABLE
from oxidnn.errors import NumericsError
from oxidnn.ops.base import Operand, Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.backend import POISON
from oxidnn.tensor import TensorDesc
from oxidnn.testing.compare import check_close, tolerance_for
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import compare, exact
from oxidnn.testing.reference import REFERENCES, Expected


@pytest.mark.parametrize("kind", [t for t in TABLE if t.is_float])
def test_smallest_is_the_smallest_subnormal(kind) -> None:  # type: ignore[no-untyped-def]
    finfo = ml_dtypes.finfo(kind.numpy)
    assert kind.smallest == float(finfo.smallest_subnormal) and kind.epsilon == float(finfo.eps) and kind.max == float(finfo.max)


@pytest.mark.parametrize("kind", [F64, F32, F16, BF16, E4M3, E5M2])
def test_a_rounded_result_passes_and_a_wrong_one_does_not(kind) -> None:  # type: ignore[no-untyped-def]
    want = np.random.default_rng(0).uniform(0.5, 2, 200)
    law = tolerance_for(kind)
    assert check_close(want.astype(np.float32 if kind is not F64 else np.float64).astype(kind.numpy), want, law) <= 1
    with pytest.raises(NumericsError, match=r"\[7\]"):
        check_close(np.where(np.arange(200) == 7, want * (1 + 6 * kind.epsilon), want), want, law)
    tiny = np.full(3, kind.smallest)
    assert check_close(tiny * 2, tiny, law) <= 1
    with pytest.raises(NumericsError):
        check_close(tiny * 3.5, tiny, law)


def test_slack_is_added_and_elementwise() -> None:
    want, slack = np.ones(4), np.array([0.0, 0.5, 0.0, 0.0])
    got = np.array([1, 1.5, 1, 1], np.float32)
    assert 0.9 < check_close(got, want, tolerance_for(F32), slack=slack) <= 1
    for broken in (np.roll(slack, 1), slack * 0.9, None):
        with pytest.raises(NumericsError, match=r"\[1\]"):
            check_close(got, want, tolerance_for(F32), slack=broken)


@pytest.mark.parametrize("kind", [F32, BF16, S32])
def test_elements_that_are_not_to_be_written_keep_what_they_held(kind) -> None:  # type: ignore[no-untyped-def]
    desc = TensorDesc.packed(kind, (2, 3))
    problem = Problem("relu", (Operand("y", desc, True),))
    written = np.array([[True, True, False], [True, False, False]])
    poison = np.full(6 * kind.num_bytes, POISON, np.uint8).view(kind.numpy).reshape(2, 3)
    held = np.arange(6).reshape(2, 3).astype(kind.numpy)
    want = {"y": Expected(np.full((2, 3), 7.0), written=written)}
    seven = np.full((2, 3), 7).astype(kind.numpy)
    compare(problem, {"y": np.where(written, seven, poison)}, want)
    compare(problem, {"y": np.where(written, seven, held)}, want, held={"y": held})
    for got, memory in ((seven, {}), (np.where(written, seven, held), {}), (np.where(written, seven, poison), {"y": held})):
        with pytest.raises(NumericsError, match="left alone"):
            compare(problem, {"y": got}, want, held=memory)
    with pytest.raises(NumericsError, match=r"y\[0, 1\]"):
        compare(problem, {"y": np.where(written, np.where(np.arange(6).reshape(2, 3) == 1, held, seven), poison)}, want)


def _rounded(x: np.ndarray, bits: int) -> np.ndarray:
    """f32 values to the nearest with `bits` fewer mantissa bits."""
    return (((x.view(np.uint32) + np.uint32(1 << (bits - 1))) >> bits) << bits).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("epilogue", ["", "epilogue=relu(acc*scale+bias) scale=f32[24] bias=f32[24]", "epilogue=gelu"])
@pytest.mark.parametrize("line", ["gemm a=f32[40,64] b=f32[64,24]", "conv_fprop x=f32[2,8,6,7] w=f32[24,8,3,3] padding=1"])
def test_tf32_is_judged_by_what_the_policy_allows(line: str, epilogue: str) -> None:
    """Inputs rounded to tf32 pass under math=tf32 and not under ieee; rounded to bf16 they pass under neither."""
    problem = parse_case(f"{line} {epilogue} math=tf32")
    strict = replace(problem, policy=replace(problem.policy, math="ieee"))
    inputs = random_inputs(problem, np.random.default_rng(1))
    first, second = problem.operands[0].name, problem.operands[1].name
    reference = REFERENCES[problem.op]
    name = problem.outputs[0].name

    def result(bits: int) -> dict[str, np.ndarray]:
        less = inputs | {n: _rounded(inputs[n], bits) for n in (first, second)}
        return {name: reference(strict, exact(problem, less), {})[name].want.astype(np.float32)}

    want, strict_want = reference(problem, exact(problem, inputs), {}), reference(strict, exact(problem, inputs), {})
    assert 0.01 < compare(problem, result(13), want) <= 1
    with pytest.raises(NumericsError):
        compare(strict, result(13), strict_want)
    spoilt = result(13)
    spoilt[name][(0,) * spoilt[name].ndim] += 0.5
    with pytest.raises(NumericsError):
        compare(problem, spoilt, want)
    x3 = replace(problem, policy=replace(problem.policy, math="bf16x3"))
    with pytest.raises(NumericsError):
        compare(x3, result(13), reference(x3, exact(problem, inputs), {}))


@pytest.mark.parametrize("epilogue", ["", "bias=f32[24] epilogue=bias_relu", "gate=silu"])
def test_sums_of_8_bit_floats_are_judged_by_the_engine_that_makes_them(epilogue: str) -> None:
    """An error of 13 bits passes where an engine leaves sums to tensor cores, and nowhere else; more passes nowhere."""
    problem = parse_case(f"gemm a=e4m3[16,64] b=e4m3[24,64] transpose_b=True out_dtype=f32 {epilogue}")
    inputs = exact(problem, random_inputs(problem, np.random.default_rng(1)))
    want = REFERENCES["gemm"](problem, inputs, {})
    coarse = want["d"].coarse_slack
    assert coarse is not None

    def off_by(part: float) -> dict[str, np.ndarray]:
        return {"d": (want["d"].want + part * coarse).astype(np.float32)}

    assert compare(problem, off_by(0.9), want, is_coarse=True) > 0.5
    for got, is_coarse in ((off_by(0.9), False), (off_by(1.5), True)):
        with pytest.raises(NumericsError):
            compare(problem, got, want, is_coarse=is_coarse)


def test_only_engines_of_hopper_s_tensor_cores_sum_coarsely() -> None:
    assert {e.id for engines in ENGINES.values() for e in engines if e.sums_coarsely and e.id.startswith("gemm")} == {
        "gemm.wgmma_sm90", "gemm.wgmma_sm90_turned", "gemm.skinny_wgmma"}
