"""Matrices and convolutions of few channels: the engines that join the ops with strips of images and with streams of dense rows."""

from __future__ import annotations

from .affine_stream_sm90 import STREAM_GRADIENT_SM90, STREAM_SM90, STREAM_WGMMA_SM90
from .affine_strip_sm90 import STRIP_GRADIENT_SM90, STRIP_SM90
from .base import Engine
from .matmul import MatmulEngine


def _streams(op: str) -> tuple[Engine, ...]:
    return MatmulEngine(op, STREAM_SM90), MatmulEngine(op, STREAM_WGMMA_SM90)


ENGINES: dict[str, tuple[Engine, ...]] = {
    "conv_fprop": (MatmulEngine("conv_fprop", STRIP_SM90), *_streams("conv_fprop")),
    "conv_dgrad": _streams("conv_dgrad"),
    "conv_transpose": _streams("conv_transpose"),
    "conv_transpose_dgrad": (MatmulEngine("conv_transpose_dgrad", STRIP_SM90), *_streams("conv_transpose_dgrad")),
    "conv_wgrad": (MatmulEngine("conv_wgrad", STRIP_GRADIENT_SM90), MatmulEngine("conv_wgrad", STREAM_GRADIENT_SM90)),
    "conv_transpose_wgrad": (MatmulEngine("conv_transpose_wgrad", STRIP_GRADIENT_SM90),
                             MatmulEngine("conv_transpose_wgrad", STREAM_GRADIENT_SM90)),
    "gemm": (*_streams("gemm"), MatmulEngine("gemm", STREAM_GRADIENT_SM90)),
}
