"""Conversions from and to 8-bit floats: all codes, ties, both rules of overflow, every type and kernel, with and without instructions."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.pointwise import parse
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dtypes import dtype
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute
from tests.emu.running import apply as apply_instructions

KINDS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
ARCHES = ("sm_80", "sm_90a")


def values(kind: str) -> np.ndarray:
    """Every number of the type, the middles between neighbours and what lies on either side of them, and what is beyond."""
    codes = np.arange(256, dtype=np.uint8).view(KINDS[kind]).astype(np.float64)
    finite = np.unique(codes[np.isfinite(codes)])
    middles = (finite[1:] + finite[:-1]) / 2
    top = finite[-1] + (finite[-1] - finite[-2]) / 2
    near = [np.nextafter(np.float32(v), np.float32(d), dtype=np.float32) for v in (*middles, top, -top) for d in (np.inf, -np.inf)]
    return np.concatenate([finite, middles, near, [top, -top, 1e9, -1e9, np.inf, -np.inf, np.nan, 1e-30, -1e-30, -0.0]])


def wanted(x: np.ndarray, kind: str, saturate: bool) -> np.ndarray:
    """By a table of the numbers: the nearest, of two the one with the even code."""
    codes = np.arange(128, dtype=np.uint8)
    numbers = codes.view(KINDS[kind]).astype(np.float64)
    numbers = numbers[np.isfinite(numbers)]
    most = len(numbers) - 1
    size = np.abs(x)
    above = np.minimum(np.searchsorted(numbers, size), most)  # the first that is not below
    below = np.maximum(above - 1, 0)
    to_below, to_above = size - numbers[below], numbers[above] - size
    code = np.where((to_below < to_above) | ((to_below == to_above) & (below % 2 == 0)), below, above)
    if not saturate:
        top = numbers[most] + (numbers[most] - numbers[most - 1]) / 2
        code = np.where((size >= top) if most % 2 else (size > top), most + 1, code)  # inf, or NaN
    code = np.where(np.isnan(x), 0x7F, code) | np.where(np.signbit(x), 0x80, 0)
    return code.astype(np.uint8).view(KINDS[kind])


def check(got: np.ndarray, want: np.ndarray) -> None:
    numbers = ~np.isnan(want.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), ~numbers)
    np.testing.assert_array_equal(got.view(np.uint8)[numbers], want.view(np.uint8)[numbers])


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("saturate", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("source", ["f32", "f64", "f16", "bf16"])
def test_every_engine_rounds_to_nearest_even(kind: str, source: str, saturate: bool, arch: str) -> None:
    backend = EmulatedBackend(arch, checkers="all")
    exact = values(kind)
    with np.errstate(all="ignore"):
        x = exact.astype(np.float32 if source == "bf16" else np.float64).astype(dtype(source).numpy)
    if source == "f64":  # what f32 would round to a middle first
        x = np.concatenate([x, [17 + 2.0**-40, 17 - 2.0**-40, 464 + 1e-9, 61440 - 1e-9]])
    x = np.resize(x, (24, len(x) // 24 * 24 + 40)) if source == "f32" else x[None]
    want = wanted(x.astype(np.float64), kind, saturate)
    flag = "" if saturate else " saturate=False"
    rows, columns = x.shape
    lines = [f"{op} x={source}[{rows},{columns}] dtype={kind}{flag}" for op in ("cast", "pointwise expression=x")]
    if rows > 8:
        lines.append(f"transform x={source}[{rows},{columns}] y={kind}[{rows},{columns}](1,{rows}) dtype={kind}{flag}")
    for line in lines:
        problem = parse_case(line)
        for engine in ENGINES[problem.op]:
            if engine.check_support(problem, backend.info):
                for config in engine.configs(problem, backend.info)[:3]:
                    check(execute(backend, problem, engine, config, {"x": x})["y"], want)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("target", ["f32", "f64", "f16", "bf16", "s8", "u8", "s32", "bool"])
def test_every_code_is_read_exactly(kind: str, target: str, arch: str) -> None:
    h = oxidnn.DnnHandle(f"emu:{arch}")
    codes = np.arange(256, dtype=np.uint8).view(KINDS[kind])
    for x in (codes, np.concatenate([codes[:1], codes])[1:], codes[::-1]):
        got = h.cast(x, target)
        wide = x.astype(np.float64)
        if got.dtype.kind == "f" or target == "bf16":
            with np.errstate(all="ignore"):
                np.testing.assert_array_equal(got.astype(np.float64), wide.astype(np.float32).astype(got.dtype).astype(np.float64))
        elif target == "bool":
            np.testing.assert_array_equal(got, wide != 0)
        else:
            info = np.iinfo(got.dtype)
            np.testing.assert_array_equal(got, np.clip(np.trunc(np.nan_to_num(wide, nan=0)), info.min, info.max).astype(got.dtype))
    for other in KINDS:
        for saturate in (True, False) if other != kind else (True,):
            got = h.cast(codes, other, saturate=saturate)
            check(got, codes if other == kind else wanted(codes.astype(np.float64), other, saturate))


def test_published_values() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x = np.array([448, 449, 464, 466, -1e9, np.inf, 2.0**-10, 3 * 2.0**-10, 17, 18, 19], np.float32)
    codes = [h.cast(x, "e4m3", saturate=flag).view(np.uint8).tolist() for flag in (True, False)]
    assert codes[0] == [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, 0x00, 0x02, 0x58, 0x59, 0x5A]
    assert codes[1][:6] == [0x7E, 0x7E, 0x7E, 0x7F, 0xFF, 0x7F] and codes[1][6:] == codes[0][6:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("compute", ["f32", "f64"])
def test_values_under_way_are_rounded_as_stored_ones(kind: str, compute: str) -> None:
    exact = values(kind)
    with np.errstate(all="ignore"):
        x = exact.astype({"f32": np.float32, "f64": np.float64}[compute])
    got = apply_instructions(parse(f"cast(x, {kind})").lower({"x": "%a0"}, ["%d"], compute), [x], x.dtype)
    check(got.astype(KINDS[kind]), wanted(x.astype(np.float64), kind, True))


def test_numbers_of_integers() -> None:
    h = oxidnn.DnnHandle("emu:sm_90a")
    for kind in (np.int8, np.uint8, np.int32, np.uint32, np.int64, np.uint64):
        info = np.iinfo(kind)
        x = np.array([*range(120), info.max, info.min, info.max // 2], kind)
        for name in KINDS:
            for saturate in (True, False):
                check(h.cast(x, name, saturate=saturate), wanted(x.astype(np.float64), name, saturate))


def test_saturate_is_of_8_bit_floats() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    with pytest.raises(InvalidArgument, match="saturate is False"):
        h.cast(np.ones(3, np.float32), "float16", saturate=False)
    with pytest.raises(InvalidArgument, match="saturate is 0"):
        h.cast(np.ones(3, np.float32), "e4m3", saturate=0)


@pytest.mark.parametrize("arch", ARCHES)
def test_kernels_assemble_without_spills(arch: str) -> None:
    device = known_device(arch)
    for line in ("cast x=f32[1000,64] dtype=e4m3", "cast x=bf16[1000,64] dtype=e5m2 saturate=False", "cast x=e4m3[1000,65] dtype=bf16",
                 "transform x=bf16[64,128] y=e4m3[64,128](1,64) dtype=e4m3 alpha=2.0", "cast x=f64[999] dtype=e4m3",
                 'pointwise x=e4m3[64,128] y=e5m2[64,128] expression="gelu(x) + y" dtype=e4m3 saturate=False'):
        problem = parse_case(line)
        for engine in ENGINES[problem.op]:
            if engine.check_support(problem, device):
                for config in engine.configs(problem, device):
                    for step in engine.build_steps(problem, config, device).steps:
                        assert assemble(render(step.spec), arch).spill_bytes == 0
