"""The table of README's "How fast", out of records under benches/results/.

    python benches/report.py benches/results/2026-11-28_h100_conv_resnet50.json [more.json ...]

Ratios are the library's time over ours, of the configuration chosen without tuning; geometric mean, worst and best over the shapes.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path

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
            mean = math.exp(sum(math.log(r) for r, _, _ in rows) / len(rows))
            low, high = rows[0], rows[-1]
            lines.append(f"| {title} | {len(rows)} | {mean:.2f}x | {low[0]:.2f}x ({low[1]}, {low[2]:.0f} TFLOP/s) | "
                         f"{high[0]:.2f}x ({high[1]}, {high[2]:.0f} TFLOP/s) |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="+", type=Path)
    print(table([json.loads(path.read_text()) for path in parser.parse_args().records]))


if __name__ == "__main__":
    main()
