"""Small kernels around single instructions, and the launch of a PTX text on NumPy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from oxidnn.emu import Counters, GlobalMemory, load
from oxidnn.ptx.parser import parse

HEADER = ".version 8.6\n.target sm_90a\n.address_size 64\n"
SCHEDULES = ("lowest_pc", ("random", 1), ("random", 2))


def launch(text: str, grid: Any, threads: Any, args: list[Any], entry: str | None = None, **options: Any) -> Counters:
    """Run `text` with arrays among `args` registered as global memory under the names of the parameters."""
    program = load(parse(text), entry)
    memory = GlobalMemory()
    values = []
    for param, arg in zip(program.entry.params, args, strict=True):
        values.append(memory.register(arg, param.name) if isinstance(arg, np.ndarray) else arg)
    return program.launch(memory, grid, threads, values, **options)


PTX_TYPE = {
    "uint8": "u8", "int8": "s8", "uint16": "b16", "int16": "s16", "float16": "f16", "uint32": "b32", "int32": "s32",
    "float32": "f32", "uint64": "b64", "int64": "s64", "float64": "f64",
}  # fmt: skip


def apply(instructions: str, inputs: list[np.ndarray], result: Any, prologue: str = "", **options: Any) -> np.ndarray:
    """One thread per element: `%a0`, `%a1`, ... hold the inputs, `instructions` set `%d`, which is returned.

    Predicates %p0-%p3 and scratch %r0-%r9 (b32), %rd0-%rd9 (b64), %f0-%f9 (f32), %h0-%h9 (b16) may be used.
    """
    n = len(inputs[0])
    result = np.dtype(result)
    params = [f".param .u64 in{i}" for i in range(len(inputs))] + [".param .u64 out", ".param .u32 n"]
    lines = [
        f"{HEADER}.visible .entry one({', '.join(params)})\n{{",
        ".reg .pred %p<4>, %pexit; .reg .b32 %r<10>, %i, %n; .reg .b64 %rd<10>, %q, %w; .reg .f32 %f<10>;",
        ".reg .b16 %h<10>;",
    ]
    for name, dtype in [*((f"%a{i}", x.dtype) for i, x in enumerate(inputs)), ("%d", result)]:
        kind = PTX_TYPE[dtype.name]
        lines.append(f".reg .{'b16' if kind in ('u8', 's8') else kind} {name};")
    lines += [
        prologue,
        "mov.u32 %i, %ctaid.x; mov.u32 %n, %ntid.x; mul.lo.u32 %i, %i, %n; mov.u32 %n, %tid.x; add.u32 %i, %i, %n;",
        "ld.param.u32 %n, [n]; setp.ge.u32 %pexit, %i, %n; @%pexit bra DONE;",
    ]
    for i, x in enumerate(inputs):
        lines += [f"ld.param.u64 %q, [in{i}]; mul.wide.u32 %w, %i, {x.itemsize}; add.u64 %q, %q, %w;"]
        kind = PTX_TYPE[x.dtype.name]
        lines += [f"ld.global.{'b16' if kind == 'f16' else kind} %a{i}, [%q];"]
    kind = PTX_TYPE[result.name]
    lines += [
        instructions,
        f"ld.param.u64 %q, [out]; mul.wide.u32 %w, %i, {result.itemsize}; add.u64 %q, %q, %w;",
        f"st.global.{'b16' if kind == 'f16' else kind} [%q], %d;",
        "DONE: ret;\n}",
    ]
    out = np.full(n * result.itemsize, 0xA5, np.uint8).view(result)
    launch("\n".join(lines), ((n + 127) // 128,), (128,), [*inputs, out, n], **options)
    return out


EDGES = {
    1: [0, 1, 2, 0x7F, 0x80, 0x81, 0xFE, 0xFF],
    2: [0, 1, 2, 0x7FFF, 0x8000, 0x8001, 0xFFFE, 0xFFFF],
    4: [0, 1, 2, 31, 32, 33, 0x7FFFFFFF, 0x80000000, 0x80000001, 0xFFFFFFFE, 0xFFFFFFFF, 0x00FF00FF],
    8: [0, 1, 2, 63, 64, 65, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 2, 2**64 - 1, 2**32, 2**32 - 1],
}


def integers(rng: np.random.Generator, dtype: Any, n: int = 400) -> np.ndarray:
    """Random bits of every magnitude, mixed with the edge cases."""
    dtype = np.dtype(dtype)
    bits = 8 * dtype.itemsize
    raw = rng.integers(0, 2**64, n, np.uint64) >> rng.integers(64 - bits, 64, n).astype(np.uint64)
    raw[: n // 3] = rng.choice(np.array(EDGES[dtype.itemsize], np.uint64), n // 3)
    rng.shuffle(raw)
    return raw.astype(f"u{dtype.itemsize}").view(dtype)


SPECIAL_F32 = np.array(
    [0x00000000, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x00000001, 0x80000001, 0x007FFFFF,
     0x00800000, 0x80800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x3F800000, 0xBF800000, 0x3F7FFFFF, 0x3F800001, 0x4B000000,
     0x4B7FFFFF, 0x00000003], np.uint32).view(np.float32)  # fmt: skip


def floats32(rng: np.random.Generator, n: int = 400) -> np.ndarray:
    """Normal values, random bit patterns and special values."""
    x = rng.standard_normal(n).astype(np.float32)
    x[: n // 3] = rng.integers(0, 2**32, n // 3, np.uint32).view(np.float32)
    x[n // 3 : n // 2] = rng.choice(SPECIAL_F32, n // 2 - n // 3)
    rng.shuffle(x)
    return x


def same(got: np.ndarray, expected: Any) -> None:
    """Equal bits, except that any NaN equals any other."""
    if isinstance(expected, list) and got.dtype.kind != "f":
        expected = np.array([int(v) for v in expected], object)  # no way through float64
    with np.errstate(invalid="ignore"):
        expected = np.asarray(expected).astype(got.dtype)
    bits = f"u{got.itemsize}"
    differ = got.view(bits) != expected.view(bits)
    if got.dtype.kind == "f":
        differ &= ~(np.isnan(got) & np.isnan(expected))
    at = np.flatnonzero(differ)
    assert not len(at), f"{len(at)} of {got.size} differ, first at {at[0]}: {got[at[0]]!r} instead of {expected[at[0]]!r}"
