"""Calibration: scales, codes and masks from what a network's layers see; of linear layers with weights (n, k) and inputs (..., k).

    seen = InputStatistics(h)
    for x in batches:                                    # what reaches the layer, f32, f16 or bf16, of any framework
        seen.update(x)
    y = h.quantized_linear(x, **gptq(h, w, seen))        # s4, groups of 128
    layer, input_scale, *_ = awq(h, w, seen)
    y = h.quantized_linear(h.pointwise("x / s", x, input_scale), **layer)

Layers are dicts of what `h.quantized_linear` takes by name: w (codes), scale (f32, (n, groups)), zero_point or None, kind, group_size,
permutation or None; `dequantized` gives the numbers back. Layer after layer ("true sequential") is the caller's loop: quantise one, run
the batches through it, take statistics of the next.

Where the work is done: products, sums, extremes and trials are ops of the handle, on its device, in its arithmetic (math=);
factorisation, GPTQ's recursion within a block, percentiles and masks are NumPy's, on the host, to which arrays are copied. Of batches
nothing is kept but sums.

NaN and infinities: an observer refuses the batch and stays as it was; in sums they would stay, so what takes those raises. Results are
of the framework of w or x. All raise InvalidArgument, as the handle's methods do.

Distillation needs no function of its own: its losses are `h.loss(student, teacher, "kl_div")` of responses, (log-)probabilities at a
temperature by `h.softmax(x, scale=1 / temperature, log=True)`, and "mse" of features, each with `h.loss_backward`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

import numpy as np

from .array import DeviceArray
from .dtypes import F32
from .dtypes import dtype as dtype_of
from .errors import expected
from .handle import DnnHandle
from .interchange import as_view, frame_of
from .ops.checks import check_bool, check_choice, check_integer, check_number, describe, operand
from .ops.quantize import KINDS, WIDE, Kind
from .tensor import TensorDesc

Layer = dict[str, Any]
INTEGERS = ("s4", "u4", "s8", "u8")
LARGEST = 2.0**126  # sizes of weights: their ranges and products with scales stay within f32


# ---- arrays of any framework, here and there -------------------------------------------------------------------------------------


def _desc(h: DnnHandle, op: str, name: str, array: Any, rank: int | None = None) -> TensorDesc:
    """Of an array of f32, f16 or bf16 with at least one element, checked."""
    if not isinstance(h, DnnHandle):
        raise expected(op, "h", type(h).__name__, "a DnnHandle")
    desc = h._session.checked_view(op, name, array).desc
    operand(op, name, {name: desc}, WIDE)
    if rank is not None and desc.rank != rank:
        raise expected(op, f"rank of {name}", desc.rank, rank, describe({name: desc}))
    if not desc.numel:
        raise expected(op, f"shape of {name}", list(desc.shape), "at least one element")
    return desc


def _read(h: DnnHandle, array: Any) -> np.ndarray:
    """A copy on the host, in the order of the stream that the array's framework works on."""
    if isinstance(array, DeviceArray):
        return array.numpy()
    backend = h._session.backend
    view = as_view(array)
    stream = frame_of(array, backend, h._session.stream).stream(None)
    backend.bind_view(view)
    try:
        return DeviceArray(backend, view.desc, view.ptr, view, stream).numpy()  # type: ignore[arg-type]  # a view, which keeps its owner
    finally:
        backend.release_view(view)


def _made(h: DnnHandle, host: np.ndarray, like: Any) -> Any:
    """A copy on the device, as an array of the framework of `like`."""
    backend = h._session.backend
    frame = frame_of(like, backend, h._session.stream)
    result = frame.allocator(TensorDesc.packed(dtype_of(host.dtype), host.shape))()
    view = as_view(result)
    backend.bind_view(view)
    try:
        backend.upload(view.ptr, np.ascontiguousarray(host), frame.stream(None))
    finally:
        backend.release_view(view)
    return result if frame.finish is None else frame.finish(result)


def _between(op: str, name: str, value: Any, least: float = 0, most: float = 1) -> float:
    number = check_number(op, name, value)
    if not least <= number <= most:
        raise expected(op, name, repr(value), f"a number from {least} to {most:g}")
    return number


def _check_sizes(h: DnnHandle, op: str, name: str, w: Any) -> None:
    if not float(_read(h, h.reduce(w, "amax"))) < LARGEST:
        raise expected(op, name, "with NaN, or sizes of 2^126 and more", "finite numbers below that")


# ---- scales ----------------------------------------------------------------------------------------------------------------------


def _kind(op: str, kind: Any, among: Sequence[str], asymmetric: bool | None, bits: int | None = None) -> tuple[Kind, bool]:
    """The kind, of fewer codes where bits say so, and whether it has zero points."""
    found = KINDS[check_choice(op, "kind", kind, tuple(among))]
    is_unsigned = found.is_integer and found.low == 0
    if asymmetric is None:
        asymmetric = is_unsigned
    elif check_bool(op, "asymmetric", asymmetric) != is_unsigned and (is_unsigned or not found.is_integer):
        raise expected(op, "asymmetric", asymmetric, f"{is_unsigned} for {kind}")
    if bits is not None and check_integer(op, "bits", bits, 2, found.bits) < found.bits:
        most = 2**bits - 1 if is_unsigned else 2 ** (bits - 1) - 1
        found = replace(found, low=0 if is_unsigned else -most - 1, high=most, largest=float(most))
    return found, bool(asymmetric)


def _scales(low: np.ndarray, high: np.ndarray, kind: Kind, asymmetric: bool) -> tuple[np.ndarray, np.ndarray | None]:
    """(scale, zero_point) for numbers from low to high, as `dynamic_quantize` finds them, in f32."""
    low, high = np.minimum(low, 0).astype(np.float32), np.maximum(high, 0).astype(np.float32)
    if not asymmetric:
        scale = np.maximum(-low, high) / np.float32(kind.largest)
        return np.where(scale == 0, np.float32(1), scale), None
    scale = (high - low) / np.float32(kind.high - kind.low)
    scale = np.where(scale == 0, np.float32(1), scale)
    zero = np.rint(np.clip(np.float32(kind.low) - low / scale, kind.low, kind.high))
    return scale, zero.astype(_zero_type(kind))


def _zero_type(kind: Kind) -> type:
    return np.int8 if kind.low else np.uint8


class _Observer:
    """low and high (f64; () or (channels,)): what `update` has seen so far, None before the first batch. batches: how many."""

    def __init__(self, h: DnnHandle, axis: int | None = None) -> None:
        if not isinstance(h, DnnHandle):
            raise expected(type(self).__name__, "h", type(h).__name__, "a DnnHandle")
        if axis is not None:
            check_integer(type(self).__name__, "axis", axis, -8, 7)
        self.h = h
        self.axis = axis
        self.batches = 0
        self.low: np.ndarray | None = None
        self.high: np.ndarray | None = None
        self._like: Any = None  # a small array of the framework that scales go back to

    def update(self, x: Any) -> Any:
        """Looks at a batch (f32, f16, bf16; not empty). Raises InvalidArgument, and stays as it was, where a number is NaN or infinite.
        Returns the observer."""
        name = type(self).__name__
        desc = _desc(self.h, name, "x", x)
        axes = None
        if self.axis is not None:
            axis = check_integer(name, "axis", self.axis, -desc.rank, desc.rank - 1, describe({"x": desc})) % max(desc.rank, 1)
            axes = tuple(i for i in range(desc.rank) if i != axis)
            if self.low is not None and self.low.shape != (desc.shape[axis],):
                raise expected(name, "shape of x", list(desc.shape), f"{self.low.size} channels along dimension {axis}, as before")
        ends = [self.h.reduce(x, kind, axes) for kind in ("min", "max")]
        low, high = (_read(self.h, end).astype(np.float64) for end in ends)
        bad = int(np.sum(~(np.isfinite(low) & np.isfinite(high))))
        if bad:
            raise expected(name, "x", f"batch {self.batches} with NaN or infinities in {bad} of {low.size} channels", "finite numbers")
        self._take(x, low, high)
        self.batches += 1
        self._like = ends[0]
        return self

    def _take(self, x: Any, low: np.ndarray, high: np.ndarray) -> None:
        raise NotImplementedError

    def range(self) -> tuple[np.ndarray, np.ndarray]:
        """(low, high), f64."""
        if self.low is None or self.high is None:
            raise expected(type(self).__name__, "the number of batches", 0, "at least one update before")
        return self.low, self.high

    def scale(self, kind: str, *, asymmetric: bool | None = None) -> tuple[Any, Any]:
        """(scale, zero_point or None) for `h.quantize(x, kind, scale, zero_point=zero_point)` and `h.fake_quantize`, with axis= where the
        observer has one: by the formulas of `dynamic_quantize`, for the range that was seen. kind: any of `quantize`; asymmetric (of
        integers): with zero points, which need a high - low within f32 (InvalidArgument); None: of u4 and u8."""
        op = type(self).__name__
        low, high = self.range()
        found, has_zero = _kind(op, kind, tuple(KINDS), asymmetric)
        widest = float(np.max(np.maximum(high, 0) - np.minimum(low, 0)))
        if has_zero and widest > F32.max:
            raise expected(op, "high - low", f"{widest:.5g}", f"at most {F32.max:.5g}, the range of f32, for {kind} with zero points")
        scale, zero = _scales(low, high, found, has_zero)
        return _made(self.h, scale, self._like), None if zero is None else _made(self.h, zero, self._like)


class MinMaxObserver(_Observer):
    """The least and the largest number of all batches: of all, or of each index of `axis`. Two reductions a batch on the device."""

    def _take(self, x: Any, low: np.ndarray, high: np.ndarray) -> None:
        self.low = low if self.low is None else np.minimum(self.low, low)
        self.high = high if self.high is None else np.maximum(self.high, high)


class MovingAverageObserver(_Observer):
    """Moving averages of the batches' least and largest numbers: those of the first batch, then low += rate * (the batch's - low), and high
    likewise. Two reductions a batch on the device."""

    def __init__(self, h: DnnHandle, axis: int | None = None, *, rate: float = 0.01) -> None:
        super().__init__(h, axis)
        self.rate = _between("MovingAverageObserver", "rate", rate)

    def _take(self, x: Any, low: np.ndarray, high: np.ndarray) -> None:
        self.low = low if self.low is None else self.low + self.rate * (low - self.low)
        self.high = high if self.high is None else self.high + self.rate * (high - self.high)


class PercentileObserver(_Observer):
    """The numbers that floor(N * (100 - percentile) / 100) of all N lie below, and above: a range that few outliers cannot widen.

    counts: how many numbers had each of the 2^19 values of f32's upper bits (sign, exponent, ten of mantissa), in ascending order: ends are
    exact of f16 and bf16; of f32 they lie nearer to zero by less than 2^-10 of themselves. 4 MB, whatever the number of batches; each is
    copied to the host and counted there.
    """

    _HALF = 2**18
    _CHUNK = 2**22  # numbers counted at a time

    def __init__(self, h: DnnHandle, percentile: float = 99.99) -> None:
        super().__init__(h)
        self.percentile = _between("PercentileObserver", "percentile", percentile, 50, 100)
        self.counts = np.zeros(2 * self._HALF, np.int64)

    def _take(self, x: Any, low: np.ndarray, high: np.ndarray) -> None:
        flat = _read(self.h, x).reshape(-1)
        for start in range(0, flat.size, self._CHUNK):
            cells = (flat[start : start + self._CHUNK].astype(np.float32).view(np.uint32) >> 13).astype(np.int64)
            self.counts += np.bincount(self._turned(cells), minlength=2 * self._HALF)
        below = np.cumsum(self.counts)
        outside = int(below[-1] * (100 - self.percentile) / 100 + 1e-6)  # rounding may not cost a number
        ends = np.searchsorted(below, (min(outside + 1, below[-1]), max(below[-1] - outside, 1)))
        bits = np.where(ends >= self._HALF, ends - self._HALF, 2 * self._HALF - 1 - ends)
        low, high = (bits << 13).astype(np.uint32).view(np.float32).astype(np.float64)
        self.low, self.high = np.asarray(low), np.asarray(high)

    def _turned(self, upper: np.ndarray) -> np.ndarray:
        """Upper bits in ascending order of their numbers: positive ones after negative ones, which run backwards."""
        return np.where(upper < self._HALF, upper + self._HALF, 2 * self._HALF - 1 - upper)


# ---- what layers see -------------------------------------------------------------------------------------------------------------


class InputStatistics:
    """Sums over the inputs x (..., k) of a layer, in x's framework, made on the device batch by batch.

    rows: how many. amax (k,): the largest size of each input. size_sum (k,), f32: the sum of sizes. gram (k, k), f32: x^T x over all rows,
    GPTQ's Hessian but for a factor; 2 k^2 operations a row, k^2 numbers; None with gram=False, which serves `smooth`.
    """

    def __init__(self, h: DnnHandle, *, gram: bool = True) -> None:
        if not isinstance(h, DnnHandle):
            raise expected("InputStatistics", "h", type(h).__name__, "a DnnHandle")
        self.h = h
        self.has_gram = check_bool("InputStatistics", "gram", gram)
        self.rows = 0
        self.features: int | None = None
        self.amax: Any = None
        self.size_sum: Any = None
        self.gram: Any = None

    def update(self, x: Any) -> InputStatistics:
        """Adds a batch (..., k), f32, f16 or bf16, not empty. Returns the statistics."""
        h, op = self.h, "InputStatistics"
        desc = _desc(h, op, "x", x)
        if desc.rank < 2 or self.features not in (None, desc.shape[-1]):
            raise expected(op, "shape of x", list(desc.shape), f"(rows..., {'k' if self.features is None else self.features})")
        if desc.rank > 2:
            x = x.reshape((-1, desc.shape[-1]))
        amax, size_sum = h.reduce(x, "amax", 0), h.reduce(h.pointwise("abs(x)", x, dtype="float32"), "sum", 0)
        if self.rows:
            amax, size_sum = h.pointwise("maximum(a, b)", self.amax, amax), h.pointwise("a + b", self.size_sum, size_sum)
        if self.has_gram:
            more = {"c": self.gram, "beta": 1.0} if self.rows else {}
            self.gram = h.gemm(x, x, transpose_a=True, out_dtype="float32", **more)
        self.amax, self.size_sum, self.features = amax, size_sum, desc.shape[-1]
        self.rows += prod(desc.shape[:-1])
        return self


def _statistics(h: DnnHandle, op: str, inputs: Any, features: int, gram: bool = True) -> InputStatistics:
    """Of inputs given as statistics, a batch or a sequence of batches: finite, of layers with so many features."""
    if isinstance(inputs, InputStatistics):
        found = inputs
    else:
        found = InputStatistics(h, gram=gram)
        for x in inputs if isinstance(inputs, (list, tuple)) else (inputs,):
            _desc(h, op, "inputs", x)
            found.update(x)
    if not found.rows:
        raise expected(op, "inputs", "without a batch", "at least one")
    if found.features != features:
        raise expected(op, "features of inputs", found.features, f"{features}, as w has")
    if gram and found.gram is None:
        raise expected(op, "inputs", "statistics with gram=False", "ones with gram=True")
    total = found.gram if gram else found.size_sum
    if not np.isfinite(_read(h, h.reduce(total, "amax"))):
        raise expected(op, "inputs", "with NaN, infinities, or squares beyond f32", "finite numbers")
    return found


# ---- quantised layers ------------------------------------------------------------------------------------------------------------


def _group(op: str, kind: Kind, group_size: int | None, k: int) -> int:
    size = k if group_size is None else min(check_integer(op, "group_size", group_size, 1), k)
    if kind.is_packed and size % 2 and size < k:
        raise expected(op, "group_size", size, f"an even number, or one of at least {k}, for {kind.name}, two to a byte")
    return size


def _layer(w: Any, scale: Any, zero_point: Any, kind: Kind, group_size: int, permutation: Any = None) -> Layer:
    return {"w": w, "scale": scale, "zero_point": zero_point, "kind": kind.name, "group_size": group_size, "permutation": permutation}


def round_to_nearest(h: DnnHandle, w: Any, kind: str = "s4", *, group_size: int | None = 128, asymmetric: bool | None = None) -> Layer:
    """The layer of w (n, k), f32, f16 or bf16, each number rounded to the nearest code: what the others are measured against.

    kind: any of `quantize` ("u8", "e5m2" and "e2m1" are none of `quantized_linear`). group_size: neighbours along k that share a scale;
    None: a row. asymmetric (of integers): with zero points; None: of u4 and u8. One launch: `dynamic_quantize`.
    """
    op = "round_to_nearest"
    k = _desc(h, op, "w", w, 2).shape[1]
    found, asymmetric = _kind(op, kind, tuple(KINDS), asymmetric)
    size = _group(op, found, group_size, k)
    codes, scale, *zero = h.dynamic_quantize(w, kind, ("group", size), asymmetric=asymmetric)
    return _layer(codes, scale, zero[0] if zero else None, found, size)


def dequantized(h: DnnHandle, layer: Layer, features: int | None = None) -> Any:
    """The weights (n, k) of a layer, f32, columns in the order of its inputs. features: k, where codes of four bits end in half a byte."""
    if not isinstance(layer, Mapping) or not {"w", "scale", "zero_point", "kind", "group_size", "permutation"} <= set(layer):
        raise expected("dequantized", "layer", type(layer).__name__, "a dict as `gptq` gives it")
    if not isinstance(layer["kind"], str) or layer["kind"] not in KINDS:
        raise expected("dequantized", "layer's kind", repr(layer["kind"]), ", ".join(KINDS))
    size = features if KINDS[layer["kind"]].is_packed else None
    w = h.dequantize(layer["w"], layer["scale"], layer["zero_point"], kind=layer["kind"], scaling=("group", layer["group_size"]), size=size)
    order = layer["permutation"]
    if order is None:
        return w
    columns, places = _read(h, w), _read(h, order)
    if sorted(places.ravel().tolist()) != list(range(columns.shape[1])):
        got = f"{places.dtype} {list(places.shape)}"
        raise expected("dequantized", "layer's permutation", got, f"each of 0 to {columns.shape[1] - 1} once")
    return _made(h, columns[:, np.argsort(places)], w)


def _energy(h: DnnHandle, w: Any, gram: Any) -> float:
    """The sum of squares of x w^T over the inputs behind `gram`: trace(w gram w^T), w (n, k), in f64, as squares may leave f32."""
    w = h.cast(w, "float64")
    return float(_read(h, h.dot(h.gemm(w, h.cast(gram, "float64")), w)))


def output_error(h: DnnHandle, w: Any, layer: Layer, inputs: Any, input_scale: Any = None) -> float:
    """The norm of x W'^T - x w^T over that of x w^T, w (n, k), on inputs as `gptq` takes them; W' of the layer, which takes
    x / input_scale ((k,), f32, f16 or bf16, none of it 0; None: x)."""
    op = "output_error"
    shape = _desc(h, op, "w", w, 2).shape
    k = shape[1]
    if input_scale is not None:
        desc = _desc(h, op, "input_scale", input_scale)
        if desc.shape != (k,):
            raise expected(op, "shape of input_scale", list(desc.shape), f"{[k]}, the features of w")
        sizes = np.abs(_read(h, input_scale).astype(np.float64))
        if not np.all((sizes > 0) & (sizes < np.inf)):
            raise expected(op, "input_scale", "with 0, NaN or infinities", "finite numbers other than 0")
    _check_sizes(h, op, "w", w)
    seen = _statistics(h, op, inputs, k)
    found = dequantized(h, layer, k)
    if tuple(found.shape) != shape:
        raise expected(op, "layer", f"one of weights {list(found.shape)}", f"{list(shape)}, as w has")
    if input_scale is None:
        change = h.pointwise("q - w", found, w, dtype="float32")
    else:
        change = h.pointwise("q / s - w", found, input_scale, w, dtype="float32")
    of_all = _energy(h, w, seen.gram)
    return float(np.sqrt(max(_energy(h, change, seen.gram), 0) / of_all)) if of_all > 0 else 0.0


def gptq(h: DnnHandle, w: Any, inputs: Any, kind: str = "s4", *, bits: int | None = None, group_size: int | None = 128,
         asymmetric: bool | None = None, damp: float = 0.01, act_order: bool = False, block: int = 128) -> Layer:
    """The layer of w (n, k) by GPTQ (Frantar et al. 2022, arXiv 2210.17323): columns are quantised one by one, and what is lost by each is
    made up by those after it, so that x W^T changes little on the inputs.

    inputs: InputStatistics, a batch (..., k), or a list of batches. kind: "s4", "u4", "s8", "u8" (none of `quantized_linear`). bits: 2 and
    more, of fewer codes than the kind has (-2 to 1, 0 to 3; storage stays the kind's; at 2 bits zero points are worth their while).
    group_size: columns that share a scale; None: all. Scales are found, as `dynamic_quantize` finds them, when the first column of a group
    is reached, from the weights as the columns before have moved them. asymmetric: with zero points; None: of u4 and u8. damp: what the
    diagonal of the Hessian is raised by, of its mean. act_order: columns in descending order of the diagonal; groups, too, are of columns
    in this order, and the layer has a permutation. block: columns between two products; it changes rounding only.

    Columns that no input reached are rounded to the nearest code. Raises InvalidArgument where the damped Hessian is not positive definite.

    Written as the walk to a near lattice point that it is: with the Hessian H = U U^T, U upper triangular, the square error is the sum over
    i of (U_ii (w_i - q_i) + sum_{j<i} U_ji (w_j - q_j))^2, so q_i is the code nearest to w_i + sum_{j<i} (w_j - q_j) U_ji / U_ii: the
    same numbers as by the paper's inverse, without inverting. Host: k^3 / 3 operations in f64 for U, n k block / 2 multiply-adds in the
    recursion; device: the products between blocks, n k^2 operations in f64, and n k numbers to and fro.
    """
    op = "gptq"
    n, k = _desc(h, op, "w", w, 2).shape
    of, asymmetric = _kind(op, kind, INTEGERS, asymmetric, bits)
    size = _group(op, of, group_size, k)
    damp = _between(op, "damp", damp, 0, 1e6)
    block = check_integer(op, "block", block, 1)
    check_bool(op, "act_order", act_order)
    seen = _statistics(h, op, inputs, k)
    _check_sizes(h, op, "w", w)
    weights = _read(h, w).astype(np.float64).T
    hessian = _read(h, seen.gram).astype(np.float64)

    order = np.argsort(-hessian.diagonal(), kind="stable") if act_order else np.arange(k)
    weights, hessian = np.ascontiguousarray(weights[order]), hessian[np.ix_(order, order)]
    diagonal = np.einsum("ii->i", hessian)  # a view
    unseen = diagonal == 0
    diagonal += damp * diagonal.mean()
    diagonal[unseen] = 1
    try:
        upper = np.linalg.cholesky(hessian[::-1, ::-1])[::-1, ::-1]
    except np.linalg.LinAlgError:
        raise expected(op, "damp", damp, "more: the Hessian is not positive definite") from None
    feedback = upper / upper.diagonal()  # U_ji / U_ii

    groups = -(-k // size)
    codes = np.empty((k, n), np.int64)
    scale, zero = np.empty((groups, n), np.float32), np.zeros((groups, n), np.int64)
    targets = h.array(weights)  # rows are columns of w: w_i and what the blocks before i add to it
    start = 0
    while start < k:
        g = start // size
        stop = min(start + block, (g + 1) * size, k)
        if start == g * size:
            of_group = slice(start, min(start + size, k))
            moved = targets[of_group].numpy() - weights[of_group]
            now = weights[of_group] + np.linalg.solve(feedback[of_group, of_group].T, moved)  # the best if none were rounded from here on
            scale[g], found = _scales(now.min(0), now.max(0), of, asymmetric)
            zero[g] = 0 if found is None else found
        wanted, lost = targets[start:stop].numpy(), np.empty((stop - start, n))
        for i in range(start, stop):
            goal = wanted[i - start] + feedback[start:i, i] @ lost[: i - start]
            codes[i] = np.clip(np.rint(goal / scale[g]) + zero[g], of.low, of.high)
            lost[i - start] = weights[i] - (codes[i] - zero[g]) * scale[g].astype(np.float64)
        if stop < k:
            rest = targets[stop:]
            h.gemm(h.array(feedback[start:stop, stop:]), h.array(lost), transpose_a=True, c=rest, beta=1.0, out=rest)
        start = stop

    zeros = _made(h, zero.T.astype(_zero_type(of)), w) if asymmetric else None
    permutation = _made(h, order.astype(np.int32), w) if act_order else None
    return _layer(_made(h, _stored(codes.T, of), w), _made(h, scale.T, w), zeros, of, size, permutation)


def _stored(codes: np.ndarray, kind: Kind) -> np.ndarray:
    """Codes (n, k) as the kind stores them: of four bits two to a byte, the first in the low half."""
    if not kind.is_packed:
        return codes.astype(kind.storage.numpy)
    pairs = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2))).reshape(len(codes), -1, 2) & 15
    return (pairs[..., 0] | pairs[..., 1] << 4).astype(np.uint8)


class Awq(NamedTuple):
    """layer: of w * input_scale, for x / input_scale (k,), f32. alpha: the exponent chosen. errors: of each trial, as `output_error`."""

    layer: Layer
    input_scale: Any
    alpha: float
    errors: tuple[float, ...]


def awq(h: DnnHandle, w: Any, inputs: Any, kind: str = "s4", *, group_size: int | None = 128, asymmetric: bool | None = None,
        steps: int = 20) -> Awq:
    """The layer of w (n, k) by AWQ (Lin et al. 2023, arXiv 2306.00978): columns of large inputs are scaled up before they are rounded to
    nearest, by s = mean|x|^alpha / sqrt(its largest * its least), with the alpha of 0, 1/steps, ..., 1 that changes x w^T least.

    inputs as of `gptq`; kind, group_size, asymmetric as of `round_to_nearest`, which alpha = 0 is: the result is never worse on the inputs
    given, as f32 tells. The layer takes x / input_scale: fold the factors into what makes x (the norm's gamma, the rows of the layer
    before), or divide. Columns that no input reached have s = 1.
    A trial is a launch each for scaling, codes, numbers and difference, and a product of 2 n k^2 operations with the gram, on the device.
    """
    op = "awq"
    k = _desc(h, op, "w", w, 2).shape[1]
    found, asymmetric = _kind(op, kind, tuple(KINDS), asymmetric)
    _group(op, found, group_size, k)
    steps = check_integer(op, "steps", steps, 1, 10000)
    seen = _statistics(h, op, inputs, k)
    _check_sizes(h, op, "w", w)
    of_all = _energy(h, w, seen.gram)
    mean = _read(h, seen.size_sum).astype(np.float64) / seen.rows
    reached = mean > 0
    errors: list[float] = []
    best: tuple[Layer, Any] | None = None
    for i in range(steps + 1):
        s = np.ones(k)
        if reached.any():
            s[reached] = mean[reached] ** (i / steps)
            s[reached] /= np.sqrt(s[reached].max() * s[reached].min())
        factors = _made(h, s.astype(np.float32), w)
        layer = round_to_nearest(h, h.pointwise("w * s", w, factors, dtype="float32"), kind, group_size=group_size, asymmetric=asymmetric)
        change = h.pointwise("q / s - w", dequantized(h, layer, k), factors, w, dtype="float32")
        errors.append(float(np.sqrt(max(_energy(h, change, seen.gram), 0) / of_all)) if of_all > 0 else 0.0)
        if best is None or errors[-1] < min(errors[:-1]):
            best = layer, factors
    assert best is not None
    return Awq(*best, int(np.argmin(errors)) / steps, tuple(errors))


def smooth(h: DnnHandle, w: Any, inputs: Any, *, alpha: float = 0.5) -> tuple[Any, Any]:
    """(w * s, s) by SmoothQuant (Xiao et al. 2022, arXiv 2211.10438): s = amax|x|^alpha / amax|w|^(1 - alpha) of each of the k inputs moves
    the outliers of x into w, where (x / s) (w * s)^T is x w^T but for rounding; s (k,), f32.

    w: (n, k), or a list of weights that take the same inputs (queries, keys, values), which get one s and come back as a list, each of its
    type. inputs: as of `gptq`; the gram is not needed. alpha: 0 leaves all outliers to x, 1 to w. s is 1 where inputs or weights are all 0.
    Divide x, or fold 1 / s into what makes it: the norm's gamma and beta, or the rows and bias of the layer before.
    """
    op = "smooth"
    several = isinstance(w, (list, tuple))
    matrices = list(w) if several else [w]
    if not matrices:
        raise expected(op, "w", "an empty list", "at least one array")
    descs = [_desc(h, op, f"w[{i}]" if several else "w", m, 2) for i, m in enumerate(matrices)]
    k = descs[0].shape[1]
    for i, desc in enumerate(descs):
        if desc.shape[1] != k:
            raise expected(op, f"columns of w[{i}]", desc.shape[1], f"{k}, as w[0] has")
    alpha = _between(op, "alpha", alpha)
    seen = _statistics(h, op, inputs, k, gram=False)
    of_x = _read(h, seen.amax).astype(np.float64)
    for i, m in enumerate(matrices):
        _check_sizes(h, op, f"w[{i}]" if several else "w", m)
    each = [_read(h, h.reduce(m, "amax", 0)).astype(np.float64) for m in matrices]
    of_w = np.max(each, 0)
    s = np.ones(k)
    both = (of_x > 0) & (of_w > 0)
    s[both] = np.clip(of_x[both] ** alpha / of_w[both] ** (1 - alpha), 2.0**-64, 2.0**64)
    for desc, most in zip(descs, each, strict=True):
        if (most * s).max() > desc.dtype.max:
            raise expected(op, "alpha", alpha, f"less: w * s reaches {(most * s).max():.4g}, beyond {desc.dtype}", describe({"w": desc}))
    factors = _made(h, s.astype(np.float32), matrices[0])
    smoothed = [h.pointwise("w * s", m, factors, dtype=desc.dtype.long_name) for m, desc in zip(matrices, descs, strict=True)]
    return smoothed if several else smoothed[0], factors


# ---- which layers bear it --------------------------------------------------------------------------------------------------------


def sensitivity(h: DnnHandle, layers: Mapping[str, tuple[Any, Any]], kinds: Sequence[str] = ("s4", "s8"), *,
                group_size: int | None = 128) -> dict[str, dict[str, float]]:
    """{name: {kind: error}} of layers {name: (w, inputs)}: `output_error` of each, rounded to nearest in each kind by itself."""
    if not isinstance(layers, Mapping) or not all(isinstance(pair, (tuple, list)) and len(pair) == 2 for pair in layers.values()):
        raise expected("sensitivity", "layers", type(layers).__name__, "a mapping from names to (w, inputs)")
    if isinstance(kinds, str) or not isinstance(kinds, Sequence) or not kinds:
        raise expected("sensitivity", "kinds", repr(kinds), f"some of {', '.join(KINDS)}")
    result = {}
    for name, (w, inputs) in layers.items():
        seen = _statistics(h, "sensitivity", inputs, _desc(h, "sensitivity", f"layers[{name!r}]", w, 2).shape[1])
        result[name] = {kind: output_error(h, w, round_to_nearest(h, w, kind, group_size=group_size), seen) for kind in kinds}
    return result


def mixed_kinds(errors: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int], bits: float) -> dict[str, str]:
    """{name: kind}: kinds of layers with at most `bits` bits a weight on the average, by the errors that `sensitivity` gave.

    sizes: numbers of each layer. All begin with the narrowest kind (of those, the one of least error); then the change that takes the most
    of the sum of squared errors for each bit it costs, of those that fit, until none helps.
    """
    op = "mixed_kinds"
    bits = check_number(op, "bits", bits)
    if bits != bits:
        raise expected(op, "bits", bits, "a number")
    for argument, value in (("errors", errors), ("sizes", sizes)):
        if not isinstance(value, Mapping):
            raise expected(op, argument, type(value).__name__, "a mapping from the names of layers")
    if set(errors) != set(sizes) or not errors:
        raise expected(op, "names of sizes", [*sizes], f"those of errors, {[*errors]}, at least one")
    for name, of in errors.items():
        check_integer(op, f"sizes[{name!r}]", sizes[name], 1)
        if not isinstance(of, Mapping) or not of or not set(of) <= set(KINDS):
            raise expected(op, f"errors[{name!r}]", of, f"a mapping from some of {', '.join(KINDS)} to errors")
        for kind, error in of.items():
            if not np.isfinite(check_number(op, f"errors[{name!r}][{kind!r}]", error)):
                raise expected(op, f"errors[{name!r}][{kind!r}]", error, "a finite number")
    chosen = {name: min(of, key=lambda kind, of=of: (KINDS[kind].bits, of[kind])) for name, of in errors.items()}  # type: ignore[misc]
    left = bits * sum(sizes.values()) - sum(KINDS[kind].bits * sizes[name] for name, kind in chosen.items())
    if left < 0:
        raise expected(op, "bits", bits, "at least those of the narrowest kinds")
    while True:
        best: tuple[float, str, str, float] | None = None
        for name, of in errors.items():
            for kind, error in of.items():
                cost = (KINDS[kind].bits - KINDS[chosen[name]].bits) * sizes[name]
                gain = of[chosen[name]] ** 2 - error**2
                if gain > 0 and 0 < cost <= left and (best is None or gain / cost > best[0]):
                    best = gain / cost, name, kind, cost
        if best is None:
            return chosen
        chosen[best[1]] = best[2]
        left -= best[3]


# ---- pruning ---------------------------------------------------------------------------------------------------------------------


def magnitude_mask(h: DnnHandle, w: Any, sparsity: float, *, axis: int | None = None) -> Any:
    """A mask (bool) of w's shape, False for the fraction `sparsity` of the numbers that are smallest in size: exactly the whole number
    nearest to sparsity times their number; of equal ones the lower index stays. With `axis`, of its whole indices, by their 2-norms
    (structured), and the mask is (extent of axis,). Pruned: h.pointwise("where(mask, w, 0)", mask, w)."""
    op = "magnitude_mask"
    desc = _desc(h, op, "w", w)
    sparsity = _between(op, "sparsity", sparsity)
    _check_sizes(h, op, "w", w)
    if axis is None:
        sizes = np.abs(_read(h, w).astype(np.float64))
    else:
        axis = check_integer(op, "axis", axis, -desc.rank, desc.rank - 1, describe({"w": desc})) % max(desc.rank, 1)
        norms = h.reduce(h.cast(w, "float64"), "norm2", tuple(i for i in range(desc.rank) if i != axis))
        sizes = _read(h, norms)
    kept = _largest(sizes.reshape(1, -1), sizes.size - round(sparsity * sizes.size))
    return _made(h, kept.reshape(sizes.shape), w)


def n_m_mask(h: DnnHandle, w: Any, n: int = 2, m: int = 4) -> Any:
    """A mask (bool) of w's shape, True for the n numbers largest in size of every m neighbours along the last dimension, which m divides;
    of equal ones the lower index stays (2:4 sparsity: Mishra et al. 2021, arXiv 2104.08378)."""
    op = "n_m_mask"
    desc = _desc(h, op, "w", w)
    m = check_integer(op, "m", m, 1)
    n = check_integer(op, "n", n, 0, m)
    if desc.rank == 0 or desc.shape[-1] % m:
        raise expected(op, "shape of w", list(desc.shape), f"a last extent that {m} divides")
    _check_sizes(h, op, "w", w)
    return _made(h, _largest(np.abs(_read(h, w).astype(np.float64)).reshape(-1, m), n).reshape(desc.shape), w)


def _largest(sizes: np.ndarray, count: int) -> np.ndarray:
    """True for the `count` largest of each row; of equal ones for the lower index."""
    kept = np.zeros(sizes.shape, bool)
    np.put_along_axis(kept, np.argsort(-sizes, axis=1, kind="stable")[:, :count], True, axis=1)
    return kept
