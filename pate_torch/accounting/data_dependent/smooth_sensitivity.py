"""Local and smooth sensitivity of the data-dependent price: how fast it changes with the votes.

Between neighboring data sets a vote may move in every query at once, so sensitivities at equal distance add up.
Everything computed from votes here is PRIVATE.

Source: PATE 2018 (arXiv 1802.08908), appendix B; the bound on one query is in ``price_of_q.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pate_torch.accounting.data_dependent import vote_rows
from pate_torch.accounting.data_dependent.query_price import PriceOfQ, PriceOfTop, price_parts
from pate_torch.accounting.data_dependent.vote_rows import Array, VoteRows
from pate_torch.accounting.outcomes import OutcomeModel
from pate_torch.core import checks

_CHUNK_FLOATS = 2**18  # of the largest temporary, rows times distances times orders


def usable_orders(model: OutcomeModel, orders: ArrayLike, *, num_teachers: int, num_classes: int) -> NDArray[np.bool_]:
    """Orders at which the bound on local sensitivity is proved, [A]; from public quantities only."""
    of_q, _ = price_parts(model, vote_rows.validated_orders(orders), num_teachers, num_classes)
    return of_q.conditions_A()


def published_price(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike) -> Array:
    """The price whose sensitivity is bounded here, all queries together, [A]: ``theorem_rdp`` or a little above it."""
    grouped, parts = _checked(model, votes, orders)
    total_A = np.zeros(np.size(orders))
    for part in parts:
        total_A += grouped.count_U @ part.price(grouped.rows_UC)
    return total_A


def local_sensitivity(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike) -> Array:
    """Bound on the local sensitivity of ``published_price`` within d = 0..K moves in every query at once, [D, A].

    Raises:
        ValueError: A model without one, malformed votes, or an order at which the conditions fail: use the
            data-independent price there.
    """
    grouped, parts = _checked(model, votes, orders)
    total_DA = np.zeros((grouped.num_teachers + 1, np.size(orders)))
    chunk = max(1, _CHUNK_FLOATS // total_DA.size)
    for part in parts:
        for start in range(0, len(grouped), chunk):
            rows = slice(start, start + chunk)
            bound_UDA = part.local_sensitivity(grouped.rows_UC[rows])
            total_DA += np.tensordot(grouped.count_U[rows].astype(np.float64), bound_UDA, 1)
    assert np.isfinite(total_DA).all()
    return np.maximum.accumulate(total_DA, axis=0)


def smooth_sensitivity(local_DA: ArrayLike, decay: float) -> Array:
    """Smooth sensitivity max_d e^{-decay d} LS(d), [A].

    It changes by a factor of at most e^{decay} between neighboring data sets.
    """
    checks.positive("decay", decay)
    bound_DA = np.asarray(local_DA, dtype=np.float64)
    return (np.exp(-decay * np.arange(len(bound_DA)))[:, None] * bound_DA).max(0)


def _checked(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike) -> tuple[VoteRows, list[PriceOfQ | PriceOfTop]]:
    grouped, orders_A = vote_rows.group(votes), vote_rows.validated_orders(orders)
    of_q, others = price_parts(model, orders_A, grouped.num_teachers, grouped.num_classes)
    holds_A = of_q.conditions_A()
    if not holds_A.all():
        raise checks.fail(
            "orders",
            orders_A[~holds_A].tolist(),
            "the bound on local sensitivity is not proved at these orders",
            "Leave them out, or use the data-independent price.",
        )
    return grouped, [of_q, *others]
