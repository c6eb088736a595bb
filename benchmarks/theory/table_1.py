"""Table 1 of LZCW21 in numbers."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.theory import sample_sizes


def lzcw21_table_1(
    n: int, m: int, d: int, *, epsilon: float, delta: float, tau: float, theta: float, best: float
) -> list[tuple[str, str, float, int]]:
    """(setting, algorithm, excess error, queries) of LZCW21 Table 1, queries chosen as the table has it.

    Bounds of the theorems as ``sample_sizes`` has them, their logarithms of delta kept, what hides in O(.) taken as 1;
    the smallest over the number of public points that are labeled, up to m. Above 1 a bound says nothing.

    Args:
        n: Private records.
        m: Public points.
        d: VC dimension.
        epsilon: Of the whole release.
        delta: Of the whole release.
        tau: Of Tsybakov's noise condition; 1 where there is no noise.
        theta: Disagreement coefficient.
        best: Error of the best hypothesis, where the setting is agnostic.
    """
    given = {"epsilon": epsilon}

    def rows(tau: float, setting: str) -> list[tuple[str, str, float, int]]:
        bounds: dict[str, Callable[[int], float]] = {
            "Gaussian": lambda q: sample_sizes.lzcw21_theorem_28_error(q, d, n, **given, tau=tau),
            "sparse vector": lambda q: sample_sizes.lzcw21_theorem_10(q, d, n, **given, tau=tau)[1],
            "active": lambda q: sample_sizes.lzcw21_theorem_22_error(
                q, d, n, **given, delta=delta, theta=theta, tau=tau
            ),
        }
        return [(setting, name, *_smallest(bound, m)) for name, bound in bounds.items()]

    before = {
        "realizable": lambda q: sample_sizes.lzcw21_theorem_5(q, d, n, **given, delta=delta),
        "agnostic": lambda q: sample_sizes.lzcw21_theorem_5(q, d, n, **given, delta=delta, best=best),
    }
    found = [*rows(1.0, "realizable"), ("realizable", "sparse vector (BTT18)", *_smallest(before["realizable"], m))]
    found += rows(tau, f"noise, tau = {tau:g}")
    return [*found, (f"agnostic, best {best:g}", "sparse vector (BTT18)", *_smallest(before["agnostic"], m))]


def _smallest(bound: Callable[[int], float], most: int) -> tuple[float, int]:
    """The least value over 1..most (the bounds fall and then rise), and where."""
    sizes = sorted({max(1, round(most ** (i / 400))) for i in range(401)})
    return min((bound(q), q) for q in sizes)
