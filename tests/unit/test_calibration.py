"""Calibration: GPTQ against the paper's recursion, errors below rounding to nearest, observers and masks against NumPy, what is refused."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.calibration import (
    InputStatistics,
    MinMaxObserver,
    MovingAverageObserver,
    PercentileObserver,
    awq,
    dequantized,
    gptq,
    magnitude_mask,
    mixed_kinds,
    n_m_mask,
    output_error,
    round_to_nearest,
    sensitivity,
    smooth,
)
from oxidnn.errors import InvalidArgument

BF16 = ml_dtypes.bfloat16
EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "quantize_layer.py"


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def problem(n: int = 24, k: int = 64, rows: int = 160, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(w, x): inputs are mixtures of fewer sources, of very different sizes, one of them an outlier, as activations are."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((k, k)) * np.exp(rng.standard_normal(k))[:, None]
    x = rng.standard_normal((rows, k)) @ mix / 8
    x[:, k // 3] *= 30
    return rng.standard_normal((n, k)).astype(np.float32), x.astype(np.float32)


@pytest.fixture(scope="module")
def wx() -> tuple[np.ndarray, np.ndarray]:
    return problem()


@pytest.fixture(scope="module")
def seen(h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray]) -> InputStatistics:
    return InputStatistics(h).update(wx[1][:100]).update(wx[1][100:])


def relative(w: np.ndarray, found: np.ndarray, x: np.ndarray) -> float:
    """The change of the outputs, in f64."""
    wide = x.astype(np.float64)
    return float(np.linalg.norm(wide @ (found - w.astype(np.float64)).T) / np.linalg.norm(wide @ w.T))


def numbers(layer: dict[str, Any]) -> np.ndarray:
    """The weights of a layer by what its operands mean, in f64, columns in its own order."""
    w = np.asarray(layer["w"])
    if w.dtype == np.uint8 and layer["kind"] in ("s4", "u4"):
        w = np.stack([w & 15, w >> 4], -1).reshape(len(w), -1).astype(np.int64)
        w = np.where(w > 7, w - 16, w) if layer["kind"] == "s4" else w
    groups = np.arange(w.shape[1]) // layer["group_size"]
    zero = 0 if layer["zero_point"] is None else np.asarray(layer["zero_point"], np.int64)[:, groups]
    return (w.astype(np.int64) - zero) * np.asarray(layer["scale"], np.float64)[:, groups]


# ---- GPTQ ------------------------------------------------------------------------------------------------------------------------


def by_the_paper(w: np.ndarray, hessian: np.ndarray, low: int, high: int, group: int, is_asymmetric: bool, damp: float,
                 act_order: bool) -> np.ndarray:
    """The recursion without blocks, in f64: a column is rounded, the others move by its error times a row of the inverse Hessian over its
    diagonal element, and the inverse loses the column by a step of elimination. The numbers (n, k), columns in the order taken."""
    order = np.argsort(-hessian.diagonal(), kind="stable") if act_order else np.arange(len(hessian))
    hessian, w = hessian[np.ix_(order, order)], w.astype(np.float64)[:, order]
    inverse = np.linalg.inv(hessian + damp * hessian.diagonal().mean() * np.eye(len(hessian)))
    found = np.zeros_like(w)
    for j in range(w.shape[1]):
        if j % group == 0:
            part = w[:, j : j + group]
            least, most = np.minimum(part.min(1), 0).astype(np.float32), np.maximum(part.max(1), 0).astype(np.float32)
            scale = (most - least) / np.float32(high - low) if is_asymmetric else np.maximum(-least, most) / np.float32(high)
            zero = np.rint(np.clip(low - least / scale, low, high)) if is_asymmetric else np.zeros(len(w))
        found[:, j] = (np.clip(np.rint(w[:, j] / scale) + zero, low, high) - zero) * scale.astype(np.float64)
        error = (w[:, j] - found[:, j]) / inverse[j, j]
        w[:, j:] -= error[:, None] * inverse[j, j:]
        inverse -= np.outer(inverse[:, j], inverse[j]) / inverse[j, j]
    return found


CASES = [
    {"kind": "s4"}, {"kind": "u4"}, {"kind": "s4", "asymmetric": True}, {"kind": "s8"}, {"kind": "s8", "asymmetric": True}, {"kind": "u8"},
    {"kind": "u4", "bits": 3}, {"kind": "s4", "bits": 2, "asymmetric": True}, {"kind": "s4", "bits": 3, "act_order": True},
    {"kind": "u4", "act_order": True}, {"kind": "s4", "group_size": None}, {"kind": "s4", "group_size": 24, "damp": 0.1},
]  # fmt: skip


@pytest.mark.parametrize("options", CASES, ids=lambda o: "-".join(f"{v}" for v in o.values()))
def test_gptq_is_the_papers_recursion(options: dict[str, Any], h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray],
                                      seen: InputStatistics) -> None:
    options = {"group_size": 16, "block": 12} | options  # blocks end within groups and at their ends
    bits, is_unsigned = options.get("bits", int(options["kind"][1:])), options["kind"][0] == "u"
    low, high = (0, 2**bits - 1) if is_unsigned else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    want = by_the_paper(wx[0], 2 * np.asarray(seen.gram, np.float64), low, high, options["group_size"] or 64,
                        options.get("asymmetric", is_unsigned), options.get("damp", 0.01), options.get("act_order", False))
    layer = gptq(h, wx[0], seen, **options)
    # The scales of a group may differ by a rounding to f32, codes by nothing.
    np.testing.assert_allclose(numbers(layer), want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", ["s4", "u4", "s8"])
def test_gptq_loses_less_than_rounding(kind: str, h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray], seen: InputStatistics) -> None:
    w, x = wx
    nearest = round_to_nearest(h, w, kind, group_size=16)
    layer, ordered = gptq(h, w, seen, kind, group_size=16), gptq(h, w, seen, kind, group_size=16, act_order=True)
    base = relative(w, numbers(nearest), x)
    for found in (layer, ordered):
        assert relative(w, np.asarray(dequantized(h, found)), x) < 0.4 * base
        assert output_error(h, w, found, seen) == pytest.approx(relative(w, np.asarray(dequantized(h, found)), x), rel=1e-3)
        y = h.quantized_linear(x, **found)
        np.testing.assert_allclose(y, x @ np.asarray(dequantized(h, found)).T, rtol=2e-5, atol=2e-4)
    # unseen inputs of the same distribution
    other = problem(rows=400)[1][160:]
    assert relative(w, np.asarray(dequantized(h, layer)), other) < 0.6 * relative(w, numbers(nearest), other)


def test_act_order_is_another_order_of_the_same_matrix(h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray]) -> None:
    w, x = wx
    layer = gptq(h, w, x, "u4", group_size=16, act_order=True)
    order = np.asarray(layer["permutation"])
    assert order.dtype == np.int32 and sorted(order) == list(range(w.shape[1])) and order[0] == w.shape[1] // 3
    back = np.empty_like(w)
    back[:, order] = numbers(layer)
    np.testing.assert_array_equal(dequantized(h, layer), back)
    np.testing.assert_allclose(h.quantized_linear(x, **layer), x @ back.T, rtol=2e-5, atol=2e-4)


def test_gptq_of_inputs_that_do_not_correlate_rounds_to_nearest(h: oxidnn.DnnHandle) -> None:
    w, _ = problem(5, 33)
    for kind in ("s4", "u4", "s8", "u8"):
        layer, nearest = (f(kind) for f in (lambda c: gptq(h, w, np.eye(33, dtype=np.float32), c, group_size=8),
                                            lambda c: round_to_nearest(h, w, c, group_size=8)))
        for name in ("w", "scale", "zero_point"):
            if nearest[name] is None:
                assert layer[name] is None
            else:
                assert layer[name].dtype == nearest[name].dtype
                np.testing.assert_array_equal(layer[name], nearest[name])
        assert dequantized(h, layer, 33).shape == w.shape
        assert output_error(h, w, layer, np.eye(33, dtype=np.float32)) == pytest.approx(
            np.linalg.norm(dequantized(h, layer, 33) - w) / np.linalg.norm(w), rel=1e-3)


def test_singular_hessians_and_dead_columns(h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray]) -> None:
    w, x = wx
    few = x[:8].copy()  # of rank 8 in 64 dimensions
    few[:, [3, 40]] = 0
    layer = gptq(h, w, few, group_size=16)
    assert relative(w, numbers(layer), few) < 0.4 * relative(w, numbers(round_to_nearest(h, w, group_size=16)), few)
    moved = w.copy()
    moved[:, 40] /= 2
    other = numbers(gptq(h, moved, few, group_size=16))
    scale = np.asarray(layer["scale"])[:, 40 // 16]
    assert (np.abs(numbers(layer)[:, 40] - w[:, 40]) <= 0.51 * scale).all() or (np.abs(w[:, 40]) > 7 * scale).any()
    np.testing.assert_array_equal(other[:, :32], numbers(layer)[:, :32])  # groups that do not hold it do not see it
    with pytest.raises(InvalidArgument, match="gptq: damp is 0.* more"):
        gptq(h, w, few, damp=0)
    dead = gptq(h, w, np.zeros((4, 64), np.float32), group_size=16)
    np.testing.assert_array_equal(dead["w"], round_to_nearest(h, w, group_size=16)["w"])
    rows = gptq(h, np.zeros_like(w), x, "u4", group_size=16)
    assert (numbers(rows) == 0).all() and (rows["scale"] == 1).all()


def test_block_changes_nothing(h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray]) -> None:
    w, x = wx
    first, *others = (gptq(h, w, x, group_size=32, block=block) for block in (128, 1, 7, 32))
    for other in others:
        np.testing.assert_array_equal(other["w"], first["w"])


# ---- AWQ and SmoothQuant ---------------------------------------------------------------------------------------------------------


def test_awq_is_never_worse_and_better_where_columns_stand_out(h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray],
                                                               seen: InputStatistics) -> None:
    w, x = wx
    for kind, group, steps in (("s4", 16, 20), ("u4", 64, 10), ("nf4", 64, 10)):
        found = awq(h, w, seen, kind, group_size=group, steps=steps)
        assert len(found.errors) == steps + 1 and min(found.errors) == found.errors[round(steps * found.alpha)]
        assert found.errors[0] == pytest.approx(output_error(h, w, round_to_nearest(h, w, kind, group_size=group), seen), rel=1e-5)
        of_layer = relative(w, np.asarray(dequantized(h, found.layer)) / found.input_scale, x)
        assert of_layer == pytest.approx(min(found.errors), rel=1e-3)
        assert of_layer < 0.7 * found.errors[0]
        assert output_error(h, w, found.layer, seen, found.input_scale) == pytest.approx(of_layer, rel=1e-3)
    y = h.quantized_linear(h.pointwise("x / s", x, found.input_scale), **found.layer)
    assert np.linalg.norm(y - x @ w.T) < 1.01 * of_layer * np.linalg.norm(x @ w.T)
    signs = np.random.default_rng(1).choice(np.array([-1, 1], np.float32), (40, 64))  # columns alike: every alpha is the same
    alike = awq(h, w, signs, group_size=16, steps=4)
    assert len(set(alike.errors)) == 1 and alike.alpha == 0 and (alike.input_scale == 1).all()


def test_scales_of_awq(h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray]) -> None:
    w, x = wx
    x = x.copy()
    x[:, 7] = 0
    found = awq(h, w, x, group_size=16, steps=8)
    mean = np.abs(x.astype(np.float64)).mean(0) ** found.alpha
    live = np.delete(mean, 7)
    want = mean / np.sqrt(live.max() * live.min())
    want[7] = 1
    np.testing.assert_allclose(found.input_scale, want, rtol=1e-5)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.8, 1.0])
def test_smoothing_keeps_the_product(alpha: float, h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray]) -> None:
    w, x = wx
    x = x.copy()
    x[:, 9] = 0
    several = [w, w[:5] * 3]
    (first, second), s = smooth(h, several, [x[:50], x[50:]], alpha=alpha)
    of_w = np.abs(np.concatenate(several)).max(0).astype(np.float64)
    want = np.abs(x).max(0) ** alpha / of_w ** (1 - alpha)
    want[9] = 1
    np.testing.assert_allclose(s, want, rtol=1e-6)
    for before, after in zip(several, (first, second), strict=True):
        y = x.astype(np.float64) @ before.T
        np.testing.assert_allclose((x / s).astype(np.float64) @ after.astype(np.float64).T, y, rtol=0, atol=1e-6 * np.abs(y).max())
    if alpha == 0.5:  # both sides have the same extremes, which 8 bits a token and a row hold better
        both = np.abs(x / s).max(0), np.abs(np.concatenate([first, second])).max(0)
        np.testing.assert_allclose(*(np.delete(b, 9) for b in both), rtol=1e-5)
        change = []
        for a, b in ((x, w), (x / s, first)):
            (qa, sa), (qb, sb) = h.quantize(a, "s8", "token"), h.quantize(b, "s8", "channel")
            change.append(np.linalg.norm(h.gemm(qa, qb, transpose_b=True, scale_a=sa, scale_b=sb) - x @ w.T))
        assert change[1] < 0.5 * change[0]


# ---- statistics ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
def test_statistics_are_sums_over_batches(dtype: Any, h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(3)
    batches = [rng.standard_normal(s).astype(dtype) for s in ((5, 24), (2, 3, 24), (1, 24))]
    seen = InputStatistics(h)
    for x in batches:
        assert seen.update(x) is seen
    rows = np.concatenate([x.reshape(-1, 24) for x in batches]).astype(np.float64)
    assert seen.rows == 12 and seen.features == 24 and seen.gram.dtype == np.float32
    np.testing.assert_allclose(seen.gram, rows.T @ rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(seen.size_sum, np.abs(rows).sum(0), rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(seen.amax, np.float64), np.abs(rows).max(0))
    assert InputStatistics(h, gram=False).update(batches[0]).gram is None


def test_arrays_of_other_frameworks(h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray]) -> None:
    torch = pytest.importorskip("torch")
    w, x = wx
    want = gptq(h, w, x, "u4", group_size=16, act_order=True)
    for convert in (torch.from_numpy, h.array):
        layer = gptq(h, convert(w), InputStatistics(h).update(convert(x)), "u4", group_size=16, act_order=True)
        for name, value in layer.items():
            if isinstance(want[name], np.ndarray):
                assert type(value) is type(convert(w)), name
                np.testing.assert_array_equal(np.asarray(value), want[name])
        assert type(h.quantized_linear(convert(x), **layer)) is type(convert(w))
        assert type(awq(h, convert(w), convert(x), group_size=16, steps=1).input_scale) is type(convert(w))
    half = torch.from_numpy(w).to(torch.bfloat16)
    layer = gptq(h, half, torch.from_numpy(x).to(torch.bfloat16), group_size=16)
    assert relative(half.float().numpy(), np.asarray(dequantized(h, layer)), x) < 0.06
    assert n_m_mask(h, half).dtype == torch.bool


# ---- observers -------------------------------------------------------------------------------------------------------------------


def batches_of(dtype: Any = np.float32) -> list[np.ndarray]:
    rng = np.random.default_rng(4)
    return [(rng.standard_normal((6, 5, 7)) * s + 0.3).astype(dtype) for s in (1, 3, 0.5)]


@pytest.mark.parametrize("axis", [None, 0, 1, -1])
def test_min_max(axis: int | None, h: oxidnn.DnnHandle) -> None:
    for dtype in (np.float32, BF16):
        seen, batches = MinMaxObserver(h, axis), batches_of(dtype)
        for x in batches:
            assert seen.update(x) is seen
        axes = None if axis is None else tuple(i for i in range(3) if i != axis % 3)
        low, high = seen.range()
        np.testing.assert_array_equal(low, np.min([x.astype(np.float64).min(axes) for x in batches], 0))
        np.testing.assert_array_equal(high, np.max([x.astype(np.float64).max(axes) for x in batches], 0))
        assert seen.batches == 3


@pytest.mark.parametrize("kind,asymmetric", [("s8", None), ("s8", True), ("u8", None), ("s4", True), ("u4", None), ("e4m3", None),
                                             ("nf4", None), ("e2m1", None)])
def test_scales_are_those_of_dynamic_quantize(kind: str, asymmetric: bool | None, h: oxidnn.DnnHandle) -> None:
    apart = np.arange(-40, 41, 20, dtype=np.float32)[:, None]  # channels on either side of 0
    for axis, scaling in ((None, "tensor"), (1, "channel")):
        x = batches_of()[1][..., :6] + (0 if axis is None else apart)
        scale, zero = MinMaxObserver(h, axis).update(x).scale(kind, asymmetric=asymmetric)
        _, *want = h.dynamic_quantize(x, kind, scaling, axis=axis, asymmetric=bool(asymmetric) or kind[0] == "u")
        np.testing.assert_array_equal(scale, want[0])
        assert (zero is None) == (len(want) == 1)
        if zero is not None:
            assert zero.dtype == want[1].dtype
            np.testing.assert_array_equal(zero, want[1])
        given = h.quantize(x, kind, scale, zero_point=zero, axis=axis)
        step = np.asarray(scale) if axis is None else np.asarray(scale)[:, None]
        if kind in ("s8", "u8"):
            assert (np.abs(h.dequantize(given, scale, zero, kind=kind, axis=axis) - x) <= 0.501 * step).all()


def test_moving_average(h: oxidnn.DnnHandle) -> None:
    batches = batches_of()
    for axis in (None, 2):
        seen = MovingAverageObserver(h, axis, rate=0.25)
        axes = None if axis is None else (0, 1)
        low = high = None
        for x in batches:
            seen.update(x)
            lo, hi = x.min(axes).astype(np.float64), x.max(axes).astype(np.float64)
            low, high = (lo, hi) if low is None else (0.75 * low + 0.25 * lo, 0.75 * high + 0.25 * hi)
        np.testing.assert_allclose(seen.range()[0], low, rtol=1e-12)
        np.testing.assert_allclose(seen.range()[1], high, rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, BF16, np.float32])
def test_percentiles(dtype: Any, h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(5)
    batches = [rng.standard_normal((50, 40)).astype(dtype) * dtype(s) for s in (1, 100, 0.01)]
    batches.append(-np.abs(rng.standard_normal(1000)).astype(dtype))
    for percentile in (50, 90, 99.9, 100):
        seen = PercentileObserver(h, percentile)
        for x in batches:
            seen.update(x)
        ordered = np.sort(np.concatenate([x.reshape(-1) for x in batches]).astype(np.float64))
        outside = {50: 3500, 90: 700, 99.9: 7, 100: 0}[percentile]
        want = np.array([ordered[outside], ordered[-1 - outside]]) if outside < 3500 else ordered[[3500, 3499]]
        low, high = np.array(seen.range())
        if dtype is np.float32:
            assert (np.abs([low, high]) <= np.abs(want)).all() and np.allclose([low, high], want, rtol=2**-10, atol=0)
        else:
            np.testing.assert_array_equal([low, high], want)
    assert seen.counts.sum() == 7000
    spread = np.ones(10000, np.float32)
    spread[:2] = 1e9, -1e9
    low, high = PercentileObserver(h).update(spread).range()  # the default leaves out one of 10000 at either end
    assert (low, high) == (1, 1)


@pytest.mark.parametrize("kind", [MinMaxObserver, MovingAverageObserver, PercentileObserver])
def test_observers_refuse_what_is_not_finite_and_stay_as_they_were(kind: Any, h: oxidnn.DnnHandle) -> None:
    x = np.linspace(-1, 2, 24, dtype=np.float32).reshape(4, 6)
    seen = kind(h)
    with pytest.raises(InvalidArgument, match="number of batches is 0"):
        seen.range()
    seen.update(x)
    before = seen.range()
    for bad in (np.nan, np.inf, -np.inf):
        broken = x.copy()
        broken[2, 3] = bad
        with pytest.raises(InvalidArgument, match="batch 1 with NaN or infinities in 1 of 1"):
            seen.update(broken)
    with pytest.raises(InvalidArgument, match="shape of x is .*at least one element"):
        seen.update(x[:0])
    with pytest.raises(InvalidArgument, match="type of x is s32"):
        seen.update(x.astype(np.int32))
    assert seen.range() == before and seen.batches == 1


# ---- sensitivity, pruning --------------------------------------------------------------------------------------------------------


def test_sensitivity_and_kinds_by_it(h: oxidnn.DnnHandle, wx: tuple[np.ndarray, np.ndarray]) -> None:
    w, x = wx
    errors = sensitivity(h, {"first": (w, x), "second": (w[:8], [x[:60] * 2])}, ("s4", "s8", "e4m3"), group_size=32)
    for name, (weights, inputs) in {"first": (w, x), "second": (w[:8], x[:60])}.items():
        for kind in ("s4", "s8"):
            nearest = numbers(round_to_nearest(h, weights, kind, group_size=32))
            assert errors[name][kind] == pytest.approx(relative(weights, nearest, inputs), rel=1e-3)
        assert errors[name]["s8"] < 0.1 * errors[name]["s4"] and errors[name]["s8"] < errors[name]["e4m3"]
    given = {"a": {"s4": 0.1, "s8": 0.01}, "b": {"s4": 0.3, "s8": 0.02, "e4m3": 0.05}, "c": {"s4": 0.2, "s8": 0.01}}
    sizes = {"a": 100, "b": 100, "c": 200}
    assert mixed_kinds(given, sizes, 4) == {"a": "s4", "b": "s4", "c": "s4"}
    assert mixed_kinds(given, sizes, 5) == {"a": "s4", "b": "s8", "c": "s4"}
    assert mixed_kinds(given, sizes, 6) == {"a": "s8", "b": "s8", "c": "s4"}
    assert mixed_kinds(given, sizes, 7) == {"a": "s4", "b": "s8", "c": "s8"}
    assert mixed_kinds(given, sizes, 99) == {"a": "s8", "b": "s8", "c": "s8"}


def test_magnitude_masks(h: oxidnn.DnnHandle) -> None:
    w = np.array([[3, -1, 2, 1], [-3, 1, 0, -2], [1, 1, -5, 1]], np.float32)
    mask = magnitude_mask(h, w, 0.5)
    assert mask.dtype == bool and mask.sum() == 6
    np.testing.assert_array_equal(mask, [[1, 1, 1, 0], [1, 0, 0, 1], [0, 0, 1, 0]])  # of the ones the first stays
    assert magnitude_mask(h, w, 0).all() and not magnitude_mask(h, w, 1).any()
    big = np.random.default_rng(0).standard_normal((10, 10)).astype(np.float32)
    for sparsity in (0.29, 0.57, 0.1):
        kept = magnitude_mask(h, big, sparsity)
        assert (~kept).sum() == round(100 * sparsity)
        assert np.abs(big[kept]).min() > np.abs(big[~kept]).max()
    np.testing.assert_array_equal(magnitude_mask(h, np.array([[1, 1, 0], [0, 0, 3], [1, 1, 0]], np.float32), 1 / 3, axis=0),
                                  [True, True, False])
    np.testing.assert_array_equal(h.pointwise("where(mask, w, 0)", mask, w), np.where(mask, w, 0))


def test_n_of_m(h: oxidnn.DnnHandle) -> None:
    w = np.array([[1, -1, 1, 1, 4, 0, -5, 4.5]], np.float32)
    np.testing.assert_array_equal(n_m_mask(h, w), [[1, 1, 0, 0, 0, 0, 1, 1]])
    rng = np.random.default_rng(0)
    for n, m in ((2, 4), (1, 4), (4, 8), (0, 2), (3, 3)):
        w = rng.integers(-3, 4, (5, 2, 24)).astype(BF16)
        mask = n_m_mask(h, w, n, m)
        assert (mask.reshape(-1, m).sum(1) == n).all()
        for row, kept in zip(np.abs(w.astype(np.float32)).reshape(-1, m), mask.reshape(-1, m), strict=True):
            assert set(np.lexsort((np.arange(m), -row))[:n]) == set(np.flatnonzero(kept))


def test_the_example() -> None:
    spec = importlib.util.spec_from_file_location("quantize_layer", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    errors = example.main(["--device", "emu:sm_80", "--features", "64", "--outputs", "24", "--rows", "160", "--group", "16"])
    assert list(errors) == ["round to nearest", "AWQ", "GPTQ", "GPTQ, ordered"]
    assert 0 < max(errors["AWQ"], errors["GPTQ"], errors["GPTQ, ordered"]) < 0.7 * errors["round to nearest"] < 0.2


# ---- what is refused -------------------------------------------------------------------------------------------------------------

W, X = problem(4, 16, 20)
NAN = np.where(np.arange(64).reshape(4, 16) == 9, np.nan, W).astype(np.float32)
REFUSED = {
    "no handle": (lambda h: gptq(None, W, X), "gptq: h is NoneType"),
    "no array": (lambda h: gptq(h, [1], X), "gptq: w.*list is no array"),
    "rank": (lambda h: gptq(h, W[0], X), "gptq: rank of w is 1"),
    "type": (lambda h: gptq(h, W.astype(np.float64), X), "gptq: type of w is f64"),
    "empty": (lambda h: gptq(h, W[:0], X), "gptq: shape of w"),
    "features": (lambda h: gptq(h, W, X[:, :15]), "gptq: features of inputs is 15 .*16"),
    "no batch": (lambda h: gptq(h, W, []), "gptq: inputs is without a batch"),
    "statistics of nothing": (lambda h: gptq(h, W, InputStatistics(h)), "gptq: inputs is without a batch"),
    "without gram": (lambda h: gptq(h, W, InputStatistics(h, gram=False).update(X)), "gptq: inputs.*gram=True"),
    "inputs None": (lambda h: awq(h, W, None), "awq: inputs.*NoneType"),
    "NaN in w": (lambda h: gptq(h, NAN, X), "gptq: w is with NaN"),
    "huge w": (lambda h: gptq(h, W * np.float32(1e38), X), "gptq: w is with NaN, or sizes of"),
    "NaN in x": (lambda h: gptq(h, W, np.where(X == X[3, 3], np.nan, X).astype(np.float32)), "gptq: inputs is with NaN"),
    "infinity in x": (lambda h: smooth(h, W, np.where(X == X[3, 3], np.inf, X).astype(np.float32)), "smooth: inputs is with NaN"),
    "kind": (lambda h: gptq(h, W, X, "nf4"), "gptq: kind is 'nf4'.*'s4', 'u4', 's8', 'u8'"),
    "bits 5": (lambda h: gptq(h, W, X, bits=5), "gptq: bits is 5.*at most 4"),
    "bits 1": (lambda h: gptq(h, W, X, bits=1), "gptq: bits is 1"),
    "group": (lambda h: gptq(h, W, X, group_size=0), "gptq: group_size is 0"),
    "odd group": (lambda h: gptq(h, W, X, group_size=5), "gptq: group_size is 5.*even"),
    "symmetric u4": (lambda h: gptq(h, W, X, "u4", asymmetric=False), "gptq: asymmetric is False.*u4"),
    "zero point of nf4": (lambda h: round_to_nearest(h, W, "nf4", asymmetric=True), "round_to_nearest: asymmetric is True.*nf4"),
    "damp": (lambda h: gptq(h, W, X, damp=-1), "gptq: damp is -1"),
    "damp NaN": (lambda h: gptq(h, W, X, damp=float("nan")), "gptq: damp is nan"),
    "block": (lambda h: gptq(h, W, X, block=1.5), "gptq: block is 1.5"),
    "act_order": (lambda h: gptq(h, W, X, act_order=1), "gptq: act_order is 1"),
    "steps": (lambda h: awq(h, W, X, steps=0), "awq: steps is 0"),
    "alpha": (lambda h: smooth(h, W, X, alpha=1.5), "smooth: alpha is 1.5"),
    "columns": (lambda h: smooth(h, [W, W[:, :8]], X), r"smooth: columns of w\[1\] is 8"),
    "no weights": (lambda h: smooth(h, [], X), "smooth: w is an empty list"),
    "beyond f16": (lambda h: smooth(h, (W * 1e4).astype(np.float16), X * 1000, alpha=1), "smooth: alpha is 1.*beyond f16"),
    "batch of another width": (lambda h: InputStatistics(h).update(X).update(X[:, :8]), "InputStatistics: shape of x"),
    "batch of rank 1": (lambda h: InputStatistics(h).update(X[0]), "InputStatistics: shape of x"),
    "axis": (lambda h: MinMaxObserver(h, 2).update(X), "MinMaxObserver: axis is 2"),
    "channels": (lambda h: MinMaxObserver(h, 0).update(X).update(X[:5]), "MinMaxObserver: shape of x.*20 channels"),
    "rate": (lambda h: MovingAverageObserver(h, rate=2), "MovingAverageObserver: rate is 2"),
    "percentile": (lambda h: PercentileObserver(h, 0.999), "PercentileObserver: percentile is 0.999"),
    "kind of scale": (lambda h: MinMaxObserver(h).update(X).scale("s5"), "MinMaxObserver: kind is 's5'"),
    "layer": (lambda h: output_error(h, W, {"w": W}, X), "dequantized: layer is dict"),
    "layers": (lambda h: sensitivity(h, [(W, X)]), "sensitivity: layers is list"),
    "bits of kinds": (lambda h: mixed_kinds({"a": {"s4": 1.0}}, {"a": 3}, 3.9), "mixed_kinds: bits is 3.9"),
    "names of sizes": (lambda h: mixed_kinds({"a": {"s4": 1.0}}, {"b": 3}, 4), "mixed_kinds: names of sizes"),
    "sparsity": (lambda h: magnitude_mask(h, W, 50), "magnitude_mask: sparsity is 50"),
    "mask of NaN": (lambda h: n_m_mask(h, NAN), "n_m_mask: w is with NaN"),
    "n": (lambda h: n_m_mask(h, W, 5, 4), "n_m_mask: n is 5"),
    "m": (lambda h: n_m_mask(h, W, 2, 5), "n_m_mask: shape of w.*5 divides"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, h: oxidnn.DnnHandle) -> None:
    call, message = REFUSED[name]
    with pytest.raises(InvalidArgument, match=message):
        call(h)


def test_squares_beyond_f32(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((32, 64)).astype(np.float32), rng.standard_normal((8, 64)).astype(np.float32)
    plain = output_error(h, w, round_to_nearest(h, w, group_size=32), x)
    large = w * np.float32(2.0**66)
    assert output_error(h, large, round_to_nearest(h, large, group_size=32), x) == pytest.approx(plain, rel=1e-3)
    rows = (np.array([[1.0], [2], [3], [4]]) * 1e20 * np.ones((1, 2))).astype(np.float32)
    assert np.asarray(magnitude_mask(h, rows, 0.5, axis=0)).tolist() == [False, False, True, True]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("axis", [None, 0])
def test_ranges_beyond_f32(axis: int | None, h: oxidnn.DnnHandle) -> None:
    x = np.array([[-1.0, 0.5], [-3e38, 2e38]], np.float32)
    for kind, asymmetric in (("u8", None), ("s8", True), ("u4", None)):
        with pytest.raises(InvalidArgument, match=f"MinMaxObserver: high - low is 5e.38 .expected at most 3.4028e.38.*{kind} with zero"):
            MinMaxObserver(h, axis).update(x).scale(kind, asymmetric=asymmetric)
    scale, zero = MinMaxObserver(h, axis).update(x).scale("s8")  # sizes are within f32
    want = [1 / 127, 3e38 / 127] if axis == 0 else 3e38 / 127
    np.testing.assert_allclose(np.asarray(scale), np.float32(want), rtol=1e-6)
    assert zero is None
    scale, zero = MinMaxObserver(h, axis).update(x * np.float32(0.5)).scale("u8")
    assert np.isfinite(np.asarray(scale)).all() and np.asarray(zero).max() == (170 if axis == 0 else 153)


def test_input_scales_and_layers_of_other_shapes(h: oxidnn.DnnHandle) -> None:
    w, x, ones = np.ones((4, 16), np.float32), np.ones((3, 16), np.float32), np.ones(16, np.float32)
    layer = round_to_nearest(h, w, group_size=8)
    assert output_error(h, w, layer, x, ones) == output_error(h, w, layer, x)
    for odd in (ones[:1], ones[1:], ones[None], np.ones((), np.float32), np.ones((4, 1), np.float32), np.ones((4, 16), np.float32)):
        with pytest.raises(InvalidArgument, match=r"output_error: shape of input_scale is .* .expected .16., the features of w"):
            output_error(h, w, layer, x, odd)
    for value in (0, np.nan, np.inf):
        with pytest.raises(InvalidArgument, match="output_error: input_scale is with 0, NaN"):
            output_error(h, w, layer, x, np.where(np.arange(16) == 5, np.float32(value), ones))
    with pytest.raises(InvalidArgument, match="type of input_scale"):
        output_error(h, w, layer, x, ones.astype(np.int32))
    with pytest.raises(InvalidArgument, match=r"output_error: layer is one of weights .1, 16. .expected .4, 16., as w has"):
        output_error(h, w, round_to_nearest(h, w[:1], group_size=8), x)


def test_layers_that_are_none(h: oxidnn.DnnHandle) -> None:
    layer = round_to_nearest(h, np.ones((4, 16), np.float32), group_size=8)
    for kind in ("zz", None, [1]):
        with pytest.raises(oxidnn.InvalidArgument, match="layer's kind"):
            dequantized(h, {**layer, "kind": kind})
    with pytest.raises(oxidnn.InvalidArgument, match="layer's permutation.*each of 0 to 15 once"):
        dequantized(h, {**layer, "permutation": np.zeros(3, np.int32)})


@pytest.mark.parametrize(("errors", "sizes", "bits", "named"), [
    ({"a": 3}, {"a": 2}, 8, "errors"), ({"a": ["s4"]}, {"a": 2}, 8, "errors"), ({"a": {"s4": "x"}}, {"a": 2}, 8, "s4"),
    ({"a": {"s4": 1.0}, 3: {"s4": 1.0}}, {"a": 2}, 8, "sizes"), ({"a": {4: 1.0, "s4": 1.0}}, {"a": 2}, 8, "errors"),
    ({"a": {"s4": float("nan")}}, {"a": 2}, 8, "finite"), ({"a": {"s4": 1.0}}, {"a": 2}, float("nan"), "bits")], ids=str)
def test_errors_that_are_none(errors: Any, sizes: Any, bits: float, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        mixed_kinds(errors, sizes, bits)


def test_kinds_that_are_none(h: oxidnn.DnnHandle) -> None:
    for kinds in (None, "s4", ()):
        with pytest.raises(InvalidArgument, match="kinds"):
            sensitivity(h, {}, kinds)  # type: ignore[arg-type]
