"""The case grammar there and back, case files, shapes files and named networks."""

from __future__ import annotations

import copy
import json
import math
import pickle
from pathlib import Path

import pytest

from oxidnn.device import known_device
from oxidnn.errors import InvalidArgument
from oxidnn.ops import OPS
from oxidnn.ops.base import Policy, Problem
from oxidnn.ops.case import format_case, format_tensor, parse_case, parse_tensor
from oxidnn.testing import cases
from oxidnn.testing.sample import CASES

CASE_FILES = sorted((Path(__file__).resolve().parents[2] / "benches" / "cases").rglob("*.txt"))
SHAPES = Path(__file__).resolve().parents[2] / "benches" / "cases" / "shapes"


@pytest.mark.parametrize("text", [
    "f32[]nchw", "f32[0]nchw", "f32[7]nchw", "bf16[8,64,56,56]nchw", "bf16[8,64,56,56]nhwc", "s64[3,4](1,3)", "f16[2,3](-3,1)",
    "e4m3[2,3](0,1)", "f32[1025]nchw@4", "f64[2,3,4](40,10,2)@8", "bool[5]nchw@1",
])
def test_tensor_there_and_back(text: str) -> None:
    assert format_tensor(parse_tensor(text)) == text


def test_tensor_layouts_and_defaults() -> None:
    assert parse_tensor("f32[2,3,4,5]nhwc").strides == (60, 1, 15, 3)
    assert parse_tensor("f32[2,3,4]nhwc").strides == (12, 1, 3)
    assert parse_tensor("f32[2,3]").strides == (3, 1) and parse_tensor("f32[2,3]").align == 16
    assert parse_tensor("float32[2]@4").align == 4


@pytest.mark.parametrize("text, said", [
    ("f32", "no tensor"), ("f32[2,3", "no tensor"), ("f32[2]abcd", "no tensor"), ("f33[2]", "f33"), ("f32[2,3](1)", "1 strides for 2"),
    ("f32[-2]", "no tensor"), ("f32[2]@x", "no tensor"),
])
def test_bad_tensors(text: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_tensor(text)


def _canonical(problem: Problem) -> list:
    """The operands without the strides that mean nothing: those of dimensions of size 1, and all of an empty tensor."""
    return [(o.name, o.is_output, o.desc.dtype, o.desc.shape, o.desc.align,
             [s for n, s in zip(o.desc.shape, o.desc.strides, strict=True) if n > 1 and o.desc.numel]) for o in problem.operands]


def _all_cases() -> list[str]:
    return [line for lines in CASES.values() for line in lines]


@pytest.mark.parametrize("line", _all_cases())
def test_every_registered_case_there_and_back(line: str) -> None:
    problem = parse_case(line)
    again = parse_case(format_case(problem))
    assert _canonical(again) == _canonical(problem)
    assert (again.attrs, again.scalars, again.policy) == (problem.attrs, problem.scalars, problem.policy)
    assert format_case(again) == format_case(problem)


def test_policy_there_and_back() -> None:
    line = "gemm a=f32[4,8]nchw b=f32[8,4]nchw d=f32[4,4]nchw math=tf32 deterministic=True workspace_limit=0"
    problem = parse_case(line)
    assert problem.policy == Policy(True, "tf32", 0)
    assert format_case(problem) == line


@pytest.mark.parametrize("line, said", [
    ("", "no op"), ("nonsense x=f32[2]", "'nonsense' is no op.*gemm"), ("gemm a", "neither tensor"), ("gemm a=f32[4,8]", "b is missing"),
    ("gemm a=f32[4,8] b=f32[7,4]", "inner extent"), ("gemm a=f32[4,8] b=f32[8,4] colour=3", "'colour' is no attribute"),
    ("gemm a=f32[4,8] b=f32[8,4] math=best", "math is 'best'.*ieee"), ("gemm a=f32[4,8] b=f32[8,4] deterministic=2", "deterministic is 2"),
    ("gemm a=f32[4,8] b=f32[8,4] workspace_limit=-1", "workspace_limit is -1"), ("gemm a='f32[4,8]", "quotation"),
    ("gemm a=f9[4,8] b=f32[8,4]", "f9"),
])
def test_bad_lines_name_the_word(line: str, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        parse_case(line)


def test_case_file(tmp_path: Path) -> None:
    path = tmp_path / "cases.txt"
    path.write_text("# two products\n\ngemm a=f32[4,8] b=f32[8,4]\n  gemm a=f32[4,8] b=f32[8,5]  \n")
    assert [p.desc("d").shape for p in cases.from_file(path)] == [(4, 4), (4, 5)]
    path.write_text("gemm a=f32[4,8] b=f32[8,4]\n\nbad\n")
    with pytest.raises(InvalidArgument, match=r"cases\.txt:3: .*'bad' is no op"):
        cases.from_file(path)
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match="cannot be read"):
        cases.from_file(path)
    with pytest.raises(InvalidArgument, match="cannot be read"):
        cases.from_file(tmp_path / "absent.txt")


@pytest.mark.parametrize("path", CASE_FILES, ids=lambda p: p.stem)
def test_shipped_case_files_are_read_and_planned(path: Path) -> None:
    from oxidnn.dispatch.select import choose

    problems = cases.from_file(path)
    assert problems and len(set(problems)) == len(problems)
    for problem in problems[:3]:
        choose(problem, known_device("sm_90a"), None)


def test_networks_count_their_layers() -> None:
    assert cases.network_names() == ("convnext_tiny", "efficientnet_b0", "resnet50", "vgg16")
    counts = cases.layer_counts("resnet50", 128, "bf16", "nhwc", ("fprop",))
    multiply_adds = sum(p.flops * n for p, n in counts.items()) / 2 / 128
    assert 3.8e9 < multiply_adds < 4.2e9  # ResNet-50 is known for about 4.1 G multiply-adds an image, 0.002 G of them in its classifier
    vgg = cases.layer_counts("vgg16", 1)
    assert all(p.desc("x").dtype.name == "bf16" and p.desc("x").is_packed("nhwc") for p in vgg)


def test_directions_belong_together() -> None:
    forward, dgrad, wgrad = (cases.network("efficientnet_b0", 2, "f16", "nchw", (d,)) for d in cases.DIRECTIONS)
    assert len(forward) == len(dgrad) == len(wgrad)
    for f, d, w in zip(forward, dgrad, wgrad, strict=True):
        assert (f.op, d.op, w.op) == ("conv_fprop", "conv_dgrad", "conv_wgrad")
        assert d.desc("dx") == f.desc("x") == w.desc("x") and w.desc("dw") == f.desc("w") == d.desc("w")
        assert d.desc("dy").shape == f.desc("y").shape == w.desc("dy").shape
        assert parse_case(format_case(d)) == d and parse_case(format_case(w)) == w
    assert len(cases.network("resnet50", directions=cases.DIRECTIONS)) == 3 * len(cases.network("resnet50"))


def test_policy_of_networks_and_shapes() -> None:
    policy = Policy(deterministic=True, math="tf32")
    assert all(p.policy == policy for p in cases.network("vgg16", 1, "f32", policy=policy))
    assert all(p.policy == policy for p in cases.from_shapes(SHAPES / "gemm.json", policy=policy))


def test_shapes_files() -> None:
    convolutions = cases.from_shapes(SHAPES / "conv2d.json", batch=32, directions=("fprop", "wgrad"))
    assert len(convolutions) == len(set(convolutions)) and {p.op for p in convolutions} == {"conv_fprop", "conv_wgrad"}
    assert all(p.desc("x").shape[0] == 32 for p in convolutions)
    assert cases.from_shapes(SHAPES / "conv2d.json")[0].desc("x").shape[0] == 128
    products = cases.from_shapes(SHAPES / "gemm.json", kind="f16")
    assert len(products) == 4 + 20 and products[0].desc("a").shape == (1024, 1024)
    assert {(p.m, p.n, p.k) for p in products[4:6]} == {(1, 4096, 7168), (1, 7168, 2048)}  # type: ignore[attr-defined]
    bound = cases.from_shapes(SHAPES / "memory_bound.json", kind="f32")
    assert {"max_pool", "avg_pool"} <= {p.op for p in bound} and {p.op for p in bound} <= set(OPS)
    assert any(p.op == "avg_pool" and p.desc("y").shape == (128, 2048, 1, 1) for p in bound)


@pytest.mark.parametrize("content, said", [
    ("{", "no JSON"), ("[1]", "JSON object"), (json.dumps({"moe": [1]}), "no section"), (json.dumps({"llm": [{"M": 1, "N": 2}]}), "'K'"),
    (json.dumps({"networks": {"a": [{"C": 3}]}, "batch": {"train": 1}}), "lacks or misspells"),
])
def test_bad_shapes_files(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(content)
    with pytest.raises(InvalidArgument, match=said):
        cases.from_shapes(path)


@pytest.mark.parametrize("arguments, said", [
    (("alexnet",), "alexnet.*resnet50"), (("resnet50", -1), "batch is -1"), (("resnet50", 1, "f33"), "f33"),
    (("resnet50", 1, "bf16", "chwn"), "layout is 'chwn'"), (("resnet50", 1, "bf16", "nhwc", ("forward",)), "direction is 'forward'"),
])
def test_bad_network_arguments(arguments: tuple, said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        cases.network(*arguments)


def _onnx_model(path: Path, batch: int | str) -> None:
    onnx = pytest.importorskip("onnx")
    make, float16 = onnx.helper.make_node, onnx.TensorProto.FLOAT16
    nodes = [
        make("Conv", ["x", "w", "b"], ["y"], strides=[2, 1], pads=[1, 0, 2, 0], group=2),
        make("Relu", ["y"], ["z"]), make("MaxPool", ["z"], ["p"], kernel_shape=[2, 2], strides=[2, 2], ceil_mode=1),
        make("AveragePool", ["p"], ["q"], kernel_shape=[2, 1], auto_pad="SAME_UPPER"), make("GlobalAveragePool", ["q"], ["g"]),
        make("Flatten", ["g"], ["f"]), make("Gemm", ["f", "v", "c"], ["l"], transB=1, alpha=0.5), make("Softmax", ["l"], ["s"], axis=1),
    ]

    def tensor(name: str, *shape):  # type: ignore[no-untyped-def]
        return onnx.helper.make_tensor_value_info(name, float16, shape)

    weights = [onnx.helper.make_tensor(n, float16, s, bytes(2 * math.prod(s)), raw=True)
               for n, s in (("w", (8, 2, 3, 3)), ("b", (8,)), ("v", (5, 8)), ("c", (5,)))]
    graph = onnx.helper.make_graph(nodes, "net", [tensor("x", batch, 4, 12, 11)], [tensor("s", batch, 5)], weights)
    path.write_bytes(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 18)]).SerializeToString())


def test_onnx_model(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    _onnx_model(path, "N")
    found = cases.from_onnx(path, batch=3, layout="nhwc")
    assert [p.op for p in found] == ["conv_fprop", "max_pool", "avg_pool", "global_avg_pool", "gemm", "softmax"]
    conv, pool, average, _, product, soft = found
    assert conv.desc("x").shape == (3, 4, 12, 11) and conv.desc("x").is_packed("nhwc") and conv.desc("x").dtype.name == "f16"
    assert conv.desc("y").shape == (3, 8, 7, 9) and conv.has("bias")
    assert dict(conv.attrs) | {"epilogue": None} == {"stride": (2, 1), "padding": ((1, 2), (0, 0)), "groups": 2, "epilogue": None}
    assert pool.desc("y").shape == (3, 8, 4, 5) and average.desc("y").shape == (3, 8, 4, 5)
    assert product.desc("d").shape == (3, 5) and dict(product.attrs)["alpha"] == 0.5 and dict(product.attrs)["beta"] == 1.0
    assert soft.desc("x").shape == (3, 5)
    assert {o.desc.dtype.name for p in cases.from_onnx(path, 1, "bf16") for o in p.operands} == {"bf16"}


def test_onnx_model_without_a_batch_or_known_nodes(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    _onnx_model(path, "N")
    with pytest.raises(InvalidArgument, match="shape of 'x'.*batch=N"):
        cases.from_onnx(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(InvalidArgument, match="no ONNX model"):
        cases.from_onnx(path)
    _onnx_model(path, 2)
    assert cases.from_onnx(path)[0].desc("x").shape[0] == 2


def test_problems_of_another_process() -> None:
    """A problem that was pickled, or copied, is planned as itself: types are the table's."""
    problem = parse_case("conv_fprop x=f32[2,16,6,6]nhwc w=f32[16,16,3,3]nhwc padding=1 math=tf32")
    for copied in (pickle.loads(pickle.dumps(problem)), copy.deepcopy(problem)):
        assert all(o.desc.dtype is p.desc.dtype for o, p in zip(copied.operands, problem.operands, strict=True))
        assert format_case(copied) == format_case(problem)
