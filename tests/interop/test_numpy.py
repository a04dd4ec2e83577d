"""NumPy and the emulated device share memory both ways; DLPack's corners, by capsules of our own and of NumPy."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from oxidnn import dlpack
from oxidnn.array import DeviceArray, empty, from_numpy
from oxidnn.dtypes import DLPACK_CODES, F32, TABLE, DType, dtype
from oxidnn.errors import InvalidArgument
from oxidnn.interchange import as_view, frame_of, raw
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.tensor import TensorDesc

IN_NUMPY = [d for d in TABLE if d.name not in ("bf16", "e4m3", "e5m2")]


@pytest.fixture(autouse=True)
def _collect_what_a_test_makes() -> Iterator[None]:
    """gc.collect() passes over what was there before: millions of objects by the time that other tests have run."""
    gc.freeze()
    yield
    gc.unfreeze()


class Producer:
    """An array of no known framework that exports `array`, and notes what it was asked."""

    def __init__(self, array: Any, kind: DType | None = None, device: tuple[int, int] = (1, 0), is_old: bool = False,
                 is_readonly: bool = False) -> None:
        self.array, self.device, self.is_old, self.is_readonly = array, device, is_old, is_readonly
        self.kind = kind or dtype(array.dtype)
        self.asked: dict[str, Any] = {}

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, **asked: Any) -> Any:
        if self.is_old and "max_version" in asked:
            raise TypeError("__dlpack__() got an unexpected keyword argument 'max_version'")
        self.asked = asked
        size = self.array.itemsize
        return dlpack.export(self.array, self.array.ctypes.data, self.kind, self.array.shape, tuple(s // size for s in self.array.strides),
                             self.device, is_versioned=not self.is_old, is_readonly=self.is_readonly)


@pytest.fixture
def backend() -> EmulatedBackend:
    return EmulatedBackend("sm_80")


@pytest.mark.parametrize("kind", IN_NUMPY, ids=str)
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_numpy_takes_emulated_arrays_without_a_copy(backend: EmulatedBackend, kind: DType, layout: str) -> None:
    host = np.random.default_rng().integers(0, 2, (2, 3, 4, 5)).astype(kind.numpy)
    a = from_numpy(backend, host, kind, layout, 0)
    n = np.from_dlpack(a)  # type: ignore[arg-type]
    assert n.dtype == kind.numpy and (n == host).all() and n.ctypes.data == a.ptr
    n[1, 2] = 1
    assert (a.numpy()[1, 2] == 1).all() and np.asarray(a).ctypes.data == a.ptr


@pytest.mark.parametrize("name", ["bf16", "e4m3", "e5m2"])
def test_small_floats_go_by_array_not_by_dlpack(backend: EmulatedBackend, name: str) -> None:
    a = from_numpy(backend, np.arange(6.0).reshape(2, 3), dtype(name), "nchw", 0)
    n = np.asarray(a)
    assert n.dtype == dtype(name).numpy and n.ctypes.data == a.ptr and (n == a.numpy()).all()
    with pytest.raises((BufferError, RuntimeError), match="[Uu]nsupported|not supported|dtype"):
        np.from_dlpack(a)  # type: ignore[arg-type]
    del a, n
    gc.collect()
    assert backend.memory.bytes_allocated == 0


def test_array_protocol_copies_only_when_allowed(backend: EmulatedBackend) -> None:
    a = from_numpy(backend, np.arange(6.0), F32, "nchw", 0)
    assert np.array(a).ctypes.data != a.ptr and np.asarray(a, np.float64).tolist() == list(range(6))
    with pytest.raises(ValueError, match="without a copy"):
        np.asarray(a, np.float64, copy=False)


@pytest.mark.parametrize("index", [np.s_[1], np.s_[:, ::-1], np.s_[..., 1:3], np.s_[:0], np.s_[0, 1, 2]], ids=str)
def test_views_travel_with_offset_and_strides(backend: EmulatedBackend, index: Any) -> None:
    host = np.random.default_rng().standard_normal((2, 3, 4)).astype(np.float32)
    a = from_numpy(backend, host, F32, "nhwc", 0)
    assert (np.from_dlpack(a[index]) == host[index]).all() and np.from_dlpack(a[index]).shape == host[index].shape  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DLPACK_CODES)
@pytest.mark.parametrize("is_old", [False, True])
def test_every_type_survives_a_capsule(name: str, is_old: bool) -> None:
    kind = dtype(name)
    array = np.zeros((3, 4), kind.numpy)[:, ::2]
    view = as_view(Producer(array, is_old=is_old))
    assert view.desc == TensorDesc(kind, (3, 2), (4, 2), view.desc.align) and view.ptr == array.ctypes.data
    assert (view.framework, view.device, view.is_readonly) == ("other", "cpu", False)


def test_the_memory_lives_as_long_as_the_consumer(backend: EmulatedBackend) -> None:
    for make in (np.from_dlpack, np.asarray, lambda a: np.from_dlpack(a)[1:, ::2]):
        a = from_numpy(backend, np.ones((4, 4)), F32, "nchw", 0)
        n = make(a)
        del a
        gc.collect()
        assert backend.memory.bytes_allocated == 64 and (n == 1).all()
        del n
        gc.collect()
        assert backend.memory.bytes_allocated == 0


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (1, 1), (2, 0)])
def test_an_unconsumed_capsule_frees_itself(backend: EmulatedBackend, version: tuple[int, int] | None) -> None:
    a = from_numpy(backend, np.ones(4), F32, "nchw", 0)
    capsule = a.__dlpack__(max_version=version)
    assert ("dltensor_versioned" in repr(capsule)) == (version is not None and version >= (1, 0))
    del a
    gc.collect()
    assert backend.memory.bytes_allocated == 16
    del capsule
    gc.collect()
    assert backend.memory.bytes_allocated == 0


@pytest.mark.parametrize("is_versioned", [False, True])
def test_a_consumed_capsule_is_freed_by_its_deleter_alone(backend: EmulatedBackend, is_versioned: bool) -> None:
    a = from_numpy(backend, np.ones(4), dtype("bf16"), "nchw", 0)
    capsule = a.__dlpack__(max_version=(1, 1) if is_versioned else None)
    name = b"dltensor_versioned" if is_versioned else b"dltensor"
    address = dlpack._pointer_of(capsule, name)
    managed = (dlpack._ManagedVersioned if is_versioned else dlpack._Managed).from_address(address)
    set_name = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_SetName", ctypes.pythonapi))
    used = b"used_" + name
    set_name(capsule, used)  # as a consumer does
    del a, capsule
    gc.collect()
    assert backend.memory.bytes_allocated == 8
    ctypes.CFUNCTYPE(None, ctypes.c_void_p)(managed.deleter)(address)
    gc.collect()
    assert backend.memory.bytes_allocated == 0


def test_read_only_flags(backend: EmulatedBackend) -> None:
    array = np.ones(4, np.float32)
    array.flags.writeable = False
    assert as_view(array).is_readonly and as_view(Producer(np.ones(4), is_readonly=True)).is_readonly
    with pytest.raises(BufferError, match="readonly|read-only"):
        dlpack.export(array, array.ctypes.data, F32, (4,), (1,), (1, 0), is_versioned=False, is_readonly=True)


def test_dlpack_arguments(backend: EmulatedBackend) -> None:
    a = from_numpy(backend, np.arange(4.0), F32, "nchw", 0)
    copy = np.from_dlpack(a, copy=True)  # type: ignore[arg-type]
    assert copy.ctypes.data != a.ptr and copy.tolist() == [0, 1, 2, 3]
    assert a.__dlpack_device__() == (1, 0)
    for device in ((2, 0), (10, 0)):
        with pytest.raises(BufferError, match="without a copy"):
            a.__dlpack__(dl_device=device)


def test_the_stream_is_handed_to_device_producers_only() -> None:
    host, device = Producer(np.ones(4)), Producer(np.ones(4), device=(2, 3))
    as_view(host, 7)
    assert "stream" not in host.asked
    assert as_view(device, 7).device == "cuda:3" and device.asked["stream"] == 7
    as_view(device)
    assert device.asked["stream"] == 1  # the legacy default stream; 0 is not allowed


@pytest.mark.parametrize(
    ("array", "says"),
    [(3, "int is no array"), ([1.0], "list is no array"), (np.float32(1), "float32 is no array"), (None, "NoneType is no array"),
     (np.zeros(3, ">f4"), "byte order"), (np.zeros(3, "c8"), "complex64"), (np.zeros(3, "i1,f4")["f1"], "multiples of the element size"),
     (Producer(np.zeros(3), device=(7, 0)), "device type 7"), (np.zeros(3, object), "dtype\\(.O.\\)")],
    ids=lambda v: type(v).__name__,
)
def test_what_is_no_array_is_refused(array: Any, says: str) -> None:
    for take in (as_view, raw):
        if take is raw and isinstance(array, np.ndarray):
            continue  # the warm path leaves types to the first call
        with pytest.raises(InvalidArgument, match=says):
            take(array)


def test_a_producer_that_refuses_is_reported() -> None:
    class Refuses(Producer):
        def __dlpack__(self, **asked: Any) -> Any:
            raise BufferError("this array requires grad")

    with pytest.raises(InvalidArgument, match="requires grad"):
        as_view(Refuses(np.ones(2)))


def test_capsules_without_strides_and_with_an_offset() -> None:
    """What older producers write: NULL strides mean packed, byte_offset counts from data."""
    array = np.arange(12, dtype=np.float32)

    class Plain(Producer):
        def __dlpack__(self, **asked: Any) -> Any:
            capsule = dlpack.export(array, array.ctypes.data, F32, (2, 4), (9, 9), (1, 0), is_versioned=True)
            tensor = dlpack._ManagedVersioned.from_address(dlpack._pointer_of(capsule, b"dltensor_versioned")).tensor
            tensor.strides = ctypes.POINTER(ctypes.c_int64)()
            tensor.byte_offset = 16
            return capsule

    view = as_view(Plain(array))
    assert view.ptr == array.ctypes.data + 16 and view.desc.strides == (4, 1)


@pytest.mark.parametrize("example", [np.ones((1, 1)), "oxidnn"], ids=["numpy", "oxidnn"])
@pytest.mark.parametrize("name", ["f32", "bf16", "s64", "bool"])
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
def test_results_are_made_in_the_callers_framework(backend: EmulatedBackend, example: Any, name: str, layout: str) -> None:
    if isinstance(example, str):
        example = empty(backend, TensorDesc.packed(F32, (1,)), 0)
    desc = TensorDesc.packed(dtype(name), (2, 3, 4, 5), layout)
    result = frame_of(example, backend, 0).allocator(desc)()
    assert type(result) is type(example) and as_view(result).desc.strides == desc.strides
    assert as_view(result).desc.dtype == dtype(name) and result.shape == (2, 3, 4, 5)


def test_explicit_streams(backend: EmulatedBackend) -> None:
    frame = frame_of(np.ones(1), backend, 5)
    assert frame.stream(None) == 5 and frame.stream(9) == 9

    class Stream:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 77

    assert frame.stream(Stream()) == 77
    with pytest.raises(InvalidArgument, match="no stream"):
        frame.stream("fast")


def test_raw_keys_tell_apart_what_plans_depend_on(backend: EmulatedBackend) -> None:
    base = np.zeros((8, 8), np.float32)
    arrays = [base, base.astype(np.float64), base[:4], base[::2, ::2], base[:, 1:5], base.T.copy().T,
              base.astype(ml_dtypes.bfloat16), base.view(np.int32)]
    keys = {raw(a)[1] for a in arrays}
    assert len(keys) == len(arrays) and raw(base)[1] == raw(np.zeros((8, 8), np.float32))[1]
    for a in arrays:
        assert raw(a)[0] == a.ctypes.data
    device = from_numpy(backend, base, F32, "nchw", 0)
    assert raw(device)[0] == device.ptr and raw(device)[1] != raw(device[::2])[1] and isinstance(device, DeviceArray)
