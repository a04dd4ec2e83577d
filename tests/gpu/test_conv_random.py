"""Convolution on the GPU: random problems of every op and type, each by several of the engines that take it, those with the fewest first.

Strides, dilation, groups, asymmetric padding, taps read backwards, odd channels, gaps, reversed and misaligned views, epilogues, scales,
zero points; outputs, gaps and workspace poisoned beforehand. OXIDNN_TEST_RUNS scales how many.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from oxidnn.device import DeviceInfo, known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import Engine
from oxidnn.ops.base import Policy, Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.backend import Backend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import SAMPLES

from ..emu.test_registry import seed_of

OPS = tuple(op for op in ENGINES if op in ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad",
                                           "conv_transpose_wgrad"))
# Type of the first input, and the arithmetic allowed where it is f32 (None: as drawn).
KINDS = (("f32", "ieee"), ("f32", "tf32"), ("f32", "tf32x3"), ("f32", "bf16x3"), ("f32", "fast"), ("f16", None), ("bf16", None),
         ("f64", None), ("s8", None), ("u8", None), ("e4m3", None), ("e5m2", None))
SHARDS = [(op, kind, math) for op in OPS for kind, math in KINDS]
RUNS = int(os.environ.get("OXIDNN_TEST_RUNS", "40"))
PROBLEMS = max(1, -(-RUNS * 15 // 40))  # of a shard
ENGINES_EACH = 2  # of those that take a problem


def drawn(op: str, kind: str, math: str | None, size: str, device: DeviceInfo, count: int) -> list[tuple[Problem, list[Engine]]]:
    """`count` problems that are not empty, and who runs each."""
    rng = np.random.default_rng(seed_of(op, kind, math))
    ran: Counter[str] = Counter()
    found: list[tuple[Problem, list[Engine]]] = []
    while len(found) < count:
        problem = SAMPLES[op](rng, size)
        if problem.inputs[0].desc.dtype.name != kind or problem.is_empty:
            continue
        if math is not None:
            problem = replace(problem, policy=Policy(math=math))
        takers = sorted((e for e in ENGINES[op] if e.check_support(problem, device)), key=lambda e: ran[e.id])
        assert takers, f"no engine takes {problem}"
        found.append((problem, takers[:ENGINES_EACH]))
        ran.update(e.id for e in takers[:ENGINES_EACH])
    return found


def test_there_are_a_thousand_and_every_engine_is_among_them() -> None:
    assert len(SHARDS) * 15 >= 1000
    names: set[str] = set()
    for op in ("conv_fprop", "conv_wgrad"):
        for kind, math in KINDS:
            names |= {e.id for _, engines in drawn(op, kind, math, "small", known_device("sm_90a"), 15) for e in engines}
    every = {e.id for op in ("conv_fprop", "conv_wgrad") for e in ENGINES[op]}
    assert len(every - names) <= 4, sorted(every - names)  # some take few shapes: the registry's tests draw until they do


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ("f32", "f16", "bf16", "s8", "u8", "e4m3", "f64"))
def test_images_of_one_element_a_row(kind: str, cuda: Backend) -> None:
    """Broadcast along what is summed, under padding: terms of one address whose predicates differ, which ptxas has taken for one."""
    more = " zero_x=u8[1] zero_w=u8[4]" if kind == "u8" else ""
    for line in (f"conv_transpose x={kind}[3,42,6](344,8,0) w={kind}[42,14,3]nhwc stride=2 groups=3 output_padding=1",
                 f"conv_fprop x={kind}[2,5,6,6](180,36,0,0) w={kind}[4,5,3,3] padding=1{more}",
                 f"conv_fprop x={kind}[2,5,6,6](36,0,6,1) w={kind}[4,5,3,3](0,9,3,1) padding=((2,0),(0,1)){more}",
                 f"conv_wgrad x={kind}[2,5,6,6](180,36,6,0) dy={kind}[2,4,6,6](0,1,0,0) w_shape=(4,5,3,3) padding=1"):
        problem = parse_case(line)
        for engine in ENGINES[problem.op]:
            for config in engine.configs(problem, cuda.info)[:3] if engine.check_support(problem, cuda.info) else ():
                run_problem(cuda, problem, engine, config)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "kind", "math"), SHARDS, ids=[f"{op}-{kind}-{math or 'any'}" for op, kind, math in SHARDS])
def test_random_problems(op: str, kind: str, math: str | None, cuda: Backend) -> None:
    for number, (problem, engines) in enumerate(drawn(op, kind, math, "small", cuda.info, PROBLEMS)):
        for engine in engines:
            configs = engine.configs(problem, cuda.info)
            run_problem(cuda, problem, engine, configs[number % len(configs)], seed=number, aliases=number % 4 == 0)
