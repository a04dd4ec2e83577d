"""What samples of problems by rows share: shapes of one to some thousand columns, one or several axes anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...dtypes import BF16, F16, F32, F64, DType
from ...tensor import TensorDesc
from .tensors import random_desc

_FLOATS = (F32, F32, F16, BF16, F64)


@dataclass(frozen=True)
class DrawnRows:
    """kind: of what has the whole shape. parameter_kind: of what has a value a column or a row."""

    rng: np.random.Generator
    shape: tuple[int, ...]
    axes: tuple[int, ...]
    kind: DType
    parameter_kind: DType

    @property
    def columns_shape(self) -> list[int]:
        return [self.shape[a] for a in self.axes]

    @property
    def rows_shape(self) -> list[int]:
        return [n for i, n in enumerate(self.shape) if i not in self.axes]

    @property
    def axes_attribute(self) -> Any:
        """The axes as a tuple or, if it is one, as a number, which may be negative."""
        return self.axes if len(self.axes) > 1 or self.rng.random() < 0.5 else self.axes[0] - len(self.shape)

    def parameter_shape(self) -> list[int]:
        """Of what has a value a column, which may differ along some of the other dimensions."""
        if self.rng.random() < 0.75:
            return self.columns_shape
        return [n if i in self.axes or self.rng.random() < 0.5 else 1 for i, n in enumerate(self.shape)]

    def tensor(self, extents: Any = None, dtype: DType | None = None, is_output: bool = False) -> TensorDesc:
        """A tensor of these extents (default: the whole shape) and type (default: kind) in any layout."""
        return random_desc(self.rng, dtype or self.kind, self.shape if extents is None else extents, is_output=is_output)


def draw_rows(rng: np.random.Generator, size: str, most_axes: int = 3) -> DrawnRows:
    is_tiny = size == "tiny"
    rank = int(rng.integers(1, 5))
    shape = [int(v) for v in rng.integers(1, 4 if is_tiny else 9, rank)]
    count = min(most_axes, int(rng.choice([1, 1, 2, 3])))
    axes = sorted(int(a) for a in rng.permutation(rank)[:count])
    if rng.random() < 0.5:
        axes = list(range(rank - len(axes), rank))
    widths = [1, 2, 3, 8, 10, 31, 32, 33, 64, 100, 257, 512] if is_tiny else [1, 5, 70, 513, 777, 1000, 1025, 5003]
    shape[axes[-1]] = int(rng.choice(widths)) if len(axes) == 1 else int(rng.choice([1, 2, 5, 8, 16, 33]))
    kept = [i for i in range(rank) if i not in axes]
    if kept and rng.random() < 0.04:
        shape[kept[0]] = 0
    elif kept and rng.random() < 0.15:
        shape[kept[0]] = 40
    kind = _FLOATS[int(rng.integers(len(_FLOATS)))]
    return DrawnRows(rng, tuple(shape), tuple(axes), kind, kind if rng.random() < 0.5 else F32)
