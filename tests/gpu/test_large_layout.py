"""Copies and scans of more than 2^31 elements, on a device: chosen places of the result, the last among them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from oxidnn.dispatch.registry import ENGINES
from oxidnn.ops.case import parse_case
from oxidnn.plan import Plan

from .configs import check_configs

PERIOD = (1 << 26) - 5  # of the bytes that repeat: no power of two
ROWS, COLUMNS = 50021, 43013
Places = tuple[np.ndarray, ...]
CASES: dict[str, Callable[[Places], Places]] = {  # line -> the coordinates in x of coordinates of the result
    f"permute x=u8[{ROWS},{COLUMNS}]": lambda at: (at[1], at[0]),
    f"flip x=u8[{ROWS},{COLUMNS}] axes=(1,)": lambda at: (at[0], COLUMNS - 1 - at[1]),
    f"roll x=u8[{ROWS},{COLUMNS}] shifts=(7,11) axes=(0,1)": lambda at: ((at[0] - 7) % ROWS, (at[1] - 11) % COLUMNS),
    f"pad x=u8[{ROWS},{COLUMNS}] padding=((2,3),(5,6)) mode=replicate":
        lambda at: (np.clip(at[0] - 2, 0, ROWS - 1), np.clip(at[1] - 5, 0, COLUMNS - 1)),
    f"cast x=u8[{ROWS},{COLUMNS}] dtype=f16": lambda at: at,
    f"unfold x=u8[2,1,{ROWS // 2},{COLUMNS // 2}] kernel=(1,3)":
        lambda at: (at[0], 0 * at[0], at[2] // (COLUMNS // 2 - 2), at[2] % (COLUMNS // 2 - 2) + at[1]),
}


def test_places_are_beyond_31_bits() -> None:
    assert ROWS * COLUMNS > 2**31


@pytest.mark.gpu
@pytest.mark.parametrize("line", CASES)
def test_more_than_two_to_the_31_elements(cuda, line: str) -> None:  # type: ignore[no-untyped-def]
    problem = parse_case(line)
    x, y = problem.desc("x"), problem.desc("y")
    rng = np.random.default_rng(1)
    block = rng.integers(0, 256, PERIOD, np.uint8)
    stream = cuda.default_stream()
    blocks = [cuda.allocate(d.num_bytes, stream) for d in (x, y)]
    # the ends of every dimension, and places anywhere
    places = np.stack([np.concatenate([rng.integers(0, n, 300), np.arange(20) % n, n - 1 - np.arange(20) % n]) for n in y.shape])
    places = np.concatenate([places, np.array([n - 1 for n in y.shape])[:, None]], 1)
    offsets = sum(p * s for p, s in zip(places.astype(np.int64), y.strides, strict=True))
    source = CASES[line](tuple(places.astype(np.int64)))
    want = block[sum(p * s for p, s in zip(source, x.strides, strict=True)) % PERIOD]
    try:
        for start in range(0, x.num_bytes, PERIOD):
            cuda.upload(blocks[0].ptr + start, block[: x.num_bytes - start], stream)
        cuda.synchronize(stream)
        for engine in ENGINES[problem.op]:
            if not engine.check_support(problem, cuda.info):
                continue
            for config in engine.configs(problem, cuda.info)[:2]:
                plan = Plan(problem, engine, config, engine.build_steps(problem, config, cuda.info), cuda)
                cuda.fill(blocks[1].ptr, 0xFF, y.num_bytes, stream)
                plan.execute([b.ptr for b in blocks], 0, stream)
                got = np.empty(len(offsets), y.dtype.numpy)
                for i, offset in enumerate(offsets):
                    cuda.download(got[i:i + 1], blocks[1].ptr + int(offset) * y.dtype.num_bytes, stream)
                cuda.synchronize(stream)
                np.testing.assert_array_equal(got.astype(np.float64), want.astype(np.float64), f"{engine.id} {config.name}")
    finally:
        for memory in blocks:
            memory.free()


@pytest.mark.gpu
@pytest.mark.parametrize("line", ["cumsum x=u8[3,720000011] dtype=s32", "cumsum x=u8[720000011,3] axis=0 dtype=s32"])
def test_scans_of_more_than_two_to_the_31_elements(cuda, line: str) -> None:  # type: ignore[no-untyped-def]
    """All ones: an element is its place along the axis, modulo 2^32."""
    problem = parse_case(line)
    engine = ENGINES["cumsum"][0]
    config = engine.configs(problem, cuda.info)[0]
    plan = Plan(problem, engine, config, engine.build_steps(problem, config, cuda.info), cuda)
    x, y, stream = problem.desc("x"), problem.desc("y"), cuda.default_stream()
    blocks = [cuda.allocate(n, stream) for n in (x.num_bytes, y.num_bytes, max(1, plan.workspace_bytes))]
    axis = dict(problem.attrs).get("axis", len(x.shape) - 1)
    try:
        cuda.fill(blocks[0].ptr, 1, x.num_bytes, stream)
        cuda.fill(blocks[1].ptr, 0xFF, y.num_bytes, stream)
        plan.execute([b.ptr for b in blocks[:2]], blocks[2].ptr, stream)
        offsets = np.concatenate([np.random.default_rng(2).integers(0, x.numel, 300), [0, x.numel - 1]])
        got = np.empty(len(offsets), np.int32)
        for i, offset in enumerate(offsets):
            cuda.download(got[i:i + 1], blocks[1].ptr + int(offset) * 4, stream)
        cuda.synchronize(stream)
    finally:
        for memory in blocks:
            memory.free()
    want = np.unravel_index(offsets, x.shape)[axis] + 1
    np.testing.assert_array_equal(got, want.astype(np.int64).astype(np.int32))


@pytest.mark.gpu
@pytest.mark.parametrize("line", ["cumsum x=f32[5000000]", "cumsum x=bf16[3,1000001] reverse=True", "cummax x=f32[3,1000000]",
                                  "logcumsumexp x=f32[2,700000] exclusive=True", "cummin x=f64[2,500000] reverse=True"])
def test_every_config_of_long_scans(cuda, line: str) -> None:  # type: ignore[no-untyped-def]
    """Parts, chains of tiles, groups and super-groups: right, and the same bits whatever the timing."""
    problem = parse_case(line)
    engine = ENGINES[problem.op][0]
    assert any(c["chained"] for c in engine.configs(problem, cuda.info))
    check_configs(cuda, problem, engine)
