"""Linear layers of quantised weights of any kind and layout: the weights dequantised to x's type in the workspace, then a GEMM. And weights
in the layouts of other tools turned into ours."""

from __future__ import annotations

from dataclasses import dataclass

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.quantized_linear import NF4, NIBBLES, ROLES, QuantizedLinearProblem, RepackProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .composition import Place, Product, moved, product
from .digits import DigitConsts, Digits, ceil_div

THREADS = 256
PACK = 8
_LIMIT = 2**31


@dataclass(frozen=True, slots=True)
class DequantizeConsts:
    """bytes: of eight numbers, loaded at once if `vector`. grouped: "row" (one scale a row), "pack" (eight neighbours share it), "element".
    zero: PTX type of zero points, "" without. table: of nf4."""

    kind: str
    dtype: str
    size: int
    bytes: int
    vector: bool
    scale: str
    zero: str
    grouped: str
    native_fp8: bool
    table: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class GatherConsts:
    size: int
    digits: DigitConsts


@dataclass(frozen=True, slots=True)
class RepackConsts:
    """part: "codes" | "zeros"; along: the direction of eight numbers of a word; vector: four bytes of w are written at once."""

    part: str
    along: str
    is_awq: bool
    has_order: bool
    vector: bool
    scale_size: int
    offset: int


def _divisor(stem: str, value: int) -> list[Arg]:
    multiplier, shift = magic(max(1, value))
    return [Arg(f"{stem}_mul", "u32", multiplier), Arg(f"{stem}_shr", "u32", shift)]


def dequantized_desc(p: QuantizedLinearProblem) -> TensorDesc:
    """W in x's type, rows of whole groups of eight."""
    kind = p.desc("x").dtype
    pitch = max(PACK, ceil_div(p.k, PACK) * PACK)
    return TensorDesc(kind, (p.n, p.k), (pitch, 1))


def dequantize_step(p: QuantizedLinearProblem, y: ArgValue, device: DeviceInfo) -> Step:
    w, scale, out = p.desc("w"), p.desc("scale"), dequantized_desc(p)
    packs, num_bytes = ceil_div(p.k, PACK), PACK // 2 if p.kind in NIBBLES else PACK
    vector = p.k % PACK == 0 and w.strides[1] == 1 and w.strides[0] % num_bytes == 0 and w.align % num_bytes == 0
    grouped = "row" if p.groups == 1 else "pack" if p.group_size % PACK == 0 else "element"
    zero = p.desc("zero_point").dtype.name if p.has("zero_point") else ""
    consts = DequantizeConsts(p.kind, out.dtype.name, out.dtype.num_bytes, num_bytes, vector, scale.dtype.name, zero, grouped,
                              device.at_least(9, 0), tuple(map(float, NF4)) if p.kind == "nf4" else ())
    args = [Arg("ptr_w", "u64", TensorArg("w")), Arg("ptr_scale", "u64", TensorArg("scale")), Arg("ptr_y", "u64", y),
            Arg("num_threads", "u32", p.n * packs), Arg("packs", "u32", packs), *_divisor("packs", packs),
            Arg("w_row", "s64", w.strides[0]), Arg("w_column", "s64", w.strides[1]), Arg("num_columns", "u32", p.k),
            Arg("last_column", "u32", max(p.k, 1) - 1), Arg("y_row", "s64", out.strides[0] * out.dtype.num_bytes)]
    args += [Arg(f"scale_{x}", "s64", s * scale.dtype.num_bytes) for x, s in zip(("row", "group"), p.grid_strides("scale"), strict=True)]
    if grouped != "row":
        args += [Arg("group_size", "u32", p.group_size), *_divisor("group", p.group_size)]
    if zero:
        args.append(Arg("ptr_zero", "u64", TensorArg("zero_point")))
        args += [Arg(f"zero_{x}", "s64", s) for x, s in zip(("row", "group"), p.grid_strides("zero_point"), strict=True)]
    return Step.of("quantized_linear/dequantize", p.op, Target.for_arch(device.arch, (7, 8)), THREADS, args, consts,
                   ceil_div(p.n * packs, THREADS), suffix=f"{p.kind}_{consts.dtype}")


def gather_step(p: QuantizedLinearProblem, y: ArgValue, device: DeviceInfo) -> Step:
    """x with its columns in the order of `permutation`, packed."""
    x = p.desc("x")
    size = x.dtype.num_bytes
    strides = (*(s * size for s in x.strides[:-1]), 0)
    digits = Digits((*(f"r{i}" for i in range(x.rank - 1)), "column"), x.shape, {"x": strides})
    consts = GatherConsts(size, digits.consts())
    args = [Arg("ptr_x", "u64", TensorArg("x")), Arg("ptr_order", "u64", TensorArg("permutation")), Arg("ptr_y", "u64", y),
            Arg("num_threads", "u32", digits.size), Arg("num_columns", "u32", p.k),
            Arg("order_bytes", "s64", p.desc("permutation").strides[0] * 4), Arg("column_bytes", "s64", x.strides[-1] * size),
            *digits.args(consts.digits.wide)]
    return Step.of("quantized_linear/gather", p.op, Target.for_arch(device.arch), THREADS, args, consts, ceil_div(digits.size, THREADS),
                   suffix=x.dtype.name)


def _product(p: QuantizedLinearProblem) -> Product:
    x = TensorDesc.packed(p.desc("x").dtype, p.desc("x").shape) if p.has("permutation") else p.desc("x")
    extra = tuple((o.name, o.desc) for o in p.inputs if o.name not in ROLES)
    operands = (("a", x), ("b", dequantized_desc(p)), *extra, ("d", p.desc("y")))
    return operands, (("transpose_b", True), *((("epilogue", p.epilogue),) if p.epilogue is not None else ()))


class QuantizedLinearApart(Engine):
    """Any problem. Workspace: W in x's type, x in the order of a permutation, and what the GEMM takes."""

    id = "quantized_linear.apart"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        if p.n * ceil_div(p.k, PACK) >= _LIMIT or p.desc("x").numel >= _LIMIT:
            return refuse(f"weights of {p.n} x {p.k} or {p.desc('x').numel} elements of x are too many for a launch")
        return SUPPORTED

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        if p.is_empty:
            return 0.0
        operands, attrs = _product(p)
        moved_bytes = p.desc("w").num_bytes + p.n * p.k * p.desc("x").dtype.num_bytes
        return product(operands, attrs, p.policy, device)[1] + 3.0 + moved_bytes / (device.bandwidth_gbs * 1e3 * 0.8)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, QuantizedLinearProblem)
        if p.is_empty:
            return Build(())
        scratch = Scratch()
        steps: list[Step] = []
        w = scratch.take(p.n * dequantized_desc(p).strides[0] * p.desc("x").dtype.num_bytes)
        x: Place = TensorArg("x")
        if p.k:
            if p.has("permutation"):
                x = scratch.take(p.desc("x").numel * p.desc("x").dtype.num_bytes)
                steps.append(gather_step(p, x, device))
            steps.append(dequantize_step(p, w, device))
        operands, attrs = _product(p)
        build, _ = product(operands, attrs, p.policy, device)
        extra: dict[str, Place] = {name: TensorArg(name) for name, _ in operands if name not in ("a", "b", "d")}
        steps += moved(build, scratch.take(build.workspace_bytes), a=x, b=w, d=TensorArg("y"), **extra)
        return Build(tuple(steps), scratch.num_bytes)


class RepackEngine(Engine):
    id = "repack.map"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        p = problem
        assert isinstance(p, RepackProblem)
        fits = p.n * max(ceil_div(p.k, PACK), p.groups) < _LIMIT
        return SUPPORTED if fits else refuse(f"weights of {p.n} x {p.k} are too many for a launch")

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 5.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.5)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, RepackProblem)
        steps = [_repack_step(p, part, device) for part, count in (("codes", p.k), ("zeros", p.groups)) if count * p.n]
        return Build(tuple(steps))


def _repack_step(p: RepackProblem, part: str, device: DeviceInfo) -> Step:
    w, zero, scale, scales = (p.desc(name) for name in ("w", "zero_point", "scale", "scales"))
    words, is_codes = p.desc("qweight" if part == "codes" else "qzeros"), part == "codes"
    packs = ceil_div(p.k, PACK) if is_codes else p.groups
    vector = p.k % PACK == 0 and w.strides[1] == 1 and w.strides[0] % 4 == 0 and w.align % 4 == 0
    has_order = is_codes and p.has("permutation")
    consts = RepackConsts(part, "k" if is_codes and not p.is_awq else "n", p.is_awq, has_order, vector, scale.dtype.num_bytes,
                          p.zero_offset)
    args = [Arg("ptr_words", "u64", TensorArg("qweight" if is_codes else "qzeros")), Arg("num_threads", "u32", p.n * packs),
            Arg("rows", "u32", p.n), *_divisor("rows", p.n), Arg("words_row", "s64", words.strides[0] * 4),
            Arg("words_column", "s64", words.strides[1] * 4)]
    if is_codes:
        args += [Arg("ptr_w", "u64", TensorArg("w")), Arg("num_k", "u32", p.k), Arg("w_row", "s64", w.strides[0]),
                 Arg("w_column", "s64", w.strides[1])]
        if has_order:
            args += [Arg("ptr_order", "u64", TensorArg("permutation")), Arg("order_bytes", "s64", p.desc("permutation").strides[0] * 4)]
    else:
        size = scale.dtype.num_bytes
        args += [Arg("ptr_zero", "u64", TensorArg("zero_point")), Arg("ptr_scale", "u64", TensorArg("scale")),
                 Arg("ptr_scales", "u64", TensorArg("scales")), Arg("zero_row", "s64", zero.strides[0]),
                 Arg("zero_group", "s64", zero.strides[1]), Arg("scale_row", "s64", scale.strides[0] * size),
                 Arg("scale_group", "s64", scale.strides[1] * size), Arg("scales_group", "s64", scales.strides[0] * size),
                 Arg("scales_row", "s64", scales.strides[1] * size)]
    return Step.of("quantized_linear/repack", p.op, Target.for_arch(device.arch), THREADS, args, consts, ceil_div(p.n * packs, THREADS),
                   suffix=f"{part}_{consts.scale_size}")


ENGINES: dict[str, tuple[Engine, ...]] = {"quantized_linear": (QuantizedLinearApart(),),
                                          **{op: (RepackEngine(),) for op in ("repack_gptq", "repack_awq")}}
