"""Programmatic dependent launch: a kernel that may start before the one ahead of it has ended waits before it touches global memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from oxidnn.emu import GlobalMemory, load
from oxidnn.errors import EmulatorFault
from oxidnn.ptx.parser import parse
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


def after(first: tuple[int, int], second: tuple[int, int], checkers: str = "all", **at: str) -> list[np.ndarray]:
    """y = x + 1 by two launches, the second of which may overlap the first. first, second: which of four arrays x and y are."""
    arrays, memory = [np.full(64, 10 * i, np.uint32) for i in range(4)], GlobalMemory()
    pointers = [memory.register(a, f"array{i}") for i, a in enumerate(arrays)]
    for which, follows, text in ((first, False, {}), (second, True, at)):
        program = load(parse(ADD_ONE.format(**{"before": "", "between": "", **text})))
        program.launch(memory, 1, 64, [pointers[i] for i in which], checkers="all" if follows else checkers, follows=follows)
    return arrays


def test_what_the_launch_before_does_not_write_may_be_read_early() -> None:
    assert (after((0, 1), (2, 3), between="griddepcontrol.wait;")[3] == 21).all()
    assert (after((0, 1), (0, 3), between="griddepcontrol.wait;")[3] == 1).all()  # both read it


@pytest.mark.parametrize(("second", "at", "verb"), [
    ((1, 3), "between", "read"), ((2, 0), "", "write"), ((2, 1), "", "write")])
def test_what_the_launch_before_touches_is_found(second: tuple[int, int], at: str, verb: str) -> None:
    with pytest.raises(EmulatorFault, match=rf"\[race\] a {verb} of global memory before griddepcontrol.wait"):
        after((0, 1), second, **({at: "griddepcontrol.wait;"} if at else {}))


def test_a_launch_before_that_nobody_looked_at_may_write_anything() -> None:
    with pytest.raises(EmulatorFault, match=r"\[race\] a read of global memory before griddepcontrol.wait"):
        after((0, 1), (2, 3), checkers="basic", between="griddepcontrol.wait;")


@pytest.mark.parametrize("starts_early", [False, True])
def test_what_launches_before_the_last_wrote_may_be_read_if_that_waited_before_it_let_go(starts_early: bool) -> None:
    """The third launch reads what the first wrote: it has ended if the second waited for it and only then let the third start."""
    arrays, memory = [np.full(64, 10 * i, np.uint32) for i in range(6)], GlobalMemory()
    pointers = [memory.register(a, f"array{i}") for i, a in enumerate(arrays)]
    for which, follows, at in (((0, 1), False, ""), ((2, 3), True, "before"), ((1, 4), True, "between")):
        text = ADD_ONE.format(**({"before": "", "between": ""} | ({at: "griddepcontrol.wait;"} if at else {})))
        if at == "before" and not starts_early:
            text = text.replace("griddepcontrol.launch_dependents;", "").replace("ret;", "griddepcontrol.launch_dependents; ret;")

        def go(text: str = text, which: tuple[int, int] = which, follows: bool = follows) -> None:
            load(parse(text)).launch(memory, 1, 64, [pointers[i] for i in which], checkers="all", follows=follows)

        if which == (1, 4) and starts_early:
            with pytest.raises(EmulatorFault, match=r"\[race\] a read of global memory before griddepcontrol.wait"):
                go()
        else:
            go()
