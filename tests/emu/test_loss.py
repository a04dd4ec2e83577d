"""Softmax and cross-entropy kernels in the emulator: published values, special values, every config; assembled without spills."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import to_storage
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.sample import CASES, SAMPLES
from oxidnn.testing.sample.loss import SAMPLES as OPS

ARCHES = ("sm_80", "sm_90a")
NAN, INF = np.nan, np.inf


def outputs(line: str, config: int = 0, **inputs: object) -> np.ndarray:
    """The op's output for given values, in the storage types, by its first engine, as float64."""
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    engine = ENGINES[problem.op][0]
    arrays = {n: to_storage(np.asarray(v), problem.desc(n).dtype) for n, v in inputs.items()}
    configs = engine.configs(problem, backend.info)
    got = execute(backend, problem, engine, configs[config % len(configs)], arrays)
    return got[problem.outputs[0].name].astype(np.float64)


@pytest.mark.parametrize("config", [0, 1])
@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
def test_infinities_and_nan_in_softmax(kind: str, config: int) -> None:
    x = [[-INF, 0, 0], [-INF, -INF, -INF], [0, NAN, 1], [INF, 0, 1], [5, 5, -INF]]
    want = [[0, 0.5, 0.5], [NAN] * 3, [NAN] * 3, [NAN] * 3, [0.5, 0.5, 0]]
    np.testing.assert_array_equal(outputs(f"softmax x={kind}[5,3]nchw", config, x=x), want)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(outputs(f"softmax x={kind}[5,3]nchw log=True", config, x=x), np.log(want), rtol=4e-3)


@pytest.mark.parametrize("columns", [40, 5000, 20000])
def test_an_empty_share_of_a_row_spoils_nothing(columns: int) -> None:
    """Only the last column is finite: whole warps see nothing but -inf."""
    x = np.full((1, columns), -INF)
    x[0, -1] = 3
    want = np.zeros((1, columns))
    want[0, -1] = 1
    np.testing.assert_array_equal(outputs(f"softmax x=f32[1,{columns}]nchw", x=x), want)


def test_large_logits() -> None:
    y = outputs("softmax x=f32[2,2]nchw", x=[[2000, 2001], [1e30, -1e30]])
    np.testing.assert_allclose(y, [[1 / (1 + np.e), np.e / (1 + np.e)], [1, 0]], rtol=1e-6)
    loss = outputs("cross_entropy logits=f32[2,2]nchw target=s64[2]nchw reduction=none", logits=[[1e4, 0], [0, 1e4]], target=[1, 1])
    assert loss.tolist() == [1e4, 0]


def test_ignored_rows_count_nowhere() -> None:
    logits, target = [[2, 0], [0, 1]], [0, -100]
    tail = "logits=f32[2,2]nchw target=s64[2]nchw label_smoothing=0.2"
    assert outputs(f"cross_entropy {tail}", logits=logits, target=target) == pytest.approx(0.3269, abs=5e-5)
    gradient = outputs(f"cross_entropy_backward {tail}", logits=[[2, 0], [NAN, 1]], target=target)
    p = np.exp([2, 0]) / np.exp([2, 0]).sum()
    np.testing.assert_allclose(gradient, [p - [0.9, 0.1], [0, 0]], rtol=1e-5, atol=1e-7)


def test_mean_over_nothing_is_nan() -> None:
    line = "cross_entropy logits=f32[2,3]nchw target=s64[2]nchw"
    assert np.isnan(outputs(line, logits=np.zeros((2, 3)), target=[-100, -100]))
    assert outputs(line + " reduction=sum", logits=np.zeros((2, 3)), target=[-100, -100]) == 0
    assert np.isnan(outputs("cross_entropy logits=f32[0,3]nchw target=s64[0]nchw", logits=np.zeros((0, 3)), target=np.zeros(0, int)))


@pytest.mark.parametrize("bad", [-1, 3, 2**40, -(2**63)])
@pytest.mark.parametrize("tail", ["", " weight=f32[3]nchw"])
def test_a_target_outside_the_classes_gives_nan_and_no_wild_read(bad: int, tail: str) -> None:
    inputs = {"logits": np.zeros((2, 3)), "target": [1, bad]} | ({"weight": np.ones(3)} if tail else {})
    tail = "logits=f32[2,3]nchw target=s64[2]nchw" + tail
    rows = outputs(f"cross_entropy {tail} reduction=none", **inputs)
    np.testing.assert_allclose(rows, [np.log(3), NAN], rtol=1e-6)
    assert np.isnan(outputs(f"cross_entropy {tail}", **inputs))
    gradient = outputs(f"cross_entropy_backward {tail} reduction=sum", **inputs)
    np.testing.assert_allclose(gradient, [[1 / 3, -2 / 3, 1 / 3], [NAN] * 3], rtol=1e-6)


def test_half_precision_accumulates_in_single() -> None:
    """4096 equal bf16 logits: the sum of exponentials is beyond what bf16 can count."""
    y = outputs("softmax x=bf16[1,4096]nchw", x=np.ones((1, 4096)))
    np.testing.assert_array_equal(y, np.full((1, 4096), 1 / 4096))


@pytest.mark.parametrize("line", [
    f"softmax x=f32[3,1]({2**20},{2**31})", "softmax x=f32[4,33](-40,1)", "softmax x=f32[4,33](1,4)", "softmax x=f32[40,9](0,1)",
    f"cross_entropy logits=f32[3,1]({2**20},{2**31}) target=s64[3](-1) weight=f32[1]nchw",
    f"cross_entropy_backward logits=f32[3,1]({2**20},{2**31}) target=s64[3](-1) weight=f32[1]nchw label_smoothing=0.1",
])
def test_wide_negative_and_zero_strides(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    run_problem(backend, problem, ENGINES[problem.op][0])


@pytest.mark.parametrize("line", [
    "softmax x=f32[1,20000]nchw", "softmax x=f64[1,9001]nchw log=True", "softmax_backward dy=f16[1,17000]nchw y=f16[1,17000]nchw",
    "cross_entropy logits=f32[2,20001]nchw target=s64[2]nchw label_smoothing=0.1",
    "cross_entropy_backward logits=bf16[2,40000]nchw target=bf16[2,40000]nchw",
])
def test_rows_too_long_for_registers(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    run_problem(backend, problem, ENGINES[problem.op][0])


@pytest.mark.parametrize("op", list(OPS))
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(31)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ARCHES]
    for i in range(12):
        problem = SAMPLES[op](rng, "tiny")
        for engine in ENGINES[op]:
            for config in engine.configs(problem, backends[i % 2].info):
                run_problem(backends[i % 2], problem, engine, config, seed=i)


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("op", list(OPS))
def test_kernels_assemble_without_spills(op: str, arch: str) -> None:
    rng, device = np.random.default_rng(32), known_device(arch)
    for problem in [*map(parse_case, CASES[op]), *(SAMPLES[op](rng, "small") for _ in range(8))]:
        for engine in ENGINES[op]:
            for config in engine.configs(problem, device):
                for step in engine.build_steps(problem, config, device).steps:
                    assembled = assemble(render(step.spec), arch)
                    assert assembled.spill_bytes == 0 and assembled.registers <= 128, step.spec.describe()


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_negative_log_likelihood_is_that_of_torch(reduction: str) -> None:
    """With weights, ignored rows and spatial extents; cross-entropy, with label smoothing, beside it."""
    torch = pytest.importorskip("torch")
    h, rng = oxidnn.DnnHandle("emu:sm_90a"), np.random.default_rng(0)
    logits, target, weight = rng.standard_normal((5, 7, 3)), rng.integers(0, 7, (5, 3)), rng.uniform(0.5, 2, 7)
    target[1, 2] = target[4, 0] = 2
    F = torch.nn.functional
    for name, attrs in (("nll", {}), ("cross_entropy", {}), ("cross_entropy", {"label_smoothing": 0.2})):
        x = torch.tensor(logits, requires_grad=True)
        function = F.nll_loss if name == "nll" else F.cross_entropy
        want = function(x, torch.tensor(target), torch.tensor(weight), ignore_index=2, reduction=reduction, **attrs)
        upstream = rng.standard_normal(want.shape)
        want.backward(torch.tensor(upstream))
        given = {"weight": weight, "ignore_index": 2, "reduction": reduction, **attrs}
        np.testing.assert_allclose(getattr(h, name)(logits, target, **given), want.detach().numpy(), rtol=1e-12)
        got = getattr(h, name + "_backward")(logits, target, d_loss=upstream, **given)
        np.testing.assert_allclose(got, x.grad.numpy(), rtol=1e-9, atol=1e-13)


def test_refusals_of_negative_log_likelihood() -> None:
    h, x = oxidnn.DnnHandle("emu:sm_80"), np.zeros((2, 3), np.float32)
    with pytest.raises(InvalidArgument, match="type of target"):
        h.nll(x, x)
    with pytest.raises(InvalidArgument, match="'label_smoothing' is no attribute"):
        parse_case("nll logits=f32[2,3]nchw target=s64[2]nchw label_smoothing=0.1")
