"""What stands in for instructions that sm_75 lacks gives the bits of those instructions, and kernels for sm_75 are right."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.turing import lower
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

from .running import apply

INSTRUCTIONS = (
    ("max.NaN.f32 %d, %a0, %a1;", np.float32), ("min.NaN.f32 %d, %a0, %a1;", np.float32),
    ("cvt.rn.bf16.f32 %h1, %a0; cvt.u32.u16 %d, %h1;", np.uint32), ("cvt.rn.bf16x2.f32 %d, %a0, %a1;", np.uint32),
    ("mov.b16 %h1, 7; setp.lt.f32 %p1, %a0, %a1; @%p1 cvt.rn.bf16.f32 %h1, %a0; cvt.u32.u16 %d, %h1;", np.uint32),
    ("mov.b32 %d, 0; setp.lt.f32 %p1, %a0, %a1; @!%p1 max.NaN.f32 %d, %a0, %a1;", np.float32),
)


@pytest.mark.parametrize(("code", "result"), INSTRUCTIONS)
def test_substitutes_have_the_bits_of_the_instruction(code: str, result: type) -> None:
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**32, (2, 4000), dtype=np.uint32)
    # Ties of bf16 and their neighbours, values that overflow, infinities, zeros, NaN.
    edges = np.array([0x3F808000, 0x3F818000, 0x3F808001, 0x3F807FFF, 0x7F7FFFFF, 0x7F7F8000, 0xFF7F8000, 0x7F800000, 0xFF800000, 0,
                      0x80000000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x00008000, 0x00018000], np.uint32)
    pairs = np.array(np.meshgrid(edges, edges)).reshape(2, -1).astype(np.uint32)
    a, b = np.concatenate((bits, pairs), 1).view(np.float32)
    substituted = lower(code)
    assert ".NaN" not in substituted and ".bf16" not in substituted
    want, got = (apply(c, [a.copy(), b.copy()], result).view(np.uint32) for c in (code, substituted))
    assert np.array_equal(got, want)


@pytest.mark.parametrize("line", [
    "conv_fprop x=bf16[2,5,7,6] w=bf16[4,5,3,3] bias=f32[4] padding=1 epilogue=bias_relu", "gemm a=bf16[9,7] b=bf16[7,5]",
    "gemm a=f32[40,30] b=f32[30,50] d=bf16[40,50] epilogue=relu(acc)", "max_pool x=bf16[2,3,6,7] window=3 stride=2 padding=1",
    "reduce x=bf16[6,50] op=sum axes=1", "pointwise x=bf16[4,9] expression=\"relu(x)\"", "softmax x=bf16[5,70]"])
def test_bf16_kernels_for_sm_75(line: str) -> None:
    from oxidnn.dispatch.registry import ENGINES

    backend = EmulatedBackend("sm_75", checkers="all")
    problem = parse_case(line)
    takers = [e for e in ENGINES[problem.op] if e.check_support(problem, backend.info)]
    assert takers
    for engine in takers:
        run_problem(backend, problem, engine)
