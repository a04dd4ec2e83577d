"""The ONNX node tests of elementwise operators, each an expression."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import oxidnn

from .node_tests import node_tests

onnx = pytest.importorskip("onnx")

SAME = ("Abs Acos Acosh Asin Asinh Atan Atanh Ceil Cos Cosh Erf Exp Floor Log Mish Neg Reciprocal Relu Round Sigmoid Sign Sin Sinh "
        "Softplus Softsign Sqrt Tan Tanh")
# x, y, z: the inputs; other names: attributes with their defaults
EXPRESSIONS: dict[str, str] = {
    **{name: f"{name.lower()}(x)" for name in SAME.split()},
    "Elu": "elu(x, {alpha:1.0})",
    "Selu": "{gamma:1.0507009873554805} * where(x > 0, x, {alpha:1.6732632423543772} * expm1(x))",
    "Celu": "celu(x, {alpha:1.0})", "LeakyRelu": "leaky_relu(x, {alpha:0.01})", "ThresholdedRelu": "where(x > {alpha:1.0}, x, 0)",
    "HardSigmoid": "hard_sigmoid(x, {alpha:0.2}, {beta:0.5})", "HardSwish": "hard_swish(x)", "Swish": "swish(x, {alpha:1.0})",
    "Shrink": "where(x > {lambd:0.5}, x - {bias:0.0}, where(x < -{lambd:0.5}, x + {bias:0.0}, 0))", "PRelu": "where(x > 0, x, x * y)",
    "IsNaN": "isnan(x)",
    "Add": "x + y", "Sub": "x - y", "Mul": "x * y", "Div": "x / y", "Pow": "x ** y", "Mod": "x % y", "Where": "where(x, y, z)",
    "Equal": "x == y", "Greater": "x > y", "GreaterOrEqual": "x >= y", "Less": "x < y", "LessOrEqual": "x <= y",
    "And": "logical_and(x, y)", "Or": "logical_or(x, y)", "Xor": "logical_xor(x, y)", "Not": "logical_not(x)",
    "BitwiseAnd": "bitwise_and(x, y)", "BitwiseOr": "bitwise_or(x, y)", "BitwiseXor": "bitwise_xor(x, y)", "BitwiseNot": "bitwise_not(x)",
}  # fmt: skip
FOLDS = {"Max": "maximum({}, {})", "Min": "minimum({}, {})", "Sum": "{} + {}", "Mean": "{} + {}"}
OPS = (*EXPRESSIONS, *FOLDS, "Gelu", "Clip", "IsInf", "BitShift")


def left_out(case: Any) -> str:
    """Why a case is not for these kernels; "" if it is."""
    types = {np.asarray(a).dtype for inputs, outputs in case.data_sets for a in (*inputs, *outputs)}
    if any(t.kind in "OSU" for t in types):
        return "text"
    return ""


FOUND = node_tests(OPS)
LEFT = {t.name: left_out(t) for t in FOUND if left_out(t)}
TESTS = [t for t in FOUND if t.name not in LEFT]


def expression(case: Any, inputs: list[np.ndarray], attrs: dict[str, Any]) -> str:
    name = case.model.graph.node[0].op_type
    if name in FOLDS:
        text = "x0"
        for i in range(1, len(inputs)):
            text = FOLDS[name].format(text, f"x{i}")
        return f"({text}) / {len(inputs)}" if name == "Mean" else text
    if name == "Gelu":
        return "gelu_tanh(x)" if attrs.get("approximate") == b"tanh" else "gelu(x)"
    if name == "Clip":
        present = case.model.graph.node[0].input[1:]
        low, high = ((*present, "", "")[i] for i in range(2))
        text = "x"
        if low:
            text = f"maximum({text}, y)"
        return f"minimum({text}, {'z' if low else 'y'})" if high else text
    if name == "IsInf":
        signs = [s for s, flag in ((">", "detect_positive"), ("<", "detect_negative")) if attrs.get(flag, 1)]
        return "isinf(x)" if len(signs) == 2 else f"logical_and(isinf(x), x {signs[0]} 0)" if signs else "x != x and x == x"
    if name == "BitShift":
        return "left_shift(x, y)" if attrs["direction"] == b"LEFT" else "right_shift(x, y)"
    if name == "Mod" and attrs.get("fmod"):
        return "fmod(x, y)"
    text = EXPRESSIONS[name]
    if name == "Div" and inputs[0].dtype.kind in "iu":
        return "(x - fmod(x, y)) / y"
    while "{" in text:
        field = text[text.index("{") + 1 : text.index("}")]
        key, default = field.split(":")
        text = text.replace("{" + field + "}", repr(float(attrs.get(key, float(default)))))
    return text


def test_all_are_found() -> None:
    assert {t.model.graph.node[0].op_type for t in TESTS} == set(OPS) and len(TESTS) >= 285 and len(LEFT) <= 24


@pytest.mark.parametrize("case", TESTS, ids=lambda t: t.name)
def test_node(case: Any) -> None:
    h, node = oxidnn.DnnHandle("emu:sm_80"), case.model.graph.node[0]
    attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for inputs, outputs in case.data_sets:
        inputs, want = [np.asarray(i) for i in inputs], np.asarray(outputs[0])
        text = expression(case, inputs, attrs)
        got = np.asarray(h.pointwise(text, *inputs, dtype=want.dtype))
        assert got.shape == want.shape and got.dtype == want.dtype
        if want.dtype.kind in "biu":
            np.testing.assert_array_equal(got, want)
        else:
            rtol = 1e-5 if want.dtype.itemsize > 2 else 4e-3
            np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=rtol, atol=1e-6)
