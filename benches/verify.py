"""What every bench does before it times: each candidate runs once on poisoned outputs and is judged."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.base import Problem
from oxidnn.plan import Plan
from oxidnn.runtime.backend import Backend

Tensors = dict[str, torch.Tensor]
Row = dict[str, Any]  # of a record: engine, config, estimate_us, workspace_bytes, error over tolerance or failure, us


def worst_error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Error over what rounding the result and f32 arithmetic allow, the largest; infinite where a poisoned element was left."""
    unit = 1.01 * {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10, torch.float32: 2.0**-20}[got.dtype]
    floor = 2.0**-14 * want.square().mean().sqrt() + (2.0**-24 if got.dtype is torch.float16 else 0.0)  # of f16: a subnormal
    ratio = (got.double().reshape(want.shape) - want).abs_() / (unit * want.abs() + floor)
    return float("inf") if bool(torch.isnan(ratio).any()) else float(ratio.max())


def poison(tensor: torch.Tensor) -> None:
    """NaN, 255 or -1 everywhere."""
    if tensor.is_floating_point() and tensor.element_size() == 1:
        tensor.view(torch.uint8).fill_(0x7F)
        return
    tensor.fill_(float("nan") if tensor.is_floating_point() else 255 if tensor.dtype == torch.uint8 else -1)


def verify(backend: Backend, problem: Problem, choices: Iterable[tuple[Engine, EngineConfig]], tensors: Tensors,
           error_of: Callable[[], float]) -> tuple[list[Row], list[tuple[Row, Plan, Callable[[], None]]]]:
    """The rows of all choices, and of those that ran the row, the plan and the call. error_of: of what the outputs hold, over tolerance.

    tensors: on the device, by operand. A choice that cannot be assembled or launched is a row with a failure, not fatal.
    """
    stream = backend.default_stream()
    pointers, scalars = [tensors[o.name].data_ptr() for o in problem.operands], [1 for _ in problem.scalars]
    rows: list[Row] = []
    ran: list[tuple[Row, Plan, Callable[[], None]]] = []
    for engine, config in choices:
        row: Row = {"engine": engine.id, "config": config.name, "estimate_us": engine.estimate(problem, config, backend.info)}
        rows.append(row)
        try:
            plan = Plan(problem, engine, config, engine.build_steps(problem, config, backend.info), backend)
            scratch = torch.full((max(1, plan.workspace_bytes),), 0xFF, dtype=torch.uint8, device=tensors[problem.operands[0].name].device)
            row["workspace_bytes"] = plan.workspace_bytes
            for output in problem.outputs:
                poison(tensors[output.name])
            torch.cuda.synchronize()

            def call(plan: Plan = plan, scratch: torch.Tensor = scratch) -> None:
                plan.execute(pointers, scratch.data_ptr(), stream, scalars)

            call()
            backend.synchronize(stream)
            row["error"] = error_of()
            ran.append((row, plan, call))
        except Exception as error:
            row["failure"] = f"{type(error).__name__}: {error}"[:400]
    return rows, ran


def fastest(rows: Iterable[Row]) -> Row | None:
    """The fastest of the rows that are right."""
    return min((r for r in rows if r.get("error", float("inf")) <= 1.0), key=lambda r: r["us"], default=None)


def complain(op: str, label: str, rows: Iterable[Row]) -> None:
    """A line for each row that failed or is wrong."""
    for row in rows:
        if row.get("error", 2.0) > 1.0:
            print(f"WRONG {op} {label} {row['engine']} {row['config']}: {row.get('failure', row.get('error'))}")
