"""The algorithms of ``pate learn``: from a problem of two classes to a hypothesis of its class, and what that costs.

Algorithms that answer queries are asked about public points; the released hypothesis is the class's empirical risk
minimizer on the answers, which costs nothing more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.rng import make_numpy_generator
from pate_torch.hypotheses import exponential, prediction
from pate_torch.hypotheses.classes import (
    HalfPlanes,
    HypothesisClass,
    Intervals,
    Stump,
    Stumps,
    Thresholds,
    compute_cuts,
    fit_erm,
)
from pate_torch.hypotheses.sample import Floats, Sample
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.noise import NoiseProvider
from pate_torch.privacy.records import LABEL_UNIT, NO_ANSWER, PrivateRecords
from pate_torch.privacy.sensitive import Sensitivity

HYPOTHESIS_CLASSES = ("stumps", "thresholds", "intervals", "half-planes")

# ---- Problems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """The options of all algorithms; each algorithm reads its own.

    Attributes:
        hypotheses: Name of the class.
        epsilon: Epsilon of the whole release.
        alpha: Excess error.
        beta: Probability that the error is larger.
        points: Number of public points that are used, or asked about; None for the default of the algorithm.
        constants: "paper" or "sharp".
        cuts: Number of candidates of each feature, for a finite class.
        radius: Radius of the ball of parameters.
        ridge: Weight of the penalty on the parameters.
    """

    hypotheses: str = "stumps"
    epsilon: float = 1.0
    alpha: float = 0.1
    beta: float = 0.1
    points: int | None = None
    constants: str = "paper"
    cuts: int = 20
    radius: float = 3.0
    ridge: float = 0.05

    def __post_init__(self) -> None:
        checks.one_of("hypotheses", self.hypotheses, HYPOTHESIS_CLASSES)
        checks.one_of("constants", self.constants, ("paper", "sharp"))
        for key in ("epsilon", "radius", "ridge"):
            checks.positive(key, getattr(self, key))
        for key in ("alpha", "beta"):
            checks.between(key, getattr(self, key), 0, 1, exclusive=True)
        for key, value in (("cuts", self.cuts), ("points", 1 if self.points is None else self.points)):
            checks.integer(key, value, low=1)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Problem:
    """PRIVATE. Records of two classes, public points, and the options.

    Attributes:
        hypotheses: The class.
        sample: PRIVATE. The records.
        public_x: Public points, not normalized, float64 [P, D].
        scaled_sample: PRIVATE. The records with normalized features and an intercept, at most 1 long, for linear
            models.
        options: The options; epsilon is this problem's share.
    """

    hypotheses: HypothesisClass
    sample: Sample
    public_x: Floats
    scaled_sample: Sample
    options: LearnOptions

    def select_points(self, default: int) -> Floats:
        """Select the public points that are used: as many as the options say, or ``default``."""
        num_points = self.options.points
        if num_points is not None and num_points > len(self.public_x):
            raise checks.error("points", num_points, f"there are {len(self.public_x)} public points only")
        return self.public_x[: default if num_points is None else num_points]

    def make_quantile_hypotheses(self) -> Sequence[Any]:
        """Make a finite class: hypotheses that cut between quantiles of the public points, feature by feature."""
        grid = np.quantile(self.public_x, np.linspace(0, 1, self.options.cuts + 1), axis=0)
        if not isinstance(self.hypotheses, Stumps):
            return self.hypotheses.enumerate_representatives(np.unique(grid, axis=0))
        stumps = [Stump(0, -np.inf, is_above) for is_above in (True, False)]
        for feature in range(grid.shape[1]):
            stumps += [
                Stump(feature, float(t), is_above)
                for t in compute_cuts(grid[:, feature])[1:-1]
                for is_above in (True, False)
            ]
        return stumps


def make_hypothesis_class(name: str, num_features: int) -> HypothesisClass:
    """Make the class of that name.

    Raises:
        ValueError: The class takes another number of features than the records have.
    """
    expected_features = {"thresholds": 1, "intervals": 1, "half-planes": 2}.get(name, num_features)
    if num_features != expected_features:
        fix = "Choose them by dataset.features=[...], or take --hypotheses stumps."
        raise checks.error(
            "hypotheses", name, f"takes {expected_features} feature(s), and there are {num_features}", fix
        )
    fixed_classes = {"thresholds": Thresholds(), "intervals": Intervals(), "half-planes": HalfPlanes()}
    return fixed_classes[name] if name in fixed_classes else Stumps(num_features)


def make_problems(records: PrivateRecords, facts: DatasetFacts, options: LearnOptions, seed: int) -> list[Problem]:
    """Make one problem of two classes, or one for each of several classes against the rest, at an equal share.

    Records stand in an order that a permutation of positions decides.

    Args:
        records: PRIVATE. The records, or as many placeholders.
        facts: Public facts, with the public points.
        options: Options of all problems together.
        seed: Seed of the order.

    Raises:
        ValueError: The records are images, the units are groups, or the class does not take the features.
    """
    spec = facts.spec
    if facts.unit not in ("record", LABEL_UNIT):
        problem = f"protects single records, but the privacy unit is {facts.unit}"
        raise checks.error("partition", "replace_one", problem, "Leave out dataset.group.")
    if len(spec.input_shape) != 1:
        problem = "holds no rows of features, which these algorithms take"
        raise checks.error("dataset.name", spec.name, problem, "Train networks by pate train.")
    order = make_numpy_generator(seed, "learn", "order").permutation(len(records))
    private_x, label_N = records.x.double().numpy()[order], records.y.numpy()[order]
    labels = [1] if spec.num_classes == 2 else list(range(spec.num_classes))
    scaled_x = _add_intercept(facts, private_x) / compute_max_norm(facts)
    return [
        Problem(
            hypotheses=make_hypothesis_class(options.hypotheses, private_x.shape[1]),
            sample=Sample(private_x, label_N == label),
            public_x=facts.pool.x.double().numpy(),
            scaled_sample=Sample(scaled_x, label_N == label),
            options=replace(options, epsilon=options.epsilon / len(labels)),
        )
        for label in labels
    ]


def compute_max_norm(facts: DatasetFacts) -> float:
    """Compute the length of the longest public point with its intercept, in normalized features."""
    return float(np.linalg.norm(_add_intercept(facts, facts.pool.x.double().numpy()), axis=1).max())


def _add_intercept(facts: DatasetFacts, x: Floats) -> Floats:
    normalized_x = (x - np.array(facts.spec.mean)) / np.array(facts.spec.std)
    return np.concatenate([normalized_x, np.ones((len(x), 1))], axis=1)


# ---- Algorithms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    """One of the papers' algorithms.

    Attributes:
        learn: Function that learns a hypothesis of a problem, charged to the noise provider.
        compute_size: Function from the options and the VC dimension (for a linear model the number of parameters) to
            the number of records that the theorem asks for and what it promises for them.
        description: Description in words.
        is_linear: Whether the hypothesis is a vector of parameters instead of a hypothesis of the class.
    """

    learn: Callable[[Problem, NoiseProvider], Any]
    compute_size: Callable[[LearnOptions, int], tuple[float, str]]
    description: str
    is_linear: bool = False


def _select_options(p: Problem, *names: str) -> dict[str, Any]:
    return {name: getattr(p.options, name) for name in names}


def _format_promise(c: LearnOptions) -> str:
    return f"excess error {c.alpha:g} with probability {1 - c.beta:g}"


def _learn_sspp(p: Problem, budget: NoiseProvider) -> Any:
    options = _select_options(p, "epsilon", "alpha", "beta")
    return exponential.run_sspp(p.hypotheses, p.sample, p.select_points(1000), **options, budget=budget).hypothesis


def _compute_sspp_size(c: LearnOptions, d: int) -> tuple[float, str]:
    points = exponential.compute_sspp_public_size(d, alpha=c.alpha, beta=c.beta)
    n = exponential.compute_sspp_private_size(d, epsilon=c.epsilon, alpha=c.alpha, beta=c.beta)
    return n, f"{_format_promise(c)}, from {points:,} public points on"


def _learn_exponential(p: Problem, budget: NoiseProvider) -> Any:
    options, candidates = _select_options(p, "epsilon", "alpha"), p.make_quantile_hypotheses()
    return exponential.run_exponential_mechanism(
        p.hypotheses, candidates, p.sample, **options, budget=budget
    ).hypothesis


def _compute_exponential_size(c: LearnOptions, d: int) -> tuple[float, str]:
    n = exponential.compute_finite_size(2 * c.cuts, epsilon=c.epsilon, alpha=c.alpha)
    return n, f"excess empirical error {c.alpha:g}, {2 * c.cuts} hypotheses"


def _learn_convex(p: Problem, budget: NoiseProvider) -> Any:
    options = _select_options(p, "radius", "ridge", "epsilon", "alpha")
    return exponential.run_logistic_exponential(p.scaled_sample, **options, budget=budget).hypothesis


def _compute_convex_size(c: LearnOptions, d: int) -> tuple[float, str]:
    n = exponential.compute_convex_size(d, epsilon=c.epsilon, alpha=c.alpha, loss_range=c.radius)
    return n, f"excess mean loss {c.alpha:g}"


def _learn_private_prediction(p: Problem, budget: NoiseProvider) -> Any:
    x_Q, options = p.select_points(20), _select_options(p, "alpha", "constants")
    options["epsilon"] = p.options.epsilon / len(x_Q)
    predictions = prediction.run_private_prediction(p.hypotheses, p.sample, x_Q, **options, budget=budget)
    return fit_answers(p, x_Q, predictions.label_Q)


def _compute_private_prediction_size(c: LearnOptions, d: int) -> tuple[float, str]:
    m = c.points or 20
    gamma = prediction.compute_flipping_gamma(c.epsilon / m, c.alpha, c.constants)
    n = prediction.compute_stable_predictor_size(d, gamma=gamma, alpha=c.alpha)
    return n, f"empirical excess error {4 * c.alpha:g}, {m:,} predictions"


ALGORITHMS = {
    "sspp": Algorithm(
        _learn_sspp, _compute_sspp_size, "NB20 Algorithm 7: the best labeling of the public points on the records"
    ),
    "exponential": Algorithm(
        _learn_exponential, _compute_exponential_size, "WLF16 Algorithm 1: the best of a finite class"
    ),
    "convex": Algorithm(_learn_convex, _compute_convex_size, "WLF16 Proposition 19: logistic regression", True),
    "private-prediction": Algorithm(
        _learn_private_prediction, _compute_private_prediction_size, "DF20 Corollary 1: stable predictions, flipped"
    ),
}


def fit_answers(p: Problem, x_Q: Floats, label_Q: Any) -> Any:
    """Fit the class's empirical risk minimizer on the answers.

    Raises:
        ValueError: No query was answered.
    """
    label_Q = np.asarray(label_Q).astype(np.int64)
    is_answered_Q = label_Q != NO_ANSWER
    if not is_answered_Q.any():
        raise ValueError(
            f"points: none of the {len(x_Q)} queries was answered, so there is nothing to learn from. What was charged "
            "stays charged. Take fewer points, a larger epsilon or more records."
        )
    return fit_erm(p.hypotheses, x_Q[is_answered_Q], label_Q[is_answered_Q] == 1)


# ---- Prices ----------------------------------------------------------------------------------------------------------


class _PriceSignal(Exception):
    def __init__(self, events: tuple[PrivacyEvent, ...]) -> None:
        self.events = events


@dataclass(frozen=True)
class _PriceProbe:
    """A noise provider that only learns the price: the algorithm stops where it would begin to draw."""

    kind: str

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Accept every adjacency: the account checks it when the release is charged."""

    @contextmanager
    def spend(self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = "") -> Iterator[Any]:
        """Raise the price."""
        raise _PriceSignal(tuple(events))
        yield  # makes this function a generator


def plan_events(algorithm: Algorithm, problem: Problem, kind: str) -> tuple[PrivacyEvent, ...]:
    """Compute the events that the algorithm would be charged for this problem, and draw nothing.

    Raises:
        ValueError: The algorithm refuses the problem.
    """
    try:
        algorithm.learn(problem, _PriceProbe(kind))
    except _PriceSignal as signal:
        return signal.events
    return ()  # a class that labels the public points in one way only is free
