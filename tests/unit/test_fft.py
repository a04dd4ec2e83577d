"""Fourier transforms against NumPy's; that convolutions take them only where results keep their digits; tiles, chunks and long filters."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen import fourier
from oxidnn.device import KNOWN
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dispatch.select import choose
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.engines.conv_fft import TransformConsts
from oxidnn.engines.digits import DigitConsts
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import exact, execute, run_problem
from oxidnn.testing.reference import REFERENCES

INFO = KNOWN["sm_90a"]


def engine_of(op: str) -> Engine:
    return next(e for e in ENGINES[op] if e.id == f"{op}.fft")


def split(points: np.ndarray) -> np.ndarray:
    """Complex lines as real and imaginary parts in turn."""
    return np.stack([points.real, points.imag], 1).reshape(2 * len(points), -1)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 12, 15, 16, 20, 24, 32, 40, 48, 64])
def test_codes_are_transforms(n: int) -> None:
    """With every number of points given or wanted; constants are those of f32."""
    rng = np.random.default_rng(n)
    lines = rng.standard_normal((n, 3)) + 1j * rng.standard_normal((n, 3))
    half = np.fft.rfft(lines.real, axis=0)

    def check(got: np.ndarray, want: np.ndarray) -> None:
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-7 * n)

    for m in {1, (n + 1) // 2, n}:
        got = fourier.real_forward(n, m).run(lines.real[:m])
        check(got[0::2] + 1j * got[1::2], np.fft.rfft(lines.real[:m], n, axis=0))
        got = fourier.forward(n, m).run(split(lines[:m]))
        check(got[0::2] + 1j * got[1::2], np.fft.fft(lines[:m], n, axis=0))
        got = fourier.inverse(n, m).run(split(lines))
        check(got[0::2] + 1j * got[1::2], n * np.fft.ifft(lines, axis=0)[:m])
        check(fourier.real_inverse(n, m).run(split(half)), n * lines.real[:m])


def test_no_register_is_written_twice_nor_read_before() -> None:
    for program in (fourier.forward(24, 9), fourier.real_forward(16, 1), fourier.real_inverse(12, 7), fourier.inverse(15, 1)):
        known = set(range(program.inputs))
        for line in program.lines:
            used = {"zero": [], "fma": [line.a, line.b], "add": [line.a, line.b], "sub": [line.a, line.b]}.get(line.op, [line.a])
            assert known.issuperset(used) and line.target not in known
            known.add(line.target)
        assert len(set(program.outputs)) == len(program.outputs) and known.issuperset(program.outputs) and len(known) == program.count


# Convolutions whose result is a transform seen through the whole engine: one tap of 1, so that each output is an element of x.
@pytest.mark.parametrize(("shape", "taps", "config"), [
    ((2, 3, 21, 18), (5, 4), {"rows": 8, "columns": 8}), ((1, 2, 30, 37), (7, 9), {"rows": 16, "columns": 12}),
    ((1, 1, 40, 25), (9, 1), {"rows": 8, "columns": 4}), ((1, 2, 3, 70), (1, 40), {"rows": 8, "columns": 8}),
    ((1, 2, 500), (129,), {"rows": 16, "columns": 16})])
def test_shifts(shape: tuple[int, ...], taps: tuple[int, ...], config: dict[str, int]) -> None:
    """An output is the element that its only tap of 1 sees: every place of the taps' corners, near the border and far from it."""
    backend = EmulatedBackend("sm_90a", checkers="all")
    x, pads = ",".join(map(str, shape)), tuple((r // 2, r - 1 - r // 2) for r in taps)
    problem = parse_case(f"conv_fprop x=f32[{x}] w=f32[{shape[1]},{shape[1]},{','.join(map(str, taps))}] math=fast padding='{pads}'")
    rng = np.random.default_rng(3)
    image = rng.standard_normal(shape).astype(np.float32)
    w = np.zeros(problem.desc("w").shape, np.float32)
    at = tuple(int(rng.choice((0, r // 2, r - 1))) for r in taps)
    for c in range(shape[1]):
        w[(c, shape[1] - 1 - c, *at)] = 1
    out = execute(backend, problem, engine_of("conv_fprop"), EngineConfig.of(**config, images=1), {"x": image, "w": w})["y"]
    padded = np.pad(image[:, ::-1], ((0, 0), (0, 0), *pads))
    want = padded[(slice(None), slice(None), *(slice(t, t + n) for t, n in zip(at, shape[2:], strict=True)))]
    np.testing.assert_allclose(out, want, rtol=0, atol=2e-6)


@pytest.mark.parametrize("line", [
    "conv_fprop x=f32[3,4,21,18]nhwc w=f32[6,2,5,4] y=f32[3,6,18,18]nhwc residual=f32[3,6,18,18]nhwc groups=2 padding='((0,1),(3,0))' "
    "math=fast",
    "conv_dgrad dy=f32[3,6,17,15] w=f32[6,2,5,4] x_shape=(3,4,20,17) groups=2 padding='((0,1),(0,1))' math=fast flip=True",
    "conv_wgrad x=f32[3,4,20,17] dy=f32[3,6,17,15] w_shape=(6,2,5,4) groups=2 padding='((0,1),(0,1))' math=fast flip=True",
    "conv_dgrad dy=f32[2,6,40] w=f32[6,1,12] x_shape=(2,3,51) groups=3 math=fast",
    "conv_fprop x=f32[2,3,4,5] w=f32[6,1,9,9] groups=3 padding=4 math=fast",
    "conv_fprop x=f32[2,3,2,1] w=f32[2,3,5,4] padding='((4,3),(3,5))' math=fast",
    "conv_fprop x=f16[2,3,17,9] w=f16[4,3,5,5] padding=2 math=fast", "conv_dgrad dy=f32[2,24,20,7] w=f32[24,4,5,4] x_shape=(2,8,20,8) "
    "padding='((2,2),(1,1))' groups=2 math=tf32x3",
    "conv_transpose x=f32[2,3,9,8] w=f32[3,2,4,5] bias=f32[2] math=fast",
    "conv_wgrad x=f32[2,4,30] dy=f32[2,4,30] w_shape=(4,1,9) groups=4 padding=4 math=fast"])
def test_tiles_and_chunks(line: str) -> None:
    """Every tile, and images one by one."""
    backend = EmulatedBackend("sm_80", checkers="all")
    problem = parse_case(line)
    engine = engine_of(problem.op)
    assert engine.check_support(problem, backend.info)
    n = problem.desc(problem.image).shape[0]  # type: ignore[attr-defined]
    for config in engine.configs(problem, backend.info)[:2]:
        images = n if problem.op.endswith("wgrad") else 2
        knobs = {name: value for name, value in config.knobs if name != "images"}
        run_problem(backend, problem, engine, EngineConfig.of(**knobs, images=images), aliases=True)


@pytest.mark.parametrize("line", [
    "conv_fprop x=f32[1,8,24,24] w=f32[4,8,7,7] padding=3", "conv_fprop x=f32[1,2,16,48] w=f32[2,2,11,11] padding=5",
    "conv_dgrad dy=f32[1,16,24,24] w=f32[16,2,7,7] x_shape=(1,2,24,24) padding=3", "conv_fprop x=f32[1,4,400] w=f32[2,4,64] padding=32",
    "conv_dgrad dy=f32[1,12,24,24] w=f32[12,4,7,7] x_shape=(1,4,30,30)",
    "conv_wgrad x=f32[2,2,24,24] dy=f32[2,2,24,24] w_shape=(2,2,7,7) padding=3"])
def test_plain_f32_keeps_the_digits_of_plain_sums(line: str) -> None:
    """Where "ieee" takes transforms, their error is within what sums of products may err, at the border too, and a few ulps at most."""
    backend = EmulatedBackend("sm_90a", checkers="bounds")
    problem = parse_case(line)
    engine = engine_of(problem.op)
    assert engine.check_support(problem, backend.info)
    inputs = random_inputs(problem, np.random.default_rng(11))
    want = REFERENCES[problem.op](problem, exact(problem, inputs), {})[problem.outputs[0].name]
    assert want.magnitude is not None
    for config in engine.configs(problem, backend.info):
        got = execute(backend, problem, engine, config, inputs)[problem.outputs[0].name]
        error, eps = np.abs(got - want.want), 2.0**-23
        assert (error <= eps * np.abs(want.want) + 2 * eps * want.terms**0.5 * want.magnitude).all(), config.name
        assert error.max() <= 8 * eps * np.abs(want.want).max(), config.name


def test_few_products_are_refused() -> None:
    """Corners that see one tap of one channel, a padding beyond the filter: the whole tile's error would drown them."""
    for line, allowed in (("conv_fprop x=f32[1,1,32,32] w=f32[1,1,7,7] padding=6", False),
                          ("conv_dgrad dy=f32[1,1,24,24] w=f32[1,4,7,7] x_shape=(1,4,30,30)", False),
                          ("conv_dgrad dy=f32[1,8,24,24] w=f32[8,4,7,7] x_shape=(1,4,30,30)", False),
                          ("conv_fprop x=f32[1,6,64] w=f32[1,6,20] padding='((19,0),)'", False),
                          ("conv_fprop x=f32[1,64,32,32] w=f32[1,64,7,7] padding=7", False),
                          ("conv_fprop x=f32[1,64,32,32] w=f32[1,64,7,7] padding=6", True)):
        for math in ("ieee", "fast"):
            problem = parse_case(f"{line} math={math}")
            support = engine_of(problem.op).check_support(problem, INFO)
            assert bool(support) == (allowed or math == "fast"), (line, math, support.reason)
            assert support or "fast" in support.reason


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("direction", ["fprop", "dgrad", "wgrad"])
def test_half_types_only_by_request(kind: str, direction: str) -> None:
    x, w = f"{kind}[2,64,64,64]", f"{kind}[64,64,15,15]"
    tensors = {"fprop": f"x={x} w={w} y={x}", "dgrad": f"dy={x} w={w} dx={x}", "wgrad": f"x={x} dy={x} dw={w}"}[direction]
    for math in ("ieee", "tf32", "tf32x3", "bf16x3", "fast"):
        problem = parse_case(f"conv_{direction} {tensors} padding=7 math={math}")
        support = engine_of(problem.op).check_support(problem, INFO)
        assert bool(support) == (math == "fast") and (support or "digits" in support.reason)


def test_what_fft_does_not_take_is_refused_in_words() -> None:
    refused = {"x=f32[2,8,32,32] w=f32[8,8,7,7] stride=2": "stride (2, 2)", "x=f32[2,8,32,32] w=f32[8,8,7,7] dilation=2": "dilation (2, 2)",
               "x=f32[2,8,32,32] w=f32[8,8,3,3]": "3 x 3 taps", "x=f64[2,8,32,32] w=f64[8,8,7,7]": "f64",
               "x=f32[1,8,16,16,16] w=f32[8,8,5,5,5]": "3 spatial dimensions", "x=f32[1,8,80,80] w=f32[8,8,65,65]": "65 x 65 taps",
               "x=f32[1,1,8,8](1,1,40000000,1) w=f32[8,1,4,4] math=fast": "160000000 bytes apart",
               "x=f32[1,8,5000] w=f32[8,8,4097]": "4097 taps",
               "x=f32[2,8,32,32] w=f32[8,8,7,7] workspace_limit=100000": "exceed 100000 bytes"}
    for rest, words in refused.items():
        problem = parse_case(f"conv_fprop {rest}")
        support = engine_of("conv_fprop").check_support(problem, INFO)
        assert not support and words in support.reason, (rest, support.reason)
        assert "im2col" in support.reason or "workspace" in support.reason


def test_long_filters_are_chosen() -> None:
    """By the estimates of an H100: few taps go to the direct loops, many to transforms."""
    for line, is_fft in (("conv_fprop x=f32[8,64,64,64] w=f32[64,64,15,15] padding=7", True),
                         ("conv_fprop x=f32[8,64,4096] w=f32[64,64,256] padding=128", True),
                         ("conv_wgrad x=f32[8,64,64,64] dy=f32[8,64,64,64] w_shape=(64,64,15,15) padding=7", True),
                         ("conv_fprop x=f32[8,4,16,16] w=f32[4,4,4,4]", False)):
        problem = parse_case(line)
        engine, _, _ = choose(problem, INFO, None)
        assert engine.id.endswith(".fft") == is_fft, (line, engine.id)


@pytest.mark.parametrize("size", [8, 16, 20, 24, 32, 40, 48, 64])
@pytest.mark.parametrize("items_first", [False, True])
def test_half_a_warp_stores_into_different_banks(size: int, items_first: bool) -> None:
    """Sixteen threads move 128 bytes of shared memory at once: 8 bytes each, neighbours by items or by columns."""
    digits = DigitConsts(("n", "down", "across", "channel"), False)
    c = TransformConsts(size, size, False, False, items_first, (size, size), 4, 4, False, (1, 1), "points", 1.0, "f32", digits)

    def ways(addresses: list[int]) -> int:
        banks = [a // 8 % 16 for a in addresses]
        return max(banks.count(bank) for bank in banks)

    by_items = [divmod(thread, c.items) for thread in range(16)]
    by_columns = [divmod(thread, size)[::-1] for thread in range(16)]
    stores = [line * c.column_pitch + slot * 8 for line, slot in (by_items if items_first else by_columns)]
    assert ways(stores) <= (1 if size % 16 == 0 else 2)
    assert ways([line * c.point_pitch + slot * 8 for line, slot in by_items]) == 1
