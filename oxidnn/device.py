"""Frozen facts about a device: from a backend, or from a table where there is none (CI and the emulator)."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from .errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """What engines may know of the device they plan for. Sizes in bytes; rates of the data sheet or measured."""

    name: str
    arch: str  # the PTX target kernels are written for: "sm_80", "sm_90a", ...
    capability: tuple[int, int]
    num_sms: int
    smem_per_cta: int
    smem_per_sm: int
    l2_bytes: int
    bandwidth_gbs: float
    tensor_tflops: float  # dense bf16 with f32 accumulation
    fma_tflops: float  # f32 FMA
    is_emulated: bool = False

    def at_least(self, major: int, minor: int = 0) -> bool:
        return self.capability >= (major, minor)


KNOWN: dict[str, DeviceInfo] = {
    i.arch: i
    for i in (
        DeviceInfo("T4", "sm_75", (7, 5), 40, 65536, 65536, 4 << 20, 320, 65, 8.1),
        DeviceInfo("A100", "sm_80", (8, 0), 108, 166912, 167936, 40 << 20, 1555, 312, 19.5),
        DeviceInfo("A40", "sm_86", (8, 6), 84, 101376, 102400, 6 << 20, 696, 150, 37.4),
        DeviceInfo("L40", "sm_89", (8, 9), 142, 101376, 102400, 96 << 20, 864, 181, 90.5),
        DeviceInfo("H100", "sm_90a", (9, 0), 132, 232448, 233472, 50 << 20, 3030, 790, 60),
        DeviceInfo("B200", "sm_100a", (10, 0), 148, 232448, 233472, 126 << 20, 7700, 2250, 75),
        DeviceInfo("RTX 5090", "sm_120a", (12, 0), 170, 101376, 102400, 96 << 20, 1792, 210, 105),
    )
}
_ARCH_OF_CAPABILITY = {(9, 0): "sm_90a", (10, 0): "sm_100a", (12, 0): "sm_120a"}


def arch_of(capability: tuple[int, int]) -> str:
    """The target kernels are written for on a device of this compute capability."""
    return _ARCH_OF_CAPABILITY.get(capability, f"sm_{capability[0]}{capability[1]}")


def known_device(arch: str) -> DeviceInfo:
    """Facts of a representative device of `arch` ("sm_90" means "sm_90a"), for planning without one."""
    found = KNOWN.get(arch) or KNOWN.get(arch + "a")
    if found is None:
        raise InvalidArgument(f"device: no architecture {arch!r} is known (known: {', '.join(KNOWN)}).")
    return found


def emulated_device(arch: str) -> DeviceInfo:
    return replace(known_device(arch), name=f"emulated {known_device(arch).arch}", is_emulated=True)


def parse_device(text: str) -> tuple[str, str | int]:
    """("cuda", 0) of "cuda:0" or "cuda"; ("emu", "sm_90a") of "emu:sm_90a", "emu" meaning sm_90a."""
    match = re.fullmatch(r"(cuda)(?::(\d+))?|(emu)(?::(sm_\d+a?))?", text)
    if match is None:
        raise InvalidArgument(f"device: {text!r} is no device (allowed: None, 'cuda', 'cuda:N', 'emu', 'emu:sm_XY').")
    if match[1]:
        return "cuda", int(match[2] or 0)
    return "emu", known_device(match[4] or "sm_90a").arch
