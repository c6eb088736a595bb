"""LZCW21's Figures 3 and 4 from votes; PRIVATE for private votes."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from pate_torch.analysis.margins import disagreement_margin, expected_margin, high_margin_curve, share_of_ones
from pate_torch.sensitive import Votes

_INK, _ACCENT = "#1f4e79", "#c55a11"


def _axes(title: str, x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.2, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    return figure, axes


def margin_distribution(votes: Votes, reference_Q: NDArray[np.bool_], bins: int = 25) -> Figure:
    """Figure 3: the empirical distribution of the expected margin, of the agreement with h*, and the curve nu(xi).

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
    right.plot(xi, high_margin_curve(margin, xi), color="black", linewidth=1, label=r"$\nu(\xi) = P[\Delta \leq \xi]$")
    right.set_ylabel(r"$\nu(\xi)$")
    right.set_ylim(0, 1)
    handles = [*axes.get_legend_handles_labels()[0], *right.get_legend_handles_labels()[0]]
    axes.legend(handles, [str(h.get_label()) for h in handles], loc="upper left", frameon=False)
    return figure


def margin_correlation(votes: Votes, reference_Q: NDArray[np.bool_], queries: int = 200) -> Figure:
    """Figure 4: over the first ``queries`` queries, the running sums of Delta(x) and of 1/2 - P[h(x) != h*(x)].

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
