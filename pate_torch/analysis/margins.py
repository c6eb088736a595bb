"""How decided an ensemble is: expected margins, the high-margin curve, and agreement with a reference hypothesis."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from pate_torch.core import checks
from pate_torch.sensitive import Votes

Floats = NDArray[np.float64]


def share_of_ones(votes: Votes) -> Floats:
    """PRIVATE for private votes. The fraction of teachers that say 1, float64 [Q]; binary votes only."""
    if votes.num_classes != 2:
        raise checks.fail(
            "votes.num_classes", votes.num_classes, "must be 2: these margins are defined for two classes"
        )
    return votes.counts_QC[:, 1].to(torch.float64).cpu().numpy() / votes.num_teachers


def expected_margin(share_Q: Floats) -> Floats:
    """Plug-in estimate |share - 1/2| of Delta_{n/K}(x) = |E[h(x)] - 1/2|, in [0, 1/2], float64 [Q].

    Biased upwards by at most 1/(2 sqrt K) where the teachers are undecided.

    Source: LZCW21 equation (4).
    """
    share = np.asarray(share_Q, dtype=np.float64)
    if not ((share >= 0) & (share <= 1)).all():
        raise ValueError("share_Q: must be fractions of teachers, in [0, 1]")
    return np.abs(share - 0.5)


def disagreement_margin(share_Q: Floats, reference_Q: NDArray[np.bool_]) -> Floats:
    """Signed margin E[1[h(x) != h*(x)]] - 1/2 over the teachers, float64 [Q].

    In [-1/2, 1/2]: -1/2 where all agree with h*. Signed on purpose: for two classes its absolute value *is* the
    expected margin, whatever h* may be.

    Source: LZCW21 appendix E.
    """
    share = np.asarray(share_Q, dtype=np.float64)
    return np.where(np.asarray(reference_Q, dtype=bool), 1 - share, share) - 0.5


def high_margin_curve(margin_Q: Floats, xi_X: Floats) -> Floats:
    """Fraction nu(xi) of points with margin at most xi, float64 [X]: the problem is (nu(xi), xi)-high-margin.

    Source: LZCW21 Definition 17, which prints P[Delta > xi] <= nu for P[Delta <= xi] <= nu.
    """
    return np.searchsorted(np.sort(margin_Q), np.asarray(xi_X), side="right") / len(margin_Q)
