"""The handle's dropout and random numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..dispatch.session import hashable
from ..errors import expected
from .calls import CALLS, draw_of, shape_of
from .device import OnDevice


class RandomOps(OnDevice):
    """Methods of DnnHandle."""

    def dropout(self, x: Any, p: float = 0.5, *, return_mask: bool = False, seed: int | None = None, offset: int = 0, state: Any = None,
                out: Any = None, stream: Any = None) -> Any:
        """Zeros with chance p, the rest divided by 1 - p; with return_mask also what is kept, as bool.

        seed, offset: integers in [0, 2^64). They and an element's index (in the order of the dimensions) alone say whether it is kept, on
        every device and in every layout and type; `dropout_backward` with the same two draws the mask again. Take another offset for
        each call. state: instead of them an array of two integers of 64 bits (int64 counts as uint64), seed and offset, which a captured
        graph takes as they are at each replay.
        """
        return self._session.run(CALLS["dropout"], (x, state), (p, return_mask), out, stream, draw_of("dropout", seed, offset, state))

    def dropout_backward(self, dy: Any, p: float = 0.5, *, seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None,
                         stream: Any = None) -> Any:
        """dx of `dropout` with the same p, seed and offset."""
        draw = draw_of("dropout_backward", seed, offset, state)
        return self._session.run(CALLS["dropout_backward"], (dy, state), (p,), out, stream, draw)

    def rrelu(self, x: Any, lower: float = 1 / 8, upper: float = 1 / 3, *, seed: int | None = None, offset: int = 0, state: Any = None,
              out: Any = None, stream: Any = None) -> Any:
        """x where it is above 0, else x times a slope drawn from [lower, upper) for each element (PyTorch's, in training; else it is
        `activation` "leaky_relu" of the middle). seed, offset: see `dropout`."""
        return self._session.run(CALLS["rrelu"], (x, state), (lower, upper), out, stream, draw_of("rrelu", seed, offset, state))

    def rrelu_backward(self, dy: Any, x: Any, lower: float = 1 / 8, upper: float = 1 / 3, *, seed: int | None = None, offset: int = 0,
                       state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """dx of `rrelu` with the same seed and offset."""
        draw = draw_of("rrelu_backward", seed, offset, state)
        return self._session.run(CALLS["rrelu_backward"], (dy, x, state), (lower, upper), out, stream, draw)

    def random(self, shape: Sequence[int] | None = None, distribution: str = "uniform", parameters: Sequence[float] | None = None,
               dtype: Any = None, *, seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None,
               stream: Any = None) -> Any:
        """Random numbers: a DeviceArray of `shape` and `dtype` (f32), or `out` filled. seed, offset: see `dropout`.

        distribution, parameters: "uniform" in [low, high), of 24 random bits as all that follow but the two with Box and Muller's numbers,
        "normal" (mean, standard deviation; at most 6.7 of them off) and "log_normal"; "truncated_normal" (mean, deviation, low, high),
        "exponential" (rate), "gumbel", "logistic", "laplace", "cauchy" (location, scale); and counts, of integer types too: "geometric"
        (chance; trials up to the first success), "poisson" (rate), "binomial" (trials, chance).
        """
        draw = draw_of("random", seed, offset, state)
        if out is None:
            if shape is None:
                raise expected("random", "shape", None, "a shape, or out")
            out = self.empty(shape, "float32" if dtype is None else dtype)
        parameters = parameters if parameters is None else hashable(parameters, "random", "parameters")
        attrs = (shape if shape is None else shape_of(shape), distribution, parameters, dtype)
        return self._session.run(CALLS["random"], (state,), attrs, out, stream, draw)

    def uniform(self, shape: Sequence[int] | None = None, low: float = 0.0, high: float = 1.0, *, dtype: Any = None,
                seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Uniform numbers in [low, high): see `random`."""
        return self.random(shape, "uniform", (low, high), dtype, seed=seed, offset=offset, state=state, out=out, stream=stream)

    def normal(self, shape: Sequence[int] | None = None, mean: float = 0.0, std: float = 1.0, *, dtype: Any = None,
               seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None, stream: Any = None) -> Any:
        """Normal numbers: see `random`."""
        return self.random(shape, "normal", (mean, std), dtype, seed=seed, offset=offset, state=state, out=out, stream=stream)

    def cast_stochastic(self, x: Any, dtype: Any, *, saturate: bool = True, seed: int | None = None, offset: int = 0, state: Any = None,
                        out: Any = None, stream: Any = None) -> Any:
        """x as one of the two numbers of `dtype` around each element, the nearer the likelier, so that the mean is x (to 2^-24 of their
        distance); what `dtype` holds stays. dtype: floats of at most 32 bits, integers. What is beyond its largest number, and saturate:
        as of `cast`. seed, offset: see `dropout`."""
        draw = draw_of("cast_stochastic", seed, offset, state)
        return self._session.run(CALLS["cast_stochastic"], (x, state), (dtype, saturate), out, stream, draw)

    def poisson(self, rate: Any, *, dtype: Any = None, seed: int | None = None, offset: int = 0, state: Any = None, out: Any = None,
                stream: Any = None) -> Any:
        """Events at the rate (0 to 700, beyond NaN) that each element says; of its type, or `dtype`. seed, offset: see `dropout`."""
        return self._session.run(CALLS["poisson"], (rate, state), (dtype,), out, stream, draw_of("poisson", seed, offset, state))

    def bernoulli(self, probability: Any, *, dtype: Any = None, seed: int | None = None, offset: int = 0, state: Any = None,
                  out: Any = None, stream: Any = None) -> Any:
        """1 with the chance that each element of `probability` gives, else 0; of its type, or `dtype`. seed, offset: see `dropout`."""
        draw = draw_of("bernoulli", seed, offset, state)
        return self._session.run(CALLS["bernoulli"], (probability, state), (dtype,), out, stream, draw)
