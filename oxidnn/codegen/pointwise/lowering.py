"""From an expression to PTX: a scope that reads the operands' registers and writes the results'."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ... import dtypes
from ...errors import InvalidArgument
from .. import elementary as el
from ..elementary import Emitter
from .expression import COMPUTE_TYPES, TABLE, Expression, int_or_nan


def _lower_cast(e: Emitter, x: str, name: str, t: str) -> str:
    kind = dtypes.dtype(name)
    if kind.kind == "bool":
        is_set = e(f"setp.{'neu' if t[0] == 'f' else 'ne'}.{t}", x, 0.0)
        return el.select(e, is_set, el.literal(1.0, t), el.literal(0.0, t), t)
    if t[0] != "f":
        if kind.is_float:
            raise InvalidArgument(f"expression: cast to {name} has no form in {t} arithmetic.")
        low, high = (0, kind.max) if kind.kind == "uint" else (-kind.max - 1, kind.max)
        if t == "u64":
            return e("min.u64", x, int(high))
        if t == "s32" and kind.bits == 32:
            low, high = max(low, -(2**31)), 2**31 - 1
        return e(f"min.{t}", e(f"max.{t}", x, int(low)), int(high))
    if not kind.is_float:
        whole = e(f"cvt.rni.{kind.ptx}.{t}", x)
        source = ("s" if kind.kind == "int" else "u") + "32"
        return e(f"cvt.rn.{t}.{source}", whole)
    if name == "f64" or name == t:
        return x
    if name == "f32":
        return e("cvt.f64.f32", e("cvt.rn.f32.f64", x))
    if name == "f16":
        return e(f"cvt.{t}.f16", e(f"cvt.rn.f16.{t}", x))
    if kind.num_bytes == 1:
        return _rounded_to_fp8(e, x, kind, t)
    narrow = e("cvt.rn.f32.f64", x) if t == "f64" else x
    back = e("mov.b32", f"{{{e('mov.b16', 0)}, {e('cvt.rn.bf16.f32', narrow)}}}", to="f32")
    return e("cvt.f64.f32", back) if t == "f64" else back

def _rounded_to_fp8(e: Emitter, x: str, kind: dtypes.DType, t: str) -> str:
    """Added to and taken from 3/2 times the power of two whose last place is the result's; subnormal numbers have that of the smallest
    normal one."""
    bits, digits = (32, 23) if t == "f32" else (64, 52)
    size = e(f"min.{t}", e(f"abs.{t}", x), kind.max)
    word = e(f"mov.b{bits}", e(f"max.{t}", size, kind.smallest / kind.epsilon))
    power = e(f"mov.b{bits}", e(f"and.b{bits}", word, (2 ** (bits - 1)) - (1 << digits)), to=t)  # the fraction cut off
    magic = e(f"mul.rn.{t}", power, kind.epsilon * 1.5 * 2.0**digits)
    rounded = e(f"sub.rn.{t}", e(f"add.rn.{t}", size, magic), magic)
    rounded = e(f"copysign.{t}", x, e(f"min.{t}", rounded, kind.max))
    return e(f"selp.{t}", x, rounded, e(f"setp.nan.{t}", x, x))


def _fused_products(body: Expression) -> dict[Expression, Expression]:
    """For each sum one of whose terms is a product used nowhere else: that product. The sum becomes one fma."""
    users: dict[Expression, int] = {}
    for node in body.nodes():
        for operand in node.operands:
            users[operand] = users.get(operand, 0) + 1
    sums = (n for n in body.nodes() if n.op == "add")
    return {n: p for n in sums for p in n.operands if p.op == "mul" and users[p] == 1 and p not in body.outputs}


def lower(expression: Expression, registers: Mapping[str, str], results: Sequence[str], compute: str, brief: bool) -> str:
    if compute not in COMPUTE_TYPES:
        raise InvalidArgument(f"lower: compute is {compute!r} (expected one of {', '.join(COMPUTE_TYPES)}).")
    if len(results) != expression.num_outputs:
        raise InvalidArgument(f"lower: {len(results)} result registers for {expression.num_outputs} outputs.")
    e = Emitter(brief=brief)
    value: dict[Expression, str] = {}  # in the compute type
    truth: dict[Expression, str] = {}  # as predicate
    untyped = compute if compute[0] == "f" else "b" + compute[1:]

    def as_value(node: Expression) -> str:
        if node not in value:
            one, zero = el.literal(1.0, compute), el.literal(0.0, compute)
            value[node] = e(f"selp.{untyped}", one, zero, truth[node])
        return value[node]

    def as_truth(node: Expression) -> str:
        if node not in truth:
            truth[node] = e(f"setp.{'neu' if compute[0] == 'f' else 'ne'}.{compute}", value[node], 0.0)
        return truth[node]

    body = expression.expanded()
    fused = _fused_products(body) if compute[0] == "f" else {}
    skipped = set(fused.values())
    for node in body.nodes():
        if node in skipped:
            continue
        if node.op in ("arg", "scalar"):
            name = node.value if node.op == "scalar" else node.value[0]
            if name not in registers:
                raise InvalidArgument(f"lower: no register for {name!r} (given: {', '.join(registers) or 'none'}).")
            value[node] = registers[name]
        elif node.op == "const":
            if compute[0] != "f" and node.value != int_or_nan(node.value) and node.value != 0:
                raise InvalidArgument(f"expression: the constant {node.value} has no form in {compute} arithmetic.")
            value[node] = el.literal(node.value, compute)
        elif node.op == "cast":
            value[node] = _lower_cast(e, as_value(node.operands[0]), node.value, compute)
        elif node.op != "tuple":
            row = TABLE[node.op]
            write = row.lower.get(compute)
            if write is None:
                raise InvalidArgument(f"expression: {node.op} has no form in {compute} arithmetic (has: {', '.join(row.lower)}).")
            product = fused.get(node)
            if product is not None:  # a * b + c, the product used nowhere else
                a, b = map(as_value, product.operands)
                value[node] = e(f"fma.rn.{compute}", a, b, as_value(node.operands[1 - node.operands.index(product)]))
                continue
            takes_truth = (True,) * row.arity if row.takes_conditions else (node.op == "where",) + (False,) * (row.arity - 1)
            operands = [as_truth(o) if t else as_value(o) for o, t in zip(node.operands, takes_truth, strict=True)]
            (truth if row.is_condition else value)[node] = write(e, *operands)
    # All results are moved at the end, so that a result may be a register that was read; a move into an operand waits for a copy.
    finals = [as_value(o) for o in body.outputs]
    targets = set(results)
    finals = [e(f"mov.{untyped}", f) if f in targets and f != r and len(results) > 1 else f for f, r in zip(finals, results, strict=True)]
    moves = [f"mov.{untyped} {r}, {f};" for r, f in zip(results, finals, strict=True) if r != f]
    return "\n".join(["    {", *(f"        {line}" for line in (*e.declarations(), *e.lines, *moves)), "    }", ""])
