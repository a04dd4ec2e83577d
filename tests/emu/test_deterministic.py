"""Matrix engines that say they are deterministic give the same bits however the emulator takes their threads in turn (test_repeat has the
others)."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.ops.case import format_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs, random_scalars
from oxidnn.testing.harness import execute
from oxidnn.testing.sample import SAMPLES

from .test_registry import IDS, PAIRS, seed_of
from .test_repeat import MATRIX

PICKED = [(pair, name) for pair, name in zip(PAIRS, IDS, strict=True) if pair[0].startswith(MATRIX) and pair[1].is_deterministic]


@pytest.mark.parametrize(("op", "engine"), [pair for pair, _ in PICKED], ids=[name for _, name in PICKED])
def test_same_bits_under_two_schedules(op: str, engine) -> None:  # type: ignore[no-untyped-def]
    backends = [EmulatedBackend("sm_90a", schedule=schedule) for schedule in ("lowest_pc", ("random", 11))]
    rng = np.random.default_rng(seed_of(op, engine.id, "bits"))
    problem = next(p for p in (SAMPLES[op](rng, "tiny") for _ in range(1000))
                   if not p.is_empty and engine.check_support(p, backends[0].info))
    configs = engine.configs(problem, backends[0].info)
    config = configs[int(rng.integers(len(configs)))]
    inputs = random_inputs(problem, rng)
    scalars = random_scalars(problem, rng)
    one, other = (execute(backend, problem, engine, config, inputs, scalars) for backend in backends)
    for name in one:
        assert one[name].tobytes() == other[name].tobytes(), f"{config.name} {format_case(problem)}: {name}"
