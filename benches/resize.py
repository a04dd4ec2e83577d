"""Resizing against torch.nn.functional.interpolate: verified against float64 on poisoned outputs, then timed interleaved.

    python benches/resize.py [--kinds bf16] [--layouts nhwc,nchw] [--match "bicubic nhwc"] [--extents 150,150,257,257] [--configs]
                             [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Shapes: benches/cases/shapes/memory_bound.json, forward and backward, and reductions by area and with
antialias. A row a case: our untuned choice (with --configs also the best one), TB/s by the bytes that must move (input + output), its
ratio to a copy of as many bytes measured here, and how many times as fast as torch. Times are medians in microseconds, L2 flushed
before each run; both launches of ours count. --seconds: start no case after so long.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from conv_mma import TORCH_TYPES
from memory_bound import worst_error
from moving import against_copy, run
from verify import Tensors

from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend
from oxidnn.testing.cases import shapes_file

# torch's mode -> ours, with what the two call differently
MODES = {"nearest": "nearest", "nearest-exact": "nearest_exact", "bilinear": "linear", "bicubic": "cubic", "area": "area"}
REDUCTIONS = ({"mode": "area"}, {"mode": "bilinear", "antialias": True}, {"mode": "bicubic", "antialias": True})


def cases_of(options: argparse.Namespace) -> list[tuple[str, str, dict[str, Any]]]:
    """(label, case line, torch's arguments)."""
    entries = json.loads(shapes_file("memory_bound").read_text(encoding="utf-8"))["resize"]
    small = {k: v for k, v in entries[0].items() if k != "mode"}
    if options.extents:
        grown = dict(zip(("H", "W", "OH", "OW"), map(int, options.extents.split(",")), strict=True))
        entries, small = [e | grown for e in entries], small | grown
    entries = [*entries, *(small | {"H": small["OH"], "W": small["OW"], "OH": small["H"], "OW": small["W"]} | r for r in REDUCTIONS)]
    found = []
    for kind in options.kinds.split(","):
        for layout in options.layouts.split(","):
            for entry in entries:
                n, c, h, w, p, q = (entry[d] for d in ("N", "C", "H", "W", "OH", "OW"))
                smooth = entry.get("antialias", False)
                words = f" mode={MODES[entry['mode']]}" + " antialias=True" * smooth
                words += " cubic_coefficient=-0.5" * (smooth and entry["mode"] == "bicubic")  # torch's with antialias
                arguments = {"size": (p, q), "mode": entry["mode"], "antialias": smooth}
                x, y = f"{kind}[{n},{c},{h},{w}]{layout}", f"{kind}[{n},{c},{p},{q}]{layout}"
                name = f"{entry['mode']}{'_aa' * smooth} {layout} {kind}"
                found.append((f"{name} forward", f"resize x={x} y={y} size=({p},{q}){words}", arguments))
                found.append((f"{name} backward", f"resize_backward dy={y} dx={x} x_shape=({n},{c},{h},{w}){words}", arguments))
    return [f for f in found if all(word in f[0] for word in options.match.split())]


def interpolation(arguments: dict[str, Any], shape: tuple[int, ...], source: torch.Tensor, is_backward: bool) -> Callable[[], torch.Tensor]:
    """torch's call; of a gradient, the backward alone."""
    if not is_backward:
        return lambda: F.interpolate(source, **arguments)
    last = source.is_contiguous(memory_format=torch.channels_last)
    leaf = torch.zeros(shape, dtype=source.dtype, device=source.device)
    leaf = leaf.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format).requires_grad_()
    y = F.interpolate(leaf, **arguments)
    return lambda: torch.autograd.grad(y, leaf, source, retain_graph=True)[0]


def measure(backend: CudaBackend, label: str, line: str, arguments: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    problem = parse_case(line)
    is_backward = problem.op.endswith("_backward")
    generator = torch.Generator("cuda").manual_seed(1)
    tensors: Tensors = {}
    for o in problem.operands:
        tensor = torch.empty_strided(o.desc.shape, o.desc.strides, dtype=TORCH_TYPES[o.desc.dtype.name], device="cuda")
        tensors[o.name] = tensor.copy_(torch.randn(o.desc.shape, device="cuda", generator=generator))
    source, target = tensors.values()
    shape = problem.outputs[0].desc.shape
    want = interpolation(arguments, shape, source.double(), is_backward)()
    return against_copy(backend, label, line, problem, tensors, lambda: worst_error(target, want),
                        interpolation(arguments, shape, source, is_backward), options.configs, options.repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="bf16")
    parser.add_argument("--layouts", default="nhwc,nchw")
    parser.add_argument("--match", default="", help="words that a case's label holds, e.g. 'bicubic nhwc forward'")
    parser.add_argument("--extents", default="", help="H,W,OH,OW of the growing cases instead of those of the list; reductions go back")
    parser.add_argument("--configs", action="store_true", help="all configs, not the untuned choice alone")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=math.inf)
    parser.add_argument("--json", default="")
    options = parser.parse_args()

    backend = CudaBackend(0)
    run(backend, [(label, partial(measure, backend, label, *case, options)) for label, *case in cases_of(options)], options)


if __name__ == "__main__":
    main()
