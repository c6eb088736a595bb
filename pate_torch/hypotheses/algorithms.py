"""The algorithms of ``pate learn`` with their two-class problems and their costs.

An algorithm that answers queries labels public points. The released hypothesis is the empirical risk minimizer on these
labels, which is post-processing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pate_torch.accounting.calibration import calibrate_sigma
from pate_torch.accounting.events import PrivacyEvent, PureDPEvent
from pate_torch.core import checks
from pate_torch.core.rng import make_numpy_generator
from pate_torch.hypotheses import LearnOptions, classes, exponential, prediction
from pate_torch.hypotheses.classes import HypothesisClass, Stump, Stumps
from pate_torch.hypotheses.sample import Floats, Sample
from pate_torch.privacy.noise import DryRunNoise, NoiseProvider
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.privacy.records import PrivateRecords

# ---- Problems --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Problem:
    """PRIVATE. Records of two classes with public points and options.

    Attributes:
        hypotheses: Hypothesis class.
        sample: PRIVATE. Records.
        public_x: Public points, not normalized, float64 [P, D].
        scaled_sample: PRIVATE. Records for linear models, with normalized features and an intercept, divided by the
            largest norm of a public point.
        options: Options. Their epsilon is the share of this problem, one of ``num_problems`` equal shares.
        delta: Delta at which the epsilon of all problems together is computed.
    """

    hypotheses: HypothesisClass
    sample: Sample
    public_x: Floats
    scaled_sample: Sample
    options: LearnOptions
    delta: float
    num_problems: int = 1

    def compute_answer_epsilon(self, num_answers: int) -> float:
        """Compute the largest epsilon of one answer, for which ``num_answers`` in each problem cost all of epsilon."""
        return _solve_epsilon(num_answers * self.num_problems, self.options.epsilon * self.num_problems, self.delta)

    def select_points(self, default: int) -> Floats:
        """Select the first ``options.points`` public points, or the first ``default`` points if the option is None."""
        num_points = self.options.points
        if num_points is not None and num_points > len(self.public_x):
            raise checks.error("points", num_points, f"must be at most {len(self.public_x)}, the size of the pool")
        return self.public_x[: default if num_points is None else num_points]

    def make_quantile_hypotheses(self) -> Sequence[Any]:
        """Make a finite class of hypotheses with thresholds between quantiles of the features of the public points."""
        grid = np.quantile(self.public_x, np.linspace(0, 1, self.options.cuts + 1), axis=0)
        if not isinstance(self.hypotheses, Stumps):
            return self.hypotheses.enumerate_representatives(np.unique(grid, axis=0))
        cuts = [(j, float(t)) for j in range(grid.shape[1]) for t in classes.compute_cuts(grid[:, j])[1:-1]]
        return [Stump(*cut, is_above) for cut in [(0, -np.inf), *cuts] for is_above in (True, False)]


def make_hypothesis_class(name: str, num_features: int) -> HypothesisClass:
    """Make the hypothesis class of this name. Raise ValueError if the class needs another number of features."""
    all_classes = (classes.Thresholds(), classes.Intervals(), classes.HalfPlanes(), Stumps(num_features))
    hypotheses = next(each for each in all_classes if each.name == name)
    if num_features != hypotheses.num_features:
        problem = f"takes {hypotheses.num_features} feature(s), but the records have {num_features}"
        fix = "Select features by dataset.features=[...], or use --hypotheses stumps."
        raise checks.error("hypotheses", name, problem, fix)
    return hypotheses


@functools.lru_cache(maxsize=64)
def _solve_epsilon(num_answers: int, epsilon: float, delta: float) -> float:
    return 1 / calibrate_sigma(lambda s: [PureDPEvent(epsilon=1 / s, count=num_answers)], epsilon=epsilon, delta=delta)


def make_problems(
    records: PrivateRecords, facts: DatasetFacts, options: LearnOptions, seed: int, delta: float
) -> list[Problem]:
    """Make one problem for two classes, or one problem for each class against the rest, with equal shares of epsilon.

    ``records`` are private, or as many placeholders. A permutation that depends only on their number and on ``seed``
    determines their order. ``delta`` is that of the account.
    """
    spec = facts.spec
    if len(spec.input_shape) != 1:
        problem = "must be a table of features for these algorithms"
        raise checks.error("dataset.name", spec.name, problem, "For images, use pate train.")
    order = make_numpy_generator(seed, "learn", "order").permutation(len(records))
    private_x, label_N = records.x.double().numpy()[order], records.y.numpy()[order]
    labels = [1] if spec.num_classes == 2 else list(range(spec.num_classes))
    usable_N = None if records.usable_N is None else records.usable_N.numpy()[order]
    scaled_x = _add_intercept(facts, private_x) / compute_max_norm(facts)
    if usable_N is not None:  # for a linear model, the loss of a point of zeros is the same for all parameters
        scaled_x = scaled_x * usable_N[:, None]
    return [
        Problem(
            hypotheses=make_hypothesis_class(options.hypotheses, private_x.shape[1]),
            sample=Sample(private_x, label_N == label, usable_N),
            public_x=facts.pool.x.double().numpy(),
            scaled_sample=Sample(scaled_x, label_N == label),
            options=replace(options, epsilon=options.epsilon / len(labels)),
            delta=delta,
            num_problems=len(labels),
        )
        for label in labels
    ]


def compute_max_norm(facts: DatasetFacts) -> float:
    """Compute the largest norm of a public point with normalized features and an intercept."""
    return float(np.linalg.norm(_add_intercept(facts, facts.pool.x.double().numpy()), axis=1).max())


def _add_intercept(facts: DatasetFacts, x: Floats) -> Floats:
    normalized_x = (x - np.array(facts.spec.mean)) / np.array(facts.spec.std)
    return np.concatenate([normalized_x, np.ones((len(x), 1))], axis=1)


# ---- Algorithms ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Algorithm:
    """One of the papers' algorithms.

    Attributes:
        learn: Function of a problem and a noise provider that charges the provider and returns a hypothesis.
        compute_size: Function of the options and the VC dimension (for a linear model the number of parameters) that
            returns the n that the theorem needs, and its promise. A third argument is the number of listed candidates.
        list_candidates: Function that lists the candidates of a problem, which public points determine, or None.
        is_linear: Whether the hypothesis is the parameters of a linear model.
    """

    learn: Callable[[Problem, NoiseProvider], Any]
    compute_size: Callable[..., tuple[float, str]]
    list_candidates: Callable[[Problem], Sequence[Any]] | None = None
    is_linear: bool = False

    def certify(self, p: Problem) -> dict[str, Any]:
        """Make the certificate of ``exponential.certify``. Empty if no candidates are listed."""
        if self.list_candidates is None:
            return {}
        c, num_candidates = p.options, len(self.list_candidates(p))
        theorem = self.compute_size(c, p.hypotheses.vc_dimension, num_candidates)
        return exponential.certify(p.sample.n, num_candidates, c.epsilon, c.beta, p.num_problems, theorem)


def _learn_sspp(p: Problem, budget: NoiseProvider) -> Any:
    c, public_x = p.options, p.select_points(1000)
    return exponential.run_sspp(
        p.hypotheses, p.sample, public_x, epsilon=c.epsilon, alpha=c.alpha, beta=c.beta, budget=budget
    ).hypothesis


def _list_labelings(p: Problem) -> Sequence[Any]:
    return p.hypotheses.enumerate_representatives(p.select_points(1000))


def _compute_sspp_size(c: LearnOptions, d: int, num_candidates: int | None = None) -> tuple[float, str]:
    points = exponential.compute_sspp_public_size(d, alpha=c.alpha, beta=c.beta)
    n = exponential.compute_sspp_private_size(d, epsilon=c.epsilon, alpha=c.alpha, beta=c.beta)
    return n, f"excess error {c.alpha:g} with probability {1 - c.beta:g}, for at least {points:,} public points"


def _learn_exponential(p: Problem, budget: NoiseProvider) -> Any:
    c, candidates = p.options, p.make_quantile_hypotheses()
    return exponential.run_exponential_mechanism(
        p.hypotheses, candidates, p.sample, epsilon=c.epsilon, alpha=c.alpha, budget=budget
    ).hypothesis


def _compute_finite_size(c: LearnOptions, d: int, num_candidates: int | None = None) -> tuple[float, str]:
    num_candidates = num_candidates or 2 * c.cuts
    n = exponential.compute_finite_size(num_candidates, epsilon=c.epsilon, alpha=c.alpha)
    return n, f"expected excess error {c.alpha:g} on the records, {num_candidates:,} hypotheses"


def _learn_convex(p: Problem, budget: NoiseProvider) -> Any:
    c = p.options
    return exponential.run_logistic_exponential(
        p.scaled_sample, radius=c.radius, ridge=c.ridge, epsilon=c.epsilon, alpha=c.alpha, budget=budget
    ).hypothesis


def _compute_convex_size(c: LearnOptions, d: int) -> tuple[float, str]:
    n = exponential.compute_convex_size(d, epsilon=c.epsilon, alpha=c.alpha, loss_range=c.radius)
    return n, f"excess mean loss {c.alpha:g}"


def _learn_prediction(p: Problem, budget: NoiseProvider) -> Any:
    c, x_Q = p.options, p.select_points(20)
    epsilon = p.compute_answer_epsilon(len(x_Q))
    predictions = prediction.run_private_prediction(
        p.hypotheses, p.sample, x_Q, epsilon=epsilon, alpha=c.alpha, constants=c.constants, budget=budget
    )
    return classes.fit_erm(p.hypotheses, x_Q, predictions.label_Q)


def _compute_prediction_size(c: LearnOptions, d: int) -> tuple[float, str]:
    m = c.points or 20
    gamma = prediction.compute_flipping_gamma(c.epsilon / m, c.alpha, c.constants)
    n = prediction.compute_stable_predictor_size(d, gamma=gamma, alpha=c.alpha)
    return n, f"empirical excess error {4 * c.alpha:g}, {m:,} predictions"


ALGORITHMS = {
    "sspp": Algorithm(_learn_sspp, _compute_sspp_size, _list_labelings),
    "exponential": Algorithm(_learn_exponential, _compute_finite_size, Problem.make_quantile_hypotheses),
    "convex": Algorithm(_learn_convex, _compute_convex_size, is_linear=True),
    "private-prediction": Algorithm(_learn_prediction, _compute_prediction_size),
}


def plan_events(algorithm: Algorithm, problem: Problem, kind: str) -> tuple[PrivacyEvent, ...]:
    """Compute the events that the algorithm would charge for this problem, by a dry run that charges nothing."""
    noise = DryRunNoise(kind)
    algorithm.learn(problem, noise)
    return noise.events  # none if the class has a single dichotomy of the public points
