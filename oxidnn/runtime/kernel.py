"""What a launch is made of, whatever the device: parameter types, their layout in the argument block, and the checks before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from ..codegen.spec import KernelSpec
from ..errors import LaunchError

# PTX parameter type -> layout. Packing by declared type is the point: a Python float handed to a driver goes out as f64.
PARAM_LAYOUT: dict[str, struct.Struct] = {
    t: struct.Struct("<" + code)
    for t, code in (("u64", "Q"), ("s64", "q"), ("u32", "I"), ("s32", "i"), ("f32", "f"), ("f64", "d"), ("b64", "Q"), ("b32", "I"))
}


def param_offsets(spec: KernelSpec) -> tuple[tuple[int, ...], int]:
    """(byte offset of every parameter, bytes of all): each aligned to its size, as the `.param` block is."""
    offsets, end = [], 0
    for param in spec.params:
        size = PARAM_LAYOUT[param.type].size
        end += -end % size
        offsets.append(end)
        end += size
    return tuple(offsets), end


def check_launch(spec: KernelSpec, grid: tuple[int, int, int], args: Sequence[int | float]) -> None:
    """Raises LaunchError unless grid (in CTAs), cluster and arguments fit what the kernel declares."""
    if len(args) != len(spec.params):
        names = ", ".join(p.name for p in spec.params)
        raise LaunchError(f"{spec.symbol}: {len(args)} arguments given (expected {len(spec.params)}: {names}).")
    x, y, z = grid
    if not (0 < x < 2**31 and 0 < y < 65536 and 0 < z < 65536):
        raise LaunchError(f"{spec.symbol}: grid is {grid} (expected x in 1..2147483647, y and z in 1..65535).")
    if x % spec.cluster:
        raise LaunchError(f"{spec.symbol}: grid x is {x} CTAs, no multiple of the cluster of {spec.cluster}.")
    for index, value in enumerate(args):
        check_value(spec, index, value)


def check_value(spec: KernelSpec, index: int, value: int | float) -> None:
    """Raises LaunchError unless `value` can be packed as parameter `index`."""
    param = spec.params[index]
    try:
        PARAM_LAYOUT[param.type].pack(value)
    except (struct.error, OverflowError) as error:
        raise LaunchError(f"{spec.symbol}: argument {param.name} is {value!r}, which is no {param.type} ({error}).") from None


def describe_launch(spec: KernelSpec, grid: tuple[int, int, int], values: Sequence[int | float]) -> str:
    """The lines of a LaunchError: kernel, grid, block, shared memory, arguments by name and value, spec."""
    args = ", ".join(f"{p.name}={v:#x}" if p.type in ("u64", "b64") and isinstance(v, int) else f"{p.name}={v}"
                     for p, v in zip(spec.params, values, strict=True))
    return (f"  kernel {spec.symbol}: grid {grid} CTAs, {spec.threads} threads, cluster {spec.cluster}, "
            f"{spec.dynamic_smem} bytes of dynamic shared memory\n  arguments: {args}\n  spec: {spec.describe()}")
