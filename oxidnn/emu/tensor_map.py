"""Tensor maps: 128 bytes, laid out as the driver lays them out for sm_90.

    word 0-1  address                                 word 8-12  dims - 1
    word 2    bit 0 im2col, 4-6 rank - 1, 7-10 type, 13-14 swizzle, 15 fill, 16 rounds f32 to tf32, 17-18 L2 promotion
    word 3-6  strides of dims 1-4 over 16, low 32 bits; word 7: their high 4 bits as nibbles
    word 13   element strides - 1, 3 bits each; byte 55 box[0] - 1
    tiled     bytes 56-59 box[1..4] - 1
    im2col    bytes 56-59 the corners, of 16, 8 or 5 bits per dimension, lower from bit 0, upper from bit 16;
              bytes 60-61 pixels per column - 1
    word 16   bytes of a box: size * product of box[i] // element stride[i], of im2col without the strides
    word 18   8 times the span of the swizzle, 0x10 without
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from math import prod

import numpy as np

from oxidnn.emu.memory import Array, Fault

TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f32_ftz", "f64", "bf16", "tf32")
SIZES = dict(zip(TYPES, (1, 2, 4, 4, 8, 8, 2, 4, 4, 8, 2, 4), strict=True))
SPANS = (0, 32, 64, 128)
PROMOTIONS = (0, 64, 128, 256)
CORNER_BITS = {3: 16, 4: 8, 5: 5}
_ROUNDS = 1 << 16 - 7  # seen from the type's field
_CODE = {t: TYPES.index("f32") | _ROUNDS if t == "tf32" else i for i, t in enumerate(TYPES)}
_NAME = {code: t for t, code in _CODE.items()}
_SPAN_WORD = {0: 0x10, 32: 0x100, 64: 0x200, 128: 0x400}


@dataclass(frozen=True, slots=True)
class TensorMap:
    """Dimensions innermost first; strides in bytes, of dims 1 and up. box: elements per dimension, before element strides;
    of im2col (corners given): channels per pixel and pixels per column. corners: (lower, upper), each in W, H, D order."""

    dtype: str
    address: int
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...]
    swizzle: int = 0
    corners: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    l2_promotion: int = 128
    fills_nan: bool = False

    @property
    def size(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]

    @property
    def box_bytes(self) -> int:
        """As the driver writes it. (What a copy brings differs: of stepped dimensions the quotient is rounded up, dim 0 has no steps.)"""
        if self.corners is not None:
            return self.size * self.box[0] * self.box[1]
        return self.size * prod(b // s for b, s in zip(self.box, self.element_strides, strict=True))

    def encode(self) -> bytes:
        rank = len(self.dims)
        flags = (
            (self.corners is not None) | (rank - 1) << 4 | _CODE[self.dtype] << 7 | SPANS.index(self.swizzle) << 13
            | self.fills_nan << 15 | PROMOTIONS.index(self.l2_promotion) << 17
        )  # fmt: skip
        strides = [s >> 4 for s in self.strides] + [0] * (5 - rank)
        high = sum((s >> 32 & 15) << 4 * i for i, s in enumerate(strides))
        dims = [d - 1 for d in self.dims] + [0] * (5 - rank)
        steps = sum((s - 1) << 3 * i for i, s in enumerate(self.element_strides))
        out = bytearray(128)
        struct.pack_into("<QI4II5II", out, 0, self.address, flags, *(s & 0xFFFFFFFF for s in strides), high, *dims, steps)
        out[55] = self.box[0] - 1
        if self.corners is None:
            for i, extent in enumerate(self.box[1:]):
                out[56 + i] = extent - 1
        else:
            bits = CORNER_BITS[rank]
            lower, upper = (sum((v & ((1 << bits) - 1)) << bits * i for i, v in enumerate(corner)) for corner in self.corners)
            packed = lower | upper << 16
            struct.pack_into("<IH", out, 56, packed, self.box[1] - 1)
        struct.pack_into("<I", out, 64, self.box_bytes)
        struct.pack_into("<I", out, 72, _SPAN_WORD[self.swizzle])
        return bytes(out)

    @staticmethod
    def replace(raw: Array, field: str, place: int, value: int) -> None:
        """tensormap.replace: patch one field (of dimension `place`) of the 128 bytes, in place."""
        words = raw.view(np.uint32)
        if field == "global_address":
            raw[:8] = np.frombuffer(struct.pack("<Q", value), np.uint8)
        elif field == "global_stride":  # of dimension place + 1, in bytes
            words[3 + place] = value >> 4 & 0xFFFFFFFF
            words[7] = int(words[7]) & ~(15 << 4 * place) | (value >> 36 & 15) << 4 * place
        elif field == "global_dim":
            words[8 + place] = value - 1 & 0xFFFFFFFF
        elif field == "box_dim":
            raw[55 + place] = value - 1 & 0xFF
        elif field == "element_stride":
            words[13] = int(words[13]) & ~(7 << 3 * place) | (value - 1 & 7) << 3 * place
        else:
            bits = {"rank": (4, 3), "elemtype": (7, 4), "interleave_layout": (11, 2), "swizzle_mode": (13, 2), "fill_mode": (15, 1)}
            low, width = bits[field]
            words[2] = int(words[2]) & ~((1 << width) - 1 << low) | value << low
            if field == "swizzle_mode":
                words[18] = _SPAN_WORD[SPANS[value]]

    @staticmethod
    def decode(raw: bytes) -> TensorMap:
        """Raises Fault for bytes that are no tensor map."""
        address, flags, *rest = struct.unpack_from("<QI4II5II", raw, 0)
        strides, high, dims, steps = rest[:4], rest[4], rest[5:10], rest[10]
        rank, type_, span = (flags >> 4 & 7) + 1, _NAME.get(flags >> 7 & (15 | _ROUNDS)), flags >> 13 & 3
        if rank > 5 or type_ is None or address == 0 or struct.unpack_from("<I", raw, 72)[0] != _SPAN_WORD[SPANS[span]]:
            raise Fault("bounds", "the address of the tensor map points at bytes that are no tensor map")
        corners = None
        box: tuple[int, ...] = (raw[55] + 1, *(raw[56 + i] + 1 for i in range(rank - 1)))
        if flags & 1:
            bits = CORNER_BITS[rank]
            packed, pixels = struct.unpack_from("<IH", raw, 56)
            half = 1 << bits - 1
            lower, upper = (tuple(((packed >> bits * i + at) + half) % (2 * half) - half for i in range(rank - 2)) for at in (0, 16))
            corners = (lower, upper)
            box = (raw[55] + 1, pixels + 1)
        return TensorMap(
            type_, address, tuple(d + 1 for d in dims[:rank]),
            tuple((s | (high >> 4 * i & 15) << 32) << 4 for i, s in enumerate(strides[: rank - 1])), box,
            tuple((steps >> 3 * i & 7) + 1 for i in range(rank)), SPANS[span], corners, PROMOTIONS[flags >> 17 & 3], bool(flags >> 15 & 1),
        )  # fmt: skip
