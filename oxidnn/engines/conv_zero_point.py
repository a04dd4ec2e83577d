"""Convolution of integers with a zero point of the image, by engines that know of none.

    sum (x - z) w = sum x w - z sum w       over a window of the image padded with z

The image is copied with its padding, channels last; the sums of each filter become what is added to its results. Three launches, two where
nothing is padded.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from ..codegen import pointwise as expr
from ..device import DeviceInfo
from ..dtypes import S32
from ..ops.base import Operand, Problem
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc
from .affine import AffineMatmul, Bound, IndexSpace, Source, Target
from .affine_direct import DIRECT
from .base import Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .composition import following, relocated
from .conv_im2col import INDEX_LIMIT, Windows, chosen
from .matmul import lower

_SUMS = "weight_sums"


@dataclass(frozen=True)
class _PaddedImage(Windows):
    """The image as rows of channels, one a position of the padded image."""

    @property
    def has_rows_innermost(self) -> bool:
        return False


def _is_padded(p: ConvProblem) -> bool:
    return any(any(pair) for pair in p.padding)


@lru_cache(maxsize=256)
def _parts(p: ConvProblem) -> tuple[AffineMatmul, AffineMatmul, _PaddedImage]:
    """The product over the padded image, the sums of the filters (less a bias of integers), and the padded image."""
    x, w = p.desc("x"), p.desc("w")
    shape = (*x.shape[:2], *(e + lo + hi for e, (lo, hi) in zip(x.shape[2:], p.padding, strict=True)))
    padded = TensorDesc.packed(x.dtype, shape, "nhwc") if _is_padded(p) else x
    operands = [Operand(o.name, padded if o.name == "x" else o.desc, o.is_output) for o in p.operands
                if o.name not in ("zero_x", p.addend)]
    operands.insert(2, Operand(_SUMS, TensorDesc.packed(S32, w.shape[:1])))
    (product,) = lower(replace(p, operands=tuple(operands), padding=((0, 0),) * p.spatial, addend=_SUMS))
    zero = Source("zero_x", x.dtype, (), (0,) * (w.rank - 1), align=p.desc("zero_x").align)
    filters = Source("w", w.dtype, w.strides[:1], w.strides[1:], align=w.align)
    bias = [p.desc(p.addend)] if p.addend else []
    sums = AffineMatmul(
        IndexSpace(), IndexSpace(w.shape[:1]), IndexSpace(w.shape[1:]), zero, filters, Target(_SUMS, S32, (), (1,)), S32,
        epilogue=(expr.arg("bias") if bias else expr.const(0)) - expr.acc,
        operands=tuple(Target("bias", S32, (), b.strides, align=b.align) for b in bias))
    spatial = range(p.spatial)
    bounds = tuple(Bound((0, *(int(i == j) for j in spatial)), (0,), -p.padding[i][0], x.shape[i + 2])
                   for i in spatial if any(p.padding[i]))
    rows = Source("x", x.dtype, (x.strides[0], *x.strides[2:]), x.strides[1:2],
                  base=-sum(lo * s for (lo, _), s in zip(p.padding, x.strides[2:], strict=True)), bounds=bounds, align=x.align)
    image = replace(product, m=IndexSpace((shape[0], *shape[2:])), k=IndexSpace(shape[1:2]), batch=IndexSpace(), a=rows)
    return product, sums, _PaddedImage(image, "a", "zero_x")


class ZeroPointEngine(Engine):
    """Workspace: the padded image, a sum of 32 bits a filter, and what the product takes."""

    id = "conv_fprop.zero_point"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ConvProblem)
        if not problem.has("zero_x") or problem.has("zero_w"):
            return refuse("zero_point: takes a zero point of x, and none of w")
        if problem.is_empty or problem.desc("x").numel == 0:
            return refuse("there are no products to sum: the direct engine writes the epilogue of 0")
        product, sums, image = _parts(problem)
        if image.size >= INDEX_LIMIT or max(problem.desc("x").shape) >= INDEX_LIMIT // 2:
            return refuse(f"zero_point: a padded image of {image.size} elements (at most {INDEX_LIMIT - 1})")
        return DIRECT.check(product, device) and DIRECT.check(sums, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ConvProblem)
        product, sums, image = _parts(problem)
        total = chosen(product, device)[2] + DIRECT.estimate(sums, DIRECT.configs(sums, device)[0], device)
        if _is_padded(problem):
            total += 3000.0 + image.size * 0.2 if device.is_emulated else 4.0 + 2 * image.size / (device.bandwidth_gbs * 0.5e3)
        return total

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ConvProblem)
        product, sums, image = _parts(problem)
        scratch = Scratch()
        places = {o.name: TensorArg(o.name) for o in problem.operands} | {_SUMS: scratch.take(4 * problem.desc("w").shape[0])}
        first = DIRECT.build("conv_fprop", sums, DIRECT.configs(sums, device)[0], device, 0)
        steps: list[Step] = [relocated(step, places) for step in first.steps]
        if _is_padded(problem):
            copy = scratch.take(image.size)
            steps.append(image.step("conv_fprop", Arg("ptr_target", "u64", copy), device))
            places["x"] = copy
        algorithm, best, _ = chosen(product, device)
        build = algorithm.build("conv_fprop", product, best, device, scratch.num_bytes)
        steps += [relocated(step, places) for step in build.steps]
        return Build(tuple(following(steps)), max(scratch.num_bytes, build.workspace_bytes))


ENGINES: dict[str, tuple[Engine, ...]] = {"conv_fprop": (ZeroPointEngine(),)}
