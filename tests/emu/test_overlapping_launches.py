"""Programmatic dependent launch: a kernel that may start before the one ahead of it has ended waits before it touches global memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxidnn.errors import EmulatorFault
from tests.emu.running import HEADER, SCHEDULES, launch

# y[i] = x[i] + 1
ADD_ONE = HEADER + """
.visible .entry add_one(.param .u64 x, .param .u64 y) {{
.reg .b64 %x, %y, %at; .reg .b32 %v, %thread; .reg .pred %p;
ld.param.u64 %x, [x]; ld.param.u64 %y, [y]; mov.u32 %thread, %tid.x; mul.wide.u32 %at, %thread, 4; add.u64 %x, %x, %at; add.u64 %y, %y, %at;
griddepcontrol.launch_dependents;
setp.lt.u32 %p, %thread, 32;
{before}
ld.global.u32 %v, [%x]; add.u32 %v, %v, 1;
{between}
st.global.u32 [%y], %v;
ret;
}}"""


def run(schedule: Any, follows: bool, **at: str) -> np.ndarray:
    x, y = np.arange(64, dtype=np.uint32), np.full(64, 0xFFFFFFFF, np.uint32)
    text = ADD_ONE.format(**{"before": "", "between": "", **at})
    launch(text, 1, 64, [x, y], checkers="all", schedule=schedule, follows=follows)
    np.testing.assert_array_equal(y, x + 1)
    return y


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_who_waits_first_raises_no_alarm(schedule: Any) -> None:
    run(schedule, True, before="griddepcontrol.wait;")


def test_a_launch_that_nothing_overlaps_need_not_wait() -> None:
    run("lowest_pc", False)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("at", "text"), [("between", "griddepcontrol.wait;"), ("before", "@%p griddepcontrol.wait;"), ("before", "")])
def test_who_waits_too_late_or_never_is_found(schedule: Any, at: str, text: str) -> None:
    with pytest.raises(EmulatorFault, match=r"\[race\] a read of global memory before griddepcontrol.wait"):
        run(schedule, True, **{at: text})


def test_a_launch_in_which_nobody_waits_is_found() -> None:
    """The launch behind it waits for its end, and would take that of the launch before it for granted."""
    with pytest.raises(EmulatorFault, match="ends without griddepcontrol.wait"):
        launch(HEADER + ".visible .entry nothing() { ret; }", 3, 32, [], checkers="all", follows=True)
