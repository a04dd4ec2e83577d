"""The direct engine on GEMM in the emulator, all checkers on."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn import expr
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dtypes import BF16
from oxidnn.engines.affine_direct import DIRECT
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops import OPS
from oxidnn.ops.base import Policy, Scalar
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.tensor import TensorDesc
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.sample import CASES, SAMPLES
from oxidnn.testing.sample.gemm import sample_scaled

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


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a"))
def test_scaled_problems(arch: str) -> None:
    """8-bit inputs, scales of every granularity, gates and second outputs."""
    rng, backend = np.random.default_rng(len(arch)), EmulatedBackend(arch, checkers="all")
    for seed in range(40):
        problem = sample_scaled(rng, "tiny")
        for config in ENGINE.configs(problem, backend.info):
            run_problem(backend, problem, ENGINE, config, seed=seed)


def test_every_code_of_the_8_bit_floats() -> None:
    """Products with 1 give each code's value: subnormals, infinities, NaN."""
    for kind, name in (("e4m3", "float8_e4m3fn"), ("e5m2", "float8_e5m2")):
        problem = parse_case(f"gemm a={kind}[256,1] b={kind}[1,1] d=f32[256,1]")
        codes = np.arange(256, dtype=np.uint8).view(problem.desc("a").dtype.numpy).reshape(256, 1)
        one = np.ones((1, 1)).astype(codes.dtype)
        got = execute(EmulatedBackend("sm_80", checkers="all"), problem, ENGINE, ENGINE.configs(problem, EmulatedBackend("sm_80").info)[0],
                      {"a": codes, "b": one})["d"]
        np.testing.assert_array_equal(got, codes.astype(np.float32), err_msg=name)


def test_what_is_multiplied_by_nothing_leaves_no_nan() -> None:
    backend = EmulatedBackend("sm_80", checkers="all")
    nan, one = np.full((4, 4), np.nan, np.float32), np.ones((4, 4), np.float32)
    for attrs, inputs, want in (("", {"a": one, "b": one, "c": nan}, 4), ("alpha=0.0 beta=3.0", {"a": nan, "b": nan, "c": one}, 3)):
        problem = parse_case(f"gemm a=f32[4,4] b=f32[4,4] c=f32[4,4] {attrs}")
        got = execute(backend, problem, ENGINE, ENGINE.configs(problem, backend.info)[0], inputs)["d"]
        assert (got == want).all()


@pytest.mark.parametrize("name", ("relu", "gelu", "gelu_tanh", "silu", "sigmoid", "tanh"))
def test_gradient_of_the_activation_before(name: str) -> None:
    """dz = (dy @ w^T) * f'(z) in one kernel, f' by differences of f."""
    epilogue = expr.parse(f"{name}(z)").differentiate("z").substitute({"dy": expr.acc})
    tensors = {n: TensorDesc.packed(BF16, shape) for n, shape in (("a", (40, 72)), ("b", (24, 72)), ("z", (40, 24)))}
    problem = OPS["gemm"].make(tensors, {"transpose_b": True, "epilogue": epilogue, "out_dtype": "f32"}, Policy())
    rng = np.random.default_rng(5)
    backend = EmulatedBackend("sm_90a", checkers="all")
    inputs = {n: rng.uniform(-3, 3, tensors[n].shape).astype(tensors[n].dtype.numpy) for n in tensors}
    a, b, z = (inputs[n].astype(np.float64) for n in "abz")
    f, h = expr.parse(f"{name}(acc)"), 1e-6
    want = a @ b.T * (f.evaluate({"acc": z + h})[0] - f.evaluate({"acc": z - h})[0]) / (2 * h)
    takers = [e for e in ENGINES["gemm"] if e.check_support(problem, backend.info)]
    assert len(takers) > 2
    for engine in takers:
        got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], inputs)["d"]
        np.testing.assert_allclose(got, want, rtol=2e-3, atol=2e-2)
