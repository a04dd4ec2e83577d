"""A matmul as its transpose: D^T = B A^T, so that a long n fills the side of a tile that m is too short for."""

from __future__ import annotations

from dataclasses import replace

from ..device import DeviceInfo
from .affine import AffineMatmul, Target
from .affine_wgmma_sm90 import WGMMA_SM90, WgmmaSm90Matmul
from .base import Build, EngineConfig, Support, refuse

MAX_ROWS = 64  # of A: half of the rows of a tile


def turned(am: AffineMatmul) -> AffineMatmul:
    """The matmul with A and B, m and n exchanged: the same elements of D at the same addresses."""
    def flip(t: Target) -> Target:
        return replace(t, m_strides=t.n_strides, n_strides=t.m_strides)

    return replace(am, m=am.n, n=am.m, a=am.b, b=am.a, d=flip(am.d), operands=tuple(flip(t) for t in am.operands),
                   aux=flip(am.aux) if am.aux is not None else None)


class TurnedMatmul:
    """The wgmma loop on the transposed problem, for a few rows and many columns."""

    is_deterministic = True

    def __init__(self, algorithm: WgmmaSm90Matmul) -> None:
        self.algorithm = algorithm
        self.name = f"{algorithm.name}_turned"
        self.sums_coarsely = algorithm.sums_coarsely

    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support:
        if am.m.size > MAX_ROWS or am.n.size <= am.m.size:
            return refuse(f"{self.name} takes at most {MAX_ROWS} rows and more columns than rows, not {am.m.size} x {am.n.size}")
        return self.algorithm.check(turned(am), device)

    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        return self.algorithm.configs(turned(am), device)

    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float:
        return self.algorithm.estimate(turned(am), config, device)

    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int = 0) -> Build:
        return self.algorithm.build(op, turned(am), config, device, workspace_offset)


WGMMA_SM90_TURNED = TurnedMatmul(WGMMA_SM90)
