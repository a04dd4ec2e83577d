"""Tensor copies against what an H100 recorded, and against NumPy."""

# ruff: noqa: E501 (tables)

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from oxidnn.codegen.spec import TensorMapSpec
from oxidnn.errors import EmulatorFault
from oxidnn.runtime.emu_backend import EmulatedBackend
from tests.emu.hopper import GPU, Kernel, Map, box_to_global, image, run, swizzled, wait

VECTORS = Path(__file__).parent / "vectors"
TILE = np.load(VECTORS / "vec_tma_tile.npz")
IM2COL = np.load(VECTORS / "vec_tma_im2col.npz")


@pytest.fixture(params=["lowest_pc", ("random", 3), GPU], ids=str)
def backend(request: pytest.FixtureRequest) -> Any:
    if request.param == "cuda":
        return request.getfixturevalue("cuda")
    return EmulatedBackend("sm_90a", "all", request.param)


@pytest.fixture
def emulator() -> EmulatedBackend:
    return EmulatedBackend("sm_90a", "all")


def matrix_map(x: np.ndarray, box: tuple[int, int], dtype: str = "bf16", swizzle: int = 0, **more: Any) -> TensorMapSpec:
    return TensorMapSpec(dtype, x.shape[::-1], (x.strides[0],), box, swizzle=swizzle, **more)


def load(backend: Any, x: np.ndarray, spec: TensorMapSpec, coordinates: tuple[int, ...], size: int, box_bytes: int, offsets: tuple[int, ...] = (),
         at: int = 0) -> np.ndarray:
    out = np.zeros(size + at, np.uint8)
    kernel = image(len(spec.dims), size, len(offsets), at=at)
    return run(backend, kernel, 1, [Map(spec, x), out, box_bytes, *coordinates, *offsets], [out])[0]


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_tiles_are_laid_out_as_recorded(backend: Any, span: int) -> None:
    x, recorded = TILE[f"tile_swz{span}_x"], TILE[f"tile_swz{span}_smem"]
    columns = span // 2 or 64
    got = load(backend, x, matrix_map(x, (columns, 16), swizzle=span), (0, 0), len(recorded), columns * 32)
    np.testing.assert_array_equal(got, recorded)


@pytest.mark.parametrize(("name", "span", "columns"), [("swz128_smem", 128, 32), ("swz128_bw16", 128, 16), ("swz64_bw16", 64, 16), ("swz128_bw8", 128, 8)])
def test_narrow_boxes_keep_the_pitch_of_the_span(backend: Any, name: str, span: int, columns: int) -> None:
    x, recorded = TILE["tile_swz128_x"], TILE[f"narrow_{name}"]
    got = load(backend, x, matrix_map(x, (columns, 16), swizzle=span), (0, 0), len(recorded), columns * 32)
    np.testing.assert_array_equal(got, recorded)


@pytest.mark.parametrize("dtype", ["f32", "f32_ftz", "tf32"])
def test_types_convert_as_recorded(backend: Any, dtype: str) -> None:
    source, loaded = TILE[f"dtype_{dtype.replace('_', '')}"]
    x = np.zeros((2, 16), np.uint32)
    x[0] = source
    got = load(backend, x, matrix_map(x, (16, 1), dtype), (0, 0), 64, 64)
    np.testing.assert_array_equal(got.view(np.uint32), loaded)


# filter, stride and tap of the name: (R, S), pads (top, bottom, left, right), stride, tap (r, s), first output pixel (n, p, q)
GATHERS = {
    "35_str1_tap24": ((3, 5), (0, 1, 2, 1), 1, (2, 4), (0, 0, 0)), "35_str1_tap01": ((3, 5), (1, 1, 2, 2), 1, (0, 1), (0, 3, 2)),
    "33_str2_tap12": ((3, 3), (1, 1, 1, 1), 2, (1, 2), (1, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize("span", [0, 32, 64, 128])
@pytest.mark.parametrize("name", GATHERS)
def test_im2col_gathers_as_recorded(backend: Any, span: int, name: str) -> None:
    (R, S), (top, bottom, left, right), stride, (r, s), (n, p, q) = GATHERS[name]
    x, recorded = IM2COL["im2col_x"], IM2COL[f"im2col_swz{span}_{name}"]
    N, H, W, C = x.shape
    channels = span // 2 or 64
    spec = TensorMapSpec("bf16", (C, W, H, N), (2 * C, 2 * C * W, 2 * C * W * H), (channels, 32), (1, stride, stride, 1), span,
                         ((-left, -top), (right - (S - 1), bottom - (R - 1))))
    got = load(backend, x, spec, (0, q * stride - left, p * stride - top, n), len(recorded), channels * 64, (s, r))
    np.testing.assert_array_equal(got, recorded)


def box_of(x: np.ndarray, coordinates: tuple[int, ...], box: tuple[int, ...], steps: tuple[int, ...], fill: int = 0) -> np.ndarray:
    """The box by plain indexing; tuples are innermost first."""
    out = np.full([-(-b // s) for b, s in zip(box, steps, strict=True)][::-1], fill, x.dtype)
    for index in np.ndindex(out.shape):
        at = tuple(c + i * s for c, i, s in zip(coordinates[::-1], index, steps[::-1], strict=True))
        if all(0 <= a < n for a, n in zip(at, x.shape, strict=True)):
            out[index] = x[at]
    return out


@pytest.mark.parametrize(("dims", "box", "coordinates", "steps"), [
    ((40,), (24,), (-8,), (1,)), ((40,), (24,), (32,), (1,)), ((40,), (24,), (48,), (1,)), ((24, 9), (16, 8), (-8, -2), (1, 1)),
    ((24, 9), (16, 8), (16, 4), (1, 3)), ((16, 5, 4), (16, 3, 3), (8, -1, 2), (1, 2, 1)), ((8, 5, 4, 3), (8, 3, 2, 2), (0, 3, -1, 2), (1, 1, 1, 1)),
    ((16, 3, 4, 3, 2), (16, 2, 3, 2, 2), (-8, -1, 2, 1, 1), (1, 1, 2, 1, 1)),
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "kind", "nan"), [("bf16", np.uint16, False), ("f16", np.uint16, True), ("u32", np.uint32, False), ("f64", np.uint64, False),
                                                    ("f32", np.uint32, True)])
def test_boxes_of_every_rank_fill_what_is_outside(backend: Any, dims: Any, box: Any, coordinates: Any, steps: Any, dtype: str, kind: Any,
                                                  nan: bool) -> None:
    size = np.dtype(kind).itemsize
    x = np.random.default_rng(0).integers(1, 60000, dims[::-1]).astype(kind)
    spec = TensorMapSpec(dtype, dims, tuple(s for s in x.strides[-2::-1]), box, steps, fills_nan=nan)
    want = box_of(x, coordinates, box, steps, {2: 0x7FF7, 4: 0x7FF77FF7}[size] if nan else 0)
    got = load(backend, x, spec, coordinates, want.nbytes, want.nbytes)
    np.testing.assert_array_equal(got.view(kind), want.reshape(-1))


@pytest.mark.parametrize("at", [128, 384, 640])
def test_the_swizzle_follows_absolute_addresses(backend: Any, at: int) -> None:
    x = np.arange(16 * 64, dtype=np.uint16).reshape(16, 64)
    got = load(backend, x, matrix_map(x, (64, 16), swizzle=128), (0, 0), 2048, 2048, at=at)
    units = (np.arange(128)) + at // 16
    want = np.full((2048 + at) // 16 * 16, 0xCD, np.uint8).reshape(-1, 16)
    want[units ^ (units >> 3 & 7)] = x.view(np.uint8).reshape(-1, 16)
    np.testing.assert_array_equal(got, want.reshape(-1))


@pytest.mark.parametrize("span", [0, 32, 64, 128])
def test_stores_undo_the_swizzle_and_clip(backend: Any, span: int) -> None:
    columns = span // 2 or 64
    rng = np.random.default_rng(1)
    rows = rng.integers(0, 65536, (16, columns)).astype(np.uint16)
    y = np.full((20, 104), 0xFFFF, np.uint16)
    spec = TensorMapSpec("bf16", (100, 18), (208,), (columns, 16), swizzle=span)  # 100 columns and 18 rows of 104 and 20
    x0, y0 = 104 - columns // 2, 10
    src = swizzled(rows, span)
    got = run(backend, box_to_global(2, len(src)), 1, [Map(spec, y), src, x0, y0], [y])[0]
    want = y.copy()
    width = -(-(100 - x0) // 8) * 8  # whole 16-byte chunks
    want[10:18, x0 : x0 + width] = rows[:8, :width]
    np.testing.assert_array_equal(got, want)


REDUCTIONS = [("add", "f32"), ("add", "f64"), ("add", "bf16"), ("add", "f16"), ("add", "s32"), ("add", "u64"), ("min", "s32"), ("max", "s32"), ("min", "f16"),
              ("max", "bf16"), ("and", "u32"), ("or", "u32"), ("xor", "u32"), ("inc", "u32"), ("dec", "u32")]
KINDS: dict[str, Any] = {"f32": np.float32, "f64": np.float64, "bf16": ml_dtypes.bfloat16, "f16": np.float16, "s32": np.int32, "u64": np.uint64, "u32": np.uint32}


@pytest.mark.parametrize(("operation", "dtype"), REDUCTIONS)
def test_reductions(backend: Any, operation: str, dtype: str) -> None:
    kind = np.dtype(KINDS[dtype])
    rng = np.random.default_rng(2)
    integer = kind.kind in "iu"
    a, b = ((rng.integers(0, 50, (8, 16)) if integer else rng.standard_normal((8, 16))).astype(kind) for _ in range(2))
    spec = TensorMapSpec(dtype, (16, 8), (16 * kind.itemsize,), (16, 8))
    got = run(backend, box_to_global(2, a.nbytes, operation), 1, [Map(spec, b), a, 0, 0], [b])[0]
    wide_a, wide_b = a.astype(np.float64), b.astype(np.float64)
    want = {
        "add": lambda: (wide_a + wide_b).astype(kind) if not integer else a + b, "min": lambda: np.minimum(wide_a, wide_b).astype(kind),
        "max": lambda: np.maximum(wide_a, wide_b).astype(kind), "and": lambda: a & b, "or": lambda: a | b, "xor": lambda: a ^ b,
        "inc": lambda: np.where(b >= a, 0, b + 1).astype(kind), "dec": lambda: np.where((b == 0) | (b > a), a, b - 1).astype(kind),
    }[operation]()  # fmt: skip
    np.testing.assert_array_equal(got, want)


FAULTS: list[tuple[Any, str]] = [
    (lambda e, x: load(e, x, matrix_map(x, (32, 16)), (4, 0), 1024, 1024), r"\[align\] the box begins 8 bytes into the rows"),
    (lambda e, x: run(e, box_to_global(2, 1024), 1, [Map(matrix_map(x, (32, 16)), x), np.zeros(1024, np.uint8), 4, 0], [x]),
     r"\[align\] the box begins 8 bytes into the rows"),
    (lambda e, x: load(e, x, matrix_map(x, (64, 16), swizzle=128), (0, 0), 1024, 2048), r"\[bounds\] the destination .* leaves the \d+ bytes of shared memory"),
    (lambda e, x: load(e, x, matrix_map(x, (64, 16)), (0, 0), 2048, 2048, at=16), r"\[align\] the destination .* not a multiple of 128"),
    (lambda e, x: load(e, x, matrix_map(x, (64, 16)), (0, 0), 2048, 4096), r"\[barrier\] deadlock.*lacks 2048 of the bytes expected"),
    (lambda e, x: load(e, x, matrix_map(x, (64, 16)), (0, 0), 2048, 1024), r"\[barrier\] deadlock.*1024 bytes more than expected"),
    (lambda e, x: load(e, x, TensorMapSpec("bf16", (64, 32), (256,), (64, 16)), (0, 16), 2048, 2048), r"\[bounds\] .* past the end of"),
    (lambda e, x: run(e, box_to_global(2, 2048), 1, [Map(matrix_map(x, (64, 16)), x), np.zeros(2048, np.uint8), -1, 0], [x]),
     r"\[bounds\] a tensor store at the negative coordinates"),
    (lambda e, x: run(e, box_to_global(2, 2048, "min"), 1, [Map(TensorMapSpec("f32", (32, 16), (128,), (32, 16)), x), np.zeros(2048, np.uint8), 0, 0], [x]),
     r"\[bounds\] a reduction by min of .f32 is not supported"),
    (lambda e, x: load(e, x, TensorMapSpec("bf16", (64, 4, 4, 1), (128, 512, 2048), (64, 16), (), 0, ((-1, -1), (-1, -1))), (0, -2, 0, 0), 2048, 2048, (0, 0)),
     r"\[bounds\] im2col base coordinate W is -2, outside of the bounding box -1 to 2"),
]  # fmt: skip


@pytest.mark.parametrize(("case", "report"), FAULTS)
def test_what_faults_on_silicon_faults_here(emulator: EmulatedBackend, case: Any, report: str) -> None:
    with pytest.raises(EmulatorFault, match=report):
        case(emulator, np.zeros((16, 64), np.uint16))


@pytest.mark.parametrize(("size", "align", "at"), [(0, 1, 1024), (4, 4, 1040), (8, 8, 1040), (24, 8, 1056), (1024, 16, 2048), (1040, 16, 2064), (8, 1024, 1040)])
def test_dynamic_memory_begins_behind_the_static(backend: Any, size: int, align: int, at: int) -> None:
    """At the next multiple of 16, although the kernels declare `smem` with .align 1024: the first thing an operand of TMA or wgmma trips over."""
    static = f".shared .align {align} .b8 fixed[{size}]; mov.u32 %r1, fixed; st.shared.b8 [%r1], 1; st.global.u32 [%out+4], %r1;" if size else ""
    out = np.full(2, 1024, np.uint32)
    kernel = Kernel("places", ("out:u64",), f"st.global.u32 [%out], %smem; {static} ret;", threads=1, smem=2048)
    assert run(backend, kernel, 1, [out], [out])[0].tolist() == [at, 1024]


def test_a_barrier_beside_the_tile_misaligns_it(emulator: EmulatedBackend) -> None:
    kernel = image(2, 2048)
    text = kernel.text.replace("add.u32 %full, %smem, 2048;", ".shared .align 8 .b64 fixed; mov.u32 %full, fixed;")
    x = np.zeros((16, 64), np.uint16)
    with pytest.raises(EmulatorFault, match=r"\[align\] the destination .* not a multiple of 128"):
        run(emulator, kernel, 1, [Map(matrix_map(x, (64, 16)), x), np.zeros(2048, np.uint8), 2048, 0, 0], [], text)


def test_contiguous_copies_in_every_direction(backend: Any) -> None:
    """Global to shared of rank 0, from there to the peer's, and back to global memory: as it is, and added to what is there."""
    kernel = Kernel("bulk", ("x:u64", "out:u64", "sum:u64"), f"""
.shared .align 8 .b64 b; .reg .b32 %rank, %remote, %bar;
mov.u32 %rank, %cluster_ctarank; setp.ne.u32 %p0, %thread, 0; setp.ne.u32 %p1, %rank, 0;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [b], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [b], 512;
READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@%p0 bra LEAVE;
@%p1 bra RECEIVE;
cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%smem], [%x], 512, [b];
{wait('b', '0', 'W')}
mov.u32 %r1, b; mapa.shared::cluster.u32 %remote, %smem, 1; mapa.shared::cluster.u32 %bar, %r1, 1;
cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%remote], [%smem], 512, [%bar];
bra LEAVE;
RECEIVE:
{wait('b', '0', 'V')}
cp.async.bulk.global.shared::cta.bulk_group [%out], [%smem], 512;
cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%sum], [%smem], 512;
cp.async.bulk.commit_group;
cp.async.bulk.wait_group 0;
LEAVE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ret;""", threads=32, smem=512, cluster=2)
    rng = np.random.default_rng(3)
    x, out, total = (rng.integers(0, 99, 128).astype(np.float32) for _ in range(3))
    got = run(backend, kernel, 2, [x, out, total], [out, total])
    np.testing.assert_array_equal(got[0], x)
    np.testing.assert_array_equal(got[1], x + total)
    if isinstance(backend, EmulatedBackend):
        for before, after, report in (
            ("cp.async.bulk.wait_group 0;", "", r"\[async\] exits while its bulk copies may still read"),
            ("LEAVE: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", "LEAVE:", r"\[race\] CTA \(0,0,0\) exits although .* may still be used"),
            (wait("b", "0", "W"), "", r"\[(race|uninit)\]"), ("[%remote], [%smem], 512", "[%remote], [%smem], 256", r"\[barrier\] deadlock.*lacks 256"),
        ):
            assert before in kernel.text
            with pytest.raises(EmulatorFault, match=report):
                run(backend, kernel, 2, [x, out, total], [out], kernel.text.replace(before, after))


def test_a_tile_goes_to_every_cta_of_the_mask(backend: Any) -> None:
    kernel = Kernel("spread", ("map:tensor_map", "out:u64"), f"""
.reg .b32 %rank, %b; .reg .b16 %mask;
add.u32 %b, %smem, 1024;
mov.u32 %rank, %cluster_ctarank; setp.ne.u32 %p0, %thread, 0; setp.ne.u32 %p1, %rank, 2;
@%p0 bra READY;
mbarrier.init.shared::cta.b64 [%b], 1; fence.mbarrier_init.release.cluster;
mbarrier.arrive.expect_tx.shared::cta.b64 _, [%b], 1024;
READY: barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
@%p0 bra WAIT; @%p1 bra WAIT;
mov.u16 %mask, 15;
cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster [%smem], [%map, {{8, 1}}], [%b], %mask;
{wait('%b', '0', 'WAIT')}
mov.u32 %r1, %ctaid.x; mad.lo.u32 %r1, %r1, 32, %thread; mul.wide.u32 %rd0, %r1, 32; add.u64 %rd0, %out, %rd0; mad.lo.u32 %r2, %thread, 32, %smem;
ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2]; st.global.v4.b32 [%rd0], {{%r4, %r5, %r6, %r7}};
ld.shared.v4.b32 {{%r4, %r5, %r6, %r7}}, [%r2+16]; st.global.v4.b32 [%rd0+16], {{%r4, %r5, %r6, %r7}};
barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;
ret;""", threads=32, smem=1032, cluster=4)
    x = np.random.default_rng(4).integers(0, 60000, (20, 48)).astype(np.uint16)
    out = np.zeros((4, 16, 32), np.uint16)
    got = run(backend, kernel, 4, [Map(matrix_map(x, (32, 16)), x), out], [out])[0]
    np.testing.assert_array_equal(got, np.broadcast_to(x[1:17, 8:40], got.shape))
