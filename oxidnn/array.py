"""DeviceArray: device memory with a type, a shape and strides, for users who have no array library of their own.

It is a container, not an array library: it copies to and from NumPy, gives views, and passes its memory to others through DLPack and
__cuda_array_interface__ without a copy.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from . import dlpack
from .dtypes import DType
from .errors import InvalidArgument, expected
from .tensor import TensorDesc, layout_order, packed_strides

if TYPE_CHECKING:
    from .runtime.backend import Allocation, Backend


class _Memory:
    """Owns an allocation that arrays share; frees it with the last of them, in the order of the stream it was allocated on."""

    __slots__ = ("allocation",)

    def __init__(self, allocation: Allocation) -> None:
        self.allocation = allocation

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:  # by then the module may have lost its names
        if not is_finalizing():
            with contextlib.suppress(Exception):  # nobody can be told: the context may be gone
                self.allocation.free()


class DeviceArray:
    """An array in the memory of a device.

    shape: logical (N, C, spatial). strides: in elements, as torch's stride(), not bytes. dtype: oxidnn's DType; str(dtype) is its short
    name. device: "cuda:N" or "emu". ptr: address of the first element. stream: the raw stream its last known writer runs on.

    `numpy()` copies to the host. On a GPU `__dlpack__` and `__cuda_array_interface__` share the memory with torch, cupy and jax; on
    the emulated device NumPy shares it (`numpy.from_dlpack(a)`, `numpy.asarray(a)`). The memory is freed, in the order of its stream,
    when the last array or foreign view of it goes.

    Concurrency: an immutable description of mutable memory; ordering accesses is the caller's affair, as with any device memory.
    """

    __slots__ = ("__weakref__", "_memory", "backend", "desc", "ptr", "stream")
    __hash__ = object.__hash__

    def __init__(self, backend: Backend, desc: TensorDesc, ptr: int, memory: _Memory, stream: int) -> None:
        self.backend = backend
        self.desc = desc
        self.ptr = ptr
        self.stream = stream
        self._memory = memory

    # ---- what it is ----

    @property
    def device(self) -> str:
        return self.backend.device

    @property
    def shape(self) -> tuple[int, ...]:
        return self.desc.shape

    @property
    def strides(self) -> tuple[int, ...]:
        return self.desc.strides

    @property
    def dtype(self) -> DType:
        return self.desc.dtype

    @property
    def ndim(self) -> int:
        return self.desc.rank

    @property
    def size(self) -> int:
        """Number of elements."""
        return self.desc.numel

    @property
    def nbytes(self) -> int:
        """Bytes of the elements themselves."""
        return self.desc.num_bytes

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError("len() of a DeviceArray without dimensions")
        return self.shape[0]

    def __repr__(self) -> str:
        return f"DeviceArray({self.desc} on {self.device})"

    # ---- to the host ----

    def numpy(self) -> np.ndarray:
        """A copy as a C-contiguous NumPy array (bf16 and fp8 in ml_dtypes' types). Waits for the array's stream."""
        low, high = self.desc.offset_range
        size = self.dtype.num_bytes
        raw = np.empty((high - low + 1) * size, np.uint8)
        if self.size:
            self.backend.download(raw, self.ptr + low * size, self.stream)
            self.backend.synchronize(self.stream)
        return np.ascontiguousarray(_strided(raw, self.desc, -low)).reshape(self.shape)

    def move_to_stream(self, stream: int) -> None:
        """Further work on the array, its copies to the host and finally its release are ordered by `stream`. The caller has ordered
        `stream` after what was enqueued before."""
        self.stream = stream
        self._memory.allocation.move_to_stream(stream)

    def item(self) -> Any:
        """The value of an array of one element."""
        return self.numpy().item()

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """On the emulated device the memory itself; from a GPU nothing is copied behind the user's back."""
        if self.device != "emu":
            raise TypeError(f"a DeviceArray on {self.device} is no host array: use .numpy() to copy it")
        array = self.numpy() if copy else self._host_view()
        if dtype is None or np.dtype(dtype) == array.dtype:
            return array
        if copy is False:
            raise ValueError(f"a {self.dtype} array cannot become {np.dtype(dtype)} without a copy")
        return array.astype(dtype)

    def _host_view(self) -> np.ndarray:
        self._expose()
        return dlpack.window(self._memory, self.ptr, self.shape, self.strides, self.dtype.num_bytes).view(self.dtype.numpy)

    def _expose(self) -> None:
        """Host code may write the memory from now on, unseen by the emulator: count it as written."""
        low, high = self.desc.offset_range
        if self.size:
            size = self.dtype.num_bytes
            self.backend.mark_written(self.ptr + low * size, (high - low + 1) * size)

    # ---- to other frameworks ----

    def __dlpack_device__(self) -> tuple[int, int]:
        kind, _, index = self.device.partition(":")
        return (dlpack.CUDA, int(index)) if kind == "cuda" else (dlpack.CPU, 0)

    def __dlpack__(self, *, stream: int | None = None, max_version: tuple[int, int] | None = None,
                   dl_device: tuple[int, int] | None = None, copy: bool | None = None) -> Any:
        """A DLPack capsule over the memory; the consumer's stream waits for this array's (-1: it does not).

        dl_device: the array's own device, or (1, 0) for a copy on the host. Raises BufferError for any other.
        """
        is_versioned = max_version is not None and tuple(max_version) >= (1, 0)
        here = self.__dlpack_device__()
        wanted = here if dl_device is None else (int(dl_device[0]), int(dl_device[1]))
        if wanted != here:
            if wanted[0] != dlpack.CPU or copy is False:
                raise BufferError(f"a DeviceArray on {self.device} cannot be given out on DLPack device {wanted} without a copy")
            host = self.numpy()
            strides = packed_strides(self.shape)
            return dlpack.export(host, host.ctypes.data, self.dtype, self.shape, strides, (dlpack.CPU, 0), is_versioned=is_versioned)
        if copy:
            twin = from_numpy(self.backend, self.numpy(), self.dtype, "nchw", self.stream)
            return twin.__dlpack__(stream=stream, max_version=max_version)
        if here[0] == dlpack.CPU:
            self._expose()
        else:
            self._order_before(stream)
        return dlpack.export(self._memory, self.ptr, self.dtype, self.shape, self.strides, here, is_versioned=is_versioned)

    def _order_before(self, consumer: int | None) -> None:
        if consumer == dlpack.NO_SYNC:
            return
        if consumer == 0:
            raise InvalidArgument("__dlpack__: stream is 0, which is ambiguous (expected None, -1, 1, 2 or a raw stream).")
        raw = 0 if consumer in (None, dlpack.LEGACY_STREAM) else int(consumer)  # type: ignore[arg-type]
        if raw != self.stream:
            self._memory.allocation.share()
            self.backend.order(self.stream, raw)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Version 3, on a GPU only. bf16 and fp8 have no type string there: use DLPack for them."""
        if self.device == "emu":
            raise AttributeError("a DeviceArray on the emulated device has no __cuda_array_interface__")
        if self.dtype.name in ("bf16", "e4m3", "e5m2"):
            raise AttributeError(f"__cuda_array_interface__ has no name for {self.dtype}; use __dlpack__")
        size = self.dtype.num_bytes
        strides = None if self.desc.is_packed() else tuple(s * size for s in self.strides)
        return {"shape": self.shape, "typestr": self.dtype.numpy.str, "data": (self.ptr if self.size else 0, False), "version": 3,
                "strides": strides, "stream": self.stream or dlpack.LEGACY_STREAM}

    # ---- views ----

    def reshape(self, *shape: Any) -> DeviceArray:
        """A view of another shape (one extent may be -1). Raises InvalidArgument unless the array is packed in logical order."""
        wanted = tuple(int(n) for n in (shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape))
        if not self.desc.is_packed():
            raise expected("reshape", "the array", f"laid out as {self.desc.layout} with strides {self.strides}", "packed in logical order")
        known = 1
        for n in wanted:
            known *= n if n >= 0 else 1
        full = wanted
        if wanted.count(-1) == 1 and known and self.size % known == 0:
            full = tuple(self.size // known if n == -1 else n for n in wanted)
        if min(full, default=0) < 0 or _product(full) != self.size:
            raise expected("reshape", "shape", wanted, f"{self.size} elements in all, at most one extent -1")
        return self._view(full, packed_strides(full), 0)

    def permute(self, *axes: Any) -> DeviceArray:
        """A view with the dimensions in the order `axes`."""
        order = tuple(int(a) for a in (axes[0] if len(axes) == 1 and isinstance(axes[0], Sequence) else axes))
        if sorted(a % self.ndim if self.ndim else a for a in order) != list(range(self.ndim)):
            raise expected("permute", "axes", order, f"each of 0..{self.ndim - 1} once")
        return self._view(tuple(self.shape[a] for a in order), tuple(self.strides[a] for a in order), 0)

    def __getitem__(self, index: Any) -> DeviceArray:
        """A view by integers, slices, `...` and None, as NumPy's basic indexing."""
        items = index if isinstance(index, tuple) else (index,)
        if any(i is not None and i is not Ellipsis and not isinstance(i, (int, slice, np.integer)) for i in items):
            raise TypeError(f"DeviceArray: index {index!r} (expected integers, slices, ... and None; arrays of indices are not taken)")
        taken = sum(1 for i in items if i is not None and i is not Ellipsis)
        if items.count(Ellipsis) > 1 or taken > self.ndim:
            raise IndexError(f"DeviceArray: index {index!r} does not fit {self.ndim} dimensions")
        at = items.index(Ellipsis) if Ellipsis in items else len(items)
        whole = (slice(None),) * (self.ndim - taken)
        items = (*items[:at], *whole, *items[at + 1 :])
        shape: list[int] = []
        strides: list[int] = []
        offset, axis = 0, 0
        for item in items:
            if item is None:
                shape.append(1)
                strides.append(0)
                continue
            extent, stride = self.shape[axis], self.strides[axis]
            if isinstance(item, slice):
                start, stop, step = item.indices(extent)
                count = len(range(start, stop, step))
                offset += start * stride if count else 0
                shape.append(count)
                strides.append(stride * step)
            else:
                position = int(item) + (extent if item < 0 else 0)
                if not 0 <= position < extent:
                    raise IndexError(f"DeviceArray: index {item} is out of range for dimension {axis} of size {extent}")
                offset += position * stride
            axis += 1
        return self._view(tuple(shape), tuple(strides), offset)

    def _view(self, shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> DeviceArray:
        ptr = self.ptr + offset * self.dtype.num_bytes
        desc = TensorDesc(self.dtype, shape, strides, (ptr & -ptr & 15) or 16)
        return DeviceArray(self.backend, desc, ptr, self._memory, self.stream)


def _product(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def _strided(raw: np.ndarray, desc: TensorDesc, first: int) -> np.ndarray:
    """The array `desc` describes in the bytes `raw`, its element 0 at element `first`."""
    if desc.numel == 0:
        return np.empty(desc.shape, desc.dtype.numpy)
    size = desc.dtype.num_bytes
    return np.ndarray(desc.shape, desc.dtype.numpy, raw, first * size, tuple(s * size for s in desc.strides))


def empty(backend: Backend, desc: TensorDesc, stream: int) -> DeviceArray:
    """An uninitialised array laid out as `desc` says (non-negative strides), allocated in the order of `stream`."""
    low, high = desc.offset_range
    if low < 0:
        raise expected("empty", "strides", desc.strides, "no negative ones")
    allocation = backend.allocate((high + 1) * desc.dtype.num_bytes, stream)
    return DeviceArray(backend, TensorDesc(desc.dtype, tuple(desc.shape), tuple(desc.strides)), allocation.ptr, _Memory(allocation), stream)


def zeros(backend: Backend, desc: TensorDesc, stream: int) -> DeviceArray:
    """As `empty`, every byte zero."""
    array = empty(backend, desc, stream)
    if array.size:
        backend.fill(array.ptr, 0, (desc.offset_range[1] + 1) * desc.dtype.num_bytes, stream)
    return array


def from_numpy(backend: Backend, host: np.ndarray, dtype: DType, layout: str, stream: int) -> DeviceArray:
    """A copy of `host`, rounded to `dtype` (to nearest even; e4m3, which has no infinity, saturates), lying in `layout`."""
    host = np.asarray(host)
    values = _to_storage(host, dtype)
    array = empty(backend, TensorDesc.packed(dtype, host.shape, layout), stream)
    if array.size:
        backend.upload(array.ptr, np.ascontiguousarray(values.transpose(layout_order(layout, host.ndim))), stream)
    return array


def _to_storage(host: np.ndarray, kind: DType) -> np.ndarray:
    if host.dtype == kind.numpy:
        return host
    if kind.name == "e4m3":
        host = np.clip(host.astype(np.float32), -kind.max, kind.max)
    return host.astype(kind.numpy)
