"""Data-dependent costs: how fast, against plain loops over queries timed in the same run.

    python benchmarks/accounting.py --json

250 teachers, 10 classes, 100 orders, GNMax with sigma 40. Loops run on the first few queries and are scaled to all of
them (column ``loop_queries``). Drawing the votes is not timed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from scipy.special import log_ndtr, logsumexp

from pate_torch.accounting import data_dependent
from pate_torch.accounting.prices import GaussianNoisyMaxPrice
from pate_torch.core.rng import make_numpy_generator

TEACHERS, CLASSES, SIGMA = 250, 10, 40.0
ORDERS = 1 + np.geomspace(0.05, 200, 100)


def realistic_votes(queries: int, seed: int, center: float = 3.0) -> np.ndarray:
    """Queries of varying difficulty: the share of teachers who are right is a logistic-normal of this center.

    3.0: right 88 % of the time on average, in the median 95 %. 1.0: right 66 %, so that rows hardly ever repeat.
    Errors favor few classes.
    """
    rng = make_numpy_generator(seed, "benchmark", "votes", queries)
    right = 1 / (1 + np.exp(-rng.normal(center, 1.8, queries)))
    errors = rng.dirichlet(np.full(CLASSES - 1, 0.3), queries)
    votes = rng.multinomial(TEACHERS, np.concatenate([right[:, None], (1 - right[:, None]) * errors], axis=1))
    return rng.permuted(votes, axis=1)


# ---- the loops: the same numbers, written plainly, vectorized over orders alone --------------------------------------


def loop_theorem(votes: np.ndarray) -> np.ndarray:
    total = np.zeros(len(ORDERS))
    for row in votes:
        top = row.argmax()
        log_q = logsumexp(log_ndtr(-(row[top] - np.delete(row, top)) / (math.sqrt(2) * SIGMA)))
        log_q = min(log_q, math.log(1 - 1 / len(row)))
        independent = ORDERS / SIGMA**2
        mu2 = SIGMA * math.sqrt(-log_q)
        mu1, e1, e2 = mu2 + 1, (mu2 + 1) / SIGMA**2, mu2 / SIGMA**2
        if mu2 > 1 and log_q <= (mu2 - 1) * e2 - mu2 * math.log(mu1 / (mu1 - 1) * mu2 / (mu2 - 1)):
            log_1q = math.log1p(-math.exp(log_q))
            log_a = log_1q - math.log1p(-math.exp((log_q + e2) * (1 - 1 / mu2)))
            log_b = e1 - log_q / (mu1 - 1)
            moment = np.logaddexp(log_1q + (ORDERS - 1) * log_a, log_q + (ORDERS - 1) * log_b)
            total += np.where(mu1 >= ORDERS, np.minimum(moment / (ORDERS - 1), independent), independent)
        else:
            total += independent
    return total


# ---- timing ----------------------------------------------------------------------------------------------------------


def timed(function: Callable[[], Any], repeats: int) -> tuple[float, Any]:
    """Best of some runs, in seconds, and the value."""
    best, value = math.inf, None
    for _ in range(repeats):
        start = time.perf_counter()
        value = function()
        best = min(best, time.perf_counter() - start)
    return best, value


def row(name: str, queries: int, unique: int, seconds: float, loop_queries: int, loop_seconds: float) -> dict[str, Any]:
    scaled = loop_seconds * queries / loop_queries if loop_queries else math.nan
    return {
        "what": name,
        "queries": queries,
        "unique_rows": unique,
        "seconds": seconds,
        "loop_queries": loop_queries,
        "loop_seconds_scaled": scaled if loop_queries else None,
        "ratio": scaled / seconds if loop_queries else None,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--large", type=int, default=1_000_000, help="queries of the largest theorem run")
    args = parser.parse_args()

    model, rows = GaussianNoisyMaxPrice(sigma=SIGMA), []
    votes = realistic_votes(10_000, args.seed)
    data_dependent.compute_rdp(model, votes[:100], ORDERS)

    for name, some in (("", votes), (", hard", realistic_votes(10_000, args.seed, center=1.0))):
        loop_s, loop_value = timed(lambda some=some: loop_theorem(some), 2)
        seconds, value = timed(lambda some=some: data_dependent.compute_rdp(model, some, ORDERS), 7)
        np.testing.assert_allclose(value, loop_value, rtol=1e-9)
        rows.append(row(f"theorem{name}", len(some), len(data_dependent.group_votes(some)), seconds, len(some), loop_s))
        if not name:
            large = realistic_votes(args.large, args.seed)
            seconds, _ = timed(lambda large=large: data_dependent.compute_rdp(model, large, ORDERS), 1)
            rows.append(row("theorem", len(large), len(data_dependent.group_votes(large)), seconds, len(some), loop_s))

    if args.json:
        print(json.dumps({"teachers": TEACHERS, "classes": CLASSES, "orders": len(ORDERS), "rows": rows}, indent=1))
        return
    print(f"{'':36}{'queries':>9}{'unique':>9}{'seconds':>10}{'loop':>10}{'ratio':>8}")
    for r in rows:
        loop = f"{r['loop_seconds_scaled']:10.2f}{r['ratio']:8.0f}" if r["ratio"] else ""
        print(f"{r['what']:36}{r['queries']:>9}{r['unique_rows']:>9}{r['seconds']:10.4f}{loop}")


if __name__ == "__main__":
    main()
