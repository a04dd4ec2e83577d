"""Numbers of four bits, two to a byte along the last dimension, the first in the low half.

    pack4 x=f32[8,33] kind=s4                          y (u8, [8,17]); the last half byte of an odd row is 0
    unpack4 x=u8[8,17] kind=s4 size=33 dtype=bf16      y (bf16, [8,33])

kind: "s4" (-8 to 7), "u4" (0 to 15), "e2m1" (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives; NaN becomes 6). Numbers beyond saturate;
saturate=False keeps the lowest four bits of integers. Floats become integers as `cast` does it: towards zero, NaN as 0; they become e2m1
to the nearest, of two the even code, -0 as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..dtypes import BF16, F16, F32, F64, S8, S32, S64, U8, U32, DType
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import check_bool, check_choice, check_integer, check_reach, check_type, describe, operand, output

KINDS = ("s4", "u4", "e2m1")
WIDE = (F64, F32, F16, BF16, S8, U8, S32, U32, S64)  # what the numbers are unpacked


@dataclass(frozen=True)
class NibbleProblem(Problem):
    kind: str = "s4"
    saturate: bool = True

    @property
    def wide(self) -> str:
        """The operand of one number an element."""
        return "x" if self.op == "pack4" else "y"

    @property
    def packed(self) -> str:
        return "y" if self.op == "pack4" else "x"


def _make(op: str, x: TensorDesc, allowed: tuple[DType, ...], size: int, attrs: Mapping[str, Any], tensors: Mapping[str, TensorDesc],
          policy: Policy) -> NibbleProblem:
    check_reach(op, "x", x, describe(tensors))
    kind = check_choice(op, "kind", attrs.get("kind", "s4"), KINDS)
    y = output(op, "y", tensors, allowed, (*x.shape[:-1], size), TensorDesc.packed(x.dtype, (*x.shape[:-1], size)))
    normal: list[tuple[str, Any]] = [("kind", kind)] if kind != "s4" else []
    if op == "unpack4" and size != 2 * x.shape[-1]:
        normal.append(("size", size))
    if op == "unpack4" and y.dtype is not F32:
        normal.append(("dtype", y.dtype.name))
    saturate = check_bool(op, "saturate", attrs.get("saturate", True))
    if not saturate:
        if kind == "e2m1":
            raise expected(op, "saturate", False, "True for e2m1, which holds nothing beyond its numbers")
        normal.append(("saturate", False))
    return NibbleProblem(op, (Operand("x", x), Operand("y", y, True)), tuple(normal), policy=policy, kind=kind, saturate=saturate)


def make_pack4(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> NibbleProblem:
    x = operand("pack4", "x", tensors, WIDE)
    if not 1 <= x.rank <= 8:
        raise expected("pack4", "rank of x", x.rank, "1 to 8", describe(tensors))
    return _make("pack4", x, (U8,), -(-x.shape[-1] // 2), attrs, tensors, policy)


def make_unpack4(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> NibbleProblem:
    """size: of the last dimension unpacked, twice that of x, or one less."""
    op = "unpack4"
    x = operand(op, "x", tensors, (U8,))
    if not 1 <= x.rank <= 8:
        raise expected(op, "rank of x", x.rank, "1 to 8", describe(tensors))
    most = 2 * x.shape[-1]
    size = check_integer(op, "size", attrs.get("size", most), max(0, most - 1), most, describe(tensors))
    given = check_type(op, "dtype", attrs["dtype"]) if "dtype" in attrs else tensors["y"].dtype if "y" in tensors else F32
    if given not in WIDE:
        raise expected(op, "dtype", given, ", ".join(t.name for t in WIDE))
    return _make(op, x, (given,), size, attrs, tensors, policy)


DEFINITIONS = (
    OpDef("pack4", ("x",), ("y",), make_pack4, attrs=(("kind", "s4"), ("saturate", True))),
    OpDef("unpack4", ("x",), ("y",), make_unpack4, attrs=(("kind", "s4"), ("size", None), ("dtype", None))),
)
