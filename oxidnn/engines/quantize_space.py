"""How quantisation walks over numbers, codes and scales: every dimension as digits of which each moves all of them evenly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ops.quantize import QuantizeProblem
from ..tensor import TensorDesc
from .collapse import by_stride
from .digits import Digits, ceil_div

# QLoRA's quantiles of the normal distribution (Dettmers et al., 2023), as f32 holds them
NF4 = (-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
       -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
       0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0)


@dataclass(frozen=True, slots=True)
class Digit:
    """Of the index of one dimension: what a step adds to the index, and to that of scales along the dimension (in the layout 128x4, to the
    place of a scale). inner: within a block."""

    dim: int
    extent: int
    weight: int
    scale_weight: int = 0
    inner: bool = False


@dataclass(frozen=True)
class Space:
    """digits: of all dimensions. ragged: those whose digits reach beyond the extent, so that indices have to be compared with it."""

    problem: QuantizeProblem
    digits: tuple[Digit, ...]
    ragged: tuple[int, ...]

    @staticmethod
    def of(problem: QuantizeProblem, scale: TensorDesc | None) -> Space:
        digits: list[Digit] = []
        ragged = []
        rank = len(problem.shape)
        for dim, n in enumerate(problem.shape):
            block = problem.blocks[dim] if problem.blocks else n
            if problem.swizzled and scale is not None and dim >= rank - 2:
                # tiles of 128 by 4 scales, one after the other: 32 rows of 16, in each 4 times 4
                rows, columns = scale.shape[-2:]
                if dim == rank - 1:
                    found = [Digit(dim, columns // 4, 4 * block, 512), Digit(dim, 4, block, 1), Digit(dim, block, 1, 0, True)]
                    count = columns * block
                else:
                    found = [Digit(dim, rows // 128, 128, 128 * columns), Digit(dim, 4, 32, 4), Digit(dim, 32, 1, 16)]
                    count = rows
            elif block >= n:
                found, count = [Digit(dim, n, 1, 0, True)], n
            elif block == 1:
                found, count = [Digit(dim, n, 1, 1)], n
            else:
                found, count = [Digit(dim, ceil_div(n, block), block, 1), Digit(dim, block, 1, 0, True)], ceil_div(n, block) * block
            digits += found
            if count != n:
                ragged.append(dim)
        return Space(problem, tuple(digits), tuple(ragged))

    def half_steps(self, digit: Digit, desc: TensorDesc, packed: bool) -> int:
        """Half bytes from one index of a digit to the next; packed: codes of four bits, two to a byte along the last dimension."""
        step = desc.strides[digit.dim] * desc.dtype.num_bytes * digit.weight
        return step if packed and digit.dim == len(self.problem.shape) - 1 else 2 * step

    def scale_steps(self, digit: Digit, desc: TensorDesc) -> int:
        """Half bytes from one index of a digit to the next of a tensor that has a number a scale."""
        problem, size = self.problem, 2 * desc.dtype.num_bytes
        if problem.swizzled and digit.dim >= len(problem.shape) - 2:
            return digit.scale_weight * size
        if desc.numel == 1 or digit.dim not in problem.scale_dims:
            return 0
        return desc.strides[problem.scale_dims.index(digit.dim)] * digit.scale_weight * size

    def rows(self, digits: Sequence[Digit], tensors: Mapping[str, TensorDesc], scales: Mapping[str, TensorDesc],
             order: str | None = None) -> Digits:
        """The digits with half bytes a step for `tensors`, of numbers or codes, and `scales`, of a number a scale; and what a step adds to
        the index of every ragged dimension (at<dim>) and to that of all elements (index), both doubled. order: the operand that moves
        least along the last ones."""
        problem = self.problem
        codes = problem.codes
        strides = {n: tuple(self.half_steps(d, desc, n == codes and problem.kind.is_packed) for d in digits) for n, desc in tensors.items()}
        strides |= {n: tuple(self.scale_steps(d, desc) for d in digits) for n, desc in scales.items()}
        logical = TensorDesc.packed(problem.desc(problem.wide).dtype, problem.shape).strides
        strides["index"] = tuple(2 * logical[d.dim] * d.weight for d in digits)
        strides |= {f"at{dim}": tuple(2 * d.weight if d.dim == dim else 0 for d in digits) for dim in self.ragged}
        indices = list(range(len(digits)))
        if order is not None:
            indices = list(by_stride([d.extent for d in digits], strides[order]))
        chosen = [digits[i] for i in indices]
        return Digits(tuple(f"i{i}" for i in indices), tuple(d.extent for d in chosen),
                      {n: tuple(row[i] for i in indices) for n, row in strides.items()})


def halved(digits: Digits) -> Digits:
    """Half bytes as bytes."""
    return Digits(digits.names, digits.extents, {n: tuple(s // 2 for s in row) for n, row in digits.strides.items()})


def moves_packs(desc: TensorDesc, steps: Sequence[int], extents: Sequence[int], own_step: int, piece_halves: int, whole: int) -> bool:
    """Whether `piece_halves` half bytes lie side by side, aligned for moves of up to 16 bytes. steps: half bytes of the other digits;
    own_step: of one element; whole: what own_step is where they lie side by side."""
    piece = min(16, piece_halves // 2)
    return (own_step == whole and piece_halves % 2 == 0 and piece > 0 and desc.align % piece == 0
            and all(s % (2 * piece) == 0 for s, n in zip(steps, extents, strict=True) if n > 1))


def nf4_cells() -> tuple[tuple[float, int], ...]:
    """Of the cells round(32 v + 32), v in [-1, 1]: the middle of two numbers of NF4 that lies there (the largest f32 that is not above it,
    which what is nearer to the larger number exceeds), or 2, and the code before it."""
    import numpy as np

    numbers = np.array(NF4, np.float32).astype(np.float64)
    exact = (numbers[1:] + numbers[:-1]) / 2
    near = exact.astype(np.float32)
    middles = np.where(near > exact, np.nextafter(near, np.float32(-2)), near)
    found = []
    for cell in range(65):
        low, high = (cell - 32.5) / 32, (cell - 31.5) / 32
        inside = [float(m) for m in middles if low < m < high]
        found.append((inside[0] if inside else 2.0, int((middles < low).sum())))
    return tuple(found)


def known_shifts(digits: Digits) -> dict[str, int]:
    """log2 of the extents that kernels are made for: powers of two, and few values; the first digit needs none."""
    return {name: n.bit_length() - 1 for name, n in zip(digits.names[1:], digits.extents[1:], strict=True) if n <= 128 and n & (n - 1) == 0}


def near_operands(digits: Digits) -> tuple[str, ...]:
    """Those whose offsets, in bytes, have 32 bits."""
    return tuple(name for name, row in digits.strides.items()
                 if sum(abs(s) * (n - 1) for s, n in zip(row, digits.extents, strict=True)) < 2**31)
