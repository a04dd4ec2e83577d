"""Multi-head attention on the GPU against torch.nn.MultiheadAttention and its autograd."""

from __future__ import annotations

from typing import Any

import pytest

import oxidnn


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "tolerance"), [("float64", 1e-10), ("float32", 1e-4), ("bfloat16", 4e-2)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_as_the_layer_of_torch(kind: str, tolerance: float, is_causal: bool, torch: Any, h: oxidnn.DnnHandle) -> None:
    """Packed weights and biases, sources of other widths, lengths first in memory; norms of differences."""
    torch.manual_seed(3)
    dtype = getattr(torch, kind)
    for own, features, first in ((128, 128, False), (96, 40, True)):
        layer = torch.nn.MultiheadAttention(own, 4, kdim=features, vdim=features, batch_first=not first, device="cuda", dtype=torch.float64)
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "bias" in name:
                    parameter.normal_()
                parameter.copy_(parameter.to(dtype))  # numbers that both sides hold
        shapes = {"query": (2, 70, own), "key": (2, 133, features), "value": (2, 133, features)}
        x = {n: torch.randn(s, device="cuda", dtype=dtype) for n, s in shapes.items()}
        if first:  # (batch, length, features), whose memory has lengths first
            x = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in x.items()}
        wide = {n: t.double().detach().requires_grad_() for n, t in x.items()}
        hidden = torch.ones(70, 133, dtype=torch.bool, device="cuda").triu(1) if is_causal else None
        given = wide if not first else {n: t.transpose(0, 1) for n, t in wide.items()}
        want = layer(*given.values(), attn_mask=hidden, need_weights=False)[0]
        want = want.transpose(0, 1) if first else want
        d_out = torch.randn_like(want)
        packed = layer.in_proj_weight
        weights = list(packed.chunk(3)) if packed is not None else [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        own_weights = [w.detach().to(dtype) for w in (*weights, layer.out_proj.weight)]
        biases = [b.detach().to(dtype) for b in (*layer.in_proj_bias.chunk(3), layer.out_proj.bias)]
        attrs: dict[str, Any] = {"num_heads": 4, "causal": "top_left" if is_causal else None}
        given_biases: dict[str, Any] = dict(zip(("bias_q", "bias_k", "bias_v", "bias_out"), biases, strict=True))
        q, k, v, o = own_weights
        out, *saved = h.multi_head_attention(x["query"], x["key"], x["value"], q, k, v, o, **attrs, return_saved=True, **given_biases)
        got = [out, *h.multi_head_attention_backward(d_out.to(dtype), x["query"], x["key"], x["value"], q, k, v, o, *saved, **attrs,
                                                     bias_gradients=True)]
        parameters = [packed] if packed is not None else weights
        by = (*wide.values(), *parameters, layer.out_proj.weight, layer.in_proj_bias, layer.out_proj.bias)
        gradients = torch.autograd.grad(want, by, d_out)
        by_weight = list(gradients[3].chunk(3)) if packed is not None else list(gradients[3:6])
        expected = [want, *gradients[:3], *by_weight, gradients[-3], *gradients[-2].chunk(3), gradients[-1]]
        scale = float(expected[8].norm())  # of the gradient of queries' bias: that of keys' is 0, a sum of rounded terms that cancel
        for result, reference in zip(got, expected, strict=True):
            size = float(reference.detach().norm())
            assert float((result.double() - reference.detach()).norm()) <= tolerance * (size if size > 1e-6 * scale else scale)
