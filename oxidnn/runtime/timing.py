"""The kernel that keeps a GPU busy while timed launches are queued behind it.

Timing a launch on an idle GPU puts the host's time to launch between the events; behind a spinning kernel only the device's counts.
"""

from __future__ import annotations

from ..codegen.spec import KernelSpec, Param, Target


def spin_spec(arch: str) -> KernelSpec:
    """One thread that spins for `cycles` SM clocks."""
    return KernelSpec("timing/spin", "timing", Target.for_arch(arch), 1, (Param("cycles", "u64"),), None)


def spin_text(spec: KernelSpec) -> str:
    version = ".".join(str(v) for v in spec.target.ptx)
    return f"""// oxidnn {spec.symbol}
// spec: {spec.describe()}
.version {version}
.target {spec.target.arch}
.address_size 64
.visible .entry {spec.symbol}(
    .param .u64 cycles
)
.maxntid 1, 1, 1
{{
    .reg .u64 %begin, %now, %limit;
    .reg .pred %p_early;
    ld.param.u64 %limit, [cycles];
    mov.u64 %begin, %clock64;
$spin:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %begin;
    setp.lt.u64 %p_early, %now, %limit;
    @%p_early bra $spin;
    ret;
}}
"""
