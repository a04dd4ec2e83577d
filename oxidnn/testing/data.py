"""Values and memory for problems: random inputs in the storage type, and buffers laid out as a TensorDesc says, poisoned around."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ..dtypes import DType, dtype
from ..ops.base import Problem
from ..runtime.backend import POISON
from ..tensor import TensorDesc
from .sample import FILLS


def to_storage(values: np.ndarray, kind: DType) -> np.ndarray:
    """`values` rounded to the storage type (to nearest even, saturating where the type has no infinity)."""
    if kind.name == "e4m3":
        values = np.clip(values, -kind.max, kind.max)
    if kind.name == "bf16" and values.dtype == np.float64:
        values = values.astype(np.float32)
    return values.astype(kind.numpy)


def random_inputs(problem: Problem, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Inputs of the problem in storage types: what FILLS says, else standard normal floats and small integers."""
    arrays = {}
    for operand in problem.inputs:
        fill = FILLS.get((problem.op, operand.name))
        kind, shape = operand.desc.dtype, operand.desc.shape
        if fill is not None:
            values = np.asarray(fill(rng, problem))
        elif kind.is_float:
            values = rng.standard_normal(shape)
        elif kind.kind == "bool":
            values = rng.integers(0, 2, shape)
        else:
            values = rng.integers(0 if kind.kind == "uint" else -8, 9, shape)
        for axis, stride in enumerate(operand.desc.strides):
            if stride == 0 and shape[axis] > 1:  # one element stands for the whole dimension
                values = np.broadcast_to(values.take([0], axis), shape)
        arrays[operand.name] = to_storage(values, kind)
    return arrays


def random_scalars(problem: Problem, rng: np.random.Generator) -> dict[str, float]:
    """The numbers given with a call, as their types hold them: what FILLS says, else floats around 1 and integers of every size."""
    values = {}
    for scalar in problem.scalars:
        kind = dtype(scalar.type)
        fill = FILLS.get((problem.op, scalar.name))
        if fill is not None:
            values[scalar.name] = fill(rng, problem)
        elif kind.is_float:
            values[scalar.name] = rng.uniform(0.25, 1.5)
        else:
            values[scalar.name] = int(rng.integers(0, int(kind.max), endpoint=True, dtype=np.uint64)) >> int(rng.integers(kind.bits))
    return stored_scalars(problem, values)


def stored_scalars(problem: Problem, scalars: Mapping[str, float]) -> dict[str, float]:
    """The given numbers rounded to the types that the problem's scalars have: what the kernels see."""
    return {s.name: dtype(s.type).numpy.type(scalars[s.name]).item() for s in problem.scalars}


class Buffer:
    """Host bytes in which a tensor of `desc` lies: poisoned, with guard bytes around, its address off by what desc.align says."""

    GUARD = 256

    def __init__(self, desc: TensorDesc, values: np.ndarray | None = None) -> None:
        self.desc = desc
        size = desc.dtype.num_bytes
        low, high = desc.offset_range
        self.base = self.GUARD + max(0, -low) * size
        self.base += -self.base % 256 + (desc.align if desc.align < 16 else 0)  # e.g. align 4: address is 4 modulo 16
        self.bytes = np.full(self.base + (max(high, -1) + 1) * size + self.GUARD, POISON, np.uint8)
        if values is not None and desc.numel:
            self._strided(self.bytes)[...] = values.view(_carrier(size)) if values.dtype.itemsize == size else values

    def _strided(self, raw: np.ndarray) -> np.ndarray:
        size = self.desc.dtype.num_bytes
        flat = raw[self.base:]
        low, _ = self.desc.offset_range
        flat = raw[self.base + low * size:]
        view = np.frombuffer(flat, np.uint8)[: (len(flat) // size) * size].view(_carrier(size))
        return np.lib.stride_tricks.as_strided(view[-low:], self.desc.shape, tuple(s * size for s in self.desc.strides), writeable=True)

    def read(self, raw: np.ndarray) -> np.ndarray:
        """The tensor's values out of `raw`, bytes of the same extent as self.bytes."""
        if self.desc.numel == 0:
            return np.zeros(self.desc.shape, self.desc.dtype.numpy)
        return np.ascontiguousarray(self._strided(raw)).view(self.desc.dtype.numpy).reshape(self.desc.shape)

    def untouched_outside(self, raw: np.ndarray) -> bool:
        """True if every byte that is no element of the tensor still holds what it held."""
        mask = np.zeros(len(self.bytes), np.uint8)
        if self.desc.numel:
            self._strided(mask)[...] = np.array(-1, np.int64).astype(_carrier(self.desc.dtype.num_bytes))
        outside = mask == 0
        return bool((raw[outside] == self.bytes[outside]).all())


def _carrier(num_bytes: int) -> np.dtype:
    return np.dtype({1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}[num_bytes])
