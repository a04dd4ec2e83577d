"""Reordered filters: the format as documented, the same results from every engine, and what tensor cores make of it."""

from __future__ import annotations

import numpy as np
import pytest

import oxidnn
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import format_tensor, parse_case
from oxidnn.ops.conv_reorder import packed_filter
from oxidnn.tensor import TensorDesc


@pytest.mark.parametrize(("kind", "shape", "use", "strides"), [
    ("s8", (64, 3, 7, 7), "fprop", (784, 1, 112, 16)), ("s8", (8, 32, 3), "fprop", (96, 1, 32)),
    ("s8", (24, 5, 3, 3), "dgrad", (1, 288, 96, 32)), ("bf16", (4, 9, 2, 2), "fprop", (64, 1, 32, 16)),
    ("f32", (4, 3, 2, 2, 2), "dgrad", (1, 32, 16, 8, 4))])
def test_order_and_gaps(kind: str, shape: tuple[int, ...], use: str, strides: tuple[int, ...]) -> None:
    assert packed_filter(TensorDesc.packed(oxidnn.dtypes.dtype(kind), shape), use).strides == strides


@pytest.mark.parametrize("kind", ("int8", "uint8", "float16"))
def test_results_are_those_of_the_filters(kind: str) -> None:
    h, rng = oxidnn.DnnHandle("emu:sm_90a"), np.random.default_rng(3)
    x, w, dy = (rng.integers(0, 5, s).astype(kind) for s in ((2, 16, 6, 5), (32, 16, 3, 3), (2, 32, 6, 5)))
    forward, back = h.conv_reorder(w), h.conv_reorder(w, use="dgrad")
    np.testing.assert_array_equal(forward, w)
    np.testing.assert_array_equal(back, w)
    assert forward.strides[1] == back.strides[0] == w.itemsize
    np.testing.assert_array_equal(h.conv(x, forward, padding=1), h.conv(x, w, padding=1))
    np.testing.assert_array_equal(h.conv_dgrad(dy, back, x.shape, padding=1), h.conv_dgrad(dy, w, x.shape, padding=1))
    np.testing.assert_array_equal(h.conv_transpose(dy, back, padding=1), h.conv_transpose(dy, w, padding=1))


@pytest.mark.parametrize("kind", ("uint8", "float8_e4m3fn", "float16", "float32"))
@pytest.mark.parametrize("use", ("fprop", "dgrad"))
@pytest.mark.parametrize("shape", ((3, 5, 3, 3), (7, 20, 3), (1, 1, 1, 2, 1), (3, 5, 1, 1)))
def test_memory_reaches_as_far_as_the_gaps(kind: str, use: str, shape: tuple[int, ...]) -> None:
    h = oxidnn.DnnHandle("emu:sm_90a")
    w = np.random.default_rng(4).integers(0, 5, shape).astype(oxidnn.dtypes.dtype(kind).numpy)
    packed = h.conv_reorder(w, use=use)
    assert packed.dtype == w.dtype
    np.testing.assert_array_equal(packed, w)


def engines(line: str) -> set[str]:
    problem = parse_case(line)
    return {e.id.split(".")[1] for e in ENGINES[problem.op] if e.check_support(problem, known_device("sm_90a"))}


@pytest.mark.parametrize("kind", ("s8", "e4m3"))
def test_tensor_cores_take_8_bits_only_so(kind: str) -> None:
    """Filters as frameworks hold them reach none but by a copy or a matrix of windows; reordered ones do, in both directions."""
    number = oxidnn.dtypes.dtype(kind)
    for line, shape, use in (("conv_fprop x={k}[8,64,14,14]nhwc w={w} padding=1", (128, 64, 3, 3), "fprop"),
                             ("conv_dgrad dy={k}[8,128,14,14]nhwc w={w} x_shape=(8,64,14,14) padding=1", (128, 64, 3, 3), "dgrad")):
        plain, packed = TensorDesc.packed(number, shape), packed_filter(TensorDesc.packed(number, shape), use)
        cores = {"igemm_wgmma_sm90", "igemm_mma_sm80"}
        assert not engines(line.format(k=kind, w=format_tensor(plain))) & cores
        assert engines(line.format(k=kind, w=format_tensor(packed))) >= cores
    # Three channels: rows of 16 bytes, in image and filter.
    image, packed = f"{kind}[2,3,20,20](6400,1,320,16)", packed_filter(TensorDesc.packed(number, (64, 3, 7, 7)))
    assert "igemm_wgmma_sm90" in engines(f"conv_fprop x={image} w={format_tensor(packed)} padding=3 stride=2")
