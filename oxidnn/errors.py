"""Every exception and warning of oxidnn, each with a stable code."""

from __future__ import annotations


class OxidnnError(Exception):
    """Base of all errors; `code` is stable across versions and safe to match on."""

    code = "oxidnn"


class InvalidArgument(OxidnnError, ValueError):
    """A bad argument: the message names it, the value got and what is allowed. Nothing was launched or written."""

    code = "invalid-argument"


class Unsupported(OxidnnError, NotImplementedError):
    """No engine takes the problem: the message holds the table engine | reason."""

    code = "unsupported"


class PtxError(OxidnnError):
    """PTX text that the parser, the instruction table or the validator refuses; names the line."""

    code = "ptx"


class AssemblyError(OxidnnError):
    """The assembler refused a kernel: its own line, the PTX around it, the template and the spec."""

    code = "assembly"


class LaunchError(OxidnnError):
    """The device refused a launch or reported a fault; names kernel, grid, arguments and the usual causes."""

    code = "launch"


class EmulatorFault(OxidnnError):
    """A checker of the emulator fired: checker, PTX line, CTA, thread, address and the other side if there is one."""

    code = "emulator-fault"


class NumericsError(OxidnnError, AssertionError):
    """Two results differ by more than the tolerance; names the worst coordinate and how the tolerance was derived."""

    code = "numerics"


class OxidnnWarning(UserWarning):
    """Something works, but not as one would expect (said once per cause)."""


MOST_SHOWN = 400  # characters of a value in a message


def expected(op: str, argument: str, got: object, allowed: object, context: str = "") -> InvalidArgument:
    """The one form of an InvalidArgument message: op, argument, value got, values allowed, and the operands' shapes."""
    tail, text = f" {context}" if context else "", str(got)
    if len(text) > MOST_SHOWN:  # an array, say
        text = f"{' '.join(text[:MOST_SHOWN // 2].split())}..."
    return InvalidArgument(f"{op}: {argument} is {text} (expected {allowed}).{tail}")
