"""The algorithms by name: from a problem of two classes to a hypothesis of its class, and what that would cost.

Those that answer queries are asked about public points; what is released is the class's empirical risk minimizer on the
answers, which costs no more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pate_torch.accounting.events import DeltaEvent, PrivacyEvent
from pate_torch.learn.problem import Problem
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.pac import baselines, stable
from pate_torch.pac.agnostic import compute_two_thirds_teachers, run_ag_priv_cl, run_sub_samp, run_unv_priv_cl
from pate_torch.pac.boosting import run_high_confidence
from pate_torch.pac.classes import fit_erm
from pate_torch.pac.exponential import run_exponential_mechanism
from pate_torch.pac.logistic import run_logistic_exponential
from pate_torch.pac.nets import compute_realizable_size
from pate_torch.pac.relabeled import run_relabeled_gnmax
from pate_torch.pac.sample import Floats, warn_below_guarantee
from pate_torch.pac.semi_private import run_sspp
from pate_torch.privacy.budget import NoiseProvider
from pate_torch.privacy.records import NO_ANSWER
from pate_torch.privacy.sensitive import Sensitivity


@dataclass(frozen=True)
class Algorithm:
    """One of the papers' algorithms.

    Attributes:
        learn: Learns a hypothesis, paid for by the noise provider.
        description: In words.
        is_linear: Whether the hypothesis is a vector of parameters, and not one of the class.
    """

    learn: Callable[[Problem, NoiseProvider], Any]
    description: str
    is_linear: bool = False


def _select_options(p: Problem, *names: str) -> dict[str, Any]:
    """What was chosen, by the names that the algorithms have for it."""
    return {name: getattr(p.options, name) for name in names}


def _learn_sspp(p: Problem, budget: NoiseProvider) -> Any:
    options = _select_options(p, "epsilon", "alpha", "beta")
    return run_sspp(p.hypotheses, p.sample, p.select_points(1000), **options, budget=budget).hypothesis


def _learn_exponential(p: Problem, budget: NoiseProvider) -> Any:
    options = _select_options(p, "epsilon", "alpha")
    return run_exponential_mechanism(
        p.hypotheses, p.make_quantile_hypotheses(), p.sample, **options, budget=budget
    ).hypothesis


def _learn_boosted(p: Problem, budget: NoiseProvider) -> Any:
    c, candidates = p.options, p.make_quantile_hypotheses()
    options: dict[str, Any] = {"epsilon": c.epsilon, "alpha": c.alpha, "failure": c.beta}
    return run_high_confidence(p.hypotheses, candidates, p.sample, **options, budget=budget).hypothesis


def _learn_convex(p: Problem, budget: NoiseProvider) -> Any:
    options = _select_options(p, "radius", "ridge", "epsilon", "alpha")
    return run_logistic_exponential(p.scaled_sample, **options, budget=budget).hypothesis


def _learn_representation(p: Problem, budget: NoiseProvider) -> Any:
    c = p.options
    reference = baselines.draw_uniform_reference(p.public_x, c.points or 1000, p.seed)
    options = _select_options(p, "epsilon", "alpha", "beta")
    return baselines.run_representation(p.hypotheses, p.sample, reference, **options, budget=budget).hypothesis


def _learn_ag_priv_cl(p: Problem, budget: NoiseProvider) -> Any:
    c, x_Q = p.options, p.select_points(50)
    options = _select_options(p, "epsilon", "alpha", "beta", "constants") | {"delta": p.delta}
    answers = run_ag_priv_cl(p.hypotheses, p.sample, x_Q, **options, resample=c.constants == "paper", budget=budget)
    return fit_answers(p, x_Q, answers.label_Q.numpy())


def _learn_relabeled(p: Problem, budget: NoiseProvider) -> Any:
    x_Q, options = p.select_points(50), _select_options(p, "epsilon", "alpha", "shard") | {"delta": p.delta}
    return fit_answers(
        p, x_Q, run_relabeled_gnmax(p.hypotheses, p.sample, x_Q, **options, budget=budget).label_Q.numpy()
    )


def _learn_unv_priv_cl(p: Problem, budget: NoiseProvider) -> Any:
    c, x_Q = p.options, p.select_points(1000)
    options = _select_options(p, "epsilon", "alpha", "beta", "constants") | {"delta": p.delta}
    resample = c.constants == "paper"
    result = run_unv_priv_cl(p.hypotheses, p.sample, x_Q, **options, resample=resample, first=c.first, budget=budget)
    return (
        result.learner.hypothesis if result.learner is not None else fit_answers(p, x_Q, result.answers.label_Q.numpy())
    )


def _learn_sub_samp(p: Problem, budget: NoiseProvider) -> Any:
    c, x_Q = p.options, p.select_points(50)
    mechanism = SparseVector(epsilon=c.epsilon, delta=p.delta, max_failures=c.failures, noise=budget.kind)
    teachers = max(1, p.sample.n // c.shard)
    min_teachers = compute_two_thirds_teachers(mechanism, len(x_Q), c.beta)
    min_shard = compute_realizable_size(c.alpha / 2, c.beta / min_teachers, p.hypotheses.vc_dimension)
    condition = f"all but {c.failures} of {len(x_Q)} queries answered right where some hypothesis makes no error"
    warn_below_guarantee(
        "sub-sample and aggregate",
        p.sample.n,
        [(condition, min_teachers * min_shard)],
        [("teachers", teachers, min_teachers)],
    )
    mechanism.check(num_queries=len(x_Q), num_teachers=teachers, num_classes=2)
    answers = run_sub_samp(p.hypotheses, p.sample, x_Q, num_teachers=teachers, mechanism=mechanism, budget=budget)
    return fit_answers(p, x_Q, answers.label_Q.numpy())


def _learn_stable(p: Problem, budget: NoiseProvider) -> Any:
    x_Q, options = p.select_points(20), _select_options(p, "gamma", "alpha", "constants", "cover")
    return fit_answers(
        p, x_Q, stable.run_stable_predictor(p.hypotheses, p.sample, x_Q, **options, budget=budget).label_Q
    )


def _learn_private_prediction(p: Problem, budget: NoiseProvider) -> Any:
    c, x_Q = p.options, p.select_points(20)
    options: dict[str, Any] = {"epsilon": c.epsilon / len(x_Q), "alpha": c.alpha, "constants": c.constants}
    return fit_answers(
        p, x_Q, stable.run_private_prediction(p.hypotheses, p.sample, x_Q, **options, budget=budget).label_Q
    )


def _learn_private_predictor(p: Problem, budget: NoiseProvider) -> Any:
    c, x_Q = p.options, p.select_points(20)
    options: dict[str, Any] = {"epsilon": c.epsilon / len(x_Q), "alpha": c.alpha, "constants": c.constants}
    return fit_answers(
        p, x_Q, stable.run_private_predictor(p.hypotheses, p.sample, x_Q, **options, budget=budget).label_Q
    )


def _learn_df18(p: Problem, budget: NoiseProvider) -> Any:
    c, x_Q = p.options, p.select_points(20)
    options: dict[str, Any] = {"epsilon": c.epsilon / len(x_Q), "alpha": c.alpha}
    return fit_answers(p, x_Q, baselines.run_df18_vote(p.hypotheses, p.sample, x_Q, **options, budget=budget).label_Q)


def _learn_averaging(p: Problem, budget: NoiseProvider) -> Any:
    x_Q, options = p.select_points(20), _select_options(p, "gamma", "alpha", "beta")
    return fit_answers(p, x_Q, baselines.run_averaging(p.hypotheses, p.sample, x_Q, **options, budget=budget).label_Q)


ALGORITHMS = {
    "sspp": Algorithm(
        _learn_sspp, "NB20 Algorithm 7: the best on the records among the labelings of the public points"
    ),
    "exponential": Algorithm(_learn_exponential, "WLF16 Algorithm 1: the best of a finite class (public quantiles)"),
    "boosted": Algorithm(_learn_boosted, "WLF16 Theorem 18: the same, with high probability"),
    "convex": Algorithm(
        _learn_convex, "WLF16 Proposition 19: logistic regression over a ball, drawn exactly", is_linear=True
    ),
    "ag-priv-cl": Algorithm(_learn_ag_priv_cl, "NB20 Algorithm 3: relabel, resample, and the sparse vector"),
    "relabeled": Algorithm(_learn_relabeled, "the same made practical: relabel, then GNMax"),
    "unv-priv-cl": Algorithm(_learn_unv_priv_cl, "NB20 Algorithm 4: AgPrivCl on the first queries, then SSPP"),
    "sub-samp": Algorithm(_learn_sub_samp, "BTT18 Algorithm 4, NB20 Algorithm 5: shards and the sparse vector"),
    "private-prediction": Algorithm(_learn_private_prediction, "DF20 Corollary 1: the stable predictor, flipped"),
    "private-predictor": Algorithm(_learn_private_predictor, "DF20 Theorem 2"),
    "stable": Algorithm(_learn_stable, "DF20 Theorem 1: stable predictions (a delta, and no epsilon)"),
    "df18": Algorithm(_learn_df18, "baseline, Dwork and Feldman 2018: a noisy vote of ERMs on shards"),
    "averaging": Algorithm(_learn_averaging, "baseline: the ERM of a random shard (a delta, and no epsilon)"),
    "representation": Algorithm(_learn_representation, "baseline: the best among the labelings of public random draws"),
}


def fit_answers(p: Problem, x_Q: Floats, label_Q: Any) -> Any:
    """The class's best on the answers.

    Raises:
        ValueError: There are none.
    """
    label_Q = np.asarray(label_Q).astype(np.int64)
    is_answered_Q = label_Q != NO_ANSWER
    if not is_answered_Q.any():
        raise ValueError(
            f"points: none of the {len(x_Q)} queries was answered, so there is nothing to learn from. What was charged "
            "stays charged. Take fewer points, a larger epsilon or more records."
        )
    return fit_erm(p.hypotheses, x_Q[is_answered_Q], label_Q[is_answered_Q] == 1)


# ---- what it would cost ----------------------------------------------------------------------------------------------


class _PriceSignal(Exception):
    def __init__(self, events: tuple[PrivacyEvent, ...]) -> None:
        self.events = events


@dataclass(frozen=True)
class _PriceProbe:
    """A noise provider that is asked for a price, and no more: the algorithm stops where it would begin to draw."""

    kind: str

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Whatever it is: the account says later."""

    @contextmanager
    def spend(self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = "") -> Iterator[Any]:
        """Raise the price."""
        raise _PriceSignal(tuple(events))
        yield  # makes it a generator


def plan_events(algorithm: Algorithm, problem: Problem, kind: str) -> tuple[PrivacyEvent, ...]:
    """What the algorithm would be charged for this problem; nothing is drawn, and its own refusals come here."""
    try:
        algorithm.learn(problem, _PriceProbe(kind))
    except _PriceSignal as signal:
        return signal.events
    return ()  # a class that labels the public points in one way only: free


def sum_deltas(events: Iterable[PrivacyEvent]) -> float:
    """The deltas among the events, added up."""
    return math.fsum(event.delta * event.count for event in events if isinstance(event, DeltaEvent))
