"""Products of GGUF matrices with many rows of x: the matrix dequantised to x's type in the workspace, then a GEMM."""

from __future__ import annotations

from ..device import DeviceInfo
from ..errors import OxidnnError
from ..ops import OPS
from ..ops.base import Problem
from ..ops.gguf import EXACT_ROWS, GgufMatvecProblem
from ..tensor import TensorDesc
from .base import Build, Engine, EngineConfig, Scratch, Support, TensorArg, refuse
from .composition import Product, moved, product
from .gguf_dequantize import GgufDequantize

_DEQUANTIZE, _CONFIG = GgufDequantize(), EngineConfig()


def _numbers(p: GgufMatvecProblem) -> TensorDesc:
    """W in x's type."""
    return TensorDesc.packed(p.desc("x").dtype, (p.n, p.k))


def _dequantized(p: GgufMatvecProblem) -> Problem:
    numbers = _numbers(p)
    attrs = {"format": p.format, "dtype": numbers.dtype.name}
    return OPS["gguf_dequantize"].make({"blocks": p.desc("blocks"), "y": numbers}, attrs, p.policy)


def _product(p: GgufMatvecProblem) -> Product:
    return (("a", p.desc("x")), ("b", _numbers(p)), ("d", p.desc("y"))), (("transpose_b", True),)


class GgufApart(Engine):
    """More rows than are promised exact codes. Workspace: W in x's type, and what the GEMM takes."""

    id = "gguf.apart"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, GgufMatvecProblem)
        if p.has("ids"):
            return refuse("experts have matrices of their own")
        if p.rows <= EXACT_ROWS:
            return refuse(f"codes are multiplied exactly with {p.rows} rows (W is rounded from {EXACT_ROWS + 1} on)")
        if p.is_empty or not p.k:
            return refuse("there is nothing to multiply")
        try:
            product(*_product(p), p.policy, device)
        except OxidnnError as error:
            return refuse(str(error).partition("\n")[0])
        return _DEQUANTIZE.check_support(_dequantized(p), device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, GgufMatvecProblem)
        return _DEQUANTIZE.estimate(_dequantized(p), _CONFIG, device) + product(*_product(p), p.policy, device)[1]

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, GgufMatvecProblem)
        scratch = Scratch()
        w = scratch.take(_numbers(p).num_bytes)
        made = _DEQUANTIZE.build_steps(_dequantized(p), _CONFIG, device)
        build, _ = product(*_product(p), p.policy, device)
        steps = moved(made, scratch.take(made.workspace_bytes), blocks=TensorArg("blocks"), y=w)
        steps += moved(build, scratch.take(build.workspace_bytes), a=TensorArg("x"), b=w, d=TensorArg("y"))
        return Build(tuple(steps), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {"gguf_matvec": (GgufApart(),)}
