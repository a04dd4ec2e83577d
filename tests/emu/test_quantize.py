"""Quantisation byte for byte: all codes and the middles between them, published faults, formats against ml_dtypes, chances, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.ops.quantize import KINDS
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.reference.quantize import numbers_of

FLOATS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e2m1": ml_dtypes.float4_e2m1fn}
ARCHES = ("sm_80", "sm_90a")


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


@pytest.fixture(scope="module")
def old() -> oxidnn.DnnHandle:
    """Without instructions for 8-bit floats."""
    return oxidnn.DnnHandle("emu:sm_80")


def codes(q: Any, kind: str, size: int | None = None) -> np.ndarray:
    """Codes one by one, as bits."""
    q = np.asarray(q).view(np.uint8)
    if not KINDS[kind].is_packed:
        return q
    both = np.stack([q & 15, q >> 4], -1).reshape(*q.shape[:-1], -1)
    return both if size is None else both[..., :size]


def nearest(x: np.ndarray, kind: str) -> np.ndarray:
    """The code of every number by distance in exact arithmetic, of two the even one (nf4: the lower)."""
    x = np.asarray(x, np.float64)
    table = numbers_of(kind)
    if KINDS[kind].is_integer:
        return np.clip(np.rint(x), table.min(), table.max()).astype(np.int64) & (2**KINDS[kind].bits - 1)
    found = np.empty(x.shape, np.int64)
    sign = np.signbit(x)
    half = len(table) // 2
    for at, v in np.ndenumerate(x):
        part = table if kind == "nf4" else table[:half]
        distance = np.abs(part - (np.clip(v, -2, 2) if kind == "nf4" else min(abs(v), part[np.isfinite(part)].max())))
        distance[~np.isfinite(part)] = np.inf
        best = np.flatnonzero(distance == distance.min())
        found[at] = best[0] if kind == "nf4" else min(best, key=lambda c: c % 2)
    return found if kind == "nf4" else found + half * sign


def edges(kind: str) -> np.ndarray:
    """All numbers, the middles of neighbours, what lies on either side of them in f32, and what is beyond."""
    numbers = np.unique(numbers_of(kind)[np.isfinite(numbers_of(kind))])
    middles = (numbers[1:] + numbers[:-1]) / 2
    near = [np.nextafter(np.float32(m), np.float32(to)) for m in middles for to in (-1e9, 1e9)]
    beyond = [-0.0, 1e-30, -1e-30, 3e38, -3e38, numbers[-1] * 1.2, numbers[0] * 1.2]
    return np.concatenate([numbers, middles, near, beyond]).astype(np.float32)


@pytest.mark.parametrize("kind", KINDS)
def test_every_code_and_every_middle(kind: str, h: oxidnn.DnnHandle, old: oxidnn.DnnHandle) -> None:
    x = edges(kind)
    x = np.concatenate([x, np.zeros(-len(x) % 16, np.float32)])
    want = nearest(x, kind)
    for handle in (h, old):
        got = codes(handle.quantize(x, kind), kind)
        np.testing.assert_array_equal(got, want)
        # 2^-3 is a scale by which quotients are exact: the division, too
        one = np.full(1, 0.125, np.float32)
        inside = np.abs(x) < 1e37
        np.testing.assert_array_equal(codes(handle.quantize(x * 0.125, kind, one), kind)[inside], want[inside])
        every = np.arange(256, dtype=np.uint8)
        every = every if KINDS[kind].is_packed else every.view(KINDS[kind].storage.numpy)
        for dtype in ("float32", "float16", "bfloat16"):
            numbers = np.asarray(handle.dequantize(every, kind=kind, dtype=dtype)).astype(np.float64)
            with np.errstate(over="ignore"):
                exact = numbers_of(kind)[codes(every, kind)].astype(np.dtype(dtype) if dtype != "bfloat16" else ml_dtypes.bfloat16)
            np.testing.assert_array_equal(numbers, exact.astype(np.float64))


@pytest.mark.parametrize("kind", FLOATS)
def test_floats_are_those_of_ml_dtypes(kind: str, h: oxidnn.DnnHandle) -> None:
    bits = np.random.default_rng(1).integers(0, 2**32, 4096, dtype=np.uint32).view(np.float32)
    most = KINDS[kind].largest
    x = np.clip(np.concatenate([bits[~np.isnan(bits)], np.linspace(-most, most, 3001, dtype=np.float32)]), -most, most)
    x = x[: len(x) // 16 * 16]
    np.testing.assert_array_equal(codes(h.quantize(x, kind), kind), x.astype(FLOATS[kind]).view(np.uint8))


def test_quotients_are_correctly_rounded(h: oxidnn.DnnHandle) -> None:
    """Where x / scale lies next to a middle that a product with the reciprocal would cross; scales far from 1."""
    rng = np.random.default_rng(2)
    rows, size = 64, 64
    scale = (rng.uniform(1, 2, rows) * 2.0 ** rng.choice([-140, -126, -79, -30, 0, 1, 60, 79, 100, 126], rows)).astype(np.float32)
    with np.errstate(all="ignore"):
        half = (rng.integers(-260, 260, (rows, size)) + 0.5) * scale[:, None].astype(np.float64)
        x = half.astype(np.float32)
        x = np.where(rng.random(x.shape) < 0.5, np.nextafter(x, np.float32(0)), x)
        want = np.clip(np.rint(x / scale[:, None]), -128, 127)
    np.testing.assert_array_equal(h.quantize(x, "s8", scale), want)
    odd = np.array([[1.5 + 2.0**-22, 1.5, -0.0, np.inf, -np.inf, np.nan]], np.float32)
    one = np.array([1 + 2.0**-23], np.float32)
    np.testing.assert_array_equal(h.quantize(odd, "s8", one), [[2, 1, 0, 127, -128, 0]])


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("kind", ["s8", "u8", "s4", "e4m3", "e5m2", "e2m1"])
def test_quotients_of_halves_by_scales_next_to_those_of_middles(kind: str, dtype: Any, h: oxidnn.DnnHandle) -> None:
    """One step of correction has to do: scales are the f32 numbers about x / (middle of two codes)."""
    rng = np.random.default_rng(9)
    numbers = numbers_of(kind)
    numbers = np.unique(numbers[np.isfinite(numbers) & (numbers >= 0)])
    middle = rng.choice((numbers[1:] + numbers[:-1]) / 2, 6000)
    x = rng.uniform(1, 2, 6000).astype(dtype)
    x[:500], middle[:500] = 2, (numbers[1:] + numbers[:-1])[0] / 2  # where the one step is as close as it gets
    scale = (x.astype(np.float64) / middle).astype(np.float32)
    scale = (scale.view(np.int32) + rng.integers(-2, 3, 6000).astype(np.int32)).view(np.float32)
    want = nearest(x.astype(np.float32) / scale, kind)
    np.testing.assert_array_equal(codes(h.quantize(x, kind, scale, axis=0), kind, 6000), want)


@pytest.mark.parametrize("handle", ["h", "old"])
def test_published_casts_to_fp8(handle: str, request: Any) -> None:
    """jax-ml/ml_dtypes#260, #400, #147; onnx/onnx#6220, #7085."""
    h = request.getfixturevalue(handle)
    x = np.array([448, 449, 464, 466, -1e9, np.inf, 2.0**-10, 3 * 2.0**-10, 17, 18, 19], np.float32)
    ends = [0x00, 0x02, 0x58, 0x59, 0x5A]
    np.testing.assert_array_equal(codes(h.quantize(x, "e4m3"), "e4m3"), [0x7E, 0x7E, 0x7E, 0x7E, 0xFE, 0x7E, *ends])
    np.testing.assert_array_equal(codes(h.quantize(x, "e4m3", saturate=False), "e4m3"), [0x7E, 0x7E, 0x7E, 0x7F, 0xFF, 0x7F, *ends])
    one = np.ones((), np.float32)
    np.testing.assert_array_equal(codes(h.quantize(x, "e4m3", one, saturate=False), "e4m3"), [0x7E, 0x7E, 0x7E, 0x7F, 0xFF, 0x7F, *ends])
    x = np.array([57344, 61439, 61440, 1e9, -np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(codes(h.quantize(x, "e5m2"), "e5m2")[:5], [0x7B, 0x7B, 0x7B, 0x7B, 0xFB])
    np.testing.assert_array_equal(codes(h.quantize(x, "e5m2", one, saturate=False), "e5m2")[:5], [0x7B, 0x7B, 0x7C, 0x7C, 0xFC])
    assert np.isnan(h.quantize(x, "e5m2")[5].astype(np.float32))


def test_published_rounding_of_int8(h: oxidnn.DnnHandle) -> None:
    """sonos/tract#2850; microsoft/onnxruntime#25045, #32452; tenstorrent/tt-metal#51304, #56525."""
    x, scale, zero = np.array([-0.75, -0.25, 0.25, 0.75, 1.25], np.float32), np.full((), 0.5, np.float32), np.zeros((), np.int8)
    np.testing.assert_array_equal(h.quantize(x, "s8", scale, zero_point=zero), [-2, 0, 0, 2, 2])
    np.testing.assert_array_equal(h.quantize(x * 1000, "s8", scale), [-128, -128, 127, 127, 127])
    np.testing.assert_array_equal(h.quantize(np.array([64, -64, 100], np.float32), "s8", scale, saturate=False), [-128, -128, -56])
    far = np.array([2.0**31, 1e10, -1e10, -np.inf, 2.0**31 - 128, -129, np.nan], np.float32)
    for give in ({}, {"scale": np.ones((), np.float32)}):
        np.testing.assert_array_equal(h.quantize(far, "s8", saturate=False, **give), [0, 0, 0, 0, -128, 127, 0])
    np.testing.assert_array_equal(h.quantize(far, "u8", np.ones((), np.float32), zero_point=np.array(3, np.uint8), saturate=False),
                                  [3, 3, 3, 3, 131, 130, 3])
    zero = np.array(100, np.int8)
    np.testing.assert_array_equal(h.quantize(np.array([-114.0, 0.25, 13.5, 1e38, -1e38, np.nan], np.float32), "s8", scale, zero_point=zero),
                                  [-128, 100, 127, 127, -128, 100])


def test_published_blocks_of_fp4(h: oxidnn.DnnHandle) -> None:
    """ROCm/aiter#2900; meta-pytorch/MSLK#339; flashinfer-ai/flashinfer#2025, #3927; NVIDIA/Fuser#5401."""
    ties = np.array([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 7, *[0] * 23, 5]], np.float32)  # amax 7 has the exponent of 5
    q, scale = h.quantize(ties, "e2m1", "mxfp4")
    np.testing.assert_array_equal(scale, [[127]])
    np.testing.assert_array_equal(numbers_of("e2m1")[codes(q, "e2m1")][0, :8], [0, 1, 1, 2, 2, 4, 4, 6])
    x = np.zeros((33, 96), np.float32)
    x[:, 64:] = 5 * 2.0 ** (np.arange(33) % 5)[:, None]
    for scaling, blocks, first in (("mxfp4", 3, 127), ("nvfp4", 6, None)):
        q, plain = h.quantize(x, "e2m1", scaling)
        assert plain.shape == (33, blocks)
        assert not np.asarray(plain).view(np.uint8)[:, : blocks * 2 // 3].any() and not np.asarray(q)[:, :32].any()
        if first:
            np.testing.assert_array_equal(plain[:, 2], 127 + np.arange(33) % 5)
        q2, tiled = h.quantize(x, "e2m1", scaling, layout="128x4")
        np.testing.assert_array_equal(q, q2)
        columns = -(-blocks // 4) * 4
        assert tiled.shape == (128, columns)
        flat = np.asarray(tiled).view(np.uint8).reshape(-1)
        want = np.zeros(128 * columns, np.uint8)
        for i in range(33):
            for j in range(blocks):
                want[j // 4 * 512 + i % 32 * 16 + i // 32 % 4 * 4 + j % 4] = np.asarray(plain).view(np.uint8)[i, j]
        np.testing.assert_array_equal(flat, want)
        np.testing.assert_array_equal(h.dequantize(q, tiled, scaling=scaling, layout="128x4"), h.dequantize(q, plain, scaling=scaling))


@pytest.mark.parametrize(("kind", "scaling"), [("e4m3", "mxfp8"), ("e5m2", "mxfp8"), ("e2m1", "mxfp4")])
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
def test_mx_byte_for_byte(kind: str, scaling: str, dtype: Any, h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((6, 160)) * 2.0 ** rng.integers(-14, 14, (6, 5)).repeat(32, 1)).astype(dtype)
    x[0, :32], x[1, 33], x[2, 70], x[3, 0] = 0, np.inf, np.nan, 1e-7
    q, scale = h.quantize(x, kind, scaling)
    wide = x.astype(np.float64).reshape(6, 5, 32)
    amax = np.abs(wide).max(-1)
    with np.errstate(all="ignore"):
        exponent = np.clip(np.floor(np.log2(amax)) - np.floor(np.log2(KINDS[kind].largest)), -127, 127)
        want = np.where(np.isfinite(amax), exponent + 127, 255).astype(np.uint8)
        numbers = wide / 2.0 ** exponent[..., None]
    np.testing.assert_array_equal(scale, want)
    finite = np.isfinite(amax).repeat(32, 1)
    most = KINDS[kind].largest
    got = np.clip(numbers, -most, most).astype(np.float32).astype(FLOATS[kind]).view(np.uint8).reshape(6, 160)
    np.testing.assert_array_equal(codes(q, kind)[finite], got[finite])
    back = h.dequantize(q, scale, kind=kind, scaling=scaling)
    assert np.isnan(back[~finite]).all() and np.isfinite(back[finite]).all()


def test_nvfp4_byte_for_byte(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(4)
    x = (rng.standard_normal((7, 80)) * 2.0 ** rng.integers(-6, 6, (7, 5)).repeat(16, 1)).astype(ml_dtypes.bfloat16)
    x[3, 16:32] = 0
    q, scale, found = h.quantize(x, "e2m1", "nvfp4", global_scale="compute")
    wide = x.astype(np.float32).reshape(7, 5, 16)
    overall = np.abs(wide).max() / np.float32(2688)
    assert found == overall
    wanted = (np.abs(wide).max(-1) / (np.float32(6) * overall)).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(np.asarray(scale).view(np.uint8), wanted.view(np.uint8))
    total = wanted.astype(np.float32) * overall
    with np.errstate(all="ignore"):
        products = wide.astype(np.float64) * (np.float32(1) / total)[..., None].astype(np.float64)
    want = nearest(np.where(total[..., None] == 0, 0, products), "e2m1").reshape(7, 80)
    np.testing.assert_array_equal(codes(q, "e2m1"), want)
    y = h.dequantize(q, scale, scaling="nvfp4", global_scale=found)
    np.testing.assert_array_equal(y, numbers_of("e2m1")[want].astype(np.float32) * total.repeat(16, 1))
    again, same = h.quantize(x, "e2m1", "nvfp4", global_scale=np.asarray(found).reshape(1))
    np.testing.assert_array_equal(again, q)
    np.testing.assert_array_equal(same.view(np.uint8), scale.view(np.uint8))


@pytest.mark.parametrize(("line", "takes"), [
    ("x=bf16[128,512]nchw kind=e2m1 scaling=nvfp4 global_scale=f32[]nchw layout=128x4", True),
    ("x=f16[128,512]nchw kind=e2m1 scaling=mxfp4 layout=128x4", True), ("x=f16[128,256]nchw kind=e2m1 scaling=mxfp4", False),
    ("x=bf16[256,128]nchw kind=e2m1 scaling=nvfp4 layout=128x4", True),
    ("x=bf16[128,192]nchw kind=e2m1 scaling=nvfp4 layout=128x4", False)])
def test_two_scales_a_thread(line: str, takes: bool) -> None:
    problem, backend = parse_case(f"dynamic_quantize {line}"), EmulatedBackend("sm_90a", checkers="all")
    engine = next(e for e in ENGINES[problem.op] if e.check_support(problem, backend.info))
    found = [c for c in engine.configs(problem, backend.info) if "turns" in dict(c.knobs)]
    assert len(found) == takes
    for config in found:
        run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("exponent", [-140, -20, 0, 12, 126])
def test_nvfp4_by_any_global_scale(exponent: int, dtype: Any, h: oxidnn.DnnHandle) -> None:
    """Scales that saturate, that are subnormal or 0, and totals whose inverse is none."""
    x = (np.random.default_rng(exponent + 200).standard_normal((8, 64)) * 3).astype(dtype)
    overall = np.full((), 1.5 * 2.0**exponent, np.float32)
    q, scale = h.quantize(x, "e2m1", "nvfp4", global_scale=overall)
    wide = x.astype(np.float32).reshape(8, 4, 16)
    with np.errstate(all="ignore"):
        wanted = np.minimum(np.abs(wide).max(-1) / (np.float32(6) * overall), np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
        total = wanted.astype(np.float32) * overall
        products = wide.astype(np.float64) * (np.float32(1) / total)[..., None].astype(np.float64)
    np.testing.assert_array_equal(np.asarray(scale).view(np.uint8), wanted.view(np.uint8))
    want = nearest(np.where(total[..., None] == 0, 0, products), "e2m1").reshape(8, 64)
    np.testing.assert_array_equal(codes(q, "e2m1"), want)
    np.testing.assert_array_equal(h.quantize(x, "e2m1", scale, scaling="nvfp4", global_scale=overall), q)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("line", [
    "dynamic_quantize x=bf16[3,200]nchw kind=e4m3 scaling=token", "dynamic_quantize x=f32[4,40]nchw kind=e5m2 scaling=tensor",
    'dynamic_quantize x=f16[2,130]nchw kind=e4m3 scaling="(\'group\',128)"'])
def test_bytes_of_fp8(line: str, arch: str) -> None:
    """The registry compares numbers; here every byte."""
    problem = parse_case(line)
    backend = EmulatedBackend(arch, checkers="all")
    x = (np.random.default_rng(5).standard_normal(problem.shape) * 9).astype(problem.desc("x").dtype.numpy)  # type: ignore[attr-defined]
    for engine in ENGINES["dynamic_quantize"]:
        if not engine.check_support(problem, backend.info):
            continue
        got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], {"x": x})
        wide, kind = x.astype(np.float32), KINDS[dict(problem.attrs)["kind"]]
        blocks = [wide] if got["scale"].ndim == 0 else [wide[:, i: i + 128] for i in (0, 128)] if got["scale"].ndim == 2 else [wide]
        for i, part in enumerate(blocks):
            amax = np.abs(part).max() if got["scale"].ndim == 0 else np.abs(part).max(1)
            scale = amax / np.float32(kind.largest)
            np.testing.assert_array_equal(got["scale"] if got["scale"].ndim < 2 else got["scale"][:, i], scale)
            want = (part / np.reshape(scale, (-1, 1) if np.ndim(scale) else ())).astype(FLOATS[kind.name]).view(np.uint8)
            np.testing.assert_array_equal(got["y"].view(np.uint8)[:, 128 * i: 128 * i + part.shape[1]], want)


@pytest.mark.parametrize("line", [
    'dynamic_quantize x=bf16[78,136]nchw kind=e4m3 scaling="(\'block\',(32,64))"',
    "dynamic_quantize x=bf16[5,256]nchw kind=e2m1 scaling=mxfp4",
    'dynamic_quantize x=f32[130,40]nchw kind=u8 scaling="(\'block\',(128,128))" asymmetric=True',
    'dynamic_quantize x=bf16[40,96]nchw state=s64[2]nchw kind=s4 scaling="(\'block\',(32,64))" rounding=stochastic',
    "dynamic_quantize x=f16[33,80]nchw kind=e2m1 scaling=nvfp4 global_scale=f32[]nchw layout=128x4",
    'dynamic_quantize x=bf16[5,272]nchw kind=s4 scaling="(\'group\',128)"',
    "dequantize x=u8[40,64]nchw kind=e2m1 scale=e4m3[40,8]nchw global_scale=f32[]nchw scaling=nvfp4 dtype=f32",
    "dequantize x=u8[70,30]nchw kind=s4 scale=f32[70]nchw dtype=f32", "fake_quantize x=f32[30,64]nchw kind=e4m3 scale=f32[30]nchw"])
def test_every_arrangement(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    for engine in ENGINES[problem.op]:
        for config in engine.configs(problem, backend.info) if engine.check_support(problem, backend.info) else ():
            run_problem(backend, problem, engine, config, seed=4)


@pytest.mark.parametrize("line", ["dynamic_quantize x=bf16[24,1024]nchw kind=e4m3 scaling=tensor",
                                  "dynamic_quantize x=f32[6,8,256]nchw kind=s4 scaling=tensor"])
def test_a_tensor_that_ctas_walk_over_side_by_side(line: str) -> None:
    """One multiprocessor has three or four of them."""
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    backend.info = replace(backend.info, num_sms=1)
    engine = next(e for e in ENGINES[problem.op] if e.id == "quantize.reduced")
    config = engine.configs(problem, backend.info)[0]
    assert len(engine.build_steps(problem, config, backend.info).steps) == 3
    run_problem(backend, problem, engine, config, seed=5)


def test_what_is_not_finite_makes_its_scale_nan(h: oxidnn.DnnHandle) -> None:
    x = np.ones((4, 16), np.float32)
    x[1, 3], x[2, 5], x[3] = np.inf, np.nan, 0
    q, scale = h.quantize(x, "e4m3", "token")
    np.testing.assert_array_equal(scale, np.array([1 / 448, np.nan, np.nan, 1], np.float32))
    are_nan = np.isnan(np.asarray(q).astype(np.float32))
    np.testing.assert_array_equal(are_nan.all(1), [False, True, True, False])
    np.testing.assert_array_equal(are_nan.any(1), are_nan.all(1))
    q, scale, zero = h.quantize(x, "u8", "token", zero_point="compute")
    np.testing.assert_array_equal(np.isnan(scale), [False, True, True, False])
    np.testing.assert_array_equal(zero, 0)
    q, scale = h.quantize(x, "s4", "tensor")
    assert np.isnan(scale) and not np.asarray(q).any()


def test_chances_and_their_mean(h: oxidnn.DnnHandle) -> None:
    x = np.full((64, 64), 0.3, np.float32)
    for kind, low, high in (("s8", 0, 1), ("e4m3", 0.28125, 0.3125), ("e2m1", 0, 0.5), ("s4", 0, 1)):
        y = np.asarray(h.dequantize(h.quantize(x, kind, rounding="stochastic", seed=7), kind=kind))
        assert set(np.unique(y)) == {np.float32(low), np.float32(high)}
        spread = (high - low) / 2
        assert abs(y.mean() - 0.3) < 4 * spread / 64, kind
        again = np.asarray(h.dequantize(h.quantize(x, kind, rounding="stochastic", seed=7), kind=kind))
        np.testing.assert_array_equal(y, again)
    q, scale = h.quantize(x * np.arange(64, dtype=np.float32), "e2m1", ("group", 16), rounding="stochastic", seed=1, offset=9)
    y = h.dequantize(q, scale, kind="e2m1")
    assert abs(float((y / np.maximum(x * np.arange(64), 1e-3))[:, 32:].mean()) - 1) < 0.01


def test_gradients_go_straight_through(h: oxidnn.DnnHandle) -> None:
    x = np.array([[-9, -8.4, -1.3, 0.2, 7.4, 7.6, 100, np.nan]], np.float32)
    dy = np.arange(1, 9, dtype=np.float32).reshape(1, 8)
    one = np.ones(1, np.float32)
    np.testing.assert_array_equal(h.fake_quantize_backward(dy, x, "s4", one), [[0, 2, 3, 4, 5, 0, 0, 0]])
    np.testing.assert_array_equal(h.fake_quantize(x, "s4", one)[0, :7], [-8, -8, -1, 0, 7, 7, 7])
    zero = np.array([8], np.uint8)
    np.testing.assert_array_equal(h.fake_quantize_backward(dy, x, "u4", one, zero), [[0, 2, 3, 4, 5, 0, 0, 0]])
    np.testing.assert_array_equal(h.fake_quantize(x, "u4", one, zero)[0, :7], [-8, -8, -1, 0, 7, 7, 7])
    np.testing.assert_array_equal(h.fake_quantize_backward(dy, x * 60, "e4m3", one), [[0, 0, 3, 4, 5, 0, 0, 0]])


def test_norms_and_activations_quantise_by_expressions(h: oxidnn.DnnHandle) -> None:
    """A launch that normalises, activates and quantises gives what `quantize` makes of what it is given, to a code where they are rounded
    differently."""
    rng = np.random.default_rng(6)
    x, gamma = rng.standard_normal((5, 256)).astype(np.float32), rng.uniform(0.5, 2, 256).astype(np.float32)
    y, scale = h.rms_norm(x, gamma, epilogue="silu", out_dtype="e4m3", return_scale=True)
    wide = h.rms_norm(x, gamma, epilogue="silu")
    q, found = h.quantize(wide, "e4m3", "token")
    np.testing.assert_allclose(scale, found, rtol=1e-6)
    np.testing.assert_allclose(h.dequantize(y, scale), h.dequantize(q, found), rtol=0.13, atol=1e-3)
    fused = h.pointwise("round(clamp(gelu(x) / s, -128, 127))", x, np.full((5, 1), 0.03, np.float32), dtype="s8")
    apart = h.quantize(h.activation(x, "gelu"), "s8", np.full(5, 0.03, np.float32))
    np.testing.assert_array_equal(fused, apart)


@pytest.mark.parametrize(("kind", "scaling", "give"), [
    ("e2m1", "mxfp4", {}), ("e2m1", "nvfp4", {}), ("e2m1", "nvfp4", {"global_scale": "compute"}), ("nf4", ("group", 3), {}),
    ("s4", ("group", 2), {"zero_point": "compute"}), ("u4", ("group", 7), {"zero_point": "compute"})])
def test_neighbours_of_four_bits_with_scales_of_their_own(kind: str, scaling: Any, give: dict[str, Any], h: oxidnn.DnnHandle) -> None:
    """Scales along another axis than codes of half a byte, in groups that do not divide it: as of the transposed numbers."""
    x = np.random.default_rng(11).standard_normal((2, 37, 9)).astype(np.float32) * np.float32(3)
    x[0, :, 4] = 0
    got = h.quantize(x, kind, scaling, axis=1, **give)
    if isinstance(scaling, str):
        want = h.quantize(np.ascontiguousarray(x.swapaxes(1, 2)), kind, scaling, **give)
        np.testing.assert_array_equal(codes(got[0], kind, 9), codes(want[0], kind, 37).swapaxes(1, 2))
        np.testing.assert_array_equal(np.asarray(got[1]).view(np.uint8), np.asarray(want[1]).view(np.uint8).swapaxes(1, 2))
        assert len(got) == len(want) and all(a == b for a, b in zip(got[2:], want[2:], strict=True))
    else:
        for i in range(0, 37, scaling[1]):
            part = h.quantize(np.ascontiguousarray(x[:, i: i + scaling[1]].swapaxes(1, 2)), kind, "token", **give)
            size = x[:, i: i + scaling[1]].shape[1]
            np.testing.assert_array_equal(codes(got[0], kind, 9)[:, i: i + size], codes(part[0], kind, size).swapaxes(1, 2))
            for a, b in zip(got[1:], part[1:], strict=True):
                np.testing.assert_array_equal(a[:, i // scaling[1]], b)
    one = h.quantize(x[:, :, :1], kind, scaling, **give)
    again = h.quantize(x[:, :, :1], kind, one[1], scaling=scaling, **_given(one))
    np.testing.assert_array_equal(codes(one[0], kind, 1), codes(again, kind, 1))


@pytest.mark.parametrize("layout", ["plain", "128x4"])
def test_scales_of_nothing(layout: str, h: oxidnn.DnnHandle) -> None:
    for shape in ((0, 32), (3, 0)):
        q, scale, found = h.quantize(np.ones(shape, np.float32), "e2m1", "nvfp4", global_scale="compute", layout=layout)
        assert q.shape == (shape[0], shape[1] // 2) and scale.size == 0 and found == 1
        assert h.dequantize(q, scale, scaling="nvfp4", global_scale=found, layout=layout).shape == shape


def _given(found: tuple[Any, ...]) -> dict[str, Any]:
    """What was found beside codes and scales, as it is given to `quantize`."""
    return {"zero_point" if np.ndim(v) else "global_scale": v for v in found[2:]}


def test_scales_follow_the_last_steps(h: oxidnn.DnnHandle) -> None:
    history, scale = np.zeros((3, 2), np.float32), np.ones(2, np.float32)
    steps = (([4.48, 0], [4.48, 0]), ([2, 8.96], [4.48, 8.96]), ([np.inf, 1], [np.inf, 8.96]), ([1, 1], [np.inf, 8.96]),
             ([1, 1], [np.inf, 1]), ([3, 3], [3, 3]))
    for amax, most in steps:
        before = scale.copy()
        result = h.delayed_scale(history, np.array(amax, np.float32), scale, out=(history, scale))
        assert result[0] is history and result[1] is scale
        np.testing.assert_array_equal(history[0], np.array(amax, np.float32))
        want = np.array(most, np.float32) / np.float32(448)
        np.testing.assert_array_equal(scale, np.where((want > 0) & np.isfinite(want), want, before))
    _, latest = h.delayed_scale(history, np.array([448, 57344], np.float32), scale, reduction="latest", margin=-1, kind="e5m2")
    np.testing.assert_array_equal(latest, [0.5 / 128, 0.5])


def test_scales_are_quantised_once_more(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(10)
    x = (rng.standard_normal((16, 1024)) * rng.uniform(0.5, 2, (16, 1))).astype(np.float32)
    q, absmax = h.quantize(x, "nf4", ("group", 64))
    codes_, scale, offset = h.double_quantize(absmax)
    assert codes_.shape == absmax.shape and scale.shape == (1,) and abs(float(offset) - absmax.mean()) < 1e-6
    again = h.double_dequantize(codes_, scale, offset)
    assert np.abs(again - absmax).max() <= np.abs(absmax - absmax.mean()).max() / 16 * 1.01
    plain, twice = h.dequantize(q, absmax, kind="nf4"), h.dequantize(q, again, kind="nf4")
    assert np.abs(twice - x).mean() < 1.05 * np.abs(plain - x).mean() < 0.1


def test_means_of_scales_whose_sum_is_beyond_f32(h: oxidnn.DnnHandle) -> None:
    x = np.linspace(1e38, 3e38, 300, dtype=np.float32)
    q, scale, offset = h.double_quantize(x)
    assert offset == np.float32(x.astype(np.float64).mean())
    np.testing.assert_allclose(h.double_dequantize(q, scale, offset), x, atol=1e38 / 16)


REFUSED: dict[str, tuple[Any, str]] = {
    "kind": (lambda h, x, one: h.quantize(x, "s3"), "kind"),
    "f64": (lambda h, x, one: h.quantize(x.astype(np.float64), "s8"), "type of x"),
    "word": (lambda h, x, one: h.quantize(x, "s8", "rows"), "scaling"),
    "no group": (lambda h, x, one: h.quantize(x, "s8", ("group", 0)), "scaling"),
    "odd group": (lambda h, x, one: h.quantize(x, "s4", ("group", 5)), "even number"),
    "odd columns": (lambda h, x, one: h.quantize(x, "s4", np.ones((4, 2), np.float32)), r"shape of scale is \[4, 2\] .*even number"),
    "odd columns back": (lambda h, x, one: h.dequantize(np.ones((4, 5), np.uint8), np.ones((4, 2), np.float32), kind="s4"),
                         r"shape of scale is \[4, 2\] .*even number"),
    "huge group": (lambda h, x, one: h.quantize(x, "s8", ("group", 1 << 40)), "1 to 2147483647"),
    "group of none": (lambda h, x, one: h.quantize(x, "s8", ("group",)), r"scaling is \('group',\) .*'tensor', 'channel'"),
    "zero by number": (lambda h, x, one: h.quantize(x, "s8", "tensor", zero_point=3), "zero_point is 3"),
    "zero by truth": (lambda h, x, one: h.quantize(x, "s8", "tensor", zero_point=True), "zero_point is True"),
    "global of a tensor": (lambda h, x, one: h.quantize(x, "s8", "tensor", global_scale="compute"), "global_scale='compute'"),
    "fp4 of 8 bits": (lambda h, x, one: h.quantize(x, "e4m3", "mxfp4"), "kind"),
    "axis": (lambda h, x, one: h.quantize(x, "e4m3", "token", axis=2), "axis"),
    "rows": (lambda h, x, one: h.quantize(x, "s8", np.ones(3, np.float32)), "shape of scale"),
    "groups": (lambda h, x, one: h.quantize(x, "s8", np.ones((4, 3), np.float32)), "shape of scale"),
    "bool": (lambda h, x, one: h.quantize(x, "s8", x[0] > 0, axis=1), "type of scale"),
    "zero of a float": (lambda h, x, one: h.quantize(x, "e4m3", one, zero_point=one), "zero_point"),
    "zero alone": (lambda h, x, one: h.quantize(x, "s8", zero_point=one), "zero_point"),
    "asymmetric float": (lambda h, x, one: h.quantize(x, "e4m3", "token", zero_point="compute"), "zero_point='compute'"),
    "zero by word": (lambda h, x, one: h.quantize(x, "s8", "token", zero_point="x"), "zero_point"),
    "wrapped fp4": (lambda h, x, one: h.quantize(x, "e2m1", saturate=False), "saturate"),
    "wrapped on the way": (lambda h, x, one: h.quantize(x, "s8", "token", saturate=False), "saturate"),
    "chance of nf4": (lambda h, x, one: h.quantize(x, "nf4", rounding="stochastic", seed=1), "rounding"),
    "chance unseeded": (lambda h, x, one: h.quantize(x, "s8", rounding="stochastic"), "seed"),
    "seed": (lambda h, x, one: h.quantize(x, "s8", seed=1), "seed"),
    "layout": (lambda h, x, one: h.quantize(x, "s8", "token", layout="128x4"), "layout"),
    "global": (lambda h, x, one: h.quantize(x, "s8", one, global_scale=one), "global_scale"),
    "out": (lambda h, x, one: h.quantize(x, "s8", out=np.empty((4, 9), np.int8)), "shape of y"),
    "codes": (lambda h, x, one: h.dequantize(x), "type of x"),
    "codes of another kind": (lambda h, x, one: h.dequantize(x.astype(np.uint8), kind="s8"), "type of x"),
    "size": (lambda h, x, one: h.dequantize(x.astype(np.uint8), kind="s4", size=18), "size"),
    "dtype": (lambda h, x, one: h.dequantize(x.astype(np.int8), dtype="float64"), "dtype"),
    "fake without": (lambda h, x, one: h.fake_quantize(x, "s8", None), "scale"),
    "history": (lambda h, x, one: h.delayed_scale(np.zeros((2000, 1), np.float32), x[0, :1], x[0, :1]), "shape of history"),
    "amax": (lambda h, x, one: h.delayed_scale(x, x[0, :3], x[0]), "shape of amax"),
    "scales with gaps": (lambda h, x, one: h.double_quantize(x[:, ::2]), "strides of x"),
    "group of 0": (lambda h, x, one: h.double_quantize(x, group=0), "group"),
    "gradient": (lambda h, x, one: h.fake_quantize_backward(x[:, :5], x, "s8", one), "shape of dy"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, h: oxidnn.DnnHandle) -> None:
    call, word = REFUSED[name]
    with pytest.raises(InvalidArgument, match=word):
        call(h, np.ones((4, 10), np.float32), np.ones((), np.float32))


@pytest.mark.parametrize("scaling", ["tensor", ("block", (2, 2))])
@pytest.mark.parametrize("kind", ["u4", "e2m1"])
def test_pairs_of_four_bits_below_one_another(kind: str, scaling: object) -> None:
    """Few columns, several rows: odd ones, whose last pair has no second number, as where they lie in wider rows."""
    h = oxidnn.DnnHandle("emu:sm_90a")
    for shape in ((2, 3), (5, 7), (2, 31)):
        x = np.random.default_rng(shape).standard_normal(shape).astype(np.float32)
        wide = np.full((shape[0], shape[1] + 3), np.nan, np.float32)
        wide[:, :shape[1]] = x
        for plain, strided in zip(h.quantize(x, kind, scaling), h.quantize(wide[:, :shape[1]], kind, scaling), strict=True):
            assert np.asarray(plain).tobytes() == np.asarray(strided).tobytes()
