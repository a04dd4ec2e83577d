"""A convolution or image gradient whose filter is turned first: wgmma takes operands of 32 and of 8 bits only where they lie along k, which
ends in the channels, of a gradient in the filters, and w often lies otherwise. A copy puts it in the order of conv_reorder into the
workspace; the product follows.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from ..device import DeviceInfo
from ..ops import OPS
from ..ops.base import Policy, Problem
from ..ops.conv import ConvProblem
from ..ops.conv_reorder import packed_filter
from .affine_wgmma_sm90 import WGMMA_SM90
from .base import Build, Engine, EngineConfig, Scratch, Support, TensorArg, WorkspaceArg, refuse
from .composition import COPIES, Place, cheapest, following, moved
from .matmul import MatmulEngine

_NAME = "turned_filter"
_USES = {"conv_dgrad": "dgrad", "conv_transpose": "dgrad", "conv_fprop": "fprop", "conv_transpose_dgrad": "fprop"}  # of conv_reorder


@lru_cache(maxsize=256)
def _product(p: ConvProblem) -> ConvProblem:
    """The same problem with the turned filter."""
    tensors = {o.name: packed_filter(o.desc, _USES[p.op]) if o.name == p.filter else o.desc for o in p.operands}
    found = OPS[p.op].make(tensors, dict(p.attrs), replace(p.policy, workspace_limit=None))
    assert isinstance(found, ConvProblem)
    return found


def _copy(p: ConvProblem, device: DeviceInfo) -> tuple[Build, float]:
    filters = ("x", p.desc(p.filter)), ("y", _product(p).desc(p.filter))
    return cheapest("transform", filters, (), Policy(), device, COPIES)


class TurnedFilter(Engine):
    """Workspace: the turned filter, and what the product takes. Configs are the product's."""

    makes_by_products = True  # the product does

    def __init__(self, op: str) -> None:
        self.id = f"{op}.{_NAME}"  # type: ignore[misc]
        self.product = MatmulEngine(op, WGMMA_SM90)
        self.is_deterministic, self.sums_coarsely = self.product.is_deterministic, self.product.sums_coarsely  # type: ignore[misc]

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty or problem.desc(problem.filter).numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if self.product.check_support(problem, device):
            return refuse(f"{_NAME}: igemm_wgmma_sm90 takes the filter as it lies")
        return self.product.check_support(_product(problem), device)

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ConvProblem)
        return self.product.configs(_product(problem), device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ConvProblem)
        copy_us = 2000.0 + 0.02 * problem.desc(problem.filter).numel if device.is_emulated else _copy(problem, device)[1]
        return copy_us + self.product.estimate(_product(problem), config, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        p, second, scratch = problem, _product(problem), Scratch()
        turned = second.desc(p.filter)
        place = scratch.take((turned.offset_range[1] + 1) * turned.dtype.num_bytes)  # gaps included
        steps = moved(_copy(p, device)[0], WorkspaceArg(), x=TensorArg(p.filter), y=place)
        build = self.product.build_steps(second, config, device)
        places: dict[str, Place] = {o.name: TensorArg(o.name) for o in p.operands} | {p.filter: place}
        steps += moved(build, scratch.take(build.workspace_bytes), **places)
        return Build(tuple(following(steps)), scratch.num_bytes)


ENGINES: dict[str, tuple[Engine, ...]] = {op: (TurnedFilter(op),) for op in _USES}
