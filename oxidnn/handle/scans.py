"""The handle's scans: sums, products and extremes of all elements so far."""

from __future__ import annotations

from typing import Any

from .calls import CALLS
from .device import OnDevice


class ScanOps(OnDevice):
    """Methods of DnnHandle."""

    def cumsum(self, x: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False, dtype: Any = None, out: Any = None,
               stream: Any = None) -> Any:
        """Sums of each element and those before it along `axis`. reverse: from the end on; exclusive: without the element itself.

        y is of the type of x, of integers s64, or `dtype` (of floats a float, of integers also s32). Accumulates in f32, of f64 in f64, of
        integers exactly modulo 2^64 (s32: 2^32).
        """
        return self._session.run(CALLS["cumsum"], (x,), (axis, reverse, exclusive, dtype), out, stream)

    def cumsum_backward(self, dy: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False, out: Any = None,
                        stream: Any = None) -> Any:
        """dx of `cumsum`: the sum the other way."""
        return self._session.run(CALLS["cumsum"], (dy,), (axis, not reverse, exclusive, None), out, stream)

    def cumprod(self, x: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False, dtype: Any = None, out: Any = None,
                stream: Any = None) -> Any:
        """Products, as `cumsum`'s sums."""
        return self._session.run(CALLS["cumprod"], (x,), (axis, reverse, exclusive, dtype), out, stream)

    def cumprod_backward(self, dy: Any, x: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False, out: Any = None,
                         stream: Any = None) -> Any:
        """dx of `cumprod`, right where factors are 0, too."""
        return self._session.run(CALLS["cumprod_backward"], (dy, x), (axis, reverse, exclusive), out, stream)

    def logcumsumexp(self, x: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False, out: Any = None,
                     stream: Any = None) -> Any:
        """Logarithms of the sums of exp(x), stable for any finite x."""
        return self._session.run(CALLS["logcumsumexp"], (x,), (axis, reverse, exclusive), out, stream)

    def logcumsumexp_backward(self, dy: Any, x: Any, y: Any, axis: int = -1, *, reverse: bool = False, exclusive: bool = False,
                              out: Any = None, stream: Any = None) -> Any:
        """dx of `logcumsumexp`, from its input and output."""
        return self._session.run(CALLS["logcumsumexp_backward"], (dy, x, y), (axis, reverse, exclusive), out, stream)

    def cummax(self, x: Any, axis: int = -1, *, reverse: bool = False, out: Any = None, stream: Any = None) -> Any:
        """(values, indices) of the largest element so far: the last of equals, NaN before all. indices: s64, along the axis."""
        return self._session.run(CALLS["cummax"], (x,), (axis, reverse), out, stream)

    def cummin(self, x: Any, axis: int = -1, *, reverse: bool = False, out: Any = None, stream: Any = None) -> Any:
        """(values, indices) of the smallest element so far, as `cummax`."""
        return self._session.run(CALLS["cummin"], (x,), (axis, reverse), out, stream)

    def cummax_backward(self, dy: Any, indices: Any, axis: int = -1, *, reverse: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx of `cummax` or `cummin`: of each element the sum of dy where the indices name it. indices: as the forward gave them, with the
        same `reverse`; what they name is added up in one order, without atomics."""
        return self._session.run(CALLS["cummax_backward"], (dy, indices), (axis, reverse), out, stream)
