"""Attributes that are 0.0 and -0.0: one plan where they mean the same, two where the sign is seen, in whatever order they come."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

A = np.ones((4, 4), np.float32)


def bits(array: Any) -> list[int]:
    return np.asarray(array).view(np.uint32).ravel().tolist()


@pytest.mark.parametrize("first", [0.0, -0.0])
def test_factors_of_either_zero_give_the_same_bits(first: float) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    for alpha in (first, -first):
        assert bits(h.gemm(A, A, alpha=alpha)) == bits(np.zeros_like(A))
        assert bits(h.gemm(A, A, alpha=alpha, beta=-alpha, c=A)) == bits(np.zeros_like(A))
    assert bits(h.softmax(A)) == bits(h.softmax(A, -1))


@pytest.mark.parametrize("first", [0.0, -0.0])
@pytest.mark.parametrize("name", ["fill", "pad", "leaky_relu"])
def test_where_the_sign_is_seen_it_is_kept(name: str, first: float) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    call = {"fill": lambda zero: h.fill((3,), zero, out=np.empty(3, np.float32)), "pad": lambda zero: h.pad(A, 1, value=zero)[0],
            "leaky_relu": lambda zero: h.activation(-A, "leaky_relu", parameters=(zero,))}[name]  # -1 times the slope
    for zero in (first, -first, first):
        got = call(zero)
        assert bits(got) == bits(np.full(got.shape, -zero if name == "leaky_relu" else zero, np.float32)), zero
