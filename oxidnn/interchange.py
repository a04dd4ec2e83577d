"""Other people's arrays: what they are (`raw`, `as_view`) and how results go back to their framework (`Frame`).

Nothing is imported for it: torch, cupy and jax arrays are known by the module of their type, anything else by
__cuda_array_interface__ or __dlpack__. Nothing is copied and nothing synchronised.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from .dtypes import dtype
from .errors import InvalidArgument
from .tensor import TensorDesc, TensorView, packed_strides

if TYPE_CHECKING:
    from .runtime.backend import Backend

Raw = tuple[int, tuple[Any, ...]]


# ---- what an array is -------------------------------------------------------------------------------------------------------


def framework_of(kind: type) -> str:
    """"torch", "numpy", "cupy", "jax" or "oxidnn" by the modules of the type and its bases; "other" else."""
    for base in kind.__mro__:
        root = base.__module__.partition(".")[0]
        if root in ("torch", "numpy", "cupy", "oxidnn"):
            return root
        if root in ("jax", "jaxlib"):
            return "jax"
    return "other"


def _raw_torch(tensor: Any) -> Raw:
    pointer = tensor.data_ptr()
    return pointer, (tensor.dtype, tensor.shape, tensor.stride(), pointer & 15, tensor.get_device())


def _raw_numpy(array: np.ndarray) -> Raw:
    pointer = array.ctypes.data
    return pointer, (array.dtype, array.shape, array.strides, pointer & 15, array.flags.writeable)


def _raw_device_array(array: Any) -> Raw:
    return array.ptr, (array.desc, array.device)


def _raw_other(array: Any) -> Raw:
    view = as_view(array)
    return view.ptr, (view.desc, view.device, view.framework, view.is_readonly)


_RAW: dict[type, Callable[[Any], Raw]] = {}
_RAW_OF = {"torch": _raw_torch, "numpy": _raw_numpy, "oxidnn": _raw_device_array}


def raw(array: Any) -> Raw:
    """(address, key) of an array; the key is hashable and fixes everything a plan depends on. The warm path's only look at it."""
    kind = type(array)
    reader = _RAW.get(kind)
    if reader is None:
        reader = _RAW[kind] = _RAW_OF.get(framework_of(kind), _raw_other)
    return reader(array)


def alignment(pointer: int) -> int:
    """The largest power of two, at most 16, that divides an address."""
    return (pointer & -pointer & 15) or 16


def as_view(array: Any) -> TensorView:
    """The TensorView of an array of any framework. Raises InvalidArgument for objects that are none, naming what is accepted."""
    framework = framework_of(type(array))
    if framework == "oxidnn" and hasattr(array, "desc"):
        return TensorView(array.desc, array.ptr, "oxidnn", array.device, array)
    if framework == "torch":
        pointer = array.data_ptr()
        device = f"cuda:{array.get_device()}" if array.is_cuda else str(array.device.type)
        return TensorView(_desc(dtype(array.dtype), tuple(array.shape), tuple(array.stride()), pointer), pointer, "torch", device, array)
    if framework == "numpy" and isinstance(array, np.ndarray):
        pointer = array.ctypes.data
        size = array.dtype.itemsize
        if any(s % size for s, n in zip(array.strides, array.shape, strict=True) if n > 1):
            raise InvalidArgument(f"array: strides {array.strides} are no multiples of the element size {size}.")
        strides = tuple(s // size for s in array.strides)
        return TensorView(_desc(dtype(array.dtype), array.shape, strides, pointer), pointer, "numpy", "cpu", array, not array.flags.writeable)
    interface = getattr(array, "__cuda_array_interface__", None)
    if interface is not None:
        kind = dtype(np.dtype(interface["typestr"]) if framework != "cupy" else array.dtype)
        shape = tuple(interface["shape"])
        strides = tuple(s // kind.num_bytes for s in interface["strides"]) if interface.get("strides") else packed_strides(shape)
        pointer, readonly = interface["data"]
        device = f"cuda:{_device_index(array)}"
        return TensorView(_desc(kind, shape, strides, pointer), pointer, framework, device, array, readonly or framework == "jax")
    if hasattr(array, "__dlpack__"):
        return _view_of_dlpack(array, framework)
    raise InvalidArgument(
        f"array: {type(array).__name__} is no array (expected a torch, cupy, jax or NumPy array, an oxidnn.DeviceArray, or anything with "
        f"__dlpack__ or __cuda_array_interface__).")


def _desc(kind: Any, shape: tuple[int, ...], strides: tuple[int, ...], pointer: int) -> TensorDesc:
    return TensorDesc(kind, tuple(int(n) for n in shape), tuple(int(s) for s in strides), alignment(pointer))


def _device_index(array: Any) -> int:
    device = getattr(array, "device", None)
    index = getattr(device, "id", device)
    return index if isinstance(index, int) else array.__dlpack_device__()[1] if hasattr(array, "__dlpack_device__") else 0


def _view_of_dlpack(array: Any, framework: str) -> TensorView:
    """Through cuda.core's StridedMemoryView, with no stream ordering: the caller's stream is ours."""
    from cuda.core.utils import StridedMemoryView

    kind_of_device, index = array.__dlpack_device__()
    view = StridedMemoryView.from_dlpack(array, stream_ptr=-1 if framework != "jax" else 0)
    shape = tuple(view.shape)
    strides = tuple(view.strides) if view.strides is not None else packed_strides(shape)
    device = "cpu" if kind_of_device in (1, 3) else f"cuda:{index}"
    readonly = bool(view.readonly) or framework == "jax"
    return TensorView(_desc(dtype(view.dtype), shape, strides, view.ptr), view.ptr, framework, device, (array, view), readonly)


# ---- how results go back -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """The caller's framework: how it allocates an output, which stream is current there, and what a result finally becomes."""

    framework: str
    allocator: Callable[[TensorDesc], Callable[[], Any]]
    current_stream: Callable[[], int]
    finish: Callable[[Any], Any] | None = None  # e.g. DeviceArray -> jax array

    def stream(self, explicit: Any) -> int:
        """The raw handle of an explicit stream (an int, or an object of cupy, torch or cuda.core), else of the current one."""
        if explicit is None:
            return self.current_stream()
        if isinstance(explicit, int):
            return explicit
        for name in ("cuda_stream", "ptr", "handle"):
            value = getattr(explicit, name, None)
            if value is not None:
                return int(value)
        if hasattr(explicit, "__cuda_stream__"):
            return int(explicit.__cuda_stream__()[1])
        raise InvalidArgument(f"stream: {explicit!r} is no stream (expected a raw handle, or a torch, cupy or cuda.core stream).")


def memory_order(desc: TensorDesc) -> tuple[int, ...]:
    """The dimensions from slowest to fastest in memory."""
    return tuple(sorted(range(desc.rank), key=lambda d: (-desc.strides[d], d)))


def _dense(empty: Callable[..., Any], desc: TensorDesc, kind: Any) -> Any:
    """A dense array with the memory order of `desc`, through an `empty(shape, dtype)` that knows row-major only."""
    order = memory_order(desc)
    array = empty(tuple(desc.shape[d] for d in order), dtype=kind)
    return array if order == tuple(range(desc.rank)) else array.transpose(tuple(order.index(d) for d in range(desc.rank)))


def frame_of(example: Any, backend: Backend, stream: int) -> Frame:
    """The Frame of the framework `example` comes from; `stream` is the handle's own, for frameworks that have none."""
    framework = framework_of(type(example))
    if framework == "torch":
        torch = sys.modules["torch"]
        names = {d: getattr(torch, d) for d in ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")}
        names |= {d: getattr(torch, d) for d in ("float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64") if hasattr(torch, d)}

        def allocate(desc: TensorDesc) -> Callable[[], Any]:
            return partial(torch.empty_strided, desc.shape, desc.strides, dtype=names[desc.dtype.long_name], device=example.device)

        if not example.is_cuda:
            return Frame("torch", allocate, lambda: stream)
        index = example.get_device()
        getter = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        current = partial(getter, index) if getter else lambda: torch.cuda.current_stream(index).cuda_stream
        return Frame("torch", allocate, current)
    if framework == "numpy":
        return Frame("numpy", lambda desc: partial(_dense, np.empty, desc, desc.dtype.numpy), lambda: stream)
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        return Frame("cupy", lambda desc: partial(_dense, cupy.empty, desc, desc.dtype.numpy), lambda: cupy.cuda.get_current_stream().ptr)
    from . import array

    finish = None
    if framework == "jax":
        finish = sys.modules["jax"].dlpack.from_dlpack
    return Frame("oxidnn", lambda desc: partial(array.empty, backend, desc, stream), lambda: stream, finish)
