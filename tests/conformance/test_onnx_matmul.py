"""The ONNX node tests of matrix products of integers with zero points, as convolutions of one tap; and W8A8 layers: activations quantised
on the way, products of 8-bit numbers with a scale a row and a scale a column, in one GEMM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")


def matmul(h: oxidnn.DnnHandle, a: np.ndarray, b: np.ndarray, **quantisers: Any) -> np.ndarray:
    """a (..., m, k) times b (..., k, n): rows are images of one pixel, columns are filters of one tap."""
    batch = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    many_a, many_b = (np.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:]) for x in (a, b))
    found = [np.asarray(h.conv(np.ascontiguousarray(x[:, :, None]), np.ascontiguousarray(y.T[:, :, None]), **quantisers))[:, :, 0]
             for x, y in zip(many_a, many_b, strict=True)]
    return np.stack(found).reshape(*batch, *found[0].shape)


def matmul_integer(h: oxidnn.DnnHandle, a: np.ndarray, b: np.ndarray, zero_a: Any = None, zero_b: Any = None) -> np.ndarray:
    return matmul(h, a, b, zero_x=zero_a, zero_w=zero_b)


def qlinear_matmul(h: oxidnn.DnnHandle, a: np.ndarray, scale_a: Any, zero_a: Any, b: np.ndarray, scale_b: Any, zero_b: Any, scale_y: Any,
                   zero_y: Any) -> np.ndarray:
    scale_a, scale_b, scale_y = (x.astype(np.float32) for x in (scale_a, scale_b, scale_y))
    return matmul(h, a, b, scale_x=scale_a, scale_w=scale_b, scale_y=scale_y, zero_x=zero_a, zero_w=zero_b, zero_y=zero_y,
                  out_dtype=zero_y.dtype)


RUN: dict[str, Callable[..., Any]] = {"MatMulInteger": matmul_integer, "QLinearMatMul": qlinear_matmul}
TESTS = node_tests(RUN)


def test_all_are_found() -> None:
    assert {t.model.graph.node[0].op_type for t in TESTS} == set(RUN) and len(TESTS) >= 9


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    for inputs, outputs in case.data_sets:
        got, want = RUN[node.op_type](h, *map(np.asarray, inputs)), np.asarray(outputs[0])
        assert (got.shape, got.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_integers_without_zero_points_are_a_gemm(arch: str) -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 256, (5, 48), np.uint8), rng.integers(-128, 128, (48, 24), np.int8)
    got = oxidnn.DnnHandle(f"emu:{arch}").gemm(a, np.ascontiguousarray(b.T), transpose_b=True)
    np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32))


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kind", ["s8", "e4m3"])
def test_8_bit_layers(kind: str, arch: str) -> None:
    """Per-token scales found on the way, per-channel scales of the weights, bias and an activation in the epilogue."""
    rng, h = np.random.default_rng(4), oxidnn.DnnHandle(f"emu:{arch}")
    x = (rng.standard_normal((6, 64)) * np.exp(rng.uniform(-3, 3, (6, 1)))).astype(np.float16)
    w, bias = (rng.standard_normal((32, 64)) / 8).astype(np.float16), rng.standard_normal(32).astype(np.float32)
    (q, scale), (qw, scale_w) = h.quantize(x, kind, "token"), h.quantize(w, kind, "channel", axis=0)
    y = h.gemm(q, qw, bias, transpose_b=True, scale_a=scale, scale_b=scale_w, epilogue="bias_relu", out_dtype="f32")
    numbers = [c.view(ml_dtypes.float8_e4m3fn) if kind == "e4m3" and c.dtype == np.uint8 else c for c in (q, qw)]
    wide = [c.astype(np.float64) * s.astype(np.float64).reshape(-1, 1) for c, s in zip(numbers, (scale, scale_w), strict=True)]
    want = np.maximum(wide[0] @ wide[1].T + bias, 0)
    # Sums of integers are exact; tensor cores of sm_90 add products of 8-bit floats to 13 bits.
    spread = np.sqrt(np.square(wide[0]) @ np.square(wide[1]).T)
    assert (np.abs(y - want) <= 1e-5 * np.abs(want) + (2.0**-11 if kind == "e4m3" else 1e-5) * spread + 1e-6).all()
    x, w = x.astype(np.float64), w.astype(np.float64)
    most = (0.3 if kind == "e4m3" else 0.05) * np.sqrt(np.square(x) @ np.square(w).T) + 1e-3
    assert (np.abs(y - np.maximum(x @ w.T + bias, 0)) <= most).all()
