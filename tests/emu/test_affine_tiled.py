"""The tiled matmul loops in the emulator, all checkers on: every type and major-ness, tails, strides, groups, splits, epilogues."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from oxidnn.engines.affine_mma_sm80 import MMA_SM80
from oxidnn.engines.affine_simt import SIMT
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.matmul import MatmulEngine
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

from .test_registry import seed_of


def simt(threads_m: int, threads_n: int, reg_m: int, reg_n: int, tile_k: int, stages: int, split_k: int, **knobs: int) -> EngineConfig:
    return EngineConfig.of(threads_m=threads_m, threads_n=threads_n, reg_m=reg_m, reg_n=reg_n, tile_k=tile_k, stages=stages,
                           split_k=split_k, **knobs)


def mma(tile_m: int, tile_n: int, tile_k: int, warps_m: int, warps_n: int, stages: int, split_k: int, sync: str = "late") -> EngineConfig:
    return EngineConfig.of(tile_m=tile_m, tile_n=tile_n, tile_k=tile_k, warps_m=warps_m, warps_n=warps_n, stages=stages,
                           sync=sync, split_k=split_k, cp=("ca", "cg")[split_k % 2])


class Only:
    """An algorithm that knows one config, whether its own heuristics would choose it or not."""

    def __init__(self, algorithm, config: EngineConfig) -> None:  # type: ignore[no-untyped-def]
        self.name, self.is_deterministic = algorithm.name, algorithm.is_deterministic
        self.check, self.estimate, self.build = algorithm.check, algorithm.estimate, algorithm.build
        self.config = config

    def configs(self, am, device) -> tuple[EngineConfig, ...]:  # type: ignore[no-untyped-def]
        return (self.config,)


RANDOM = ("random", 3)


def schedule_of(line: str, config: EngineConfig) -> Any:
    """One of three problems of a config runs under a random schedule, which takes several times as long."""
    return "lowest_pc" if seed_of(line, config.name) % 3 else RANDOM


def run(line: str, algorithm, config: EngineConfig, arch: str = "sm_80", schedule: Any = None) -> None:  # type: ignore[no-untyped-def]
    problem, schedule = parse_case(line), schedule or schedule_of(line, config)
    engine = MatmulEngine(problem.op, Only(algorithm, config))
    backend = EmulatedBackend(arch, checkers="all", schedule=schedule)
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    run_problem(backend, problem, engine, config, seed=len(line))


def matrix(name: str, rows: int, columns: int, is_transposed: bool, pad: int) -> str:
    return f"{name}={{t}}[{rows},{columns}]" + (f"(1,{rows + pad})" if is_transposed else "")


GEMMS = [
    " ".join(("gemm", matrix("a", m, k, ta, pad), matrix("b", k, n, tb, pad), matrix("d", m, n, td, pad)))
    for ta in (False, True) for tb in (False, True)
    for td, m, n, k, pad in ((False, 72, 40, 104, 0), (True, 33, 35, 37, 3), (False, 50, 33, 40, 1))
]
CONVS = (
    # NHWC and NCHW, channels that vectorise and not, all directions; strides, dilation, groups, 1 and 3 dimensions.
    "conv_fprop x={t}[2,16,7,6]nhwc w={t}[24,16,3,3]nhwc y={t}[2,24,7,6]nhwc padding=1",
    "conv_fprop x={t}[2,5,7,6]nhwc w={t}[9,5,3,3]nhwc y={t}[2,9,7,6]nhwc padding=1",
    "conv_fprop x={t}[2,8,7,6] w={t}[24,8,3,3] padding=1 stride=2",
    "conv_fprop x={t}[2,16,9,8]nhwc w={t}[16,8,3,3]nhwc padding=2 dilation=2 stride=(1,2) groups=2",
    "conv_fprop x={t}[3,8,50]nhwc w={t}[12,8,5]nhwc padding=2",
    "conv_fprop x={t}[2,4,5,6,4]nhwc w={t}[8,4,3,2,3]nhwc padding=1",
    "conv_fprop x={t}[2,64,5,5]nhwc w={t}[40,64,1,1]nhwc y={t}[2,40,5,5]nhwc",
    "conv_fprop x={t}[2,16,7,6]nhwc w={t}[24,16,3,3]nhwc y={t}[2,24,7,6]nhwc@8 padding=1",
    "conv_dgrad dy={t}[2,24,7,6]nhwc w={t}[24,16,3,3]nhwc dx={t}[2,16,7,6]nhwc padding=1",
    "conv_dgrad dy={t}[2,16,4,3]nhwc w={t}[16,8,3,3]nhwc x_shape=(2,8,7,6) padding=1 stride=2",
    "conv_wgrad x={t}[3,16,9,8]nhwc dy={t}[3,24,9,8]nhwc dw={t}[24,16,3,3]nhwc padding=1",
    "conv_wgrad x={t}[3,5,9,8] dy={t}[3,9,5,4] w_shape=(9,5,3,3) padding=1 stride=2",
    "conv_wgrad x={t}[2,16,9,8]nhwc dy={t}[2,16,9,8]nhwc dw=f32[16,8,3,3]nhwc padding=1 groups=2",
)
EPILOGUES = (
    "conv_fprop x={t}[2,16,7,6]nhwc w={t}[24,16,3,3]nhwc y={t}[2,24,7,6]nhwc bias=f32[24] residual={t}[2,24,7,6]nhwc padding=1 "
    "epilogue=bias_residual_relu",
    "conv_fprop x={t}[2,16,6,6]nhwc w={t}[24,16,3,3]nhwc y=f32[2,24,6,6] bias={t}[24] residual={t}[2,24,6,6]nhwc padding=1 "
    "epilogue=bias_residual_relu",
    "conv_fprop x={t}[2,5,7,6] w={t}[9,5,3,3] y=f16[2,9,7,6] bias=f32[9] scale=f32[9] padding=1 epilogue='relu(acc * scale + bias)'",
    "gemm a={t}[2,33,40] b={t}[40,24] bias=f32[24] d=bf16[2,33,24] epilogue=bias_relu",
)
SIMT_SMALL = simt(8, 4, 4, 4, 16, 3, 1)


@pytest.mark.parametrize("line", [*GEMMS, *CONVS])
@pytest.mark.parametrize("kind", ["f32", "f64"])
def test_simt(line: str, kind: str) -> None:
    config = SIMT_SMALL if kind == "f32" else simt(8, 8, 4, 4, 8, 2, 1)
    run(line.format(t=kind), SIMT, config)


@pytest.mark.parametrize("line", [*GEMMS, *CONVS[:3], *CONVS[8:11]])
@pytest.mark.parametrize("config", [simt(8, 8, 8, 16, 8, 4, 1), simt(4, 32, 16, 8, 16, 2, 1, transposes=1),
                                    simt(16, 16, 8, 16, 8, 2, 2, transposes=1)],
                         ids=lambda config: config.name)
def test_simt_of_many_results_a_thread(line: str, config: EngineConfig) -> None:
    """8 x 16 and 16 x 8 results a thread, whose fragments of B come in two parts; warps of 4 x 8 lanes side by side; operands that lie
    along k transposed on their way to shared memory."""
    run(line.format(t="f32"), SIMT, config)


@pytest.mark.parametrize("line", [*GEMMS, *CONVS])
@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_mma_16_bit(line: str, kind: str) -> None:
    run(line.format(t=kind), MMA_SM80, mma(64, 32, 32, 2, 1, 3, 1))


@pytest.mark.parametrize("line", [*GEMMS[1:4], CONVS[0], CONVS[2], *CONVS[8:12], EPILOGUES[0], EPILOGUES[3],
                                  "gemm a={t}[3,170,40] b={t}[3,40,90]", "gemm a={t}[300,200] b={t}[200,170] d={t}[300,170](1,300)"])
@pytest.mark.parametrize(("shape", "passes"), [((64, 32, 32, 2, 1, 3, 1), 2), ((32, 64, 32, 1, 2, 3, 2, "early"), 1)])
def test_mma_of_several_tiles_a_cta(line: str, shape: tuple, passes: int) -> None:  # type: ignore[type-arg]
    """CTAs that take tiles in turn on a device of one SM; a tile is written in `passes` shares while the next one's stages fill."""
    problem = parse_case(line.format(t="bf16"))
    config = EngineConfig.of(**dict(mma(*shape).knobs), passes=passes)
    engine = MatmulEngine(problem.op, Only(MMA_SM80, config))
    backend = EmulatedBackend("sm_90a", checkers="all", schedule=schedule_of(line, config))
    backend.info = replace(backend.info, num_sms=1)
    run_problem(backend, problem, engine, config, seed=len(line))


@pytest.mark.parametrize("line", [*GEMMS, *CONVS])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_mma_tf32(line: str, arch: str) -> None:
    """Against a reference of operands rounded to tf32, which the tolerance of 10-bit products contains."""
    problem = parse_case(line.format(t="f32") + " math=tf32")
    config = mma(64, 32, 16, 2, 1, 3, 1)
    engine = MatmulEngine(problem.op, Only(MMA_SM80, config))
    backend = EmulatedBackend(arch, checkers="all")
    assert engine.check_support(problem, backend.info)
    run_tf32(backend, problem, engine, config)


@pytest.mark.parametrize("line", [*GEMMS, *CONVS])
@pytest.mark.parametrize(("math", "arch"), [("tf32x3", "sm_80"), ("tf32x3", "sm_90a"), ("bf16x3", "sm_80")])
def test_mma_of_parts(line: str, math: str, arch: str) -> None:
    run(line.format(t="f32") + f" math={math}", MMA_SM80, mma(64, 32, 16 if math == "tf32x3" else 32, 2, 1, 2, 1), arch)


@pytest.mark.parametrize("math", ["tf32x3", "bf16x3"])
def test_parts_are_as_exact_as_promised(math: str) -> None:
    """On values that no part alone holds: relative error of sums without cancellation, beside that of tf32."""
    import numpy as np

    from oxidnn.testing.harness import execute

    errors = {}
    for policy in (math, "tf32"):
        problem = parse_case(f"gemm a=f32[64,512] b=f32[512,32] math={policy}")
        rng = np.random.default_rng(1)
        inputs = {"a": rng.uniform(1, 2, (64, 512)).astype(np.float32), "b": rng.uniform(1, 2, (512, 32)).astype(np.float32)}
        config = mma(64, 32, 32, 2, 1, 2, 1)
        d = execute(EmulatedBackend("sm_90a"), problem, MatmulEngine("gemm", Only(MMA_SM80, config)), config, inputs)["d"]
        want = inputs["a"].astype(np.float64) @ inputs["b"].astype(np.float64)
        errors[policy] = float(np.abs(d / want - 1).max())
    assert errors[math] < {"tf32x3": 1e-6, "bf16x3": 5e-6}[math] and errors["tf32"] > 10 * errors[math], errors


@pytest.mark.parametrize("line", [GEMMS[0], GEMMS[4], CONVS[0], CONVS[1], CONVS[4], CONVS[8], CONVS[10]])
@pytest.mark.parametrize("split_k", [1, 3])
def test_mma_without_asynchronous_copies(line: str, split_k: int) -> None:
    run(line.format(t="f16"), MMA_SM80, mma(64, 32, 32, 2, 1, 2 + split_k % 2, split_k, ("late", "early")[split_k == 1]), "sm_75")


@pytest.mark.parametrize("line", [
    "gemm a=s8[72,96] b=s8[40,96] transpose_b=True", "gemm a=u8[33,36](40,1) b=s8[35,36] transpose_b=True",
    "gemm a=s8[2,50,64] b=u8[64,33](1,64) d=f32[2,50,33] scale_a=f32[50] scale_b=f32[1] bias=f32[33] epilogue=bias_relu",
    "gemm a=s8[72,96](100,1) b=s8[96,40](1,96) d=bf16[72,40] alpha=0.25",
])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_mma_of_integers(line: str, arch: str) -> None:
    problem = parse_case(line)
    engine, backend = MatmulEngine("gemm", MMA_SM80), EmulatedBackend(arch, checkers="all", schedule=RANDOM)
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    for config in engine.configs(problem, backend.info)[:3]:
        run_problem(backend, problem, engine, config)


@pytest.mark.parametrize("line", [
    "gemm a=e4m3[72,160] b=e4m3[40,160] transpose_b=True d=f32[72,40]",
    "gemm a=e5m2[33,36](40,1) b=e4m3[35,36] transpose_b=True d=bf16[33,35]",
    "gemm a=e4m3[2,50,64] b=e5m2[64,33](1,64) d=f32[2,50,33] scale_a=f32[50] scale_b=f32[1] bias=f32[33] epilogue=bias_relu"])
def test_mma_of_8_bit_floats(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_89", checkers="all", schedule=RANDOM)
    engine = MatmulEngine("gemm", MMA_SM80)
    support = engine.check_support(problem, backend.info)
    assert support, support.reason
    for config in engine.configs(problem, backend.info)[:3]:
        run_problem(backend, problem, engine, config)


@pytest.mark.parametrize(("line", "arch", "reason"), [
    ("gemm a=s8[16,32] b=s8[32,16]", "sm_80", "lie along k"), ("gemm a=s8[16,32] b=s8[16,32] transpose_b=True", "sm_75", "needs sm_80"),
    ("gemm a=e4m3[16,32] b=e4m3[16,32] transpose_b=True", "sm_86", "needs sm_89"),
    ("gemm a=bf16[16,32] b=bf16[32,16]", "sm_75", "needs sm_80"),
    ("gemm a=f32[16,32] b=f32[32,16]", "sm_90a", "ieee")])
def test_mma_refuses_with_a_reason(line: str, arch: str, reason: str) -> None:
    support = MatmulEngine("gemm", MMA_SM80).check_support(parse_case(line), EmulatedBackend(arch).info)
    assert not support and reason in support.reason


def run_tf32(backend, problem, engine, config) -> None:  # type: ignore[no-untyped-def]
    """As run_problem on inputs that tf32 holds exactly, so that f32's own tolerance applies."""
    import numpy as np

    from oxidnn.testing.data import random_inputs
    from oxidnn.testing.harness import compare, execute
    from oxidnn.testing.reference import REFERENCES

    inputs = random_inputs(problem, np.random.default_rng(5))
    for array in inputs.values():
        array.view(np.uint32)[...] &= 0xFFFFE000
    outputs = execute(backend, problem, engine, config, inputs, {})
    want = REFERENCES[problem.op](problem, {n: a.astype(np.float64) for n, a in inputs.items()}, {})
    compare(problem, outputs, want, engine.id)


@pytest.mark.parametrize("line", EPILOGUES)
@pytest.mark.parametrize("split_k", [1, 3])
def test_epilogues(line: str, split_k: int) -> None:
    run(line.format(t="bf16"), MMA_SM80, mma(32, 32, 32, 1, 1, 2, split_k))
    run(line.format(t="f32"), SIMT, simt(8, 4, 4, 2, 16, 2, split_k))


@pytest.mark.parametrize("line", [CONVS[0], CONVS[1], CONVS[2], CONVS[10], CONVS[11], CONVS[12], GEMMS[0], GEMMS[4]])
@pytest.mark.parametrize("split_k", [2, 5])
def test_split_k(line: str, split_k: int) -> None:
    run(line.format(t="bf16"), MMA_SM80, mma(64, 32, 32, 2, 1, 3, split_k))
    run(line.format(t="f32"), SIMT, simt(8, 4, 4, 4, 16, 2, split_k))
    run(line.format(t="f64"), SIMT, simt(8, 4, 4, 4, 8, 2, split_k))


@pytest.mark.parametrize("tile", [
    (128, 128, 32, 2, 4, 4, 1), (128, 64, 64, 2, 2, 3, 2), (64, 128, 32, 2, 2, 4, 1), (128, 32, 32, 4, 1, 4, 1), (128, 16, 32, 4, 1, 4, 1),
    (32, 64, 32, 1, 2, 4, 1), (256, 64, 32, 4, 1, 4, 1), (64, 64, 32, 2, 2, 5, 1, "early"), (64, 32, 64, 2, 1, 3, 2, "early")])
@pytest.mark.parametrize("line", [CONVS[0], CONVS[1], CONVS[10]])
def test_mma_tiles(line: str, tile) -> None:  # type: ignore[no-untyped-def]
    run(line.format(t="bf16"), MMA_SM80, mma(*tile), schedule=RANDOM)


@pytest.mark.parametrize("cluster", (2, 4, 8))
@pytest.mark.parametrize(("line", "tile"), [
    ("conv_fprop x=f16[1,136,7,7]nhwc w=f16[104,136,3,3]nhwc bias=f16[104] padding=1 epilogue=relu(acc+bias)", (64, 64, 64, 2, 2, 3)),
    ("conv_fprop x=bf16[1,40,7,7] w=bf16[72,40,3,3] padding=1", (32, 64, 64, 1, 4, 4)),
    ("conv_dgrad dy=bf16[1,72,7,7]nhwc w=bf16[72,40,1,1]nhwc dx=bf16[1,40,7,7]nhwc", (64, 32, 64, 2, 2, 4)),
    ("gemm a=bf16[3,70,501] b=bf16[3,501,100]", (128, 64, 64, 4, 2, 3)),
    ("gemm a=f32[70,500] b=f32[500,100] math=tf32x3", (64, 64, 32, 2, 2, 3)),
])
def test_clusters_that_deal_out_k(line: str, tile: tuple[int, ...], cluster: int) -> None:
    config = EngineConfig.of(**dict(mma(*tile, split_k=cluster).knobs), joins="cluster")
    run(line, MMA_SM80, config, "sm_90a", RANDOM)


def test_many_tiles_in_groups() -> None:
    """More m tiles than one group of the raster, a last group that is smaller, several n tiles and batches."""
    run("gemm a=bf16[2,340,40] b=bf16[2,40,70]", MMA_SM80, mma(32, 32, 32, 1, 1, 2, 1))


@pytest.mark.parametrize("line", ["conv_fprop x={t}[2,16,7,6]nhwc w={t}[24,16,3,3]nhwc y={t}[2,24,7,6]nhwc padding=1",
                                  "gemm a={t}[33,40] b={t}[40,24] bias=f32[24] epilogue=bias_relu"])
def test_wide_offsets(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64-bit offsets compute the same; a tensor beyond 2^31 elements does not fit the emulator, so the choice is forced."""
    from oxidnn.engines import affine_mma_sm80, affine_simt, affine_tiling

    monkeypatch.setattr(affine_tiling, "needs_wide", lambda digits: True)
    for module in (affine_mma_sm80, affine_simt):
        module._plan.cache_clear()
    try:
        run(line.format(t="bf16"), MMA_SM80, mma(64, 32, 32, 2, 1, 3, 2))
        run(line.format(t="f32"), SIMT, SIMT_SMALL)
    finally:
        for module in (affine_mma_sm80, affine_simt):
            module._plan.cache_clear()


def test_nan_and_infinity_reach_the_result() -> None:
    import numpy as np

    from oxidnn.testing.harness import execute

    problem = parse_case("gemm a=f32[32,32] b=f32[32,32] math=tf32")
    for arch in ("sm_80", "sm_90a"):
        backend = EmulatedBackend(arch, checkers="all")
        a, b = np.ones((32, 32), np.float32), np.ones((32, 32), np.float32)
        a.view(np.uint32)[3, 4] = 0x7FFFFFFF
        a[5, 6] = np.inf
        config = mma(32, 32, 16, 1, 1, 2, 1)
        d = execute(backend, problem, MatmulEngine("gemm", Only(MMA_SM80, config)), config, {"a": a, "b": b})["d"]
        assert np.isnan(d[3]).all() and np.isposinf(d[5]).all() and (np.delete(d, (3, 5), 0) == 32).all()


@pytest.mark.parametrize("math", ["tf32x3", "bf16x3"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_parts_of_infinities_and_of_the_largest_numbers(math: str, arch: str) -> None:
    """NaN and infinities where IEEE arithmetic has them, next to numbers that round to infinity in tf32 and bf16."""
    import numpy as np

    from oxidnn.testing.harness import execute

    problem, backend = parse_case(f"gemm a=f32[24,40] b=f32[40,24] math={math}"), EmulatedBackend(arch, checkers="all")
    engine, rng = MatmulEngine("gemm", MMA_SM80), np.random.default_rng(0)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((24, 40), (40, 24)))
    a[[1, 2, 3]] = 0
    a[1, 0], a[2, 1], a[3, 0] = 3.4e38, -3.395e38, 1e38
    b[0, :4], b[1, :4] = (1, 0.5, -1e-30, 2), (1, -0.25, 0, 3.4e38)
    a[4, 3], a[5, 4], a[6, 5], a[7, 6] = np.inf, -np.inf, np.nan, np.inf
    a.view(np.uint32)[8, 2] = 0x7F800001  # NaN whose payload tf32 and bf16 have no bits for
    b[6, 5], b[6, 6], b[7, 7], a[9, 7], b[8, 8] = 0, np.inf, -np.inf, 0, np.nan
    with np.errstate(all="ignore"):
        want, exact = (a[:, :, None] * b[None]).sum(1), (a.astype(np.float64)[:, :, None] * b[None]).sum(1)
        reach = (np.abs(a).astype(np.float64)[:, :, None] * np.abs(b)[None]).sum(1)
    for config in engine.configs(problem, backend.info)[:3]:
        d = execute(backend, problem, engine, config, {"a": a, "b": b})["d"]
        assert (np.isnan(d) == np.isnan(want)).all() and (d[np.isinf(want)] == want[np.isinf(want)]).all()
        finite = np.isfinite(want)
        assert finite.any() and (np.abs(d[finite] - exact[finite]) <= 2.0**-15 * reach[finite]).all()


@pytest.mark.parametrize(("line", "kind"), [(CONVS[0], "bf16"), (CONVS[10], "bf16"), (GEMMS[0], "bf16"), (CONVS[0], "f32"),
                                            (CONVS[10], "f32")])
@pytest.mark.parametrize("tile", [(128, 64, 64, 2, 2, 3, 1), (64, 64, 128, 2, 2, 2, 1)])
def test_main_loop_has_no_bank_conflicts(line: str, kind: str, tile: tuple[int, ...]) -> None:
    """Copies into shared memory and fragment loads out of it, lines along k and along rows, 16 and 32 bits."""
    import numpy as np

    from oxidnn.codegen.render import render
    from oxidnn.testing.data import random_inputs
    from oxidnn.testing.harness import execute

    problem = parse_case(line.format(t=kind) + (" math=tf32" if kind == "f32" else ""))
    tile_m, tile_n, k_bytes, *rest = tile
    config = mma(tile_m, tile_n, k_bytes // (2 if kind == "bf16" else 4), *rest)
    engine = MatmulEngine(problem.op, Only(MMA_SM80, config))
    backend = EmulatedBackend("sm_80", checkers=("bounds", "bank"))
    execute(backend, problem, engine, config, random_inputs(problem, np.random.default_rng(0)), {})
    assert backend.counters.bank_accesses > 0
    text = render(engine.build_steps(problem, config, backend.info).steps[-1].spec).splitlines()
    lines = [text[number - 1].strip() for number in backend.counters.conflicts_by_line]
    assert not lines, lines
