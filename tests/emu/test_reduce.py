"""The tree reduction: kinds, types, layouts, arrangements, splits, special values, empty axes, and assembly without spills."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.pointwise import round_to
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.reduce_tree import ReduceTree
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import format_case, parse_case
from oxidnn.ops.reduce import KINDS, NEED_ELEMENTS, STORED
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.sample import CASES, SAMPLES

ENGINE = ReduceTree()


def backend(arch: str = "sm_80") -> EmulatedBackend:
    return EmulatedBackend(arch, checkers="all")


def run_all_configs(line: str, seed: int = 0) -> None:
    problem = parse_case(line)
    for config in ENGINE.configs(problem, known_device("sm_80")):
        run_problem(backend(), problem, ENGINE, config, seed)


def compute(line: str, x: np.ndarray, config: EngineConfig | None = None) -> np.ndarray:
    problem = parse_case(line)
    return execute(backend(), problem, ENGINE, config or ENGINE.configs(problem, known_device("sm_80"))[0], {"x": x})["y"]


def test_random_problems() -> None:
    """Every config of each: both arrangements, one CTA or several an output."""
    for seed in range(16):
        arch = ("sm_80", "sm_90a")[seed % 2]
        problem = SAMPLES["reduce"](np.random.default_rng(2000 + seed), "tiny")
        assert format_case(parse_case(format_case(problem))) == format_case(problem)
        for config in ENGINE.configs(problem, known_device(arch)):
            run_problem(backend(arch), problem, ENGINE, config, seed)


@pytest.mark.parametrize("line", CASES["reduce"])
def test_cases(line: str) -> None:
    run_all_configs(line)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_arrangement(kind: str) -> None:
    """Rows and columns, a tail beyond the last whole pack, and splits over CTAs."""
    for line in (
        f"reduce x=f16[2003]nchw op={kind}",
        f"reduce x=bf16[301,8]nchw op={kind} axes=(0,)",
        f"reduce x=f64[7,5,9]nchw op={kind} axes=(0,2) keepdims=True",
    ):
        run_all_configs(line)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("storage", STORED)
def test_every_type(kind: str, storage: str) -> None:
    problem = parse_case(f"reduce x={storage}[6,50]nchw op={kind} axes=(1,)")
    run_problem(backend("sm_90a"), problem, ENGINE)


def test_bias_gradient_of_a_convolution() -> None:
    for shape in ("bf16[3,40,5,7]nhwc", "f32[3,40,5,7]nchw", "f16[2,3,4,5,6]nhwc", "f32[0,5,3,3]"):
        line = f"conv_bgrad dy={shape}"
        run_all_configs(line)


def test_many_ctas_combine_in_a_fixed_order() -> None:
    """A long reduction: several splits, the same bits every time and under every schedule of the emulator."""
    problem = parse_case("reduce x=f32[70001]nchw op=sum")
    x = np.random.default_rng(0).standard_normal(70001).astype(np.float32)
    config = ENGINE.configs(problem, known_device("sm_80"))[0]
    assert config["splits"] > 1
    results = [
        execute(EmulatedBackend("sm_80", checkers="all", schedule=s), problem, ENGINE, config, {"x": x})["y"].tobytes()
        for s in ("lowest_pc", ("random", 1), ("random", 2))
    ]
    assert len(set(results)) == 1
    np.testing.assert_allclose(np.frombuffer(results[0], np.float32), [x.astype(np.float64).sum()], rtol=1e-5)


@pytest.mark.parametrize("kind", ["max", "min", "amax", "argmax", "argmin", "sum", "any", "all", "logsumexp", "var", "std"])
def test_special_values_follow_numpy(kind: str) -> None:
    x = np.random.default_rng(3).standard_normal((9, 200)).astype(np.float32)
    x[0, 77] = np.nan
    x[1, 5] = x[1, 150] = np.inf
    x[2, 190] = -np.inf
    x[3, :] = -np.inf
    x[4, :] = 0
    x[5, [20, 130]] = np.nan
    x[6, :] = 7
    x[7, :] = np.inf
    functions: dict[str, Any] = {
        "max": np.max,
        "min": np.min,
        "amax": lambda a, axis: np.max(np.abs(a), axis),
        "argmax": np.argmax,
        "argmin": np.argmin,
        "sum": np.sum,
        "any": np.any,
        "all": np.all,
        "logsumexp": np.logaddexp.reduce,
        "var": np.var,
        "std": np.std,
    }
    with np.errstate(invalid="ignore"):
        want = functions[kind](x.astype(np.float64), axis=1)
    problem = parse_case(f"reduce x=f32[9,200]nchw op={kind} axes=(1,)")
    for config in ENGINE.configs(problem, known_device("sm_80")):
        np.testing.assert_allclose(compute(format_case(problem), x, config), want, rtol=1e-5, err_msg=config.name)


def test_argmax_over_several_axes_of_any_layout() -> None:
    """The index counts the reduced axes in the tensor's order, whatever their order in memory; ties go to the first."""
    x = np.random.default_rng(1).integers(-3, 4, (4, 6, 5, 7)).astype(np.float16)
    for layout in ("nchw", "nhwc"):
        problem = parse_case(f"reduce x=f16[4,6,5,7]{layout} op=argmax axes=(1,3)")
        want = x.transpose(0, 2, 1, 3).reshape(4, 5, -1).argmax(-1)
        for config in ENGINE.configs(problem, known_device("sm_80")):
            np.testing.assert_array_equal(compute(format_case(problem), x, config), want)


OFFSETS = {"f64": 1e12, "f32": 1e6, "f16": 500.0, "bf16": 100.0}  # with a deviation of 1


@pytest.mark.parametrize("kind", ["var", "std"])
@pytest.mark.parametrize(("storage", "shape", "axes"), [
    ("f64", "2003", (0,)), ("f64", "301,8", (0,)), ("f64", "5,77", (1,)), ("f32", "2003", (0,)), ("f32", "301,8", (0,)),
    ("f32", "5,77", (1,)), ("f16", "2003", (0,)), ("bf16", "301,8", (0,)),
])
def test_variances_far_from_zero(kind: str, storage: str, shape: str, axes: tuple[int, ...]) -> None:
    """In every arrangement: no digit is lost to the mean, nor to a first element far from all others; equal values give 0."""
    problem = parse_case(f"reduce x={storage}[{shape}]nchw op={kind} axes={axes} correction=1")
    x_type = problem.desc("x").dtype
    size = tuple(int(n) for n in shape.split(","))
    x = np.random.default_rng(7).standard_normal(size) + OFFSETS[storage]
    lone = np.random.default_rng(8).standard_normal(size)
    lone[(0,) * len(size)] = 100 * OFFSETS[storage] ** 0.5
    rtol = 4 * 2.0 ** -{"f64": 50, "f32": 22, "f16": 11, "bf16": 8}[storage]
    for config in ENGINE.configs(problem, known_device("sm_80")):
        for values in (x, lone, np.full(size, OFFSETS[storage] / 3)):
            held = np.asarray(round_to(values, x_type.name), np.float64)
            exact = np.var(held.astype(np.longdouble) - held.take([0], axis=axes[0]), axis=axes, ddof=1)
            want = (np.sqrt(exact) if kind == "std" else exact).astype(np.float64)
            got = compute(format_case(problem), held.astype(x_type.numpy), config).astype(np.float64)
            np.testing.assert_allclose(got, want, rtol=rtol, err_msg=config.name)


def test_integers_are_exact() -> None:
    x = np.random.default_rng(1).integers(-(2**31), 2**31, (3, 5000)).astype(np.int32)
    np.testing.assert_array_equal(compute("reduce x=s32[3,5000]nchw op=sum axes=(1,)", x), x.astype(np.int64).sum(1))
    np.testing.assert_array_equal(compute("reduce x=s32[3,5000]nchw op=norm1 axes=(1,)", x), np.abs(x.astype(np.int64)).sum(1))


@pytest.mark.parametrize(
    ("kind", "want"),
    [
        ("sum", 0),
        ("prod", 1),
        ("mean", np.nan),
        ("any", False),
        ("all", True),
        ("norm1", 0),
        ("norm2", 0),
        ("count_nonzero", 0),
        ("mul_no_zeros", 1),
        ("logsumexp", -np.inf),
        ("var", np.nan),
        ("std", np.nan),
    ],
)
def test_nothing_to_reduce(kind: str, want: float) -> None:
    got = compute(f"reduce x=f32[5,0,3]nchw op={kind} axes=(1,)", np.zeros((5, 0, 3), np.float32))
    assert got.shape == (5, 3)
    np.testing.assert_array_equal(got, np.full((5, 3), want))
    assert ENGINE.build_steps(parse_case(f"reduce x=f32[0,4]nchw op={kind} axes=(1,)"), EngineConfig(), known_device("sm_80")).steps == ()


@pytest.mark.parametrize(
    ("line", "part"),
    [
        *((f"reduce x=f32[5,0]nchw op={kind} axes=(1,)", "at least one element") for kind in NEED_ELEMENTS),
        ("reduce x=f32[5]nchw op=median", "median"),
        ("reduce x=f32[5]nchw axes=(1,)", "axes"),
        ("reduce x=f32[5,2]nchw axes=(1,-1)", "different"),
        ("reduce x=f32[5,2]nchw y=f32[2]nchw axes=(1,)", "shape of y"),
        ("reduce x=e4m3[5]nchw", "type of x"),
        ("reduce x=f32[5]nchw op=argmax y=f32[]", "type of y"),
        ("reduce x=s32[5]nchw op=mean y=s32[]", "float"),
        ("reduce op=sum", "x is missing"),
        ("reduce x=f32[5] op=sum correction=1", "correction"),
    ],
)
def test_errors_name_the_argument(line: str, part: str) -> None:
    with pytest.raises(InvalidArgument, match=part):
        parse_case(line)


@pytest.mark.parametrize("path", ["row", "column"])
def test_64_bit_indices(path: str) -> None:
    """The path of tensors beyond 2^31 elements, taken on small ones."""
    for kind in ("sum", "argmax", "logsumexp", "var"):
        for line, vec in (
            (f"reduce x=f32[5,403]nchw op={kind} axes=(1,)", 1),
            (f"reduce x=f32[4,6,5,8]nhwc op={kind} axes=(0,2,3)", 1),
            (f"reduce x=f32[8,400]nchw op={kind} axes={(1,) if path == 'row' else (0,)}", 4),
        ):
            for splits in (1, 3):
                config = EngineConfig.of(path=path, vec=vec, along=32, splits=splits, index=64)
                run_problem(backend(), parse_case(line), ENGINE, config)


def test_far_rows_take_64_bit_offsets() -> None:
    problem = parse_case("reduce x=f32[9,33](1073741824,1) op=sum axes=(1,)")
    step = ENGINE.build_steps(problem, ENGINE.configs(problem, known_device("sm_80"))[0], known_device("sm_80")).steps[0]
    assert step.spec.consts.wide_offset and not step.spec.consts.wide_index
    for kind in ("sum", "argmin", "std"):
        for config in (EngineConfig.of(path="row", vec=1, along=32, splits=1), EngineConfig.of(path="column", vec=1, along=32, splits=3)):
            run_problem(backend(), parse_case(f"reduce x=f32[1,7,90](3000000000,90,1) op={kind} axes=(0,2)"), ENGINE, config)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_assemble_without_spills(arch: str) -> None:
    device = known_device(arch)
    built = {}
    for kind in KINDS:
        for line in (
            f"reduce x=f16[64,4096]nchw op={kind} axes=(1,)",
            f"reduce x=bf16[2,64,9,9]nhwc op={kind} axes=(0,2,3)",
            f"reduce x=f64[100003]nchw op={kind}",
            f"reduce x=s8[64,32]nchw op={kind} axes=(0,)",
        ):
            problem = parse_case(line)
            step = ENGINE.build_steps(problem, ENGINE.configs(problem, device)[0], device).steps[0]
            built[line] = assemble(render(step.spec), arch)
            assert built[line].spill_bytes == 0 and built[line].registers <= step.spec.max_registers, line
    assert len(built) == 4 * len(KINDS)


def test_values_and_indices_by_one_launch() -> None:
    """Ties, NaN and infinities; any axes, kept or dropped; indices of every type; the values those of the plain reduction."""
    h, rng = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(0)
    x = np.round(rng.standard_normal((6, 5, 70)) * 2).astype(np.float32)
    x[1, 2, 3], x[4], x[5, :, 60:] = np.nan, -np.inf, -0.0
    for axes in (2, (0, 2), None, 0, 1):
        for op, arg in (("max", np.argmax), ("min", np.argmin)):
            values, indices = h.reduce(x, op, axes, return_indices=True)
            gone = tuple(range(3)) if axes is None else axes if isinstance(axes, tuple) else (axes,)
            kept = [i for i in range(3) if i not in gone]
            flat = x.transpose(*kept, *gone).reshape(*(x.shape[i] for i in kept), -1)
            np.testing.assert_array_equal(indices, arg(flat, -1))
            np.testing.assert_array_equal(values, np.take_along_axis(flat, np.asarray(arg(flat, -1))[..., None], -1)[..., 0])
            np.testing.assert_array_equal(h.reduce(x, op, axes), values)
    outs = np.empty((6, 5, 1), np.float64), np.empty((6, 5, 1), np.uint32)
    assert h.reduce(x, "amax", 2, True, return_indices=True, out=outs)[1] is outs[1]
    np.testing.assert_array_equal(outs[1][..., 0], np.abs(x).argmax(2))
    np.testing.assert_array_equal(outs[0][..., 0], np.abs(x).max(2))
    integers = rng.integers(-9, 9, (4, 33)).astype(np.int8)
    np.testing.assert_array_equal(h.reduce(integers, "amax", 1, return_indices=True)[1], np.abs(integers).argmax(1))
    plan = h.plan("reduce", x, op="max", axes=2, return_indices=True).plan
    assert plan is not None and len(plan.launches) == 1
    with pytest.raises(InvalidArgument, match="return_indices"):
        h.reduce(x, "sum", return_indices=True)


def test_traces_and_what_broadcasting_takes_back() -> None:
    h, rng = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(1)
    x = rng.integers(-50, 50, (3, 7, 9)).astype(np.int32)
    for diagonal in (-8, -6, -1, 0, 3, 8, 9):
        for given in (x, x.transpose(0, 2, 1)[:, ::-1]):
            np.testing.assert_array_equal(h.trace(given, diagonal), np.trace(given, diagonal, 1, 2))
    for shape in ((9,), (7, 1), (3, 1, 9), (1, 1, 1), (), (3, 7, 9)):
        lead = 3 - len(shape)
        axes = (*range(lead), *(lead + i for i, n in enumerate(shape) if n == 1))
        for op, reduce in (("sum", np.sum), ("max", np.max), ("min", np.min)):
            np.testing.assert_array_equal(h.reduce_to(x, shape, op), reduce(x, axis=axes).reshape(shape))
    small = rng.uniform(0.5, 1.5, (2, 3, 4))
    np.testing.assert_allclose(h.reduce_to(small, (3, 1), "prod"), small.prod((0, 2)).reshape(3, 1), rtol=1e-14)
    for call, words in ((lambda: h.reduce_to(x, (2,)), "broadcasts"), (lambda: h.reduce_to(x, (3, 7, 9, 1)), "shape"),
                        (lambda: h.trace(x[0, 0]), "rank"), (lambda: h.reduce_to(x, (9,), "mean"), "op")):
        with pytest.raises(InvalidArgument, match=words):
            call()


def test_level_1_of_blas() -> None:
    """asum, nrm2, iamax, dot, axpy, scal and swap, each by one call."""
    h, rng = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(2)
    x, y = rng.standard_normal(70001), rng.standard_normal(70001)
    np.testing.assert_allclose(h.reduce(x, "norm1"), np.abs(x).sum(), rtol=1e-12)
    np.testing.assert_allclose(h.reduce(x, "norm2"), np.linalg.norm(x), rtol=1e-12)
    assert h.reduce(x, "amax", return_indices=True)[1] == np.abs(x).argmax()
    np.testing.assert_allclose(h.dot(x, y), x @ y, rtol=1e-11)
    assert h.dot(x[:0], y[:0]) == 0 and h.dot(np.float16([300, 1]), np.float16([300, 1])) == np.inf  # rounded once
    assert h.dot(np.float16([300, 1]), np.float16([300, 1]), out=np.empty((), np.float32)) == 90001
    want, swapped = 0.5 * x + y, (y.copy(), x.copy())
    assert h.pointwise("scalar(a) * x + y", x, y, out=y, a=0.5) is y
    np.testing.assert_allclose(y, want)
    np.testing.assert_allclose(h.pointwise("scalar(a) * x", x, out=x, a=-2.0), -2 * swapped[1])
    y[:] = swapped[0]
    x[:] = swapped[1]
    h.pointwise("b, a", y, x, out=(x, y))
    np.testing.assert_array_equal(x, swapped[0])
    np.testing.assert_array_equal(y, swapped[1])
    with pytest.raises(InvalidArgument, match="shape of x2"):
        h.dot(x, y[1:])
