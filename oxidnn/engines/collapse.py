"""Collapsing dimensions: the fewest digits that address every operand of an index space."""

from __future__ import annotations

from collections.abc import Sequence


def collapse(extents: Sequence[int], strides: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]:
    """The index space with dimensions of size 1 dropped and neighbours merged where every operand allows.

    extents: sizes, outermost first. strides: one row of element strides an operand. Two neighbours merge when, for every operand, the
    outer stride is the inner stride times the inner extent. An empty result is the space of one point.
    """
    kept = [i for i, n in enumerate(extents) if n != 1]
    sizes: list[int] = []
    rows: list[list[int]] = [[] for _ in strides]
    for i in kept:
        if sizes and all(row[-1] == s[i] * extents[i] for row, s in zip(rows, strides, strict=True)):
            sizes[-1] *= extents[i]
            for row, s in zip(rows, strides, strict=True):
                row[-1] = s[i]
        else:
            sizes.append(extents[i])
            for row, s in zip(rows, strides, strict=True):
                row.append(s[i])
    return tuple(sizes), tuple(tuple(row) for row in rows)


def by_stride(extents: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """The order of the dimensions that walks memory from far to near: largest stride first, broadcast ones outermost."""
    return tuple(sorted(range(len(extents)), key=lambda i: (strides[i] != 0 and extents[i] > 1, -abs(strides[i]))))
