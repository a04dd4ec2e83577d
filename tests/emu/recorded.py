"""What an H100 answers, recorded once for CI: small kernels whose results go to vectors/recorded.npz, run again in the emulator by test_recorded.

    python -m tests.emu.recorded FILE [GROUP ...]

runs the cases on the GPU and writes FILE: the results by case, of long ones every 256th and a checksum of each 1024. A case that faults is
left out and reported; the rest of its group goes on in a fresh process.
"""

# ruff: noqa: E501 (tables, lines of PTX)

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import tempfile
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from oxidnn.codegen.spec import TensorMapSpec
from oxidnn.emu.tensor_map import CORNER_BITS, TYPES
from oxidnn.errors import AssemblyError, LaunchError
from oxidnn.runtime.emu_backend import encoded
from oxidnn.runtime.kernel import ELEMENT_BYTES
from tests.emu.hopper import Kernel, Map, box_to_global, image, multiply, run

FILE = Path(__file__).parent / "vectors" / "recorded.npz"
Run = Callable[[Any], np.ndarray]
CASES: dict[str, dict[str, Run]] = {}  # group, case: from a backend to the result


# -- inputs: the same on every machine and in every version of NumPy


def words(n: int, seed: int, bits: int = 64) -> np.ndarray:
    """n words of splitmix64, of their highest `bits`."""
    with np.errstate(over="ignore"):
        z = (np.arange(n, dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return (z ^ (z >> np.uint64(31))) >> np.uint64(64 - bits)


SPECIAL = np.array(
    [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000, 0x7F7FFFFF, 0xFF7FFFFF,
     0x3F800000, 0xBF800000, 0x3F000000, 0xBF000000, 0x3FC00000, 0x40200000, 0x4B000000, 0x4B7FFFFF, 0x4EFFFFFF, 0x4F000000, 0xCF000000, 0x4F800000, 0x5F000000,
     0x477FE000, 0x477FF000, 0x477FEFFF, 0x33000000, 0x33000001, 0x387FC000], np.uint32)  # fmt: skip


def singles(n: int, seed: int = 1) -> np.ndarray:
    """f32: special values, random patterns, half integers, exponents around 1, and low bits at and beside the ties of 16 bits and tf32."""
    bits = words(n, seed, 32).astype(np.uint32)
    part = n // 4
    ties = np.array([0x8000, 0x7FFF, 0x8001, 0x1000, 0x0FFF, 0x1001, 0, 0x18000], np.uint32)
    bits[part : 2 * part] = (bits[part : 2 * part] & np.uint32(0xFFFE0000)) + ties[np.arange(part) % 8]
    bits[2 * part : 3 * part] = (words(part, seed + 1, 13).astype(np.float32) / 2 - 2048).view(np.uint32)
    bits[3 * part :] = (bits[3 * part :] & np.uint32(0x83FFFFFF)) | np.uint32(0x3C000000)
    bits[: len(SPECIAL)] = SPECIAL
    return bits.view(np.float32)


def doubles(n: int, seed: int = 3) -> np.ndarray:
    """f64: f32 values with low bits at and beside the ties of f32, and some that f32 does not reach."""
    with np.errstate(invalid="ignore"):
        bits = singles(n, seed).astype(np.float64).view(np.uint64) & ~np.uint64(0x3FFFFFFF)
    ties = np.array([0x10000000, 0x0FFFFFFF, 0x10000001, 0, 0x30000000, 1], np.uint64)
    bits += ties[np.arange(n) % 6]
    bits[-n // 8 :] = words(n // 8, seed, 64)
    return bits.view(np.float64)


def whole(n: int, dtype: Any, seed: int = 5) -> np.ndarray:
    """Integers of every magnitude."""
    size = 8 * np.dtype(dtype).itemsize
    raw = words(n, seed) >> (np.uint64(64 - size) + words(n, seed + 1, 6) % np.uint64(size))
    raw[: n // 2] = np.where(words(n // 2, seed + 2, 1) == 1, raw[: n // 2], ~raw[: n // 2])
    return raw.astype(f"u{size // 8}").view(dtype)


FLOATS: dict[str, Any] = {"f16": np.float16, "bf16": ml_dtypes.bfloat16, "tf32": np.float32, "f32": np.float32, "f64": np.float64, "e4m3": ml_dtypes.float8_e4m3fn,
                          "e5m2": ml_dtypes.float8_e5m2}
CODES = {"f16": "u2", "bf16": "u2", "tf32": "u4", "f32": "u4", "f64": "u8", "e4m3": "u1", "e5m2": "u1", "s8": "u1", "u8": "u1", "s4": "u1", "u4": "u1", "s32": "u4"}
REACH = {"f16": 14, "bf16": 30, "tf32": 30, "f32": 30, "f64": 30, "e4m3": 6, "e5m2": 12}


def operands(type_: str, shape: tuple[int, int], seed: int, raw: bool = True) -> np.ndarray:
    """Codes for tensor cores, row by row of another kind: like exponents (sums cancel), wide exponents, near the least, any bits at all."""
    n, code = shape[0] * shape[1], np.dtype(CODES[type_])
    any_ = words(n, seed, 8 * code.itemsize).astype(code).reshape(shape)
    if type_ not in FLOATS:
        return any_
    mantissa = 1 + words(n, seed + 1, 24).astype(np.float64) / 2**24
    sign = 1 - 2.0 * words(n, seed + 2, 1)
    spread = words(n, seed + 3, 16).astype(np.float64) / 65536
    reach = REACH[type_]
    low = {"f16": -16, "e4m3": -8, "e5m2": -16}.get(type_, -60)
    exponents = [np.floor(4 * spread) - 2, np.floor(2 * reach * spread) - reach, np.floor(6 * spread) + low]
    kinds = [(sign * mantissa * 2.0**e).astype(FLOATS[type_]).view(code).reshape(shape) for e in exponents]
    kind = np.arange(shape[0]) % (4 if raw else 3)
    return np.choose(kind[:, None], [*kinds, any_]) if raw else np.choose(kind[:, None], kinds)


# -- conversions


def elementwise(instruction: str, inputs: Sequence[np.ndarray], out: Any, backend: Any) -> np.ndarray:
    """One thread for each element: `instruction` sets %y from %x (and %z). Results of 8 bits come as 32."""
    n, size = len(inputs[0]), max(np.dtype(out).itemsize, 2)
    loads = "".join(
        f".reg .b{8 * max(a.itemsize, 2)} %{v}; mul.wide.u32 %rd0, %r1, {a.itemsize}; add.u64 %rd0, %rd0, %{v}in; ld.global.b{8 * a.itemsize} %{v}, [%rd0];\n"
        for v, a in zip("xz", inputs, strict=False))
    kernel = Kernel(
        "one_" + instruction.split(" ")[0], (*(f"{v}in:u64" for v, _ in zip("xz", inputs, strict=False)), "out:u64"),
        f".reg .b{8 * size} %y;\nmov.u32 %r1, %ctaid.x; mad.lo.u32 %r1, %r1, 128, %thread;\n{loads}{instruction}\n"
        f"mul.wide.u32 %rd0, %r1, {size}; add.u64 %rd0, %rd0, %out; st.global.b{8 * size} [%rd0], %y; ret;")
    result = np.zeros(n, f"u{size}")
    return run(backend, kernel, n // 128, [*inputs, result], [result])[0]


def unary(name: str, source: Callable[[], np.ndarray], out: str, backend: Any) -> np.ndarray:
    return elementwise(f"{name} %y, %x;", [source()], out, backend)


def binary(name: str, out: str, backend: Any) -> np.ndarray:
    return elementwise(f"{name} %y, %x, %z;", [singles(MANY), singles(MANY, 8)], out, backend)


MANY = 1 << 16
HALVES = np.arange(65536, dtype=np.uint16)
WIDTH = {"s8": "u4", "u8": "u4", "s16": "u2", "u16": "u2", "s32": "u4", "u32": "u4", "s64": "u8", "u64": "u8", "f16": "u2", "bf16": "u2", "f32": "u4", "f64": "u8"}


def _conversions() -> dict[str, Run]:
    sources: dict[str, Callable[[], np.ndarray]] = {
        "f32": partial(singles, MANY), "f64": partial(doubles, MANY), "f16": lambda: HALVES, "bf16": lambda: HALVES,
        **{t: partial(whole, MANY, f"{'u' if t[0] == 'u' else 'i'}{int(t[1:]) // 8}") for t in ("s32", "u32", "s64", "u64", "s16", "u16")}}
    names: list[tuple[str, str, str]] = []  # modifiers, to, from
    for source in ("f32", "f16", "f64", "bf16"):
        for to in ("s8", "u8", "s16", "u16", "s32", "u32", "s64", "u64"):
            if source != "bf16" or to not in ("s8", "u8"):  # PTX has none of these
                names += [(mode, to, source) for mode in (("rni", "rzi", "rmi", "rpi") if source == "f32" or to in ("s32", "u8") else ("rzi",))]
    for source in ("s32", "u32", "s64", "u64", "s16", "u16"):
        names += [(mode, "f32", source) for mode in ("rn", "rz", "rm", "rp")]
        names += [("rn", to, source) for to in ("f16", "bf16", "f64")]
    names += [(mode, to, "f32") for to in ("f16",) for mode in ("rn", "rz", "rm", "rp", "rn.ftz", "rn.sat")]
    names += [(mode, "bf16", "f32") for mode in ("rn", "rz", "rn.relu")]
    names += [(mode, to, "f64") for to in ("f32", "f16") for mode in ("rn", "rz", "rm", "rp")]
    names += [("", "f32", "f16"), ("", "f32", "bf16"), ("", "f64", "f16"), ("", "f64", "f32"), ("sat", "f32", "f32"), ("ftz", "f32", "f32"), ("ftz", "f64", "f32"),
              ("", "f64", "bf16"), *((mode, *t) for t in (("bf16", "f16"), ("f16", "bf16"), ("bf16", "f64")) for mode in ("rn", "rz", "rm", "rp"))]
    names += [(mode, t, t) for t in ("f32", "f16", "f64") for mode in ("rni", "rzi", "rmi", "rpi")]
    cases: dict[str, Run] = {}
    for mode, to, source in names:
        name = f"cvt.{mode + '.' if mode else ''}{to}.{source}"
        cases[name] = partial(unary, name, sources[source], WIDTH[to])
    for name in ("cvt.rn.tf32.f32", "cvt.rz.tf32.f32", "cvt.rna.tf32.f32", "cvt.rn.relu.tf32.f32", "cvt.rz.relu.tf32.f32"):
        cases[name] = partial(unary, name, sources["f32"], "u4")
    for mode in ("rn", "rz", "rn.relu", "rz.relu"):
        for to in ("f16x2", "bf16x2"):
            name = f"cvt.{mode}.{to}.f32"
            cases[name] = partial(binary, name, "u4")
    for relu in ("", "relu."):
        for kind in ("e4m3x2", "e5m2x2"):
            name = f"cvt.rn.satfinite.{relu}{kind}.f32"
            cases[name] = partial(binary, name, "u2")
            cases[f"cvt.rn.satfinite.{relu}{kind}.f16x2"] = partial(unary, f"cvt.rn.satfinite.{relu}{kind}.f16x2", lambda: HALVES.view(np.uint32), "u2")
            cases[f"cvt.rn.{relu}f16x2.{kind}"] = partial(unary, f"cvt.rn.{relu}f16x2.{kind}", lambda: HALVES, "u4")
    return cases


CASES["cvt"] = _conversions()


# -- approximations: function of float64, interval of the argument, whether the error counts relative to the result

APPROXIMATIONS: dict[str, tuple[Callable[[np.ndarray], np.ndarray], tuple[float, float], bool]] = {
    "ex2.approx.f32": (np.exp2, (-125, 127), True), "ex2.approx.ftz.f32": (np.exp2, (-125, 127), True), "lg2.approx.f32": (np.log2, (0.5, 2), False),
    "lg2.approx.ftz.f32": (np.log2, (2, 1e30), True), "rcp.approx.f32": (np.reciprocal, (1e-30, 1e30), True), "rcp.approx.ftz.f32": (np.reciprocal, (1, 2), True),
    "sqrt.approx.f32": (np.sqrt, (1e-30, 1e30), True), "sqrt.approx.ftz.f32": (np.sqrt, (1, 4), True), "rsqrt.approx.f32": (lambda x: 1 / np.sqrt(x), (1e-30, 1e30), True),
    "rsqrt.approx.ftz.f32": (lambda x: 1 / np.sqrt(x), (1, 4), True), "sin.approx.f32": (np.sin, (-6.28, 6.28), False), "cos.approx.f32": (np.cos, (-6.28, 6.28), False),
    "tanh.approx.f32": (np.tanh, (-9, 9), True),
}  # fmt: skip


@cache
def sweep(name: str) -> np.ndarray:
    """65536 arguments over the interval: evenly, or by magnitude where it spans many."""
    low, high = APPROXIMATIONS[name][1]
    at = (np.arange(65536) + 0.5) / 65536
    return (np.exp(np.log(low) + at * np.log(high / low)) if low > 0 and high / low > 100 else low + at * (high - low)).astype(np.float32)


def error(name: str, got: np.ndarray) -> float:
    """The worst error of results (f32 bits) over the sweep."""
    function, _, relative = APPROXIMATIONS[name]
    want = function(sweep(name).astype(np.float64))
    return float((np.abs(got.view(np.float32) - want) / (np.abs(want) if relative else 1)).max())


CASES["approx"] = {name: partial(unary, name, partial(sweep, name), "u4") for name in APPROXIMATIONS}
CASES["div"] = {"div.rn.f32": partial(binary, "div.rn.f32", "u4")}
CASES["div"] |= {name: partial(unary, name, partial(singles, MANY), "u4") for name in ("sqrt.rn.f32", "rcp.rn.f32", "sqrt.rz.f32", "rcp.rp.f32")}


# -- matrix products


def mma(name: str, backend: Any) -> np.ndarray:
    """D of 8 warps, [register][thread]: the registers of A, B and C are filled with operands of the types, not placed by any layout."""
    shape, (result, a_type, b_type) = name.split(".")[0], name.split(".")[-3:]
    m, k = int(shape[1 : shape.index("n")]), int(shape[shape.index("k") + 1 :])
    bits = {"f64": 64, "tf32": 32, "f16": 16, "bf16": 16, "s4": 4, "u4": 4}.get(a_type, 8)
    wide = 8 if a_type == "f64" else 4
    counts = (m * k * bits // 256 // wide, 8 * k * bits // 256 // wide, m * 8 // 32 // (2 if result == "f16" else 1))
    # A warp is a row of operands: exponents of every kind in A, of the finite kinds in B, C like A.
    a, b, c = (np.ascontiguousarray(operands(t, (8, 32 * count * wide // np.dtype(CODES[t]).itemsize), 11 * i + 20, i != 1).view(f"u{wide}").reshape(8, count, 32)
               .transpose(1, 0, 2)) for i, (t, count) in enumerate(zip((a_type, b_type, result), counts, strict=True)))
    reg = "f64" if wide == 8 else {"f32": "f32", "s32": "s32"}.get(result, "b32")
    lists = ["{" + ", ".join(f"%{v}{i}" for i in range(count)) + "}" for v, count in zip("abc", counts, strict=True)]
    loads = "".join(f"ld.global.{reg if v == 'c' else f'b{8 * wide}'} %{v}{i}, [%rd{at}+{256 * wide * i}];\n" for at, (v, count) in enumerate(zip("abc", counts, strict=True), 1)
                    for i in range(count))
    kernel = Kernel("mma_" + name, ("ain:u64", "bin:u64", "cin:u64", "out:u64"), f"""
.reg .b{8 * wide} %a<{counts[0]}>, %b<{counts[1]}>; .reg .{reg} %c<{counts[2]}>;
mul.wide.u32 %rd0, %thread, {wide}; add.u64 %rd1, %rd0, %ain; add.u64 %rd2, %rd0, %bin; add.u64 %rd3, %rd0, %cin; add.u64 %rd0, %rd0, %out;
{loads}mma.sync.aligned.{name}.{result} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]};
{"".join(f"st.global.{reg} [%rd0+{256 * wide * i}], %c{i};" for i in range(counts[2]))} ret;""", threads=256)
    out = np.zeros(c.shape, c.dtype)
    return run(backend, kernel, 1, [a, b, c, out], [out])[0]


MMA = [
    *(f"m16n8k{k}.row.col.f32.{t}.{t}" for t in ("f16", "bf16") for k in (8, 16)), "m16n8k16.row.col.f16.f16.f16", "m16n8k8.row.col.f16.f16.f16",
    "m16n8k4.row.col.f32.tf32.tf32", "m16n8k8.row.col.f32.tf32.tf32", *(f"m16n8k32.row.col.s32.{a}.{b}" for a in ("s8", "u8") for b in ("s8", "u8")),
    "m16n8k16.row.col.s32.s8.s8", "m8n8k16.row.col.s32.u8.s8", "m16n8k32.row.col.satfinite.s32.s8.u8", "m16n8k64.row.col.s32.s4.u4",
    *(f"m16n8k32.row.col.f32.{a}.{b}" for a in ("e4m3", "e5m2") for b in ("e4m3", "e5m2")), "m8n8k4.row.col.f64.f64.f64", "m16n8k8.row.col.f64.f64.f64",
    "m16n8k16.row.col.f64.f64.f64"]  # fmt: skip
CASES["mma"] = {f"mma.{name}": partial(mma, name) for name in MMA}


def wgmma(types: tuple[str, str, str], in_registers: bool, steps: int, backend: Any) -> np.ndarray:
    """D (64, 16) = A B^T + C, `steps` times over in a chain."""
    result, a_type, b_type = types
    k = {"f16": 16, "bf16": 16, "tf32": 8}.get(a_type, 32)
    kind = {"s8": np.int8, "u8": np.uint8, **FLOATS}
    d = operands(result, (64, 16), 70).view({"f32": np.float32, "f16": np.float16, "s32": np.int32}[result])
    for step in range(steps):
        a = operands(a_type, (64, k), 40 + 7 * step).view(kind[a_type])
        b = operands(b_type, (16, k), 50 + 7 * step, False).view(kind[b_type])
        d = multiply(backend, a, b, types, init=d, in_registers=in_registers)
    return d.view(CODES[result])


WGMMA = [("f32", "bf16", "bf16"), ("f32", "f16", "f16"), ("f16", "f16", "f16"), ("f32", "tf32", "tf32"), *((r, a, b) for r in ("f32", "f16") for a in ("e4m3", "e5m2")
         for b in ("e4m3", "e5m2")), *(("s32", a, b) for a in ("s8", "u8") for b in ("s8", "u8"))]  # fmt: skip
CASES["wgmma"] = {f"wgmma.{'.'.join(t)}{'.a in registers' if r else ''}": partial(wgmma, t, r, 1 if r else 3) for t in WGMMA for r in (False, True)}


# -- tensor copies


def tensor(dtype: str, dims: tuple[int, ...], seed: int = 90) -> np.ndarray:
    size = {"u8": 1, "f64": 8, "u64": 8, "f32": 4, "tf32": 4, "u32": 4, "s32": 4}.get(dtype, 2)
    return words(int(np.prod(dims)), seed, 8 * size).astype(f"u{size}").reshape(dims[::-1])


def tile_map(dtype: str, x: np.ndarray, box: tuple[int, ...], steps: tuple[int, ...] = (), swizzle: int = 0, nan: bool = False, corners: Any = None) -> TensorMapSpec:
    return TensorMapSpec(dtype, x.shape[::-1], tuple(x.strides[-2::-1]), box, steps, swizzle, corners, fills_nan=nan)


LOADS: dict[str, tuple[Any, ...]] = {  # type, dims, box, element strides, swizzle, NaN fill, coordinates
    "rank 1": ("bf16", (40,), (24,), (), 0, False, (-3,)), "rank 1, end": ("f32", (40,), (24,), (), 0, True, (30,)), "rank 1, past": ("u8", (48,), (32,), (), 0, False, (60,)),
    "rank 2": ("f16", (24, 9), (16, 8), (), 32, True, (-5, -2)), "rank 2, steps": ("f64", (24, 9), (16, 8), (1, 3), 0, False, (3, 4)),
    "rank 2, inner steps": ("bf16", (48, 9), (32, 8), (2, 3), 0, False, (3, 4)), "rank 2, inner steps, swizzled": ("bf16", (96, 9), (32, 8), (2, 1), 64, False, (5, 0)),
    "rank 3": ("u32", (16, 5, 4), (8, 3, 3), (1, 2, 1), 32, False, (10, -1, 2)), "rank 4": ("bf16", (64, 5, 4, 3), (64, 3, 2, 2), (), 128, False, (0, 3, -1, 2)),
    "rank 5": ("f32", (16, 3, 4, 3, 2), (16, 2, 3, 2, 2), (1, 1, 2, 1, 1), 64, True, (1, -1, 2, 1, 1)), "rank 5, u8": ("u8", (128, 4, 3, 2, 2), (128, 2, 2, 2, 2), (), 128, False, (-7, 3, 1, 0, 1)),
    "tf32": ("tf32", (32, 8), (32, 8), (), 128, False, (-2, 1)), "f32_ftz": ("f32_ftz", (32, 8), (32, 8), (), 128, False, (3, 0)), "s64": ("u64", (16, 9), (8, 8), (), 64, False, (12, 3)),
    "wide box": ("u8", (304, 20), (256, 16), (), 0, False, (60, -3)),
}  # fmt: skip


def tma_load(name: str, backend: Any) -> np.ndarray:
    dtype, dims, box, steps, swizzle, nan, at = LOADS[name]
    x = tensor("u32" if dtype.startswith("f32") else dtype, dims)
    steps = steps or (1,) * len(dims)
    extents = [box[0], *(-(-b // s) for b, s in zip(box[1:], steps[1:], strict=True))]  # dimension 0 has no steps
    pitch = swizzle or extents[0] * x.itemsize
    num_bytes = int(np.prod(extents)) * x.itemsize
    out = np.zeros(-(-pitch * int(np.prod(extents[1:])) // 1024) * 1024, np.uint8)
    return run(backend, image(len(dims), len(out)), 1, [Map(tile_map(dtype, x, box, steps, swizzle, nan), x), out, num_bytes, *at], [out])[0]


IM2COL: dict[str, tuple[Any, ...]] = {  # type, dims, box, element strides, swizzle, corners, coordinates, offsets
    "rank 3": ("bf16", (64, 9, 3), (64, 16), (), 128, ((-1,), (-1,)), (0, 5, 0), (2,)), "rank 3, stride": ("f16", (32, 12, 2), (32, 10), (1, 2, 1), 64, ((-2,), (-2,)), (0, 0, 1), (1,)),
    "rank 4, dilation": ("bf16", (40, 7, 6, 2), (32, 20), (), 64, ((-2, -2), (-2, -2)), (16, -2, 1, 0), (4, 2)), "rank 4, f32": ("f32", (20, 5, 6, 3), (16, 24), (1, 2, 2, 1), 64, ((-1, -1), (0, 0)), (4, 1, 3, 1), (1, 0)),
    "rank 4, past the batch": ("bf16", (64, 5, 4, 2), (64, 24), (), 128, ((-1, -1), (-1, -1)), (0, 2, 1, 1), (1, 2)),
    "rank 5": ("bf16", (32, 5, 4, 6, 2), (32, 40), (), 64, ((-1, -1, -1), (-1, -1, -1)), (0, 1, -1, 3, 0), (2, 0, 1)),
    "rank 5, strides": ("u8", (128, 7, 5, 6, 2), (128, 16), (1, 2, 1, 3, 1), 128, ((-2, -1, 0), (-1, -1, -2)), (0, 0, 2, 0, 1), (1, 2, 2)),
}  # fmt: skip


def im2col(name: str, backend: Any) -> np.ndarray:
    dtype, dims, box, steps, swizzle, corners, at, offsets = IM2COL[name]
    x = tensor(dtype, dims)
    out = np.zeros(-(-swizzle * box[1] // 1024) * 1024, np.uint8)
    kernel = image(len(dims), len(out), len(offsets))
    return run(backend, kernel, 1, [Map(tile_map(dtype, x, box, steps, swizzle, corners=corners), x), out, box[0] * box[1] * x.itemsize, *at, *offsets], [out])[0]


STORES: dict[str, tuple[Any, ...]] = {  # type, dims, box, swizzle, coordinates
    "rank 2, start between chunks": ("bf16", (104, 18), (32, 16), 0, (4, 1)), "rank 2, start between chunks, clipped": ("bf16", (104, 18), (64, 16), 128, (68, 10)),
    "rank 2, clipped": ("bf16", (104, 18), (32, 16), 64, (88, 3)), "rank 2, rows clipped": ("bf16", (104, 18), (64, 16), 128, (8, 10)),
    "rank 1": ("f32", (40,), (24,), 0, (28,)), "rank 2": ("bf16", (104, 18), (64, 16), 128, (72, 10)), "rank 2, past": ("bf16", (104, 18), (64, 16), 0, (104, 3)),
    "rank 3": ("u8", (48, 5, 3), (32, 3, 2), 32, (32, 4, 1)), "rank 4": ("f16", (32, 4, 3, 2), (32, 2, 2, 2), 64, (8, 3, 1, 0)),
    "rank 5": ("f64", (16, 3, 2, 2, 2), (8, 2, 2, 1, 2), 64, (10, 2, 0, 1, 0)), "tf32": ("tf32", (32, 8), (32, 8), 128, (0, 2)),
}  # fmt: skip
REDUCED = [*(("add", t) for t in ("f32", "f64", "bf16", "f16", "s32", "u32", "u64", "f32_ftz")), *((o, t) for o in ("min", "max") for t in ("s32", "u32", "s64", "u64", "f16", "bf16")),
           *((o, t) for o in ("and", "or", "xor") for t in ("u32", "u64")), ("inc", "u32"), ("dec", "u32")]  # fmt: skip


def tma_store(name: str, backend: Any) -> np.ndarray:
    dtype, dims, box, swizzle, at = STORES[name]
    y = tensor(dtype, dims, 91)
    pitch = swizzle or box[0] * y.itemsize
    src = words(-(-pitch * int(np.prod(box[1:])) // 1024) * 1024, 92, 8).astype(np.uint8)
    return run(backend, box_to_global(len(dims), len(src)), 1, [Map(tile_map(dtype, y, box, swizzle=swizzle), y), src, *at], [y])[0]


def tma_reduce(operation: str, dtype: str, backend: Any) -> np.ndarray:
    type_ = dtype.removesuffix("_ftz")
    if type_ in FLOATS:
        src, y = (operands(type_, (8, 32), seed) for seed in (93, 97))
        y = np.roll(y, 1, axis=0)  # other exponents beside them
    else:
        src, y = (whole(256, f"u{int(dtype[1:]) // 8}", seed).reshape(8, 32) for seed in (93, 97))
    kernel = box_to_global(2, src.nbytes, operation)
    return run(backend, kernel, 1, [Map(tile_map(dtype, y, (32, 8)), y), src.view(np.uint8).reshape(-1), 0, 0], [y])[0]


# -- tensor maps as the driver encodes them


def random_map(seed: int, dtype: str, rank: int, swizzle: int, promotion: int, is_im2col: bool = False, is_large: bool = False) -> TensorMapSpec:
    """A map the driver takes: its box fits shared memory, its bounding box is not empty."""
    draw = iter(int(w) for w in words(64, seed, 40))
    size = ELEMENT_BYTES[dtype]
    dims = tuple(next(draw) % (1 << 32) + 1 if is_large else 40 + next(draw) % 3000 for _ in range(rank))
    strides = tuple(16 * (next(draw) % ((1 << 36) - 1 if is_large else 1 << 20) + 1) for _ in range(rank - 1))
    steps = tuple(1 + next(draw) % 8 if next(draw) % 2 else 1 for _ in range(rank))
    limit = min((swizzle or 256) // size, 256)
    inner = (1 + next(draw) % limit) * size // 16 * 16 // size or 16 // size
    fills_nan = dtype[0] not in "us" and next(draw) % 4 == 0
    if not is_im2col:
        most = (256, 60, 12, 6)[rank - 2] if rank > 1 else 1
        return TensorMapSpec(dtype, dims, strides, (inner, *(1 + next(draw) % most for _ in range(rank - 1))), steps, swizzle, None, promotion, fills_nan)
    half = 1 << CORNER_BITS[rank] - 1
    lower = tuple(-(next(draw) % min(half, 300)) for _ in range(rank - 2))
    upper = tuple(next(draw) % min(2 * half, 300) - min(half, 39 + low) for low in lower)
    upper = tuple(min(up, half - 1) for up in upper)
    return TensorMapSpec(dtype, dims, strides, (inner, 1 + next(draw) % min(1024, 196608 // (inner * size))), steps, swizzle, (lower, upper), promotion, fills_nan)


def all_maps() -> list[TensorMapSpec]:
    specs = [random_map(10 * i + rank, t, rank, (0, 32, 64, 128)[(i + rank) % 4], (0, 64, 128, 256)[(i + rank) // 4 % 4]) for i, t in enumerate(TYPES) for rank in range(1, 6)]
    specs += [random_map(500 + 10 * i + rank, t, rank, (0, 32, 64, 128)[(i + rank) % 4], (0, 64, 128, 256)[(i + rank) // 4 % 4], True) for i, t in enumerate(TYPES) for rank in (3, 4, 5)]
    specs += [random_map(900 + 4 * i + j, "bf16", 2, span, promotion) for i, span in enumerate((0, 32, 64, 128)) for j, promotion in enumerate((0, 64, 128, 256))]
    specs += [random_map(1000 + 10 * i + rank, t, rank, 0, 128, False, True) for i, t in enumerate(("u8", "f32", "f64")) for rank in range(1, 6)]
    specs += [TensorMapSpec("f64", (64, 9), (s,), (8, 4)) for s in (0, 16, 1 << 31, 1 << 35, 1 << 36, 1 << 37, 1 << 39, (1 << 40) - 16)]
    specs += [TensorMapSpec("u8", (d, 9), (4096,), (16, 4)) for d in (1, 4096, 1 << 31, 1 << 32)]
    zero = (0, 0, 0)
    for rank in (3, 4, 5):
        dims, strides, half = (64, 30, 20, 25, 4)[: rank - 1] + (4,), (128, 3840, 76800, 1920000)[: rank - 1], 1 << CORNER_BITS[rank] - 1
        corners = [(zero, zero), *(((-1,) * (rank - 2), (up,) * (rank - 2)) for up in (-1, 1)), ((-half,) * (rank - 2), (half - 1,) * (rank - 2))]
        corners += [(tuple(-(i == j) for j in range(rank - 2)), zero) for i in range(rank - 2)] + [(zero, tuple(-(i == j) for j in range(rank - 2))) for i in range(rank - 2)]
        specs += [TensorMapSpec("f16", dims, strides, (32, 8), (), 64, (c[0][: rank - 2], c[1][: rank - 2])) for c in corners]
        specs += [TensorMapSpec("f16", dims, strides, (32, pixels), (), 0, (zero[: rank - 2], zero[: rank - 2])) for pixels in (1, 256, 257, 1024)]
    return specs


def map_bytes(backend: Any) -> np.ndarray:
    """(maps, 128); zeros where the driver refuses."""
    specs, out = all_maps(), []
    for i, spec in enumerate(specs):
        address = 0x7F0000000000 + 16 * int(words(1, 2000 + i, 24)[0])
        out.append(np.frombuffer(encoded(spec, address) if backend.device == "emu" else _of_driver(spec, address, backend), np.uint8))
    return np.stack(out)


def _of_driver(spec: TensorMapSpec, address: int, backend: Any) -> bytes:
    from oxidnn.runtime.cuda_backend import _TensorMap

    target = ctypes.create_string_buffer(128)
    try:
        _TensorMap(spec, ctypes.addressof(target), "recorded", backend.context)(address)
    except LaunchError as refused:
        print(f"refused {spec}: {str(refused)[:80]}")
    return target.raw


def at_chunk(case: tuple[Any, ...]) -> tuple[Any, ...]:
    """The case with its box moved back to the 16-byte chunk it begins in."""
    first, *others = case[-1]
    per_chunk = 16 // ELEMENT_BYTES[case[0]]
    return (*case[:-1], (first // per_chunk * per_chunk, *others))


# A box that begins between the 16-byte chunks of a row faults (CUDA_ERROR_ILLEGAL_INSTRUCTION), and does not when nothing but its begin is moved to a chunk.
for table in (LOADS, STORES):
    table |= {f"{n}, at a chunk": at_chunk(c) for n, c in table.items() if at_chunk(c) != c}
FAULTING = {*(f"tma load, {n}" for n, c in LOADS.items() if c[-1][0] * ELEMENT_BYTES[c[0]] % 16), *(f"tma store, {n}" for n, c in STORES.items() if c[-1][0] * ELEMENT_BYTES[c[0]] % 16)}
CASES["tensor maps"] = {"tensor maps": map_bytes}
CASES["tma load"] = {f"tma load, {n}": partial(tma_load, n) for n in LOADS}
CASES["im2col"] = {f"im2col, {n}": partial(im2col, n) for n in IM2COL}
CASES["tma store"] = {f"tma store, {n}": partial(tma_store, n) for n in STORES}
CASES["tma reduce"] = {f"tma reduce, {o} {t}": partial(tma_reduce, o, t) for o, t in REDUCED}


# -- threads that left before a barrier

LEAVING = {"whole warps": "setp.eq.u32 %p0, %warp, 1;", "half warps": "and.b32 %r1, %thread, 16; setp.ne.u32 %p0, %r1, 0;", "odd lanes": "and.b32 %r1, %thread, 1; setp.ne.u32 %p0, %r1, 0;",
           "the first lanes": "setp.eq.u32 %p0, %lane, 0;"}  # fmt: skip


def leaving(name: str, backend: Any) -> np.ndarray:
    """Each thread that stays stores its number, meets the others at barrier 0, and reads the word of the thread 2 away."""
    kernel = Kernel("leaving", ("out:u64",), f"""
.shared .align 16 .b32 box[128];
mov.u32 %r2, box; mad.lo.u32 %r2, %thread, 4, %r2; mov.u32 %r3, 777; st.shared.u32 [%r2], %r3;
{LEAVING[name]} @%p0 bra END;
st.shared.u32 [%r2], %thread;
bar.sync 0;
xor.b32 %r4, %thread, 64; mov.u32 %r2, box; mad.lo.u32 %r2, %r4, 4, %r2; ld.shared.u32 %r5, [%r2];
mul.wide.u32 %rd0, %thread, 4; add.u64 %rd0, %rd0, %out; st.global.u32 [%rd0], %r5;
END: ret;""")
    out = np.full(128, 0xFFFFFFFF, np.uint32)
    return run(backend, kernel, 1, [out], [out])[0]


CASES["exited"] = {f"exited threads, {n}": partial(leaving, n) for n in LEAVING}


# -- what is kept


def kept(name: str, result: np.ndarray) -> dict[str, np.ndarray]:
    """A result as it stands in the file. Of more than 2048 values: every 256th and the checksums of 1024 at a time (of approximations, whose
    bits are not the point, the worst error)."""
    flat = np.ascontiguousarray(result).reshape(-1)
    if name in APPROXIMATIONS:
        return {name: flat[::64], f"{name}: worst": np.array(error(name, flat))}
    if len(flat) <= 2048 or name == "tensor maps":
        return {name: flat}
    return {name: flat[::256], f"{name}: sums": np.array([zlib.crc32(flat[i : i + 1024].tobytes()) for i in range(0, len(flat), 1024)], np.uint32)}


def record(group: str, file: Path, after: str = "") -> None:
    """Runs the cases of a group behind `after` on the GPU; a fault or a hang ends the process's context and so the run, and its name is printed."""
    from oxidnn.runtime.cuda_backend import CudaBackend

    backend = CudaBackend(0)
    names = list(CASES[group])
    found: dict[str, Any] = {}
    pool = ThreadPoolExecutor(1)
    for name in names[names.index(after) + 1 if after else 0 :]:
        try:
            found |= kept(name, pool.submit(CASES[group][name], backend).result(timeout=15))
        except AssemblyError as refused:
            print(f"{name}: {refused}")
        except Exception as problem:
            print(f"{name}: {type(problem).__name__} {str(problem)[:400]}")
            print(f"STOPPED {name}")
            break
    np.savez_compressed(file, **found)
    sys.stdout.flush()
    os._exit(0)  # a kernel that hangs would hold an orderly exit


def record_all(target: Path, groups: Sequence[str]) -> None:
    def run_group(group: str) -> dict[str, np.ndarray]:
        found: dict[str, np.ndarray] = {}
        after = ""
        with tempfile.TemporaryDirectory() as folder:
            for part in range(30):
                file = Path(folder) / f"{part}.npz"
                done = subprocess.run([sys.executable, "-m", "tests.emu.recorded", "--part", group, str(file), after], capture_output=True, text=True, timeout=300)
                if file.exists():
                    found |= dict(np.load(file))
                lines = done.stdout.splitlines()
                print(*(f"{group}: {line}\n" for line in lines if not line.startswith("STOPPED")), sep="", end="", flush=True)
                after = next((line[8:] for line in lines if line.startswith("STOPPED ")), "")
                if done.returncode or not after:
                    print(*(done.stderr.splitlines()[-3:] if done.returncode else ()), sep="\n", flush=True)
                    break
        return found

    with ThreadPoolExecutor(len(CASES)) as pool:
        found: dict[str, Any] = {name: value for part in pool.map(run_group, groups) for name, value in part.items()}
    np.savez_compressed(target, **found)
    total = sum(len(CASES[g]) for g in groups)
    print(f"{sum(name in found for g in groups for name in CASES[g])} of {total} cases recorded, {target.stat().st_size} bytes")


if __name__ == "__main__":
    if sys.argv[1] == "--part":
        record(sys.argv[2], Path(sys.argv[3]), sys.argv[4])
    else:
        record_all(Path(sys.argv[1]), sys.argv[2:] or list(CASES))
