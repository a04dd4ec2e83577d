"""The command line: `oxidnn info | explain | dump | tune | bench | repro | emu | cache`. An error is one message and exit code 2."""

from __future__ import annotations

import warnings
from typing import Any

import click

from .. import __version__
from ..errors import OxidnnError, OxidnnWarning
from .cache import cache
from .inspection import dump, explain, info
from .measuring import bench, tune
from .running import emu, repro


class _Group(click.Group):
    """Turns exceptions into messages, and warnings of ours into lines."""

    def invoke(self, ctx: click.Context) -> Any:
        with warnings.catch_warnings():
            warnings.simplefilter("always", OxidnnWarning)
            warnings.showwarning = _show_warning
            try:
                return super().invoke(ctx)
            except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):  # the last: who reads has seen enough
                raise
            except Exception as error:
                if ctx.params.get("debug"):
                    raise
                what = "error" if isinstance(error, (OxidnnError, OSError)) else f"internal error: {type(error).__name__}"
                click.echo(f"oxidnn: {what}: {error}", err=True)
                if not isinstance(error, (OxidnnError, OSError)):
                    click.echo("oxidnn: run with --debug for the traceback", err=True)
                ctx.exit(2)


def _show_warning(message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None,
                  line: str | None = None) -> None:
    click.echo(f"oxidnn: warning: {message}" if issubclass(category, OxidnnWarning) else f"{filename}:{lineno}: {message}", err=True)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.version_option(__version__, prog_name="oxidnn")
def main(debug: bool) -> None:
    """Deep-learning primitives as PTX written at run time.

    A CASE is a line such as "conv_fprop x=bf16[8,64,56,56]nhwc w=bf16[128,64,3,3]nhwc padding=1"; a file of such lines will do where
    several are taken.
    """


for _command in (info, explain, dump, tune, bench, repro, emu, cache):
    main.add_command(_command)
