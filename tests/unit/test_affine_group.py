"""Joint digits of a group: every member keeps its addresses and bounds, and all have digits of the same numbers."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from oxidnn.engines.affine_group import joint_boxes, joint_digits, with_products
from oxidnn.engines.affine_tma import Boxes
from oxidnn.engines.affine_wgmma_sm90 import plan_operands
from oxidnn.engines.matmul import lower_group
from oxidnn.ops.case import parse_case

LINES = (
    "conv_dgrad dy=bf16[2,64,5,5]nhwc w=bf16[64,72,3,3]nhwc x_shape=(2,72,9,10) padding=1 stride=2",
    "conv_dgrad dy=bf16[2,64,3,5]nhwc w=bf16[64,72,3,3]nhwc x_shape=(2,72,9,10) padding=1 stride=(3,2)",
    "conv_dgrad dy=bf16[3,128,9,9]nhwc w=bf16[128,72,1,1]nhwc x_shape=(3,72,18,18) stride=2",
    "conv_dgrad dy=f16[2,128,5]nhwc w=f16[128,40,3]nhwc x_shape=(2,40,9) padding=1 stride=2",
    "conv_dgrad dy=bf16[1,64,3,3,3]nhwc w=bf16[64,72,3,3,3]nhwc x_shape=(1,72,5,5,6) padding=1 stride=2",
)


def digits_of(index: int, extents: Sequence[int]) -> list[int]:
    digits = []
    for extent in reversed(extents):
        digits.append(index % extent)
        index //= extent
    return digits[::-1]


def dot(index: int, extents: Sequence[int], weights: Sequence[int]) -> int:
    return sum(d * w for d, w in zip(digits_of(index, extents), weights, strict=True))


@pytest.mark.parametrize("line", LINES)
def test_members_keep_their_places(line: str) -> None:
    group = lower_group(parse_case(line))
    assert group is not None
    members = with_products(group.members, 64)
    assert not isinstance(members, str), members
    joint = joint_digits(members)
    assert not isinstance(joint, str), joint
    shapes = {(len(d.k), len(d.batch), len(d.a.rows), len(d.b.rows), len(d.out_m), len(d.out_n), len(d.a.bounds)) for d in joint}
    assert len(shapes) == 1 and len(joint) > 1
    for am, d in zip(members, joint, strict=True):
        for m in range(0, am.m.size, 3):
            assert dot(m, am.m.extents, am.a.row_strides) == dot(m, d.a.rows, d.a.row_strides)
            assert dot(m, am.m.extents, am.d.m_strides) == dot(m, d.out_m, d.targets[0].m_strides)
        for k in range(0, am.k.size, 5):
            assert dot(k, am.k.extents, am.a.k_strides) == dot(k, d.k, d.a.k_strides)
            assert dot(k, am.k.extents, am.b.k_strides) == dot(k, d.k, d.b.k_strides)
        for m in range(0, am.m.size, 7):
            for k in range(0, am.k.size, 31):
                def exists(bounds: Sequence, rows: Sequence[int], ks: Sequence[int], m: int = m, k: int = k) -> bool:
                    return all(0 <= b.offset + dot(m, rows, b.row_coefs) + dot(k, ks, b.k_coefs) < b.extent for b in bounds)

                assert exists(am.a.bounds, am.m.extents, am.k.extents) == exists(d.a.bounds, d.a.rows, d.k)


@pytest.mark.parametrize("line", LINES)
def test_boxes_have_the_same_sums(line: str) -> None:
    """Joint boxes name the same digits in the same order, and each member's sums keep their values."""
    group = lower_group(parse_case(line))
    assert group is not None
    joint = joint_digits(with_products(group.members, 64))  # type: ignore[arg-type]
    planned = [plan_operands(d, (128, 64, 64)) for d in joint]  # type: ignore[arg-type]
    for operand in (1, 2):
        before = [found[operand] for found in planned]
        assert all(isinstance(b, Boxes) for b in before)
        after = joint_boxes(before)  # type: ignore[arg-type]
        assert not isinstance(after, str), after
        assert len({tuple(tuple(n for n, _ in s.terms) for s in b.coordinates + b.offsets) for b in after}) == 1
        assert len({len(b.map.dims) for b in after}) == 1
        for old, new in zip(before, after, strict=True):
            common = len(old.coordinates)  # type: ignore[union-attr]
            pairs = [*zip(old.coordinates, new.coordinates[:common], strict=True),  # type: ignore[union-attr]
                     *zip(old.offsets, new.offsets, strict=True)]  # type: ignore[union-attr]
            for x, y in pairs:
                assert x.base == y.base and dict(x.terms) == {n: c for n, c in y.terms if c or n in dict(x.terms)}
