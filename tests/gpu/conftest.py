"""torch and a handle, for tests that need both on the device."""

from __future__ import annotations

from typing import Any

import pytest

import oxidnn


@pytest.fixture(scope="module")
def torch() -> Any:
    found = pytest.importorskip("torch")
    if not found.cuda.is_available():
        pytest.skip("torch has no CUDA device")
    return found


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("cuda:0")
