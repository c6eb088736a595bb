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
from pate_torch.budget import NoiseProvider
from pate_torch.learn.problem import Problem
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.pac import baselines, stable
from pate_torch.pac.agnostic import ag_priv_cl, sub_samp, two_thirds_teachers, unv_priv_cl
from pate_torch.pac.boosting import high_confidence
from pate_torch.pac.classes import erm
from pate_torch.pac.exponential import exponential_mechanism
from pate_torch.pac.logistic import logistic_exponential
from pate_torch.pac.nets import realizable_size
from pate_torch.pac.relabeled import relabeled_gnmax
from pate_torch.pac.sample import Floats, warn_below
from pate_torch.pac.semi_private import sspp
from pate_torch.sensitive import Sensitivity
from pate_torch.types import NO_ANSWER


@dataclass(frozen=True)
class Algorithm:
    """One of the papers' algorithms.

    Attributes:
        learn: A hypothesis, paid for by the door.
        what: In words.
        linear: Whether the hypothesis is a vector of parameters, and not one of the class.
    """

    learn: Callable[[Problem, NoiseProvider], Any]
    what: str
    linear: bool = False


def _asked(p: Problem, *names: str) -> dict[str, Any]:
    """What was chosen, by the names that the algorithms have for it."""
    return {name: getattr(p.choices, name) for name in names}


def _sspp(p: Problem, door: NoiseProvider) -> Any:
    asked = _asked(p, "epsilon", "alpha", "beta")
    return sspp(p.hypotheses, p.sample, p.points(1000), **asked, budget=door).hypothesis


def _exponential(p: Problem, door: NoiseProvider) -> Any:
    asked = _asked(p, "epsilon", "alpha")
    return exponential_mechanism(p.hypotheses, p.finite(), p.sample, **asked, budget=door).hypothesis


def _boosted(p: Problem, door: NoiseProvider) -> Any:
    c, candidates = p.choices, p.finite()
    asked: dict[str, Any] = {"epsilon": c.epsilon, "alpha": c.alpha, "failure": c.beta}
    return high_confidence(p.hypotheses, candidates, p.sample, **asked, budget=door).hypothesis


def _convex(p: Problem, door: NoiseProvider) -> Any:
    asked = _asked(p, "radius", "ridge", "epsilon", "alpha")
    return logistic_exponential(p.scaled, **asked, budget=door).hypothesis


def _representation(p: Problem, door: NoiseProvider) -> Any:
    c = p.choices
    reference = baselines.uniform_reference(p.public_x, c.points or 1000, p.seed)
    asked = _asked(p, "epsilon", "alpha", "beta")
    return baselines.represented(p.hypotheses, p.sample, reference, **asked, budget=door).hypothesis


def _ag_priv_cl(p: Problem, door: NoiseProvider) -> Any:
    c, x_Q = p.choices, p.points(50)
    asked = _asked(p, "epsilon", "alpha", "beta", "constants") | {"delta": p.delta}
    answers = ag_priv_cl(p.hypotheses, p.sample, x_Q, **asked, resample=c.constants == "paper", budget=door)
    return taught(p, x_Q, answers.label_Q.numpy())


def _relabeled(p: Problem, door: NoiseProvider) -> Any:
    x_Q, asked = p.points(50), _asked(p, "epsilon", "alpha", "shard") | {"delta": p.delta}
    return taught(p, x_Q, relabeled_gnmax(p.hypotheses, p.sample, x_Q, **asked, budget=door).label_Q.numpy())


def _unv_priv_cl(p: Problem, door: NoiseProvider) -> Any:
    c, x_Q = p.choices, p.points(1000)
    asked = _asked(p, "epsilon", "alpha", "beta", "constants") | {"delta": p.delta}
    resample = c.constants == "paper"
    found = unv_priv_cl(p.hypotheses, p.sample, x_Q, **asked, resample=resample, first=c.first, budget=door)
    return found.learner.hypothesis if found.learner is not None else taught(p, x_Q, found.answers.label_Q.numpy())


def _sub_samp(p: Problem, door: NoiseProvider) -> Any:
    c, x_Q = p.choices, p.points(50)
    mechanism = SparseVector(epsilon=c.epsilon, delta=p.delta, max_failures=c.failures, noise=door.kind)
    teachers = max(1, p.sample.n // c.shard)
    wanted = two_thirds_teachers(mechanism, len(x_Q), c.beta)
    each = realizable_size(c.alpha / 2, c.beta / wanted, p.hypotheses.vc_dimension)
    what = f"all but {c.failures} of {len(x_Q)} queries answered right where some hypothesis makes no error"
    warn_below("sub-sample and aggregate", p.sample.n, [(what, wanted * each)], [("teachers", teachers, wanted)])
    mechanism.check(num_queries=len(x_Q), num_teachers=teachers, num_classes=2)
    answers = sub_samp(p.hypotheses, p.sample, x_Q, num_teachers=teachers, mechanism=mechanism, budget=door)
    return taught(p, x_Q, answers.label_Q.numpy())


def _stable(p: Problem, door: NoiseProvider) -> Any:
    x_Q, asked = p.points(20), _asked(p, "gamma", "alpha", "constants", "cover")
    return taught(p, x_Q, stable.stable_predictor(p.hypotheses, p.sample, x_Q, **asked, budget=door).label_Q)


def _private_prediction(p: Problem, door: NoiseProvider) -> Any:
    c, x_Q = p.choices, p.points(20)
    asked: dict[str, Any] = {"epsilon": c.epsilon / len(x_Q), "alpha": c.alpha, "constants": c.constants}
    return taught(p, x_Q, stable.private_prediction(p.hypotheses, p.sample, x_Q, **asked, budget=door).label_Q)


def _private_predictor(p: Problem, door: NoiseProvider) -> Any:
    c, x_Q = p.choices, p.points(20)
    asked: dict[str, Any] = {"epsilon": c.epsilon / len(x_Q), "alpha": c.alpha, "constants": c.constants}
    return taught(p, x_Q, stable.private_predictor(p.hypotheses, p.sample, x_Q, **asked, budget=door).label_Q)


def _df18(p: Problem, door: NoiseProvider) -> Any:
    c, x_Q = p.choices, p.points(20)
    asked: dict[str, Any] = {"epsilon": c.epsilon / len(x_Q), "alpha": c.alpha}
    return taught(p, x_Q, baselines.df18_vote(p.hypotheses, p.sample, x_Q, **asked, budget=door).label_Q)


def _averaging(p: Problem, door: NoiseProvider) -> Any:
    x_Q, asked = p.points(20), _asked(p, "gamma", "alpha", "beta")
    return taught(p, x_Q, baselines.averaging(p.hypotheses, p.sample, x_Q, **asked, budget=door).label_Q)


ALGORITHMS = {
    "sspp": Algorithm(_sspp, "NB20 Algorithm 7: the best on the records among the labelings of the public points"),
    "exponential": Algorithm(_exponential, "WLF16 Algorithm 1: the best of a finite class (public quantiles)"),
    "boosted": Algorithm(_boosted, "WLF16 Theorem 18: the same, with high probability"),
    "convex": Algorithm(_convex, "WLF16 Proposition 19: logistic regression over a ball, drawn exactly", linear=True),
    "ag-priv-cl": Algorithm(_ag_priv_cl, "NB20 Algorithm 3: relabel, resample, and the sparse vector"),
    "relabeled": Algorithm(_relabeled, "the same made practical: relabel, then GNMax"),
    "unv-priv-cl": Algorithm(_unv_priv_cl, "NB20 Algorithm 4: AgPrivCl on the first queries, then SSPP"),
    "sub-samp": Algorithm(_sub_samp, "BTT18 Algorithm 4, NB20 Algorithm 5: shards and the sparse vector"),
    "private-prediction": Algorithm(_private_prediction, "DF20 Corollary 1: the stable predictor, flipped"),
    "private-predictor": Algorithm(_private_predictor, "DF20 Theorem 2"),
    "stable": Algorithm(_stable, "DF20 Theorem 1: stable predictions (a delta, and no epsilon)"),
    "df18": Algorithm(_df18, "baseline, Dwork and Feldman 2018: a noisy vote of ERMs on shards"),
    "averaging": Algorithm(_averaging, "baseline: the ERM of a random shard (a delta, and no epsilon)"),
    "representation": Algorithm(_representation, "baseline: the best among the labelings of public random draws"),
}


def taught(p: Problem, x_Q: Floats, label_Q: Any) -> Any:
    """The class's best on the answers.

    Raises:
        ValueError: There are none.
    """
    label_Q = np.asarray(label_Q).astype(np.int64)
    told = label_Q != NO_ANSWER
    if not told.any():
        raise ValueError(
            f"points: none of the {len(x_Q)} queries was answered, so there is nothing to learn from. What was charged "
            "stays charged. Take fewer points, a larger epsilon or more records."
        )
    return erm(p.hypotheses, x_Q[told], label_Q[told] == 1)


# ---- what it would cost ----------------------------------------------------------------------------------------------


class _Quoted(Exception):
    def __init__(self, events: tuple[PrivacyEvent, ...]) -> None:
        self.events = events


@dataclass(frozen=True)
class _Quote:
    """A door at which a price is asked, and nothing more: the algorithm stops where it would begin to draw."""

    kind: str

    def covers(self, sensitivity: Sensitivity) -> None:
        """Whatever it is: the account says later."""

    @contextmanager
    def spend(self, events: Iterable[PrivacyEvent], *, mechanism: str, what: str = "") -> Iterator[Any]:
        """Raise the price."""
        raise _Quoted(tuple(events))
        yield  # makes it a generator


def quote(algorithm: Algorithm, problem: Problem, kind: str) -> tuple[PrivacyEvent, ...]:
    """What the algorithm would be charged for this problem; nothing is drawn, and its own refusals come here."""
    try:
        algorithm.learn(problem, _Quote(kind))
    except _Quoted as quoted:
        return quoted.events
    return ()  # a class that labels the public points in one way only: free


def total_delta(events: Iterable[PrivacyEvent]) -> float:
    """The deltas among the events, added up."""
    return math.fsum(event.delta * event.count for event in events if isinstance(event, DeltaEvent))
