"""A CPU machine that runs PTX with checkers: the second implementation of the device."""

from oxidnn.emu.memory import GlobalMemory
from oxidnn.emu.program import Program, load
from oxidnn.emu.trace import Counters

__all__ = ["Counters", "GlobalMemory", "Program", "load"]
