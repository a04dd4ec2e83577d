"""Every form of the instruction table up to sm_90 decodes, except the families named here."""

from __future__ import annotations

from collections import defaultdict

from oxidnn.emu import load
from oxidnn.errors import PtxError
from oxidnn.ptx.parser import parse
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
