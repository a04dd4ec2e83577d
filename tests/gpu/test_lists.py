"""Steps over lists on a GPU: torch's fused optimisers as a second opinion, graph capture, lists longer than a table, other streams."""

from __future__ import annotations

from typing import Any

import pytest

import oxidnn

pytestmark = pytest.mark.gpu
SHAPES = [(64, 3, 7, 7), (64,), (1000, 257), (1,), (0, 3), (130, 70)]


def normal(torch: Any, seed: int, kind: Any = None, shapes: Any = None) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return [torch.randn(s, device="cuda", generator=generator).to(kind or torch.float32) for s in shapes or SHAPES]


def zeros(torch: Any) -> list[Any]:
    return [torch.zeros(s, device="cuda") for s in SHAPES]


def test_steps_are_those_of_the_fused_optimiser(torch: Any, h: oxidnn.DnnHandle) -> None:
    mine, m, v = normal(torch, 0), zeros(torch), zeros(torch)
    theirs = [torch.nn.Parameter(p) for p in normal(torch, 0)]
    optimiser = torch.optim.AdamW(theirs, lr=0.1, weight_decay=0.1, fused=True)
    for step in range(1, 5):
        grads = normal(torch, step)
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        optimiser.step()
        h.adamw_step(mine, grads, m, v, step=step, lr=0.1, weight_decay=0.1)
    for got, want in zip(mine, theirs, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)


def test_a_captured_step_takes_rate_step_and_overflow_from_memory(torch: Any, h: oxidnn.DnnHandle) -> None:
    params, m, v, grads = normal(torch, 0), zeros(torch), zeros(torch), normal(torch, 1)
    step, rate = torch.zeros((), device="cuda"), torch.full((), 0.1, device="cuda")
    scale, found = torch.ones((), device="cuda"), torch.zeros((), device="cuda")

    def one() -> None:
        h.unscale_grads(grads, scale, found)
        step.add_(1)
        h.adam_step(params, grads, m, v, step=step, lr=rate, found_inf=found)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        one()
        torch.cuda.synchronize()
        for lists, fresh in ((params, normal(torch, 0)), (m, zeros(torch)), (v, zeros(torch)), ([step], [torch.zeros((), device="cuda")])):
            for a, b in zip(lists, fresh, strict=True):
                a.copy_(b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            one()
    theirs = [torch.nn.Parameter(p) for p in normal(torch, 0)]
    optimiser = torch.optim.Adam(theirs, lr=0.1, foreach=True)
    for i in range(3):
        rate.fill_(0.1 / (i + 1))
        optimiser.param_groups[0]["lr"] = 0.1 / (i + 1)
        for g, fresh in zip(grads, normal(torch, 10 + i), strict=True):
            g.copy_(fresh)
        for p, g in zip(theirs, grads, strict=True):
            p.grad = g.clone()
        optimiser.step()
        graph.replay()
        torch.cuda.synchronize()
    for got, want in zip(params, theirs, strict=True):
        torch.testing.assert_close(got, want.detach(), rtol=1e-5, atol=1e-5)
    kept = [p.clone() for p in params]
    grads[2][3, 4] = float("inf")
    graph.replay()
    torch.cuda.synchronize()
    assert float(found) == 1
    for got, want in zip(params, kept, strict=True):
        assert torch.equal(got, want)


def test_lists_longer_than_a_table(torch: Any, h: oxidnn.DnnHandle) -> None:
    shapes = [(i % 37 + 1,) for i in range(1500)]
    params, grads = normal(torch, 0, shapes=shapes), normal(torch, 1, shapes=shapes)
    want = [p - 0.5 * g for p, g in zip(params, grads, strict=True)]
    total = torch.nn.utils.get_total_norm(grads)
    torch.testing.assert_close(h.grad_norm(grads), total, rtol=1e-5, atol=0)
    h.sgd_step(params, grads, lr=0.5)
    for got, expected in zip(params, want, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-6)


def test_mixed_types_and_masters(torch: Any, h: oxidnn.DnnHandle) -> None:
    masters = normal(torch, 0)
    params = [p.to(torch.bfloat16) if i % 2 else p.half() for i, p in enumerate(masters)]
    grads = [g.to(torch.bfloat16) if i % 2 else g.half() for i, g in enumerate(normal(torch, 1))]
    want = [p.double() - 0.01 * g.double() / 4 for p, g in zip(masters, grads, strict=True)]
    h.sgd_step(params, grads, lr=0.01, masters=masters, grad_scale=torch.full((1,), 4.0, device="cuda"))
    for p, master, expected in zip(params, masters, want, strict=True):
        torch.testing.assert_close(master.double(), expected, rtol=1e-6, atol=1e-6)
        assert torch.equal(p, master.to(p.dtype))


def test_the_same_bits_twice(torch: Any, h: oxidnn.DnnHandle) -> None:
    grads = normal(torch, 3, shapes=[(1 << 20,), (12345,), (777, 33)])
    norms = {float(h.grad_norm(grads)) for _ in range(5)}
    assert len(norms) == 1
    results = []
    for _ in range(2):
        params, m, v = normal(torch, 0), zeros(torch), zeros(torch)
        h.lamb_step(params, normal(torch, 1), m, v, step=1)
        results.append(params)
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_results_follow_the_stream_they_were_asked_on(torch: Any, h: oxidnn.DnnHandle) -> None:
    grads = normal(torch, 5, shapes=[(1 << 22,)])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())  # the numbers are drawn there, and a number times zero may be NaN before
    for i in range(5):
        with torch.cuda.stream(side):
            grads[0].mul_(0).add_(i + 1)
            norm = h.grad_norm(grads)
            assert float(norm) == pytest.approx((i + 1) * 2**11, rel=1e-5)


def test_a_tensor_of_more_than_two_to_the_31_elements(torch: Any, h: oxidnn.DnnHandle) -> None:
    count = 2**31 + 4099
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("less than 24 GiB of the device's memory are free")
    param, grad = torch.zeros(count, dtype=torch.float16, device="cuda"), torch.ones(count, dtype=torch.float16, device="cuda")
    grad[-3:] = 4
    h.sgd_step([param], [grad], lr=0.5)
    assert param[:3].tolist() == [-0.5] * 3 and param[-4:].tolist() == [-0.5, -2, -2, -2]
    assert sum(int((part == -0.5).sum()) for part in param.split(1 << 28)) == count - 3  # at once torch would take 16 GB more
    assert float(h.grad_norm([grad])) == pytest.approx((count - 3 + 48) ** 0.5, rel=1e-5)
