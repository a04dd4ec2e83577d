"""The emulator and the GPU run the same text on the same data: the same bits, but where approximate instructions enter.

OXIDNN_AGREEMENT=FILE keeps the record of a run as JSON.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from oxidnn.ops.case import format_case
from oxidnn.runtime.backend import Backend
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs, random_scalars
from oxidnn.testing.harness import compare, execute
from oxidnn.testing.reference import REFERENCES
from oxidnn.testing.sample import SAMPLES

from ..emu.test_registry import IDS, PAIRS, seed_of

pytestmark = pytest.mark.gpu
RUNS = 4
# Functions of these come from approximate instructions (ex2, lg2, rcp, rsqrt), which the emulator rounds better than silicon does.
APPROXIMATE = ("softmax", "cross_entropy", "activation", "glu", "pointwise", "norm", "lp_pool", "reduce", "lrn", "ctc_loss", "logcumsumexp",
               "random", "sinkhorn", "causal_conv1d", "attention", "moe")


@pytest.mark.parametrize(("op", "engine"), PAIRS, ids=IDS)
def test_emulator_and_gpu_agree(op: str, engine, cuda: Backend) -> None:  # type: ignore[no-untyped-def]
    emulator = EmulatedBackend(cuda.info.arch, tensor_core="exact")
    emulator.info = cuda.info  # the same choices of the engine: the same kernels, grids and arguments
    rng = np.random.default_rng(seed_of(op, engine.id, "agreement"))
    runs = equal = draws = 0
    worst = 0.0
    while runs < RUNS and draws < 4000:
        draws += 1
        problem = SAMPLES[op](rng, "tiny")
        if problem.is_empty or not engine.check_support(problem, cuda.info):
            continue
        config = engine.configs(problem, cuda.info)[0]
        inputs, scalars = random_inputs(problem, rng), random_scalars(problem, rng)
        on_gpu = execute(cuda, problem, engine, config, inputs, scalars)
        emulated = execute(emulator, problem, engine, config, inputs, scalars)
        same = all(on_gpu[n].tobytes() == emulated[n].tobytes() for n in on_gpu)
        if not same:
            expression = any(getattr(problem, name, None) is not None for name in ("epilogue", "prologue"))
            assert expression or any(name in op for name in APPROXIMATE), f"{engine.id} {config.name}: other bits. {format_case(problem)}"
            exact = {n: a.astype(np.float64) if problem.desc(n).dtype.is_float else a for n, a in inputs.items()}
            want = REFERENCES[problem.op](problem, exact, scalars)
            worst = max(worst, compare(problem, on_gpu, want, engine.id), compare(problem, emulated, want, "emulated"))
        runs += 1
        equal += same
    assert runs == RUNS
    record = os.environ.get("OXIDNN_AGREEMENT")
    if record:
        with Path(record).open("a", encoding="utf-8") as file:
            file.write(json.dumps({"op": op, "engine": engine.id, "runs": runs, "same_bits": equal, "worst": worst}) + "\n")
