"""Tensor maps on a GPU: the driver's bytes are the emulator's, and a map is encoded only when its address changes."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Any

import numpy as np
import pytest

from oxidnn.codegen.spec import TensorMapSpec
from oxidnn.errors import LaunchError
from oxidnn.runtime.cuda_backend import CudaBackend, _TensorMap
from oxidnn.runtime.emu_backend import encoded
from tests.emu.hopper import image
from tests.emu.recorded import all_maps
from tests.unit.test_tensor_map import BASE, CHANGES, IM2COL

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def _hopper(cuda: CudaBackend) -> None:
    if cuda.info.capability < (9, 0):
        pytest.skip("tensor maps need sm_90")


@pytest.mark.parametrize("spec", [*(dataclasses.replace(BASE, **c) for c in CHANGES.values()), IM2COL, *all_maps()], ids=str)
def test_the_driver_encodes_the_same_bytes(cuda: CudaBackend, spec: TensorMapSpec) -> None:
    target = ctypes.create_string_buffer(128)
    _TensorMap(spec, ctypes.addressof(target), "test", cuda.context)(0x7F0000001000)
    assert target.raw == encoded(spec, 0x7F0000001000)


def test_a_map_is_encoded_when_its_address_changes(cuda: CudaBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = (np.full((16, 64), v, np.uint16) for v in (1, 2))
    spec = TensorMapSpec("bf16", (64, 16), (128,), (64, 16))
    kernel = image(2, 2048)
    blocks: list[Any] = [cuda.allocate(2048, 0) for _ in range(3)]
    for block, array in zip(blocks, (x, y), strict=False):
        cuda.upload(block.ptr, array, 0)
    launch = cuda.load(kernel.text, kernel.spec).bind((1, 1, 1), [spec, blocks[2].ptr, 2048, 0, 0])
    setter = launch.setter(0)
    calls = []
    replace = setter._replace  # type: ignore[attr-defined]
    setter._replace = lambda *a: (calls.append(a), replace(*a))[1]  # type: ignore[attr-defined]
    for block, want in ((blocks[0], 1), (blocks[0], 1), (blocks[1], 2), (blocks[0], 1)):
        setter(block.ptr)
        launch.launch(0)
        got = np.zeros(1024, np.uint16)
        cuda.download(got, blocks[2].ptr, 0)
        cuda.synchronize(0)
        assert (got == want).all()
    assert len(calls) == 2  # once it is encoded
    with pytest.raises(LaunchError, match=r"map: address is 0x\w+8 \(expected a multiple of 16"):
        launch.set(0, blocks[0].ptr + 8)
    for block in blocks:
        block.free()
