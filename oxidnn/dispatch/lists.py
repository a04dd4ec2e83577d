"""Calls over lists of tensors, in place: hundreds of arrays, of which a warm call looks at each but once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np

from .. import report
from ..errors import InvalidArgument, expected
from ..interchange import Frame, frame_of
from ..ops import OPS
from ..ops.base import Problem
from ..ops.foreach import WRITTEN
from ..plan import Plan
from ..tensor import TensorDesc
from .planning import plan_for
from .session import MAX_WAYS, POLICY, Call, Session, lanes_between

MAX_KEPT = 256  # signatures of a session


@dataclass(frozen=True, slots=True, eq=False)
class Signature:
    """The arrays of a call by name: read_0, read_1, ..., shared, then what is only written. in_place: outputs -> the array they replace.

    Made once and compared by identity.
    """

    call: Call
    in_place: tuple[tuple[str, str], ...]


@lru_cache(maxsize=1024)
def _signature(op: str, read: tuple[str, ...], shared: tuple[str, ...], own: tuple[str, ...], in_place: tuple[tuple[str, str], ...],
               count: int) -> Signature:
    names = [f"{role}_{i}" for role in read for i in range(count)] + list(shared) + [f"{role}_{i}" for role in own for i in range(count)]
    pairs = []
    for out, role in in_place:
        pairs += [(out, role)] if role in shared else [(f"{out}_{i}", f"{role}_{i}") for i in range(count)]
    return Signature(Call(op, tuple(names)), tuple(pairs))


class Kept:
    """A plan joined to the way its arrays arrive."""

    __slots__ = ("ends", "fresh", "frame", "guard", "key", "lanes", "makers", "ordered", "plan", "problem", "scalars", "seen", "starts",
                 "written")

    def __init__(self, problem: Problem, plan: Plan | None, frame: Frame, arrays: Sequence[Any], signature: Signature,
                 descs: Sequence[TensorDesc], key: Any) -> None:
        self.problem, self.plan, self.frame, self.key = problem, plan, frame, key
        place = {name: i for i, name in enumerate(signature.call.tensors)}
        place |= {out: place[name] for out, name in signature.in_place}
        self.fresh = tuple(o.name for o in problem.outputs if o.name not in place)
        place |= {name: len(signature.call.tensors) + i for i, name in enumerate(self.fresh)}
        self.makers = tuple(frame.allocator(o.desc) for o in problem.outputs if o.name in self.fresh)
        self.ordered = itemgetter(*(place[o.name] for o in problem.operands))  # there are at least two
        self.scalars = tuple(s.name for s in problem.scalars)
        self.guard = frame.guard(arrays) if frame.guard is not None else None
        self.seen: list[int] = []  # addresses last found free of overlaps
        self.written = np.zeros(len(descs), bool)
        self.written[[i for i in {place[o.name] for o in problem.outputs} if i < len(descs)]] = True
        sizes = [d.dtype.num_bytes for d in descs]
        self.starts = np.array([d.offset_range[0] * n for d, n in zip(descs, sizes, strict=True)], np.int64)
        self.ends = np.array([(d.offset_range[1] + 1) * n for d, n in zip(descs, sizes, strict=True)], np.int64)
        self.lanes: Callable[[int, int], Any] = lambda i, j: lanes_between(descs[i], descs[j])

    def check_overlap(self, pointers: list[int], names: Sequence[str]) -> None:
        """What is written may share no byte with anything else."""
        if pointers == self.seen:  # a loop over the same buffers is checked once
            return
        at = np.array(pointers, np.int64)
        order = np.argsort(at + self.starts, kind="stable")
        starts, ends = (at + self.starts)[order], (at + self.ends)[order]
        reach = np.maximum.accumulate(ends)
        for k in np.flatnonzero(starts[1:] < reach[:-1]) + 1:
            j = int(order[k])
            for i in map(int, order[:k][ends[:k] > starts[k]]):
                if not (self.written[i] or self.written[j]) or at[i] + self.starts[i] == at[i] + self.ends[i]:
                    continue
                apart = pointers[j] - pointers[i]
                if at[j] + self.starts[j] < at[j] + self.ends[j] and not any(
                        n <= (apart + start) % period <= period - m for period, start, n, m in self.lanes(i, j)):
                    written, other = (i, j) if self.written[i] else (j, i)
                    raise InvalidArgument(f"{self.problem.op}: {names[written]!r}, which is written, overlaps {names[other]!r} in memory "
                                          f"(expected separate memory).")
        self.seen = pointers


def run_lists(session: Session, op: str, lists: Mapping[str, Sequence[Any] | None], shared: Mapping[str, Any],
              targets: Mapping[str, str | Sequence[Any]], attrs: tuple[tuple[str, Any], ...], scalars: Mapping[str, float],
              stream: Any) -> Any:
    """Runs `op` on lists of arrays and shared arrays of one element (None: absent). Returns what is made fresh, or None.

    targets: role of an output -> the list or shared array that it overwrites, or a list of arrays of its own.
    """
    arrays: list[Any] = []
    read, names, own, in_place = [], [], [], []
    count = 0
    for role, values in lists.items():
        if values is not None:
            count = count or _length(op, role, values, 0)
            _length(op, role, values, count)
            arrays += values
            read.append(role)
    for name, array in shared.items():
        if array is not None:
            arrays.append(array)
            names.append(name)
    for role, target in targets.items():
        if isinstance(target, str):
            if lists.get(target) is not None or shared.get(target) is not None:
                in_place.append((role, target))
        else:
            _length(op, role.removeprefix(WRITTEN), target, count)
            arrays += target
            own.append(role)
    signature = _signature(op, tuple(read), tuple(names), tuple(own), tuple(in_place), count)
    overrides = POLICY.get()
    key = (signature, attrs, None if overrides is None else overrides.get(id(session)))
    kept = session.kept_lists.get(key, ())
    for way in kept:
        if way.guard is not None and way.guard(*arrays):
            return _execute(session, way, arrays, [*map(way.frame.address, arrays)], scalars, stream, signature)
    pointers, keys = session.raw(signature.call, signature.call.tensors, arrays)
    for way in kept:
        if way.key == keys:
            return _execute(session, way, arrays, pointers, scalars, stream, signature)
    way = _prepare(session, signature, arrays, attrs, keys, stream)
    if len(session.kept_lists) > MAX_KEPT:
        session.kept_lists.clear()
    session.kept_lists[key] = (way, *kept[:MAX_WAYS - 1])
    return _execute(session, way, arrays, pointers, scalars, stream, signature)


def _length(op: str, role: str, values: Any, count: int) -> int:
    """How many arrays a list has: `count`, or any number but 0."""
    if not isinstance(values, (list, tuple)):
        raise expected(op, role + "s", type(values).__name__, "a list or tuple of arrays")
    if not values or count and len(values) != count:
        raise expected(op, role + "s", f"{len(values)} arrays", f"{count}, as of the other lists" if count else "at least one")
    return len(values)


def _prepare(session: Session, signature: Signature, arrays: Sequence[Any], attrs: tuple[tuple[str, Any], ...], keys: Any,
             stream: Any) -> Kept:
    """Checks the arrays and makes the plan. Raises before anything is launched or allocated."""
    op = signature.call.op
    views = {n: session.checked_view(op, n, a) for n, a in zip(signature.call.tensors, arrays, strict=True)}
    overwritten = {name for _, name in signature.in_place}
    tensors = {n: v.desc for n, v in views.items()}
    tensors |= {out: tensors[name] for out, name in signature.in_place}
    problem = OPS[op].make(tensors, dict(attrs), session.current_policy())
    outputs = {o.name for o in problem.outputs}
    for name, view in views.items():
        if view.is_readonly and (name in outputs or name in overwritten):
            raise expected(op, name, f"a read-only {view.framework} array", "writable memory: it is overwritten")
    frame = frame_of(arrays[0], session.backend, session.stream)
    plan = None
    if not problem.is_empty:
        capturing = session.backend.is_capturing(frame.stream(stream))
        plan = plan_for(problem, session.backend, tune=session.tune, db=session.db, may_measure=not capturing)
    return Kept(problem, plan, frame, arrays, signature, [v.desc for v in views.values()], keys)


def _execute(session: Session, way: Kept, arrays: list[Any], pointers: list[int], scalars: Mapping[str, float], stream: Any,
             signature: Signature) -> Any:
    plan, frame = way.plan, way.frame
    way.check_overlap(pointers, signature.call.tensors)
    fresh = tuple([make() for make in way.makers])
    if plan is not None:
        values = tuple([scalars[name] for name in way.scalars])
        places = [*pointers, *map(frame.address, fresh)] if fresh else pointers
        operands = way.ordered(places)
        handle = frame.stream(stream)
        if fresh and stream is not None and frame.adopt is not None:
            frame.adopt(fresh, handle)
        workspace = session.workspace.take(plan.workspace_bytes, handle) if plan.workspace_bytes else 0
        if session.is_emulated:
            distinct = list({id(a): a for a in (*arrays, *fresh)}.values())
            session.execute_emulated(plan, distinct, operands, workspace, handle, values)
        else:
            plan.execute(operands, workspace, handle, values)
        if report.is_on("exec"):
            report.line("exec", plan.describe())
    if frame.finish is not None:
        fresh = tuple(frame.finish(f) for f in fresh)
    return fresh[0] if fresh else None
