"""Keys and values that no query sees are NaN: engines of tensor cores must not let them in."""

from __future__ import annotations

import numpy as np

from oxidnn.engines.base import Engine, EngineConfig
from oxidnn.ops.case import parse_case
from oxidnn.runtime.emu_backend import EmulatedBackend
from oxidnn.testing.data import random_inputs
from oxidnn.testing.harness import compare, exact, execute
from oxidnn.testing.reference import REFERENCES

UNSEEN = ("lengths_kv=s32[2]", "causal=top_left", "window=(30,10)", "lengths_q=s32[2] lengths_kv=s32[2] causal=bottom_right")


def check_unseen(backend: EmulatedBackend, engine: Engine, config: EngineConfig, qkv: str, more: str) -> None:
    """qkv: two batches of 70 queries and 200 keys; more: of UNSEEN."""
    problem = parse_case(f"attention {qkv} {more} return_lse=True")
    inputs = random_inputs(problem, np.random.default_rng(3))
    lengths, keys = inputs.get("lengths_q", np.array([70, 70])), inputs.get("lengths_kv", np.array([200, 200]))
    for b in range(2):
        shift = 0 if "top_left" in more else keys[b] - lengths[b]
        i, j = np.arange(lengths[b])[:, None] + shift, np.arange(200)[None]
        seen = (j < keys[b]) & (i >= i.min(initial=0))
        if "causal" in more:
            seen &= j <= i
        if "window" in more:
            seen &= (j <= i + 10) & (j >= i - 30)
        assert not seen.all()
        for name in ("k", "v"):
            inputs[name][b][:, ~seen.any(0)] = np.array(np.nan).astype(inputs[name].dtype)
    with np.errstate(invalid="ignore"):
        want = REFERENCES["attention"](problem, exact(problem, inputs), {})
    got = execute(backend, problem, engine, config, inputs)
    assert np.isfinite(got["out"].astype(np.float32)).all()
    compare(problem, got, want)
