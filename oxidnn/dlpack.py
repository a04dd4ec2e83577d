"""DLPack by hand: capsules written and read through ctypes, since neither NumPy nor cuda.core takes every type oxidnn has.

Structures of dlpack.h, version 1.1: DLManagedTensor ("dltensor") and DLManagedTensorVersioned ("dltensor_versioned").
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

from .dtypes import DLPACK_CODES, DType, dtype
from .errors import InvalidArgument
from .tensor import packed_strides

CPU, CUDA, CUDA_HOST, CUDA_MANAGED = 1, 2, 3, 13
VERSION = (1, 1)
READ_ONLY = 1
LEGACY_STREAM = 1  # how DLPack and __cuda_array_interface__ spell the legacy default stream, since 0 is ambiguous there
PER_THREAD_STREAM = 2
NO_SYNC = -1

_DTYPE_OF_CODE: dict[tuple[int, int], DType] = {code: dtype(name) for name, code in DLPACK_CODES.items()}


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), ("device", _Device), ("ndim", ctypes.c_int32), ("dtype", _DataType),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)), ("byte_offset", ctypes.c_uint64)]


_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", _Deleter)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", _Deleter),
                ("flags", ctypes.c_uint64), ("tensor", _Tensor)]


_api = ctypes.pythonapi
_Destructor = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
_new_capsule = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)(("PyCapsule_New", _api))
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))
# In a destructor the capsule has no references left, so it must travel as a bare address.
_is_valid_raw = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_IsValid", _api))
_pointer_of_raw = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(("PyCapsule_GetPointer", _api))

_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
_alive: dict[int, tuple[Any, ...]] = {}  # address of an exported structure -> it, what it points to, and the owner of the memory


@_Deleter
def _delete(address: int) -> None:
    _alive.pop(address, None)


@_Destructor
def _destroy(capsule: int) -> None:
    # Only a capsule nobody consumed still has its first name; the consumer calls the deleter of the others.
    for name in (_NAME, _NAME_VERSIONED):
        if _is_valid_raw(capsule, name):
            _alive.pop(_pointer_of_raw(capsule, name), None)


def export(owner: Any, ptr: int, kind: DType, shape: tuple[int, ...], strides: tuple[int, ...], device: tuple[int, int], *,
           is_versioned: bool, is_readonly: bool = False) -> Any:
    """A capsule over memory that `owner` keeps alive: strides in elements, device = (DLPack device type, index).

    Raises BufferError for a type DLPack has no code for, and for read-only memory in an unversioned capsule.
    """
    if is_readonly and not is_versioned:
        raise BufferError("DLPack: a read-only array cannot travel in an unversioned capsule")
    code, bits = DLPACK_CODES[kind.name]
    rank = len(shape)
    extents, steps = (ctypes.c_int64 * max(rank, 1))(*shape), (ctypes.c_int64 * max(rank, 1))(*strides)
    managed: _Managed | _ManagedVersioned = _ManagedVersioned() if is_versioned else _Managed()
    if isinstance(managed, _ManagedVersioned):
        managed.major, managed.minor = VERSION
        managed.flags = READ_ONLY if is_readonly else 0
    pointer_type = ctypes.POINTER(ctypes.c_int64)
    managed.tensor = _Tensor(ptr or None, _Device(*device), rank, _DataType(code, bits, 1),
                             ctypes.cast(extents, pointer_type), ctypes.cast(steps, pointer_type), 0)
    managed.deleter = _delete
    address = ctypes.addressof(managed)
    _alive[address] = (managed, extents, steps, owner)
    return _new_capsule(address, _NAME_VERSIONED if is_versioned else _NAME, ctypes.cast(_destroy, ctypes.c_void_p))


@dataclass(frozen=True, slots=True)
class Imported:
    """What a capsule describes. The memory stays valid while `capsule`, which is borrowed and not consumed, is referenced."""

    ptr: int
    kind: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: tuple[int, int]
    is_readonly: bool
    capsule: Any


def read(array: Any, stream: int | None = None) -> Imported:
    """Asks an object for its capsule and reads it.

    stream: the raw stream that will use the memory; the producer orders its work before it (None: host memory).
    Raises InvalidArgument for types oxidnn does not have.
    """
    arguments: dict[str, Any] = {} if stream is None else {"stream": stream or LEGACY_STREAM}
    try:
        capsule = array.__dlpack__(**arguments, max_version=VERSION)
    except TypeError:  # a producer from before DLPack 1.0
        capsule = array.__dlpack__(**arguments)
    is_readonly = False
    if _is_valid(capsule, _NAME_VERSIONED):
        versioned = _ManagedVersioned.from_address(_pointer_of(capsule, _NAME_VERSIONED))
        if versioned.major != VERSION[0]:
            raise InvalidArgument(f"array: DLPack version {versioned.major}.{versioned.minor} (expected {VERSION[0]}.x).")
        is_readonly = bool(versioned.flags & READ_ONLY)
        tensor = versioned.tensor
    elif _is_valid(capsule, _NAME):
        tensor = _Managed.from_address(_pointer_of(capsule, _NAME)).tensor
    else:
        raise InvalidArgument(f"array: __dlpack__ of {type(array).__name__} gave no fresh DLPack capsule.")
    kind = _DTYPE_OF_CODE.get((tensor.dtype.code, tensor.dtype.bits))
    if kind is None or tensor.dtype.lanes != 1:
        raise InvalidArgument(f"array: DLPack type (code {tensor.dtype.code}, {tensor.dtype.bits} bits, {tensor.dtype.lanes} lanes) "
                              f"is none oxidnn knows (known: {', '.join(DLPACK_CODES)}).")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides and tensor.ndim else packed_strides(shape)
    ptr = (tensor.data or 0) + tensor.byte_offset
    return Imported(ptr, kind, shape, strides, (tensor.device.type, tensor.device.id), is_readonly, capsule)
