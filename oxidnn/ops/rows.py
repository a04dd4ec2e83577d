"""Problems by rows: what norms and maps of rows share. Some dimensions of a tensor make up a row, the others count rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

from ..errors import expected
from ..tensor import TensorDesc
from .base import Problem
from .checks import describe
from .reduce import normalize_axes


@dataclass(frozen=True)
class RowProblem(Problem):
    """axes: the dimensions of a row, ascending, of the first operand and all that have its shape."""

    axes: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return self.inputs[0].desc.shape

    @property
    def kept(self) -> tuple[int, ...]:
        """The dimensions that count rows."""
        return tuple(i for i in range(len(self.shape)) if i not in self.axes)

    @property
    def columns(self) -> int:
        return prod(self.shape[a] for a in self.axes)

    @property
    def flops(self) -> int:
        return 8 * self.inputs[0].desc.numel


def row_axes(op: str, x: TensorDesc, attrs: Mapping[str, Any], tensors: Mapping[str, TensorDesc]) -> tuple[int, ...]:
    """The attribute `axes`: at least one, with at least one element in each row that there is."""
    axes = normalize_axes(op, attrs.get("axes", -1), x.rank)
    if not axes:
        raise expected(op, "axes", attrs.get("axes", -1), f"at least one of {x.rank} dimensions", describe(tensors))
    if prod(row_shape(x.shape, axes)) and prod(x.shape[a] for a in axes) == 0:
        raise expected(op, "shape of x", list(x.shape), "at least one element of a row", describe(tensors))
    return axes


def axes_attribute(axes: tuple[int, ...], x: TensorDesc) -> list[tuple[str, Any]]:
    """As a case has it: left out where it is the default."""
    return [("axes", axes)] if axes != (x.rank - 1,) else []


def row_shape(shape: tuple[int, ...], axes: tuple[int, ...]) -> tuple[int, ...]:
    """Of what has a value a row."""
    return tuple(n for i, n in enumerate(shape) if i not in axes)
