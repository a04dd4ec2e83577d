"""Tensor maps as kernel parameters: layout of the argument block, checks in words, the bytes the driver wrote."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oxidnn.codegen.spec import KernelSpec, Param, Target, TensorMapSpec
from oxidnn.errors import LaunchError
from oxidnn.runtime.emu_backend import EmulatedBackend, encoded
from oxidnn.runtime.kernel import param_offsets

VECTORS = Path(__file__).resolve().parents[1] / "emu" / "vectors" / "vec_tensormaps.npz"
BASE = TensorMapSpec("bf16", (200, 40, 7, 5, 3), (400, 16000, 112000, 560000), (64, 16, 3, 2, 1), (1, 2, 3, 4, 5), 128)
IM2COL = TensorMapSpec("bf16", (64, 7, 6, 2), (128, 896, 5376), (64, 32), (1, 2, 3, 1), 128, ((-2, -1), (-3, -1)))
CHANGES: dict[str, dict[str, Any]] = {
    "base": {}, "box0": {"box": (32, 16, 3, 2, 1)}, "box1": {"box": (64, 17, 3, 2, 1)},
    "swz64": {"box": (32, 16, 3, 2, 1), "swizzle": 64}, "fill": {"fills_nan": True}, "l2_256": {"l2_promotion": 256},
    "l2_none": {"l2_promotion": 0}, "f16": {"dtype": "f16"}, "dim0": {"dims": (201, 40, 7, 5, 3)}, "dim4": {"dims": (200, 40, 7, 5, 9)},
    "stride1": {"strides": (416, 16000, 112000, 560000)}, "estr1": {"element_strides": (1, 3, 3, 4, 5)},
}


def spec_with(*types: str) -> KernelSpec:
    return KernelSpec("test/map", "test", Target("sm_90a", (8, 0)), 32, tuple(Param(f"p{i}", t) for i, t in enumerate(types)), None)


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_bytes_are_the_drivers(name: str) -> None:
    recorded = np.load(VECTORS)[name].tobytes()
    address = int.from_bytes(recorded[:8], "little")
    assert encoded(dataclasses.replace(BASE, **CHANGES[name]), address) == recorded


def test_im2col_bytes_are_the_drivers() -> None:
    recorded = np.load(VECTORS)["im2col"].tobytes()
    assert encoded(IM2COL, int.from_bytes(recorded[:8], "little")) == recorded


def test_maps_are_aligned_to_64_in_the_argument_block() -> None:
    assert param_offsets(spec_with("u32", "tensor_map", "u32", "u64", "tensor_map")) == ((0, 64, 192, 200, 256), 384)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"dtype": "e4m3"}, "dtype is 'e4m3'"), ({"dims": (0, 40, 7, 5, 3)}, r"dims\[0\] is 0 \(expected 1 to"),
    ({"strides": (408, 16000, 112000, 560000)}, r"strides\[0\] is 408 .*multiple of 16"), ({"strides": (400,)}, "strides has 1 entries"),
    ({"box": (64, 257, 3, 2, 1)}, r"box\[1\] is 257"), ({"box": (4, 16, 3, 2, 1)}, r"box\[0\] is 4 elements of 2 bytes"),
    ({"swizzle": 48}, "swizzle is 48"), ({"swizzle": 64}, r"box\[0\] is 128 bytes .*span of 64"),
    ({"element_strides": (1, 9, 1, 1, 1)}, r"element_strides\[1\] is 9"), ({"l2_promotion": 32}, "l2_promotion is 32"),
    ({"dtype": "u16", "fills_nan": True}, "fills_nan is True for dtype u16"), ({"dims": (1,) * 6}, "dims has 6 entries"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "says"), BAD)
def test_a_map_the_hardware_refuses_is_refused_in_words(change: dict[str, Any], says: str) -> None:
    spec = spec_with("tensor_map")
    kernel = EmulatedBackend("sm_90a").load(TEXT.replace("NAME", spec.symbol), spec)
    with pytest.raises(LaunchError, match=says):
        kernel.bind((1, 1, 1), [dataclasses.replace(BASE, **change)])


@pytest.mark.parametrize(("change", "says"), [
    ({"corners": ((-129, 0), (0, 0))}, r"lower corner\[0\] is -129 \(expected -128 to 127 for rank 4\)"),
    ({"corners": ((0,), (0, 0))}, "lower corner has 1 entries"), ({"box": (64, 1025)}, r"box\[1\] is 1025 \(expected 1 to 1024"),
])
def test_an_im2col_map_the_hardware_refuses(change: dict[str, Any], says: str) -> None:
    spec = spec_with("tensor_map")
    kernel = EmulatedBackend("sm_90a").load(TEXT.replace("NAME", spec.symbol), spec)
    with pytest.raises(LaunchError, match=says):
        kernel.bind((1, 1, 1), [dataclasses.replace(IM2COL, **change)])


TEXT = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry NAME(.param .align 64 .b8 p0[128]) { ret; }"


def test_addresses_are_checked_and_required() -> None:
    spec = spec_with("tensor_map")
    backend = EmulatedBackend("sm_90a")
    kernel = backend.load(TEXT.replace("NAME", spec.symbol), spec)
    with pytest.raises(LaunchError, match="p0 is 16 "):
        kernel.bind((1, 1, 1), [16])
    launch = kernel.bind((1, 1, 1), [BASE])
    with pytest.raises(LaunchError, match="p0 was never set to an address"):
        launch.launch(0)
    with pytest.raises(LaunchError, match=r"address is 0x1008 \(expected a multiple of 16"):
        launch.set(0, 0x1008)
    launch.setter(0)(0x1010)
    launch.launch(0)
