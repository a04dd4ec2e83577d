"""render(spec) -> PTX text: a pure function. The same text goes to the assembler, the emulator and the driver."""

from __future__ import annotations

import itertools
from functools import lru_cache

from .environment import environment
from .spec import KernelSpec


@lru_cache(maxsize=4096)
def render(spec: KernelSpec) -> str:
    """The PTX of `spec`.

    The template sees `spec`, `consts` (short `c`) and `unique(stem)`, which gives label names that differ within the kernel.
    Unknown names raise jinja2.UndefinedError.
    """
    counter = itertools.count()
    template = environment().get_template(spec.template + ".ptx.j2")
    return template.render(spec=spec, consts=spec.consts, c=spec.consts, unique=lambda stem: f"${stem}_{next(counter)}")
