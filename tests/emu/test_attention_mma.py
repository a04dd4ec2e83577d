"""Attention by mma.sync: shapes of real devices, values that nobody sees, tables of sequences, rows that see nothing."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.device import known_device
from oxidnn.engines.attention_mma_sm80 import AttentionMma
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.attention import AttentionProblem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs, random_scalars
from oxidnn.testing.harness import compare, exact, execute, run_problem
from oxidnn.testing.reference import REFERENCES

ENGINE = AttentionMma()
QKV = "q=bf16[1,2,150,64]nchw k=bf16[1,1,170,64]nchw v=bf16[1,1,170,64]nchw"


def checked(line: str, change: dict[str, np.ndarray] | None = None, config: EngineConfig | None = None) -> dict[str, np.ndarray]:
    """Outputs, which agree with the reference, of random inputs but for those of `change`."""
    backend = EmulatedBackend("sm_80", checkers="all")
    problem = parse_case(line)
    rng = np.random.default_rng(3)
    inputs = random_inputs(problem, rng) | (change or {})
    scalars = random_scalars(problem, rng)
    outputs = execute(backend, problem, ENGINE, config or ENGINE.configs(problem, backend.info)[0], inputs, scalars)
    compare(problem, outputs, REFERENCES[problem.op](problem, exact(problem, inputs), scalars))
    return outputs


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (96, 40), (192, 128), (320, 512)])
@pytest.mark.parametrize("more", ["causal=bottom_right return_lse=True", "window=(40,7) softcap=4.0", "dropout=0.25"])
def test_first_choice_for_devices(arch: str, dims: tuple[int, int], more: str) -> None:
    problem = parse_case(f"attention q=f16[1,2,70,{dims[0]}]nchw k=f16[1,1,90,{dims[0]}]nchw v=f16[1,1,90,{dims[1]}]nchw {more}")
    config = ENGINE.configs(problem, known_device(arch))[0]
    run_problem(EmulatedBackend(arch, checkers="all"), problem, ENGINE, config)


@pytest.mark.parametrize("shape", [(4, 32, 64, 2), (4, 32, 32, 4), (4, 32, 128, 3), (2, 32, 64, 4), (8, 16, 32, 2)])
@pytest.mark.parametrize("swizzle, mix", [(0, 0), (1, 1)])
def test_shapes(shape: tuple[int, ...], swizzle: int, mix: int) -> None:
    warps, rows, tile_n, slots = shape
    config = EngineConfig.of(warps=warps, rows=rows, tile_n=tile_n, slots=slots, ctas=1, columns=256, swizzle=swizzle, mix=mix)
    for more in ("", "causal=top_left return_lse=True"):
        checked(f"attention {QKV} {more}", config=config)


@pytest.mark.parametrize("kind", ["bool", "bf16"])
@pytest.mark.parametrize("more", ["", "dropout=0.25", "causal=bottom_right"])
def test_values_behind_a_mask_are_not_used(kind: str, more: str) -> None:
    line = f"attention q=bf16[2,2,37,64]nchw k=bf16[2,2,75,64]nchw v=bf16[2,2,75,64]nchw mask={kind}[2,1,1,75] {more}"
    problem = parse_case(line)
    inputs = random_inputs(problem, np.random.default_rng(5))
    seen = inputs["mask"] if kind == "bool" else ~np.isneginf(inputs["mask"].astype(np.float32))
    assert not seen.all()
    values = inputs["v"].copy()
    for batch in range(2):
        values[batch][:, ~seen[batch, 0, 0].astype(bool)] = np.nan
    outputs = checked(line, {"v": values, "mask": inputs["mask"]})
    assert np.isfinite(outputs["out"].astype(np.float32)).all()


def test_values_beyond_lengths_and_limits_are_not_used() -> None:
    line = "attention q=f16[2,2,37,40]nchw k=f16[2,1,75,40]nchw v=f16[2,1,75,24]nchw lengths_kv=s32[2] causal=top_left"
    problem = parse_case(line)
    assert isinstance(problem, AttentionProblem)
    inputs = random_inputs(problem, np.random.default_rng(7))
    keys, values = inputs["k"].copy(), inputs["v"].copy()
    for batch, length in enumerate((20, 75)):
        keys[batch][:, length:], values[batch][:, length:] = np.nan, np.inf
        values[batch][:, 37:] = np.nan
    outputs = checked(line, {"k": keys, "v": values, "lengths_kv": np.array([20, 75], np.int32)})
    assert np.isfinite(outputs["out"].astype(np.float32)).all()


@pytest.mark.parametrize("starts_q, starts_kv", [
    ([0, 3, 3, 7], [0, 4, 6, 6]), ([0, 0, 0, 0], [0, 2, 4, 6]), ([2, 3, 5, 5], [1, 1, 5, 6]), ([0, 7, 7, 7], [0, 6, 6, 6]),
    ([7, 7, 7, 7], [6, 6, 6, 6])])
def test_sequences_side_by_side(starts_q: list[int], starts_kv: list[int]) -> None:
    outputs = checked("attention q=bf16[1,2,7,32]nchw k=bf16[1,2,6,32]nchw v=bf16[1,2,6,32]nchw cu_seqlens_q=s32[4] cu_seqlens_kv=s32[4] "
                      "return_lse=True", {"cu_seqlens_q": np.array(starts_q, np.int32), "cu_seqlens_kv": np.array(starts_kv, np.int32)})
    outside = [i for i in range(7) if not starts_q[0] <= i < starts_q[-1]]
    assert (outputs["out"][:, :, outside].astype(np.float32) == 0).all() and np.isneginf(outputs["lse"][:, :, outside]).all()


def test_more_sequences_than_a_warp_has_lanes() -> None:
    rng = np.random.default_rng(11)
    starts = {n: np.sort(np.concatenate([[0, total], rng.integers(0, total + 1, 98)])).astype(np.int32)
              for n, total in (("cu_seqlens_q", 200), ("cu_seqlens_kv", 150))}
    checked("attention q=bf16[1,1,200,16]nchw k=bf16[1,1,150,16]nchw v=bf16[1,1,150,16]nchw cu_seqlens_q=s32[100] cu_seqlens_kv=s32[100] "
            "causal=bottom_right return_lse=True", starts)


def test_scores_far_from_zero_are_no_masks() -> None:
    """All scores -6e4: the mean of the values; 2000 and 2001: an ordinary softmax."""
    line = "attention q=bf16[1,1,1,16]nchw k=bf16[1,1,5,16]nchw v=bf16[1,1,5,16]nchw scale=1.0"
    one = np.zeros((1, 1, 1, 16), np.float32)
    one[..., 0] = -250.0
    keys = np.zeros((1, 1, 5, 16), np.float32)
    keys[..., 0] = 240.0
    kind = parse_case(line).desc("q").dtype.numpy
    checked(line, {"q": one.astype(kind), "k": keys.astype(kind)})
    one[..., :2] = 50.0, 1.0
    keys[..., 0], keys[..., 1] = 40.0, np.arange(5)
    checked(line, {"q": one.astype(kind), "k": keys.astype(kind)})


def test_scores_that_rise_along_the_keys() -> None:
    """The base of the exponentials follows the largest score, which every tile of keys raises."""
    line = "attention q=f16[1,1,20,16]nchw k=f16[1,1,200,16]nchw v=f16[1,1,200,16]nchw scale=1.0 return_lse=True"
    query, keys = np.ones((1, 1, 20, 16), np.float16), np.zeros((1, 1, 200, 16), np.float16)
    keys[..., 0] = np.arange(200) / 2
    checked(line, {"q": query, "k": keys})
    checked(line, {"q": query, "k": keys[:, :, ::-1].copy()})
