"""Two states of attention made one: a thread has some neighbouring columns of a row."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen import elementary
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.attention_states import AttentionStatesProblem
from ..ops.base import Problem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse
from .digits import ceil_div
from .rope import divisor, strides, vector

_THREADS = 256
_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class StatesConsts:
    """vec: columns of a thread; quads: threads of a row."""

    dtype: str
    compute: str
    vec: int
    quads: int

    def function(self, name: str, register: str) -> str:
        """PTX: register = exp or log of it."""
        emit = elementary.Emitter("%ef_")
        result = getattr(elementary, f"{name}_{self.compute}")(emit, register)
        lines = [*emit.declarations(), *emit.lines, f"mov.{self.compute} {register}, {result};"]
        return "\n".join(["    {", *("        " + line for line in lines), "    }"])


def _wide(desc: TensorDesc, rank: int) -> TensorDesc:
    """With a batch of one where there is none."""
    return desc if desc.rank == rank else TensorDesc(desc.dtype, (1, *desc.shape), (0, *desc.strides), desc.align)


class MergeStates(Engine):
    """One launch."""

    id = "attention_states.rows"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        count = problem.desc("out").numel
        return refuse(f"{count} elements (fewer than {_LIMIT - _THREADS * 8})") if count >= _LIMIT - _THREADS * 8 else SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 850)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, AttentionStatesProblem)
        if problem.is_empty:
            return Build(())
        rows = {n: _wide(problem.desc(n), 4) for n in ("out_a", "out_b", "out")}
        vec = vector(0, *rows.values())
        quads = rows["out"].shape[3] // vec
        _, heads, length, _ = rows["out"].shape
        consts = StatesConsts(rows["out"].dtype.name, problem.accumulator.name, vec, quads)
        items = rows["out"].numel // vec
        args = [Arg("num_items", "u32", items), *divisor("heads", heads), *divisor("length", length)]
        for name, desc in rows.items():
            args += [Arg(f"ptr_{name}", "u64", TensorArg(name)), *strides(name, ("batch", "head", "row", "dim"), desc)]
        for name in ("lse_a", "lse_b", "lse"):
            args += [Arg(f"ptr_{name}", "u64", TensorArg(name)), *strides(name, ("batch", "head", "row"), _wide(problem.desc(name), 3))]
        return Build((Step.of("attention/merge_states", problem.op, Target.for_arch(device.arch), _THREADS, args, consts,
                              ceil_div(items, _THREADS), suffix=consts.dtype),))


ENGINES: dict[str, tuple[Engine, ...]] = {"merge_attention_states": (MergeStates(),)}
