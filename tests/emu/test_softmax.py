"""Softmax with masks, scales and diagonals, Gumbel softmax and hardmax: PyTorch and its autograd, differences, special values, draws."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem

NAN, INF = np.nan, np.inf
SHAPE = (2, 3, 5, 7)


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def masks(rng: np.random.Generator) -> dict[str, np.ndarray | None]:
    kept = rng.random((2, 1, 5, 7)) < 0.7
    kept[..., 0] = True  # no row is empty: PyTorch's would be NaN
    return {"none": None, "bool": kept, "columns": kept[0, 0, 0], "rows": np.ones((5, 1), bool), "added": rng.standard_normal((3, 1, 7)),
            "infinite": np.where(kept, 0.0, -INF)}


def logits(torch: Any, x: Any, mask: Any, scale: float, diagonal: int | None) -> Any:
    z = x * scale
    if mask is not None:
        z = z.masked_fill(~torch.tensor(mask), -INF) if mask.dtype == bool else z + torch.tensor(mask)
    if diagonal is not None:
        z = z.masked_fill(~torch.ones(x.shape[-2:], dtype=torch.bool).tril(diagonal), -INF)
    return z


@pytest.mark.parametrize("name", ["none", "bool", "columns", "rows", "added", "infinite"])
@pytest.mark.parametrize(("scale", "diagonal", "log"), [(1.0, None, False), (0.3, None, True), (-2.0, 0, False), (1.0, 2, True)])
def test_values_and_gradients_are_those_of_torch(h: oxidnn.DnnHandle, name: str, scale: float, diagonal: int | None, log: bool) -> None:
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    mask = masks(rng)[name]
    x = torch.tensor(rng.standard_normal(SHAPE), requires_grad=True)
    z = logits(torch, x, mask, scale, diagonal)
    want = z.log_softmax(-1) if log else z.softmax(-1)
    y = h.softmax(x.detach().numpy(), mask=mask, scale=scale, diagonal=diagonal, log=log)
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-11, atol=1e-300)
    upstream = np.where(np.isinf(y), 0.0, rng.standard_normal(SHAPE))
    (want * torch.tensor(upstream)).nan_to_num(0.0).sum().backward()
    dx = h.softmax_backward(upstream, y, scale=scale, log=log, masked=True)
    gradient = x.grad.nan_to_num(0.0).numpy() if log else x.grad.numpy()
    kept = np.isfinite(np.asarray(y)) if log else np.ones(SHAPE, bool)
    np.testing.assert_allclose(np.where(kept, dx, 0.0), np.where(kept, gradient, 0.0), rtol=1e-9, atol=1e-12)
    assert (np.asarray(dx)[~kept] == 0).all()


@pytest.mark.parametrize("log", [False, True])
def test_gradients_by_finite_differences(h: oxidnn.DnnHandle, log: bool) -> None:
    """Of x, and of an added mask: dx at scale 1, summed over what broadcasts."""
    rng, step = np.random.default_rng(1), 1e-6
    x, mask, upstream = rng.standard_normal((3, 6)), rng.standard_normal((1, 6)), rng.standard_normal((3, 6))

    def loss(x: np.ndarray, mask: np.ndarray) -> float:
        y = np.asarray(h.softmax(x, mask=mask, scale=0.7, diagonal=4, log=log))
        return float((np.where(np.isfinite(y), y, 0.0) * upstream).sum())

    y = h.softmax(x, mask=mask, scale=0.7, diagonal=4, log=log)
    dx = np.asarray(h.softmax_backward(upstream, y, scale=0.7, log=log, masked=True))
    d_mask = np.asarray(h.softmax_backward(upstream, y, log=log, masked=True)).sum(0, keepdims=True)
    for values, gradient, other in ((x, dx, lambda v: (v, mask)), (mask, d_mask, lambda v: (x, v))):
        for at in np.ndindex(values.shape):
            up, down = values.copy(), values.copy()
            up[at] += step
            down[at] -= step
            assert (loss(*other(up)) - loss(*other(down))) / (2 * step) == pytest.approx(gradient[at], rel=1e-5, abs=1e-8)


@pytest.mark.parametrize("kind", ["f32", "f16", "bf16", "f64"])
@pytest.mark.parametrize("columns", [7, 300, 5000])
def test_rows_without_an_element_give_zeros(kind: str, columns: int) -> None:
    """By a mask of bool, an added one, a diagonal; beside whole rows. Their logarithms are -inf, their gradients 0."""
    h = oxidnn.DnnHandle("emu:sm_80")
    x = h.array(np.random.default_rng(0).standard_normal((3, columns)), kind)
    kept = np.ones((3, 1), bool)
    kept[1] = False
    for given in ({"mask": kept}, {"mask": np.where(kept, 0, -INF).astype(np.float32)}, {"diagonal": -2}):
        empty = [0, 1] if "diagonal" in given else [1]
        given = {k: h.array(v) if isinstance(v, np.ndarray) else v for k, v in given.items()}
        y = h.softmax(x, **given)
        values = y.numpy().astype(np.float64)
        assert (values[empty] == 0).all()
        rows = [i for i in range(3) if i not in empty]
        np.testing.assert_allclose(values[rows].sum(1), 1, rtol=2e-2 if kind in ("f16", "bf16") else 1e-5)
        assert (h.softmax_backward(x, y).numpy().astype(np.float64)[empty] == 0).all()
        z = h.softmax(x, log=True, **given)
        assert (z.numpy().astype(np.float64)[empty] == -INF).all()
        assert (h.softmax_backward(x, z, log=True, masked=True).numpy().astype(np.float64)[empty] == 0).all()


def test_what_a_mask_of_bool_drops_may_hold_anything(h: oxidnn.DnnHandle) -> None:
    x = np.array([[NAN, 0, 0], [INF, 1, 1], [0, NAN, 0], [-INF, 0, 0]], np.float32)
    kept = np.array([[False, True, True]] * 2 + [[True, True, True]] * 2)
    np.testing.assert_array_equal(h.softmax(x, mask=kept), [[0, 0.5, 0.5], [0, 0.5, 0.5], [NAN] * 3, [0, 0.5, 0.5]])
    np.testing.assert_array_equal(np.asarray(h.softmax(x[:2], mask=kept[:2], log=True))[:, 0], [-INF, -INF])


@pytest.mark.parametrize("value", [1.0, 60000.0])
def test_scores_of_half_precision_are_scaled_before_they_overflow(value: float) -> None:
    """3 * 60000 is no f16, and exp of it no f32."""
    h = oxidnn.DnnHandle("emu:sm_80")
    x = h.array(np.array([[value, value, -value]]), "f16")
    y = h.softmax(x, scale=3.0).numpy().astype(np.float64)
    np.testing.assert_allclose(y, [[0.5, 0.5, 0.0]] if value > 1 else [np.exp([3, 3, -3]) / np.exp([3, 3, -3]).sum()], rtol=2e-3)


def test_softmin_is_that_of_torch(h: oxidnn.DnnHandle) -> None:
    torch = pytest.importorskip("torch")
    x = torch.tensor(np.random.default_rng(0).standard_normal((4, 9)), requires_grad=True)
    want = torch.nn.functional.softmin(x, -1)
    y = h.softmin(x.detach().numpy())
    np.testing.assert_allclose(y, want.detach().numpy(), rtol=1e-12)
    want.square().sum().backward()
    np.testing.assert_allclose(h.softmax_backward(2 * np.asarray(y), y, scale=-1.0), x.grad.numpy(), rtol=1e-9, atol=1e-14)


def test_temperature_sharpens(h: oxidnn.DnnHandle) -> None:
    x = np.array([[1.0, 2.0, 3.0]])
    np.testing.assert_allclose(h.softmax(x, scale=1 / 0.1), [np.exp([-20, -10, 0]) / np.exp([-20, -10, 0]).sum()], rtol=1e-12)


@pytest.mark.parametrize("line", [
    "softmax x=bf16[2,3,16,64]nchw mask=bool[16,64]nchw diagonal=40 scale=0.5", "softmax x=f32[2,9000]nchw mask=f32[9000]nchw scale=0.1",
    "softmax x=f16[3,20000]nchw mask=bool[3,20000]nchw log=True", "softmax x=f64[2,3,1025]nchw diagonal=1000",
    "gumbel_softmax x=f32[3,9000]nchw hard=True", "gumbel_softmax x=bf16[3,20000]nchw mask=bool[20000]nchw",
    "softmax x=f32[3,5,11](-55,11,1) diagonal=2", "softmax x=f32[40,9](0,1) mask=bool[9](0)", "hardmax x=f16[3,20001]nchw",
])
def test_every_config(line: str) -> None:
    problem = parse_case(line)
    for arch in ("sm_80", "sm_90a"):
        backend = EmulatedBackend(arch, checkers="all")
        for engine in ENGINES[problem.op]:
            for config in engine.configs(problem, backend.info):
                run_problem(backend, problem, engine, config)


# ---- Gumbel softmax and hardmax ------------------------------------------------------------------------------------------------------

def test_draws_depend_on_nothing_but_seed_offset_and_place() -> None:
    """In every config, architecture and layout the same element is the largest; another offset draws other ones."""
    shape, found = (5, 96), []
    for strides in ("nchw", "(1,5)", "(-100,1)"):
        problem = parse_case(f"gumbel_softmax x=f32[5,96]{strides} hard=True")
        for arch in ("sm_80", "sm_90a"):
            backend = EmulatedBackend(arch)
            for config in (engine := ENGINES["gumbel_softmax"][0]).configs(problem, backend.info):
                x = np.zeros(shape, np.float32)
                got = execute(backend, problem, engine, config, {"x": x}, {"seed": 7, "offset": 3})
                found.append(got["y"].argmax(-1).tolist())
    assert len(found) >= 6 and all(f == found[0] for f in found)
    h = oxidnn.DnnHandle("emu:sm_80")
    for kind in ("f64", "bf16", "f16"):
        y, _ = h.gumbel_softmax(h.array(np.zeros(shape), kind), hard=True, seed=7, offset=3)
        assert y.numpy().astype(np.float32).argmax(-1).tolist() == found[0]
    other, _ = h.gumbel_softmax(np.zeros(shape, np.float32), hard=True, seed=7, offset=4)
    assert np.asarray(other).argmax(-1).tolist() != found[0]


def test_noise_is_that_of_the_uniform_numbers_of_the_same_draw(h: oxidnn.DnnHandle) -> None:
    x = np.random.default_rng(0).standard_normal((3, 40))
    u = np.maximum(np.asarray(h.random((3, 40), dtype="f64", seed=11, offset=2).numpy()), 2.0**-25)
    z = (x - np.log(-np.log(u))) / 0.5
    want = np.exp(z - z.max(-1, keepdims=True))
    np.testing.assert_allclose(h.gumbel_softmax(x, temperature=0.5, seed=11, offset=2), want / want.sum(-1, keepdims=True), rtol=1e-10)


def test_classes_are_drawn_with_the_chances_of_softmax(h: oxidnn.DnnHandle) -> None:
    """6000 draws of four classes: counts within four deviations (Gumbel-max)."""
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    y, soft = h.gumbel_softmax(np.broadcast_to(logits.astype(np.float32), (6000, 4)).copy(), hard=True, seed=5)
    y = np.asarray(y)
    assert set(np.unique(y)) == {0.0, 1.0} and (y.sum(1) == 1).all()
    np.testing.assert_array_equal(y.argmax(1), np.asarray(soft).argmax(1))
    chances = np.exp(logits)
    assert (np.abs(y.mean(0) - chances) < 4 * np.sqrt(chances * (1 - chances) / 6000)).all()


def test_gumbel_gradients_are_those_of_autograd(h: oxidnn.DnnHandle) -> None:
    """Straight through: of y = hard - soft.detach() + soft, for the noise that was drawn."""
    torch = pytest.importorskip("torch")
    rng, tau = np.random.default_rng(0), 0.7
    x = torch.tensor(rng.standard_normal((4, 10)), requires_grad=True)
    u = np.maximum(h.random((4, 10), dtype="f64", seed=9).numpy(), 2.0**-25)
    soft = ((x - torch.tensor(np.log(-np.log(u)))) / tau).softmax(-1)
    hard = torch.nn.functional.one_hot(soft.argmax(-1), 10).to(soft.dtype)
    want = hard - soft.detach() + soft
    y, kept = h.gumbel_softmax(x.detach().numpy(), temperature=tau, hard=True, seed=9)
    np.testing.assert_allclose(y, want.detach().numpy(), atol=1e-12)
    np.testing.assert_allclose(kept, soft.detach().numpy(), rtol=1e-10)
    upstream = rng.standard_normal((4, 10))
    want.backward(torch.tensor(upstream))
    np.testing.assert_allclose(h.softmax_backward(upstream, kept, scale=1 / tau), x.grad.numpy(), rtol=1e-8, atol=1e-12)


def test_hardmax_takes_the_first_of_equals_and_keeps_nan(h: oxidnn.DnnHandle) -> None:
    x = np.array([[1, 3, 3, 2], [NAN, 0, 1, 2], [-INF, -INF, 5, -INF], [-1, -1, -1, -1]], np.float32)
    np.testing.assert_array_equal(h.hardmax(x), [[0, 1, 0, 0], [NAN] * 4, [0, 0, 1, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(h.hardmax(x[:1].T, 0).T, [[0, 1, 0, 0]])


def test_masked_gumbel_rows(h: oxidnn.DnnHandle) -> None:
    kept = np.array([[True, False, True, False], [False] * 4])
    y, soft = h.gumbel_softmax(np.zeros((2, 4), np.float32), hard=True, mask=kept, seed=1)
    assert np.asarray(y)[0].sum() == 1 and (np.asarray(y)[0, ~kept[0]] == 0).all() and (np.asarray(soft)[0, ~kept[0]] == 0).all()
    assert (np.asarray(y)[1] == 0).all() and (np.asarray(soft)[1] == 0).all()


def test_refusals(h: oxidnn.DnnHandle) -> None:
    x = np.zeros((2, 3, 4), np.float32)
    for given, message in (({"mask": np.ones((2, 4), bool)}, "shape of mask"), ({"mask": np.ones((1, 2, 3, 4), bool)}, "shape of mask"),
                           ({"mask": np.ones(4, np.int32)}, "type of mask"), ({"scale": INF}, "scale is inf"), ({"scale": "x"}, "scale"),
                           ({"diagonal": 1.5}, "diagonal"), ({"diagonal": 0, "axis": 1}, "diagonal")):
        with pytest.raises(InvalidArgument, match=message):
            h.softmax(x, **given)
    with pytest.raises(InvalidArgument, match="diagonal"):
        h.softmax(x[0, 0], diagonal=0)
    for temperature in (0.0, -1.0, NAN, INF, 1e-40):
        with pytest.raises(InvalidArgument, match="temperature"):
            h.gumbel_softmax(x, temperature=temperature, seed=1)
    with pytest.raises(InvalidArgument, match="seed"):
        h.gumbel_softmax(x, seed=-1)


@pytest.mark.parametrize("kind", ["f64", "f32", "f16"])
@pytest.mark.parametrize("rows", [1, 2])
def test_rows_of_any_width_sum_to_one(kind: str, rows: int) -> None:
    h, rng = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(0)
    for width in (*range(1, 71, 1 if rows == 2 else 7), 513, 777, 999, 1025):
        x = rng.standard_normal((rows, width)) * 3
        y = h.softmax(h.array(x, kind)).numpy().astype(np.float64)
        z = h.array(x, kind).numpy().astype(np.float64)
        want = np.exp(z - z.max(-1, keepdims=True))
        want /= want.sum(-1, keepdims=True)
        np.testing.assert_allclose(y, want, rtol=1e-3 if kind == "f16" else 2e-6 if kind == "f32" else 1e-13, atol=1e-7)
        np.testing.assert_allclose(y.sum(-1), 1, rtol=3e-3 if kind == "f16" else 1e-5 if kind == "f32" else 1e-12)


@pytest.mark.parametrize("line", [
    "softmax x=f32[5,7,3](63,9,2) axis=1", "softmax x=f64[4,33](1,5) axis=0", "softmax x=f16[3,5,7](1,3,15) axis=1",
    "softmax x=bf16[2,21,5](315,15,3) axis=1 mask=bool[21,1](3,1)",
])
def test_other_axes_of_odd_strides(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    for config in ENGINES["softmax"][0].configs(problem, backend.info):
        run_problem(backend, problem, ENGINES["softmax"][0], config)


def test_in_place(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(0)
    x, kept = rng.standard_normal((4, 600)).astype(np.float32), rng.random(600) < 0.5
    want = np.asarray(h.softmax(x, mask=kept)).copy()
    y = x.copy()
    h.softmax(y, mask=kept, out=y)
    np.testing.assert_array_equal(y, want)
    dy = rng.standard_normal((4, 600)).astype(np.float32)
    gradient = np.asarray(h.softmax_backward(dy, y)).copy()
    h.softmax_backward(dy, y, out=dy)
    np.testing.assert_array_equal(dy, gradient)


def test_logarithms_of_sums_are_those_of_torch(h: oxidnn.DnnHandle) -> None:
    torch = pytest.importorskip("torch")
    x, kept = np.random.default_rng(0).standard_normal((3, 5, 40)), np.random.default_rng(1).random((5, 40)) < 0.6
    kept[2] = False
    y, lse = h.softmax(x, mask=kept, scale=0.5, return_lse=True)
    want = torch.tensor(np.where(kept, 0.5 * x, -INF)).logsumexp(-1).numpy()
    np.testing.assert_allclose(lse, want, rtol=1e-12)
    rest = np.asarray(lse)[..., None]
    np.testing.assert_allclose(np.exp(np.where(kept, 0.5 * x - np.where(np.isinf(rest), 0, rest), -INF)), y, rtol=1e-10)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_probabilities_of_eight_bits(arch: str) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    h = oxidnn.DnnHandle(f"emu:{arch}")
    x = h.array(np.random.default_rng(0).standard_normal((4, 96)) * 2, "f32")
    want = h.softmax(x).numpy()
    for kind, given in (("e4m3", ml_dtypes.float8_e4m3fn), ("e5m2", ml_dtypes.float8_e5m2)):
        np.testing.assert_array_equal(h.softmax(x, out_dtype=kind).numpy().view(np.uint8), want.astype(given).view(np.uint8))
    np.testing.assert_array_equal(h.softmax(x, out_dtype="bf16").numpy(), want.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("line", [
    "softmax x=bf16[3,8192] mask=bool[3,8192]", "softmax x=f32[2,2,4100] mask=bool[2,1,4100] diagonal=1",
    "softmax x=f16[2,20000] mask=bool[2,20000] scale=0.5", "softmax x=f64[2,4100] mask=bool[2,4100] log=True",
    "hardmax x=bf16[2,8192]",
])
def test_long_rows_by_every_config(line: str) -> None:
    """Where only a mask or a diagonal stands between x and the logits, those take its place in shared memory."""
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    engine = ENGINES[problem.op][0]
    for config in engine.configs(problem, backend.info):
        run_problem(backend, problem, engine, config)
