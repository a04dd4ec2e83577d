"""Attention against cuDNN's and FlashAttention-2's (torch's scaled_dot_product_attention) in one run.

    python benches/attention.py [--parts forward,backward,groups,decode,paged,scores] [--dims 64,128,256]
                                [--lengths 512,1024,2048,4096,8192,16384] [--candidates 2] [--repeats 5] [--workers 16] [--seconds 150]
                                [--json attention.json]

bf16; 16,384 tokens, heads times head dimension 2048, as they are and causal; heads in groups; decoding of one token, of one tensor and of
pages in any order (the peers have the keys gathered); what scores by expression cost. TFLOP/s count 4 * B * H * S * S * D forward, half of
it where causal, and 2.5 times that backward. Candidates are the untuned choice, the first config of each engine estimated within 1.6 of it,
then the next by estimate. Every result is compared with FlashAttention's, on poisoned outputs. Times are medians in microseconds, all sides
interleaved, L2 flushed before each run. What --seconds cut off is listed.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from conv_mma import FLUSH_BYTES
from conv_shapes import Choices, device_info, prepare
from stamp import stamp
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from verify import fastest, verify

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.attention import AttentionProblem
from oxidnn.ops.base import Problem
from oxidnn.ops.case import parse_case
from oxidnn.runtime.cuda_backend import CudaBackend

PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
PARTS = ("forward", "backward", "groups", "decode", "paged", "scores")
TOKENS, WIDTH = 16384, 2048
GROUPS = ((4, 4096, 32, 8, 128), (2, 8192, 64, 8, 128))  # batch, length, heads, heads of keys, dimension
# batch, keys, heads, heads of keys, dimension, keys of a page
DECODE = ((1, 8192, 32, 8, 128, 16), (16, 4096, 32, 8, 128, 16), (64, 2048, 32, 8, 128, 64), (128, 1024, 64, 8, 128, 64),
          (1, 131072, 32, 8, 128, 64))
SCORES = ("causal=top_left", "score='where(i >= j, score, -inf)'", "causal=top_left score='score - 0.0625 * abs(p - j)'",
          "causal=top_left softcap=30.0", "causal=top_left window=(256,None)", "causal=top_left deterministic=True")


@dataclass(frozen=True)
class Case:
    part: str
    batch: int
    heads: int
    heads_kv: int
    len_q: int
    len_kv: int
    dim: int
    more: str
    page: int = 0  # keys of one, laid out (page, key, head, dim)

    @property
    def is_backward(self) -> bool:
        return self.part == "backward" or "deterministic" in self.more

    @property
    def name(self) -> str:
        lengths = f"S{self.len_kv}" if self.len_q == self.len_kv else f"L{self.len_q} M{self.len_kv}"
        heads = f"H{self.heads}" + (f"/{self.heads_kv}" if self.heads_kv != self.heads else "")
        more = f"pages of {self.page}" if self.page else self.more or "full"
        return f"{'backward ' if self.is_backward else ''}B{self.batch} {lengths} {heads} D{self.dim} {more}"

    @property
    def flops(self) -> float:
        pairs = self.batch * self.heads * self.len_q * self.len_kv * (0.5 if self.is_causal else 1.0)
        return 4 * pairs * self.dim * (2.5 if self.is_backward else 1.0)

    @property
    def kv_bytes(self) -> int:
        return 4 * self.batch * self.heads_kv * self.len_kv * self.dim

    @property
    def is_causal(self) -> bool:
        return "causal" in self.more or "i >= j" in self.more

    def problem(self) -> Problem:
        q, kv = (f"bf16[{self.batch},{h},{n},{self.dim}]nchw" for h, n in ((self.heads, self.len_q), (self.heads_kv, self.len_kv)))
        rows = f"f32[{self.batch},{self.heads},{self.len_q}]"
        if self.is_backward:
            return parse_case(f"attention_backward d_out={q} q={q} k={kv} v={kv} out={q} lse={rows} {self.more}")
        if self.page:
            count, g, d = self.batch * self.len_kv // self.page, self.heads_kv, self.dim
            cache = f"bf16[{count},{g},{self.page},{d}]({g * self.page * d},{d},{g * d},1)"
            return parse_case(f"paged_attention q={q} k_cache={cache} v_cache={cache} page_table=s32[{self.batch},{count // self.batch}] "
                              f"lengths_kv=s32[{self.batch}]")
        return parse_case(f"attention q={q} k={kv} v={kv} {self.more}")


def cases(options: argparse.Namespace) -> list[Case]:
    parts, found = options.parts.split(","), []
    for part in ("forward", "backward"):
        for dim in map(int, options.dims.split(",")) if part in parts else ():
            for length in map(int, options.lengths.split(",")):
                heads = WIDTH // dim
                found += [Case(part, TOKENS // length, heads, heads, length, length, dim, more) for more in ("", "causal=top_left")]
    if "groups" in parts:
        found += [Case(part, b, h, g, n, n, d, "causal=top_left") for b, n, h, g, d in GROUPS for part in ("groups", "backward")]
    for part in ("decode", "paged"):
        if part in parts:
            found += [Case(part, b, h, g, 1, n, d, "", page if part == "paged" else 0) for b, n, h, g, d, page in DECODE]
    if "scores" in parts:
        found += [Case("scores", 4, 16, 16, 4096, 4096, 128, more) for more in SCORES]
    return found


def peers_of(case: Case, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, d_out: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """Calls of the peers that take the case, without its scores; backward those of the gradients alone."""
    found: dict[str, Callable[[], Any]] = {}
    for name, kind in PEERS.items():
        def forward(kind: SDPBackend = kind) -> torch.Tensor:
            with sdpa_kernel(kind):
                return scaled_dot_product_attention(q, k, v, is_causal=case.is_causal, enable_gqa=case.heads != case.heads_kv)

        try:
            out = forward()
            call: Callable[[], Any] = forward
            if case.is_backward:
                def backward(out: torch.Tensor = out) -> Any:
                    return torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True)

                call = backward
                call()
            found[name] = call
        except RuntimeError as error:
            print(f"{case.name}: not by {name} ({str(error).splitlines()[0][:80]})", flush=True)
    return found


def gathered(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """(batch, heads, keys, dim) of a cache of pages."""
    found = tensors[f"{name}_cache"][tensors["page_table"].long()]  # (batch, pages, heads, keys of a page, dim)
    return found.transpose(1, 2).reshape(found.shape[0], found.shape[2], -1, found.shape[4]).contiguous()


def disagreement(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Norm of the difference over 1 % of the norm, the largest; infinite where a poisoned element was left."""
    ratios = [float((g.float() - w.float()).norm() / (0.01 * w.float().norm())) for g, w in zip(got, want, strict=True)]
    return max((r if math.isfinite(r) else math.inf for r in ratios), default=0.0)


def measure(backend: CudaBackend, case: Case, choices: Choices, repeats: int) -> dict[str, Any]:
    problem = case.problem()
    generator = torch.Generator("cuda").manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    for o in problem.operands:
        if o.name == "page_table":
            order = torch.randperm(o.desc.numel, device="cuda", generator=generator)
            tensors[o.name] = order.to(torch.int32).reshape(o.desc.shape)
        elif o.name == "lengths_kv":
            tensors[o.name] = torch.full(o.desc.shape, case.len_kv, dtype=torch.int32, device="cuda")
        else:
            kind = torch.float32 if o.desc.dtype.name == "f32" else torch.bfloat16
            tensors[o.name] = torch.empty_strided(o.desc.shape, o.desc.strides, dtype=kind, device="cuda").normal_(generator=generator)
    q, k, v = (gathered(tensors, n) if case.page and n != "q" else tensors[n].detach().requires_grad_(case.is_backward) for n in "qkv")
    d_out = tensors.get("d_out", tensors.get("out"))
    assert d_out is not None
    theirs = peers_of(case, q, k, v, d_out)
    want: list[torch.Tensor] | None = None
    if case.is_backward:
        # out and lse are those of the forward pass.
        wide = [t.repeat_interleave(case.heads // case.heads_kv, 1) for t in (k.detach(), v.detach())]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q.detach(), *wide, 0.0, case.is_causal)[:2]
        tensors["out"].copy_(out)
        tensors["lse"].copy_(lse)
        want = list(theirs["flash"]())
    elif case.part != "scores" or case.more in SCORES[:2]:
        want = [theirs["flash"]()]
    outputs = [tensors[o.name] for o in problem.outputs]
    engines = {e.id: e for e in ENGINES[problem.op]}
    rows, ran = verify(backend, problem, [(engines[e], c) for e, c, _ in choices], tensors,
                       lambda: disagreement(outputs, want) if want is not None else 0.0 if torch.isfinite(outputs[0]).all() else math.inf)
    times = backend.time_launches([*(call for _, _, call in ran), *theirs.values()], backend.default_stream(), repeats, FLUSH_BYTES)
    for (row, _, _), own in zip(ran, times, strict=False):
        row["us"] = statistics.median(own)
    us = {name: statistics.median(t) for name, t in zip(theirs, times[len(ran):], strict=True)}
    assert isinstance(problem, AttentionProblem)
    return {"op": problem.op, "peers_us": us, "flops": case.flops, "kv_bytes": case.kv_bytes, "first": rows[0], "best": fastest(rows),
            "rows": rows}


def show(results: list[dict[str, Any]]) -> None:
    print(f"{'case':56} {'us':>8} {'TFLOP/s':>8} | {'cuDNN':>7} {'x':>5} {'best x':>6} | {'flash':>7} {'x':>5} | engine")
    for r in results:
        if "us" not in r["first"]:
            print(f"{r['case']:56} {r['first'].get('failure', 'not run')[:100]}")
            continue
        us, best = r["first"]["us"], r["best"]["us"]
        speed = f"{r['flops'] / us / 1e6:8.0f}" if r["part"] not in ("decode", "paged") else f"{r['kv_bytes'] / us / 1e6:5.2f} TB/s"
        cells = [f"{r['peers_us'][n]:7.1f} {r['peers_us'][n] / us:5.2f}" if n in r["peers_us"] else f"{'-':>7} {'-':>5}" for n in PEERS]
        ratio = f"{r['peers_us']['cudnn'] / best:6.2f}" if "cudnn" in r["peers_us"] else f"{'-':>6}"
        print(f"{r['case']:56} {us:8.1f} {speed} | {cells[0]} {ratio} | {cells[1]} | {r['first']['engine']} {r['first']['config']}")
    for part in PARTS:
        for dim in sorted({r["dim"] for r in results if r["part"] == part}):
            line = []
            for peer in PEERS:
                rows = [r for r in results if r["part"] == part and r["dim"] == dim and "us" in r["first"] and peer in r["peers_us"]]
                if rows:
                    first, best = (math.exp(statistics.fmean(math.log(r["peers_us"][peer] / r[which]["us"]) for r in rows))
                                   for which in ("first", "best"))
                    line.append(f"of {peer} {first:.3f} (best {best:.3f}, {len(rows)} cases)")
            print(f"{part} D={dim}: {', '.join(line)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--dims", default="64,128,256")
    parser.add_argument("--lengths", default="512,1024,2048,4096,8192,16384")
    parser.add_argument("--candidates", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--seconds", type=float, default=150)
    parser.add_argument("--json", default="")
    options = parser.parse_args()
    begin = time.monotonic()
    wanted = cases(options)
    with ProcessPoolExecutor(options.workers, mp_context=get_context("fork")) as pool:
        info = pool.submit(device_info).result()
        futures = [pool.submit(prepare, case.problem(), info, options.candidates) for case in wanted]
        backend = CudaBackend(0)
        ready = [f.result() for f in futures]  # nothing is timed while the host's cores assemble
    print(f"{sum(map(len, ready))} candidates of {len(wanted)} cases assembled in {time.monotonic() - begin:.0f} s", flush=True)
    results: list[dict[str, Any]] = []
    left_out = []
    for case, choices in zip(wanted, ready, strict=True):
        if time.monotonic() - begin > options.seconds:
            left_out.append(case.name)
            continue
        results.append({"case": case.name, "part": case.part, "dim": case.dim} | measure(backend, case, choices, options.repeats))
        for row in results[-1]["rows"]:
            if row.get("error", 2.0) > 1.0:
                print(f"WRONG {case.name} {row['engine']} {row['config']}: {row.get('failure', row.get('error'))}", flush=True)
        torch.cuda.empty_cache()
    if options.json:
        record = {"stamp": stamp(), "device": backend.info.name, "options": vars(options), "left_out": left_out, "results": results}
        Path(options.json).write_text(json.dumps(record, indent=1))
    show(results)
    if left_out:
        print(f"left out after {options.seconds:.0f} s: {', '.join(left_out)}")
    print(f"{time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main()
