"""What the loops over quantised weights share: the sums they make, operands they take, factors as arguments, columns of x in order."""

from __future__ import annotations

from functools import lru_cache

from ..codegen import pointwise as expr
from ..device import DeviceInfo
from ..dtypes import BF16, F16, F32
from ..ops.epilogue import align_shape, align_strides
from ..ops.quantized_linear import NIBBLES, QuantizedLinearProblem
from ..tensor import TensorDesc
from . import affine_tiling as tiling
from .affine import AffineMatmul, IndexSpace, Source, Target
from .base import SUPPORTED, Build, Step, Support, TensorArg, WorkspaceArg, refuse
from .composition import Place, relocated
from .matmul import collapse
from .quantized_linear_apart import gather_step

GROUP_UNIT = 32  # k's that one scale covers, and a multiple of it


def x_desc(p: QuantizedLinearProblem) -> TensorDesc:
    """x as the loop reads it: packed, where its columns are put in order first."""
    return TensorDesc.packed(p.desc("x").dtype, p.desc("x").shape) if p.has("permutation") else p.desc("x")


@lru_cache(maxsize=256)
def lower(p: QuantizedLinearProblem) -> AffineMatmul:
    """The sums and what becomes of them: scales of whole rows are part of the epilogue. W counts as elements of one byte along k."""
    x, w, y = x_desc(p), p.desc("w"), p.desc("y")
    value = expr.acc
    targets = [Target("y", y.dtype, y.strides[:-1], y.strides[-1:], (), 0, y.align)]
    if p.groups == 1:
        value = value * expr.arg("scale")
        scale = p.desc("scale")
        targets.append(Target("scale", scale.dtype, (0,) * (y.rank - 1), (p.grid_strides("scale")[0],), (), 0, scale.align))
    for name in p.epilogue.args if p.epilogue is not None else ():
        if name == "acc":
            continue
        assert p.epilogue is not None
        desc = p.desc(name)
        strides = align_strides(desc, align_shape(p.op, name, desc.shape, y.shape, -1, p.epilogue.axis(name)), -1)
        targets.append(Target(name, desc.dtype, strides[:-1], strides[-1:], (), 0, desc.align))
    if p.epilogue is not None:
        value = p.epilogue.substitute({"acc": value})
    k = IndexSpace((p.k,))
    a = Source("x", x.dtype, x.strides[:-1], x.strides[-1:], align=x.align)
    b = Source("w", w.dtype, w.strides[:1], w.strides[1:], align=w.align)
    return collapse(AffineMatmul(IndexSpace(y.shape[:-1]), IndexSpace((p.n,)), k, a, b, targets[0], F32,
                                 epilogue=None if value == expr.acc else value, operands=tuple(targets[1:])))


def check_vectors(p: QuantizedLinearProblem, loop: str) -> Support:
    """f16 or bf16 x and codes in vectors of 16 bytes along k, rows at even distances; groups of a multiple of 32."""
    x, w = x_desc(p), p.desc("w")
    if x.dtype not in (F16, BF16):
        return refuse(f"the {loop} loop takes f16 or bf16 x, not {x.dtype}")
    if p.is_empty or not p.k:
        return refuse("there are no products to sum")
    d = tiling.merged_digits(lower(p))
    if len(d.a.rows) > 1 or tiling.widest_vector(d.a, d.k, d.batch, "k").width < 8:
        return refuse(f"the {loop} loop loads 16 bytes of x along k from rows at even distances; x is {x}")
    step = 32 if p.kind in NIBBLES else 16
    if p.k % step or w.strides[1] != 1 or (p.n > 1 and w.strides[0] % 16) or w.align % 16:
        return refuse(f"the {loop} loop loads 16 bytes of w along k, of {p.k} {p.kind} in {w}")
    if p.groups > 1 and p.group_size % GROUP_UNIT:
        return refuse(f"groups of {p.group_size}; the {loop} loop takes multiples of {GROUP_UNIT}")
    return SUPPORTED


def add_factors(t: tiling.Arguments, p: QuantizedLinearProblem, grouped: bool, zero: str, any_group: bool = True) -> None:
    """Scales of groups and zero points as quantized_linear/numbers' bring_factors reads them. any_group: by (row, group) from an index;
    else by a row's alone, of a kernel whose consts have the distance of groups and their size."""
    if grouped or (zero and any_group):
        t.add("groups", "u32", p.groups)
        if any_group:
            t.divisor("groups", p.groups)
    if grouped:
        if any_group:
            t.add("group_size", "u32", p.group_size)
        t.divisor("group", p.group_size)
    for prefix, name, wanted in (("scale", "scale", grouped), ("zero", "zero_point", bool(zero))):
        if wanted:
            t.add(f"ptr_{prefix}", "u64", TensorArg(name))
            for end, stride in zip(("row", "group") if any_group else ("row",), p.grid_strides(name), strict=False):
                t.add(f"{prefix}_{end}", "s64", stride * p.desc(name).dtype.num_bytes)


def with_columns_ordered(p: QuantizedLinearProblem, step: Step, device: DeviceInfo) -> Build:
    """The loop's launch; where there is a permutation, on columns of x that a launch before puts in order."""
    if not p.has("permutation"):
        return Build((step,))
    ordered = WorkspaceArg(0)
    places: dict[str, Place] = {o.name: TensorArg(o.name) for o in p.operands} | {"x": ordered}
    return Build((gather_step(p, ordered, device), relocated(step, places)), p.desc("x").numel * 2)
