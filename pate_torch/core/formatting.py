"""Formatting of epsilon, delta and noise scales for people, rounded up where digits are dropped."""

from __future__ import annotations

import math
from decimal import ROUND_CEILING, Context, Decimal

import numpy as np

from pate_torch.core import checks

_WIDE_CONTEXT = Context(prec=400)  # more digits than the largest float has before the point


def format_epsilon(epsilon: float) -> str:
    """Format epsilon with three decimals, or three significant digits below 0.1, rounded up."""
    if epsilon == math.inf:
        return "infinite"
    checks.non_negative("epsilon", epsilon)
    exact_value = Decimal(repr(float(epsilon)))  # 2.2, where Decimal(2.2) is 2.2000000000000002 and would round up
    decimals = 3 if epsilon >= 0.1 or epsilon == 0 else 2 - exact_value.adjusted()
    return str(exact_value.quantize(Decimal(1).scaleb(-decimals), rounding=ROUND_CEILING, context=_WIDE_CONTEXT))


def format_delta(delta: float) -> str:
    """Format delta with all its digits: 1e-05 becomes '1e-5'."""
    return np.format_float_scientific(delta, trim="-", exp_digits=1)


def format_noise_scale(sigma: float) -> str:
    """Format sigma with four significant digits, rounded up, so that the formatted value costs no more than sigma."""
    checks.positive("sigma", sigma)
    exact_value = Decimal(repr(float(sigma)))
    return f"{float(exact_value.quantize(Decimal(1).scaleb(exact_value.adjusted() - 3), rounding=ROUND_CEILING)):g}"
