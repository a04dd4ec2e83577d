"""cache: the cubin store and the tuning database."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ..errors import InvalidArgument
from .arguments import json_option, print_json, print_table

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}


@click.group()
def cache() -> None:
    """Lists, prunes and moves what is cached: cubins and tuning results."""


@cache.command("ls")
@click.option("--tuning", is_flag=True, help="The tuning database's rows instead of the cubins.")
@json_option
def list_entries(tuning: bool, as_json: bool) -> None:
    """What the caches hold."""
    from ..dispatch.tuning_db import TuningDb
    from ..runtime.cubin_store import CubinStore

    if tuning:
        rows = TuningDb.open().entries()
        if as_json:
            print_json([{"gpu": r.gpu, "case": r.problem, "policy": r.policy, "engine": r.engine, "config": r.config, "us": r.us,
                         "reason": r.reason, "version": r.version, "measured_at": r.measured_at} for r in rows])
        else:
            print_table(("gpu", "case", "engine and config", "us", ""), [
                (r.gpu, r.problem, f"{r.engine} {r.config}", "-" if r.us is None else f"{r.us:.2f}", r.reason.partition("\n")[0])
                for r in rows])
        return
    store = CubinStore()
    entries = store.entries()
    if as_json:
        print_json([{"name": e.name, "arch": e.arch, "assembler": e.assembler, "bytes": e.num_bytes, "used": e.used, "path": str(e.path)}
                    for e in entries])
        return
    print_table(("kernel", "arch", "assembler", "bytes", "last used"), [
        (e.name, e.arch, e.assembler, e.num_bytes, time.strftime("%Y-%m-%d %H:%M", time.localtime(e.used))) for e in entries])
    click.echo(f"{len(entries)} cubins, {store.total_bytes()} bytes in {', '.join(str(d) for d in store.directories)}")


@cache.command()
@click.option("--max-bytes", metavar="SIZE", default="1G", show_default=True, help="Cubins kept, most recently used first; e.g. 500M.")
def prune(max_bytes: str) -> None:
    """Removes the least recently used cubins, and tuning rows of engines that are gone or of older sets of engines."""
    from ..dispatch.tuning_db import TuningDb
    from ..runtime.cubin_store import CubinStore

    size = max_bytes.strip().lower().removesuffix("b")
    number, unit = (size[:-1], size[-1]) if size[-1:] in ("k", "m", "g") else (size, "")
    if not number.isdigit():
        raise InvalidArgument(f"cache prune: --max-bytes is {max_bytes!r} (expected a number of bytes, or with K, M or G).")
    freed = CubinStore().prune(int(number) * _UNITS[unit])
    click.echo(f"{freed} bytes of cubins and {TuningDb.open().prune()} tuning rows removed")


@cache.command()
@click.option("--cubins", is_flag=True, help="Only the cubins.")
@click.option("--tuning", is_flag=True, help="Only the tuning database.")
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(cubins: bool, tuning: bool, yes: bool) -> None:
    """Removes everything."""
    from ..dispatch.tuning_db import TuningDb
    from ..runtime.cubin_store import CubinStore

    both = cubins == tuning
    if not yes:
        click.confirm(f"Remove all {'cubins and tuning results' if both else 'cubins' if cubins else 'tuning results'}?", abort=True)
    freed = CubinStore().clear() if cubins or both else 0
    removed = TuningDb.open().clear() if tuning or both else 0
    click.echo(f"{freed} bytes of cubins and {removed} tuning rows removed")


@cache.command("export")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
def export_tuning(path: Path) -> None:
    """Writes the tuning database to PATH: JSON if it ends in .json, else an SQLite file that can be shipped."""
    from ..dispatch.tuning_db import TuningDb

    click.echo(f"{TuningDb.open().export(path)} rows written to {path}")


@cache.command("import")
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option("--prefer", type=click.Choice(("newer", "faster", "theirs", "ours")), default="newer", show_default=True,
              help="Which of two rows of one candidate stays.")
def import_tuning(path: Path, prefer: str) -> None:
    """Merges a tuning database that `cache export` wrote."""
    from ..dispatch.tuning_db import TuningDb

    click.echo(f"{TuningDb.open().import_(path, prefer)} rows taken from {path}")
