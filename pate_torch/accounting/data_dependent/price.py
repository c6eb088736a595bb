"""The data-dependent price of a release, by one name for every outcome model. PRIVATE: for the data's owner only."""

from __future__ import annotations

from typing import Literal

from numpy.typing import ArrayLike

from pate_torch.accounting.data_dependent import exact, theorems, vote_rows
from pate_torch.accounting.data_dependent.exact import Direction
from pate_torch.accounting.data_dependent.vote_rows import Array
from pate_torch.accounting.outcomes import OutcomeModel
from pate_torch.core import checks

Method = Literal["theorem", "exact"]
METHODS = ("theorem", "exact")


def price(
    model: OutcomeModel | None,
    votes: ArrayLike,
    orders: ArrayLike,
    *,
    adaptive: bool,
    method: Method = "exact",
    direction: Direction = "two_sided",
) -> Array:
    """Upper bound on the Renyi divergence at this data set's votes, all queries together, float64 [A].

    Args:
        model: Law of one query's answer; None: the mechanism has none.
        votes: Integers [Q, C].
        orders: [A], each above 1.
        adaptive: Whether any question, or when to stop, depended on earlier answers; then prices do not add up (each
            later query's votes are a function of the noise), so it is refused.
        method: "theorem" (PATE 2017/2018, forward only) or "exact".
        direction: "forward" or "two_sided".

    Raises:
        ValueError: A mechanism without a law of its answers, adaptive questions, a two-sided theorem, and malformed
            votes or orders.
    """
    if model is None:
        raise checks.fail(
            "model",
            model,
            "this mechanism's answers have no law given the votes alone",
            "Use its data-independent price.",
        )
    if checks.boolean("adaptive", adaptive):
        raise checks.fail(
            "adaptive",
            adaptive,
            "data-dependent prices add up only for questions fixed beforehand",
            "Use the data-independent price, or ask passively and without early stopping.",
        )
    checks.one_of("method", method, METHODS)
    checks.one_of("direction", direction, exact.DIRECTIONS)
    if method == "exact":
        return exact.exact_rdp(model, votes, orders, direction).upper
    if direction != "forward":
        raise checks.fail(
            "direction", direction, "the published theorems bound the forward divergence only", "Use method=exact."
        )
    return theorems.theorem_rdp(model, votes, vote_rows.validated_orders(orders))
