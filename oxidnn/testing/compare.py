"""The tolerance law: a result may err at most twice as much as the plain same-type computation, plus an ulp floor.

The plain computation's error is either measured (a `baseline` array computed in the storage types) or bounded: a sum of K products in
an accumulator of precision eps_acc errs by at most about eps_acc * sum |a_k b_k| * sqrt(K) for random signs; the result is then rounded
once to the storage type.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import DType
from ..errors import NumericsError


@dataclass(frozen=True, slots=True)
class Tolerance:
    """|got - want| <= absolute + relative * |want| + accumulated * magnitude + slack, elementwise.

    magnitude: what the reference reports as the sum of absolute terms behind each element (an array like `want`), or None.
    slack: what it states for roundings of intermediate values, likewise.
    """

    relative: float
    absolute: float = 0.0
    accumulated: float = 0.0
    why: str = ""


def accumulated_error(accumulator: DType, terms: int) -> float:
    """What a sum of `terms` products may err, as a part of the sum of their magnitudes; 0 of no terms."""
    return 2 * accumulator.epsilon * terms**0.5


def tolerance_for(out: DType, *, accumulate: DType | None = None, terms: int = 1, approximate: float = 0.0) -> Tolerance:
    """The law for an output type, an accumulator type, the number of summed terms, and the relative error of approximate functions.

    Integers are exact. For floats: one rounding of the result (eps/2) doubled, plus an accumulated error 2 * eps_acc * sqrt(terms) of
    the sum of magnitudes (tensor cores truncate, hence terms/2 where that is larger is still below it for terms <= 2^12).
    """
    if not out.is_float:
        return Tolerance(0.0, why=f"{out} is exact")
    acc = accumulate or out
    return Tolerance(out.epsilon + 2 * approximate, max(out.smallest, acc.smallest), accumulated_error(acc, terms),
                     f"{out}: eps + 2*approx({approximate:.1e}) of |want|, 2*{acc}.eps*sqrt({terms}) of the magnitude")


def check_close(got: np.ndarray, want: np.ndarray, tolerance: Tolerance, *, magnitude: np.ndarray | None = None,
                slack: np.ndarray | None = None, name: str = "output") -> float:
    """Raises NumericsError naming the worst coordinate unless `got` agrees with `want`; returns the worst error over tolerance.

    NaN agrees with NaN and infinities with themselves; everything else must be finite.
    """
    if got.shape != want.shape:
        raise NumericsError(f"{name}: shape {got.shape}, expected {want.shape}.")
    if got.size == 0:
        return 0.0
    if want.dtype.kind in "iub":
        wrong = got != want
        if wrong.any():
            at = tuple(int(i) for i in np.argwhere(wrong)[0])
            raise NumericsError(f"{name}{list(at)}: got {got[at]}, expected exactly {want[at]} ({int(wrong.sum())} of {got.size} differ).")
        return 0.0
    g, w = got.astype(np.float64), want.astype(np.float64)
    size = np.abs(w) if magnitude is None else np.abs(magnitude)
    with np.errstate(invalid="ignore"):
        allowed = tolerance.absolute + tolerance.relative * np.abs(w) + tolerance.accumulated * size + (0.0 if slack is None else slack)
        same = (g == w) | (np.isnan(g) & np.isnan(w))
        error = np.where(same, 0.0, np.abs(g - w))
    ratio = np.where(np.isfinite(error), error / np.where(np.isfinite(allowed), allowed, 1.0), np.inf)
    worst = int(np.argmax(np.nan_to_num(ratio, nan=np.inf)))
    if not ratio.flat[worst] <= 1.0:
        at = tuple(int(i) for i in np.unravel_index(worst, got.shape))
        raise NumericsError(
            f"{name}{list(at)}: got {g[at]!r}, expected {w[at]!r}, error {error[at]:.3e} is {ratio[at]:.2f} times the allowed "
            f"{allowed[at]:.3e} "
            f"({tolerance.why}); {int((~(ratio <= 1.0)).sum())} of {got.size} elements are outside.")
    return float(ratio.flat[worst])
