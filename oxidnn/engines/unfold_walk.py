"""Windows written out as columns, and columns added up into an image: a thread walks over the taps of a window, or of an element.

Unfolding, a thread has a position and copies what its window sees, tap by tap. Folding, it has an element of the image and gathers what
every tap of the window says of it, always in the same order and without atomics. Where elements of neighbouring channels lie side by side
on both sides, a pack of them is moved. Where neighbouring taps, not positions, are neighbours in the columns, they are dealt to threads. An
image whose innermost dimension is not that of the columns may be copied first (last), as it is a small part of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from ..codegen.fastdiv import magic
from ..codegen.spec import Target
from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.unfold import UnfoldProblem
from ..tensor import TensorDesc
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Scratch, Step, Support, TensorArg, refuse
from .composition import COPIES, Place, cheapest, moved, shifted
from .digits import DigitConsts, Digits, ceil_div

THREADS = 256
_LIMIT = 2**31
_MAX_UNROLLED = 64  # taps in the text
_MAX_ALONG = 16  # taps of one dimension in the text


@dataclass(frozen=True, slots=True)
class AxisConsts:
    """A dimension of windows. place: where a tap lies on the side that is read: first + digit * scale + tap * step, of that / divisor if
    it divides. form: "unrolled" taps, a "loop", or a "digit" of their own. tap_source, tap_target: bytes from tap to tap; place_source:
    from place to place of the source, if it is divided. rest: not 0 if only the taps that divide are gone over, `divisor` apart from the
    first of them on, the last of them only if the first is below rest; tap: bytes from one tap to the next then."""

    taps: int
    form: str
    scale: int
    step: int
    divisor: int
    magic: tuple[int, int]
    tap_source: int
    tap_target: int
    place_source: int
    rest: int = 0
    tap: int = 0


@dataclass(frozen=True, slots=True)
class UnfoldConsts:
    """sums: elements add up, in `compute`; else bits are moved."""

    dtype: str
    size: int
    compute: str
    sums: bool
    vector: int
    axes: tuple[AxisConsts, ...]
    digits: DigitConsts


class UnfoldWalk(Engine):
    """unfold, im2col and their gradients, fold and col2im, in any layout. Workspace: nothing, a copy of the image, or one of the columns
    (rows of taps)."""

    id = "unfold.walk"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, UnfoldProblem)
        image = problem.desc(problem.image)
        if prod(image.shape[1:]) >= _LIMIT or prod(problem.positions) * image.shape[1] * prod(problem.kernel) >= _LIMIT:
            return refuse("an image, or its columns, of 2^31 elements or more")
        for n, r, d, u, (lo, hi) in zip(image.shape[2:], problem.kernel, problem.dilation, problem.stride, problem.padding, strict=True):
            if n + lo + hi + r * d + u >= _LIMIT:
                return refuse("a coordinate exceeds 31 bits")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        p = problem
        assert isinstance(p, UnfoldProblem)
        found, model = [], _model(p)
        for turn in (0, 1) if model is not None and not p.desc(p.image).is_packed(model) else (0,):
            found += [EngineConfig.of(vec=v, deal=d, turn=turn) for v in _packs(p, _image(p, turn)) for d in ((0,) if p.sums else (0, 1))]
        if model is None and p.has_rows and prod(p.kernel) > 1:
            found.append(EngineConfig.of(vec=1, deal=0, turn=2))
        limit = p.policy.workspace_limit
        if limit is not None:
            found = [c for c in found if not c["turn"] or self.build_steps(p, c, device).workspace_bytes <= limit]
        return tuple(sorted(found, key=lambda config: self.estimate(problem, config, device)))

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        """Accesses that neighbouring threads do not make side by side take up to as many sectors as there are threads."""
        p = problem
        assert isinstance(p, UnfoldProblem)
        size, model, turn = p.desc("x").dtype.num_bytes, _model(p), config["turn"]
        _, channel, _, positions = p.column_strides
        cost = 1.1 + 0.8 * config["deal"] + 1.6 / (config["vec"] * size)
        if turn == 2:
            return 6.0 + (p.num_bytes * cost + 2.2 * p.desc(p.columns).num_bytes) / (device.bandwidth_gbs * 1e3)
        if model is None:
            cost *= 2.5 if config["deal"] else min(8.0, positions[-1], channel)
        if model is not None and not turn and not p.desc(p.image).is_packed(model):
            cost *= 2.5
        moved = p.num_bytes * cost + turn * 2.5 * p.desc(p.image).num_bytes
        return 3.0 + 3.0 * turn + moved / (device.bandwidth_gbs * 1e3)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        p = problem
        assert isinstance(p, UnfoldProblem)
        if p.is_empty:
            return Build(())
        places: dict[str, Place] = {name: TensorArg(name) for name in (p.image, p.columns)}
        if not config["turn"]:
            return Build(tuple(self._walk(p, places, config, device)))
        # One of the two lies otherwise meanwhile: the image as the columns do, or columns with positions innermost.
        name, scratch = p.columns if config["turn"] == 2 else p.image, Scratch()
        desc, turned = p.desc(name), _image(p, config["turn"])
        if name == p.columns:
            turned = TensorDesc(desc.dtype, desc.shape, (desc.shape[1] * desc.shape[2], 1, desc.shape[1]))
        inner = replace(p, operands=tuple(replace(o, desc=turned) if o.name == name else o for o in p.operands))
        copy = scratch.take(turned.num_bytes)
        walks = self._walk(inner, places | {name: copy}, config, device)
        is_first = name == "x"  # copied before it is read, else after it is written
        x, y = ((desc, TensorArg(name)), (turned, copy)) if is_first else ((turned, copy), (desc, TensorArg(name)))
        build, _ = cheapest("transform", (("x", x[0]), ("y", y[0])), (), replace(p.policy, workspace_limit=None), device, COPIES)
        copies = moved(build, scratch.take(build.workspace_bytes), x=x[1], y=y[1])
        return Build((*copies, *walks) if is_first else (*walks, *copies), scratch.num_bytes)

    @staticmethod
    def _walk(p: UnfoldProblem, places: dict[str, Place], config: EngineConfig, device: DeviceInfo) -> list[Step]:
        """The launches over an image and columns that lie where `places` says."""
        image = p.desc(p.image)
        vector, dtype = config["vec"], p.desc("x").dtype
        size = dtype.num_bytes
        in_image = tuple(s * size for s in image.strides)
        n_columns, c_columns, *rows = p.column_strides
        n_columns, c_columns = n_columns * size, c_columns * size
        taps, positions = (tuple(s * size for s in row) for row in rows)
        rank = len(p.kernel)
        forms, taps_over = _forms(p, bool(config["deal"]))
        if sum((r - 1) * max(abs(t), d * abs(s)) for r, t, d, s in zip(p.kernel, taps, p.dilation, in_image[2:], strict=True)) >= _LIMIT:
            forms, taps_over = tuple("digit" if f == "digit" else "loop" for f in forms), p.kernel
        # Bytes that each digit moves in the image and in the columns.
        names = ["n", "c", *(f"p{i}" for i in range(rank))]
        extents = [image.shape[0], image.shape[1] // vector, *(image.shape[2:] if p.sums else p.positions)]
        by_image = [in_image[0], in_image[1] * vector]
        by_columns = [n_columns, c_columns * vector]
        axes, first, base = [], [], 0
        for i, (r, d, u, (lo, _)) in enumerate(zip(p.kernel, p.dilation, p.stride, p.padding, strict=True)):
            if p.sums:
                is_divided = u > 1
                by_image.append(in_image[2 + i])
                by_columns.append(0 if is_divided else positions[i])
                if taps_over[i] != r or (is_divided and d == 1 and forms[i] == "unrolled"):
                    rest = r - (taps_over[i] - 1) * u
                    step = u * taps[i] - positions[i]
                    axes.append(AxisConsts(taps_over[i], forms[i], 1, -1, u, magic(u), step, 0, positions[i], rest, taps[i]))
                else:
                    step = taps[i] - (0 if is_divided else d * positions[i])
                    axes.append(AxisConsts(r, forms[i], 1, -d, u, magic(u), step, 0, positions[i]))
                first.append(lo)
                base += 0 if is_divided else lo * positions[i]
            else:
                by_image.append(u * in_image[2 + i])
                by_columns.append(positions[i])
                axes.append(AxisConsts(r, forms[i], u, d, 1, (0, 0), d * in_image[2 + i], taps[i], in_image[2 + i]))
                first.append(-lo)
                base -= lo * in_image[2 + i]
        for i, form in enumerate(forms):
            if form == "digit":
                names.append(f"r{i}")
                extents.append(p.kernel[i])
                by_image.append(p.dilation[i] * in_image[2 + i])
                by_columns.append(taps[i])
        source, target = (by_columns, by_image) if p.sums else (by_image, by_columns)
        bounds = p.positions if p.sums else image.shape[2:]
        per_image = prod(extents[1:])
        images = max(1, min(extents[0], (_LIMIT - 1) // per_image))
        steps = []
        for begin in range(0, extents[0], images):
            counts = (min(images, extents[0] - begin), *extents[1:])
            digits = Digits(tuple(names), counts, {"source": tuple(source), "target": tuple(target)}).ordered_for("target")
            compute = "f64" if dtype.name == "f64" else "f32"
            consts = UnfoldConsts(dtype.name, size, compute, p.sums, vector, tuple(axes), digits.consts())
            args = [Arg("ptr_source", "u64", shifted(places["x"], base + begin * source[0])),
                    Arg("ptr_target", "u64", shifted(places["y"], begin * target[0])), Arg("num_threads", "u32", digits.size)]
            for i, (at, bound) in enumerate(zip(first, bounds, strict=True)):
                args += [Arg(f"first{i}", "s32", at), Arg(f"bound{i}", "u32", bound)]
            args += digits.args(consts.digits.wide)
            steps.append(Step.of("conv/unfold", p.op, Target.for_arch(device.arch), THREADS, args, consts, ceil_div(digits.size, THREADS),
                                 suffix=f"{dtype.name}_{'x'.join(map(str, p.kernel))}_v{vector}"))
        return steps


def _model(p: UnfoldProblem) -> str | None:
    """The layout of an image that lies as the columns do, if there is one."""
    _, channel, _, positions = p.column_strides
    return None if prod(p.kernel) < 2 else "nhwc" if channel == 1 else "nchw" if positions[-1] == 1 else None


def _image(p: UnfoldProblem, turn: int) -> TensorDesc:
    """The image, or the copy that lies as the columns do."""
    desc = p.desc(p.image)
    return TensorDesc.packed(desc.dtype, desc.shape, _model(p) or "nchw") if turn else desc


def _packs(p: UnfoldProblem, image: TensorDesc) -> list[int]:
    """Channels that a thread can move at once, most first."""
    size = p.desc("x").dtype.num_bytes
    n, channel, taps, positions = p.column_strides
    others = [s for i, s in enumerate(image.strides) if i != 1 and image.shape[i] > 1] + [n, *taps, *positions]
    aligns = [image.align, p.desc(p.columns).align]
    if image.strides[1] != 1 or channel != 1:
        return [1]
    return [v for v in (16, 8, 4, 2) if v * size <= 16 and image.shape[1] % v == 0 and not any(s % v for s in others)
            and not any(a % (v * size) for a in aligns)] + [1]


def _forms(p: UnfoldProblem, deal: bool) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """How the taps of each dimension are gone over, from the last dimension on in the text, as long as they are few, and how many: of a
    sum over windows that lie `stride` apart only those that may meet an element."""
    if deal:
        return ("digit",) * len(p.kernel), p.kernel
    forms: list[str] = []
    over: list[int] = []
    count = 1
    for r, u, d in reversed(tuple(zip(p.kernel, p.stride, p.dilation, strict=True))):
        few = ceil_div(r, u) if p.sums and d == 1 else r
        count *= few
        is_short = count <= _MAX_UNROLLED and few <= _MAX_ALONG and "loop" not in forms
        forms.append("unrolled" if is_short else "loop")
        over.append(few if is_short else r)
    return tuple(reversed(forms)), tuple(reversed(over))


ENGINES: dict[str, tuple[Engine, ...]] = {op: (UnfoldWalk(),) for op in ("unfold", "fold", "im2col", "col2im")}
