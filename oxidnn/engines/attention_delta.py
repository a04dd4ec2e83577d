"""delta = sum of d_out * out, and lse to base 2: what the gradients of a row's scores share. One launch before all others."""

from __future__ import annotations

from dataclasses import dataclass
from math import e, inf, log2
from typing import ClassVar

from ..codegen.environment import f32_literal, f64_literal
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.attention import AttentionProblem
from ..tensor import TensorDesc
from .base import Arg, Step, TensorArg, WorkspaceArg

_THREADS = 256


@dataclass(frozen=True, slots=True)
class DeltaConsts:
    """vector: elements of a load. lanes: of a row. pieces: loads of a lane. lengths: "", "batch" or "sequences". zeroed: floats a row."""

    dtype: str
    compute: str
    dim: int
    vector: int
    lanes: int
    pieces: int
    lengths: str
    zeroed: int

    inf: ClassVar[float] = inf
    log2_e: ClassVar[float] = log2(e)

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    @property
    def infinity(self) -> str:
        return self.literal(inf)

    def registers(self, stem: str) -> list[str]:
        return [f"%{stem}{i}" for i in range(self.vector)]


def piece_of(desc: TensorDesc, most: int = 16) -> int:
    """Neighbours along the last dimension that lie together and aligned in every row: of at most `most` bytes, a power of two.

    The last piece of a row may reach beyond it.
    """
    vector, size = most // desc.dtype.num_bytes, desc.dtype.num_bytes
    if desc.strides[-1] != 1 and desc.shape[-1] > 1:
        return 1
    steps = [s for n, s in zip(desc.shape[:-1], desc.strides[:-1], strict=True) if n > 1]
    while vector > 1 and (desc.align < vector * size or any(s % vector for s in steps)):
        vector //= 2
    return vector


def row_bytes(p: AttentionProblem) -> int:
    """Bytes that `delta`, or lse to base 2, takes."""
    return p.heads_of("lse").numel * p.accumulator.num_bytes


def delta_step(p: AttentionProblem, device: DeviceInfo, delta: WorkspaceArg, lse2: WorkspaceArg,
               zeroed: tuple[WorkspaceArg, int] | None = None, pitch: int | None = None) -> Step:
    """Writes delta and lse2 = lse * log2(e), both (B, H, L) and packed, of type p.accumulator (`row_bytes`).

    Rows that take no part (lse -inf, beyond lengths_q, outside of all sequences): delta 0, lse2 +inf, so that exp2(score - lse2) is 0.
    zeroed: (place, floats a row, a multiple of 4) of what is filled with f32 zeros, a line for each of the B * H * L rows. pitch: rows of a
    head in what is written, if more than L; the further ones take no part.
    """
    out = p.heads_of("out")
    batch, heads, length, dim = out.shape
    vector = min(piece_of(p.heads_of(n)) for n in ("d_out", "out"))
    while dim % vector:
        vector //= 2
    lanes = 1
    while lanes < min(32, dim // vector):
        lanes *= 2
    compute = p.accumulator.name
    lengths = "sequences" if p.is_varlen else "batch" if p.has("lengths_q") else ""
    consts = DeltaConsts(out.dtype.name, compute, dim, vector, lanes, -(-dim // (vector * lanes)), lengths, zeroed[1] if zeroed else 0)
    pitch = length if pitch is None else pitch
    blocks = max(1, -(-pitch // (_THREADS // lanes)))
    args = [Arg("blocks", "u32", blocks), Arg("heads", "u32", heads), Arg("length", "u32", length), Arg("pitch", "u32", pitch)]
    for name in ("d_out", "out", "lse"):
        desc = p.heads_of(name)
        args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
        args += [Arg(f"{axis}_{name}", "s64", s * desc.dtype.num_bytes)
                 for axis, s in zip(("batch", "head", "row", "element"), desc.strides, strict=False)]
    if lengths:
        name = "cu_seqlens_q" if p.is_varlen else "lengths_q"
        args += [Arg("ptr_lengths", "u64", TensorArg(name)), Arg("step_lengths", "s64", p.desc(name).strides[0] * 4)]
        args += [Arg("sequences", "u32", p.batch)] if p.is_varlen else []
    args += [Arg("ptr_delta", "u64", delta), Arg("ptr_lse2", "u64", lse2)]
    args += [Arg("ptr_zeroed", "u64", zeroed[0])] if zeroed else []
    return Step.of("attention/delta", p.op, Target.for_arch(device.arch), _THREADS, args, consts, batch * heads * blocks,
                   suffix=f"{out.dtype.name}_{dim}")
