"""What a launch is made of, whatever the device: parameter types, their layout in the argument block, and the checks before it."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache
from typing import Any

from ..codegen.spec import KernelSpec, Param, TensorMapSpec
from ..device import DeviceInfo
from ..errors import LaunchError

Value = int | float | TensorMapSpec | tuple[int, ...]

# PTX parameter type -> layout. Packing by declared type is the point: a Python float handed to a driver goes out as f64.
PARAM_LAYOUT: dict[str, struct.Struct] = {
    t: struct.Struct("<" + code)
    for t, code in (("u64", "Q"), ("s64", "q"), ("u32", "I"), ("s32", "i"), ("f32", "f"), ("f64", "d"), ("b64", "Q"), ("b32", "I"))
}
TENSOR_MAP_BYTES, TENSOR_MAP_ALIGN = 128, 64
ELEMENT_BYTES = {
    "u8": 1, "u16": 2, "f16": 2, "bf16": 2, "u32": 4, "s32": 4, "f32": 4, "f32_ftz": 4, "tf32": 4, "u64": 8, "s64": 8, "f64": 8,
}


MAX_PARAM_BYTES = 32764  # of all parameters of a kernel, from PTX 8.1 on; 4096 before
OLD_MAX_PARAM_BYTES = 4096


@cache
def table_layout(element: str, length: int) -> struct.Struct:
    """The layout of a table of `length` numbers."""
    return struct.Struct(f"<{length}{PARAM_LAYOUT[element].format[1:]}")


def pack(param: Param, value: Any) -> bytes:
    """The bytes of a number, or of a table's numbers. Raises struct.error or OverflowError for what does not fit."""
    return table_layout(param.element, param.length).pack(*value) if param.length else PARAM_LAYOUT[param.type].pack(value)


def param_size(param: Param) -> int:
    if param.type == "tensor_map":
        return TENSOR_MAP_BYTES
    return PARAM_LAYOUT[param.element].size * (param.length or 1)


def param_offsets(spec: KernelSpec) -> tuple[tuple[int, ...], int]:
    """(byte offset of every parameter, bytes of all): numbers aligned to their size, tensor maps to 64, as the `.param` block is."""
    offsets, end = [], 0
    for param in spec.params:
        size = param_size(param)
        end += -end % (TENSOR_MAP_ALIGN if param.type == "tensor_map" else PARAM_LAYOUT[param.element].size)
        offsets.append(end)
        end += size
    return tuple(offsets), end


def check_shared_memory(spec: KernelSpec, device: DeviceInfo) -> None:
    """Raises LaunchError unless a CTA of the device may have the dynamic shared memory that the kernel declares."""
    if spec.dynamic_smem > device.smem_per_cta:
        raise LaunchError(f"{spec.symbol}: {spec.dynamic_smem} bytes of dynamic shared memory (expected at most {device.smem_per_cta} on "
                          f"{device.name}).")


def check_launch(spec: KernelSpec, grid: tuple[int, int, int], args: Sequence[Value]) -> None:
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
        param = spec.params[index]
        if param.type == "tensor_map":
            if not isinstance(value, TensorMapSpec):
                raise LaunchError(f"{spec.symbol}: argument {param.name} is {value!r} (expected a TensorMapSpec).")
            reason = tensor_map_error(value)
            if reason:
                raise LaunchError(f"{spec.symbol}: tensor map {param.name}: {reason}.")
        else:
            check_value(spec, index, value)


def check_value(spec: KernelSpec, index: int, value: Any) -> None:
    """Raises LaunchError unless parameter `index` can be set to `value`: a number of its type, the address a tensor map starts at."""
    param = spec.params[index]
    if param.type == "tensor_map":
        if not isinstance(value, int) or value % 16 or not 0 < value < 1 << 64:
            shown = hex(value) if isinstance(value, int) else repr(value)
            raise LaunchError(f"{spec.symbol}: tensor map {param.name}: address is {shown} (expected a multiple of 16 above 0).")
        return
    try:
        pack(param, value)
    except (struct.error, OverflowError, TypeError) as error:
        raise LaunchError(f"{spec.symbol}: argument {param.name} is {value!r}, which is no {param.type} ({error}).") from None


def tensor_map_error(m: TensorMapSpec) -> str:
    """Why the hardware would refuse the map, naming the field, its value and what is allowed; "" for a legal one."""
    if m.dtype not in ELEMENT_BYTES:
        return f"dtype is {m.dtype!r} (expected one of {', '.join(ELEMENT_BYTES)})"
    size, rank = ELEMENT_BYTES[m.dtype], len(m.dims)
    if not 1 <= rank <= 5:
        return f"dims has {rank} entries (expected 1 to 5)"
    for name, values, length in (("strides", m.strides, rank - 1), ("element_strides", m.element_strides or (1,) * rank, rank),
                                 ("box", m.box, 2 if m.corners else rank)):
        if len(values) != length:
            return f"{name} has {len(values)} entries (expected {length} for rank {rank}{', im2col' if m.corners else ''})"
    box_limits = [(1, 256), (1, 1024)] if m.corners else [(1, 256)] * rank
    for name, values, limits, multiple in (
        ("dims", m.dims, [(1, 1 << 32)] * rank, 1), ("strides", m.strides, [(0, (1 << 40) - 16)] * (rank - 1), 16),
        ("element_strides", m.element_strides or (1,) * rank, [(1, 8)] * rank, 1), ("box", m.box, box_limits, 1),
    ):
        for at, (value, (least, most)) in enumerate(zip(values, limits, strict=True)):
            if not least <= value <= most or value % multiple:
                of = f" and a multiple of {multiple}" if multiple > 1 else ""
                return f"{name}[{at}] is {value} (expected {least} to {most}{of})"
    if m.swizzle not in (0, 32, 64, 128):
        return f"swizzle is {m.swizzle} (expected 0, 32, 64 or 128)"
    inner = m.box[0] * size
    if inner % 16:
        return f"box[0] is {m.box[0]} elements of {size} bytes (expected a multiple of 16 bytes)"
    if m.swizzle and inner > m.swizzle:
        return f"box[0] is {inner} bytes (expected at most the swizzle span of {m.swizzle})"
    if m.l2_promotion not in (0, 64, 128, 256):
        return f"l2_promotion is {m.l2_promotion} (expected 0, 64, 128 or 256)"
    if m.fills_nan and m.dtype[0] in "us":
        return f"fills_nan is True for dtype {m.dtype} (expected a floating type)"
    if m.corners is not None:
        if rank < 3:
            return f"dims has {rank} entries (expected 3 to 5 for im2col)"
        bits = {3: 16, 4: 8, 5: 5}[rank]
        least, most = -(1 << bits - 1), (1 << bits - 1) - 1
        for name, corner in zip(("lower", "upper"), m.corners, strict=True):
            if len(corner) != rank - 2:
                return f"the {name} corner has {len(corner)} entries (expected {rank - 2}, in W, H, D order)"
            for at, value in enumerate(corner):
                if not least <= value <= most:
                    return f"the {name} corner[{at}] is {value} (expected {least} to {most} for rank {rank})"
    return ""


def describe_launch(spec: KernelSpec, grid: tuple[int, int, int], values: Sequence[Any]) -> str:
    """The lines of a LaunchError: kernel, grid, block, shared memory, arguments by name and value, spec."""
    args = ", ".join(f"{p.name}={v:#x}" if p.type in ("u64", "b64") and isinstance(v, int) else f"{p.name}={v}"
                     for p, v in zip(spec.params, values, strict=True))
    return (f"  kernel {spec.symbol}: grid {grid} CTAs, {spec.threads} threads, cluster {spec.cluster}, "
            f"{spec.dynamic_smem} bytes of dynamic shared memory\n  arguments: {args}\n  spec: {spec.describe()}")
