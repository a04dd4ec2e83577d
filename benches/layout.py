"""Layout, shape and scan ops against torch: verified on poisoned outputs, then timed interleaved.

    python benches/layout.py [--match "permute bf16"] [--configs [cumsum,f32]] [--workers 14] [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Bytes: input + output; all launches of ours count. Copies must equal torch's bit for bit, scans torch's
in f64 within the tolerance of a sum in f32. Columns: see moving.py.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from moving import Case, add_options, matching, operands, run
from verify import Tensors

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case

Peer = Callable[..., Any]
CASES: tuple[tuple[str, str, Peer], ...] = (
    ("permute bf16 16384x16384", "permute x=bf16[16384,16384]", lambda x: x.t().contiguous()),
    ("permute f32 8192x16384", "permute x=f32[8192,16384]", lambda x: x.t().contiguous()),
    ("permute u8 16384x16384", "permute x=u8[16384,16384]", lambda x: x.t().contiguous()),
    ("permute f64 8192x8192", "permute x=f64[8192,8192]", lambda x: x.t().contiguous()),
    ("permute bf16 4095x8191", "permute x=bf16[4095,8191]", lambda x: x.t().contiguous()),
    ("permute bf16 nchw to nhwc 64x256x56x56", "permute x=bf16[64,256,56,56] dims=(0,2,3,1)", lambda x: x.permute(0, 2, 3, 1).contiguous()),
    ("permute bf16 heads 16x2048x32x128", "permute x=bf16[16,2048,32,128] dims=(0,2,1,3)", lambda x: x.transpose(1, 2).contiguous()),
    ("transform f32 nchw to bf16 nhwc", "transform x=f32[32,256,56,56]nchw y=bf16[32,256,56,56]nhwc dtype=bf16",
     lambda x: x.to(torch.bfloat16, memory_format=torch.channels_last)),
    ("cast f32 to bf16", "cast x=f32[134217728] dtype=bf16", lambda x: x.to(torch.bfloat16)),
    ("cast bf16 to s32", "cast x=bf16[134217728] dtype=s32", lambda x: x.to(torch.int32)),
    ("pad bf16 nchw constant 1", "pad x=bf16[64,64,224,224]nchw padding=((0,0),(0,0),(1,1),(1,1))", lambda x: F.pad(x, (1, 1, 1, 1))),
    ("pad bf16 nhwc constant 1", "pad x=bf16[64,64,224,224]nhwc padding=((0,0),(0,0),(1,1),(1,1))", lambda x: F.pad(x, (1, 1, 1, 1))),
    ("pad f32 nchw reflect 3", "pad x=f32[32,64,224,224]nchw padding=((0,0),(0,0),(3,3),(3,3)) mode=reflect",
     lambda x: F.pad(x, (3, 3, 3, 3), "reflect")),
    ("pad f32 nchw circular 3", "pad x=f32[32,64,224,224]nchw padding=((0,0),(0,0),(3,3),(3,3)) mode=circular",
     lambda x: F.pad(x, (3, 3, 3, 3), "circular")),
    ("pad_backward f32 nchw reflect 3", "pad_backward dy=f32[32,64,224,224]nchw padding=((0,0),(0,0),(3,3),(3,3)) mode=reflect",
     lambda dy: torch.ops.aten.reflection_pad2d_backward(dy, dy[..., 3:221, 3:221].contiguous(), (3, 3, 3, 3))),
    ("concat bf16 channels nhwc", "concat x0=bf16[64,64,56,56]nhwc x1=bf16[64,256,56,56]nhwc x2=bf16[64,64,56,56]nhwc axis=1",
     lambda *x: torch.cat(x, 1)),
    ("concat bf16 channels nchw", "concat x0=bf16[64,64,56,56] x1=bf16[64,256,56,56] x2=bf16[64,64,56,56] axis=1",
     lambda *x: torch.cat(x, 1)),
    ("concat f32 last axis odd", "concat x0=f32[65536,333] x1=f32[65536,1] x2=f32[65536,513] axis=1", lambda *x: torch.cat(x, 1)),
    ("flip bf16 last axis", "flip x=bf16[16384,8192] axes=(1,)", lambda x: x.flip(1)),
    ("roll f32", "roll x=f32[64,64,56,56] shifts=(3,3) axes=(2,3)", lambda x: torch.roll(x, (3, 3), (2, 3))),
    ("tril bf16 8192", "tril x=bf16[2,8192,8192]", lambda x: x.tril()),
    ("fill bf16", "fill shape=(268435456,) dtype=bf16 value=1.5",
     lambda: torch.full((268435456,), 1.5, dtype=torch.bfloat16, device="cuda")),
    ("cumsum f32 rows 16384x8192", "cumsum x=f32[16384,8192] axis=1", lambda x: x.cumsum(1)),
    ("cumsum bf16 rows 16384x8192", "cumsum x=bf16[16384,8192] axis=1", lambda x: x.cumsum(1)),
    ("cumsum f32 columns 16384x8192", "cumsum x=f32[16384,8192] axis=0", lambda x: x.cumsum(0)),
    ("cumsum bf16 columns 4096x4096", "cumsum x=bf16[4096,4096] axis=0", lambda x: x.cumsum(0)),
    ("cumsum f32 rows 128x1048576", "cumsum x=f32[128,1048576] axis=1", lambda x: x.cumsum(1)),
    ("cumsum f32 one row 2^27", "cumsum x=f32[134217728]", lambda x: x.cumsum(0)),
    ("cumsum bf16 one row 2^27", "cumsum x=bf16[134217728]", lambda x: x.cumsum(0)),
    ("cumsum f32 rows 1048576x100", "cumsum x=f32[1048576,100] axis=1", lambda x: x.cumsum(1)),
    ("cummax f32 rows 16384x8192", "cummax x=f32[16384,8192] axis=1", lambda x: x.cummax(1)),
    ("logcumsumexp f32 rows 16384x8192", "logcumsumexp x=f32[16384,8192] axis=1", lambda x: x.logcumsumexp(1)),
)


def matches(got: list[torch.Tensor], want: Any, is_copy: bool, terms: int) -> float:
    """Error over tolerance, the largest; of copies 0 or infinite."""
    wanted = list(want) if isinstance(want, (tuple, list)) else [want]
    worst = 0.0
    for g, w in zip(got, wanted, strict=True):
        w = w.reshape(g.shape)
        if is_copy or not g.dtype.is_floating_point:
            worst = max(worst, 0.0 if torch.equal(g, w) else math.inf)
            continue
        unit = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}[g.dtype]
        error = ((g.double() - w).abs() / (unit * w.abs() + 2.0**-22 * terms**0.5 * w.abs().amax())).max()
        worst = max(worst, float(error) if bool(torch.isfinite(error)) else math.inf)
    return worst


def judge(case: Case, tensors: Tensors) -> Callable[[], float]:
    op, outputs = case.problem.op, [tensors[o.name] for o in case.problem.outputs]
    is_copy = any(e.id.startswith("layout.") for e in ENGINES[op]) and "_backward" not in op
    given = tensors if is_copy or op.startswith(("cummax", "cummin")) else {n: t.double() for n, t in tensors.items()}
    want, terms = case.forward(given), max(case.problem.operands[0].desc.shape, default=1)
    return lambda: matches(outputs, want, is_copy, terms)


def case_of(label: str, line: str, peer: Peer) -> Case:
    problem = parse_case(line)
    names = [o.name for o in problem.inputs]
    label = label.removeprefix(problem.op).strip()
    return Case(label, problem, operands, lambda t: peer(*(t[n] for n in names)), judge=judge)


def cases_of(options: argparse.Namespace) -> list[Case]:
    return matching([case_of(*row) for row in CASES], options)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser)
    run(cases_of, parser.parse_args())
