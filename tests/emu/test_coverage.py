"""Every form of the instruction table up to sm_90 decodes, except the families named here."""

from __future__ import annotations

import re
from collections import defaultdict

import pytest

from oxidnn.emu import load
from oxidnn.errors import PtxError
from oxidnn.ptx.parser import parse
from oxidnn.ptx.validate import validate
from tests.ptx.instances import instances, kernel, least

TARGETS = {"sm_80", "sm_86", "sm_89", "sm_90", "sm_90a"}
REFUSED = (
    ".b1.b1.", ".oob.", "%b128_0, shared_space", "16_0, shared_space",  # binary matrices, fma.oob, addresses of 16 and 128 bits
)  # fmt: skip


def test_every_form_decodes() -> None:
    refused: dict[str, list[str]] = defaultdict(list)
    count = 0
    for form, text in instances():
        version, target = least(form)
        if target not in TARGETS:
            continue
        count += 1
        try:
            load(parse(kernel([text], min(version, (9, 0)), target)))
        except PtxError as error:
            if not any(part in text for part in REFUSED):  # all of what it refuses must be named above
                refused[form.opcode].append(str(error))
    assert count > 1500
    assert not refused, {name: errors[:3] for name, errors in refused.items()}


SPOILED = {
    "unknown opcode": lambda opcode, rest: f"{opcode}x{rest}",
    "unknown modifier first": lambda opcode, rest: f"{opcode}.whatever{rest}",
    "unknown modifier last": lambda opcode, rest: opcode + re.sub(r"^((?:\.[\w:]+)*)", r"\1.whatever", rest),
    "operands more": lambda opcode, rest: opcode + rest.rstrip("; ") + (", 7, 7, 7;" if " " in f"{opcode}{rest}".strip() else " 7, 7;"),
}


@pytest.mark.parametrize("spoil", SPOILED)
def test_the_table_refuses_what_it_does_not_know(spoil: str) -> None:
    """Every fifth form of the table, spoiled: refused by the table itself and, before anything runs, by the emulator, with the line."""
    taken = []
    count = 0
    for form, text in list(instances())[list(SPOILED).index(spoil) :: 5]:
        version, target = least(form)
        if target not in TARGETS or any(part in text for part in REFUSED):
            continue
        guard, opcode, rest = re.fullmatch(r"\s*(@!?%\w+ )?(\w+)(.*)", text, re.DOTALL).groups()  # type: ignore[union-attr]
        wrong = (guard or "") + SPOILED[spoil](opcode, rest)
        count += 1
        text = kernel([wrong], min(version, (9, 0)), target)
        for name, judge in (("table", validate), ("emulator", load)):
            try:
                judge(parse(text))
                taken.append(f"{name}: {wrong}")
            except PtxError as error:
                assert str(error).startswith("line "), str(error)
    assert count > 300
    assert not taken, taken[:20]
