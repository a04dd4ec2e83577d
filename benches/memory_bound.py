"""Memory-bound ops against eager and compiled PyTorch: verified against float64 on poisoned outputs, then timed interleaved.

    python benches/memory_bound.py [--families rows,pools,elements,channels,resize,margins] [--ops layer_norm,softmax_backward]
                                   [--shapes 32768x256,...] [--long] [--further] [--kind bf16] [--workers 14 --compile 3] [--configs]
                                   [--match W] [--parts] [--repeats 9] [--seconds S] [--json out.json]

Needs a CUDA device and torch. Shapes: benches/cases/shapes/memory_bound.json; --long adds rows of 2^20 elements, --further shapes of
other sizes, types and layouts from all families. Bytes that must move: row-wise 1 read + 1 write forward, 2 + 1 backward; pooling, resizing
and reductions in + out; channel-wise see channel_norm.py. Columns: see moving.py.
Dropout and random numbers are verified by their statistics here, by their values in tests/.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import channel_norm
import resize
import torch
import torch.nn.functional as F
from moving import FLOAT_TYPES, Case, Forward, add_options, against, matching, operands, run
from verify import Tensors

from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.testing.cases import shapes_file

ROW_OPS = ("layer_norm", "rms_norm", "softmax", "layer_norm_backward", "rms_norm_backward", "softmax_backward", "cross_entropy",
           "cross_entropy_backward", "activation", "activation_backward", "pointwise", "reduce")
LOSSES: dict[str, Any] = {"mse": F.mse_loss, "huber": F.huber_loss, "bce": F.binary_cross_entropy,
                          "bce_with_logits": F.binary_cross_entropy_with_logits, "kl_div": F.kl_div}
LOSS_OPS = tuple(f"{name}{suffix}" for name in LOSSES for suffix in ("", "_backward"))
MARGIN_LOSSES: dict[str, tuple[Any, tuple[str, ...]]] = {  # torch's, and the operands it takes
    "cosine_embedding": (F.cosine_embedding_loss, ("x", "x2", "target")), "triplet_margin": (F.triplet_margin_loss, ("x", "x2", "x3")),
    "multi_margin": (F.multi_margin_loss, ("x", "target")), "multilabel_margin": (F.multilabel_margin_loss, ("x", "target")),
    "multilabel_soft_margin": (F.multilabel_soft_margin_loss, ("x", "target"))}
MARGIN_OPS = tuple(f"{name}{suffix}" for name in MARGIN_LOSSES for suffix in ("", "_backward"))
MARGIN_SIZES = ((65536, 1000), (8192, 16384))
LABELS = 8  # of a row, of multilabel_margin
RANDOM_OPS = ("dropout", "uniform", "normal", "bernoulli")
ELEMENT_SIZES = ((2048, 8192), (8192, 16384))  # of losses and random numbers: what a row is does not count
POOL_OPS = ("pool", "pool_backward")
LONG = (128, 1 << 20)
FURTHER_ROWS = (
    ("layer_norm", 4096, 50257, "bf16"), ("layer_norm_backward", 30000, 1000, "bf16"), ("rms_norm", 65537, 768, "bf16"),
    ("rms_norm_backward", 777, 12289, "bf16"), ("softmax", 8, 8192, "bf16"), ("softmax", 16384, 1024, "f32"),
    ("softmax_backward", 3001, 3001, "f32"), ("cross_entropy", 4096, 50257, "bf16"), ("cross_entropy_backward", 2048, 65536, "f32"),
    ("activation", 16384, 1024, "f32"), ("pointwise", 3001, 3001, "f16"), ("reduce", 100, 4096, "bf16"))
FURTHER_POOLS = (  # op, entry, type, layout
    ("pool", {"op": "max", "N": 1, "C": 64, "H": 112, "W": 112, "k": 3, "s": 2, "p": 1}, "bf16", "nhwc"),
    ("pool", {"op": "avg", "N": 64, "C": 128, "H": 56, "W": 56, "k": 2, "s": 2, "p": 0}, "f32", "nchw"),
    ("pool", {"op": "global_avg", "N": 8, "C": 1280, "H": 7, "W": 7}, "bf16", "nhwc"),
    ("pool_backward", {"op": "max", "N": 32, "C": 64, "H": 113, "W": 111, "k": 3, "s": 2, "p": 1}, "bf16", "nchw"))


def row_case(op: str, rows: int, cols: int, kind: str) -> str:
    x, per_row, per_column = f"{kind}[{rows},{cols}]", f"f32[{rows}]", f"{kind}[{cols}]"
    if op in LOSS_OPS:
        return f"loss{'_backward' * op.endswith('_backward')} x={x} target={x} name={op.removesuffix('_backward')}"
    if op in MARGIN_OPS:
        name = op.removesuffix("_backward")
        one, each = f"s64[{rows}]", f"s64[{rows},{cols}]"
        target = {"cosine_embedding": one, "multi_margin": one, "multilabel_margin": each}.get(name, x)
        types = {"x": x, "x2": x, "x3": x, "target": target}
        given = " ".join(f"{n}={types[n]}" for n in MARGIN_LOSSES[name][1])
        return f"row_loss{'_backward' * op.endswith('_backward')} {given} name={name}"
    if op in ("uniform", "normal"):
        return f"random shape=({rows},{cols}) distribution={op} dtype={kind}"
    return op + {
        "dropout": f" x={x} p=0.1",
        "bernoulli": f" probability={x}",
        "layer_norm": f" x={x} gamma={per_column} beta={per_column}",
        "rms_norm": f" x={x} gamma={per_column}",
        "softmax": f" x={x}",
        "layer_norm_backward": f" dy={x} x={x} mean={per_row} rstd={per_row} gamma={per_column}",
        "rms_norm_backward": f" dy={x} x={x} rstd={per_row} gamma={per_column}",
        "softmax_backward": f" dy={x} y={x}",
        "cross_entropy": f" logits={x} target=s64[{rows}]",
        "cross_entropy_backward": f" logits={x} target=s64[{rows}]",
        "activation": f" x={x} name=gelu",
        "activation_backward": f" dy={x} x={x} name=gelu",
        "pointwise": f' x={x} y={x} expression="x + y"',
        "reduce": f" x={x} op=sum axes=(1,)",
    }[op]


def pool_case(entry: dict[str, Any], kind: str, backward: bool, layout: str = "nhwc") -> str:
    n, c, h, w = (entry[d] for d in "NCHW")
    op = f"{entry['op']}_pool" + "_backward" * backward
    attrs = "" if entry["op"] == "global_avg" else f" window={entry['k']} stride={entry['s']} padding={entry['p']}"
    if not backward:
        return f"{op} x={kind}[{n},{c},{h},{w}]{layout}{attrs}"
    p, q = (1, 1) if not attrs else ((d + 2 * entry["p"] - entry["k"]) // entry["s"] + 1 for d in (h, w))
    given = f" x={kind}[{n},{c},{h},{w}]{layout}" if entry["op"] == "max" else f" x_shape=({n},{c},{h},{w})"
    return f"{op} dy={kind}[{n},{c},{p},{q}]{layout}{given} dx={kind}[{n},{c},{h},{w}]{layout}{attrs}"


# The same by torch: op without "_backward" -> (function of the tensors, what it is differentiated by).
def forward_of(problem: Problem) -> tuple[Forward, tuple[str, ...]]:
    op = problem.op.removesuffix("_backward")
    if op.endswith("_pool"):
        if op == "global_avg_pool":
            return lambda t: F.adaptive_avg_pool2d(t["x"], 1), ("x",)
        window, stride, padding = ([getattr(a, f) for a in problem.axes] for f in ("window", "stride", "low"))  # type: ignore[attr-defined]
        function: Any = F.max_pool2d if op == "max_pool" else F.avg_pool2d
        return lambda t: function(t["x"], window, stride, padding), ("x",)
    if op == "loss":
        loss = LOSSES[dict(problem.attrs)["name"]]
        return lambda t: loss(t["x"], t["target"]), ("x",)
    if op == "row_loss":
        margin, names = MARGIN_LOSSES[dict(problem.attrs)["name"]]
        return lambda t: margin(*(t[n] for n in names)), tuple(n for n in names if n != "target")
    if op == "random":
        return (lambda t: t["y"].normal_()) if dict(problem.attrs).get("distribution") == "normal" else (lambda t: t["y"].uniform_()), ()
    return {
        "dropout": (lambda t: F.dropout(t["x"], 0.1), ("x",)),
        "bernoulli": (lambda t: torch.bernoulli(t["probability"]), ()),
        "layer_norm": (lambda t: F.layer_norm(t["x"], t["x"].shape[1:], t["gamma"], t["beta"]), ("x", "gamma", "beta")),
        "rms_norm": (lambda t: F.rms_norm(t["x"], t["x"].shape[1:], t["gamma"], 1e-5), ("x", "gamma")),
        "softmax": (lambda t: torch.softmax(t["x"], -1), ("x",)),
        "cross_entropy": (lambda t: F.cross_entropy(t["logits"], t["target"]), ("logits",)),
        "activation": (lambda t: F.gelu(t["x"]), ("x",)),
        "pointwise": (lambda t: t["x"] + t["y"], ()),
        "reduce": (lambda t: t["x"].sum(1), ()),
    }[op]


def make_tensors(problem: Problem) -> Tensors:
    """Operands, and what torch needs besides: x behind a softmax or a pool's gradient, beta, dy."""
    tensors, generator = operands(problem), torch.Generator("cuda").manual_seed(2)

    def random(name: str, function: Any = torch.rand) -> torch.Tensor:
        return function(tensors[name].shape, device="cuda", generator=generator)

    op = problem.op
    if op.startswith("loss"):
        for name in ("x", "target"):
            tensors[name].copy_(random(name) * 0.9 + 0.05)
    elif "probability" in tensors:
        tensors["probability"].copy_(random("probability") * 0.9 + 0.05)
    elif op.startswith("row_loss") and "target" in tensors:
        shape, name = tensors["target"].shape, dict(problem.attrs)["name"]
        values = tensors["x"].shape[1] if name in ("multi_margin", "multilabel_margin") else 2
        drawn = torch.randint(0, values, shape, device="cuda", generator=generator)
        if name == "multilabel_margin":
            drawn[:, LABELS:] = -1
        tensors["target"].copy_(2 * drawn - 1 if name == "cosine_embedding" else drawn)
    elif "target" in tensors:
        classes = problem.desc("logits").shape[1]
        tensors["target"].copy_(torch.randint(0, classes, tensors["target"].shape, device="cuda", generator=generator))
    if "norm" in op and op.endswith("backward"):
        wide = tensors["x"].double()
        mean = wide.mean(1) if "layer" in op else torch.zeros_like(wide[:, 0])
        tensors["beta"] = torch.zeros_like(tensors["gamma"])
        statistics = {"mean": mean, "rstd": ((wide - mean[:, None]).square().mean(1) + 1e-5).rsqrt()}
        for name in statistics:
            if name in tensors:
                tensors[name].copy_(statistics[name])
    if op == "softmax_backward":
        tensors["x"] = random("y", torch.randn).to(tensors["y"].dtype)
        tensors["y"].copy_(torch.softmax(tensors["x"].double(), 1))
    if op.endswith("pool_backward") and "x" not in tensors:
        last = torch.channels_last if problem.desc("dx").strides[1] == 1 else torch.contiguous_format
        tensors["x"] = random("dx", torch.randn).to(tensors["dy"].dtype).contiguous(memory_format=last)
    if op in ("cross_entropy_backward", "loss_backward", "row_loss_backward"):
        tensors["dy"] = torch.ones((), dtype=tensors["logits" if "logits" in tensors else "x"].dtype, device="cuda")
    return tensors


def moments_error(problem: Problem, tensors: Tensors) -> float:
    """Of dropout and random numbers: the mean's and the variance's distance from what they should be, over five of their deviations."""
    y, p = tensors["y"].double(), 0.1
    if problem.op == "dropout":
        kept = y != 0
        scaled = (y - tensors["x"].double() / (1 - p))[kept & (tensors["x"] != 0)]
        if float(scaled.abs().max() / y.abs().max()) > 2.0**-8:
            return float("inf")
        values, mean, variance = kept[tensors["x"] != 0].double(), 1 - p, p * (1 - p)
    elif problem.op == "bernoulli":
        chance = tensors["probability"].double()
        values, mean, variance = y - chance, 0.0, float((chance * (1 - chance)).mean())
    elif dict(problem.attrs).get("distribution") == "normal":
        values, mean, variance = y, 0.0, 1.0
    else:
        values, mean, variance = y, 0.5, 1 / 12
    slack = 5 / values.numel() ** 0.5 + (2.0**-9 if y is values and tensors["y"].element_size() == 2 else 0.0)  # rounding to 16 bits
    error = max(abs(float(values.mean()) - mean) / variance**0.5, abs(float(values.var()) / variance - 1) / 2) / slack
    return float("inf") if math.isnan(error) else error


def lists_of_classes(tensors: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
    """Multilabel margin's mean loss and its gradient in float64. torch's own gradient on the device (2.11) sometimes misses what the last
    class of a list gets: a thread scales it before another has added to it."""
    x, target = tensors["x"].double(), tensors["target"][:, :LABELS]
    held = torch.zeros_like(x, dtype=torch.bool).scatter_(1, target, True)
    loss, dx = x.new_zeros(len(x)), torch.zeros_like(x)
    for i in range(LABELS):
        z = (1 - x.gather(1, target[:, i:i + 1]) + x).masked_fill_(held, 0)
        loss += z.clamp_(min=0).sum(1)
        counted = (z > 0).double()
        dx += counted
        dx.scatter_add_(1, target[:, i:i + 1], -counted.sum(1, keepdim=True))
    return loss.mean() / x.shape[1], dx.div_(x.numel())


def judge(case: Case, tensors: Tensors) -> Any:
    if case.problem.op in ("dropout", "random", "bernoulli"):
        return lambda: moments_error(case.problem, tensors)
    if dict(case.problem.attrs).get("name") == "multilabel_margin":
        loss, dx = lists_of_classes(tensors)
        return against({"dx": dx} if "dx" in tensors else {"loss": loss}, tensors)
    if case.problem.op == "softmax_backward":  # of the rounded y
        y, dy = tensors["y"].double(), tensors["dy"].double()
        return against({"dx": y * (dy - (dy * y).sum(1, keepdim=True))}, tensors)
    given = tensors
    if case.problem.op.endswith("pool_backward"):  # by padded windows of channels last torch 2.11 gives a wrong one (pytorch issue 188344)
        given = {n: t.contiguous() for n, t in tensors.items()}
    return against(case.reference(given), tensors)


def case_of(label: str, line: str, is_further: bool = False) -> Case:
    problem = parse_case(line)
    forward, leaves = forward_of(problem)
    return Case(label, problem, make_tensors, forward, leaves if problem.op.endswith("_backward") else (), judge, is_further=is_further)


def pool_label(entry: dict[str, Any]) -> str:
    return f"{entry['H']}_{entry['C']}" + (f"_k{entry['k']}s{entry['s']}" if "k" in entry else "")


def further() -> list[Case]:
    """Odd sizes, small batches, f32, channels first: some of every family."""
    found = [case_of(f"{r}x{c} {kind}", row_case(op, r, c, kind), True) for op, r, c, kind in FURTHER_ROWS]
    for op, entry, kind, layout in FURTHER_POOLS:
        label = f"{pool_label(entry)} n{entry['N']} {kind} {layout}"
        found.append(case_of(label, pool_case(entry, kind, op == "pool_backward", layout), True))
    return found + channel_norm.further() + resize.further()


def cases_of(options: argparse.Namespace) -> list[Case]:
    table = json.loads(shapes_file("memory_bound").read_text(encoding="utf-8"))
    sizes = [tuple(s) for s in table["rows_cols"]] + ([LONG] if options.long else [])
    if options.shapes:
        sizes = [tuple(map(int, s.split("x"))) for s in options.shapes.split(",")]
    ops = {"rows": ROW_OPS, "pools": POOL_OPS, "elements": LOSS_OPS + RANDOM_OPS, "margins": MARGIN_OPS}
    families = [] if options.ops else options.families.split(",")
    found: list[Case] = []
    for op in options.ops.split(",") if options.ops else [op for family in families for op in ops.get(family, ())]:
        if op in ROW_OPS:
            found += [case_of(f"{r}x{c}", row_case(op, r, c, options.kind)) for r, c in sizes]
        elif op in MARGIN_OPS:
            found += [case_of(f"{op.removesuffix('_backward')} {r}x{c}", row_case(op, r, c, options.kind)) for r, c in MARGIN_SIZES]
        elif op in LOSS_OPS + RANDOM_OPS:
            found += [case_of(f"{op.removesuffix('_backward')} {r}x{c}", row_case(op, r, c, options.kind)) for r, c in ELEMENT_SIZES]
        elif op in POOL_OPS:
            found += [case_of(pool_label(entry), pool_case(entry, options.kind, op == "pool_backward")) for entry in table["pool"]]
        else:
            raise SystemExit(f"--ops: {op} is none of {', '.join((*ROW_OPS, *POOL_OPS, *LOSS_OPS, *RANDOM_OPS, *MARGIN_OPS))}")
    found += channel_norm.listed() if "channels" in families else []
    found += resize.listed() if "resize" in families else []
    return matching(found + (further() if options.further else []), options)


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    found.add_argument("--families", default="rows,pools,elements,channels,resize")
    found.add_argument("--ops", default="", help="of rows, pools, elements and margins, instead of --families")
    found.add_argument("--shapes", default="", help="RxC, separated by commas; empty for the file's")
    found.add_argument("--long", action="store_true", help="also rows of 2^20 elements")
    found.add_argument("--further", action="store_true", help="also further shapes")
    found.add_argument("--kind", default="bf16", choices=sorted(FLOAT_TYPES))
    add_options(found, compile_some=3)
    return found


if __name__ == "__main__":
    run(cases_of, parser().parse_args())
