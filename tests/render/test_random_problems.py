"""Kernels for random problems on a GPU, in configs that the emulated device is not given: they assemble, without spills."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.base import Engine
from oxidnn.ops.case import format_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.kernel import check_value
from oxidnn.testing.sample import SAMPLES

from ..emu.test_registry import IDS, PAIRS, seed_of

RUNS = 3


@pytest.mark.parametrize(("op", "engine"), PAIRS, ids=IDS)
def test_kernels_for_a_gpu(op: str, engine: Engine) -> None:
    info, rng = known_device("sm_90a"), np.random.default_rng(seed_of(op, engine.id, "assembled"))
    runs = draws = 0
    while runs < RUNS and draws < 2000:
        draws += 1
        problem = SAMPLES[op](rng, "small")
        if problem.is_empty or not engine.check_support(problem, info):
            continue
        configs = engine.configs(problem, info)
        config = configs[runs % len(configs)]
        runs += 1
        for step in engine.build_steps(problem, config, info).steps:
            for i, (param, value) in enumerate(zip(step.spec.params, step.args, strict=True)):
                if isinstance(value, (int, float)) and param.type != "tensor_map":
                    check_value(step.spec, i, value)
            spilled = assemble(render(step.spec), "sm_90a").spill_bytes
            assert not spilled, f"{spilled} bytes spilled: {config.name} {format_case(problem)}"
    assert runs
