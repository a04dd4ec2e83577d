"""Cross-entropy of linear layers in the emulator: against PyTorch's autograd, in one chunk and in many, on tensor copies, its workspace."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dispatch.select import choose
from oxidnn.engines import matmul
from oxidnn.engines.base import EngineConfig, WorkspaceMapArg
from oxidnn.engines.composition import product
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import SAMPLES

OPS = ("linear_cross_entropy", "linear_cross_entropy_backward")


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("attrs", [{}, {"label_smoothing": 0.2, "ignore_index": 3}])
def test_values_and_gradients_are_those_of_torch(h: oxidnn.DnnHandle, reduction: str, attrs: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    given: dict[str, Any] = {"x": rng.standard_normal((11, 6)), "w": rng.standard_normal((7, 6)), "bias": rng.standard_normal(7)}
    target, weight = rng.integers(0, 7, 11), rng.uniform(0.5, 2, 7)
    target[[2, 5]] = attrs.get("ignore_index", -100)
    tensors = {n: torch.tensor(a, requires_grad=True) for n, a in given.items()}
    logits = torch.nn.functional.linear(*tensors.values())
    want = torch.nn.functional.cross_entropy(logits, torch.tensor(target), torch.tensor(weight), reduction=reduction, **attrs)
    upstream = rng.standard_normal(want.shape)
    ours = h.linear_cross_entropy(**given, target=target, weight=weight, reduction=reduction, **attrs)
    np.testing.assert_allclose(ours, want.detach().numpy(), rtol=1e-11)
    got = h.linear_cross_entropy_backward(**given, target=target, weight=weight, d_loss=upstream, reduction=reduction, **attrs)
    loss, *unit = h.linear_cross_entropy(**given, target=target, weight=weight, reduction=reduction, return_gradients=True, **attrs)
    want.backward(torch.tensor(upstream), retain_graph=True)
    for gradient, (name, tensor) in zip(got, tensors.items(), strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-10, atol=1e-13, err_msg=name)
        tensor.grad = None
    want.sum().backward()
    np.testing.assert_array_equal(loss, ours)
    for gradient, tensor in zip(unit, tensors.values(), strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("op", OPS)
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(35)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ("sm_80", "sm_90a")]
    for i in range(20):
        problem, backend = SAMPLES[op](rng, "tiny"), backends[i % 2]
        for engine in ENGINES[op]:
            if engine.check_support(problem, backend.info):
                for config in engine.configs(problem, backend.info):
                    run_problem(backend, problem, engine, config, seed=i)


def test_products_by_tensor_copies_from_and_to_the_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small a problem would go to other loops: only Hopper's is left."""
    monkeypatch.setitem(matmul.ENGINES, "gemm", tuple(e for e in matmul.ENGINES["gemm"] if e.id == "gemm.wgmma_sm90"))
    product.cache_clear()
    problem = parse_case("linear_cross_entropy x=bf16[200,128]nchw w=bf16[128,128]nchw target=s64[200]nchw return_gradients=True")
    backend = EmulatedBackend("sm_90a", checkers="all")
    for engine in ENGINES[problem.op]:
        for config in engine.configs(problem, backend.info)[:2]:
            steps = engine.build_steps(problem, config, backend.info).steps
            assert any(isinstance(arg, WorkspaceMapArg) for step in steps for arg in step.args)
            run_problem(backend, problem, engine, config)
    product.cache_clear()


def test_a_sum_over_many_chunks_is_rounded_once(h: oxidnn.DnnHandle) -> None:
    """512 rows of alike parts of dw, each too small to change a bf16 sum of the others: sums of chunks in bf16 would lose them."""
    rows = 512
    problem = parse_case(f"linear_cross_entropy x=bf16[{rows},8]nchw w=bf16[8,8]nchw target=s64[{rows}]nchw reduction=sum "
                         "return_gradients=True")
    backend = EmulatedBackend("sm_90a")
    run_problem(backend, problem, ENGINES[problem.op][0], EngineConfig.of(rows=8))


def test_a_sum_over_many_columns_is_rounded_once() -> None:
    problem = parse_case("linear_cross_entropy x=bf16[8,8]nchw w=bf16[512,8]nchw target=s64[8]nchw reduction=sum return_gradients=True")
    run_problem(EmulatedBackend("sm_90a"), problem, ENGINES[problem.op][1], EngineConfig.of(columns=8))


@pytest.mark.parametrize("kind", ["bf16", "f32"])
def test_workspace(kind: str) -> None:
    """What is documented, and far less than the logits."""
    rows, features, classes = 32768, 4096, 128256
    line = f"x={kind}[{rows},{features}]nchw w={kind}[{classes},{features}]nchw target=s64[{rows}]nchw"
    for arch in ("sm_80", "sm_90a"):
        device = known_device(arch)
        for extra in ("", " return_gradients=True"):
            problem = parse_case(f"linear_cross_entropy {line}{extra}")
            logits = rows * classes * problem.desc("x").dtype.num_bytes
            for engine in (e for e in ENGINES[problem.op] if e.check_support(problem, device)):
                for config in engine.configs(problem, device):
                    used = engine.build_steps(problem, config, device).workspace_bytes
                    sums = 4 * features * (classes if engine.id == "linear_loss.rows" else rows) if extra else 0
                    chunk = max(128 << 20, sums // 4, logits // 4 if extra and engine.id == "linear_loss.rows" else 0)
                    allowed = chunk + (sums if kind == "bf16" else 0) + (64 << 20)  # the GEMMs' own, at most
                    assert used < allowed < 0.51 * logits, (engine.id, config.name, used / 2**20)


@pytest.mark.parametrize(("kind", "dw", "chosen"), [("bf16", "bf16", "linear_loss.columns"), ("bf16", "f32", "linear_loss.rows"),
                                                    ("f32", "f32", "linear_loss.rows")])
def test_sums_that_take_as_much_as_the_logits_are_left_to_columns(kind: str, dw: str, chosen: str) -> None:
    rows, features, classes = 8192, 4096, 128256
    problem = parse_case(f"linear_cross_entropy x={kind}[{rows},{features}]nchw w={kind}[{classes},{features}]nchw target=s64[{rows}]nchw "
                         f"dw={dw}[{classes},{features}]nchw return_gradients=True")
    engine, config, _ = choose(problem, known_device("sm_90a"), None)
    used = engine.build_steps(problem, config, known_device("sm_90a")).workspace_bytes
    assert engine.id == chosen and used < 0.4 * rows * classes * problem.desc("x").dtype.num_bytes


def test_modest_logits_are_one_chunk_unless_the_workspace_is_limited() -> None:
    device, logits = known_device("sm_90a"), 8192 * 32000 * 2
    line = "linear_cross_entropy x=bf16[8192,4096]nchw w=bf16[32000,4096]nchw target=s64[8192]nchw return_gradients=True"
    for extra, chosen, most in (("", "linear_loss.rows", logits + (16 << 20)),
                                (" workspace_limit=268435456", "linear_loss.columns", 256 << 20)):
        problem = parse_case(line + extra)
        engine, config, _ = choose(problem, device, None)
        assert engine.id == chosen and engine.build_steps(problem, config, device).workspace_bytes <= most


@pytest.mark.parametrize(("given", "words"), [
    ({"x": (4, 3, 2)}, "shape of x"), ({"w": (5, 7)}, "shape of w"), ({"target": (5,)}, "shape of target"),
    ({"bias": (4,)}, "shape of bias"),
    ({"label_smoothing": 1.5}, "label_smoothing is 1.5"),
    ({"reduction": "batchmean"}, "reduction is 'batchmean'"),
])
def test_refusals(h: oxidnn.DnnHandle, given: dict[str, Any], words: str) -> None:
    shapes: dict[str, Any] = {"x": (4, 6), "w": (5, 6), "target": (4,)}
    arrays: dict[str, Any] = {n: np.zeros(v, np.int64 if n == "target" else np.float32)
                              for n, v in (shapes | given).items() if isinstance(v, tuple)}
    for method in (h.linear_cross_entropy, h.linear_cross_entropy_backward):
        with pytest.raises(InvalidArgument, match=words):
            method(**arrays, **{n: v for n, v in given.items() if n not in arrays})
