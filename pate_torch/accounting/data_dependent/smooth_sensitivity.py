"""Local and smooth sensitivity of the data-dependent price with respect to the votes.

Between neighboring data sets one vote may move in every question, so the sensitivities of all questions at equal
distance add up. All values computed from votes are PRIVATE.

Source: PATE 2018 (arXiv 1802.08908), appendix B; the bound on one query is in ``query_price.py``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from pate_torch.accounting.data_dependent import vote_rows
from pate_torch.accounting.data_dependent.query_price import QueryPrice, ThresholdPrice, make_price_parts
from pate_torch.accounting.data_dependent.vote_rows import Array, VoteRows
from pate_torch.accounting.outcomes import OutcomeModel
from pate_torch.core import checks

_CHUNK_FLOATS = 2**18  # of the largest temporary, rows times distances times orders


def find_usable_orders(
    model: OutcomeModel, orders: ArrayLike, *, num_teachers: int, num_classes: int
) -> NDArray[np.bool_]:
    """Find the orders at which the bound on local sensitivity is proved, bool [A], from public quantities only."""
    query_price, _ = make_price_parts(model, vote_rows.check_orders(orders), num_teachers, num_classes)
    return query_price.find_valid_orders()


def compute_total_price(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike) -> Array:
    """Compute the price of all questions whose sensitivity is bounded here, [A]: at least ``theorems.compute_rdp``."""
    distinct_rows, parts = _check_inputs(model, votes, orders)
    total_A = np.zeros(np.size(orders))
    for part in parts:
        total_A += distinct_rows.count_U @ part.compute_price(distinct_rows.rows_UC)
    return total_A


def compute_local_sensitivity(model: OutcomeModel, votes: ArrayLike, orders: ArrayLike) -> Array:
    """Bound the local sensitivity of ``compute_total_price`` within d = 0..K moved votes in every question, [D, A].

    Raises:
        ValueError: The model has no such bound, the votes are malformed, or the conditions fail at an order.
    """
    distinct_rows, parts = _check_inputs(model, votes, orders)
    total_DA = np.zeros((distinct_rows.num_teachers + 1, np.size(orders)))
    chunk = max(1, _CHUNK_FLOATS // total_DA.size)
    for part in parts:
        for start in range(0, len(distinct_rows), chunk):
            rows = slice(start, start + chunk)
            bound_UDA = part.compute_local_sensitivity(distinct_rows.rows_UC[rows])
            total_DA += np.tensordot(distinct_rows.count_U[rows].astype(np.float64), bound_UDA, 1)
    assert np.isfinite(total_DA).all()
    return np.maximum.accumulate(total_DA, axis=0)


def compute_smooth_sensitivity(local_DA: ArrayLike, decay: float) -> Array:
    """Compute the smooth sensitivity max_d e^{-decay d} LS(d), [A].

    It changes by a factor of at most e^{decay} between neighboring data sets.
    """
    checks.positive("decay", decay)
    bound_DA = np.asarray(local_DA, dtype=np.float64)
    return (np.exp(-decay * np.arange(len(bound_DA)))[:, None] * bound_DA).max(0)


def _check_inputs(
    model: OutcomeModel, votes: ArrayLike, orders: ArrayLike
) -> tuple[VoteRows, list[QueryPrice | ThresholdPrice]]:
    distinct_rows, orders_A = vote_rows.group_votes(votes), vote_rows.check_orders(orders)
    query_price, threshold_prices = make_price_parts(
        model, orders_A, distinct_rows.num_teachers, distinct_rows.num_classes
    )
    is_proved_A = query_price.find_valid_orders()
    if not is_proved_A.all():
        raise checks.error(
            "orders",
            orders_A[~is_proved_A].tolist(),
            "the bound on local sensitivity is not proved at these orders",
            "Leave them out, or use the data-independent price.",
        )
    return distinct_rows, [query_price, *threshold_prices]
