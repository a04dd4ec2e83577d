"""The table of README's "How fast", out of records under benches/results/.

    python benches/report.py benches/results/2026-11-28_h100_conv_resnet50.json [more.json ...]

Ratios are the library's time over ours, of the configuration chosen without tuning; geometric mean, worst and best over the shapes.
Records of memory-bound ops give a table of their own: the same against eager PyTorch, and the speed of a copy of as many bytes as ratio.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

COPY_BYTES_PER_US = 3.03e6  # read and written, measured on an H100
TITLES = {"gemm": "GEMM bf16 against cuBLAS", "conv_fprop": "convolution fprop against cuDNN",
          "conv_dgrad": "convolution dgrad against cuDNN", "conv_wgrad": "convolution wgrad against cuDNN"}


def table(records: list[dict]) -> str:
    """Markdown rows: work | shapes | geometric mean | worst | best."""
    ratios: dict[str, list[tuple[float, str, float]]] = defaultdict(list)
    for record in records:
        for result in record["results"]:
            chosen = result["default"]
            if "us" in chosen:
                library = result.get("library_us", result.get("cudnn_us"))
                ratios[result["op"]].append((library / chosen["us"], result["case"], result["flops"] / chosen["us"] / 1e6))
    lines = ["| work | shapes | geometric mean | worst | best |", "|---|---|---|---|---|"]
    for op, title in TITLES.items():
        rows = sorted(ratios.get(op, []))
        if rows:
            mean = mean_of([r for r, _, _ in rows])
            low, high = rows[0], rows[-1]
            lines.append(f"| {title} | {len(rows)} | {mean:.2f}x | {low[0]:.2f}x ({low[1]}, {low[2]:.0f} TFLOP/s) | "
                         f"{high[0]:.2f}x ({high[1]}, {high[2]:.0f} TFLOP/s) |")
    return "\n".join(lines)


def mean_of(ratios: list[float]) -> float:
    return math.exp(sum(map(math.log, ratios)) / len(ratios))


def memory_table(records: list[dict]) -> str:
    """Markdown rows: op | cases | of a copy | of eager PyTorch: mean, worst, best."""
    eager: dict[str, list[tuple[float, str]]] = defaultdict(list)
    copy: dict[str, list[float]] = defaultdict(list)
    for record in records:
        for result in record["results"]:
            us = result["default"]["us"]
            eager[result["op"]].append((result["eager_us"] / us, result["case"]))
            copy[result["op"]].append(result["bytes"] / COPY_BYTES_PER_US / us)
    lines = ["| op | cases | of a copy | against eager PyTorch | worst | best |", "|---|---|---|---|---|---|"]
    for op, found in eager.items():
        low, high = min(found), max(found)
        mean = mean_of([r for r, _ in found])
        lines.append(f"| {op} | {len(found)} | {mean_of(copy[op]):.2f} | {mean:.2f}x | {low[0]:.2f}x ({low[1]}) | "
                     f"{high[0]:.2f}x ({high[1]}) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    records = [json.loads(path.read_text()) for path in parser.parse_args().records]
    memory = [r for r in records if any("eager_us" in x for x in r["results"])]
    if len(memory) < len(records):
        print(table([r for r in records if r not in memory]))
    if memory:
        print(memory_table(memory))


if __name__ == "__main__":
    main()
