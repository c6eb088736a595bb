"""DF20 Theorem 2 in numbers: what one prediction of the private predictor costs, and how many records it takes.

Nothing runs the private predictor: Corollary 1 (``run_private_prediction``) needs 10 to 10,000 times fewer records at
excess errors from 0.3 down to 1e-4.
"""

from __future__ import annotations

import math

from benchmarks.theory.agnostic import compute_realizable_size
from pate_torch.core import checks
from pate_torch.hypotheses.sample import compute_net_size, compute_uniform_size, find_smallest


def compute_predictor_epsilon(n: int, subset_size: int, eta: float, constants: str = "paper") -> float:
    """Epsilon of one prediction; requires N_net(eta, alpha) < n' = ``subset_size`` < n.

        ln[ (1 + F n'/(n - n')) e^{3/(eta n)} + n'/n ],   "paper": F = 4 e^6 (needs eta n >= 1)
                                                          "sharp": F = 4 e^{3c}, c = (eta (n - 1) + 1)/(eta n)

    DF20 Lemma 10 bounds eta (n - 1) + 1, the records on which two matched hypotheses differ, by 2 eta n; each of the
    three factors e^2 it makes of that is e^c. As eta n grows F falls from 1614 to 80. n'/n covers subsets that are no
    net: they add alpha n'/n to a probability that the final flip keeps at alpha or above.

    Source: DF20 Lemmas 8, 10 and 11, whose O(epsilon) hides these constants.
    """
    checks.one_of("constants", constants, ("paper", "sharp"))
    checks.integer("subset", subset_size, low=1, high=n - 1)
    if constants == "paper" and eta * n < 1:
        raise checks.error("eta", eta, f"must be at least 1/n = {1 / n:.3g}")
    exponent = 2.0 if constants == "paper" else (eta * (n - 1) + 1) / (eta * n)
    amplification = 4 * math.exp(3 * exponent) * subset_size / (n - subset_size)
    return math.log((1 + amplification) * math.exp(3 / (eta * n)) + subset_size / n)


def compute_default_resolution(vc_dimension: int, alpha: float) -> float:
    """The eta whose 2 eta n ln(1/alpha) teachers get one record more each than ``compute_realizable_size`` asks for."""
    return 1 / (2 * math.log(1 / alpha) * (compute_realizable_size(alpha, alpha, vc_dimension) + 1))


def compute_subset_size(vc_dimension: int, alpha: float) -> int:
    """n': a net at eta is what privacy needs, one at alpha accuracy."""
    return compute_net_size(min(compute_default_resolution(vc_dimension, alpha), alpha), alpha, vc_dimension) + 1


def compute_private_predictor_size(
    vc_dimension: int, *, epsilon: float, alpha: float, beta: float = 0.1, constants: str = "paper"
) -> int:
    """Smallest n for epsilon-private predictions of excess error O(alpha) with probability 1 - beta.

    Source: the conditions of DF20 Lemma 8 with explicit constants, at ``compute_default_resolution``.
    """
    eta, subset_size = compute_default_resolution(vc_dimension, alpha), compute_subset_size(vc_dimension, alpha)
    min_n = max(subset_size + 1, math.ceil(1 / eta), compute_uniform_size(alpha, beta, vc_dimension))
    return find_smallest(lambda n: compute_predictor_epsilon(n, subset_size, eta, constants) <= epsilon, low=min_n)
