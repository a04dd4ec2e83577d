"""Whole kernels of every kind (pipelines, attention, convolution, atomics, conversions): the right result under every schedule, and no alarm.

`snippets/` holds the kernels, which all ran on an H100 but for 06b (sm_100a) and those in FORMS. Each case returns the number of values compared.
"""

# ruff: noqa: E501 (tables of geometry)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from oxidnn.emu import GlobalMemory, load
from oxidnn.emu.tensor_map import TensorMap
from oxidnn.errors import EmulatorFault, PtxError
from oxidnn.ptx.parser import parse

SNIPPETS = Path(__file__).parent / "snippets"
SCHEDULES = ("lowest_pc", ("random", 1))
BF16, E4M3, E5M2 = ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2
rng = np.random.default_rng(0)


class Device:
    def __init__(self, schedule: Any) -> None:
        self.memory, self.schedule = GlobalMemory(), schedule

    def put(self, array: Any) -> int:
        array = np.ascontiguousarray(array)
        pointer = self.memory.alloc(array.nbytes)
        self.memory.view(pointer, array.nbytes)[:] = array.reshape(-1).view(np.uint8)
        self.memory.mark_initialised(pointer, array.nbytes)
        return pointer

    def empty(self, shape: Any, dtype: Any) -> int:
        return self.memory.alloc(int(np.prod(shape)) * np.dtype(dtype).itemsize)

    def get(self, pointer: int, shape: Any, dtype: Any) -> np.ndarray:
        return self.memory.view(pointer, int(np.prod(shape)) * np.dtype(dtype).itemsize).view(dtype).reshape(shape)

    def run(self, number: str, grid: Any, threads: int, args: list[Any], entry: str | None = None, smem: int = 0, cluster: int = 1) -> None:
        program = load(parse(text_of(number)), entry)
        program.launch(self.memory, grid, (threads,), args, dynamic_smem=smem, cluster=(cluster,), checkers="all", schedule=self.schedule)


def text_of(number: str) -> str:
    (path,) = SNIPPETS.glob(f"{number}_*.ptx")
    return path.read_text()


def matrix(address: int, rows: int, cols: int, box: tuple[int, int], dtype: str = "bf16") -> bytes:
    size = 1 if dtype == "u8" else 2
    return TensorMap(dtype, address, (cols, rows), (cols * size,), box, (1, 1), 128).encode()


def im2col(address: int, shape: tuple[int, ...], box: tuple[int, int], lower: tuple[int, int], upper: tuple[int, int], stride: tuple[int, int] = (1, 1)) -> bytes:
    """Of an NHWC tensor; corners and strides in W, H order."""
    n, h, w, c = shape
    return TensorMap("bf16", address, (c, w, h, n), (c * 2, w * c * 2, h * w * c * 2), box, (1, *stride, 1), 128, (lower, upper)).encode()


def normal(*shape: int, dtype: Any = BF16) -> np.ndarray:
    return rng.standard_normal(shape).astype(dtype)


def close(got: np.ndarray, want: np.ndarray, tolerance: float) -> int:
    """Within `tolerance` of the largest value."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape and np.isfinite(got).all()
    assert np.abs(got - want).max() <= tolerance * np.abs(want).max()
    return got.size


def f64(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float64)


def gemm_warp_specialised(s: Any) -> int:
    m, n, k = 100, 200, 320
    a, b, d = normal(m, k), normal(n, k), Device(s)
    c = d.empty((m, n), BF16)
    d.run("01", (2, 2), 256, [matrix(d.put(a), m, k, (64, 64)), matrix(d.put(b), n, k, (64, 128)), matrix(c, m, n, (64, 64)), k // 64], smem=114752)
    return close(d.get(c, (m, n), BF16), f64(a) @ f64(b).T, 6e-3)


def gemm_ampere(s: Any) -> int:
    m, n, k = 100, 90, 160
    a, b, d = normal(m, k), normal(n, k), Device(s)
    c = d.empty((m, n), np.float32)
    d.run("02", (2, 2), 128, [d.put(a), d.put(b), c, m, n, k])
    return close(d.get(c, (m, n), np.float32), f64(a) @ f64(b).T, 1e-5)


def ring_sum(s: Any) -> int:
    x, d = normal(23 * 1024, dtype=np.float32), Device(s)
    out = d.put(np.zeros(4, np.float32))
    d.run("03", 3, 160, [d.put(x), out, 23])
    return close(d.get(out, 4, np.float32)[:1], f64(x).sum(keepdims=True), 1e-4)


def im2col_gather(s: Any) -> int:
    count = 0
    for n, h, w, c, r, t, ph, pw, sh, sw, dh, dw in [(3, 7, 9, 64, 3, 3, 1, 1, 1, 1, 1, 1), (2, 9, 11, 64, 3, 3, 1, 1, 2, 2, 1, 1), (2, 8, 8, 128, 3, 2, 2, 1, 1, 2, 2, 1)]:
        p, q = (h + 2 * ph - dh * (r - 1) - 1) // sh + 1, (w + 2 * pw - dw * (t - 1) - 1) // sw + 1
        m, x, d = n * p * q, normal(n, h, w, c), Device(s)
        out = d.empty((m, r * t * c), BF16)
        tx = im2col(d.put(x), x.shape, (64, 64), (-pw, -ph), (pw - (t - 1) * dw, ph - (r - 1) * dh), (sw, sh))
        d.run("04", (-(-m // 64), c // 64), 32, [tx, matrix(out, m, r * t * c, (64, 64)), p, q, r, t, sh, sw, ph, pw, dh, dw, c], "im2col_gather")
        padded = np.pad(x, ((0, 0), (ph, ph), (pw, pw), (0, 0)))
        want = np.stack([padded[:, i * dh : i * dh + (p - 1) * sh + 1 : sh, j * dw : j * dw + (q - 1) * sw + 1 : sw] for i in range(r) for j in range(t)], 3)
        count += close(d.get(out, want.shape, BF16), want, 0)
    return count


def cluster_rows(s: Any) -> int:
    x, d = rng.random((3, 4096)).astype(np.float32), Device(s)
    y = d.empty(x.shape, np.float32)
    d.run("05", (4, 3), 256, [d.put(x), y], "cluster_row_scale", cluster=4)
    return close(d.get(y, x.shape, np.float32), x / f64(x).sum(1, keepdims=True), 1e-6)


def conversions(s: Any) -> int:
    """Values that every format holds, that round, and that saturate."""
    x = np.array([1.0625, -3.3, 30000.0, 70000.0], np.float32)
    tail = np.array([0xC0104048], np.uint32)
    d = Device(s)
    out = d.empty(64, np.uint8)
    d.run("06", 1, 1, [d.put(np.concatenate((x.view(np.uint32), tail))), out, 0.5])
    g = x * np.float32(0.5)
    raw = d.get(out, 64, np.uint8)
    e4, e5 = np.clip(g, -448, 448).astype(E4M3), np.clip(g, -57344, 57344).astype(E5M2)
    half = e4[:2].astype(np.float32)
    tf32 = (x[:2].view(np.uint32) + 0x1000 & 0xFFFFE000).view(np.uint8)
    f16 = np.array([x[0], x[1], x[2], min(x[3], 65504)], np.float32).astype(np.float16)
    again = np.concatenate((e4[:2], np.maximum(half, 0).astype(E4M3)))
    quantised = np.clip(np.rint(g), -128, 127).astype(np.int8)
    want = [e4, e5, x.astype(BF16), f16, tf32, half, again, None, np.array([0x40480000, 0xC0100000], np.uint32), quantised]
    sizes = [4, 4, 8, 8, 8, 8, 4, 4, 8, 4]
    at = 0
    for part, size in zip(want, sizes, strict=True):
        if part is not None:
            assert raw[at : at + size].tolist() == np.ascontiguousarray(part).view(np.uint8).tolist(), (at, raw[at : at + size], part)
        at += size
    return at - 4


def narrow_conversions(s: Any) -> int:
    """Without the stochastic rounding, which the emulator refuses."""
    text = text_of("06b")
    with pytest.raises(PtxError, match=r"cvt\.rs"):
        load(parse(text))
    program = load(parse("\n".join(line for line in text.splitlines() if "%r2" not in line)))
    x, d = np.array([0.3, -2.6, 1.25, 70.0], np.float32), Device(s)
    out = d.put(np.zeros(16, np.uint8))
    program.launch(d.memory, 1, (1,), [d.put(x), out], checkers="all", schedule=s)
    fp4 = np.clip(x, -6, 6).astype(ml_dtypes.float4_e2m1fn)
    codes = fp4.view(np.uint8)
    want = np.zeros(16, np.uint8)
    want[:2] = codes[::2] | codes[1::2] << 4
    want[2:4] = x[:2].astype(ml_dtypes.float6_e2m3fn).view(np.uint8)
    want[8:12] = fp4[:2].astype(np.float16).view(np.uint8)
    want[12:] = np.array([0.5, 4.0]).astype(BF16).view(np.uint8)  # powers of two, up from 0.3 and 2.6
    assert d.get(out, 16, np.uint8).tolist() == want.tolist()
    return want.size


def pair(word: np.ndarray, dtype: Any) -> np.ndarray:
    return f64(np.ascontiguousarray(word).view(dtype))


def mma_sync(s: Any) -> int:
    """All lanes hold the same registers, so each product is four times that of one lane's elements."""
    a = rng.integers(1, 4, 8).astype(np.float16).view(np.uint32)
    b = rng.integers(1, 3, 4).astype(np.float16).view(np.uint32)
    c, r = rng.integers(0, 9, 4).astype(np.float32), rng.integers(0, 9, 8).astype(np.float16)
    e = rng.integers(1, 9, 4).astype(np.float64)
    d = Device(s)
    memory = d.put(np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in (a, b, np.zeros(2, np.uint32), c, r, e)]))
    d.run("08", 1, 32, [memory])

    def dot(rows: int, dtype: Any, columns: tuple[int, ...] = (0, 1)) -> np.ndarray:
        """Of rows g and g + 8, twice each: registers rows * i + (row) of A meet register i of B."""
        both = [4 * sum(float(pair(a[2 * i + row : 2 * i + row + 1], dtype) @ pair(b[i : i + 1], dtype)) for i in columns) for row in range(rows)]
        return np.repeat(both, 2)

    want = f64(c) + dot(2, np.float16) + dot(2, BF16) + dot(2, BF16, (0,))
    tf32 = lambda word: pair(word & np.uint32(0xFFFFE000), np.float32)  # noqa: E731
    single = np.repeat([4 * sum(float(tf32(a[2 * i + row : 2 * i + row + 1])[0] * tf32(b[i : i + 1])[0]) for i in (0, 1)) for row in (0, 1)], 2)
    short = np.repeat([4 * float(tf32(a[row : row + 1])[0] * tf32(b[:1])[0]) for row in (0, 1)], 2)
    count = close(d.get(memory, 4, np.float32), want + single + short, 1e-6)
    first = (f64(r[:4]) + dot(2, np.float16)).astype(np.float16)  # elements of r0 and r1
    ints = np.concatenate((np.ascontiguousarray(first).view(np.int32), r[4:].view(np.int32))).astype(np.int64)
    ints = np.clip(ints + dot(2, np.int8), -(1 << 31), (1 << 31) - 1)
    mixed = np.repeat([4 * float(pair(a[row : row + 1], np.uint8) @ pair(b[:1], np.int8)) for row in (0, 1)], 2)
    count += close(d.get(memory + 16, 4, np.int32), ints + mixed, 0)
    return count + close(d.get(memory + 32, 2, np.float64), e[:2] + 4 * e[2] * e[3], 0)


def mma_fp8(s: Any) -> int:
    a, b = rng.integers(0x30, 0x48, 16).astype(np.uint8), rng.integers(0x30, 0x48, 8).astype(np.uint8)
    c, r = rng.integers(0, 9, 4).astype(np.float32), rng.integers(0, 9, 4).astype(np.float16)
    d = Device(s)
    memory = d.put(np.concatenate([np.ascontiguousarray(x).view(np.uint8) for x in (a, b, np.zeros(8, np.uint8), c, r)]))
    d.run("08b", 1, 32, [memory])

    def dot(kind: Any, columns: tuple[int, ...] = (0, 1)) -> np.ndarray:
        word = lambda x, i, t: f64(x[4 * i : 4 * i + 4].view(t))  # noqa: E731
        return np.repeat([4 * sum(float(word(a, 2 * i + row, kind) @ word(b, i, E4M3)) for i in columns) for row in (0, 1)], 2)

    return (close(d.get(memory, 4, np.float32), f64(c) + dot(E4M3) + dot(E5M2) + dot(E4M3, (0,)), 1e-3)
            + close(d.get(memory + 16, 4, np.float16), f64(r) + dot(E4M3), 2e-3))


def mma_double(s: Any) -> int:
    a, b, c = rng.integers(1, 9, 8).astype(np.float64), rng.integers(1, 9, 4).astype(np.float64), rng.integers(1, 9, 4).astype(np.float64)
    d = Device(s)
    memory = d.put(np.concatenate((a, b, c)))
    d.run("08c", 1, 32, [memory])
    rows = [sum(4 * sum(a[2 * i + row] * b[i] for i in range(n)) for n in (1, 2, 4)) for row in (0, 1)]
    return close(d.get(memory, 4, np.float64), c + np.repeat(rows, 2), 0)


def patched_map(s: Any) -> int:
    x, d = normal(70, 64), Device(s)
    p, maps, out = d.put(x), d.empty(128, np.uint8), d.empty(16, np.uint8)
    d.run("09", 1, 32, [matrix(d.put(normal(1, 64)), 1, 64, (64, 64)), maps, p, 70, 128, out])
    return close(d.get(out, 8, BF16), x[0, :8], 0)


def softmax(s: Any) -> int:
    count = 0
    for n in (4, 1000, 5000):
        x, d = (rng.standard_normal((2, n)) * 5).astype(np.float32), Device(s)
        x[0, :3] = -np.inf
        y = d.empty(x.shape, np.float32)
        d.run("10", 2, 256, [d.put(x), y, n])
        e = np.exp(f64(x) - f64(x).max(1, keepdims=True))
        count += close(d.get(y, x.shape, np.float32), e / e.sum(1, keepdims=True), 2e-6)
    return count


def philox(s: Any) -> int:
    d = Device(s)
    u, f, n = (d.empty(256, t) for t in (np.uint32, np.float32, np.float32))
    d.run("11", 1, 64, [u, f, n, 0, 0])
    bits = d.get(u, 256, np.uint32)
    assert [hex(v) for v in bits[:4].tolist()] == ["0x6627e8d5", "0xe169c58d", "0xbc57ac4c", "0x9b00dbd8"]  # the published answer
    uniform, gauss = d.get(f, 256, np.float32), d.get(n, 256, np.float32)
    assert ((uniform > 0) & (uniform <= 1)).all() and abs(uniform.mean() - 0.5) < 0.06 and abs(gauss.std() - 1) < 0.2 and abs(gauss.mean()) < 0.2
    return 4


def atomics(s: Any) -> int:
    """One thread adds 1 in every format, over the bits that the formats before have left."""
    d = Device(s)
    out = d.put(np.zeros(4, np.uint32))
    d.run("12", 1, 1, [out, 1.0], "atomics_sm90")
    m = np.zeros(4, np.uint32)

    def add(dtype: Any, count: int, value: float = 1.0) -> None:
        view = m.view(dtype)[:count]
        with np.errstate(all="ignore"):
            view[:] = (f64(view) + value).astype(dtype)

    add(np.float32, 1)
    add(np.float32, 1)
    add(np.float64, 1)
    m.view(np.int32)[0] = max(int(m.view(np.int32)[0]), 1)
    add(BF16, 2)
    m.view(BF16)[:4] = np.maximum(m.view(BF16)[:4].astype(np.float32), 1).astype(BF16)
    add(np.float16, 2)
    add(np.float32, 2)
    add(np.float32, 4)
    half = float(np.array([0x3C00], np.uint16).view(BF16)[0])  # the bits of 1 in f16, added as bf16
    add(BF16, 8, half)
    add(np.float16, 8)
    add(BF16, 8, half)
    assert d.get(out, 4, np.uint32).tolist() == m.tolist()
    x, y = normal(512, dtype=np.float32), normal(1024)
    px, py = d.put(x), d.put(y)
    d.run("12", 1, 128, [px, py], "bulk_reduce")
    ones = np.tile([0.0, 1.0], 512)  # the halves of 1 in f32, as bf16
    return 4 + close(d.get(px, 512, np.float32), x + np.float32(1), 0) + close(d.get(py, 1024, BF16), (f64(y) + ones).astype(BF16), 0)


def atomics_ampere(s: Any) -> int:
    d = Device(s)
    out = d.put(np.zeros(3, np.uint32))
    d.run("12b", 2, 32, [out, 0.5])
    return (close(d.get(out, 1, np.float32), np.array([32.0]), 0) + close(d.get(out + 4, 2, np.float16), np.array([32.0, 32.0]), 0)
            + close(d.get(out + 8, 2, BF16), np.array([32.0, 32.0]), 0))


def attention(number: str, rows: int, threads: int, smem: int) -> Callable[[Any], int]:
    def case(s: Any) -> int:
        count = 0
        for heads, sq, sk in [(2, 150, 300), (1, 64, 5)]:
            q, k, v, d = normal(heads, sq, 64), normal(heads, sk, 64), normal(heads, sk, 64), Device(s)
            out, lse = d.empty(q.shape, BF16), d.empty((heads, sq), np.float32)
            maps = [TensorMap("bf16", d.put(x), (64, x.shape[1], heads), (128, x.shape[1] * 128), (64, b, 1), (1, 1, 1), 128).encode()
                    for x, b in ((q, 64), (k, 128), (v, 128))]
            d.run(number, (-(-sq // rows), heads), threads, [*maps, out, lse, sq, sk, 0.125], smem=smem)
            scores = np.einsum("bqd,bkd->bqk", f64(q), f64(k)) * 0.125
            top = scores.max(-1, keepdims=True)
            e = np.exp(scores - top)
            total = e.sum(-1, keepdims=True)
            count += close(d.get(out, q.shape, BF16), np.einsum("bqk,bkd->bqd", e / total, f64(v)), 6e-3)
            count += close(d.get(lse, (heads, sq), np.float32), (top + np.log(total))[..., 0], 1e-5)
        return count
    return case


def raster(s: Any) -> int:
    count = 0
    for rows, columns in [(19, 7), (3, 5)]:
        d = Device(s)
        out = d.put(np.zeros((rows * columns, 4), np.uint32))
        d.run("14", 6, 128, [out, rows, columns])
        want = []
        for t in range(rows * columns):
            group, rest = divmod(t, 8 * columns)
            height = min(8, rows - 8 * group)
            want.append((8 * group + rest % height, rest // height))
        got = d.get(out, (rows * columns, 4), np.uint32)[:, :2]
        count += close(got, np.array(want), 0)
    return count


def split_precision(s: Any) -> int:
    a, b, x, d = normal(16, 8, dtype=np.float32), normal(8, 8, dtype=np.float32), normal(64, dtype=np.float32), Device(s)
    c, parts = d.empty((16, 8), np.float32), d.put(np.zeros((32, 4), np.uint32))
    d.run("15", 1, 32, [d.put(a), d.put(b), c], "tf32x3_16x8x8")
    d.run("15", 1, 32, [d.put(x), parts], "bf16_split3")
    got = d.get(parts, (32, 4), np.uint32)[:, :3].copy().view(BF16).reshape(32, 3, 2)
    return close(d.get(c, (16, 8), np.float32), f64(a) @ f64(b).T, 1e-6) + close(f64(got).sum(1).reshape(-1), f64(x), 0)


def transpose(s: Any) -> int:
    x, d = rng.integers(0, 65536, (128, 192)).astype(np.uint16), Device(s)
    y = d.empty(x.shape, np.uint16)
    d.run("16", (3, 2), 128, [d.put(x), y, 128, 192])
    return close(d.get(y, (192, 128), np.uint16), x.T, 0)


def gemm_multicast(s: Any) -> int:
    m, n, k = 200, 256, 640
    a, b, d = normal(m, k), normal(n, k), Device(s)
    c = d.empty((m, n), BF16)
    d.run("18", 2, 384, [matrix(d.put(a), m, k, (64, 128)), matrix(d.put(b), n, k, (64, 128)), c, k // 64, m, n], smem=196672, cluster=2)
    return close(d.get(c, (m, n), BF16), f64(a) @ f64(b).T, 6e-3)


def convolution(x: np.ndarray, w: np.ndarray, pad: tuple[int, int], stride: tuple[int, int], dilation: tuple[int, int]) -> np.ndarray:
    """NHWC and KRSC in float64; pairs in H, W order."""
    (ph, pw), (sh, sw), (dh, dw) = pad, stride, dilation
    (_, h, width, _), (_, r, t, _) = x.shape, w.shape
    p, q = (h + 2 * ph - dh * (r - 1) - 1) // sh + 1, (width + 2 * pw - dw * (t - 1) - 1) // sw + 1
    padded = np.pad(f64(x), ((0, 0), (ph, ph), (pw, pw), (0, 0)))
    return sum(padded[:, i * dh : i * dh + (p - 1) * sh + 1 : sh, j * dw : j * dw + (q - 1) * sw + 1 : sw] @ f64(w)[:, i, j].T
               for i in range(r) for j in range(t))  # fmt: skip


# n, h, w, c, k, r, s, padding, stride, dilation (in H, W order)
GEOMETRIES = [(2, 7, 9, 64, 128, 3, 3, (1, 1), (1, 1), (1, 1)), (1, 9, 11, 128, 128, 3, 3, (1, 1), (2, 2), (1, 1)), (2, 8, 8, 64, 128, 3, 2, (2, 1), (1, 2), (2, 1))]


def conv_im2col(s: Any) -> int:
    count = 0
    for n, h, width, c, k, r, t, pad, stride, dilation in GEOMETRIES:
        x, w, d = normal(n, h, width, c), normal(k, r, t, c), Device(s)
        want = convolution(x, w, pad, stride, dilation)
        p, q, m = want.shape[1], want.shape[2], want.size // k
        y = d.empty((m, k), BF16)
        upper = (pad[1] - (t - 1) * dilation[1], pad[0] - (r - 1) * dilation[0])
        tx = im2col(d.put(x), x.shape, (64, 64), (-pad[1], -pad[0]), upper, stride[::-1])
        d.run("20", (k // 128, -(-m // 64)), 256, [tx, matrix(d.put(w), k, r * t * c, (64, 128)), matrix(y, m, k, (64, 64)), c, p, q, r, t, *stride, *pad, 0, 0, *dilation], smem=114752)
        count += close(d.get(y, want.shape, BF16), want, 6e-3)
    return count


def conv_wgrad(s: Any) -> int:
    n, h, width, c, k, r, t, (ph, pw), (sh, sw), (dh, dw) = 1, 9, 11, 128, 128, 3, 2, (1, 1), (2, 2), (1, 1)
    p, q = (h + 2 * ph - dh * (r - 1) - 1) // sh + 1, (width + 2 * pw - dw * (t - 1) - 1) // sw + 1
    m, x, dy, d = n * p * q, normal(n, h, width, c), normal(n, p, q, k), Device(s)
    out = d.put(np.zeros((k, r, t, c), np.float32))
    tx = im2col(d.put(x), x.shape, (64, 64), (-pw, -ph), (pw - (t - 1) * dw, ph - (r - 1) * dh), (sw, sh))
    d.run("21", (c // 128 * r * t, k // 64, 2), 256, [matrix(d.put(dy), m, k, (64, 64)), tx, out, c, p, q, r, t, sh, sw, ph, pw, dh, dw, -(-m // 64)], smem=98368)
    padded = np.pad(f64(x), ((0, 0), (ph, ph), (pw, pw), (0, 0)))
    want = np.stack([np.stack([np.einsum("npqk,npqc->kc", f64(dy), padded[:, i * dh : i * dh + (p - 1) * sh + 1 : sh, j * dw : j * dw + (q - 1) * sw + 1 : sw])
                               for j in range(t)], 1) for i in range(r)], 1)  # fmt: skip
    return close(d.get(out, want.shape, np.float32), want, 1e-5)


def conv_tiled(s: Any) -> int:
    count = 0
    bw, bh, bn = 8, 4, 2
    for n, h, width, c, k, r, t, (ph, pw), (sh, sw), (dh, dw) in GEOMETRIES:
        x, w, d = normal(n, h, width, c), normal(k, r, t, c), Device(s)
        want = convolution(x, w, (ph, pw), (sh, sw), (dh, dw))
        p, q = want.shape[1], want.shape[2]
        y = d.empty(want.shape, BF16)
        ta = TensorMap("bf16", d.put(x), (c, width, h, n), (c * 2, width * c * 2, h * width * c * 2), (64, bw * sw, bh * sh, bn), (1, sw, sh, 1), 128).encode()
        td = TensorMap("bf16", y, (k, q, p, n), (k * 2, q * k * 2, p * q * k * 2), (64, bw, bh, bn), (1, 1, 1, 1), 128).encode()
        tiles = (-(-q // bw), -(-p // bh), -(-n // bn))
        d.run("23", (k // 128, tiles[0] * tiles[1] * tiles[2]), 256,
              [ta, matrix(d.put(w), k, r * t * c, (64, 128)), td, c, r, t, *tiles[:2], bw, bh, bn, bw * sw, bh * sh, -pw, -ph, dw, dh, 0, c, t * c], smem=114752)
        count += close(d.get(y, want.shape, BF16), want, 6e-3)
    return count


def gemm_fp8(s: Any) -> int:
    count = 0
    for m, n, tiles in [(100, 256, 1), (70, 128, 5), (64, 128, 6)]:
        k = tiles * 128
        a, b = (rng.integers(0, 256, shape).astype(np.uint8) for shape in ((m, k), (n, k)))
        a[(a & 0x7F) == 0x7F], b[(b & 0x7F) == 0x7F] = 0x3A, 0x3A  # no NaN
        sa, sb, d = rng.random((tiles, m)).astype(np.float32) + 0.5, rng.random((tiles, n // 128)).astype(np.float32) + 0.5, Device(s)
        out = d.empty((m, n), BF16)
        d.run("24", (n // 128, -(-m // 64)), 256, [matrix(d.put(a), m, k, (128, 64), "u8"), matrix(d.put(b), n, k, (128, 128), "u8"), matrix(out, m, n, (64, 64)), tiles, d.put(sa), d.put(sb), m], smem=114752)
        parts = zip(np.split(f64(a.view(E4M3)), tiles, 1), np.split(f64(b.view(E4M3)), tiles, 1), sa, sb, strict=True)
        count += close(d.get(out, (m, n), BF16), sum(x @ y.T * u[:, None] * np.repeat(v, 128) for x, y, u, v in parts), 6e-3)
    return count


def gemm_persistent(s: Any) -> int:
    m, n, k = 300, 520, 192
    a, b, d = normal(m, k), normal(n, k), Device(s)
    c = d.empty((m, n), BF16)
    d.run("26", 4, 384, [matrix(d.put(a), m, k, (64, 128)), matrix(d.put(b), n, k, (64, 256)), matrix(c, m, n, (64, 64)), k // 64, 3, 3], smem=229440)
    return close(d.get(c, (m, n), BF16), f64(a) @ f64(b).T, 6e-3)


def conv_persistent(s: Any) -> int:
    count = 0
    for n, h, width, c, k, r, t, pad, stride, dilation in GEOMETRIES:
        n = 6
        x, w, d = normal(n, h, width, c), normal(k, r, t, c), Device(s)
        want = convolution(x, w, pad, stride, dilation)
        p, q, m = want.shape[1], want.shape[2], want.size // k
        y = d.empty((m, k), BF16)
        upper = (pad[1] - (t - 1) * dilation[1], pad[0] - (r - 1) * dilation[0])
        tx = im2col(d.put(x), x.shape, (64, 256), (-pad[1], -pad[0]), upper, stride[::-1])
        d.run("27", 2, 384, [tx, matrix(d.put(w), k, r * t * c, (64, 128)), matrix(y, m, k, (64, 64)), r * t * c // 64, -(-m // 256), k // 128,
                             c, p, q, t, *stride, *pad, *dilation], smem=229440)  # fmt: skip
        count += close(d.get(y, want.shape, BF16), want, 6e-3)
    return count


def conv_halo(s: Any) -> int:
    n, h, width, c, k = 1, 9, 28, 64, 128
    x, w, d = normal(n, h, width, c), normal(k, 3, 3, c), Device(s)
    want = convolution(x, w, (1, 1), (1, 1), (1, 1))
    y = d.empty(want.shape, BF16)
    total = n * (h + 1) * (width + 1)
    tx = im2col(d.put(x), x.shape, (64, 188), (-1, -1), (0, 0))
    d.run("28", 2, 384, [tx, matrix(d.put(w), k, 9 * c, (64, 128)), y, c // 64, -(-total // 128), 1, h + 1, h, width, k, total, 1], smem=213120)
    return close(d.get(y, want.shape, BF16), want, 6e-3)


CASES: dict[str, Callable[[Any], int]] = {
    "01": gemm_warp_specialised, "02": gemm_ampere, "03": ring_sum, "04": im2col_gather, "05": cluster_rows, "06": conversions,
    "06b": narrow_conversions, "08": mma_sync, "08b": mma_fp8, "08c": mma_double, "09": patched_map, "10": softmax, "11": philox, "12": atomics, "12b": atomics_ampere,
    "13": attention("13", 128, 384, 82048), "14": raster, "15": split_precision, "16": transpose, "18": gemm_multicast, "20": conv_im2col, "21": conv_wgrad,
    "23": conv_tiled, "24": gemm_fp8, "25": attention("25", 192, 512, 90240), "26": gemm_persistent, "27": conv_persistent, "28": conv_halo,
}  # fmt: skip

# Entries that are lists of instruction forms, written to be assembled: no result is defined, and running them is an error that the emulator
# names. (number, entry): what it says
FORMS = {
    ("04", "im2col_forms"): r"\[bounds\] the tensor map has rank 2, the instruction 3",  # every rank, with one map
    ("05", "cluster_bcast_plain"): r"\[race\] writes .* while the write by warp 0 of CTA",  # four CTAs store the same values in one place
    ("07", "wg_bf16_ss"): r"\[bounds\]",  # the descriptors are dummies, the kernel has no shared memory
    ("12", "tma_reduce"): r"\[uninit\] reads 16 bytes at shared address .* never written",
    ("19", "forms"): r"\[(race|uninit|barrier)\]",  # all threads copy to one place; barriers are signalled before they are initialised
    ("22", "numeric_forms_sm80"): r"\[uninit\] register %p is read before anything wrote it",
    ("22b", "numeric_forms_sm90"): r"\[uninit\] reads 16 bytes at shared address .* never written",
}


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
@pytest.mark.parametrize("number", CASES)
def test_snippet(number: str, schedule: Any) -> None:
    with np.errstate(all="ignore"):
        assert CASES[number](schedule) > 0


@pytest.mark.parametrize(("number", "entry"), FORMS)
def test_forms_decode_and_do_not_run(number: str, entry: str) -> None:
    module = parse(text_of(number))
    for each in module.entries:
        load(module, each.name)
    d = Device("lowest_pc")
    memory = d.put(np.zeros(4096, np.uint8))
    maps = matrix(memory, 16, 64, (64, 8))
    arguments: dict[str, list[Any]] = {"04": [maps], "05": [memory], "07": [memory, 0, 0], "12": [maps, 0, 0], "19": [memory, maps],
                                       "22": [memory, 1.0, 2.0], "22b": [memory, 1.0, 2.0, maps]}  # fmt: skip
    with pytest.raises(EmulatorFault, match=FORMS[number, entry]):
        d.run(number, 4 if number == "05" else 1, 128 if number in ("07", "19") else 32, arguments[number], entry, cluster=4 if number == "05" else 1)


def test_every_snippet_is_accounted_for() -> None:
    assert sorted(path.name.split("_")[0] for path in SNIPPETS.glob("*.ptx")) == sorted({*CASES, *(number for number, _ in FORMS)})
    assert len(CASES) >= 27
