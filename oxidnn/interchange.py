"""Other people's arrays: what they are (`raw`, `as_view`) and how results go back to their framework (`Frame`).

Nothing is imported for it: torch, cupy and jax arrays are known by the module of their type, anything else by
__cuda_array_interface__ or __dlpack__. Nothing is copied. torch, cupy and DeviceArray work runs on their current stream, so nothing
waits either; jax, which has no stream to join, is waited for, and so is a stream named in __cuda_array_interface__.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np

from . import dlpack
from .dtypes import dtype
from .errors import InvalidArgument, LaunchError
from .runtime import driver
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


# Alignment by the low four bits of an address, as keys hold it: a look-up costs the warm path less than arithmetic on large integers.
_ALIGN = (16, 1, 2, 1, 4, 1, 2, 1, 8, 1, 2, 1, 4, 1, 2, 1)


def _raw_torch(tensor: Any) -> Raw:
    try:
        pointer = tensor.data_ptr()
        key = (tensor.dtype, tensor.shape, tensor.stride(), _ALIGN[pointer & 15], tensor.device, tensor.is_neg())
    except RuntimeError:  # a sparse or otherwise opaque tensor
        raise _opaque(tensor) from None
    return pointer, key


def _raw_numpy(array: Any) -> Raw:
    if not isinstance(array, np.ndarray):
        raise _no_array(array)
    pointer = array.__array_interface__["data"][0]
    return pointer, (array.dtype, array.shape, array.strides, _ALIGN[pointer & 15], array.flags.writeable)


def _raw_cupy(array: Any) -> Raw:
    pointer = array.data.ptr
    return pointer, (array.dtype, array.shape, array.strides, _ALIGN[pointer & 15], array.device.id)


def _raw_device_array(array: Any) -> Raw:
    desc = array.desc
    return array.ptr, (desc.dtype.name, desc.shape, desc.strides, desc.align, array.device)  # plain values: cheap to hash


def _raw_other(array: Any) -> Raw:
    view = as_view(array)
    return view.ptr, (view.desc, view.device, view.framework, view.is_readonly)


READERS: dict[type, Callable[[Any], Raw]] = {}
_RAW_OF = {"torch": _raw_torch, "cupy": _raw_cupy, "oxidnn": _raw_device_array}


def raw(array: Any) -> Raw:
    """(address, key) of an array; the key is hashable and fixes everything a plan depends on. The warm path's only look at it."""
    kind = type(array)
    reader = READERS.get(kind)
    if reader is None:
        # Subclasses of ndarray (masked arrays, say) are looked at each time.
        reader = READERS[kind] = _raw_numpy if kind is np.ndarray else _RAW_OF.get(framework_of(kind), _raw_other)
    return reader(array)


def alignment(pointer: int) -> int:
    """The largest power of two, at most 16, that divides an address."""
    return _ALIGN[pointer & 15]


def as_view(array: Any, stream: int = 0) -> TensorView:
    """The TensorView of an array of any framework; `stream` is the raw stream that will use it, for producers that ask.

    Raises InvalidArgument for objects that are no arrays, naming what is accepted, and for arrays without plain strided memory.
    """
    framework = framework_of(type(array))
    if framework == "oxidnn" and hasattr(array, "desc"):
        return TensorView(array.desc, array.ptr, "oxidnn", array.device, array)
    if framework == "torch" and hasattr(array, "data_ptr"):
        return _view_of_torch(array)
    if framework == "numpy" and isinstance(array, np.ndarray):
        if hasattr(array, "mask"):
            raise InvalidArgument("array: a masked array was given (expected one without a mask).")
        strides = _element_strides(array.shape, array.strides, array.dtype.itemsize)
        pointer = array.__array_interface__["data"][0]
        desc = _desc(_native(array.dtype), array.shape, strides, pointer)
        return TensorView(desc, pointer, "numpy", "cpu", array, not array.flags.writeable)
    if framework == "cupy" and hasattr(array, "data"):
        strides = _element_strides(array.shape, array.strides, array.dtype.itemsize)
        pointer = array.data.ptr
        return TensorView(_desc(_native(array.dtype), array.shape, strides, pointer), pointer, "cupy", f"cuda:{array.device.id}", array)
    if framework != "jax" and getattr(array, "__cuda_array_interface__", None) is not None:
        return _view_of_cuda_interface(array, framework)
    if hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__"):
        return _view_of_dlpack(array, framework, stream)
    raise _no_array(array)


def _no_array(array: Any) -> InvalidArgument:
    return InvalidArgument(
        f"array: {type(array).__name__} is no array (expected a torch, cupy, jax or NumPy array, an oxidnn.DeviceArray, or anything with "
        f"__dlpack__ or __cuda_array_interface__).")


def _view_of_torch(tensor: Any) -> TensorView:
    try:
        pointer, strides = tensor.data_ptr(), tuple(tensor.stride())
    except RuntimeError:
        raise _opaque(tensor) from None
    if tensor.is_neg():
        raise InvalidArgument("array: this torch tensor is negated lazily, its memory holds the opposite sign (expected x.resolve_neg()).")
    device = f"cuda:{tensor.get_device()}" if tensor.is_cuda else str(tensor.device.type)
    return TensorView(_desc(dtype(tensor.dtype), tuple(tensor.shape), strides, pointer), pointer, "torch", device, tensor)


def _opaque(tensor: Any) -> InvalidArgument:
    return InvalidArgument(f"array: a torch tensor of layout {tensor.layout} was given (expected strided memory).")


def _native(kind: Any) -> Any:
    if not kind.isnative:
        raise InvalidArgument(f"array: its type {kind.str!r} has foreign byte order (expected the machine's own).")
    return dtype(kind)


def _element_strides(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> tuple[int, ...]:
    if any(s % size for s, n in zip(strides, shape, strict=True) if n > 1):
        raise InvalidArgument(f"array: strides of {strides} bytes are no multiples of the element size {size}.")
    return tuple(s // size for s in strides)


def _desc(kind: Any, shape: tuple[int, ...], strides: tuple[int, ...], pointer: int) -> TensorDesc:
    desc = TensorDesc(kind, tuple(int(n) for n in shape), tuple(int(s) for s in strides), alignment(pointer))
    if desc.align < kind.num_bytes and desc.numel:
        raise InvalidArgument(f"array: its address {pointer:#x} is no multiple of the {kind.num_bytes} bytes of {kind} (copy it).")
    return desc


def _view_of_cuda_interface(array: Any, framework: str) -> TensorView:
    interface = array.__cuda_array_interface__
    if interface.get("mask") is not None:
        raise InvalidArgument("array: a masked array was given (expected one without a mask).")
    kind = np.dtype(interface["typestr"])
    shape = tuple(interface["shape"])
    strides = interface.get("strides")
    steps = packed_strides(shape) if strides is None else _element_strides(shape, tuple(strides), kind.itemsize)
    pointer, is_readonly = interface["data"]
    producer = interface.get("stream")
    try:
        index = driver.device_ordinal(pointer) if pointer else 0
    except LaunchError as error:
        raise InvalidArgument(f"array: __cuda_array_interface__ of {type(array).__name__} gives no device address ({error})") from None
    if producer is not None and pointer:
        driver.wait_for(0 if producer == dlpack.LEGACY_STREAM else producer, index)
    return TensorView(_desc(_native(kind), shape, steps, pointer), pointer, framework, f"cuda:{index}", array, bool(is_readonly))


def _view_of_dlpack(array: Any, framework: str, stream: int) -> TensorView:
    if framework == "jax":
        array.block_until_ready()  # and its result likewise: jax may reuse memory as soon as its own stream is done with it
    kind, index = (int(v) for v in array.__dlpack_device__())
    is_host = kind in (dlpack.CPU, dlpack.CUDA_HOST)
    if not is_host and kind not in (dlpack.CUDA, dlpack.CUDA_MANAGED):
        raise InvalidArgument(f"array: {type(array).__name__} lies on DLPack device type {kind} (expected CUDA or host memory).")
    try:
        found = dlpack.read(array, None if is_host else stream)
    except (BufferError, RuntimeError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"array: {type(array).__name__} cannot be taken through DLPack ({error}).") from None
    device = "cpu" if is_host else f"cuda:{index}"
    readonly = found.is_readonly or framework == "jax"
    desc = _desc(found.kind, found.shape, found.strides, found.ptr)
    return TensorView(desc, found.ptr, framework, device, (array, found.capsule), readonly)


# ---- how results go back -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frame:
    """The caller's framework: how it allocates an output, which stream is current there, and what a result finally becomes."""

    framework: str
    allocator: Callable[[TensorDesc], Callable[[], Any]]
    current_stream: Callable[[], int]
    address: Callable[[Any], int]
    finish: Callable[[Any], Any] | None = None  # e.g. DeviceArray -> jax array
    takes_stream: bool = True
    # guard(arrays) -> check, or None: check(*others) is true only for as many arrays of the same class, type, device, layout, shape and
    # strides each, told by one call. It says nothing of addresses.
    guard: Callable[[Sequence[Any]], Callable[..., bool] | None] | None = None
    # Results were allocated in the order of the frame's own stream: makes them safe to write on another one.
    adopt: Callable[[tuple[Any, ...], int], None] | None = None

    def stream(self, explicit: Any) -> int:
        """The raw handle of an explicit stream (an int, or an object of cupy, torch or cuda.core), else of the current one."""
        if explicit is None:
            return self.current_stream()
        if not self.takes_stream:
            raise InvalidArgument(f"stream: {explicit!r} was given with jax arrays (expected None: they run on the handle's stream).")
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


def _dense(empty: Callable[..., Any], strided: Callable[..., Any], desc: TensorDesc, kind: Any) -> Any:
    """An array with the memory order of `desc`, and its gaps if it has any, through an `empty(shape, dtype)` that knows row-major only and
    a `strided(array, shape, strides in bytes)` that gives another view of its memory."""
    if desc.numel <= (end := desc.offset_range[1]):
        return strided(empty((end + 1,), dtype=kind), desc.shape, tuple(s * desc.dtype.num_bytes for s in desc.strides))
    order = memory_order(desc)
    array = empty(tuple(desc.shape[d] for d in order), dtype=kind)
    return array if order == tuple(range(desc.rank)) else array.transpose(tuple(order.index(d) for d in range(desc.rank)))


# torch's compiler calls into two functions below the dispatcher, for the same reason as a warm call does: torch.empty_strided takes
# twice the time of the allocation, reading a tensor's properties one by one three times that of comparing them all. They are private:
# each is tried on a case whose answer is known, and done without where it is missing or answers otherwise.


def _torch_private(torch: Any, name: str) -> Any:
    return getattr(getattr(getattr(torch._C, "_dynamo", None), "guards", None), name, None)


def _torch_allocator(torch: Any, device: Any, desc: TensorDesc) -> Callable[[], Any]:
    kind = getattr(torch, desc.dtype.long_name)
    plain = partial(torch.empty_strided, desc.shape, desc.strides, dtype=kind, device=device)
    direct = _torch_private(torch, f"_empty_strided_{device.type}")
    try:
        made = direct((0, 3), (5, 1), kind)
        if (made.shape, made.stride(), made.dtype, made.device.type) != ((0, 3), (5, 1), kind, device.type):
            return plain
    except Exception:
        return plain
    if device.type != "cuda" or torch.cuda.device_count() == 1:
        return partial(direct, desc.shape, desc.strides, kind)
    current, index = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device), device.index

    def allocate() -> Any:  # direct() allocates on the current device
        return direct(desc.shape, desc.strides, kind) if current() == index else plain()

    return allocate


def _torch_guard(guards: Any, tensor: type, arrays: Sequence[Any]) -> Callable[..., bool] | None:
    if guards is None or not all(isinstance(a, tensor) for a in arrays):
        return None
    try:
        sizes, strides = [list(a.shape) for a in arrays], [list(a.stride()) for a in arrays]
        check = guards(*arrays, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides).check
        return check if check(*arrays) is True and not check(*(a[None] for a in arrays)) else None
    except Exception:
        return None


def frame_of(example: Any, backend: Backend, stream: int) -> Frame:
    """The Frame of the framework `example` comes from; `stream` is the handle's own, for frameworks that have none."""
    framework = framework_of(type(example))
    if framework == "torch":
        torch = sys.modules["torch"]
        device = example.device  # the frame outlives the call: it may not keep the example alive

        allocate = partial(_torch_allocator, torch, device)
        guard = partial(_torch_guard, _torch_private(torch, "TensorGuards"), torch.Tensor)
        if not example.is_cuda:
            return Frame("torch", allocate, lambda: stream, torch.Tensor.data_ptr, guard=guard)
        index = example.get_device()
        getter = getattr(torch._C, "_cuda_getCurrentRawStream", None)
        current = partial(getter, index) if getter else lambda: torch.cuda.current_stream(index).cuda_stream

        def adopt_torch(results: tuple[Any, ...], on: int) -> None:
            if on != current():
                backend.order(current(), on)
                for result in results:
                    result.record_stream(torch.cuda.ExternalStream(on, device=device))

        return Frame("torch", allocate, current, torch.Tensor.data_ptr, guard=guard, adopt=adopt_torch)
    if framework == "numpy":
        def view(memory: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            return np.ndarray(shape, memory.dtype, memory, strides=strides)

        return Frame("numpy", lambda desc: partial(_dense, np.empty, view, desc, desc.dtype.numpy), lambda: stream, lambda a: a.ctypes.data)
    if framework == "cupy":
        cupy = sys.modules["cupy"]
        place = example.device

        def empty(shape: tuple[int, ...], dtype: Any) -> Any:
            with place:
                return cupy.empty(shape, dtype)

        def strided(memory: Any, shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
            return cupy.ndarray(shape, memory.dtype, memory.data, strides=strides)

        def current_cupy() -> int:
            return cupy.cuda.get_current_stream().ptr

        return Frame("cupy", lambda desc: partial(_dense, empty, strided, desc, desc.dtype.numpy), current_cupy, lambda a: a.data.ptr,
                     adopt=lambda _, on: backend.order(current_cupy(), on))
    from . import array

    def allocate_here(desc: TensorDesc) -> Callable[[], Any]:
        return partial(array.empty, backend, desc, stream)

    if framework == "jax":
        from_dlpack = sys.modules["jax"].dlpack.from_dlpack

        def finish(result: Any) -> Any:
            backend.synchronize(stream)
            return from_dlpack(result)

        return Frame("jax", allocate_here, lambda: stream, attrgetter("ptr"), finish, takes_stream=False)

    def adopt(results: tuple[Any, ...], on: int) -> None:
        backend.order(stream, on)
        for result in results:
            result.move_to_stream(on)

    return Frame("oxidnn", allocate_here, lambda: stream, attrgetter("ptr"), adopt=adopt)
