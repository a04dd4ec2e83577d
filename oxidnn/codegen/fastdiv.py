"""Division of unsigned 32-bit integers by an invariant, as one high multiplication and a shift.

Source: Granlund and Montgomery, "Division by invariant integers using multiplication", PLDI 1994 (round-up method), in the
form that needs no 33rd bit when the dividend stays below 2^31.
"""

from __future__ import annotations


def magic(divisor: int) -> tuple[int, int]:
    """(multiplier, shift) with n // divisor == (n * multiplier >> 32) >> shift for every 0 <= n < 2^31, divisor in [1, 2^31).

    A divisor of 1 has the multiplier 0, which kernels read as "leave n as it is" (2^32 does not fit a register).
    """
    if not 1 <= divisor < 2**31:
        raise ValueError(f"fastdiv: divisor {divisor} is outside [1, 2^31).")
    if divisor == 1:
        return 0, 0
    shift = (divisor - 1).bit_length() - 1  # floor(log2(divisor - 1)): 2^shift < divisor <= 2^(shift + 1)
    multiplier = -(-(1 << (32 + shift)) // divisor)
    return multiplier, shift
