"""Convolutions of few channels: the engines that join the forward directions with strips."""

from __future__ import annotations

from .affine_strip_sm90 import STRIP_SM90
from .base import Engine
from .matmul import MatmulEngine

ENGINES: dict[str, tuple[Engine, ...]] = {op: (MatmulEngine(op, STRIP_SM90),) for op in ("conv_fprop", "conv_transpose_dgrad")}
