"""Which line of which template produced each line of a kernel's text: found by rendering once more, with marks in the templates' data.

Only asked for when something is to be reported; the text that ships knows nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from .environment import environment, make_environment
from .render import render, render_in
from .spec import KernelSpec

if TYPE_CHECKING:
    import jinja2

_MARK = re.compile("\x01([^:\x02]*):(\\d+)\x02")


@lru_cache(maxsize=16)
def origins(spec: KernelSpec) -> tuple[str, ...]:
    """Of every line of `render(spec)`: "lib/mbarrier.ptx.j2:12 for matmul/wgmma_sm90.ptx.j2:240", the second half where the first is no
    line of the kernel's own template. Empty if the templates treat marked text in another way than the text itself."""
    marked = render_in(_marking_environment(), spec)
    if _MARK.sub("", marked) != render_in(environment(), spec) or marked.count("\n") != render(spec).count("\n"):
        return ()
    own, caller = spec.template + ".ptx.j2", ""
    found: list[str] = []
    origin = ""
    for line in marked.split("\n"):
        text, at = "", 0
        is_first = True
        for mark in _MARK.finditer(line):
            text += line[at : mark.start()]
            at = mark.end()
            if mark[1] == own:
                caller = f"{mark[1]}:{mark[2]}"
            if is_first or not text.strip():  # the last mark before the line's first character; without one, that of the line before
                origin, is_first = f"{mark[1]}:{mark[2]}", False
        found.append(origin if origin.partition(":")[0] == own or not caller else f"{origin} for {caller}")
    return tuple(found)


def origin_of(spec: KernelSpec, text: str, line: int) -> str:
    """The origin of a line (counted from 1) of a kernel's text; "" if the text is not what `spec` renders to, or it is not known."""
    if not (environment().loader and spec.template + ".ptx.j2" in environment().list_templates()) or text != render(spec):
        return ""
    found = origins(spec)
    return found[line - 1] if 0 < line <= len(found) else ""


@lru_cache(maxsize=1)
def _marking_environment() -> jinja2.Environment:
    from jinja2.ext import Extension
    from jinja2.lexer import Token, TokenStream

    class Marks(Extension):
        """Puts "\\x01name:line\\x02" before the first character of every line of template data."""

        def filter_stream(self, stream: TokenStream) -> Iterator[Token]:
            tokens = list(stream)
            for token, following in zip(tokens, [*tokens[1:], None], strict=True):
                if token.type == "data":
                    lines = token.value.split("\n")
                    marked = [f"\x01{stream.name}:{token.lineno + i}\x02{line}" for i, line in enumerate(lines)]
                    if not lines[-1] and following is not None and following.type != "variable_begin":
                        marked[-1] = ""  # a statement follows, which has no text of its own
                    yield Token(token.lineno, "data", "\n".join(marked))
                else:
                    yield token

    return make_environment([Marks])
