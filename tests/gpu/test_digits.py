"""The example on the GPU and in the emulator: the same kernels, the same losses."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

import oxidnn

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_digits.py"


@pytest.mark.gpu
def test_first_ten_losses_agree() -> None:
    pytest.importorskip("sklearn")
    spec = importlib.util.spec_from_file_location("train_digits", EXAMPLE)
    assert spec is not None and spec.loader is not None
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    x, t, _, _ = example.load_digits()
    losses = {}
    for device in ("cuda:0", "emu:sm_90a"):
        net = example.Net(oxidnn.DnnHandle(device))
        losses[device] = [net.step(x[64 * i : 64 * i + 64], t[64 * i : 64 * i + 64], 0.05) for i in range(10)]
    # Tiles and splits differ between the two, so sums are rounded in another order: a few ulp of f32 a step, growing with the weights.
    np.testing.assert_allclose(losses["cuda:0"], losses["emu:sm_90a"], rtol=2e-5)
