"""GGUF blocks against the gguf package's dequantiser on random bytes, a published block, products with exact sums, experts, refusals."""

from __future__ import annotations

from typing import Any

import gguf
import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.engines.gguf_formats import FORMAT_CONSTS
from oxidnn.engines.gguf_matvec import GgufMatvec
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.ops.gguf import FORMATS
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample.gguf import moderate


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def random_blocks(rng: np.random.Generator, name: str, *shape: int) -> np.ndarray:
    """Any bytes: (*shape, of the last as many blocks)."""
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * FORMATS[name][1])).astype(np.uint8)


def judge(name: str, blocks: np.ndarray) -> np.ndarray:
    """What the gguf package makes of blocks; of Q8_K, which it does not know, f32 scale times s8 codes."""
    kind = getattr(gguf.GGMLQuantizationType, name)
    assert gguf.GGML_QUANT_SIZES[kind] == FORMATS[name]
    if name == "Q8_K":
        parts = blocks.reshape(-1, 292)
        values = parts[:, :4].copy().view(np.float32) * parts[:, 4:260].view(np.int8).astype(np.float32)
        return values.reshape(*blocks.shape[:-1], -1)
    return gguf.dequantize(blocks, kind)


@pytest.mark.parametrize("name", FORMATS)
def test_dequantised_bits_are_those_of_the_gguf_package(h: oxidnn.DnnHandle, name: str) -> None:
    rng = np.random.default_rng(len(name) + FORMATS[name][1])
    blocks = random_blocks(rng, name, 3, 11 if FORMATS[name][0] < 256 else 9)
    with np.errstate(all="ignore"):
        want = judge(name, blocks)
    got = np.asarray(h.gguf_dequantize(blocks, name))
    assert got.dtype == np.float32 and got.shape == want.shape
    is_nan = np.isnan(want)
    np.testing.assert_array_equal(np.isnan(got), is_nan)
    np.testing.assert_array_equal(got.view(np.uint32)[~is_nan], want.view(np.uint32)[~is_nan])
    shifted = np.concatenate([np.zeros(1, np.uint8), blocks[0]])[1:]  # at an odd address
    np.testing.assert_array_equal(np.asarray(h.gguf_dequantize(shifted, name)), got[0])
    halves = np.asarray(h.gguf_dequantize(blocks[1:], name, dtype="float16"))
    with np.errstate(all="ignore"):
        np.testing.assert_array_equal(halves, got[1:].astype(np.float16))


def test_published_block(h: oxidnn.DnnHandle) -> None:
    """d = 0.5 and 0x9C first: element 0 from the low half, element 16 from the high one (S27)."""
    block = np.zeros(18, np.uint8)
    block[:2] = np.array([0.5], np.float16).view(np.uint8)
    block[2:] = 0x88
    block[2] = 0x9C
    values = np.asarray(h.gguf_dequantize(block, "Q4_0"))
    assert (values[0], values[16]) == (2.0, 0.5) and np.count_nonzero(values) == 2
    for x in np.eye(32, dtype=np.float16)[[0, 16, 5]]:
        assert np.asarray(h.gguf_matvec(block.reshape(1, 18), x, "Q4_0")).tolist() == [float(values @ x)]


@pytest.mark.parametrize("name", ["Q4_0", "Q5_1", "Q2_K", "Q3_K", "Q6_K", "IQ2_S", "IQ1_M", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "NVFP4"])
def test_columns_of_a_product_are_elements(h: oxidnn.DnnHandle, name: str) -> None:
    """x with a single 1 picks one column."""
    size = FORMATS[name][0]
    count = 3 if size == 256 else 9
    rng = np.random.default_rng(1)
    blocks = moderate(name, random_blocks(rng, name, 5, count))
    want = judge(name, blocks).astype(np.float64)
    for eight in rng.permutation(count * size)[:16].reshape(-1, 8):
        x = np.zeros((8, count * size), np.float32)
        x[np.arange(8), eight] = 1
        got = np.asarray(h.gguf_matvec(blocks, x, name))
        np.testing.assert_allclose(got, want[:, eight].T, rtol=2.0**-22, atol=2.0**-21 * np.abs(want).max())


@pytest.mark.parametrize("name", FORMATS)
def test_products_of_every_format_in_several_configs(name: str) -> None:
    """Rows that a tensor map can describe, in panels of k where there are such; rows of any number of bytes at an odd address, with several
    rows of x and, where that is another loop, with one."""
    backend, engine = EmulatedBackend("sm_90a", checkers="all"), GgufMatvec()
    size, num_bytes = FORMATS[name]
    ways = [(8 if size == 256 else 32, "nchw", "f16[1,{}]"), (2 if size == 256 else 17, "({},1)@1", "f32[3,{}]")]
    ways += [(1 if size == 256 else 11, "({},1)@1", "bf16[1,{}]")] if FORMAT_CONSTS[name].chain <= 2 else []
    for count, lies, x in ways:
        row_bytes = count * num_bytes
        lies = lies.format(row_bytes + 3)
        problem = parse_case(f"gguf_matvec blocks=u8[19,{row_bytes}]{lies} x={x.format(count * size)}nchw format={name}")
        configs = engine.configs(problem, backend.info)
        assert (configs[0]["loads"] == "map") == (lies == "nchw")
        run_problem(backend, problem, engine, next((c for c in configs if c["panels"] > 1), configs[-1]) if lies == "nchw" else configs[0])


def test_sums_of_large_blocks_do_not_overflow(h: oxidnn.DnnHandle) -> None:
    """Sums of x beyond 65504, as block sums in f16 could not hold them (S27), and rows of very different size."""
    rng = np.random.default_rng(2)
    blocks = moderate("Q4_K", random_blocks(rng, "Q4_K", 16, 2))
    x = np.abs(rng.standard_normal((4, 512))).astype(np.float32) * np.array([6e4, 1e-30, 1e20, 1], np.float32)[:, None]
    want = x.astype(np.float64) @ judge("Q4_K", blocks).astype(np.float64).T
    got = np.asarray(h.gguf_matvec(blocks, x, "Q4_K")).astype(np.float64)
    sizes = np.abs(x).astype(np.float64) @ np.abs(judge("Q4_K", blocks)).astype(np.float64).T
    assert (np.abs(got - want) <= 3e-6 * sizes).all()
    halves = np.full((1, 512), 6e4, np.float16)
    want = halves.astype(np.float64) @ judge("Q4_K", blocks).astype(np.float64).T
    np.testing.assert_allclose(np.asarray(h.gguf_matvec(blocks, halves, "Q4_K", out_dtype="float32")), want, rtol=1e-4, atol=1e-4 * 6e4)


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_scales_of_mxfp4_from_the_least_to_the_largest(h: oxidnn.DnnHandle, kind: str) -> None:
    """Finite products are finite while the sizes of a row of W add up to less than 2^126; e = 0 is 2^-127 of e2m1's numbers."""
    rng = np.random.default_rng(6)
    blocks = random_blocks(rng, "MXFP4", 6, 1)
    blocks[:, 0] = [0, 1, 120, 242, 245, 246]
    w = judge("MXFP4", blocks).astype(np.float64)
    assert np.abs(w).sum(1).max() < 2.0**126
    for size in (1e-3, 1.0, 1e3):
        x = (rng.standard_normal((2, 32)) * size).astype(ml_dtypes.bfloat16 if kind == "bfloat16" else kind)
        want = x.astype(np.float64) @ w.T
        got = np.asarray(h.gguf_matvec(blocks, x, "MXFP4", out_dtype="float32"))
        reach = 2.0**-20 * (np.abs(x).astype(np.float64) @ np.abs(w).T) + 2.0**-134
        assert (np.abs(got - want) <= reach)[np.abs(want) < 2.0**127].all()
    experts = np.asarray(h.gguf_matvec(blocks[None], x[:1], "MXFP4", ids=np.zeros((1, 1), np.int32), out_dtype="float32"))
    np.testing.assert_array_equal(experts, got[:1])
    scale = np.array([2.0**100], np.float32).view(np.uint8)
    whole = np.concatenate([scale, np.full(256, 1, np.uint8), np.zeros(32, np.uint8)])[None]
    want = 2.0**100 * np.float64(x[:1].sum(dtype=np.float64))
    got = np.asarray(h.gguf_matvec(whole, np.tile(x[:1], (1, 8)), "Q8_K", out_dtype="float32"))
    np.testing.assert_allclose(got[0], 8 * want, rtol=1e-4)


def test_numbers_that_are_none_stay_in_their_row(h: oxidnn.DnnHandle) -> None:
    rng = np.random.default_rng(4)
    blocks = moderate("Q4_0", random_blocks(rng, "Q4_0", 16, 8))
    for kind in (np.float32, np.float16):
        x = rng.standard_normal((4, 256)).astype(kind)
        x[1, 3], x[2, 77] = np.nan, np.inf
        got = np.asarray(h.gguf_matvec(blocks, x, "Q4_0", out_dtype="float32"))
        assert np.isnan(got[1]).all() and not np.isfinite(got[2]).any()
        want = x[[0, 3]].astype(np.float64) @ judge("Q4_0", blocks).astype(np.float64).T
        np.testing.assert_allclose(got[[0, 3]], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("count", [5, 8])  # blocks of a row: by copies, by a tensor map
def test_experts_are_added_in_order_and_missing_ones_add_nothing(h: oxidnn.DnnHandle, count: int) -> None:
    rng = np.random.default_rng(3)
    blocks = moderate("Q8_0", random_blocks(rng, "Q8_0", 4, 21, count))
    w = judge("Q8_0", blocks).astype(np.float64)
    x = rng.standard_normal((3, 32 * count)).astype(np.float32)
    ids = np.array([[1, 3, 1], [-1, 2, 4], [0, 0, 0]], np.int64)  # twice the same; none; three times
    weights = rng.standard_normal((3, 3)).astype(np.float32)
    of = np.zeros((3, 3, 21))
    for r, j in np.ndindex(3, 3):
        if 0 <= ids[r, j] < 4:
            of[r, j] = w[ids[r, j]] @ x[r]
    np.testing.assert_allclose(h.gguf_matvec(blocks, x, "q8_0", ids=ids), of.sum(1), rtol=2e-5, atol=2e-4)
    np.testing.assert_allclose(h.gguf_matvec(blocks, x, "Q8_0", ids=ids, weights=weights), (of * weights[..., None]).sum(1), rtol=2e-5,
                               atol=2e-4)
    several = rng.standard_normal((3, 3, 32 * count)).astype(np.float32)
    want = [sum(w[e] @ several[r, j] for j, e in enumerate(ids[r]) if 0 <= e < 4) for r in range(3)]
    np.testing.assert_allclose(h.gguf_matvec(blocks, several, "Q8_0", ids=ids), want, rtol=2e-5, atol=2e-4)
    one = np.asarray(h.gguf_matvec(blocks, x, "Q8_0", ids=ids[:, 1].astype(np.int32)))
    np.testing.assert_allclose(one, of[:, 1], rtol=2e-5, atol=2e-4)
    halves = several.astype(np.float16)  # of one column, whose scales are a lane's own
    got = h.gguf_matvec(blocks, halves, "Q8_0", ids=ids, weights=weights, out_dtype="float32")
    want = [sum(weights[r, j] * (w[e] @ halves[r, j].astype(np.float64)) for j, e in enumerate(ids[r]) if 0 <= e < 4) for r in range(3)]
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize(("changed", "words"), [
    ({"format": "Q9_K"}, "format"), ({"blocks": np.zeros((4, 19), np.uint8)}, "multiple of 18"),
    ({"x": np.zeros((1, 2, 32), np.float32)}, "shape of x"),
    ({"x": np.zeros((1, 64), np.float32)}, "x"), ({"blocks": np.zeros((4, 18), np.int8)}, "blocks"), ({"x": np.zeros((1, 32))}, "x"),
    ({"weights": np.ones((1, 1), np.float32)}, "weights"), ({"ids": np.zeros((1, 2), np.int32)}, "rank of blocks"),
    ({"blocks": np.zeros((4, 36), np.uint8)[:, ::2]}, "stride"), ({"blocks": np.zeros((4, 18), np.uint8)[::-1]}, "below 0"),
    ({"blocks": np.zeros((0, 4, 18), np.uint8), "ids": np.full((1, 1), -1, np.int32)}, "experts .first extent of blocks.*at least 1"),
    ({"out_dtype": "int8"}, "out_dtype"), ({"format": None}, "format"),
])
def test_refusals(h: oxidnn.DnnHandle, changed: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"blocks": np.zeros((4, 18), np.uint8), "x": np.zeros((1, 32), np.float32), "format": "Q4_0"} | changed
    with pytest.raises(InvalidArgument, match=words):
        h.gguf_matvec(**given)


@pytest.mark.parametrize(("kind", "launches"), [("f16", 3), ("f32", 5)])
def test_more_rows_than_a_launch_takes(kind: str, launches: int) -> None:
    """In launches one after another, of which the last takes fewer; or by a GEMM of the dequantised matrix."""
    backend = EmulatedBackend("sm_90a", checkers="all")
    problem = parse_case(f"gguf_matvec blocks=u8[21,352]nchw x={kind}[35,512]nchw format=Q5_0 out_dtype=f32")
    for engine in ENGINES["gguf_matvec"]:
        assert engine.check_support(problem, backend.info)
        config = engine.configs(problem, backend.info)[0]
        run_problem(backend, problem, engine, config)
        templates = [s.spec.template for s in engine.build_steps(problem, config, backend.info).steps]
        assert templates.count("gguf/matvec") == (launches if engine.id == "gguf.matvec_mma" else 0)
    few = parse_case(f"gguf_matvec blocks=u8[21,352]nchw x={kind}[8,512]nchw format=Q5_0")
    assert [e.id for e in ENGINES["gguf_matvec"] if e.check_support(few, backend.info)] == ["gguf.matvec_mma"]


def test_many_rows_are_dequantised_first() -> None:
    info = known_device("sm_90a")
    ids = []
    for rows in (16, 32, 1024):
        problem = parse_case(f"gguf_matvec blocks=u8[16384,9216]nchw x=f16[{rows},16384]nchw format=Q4_0")
        engines = [e for e in ENGINES["gguf_matvec"] if e.check_support(problem, info)]
        ids.append(min(engines, key=lambda e: e.estimate(problem, e.configs(problem, info)[0], info)).id)  # noqa: B023
    assert ids == ["gguf.matvec_mma", "gguf.matvec_mma", "gguf.apart"]


@pytest.mark.parametrize("rows", [1, 8])
def test_launches_fill_multiprocessors_once(rows: int) -> None:
    """Panels leave no CTA for a second wave, and CTAs of the launch after find no room beside those of this one."""
    info, engine = known_device("sm_90a"), GgufMatvec()
    problem = parse_case(f"gguf_matvec blocks=u8[8192,16128]nchw x=f16[{rows},28672]nchw format=Q4_0")
    for config in engine.configs(problem, info):
        step = engine.build_steps(problem, config, info).steps[0]
        assert step.grid[0] <= config["ctas"] * info.num_sms
        assert (config["ctas"] + 1) * (step.spec.dynamic_smem + 1024) > info.smem_per_sm
