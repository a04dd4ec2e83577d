"""Session: from arrays to a running plan. The warm path of every call, and the one place where plans are made and kept."""

from __future__ import annotations

import math
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from .. import report
from ..device import DeviceInfo
from ..dtypes import F32, F64
from ..errors import InvalidArgument, expected
from ..interchange import READERS, Frame, as_view, frame_of, framework_of, raw
from ..ops import OPS
from ..ops.base import Policy, Problem
from ..ops.case import format_tensor
from ..ops.checks import check_integer
from ..plan import Plan
from ..runtime.backend import Backend
from ..runtime.memory import Workspace
from ..tensor import TensorDesc, TensorView
from .planning import code_digest, plan_for
from .select import Explanation, explain
from .tuning_db import TuningDb

POLICY: ContextVar[dict[int, Policy] | None] = ContextVar("oxidnn_policy", default=None)
MAX_PLANS = 4096
MAX_WAYS = 8  # kept for one op, attributes and sizes: they differ in shape, layout, type, or what autograd knows of the arrays


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The signature of a public method: op, the roles of its array arguments, its attributes with their defaults, the roles of its
    outputs where they are not those of the op's row, and the arguments that arrays for them are given by (the last stands for all
    further ones).

    Made once and compared by identity, so that it costs a key little.
    """

    op: str
    tensors: tuple[str, ...]
    attrs: tuple[tuple[str, Any], ...] = ()
    outputs: tuple[str, ...] | None = None
    given_as: tuple[str, ...] = ("out",)

    def arguments(self, count: int) -> tuple[str, ...]:
        """Of `count` arrays for results."""
        return (*self.given_as, *self.given_as[-1:] * count)[:count]

    def hashable(self, attrs: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values of the attributes as a key takes them. Raises InvalidArgument naming the one that has no hash."""
        return tuple(hashable(value, self.op, name) for value, (name, _) in zip(attrs, self.attrs, strict=True))


class Prepared:
    """A plan joined to the way its arguments arrive: what a cache hit needs."""

    __slots__ = ("disjoint", "frame", "given_as", "make_outputs", "num_outputs", "order", "overlap_pairs", "plan", "problem",
                 "scalar_names")

    def __init__(self, problem: Problem, plan: Plan | None, order: tuple[int, ...] | None, frame: Frame,
                 make_outputs: tuple[Callable[[], Any], ...], given_as: str) -> None:
        self.problem = problem
        self.given_as = given_as  # the argument that arrays for results are given by
        self.plan = plan
        self.order = order  # operand i takes argument order[i]; None: as they come
        self.frame = frame
        self.make_outputs = make_outputs
        self.num_outputs = len(problem.outputs)
        self.overlap_pairs = _overlap_pairs(problem)
        self.disjoint: list[int] = []  # addresses last found free of overlaps
        self.scalar_names = tuple(s.name for s in problem.scalars)

    def guarded(self, given: Sequence[Any], pointers: Sequence[int], workspace: Workspace) -> Guarded | None:
        """The short way for calls like this one, on these arrays (and out) at these addresses; None where there is none."""
        plan, frame = self.plan, self.frame
        if plan is None or self.order is not None or self.scalar_names or frame.guard is None or reduce(or_, pointers) & 15:
            return None
        check = frame.guard(given)
        return None if check is None else Guarded(self, plan, check, workspace)

    def check_overlap(self, pointers: list[int]) -> None:
        """An output may share no byte with an input or another output, unless it is exactly that input and the op works in place."""
        if pointers != self.disjoint:  # a loop over the same buffers is checked once
            for i, j, low, high, other_low, other_high, may_be_same, lanes in self.overlap_pairs:
                here, there = pointers[i], pointers[j]
                if (here + low < there + other_high and there + other_low < here + high and not (may_be_same and here == there)
                        and not any(n <= (there - here + start) % period <= period - m for period, start, n, m in lanes)):
                    names = [o.name for o in self.problem.operands]
                    raise InvalidArgument(
                        f"{self.problem.op}: out {names[i]!r} overlaps {names[j]!r} in memory (expected separate memory).")
            self.disjoint = pointers

    def ordered(self, scalars: Mapping[str, float] | None) -> tuple[float, ...]:
        """The numbers given with a call, in the problem's order. Raises InvalidArgument for missing, unknown and non-numeric ones."""
        given = {} if scalars is None else scalars
        if not isinstance(given, Mapping):
            raise expected(self.problem.op, "scalars", repr(given), "a mapping from names to numbers")
        if given.keys() != set(self.scalar_names):
            raise expected(self.problem.op, "scalars", sorted(map(str, given)), sorted(self.scalar_names))
        for name, value in given.items():
            if not isinstance(value, (int, float, np.integer, np.floating)):
                raise expected(self.problem.op, f"scalar {name}", repr(value), "a real number")
        for scalar in self.problem.scalars:
            if scalar.type[0] != "f":
                bits, is_signed = int(scalar.type[1:]), scalar.type[0] == "s"
                least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if is_signed else (0, 2**bits - 1)
                check_integer(self.problem.op, f"scalar {scalar.name}", given[scalar.name], least, most)
                continue
            most = F32.max if scalar.type == "f32" else F64.max
            if most < abs(given[scalar.name]) < math.inf:
                raise expected(self.problem.op, f"scalar {scalar.name}", given[scalar.name],
                               f"within {most:.8g}, the range of {scalar.type}")
        return tuple(given[name] for name in self.scalar_names)


class Guarded:
    """The shortest way through a call that is as an earlier one was: one check of all arrays together instead of a key of each.

    For addresses that are multiples of 16, so that one test tells that their alignment is the same.
    """

    __slots__ = ("address", "check", "current_stream", "execute", "make", "make_all", "num_bytes", "prepared", "seen", "workspace")

    def __init__(self, prepared: Prepared, plan: Plan, check: Callable[..., bool], workspace: Workspace) -> None:
        self.prepared = prepared
        self.check = check
        self.workspace = workspace
        self.num_bytes = plan.workspace_bytes
        self.execute = plan.execute
        self.make, *others = prepared.make_outputs
        self.make_all = prepared.make_outputs if others else None
        self.address = prepared.frame.address
        self.current_stream = prepared.frame.current_stream
        self.seen: list[int] = []  # addresses last found aligned and free of overlaps

    def __call__(self, given: Sequence[Any], out: Any) -> Any:
        """The result on the arrays `given`, `out` among them as the last unless it is None; None if they are not as the earlier ones."""
        if not self.check(*given):
            return None
        pointers = [*map(self.address, given)]
        if pointers != self.seen:
            if reduce(or_, pointers) & 15:
                return None
            if out is not None:
                self.prepared.check_overlap(pointers)
            self.seen = pointers
        if out is None:
            if self.make_all is None:
                out = self.make()
                pointers = [*pointers, self.address(out)]
            else:
                out = tuple([make() for make in self.make_all])
                pointers = [*pointers, *map(self.address, out)]
        stream = self.current_stream()
        self.execute(pointers, self.workspace.take(self.num_bytes, stream) if self.num_bytes else 0, stream)
        return out


class BoundPlan:
    """A plan fixed to one signature: `plan(x, w, out=y)` makes and looks up nothing, and is legal under graph capture.

    The signature is that of the example arrays; an `out` of another kind than the one it was made with (or than a fresh result) is
    checked and planned for at its first use.
    """

    def __init__(self, session: Session, call: Call, names: tuple[str, ...], keys: tuple[Any, ...], attrs: tuple[Any, ...],
                 outs: tuple[Any, ...], arrays: tuple[Any, ...]) -> None:
        self._session, self._call, self._names, self._keys, self._attrs = session, call, names, keys, attrs
        self._by_out: dict[Any, Prepared] = {}
        self._short: tuple[int, bool, Guarded | None] = 0, False, None  # (number of arrays, whether there was an out, way of such calls)
        self._main = self._prepared(arrays, outs)
        for name in self._main.scalar_names:
            if name in ("out", "stream"):
                raise expected(f"plan {call.op}", f"scalar {name}", "named as an argument of the plan", "another name than out and stream")
        self._planned = tuple(_given(array) for array in arrays)

    def _mismatch(self, arrays: Sequence[Any], keys: tuple[Any, ...]) -> InvalidArgument:
        """Which array is not as it was planned, and all the plan's arguments in their order."""
        order = f"The plan takes {', '.join(f'{n} {p}' for n, p in zip(self._names, self._planned, strict=True))}."
        if len(arrays) > len(self._names):
            return expected(f"plan {self._call.op}", "the number of arrays", len(arrays), f"at most {len(self._names)}", order)
        place = next(i for i, (key, planned) in enumerate(zip(keys, self._keys, strict=True)) if key != planned)
        return expected(f"plan {self._call.op}", self._names[place], _given(arrays[place]), f"{self._planned[place]}, as planned", order)

    def _prepared(self, arrays: tuple[Any, ...], outs: tuple[Any, ...]) -> Prepared:
        out_key = self._session.raw(self._call, self._call.arguments(len(outs)), outs)[1] if outs else None
        found = self._by_out.get(out_key)
        if found is None:
            found = self._session.prepared(self._call, self._names, self._keys, arrays, self._attrs, outs, out_key)
            self._by_out[out_key] = found
        return found

    @property
    def plan(self) -> Plan | None:
        """The plan behind it: engine, config, workspace bytes; None when there is nothing to launch."""
        return self._main.plan

    @property
    def is_deterministic(self) -> bool:
        return self._main.plan is None or self._main.plan.is_deterministic

    def __call__(self, /, *arrays: Any, out: Any = None, stream: Any = None, **scalars: Any) -> Any:
        """Runs it on arrays of the same types, shapes, strides and alignment as it was planned for, in the order of the method's or (but
        for those named out and stream) by name, and scalars by name. Raises InvalidArgument otherwise."""
        count, has_out, short = self._short
        if short is not None and len(arrays) == count and (out is not None) is has_out and stream is None and not scalars:
            result = short((*arrays, out) if has_out else arrays, out)
            if result is not None:
                return result
        is_positional = not scalars
        missing = self._names[len(arrays):]
        taken = self._main.scalar_names  # which may be those of operands that the plan does without
        padded = (*arrays, *(None if name in taken else scalars.pop(name, None) for name in missing)) if missing else arrays
        pointers, keys = self._session.raw(self._call, self._names, padded)
        if keys != self._keys:
            raise self._mismatch(padded, keys)
        prepared = self._prepared(padded, () if out is None else out if isinstance(out, tuple) else (out,))
        result = self._session.execute(prepared, padded, pointers, out, stream, scalars)
        if stream is None and is_positional and self._session.is_plain:
            given = arrays if out is None else (*arrays, out)
            self._short = len(arrays), out is not None, prepared.guarded(given, pointers, self._session.workspace)
        return result

    def __repr__(self) -> str:
        return f"BoundPlan({self.plan.describe() if self.plan else 'empty'})"


class Session:
    """One device, one set of caches and policies; what DnnHandle's methods stand on.

    Keys compare attributes by value: True or 1.0, which an op refuses where it wants an integer, is taken for 1 (and 1 for True) by calls
    that are otherwise as an earlier one with 1. Their types beside them would cost a warm call 0.1 to 0.25 us.

    Concurrency: may be used from several threads. Policy overrides are per context (thread or task).
    """

    def __init__(self, backend: Backend, *, policy: Policy, tune: str, db: TuningDb, stream: int) -> None:
        self.backend = backend
        self.tune = tune
        self.db = db
        self.stream = stream
        self.policy = policy
        self.workspace = Workspace(backend)
        self._plans: OrderedDict[tuple[Any, ...], Prepared] = OrderedDict()
        self._ways: dict[tuple[Any, ...], list[Guarded]] = {}
        self.kept_lists: dict[tuple[Any, ...], Any] = {}  # of calls over lists of arrays: see lists.py
        self._building, self._pid = threading.RLock(), os.getpid()
        code_digest()  # read here rather than by the first call
        self.is_emulated = backend.info.is_emulated
        self._says_exec = report.is_on("exec")
        self.is_plain = not (self.is_emulated or self._says_exec)

    @property
    def info(self) -> DeviceInfo:
        return self.backend.info

    def current_policy(self) -> Policy:
        overrides = POLICY.get()
        return self.policy if overrides is None else overrides.get(id(self), self.policy)

    # ---- the warm path ------------------------------------------------------------------------------------------------------

    def run(self, call: Call, arrays: tuple[Any, ...], attrs: tuple[Any, ...], out: Any, stream: Any,
            scalars: Mapping[str, float] | None = None, extra: Mapping[str, Any] | None = None) -> Any:
        """Runs `call` on `arrays` (None: absent); returns the output, or a tuple of them. extra: further named operands."""
        key: tuple[Any, ...] = ()
        given: list[Any] = []
        ways: Sequence[Guarded] | None = None  # None: no plain call
        if stream is None and not extra and not scalars and self.is_plain:
            sizes: list[int | None] = []  # tell most calls apart at the least cost; the check of the arrays does the rest
            overrides = POLICY.get()
            try:
                for array in arrays:
                    if array is None:
                        sizes.append(None)  # roles are told apart by their place
                    else:
                        given.append(array)
                        sizes.append(array.nbytes)
                key = (call, attrs, tuple(sizes), out is None, None if overrides is None else overrides.get(id(self)))
                ways = self._ways.get(key, ())
            except (AttributeError, RuntimeError, TypeError):  # something without a size, or a list among the attributes
                ways = None
            else:
                if out is not None:
                    given.append(out)
                for way in ways:
                    result = way(given, out)
                    if result is not None:
                        return result
        names = call.tensors
        if extra:
            names, arrays = _with_extra(call, arrays, extra)
        pointers, keys = self.raw(call, names, arrays)
        outs: tuple[Any, ...] = ()
        out_key = None
        if out is not None:
            outs = out if isinstance(out, tuple) else (out,)
            out_key = self.raw(call, call.arguments(len(outs)), outs)[1]
        prepared = self.prepared(call, names, keys, arrays, attrs, outs, out_key, stream)
        result = self.execute(prepared, arrays, pointers, out, stream, scalars)
        if ways is not None and len(ways) < MAX_WAYS:
            found = prepared.guarded(given, pointers, self.workspace)
            if found is not None:
                if len(self._ways) > MAX_PLANS:
                    self._ways.clear()
                self._ways.setdefault(key, []).append(found)
        return result

    def prepared(self, call: Call, names: tuple[str, ...], keys: tuple[Any, ...], arrays: Sequence[Any], attrs: tuple[Any, ...],
                 outs: tuple[Any, ...], out_key: Any, stream: Any = None) -> Prepared:
        """The plan of a signature: kept, or made now."""
        overrides = POLICY.get()
        extra = names[len(call.tensors):] or None
        key = (call, extra, keys, attrs, out_key, None if overrides is None else overrides.get(id(self)))
        plans = self._plans
        try:
            found = plans.get(key)
        except TypeError:  # a list among the attributes
            attrs = call.hashable(attrs)
            key = (*key[:3], attrs, *key[4:])
            found = plans.get(key)
        if found is None:
            return self._prepare(key, call, names, arrays, attrs, outs, stream)
        if len(plans) > MAX_PLANS // 2:
            plans.move_to_end(key)
        return found

    def raw(self, call: Call, names: Sequence[str], arrays: Sequence[Any]) -> tuple[list[int], tuple[Any, ...]]:
        """Addresses of the arrays that are there, and a key of each array's type, shape, strides, alignment and place."""
        pointers: list[int] = []
        keys: list[tuple[Any, ...] | None] = []
        try:
            for array in arrays:
                if array is None:
                    keys.append(None)
                else:
                    pointer, key = (READERS.get(type(array)) or raw)(array)
                    pointers.append(pointer)
                    keys.append(key)
        except InvalidArgument as error:
            raise _named(call.op, names[len(keys)], error) from None
        return pointers, tuple(keys)

    def execute(self, prepared: Prepared, arrays: Sequence[Any], pointers: list[int], out: Any, stream: Any,
                scalars: Mapping[str, float] | None = None) -> Any:
        values = prepared.ordered(scalars) if scalars or prepared.scalar_names else ()
        plan, frame = prepared.plan, prepared.frame
        if out is None:
            makers = prepared.make_outputs
            outs = (makers[0](),) if len(makers) == 1 else tuple([make() for make in makers])
            finish = frame.finish
        else:
            outs = out if isinstance(out, tuple) else (out,)
            if len(outs) != prepared.num_outputs:
                raise expected(prepared.problem.op, prepared.given_as, f"{len(outs)} arrays", f"{prepared.num_outputs}")
            finish = None
        if plan is None:
            return _result(finish, outs)
        address = frame.address if out is None else _address
        for array in outs:
            pointers.append(address(array))
        if prepared.order is not None:
            pointers = [pointers[i] for i in prepared.order]
        if out is not None:
            prepared.check_overlap(pointers)
        if stream is None:
            handle = frame.current_stream()
        else:
            handle = frame.stream(stream)
            if out is None and frame.adopt is not None:
                frame.adopt(outs, handle)
        workspace = self.workspace.take(plan.workspace_bytes, handle) if plan.workspace_bytes else 0
        if self.is_emulated:
            self.execute_emulated(plan, [a for a in (*arrays, *outs) if a is not None], pointers, workspace, handle, values)
        else:
            plan.execute(pointers, workspace, handle, values)
        if self._says_exec:
            report.line("exec", plan.describe())
        return _result(finish, outs)

    def execute_emulated(self, plan: Plan, arrays: list[Any], pointers: list[int], workspace: int, stream: int,
                          scalars: tuple[float, ...]) -> None:
        """The emulator works on NumPy arrays in place: they are legal memory for the length of the call."""
        views = [as_view(a) for a in arrays]
        for view in views:
            self.backend.bind_view(view)
        try:
            plan.execute(pointers, workspace, stream, scalars)
        finally:
            for view in views:
                self.backend.release_view(view)

    # ---- the cold path ------------------------------------------------------------------------------------------------------

    def _prepare(self, key: tuple[Any, ...], call: Call, names: tuple[str, ...], arrays: Sequence[Any], attrs: tuple[Any, ...],
                 outs: tuple[Any, ...], stream: Any) -> Prepared:
        """Checks the arguments, makes the plan and keeps it under `key`. Raises before anything is launched or allocated."""
        if self._pid != os.getpid():  # at the fork the lock may have been held by a thread that the child does not have
            self._building, self._pid = threading.RLock(), os.getpid()
        with self._building:
            found = self._plans.get(key)
            if found is not None:
                return found
            views = {n: self.checked_view(call.op, n, a) for n, a in zip(names, arrays, strict=True) if a is not None}
            if not views and not outs:
                raise expected(call.op, call.tensors[0] if call.tensors else "out", None, "an array")
            inputs = {n: v.desc for n, v in views.items()}
            out_names = OPS[call.op].outputs if call.outputs is None else call.outputs
            if len(outs) > 1 and call.outputs is None:  # which of the row's outputs there are, inputs and attributes say
                out_names = tuple(o.name for o in self.problem(call, inputs, attrs).outputs)
                if len(outs) != len(out_names):
                    raise expected(call.op, call.given_as[0], f"{len(outs)} arrays", f"{len(out_names)}: {', '.join(out_names)}")
            out_views = [self.checked_view(call.op, n, a) for n, a in zip(call.arguments(len(outs)), outs, strict=True)]
            for name, view in zip(call.arguments(len(outs)), out_views, strict=True):
                if view.is_readonly:
                    raise expected(call.op, name, f"a read-only {view.framework} array", "writable memory")
            given_outputs = {n: v.desc for n, v in zip(out_names, out_views, strict=False)}
            problem = self.problem(call, inputs | given_outputs, attrs)
            frame = frame_of(next(a for a in (*arrays, *outs) if a is not None), self.backend, self.stream)
            plan = None
            if not problem.is_empty:
                capturing = self.backend.is_capturing(frame.stream(stream))
                plan = plan_for(problem, self.backend, tune=self.tune, db=self.db, may_measure=not capturing)
            given = [n for n, a in zip(names, arrays, strict=True) if a is not None] + [o.name for o in problem.outputs]
            order = tuple(given.index(o.name) for o in problem.operands)
            prepared = Prepared(problem, plan, None if order == tuple(range(len(order))) else order, frame,
                                tuple(frame.allocator(o.desc) for o in problem.outputs), call.given_as[0])
            self._plans[key] = prepared
            if len(self._plans) > MAX_PLANS:
                self._plans.popitem(last=False)
            return prepared

    def problem(self, call: Call, tensors: Mapping[str, TensorDesc], attrs: tuple[Any, ...]) -> Problem:
        given = {name: value for (name, default), value in zip(call.attrs, attrs, strict=True) if not _is_default(value, default)}
        return OPS[call.op].make(tensors, given, self.current_policy())

    def checked_view(self, op: str, name: str, array: Any) -> TensorView:
        try:
            view = as_view(array)
        except InvalidArgument as error:
            raise _named(op, name, error) from None
        here = self.backend.device
        if view.device != here and not (self.is_emulated and view.device == "cpu"):
            hint = " Copy it with h.array(x)." if view.device == "cpu" else ""
            raise expected(op, name, f"on {view.device}", f"on {here}, the handle's device", hint.strip())
        return view

    def plan(self, call: Call, arrays: tuple[Any, ...], attrs: tuple[Any, ...], out: Any = None,
             extra: Mapping[str, Any] | None = None) -> BoundPlan:
        """The bound plan of a signature given by example arrays."""
        names, arrays = _with_extra(call, arrays, extra or {})
        outs = () if out is None else out if isinstance(out, tuple) else (out,)
        return BoundPlan(self, call, names, self.raw(call, names, arrays)[1], call.hashable(attrs), outs, arrays)

    def explain(self, call: Call, arrays: tuple[Any, ...], attrs: tuple[Any, ...], extra: Mapping[str, Any] | None = None) -> Explanation:
        names, arrays = _with_extra(call, arrays, extra or {})
        tensors = {n: self.checked_view(call.op, n, a).desc for n, a in zip(names, arrays, strict=True) if a is not None}
        return explain(self.problem(call, tensors, attrs), self.info, self.db)


def _is_default(value: Any, default: Any) -> bool:
    """Whether the attribute may be left out. True for 1 and 1.0 for 1 may not: the op refuses them."""
    if value is default or default is None or value != default:  # np.dtype(float) == None
        return value is default
    return isinstance(value, bool) is isinstance(default, bool) and (isinstance(default, float) or not isinstance(value, float))


def _given(array: Any) -> str:
    return "None" if array is None else f"{format_tensor(as_view(array).desc)} of {framework_of(type(array))}"


def _with_extra(call: Call, arrays: tuple[Any, ...], extra: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[Any, ...]]:
    """Roles and arrays with the operands given by name behind; a name that is a role already is refused."""
    if not isinstance(extra, Mapping):
        raise expected(call.op, "operands", repr(extra), "a mapping from names to arrays")
    for name in extra:
        roles = (*call.tensors, *OPS[call.op].outputs)
        if name in roles:
            raise expected(call.op, "operands", f"holding {name!r}", f"names other than the roles {', '.join(roles)}")
    return (*call.tensors, *extra), (*arrays, *extra.values())


def _named(op: str, name: str, error: InvalidArgument) -> InvalidArgument:
    """What is wrong with an array, said of the argument that it was given as."""
    return InvalidArgument(f"{op}: {name}: {str(error).removeprefix('array: ')}")


def _address(array: Any) -> int:
    return raw(array)[0]


def _result(finish: Callable[[Any], Any] | None, outs: tuple[Any, ...]) -> Any:
    if finish is not None:
        outs = tuple(finish(o) for o in outs)
    return outs[0] if len(outs) == 1 else outs


class _NegativeZero(float):
    """-0.0, which a key may not take for 0.0: leaky_relu of one slope gives other bits than of the other."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _NegativeZero)

    def __ne__(self, other: object) -> bool:
        return not isinstance(other, _NegativeZero)

    def __hash__(self) -> int:
        return hash(_NegativeZero)


def signed(value: Any) -> Any:
    """A number whose sign counts where it is 0, as a key takes it."""
    return _NegativeZero(-0.0) if isinstance(value, (float, np.floating)) and value == 0 and math.copysign(1, value) < 0 else value


def hashable(value: Any, op: str, name: str) -> Any:
    """The value of the attribute `name` as a key takes it: sequences as tuples, -0.0 told from 0.0. Raises InvalidArgument for what has
    no hash."""
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return tuple(hashable(v, op, name) for v in value)
    value = signed(value)
    try:
        hash(value)
    except TypeError:
        raise expected(op, name, repr(value), "numbers, strings, tuples or lists") from None
    return value


def _span(desc: TensorDesc) -> tuple[int, int]:
    low, high = desc.offset_range
    size = desc.dtype.num_bytes
    return low * size, (high + 1) * size


def _lane(desc: TensorDesc, period: int) -> tuple[int, int]:
    """(first byte, number of bytes) of the part of every `period` bytes that the tensor keeps to; all of them where it keeps to none."""
    size = desc.dtype.num_bytes
    inner = [(n, s) for n, s in zip(desc.shape, desc.strides, strict=True) if s * size % period]
    low, high = _span(TensorDesc(desc.dtype, tuple(n for n, _ in inner), tuple(s for _, s in inner)))
    return low, min(high - low, period)


def lanes_between(output: TensorDesc, other: TensorDesc) -> tuple[tuple[int, int, int, int], ...]:
    """(period, start of the other's lane from the output's for equal addresses, bytes of either lane): what tells tensors apart that lie
    in each other's gaps, as slices of the channels of one array do."""
    lanes = []
    for period in {abs(s) * output.dtype.num_bytes for n, s in zip(output.shape, output.strides, strict=True) if n > 1 and s}:
        (low, count), (other_low, other_count) = _lane(output, period), _lane(other, period)
        if count + other_count <= period:
            lanes.append((period, other_low - low, count, other_count))
    return tuple(lanes)


def _overlap_pairs(problem: Problem) -> tuple[tuple[int, int, int, int, int, int, bool, tuple[tuple[int, int, int, int], ...]], ...]:
    """Every (output, other) pair of operands with the byte spans of both, whether the output may be exactly the other, and their lanes."""
    operands = problem.operands
    pairs = []
    for i, output in enumerate(operands):
        for j, other in enumerate(operands):
            if output.is_output and j != i and not (other.is_output and j < i):
                may_be_same = (output.name, other.name) in problem.aliases and output.desc == other.desc
                pairs.append((i, j, *_span(output.desc), *_span(other.desc), may_be_same, lanes_between(output.desc, other.desc)))
    return tuple(pairs)

