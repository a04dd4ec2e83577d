"""Random numbers in the emulator: published answers, the same numbers whatever the launch, distributions, dropout's way back."""

from __future__ import annotations

import math

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.dtypes import dtype
from oxidnn.engines.base import EngineConfig
from oxidnn.engines.pointwise_map import PointwiseMap
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import execute, run_problem
from oxidnn.testing.reference.random import philox

# Random123 kat_vectors, philox4x32 10: counter, key, words
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
]


def run(line: str, seed: int = 7, offset: int = 3, config: int = 0, **inputs: np.ndarray) -> np.ndarray:
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    engine = ENGINES[problem.op][0]
    configs = engine.configs(problem, backend.info)
    got = execute(backend, problem, engine, configs[config % len(configs)], inputs, {"seed": seed, "offset": offset})
    return got[problem.outputs[0].name]


@pytest.mark.parametrize(("counter", "key", "want"), KNOWN_ANSWERS)
def test_reference_gives_the_published_words(counter: tuple[int, ...], key: tuple[int, int], want: tuple[int, ...]) -> None:
    assert philox(np.array(counter), key).tolist() == list(want)


def test_kernel_gives_the_published_words() -> None:
    """The first four uniform numbers under key 0 and counter 0, through packs of every size."""
    want = np.array([w >> 8 for w in KNOWN_ANSWERS[0][2]]) * 2.0**-24
    for config in range(5):
        np.testing.assert_array_equal(run("random shape=(4,) dtype=f32", 0, 0, config), want.astype(np.float32))
        np.testing.assert_array_equal(run("random shape=(4,) dtype=f64", 0, 0, config), want)


@pytest.mark.parametrize("distribution", ["uniform", "normal"])
def test_numbers_depend_on_nothing_but_seed_offset_and_index(distribution: str) -> None:
    tail, seed = f"distribution={distribution}", 0x123456789ABCDEF0
    want = run(f"random shape=(3,5,4,7) {tail}", seed)
    for config in range(1, 4):
        np.testing.assert_array_equal(run(f"random shape=(3,5,4,7) {tail}", seed, config=config), want)
    for layout in ("nhwc", "(1,3,15,60)", "(280,56,7,1)", "(-140,28,7,1)"):
        np.testing.assert_array_equal(run(f"random y=f32[3,5,4,7]{layout} {tail}", seed), want)
    np.testing.assert_array_equal(run(f"random shape=(420,) {tail}", seed), want.reshape(-1))
    np.testing.assert_array_equal(run(f"random shape=(3,5,4,7) dtype=f16 {tail}", seed), want.astype(np.float16))
    for other in ((seed ^ 1 << 63, 3), (seed, 4), (seed, 3 + 2**40)):
        assert np.mean(run(f"random shape=(3,5,4,7) {tail}", *other) == want) < 0.01


@pytest.mark.parametrize("line", [
    "dropout x=f16[1023]nchw p=0.3", "dropout x=f32[3,5,7]nhwc", "bernoulli probability=f64[33]nchw",
    "random shape=(77,) distribution=normal",
])
def test_indices_of_64_bits(line: str) -> None:
    problem, backend = parse_case(line), EmulatedBackend("sm_80", checkers="all")
    for vec in {c["vec"] for c in PointwiseMap().configs(problem, backend.info)}:
        run_problem(backend, problem, PointwiseMap(), EngineConfig.of(vec=vec, index=64))


def test_distributions() -> None:
    """Mean, deviation and the largest gap to the distribution function, within 5 standard errors."""
    n = 40000
    u, z = run(f"random shape=({n},)").astype(np.float64), run(f"random shape=({n},) distribution=normal").astype(np.float64)
    assert 0 <= u.min() and u.max() < 1 and abs(u.mean() - 0.5) < 5 * 0.289 / n**0.5
    assert np.abs(np.sort(u) - np.arange(n) / n).max() < 2 / n**0.5
    assert abs(z.mean()) < 5 / n**0.5 and abs(z.std() - 1) < 5 / (2 * n) ** 0.5 and abs((z**4).mean() - 3) < 5 * (96 / n) ** 0.5
    assert abs(np.corrcoef(z[::2], z[1::2])[0, 1]) < 5 / (n / 2) ** 0.5


def _normal_below(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))


DISTRIBUTION_FUNCTIONS = {
    ("log_normal", (0.5, 0.75)): lambda x: _normal_below((np.log(np.maximum(x, 1e-300)) - 0.5) / 0.75),
    ("truncated_normal", (1.0, 2.0, -1.0, 1.5)): lambda x: (_normal_below((np.clip(x, -1, 1.5) - 1) / 2) - _normal_below(np.array(-1.0)))
    / (_normal_below(np.array(0.25)) - _normal_below(np.array(-1.0))),
    ("exponential", (2.5,)): lambda x: -np.expm1(-2.5 * np.maximum(x, 0)),
    ("gumbel", (1.0, 2.0)): lambda x: np.exp(-np.exp(-(x - 1) / 2)), ("logistic", (1.0, 2.0)): lambda x: 1 / (1 + np.exp(-(x - 1) / 2)),
    ("laplace", (1.0, 2.0)): lambda x: np.where(x < 1, 0.5 * np.exp((x - 1) / 2), 1 - 0.5 * np.exp(-(x - 1) / 2)),
    ("cauchy", (1.0, 2.0)): lambda x: 0.5 + np.arctan((x - 1) / 2) / np.pi,
}  # fmt: skip
CHANCES = {  # of 0, 1, 2, ... events
    ("geometric", (0.3,)): lambda k: np.where(k > 0, 0.3 * 0.7 ** (k - 1.0), 0),
    ("poisson", (4.5,)): lambda k: np.exp(-4.5 + k * np.log(4.5) - np.vectorize(math.lgamma)(k + 1.0)),
    ("poisson", (300.0,)): lambda k: np.exp(-300 + k * np.log(300) - np.vectorize(math.lgamma)(k + 1.0)),
    ("binomial", (12.0, 0.25)): lambda k: np.vectorize(lambda i: math.comb(12, i))(k) * 0.25**k * 0.75 ** (12.0 - k),
    ("binomial", (12.0, 0.9)): lambda k: np.vectorize(lambda i: math.comb(12, i))(k) * 0.9**k * 0.1 ** (12.0 - k),
}  # fmt: skip


@pytest.mark.parametrize(("name", "parameters"), DISTRIBUTION_FUNCTIONS)
def test_continuous_distributions(name: str, parameters: tuple[float, ...]) -> None:
    """Kolmogorov and Smirnov's: the largest gap between the shares of the draws and the distribution function."""
    n = 20000
    drawn = np.sort(oxidnn.DnnHandle("emu:sm_80").random((n,), name, parameters, seed=5).numpy().astype(np.float64))
    below = DISTRIBUTION_FUNCTIONS[name, parameters](drawn)
    assert np.isfinite(drawn).all() and np.maximum(below - np.arange(n) / n, np.arange(1, n + 1) / n - below).max() < 1.95 / n**0.5


@pytest.mark.parametrize(("name", "parameters"), CHANCES)
@pytest.mark.parametrize("dtype", ["float32", "int32"])
def test_counts(name: str, parameters: tuple[float, ...], dtype: str) -> None:
    """Pearson's: squared differences of the counts from what is expected, over that, against five deviations of their sum."""
    n = 20000
    drawn = oxidnn.DnnHandle("emu:sm_80").random((n,), name, parameters, dtype, seed=6).numpy()
    assert (drawn == np.rint(drawn)).all() and drawn.min() >= 0
    found = np.bincount(drawn.astype(np.int64))
    wanted = n * CHANCES[name, parameters](np.arange(len(found)))
    often = wanted >= 5
    rest = wanted[~often].sum() + max(0.0, n - wanted.sum())
    assert abs(found[~often].sum() - rest) < 5 * (rest + 1) ** 0.5
    square, freedom = ((found - wanted) ** 2 / np.maximum(wanted, 1e-9))[often].sum(), often.sum()
    assert square < freedom + 5 * (2 * freedom) ** 0.5


def test_counts_at_their_ends_and_of_each_rate() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    for parameters, only in (((9.0, 0.0), 0), ((9.0, 1.0), 9), ((0.0, 0.5), 0)):
        assert (h.random((99,), "binomial", parameters, seed=1).numpy() == only).all()
    assert (h.random((99,), "poisson", (0.0,), seed=1).numpy() == 0).all() and (h.random((9,), "geometric", 1.0, seed=1).numpy() == 1).all()
    rates = np.tile(np.array([0, 1, 50, 700], np.float32), (4000, 1))
    drawn = h.poisson(rates, seed=3)
    assert (np.abs(drawn.mean(0) - rates[0]) <= 5 * (rates[0] / 4000) ** 0.5).all()
    np.testing.assert_allclose(drawn.var(0), rates[0], rtol=0.15)
    assert np.isnan(h.poisson(np.array([-1.0, 701, np.nan]), seed=1)).all()


@pytest.mark.parametrize("kind", [np.int64, np.uint64])
def test_seed_and_offset_in_memory(kind: type) -> None:
    """The same numbers as given with the call, from what the array holds when it runs."""
    h, x = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(3).standard_normal((5, 41)).astype(np.float32)
    state = np.array([2**63 - 5, 7], kind)
    draws = {
        "dropout": lambda **d: h.dropout(x, 0.3, **d), "dropout_backward": lambda **d: h.dropout_backward(x, 0.3, **d),
        "rrelu": lambda **d: h.rrelu(x, **d), "rrelu_backward": lambda **d: h.rrelu_backward(x, x, **d),
        "uniform": lambda **d: h.uniform(out=np.empty((5, 41), np.float32), **d), "normal": lambda **d: h.normal((9,), **d).numpy(),
        "bernoulli": lambda **d: h.bernoulli(np.abs(x) % 1, **d), "poisson": lambda **d: h.poisson(np.abs(x) * 4, **d),
    }  # fmt: skip
    for name, draw in draws.items():
        np.testing.assert_array_equal(draw(state=state), draw(seed=2**63 - 5, offset=7), err_msg=name)
        state[1] += 1
        np.testing.assert_array_equal(draw(state=state), draw(seed=2**63 - 5, offset=8), err_msg=name)
        state[1] -= 1
    if kind is np.int64:
        np.testing.assert_array_equal(h.dropout(x, state=np.array([-1, 0])), h.dropout(x, seed=2**64 - 1))
    plan = h.plan("dropout", x, state, p=0.3)
    np.testing.assert_array_equal(plan(x, state), draws["dropout"](state=state))
    for given, words in (({"state": state, "seed": 1}, "none beside state"), ({}, "seed is None"), ({"state": state[:1]}, "shape of state"),
                         ({"state": state.astype(np.int32)}, "type of state")):
        with pytest.raises(oxidnn.InvalidArgument, match=words):
            h.dropout(x, **given)


def test_the_mask_is_what_was_kept() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x = np.random.default_rng(1).uniform(1, 2, (7, 1023)).astype(np.float16)
    y, mask = h.dropout(x, 0.4, return_mask=True, seed=3)
    assert mask.dtype == bool and (mask == (y != 0)).all()
    np.testing.assert_array_equal(y, h.dropout(x, 0.4, seed=3))
    infinite = np.array([np.inf, -np.inf, np.nan] * 20, np.float32)
    assert (h.dropout(infinite, 1.0, seed=1) == 0).all()
    np.testing.assert_array_equal(h.dropout(infinite, 0.0, seed=1), infinite)


@pytest.mark.parametrize("source", ["float32", "float64"])
@pytest.mark.parametrize("kind", ["f16", "bf16", "e4m3", "e5m2", "s8"])
def test_stochastic_rounding_takes_a_neighbour_and_keeps_the_mean(kind: str, source: str) -> None:
    """Of numbers between every two neighbours, subnormal ones and powers of two among them: by the sorted list of all of them."""
    h, rng, t = oxidnn.DnnHandle("emu:sm_80"), np.random.default_rng(5), dtype(kind)
    if t.is_float:
        codes = np.arange(2**t.bits, dtype=np.uint8 if t.bits == 8 else np.uint16).view(t.numpy).astype(np.float64)
        grid = np.unique(codes[np.isfinite(codes)])
    else:
        grid = np.arange(-128, 128.0)
    step = max(1, len(grid) // 400)
    low = grid[:-1:step]
    low = np.concatenate([low, grid[:-1][np.abs(grid[:-1]) <= 40 * t.smallest] if t.is_float else low])[:600]
    high = grid[np.searchsorted(grid, low) + 1]
    share = rng.choice([0.0, 0.25, 0.5, 0.75, 0.9], low.shape)
    x = (low + (high - low) * share).astype(source)
    exact = x.astype(np.float64)
    share = (exact - low) / (high - low)  # as f32 could hold it
    draws = 400
    many = np.asarray(h.cast_stochastic(np.tile(x, (draws, 1)), kind, seed=9)).astype(np.float64)
    assert ((many == low) | (many == high)).all()
    assert (many[:, share == 0] == low[share == 0]).all()
    ups = (many == high).mean(0)
    assert (np.abs(ups - share) <= 5.5 * np.sqrt(share * (1 - share) / draws)).all()
    assert abs((ups - share).mean()) < 5 * (0.25 / draws / len(low)) ** 0.5


def test_stochastic_rounding_of_what_is_no_number() -> None:
    h = oxidnn.DnnHandle("emu:sm_90a")
    x = np.array([np.nan, np.inf, -np.inf, 1e9, -1e9, -0.0], np.float32)
    for kind, saturate in (("e4m3", True), ("e4m3", False), ("e5m2", False), ("float16", True)):
        got, want = (np.asarray(f).astype(np.float64) for f in (h.cast_stochastic(x, kind, saturate=saturate, seed=1),
                                                                h.cast(x, kind, saturate=saturate)))
        np.testing.assert_array_equal(got, want)
        assert np.signbit(got[-1])
    with pytest.raises(oxidnn.InvalidArgument, match="dtype"):
        h.cast_stochastic(x, "float64", seed=1)
    with pytest.raises(oxidnn.InvalidArgument, match="seed"):
        h.cast_stochastic(x, "e4m3")


def test_drawn_slopes_and_their_way_back() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x = np.random.default_rng(2).standard_normal((37, 129)).astype(np.float32)
    y = h.rrelu(x, 0.1, 0.4, seed=4)
    slopes = (y / x)[x < 0]
    assert (y[x > 0] == x[x > 0]).all() and (slopes >= 0.0999).all() and (slopes < 0.4001).all()
    assert abs(slopes.mean() - 0.25) < 5 * 0.0866 / len(slopes) ** 0.5
    dx = h.rrelu_backward(np.ones_like(x), x, 0.1, 0.4, seed=4)
    np.testing.assert_allclose(dx * x, y, rtol=1e-6)
    with pytest.raises(oxidnn.InvalidArgument, match="lower"):
        h.rrelu(x, 0.5, 0.4, seed=4)


def test_dropout_and_its_way_back() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x = np.random.default_rng(0).uniform(1, 2, (37, 129)).astype(np.float32)
    y = h.dropout(x, 0.3, seed=11, offset=5)
    kept = y != 0
    assert abs(kept.mean() - 0.7) < 5 * (0.21 / x.size) ** 0.5
    np.testing.assert_allclose(y[kept], x[kept] / np.float32(0.7), rtol=1e-6)
    np.testing.assert_array_equal(h.dropout_backward(x, 0.3, seed=11, offset=5), y)
    assert (h.dropout(x, 0.3, seed=11, offset=6) != y).mean() > 0.3
    flat = kept.reshape(-1).astype(float)
    for distance in (1, 2, 4, 8, 256):
        assert abs(np.corrcoef(flat[distance:], flat[:-distance])[0, 1]) < 5 / x.size**0.5
    np.testing.assert_array_equal(h.dropout(x, 0.0, seed=11), x)
    assert not h.dropout(np.full((3, 5), np.nan, np.float32), 1.0, seed=11).any(), "what is dropped is zero, whatever it was"


def test_handle_draws() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    a = h.uniform((3, 5), -1, 1, seed=2**64 - 1).numpy()
    np.testing.assert_array_equal(a, h.uniform(out=np.empty((3, 5), np.float32), low=-1, seed=2**64 - 1))
    assert a.shape == (3, 5) and (np.abs(a) <= 1).all()
    assert h.normal((8,), 100, 0.5, dtype="float64", seed=1).numpy().mean() == pytest.approx(100, abs=1)
    assert h.bernoulli(np.array([0, 1, 0.5, np.nan]), dtype="bool", seed=1).tolist()[:2] == [False, True]
    assert h.uniform((0, 4), seed=1).shape == (0, 4)


@pytest.mark.parametrize(("call", "words"), [
    (lambda h, x: h.dropout(x, 1.5, seed=1), "p is 1.5"), (lambda h, x: h.dropout(x, 0.5, seed=-1), "seed is -1"),
    (lambda h, x: h.dropout(x, 0.5, seed=1, offset=2**64), "offset is"), (lambda h, x: h.uniform((3,), 2, 1, seed=1), "low <= high"),
    (lambda h, x: h.normal((3,), 0, -1, seed=1), "deviation >= 0"), (lambda h, x: h.normal(seed=1), "shape is None"),
    (lambda h, x: h.uniform((3,), dtype="int32", seed=1), "dtype"), (lambda h, x: h.random((3,), "poisson", 701, seed=1), "rate"),
    (lambda h, x: h.random((3,), "binomial", (2.5, 0.5), seed=1), "whole number"),
    (lambda h, x: h.random((3,), "truncated_normal", (0, 1, 8, 9), seed=1), "mass"),
    (lambda h, x: h.random((3,), "exponential", (1, 2), seed=1), "a rate > 0"), (lambda h, x: h.random((3,), "beta", seed=1), "gumbel"),
    (lambda h, x: h.bernoulli(x.astype(int), seed=1), "type of probability"),
])
def test_refusals(call, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(InvalidArgument, match=words):
        call(oxidnn.DnnHandle("emu:sm_80"), np.ones((2, 2), np.float32))
