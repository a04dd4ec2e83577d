"""Tensors as oxidnn sees them: a description (TensorDesc) and a view of somebody's memory (TensorView). Nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, prod
from typing import Any

import numpy as np

from .dtypes import DType
from .errors import InvalidArgument


def packed_strides(shape: tuple[int, ...], order: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Element strides of a dense tensor whose dimensions lie in memory in `order`, slowest first (default: as given)."""
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order or tuple(range(len(shape)))):
        strides[axis] = step
        step *= max(shape[axis], 1)
    return tuple(strides)


def layout_order(layout: str, rank: int) -> tuple[int, ...]:
    """Memory order of the logical dimensions (N, C, spatial): "nchw" is as given, "nhwc" has channels last, at any rank; the names with
    the rank's own letters ("ncdhw", "nwc", ...) mean the same. Raises InvalidArgument for other names."""
    channels_last = layout in ("nhwc", "nwc", "ndhwc", "channels_last")
    if not channels_last and layout not in ("nchw", "ncw", "ncdhw", "row", "channels_first"):
        raise InvalidArgument(f"layout: {layout!r} is no layout (expected 'nchw' or 'nhwc').")
    return (0, *range(2, rank), 1) if channels_last and rank > 2 else tuple(range(rank))


@dataclass(frozen=True, slots=True)
class TensorDesc:
    """Type, logical shape, element strides, and the power of two (at most 16) that divides the address in bytes."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    align: int = 16

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def numel(self) -> int:
        count = 1
        for extent in self.shape:
            count *= extent
        return count

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements themselves (what a dense copy takes)."""
        return self.numel * self.dtype.num_bytes

    @property
    def offset_range(self) -> tuple[int, int]:
        """Smallest and largest element offset any index reaches; (0, -1) when the tensor is empty."""
        if self.numel == 0:
            return 0, -1
        low = sum(min(0, (n - 1) * s) for n, s in zip(self.shape, self.strides, strict=True))
        high = sum(max(0, (n - 1) * s) for n, s in zip(self.shape, self.strides, strict=True))
        return low, high

    @property
    def is_injective(self) -> bool:
        """True if no two elements share memory: what an output has to be.

        Exact for everything that strides, slices, permutations and gaps of dense tensors give, and for up to 2**22 elements otherwise;
        larger tangles of three and more dimensions that reach into each other are taken to overlap.
        """
        if self.numel == 0:
            return True
        dims = sorted((abs(s), n) for n, s in zip(self.shape, self.strides, strict=True) if n > 1)
        merged: list[tuple[int, int]] = []  # (stride, extent), ascending; a dimension that goes on where the last one ends is one with it
        for stride, extent in dims:
            if stride == 0:
                return False
            if merged and stride == merged[-1][0] * merged[-1][1]:
                merged[-1] = merged[-1][0], merged[-1][1] * extent
            else:
                merged.append((stride, extent))
        while merged and merged[-1][0] > sum(s * (n - 1) for s, n in merged[:-1]):  # steps over all that lies within
            merged.pop()
        if len(merged) <= 1:
            return True
        if sum(s * (n - 1) for s, n in merged) // gcd(*(s for s, _ in merged)) + 1 < prod(n for _, n in merged):
            return False  # fewer places than elements
        if len(merged) == 2:  # a * s = b * t first for a = t / gcd, b = s / gcd
            (s, n), (t, m) = merged
            return t // gcd(s, t) >= n or s // gcd(s, t) >= m
        if prod(n for _, n in merged) > 1 << 22:
            return False
        offsets = np.zeros(1, np.int64)
        for s, n in merged:
            offsets = (offsets[:, None] + s * np.arange(n)).reshape(-1)
        return len(np.unique(offsets)) == len(offsets)

    def is_packed(self, layout: str = "nchw") -> bool:
        """True if the elements lie densely in `layout`. The stride of a dimension of size 1 means nothing."""
        want = packed_strides(self.shape, layout_order(layout, self.rank))
        return self.numel == 0 or all(n == 1 or s == t for n, s, t in zip(self.shape, self.strides, want, strict=True))

    @property
    def layout(self) -> str:
        """"nchw", "nhwc" (with h, w for the rank at hand), or "strided"."""
        spatial = {3: "w", 4: "hw", 5: "dhw"}.get(self.rank)
        if spatial is None:
            return "row" if self.is_packed() else "strided"
        return f"nc{spatial}" if self.is_packed("nchw") else f"n{spatial}c" if self.is_packed("nhwc") else "strided"

    def __str__(self) -> str:
        return f"{self.dtype} [{','.join(map(str, self.shape))}] {self.layout}"

    @staticmethod
    def packed(dtype: DType, shape: tuple[int, ...], layout: str = "nchw") -> TensorDesc:
        return TensorDesc(dtype, tuple(shape), packed_strides(tuple(shape), layout_order(layout, len(shape))))


@dataclass(slots=True)
class TensorView:
    """A TensorDesc over an address, the framework it came from ("numpy", "torch", "cupy", "jax", "oxidnn") and its owner."""

    desc: TensorDesc
    ptr: int
    framework: str
    device: str  # "cuda:0", "emu" or "cpu"
    owner: Any
    is_readonly: bool = False
