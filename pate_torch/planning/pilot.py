"""Votes to try a plan on: simulated from a guess, or those of a small ensemble on public data. Never private votes.

Teachers share mistakes: some questions are hard for all. Whether one teacher is right on a question and whether another
is have a correlation rho (``pilot.error_correlation``); rho = 1/(a + b + 1) where the share of teachers that are right
is Beta(a, b). Where the pilot is a small ensemble, the distribution of that share is learnt from its votes
(``fit_vote_model``).

The guess is a public number, the accuracy of one teacher. The rest of the model was measured on small ensembles as a
function of the teachers' mean error e:

- How much mistakes are shared: rho is about 1/(1.5 + 10 e). It varies much: of 67 ensembles of tables and digits its
  logit lay within 1.36 of that for 95 %, and a forecast says what these ends would give.
- Where the wrong votes go: shares of the other classes are Dirichlet with weights 4.5 e / (C - 1), so mostly to one
  rival. Spreading them evenly would make every plurality look safe.
- Smaller shards: e grows as K^0.5 (measured exponents: 0.5 on MNIST, 0.6 on digits, 0.8 on characters).

The guess knows no probabilities: a mechanism of soft labels is then tried on votes, scores of 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import binom
from torch import nn

from pate_torch.core import checks, rng
from pate_torch.mechanisms.base import Mechanism
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.partition import AddRemove, ReplaceOne
from pate_torch.privacy.records import Dataset, MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes
from pate_torch.privacy.units import select
from pate_torch.teachers.training import TeacherRecipe, train

Array = NDArray[np.float64]
EncoderBuilder = Callable[[Dataset], nn.Module | None]
"""Features learnt from a data set's public points; None: the points as they are."""

PUBLIC_DATASETS = ("cifar10", "digits", "fashion_mnist", "mnist", "svhn")
"""Data sets that are known to be public."""

MAX_PILOT_QUERIES = 50_000
MIN_PILOT_TEACHERS = 4

_LOGIT_HALF_WIDTH = 1.36
"""Of the logit of rho around the law, for 95 % of the ensembles."""
_MODEL_STANDARD_ERROR = 0.004
"""Standard error of a forecast learnt from many teachers and many questions. Measured, as the next, on ensembles of
tables, digits and news (docs/experiments/forecasts.md)."""
_EM_STEPS = 40
"""Of expectation maximization; stopped there the estimate is smooth."""
_SHARES_S = np.linspace(0.005, 0.995, 100)


@dataclass(frozen=True, kw_only=True)
class PilotConfig:
    """How the votes to try plans on are made.

    Attributes:
        dataset: A public data set, by the name that ``dataset=`` has, on which a small ensemble is trained; None
            simulates votes.
        teacher_accuracy: The guess, for an ensemble of ``at_teachers``.
        at_teachers: None: the number of teachers given, or recommended.
        exponent: How fast a teacher's error grows with K.
        error_correlation: Correlation rho of two teachers' being right on a question, of a guess; None: 1/(1.5 + 10 e)
            and, for the interval, what ensembles with such an error e have had.
        num_classes: Number of classes, where the data set declares none.
        num_queries: Number of questions tried.
        teachers: Number of teachers of the small ensemble.
        steps: Training steps of each of them.
    """

    dataset: str | None = None
    teacher_accuracy: float = 0.8
    at_teachers: int | None = None
    exponent: float = 0.5
    error_correlation: float | None = None
    num_classes: int | None = None
    num_queries: int = 2000
    teachers: int = 32
    steps: int = 300

    def __post_init__(self) -> None:
        if self.dataset is not None:
            checks.nonempty_string("pilot.dataset", self.dataset)
        checks.between("pilot.teacher_accuracy", self.teacher_accuracy, 0, 1, exclusive=True)
        checks.between("pilot.exponent", self.exponent, 0, 2)
        if self.error_correlation is not None:
            checks.between("pilot.error_correlation", self.error_correlation, 0, 1, exclusive=True)
            if self.dataset is not None:
                raise checks.error(
                    "pilot.error_correlation",
                    self.error_correlation,
                    "is of a guess; pilot.dataset measures it",
                    "Omit one.",
                )
        for key, low in (("at_teachers", 1), ("num_classes", 2)):
            if getattr(self, key) is not None:
                checks.integer(f"pilot.{key}", getattr(self, key), low=low)
        checks.integer("pilot.num_queries", self.num_queries, low=100, high=MAX_PILOT_QUERIES)
        checks.integer("pilot.teachers", self.teachers, low=MIN_PILOT_TEACHERS)
        checks.integer("pilot.steps", self.steps, low=1)

    def compute_accuracy(self, num_teachers: int, num_classes: int) -> float:
        """The guess at another K, never worse than guessing. ``at_teachers`` must be set."""
        assert self.at_teachers is not None
        error = (1 - self.teacher_accuracy) * (num_teachers / self.at_teachers) ** self.exponent
        return 1 - min(error, 1 - 1 / num_classes)


@dataclass(frozen=True, kw_only=True, eq=False)
class VoteModel:
    """A model of votes: given the question, teachers vote independently.

    Attributes:
        share_QC: Probability that a teacher votes for each class.
        truth_Q: The right class.
        score_KQS: Scores of the ensemble's teachers, as ``SoftVotes`` holds them; None: votes are all that is known.
        num_queries: Number of real questions it was learnt from; None: it was imagined.
        standard_error: Standard error of its forecasts beside that of the questions.
        low_correlation: The model with fewer shared mistakes, at the end of what is likely; None: this one is certain.
        high_correlation: The same with more of them.
    """

    share_QC: Array
    truth_Q: NDArray[np.int64]
    score_KQS: torch.Tensor | None = None
    num_queries: int | None = None
    standard_error: float = _MODEL_STANDARD_ERROR
    low_correlation: VoteModel | None = None
    high_correlation: VoteModel | None = None

    @property
    def teacher_accuracy(self) -> float:
        """The accuracy of one teacher, on average."""
        return float(self.share_QC[np.arange(len(self.truth_Q)), self.truth_Q].mean())

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.share_QC.shape[1]

    def draw_votes(self, num_teachers: int, num_queries: int, seed: int) -> tuple[Votes, NDArray[np.int64]]:
        """Votes of so many teachers on questions taken in turn, and the right classes."""
        index_Q = np.arange(num_queries) % len(self.truth_Q)
        counts_QC = rng.make_numpy_generator(seed, "plan", "votes").multinomial(num_teachers, self.share_QC[index_Q])
        return Votes(torch.from_numpy(counts_QC.astype(np.int64)), num_teachers), self.truth_Q[index_Q]

    def draw_soft_votes(self, num_teachers: int, start: int, stop: int, seed: int) -> SoftVotes:
        """Scores of so many teachers, drawn anew from the ensemble's for each question of ``draw_votes``."""
        assert self.score_KQS is not None
        index_Q = torch.arange(start, stop) % len(self.truth_Q)
        generator = rng.make_torch_generator(seed, "plan", "scores", start)
        teacher_KQ = torch.randint(len(self.score_KQS), (num_teachers, stop - start), generator=generator)
        return SoftVotes(self.score_KQS[teacher_KQ, index_Q])


def simulate_votes(
    accuracy: float, num_classes: int, num_queries: int, seed: int, error_correlation: float | None = None
) -> VoteModel:
    """A model of teachers that are right ``accuracy`` of the time, by the module's laws.

    Args:
        accuracy: Of one teacher.
        num_classes: Number C of classes.
        num_queries: How many are imagined.
        seed: Seed of what they are like.
        error_correlation: rho; None: by the law, with the ends of what is likely.
    """
    if error_correlation is None:
        expected_correlation = 1 / (1.5 + 10 * (1 - accuracy))
        bounds = (
            _shift_logit(expected_correlation, -_LOGIT_HALF_WIDTH),
            _shift_logit(expected_correlation, _LOGIT_HALF_WIDTH),
        )
        low, high = (simulate_votes(accuracy, num_classes, num_queries, seed, bound) for bound in bounds)
        model = simulate_votes(accuracy, num_classes, num_queries, seed, expected_correlation)
        return replace(model, low_correlation=low, high_correlation=high)
    generator = rng.make_numpy_generator(seed, "plan", "crowd")
    error_rate, num_rivals = 1 - accuracy, num_classes - 1
    concentration = 1 / error_correlation - 1
    right_Q = generator.beta(accuracy * concentration, error_rate * concentration, num_queries)
    wrong_QC = generator.dirichlet(np.full(num_rivals, 4.5 * error_rate / num_rivals), num_queries)
    truth_Q = generator.integers(num_classes, size=num_queries)
    return VoteModel(share_QC=_combine_shares(right_Q, wrong_QC, truth_Q), truth_Q=truth_Q)


def _shift_logit(probability: float, shift: float) -> float:
    """A probability whose logit is moved."""
    return 1 / (1 + (1 / probability - 1) * math.exp(-shift))


def _combine_shares(right_Q: Array, wrong_QR: Array, truth_Q: NDArray[np.int64]) -> Array:
    """Shares [Q, C] of the classes: the right one's, and the C - 1 others' in turn after it."""
    index_Q, share_QC = np.arange(len(truth_Q)), np.empty((len(truth_Q), wrong_QR.shape[1] + 1))
    share_QC[index_Q, truth_Q] = right_Q
    for step in range(wrong_QR.shape[1]):
        share_QC[index_Q, (truth_Q + 1 + step) % share_QC.shape[1]] = (1 - right_Q) * wrong_QR[:, step]
    return share_QC / share_QC.sum(1, keepdims=True)


def fit_vote_model(vote_KQ: NDArray[np.int64], truth_Q: NDArray[np.int64], num_classes: int, seed: int) -> VoteModel:
    """A model of a large ensemble from the votes of a few of its teachers on Q questions.

    The few teachers' own shares would spread too much: part of how they differ from question to question is chance. The
    distribution of the share that is right is estimated from how many of the few are, by maximum likelihood over all
    distributions (Laird 1978), and each question's share is drawn from what its votes then say of it; so are the shares
    of its wrong classes, which are Dirichlet with as many coincidences as wrong votes have.

    Args:
        vote_KQ: Classes that each of the few teachers votes for.
        truth_Q: The right classes.
        num_classes: Number C of classes.
        seed: Seed of what is drawn.
    """
    generator = rng.make_numpy_generator(seed, "plan", "learnt")
    num_teachers, num_rivals = len(vote_KQ), num_classes - 1
    right_KQ = vote_KQ == truth_Q
    right_Q = right_KQ.sum(0)
    posterior_KS = _estimate_right_shares(right_Q, num_teachers)
    grid_index_Q = (generator.random(len(truth_Q))[:, None] > posterior_KS.cumsum(1)[right_Q]).sum(1)
    rivals_QR = (truth_Q[:, None] + 1 + np.arange(num_rivals)) % num_classes
    wrong_QR = (vote_KQ[:, :, None] == rivals_QR).sum(0)
    share_QR = generator.standard_gamma(wrong_QR + _estimate_concentration(wrong_QR) / num_rivals) + 1e-300
    share_Q = _SHARES_S[grid_index_Q.clip(max=len(_SHARES_S) - 1)]
    share_QC = _combine_shares(share_Q, share_QR / share_QR.sum(1, keepdims=True), truth_Q)
    standard_error = math.hypot(_MODEL_STANDARD_ERROR, float(right_KQ.mean(1).std(ddof=1)) / math.sqrt(num_teachers))
    return VoteModel(share_QC=share_QC, truth_Q=truth_Q, num_queries=len(truth_Q), standard_error=standard_error)


def _estimate_right_shares(right_Q: NDArray[np.int64], num_teachers: int) -> Array:
    """Posterior [teachers + 1, S] of the share that is right, by how many of the few teachers are."""
    frequency_K = np.bincount(right_Q, minlength=num_teachers + 1) / len(right_Q)
    likelihood_KS = binom.pmf(np.arange(num_teachers + 1)[:, None], num_teachers, _SHARES_S)
    weight_S = np.full(len(_SHARES_S), 1 / len(_SHARES_S))
    for _ in range(_EM_STEPS):
        posterior_KS = likelihood_KS * weight_S
        posterior_KS /= posterior_KS.sum(1, keepdims=True)
        weight_S = frequency_K @ posterior_KS
    posterior_KS = likelihood_KS * weight_S
    return posterior_KS / posterior_KS.sum(1, keepdims=True)


def _estimate_concentration(wrong_QR: NDArray[np.int64]) -> float:
    """Sum A of the Dirichlet weights of R wrong classes: two wrong votes agree with chance (A/R + 1) / (A + 1)."""
    wrong_Q, num_rivals = wrong_QR.sum(1), wrong_QR.shape[1]
    pairs = float((wrong_Q * (wrong_Q - 1)).sum())
    agreement = float((wrong_QR * (wrong_QR - 1)).sum()) / pairs if pairs else 1.0
    return max((1 - agreement) / max(agreement - 1 / num_rivals, 1e-3), 1e-2)


def train_vote_model(pilot: PilotConfig, recipe: TeacherRecipe, data: Dataset, shard_size: int, seed: int) -> VoteModel:
    """The votes of a small ensemble on ``data``, a public data set, with shards of the planned size.

    Raises:
        ValueError: The data set is too small for such shards.
    """
    num_teachers = min(pilot.teachers, len(data.private) // max(shard_size, 1))
    if shard_size < 1 or num_teachers < MIN_PILOT_TEACHERS:
        raise checks.error(
            "pilot.dataset",
            pilot.dataset,
            f"has {len(data.private)} records, too few for {MIN_PILOT_TEACHERS} teachers of {shard_size} each",
            "Use larger public data, or more teachers.",
        )
    records = replace(select(data.private, np.arange(num_teachers * shard_size)), unit="record")
    short_recipe = replace(recipe, steps=min(recipe.steps, pilot.steps), backend="vectorized")
    trunk = None if short_recipe.start is None else short_recipe.start.learn(data.pool.x, data.spec, seed=seed)
    ensemble = train(
        records, data.spec, ReplaceOne().make_shards(records, num_teachers, seed), short_recipe, seed=seed, trunk=trunk
    )
    query_x = data.pool.x[: pilot.num_queries]
    probability_KQC = ensemble.predict_proba(query_x)
    truth_Q = data.evaluation.pool_y
    assert truth_Q is not None
    vote_KQ = probability_KQC.argmax(-1).numpy()
    model = fit_vote_model(vote_KQ, truth_Q[: len(query_x)].numpy(), data.spec.num_classes, seed)
    return replace(model, score_KQS=SoftVotes.from_probabilities(probability_KQC).score_KQS)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """The forecast of a release.

    Attributes:
        answer_rate: Share of the questions that are answered.
        accuracy: Share of the answers that are right; None: there is no answer.
        interval: 95 % interval of that share on average over questions; None: there is no answer.
        plurality_accuracy: Share of the noiseless pluralities that are right; None: there are none.
        teacher_accuracy: Share of single votes that are right; None: there are none.
        num_queries: Number of questions tried.
    """

    answer_rate: float
    accuracy: float | None
    interval: tuple[float, float] | None
    plurality_accuracy: float | None
    teacher_accuracy: float | None
    num_queries: int


def _compute_interval(
    accuracies: Sequence[float], num_queries: int | None, standard_error: float
) -> tuple[float, float]:
    """Around forecasts under all that is likely, with the error of the model and of so many real questions."""

    def compute_half_width(accuracy: float) -> float:
        return 1.96 * math.sqrt(standard_error**2 + (accuracy * (1 - accuracy) / num_queries if num_queries else 0))

    low, high = min(accuracies), max(accuracies)
    return max(0.0, low - compute_half_width(low)), min(1.0, high + compute_half_width(high))


def simulate_release(
    mechanism: Mechanism,
    vote_model: VoteModel,
    *,
    num_teachers: int,
    num_queries: int,
    rounds: int,
    min_queries: int,
    seed: int,
    soft: bool = False,
) -> Forecast:
    """Put simulated votes through the mechanism itself, in whole releases of ``num_queries`` questions each.

    Whole releases, since some mechanisms stop early. Nothing here is private, so the noise may be seeded, and every
    choice of a table is tried on the same votes.

    Args:
        mechanism: What is tried.
        vote_model: The vote model.
        num_teachers: K.
        num_queries: Number of questions of one release.
        rounds: Number of rounds of one release.
        min_queries: Least number of questions to try.
        seed: Seeds votes and noise.
        soft: Whether it takes the teachers' probabilities, where the model has them.
    """
    size = min(num_queries, MAX_PILOT_QUERIES)
    releases = math.ceil(min_queries / size)

    def simulate(model: VoteModel) -> tuple[float, float | None, Votes, NDArray[np.int64]]:
        """Share answered, share right of it, and what was asked."""
        votes, truth_Q = model.draw_votes(num_teachers, releases * size, seed)
        kind = getattr(mechanism, "noise", "torch")
        noise = DryRunNoise(kind, rng.derive_seed(seed, "plan", "noise") if kind == "torch" else None)
        answer_rate = accuracy = 0
        for start in range(0, releases * size, size):
            query_votes: Votes | SoftVotes = votes.select(torch.arange(start, start + size))
            if soft and model.score_KQS is not None:
                query_votes = model.draw_soft_votes(num_teachers, start, start + size, seed)
            label_Q = mechanism.release(
                query_votes, noise, MechanismContext(num_queries=num_queries, rounds=rounds)
            ).label_Q.numpy()
            answer_rate += int((label_Q >= 0).sum())
            accuracy += int((label_Q == truth_Q[start : start + len(label_Q)]).sum())
        return answer_rate / (releases * size), accuracy / answer_rate if answer_rate else None, votes, truth_Q

    answer_rate, accuracy, votes, truth_Q = simulate(vote_model)
    bounds = [
        simulate(model)[1] for model in (vote_model.low_correlation, vote_model.high_correlation) if model is not None
    ]
    accuracies = [value for value in (accuracy, *bounds) if value is not None]
    return Forecast(
        answer_rate=answer_rate,
        accuracy=accuracy,
        interval=None
        if accuracy is None
        else _compute_interval(accuracies, vote_model.num_queries, vote_model.standard_error),
        plurality_accuracy=float((votes.compute_plurality().numpy() == truth_Q).mean()),
        teacher_accuracy=vote_model.teacher_accuracy,
        num_queries=releases * size,
    )


def forecast_gradients(
    mechanism: Any, method: Any, data: Dataset, *, num_records: int, build_encoder: EncoderBuilder, seed: int
) -> Forecast:
    """Forecast a method that releases a model: fit it to ``data``, a public data set, as ``num_records`` records would.

    Where there are fewer, the noise is less in proportion: a step divides both by how many there are. So what is
    forecast is one round, with the chance of fewer records.

    Args:
        mechanism: Answers through noise; its sigma is of sums over records.
        method: ``RecordMethod`` with a declared ``num_records``.
        data: A public data set in place of the private one.
        num_records: Number of records that is planned for.
        build_encoder: Makes an encoder of its public points.
        seed: Seeds the noise.
    """
    records = select(data.private, np.arange(min(num_records, len(data.private))))
    records = replace(records, unit="record")
    proxy_dataset = replace(data, private=records)
    partition = AddRemove() if mechanism.adjacency == "add_remove" else ReplaceOne()
    shards = partition.make_shards(records, 1, seed)
    gradient_inputs = replace(method, size=len(records)).build_sensitive(
        proxy_dataset, shards, encoder=build_encoder(data)
    )
    scaled_mechanism = replace(mechanism, sigma=mechanism.sigma * len(records) / num_records)
    noise = DryRunNoise(mechanism.noise, rng.derive_seed(seed, "plan", "noise"))
    label_Q = scaled_mechanism.release(
        gradient_inputs, noise, MechanismContext(num_queries=len(gradient_inputs))
    ).label_Q
    truth_Q = data.evaluation.pool_y
    assert truth_Q is not None
    accuracy = float((label_Q == truth_Q).double().mean())
    return Forecast(
        answer_rate=1.0,
        accuracy=accuracy,
        interval=_compute_interval([accuracy], len(gradient_inputs), _MODEL_STANDARD_ERROR),
        plurality_accuracy=None,
        teacher_accuracy=None,
        num_queries=len(gradient_inputs),
    )
