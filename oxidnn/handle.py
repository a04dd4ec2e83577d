"""DnnHandle: a device, its caches and policies, and one thin method per op.

Shapes are logical everywhere: (N, C, spatial) for activations, (K, C/groups, spatial) for filters; how a tensor lies in memory is in
its strides. Array arguments are anything with DLPack or __cuda_array_interface__ (torch, cupy, jax, DeviceArray), and NumPy arrays on
an emulated device. Results come back in the framework of the first array, on its device, in the order of its stream. Every method
takes `out=` (written in place of a fresh result) and `stream=`. Bad arguments raise InvalidArgument, what no engine takes raises
Unsupported; either way nothing was launched and nothing written.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache, wraps
from math import prod
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from . import report, switches
from .array import DeviceArray, empty, from_numpy, zeros
from .codegen.pointwise import Expression, acc, arg, parse
from .device import DeviceInfo, parse_device
from .dispatch.optimisers import ListOps
from .dispatch.planning import plan_for
from .dispatch.select import Explanation
from .dispatch.session import POLICY, BoundPlan, Call, Session, hashable, signed
from .dispatch.tuning_db import TuningDb
from .dtypes import dtype as dtype_of
from .errors import InvalidArgument, expected
from .ops import OPS
from .ops.base import MATH, Policy, Problem
from .ops.case import near, parse_case
from .ops.checks import check_bool, check_choice, check_integer, check_number
from .ops.epilogue import activation_gradient, activation_of, batch_norm_epilogue
from .ops.layout import CONCAT_INPUTS, MAX_PARTS, MAX_RANK
from .ops.pointwise import output_names_of
from .runtime.backend import Backend
from .tensor import TensorDesc

TUNE = ("off", "db", "auto", "force")
_T = TypeVar("_T")

# The signatures of the methods are the ops' rows; pointwise's are its expressions', steps over lists have their own.
CALLS: dict[str, Call] = {op: Call(op, row.inputs, row.attrs) for op, row in OPS.items() if row.outputs and op != "pointwise"}
for _op, _given_as in {"attention_backward": ("gradients",), "multi_head_attention_backward": ("gradients",),
                       "kv_cache_append": ("k_cache", "v_cache", "q_out")}.items():
    CALLS[_op] = replace(CALLS[_op], given_as=_given_as)
# Its results are its caches: their shapes come from the arrays given for them, never from the inputs.
CALLS["kv_cache_append"] = replace(CALLS["kv_cache_append"], outputs=OPS["kv_cache_append"].outputs)


# What PyTorch calls these arguments.
_NAMES_ELSEWHERE = {"dim": ("axis", "axes"), "kernel_size": ("window", "kernel"), "scale_factor": ("scales",), "weight": ("w", "gamma"),
                    "input": ("x",), "keepdim": ("keepdims",), "groups": ("groups",), "size": ("sizes", "output_size")}


def _check_window(op: str, window: Any) -> None:
    """Refuses True and False, which a key would take for 1 and 0."""
    if isinstance(window, (tuple, list)) and any(isinstance(w, bool) for w in window):
        raise expected(op, "window", repr(window), "(left, right): keys on either side, each None or an integer in 0 to 2^30")


def _check_routing(op: str, renormalize: Any, scaling_factor: Any, **integers: Any) -> None:
    """Refuses True and False for numbers, and numbers for them: a key would not tell them apart."""
    check_bool(op, "renormalize", renormalize)
    check_number(op, "scaling_factor", scaling_factor)
    for name, value in integers.items():
        if isinstance(value, (bool, np.bool_)):
            check_integer(op, name, value, 0 if name == "capacity" else 1)


def _refuses(method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, with InvalidArgument in the place of Python's TypeError for arguments that are not in its signature."""
    name = method.__name__.replace("__init__", "DnnHandle")

    @wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return method(*args, **kwargs)
        except TypeError as error:
            parameters = inspect.signature(method).parameters
            try:
                inspect.signature(method).bind(*args, **kwargs)
            except TypeError as reason:
                names = [n for n in parameters if n != "self"]
                unknown = [k for k in kwargs if k not in names]
                same = [n for n in _NAMES_ELSEWHERE.get(unknown[0], ()) if n in names] if unknown else []
                hint = near(same[0] if same else unknown[0], names) if unknown else ""
                hint = hint if "did you mean" in hint else ""
                raise InvalidArgument(f"{name}: {reason}{hint} (expected {', '.join(names)}).") from None
            raise error

    return call


def _refusing(handle: type[_T]) -> type[_T]:
    """Every public method of the class, inherited ones too, says what is wrong with its arguments by InvalidArgument."""
    for name, method in inspect.getmembers(handle, inspect.isfunction):
        if name == "__init__" or not name.startswith("_"):
            setattr(handle, name, _refuses(method))
    return handle


@_refusing
class DnnHandle(ListOps):
    """oxidnn on one device.

    device: None (OXIDNN_DEVICE, else cuda:0, else the emulator with one warning), "cuda:N", "emu:sm_XY".
    stream: the raw stream for frameworks that have none (default: the legacy default stream).
    deterministic: only engines that give the same bits run to run. math: f32 arithmetic of convolution and GEMM, "ieee" | "tf32" |
    "tf32x3" | "bf16x3" | "fast". tune: "off" estimates only | "db" tuning database, else estimates | "auto" measures each new
    problem once | "force" always measures. workspace_limit: most scratch bytes of a plan. cache_dir: cubins and tuning database.

    Concurrency: one handle may serve several threads. Options set by `options()` hold for the calling context only.
    """

    def __init__(self, device: str | None = None, *, stream: int | None = None, deterministic: bool | None = None, math: str | None = None,
                 tune: str | None = None, workspace_limit: int | None = None, cache_dir: str | Path | None = None) -> None:
        tune = tune or switches.get("OXIDNN_TUNE")
        if tune not in TUNE:
            raise expected("DnnHandle", "tune", repr(tune), " | ".join(TUNE))
        if deterministic is None:
            deterministic = switches.get("OXIDNN_DETERMINISTIC") == "1"
        policy = _checked(Policy(deterministic, math or switches.get("OXIDNN_MATH"), workspace_limit))
        backend = open_backend(device, cache_dir)
        stream = backend.default_stream() if stream is None else stream
        self._session = Session(backend, policy=policy, tune=tune, db=TuningDb.open(cache_dir), stream=stream)

    def __repr__(self) -> str:
        return f"DnnHandle({self.device!r}: {self.info.name})"

    # ---- device and memory ----------------------------------------------------------------------------------------------------

    @property
    def device(self) -> str:
        """ "cuda:N", or "emu"."""
        return self._session.backend.device

    @property
    def info(self) -> DeviceInfo:
        """What is known of the device: architecture, SMs, memory, rates."""
        return self._session.info

    def array(self, host: Any, dtype: Any = None, layout: str = "nchw") -> DeviceArray:
        """A DeviceArray holding a copy of `host` (anything np.asarray takes), converted to `dtype`, lying in `layout`."""
        try:
            host = np.asarray(host)
        except ValueError as error:
            raise expected("array", "host", "a ragged sequence", "anything np.asarray takes", str(error)) from None
        return from_numpy(self._session.backend, host, dtype_of(host.dtype if dtype is None else dtype), layout, self._session.stream)

    def empty(self, shape: Sequence[int], dtype: Any = "float32", layout: str = "nchw") -> DeviceArray:
        """An uninitialised DeviceArray."""
        return empty(self._session.backend, TensorDesc.packed(dtype_of(dtype), _extents("empty", shape), layout), self._session.stream)

    def zeros(self, shape: Sequence[int], dtype: Any = "float32", layout: str = "nchw") -> DeviceArray:
        """A DeviceArray of zeros."""
        return zeros(self._session.backend, TensorDesc.packed(dtype_of(dtype), _extents("zeros", shape), layout), self._session.stream)

    def synchronize(self, stream: int | None = None) -> None:
        """Waits for everything enqueued on the stream."""
        self._session.backend.synchronize(self._session.stream if stream is None else stream)

    # ---- policy, plans, explanation --------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def options(self, **changes: Any) -> Iterator[None]:
        """Within the `with` block, and in this context only: deterministic=, math=, workspace_limit= as in the constructor."""
        current = self._session.current_policy()
        try:
            policy = _checked(replace(current, **changes))
        except TypeError:
            raise expected("options", "argument", sorted(changes), "deterministic, math, workspace_limit") from None
        token = POLICY.set({**(POLICY.get() or {}), id(self._session): policy})
        try:
            yield
        finally:
            POLICY.reset(token)

    def plan(self, op: str, /, *arrays: Any, out: Any = None, operands: Mapping[str, Any] | None = None, **attrs: Any) -> BoundPlan:
        """The bound plan of `op` on arrays like these: `plan(x, w, out=y)` then runs with no look-up, legally under graph capture.

        operands: further named operands of an epilogue; they follow the arrays when it is called. An expression's scalars are given by
        name with every call, and may not be called out or stream. Of "pointwise" the first argument is the expression.
        """
        call, padded, values = _signature(op, arrays, attrs)
        return self._session.plan(call, padded, values, out, operands)

    def explain(self, op: str, /, *arrays: Any, operands: Mapping[str, Any] | None = None, **attrs: Any) -> Explanation:
        """Which engines take the problem, why the others do not, what they are estimated and measured at, and which is chosen."""
        call, padded, values = _signature(op, arrays, attrs)
        return self._session.explain(call, padded, values, operands)

    def warmup(self, problems: str | Problem | Iterable[str | Problem]) -> int:
        """Builds the plans of problems (or lines of the case grammar) ahead of time, so their cubins are stored; with tune="auto"
        measures them. Returns how many were built."""
        count = 0
        for problem in (problems,) if isinstance(problems, (str, Problem)) else problems:
            if not isinstance(problem, (str, Problem)):
                raise expected("warmup", "problems", repr(problem), "lines of the case grammar or Problems")
            if isinstance(problem, str):
                problem = parse_case(problem)
            if not problem.is_empty:
                plan_for(problem, self._session.backend, tune=self._session.tune, db=self._session.db)
                count += 1
        return count

    # ---- convolution (1 to 3 spatial dimensions, by rank) ------------------------------------------------------------------------

    def conv(self, x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
             epilogue: Any = None, residual: Any = None, flip: bool = False, scale_x: Any = None, scale_w: Any = None, scale_y: Any = None,
             zero_x: Any = None, zero_w: Any = None, zero_y: Any = None, out_dtype: Any = None, saturate: bool = True,
             prologue: Any = None, return_stats: bool = False, return_amax: bool = False, operands: Mapping[str, Any] | None = None,
             scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """y[n,k,p] = epilogue(sum over c, r of x[n,c,p*stride - padding + r*dilation] * w[k,c,r]): cross-correlation.

        x (N, C, spatial), w (K, C/groups, spatial), bias (K,), residual of y's shape. padding: int, one per dimension, (low, high)
        pairs, "same" (PyTorch's; also "same_upper"), "same_lower" or "valid". epilogue: an expression over acc, bias, residual and
        `operands` ("relu", "bias_relu", "relu(acc * scale + bias)"); bias alone is added. scalars: values of its scalar(name)s. flip:
        true convolution (taps reversed). out_dtype: of y, by default x's type; of floats also e4m3, e5m2 and s8, which
        saturate ("acc * scale").

        An epilogue of two outputs, e.g. "relu(t := acc + bias), t", gives both. return_stats: then also the count (1,), mean and sum of
        squares about it (C,), f32 or of f64 f64, of each channel of y as it is stored, the same bits on every run: what `batch_norm_stats`
        gives of y and `batch_norm_gather` takes. return_amax (not of integers nor f64): then, last, the largest size of what y's elements
        were before scale_y and rounding, () f32, NaN if one was: what `delayed_scale` takes. prologue: an expression over x and
        `operands`, vectors (C,), that is summed in the place of x, rounded to its type or not: "relu(x * scale + shift)"; padding stays
        zero.

        Of 8-bit types x and w are e4m3 and e5m2 (y in bf16 by default, also in floats and in these types), or s8 and u8, in any mix: sums
        are exact (modulo 2^32) and y is s32 where nothing is done to them, else f32 by default. scale_x (one element), scale_w (one, or
        (K,)), f32, multiply x and w. zero_x, zero_w, of their types, are taken from integers; padding stands for x's zero point. An s32
        bias is added to the sum before scales and epilogue, which cannot name it. scale_y, zero_y (one element): y is a type of 8 bits,
        round(result / scale_y) + zero_y, saturated, or of integers modulo 256 with saturate=False (results below 2^24).

        Of infinities only the engines of plain sums make infinities. Winograd (f32, 3x3) makes NaN of outputs that see one; FFT (f32, 4
        taps along an axis and more) of its whole tile, of whose norm its errors are fractions; block_diagonal (16 bits) of all the
        groups that it merges. `explain` says who is chosen.
        """
        attrs = (stride, padding, dilation, groups, epilogue, flip)
        is_plain = scale_x is scale_w is scale_y is zero_x is zero_w is zero_y is out_dtype is prologue is None
        if is_plain and saturate and not return_stats and not return_amax:
            return self._session.run(_CONV, (x, w, bias, residual), attrs, out, stream, scalars, operands)
        arrays = (x, w, bias, residual, scale_x, scale_w, scale_y, zero_x, zero_w, zero_y)
        more = (out_dtype, saturate, prologue, return_stats, return_amax)
        return self._session.run(CALLS["conv_fprop"], arrays, (*attrs, *more), out, stream, scalars, operands)

    def conv_batch_norm(self, x: Any, w: Any, running_mean: Any, running_var: Any, gamma: Any = None, beta: Any = None, *,
                        eps: float = 1e-5, activation: str | None = "relu", residual: Any = None, stride: Any = 1, padding: Any = 0,
                        dilation: Any = 1, groups: int = 1, out_dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """activation((conv(x, w) - running_mean) / sqrt(running_var + eps) * gamma + beta + residual), the inference of convolution, batch
        norm and activation, in one launch: statistics, gamma and beta (K,), residual of y's shape; activation: None, the name of a function
        ("relu", "relu6", "silu", "hard_swish") or an expression over x. The rest as of `conv`."""
        eps = check_number("conv_batch_norm", "eps", eps)
        operands = {n: a for n, a in (("running_mean", running_mean), ("running_var", running_var), ("gamma", gamma), ("beta", beta))
                    if a is not None}
        epilogue = batch_norm_epilogue("conv_batch_norm", eps, activation, (*operands, *(("residual",) if residual is not None else ())))
        return self.conv(x, w, residual=residual, stride=stride, padding=padding, dilation=dilation, groups=groups, epilogue=epilogue,
                         out_dtype=out_dtype, operands=operands, out=out, stream=stream)

    def depthwise_separable_conv(self, x: Any, depthwise: Any, pointwise: Any, depthwise_norm: Sequence[Any] | None = None,
                                 pointwise_norm: Sequence[Any] | None = None, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
                                 depthwise_activation: str | None = "relu", pointwise_activation: str | None = "relu", eps: float = 1e-5,
                                 residual: Any = None, out: Any = None, stream: Any = None) -> Any:
        """A depthwise convolution (filters (C * m, 1, spatial) with any multiplier m) and a pointwise one (K, C * m, 1...), each with what
        follows it in the same launch: batch norm by (running_mean, running_var, gamma, beta), if given, then its activation; the residual
        is added before the last one."""
        def one(x: Any, w: Any, norm: Sequence[Any] | None, activation: str | None, **more: Any) -> Any:
            if norm is not None:
                return self.conv_batch_norm(x, w, *norm, eps=eps, activation=activation, stream=stream, **more)
            name = "depthwise_separable_conv"
            value = acc if more.get("residual") is None else acc + arg("residual")
            return self.conv(x, w, epilogue=value if activation is None else activation_of(name, activation).substitute({"x": value}),
                             stream=stream, **more)

        between = one(x, depthwise, depthwise_norm, depthwise_activation, stride=stride, padding=padding, dilation=dilation,
                      groups=self._session.checked_view("depthwise_separable_conv", "x", x).desc.shape[1])
        return one(between, pointwise, pointwise_norm, pointwise_activation, residual=residual, out=out)

    def conv_dgrad(self, dy: Any, w: Any, x_shape: Sequence[int], *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
                   epilogue: Any = None, flip: bool = False, scale_dy: Any = None, scale_w: Any = None, scale_dx: Any = None,
                   out_dtype: Any = None, saturate: bool = True, operands: Mapping[str, Any] | None = None,
                   scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """dx of shape x_shape: the gradient of `conv` with respect to x; epilogue: over acc, `operands` and `scalars`. Of 8-bit types as
        `conv`, scale_w being one element or (C,)."""
        attrs = (_shape(x_shape), stride, padding, dilation, groups, epilogue, flip, out_dtype, saturate)
        return self._session.run(CALLS["conv_dgrad"], (dy, w, scale_dy, scale_w, scale_dx), attrs, out, stream, scalars, operands)

    def conv_dgrad_activation(self, dy: Any, w: Any, saved: Any, activation: str, *, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
                              groups: int = 1, flip: bool = False, out_dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """The gradient of conv(activation(saved), w) with respect to saved, in one launch: dgrad times the activation's derivative.
        activation: "relu", "silu", "gelu", ..., or an expression over x. Of relu, saved may be the activation's result."""
        name = "conv_dgrad_activation"
        shape = self._session.checked_view(name, "saved", saved).desc.shape
        return self.conv_dgrad(dy, w, shape, stride=stride, padding=padding, dilation=dilation, groups=groups, flip=flip,
                               epilogue=activation_gradient(name, activation), out_dtype=out_dtype, operands={"saved": saved}, out=out,
                               stream=stream)

    def conv_wgrad(self, x: Any, dy: Any, w_shape: Sequence[int], *, stride: Any = 1, padding: Any = 0, dilation: Any = 1, groups: int = 1,
                   flip: bool = False, scale_x: Any = None, scale_dy: Any = None, out_dtype: Any = None, prologue: Any = None,
                   return_bias_grad: bool = False, operands: Mapping[str, Any] | None = None, out: Any = None, stream: Any = None) -> Any:
        """dw of shape w_shape: the gradient of `conv` with respect to w; with return_bias_grad also db (K,), of dw's type, as
        `conv_bgrad`. prologue: the forward's. Of 8-bit types as `conv`, scales being single elements."""
        attrs = (_shape(w_shape), stride, padding, dilation, groups, flip, out_dtype, prologue, return_bias_grad)
        return self._session.run(CALLS["conv_wgrad"], (x, dy, scale_x, scale_dy), attrs, out, stream, None, operands)

    def conv_bgrad(self, dy: Any, *, out: Any = None, stream: Any = None) -> Any:
        """db (K,): dy summed over everything but channels."""
        return self._session.run(CALLS["conv_bgrad"], (dy,), (), out, stream)

    def conv_transpose(self, x: Any, w: Any, bias: Any = None, *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
                       dilation: Any = 1, groups: int = 1, epilogue: Any = None, flip: bool = False, scale_x: Any = None,
                       scale_w: Any = None, scale_y: Any = None, zero_y: Any = None, out_dtype: Any = None, saturate: bool = True,
                       return_stats: bool = False, return_amax: bool = False, operands: Mapping[str, Any] | None = None,
                       scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """Transposed convolution: x (N, C, spatial), w (C, K/groups, spatial), y of extent (L-1)*stride - 2*padding + dilation*(r-1) + 1 +
        output_padding; PyTorch's conventions. The rest as of `conv`."""
        attrs = (stride, padding, dilation, groups, output_padding, epilogue, flip, out_dtype, saturate, return_stats, return_amax)
        arrays = (x, w, bias, scale_x, scale_w, scale_y, zero_y)
        return self._session.run(CALLS["conv_transpose"], arrays, attrs, out, stream, scalars, operands)

    def conv_transpose_dgrad(self, dy: Any, w: Any, x_shape: Sequence[int], *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
                             dilation: Any = 1, groups: int = 1, epilogue: Any = None, flip: bool = False, scale_dy: Any = None,
                             scale_w: Any = None, scale_dx: Any = None, out_dtype: Any = None, saturate: bool = True,
                             operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
                             stream: Any = None) -> Any:
        """dx of shape x_shape: the gradient of `conv_transpose` with respect to x. Of 8-bit types as `conv`."""
        attrs = (_shape(x_shape), stride, padding, dilation, groups, output_padding, epilogue, flip, out_dtype, saturate)
        return self._session.run(CALLS["conv_transpose_dgrad"], (dy, w, scale_dy, scale_w, scale_dx), attrs, out, stream, scalars, operands)

    def conv_transpose_wgrad(self, x: Any, dy: Any, w_shape: Sequence[int], *, stride: Any = 1, padding: Any = 0, output_padding: Any = 0,
                             dilation: Any = 1, groups: int = 1, flip: bool = False, scale_x: Any = None, scale_dy: Any = None,
                             out_dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """dw of shape w_shape: the gradient of `conv_transpose` with respect to w. 8-bit types as of `conv_wgrad`."""
        attrs = (_shape(w_shape), stride, padding, dilation, groups, output_padding, flip, out_dtype)
        return self._session.run(CALLS["conv_transpose_wgrad"], (x, dy, scale_x, scale_dy), attrs, out, stream)

    def deform_conv(self, x: Any, offset: Any, w: Any, bias: Any = None, *, mask: Any = None, stride: Any = 1, padding: Any = 0,
                    dilation: Any = 1, groups: int = 1, out: Any = None, stream: Any = None) -> Any:
        """Deformable convolution of x (N, C, H, W): tap r of position p reads x at p*stride - padding + r*dilation + its own offset, linear
        between pixels, 0 outside, and times its mask where there is one (DCNv2). torchvision's and ONNX's conventions.

        offset (N, 2*D*R*S, P, Q): along H, along W, of each tap in turn; mask (N, D*R*S, P, Q); D groups of channels have offsets of their
        own. w (K, C/groups, R, S), bias (K,). offset and mask: of x's type, or f32. Workspace: C*R*S*P*Q elements an image.
        """
        return self._session.run(CALLS["deform_conv"], (x, offset, w, mask, bias), (stride, padding, dilation, groups), out, stream)

    def deform_conv_backward(self, dy: Any, x: Any, offset: Any, w: Any, *, mask: Any = None, stride: Any = 1, padding: Any = 0,
                             dilation: Any = 1, groups: int = 1, bias_gradient: bool = False, out: Any = None, stream: Any = None) -> Any:
        """(dx, doffset, dw), then dmask with a mask, then dbias under bias_gradient: the gradients of `deform_conv`, the same bits on every
        run. Where an offset is a whole number its gradient is that of a slightly larger one."""
        attrs = (stride, padding, dilation, groups, bias_gradient)
        return self._session.run(CALLS["deform_conv_backward"], (dy, x, offset, w, mask), attrs, out, stream)

    def causal_conv1d(self, x: Any, w: Any, bias: Any = None, *, state: Any = None, activation: str | None = None,
                      return_state: bool = False, out: Any = None, stream: Any = None) -> Any:
        """y[b, d, l] = activation(bias[d] + sum over k of w[d, k] * x[b, d, l - (W - 1) + k]): every channel by taps of its own past.

        x (B, D, L), either dimension innermost; w (D, W), W from 2 to 16; bias (D,); state (B, D, W-1): the elements before the first, the
        oldest first (default zeros). activation: None or "silu". return_state: (y, final_state), the state that the next part begins with.
        w, bias and states: of x's type, or f32.
        """
        return self._session.run(CALLS["causal_conv1d"], (x, w, bias, state), (activation, return_state), out, stream)

    def causal_conv1d_update(self, x: Any, state: Any, w: Any, bias: Any = None, *, activation: str | None = None, out: Any = None,
                             stream: Any = None) -> Any:
        """(y, new_state): `causal_conv1d` of the next element x (B, D), or the next few (B, D, L), L up to 16. out=(y, state) updates the
        state in place."""
        return self._session.run(CALLS["causal_conv1d_update"], (x, state, w, bias), (activation,), out, stream)

    def causal_conv1d_backward(self, dy: Any, x: Any, w: Any, bias: Any = None, *, state: Any = None, d_final_state: Any = None,
                               activation: str | None = None, out: Any = None, stream: Any = None) -> Any:
        """(dx, dw), then dbias with a bias, then dstate with a state: the gradients of `causal_conv1d`, the same bits on every run."""
        return self._session.run(CALLS["causal_conv1d_backward"], (dy, x, w, bias, state, d_final_state), (activation,), out, stream)

    def conv_reorder(self, w: Any, *, use: str = "fprop", out: Any = None, stream: Any = None) -> Any:
        """Filters in the order that tensor-core loops want, for weights used many times: of w's shape and type, the order in its strides.

        use: "fprop" (K, taps, channels innermost: for `conv` and conv_transpose_dgrad) or "dgrad" (C, taps, filters innermost: for
        conv_dgrad and `conv_transpose`). A gap up to a multiple of 16 bytes follows the innermost dimension. Every convolution takes the
        result as it takes w; 8-bit ones run on tensor cores with it.
        """
        return self._session.run(CALLS["conv_reorder"], (w,), (use,), out, stream)

    # ---- matrix products ---------------------------------------------------------------------------------------------------------

    def gemm(self, a: Any, b: Any, bias: Any = None, *, transpose_a: bool = False, transpose_b: bool = False, alpha: float = 1.0,
             beta: float = 0.0, c: Any = None, epilogue: Any = None, scale_a: Any = None, scale_b: Any = None, gate: str | None = None,
             out_dtype: Any = None, operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
             stream: Any = None) -> Any:
        """epilogue(alpha * op(a) @ op(b) + beta * c), with leading batch dimensions broadcast; bias (N,) along the last dimension.

        a and b: f64, f32, f16 or bf16 alike; e4m3 and e5m2 in any mix (default result bf16); s8 and u8 in any mix (result s32, exact
        modulo 2^32, unless something is done to it: then f32). scale_a, scale_b (f32) multiply a and b: one element, (M,) or (N,) of
        rows of op(a) and columns of op(b), or of 8-bit types a matrix of blocks of 128: (M or M/128, K/128) of op(a), (K/128, N or
        N/128) of op(b), rounded up. gate: "silu", "gelu", "sigmoid", ...: gate(z[..., :N/2]) * z[..., N/2:] of z = alpha * op(a) @ op(b)
        + bias. out_dtype: the result's type. An epilogue of two outputs, e.g. "relu(t := acc + bias), t", gives both.
        """
        attrs = (transpose_a, transpose_b, alpha, beta, epilogue, gate, out_dtype)
        return self._session.run(_GEMM, (a, b, bias, c, scale_a, scale_b), attrs, out, stream, scalars, operands)

    def grouped_gemm(self, a: Any, b: Any, group_sizes: Any, *, transpose_b: bool = False, cumulative: bool = False,
                     gate: str | None = None, out_dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """a[r] @ b[g] for each row r of group g: a (T, K), its rows sorted by group; b (G, K, N), or (G, N, K) with transpose_b. (T, N).

        group_sizes (G,), int32 or int64, stays on the device: rows of each group, 0 allowed; with cumulative=True the row where each group
        ends. Sizes below 0 count as 0, groups end with the rows of a, and rows of no group give zeros. Types and gates as of gemm. The
        gradient of a (without a gate) is grouped_gemm(dy, b, group_sizes, transpose_b=not transpose_b), that of b is grouped_gemm_wgrad.
        """
        return self._session.run(CALLS["grouped_gemm"], (a, b, group_sizes), (transpose_b, cumulative, gate, out_dtype), out, stream)

    def grouped_gemm_wgrad(self, a: Any, b: Any, group_sizes: Any, *, cumulative: bool = False, out_dtype: Any = None, out: Any = None,
                           stream: Any = None) -> Any:
        """a[rows of g].T @ b[rows of g] for each group g: a (T, M), b (T, N) -> (G, M, N); zeros for a group without rows. The gradient of
        grouped_gemm's b from (a, dy) as (G, K, N), from (dy, a) as (G, N, K)."""
        return self._session.run(CALLS["grouped_gemm_wgrad"], (a, b, group_sizes), (cumulative, out_dtype), out, stream)

    def quantized_linear(self, x: Any, w: Any, scale: Any, zero_point: Any = None, bias: Any = None, *, kind: str,
                         group_size: int | None = None, permutation: Any = None, epilogue: Any = None, out_dtype: Any = None,
                         operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
                         stream: Any = None) -> Any:
        """x @ W.T + bias of quantised weights, W[n, k] = (w[n, k] - zero_point) * scale: x (..., K), f16, bf16 or f32 -> (..., N).

        kind: "s4", "u4", "nf4": w is u8 (N, K/2 rounded up), two numbers a byte, the first in the low half; "s8", "e4m3": w (N, K) of that
        type. scale (f32, f16, bf16): one element, (N,), or (N, groups) of group_size neighbours along K (default: K / groups, of nf4 64).
        zero_point: integers of scale's shape, u8 or s8 (s8 of kind "s8"; none of nf4 and e4m3), of 4-bit kinds from -64 to 64. permutation
        (s32, K): column j of W meets x[..., permutation[j]] (GPTQ's act-order). bias (N,); epilogue over "acc" as of `gemm`.
        Where x is to be of 8 bits too: q, s = quantize(x, kind, "token"), then gemm(q, w, transpose_b=True, scale_a=s, scale_b=scale).
        """
        attrs = (kind, group_size, epilogue, out_dtype)
        return self._session.run(CALLS["quantized_linear"], (x, w, scale, zero_point, bias, permutation), attrs, out, stream, scalars,
                                 operands)

    def repack_gptq(self, qweight: Any, qzeros: Any, scales: Any, permutation: Any = None, *, zero_offset: int | None = None,
                    out: Any = None, stream: Any = None) -> Any:
        """(w, scale, zero_point) for `quantized_linear` of kind "u4": GPTQ's 4-bit weights.

        qweight s32 (K/8, N), qzeros s32 (groups, N/8 rounded up), scales (groups, N). zero_offset: what is added to the zero points: 1
        (default; the format of AutoGPTQ) or 0 (its second version). permutation (s32, K), with act-order: g_idx's stable argsort, which
        `quantized_linear` then takes as well.
        """
        return self._session.run(CALLS["repack_gptq"], (qweight, qzeros, scales, permutation), (zero_offset,), out, stream)

    def repack_awq(self, qweight: Any, qzeros: Any, scales: Any, *, zero_offset: int | None = None, out: Any = None,
                   stream: Any = None) -> Any:
        """(w, scale, zero_point) for `quantized_linear` of kind "u4": AWQ's 4-bit weights, qweight s32 (K, N/8), qzeros s32 (groups, N/8),
        scales (groups, N). zero_offset: what is added to the zero points (default 0)."""
        return self._session.run(CALLS["repack_awq"], (qweight, qzeros, scales), (zero_offset,), out, stream)

    # ---- mixture of experts ------------------------------------------------------------------------------------------------------

    def moe_route(self, logits: Any, bias: Any = None, *, top_k: int, scoring: str = "softmax", renormalize: bool = True,
                  scaling_factor: float = 1.0, groups: int = 1, top_groups: int | None = None, group_score: str = "top2",
                  capacity: int | None = None, out: Any = None, stream: Any = None) -> Any:
        """(ids (T, K) int32, weights (T, K) float32, counts (E,) int32) of logits (T, E), float32, float16 or bfloat16, at most 1024
        experts.

        The experts of a token are the top_k (at most 32) of score + bias (bias (E,) float32), the lower index first among equals, NaN
        last; scoring "softmax" or "sigmoid". groups, top_groups: only those of the top_groups best of so many groups of neighbours, of
        which group_score "top2" adds up the two best experts and "max" takes the best (DeepSeek-V3: scoring="sigmoid", bias, groups=8,
        top_groups=4, scaling_factor=2.5). weights: scores without bias, divided by their sum if renormalize, times scaling_factor.
        capacity: what comes, in the order of tokens, after so many assignments of an expert has weight 0 and the id ~id, which
        moe_permute and moe leave out. counts: assignments of each expert, those dropped counted; weights of the others stay as they are.
        """
        _check_routing("moe_route", renormalize, scaling_factor, top_k=top_k, groups=groups, top_groups=top_groups, capacity=capacity)
        attrs = (top_k, scoring, renormalize, scaling_factor, groups, top_groups, group_score, capacity)
        return self._session.run(CALLS["moe_route"], (logits, bias), attrs, out, stream)

    def moe_route_backward(self, dweights: Any, logits: Any, ids: Any, *, scoring: str = "softmax", renormalize: bool = True,
                           scaling_factor: float = 1.0, out: Any = None, stream: Any = None) -> Any:
        """dlogits (T, E) in the type of logits: the gradient of moe_route's weights; ids and attributes as of the forward."""
        _check_routing("moe_route_backward", renormalize, scaling_factor)
        return self._session.run(CALLS["moe_route_backward"], (dweights, logits, ids), (scoring, renormalize, scaling_factor), out, stream)

    def moe_losses(self, logits: Any, counts: Any, *, scoring: str = "softmax", out: Any = None, stream: Any = None) -> Any:
        """(balance, z), float32 numbers: E * sum over e of counts[e] / counts.sum() * mean over tokens of the share of e (softmax, or
        sigmoids divided by their sum), 1 where all are busy alike (Switch); and the mean of logsumexp(logits)^2. counts (E,) int32:
        moe_route's."""
        return self._session.run(CALLS["moe_losses"], (logits, counts), (scoring,), out, stream)

    def moe_losses_backward(self, dbalance: Any, dz: Any, logits: Any, counts: Any, *, scoring: str = "softmax", out: Any = None,
                            stream: Any = None) -> Any:
        """dlogits (T, E), in the type of logits, of `moe_losses`; dbalance and dz: float32 numbers on the device. counts has no
        gradient."""
        return self._session.run(CALLS["moe_losses_backward"], (dbalance, dz, logits, counts), (scoring,), out, stream)

    def moe_permute(self, x: Any, ids: Any, *, experts: int, first_expert: int = 0, out: Any = None, stream: Any = None) -> Any:
        """(xs, order, inverse, counts): the rows of x (T, H), of any type but bool, copied to the order of the experts that they go
        to, `ids` (T, K).

        Assignment t * K + k is row inverse[t, k] of xs (T * K, H), order[row] that assignment, counts[e] the rows of expert e; all int32.
        Rows of an expert keep their order. ids outside of [first_expert, first_expert + experts) are of no expert here: their rows come
        last, inverse and order hold the complements (~row, ~assignment). One device does it all: counts never visit the host. ids int32
        or int64, K at most 32, at most 4096 experts. The gradient of x is moe_unpermute(dxs, inverse), of all types of floats.
        """
        return self._session.run(CALLS["moe_permute"], (x, ids), (experts, first_expert), out, stream)

    def moe_unpermute(self, ys: Any, inverse: Any, weights: Any = None, *, out: Any = None, stream: Any = None) -> Any:
        """y (T, H): the sum over k, in turn and in f32 (f64), of weights[t, k] * ys[inverse[t, k]]; without weights plain sums. What is no
        row of ys (inverse below 0: of no expert) adds nothing. weights: float32, float64 beside float64."""
        return self._session.run(CALLS["moe_unpermute"], (ys, inverse, weights), (), out, stream)

    def moe_unpermute_backward(self, dy: Any, ys: Any, inverse: Any, weights: Any, *, out: Any = None, stream: Any = None) -> Any:
        """(dys, dweights) of `moe_unpermute`; 0 of no expert. inverse as moe_permute makes it: each row, or its complement, once. What is
        beyond the rows has dweights of 0; rows that inverse does not name are not written."""
        return self._session.run(CALLS["moe_unpermute_backward"], (dy, ys, inverse, weights), (), out, stream)

    def moe(self, x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any, *, activation: str = "silu", first_expert: int = 0,
            out: Any = None, stream: Any = None) -> Any:
        """y[t] = sum over k of weights[t, k] * (activation(x[t] Wg^T) * (x[t] Wu^T)) Wd^T with the matrices of expert ids[t, k].

        x (T, H); ids (T, K), int32 or int64; weights (T, K), float32 (float64 beside float64); w_gate_up (E, 2 * I, H), Wg above Wu; w_down
        (E, H, I), both of x's type. Any counts, an expert without rows or with all of them; always the same bits. What lies between the
        products is rounded to x's type. ids of no expert here (as of moe_permute) add nothing: with first_expert and a part of the
        experts on each device, results are added up over devices. activation: as the gates of gemm.
        """
        return self._session.run(CALLS["moe"], (x, ids, weights, w_gate_up, w_down), (activation, first_expert), out, stream)

    def moe_quantized(self, x: Any, ids: Any, weights: Any, w_gate_up: Any, scale_gate_up: Any, w_down: Any, scale_down: Any, *,
                      block: Any = (1, 128), activation: str = "silu", first_expert: int = 0, out: Any = None, stream: Any = None) -> Any:
        """`moe` with matrices of e4m3, int8, or signed 4-bit integers (uint8, two to a byte along the last dimension, the first in the low
        half): a number is q * scale of its block of block[0] rows by block[1] columns, rounded to x's type (float32, float16, bfloat16).

        scale_gate_up (E, ceil(2 * I / block[0]), ceil(H / block[1])), scale_down (E, ceil(H / block[0]), ceil(I / block[1])), float32,
        float16 or bfloat16; DeepSeek-V3: e4m3, block=(128, 128). On sm_90a, with blocks of 64 columns or a
        multiple, numbers are made where they are multiplied; else those of experts that have rows in the workspace, which has room for all.
        """
        arrays = (x, ids, weights, w_gate_up, scale_gate_up, w_down, scale_down)
        return self._session.run(CALLS["moe_quantized"], arrays, (activation, block, first_expert), out, stream)

    def moe_backward(self, dy: Any, x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any, *, activation: str = "silu",
                     first_expert: int = 0, out: Any = None, stream: Any = None) -> Any:
        """(dx, dweights, dw_gate_up, dw_down) of `moe`, which computes its middle again. 0 of experts without rows, and dweights of no
        expert."""
        return self._session.run(CALLS["moe_backward"], (dy, x, ids, weights, w_gate_up, w_down), (activation, first_expert), out, stream)

    def moe_exchanged(self, x: Any, counts: Any, w_gate_up: Any, w_down: Any, *, activation: str = "silu", out: Any = None,
                      stream: Any = None) -> Any:
        """The experts of one device of several (expert-parallel), on rows that an all-to-all brought: those of each source in turn, sorted
        by expert, counts[source, expert] of each (on the device, int32 or int64; below 0 is 0), of at least one source.

        y[r] = (activation(x[r] Wg^T) * (x[r] Wu^T)) Wd^T in the rows' places, to be sent back; zeros in rows beyond the last, so x may be
        a buffer for the most that can come. Sources make x with moe_permute and end with moe_unpermute, where routing weights enter.
        """
        return self._session.run(CALLS["moe_exchanged"], (x, counts, w_gate_up, w_down), (activation,), out, stream)

    # ---- pooling -----------------------------------------------------------------------------------------------------------------

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
        attrs = (window, stride, padding, dilation, ceil_mode, _shape(x_shape))
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
        attrs = (window, stride, padding, dilation, ceil_mode, count_include_pad, divisor_override, _shape(x_shape))
        return self._session.run(CALLS["avg_pool_backward"], (dy,), attrs, out, stream)

    def lp_pool(self, x: Any, window: Any, *, norm: float = 2.0, stride: Any = None, padding: Any = 0, dilation: Any = 1,
                ceil_mode: bool = False, out: Any = None, stream: Any = None) -> Any:
        """(sum of |x|^norm over the window)^(1/norm)."""
        return self._session.run(CALLS["lp_pool"], (x,), (window, stride, padding, dilation, ceil_mode, norm), out, stream)

    def lp_pool_backward(self, dy: Any, x: Any, y: Any, window: Any, *, norm: float = 2.0, stride: Any = None, padding: Any = 0,
                         dilation: Any = 1, ceil_mode: bool = False, x_shape: Sequence[int] | None = None, out: Any = None,
                         stream: Any = None) -> Any:
        """dx of `lp_pool`, from its input and output (x_shape, if given, is x's)."""
        attrs = (window, stride, padding, dilation, ceil_mode, norm, x_shape if x_shape is None else _shape(x_shape))
        return self._session.run(CALLS["lp_pool_backward"], (dy, x, y), attrs, out, stream)

    def adaptive_max_pool(self, x: Any, output_size: Any, *, return_indices: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Bin i of L -> O covers [floor(i L / O), ceil((i + 1) L / O))."""
        return self._session.run(CALLS["adaptive_max_pool"], (x,), (output_size, return_indices), out, stream)

    def adaptive_max_pool_backward(self, dy: Any, indices: Any, x_shape: Sequence[int], output_size: Any, *, x: Any = None, out: Any = None,
                                   stream: Any = None) -> Any:
        """dx from the forward's indices; or from `x` with indices None, which are then found again."""
        return self._session.run(CALLS["adaptive_max_pool_backward"], (dy, indices, x), (output_size, _shape(x_shape)), out, stream)

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
        attrs = (window, output_size, output_ratio, _shape(x_shape))
        return self._session.run(CALLS["fractional_max_pool_backward"], (dy, indices), attrs, out, stream)

    def max_unpool(self, x: Any, indices: Any, output_size: Any, *, out: Any = None, stream: Any = None) -> Any:
        """The elements of x (N, C, 1 to 3 spatial dimensions) at `indices`, which `max_pool` gave, of zeros of (N, C, *output_size).

        indices: int64 or int32 of x's shape, flat over output_size. Of several elements with one place the last in x's order stays, on
        every run; an index outside writes nothing.
        """
        return self._session.run(CALLS["max_unpool"], (x, indices), (_shape(output_size),), out, stream)

    def max_unpool_backward(self, dy: Any, indices: Any, *, out: Any = None, stream: Any = None) -> Any:
        """dx: dy at the indices (as PyTorch, of elements that another overwrote, too), 0 for indices outside."""
        return self._session.run(CALLS["max_unpool_backward"], (dy, indices), (), out, stream)

    def adaptive_avg_pool(self, x: Any, output_size: Any, *, out: Any = None, stream: Any = None) -> Any:
        """Mean of each of output_size bins (int, or one per spatial dimension), those of `adaptive_max_pool`."""
        return self._session.run(CALLS["adaptive_avg_pool"], (x,), (output_size,), out, stream)

    def adaptive_avg_pool_backward(self, dy: Any, x_shape: Sequence[int], output_size: Any, *, out: Any = None, stream: Any = None) -> Any:
        """dx of `adaptive_avg_pool` of an x of x_shape."""
        return self._session.run(CALLS["adaptive_avg_pool_backward"], (dy,), (output_size, _shape(x_shape)), out, stream)

    def global_max_pool(self, x: Any, *, out: Any = None, stream: Any = None) -> Any:
        """Largest element over all spatial dimensions, which stay with extent 1 (NaN wins)."""
        return self._session.run(CALLS["global_max_pool"], (x,), (), out, stream)

    def global_max_pool_backward(self, dy: Any, x: Any = None, *, indices: Any = None, x_shape: Sequence[int] | None = None,
                                 out: Any = None, stream: Any = None) -> Any:
        """dx, from x; or from the indices of `adaptive_max_pool` to 1 and x_shape."""
        attrs = (x_shape if x_shape is None else _shape(x_shape),)
        return self._session.run(CALLS["global_max_pool_backward"], (dy, indices, x), attrs, out, stream)

    def global_avg_pool(self, x: Any, *, out: Any = None, stream: Any = None) -> Any:
        """Mean over all spatial dimensions, which stay with extent 1."""
        return self._session.run(CALLS["global_avg_pool"], (x,), (), out, stream)

    def global_avg_pool_backward(self, dy: Any, x_shape: Sequence[int], *, out: Any = None, stream: Any = None) -> Any:
        """dx of `global_avg_pool` of an x of x_shape."""
        return self._session.run(CALLS["global_avg_pool_backward"], (dy,), (_shape(x_shape),), out, stream)

    # ---- resize ------------------------------------------------------------------------------------------------------------------

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
        attrs = (size, mode, scales, align_corners, coordinates, rounding, antialias, cubic_coefficient, exclude_outside, _shape(x_shape))
        return self._session.run(CALLS["resize_backward"], (dy,), attrs, out, stream)

    # ---- normalisation -----------------------------------------------------------------------------------------------------------

    def layer_norm(self, x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, axes: Any = -1, residual: Any = None,
                   epilogue: Any = None, return_stats: bool = False, return_sum: bool = False, out_dtype: Any = None, scale_y: Any = None,
                   return_scale: bool = False, zero_centered: bool = False, operands: Mapping[str, Any] | None = None,
                   scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """epilogue((h - mean) / sqrt(variance + eps) * gamma + beta) of h = x + residual, mean and biased variance over `axes`.

        gamma, beta of the axes' shape, or such as (N, 1, C), their own in each sample; residual of x's. Returns y; then, with return_stats,
        mean and rstd (x's shape without the axes, f32, or f64 for f64 tensors) and, with return_sum, h. out may be x, or of y and h
        (x, residual). epilogue: over acc, `operands` and `scalars`. zero_centered: times gamma + 1.

        out_dtype: y's type, also "e4m3", "e5m2" and "s8", which saturate; y is rounded from f32 (f64) in the same launch. scale_y (one
        element): y holds result / scale_y. return_scale (of those three types): last also a scale for each row, of mean's shape and
        type, max|result| / (448, 57344 or 127), 1 where all are 0; y holds result / that. A row with a result that is not finite has NaN.
        """
        attrs = (eps, axes, epilogue, return_stats, return_sum, out_dtype, return_scale, zero_centered)
        return self._session.run(CALLS["layer_norm"], (x, gamma, beta, residual, scale_y), attrs, out, stream, scalars, operands)

    def layer_norm_backward(self, dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any = None, beta: Any = None, *, axes: Any = -1,
                            epilogue: Any = None, zero_centered: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx; with gamma (dx, dgamma, dbeta), the same bits on every run. x: what was normalised (the forward's h), with its statistics.

        epilogue: the forward's, if it was an activation of acc alone ("relu", "silu(acc)"); beta: the forward's, for its sake.
        """
        arrays, attrs = (dy, x, mean, rstd, gamma, beta), (axes, epilogue, zero_centered)
        return self._session.run(CALLS["layer_norm_backward"], arrays, attrs, out, stream)

    def rms_norm(self, x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, axes: Any = -1, residual: Any = None,
                 epilogue: Any = None, return_stats: bool = False, return_sum: bool = False, out_dtype: Any = None, scale_y: Any = None,
                 return_scale: bool = False, zero_centered: bool = False, operands: Mapping[str, Any] | None = None,
                 scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """epilogue(h / sqrt(mean of h^2 + eps) * gamma + beta) of h = x + residual: `layer_norm` about 0; return_stats adds rstd alone."""
        attrs = (eps, axes, epilogue, return_stats, return_sum, out_dtype, return_scale, zero_centered)
        return self._session.run(CALLS["rms_norm"], (x, gamma, beta, residual, scale_y), attrs, out, stream, scalars, operands)

    def rms_norm_backward(self, dy: Any, x: Any, rstd: Any, gamma: Any = None, beta: Any = None, *, axes: Any = -1, epilogue: Any = None,
                          zero_centered: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx; with gamma (dx, dgamma), with beta beside it dbeta, too. The rest as of `layer_norm_backward`."""
        return self._session.run(CALLS["rms_norm_backward"], (dy, x, rstd, gamma, beta), (axes, epilogue, zero_centered), out, stream)

    def batch_norm(self, x: Any, gamma: Any = None, beta: Any = None, running_mean: Any = None, running_var: Any = None, *, training: bool,
                   momentum: float = 0.1, eps: float = 1e-5, residual: Any = None, epilogue: Any = None, return_stats: bool = False,
                   return_mask: bool = False, out_dtype: Any = None, scale_y: Any = None, operands: Mapping[str, Any] | None = None,
                   scalars: Mapping[str, float] | None = None, out: Any = None, stream: Any = None) -> Any:
        """epilogue((x - mean) / sqrt(variance + eps) * gamma + beta) of x (N, C, spatial), with statistics of each channel, all else (C,).

        training: mean and biased variance are x's, and the running statistics, if given, are updated in place: running = (1 - momentum)
        running + momentum * (mean, or unbiased variance). Else they are the running ones. residual, of x's shape, is added before
        what epilogue does ("relu(acc + residual)"). Returns y; then, with return_stats, mean and rstd (f32, or f64 for f64 tensors);
        then, with return_mask, the bits for the gradient of a relu. out_dtype, scale_y: as of `layer_norm`. out: those, without the
        running statistics. Where arrays cannot be written (jax), the new running statistics follow as further results.
        """
        call, attrs = CALLS["batch_norm"], (training, momentum, eps, epilogue, return_stats, return_mask, out_dtype)
        arrays = (x, gamma, beta, running_mean, running_var, residual, scale_y)
        if not training or running_mean is None or running_var is None:
            return self._session.run(call, arrays, attrs, out, stream, scalars, operands)
        if out is None:
            extra = operands if isinstance(operands, Mapping) else {}
            names, given = (*call.tensors, *extra), (*arrays, *extra.values())
            prepared = self._session.prepared(call, names, self._session.raw(call, names, given)[1], given, attrs, (), None, stream)
            if prepared.frame.finish is not None:
                return self._session.run(call, arrays, attrs, None, stream, scalars, operands)
            out = tuple(make() for make in prepared.make_outputs[:-2])
        results = self._session.run(call, arrays, attrs, (*(out if isinstance(out, tuple) else (out,)), running_mean, running_var), stream,
                                    scalars, operands)
        return results[0] if len(results) == 3 else results[:-2]

    def batch_norm_backward(self, dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any = None, mask: Any = None, y: Any = None, *,
                            training: bool = True, return_residual: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx; with gamma (dx, dgamma, dbeta); then, with return_residual, the gradient of `residual`. The same bits on every run.

        mean, rstd: the forward's. mask or y, where a relu ended the forward's epilogue: the forward's bits, or its result.
        training=False: the statistics were the running ones, rstd = 1 / sqrt(running_var + eps).
        """
        attrs = (training, return_residual)
        return self._session.run(CALLS["batch_norm_backward"], (dy, x, mean, rstd, gamma, mask, y), attrs, out, stream)

    def batch_norm_stats(self, x: Any, *, out: Any = None, stream: Any = None) -> Any:
        """(count (1,), mean (C,), m2 (C,)) of one device's share of a batch; m2 = sum of (x - mean)^2. In f32, or f64 for f64 tensors."""
        return self._session.run(CALLS["batch_norm_stats"], (x,), (), out, stream)

    def batch_norm_gather(self, counts: Any, means: Any, m2s: Any, running_mean: Any = None, running_var: Any = None, *,
                          momentum: float = 0.1, eps: float = 1e-5, out: Any = None, stream: Any = None) -> Any:
        """(mean, rstd) of all shares, (C,), from their counts (shares,), means and m2s (shares, C); a share may be empty. With running
        statistics also the new ones, which may go into the old ones by `out`."""
        arrays = (counts, means, m2s, running_mean, running_var)
        return self._session.run(CALLS["batch_norm_gather"], arrays, (momentum, eps), out, stream)

    def batch_norm_apply(self, x: Any, mean: Any, rstd: Any, gamma: Any = None, beta: Any = None, *, residual: Any = None,
                         epilogue: Any = None, return_mask: bool = False, out_dtype: Any = None, scale_y: Any = None,
                         operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
                         stream: Any = None) -> Any:
        """epilogue((x - mean) * rstd * gamma + beta): `batch_norm` with given statistics."""
        arrays = (x, mean, rstd, gamma, beta, residual, scale_y)
        return self._session.run(CALLS["batch_norm_apply"], arrays, (epilogue, return_mask, out_dtype), out, stream, scalars, operands)

    def batch_norm_backward_reduce(self, dy: Any, x: Any, mean: Any, rstd: Any, mask: Any = None, y: Any = None, *, out: Any = None,
                                   stream: Any = None) -> Any:
        """(sum of dy, sum of dy (x - mean) rstd), (C,), of one device's share: to be summed over the devices (dbeta, dgamma)."""
        return self._session.run(CALLS["batch_norm_backward_reduce"], (dy, x, mean, rstd, mask, y), (), out, stream)

    def batch_norm_backward_apply(self, dy: Any, x: Any, mean: Any, rstd: Any, sum_dy: Any, sum_dy_xhat: Any, count: Any,
                                  gamma: Any = None, mask: Any = None, y: Any = None, *, return_residual: bool = False, out: Any = None,
                                  stream: Any = None) -> Any:
        """dx of one device's share, from the sums over all devices and the count (1,) of values of a channel on all of them."""
        arrays = (dy, x, mean, rstd, gamma, mask, y, sum_dy, sum_dy_xhat, count)
        return self._session.run(CALLS["batch_norm_backward_apply"], arrays, (return_residual,), out, stream)

    def group_norm(self, x: Any, groups: int, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, residual: Any = None,
                   epilogue: Any = None, return_stats: bool = False, return_mask: bool = False, out_dtype: Any = None,
                   scale_y: Any = None, operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None,
                   out: Any = None, stream: Any = None) -> Any:
        """`batch_norm` with statistics of each sample's groups of C / groups channels: mean and rstd are (N, groups)."""
        attrs = (groups, eps, epilogue, return_stats, return_mask, out_dtype)
        return self._session.run(CALLS["group_norm"], (x, gamma, beta, residual, scale_y), attrs, out, stream, scalars, operands)

    def group_norm_backward(self, dy: Any, x: Any, mean: Any, rstd: Any, groups: int, gamma: Any = None, mask: Any = None, y: Any = None, *,
                            return_residual: bool = False, out: Any = None, stream: Any = None) -> Any:
        """As `batch_norm_backward`."""
        attrs = (groups, return_residual)
        return self._session.run(CALLS["group_norm_backward"], (dy, x, mean, rstd, gamma, mask, y), attrs, out, stream)

    def instance_norm(self, x: Any, gamma: Any = None, beta: Any = None, *, eps: float = 1e-5, residual: Any = None, epilogue: Any = None,
                      return_stats: bool = False, return_mask: bool = False, out_dtype: Any = None, scale_y: Any = None,
                      operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None, out: Any = None,
                      stream: Any = None) -> Any:
        """`group_norm` with a group a channel: mean and rstd are (N, C)."""
        attrs = (eps, epilogue, return_stats, return_mask, out_dtype)
        return self._session.run(CALLS["instance_norm"], (x, gamma, beta, residual, scale_y), attrs, out, stream, scalars, operands)

    def instance_norm_backward(self, dy: Any, x: Any, mean: Any, rstd: Any, gamma: Any = None, mask: Any = None, y: Any = None, *,
                               return_residual: bool = False, out: Any = None, stream: Any = None) -> Any:
        """As `batch_norm_backward`."""
        return self._session.run(CALLS["instance_norm_backward"], (dy, x, mean, rstd, gamma, mask, y), (return_residual,), out, stream)

    def normalize(self, x: Any, *, p: float = 2.0, axes: Any = -1, g: Any = None, eps: float = 1e-12, return_norm: bool = False,
                  out: Any = None, stream: Any = None) -> Any:
        """g * x / max(|x|_p, eps) with |x|_p = (sum of |x|^p)^(1/p) over `axes`, p > 0; with return_norm also |x|_p (f32, of f64 f64).

        g: a value for each slice (x's shape without the axes, or with extents of 1 there), one for all, or None.
        """
        return self._session.run(CALLS["normalize"], (x, g), (p, axes, eps, return_norm), out, stream)

    def normalize_backward(self, dy: Any, x: Any, g: Any = None, *, p: float = 2.0, axes: Any = -1, eps: float = 1e-12, out: Any = None,
                           stream: Any = None) -> Any:
        """dx; with g (dx, dg), dg of g's shape and type, the same bits on every run."""
        return self._session.run(CALLS["normalize_backward"], (dy, x, g), (p, axes, eps), out, stream)

    def scale_norm(self, x: Any, g: Any, *, eps: float = 1e-5, out: Any = None, stream: Any = None) -> Any:
        """ScaleNorm: `normalize` along the last dimension with one g for all (Nguyen and Salazar, 2019)."""
        return self._session.run(CALLS["normalize"], (x, g), (2.0, -1, eps, False), out, stream)

    def scale_norm_backward(self, dy: Any, x: Any, g: Any, *, eps: float = 1e-5, out: Any = None, stream: Any = None) -> Any:
        """(dx, dg)."""
        return self._session.run(CALLS["normalize_backward"], (dy, x, g), (2.0, -1, eps), out, stream)

    def weight_norm(self, v: Any, g: Any, dim: int | None = 0, *, return_norm: bool = False, out: Any = None, stream: Any = None) -> Any:
        """w = g v / |v|, norms over all dimensions but `dim` (None: over all), and with return_norm those (Salimans and Kingma, 2016).

        g: (extent of dim,), or of v's rank with extents of 1 elsewhere, or one number for dim None. A slice of zeros gives NaN.
        """
        return self._session.run(CALLS["normalize"], (v, g), (2.0, _all_but("weight_norm", v, dim), 0.0, return_norm), out, stream)

    def weight_norm_backward(self, dw: Any, v: Any, g: Any, dim: int | None = 0, *, out: Any = None, stream: Any = None) -> Any:
        """(dv, dg)."""
        attrs = (2.0, _all_but("weight_norm_backward", v, dim), 0.0)
        return self._session.run(CALLS["normalize_backward"], (dw, v, g), attrs, out, stream)

    def spectral_norm(self, w: Any, u: Any, v: Any, dim: int = 0, *, iterations: int = 1, eps: float = 1e-12, out: Any = None,
                      stream: Any = None) -> Any:
        """(w / sigma, sigma, new u, new v), sigma the largest singular value of w as a matrix of rows `dim`, by power iterations from u
        and v (f32, of f64 f64; (extent of dim,) and (the others' product,)). iterations=0: (w / sigma, sigma), as they are.

        The new vectors may go into the old ones by `out`. Of a step v comes first, as in Miyato et al., ICLR 2018.
        """
        return self._session.run(CALLS["spectral_norm"], (w, u, v), (dim, iterations, eps), out, stream)

    def spectral_norm_backward(self, dy: Any, w: Any, u: Any, v: Any, sigma: Any, dim: int = 0, *, out: Any = None,
                               stream: Any = None) -> Any:
        """dw, with the forward's sigma and its new u and v as constants."""
        return self._session.run(CALLS["spectral_norm_backward"], (dy, w, u, v, sigma), (dim,), out, stream)

    def power_norm(self, x: Any, gamma: Any = None, beta: Any = None, *, p: float = 2.0, eps: float = 1e-5, axes: Any = -1,
                   return_stats: bool = False, out: Any = None, stream: Any = None) -> Any:
        """x * r * gamma + beta with r = (mean of |x|^p + eps)^(-1/p) over `axes`, p > 0; with return_stats also r. p = 2 is `rms_norm`."""
        return self._session.run(CALLS["power_norm"], (x, gamma, beta), (p, eps, axes, return_stats), out, stream)

    def power_norm_backward(self, dy: Any, x: Any, rstd: Any, gamma: Any = None, *, p: float = 2.0, axes: Any = -1, out: Any = None,
                            stream: Any = None) -> Any:
        """dx; with gamma (dx, dgamma), the same bits on every run. rstd: the forward's r. (dbeta is the sum of dy over the rows.)"""
        return self._session.run(CALLS["power_norm_backward"], (dy, x, rstd, gamma), (p, axes), out, stream)

    def lrn(self, x: Any, size: int = 5, *, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0, within: bool = False, out: Any = None,
            stream: Any = None) -> Any:
        """Local response normalisation across channels: x[c] / (k + alpha / size * sum of x^2 over `size` channels around c)^beta.

        The window reaches from (size - 1) // 2 channels before to size // 2 behind, as ONNX's and cuDNN's. size: at most 33 (f64: 17).
        within: the window lies within the channel, along each spatial dimension, and alpha is divided by size^dimensions.
        """
        return self._session.run(CALLS["lrn"], (x,), (size, alpha, beta, k, within), out, stream)

    def lrn_backward(self, dy: Any, x: Any, size: int = 5, *, alpha: float = 1e-4, beta: float = 0.75, k: float = 1.0,
                     within: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx of `lrn`."""
        return self._session.run(CALLS["lrn_backward"], (dy, x), (size, alpha, beta, k, within), out, stream)

    def divisive_norm(self, x: Any, means: Any = None, size: int = 5, *, alpha: float = 1.0, beta: float = 0.5, k: float = 1.0,
                      out: Any = None, stream: Any = None) -> Any:
        """x / (k + alpha / size^dimensions * sum of (x - means)^2 over the window around each element of a channel)^beta.

        x (N, C, 1 to 3 spatial dimensions); means, of x's shape and type: what stands for the mean around each element (an average pool or
        a blur of x), or None for 0. The form of cuDNN's DivisiveNormalization.
        """
        return self._session.run(CALLS["divisive_norm"], (x, means), (size, alpha, beta, k), out, stream)

    def divisive_norm_backward(self, dy: Any, x: Any, means: Any = None, size: int = 5, *, alpha: float = 1.0, beta: float = 0.5,
                               k: float = 1.0, out: Any = None, stream: Any = None) -> Any:
        """dx; with means (dx, dmeans)."""
        return self._session.run(CALLS["divisive_norm_backward"], (dy, x, means), (size, alpha, beta, k), out, stream)

    # ---- softmax and losses ------------------------------------------------------------------------------------------------------

    def softmax(self, x: Any, axis: int = -1, *, mask: Any = None, scale: float = 1.0, diagonal: int | None = None, log: bool = False,
                out_dtype: Any = None, return_lse: bool = False, out: Any = None, stream: Any = None) -> Any:
        """exp(z) over its sum along `axis`, or the logarithm of it, for z = scale * x; stable for any finite logits. In one launch.

        x: f64, f32, f16 or bf16; y of its shape and type. mask, of a shape that broadcasts to x's: bool, elements count where it is true;
        or of any float type, added to z. diagonal: along the last axis alone element j of line i counts where j - i <= diagonal (0:
        causal). A row without an element that counts gives zeros (log: -inf). scale: a number, e.g. 1 / sqrt(head size), 1 / temperature.
        out_dtype: y's type, also "e4m3", "e5m2" or "s8". return_lse: (y, lse), log of the sum of exp(z), f32 (f64 for f64), without `axis`.
        """
        return self._session.run(CALLS["softmax"], (x, mask), (axis, log, scale, diagonal, out_dtype, return_lse), out, stream)

    def softmin(self, x: Any, axis: int = -1, *, mask: Any = None, diagonal: int | None = None, log: bool = False, out: Any = None,
                stream: Any = None) -> Any:
        """`softmax` of -x; its gradient is softmax_backward with scale=-1."""
        return self._session.run(CALLS["softmax"], (x, mask), (axis, log, -1.0, diagonal, None, False), out, stream)

    def softmax_backward(self, dy: Any, y: Any, axis: int = -1, *, scale: float = 1.0, log: bool = False, masked: bool = False,
                         out: Any = None, stream: Any = None) -> Any:
        """dx, from the result of `softmax` with the same axis, scale and log (or from `soft` of gumbel_softmax, scale = 1 / temperature).

        masked: elements whose logarithm is -inf were masked: they get 0 and their dy counts nowhere (without log that is so anyway, as
        long as dy is finite). The gradient of an added mask is dx at scale 1, summed over the dimensions that broadcast.
        """
        return self._session.run(CALLS["softmax_backward"], (dy, y), (axis, log, scale, masked), out, stream)

    def gumbel_softmax(self, x: Any, axis: int = -1, *, temperature: float = 1.0, hard: bool = False, mask: Any = None, seed: int,
                       offset: int = 0, out: Any = None, stream: Any = None) -> Any:
        """softmax((x + g) / temperature) for Gumbel noise g, whose numbers depend on seed, offset (see `dropout`) and place alone.

        hard: (y, soft), where y is 1 at the largest element of each row and 0 elsewhere. The gradient of either is
        softmax_backward(dy, soft, scale=1 / temperature) (straight through). mask: as of `softmax`. Jang, Gu and Poole, ICLR 2017.
        """
        draw = _draw("gumbel_softmax", seed, offset)
        return self._session.run(CALLS["gumbel_softmax"], (x, mask), (axis, temperature, hard), out, stream, draw)

    def hardmax(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """1 at the largest element along `axis`, the first of equals, 0 elsewhere; rows with NaN or +inf are NaN."""
        return self._session.run(CALLS["hardmax"], (x,), (axis,), out, stream)

    def sparsemax(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """The point of the simplex nearest to x along `axis`: max(x - t, 0) with t such that the sum is 1; mostly zeros where x is spread.

        Of any length, without sorting; rows with NaN or +inf, or of -inf alone, are NaN. Martins and Astudillo, ICML 2016.
        """
        return self._session.run(CALLS["sparsemax"], (x,), (axis,), out, stream)

    def sparsemax_backward(self, dy: Any, y: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """dx from the result: dy less its mean over the elements with y > 0, there, and 0 elsewhere."""
        return self._session.run(CALLS["sparsemax_backward"], (dy, y), (axis,), out, stream)

    def sinkhorn(self, x: Any, *, iterations: int = 20, eps: float = 1e-6, out: Any = None, stream: Any = None) -> Any:
        """exp(x) of (..., n, n), n up to 8, its columns and rows divided by their sums + eps in turns: in the end rows sum to 1, columns
        nearly (Sinkhorn and Knopp), as the residual mixing of manifold-constrained hyper-connections (Xie et al., 2025) takes it."""
        return self._session.run(CALLS["sinkhorn"], (x,), (iterations, eps), out, stream)

    def sinkhorn_backward(self, dy: Any, x: Any, *, iterations: int = 20, eps: float = 1e-6, out: Any = None, stream: Any = None) -> Any:
        """dx, through all iterations."""
        return self._session.run(CALLS["sinkhorn_backward"], (dy, x), (iterations, eps), out, stream)

    def cross_entropy(self, logits: Any, target: Any, *, reduction: str = "mean", label_smoothing: float = 0.0, ignore_index: int = -100,
                      weight: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Softmax cross-entropy over dimension 1 of logits; target holds class indices, or probabilities of logits' shape.

        weight (C,) per class; reduction "none", "mean" (over the weights of the targets) or "sum". A target out of range reads nothing and
        makes its loss, and any sum or mean with it, NaN.
        """
        return self._session.run(CALLS["cross_entropy"], (logits, target, weight), (reduction, label_smoothing, ignore_index), out, stream)

    def cross_entropy_backward(self, logits: Any, target: Any, *, d_loss: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
                               ignore_index: int = -100, weight: Any = None, out: Any = None, stream: Any = None) -> Any:
        """d_logits, for an upstream gradient d_loss of the loss's shape (default 1)."""
        attrs = (reduction, label_smoothing, ignore_index)
        return self._session.run(CALLS["cross_entropy_backward"], (logits, target, weight, d_loss), attrs, out, stream)

    def nll(self, logits: Any, target: Any, *, reduction: str = "mean", ignore_index: int = -100, weight: Any = None, out: Any = None,
            stream: Any = None) -> Any:
        """Negative log-likelihood: `cross_entropy` of class indices, of logits that are logarithms of probabilities (softmax(log=True))."""
        return self._session.run(CALLS["nll"], (logits, target, weight), (reduction, ignore_index), out, stream)

    def nll_backward(self, logits: Any, target: Any, *, d_loss: Any = None, reduction: str = "mean", ignore_index: int = -100,
                     weight: Any = None, out: Any = None, stream: Any = None) -> Any:
        """d_logits of `nll`, for an upstream gradient d_loss of the loss's shape (default 1)."""
        return self._session.run(CALLS["nll_backward"], (logits, target, weight, d_loss), (reduction, ignore_index), out, stream)

    def loss(self, x: Any, target: Any, name: str, *, x2: Any = None, var: Any = None, weight: Any = None, pos_weight: Any = None,
             reduction: str = "mean", beta: float | None = None, delta: float | None = None, margin: float | None = None,
             eps: float | None = None, log_input: bool = True, log_target: bool = False, full: bool = False, out: Any = None,
             stream: Any = None) -> Any:
        """An elementwise loss by name, with PyTorch's formula and defaults.

        name: "mse", "l1", "smooth_l1" (beta), "huber" (delta), "bce", "bce_with_logits" (pos_weight), "kl_div" (log_target),
        "poisson_nll" (log_input, full, eps), "gaussian_nll" (var, full, eps), "hinge", "squared_hinge", "hinge_embedding" (margin),
        "soft_margin", "margin_ranking" (x2, margin). target, x2: of x's shape; var, weight, pos_weight broadcast to it; weight multiplies
        each element. reduction: "none", "mean" (over the elements), "sum", "batchmean" (the sum over x.shape[0]).
        """
        arrays = (x, target, x2, var, weight, pos_weight)
        attrs = (name, reduction, beta, delta, margin, eps, log_input, log_target, full)
        return self._session.run(CALLS["loss"], arrays, attrs, out, stream)

    def loss_backward(self, x: Any, target: Any, name: str, *, d_loss: Any = None, x2: Any = None, var: Any = None, weight: Any = None,
                      pos_weight: Any = None, reduction: str = "mean", beta: float | None = None, delta: float | None = None,
                      margin: float | None = None, eps: float | None = None, log_input: bool = True, log_target: bool = False,
                      full: bool = False, out: Any = None, stream: Any = None) -> Any:
        """dx of `loss`, for an upstream gradient d_loss of the loss's shape (default 1); (dx, dx2) of margin_ranking, (dx, dvar) of
        gaussian_nll with a var of x's shape."""
        arrays = (x, target, x2, var, weight, pos_weight, d_loss)
        attrs = (name, reduction, beta, delta, margin, eps, log_input, log_target, full)
        return self._session.run(CALLS["loss_backward"], arrays, attrs, out, stream)

    def row_loss(self, x: Any, x2: Any = None, x3: Any = None, target: Any = None, *, name: str, weight: Any = None,
                 reduction: str = "mean", margin: float | None = None, eps: float | None = None, p: int | None = None, out: Any = None,
                 stream: Any = None) -> Any:
        """A loss of rows (the last dimension) by name, with PyTorch's formula and defaults.

        name: "cosine_embedding" of x, x2 and a target of 1 or -1 a row; "triplet_margin" of x (anchor), x2 (positive), x3 (negative), with
        the norm of p = 2 or 1; "multi_margin" of x and a target class a row, with p = 1 or 2 and a weight (C,) per class;
        "multilabel_margin" of x and a target of x's shape, a row's classes before the first negative number; "multilabel_soft_margin" of x
        and a target of x's shape that is 1 at a row's classes and 0 elsewhere, with a weight (C,). reduction: "none", "mean" (over the
        rows), "sum". A class out of range makes its row's results NaN.
        """
        return self._session.run(CALLS["row_loss"], (x, x2, x3, target, weight), (name, reduction, margin, eps, p), out, stream)

    def row_loss_backward(self, x: Any, x2: Any = None, x3: Any = None, target: Any = None, *, name: str, weight: Any = None,
                          d_loss: Any = None, reduction: str = "mean", margin: float | None = None, eps: float | None = None,
                          p: int | None = None, out: Any = None, stream: Any = None) -> Any:
        """dx, (dx, dx2) or (dx, dx2, dx3) of `row_loss`, for an upstream gradient d_loss of the loss's shape (default 1)."""
        arrays = (x, x2, x3, target, weight, d_loss)
        return self._session.run(CALLS["row_loss_backward"], arrays, (name, reduction, margin, eps, p), out, stream)

    def ctc_loss(self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *, blank: int = 0, reduction: str = "mean",
                 zero_infinity: bool = False, return_gradient: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Connectionist temporal classification, as PyTorch's ctc_loss. return_gradient: (loss, d_logits), for an upstream gradient of 1.

        log_probs (T, N, C): logarithms of probabilities (softmax(log=True)). targets: labels (N, S), or one after another in one
        dimension. input_lengths, target_lengths (N,): integers, in memory of the device. reduction: "none", "mean" (of each loss over its
        target's length), "sum". A target that cannot be aligned has the loss inf and a gradient of NaN, or 0 under zero_infinity. Lengths
        and labels out of range read nothing and make that sequence's results NaN.
        """
        attrs = (blank, reduction, zero_infinity, return_gradient)
        return self._session.run(CALLS["ctc_loss"], (log_probs, targets, input_lengths, target_lengths), attrs, out, stream)

    def ctc_loss_backward(self, log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *, d_loss: Any = None,
                          blank: int = 0, reduction: str = "mean", zero_infinity: bool = False, out: Any = None, stream: Any = None) -> Any:
        """d_logits of `ctc_loss`: the gradient by logits of which log_probs are the log-softmax, for an upstream gradient d_loss of the
        loss's shape (default 1). The same bits on every run."""
        arrays = (log_probs, targets, input_lengths, target_lengths, d_loss)
        return self._session.run(CALLS["ctc_loss_backward"], arrays, (blank, reduction, zero_infinity), out, stream)

    def linear_cross_entropy(self, x: Any, w: Any, target: Any, bias: Any = None, *, reduction: str = "mean", label_smoothing: float = 0.0,
                             ignore_index: int = -100, weight: Any = None, return_gradients: bool = False, out: Any = None,
                             stream: Any = None) -> Any:
        """`cross_entropy` of the logits x @ w^T + bias, of which only some rows are in memory at a time.

        x (N, H), w (V, H), bias (V,), target (N,) of class indices; the rest as of `cross_entropy`. return_gradients: (loss, dx, dw), and
        dbias with a bias, for an upstream gradient of 1. Sums are made in f32 (f64 for f64) and rounded once; every output may be given in
        that type. Workspace of the loss: an eighth of the logits, at least 64 and at most 128 MiB. With gradients all of the logits up to
        512 MiB; of more a quarter at a time, and dw while it is summed, if it is not given in the type of sums. Where that is more than
        four fifths of the logits, chunks of columns take about what the loss takes, or dx in the type of sums and a quarter, and four
        matrix products for three; a workspace_limit leads to them, too.
        """
        attrs = (reduction, label_smoothing, ignore_index, return_gradients)
        return self._session.run(CALLS["linear_cross_entropy"], (x, w, target, bias, weight), attrs, out, stream)

    def linear_cross_entropy_backward(self, x: Any, w: Any, target: Any, bias: Any = None, *, d_loss: Any = None, reduction: str = "mean",
                                      label_smoothing: float = 0.0, ignore_index: int = -100, weight: Any = None, out: Any = None,
                                      stream: Any = None) -> Any:
        """(dx, dw), and dbias with a bias, of `linear_cross_entropy`, for an upstream gradient d_loss of the loss's shape (default 1)."""
        attrs = (reduction, label_smoothing, ignore_index)
        return self._session.run(CALLS["linear_cross_entropy_backward"], (x, w, target, bias, weight, d_loss), attrs, out, stream)

    # ---- elementwise and reductions ------------------------------------------------------------------------------------------------

    def pointwise(self, expression: Any, /, *tensors: Any, dtype: Any = None, saturate: bool = True, out: Any = None, stream: Any = None,
                  **scalars: float) -> Any:
        """An expression over tensors, broadcast as NumPy does; tensors stand in the order of expression.args.

        expression: an oxidnn.expr expression, a string, or a tuple of them (several outputs). scalars: values of expr.scalar names.
        saturate: as of `cast`. out may be one of the inputs.
        """
        call, expression = _pointwise_call(hashable(expression, "pointwise", "expression"))
        if len(tensors) != len(call.tensors):
            raise expected("pointwise", "tensors", f"{len(tensors)} arrays", f"{len(call.tensors)}: {', '.join(call.tensors)}")
        return self._session.run(call, tensors, (expression, dtype, saturate), out, stream, scalars)

    def activation(self, x: Any, name: str, *, parameters: Sequence[float] = (), out: Any = None, stream: Any = None) -> Any:
        """An activation by name ("relu", "gelu", "leaky_relu", ...); parameters as the function takes them, e.g. the slope."""
        if type(parameters) is not tuple or parameters:  # the default is left as it is: this is a warm path
            parameters = hashable(parameters, "activation", "parameters")
        return self._session.run(CALLS["activation"], (x,), (name, parameters), out, stream)

    def activation_backward(self, dy: Any, x: Any, name: str, *, parameters: Sequence[float] = (), out: Any = None,
                            stream: Any = None) -> Any:
        """dx = dy * activation'(x)."""
        if type(parameters) is not tuple or parameters:  # the default is left as it is: this is a warm path
            parameters = hashable(parameters, "activation_backward", "parameters")
        return self._session.run(CALLS["activation_backward"], (dy, x), (name, parameters), out, stream)

    def prelu(self, x: Any, slope: Any, *, out: Any = None, stream: Any = None) -> Any:
        """x where it is above 0, else slope * x: of one slope, or of one a channel (dimension 1)."""
        return self._session.run(CALLS["prelu"], (x, slope), (), out, stream)

    def prelu_backward(self, dy: Any, x: Any, slope: Any, *, out: Any = None, stream: Any = None) -> Any:
        """(dx, dslope) of `prelu`, the same bits on every run. Workspace: as many elements as x, in f32 (f64)."""
        return self._session.run(CALLS["prelu_backward"], (dy, x, slope), (), out, stream)

    def op_tensor(self, a: Any, b: Any = None, op: str = "add", *, alpha1: float = 1.0, alpha2: float = 1.0, beta: float = 0.0,
                  out: Any = None, stream: Any = None) -> Any:
        """op(alpha1 * a, alpha2 * b) + beta * out, broadcast: "add", "mul", "min", "max"; of a alone "sqrt", and "not", 1 - alpha1 * a.

        The numbers do not enter the plan. `pointwise` takes any expression; this is the form of cuDNN's OpTensor.
        """
        text = check_choice("op_tensor", "op", op, tuple(_OP_TENSOR)) and _OP_TENSOR[op]
        if (b is None) != ("b" not in text):
            raise expected("op_tensor", "b", "missing" if b is None else "given", f"an array, for {op}" if b is None else f"none, for {op}")
        if beta != 0 and out is None:
            raise expected("op_tensor", "out", None, "what is added beta times", f"beta is {beta}.")
        numbers = {"alpha1": alpha1, "alpha2": alpha2, "beta": beta}
        for name, operand in (("alpha1", "a"), ("alpha2", "b")):
            if numbers[name] != 1 and operand in parse(text).args:
                text = str(parse(text).substitute({operand: parse(f"scalar({name}) * {operand}")}))
        text += "" if beta == 0 else " + c" if beta == 1 else " + scalar(beta) * c"
        given = {"a": a, "b": b, "c": out}
        parsed = parse(text)
        scalars: dict[str, Any] = {name: check_number("op_tensor", name, numbers[name]) for name in parsed.scalars}
        return self.pointwise(text, *(given[n] for n in parsed.args), out=out, stream=stream, **scalars)

    def add_tensor(self, a: Any, c: Any, *, alpha: float = 1.0, beta: float = 1.0, out: Any = None, stream: Any = None) -> Any:
        """alpha * a + beta * c, a broadcast to c; out may be c."""
        numbers: dict[str, Any] = {"alpha": check_number("add_tensor", "alpha", alpha), "beta": check_number("add_tensor", "beta", beta)}
        return self.pointwise("scalar(beta) * c + scalar(alpha) * a", c, a, out=out, stream=stream, **numbers)

    def glu(self, x: Any, axis: int = -1, *, name: str = "glu", out: Any = None, stream: Any = None) -> Any:
        """A gated linear unit of the halves a, b of x along `axis`, which has an even extent: "glu" a * sigmoid(b), as PyTorch's; "swiglu"
        silu(a) * b; "geglu" gelu(a) * b; "geglu_tanh"; "reglu" relu(a) * b; "bilinear" a * b. One launch; out: of any float type."""
        return self._session.run(CALLS["glu"], (x,), (axis, name), out, stream)

    def glu_backward(self, dy: Any, x: Any, axis: int = -1, *, name: str = "glu", out: Any = None, stream: Any = None) -> Any:
        """dx of `glu`, both halves in one launch; out may be x."""
        return self._session.run(CALLS["glu_backward"], (dy, x), (axis, name), out, stream)

    def swiglu(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """silu(a) * b of the halves of x: see `glu`."""
        return self.glu(x, axis, name="swiglu", out=out, stream=stream)

    def swiglu_backward(self, dy: Any, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """dx of `swiglu`."""
        return self.glu_backward(dy, x, axis, name="swiglu", out=out, stream=stream)

    def geglu(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """gelu(a) * b of the halves of x: see `glu`."""
        return self.glu(x, axis, name="geglu", out=out, stream=stream)

    def geglu_backward(self, dy: Any, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """dx of `geglu`."""
        return self.glu_backward(dy, x, axis, name="geglu", out=out, stream=stream)

    def reglu(self, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """relu(a) * b of the halves of x: see `glu`."""
        return self.glu(x, axis, name="reglu", out=out, stream=stream)

    def reglu_backward(self, dy: Any, x: Any, axis: int = -1, *, out: Any = None, stream: Any = None) -> Any:
        """dx of `reglu`."""
        return self.glu_backward(dy, x, axis, name="reglu", out=out, stream=stream)

    def reduce(self, x: Any, op: str = "sum", axes: Any = None, keepdims: bool = False, *, correction: int = 0,
               return_indices: bool = False, out: Any = None, stream: Any = None) -> Any:
        """Reduction over `axes` (None: all): sum, mean, max, min, prod, norm1, norm2, amax, any, all, argmax, argmin, var, std, ...

        correction: of var and std, which divide by the number of elements less it. return_indices: of max, min and amax also the index of
        the first such element, over the reduced axes in their order (int64), by the same launch.
        """
        return self._session.run(CALLS["reduce"], (x,), (op, axes, keepdims, correction, return_indices), out, stream)

    def dot(self, x: Any, x2: Any, *, out: Any = None, stream: Any = None) -> Any:
        """The sum over all elements of x * x2, of like shapes, made in f32 (f64 for f64) in a fixed order; of the type of x."""
        return self._session.run(CALLS["dot"], (x, x2), (), out, stream)

    def reduce_to(self, x: Any, shape: Sequence[int], op: str = "sum", *, out: Any = None, stream: Any = None) -> Any:
        """x reduced ("sum", "max", "min", "prod") to a shape that broadcasts to its own: what broadcast_to spread, taken back."""
        return self._session.run(CALLS["reduce_to"], (x,), (_shape(shape), op), out, stream)

    def trace(self, x: Any, diagonal: int = 0, *, out: Any = None, stream: Any = None) -> Any:
        """The sum of a diagonal of the last two dimensions, above the main one if positive."""
        return self._session.run(CALLS["trace"], (x,), (diagonal,), out, stream)

    def reduce_backward(self, dy: Any, x: Any, op: str = "sum", axes: Any = None, *, y: Any = None, correction: int = 0, out: Any = None,
                        stream: Any = None) -> Any:
        """dx, in the shape and type of x, of y = reduce(x, op, axes), y and dy with or without the reduced dimensions.

        Sums and means are one launch; the others need what the reduction found: y where it is given (var: not), else it is found again.
        Ties of max, min and amax share dy evenly; the one zero of a product gets the product of the others. any, all, argmax, argmin and
        count_nonzero have no gradient.
        """
        return self._session.run(CALLS["reduce_backward"], (dy, x, y), (op, axes, correction), out, stream)

    # ---- layout and shape ----------------------------------------------------------------------------------------------------------

    def permute(self, x: Any, dims: Sequence[int] | None = None, *, out: Any = None, stream: Any = None) -> Any:
        """y with x's dimensions in the order `dims` (None: reversed), dense in its own order; of any type."""
        return self._session.run(CALLS["permute"], (x,), (dims if dims is None else _shape(dims),), out, stream)

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

    def pack4(self, x: Any, kind: str = "s4", *, saturate: bool = True, out: Any = None, stream: Any = None) -> Any:
        """x, of a float type, s8, u8, s32, u32 or s64, as numbers of four bits, two to a byte along the last dimension, the first in the
        low half (uint8; an odd row ends with a half byte of 0). kind: "s4", "u4", which round as `cast` does, and "e2m1" (FP4, to nearest
        even, NaN as 6). saturate: else numbers beyond keep their lowest four bits (not of e2m1)."""
        return self._session.run(CALLS["pack4"], (x,), (kind, saturate), out, stream)

    def unpack4(self, x: Any, kind: str = "s4", *, size: int | None = None, dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """The numbers that `pack4` left in uint8, as `dtype` (default f32). size: how many a row has (default: two a byte)."""
        return self._session.run(CALLS["unpack4"], (x,), (kind, size, dtype), out, stream)

    def gguf_dequantize(self, blocks: Any, format: str, *, dtype: Any = None, out: Any = None, stream: Any = None) -> Any:
        """The numbers of GGUF blocks, uint8 (..., bytes of a row, contiguous), as `dtype` (float32, float16 or bfloat16; default float32),
        (..., elements).

        format: "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K" to "Q6_K", "Q8_K", "IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS",
        "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4". float32 results have the bits of ggml's dequantisers.
        """
        return self._session.run(CALLS["gguf_dequantize"], (blocks,), (format, dtype), out, stream)

    def gguf_matvec(self, blocks: Any, x: Any, format: str, *, ids: Any = None, weights: Any = None, out_dtype: Any = None, out: Any = None,
                    stream: Any = None) -> Any:
        """y (rows, N) = x W^T of W (N, K), GGUF blocks as uint8 (N, bytes of a row), and x (rows, K) or (K,) of float32, float16 or
        bfloat16, added in float32; of type out_dtype (default: x's). Codes are multiplied exactly with up to 8 rows; with more W may be
        rounded to x's type first.

        ids (rows,) or (rows, J), int32 or int64: experts of blocks (E, N, bytes of a row). y[r] is the sum over j, in order, of
        weights[r, j] (1 if none are given) * x[r] W[ids[r, j]]^T; x may be (rows, J, K), one for each. J up to 16, any number
        of rows. An id that is no expert adds nothing; E at least 1. Finite products come out finite while the sizes of the numbers of a
        row of W add up to less than 2^126 (Q8_K: 2^112), and MXFP4's scales are below e = 255, which counts as infinite.
        """
        return self._session.run(CALLS["gguf_matvec"], (blocks, x, ids, weights), (format, out_dtype), out, stream)

    # ---- quantisation ------------------------------------------------------------------------------------------------------------

    def quantize(self, x: Any, kind: str, scale: Any = None, *, axis: int | None = None, zero_point: Any = None, global_scale: Any = None,
                 scaling: Any = None, layout: str = "plain", saturate: bool = True, rounding: str = "even", seed: int | None = None,
                 offset: int = 0, state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """The codes of x / scale + zero_point, to nearest even: with scales given, or none, the codes alone; with scales found on the way
        (codes, scale[, zero_point][, global scale]).

        x: f32, f16 or bf16. kind: "e4m3", "e5m2", "s8", "u8"; of four bits, two to a byte as of `pack4`, "s4", "u4", "nf4", "e2m1".
        scale: an array (see scaling), or how to find scales: "tensor", "channel" (axis, 0), "token" (one for what lies along axis, -1),
        ("group", 128) (along axis, -1), ("block", (128, 128)) of the last two dimensions, "mxfp8", "mxfp4" (32 along axis, powers of two as
        uint8 exponents), "nvfp4" (16, e4m3). Their shapes are x's with as many extents as there are scales; "token" leaves its
        dimension out, "channel" all others. scaling: the same words for an array, where its shape does not tell (groups that do
        not divide x, mx and nvfp4). zero_point: an array beside a scale; "compute" (integers): asymmetric. global_scale (nvfp4): an f32
        number by which scales are multiplied, or "compute". layout: of scales of mx and nvfp4, "plain" or "128x4" (Blackwell's order).
        saturate: what is beyond the largest number becomes it, else NaN (e4m3), an infinity (e5m2), the lowest bits (integers).
        rounding: "stochastic" draws by seed and offset, or state (see `dropout`). NaN, zero blocks, formulas: ops/quantize.py.
        """
        if isinstance(scale, (str, tuple, list)):
            if saturate is not True:
                raise expected("quantize", "saturate", saturate, "True where scales are found on the way")
            if scaling is not None:
                raise expected("quantize", "scaling", repr(scaling), f"None beside scale={scale!r}")
            finds_zero = _computes("quantize", "zero_point", zero_point)
            finds_global = _computes("quantize", "global_scale", global_scale)
            if zero_point is not None and not finds_zero:
                got = "an array" if hasattr(zero_point, "shape") else repr(zero_point)
                raise expected("quantize", "zero_point", got, "'compute', or None, where scales are found on the way")
            return self.dynamic_quantize(x, kind, scale, None if finds_global else global_scale, axis=axis, layout=layout,
                                         asymmetric=finds_zero, find_global=finds_global, rounding=rounding, seed=seed, offset=offset,
                                         state=state, out=out, stream=stream)
        draw = _stochastic("quantize", rounding, seed, offset, state)
        attrs = (kind, hashable(scaling, "quantize", "scaling"), axis, layout, saturate, rounding)
        return self._session.run(CALLS["quantize"], (x, scale, zero_point, global_scale, state), attrs, out, stream, draw)

    def dynamic_quantize(self, x: Any, kind: str, scaling: Any, global_scale: Any = None, *, axis: int | None = None, layout: str = "plain",
                         asymmetric: bool = False, find_global: bool = False, rounding: str = "even", seed: int | None = None,
                         offset: int = 0, state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """(codes, scale[, zero_point][, global scale]): `quantize` with scales found on the way. asymmetric: zero points too, of integers;
        find_global: the global scale too, of nvfp4."""
        draw = _stochastic("dynamic_quantize", rounding, seed, offset, state)
        attrs = (kind, hashable(scaling, "dynamic_quantize", "scaling"), axis, layout, asymmetric, find_global, rounding)
        return self._session.run(CALLS["dynamic_quantize"], (x, global_scale, state), attrs, out, stream, draw)

    def dequantize(self, x: Any, scale: Any = None, zero_point: Any = None, *, kind: str | None = None, scaling: Any = None,
                   axis: int | None = None, global_scale: Any = None, layout: str = "plain", size: int | None = None, dtype: Any = None,
                   out: Any = None, stream: Any = None) -> Any:
        """(x - zero_point) * scale in f32, as `dtype` (f32, f16, bf16). kind: of the codes x, by default x's type, of fp4 scalings "e2m1".
        size: of the last dimension, where codes of four bits end in half a byte. scaling and axis: as given to `quantize`; without
        scaling, (rows,) scales are of rows (a token along the last axis, a channel of axis 0) and axis names the one that they belong to:
        scales of tokens along another axis need scaling="token". The rest as of `quantize`."""
        attrs = (kind, hashable(scaling, "dequantize", "scaling"), axis, layout, size, dtype)
        return self._session.run(CALLS["dequantize"], (x, scale, zero_point, global_scale), attrs, out, stream)

    def fake_quantize(self, x: Any, kind: str, scale: Any, zero_point: Any = None, *, scaling: Any = None, axis: int | None = None,
                      global_scale: Any = None, layout: str = "plain", out: Any = None, stream: Any = None) -> Any:
        """What `dequantize` makes of what `quantize` makes of x, of x's type."""
        attrs = (kind, hashable(scaling, "fake_quantize", "scaling"), axis, layout)
        return self._session.run(CALLS["fake_quantize"], (x, scale, zero_point, global_scale), attrs, out, stream)

    def fake_quantize_backward(self, dy: Any, x: Any, kind: str, scale: Any, zero_point: Any = None, *, scaling: Any = None,
                               axis: int | None = None, global_scale: Any = None, layout: str = "plain", out: Any = None,
                               stream: Any = None) -> Any:
        """dx, straight through: dy where x was within the range of the codes, 0 where it was clipped."""
        attrs = (kind, hashable(scaling, "fake_quantize_backward", "scaling"), axis, layout)
        return self._session.run(CALLS["fake_quantize_backward"], (dy, x, scale, zero_point, global_scale), attrs, out, stream)

    def delayed_scale(self, history: Any, amax: Any, scale: Any, *, kind: str = "e4m3", margin: int = 0, reduction: str = "max",
                      out: Any = None, stream: Any = None) -> Any:
        """(history, scale) after a step: amax ([] or (tensors,)), the largest size of this step's numbers (`reduce`, "amax"), goes before
        history ((steps,) or (steps, tensors), at most 1024), whose last leaves; scale = amax * 2^margin / the largest number of `kind`
        ("e4m3", "e5m2", "s8"), amax the largest of the history ("max") or this step's ("latest"); as it was where that is 0 or not finite.
        All f32; out may be (history, scale)."""
        return self._session.run(CALLS["delayed_scale"], (history, amax, scale), (kind, margin, reduction), out, stream)

    def double_quantize(self, x: Any, *, group: int = 256, out: Any = None, stream: Any = None) -> Any:
        """(codes, scale, offset) of the scales x of a quantisation (f32, dense): e4m3 codes of (x - offset) / scale, offset the mean of x,
        a scale (f32) for `group` numbers in the order of x. QLoRA's second quantisation of the scales of NF4."""
        return self._session.run(CALLS["double_quantize"], (x,), (group,), out, stream)

    def double_dequantize(self, x: Any, scale: Any, offset: Any, *, group: int = 256, out: Any = None, stream: Any = None) -> Any:
        """codes * scale + offset, f32: what `double_quantize` was given, rounded."""
        return self._session.run(CALLS["double_dequantize"], (x, scale, offset), (group,), out, stream)

    def broadcast_to(self, x: Any, shape: Sequence[int], *, out: Any = None, stream: Any = None) -> Any:
        """x repeated along dimensions of size 1 and new leading ones; gradient: `reduce` over them."""
        return self._session.run(CALLS["broadcast_to"], (x,), (_shape(shape),), out, stream)

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
        return self._session.run(CALLS["slice_backward"], (dy,), (starts, stops, steps, axes, _shape(x_shape)), out, stream)

    def tile(self, x: Any, repeats: Any, *, out: Any = None, stream: Any = None) -> Any:
        """x side by side `repeats` times along each of the last dimensions (NumPy's tile, PyTorch's repeat)."""
        return self._session.run(CALLS["tile"], (x,), (repeats,), out, stream)

    def tile_backward(self, dy: Any, repeats: Any, x_shape: Sequence[int] | None = None, *, out: Any = None, stream: Any = None) -> Any:
        """dx: the sum of all copies; x_shape if x has fewer dimensions than dy."""
        return self._session.run(CALLS["tile_backward"], (dy,), (repeats, x_shape if x_shape is None else _shape(x_shape)), out, stream)

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
        arrays = _shape(arrays)
        if not isinstance(arrays, tuple) or not 1 <= len(arrays) <= MAX_PARTS:
            raise expected("concat", "arrays", len(arrays) if isinstance(arrays, tuple) else repr(arrays), f"1 to {MAX_PARTS} arrays")
        if any(array is None for array in arrays):
            raise expected("concat", f"arrays[{next(i for i, array in enumerate(arrays) if array is None)}]", None, "an array")
        return self._session.run(_concat_call(len(arrays)), arrays, (axis,), out, stream)

    def meshgrid(self, arrays: Sequence[Any], indexing: str = "ij", *, out: Any = None, stream: Any = None) -> Any:
        """A tuple of grids, the k-th with the k-th of 1 to 8 arrays (of one dimension, any types) along dimension k, the others' extents
        beside it; indexing "xy": the first two dimensions change places. One launch for arrays of like types."""
        arrays = _shape(arrays)
        if not isinstance(arrays, tuple) or not 1 <= len(arrays) <= MAX_RANK or any(array is None for array in arrays):
            raise expected("meshgrid", "arrays", len(arrays) if isinstance(arrays, tuple) else repr(arrays), f"1 to {MAX_RANK} arrays")
        grids = self._session.run(_meshgrid_call(len(arrays)), arrays, (indexing,), out, stream)
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
        return self._session.run(CALLS["fill"], (), (shape if shape is None else _shape(shape), signed(value), dtype), out, stream)

    # ---- scans ---------------------------------------------------------------------------------------------------------------------

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

    # ---- attention -----------------------------------------------------------------------------------------------------------------

    def attention(self, q: Any, k: Any, v: Any, *, scale: float | None = None, causal: str | None = None,
                  window: tuple[int | None, int | None] | None = None, mask: Any = None, bias: Any = None, alibi: Any = None,
                  score: Any = None, softcap: float | None = None, sinks: Any = None, dropout: float = 0, seed: int | None = None,
                  offset: int = 0, lengths_q: Any = None, lengths_kv: Any = None, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None,
                  block_mask: Any = None, block_size: int | tuple[int, int] | None = None, scale_q: Any = None, scale_k: Any = None,
                  scale_v: Any = None, scale_out: Any = None, out_dtype: Any = None, return_lse: bool = False,
                  operands: Mapping[str, Any] | None = None, scalars: Mapping[str, float] | None = None,
                  out: Any = None, stream: Any = None) -> Any:
        """softmax(E(scale * q k^T)) v over the keys that each query sees: (B, H, L, E); with return_lse also the logarithm of the sum.

        q (B, H, L, D), k (B, G, M, D), v (B, G, M, E), any strides, or without the batch; f64, f32, f16 or bf16 alike; D and E up to 512;
        G divides H: query head h takes head h // (H / G) of k and v. lse (B, H, L) is f32 (f64 of f64), natural logarithm. scale: default
        1 / sqrt(D).

        causal: "top_left" (query i sees keys up to i) or "bottom_right" (up to i + M - L). window: (left, right) keys to either side, None
        for no limit. A query that sees nothing gives 0 and -inf.
        softcap: c * tanh(s / c). bias: broadcasts to (B, H, L, M), added. alibi (H,) or (B, H): times the distance, subtracted. score: an
        expression over score, b, h, i, j, p (the query's place among the keys), `operands` that broadcast to (B, H, L, M) and `scalars`.
        mask: bool (False: not visible) or floats, added last. sinks (H,): logits of a key without a value. All in this order; -inf alone
        masks. dropout: chance that a weight is left out; seed, offset: see `dropout`.
        lengths_q, lengths_kv (B,) int32: how many queries and keys each batch has. cu_seqlens_q, cu_seqlens_kv (N + 1,) int32: where the
        sequences that lie side by side in q (H, T, D) begin, and the last one ends. All four stay on the device.
        block_mask: bool or uint8, broadcasts to (B, H, ceil(L / m), ceil(M / n)) along batch and heads; block_size = (m, n), multiples of
        64, or one number for both: where it is False no query of the block sees any key of it, and tiles of it are skipped.
        q, k, v in float8_e4m3fn or float8_e5m2: scale_q, scale_k, scale_v (one f32, (H,) or (B, H) of the tensor's heads, above 0) multiply
        them. out_dtype: bfloat16 by default, float16, float32 or the 8-bit floats, which scale_out divides.
        FlashAttention: Dao, 2023; online softmax: Milakov and Gimelshein, 2018.
        """
        _check_window("attention", window)
        draw = _dropout_draw("attention", dropout, seed, offset)
        attrs = (scale, causal, window, score, softcap, dropout if draw else None, block_size, return_lse, out_dtype)
        arrays = (q, k, v, mask, bias, alibi, sinks, lengths_q, lengths_kv, cu_seqlens_q, cu_seqlens_kv, block_mask,
                  scale_q, scale_k, scale_v, scale_out)
        return self._session.run(CALLS["attention"], arrays, attrs, out, stream, _numbers("attention", scalars, draw), operands)

    def attention_backward(self, d_out: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, *, scale: float | None = None,
                           causal: str | None = None, window: tuple[int | None, int | None] | None = None, mask: Any = None,
                           bias: Any = None, alibi: Any = None, score: Any = None, softcap: float | None = None, sinks: Any = None,
                           dropout: float = 0, seed: int | None = None, offset: int = 0, lengths_q: Any = None, lengths_kv: Any = None,
                           cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, block_mask: Any = None,
                           block_size: int | tuple[int, int] | None = None, score_gradients: Sequence[str] | str | None = None,
                           operands: Mapping[str, Any] | None = None,
                           scalars: Mapping[str, float] | None = None, gradients: Any = None, stream: Any = None) -> Any:
        """(dq, dk, dv), then dbias with a bias, then dsinks with sinks, then those of the tensors of the scores' expression that
        score_gradients names ("alibi" too): the gradients of `attention` from its result and lse.

        The other arguments as they were. gradients: a tuple of arrays to write instead of new ones. Rows without a visible key, whose lse
        is -inf, have gradients of 0.
        """
        _check_window("attention_backward", window)
        draw = _dropout_draw("attention_backward", dropout, seed, offset)
        arrays = (d_out, q, k, v, out, lse, mask, bias, alibi, sinks, lengths_q, lengths_kv, cu_seqlens_q, cu_seqlens_kv, block_mask)
        attrs = (scale, causal, window, score, softcap, dropout if draw else None, block_size, score_gradients)
        numbers = _numbers("attention_backward", scalars, draw)
        return self._session.run(CALLS["attention_backward"], arrays, attrs, gradients, stream, numbers, operands)

    def paged_attention(self, q: Any, k_cache: Any, v_cache: Any, page_table: Any, lengths_kv: Any, *, scale: float | None = None,
                        causal: str | None = None, window: tuple[int | None, int | None] | None = None, softcap: float | None = None,
                        alibi: Any = None, sinks: Any = None, lengths_q: Any = None, cu_seqlens_q: Any = None, k_scale: Any = None,
                        v_scale: Any = None, num_splits: int | None = None, return_lse: bool = False, out: Any = None,
                        stream: Any = None) -> Any:
        """`attention` of keys and values that lie in pages: key j of sequence b is k_cache[page_table[b, j // page], :, j % page].

        q (B, H, L, D), f16 or bf16; k_cache (P, G, page, D), v_cache (P, G, page, E), any strides (so of pages (page, heads, dim) a view
        with these dimensions swapped), of q's type or e4m3, e5m2 or s8; D and E up to 256. page_table (B, N), lengths_kv (B,) int32, on
        the device; what they do not name is never used. L: query rows, 1 in decoding, more of a draft or a prompt; lengths_q (B,): how
        many each sequence has; or cu_seqlens_q (B + 1,): where they begin in q (H, T, D). k_scale, v_scale: f32, that broadcast to
        (P, G, page), what values of the cache are multiplied by. num_splits: CTAs that deal out a sequence's keys (default: chosen).
        The rest as `attention`.
        vLLM's paged attention: Kwon et al., 2023; Flash-Decoding: Dao et al., 2023.
        """
        _check_window("paged_attention", window)
        arrays = (q, k_cache, v_cache, page_table, lengths_kv, alibi, sinks, lengths_q, cu_seqlens_q, k_scale, v_scale)
        return self._session.run(CALLS["paged_attention"], arrays, (scale, causal, window, softcap, num_splits, return_lse), out, stream)

    def rope(self, x: Any, cos: Any = None, sin: Any = None, *, positions: Any = None, base: float | None = None,
             rotary_dim: int | None = None, interleaved: bool = False, scaling: Mapping[str, Any] | None = None, inverse: bool = False,
             out: Any = None, stream: Any = None) -> Any:
        """Rotary position embedding of x (B, H, L, D) or (H, L, D), any strides; out may be x.

        The first rotary_dim (default D) elements of a row are turned by pairs, i with i + rotary_dim / 2, or interleaved 2 i with 2 i + 1:
        (a, b) becomes (a cos - b sin, b cos + a sin) of the angle position * base^(-2 i / rotary_dim). positions (B, L) or (L,), int32 or
        int64: default 0, 1, ... base: default 10000. Angles are reduced in float64, whatever x's type is.
        cos, sin (M, rotary_dim / 2) or (B, L, rotary_dim / 2): tables instead; of rotary_dim columns, one for each element of a pair.
        scaling: a mapping, with "type" ("rope_type") "linear" (factor), "llama3" (factor, low_freq_factor, high_freq_factor,
        original_max_position_embeddings), "yarn" (factor, original_max_position_embeddings, beta_fast, beta_slow, attention_factor) or
        "longrope" (factors; attention_factor, or factor and original_max_position_embeddings). inverse: see `rope_backward`.
        RoPE: Su et al., 2021; YaRN: Peng et al., 2023; LongRoPE: Ding et al., 2024.
        """
        attrs = (base, rotary_dim, interleaved, _scaling("rope", scaling), inverse)
        return self._session.run(CALLS["rope"], (x, cos, sin, positions), attrs, out, stream)

    def rope_backward(self, dy: Any, cos: Any = None, sin: Any = None, *, positions: Any = None, base: float | None = None,
                      rotary_dim: int | None = None, interleaved: bool = False, scaling: Mapping[str, Any] | None = None, out: Any = None,
                      stream: Any = None) -> Any:
        """dx of `rope` with the same arguments: the transposed rotation, which turns back."""
        return self.rope(dy, cos, sin, positions=positions, base=base, rotary_dim=rotary_dim, interleaved=interleaved, scaling=scaling,
                         inverse=True, out=out, stream=stream)

    def kv_cache_append(self, k: Any, v: Any, k_cache: Any, v_cache: Any, *, slots: Any = None, positions: Any = None,
                        page_table: Any = None, q: Any = None, rope: bool = False, cos: Any = None, sin: Any = None,
                        base: float | None = None, rotary_dim: int | None = None, interleaved: bool = False,
                        scaling: Mapping[str, Any] | None = None, k_scale: Any = None, v_scale: Any = None, q_out: Any = None,
                        stream: Any = None) -> Any:
        """Writes k (B, G, L, D) and v (B, G, L, E) to their tokens' places in the caches (P, G, page, D) and (P, G, page, E), any strides;
        returns (k_cache, v_cache), with a q also q_out.

        slots (B, L): page * page size + key. Or positions (B, L): key p % page of page_table[b, p // page] (B, N), without a table key p of
        page b. int32 or int64. Tokens of negative or too large ones are left out; no two may have the same. Rows without a batch:
        (G, T, D), (T,). Caches of k's type, or e4m3, e5m2 or int8 (to nearest even, saturated) of values divided by k_scale and v_scale,
        f32, that broadcast to (P, G, page). rope: keys and queries q (B, H, L, D) are turned first, as `rope` does by positions; the
        queries go to q_out, default q itself.
        """
        arrays = (k, v, slots, positions, page_table, q, cos, sin, k_scale, v_scale)
        out = (k_cache, v_cache) if q is None else (k_cache, v_cache, q if q_out is None else q_out)
        attrs = (rope, base, rotary_dim, interleaved, _scaling("kv_cache_append", scaling))
        return self._session.run(CALLS["kv_cache_append"], arrays, attrs, out, stream)

    def merge_attention_states(self, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, *, out: Any = None, stream: Any = None) -> Any:
        """(out, lse) of attention over two sets of keys, from its results (B, H, L, E) and logarithms (B, H, L) over each: what a prefix
        that sequences share leaves is made once (cascade). A state whose lse is -inf has no weight, whatever it holds; out may be
        (out_a, lse)."""
        return self._session.run(CALLS["merge_attention_states"], (out_a, lse_a, out_b, lse_b), (), out, stream)

    def multi_head_attention(self, query: Any, key: Any, value: Any, w_q: Any, w_k: Any, w_v: Any, w_out: Any, *, num_heads: int,
                             bias_q: Any = None, bias_k: Any = None, bias_v: Any = None, bias_out: Any = None, residual: Any = None,
                             mask: Any = None, lengths_q: Any = None, lengths_kv: Any = None, scale: float | None = None,
                             causal: str | None = None, window: tuple[int | None, int | None] | None = None, dropout: float = 0,
                             seed: int | None = None, offset: int = 0, return_saved: bool = False, out: Any = None,
                             stream: Any = None) -> Any:
        """The classic layer: `attention` of the heads of query w_q' + bias_q, key w_k' + bias_k and value w_v' + bias_v, their results side
        by side times w_out', plus bias_out and residual: (B, L, O); with return_saved also q, k, v, context and lse, which
        `multi_head_attention_backward` takes.

        query (B, L, E), key (B, M, F), value (B, M, G), any strides (so lengths first in memory as transposed views); w_q (H*D, E), w_k
        (I*D, F), w_v (I*V, G), w_out (O, H*V), H being num_heads and I a divisor of it: pieces of a packed weight will do. One type, f16,
        bf16, f32 or f64; biases any float type. mask, lengths_q, lengths_kv, scale, causal, window and dropout (of weights; seed, offset:
        see `dropout`) are those of `attention`: a mask of bool is True where a query sees a key.
        Vaswani et al., 2017.
        """
        _check_window("multi_head_attention", window)
        draw = _dropout_draw("multi_head_attention", dropout, seed, offset)
        arrays = (query, key, value, w_q, w_k, w_v, w_out, bias_q, bias_k, bias_v, bias_out, residual, mask, lengths_q, lengths_kv)
        attrs = (num_heads, scale, causal, window, dropout if draw else None, return_saved)
        return self._session.run(CALLS["multi_head_attention"], arrays, attrs, out, stream, draw)

    def multi_head_attention_backward(self, d_out: Any, query: Any, key: Any, value: Any, w_q: Any, w_k: Any, w_v: Any, w_out: Any, q: Any,
                                      k: Any, v: Any, context: Any, lse: Any, *, num_heads: int, mask: Any = None, lengths_q: Any = None,
                                      lengths_kv: Any = None, scale: float | None = None, causal: str | None = None,
                                      window: tuple[int | None, int | None] | None = None, dropout: float = 0, seed: int | None = None,
                                      offset: int = 0, bias_gradients: bool = False, gradients: Any = None, stream: Any = None) -> Any:
        """(d_query, d_key, d_value, dw_q, dw_k, dw_v, dw_out), under bias_gradients also dbias_q, dbias_k, dbias_v, dbias_out: the
        gradients of `multi_head_attention`, the same bits on every run.

        q, k, v, context, lse: what it returned under return_saved; the other arguments as they were. gradients: a tuple of arrays to write
        instead of new ones; those of weights and biases may be float32.
        """
        _check_window("multi_head_attention_backward", window)
        draw = _dropout_draw("multi_head_attention_backward", dropout, seed, offset)
        arrays = (d_out, query, key, value, w_q, w_k, w_v, w_out, q, k, v, context, lse, mask, lengths_q, lengths_kv)
        attrs = (num_heads, scale, causal, window, dropout if draw else None, bias_gradients)
        return self._session.run(CALLS["multi_head_attention_backward"], arrays, attrs, gradients, stream, draw)

    # ---- dropout and random numbers ------------------------------------------------------------------------------------------------

    def dropout(self, x: Any, p: float = 0.5, *, return_mask: bool = False, seed: int | None = None, offset: int = 0, state: Any = None,
                out: Any = None, stream: Any = None) -> Any:
        """Zeros with chance p, the rest divided by 1 - p; with return_mask also what is kept, as bool.

        seed, offset: integers in [0, 2^64). They and an element's index (in the order of the dimensions) alone say whether it is kept, on
        every device and in every layout and type; `dropout_backward` with the same two draws the mask again. Take another offset for
        each call. state: instead of them an array of two integers of 64 bits (int64 counts as uint64), seed and offset, which a captured
        graph takes as they are at each replay.
        """
        return self._session.run(CALLS["dropout"], (x, state), (p, return_mask), out, stream, _draw("dropout", seed, offset, state))

    def dropout_backward(self, dy: Any, p: float = 0.5, *, seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None,
                         stream: Any = None) -> Any:
        """dx of `dropout` with the same p, seed and offset."""
        draw = _draw("dropout_backward", seed, offset, state)
        return self._session.run(CALLS["dropout_backward"], (dy, state), (p,), out, stream, draw)

    def rrelu(self, x: Any, lower: float = 1 / 8, upper: float = 1 / 3, *, seed: int | None = None, offset: int = 0, state: Any = None,
              out: Any = None, stream: Any = None) -> Any:
        """x where it is above 0, else x times a slope drawn from [lower, upper) for each element (PyTorch's, in training; else it is
        `activation` "leaky_relu" of the middle). seed, offset: see `dropout`."""
        return self._session.run(CALLS["rrelu"], (x, state), (lower, upper), out, stream, _draw("rrelu", seed, offset, state))

    def rrelu_backward(self, dy: Any, x: Any, lower: float = 1 / 8, upper: float = 1 / 3, *, seed: int | None = None, offset: int = 0,
                       state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """dx of `rrelu` with the same seed and offset."""
        draw = _draw("rrelu_backward", seed, offset, state)
        return self._session.run(CALLS["rrelu_backward"], (dy, x, state), (lower, upper), out, stream, draw)

    def random(self, shape: Sequence[int] | None = None, distribution: str = "uniform", parameters: Sequence[float] | None = None,
               dtype: Any = None, *, seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None,
               stream: Any = None) -> Any:
        """Random numbers: a DeviceArray of `shape` and `dtype` (f32), or `out` filled. seed, offset: see `dropout`.

        distribution, parameters: "uniform" in [low, high), of 24 random bits as all that follow but the two with Box and Muller's numbers,
        "normal" (mean, standard deviation; at most 6.7 of them off) and "log_normal"; "truncated_normal" (mean, deviation, low, high),
        "exponential" (rate), "gumbel", "logistic", "laplace", "cauchy" (location, scale); and counts, of integer types too: "geometric"
        (chance; trials up to the first success), "poisson" (rate), "binomial" (trials, chance).
        """
        draw = _draw("random", seed, offset, state)
        if out is None:
            if shape is None:
                raise expected("random", "shape", None, "a shape, or out")
            out = self.empty(shape, "float32" if dtype is None else dtype)
        parameters = parameters if parameters is None else hashable(parameters, "random", "parameters")
        attrs = (shape if shape is None else _shape(shape), distribution, parameters, dtype)
        return self._session.run(CALLS["random"], (state,), attrs, out, stream, draw)

    def uniform(self, shape: Sequence[int] | None = None, low: float = 0.0, high: float = 1.0, *, dtype: Any = None,
                seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Uniform numbers in [low, high): see `random`."""
        return self.random(shape, "uniform", (low, high), dtype, seed=seed, offset=offset, state=state, out=out, stream=stream)

    def normal(self, shape: Sequence[int] | None = None, mean: float = 0.0, std: float = 1.0, *, dtype: Any = None,
               seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Normal numbers: see `random`."""
        return self.random(shape, "normal", (mean, std), dtype, seed=seed, offset=offset, state=state, out=out, stream=stream)

    def cast_stochastic(self, x: Any, dtype: Any, *, saturate: bool = True, seed: int | None = None, offset: int = 0, state: Any = None,
                        out: Any = None, stream: Any = None) -> Any:
        """x as one of the two numbers of `dtype` around each element, the nearer the likelier, so that the mean is x (to 2^-24 of their
        distance); what `dtype` holds stays. dtype: floats of at most 32 bits, integers. What is beyond its largest number, and saturate:
        as of `cast`. seed, offset: see `dropout`."""
        draw = _draw("cast_stochastic", seed, offset, state)
        return self._session.run(CALLS["cast_stochastic"], (x, state), (dtype, saturate), out, stream, draw)

    def poisson(self, rate: Any, *, dtype: Any = None, seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None,
                stream: Any = None) -> Any:
        """Events at the rate (0 to 700, beyond NaN) that each element says; of its type, or `dtype`. seed, offset: see `dropout`."""
        return self._session.run(CALLS["poisson"], (rate, state), (dtype,), out, stream, _draw("poisson", seed, offset, state))

    def bernoulli(self, probability: Any, *, dtype: Any = None, seed: int | None = None, offset: int = 0, state: Any = None,
                  out: Any = None, stream: Any = None) -> Any:
        """1 with the chance that each element of `probability` gives, else 0; of its type, or `dtype`. seed, offset: see `dropout`."""
        draw = _draw("bernoulli", seed, offset, state)
        return self._session.run(CALLS["bernoulli"], (probability, state), (dtype,), out, stream, draw)


_OP_TENSOR = {"add": "a + b", "mul": "a * b", "min": "minimum(a, b)", "max": "maximum(a, b)", "sqrt": "sqrt(a)", "not": "1 - a"}
_GEMM = CALLS["gemm"]
# The short key of convolutions of floats.
_CONV = Call("conv_fprop", CALLS["conv_fprop"].tensors[:4], CALLS["conv_fprop"].attrs[:6])


def _all_but(op: str, v: Any, dim: int | None) -> tuple[int, ...]:
    """The dimensions of v but `dim`."""
    rank = len(v.shape)
    if dim is None:
        return tuple(range(rank))
    dim = check_integer(op, "dim", dim, -rank, rank - 1) % rank
    if rank < 2:
        raise expected(op, "v", f"of {rank} dimensions", "two or more, or dim=None")
    return tuple(i for i in range(rank) if i != dim)


def _numbers(op: str, scalars: Any, draw: Mapping[str, int]) -> dict[str, Any]:
    if scalars is not None and not isinstance(scalars, Mapping):
        raise expected(op, "scalars", repr(scalars), "a mapping from names to numbers")
    return {**(scalars or {}), **draw}


def _draw(op: str, seed: int | None, offset: int, state: Any = None) -> dict[str, int]:
    """The numbers that name a draw, checked; none where they lie in memory."""
    if state is not None:
        if seed is not None or offset != 0:
            raise expected(op, "seed and offset", (seed, offset), "none beside state")
        return {}
    return {"seed": check_integer(op, "seed", seed, 0, 2**64 - 1), "offset": check_integer(op, "offset", offset, 0, 2**64 - 1)}


def _dropout_draw(op: str, dropout: Any, seed: int | None, offset: int) -> dict[str, int]:
    """The numbers that name the draw of weights, both checked; none without dropout."""
    if isinstance(dropout, Real) and not dropout:
        return {}
    if not 0 <= check_number(op, "dropout", dropout) <= 1:
        raise expected(op, "dropout", dropout, "a number in [0, 1]")
    return _draw(op, seed, offset)


def _stochastic(op: str, rounding: Any, seed: int | None, offset: int, state: Any) -> dict[str, int] | None:
    """The numbers of a draw, None where rounding draws none."""
    if rounding == "stochastic":
        return _draw(op, seed, offset, state)
    if seed is not None or offset != 0:
        raise expected(op, "seed and offset", (seed, offset), "none unless rounding is 'stochastic'")
    return None


def _computes(op: str, name: str, value: Any) -> bool:
    """Whether `value`, an array or None else, is the word "compute"."""
    if isinstance(value, str) and value != "compute":
        raise expected(op, name, repr(value), "an array, None or 'compute'")
    return isinstance(value, str)


def _signature(op: str, arrays: tuple[Any, ...], attrs: Mapping[str, Any]) -> tuple[Call, tuple[Any, ...], tuple[Any, ...]]:
    """(call, arrays padded with None, attribute values in the call's order); array arguments may stand among the keywords too."""
    attrs = dict(attrs)
    if not isinstance(op, str):
        raise expected("plan and explain", "op", repr(op), "the name of an op, then arrays")
    if op == "pointwise" and arrays:
        call, attrs["expression"] = _pointwise_call(hashable(arrays[0], "pointwise", "expression"))
        arrays = arrays[1:]
    elif op in CALLS:
        is_short = op == "conv_fprop" and len(arrays) <= len(_CONV.tensors) and attrs.keys() <= {*_CONV.tensors, *dict(_CONV.attrs)}
        call = _CONV if is_short else CALLS[op]
    elif op in OPS:
        raise InvalidArgument(f"{op} takes lists of arrays (expected a call of h.{op}, which keeps its plans itself).")
    else:
        raise InvalidArgument(f"{op!r} is no op{near(op, (*CALLS, 'pointwise'))}.")
    if len(arrays) > len(call.tensors):
        raise expected(op, "arrays", f"{len(arrays)} of them", f"at most {len(call.tensors)}: {', '.join(call.tensors)}")
    for name, array in zip(call.tensors, arrays, strict=False):
        if isinstance(array, (str, Real)):
            known = ", ".join(n for n, _ in call.attrs) or "it has none"
            raise expected(op, name, repr(array), f"an array; attributes go by name: {known}")
    padded = tuple(arrays[i] if i < len(arrays) else attrs.pop(name, None) for i, name in enumerate(call.tensors))
    values = tuple(attrs.pop(name, default) for name, default in call.attrs)
    if attrs:
        raise expected(op, "arguments", sorted(attrs), f"{', '.join(call.tensors)}, {', '.join(n for n, _ in call.attrs)}")
    return call, padded, values


@lru_cache(maxsize=MAX_PARTS)
def _concat_call(count: int) -> Call:
    """The signature of `concat` with that many arrays."""
    return Call("concat", CONCAT_INPUTS[:count], (("axis", 0),))


@lru_cache(maxsize=MAX_RANK)
def _meshgrid_call(count: int) -> Call:
    """The signature of `meshgrid` of that many arrays."""
    return Call("meshgrid", CONCAT_INPUTS[:count], OPS["meshgrid"].attrs, OPS["meshgrid"].outputs[:count])


@lru_cache(maxsize=1024)
def _pointwise_call(expression: Any) -> tuple[Call, Expression]:
    """The signature of `pointwise` with this expression, and the expression parsed."""
    parsed = parse(expression)
    return Call("pointwise", parsed.args, OPS["pointwise"].attrs, output_names_of(parsed)), parsed


def _shape(value: Any) -> Any:
    """A shape as a tuple; what is none is left for the op to refuse."""
    try:
        return tuple(value)
    except TypeError:
        return value


def _extents(method: str, shape: Any) -> tuple[int, ...]:
    """A shape to allocate. Raises InvalidArgument unless it is a sequence of integers >= 0 that addresses can reach."""
    found = _shape(shape)
    if not isinstance(found, tuple) or not all(isinstance(n, (int, np.integer)) and n >= 0 for n in found):
        raise expected(method, "shape", repr(shape), "a sequence of integers >= 0")
    if prod(int(n) for n in found) >= 2**47:
        raise expected(method, "shape", repr(shape), "fewer than 2^47 elements")
    return tuple(int(n) for n in found)


def _checked(policy: Policy) -> Policy:
    if not isinstance(policy.deterministic, bool):
        raise expected("DnnHandle", "deterministic", repr(policy.deterministic), "True or False")
    limit = policy.workspace_limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int)):
        raise expected("DnnHandle", "workspace_limit", repr(limit), "None or at least 0 bytes")
    if policy.math not in MATH:
        raise expected("DnnHandle", "math", repr(policy.math), " | ".join(MATH))
    if policy.workspace_limit is not None and policy.workspace_limit < 0:
        raise expected("DnnHandle", "workspace_limit", policy.workspace_limit, "None or at least 0 bytes")
    return policy


def open_backend(device: str | None = None, cache_dir: str | Path | None = None) -> Backend:
    """The backend of a device name; None means OXIDNN_DEVICE, else cuda:0, else the emulator (said once)."""
    if device is not None and not isinstance(device, str):
        raise expected("DnnHandle", "device", repr(device), "None, 'cuda', 'cuda:N', 'emu' or 'emu:sm_XY'")
    named = device or switches.get("OXIDNN_DEVICE") or None
    if named is None:
        from .runtime.driver import why_no_cuda

        reason = why_no_cuda()
        if reason:
            report.warn_once("no-cuda", f"oxidnn found no CUDA device ({reason}); kernels run in the CPU emulator of sm_90a. "
                                        f"Name a device to say so: DnnHandle('emu:sm_90a'), or OXIDNN_DEVICE.")
        named = "emu:sm_90a" if reason else "cuda:0"
    kind, which = parse_device(named)
    if kind == "cuda":
        from .runtime.cuda_backend import CudaBackend

        return CudaBackend(int(which), cache_dir=cache_dir)
    from .runtime.emu_backend import EmulatedBackend

    return EmulatedBackend(str(which))


def _scaling(op: str, given: Mapping[str, Any] | None) -> tuple[tuple[str, Any], ...] | None:
    """The mapping as pairs, "type" first, which may be called "rope_type"; those without a value left out."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise expected(op, "scaling", repr(given), "a mapping, with the key 'type'")
    pairs = {("type" if n == "rope_type" else n): hashable(value, op, "scaling") for n, value in given.items() if value is not None}
    return tuple(sorted(pairs.items(), key=lambda pair: (pair[0] != "type", pair[0])))
