"""render(spec) -> PTX text: a pure function. The same text goes to the assembler, the emulator and the driver."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from . import turing
from .environment import environment, template_directories
from .spec import KernelSpec

if TYPE_CHECKING:
    import jinja2


@dataclass(frozen=True, slots=True)
class Source:
    """A kernel's text, rendered only if somebody reads it (`str`): its digest is known from the spec alone.

    So a process that finds the cubin in the store never compiles a template.
    """

    spec: KernelSpec

    def __str__(self) -> str:
        return render(self.spec)

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of everything the text depends on: the spec, the templates, and the code whose methods they call."""
        return hashlib.sha256(f"{sources_digest()} {self.spec!r}".encode()).hexdigest()


@cache
def sources_digest() -> str:
    """SHA-256 (hex) of all templates, of the modules whose code they call (this room, the engines' Consts), and Jinja's version."""
    digest = hashlib.sha256(version("jinja2").encode())
    package = Path(__file__).resolve().parent.parent
    for directory, pattern in (*((d, "**/*.j2") for d in template_directories()), (package, "codegen/**/*.py"), (package, "engines/*.py"),
                               (package, "dtypes.py")):
        for path in sorted(directory.glob(pattern)):
            digest.update(path.relative_to(directory).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=256)
def render(spec: KernelSpec) -> str:
    """The PTX of `spec`.

    The template sees `spec`, `consts` (short `c`) and `unique(stem)`, which gives label names that differ within the kernel.
    Unknown names raise jinja2.UndefinedError.
    """
    text = render_in(environment(), spec)
    return turing.lower(text) if spec.target.capability < (8, 0) else text


def render_in(environment: jinja2.Environment, spec: KernelSpec) -> str:
    """What the templates of an environment make of `spec`."""
    counter = itertools.count()
    template = environment.get_template(spec.template + ".ptx.j2")
    return template.render(spec=spec, consts=spec.consts, c=spec.consts, unique=lambda stem: f"${stem}_{next(counter)}")
