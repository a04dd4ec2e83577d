"""Shuffles of pixels and channels: indexed copies."""

from __future__ import annotations

from .base import Engine
from .layout_copy import LayoutCopy

ENGINES: dict[str, tuple[Engine, ...]] = {op: (LayoutCopy(),) for op in ("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")}
