"""Where problems come from: case files (a line each, # comments), JSON files of benchmark shapes, ONNX models, and named networks.

Networks live in benches/cases/shapes/conv2d.json (shipped within the package as data/shapes).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ..dtypes import DType, dtype
from ..errors import InvalidArgument, OxidnnError, expected
from ..ops import OPS
from ..ops.base import Policy, Problem
from ..ops.case import parse_case
from ..ops.conv import ConvProblem
from ..tensor import TensorDesc

DIRECTIONS = ("fprop", "dgrad", "wgrad")
LAYOUTS = ("nhwc", "nchw")


def from_file(path: str | os.PathLike[str]) -> list[Problem]:
    """The problems of a case file, in order. Raises InvalidArgument naming file and line."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"case file: {path} cannot be read ({error}).") from error
    problems = []
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        try:
            problems.append(parse_case(line))
        except OxidnnError as error:
            raise InvalidArgument(f"{path}:{number}: {error}") from error
    return problems


def network(name: str, batch: int = 128, kind: str | DType = "bf16", layout: str = "nhwc", directions: Sequence[str] = ("fprop",),
            policy: Policy | None = None) -> list[Problem]:
    """The distinct convolutions of a named network. kind: dtype; layout: "nhwc" or "nchw"; directions: of "fprop", "dgrad", "wgrad"."""
    return list(layer_counts(name, batch, kind, layout, directions, policy))


def layer_counts(name: str, batch: int = 128, kind: str | DType = "bf16", layout: str = "nhwc", directions: Sequence[str] = ("fprop",),
                 policy: Policy | None = None) -> dict[Problem, int]:
    """The convolutions of a named network, each with how often one pass computes it."""
    networks = _networks()
    if name not in networks:
        raise expected("network", "name", repr(name), " | ".join(sorted(networks)))
    return _convolutions(networks[name], batch, dtype(kind), layout, directions, policy)


def layer_name(problem: ConvProblem) -> str:
    """Image height, channels-filters, taps and stride, e.g. 56_64-256_1x1s1."""
    k, c, r, s = problem.desc(problem.filter).shape
    return f"{problem.desc(problem.image).shape[2]}_{c * problem.groups}-{k}_{r}x{s}s{problem.stride[0]}"


def network_names() -> tuple[str, ...]:
    return tuple(sorted(_networks()))


def from_shapes(source: str | os.PathLike[str], batch: int | None = None, kind: str | DType | None = None, layout: str | None = None,
                directions: Sequence[str] = ("fprop",), policy: Policy | None = None) -> list[Problem]:
    """The problems of a JSON file of benchmark shapes: `networks` of convolutions, `square` and `llm` GEMMs, memory-bound `rows_cols`
    (softmax, cross-entropy, reduction, activation) and `pool`. Duplicates appear once.

    batch (convolutions; default the file's training batch), kind and layout override the file. Sections of ops that oxidnn lacks are left
    out; raises InvalidArgument if nothing remains or an entry is malformed.
    """
    path = Path(source)
    try:
        table = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"shapes: {path} is no JSON file ({error}).") from error
    if not isinstance(table, dict):
        raise expected("shapes", str(path), type(table).__name__, "a JSON object")
    chosen = dtype(kind or "bf16")
    layout = (layout or table.get("layout", "NHWC")).lower()
    found: dict[Problem, None] = {}
    try:
        for layers in table.get("networks", {}).values():
            found |= dict.fromkeys(_convolutions(layers, batch or table["batch"]["train"], chosen, layout, directions, policy))
        for section, make in _SECTIONS.items():
            for entry in table.get(section, ()):
                lines = [line for line in make(entry, chosen.name, layout) if line.split(" ", 1)[0] in OPS]
                found |= dict.fromkeys(_under(parse_case(line), policy) for line in lines)
    except (KeyError, TypeError, AttributeError) as error:
        raise InvalidArgument(f"shapes: {path} has an entry that lacks or misspells {error}.") from error
    if not found:
        raise InvalidArgument(f"shapes: {path} has no section of an op that oxidnn knows (sections: {', '.join(table)}).")
    return list(found)


def from_onnx(path: str | os.PathLike[str], batch: int | None = None, kind: str | DType | None = None, layout: str = "nchw",
              policy: Policy | None = None) -> list[Problem]:
    """The distinct problems of an ONNX model's Conv, Gemm, MatMul, Softmax, MaxPool, AveragePool and GlobalAveragePool nodes.

    batch: extent of the inputs' first dimension (needed where the model leaves it open). kind: dtype in place of the model's. layout: of
    images and filters. Other nodes are left out; raises InvalidArgument if nothing remains, or a shape stays unknown.
    """
    try:
        import onnx
    except ImportError:
        raise InvalidArgument("onnx: the package onnx is not installed (pip install onnx).") from None
    try:
        model = onnx.load(os.fspath(path), load_external_data=False)
        for value in model.graph.input:
            dims = value.type.tensor_type.shape.dim
            if batch is not None and dims and value.name not in {i.name for i in model.graph.initializer}:
                dims[0].dim_value = batch
        graph = onnx.shape_inference.infer_shapes(model).graph
    except Exception as error:  # protobuf's errors and onnx's own have no common base
        raise InvalidArgument(f"onnx: {path} is no ONNX model ({error}).") from error
    descs: dict[str, tuple[tuple[int, ...], str]] = {i.name: (tuple(i.dims), _onnx_type(i.data_type)) for i in graph.initializer}
    for value in (*graph.input, *graph.value_info, *graph.output):
        tensor = value.type.tensor_type
        if all(d.HasField("dim_value") for d in tensor.shape.dim):
            descs[value.name] = tuple(d.dim_value for d in tensor.shape.dim), _onnx_type(tensor.elem_type)
    found: dict[Problem, None] = {}
    for node in graph.node:
        make = _ONNX_NODES.get(node.op_type)
        if make is None:
            continue
        missing = [name for name in node.input if name and name not in descs]
        if missing:
            raise InvalidArgument(f"onnx: the shape of {missing[0]!r} in {path} is not known (expected batch=N or fixed shapes).")
        tensors = []
        for name in filter(None, node.input):
            shape, own = descs[name]
            tensors.append(TensorDesc.packed(dtype(kind or own), shape, layout if len(shape) > 2 else "nchw"))
        attrs = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        op, roles, values = make(tensors, {n: v.decode() if isinstance(v, bytes) else v for n, v in attrs.items()})
        found[OPS[op].make(dict(zip(roles, tensors, strict=False)), values, policy or Policy())] = None
    if not found:
        raise InvalidArgument(f"onnx: {path} has no node of an op that oxidnn knows ({', '.join(_ONNX_NODES)}).")
    return list(found)


def _onnx_type(code: int) -> str:
    from onnx import helper

    return helper.tensor_dtype_to_np_dtype(code).name


def _onnx_window(x: TensorDesc, attrs: dict[str, Any]) -> dict[str, Any]:
    """stride, padding and dilation of a Conv or pooling node."""
    spatial = x.rank - 2
    pads = attrs.get("pads", [0] * 2 * spatial)
    same = {"SAME_UPPER": "same_upper", "SAME_LOWER": "same_lower"}.get(attrs.get("auto_pad", "NOTSET"))
    return {"stride": tuple(attrs.get("strides", [1] * spatial)), "dilation": tuple(attrs.get("dilations", [1] * spatial)),
            "padding": same or tuple(zip(pads[:spatial], pads[spatial:], strict=True))}


def _onnx_conv(tensors: list[TensorDesc], attrs: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    return "conv_fprop", ("x", "w", "bias"), _onnx_window(tensors[0], attrs) | {"groups": attrs.get("group", 1)}


def _onnx_gemm(tensors: list[TensorDesc], attrs: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    flags = {"transpose_a": bool(attrs.get("transA", 0)), "transpose_b": bool(attrs.get("transB", 0)), "alpha": attrs.get("alpha", 1.0)}
    return "gemm", ("a", "b", "c"), flags | ({"beta": attrs.get("beta", 1.0)} if len(tensors) == 3 else {})


def _onnx_matmul(tensors: list[TensorDesc], attrs: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    return "gemm", ("a", "b"), {}


def _onnx_softmax(tensors: list[TensorDesc], attrs: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    return "softmax", ("x",), {"axis": attrs.get("axis", -1)}


def _onnx_pool(tensors: list[TensorDesc], attrs: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    window = _onnx_window(tensors[0], attrs) | {"window": tuple(attrs["kernel_shape"]), "ceil_mode": bool(attrs.get("ceil_mode", 0))}
    return "max_pool", ("x",), window


def _onnx_average_pool(tensors: list[TensorDesc], attrs: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    _, roles, window = _onnx_pool(tensors, attrs)
    window.pop("dilation")
    return "avg_pool", roles, window | {"count_include_pad": bool(attrs.get("count_include_pad", 0))}


def _onnx_global_average_pool(tensors: list[TensorDesc], attrs: dict[str, Any]) -> tuple[str, tuple[str, ...], dict[str, Any]]:
    return "global_avg_pool", ("x",), {}


_ONNX_NODES = {"Conv": _onnx_conv, "Gemm": _onnx_gemm, "MatMul": _onnx_matmul, "Softmax": _onnx_softmax, "MaxPool": _onnx_pool,
               "AveragePool": _onnx_average_pool, "GlobalAveragePool": _onnx_global_average_pool}


def shapes_file(stem: str) -> Path:
    """The shipped shapes file of that name, e.g. "conv2d"."""
    package = Path(__file__).resolve().parent.parent
    for directory in (package / "data" / "shapes", package.parent / "benches" / "cases" / "shapes"):
        path = directory / f"{stem}.json"
        if path.is_file():
            return path
    raise InvalidArgument(f"shapes: {stem}.json is not installed with oxidnn.")


@cache
def _networks() -> dict[str, list[dict[str, Any]]]:
    return json.loads(shapes_file("conv2d").read_text(encoding="utf-8"))["networks"]


def _convolutions(layers: Iterable[dict[str, Any]], batch: int, kind: DType, layout: str, directions: Sequence[str],
                  policy: Policy | None) -> dict[Problem, int]:
    if layout not in LAYOUTS:
        raise expected("conv2d", "layout", repr(layout), " | ".join(LAYOUTS))
    for direction in directions:
        if direction not in DIRECTIONS:
            raise expected("conv2d", "direction", repr(direction), " | ".join(DIRECTIONS))
    if batch < 0:
        raise expected("conv2d", "batch", batch, "at least 0")
    counts: dict[Problem, int] = {}
    for direction in directions:
        for layer in layers:
            problem = _convolution(layer, batch, kind, layout, direction, policy or Policy())
            counts[problem] = counts.get(problem, 0) + layer.get("count", 1)
    return counts


def _convolution(layer: dict[str, Any], batch: int, kind: DType, layout: str, direction: str, policy: Policy) -> Problem:
    tensors = {
        "x": TensorDesc.packed(kind, (batch, layer["C"], layer["H"], layer["W"]), layout),
        "w": TensorDesc.packed(kind, (layer["K"], layer["C"] // layer["groups"], layer["R"], layer["S"]), layout),
    }
    attrs = {"stride": tuple(layer["stride"]), "padding": tuple(layer["pad"]), "dilation": tuple(layer["dilation"])}
    attrs["groups"] = layer["groups"]
    forward = OPS["conv_fprop"].make(tensors, attrs, policy)
    if direction == "fprop":
        return forward
    dy = TensorDesc.packed(kind, forward.desc("y").shape, layout)
    if direction == "dgrad":
        return OPS["conv_dgrad"].make({"dy": dy, "w": tensors["w"], "dx": tensors["x"]}, attrs, policy)
    return OPS["conv_wgrad"].make({"x": tensors["x"], "dy": dy, "dw": tensors["w"]}, attrs, policy)


def _under(problem: Problem, policy: Policy | None) -> Problem:
    if policy is None or policy == problem.policy:
        return problem
    return OPS[problem.op].make({o.name: o.desc for o in problem.operands}, dict(problem.attrs), policy)


def _square(n: int, kind: str, layout: str) -> list[str]:
    return [f"gemm a={kind}[{n},{n}] b={kind}[{n},{n}]"]


def _llm(entry: dict[str, int], kind: str, layout: str) -> list[str]:
    m, n, k = entry["M"], entry["N"], entry["K"]
    return [f"gemm a={kind}[{m},{k}] b={kind}[{n},{k}] transpose_b=True"]  # weights lie as (out, in)


def _rows_cols(entry: Sequence[int], kind: str, layout: str) -> list[str]:
    rows, cols = entry
    x = f"{kind}[{rows},{cols}]"
    return [f"softmax x={x} axis=-1", f"cross_entropy logits={x} target=s64[{rows}]", f"reduce x={x} op=sum axes=(1,)",
            f"activation x={x} name=gelu"]


def _pool(entry: dict[str, Any], kind: str, layout: str) -> list[str]:
    x = f"x={kind}[{entry['N']},{entry['C']},{entry['H']},{entry['W']}]{layout}"
    if entry["op"] == "global_avg":
        return [f"avg_pool {x} window=({entry['H']},{entry['W']})"]
    return [f"{entry['op']}_pool {x} window={entry['k']} stride={entry['s']} padding={entry['p']}"]


_SECTIONS: dict[str, Callable[[Any, str, str], list[str]]] = {"square": _square, "llm": _llm, "rows_cols": _rows_cols, "pool": _pool}
