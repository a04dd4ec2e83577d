"""The handle's methods over lists of tensors: optimiser steps, norms, clipping and unscaling of gradients, and any expression."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..codegen.pointwise import parse
from ..dtypes import F32
from ..errors import expected
from ..ops.checks import check_number
from ..ops.foreach import bias_scalars, foreach_outputs
from .lists import run_lists
from .session import Session

Arrays = Sequence[Any]


class ListOps:
    """Every method takes lists (or tuples) of arrays, one launch for all arrays of like types, and works in place: `params` and the state
    are overwritten, gradients only by clip_grad_norm and unscale_grads. Arrays of any sizes, types (f32, f16, bf16, f64, mixed freely) and
    strides; those of one tensor should lie alike (a gradient in another layout than its parameter is copied first). What is written may
    overlap nothing else. Autograd does not learn of what a step writes.

    masters: weights in f32 that the step reads and writes in place of params, which then only receive the rounded result. grad_scale: one
    element; gradients are divided by it first. found_inf: one element; where it is not 0, nothing changes. lr and step may be arrays of one
    f32 element too: then a captured graph takes them as they are at each replay. maximize: steps along the gradient. Numbers do not enter
    the plan: a schedule costs nothing.
    """

    _session: Session

    def sgd_step(self, params: Arrays, grads: Arrays, momentum_buffers: Arrays | None = None, *, lr: Any, momentum: float = 0.0,
                 dampening: float = 0.0, weight_decay: float = 0.0, nesterov: bool = False, maximize: bool = False, first: bool = False,
                 masters: Arrays | None = None, grad_scale: Any = None, found_inf: Any = None, stream: Any = None) -> None:
        """One step of torch.optim.SGD. momentum_buffers (f32): needed with momentum; first: they hold nothing yet and are set to the
        gradients (to 0 where found_inf says so)."""
        op = "sgd_step"
        attrs: tuple[tuple[str, Any], ...] = ()
        scalars = {"momentum": _number(op, "momentum", momentum), "undamped": 1.0 - _number(op, "dampening", dampening)}
        if (momentum_buffers is None) != (momentum == 0):
            raise expected(op, "momentum_buffers", "missing" if momentum else "given", "arrays if and only if momentum is not 0")
        if nesterov and (momentum <= 0 or dampening != 0):
            raise expected(op, "nesterov", True, "False without momentum > 0 and dampening 0")
        if momentum:
            attrs = (("momentum", True), ("nesterov", nesterov), ("first", first))
        lists = {"param": params, "grad": grads, "momentum_buffer": momentum_buffers, "master": masters}
        unread = ("momentum_buffer",) if momentum and first else ()
        self._step(op, lists, lr, weight_decay, maximize, grad_scale, found_inf, stream, attrs, scalars, unread=unread)

    def adam_step(self, params: Arrays, grads: Arrays, exp_avgs: Arrays, exp_avg_sqs: Arrays, *, step: Any, lr: Any = 1e-3,
                  betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0, decoupled: bool = False,
                  max_exp_avg_sqs: Arrays | None = None, maximize: bool = False, masters: Arrays | None = None, grad_scale: Any = None,
                  found_inf: Any = None, stream: Any = None) -> None:
        """One step of torch.optim.Adam; decoupled: of AdamW. step: of this step, from 1 on. max_exp_avg_sqs: AMSGrad."""
        lists = {"param": params, "grad": grads, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs, "max_exp_avg_sq": max_exp_avg_sqs,
                 "master": masters}
        scalars = {"eps": _number("adam_step", "eps", eps)} | _betas("adam_step", betas, step)
        attrs = (("decoupled", decoupled),)
        self._step("adam_step", lists, lr, weight_decay, maximize, grad_scale, found_inf, stream, attrs, scalars, step)

    def adamw_step(self, params: Arrays, grads: Arrays, exp_avgs: Arrays, exp_avg_sqs: Arrays, *, step: Any, lr: Any = 1e-3,
                   betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 1e-2,
                   max_exp_avg_sqs: Arrays | None = None, maximize: bool = False, masters: Arrays | None = None, grad_scale: Any = None,
                   found_inf: Any = None, stream: Any = None) -> None:
        """`adam_step` with decoupled=True and AdamW's default weight decay."""
        self.adam_step(params, grads, exp_avgs, exp_avg_sqs, step=step, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay,
                       decoupled=True, max_exp_avg_sqs=max_exp_avg_sqs, maximize=maximize, masters=masters, grad_scale=grad_scale,
                       found_inf=found_inf, stream=stream)

    def adagrad_step(self, params: Arrays, grads: Arrays, state_sums: Arrays, *, step: Any, lr: Any = 1e-2, lr_decay: float = 0.0,
                     weight_decay: float = 0.0, eps: float = 1e-10, maximize: bool = False, masters: Arrays | None = None,
                     grad_scale: Any = None, found_inf: Any = None, stream: Any = None) -> None:
        """One step of torch.optim.Adagrad: the rate is lr / (1 + (step - 1) lr_decay)."""
        op = "adagrad_step"
        scalars = {"eps": _number(op, "eps", eps), "lr_decay": _number(op, "lr_decay", lr_decay)}
        if lr_decay and _is_number(step) and not _is_number(lr):
            raise expected(op, "step", repr(step), "an array too, where lr is one and lr_decay is not 0")
        if _is_number(step):
            divisor = 1.0 + (_at_least(op, "step", step, 1) - 1.0) * lr_decay
            step, lr = None, lr / divisor if lr_decay else lr
        self._step(op, {"param": params, "grad": grads, "state_sum": state_sums, "master": masters}, lr, weight_decay, maximize, grad_scale,
                   found_inf, stream, (), scalars, step if lr_decay else None)

    def rmsprop_step(self, params: Arrays, grads: Arrays, square_avgs: Arrays, grad_avgs: Arrays | None = None,
                     momentum_buffers: Arrays | None = None, *, lr: Any = 1e-2, alpha: float = 0.99, eps: float = 1e-8,
                     weight_decay: float = 0.0, momentum: float = 0.0, maximize: bool = False, masters: Arrays | None = None,
                     grad_scale: Any = None, found_inf: Any = None, stream: Any = None) -> None:
        """One step of torch.optim.RMSprop. grad_avgs: it is centered. momentum_buffers: needed with momentum."""
        op = "rmsprop_step"
        if (momentum_buffers is None) != (momentum == 0):
            raise expected(op, "momentum_buffers", "missing" if momentum else "given", "arrays if and only if momentum is not 0")
        lists = {"param": params, "grad": grads, "square_avg": square_avgs, "grad_avg": grad_avgs, "momentum_buffer": momentum_buffers,
                 "master": masters}
        alpha = _number(op, "alpha", alpha)
        scalars = {"alpha": alpha, "rest": 1.0 - alpha, "eps": _number(op, "eps", eps), "momentum": _number(op, "momentum", momentum)}
        self._step(op, lists, lr, weight_decay, maximize, grad_scale, found_inf, stream, (), scalars)

    def lion_step(self, params: Arrays, grads: Arrays, exp_avgs: Arrays, *, lr: Any = 1e-4, betas: tuple[float, float] = (0.9, 0.99),
                  weight_decay: float = 0.0, maximize: bool = False, masters: Arrays | None = None, grad_scale: Any = None,
                  found_inf: Any = None, stream: Any = None) -> None:
        """One step of Lion (Chen et al. 2023): along the sign of the gradient mixed with its running mean."""
        self._step("lion_step", {"param": params, "grad": grads, "exp_avg": exp_avgs, "master": masters}, lr, weight_decay, maximize,
                   grad_scale, found_inf, stream, (), _betas("lion_step", betas, 1))

    def lamb_step(self, params: Arrays, grads: Arrays, exp_avgs: Arrays, exp_avg_sqs: Arrays, *, step: Any, lr: Any = 1e-3,
                  betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-6, weight_decay: float = 0.01, maximize: bool = False,
                  masters: Arrays | None = None, grad_scale: Any = None, found_inf: Any = None, stream: Any = None) -> None:
        """One step of LAMB (You et al. 2019): Adam's, with the weights' decay, times the norm of the weights over its own, tensor by
        tensor (1 where either is 0). The moments are f32 (f64 where the step is computed in it). Norms are summed in a fixed order."""
        lists = {"param": params, "grad": grads, "exp_avg": exp_avgs, "exp_avg_sq": exp_avg_sqs, "master": masters}
        scalars = {"eps": _number("lamb_step", "eps", eps)} | _betas("lamb_step", betas, step)
        self._step("lamb_step", lists, lr, weight_decay, maximize, grad_scale, found_inf, stream, (), scalars, step)

    def grad_norm(self, grads: Arrays, norm_type: float = 2.0, *, stream: Any = None) -> Any:
        """The norm of all gradients together, as one f32 element (f64 if any is): norm_type a number > 0, or inf. NaN propagates."""
        return run_lists(self._session, "grad_norm", {"grad": grads}, {}, {}, _norm_attrs(norm_type), {}, stream)

    def clip_grad_norm(self, grads: Arrays, max_norm: Any, norm_type: float = 2.0, *, stream: Any = None) -> Any:
        """Multiplies all gradients by min(max_norm / (norm + 1e-6), 1), as torch.nn.utils.clip_grad_norm_. Returns the norm before."""
        is_number = _is_number(max_norm)
        scalars = {"max_norm": _number("clip_grad_norm", "max_norm", max_norm)} if is_number else {}
        return run_lists(self._session, "clip_grad_norm", {"grad": grads}, {"max_norm": None if is_number else max_norm},
                         {"new_grad": "grad"}, _norm_attrs(norm_type), scalars, stream)

    def unscale_grads(self, grads: Arrays, inv_scale: Any, found_inf: Any = None, *, stream: Any = None) -> Any:
        """Multiplies all gradients by inv_scale (a number or one element) and says whether any was infinite or NaN: one f32 element, 1 or
        0. found_inf: one element of an earlier call, set to 1 where any was, else left as it is; then nothing is returned."""
        is_number = _is_number(inv_scale)
        scalars = {"inv_scale": _number("unscale_grads", "inv_scale", inv_scale)} if is_number else {}
        shared = {"inv_scale": None if is_number else inv_scale, "found_inf": found_inf}
        return run_lists(self._session, "unscale_grads", {"grad": grads}, shared, {"new_grad": "grad", "new_found_inf": "found_inf"}, (),
                         scalars, stream)

    def foreach(self, /, expression: Any, lists: Mapping[str, Arrays], out: Arrays | tuple[Arrays, ...], *,
                shared: Mapping[str, Any] | None = None, stream: Any = None, **scalars: float) -> None:
        """An expression over every tensor of the lists: foreach("a + scalar(s) * b", {"a": params, "b": grads}, params, s=0.5).

        lists: what the expression's names stand for; shared: names that stand for one element for all. out: the list that receives the
        result, or a tuple of lists, one an output; a list that is read is overwritten. What an output overwrites is read before it.
        """
        parsed = parse(expression)
        roles = foreach_outputs(parsed)
        outs = (out,) if len(roles) == 1 else tuple(out)
        if len(outs) != len(roles):
            raise expected("foreach", "out", f"{len(outs)} lists", f"{len(roles)}, one an output")
        if scalars.keys() != set(parsed.scalars):
            for name in {"expression", "lists", "out", "shared", "stream"} & set(parsed.scalars):
                raise expected("foreach", f"scalar {name}", "named as an argument of foreach", "another name")
            raise expected("foreach", "scalars", sorted(scalars), sorted(parsed.scalars))
        numbers = {name: _number("foreach", name, value) for name, value in scalars.items()}
        targets = {role: next((name for name, values in lists.items() if values is target), target)
                   for role, target in zip(roles, outs, strict=True)}
        run_lists(self._session, "foreach", lists, shared or {}, targets, (("expression", parsed),), numbers, stream)

    def _step(self, op: str, lists: dict[str, Arrays | None], lr: Any, weight_decay: float, maximize: bool, grad_scale: Any, found_inf: Any,
              stream: Any, attrs: tuple[tuple[str, Any], ...], scalars: dict[str, float], step: Any = None,
              unread: tuple[str, ...] = ()) -> None:
        """An optimiser's step: everything but the gradients is written. unread: roles of lists that are not read."""
        shared = {"lr": None, "step": None if step is None or _is_number(step) else step, "grad_scale": grad_scale, "found_inf": found_inf}
        if _is_number(lr):
            scalars["lr"] = _number(op, "lr", lr)
        else:
            shared["lr"] = lr
        if weight_decay:
            scalars["weight_decay"] = _number(op, "weight_decay", weight_decay)
            attrs = (*attrs, ("decays", True))
        if maximize:
            attrs = (*attrs, ("maximize", maximize))
        targets: dict[str, Any] = {}
        if lists["master"] is not None:
            unread = ("param", *unread)
        for role in lists:
            if role != "grad":
                targets["new_" + role] = lists[role] if role in unread else role
        read = {role: values for role, values in lists.items() if role not in unread}
        run_lists(self._session, op, read, shared, targets, attrs, scalars, stream)


def _is_number(value: Any) -> bool:
    """False for what may be an array."""
    return value is None or isinstance(value, (int, float, np.integer, np.floating, str))


def _number(op: str, name: str, value: Any) -> float:
    if type(value) is float and -F32.max <= value <= F32.max:
        return value
    return check_number(op, name, value, F32)


def _at_least(op: str, name: str, value: Any, least: float) -> float:
    number = _number(op, name, value)
    if number < least:
        raise expected(op, name, value, f"a number of at least {least}")
    return number


def _betas(op: str, betas: Any, step: Any) -> dict[str, float]:
    """The scalars of two running means at `step` (a number, or an array that holds it)."""
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise expected(op, "betas", repr(betas), "two numbers in [0, 1)")
    at = _at_least(op, "step", step, 1) if _is_number(step) else None
    found: dict[str, float] = {}
    for index, beta in enumerate(betas, 1):
        beta = _number(op, f"betas[{index - 1}]", beta)
        if not 0 <= beta < 1:
            raise expected(op, f"betas[{index - 1}]", beta, "a number in [0, 1)")
        found |= bias_scalars(beta, at, index)
    return found


def _norm_attrs(norm_type: Any) -> tuple[tuple[str, Any], ...]:
    if norm_type == 2:
        return ()
    return (("norm_type", "inf" if norm_type == math.inf else norm_type),)
