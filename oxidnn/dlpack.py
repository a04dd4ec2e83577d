"""DLPack for every type and device oxidnn has: capsules read through ctypes, and written by NumPy with type and device put right.

NumPy makes the capsules because a capsule's destructor may run while an exception is pending (a consumer that refuses it), which
a Python function called from C cannot survive; NumPy's destructor and deleter are C. The memory itself is never touched.
Structures of dlpack.h, version 1.1: DLManagedTensor ("dltensor") and DLManagedTensorVersioned ("dltensor_versioned").
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np

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


class _Managed(ctypes.Structure):
    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p),
                ("flags", ctypes.c_uint64), ("tensor", _Tensor)]


_NAME, _NAME_VERSIONED = b"dltensor", b"dltensor_versioned"
_is_valid = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_IsValid", ctypes.pythonapi))
_pointer_of = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)(("PyCapsule_GetPointer", ctypes.pythonapi))


class _Window:
    """Any memory under NumPy's array interface; what NumPy makes of it keeps `owner` alive."""

    def __init__(self, owner: Any, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, is_readonly: bool) -> None:
        self.owner = owner
        self.__array_interface__ = {"shape": shape, "strides": tuple(s * size for s in strides), "typestr": f"=u{size}",
                                    "data": (ptr, is_readonly), "version": 3}


def window(owner: Any, ptr: int, shape: tuple[int, ...], strides: tuple[int, ...], size: int, is_readonly: bool = False) -> np.ndarray:
    """An array of unsigned integers of `size` bytes over memory that `owner` keeps alive (strides in elements); nothing is read."""
    return np.asarray(_Window(owner, 16 if 0 in shape else ptr, shape, strides, size, is_readonly))


def export(owner: Any, ptr: int, kind: DType, shape: tuple[int, ...], strides: tuple[int, ...], device: tuple[int, int], *,
           is_versioned: bool, is_readonly: bool = False) -> Any:
    """A capsule over memory that `owner` keeps alive: strides in elements, device = (DLPack device type, index).

    Raises BufferError for read-only memory in an unversioned capsule.
    """
    array = window(owner, ptr, shape, strides, kind.num_bytes, is_readonly)
    capsule = array.__dlpack__(max_version=VERSION) if is_versioned else array.__dlpack__()
    tensor = _tensor_of(capsule)[0]
    tensor.dtype = _DataType(*DLPACK_CODES[kind.name], 1)
    tensor.device = _Device(*device)
    if 0 in shape:
        tensor.data = None
    return capsule


def _tensor_of(capsule: Any) -> tuple[_Tensor, bool]:
    """(the tensor in a capsule nobody has consumed, whether it is read-only)."""
    if _is_valid(capsule, _NAME_VERSIONED):
        versioned = _ManagedVersioned.from_address(_pointer_of(capsule, _NAME_VERSIONED))
        if versioned.major != VERSION[0]:
            raise InvalidArgument(f"array: DLPack version {versioned.major}.{versioned.minor} (expected {VERSION[0]}.x).")
        return versioned.tensor, bool(versioned.flags & READ_ONLY)
    if _is_valid(capsule, _NAME):
        return _Managed.from_address(_pointer_of(capsule, _NAME)).tensor, False
    raise InvalidArgument(f"array: {capsule!r} is no fresh DLPack capsule.")


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
    tensor, is_readonly = _tensor_of(capsule)
    kind = _DTYPE_OF_CODE.get((tensor.dtype.code, tensor.dtype.bits))
    if kind is None or tensor.dtype.lanes != 1:
        raise InvalidArgument(f"array: DLPack type (code {tensor.dtype.code}, {tensor.dtype.bits} bits, {tensor.dtype.lanes} lanes) "
                              f"is none oxidnn knows (known: {', '.join(DLPACK_CODES)}).")
    shape = tuple(tensor.shape[: tensor.ndim]) if tensor.ndim else ()
    strides = tuple(tensor.strides[: tensor.ndim]) if tensor.strides and tensor.ndim else packed_strides(shape)
    ptr = (tensor.data or 0) + tensor.byte_offset
    return Imported(ptr, kind, shape, strides, (tensor.device.type, tensor.device.id), is_readonly, capsule)
