"""What layout, shape and scan ops refuse, with the argument's name, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.ops.case import parse_case

X = np.ones((4, 5), np.float32)
E = np.ones((0, 5), np.float32)


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "dims twice": (lambda h: h.permute(X, (0, 0)), "dims"),
    "dims short": (lambda h: h.permute(X, (0,)), "dims"),
    "dims far": (lambda h: h.permute(X, (0, 2)), "dims"),
    "dims float": (lambda h: h.permute(X, (0, 1.0)), "dims"),
    "rank": (lambda h: h.permute(np.ones((1,) * 9, np.float32)), "rank"),
    "type": (lambda h: h.transform(X.astype(np.uint64), X.astype(np.uint64), beta=1, out=np.zeros(X.shape, np.complex64)), "complex"),
    "no type": (lambda h: h.cast(X, "int128"), "int128"),
    "complex": (lambda h: h.flip(X.astype(np.complex64)), "complex"),
    "layout": (lambda h: h.transform(X, layout="nchw4"), "layout"),
    "beta alone": (lambda h: h.transform(X, beta=1.0), "beta"),
    "c alone": (lambda h: h.transform(X, X), "beta"),
    "c's shape": (lambda h: h.transform(X, X[:2], beta=1.0), "shape of c"),
    "alpha": (lambda h: h.transform(X, alpha=np.inf), "alpha"),
    "out's type": (lambda h: h.cast(X, "float64", out=np.zeros_like(X)), "type of y"),
    "out's shape": (lambda h: h.flip(X, out=np.zeros((5, 4), np.float32)), "shape of y"),
    "broadcast": (lambda h: h.broadcast_to(X, (4, 6)), "shape"),
    "broadcast down": (lambda h: h.broadcast_to(X, (5,)), "shape"),
    "flip axis": (lambda h: h.flip(X, 2), "axes"),
    "roll shifts": (lambda h: h.roll(X, (1, 2, 3), (0, 1)), "shifts"),
    "slice step 0": (lambda h: h.slice(X, 0, 2, 0), "steps"),
    "slice numbers": (lambda h: h.slice(X, (0, 0, 0)), "starts"),
    "slice axes": (lambda h: h.slice(X, 0, 1, 1, (0, 0)), "axes"),
    "slice gradient": (lambda h: h.slice_backward(X, (9, 5), (0, 0), (3, 5)), "shape of dy"),
    "repeats": (lambda h: h.tile(X, -1), "repeats"),
    "repeats float": (lambda h: h.tile(X, 1.5), "repeats"),
    "tile gradient": (lambda h: h.tile_backward(X, (3, 1)), "x_shape"),
    "triu of a vector": (lambda h: h.triu(X[0]), "rank"),
    "diagonal": (lambda h: h.triu(X, 1.5), "diagonal"),
    "padding pairs": (lambda h: h.pad(X, ((1, 1),)), "padding"),
    "padding below": (lambda h: h.pad(X, ((-3, -2), (0, 0))), "padding"),
    "padding far": (lambda h: h.pad(X, 2**31), "padding"),
    "mode": (lambda h: h.pad(X, 1, "symmetric"), "mode"),
    "value with a mode": (lambda h: h.pad(X, 1, "reflect", 3.0), "value"),
    "value of bytes": (lambda h: h.pad(X.astype(np.uint8), 1, value=256), "value"),
    "value of integers": (lambda h: h.pad(X.astype(np.int32), 1, value=0.5), "value"),
    "value a text": (lambda h: h.fill((3,), "one"), "value"),
    "nothing to reflect": (lambda h: h.pad(E, ((1, 1), (0, 0)), "reflect"), "shape of x"),
    "concat of none": (lambda h: h.concat([]), "arrays"),
    "concat of many": (lambda h: h.concat([X] * 33), "arrays"),
    "concat of one array": (lambda h: h.concat(5), "arrays"),
    "concat shapes": (lambda h: h.concat([X, X[:, :4]]), "shape of x1"),
    "concat types": (lambda h: h.concat([X, X.astype(np.float64)]), "type of x1"),
    "concat axis": (lambda h: h.concat([X, X], 2), "axis"),
    "split sum": (lambda h: h.split(X, (1, 2)), "sizes"),
    "split by 0": (lambda h: h.split(X, 0), "sizes"),
    "split into many": (lambda h: h.split(np.ones(33, np.float32), 1), "sizes"),
    "fill without a shape": (lambda h: h.fill(value=1), "shape"),
    "fill shape": (lambda h: h.fill((2, -1)), "shape"),
    "scan axis": (lambda h: h.cumsum(X, 2), "axis"),
    "scan of a number": (lambda h: h.cumsum(np.ones(())), "rank"),
    "scan flag": (lambda h: h.cumsum(X, reverse=1), "reverse"),
    "scan of complex": (lambda h: h.cumprod(X.astype(np.complex64)), "complex"),
    "scan type": (lambda h: h.cumsum(X, dtype="int64"), "dtype"),
    "log of integers": (lambda h: h.logcumsumexp(X.astype(np.int32)), "type of x"),
    "gradient's indices": (lambda h: h.cummax_backward(X, X), "type of indices"),
    "gradient's shape": (lambda h: h.cumprod_backward(X, X[:2]), "shape of x"),
    "case": (lambda h: parse_case("pad x=f32[3] padding=1 mode=wrap"), "mode"),
    "gap": (lambda h: parse_case("concat x0=f32[3] x2=f32[3]"), "x1|gap"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str, h: oxidnn.DnnHandle) -> None:
    call, match = REFUSED[name]
    with pytest.raises((oxidnn.InvalidArgument, oxidnn.Unsupported), match=match):
        call(h)


def test_empty_tensors(h: oxidnn.DnnHandle) -> None:
    assert h.permute(E).shape == (5, 0) and h.concat([E, X]).tolist() == X.tolist() and h.flip(E).shape == (0, 5)
    assert h.pad(E, ((1, 1), (0, 0)), value=2.0).tolist() == np.full((2, 5), 2.0).tolist() and h.tile(X, 0).shape == (4, 0)
    assert h.cumsum(E, 0).shape == (0, 5) and h.cummax(E, 1)[1].shape == (0, 5) and h.fill((0,)).shape == (0,)
    assert [p.shape for p in h.split(E, 3)] == [(0, 5)] and h.slice(X, 4).shape == (0, 1)
    assert h.pad_backward(np.ones((2, 5), np.float32), ((1, 1), (0, 0))).shape == (0, 5)
    assert h.tile_backward(np.ones((0, 5), np.float32), (0, 1), (4, 5)).tolist() == np.zeros((4, 5)).tolist()


def test_values_are_told_apart(h: oxidnn.DnnHandle) -> None:
    """0, -0, NaN and infinities hash alike or compare oddly: each has a plan of its own."""
    x = np.ones(2, np.float32)
    for value in (0.0, -0.0, np.nan, np.inf, -np.inf, 1.0, np.nan, -0.0, 0):
        got = h.pad(x, 1, value=value)
        assert np.array_equal(got, np.array([value, 1, 1, value], np.float32), equal_nan=True) and np.signbit(got[0]) == np.signbit(value)
    plans = len(h._session._plans)
    for _ in range(3):
        h.pad(x, 1, value=np.nan)
    assert len(h._session._plans) == plans


def test_types_are_named_in_any_way(h: oxidnn.DnnHandle) -> None:
    for name in ("float64", np.float64, np.dtype(np.float64), "f64"):  # a NumPy dtype equals None
        assert h.cast(X, name).dtype == np.float64 and h.cumsum(X, dtype=name).dtype == np.float64
