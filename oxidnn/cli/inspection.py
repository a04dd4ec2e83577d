"""Commands that look and run nothing: info, explain, dump."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import click

from .. import __version__, switches
from ..errors import InvalidArgument, OxidnnError
from ..handle import open_backend
from .arguments import arch_option, device_option, engine_options, json_option, pick, planning_info, print_json, print_table, problem_of


@click.command()
@device_option
@json_option
def info(device: str | None, as_json: bool) -> None:
    """Device, driver, versions, caches, ops and switches."""
    from ..dispatch.registry import ENGINES
    from ..dispatch.tuning_db import TuningDb
    from ..runtime.assembler import assembler_identity
    from ..runtime.cubin_store import CubinStore
    from ..runtime.driver import driver_version, why_no_cuda

    backend, reason = open_backend(device), why_no_cuda()
    d, store, db = backend.info, CubinStore(), TuningDb.open()
    try:
        assembler = assembler_identity()
    except OxidnnError as error:
        assembler = f"none ({error})"
    facts: dict[str, Any] = {
        "device": {"name": d.name, "as": backend.device, "arch": d.arch, "SMs": d.num_sms, "shared bytes per CTA": d.smem_per_cta,
                   "L2 bytes": d.l2_bytes, "bandwidth GB/s": d.bandwidth_gbs, "tensor TFLOP/s": d.tensor_tflops,
                   "FMA TFLOP/s": d.fma_tflops},
        "driver": {"CUDA": f"none: {reason}" if reason else driver_version(), "assembler": assembler},
        "versions": {"oxidnn": __version__, "python": platform.python_version()} | {p: _version(p) for p in (
            "numpy", "jinja2", "ml_dtypes", "cuda-bindings", "cuda-core", "nvidia-nvjitlink", "nvidia-cuda-nvdisasm", "torch")},
        "caches": {"cubins": ", ".join(str(p) for p in store.directories), "cubin bytes": store.total_bytes(), "mode": store.mode,
                   "tuning database": str(db.user_path or "in memory"), "tuning rows": len(db.entries())},
        "ops": {op: len(engines) for op, engines in sorted(ENGINES.items())},
        "switches": {name: {"value": switches.get(name), "source": switches.source(name), "meaning": s.meaning}
                     for name, s in switches.TABLE.items()},
    }
    if as_json:
        print_json(facts)
        return
    for section in ("device", "driver", "versions", "caches"):
        print_table((section, ""), list(facts[section].items()))
        click.echo()
    print_table(("op", "engines"), list(facts["ops"].items()))
    click.echo()
    print_table(("switch", "value", "from", "meaning"),
                [(name, s["value"] or "-", s["source"], s["meaning"]) for name, s in facts["switches"].items()])


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


@click.command()
@click.argument("words", metavar="CASE", nargs=-1, required=True)
@device_option
@arch_option
@json_option
def explain(words: tuple[str, ...], device: str | None, arch: str | None, as_json: bool) -> None:
    """Which engines take CASE, why the others do not, and which is chosen."""
    from ..dispatch.select import explain as explain_problem
    from ..dispatch.tuning_db import TuningDb

    found = explain_problem(problem_of(words), planning_info(device, arch), TuningDb.open())
    if as_json:
        print_json({"case": found.case, "chosen": found.chosen, "why": found.why, "candidates": [
            {"engine": c.engine.id, "supported": bool(c.support), "reason": c.support.reason, "measured_us": c.measured_us,
             "configs": [{"name": config.name, "estimate_us": us} for config, us in c.configs]} for c in found.candidates]})
        return
    print_table(("engine", "verdict", "estimate", "measured"), found.rows(), found.case)
    click.echo(f"chosen: {found.chosen} ({found.why})")


@click.command()
@click.argument("words", metavar="CASE", nargs=-1, required=True)
@click.option("--ptx", is_flag=True, help="The PTX text (default).")
@click.option("--sass", is_flag=True, help="The machine code, through nvJitLink and nvdisasm; needs no GPU.")
@click.option("--spec", is_flag=True, help="Specs, grids and arguments.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), help="Write one file per kernel into this directory instead.")
@engine_options
@device_option
@arch_option
def dump(words: tuple[str, ...], ptx: bool, sass: bool, spec: bool, out: Path | None, engine: str | None, config: str | None,
         device: str | None, arch: str | None) -> None:
    """The kernels of CASE as text."""
    from ..codegen.render import render
    from ..runtime.assembler import assemble, disassemble

    problem, target = problem_of(words), planning_info(device, arch)
    chosen, chosen_config, why = pick(problem, target, engine, config)
    build = chosen.build_steps(problem, chosen_config, target)
    head = f"// {chosen.id} {chosen_config.name} ({why}): {len(build.steps)} kernels, {build.workspace_bytes} bytes of workspace"
    click.echo(head, err=True)
    for number, step in enumerate(build.steps):
        text = render(step.spec)
        parts = []
        if spec:
            args = "\n".join(f"//   {p.type} {p.name} = {a}" for p, a in zip(step.spec.params, step.args, strict=True))
            head = f"// {step.spec.symbol}: grid {step.grid}, {step.spec.threads} threads\n// {step.spec.describe()}"
            parts.append(("spec", f"{head}\n{args}\n"))
        if ptx or not (sass or spec):
            parts.append(("ptx", text))
        if sass:
            made = assemble(text, target.arch)
            code = disassemble(made.cubin)
            if code is None:
                raise InvalidArgument("dump --sass: nvdisasm is not installed or refuses the cubin (pip install 'oxidnn[inspect]').")
            head = f"// {step.spec.symbol}: {made.registers} registers, {made.spill_bytes} bytes spilled, {made.smem_bytes} of smem"
            parts.append(("sass", f"{head}\n{code}"))
        for kind, body in parts:
            if out is None:
                click.echo(body)
            else:
                out.mkdir(parents=True, exist_ok=True)
                path = out / f"{number}_{step.spec.symbol}.{kind}"
                path.write_text(body, encoding="utf-8")
                click.echo(str(path))
