"""Convolutions of few channels: the engines that join the directions with strips."""

from __future__ import annotations

from .affine_strip_sm90 import STRIP_GRADIENT_SM90, STRIP_SM90
from .base import Engine
from .matmul import MatmulEngine

ENGINES: dict[str, tuple[Engine, ...]] = {
    "conv_fprop": (MatmulEngine("conv_fprop", STRIP_SM90),),
    "conv_transpose_dgrad": (MatmulEngine("conv_transpose_dgrad", STRIP_SM90),),
    "conv_wgrad": (MatmulEngine("conv_wgrad", STRIP_GRADIENT_SM90),),
    "conv_transpose_wgrad": (MatmulEngine("conv_transpose_wgrad", STRIP_GRADIENT_SM90),),
}
