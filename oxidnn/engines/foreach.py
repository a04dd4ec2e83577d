"""Steps over lists of tensors: one launch for all tensors of the same types, whose addresses and sizes stand in a table of its parameters.

A CTA finds its tensor in the table by bisection and walks over a chunk of it. What is reduced leaves a number a CTA, which a second launch
combines in a fixed order (over each tensor, or all of them); the updates that need the results follow in a third. Tensors of a list whose
elements do not lie in the order of its companions are copied, before or after.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import log2

from ..codegen.pointwise import Expression, arg, outputs, parse, scalar
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType, dtype
from ..ops.base import Operand, Problem
from ..ops.foreach import WRITTEN, ForeachProblem
from ..ops.pointwise import PointwiseProblem
from ..tensor import TensorDesc, packed_strides
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TableArg, TensorArg, WorkspaceArg, refuse
from .pointwise_map import map_step, max_vec

THREADS = 256
COMBINE_THREADS = 1024  # of a CTA that combines what all others have left
_PARAM_BYTES, _OLD_PARAM_BYTES = 32000, 4096  # of the tables: the other parameters fit beside them; what PTX before 8.1 allows in all
_CAPACITIES = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1280, 1536, 2048)
_NEVER = 2**32 - 1  # first CTA of a slot without a tensor
Place = TensorArg | WorkspaceArg


@dataclass(frozen=True, slots=True)
class Stored:
    """A value by name and type in memory. index: 1 if there is one a tensor, else 0."""

    name: str
    dtype: DType
    index: int = 0


@dataclass(frozen=True, slots=True)
class ForeachConsts:
    """expression: the outputs' values, then what is reduced; over inputs, singles, scalars and the values of `uniform`, which are the same
    for all elements (named uniform0, ...) and are computed once. hows: "add" or "max" of what is reduced. capacity: tensors of the table.
    slots: the power of two from capacity on.
    """

    compute: str
    expression: Expression
    uniform: Expression | None
    inputs: tuple[Stored, ...]
    outputs: tuple[Stored, ...]
    singles: tuple[Stored, ...]
    scalars: tuple[str, ...]
    hows: tuple[str, ...]
    vec: int
    capacity: int
    slots: int
    leads: bool = False  # the next launch may get ready meanwhile

    @property
    def lists(self) -> tuple[Stored, ...]:
        return self.inputs + self.outputs

    @property
    def loops(self) -> tuple[int, ...]:
        """Elements that a thread takes at once: in the loop over packs, and over what is left."""
        return (self.vec, 1) if self.vec > 1 else (1,)

    def registers(self, index: int, count: int) -> list[str]:
        """The registers of a list's pack."""
        return [f"%list{index}_{i}" for i in range(count)]

    @property
    def _outer(self) -> dict[str, str]:
        named = {name: f"%scalar{i}" for i, name in enumerate(self.scalars)}
        return named | {s.name: f"%single{i}" for i, s in enumerate(self.singles)}

    def prelude(self) -> str:
        """The PTX of what is the same for all elements."""
        if self.uniform is None:
            return ""
        return self.uniform.lower(self._outer, [f"%uniform{i}" for i in range(self.uniform.num_outputs)], self.compute)

    @property
    def num_uniforms(self) -> int:
        return 0 if self.uniform is None else self.uniform.num_outputs

    def body(self, element: int) -> str:
        """The PTX of one element of the pack."""
        named = self._outer | {f"uniform{i}": f"%uniform{i}" for i in range(self.num_uniforms)}
        named |= {s.name: f"%list{i}_{element}" for i, s in enumerate(self.inputs)}
        results = [f"%list{len(self.inputs) + i}_{element}" for i in range(len(self.outputs))]
        return self.expression.lower(named, results + [f"%part{i}" for i in range(len(self.hows))], self.compute)


@dataclass(frozen=True, slots=True)
class CombineConsts:
    """What is reduced, by name; the results' values over them, and the types they are stored in."""

    compute: str
    expression: Expression
    names: tuple[str, ...]
    hows: tuple[str, ...]
    results: tuple[DType, ...]
    singles: tuple[Stored, ...]
    scalars: tuple[str, ...]
    slots: int
    leads: bool = False

    def body(self) -> str:
        named = {name: f"%scalar{i}" for i, name in enumerate(self.scalars)}
        named |= {s.name: f"%single{i}" for i, s in enumerate(self.singles)}
        named |= {name: f"%sum{i}" for i, name in enumerate(self.names)}
        return self.expression.lower(named, [f"%result{i}" for i in range(len(self.results))], self.compute)


def replaced(expression: Expression, values: Mapping[Expression, Expression]) -> Expression:
    """The expression with nodes replaced."""
    done: dict[Expression, Expression] = {}
    for node in expression.nodes():
        if node in values:
            done[node] = values[node]
        else:
            done[node] = Expression(node.op, tuple(done[o] for o in node.operands), node.value) if node.operands else node
    return done[expression]


def hoisted(expression: Expression, varying: set[str]) -> tuple[Expression, Expression | None]:
    """(expression, its parts that no operand of `varying` enters as several outputs): the parts became scalars uniform0, uniform1, ..."""
    body = expression.expanded()
    depends: dict[Expression, bool] = {}
    for node in body.nodes():
        depends[node] = node.value[0] in varying if node.op == "arg" else any(depends[o] for o in node.operands)
    parts: dict[Expression, Expression] = {}
    for node in body.nodes():
        if depends[node] or node.op == "tuple":
            for operand in node.operands:
                if operand.operands and not depends[operand] and not operand.is_condition:
                    parts.setdefault(operand, scalar(f"uniform{len(parts)}"))
    if not parts:
        return body, None
    return replaced(body, parts), outputs(*parts)


@dataclass(frozen=True, slots=True)
class _Batch:
    """Tensors that one launch takes: their indices, elements, and first CTA each. begin: how many tensors, and CTAs, stand before it."""

    tensors: tuple[int, ...]
    numels: tuple[int, ...]
    first: tuple[int, ...]
    ctas: int
    chunk: int
    tensors_before: int
    ctas_before: int

    @property
    def capacity(self) -> int:
        return next((c for c in _CAPACITIES if c >= len(self.tensors)), len(self.tensors))

    @property
    def slots(self) -> int:
        return 1 << (self.capacity - 1).bit_length()


class ForeachEngine(Engine):
    """All steps over lists. vec: elements of a pack. ctas: for each SM, where the tensors are large."""

    id = "foreach.table"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        return SUPPORTED if isinstance(problem, ForeachProblem) else refuse("not a step over lists of tensors")

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ForeachProblem)
        widths = (2, 1) if problem.compute == "f64" else tuple(dict.fromkeys((self._best(problem), 4, 8, 1)))
        return tuple(sorted((EngineConfig.of(vec=v, ctas=n) for v in widths for n in (64, 24, 8)),
                            key=lambda config: self.estimate(problem, config, device)))

    @staticmethod
    def _best(problem: ForeachProblem) -> int:
        """The pack that keeps enough of memory busy: where few lists are read, or halves, a long one."""
        if problem.compute == "f64":
            return 2
        sizes = [o.desc.dtype.num_bytes for o in problem.operands]
        return 8 if len(problem.input_roles) <= 2 or sizes.count(2) * 2 >= len(sizes) else 4

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ForeachProblem)
        again = 1.4 if problem.results and problem.updates else 1.0
        off = abs(log2(config["vec"] / self._best(problem)))
        # Some 8 CTAs for each that an SM holds even out their ends; fewer where one CTA has to combine what they leave.
        off += abs(log2(config["ctas"] / (24 if problem.reduced and not problem.per_tensor else 64))) / 4
        return 4.0 + again * problem.num_bytes / (device.bandwidth_gbs * 1e3) * (1.05 + 0.1 * off)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ForeachProblem)
        return _Builder(problem, config["vec"], config["ctas"], device).build()


class _Builder:
    """The launches of a problem while they are written."""

    def __init__(self, problem: ForeachProblem, vec: int, ctas_per_sm: int, device: DeviceInfo) -> None:
        self.problem, self.vec, self.ctas_per_sm, self.device = problem, vec, ctas_per_sm, device
        self.scratch = Scratch()
        self.overlaps = device.at_least(9)  # launches may get ready while the one before ends
        self.steps: list[Step] = []
        self.after: list[Step] = []
        self.inputs = problem.input_roles
        self.written = tuple(role for role, _ in problem.updates)
        self.results = {name for name, _ in problem.results}
        self.places: dict[str, Place] = {}

    def build(self) -> Build:
        problem = self.problem
        kept = [i for i in range(problem.count) if problem.descs[f"{self.inputs[0]}_{i}"].numel]
        for i in kept:
            self._place(i)
        late = {role for role, e in problem.updates if self.results & set(e.args)}
        early = [(role, e) for role, e in problem.updates if role not in late]
        batches = self._batches(kept)
        ctas = sum(b.ctas for b in batches)
        size = dtype(problem.compute).num_bytes
        partials = self.scratch.take(len(problem.reduced) * ctas * size) if problem.reduced else None
        if early or problem.reduced:
            for batch in batches:
                self._launch(batch, early, partials, ctas, {})
        made: dict[str, Place] = {}
        if problem.results:
            assert partials is not None
            made = self._combine(batches, partials, ctas)
        if late:
            # What the first launches have written is read back, not computed again: their inputs may lie in the same memory.
            known = {e: arg(role) for role, e in early if e.operands}
            updates = [(role, replaced(e, known)) for role, e in problem.updates if role in late]
            read = {name for _, e in updates for name in e.args}
            assert not read & {role.removeprefix(WRITTEN) for role, _ in early}
            for i, batch in enumerate(batches):
                self._launch(batch, updates, None, 0, made, follows=self.overlaps and i == 0)
        return Build((*self.steps, *self.after), self.scratch.num_bytes)

    def _place(self, i: int) -> None:
        """Where the elements of tensor i of every list lie in one order: at home, or in a copy."""
        problem = self.problem
        roles = {role: problem.descs[f"{role}_{i}"] for role in (*self.written, *self.inputs)}
        model = next((d for d in roles.values() if _is_dense(d)), None)
        shape = roles[self.inputs[0]].shape
        strides = packed_strides(shape) if model is None else model.strides
        for role, desc in roles.items():
            name = f"{role}_{i}"
            if all(n == 1 or s == t for n, s, t in zip(shape, desc.strides, strides, strict=True)):
                self.places[name] = TensorArg(name)
                continue
            copy = TensorDesc(desc.dtype, shape, strides)
            self.places[name] = place = self.scratch.take(copy.num_bytes)
            if role in self.written:
                self.after.append(self._copied(copy, place, desc, TensorArg(name)))
            else:
                self.steps.append(self._copied(desc, TensorArg(name), copy, place))

    def _copied(self, source: TensorDesc, there: Place, target: TensorDesc, here: Place) -> Step:
        operands = (Operand("x", source), Operand("y", target, True))
        problem = PointwiseProblem(self.problem.op, operands, expression=parse("x"), shape=source.shape, compute=self.problem.compute)
        step = map_step(problem, max_vec(problem), self.device)
        found = {"x": there, "y": here}
        return replace(step, args=tuple(found[a.name] if isinstance(a, TensorArg) else a for a in step.args))

    def _batches(self, kept: list[int]) -> list[_Batch]:
        """The tensors by the types of their lists, as many in a batch as the tables of a launch hold."""
        groups: dict[tuple[str, ...], list[int]] = {}
        for i in kept:
            key = tuple(self.problem.descs[f"{role}_{i}"].dtype.name for role in (*self.inputs, *self.written))
            groups.setdefault(key, []).append(i)
        row = 8 * (len(self.inputs) + len(self.written) + 1) + 8  # addresses, elements, and first CTAs up to twice their number
        most = max(c for c in _CAPACITIES if c * row <= _PARAM_BYTES)
        batches: list[_Batch] = []
        tensors_before = ctas_before = 0
        for group in groups.values():
            numels = {i: self.problem.descs[f"{self.inputs[0]}_{i}"].numel for i in group}
            rounds = max(1, min(4096, sum(numels.values()) // (THREADS * self.vec * self.device.num_sms * self.ctas_per_sm)))
            chunk = THREADS * self.vec * rounds
            while max(-(-n // chunk) for n in numels.values()) >= 2**30:
                chunk *= 2
            left = list(group)
            while left:
                first: list[int] = []
                taken: list[int] = []
                ctas = 0
                while left and len(taken) < most and ctas + -(-numels[left[0]] // chunk) < 2**31:
                    taken.append(left.pop(0))
                    first.append(ctas)
                    ctas += -(-numels[taken[-1]] // chunk)
                sizes = tuple(numels[i] for i in taken)
                batches.append(_Batch(tuple(taken), sizes, tuple(first), ctas, chunk, tensors_before, ctas_before))
                tensors_before, ctas_before = tensors_before + len(taken), ctas_before + ctas
        return batches

    # An update reads no result that is an operand: that may have another type.
    def _singles(self, names: tuple[str, ...], made: Mapping[str, Place], before: int) -> tuple[tuple[Stored, ...], list[Arg]]:
        """Operands of one element, and results of reductions, among `names`."""
        problem, kind = self.problem, dtype(self.problem.compute)
        singles: list[Stored] = []
        args: list[Arg] = []
        for name in names:
            if name in problem.shared:
                singles.append(Stored(name, problem.descs[name].dtype))
                args.append(Arg(f"single{len(args)}", "u64", TensorArg(name)))
            elif name in made:
                place = made[name]
                assert isinstance(place, WorkspaceArg)
                singles.append(Stored(name, kind, int(problem.per_tensor)))
                if problem.per_tensor:
                    place = replace(place, byte_offset=place.byte_offset + before * kind.num_bytes)
                args.append(Arg(f"single{len(args)}", "u64", place))
        return tuple(singles), args

    def _scalars(self, names: tuple[str, ...]) -> list[Arg]:
        return [Arg(f"scalar{i}", self.problem.compute, ScalarArg(name)) for i, name in enumerate(names)]

    def _launch(self, batch: _Batch, updates: list[tuple[str, Expression]], partials: WorkspaceArg | None, ctas: int,
                made: Mapping[str, Place], follows: bool = False) -> None:
        problem = self.problem
        reduced = problem.reduced if partials is not None else ()
        whole = outputs(*(e for _, e in updates), *(e for _, _, e in reduced))
        read = tuple(dict.fromkeys(n for n in whole.args if n in self.inputs or n in self.written))
        first, writes = batch.tensors[0], tuple(role for role, _ in updates)
        singles, single_args = self._singles(tuple(n for n in whole.args if n not in read), made, batch.tensors_before)
        body, uniform = hoisted(whole, set(read))
        inputs, written = (tuple(Stored(r, problem.descs[f"{r}_{first}"].dtype) for r in roles) for roles in (read, writes))
        consts = ForeachConsts(problem.compute, body, uniform, inputs, written, singles, whole.scalars, tuple(how for _, how, _ in reduced),
                               self.vec, batch.capacity, batch.slots, self.overlaps and bool(reduced))
        unused = batch.capacity - len(batch.tensors)
        table: list[Place | int] = []
        for role in (*read, *writes):
            table += [*(self.places[f"{role}_{i}"] for i in batch.tensors), *(0,) * unused]
        table += [*batch.numels, *(0,) * unused]
        starts = (*batch.first, *(_NEVER,) * (batch.slots - len(batch.first)))
        args = [Arg("table", f"u64[{len(table)}]", TableArg(tuple(table))), Arg("first", f"u32[{batch.slots}]", TableArg(starts)),
                Arg("chunk", "u32", batch.chunk), *single_args, *self._scalars(whole.scalars)]
        if partials is not None:
            offset = batch.ctas_before * dtype(problem.compute).num_bytes
            args += [Arg("partials", "u64", replace(partials, byte_offset=partials.byte_offset + offset)), Arg("num_partials", "u32", ctas)]
        is_large = 8 * len(table) + 4 * batch.slots + 16 * len(args) > _OLD_PARAM_BYTES
        target = Target.for_arch(self.device.arch, (8, 1) if is_large else (7, 0))
        self.steps.append(Step.of("foreach/map", problem.op, target, THREADS, args, consts, batch.ctas, suffix="" if updates else "reduce",
                                  follows=follows))

    def _combine(self, batches: list[_Batch], partials: WorkspaceArg, ctas: int) -> dict[str, Place]:
        """One launch (of tensors each: one a batch) from the CTAs' numbers to the results. Where these lie."""
        problem, kind = self.problem, dtype(self.problem.compute)
        whole = outputs(*(e for _, e in problem.results))
        names = tuple(name for name, _, _ in problem.reduced)
        count = sum(len(b.tensors) for b in batches) if problem.per_tensor else 1
        made: dict[str, Place] = {}
        kinds = []
        for name, _ in problem.results:
            is_operand = name in problem.descs
            made[name] = TensorArg(name) if is_operand else self.scratch.take(count * kind.num_bytes)
            kinds.append(problem.descs[name].dtype if is_operand else kind)
        singles, single_args = self._singles(tuple(n for n in whole.args if n not in names), {}, 0)
        if problem.per_tensor:
            bounds = [((*(b.ctas_before + f for f in b.first), b.ctas_before + b.ctas), len(b.tensors), b.tensors_before, b.slots)
                      for b in batches]
        else:
            bounds = [((0, ctas), 1, 0, 1)]
        for i, (row, tensors, before, slots) in enumerate(bounds):
            consts = CombineConsts(problem.compute, whole, names, tuple(how for _, how, _ in problem.reduced), tuple(kinds), singles,
                                   whole.scalars, slots, self.overlaps and i == len(bounds) - 1)
            row = (*row, *(ctas,) * (slots + 1 - len(row)))
            args = [Arg("bounds", f"u32[{len(row)}]", TableArg(row)), Arg("partials", "u64", partials), Arg("num_partials", "u32", ctas)]
            args += [Arg(f"result{i}", "u64", replace(p, byte_offset=p.byte_offset + before * kind.num_bytes)
                         if isinstance(p, WorkspaceArg) else p) for i, p in enumerate(made.values())]
            args += [*single_args, *self._scalars(whole.scalars)]
            target = Target.for_arch(self.device.arch, (8, 1) if 4 * len(row) + 16 * len(args) > _OLD_PARAM_BYTES else (7, 0))
            threads = THREADS if problem.per_tensor else COMBINE_THREADS
            self.steps.append(Step.of("foreach/combine", problem.op, target, threads, args, consts, tensors,
                                      follows=self.overlaps and bool(batches) and i == 0))
        return made


def _is_dense(desc: TensorDesc) -> bool:
    """True if the elements fill a stretch of memory, in any order of the dimensions."""
    step = 1
    for stride, extent in sorted((s, n) for n, s in zip(desc.shape, desc.strides, strict=True) if n > 1):
        if stride != step:
            return False
        step *= extent
    return True


ENGINES: dict[str, tuple[Engine, ...]] = {
    op: (ForeachEngine(),) for op in ("sgd_step", "adam_step", "adagrad_step", "rmsprop_step", "lion_step", "lamb_step", "grad_norm",
                                      "clip_grad_norm", "unscale_grads", "foreach")}
