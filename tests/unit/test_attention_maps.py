"""What tensor maps can describe of attention's operands."""

from __future__ import annotations

import pytest

from oxidnn.dtypes import BF16
from oxidnn.engines.attention_maps import head_map, map_fault
from oxidnn.tensor import TensorDesc

SHAPE = (2, 3, 5, 16)


@pytest.mark.parametrize(("strides", "align", "fault"), [
    ((240, 80, 16, 1), 16, ""), ((240, 16, 48, 1), 16, ""), ((240, 80, 16, 1), 8, "aligned to 8"), ((240, 80, 1, 5), 16, "columns"),
    ((252, 84, 17, 1), 16, "stride of 504"), ((240, 0, 16, 1), 16, "stride of 0"), ((240, -80, 16, 1), 16, "stride of -160"),
    ((1 << 40, 80, 16, 1), 16, "stride of 2199023255552")])
def test_faults(strides: tuple[int, ...], align: int, fault: str) -> None:
    found = map_fault(TensorDesc(BF16, SHAPE, strides, align))
    assert fault in found if fault else found == ""


def test_boxes() -> None:
    spec = head_map(TensorDesc(BF16, (1, 3, 5, 16), (7, 16, 48, 1)), 64, length=4)  # the batch's stride is never taken
    assert (spec.dims, spec.strides, spec.box) == ((16, 4, 3, 1), (96, 32, 16), (64, 64, 1, 1))
