"""Rows: what engines share whose threads walk along some dimensions of a tensor. Pairs with ptx_templates/rowwise/{row,columns}.ptx.j2."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from math import gcd, inf, nan
from typing import Any, ClassVar, Protocol

from ..codegen import elementary
from ..codegen.environment import f32_literal, f64_literal
from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType
from ..dtypes import dtype as dtype_of
from ..ops.base import Problem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, ArgValue, Engine, EngineConfig, ScalarArg, Step, Support, TensorArg, refuse
from .collapse import by_stride
from .digits import DigitConsts, Digits
from .element_epilogue import ElementEpilogue

LIMIT = 2**31
_RESIDENT_BYTES = 128  # most a thread holds of rows in registers, in the compute type
_SHARED_PACKS = 16  # most packs of a row a thread holds in shared memory
_SHARED_BYTES = 64 << 10  # of a CTA: three on an SM


@dataclass(frozen=True, slots=True)
class OperandConsts:
    """An operand as templates see it. has_rows, has_columns: whether it moves with the row, with the column. moves_packs: whether a pack
    of its columns can be moved at once. shifts: a value a column, whose packs are put together from two neighbours, as rows are skewed."""

    name: str
    dtype: str
    has_rows: bool
    has_columns: bool
    moves_packs: bool
    shifts: bool = False


@dataclass(frozen=True, slots=True)
class RowConsts(ElementEpilogue):
    """What every row-wise template reads, as the field `rows` of its own consts.

    digits, columns: those of the index of a row and of a column (one is the column itself). lanes: threads a row, of `cluster` CTAs;
    chunks: packs of `vector` columns a thread holds in registers; shared: packs it holds in shared memory, of each of `held`; both 0: the
    row is read again for every pass. live: packs whose registers are in use at once. slots: reductions over a row. epilogue: of "acc" and
    operands to the outputs. is_whole: every pack of every thread lies in an existing row. is_skewed: rows begin anywhere addresses of
    packs; a row's packs are those of memory: its first and its last may lie in it in part, and the first one's column may be negative.
    streams: what is read of rows leaves the L2 first.
    """

    operands: tuple[OperandConsts, ...]
    compute: str
    digits: DigitConsts
    columns: DigitConsts
    lanes: int
    vector: int
    chunks: int
    slots: int
    epilogue: Expression | None = None
    outputs: tuple[str, ...] = ()
    shared: int = 0
    held: tuple[str, ...] = ()
    cluster: int = 1
    live: int = 1
    is_whole: bool = False
    is_skewed: bool = False
    streams: bool = False

    inf: ClassVar[float] = inf
    nan: ClassVar[float] = nan

    @property
    def compute_bytes(self) -> int:
        return 8 if self.compute == "f64" else 4

    @property
    def p_column(self) -> str:
        """The predicate of a pack, "" where all lie inside."""
        return "" if self.is_whole else "%p_column"

    def load(self, name: str) -> str:
        return "ld.global.cs." if self.streams and self.has_rows(name) else "ld.global."

    @property
    def is_held(self) -> bool:
        """Whether passes over the row cost no memory traffic."""
        return bool(self.chunks or self.shared)

    @property
    def pack_bytes(self) -> int:
        """Of a pack in shared memory."""
        return self.vector * dtype_of(self.dtype(self.held[0])).num_bytes

    def slot_bytes(self, threads: int) -> int:
        """One reduction's exchange: a value of each warp of the row's CTAs."""
        return threads // 32 * self.cluster * self.compute_bytes

    def target(self, device: DeviceInfo) -> Target:
        """CTAs of a cluster exchange values by st.async, of PTX 8.1."""
        return Target.for_arch(device.arch, (8, 1) if self.cluster > 1 else (7, 0))

    def shares(self, threads: int) -> int:
        """Values of an exchange between CTAs that one lane reads."""
        return max(1, threads // 32 * self.cluster // 32)

    def _operand(self, name: str) -> OperandConsts:
        return next(o for o in self.operands if o.name == name)

    def has(self, name: str) -> bool:
        return any(o.name == name for o in self.operands)

    def dtype(self, name: str) -> str:
        return self._operand(name).dtype

    def has_rows(self, name: str) -> bool:
        return self._operand(name).has_rows

    def moves_packs(self, name: str) -> bool:
        return self._operand(name).moves_packs

    def shifts(self, name: str) -> bool:
        return self._operand(name).shifts

    def element_bytes(self, name: str) -> int:
        return dtype_of(self.dtype(name)).num_bytes

    def names(self, prefix: str, base: int) -> list[str]:
        """The registers of one pack."""
        return [f"{prefix}{base + i}" for i in range(self.vector)]

    def block(self, prefix: str) -> list[str]:
        """The registers of all packs that live at once."""
        return [f"{prefix}{i}" for i in range(self.vector * self.live)]

    def preset_word(self, operand: str, preset: str) -> str:
        """Two halves of the type of `operand`, as a word: `preset` (literal of 0 or -inf). "" if it is not moved in words of two halves."""
        kind = self.dtype(operand)
        if kind not in ("f16", "bf16") or self.vector < 2 or not self.moves_packs(operand):
            return ""
        return {self.literal(0.0): "0", self.literal(-inf): "0xFC00FC00" if kind == "f16" else "0xFF80FF80"}.get(preset, "")

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    def elementary(self, function: str, dst: str, src: str) -> str:
        """A scope that sets dst to "exp" or "log" of src, accurate to the compute type."""
        emit = elementary.Emitter("%ef_")
        result = getattr(elementary, f"{function}_{self.compute}")(emit, src)
        lines = [*emit.declarations(), *emit.lines, f"mov.{self.compute} {dst}, {result};"]
        return "\n".join(["    {", *("        " + line for line in lines), "    }"])

    def apply_epilogue(self, acc: str, element: int) -> str:
        """PTX: %result_<output><element> = the epilogue of register acc, %arg_<name><element> and %scalar_<name>."""
        return self.lower_epilogue(acc, element, [f"%result_{n}{element}" for n in self.outputs])


class TemplateConsts(Protocol):
    """The consts of a row-wise template."""

    @property
    def rows(self) -> RowConsts: ...


class RingTemplateConsts(TemplateConsts, Protocol):
    """The consts of a template on the ring of rows. stages: of the ring. behind: a row is written once the sums of as many rows after it
    are out; 0: at once. lead: threads without columns that make the exchange."""

    @property
    def stages(self) -> int: ...

    @property
    def behind(self) -> int: ...

    @property
    def lead(self) -> int: ...


@dataclass(frozen=True, slots=True)
class RowOperand:
    """An operand over the index space: byte strides over all its dimensions, and where it lies. has_*: see OperandConsts."""

    name: str
    dtype: DType
    strides: tuple[int, ...]
    align: int
    value: ArgValue
    has_rows: bool = True
    has_columns: bool = True


@dataclass(frozen=True)
class Rows:
    """An index space of rows and columns. axes: the dimensions a row is made of, in any order; the others count rows."""

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    operands: tuple[RowOperand, ...]

    @staticmethod
    def of(shape: Sequence[int], axes: Sequence[int], full: Mapping[str, TensorDesc], per_row: Mapping[str, TensorDesc] | None = None,
           per_column: Mapping[str, TensorDesc] | None = None, values: Mapping[str, ArgValue] | None = None) -> Rows:
        """The operands that have every dimension of `shape` (stride 0 where one broadcasts), those with a value a row (of the other
        dimensions' shape, or of rank 0: one for all), and those with a value a column (of the axes' shape). The first full one decides
        the arithmetic and the order of memory. values: where they lie, unless that is the operand of that name."""
        kept = [i for i in range(len(shape)) if i not in axes]

        def operand(name: str, desc: TensorDesc, dims: Sequence[int], has_rows: bool, has_columns: bool) -> RowOperand:
            size = desc.dtype.num_bytes
            strides = dict(zip(dims, desc.strides, strict=True))
            return RowOperand(name, desc.dtype, tuple(strides.get(i, 0) * size for i in range(len(shape))), desc.align,
                              (values or {}).get(name, TensorArg(name)), has_rows, has_columns)

        found = [operand(n, d, range(len(shape)), True, True) for n, d in full.items()]
        found += [operand(n, d, kept if d.rank else (), True, False) for n, d in (per_row or {}).items()]
        found += [operand(n, d, sorted(axes), False, True) for n, d in (per_column or {}).items()]
        return Rows(tuple(shape), tuple(axes), tuple(found))

    @property
    def column_steps(self) -> tuple[int, ...]:
        """What a step along each of the axes, ascending, adds to the index of the column."""
        axes = sorted(self.axes)
        steps, size = {}, 1
        for i in reversed(by_stride([self.shape[a] for a in axes], [self.operands[0].strides[a] for a in axes])):
            steps[i] = size
            size *= self.shape[axes[i]]
        return tuple(steps[i] for i in range(len(axes)))

    def _collapsed(self, stem: str, dims: Sequence[int], operands: Sequence[RowOperand]) -> Digits:
        strides = {o.name: tuple(o.strides[i] for i in dims) for o in operands}
        names = tuple(f"d{i}" for i in dims)
        return Digits(names, tuple(self.shape[i] for i in dims), strides).ordered_for(self.operands[0].name).collapsed(stem)

    @cached_property
    def row_digits(self) -> Digits:
        dims = [i for i in range(len(self.shape)) if i not in self.axes]
        return self._collapsed("r", dims, [o for o in self.operands if o.has_rows])

    @cached_property
    def column_digits(self) -> Digits:
        """One digit where every operand steps evenly from column to column."""
        return self._collapsed("k", sorted(self.axes), [o for o in self.operands if o.has_columns])

    @property
    def dtype(self) -> DType:
        return self.operands[0].dtype

    def moves_packs(self, operand: RowOperand, vector: int) -> bool:
        """Whether `vector` neighbouring columns lie side by side, aligned for moves of 16 bytes (of all, if they are fewer)."""
        if vector == 1 or not operand.has_columns:
            return True
        size = operand.dtype.num_bytes
        piece = min(16, vector * size)
        columns = self.column_digits
        row = columns.strides[operand.name]
        others = [*row[:-1], *(s for i, s in enumerate(operand.strides) if i not in self.axes and self.shape[i] > 1)]
        return row[-1] == size and columns.extents[-1] % vector == 0 and operand.align >= piece and all(s % piece == 0 for s in others)

    @property
    def _full(self) -> list[RowOperand]:
        """Operands with an element of their own in every row and column, but for those that broadcast along the columns."""
        return [o for o in self.operands if o.has_rows and o.has_columns and all(o.strides[i] for i in self.axes if self.shape[i] > 1)]

    def keeps_skew(self, operand: RowOperand, vector: int) -> bool:
        """Whether rows of this operand begin as far behind the address of a pack as those of the first, counted in elements."""
        size, first = operand.dtype.num_bytes, self.operands[0]
        rows = [(operand.strides[i], first.strides[i]) for i in range(len(self.shape)) if i not in self.axes and self.shape[i] > 1]
        return (operand.has_rows and operand.has_columns and len(self.column_digits.extents) == 1
                and self.column_digits.strides[operand.name][-1] == size and operand.align >= min(16, vector * size)
                and all(min(s, f) >= 0 and (s // size - f // first.dtype.num_bytes) % vector == 0 for s, f in rows))

    def shifts(self, operand: RowOperand, vector: int) -> bool:
        """Whether a pack of an operand of a value a column can be put together from two that are aligned."""
        return (not operand.has_rows and operand.has_columns and operand.dtype.num_bytes * vector == 16 and vector == 8
                and self.column_digits.strides[operand.name][-1] == operand.dtype.num_bytes and operand.align >= 16)

    def skewed_vector(self) -> int:
        """Elements of packs of 16 bytes, if rows that do not begin at such a pack can be moved by them; else 0."""
        vector = 16 // self.dtype.num_bytes
        found = vector > 1 and vector > self.vector() and self.operands[0].align >= 16
        return vector if found and all(self.keeps_skew(o, vector) for o in self._full) else 0

    def holds_skew(self, operands: Sequence[RowOperand], vector: int) -> bool:
        """Whether copies bring packs of these operands' skewed rows to shared memory."""
        return all(o.dtype is self.dtype and self.keeps_skew(o, vector) for o in operands)

    @property
    def period(self) -> int:
        """Rows of one row digit from one to the next that begins as far behind the address of a pack."""
        stride, pack = self.row_digits.strides[self.operands[0].name][-1], 16
        return pack // gcd(stride, pack)

    def vector(self) -> int:
        """The longest pack of columns (at most 16 bytes) with which every full operand that does not broadcast can be moved."""
        bound = self._full
        vector = 16 // self.dtype.num_bytes
        while vector > 1 and not all(self.moves_packs(o, vector) for o in bound):
            vector //= 2
        return vector


def compute_type(kind: DType) -> str:
    """The type of the arithmetic on rows."""
    return "f64" if kind.name == "f64" else "f32"


def power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()


def resident_groups(device: DeviceInfo, threads: int, cluster: int, resident: int = 512) -> int:
    """CTAs or clusters under way at a time, with `resident` threads on an SM; clusters of more than two do not fill every SM."""
    sms = device.num_sms if cluster <= 2 else device.num_sms * 10 // 11
    return max(1, sms * (resident // threads) // cluster)


def behind_stages(packs: int, config: EngineConfig, pack_bytes: int, device: DeviceInfo) -> int:
    """Of a ring of a config of behind_configs. packs: of a row a thread; pack_bytes: of all operands held."""
    return min(8, (device.smem_per_cta - 8192) // (packs * config["threads"] * pack_bytes))


def ring_target(consts: RingTemplateConsts, device: DeviceInfo) -> Target:
    """mbarriers of other CTAs, or those of a ring whose rows are behind, take PTX 8.1."""
    return replace(consts.rows, cluster=2).target(device) if consts.behind else consts.rows.target(device)


class RowEngine(Engine):
    """What the row-wise engines share: how threads are dealt to rows, and the arguments that follow."""

    held_operands: ClassVar[tuple[str, ...]] = ("x",)  # of a row, for all passes over it; those that the problem has
    held: ClassVar[int] = 1  # of them in registers at once
    live_elements: ClassVar[int] = 32  # of a row that is read again, loaded before the first is used
    most_threads: ClassVar[int] = 512  # of a CTA that holds a row in registers, where shared memory would do, too

    def takes_skew(self, problem: Problem) -> bool:
        """Whether the template works on elements beyond the row that hold the presets of its loads."""
        return False

    def rows(self, problem: Problem) -> Rows:
        raise NotImplementedError

    def reads_once(self, problem: Problem) -> bool:
        """Whether one pass over a row is all it takes, so that nothing is won by holding it."""
        return False

    def resident(self, kind: DType) -> int:
        """The most elements of a row a thread holds in registers."""
        return _RESIDENT_BYTES // (8 if compute_type(kind) == "f64" else 4) // self.held

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        rows = self.rows(problem)
        count, columns = rows.row_digits.size, rows.column_digits.size
        if count >= LIMIT or columns >= LIMIT:
            return refuse(f"{count} rows of {columns} columns (at most {LIMIT - 1} of each)")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        """Threads side by side along the columns where those lie together, else along the rows."""
        rows = self.rows(problem)
        columns, count = rows.column_digits, rows.row_digits.size
        vector = rows.vector()
        packs = -(-columns.size // vector)
        chunks = max(1, self.resident(rows.dtype) // vector)
        warp = EngineConfig.of(home="registers", lanes=min(32, power_of_two(packs)), vec=vector, threads=128)
        step = columns.strides[rows.operands[0].name][-1]
        if step != rows.dtype.num_bytes and columns.size > 1 and count >= 32:
            return (EngineConfig.of(home="registers", lanes=1, vec=1, threads=128), warp)
        found = []
        if packs <= 32 * min(chunks, 4):  # several packs a thread: more loads under way, fewer steps to reduce
            found += [EngineConfig.of(home="registers", lanes=power_of_two(-(-packs // min(chunks, 4))), vec=vector, threads=128), warp]
        shared = self._shared_configs(rows, vector, packs, device)
        if packs > 64:
            threads = max(64, min(512, power_of_two(-(-packs // chunks))))
            held = [EngineConfig.of(home="registers", lanes=threads, vec=vector, threads=threads)] if packs <= threads * chunks else []
            found += [*held, *shared] if threads <= self.most_threads else [*shared, *held]
        clusters = (2, 4, 8) if device.at_least(9, 0) and count * 8 < LIMIT else ()
        if packs > 512 * chunks:
            is_apart = found == []  # packs that cp.async cannot move
            if is_apart:
                found += [EngineConfig.of(home="registers", lanes=512, vec=vector, threads=512, cluster=k) for k in clusters
                          if packs <= 512 * chunks * k][:1]
            wide = 8 if clusters and packs > 512 * 8 else 1
            memory = [EngineConfig.of(home="memory", lanes=512, vec=vector, threads=512, cluster=k) for k in dict.fromkeys((wide, 1))]
            found = [*memory[::-1], *found] if self.reads_once(problem) else [*found, *memory]
            if is_apart and self.held == 1 and count >= 4 * device.num_sms:
                found = [memory[-1], *(c for c in found if c != memory[-1])]  # many small loads under way count for more than a second read
            if self.held == 2 and 512 * 8 < packs <= 512 * 16 and clusters:
                found.insert(0, memory[0])  # L1 holds two operands of 32 KB a CTA
        elif packs > 1536 and self.reads_once(problem):  # on an H200 81 us where 512 threads that hold the row take 96
            found.insert(0, EngineConfig.of(home="memory", lanes=256, vec=vector, threads=256, cluster=1))
        skewed = self._skewed_configs(rows, device) if self.takes_skew(problem) else []
        if skewed and self.reads_once(problem) and rows.column_digits.size > 512 * rows.skewed_vector() * 2:
            skewed = [*(EngineConfig.of(home="skewed_memory", lanes=n, vec=rows.skewed_vector(), threads=n, cluster=1) for n in (256, 512)),
                      *skewed]
        return tuple(dict.fromkeys([*skewed, *found])) or (warp,)

    def _skewed_configs(self, rows: Rows, device: DeviceInfo) -> list[EngineConfig]:
        """Rows that begin between packs, in shared memory: a thread has some packs of a row, so that loads are under way."""
        vector, held = rows.skewed_vector(), [o for o in rows.operands if o.name in self.held_operands]
        packs = (rows.column_digits.size + 2 * vector - 2) // max(vector, 1)
        if not device.at_least(8, 0) or not vector or packs < 8 or not rows.holds_skew(held, vector):
            return []
        pack, found = 16 * len(held), list[EngineConfig]()
        if packs <= 128:
            found.append(EngineConfig.of(home="skewed", lanes=power_of_two(-(-packs // 4)), vec=vector, threads=128, cluster=1))
        if packs <= 64:
            return found
        clusters = (1, 2, 4, 8) if device.at_least(9, 0) and rows.row_digits.size * 8 < LIMIT else (1,)
        for threads in (512, 256, 128):
            for cluster in clusters:
                each = -(-packs // (threads * cluster))
                if each <= _SHARED_PACKS and each * threads * pack <= min(_SHARED_BYTES, device.smem_per_cta // 2):
                    if packs > threads * cluster // 2:
                        found += [EngineConfig.of(home="skewed", lanes=threads, vec=vector, threads=threads, cluster=k)
                                  for k in ((cluster, 8) if cluster in (2, 4) else (cluster,)) if packs > threads * k // 2]
                    break

        def cost(c: EngineConfig) -> float:
            """As measured on an H200: threads without columns, CTAs that exchange, and how many threads wait for each other."""
            lanes = c["lanes"] * c["cluster"]
            waste = -(-packs // lanes) * lanes / packs
            return waste * (1 + 0.03 * (c["cluster"].bit_length() - 1)) + {512: 0.1, 256: 0.0}.get(c["threads"], 0.03)

        return sorted(found, key=cost)

    def _shared_configs(self, rows: Rows, vector: int, packs: int, device: DeviceInfo) -> list[EngineConfig]:
        """The row in shared memory, of several CTAs if it is long."""
        held = [o for o in rows.operands if o.name in self.held_operands]
        sizes = {o.dtype.num_bytes * vector for o in held}
        if not device.at_least(8, 0):  # no cp.async
            return []
        if packs < 512 or len(sizes) != 1 or sizes.isdisjoint((4, 8, 16)) or not all(rows.moves_packs(o, vector) for o in held):
            return []
        clusters = (1, 2, 4, 8) if device.at_least(9, 0) and rows.row_digits.size * 8 < LIMIT else (1,)
        found = []
        for threads in (512, 256):
            for cluster in clusters:
                each = -(-packs // (threads * cluster))
                if each <= _SHARED_PACKS and each * threads * sum(sizes) * len(held) <= min(_SHARED_BYTES, device.smem_per_cta // 2):
                    found += [EngineConfig.of(home="shared", lanes=threads, vec=vector, threads=threads, cluster=k)
                              for k in ((cluster, 8) if cluster in (2, 4) else (cluster,))]
                    break
        # Measured on an H100: rows that take several CTAs go best to eight of 256 threads.
        found.sort(key=lambda c: packs > 4096 and (c["threads"], c["cluster"]) != (256, 8))
        return found

    def behind_configs(self, rows: Rows, packs: int, device: DeviceInfo, alone: int = 0) -> list[EngineConfig]:
        """CTAs, one an SM, or clusters that stay and write each row once the sums of the `behind` rows after it are out; lead: threads
        of a CTA that have no columns. packs: of a row that a thread has at most, alone: without a lead."""
        vector, columns, held = rows.vector(), rows.column_digits, [o for o in rows.operands if o.name in self.held_operands]
        pack, wanted = rows.dtype.num_bytes * vector, -(-columns.size // vector)
        if not device.at_least(9, 0) or pack not in (4, 8, 16) or len(columns.extents) > 1 or rows.row_digits.size * 8 >= LIMIT:
            return []
        if any(o.dtype is not rows.dtype or not rows.moves_packs(o, vector) for o in held):
            return []
        found = []
        for lead, cluster, behind in product((32, 0), (1, 2, 4, 8), (1, 2)):
            each = -(-wanted // (512 * cluster))
            if each > (packs if lead else alone) or wanted <= 256 * cluster:
                continue
            knobs: dict[str, Any] = {"home": "ring", "lanes": 512, "vec": vector, "threads": 512, "cluster": cluster}
            config = EngineConfig.of(**knobs, behind=behind, lead=lead)
            if behind_stages(each, config, pack * len(held), device) >= behind + 2:
                found.append(config)
        return found

    def with_rings(self, found: Sequence[EngineConfig], rings: Sequence[EngineConfig], rows: Rows, device: DeviceInfo, least: int,
                   lead: int, behind: int = 1) -> tuple[EngineConfig, ...]:
        """Configs of rows that leave, and those of rings, whose fewest CTAs with that lead and so many rows behind come first for rows of
        halves of `least` columns and more, where each CTA or cluster has some rows: as measured on an H200."""
        first = [c for c in rings if (c["lead"], c["behind"]) == (lead, behind)][:1]
        few = any(rows.row_digits.size < 4 * resident_groups(device, 512, c["cluster"]) for c in first)
        if few or rows.dtype.num_bytes != 2 or rows.column_digits.size < least:
            first = []
        return tuple(dict.fromkeys([*first, *found, *rings]))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        efficiency = 0.85 if config["vec"] * problem.operands[0].desc.dtype.num_bytes == 16 else 0.5
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 1e3 * efficiency) + problem.flops / (device.fma_tflops * 1e5)

    def row_consts(self, rows: Rows, config: EngineConfig, slots: int, epilogue: Expression | None = None,
                   outputs: Sequence[str] = ()) -> RowConsts:
        """outputs: operands that the epilogue's values go to (without an epilogue: the one acc goes to), for templates that have one."""
        knobs: dict[str, Any] = {"home": "registers", "cluster": 1} | dict(config.knobs)
        cluster, vector = knobs["cluster"], knobs["vec"]
        lanes = knobs["lanes"] * cluster
        columns, digits = rows.column_digits, rows.row_digits
        is_skewed = knobs["home"] in ("skewed", "skewed_memory")
        per_thread = -(-(columns.size + (vector - 1 if is_skewed else 0)) // (lanes * vector))
        chunks = per_thread if knobs["home"] == "registers" and per_thread * vector <= self.resident(rows.dtype) else 0
        shared = per_thread if knobs["home"] in ("shared", "skewed") else 0
        names = tuple(o.name for o in rows.operands if o.name in self.held_operands)
        live = chunks or min(shared, 1) or max(1, min(8, self.live_elements // (vector * max(1, len(names)))))
        moves_packs = rows.keeps_skew if is_skewed else rows.moves_packs
        operands = tuple(OperandConsts(o.name, o.dtype.name, o.has_rows, o.has_columns, moves_packs(o, vector),
                                       is_skewed and rows.shifts(o, vector)) for o in rows.operands)
        wide = digits.consts().wide or columns.consts().wide
        together = max(1, knobs["threads"] // lanes) if "threads" in knobs else 0  # rows of a CTA
        is_whole = bool(chunks or shared) and columns.size == lanes * vector * per_thread and together > 0 and digits.size % together == 0
        return RowConsts(operands, compute_type(rows.dtype), digits.consts(wide), columns.consts(wide), lanes, vector, chunks, slots,
                         epilogue, tuple(outputs), shared, names if shared else (), cluster, live, is_whole and not is_skewed,
                         is_skewed)

    def row_step(self, template: str, consts: TemplateConsts, op: str, rows: Rows, config: EngineConfig, device: DeviceInfo,
                 extra: Sequence[Arg] = ()) -> Step:
        """One launch over all rows. consts: the template's, around row_consts(rows, config, ...); extra: the template's own arguments."""
        r, threads = consts.rows, config["threads"]
        digits, columns = rows.row_digits, rows.column_digits
        args = [Arg(f"ptr_{o.name}", "u64", o.value) for o in rows.operands]
        args += [Arg("num_rows", "u32", digits.size), Arg("num_columns", "u32", columns.size)]
        args += [*digits.args(r.digits.wide), *columns.args(r.digits.wide)]
        args += [Arg(f"scalar_{name}", r.compute, ScalarArg(name)) for name in r.epilogue_scalars]
        smem = r.shared * threads * r.pack_bytes * len(r.held) if r.shared else 0
        # threads of an SM; fewer where each element of a held row has an address of its own
        resident = 768 if smem else 256 if r.chunks > 8 and len(rows.column_digits.extents) > 1 else 512
        home = f"{'k' if r.is_skewed else 's'}{r.shared}" if r.shared or r.is_skewed else f"c{r.chunks}"
        return Step.of(template, op, r.target(device), threads, [*args, *extra], consts, -(-digits.size * r.lanes // threads),
                       min_ctas_per_sm=max(1, resident // threads), dynamic_smem=smem, cluster=r.cluster,
                       suffix=f"{rows.dtype.name}_l{r.lanes}_v{r.vector}_{home}")

    def ring_consts(self, rows: Rows, config: EngineConfig, slots: int) -> RowConsts:
        return self.row_consts(rows, EngineConfig.of(**{**dict(config.knobs), "home": "shared"}), slots)

    def ring_step(self, template: str, consts: RingTemplateConsts, op: str, rows: Rows, config: EngineConfig, device: DeviceInfo,
                  extra: Sequence[Arg] = ()) -> Step:
        """As row_step, of CTAs or clusters that stay."""
        r, threads, cluster = consts.rows, config["threads"], config["cluster"]
        digits, columns = rows.row_digits, rows.column_digits
        groups = min(resident_groups(device, threads, cluster, threads), digits.size)
        args = [Arg(f"ptr_{o.name}", "u64", o.value) for o in rows.operands]
        args += [Arg("num_rows", "u32", digits.size), Arg("num_columns", "u32", columns.size), Arg("row_step", "u32", groups)]
        args += [*digits.args(r.digits.wide), *columns.args(r.digits.wide)]
        smem = consts.stages * r.shared * threads * r.pack_bytes * len(r.held)
        return Step.of(template, op, ring_target(consts, device), threads + consts.lead, [*args, *extra], consts, groups * cluster,
                       dynamic_smem=smem, cluster=cluster,
                       suffix=f"{rows.dtype.name}_l{r.lanes}_v{r.vector}_s{r.shared}")
