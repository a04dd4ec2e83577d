"""Groups of few channels as fewer groups of more: the filters of `merged` groups are the diagonal blocks of a dense filter in the
workspace, zeros beside them, which a matrix loop multiplies at the pace of its tiles (16 to 128 channels).

As many times more products are zeros as groups are merged, but a tensor core's tile of 4 channels costs what one of 64 does. Zeros meet the
other groups' channels: an infinity or NaN of one makes NaN of all channels of its merged group at the positions that see it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from ..device import DeviceInfo
from ..ops.base import Policy, Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc, packed_strides
from . import layout_copy, matmul
from .affine import AffineMatmul, Bound, IndexSpace, Source, Target
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, WorkspaceArg, refuse
from .composition import Place, cheapest, following, moved
from .conv_im2col import INDEX_LIMIT, Windows

_WIDEST = 128  # channels and filters of a merged group
_NAME = "block_diagonal"


def _merges(p: ConvProblem) -> list[int]:
    """How many groups may become one: to 16 channels or more, if there are as many."""
    k, c = p.desc(p.filter).shape[:2]
    widest = max(k // p.groups, c)
    merges = [m for m in range(2, p.groups + 1) if p.groups % m == 0 and m * widest <= _WIDEST]
    return [m for m in merges if m * widest >= 16] or merges[-1:]


@lru_cache(maxsize=256)
def _dense(p: ConvProblem, merged: int) -> TensorDesc:
    """The merged filter, channels innermost where the image's are."""
    k, c, *taps = p.desc(p.filter).shape
    kind, shape = p.desc(p.filter).dtype, (k, merged * c, *taps)
    if p.desc(p.image).strides[1] != 1:
        return TensorDesc.packed(kind, shape)
    row, *inner, channel = packed_strides((k, *taps, merged * c))
    return TensorDesc(kind, shape, (row, channel, *inner))


def _blocks(p: ConvProblem, merged: int) -> tuple[TensorDesc, TensorDesc]:
    """(merged group, group of it, filter, channel, taps): of the filter, and the diagonal blocks of the dense one."""
    own, dense = p.desc(p.filter), _dense(p, merged)
    k, c = own.shape[0] // p.groups, own.shape[1]
    views = []
    for desc, step in ((own, 0), (dense, c * dense.strides[1])):  # from a group to the next, along channels
        row, channel, *taps = desc.strides
        views.append(TensorDesc(desc.dtype, (p.groups // merged, merged, k, c, *own.shape[2:]),
                                (merged * k * row, k * row + step, row, channel, *taps), desc.dtype.num_bytes))
    return views[0], views[1]


def _convolution(p: ConvProblem, merged: int, device: DeviceInfo) -> tuple[Build, float]:
    """That of the merged groups."""
    operands = tuple((o.name, _dense(p, merged) if o.name == p.filter else o.desc) for o in p.operands)
    attrs = tuple((dict(p.attrs) | {"groups": p.groups // merged}).items())
    return cheapest(p.op, operands, attrs, Policy(p.policy.deterministic, p.policy.math), device, matmul.ENGINES[p.op])


def _copy(source: TensorDesc, target: TensorDesc, source_at: Place, target_at: Place, device: DeviceInfo) -> list[Step]:
    build, _ = cheapest("transform", (("x", source), ("y", target)), (), Policy(), device, layout_copy.ENGINES["transform"])
    return moved(build, WorkspaceArg(), x=source_at, y=target_at)


@dataclass(frozen=True)
class _Dense(Windows):
    """The dense filter as a matrix, whose elements lie in the filter where the group of the row is that of the channel."""

    @property
    def has_rows_innermost(self) -> bool:
        return False


def _filling(p: ConvProblem, merged: int) -> _Dense:
    """Rows (merged group, group of it, filter), terms (group, channel) and taps, those innermost that the dense filter has there."""
    own, dense = p.desc(p.filter), _dense(p, merged)
    k, c, taps = own.shape[0] // p.groups, own.shape[1], own.shape[2:]
    row, channel, *steps = own.strides

    def terms(groups: int, channels: int, others: Sequence[int]) -> tuple[int, ...]:
        return (*others, groups, channels) if dense.strides[1] == 1 else (groups, channels, *others)

    own_group = Bound((0, 1, 0), terms(-1, 0, [0] * len(taps)), 0, 1)
    source = Source(p.filter, own.dtype, (merged * k * row, k * row, row), terms(0, channel, steps), bounds=(own_group,), align=own.align)
    rows, inner = IndexSpace((p.groups // merged, merged, k)), IndexSpace(terms(merged, c, taps))
    return _Dense(AffineMatmul(rows, IndexSpace(), inner, source, source, Target("", own.dtype, (), ()), own.dtype), "a")


class BlockDiagonalEngine(Engine):
    """A small launch and the convolution; of the filter's gradient the convolution and one."""

    def __init__(self, op: str) -> None:
        self.id = f"{op}.{_NAME}"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        p = problem
        if p.groups == 1:
            return refuse(f"{_NAME}: one group (more are merged; the igemm engines take one)")
        if p.is_empty or 0 in p.desc(p.filter).shape:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if not p.desc(p.filter).dtype.is_float or p.desc(p.filter).dtype.num_bytes == 1 or p.alone is not p:
            return refuse(f"{_NAME}: floats of 16 bits or more and no by-products are supported (direct and im2col take others)")
        if not _merges(p):
            k, c = p.desc(p.filter).shape[:2]
            return refuse(f"{_NAME}: {p.groups} groups of {k // p.groups} filters of {c} channels (at most {_WIDEST} in all are merged)")
        if min(_dense(p, m).numel for m in _merges(p)) >= INDEX_LIMIT:
            return refuse(f"{_NAME}: a dense filter of {INDEX_LIMIT} elements or more")
        limit = p.policy.workspace_limit
        if limit is not None and not self._fitting(p, device):
            return refuse(f"{_NAME}: more workspace than {limit} bytes")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """merged: groups that become one."""
        assert isinstance(problem, ConvProblem)
        return tuple(sorted(self._fitting(problem, device), key=lambda config: self.estimate(problem, config, device)))

    def _fitting(self, p: ConvProblem, device: DeviceInfo) -> list[EngineConfig]:
        found = [EngineConfig.of(merged=m) for m in _merges(p) if _dense(p, m).numel < INDEX_LIMIT]
        limit = p.policy.workspace_limit
        return [c for c in found if limit is None or self.build_steps(p, c, device).workspace_bytes <= limit]

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ConvProblem)
        dense = _dense(problem, config["merged"])
        begin_us = 5.0 if problem.direction == "wgrad" else 2.5
        filling = 0.02 * dense.numel + 2000.0 if device.is_emulated else begin_us + dense.num_bytes / (device.bandwidth_gbs * 0.3e3)
        convolution_us = _convolution(problem, config["merged"], device)[1]
        if problem.direction == "wgrad" and dense.shape[1] >= 64:
            convolution_us *= 0.75  # measured on an H200: parts of few filters by many groups are summed faster than the loop expects
        return convolution_us + filling

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        p, merged, scratch = problem, config["merged"], Scratch()
        dense, (own_view, dense_view) = _dense(p, merged), _blocks(p, merged)
        build, _ = _convolution(p, merged, device)
        filter, place = TensorArg(p.filter), scratch.take(dense.num_bytes)
        places: dict[str, Place] = {o.name: TensorArg(o.name) for o in p.operands} | {p.filter: place}
        products = moved(build, scratch.take(build.workspace_bytes), **places)
        if p.direction == "wgrad":
            return Build((*products, *_copy(dense_view, own_view, place, filter, device)), scratch.num_bytes)
        filling = _filling(p, merged).step(p.op, Arg("ptr_target", "u64", place), device)
        return Build(tuple(following((filling, *products))), scratch.num_bytes)


_OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (BlockDiagonalEngine(op),) for op in _OPS}
