"""Matrices and convolutions of few channels: the engines that join the ops with strips and planes of images and with streams of dense
rows."""

from __future__ import annotations

from .affine_planes_sm90 import PLANES_SM90
from .affine_stream_sm90 import STREAM_GRADIENT_SM90, STREAM_SM90
from .affine_strip_sm90 import STRIP_GRADIENT_SM90, STRIP_SM90
from .base import Engine
from .matmul import MatmulEngine

ENGINES: dict[str, tuple[Engine, ...]] = {
    "conv_fprop": (MatmulEngine("conv_fprop", STRIP_SM90), MatmulEngine("conv_fprop", PLANES_SM90),
                   MatmulEngine("conv_fprop", STREAM_SM90)),
    "conv_dgrad": (MatmulEngine("conv_dgrad", PLANES_SM90), MatmulEngine("conv_dgrad", STREAM_SM90)),
    "conv_transpose": (MatmulEngine("conv_transpose", PLANES_SM90), MatmulEngine("conv_transpose", STREAM_SM90)),
    "conv_transpose_dgrad": (MatmulEngine("conv_transpose_dgrad", STRIP_SM90), MatmulEngine("conv_transpose_dgrad", PLANES_SM90),
                             MatmulEngine("conv_transpose_dgrad", STREAM_SM90)),
    "conv_wgrad": (MatmulEngine("conv_wgrad", STRIP_GRADIENT_SM90), MatmulEngine("conv_wgrad", STREAM_GRADIENT_SM90)),
    "conv_transpose_wgrad": (MatmulEngine("conv_transpose_wgrad", STRIP_GRADIENT_SM90),
                             MatmulEngine("conv_transpose_wgrad", STREAM_GRADIENT_SM90)),
    "gemm": (MatmulEngine("gemm", STREAM_SM90), MatmulEngine("gemm", STREAM_GRADIENT_SM90)),
}
