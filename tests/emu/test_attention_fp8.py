"""Attention of 8-bit floats on wgmma in the emulator, all checkers on, against the float64 reference: CTAs that walk many tiles."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dtypes import E4M3
from oxidnn.engines.attention_fp8_sm90 import AttentionFp8Engine
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import execute, run_problem

from .attention_unseen import UNSEEN, check_unseen

ENGINE = AttentionFp8Engine()


def tile(warpgroups: int, keys: int, chunk: int, stages: int = 2) -> EngineConfig:
    return EngineConfig.of(warpgroups=warpgroups, keys=keys, chunk=chunk, stages=stages)


def qkv(batch: int, heads: int, heads_kv: int, length: int, keys: int, dim: int, dim_v: int = 0, kinds: str = "e4m3 e4m3 e4m3") -> str:
    q, k, v = kinds.split()
    return (f"q={q}[{batch},{heads},{length},{dim}]nchw k={k}[{batch},{heads_kv},{keys},{dim}]nchw "
            f"v={v}[{batch},{heads_kv},{keys},{dim_v or dim}]nchw")


CASES = (
    (f"{qkv(1, 4, 2, 200, 333, 128)} causal=bottom_right scale_q=f32[4] scale_k=f32[2] scale_v=f32[1,2] return_lse=True",
     tile(3, 128, 64, 3)),
    (f"{qkv(2, 2, 1, 300, 200, 64, kinds='e4m3 e5m2 e4m3')} window=(50,20) sinks=f32[2] out_dtype=f16 return_lse=True", tile(4, 128, 64)),
    (f"{qkv(1, 2, 2, 150, 200, 128, 48, 'e5m2 e4m3 e5m2')} causal=top_left out_dtype=e4m3 scale_out=f32[2]", tile(2, 192, 64)),
    (f"{qkv(1, 1, 1, 200, 300, 256)} scale=-0.1 return_lse=True", tile(2, 128, 64)),
    (f"{qkv(1, 1, 1, 150, 600, 64)} scale=2.0 causal=bottom_right return_lse=True", tile(2, 128, 64)),  # the largest grows often, and far
    (f"{qkv(1, 1, 1, 70, 300, 144, 80)} scale_v=f32[1] return_lse=True", tile(2, 128, 128)),
    (f"{qkv(3, 2, 1, 100, 170, 48)} lengths_q=s32[3] lengths_kv=s32[3] alibi=f32[2] out_dtype=f32 return_lse=True", tile(2, 128, 64)),
    (f"{qkv(1, 2, 1, 300, 300, 80)} cu_seqlens_q=s32[5] cu_seqlens_kv=s32[5] causal=bottom_right scale_k=f32[1] return_lse=True",
     tile(2, 128, 64)),
    (f"{qkv(1, 2, 1, 300, 400, 128)} cu_seqlens_q=s32[4] cu_seqlens_kv=s32[4] window=(40,5) sinks=f32[2] out_dtype=e4m3 return_lse=True",
     tile(3, 128, 64, 3)),
    (f"{qkv(1, 2, 1, 70, 90, 16, 16)} out_dtype=e5m2 scale_q=f32[1,2]", tile(1, 64, 64)),
)


def emulated(seed: int) -> EmulatedBackend:
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=("random", seed))
    backend.info = replace(backend.info, num_sms=2)
    return backend


@pytest.mark.parametrize(("line", "config"), CASES)
def test_against_the_reference(line: str, config: EngineConfig) -> None:
    problem, backend = parse_case(f"attention {line}"), emulated(len(line))
    support = ENGINE.check_support(problem, backend.info)
    assert support, support.reason
    run_problem(backend, problem, ENGINE, config, seed=len(line))


def test_weights_are_rounded_to_nearest() -> None:
    """The mean square of the errors is that of roundings to e4m3 (a relative 0.0264, root mean square, of numbers alike distributed over a
    binade), where values are rounded no further and sums add errors of many weights."""
    problem, backend = parse_case(f"attention {qkv(1, 2, 2, 128, 256, 64)} out_dtype=f32"), emulated(1)
    inputs = random_inputs(problem, np.random.default_rng(4))
    q, k, v = (inputs[n].astype(np.float64)[0] for n in "qkv")
    weights = np.exp(np.einsum("hid,hjd->hij", q, k) / 8)
    weights /= weights.sum(2, keepdims=True)
    got = execute(backend, problem, ENGINE, tile(2, 128, 64), inputs)["out"][0]
    error = np.sqrt(np.mean((got - np.einsum("hij,hjd->hid", weights, v)) ** 2))
    expected = 0.0264 * np.sqrt(np.mean(np.einsum("hij,hjd->hid", weights**2, v**2)))
    assert 0.8 * expected < error < 1.2 * expected


def test_sums_over_many_keys_keep_their_bits() -> None:
    """Values of one sign: tensor cores alone would lose 3 % of 2,048 keys."""
    problem, backend = parse_case(f"attention {qkv(1, 1, 1, 64, 2048, 16, 16)} out_dtype=f32"), emulated(2)
    inputs = random_inputs(problem, np.random.default_rng(5))
    inputs["q"][:] = 0  # all weights alike, 2^8 each
    inputs["v"] = np.abs(inputs["v"].astype(np.float32)).astype(E4M3.numpy)
    got = execute(backend, problem, ENGINE, tile(1, 64, 64), inputs)["out"]
    want = inputs["v"].astype(np.float64).mean(2, keepdims=True)
    assert np.abs(got / want - 1).max() < 2e-3


@pytest.mark.parametrize("more", UNSEEN)
def test_keys_that_nobody_sees_need_not_be_numbers(more: str) -> None:
    check_unseen(emulated(5), ENGINE, tile(2, 64, 64), qkv(2, 2, 1, 70, 200, 64), more)


@pytest.mark.parametrize("more", ("mask=bool[1,1,70,90]", "dropout=0.5", "block_mask=bool[2,2] block_size=64"))
def test_what_it_leaves_to_the_plain_engine(more: str) -> None:
    assert not ENGINE.check_support(parse_case(f"attention {qkv(1, 2, 1, 70, 90, 16)} {more}"), known_device("sm_90a"))


@pytest.mark.parametrize(("dim", "config"), [(64, tile(4, 128, 64, 4)), (128, tile(3, 128, 128, 4)), (128, tile(3, 128, 64, 4)),
                                             (256, tile(2, 128, 64, 3))])
def test_products_are_not_serialised(dim: int, config: EngineConfig) -> None:
    problem, device = parse_case(f"attention {qkv(2, 8, 8, 2048, 2048, dim)} causal=top_left return_lse=True"), known_device("sm_90a")
    assert config in ENGINE.configs(problem, device)
    result = assemble(render(ENGINE.build_steps(problem, config, device).steps[-1].spec), "sm_90a")
    assert result.spill_bytes == 0
    assert "C75" not in result.log, result.log
