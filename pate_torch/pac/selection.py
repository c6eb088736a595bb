"""Private model selection: the best of M models, by their errors on a private validation split."""

from __future__ import annotations

import numpy as np

from pate_torch.core import checks
from pate_torch.noise.source import NoiseSource
from pate_torch.pac.exponential import draw_gumbel_max
from pate_torch.pac.sample import Ints


def draw_model(errors_M: Ints, epsilon: float, noise: NoiseSource, *, adjacency: str, sensitivity: int = 1) -> int:
    """The index of a model with few errors, drawn with noise that has been paid for.

    Args:
        errors_M: Error *counts* on a private validation split no model was trained on, int [M]; not rates, whose
            denominator is private under add/remove.
        epsilon: Price of the choice (bounded range).
        noise: Paid for.
        adjacency: "replace_one" or "add_remove".
        sensitivity: The most validation records one privacy unit may own.

    Guarantee: BoundedRange(epsilon), so epsilon-DP and rho = epsilon^2/8 (never looser than PureDP(epsilon)), under
        either adjacency. Let u_i = -errors_i and P(i) ~ exp(r u_i). Between neighbors ln P(i)/P'(i) =
        r (u_i - u'_i) + constant. Replace-one: each u_i - u'_i lies in [-s, s], so the log-ratios span 2 r s and
        r = epsilon/(2s). Add/remove: all u_i move the same way, u_i - u'_i lies in [0, s] or in [-s, 0], so they
        span r s only and r = epsilon/s: the same price buys twice the rate.
    Source: McSherry & Talwar 2007; bounded range: Durfee & Rogers 2019, Cesar & Rogers 2021.
    """
    checks.positive("epsilon", epsilon)
    checks.integer("sensitivity", sensitivity, low=1)
    checks.one_of("adjacency", adjacency, ("add_remove", "replace_one"))
    errors = np.asarray(errors_M)
    if errors.ndim != 1 or len(errors) == 0:
        raise checks.error("errors_M.shape", errors.shape, "must be one count per model, at least one")
    if not np.issubdtype(errors.dtype, np.integer) or (errors < 0).any():
        raise ValueError("errors_M: must be counts of errors (integers, at least 0), not rates")
    rate = epsilon / sensitivity if adjacency == "add_remove" else epsilon / (2 * sensitivity)
    return draw_gumbel_max(-errors.astype(np.int64), rate, noise)
