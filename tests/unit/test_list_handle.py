"""Optimiser steps and gradients' norms through the handle: PyTorch's optimisers as a second opinion, and what is refused."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch import lists as list_calls
from oxidnn.errors import InvalidArgument

SHAPES = [(5,), (7, 9), (1030,), (3, 4, 2, 2), (0, 3)]


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def zeros() -> list[np.ndarray]:
    return [np.zeros(s, np.float32) for s in SHAPES]


def normal(seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(s).astype(np.float32) for s in SHAPES]


def copies(arrays: list[np.ndarray]) -> list[np.ndarray]:
    return [a.copy() for a in arrays]


def sgd(h: Any, params: Any, grads: Any, state: list[Any], step: int, **options: Any) -> None:
    has_momentum = bool(options.get("momentum"))
    h.sgd_step(params, grads, state[0] if has_momentum else None, first=step == 1 and has_momentum, **options)


def adam(h: Any, params: Any, grads: Any, state: list[Any], step: int, amsgrad: bool = False, **options: Any) -> None:
    h.adam_step(params, grads, *state[:2], step=step, max_exp_avg_sqs=state[2] if amsgrad else None, **options)


def adamw(h: Any, params: Any, grads: Any, state: list[Any], step: int, amsgrad: bool = False, **options: Any) -> None:
    h.adamw_step(params, grads, *state[:2], step=step, max_exp_avg_sqs=state[2] if amsgrad else None, **options)


def adagrad(h: Any, params: Any, grads: Any, state: list[Any], step: int, **options: Any) -> None:
    h.adagrad_step(params, grads, state[0], step=step, **options)


def rmsprop(h: Any, params: Any, grads: Any, state: list[Any], step: int, centered: bool = False, **options: Any) -> None:
    h.rmsprop_step(params, grads, state[0], state[1] if centered else None, state[2] if options.get("momentum") else None, **options)


TORCH = [
    ("SGD", sgd, {}), ("SGD", sgd, {"weight_decay": 0.1, "maximize": True}),
    ("SGD", sgd, {"momentum": 0.9, "dampening": 0.3}), ("SGD", sgd, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    ("Adam", adam, {}), ("Adam", adam, {"weight_decay": 0.1, "amsgrad": True, "betas": (0.8, 0.99)}), ("Adam", adam, {"maximize": True}),
    ("AdamW", adamw, {}), ("AdamW", adamw, {"amsgrad": True, "eps": 1e-3, "weight_decay": 0.2}),
    ("Adagrad", adagrad, {}), ("Adagrad", adagrad, {"lr_decay": 0.1, "weight_decay": 0.1}),
    ("RMSprop", rmsprop, {}), ("RMSprop", rmsprop, {"centered": True, "momentum": 0.9, "weight_decay": 0.1}),
]


@pytest.mark.parametrize(("name", "run", "options"), TORCH, ids=lambda v: str(v) if isinstance(v, (str, dict)) else "")
def test_three_steps_are_those_of_torch(h: oxidnn.DnnHandle, name: str, run: Any, options: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    mine, state = normal(), [zeros() for _ in range(3)]
    theirs = [torch.nn.Parameter(torch.tensor(a, dtype=torch.float64)) for a in mine]
    optimiser = getattr(torch.optim, name)(theirs, lr=0.1, foreach=False, **options)
    for step in range(1, 4):
        grads = normal(step)
        for p, g in zip(theirs, grads, strict=True):
            p.grad = torch.tensor(g, dtype=torch.float64)
        optimiser.step()
        run(h, mine, grads, state, step, lr=0.1, **options)
        for got, want in zip(mine, theirs, strict=True):
            np.testing.assert_allclose(got, want.detach().numpy(), rtol=2e-5, atol=2e-5)


def test_lamb_and_lion_are_those_of_their_papers(h: oxidnn.DnnHandle) -> None:
    lamb, lion, grads = normal(), normal(), normal(5)
    m, v, mean = normal(6), [np.abs(a) for a in normal(7)], normal(8)
    want_lamb, want_lion = [], []
    for p, g, a, b, c in zip(lamb, grads, m, v, mean, strict=True):
        p, g, a, b, c = (x.astype(np.float64) for x in (p, g, a, b, c))
        a, b = 0.9 * a + 0.1 * g, 0.999 * b + 0.001 * g * g
        r = (a / (1 - 0.9**3)) / (np.sqrt(b / (1 - 0.999**3)) + 1e-6) + 0.05 * p
        sizes = np.linalg.norm(p.ravel()), np.linalg.norm(r.ravel())
        want_lamb.append(p - 0.01 * (sizes[0] / sizes[1] if min(sizes) > 0 else 1.0) * r)
        want_lion.append(p * (1 - 0.01 * 0.2) - 0.01 * np.sign(0.9 * c + 0.1 * g))
    h.lamb_step(lamb, grads, m, v, step=3, lr=0.01, weight_decay=0.05)
    h.lion_step(lion, grads, mean, lr=0.01, weight_decay=0.2)
    for got, want in zip([*lamb, *lion], [*want_lamb, *want_lion], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_step_and_rate_in_memory_say_the_same_as_numbers(h: oxidnn.DnnHandle) -> None:
    for run, lists in ((h.adam_step, 2), (h.lamb_step, 2), (h.adagrad_step, 1)):
        more = {"lr_decay": 0.1} if lists == 1 else {}
        a, b = normal(), normal()
        run(a, normal(1), *(zeros() for _ in range(lists)), step=7, lr=0.1, **more)
        run(b, normal(1), *(zeros() for _ in range(lists)), step=np.float32([7.0]), lr=np.array(0.1, np.float32), **more)
        for got, want in zip(a, b, strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_masters_keep_what_half_precision_loses(h: oxidnn.DnnHandle) -> None:
    masters = [np.ones(s, np.float32) for s in SHAPES]
    params = [np.zeros(s, ml_dtypes.bfloat16) for s in SHAPES]
    grads = [np.full(s, 64.0, np.float16) for s in SHAPES]
    for _ in range(3):
        h.sgd_step(params, grads, lr=1e-3, masters=masters, grad_scale=np.float32([64.0]))
    for p, m in zip(params, masters, strict=True):
        np.testing.assert_allclose(m, 1 - 3e-3, rtol=1e-6)
        np.testing.assert_array_equal(p, m.astype(ml_dtypes.bfloat16))


def test_an_overflow_leaves_everything_as_it_was(h: oxidnn.DnnHandle) -> None:
    grads = normal(3)
    grads[2][1029] = np.inf
    found = h.unscale_grads(grads, np.float32([0.5]))
    assert found.shape == () and found == 1
    for run, lists in ((h.adam_step, 2), (h.lamb_step, 2), (h.lion_step, 1), (h.rmsprop_step, 1)):
        params, state = normal(), [[np.abs(a) for a in normal(4)] for _ in range(lists)]
        kept = copies(params), [copies(s) for s in state]
        run(params, grads, *state, found_inf=found, **({"step": 2} if lists == 2 else {}))
        for got, want in zip([*params, *sum(state, [])], [*kept[0], *sum(kept[1], [])], strict=True):
            np.testing.assert_array_equal(got, want)


def test_unscaling_multiplies_and_remembers(h: oxidnn.DnnHandle) -> None:
    grads, before = normal(), normal()
    found = np.zeros((), np.float32)
    assert h.unscale_grads(grads, np.float32([0.25]), found) is None and found == 0
    for got, want in zip(grads, before, strict=True):
        np.testing.assert_array_equal(got, want * np.float32(0.25))
    grads[0][4] = np.nan
    h.unscale_grads(grads, 1.0, found)
    assert found == 1
    grads[0][4] = 0
    h.unscale_grads(grads, np.float32([1.0]), found)
    assert found == 1


@pytest.mark.parametrize("kind", [1.0, 2.0, 3.0, math.inf])
def test_clipping_is_that_of_torch(h: oxidnn.DnnHandle, kind: float) -> None:
    torch = pytest.importorskip("torch")
    for most in (0.5, 1e6):
        grads = [g for g in normal(2) if g.size]  # of nothing torch knows no largest
        params = [torch.zeros(g.shape, requires_grad=True) for g in grads]
        for p, g in zip(params, grads, strict=True):
            p.grad = torch.tensor(g)
        want = torch.nn.utils.clip_grad_norm_(params, most, kind, foreach=False)
        np.testing.assert_allclose(h.grad_norm(grads, kind), want.numpy(), rtol=1e-5)
        np.testing.assert_allclose(h.clip_grad_norm(grads, most, kind), want.numpy(), rtol=1e-5)
        for g, p in zip(grads, params, strict=True):
            np.testing.assert_allclose(g, p.grad.numpy(), rtol=1e-5)


def test_norms_of_nothing_of_infinities_and_of_nan(h: oxidnn.DnnHandle) -> None:
    assert h.grad_norm([np.zeros((0, 4), np.float32)]) == 0
    for kind in (1.0, 2.0, math.inf):
        assert np.isposinf(h.grad_norm([np.float32([1, -np.inf])], kind))
        assert np.isnan(h.grad_norm([np.float32([1, 2]), np.float32([np.nan])], kind))
    assert h.grad_norm([np.full(70000, 1.0, np.float16)], 1.0) == 70000  # past the largest f16
    assert np.isinf(h.clip_grad_norm(grads := [np.float32([np.inf, 2])], 1.0)) and np.isnan(grads[0][0]) and grads[0][1] == 0


def test_layouts_that_differ_within_a_tensor(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(1)
    wide = rng.standard_normal((6, 14)).astype(np.float32)
    param, grad, mean = wide[:, :7], rng.standard_normal((7, 6)).astype(np.float32).T, np.zeros((6, 7), np.float32)
    want, untouched = param - 0.5 * (0.9 * mean + grad), wide[:, 7:].copy()
    h.sgd_step([param], [grad], [mean], lr=0.5, momentum=0.9)
    np.testing.assert_allclose(param, want, rtol=1e-6)
    np.testing.assert_allclose(mean, grad, rtol=1e-6)
    np.testing.assert_array_equal(wide[:, 7:], untouched)


def test_more_tensors_than_a_table_holds(h: oxidnn.DnnHandle) -> None:
    params = [np.full(i % 3 + 1, float(i), np.float32) for i in range(900)]
    grads = [np.ones(i % 3 + 1, np.float32) for i in range(900)]
    h.sgd_step(params, grads, [np.zeros_like(g) for g in grads], lr=1.0, momentum=0.5)
    assert all((p == i - 1).all() for i, p in enumerate(params))
    np.testing.assert_allclose(h.grad_norm(grads), math.sqrt(sum(g.size for g in grads)), rtol=1e-6)


def test_any_expression_over_lists(h: oxidnn.DnnHandle) -> None:
    a, b, out = normal(1), normal(2), zeros()
    h.foreach("a + scalar(s) * b, a * limit", {"a": a, "b": b}, (a, out), shared={"limit": np.float32([3.0])}, s=0.5)
    for x, y, z, w in zip(a, out, normal(1), normal(2), strict=True):
        np.testing.assert_allclose(x, z + 0.5 * w, rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(y, z * 3, rtol=1e-6)


def test_a_schedule_makes_no_new_plan(h: oxidnn.DnnHandle) -> None:
    params, state = normal(), [zeros(), zeros()]
    for step in range(1, 5):
        h.adam_step(params, normal(step), *state, step=step, lr=0.1 / step, weight_decay=0.01 * step)
    assert len(h._session.kept_lists) == 1 and all(len(ways) == 1 for ways in h._session.kept_lists.values())


def test_what_is_refused_is_named_and_nothing_is_written(h: oxidnn.DnnHandle) -> None:
    params, grads, state = normal(), normal(1), [zeros(), zeros()]
    frozen = [a.copy() for a in params]
    for a in frozen:
        a.flags.writeable = False
    whole = np.zeros(10, np.float32)

    def step(p: Any = None, g: Any = None, **options: Any) -> None:
        h.adam_step(params if p is None else p, grads if g is None else g, *state, **({"step": 1} | options))

    wrong: list[tuple[str, Any]] = [
        ("takes lists", lambda: h.plan("adam_step", params)), ("takes lists", lambda: h.explain("foreach", params)),
        ("grads is 4 arrays", lambda: step(g=grads[:4])), ("params is 0 arrays", lambda: step(p=[])),
        ("params is ndarray", lambda: step(p=params[0])), ("shape of grad_1", lambda: step(g=[grads[0], grads[0], *grads[2:]])),
        ("grad_2: .*NoneType", lambda: step(g=[*grads[:2], None, *grads[3:]])), ("type of grad_0", lambda: step(
            g=[grads[0].astype(np.int32), *grads[1:]])), ("step is 0", lambda: step(step=0)), ("lr is 'fast'", lambda: step(lr="fast")),
        ("betas is", lambda: step(betas=0.9)), (r"betas\[1\] is 1", lambda: step(betas=(0.9, 1.0))), ("lr is nan", lambda: step(lr=np.nan)),
        ("shape of found_inf", lambda: step(found_inf=np.zeros(2, np.float32))), ("read-only", lambda: step(p=frozen)),
        ("overlaps", lambda: step(g=params)), ("overlaps", lambda: h.sgd_step([whole[:6], whole[5:]], [whole[:6].copy(), whole[5:].copy()],
                                                                             lr=1.0)),
        ("momentum_buffers is missing", lambda: h.sgd_step(params, grads, lr=0.1, momentum=0.9)),
        ("nesterov", lambda: h.sgd_step(params, grads, lr=0.1, nesterov=True)), ("norm_type is 0", lambda: h.grad_norm(grads, 0)),
        ("type of exp_avg_0", lambda: h.lamb_step(params, grads, [s.astype(np.float16) for s in state[0]], state[1], step=1)),
        ("step is 3", lambda: h.adagrad_step(params, grads, state[0], step=3, lr=np.float32([0.1]), lr_decay=0.1)),
        ("inv_scale is 'x'", lambda: h.unscale_grads(grads, "x")), ("inv_scale is inf", lambda: h.unscale_grads(grads, np.inf)),
        ("max_norm is None", lambda: h.clip_grad_norm(grads, None)), ("step is None", lambda: step(step=None)),
        ("out is 1 lists", lambda: h.foreach("a, a * 2", {"a": params}, (params,))),
        ("scalars", lambda: h.foreach("a * scalar(s)", {"a": params}, params)),
    ]
    for message, call in wrong:
        with pytest.raises(InvalidArgument, match=message):
            call()
    for got, want in zip([*params, *grads, *state[0]], [*normal(), *normal(1), *zeros()], strict=True):
        np.testing.assert_array_equal(got, want)
    grads[1] = grads[0].reshape(5)[:1] * np.ones((7, 9), np.float32)
    shared = [np.ones(5, np.float32)] * 2
    h.sgd_step([params[0], params[0].copy()], shared, lr=0.1)  # what is only read may be one array twice


def test_parameters_of_torch_are_stepped_in_place_and_recognised(h: oxidnn.DnnHandle, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    mine = [torch.nn.Parameter(torch.tensor(a)) for a in normal()]
    theirs = [torch.nn.Parameter(torch.tensor(a)) for a in normal()]
    optimiser = torch.optim.Adam(theirs, lr=0.1, foreach=False)
    state = [[torch.zeros(s) for s in SHAPES] for _ in range(2)]
    prepared = []
    made = list_calls._prepare
    monkeypatch.setattr(list_calls, "_prepare", lambda *arguments: prepared.append(0) or made(*arguments))
    for step in range(1, 4):
        grads = [torch.tensor(g) for g in normal(step)]  # new arrays at new addresses every time
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g
        optimiser.step()
        h.adam_step(mine, grads, *state, step=step, lr=0.1)
    assert len(prepared) == 1
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(InvalidArgument, match="shape of grad_0"):
        h.adam_step(mine, [grads[0][:4], *grads[1:]], *state, step=4)
    norm = h.grad_norm(grads)
    assert isinstance(norm, torch.Tensor) and norm.shape == () and norm.dtype == torch.float32


def test_parameters_may_be_slices_of_one_array(h: oxidnn.DnnHandle) -> None:
    whole = np.ones((6, 8), np.float32)
    parts = [whole[:, :3], whole[:, 3:7]]
    h.sgd_step(parts, [np.full(p.shape, 2.0, np.float32) for p in parts], lr=0.25)
    np.testing.assert_array_equal(whole[:, :7], 0.5)
    np.testing.assert_array_equal(whole[:, 7], 1)
    with pytest.raises(InvalidArgument, match="overlaps"):
        h.sgd_step([whole[:, :3], whole[:, 2:7]], [np.ones((6, 3), np.float32), np.ones((6, 5), np.float32)], lr=0.25)
