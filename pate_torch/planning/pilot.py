"""Votes to try a plan on: simulated from a guess, or those of a small ensemble on public data. Never private votes.

Teachers share mistakes: some questions are hard for all. Whether one teacher is right on a question and whether another
is have a correlation rho (``pilot.shared``); rho = 1/(a + b + 1) where the share of teachers that are right is Beta(a,
b). Where the pilot is a small ensemble, the distribution of that share is learnt from its votes (``learnt``).

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
from pate_torch.data.partition import AddRemove, ReplaceOne
from pate_torch.noise.source import DryRunNoise
from pate_torch.protocols import Mechanism
from pate_torch.sensitive import SoftVotes, Votes
from pate_torch.teachers.training import TeacherRecipe, train
from pate_torch.types import Dataset, MechanismContext, PrivateData

Array = NDArray[np.float64]
Encoder = Callable[[Dataset], nn.Module | None]
"""Features learnt from a data set's public points; None: the points as they are."""

PUBLIC = ("cifar10", "digits", "fashion_mnist", "mnist", "svhn")
"""Data sets that are known to be public."""

MOST_QUESTIONS = 50_000
FEWEST_TEACHERS = 4

_SPREAD = 1.36
"""Of the logit of rho around the law, for 95 % of the ensembles."""
_MODEL_ERROR = 0.004
"""Standard error of a forecast learnt from many teachers and many questions. Measured, as the next, on ensembles of
tables, digits and news (docs/experiments/forecasts.md)."""
_STEPS = 40
"""Of expectation maximization; stopped there the estimate is smooth."""
_SHARES_S = np.linspace(0.005, 0.995, 100)


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """How the votes to try plans on are made.

    Attributes:
        on: A public data set, by the name that ``dataset=`` has, on which a small ensemble is trained; None simulates
            votes.
        teacher_accuracy: The guess, for an ensemble of ``at_teachers``.
        at_teachers: None: the number of teachers given, or recommended.
        exponent: How fast a teacher's error grows with K.
        shared: Correlation rho of two teachers' being right on a question, of a guess; None: 1/(1.5 + 10 e) and, for
            the interval, what ensembles with such an error e have had.
        num_classes: Number of classes, where the data set declares none.
        questions: Number of questions tried.
        teachers: Number of teachers of the small ensemble.
        steps: Training steps of each of them.
    """

    on: str | None = None
    teacher_accuracy: float = 0.8
    at_teachers: int | None = None
    exponent: float = 0.5
    shared: float | None = None
    num_classes: int | None = None
    questions: int = 2000
    teachers: int = 32
    steps: int = 300

    def __post_init__(self) -> None:
        if self.on is not None:
            checks.nonempty_string("pilot.on", self.on)
        checks.between("pilot.teacher_accuracy", self.teacher_accuracy, 0, 1, exclusive=True)
        checks.between("pilot.exponent", self.exponent, 0, 2)
        if self.shared is not None:
            checks.between("pilot.shared", self.shared, 0, 1, exclusive=True)
            if self.on is not None:
                raise checks.error("pilot.shared", self.shared, "is of a guess; pilot.on measures it", "Omit one.")
        for key, low in (("at_teachers", 1), ("num_classes", 2)):
            if getattr(self, key) is not None:
                checks.integer(f"pilot.{key}", getattr(self, key), low=low)
        checks.integer("pilot.questions", self.questions, low=100, high=MOST_QUESTIONS)
        checks.integer("pilot.teachers", self.teachers, low=FEWEST_TEACHERS)
        checks.integer("pilot.steps", self.steps, low=1)

    def accuracy(self, num_teachers: int, num_classes: int) -> float:
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
        questions: Number of real questions it was learnt from; None: it was imagined.
        error: Standard error of what it foretells beside that of the questions.
        less_shared: The model with fewer shared mistakes, at the end of what is likely; None: this one is certain.
        more_shared: The same with more of them.
    """

    share_QC: Array
    truth_Q: NDArray[np.int64]
    score_KQS: torch.Tensor | None = None
    questions: int | None = None
    error: float = _MODEL_ERROR
    less_shared: VoteModel | None = None
    more_shared: VoteModel | None = None

    @property
    def teacher_accuracy(self) -> float:
        """The accuracy of one teacher, on average."""
        return float(self.share_QC[np.arange(len(self.truth_Q)), self.truth_Q].mean())

    @property
    def num_classes(self) -> int:
        """The number of classes."""
        return self.share_QC.shape[1]

    def ask(self, num_teachers: int, questions: int, seed: int) -> tuple[Votes, NDArray[np.int64]]:
        """Votes of so many teachers on questions taken in turn, and the right classes."""
        index_Q = np.arange(questions) % len(self.truth_Q)
        counts_QC = rng.make_numpy_generator(seed, "plan", "votes").multinomial(num_teachers, self.share_QC[index_Q])
        return Votes(torch.from_numpy(counts_QC.astype(np.int64)), num_teachers), self.truth_Q[index_Q]

    def ask_soft(self, num_teachers: int, start: int, stop: int, seed: int) -> SoftVotes:
        """Scores of so many teachers, drawn anew from the ensemble's for each of the questions ``ask`` has there."""
        assert self.score_KQS is not None
        index_Q = torch.arange(start, stop) % len(self.truth_Q)
        draw = rng.make_torch_generator(seed, "plan", "scores", start)
        drawn_KQ = torch.randint(len(self.score_KQS), (num_teachers, stop - start), generator=draw)
        return SoftVotes(self.score_KQS[drawn_KQ, index_Q])


def simulate_votes(
    accuracy: float, num_classes: int, questions: int, seed: int, shared: float | None = None
) -> VoteModel:
    """A model of teachers that are right ``accuracy`` of the time, by the module's laws.

    Args:
        accuracy: Of one teacher.
        num_classes: Number C of classes.
        questions: How many are imagined.
        seed: Seed of what they are like.
        shared: rho; None: by the law, with the ends of what is likely.
    """
    if shared is None:
        middle = 1 / (1.5 + 10 * (1 - accuracy))
        ends = (_moved(middle, -_SPREAD), _moved(middle, _SPREAD))
        less, more = (simulate_votes(accuracy, num_classes, questions, seed, end) for end in ends)
        model = simulate_votes(accuracy, num_classes, questions, seed, middle)
        return replace(model, less_shared=less, more_shared=more)
    generator = rng.make_numpy_generator(seed, "plan", "crowd")
    error, others = 1 - accuracy, num_classes - 1
    spread = 1 / shared - 1
    right_Q = generator.beta(accuracy * spread, error * spread, questions)
    wrong_QC = generator.dirichlet(np.full(others, 4.5 * error / others), questions)
    truth_Q = generator.integers(num_classes, size=questions)
    return VoteModel(share_QC=_shares(right_Q, wrong_QC, truth_Q), truth_Q=truth_Q)


def _moved(probability: float, by: float) -> float:
    """A probability whose logit is moved."""
    return 1 / (1 + (1 / probability - 1) * math.exp(-by))


def _shares(right_Q: Array, wrong_QR: Array, truth_Q: NDArray[np.int64]) -> Array:
    """Shares [Q, C] of the classes: the right one's, and the C - 1 others' in turn after it."""
    every, share_QC = np.arange(len(truth_Q)), np.empty((len(truth_Q), wrong_QR.shape[1] + 1))
    share_QC[every, truth_Q] = right_Q
    for step in range(wrong_QR.shape[1]):
        share_QC[every, (truth_Q + 1 + step) % share_QC.shape[1]] = (1 - right_Q) * wrong_QR[:, step]
    return share_QC / share_QC.sum(1, keepdims=True)


def learnt(said_KQ: NDArray[np.int64], truth_Q: NDArray[np.int64], num_classes: int, seed: int) -> VoteModel:
    """A model of a large ensemble from the votes of a few of its teachers on Q questions.

    The few teachers' own shares would spread too much: part of how they differ from question to question is chance. The
    distribution of the share that is right is estimated from how many of the few are, by maximum likelihood over all
    distributions (Laird 1978), and each question's share is drawn from what its votes then say of it; so are the shares
    of its wrong classes, which are Dirichlet with as many coincidences as wrong votes have.

    Args:
        said_KQ: Classes that each of the few teachers votes for.
        truth_Q: The right classes.
        num_classes: Number C of classes.
        seed: Seed of what is drawn.
    """
    draw = rng.make_numpy_generator(seed, "plan", "learnt")
    teachers, others = len(said_KQ), num_classes - 1
    right_KQ = said_KQ == truth_Q
    right_Q = right_KQ.sum(0)
    posterior_KS = _right_shares(right_Q, teachers)
    place_Q = (draw.random(len(truth_Q))[:, None] > posterior_KS.cumsum(1)[right_Q]).sum(1)
    rivals_QR = (truth_Q[:, None] + 1 + np.arange(others)) % num_classes
    wrong_QR = (said_KQ[:, :, None] == rivals_QR).sum(0)
    share_QR = draw.standard_gamma(wrong_QR + _rivals(wrong_QR) / others) + 1e-300
    share_Q = _SHARES_S[place_Q.clip(max=len(_SHARES_S) - 1)]
    share_QC = _shares(share_Q, share_QR / share_QR.sum(1, keepdims=True), truth_Q)
    error = math.hypot(_MODEL_ERROR, float(right_KQ.mean(1).std(ddof=1)) / math.sqrt(teachers))
    return VoteModel(share_QC=share_QC, truth_Q=truth_Q, questions=len(truth_Q), error=error)


def _right_shares(right_Q: NDArray[np.int64], teachers: int) -> Array:
    """Posterior [teachers + 1, S] of the share that is right, by how many of the few teachers are."""
    frequency_K = np.bincount(right_Q, minlength=teachers + 1) / len(right_Q)
    likelihood_KS = binom.pmf(np.arange(teachers + 1)[:, None], teachers, _SHARES_S)
    weight_S = np.full(len(_SHARES_S), 1 / len(_SHARES_S))
    for _ in range(_STEPS):
        posterior_KS = likelihood_KS * weight_S
        posterior_KS /= posterior_KS.sum(1, keepdims=True)
        weight_S = frequency_K @ posterior_KS
    posterior_KS = likelihood_KS * weight_S
    return posterior_KS / posterior_KS.sum(1, keepdims=True)


def _rivals(wrong_QR: NDArray[np.int64]) -> float:
    """Sum A of the Dirichlet weights of R wrong classes: two wrong votes agree with chance (A/R + 1) / (A + 1)."""
    wrong_Q, others = wrong_QR.sum(1), wrong_QR.shape[1]
    pairs = float((wrong_Q * (wrong_Q - 1)).sum())
    agree = float((wrong_QR * (wrong_QR - 1)).sum()) / pairs if pairs else 1.0
    return max((1 - agree) / max(agree - 1 / others, 1e-3), 1e-2)


def trained(pilot: Pilot, recipe: TeacherRecipe, data: Dataset, shard: int, seed: int) -> VoteModel:
    """The votes of a small ensemble on ``data``, a public data set, with shards of the planned size.

    Raises:
        ValueError: The data set is too small for such shards.
    """
    teachers = min(pilot.teachers, len(data.private) // max(shard, 1))
    if shard < 1 or teachers < FEWEST_TEACHERS:
        raise checks.error(
            "pilot.on",
            pilot.on,
            f"has {len(data.private)} records, too few for {FEWEST_TEACHERS} teachers of {shard} each",
            "Use larger public data, or more teachers.",
        )
    part = slice(teachers * shard)
    records = PrivateData(data.private.x[part], data.private.y[part], data.private.unit_id[part])
    short = replace(recipe, steps=min(recipe.steps, pilot.steps), backend="vectorised")
    trunk = None if short.start is None else short.start.learn(data.pool.x, data.spec, seed=seed)
    ensemble = train(
        records, data.spec, ReplaceOne().make_shards(records, teachers, seed), short, seed=seed, trunk=trunk
    )
    asked = data.pool.x[: pilot.questions]
    probability_KQC = ensemble.predict_proba(asked)
    truth_Q = data.evaluation.pool_y
    assert truth_Q is not None
    said_KQ = probability_KQC.argmax(-1).numpy()
    model = learnt(said_KQ, truth_Q[: len(asked)].numpy(), data.spec.num_classes, seed)
    return replace(model, score_KQS=SoftVotes.from_probabilities(probability_KQC).score_KQS)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The forecast of a release.

    Attributes:
        answered: Share of the questions that are answered.
        right: Share of the answers that are right; None: there is no answer.
        interval: 95 % interval of that share on average over questions; None: there is no answer.
        plurality: Share of the noiseless pluralities that are right; None: there are none.
        teacher: Share of single votes that are right; None: there are none.
        questions: Number of questions tried.
    """

    answered: float
    right: float | None
    interval: tuple[float, float] | None
    plurality: float | None
    teacher: float | None
    questions: int


def _interval(rights: Sequence[float], questions: int | None, error: float) -> tuple[float, float]:
    """Around forecasts under all that is likely, with the error of the model and of so many real questions."""

    def half(right: float) -> float:
        return 1.96 * math.sqrt(error**2 + (right * (1 - right) / questions if questions else 0))

    low, high = min(rights), max(rights)
    return max(0.0, low - half(low)), min(1.0, high + half(high))


def simulate_release(
    mechanism: Mechanism,
    crowd: VoteModel,
    *,
    num_teachers: int,
    num_queries: int,
    rounds: int,
    at_least: int,
    seed: int,
    soft: bool = False,
) -> Outcome:
    """Put simulated votes through the mechanism itself, in whole releases of ``num_queries`` questions each.

    Whole releases, since some mechanisms stop early. Nothing here is private, so the noise may be seeded, and every
    choice of a table is tried on the same votes.

    Args:
        mechanism: What is tried.
        crowd: The vote model.
        num_teachers: K.
        num_queries: Number of questions of one release.
        rounds: Number of rounds of one release.
        at_least: Least number of questions to try.
        seed: Seeds votes and noise.
        soft: Whether it takes the teachers' probabilities, where the model has them.
    """
    size = min(num_queries, MOST_QUESTIONS)
    releases = math.ceil(at_least / size)

    def tried(model: VoteModel) -> tuple[float, float | None, Votes, NDArray[np.int64]]:
        """Share answered, share right of it, and what was asked."""
        votes, truth_Q = model.ask(num_teachers, releases * size, seed)
        kind = getattr(mechanism, "noise", "torch")
        noise = DryRunNoise(kind, rng.derive_seed(seed, "plan", "noise") if kind == "torch" else None)
        answered = right = 0
        for start in range(0, releases * size, size):
            asked: Votes | SoftVotes = votes.select(torch.arange(start, start + size))
            if soft and model.score_KQS is not None:
                asked = model.ask_soft(num_teachers, start, start + size, seed)
            label_Q = mechanism.release(
                asked, noise, MechanismContext(num_queries=num_queries, rounds=rounds)
            ).label_Q.numpy()
            answered += int((label_Q >= 0).sum())
            right += int((label_Q == truth_Q[start : start + len(label_Q)]).sum())
        return answered / (releases * size), right / answered if answered else None, votes, truth_Q

    answered, right, votes, truth_Q = tried(crowd)
    ends = [tried(model)[1] for model in (crowd.less_shared, crowd.more_shared) if model is not None]
    rights = [each for each in (right, *ends) if each is not None]
    return Outcome(
        answered=answered,
        right=right,
        interval=None if right is None else _interval(rights, crowd.questions, crowd.error),
        plurality=float((votes.compute_plurality().numpy() == truth_Q).mean()),
        teacher=crowd.teacher_accuracy,
        questions=releases * size,
    )


def follow(mechanism: Any, voters: Any, data: Dataset, *, size: int, features: Encoder, seed: int) -> Outcome:
    """Forecast voters that release a model: fit it to ``data``, a public data set, as ``size`` records would.

    Where there are fewer, the noise is less in proportion: a step divides both by how many there are. So what is
    forecast is one round, with the chance of fewer records.

    Args:
        mechanism: Answers through noise; its sigma is of sums over records.
        voters: ``RecordMethod`` with a declared ``size``.
        data: A public data set in place of the private one.
        size: Number of records that is planned for.
        features: Makes an encoder of its public points.
        seed: Seeds the noise.
    """
    part = slice(min(size, len(data.private)))
    records = PrivateData(data.private.x[part], data.private.y[part], data.private.unit_id[part])
    stand_in = replace(data, private=records)
    partition = AddRemove() if mechanism.adjacency == "add_remove" else ReplaceOne()
    shards = partition.make_shards(records, 1, seed)
    asked = replace(voters, size=len(records)).ask(stand_in, shards, encoder=features(data))
    scaled = replace(mechanism, sigma=mechanism.sigma * len(records) / size)
    noise = DryRunNoise(mechanism.noise, rng.derive_seed(seed, "plan", "noise"))
    label_Q = scaled.release(asked, noise, MechanismContext(num_queries=len(asked))).label_Q
    truth_Q = data.evaluation.pool_y
    assert truth_Q is not None
    right = float((label_Q == truth_Q).double().mean())
    return Outcome(
        answered=1.0,
        right=right,
        interval=_interval([right], len(asked), _MODEL_ERROR),
        plurality=None,
        teacher=None,
        questions=len(asked),
    )
