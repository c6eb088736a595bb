"""Exact integer noise: the discrete Gaussian and the discrete Laplace (Canonne, Kamath & Steinke 2020).

P(z) is proportional to exp(-z^2 / (2 sigma^2)) or to exp(-|z| / scale) on all integers, for a rational parameter. The
distribution is exact: a draw inverts the distribution function of |z| at a uniform real number in [0, 1), of which 63
bits are drawn first. The lookup table holds a rigorous lower and upper bound of every boundary. If the bits do not
decide between two values, more bits are drawn and a finer table is built. The rejection sampler of the paper has the
same distribution at about 5e4 draws a second, and its time depends on the secret draws. The table gives millions of
draws a second, and its time depends on the parameter alone.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from pate_torch.core import checks

FIRST_BITS = 63  # fits int64 and uint64
_STEP_BITS = 64
_GUARD_BITS = 64  # for rounding in the table: about X^3 units after X entries
MAX_SCALE = 20_000  # votes; a table has some 10 entries per vote (Gaussian) or 45 (Laplace)


def draw_gaussian(shape: tuple[int, ...], sigma: Fraction) -> Tensor:
    """Draw independent discrete Gaussians on the CPU, int64; sigma in votes, used exactly."""
    return _draw_signed(shape, "gaussian", _check_scale("sigma", sigma))


def draw_laplace(shape: tuple[int, ...], scale: Fraction) -> Tensor:
    """Draw independent discrete Laplaces on the CPU, int64; scale in votes, used exactly."""
    return _draw_signed(shape, "laplace", _check_scale("scale", scale))


def _check_scale(name: str, value: Fraction) -> Fraction:
    if not 0 < value <= MAX_SCALE:
        requirement = f"must lie in (0, {MAX_SCALE}] with noise=discrete"
        raise checks.error(name, float(value), requirement, "Use noise=torch for larger noise.")
    return Fraction(value)


@dataclass(frozen=True)
class _CdfTable:
    """Integers low[m] <= 2^bits P(|Z| <= m) <= high[m]. The probability beyond the last entry is below 2^-bits."""

    low: list[int]
    high: list[int]

    def find_magnitude(self, first_bits: int) -> int | None:
        """Return |Z| if the first bits of U are ``first_bits``, or None if these bits do not decide it."""
        upper_rank, lower_rank = bisect_right(self.high, first_bits), bisect_right(self.low, first_bits)
        return upper_rank if upper_rank == lower_rank < len(self.low) else None


def _compute_exp_bounds(exponent: Fraction, precision: int) -> tuple[int, int]:
    """Return integers below and above exp(-exponent) 2^precision.

    The exponential of ``decimal`` is correctly rounded. Four units cover the other rounding errors.
    """
    # The digits of 2^precision, and those that exp loses to the size of the exponent.
    digits = precision * 31 // 100 + 20 + len(str(math.ceil(exponent)))
    context = Context(prec=digits, Emin=-(10**9), Emax=10**9)
    power = context.exp(context.divide(Decimal(-exponent.numerator), Decimal(exponent.denominator)))
    nearest_integer = int(context.multiply(power, Decimal(1 << precision)))
    return max(0, nearest_integer - 4), nearest_integer + 4


@lru_cache(maxsize=64)
def _build_cdf_table(kind: str, scale: Fraction, bits: int) -> _CdfTable:
    """Build the table by interval arithmetic on integers with guard bits; lower ends round down, upper ends up.

    Weights w_0 = 1, w_(m+1) = w_m r_m, with r_m constant (Laplace) or r_(m+1) = r_m exp(-1/sigma^2) (Gaussian).
    """
    precision = bits + _GUARD_BITS
    fixed_point_one = 1 << precision
    ratio = _compute_exp_bounds(1 / (2 * scale**2) if kind == "gaussian" else 1 / scale, precision)
    decay = _compute_exp_bounds(1 / scale**2, precision) if kind == "gaussian" else (fixed_point_one, fixed_point_one)

    def multiply_intervals(left: tuple[int, int], right: tuple[int, int]) -> tuple[int, int]:
        return left[0] * right[0] >> precision, -(-left[1] * right[1] >> precision)

    weight = (fixed_point_one, fixed_point_one)
    sums = [(fixed_point_one, fixed_point_one)]
    while True:
        weight, ratio = multiply_intervals(weight, ratio), multiply_intervals(ratio, decay)
        # The weights left out fall at least as fast as a geometric series of the present ratio.
        tail = -(-2 * weight[1] * fixed_point_one // (fixed_point_one - ratio[1]))
        if tail < 1 << (_GUARD_BITS - 2):
            break
        sums.append((sums[-1][0] + 2 * weight[0], sums[-1][1] + 2 * weight[1]))
    total = (sums[-1][0], sums[-1][1] + tail)
    low = [(part << bits) // total[1] for part, _ in sums]
    high = [-(-(part << bits) // total[0]) for _, part in sums]
    return _CdfTable(low, high)


@lru_cache(maxsize=64)
def _get_cdf_bounds(kind: str, scale: Fraction, bits: int) -> tuple[np.ndarray, np.ndarray]:
    table = _build_cdf_table(kind, scale, bits)
    return np.array(table.low, dtype=np.uint64), np.array(table.high, dtype=np.uint64)


def _draw_until_decided(kind: str, scale: Fraction, first_bits: int, bits: int) -> int:
    """Draw further bits of U until they decide."""
    while True:
        first_bits = first_bits << _STEP_BITS | int.from_bytes(os.urandom(_STEP_BITS // 8), "big")
        bits += _STEP_BITS
        magnitude = _build_cdf_table(kind, scale, bits).find_magnitude(first_bits)
        if magnitude is not None:
            return magnitude


def _draw_signed(shape: tuple[int, ...], kind: str, scale: Fraction, bits: int = FIRST_BITS) -> Tensor:
    """Draw magnitudes by inversion, and fair signs. ``bits`` is the number of bits of the first lookup."""
    size = math.prod(shape)
    random_word = np.frombuffer(os.urandom(8 * size), dtype=np.uint64)
    # The lowest bit is the sign; the others are the first bits of U.
    first_bits = random_word >> np.uint64(64 - bits)
    low, high = _get_cdf_bounds(kind, scale, bits)
    magnitude = np.searchsorted(high, first_bits, side="right").astype(np.int64)
    lower_magnitude = np.searchsorted(low, first_bits, side="right")
    for i in np.flatnonzero((magnitude != lower_magnitude) | (magnitude == len(low))):
        magnitude[i] = _draw_until_decided(kind, scale, int(first_bits[i]), bits)
    sign = 1 - 2 * (random_word & np.uint64(1)).astype(np.int64)
    return torch.from_numpy(sign * magnitude).reshape(shape)
