"""Prices as people read them: rounded up, whereas files keep every digit."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np

from pate_torch.core import checks

_WIDE_CONTEXT = Context(prec=400)
"""Every digit of the largest float, and three more."""


def format_epsilon(epsilon: float) -> str:
    """Three decimals, or three digits when small; rounded up, since a guarantee is never rounded down."""
    if epsilon == math.inf:
        return "infinite"
    checks.non_negative("epsilon", epsilon)
    exact_value = Decimal(repr(float(epsilon)))  # the digits people wrote: 2.2 is not 2.2000000000000002
    decimals = 3 if epsilon >= 0.1 or epsilon == 0 else 2 - exact_value.adjusted()
    return str(exact_value.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_CEILING, context=_WIDE_CONTEXT))


def format_delta(delta: float) -> str:
    """Every digit that was given: 1e-05 -> '1e-5'."""
    return np.format_float_scientific(delta, trim="-", exp_digits=1)


def format_noise_scale(sigma: float) -> str:
    """Four digits, rounded up: typed in, it costs no more than the sigma that is meant."""
    checks.positive("sigma", sigma)
    exact_value = Decimal(repr(float(sigma)))
    return f"{float(exact_value.quantize(Decimal(1).scaleb(exact_value.adjusted() - 3), rounding=ROUND_CEILING)):g}"
