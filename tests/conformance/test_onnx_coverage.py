"""Every ONNX node test of the operators of these families is run by a test beside this one, or stands here with the reason why not.

`python -m tests.conformance.test_onnx_coverage notes/FILE.md` runs them all and writes the table.
"""

from __future__ import annotations

import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from .node_tests import node_tests

pytest.importorskip("onnx")
FAMILIES = {
    "activations":
        "Celu Clip Elu Gelu HardSigmoid HardSwish LeakyRelu LogSoftmax Hardmax Mish PRelu Relu Selu Shrink Sigmoid Softmax "
        "Softplus Softsign SwiGLU Swish Tanh ThresholdedRelu",
    "elementwise":
        "Abs Acos Acosh Add And Asin Asinh Atan Atanh Binarizer BitCast BitShift BitwiseAnd BitwiseNot BitwiseOr BitwiseXor "
        "Cast CastLike Ceil Cos Cosh Div Equal Erf Exp Floor Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Log Max Mean "
        "Min Mod Mul Neg Not Or Pow Reciprocal Round Sign Sin Sinh Sqrt Sub Sum Tan Where Xor",
    "reductions":
        "ArgMax ArgMin ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum "
        "ReduceSumSquare CumProd CumSum",
    "normalisation":
        "BatchNormalization GroupNormalization InstanceNormalization LRN LayerNormalization LpNormalization "
        "MeanVarianceNormalization RMSNormalization",
    "pooling and resize":
        "AveragePool GlobalAveragePool GlobalMaxPool LpPool MaxPool MaxUnpool Resize Upsample",
    "layout and shape":
        "CenterCropPad Concat ConstantOfShape DepthToSpace Expand EyeLike Flatten Identity Pad Range Reshape Slice SpaceToDepth "
        "Split Squeeze Tile Transpose Trilu Unsqueeze",
    "convolution":
        "Col2Im Conv ConvInteger ConvTranspose DeformConv QLinearConv",
    "losses and random":
        "Bernoulli Dropout NegativeLogLikelihoodLoss SoftmaxCrossEntropyLoss",
    "attention":
        "Attention FlexAttention RotaryEmbedding",
    "quantisation":
        "DequantizeLinear DynamicQuantizeLinear MatMulInteger QLinearMatMul QuantizeLinear",
    "optimisers":
        "Adagrad Adam Momentum",
}
VIEWS = ("BitCast", "Flatten", "Reshape", "Squeeze", "Unsqueeze")
WITHOUT_KERNEL = dict.fromkeys(VIEWS, "a view of the same memory: the frameworks' own, no kernel")
FILES = sorted(set(Path(__file__).parent.glob("test_onnx_*.py")) - {Path(__file__)})
MODULES = [f"tests.conformance.{path.stem}" for path in FILES]


def runs() -> dict[str, str]:
    """Name of a node test -> the module whose tests take it as their `case`."""
    found = {}
    for name in MODULES:
        for function in vars(import_module(name)).values():
            for mark in getattr(function, "pytestmark", ()):
                if mark.name == "parametrize" and mark.args[0] == "case":
                    found |= {case.name: name for case in mark.args[1]}
    return found


def reasons() -> dict[str, str]:
    """Name of a node test that is not run -> why."""
    found: dict[str, str] = {}
    for name in MODULES:
        found |= getattr(import_module(name), "LEFT", {})
    return found | {t.name: WITHOUT_KERNEL[t.model.graph.node[0].op_type] for t in node_tests(WITHOUT_KERNEL)}


def cases() -> list[Any]:
    return node_tests(" ".join(FAMILIES.values()).split())


def test_every_node_test_is_run_or_left_for_a_reason() -> None:
    run, left = runs(), reasons()
    names = [t.name for t in cases()]
    assert len(names) == len(set(names)) >= 900
    assert [n for n in names if n not in run and n not in left] == []
    assert sorted(run.keys() & left.keys()) == [], "no reason outlives its case"
    assert sorted(left.keys() - set(names)) == []


class _Outcomes:
    """A pytest plugin that keeps what became of each node test."""

    def __init__(self) -> None:
        self.passed: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and "[" in report.nodeid:
            for part in report.nodeid.split("[", 1)[1].rstrip("]").split("-"):
                (self.passed if report.passed else self.failed)[part] += 1


def write(path: Path) -> None:
    """Runs the conformance tests and writes the table of what exists, what passes, and why the rest is not run."""
    outcomes = _Outcomes()
    pytest.main(["-q", "--no-header", str(Path(__file__).parent)], plugins=[outcomes])
    left, every = reasons(), cases()
    lines = ["# ONNX node tests", "", "Written by `python -m tests.conformance.test_onnx_coverage`; the emulator ran them (sm_80).", ""]
    import onnx

    total = sum(t.name in outcomes.passed and t.name not in outcomes.failed for t in every)
    lines += [f"onnx {onnx.__version__}: {len(every)} node tests of these operators exist, {total} are run and pass, "
              f"{sum(t.name in outcomes.failed for t in every)} fail, {len(left)} are not run, for the reasons below.", "",
              "| family | operator | exist | pass | fail | not run |", "|---|---|---:|---:|---:|---:|"]
    for family, operators in FAMILIES.items():
        for op in sorted(operators.split()):
            own = [t.name for t in every if t.model.graph.node[0].op_type == op]
            failed = sum(n in outcomes.failed for n in own)
            lines.append(f"| {family} | {op} | {len(own)} | {sum(n in outcomes.passed for n in own) - failed} | {failed} | "
                         f"{sum(n in left for n in own)} |")
    lines += ["", "## Not run", ""]
    for reason in sorted(set(left.values())):
        lines.append(f"- {reason}: {', '.join(sorted(n for n, why in left.items() if why == reason))}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
