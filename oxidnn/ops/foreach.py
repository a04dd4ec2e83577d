"""Steps over lists of tensors, all tensors of the lists at once: optimisers, norms and unscaling of gradients, and any expression.

    adam_step param_0=f32[64,3] grad_0=f16[64,3] exp_avg_0=f32[64,3] exp_avg_sq_0=f32[64,3] param_1=...    new_param_0, new_exp_avg_0, ...
    clip_grad_norm grad_0=f32[64] grad_1=f32[3,3]                                                     norm, new_grad_0, new_grad_1
    foreach expression="a + scalar(s) * b" a_0=f32[5] b_0=f32[5] a_1=f16[7] b_1=f32[7]                y_0, y_1

Tensor i of the list `role` is the operand role_i; all lists have as many tensors, of equal shapes. Operands of one element (lr, step,
grad_scale, ...) are shared by all tensors. Each output new_role_i may lie exactly where role_i does. Types mix freely; arithmetic is f64
if any tensor of the lists is, else f32. Sums are made in the same order on every run.

The formulas are those of PyTorch's optimisers of the same names; Lion's and LAMB's are those of their papers. Numbers whose rounding
would matter (1 - beta, bias corrections) are scalars of their own, computed by the caller in double precision: SCALARS says from what.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ..codegen.pointwise import Expression, outputs, parse
from ..dtypes import F32, F64
from ..errors import expected
from ..tensor import TensorDesc
from .base import OpDef, Operand, Policy, Problem
from .checks import canonical, check_bool, check_dtype, check_expression, check_number, check_shape
from .epilogue import scalars_of
from .pointwise import like

MAX_LISTS = 8  # that an expression reads
WRITTEN = "new_"  # before the role of a list: what it becomes


@dataclass(frozen=True)
class ForeachProblem(Problem):
    """What happens to every tensor of the lists.

    count: tensors of each list. updates: (output's role, value of its element). reduced: (name, "add" or "max", value): over the elements
    of a tensor (per_tensor) or of all. results: (name, value over what was reduced): an output of one element if it has this name; the
    updates may use it. compute: "f32" or "f64".
    """

    count: int = 0
    updates: tuple[tuple[str, Expression], ...] = ()
    reduced: tuple[tuple[str, str, Expression], ...] = ()
    results: tuple[tuple[str, Expression], ...] = ()
    per_tensor: bool = False
    compute: str = "f32"

    @cached_property
    def descs(self) -> dict[str, TensorDesc]:
        """The operands' descriptions by name: lists are long."""
        return {o.name: o.desc for o in self.operands}

    @cached_property
    def input_roles(self) -> tuple[str, ...]:
        """The lists that are read, in the order of the operands."""
        return tuple(o.name[:-2] for o in self.operands if not o.is_output and o.name.endswith("_0"))

    @cached_property
    def shared(self) -> tuple[str, ...]:
        """The operands of one element that are read."""
        return tuple(o.name for o in self.operands if not o.is_output and not _is_listed(o.name))

    @cached_property
    def aliases(self) -> tuple[tuple[str, str], ...]:  # type: ignore[override]
        """Every element is read by the thread that writes it, before it does."""
        if self.op == "foreach":
            return tuple((f"{out}_{i}", f"{role}_{i}") for out, _ in self.updates for role in self.input_roles for i in range(self.count))
        pairs = [(o.name, o.name.removeprefix(WRITTEN)) for o in self.operands if o.is_output and o.name.startswith(WRITTEN)]
        return tuple(pair for pair in pairs if pair[1] in self.descs)

    @property
    def flops(self) -> int:
        each = sum(len(e.nodes()) for _, e in self.updates) + sum(len(e.nodes()) for _, _, e in self.reduced)
        role = self.input_roles[0]
        return each * sum(self.descs[f"{role}_{i}"].numel for i in range(self.count))


def _is_listed(name: str) -> bool:
    return name.rpartition("_")[2].isdigit()


@dataclass
class Given:
    """What a step is asked for with: its lists, shared operands and attributes. Writes the parts of formulas that ops share."""

    op: str
    lists: Mapping[str, Mapping[int, TensorDesc]]
    shared: Mapping[str, TensorDesc]
    flags: Mapping[str, Any]

    def number(self, name: str) -> str:
        """A number: from an operand if that is given, else given with each call."""
        return name if name in self.shared else f"scalar({name})"

    @property
    def weight(self) -> str:
        """What the step computes with: the master weights if there are any."""
        return "master" if "master" in self.lists else "param"

    def gradient(self, decays: bool = True) -> str:
        """The gradient, unscaled, its sign turned where the objective is maximised, the decay of weights added."""
        text = "grad * (1 / grad_scale)" if "grad_scale" in self.shared else "grad"
        if self.flags.get("maximize"):
            text = f"-({text})"
        return f"({text} + scalar(weight_decay) * {self.weight})" if decays and self.flags.get("decays") else f"({text})"

    def stepped(self, weight: str, **state: str) -> dict[str, str]:
        """The new weights (in their types) and state; as they were where the gradients overflowed."""
        new = {"param": weight} | ({"master": weight} if "master" in self.lists else {}) | state
        return {WRITTEN + role: self.kept(role, text) for role, text in new.items()}

    def kept(self, role: str, text: str) -> str:
        """`text`, or what the list held where the gradients overflowed (0 where it held nothing yet)."""
        if "found_inf" not in self.shared:
            return text
        old = self.weight if role == "param" else role if role in self.lists else "0"
        return f"where(found_inf > 0, {old}, {text})"

    def biases(self, *betas: int) -> list[str]:
        """1 - beta^step of beta1, beta2: -expm1(step log beta) of a step in memory."""
        return [f"(-expm1(step * scalar(log_beta{i})))" if "step" in self.shared else f"scalar(bias{i})" for i in betas]


@dataclass(frozen=True)
class Formula:
    """updates: output role -> text. reduced: name -> (combination, text). results: name -> text."""

    updates: Mapping[str, str]
    reduced: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    results: Mapping[str, str] = field(default_factory=dict)
    per_tensor: bool = False


def _sgd(g: Given) -> Formula:
    step, lr, w = g.gradient(), g.number("lr"), g.weight
    if not g.flags.get("momentum"):
        return Formula(g.stepped(f"{w} - {lr} * {step}"))
    buffer = step if g.flags.get("first") else f"(scalar(momentum) * momentum_buffer + scalar(undamped) * {step})"
    step = f"({step} + scalar(momentum) * {buffer})" if g.flags.get("nesterov") else buffer
    return Formula(g.stepped(f"{w} - {lr} * {step}", momentum_buffer=buffer))


def _moments(g: Given, gradient: str) -> tuple[str, str]:
    """The running means of the gradient and of its square."""
    return f"(exp_avg + scalar(rest1) * ({gradient} - exp_avg))", f"(scalar(beta2) * exp_avg_sq + scalar(rest2) * square({gradient}))"


def _adam(g: Given) -> Formula:
    gradient, lr, w = g.gradient(not g.flags.get("decoupled")), g.number("lr"), g.weight
    mean, square = _moments(g, gradient)
    bias1, bias2 = g.biases(1, 2)
    state = {"exp_avg": mean, "exp_avg_sq": square}
    largest = square
    if "max_exp_avg_sq" in g.lists:
        state["max_exp_avg_sq"] = largest = f"maximum(max_exp_avg_sq, {square})"
    kept = f"{w} * (1 - {lr} * scalar(weight_decay))" if g.flags.get("decoupled") and g.flags.get("decays") else w
    step = f"({lr} / {bias1}) * ({mean} / (sqrt({largest}) * (1 / sqrt({bias2})) + scalar(eps)))"
    return Formula(g.stepped(f"{kept} - {step}", **state))


def _adagrad(g: Given) -> Formula:
    gradient = g.gradient()
    rate = f"({g.number('lr')} / (1 + (step - 1) * scalar(lr_decay)))" if "step" in g.shared else g.number("lr")
    total = f"(state_sum + square({gradient}))"
    return Formula(g.stepped(f"{g.weight} - {rate} * ({gradient} / (sqrt({total}) + scalar(eps)))", state_sum=total))


def _rmsprop(g: Given) -> Formula:
    gradient, lr = g.gradient(), g.number("lr")
    square = f"(scalar(alpha) * square_avg + scalar(rest) * square({gradient}))"
    state, variance = {"square_avg": square}, square
    if "grad_avg" in g.lists:
        state["grad_avg"] = mean = f"(grad_avg + scalar(rest) * ({gradient} - grad_avg))"
        variance = f"({square} - square({mean}))"
    step = f"({gradient} / (sqrt({variance}) + scalar(eps)))"
    if "momentum_buffer" in g.lists:
        state["momentum_buffer"] = step = f"(scalar(momentum) * momentum_buffer + {step})"
    return Formula(g.stepped(f"{g.weight} - {lr} * {step}", **state))


def _lion(g: Given) -> Formula:
    gradient, lr, w = g.gradient(False), g.number("lr"), g.weight
    kept = f"{w} * (1 - {lr} * scalar(weight_decay))" if g.flags.get("decays") else w
    step = f"sign(scalar(beta1) * exp_avg + scalar(rest1) * {gradient})"
    return Formula(g.stepped(f"{kept} - {lr} * {step}", exp_avg=f"(scalar(beta2) * exp_avg + scalar(rest2) * {gradient})"))


def _lamb(g: Given) -> Formula:
    gradient, w = g.gradient(False), g.weight
    mean, square = (g.kept(role, text) for role, text in zip(("exp_avg", "exp_avg_sq"), _moments(g, gradient), strict=True))
    bias1, bias2 = g.biases(1, 2)
    step = f"(({mean} * (1 / {bias1})) / (sqrt({square}) * (1 / sqrt({bias2})) + scalar(eps)))"
    if g.flags.get("decays"):
        step = f"({step} + scalar(weight_decay) * {w})"
    return Formula(g.stepped(f"{w} - {g.number('lr')} * trust * {step}") | {"new_exp_avg": mean, "new_exp_avg_sq": square},
                   {"weights": ("add", f"square({w})"), "steps": ("add", f"square({step})")},
                   {"trust": "where((weights > 0) & (steps > 0), sqrt(weights) / sqrt(steps), 1)"}, per_tensor=True)


def _norm(g: Given) -> tuple[dict[str, tuple[str, str]], str]:
    """What is reduced for the norm of all gradients, and the norm over it."""
    p = g.flags.get("norm_type", 2.0)
    if p == "inf":  # the largest of numbers does not say that there was a NaN
        return {"size": ("max", "abs(grad)"), "strange": ("max", "where(isnan(grad), 1, 0)")}, "where(strange > 0, nan, size)"
    power, root = {1.0: ("abs(grad)", "size"), 2.0: ("square(grad)", "sqrt(size)")}.get(
        p, (f"pow(abs(grad), {p!r})", f"pow(size, {1 / p!r})"))
    return {"size": ("add", power)}, root


def _grad_norm(g: Given) -> Formula:
    reduced, norm = _norm(g)
    return Formula({}, reduced, {"norm": norm})


def _clip_grad_norm(g: Given) -> Formula:
    reduced, norm = _norm(g)
    return Formula({"new_grad": "grad * share"}, reduced,
                   {"norm": norm, "share": f"minimum({g.number('max_norm')} / (({norm}) + 1e-6), 1)"})


def _unscale_grads(g: Given) -> Formula:
    found = "maximum(found_inf, strange)" if "found_inf" in g.shared else "strange"
    return Formula({"new_grad": f"grad * {g.number('inv_scale')}"}, {"strange": ("max", "where(isnan(grad) | isinf(grad), 1, 0)")},
                   {"new_found_inf": found})


@dataclass(frozen=True)
class Rule:
    """An op: its lists (those that must be there, those that may), shared operands, attributes with defaults, and formula.

    state: lists whose type must be that of the arithmetic.
    """

    write: Callable[[Given], Formula]
    lists: tuple[str, ...]
    optional: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    attrs: tuple[tuple[str, Any], ...] = ()
    state: tuple[str, ...] = ()


_SCALING = ("grad_scale", "found_inf")
_COMMON = (("decays", False), ("maximize", False))
_OPTIMISED = ("param", "grad")
RULES: dict[str, Rule] = {
    "sgd_step": Rule(_sgd, _OPTIMISED, ("momentum_buffer", "master"), ("lr", *_SCALING),
                     (("momentum", False), ("nesterov", False), ("first", False), *_COMMON)),
    "adam_step": Rule(_adam, (*_OPTIMISED, "exp_avg", "exp_avg_sq"), ("max_exp_avg_sq", "master"), ("lr", "step", *_SCALING),
                      (("decoupled", False), *_COMMON)),
    "adagrad_step": Rule(_adagrad, (*_OPTIMISED, "state_sum"), ("master",), ("lr", "step", *_SCALING), _COMMON),
    "rmsprop_step": Rule(_rmsprop, (*_OPTIMISED, "square_avg"), ("grad_avg", "momentum_buffer", "master"), ("lr", *_SCALING), _COMMON),
    "lion_step": Rule(_lion, (*_OPTIMISED, "exp_avg"), ("master",), ("lr", *_SCALING), _COMMON),
    "lamb_step": Rule(_lamb, (*_OPTIMISED, "exp_avg", "exp_avg_sq"), ("master",), ("lr", "step", *_SCALING), _COMMON,
                      ("exp_avg", "exp_avg_sq")),
    "grad_norm": Rule(_grad_norm, ("grad",), attrs=(("norm_type", 2.0),)),
    "clip_grad_norm": Rule(_clip_grad_norm, ("grad",), shared=("max_norm",), attrs=(("norm_type", 2.0),)),
    "unscale_grads": Rule(_unscale_grads, ("grad",), shared=("inv_scale", "found_inf")),
}


def _flags(op: str, attrs: Mapping[str, Any], known: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """The attributes that differ from their defaults."""
    flags: dict[str, Any] = {}
    for name, default in known:
        if name == "norm_type":
            given = attrs.get(name, default)
            value: Any = given if given == "inf" else check_number(op, name, given)
            if value == math.inf:
                value = "inf"  # as cases write it
            elif value != "inf" and not value > 0:
                raise expected(op, name, value, "a number > 0, or inf")
        else:
            value = check_bool(op, name, attrs.get(name, default))
        if value != default:
            flags[name] = value
    return flags


def _sorted_out(op: str, tensors: Mapping[str, TensorDesc], lists: tuple[str, ...], shared: tuple[str, ...],
                outs: tuple[str, ...] | None) -> tuple[dict[str, dict[int, TensorDesc]], dict[str, TensorDesc], dict[str, TensorDesc]]:
    """(lists by role and index, shared operands, outputs by name). outs: the outputs' roles; None: `new_` and those of the lists."""
    listed: dict[str, dict[int, TensorDesc]] = {}
    single: dict[str, TensorDesc] = {}
    given: dict[str, TensorDesc] = {}
    for name, desc in tensors.items():
        role, _, index = name.rpartition("_")
        is_listed = index.isdecimal() and str(int(index)) == index
        if is_listed and role in lists:
            listed.setdefault(role, {})[int(index)] = desc
        elif name in shared:
            single[name] = desc
        elif name in ("norm", "new_found_inf") or is_listed and (
                role in outs if outs is not None else role.startswith(WRITTEN) and role[len(WRITTEN):] in lists):
            given[name] = desc
        else:
            known = ", ".join((*(f"{r}_0, {r}_1, ..." for r in lists), *shared))
            raise expected(op, name, "given", f"operands {known} and what they become")
    return listed, single, given


def _checked_lists(op: str, listed: Mapping[str, Mapping[int, TensorDesc]]) -> int:
    """How many tensors each list has. Raises InvalidArgument unless it is the same number, of the same shapes."""
    first, model = next(iter(listed.items()))
    for role, descs in listed.items():
        if sorted(descs) != list(range(len(descs))) or len(descs) != len(model):
            raise expected(op, role, f"{len(descs)} tensors", f"{len(model)}, as of {first}")
        for i, desc in descs.items():
            check_dtype(op, f"{role}_{i}", desc, {f"{role}_{i}": desc})
            check_shape(op, f"{role}_{i}", desc, model[i].shape, {f"{first}_{i}": model[i], f"{role}_{i}": desc})
    return len(model)


def _problem(op: str, listed: Mapping[str, Mapping[int, TensorDesc]], shared: Mapping[str, TensorDesc], given: Mapping[str, TensorDesc],
             formula: Formula, attrs: tuple[tuple[str, Any], ...], policy: Policy, models: Mapping[str, Mapping[int, TensorDesc]],
             state: tuple[str, ...] = ()) -> ForeachProblem:
    """models: output role -> descriptions whose types and layouts it has unless it is given."""
    count = _checked_lists(op, listed)
    for name, desc in shared.items():
        check_dtype(op, name, desc, {name: desc})
        if desc.numel != 1:
            raise expected(op, f"shape of {name}", list(desc.shape), "one element")
    every = [d for descs in listed.values() for d in descs.values()]
    compute = F64 if any(d.dtype is F64 for d in every) else F32
    updates = tuple((role, parse(text)) for role, text in formula.updates.items())
    reduced = tuple((name, how, parse(text)) for name, (how, text) in formula.reduced.items())
    results = tuple((name, parse(text)) for name, text in formula.results.items())
    whole = outputs(*(e for _, e in updates), *(e for _, _, e in reduced), *(e for _, e in results))
    args, made = set(whole.args), {name for name, _, _ in reduced} | {name for name, _ in results}
    for name in args - made:
        if name not in listed and name not in shared:
            raise expected(op, name, "missing", "a list of tensors" if name in _LISTS else "an operand")
    for role in listed:
        if role not in args and not (role == "param" and "master" in listed):
            raise expected(op, role, "given", f"lists {', '.join(r for r in listed if r in args)}: this step does not read it")
    read = [role for role in listed if role in args]
    if len(read) > MAX_LISTS:
        raise expected(op, "lists", len(read), f"at most {MAX_LISTS}")
    for role in state:
        for i, desc in listed[role].items():
            check_dtype(op, f"{role}_{i}", desc, {f"{role}_{i}": desc}, (compute,))
    operands = [Operand(f"{role}_{i}", listed[role][i]) for role in read for i in range(count)]
    operands += [Operand(name, shared[name]) for name in shared if name in args]
    for name in shared:
        if name not in args:
            raise expected(op, name, "given", f"no operand {name}: this step does not read it")
    left = dict(given)
    for role, _ in updates:
        for i in range(count):
            name = f"{role}_{i}"
            model = models[role][i]
            desc = left.pop(name) if name in left else canonical(like(model, model.dtype))
            _check_target(op, name, desc, listed[read[0]][i].shape)
            operands.append(Operand(name, desc, True))
    for name in ("norm", "new_found_inf"):
        if name in formula.results:
            desc = left.pop(name) if name in left else TensorDesc.packed(compute, ())
            check_dtype(op, name, desc, {name: desc})
            if desc.numel != 1:
                raise expected(op, f"shape of {name}", list(desc.shape), "one element")
            operands.append(Operand(name, desc, True))
    for name in left:
        raise expected(op, name, "given", f"no tensor of this name ({op} makes {', '.join(r for r, _ in updates) or 'none'})")
    return ForeachProblem(op, tuple(operands), attrs, scalars_of(op, whole, compute.name), policy=policy, count=count, updates=updates,
                          reduced=reduced, results=results, per_tensor=formula.per_tensor, compute=compute.name)


def _check_target(op: str, name: str, desc: TensorDesc, shape: tuple[int, ...]) -> None:
    """The output has the shape asked for, a type we write, and no two elements in one place; extents may be of any size."""
    check_shape(op, name, desc, shape, {name: desc})
    check_dtype(op, name, desc, {name: desc})
    if not desc.is_injective:
        raise expected(op, f"strides of {name}", list(desc.strides), "an output whose elements do not overlap")


def _make_rule(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ForeachProblem:
    rule = RULES[op]
    flags = _flags(op, attrs, rule.attrs)
    listed, shared, given = _sorted_out(op, tensors, rule.lists + rule.optional, rule.shared, None)
    if op == "sgd_step":
        _check_momentum(op, flags, listed)
    for role in rule.lists:
        if role not in listed and not (role == "param" and "master" in listed):
            raise expected(op, role, "missing", "a list of tensors")
    order = {role: listed[role] for role in (*rule.lists, *rule.optional) if role in listed}
    formula = rule.write(Given(op, order, shared, flags))
    models = {role: listed.get(role.removeprefix(WRITTEN), listed["grad"]) for role in formula.updates}
    if "master" in listed:
        order.pop("param", None)  # written, never read
    return _problem(op, order, {n: shared[n] for n in rule.shared if n in shared}, given, formula, tuple(flags.items()), policy, models,
                    rule.state)


def _check_momentum(op: str, flags: Mapping[str, Any], listed: Mapping[str, Any]) -> None:
    reads = bool(flags.get("momentum")) and not flags.get("first")
    if reads != ("momentum_buffer" in listed):
        raise expected(op, "momentum_buffer", "missing" if reads else "given", "a list of tensors" if reads else
                       "none without momentum, nor at the first step, which sets it")
    for name in ("nesterov", "first"):
        if flags.get(name) and not flags.get("momentum"):
            raise expected(op, name, True, "False without momentum")


def _make_foreach(op: str, tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ForeachProblem:
    """expression: over the lists' roles and shared operands (those without a number behind their name)."""
    if "expression" not in attrs:
        raise expected(op, "expression", "missing", "an expression such as 'a + scalar(s) * b'")
    expression = check_expression(op, "expression", attrs["expression"])
    lists = tuple(n for n in expression.args if f"{n}_0" in tensors)
    if not lists:
        raise expected(op, "expression", str(expression), "one over lists of tensors")
    roles = foreach_outputs(expression)
    listed, shared, given = _sorted_out(op, tensors, lists, tuple(n for n in expression.args if n not in lists), roles)
    for name in expression.args:
        if expression.axis(name) is not None:
            raise expected(op, name, "per-channel", "a list, or one element for all")
    updates = {role: str(node) for role, node in zip(roles, expression.outputs, strict=True)}
    order = {role: listed[role] for role in lists}
    return _problem(op, order, shared, given, Formula(updates), (("expression", expression),), policy,
                    dict.fromkeys(roles, order[lists[0]]))


def foreach_outputs(expression: Expression) -> tuple[str, ...]:
    """The roles of what `foreach` makes: "y", or "y0", "y1", ..."""
    count = expression.num_outputs
    return ("y",) if count == 1 else tuple(f"y{i}" for i in range(count))


_LISTS = {role for rule in RULES.values() for role in (*rule.lists, *rule.optional)}


def _definition(op: str, rule: Rule) -> OpDef:
    def make(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ForeachProblem:
        return _make_rule(op, tensors, attrs, policy)

    return OpDef(op, (), (), make, attrs=rule.attrs)


def make_foreach(tensors: Mapping[str, TensorDesc], attrs: Mapping[str, Any], policy: Policy) -> ForeachProblem:
    return _make_foreach("foreach", tensors, attrs, policy)


DEFINITIONS = (*(_definition(op, rule) for op, rule in RULES.items()),
               OpDef("foreach", (), (), make_foreach, attrs=(("expression", None),)))


def bias_scalars(beta: float, step: float | None, index: int) -> dict[str, float]:
    """The numbers of one running mean: beta, 1 - beta, and the bias correction at `step` (None: the step lies in memory)."""
    numbers = {f"beta{index}": beta, f"rest{index}": 1.0 - beta}
    if step is None:
        numbers[f"log_beta{index}"] = math.log(beta) if beta > 0 else -math.inf
    else:
        numbers[f"bias{index}"] = -math.expm1(step * math.log(beta)) if beta > 0 else 1.0
    return numbers


