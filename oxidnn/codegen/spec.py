"""KernelSpec: everything a kernel's text depends on, as frozen values. Same spec, same bytes of PTX."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Target:
    """The PTX target and the lowest `.version` whose instructions suffice."""

    arch: str
    ptx: tuple[int, int] = (7, 0)

    @property
    def capability(self) -> tuple[int, int]:
        digits = int("".join(c for c in self.arch if c.isdigit()))
        return digits // 10, digits % 10

    @staticmethod
    def for_arch(arch: str, at_least: tuple[int, int] = (7, 0)) -> Target:
        """The target `arch` at the lowest PTX version that knows it and is not below `at_least`."""
        first = {"sm_75": (6, 3), "sm_80": (7, 0), "sm_86": (7, 1), "sm_89": (7, 8), "sm_90": (7, 8), "sm_90a": (8, 0),
                 "sm_100": (8, 6), "sm_100a": (8, 6), "sm_120": (8, 7), "sm_120a": (8, 7)}[arch]
        return Target(arch, max(first, at_least))


@dataclass(frozen=True, slots=True)
class Param:
    """One kernel parameter. This table generates the .param block, the host packing and the emulator's binding."""

    name: str
    type: str  # "u64" (also pointers), "u32", "s32", "s64", "f32", "f64", "tensor_map" (128 bytes), or a table of them: "u64[40]"

    @property
    def element(self) -> str:
        """The type of a number, or of a table's numbers."""
        return self.type.partition("[")[0]

    @property
    def length(self) -> int:
        """How many numbers a table has; 0 for a plain parameter."""
        return int(self.type.partition("[")[2].rstrip("]") or 0)

    @property
    def declaration(self) -> str:
        """As it stands in the entry's parameter list."""
        if self.type == "tensor_map":
            return f".param .align 64 .b8 {self.name}[128]"
        return f".param .{self.element} {self.name}" + (f"[{self.length}]" if self.length else "")


@dataclass(frozen=True, slots=True)
class TensorMapSpec:
    """A tensor map (CUtensorMap) but for its address: what TMA instructions fetch by. All tuples innermost dimension first.

    dtype: "bf16", "f16", "f32", "f32_ftz", "tf32", "f64", "u8" (also fp8), "u16", "u32", "s32", "u64", "s64". dims in elements, strides
    in bytes of dims 1 and up (dim 0 is packed). box: elements a tile moves per dimension; of an im2col map (corners given)
    its two entries are channels per pixel and pixels per column. corners: (lower, upper) of the bounding box in W, H, D order.
    """

    dtype: str
    dims: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    element_strides: tuple[int, ...] = ()  # () means all 1
    swizzle: int = 0  # bytes of the span: 0, 32, 64, 128
    corners: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    l2_promotion: int = 128
    fills_nan: bool = False


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """What `render` turns into PTX.

    template: path under ptx_templates without ".ptx.j2". consts: the template's own frozen dataclass, the only other thing it
    reads. Grid extents are not here: they belong to the launch. follows: the kernel may start while the launch before it in the stream
    ends; it waits (griddepcontrol.wait) before it touches what that launch writes, or writes what it reads. sm_90 and later.
    """

    template: str
    op: str
    target: Target
    threads: int
    params: tuple[Param, ...]
    consts: Any
    dynamic_smem: int = 0
    cluster: int = 1
    min_ctas_per_sm: int = 1
    max_registers: int = 255  # the engine's stated bound; the resource check fails above it
    follows: bool = False
    suffix: str = field(default="")  # distinguishes the kernels of one op in profiles

    @property
    def symbol(self) -> str:
        stem = self.template.replace("/", "_")
        return "oxi_" + "_".join(p for p in (self.op, stem, self.target.arch, self.suffix) if p).replace(".", "_")

    def describe(self) -> str:
        """One line of JSON: the header of the text and the verbose line. Holds only what the text depends on."""
        return json.dumps(
            {"template": self.template, "op": self.op, "target": self.target.arch, "threads": self.threads,
             "smem": self.dynamic_smem, "cluster": self.cluster, "follows": self.follows, "consts": plain(self.consts)},
            sort_keys=True, default=str)


def plain(value: Any) -> Any:
    """`value` as JSON types, by fields for dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [plain(v) for v in value]
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    return value if isinstance(value, (int, float, str, bool, type(None))) else str(value)
