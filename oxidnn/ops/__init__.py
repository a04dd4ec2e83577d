"""What can be computed: one file a family. OPS maps each op's name to its definition; the case grammar and the handle read it."""

from __future__ import annotations

from importlib import import_module

from .base import OpDef, Operand, Policy, Problem, Scalar

FAMILIES = ("conv", "gemm", "grouped_gemm", "pointwise", "random", "reduce", "pool", "resize", "layout", "shuffle", "nibbles", "quantize",
            "quantize_scales", "scan", "loss", "elementwise_loss", "row_loss", "ctc", "linear_loss", "norm", "channel_norm", "foreach",
            "lrn", "row_map", "sinkhorn", "spectral_norm", "glu", "prelu", "unfold", "deform", "causal_conv", "conv_reorder", "attention",
            "paged_attention", "rope", "moe", "moe_route", "kv_cache", "attention_states", "multi_head_attention", "quantized_linear",
            "gguf")

OPS: dict[str, OpDef] = {}
for _family in FAMILIES:
    OPS.update({definition.name: definition for definition in import_module(f".{_family}", __name__).DEFINITIONS})

__all__ = ["FAMILIES", "OPS", "OpDef", "Operand", "Policy", "Problem", "Scalar"]
