"""Faults that convolutions of other libraries have had, each as a whole kind (notes/2026-11-28-convolution-faults.md lists the tests).

In the emulator, all checkers on; the handle's own choice where it is the choice that was at fault, else every engine in turn.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dispatch.select import choose
from oxidnn.dtypes import dtype
from oxidnn.engines.base import Engine
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.reference import REFERENCES

KINDS = ("f16", "bf16", "f32", "s8", "u8", "e4m3")


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def in_turn(lines: Iterator[str] | list[str], backend: EmulatedBackend) -> Iterator[tuple[Problem, Engine]]:
    """Each problem with the engine, of those that take it, that has had the fewest."""
    had: Counter[str] = Counter()
    for line in lines:
        problem = parse_case(line)
        engine = min((e for e in ENGINES[problem.op] if e.check_support(problem, backend.info)), key=lambda e: had[e.id])
        had[engine.id] += 1
        yield problem, engine


def three(x: str, w: str, y: str, kind: str, layout: str, attrs: str) -> tuple[str, str, str]:
    """fprop, dgrad and wgrad of shapes."""
    x, w, y = (f"{kind}[{shape}]{layout}" for shape in (x, w, y))
    return (f"conv_fprop x={x} w={w} {attrs}", f"conv_dgrad dy={y} w={w} x_shape=({x.split('[')[1].split(']')[0]}) {attrs}",
            f"conv_wgrad x={x} dy={y} w_shape=({w.split('[')[1].split(']')[0]}) {attrs}")


@pytest.mark.parametrize("layout", ("nchw", "nhwc"))
@pytest.mark.parametrize("kind", KINDS)
def test_channels_and_filters_of_any_number(kind: str, layout: str) -> None:
    """Counts that are no multiple of any vector: forward and both gradients."""
    backend = EmulatedBackend("sm_90a", checkers="all")
    lines = [line for c in (1, 3, 5, 13) for k in (1, 7, 17)
             for line in three(f"1,{c},5,6", f"{k},{c},3,3", f"1,{k},5,6", kind, layout, "padding=1")]
    for problem, engine in in_turn(lines, backend):
        run_problem(backend, problem, engine)


@pytest.mark.parametrize("kind", KINDS)
def test_groups_of_odd_counts(kind: str) -> None:
    """Also groups = channels, with one and several filters each."""
    backend = EmulatedBackend("sm_80", checkers="all")
    lines = [line for groups, c, k in ((3, 1, 1), (5, 1, 3), (7, 3, 2), (3, 5, 1), (13, 1, 1)) if kind != "e4m3" or groups < 7
             for line in three(f"2,{groups * c},4,5", f"{groups * k},{c},3,2", f"2,{groups * k},4,6", kind, "nhwc",
                               f"padding=1 groups={groups}")]
    for problem, engine in in_turn(lines, backend):
        run_problem(backend, problem, engine)


def test_padding_counts_dilated_taps(h: oxidnn.DnnHandle) -> None:
    y = h.conv(np.ones((1, 1, 9, 9), np.float32), np.ones((1, 1, 5, 5), np.float32), dilation=2, padding=4)
    assert (y[0, 0, 0, 0], y[0, 0, 0, 4], y[0, 0, 4, 4]) == (9, 15, 25)
    same = h.conv(np.ones((1, 1, 9, 9), np.float32), np.ones((1, 1, 5, 5), np.float32), dilation=2, padding="same_upper")
    np.testing.assert_array_equal(same, y)


def test_every_edge_is_padded_by_its_own_number(h: oxidnn.DnnHandle) -> None:
    x, w = np.array([[[[1, 2], [3, 4]]]], np.float32), np.array([[[[1, 10], [100, 1000]]]], np.float32)
    assert h.conv(x, w, padding=((0, 1), (1, 0)))[0, 0].tolist() == [[3010, 4321], [30, 43]]
    assert h.conv(x, w[..., ::-1, ::-1].copy(), padding=((0, 1), (1, 0)), flip=True)[0, 0].tolist() == [[3010, 4321], [30, 43]]
    # Even taps: the odd one of "same" goes behind (upper) or in front (lower).
    assert h.conv(x, w, padding="same_upper")[0, 0].tolist() == [[4321, 402], [43, 4]]
    assert h.conv(x, w, padding="same_lower")[0, 0].tolist() == [[1000, 2100], [3010, 4321]]


def test_output_padding_is_computed_not_filled(h: oxidnn.DnnHandle) -> None:
    x, w = np.array([[[[1, 2], [3, 4]]]], np.float32), np.ones((1, 1, 3, 3), np.float32)
    y = h.conv_transpose(x, w, stride=2, padding=1, output_padding=1)
    assert y[0, 0].tolist() == [[1, 3, 2, 2], [4, 10, 6, 6], [3, 7, 4, 4], [3, 7, 4, 4]]


@pytest.mark.parametrize("kind", ("f32", "f16", "s8"))
def test_empty_tensors(h: oxidnn.DnnHandle, kind: str) -> None:
    """No images: nothing, and gradients of 0. No channels: zeros, and bias. No filters: nothing."""
    def zeros(*shape: int) -> np.ndarray:
        return np.zeros(shape, dtype(kind).numpy)

    assert h.conv(zeros(0, 3, 4, 4), zeros(2, 3, 3, 3)).shape == (0, 2, 2, 2)
    assert h.conv_dgrad(zeros(0, 2, 2, 2), zeros(2, 3, 3, 3), (0, 3, 4, 4)).shape == (0, 3, 4, 4)
    dw = np.asarray(h.conv_wgrad(zeros(0, 3, 4, 4), zeros(0, 2, 2, 2), (2, 3, 3, 3)))
    assert dw.shape == (2, 3, 3, 3) and not dw.any()
    y = np.asarray(h.conv(zeros(2, 0, 4, 4), zeros(3, 0, 3, 3)))
    assert y.shape == (2, 3, 2, 2) and not y.any()
    assert h.conv(zeros(2, 3, 4, 4), zeros(0, 3, 3, 3)).shape == (2, 0, 2, 2)
    dx = np.asarray(h.conv_dgrad(zeros(2, 0, 2, 2), zeros(0, 3, 3, 3), (2, 3, 4, 4)))
    assert dx.shape == (2, 3, 4, 4) and not dx.any()
    if kind != "s8":
        db = np.asarray(h.conv_bgrad(zeros(0, 3, 4, 4)))
        assert db.shape == (3,) and not db.any()


def test_one_element_and_images_smaller_than_filters(h: oxidnn.DnnHandle) -> None:
    one = np.full((1, 1, 1, 1), 3, np.float32)
    assert h.conv(one, one).tolist() == [[[[9.0]]]]
    assert h.conv_wgrad(one, one, (1, 1, 1, 1)).tolist() == [[[[9.0]]]]
    # A filter of 5 over an image of 1, padded by 2: its middle tap alone meets anything.
    w = np.arange(25, dtype=np.float32).reshape(1, 1, 5, 5)
    assert h.conv(one, w, padding=2).tolist() == [[[[36.0]]]]
    np.testing.assert_array_equal(np.asarray(h.conv(one, w, padding=4))[0, 0], 3 * w[0, 0, ::-1, ::-1])
    with pytest.raises(oxidnn.InvalidArgument, match=r"spatial shape of w is \[5, 5\].*padded extent \[3, 3\]"):
        h.conv(one, w, padding=1)


@pytest.mark.parametrize("gradient", ("nchw", "nhwc"))
def test_layouts_change_no_numbers(h: oxidnn.DnnHandle, gradient: str) -> None:
    """Three dimensions, channels last against first, the incoming gradient in either. Inferred outputs lie as the first operand that has a
    layout does."""
    rng = np.random.default_rng(4)

    def last(a: np.ndarray) -> np.ndarray:
        return np.moveaxis(np.ascontiguousarray(np.moveaxis(a, 1, -1)), -1, 1)

    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in ((2, 3, 4, 4, 4), (5, 3, 3, 3, 3), (2, 5, 4, 4, 4)))
    dy_laid = last(dy) if gradient == "nhwc" else dy
    for make in (lambda a: a, last):
        y = h.conv(make(x), w, padding=1)
        dx, dw = h.conv_dgrad(dy_laid, make(w), x.shape, padding=1), h.conv_wgrad(make(x), dy_laid, w.shape, padding=1)
        for got, op, tensors in ((y, "conv_fprop", {"x": x, "w": w}), (dx, "conv_dgrad", {"dy": dy, "w": w}),
                                 (dw, "conv_wgrad", {"x": x, "dy": dy})):
            words = " ".join(f"{n}=f32[{','.join(map(str, a.shape))}]" for n, a in tensors.items())
            shape = {"conv_fprop": "", "conv_dgrad": "x_shape=(2,3,4,4,4)", "conv_wgrad": "w_shape=(5,3,3,3,3)"}[op]
            problem = parse_case(f"{op} {words} padding=1 {shape}")
            want = REFERENCES[op](problem, {n: a.astype(np.float64) for n, a in tensors.items()}, {})[problem.outputs[0].name].want
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
        is_last = [a.strides[1] == a.itemsize for a in (y, dx)]
        assert is_last == [make is last, gradient == "nhwc"]


@pytest.mark.parametrize("kind", ("float16", "bfloat16"))
def test_halves_keep_their_digits_by_default(h: oxidnn.DnnHandle, kind: str) -> None:
    """Depthwise and plain 3 x 3: within an ulp of the exact result and what sums in f32 lose."""
    rng, number = np.random.default_rng(5), np.dtype(getattr(ml_dtypes, kind, None) or kind)
    epsilon = 2.0**-10 if kind == "float16" else 2.0**-7
    for groups, shape in ((16, (16, 1, 3, 3)), (1, (8, 16, 3, 3))):
        x = rng.uniform(-4, 4, (2, 16, 14, 14)).astype(number)
        w = rng.uniform(-1, 1, shape).astype(number)
        problem = parse_case(f"conv_fprop x=f32[2,16,14,14] w=f32[{','.join(map(str, shape))}] padding=1 groups={groups}")
        want = REFERENCES["conv_fprop"](problem, {"x": x.astype(np.float64), "w": w.astype(np.float64)}, {})["y"].want
        got = np.asarray(h.conv(x, w, padding=1, groups=groups)).astype(np.float64)
        assert (np.abs(got - want) <= epsilon * np.abs(want) + 1e-3).all()


@pytest.mark.parametrize("line", (
    "conv_fprop x=f32[65537,1,4] w=f32[1,1,2]", "conv_dgrad dy=f32[65537,1,3] w=f32[1,1,2] x_shape=(65537,1,4)",
    "conv_wgrad x=f32[65537,1,4] dy=f32[65537,1,3] w_shape=(1,1,2)", "conv_transpose x=f16[65537,1,3] w=f16[1,1,2]",
    "conv_fprop x=s8[65537,1,4] w=s8[1,1,2]", "conv_fprop x=f32[1,65537,2] w=f32[65537,1,2] groups=65537",
    "conv_fprop x=f32[1,1,4] w=f32[65537,1,2]"))
def test_more_than_65535_images_groups_or_filters(line: str) -> None:
    """By the engine that is chosen. Only one axis of a grid is that long."""
    backend = EmulatedBackend("sm_90a")
    problem = parse_case(line)
    engine, config, _ = choose(problem, backend.info, None)
    run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("kind", ("float32", "float16", "bfloat16", "int8"))
def test_views_at_odd_addresses(h: oxidnn.DnnHandle, kind: str) -> None:
    """An element or three into a buffer, rows of odd pitch, out= as well: the numbers of a copy, and nothing written beside."""
    rng, number = np.random.default_rng(6), np.dtype(getattr(ml_dtypes, kind, None) or kind)

    def view(shape: tuple[int, ...], first: int, fill: bool = True) -> np.ndarray:
        wide = (*shape[:-1], shape[-1] + 1)
        flat = np.full(first + int(np.prod(wide)), 77, number)
        out = flat[first:].reshape(wide)[..., :-1]
        if fill:
            out[...] = rng.integers(-4, 5, shape).astype(number)
        return out

    for first in (1, 3):
        x, w = view((2, 8, 6, 5), first), view((8, 8, 3, 3), 3)
        want = np.asarray(h.conv(np.ascontiguousarray(x), np.ascontiguousarray(w), padding=1, out_dtype="float32"))
        out_kind = np.dtype(np.int32) if kind == "int8" else number
        flat = np.full(first + 2 * 8 * 6 * 6, 77, out_kind)
        y = flat[first:].reshape(2, 8, 6, 6)[..., :5]
        h.conv(x, w, padding=1, out=y)
        np.testing.assert_array_equal(y.astype(np.float32), want.astype(out_kind).astype(np.float32))
        assert (flat[first:].reshape(2, 8, 6, 6)[..., 5] == 77).all() and (flat[:first] == 77).all()


def test_saturation_is_an_argument(h: oxidnn.DnnHandle) -> None:
    """Results beyond the type: its ends, or with saturate=False what is left modulo 256, as a cast of an integer leaves it."""
    x, w = np.full((1, 4, 2, 2), 100, np.uint8), np.array([1, -1, 3, 0], np.int8).reshape(4, 1, 1, 1).repeat(4, 1)
    exact = np.array([400, -400, 1200, 0]).reshape(1, 4, 1, 1) + np.zeros((1, 4, 2, 2), np.int64)
    one = np.ones(1, np.float32)
    for kind, zero in ((np.uint8, 3), (np.int8, -5)):
        words = dict(scale_y=one, zero_y=np.array([zero], kind), out_dtype=kind)
        limits = np.iinfo(kind)
        np.testing.assert_array_equal(np.asarray(h.conv(x, w, **words)), np.clip(exact + zero, limits.min, limits.max))
        np.testing.assert_array_equal(np.asarray(h.conv(x, w, saturate=False, **words)), (exact + zero).astype(kind))


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_integers_are_exact_over_their_whole_range(arch: str) -> None:
    """Every engine, mixed signs, -128 times -128 too, and sums beyond 2^24, which f32 would round."""
    backend = EmulatedBackend(arch, checkers="all")
    rng = np.random.default_rng(7)
    for a, b in (("s8", "s8"), ("u8", "s8"), ("s8", "u8"), ("u8", "u8")):
        problem = parse_case(f"conv_fprop x={a}[1,1088,3,3]nhwc w={b}[16,1088,1,1]nhwc bias=s32[16]")
        limits = {"s8": (-128, 127), "u8": (0, 255)}
        x, w = (rng.choice((limits[kind][0], limits[kind][1], 0, 1), shape, p=(0.45, 0.45, 0.05, 0.05)).astype(dtype(kind).numpy)
                for kind, shape in ((a, (1, 1088, 3, 3)), (b, (16, 1088, 1, 1))))
        x[0, :, 0, 0], w[0] = limits[a][0] or limits[a][1], limits[b][0] or limits[b][1]
        bias = rng.integers(-(2**20), 2**20, 16).astype(np.int32)
        want = np.einsum("nchw,kc->nkhw", x.astype(np.int64), w[:, :, 0, 0].astype(np.int64)) + bias[:, None, None]
        assert np.abs(want).max() > 2**24
        takers = [e for e in ENGINES["conv_fprop"] if e.check_support(problem, backend.info)]
        assert len(takers) >= (4 if arch == "sm_90a" else 3)
        for engine in takers:
            got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], {"x": x, "w": w, "bias": bias})["y"]
            np.testing.assert_array_equal(got, want, err_msg=engine.id)
