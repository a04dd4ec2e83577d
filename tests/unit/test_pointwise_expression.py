"""Expressions: text, structure, evaluation, derivatives, and what lowering refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from oxidnn.codegen import pointwise as expr
from oxidnn.codegen.pointwise import COMMON, TABLE, Expression, apply, arg, const, parse, scalar
from oxidnn.errors import InvalidArgument

TEXTS = (
    "acc",
    "relu(acc)",
    "relu(acc * scale + bias)",
    "bias[:] + acc",
    "x + y * z",
    "(x + y) * z",
    "x - (y - z)",
    "x - y - z",
    "x / (y / z)",
    "-x ** 2",
    "(-x) ** 2",
    "2 ** -x",
    "x ** y ** z",
    "(x ** y) ** z",
    "x % 3",
    "x < y",
    "(x < y) & ~(z >= 1)",
    "where(x != x, 0, x)",
    "cast(x * 127, s8)",
    "w - scalar(lr) * (v := scalar(m) * u + g), v",
    "x * -1.5",
    "1e-30 * x",
    "x + inf",
    "tanh(y := x * x) + y / (1 + y)",
    "gelu(x) if x > 0 else silu(x)",
    "abs(-x)",
    "clamp(x, -1, 6)",
    "leaky_relu(x)",
    "t0 * exp(t0 + 1) / exp(t0 + 1)",
)


def random_expression(rng: np.random.Generator, depth: int) -> Expression:
    if depth == 0 or rng.random() < 0.1:
        choice = rng.integers(4)
        if choice == 0:
            return const(float(rng.choice([0.0, 1.0, -2.5, 1e-7, 3.0])))
        return scalar("s") if choice == 1 else arg(str(rng.choice(["x", "y", "acc", "bias"])), None)
    name = str(rng.choice([n for n, f in TABLE.items() if n != "pow" and not f.is_of_integers]))
    return apply(name, *(random_expression(rng, depth - 1) for _ in range(TABLE[name].arity)))


@pytest.mark.parametrize("text", [*TEXTS, *COMMON.values()])
def test_text_round_trip(text: str) -> None:
    expression = parse(text)
    assert parse(str(expression)) == expression
    assert str(parse(str(expression))) == str(expression)


@pytest.mark.parametrize("seed", range(30))
def test_random_expressions_round_trip_in_text_and_in_value(seed: int) -> None:
    rng = np.random.default_rng(seed)
    expression = random_expression(rng, 4)
    again = parse(str(expression))
    assert again == expression and hash(again) == hash(expression)
    arrays = {n: rng.standard_normal(5) for n in ("x", "y", "acc", "bias")}
    np.testing.assert_array_equal(again.evaluate(arrays, {"s": 0.5})[0], expression.evaluate(arrays, {"s": 0.5})[0])


def test_precedence_is_pythons() -> None:
    x, y, z = 3.0, 5.0, 2.0
    for text in ("x - y - z", "x - (y - z)", "x / y * z", "x / (y * z)", "-x ** z", "(-x) ** z", "x ** z ** z", "x + y % z", "x * -y"):
        assert parse(text).evaluate({"x": x, "y": y, "z": z})[0] == eval(text, {"x": x, "y": y, "z": z}), text


def test_equal_structure_is_one_object_and_shared_parts_are_one_node() -> None:
    a, b = expr.exp(arg("x")) + 1, expr.exp(arg("x")) + 1
    assert a is b
    shared = parse("exp(x) * exp(x) + exp(x)")
    assert sum(node.op == "exp" for node in shared.nodes()) == 1
    assert len({parse("relu(x)"), parse("relu(x)"), parse("relu(y)")}) == 2


def test_depth_costs_nothing() -> None:
    e = arg("x")
    for _ in range(60):
        e = e * e + e
    assert len(str(e)) < 3000 and parse(str(e)) == e and isinstance(hash(e), int)


def test_expressions_are_frozen_and_pickle() -> None:
    e = parse("relu(acc * scale + bias), acc")
    with pytest.raises(AttributeError):
        e.op = "add"  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(e)) == e
    with pytest.raises(TypeError, match="where"):
        bool(e)


def test_names_axes_and_outputs() -> None:
    e = parse("relu(acc * scale + bias) + residual * scalar(alpha), acc")
    assert e.args == ("acc", "scale", "bias", "residual") and e.scalars == ("alpha",) and e.num_outputs == 2
    assert (e.axis("scale"), e.axis("bias"), e.axis("residual")) == ("c", "c", None)
    assert parse("x + bias").axis("bias") is None and parse("acc + bias[:]").axis("bias") is None
    assert parse("x + bias[c]").axis("bias") == "c"
    assert parse("bias_relu") == parse("relu(acc + bias)") and parse("gelu") == expr.gelu(expr.acc)
    with pytest.raises(KeyError):
        e.axis("nothing")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("rellu(x)", "relu"),
        ("x +", "parse"),
        ("gelu(x, y, z)", "expected 1"),
        ("x[0]", "x\\[0\\]"),
        ("foo.bar(x)", "meaning"),
        ("gellu", "gelu"),
        ("cast(x, f99)", "f99"),
        ("clamp(x)", "expected 3"),
        ("x < y < z", "meaning"),
        ("arg(x, d)", "axis"),
    ],
)
def test_errors_name_the_part_that_is_off(text: str, part: str) -> None:
    with pytest.raises(InvalidArgument, match=part):
        parse(text)


def test_lowering_refuses_what_it_cannot_write() -> None:
    with pytest.raises(InvalidArgument, match="no register for 'y'"):
        parse("x + y").lower({"x": "%x"}, ["%o"])
    with pytest.raises(InvalidArgument, match="exp has no form in s32"):
        parse("exp(x)").lower({"x": "%x"}, ["%o"], "s32")
    with pytest.raises(InvalidArgument, match="constant 0.5"):
        parse("x * 0.5").lower({"x": "%x"}, ["%o"], "s32")
    with pytest.raises(InvalidArgument, match="2 outputs"):
        parse("x, x").lower({"x": "%x"}, ["%o"])
    with pytest.raises(InvalidArgument, match="expected one of f32"):
        parse("x").lower({"x": "%x"}, ["%o"], "f16")


POINTS = np.array([-4.3, -2.7, -1.31, -0.73, -0.21, 0.17, 0.62, 1.43, 2.9, 5.1])
POSITIVE = ("log", "log2", "log10", "sqrt", "rsqrt", "pow")
FLAT = ("floor", "ceil", "round", "trunc", "sign", "step", "poisson_quantile", "binomial_quantile")  # constant between their jumps


@pytest.mark.parametrize("name", [n for n, f in TABLE.items() if not f.is_condition and not f.is_of_integers and n != "where"])
def test_derivatives_agree_with_finite_differences(name: str) -> None:
    """Every function by every one of its operands, at points away from kinks."""
    row = TABLE[name]
    x = np.abs(POINTS) if name in POSITIVE else np.abs(POINTS) - 0.1 if name == "log1p" else POINTS
    if name in ("asin", "acos", "atanh", "erfinv"):
        x = POINTS / 6
    elif name == "acosh":
        x = np.abs(POINTS) + 1.2
    elif name == "logit":
        x = POINTS / 11 + 0.5
    operands = [x, *([0.37, 1.9, 0.6][i] + 0.1 * np.arange(len(x)) for i in range(row.arity - 1))]
    if name in ("hard_sigmoid", "clamp", "hard_tanh", "threshold"):
        second = {"hard_sigmoid": 0.15, "clamp": -1.5, "hard_tanh": -1.5, "threshold": 0.4}[name]
        operands = [x, np.full(len(x), second), np.full(len(x), 0.55)]
    if name == "clipped_relu":
        operands = [x, *(np.full(len(x), v) for v in (2.0, -1.5, 0.3))]
    names = [f"v{i}" for i in range(row.arity)]
    expression = apply(name, *map(arg, names))
    arrays = dict(zip(names, operands, strict=True))
    dy = np.linspace(0.5, 2, len(x))
    for wrt in names:
        if name in FLAT or (name == "threshold" and wrt == "v1") or (name == "hard_shrink" and wrt == "v1"):
            continue
        if name == "trigamma":
            with pytest.raises(InvalidArgument, match="no derivative"):
                expression.differentiate(wrt)
            continue
        h = 1e-5
        up, down = ({**arrays, wrt: arrays[wrt] + d} for d in (h, -h))
        want = dy * (expression.evaluate(up)[0] - expression.evaluate(down)[0]) / (2 * h)
        got = expression.differentiate(wrt).evaluate({**arrays, "dy": dy})[0]
        np.testing.assert_allclose(np.broadcast_to(got, want.shape), want, rtol=2e-6, atol=2e-8, err_msg=f"{name} by {wrt}")


def test_derivative_of_a_composition_and_of_repeated_operands() -> None:
    expression = parse("tanh(x * y + silu(x)) * where(x > y, x, y ** 2) + cast(x, f64)")
    rng = np.random.default_rng(3)
    arrays = {"x": rng.standard_normal(50), "y": rng.standard_normal(50)}
    for wrt in arrays:
        up, down = ({**arrays, wrt: arrays[wrt] + d} for d in (1e-6, -1e-6))
        want = (expression.evaluate(up)[0] - expression.evaluate(down)[0]) / 2e-6
        np.testing.assert_allclose(expression.differentiate(wrt).evaluate({**arrays, "dy": 1.0})[0], want, rtol=1e-6, atol=1e-7)
    with pytest.raises(InvalidArgument, match="wrt"):
        expression.differentiate("z")
    with pytest.raises(InvalidArgument, match="2 outputs"):
        parse("x, x").differentiate("x")


def test_flat_functions_have_no_gradient() -> None:
    for name in FLAT:
        others = [0.25] * (TABLE[name].arity - len(TABLE[name].defaults) - 1)
        assert np.all(apply(name, arg("x"), *others).differentiate("x").evaluate({"x": POINTS, "dy": 1.0})[0] == 0)


def test_casts_round_to_what_the_type_holds() -> None:
    x = np.array([1 + 2**-9, 300.7, -129.5, 2.5, 3.5, np.nan, 1e6, np.inf])
    np.testing.assert_array_equal(parse("cast(x, s8)").evaluate({"x": x})[0], [1, 127, -128, 2, 4, 0, 127, 127])
    np.testing.assert_array_equal(parse("cast(x, u8)").evaluate({"x": x})[0], [1, 255, 0, 2, 4, 0, 255, 255])
    np.testing.assert_array_equal(parse("cast(x, bf16)").evaluate({"x": x})[0], [1, 300, -130, 2.5, 3.5, np.nan, 999424, np.inf])
    np.testing.assert_array_equal(parse("cast(x, f16)").evaluate({"x": x})[0][-2:], [np.inf, np.inf])


def test_hoisted_are_quotients_and_roots_of_still_operands_alone() -> None:
    text = parse("acc * (1 / step) / sqrt(step + 2) + acc / step + bias * step")
    rest, parts = text.hoisted(("step", "bias"))
    assert sorted(str(part) for _, part in parts) == ["1 / step", "sqrt(step + 2)"]
    arrays = {"acc": np.array(3.0), "step": np.array(0.7), "bias": np.array(-1.0)}
    found = {name: part.evaluate(arrays)[0] for name, part in parts}
    assert set(found) <= set(rest.args) and rest.evaluate(arrays | found) == text.evaluate(arrays)
    whole = parse("sqrt(step)")
    rest, parts = whole.hoisted(("step",))
    assert rest.evaluate({name: part.evaluate(arrays)[0] for name, part in parts}) == whole.evaluate(arrays)
    assert parse("acc / step").hoisted(())[1] == () and parse("relu(acc) / acc").hoisted(("step",))[1] == ()
