"""CTC in the emulator: against every alignment written out, PyTorch's autograd in f64, rules for what cannot be aligned, long targets."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

import oxidnn
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument, Unsupported
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem
from oxidnn.testing.sample import SAMPLES


@pytest.fixture
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_90a")


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def enumerated(probs: np.ndarray, target: tuple[int, ...], blank: int) -> tuple[float, np.ndarray]:
    """Probability of all paths that collapse to the target, and how often each class is expected at each frame, path by path."""
    total, expected = 0.0, np.zeros(probs.shape)
    for path in itertools.product(range(probs.shape[1]), repeat=probs.shape[0]):
        if tuple(c for c, _ in itertools.groupby(path) if c != blank) == target:
            p = probs[np.arange(len(path)), path].prod()
            total += p
            expected[np.arange(len(path)), path] += p
    return total, expected / total if total else expected


@pytest.mark.parametrize("blank", [0, 2])
def test_every_alignment_written_out(h: oxidnn.DnnHandle, blank: int) -> None:
    rng = np.random.default_rng(blank)
    targets = [t for n in range(4) for t in itertools.product([c for c in range(3) if c != blank], repeat=n)]
    log_probs = log_softmax(rng.standard_normal((5, len(targets), 3)))
    padded = np.array([t + (-7,) * (3 - len(t)) for t in targets])
    lengths = np.array([len(t) for t in targets])
    for frames in (5, 3, 1):
        given = (log_probs, padded, np.full(len(targets), frames), lengths)
        loss, gradient = h.ctc_loss(*given, blank=blank, reduction="none", return_gradient=True)
        for n, target in enumerate(targets):
            probs = np.exp(log_probs[:frames, n])
            total, expected = enumerated(probs, target, blank)
            if total == 0:
                assert loss[n] == np.inf and np.isnan(gradient[:frames, n]).all()
            else:
                np.testing.assert_allclose(loss[n], -np.log(total), rtol=1e-12)
                np.testing.assert_allclose(gradient[:frames, n], probs - expected, rtol=1e-11, atol=1e-14)
            assert (gradient[frames:, n] == 0).all(), "nothing is expected beyond a sequence"


FRAMES = np.log([[[0.5, 0.3, 0.2]], [[0.1, 0.6, 0.3]], [[0.2, 0.7, 0.1]]])


@pytest.mark.parametrize(("frames", "target", "probability"), [(3, [1, 1], 0.3 * 0.1 * 0.7), (2, [1, 1], 0.0), (3, [], 0.5 * 0.1 * 0.2)])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_repeated_labels_and_empty_targets(h: oxidnn.DnnHandle, frames: int, target: list[int], probability: float,
                                           zero_infinity: bool) -> None:
    labels = np.array([target], np.int64).reshape(1, -1)
    given = (FRAMES, labels, np.array([frames]), np.array([len(target)]))
    loss, gradient = h.ctc_loss(*given, reduction="sum", zero_infinity=zero_infinity, return_gradient=True)
    if probability:
        np.testing.assert_allclose(loss, -np.log(probability), rtol=1e-13)
        assert np.isfinite(gradient).all()
    elif zero_infinity:
        assert loss == 0 and (gradient == 0).all()
    else:
        assert loss == np.inf and np.isnan(gradient[:frames]).all() and (gradient[frames:] == 0).all()


def batch(kind: str = "float64") -> tuple[dict[str, Any], np.ndarray]:
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((14, 6, 7)).astype(kind)
    targets = rng.integers(1, 4, (6, 5))
    targets[0] = 2  # all one label
    return {"targets": targets, "input_lengths": np.array([14, 13, 9, 14, 2, 3]), "target_lengths": np.array([5, 4, 5, 0, 1, 4])}, logits


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("is_flat", [False, True])
def test_gradients_are_those_of_autograd(h: oxidnn.DnnHandle, reduction: str, is_flat: bool) -> None:
    torch = pytest.importorskip("torch")
    given, logits = batch()
    if is_flat:
        given["targets"] = np.concatenate([t[:n] for t, n in zip(given["targets"], given["target_lengths"], strict=True)])
    x = torch.tensor(logits, requires_grad=True)
    log_probs = torch.log_softmax(x, -1)
    tensors = {n: torch.tensor(a) for n, a in given.items()}
    want = torch.nn.functional.ctc_loss(log_probs, **tensors, reduction=reduction, zero_infinity=True)
    upstream = np.random.default_rng(6).standard_normal(want.shape)
    want.backward(torch.tensor(upstream))
    ours = log_probs.detach().numpy()
    np.testing.assert_allclose(h.ctc_loss(ours, **given, reduction=reduction, zero_infinity=True), want.detach().numpy(), rtol=1e-12)
    gradient = h.ctc_loss_backward(ours, **given, d_loss=upstream, reduction=reduction, zero_infinity=True)
    np.testing.assert_allclose(gradient, x.grad.numpy(), rtol=1e-9, atol=1e-13)
    through = h.softmax_backward(gradient, ours, log=True)
    np.testing.assert_allclose(through, gradient, rtol=1e-9, atol=1e-12, err_msg="the log-softmax maps the gradient to itself")


def test_gradients_by_finite_differences(h: oxidnn.DnnHandle) -> None:
    given, logits = batch()
    attrs: dict[str, Any] = {"reduction": "sum", "zero_infinity": True}
    gradient = h.ctc_loss_backward(log_softmax(logits), **given, **attrs)
    direction, step = np.random.default_rng(7).standard_normal(logits.shape), 1e-6
    ends = [h.ctc_loss(log_softmax(logits + s * step * direction), **given, **attrs) for s in (1, -1)]
    assert (ends[0] - ends[1]) / (2 * step) == pytest.approx((gradient * direction).sum(), rel=1e-7)


def test_one_bad_sequence_spoils_no_other(h: oxidnn.DnnHandle) -> None:
    given, logits = batch("float32")
    log_probs = log_softmax(logits)
    want = h.ctc_loss(log_probs, **given, reduction="none", zero_infinity=True)
    for name, index, value in (("targets", (1, 2), 0), ("targets", (1, 0), 7), ("targets", (1, 1), -3), ("input_lengths", 1, 15),
                               ("input_lengths", 1, -1), ("target_lengths", 1, 6), ("target_lengths", 1, -2)):
        wrong = given | {name: given[name].copy()}
        wrong[name][index] = value
        loss, gradient = h.ctc_loss(log_probs, **wrong, reduction="none", zero_infinity=True, return_gradient=True)
        others = np.arange(6) != 1
        assert np.isnan(loss[1]) and np.isnan(gradient[:13, 1]).all(), (name, value)
        np.testing.assert_array_equal(loss[others], want[others])
        assert np.isfinite(gradient[:, others]).all()
        assert np.isnan(h.ctc_loss(log_probs, **wrong, zero_infinity=True))


def test_probabilities_of_zero_and_one(h: oxidnn.DnnHandle) -> None:
    """One path of probability 1: -inf elsewhere makes no NaN."""
    with np.errstate(divide="ignore"):
        log_probs = np.log(np.eye(3, dtype=np.float32)[[1, 1, 0, 1, 2]])[:, None]
    lengths = np.array([5]), np.array([3])
    loss, gradient = h.ctc_loss(log_probs, np.array([[1, 1, 2]]), *lengths, return_gradient=True)
    assert loss == 0 and (gradient == 0).all()
    assert h.ctc_loss(log_probs, np.array([[1, 2, 1]]), *lengths) == np.inf


def test_nothing(h: oxidnn.DnnHandle) -> None:
    empty = np.zeros((3, 0, 4), np.float32), np.zeros((0, 2), np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64)
    assert np.isnan(h.ctc_loss(*empty)) and h.ctc_loss(*empty, reduction="sum") == 0
    assert h.ctc_loss(*empty, reduction="none").shape == (0,) and h.ctc_loss_backward(*empty).shape == (3, 0, 4)


@pytest.mark.parametrize("line", [
    "ctc_loss_backward log_probs=f32[260,1,3]nchw targets=s64[1,250]nchw input_lengths=s64[1]nchw target_lengths=s64[1]nchw",
    "ctc_loss log_probs=f64[140,2,3]nchw targets=s32[264]nchw input_lengths=s64[2]nchw target_lengths=s64[2]nchw return_gradient=True",
])
def test_every_config_on_long_targets(line: str) -> None:
    """Labels of one class and another, so that chains are long; every way to deal them to threads."""
    problem, backend = parse_case(line), EmulatedBackend("sm_90a", checkers="all")
    engine = ENGINES[problem.op][0]
    configs = engine.configs(problem, backend.info)
    assert len(configs) > 2
    for i, config in enumerate(configs):
        run_problem(backend, problem, engine, config, seed=i)


def test_1023_labels(h: oxidnn.DnnHandle) -> None:
    """A target that fits its frames exactly has one alignment, whose probability is a product."""
    rng = np.random.default_rng(8)
    log_probs = log_softmax(rng.standard_normal((1023, 1, 4))).astype(np.float32)
    labels = np.where(np.arange(1023) % 2, 1, rng.choice([2, 3], 1023))
    loss = h.ctc_loss(log_probs, labels[None], np.array([1023]), np.array([1023]), reduction="sum")
    assert loss == pytest.approx(-log_probs[np.arange(1023), 0, labels].astype(np.float64).sum(), rel=3e-6)


@pytest.mark.parametrize("op", ["ctc_loss", "ctc_loss_backward"])
def test_every_config_on_random_problems(op: str) -> None:
    rng = np.random.default_rng(33)
    backends = [EmulatedBackend(arch, checkers="all") for arch in ("sm_80", "sm_90a")]
    for i in range(24):
        problem, backend = SAMPLES[op](rng, "tiny"), backends[i % 2]
        for engine in ENGINES[op]:
            for config in engine.configs(problem, backend.info):
                run_problem(backend, problem, engine, config, seed=i)


@pytest.mark.parametrize(("given", "words"), [
    ({"log_probs": (4, 3)}, "shape of log_probs"), ({"targets": (2, 5)}, "shape of targets"), ({"blank": 6}, "blank is 6"),
    ({"input_lengths": (4,)}, "shape of input_lengths"), ({"reduction": "batchmean"}, "reduction is 'batchmean'"),
    ({"zero_infinity": 1}, "zero_infinity is 1"),
])
def test_refusals(h: oxidnn.DnnHandle, given: dict[str, Any], words: str) -> None:
    arrays: dict[str, Any] = {"log_probs": (4, 3, 6), "targets": (3, 5), "input_lengths": (3,), "target_lengths": (3,)}
    arrays = {n: np.zeros(s, np.float32 if n == "log_probs" else np.int64) for n, s in (arrays | given).items() if n in arrays}
    attrs = {n: v for n, v in given.items() if n not in arrays}
    for method in (h.ctc_loss, h.ctc_loss_backward):
        with pytest.raises(InvalidArgument, match=words):
            method(**arrays, **attrs)


def test_longer_targets_than_threads_are_refused(h: oxidnn.DnnHandle) -> None:
    lengths = np.array([5000])
    with pytest.raises(Unsupported, match="at most 2047"):
        h.ctc_loss(np.zeros((5000, 1, 3), np.float32), np.ones((1, 4500), np.int64), lengths, lengths)


def test_long_sequences_keep_their_digits(h: oxidnn.DnnHandle) -> None:
    """A loss of thousands, whose f32 neighbours lie 5e-4 apart: gradients, made of such numbers' differences, err far less."""
    rng = np.random.default_rng(9)
    log_probs = log_softmax(2 * rng.standard_normal((900, 1, 40))).astype(np.float32)
    given = (rng.integers(1, 40, (1, 28)), np.array([900]), np.array([28]))
    want = h.ctc_loss_backward(log_probs.astype(np.float64), *given, reduction="sum")
    loss, got = h.ctc_loss(log_probs, *given, reduction="sum", return_gradient=True)
    assert loss > 2000
    assert np.abs(got - want).max() < 5e-5
