"""DnnHandle's methods: each agrees with the ops' own signatures, refuses bad input before anything runs, and works on NumPy arrays."""

from __future__ import annotations

import gc
import inspect
import os
import pickle
import re
import signal
import threading
import weakref

import numpy as np
import pytest

import oxidnn
from oxidnn import expr
from oxidnn.handle.calls import CALLS
from oxidnn.ops import OPS
from oxidnn.ops.foreach import RULES as STEPS
from oxidnn.testing.sample import SAMPLES


@pytest.fixture(scope="module")
def h() -> oxidnn.DnnHandle:
    return oxidnn.DnnHandle("emu:sm_80")


def rand(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


METHOD_OF = {"conv_fprop": "conv"}
# What holds results, where it is not called out.
RESULTS_OF = {"attention_backward": "gradients", "multi_head_attention_backward": "gradients", "kv_cache_append": "k_cache"}


@pytest.mark.parametrize("op", sorted(set(OPS) - {"pointwise", "concat", "meshgrid", "foreach", *STEPS}))
def test_every_op_has_a_method_with_all_its_tensors(op: str) -> None:
    call = CALLS[op]
    parameters = inspect.signature(getattr(oxidnn.DnnHandle, METHOD_OF.get(op, op))).parameters
    assert {RESULTS_OF.get(op, "out"), "stream", *call.tensors, *(n for n, _ in call.attrs)} <= set(parameters)


@pytest.mark.parametrize("op", sorted(STEPS))
def test_every_step_over_lists_has_a_method_with_all_its_lists(op: str) -> None:
    rule = STEPS[op]
    parameters = inspect.signature(getattr(oxidnn.DnnHandle, op)).parameters
    assert {"stream", *(f"{role}s" for role in (*rule.lists, *rule.optional)), *rule.shared} <= set(parameters)


def test_conv_bias_relu_and_gradients(h: oxidnn.DnnHandle) -> None:
    x, w, b = rand(2, 3, 5, 6), rand(4, 3, 3, 3, seed=1), rand(4, seed=2)
    y = h.conv(x, w, b, padding=1, epilogue="bias_relu")
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (2, 3))
    want = np.maximum(np.einsum("nchwrs,kcrs->nkhw", windows, w) + b[:, None, None], 0)
    np.testing.assert_allclose(y, want, atol=1e-5)
    dy = rand(*y.shape, seed=3)
    dw = h.conv_wgrad(x, dy, w.shape, padding=1)
    np.testing.assert_allclose(dw, np.einsum("nchwrs,nkhw->kcrs", windows, dy), atol=1e-4)
    np.testing.assert_allclose(h.conv_bgrad(dy), dy.sum((0, 2, 3)), atol=1e-4)
    # <dy, conv(x)> == <conv_dgrad(dy), x>
    dx = h.conv_dgrad(dy, w, x.shape, padding=1)
    assert dx.shape == x.shape
    assert np.vdot(dx, x) == pytest.approx(float(np.vdot(dw, w)), rel=1e-4)


def test_epilogue_operands_by_name(h: oxidnn.DnnHandle) -> None:
    x, w, scale = rand(1, 2, 4, 4), rand(3, 2, 1, 1, seed=1), rand(3, seed=2)
    y = h.conv(x, w, epilogue=expr.acc * expr.arg("scale", axis="c"), operands={"scale": scale})
    np.testing.assert_allclose(y, h.conv(x, w) * scale[:, None, None], rtol=1e-5, atol=1e-6)


def test_out_in_place_and_aliases(h: oxidnn.DnnHandle) -> None:
    x, w = rand(1, 2, 4, 4), rand(2, 2, 1, 1, seed=1)
    out = np.full((1, 2, 4, 4), np.nan, np.float32)
    assert h.conv(x, w, out=out) is out and not np.isnan(out).any()
    with pytest.raises(oxidnn.InvalidArgument, match="overlaps 'x'"):
        h.conv(x, w, out=x)
    with pytest.raises(oxidnn.InvalidArgument, match="overlaps"):
        h.pointwise("relu(a)", x[..., :-1], out=x[..., 1:])
    want = np.maximum(x, 0)
    assert h.pointwise("relu(a)", x, out=x) is x
    np.testing.assert_array_equal(x, want)


def test_refusals_leave_outputs_untouched(h: oxidnn.DnnHandle) -> None:
    x, w = rand(1, 3, 4, 4), rand(2, 2, 3, 3)
    out = np.full((1, 2, 4, 4), 7, np.float32)
    with pytest.raises(oxidnn.InvalidArgument, match="channels"):
        h.conv(x, w, padding=1, out=out)
    assert (out == 7).all()
    locked = np.zeros((1, 2, 2, 2), np.float32)
    locked.flags.writeable = False
    with pytest.raises(oxidnn.InvalidArgument, match="read-only"):
        h.conv(x, rand(2, 3, 3, 3), out=locked)
    with pytest.raises(oxidnn.InvalidArgument, match="no array"):
        h.conv("x", w)
    with pytest.raises(oxidnn.InvalidArgument, match="math"):
        oxidnn.DnnHandle("emu:sm_80", math="half")
    with pytest.raises(oxidnn.InvalidArgument, match="device"):
        oxidnn.DnnHandle("cpu")


def test_plans_explanations_and_options(h: oxidnn.DnnHandle) -> None:
    x, w = rand(1, 16, 6, 6), rand(16, 16, 3, 3, seed=1)
    plan = h.plan("conv_fprop", x, w, padding=1)
    out = np.full((1, 16, 6, 6), np.nan, np.float32)
    plan(x, w, out=out)
    np.testing.assert_array_equal(out, h.conv(x, w, padding=1))
    with pytest.raises(oxidnn.InvalidArgument, match=r"conv_fprop: x is f32\[1,16,6,5\]\(.*as planned.*w f32\[16,16,3,3\]nchw"):
        plan(x.transpose(0, 1, 3, 2)[..., :5], w)
    with pytest.raises(oxidnn.InvalidArgument, match="w is None"):
        plan(x)
    with pytest.raises(oxidnn.InvalidArgument, match="number of arrays is 9"):
        plan(*(x,) * 9)
    table = str(h.explain("conv_fprop", x, w, padding=1))
    assert 'math="ieee" does not allow' in table and "conv_fprop.direct | supported" in table
    with h.options(math="tf32"):
        assert "igemm_mma_sm80 | supported" in str(h.explain("conv_fprop", x, w, padding=1))
    assert "does not allow" in str(h.explain("conv_fprop", x, w, padding=1))
    with pytest.raises(oxidnn.InvalidArgument, match="deterministic, math, workspace_limit"), h.options(speed=2):
        pass


def test_bound_plans_check_out_and_scalars(h: oxidnn.DnnHandle) -> None:
    x, w = rand(1, 2, 4, 4), rand(3, 2, 3, 3, seed=1)
    plan = h.plan("conv_fprop", x, w)
    with pytest.raises(oxidnn.InvalidArgument, match="y"):
        plan(x, w, out=np.zeros((1, 3, 2, 1), np.float32))
    half = np.full((1, 3, 2, 2), np.nan, np.float16)
    plan(x, w, out=half)  # another type of output is another plan
    np.testing.assert_allclose(half, h.conv(x, w), rtol=2e-3, atol=2e-3)
    scaled = h.plan("pointwise", "scalar(p) * a + scalar(q)", x)
    np.testing.assert_allclose(scaled(x, q=1.0, p=2.0), 2 * x + 1, rtol=1e-6)
    for wrong in ({}, {"p": 1.0}, {"p": 1.0, "q": 2.0, "r": 3.0}, {"p": "1", "q": 2.0}):
        with pytest.raises(oxidnn.InvalidArgument, match="scalar"):
            scaled(x, **wrong)
        with pytest.raises(oxidnn.InvalidArgument, match="scalar"):
            h.pointwise("scalar(p) * a + scalar(q)", x, **wrong)
    y = h.conv(x, w, epilogue="acc * scalar(s)", scalars={"s": 3.0})
    np.testing.assert_allclose(y, 3 * h.conv(x, w), rtol=1e-6)
    with pytest.raises(oxidnn.InvalidArgument, match="scalars"):
        h.conv(x, w, epilogue="acc * scalar(s)")


def test_scalars_named_as_arguments(h: oxidnn.DnnHandle) -> None:
    x = rand(2, 3)
    plan = h.plan("pointwise", "scalar(self) * a + scalar(expression)", x)
    np.testing.assert_allclose(plan(x, self=2.0, expression=1.0), 2 * x + 1, rtol=1e-6)
    np.testing.assert_allclose(h.pointwise("scalar(self) * a + scalar(expression)", x, self=2.0, expression=1.0), 2 * x + 1, rtol=1e-6)
    target = [np.full_like(x, np.nan)]
    h.foreach("scalar(self) * a", {"a": [x]}, target, self=2.0)
    np.testing.assert_array_equal(target[0], 2 * x)
    for name in ("out", "stream"):
        with pytest.raises(oxidnn.InvalidArgument, match=f"plan pointwise: scalar {name} is named as an argument"):
            h.plan("pointwise", f"scalar({name}) * a", x)
        with pytest.raises(oxidnn.InvalidArgument, match=f"foreach: scalar {name} is named as an argument"):
            h.foreach(f"scalar({name}) * a", {"a": [x]}, ([np.empty_like(x)],), **({} if name == "out" else {name: 2.0}))  # type: ignore[arg-type]
        np.testing.assert_allclose(h.gemm(x, x.T.copy(), epilogue=f"acc * scalar({name})", scalars={name: 2.0}), 2 * x @ x.T, rtol=1e-5)
    for name in ("dtype", "saturate", "out", "stream"):
        with pytest.raises(oxidnn.InvalidArgument, match=f"pointwise: scalar {name} is named as an argument"):
            h.pointwise(f"scalar({name}) * a", x, **{name: 2.0})
    for name in ("self", "out", "stream"):  # operands go by position, and but for the plan's own arguments by name
        b = rand(2, seed=1)
        plan = h.plan("gemm", x, x.T.copy(), epilogue=f"acc * {name}", operands={name: b})
        np.testing.assert_allclose(plan(x, x.T.copy(), None, None, None, None, b), x @ x.T * b, rtol=1e-5)
        if name == "self":
            np.testing.assert_allclose(plan(x, x.T.copy(), **{name: b}), x @ x.T * b, rtol=1e-5)
        else:
            with pytest.raises(oxidnn.InvalidArgument, match=f"plan gemm: {name} is None.*as planned"):
                plan(x, x.T.copy(), **{name: b})


def test_scalars_named_as_tensors_of_their_expression(h: oxidnn.DnnHandle) -> None:
    x, q = rand(2, 3), rand(1, 1, 4, 8)
    one = np.ones(1, np.float32)
    codes = np.ones((3, 2), np.int8)
    refused = {
        "s": lambda n: h.pointwise("scalar(s) * a + s", x, x, s=2.0),
        "acc": lambda n: h.gemm(x, x.T.copy(), epilogue="acc * scalar(acc)", scalars={n: 2.0}),
        "c": lambda n: h.gemm(x, x.T.copy(), c=rand(2, 2), beta=1.0, epilogue="acc * scalar(c)", scalars={n: 2.0}),
        "scale_x": lambda n: h.conv(codes.T[None], codes[..., None], scale_x=one, epilogue="acc * scalar(scale_x)", scalars={n: 2.0}),
        "scale_y": lambda n: h.layer_norm(x, scale_y=one, out_dtype="s8", epilogue="acc * scalar(scale_y)", scalars={n: 2.0}),
        "scale": lambda n: h.quantized_linear(x, codes.T.copy(), one, kind="s8", epilogue="acc * scalar(scale)", scalars={n: 2.0}),
        "score": lambda n: h.attention(q, q, q, score="score * scalar(score)", scalars={n: 2.0}),
        "seed": lambda n: h.attention(q, q, q, dropout=0.5, seed=1, score="score * scalar(seed)", scalars={n: 2.0}),
        "dy": lambda n: h.attention_backward(q, q, q, q, q, q[..., 0], score="score * scalar(dy)", scalars={n: 2.0}),
        "a": lambda n: h.foreach("scalar(a) * a", {n: [x]}, [np.empty_like(x)], **{n: 2.0}),
    }
    for name, call in refused.items():
        with pytest.raises(oxidnn.InvalidArgument, match=f"scalar {name} is"):
            call(name)
    with pytest.raises(oxidnn.InvalidArgument, match="which names dy"):
        h.attention_backward(q, q, q, q, q, q[..., 0], score="score * dy", operands={"dy": q[..., :1, :1]})


def test_operands_may_not_take_a_role(h: oxidnn.DnnHandle) -> None:
    x, w, b = rand(1, 2, 4, 4), rand(3, 2, 1, 1, seed=1), rand(3, seed=2)
    for name in ("bias", "x", "y"):
        with pytest.raises(oxidnn.InvalidArgument, match="operands"):
            h.conv(x, w, b, epilogue="bias_relu", operands={name: b})
    plan = h.plan("conv_fprop", x, w, epilogue="acc * s[c]", operands={"s": b})
    for y in (plan(x, w, None, None, b), plan(x, w, s=b), plan(x, s=b, w=w)):
        np.testing.assert_allclose(y, h.conv(x, w) * b[:, None, None], rtol=1e-5, atol=1e-6)
    with pytest.raises(oxidnn.InvalidArgument, match="bias is f32.*None, as planned.*s f32"):
        plan(x, w, b)
    plan = h.plan("conv_fprop", x, w, epilogue="acc * scalar(bias)")  # a scalar may have the name of a role that is not taken
    np.testing.assert_allclose(plan(x, w, bias=2.0), 2 * h.conv(x, w), rtol=1e-6)
    assert "supported" in str(h.explain("conv_fprop", x, w, epilogue="acc * s[c]", operands={"s": b}))


def test_plans_do_not_keep_arrays_alive(h: oxidnn.DnnHandle) -> None:
    class Array(np.ndarray):
        """A NumPy array that takes weak references."""

    x = rand(1, 2, 7, 3).view(Array)
    watch = weakref.ref(x)
    h.softmax(x)
    del x
    gc.collect()
    assert watch() is None


def test_lists_and_repeated_calls_share_a_plan(h: oxidnn.DnnHandle) -> None:
    x, w = rand(1, 2, 5, 5), rand(2, 2, 3, 3)
    h.conv(x, w, padding=(1, 0))
    count = len(h._session._plans)
    np.testing.assert_array_equal(h.conv(x, w, padding=[1, 0]), h.conv(x, w, padding=(1, 0)))
    assert len(h._session._plans) == count


def test_empty_batch(h: oxidnn.DnnHandle) -> None:
    x, w = np.zeros((0, 2, 5, 5), np.float32), rand(3, 2, 3, 3)
    assert h.conv(x, w).shape == (0, 3, 3, 3)
    dw = h.conv_wgrad(x, np.zeros((0, 3, 3, 3), np.float32), w.shape)
    np.testing.assert_array_equal(dw, np.zeros_like(w))
    assert h.softmax(np.zeros((0, 4), np.float32)).shape == (0, 4)


def test_pools_and_losses(h: oxidnn.DnnHandle) -> None:
    x = rand(2, 3, 6, 6)
    y, indices = h.max_pool(x, 2, return_indices=True)
    np.testing.assert_array_equal(y, x.reshape(2, 3, 3, 2, 3, 2).max((3, 5)))
    assert indices.dtype == np.int64
    dx = h.max_pool_backward(np.ones_like(y), indices, x.shape, 2)
    assert dx.sum() == y.size and (dx[x.reshape(x.shape) == np.repeat(np.repeat(y, 2, 2), 2, 3)] == 1).all()
    np.testing.assert_allclose(h.global_avg_pool(x)[..., 0, 0], x.mean((2, 3)), atol=1e-6)
    np.testing.assert_allclose(h.adaptive_avg_pool(x, 2), x.reshape(2, 3, 2, 3, 2, 3).mean((3, 5)), atol=1e-6)
    logits, target = rand(5, 7), np.array([0, 6, 3, 2, 2])
    shifted = logits - np.log(np.exp(logits.astype(np.float64)).sum(1, keepdims=True))
    assert float(h.cross_entropy(logits, target)) == pytest.approx(float(-shifted[np.arange(5), target].mean()), rel=1e-6)


def test_momentum_step_in_place(h: oxidnn.DnnHandle) -> None:
    w, v, g = rand(33), rand(33, seed=1), rand(33, seed=2)
    velocity = expr.scalar("momentum") * expr.arg("v") + expr.arg("g")
    step = expr.outputs(expr.arg("w") - expr.scalar("rate") * velocity, velocity)
    want_v = 0.9 * v.astype(np.float64) + g
    want_w = w - 0.1 * want_v
    tensors = {"w": w, "v": v, "g": g}
    h.pointwise(step, *(tensors[n] for n in step.args), rate=0.1, momentum=0.9, out=(w, v))
    np.testing.assert_allclose(v, want_v, rtol=1e-6)
    np.testing.assert_allclose(w, want_w, rtol=1e-5, atol=1e-6)


def test_device_arrays_keep_layout_and_type(h: oxidnn.DnnHandle) -> None:
    x = h.array(rand(2, 8, 5, 5), dtype="bfloat16", layout="nhwc")
    w = h.array(rand(8, 8, 3, 3, seed=1), dtype="bfloat16", layout="nhwc")
    y = h.conv(x, w, padding=1)
    assert isinstance(y, oxidnn.DeviceArray) and y.desc.layout == "nhwc" and str(y.dtype) == "bf16"
    assert h.warmup(["conv_fprop x=f32[1,2,5,5] w=f32[2,2,3,3]", "softmax x=f32[0,3]"]) == 1


@pytest.mark.parametrize("given", [(-0.0,), [-0.0], np.array([-0.0])], ids=["tuple", "list", "array"])
def test_minus_zero_does_not_meet_the_plan_of_zero(given: object) -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x = np.array([-1.0, 2.0, -3.0], np.float32)
    for parameters, sign in (((0.0,), -1), (given, 1), ([0.0], -1), (given, 1)):
        assert (np.copysign(1, h.activation(x, "leaky_relu", parameters=parameters)) == [sign, 1, sign]).all()
        assert (np.copysign(1, h.plan("activation", x, name="leaky_relu", parameters=parameters)(x)) == [sign, 1, sign]).all()
    for text, sign in (("leaky_relu(x, 0.0)", -1), ("leaky_relu(x, -0.0)", 1), ("leaky_relu(x, 0.0)", -1)):
        assert (np.copysign(1, h.pointwise(text, x)) == [sign, 1, sign]).all()


class _Recorder:
    """A session that only writes down what a method passes on."""

    def run(self, call: object, arrays: tuple, attrs: tuple, out: object, stream: object, *more: object) -> tuple:
        self.call, self.arrays, self.attrs, self.out, self.stream = call, arrays, attrs, out, stream
        return ()


CHECKED = {"dropout": 0.25, "renormalize": False, "scaling_factor": 1.5, "top_k": 3, "groups": 4, "top_groups": 2, "capacity": 5}


@pytest.mark.parametrize("op", sorted(set(CALLS) - {"concat", "meshgrid"}))  # which take a list
def test_methods_pass_arguments_in_the_order_of_their_call(op: str) -> None:
    h = oxidnn.DnnHandle.__new__(oxidnn.DnnHandle)
    h._session = recorder = _Recorder()  # type: ignore[assignment]
    call, method = CALLS[op], getattr(h, METHOD_OF.get(op, op))
    given = {name: (name,) for name in inspect.signature(method).parameters if name not in ("operands", "scalars")}
    if "seed" in given:  # numbers drawn from (seed, offset), or from a state in memory
        given |= {"seed": None, "offset": 0} if "state" in given else dict.fromkeys({"seed", "offset"} & given.keys(), 0)
    given |= {n: value for n, value in CHECKED.items() if n in given}
    if op == "quantize":
        given |= {"scale": np.ones(1), "saturate": True}  # words for a scale are dynamic_quantize's
    pairs = {"scaling"} & given.keys() if "quantize" not in op else set()
    given |= {n: {"type": n} for n in pairs}  # which becomes pairs
    method(**given)
    results = recorder.out[0] if op == "kv_cache_append" else recorder.out  # the first of several
    assert recorder.call is call and results[0] == RESULTS_OF.get(op, "out") and recorder.stream == ("stream",)
    assert dict(zip(call.tensors, recorder.arrays, strict=True)) == {n: given.get(n, (n,)) for n in call.tensors}
    want = {n: (("type", n),) if n in pairs else given.get(n, (n,)) for n, _ in call.attrs}
    assert dict(zip((n for n, _ in call.attrs), recorder.attrs, strict=True)) == want
    defaults = {n: p.default for n, p in inspect.signature(method).parameters.items()}
    defaults |= {"dropout": None} if defaults.get("dropout") == 0 else {}
    assert all(defaults[n] in (inspect.Parameter.empty, default) for n, default in call.attrs)


@pytest.mark.parametrize("name, message, call", [
    ("a", "list is no array", lambda h, x: h.gemm([[1.0]], x)),
    ("b", "str is no array", lambda h, x: h.gemm(x, "b")),
    ("out", "list is no array", lambda h, x: h.gemm(x, x, out=[x])),
    ("scale", "int is no array", lambda h, x: h.gemm(x, x, epilogue="acc * scale", operands={"scale": 2})),
    ("b", "complex128", lambda h, x: h.gemm(x, x.astype(complex))),
    ("out", "foreign byte order", lambda h, x: h.gemm(x, x, out=x.astype(">f4"))),
    ("a", "list is no array", lambda h, x: h.plan("gemm", [[1.0]], x)),
    ("b", "complex128", lambda h, x: h.explain("gemm", x, x.astype(complex))),
    ("out", "int is no array", lambda h, x: h.plan("gemm", x, x)(x, x, out=3)),
    ("gamma", "float is no array",
     lambda h, x: h.batch_norm(x, 1.0, None, np.zeros(4, np.float32), np.ones(4, np.float32), training=True)),
])
def test_what_is_no_array_is_named_by_its_argument(h: oxidnn.DnnHandle, name, message, call) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(oxidnn.InvalidArgument, match=rf"^\w+: {name}: .*{message}"):
        call(h, rand(4, 4))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork here")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_child_forked_while_another_thread_made_a_plan_makes_its_own(h: oxidnn.DnnHandle) -> None:
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with h._session._building:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        child = os.fork()
        if child == 0:
            signal.alarm(20)  # ends a child that waits
            os._exit(0 if h.softmax(rand(3, 77)).shape == (3, 77) else 1)
        assert os.waitpid(child, 0)[1] == 0
    finally:
        done.set()
        thread.join()


def test_a_tuple_of_texts_gives_several_results(h: oxidnn.DnnHandle) -> None:
    x = rand(5)
    for given in (("x + 1", "2 * x"), ["x + 1", expr.arg("x") * 2], "x + 1, 2 * x"):
        first, second = h.pointwise(given, x)
        np.testing.assert_array_equal(first, x + np.float32(1))
        np.testing.assert_array_equal(second, x * np.float32(2))


@pytest.mark.parametrize("kind", [np.int8, np.int16, np.uint16, np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("constant", [2**31 - 1, 2**31, 2**32, -(2**31) - 1, 2**33 + 1])
def test_constants_beyond_32_bits_do_not_wrap(h: oxidnn.DnnHandle, kind, constant: int) -> None:  # type: ignore[no-untyped-def]
    x = np.array([0, 1, 100], kind)
    bounds = np.iinfo(kind)
    if not -(2**31) <= constant < 2**31:  # (sums of 32-bit numbers wrap)
        np.testing.assert_array_equal(h.pointwise(f"x + {constant}", x), np.clip(x.astype(np.int64) + constant, bounds.min, bounds.max))
    np.testing.assert_array_equal(h.pointwise(f"x < {constant}", x), x.astype(np.int64) < constant)


@pytest.mark.parametrize("text", ["x + 9007199254740993", "x + 9223372036854775808", "x + " + 400 * "9", "x" + 3000 * " + x"])
def test_numbers_that_no_constant_holds_are_refused(h: oxidnn.DnnHandle, text: str) -> None:
    with pytest.raises(oxidnn.InvalidArgument, match="expression"):
        h.pointwise(text, np.zeros(3, np.int64))
    with pytest.raises(oxidnn.InvalidArgument, match="exact"):
        expr.const(np.int64(2**53 + 1))


@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_numbers_that_no_scalar_holds_are_refused(h: oxidnn.DnnHandle, kind) -> None:  # type: ignore[no-untyped-def]
    x = np.ones(3, kind)
    with pytest.raises(oxidnn.InvalidArgument, match="scalar s"):
        h.pointwise("x * scalar(s)", x, s=10**400)
    assert (h.pointwise("x * scalar(s)", x, s=-np.inf) == -np.inf).all()


def _gapped(like: np.ndarray) -> np.ndarray:
    """An array like this one, with gaps between its elements and another order of its dimensions."""
    return np.full((*like.shape[::-1], 2), np.nan if like.dtype.kind == "f" else 0xA5, like.dtype)[..., 0].T


def _channel_statistics(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x.mean((0, 2)), 1 / np.sqrt(x.var((0, 2)) + np.float32(1e-5))


@pytest.mark.parametrize("call", [
    lambda h, x, out: h.layer_norm(x, return_sum=True, residual=x, out=out),
    lambda h, x, out: h.layer_norm(x, return_stats=True, return_sum=True, out=out),
    lambda h, x, out: h.group_norm(x, 2, return_mask=True, epilogue="relu(acc)", out=out),
    lambda h, x, out: h.batch_norm(x, training=True, return_mask=True, epilogue="relu(acc)", out=out),
    lambda h, x, out: h.batch_norm(x, None, None, np.zeros(6, "f4"), np.ones(6, "f4"), training=True, return_mask=True,
                                   epilogue="relu(acc)", out=out),
    lambda h, x, out: h.batch_norm_backward(x, x, *_channel_statistics(x), return_residual=True, out=out),
    lambda h, x, out: h.loss_backward(x, x + 1, var=np.abs(x) + 1, name="gaussian_nll", out=out),
    lambda h, x, out: h.row_loss_backward(x, x + 1, x - 1, name="triplet_margin", out=out),
], ids=range(8))
def test_out_takes_the_results_there_are_whatever_others_there_might_be(h: oxidnn.DnnHandle, call) -> None:  # type: ignore[no-untyped-def]
    x = rand(2, 6, 8)
    want = call(h, x, None)
    outs = tuple(_gapped(a) for a in want)
    got = call(h, x, outs)
    assert all(a is b for a, b in zip(got, outs, strict=True))
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    for wrong in ((*outs[:-1], outs[-1][:1]), (*outs[:-1], outs[-1].astype(np.float16)), (*outs, outs[-1].copy())):
        with pytest.raises(oxidnn.InvalidArgument):
            call(h, x, wrong)


def test_running_statistics_may_be_strided(h: oxidnn.DnnHandle) -> None:
    x, packed, strided = rand(4, 3, 5), [np.zeros(3, np.float32), np.ones(3, np.float32)], [np.full((3, 2), i, np.float32) for i in (0, 1)]
    h.batch_norm(x, None, None, *packed, training=True)
    h.batch_norm(x, None, None, *(s[:, 0] for s in strided), training=True)
    for i in (0, 1):
        np.testing.assert_allclose(strided[i][:, 0], packed[i], rtol=1e-6)
        assert (strided[i][:, 1] == i).all()


@pytest.mark.parametrize("op", sorted(OPS))
def test_the_first_output_of_a_row_is_always_there(op: str) -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        names = [o.name for o in SAMPLES[op](rng, "tiny").outputs]
        assert op == "pointwise" or not OPS[op].outputs or names[0] == OPS[op].outputs[0]  # steps over lists number theirs


@pytest.mark.parametrize("seed", [-1, 2**64, 1.5, True])
def test_a_bound_plan_checks_its_numbers(h: oxidnn.DnnHandle, seed) -> None:  # type: ignore[no-untyped-def]
    x = rand(7)
    plan = h.plan("dropout", x)
    with pytest.raises(oxidnn.InvalidArgument, match="scalar seed"):
        plan(x, seed=seed, offset=0)
    np.testing.assert_array_equal(plan(x, seed=3, offset=2**64 - 1), h.dropout(x, seed=3, offset=2**64 - 1))


def test_methods_are_the_handles_own() -> None:
    for method in (oxidnn.DnnHandle.conv, oxidnn.DnnHandle.adam_step, oxidnn.DnnHandle.plan):
        assert method.__qualname__ == f"DnnHandle.{method.__name__}"
        assert pickle.loads(pickle.dumps(method)) is method


def test_names_of_pytorch_are_told(h: oxidnn.DnnHandle) -> None:
    x = rand(1, 2, 4, 4)
    with pytest.raises(oxidnn.InvalidArgument, match=r"kernel_size is window here"):
        h.max_pool(x, kernel_size=2)  # type: ignore[call-arg]
    with pytest.raises(oxidnn.InvalidArgument, match=r"weight is w here"):
        h.conv(x, weight=x)  # type: ignore[call-arg]
    with pytest.raises(oxidnn.InvalidArgument, match=r"dim is axis here"):
        h.softmax(x, dim=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(("name", "here"), [
    ("linear", "gemm(x, w, bias, transpose_b=True)"), ("conv2d", "conv"), ("relu", 'activation(x, "relu")'), ("sum", 'reduce(x, "sum")'),
    ("softmx", "did you mean softmax"), ("nonsense", "no nonsense.")])
def test_functions_of_pytorch_are_told(name: str, here: str, h: oxidnn.DnnHandle) -> None:
    with pytest.raises(AttributeError, match=re.escape(here)):
        getattr(h, name)
    assert not hasattr(h, name)
