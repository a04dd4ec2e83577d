"""The affine matmul: one statement of GEMM and of convolution in all its directions, which every matrix engine executes.

    D[b, m, n] = epilogue( sum over k of A[b, m, k] * B[b, n, k], operands at (b, m, n) )

b, m, n and k are linear indices of index spaces, mixed-radix numbers whose digits have meaning (for a convolution's m: image,
row, column). Where an element lies in memory is affine in the digits:

    address(A, m, k) = base + sum_i m_i * row_strides[i] + sum_i k_i * k_strides[i] + sum_i b_i * batch_strides[i]

and an element outside the source (padding) is zero: for each Bound,

    0 <= offset + sum_i m_i * row_coefs[i] + sum_i k_i * k_coefs[i] < extent.

So fprop, dgrad (each parity class of the stride is a unit-stride convolution over a sublattice), wgrad and GEMM differ only in
numbers, and any strides, layout, group count and number of spatial dimensions come for free.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import prod

from ..codegen.pointwise import Expression
from ..dtypes import DType


@dataclass(frozen=True, slots=True)
class IndexSpace:
    """Extents of the digits of a linear index, most significant first; an empty tuple is the space of one point."""

    extents: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        return prod(self.extents)


@dataclass(frozen=True, slots=True)
class Bound:
    """The element exists iff 0 <= offset + row_digits . row_coefs + k_digits . k_coefs < extent."""

    row_coefs: tuple[int, ...]
    k_coefs: tuple[int, ...]
    offset: int
    extent: int


@dataclass(frozen=True, slots=True)
class Source:
    """A or B: operand name, type, strides in elements per digit, and the bounds outside of which elements are zero."""

    name: str
    dtype: DType
    row_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    batch_strides: tuple[int, ...] = ()
    base: int = 0
    bounds: tuple[Bound, ...] = ()
    align: int = 16  # bytes that divide the operand's address (not counting base)


@dataclass(frozen=True, slots=True)
class Target:
    """D, or an epilogue operand (bias: strides 0 but along n; residual: as D): strides in elements per digit of b, m and n.

    tensor: the operand's name, where `name`, by which the epilogue knows it, is another.
    """

    name: str
    dtype: DType
    m_strides: tuple[int, ...]
    n_strides: tuple[int, ...]
    batch_strides: tuple[int, ...] = ()
    base: int = 0
    align: int = 16
    tensor: str = ""


@dataclass(frozen=True, slots=True)
class Ragged:
    """Groups whose sizes are known on the device only. side "m": rows of A in turn belong to groups, each with a B of its own,
    b_stride elements apart; rows of no group are rows of zeros. side "k": terms in turn belong to groups, the batch counts groups, and
    a group's sum is over its own terms.

    sizes: operand of `count` integers, `step` elements apart, the size of each group or (is_cumulative) where it ends. Sizes below 0
    are 0, and what lies beyond the last row or term does not exist.
    """

    side: str
    sizes: str
    dtype: DType
    count: int
    step: int
    is_cumulative: bool
    b_stride: int = 0


THROUGH_INPUT = "expressions over its input (igemm_simt, igemm_mma_sm80, direct and prologue_apart do)"  # in refusals


@dataclass(frozen=True, slots=True)
class Prologue:
    """What is multiplied in the place of A's (side "a") or B's elements: an expression over "x", the element, and the names of operands,
    whose strides are over the digits of that side. Elements outside the bounds stay zero. Algorithms that stage it round it to x's type."""

    side: str
    expression: Expression
    operands: tuple[Source, ...]


@dataclass(frozen=True, slots=True)
class AffineMatmul:
    """One matmul over index spaces. `acc` is the accumulator's type; `epilogue` an Expression over "acc" and the operands' names,
    None for a plain conversion. `math` is the policy's word for f32 inputs ("ieee", "tf32", "tf32x3", ...).

    What not every algorithm takes: scale_a and scale_b (f32, strides over the digits of A and B), with which each product is multiplied;
    up, a second operand B, whose sum the epilogue knows as "up"; aux, where the epilogue's second output goes; ragged, groups of rows or
    terms; zero_a and zero_b (strides over the digits of A and B), which are taken from the integers that exist; addend, the one of
    `operands` (s32) that is added to the sum of integers; prologue, what becomes of elements before they are multiplied. Integers are
    summed in s32, and turned into f32 for an epilogue or a D of floats.

    moments: the means of D's columns over blocks of rows, and the squares about these (f32), go to the workspace as
    [batch][column][block][mean, squares], with blocks of as many rows as the algorithm says (moments_block). amax: the epilogue has a
    second output, and the largest size of it is raised in the tensor "amax" (f32), zero before: the same bits in any order.
    """

    m: IndexSpace
    n: IndexSpace
    k: IndexSpace
    a: Source
    b: Source
    d: Target
    acc: DType
    batch: IndexSpace = field(default=IndexSpace())
    epilogue: Expression | None = None
    operands: tuple[Target, ...] = ()
    math: str = "ieee"
    scale_a: Source | None = None
    scale_b: Source | None = None
    up: Source | None = None
    aux: Target | None = None
    ragged: Ragged | None = None
    zero_a: Source | None = None
    zero_b: Source | None = None
    addend: str = ""
    prologue: Prologue | None = None
    moments: bool = False
    amax: bool = False

    @property
    def flops(self) -> int:
        batch = 1 if self.ragged is not None else self.batch.size
        return 2 * batch * self.m.size * self.n.size * self.k.size * (2 if self.up else 1)

    @property
    def has_one_result(self) -> bool:
        """One sum, one output."""
        return self.up is None and self.aux is None

    @property
    def extras(self) -> dict[str, str]:
        """What not every algorithm takes: attribute by which one says so, and its name in words."""
        found = {"takes_scales": ("block scales", self.scale_a or self.scale_b), "takes_gates": ("gates", self.up),
                 "takes_aux": ("second outputs", self.aux), "takes_ragged": ("groups of unknown sizes", self.ragged),
                 "takes_zeros": ("zero points", self.zero_a or self.zero_b),
                 "takes_addend": ("integers on top of sums", self.addend or None),
                 "takes_prologue": (THROUGH_INPUT, self.prologue), "takes_amax": ("largest sizes of results", self.amax or None)}
        return {attribute: words for attribute, (words, value) in found.items() if value is not None}


@dataclass(frozen=True, slots=True)
class MatmulGroup:
    """Matmuls that write parts of one output and may run as one launch: alike but for m, k, strides, bases and bounds."""

    members: tuple[AffineMatmul, ...]

    @property
    def flops(self) -> int:
        return sum(am.flops for am in self.members)
