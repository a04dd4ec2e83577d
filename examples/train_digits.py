"""Trains a small CNN on the 1,797 handwritten 8x8 digits that scikit-learn ships, with nothing but NumPy and oxidnn.

    python examples/train_digits.py                       # the GPU if there is one, else the CPU emulator
    python examples/train_digits.py --device emu:sm_90a --epochs 12

conv 3x3 (8) - relu - max pool - conv 3x3 (16) - relu - max pool - linear (10), cross-entropy, SGD with momentum; forward and backward are
written out against the handle. Prints the test accuracy and draws the loss curve (digits.png) when matplotlib is there.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

import numpy as np
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

import oxidnn
from oxidnn import expr

# v' = momentum * v + g;  w' = w - rate * v'
_velocity = expr.scalar("momentum") * expr.arg("v") + expr.arg("g")
MOMENTUM_SGD = expr.outputs(expr.arg("w") - expr.scalar("rate") * _velocity, _velocity)


def load_digits(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(train x, train labels, test x, test labels): images as (N, 1, 8, 8) in [0, 1], a shuffled split of 1,437 and 360."""
    from sklearn.datasets import load_digits as load

    data = load()
    order = np.random.default_rng(seed).permutation(len(data.target))
    x = (data.images[order, None] / 16).astype(np.float32)
    t = data.target[order].astype(np.int64)
    return x[:1437], t[:1437], x[1437:], t[1437:]


class Net:
    """The parameters with their velocities, and the two passes over them."""

    def __init__(self, h: oxidnn.DnnHandle, seed: int = 0) -> None:
        self.h = h
        rng = np.random.default_rng(seed)

        def weights(*shape: int) -> oxidnn.DeviceArray:  # He initialisation
            return h.array((rng.standard_normal(shape) * np.sqrt(2 / np.prod(shape[1:]))).astype(np.float32))

        self.params = {
            "w1": weights(8, 1, 3, 3), "b1": h.zeros((8,)),
            "w2": weights(16, 8, 3, 3), "b2": h.zeros((16,)),
            "w3": weights(10, 64), "b3": h.zeros((10,)),
        }
        self.velocities = {name: h.zeros(p.shape) for name, p in self.params.items()}

    def forward(self, x: oxidnn.DeviceArray) -> dict[str, oxidnn.DeviceArray]:
        """All activations, by name; "logits" is the last."""
        h, p = self.h, self.params
        a: dict[str, oxidnn.DeviceArray] = {"x": x}
        a["a1"] = h.conv(x, p["w1"], p["b1"], padding=1, epilogue="bias_relu")
        a["p1"], a["i1"] = h.max_pool(a["a1"], 2, return_indices=True)
        a["a2"] = h.conv(a["p1"], p["w2"], p["b2"], padding=1, epilogue="bias_relu")
        a["p2"], a["i2"] = h.max_pool(a["a2"], 2, return_indices=True)
        a["flat"] = a["p2"].reshape((x.shape[0], 64))
        a["logits"] = h.gemm(a["flat"], p["w3"], p["b3"], transpose_b=True)
        return a

    def backward(self, a: dict[str, oxidnn.DeviceArray], target: oxidnn.DeviceArray) -> dict[str, oxidnn.DeviceArray]:
        """The gradient of the mean cross-entropy with respect to every parameter."""
        h, p = self.h, self.params
        g: dict[str, oxidnn.DeviceArray] = {}
        d_logits = h.cross_entropy_backward(a["logits"], target)
        g["w3"] = h.gemm(d_logits, a["flat"], transpose_a=True)
        g["b3"] = h.reduce(d_logits, "sum", 0)
        d = h.gemm(d_logits, p["w3"]).reshape(a["p2"].shape)
        d = h.max_pool_backward(d, a["i2"], a["a2"].shape, 2)
        d = h.activation_backward(d, a["a2"], "relu")  # relu'(a) of the output equals relu' of the input
        g["w2"], g["b2"] = h.conv_wgrad(a["p1"], d, p["w2"].shape, padding=1), h.conv_bgrad(d)
        d = h.conv_dgrad(d, p["w2"], a["p1"].shape, padding=1)
        d = h.max_pool_backward(d, a["i1"], a["a1"].shape, 2)
        d = h.activation_backward(d, a["a1"], "relu")
        g["w1"], g["b1"] = h.conv_wgrad(a["x"], d, p["w1"].shape, padding=1), h.conv_bgrad(d)
        return g

    def step(self, x: np.ndarray, labels: np.ndarray, rate: float, momentum: float = 0.9) -> float:
        """One step of SGD; returns the loss before it."""
        h = self.h
        target = h.array(labels)
        a = self.forward(h.array(x))
        loss = h.cross_entropy(a["logits"], target)
        for name, gradient in self.backward(a, target).items():
            w, v = self.params[name], self.velocities[name]
            tensors = {"w": w, "v": v, "g": gradient}
            h.pointwise(MOMENTUM_SGD, *(tensors[n] for n in MOMENTUM_SGD.args), rate=rate, momentum=momentum, out=(w, v))
        return float(loss.numpy())

    def accuracy(self, x: np.ndarray, labels: np.ndarray) -> float:
        logits = self.forward(self.h.array(x))["logits"].numpy()
        return float((logits.argmax(axis=1) == labels).mean())


def draw(losses: list[float], path: Path) -> None:
    try:
        import matplotlib
    except ImportError:
        print("matplotlib is not installed: no loss curve")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(losses, linewidth=0.8)
    axes.set(xlabel="step", ylabel="cross-entropy", yscale="log", title="Digits, trained through generated PTX")
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"loss curve: {path}")


def main(argv: list[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", help="cuda:N or emu:sm_XY (default: the GPU if there is one, else the emulator)")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rate", type=float, default=0.05)
    parser.add_argument("--steps", type=int, help="stop after so many steps")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"))
    parser.add_argument("--json", type=Path, help="write losses and accuracy here")
    args = parser.parse_args(argv)

    h = oxidnn.DnnHandle(args.device)
    train_x, train_t, test_x, test_t = load_digits()
    net = Net(h)
    rng = np.random.default_rng(1)
    losses: list[float] = []
    per_epoch = len(train_x) // args.batch
    total = min(args.epochs * per_epoch, args.steps or sys.maxsize)
    started = time.perf_counter()
    columns = (TextColumn("[bold]{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"), TimeRemainingColumn())
    with Progress(*columns, disable=not sys.stdout.isatty()) as progress:
        task = progress.add_task("training", total=total)
        while len(losses) < total:
            order = rng.permutation(len(train_x))
            for start in range(0, per_epoch * args.batch, args.batch):
                if len(losses) == total:
                    break
                batch = order[start : start + args.batch]
                rate = args.rate * (1 - 0.9 * len(losses) / total)  # linear decay to a tenth
                losses.append(net.step(train_x[batch], train_t[batch], rate))
                speed = len(losses) * args.batch / (time.perf_counter() - started)
                progress.update(task, advance=1, description=f"loss {losses[-1]:.3f}  {speed:.0f} images/s")
            if progress.disable:
                print(f"step {len(losses)}/{total}  loss {losses[-1]:.4f}  {speed:.0f} images/s", flush=True)
    seconds = time.perf_counter() - started
    accuracy = net.accuracy(test_x, test_t)
    speed = total * args.batch / seconds
    print(f"{h.device} ({h.info.name}): {total} steps in {seconds:.1f} s, {speed:.0f} images/s; test accuracy {accuracy:.2%}")
    if args.json:
        args.json.write_text(json.dumps({"device": h.info.name, "losses": losses, "accuracy": accuracy, "seconds": seconds}))
    draw(losses, args.plot)
    return accuracy


if __name__ == "__main__":
    sys.exit(0 if main() >= 0.96 else 1)
