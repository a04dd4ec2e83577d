"""mma.sync against integer matrices and recorded silicon, fragments by the formulas of the ISA; matrix moves."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.emu.running import HEADER, SCHEDULES, launch, same

VECTORS = Path(__file__).parent / "vectors"
TYPES = {
    "f16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16), "tf32": np.dtype(np.float32), "s8": np.dtype(np.int8),
    "u8": np.dtype(np.uint8), "s4": np.dtype(np.int8), "u4": np.dtype(np.uint8), "e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2), "f64": np.dtype(np.float64),
    "f32": np.dtype(np.float32), "s32": np.dtype(np.int32),
}  # fmt: skip


def words(out: np.ndarray, nibbles: bool) -> np.ndarray:
    """(registers, warps, 32, w) elements to (registers, warps * 32) registers."""
    if nibbles:
        out = ((out[..., 0::2] & 15) | (out[..., 1::2] << 4)).astype(np.uint8)
    return np.ascontiguousarray(out).view(np.uint64 if out.itemsize == 8 else np.uint32).reshape(len(out), -1)


def spread_a(a: np.ndarray, nibbles: bool = False) -> np.ndarray:
    """(warps, M, K) to (registers, warps * 32) words."""
    warps, m, k = a.shape
    w = 8 if nibbles else max(1, 4 // a.itemsize)
    count = m // 8 * k // (4 * w)
    out = np.zeros((count, warps, 32, w), a.dtype)
    for r in range(count):
        for lane in range(32):
            for e in range(w):
                out[r, :, lane, e] = a[:, lane // 4 + 8 * (r % (m // 8)), w * (lane % 4) + e + 4 * w * (r // (m // 8))]
    return words(out, nibbles)


def spread_b(b: np.ndarray, nibbles: bool = False) -> np.ndarray:
    """(warps, N, K) to (registers, warps * 32) words."""
    warps, _, k = b.shape
    w = 8 if nibbles else max(1, 4 // b.itemsize)
    count = k // (4 * w)
    out = np.zeros((count, warps, 32, w), b.dtype)
    for r in range(count):
        for lane in range(32):
            for e in range(w):
                out[r, :, lane, e] = b[:, lane // 4, w * (lane % 4) + e + 4 * w * r]
    return words(out, nibbles)


def places_c(m: int, itemsize: int) -> list[tuple[int, int, int]]:
    """(register, row, column) per lane: element e of register r is at rows[r](lane), columns."""
    if itemsize == 2:
        return [(r, 8 * r, e) for r in range(m // 8) for e in range(2)]
    return [(i, 8 * (i // 2), i % 2) for i in range(m // 4)]


def spread_c(c: np.ndarray) -> np.ndarray:
    warps, m, _ = c.shape
    half = c.itemsize == 2
    out = np.zeros((m // 8 if half else m // 4, warps, 32, 2 if half else 1), c.dtype)
    for r, row, e in places_c(m, c.itemsize):
        for lane in range(32):
            out[r, :, lane, e if half else 0] = c[:, lane // 4 + row, 2 * (lane % 4) + e]
    return out.view(np.uint64 if c.itemsize == 8 else np.uint32).reshape(len(out), -1)


def gather_d(words: np.ndarray, m: int, dtype: np.dtype) -> np.ndarray:
    warps = words.shape[1] // 32
    half = dtype.itemsize == 2
    elements = words.view(dtype).reshape(len(words), warps, 32, -1)
    d = np.zeros((warps, m, 8), dtype)
    for r, row, e in places_c(m, dtype.itemsize):
        for lane in range(32):
            d[:, lane // 4 + row, 2 * (lane % 4) + e] = elements[r, :, lane, e if half else 0]
    return d


def mma(name: str, a: np.ndarray, b: np.ndarray, c: np.ndarray, **options: object) -> np.ndarray:
    """One instruction per warp: a (warps, M, K), b (warps, N, K), c (warps, M, N)."""
    nibbles = ".s4" in name or ".u4" in name
    parts = [spread_a(a, nibbles), spread_b(b, nibbles), spread_c(c)]
    wide = a.itemsize == 8
    bytes_ = 8 if wide else 4
    accumulator = "f64" if wide else {"f": "f32", "i": "s32"}[c.dtype.kind] if c.itemsize == 4 else "b32"
    n = parts[0].shape[1]
    lines = [f"{HEADER}.visible .entry k(.param .u64 a, .param .u64 b, .param .u64 c, .param .u64 d) {{",
             f".reg .b{8 * bytes_} %a<8>, %b<4>; .reg .{accumulator} %c<4>; .reg .b64 %p, %w; .reg .b32 %i, %n; .reg .b64 %x; .reg .b32 %y;",
             "mov.u32 %i, %ctaid.x; mov.u32 %n, %ntid.x; mul.lo.u32 %i, %i, %n; mov.u32 %n, %tid.x; add.u32 %i, %i, %n;",
             f"mul.wide.u32 %w, %i, {bytes_};"]  # fmt: skip
    for letter, part in zip("abc", parts, strict=True):
        lines.append(f"ld.param.u64 %p, [{letter}]; add.u64 %p, %p, %w;")
        kind = accumulator if letter == "c" else f"b{8 * bytes_}"
        lines += [f"ld.global.{kind} %{letter}{r}, [%p+{r * n * bytes_}];" for r in range(len(part))]
    lists = ["{" + ", ".join(f"%{letter}{r}" for r in range(len(part))) + "}" for letter, part in zip("abc", parts, strict=True)]
    lines += [f"{name} {lists[2]}, {lists[0]}, {lists[1]}, {lists[2]};", "ld.param.u64 %p, [d]; add.u64 %p, %p, %w;"]
    lines += [f"st.global.{accumulator} [%p+{r * n * bytes_}], %c{r};" for r in range(len(parts[2]))]
    lines.append("ret; }")
    out = np.zeros(parts[2].shape, parts[2].dtype)
    launch("\n".join(lines), n // 32, 32, [*(np.ascontiguousarray(p) for p in parts), out], **options)
    return gather_d(out, a.shape[1], c.dtype)


FORMS = [
    ("m16n8k16", "f32", "bf16", "bf16"), ("m16n8k8", "f32", "bf16", "bf16"), ("m16n8k16", "f32", "f16", "f16"),
    ("m16n8k8", "f32", "f16", "f16"), ("m16n8k16", "f16", "f16", "f16"), ("m16n8k8", "f16", "f16", "f16"),
    ("m16n8k8", "f32", "tf32", "tf32"), ("m16n8k4", "f32", "tf32", "tf32"), ("m16n8k32", "s32", "s8", "s8"),
    ("m8n8k16", "s32", "s8", "u8"), ("m16n8k32", "s32", "u8", "s8"), ("m16n8k16", "s32", "s8", "u8"), ("m16n8k64", "s32", "s4", "s4"),
    ("m16n8k32", "s32", "u4", "s4"), ("m8n8k32", "s32", "s4", "s4"), ("m16n8k32", "f32", "e4m3", "e4m3"),
    ("m16n8k32", "f32", "e5m2", "e4m3"), ("m8n8k4", "f64", "f64", "f64"), ("m16n8k4", "f64", "f64", "f64"),
    ("m16n8k8", "f64", "f64", "f64"), ("m16n8k16", "f64", "f64", "f64"),
]  # fmt: skip


@pytest.mark.parametrize("mode", ["fast", "exact"])
@pytest.mark.parametrize("form", FORMS, ids=lambda f: "-".join(f))
def test_every_form_on_small_integers(form: tuple[str, ...], mode: str) -> None:
    shape, result, ta, tb = form
    m, k = int(shape[1:].split("n")[0]), int(shape.split("k")[1])
    rng = np.random.default_rng(k)
    low = 0 if {"u8", "u4"} & {ta, tb} else -4
    a = rng.integers(low, 8, (3, m, k)).astype(TYPES[ta])
    b = rng.integers(low if tb in ("u8", "u4") else -4, 8, (3, 8, k)).astype(TYPES[tb])
    c = rng.integers(-9, 9, (3, m, 8)).astype(TYPES[result])
    d = mma(f"mma.sync.aligned.{shape}.row.col.{result}.{ta}.{tb}.{result}", a, b, c, tensor_core=mode)
    same(d, np.einsum("wmk,wnk->wmn", a.astype(np.float64), b.astype(np.float64)) + c.astype(np.float64))


@pytest.mark.parametrize("type_", ["bf16", "f16", "tf32", "e4m3", "e5m2"])
def test_exact_mode_is_silicon_bit_for_bit(type_: str) -> None:
    recorded = np.load(VECTORS / "vec_tc_accumulation2.npz")
    codes_a, codes_b, c = recorded[f"{type_}_a"], recorded[f"{type_}_b"], recorded[f"{type_}_c"]
    k = codes_a.shape[-1]
    a = codes_a.view(TYPES[type_]).reshape(24, 16, k)
    b = np.repeat(codes_b.view(TYPES[type_]), 4, axis=0)
    name = f"mma.sync.aligned.m16n8k{k}.row.col.f32.{type_}.{type_}.f32"
    d = mma(name, a, b, c.reshape(24, 16, 8), tensor_core="exact")
    same(d, recorded[f"{type_}_mma"].reshape(24, 16, 8))
    fast = mma(name, a, b, c.reshape(24, 16, 8))
    scale = np.einsum("wmk,wnk->wmn", np.abs(a.astype(np.float64)), np.abs(b.astype(np.float64))) + np.abs(c.reshape(24, 16, 8))
    assert (np.abs(fast.astype(np.float64) - d) <= scale * 2.0**-19).all()
    # one row times a column of ones: alignment, truncation and cancellation
    rows, c1 = recorded_rows(type_)
    d1 = mma(name, rows, np.ones((len(rows), 8, k), TYPES[type_]), np.repeat(c1[..., None], 8, axis=2), tensor_core="exact")
    expected = np.load(VECTORS / "vec_tc_accumulation.npz")[f"{type_}_mma_d"]
    same(d1[:, :, 0].reshape(-1), expected)
    same(d1[:, :, 5].reshape(-1), expected)


def recorded_rows(type_: str) -> tuple[np.ndarray, np.ndarray]:
    recorded = np.load(VECTORS / "vec_tc_accumulation.npz")
    a, c = recorded[f"{type_}_wg_a"].view(TYPES[type_]), recorded[f"{type_}_wg_c"]
    return a.reshape(-1, 16, a.shape[-1]), c.reshape(-1, 16)


def test_half_accumulators_are_silicon_bit_for_bit() -> None:
    recorded = np.load(VECTORS / "vec_tc_accumulation2.npz")
    a = recorded["f16_f16acc_a"].view(np.float16).reshape(4, 16, 16)
    b = np.repeat(recorded["f16_f16acc_b"].view(np.float16)[None], 4, axis=0)
    d = mma("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16", a, b, recorded["f16_f16acc_c"].reshape(4, 16, 8), tensor_core="exact")
    same(d, recorded["f16_f16acc_d"].reshape(4, 16, 8))


def test_integer_saturation_tf32_truncation_and_specials() -> None:
    big = np.full((1, 16, 32), 127, np.int8)
    c = np.full((1, 16, 8), 2**31 - 5, np.int32)
    b = np.full((1, 8, 32), 127, np.int8)
    assert (mma("mma.sync.aligned.m16n8k32.row.col.satfinite.s32.s8.s8.s32", big, b, c) == 2**31 - 1).all()
    wrapped = (2**31 - 5 + 32 * 127 * 127 + 2**31) % 2**32 - 2**31
    assert (mma("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32", big, b, c) == wrapped).all()
    a = np.zeros((1, 16, 8), np.float32)
    a[:, :, 0] = 1 + 2.0**-11  # below tf32: cut off, not rounded
    one = np.ones((1, 8, 8), np.float32)
    zero = np.zeros((1, 16, 8), np.float32)
    for mode in ("fast", "exact"):
        name = "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32"
        assert (mma(name, a, one, zero, tensor_core=mode) == 1).all()
        a[0, 3, 2], a[0, 5, 1], a[0, 6, 1] = np.inf, np.nan, -np.inf
        a[0, 7, 1], a[0, 7, 2] = np.inf, -np.inf
        d = mma(name, a, one, zero, tensor_core=mode)
        assert (d[0, 3] == np.inf).all() and (d[0, 6] == -np.inf).all()
        assert (d[0, 5].view(np.uint32) == 0x7FFFFFFF).all() and (d[0, 7].view(np.uint32) == 0x7FFFFFFF).all()
        a[0, 3:8] = a[0, 0]


# -- matrix moves


def move_kernel(body: str) -> str:
    """128 threads; %t the thread, %lane, %warp; 2048 bytes of tile per warp at %tile; results %d0-%d3 to out."""
    return f"""{HEADER}.visible .entry k(.param .u64 src, .param .u64 out)
{{ .reg .b64 %sp, %op, %w; .reg .b32 %t, %lane, %warp, %tile, %r<16>, %d<4>; .reg .pred %p; .shared .align 16 .b8 tiles[8192];
ld.param.u64 %sp, [src]; ld.param.u64 %op, [out]; mov.u32 %t, %tid.x; mov.u32 %lane, %laneid; shr.u32 %warp, %t, 5;
mov.u32 %tile, tiles; mad.lo.u32 %tile, %warp, 2048, %tile;
mul.wide.u32 %w, %t, 16; add.u64 %sp, %sp, %w; add.u64 %op, %op, %w;
ld.global.v4.b32 {{%r0, %r1, %r2, %r3}}, [%sp]; mad.lo.u32 %r4, %lane, 16, %tile; mov.u32 %d0, 0; mov.u32 %d1, 0; mov.u32 %d2, 0; mov.u32 %d3, 0;
{body}
st.global.v4.b32 [%op], {{%d0, %d1, %d2, %d3}}; ret; }}"""


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(count: int, transposed: bool, schedule: object) -> None:
    rng = np.random.default_rng(count)
    source = rng.integers(0, 2**16, (4, 4, 8, 8)).astype(np.uint16)  # warp, matrix, row, column
    xor = 13  # row i of all matrices lies in slot i ^ 13
    stored = source.reshape(4, 32, 8)[:, np.arange(32) ^ xor]
    names = "{" + ", ".join(f"%d{i}" for i in range(count)) + "}"
    body = f"""st.shared.v4.b32 [%r4], {{%r0, %r1, %r2, %r3}}; bar.sync 0; xor.b32 %r5, %lane, {xor}; mad.lo.u32 %r5, %r5, 16, %tile;
ldmatrix.sync.aligned.m8n8.x{count}{".trans" if transposed else ""}.shared.b16 {names}, [%r5];"""
    out = np.zeros((4, 32, 4, 2), np.uint16)
    aligned = np.zeros(stored.size + 8, np.uint16)
    at = -aligned.ctypes.data % 16 // 2
    aligned[at : at + stored.size] = stored.reshape(-1)
    target = np.zeros(out.size + 8, np.uint16)
    to = -target.ctypes.data % 16 // 2
    launch(move_kernel(body), 1, 128, [aligned[at : at + stored.size], target[to : to + out.size]], schedule=schedule, checkers="all")
    out = target[to : to + out.size].reshape(4, 32, 4, 2)
    matrices = source.transpose(0, 1, 3, 2) if transposed else source
    for lane in range(32):
        for j in range(count):
            same(out[:, lane, j], matrices[:, j, lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2])
    assert (out[:, :, count:] == 0).all()


@pytest.mark.parametrize("transposed", [False, True])
def test_stmatrix_undoes_ldmatrix(transposed: bool) -> None:
    rng = np.random.default_rng(1)
    suffix = ".trans" if transposed else ""
    body = f"""st.shared.v4.b32 [%r4], {{%r0, %r1, %r2, %r3}}; bar.sync 0;
ldmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 {{%r8, %r9, %r10, %r11}}, [%r4]; bar.sync 0;
stmatrix.sync.aligned.m8n8.x4{suffix}.shared.b16 [%r4], {{%r8, %r9, %r10, %r11}}; bar.sync 0; ld.shared.v4.b32 {{%d0, %d1, %d2, %d3}}, [%r4];"""
    buffer = np.zeros(2 * 2048 + 16, np.uint8)
    at = -buffer.ctypes.data % 16
    source, out = buffer[at : at + 2048], buffer[at + 2048 : at + 4096]
    source[:] = rng.integers(0, 256, 2048)
    launch(move_kernel(body), 1, 128, [source, out], checkers="all")
    same(out, source)


def test_movmatrix_transposes() -> None:
    rng = np.random.default_rng(2)
    buffer = np.zeros(2 * 2048 + 16, np.uint8)
    at = -buffer.ctypes.data % 16
    source, out = buffer[at : at + 2048], buffer[at + 2048 : at + 4096]
    source[:] = rng.integers(0, 256, 2048)
    launch(move_kernel("movmatrix.sync.aligned.m8n8.trans.b16 %d0, %r0;"), 1, 128, [source, out])
    before = source.view(np.uint16).reshape(4, 32, 4, 2)[:, :, 0].reshape(4, 8, 8)
    after = out.view(np.uint16).reshape(4, 32, 4, 2)[:, :, 0].reshape(4, 8, 8)
    same(after, before.transpose(0, 2, 1))
