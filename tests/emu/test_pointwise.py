"""The elementwise kernel: accuracy of every function, every type, layout, index width, in-place use, and assembly without spills."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.elementary import BRIEF_ULP
from oxidnn.codegen.pointwise import TABLE, parse, round_to
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dtypes import dtype
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.pointwise_map import PointwiseMap
from oxidnn.errors import InvalidArgument
from oxidnn.ops.base import Policy, Problem, Scalar
from oxidnn.ops.case import format_case, parse_case
from oxidnn.ops.pointwise import STORED, make_activation, make_pointwise
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.tensor import TensorDesc
from oxidnn.testing.data import to_storage
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.reference.pointwise import error_bound
from oxidnn.testing.sample import CASES, SAMPLES
from tests.emu.running import apply as apply_instructions

ENGINE = PointwiseMap()
OPS = ("pointwise", "activation", "activation_backward")


def backend(arch: str = "sm_80") -> EmulatedBackend:
    return EmulatedBackend(arch, checkers="all")


def make(text: str, arrays: dict[str, np.ndarray], out: str | None = None) -> Problem:
    tensors = {n: TensorDesc.packed(dtype(a.dtype), a.shape) for n, a in arrays.items()}
    return make_pointwise(tensors, {"expression": text} | ({"dtype": out} if out else {}), Policy())


def compute(text: str, arrays: dict[str, np.ndarray], out: str | None = None, vec: int = 4) -> list[np.ndarray]:
    return list(execute(backend(), make(text, arrays, out), ENGINE, EngineConfig.of(vec=vec), arrays).values())


def wide_values(kind: str, rng: np.random.Generator, n: int = 1500) -> np.ndarray:
    """Every magnitude from subnormal to overflow, the ranges where functions bend, and the special values."""
    t = np.dtype({"f32": np.float32, "f64": np.float64}[kind])
    low, high, steep = (-149, 128, 110) if kind == "f32" else (-1074, 1024, 760)
    info = np.finfo(t)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1,
        -1,
        0.5,
        -0.5,
        2,
        -2,
        3,
        info.max,
        -info.max,
        info.tiny,
        info.smallest_subnormal,
        -info.smallest_subnormal,
        1 + info.eps,
        1 - info.epsneg,
        88.72,
        -103.97,
        709.78,
        -745.1,
        0.55,
        -0.55,
        1.0000001,
    ]
    spread = np.exp2(rng.uniform(low, high, n)) * rng.choice([-1.0, 1.0], n)
    with np.errstate(over="ignore"):
        parts = [spread, rng.uniform(-20, 20, n), rng.uniform(-1.5, 1.5, n), rng.uniform(-steep, steep, n), special]
        return np.concatenate(parts).astype(t)


@pytest.mark.parametrize("kind", ["f32", "f64"])
@pytest.mark.parametrize("name", [n for n, f in TABLE.items() if n != "where" and not f.takes_conditions and not f.is_of_integers])
def test_every_function_keeps_its_bound(name: str, kind: str) -> None:
    """Against float64 NumPy over wide ranges: within the row's ulps, or what the expansion's rows lead to."""
    row, rng = TABLE[name], np.random.default_rng(11)
    first = wide_values(kind, rng)
    required = row.arity - len(row.defaults)
    names = ["a", "b", "d"][:required]
    arrays = {n: first if i == 0 else rng.permutation(first) for i, n in enumerate(names)}
    text = f"{name}({', '.join(names)})"
    if name in ("sin", "cos", "tan"):  # NaN beyond, by the row's word
        arrays = {n: np.where(np.abs(a) <= 2.0**50, a, a.dtype.type(1)) for n, a in arrays.items()}
    elif name.endswith("_quantile"):  # of chances to within what ends the sum
        arrays["a"] = np.where(arrays["a"] > 1 - 2.0**-24, arrays["a"].dtype.type(0.75), arrays["a"])
    elif name == "floor_divide" and kind == "f64":
        arrays = {n: np.where((np.abs(a) < 2.0**40) & (np.abs(a) > 2.0**-40), a, a.dtype.type(1.5)) for n, a in arrays.items()}
    got = compute(text, arrays, None if row.is_condition else kind)[0]
    expression, exact = parse(text), {n: a.astype(np.float64) for n, a in arrays.items()}
    with np.errstate(all="ignore"):
        want = expression.evaluate(exact if name != "nextafter" else arrays)[0]
        if row.is_condition:
            np.testing.assert_array_equal(got, want)
            return
        want = want.astype(np.float64)
        rounded = want.astype(got.dtype)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        if row.lower:
            # pow's f64 bound is relative to |y log x|; float64 NumPy itself errs by one ulp.
            allowed = (row.ulp if kind == "f32" else row.ulp64 + 1) * unit
        else:
            allowed = 2 * error_bound(expression, exact, {}, kind)[0] + (1 if kind == "f32" else 4) * unit
        if name in ("lgamma", "digamma", "trigamma"):  # terms cancel beside zeros, by the row's word
            allowed = allowed + np.where((exact["a"] < 0) | (name == "digamma"), 2.0**-49 * np.maximum(1, np.abs(want)), 0)
        same = (got == rounded) | (np.isnan(got) & np.isnan(want))
        error = np.abs(got.astype(np.float64) - want)
        wrong = ~(same | (error <= allowed))
    if not row.lower:  # where a part overflows or cancels entirely the first-order bound says nothing
        wrong &= np.isfinite(allowed)
    at = np.flatnonzero(wrong)
    assert not len(at), f"{len(at)} wrong, first {[a[at[0]] for a in arrays.values()]}: {got[at[0]]!r} for {want[at[0]]!r}"


def test_bits_of_integers() -> None:
    rng = np.random.default_rng(4)
    for kind in (np.int32, np.int64):
        info = np.iinfo(kind)
        a = np.concatenate([rng.integers(info.min, info.max, 60, endpoint=True), [0, -1, 1, info.min, info.max]]).astype(kind)
        b = np.concatenate([rng.integers(-50, 50, 60), [7, -7, 3, 1, -1]]).astype(kind)
        b[b == 0] = 5
        a[-3:], b[-3:] = [info.max, info.min, 7], [-5, info.max, info.min]
        n = rng.integers(0, info.bits, len(a)).astype(kind)
        name = np.dtype(kind).name
        for text, want in {"bitwise_and(a, b)": a & b, "bitwise_or(a, b)": a | b, "bitwise_xor(a, b)": a ^ b, "bitwise_not(a)": ~a,
                           "left_shift(a, n)": a << n, "right_shift(a, n)": a >> n, "floor_divide(a, b)": a // b, "a % b": a % b,
                           "fmod(a, b)": np.fmod(a, b)}.items():  # fmt: skip
            names = [c for c in "abn" if f"({c}" in text or f" {c}" in text or text.startswith(c + " ")]
            with np.errstate(over="ignore"):
                got = compute(text, {c: {"a": a, "b": b, "n": n}[c] for c in names}, name)[0]
            np.testing.assert_array_equal(got, want, err_msg=f"{text} of {name}")
        got = compute("popcount(a)", {"a": a}, name)[0]
        np.testing.assert_array_equal(got, [(int(v) % (1 << info.bits)).bit_count() for v in a])
    wide = np.array([40, -3, 32, 70], np.int32)
    shifted = compute("right_shift(a, n)", {"a": np.array([-5, 9, 9, -9], np.int32), "n": np.abs(wide) + 32}, "int32")[0]
    np.testing.assert_array_equal(shifted, [-1, 0, 0, -1])


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64])
def test_bits_end_with_the_type(kind: type) -> None:
    """Shifts wrap, and no bit beyond the type is counted, set or moved in, whatever the arithmetic's width."""
    info, rng = np.iinfo(kind), np.random.default_rng(6)
    a = np.concatenate([rng.integers(info.min, info.max, 60, kind, True), np.array([info.min, info.max, 0, 1, 127, 80], kind)])
    n = rng.integers(0, info.bits, len(a)).astype(kind)
    unsigned = [int(v) % (1 << info.bits) for v in a]
    for text, want in {
        "left_shift(a, n)": np.left_shift(a, n), "right_shift(a, n)": np.right_shift(a, n), "bitwise_not(a)": ~a,
        "right_shift(left_shift(a, n), n)": np.right_shift(np.left_shift(a, n), n), "popcount(a)": [v.bit_count() for v in unsigned],
        "clz(a)": [info.bits - v.bit_length() for v in unsigned], "popcount(bitwise_not(a))": [info.bits - v.bit_count() for v in unsigned],
        "ctz(a)": [(v & -v).bit_length() - 1 if v else info.bits for v in unsigned],
    }.items():  # fmt: skip
        got = compute(text, {"a": a, "n": n} if "n)" in text and "not" not in text else {"a": a}, np.dtype(kind).name)[0]
        np.testing.assert_array_equal(got, want, err_msg=text)
    constant = compute("where(a == a, left_shift(a, 3), 4294967296)", {"a": a}, np.dtype(kind).name)[0]  # in 64 bits
    np.testing.assert_array_equal(constant, np.left_shift(a, kind(3)))
    with pytest.raises(InvalidArgument, match="popcount"):
        compute("popcount(a, 65)", {"a": a}, "int64")


def test_not_of_bool_is_the_other_value() -> None:
    x = np.array([True, False, True])
    np.testing.assert_array_equal(compute("bitwise_not(x)", {"x": x}, "bool")[0], ~x)


@pytest.mark.parametrize("name", ["mod", "fmod"])
def test_rests_of_any_quotient_are_exact(name: str) -> None:
    """Over all of float64's range, subnormals, overflowing quotients, infinities and zeros among it; f32 beyond 2^24 of quotient, too."""
    rng = np.random.default_rng(8)
    for kind, low, high in ((np.float64, -1074, 1024), (np.float32, -149, 128)):
        x, y = (np.ldexp(rng.uniform(1, 2, 600), rng.integers(low, high, 600)) * rng.choice([-1, 1], 600) for _ in range(2))
        y[:100] = np.ldexp(rng.integers(1, 9, 100), low)  # few bits
        info = np.finfo(kind)
        edges = np.array([0.0, -0.0, 1.0, -3.0, np.inf, -np.inf, np.nan, info.max, -info.max, info.smallest_subnormal, info.tiny])
        x, y = (np.concatenate([v, e.ravel()]).astype(kind) for v, e in zip((x, y), np.meshgrid(edges, edges), strict=True))
        with np.errstate(all="ignore"):
            want = getattr(np, name)(x, y)
        got = compute(f"{name}(a, b)", {"a": x, "b": y}, np.dtype(kind).name)[0]
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got)[want == want], np.signbit(want)[want == want])


@pytest.mark.parametrize(("text", "want"), [
    ("x + y", lambda x, y: x + y), ("x - y", lambda x, y: x - y), ("x * y", lambda x, y: x * y), ("-x + y", lambda x, y: y - x),
    ("x % y", lambda x, y: x % y), ("floor_divide(x, y)", lambda x, y: x // y), ("fmod(x, y)", lambda x, y: x % y),
    ("maximum(x, y)", np.maximum), ("minimum(x, y)", np.minimum), ("x < y", np.less), ("x >= y", np.greater_equal), ("x == y", np.equal),
    ("where(x > y, x, 7)", lambda x, y: np.where(x > y, x, np.uint64(7)) + 0 * y), ("abs(x) + sign(y)", lambda x, y: x + np.sign(y)),
    ("bitwise_xor(bitwise_not(x), y)", lambda x, y: ~x ^ y), ("right_shift(x, y % 70)", lambda x, y: np.right_shift(x, y % np.uint64(70))),
    ("left_shift(x, y % 70)", lambda x, y: np.left_shift(x, y % np.uint64(70))), ("popcount(x) + y", lambda x, y: np.bitwise_count(x) + y),
    ("clz(right_shift(x, 5)) + 0 * y", lambda x, y: np.array([64 - (int(v) >> 5).bit_length() for v in x], np.uint64)),
    ("(x > y) + popcount(x) + bitwise_not(y)", lambda x, y: (x > y).astype(np.uint64) + np.bitwise_count(x) + ~y),
    ("cast(x, u8) + 0 * y", lambda x, y: np.minimum(x, np.uint64(255))), ("clamp(x, 5, 9223372036854775808) + 0 * y",
                                                                          lambda x, y: np.clip(x, np.uint64(5), np.uint64(2**63))),
])  # fmt: skip
def test_64_bits_without_sign(text: str, want: Callable[..., np.ndarray]) -> None:
    """Numbers beyond 2^63 among them: nothing is taken for negative, everything is modulo 2^64."""
    h, rng = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(4)
    x, y = (rng.integers(1, 2**64, 67, dtype=np.uint64) >> rng.integers(0, 64, 67).astype(np.uint64) for _ in range(2))
    x[:3], y[:3] = [2**64 - 1, 0, 2**63], [1, 2**64 - 1, 2**63]
    y = np.maximum(y, np.uint64(1))
    got, expected = np.asarray(h.pointwise(text, x, y)), want(x, y)
    assert got.dtype == expected.dtype
    np.testing.assert_array_equal(got, expected)


def test_64_bits_without_sign_beside_others() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x, small = np.array([2**64 - 1, 5], np.uint64), np.array([250, 3], np.uint8)
    np.testing.assert_array_equal(h.pointwise("x + y", x, small), np.array([249, 8], np.uint64))
    beside_sign = np.asarray(h.pointwise("x + y", x, np.array([-1, -7])))  # as NumPy: in f64
    assert beside_sign.dtype == np.float64
    np.testing.assert_array_equal(beside_sign, [2.0**64, -2.0])
    np.testing.assert_array_equal(h.pointwise("x < y", x, np.array([-1, 7])), [False, True])
    np.testing.assert_array_equal(h.pointwise("x", x, dtype="u8"), np.array([255, 5], np.uint8))
    np.testing.assert_allclose(h.pointwise("x * 0.5", x), np.array([2.0**63, 2.5]), rtol=1e-7)
    np.testing.assert_array_equal(h.pointwise("x", np.array([2.5, 1e19]), dtype="u64"), np.array([2, 10**19], np.uint64))
    with pytest.raises(InvalidArgument, match="constants that u64 holds"):
        h.pointwise("maximum(x, -1)", x)


def test_signed_zeros_are_kept() -> None:
    x = np.array([0.0, -0.0] * 4, np.float32)
    for name in ("neg", "abs", "tanh", "erf", "expm1", "sqrt", "sin", "floor", "trunc", "round", "log1p", "sign"):
        got = compute(f"{name}(x)", {"x": x})[0]
        with np.errstate(all="ignore"):
            want = TABLE[name].numpy(x.astype(np.float64))
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want), err_msg=name)


@pytest.mark.parametrize("source", STORED)
@pytest.mark.parametrize("target", STORED)
def test_every_conversion(source: str, target: str) -> None:
    """Loads and stores between all storage types, packs and single elements: nearest even, integers and 8-bit floats saturate."""
    rng, kind = np.random.default_rng(5), dtype(source)
    if kind.is_float:
        values = np.concatenate(
            [rng.standard_normal(50) * 3, rng.uniform(-60000, 60000, 40), [0.5, 1.5, 2.5, -0.5, 127.5, -128.5, 255.5, 0]]
        )
        x = to_storage(values, kind)
    elif kind.kind == "bool":
        x = rng.integers(0, 2, 99).astype(bool)
    else:
        info = np.iinfo(kind.numpy)
        x = np.concatenate(
            [rng.integers(info.min, info.max, 60, kind.numpy, True), np.arange(0, 37, dtype=kind.numpy), [info.min, info.max]]
        )
        x = x.astype(kind.numpy)
    for vec in (1, 2, 8):
        problem = make("x", {"x": x}, target)
        got = execute(backend(), problem, ENGINE, EngineConfig.of(vec=vec), {"x": x})["y"]
        wide = x.astype({"f64": np.float64, "f32": np.float32}.get(problem.compute, np.int64))
        wide = wide.astype(np.float64) if wide.dtype.kind == "f" else wide
        if dtype(target).is_float:
            eight = dtype(target).num_bytes == 1  # which saturate, whether they have infinities or not
            want = round_to(wide, target).astype(dtype(target).numpy) if eight else to_storage(wide, dtype(target))
        elif target == "s64" and wide.dtype.kind == "f":
            want = np.rint(wide).astype(np.int64)
        else:
            want = np.asarray(wide if target == "s64" else round_to(wide, target)).astype(dtype(target).numpy)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("op", OPS)
def test_random_problems(op: str) -> None:
    """Layouts, broadcasting, negative and zero strides, misaligned views, mixed types; every config; both targets."""
    for seed in range(24):
        arch = ("sm_80", "sm_90a")[seed % 2]
        problem = SAMPLES[op](np.random.default_rng(1000 + seed), "tiny")
        assert format_case(parse_case(format_case(problem))) == format_case(problem)
        for config in ENGINE.configs(problem, known_device(arch)):
            run_problem(backend(arch), problem, ENGINE, config, seed)


@pytest.mark.parametrize("line", [line for op in OPS for line in CASES[op]])
def test_cases(line: str) -> None:
    problem = parse_case(line)
    for config in ENGINE.configs(problem, known_device("sm_80")):
        run_problem(backend(), problem, ENGINE, config)


@pytest.mark.parametrize("vec", [1, 4])
def test_64_bit_indices(vec: int) -> None:
    """The path of tensors beyond 2^31 elements, taken on small ones."""
    for line in (
        'pointwise x=f32[3,5,7,7]nchw bias=f32[5]nchw expression="relu(x + bias[c])"',
        'pointwise x=f16[6,10](1,-6) y=f32[10]nchw expression="x - y"',
        'pointwise x=f32[1001]nchw expression="x * x"',
    ):
        problem = parse_case(line)
        run_problem(backend(), problem, ENGINE, EngineConfig.of(vec=vec, index=64))


def test_tensors_beyond_2_31_elements_take_64_bit_indices() -> None:
    big = TensorDesc.packed(dtype("s8"), (3, 2**30 + 8))
    problem = make_pointwise({"x": big}, {"expression": "x + 1"}, Policy())
    step = ENGINE.build_steps(problem, EngineConfig.of(vec=8), known_device("sm_90a")).steps[0]
    assert step.spec.consts.wide_index and {p.name: p.type for p in step.spec.params}["count"] == "u64"
    assert step.grid[0] * step.spec.threads * 8 >= big.numel
    # A view far apart in memory keeps a 32-bit index and takes 64-bit offsets.
    far = TensorDesc(dtype("f32"), (4, 33), (2**30, 1))
    problem = make_pointwise({"x": far}, {"expression": "exp(x)"}, Policy())
    step = ENGINE.build_steps(problem, EngineConfig.of(vec=1), known_device("sm_80")).steps[0]
    assert step.spec.consts.wide_offset and not step.spec.consts.wide_index


def test_64_bit_offsets_with_a_32_bit_index() -> None:
    """Rows far apart in a bank of memory: offsets of several GiB are formed but only the first row's are read."""
    problem = parse_case('pointwise x=f32[1,40](2000000000,1) y=f32[40]nchw expression="x + y"')
    run_problem(backend(), problem, ENGINE)


@pytest.mark.parametrize("text", ["relu(x) * y", "y - x, x + y"])
def test_output_in_place_of_an_input(text: str) -> None:
    """The first output lies exactly where x lies."""
    rng = np.random.default_rng(2)
    x, y = rng.standard_normal(1037).astype(np.float32), rng.standard_normal(1037).astype(np.float32)
    problem = make(text, {"x": x, "y": y})
    device = backend()
    for vec in (1, 4):
        step = ENGINE.build_steps(problem, EngineConfig.of(vec=vec), device.info).steps[0]
        blocks = {o.name: device.allocate(x.nbytes, 0) for o in problem.operands}
        device.upload(blocks["x"].ptr, x, 0)
        device.upload(blocks["y"].ptr, y, 0)
        first = problem.outputs[0].name
        values = [blocks["x" if a.name == first else a.name].ptr if hasattr(a, "name") else a for a in step.args]
        device.load(render(step.spec), step.spec).bind(step.grid, values).launch(0)
        got = np.empty_like(x)
        device.download(got, blocks["x"].ptr, 0)
        want = problem.expression.evaluate({"x": x.astype(np.float64), "y": y.astype(np.float64)})[0]
        np.testing.assert_allclose(got, want, rtol=1e-6)
        for block in blocks.values():
            block.free()


def test_scalars_are_given_with_the_call() -> None:
    problem = parse_case('pointwise x=f64[77]nchw expression="x * scalar(a) - scalar(b)"')
    assert problem.scalars == (Scalar("a", "f64"), Scalar("b", "f64"))
    x = np.random.default_rng(0).standard_normal(77)
    got = execute(backend(), problem, ENGINE, EngineConfig.of(vec=1), {"x": x}, {"a": 0.1, "b": -3.0})["y"]
    np.testing.assert_allclose(got, x * 0.1 + 3.0, rtol=1e-15)


def test_activation_backward_is_the_derivative_of_activation() -> None:
    rng = np.random.default_rng(4)
    x, dy = rng.standard_normal(300).astype(np.float32) * 2, rng.standard_normal(300).astype(np.float32)
    for name, parameters in (("gelu", ()), ("leaky_relu", (0.2,)), ("mish", ()), ("elu", (0.7,)), ("hard_swish", ())):
        line = f"activation_backward dy=f32[300]nchw x=f32[300]nchw name={name}" + (f" parameters='{parameters}'" if parameters else "")
        got = execute(backend(), parse_case(line), ENGINE, EngineConfig.of(vec=4), {"dy": dy, "x": x})["dx"]
        forward = make_activation(
            {"x": TensorDesc.packed(dtype("f64"), (300,))}, {"name": name, "parameters": parameters}, Policy()
        ).expression
        up, down = (forward.evaluate({"x": x.astype(np.float64) + d})[0] for d in (1e-6, -1e-6))
        np.testing.assert_allclose(got, dy * (up - down) / 2e-6, rtol=2e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ('pointwise x=f32[3,4]nchw y=f32[3,5]nchw expression="x + y"', "broadcast"),
        ('pointwise x=f32[3,4]nchw bias=f32[3]nchw expression="x + bias[c]"', "shape of bias"),
        ('pointwise x=f32[3]nchw bias=f32[3]nchw expression="x + bias[c]"', "rank 2"),
        ('pointwise x=f32[3]nchw expression="x + z"', "z is missing"),
        ('pointwise x=f32[3]nchw w=f32[3]nchw expression="x + 1"', "w is given"),
        ('pointwise x=f32[3]nchw y=f32[4]nchw expression="x + 1"', "shape of y"),
        ('pointwise x=f32[3]nchw y=f32[3](0) expression="x + 1"', "overlap"),
        ("activation x=f32[3]nchw name=geluu", "gelu"),
        ("activation x=f32[3]nchw name=add", "one tensor"),
        ("activation_backward dy=f32[3]nchw x=f32[4]nchw name=relu", "shape of dy"),
        (
            'pointwise expression="a + b + c0 + d + e + f + g + h + i" ' + " ".join(f"{n}=f32[2]" for n in "a b c0 d e f g h i".split()),
            "at most 8",
        ),
    ],
)
def test_errors_name_the_argument(line: str, part: str) -> None:
    with pytest.raises(InvalidArgument, match=part):
        parse_case(line)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_kernels_assemble_without_spills(arch: str) -> None:
    device = known_device(arch)
    lines = [
        *(line for op in OPS for line in CASES[op]),
        'pointwise a=f32[99,64]nchw b=f16[64]nchw c0=bf16[99,1]nchw d=s8[99,64]nchw expression="gelu(a) * erf(b) + tanh(c0) ** d"',
        'pointwise x=s8[1024]nchw y=u8[1024]nchw expression="maximum(x, y) * 2"',
        'pointwise x=f64[1024]nchw expression="gelu(x) + sin(x)"',
    ]
    for line in lines:
        problem = parse_case(line)
        for config in ENGINE.configs(problem, device):
            for step in ENGINE.build_steps(problem, config, device).steps:
                built = assemble(render(step.spec), arch)
                assert built.spill_bytes == 0 and built.registers <= step.spec.max_registers, (line, config.name)


def test_lowering_may_write_the_registers_it_reads() -> None:
    """Results that are operands, permuted: everything is read before anything is written."""
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal(100).astype(np.float32), rng.standard_normal(100).astype(np.float32)
    body = parse("y, x, exp(x) * exp(x) - y").lower({"x": "%a0", "y": "%a1"}, ["%a0", "%a1", "%f0"])
    # %a0 = y, %a1 = x, %f0 = exp(x)^2 - y: the sum of 2 %a0 and %a1 + %f0 tells them apart.
    tail = "fma.rn.f32 %f1, %a0, 0f40000000, %a1; add.f32 %d, %f1, %f0;"
    got = apply_instructions(body + tail, [x, y], np.float32)
    wide_x, wide_y = x.astype(np.float64), y.astype(np.float64)
    np.testing.assert_allclose(got, 2 * wide_y + wide_x + np.exp(2 * wide_x) - wide_y, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["exp", "normcdf", "sigmoid", "gelu", "silu", "log", "log1p", "softplus"])
def test_brief_functions_keep_their_bound(name: str) -> None:
    """What 16-bit results allow: 2^-16 of the value, subnormals and special values as ever."""
    x = wide_values("f32", np.random.default_rng(3))
    got = apply_instructions(parse(f"{name}(x)").lower({"x": "%a0"}, ["%d"], brief=True), [x], np.float32).astype(np.float64)
    with np.errstate(all="ignore"):
        want = parse(f"{name}(x)").evaluate({"x": x.astype(np.float64)})[0]
        unit = np.spacing(np.abs(want.astype(np.float32))).astype(np.float64)
        far = np.abs(got - want) > (BRIEF_ULP + 4) * unit
        wrong = ~((got == want.astype(np.float32)) | (np.isnan(got) & np.isnan(want)) | ~far)
    at = np.flatnonzero(wrong)
    assert not len(at), f"{len(at)} wrong, first at {x[at[0]]!r}: {got[at[0]]!r} for {want[at[0]]!r}"


def test_eight_inputs_of_mixed_types_broadcast_together() -> None:
    """As many tensors as an expression may have: eight types, every way of broadcasting, steps and misaligned views, two outputs."""
    text = "(t := a * scale[c] + (b - d)) * where(m, e, f), maximum(t, g) + cast(i, f32)"
    shapes = {
        "a": "f16[4,6,5,8]nhwc", "scale": "f32[6](2)", "b": "bf16[6,1,8]nchw", "d": "s8[4,1,5,1]nchw", "m": "bool[5,8]nchw",
        "e": "u8[4,6,5,8](480,80,-16,2)", "f": "f32[1]nchw", "g": "f32[4,6,1,8]nchw@4", "i": "s32[8](3)",
    }
    for dropped in ("f", "g"):  # of nine in turn eight
        body = text.replace(", f)", ", 2)") if dropped == "f" else text.replace("maximum(t, g)", "t")
        names = [n for n in shapes if n != dropped]
        line = f'pointwise {" ".join(f"{n}={shapes[n]}" for n in names)} expression="{body}" dtype="(\'f32\',\'bf16\')"'
        problem = parse_case(line)
        assert len(problem.inputs) == 8 and {o.desc.dtype.name for o in problem.inputs} >= {"f16", "f32", "bf16", "s8", "u8", "bool", "s32"}
        for arch in ("sm_80", "sm_90a"):
            for config in ENGINE.configs(problem, known_device(arch)):
                run_problem(backend(arch), problem, ENGINE, config, 3)
                for step in ENGINE.build_steps(problem, config, known_device(arch)).steps:
                    assert assemble(render(step.spec), arch).spill_bytes == 0
