"""Mixtures of experts on a device against torch at sizes that random problems do not reach, and on two devices with NCCL between them."""

from __future__ import annotations

import multiprocessing
import os
import socket
from typing import Any

import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case

from .configs import check_configs

pytestmark = pytest.mark.gpu
EXPERTS, TOPK, HIDDEN, INTER = 16, 4, 512, 384


def drawn(torch: Any, tokens: int, kind: Any, device: str, seed: int = 0) -> list[Any]:
    g = torch.Generator().manual_seed(seed)
    x, w_gate_up, w_down = (torch.randn(*shape, generator=g) * scale for shape, scale in (
        ((tokens, HIDDEN), 1.0), ((EXPERTS, 2 * INTER, HIDDEN), 0.05), ((EXPERTS, HIDDEN, INTER), 0.05)))
    return [t.to(device, kind) for t in (x, w_gate_up, w_down)] + [torch.randn(tokens, EXPERTS, generator=g).to(device)]


def layer(torch: Any, x: Any, ids: Any, weights: Any, w_gate_up: Any, w_down: Any) -> Any:
    """y in float64, expert by expert."""
    y = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for e in range(len(w_down)):
        tokens, k = (ids == e).nonzero(as_tuple=True)
        gate, up = (x[tokens].double() @ w_gate_up[e].double().t()).chunk(2, -1)
        rows = torch.nn.functional.silu(gate) * up @ w_down[e].double().t()
        y = y.index_add(0, tokens, rows * weights[tokens, k, None].double())
    return y


@pytest.mark.parametrize("kind", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("tokens", [1, 16, 60, 300, 5000])
def test_layer_of_routed_tokens(torch: Any, h: oxidnn.DnnHandle, tokens: int, kind: str) -> None:
    x, w_gate_up, w_down, logits = drawn(torch, tokens, getattr(torch, kind), "cuda")
    ids, weights, counts = h.moe_route(logits, top_k=TOPK)
    top = logits.softmax(-1).topk(TOPK, -1)
    assert torch.equal(ids.long(), top.indices) and torch.equal(counts.long(), ids.flatten().long().bincount(minlength=EXPERTS))
    torch.testing.assert_close(weights, top.values / top.values.sum(-1, keepdim=True))
    y = h.moe(x, ids, weights, w_gate_up, w_down)
    want = layer(torch, x, ids, weights, w_gate_up, w_down)
    error = 2e-5 if kind == "float32" else 2**-5 if kind == "bfloat16" else 2**-8
    torch.testing.assert_close(y.double(), want, rtol=error, atol=error * float(want.abs().mean()))
    assert torch.equal(y, h.moe(x, ids, weights, w_gate_up, w_down)), "always the same bits"


_HELD = {
    "moe": f"w_gate_up=bf16[{EXPERTS},{2 * INTER},{HIDDEN}] w_down=bf16[{EXPERTS},{HIDDEN},{INTER}]",
    "s4": f"w_gate_up=u8[{EXPERTS},{2 * INTER},{HIDDEN // 2}] scale_gate_up=f32[{EXPERTS},{2 * INTER},{HIDDEN // 128}] "
          f"w_down=u8[{EXPERTS},{HIDDEN},{INTER // 2}] scale_down=f32[{EXPERTS},{HIDDEN},{INTER // 128}] block=(1,128)",
    "e4m3": f"w_gate_up=e4m3[{EXPERTS},{2 * INTER},{HIDDEN}] scale_gate_up=f32[{EXPERTS},{2 * INTER // 128},{HIDDEN // 128}] "
            f"w_down=e4m3[{EXPERTS},{HIDDEN},{INTER}] scale_down=f32[{EXPERTS},{HIDDEN // 128},{INTER // 128}] block=(128,128)"}


@pytest.mark.parametrize("kind", _HELD)
def test_the_first_configs_of_every_engine(cuda: Any, kind: str) -> None:
    op = "moe" if kind == "moe" else "moe_quantized"
    problem = parse_case(f"{op} x=bf16[16,{HIDDEN}] ids=s32[16,{TOPK}] weights=f32[16,{TOPK}] {_HELD[kind]}")
    for engine in ENGINES[op]:
        if engine.check_support(problem, cuda.info):
            check_configs(cuda, problem, engine, most=3)


def test_gradients_of_training_sizes(torch: Any, h: oxidnn.DnnHandle) -> None:
    x, w_gate_up, w_down, logits = drawn(torch, 2000, torch.bfloat16, "cuda")
    ids, weights, _ = h.moe_route(logits, top_k=TOPK)
    dy = torch.randn_like(x)
    inputs = [t.double().requires_grad_() for t in (x, weights, w_gate_up, w_down)]
    want = torch.autograd.grad(layer(torch, inputs[0], ids, *inputs[1:]), inputs, dy.double())
    for got, wanted in zip(h.moe_backward(dy, x, ids, weights, w_gate_up, w_down), want, strict=True):
        assert float((got.double() - wanted).norm() / wanted.norm()) < 0.01


def _member(rank: int, port: int, failures: Any) -> None:
    """A device of two: half of the experts, tokens of its own, which go where their experts are and come back."""
    try:
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(rank)
        dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        h, device, half = oxidnn.DnnHandle(f"cuda:{rank}"), f"cuda:{rank}", EXPERTS // 2
        _, w_gate_up, w_down, _ = drawn(torch, 1, torch.bfloat16, device)
        x, _, _, logits = drawn(torch, 300 + 77 * rank, torch.bfloat16, device, seed=1 + rank)
        ids, weights, _ = h.moe_route(logits, top_k=TOPK)
        mine = slice(rank * half, (rank + 1) * half)
        # Expert-parallel: rows to the owners of their experts, with the counts of each.
        xs, _, inverse, counts = h.moe_permute(x, ids, experts=EXPERTS)
        received = torch.empty(2, half, dtype=torch.int32, device=device)
        dist.all_to_all_single(received, counts)
        sent, came = counts.view(2, half).sum(1).tolist(), received.sum(1).tolist()
        rows = torch.empty(sum(came), HIDDEN, dtype=x.dtype, device=device)
        dist.all_to_all_single(rows, xs, came, sent)
        ys, back = h.moe_exchanged(rows, received, w_gate_up[mine], w_down[mine]), torch.empty_like(xs)
        dist.all_to_all_single(back, ys, sent, came)
        want = layer(torch, x, ids, weights, w_gate_up, w_down)
        close = {"rtol": 2**-6, "atol": 2**-6 * float(want.abs().mean())}
        torch.testing.assert_close(h.moe_unpermute(back, inverse, weights).double(), want, **close)
        # Token-parallel: the same tokens everywhere, each device's experts, one sum.
        x, _, _, logits = drawn(torch, 333, torch.bfloat16, device, seed=9)
        ids, weights, _ = h.moe_route(logits, top_k=TOPK)
        y = h.moe(x, ids, weights, w_gate_up[mine], w_down[mine], first_expert=rank * half).float()
        dist.all_reduce(y)
        want = layer(torch, x, ids, weights, w_gate_up, w_down)
        # Each device rounds what it adds, so the sum may err by twice what one device with every expert errs by, and an ulp of the largest.
        alone = (h.moe(x, ids, weights, w_gate_up, w_down).double() - want).abs().max()
        assert float((y.double() - want).abs().max()) <= 2 * float(alone) + 2**-8 * float(want.abs().max())
        dist.destroy_process_group()
    except BaseException as error:
        failures.put(f"rank {rank}: {type(error).__name__}: {error}")
        raise


def test_experts_on_two_devices(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    context = multiprocessing.get_context("spawn")
    failures = context.Queue()
    members = [context.Process(target=_member, args=(rank, port, failures)) for rank in range(2)]
    for member in members:
        member.start()
    for member in members:
        member.join(240)
        if member.is_alive():
            member.kill()
    assert failures.empty(), failures.get()
    assert [member.exitcode for member in members] == [0, 0]
