"""Steps of other problems within one's own: a GEMM, say, whose operands are pieces of this problem's tensors or of its workspace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import gcd
from typing import Any

from ..device import DeviceInfo
from ..ops import OPS
from ..ops.base import Policy
from ..tensor import TensorDesc
from . import layout_copy, layout_tile, matmul
from .base import Build, Engine, Step, TensorArg, TensorMapArg, WorkspaceArg, WorkspaceMapArg

Place = TensorArg | WorkspaceArg
COPIES: tuple[Engine, ...] = (*layout_tile.ENGINES["transform"], *layout_copy.ENGINES["transform"])
Product = tuple[tuple[tuple[str, TensorDesc], ...], tuple[tuple[str, Any], ...]]  # operands and attributes of a GEMM


def relocated(step: Step, places: Mapping[str, Place], workspace: WorkspaceArg | None = None) -> Step:
    """A step of another problem with that problem's operands at `places`, and its workspace where ours has room for it."""
    def move(value: Any) -> Any:
        if isinstance(value, TensorMapArg):
            place = places[value.name]
            offset = place.byte_offset + value.byte_offset
            return TensorMapArg(place.name, value.map, offset) if isinstance(place, TensorArg) else WorkspaceMapArg(value.map, offset)
        if isinstance(value, TensorArg):
            return shifted(places[value.name], value.byte_offset)
        return shifted(value, workspace.byte_offset) if isinstance(value, WorkspaceArg) and workspace is not None else value

    return replace(step, args=tuple(move(value) for value in step.args))


def moved(build: Build, workspace: WorkspaceArg, **places: Place) -> list[Step]:
    return [relocated(step, places, workspace) for step in build.steps]


WAITING = ("matmul/wgmma_sm90", "conv/im2col")  # templates that wait for what the launch before leaves


def following(steps: Sequence[Step]) -> list[Step]:
    """The steps, of which all but the first begin while the one before ends, if they know how to wait for it."""
    return [replace(step, spec=replace(step.spec, follows=True))
            if i and step.spec.template in WAITING and step.spec.target.capability >= (9, 0) else step for i, step in enumerate(steps)]


def shifted(place: Any, num_bytes: int) -> Any:
    return replace(place, byte_offset=place.byte_offset + num_bytes)


def piece(desc: TensorDesc, axis: int, first: int, count: int) -> tuple[TensorDesc, int]:
    """`count` indices of a dimension from `first` on, and how many bytes further on they begin."""
    offset = first * desc.strides[axis] * desc.dtype.num_bytes
    shape = (*desc.shape[:axis], count, *desc.shape[axis + 1:])
    return TensorDesc(desc.dtype, shape, desc.strides, gcd(desc.align, offset)), offset


@lru_cache(maxsize=256)
def product(operands: tuple[tuple[str, TensorDesc], ...], attrs: tuple[tuple[str, Any], ...], policy: Policy,
            device: DeviceInfo) -> tuple[Build, float]:
    """The steps of a GEMM by the engine of the smallest estimate, and that estimate."""
    return cheapest("gemm", operands, attrs, policy, device, matmul.ENGINES["gemm"])


@lru_cache(maxsize=256)
def cheapest(op: str, operands: tuple[tuple[str, TensorDesc], ...], attrs: tuple[tuple[str, Any], ...], policy: Policy,
             device: DeviceInfo, engines: tuple[Engine, ...]) -> tuple[Build, float]:
    """The steps of another problem by the one of `engines` of the smallest estimate, and that estimate."""
    problem = OPS[op].make(dict(operands), dict(attrs), policy)
    if problem.is_empty:
        return Build(()), 0.0
    takers = [e for e in engines if (e.is_deterministic or not policy.deterministic) and e.check_support(problem, device)]
    choices = [(e.estimate(problem, config, device), e, config) for e in takers for config in e.configs(problem, device)[:1]]
    estimate, engine, config = min(choices, key=lambda choice: choice[0])
    return engine.build_steps(problem, config, device), estimate
