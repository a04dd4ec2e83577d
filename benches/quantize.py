"""Quantisation and dequantisation against eager and compiled PyTorch: every byte checked on poisoned outputs, then timed interleaved.

    python benches/quantize.py [--ops quantize,dequantize] [--further] [--workers 15 --compile 99] [--configs] [--match W]
                               [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch; with 16 cores all cases and compiled PyTorch for each take 40 s. Bytes that must move: numbers and codes
once, scales once; a tensor's own scale takes a second reading. Columns: see moving.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import moving
import torch
from moving import Case, add_options, matching, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.ops.quantize import KINDS

FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
moving.TORCH_TYPES |= FP8
SIZES = ((16384, 8192), (8192, 4096))  # of bf16: 256 and 64 MB
FURTHER = ((4096, 14336), (65536, 1024), (1024, 65536))
Torch = Callable[[Tensors], Any]


def _over(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """The quotient itself: by a number on the host torch multiplies with its reciprocal."""
    return amax / torch.full((), largest, device=amax.device)


def _scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    scale = _over(amax, largest)
    return torch.where(scale == 0, 1.0, scale)


def fp4_codes(v: torch.Tensor) -> torch.Tensor:
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6, of two the even code, with the sign as the fourth bit, packed."""
    size = v.abs().clamp(max=6)
    code = torch.where(size < 2, torch.round(2 * size), torch.where(size < 4, torch.round(size) + 2, torch.round(size / 2) + 4))
    code = code.to(torch.uint8) | (torch.signbit(v).to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def fp4_numbers(q: torch.Tensor) -> torch.Tensor:
    code = torch.stack((q & 15, q >> 4), -1).flatten(-2).int()
    size = torch.where(code % 8 < 4, (code % 8) * 0.5, torch.where(code % 8 < 6, (code % 8) - 2.0, (code % 8) * 2.0 - 8.0))
    return torch.where(code >= 8, -size, size)


def integer_codes(v: torch.Tensor, kind: str) -> torch.Tensor:
    low, high = KINDS[kind].low, KINDS[kind].high
    code = torch.round(v).clamp(low, high)
    if KINDS[kind].bits == 8:
        return code.to(torch.int8 if low else torch.uint8)
    code = code.to(torch.int32).bitwise_and(15).to(torch.uint8)
    return code[..., 0::2] | (code[..., 1::2] << 4)


def codes_of(v: torch.Tensor, kind: str) -> torch.Tensor:
    if kind in FP8:
        most = KINDS[kind].largest
        return v.clamp(-most, most).to(FP8[kind])
    return fp4_codes(v) if kind == "e2m1" else integer_codes(v, kind)


def numbers_of(q: torch.Tensor, kind: str) -> torch.Tensor:
    if kind in FP8 or KINDS[kind].bits == 8:
        return q.float()
    if kind == "e2m1":
        return fp4_numbers(q)
    code = torch.stack((q & 15, q >> 4), -1).flatten(-2).int()
    return torch.where((code >= 8) & (KINDS[kind].low < 0), code - 16, code).float()


def torch_of(problem: Problem) -> Torch:
    """The same by torch, in the order of the outputs."""
    attrs = dict(problem.attrs)
    kind, scaling = attrs.get("kind", ""), attrs.get("scaling")
    if problem.op == "cast":
        to = moving.TORCH_TYPES[problem.desc("y").dtype.name]
        return lambda t: t["x"].to(to)
    if problem.op == "pack4":
        return lambda t: fp4_codes(t["x"].float())
    if problem.op == "unpack4":
        to = moving.TORCH_TYPES[problem.desc("y").dtype.name]
        return lambda t: numbers_of(t["x"], problem.kind).to(to)  # type: ignore[attr-defined]
    if problem.op == "quantize":
        return lambda t: codes_of(_grouped(t["x"].float(), t["scale"]) / _last(t["scale"]), kind).flatten(1)
    if problem.op == "fake_quantize":
        def there_and_back(t: Tensors) -> torch.Tensor:
            scale = t["scale"][:, None]
            return (numbers_of(codes_of(t["x"].float() / scale, kind), kind) * scale).to(t["x"].dtype)

        return there_and_back
    if problem.op == "dequantize":
        dtype = moving.TORCH_TYPES[problem.desc("y").dtype.name]

        def back(t: Tensors) -> torch.Tensor:
            scale = t["scale"]
            if scaling in ("mxfp8", "mxfp4"):
                scale = (scale.int() << 23).view(torch.float32)
            if scaling == "nvfp4":
                scale = scale.float() * t["global_scale"]
            return (_grouped(numbers_of(t["x"], kind), scale) * _last(scale)).to(dtype).flatten(1)

        return back
    if scaling == "tensor":
        def whole(t: Tensors) -> Any:
            x = t["x"].float()
            scale = _scale(x.abs().amax(), KINDS[kind].largest)
            return codes_of(x / scale, kind), scale

        return whole
    if isinstance(scaling, tuple) and scaling[0] == "block":
        def blocks(t: Tensors) -> Any:
            (rows, columns), x = scaling[1], t["x"].float()
            x = x.view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
            scale = _scale(x.abs().amax((1, 3)), KINDS[kind].largest)
            return codes_of(x / scale[:, None, :, None], kind).view(t["x"].shape), scale

        return blocks
    size = {"token": problem.desc("x").shape[1], "mxfp8": 32, "mxfp4": 32, "nvfp4": 16}.get(scaling) or scaling[1]
    laid_out = tiled if attrs.get("layout") == "128x4" else lambda scale: scale

    def groups(t: Tensors) -> Any:
        x = t["x"] if t["x"].dtype == torch.float64 else t["x"].float()
        x = x.unflatten(1, (-1, size))
        amax = x.abs().amax(-1).float()
        if scaling in ("mxfp8", "mxfp4"):
            exponent = ((amax.view(torch.int32) >> 23) - KINDS[kind].exponent).clamp(min=0)
            inverse = ((254 - exponent) << 23).view(torch.float32)
            return codes_of(x * inverse[..., None], kind).flatten(1), laid_out(exponent.to(torch.uint8))
        if scaling == "nvfp4":
            scale = (amax / (t["global_scale"] * 6)).clamp(max=448).to(FP8["e4m3"])
            total = scale.float() * t["global_scale"]
            inverse = torch.where(total == 0, 0.0, torch.full((), 1.0, device=x.device) / total)
            return codes_of(x * inverse[..., None], kind).flatten(1), laid_out(scale)
        scale = _scale(amax, KINDS[kind].largest)
        return codes_of(x / scale[..., None], kind).flatten(1), scale.squeeze(-1) if scaling == "token" else scale

    return groups


def tiled(scale: torch.Tensor) -> torch.Tensor:
    """In the layout 128x4."""
    rows, columns = scale.shape
    return scale.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)


def _grouped(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """(rows, groups, columns of one scale)"""
    return x.unflatten(1, (scale.shape[1] if scale.ndim == 2 else 1, -1))


def _last(scale: torch.Tensor) -> torch.Tensor:
    return scale[..., None] if scale.ndim == 2 else scale[:, None, None] if scale.ndim == 1 else scale


def make_tensors(problem: Problem) -> Tensors:
    """Numbers of rows of different sizes, codes of every value, scales that suit them."""
    generator, tensors = torch.Generator("cuda").manual_seed(3), {}
    for o in problem.operands:
        shape, kind = o.desc.shape, moving.TORCH_TYPES[o.desc.dtype.name]
        tensor = torch.empty(shape, dtype=kind, device="cuda")
        if not o.is_output:
            if o.name in ("scale", "global_scale") and kind is not torch.uint8:
                tensor.copy_(torch.rand(shape, device="cuda", generator=generator) * 0.1 + 0.01)
            elif o.name == "scale":
                tensor.copy_(torch.randint(118, 132, shape, device="cuda", generator=generator))
            elif kind in (torch.uint8, torch.int8):
                tensor.copy_(torch.randint(-100 if kind is torch.int8 else 0, 100 if kind is torch.int8 else 256, shape, device="cuda",
                                           generator=generator))
            else:
                tensor.copy_(torch.randn(shape, device="cuda", generator=generator))
        tensors[o.name] = tensor
    return tensors


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def judge(case: Case, tensors: Tensors) -> Callable[[], float]:
    """Every byte of every output, as torch has it of the same definition (of nvfp4 by exact products)."""
    is_exact = dict(case.problem.attrs).get("scaling") == "nvfp4" and case.problem.op == "dynamic_quantize"
    want = case.forward(tensors | {"x": tensors["x"].double()} if is_exact else tensors)
    names = [o.name for o in case.problem.outputs]
    kept = dict(zip(names, want if isinstance(want, tuple) else (want,), strict=True))
    return lambda: 0.0 if all(torch.equal(bytes_of(tensors[n]), bytes_of(w)) for n, w in kept.items()) else float("inf")


def lines(rows: int, columns: int, x: str = "bf16") -> list[tuple[str, str]]:
    """(label, case)"""
    shape, half = f"[{rows},{columns}]nchw", f"[{rows},{columns // 2}]nchw"
    size = f"{rows}x{columns} {x}"
    group, block = 'scaling="(\'group\',128)"', 'scaling="(\'block\',(128,128))"'

    def per(n: int) -> str:
        return f"[{rows},{columns // n}]nchw"

    found = [(f"e4m3 tensor {size}", f"dynamic_quantize x={x}{shape} kind=e4m3 scaling=tensor"),
             (f"e4m3 blocks {size}", f"dynamic_quantize x={x}{shape} kind=e4m3 {block}"),
             (f"e4m3 token {size}", f"dynamic_quantize x={x}{shape} kind=e4m3 scaling=token"),
             (f"s8 token {size}", f"dynamic_quantize x={x}{shape} kind=s8 scaling=token"),
             (f"e4m3 groups {size}", f"dynamic_quantize x={x}{shape} kind=e4m3 {group}"),
             (f"s4 groups {size}", f"dynamic_quantize x={x}{shape} kind=s4 {group}"),
             (f"mxfp8 {size}", f"dynamic_quantize x={x}{shape} kind=e4m3 scaling=mxfp8"),
             (f"mxfp4 {size}", f"dynamic_quantize x={x}{shape} kind=e2m1 scaling=mxfp4"),
             (f"nvfp4 {size}", f"dynamic_quantize x={x}{shape} kind=e2m1 scaling=nvfp4 global_scale=f32[]nchw"),
             (f"mxfp8 128x4 {size}", f"dynamic_quantize x={x}{shape} kind=e4m3 scaling=mxfp8 layout=128x4"),
             (f"nvfp4 128x4 {size}", f"dynamic_quantize x={x}{shape} kind=e2m1 scaling=nvfp4 global_scale=f32[]nchw layout=128x4"),
             (f"e4m3 {size}", f"cast x={x}{shape} dtype=e4m3"),
             (f"from e4m3 {size}", f"cast x=e4m3{shape} dtype={x}"),
             (f"e4m3 given {size}", f"quantize x={x}{shape} kind=e4m3 scale=f32[]nchw"),
             (f"s8 given {size}", f"quantize x={x}{shape} kind=s8 scale=f32[{rows}]nchw"),
             (f"e4m3 {size}", f"dequantize x=e4m3{shape} kind=e4m3 scale=f32[]nchw dtype={x}"),
             (f"e4m3 token {size}", f"dequantize x=e4m3{shape} kind=e4m3 scale=f32[{rows}]nchw dtype={x}"),
             (f"e4m3 groups {size}", f"dequantize x=e4m3{shape} kind=e4m3 scale=f32{per(128)} dtype={x}"),
             (f"s8 token {size}", f"dequantize x=s8{shape} kind=s8 scale=f32[{rows}]nchw dtype={x}"),
             (f"s4 groups {size}", f"dequantize x=u8{half} kind=s4 scale=f32{per(128)} dtype={x}"),
             (f"mxfp8 {size}", f"dequantize x=e4m3{shape} kind=e4m3 scale=u8{per(32)} scaling=mxfp8 dtype={x}"),
             (f"mxfp4 {size}", f"dequantize x=u8{half} kind=e2m1 scale=u8{per(32)} scaling=mxfp4 dtype={x}"),
             (f"nvfp4 {size}", f"dequantize x=u8{half} kind=e2m1 scale=e4m3{per(16)} global_scale=f32[]nchw scaling=nvfp4 dtype={x}"),
             (f"e4m3 token {size}", f"fake_quantize x={x}{shape} kind=e4m3 scale=f32[{rows}]nchw"),
             (f"e2m1 {size}", f"pack4 x={x}{shape} kind=e2m1"), (f"e2m1 {size}", f"unpack4 x=u8{half} kind=e2m1 dtype={x}"),
             (f"s4 {size}", f"unpack4 x=u8{half} kind=s4 dtype={x}")]
    return found


def cases(options: argparse.Namespace) -> list[Case]:
    chosen = [line for size in SIZES for line in lines(*size)] + [line for size in SIZES[:1] for line in lines(*size, x="f32")]
    if options.further:
        chosen += [line for size in FURTHER for line in lines(*size)]
    found = []
    for label, text in chosen:
        problem = parse_case(text)
        if options.ops and problem.op not in options.ops.split(","):
            continue
        twice = problem.desc("x").num_bytes if "scaling=tensor" in text else 0
        found.append(Case(label, problem, make_tensors, torch_of(problem), judge=judge, bytes=problem.num_bytes + twice))
    return matching(found, options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="", help="of cast, quantize, dynamic_quantize, dequantize, fake_quantize, pack4, unpack4")
    parser.add_argument("--further", action="store_true", help="other sizes too")
    add_options(parser)
    run(cases, parser.parse_args())
