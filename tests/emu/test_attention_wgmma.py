"""Attention on wgmma in the emulator, all checkers on, against the float64 reference: CTAs that walk many tiles, on a device of two SMs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.attention_wgmma_sm90 import AttentionWgmmaEngine
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

from .attention_unseen import UNSEEN, check_unseen

ENGINE = AttentionWgmmaEngine()


def tile(warpgroups: int, keys: int, stages: int = 2, ctas: int = 1) -> EngineConfig:
    return EngineConfig.of(warpgroups=warpgroups, keys=keys, stages=stages, ctas=ctas)


def qkv(dtype: str, batch: int, heads: int, heads_kv: int, length: int, keys: int, dim: int, dim_v: int = 0) -> str:
    return (f"q={dtype}[{batch},{heads},{length},{dim}]nchw k={dtype}[{batch},{heads_kv},{keys},{dim}]nchw "
            f"v={dtype}[{batch},{heads_kv},{keys},{dim_v or dim}]nchw")


CASES = (
    (f"{qkv('bf16', 1, 2, 1, 200, 300, 64)} causal=bottom_right return_lse=True", tile(1, 128)),
    (f"{qkv('f16', 1, 4, 2, 300, 222, 64)} causal=top_left return_lse=True", tile(2, 80, 3, ctas=2)),
    (f"{qkv('bf16', 1, 2, 1, 140, 300, 64)} causal=bottom_right", tile(3, 96, 2)),
    (f"{qkv('bf16', 1, 2, 1, 200, 200, 64)} causal=top_left softcap=3.0 scale=0.5 sinks=f32[2] return_lse=True", tile(2, 64)),
    (f"{qkv('bf16', 1, 2, 1, 140, 200, 256, 192)} causal=bottom_right return_lse=True", tile(2, 64)),
    (f"{qkv('bf16', 1, 4, 2, 300, 333, 64)} causal=bottom_right return_lse=True", tile(3, 128, 3)),
    (f"{qkv('bf16', 1, 2, 2, 150, 333, 64)} scale=3.0 return_lse=True", tile(2, 64)),
    (f"{qkv('bf16', 2, 2, 1, 200, 90, 64)} causal=bottom_right return_lse=True", tile(2, 64, 3)),  # rows that see no key
    (f"{qkv('f16', 1, 2, 2, 260, 200, 128)} window=(50,20) sinks=f32[2] return_lse=True", tile(3, 96, 3)),
    (f"{qkv('f16', 1, 2, 2, 130, 360, 128, 40)}", tile(2, 176)),
    (f"{qkv('bf16', 1, 1, 1, 200, 170, 256)} causal=top_left scale=-0.5 return_lse=True", tile(2, 80)),
    (f"{qkv('bf16', 1, 2, 1, 300, 300, 72)} cu_seqlens_q=s32[5] cu_seqlens_kv=s32[5] causal=bottom_right return_lse=True", tile(2, 64)),
    (f"{qkv('f16', 3, 2, 1, 100, 170, 32)} lengths_q=s32[3] lengths_kv=s32[3] alibi=f32[2] softcap=5.0", tile(2, 64)),
    (f"{qkv('bf16', 1, 2, 2, 80, 150, 64)} bias=bf16[80,150] dropout=0.25 return_lse=True", tile(1, 64)),
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


@pytest.mark.parametrize("more", UNSEEN)
def test_keys_that_nobody_sees_need_not_be_numbers(more: str) -> None:
    check_unseen(emulated(5), ENGINE, tile(2, 64), qkv('bf16', 2, 2, 1, 70, 200, 64), more)


@pytest.mark.parametrize(("length", "dim", "config"), [(512, 128, tile(2, 128)), (1024, 64, tile(3, 96, 3)), (4096, 128, tile(3, 96, 3)),
                                                       (16384, 256, tile(2, 80))])
def test_ctas_get_equal_shares_of_a_triangle(length: int, dim: int, config: EngineConfig) -> None:
    batch, heads = 16384 // length, 2048 // dim
    problem = parse_case(f"attention {qkv('bf16', batch, heads, heads, length, length, dim)} causal=top_left")
    device = known_device("sm_90a")
    (step,) = ENGINE.build_steps(problem, config, device).steps
    given = {p.name: a for p, a in zip(step.spec.params, step.args, strict=True) if isinstance(a, int)}
    rows, tiles, run, seen = 64 * config["warpgroups"], given["num_tiles"], given["run"], []
    shares = []
    for cta in range(device.num_sms):
        # As the kernel walks: forth in even rounds, back in odd ones.
        at, stride, work = cta - (2 * cta + 1), 2 * cta + 1, 0.0
        while (at := at + stride) < tiles:
            stride = 2 * device.num_sms - stride
            first_row, pair = divmod(at % given["run_tiles"], run)
            first_row = (given["q_tiles"] - 1 - first_row) * rows
            seen.append((at // given["run_tiles"] * run + pair, first_row))
            work += -(-min(length, first_row + rows) // config["keys"]) + 1
        shares.append(work)
    assert sorted(seen) == [(pair, row) for pair in range(batch * heads) for row in range(0, length, rows)]
    assert max(shares) <= 1.12 * sum(shares) / len(shares)


@pytest.mark.parametrize(("dim", "config"), [(64, tile(3, 128, 3)), (64, tile(2, 80, 3, ctas=2)), (128, tile(2, 176)),
                                             (128, tile(3, 96, 3)), (256, tile(2, 80))])
@pytest.mark.parametrize("causal", ("", "causal=bottom_right"))
def test_products_are_not_serialised(dim: int, config: EngineConfig, causal: str) -> None:
    problem, device = parse_case(f"attention {qkv('bf16', 2, 8, 8, 2048, 2048, dim)} {causal} return_lse=True"), known_device("sm_90a")
    assert config in ENGINE.configs(problem, device)
    (step,) = ENGINE.build_steps(problem, config, device).steps
    result = assemble(render(step.spec), "sm_90a")
    assert result.spill_bytes == 0
    assert "C75" not in result.log, result.log
