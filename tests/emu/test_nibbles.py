"""Numbers of four bits: every code there and back, published roundings, ml_dtypes' values, odd rows, refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import CASES


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize(("kind", "numbers"), [("s4", ml_dtypes.int4), ("u4", ml_dtypes.uint4), ("e2m1", ml_dtypes.float4_e2m1fn)])
def test_every_byte_there_and_back(h: oxidnn.DnnHandle, kind: str, numbers: Any, dtype: str) -> None:
    codes = np.arange(256, dtype=np.uint8)
    values = np.asarray(h.unpack4(codes, kind, dtype=dtype)).astype(np.float64)
    assert values.shape == (512,)
    halves = np.stack([codes & 15, codes >> 4], -1).reshape(-1)
    want = halves.astype(np.uint8).view(numbers).astype(np.float64) if kind == "e2m1" else np.where(
        (halves >= 8) & (kind == "s4"), halves.astype(np.float64) - 16, halves)
    np.testing.assert_array_equal(values, want)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(want))
    np.testing.assert_array_equal(h.pack4(h.unpack4(codes, kind, dtype=dtype), kind), codes)


def test_fp4_is_rounded_to_nearest_even_and_saturates(h: oxidnn.DnnHandle) -> None:
    x = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, 1e30, np.inf, -np.inf, -0.0, 0.26, -0.26, 4.99, 5.01], np.float32)
    want = [0, 1, 1, 2, 2, 4, 4, 6, 6, 6, -6, 0, 0.5, -0.5, 4, 6]
    np.testing.assert_array_equal(h.unpack4(h.pack4(x, "e2m1"), "e2m1"), np.array(want))
    middles = np.array([0, 0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7], np.float32)
    any_bits = np.random.default_rng(0).integers(0, 2**32, 2000, dtype=np.uint32).view(np.float32)
    dense = np.concatenate([np.linspace(-7, 7, 2000).astype(np.float32), any_bits[~np.isnan(any_bits)],
                            *(f * np.nextafter(middles, np.float32(to)) for f in (1, -1) for to in (9, -9))])
    np.testing.assert_array_equal(h.unpack4(h.pack4(dense, "e2m1"), "e2m1"), dense.astype(ml_dtypes.float4_e2m1fn).astype(np.float32))


def test_integers_saturate_and_odd_rows_end_with_zero(h: oxidnn.DnnHandle) -> None:
    x = np.array([[-9.5, -8, -1.9, 0.9, 7.9], [8, 100, np.nan, np.inf, -np.inf]], np.float32)
    packed = np.asarray(h.pack4(x, "s4"))
    np.testing.assert_array_equal(packed, [[0x88, 0x0F, 0x07], [0x77, 0x70, 0x08]])
    np.testing.assert_array_equal(h.unpack4(packed, "s4", size=5, dtype="int8"), [[-8, -8, -1, 0, 7], [7, 7, 0, 7, -8]])
    np.testing.assert_array_equal(h.pack4(np.array([-3, 17, 5], np.int64), "u4"), [0xF0, 0x05])
    np.testing.assert_array_equal(h.pack4(np.array([-3, 17, 5], np.int64), "u4", saturate=False), [0x1D, 0x05])


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_assemble_without_spills(arch: str) -> None:
    device = known_device(arch)
    for op in ("pack4", "unpack4"):
        engine = ENGINES[op][0]
        for problem in map(parse_case, CASES[op]):
            for config in engine.configs(problem, device):
                for step in engine.build_steps(problem, config, device).steps:
                    assert assemble(render(step.spec), arch).spill_bytes == 0


@pytest.mark.parametrize("line", ["pack4 x=bf16[3,96]nchw kind=e2m1", "pack4 x=f16[5,48](64,1) kind=s4", "pack4 x=bf16[4,40]nchw kind=e2m1",
                                  "pack4 x=f16[4,32]nchw y=u8[4,16](20,1) kind=e2m1"])
def test_sixteen_numbers_a_thread_or_eight(line: str) -> None:
    problem, engine, backend = parse_case(line), ENGINES["pack4"][0], EmulatedBackend("sm_90a", checkers="all")
    configs = engine.configs(problem, backend.info)
    assert [c["count"] for c in configs] == ([16, 8] if "y=" not in line and "40" not in line else [8])
    for config in configs:
        run_problem(backend, problem, engine, config)


def test_refusals(h: oxidnn.DnnHandle) -> None:
    x, packed = np.ones((3, 5), np.float32), np.ones((3, 5), np.uint8)
    for call, word in (
        (lambda: h.pack4(x, "s3"), "kind"), (lambda: h.pack4(np.array(1.0, np.float32)), "rank of x"),
        (lambda: h.pack4(np.ones(3, bool)), "type of x"), (lambda: h.pack4(x, out=np.empty((3, 5), np.uint8)), "shape of y"),
        (lambda: h.pack4(x, "e2m1", saturate=False), "saturate"), (lambda: h.unpack4(x), "type of x"),
        (lambda: h.unpack4(packed, size=8), "size"), (lambda: h.unpack4(packed, size=11), "size"),
        (lambda: h.unpack4(packed, dtype="bool"), "dtype"), (lambda: h.unpack4(packed, 4), "kind"),
        (lambda: h.unpack4(packed, size=9, out=np.empty((3, 10), np.float32)), "shape of y"),
    ):
        with pytest.raises(InvalidArgument, match=word):
            call()


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_every_number_of_16_bits_becomes_the_fp4_that_it_becomes_of_32(h: oxidnn.DnnHandle, dtype: Any) -> None:
    """Two at a time, in their own arithmetic."""
    x = np.arange(65536, dtype=np.uint32).astype(np.uint16).view(dtype)
    np.testing.assert_array_equal(h.pack4(x, "e2m1"), h.pack4(x.astype(np.float32), "e2m1"))
