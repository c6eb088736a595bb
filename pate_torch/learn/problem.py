"""A problem of two classes as the papers state it, and a data set cut into such: one class against the rest."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pate_torch.core import checks
from pate_torch.core.rng import make_numpy_generator
from pate_torch.pac.classes import HalfPlanes, HypothesisClass, Intervals, Stump, Stumps, Thresholds, compute_cuts
from pate_torch.pac.sample import Floats, Sample
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.records import LABEL_UNIT, PrivateRecords

HYPOTHESIS_CLASSES = ("stumps", "thresholds", "intervals", "half-planes")


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """What every algorithm may be told; each takes what it knows.

    Attributes:
        hypotheses: Name of the class.
        epsilon: Of the whole release.
        delta: Of the whole release; None: half of the account's.
        alpha: Excess error.
        beta: Probability that it is larger.
        points: Public points that are used, or asked about; None: as many as the algorithm has by default.
        constants: "paper" or "sharp".
        cuts: Candidates of a feature, for a finite class.
        gamma: Of the stable predictor and of averaging.
        shard: Records of a teacher.
        failures: Unstable queries after which the sparse vector stops.
        first: Queries that UnvPrivCl answers one by one; None: as the paper has it.
        radius: Of the ball of parameters.
        ridge: Of the penalty on them.
        cover: Whether the stable predictor draws among a cover.
    """

    hypotheses: str = "stumps"
    epsilon: float = 1.0
    delta: float | None = None
    alpha: float = 0.1
    beta: float = 0.1
    points: int | None = None
    constants: str = "paper"
    cuts: int = 20
    gamma: float = 0.05
    shard: int = 30
    failures: int = 1
    first: int | None = None
    radius: float = 3.0
    ridge: float = 0.05
    cover: bool = False

    def __post_init__(self) -> None:
        checks.one_of("hypotheses", self.hypotheses, HYPOTHESIS_CLASSES)
        checks.one_of("constants", self.constants, ("paper", "sharp"))
        for key in ("epsilon", "radius", "ridge"):
            checks.positive(key, getattr(self, key))
        if self.delta is not None:
            checks.delta("delta", self.delta)
        for key in ("alpha", "beta", "gamma"):
            checks.between(key, getattr(self, key), 0, 1, exclusive=True)
        for key in ("cuts", "shard", "failures"):
            checks.integer(key, getattr(self, key), low=1)
        for key in ("points", "first"):
            if getattr(self, key) is not None:
                checks.integer(key, getattr(self, key), low=1)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Problem:
    """PRIVATE. Records of two classes, public points, and what is asked for.

    Attributes:
        hypotheses: The class.
        sample: PRIVATE. The records.
        public_x: Public points, raw, [P, D].
        scaled_sample: PRIVATE. The records with normalized features and an intercept, at most 1 long, for linear
            models.
        options: What was asked; epsilon and delta are this problem's share.
        delta: Its share of delta.
        seed: Of public draws.
    """

    hypotheses: HypothesisClass
    sample: Sample
    public_x: Floats
    scaled_sample: Sample
    options: LearnOptions
    delta: float
    seed: int = 0

    def select_points(self, default: int) -> Floats:
        """The public points that are used: those asked for, or so many by default."""
        num_points = self.options.points
        if num_points is not None and num_points > len(self.public_x):
            raise checks.error("points", num_points, f"there are {len(self.public_x)} public points only")
        return self.public_x[: default if num_points is None else num_points]

    def make_quantile_hypotheses(self) -> Sequence[Any]:
        """A finite class: hypotheses that cut between quantiles of the public points, feature by feature."""
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
    """The class of that name.

    Raises:
        ValueError: The records have more features than it speaks of.
    """
    expected_features = {"thresholds": 1, "intervals": 1, "half-planes": 2}.get(name, num_features)
    if num_features != expected_features:
        fix = "Choose them by dataset.features=[...], or take --hypotheses stumps."
        raise checks.error(
            "hypotheses", name, f"takes {expected_features} feature(s), and there are {num_features}", fix
        )
    factories: dict[str, Callable[[], HypothesisClass]] = {
        "thresholds": Thresholds,
        "intervals": Intervals,
        "half-planes": HalfPlanes,
        "stumps": lambda: Stumps(num_features),
    }
    return factories[name]()


def make_problems(
    records: PrivateRecords, facts: DatasetFacts, options: LearnOptions, delta: float, seed: int
) -> list[Problem]:
    """One problem of two classes, or of more classes each against the rest, at an equal share of epsilon and delta.

    Records stand in an order that a permutation of positions decides: folds and shards are blocks of it.

    Args:
        records: PRIVATE, or as many placeholders in their place.
        facts: Public facts, with the public points.
        options: What is asked of all of them together.
        delta: The release's share of the account's delta.
        seed: Of the order, and of public draws.

    Raises:
        ValueError: Images, units of several records, or features that the class does not take.
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
    public_x = facts.pool.x.double().numpy()
    hypotheses = make_hypothesis_class(options.hypotheses, private_x.shape[1])
    labels = [1] if spec.num_classes == 2 else list(range(spec.num_classes))
    problem_options = replace(options, epsilon=options.epsilon / len(labels))
    scaled_x = scale_features(facts, private_x)
    return [
        Problem(
            hypotheses=hypotheses,
            sample=Sample(private_x, label_N == label),
            public_x=public_x,
            scaled_sample=Sample(scaled_x, label_N == label),
            options=problem_options,
            delta=delta / len(labels),
            seed=seed,
        )
        for label in labels
    ]


def compute_max_norm(facts: DatasetFacts) -> float:
    """Length of the longest public point with its intercept, in normalized features."""
    return float(np.linalg.norm(_add_intercept(facts, facts.pool.x.double().numpy()), axis=1).max())


def scale_features(facts: DatasetFacts, x: Floats) -> Floats:
    """Normalized features and an intercept, in units of the longest public point's length."""
    return _add_intercept(facts, x) / compute_max_norm(facts)


def _add_intercept(facts: DatasetFacts, x: Floats) -> Floats:
    normalized_x = (x - np.array(facts.spec.mean)) / np.array(facts.spec.std)
    return np.concatenate([normalized_x, np.ones((len(x), 1))], axis=1)
