"""Convolution (all directions) and GEMM as affine matmuls, and the engines that join an op with an algorithm for those."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from math import gcd, prod
from typing import Any, Protocol

from ..codegen.pointwise import Expression
from ..device import DeviceInfo
from ..dtypes import F32, F64, S32, DType
from ..ops.base import Problem
from ..ops.conv import AMAX, IMAGE, ConvProblem
from ..ops.conv import value_of as conv_value
from ..ops.epilogue import align_shape, align_strides
from ..ops.gemm import BLOCK, INT8, GemmProblem, accumulator, scale_shape, scale_strides, value_of
from ..ops.grouped_gemm import GroupedGemmProblem
from . import by_products
from .affine import AffineMatmul, Bound, IndexSpace, MatmulGroup, Prologue, Ragged, Source, Target
from .affine_direct import DIRECT
from .affine_halo_gradient import HALO_GRADIENT_SM90
from .affine_mma_sm80 import MMA_SM80
from .affine_simt import SIMT
from .affine_skinny import SKINNY_MMA
from .affine_skinny_wgmma import SKINNY_WGMMA
from .affine_turned import WGMMA_SM90_TURNED
from .affine_wgmma_sm90 import WGMMA_SM90
from .base import Build, Engine, EngineConfig, Support, WorkspaceArg, refuse
from .collapse import collapse as collapse_digits

# --- Collapsing: fewer digits, the same matmul ---------------------------------------------------------------------------------

_MAX_DIGIT = 2**31 - 1  # kernels count a digit in 32 bits


def _collapse_space(extents: tuple[int, ...], columns: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], Sequence[tuple[int, ...]]]:
    """Merges digits that advance every column (a stride or a bound's coefficient) alike."""
    if prod(extents) == 0:
        return (0,), [(0,) for _ in columns]
    merged = collapse_digits(extents, columns)
    return (extents, columns) if max(merged[0], default=1) > _MAX_DIGIT else merged


def _always_holds(bound: Bound, rows: IndexSpace, k: IndexSpace) -> bool:
    spans = [c * (n - 1) for c, n in zip((*bound.row_coefs, *bound.k_coefs), (*rows.extents, *k.extents), strict=True)]
    return bound.offset + sum(min(0, s) for s in spans) >= 0 and bound.offset + sum(max(0, s) for s in spans) < bound.extent


def collapse(am: AffineMatmul) -> AffineMatmul:
    """The same matmul with as few digits as strides allow: bounds that always hold and digits of extent 1 dropped, digits merged."""
    if any(bound.extent == 0 for bound in (*am.a.bounds, *am.b.bounds)):  # a source without elements: nothing is ever inside
        am = replace(am, k=IndexSpace((0,) * len(am.k.extents) or (0,)))
    a = replace(am.a, bounds=tuple(b for b in am.a.bounds if not _always_holds(b, am.m, am.k)))
    b = replace(am.b, bounds=tuple(b for b in am.b.bounds if not _always_holds(b, am.n, am.k)))
    targets: tuple[Target, ...] = (am.d, *am.operands, *((am.aux,) if am.aux is not None else ()))
    # Of every source: the side whose rows it has.
    sources = {"a": ("m", a), "b": ("n", b)} | {name: (side, x) for name, side, x in (
        ("scale_a", "m", am.scale_a), ("scale_b", "n", am.scale_b), ("up", "n", am.up), ("zero_a", "m", am.zero_a),
        ("zero_b", "n", am.zero_b)) if x is not None}
    if am.prologue is not None:
        sources |= {f"prologue{i}": ("m" if am.prologue.side == "a" else "n", x) for i, x in enumerate(am.prologue.operands)}

    def rows_of(side: str) -> list[tuple[int, ...]]:
        return [column for s, x in sources.values() if s == side for column in (x.row_strides, *(y.row_coefs for y in x.bounds))]

    m, m_columns = _collapse_space(am.m.extents, [*(t.m_strides for t in targets), *rows_of("m")])
    n, n_columns = _collapse_space(am.n.extents, [*(t.n_strides for t in targets), *rows_of("n")])
    k, k_columns = _collapse_space(am.k.extents, [s for _, x in sources.values() for s in (x.k_strides, *(y.k_coefs for y in x.bounds))])
    batch, batch_columns = _collapse_space(am.batch.extents, [*(t.batch_strides for t in targets),
                                                              *(x.batch_strides for _, x in sources.values())])
    rest = {"m": iter(m_columns[len(targets):]), "n": iter(n_columns[len(targets):])}
    ks, batches = iter(k_columns), iter(batch_columns[len(targets):])
    made: dict[str, Any] = {}
    for name, (side, old) in sources.items():
        row_strides, k_strides = next(rest[side]), next(ks)
        bounds = tuple(replace(x, row_coefs=next(rest[side]), k_coefs=next(ks)) for x in old.bounds)
        made[name] = replace(old, row_strides=row_strides, k_strides=k_strides, batch_strides=next(batches), bounds=bounds)
    new = [replace(t, m_strides=ms, n_strides=ns, batch_strides=bs) for t, ms, ns, bs in
           zip(targets, m_columns, n_columns, batch_columns, strict=False)]
    if am.prologue is not None:
        made["prologue"] = replace(am.prologue, operands=tuple(made.pop(f"prologue{i}") for i in range(len(am.prologue.operands))))
    count = 1 + len(am.operands)
    return replace(am, m=IndexSpace(m), n=IndexSpace(n), k=IndexSpace(k), batch=IndexSpace(batch), **made, d=new[0],
                   operands=tuple(new[1:count]), aux=new[count] if am.aux is not None else None)


# --- Convolution ---------------------------------------------------------------------------------------------------------------


def _accumulator(kind: DType) -> DType:
    return S32 if kind in INT8 else F64 if kind is F64 else F32


def _channels_innermost(channel_strides: Sequence[int], tap_strides: Sequence[int]) -> bool:
    """Whether channels should be the last digit, given the strides of channel and innermost tap in the operands that hold both."""
    return sum(abs(s) == 1 for s in channel_strides) >= max(1, sum(abs(s) == 1 for s in tap_strides))


@dataclass(frozen=True, slots=True)
class _Axis:
    """One spatial dimension of a convolution: extents of image, taps and positions, their relation, and the three strides."""

    image: int
    taps: int
    positions: int
    step: int
    pad: int  # before
    dilation: int
    image_stride: int
    tap_stride: int  # negative if the taps are flipped; tap 0 is at tap_base
    tap_base: int
    result_stride: int


def _axes(p: ConvProblem) -> tuple[_Axis, ...]:
    image, filter, result = p.desc(p.image), p.desc(p.filter), p.desc(p.result)
    axes = []
    for i in range(p.spatial):
        taps, tap_stride = filter.shape[i + 2], filter.strides[i + 2]
        axes.append(_Axis(image.shape[i + 2], taps, result.shape[i + 2], p.stride[i], p.padding[i][0], p.dilation[i], image.strides[i + 2],
                          -tap_stride if p.flip else tap_stride, (taps - 1) * tap_stride if p.flip else 0, result.strides[i + 2]))
    return tuple(axes)


def _targets(p: ConvProblem, value: Expression | None) -> list[tuple[str, Any, tuple[int, ...]]]:
    """(name, description, element strides over the output's axes) of the output, the addend and then the operands of what is written, last
    of a second output."""
    output = p.outputs[0]
    rows = [(output.name, output.desc, output.desc.strides)]
    named = [(n, value.axis(n)) for n in value.args if n != "acc"] if value is not None else []
    for name, axis in ([(p.addend, "c")] if p.addend else []) + named:
        desc = p.desc(name)
        aligned = align_shape(p.op, name, desc.shape, output.desc.shape, 1, axis)
        rows.append((name, desc, align_strides(desc, aligned, 1)))
    if p.has("aux"):
        rows.append(("aux", p.desc("aux"), p.desc("aux").strides))
    return rows


def _prologue(p: ConvProblem, side: str, row: Sequence[int], k: Sequence[int], channels: int) -> Prologue | None:
    """The prologue, vectors over channels that the digits of `row` and `k` count, of groups of so many."""
    if p.prologue is None:
        return None
    operands = []
    for name in (n for n in p.prologue.args if n != IMAGE):
        desc = p.desc(name)
        step = desc.strides[0] if desc.numel > 1 else 0
        rows, terms = (tuple(step * digit for digit in digits) for digits in (row, k))
        operands.append(Source(name, desc.dtype, rows, terms, (step * channels,), align=desc.align))
    return Prologue(side, p.prologue, tuple(operands))


def _zero(p: ConvProblem, name: str, row: Sequence[int], k: int, batch: int) -> Source | None:
    """The zero point `name`, if there is one, one element or a vector along the channels: its strides in its elements."""
    if not p.has(name):
        return None
    desc = p.desc(name)
    step = desc.strides[0] if desc.numel > 1 else 0
    return Source(name, desc.dtype, tuple(step * r for r in row), (0,) * k, (step * batch,), align=desc.align)


def _lower_fprop(p: ConvProblem) -> tuple[AffineMatmul, ...]:
    """m = (image, positions), n = filters of a group, k = taps and channels of a group, batch = group."""
    x, w, y = p.desc(p.image), p.desc(p.filter), p.desc(p.result)
    axes, groups = _axes(p), p.groups
    channels, filters = w.shape[1], w.shape[0] // groups
    c_last = _channels_innermost((x.strides[1], w.strides[1]), (axes[-1].dilation * axes[-1].image_stride, axes[-1].tap_stride))

    def k(taps: Sequence[int], channel: int) -> tuple[int, ...]:
        return (*taps, channel) if c_last else (channel, *taps)

    bounds = tuple(Bound(_unit(i + 1, 1 + p.spatial, ax.step), k(_unit(i, p.spatial, ax.dilation), 0), -ax.pad, ax.image)
                   for i, ax in enumerate(axes))
    a = Source(p.image, x.dtype, (x.strides[0], *(ax.step * ax.image_stride for ax in axes)),
               k([ax.dilation * ax.image_stride for ax in axes], x.strides[1]), (channels * x.strides[1],),
               -sum(ax.pad * ax.image_stride for ax in axes), bounds, x.align)
    b = Source(p.filter, w.dtype, (w.strides[0],), k([ax.tap_stride for ax in axes], w.strides[1]), (filters * w.strides[0],),
               sum(ax.tap_base for ax in axes), (), w.align)
    value = conv_value(p)
    targets = [Target(name, desc.dtype, (s[0], *s[2:]), (s[1],), (filters * s[1],), 0, desc.align) for name, desc, s in _targets(p, value)]
    aux = targets.pop() if p.has("aux") else None
    return (AffineMatmul(IndexSpace((y.shape[0], *y.shape[2:])), IndexSpace((filters,)), IndexSpace(k([ax.taps for ax in axes], channels)),
                         a, b, targets[0], _accumulator(x.dtype), IndexSpace((groups,)), value, tuple(targets[1:]), p.policy.math,
                         zero_a=_zero(p, "zero_x", (0,) * (1 + p.spatial), 1 + p.spatial, 0),
                         zero_b=_zero(p, "zero_w", (1,), 1 + p.spatial, filters), addend=p.addend, aux=aux, amax=p.has(AMAX),
                         prologue=_prologue(p, "a", (0,) * (1 + p.spatial), k((0,) * p.spatial, 1), channels)),)


def _unit(i: int, length: int, value: int) -> tuple[int, ...]:
    return tuple(value if j == i else 0 for j in range(length))


def _lower_wgrad(p: ConvProblem) -> tuple[AffineMatmul, ...]:
    """m = filters of a group, n = taps and channels of a group, k = (image, positions), batch = group."""
    x, w, y = p.desc(p.image), p.desc(p.filter), p.desc(p.result)
    axes, groups = _axes(p), p.groups
    channels, filters = w.shape[1], w.shape[0] // groups
    c_last = _channels_innermost((w.strides[1], x.strides[1]), (axes[-1].tap_stride, axes[-1].dilation * axes[-1].image_stride))

    def n(taps: Sequence[int], channel: int) -> tuple[int, ...]:
        return (*taps, channel) if c_last else (channel, *taps)

    a = Source(p.result, y.dtype, (y.strides[1],), (y.strides[0], *(ax.result_stride for ax in axes)), (filters * y.strides[1],),
               align=y.align)
    bounds = tuple(Bound(n(_unit(i, p.spatial, ax.dilation), 0), _unit(i + 1, 1 + p.spatial, ax.step), -ax.pad, ax.image)
                   for i, ax in enumerate(axes))
    b = Source(p.image, x.dtype, n([ax.dilation * ax.image_stride for ax in axes], x.strides[1]),
               (x.strides[0], *(ax.step * ax.image_stride for ax in axes)), (channels * x.strides[1],),
               -sum(ax.pad * ax.image_stride for ax in axes), bounds, x.align)
    d = Target(p.filter, w.dtype, (w.strides[0],), n([ax.tap_stride for ax in axes], w.strides[1]), (filters * w.strides[0],),
               sum(ax.tap_base for ax in axes), w.align)
    value = conv_value(p)  # of single elements
    scales = [Target(name, desc.dtype, (0,), (0,) * (1 + p.spatial), (0,), 0, desc.align) for name, desc, _ in _targets(p, value)[1:]]
    return (AffineMatmul(IndexSpace((filters,)), IndexSpace(n([ax.taps for ax in axes], channels)), IndexSpace((y.shape[0], *y.shape[2:])),
                         a, b, d, _accumulator(x.dtype), IndexSpace((groups,)), value, tuple(scales), p.policy.math,
                         prologue=_prologue(p, "b", n((0,) * p.spatial, 1), (0,) * (1 + p.spatial), channels)),)


@dataclass(frozen=True, slots=True)
class _Part:
    """What one spatial dimension contributes to one matmul of a dgrad.

    Image coordinate i = first + sum(m digit * step) + sum(n digit * step). taps: number of k digits' taps, None if the dimension has
    no k digit. Position of the result: position + m digit 0 - tap * tap_back; tap of the filter: tap_first + tap * tap_step.
    """

    first: int
    m: tuple[tuple[int, int], ...]  # (extent, image step)
    taps: int = 0
    position: int = 0
    tap_back: int = 0
    tap_first: int = 0
    tap_step: int = 0
    is_disjoint: bool = False  # windows tile the image: the tap is an n digit, the position the m digit, no sum over taps


def _parts(ax: _Axis) -> Iterator[_Part]:
    """Splits the image coordinate i of a dimension so that the taps that meet i are an arithmetic progression.

    Tap r and position p meet i iff i + pad = p * step + r * dilation. For i = first + j * step this is solvable iff
    g = gcd(step, dilation) divides first + pad, and then by r = r0 + t * (step / g),
    p = (first + pad - r0 * dilation) / step + j - t * (dilation / g).
    """
    if ax.dilation == 1 and ax.taps == ax.step and ax.pad == 0 and ax.image == ax.positions * ax.step and ax.step > 1:
        yield _Part(0, ((ax.positions, ax.step),), is_disjoint=True)
        return
    g = gcd(ax.step, ax.dilation)
    tap_step = ax.step // g
    classes, grown = min(ax.step, ax.image), ax.image % ax.step  # classes below `grown` have one coordinate more
    first_tap = {(r * ax.dilation - ax.pad) % ax.step: r for r in range(min(tap_step, ax.taps))}  # by class: the others have no taps
    met = sorted(first for first in first_tap if first < classes)
    for first in met:
        r0 = first_tap[first]
        yield _Part(first, ((-(-(ax.image - first) // ax.step), ax.step),), -(-(ax.taps - r0) // tap_step),
                    (first + ax.pad - r0 * ax.dilation) // ax.step, ax.dilation // g, r0, tap_step)
    begin = 0
    for end in (*met, classes):  # neighbouring classes of one extent are written by one matmul
        for low, high in ((begin, min(end, grown)), (max(begin, grown), end)):
            if low < high:
                yield _Part(low, ((-(-(ax.image - low) // ax.step), ax.step), (high - low, 1)))
        begin = end + 1


def _lower_dgrad(p: ConvProblem) -> tuple[AffineMatmul, ...]:
    """m = (image, a sublattice of its coordinates), n = channels of a group, k = filters of a group and the taps that meet the
    sublattice, batch = group. Sublattices that no tap meets get the epilogue of 0 from a matmul with an empty k."""
    image = p.desc(p.image)
    if image.numel == 0:
        return ()
    axes = _axes(p)
    matmuls = []
    options = [tuple(_parts(ax)) for ax in axes]
    for parts in product(*(tuple(q for q in o if q.taps or q.is_disjoint) for o in options)):
        matmuls.append(_dgrad_matmul(p, axes, parts))
    for i, option in enumerate(options):  # tapless in dimension i, met in the dimensions before, anything after
        met = [tuple(q for q in o if q.taps or q.is_disjoint) for o in options[:i]]
        rest = [(_Part(0, ((ax.image, 1),)),) for ax in axes[i + 1:]]
        for parts in product(*met, tuple(q for q in option if not q.taps and not q.is_disjoint), *rest):
            matmuls.append(_dgrad_matmul(p, axes, parts))
    return tuple(matmuls)


def _dgrad_matmul(p: ConvProblem, axes: tuple[_Axis, ...], parts: tuple[_Part, ...]) -> AffineMatmul:
    w, y = p.desc(p.filter), p.desc(p.result)
    groups, channels, filters = p.groups, w.shape[1], w.shape[0] // p.groups
    is_met = all(q.taps or q.is_disjoint for q in parts)
    pairs = list(zip(axes, parts, strict=True))
    in_k = [(ax, q) for ax, q in pairs if q.taps] if is_met else []  # dimensions with a tap digit in k
    in_n = [(ax, q) for ax, q in pairs if q.is_disjoint] if is_met else []  # and in n
    if not is_met:  # a disjoint dimension beside a tapless one is just all of its coordinates
        pairs = [(ax, _Part(0, ((ax.image, 1),)) if q.is_disjoint else q) for ax, q in pairs]
    num_m = 1 + sum(len(q.m) for _, q in pairs)

    k_last = _channels_innermost((y.strides[1], w.strides[0]),
                                 [s for ax, q in in_k[-1:] for s in (q.tap_back * ax.result_stride, q.tap_step * ax.tap_stride)])
    c_last = _channels_innermost((p.desc(p.image).strides[1], w.strides[1]),
                                 [s for ax, _ in in_n[-1:] for s in (ax.image_stride, ax.tap_stride)])

    def k(taps: Sequence[int], channel: int) -> tuple[int, ...]:
        return (*taps, channel) if k_last else (channel, *taps)

    def n(taps: Sequence[int], channel: int) -> tuple[int, ...]:
        return (*taps, channel) if c_last else (channel, *taps)

    bounds, m_result, digit = [], [y.strides[0]], 1
    for ax, q in pairs:
        if is_met and q.taps:
            back = [-other.tap_back if other is q else 0 for _, other in in_k]
            bounds.append(Bound(_unit(digit, num_m, 1), k(back, 0), q.position, ax.positions))
        m_result += [ax.result_stride, *(0 for _ in q.m[1:])] if is_met else [0 for _ in q.m]
        digit += len(q.m)
    k_extent = k([q.taps for _, q in in_k], filters) if is_met else k((), 0)
    a = Source(p.result, y.dtype, tuple(m_result), k([-q.tap_back * ax.result_stride for ax, q in in_k], y.strides[1]),
               (filters * y.strides[1],), sum(q.position * ax.result_stride for ax, q in in_k), tuple(bounds), y.align)
    b = Source(p.filter, w.dtype, n([ax.tap_stride for ax, _ in in_n], w.strides[1]),
               k([q.tap_step * ax.tap_stride for ax, q in in_k], w.strides[0]), (filters * w.strides[0],),
               sum(ax.tap_base for ax in axes) + sum(q.tap_first * ax.tap_stride for ax, q in in_k), (), w.align)
    targets, value = [], conv_value(p)
    for name, desc, s in _targets(p, value):
        m_strides = (s[0], *(step * s[i + 2] for i, (_, q) in enumerate(pairs) for _, step in q.m))
        n_taps = [s[i + 2] for i, (_, q) in enumerate(pairs) if q.is_disjoint]
        base = sum(q.first * s[i + 2] for i, (_, q) in enumerate(pairs))
        targets.append(Target(name, desc.dtype, m_strides, n(n_taps, s[1]), (channels * s[1],), base, desc.align))
    aux = targets.pop() if p.has("aux") else None
    m_extent = (y.shape[0], *(extent for _, q in pairs for extent, _ in q.m))
    return AffineMatmul(IndexSpace(m_extent), IndexSpace(n([ax.taps for ax, _ in in_n], channels)), IndexSpace(k_extent), a, b, targets[0],
                        _accumulator(y.dtype), IndexSpace((groups,)), value, tuple(targets[1:]), p.policy.math, addend=p.addend, aux=aux,
                        amax=p.has(AMAX))


# --- GEMM ----------------------------------------------------------------------------------------------------------------------


def _pieces(size: int, is_blocked: bool) -> list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """(first, extents, steps, blocks a step makes) of digits of rows among which rows of a block scale's block are alike."""
    if not is_blocked:
        return [(0, (size,), (1,), (0,))]
    whole = size // BLOCK
    pieces = [(0, (whole, BLOCK), (BLOCK, 1), (1, 0))] if whole else []
    return pieces + ([(whole * BLOCK, (size - whole * BLOCK,), (1,), (0,))] if size % BLOCK else [])


def _lower_gemm(p: GemmProblem) -> tuple[AffineMatmul, ...]:
    """Batch dimensions over which b does not change become digits of m (one tall matmul), those over which a does not become digits
    of n (one wide one), others are the batch. Block scales make digits of blocks, and own matmuls of the rows and columns left over."""
    a, b, d = p.desc("a"), p.desc("b"), p.desc("d")
    batch = d.shape[:-2]

    def batch_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
        own = tuple(0 if n == 1 else s for n, s in zip(shape[:-2], strides[:-2], strict=True))
        return (0,) * (len(batch) - len(own)) + own

    a_batch, b_batch = batch_strides(a.shape, a.strides), batch_strides(b.shape, b.strides)
    a_m, a_k = a.strides[-2:][::-1] if p.transpose_a else a.strides[-2:]
    b_k, b_n = b.strides[-2:][::-1] if p.transpose_b else b.strides[-2:]
    # A scale's strides: over the batch, of a block of rows, of a block of k.
    scales: dict[str, tuple[tuple[int, ...], int, int]] = {}
    for name, blocks in (("scale_a", p.blocks_a), ("scale_b", p.blocks_b)):
        if blocks is not None:
            desc, is_a = p.desc(name), name == "scale_a"
            shape, strides = scale_shape(desc, is_a), scale_strides(desc, is_a)
            step, k_step = strides[-2:] if is_a else strides[-2:][::-1]
            scales[name] = (batch_strides(shape, strides), step, k_step)
    # Whether a (b) or its scale changes over each batch dimension.
    a_moves, b_moves = (tuple(bool(s or t) for s, t in zip(own, scales.get(name, (own, 0, 0))[0], strict=True))
                        for name, own in (("scale_a", a_batch), ("scale_b", b_batch)))
    in_m = [i for i, moving in enumerate(b_moves) if not moving]
    in_n = [i for i, moving in enumerate(b_moves) if moving and not a_moves[i]]
    in_batch = [i for i, moving in enumerate(b_moves) if moving and a_moves[i]]

    def pick(values: Sequence[int], where: list[int]) -> tuple[int, ...]:
        return tuple(values[i] for i in where)

    epilogue = value_of(p)
    half = p.n // 2 if p.gate else 0
    columns = p.n - half
    rows: list[tuple[str, str, Any, tuple[int, ...], int]] = []  # (name, tensor, description, strides over the output's axes, base)
    for name in ("d", *(x for x in (epilogue.args if epilogue is not None else ()) if x not in ("acc", "up"))):
        tensor, base = name.removesuffix("_up") if p.gate else name, half if p.gate and name.endswith("_up") else 0
        desc = p.desc(tensor)
        if tensor in scales:
            over_batch, step, _ = scales[tensor]
            strides = (*over_batch, step, 0) if tensor == "scale_a" else (*over_batch, 0, step)
        elif name == "d" or not p.gate:
            strides = desc.strides if name == "d" else align_strides(
                desc, align_shape(p.op, name, desc.shape, d.shape, -1, epilogue.axis(name) if epilogue is not None else None), -1)
        else:
            strides = (0,) * (len(d.shape) - 1) + desc.strides[-1:]
        rows.append((name, tensor, desc, strides, base * strides[-1]))
    if p.has("aux"):
        rows.append(("aux", "aux", p.desc("aux"), p.desc("aux").strides, 0))
    is_block_scaled = p.is_block_scaled
    k_size = p.k if p.alpha else 0  # as in BLAS: what is multiplied by 0 is not read
    k_blocks = is_block_scaled and k_size > 0
    k = IndexSpace((-(-k_size // BLOCK), min(k_size, BLOCK)) if k_blocks else (k_size,))

    def bounds(digits: int) -> tuple[Bound, ...]:
        return (Bound((0,) * digits, (BLOCK, 1), 0, p.k),) if k_blocks and p.k > BLOCK and p.k % BLOCK else ()

    def k_strides(step: int) -> tuple[int, ...]:
        return (BLOCK * step, step) if k_blocks else (step,)

    matmuls = []
    in_blocks = [blocks is not None and blocks.rows == BLOCK for blocks in (p.blocks_a, p.blocks_b)]
    for first_m, extents_m, steps_m, blocks_m in _pieces(p.m, in_blocks[0]):
        for first_n, extents_n, steps_n, blocks_n in _pieces(columns, in_blocks[1]):
            sources: dict[str, Any] = {}
            for name, blocks, first, steps, per_step, where in (("scale_a", p.blocks_a, first_m, steps_m, blocks_m, in_m),
                                                                ("scale_b", p.blocks_b, first_n, steps_n, blocks_n, in_n)):
                if blocks is None or blocks.is_plain:
                    continue
                over_batch, step, k_step = scales[name]
                own = per_step if blocks.rows == BLOCK else steps
                base = step * (first // BLOCK if blocks.rows == BLOCK else first if blocks.rows else 0)
                sources[name] = Source(name, p.desc(name).dtype, (*pick(over_batch, where), *(w * step if blocks.rows else 0 for w in own)),
                                       (k_step if blocks.k else 0, 0) if k_blocks else (0,), pick(over_batch, in_batch), base,
                                       align=p.desc(name).align)
            a_source = Source("a", a.dtype, (*pick(a_batch, in_m), *(w * a_m for w in steps_m)), k_strides(a_k), pick(a_batch, in_batch),
                              first_m * a_m, bounds(len(in_m) + len(steps_m)), a.align)
            b_source = Source("b", b.dtype, (*pick(b_batch, in_n), *(w * b_n for w in steps_n)), k_strides(b_k), pick(b_batch, in_batch),
                              first_n * b_n, bounds(len(in_n) + len(steps_n)), b.align)
            targets = [Target(name, desc.dtype, (*pick(s, in_m), *(w * s[-2] for w in steps_m)),
                              (*pick(s, in_n), *(w * s[-1] for w in steps_n)), pick(s, in_batch),
                              base + first_m * s[-2] + first_n * s[-1], desc.align, tensor if tensor != name else "")
                       for name, tensor, desc, s, base in rows]
            aux = targets.pop() if p.has("aux") else None
            m, n = IndexSpace((*pick(batch, in_m), *extents_m)), IndexSpace((*pick(batch, in_n), *extents_n))
            matmuls.append(AffineMatmul(
                m, n, k, a_source, b_source, targets[0], accumulator(p), IndexSpace(pick(batch, in_batch)), epilogue, tuple(targets[1:]),
                p.policy.math, **sources, up=replace(b_source, base=half * b_n) if p.gate else None, aux=aux))
    return tuple(matmuls)


def _lower_grouped(p: GroupedGemmProblem) -> tuple[AffineMatmul, ...]:
    """grouped_gemm: m = rows, ragged; k; no batch. Its wgrad: m and n columns, k = rows, ragged, batch = groups."""
    a, b, d, sizes = (p.desc(name) for name in ("a", "b", "d", "group_sizes"))
    def source(name: str, row: int, k: int, batch: tuple[int, ...]) -> Source:
        return Source(name, p.desc(name).dtype, (row,), (k,), batch, align=p.desc(name).align)

    ragged = Ragged("k" if p.is_wgrad else "m", "group_sizes", sizes.dtype, p.groups, sizes.strides[0], p.is_cumulative,
                    0 if p.is_wgrad else b.strides[0])
    up = None
    if p.is_wgrad:
        sources = source("a", a.strides[1], a.strides[0], (0,)), source("b", b.strides[1], b.strides[0], (0,))
        target = Target("d", d.dtype, (d.strides[1],), (d.strides[2],), (d.strides[0],), 0, d.align)
    else:
        b_n, b_k = b.strides[1:] if p.transpose_b else b.strides[:0:-1]
        sources = source("a", a.strides[0], a.strides[1], ()), source("b", b_n, b_k, ())
        up = replace(sources[1], base=p.n // 2 * b_n) if p.gate else None
        target = Target("d", d.dtype, (d.strides[0],), (d.strides[1],), (), 0, d.align)
    return (AffineMatmul(IndexSpace((p.m,)), IndexSpace((p.n // 2 if p.gate else p.n,)), IndexSpace((p.k,)), *sources, target,
                         p.accumulator, IndexSpace((p.groups,) if p.is_wgrad else ()), p.epilogue, math=p.policy.math, up=up,
                         ragged=ragged),)


# --- Engines -------------------------------------------------------------------------------------------------------------------

_LOWERINGS: dict[str, Callable[[Any], tuple[AffineMatmul, ...]]] = {
    "conv_fprop": _lower_fprop, "conv_dgrad": _lower_dgrad, "conv_wgrad": _lower_wgrad, "conv_transpose": _lower_dgrad,
    "conv_transpose_dgrad": _lower_fprop, "conv_transpose_wgrad": _lower_wgrad, "gemm": _lower_gemm,
    "grouped_gemm": _lower_grouped, "grouped_gemm_wgrad": _lower_grouped,
}


@lru_cache(maxsize=1024)
def lower(problem: Problem) -> tuple[AffineMatmul, ...]:
    """The collapsed matmuls that write the problem's output, each element exactly once; those without elements are left out."""
    matmuls = (collapse(am) for am in _LOWERINGS[problem.op](problem))
    return tuple(am for am in matmuls if am.batch.size * am.m.size * am.n.size)


@lru_cache(maxsize=1024)
def lower_group(problem: Problem) -> MatmulGroup | None:
    """The matmuls of `lower`, not collapsed, so that their digits correspond, the longest sums first; if several."""
    members = [am for am in _LOWERINGS[problem.op](problem) if am.batch.size * am.m.size * am.n.size]
    return MatmulGroup(tuple(sorted(members, key=lambda am: -am.k.size))) if len(members) > 1 else None


class Algorithm(Protocol):
    """A way to execute an AffineMatmul. One with `takes_groups` takes a MatmulGroup in its place, as far as its check allows."""

    name: str
    is_deterministic: bool

    def __hash__(self) -> int: ...
    def check(self, am: AffineMatmul, device: DeviceInfo) -> Support: ...
    def configs(self, am: AffineMatmul, device: DeviceInfo) -> tuple[EngineConfig, ...]: ...
    def estimate(self, am: AffineMatmul, config: EngineConfig, device: DeviceInfo) -> float: ...
    def build(self, op: str, am: AffineMatmul, config: EngineConfig, device: DeviceInfo, workspace_offset: int) -> Build: ...


@dataclass(frozen=True, slots=True)
class _Job:
    """One of a problem's matmuls and the algorithm that executes it."""

    am: Any  # AffineMatmul, or MatmulGroup
    algorithm: Algorithm
    device: DeviceInfo
    is_largest: bool  # the one whose configs are the problem's

    @property
    def configs(self) -> tuple[EngineConfig, ...]:
        return _configs(self.algorithm, self.am, self.device)

    def choose(self, config: EngineConfig) -> EngineConfig:
        """The config where it is legal, else the most promising one. Enumerated only where that is in question: it takes milliseconds."""
        return config if (self.is_largest and config.knobs) or config in self.configs else self.configs[0]


@lru_cache(maxsize=256)
def _configs(algorithm: Algorithm, am: Any, device: DeviceInfo) -> tuple[EngineConfig, ...]:
    return algorithm.configs(am, device)


@lru_cache(maxsize=256)
def _split(algorithm: Algorithm, problem: Problem, device: DeviceInfo) -> tuple[tuple[Any, Algorithm], ...]:
    """The problem's matmuls, the largest first. Those with an empty k (they write the epilogue of 0) are for the direct algorithm."""
    single = sorted(lower(problem), key=lambda am: -am.flops)
    group = lower_group(problem) if getattr(algorithm, "takes_groups", False) and len(single) > 1 and single[0].aux is None else None
    if group is not None and algorithm.check(group, device):  # type: ignore[arg-type]
        return ((group, algorithm),)
    return tuple((am, algorithm if am.k.size else DIRECT) for am in single)


@lru_cache(maxsize=256)
def _jobs(algorithm: Algorithm, problem: Problem, device: DeviceInfo) -> tuple[_Job, ...]:
    return tuple(_Job(am, chosen, device, i == 0) for i, (am, chosen) in enumerate(_split(algorithm, problem, device)))


class MatmulEngine(Engine):
    """An op through one algorithm."""

    makes_by_products = True

    def __init__(self, op: str, algorithm: Algorithm) -> None:
        is_implicit = op.startswith("conv") and algorithm is not DIRECT
        self.id = f"{op}.{'igemm_' if is_implicit else ''}{algorithm.name}"  # type: ignore[misc]
        self.is_deterministic = algorithm.is_deterministic  # type: ignore[misc]
        self.sums_coarsely = getattr(algorithm, "sums_coarsely", False)  # type: ignore[misc]
        self.algorithm = algorithm

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        split = _split(self.algorithm, problem, device)
        if self.algorithm is not DIRECT and not problem.is_empty and all(algorithm is not self.algorithm for _, algorithm in split):
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        for am, algorithm in split:
            if algorithm is not DIRECT and isinstance(am, AffineMatmul):
                foreign = [words for attribute, words in am.extras.items() if not getattr(algorithm, attribute, False)]
                if foreign:
                    return refuse(f"{algorithm.name} takes no {' and no '.join(foreign)}")
            support = algorithm.check(am, device)
            if not support:
                return support
        return by_products.check(problem, device)

    def _block(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> int:
        """Rows of D whose moments the algorithm writes beside it; 0 where it writes none, or none are asked for."""
        if not by_products.has_moments(problem) or not hasattr(self.algorithm, "moments_block"):
            return 0
        jobs = _jobs(self.algorithm, problem, device)
        if len(jobs) != 1 or jobs[0].algorithm is not self.algorithm or not isinstance(jobs[0].am, AffineMatmul):
            return 0
        am = jobs[0].am  # whose columns are channels; of windows that tile, taps too
        is_by_channels = am.batch.size * am.n.size == problem.outputs[0].desc.shape[1]
        return int(self.algorithm.moments_block(am, config, device)) if is_by_channels else 0

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Those of the largest matmul; the others use the same one where it is legal for them, else their first."""
        jobs = _jobs(self.algorithm, problem, device)
        if not jobs:
            return (EngineConfig(),)
        if not by_products.has_moments(problem):
            return jobs[0].configs
        return tuple(sorted(jobs[0].configs, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        jobs = _jobs(self.algorithm, problem, device)
        if self._block(problem, config, device):
            return self.algorithm.estimate(replace(jobs[0].am, moments=True), config, device) + COMBINE_US
        total = sum(job.algorithm.estimate(job.am, job.choose(config), device) for job in jobs)
        return total + by_products.estimate(problem, device)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        """Steps run in order on one stream, so all matmuls share the workspace from its start."""
        jobs, block = _jobs(self.algorithm, problem, device), self._block(problem, config, device)
        if block:
            assert isinstance(problem, ConvProblem)
            am, rows = jobs[0].am, jobs[0].am.m.size
            build = self.algorithm.build(problem.op, replace(am, moments=True), config, device, 0)
            combine = by_products.combine_step(problem, rows, block, WorkspaceArg(0), device)
            steps = by_products.cleared(problem, (*build.steps, combine), device)
            return Build(steps, 2 * 4 * am.batch.size * am.n.size * -(-rows // block))
        builds = [job.algorithm.build(problem.op, job.am, job.choose(config), device, 0) for job in jobs]
        build = Build(tuple(step for b in builds for step in b.steps), max((b.workspace_bytes for b in builds), default=0))
        return by_products.with_by_products(problem, build, device)


COMBINE_US = 3.0  # of the launch that combines moments of tiles, beside what tiles take longer
ALGORITHMS: tuple[Algorithm, ...] = (WGMMA_SM90, MMA_SM80, SIMT, DIRECT)
_OF_GEMM: tuple[Algorithm, ...] = (SKINNY_MMA, SKINNY_WGMMA, WGMMA_SM90_TURNED)  # for few rows of a
_OF_WGRAD: tuple[Algorithm, ...] = (HALO_GRADIENT_SM90,)
_OF_GROUPS: tuple[Algorithm, ...] = (WGMMA_SM90, MMA_SM80, SIMT, DIRECT)
ENGINES: dict[str, tuple[Engine, ...]] = {
    op: tuple(MatmulEngine(op, algorithm) for algorithm in
              (_OF_GROUPS if op.startswith("grouped") else
               (_OF_GEMM if op == "gemm" else _OF_WGRAD if op.endswith("wgrad") else ()) + ALGORITHMS)) for op in _LOWERINGS}
