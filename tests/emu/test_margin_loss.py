"""Margin losses of classes and of lists of classes in the emulator: against PyTorch's autograd, lists that end anywhere, bad classes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument, Unsupported
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import compare, execute, run_problem
from oxidnn.testing.reference import REFERENCES

SHAPE = (9, 37)
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("multi_margin", {}), ("multi_margin", {"p": 2, "margin": 0.3, "weight": True}), ("multilabel_margin", {}),
    ("multilabel_soft_margin", {}), ("multilabel_soft_margin", {"weight": True}),
]


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def arrays(name: str) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(SHAPE)
    if name == "multi_margin":
        return {"x": x, "target": rng.integers(0, SHAPE[1], SHAPE[0])}
    if name == "multilabel_soft_margin":
        return {"x": x, "target": rng.integers(0, 2, SHAPE)}
    lists = np.stack([rng.permutation(SHAPE[1]) for _ in range(SHAPE[0])])
    for n in range(SHAPE[0]):  # lists of 0, 1, 5, ... and all classes
        lists[n, (0, 1, 5, 9, 15, 20, 30, 36, 37)[n]:] = -1 if n % 2 else -3
    lists[3, 4] = lists[3, 2]  # a class twice
    return {"x": x, "target": lists}


@pytest.mark.parametrize(("name", "attrs"), VARIANTS)
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_values_and_gradients_are_those_of_torch(h: oxidnn.DnnHandle, name: str, attrs: dict[str, Any], reduction: str) -> None:
    torch = pytest.importorskip("torch")
    given, rng = arrays(name), np.random.default_rng(1)
    weight: dict[str, Any] = {"weight": rng.uniform(0.5, 2, SHAPE[1])} if attrs.get("weight") else {}
    attrs = {n: v for n, v in attrs.items() if n != "weight"}
    x, target = torch.tensor(given["x"], requires_grad=True), torch.tensor(given["target"])
    if name == "multilabel_margin":
        target = target.clamp(min=-1)
    want = getattr(torch.nn.functional, f"{name}_loss")(x, target, reduction=reduction, **attrs,
                                                       **{n: torch.tensor(w) for n, w in weight.items()})
    upstream = rng.standard_normal(want.shape)
    want.backward(torch.tensor(upstream))
    np.testing.assert_allclose(h.row_loss(**given, **weight, name=name, reduction=reduction, **attrs), want.detach().numpy(), rtol=1e-11)
    gradient = h.row_loss_backward(**given, **weight, name=name, d_loss=upstream, reduction=reduction, **attrs)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("line", [
    "row_loss x=f16[1,9000]nchw target=s64[1]nchw name=multi_margin",
    "row_loss_backward x=f32[2,5001]nchw target=s64[2]nchw name=multi_margin p=2",
    "row_loss_backward x=bf16[1,20000]nchw target=s32[1]nchw weight=f32[20000]nchw name=multi_margin",
    "row_loss x=bf16[1,20000]nchw target=bf16[1,20000]nchw name=multilabel_soft_margin",
    "row_loss_backward x=f32[40,8](1,40) target=s64[40]nchw weight=f32[8]nchw name=multi_margin",
])
def test_every_config_on_long_and_turned_rows(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    engine = ENGINES[problem.op][0]
    for config in engine.configs(problem, backend.info):
        run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("arch", ["sm_75", "sm_80", "sm_90a"])
@pytest.mark.parametrize("length", [0, 1, 64, 65, 300, 1003])
@pytest.mark.parametrize("op", ["row_loss", "row_loss_backward"])
def test_lists_longer_than_a_cta_has_threads(op: str, length: int, arch: str) -> None:
    """Every config, of rows that take several turns, with classes that a list holds often."""
    problem = parse_case(f"{op} x=f32[2,1003]nchw target=s64[2,1003]nchw name=multilabel_margin reduction=sum")
    rng, backend = np.random.default_rng(length), EmulatedBackend(arch, checkers="all")
    lists = rng.integers(0, 200, (2, 1003))
    lists[:, length:] = -1
    given = {"x": np.round(rng.standard_normal((2, 1003)) * 4).astype(np.float32) / 4, "target": lists}
    engine, want = ENGINES[op][1], REFERENCES[op](problem, given, {})
    for config in engine.configs(problem, backend.info):
        compare(problem, execute(backend, problem, engine, config, given), want, config.name)


@pytest.mark.parametrize("name", ["multi_margin", "multilabel_margin"])
def test_a_bad_class_spoils_its_row_alone(h: oxidnn.DnnHandle, name: str) -> None:
    given = arrays(name)
    want, gradients = (f(**given, name=name, reduction="none") for f in (h.row_loss, h.row_loss_backward))
    for bad in (SHAPE[1], 2**40, -1):
        wrong = given | {"target": given["target"].copy()}
        wrong["target"][(4,) if name == "multi_margin" else (4, 3)] = bad
        got, d = (f(**wrong, name=name, reduction="none") for f in (h.row_loss, h.row_loss_backward))
        others = np.arange(SHAPE[0]) != 4
        np.testing.assert_array_equal(got[others], want[others])
        np.testing.assert_array_equal(d[others], gradients[others])
        assert np.isnan(got[4]) == np.isnan(d[4]).all() == (bad >= 0 or name == "multi_margin"), "a negative class ends a list"


def test_rows_that_shared_memory_does_not_hold_are_refused(h: oxidnn.DnnHandle) -> None:
    x = np.zeros((1, 60000), np.float32)
    with pytest.raises(Unsupported, match="shared memory"):
        h.row_loss(x, target=x.astype(np.int64), name="multilabel_margin")


@pytest.mark.parametrize(("given", "words"), [
    ({"name": "multi_margin"}, "shape of target"), ({"name": "multi_margin", "target": (3,), "p": 3}, "p is 3"),
    ({"name": "multi_margin", "target": (3,), "weight": (3,)}, "shape of weight"),
    ({"name": "multilabel_margin", "weight": (4,)}, "weight is given"), ({"name": "multilabel_margin", "margin": 0.5}, "margin is 0.5"),
    ({"name": "multilabel_soft_margin", "target": (3,)}, "shape of target"),
    ({"name": "multi_margin", "target": (3,), "eps": 1.0}, "eps is 1.0"),
])
def test_refusals(h: oxidnn.DnnHandle, given: dict[str, Any], words: str) -> None:
    arrays: dict[str, Any] = {"x": np.zeros((3, 4), np.float32), "target": np.zeros((3, 4), np.int64)}
    given = {n: np.zeros(v, np.int64 if n == "target" else np.float32) if isinstance(v, tuple) else v for n, v in given.items()}
    for method in (h.row_loss, h.row_loss_backward):
        with pytest.raises(InvalidArgument, match=words):
            method(**arrays | given)
