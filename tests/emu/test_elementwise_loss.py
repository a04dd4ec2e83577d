"""Elementwise losses in the emulator: against PyTorch and its autograd, finite differences, edges of domains, every config."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.loss_map import LossMap
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.ops.elementwise_loss import LOSSES
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import CASES, SAMPLES

OPS = ("loss", "loss_backward")
ARCHES = ("sm_80", "sm_90a")
SHAPE = (7, 45)


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def arrays(name: str, seed: int = 0) -> dict[str, np.ndarray]:
    """Operands within the loss's domain, in float64."""
    rng = np.random.default_rng(seed)
    given = {"x": rng.standard_normal(SHAPE), "target": rng.standard_normal(SHAPE)}
    if name in ("bce", "poisson_nll"):
        given["x"] = rng.uniform(0.1, 0.9, SHAPE)
    if name in ("bce", "bce_with_logits", "kl_div"):
        given["target"] = rng.uniform(0, 1, SHAPE)
        given["target"][0, :3] = [0, 1, 0]
    elif name == "poisson_nll":
        given["target"] = rng.integers(0, 5, SHAPE).astype(float)
    elif name not in ("mse", "l1", "smooth_l1", "huber", "gaussian_nll"):
        given["target"] = rng.choice([-1.0, 1.0], SHAPE)
    if name == "gaussian_nll":
        given["var"] = rng.uniform(0, 2, SHAPE)
        given["var"][0, :2] = 0
    if name == "margin_ranking":
        given["x2"] = rng.standard_normal(SHAPE)
    return given


def with_torch(name: str, a: dict[str, Any], reduction: str, attrs: dict[str, Any]) -> Any:
    F = pytest.importorskip("torch").nn.functional
    x, t, weight = a["x"], a["target"], a.get("weight")
    if name in ("hinge", "squared_hinge"):  # PyTorch has none
        losses = F.relu(attrs.get("margin", 1.0) - t * x) ** (1 if name == "hinge" else 2)
        return losses if reduction == "none" else getattr(losses, reduction)()
    if name == "bce":
        return F.binary_cross_entropy(x, t, weight, reduction=reduction)
    if name == "bce_with_logits":
        return F.binary_cross_entropy_with_logits(x, t, weight, pos_weight=a.get("pos_weight"), reduction=reduction)
    if name == "margin_ranking":
        return F.margin_ranking_loss(x, a["x2"], t, reduction=reduction, **attrs)
    if name == "gaussian_nll":
        return F.gaussian_nll_loss(x, t, a["var"], reduction=reduction, **attrs)
    function = {"mse": F.mse_loss, "l1": F.l1_loss, "smooth_l1": F.smooth_l1_loss, "huber": F.huber_loss, "kl_div": F.kl_div,
                "poisson_nll": F.poisson_nll_loss, "soft_margin": F.soft_margin_loss, "hinge_embedding": F.hinge_embedding_loss}[name]
    return function(x, t, reduction=reduction, **attrs)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in LOSSES), ("smooth_l1", {"beta": 0.3}), ("smooth_l1", {"beta": 0.0}), ("huber", {"delta": 0.3}),
    ("kl_div", {"log_target": True}), ("poisson_nll", {"log_input": False}), ("poisson_nll", {"full": True}),
    ("poisson_nll", {"log_input": False, "full": True, "eps": 0.1}), ("gaussian_nll", {"full": True, "eps": 0.5}),
    ("hinge", {"margin": 0.4}), ("hinge_embedding", {"margin": 0.4}), ("margin_ranking", {"margin": 0.4}),
]


@pytest.mark.filterwarnings("ignore:reduction. .mean. divides")
@pytest.mark.parametrize(("name", "attrs"), VARIANTS, ids=lambda v: v if isinstance(v, str) else "-".join(f"{a}{b}" for a, b in v.items()))
def test_values_and_gradients_are_those_of_torch(h: oxidnn.DnnHandle, name: str, attrs: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    given, rng = arrays(name), np.random.default_rng(1)
    if name in ("bce", "bce_with_logits"):
        given["weight"] = rng.uniform(0.5, 2, (SHAPE[0], 1))
    if name == "bce_with_logits":
        given["pos_weight"] = rng.uniform(0.5, 2, SHAPE[1])
    wrt = ["x", *(n for n in ("x2", "var") if n in given)]
    for reduction in ("none", "mean", "sum", *(("batchmean",) if name == "kl_div" else ())):
        tensors = {n: torch.tensor(a, requires_grad=n in wrt) for n, a in given.items()}
        want = with_torch(name, tensors, reduction, attrs)
        upstream = rng.standard_normal(want.shape)
        want.backward(torch.tensor(upstream))
        got = h.loss(name=name, reduction=reduction, **given, **attrs)
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-12, atol=1e-13)
        gradients = h.loss_backward(name=name, reduction=reduction, d_loss=upstream, **given, **attrs)
        for n, gradient in zip(wrt, gradients if len(wrt) > 1 else [gradients], strict=True):
            np.testing.assert_allclose(gradient, tensors[n].grad.numpy(), rtol=1e-9, atol=1e-13, err_msg=f"{reduction} by {n}")


@pytest.mark.parametrize("name", list(LOSSES))
def test_gradients_by_finite_differences(h: oxidnn.DnnHandle, name: str) -> None:
    given = arrays(name, 3)
    if name == "gaussian_nll":
        given["var"] += 0.1  # away from the end of its domain, where the gradient is another by definition
    step, direction = 1e-6, np.random.default_rng(2).choice([-1.0, 1.0], SHAPE)
    wrt = ["x", *(n for n in ("x2", "var") if n in given)]
    gradients = h.loss_backward(name=name, reduction="sum", **given)
    for n, gradient in zip(wrt, gradients if len(wrt) > 1 else [gradients], strict=True):
        ends = [h.loss(name=name, reduction="sum", **given | {n: given[n] + s * step * direction}) for s in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx((gradient * direction).sum(), rel=1e-5, abs=1e-5)


def test_edges_of_domains(h: oxidnn.DnnHandle) -> None:
    x, t = np.array([0, 0, 1, 1, np.nan], np.float32), np.array([0, 1, 0, 1, 1], np.float32)
    np.testing.assert_array_equal(h.loss(x, t, "bce", reduction="none"), np.array([0, 100, 100, 0, np.nan], np.float32))
    assert np.isfinite(h.loss_backward(x, t, "bce", reduction="sum")[:4]).all()
    z = np.array([-1e4, 1e4, 0, -30], np.float32)
    got = h.loss(z, np.array([0, 1, 0.5, 0], np.float32), "bce_with_logits", reduction="none")
    np.testing.assert_allclose(got, [0, 0, np.log(2), np.exp(-30)], rtol=1e-6)


def test_means_of_nothing(h: oxidnn.DnnHandle) -> None:
    x = np.zeros((0, 5), np.float32)
    assert np.isnan(h.loss(x, x, "mse")) and np.isnan(h.loss(x, x, "mse", reduction="batchmean"))
    assert h.loss(x, x, "mse", reduction="sum") == 0 and h.loss(x, x, "mse", reduction="none").shape == (0, 5)
    assert h.loss_backward(x, x, "mse").shape == (0, 5)


def test_sums_of_halves_are_made_in_single(h: oxidnn.DnnHandle) -> None:
    x = h.array(np.ones(30000), dtype="bfloat16")
    y = h.array(np.zeros(30000), dtype="bfloat16")
    assert float(h.loss(x, y, "mse").numpy()) == 1.0 and float(h.loss(x, y, "l1", reduction="sum").numpy()) == 29952  # 30000 in bf16


@pytest.mark.parametrize("op", OPS)
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(31)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ARCHES]
    for i in range(40):
        problem, backend = SAMPLES[op](rng, "tiny"), backends[i % 2]
        if problem.is_empty:
            continue
        for engine in ENGINES[op]:
            for config in engine.configs(problem, backend.info):
                run_problem(backend, problem, engine, config, seed=i)


def test_indices_of_64_bits() -> None:
    problem, backend = parse_case("loss x=f16[3,1001]nchw target=f16[3,1001]nchw weight=f32[1001]nchw name=huber"), EmulatedBackend("sm_80")
    for vec in (8, 1):
        run_problem(backend, problem, LossMap(), EngineConfig.of(vec=vec, index=64))


def test_a_limit_of_the_workspace_is_kept(h: oxidnn.DnnHandle) -> None:
    x = np.ones((3, 40000), np.float32)
    with h.options(workspace_limit=1 << 20):
        assert h.loss(x, 2 * x, "mse") == 1


@pytest.mark.parametrize("op", OPS)
def test_kernels_assemble_without_spills(op: str) -> None:
    rng, device = np.random.default_rng(32), known_device("sm_90a")
    for problem in [*map(parse_case, CASES[op]), *(SAMPLES[op](rng, "small") for _ in range(8))]:
        if not problem.is_empty:
            engine = ENGINES[op][0]
            for step in engine.build_steps(problem, engine.configs(problem, device)[0], device).steps:
                assembled = assemble(render(step.spec), "sm_90a")
                assert assembled.spill_bytes == 0 and assembled.registers <= 128, step.spec.describe()


@pytest.mark.parametrize(("given", "words"), [
    ({"name": "mes"}, "name is 'mes'"), ({"name": "mse", "reduction": "avg"}, "reduction is 'avg'"),
    ({"name": "mse", "beta": 2.0}, "beta is 2.0"), ({"name": "huber", "delta": 0.0}, "delta is 0.0"),
    ({"name": "mse", "full": True}, "full is True"), ({"name": "margin_ranking"}, "x2 is missing"),
    ({"name": "mse", "var": (3, 4)}, "var is given"), ({"name": "mse", "weight": (3, 3)}, "shape of weight"),
    ({"name": "mse", "target": (4, 3)}, "shape of target"), ({"name": "smooth_l1", "beta": "a"}, "beta is 'a'"),
])
def test_refusals(h: oxidnn.DnnHandle, given: dict[str, Any], words: str) -> None:
    tensors = {n: np.zeros(s, np.float32) for n, s in {"x": (3, 4), "target": (3, 4)}.items()}
    given = {n: np.zeros(v, np.float32) if isinstance(v, tuple) else v for n, v in given.items()}
    for method in (h.loss, h.loss_backward):
        with pytest.raises(InvalidArgument, match=words):
            method(**tensors | given)
