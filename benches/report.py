"""The tables of README's "How fast", out of records under benches/results/.

    python benches/report.py [--card h200] [benches/results/2026-11-28_h100_conv_resnet50.json ...]

Without records: of each bench the newest one there (of one card with --card). Ratios are the library's time over ours, of the configuration
chosen without tuning; geometric mean, worst and best over the shapes. Records of memory-bound ops give tables of their own: the same
against eager and compiled PyTorch (the number of cases in brackets, if not all), and what part of a copy's speed they reach.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from oxidnn.ops.base import Policy
from oxidnn.testing.cases import layer_counts, layer_name

RESULTS = Path(__file__).resolve().parent / "results"
COPY_TBS = 3.03  # read and written, measured on an H100: of records that do not say
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


def shapes_table(record: dict) -> str:
    """Markdown rows of a record of conv_shapes: set and direction | shapes | geometric mean | worst | best | best candidates' mean."""
    ratios: dict[tuple[str, bool, str], list[tuple[float, float, str]]] = defaultdict(list)
    for result in record["results"]:
        network, _, layer = result["case"].rpartition("/")
        if result["first"] and result["best"] and "us" in result["first"]:
            ratios[network or "further", result["groups"] > 1, result["direction"]].append(
                (result["library_us"] / result["first"]["us"], result["library_us"] / result["best"]["us"], layer))
    lines = ["| convolutions against cuDNN | shapes | geometric mean | worst | best | best candidates' mean |", "|---|---|---|---|---|---|"]
    for (network, has_groups, direction), rows in sorted(ratios.items()):
        (low, _, low_case), (high, _, high_case) = min(rows), max(rows)
        chosen, best = (mean_of([row[i] for row in rows]) for i in range(2))
        lines.append(f"| {network}{', groups' if has_groups else ''}, {direction} | {len(rows)} | {chosen:.2f}x | "
                     f"{low:.2f}x ({low_case}) | {high:.2f}x ({high_case}) | {best:.2f}x |")
    return "\n".join(lines)


def library_us(result: dict) -> float:
    return result["library_us"] if "library_us" in result else result["cudnn_us"]


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


def memory_table(records: list[dict], is_further: bool = False) -> str:
    """Markdown rows: op | cases | of a large copy's speed, of the copy of as many bytes beside it | against eager and compiled PyTorch.

    "" if there are no such cases: of benches/cases/shapes, or further ones.
    """
    found: dict[str, list[dict]] = defaultdict(list)
    for record in records:
        speed = record.get("copy_tbs", COPY_TBS) * 1e6
        for result in record["results"]:
            if "us" in result["default"] and result.get("is_further", False) == is_further:
                found[result["op"]].append(result | {"floor": result["bytes"] / speed})
    if not found:
        return ""
    speeds = sorted({f"{r.get('copy_tbs', COPY_TBS):.2f}" for r in records})
    lines = [f"| op | cases | of {' or '.join(speeds)} TB/s | of the copy beside | against eager PyTorch | worst | best | against compiled "
             "| worst |", "|---|---|---|---|---|---|---|---|---|"]
    for op, results in found.items():
        beside = [r["copy_us"] / r["default"]["us"] for r in results if "copy_us" in r]
        cells = [op, str(len(results)), f"{mean_of([r['floor'] / r['default']['us'] for r in results]):.2f}",
                 f"{mean_of(beside):.2f}" if beside else "-"]
        for peer in ("eager_us", "compiled_us"):
            ratios = sorted((r[peer] / r["default"]["us"], r["case"]) for r in results if peer in r)
            if not ratios:
                cells += ["-"] * (3 if peer == "eager_us" else 2)
                continue
            ends = ratios[:1] + ratios[-1:] * (peer == "eager_us")
            cells += [f"{mean_of([x for x, _ in ratios]):.2f}x" + f" ({len(ratios)})" * (len(ratios) < len(results))]
            cells += [f"{x:.2f}x ({case})" for x, case in ends]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def losses(records: list[dict]) -> str:
    """Cases slower than a peer, the worst first."""
    found = sorted((r[peer] / r["default"]["us"], f"{r['op']} {r['case']} {r[peer] / r['default']['us']:.2f}x of {peer[:-3]}")
                   for record in records for r in record["results"] if "us" in r["default"]
                   for peer in ("eager_us", "compiled_us") if peer in r and r[peer] < 0.98 * r["default"]["us"])
    return "; ".join(line for _, line in found) or "none"


def is_tabled(record: dict) -> bool:
    """Whether a record has rows that the tables know."""
    rows = record.get("results", [])
    return bool(rows) and all("op" in r and "default" in r and ("eager_us" in r or "library_us" in r or "cudnn_us" in r) for r in rows)


def newest(card: str) -> dict[str, dict]:
    """The newest record of each bench, by its name without date and card; of two of one day that which has a time."""
    found: dict[str, tuple[str, dict]] = {}
    for path in sorted(RESULTS.glob("*.json")):
        name = re.fullmatch(r"\d{4}-\d\d-\d\d_([a-z0-9]+)_(\w+)", path.stem)
        record = json.loads(path.read_text())
        if name is None or card not in ("", name[1]) or not isinstance(record, dict) or not is_tabled(record):
            continue
        when = record["stamp"].get("time", record["stamp"]["date"])
        if when >= found.get(name[2], ("", {}))[0]:
            found[name[2]] = (when, record | {"path": path.name})
    return {name: record for name, (_, record) in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", nargs="*", type=Path)
    parser.add_argument("--card", default="", help="as in the records' names, e.g. h200")
    options = parser.parse_args()
    records = {path.name: json.loads(path.read_text()) for path in options.records}
    for path in [p for p, record in records.items() if "first" in (record.get("results") or [{}])[0]]:
        print(f"{shapes_table(records.pop(path))}\n")
    for path, record in records.items():
        if not is_tabled(record):
            parser.error(f"{path} is no record of matmul_wgmma, conv_mma, conv_shapes, memory_bound or another bench of moving.py")
    if not options.records:
        records = {record["path"]: record for record in newest(options.card).values()}
    memory = {path: r for path, r in records.items() if any("eager_us" in x for x in r["results"])}
    others = {path: r for path, r in records.items() if path not in memory}
    if others and options.records:
        print(table(list(others.values())))
    for path, record in others.items() if not options.records else ():
        print(f"{path}, {record['stamp']['card']}\n\n{table([record])}\n")
    for line in filter(None, map(training_step, others.values())):
        print(f"\n{line}")
    if memory and options.records:
        for is_further in (False, True):
            print(memory_table(list(memory.values()), is_further))
    for path, record in memory.items() if not options.records else ():
        print(f"{path}, {record['stamp']['card']}\n")
        for is_further in (False, True):
            print(memory_table([record], is_further) + "\n")
    if memory:
        print(f"Slower than a peer: {losses(list(memory.values()))}")


if __name__ == "__main__":
    main()
