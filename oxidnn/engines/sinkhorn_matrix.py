"""Sinkhorn's iterations, a thread a matrix, which its registers hold. The gradient keeps the sums' reciprocals in the workspace."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import ClassVar

from ..codegen import elementary
from ..codegen.environment import f32_literal, f64_literal
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import F64
from ..dtypes import dtype as dtype_of
from ..ops.base import Problem
from ..ops.sinkhorn import SinkhornProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .digits import DigitConsts, Digits

_THREADS = 128
_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class SinkhornConsts:
    """size: rows of a matrix. vectors: elements of a matrix of each operand that can be moved at once."""

    digits: DigitConsts
    dtype: str
    compute: str
    size: int
    vectors: tuple[tuple[str, int], ...]
    is_backward: bool

    inf: ClassVar[float] = inf

    @property
    def element_bytes(self) -> int:
        return dtype_of(self.dtype).num_bytes

    def vector(self, operand: str) -> int:
        return dict(self.vectors)[operand]

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    def places(self, along: str, index: int) -> list[int]:
        """Elements of a row, or of a column."""
        n = self.size
        return [index * n + k if along == "row" else k * n + index for k in range(n)]

    def exponential(self, register: str) -> str:
        emit = elementary.Emitter("%ef_")
        result = getattr(elementary, f"exp_{self.compute}")(emit, register)
        lines = [*emit.declarations(), *emit.lines, f"mov.{self.compute} {register}, {result};"]
        return "\n".join(["    {", *("        " + line for line in lines), "    }"])


def _vector(desc: TensorDesc, size: int) -> int:
    """The longest piece of a matrix, at most 16 bytes, that lies together and aligned in every one."""
    if desc.strides[-2:] != (size, 1) and size > 1:
        return 1
    vector = 16 // desc.dtype.num_bytes
    steps = [s for n, s in zip(desc.shape[:-2], desc.strides[:-2], strict=True) if n > 1]
    while vector > 1 and (size * size % vector or desc.align < vector * desc.dtype.num_bytes or any(s % vector for s in steps)):
        vector //= 2
    return vector


class SinkhornEngine(Engine):
    """Forward and backward, in one launch."""

    id = "sinkhorn.matrix"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, SinkhornProblem)
        return refuse(f"{problem.count} matrices (at most {_LIMIT - _THREADS})") if problem.count > _LIMIT - _THREADS else SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 500) + problem.flops / (device.fma_tflops * 1e5)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, SinkhornProblem)
        if problem.is_empty:
            return Build(())
        x, n, scratch = problem.desc("x"), problem.size, Scratch()
        compute = "f64" if x.dtype is F64 else "f32"
        strides = {o.name: tuple(s * o.desc.dtype.num_bytes for s in o.desc.strides) for o in problem.operands}
        names = tuple(f"d{i}" for i in range(x.rank - 2))
        digits = Digits(names, x.shape[:-2], {k: s[:-2] for k, s in strides.items()}).ordered_for("x").collapsed("b")
        wide = digits.consts().wide or any(abs(s) >= _LIMIT for row in strides.values() for s in row)
        is_backward = problem.has("dy")
        vectors = tuple((o.name, _vector(o.desc, n)) for o in problem.operands)
        consts = SinkhornConsts(digits.consts(wide), x.dtype.name, compute, n, vectors, is_backward)
        args = [Arg(f"ptr_{o.name}", "u64", TensorArg(o.name)) for o in problem.operands]
        args += [Arg("num_matrices", "u32", digits.size), Arg("iterations", "u32", problem.iterations), Arg("eps", compute, problem.eps)]
        args += digits.args(wide)
        for k, row in strides.items():
            args += [Arg(f"{along}_{k}", "s64" if wide else "s32", step) for along, step in zip(("row", "column"), row[-2:], strict=True)]
        if is_backward:
            args.append(Arg("ptr_scales", "u64", scratch.take(2 * problem.iterations * n * digits.size * (8 if compute == "f64" else 4))))
        step = Step.of("rowwise/sinkhorn", problem.op, Target.for_arch(device.arch), _THREADS, args, consts, -(-digits.size // _THREADS),
                       suffix=f"{x.dtype.name}_{n}")
        return Build((step,), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (SinkhornEngine(),) for op in ("sinkhorn", "sinkhorn_backward")}
