"""Mixtures of experts: published faults, empty and hot experts, gradients, parts of the experts, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.base import EngineConfig
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import compare, exact, execute
from oxidnn.testing.reference import REFERENCES

from .differences import central_differences

SIZES = [0] * 5 + [2] * 3 + [3]  # 5, 0, 3, 1


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def layer(x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any) -> np.ndarray:
    """y, token by token."""
    y, inter = np.zeros(x.shape), w_down.shape[2]
    for t, k in np.ndindex(*ids.shape):
        if 0 <= ids[t, k] < len(w_down):
            z = w_gate_up[ids[t, k]] @ x[t]
            y[t] += weights[t, k] * (w_down[ids[t, k]] @ (z[:inter] / (1 + np.exp(-z[:inter])) * z[inter:]))
    return y


def drawn(tokens: int, topk: int, experts: int, hidden: int, inter: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal((tokens, hidden)), rng.integers(0, experts, (tokens, topk)), rng.random((tokens, topk)),
            rng.standard_normal((experts, 2 * inter, hidden)) * 0.3, rng.standard_normal((experts, hidden, inter)) * 0.3)


def test_ties_go_to_the_lower_expert_and_weights_sum_to_one(h: oxidnn.DnnHandle) -> None:
    ids, weights, counts = (np.asarray(a) for a in h.moe_route(np.array([[2, 2, 1, 2]], np.float32), top_k=2))
    assert ids.tolist() == [[0, 1]] and weights.tolist() == [[0.5, 0.5]] and counts.tolist() == [1, 1, 0, 0]
    for logits in (np.zeros((1, 70)), np.full((1, 70), -np.inf), np.full((1, 70), np.nan)):
        assert np.asarray(h.moe_route(logits.astype(np.float32), top_k=5)[0]).tolist() == [[0, 1, 2, 3, 4]]
    assert np.asarray(h.moe_route(np.array([[np.nan, -np.inf, 1, -0.0, 0.0]], np.float32), top_k=5)[0]).tolist() == [[2, 3, 4, 1, 0]]


def test_uneven_groups_and_an_expert_without_tokens(h: oxidnn.DnnHandle) -> None:
    """Groups of 5, 0, 3 and 1 rows; with two experts a token both count."""
    x, _, weights, w_gate_up, w_down = drawn(9, 2, 4, 7, 5)
    ids = np.stack([np.array(SIZES), np.roll(SIZES, 2)], 1)
    for chosen, w in ((ids[:, :1], weights[:, :1]), (ids, weights)):
        np.testing.assert_allclose(h.moe(x, chosen, w, w_gate_up, w_down), layer(x, chosen, w, w_gate_up, w_down), rtol=1e-11, atol=1e-12)
    xs, order, inverse, counts = (np.asarray(a) for a in h.moe_permute(x, ids[:, :1], experts=4))
    assert counts.tolist() == [5, 0, 3, 1] and order.tolist() == list(range(9)) == inverse[:, 0].tolist() and (xs == x).all()


def test_one_expert_with_everything_and_none_at_all(h: oxidnn.DnnHandle) -> None:
    x, ids, weights, w_gate_up, w_down = drawn(9, 2, 4, 7, 5)
    hot = np.full_like(ids, 3)
    np.testing.assert_allclose(h.moe(x, hot, weights, w_gate_up, w_down), layer(x, hot, weights, w_gate_up, w_down), rtol=1e-11, atol=1e-12)
    gone = np.full_like(ids, -1)
    assert not np.asarray(h.moe(x, gone, weights, w_gate_up, w_down)).any()
    empty = h.moe_backward(x[:0], x[:0], ids[:0], weights[:0], w_gate_up, w_down)
    assert [np.asarray(a).shape[0] for a in empty] == [0, 0, 4, 4] and not any(np.asarray(a).any() for a in empty)
    assert np.asarray(h.moe_permute(x[:0], ids[:0], experts=4)[3]).tolist() == [0] * 4


@pytest.mark.parametrize("engine", ENGINES["moe"], ids=lambda engine: engine.id)
def test_what_a_token_does_not_meet_does_not_reach_it(engine: Any) -> None:
    """Infinite weights of other experts, a token of NaN: only who has to do with them sees them."""
    backend = EmulatedBackend("sm_90a", checkers="all")
    problem = parse_case("moe x=bf16[4,16] ids=s32[4,2] weights=f32[4,2] w_gate_up=bf16[3,16,16] w_down=bf16[3,16,8]")
    inputs = random_inputs(problem, np.random.default_rng(3))
    inputs["ids"] = np.array([[0, 1], [1, 2], [1, 0], [0, -1]], np.int32)
    plain = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], inputs)["y"]
    inputs["w_down"][2], inputs["x"][2] = np.inf, np.nan
    got = execute(backend, problem, engine, engine.configs(problem, backend.info)[0], inputs)["y"]
    assert (got[[0, 3]] == plain[[0, 3]]).all() and not np.isfinite(got[1].astype(np.float32)).any()
    assert np.isnan(got[2].astype(np.float32)).all()


_LAYER = "x=bf16[16,64] ids=s32[16,2] weights=f32[16,2]"
_CODES = "w_gate_up=u8[5,64,32] scale_gate_up=f32[5,64,1] w_down=u8[5,64,16] scale_down=f32[5,64,1] block=(1,64)"


@pytest.mark.parametrize(("line", "engine"), [
    pytest.param(line, engine, id=engine.id)
    for line in (f"moe {_LAYER} w_gate_up=bf16[5,64,64] w_down=bf16[5,64,32]", f"moe_quantized {_LAYER} {_CODES}")
    for engine in ENGINES[line.split()[0]]])
def test_every_config_with_experts_of_no_token(line: str, engine: Any) -> None:
    """Results of experts may lie further on than there are assignments."""
    backend, problem = EmulatedBackend("sm_90a", checkers="all"), parse_case(line)
    inputs = random_inputs(problem, np.random.default_rng(3))
    inputs["ids"] = np.random.default_rng(3).choice(np.array([0, 2, 4, -1], np.int32), (16, 2), p=(0.2, 0.35, 0.35, 0.1))
    want = REFERENCES[problem.op](problem, exact(problem, inputs), {})
    for config in engine.configs(problem, backend.info):
        got = execute(backend, problem, engine, config, inputs)
        compare(problem, got, want, f"{engine.id} {config.name}", is_coarse=engine.sums_coarsely)


@pytest.mark.parametrize(("tokens", "experts", "shares"), [
    pytest.param(30, 6, (0.7, 0.02, 0, 0.02, 0.16, 0.02, 0.08), id="one_sort"), pytest.param(1030, 2, (0.5, 0.45, 0.05), id="sorts")])
def test_tiles_that_bring_rows_of_others(tokens: int, experts: int, shares: tuple[float, ...]) -> None:
    """Sorted streams: an expert of several tiles, others whose tiles reach into many more, rows of no expert; more assignments than one CTA
    sorts."""
    engine = next(e for e in ENGINES["moe"] if "sorted" in e.id)
    backend = EmulatedBackend("sm_90a", checkers="all")
    hidden, inter = (136, 72) if tokens < 100 else (64, 8)
    problem = parse_case(f"moe x=bf16[{tokens},{hidden}] ids=s64[{tokens},2] weights=f32[{tokens},2] "
                         f"w_gate_up=bf16[{experts},{2 * inter},{hidden}] w_down=bf16[{experts},{hidden},{inter}]")
    inputs = random_inputs(problem, np.random.default_rng(5))
    inputs["ids"] = np.random.default_rng(5).choice(np.arange(-1, experts), (tokens, 2), p=(shares[-1], *shares[:-1]))
    want = REFERENCES[problem.op](problem, exact(problem, inputs), {})
    columns = 8 if tokens < 100 else 96
    for config in (EngineConfig.of(columns=columns, both=4), EngineConfig.of(columns=2 * columns, up=3, down=3)):
        compare(problem, execute(backend, problem, engine, config, inputs), want, config.name)


def test_gradients_by_differences(h: oxidnn.DnnHandle) -> None:
    x, ids, weights, w_gate_up, w_down = drawn(3, 2, 3, 3, 2, seed=1)
    ids[0, 1] = -1
    upstream = np.random.default_rng(2).standard_normal(x.shape)
    got = h.moe_backward(upstream, x, ids, weights, w_gate_up, w_down)
    for value, gradient in zip((x, weights, w_gate_up, w_down), got, strict=True):
        want = central_differences(lambda: float((np.asarray(h.moe(x, ids, weights, w_gate_up, w_down)) * upstream).sum()), value)
        np.testing.assert_allclose(gradient, want, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("scoring", "renormalize"), [("softmax", True), ("softmax", False), ("sigmoid", True), ("sigmoid", False)])
def test_routing_gradients_by_differences(h: oxidnn.DnnHandle, scoring: str, renormalize: bool) -> None:
    """Of weights and both losses, against float64 formulas of NumPy."""
    rng = np.random.default_rng(4)
    logits, dweights = rng.standard_normal((6, 5)), rng.standard_normal((6, 2))
    ids, _, counts = (np.asarray(a) for a in h.moe_route(logits.astype(np.float32), top_k=2, scoring=scoring))

    def scores() -> np.ndarray:
        return 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)

    def weighed() -> float:
        chosen = np.take_along_axis(scores(), ids, 1)
        return float((2.5 * (chosen / chosen.sum(-1, keepdims=True) if renormalize else chosen) * dweights).sum())

    def losses() -> np.ndarray:
        share = scores() / scores().sum(-1, keepdims=True)
        return np.array([5 * (counts / counts.sum() * share.mean(0)).sum(), (np.log(np.exp(logits).sum(-1)) ** 2).mean()])

    single = logits.astype(np.float32)
    np.testing.assert_allclose([float(np.asarray(a)) for a in h.moe_losses(single, counts, scoring=scoring)], losses(), rtol=1e-5)
    got = h.moe_route_backward(dweights.astype(np.float32), single, ids, scoring=scoring, renormalize=renormalize, scaling_factor=2.5)
    np.testing.assert_allclose(got, central_differences(weighed, logits), rtol=1e-3, atol=1e-5)
    upstream = [np.array(v, np.float32) for v in (0.7, -0.3)]
    got = h.moe_losses_backward(upstream[0], upstream[1], single, counts, scoring=scoring)
    np.testing.assert_allclose(got, central_differences(lambda: float(losses() @ np.array(upstream)), logits), rtol=1e-3, atol=1e-5)


def test_gradients_are_those_of_autograd(h: oxidnn.DnnHandle) -> None:
    torch = pytest.importorskip("torch")
    arrays = drawn(9, 2, 4, 8, 6, seed=5)
    ids = arrays[1]
    x, _, weights, w_gate_up, w_down = tensors = [torch.tensor(a, requires_grad=a.dtype.kind == "f") for a in arrays]
    y = torch.zeros(x.shape, dtype=torch.float64)
    for t, k in np.ndindex(*ids.shape):
        g, u = (w_gate_up[ids[t, k]] @ x[t]).chunk(2)
        y = y.index_add(0, torch.tensor([t]), (weights[t, k] * (w_down[ids[t, k]] @ (torch.nn.functional.silu(g) * u)))[None])
    upstream = torch.randn(x.shape, dtype=torch.float64)
    y.backward(upstream)
    got = h.moe_backward(upstream.numpy(), *arrays)
    for gradient, tensor in zip(got, [t for t in tensors if t.requires_grad], strict=True):
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), rtol=1e-10, atol=1e-12)


def test_parts_of_the_experts_add_up(h: oxidnn.DnnHandle) -> None:
    """Each device has all tokens and half of the experts; or half of the tokens came from each, sorted by expert."""
    x, ids, weights, w_gate_up, w_down = drawn(9, 2, 4, 7, 5, seed=6)
    want = layer(x, ids, weights, w_gate_up, w_down)
    parts = [np.asarray(h.moe(x, ids, weights, w_gate_up[e:e + 2], w_down[e:e + 2], first_expert=e)) for e in (0, 2)]
    np.testing.assert_allclose(sum(parts), want, rtol=1e-11, atol=1e-12)
    # Expert-parallel: each source permutes, rows of an owner's experts go there, come back, and are combined.
    y = np.zeros(x.shape)
    sources = [slice(0, 4), slice(4, 9)]
    sent = [[np.asarray(a) for a in h.moe_permute(x[s], ids[s], experts=4)] for s in sources]
    back = [np.zeros_like(p[0]) for p in sent]
    for owner in (0, 2):
        starts = [p[3][:owner].sum() for p in sent]
        counts = np.stack([p[3][owner:owner + 2] for p in sent])
        rows = np.concatenate([p[0][b:b + c.sum()] for p, b, c in zip(sent, starts, counts, strict=True)] + [np.full((3, 7), np.nan)])
        ys = np.asarray(h.moe_exchanged(rows, counts, w_gate_up[owner:owner + 2], w_down[owner:owner + 2]))
        assert not ys[-3:].any()
        at = 0
        for b, c, target in zip(starts, counts, back, strict=True):
            target[b:b + c.sum()] = ys[at:at + c.sum()]
            at += c.sum()
    for s, p, rows in zip(sources, sent, back, strict=True):
        y[s] = np.asarray(h.moe_unpermute(rows, p[2], weights[s]))
    np.testing.assert_allclose(y, want, rtol=1e-11, atol=1e-12)


def test_what_is_dropped_adds_nothing(h: oxidnn.DnnHandle) -> None:
    logits = np.tile(np.array([3, 2, 1, 0], np.float32), (9, 1))
    ids, weights, counts = (np.asarray(a) for a in h.moe_route(logits, top_k=2, capacity=4))
    assert counts.tolist() == [9, 9, 0, 0] and (ids[:4] == [0, 1]).all() and (ids[4:] == [-1, -2]).all() and not weights[4:].any()
    x, _, _, w_gate_up, w_down = drawn(9, 2, 4, 7, 5)
    y = np.asarray(h.moe(x, ids, weights.astype(np.float64), w_gate_up, w_down))
    assert y[:4].any() and not y[4:].any()
    assert np.asarray(h.moe_permute(x, ids, experts=4)[3]).tolist() == [4, 4, 0, 0]


@pytest.mark.parametrize("kind", [np.float64, np.float32, np.float16])
def test_rows_that_do_not_exist_add_nothing(h: oxidnn.DnnHandle, kind: Any) -> None:
    """inverse beyond the rows, on either side, is neither read nor written."""
    ys, dy = np.arange(1, 25, dtype=kind).reshape(6, 4), np.ones((3, 4), kind)
    inverse = np.array([[0, 5], [6, 1], [-7, 2**31 - 1]], np.int32)
    weights = np.full((3, 2), 2, np.float64 if kind is np.float64 else np.float32)
    plain, doubled = np.asarray(h.moe_unpermute(ys, inverse)), np.asarray(h.moe_unpermute(ys, inverse, weights))
    want = np.stack([ys[0] + ys[5], ys[1], np.zeros(4, kind)])
    assert (plain == want).all() and (doubled == 2 * want).all()
    dys = np.full_like(ys, 9)
    _, dweights = h.moe_unpermute_backward(dy, ys, inverse, weights, out=(dys, np.empty_like(weights)))
    assert (dys[[0, 5, 1]] == 2).all() and (dys[2:5] == 9).all()
    assert (np.asarray(dweights) == [[ys[0].sum(), ys[5].sum()], [0, ys[1].sum()], [0, 0]]).all()


def test_refusals(h: oxidnn.DnnHandle) -> None:
    x, ids, weights, w_gate_up, w_down = drawn(9, 2, 4, 7, 5)
    wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
        ("rows of ids", (x, ids[:3], weights, w_gate_up, w_down), {}),
        ("shape of weights", (x, ids, weights[:, :1], w_gate_up, w_down), {}),
        ("shape of w_gate_up", (x, ids, weights, w_gate_up[:, 1:], w_down), {}), ("type of ids", (x, x, weights, w_gate_up, w_down), {}),
        ("shape of w_down", (x, ids, weights, w_gate_up, w_down[1:]), {}), ("type of weights", (x, ids, ids, w_gate_up, w_down), {}),
        ("activation", (x, ids, weights, w_gate_up, w_down), {"activation": "sine"})]
    for what, given, more in wrong:
        with pytest.raises(InvalidArgument, match=what):
            h.moe(*given, **more)
    logits = np.zeros((3, 6), np.float32)
    for what, more in (("top_k", {"top_k": 7}), ("groups", {"top_k": 1, "groups": 4}),
                       ("top_k", {"top_k": 3, "groups": 3, "top_groups": 1}),
                       ("scoring", {"top_k": 1, "scoring": "max"}), ("capacity", {"top_k": 1, "capacity": -1})):
        with pytest.raises(InvalidArgument, match=what):
            h.moe_route(logits, **more)
    with pytest.raises(InvalidArgument, match="top_k.*at most 2: groups = 3 .*top_groups = 1"):
        h.moe_route(logits, top_k=3, groups=3, top_groups=1)
    h.moe_route(logits, top_k=1, capacity=1)  # what a key holds does not decide
    for name, value in (("top_k", True), ("groups", True), ("top_groups", True), ("capacity", True), ("scaling_factor", True),
                        ("renormalize", 1)):
        with pytest.raises(InvalidArgument, match=name):
            h.moe_route(logits, **({"top_k": 1, "capacity": 1} | {name: value}))
    with pytest.raises(InvalidArgument, match="renormalize"):
        h.moe_route_backward(np.zeros((3, 1), np.float32), logits, np.zeros((3, 1), np.int32), renormalize=1)
    with pytest.raises(InvalidArgument, match="type of x.*e4m3.*s64"):
        h.moe_permute(x > 0, ids, experts=4)
    with pytest.raises(InvalidArgument, match="shape of counts"):
        h.moe_exchanged(x, np.zeros((2, 3), np.int32), w_gate_up, w_down)
    with pytest.raises(InvalidArgument, match=r"sources \(rows of counts\)"):
        h.moe_exchanged(x, np.zeros((0, 4), np.int32), w_gate_up, w_down)
