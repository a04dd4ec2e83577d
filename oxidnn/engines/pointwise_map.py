"""The elementwise map: a thread computes `vec` neighbouring elements of the linear index space of the output.

Dimensions are collapsed on the host. Operands whose elements lie as the linear index runs are moved in packs of up to 16 bytes; for the
others the index is split into digits, once a pack where the innermost extent is a multiple of the pack, else for every element. Where no
operand needs digits, a thread may have several packs, a CTA's width apart, that it loads before it computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from types import MappingProxyType

from ..codegen.fastdiv import magic
from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import E4M3, E5M2, U8, DType
from ..ops.base import Operand, Problem
from ..ops.pointwise import PointwiseProblem, View
from ..ops.random import SOURCES
from ..tensor import TensorDesc, packed_strides
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, ScalarArg, Step, Support, TensorArg, WorkspaceArg, refuse
from .collapse import by_stride, collapse

THREADS = 256
DRAWN = ("seed", "offset")  # of random numbers: given with each call, where they do not lie in memory
LONG_FUNCTIONS = {"mod", "pow", "atan2"}  # need more than 40 registers for packs of 8
LONG = 4.5  # instructions for each byte moved, of an expression that several packs a thread serve


@dataclass(frozen=True)
class Access:
    """How an operand is reached. mode: "flat" (its offset is the linear index), "pack" (digits of the pack, then neighbours), "same"
    (digits of the pack, one element for all of it), "each" (digits of every element)."""

    index: int  # position among the operands, in register and parameter names
    dtype: DType
    mode: str
    is_output: bool


@dataclass(frozen=True)
class MapConsts:
    """rank: digits of the index space. wide_index: the linear index exceeds 2^31 - 1; wide_offset: a byte offset does.

    index: how the logical index of an element is reached where the expression has random numbers: as the offset of an operand of bytes.
    sums: each CTA writes the sum of its results, in the compute type, in place of them. brief: of the expression's functions, see
    PointwiseProblem.is_brief. streams: what is read leaves the L2 first. packs: of a thread, at a CTA's width from one another.
    """

    expression: Expression
    compute: str
    names: tuple[str, ...]
    accesses: tuple[Access, ...]
    vec: int
    rank: int
    has_tail: bool
    wide_index: bool
    wide_offset: bool
    index: Access | None = None
    sums: bool = False
    brief: bool = False
    saturate: bool = True
    streams: bool = False
    packs: int = 1

    @property
    def load(self) -> str:
        return "ld.global.cs." if self.streams else "ld.global."

    @property
    def reached(self) -> tuple[Access, ...]:
        """What needs an address a pack or an element."""
        kept = self.inputs if self.sums else self.accesses
        return kept if self.index is None else (*kept, self.index)

    @property
    def sources(self) -> tuple[str, ...]:
        """The random numbers that the expression takes."""
        return tuple(n for n in self.expression.args if n in SOURCES)

    @property
    def shares_words(self) -> bool:
        """A pack takes whole groups of four neighbours, which one run of the generator serves."""
        return self.index is not None and self.vec % 4 == 0 and self.index.mode in ("flat", "pack")

    @property
    def inputs(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if not a.is_output)

    @property
    def outputs(self) -> tuple[Access, ...]:
        return tuple(a for a in self.accesses if a.is_output)

    @property
    def has_pack_digits(self) -> bool:
        return any(a.mode in ("pack", "same") for a in self.reached)

    @property
    def has_element_digits(self) -> bool:
        return any(a.mode == "each" for a in self.reached)

    def register(self, access: Access, element: int) -> str:
        return f"%{'out' if access.is_output else 'in'}{access.index}_{0 if access.mode == 'same' else element}"

    def registers(self, access: Access, pack: int = 0) -> list[str]:
        return [self.register(access, pack * self.vec + i) for i in range(1 if access.mode == "same" else self.vec)]

    def body(self, element: int) -> str:
        """The PTX of the expression for one element of the pack."""
        registers = {name: self.register(a, element) for name, a in zip(self.names, self.inputs, strict=True)}
        registers |= {name: f"%scalar{i}" for i, name in enumerate(self.expression.scalars)}
        registers |= {name: f"%{name}_{element}" for name in self.sources}
        return self.expression.lower(registers, [self.register(a, element) for a in self.outputs], self.compute, self.brief)


class PointwiseMap(Engine):
    """Any pointwise problem, on any architecture from sm_80."""

    id = "pointwise.map"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED if isinstance(problem, PointwiseProblem) else refuse("not a pointwise problem")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, PointwiseProblem)
        best = max_vec(problem)
        found = [EngineConfig.of(vec=v) for v in (16, 8, 4, 2, 1) if v <= best]
        if _has_packs(problem, best):
            found += [EngineConfig.of(vec=best, packs=n) for n in (2, 4) if n * best <= 16]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        # Larger packs use memory better; smaller ones leave each thread less to do, which is all that counts in a small problem.
        vec, packs = config["vec"], packs_of(config)
        moves = problem.num_bytes / (device.bandwidth_gbs * 1e3) * (1 + 0.5 / vec)
        if packs > 1:
            assert isinstance(problem, PointwiseProblem)
            # While a long expression is computed memory is left to other CTAs, of which there are few; a short one gains nothing (H200:
            # gelu of bf16 5 % less, silu of f32 5 % more).
            moves *= 0.94 + 0.01 * packs if _takes_few_registers(problem) and _instructions_per_byte(problem) >= LONG else 1.02
        return 3.0 + moves + 0.05 * vec

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, PointwiseProblem)
        if problem.is_empty:
            return Build(())
        wide = dict(config.knobs).get("index") == 64  # forces the 64-bit path
        return Build((map_step(problem, config["vec"], device, wide, packs=packs_of(config)),))


def _views(problem: PointwiseProblem) -> tuple[View, ...]:
    """What the kernel touches: inputs that the expression names, and outputs."""
    return tuple(v for v in problem.seen if v.operand.is_output or v.operand.name in problem.expression.args)


def reached(problem: PointwiseProblem) -> tuple[Operand, ...]:
    return tuple(v.operand for v in _views(problem))


def _takes_few_registers(problem: PointwiseProblem) -> bool:
    """Short expressions in f32."""
    ops = [n.op for n in problem.expression.nodes()]
    return problem.compute == "f32" and len(ops) <= 16 and not LONG_FUNCTIONS & set(ops) and len(problem.outputs) == 1 and (
        sum(not v.operand.is_output for v in _views(problem)) <= 2)


def _instructions_per_byte(problem: PointwiseProblem) -> float:
    count = prod(problem.shape)
    return _instructions(problem.expression, problem.compute, problem.is_brief) * count / max(1, problem.num_bytes)


@lru_cache(maxsize=1024)
def _instructions(expression: Expression, compute: str, is_brief: bool) -> int:
    """Of the expression's PTX for an element."""
    registers = {n: f"%{n}" for n in (*expression.args, *expression.scalars)}
    text = expression.lower(registers, [f"%result{i}" for i in range(expression.num_outputs)], compute, is_brief)
    return sum(line.endswith(";") and not line.lstrip().startswith(".reg") for line in text.split("\n"))


def _logical_index(problem: PointwiseProblem) -> Operand:
    """The operand whose byte offset is an element's index in the order of the dimensions, however tensors lie."""
    return Operand("index", TensorDesc.packed(U8, problem.shape), True)


def _space(problem: PointwiseProblem) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The collapsed index space, in the memory order of the first output, and the strides in it of every operand reached and, last, of
    the logical index where it counts."""
    touched = reached(problem)
    strides = [problem.strides(o) for o in touched]
    order = by_stride(problem.shape, strides[next(i for i, o in enumerate(touched) if o.is_output)])
    if set(SOURCES) & set(problem.expression.args):
        strides.append(problem.strides(_logical_index(problem)))
    return collapse([problem.shape[i] for i in order], [[row[i] for i in order] for row in strides])


def _pack_align(operand: Operand, vec: int) -> bool:
    return operand.desc.align % min(16, vec * operand.desc.dtype.num_bytes) == 0


def _mode(operand: Operand, row: tuple[int, ...], extents: tuple[int, ...], vec: int) -> str:
    if not extents:
        return "flat"
    if row == packed_strides(extents) and (vec == 1 or _pack_align(operand, vec)):
        return "flat"
    if vec == 1 or extents[-1] % vec == 0:
        if row[-1] == 0:
            return "same"
        if row[-1] == 1 and (vec == 1 or _pack_align(operand, vec) and all(s % vec == 0 for s in row[:-1])):
            return "pack"
    return "each" if vec > 1 else "pack"


def packs_of(config: EngineConfig) -> int:
    return int(dict(config.knobs).get("packs", 1))


def _has_packs(problem: PointwiseProblem, vec: int) -> bool:
    """Whether a thread may have several packs: a step between them is the same for all operands, and no random numbers are drawn."""
    (extents, strides), touched = _space(problem), reached(problem)
    if len(strides) > len(touched) or vec == 1:
        return False
    modes = [_mode(o, row, extents, vec) for o, row in zip(touched, strides, strict=True)]
    return all(m == "flat" or (m == "same" and not any(row)) for m, row in zip(modes, strides, strict=True))


def max_vec(problem: PointwiseProblem) -> int:
    """The largest pack at which most operands still move in packs: their type, alignment and strides decide."""
    (extents, strides), touched = _space(problem), reached(problem)
    smallest = min(o.desc.dtype.num_bytes for o in touched)
    vec = min(16 if all(o.desc.dtype.num_bytes == 1 for o in touched) else 8, 16 // smallest)
    while vec > 1:
        modes = [_mode(o, row, extents, vec) for o, row in zip(touched, strides, strict=False)]
        large = [m for m, o in zip(modes, touched, strict=True) if o.desc.numel * 4 >= prod(problem.shape)]
        if "each" not in large and vec <= prod(extents):
            return vec
        vec //= 2
    return 1


def map_step(problem: PointwiseProblem, vec: int, device: DeviceInfo, wide: bool = False, sums: WorkspaceArg | None = None,
             at: Mapping[str, ArgValue] = MappingProxyType({}), packs: int = 1) -> Step:
    """The launch. sums: it writes not its one output but, there, the sum over each CTA's THREADS * vec elements, in the compute type.
    at: where operands lie that are none of the plan's. packs: of a thread, where `_has_packs` and without sums."""
    (extents, strides), touched = _space(problem), reached(problem)
    count = prod(extents)
    accesses = tuple(Access(i, o.desc.dtype, _mode(o, row, extents, vec), o.is_output)
                     for i, (o, row) in enumerate(zip(touched, strides, strict=False)))
    index = None
    if len(strides) > len(touched):
        index = Access(len(touched), U8, _mode(_logical_index(problem), strides[-1], extents, vec), False)
    each = THREADS * vec * packs  # of a CTA
    wide_index = wide or count + each >= 2**31
    reach = max(max(-low, high) * o.desc.dtype.num_bytes for o in touched for low, high in [o.desc.offset_range])
    wide_offset = wide_index or reach >= 2**31
    has_tail = count % (vec if packs == 1 else each) != 0
    consts = MapConsts(problem.expression, problem.compute, tuple(o.name for o in touched if not o.is_output), accesses, vec, len(extents),
                       has_tail, wide_index, wide_offset, index, sums is not None, problem.is_brief, problem.saturate,
                       sums is not None and problem.num_bytes > device.l2_bytes, packs)
    args = [Arg(f"ptr{i}", "u64", sums if v.operand.is_output and sums else at[v.tensor] if v.tensor in at else
                TensorArg(v.tensor, v.offset * v.operand.desc.dtype.num_bytes)) for i, v in enumerate(_views(problem))]
    fixed = dict(problem.values)
    args += [Arg(f"scalar{i}", problem.compute, fixed.get(name, ScalarArg(name))) for i, name in enumerate(problem.expression.scalars)]
    if index:
        drawn = [Arg("state", "u64", TensorArg("state"))] if problem.has("state") else [Arg(n, "u64", ScalarArg(n)) for n in DRAWN]
        args += drawn
    args.append(Arg("count", "u64" if wide_index else "u32", count))
    if consts.has_pack_digits or consts.has_element_digits:
        for d in range(1, len(extents)):
            args.append(Arg(f"extent{d}", "u64" if wide_index else "u32", extents[d]))
            if not wide_index:
                multiplier, shift = magic(extents[d])
                args += [Arg(f"multiplier{d}", "u32", multiplier), Arg(f"shift{d}", "u32", shift)]
        for access, row in zip((*accesses, *([index] if index else [])), strides, strict=True):
            if access.mode != "flat" and access in consts.reached:
                args += [Arg(f"stride{access.index}_{d}", "s64" if wide_offset else "s32", row[d]) for d in range(len(extents))]
    grid = -(-count // each)
    # A CTA loads once and then computes: only other CTAs keep the memory busy meanwhile. 40 registers suffice for short expressions.
    is_short = (_takes_few_registers(problem) and vec <= 8 and index is None and not wide_offset
                and all(a.mode in ("flat", "same") and a.dtype not in (E4M3, E5M2) for a in accesses))
    return Step.of("pointwise/map", problem.op, Target.for_arch(device.arch), THREADS, args, consts, grid,
                   min_ctas_per_sm=1 if not is_short else 6 if packs == 1 else 4)


_OPS = ("pointwise", "activation", "activation_backward", "dropout", "dropout_backward", "random", "bernoulli", "poisson",
        "cast_stochastic", "rrelu", "rrelu_backward", "glu", "glu_backward")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (PointwiseMap(),) for op in _OPS}
