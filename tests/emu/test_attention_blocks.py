"""Masks of blocks, gradients of the scores' tensors, and 8-bit floats of attention: in the emulator, all checkers on, and by the handle."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dtypes import BF16, E4M3
from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.attention import AttentionProblem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import compare, exact, execute, run_problem
from oxidnn.testing.reference import REFERENCES

BY_ID: dict[str, Engine] = {e.id: e for op in ("attention", "attention_backward") for e in ENGINES[op]}


def forward(kind: str, batch: int, length: int, keys: int, dim: int = 16) -> str:
    return f"attention q={kind}[{batch},2,{length},{dim}]nchw k={kind}[{batch},1,{keys},{dim}]nchw v={kind}[{batch},1,{keys},{dim}]nchw"


def backward(kind: str, batch: int, length: int, keys: int, dim: int = 16) -> str:
    q, k = f"{kind}[{batch},2,{length},{dim}]nchw", f"{kind}[{batch},1,{keys},{dim}]nchw"
    return f"attention_backward d_out={q} q={q} k={k} v={k} out={q} lse=f32[{batch},2,{length}]"


CASES = (
    (f"{forward('bf16', 2, 150, 230)} block_mask=bool[2,3,2] block_size=(64,128) window=(100,5) return_lse=True", "plain mma_sm80"),
    (f"{forward('f16', 1, 70, 330, 40)} block_mask=u8[1,2,2,6] block_size=64 lengths_kv=s32[1] bias=f16[330]", "mma_sm80"),
    (f"{forward('f32', 1, 70, 230)} block_mask=bool[1,4] block_size=(128,64) causal=bottom_right sinks=f32[2]", "plain"),
    (f"{backward('bf16', 2, 150, 140)} block_mask=bool[2,2,2,3] block_size=(128,64) causal=bottom_right", "plain mma"),
    (f"{backward('f16', 1, 70, 240)} block_mask=bool[2,2,4] block_size=64 window=(100,30) bias=f32[240]", "plain mma"),
    (f"{backward('f16', 1, 70, 140)} block_mask=u8[2,1] block_size=(64,256) dropout=0.25", "mma"),
    (f"{backward('bf16', 2, 20, 40)} alibi=f32[2,2] score='score * (1 + 0.1 * tanh(a)) + tanh(t * i)' a=f32[2,1,1] t=bf16[40] "
     "score_gradients=a,t,alibi", "plain mma mma_adding"),
)


@pytest.mark.parametrize(("line", "name"), [(line, name) for line, names in CASES for name in names.split()])
def test_against_the_reference(line: str, name: str) -> None:
    problem = parse_case(line)
    engine = BY_ID[f"{problem.op}.{name}"]
    schedule = "lowest_pc" if name == "plain" and len(line) // 2 % 2 else ("random", len(line))  # of its FMAs the latter takes long
    backend = EmulatedBackend("sm_80" if len(line) % 2 else "sm_90a", checkers="all", schedule=schedule)
    assert engine.check_support(problem, backend.info)
    run_problem(backend, problem, engine, seed=len(line))


@pytest.mark.parametrize("slots", (2, 3, 4))
def test_tiles_are_passed_over_in_every_ring(slots: int) -> None:
    problem = parse_case(f"{forward('bf16', 1, 150, 700)} block_mask=bool[2,3,11] block_size=64 return_lse=True")
    config = EngineConfig.of(warps=4, rows=16, tile_n=64, slots=slots, ctas=1, columns=256, swizzle=0, mix=0)
    run_problem(EmulatedBackend("sm_90a", checkers="all"), problem, BY_ID["attention.mma_sm80"], config, seed=slots)


@pytest.mark.parametrize("name", ("plain", "mma_sm80"))
def test_keys_of_blocks_that_nobody_sees_need_not_be_numbers(name: str) -> None:
    problem = parse_case(f"{forward('bf16', 1, 130, 256)} block_mask=bool[3,4] block_size=64 return_lse=True")
    backend, engine = EmulatedBackend("sm_80"), BY_ID[f"attention.{name}"]
    inputs = random_inputs(problem, np.random.default_rng(1))
    inputs["block_mask"] = np.array([[1, 0, 0, 1], [0, 0, 0, 0], [0, 0, 1, 0]], bool)
    for part in ("k", "v"):
        inputs[part][:, :, 64:128] = np.array(np.nan, BF16.numpy)
    with np.errstate(invalid="ignore"):
        want = REFERENCES["attention"](problem, exact(problem, inputs), {})
    got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], inputs)
    compare(problem, got, want)
    assert (got["out"][0, :, 64:128] == 0).all() and np.isneginf(got["lse"][0, :, 64:128]).all()


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_engines_that_pass_over_no_tiles_refuse_block_masks(arch: str) -> None:
    device = EmulatedBackend(arch).info
    line, passing = f"{forward('bf16', 1, 4, 64)} block_mask=bool[1,1] block_size=64", {"attention.plain", "attention.mma_sm80"}
    assert {e.id for e in ENGINES["attention"] if e.check_support(parse_case(line), device)} == passing
    line = f"{backward('bf16', 1, 64, 64)} block_mask=bool[1,1] block_size=64"
    assert {e.id for e in ENGINES["attention_backward"] if e.check_support(parse_case(line), device)} == {
        "attention_backward.plain", "attention_backward.mma"}


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape)


def test_a_block_mask_is_a_mask(h: oxidnn.DnnHandle) -> None:
    q, k, v = (normal(1, 2, n, 8, seed=n).astype(np.float32) for n in (70, 130, 131))
    v, mask = v[:, :, :130], np.array([[1, 0, 1], [0, 1, 1]], np.uint8)
    whole = np.repeat(np.repeat(mask, 64, 0), 64, 1)[:70, :130].astype(bool)
    got = h.attention(q, k, v, block_mask=mask, block_size=64, causal="top_left")
    np.testing.assert_allclose(got, h.attention(q, k, v, mask=whole, causal="top_left"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ("slope", "alibi", "shape"))
def test_gradients_of_the_scores_tensors_are_differences(h: oxidnn.DnnHandle, name: str) -> None:
    """<d_out, f(x + t u) - f(x - t u)> / 2t = <dx, u>."""
    q, k, v, d_out = normal(2, 2, 4, 8), normal(2, 1, 6, 8, seed=1), normal(2, 1, 6, 5, seed=2), normal(2, 2, 4, 5, seed=3)
    tensors = {"slope": normal(2, 1, 1, seed=4), "shape": normal(4, 1, seed=5), "alibi": 0.2 * np.abs(normal(2, seed=6))}

    def call(moved: dict[str, np.ndarray], function: Callable[..., Any], *arrays: np.ndarray, **more: Any) -> Any:
        rest = {n: x for n, x in moved.items() if n != "alibi"}
        return function(*arrays, score="score * (1 + slope * slope) + tanh(shape * (j - p))", causal="bottom_right",
                        alibi=moved["alibi"], operands=rest, **more)

    out, lse = call(tensors, h.attention, q, k, v, return_lse=True)
    found = call(tensors, h.attention_backward, d_out, q, k, v, out, lse, score_gradients=(name,))
    assert len(found) == 4
    x, t = tensors[name], 1e-5
    u = normal(*x.shape, seed=7)
    ends = [call({**tensors, name: x + sign * t * u}, h.attention, q, k, v) for sign in (1, -1)]
    assert found[3].shape == x.shape
    assert np.vdot(d_out, ends[0] - ends[1]) / (2 * t) == pytest.approx(np.vdot(found[3], u), rel=1e-6, abs=1e-8)


def test_8_bit_floats_by_the_handle(h: oxidnn.DnnHandle) -> None:
    q, k, v = (normal(1, 2, n, 32, seed=n).astype(E4M3.numpy) for n in (20, 40, 40))
    scales = {n: np.array([s], np.float32) for n, s in (("scale_q", 0.5), ("scale_k", 2.0), ("scale_v", 0.25))}
    wide = [a.astype(np.float32) * s for a, s in zip((q, k, v), (0.5, 2.0, 0.25), strict=True)]
    want = h.attention(*wide, causal="bottom_right")
    got = h.attention(q, k, v, causal="bottom_right", out_dtype="float32", **scales)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, rtol=0.07, atol=0.02)
    assert h.attention(q, k, v, **scales).dtype == BF16.numpy
    narrow = h.attention(q, k, v, causal="bottom_right", out_dtype="e4m3", scale_out=np.array([0.01], np.float32), **scales)
    assert narrow.dtype == E4M3.numpy
    np.testing.assert_allclose(narrow.astype(np.float32) * 0.01, want, rtol=0.14, atol=0.02)


def test_errors_name_the_argument(h: oxidnn.DnnHandle) -> None:
    q, narrow, mask = normal(1, 2, 70, 8).astype(np.float32), normal(1, 2, 70, 16).astype(E4M3.numpy), np.ones((2, 2), bool)
    one = np.ones(1, np.float32)
    starts = np.array([0, 70], np.int32)
    wrong: tuple[tuple[str, Callable[[], Any]], ...] = (
        ("block_size", lambda: h.attention(q, q, q, block_mask=mask)), ("block_size", lambda: h.attention(q, q, q, block_size=64)),
        ("block_size", lambda: h.attention(q, q, q, block_mask=mask, block_size=48)),
        ("block_size", lambda: h.attention(q, q, q, block_mask=mask, block_size=(64, 64, 64))),  # type: ignore[arg-type]
        ("shape of block_mask", lambda: h.attention(q, q, q, block_mask=mask[:1], block_size=64)),
        ("type of block_mask", lambda: h.attention(q, q, q, block_mask=mask.astype(np.float32), block_size=64)),
        ("block_mask", lambda: h.attention(q, q, q, block_mask=mask, block_size=64, cu_seqlens_q=starts, cu_seqlens_kv=starts)),
        ("scale_q", lambda: h.attention(q, q, q, scale_q=one)), ("scale_out", lambda: h.attention(narrow, narrow, narrow, scale_out=one)),
        ("shape of scale_k", lambda: h.attention(narrow, narrow, narrow, scale_k=np.ones(3, np.float32))),
        ("type of scale_v", lambda: h.attention(narrow, narrow, narrow, scale_v=np.ones(1))),
        ("out_dtype", lambda: h.attention(narrow, narrow, narrow, out_dtype="float64")),
        ("out_dtype", lambda: h.attention(q, q, q, out_dtype="float16")), ("type of k", lambda: h.attention(narrow, q, q)),
        ("score_gradients", lambda: h.attention_backward(q, q, q, q, q, normal(1, 2, 70).astype(np.float32), score_gradients="slope")),
        ("type of q", lambda: h.attention_backward(narrow, narrow, narrow, narrow, narrow, normal(1, 2, 70).astype(np.float32))),
    )  # fmt: skip
    for name, call in wrong:
        with pytest.raises(oxidnn.InvalidArgument, match=name):
            call()


def test_blocks_are_parsed() -> None:
    problem = parse_case(f"{forward('bf16', 1, 130, 256)} block_mask=bool[3,2] block_size=(64,128)")
    assert isinstance(problem, AttentionProblem)
    assert problem.blocks == (64, 128) and problem.block_strides() == (0, 0, 2, 1)
