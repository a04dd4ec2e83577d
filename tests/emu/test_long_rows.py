"""Rows longer than the registers of a CTA: every home a row may have, of one CTA or a cluster, against the references; assembled."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

# (case, homes and clusters that its configs must have on sm_90a)
LINES = [
    ("softmax x=bf16[2,20000]", {("shared", 1), ("memory", 1)}),
    ("softmax x=bf16[2,70000] log=True", {("shared", 4), ("memory", 8)}),
    ("softmax x=f16[1,40001]", {("registers", 4), ("memory", 8)}),
    ("softmax_backward dy=bf16[2,40000] y=bf16[2,40000]", {("shared", 4), ("memory", 8)}),
    ("softmax_backward dy=f32[1,9001] y=f32[1,9001] log=True", {("shared", 2), ("memory", 1)}),
    ("layer_norm x=bf16[2,70000] gamma=f32[70000] beta=f32[70000] return_stats=True", {("shared", 4), ("memory", 8)}),
    ("layer_norm x=f32[2,20000] residual=f32[2,20000] gamma=f32[20000] return_sum=True", {("shared", 4), ("memory", 8)}),
    ("layer_norm x=f16[1,40001] return_stats=True", {("registers", 4), ("memory", 8)}),
    ("rms_norm x=bf16[2,20000] gamma=bf16[20000]", {("shared", 1)}),
    ("layer_norm_backward dy=bf16[5,20000] x=bf16[5,20000] mean=f32[5] rstd=f32[5] gamma=bf16[20000]", {("ring", 4), ("ring", 2)}),
    ("rms_norm_backward dy=f32[9,9000] x=f32[9,9000] rstd=f32[9] gamma=f32[9000]", {("ring", 4), ("ring", 2)}),
]


@pytest.mark.parametrize(("line", "homes"), LINES, ids=[line for line, _ in LINES])
def test_every_home(line: str, homes: set[tuple[str, int]]) -> None:
    problem = parse_case(line)
    for arch, schedule in (("sm_90a", ("random", 3)), ("sm_80", "lowest_pc")):
        backend = EmulatedBackend(arch, checkers="all", schedule=schedule)
        engine = ENGINES[problem.op][0]
        configs = engine.configs(problem, backend.info)
        found = {(c["home"], dict(c.knobs).get("cluster", 1)) for c in configs}
        assert homes <= found if arch == "sm_90a" else all(cluster == 1 for _, cluster in found)
        for config in configs:
            run_problem(backend, problem, engine, config, seed=7)
            for step in engine.build_steps(problem, config, backend.info).steps:
                assembled = assemble(render(step.spec), arch)
                assert assembled.spill_bytes == 0 and assembled.registers <= 128, step.spec.describe()


def test_a_cluster_adds_in_a_fixed_order() -> None:
    problem = parse_case("layer_norm x=bf16[2,70000] return_stats=True")
    engine, rng = ENGINES[problem.op][0], np.random.default_rng(1)
    inputs = {"x": rng.standard_normal((2, 70000)).astype(problem.desc("x").dtype.numpy)}
    backends = [EmulatedBackend("sm_90a", checkers="all", schedule=s) for s in ("lowest_pc", ("random", 1))]
    for config in engine.configs(problem, backends[0].info):
        first, second = (execute(b, problem, engine, config, inputs) for b in backends)
        assert all(first[n].tobytes() == second[n].tobytes() for n in first)


@pytest.mark.parametrize("knobs", [{"home": "shared", "cluster": 2}, {"home": "memory", "cluster": 4}, {"home": "registers", "cluster": 8}])
@pytest.mark.parametrize("line", [
    "cross_entropy logits=bf16[3,2504] target=s64[3] label_smoothing=0.1 reduction=none",
    "cross_entropy logits=bf16[3,2504] target=bf16[3,2504] weight=f32[2504]",
    "cross_entropy_backward logits=bf16[3,2504] target=s64[3]",
    "cross_entropy_backward logits=bf16[3,2504] target=s64[3] weight=bf16[2504] label_smoothing=0.1",
])
def test_cross_entropy_over_a_cluster(line: str, knobs: dict[str, object]) -> None:
    """Rows shorter than those that get a cluster: the reference has a matrix of classes x classes."""
    problem = parse_case(line)
    config = EngineConfig.of(lanes=64, vec=8, threads=64, **knobs)
    run_problem(EmulatedBackend("sm_90a", checkers="all", schedule=("random", 2)), problem, ENGINES[problem.op][0], config)
