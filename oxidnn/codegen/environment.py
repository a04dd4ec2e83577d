"""The Jinja environment: delimiters that do not collide with PTX, strict about unknown names, templates beside the package.

Delimiters: `${ value }`, line statement `//% ...`, line comment `//# ...`, block `<% ... %>`, comment `<# ... #>`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import switches

if TYPE_CHECKING:
    import jinja2


def template_directories() -> list[Path]:
    """Where templates are looked for: OXIDNN_TEMPLATE_PATH first, then the package's own."""
    package = Path(__file__).resolve().parent.parent
    own = package / "ptx_templates"
    if not own.is_dir():  # an editable install keeps them beside the package
        own = package.parent / "ptx_templates"
    user = [Path(p) for p in (switches.get("OXIDNN_TEMPLATE_PATH") or "").split(os.pathsep) if p]
    return [*user, own]


@cache
def environment() -> jinja2.Environment:
    return make_environment()


def make_environment(extensions: Sequence[Any] = ()) -> jinja2.Environment:
    """A fresh environment; `extensions`: Jinja's, by class."""
    import jinja2

    env = jinja2.Environment(
        loader=jinja2.FileSystemLoader([str(p) for p in template_directories()]),
        variable_start_string="${", variable_end_string="}", block_start_string="<%", block_end_string="%>",
        comment_start_string="<#", comment_end_string="#>", line_statement_prefix="//%", line_comment_prefix="//#",
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined,
        auto_reload=False, autoescape=False, cache_size=400, extensions=list(extensions),
    )
    env.filters["f32"] = f32_literal
    env.filters["f64"] = f64_literal
    env.globals["range"] = range
    env.globals["zip"] = zip
    env.globals["enumerate"] = enumerate
    env.globals["log2"] = lambda n: int(n).bit_length() - 1
    return env


def f32_literal(value: float) -> str:
    """The exact f32 literal `0fXXXXXXXX` of a Python float."""
    return f"0f{struct.unpack('<I', struct.pack('<f', value))[0]:08X}"


def f64_literal(value: float) -> str:
    return f"0d{struct.unpack('<Q', struct.pack('<d', value))[0]:016X}"
