"""Convolution by explicit im2col: the image's windows are written out as a matrix in the workspace, and a plain product follows.

Any direction and number of dimensions: of each affine matmul that a convolution is, the operand that the image's windows (dgrad: those of
dy) are becomes dense, zeros where it lay in padding. The matrix takes as many bytes as windows have taps; it is made whole, once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.conv import ConvProblem
from ..ops.gemm import FP8
from ..tensor import packed_strides
from .affine import AffineMatmul, IndexSpace, Source
from .affine_direct import DIRECT
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .composition import following, relocated
from .digits import DigitConsts, Digits, ceil_div
from .matmul import ALGORITHMS, Algorithm, lower

_THREADS = 256
INDEX_LIMIT = 2**31
_NAME = "im2col"


@dataclass(frozen=True, slots=True)
class Im2colConsts:
    """Packs of `vector` elements of `size` bytes; bounds: how many coordinates an element has that must lie within an extent; has_fill:
    what lies outside is the byte at ptr_fill, not zero."""

    size: int
    vector: int
    digits: DigitConsts
    bounds: int
    has_fill: bool = False


@dataclass(frozen=True)
class Windows:
    """The operand of `am` that is written out, "a" or "b". fill: the operand of one byte that padding stands for, "" for zero."""

    am: AffineMatmul
    side: str
    fill: str = ""

    @property
    def source(self) -> Source:
        return self.am.a if self.side == "a" else self.am.b

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.am.m if self.side == "a" else self.am.n).extents

    @property
    def has_rows_innermost(self) -> bool:
        """Whether rows, not terms, are neighbours in the matrix: where they are in the image."""
        steps = [(abs(s), is_row) for strides, extents, is_row in
                 ((self.source.row_strides, self.rows, True), (self.source.k_strides, self.am.k.extents, False))
                 for s, n in zip(strides, extents, strict=True) if n > 1]
        return bool(steps) and min(steps)[1]

    @property
    def batch(self) -> tuple[int, ...]:
        return self.am.batch.extents if self.source.batch_strides else ()

    @property
    def size(self) -> int:
        return prod(self.batch) * prod(self.rows) * self.am.k.size

    @property
    def num_bytes(self) -> int:
        return self.size * self.source.dtype.num_bytes

    @property
    def product(self) -> AffineMatmul:
        """The matmul over the dense operand."""
        rows, k = self.rows, self.am.k.extents
        row_step, k_step = (1, prod(rows)) if self.has_rows_innermost else (prod(k), 1)
        row_strides, k_strides = _times(row_step, packed_strides(rows)), _times(k_step, packed_strides(k))
        batch = _times(prod(rows) * prod(k), packed_strides(self.batch))
        dense = Source(_NAME, self.source.dtype, row_strides, k_strides, batch)
        return replace(self.am, a=dense) if self.side == "a" else replace(self.am, b=dense)

    def step(self, op: str, target: Arg, device: DeviceInfo) -> Step:
        """The launch that writes the matrix."""
        source, size = self.source, self.source.dtype.num_bytes
        outer, inner = (self.am.k.extents, self.rows) if self.has_rows_innermost else (self.rows, self.am.k.extents)
        strides = (source.k_strides, source.row_strides) if self.has_rows_innermost else (source.row_strides, source.k_strides)
        elements = (*source.batch_strides, *strides[0], *strides[1])
        coefs = []
        for bound in source.bounds:
            pair = (bound.k_coefs, bound.row_coefs) if self.has_rows_innermost else (bound.row_coefs, bound.k_coefs)
            coefs.append((*(0 for _ in self.batch), *pair[0], *pair[1]))
        extents = (*self.batch, *outer, *inner) or (1,)
        elements, coefs = elements or (0,), [c or (0,) for c in coefs]
        vector = 1
        if elements[-1] == 1 and not any(c[-1] for c in coefs):
            fits = [v for v in (16, 8, 4, 2) if v * size <= 16 and extents[-1] % v == 0 and source.align % (v * size) == 0
                    and not any(s % v for s in (*elements[:-1], source.base))]
            vector = fits[0] if fits else 1
        counts = (*extents[:-1], extents[-1] // vector)
        table = {"source": tuple(s * size for s in (*elements[:-1], elements[-1] * vector))}
        table |= {f"bound{i}": (*c[:-1], c[-1] * vector) for i, c in enumerate(coefs)}
        digits = Digits(tuple(f"i{i}" for i in range(len(counts))), counts, table)
        consts = Im2colConsts(size, vector, digits.consts(), len(coefs), bool(self.fill))
        args = [Arg("ptr_source", "u64", TensorArg(source.name, source.base * size)), target, Arg("num_packs", "u32", digits.size)]
        args += [Arg("ptr_fill", "u64", TensorArg(self.fill))] if self.fill else []
        for i, bound in enumerate(source.bounds):
            args += [Arg(f"first_bound{i}", "s32", bound.offset), Arg(f"extent_bound{i}", "u32", bound.extent)]
        args += digits.args(consts.digits.wide)
        return Step.of("conv/im2col", op, Target.for_arch(device.arch), _THREADS, args, consts, ceil_div(digits.size, _THREADS),
                       suffix=f"{size * vector}")


def _times(step: int, strides: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(step * s for s in strides)


@lru_cache(maxsize=256)
def _windows(p: ConvProblem) -> tuple[Windows, ...]:
    name = p.result if p.direction == "dgrad" else p.image
    found = [Windows(am, "a" if am.a.name == name else "b") for am in lower(p)]
    is_narrow = p.inputs[0].desc.dtype.num_bytes == 1
    return tuple(replace(w, am=_in_order(w.am, w.am.b if w.side == "a" else w.am.a)) if is_narrow else w for w in found)


def _in_order(am: AffineMatmul, other: Source) -> AffineMatmul:
    """k's digits as they lie in the operand that stays where it is: in 8 bits tensor cores take it along k alone, and the matrix is written
    in any order."""
    order = sorted(range(len(am.k.extents)), key=lambda i: -abs(other.k_strides[i]))

    def permuted(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[i] for i in order)

    a, b = (replace(s, k_strides=permuted(s.k_strides), bounds=tuple(replace(x, k_coefs=permuted(x.k_coefs)) for x in s.bounds))
            for s in (am.a, am.b))
    return replace(am, k=IndexSpace(permuted(am.k.extents)), a=a, b=b)


def takers(am: AffineMatmul, device: DeviceInfo) -> list[Algorithm]:
    """The loops that execute the product over the dense operand; sums of 8-bit floats are left to those that do not sum coarsely."""
    return [a for a in ALGORITHMS if a.check(am, device) and all(getattr(a, extra, False) for extra in am.extras)
            and not (am.a.dtype in FP8 and getattr(a, "sums_coarsely", False))]


@lru_cache(maxsize=256)
def chosen(am: AffineMatmul, device: DeviceInfo) -> tuple[Algorithm, EngineConfig, float]:
    """Who executes the product over the dense operand, and its estimate."""
    if not am.k.size:
        return DIRECT, DIRECT.configs(am, device)[0], 0.0
    found = [(a, config, a.estimate(am, config, device)) for a in takers(am, device) for config in a.configs(am, device)[:1]]
    return min(found, key=lambda choice: choice[2])


class Im2colEngine(Engine):
    """Workspace: the matrix, in the image's type, and what the product takes."""

    takes_aux = True
    takes_amax = True

    def __init__(self, op: str) -> None:
        self.id = f"{op}.im2col"  # type: ignore[misc]
        self.op = op

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        windows = _windows(problem)
        if not any(w.size for w in windows):
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        if any("takes_zeros" in w.am.extras for w in windows):
            return refuse("im2col takes no zero points")
        for am in (w.product for w in windows if w.am.extras):  # the direct loop takes all else
            if not takers(am, device):
                return refuse(f"im2col: no loop of {device.arch} takes {' and '.join(am.extras.values())} of {am.a.dtype}")
        if max(w.size for w in windows) >= INDEX_LIMIT:
            return refuse(f"im2col: a matrix of {max(w.size for w in windows)} elements (at most {INDEX_LIMIT - 1})")
        for bound in (b for w in windows for b in w.source.bounds):
            if bound.extent + abs(bound.offset) >= INDEX_LIMIT // 2:
                return refuse("im2col: a coordinate exceeds 31 bits")
        limit = problem.policy.workspace_limit
        if limit is not None and self._bytes(problem, device) > limit:
            return refuse(f"im2col: {self._bytes(problem, device)} bytes of workspace (the limit is {limit})")
        return SUPPORTED

    def _bytes(self, p: ConvProblem, device: DeviceInfo) -> int:
        return self.build_steps(p, EngineConfig(), device).workspace_bytes

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """The matrix written and read, and its product at 0.6 of the peak: cheap to say, as few problems are better served thus."""
        assert isinstance(problem, ConvProblem)
        half = problem.inputs[0].desc.dtype.num_bytes == 2 and device.at_least(8)
        peak = (device.tensor_tflops if half else device.fma_tflops) * 0.6e6
        total = 0.0
        for windows in _windows(problem):
            if device.is_emulated:
                total += 3000.0 + windows.size * 0.2 + windows.am.flops * (0.002 if windows.source.dtype.num_bytes == 1 else 0.01)
            else:
                product_us = max(windows.am.flops / peak, (windows.num_bytes + problem.num_bytes) / (device.bandwidth_gbs * 1e3))
                if problem.inputs[0].desc.dtype.num_bytes == 1:  # which may find nothing but the direct loop
                    product_us = chosen(windows.product, device)[2]
                total += 12.0 + 1.5 * windows.num_bytes / (device.bandwidth_gbs * 0.8e3) + product_us
        return total

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        if problem.is_empty:
            return Build(())
        scratch = Scratch()
        place = scratch.take(max(w.num_bytes for w in _windows(problem)))
        places = {o.name: TensorArg(o.name) for o in problem.operands} | {_NAME: place}
        steps: list[Step] = []
        total = scratch.num_bytes
        for windows in _windows(problem):
            algorithm, config, _ = chosen(windows.product, device)
            build = algorithm.build(self.op, windows.product, config, device, scratch.num_bytes)
            steps += [windows.step(self.op, Arg("ptr_target", "u64", place), device)] if windows.size else []
            steps += [relocated(step, places) for step in build.steps]
            total = max(total, scratch.num_bytes + build.workspace_bytes)
        return Build(tuple(following(steps)), total)


_OPS = ("conv_fprop", "conv_dgrad", "conv_wgrad", "conv_transpose", "conv_transpose_dgrad", "conv_transpose_wgrad")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (Im2colEngine(op),) for op in _OPS}
