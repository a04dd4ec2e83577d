"""Transposition through shared memory: the dimension that lies densely in the source is not the one that does in the target."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ..codegen.spec import Target
from ..device import DeviceInfo
from ..dtypes import DType
from ..ops.base import Operand, Problem
from ..ops.layout import LayoutProblem
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Step, Support, TensorArg, refuse
from .digits import DigitConsts, Digits, ceil_div
from .layout_copy import BITS, Dim, Geometry, Values, arithmetic, geometry, loaded_as, movement

_LEAST = 8  # elements along either dimension from which a tile beats separate reads
_TILES = ((1, 1), (1, 2), (2, 1), (2, 2))  # blocks along q and p


def _threads(size: int) -> int:
    """Of a CTA that moves elements of `size` bytes: blocks of bytes have the most elements."""
    return 256 if size == 1 else 128


@dataclass(frozen=True)
class TileConsts(Values):
    """size: bytes of an element of x. piece_x, piece_y: elements of one access. See CopyConsts."""

    source: DType
    target: DType
    move: str
    value: str
    compute: str
    size: int
    blocks_q: int
    blocks_p: int
    piece_x: int
    piece_y: int
    digits: DigitConsts
    third: DType | None = None
    third_value: str = ""
    saturate: bool = True

    @property
    def batches(self) -> list[list[tuple[int, int, int]]]:
        """(block along q, block along p, round) of the pieces a thread loads before it stores them: what 64 registers hold, at most 16."""
        rows = 128 // self.size
        per_block = rows * rows // self.piece_x // _threads(self.size)
        rounds = [(q, p, k) for q in range(self.blocks_q) for p in range(self.blocks_p) for k in range(per_block)]
        most = min(16, 64 // max(1, self.piece_x * self.size // 4))
        return [rounds[i:i + most] for i in range(0, len(rounds), most)]


def _ends(problem: LayoutProblem) -> tuple[Operand, Operand]:
    """x and y, whatever the op calls them."""
    return problem.inputs[0], problem.outputs[0]


def _planes(problem: LayoutProblem, shape: Geometry) -> tuple[int, int] | None:
    """The dimensions (p, q) that neighbours of x and of y lie along."""
    x, y = (o.desc.dtype.num_bytes for o in _ends(problem))
    p = next((i for i, d in enumerate(shape.dims) if d.x == x), None)
    q = next((i for i, d in enumerate(shape.dims) if d.y == y), None)
    return None if p is None or q is None or p == q else (p, q)


def _piece(most: int, size: int, align: int, offset: int, extent: int, strides: list[int]) -> int:
    """The most neighbours that one access may take."""
    piece = most
    while piece > 1 and (extent % piece or any(n % min(16, piece * size) for n in (align, offset, *strides))):
        piece //= 2
    return piece


class LayoutTile(Engine):
    """Strided copies of one tensor whose innermost dimension changes, conversions and scaling among them; from sm_80."""

    id = "layout.tile"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        if not isinstance(problem, LayoutProblem) or problem.sums or len(problem.parts) != 1 or problem.parts[0].source is None:
            return refuse("not a copy of one tensor")
        if problem.is_empty:
            return refuse("nothing to move")
        shape = geometry(problem, problem.parts[0])
        if not shape.is_plain:
            return refuse("a dimension is not read step by step")
        planes = _planes(problem, shape)
        if planes is None:
            return refuse("source and target lie densely along one dimension")
        if min(shape.dims[i].extent for i in planes) < _LEAST:
            return refuse(f"fewer than {_LEAST} elements along a dimension of the tiles")
        if prod(d.extent for i, d in enumerate(shape.dims) if i not in planes) >= 2**31 // 256:
            return refuse("more tiles than a grid has CTAs")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, LayoutProblem)
        found = [EngineConfig.of(q=q, p=p, first=first) for q, p in _TILES for first in ("p", "q")]
        size = _ends(problem)[0].desc.dtype.num_bytes
        found = [c for c in found if size > 1 or c["q"] * c["p"] == 1]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        assert isinstance(problem, LayoutProblem)
        shape = geometry(problem, problem.parts[0])
        planes = _planes(problem, shape)
        assert planes is not None
        size, size_y = (o.desc.dtype.num_bytes for o in _ends(problem))
        used = 1.0
        for i, blocks in zip(planes, (config["p"], config["q"]), strict=True):
            tile = blocks * 128 // size
            used *= shape.dims[i].extent / (ceil_div(shape.dims[i].extent, tile) * tile)
        blocks = config["q"] * config["p"]
        # As measured on an H100: two blocks along p of 16-bit types, four of wider ones, the tiles of a column one after another.
        p, q = (shape.dims[i].extent for i in planes)
        is_small = bool((p * size) % 8 or (q * size_y) % 8)  # accesses of a few bytes
        preferred = 1 if is_small else {1: 1, 2: 2}.get(size, 4)
        cost = 1.05 + 0.01 * abs(blocks - preferred) + 0.005 * (config["first"] == "p") + 0.005 * (config["q"] > config["p"])
        cost *= 1.5 if is_small else 1.0
        return 3.2 + problem.num_bytes / (device.bandwidth_gbs * 1e3) * cost / used

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, LayoutProblem)
        shape = geometry(problem, problem.parts[0])
        planes = _planes(problem, shape)
        assert planes is not None
        p, q = (shape.dims[i] for i in planes)
        (source, x), (target, y) = ((o.name, o.desc) for o in _ends(problem))
        c = problem.desc("c") if problem.has("c") else None
        move, size = movement(problem), x.dtype.num_bytes
        v = 16 // size
        rest = [d for i, d in enumerate(shape.dims) if i not in planes]
        piece_x = _piece(v, size, x.align, shape.x_offset, p.extent, [d.x for d in (q, *rest)])
        widest = 16 // max(size, y.dtype.num_bytes)
        piece_y = _piece(widest, y.dtype.num_bytes, y.align, shape.y_offset, q.extent, [d.y for d in (p, *rest)])
        tiles = {"p": (p, config["p"] * 8 * v), "q": (q, config["q"] * 8 * v)}
        order = ("q", "p") if config["first"] == "p" else ("p", "q")
        digits = _tile_digits(rest, [(name, *tiles[name]) for name in order], c is not None)
        consts = digits.consts()
        kinds = [x.dtype, y.dtype, *([c.dtype] if c is not None else [])]
        tile = TileConsts(BITS[size] if move == "bits" else x.dtype, BITS[size] if move == "bits" else y.dtype, move,
                          BITS[size].name if move == "bits" else loaded_as(x.dtype), arithmetic(kinds), size, config["q"], config["p"],
                          piece_x, piece_y, consts, c.dtype if c is not None else None, loaded_as(c.dtype) if c is not None else "",
                          problem.saturate)
        args = [Arg("ptr_x", "u64", TensorArg(source, shape.x_offset)), Arg("ptr_y", "u64", TensorArg(target, shape.y_offset))]
        if c is not None:
            args.append(Arg("ptr_c", "u64", TensorArg("c", shape.c_offset)))
        args += digits.args(consts.wide)
        args += [Arg("x_q", "s64", q.x), Arg("y_p", "s64", p.y), Arg("extent_of_p", "u32", p.extent), Arg("extent_of_q", "u32", q.extent)]
        if c is not None:
            args += [Arg("c_p", "s64", p.c), Arg("c_q", "s64", q.c)]
        if move == "scale":
            args += [Arg("alpha", tile.compute, problem.alpha)] + ([Arg("beta", tile.compute, problem.beta)] if c is not None else [])
        step = Step.of("layout/tile", problem.op, Target.for_arch(device.arch), _threads(size), args, tile, digits.size,
                       suffix=f"{tile.target.name}_{config['q']}x{config['p']}")
        return Build((step,))


def _tile_digits(rest: list[Dim], tiles: list[tuple[str, Dim, int]], has_third: bool) -> Digits:
    """Digits of the tiles: the other dimensions, then those of the planes, in tiles."""
    names = (*(f"b{i}" for i in range(len(rest))), *(name for name, _, _ in tiles))
    extents = (*(d.extent for d in rest), *(ceil_div(d.extent, tile) for _, d, tile in tiles))
    strides = {"x": (*(d.x for d in rest), *(d.x * tile for _, d, tile in tiles)),
               "y": (*(d.y for d in rest), *(d.y * tile for _, d, tile in tiles))}
    if has_third:
        strides["c"] = (*(d.c for d in rest), *(d.c * tile for _, d, tile in tiles))
    return Digits(names, extents, strides)


_OPS = ("permute", "transform", "cast", "conv_reorder")
ENGINES: dict[str, tuple[Engine, ...]] = {op: (LayoutTile(),) for op in _OPS}
