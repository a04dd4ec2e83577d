"""Normalisation by channel: partial statistics of chunks of rows, their combination in a fixed order, and the map that applies them.

The index space is batches x rows x channels: a row is one value of every channel (for statistics of the whole batch over N and the spatial
dimensions, else over the spatial ones of a sample), and rows are cut into chunks. Two arrangements: "column", where the lanes of a tile lie
along the channels and each thread keeps the statistics of a pack of them; "row", where they lie along the rows of one channel.
Partial results are [batch][chunk][channel]. Pairs with ptx_templates/channelwise/.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import prod
from typing import Any

from ..codegen.environment import f32_literal, f64_literal
from ..codegen.fastdiv import magic
from ..codegen.pointwise import Expression
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType
from ..ops.base import Problem
from ..ops.channel_norm import ChannelNormProblem, channels_innermost
from ..ops.epilogue import accumulator_of, align_shape, align_strides
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, ArgValue, Build, Engine, EngineConfig, ScalarArg, Scratch, Step, Support, TensorArg, refuse
from .collapse import collapse
from .digits import DigitConsts, Digits, power_of_two
from .element_epilogue import ElementEpilogue

THREADS = 256
_LIMIT = 2**30
_NARROW = 2**31  # strides below it, in bytes, are 32 bits wide
_HELD_BYTES = 128  # of values a thread loads before it uses the first, in the compute type
_HELD_PARTIALS = 8
_MAX_THREADS = 1024
_MASK_PACK = 8  # bits of a byte
_CTAS = 3  # on each SM at once, where statistics are taken
_DEPTH = 1  # times a thread loads before it is done, where nothing is summed


@dataclass(frozen=True, slots=True)
class TensorConsts:
    """An operand of the index space as templates see it. moves_packs: whether a pack can be moved at once; is_mask: a pack is a byte."""

    name: str
    dtype: str
    moves_packs: bool
    is_mask: bool = False


@dataclass(frozen=True, slots=True)
class VectorConsts:
    """An operand with a value a channel or a group of them. moves_packs: whether a pack of channels can be moved at once."""

    name: str
    dtype: str
    moves_packs: bool
    is_grouped: bool


@dataclass(frozen=True, slots=True)
class TileConsts(ElementEpilogue):
    """What every template over the index space reads.

    along: "column" | "row". rows: digits of a row. lanes: threads along the pack's dimension; vector: elements of a pack; unroll: packs a
    thread loads before it uses them. has_batches: whether batches have an index of their own. leads: the next launch may get ready while
    this one runs. reversed: CTAs go from the last tile to the
    first, so that what an earlier launch read last is still in the cache; streams: stores leave the cache first, so that it stays there.
    """

    along: str
    tensors: tuple[TensorConsts, ...]
    vectors: tuple[VectorConsts, ...]
    compute: str
    rows: DigitConsts
    lanes: int
    vector: int
    unroll: int
    has_batches: bool
    leads: bool = False
    reversed: bool = False
    streams: bool = False
    epilogue: Expression | None = None
    has_mask: bool = False

    @property
    def is_column(self) -> bool:
        return self.along == "column"

    @property
    def width(self) -> int:
        """Channels of a thread."""
        return self.vector if self.is_column else 1

    @property
    def size(self) -> int:
        return 8 if self.compute == "f64" else 4

    @property
    def store(self) -> str:
        return "st.global.cs." if self.streams else "st.global."

    def step(self, threads: int) -> int:
        """Rows from one pack of a thread to its next in a block."""
        return threads // self.lanes if self.is_column else self.lanes * self.vector

    def block(self, threads: int) -> int:
        return self.unroll * self.step(threads)

    def tensor(self, name: str) -> TensorConsts:
        return next(t for t in self.tensors if t.name == name)

    def operand(self, name: str) -> VectorConsts:
        return next(v for v in self.vectors if v.name == name)

    def has(self, name: str) -> bool:
        return any(t.name == name for t in self.tensors) or any(v.name == name for v in self.vectors)

    def names(self, prefix: str, pack: int = 0) -> list[str]:
        """The registers of the pack'th pack."""
        return [f"{prefix}{pack * self.vector + i}" for i in range(self.vector)]

    def channel(self, element: int) -> int:
        """Which of the thread's channels the element of a pack belongs to."""
        return element if self.is_column else 0

    def gathered(self, prefix: str, packs: int) -> list[list[str]]:
        """The registers of `packs` packs, by the channels they belong to."""
        names = [self.names(prefix, j) for j in range(packs)]
        return [[pack[e] for pack in names] for e in range(self.vector)] if self.is_column else [[n for pack in names for n in pack]]

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)

    def apply_epilogue(self, acc: str, element: int) -> str:
        """PTX: acc = the epilogue of register acc, %arg_<name><element> and %scalar_<name>."""
        return self.lower_epilogue(acc, element, [acc])


@dataclass(frozen=True, slots=True)
class CombineConsts:
    """Of the launches that combine partials. lanes: threads a statistic; held: partials of a thread, 0 if many. has_width: statistics of
    several channels; weighs: with a gamma each. outputs: what is written, and inputs: what is read besides the partials, each with its
    type. is_counted: the partials' counts are in memory; is_constant: gradients for statistics that do not depend on x."""

    compute: str
    lanes: int
    held: int
    has_width: bool
    weighs: bool
    inputs: tuple[tuple[str, str], ...]
    outputs: tuple[tuple[str, str], ...]
    is_counted: bool = False
    is_constant: bool = False

    def has(self, name: str) -> bool:
        return name in dict(self.inputs) or name in dict(self.outputs)

    def dtype(self, name: str) -> str:
        return (dict(self.inputs) | dict(self.outputs))[name]

    def literal(self, value: float) -> str:
        return f64_literal(value) if self.compute == "f64" else f32_literal(value)


@dataclass(frozen=True, slots=True)
class Vector:
    """A value a channel (or group): where it lies, and the byte strides of batch and channel (or group)."""

    value: ArgValue
    dtype: DType
    strides: tuple[int, int]
    align: int = 16
    is_grouped: bool = False

    @staticmethod
    def of(problem: ChannelNormProblem, name: str) -> Vector:
        desc = problem.desc(name)
        steps = tuple(s * desc.dtype.num_bytes for s in desc.strides)
        return Vector(TensorArg(name), desc.dtype, (steps[0], steps[1]) if desc.rank == 2 else (0, steps[0]), desc.align,
                      desc.shape[-1] != problem.channels)

    def moves_packs(self, vector: int, channels: int) -> bool:
        size = self.dtype.num_bytes
        piece = min(16, vector * size)
        return (vector == 1 or (not self.is_grouped and self.strides[1] == size and channels % vector == 0 and self.align >= piece
                                and self.strides[0] % piece == 0))


@dataclass(frozen=True)
class Space:
    """The index space of a problem and the tensors over it: byte strides over all dimensions of x, of a mask bit strides."""

    problem: ChannelNormProblem
    tensors: Mapping[str, TensorDesc]
    values: Mapping[str, ArgValue] = field(default_factory=dict)

    @cached_property
    def strides(self) -> dict[str, tuple[int, ...]]:
        found = {}
        for name, desc in self.tensors.items():
            if name == "mask":
                found[name] = self._mask_strides(desc)
            else:
                found[name] = tuple(s * desc.dtype.num_bytes for s in desc.strides)
        return found

    def _mask_strides(self, desc: TensorDesc) -> tuple[int, ...]:
        shape = self.problem.shape
        if channels_innermost(self.problem.desc("x")):
            return tuple(s if i == 1 else 8 * s for i, s in enumerate(desc.strides))
        steps, step = [], desc.strides[2]
        for n in reversed(shape[2:]):
            steps.append(step)
            step *= n
        return (8 * desc.strides[0], 8 * desc.strides[1], *reversed(steps))

    @cached_property
    def rows(self) -> Digits:
        axes = self.problem.row_axes
        digits = Digits(tuple(f"d{i}" for i in axes), tuple(self.problem.shape[i] for i in axes),
                        {n: tuple(s[i] for i in axes) for n, s in self.strides.items()})
        if "mask" in self.tensors and not channels_innermost(self.problem.desc("x")):
            return digits.collapsed("r")  # a byte has 8 positions in the order of the shape
        return digits.ordered_for("x" if "x" in self.tensors else next(iter(self.tensors))).collapsed("r")

    def moves_packs(self, name: str, along: str, vector: int) -> bool:
        """Whether `vector` neighbours lie side by side, aligned for moves of 16 bytes (of all, if they are fewer)."""
        if vector == 1 or name == "mask":
            return True
        desc, shape, rows = self.tensors[name], self.problem.shape, self.rows
        size = desc.dtype.num_bytes
        piece = min(16, vector * size)
        row = rows.strides[name]
        batch = [self.strides[name][0]] if self.problem.groups and shape[0] > 1 else []
        channel = [self.strides[name][1]] if shape[1] > 1 else []
        if along == "column":
            extent, step, others = shape[1], self.strides[name][1], [*row, *batch]
        else:
            extent, step, others = rows.extents[-1], row[-1], [*row[:-1], *channel, *batch]
        return step == size and extent % vector == 0 and desc.align >= piece and all(s % piece == 0 for s in others)

    def vector(self, along: str) -> int:
        """Elements of a pack: up to 16 bytes of x, where everything that does not broadcast moves so."""
        if "mask" in self.tensors:
            return _MASK_PACK
        axis = 1 if along == "column" else -1
        bound = [n for n in self.tensors if (self.strides[n][1] if axis == 1 else self.rows.strides[n][-1]) or n == "x"]
        vector = 16 // self.problem.desc("x").dtype.num_bytes
        while vector > 1 and not all(self.moves_packs(n, along, vector) for n in bound):
            vector //= 2
        return vector

    def along(self) -> str:
        x = self.strides["x"]
        if "mask" in self.tensors:
            return "column" if channels_innermost(self.problem.desc("x")) else "row"
        row = [abs(s) for s, n in zip(self.rows.strides["x"], self.rows.extents, strict=True) if n > 1]
        return "column" if not row or (self.problem.channels > 1 and abs(x[1]) < min(row)) else "row"


@dataclass(frozen=True)
class FlatProblem(ChannelNormProblem):
    """Batch statistics of x (N, C, spatial) seen as (N, C * positions): each position a channel of its own, combined in the end. For
    channels first with so few or so odd positions that they fill no pack."""

    positions: int = 1

    @property
    def width(self) -> int:
        return self.positions

    @staticmethod
    def of(problem: ChannelNormProblem) -> FlatProblem | None:
        """None where channels and positions are not one run of memory in every tensor."""
        shape = problem.shape
        is_given = problem.op == "batch_norm_backward_apply"  # with sums of whole channels
        if problem.groups or is_given or len(shape) < 3 or problem.has("mask") or not 0 < prod(shape[1:]) < _LIMIT or not shape[0]:
            return None
        operands = []
        for operand in problem.operands:
            desc = operand.desc
            if desc.shape == shape:
                extents, (strides,) = collapse(shape[1:], [desc.strides[1:]])
                if len(extents) != 1:
                    return None
                desc = TensorDesc(desc.dtype, (shape[0], extents[0]), (desc.strides[0], strides[0]), desc.align)
            elif operand.name in problem.epilogue_operands:
                return None
            operands.append(replace(operand, desc=desc))
        given = {f.name: getattr(problem, f.name) for f in fields(ChannelNormProblem)}
        given |= {"operands": tuple(operands), "shape": (shape[0], prod(shape[1:])), "positions": prod(shape[2:])}
        return FlatProblem(**given)


def compute_of(problem: ChannelNormProblem) -> DType:
    return accumulator_of(problem.operands[0].desc.dtype)


def magic_args(name: str, divisor: int) -> list[Arg]:
    multiplier, shift = magic(max(1, divisor))
    return [Arg(f"{name}_multiplier", "u32", multiplier), Arg(f"{name}_shift", "u32", shift)]


def _gets_ready(target: Target) -> bool:
    """Whether a launch may begin while the one before it ends."""
    return target.capability >= (9, 0)


@dataclass(frozen=True)
class Cut:
    """How rows are dealt out: in blocks of `block`, to `chunks` in turns, so that the device sweeps over memory."""

    rows: int
    block: int
    chunks: int

    @staticmethod
    def of(rows: int, block: int, wanted: int) -> Cut:
        """At most `wanted` chunks, as even as can be."""
        blocks = -(-rows // block)
        rounds = max(1, -(-blocks // max(wanted, 1)))
        return Cut(rows, block, -(-blocks // rounds))

    def count_args(self) -> list[Arg]:
        """Chunk i has chunk_rows, block_rows more if i <= last_chunk, and last_chunk's last block lacks rows_beyond."""
        blocks = -(-self.rows // self.block)
        rounds, last = divmod(max(blocks - 1, 0), max(self.chunks, 1))
        values = {"chunk_rows": rounds * self.block, "block_rows": self.block, "last_chunk": last,
                  "rows_beyond": blocks * self.block - self.rows}
        return [Arg(name, "u32", value) for name, value in values.items()]


class ChannelNormEngine(Engine):
    """What the channel-wise engines share: how threads are dealt to the index space, and the launches over it."""

    def space(self, problem: ChannelNormProblem) -> Space | None:
        """All tensors over the index space; None of a problem without x."""
        names = [o.name for o in problem.operands if o.name in ("x", "y", "dy", "dx", "d_residual", "mask")]
        if "x" not in names:
            return None
        names.sort(key=lambda n: n != "x")
        tensors = {n: problem.desc(n) for n in names}
        for name in problem.epilogue_operands:
            desc = problem.desc(name)
            assert problem.epilogue is not None
            aligned = align_shape(problem.op, name, desc.shape, problem.shape, 1, problem.epilogue.axis(name))
            tensors[name] = TensorDesc(desc.dtype, problem.shape, align_strides(desc, aligned, 1), desc.align)
        return Space(problem, tensors)

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, ChannelNormProblem)
        space = self.space(problem)
        if space is not None and max(problem.rows, problem.batches * problem.channels) >= _LIMIT:
            return refuse(f"{problem.batches} batches of {problem.rows} rows of {problem.channels} channels (at most {_LIMIT - 1} rows, "
                          "and as many batches x channels)")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, ChannelNormProblem)
        space = self.space(problem)
        if space is None:
            return (EngineConfig.of(),)
        first = space.along()
        found = []
        for along in (first,) if "mask" in space.tensors else (first, "row" if first == "column" else "column"):
            vector = space.vector(along)
            extent = problem.channels if along == "column" else problem.rows
            packs = max(1, extent // vector)
            # as many lanes as divide the packs, if that still makes runs of memory worth their while
            lanes = min(32, packs & -packs)
            if lanes < min(8, packs):
                lanes = min(32, power_of_two(packs))
            unroll = max(1, min(8, _HELD_BYTES // compute_of(problem).num_bytes // vector))
            if along == "row" and problem.has("mask"):  # words of bits, one for each row that is held
                unroll = min(unroll, 2)
            few = along == "column" and not problem.has("dy") and problem.num_bytes <= 2 * device.l2_bytes
            usual = {"along": along, "vec": vector, "lanes": lanes, "unroll": unroll, "ctas": 2 if few else _CTAS, "depth": _DEPTH,
                     "streams": problem.desc("x").num_bytes > device.l2_bytes}
            found.append(EngineConfig.of(**usual))
            if along == first:
                flat = FlatProblem.of(problem) if along == "row" else None
                flat_space = self.space(flat) if flat is not None else None
                if flat is not None and flat_space is not None and (wider := flat_space.vector("column")) > vector:
                    lanes = min(32, power_of_two(flat.channels // wider))
                    unroll = max(1, min(8, _HELD_BYTES // compute_of(problem).num_bytes // wider))
                    found.insert(0, EngineConfig.of(**usual | {"along": "flat", "vec": wider, "lanes": lanes, "unroll": unroll}))
                others = ({"streams": not usual["streams"]}, {"ctas": _CTAS if few else 2}, {"depth": 2}, {"unroll": max(1, unroll // 2)})
                found += [c for change in others if (c := EngineConfig.of(**usual | change)) not in found]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, ChannelNormProblem)
        space = self.space(problem)
        if space is None:
            return 4.0
        efficiency = min(1.0, config["vec"] * problem.desc("x").dtype.num_bytes / 16) ** 0.5
        efficiency *= 0.9 if config["along"] == "flat" else 1.0 if config["along"] == space.along() else 0.15
        is_map = not problem.is_training and problem.op not in ("batch_norm_backward_reduce", "batch_norm_stats")
        begin, factor = (8.0, 1.0) if is_map else (15.5 if problem.has("dy") else 10.5, 1.5)  # as measured on an H200
        return begin + factor * problem.num_bytes / (device.bandwidth_gbs * 1e3 * 0.93 * efficiency)

    def laid_out(self, problem: ChannelNormProblem, config: EngineConfig) -> tuple[ChannelNormProblem, EngineConfig]:
        """The problem as the launches see it."""
        if dict(config.knobs).get("along") != "flat":
            return problem, config
        flat = FlatProblem.of(problem)
        assert flat is not None
        return flat, EngineConfig.of(**dict(config.knobs) | {"along": "column"})

    # ---- launches --------------------------------------------------------------------------------------------------------------

    def cut(self, problem: ChannelNormProblem, config: EngineConfig, ctas: int) -> Cut:
        """Chunks for at most about `ctas` CTAs in all."""
        lanes, vector, unroll = config["lanes"], config["vec"], config["unroll"]
        if config["along"] == "column":
            tiles = -(-problem.channels // (lanes * vector)) * problem.batches
            return Cut.of(problem.rows, THREADS // lanes * unroll, -(-ctas // max(1, tiles)))
        units = problem.batches * problem.channels
        return Cut.of(problem.rows, lanes * vector * unroll, -(-ctas * (THREADS // lanes) // max(1, units)))

    def tile_over(self, problem: ChannelNormProblem, space: Space, names: Sequence[str], vectors: Mapping[str, Vector],
                  config: EngineConfig, **consts: Any) -> tuple[TileConsts, list[Arg]]:
        """The consts of a launch over the tensors `names`, and the arguments that say where they and the vectors lie."""
        along, lanes, vector = config["along"], config["lanes"], config["vec"]
        space = Space(problem, {n: space.tensors[n] for n in names})
        digits, compute = space.rows, compute_of(problem)
        tensors = tuple(TensorConsts(n, d.dtype.name, space.moves_packs(n, along, vector), n == "mask") for n, d in space.tensors.items())
        given = tuple(VectorConsts(n, v.dtype.name, along == "row" or v.moves_packs(vector, problem.channels), v.is_grouped)
                      for n, v in vectors.items())
        reach = [s for row in space.strides.values() for s in row] + [s for v in vectors.values() for s in v.strides]
        wide = any(abs(s) >= _NARROW for s in reach) or digits.consts().wide
        tile = TileConsts(along, tensors, given, compute.ptx, digits.consts(wide), lanes, vector, config["unroll"], bool(problem.groups),
                          **consts)
        kind = "s64" if wide else "s32"
        args = [Arg(f"ptr_{n}", "u64", TensorArg(n)) for n in names]
        for name in names:
            args += [Arg(f"stride_{name}_{axis}", kind, space.strides[name][i]) for i, axis in ((0, "b"), (1, "c"))
                     if axis == "c" or problem.groups]
        args += digits.args(wide)
        for name, v in vectors.items():
            args += [Arg(f"ptr_{name}", "u64", v.value), Arg(f"stride_{name}_c", kind, v.strides[1])]
            args += [Arg(f"stride_{name}_b", kind, v.strides[0])] if problem.groups else []
        if any(v.is_grouped for v in given):
            args += [Arg("width", "u32", problem.width), *magic_args("width", problem.width)]
        args += [Arg(f"scalar_{n}", tile.compute, ScalarArg(n)) for n in tile.epilogue_scalars]
        return tile, args

    def tile_step(self, template: str, problem: ChannelNormProblem, space: Space, names: Sequence[str], vectors: Mapping[str, Vector],
                  config: EngineConfig, cut: Cut, device: DeviceInfo, extra: Iterable[Arg] = (),
                  results: Mapping[str, ArgValue] | None = None, follows: bool = False, **consts: Any) -> Step:
        """One launch over the whole index space with the tensors `names`. results: arrays of the partials' layout that it writes;
        follows: it is not the plan's first."""
        tile, args = self.tile_over(problem, space, names, vectors, config, **consts)
        lanes, vector = tile.lanes, tile.vector
        tiles = -(-problem.channels // (lanes * vector)) if tile.is_column else problem.channels
        units = problem.batches * cut.chunks * tiles
        args += [Arg("num_tiles", "u32", tiles), *magic_args("tiles", tiles), Arg("num_chunks", "u32", cut.chunks),
                 *magic_args("chunks", cut.chunks), Arg("num_channels", "u32", problem.channels), Arg("num_rows", "u32", problem.rows),
                 Arg("sweep", "u32", cut.chunks * cut.block), Arg("num_units", "u32", units)]
        args += [Arg(f"ptr_{n}", "u64", value) for n, value in (results or {}).items()]
        grid = units if tile.is_column else -(-units * lanes // THREADS)
        target = Target.for_arch(device.arch)
        return Step.of(template, problem.op, target, THREADS, [*args, *extra], tile, grid, follows=follows and _gets_ready(target),
                       suffix=f"{tile.along}_{problem.desc(names[0]).dtype.name}_l{lanes}_v{vector}_u{tile.unroll}")

    def combine_step(self, template: str, problem: ChannelNormProblem, partials: Mapping[str, Vector], items: int, batches: int,
                     width: int, inputs: Mapping[str, Vector], outputs: Mapping[str, Vector], device: DeviceInfo, extra: Iterable[Arg],
                     rest: str = "", follows: bool = False, **consts: Any) -> Step:
        """One launch over statistics: batches x (channels / width), each of `items` x width partials. Vector.strides of partials are of an
        item and of a channel; batches lie behind each other."""
        compute = compute_of(problem)
        groups = problem.channels // max(1, width)
        lanes = 32 if items * width <= 128 else THREADS // 2
        while lanes > 32 and lanes < _MAX_THREADS and items * width > lanes * _HELD_PARTIALS:
            lanes *= 2  # a thread has all of its partials under way at once
        weighs = "gamma" in inputs and not inputs["gamma"].is_grouped and width != 1
        held = -(-items * width // lanes)
        types = [tuple((n, v.dtype.name) for n, v in given.items()) for given in (inputs, outputs)]
        tile = CombineConsts(compute.ptx, lanes, held if held <= _HELD_PARTIALS else 0, width != 1, weighs, types[0], types[1], **consts)
        args = [Arg("num_statistics", "u32", batches * groups), Arg("num_items", "u32", items * width), Arg("items", "u32", items),
                Arg("width", "u32", width)]
        args += [*magic_args("width", width), Arg("groups", "u32", groups), *magic_args("groups", groups)]
        for axis, arrays in (("i", partials), ("b", inputs), ("b", outputs)):
            for name, v in arrays.items():
                args += [Arg(f"ptr_{name}", "u64", v.value), Arg(f"stride_{name}_{axis}", "s64", v.strides[0]),
                         Arg(f"stride_{name}_c", "s64", v.strides[1])]
        threads, statistics = max(lanes, THREADS // 2), batches * groups
        grid = -(-statistics * lanes // threads)
        target = Target.for_arch(device.arch)
        return Step.of(template, problem.op, target, threads, [*args, *extra], tile, grid, follows=follows and _gets_ready(target),
                       suffix=f"{compute.name}_l{lanes}{rest}")

    def partials(self, problem: ChannelNormProblem, cut: Cut, scratch: Scratch, names: Sequence[str]) -> dict[str, Vector]:
        """Workspace for partial results: [batch][chunk][channel]."""
        kind = compute_of(problem)
        size = problem.batches * cut.chunks * problem.channels * kind.num_bytes
        return {n: Vector(scratch.take(size), kind, (problem.channels * kind.num_bytes, kind.num_bytes)) for n in names}

    def per_channel(self, problem: ChannelNormProblem, scratch: Scratch, names: Sequence[str]) -> dict[str, Vector]:
        """Workspace for values of every channel of every batch."""
        return self.partials(problem, Cut(1, 1, 1), scratch, names)

    def streaming(self, problem: ChannelNormProblem, config: EngineConfig) -> Cut:
        """Chunks of `depth` blocks, for launches that carry nothing from row to row."""
        cut = self.cut(problem, config, _LIMIT)
        return replace(cut, chunks=-(-cut.chunks // config["depth"]))

    def resident(self, problem: ChannelNormProblem, config: EngineConfig, device: DeviceInfo) -> Cut:
        """As many chunks as the device runs at once."""
        return self.cut(problem, config, config["ctas"] * device.num_sms)


class ChannelNorm(ChannelNormEngine):
    """Forward: partial moments, their combination, the map; with given statistics the map alone."""

    id = "channel_norm.tile"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ChannelNormProblem)
        if problem.is_empty:
            return Build(())
        problem, config = self.laid_out(problem, config)
        scratch, steps = Scratch(), list[Step]()
        vectors = {n: Vector.of(problem, n) for n in ("gamma", "beta") if problem.has(n)}
        extra = []
        if problem.op in ("batch_norm_stats", "batch_norm_gather") or problem.is_training:
            found = self.statistics(problem, config, device, scratch, steps)
            vectors |= {"mean": found["channel_mean"], "rstd": found["channel_rstd"]} if found else {}
        elif problem.op == "batch_norm_apply":
            vectors |= {n: Vector.of(problem, n) for n in ("mean", "rstd")}
        else:
            vectors |= {"mean": Vector.of(problem, "running_mean"), "var": Vector.of(problem, "running_var")}
            extra = [Arg("eps", compute_of(problem).ptx, problem.eps)]
        if problem.has("y") and problem.desc("y").numel:
            space = self.space(problem)
            assert space is not None
            names = ["x", "y", *(["mask"] if problem.has("mask") else []), *problem.epilogue_operands]
            cut = self.streaming(problem, config)
            steps.append(self.tile_step("channelwise/apply", problem, space, names, vectors, config, cut, device, extra,
                                        reversed=problem.is_training, streams=config["streams"], epilogue=problem.epilogue,
                                        follows=bool(steps)))
        return Build(tuple(steps), scratch.num_bytes)

    def statistics(self, problem: ChannelNormProblem, config: EngineConfig, device: DeviceInfo, scratch: Scratch,
                   steps: list[Step]) -> dict[str, Vector]:
        """Adds the launches that find mean and rstd; where they lie for every channel, if a map follows."""
        kind = compute_of(problem)
        space = self.space(problem)
        numbers = {"eps": problem.eps, "momentum": problem.momentum, "keep": 1 - problem.momentum}
        extra = [Arg(name, kind.ptx, value) for name, value in numbers.items()]
        if space is None:
            partials = {"counts": Vector(TensorArg("counts"), kind, (problem.desc("counts").strides[0] * kind.num_bytes, 0)),
                        "means": Vector.of(problem, "means"), "squares": Vector.of(problem, "m2s")}
            items = problem.shape[0]
        else:
            cut = self.resident(problem, config, device)
            partials = self.partials(problem, cut, scratch, ("means", "squares"))
            items = cut.chunks
            if items and problem.batches * problem.channels:
                results = {"partial_mean": partials["means"].value, "partial_squares": partials["squares"].value}
                steps.append(self.tile_step("channelwise/moments", problem, space, ["x"], {}, config, cut, device, results=results,
                                            leads=_gets_ready(Target.for_arch(device.arch))))
            extra += [Arg("total", kind.ptx, float(problem.rows * problem.width)), *cut.count_args()]
        inputs = {n: Vector.of(problem, n) for n in ("running_mean", "running_var") if problem.has(n)}
        written = [o.name for o in problem.outputs if o.name in ("mean", "rstd", "count", "m2", "new_running_mean", "new_running_var")]
        outputs = {n: Vector.of(problem, n) for n in written}
        found = self.per_channel(problem, scratch, ("channel_mean", "channel_rstd")) if problem.has("y") else {}
        if problem.batches * problem.channels:
            steps.append(self.combine_step("channelwise/combine", problem, partials, items, problem.batches, problem.width, inputs,
                                           outputs | found, device, extra, is_counted=space is None, follows=bool(steps)))
        return found


class ChannelNormBackward(ChannelNormEngine):
    """Gradients: partial sums, their combination, the map to dx. All sums in a fixed order."""

    id = "channel_norm_backward.tile"

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, ChannelNormProblem)
        if problem.is_empty:
            return Build(())
        problem, config = self.laid_out(problem, config)
        scratch, steps = Scratch(), list[Step]()
        space, kind = self.space(problem), compute_of(problem)
        assert space is not None
        gate = [n for n in ("mask", "y") if problem.has(n)]
        stats = {n: Vector.of(problem, n) for n in ("mean", "rstd")}
        gamma = {"gamma": Vector.of(problem, "gamma")} if problem.has("gamma") else {}
        sums = {n: Vector.of(problem, n) for n in ("sum_dy", "sum_dy_xhat", "dgamma", "dbeta") if any(o.name == n for o in problem.outputs)}
        is_given = problem.op == "batch_norm_backward_apply"
        has_dx = problem.has("dx") and problem.desc("dx").numel > 0
        cut = self.resident(problem, config, device)
        if is_given:
            partials, items = {"sums": Vector.of(problem, "sum_dy"), "products": Vector.of(problem, "sum_dy_xhat")}, 1
        else:
            partials, items = self.partials(problem, cut, scratch, ("sums", "products")), cut.chunks
            if problem.rows * problem.batches * problem.channels and (sums or problem.is_training):
                results = {"partial_sum": partials["sums"].value, "partial_product": partials["products"].value}
                steps.append(self.tile_step("channelwise/gradient_sums", problem, space, ["dy", "x", *gate], stats, config, cut, device,
                                            results=results, leads=_gets_ready(Target.for_arch(device.arch))))
        total = [Arg("total", kind.ptx, float(problem.rows * problem.width))]
        found = self.per_channel(problem, scratch, ("channel_mean", "scale", "shift_by", "slope")) if has_dx else {}
        is_one = not problem.groups  # a statistic is a channel's
        if sums and not is_one:
            steps.append(self.combine_step("channelwise/gradient_combine", problem, partials, items * problem.batches, 1, 1, {}, sums,
                                           device, total, "_parameters", follows=bool(steps)))
        if found or (sums and is_one):
            inputs = (stats | gamma) if found else {}
            if is_given:
                inputs |= {"count": Vector.of(problem, "count")}
            steps.append(self.combine_step("channelwise/gradient_combine", problem, partials, items, problem.batches, problem.width, inputs,
                                           (sums if is_one else {}) | found, device, total, is_counted=is_given,
                                           is_constant=not problem.is_training, follows=bool(steps)))
        if has_dx:
            names = ["dy", *(["x"] if problem.is_training else []), "dx", *gate, *(["d_residual"] if problem.has("d_residual") else [])]
            cut = self.streaming(problem, config)
            steps.append(self.tile_step("channelwise/gradient_apply", problem, space, names, found, config, cut, device, reversed=True,
                                        streams=config["streams"], follows=True))
        return Build(tuple(steps), scratch.num_bytes)


_FORWARD = (ChannelNorm(),)
_BACKWARD = (ChannelNormBackward(),)
ENGINES: dict[str, tuple[Engine, ...]] = {
    **dict.fromkeys(("batch_norm", "batch_norm_apply", "group_norm", "instance_norm", "batch_norm_stats", "batch_norm_gather"), _FORWARD),
    **dict.fromkeys(("batch_norm_backward", "group_norm_backward", "instance_norm_backward", "batch_norm_backward_reduce",
                     "batch_norm_backward_apply"), _BACKWARD),
}
