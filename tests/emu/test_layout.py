"""Copies in the emulator: bit for bit, for every size of element; conversions at their ends; cut into pieces; gradients as transposes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines import layout_copy, layout_sum
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

ARCHES = ("sm_80", "sm_90a")


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


Op = Callable[[Any, np.ndarray], Any]
COPIES: dict[str, tuple[Op, Callable[[np.ndarray], np.ndarray]]] = {
    "permute": (lambda h, x: h.permute(x, (1, 2, 0)), lambda x: x.transpose(1, 2, 0)),
    "tiled": (lambda h, x: h.permute(x, (2, 1, 0)), lambda x: x.transpose(2, 1, 0)),
    "flip": (lambda h, x: h.flip(x, (0, 2)), lambda x: np.flip(x, (0, 2))),
    "roll": (lambda h, x: h.roll(x, (3, -5), (1, 2)), lambda x: np.roll(x, (3, -5), (1, 2))),
    "slice": (lambda h, x: h.slice(x, (1, None, 30), (None, None, 3), (1, 2, -2)), lambda x: x[1:, ::2, 30:3:-2]),
    "tile": (lambda h, x: h.tile(x, (2, 1, 3)), lambda x: np.tile(x, (2, 1, 3))),
    "broadcast_to": (lambda h, x: h.broadcast_to(x[:, :1], (2, 3, 5, 33)), lambda x: np.broadcast_to(x[:, :1], (2, 3, 5, 33))),
    "triu": (lambda h, x: h.triu(x, 2), lambda x: np.triu(x, 2)),
    "tril": (lambda h, x: h.tril(x, -1), lambda x: np.tril(x, -1)),
    "pad": (lambda h, x: h.pad(x, ((1, 0), (0, 2), (3, 1))), lambda x: np.pad(x, ((1, 0), (0, 2), (3, 1)))),
    "reflect": (lambda h, x: h.pad(x, ((0, 0), (3, 2), (40, 1)), "reflect"), lambda x: np.pad(x, ((0, 0), (3, 2), (40, 1)), "reflect")),
    "replicate": (lambda h, x: h.pad(x, ((0, 0), (3, 2), (9, 1)), "replicate"), lambda x: np.pad(x, ((0, 0), (3, 2), (9, 1)), "edge")),
    "circular": (lambda h, x: h.pad(x, ((0, 0), (3, 2), (9, 80)), "circular"), lambda x: np.pad(x, ((0, 0), (3, 2), (9, 80)), "wrap")),
    "concat": (lambda h, x: h.concat([x, x[..., :7], x[..., 8:16]], 2), lambda x: np.concatenate([x, x[..., :7], x[..., 8:16]], 2)),
}


@pytest.mark.parametrize("kind", [np.uint8, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("name", COPIES)
def test_copies_move_bits(h: oxidnn.DnnHandle, name: str, kind: Any) -> None:
    """Any pattern of bits, NaN and their payloads among them, from dense, channels-last and misaligned memory."""
    ours, theirs = COPIES[name]
    size, rng = np.dtype(kind).itemsize, np.random.default_rng(3)
    memory = rng.integers(0, 256, 3 * 5 * 33 * size + 16, np.uint8)
    x = memory[:-16].view(kind).reshape(3, 5, 33)
    misaligned = memory[size:size + x.nbytes].view(kind).reshape(x.shape)
    for view in (x, misaligned, np.ascontiguousarray(x.transpose(0, 2, 1)).transpose(0, 2, 1)):
        got, want = ours(h, view), theirs(np.ascontiguousarray(view).view(f"u{size}"))
        assert got.shape == want.shape and np.ascontiguousarray(got).tobytes() == np.ascontiguousarray(want).tobytes()


def test_values_outside(h: oxidnn.DnnHandle) -> None:
    x = np.ones((2, 9), np.float16)
    for value in (np.inf, -np.inf, np.nan, -0.0, 65504.0):
        np.testing.assert_array_equal(h.pad(x, ((0, 0), (1, 8)), value=value), np.pad(x, ((0, 0), (1, 8)), constant_values=value))
    assert np.signbit(h.pad(x, 1, value=-0.0)[0, 0])
    np.testing.assert_array_equal(h.pad(np.ones(3, np.int64), 2, value=-7), [-7, -7, 1, 1, 1, -7, -7])
    np.testing.assert_array_equal(h.pad(np.arange(9.0), ((-2, -3),)), np.arange(2.0, 6.0))
    np.testing.assert_array_equal(h.pad(np.arange(5.0), ((-2, 3),), "reflect"), [2, 3, 4, 3, 2, 1])
    np.testing.assert_array_equal(h.pad(np.array([4.0]), 3, "reflect"), [4.0] * 7)


def test_casts_at_their_ends(h: oxidnn.DnnHandle) -> None:
    x = np.array([1.9, -1.9, 2.5, 300, -300, np.nan, np.inf, -np.inf, 3e9, -0.5, 1e19, 2.0**31, 127.99], np.float32)
    assert h.cast(x, "int8").tolist() == [1, -1, 2, 127, -128, 0, 127, -128, 127, 0, 127, 127, 127]
    assert h.cast(x, "uint8").tolist() == [1, 0, 2, 255, 0, 0, 255, 0, 255, 0, 255, 255, 127]
    assert h.cast(x, "int32").tolist() == [1, -1, 2, 300, -300, 0, 2**31 - 1, -(2**31), 2**31 - 1, 0, 2**31 - 1, 2**31 - 1, 127]
    assert h.cast(x, "uint32").tolist() == [1, 0, 2, 300, 0, 0, 2**32 - 1, 0, 3 * 10**9, 0, 2**32 - 1, 2**31, 127]
    top = 2**63 - 1
    assert h.cast(x, "int64").tolist() == [1, -1, 2, 300, -300, 0, top, -top - 1, 3 * 10**9, 0, top, 2**31, 127]
    assert h.cast(x.astype(np.float64), "int32").tolist() == h.cast(x, "int32").tolist()
    assert h.cast(x, "bool").tolist() == [True] * 13
    assert h.cast(np.array([0.0, -0.0, 1e-45], np.float32), "bool").tolist() == [False, False, True]
    wide = np.array([0, 255, 256, -1, 2**31, 2**32 + 5, -(2**63), 2**63 - 1], np.int64)
    for kind in ("int8", "uint8", "int16", "uint16", "int32", "uint32", "uint64", "float32", "float64", "bool"):
        np.testing.assert_array_equal(h.cast(wide, kind), wide.astype(kind), kind)
    unsigned = np.array([0, 1, 2**31, 2**32 - 1], np.uint32)
    for kind in ("int64", "uint64", "float32", "float64", "int32", "int8"):
        np.testing.assert_array_equal(h.cast(unsigned, kind), unsigned.astype(kind), kind)
    huge = np.array([2**64 - 1, 2**63], np.uint64)
    np.testing.assert_array_equal(h.cast(huge, "float64"), huge.astype(np.float64))
    half = np.array([1.0 + 2.0**-11, 1.0 + 3 * 2.0**-11, 65519.0, 65520.0, 1e-8], np.float64)  # ties to even, the edge of infinity
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(h.cast(half, "float16"), half.astype(np.float16))
    near = np.array([1.0 + 2.0**-8 + 2.0**-40])  # rounded to f32 first it is a tie
    np.testing.assert_array_equal(h.cast(near, "bfloat16").astype(np.float64), [1.0 + 2.0**-7])


def test_into_parts_of_tensors(h: oxidnn.DnnHandle) -> None:
    """Slices of a tensor as `out` are written, and nothing else."""
    whole = np.zeros((4, 9, 10), np.float32)
    x = np.arange(4 * 4 * 10, dtype=np.float32).reshape(4, 4, 10)
    h.transform(x, out=whole[:, 1:9:2])
    np.testing.assert_array_equal(whole[:, 1:9:2], x)
    assert not whole[:, ::2].any()
    h.fill(value=7, out=whole[1:3, ::2, 3:])
    assert (whole[1:3, ::2, 3:] == 7).all() and (whole == 7).sum() - (x == 7).sum() == 2 * 5 * 7


LINES = (
    "permute x=u8[5,7,33]nchw dims=(1,0,2)", "pad x=f32[4,33]nchw padding=((3,2),(31,32)) mode=reflect",
    "pad x=bf16[6,9]nchw padding=((13,2),(1,20)) mode=circular", "triu x=f16[3,20,24]nchw diagonal=-2", "cast x=f32[1003]nchw dtype=f16",
    "slice_backward dy=f32[5,10]nchw x_shape=(11,30) starts=(1,0) steps=(2,3) stops=(None,35)", "concat x0=f32[3,9]nchw x1=f32[2,9]nchw",
    "flip x=s16[17,24]nchw axes=(0,)", "tile x=f16[3,40]nchw repeats=(3,1)", "fill shape=(37,3) value=2",
    "pad x=u8[3,50]nchw padding=((2,2),(0,0)) mode=replicate",
)


@pytest.mark.parametrize("line", LINES)
def test_cut_into_pieces_with_wide_strides(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tensors of more than 2^31 elements and strides of more than 2^31 bytes take, on small ones."""
    monkeypatch.setattr(layout_copy, "MOST_ELEMENTS", 20)
    monkeypatch.setattr(layout_copy, "WIDE", 1)
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    engine = next(e for e in ENGINES[problem.op] if e.id == "layout.copy")
    for config in engine.configs(problem, backend.info):
        steps = engine.build_steps(problem, config, backend.info).steps
        assert max(len([a for a in s.spec.params if a.name.startswith("count")]) for s in steps) > 1 or len(steps) > 1
        assert all(s.spec.consts.wide for s in steps)
        run_problem(backend, problem, engine, config)


def test_sums_cut_into_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_sum, "MOST_THREADS", 25)
    problem = parse_case("pad_backward dy=f32[5,9,12]nchw padding=((0,0),(3,1),(0,0)) mode=reflect")
    backend, engine = EmulatedBackend("sm_80", checkers="all"), layout_sum.LayoutSum()
    assert len(engine.build_steps(problem, engine.configs(problem, backend.info)[0], backend.info).steps) > 2
    for config in engine.configs(problem, backend.info):
        run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("kind", ["u8", "bf16", "f32", "f64"])
def test_every_tile(arch: str, kind: str) -> None:
    """Ragged, aligned and misaligned tiles, several of them, batched and strided."""
    backend = EmulatedBackend(arch, checkers="all")
    wide = {"u8": 144, "bf16": 72, "f32": 40, "f64": 24}[kind]
    for line in (f"permute x={kind}[{wide},{2 * wide}]nchw", f"permute x={kind}[{wide - 1},{wide + 3}]nchw",
                 f"permute x={kind}[2,3,{wide},9]nchw dims=(1,3,0,2)",
                 f"transform x={kind}[{wide},20](1,{wide + 8}) y={kind}[{wide},20](24,1)"):
        problem = parse_case(line)
        engine = next(e for e in ENGINES[problem.op] if e.id == "layout.tile")
        assert engine.check_support(problem, backend.info), line
        for config in engine.configs(problem, backend.info):
            run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "constant"])
def test_gradients_of_padding_are_transposes(h: oxidnn.DnnHandle, mode: str) -> None:
    """<dy, pad(v)> = <pad_backward(dy), v> says all of a linear gradient."""
    rng = np.random.default_rng(6)
    for padding in (((0, 0), (2, 1), (3, 4)), ((0, 0), (9, 0), (-2, 17)), ((1, 1), (0, 0), (0, -3)), ((0, 0), (4, 3), (0, 0))):
        v = rng.standard_normal((2, 5, 8))
        y = h.pad(v, padding, mode)
        dy = rng.standard_normal(y.shape)
        assert (dy * y).sum() == pytest.approx((h.pad_backward(dy, padding, mode) * v).sum(), rel=1e-12)


def test_gradients_of_copies_are_transposes(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(7)
    v = rng.standard_normal((3, 5, 8))
    for forward, backward in (
            (lambda x: h.slice(x, (2, None, 1), None, (-1, 2, 3)), lambda d: h.slice_backward(d, v.shape, (2, None, 1), None, (-1, 2, 3))),
            (lambda x: h.tile(x, (2, 1, 1, 3)), lambda d: h.tile_backward(d, (2, 1, 1, 3), v.shape)),
            (lambda x: h.roll(x, (2, -3), (0, 2)), lambda d: h.roll(d, (-2, 3), (0, 2))),
            (lambda x: h.flip(x, 1), lambda d: h.flip(d, 1)), (lambda x: h.tril(x, 1), lambda d: h.tril(d, 1)),
            (lambda x: h.permute(x, (2, 0, 1)), lambda d: h.permute(d, (1, 2, 0)))):
        y = forward(v)
        dy = rng.standard_normal(y.shape)
        assert (dy * y).sum() == pytest.approx((backward(dy) * v).sum(), rel=1e-12)
    parts = h.split(v, (3, 0, 5), 2)
    np.testing.assert_array_equal(h.concat(parts, 2), v)


def test_the_gradient_is_the_same_bits_every_time() -> None:
    problem = parse_case("pad_backward dy=f16[4,30,40]nchw padding=((0,0),(9,9),(11,11)) mode=reflect")
    engine = layout_sum.LayoutSum()
    runs = [run_problem(EmulatedBackend("sm_80", schedule=s), problem, engine, seed=3).outputs["dx"]
            for s in ("lowest_pc", ("random", 1), ("random", 2))]
    assert all(run.tobytes() == runs[0].tobytes() for run in runs)


def test_copies_may_not_overlap_what_they_read(h: oxidnn.DnnHandle) -> None:
    x = np.zeros((8, 8), np.float32)
    for call in (lambda: h.flip(x, 0, out=x), lambda: h.permute(x, out=x), lambda: h.roll(x, 1, 0, out=x)):
        with pytest.raises(oxidnn.InvalidArgument, match="overlap"):
            call()


@pytest.mark.parametrize("line", [
    "concat x0=bf16[2,4,6,8] x1=bf16[2,7,6,8] x2=bf16[2,3,6,8] axis=1", "concat x0=bf16[2,8,3,5]nhwc x1=bf16[2,16,3,5]nhwc axis=1",
    "split x=f32[40,13,4] sizes=(5,8) axis=1", "concat x0=u8[300,16] x1=u8[77,16] axis=0", "split x=s64[700,8] sizes=(4,4) axis=1",
])
def test_parts_of_several_packs_a_thread(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_copy, "_SEVERAL", 0)
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    for config in ENGINES[problem.op][0].configs(problem, backend.info):
        steps = ENGINES[problem.op][0].build_steps(problem, config, backend.info).steps
        assert any(step.spec.consts.packs > 1 for step in steps)
        run_problem(backend, problem, ENGINES[problem.op][0], config)


@pytest.mark.parametrize("line", [
    "pad_backward dy=f32[2,3,14,18]nchw padding=((0,0),(0,0),(3,3),(3,3)) mode=reflect",
    "pad_backward dy=f16[2,8,9,7]nhwc padding=((0,0),(0,0),(2,3),(3,1)) mode=reflect",
    "pad_backward dy=bf16[2,3,14,19]nchw padding=((0,0),(0,0),(3,2),(2,1)) mode=circular",
    "pad_backward dy=f64[5,4,8] padding=((2,2),(1,2),(0,4)) mode=circular",  # as long as what is left
    "pad_backward dy=f32[6,7,8] padding=((1,1),(1,2),(2,2)) mode=reflect",
    "pad_backward dy=f32[3,9] padding=((0,0),(4,1)) mode=reflect",  # longer than two copies allow
    "pad_backward dy=f32[9,10] padding=((1,2),(2,4)) mode=replicate",
])
def test_gradients_of_padding_by_every_config(line: str) -> None:
    problem = parse_case(line)
    for arch in ("sm_80", "sm_90a"):
        backend = EmulatedBackend(arch, checkers="all")
        for config in layout_sum.LayoutSum().configs(problem, backend.info):
            run_problem(backend, problem, layout_sum.LayoutSum(), config)
