"""The handle's pooling, unpooling and resizing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .calls import CALLS, shape_of
from .device import OnDevice


class PoolOps(OnDevice):
    """Methods of DnnHandle."""

    def max_pool(self, x: Any, window: Any, *, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
                 return_indices: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Largest element of each window of x (N, C, 1 to 3 spatial dimensions), NaN the largest of all; with return_indices also where it
        lies (s64), flat over the spatial extent.

        window, stride (default: window), dilation: an int, or one per dimension. padding: as `conv`'s; what is padded never wins.
        ceil_mode: a last window that begins within x, but ends beyond it, counts too.
        """
        return self._session.run(CALLS["max_pool"], (x,), (window, stride, padding, dilation, ceil_mode, return_indices), out, stream)

    def max_pool_backward(self, dy: Any, indices: Any, x_shape: Sequence[int], window: Any, *, stride: Any = None, padding: Any = 0,
                          dilation: Any = 1, ceil_mode: bool = False, x: Any = None, out: Any = None, stream: Any = None) -> Any:
        """dx, from the indices of the forward; or from `x` with indices None, which are then found again."""
        attrs = (window, stride, padding, dilation, ceil_mode, shape_of(x_shape))
        return self._session.run(CALLS["max_pool_backward"], (dy, indices, x), attrs, out, stream)

    def avg_pool(self, x: Any, window: Any, *, stride: Any = None, padding: Any = 0, dilation: Any = 1, ceil_mode: bool = False,
                 count_include_pad: bool = True, divisor_override: int | None = None, out: Any = None, stream: Any = None) -> Any:
        """Mean of each window; the divisor counts padding unless count_include_pad is False, or is divisor_override."""
        attrs = (window, stride, padding, dilation, ceil_mode, count_include_pad, divisor_override)
        return self._session.run(CALLS["avg_pool"], (x,), attrs, out, stream)

    def avg_pool_backward(self, dy: Any, x_shape: Sequence[int], window: Any, *, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                          ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None, out: Any = None,
                          stream: Any = None) -> Any:
        """dx of `avg_pool` of an x of x_shape, with the forward's window and attributes."""
        attrs = (window, stride, padding, dilation, ceil_mode, count_include_pad, divisor_override, shape_of(x_shape))
        return self._session.run(CALLS["avg_pool_backward"], (dy,), attrs, out, stream)

    def lp_pool(self, x: Any, window: Any, *, norm: float = 2.0, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                ceil_mode: bool = False, out: Any = None, stream: Any = None) -> Any:
        """(sum of |x|^norm over the window)^(1/norm)."""
        return self._session.run(CALLS["lp_pool"], (x,), (window, stride, padding, dilation, ceil_mode, norm), out, stream)

    def lp_pool_backward(self, dy: Any, x: Any, y: Any, window: Any, *, norm: float = 2.0, stride: Any = None, padding: Any = 0,
                         dilation: Any = 1, ceil_mode: bool = False, x_shape: Sequence[int] | None = None, out: Any = None,
                         stream: Any = None) -> Any:
        """dx of `lp_pool`, from its input and output (x_shape, if given, is x's)."""
        attrs = (window, stride, padding, dilation, ceil_mode, norm, x_shape if x_shape is None else shape_of(x_shape))
        return self._session.run(CALLS["lp_pool_backward"], (dy, x, y), attrs, out, stream)

    def adaptive_max_pool(self, x: Any, output_size: Any, *, return_indices: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Bin i of L -> O covers [floor(i L / O), ceil((i + 1) L / O))."""
        return self._session.run(CALLS["adaptive_max_pool"], (x,), (output_size, return_indices), out, stream)

    def adaptive_max_pool_backward(self, dy: Any, indices: Any, x_shape: Sequence[int], output_size: Any, *, x: Any = None, out: Any = None,
                                   stream: Any = None) -> Any:
        """dx from the forward's indices; or from `x` with indices None, which are then found again."""
        return self._session.run(CALLS["adaptive_max_pool_backward"], (dy, indices, x), (output_size, shape_of(x_shape)), out, stream)

    def fractional_max_pool(self, x: Any, window: Any, samples: Any, *, output_size: Any = None, output_ratio: Any = None,
                            return_indices: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Largest element of windows whose places `samples` set, as PyTorch's.

        samples: (N, C, spatial dimensions), numbers in [0, 1), of x's type or f32; of two dimensions the first is that of the last one.
        output_size: or output_ratio, which times the extent, rounded down, it then is; output_size + window - 1 is at most the extent. With
        return_indices also where the element lies, flat over the spatial extent.
        """
        attrs = (window, output_size, output_ratio, return_indices)
        return self._session.run(CALLS["fractional_max_pool"], (x, samples), attrs, out, stream)

    def fractional_max_pool_backward(self, dy: Any, indices: Any, x_shape: Sequence[int], window: Any, *, output_size: Any = None,
                                     output_ratio: Any = None, out: Any = None, stream: Any = None) -> Any:
        """dx, from the indices of the forward."""
        attrs = (window, output_size, output_ratio, shape_of(x_shape))
        return self._session.run(CALLS["fractional_max_pool_backward"], (dy, indices), attrs, out, stream)

    def max_unpool(self, x: Any, indices: Any, output_size: Any, *, out: Any = None, stream: Any = None) -> Any:
        """The elements of x (N, C, 1 to 3 spatial dimensions) at `indices`, which `max_pool` gave, of zeros of (N, C, *output_size).

        indices: int64 or int32 of x's shape, flat over output_size. Of several elements with one place the last in x's order stays, on
        every run; an index outside writes nothing.
        """
        return self._session.run(CALLS["max_unpool"], (x, indices), (shape_of(output_size),), out, stream)

    def max_unpool_backward(self, dy: Any, indices: Any, *, out: Any = None, stream: Any = None) -> Any:
        """dx: dy at the indices (as PyTorch, of elements that another overwrote, too), 0 for indices outside."""
        return self._session.run(CALLS["max_unpool_backward"], (dy, indices), (), out, stream)

    def adaptive_avg_pool(self, x: Any, output_size: Any, *, out: Any = None, stream: Any = None) -> Any:
        """Mean of each of output_size bins (int, or one per spatial dimension), those of `adaptive_max_pool`."""
        return self._session.run(CALLS["adaptive_avg_pool"], (x,), (output_size,), out, stream)

    def adaptive_avg_pool_backward(self, dy: Any, x_shape: Sequence[int], output_size: Any, *, out: Any = None, stream: Any = None) -> Any:
        """dx of `adaptive_avg_pool` of an x of x_shape."""
        return self._session.run(CALLS["adaptive_avg_pool_backward"], (dy,), (output_size, shape_of(x_shape)), out, stream)

    def global_max_pool(self, x: Any, *, out: Any = None, stream: Any = None) -> Any:
        """Largest element over all spatial dimensions, which stay with extent 1 (NaN wins)."""
        return self._session.run(CALLS["global_max_pool"], (x,), (), out, stream)

    def global_max_pool_backward(self, dy: Any, x: Any = None, *, indices: Any = None, x_shape: Sequence[int] | None = None,
                                 out: Any = None, stream: Any = None) -> Any:
        """dx, from x; or from the indices of `adaptive_max_pool` to 1 and x_shape."""
        attrs = (x_shape if x_shape is None else shape_of(x_shape),)
        return self._session.run(CALLS["global_max_pool_backward"], (dy, indices, x), attrs, out, stream)

    def global_avg_pool(self, x: Any, *, out: Any = None, stream: Any = None) -> Any:
        """Mean over all spatial dimensions, which stay with extent 1."""
        return self._session.run(CALLS["global_avg_pool"], (x,), (), out, stream)

    def global_avg_pool_backward(self, dy: Any, x_shape: Sequence[int], *, out: Any = None, stream: Any = None) -> Any:
        """dx of `global_avg_pool` of an x of x_shape."""
        return self._session.run(CALLS["global_avg_pool_backward"], (dy,), (shape_of(x_shape),), out, stream)

    def resize(self, x: Any, size: Any = None, mode: str = "nearest", *, scales: Any = None, align_corners: bool = False,
               coordinates: str | None = None, rounding: str = "floor", antialias: bool = False, cubic_coefficient: float = -0.75,
               exclude_outside: bool | None = None, out: Any = None, stream: Any = None) -> Any:
        """x (N, C, 1 to 3 spatial dimensions; f64, f32, f16, bf16) at `size`, one number or one a dimension, or at floor(extent * scales).

        mode: "nearest", "nearest_exact", "linear" (also "bilinear", "trilinear"), "cubic" ("bicubic"), "area". coordinates: "half_pixel"
        (linear, cubic, nearest_exact), "asymmetric" (nearest), "align_corners", "pytorch_half_pixel", "half_pixel_symmetric"; scales, where
        given, shape them too, but not under the flag align_corners (PyTorch's), which goes by the sizes alone. rounding (nearest): "floor",
        "ceil", "round_prefer_floor", "round_prefer_ceil". antialias widens linear and cubic by the ratio of a reduction. exclude_outside:
        what lies outside x has no weight (default with antialias), else it counts as the nearest element. Workspace: the weights of each
        dimension.
        """
        attrs = (size, mode, scales, align_corners, coordinates, rounding, antialias, cubic_coefficient, exclude_outside)
        return self._session.run(CALLS["resize"], (x,), attrs, out, stream)

    def resize_backward(self, dy: Any, x_shape: Sequence[int], mode: str = "nearest", *, size: Any = None, scales: Any = None,
                        align_corners: bool = False, coordinates: str | None = None, rounding: str = "floor", antialias: bool = False,
                        cubic_coefficient: float = -0.75, exclude_outside: bool | None = None, out: Any = None, stream: Any = None) -> Any:
        """dx, the exact transpose of `resize`, the same bits every time. The size is dy's."""
        attrs = (size, mode, scales, align_corners, coordinates, rounding, antialias, cubic_coefficient, exclude_outside, shape_of(x_shape))
        return self._session.run(CALLS["resize_backward"], (dy,), attrs, out, stream)
