"""A fused mixture of experts in Triton, the usual way: rows gathered in the loader by a list of assignments that is padded to tiles per
expert, the gate in the first product's epilogue, weights in the second's, a sum over each token's assignments.

    python benches/moe_triton.py INDEX      compiles the kernels of one config, for the cache on disk
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import triton
import triton.language as tl

# (rows, columns, k of a tile, warps, stages); columns of the gated product are of both halves each
CONFIGS = ((16, 64, 128, 4, 4), (16, 128, 64, 4, 5), (64, 128, 64, 4, 4), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3))


@triton.jit(do_not_specialize=["num_items"])
def experts_kernel(x, w, y, items, experts, weights, n, k, num_items, gap, GATED: tl.constexpr, TOPK: tl.constexpr, BM: tl.constexpr,
                   BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr):
    pid = tl.program_id(0)
    tiles_n = tl.cdiv(n, BN)
    tiles_m = tl.num_programs(0) // tiles_n
    group = pid // (GROUP * tiles_n)
    rows = min(tiles_m - group * GROUP, GROUP)
    pid_m = group * GROUP + (pid % (GROUP * tiles_n)) % rows
    pid_n = (pid % (GROUP * tiles_n)) // rows
    item = tl.load(items + pid_m * BM + tl.arange(0, BM))
    is_item = item < num_items
    expert = tl.load(experts + pid_m).to(tl.int64)
    column = pid_n * BN + tl.arange(0, BN)
    wanted = column % n
    at = tl.arange(0, BK)
    a = x + (item // TOPK).to(tl.int64)[:, None] * k + at[None, :]
    b = w + expert * (n + gap) * k + wanted.to(tl.int64)[None, :] * k + at[:, None]
    acc = tl.zeros((BM, BN), tl.float32)
    if GATED:
        up = tl.zeros((BM, BN), tl.float32)
    for first in range(0, tl.cdiv(k, BK)):
        inside = at < k - first * BK
        rows_a = tl.load(a, mask=is_item[:, None] & inside[None, :], other=0.0)
        rows_b = tl.load(b, mask=inside[:, None], other=0.0)
        acc = tl.dot(rows_a, rows_b, acc)
        if GATED:
            rows_u = tl.load(b + gap.to(tl.int64) * k, mask=inside[:, None], other=0.0)
            up = tl.dot(rows_a, rows_u, up)
        a += BK
        b += BK
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    else:
        acc = acc * tl.load(weights + item, mask=is_item, other=0.0)[:, None]
    inside = is_item[:, None] & (column < n)[None, :]
    tl.store(y + item.to(tl.int64)[:, None] * n + column[None, :], acc.to(y.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(x, y, columns, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(TOPK):
        total += tl.load(x + (token * TOPK + i) * columns + column, mask=column < columns, other=0.0).to(tl.float32)
    tl.store(y + token * columns + column, total.to(y.dtype.element_ty), mask=column < columns)


def aligned(ids: torch.Tensor, experts: int, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Assignments by expert, each expert's padded to tiles of `rows` with a number beyond the last; and each tile's expert."""
    flat = ids.flatten().cpu().long()
    order, counts = flat.argsort(stable=True), flat.bincount(minlength=experts)
    tiles = (counts + rows - 1) // rows
    items = torch.full((int(tiles.sum()) * rows,), flat.numel(), dtype=torch.int32)
    begin, at = 0, 0
    for count, held in zip(counts.tolist(), tiles.tolist(), strict=True):
        items[at:at + count] = order[begin:begin + count].int()
        begin, at = begin + count, at + held * rows
    return items.to(ids.device), torch.repeat_interleave(torch.arange(experts), tiles).int().to(ids.device)


def layer(config: tuple[int, ...], x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
          y: torch.Tensor) -> Callable[[], None]:
    """The layer but for the list of assignments, which is made before."""
    rows, columns, k, warps, stages = config
    (tokens, topk), (experts, hidden, inter) = ids.shape, w_down.shape
    items, expert_of = aligned(ids, experts, rows)
    h = torch.empty(tokens * topk, inter, dtype=x.dtype, device=x.device)
    each = torch.empty(tokens * topk, hidden, dtype=x.dtype, device=x.device)
    gated = min(columns, 128)

    def call() -> None:
        experts_kernel[(expert_of.numel() * triton.cdiv(inter, gated),)](
            x, w_gate_up, h, items, expert_of, weights, inter, hidden, tokens * topk, inter, GATED=True, TOPK=topk, BM=rows, BN=gated, BK=k,
            GROUP=8, num_warps=warps, num_stages=stages)
        experts_kernel[(expert_of.numel() * triton.cdiv(hidden, columns),)](
            h, w_down, each, items, expert_of, weights, hidden, inter, tokens * topk, 0, GATED=False, TOPK=1, BM=rows, BN=columns, BK=k,
            GROUP=8, num_warps=warps, num_stages=stages)
        sum_kernel[(tokens, triton.cdiv(hidden, 1024))](each, y, hidden, TOPK=topk, BLOCK=1024)

    return call


def main() -> None:
    config = CONFIGS[int(sys.argv[1])]
    for topk in (2, 4, 8):
        def made(*shape: int, kind: torch.dtype = torch.bfloat16) -> torch.Tensor:
            return torch.zeros(shape, dtype=kind, device="cuda")
        x = made(16, 512)
        ids = made(16, topk, kind=torch.int32)
        layer(config, x, ids, made(16, topk, kind=torch.float32), made(8, 512, 512), made(8, 512, 256), made(16, 512))()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
