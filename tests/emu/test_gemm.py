"""The direct engine on GEMM in the emulator, all checkers on."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.engines.affine_direct import DIRECT
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.base import Scalar
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import CASES, SAMPLES

ENGINE = MatmulEngine("gemm", DIRECT)


@pytest.mark.parametrize("kind", ("f32", "f64", "f16", "bf16"))
def test_random_problems(kind: str) -> None:
    rng, left = np.random.default_rng(len(kind) + ord(kind[0])), 8
    while left:
        problem = SAMPLES["gemm"](rng, "tiny")
        if problem.desc("a").dtype.name != kind:
            continue
        left -= 1
        backend = EmulatedBackend(("sm_80", "sm_90a")[left % 2], checkers="all")
        for config in ENGINE.configs(problem, backend.info):
            run_problem(backend, problem, ENGINE, config, seed=left)


@pytest.mark.parametrize("line", CASES["gemm"])
def test_fixed_cases(line: str) -> None:
    run_problem(EmulatedBackend("sm_80", checkers="all"), parse_case(line), ENGINE)


def test_scalars_given_with_each_call() -> None:
    """One kernel, two values of an epilogue's scalar, which has the accumulator's type."""
    backend = EmulatedBackend("sm_80", checkers="all")
    for kind in ("f32", "f64"):
        problem = parse_case(f"gemm a={kind}[5,6] b={kind}[6,7] bias={kind}[7] epilogue='scalar(gain) * acc + bias'")
        assert problem.scalars == (Scalar("gain", kind),)
        outcomes = [run_problem(backend, problem, ENGINE, scalars={"gain": gain}).outputs["d"] for gain in (0.1, 2.0)]
        assert not np.array_equal(*outcomes)
