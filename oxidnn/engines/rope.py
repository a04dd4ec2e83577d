"""Rotary position embedding, and appending to caches of keys and values: a CTA has some tokens, whose angles it makes once for all heads.

Cosines and sines go to shared memory, and so do the tokens' places in the cache; then every thread takes vectors of rows in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import pi

from ..codegen.elementary import COS_F32, COS_F64, SIN_F32, SIN_F64
from ..codegen.environment import f32_literal, f64_literal
from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType
from ..dtypes import dtype as dtype_of
from ..ops.base import Problem
from ..ops.rope import RopeProblem, Rotation
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TableArg, TensorArg, refuse
from .digits import ceil_div

THREADS = 256
ITEMS = 4  # vectors that a thread moves, or pairs of them, where there are enough
_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class Move:
    """Rows of a tensor that become those of another: by their heads and `dim` elements, of which 2 * pairs are turned. vec: elements
    moved at once. is_cached: rows go to their tokens' places in the cache. scale: "" | "head" | "key", what it changes along."""

    source: str
    target: str
    kind: str
    target_kind: str
    heads: int
    dim: int
    pairs: int
    vec: int
    is_cached: bool
    scale: str

    @property
    def turned(self) -> int:
        """Vectors of pairs of a row."""
        return self.pairs // self.vec

    @property
    def copied(self) -> int:
        return (self.dim - 2 * self.pairs) // self.vec

    @property
    def units(self) -> int:
        return self.turned + self.copied

    @property
    def size(self) -> int:
        return dtype_of(self.kind).num_bytes

    @property
    def target_size(self) -> int:
        return dtype_of(self.target_kind).num_bytes


@dataclass(frozen=True, slots=True)
class RopeConsts:
    """pairs: of the angles, 0 if nothing is turned. tokens: of a CTA. table: type of given cosines and sines, "" where they are made;
    has_halves: with those of each element of a pair. positions: their type, "" for a row's index. place: how a token's place in the
    cache is found: "" | "slots" | "pages" | "rows"; slots: type of the slots. page: keys of a page."""

    compute: str
    pairs: int
    interleaved: bool
    inverse: bool
    magnitude: float
    tokens: int
    table: str
    has_halves: bool
    positions: str
    place: str
    slots: str
    page: int
    moves: tuple[Move, ...]

    @property
    def size(self) -> int:
        return 8 if self.compute == "f64" else 4

    @property
    def angle_bytes(self) -> int:
        """Of a token: cosines and sines, of both elements of pairs where these differ."""
        return self.pairs * self.size * (4 if self.has_halves else 2)

    @property
    def sine(self) -> tuple[float, ...]:
        return SIN_F64 if self.compute == "f64" else SIN_F32

    @property
    def cosine(self) -> tuple[float, ...]:
        return COS_F64 if self.compute == "f64" else COS_F32

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    @property
    def quarter(self) -> float:
        return pi / 2


def divisor(name: str, value: int) -> list[Arg]:
    multiplier, shift = magic(max(1, value))
    return [Arg(name, "u32", value), Arg(f"{name}_mul", "u32", multiplier), Arg(f"{name}_shr", "u32", shift)]


def strides(prefix: str, names: Sequence[str], desc: TensorDesc) -> list[Arg]:
    size = desc.dtype.num_bytes
    return [Arg(f"{prefix}_{name}_bytes", "s64", s * size) for name, s in zip(names, desc.strides, strict=True)]


def vector(pairs: int, *descs: TensorDesc) -> int:
    """Elements that can be moved at once of rows of both tensors, of which 2 * pairs are turned."""
    dim = descs[0].shape[-1]

    def fits(desc: TensorDesc, count: int) -> bool:
        size = desc.dtype.num_bytes
        steps = [s for n, s in zip(desc.shape[:-1], desc.strides[:-1], strict=True) if n > 1]
        return (desc.strides[-1] == 1 or dim == 1) and count * size <= min(16, desc.align) and all(s % count == 0 for s in steps)

    return next((v for v in (8, 4, 2) if pairs % v == 0 and (dim - 2 * pairs) % v == 0 and all(fits(d, v) for d in descs)), 1)


def token_configs(count: int, moves: Sequence[Move], angle_bytes: int, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    """Tokens of a CTA: enough work for each thread, but CTAs for every SM first; then half, twice and four times as many."""
    each = sum(m.heads * m.units for m in moves)
    room = 32768 // max(1, angle_bytes + 8)
    tokens = max(1, min(ITEMS * THREADS // max(1, each), count // (2 * device.num_sms), room))
    tokens = 1 << (tokens.bit_length() - 1)
    others = (4,) if device.is_emulated else (tokens // 2, 2 * tokens, 4 * tokens)
    return tuple(EngineConfig.of(tokens=n) for n in dict.fromkeys((tokens, *others)) if 1 <= n <= room)


def rotation_arguments(rotation: Rotation, tables: Sequence[TensorDesc], consts: RopeConsts) -> list[Arg]:
    """Of the angles: quarters of a turn that a position makes, or tables."""
    if rotation.frequencies:
        table = tuple(int(f64_literal(f * 2 / pi)[2:], 16) for f in rotation.frequencies)
        return [Arg("frequencies", f"u64[{len(table)}]", TableArg(table))]
    args: list[Arg] = []
    for name, desc in zip(("cos", "sin"), tables, strict=True):
        args.append(Arg(f"ptr_{name}", "u64", TensorArg(name)))
        batch = desc.strides[0] if desc.rank == 3 else 0
        args += strides(name, ("batch", "row", "dim"), TensorDesc(desc.dtype, (1, 1, 1), (batch, *desc.strides[-2:])))
    rows = tables[0].shape[-2]
    return [*args, Arg("table_rows", "s64", rows)]


def position_arguments(name: str, desc: TensorDesc) -> list[Arg]:
    batch = desc.strides[0] if desc.rank == 2 else 0
    place = TensorDesc(desc.dtype, (1, 1), (batch, desc.strides[-1]))
    return [Arg(f"ptr_{name}", "u64", TensorArg(name)), *strides(name, ("batch", "row"), place)]


def rope_consts(rotation: Rotation | None, problem: Problem, compute: DType, moves: tuple[Move, ...], tokens: int, place: str = "",
                page: int = 0) -> RopeConsts:
    table = problem.desc("cos") if problem.has("cos") else None
    pairs = rotation.pairs if rotation is not None else 0
    halves = table is not None and table.shape[-1] == 2 * pairs
    kinds = {name: problem.desc(name).dtype.name if problem.has(name) else "" for name in ("positions", "slots")}
    return RopeConsts(compute.name, pairs, rotation is not None and rotation.interleaved, rotation is not None and rotation.inverse,
                      rotation.magnitude if rotation is not None else 1.0, tokens, table.dtype.name if table is not None else "", halves,
                      kinds["positions"], place, kinds["slots"], page, moves)


def launch(op: str, consts: RopeConsts, args: list[Arg], count: int, device: DeviceInfo) -> Step:
    """A launch over `count` tokens. Many threads hide the memory's latency better than more registers each."""
    smem = consts.tokens * (consts.angle_bytes + 8)
    ctas = 1 if consts.compute == "f64" or consts.has_halves else 4 if any(m.scale for m in consts.moves) else 6
    return Step.of("attention/rope", op, Target.for_arch(device.arch), THREADS, args, consts, ceil_div(count, consts.tokens),
                   dynamic_smem=smem, min_ctas_per_sm=ctas, suffix="_".join(dict.fromkeys(m.kind for m in consts.moves)))


def _move(p: RopeProblem) -> Move:
    x, y, pairs = p.heads_of("x"), p.heads_of("y"), p.rotation.pairs
    return Move("x", "y", x.dtype.name, y.dtype.name, x.shape[1], x.shape[3], pairs, vector(pairs, x, y), False, "")


class RopeEngine(Engine):
    """One launch."""

    id = "rope.tokens"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, RopeProblem)
        x = problem.heads_of("x")
        count = x.shape[0] * x.shape[2]
        if count >= _LIMIT - 64 or x.shape[1] * x.shape[3] * 64 >= _LIMIT:
            return refuse(f"{count} tokens of {x.shape[1]} heads")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, RopeProblem)
        x = problem.heads_of("x")
        return token_configs(x.shape[0] * x.shape[2], (_move(problem),), 4 * problem.rotation.pairs * problem.compute.num_bytes, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 800)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, RopeProblem)
        if problem.is_empty:
            return Build(())
        x, y, r = problem.heads_of("x"), problem.heads_of("y"), problem.rotation
        count = x.shape[0] * x.shape[2]
        consts = rope_consts(r, problem, problem.compute, (_move(problem),), config["tokens"])
        args = [Arg("num_tokens", "u32", count), *divisor("length", x.shape[2])]
        for name, desc in (("x", x), ("y", y)):
            args += [Arg(f"ptr_{name}", "u64", TensorArg(name)), *strides(name, ("batch", "head", "row", "dim"), desc)]
        args += rotation_arguments(r, [problem.desc(n) for n in ("cos", "sin") if problem.has(n)], consts)
        if problem.has("positions"):
            args += position_arguments("positions", problem.desc("positions"))
        return Build((launch(problem.op, consts, args, count, device),))


ENGINES: dict[str, tuple[Engine, ...]] = {"rope": (RopeEngine(),)}
