"""Planning of the tiled matmuls: digits, vector widths, thread grids, raster, splits."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest

from oxidnn.device import known_device
from oxidnn.dtypes import BF16, F32
from oxidnn.engines import affine_tiling as tiling
from oxidnn.engines.affine import AffineMatmul, Bound, IndexSpace, Source, Target
from oxidnn.engines.affine_mma_sm80 import swizzle_for


def values(extents: tuple[int, ...], weights: tuple[int, ...]) -> np.ndarray:
    grids = np.meshgrid(*(np.arange(e) for e in extents), indexing="ij")
    return sum((g * w for g, w in zip(grids, weights, strict=True)), np.zeros(extents, np.int64)).reshape(-1)


def test_merging_digits_changes_no_offset() -> None:
    rng = np.random.default_rng(0)
    for _ in range(300):
        extents = tuple(int(e) for e in rng.integers(1, 5, rng.integers(0, 5)))
        weights = []
        for _ in range(2):
            row, step = [], 1
            for e in reversed(extents):  # packed strides, now and then broken
                row.append(step if rng.random() < 0.8 else int(rng.integers(-3, 4)))
                step = row[-1] * e
            weights.append(tuple(reversed(row)))
        merged, columns = tiling.merge(extents, weights)
        assert len(merged) <= max(1, len(extents)) and prod(merged) == prod(extents)
        for before, after in zip(weights, columns, strict=True):
            assert (values(extents, before) == values(merged, after)).all()


def conv(channels: int = 16, base: int = 0, align: int = 16, stride_w: int | None = None) -> AffineMatmul:
    """A 3x3 NHWC convolution of 2 x 6 x 5 pixels."""
    c = channels
    w = stride_w or c
    bounds = (Bound((0, 1, 0), (1, 0, 0), -1, 6), Bound((0, 0, 1), (0, 1, 0), -1, 5))
    return AffineMatmul(IndexSpace((2, 6, 5)), IndexSpace((8,)), IndexSpace((3, 3, c)),
                        Source("x", BF16, (30 * w, 5 * w, w), (5 * w, w, 1), (), base - 6 * w, bounds, align),
                        Source("w", BF16, (9 * c,), (3 * c, c, 1)), Target("y", BF16, (240, 40, 8), (1,)), F32)


@pytest.mark.parametrize(("am", "width", "reason"), [
    (conv(), 8, ""), (conv(12), 4, "innermost k extent 12"), (conv(5), 1, "extent 5"), (conv(base=2), 2, "base"),
    (conv(align=4), 2, "alignment"), (conv(stride_w=20), 4, "stride"), (conv(stride_w=17), 1, "stride")])
def test_vector_widths_and_their_reasons(am: AffineMatmul, width: int, reason: str) -> None:
    d = tiling.merged_digits(am)
    vector = tiling.widest_vector(d.a, d.k, d.batch, "k")
    assert vector.width == width and reason in vector.reason
    along_row = tiling.widest_vector(d.a, d.k, d.batch, "row")
    assert along_row.width == 1 and "not 1" in along_row.reason


def test_no_vector_across_a_bound() -> None:
    """NCHW: contiguous along w, but where padding begins depends on w."""
    bounds = (Bound((0, 1), (1, 0), -1, 8), Bound((0, 1), (0, 1), -1, 8))
    source = Source("x", BF16, (8, 1), (8, 1), (), 0, bounds)
    x = tiling.Operand(source, (8, 8), (8, 1), (8, 1), (), bounds)
    vector = tiling.widest_vector(x, (3, 3), (), "row")
    assert vector.width == 1 and "bound" in vector.reason


@pytest.mark.parametrize("major", ["k", "row"])
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", [1, 2, 4, 8])
@pytest.mark.parametrize(("rows", "tile_k", "threads"), [(128, 32, 128), (64, 32, 256), (128, 64, 128), (32, 16, 32), (16, 32, 128)])
def test_loaders_cover_the_tile_once(major: str, size: int, width: int, rows: int, tile_k: int, threads: int) -> None:
    """Every element of the tile has one thread and one place in shared memory; ldmatrix phases touch eight different bank columns."""
    if width * size > 16:
        pytest.skip("wider than 16 bytes")
    d = tiling.merged_digits(conv())
    pitch = (tile_k if major == "k" else rows) * size
    swizzle = swizzle_for(size, major, pitch)
    if swizzle == (1, 0, 7) and pitch < 128:
        pytest.skip("lines of words shorter than the banks are not used")
    dtype = BF16 if size == 2 else F32
    source = Source("x", dtype, (1,), (1,))
    x = tiling.Operand(source, (rows,), (1,), (1,), (), ())
    loader = tiling.plan_loader("a", x, d, tiling.Vector(major, width), rows, tile_k, threads, 0, pitch, swizzle, True, False)
    owner = np.zeros((rows, tile_k), int)
    used = np.zeros(rows * tile_k * size, int)

    def place(line: int, inner: int) -> int:
        left, right, mask = swizzle
        return line * pitch + ((inner * size) ^ (((line << left >> right) & mask) << 4))

    for thread in range(threads):
        inner, line = thread % loader.inner_threads * loader.vec, thread // loader.inner_threads
        for i in range(loader.row_positions):
            for j in range(loader.k_positions):
                row = (line if major == "k" else inner) + i * loader.row_step
                k = (inner if major == "k" else line) + j * loader.k_step
                register, constant = loader.place(i, j)
                line_off, inner_off = loader.smem_registers[register]
                at = place(line + line_off, inner + inner_off) + constant
                assert at == (place(row, k) if major == "k" else place(k, row))
                used[at:at + loader.vec * size] += 1
                if major == "k":
                    owner[row, k:k + loader.vec] += 1
                else:
                    owner[row:row + loader.vec, k] += 1
    assert (owner == 1).all() and (used == 1).all()
    if size == 2:
        for first in range(0, rows if major == "k" else tile_k, 8):
            assert len({place(first + i, 0) // 16 % 8 for i in range(8)}) == 8


def sized(m: int, n: int, k: int, batch: int = 1) -> AffineMatmul:
    return AffineMatmul(IndexSpace((m,)), IndexSpace((n,)), IndexSpace((k,)), Source("a", F32, (1,), (1,), (0,)),
                        Source("b", F32, (1,), (1,), (0,)), Target("d", F32, (1,), (1,), (0,)), F32, IndexSpace((batch,)))


@pytest.mark.parametrize(("m", "n", "batch", "splits"), [(1, 1, 1, 1), (5, 1, 2, 1), (19, 3, 2, 2), (16, 4, 1, 3), (3, 7, 1, 1)])
def test_raster_visits_every_tile_once(m: int, n: int, batch: int, splits: int) -> None:
    am = sized(m * 32, n * 32, splits * 16, batch)
    grid = tiling.plan_grid(am, (32, 32, 16), splits)
    seen = set()
    for cta in range(grid.ctas):
        outer, tile = divmod(cta, grid.m_tiles * grid.n_tiles)
        group, within = divmod(tile, grid.group_m * grid.n_tiles)
        rows = grid.group_tail if group == grid.last_group else grid.group_m
        tile_n, row = divmod(within, rows)
        seen.add((*divmod(outer, batch), group * grid.group_m + row, tile_n))
    assert seen == {(s, b, i, j) for s in range(splits) for b in range(batch) for i in range(m) for j in range(n)}


def test_splits_fill_the_device() -> None:
    am = sized(64, 576, 100_000)
    device = known_device("sm_90a")
    choices = tiling.split_choices(am, (64, 64, 32), 128, device)
    assert choices[0] == 1 and all(tiling.plan_grid(am, (64, 64, 32), s).ctas <= 4 * device.num_sms for s in choices)
    assert max(tiling.plan_grid(am, (64, 64, 32), s).ctas for s in choices) > 3 * device.num_sms


def test_mixed_radix_digits_add_up() -> None:
    assert tiling.mixed_radix(32, (7, 3, 5)) == (2, 0, 2)
    assert tiling.mixed_radix(32, (7,)) == (32,)
