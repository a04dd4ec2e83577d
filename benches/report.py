"""The table of README's "How fast", out of records under benches/results/.

    python benches/report.py benches/results/2026-11-28_h100_conv_resnet50.json [more.json ...]

Ratios are the library's time over ours, of the configuration chosen without tuning; geometric mean, worst and best over the shapes.
Records of memory-bound ops give a table of their own: the same against eager and compiled PyTorch (the number of cases in brackets, if not
all), and what part of a copy's speed they reach.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oxidnn.ops.base import Policy
from oxidnn.testing.cases import layer_counts, layer_name

COPY_BYTES_PER_US = 3.03e6  # read and written, measured on an H100
LIBRARIES = {"e4m3": "cuBLAS", "e5m2": "cuBLAS", "s8": "torch._int_mm"}
DIRECTIONS = ("conv_fprop", "conv_dgrad", "conv_wgrad")


def table(records: list[dict]) -> str:
    """Markdown rows: work | shapes | geometric mean | worst | best."""
    ratios: dict[tuple[str, str], list[tuple[float, str, float]]] = defaultdict(list)
    for record in records:
        for result in record["results"]:
            chosen = result["default"]
            if "us" in chosen:
                ratios[result["op"], record["options"].get("kind", "bf16")].append(
                    (library_us(result) / chosen["us"], result["case"], result["flops"] / chosen["us"] / 1e6))
    lines = ["| work | shapes | geometric mean | worst | best |", "|---|---|---|---|---|"]
    for op, kind in sorted(ratios, key=lambda key: ("gemm", *DIRECTIONS).index(key[0])):
        rows = sorted(ratios[op, kind])
        title = f"GEMM {kind} against {LIBRARIES.get(kind, 'cuBLAS')}" if op == "gemm" else f"convolution {op[5:]} against cuDNN"
        (low, low_case, low_speed), (high, high_case, high_speed) = rows[0], rows[-1]
        mean = mean_of([r for r, _, _ in rows])
        lines.append(f"| {title} | {len(rows)} | {mean:.2f}x | {low:.2f}x ({low_case}, {low_speed:.0f} TFLOP/s) | "
                     f"{high:.2f}x ({high_case}, {high_speed:.0f} TFLOP/s) |")
    return "\n".join(lines)


def library_us(result: dict) -> float:
    return result.get("library_us", result.get("cudnn_us"))


def training_step(record: dict) -> str:
    """What all convolutions of a training step take, if the record has every layer in the three directions."""
    options, theirs, ours = record["options"], 0.0, 0.0
    found = {(r["op"], r["case"]): r for r in record["results"]}
    if {op for op, _ in found} != set(DIRECTIONS):
        return ""
    for op in DIRECTIONS:
        for problem, count in layer_counts(options["network"], options["batch"], options["kind"], "nhwc", (op[5:],), Policy()).items():
            result = found.get((op, layer_name(problem)))
            if result is None:
                return ""
            theirs, ours = theirs + count * library_us(result), ours + count * result["default"]["us"]
    return f"All convolutions of a training step of {options['network']}: {ours / 1e3:.1f} ms, cuDNN {theirs / 1e3:.1f} ms."


def mean_of(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def memory_table(records: list[dict]) -> str:
    """Markdown rows: op | cases | of a large copy's speed, of the copy of as many bytes beside it | against eager and compiled PyTorch."""
    found: dict[str, list[dict]] = defaultdict(list)
    for result in (r for record in records for r in record["results"] if "us" in r["default"]):
        found[result["op"]].append(result)
    lines = ["| op | cases | of 3.03 TB/s | of the copy beside | against eager PyTorch | worst | best | against compiled | worst |",
             "|---|---|---|---|---|---|---|---|---|"]
    for op, results in found.items():
        beside = [r["copy_us"] / r["default"]["us"] for r in results if "copy_us" in r]
        cells = [op, str(len(results)), f"{mean_of([r['bytes'] / COPY_BYTES_PER_US / r['default']['us'] for r in results]):.2f}",
                 f"{mean_of(beside):.2f}" if beside else "-"]
        for peer in ("eager_us", "compiled_us"):
            ratios = sorted((r[peer] / r["default"]["us"], r["case"]) for r in results if peer in r)
            if not ratios:
                cells += ["-", "-"]
                continue
            ends = ratios[:1] + ratios[-1:] * (peer == "eager_us")
            cells += [f"{mean_of([x for x, _ in ratios]):.2f}x" + f" ({len(ratios)})" * (len(ratios) < len(results))]
            cells += [f"{x:.2f}x ({case})" for x, case in ends]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    records = {path: json.loads(path.read_text()) for path in parser.parse_args().records}
    for path, record in records.items():
        if any("op" not in r or "default" not in r for r in record.get("results", [{}])):
            parser.error(f"{path} is no record of matmul_wgmma, conv_mma, memory_bound or channel_norm")
    memory = [r for r in records.values() if any("eager_us" in x for x in r["results"])]
    others = [r for r in records.values() if r not in memory]
    if others:
        print(table(others))
    for line in filter(None, map(training_step, others)):
        print(f"\n{line}")
    if memory:
        print(memory_table(memory))


if __name__ == "__main__":
    main()
