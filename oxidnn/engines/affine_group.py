"""Several affine matmuls that one kernel executes: the same structure on common digits, so that only numbers differ.

The classes of a strided dgrad are the case at hand: each is a convolution of its own over a sublattice of the image, too small to
fill a device to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from . import affine_tiling as tiling
from .affine import AffineMatmul, Bound, IndexSpace, MatmulGroup, Target
from .affine_tiling import Digits, Operand
from .affine_tma import Boxes, Sum

Spaces = Sequence[tuple[tuple[int, ...], list[tuple[int, ...]]]]


def members_of(am: AffineMatmul | MatmulGroup) -> tuple[AffineMatmul, ...]:
    return am.members if isinstance(am, MatmulGroup) else (am,)


def with_products(members: tuple[AffineMatmul, ...], tile_k: int) -> tuple[AffineMatmul, ...] | str:
    """The members; those with an empty k (they write the epilogue of 0) with a k tile of the first member's products instead, of which
    `beyond` makes products of zeros by zeros: a kernel then knows no special case."""
    first = members[0]
    result = []
    for am in members:
        if am.k.size:
            result.append(am)
            continue
        if (am.n, am.batch) != (first.n, first.batch):
            return "a part without products has other columns than the others"
        # As many digits of m as the first member has: those of one point go, or come.
        targets = (am.d, *am.operands)
        missing = len(first.m.extents) - len(am.m.extents)
        kept = [i for i, extent in enumerate(am.m.extents) if extent > 1]
        if missing < 0:
            ones = [i for i, extent in enumerate(am.m.extents) if extent == 1]
            if len(ones) < -missing:
                return "a part without products has more digits than the others"
            kept = sorted((*kept, *ones[-missing:]))
            missing = 0
        else:
            kept = list(range(len(am.m.extents)))
        m = (1,) * missing + tuple(am.m.extents[i] for i in kept)
        d, *operands = (replace(t, m_strides=(0,) * missing + tuple(t.m_strides[i] for i in kept)) for t in targets)
        k = tuple(1 for _ in first.k.extents[1:]) + (min(first.k.extents[-1], tile_k),)
        result.append(replace(first, m=IndexSpace(m), k=IndexSpace(k), d=d, operands=tuple(operands)))
    return tuple(result)


def beyond(boxes: Boxes) -> Boxes:
    """Boxes that lie outside of the tensor and bring zeros."""
    *inner, last = boxes.coordinates
    return replace(boxes, coordinates=(*inner, last + Sum(boxes.map.dims[-1])))


def _merge_jointly(spaces: Spaces) -> list[tuple[tuple[int, ...], list[tuple[int, ...]]]]:
    """affine_tiling.merge for (extents, weights) of several members at once: digits go, or become one, where they may in all."""
    kept: list[list[tuple[int, list[int]]]] = []  # a digit: (extent, column of weights) of each member
    for i in range(len(spaces[0][0])):
        digit = [(extents[i], [w[i] for w in weights]) for extents, weights in spaces]
        if all(extent == 1 for extent, _ in digit):
            continue
        if kept and all(1 in (e0, e1) or all(w0 == e1 * w1 for w0, w1 in zip(c0, c1, strict=True))
                        for (e0, c0), (e1, c1) in zip(kept[-1], digit, strict=True)):
            kept[-1] = [(e0 * e1, c1 if e1 > 1 else c0) for (e0, c0), (e1, c1) in zip(kept[-1], digit, strict=True)]
        else:
            kept.append(digit)
    if not kept:
        return [((1,), [(0,) for _ in weights]) for _, weights in spaces]
    return [(tuple(digit[j][0] for digit in kept), [tuple(digit[j][1][w] for digit in kept) for w in range(len(spaces[j][1]))])
            for j in range(len(spaces))]


def joint_digits(members: Sequence[AffineMatmul]) -> tuple[Digits, ...] | str:
    """merged_digits of every member, all with the same numbers of digits and bounds; or why they have none."""
    if len(members) == 1:
        return (tiling.merged_digits(members[0]),)
    first = members[0]
    for am in members[1:]:
        if (am.n, am.batch, am.epilogue, am.acc, am.math) != (first.n, first.batch, first.epilogue, first.acc, first.math):
            return "its parts differ in more than m, k and places"
        for x, y in ((am.a, first.a), (am.b, first.b)):
            if (x.name, x.dtype, x.align, len(x.bounds)) != (y.name, y.dtype, y.align, len(y.bounds)):
                return "its parts read different operands"
        if len(am.m.extents) != len(first.m.extents) or len(am.k.extents) != len(first.k.extents):
            return "its parts have different numbers of digits"
    # A bound that no member's coordinates can leave costs nothing.
    kept = [[i for i in range(len(first.a.bounds))
             if not all(tiling._always_inside(am.a.bounds[i], am.m.extents, am.k.extents) for am in members)],
            [i for i in range(len(first.b.bounds))
             if not all(tiling._always_inside(am.b.bounds[i], am.n.extents, am.k.extents) for am in members)]]

    def bounds(am: AffineMatmul, operand: int) -> list[Bound]:
        return [(am.a, am.b)[operand].bounds[i] for i in kept[operand]]

    def targets(am: AffineMatmul) -> tuple[Target, ...]:
        return (am.d, *am.operands)

    k = _merge_jointly([(am.k.extents, [am.a.k_strides, am.b.k_strides, *(b.k_coefs for i in (0, 1) for b in bounds(am, i))])
                        for am in members])
    batched = [(am.a.batch_strides, am.b.batch_strides, *(t.batch_strides for t in targets(am))) for am in members]
    batch = _merge_jointly([(am.batch.extents, [tiling._padded(strides, am.batch) for strides in s])
                            for am, s in zip(members, batched, strict=True)])
    a_rows = _merge_jointly([(am.m.extents, [am.a.row_strides, *(b.row_coefs for b in bounds(am, 0))]) for am in members])
    b_rows = _merge_jointly([(am.n.extents, [am.b.row_strides, *(b.row_coefs for b in bounds(am, 1))]) for am in members])
    out_m = _merge_jointly([(am.m.extents, [t.m_strides for t in targets(am)]) for am in members])
    out_n = _merge_jointly([(am.n.extents, [t.n_strides for t in targets(am)]) for am in members])

    result = []
    for j, am in enumerate(members):
        operands = []
        for i, (source, (rows, row_weights)) in enumerate(((am.a, a_rows[j]), (am.b, b_rows[j]))):
            k_coefs = k[j][1][2 + (len(kept[0]) if i else 0):]
            merged = tuple(replace(b, row_coefs=w, k_coefs=c) for b, w, c in zip(bounds(am, i), row_weights[1:], k_coefs, strict=False))
            operands.append(Operand(source, rows, row_weights[0], k[j][1][i], batch[j][1][i], merged))
        placed = tuple(replace(t, m_strides=m, n_strides=n, batch_strides=b)
                       for t, m, n, b in zip(targets(am), out_m[j][1], out_n[j][1], batch[j][1][2:], strict=True))
        result.append(Digits(k[j][0], batch[j][0], operands[0], operands[1], out_m[j][0], out_n[j][0], placed))
    return tuple(result)


def joint_boxes(members: Sequence[Boxes]) -> tuple[Boxes, ...] | str:
    """The same boxes with equally many dimensions, their coordinates sums of the same digits (coefficient 0 where one is not needed)."""
    if len(members) == 1:
        return tuple(members)
    if len({(b.major, len(b.rows), len(b.offsets), b.map.corners is None) for b in members}) != 1:
        return "its parts are fetched in different ways"
    rank = max(len(b.coordinates) for b in members)
    is_im2col = members[0].map.corners is not None
    if is_im2col and any(len(b.coordinates) != rank for b in members):
        return "its im2col maps have different ranks"

    def joint(sums: Sequence[tuple[Sum, ...]]) -> list[tuple[Sum, ...]]:
        names = [tuple(dict.fromkeys(t for s in position for t, _ in s.terms)) for position in zip(*sums, strict=True)]
        return [tuple(Sum(s.base, tuple((n, dict(s.terms).get(n, 0)) for n in ns)) for s, ns in zip(own, names, strict=True))
                for own in sums]

    padding = [rank - len(b.coordinates) for b in members]
    coordinates = joint([(*b.coordinates, *(Sum() for _ in range(extra))) for b, extra in zip(members, padding, strict=True)])
    offsets = joint([b.offsets for b in members])
    maps = [b.map if not extra else replace(b.map, dims=(*b.map.dims, *(1,) * extra), box=(*b.map.box, *(1,) * extra),
                                            strides=(*b.map.strides, *(16,) * extra)) for b, extra in zip(members, padding, strict=True)]
    return tuple(replace(b, map=m, coordinates=c, offsets=o) for b, m, c, o in zip(members, maps, coordinates, offsets, strict=True))
