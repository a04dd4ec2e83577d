"""Which tensors have two elements in one place, against the definition."""

from __future__ import annotations

import numpy as np
import pytest

from oxidnn.dtypes import F32
from oxidnn.tensor import TensorDesc, packed_strides


def offsets(desc: TensorDesc) -> np.ndarray:
    grids = np.indices(desc.shape).reshape(desc.rank, desc.numel)
    return np.asarray(desc.strides, np.int64) @ grids


def test_small_tensors_against_the_definition() -> None:
    rng = np.random.default_rng(0)
    verdicts = []
    for _ in range(3000):
        rank = int(rng.integers(1, 5))
        shape = tuple(int(n) for n in rng.integers(1 if rng.random() < 0.95 else 0, 6, rank))
        strides = tuple(int(s) for s in rng.integers(-3, 30, rank))
        if rng.random() < 0.5:
            roomy = tuple(n + int(rng.integers(0, 2)) for n in shape)
            strides = tuple(int(rng.choice([-1, 1])) * s for s in packed_strides(roomy, tuple(rng.permutation(rank))))
        desc = TensorDesc(F32, shape, strides)
        verdicts.append(desc.is_injective)
        assert verdicts[-1] == (len(np.unique(offsets(desc))) == desc.numel), desc
    assert 300 < sum(verdicts) < 2700


@pytest.mark.parametrize(("shape", "strides", "is_injective"), [
    ((1 << 20, 1 << 20), (1 << 20, 1), True), ((1 << 20, 1 << 20), ((1 << 20) - 1, 1), False), ((1 << 20, 1 << 20), (1, 1 << 21), True),
    ((64, 256, 1000, 1000), (256_000_000, 1, 256_000, 256), True), ((1 << 30, 2), (2, (1 << 31) - 1), True),
    ((1 << 30, 2), (2, 1 << 30), False), ((1 << 30, 3), (2, 1), False), ((5, 1 << 40), (0, 1), False), ((1, 1 << 40), (0, 1), True),
    ((1000, 1000, 1000), (1, 1001, 999), False),
])
def test_large_tensors_need_no_list_of_elements(shape: tuple[int, ...], strides: tuple[int, ...], is_injective: bool) -> None:
    assert TensorDesc(F32, shape, strides).is_injective == is_injective
