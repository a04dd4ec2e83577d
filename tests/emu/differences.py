"""Gradients by finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np


def central_differences(value: Callable[[], float], of: np.ndarray, step: float = 1e-6) -> np.ndarray:
    """The gradient of `value`, which reads the float64 array `of`, by each of its elements; they are moved in place and put back."""
    gradient = np.empty(of.shape)
    for at in np.ndindex(of.shape):
        kept = of[at]
        of[at] = kept + step
        above = value()
        of[at] = kept - step
        gradient[at] = (above - value()) / (2 * step)
        of[at] = kept
    return gradient
