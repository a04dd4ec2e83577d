"""Appending to a cache of keys and values: one launch, which turns keys and queries, narrows what the cache holds, and places it."""

from __future__ import annotations

from ..device import DeviceInfo
from ..ops.base import Problem
from ..ops.kv_cache import KvCacheAppendProblem
from .base import SUPPORTED, Arg, Build, Engine, EngineConfig, Support, TensorArg, refuse
from .rope import Move, divisor, launch, position_arguments, rope_consts, rotation_arguments, strides, token_configs, vector

_LIMIT = 2**31


def _moves(p: KvCacheAppendProblem) -> tuple[Move, ...]:
    moves = []
    for name, target in (("k", "k_cache"), ("v", "v_cache"), ("q", "q_out")):
        if not p.has(name) or p.desc(name).numel == 0:
            continue
        rows, to = p.heads_of(name), p.heads_of(target)
        pairs = p.rotation.pairs if p.rotation is not None and name != "v" else 0
        scale = ""
        if p.has(f"{name}_scale"):
            page, _, key = p.scale_strides(f"{name}_scale")
            scale = "key" if page or key else "head"
        moves.append(Move(name, target, rows.dtype.name, to.dtype.name, rows.shape[1], rows.shape[3], pairs, vector(pairs, rows, to),
                          name != "q", scale))
    return tuple(moves)


def _count(p: KvCacheAppendProblem) -> int:
    batch, _, length, _ = p.heads_of("k").shape
    return batch * length


class KvCacheAppend(Engine):
    """Of all types and layouts."""

    id = "kv_cache.tokens"

    def check_support(self, problem: Problem, device: DeviceInfo) -> Support:
        assert isinstance(problem, KvCacheAppendProblem)
        heads = max((m.heads * m.dim for m in _moves(problem)), default=0)
        if _count(problem) >= _LIMIT - 64 or heads * 64 >= _LIMIT:
            return refuse(f"{_count(problem)} tokens of {heads} elements")
        if any(problem.has(f"{m.source}_scale") and m.kind == "f64" for m in _moves(problem)):
            return refuse("f64 beside scales")
        return SUPPORTED

    def configs(self, problem: Problem, device: DeviceInfo) -> tuple[EngineConfig, ...]:
        assert isinstance(problem, KvCacheAppendProblem)
        pairs = problem.rotation.pairs if problem.rotation is not None else 0
        return token_configs(_count(problem), _moves(problem), 4 * pairs * problem.compute.num_bytes, device)

    def estimate(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> float:
        return 3.0 + problem.num_bytes / (device.bandwidth_gbs * 800)

    def build_steps(self, problem: Problem, config: EngineConfig, device: DeviceInfo) -> Build:
        assert isinstance(problem, KvCacheAppendProblem)
        p, moves = problem, _moves(problem)
        if not moves or _count(p) == 0:
            return Build(())
        pages, _, page, _ = p.desc("k_cache").shape
        consts = rope_consts(p.rotation, p, p.compute, moves, config["tokens"], p.place, page)
        args = [Arg("num_tokens", "u32", _count(p)), *divisor("length", p.heads_of("k").shape[2]), Arg("num_pages", "s64", pages)]
        for m in moves:
            args += [Arg(f"ptr_{m.source}", "u64", TensorArg(m.source)), Arg(f"ptr_{m.target}", "u64", TensorArg(m.target)),
                     *strides(m.source, ("batch", "head", "row", "dim"), p.heads_of(m.source)),
                     *strides(m.target, ("page" if m.is_cached else "batch", "head", "key" if m.is_cached else "row", "dim"),
                              p.heads_of(m.target))]
            if m.scale:
                steps = (4 * s for s in p.scale_strides(f"{m.source}_scale"))
                args.append(Arg(f"ptr_{m.source}_scale", "u64", TensorArg(f"{m.source}_scale")))
                args += [Arg(f"{m.source}_scale_{n}_bytes", "s64", s) for n, s in zip(("page", "head", "key"), steps, strict=True)]
        if p.rotation is not None:
            args += rotation_arguments(p.rotation, [p.desc(n) for n in ("cos", "sin") if p.has(n)], consts)
        for name in ("positions", "slots"):
            if p.has(name):
                args += position_arguments(name, p.desc(name))
        if p.has("page_table"):
            table = p.desc("page_table")
            args += [Arg("ptr_page_table", "u64", TensorArg("page_table")), Arg("table_pages", "s64", table.shape[1]),
                     *(Arg(f"table_{n}_bytes", "s64", 4 * s) for n, s in zip(("batch", "step"), table.strides, strict=True))]
        return Build((launch(p.op, consts, args, _count(p), device),))


ENGINES: dict[str, tuple[Engine, ...]] = {"kv_cache_append": (KvCacheAppend(),)}
