"""Grouped GEMM in the emulator, all checkers on: what sizes may hold, groups beside each other that hold infinities, every engine."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import compare, exact, execute
from oxidnn.testing.reference import REFERENCES

FORWARD = "grouped_gemm a=bf16[150,40] b=bf16[5,40,24] group_sizes=s32[5]"
TRANSPOSED = "grouped_gemm a=f16[150,72] b=f16[5,200,72] group_sizes=s64[5] transpose_b=True"
WGRAD = "grouped_gemm_wgrad a=bf16[150,40] b=bf16[150,24] group_sizes=s32[5]"
WIDE = "grouped_gemm a=f32[90,20] b=f32[5,20,12] group_sizes=s32[5]"
WIDE_WGRAD = "grouped_gemm_wgrad a=f32[90,20] b=f32[90,12] group_sizes=s32[5]"
SIZES = {"whole": (70, 0, 1, 64, 15), "one": (0, 0, 150, 0, 0), "less": (3, 0, 0, 64, 2), "none": (0, 0, 0, 0, 0),
         "more": (100, 100, 7, 0, 1), "below": (-5, 64, -(2**31), 10, 2**31 - 1)}


def pairs(*lines: str) -> list[tuple[str, object]]:
    device = known_device("sm_90a")
    return [(line, e) for line in lines for e in ENGINES[line.split()[0]] if e.check_support(parse_case(line), device)]


def name_of(x: object) -> str:
    return str(getattr(x, "id", x)).split(" group_sizes")[0]


def run(line: str, engine, sizes: tuple[int, ...], values: dict[str, np.ndarray] | None = None) -> np.ndarray:  # type: ignore[no-untyped-def]
    """Up to three configs, under one of two schedules in turn."""
    problem = parse_case(line)
    backends = [EmulatedBackend("sm_90a", checkers="all", schedule=schedule) for schedule in (("random", 3), "lowest_pc")]
    for backend in backends:
        backend.info = replace(backend.info, num_sms=2)  # persistent CTAs walk several tiles
    inputs = random_inputs(problem, np.random.default_rng(len(line))) | (values or {})
    inputs["group_sizes"] = np.array(sizes, problem.desc("group_sizes").dtype.numpy)
    want = REFERENCES[problem.op](problem, exact(problem, inputs), {})
    got: np.ndarray | None = None
    tried = set()
    for config in engine.configs(problem, backends[0].info):
        kind = config["schedule"] if "wgmma" in engine.id else len(tried)
        if kind in tried or len(tried) == 3:
            continue
        out = execute(backends[(len(tried) + sizes[0]) % 2], problem, engine, config, inputs)
        tried.add(kind)
        compare(problem, out, want, engine.id, is_coarse=engine.sums_coarsely)
        got = out["d"]
    assert got is not None
    return got


@pytest.mark.parametrize(("line", "engine"), pairs(FORWARD, TRANSPOSED, WGRAD, WIDE, WIDE_WGRAD), ids=name_of)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_whatever_sizes_hold(line: str, engine, sizes: tuple[int, ...]) -> None:  # type: ignore[no-untyped-def]
    run(line, engine, sizes)


@pytest.mark.parametrize(("line", "engine"), pairs(FORWARD + " cumulative=True", WGRAD + " cumulative=True"), ids=name_of)
def test_ends_in_place_of_sizes(line: str, engine) -> None:  # type: ignore[no-untyped-def]
    for ends in ((70, 70, 71, 135, 150), (9, 3, 20, 500, 7), (0, 0, 0, 0, 40)):
        run(line, engine, ends)


@pytest.mark.parametrize(("line", "engine"), pairs(FORWARD, WGRAD, WIDE_WGRAD), ids=name_of)
def test_infinities_of_neighbours_stay_theirs(line: str, engine) -> None:  # type: ignore[no-untyped-def]
    """Group 1 and the rows of no group hold infinities and NaN: only group 1's results may."""
    problem = parse_case(line)
    rows, kind = problem.desc("a").shape[0], problem.desc("a").dtype
    rng = np.random.default_rng(1)
    values = {}
    sizes = (33, 20, 7, 0, 13)
    for name in ("a", "b")[: 2 if problem.op.endswith("wgrad") else 1]:
        x = rng.standard_normal(problem.desc(name).shape)
        x[33:53:2], x[34:53:2], x[73:rows] = np.inf, np.nan, np.nan
        values[name] = x.astype(kind.numpy)
    with np.errstate(invalid="ignore"):
        got = run(line, engine, sizes, values).astype(np.float64)
    own = np.ones(len(got), bool)
    own[1 if problem.op.endswith("wgrad") else slice(33, 53)] = False
    assert np.isfinite(got[own]).all() and not np.isfinite(got[~own]).all()


TENSOR_CORES = (
    "grouped_gemm a=bf16[450,136] b=bf16[5,136,264] group_sizes=s32[5]",
    "grouped_gemm a=f16[450,72] b=f16[5,200,72] group_sizes=s64[5] transpose_b=True cumulative=True",
    "grouped_gemm a=bf16[450,72] b=bf16[5,136,72] group_sizes=s32[5] transpose_b=True d=f32[450,136]",
    "grouped_gemm a=bf16[450,72] b=bf16[5,135,72] group_sizes=s32[5] transpose_b=True",  # rows of d no copy can write
    "grouped_gemm a=bf16[450,72] b=bf16[5,136,72] group_sizes=s32[5] transpose_b=True d=bf16[450,136](1,450)",
    "grouped_gemm a=e4m3[450,272] b=e5m2[5,136,272] group_sizes=s32[5] transpose_b=True",
    "grouped_gemm a=s8[450,272] b=u8[5,136,272] group_sizes=s32[5] transpose_b=True",
    "grouped_gemm a=f32[450,40] b=f32[5,136,40] group_sizes=s32[5] transpose_b=True math=tf32",
    "grouped_gemm a=bf16[450,136] b=bf16[5,144,136] group_sizes=s32[5] transpose_b=True gate=silu",
    "grouped_gemm a=e4m3[450,272] b=e4m3[5,272,272] group_sizes=s32[5] transpose_b=True gate=gelu",
    "grouped_gemm_wgrad a=bf16[450,136] b=bf16[450,264] group_sizes=s32[5]",
    "grouped_gemm_wgrad a=f16[450,200] b=f16[450,72] group_sizes=s64[5] cumulative=True d=f32[5,200,72]",
)


@pytest.mark.parametrize("line", TENSOR_CORES)
def test_hopper_loop(line: str) -> None:
    problem = parse_case(line)
    engine = next(e for e in ENGINES[problem.op] if "wgmma" in e.id)
    support = engine.check_support(problem, known_device("sm_90a"))
    assert support, support.reason
    for sizes in ((129, 0, 64, 200, 57), (0, 5, 400, 1, 0), (3, 0, 0, 0, 0)):
        run(line, engine, tuple(int(n) for n in np.cumsum(sizes)) if problem.is_cumulative else sizes)


def test_more_groups_than_lanes() -> None:
    sizes = np.random.default_rng(0).multinomial(90, [1 / 70] * 70)
    for line in ("grouped_gemm a=f16[90,16] b=f16[70,16,8] group_sizes=s32[70]",
                 "grouped_gemm_wgrad a=f16[90,16] b=f16[90,8] group_sizes=s32[70]"):
        for _, engine in pairs(line):
            run(line, engine, tuple(int(n) for n in sizes))


def test_gradients_through_the_handle() -> None:
    h = oxidnn.DnnHandle("emu:sm_90a")
    rng = np.random.default_rng(2)
    x, w, dy = (rng.standard_normal(s).astype(np.float32) for s in ((20, 6), (3, 6, 5), (20, 5)))
    sizes = np.array([4, 0, 16], np.int32)
    y, dx = h.grouped_gemm(x, w, sizes), h.grouped_gemm(dy, w, sizes, transpose_b=True)
    dw, dw_t = h.grouped_gemm_wgrad(x, dy, sizes), h.grouped_gemm_wgrad(dy, x, sizes)
    group = np.repeat(np.arange(3), sizes)
    np.testing.assert_allclose(y, np.einsum("rk,rkn->rn", x, w[group]), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dx, np.einsum("rn,rkn->rk", dy, w[group]), rtol=1e-5, atol=1e-5)
    want = np.stack([x[group == g].T @ dy[group == g] for g in range(3)])
    np.testing.assert_allclose(dw, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(dw_t, want.swapaxes(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("line", "message"), [
    ("grouped_gemm a=f32[4,3] b=f32[2,4,5] group_sizes=s32[2]", "shape of b"),
    ("grouped_gemm a=f32[4,3] b=f32[2,3,5] group_sizes=s32[3]", "shape of b"),
    ("grouped_gemm a=f32[4,3] b=f16[2,3,5] group_sizes=s32[2]", "type of b"),
    ("grouped_gemm a=f32[4,3] b=f32[2,3,5] group_sizes=f32[2]", "group_sizes"),
    ("grouped_gemm a=f32[1,4,3] b=f32[2,3,5] group_sizes=s32[2]", "rank of a"),
    ("grouped_gemm_wgrad a=f32[4,3] b=f32[5,3] group_sizes=s32[2]", "shape of b"),
    ("grouped_gemm a=f32[4,3] b=f32[2,3,5] group_sizes=s32[2] out_dtype=s32", "out_dtype"),
])
def test_bad_arguments_are_named(line: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        parse_case(line)


LARGE = ("grouped_gemm a=bf16[9000,1024] b=bf16[64,1024,2048] group_sizes=s32[64]",
         "grouped_gemm a=f16[9000,1024] b=f16[64,2048,1024] group_sizes=s32[64] transpose_b=True",
         "grouped_gemm_wgrad a=bf16[9000,1024] b=bf16[9000,2048] group_sizes=s64[64] cumulative=True",
         "grouped_gemm a=f32[9000,1024] b=f32[64,1024,2048] group_sizes=s32[64]",
         "grouped_gemm a=bf16[9000,1024] b=bf16[64,4096,1024] group_sizes=s32[64] transpose_b=True gate=silu",
         "grouped_gemm_wgrad a=f32[9000,1024] b=f32[9000,2048] group_sizes=s32[64]")


@pytest.mark.parametrize(("line", "engine"), pairs(*LARGE), ids=name_of)
def test_no_config_spills(line: str, engine) -> None:  # type: ignore[no-untyped-def]
    problem = parse_case(line)
    for arch in ("sm_80", "sm_90a"):
        device = known_device(arch)
        if engine.check_support(problem, device):
            for config in engine.configs(problem, device)[:4]:
                assembled = assemble(render(engine.build_steps(problem, config, device).steps[0].spec), arch)
                assert assembled.spill_bytes == 0, config.name
