"""Which engines serve which op, in order of preference when nothing else decides. Every loop of tests, benches and docs walks it."""

from __future__ import annotations

import fnmatch
from importlib import import_module

from .. import switches
from ..engines.base import Engine
from ..engines.by_products import completed
from ..errors import InvalidArgument, Unsupported

# Engine modules; each has ENGINES: dict op name -> tuple of engines, most specialised first.
ENGINE_MODULES = ("conv_depthwise_band", "conv_depthwise_wgmma", "conv_depthwise_tma", "conv_depthwise_mma", "conv_depthwise",
                  "conv_strip", "conv_interleaved", "conv_winograd_fused", "conv_winograd", "conv_fft", "conv_block_diagonal", "matmul",
                  "conv_turned", "conv_turned_gradient", "conv_apart", "conv_zero_point", "conv_im2col",
                  "conv_deformable", "causal_conv", "pointwise_map", "prelu_map", "reduce_tree", "reduce_gradient", "pool_window",
                  "resize_band", "layout_tile", "layout_copy", "layout_shuffle", "layout_sum", "unfold_walk", "scan_block", "loss_row",
                  "loss_map", "row_loss", "ctc_lattice", "linear_loss", "norm_row", "channel_stats", "channel_resident", "foreach",
                  "lrn_channels", "row_map", "sinkhorn_matrix", "spectral_norm", "nibbles", "quantized_linear_stream",
                  "quantized_linear_skinny", "quantized_linear_wgmma", "quantized_linear_apart", "quantize_map",
                  "quantize_groups", "quantize_scales", "rope", "kv_cache", "attention_states", "attention_decode",
                  "attention_backward_wgmma", "attention_backward_mma", "attention_wgmma_sm90", "attention_fp8_sm90", "attention_mma_sm80",
                  "attention_plain",
                  "multi_head_attention", "moe_rows", "moe_stream_sm90", "moe_experts", "moe_route", "gguf_dequantize", "gguf_matvec",
                  "gguf_apart")

ENGINES: dict[str, tuple[Engine, ...]] = {}
for _module in ENGINE_MODULES:
    for _op, _engines in import_module(f"oxidnn.engines.{_module}").ENGINES.items():
        ENGINES[_op] = ENGINES.get(_op, ()) + tuple(completed(_op, engine) for engine in _engines)


def engines_for(op: str) -> tuple[Engine, ...]:
    """The engines of `op` that OXIDNN_ENGINES leaves: "-pattern" removes, "+pattern" puts back, left to right."""
    if op not in ENGINES:
        raise Unsupported(f"{op}: no engine is registered (ops with engines: {', '.join(sorted(ENGINES))}).")
    kept = {e.id: True for e in ENGINES[op]}
    for rule in filter(None, (r.strip() for r in switches.get("OXIDNN_ENGINES").split(","))):
        if rule[0] not in "+-":
            raise InvalidArgument(f"OXIDNN_ENGINES: {rule!r} neither adds nor removes (expected '+pattern' or '-pattern').")
        for name in kept:
            if fnmatch.fnmatch(name, rule[1:]):
                kept[name] = rule[0] != "-"
    return tuple(e for e in ENGINES[op] if kept[e.id])
