"""Dequantises GGUF blocks: a warp stages a run of a row's blocks in shared memory, its quads take them apart."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.gguf import GgufProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse
from .digits import DigitConsts, Digits, ceil_div
from .gguf_formats import FORMAT_CONSTS, FormatConsts, half_pair, phase_of

THREADS = 256
_LIMIT = 2**31
_SMEM = 48 * 1024


@dataclass(frozen=True, slots=True)
class DequantizeConsts:
    """run: blocks of a quad. phase: what their addresses are multiples of (4, 2, 1). moves_vectors: four elements of y lie together,
    aligned. begins_within: the first block may lie within 16 bytes that begin before it."""

    format: FormatConsts
    run: int
    phase: int
    dtype: str
    element_bytes: int
    moves_vectors: bool
    begins_within: bool
    digits: DigitConsts

    @property
    def span_pieces(self) -> int:
        """Pieces of 16 bytes that a warp's blocks may touch; a reader of words at any byte takes the next word as well."""
        return ceil_div(8 * self.run * self.format.num_bytes + 15 + 4 * (self.phase == 1), 16)

    @property
    def span_pitch(self) -> int:
        return 16 * self.span_pieces

    @property
    def multiplies(self) -> bool:
        return False

    def pair(self, value: float) -> str:
        return half_pair(value)


class GgufDequantize(Engine):
    id = "gguf.dequantize"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, GgufProblem)
        if not device.at_least(8):
            return refuse(f"cp.async needs compute capability 8.0, the device has {device.capability[0]}.{device.capability[1]}")
        blocks = problem.desc("blocks")
        if blocks.shape[-1] >= _LIMIT:
            return refuse(f"rows of {blocks.shape[-1]} bytes (at most {_LIMIT - 1})")
        units = blocks.numel // max(problem.block_bytes, 1)
        return refuse(f"{units} blocks (at most {_LIMIT - 1})") if units >= _LIMIT else SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.85)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, GgufProblem)
        if problem.is_empty:
            return Build(())
        blocks, y, f = problem.desc("blocks"), problem.desc("y"), FORMAT_CONSTS[problem.format]
        if blocks.is_packed("nchw") and y.is_packed("nchw") and blocks.numel < _LIMIT:  # one long row
            blocks = TensorDesc(blocks.dtype, (blocks.numel,), (1,), blocks.align)
            y = TensorDesc(y.dtype, (y.numel,), (1,), y.align)
        size = y.dtype.num_bytes
        run = max(f.run // 2, 1) if f.size < 256 else f.run
        per_warp = 8 * run
        runs = ceil_div(blocks.shape[-1], per_warp * f.num_bytes)
        strides = {"blocks": (*blocks.strides[:-1], per_warp * f.num_bytes),
                   "y": (*(s * size for s in y.strides[:-1]), y.strides[-1] * size * per_warp * f.size)}
        digits = Digits((*(f"d{i}" for i in range(blocks.rank - 1)), "run"), (*blocks.shape[:-1], runs), strides)
        moves = y.strides[-1] == 1 and y.align % (4 * size) == 0 and all(s % (4 * size) == 0 for s in strides["y"])
        consts = DequantizeConsts(f, run, phase_of(f, blocks, run * f.num_bytes), y.dtype.name, size, moves, blocks.align < 16,
                                  digits.consts())
        args = [Arg("ptr_blocks", "u64", TensorArg("blocks")), Arg("ptr_y", "u64", TensorArg("y")), Arg("num_units", "u32", digits.size),
                *digits.args(consts.digits.wide), Arg("row_bytes", "u32", blocks.shape[-1]), Arg("y_step", "s64", y.strides[-1] * size)]
        warps = THREADS // 32
        while warps * consts.span_pitch + f.grid_bytes > _SMEM:
            warps //= 2
        step = Step.of("gguf/dequantize", problem.op, Target.for_arch(device.arch, (7, 4)), 32 * warps, args, consts,
                       ceil_div(digits.size, warps), dynamic_smem=warps * consts.span_pitch + f.grid_bytes,
                       suffix=f"{f.name.lower()}_{consts.dtype}")
        return Build((step,))


ENGINES: dict[str, tuple[Engine, ...]] = {"gguf_dequantize": (GgufDequantize(),)}
