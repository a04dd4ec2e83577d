"""Losses of rows in the emulator: against PyTorch and its autograd, finite differences, long rows, every config."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import SAMPLES

SHAPE = (9, 37)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("cosine_embedding", {}), ("cosine_embedding", {"margin": 0.1}), ("triplet_margin", {}), ("triplet_margin", {"margin": 0.2, "p": 1}),
    ("triplet_margin", {"margin": 3.0, "eps": 0.1}),
]


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def arrays(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    given = {n: rng.standard_normal(SHAPE) for n in ("x", "x2", "x3")}
    if name == "cosine_embedding":
        del given["x3"]
        given["target"] = rng.choice([-1.0, 1.0], SHAPE[0])
    return given


@pytest.mark.parametrize(("name", "attrs"), VARIANTS)
def test_values_and_gradients_are_those_of_torch(h: oxidnn.DnnHandle, name: str, attrs: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    given, rng = arrays(name), np.random.default_rng(1)
    wrt = [n for n in given if n != "target"]
    F = torch.nn.functional
    for reduction in ("none", "mean", "sum"):
        tensors = {n: torch.tensor(a, requires_grad=n in wrt) for n, a in given.items()}
        function = F.cosine_embedding_loss if name == "cosine_embedding" else F.triplet_margin_loss
        want = function(*tensors.values(), reduction=reduction, **attrs)
        upstream = rng.standard_normal(want.shape)
        want.backward(torch.tensor(upstream))
        got = h.row_loss(**given, name=name, reduction=reduction, **attrs)
        np.testing.assert_allclose(got, want.detach().numpy(), rtol=1e-9, atol=1e-12)
        gradients = h.row_loss_backward(**given, name=name, d_loss=upstream, reduction=reduction, **attrs)
        for n, gradient in zip(wrt, gradients, strict=True):
            np.testing.assert_allclose(gradient, tensors[n].grad.numpy(), rtol=1e-8, atol=1e-12, err_msg=f"{reduction} by {n}")


@pytest.mark.parametrize(("name", "attrs"), VARIANTS)
def test_gradients_by_finite_differences(h: oxidnn.DnnHandle, name: str, attrs: dict[str, Any]) -> None:
    given, step = arrays(name), 1e-6
    direction = np.random.default_rng(2).choice([-1.0, 1.0], SHAPE)
    gradients = h.row_loss_backward(**given, name=name, reduction="sum", **attrs)
    for n, gradient in zip([n for n in given if n != "target"], gradients, strict=True):
        ends = [h.row_loss(**given | {n: given[n] + s * step * direction}, name=name, reduction="sum", **attrs) for s in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx((gradient * direction).sum(), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize("op", ["row_loss", "row_loss_backward"])
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(31)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ("sm_80", "sm_90a")]
    for i in range(16):
        problem, backend = SAMPLES[op](rng, "tiny"), backends[i % 2]
        for engine in (e for e in ENGINES[op] if e.check_support(problem, backend.info)):
            for config in engine.configs(problem, backend.info):
                run_problem(backend, problem, engine, config, seed=i)


@pytest.mark.parametrize("line", [
    "row_loss x=f16[1,9000]nchw x2=f16[1,9000]nchw target=s64[1]nchw name=cosine_embedding",
    "row_loss_backward x=f32[1,5001]nchw x2=f32[1,5001]nchw x3=f32[1,5001]nchw name=triplet_margin",
    "row_loss_backward x=bf16[1,20000]nchw x2=bf16[1,20000]nchw target=s64[1]nchw name=cosine_embedding",
])
def test_long_rows(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    run_problem(backend, problem, ENGINES[problem.op][0])


def test_nothing_and_zeros(h: oxidnn.DnnHandle) -> None:
    x, target = np.zeros((0, 5), np.float32), np.zeros(0, np.int64)
    assert np.isnan(h.row_loss(x, x, target=target, name="cosine_embedding"))
    assert h.row_loss(x, x, target=target, name="cosine_embedding", reduction="sum") == 0
    zeros, ones = np.zeros((2, 5), np.float32), np.ones(2, np.int64)
    assert h.row_loss(zeros, zeros, target=ones, name="cosine_embedding") == 1, "the cosine of zeros is 0"
    assert all(np.isfinite(d).all() for d in h.row_loss_backward(zeros, zeros + 1, target=ones, name="cosine_embedding"))


@pytest.mark.parametrize(("given", "words"), [
    ({"name": "cosine"}, "name is 'cosine'"), ({"name": "cosine_embedding"}, "target is missing"),
    ({"name": "triplet_margin"}, "x3 is missing"), ({"name": "triplet_margin", "x3": (3, 5)}, "shape of x3"),
    ({"name": "triplet_margin", "x3": (3, 4), "p": 3}, "p is 3"),
    ({"name": "cosine_embedding", "target": (3,), "eps": -1.0}, "eps is -1.0"),
    ({"name": "cosine_embedding", "target": (3, 1)}, "shape of target"),
])
def test_refusals(h: oxidnn.DnnHandle, given: dict[str, Any], words: str) -> None:
    tensors = {n: np.zeros((3, 4), np.float32) for n in ("x", "x2")}
    given = {n: np.zeros(v, np.float32) if isinstance(v, tuple) else v for n, v in given.items()}
    for method in (h.row_loss, h.row_loss_backward):
        with pytest.raises(InvalidArgument, match=words):
            method(**tensors | given)
