"""Quantises one linear layer to four bits in four ways and prints what each does to its outputs.

    python examples/quantize_layer.py                       # the GPU if there is one, else the CPU emulator
    python examples/quantize_layer.py --device emu:sm_90a --features 128 --outputs 48

The weights are normal numbers; the inputs are mixtures of others, of very different sizes, with a few outlier channels, as activations of
language models are. Scales, codes and errors are found on calibration inputs; the errors shown are those of other inputs.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np

import oxidnn
from oxidnn.calibration import InputStatistics, awq, gptq, output_error, round_to_nearest


def inputs_and_weights(features: int, outputs: int, rows: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(calibration inputs, other inputs, weights), f32."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((features, features)) * np.exp(rng.standard_normal(features))[:, None] / np.sqrt(features)
    x = rng.standard_normal((2 * rows, features)) @ mix
    x[:, rng.choice(features, 1 + features // 100)] *= 30
    x, w = x.astype(np.float32), rng.standard_normal((outputs, features)).astype(np.float32)
    return x[:rows], x[rows:], w


def main(argv: list[str] | None = None) -> dict[str, float]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda:N or emu:sm_XY (default: the GPU if there is one, else the emulator)")
    parser.add_argument("--features", type=int, default=256)
    parser.add_argument("--outputs", type=int, default=96)
    parser.add_argument("--rows", type=int, default=512, help="of the calibration inputs")
    parser.add_argument("--kind", default="s4", choices=("s4", "u4", "s8"))
    parser.add_argument("--group", type=int, default=32, help="weights that share a scale")
    args = parser.parse_args(argv)

    h = oxidnn.DnnHandle(args.device)
    calibration, x, w = map(h.array, inputs_and_weights(args.features, args.outputs, args.rows))
    seen = InputStatistics(h).update(calibration)
    scaled = awq(h, w, seen, args.kind, group_size=args.group)
    layers: dict[str, tuple[dict[str, Any], Any]] = {
        "round to nearest": (round_to_nearest(h, w, args.kind, group_size=args.group), None),
        f"AWQ, alpha {scaled.alpha:.2f}": (scaled.layer, scaled.input_scale),
        "GPTQ": (gptq(h, w, seen, args.kind, group_size=args.group), None),
        "GPTQ, ordered": (gptq(h, w, seen, args.kind, group_size=args.group, act_order=True), None),
    }
    want = h.gemm(x, w, transpose_b=True).numpy()
    print(f"{h.device} ({h.info.name}): {args.outputs} x {args.features} weights in {args.kind}, groups of {args.group}\n")
    print(f"{'':20}  calibrated on  other inputs     (error of the outputs, of their norm)")
    errors = {}
    for name, (layer, scale) in layers.items():
        y = h.quantized_linear(x if scale is None else h.pointwise("x / s", x, scale), **layer).numpy()
        errors[name.split(",")[0] if scale is not None else name] = error = float(np.linalg.norm(y - want) / np.linalg.norm(want))
        print(f"{name:20}  {output_error(h, w, layer, seen, scale):13.2%}  {error:12.2%}")
    return errors


if __name__ == "__main__":
    main()
