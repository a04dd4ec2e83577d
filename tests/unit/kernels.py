"""Small kernels written by hand, for tests of the layers below the engines."""

from __future__ import annotations

from oxidnn.codegen.spec import KernelSpec, Param, Target


def scale_spec(arch: str = "sm_80", threads: int = 64, **extra: object) -> KernelSpec:
    """y[i] = a * x[i] for i < n, f32; one thread an element."""
    params = (Param("x", "u64"), Param("y", "u64"), Param("n", "u32"), Param("a", "f32"))
    return KernelSpec("test/scale", "scale", Target.for_arch(arch), threads, params, None, **extra)  # type: ignore[arg-type]


def scale_text(spec: KernelSpec, comment: str = "") -> str:
    version = ".".join(map(str, spec.target.ptx))
    cluster = f".reqnctapercluster {spec.cluster}, 1, 1" if spec.cluster > 1 else ""
    return f"""// oxidnn {spec.symbol} {comment}
// spec: {spec.describe()}
.version {version}
.target {spec.target.arch}
.address_size 64
.visible .entry {spec.symbol}(
    .param .u64 x,
    .param .u64 y,
    .param .u32 n,
    .param .f32 a
)
.maxntid {spec.threads}, 1, 1
{cluster}
{{
    .reg .u64 %ptr_x, %ptr_y, %off;
    .reg .u32 %i, %cta, %n;
    .reg .f32 %v, %a;
    .reg .pred %p_inside;
    ld.param.u64 %ptr_x, [x];
    ld.param.u64 %ptr_y, [y];
    ld.param.u32 %n, [n];
    ld.param.f32 %a, [a];
    mov.u32 %i, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mad.lo.u32 %i, %cta, {spec.threads}, %i;
    setp.lt.u32 %p_inside, %i, %n;
    mul.wide.u32 %off, %i, 4;
    add.u64 %ptr_x, %ptr_x, %off;
    add.u64 %ptr_y, %ptr_y, %off;
    @%p_inside ld.global.f32 %v, [%ptr_x];
    @%p_inside mul.rn.f32 %v, %v, %a;
    @%p_inside st.global.f32 [%ptr_y], %v;
    ret;
}}
"""
