"""cvt to and from e2m1, e2m3, e3m2 and ue8m0 against ml_dtypes: all codes, dense sweeps with ties, saturation, NaN, targets."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from oxidnn.errors import OxidnnError, PtxError
from oxidnn.ptx.parser import parse
from oxidnn.ptx.validate import validate
from oxidnn.runtime.assembler import assemble
from tests.emu.running import launch

FORMATS: dict[str, Any] = {"e2m1": ml_dtypes.float4_e2m1fn, "e2m3": ml_dtypes.float6_e2m3fn, "e3m2": ml_dtypes.float6_e3m2fn}
E8M0 = ml_dtypes.float8_e8m0fnu
BF16 = ml_dtypes.bfloat16
BITS = {"e2m1": 4, "e2m3": 6, "e3m2": 6}


def kernel(instruction: str, sources: list[str], result: str, target: str = "sm_100a") -> str:
    """One thread per element; 8-bit registers are loaded and stored through the halves of 16-bit ones."""
    width = {"f32": 4, "b32": 4, "b16": 2, "b8": 1}
    lines = [".version 8.6", f".target {target}", ".address_size 64"]
    lines += [f".visible .entry one({', '.join(f'.param .u64 p{i}' for i in range(len(sources) + 1))})", "{"]
    lines += [".reg .b64 %q, %o; .reg .b32 %i; .reg .b16 %h; .reg .b8 %z;", f".reg .{result} %d;"]
    lines += [".reg .b32 %c; mov.u32 %i, %tid.x; mov.u32 %c, %ctaid.x; mad.lo.u32 %i, %c, 256, %i;"]
    for i, kind in enumerate(sources):
        lines += [f".reg .{kind} %a{i}; ld.param.u64 %q, [p{i}]; mul.wide.u32 %o, %i, {width[kind]}; add.u64 %q, %q, %o;"]
        lines += ["ld.global.u8 %h, [%q]; mov.b16 {%a0, %z}, %h;" if kind == "b8" else f"ld.global.{kind} %a{i}, [%q];"]
    lines += [f"{instruction} %d, {', '.join(f'%a{i}' for i in range(len(sources)))};"]
    lines += [f"ld.param.u64 %q, [p{len(sources)}]; mul.wide.u32 %o, %i, {width[result]}; add.u64 %q, %q, %o;"]
    if result == "b8":
        lines += ["mov.b16 %h, {%d, %d}; st.global.u8 [%q], %h;"]
    else:
        lines += [f"st.global.{result} [%q], %d;"]
    return "\n".join([*lines, "ret;", "}"])


def run(instruction: str, sources: list[np.ndarray], result: str) -> np.ndarray:
    kinds = ["f32" if x.dtype == np.float32 else f"b{8 * x.itemsize}" for x in sources]
    n = len(sources[0])
    padded = [np.concatenate((x, np.zeros(-n % 256, x.dtype))) for x in sources]
    out = np.full(len(padded[0]), 0xA5, {"b8": np.uint8, "b16": np.uint16, "b32": np.uint32}[result])
    launch(kernel(instruction, kinds, result), (len(out) // 256,), (256,), [*padded, out], checkers="all")
    return out[:n]


def sweep(type_: str) -> np.ndarray:
    """Every value, every midpoint, both neighbours of each in f32, values past the largest, and random bit patterns."""
    values = np.arange(1 << BITS[type_] - 1, dtype=np.uint8).view(FORMATS[type_]).astype(np.float32)
    top = values[-1]
    points = np.concatenate((values, (values[1:] + values[:-1]) / 2, np.array([top * 1.05, top * 1.5, 1e30, 1e-45, 3e-39], np.float32)))
    up, down = np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(0))
    dense = np.linspace(0, 1.2 * top, 3001, dtype=np.float32)
    positive = np.concatenate((points, up, down, dense, [np.float32(np.inf)])).astype(np.float32)
    patterns = np.random.default_rng(7).integers(0, 1 << 32, 1000, np.uint32).view(np.float32)
    nans = np.array([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF], np.uint32).view(np.float32)
    return np.concatenate((positive, -positive, patterns, nans))


def rounded(x: np.ndarray, type_: str, relu: bool) -> np.ndarray:
    """Codes: ties to even, clamped, NaN to the largest value."""
    dtype = FORMATS[type_]
    top = np.float32(ml_dtypes.finfo(dtype).max)
    x = np.where(np.isnan(x), top, np.where(relu & (x <= 0), np.float32(0), x))
    return np.clip(x, -top, top).astype(np.float32).astype(dtype).view(np.uint8)


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("type_", FORMATS)
def test_from_f32(type_: str, relu: bool) -> None:
    high = sweep(type_)
    low = np.roll(high, 17)
    got = run(f"cvt.rn.satfinite{'.relu' * relu}.{type_}x2.f32", [high, low], "b8" if type_ == "e2m1" else "b16")
    shift = 4 if type_ == "e2m1" else 8
    want = rounded(high, type_, relu).astype(np.uint16) << shift | rounded(low, type_, relu)
    np.testing.assert_array_equal(got, want.astype(got.dtype))


@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("type_", FORMATS)
def test_to_f16x2(type_: str, relu: bool) -> None:
    codes = np.arange(1 << BITS[type_], dtype=np.uint8)
    low, high = (x.reshape(-1) for x in np.meshgrid(codes, codes))
    packed = high << 4 | low if type_ == "e2m1" else high.astype(np.uint16) << 8 | low
    got = run(f"cvt.rn{'.relu' * relu}.f16x2.{type_}x2", [packed], "b32").view(np.uint16).reshape(-1, 2)
    value = np.stack((low, high), -1).view(FORMATS[type_]).astype(np.float16)
    value = np.where(relu & (value <= 0), np.float16(0), value)
    np.testing.assert_array_equal(got, value.view(np.uint16))


def scale_code(x: np.ndarray, up: bool, finite: bool) -> np.ndarray:
    """By counting the powers of two that are not above (rz), or below (rp), the magnitude in float64."""
    with np.errstate(invalid="ignore"):  # signalling NaNs
        magnitude = np.abs(x.astype(np.float64))
    powers = np.arange(256, dtype=np.uint8)[:255].view(E8M0).astype(np.float64)
    code = np.searchsorted(powers, magnitude, "left") if up else np.maximum(np.searchsorted(powers, magnitude, "right") - 1, 0)
    code = np.where(np.isinf(magnitude), 255, code)
    return np.where(np.isnan(x), 255, np.minimum(code, 254) if finite else code).astype(np.uint8)


def scales() -> np.ndarray:
    powers = np.arange(255, dtype=np.uint8).view(E8M0).astype(np.float32)
    around = [np.nextafter(powers, np.float32(t)) for t in (0, np.inf)]
    special = np.array([0.0, np.inf, np.nan, np.finfo(np.float32).max, 1e-45, 2.0**-128, 1.5 * 2.0**-127], np.float32)
    patterns = np.random.default_rng(3).integers(0, 1 << 32, 4000, np.uint32).view(np.float32)
    positive = np.concatenate((powers, *around, powers * np.float32(1.5), special))
    return np.concatenate((positive, -positive, patterns))


@pytest.mark.parametrize("finite", [False, True])
@pytest.mark.parametrize("mode", ["rz", "rp"])
def test_to_scales(mode: str, finite: bool) -> None:
    with np.errstate(all="ignore"):
        high = scales()
    low = np.roll(high, 5)
    name = f"cvt.{mode}{'.satfinite' * finite}.ue8m0x2"
    want = lambda a, b: scale_code(a, mode == "rp", finite).astype(np.uint16) << 8 | scale_code(b, mode == "rp", finite)  # noqa: E731
    np.testing.assert_array_equal(run(f"{name}.f32", [high, low], "b16"), want(high, low))
    codes = np.arange(65536, dtype=np.uint16)  # every bf16
    pairs = np.stack((codes, np.roll(codes, 1)), -1)
    values = pairs.view(BF16).astype(np.float32)
    got = run(f"{name}.bf16x2", [pairs.view(np.uint32).reshape(-1)], "b16")
    np.testing.assert_array_equal(got, want(values[:, 1], values[:, 0]))


def test_from_scales() -> None:
    packed = np.arange(65536, dtype=np.uint16)
    got = run("cvt.rn.bf16x2.ue8m0x2", [packed], "b32").view(np.uint16).reshape(-1, 2)
    codes = packed.view(np.uint8).reshape(-1, 2)
    want = np.where(codes == 255, np.uint16(0x7FFF), codes.view(E8M0).astype(BF16).view(np.uint16))
    np.testing.assert_array_equal(got, want)


INSTRUCTIONS = [
    *((f"cvt.rn.satfinite{r}.{t}x2.f32", ["f32", "f32"], "b8" if t == "e2m1" else "b16") for t in FORMATS for r in ("", ".relu")),
    *((f"cvt.rn{r}.f16x2.{t}x2", ["b8" if t == "e2m1" else "b16"], "b32") for t in FORMATS for r in ("", ".relu")),
    *((f"cvt.{m}{f}.ue8m0x2.{s}", ["f32", "f32"] if s == "f32" else ["b32"], "b16")
      for m in ("rz", "rp") for f in ("", ".satfinite") for s in ("f32", "bf16x2")),
    ("cvt.rn.bf16x2.ue8m0x2", ["b16"], "b32"),
]  # fmt: skip


@pytest.mark.parametrize(("instruction", "sources", "result"), INSTRUCTIONS, ids=[x[0] for x in INSTRUCTIONS])
def test_targets(instruction: str, sources: list[str], result: str) -> None:
    """The assembler takes each for sm_100a and refuses it for sm_90a; so does the instruction table."""
    assert assemble(kernel(instruction, sources, result), "sm_100a").cubin
    text = kernel(instruction, sources, result, "sm_90a")
    with pytest.raises(OxidnnError):
        assemble(text, "sm_90a")
    with pytest.raises(PtxError, match="sm_100f.*the module has .version 8.6 and sm_90a: cvt"):
        validate(parse(text))
    validate(parse(kernel(instruction, sources, result)))
