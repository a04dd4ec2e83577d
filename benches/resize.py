"""Resizing against torch.nn.functional.interpolate: verified against float64 on poisoned outputs, then timed interleaved.

    python benches/resize.py [--kinds bf16] [--layouts nhwc,nchw] [--match "bicubic nhwc"] [--extents 150,150,257,257] [--configs]
                             [--workers 14] [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Shapes: benches/cases/shapes/memory_bound.json, forward and backward, and reductions by area and with
antialias. Bytes: input + output; both launches of ours count. Columns: see moving.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from moving import Case, add_options, matching, operands, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.testing.cases import shapes_file

# torch's mode -> ours, with what the two call differently
MODES = {"nearest": "nearest", "nearest-exact": "nearest_exact", "bilinear": "linear", "bicubic": "cubic", "area": "area"}
REDUCTIONS = ({"mode": "area"}, {"mode": "bilinear", "antialias": True}, {"mode": "bicubic", "antialias": True})


def entries_of_file() -> list[dict[str, Any]]:
    return json.loads(shapes_file("memory_bound").read_text(encoding="utf-8"))["resize"]


def make_tensors(problem: Problem) -> Tensors:
    """Operands, and for a gradient a leaf x."""
    tensors = operands(problem)
    if problem.has("dx"):
        tensors["x"] = torch.zeros_like(tensors["dx"])
    return tensors


def pair_of(entry: dict[str, Any], kind: str, layout: str, is_further: bool = False) -> list[Case]:
    """Forward and backward."""
    n, c, h, w, p, q = (entry[d] for d in ("N", "C", "H", "W", "OH", "OW"))
    smooth = entry.get("antialias", False)
    words = f" mode={MODES[entry['mode']]}" + " antialias=True" * smooth
    words += " cubic_coefficient=-0.5" * (smooth and entry["mode"] == "bicubic")  # torch's with antialias
    forward = partial(_interpolate, size=(p, q), mode=entry["mode"], antialias=smooth)
    x, y = f"{kind}[{n},{c},{h},{w}]{layout}", f"{kind}[{n},{c},{p},{q}]{layout}"
    label = f"{entry['mode']}{'_aa' * smooth} {layout} {kind}"
    back = parse_case(f"resize_backward dy={y} dx={x} x_shape=({n},{c},{h},{w}){words}")
    return [Case(label, parse_case(f"resize x={x} y={y} size=({p},{q}){words}"), make_tensors, forward, is_further=is_further),
            Case(label, back, make_tensors, forward, ("x",), is_further=is_further)]


def _interpolate(t: Tensors, **arguments: Any) -> torch.Tensor:
    return F.interpolate(t["x"], **arguments)


def listed(kind: str = "bf16", layout: str = "nhwc") -> list[Case]:
    return [case for entry in entries_of_file() for case in pair_of(entry, kind, layout)]


def further() -> list[Case]:
    odd = {"N": 5, "C": 33, "H": 57, "W": 91, "OH": 113, "OW": 150}
    return [pair_of(odd | {"mode": "bilinear"}, "f32", "nchw", True)[0], pair_of(odd | {"mode": "bicubic"}, "bf16", "nhwc", True)[1]]


def cases_of(options: argparse.Namespace) -> list[Case]:
    entries = entries_of_file()
    small = {k: v for k, v in entries[0].items() if k != "mode"}
    if options.extents:
        grown = dict(zip(("H", "W", "OH", "OW"), map(int, options.extents.split(",")), strict=True))
        entries, small = [e | grown for e in entries], small | grown
    entries = [*entries, *(small | {"H": small["OH"], "W": small["OW"], "OH": small["H"], "OW": small["W"]} | r for r in REDUCTIONS)]
    return matching([case for kind in options.kinds.split(",") for layout in options.layouts.split(",") for entry in entries
                     for case in pair_of(entry, kind, layout)], options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kinds", default="bf16")
    parser.add_argument("--layouts", default="nhwc,nchw")
    parser.add_argument("--extents", default="", help="H,W,OH,OW of the growing cases instead of those of the list; reductions go back")
    add_options(parser)
    run(cases_of, parser.parse_args())
