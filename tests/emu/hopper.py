"""Small Hopper kernels and their launch on any backend: the emulator and a GPU run the same text with the same arguments."""

# ruff: noqa: E501 (lines of PTX)

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from oxidnn.codegen.spec import KernelSpec, Param, Target, TensorMapSpec

GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@dataclass(frozen=True)
class Kernel:
    """An entry: its parameters as "name:type", threads, dynamic shared memory, cluster, and the body between the braces.

    `smem` is aligned to 1024 only where the body declares no static arrays: dynamic memory begins right behind them.
    """

    name: str
    params: tuple[str, ...]
    body: str
    threads: int = 128
    smem: int = 0
    cluster: int = 1

    @property
    def spec(self) -> KernelSpec:
        params = tuple(Param(*p.split(":")) for p in self.params)
        return KernelSpec(f"test/{self.name}", "test", Target("sm_90a", (8, 0)), self.threads, params, None, dynamic_smem=self.smem, cluster=self.cluster)

    @property
    def text(self) -> str:
        spec = self.spec
        cluster = f".explicitcluster .reqnctapercluster {self.cluster}, 1, 1" if self.cluster > 1 else ""
        maps = "".join(
            f".reg .b64 %{p.name}; mov.b64 %{p.name}, {p.name}; cvta.param.u64 %{p.name}, %{p.name};\n" if p.type == "tensor_map"
            else f".reg .b{p.type[1:]} %{p.name}; ld.param.{p.type} %{p.name}, [{p.name}];\n" for p in spec.params)
        return (
            f".version 8.4\n.target sm_90a\n.address_size 64\n.extern .shared .align 1024 .b8 smem[];\n.visible .entry {spec.symbol}("
            + ", ".join(p.declaration for p in spec.params)
            + f") .maxntid {self.threads}, 1, 1 .minnctapersm 1 {cluster}\n{{\n.reg .pred %done, %leader, %p<8>; .reg .b32 %thread, %warp, %lane, %smem, %r<16>; "
            f".reg .b64 %rd<8>; .reg .b16 %h<8>;\n{maps}mov.u32 %thread, %tid.x; mov.u32 %smem, smem; and.b32 %lane, %thread, 31;\n"
            "shr.u32 %r0, %thread, 5; shfl.sync.idx.b32 %warp, %r0, 0, 31, -1;\n" + self.body + "\n}\n")


@dataclass(frozen=True)
class Map:
    """A tensor map over an array argument."""

    spec: TensorMapSpec
    array: np.ndarray
    byte_offset: int = 0


def run(backend: Any, kernel: Kernel, grid: Any, args: list[Any], outputs: list[np.ndarray], text: str | None = None) -> list[np.ndarray]:
    """Launches `kernel` (or `text` in its place) with arrays uploaded; the arrays `outputs`, among args, as they are afterwards."""
    spec = kernel.spec
    stream = backend.default_stream()
    blocks: dict[int, Any] = {}
    for arg in args:
        array = arg.array if isinstance(arg, Map) else arg
        if isinstance(array, np.ndarray) and id(array) not in blocks:
            blocks[id(array)] = backend.allocate(max(array.nbytes, 16), stream)
            backend.upload(blocks[id(array)].ptr, np.ascontiguousarray(array).reshape(-1).view(np.uint8), stream)
    try:
        grid3 = (grid, 1, 1) if isinstance(grid, int) else grid
        launch = backend.load(kernel.text if text is None else text, spec).bind(
            grid3, [a.spec if isinstance(a, Map) else 0 if isinstance(a, np.ndarray) else a for a in args])
        for index, arg in enumerate(args):
            if isinstance(arg, Map):
                launch.set(index, blocks[id(arg.array)].ptr + arg.byte_offset)
            elif isinstance(arg, np.ndarray):
                launch.set(index, blocks[id(arg)].ptr)
        launch.launch(stream)
        backend.synchronize(stream)
        results = []
        for array in outputs:
            raw = np.empty(array.nbytes, np.uint8)
            backend.download(raw, blocks[id(array)].ptr, stream)
            backend.synchronize(stream)
            results.append(raw.view(array.dtype).reshape(array.shape))
        return results
    finally:
        for block in blocks.values():
            block.free()


def wait(barrier: str, parity: str, label: str) -> str:
    return f"{label}: mbarrier.try_wait.parity.shared::cta.b64 %done, [{barrier}], {parity};\n@!%done bra {label};\n"


def image(rank: int, num_bytes: int, offsets: int = 0, poison: int = 0xCDCDCDCD, at: int = 0) -> Kernel:
    """One box of a tensor map into shared memory (`at` bytes from its start), which goes to `out` byte by byte; what the box leaves keeps `poison`."""
    total = num_bytes + at
    coordinates = ", ".join(f"%c{i}" for i in range(rank))
    extra = f", {{{', '.join(f'%h{i}' for i in range(offsets))}}}" if offsets else ""
    params = ("map:tensor_map", "out:u64", "bytes:u32", *(f"c{i}:s32" for i in range(rank)), *(f"o{i}:u32" for i in range(offsets)))
    mode = "im2col" if offsets else "tile"
    body = f"""
.reg .b32 %full;
add.u32 %full, %smem, {total}; mov.u32 %r1, %thread;
FILL: setp.ge.u32 %p0, %r1, {total // 4}; @%p0 bra FILLED;
shl.b32 %r2, %r1, 2; add.u32 %r2, %r2, %smem; st.shared.b32 [%r2], {poison}; add.u32 %r1, %r1, 128; bra FILL;
FILLED:
fence.proxy.async.shared::cta;
setp.ne.u32 %p1, %thread, 0;
@%p1 bra READY;
mbarrier.init.shared::cta.b64 [%full], 1;
fence.mbarrier_init.release.cluster;
READY: bar.sync 0;
@%p1 bra WAIT;
{' '.join(f'cvt.u16.u32 %h{i}, %o{i};' for i in range(offsets))}
add.u32 %r3, %smem, {at};
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%full], %bytes;
cp.async.bulk.tensor.{rank}d.shared::cluster.global.{mode}.mbarrier::complete_tx::bytes [%r3], [%map, {{{coordinates}}}], [%full]{extra};
{wait('%full', '0', 'WAIT')}
mov.u32 %r1, %thread;
COPY: setp.ge.u32 %p0, %r1, {total // 4}; @%p0 bra END;
shl.b32 %r2, %r1, 2; add.u32 %r3, %r2, %smem; ld.shared.b32 %r4, [%r3]; cvt.u64.u32 %rd0, %r2; add.u64 %rd0, %out, %rd0; st.global.b32 [%rd0], %r4;
add.u32 %r1, %r1, 128; bra COPY;
END: ret;"""
    return Kernel(f"image{rank}{mode}{total}", params, body, smem=total + 8)


def box_to_global(rank: int, num_bytes: int, operation: str = "") -> Kernel:
    """`src` (the image of one box, byte by byte) into shared memory and from there, by a tensor store or reduction, to the map's tensor."""
    coordinates = ", ".join(f"%c{i}" for i in range(rank))
    opcode = f"cp.reduce.async.bulk.tensor.{rank}d.global.shared::cta.{operation}.tile.bulk_group" if operation else f"cp.async.bulk.tensor.{rank}d.global.shared::cta.tile.bulk_group"
    body = f"""
mov.u32 %r1, %thread;
FILL: setp.ge.u32 %p0, %r1, {num_bytes // 4}; @%p0 bra FILLED;
shl.b32 %r2, %r1, 2; cvt.u64.u32 %rd0, %r2; add.u64 %rd0, %src, %rd0; ld.global.b32 %r3, [%rd0]; add.u32 %r2, %r2, %smem; st.shared.b32 [%r2], %r3;
add.u32 %r1, %r1, 128; bra FILL;
FILLED:
fence.proxy.async.shared::cta;
bar.sync 0;
setp.ne.u32 %p1, %thread, 0; @%p1 bra END;
{opcode} [%map, {{{coordinates}}}], [%smem];
cp.async.bulk.commit_group;
cp.async.bulk.wait_group.read 0;
END: ret;"""
    return Kernel(f"store{rank}{operation}{num_bytes}", ("map:tensor_map", "src:u64", *(f"c{i}:s32" for i in range(rank))), body, smem=num_bytes)


def product(n: int, k: int, types: tuple[str, str, str], a_bytes: int, b_bytes: int, *, k_steps: int = 1, steps: tuple[int, int] = (0, 0), trans: str = "",
            signs: str = "1, 1", registers_a: bool = False, accumulates: bool = False) -> Kernel:
    """D (64, n) of one warpgroup: images of A and B go to shared memory (at 0 and at the next multiple of 1024), `k_steps` products with descriptors
    `da` and `db` (their start counted from the image), which `steps` advance; the accumulators go to `out` as [register][thread].
    accumulates: they begin as `init`, in the same order. registers_a: A comes from there too, [register][thread] of `areg`."""
    result, a_type, b_type = types
    count = n // 4 if result == "f16" else n // 2
    reg = "f32" if result == "f32" else "b32"
    b_at = -(-a_bytes // 1024) * 1024
    acc = ", ".join(f"%d{i}" for i in range(count))
    sat = ""
    a_operand = "{%a0, %a1, %a2, %a3}" if registers_a else "%rd2"
    tail = f", {signs}{trans}" if result != "s32" else ""
    products = "".join(
        f"wgmma.mma_async.sync.aligned.m64n{n}k{k}{sat}.{result}.{a_type}.{b_type} {{{acc}}}, {a_operand}, %rd3, %p{2 if i == 0 else 3}{tail};\n"
        f"add.s64 %rd2, %rd2, {steps[0]}; add.s64 %rd3, %rd3, {steps[1]};\n" for i in range(k_steps))
    stage = "".join(f"""
mov.u32 %r1, %thread;
F{name}: setp.ge.u32 %p0, %r1, {size // 4}; @%p0 bra G{name};
shl.b32 %r2, %r1, 2; cvt.u64.u32 %rd0, %r2; add.u64 %rd0, %{name}, %rd0; ld.global.b32 %r3, [%rd0]; add.u32 %r2, %r2, %smem; st.shared.b32 [%r2+{at}], %r3;
add.u32 %r1, %r1, 128; bra F{name};
G{name}:""" for name, size, at in (("a", a_bytes, 0), ("b", b_bytes, b_at)) if size)
    body = f"""
.reg .{reg} %d<{count}>; .reg .b32 %a<4>;
{stage}
mul.wide.u32 %rd1, %thread, 4;
{f'''add.u64 %rd4, %init, %rd1;
{chr(10).join(f"ld.global.{reg} %d{i}, [%rd4+{512 * i}];" for i in range(count))}''' if accumulates else ''}
{f'''add.u64 %rd4, %areg, %rd1;
{chr(10).join(f"ld.global.b32 %a{i}, [%rd4+{512 * i}];" for i in range(4))}''' if registers_a else ''}
fence.proxy.async.shared::cta;
bar.sync 0;
and.b32 %r4, %smem, 0x3FFFF; shr.u32 %r4, %r4, 4; cvt.u64.u32 %rd2, %r4; add.u64 %rd3, %rd2, {b_at >> 4};
add.u64 %rd2, %rd2, %da; add.u64 %rd3, %rd3, %db;
setp.{'eq' if accumulates else 'ne'}.u32 %p2, 0, 0; setp.eq.u32 %p3, 0, 0;
wgmma.fence.sync.aligned;
{products}wgmma.commit_group.sync.aligned;
wgmma.wait_group.sync.aligned 0;
add.u64 %rd4, %out, %rd1;
{chr(10).join(f"st.global.{reg} [%rd4+{512 * i}], %d{i};" for i in range(count))}
ret;"""
    params = ("a:u64", "b:u64", "out:u64", "da:u64", "db:u64", *(("init:u64",) if accumulates else ()), *(("areg:u64",) if registers_a else ()))
    return Kernel(f"product{n}_{result}{a_type}{b_type}{trans.replace(', ', '')}", params, body, smem=b_at + max(b_bytes, 16))


def accumulator_rows(registers: np.ndarray, dtype: Any) -> np.ndarray:
    """[register][thread] of m64nN to the matrix (64, N): row 16 w + g + 8 (i / 2 % 2), column 8 (i / 4) + 2 q + i % 2."""
    packed = np.dtype(dtype) == np.float16
    flat: np.ndarray = registers.view(np.uint32).reshape(-1, 128)
    flat = flat.view(np.float16).reshape(len(flat), 128, 2).transpose(0, 2, 1).reshape(-1, 128) if packed else flat.view(dtype)
    out = np.empty((64, 2 * len(flat)), dtype)
    i, t = np.meshgrid(np.arange(len(flat)), np.arange(128), indexing="ij")
    out[16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2] = flat
    return out


def accumulator_registers(rows: np.ndarray) -> np.ndarray:
    """The inverse, as raw 32-bit registers."""
    columns = rows.shape[1]
    i, t = np.meshgrid(np.arange(columns // 2), np.arange(128), indexing="ij")
    flat = rows[16 * (t // 32) + t % 32 // 4 + 8 * (i // 2 % 2), 8 * (i // 4) + 2 * (t % 4) + i % 2]
    if rows.dtype == np.float16:
        flat = np.ascontiguousarray(flat.reshape(-1, 2, 128).transpose(0, 2, 1)).view(np.uint32)[..., 0]
    return np.ascontiguousarray(flat).view(np.uint32)


def registers_a(rows: np.ndarray) -> np.ndarray:
    """(64, k) codes of A as [register][thread]: register 2j + h holds row g + 8h, columns (4j + q) w and up; w codes in 32 bits."""
    w = 4 // rows.itemsize
    r, t, e = np.meshgrid(np.arange(4), np.arange(128), np.arange(w), indexing="ij")
    flat = rows[16 * (t // 32) + t % 32 // 4 + 8 * (r & 1), w * (t % 4) + e + 4 * w * (r >> 1)]
    return np.ascontiguousarray(flat).view(np.uint32)[..., 0]


def swizzled(rows: np.ndarray, span: int) -> np.ndarray:
    """Rows of at most `span` bytes as their image in shared memory: chunk c of row r at r span + 16 (c ^ r % 8), r / 2 % 4, r / 4 % 2."""
    raw = np.ascontiguousarray(rows).view(np.uint8).reshape(len(rows), -1, 16)
    pitch = span // 16 if span else raw.shape[1]
    out = np.zeros((len(rows), pitch, 16), np.uint8)
    r, c = np.meshgrid(np.arange(len(rows)), np.arange(raw.shape[1]), indexing="ij")
    where = (r * pitch + c) ^ ((r * pitch + c) // 8 & {0: 0, 32: 1, 64: 3, 128: 7}[span])
    out.reshape(-1, 16)[where] = raw[r, c]
    return out.reshape(-1)


# -- one wgmma on whole matrices

KIND: dict[str, Any] = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32, "e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2,
                        "s8": np.int8, "u8": np.uint8}
K = {"bf16": 16, "f16": 16, "tf32": 8, "e4m3": 32, "e5m2": 32, "s8": 32, "u8": 32}
SWIZZLE = {0: 0, 128: 1, 64: 2, 32: 3}
RESULT: dict[str, Any] = {"f32": np.float32, "f16": np.float16, "s32": np.int32}


def descriptor(span: int, leading: int, stride: int) -> int:
    return SWIZZLE[span] << 62 | (stride >> 4) << 32 | (leading >> 4) << 16


def k_major(x: np.ndarray, span: int) -> tuple[np.ndarray, int]:
    """Rows of 32 bytes or, swizzled, of a span of which the first 32 bytes count: (image, descriptor)."""
    if span:
        return swizzled(x, span), descriptor(span, 16, 8 * span)
    rows = x.view(np.uint8).reshape(len(x) // 8, 8, 2, 16)  # 8-row groups of two core matrices, 128 bytes each
    return np.ascontiguousarray(rows.transpose(0, 2, 1, 3)).reshape(-1), descriptor(0, 128, 256)


def mn_major(x: np.ndarray, span: int) -> tuple[np.ndarray, int]:
    """(rows, 16) as 16 k rows of contiguous elements, in chunks of a span: (image, descriptor)."""
    t = np.ascontiguousarray(x.T)  # (16, rows)
    if span:
        per = span // 2
        chunks = [swizzled(t[:, c : c + per], span) for c in range(0, t.shape[1], per)]
        return np.concatenate(chunks), descriptor(span, 16 * span, 8 * span)
    blocks = t.view(np.uint8).reshape(2, 8, t.shape[1] // 8, 16)  # k group, k, chunk of 8 elements
    image = np.ascontiguousarray(blocks.transpose(2, 0, 1, 3)).reshape(-1)  # chunk, k group, k: 128 bytes a core matrix
    return image, descriptor(0, 128, 256)


def multiply(backend: Any, a: np.ndarray, b: np.ndarray, types: tuple[str, str, str], spans: tuple[int, int] = (128, 128), mn: tuple[bool, bool] = (False, False),
             signs: str = "1, 1", init: np.ndarray | None = None, in_registers: bool = False) -> np.ndarray:
    result, a_type, b_type = types
    a_image, da = (mn_major if mn[0] else k_major)(a, spans[0])
    b_image, db = (mn_major if mn[1] else k_major)(b, spans[1])
    trans = ""
    if a_type in ("f16", "bf16"):
        trans = f", {int(mn[1])}" if in_registers else f", {int(mn[0])}, {int(mn[1])}"
    n = len(b)
    out = np.full((n // (4 if result == "f16" else 2), 128), 0xFFFFFFFF, np.uint32)
    kernel = product(n, K[a_type], types, len(a_image), len(b_image), trans=trans, signs=signs, registers_a=in_registers, accumulates=init is not None)
    args: list[Any] = [a_image, b_image, out, da, db]
    if init is not None:
        args.append(accumulator_registers(init))
    if in_registers:
        args.append(registers_a(a.view(np.dtype(f"u{a.itemsize}"))))
    return accumulator_rows(run(backend, kernel, 1, args, [out])[0], RESULT[result])
