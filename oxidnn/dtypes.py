"""The dtype table: one row a type, everything any room needs to know of it.

Names are the field's short ones (f32, bf16, e4m3, s8); the long ones of NumPy and PyTorch are accepted wherever a dtype is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from .errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class DType:
    """A storage type. `ptx` is the type of its arithmetic register, `ptx_bits` the untyped one it is loaded as."""

    name: str
    long_name: str
    bits: int
    kind: str  # "float" | "int" | "uint" | "bool"
    ptx: str
    epsilon: float = 0.0  # distance from 1 to the next value; 0 for integers
    max: float = 0.0
    smallest: float = 0.0  # positive value, subnormals counted; 0 for integers

    @property
    def num_bytes(self) -> int:
        return (self.bits + 7) // 8

    @property
    def ptx_bits(self) -> str:
        return f"b{max(8, self.bits)}"

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def numpy(self) -> np.dtype:
        return _numpy_dtype(self.long_name)

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return dtype, (self.name,)  # types are compared by identity: a copy, of another process too, is the one of the table

    def __str__(self) -> str:
        return self.name


F64 = DType("f64", "float64", 64, "float", "f64", 2.0**-52, 1.7976931348623157e308, 2.0**-1074)
F32 = DType("f32", "float32", 32, "float", "f32", 2.0**-23, 3.4028234663852886e38, 2.0**-149)
F16 = DType("f16", "float16", 16, "float", "f16", 2.0**-10, 65504.0, 2.0**-24)
BF16 = DType("bf16", "bfloat16", 16, "float", "bf16", 2.0**-7, 3.3895313892515355e38, 2.0**-133)
E4M3 = DType("e4m3", "float8_e4m3fn", 8, "float", "e4m3", 2.0**-3, 448.0, 2.0**-9)
E5M2 = DType("e5m2", "float8_e5m2", 8, "float", "e5m2", 2.0**-2, 57344.0, 2.0**-16)
S8 = DType("s8", "int8", 8, "int", "s8", 0.0, 127)
U8 = DType("u8", "uint8", 8, "uint", "u8", 0.0, 255)
S16 = DType("s16", "int16", 16, "int", "s16", 0.0, 2**15 - 1)
U16 = DType("u16", "uint16", 16, "uint", "u16", 0.0, 2**16 - 1)
S32 = DType("s32", "int32", 32, "int", "s32", 0.0, 2**31 - 1)
U32 = DType("u32", "uint32", 32, "uint", "u32", 0.0, 2**32 - 1)
S64 = DType("s64", "int64", 64, "int", "s64", 0.0, 2**63 - 1)
U64 = DType("u64", "uint64", 64, "uint", "u64", 0.0, 2**64 - 1)
BOOL = DType("bool", "bool", 8, "bool", "u8", 0.0, 1)

TABLE = (F64, F32, F16, BF16, E4M3, E5M2, S8, U8, S16, U16, S32, U32, S64, U64, BOOL)
_BY_NAME: dict[str, DType] = {d.name: d for d in TABLE} | {d.long_name: d for d in TABLE} | {
    "half": F16, "float": F32, "double": F64, "int": S64, "long": S64, "e4m3fn": E4M3, "float8_e4m3": E4M3,
}


@cache
def _numpy_dtype(long_name: str) -> np.dtype:
    if long_name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        import ml_dtypes

        return np.dtype(getattr(ml_dtypes, long_name))
    return np.dtype(long_name)


@cache
def dtype(spec: Any) -> DType:
    """The DType of a name, a NumPy or ml_dtypes dtype, or a torch dtype (by its name; torch is not imported)."""
    if isinstance(spec, DType):
        return spec
    name = spec if isinstance(spec, str) else None
    if name is None and type(spec).__module__ == "torch":
        name = str(spec).removeprefix("torch.")
    if name is None:
        try:
            name = np.dtype(spec).name
        except TypeError:
            name = str(spec)
    found = _BY_NAME.get(name)
    if found is None:
        raise InvalidArgument(f"dtype: {spec!r} is not a type oxidnn knows (known: {', '.join(d.name for d in TABLE)}).")
    return found


# (DLPack type code, bits) of every type DLPack can name; codes of dlpack.h.
DLPACK_CODES: dict[str, tuple[int, int]] = {
    "s8": (0, 8), "s16": (0, 16), "s32": (0, 32), "s64": (0, 64), "u8": (1, 8), "u16": (1, 16), "u32": (1, 32),
    "u64": (1, 64), "f16": (2, 16), "f32": (2, 32), "f64": (2, 64), "bf16": (4, 16), "bool": (6, 8),
    "e4m3": (10, 8), "e5m2": (12, 8),
}
