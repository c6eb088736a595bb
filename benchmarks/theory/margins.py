"""How decided an ensemble is: expected margins, the high-margin curve, agreement with a reference hypothesis, figures.

On private votes all of it is PRIVATE.
"""

from __future__ import annotations

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pate_torch.core import checks
from pate_torch.planning.diagnosis import compute_margin_curve
from pate_torch.privacy.sensitive import Votes

Floats = NDArray[np.float64]


def share_of_ones(votes: Votes) -> Floats:
    """PRIVATE for private votes. The fraction of teachers that say 1, float64 [Q]; binary votes only."""
    if votes.num_classes != 2:
        raise checks.error(
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


_INK, _ACCENT = "#1f4e79", "#c55a11"


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def margin_distribution(votes: Votes, reference_Q: NDArray[np.bool_], bins: int = 25) -> Figure:
    """Draw LZCW21's Figure 3: the distributions of the expected margin and of the agreement with h*, and nu(xi).

    Args:
        votes: Binary.
        reference_Q: Labels of h* (a model trained on everything), bool [Q].
        bins: Number of bins of the histograms.
    """
    share = share_of_ones(votes)
    margin, agreement = expected_margin(share), -disagreement_margin(share, reference_Q)
    figure, axes = _axes(f"Margins of {votes.num_teachers} teachers", "margin", "fraction of queries")
    edges = np.linspace(-0.5, 0.5, 2 * bins + 1).tolist()
    weight = np.full(len(margin), 1 / len(margin))
    axes.hist(agreement, edges, weights=weight, color=_ACCENT, alpha=0.45, label=r"$1/2 - P[h(x) \neq h^*(x)]$")
    axes.hist(margin, edges, weights=weight, histtype="step", color=_INK, label=r"$\Delta(x) = |E[h(x)] - 1/2|$")
    xi = np.linspace(0, 0.5, 251)
    right = axes.twinx()
    right.plot(
        xi, compute_margin_curve(votes, xi), color="black", linewidth=1, label=r"$\nu(\xi) = P[\Delta \leq \xi]$"
    )
    right.set_ylabel(r"$\nu(\xi)$")
    right.set_ylim(0, 1)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    axes.legend(handles, [str(h.get_label()) for h in handles], loc="upper left", frameon=False)
    return figure


def margin_correlation(votes: Votes, reference_Q: NDArray[np.bool_], queries: int = 200) -> Figure:
    """Draw LZCW21's Figure 4: running sums of Delta(x) and of 1/2 - P[h(x) != h*(x)] over the first queries.

    A straight diagonal means that where the teachers agree they agree on h*; every query on which their majority is
    against h* bends it down by twice its margin.
    """
    share = share_of_ones(votes)[:queries]
    margin = np.cumsum(expected_margin(share))
    agreement = np.cumsum(-disagreement_margin(share, np.asarray(reference_Q)[:queries]))
    title = f"Slope {agreement[-1] / margin[-1]:.3f} over {len(share)} queries"
    figure, axes = _axes(title, r"cumulated $\Delta(x)$", r"cumulated $1/2 - P[h(x) \neq h^*(x)]$")
    axes.plot([0, margin[-1]], [0, margin[-1]], color="black", linewidth=0.8, linestyle=":", label="perfect agreement")
    axes.plot(margin, agreement, color=_INK, label="teachers")
    axes.legend(loc="upper left", frameon=False)
    return figure
