"""Rows: what engines share whose threads walk along one dimension of a tensor. Pairs with ptx_templates/rowwise/{row,columns}.ptx.j2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any, ClassVar

from ..codegen import elementary
from ..codegen.environment import f32_literal, f64_literal
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType
from ..ops.base import Problem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Engine, EngineConfig, Step, Support, refuse
from .digits import DigitConsts, Digits

_LIMIT = 2**31
_RESIDENT_BYTES = 128  # most a thread holds of rows in registers, in the compute type


@dataclass(frozen=True, slots=True)
class RowConsts:
    """What row-wise templates read. lanes: threads a row; chunks: packs of `vector` columns a thread holds, 0 to reload the row.

    reduction of a loss: "" writes each row's; "plain", "counted" and "weighted" leave it to be summed (counted: divided by the rows,
    weighted: by the targets' weights). Of a global pool: "max" or "avg".
    """

    dtype: str
    compute: str
    digits: DigitConsts
    lanes: int
    vector: int
    chunks: int
    slots: int = 0
    is_log: bool = False
    reduction: str = ""
    smoothing: float = 0.0
    is_probability: bool = False
    target_dtype: str = ""
    weight_dtype: str = ""
    d_loss_dtype: str = ""

    inf: ClassVar[float] = inf
    nan: ClassVar[float] = nan

    @property
    def compute_bytes(self) -> int:
        return 8 if self.compute == "f64" else 4

    def names(self, prefix: str, base: int) -> list[str]:
        """The registers of one pack."""
        return [f"{prefix}{base + i}" for i in range(self.vector)]

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    def elementary(self, function: str, dst: str, src: str) -> str:
        """A scope that sets dst to "exp" or "log" of src, accurate to the compute type."""
        emit = elementary.Emitter("%ef_")
        result = getattr(elementary, f"{function}_{self.compute}")(emit, src)
        lines = [*emit.declarations(), *emit.lines, f"mov.{self.compute} {dst}, {result};"]
        return "\n".join(["    {", *("        " + line for line in lines), "    }"])


@dataclass(frozen=True)
class Rows:
    """Where rows lie. axis: the column dimension of the operands `full`; the others hold a value a row, or one for all rows."""

    descs: dict[str, TensorDesc]
    axis: int
    full: tuple[str, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.descs[self.full[0]].shape

    @property
    def columns(self) -> int:
        return self.shape[self.axis]

    @property
    def digits(self) -> Digits:
        extents = self.shape[: self.axis] + self.shape[self.axis + 1:]
        strides = {}
        for name, desc in self.descs.items():
            row = tuple(s * desc.dtype.num_bytes for s in desc.strides)
            if name in self.full:
                row = row[: self.axis] + row[self.axis + 1:]
            elif not row:
                row = (0,) * len(extents)  # one value for all rows
            strides[name] = row
        return Digits(tuple(f"d{i}" for i in range(len(extents))), extents, strides)

    def step(self, name: str) -> int:
        desc = self.descs[name]
        return desc.strides[self.axis] * desc.dtype.num_bytes

    def vector(self) -> int:
        """The longest pack of columns (at most 16 bytes) with which every operand can be moved."""
        first = self.descs[self.full[0]]
        vector = 16 // first.dtype.num_bytes
        while vector > 1 and not all(self._takes(self.descs[n], vector) for n in self.full):
            vector //= 2
        return vector

    def _takes(self, desc: TensorDesc, vector: int) -> bool:
        piece = min(16, vector * desc.dtype.num_bytes)
        others = [s for i, s in enumerate(desc.strides) if i != self.axis and desc.shape[i] > 1]
        return (desc.strides[self.axis] == 1 and self.columns % vector == 0 and desc.align >= piece
                and all(s * desc.dtype.num_bytes % piece == 0 for s in others))


def compute_type(kind: DType) -> str:
    """The type of the arithmetic on rows."""
    return "f64" if kind.name == "f64" else "f32"


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


class RowEngine(Engine):
    """What the row-wise engines share: how threads are dealt to rows, and the arguments that follow."""

    held: ClassVar[int] = 1  # row operands a thread holds in registers

    def rows(self, problem: Problem) -> Rows:
        raise NotImplementedError

    def resident(self, kind: DType) -> int:
        """The most elements of a row a thread holds in registers."""
        return _RESIDENT_BYTES // (8 if compute_type(kind) == "f64" else 4) // self.held

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        rows = self.rows(problem)
        if rows.digits.size >= _LIMIT or rows.columns >= _LIMIT:
            return refuse(f"{rows.digits.size} rows of {rows.columns} columns (at most {_LIMIT - 1} of each)")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Threads side by side along the columns where those lie together, else along the rows."""
        rows = self.rows(problem)
        first = rows.descs[rows.full[0]]
        vector = rows.vector()
        packs = -(-rows.columns // vector)
        resident = self.resident(first.dtype)
        within_warp = EngineConfig.of(lanes=min(32, _power_of_two(packs)), vec=vector, threads=128)
        if first.strides[rows.axis] != 1 and rows.columns > 1 and rows.digits.size >= 32:
            return (EngineConfig.of(lanes=1, vec=1, threads=128), within_warp)
        whole = [EngineConfig.of(lanes=t, vec=vector, threads=t) for t in (128, 256, 512)]
        if rows.columns <= 32 * min(resident, 16):
            return (within_warp, whole[0])
        fitting = [c for c in whole if rows.columns <= c["lanes"] * resident] or [whole[2], whole[1]]
        return (*fitting, within_warp)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        efficiency = 0.85 if config["vec"] * problem.operands[0].desc.dtype.num_bytes == 16 else 0.5
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * efficiency) + problem.flops / (device.fma_tflops * 1e5)

    def row_step(self, template: str, problem: Problem, config: EngineConfig, device: DeviceInfo, rows: Rows, addresses: dict[str, Any],
                 slots: int, extra: Sequence[Arg] = (), weight: TensorDesc | None = None, **fields: Any) -> Step:
        """One launch over all rows. addresses: operand -> argument value; extra: arguments of this template alone."""
        kind = rows.descs[rows.full[0]].dtype
        lanes, vector, threads = config["lanes"], config["vec"], config["threads"]
        per_thread = -(-rows.columns // (lanes * vector))
        chunks = per_thread if per_thread * vector <= self.resident(kind) else 0
        digits = rows.digits.ordered_for(rows.full[0]).collapsed()
        steps = {name: rows.step(name) for name in rows.full}
        if weight is not None:
            steps["weight"] = weight.strides[0] * weight.dtype.num_bytes
        shape = digits.consts(any(abs(s) >= _LIMIT for s in steps.values()))
        wide = "s64" if shape.wide else "s32"
        args = [Arg(f"ptr_{name}", "u64", addresses[name]) for name in rows.descs]
        args += [Arg("num_rows", "u32", digits.size), Arg("num_columns", "u32", rows.columns)]
        args += digits.args(shape.wide)
        args += [Arg(f"step_{name}", wide, step) for name, step in steps.items()]
        weight_dtype = weight.dtype.name if weight is not None else ""
        consts = RowConsts(kind.name, compute_type(kind), shape, lanes, vector, chunks, slots, weight_dtype=weight_dtype, **fields)
        return Step.of(template, problem.op, Target.for_arch(device.arch), threads, [*args, *extra], consts,
                       -(-digits.size * lanes // threads), min_ctas_per_sm=max(1, 512 // threads),
                       suffix=f"{kind.name}_l{lanes}_v{vector}_c{chunks}")
