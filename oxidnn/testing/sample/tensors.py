"""Random descriptions of tensors: packed in either layout, with gaps, permuted, reversed, broadcast, misaligned."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...dtypes import DType
from ...tensor import TensorDesc, packed_strides


def random_desc(rng: np.random.Generator, kind: DType, shape: Sequence[int], *, is_output: bool = False,
                is_dense: bool = False) -> TensorDesc:
    """A description of `shape`; outputs never have two elements in one place. is_dense: packed channels last, aligned to 16 bytes."""
    shape = tuple(int(n) for n in shape)
    if is_dense:
        return TensorDesc.packed(kind, shape, "nhwc" if len(shape) > 2 else "nchw")
    rank = len(shape)
    draw = rng.random()
    if draw < 0.4:
        desc = TensorDesc.packed(kind, shape, "nchw")
    elif draw < 0.7:
        desc = TensorDesc.packed(kind, shape, "nhwc" if rank > 2 else "nchw")
    else:
        order = tuple(int(i) for i in (rng.permutation(rank) if draw < 0.8 else range(rank)))
        roomy = tuple(max(n, 1) + int(rng.integers(0, 3)) for n in shape)
        strides = list(packed_strides(roomy, order))
        axis = int(rng.integers(rank)) if rank else 0
        if draw > 0.97 and rank and not is_output:
            strides[axis] = 0
        elif draw > 0.94 and rank:
            strides[axis] = -strides[axis]
        desc = TensorDesc(kind, shape, tuple(strides))
    aligns = [a for a in (2, 4, 8) if a >= kind.num_bytes]
    align = int(rng.choice(aligns)) if aligns and rng.random() < 0.25 else 16
    return TensorDesc(desc.dtype, desc.shape, desc.strides, align)
