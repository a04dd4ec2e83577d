"""The handle's changes of layout, shape and type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dispatch.session import signed
from ..errors import expected
from ..ops.layout import MAX_PARTS, MAX_RANK
from .calls import CALLS, concat_call, meshgrid_call, shape_of
from .device import OnDevice


class LayoutOps(OnDevice):
    """Methods of DnnHandle."""

    def permute(self, x: Any, dims: Sequence[int] | None = None, *, out: Any = None, stream: Any = None) -> Any:
        """y with x's dimensions in the order `dims` (None: reversed), dense in its own order; of any type."""
        return self._session.run(CALLS["permute"], (x,), (dims if dims is None else shape_of(dims),), out, stream)

    def pixel_shuffle(self, x: Any, factor: int, *, order: str = "crd", out: Any = None, stream: Any = None) -> Any:
        """y (N, C, H factor, W factor) of x (N, C factor^2, H, W), of any type: y[n, c, h factor + i, w factor + j] is x's channel
        (c factor + i) factor + j at (h, w); with order "dcr" (ONNX DepthToSpace's default) channel (i factor + j) C + c."""
        return self._session.run(CALLS["pixel_shuffle"], (x,), (factor, order), out, stream)

    def pixel_unshuffle(self, x: Any, factor: int, *, order: str = "crd", out: Any = None, stream: Any = None) -> Any:
        """The inverse of `pixel_shuffle`, and its gradient (as that is this one's)."""
        return self._session.run(CALLS["pixel_unshuffle"], (x,), (factor, order), out, stream)

    def channel_shuffle(self, x: Any, groups: int, *, out: Any = None, stream: Any = None) -> Any:
        """x (N, C, ...) with its channels dealt out: y's channel c groups + k is x's k C / groups + c. Its inverse and gradient is that of
        C / groups groups."""
        return self._session.run(CALLS["channel_shuffle"], (x,), (groups,), out, stream)

    def unfold(self, x: Any, kernel: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, out: Any = None,
               stream: Any = None) -> Any:
        """The windows of x (N, C, 1 to 3 spatial dimensions) as columns (N, C * taps, positions), as PyTorch's unfold; any type.

        padding: as of `conv`; zeros. The gradient is `fold` with the same arguments, and the other way round.
        """
        return self._session.run(CALLS["unfold"], (x,), (kernel, stride, padding, dilation), out, stream)

    def fold(self, x: Any, output_size: Any, kernel: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, out: Any = None,
             stream: Any = None) -> Any:
        """(N, C, *output_size) of columns (N, C * taps, positions): every element the sum of what all windows say of it, as PyTorch's fold;
        always in the same order."""
        return self._session.run(CALLS["fold"], (x,), (output_size, kernel, stride, padding, dilation), out, stream)

    def im2col(self, x: Any, kernel: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, order: str = "crs", out: Any = None,
               stream: Any = None) -> Any:
        """The windows of x as rows (N, positions, C * taps): x @ w then is a convolution. order: of a row's elements, "crs" channels first,
        as filters (K, C, taps) lie, or "rsc" channels last, as they lie in nhwc. The rest as of `unfold`; the gradient is `col2im`."""
        return self._session.run(CALLS["im2col"], (x,), (kernel, stride, padding, dilation, order), out, stream)

    def col2im(self, x: Any, output_size: Any, kernel: Any, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, order: str = "crs",
               out: Any = None, stream: Any = None) -> Any:
        """`fold` of rows (N, positions, C * taps) as `im2col` gives them. ONNX's Col2Im is `fold`."""
        attrs = (output_size, kernel, stride, padding, dilation, order)
        return self._session.run(CALLS["col2im"], (x,), attrs, out, stream)

    def transform(self, x: Any, c: Any = None, *, dtype: Any = None, layout: str | None = None, alpha: float = 1.0, beta: float = 0.0,
                  saturate: bool = True, out: Any = None, stream: Any = None) -> Any:
        """alpha * x + beta * c in another type or layout ("nchw" or "nhwc"; by default that of x), or in `out` of any strides.

        c has x's shape. Conversions as `cast`'s; arithmetic in f32, in f64 where an operand is f64 or an integer of 32 bits. Without
        alpha, c and a change of type bits are moved. To write into a part of a tensor, give that view as `out`.
        """
        return self._session.run(CALLS["transform"], (x, c), (dtype, layout, alpha, beta, saturate), out, stream)

    def cast(self, x: Any, dtype: Any, *, saturate: bool = True, out: Any = None, stream: Any = None) -> Any:
        """x as another type: floats to nearest even; floats to integers toward zero, saturating, NaN as 0; integers to narrower ones modulo
        2^bits; to bool, whether they are not 0. saturate: e4m3 and e5m2 take their largest number for what is beyond it, infinities too;
        else NaN (e4m3) or an infinity."""
        return self._session.run(CALLS["cast"], (x,), (dtype, saturate), out, stream)

    def broadcast_to(self, x: Any, shape: Sequence[int], *, out: Any = None, stream: Any = None) -> Any:
        """x repeated along dimensions of size 1 and new leading ones; gradient: `reduce` over them."""
        return self._session.run(CALLS["broadcast_to"], (x,), (shape_of(shape),), out, stream)

    def flip(self, x: Any, axes: Any = None, *, out: Any = None, stream: Any = None) -> Any:
        """x in reversed order along `axes` (None: all). Its own gradient."""
        return self._session.run(CALLS["flip"], (x,), (axes,), out, stream)

    def roll(self, x: Any, shifts: Any, axes: Any = None, *, out: Any = None, stream: Any = None) -> Any:
        """x moved around by `shifts` along `axes`, or along all its elements in their order, whose result is dense; gradient: roll by the
        negative shifts."""
        return self._session.run(CALLS["roll"], (x,), (shifts, axes), out, stream)

    def slice(self, x: Any, starts: Any = None, stops: Any = None, steps: Any = None, axes: Any = None, *, out: Any = None,
              stream: Any = None) -> Any:
        """x[start:stop:step] along each of `axes` (None: all), as Python slices; None for what is left out."""
        return self._session.run(CALLS["slice"], (x,), (starts, stops, steps, axes), out, stream)

    def slice_backward(self, dy: Any, x_shape: Sequence[int], starts: Any = None, stops: Any = None, steps: Any = None, axes: Any = None, *,
                       out: Any = None, stream: Any = None) -> Any:
        """dx of shape x_shape: dy in the places of the slice, 0 elsewhere."""
        return self._session.run(CALLS["slice_backward"], (dy,), (starts, stops, steps, axes, shape_of(x_shape)), out, stream)

    def tile(self, x: Any, repeats: Any, *, out: Any = None, stream: Any = None) -> Any:
        """x side by side `repeats` times along each of the last dimensions (NumPy's tile, PyTorch's repeat)."""
        return self._session.run(CALLS["tile"], (x,), (repeats,), out, stream)

    def tile_backward(self, dy: Any, repeats: Any, x_shape: Sequence[int] | None = None, *, out: Any = None, stream: Any = None) -> Any:
        """dx: the sum of all copies; x_shape if x has fewer dimensions than dy."""
        return self._session.run(CALLS["tile_backward"], (dy,), (repeats, x_shape if x_shape is None else shape_of(x_shape)), out, stream)

    def triu(self, x: Any, diagonal: int = 0, *, out: Any = None, stream: Any = None) -> Any:
        """x where column - row >= diagonal in the last two dimensions, else 0. Its own gradient."""
        return self._session.run(CALLS["triu"], (x,), (diagonal,), out, stream)

    def tril(self, x: Any, diagonal: int = 0, *, out: Any = None, stream: Any = None) -> Any:
        """x where column - row <= diagonal in the last two dimensions, else 0. Its own gradient."""
        return self._session.run(CALLS["tril"], (x,), (diagonal,), out, stream)

    def pad(self, x: Any, padding: Any, mode: str = "constant", value: float = 0, *, out: Any = None, stream: Any = None) -> Any:
        """x with elements before and after each dimension.

        padding: an integer, or one entry a dimension, an integer or (low, high); negative numbers cut off. mode: "constant" (value; also
        "inf", "-inf", "nan"), "reflect" about the edge element, "replicate" the edge element, "circular"; of any width.
        """
        return self._session.run(CALLS["pad"], (x,), (padding, mode, signed(value)), out, stream)

    def pad_backward(self, dy: Any, padding: Any, mode: str = "constant", *, out: Any = None, stream: Any = None) -> Any:
        """dx: every element of dy added, in one order, to the element of x that it is a copy of."""
        return self._session.run(CALLS["pad_backward"], (dy,), (padding, mode), out, stream)

    def concat(self, arrays: Sequence[Any], axis: int = 0, *, out: Any = None, stream: Any = None) -> Any:
        """1 to 32 arrays side by side along `axis`; gradient: `split` by their extents."""
        arrays = shape_of(arrays)
        if not isinstance(arrays, tuple) or not 1 <= len(arrays) <= MAX_PARTS:
            raise expected("concat", "arrays", len(arrays) if isinstance(arrays, tuple) else repr(arrays), f"1 to {MAX_PARTS} arrays")
        if any(array is None for array in arrays):
            raise expected("concat", f"arrays[{next(i for i, array in enumerate(arrays) if array is None)}]", None, "an array")
        return self._session.run(concat_call(len(arrays)), arrays, (axis,), out, stream)

    def meshgrid(self, arrays: Sequence[Any], indexing: str = "ij", *, out: Any = None, stream: Any = None) -> Any:
        """A tuple of grids, the k-th with the k-th of 1 to 8 arrays (of one dimension, any types) along dimension k, the others' extents
        beside it; indexing "xy": the first two dimensions change places. One launch for arrays of like types."""
        arrays = shape_of(arrays)
        if not isinstance(arrays, tuple) or not 1 <= len(arrays) <= MAX_RANK or any(array is None for array in arrays):
            raise expected("meshgrid", "arrays", len(arrays) if isinstance(arrays, tuple) else repr(arrays), f"1 to {MAX_RANK} arrays")
        grids = self._session.run(meshgrid_call(len(arrays)), arrays, (indexing,), out, stream)
        return grids if isinstance(grids, tuple) else (grids,)

    def split(self, x: Any, sizes: Any, axis: int = 0, *, out: Any = None, stream: Any = None) -> Any:
        """A tuple of the parts of x of extents `sizes` along `axis` (one number: parts of so many, the last what is left), at most 32;
        gradient: `concat`."""
        parts = self._session.run(CALLS["split"], (x,), (sizes, axis), out, stream)
        return parts if isinstance(parts, tuple) else (parts,)

    def fill(self, shape: Sequence[int] | None = None, value: float = 0, dtype: Any = None, *, out: Any = None, stream: Any = None) -> Any:
        """A DeviceArray of `shape` and `dtype` (f32), or `out`, with `value` everywhere."""
        if out is None:
            if shape is None:
                raise expected("fill", "shape", None, "a shape, or out")
            out = self.empty(shape, "float32" if dtype is None else dtype)
        return self._session.run(CALLS["fill"], (), (shape if shape is None else shape_of(shape), signed(value), dtype), out, stream)
