"""PTX as a language: parse, look up, validate and print kernels. No templates, no device."""

from oxidnn.ptx.isa import Effect, Form, lookup
from oxidnn.ptx.parser import parse
from oxidnn.ptx.printer import print_module, same
from oxidnn.ptx.validate import validate

__all__ = ["Effect", "Form", "lookup", "parse", "print_module", "same", "validate"]
