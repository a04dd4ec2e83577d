"""Norms whose results have 8 bits: the codes of the result that f32 has, scales given beforehand and scales of rows, special values."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import oxidnn
from oxidnn.codegen.render import render
from oxidnn.device import known_device
from oxidnn.dispatch.registry import ENGINES
from oxidnn.errors import InvalidArgument
from oxidnn.ops.case import parse_case
from oxidnn.runtime.assembler import assemble
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.harness import run_problem

MOST = {"e4m3": 448.0, "e5m2": 57344.0, "s8": 127.0}
NORMS = ("layer_norm", "rms_norm")


def codes(values: np.ndarray, kind: str) -> np.ndarray:
    """The bytes of values rounded to nearest even, saturating."""
    if kind == "s8":
        return np.clip(np.rint(np.nan_to_num(values, nan=0.0)), -128, 127).astype(np.int8).view(np.uint8)
    limited = np.clip(values, -MOST[kind], MOST[kind])
    return limited.astype({"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[kind]).view(np.uint8)


def raw(array: Any) -> np.ndarray:
    return np.asarray(array.numpy()).view(np.uint8)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
@pytest.mark.parametrize("kind", list(MOST))
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("shape", [(5, 76), (3, 1024), (2, 9000)])
def test_codes_are_those_of_the_result(arch: str, kind: str, norm: str, shape: tuple[int, int]) -> None:
    """With a scale beforehand, and with the rows' own: max / the largest number."""
    h, rng = oxidnn.DnnHandle(f"emu:{arch}"), np.random.default_rng(0)
    x, gamma = h.array(rng.standard_normal(shape) * 3, "f32"), h.array(rng.standard_normal(shape[1]), "f32")
    result = getattr(h, norm)(x, gamma, epilogue="silu(acc)").numpy()
    scale = h.array(np.array([0.03 if kind == "s8" else 0.007]), "f32")
    y = getattr(h, norm)(x, gamma, epilogue="silu(acc)", scale_y=scale, out_dtype=kind)
    assert y.dtype.name == kind
    np.testing.assert_array_equal(raw(y), codes(result / scale.numpy()[0], kind))
    y, scales = getattr(h, norm)(x, gamma, epilogue="silu(acc)", out_dtype=kind, return_scale=True)
    want = np.abs(result).max(1) / np.float32(MOST[kind])
    np.testing.assert_array_equal(scales.numpy(), want)
    np.testing.assert_array_equal(raw(y), codes(result / want[:, None], kind))
    assert (np.abs(y.numpy().astype(np.float32)).max(1) == MOST[kind]).all()


@pytest.mark.parametrize("kind", ["f16", "bf16", "f32", "f64"])
@pytest.mark.parametrize("given", ["f16", "bf16", "f32", "f64"])
def test_results_of_other_float_types(given: str, kind: str) -> None:
    """Rounded once, from the arithmetic's type."""
    h = oxidnn.DnnHandle("emu:sm_80")
    x = h.array(np.random.default_rng(0).standard_normal((3, 64)), given)
    wide = x.numpy().astype(np.float64 if given == "f64" else np.float32)
    want = h.rms_norm(h.array(wide, "f64" if given == "f64" else "f32")).numpy()
    y = h.rms_norm(x, out_dtype=kind)
    assert y.dtype.name == kind
    np.testing.assert_array_equal(y.numpy(), (want.astype(np.float32) if kind == "bf16" else want).astype(y.numpy().dtype))


@pytest.mark.parametrize("kind", list(MOST))
def test_rows_of_zeros_and_of_what_is_not_finite(kind: str) -> None:
    h = oxidnn.DnnHandle("emu:sm_90a")
    x = np.random.default_rng(0).standard_normal((4, 48)).astype(np.float32)
    x[0], x[2, 5], x[3, 1] = 0, np.nan, np.inf
    y, scales = h.rms_norm(h.array(x), out_dtype=kind, return_scale=True)
    assert scales.numpy()[0] == 1 and (raw(y)[0] == 0).all() and np.isfinite(scales.numpy()[1])
    assert np.isnan(scales.numpy()[2:]).all()
    values = y.numpy().astype(np.float32)
    assert (values[2] == 0).all() if kind == "s8" else np.isnan(values[2]).all()
    # one infinite result, by the epilogue
    y, scales = h.rms_norm(h.array(x[:2]), epilogue="1 / acc", out_dtype=kind, return_scale=True)
    assert np.isnan(scales.numpy()[0]) and np.isfinite(scales.numpy()[1])


def test_results_beyond_the_type_saturate() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x = h.array(np.array([[3.0, -4.0, 0.0, 0.0]]), "f32")
    for kind, most in MOST.items():
        y = h.rms_norm(x, epilogue="acc * 1e6", out_dtype=kind).numpy().astype(np.float32)
        np.testing.assert_array_equal(y, [[most, -128 if kind == "s8" else -most, 0, 0]])


def test_half_rows_of_large_values() -> None:
    """Squares are no f16; the quantum of a row is far from the largest f16."""
    h = oxidnn.DnnHandle("emu:sm_90a")
    y, scales = h.rms_norm(h.array(np.array([[60000.0, -30000.0] * 8]), "f16"), out_dtype="s8", return_scale=True)
    np.testing.assert_array_equal(y.numpy(), [[127, -64] * 8])  # -63.5, to even
    np.testing.assert_allclose(scales.numpy() * 127, [60000 / np.sqrt((60000**2 + 30000**2) / 2)], rtol=1e-6)


@pytest.mark.parametrize("norm", NORMS)
def test_sums_and_statistics_beside_a_quantised_result(norm: str) -> None:
    h, rng = oxidnn.DnnHandle("emu:sm_90a"), np.random.default_rng(1)
    x, residual = (h.array(rng.standard_normal((3, 200)), "bf16") for _ in range(2))
    found = getattr(h, norm)(x, residual=residual, out_dtype="e4m3", return_scale=True, return_stats=True, return_sum=True)
    plain = getattr(h, norm)(x, residual=residual, return_stats=True, return_sum=True)
    assert len(found) == len(plain) + 1
    for a, b in zip(found[1:-1], plain[1:], strict=True):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    got = found[0].numpy().astype(np.float32) * found[-1].numpy()[:, None]
    np.testing.assert_allclose(got, plain[0].numpy().astype(np.float32), rtol=0.07, atol=0.01)


@pytest.mark.parametrize("kind", list(MOST))
@pytest.mark.parametrize("layout", ["nchw", "nhwc"])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_norms_by_channel_give_the_codes_of_their_results(arch: str, layout: str, kind: str) -> None:
    h, rng = oxidnn.DnnHandle(f"emu:{arch}"), np.random.default_rng(0)
    x = h.array(rng.standard_normal((3, 16, 6, 5)), "f32", layout)
    mean, gamma = (h.array(rng.standard_normal(16), "f32") for _ in range(2))
    var, scale = h.array(rng.uniform(0.5, 2, 16), "f32"), h.array([0.02], "f32")
    for call in (lambda **more: h.batch_norm(x, gamma, None, mean, var, training=False, epilogue="relu(acc)", **more),
                 lambda **more: h.batch_norm(x, gamma, training=True, **more), lambda **more: h.group_norm(x, 4, gamma, **more),
                 lambda **more: h.instance_norm(x, **more), lambda **more: h.batch_norm_apply(x, mean, var, gamma, **more)):
        result = call().numpy()
        y = call(out_dtype=kind, scale_y=scale)
        assert y.dtype.name == kind and y.desc.layout == layout
        np.testing.assert_array_equal(raw(y), codes(result / scale.numpy()[0], kind))


LINES = ("rms_norm x=bf16[3,1024] gamma=bf16[1024] out_dtype=e4m3 return_scale=True",
         "layer_norm x=f32[40,33] out_dtype=s8 return_scale=True",
         "layer_norm x=bf16[2,20000] residual=bf16[2,20000] out_dtype=e5m2 return_scale=True epilogue='gelu(acc)'",
         "rms_norm x=f16[2,8,3,5]nhwc axes=(1,2,3) out_dtype=s8 return_scale=True", "rms_norm x=f32[2,40000] out_dtype=e4m3",
         "layer_norm x=f64[3,9001] out_dtype=s8 return_scale=True", "rms_norm x=bf16[5,777] out_dtype=e4m3 return_scale=True")  # fmt: skip


@pytest.mark.parametrize("line", LINES)
def test_every_config(line: str) -> None:
    problem = parse_case(line)
    for arch in ("sm_80", "sm_90a"):
        backend = EmulatedBackend(arch, checkers="all")
        for engine in ENGINES[problem.op]:
            for config in engine.configs(problem, backend.info):
                run_problem(backend, problem, engine, config)
                for step in engine.build_steps(problem, config, backend.info).steps:
                    assembled = assemble(render(step.spec), arch)
                    assert assembled.spill_bytes == 0 and assembled.registers <= step.spec.max_registers, step.spec.describe()


def test_hopper_converts_by_its_instruction() -> None:
    """It is there, and not where the target lacks it: the emulator runs both."""
    problem = parse_case("rms_norm x=bf16[3,1024] out_dtype=e4m3")
    engine = ENGINES["rms_norm"][0]
    for arch in ("sm_80", "sm_90a"):
        info = known_device(arch)
        text = render(engine.build_steps(problem, engine.configs(problem, info)[0], info).steps[0].spec)
        assert ("e4m3x2.f32" in text) == (arch == "sm_90a")


def test_refusals() -> None:
    h = oxidnn.DnnHandle("emu:sm_80")
    x = h.array(np.zeros((2, 8)), "f32")
    for given, message in (({"out_dtype": "s32"}, "out_dtype is s32"), ({"out_dtype": "bool"}, "out_dtype"),
                           ({"return_scale": True}, "return_scale is True"), ({"out_dtype": "bf16", "return_scale": True}, "return_scale"),
                           ({"out_dtype": "e4m3", "scale_y": h.array(np.ones(3), "f32")}, "shape of scale_y")):
        with pytest.raises(InvalidArgument, match=message):
            h.rms_norm(x, **given)
    with pytest.raises(InvalidArgument, match="type of y"):
        h.rms_norm(x, out_dtype="e4m3", out=h.empty((2, 8), "e5m2"))
