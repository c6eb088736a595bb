"""Votes to try a plan on: simulated from a guess, or those of a small ensemble on public data. Never private votes.

The guess is a public number, the accuracy of one teacher. The rest of the model was measured once on small ensembles
(digits, printed characters and MNIST, shards of 11 to 500 records, ten classes) as a function of the teachers' mean
error e:

- How much questions differ: the share of teachers that are right is Beta with a + b = 0.5 + 10 e. The better the
  teachers, the more the errors gather on a few hard questions.
- Where the wrong votes go: shares of the other classes are Dirichlet with weights 4.5 e / (C - 1), so mostly to one
  rival. Spreading them evenly would make every plurality look safe.
- Smaller shards: e grows as K^0.5 (measured exponents: 0.5 on MNIST, 0.6 on digits, 0.8 on characters).

The guess knows no probabilities: a mechanism of soft labels is then tried on votes, scores of 0 and 1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from pate_torch.core import checks, rng
from pate_torch.data.partition import AddRemove, ReplaceOne
from pate_torch.noise.source import Rehearsal
from pate_torch.protocols import Mechanism
from pate_torch.sensitive import SoftVotes, Votes
from pate_torch.teachers.training import TeacherRecipe, train
from pate_torch.types import Context, Dataset, PrivateData

Array = NDArray[np.float64]
Encoder = Callable[[Dataset], nn.Module | None]
"""Features learnt from a data set's public points; None: the points as they are."""

PUBLIC = ("cifar10", "digits", "fashion_mnist", "mnist", "svhn")
"""Data sets that are known to be public."""

MOST_QUESTIONS = 50_000
FEWEST_TEACHERS = 4


@dataclass(frozen=True, kw_only=True)
class Pilot:
    """How the votes to try plans on are made.

    Attributes:
        on: A public data set, by the name that ``dataset=`` has, on which a small ensemble is trained; None simulates
            votes.
        teacher_accuracy: The guess, for an ensemble of ``at_teachers``.
        at_teachers: None: the number of teachers given, or recommended.
        exponent: How fast a teacher's error grows with K.
        num_classes: Number of classes, where the data set declares none.
        questions: Number of questions tried.
        teachers: Number of teachers of the small ensemble.
        steps: Training steps of each of them.
    """

    on: str | None = None
    teacher_accuracy: float = 0.8
    at_teachers: int | None = None
    exponent: float = 0.5
    num_classes: int | None = None
    questions: int = 2000
    teachers: int = 16
    steps: int = 300

    def __post_init__(self) -> None:
        if self.on is not None:
            checks.text("pilot.on", self.on)
        checks.between("pilot.teacher_accuracy", self.teacher_accuracy, 0, 1, open_=True)
        checks.between("pilot.exponent", self.exponent, 0, 2)
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
    """

    share_QC: Array
    truth_Q: NDArray[np.int64]
    score_KQS: torch.Tensor | None = None

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
        counts_QC = rng.numpy_stream(seed, "plan", "votes").multinomial(num_teachers, self.share_QC[index_Q])
        return Votes(torch.from_numpy(counts_QC.astype(np.int64)), num_teachers), self.truth_Q[index_Q]

    def ask_soft(self, num_teachers: int, start: int, stop: int, seed: int) -> SoftVotes:
        """Scores of so many teachers, drawn anew from the ensemble's for each of the questions ``ask`` has there."""
        assert self.score_KQS is not None
        index_Q = torch.arange(start, stop) % len(self.truth_Q)
        draw = rng.torch_stream(seed, "plan", "scores", start)
        drawn_KQ = torch.randint(len(self.score_KQS), (num_teachers, stop - start), generator=draw)
        return SoftVotes(self.score_KQS[drawn_KQ, index_Q])


def simulate_votes(accuracy: float, num_classes: int, questions: int, seed: int) -> VoteModel:
    """A model of teachers that are right ``accuracy`` of the time, by the module's two laws."""
    generator = rng.numpy_stream(seed, "plan", "crowd")
    error, others = 1 - accuracy, num_classes - 1
    spread = 0.5 + 10 * error
    right_Q = generator.beta(accuracy * spread, error * spread, questions)
    wrong_QC = generator.dirichlet(np.full(others, 4.5 * error / others), questions)
    truth_Q = generator.integers(num_classes, size=questions)
    share_QC = np.empty((questions, num_classes))
    every = np.arange(questions)
    share_QC[every, truth_Q] = right_Q
    for step in range(others):
        share_QC[every, (truth_Q + 1 + step) % num_classes] = (1 - right_Q) * wrong_QC[:, step]
    return VoteModel(share_QC=share_QC / share_QC.sum(1, keepdims=True), truth_Q=truth_Q)


def trained(pilot: Pilot, recipe: TeacherRecipe, data: Dataset, shard: int, seed: int) -> VoteModel:
    """The votes of a small ensemble on ``data``, a public data set, with shards of the planned size.

    Raises:
        ValueError: The data set is too small for such shards.
    """
    teachers = min(pilot.teachers, len(data.private) // max(shard, 1))
    if shard < 1 or teachers < FEWEST_TEACHERS:
        raise checks.fail(
            "pilot.on",
            pilot.on,
            f"has {len(data.private)} records, too few for {FEWEST_TEACHERS} teachers of {shard} each",
            "Use larger public data, or more teachers.",
        )
    part = slice(teachers * shard)
    records = PrivateData(data.private.x[part], data.private.y[part], data.private.unit_id[part])
    short = replace(recipe, steps=min(recipe.steps, pilot.steps), backend="vectorised")
    trunk = None if short.start is None else short.start.learn(data.pool.x, data.spec, seed=seed)
    ensemble = train(records, data.spec, ReplaceOne().shards(records, teachers, seed), short, seed=seed, trunk=trunk)
    asked = data.pool.x[: pilot.questions]
    votes, scores = ensemble.votes(asked), SoftVotes.of(ensemble.probabilities(asked))
    truth_Q = data.evaluation.pool_y
    assert truth_Q is not None
    # Drawing K votes from the few teachers' shares keeps their accuracy, and what they confuse.
    return VoteModel(
        share_QC=votes.counts_QC.double().numpy() / teachers,
        truth_Q=truth_Q[: len(votes)].numpy(),
        score_KQS=scores.score_KQS,
    )


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The forecast of a release.

    Attributes:
        answered: Share of the questions that are answered.
        right: Share of the answers that are right; None: there is no answer.
        plurality: Share of the noiseless pluralities that are right; None: there are none.
        teacher: Share of single votes that are right; None: there are none.
        questions: Number of questions tried.
    """

    answered: float
    right: float | None
    plurality: float | None
    teacher: float | None
    questions: int


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
    votes, truth_Q = crowd.ask(num_teachers, releases * size, seed)
    kind = getattr(mechanism, "noise", "torch")
    noise = Rehearsal(kind, rng.derive(seed, "plan", "noise") if kind == "torch" else None)
    answered = right = 0
    for start in range(0, releases * size, size):
        asked: Votes | SoftVotes = votes.take(torch.arange(start, start + size))
        if soft and crowd.score_KQS is not None:
            asked = crowd.ask_soft(num_teachers, start, start + size, seed)
        label_Q = mechanism.release(asked, noise, Context(num_queries=num_queries, rounds=rounds)).label_Q.numpy()
        answered += int((label_Q >= 0).sum())
        right += int((label_Q == truth_Q[start : start + len(label_Q)]).sum())
    return Outcome(
        answered=answered / (releases * size),
        right=right / answered if answered else None,
        plurality=float((votes.plurality().numpy() == truth_Q).mean()),
        teacher=crowd.teacher_accuracy,
        questions=releases * size,
    )


def follow(mechanism: Any, voters: Any, data: Dataset, *, size: int, features: Encoder, seed: int) -> Outcome:
    """Forecast voters that release a model: fit it to ``data``, a public data set, as ``size`` records would.

    Where there are fewer, the noise is less in proportion: a step divides both by how many there are. So what is
    forecast is one round, with the chance of fewer records.

    Args:
        mechanism: Answers through noise; its sigma is of sums over records.
        voters: ``RecordVoters`` with a declared ``size``.
        data: A public data set in place of the private one.
        size: Number of records that is planned for.
        features: Makes an encoder of its public points.
        seed: Seeds the noise.
    """
    part = slice(min(size, len(data.private)))
    records = PrivateData(data.private.x[part], data.private.y[part], data.private.unit_id[part])
    stand_in = replace(data, private=records)
    partition = AddRemove() if mechanism.adjacency == "add_remove" else ReplaceOne()
    shards = partition.shards(records, 1, seed)
    asked = replace(voters, size=len(records)).ask(stand_in, shards, encoder=features(data))
    scaled = replace(mechanism, sigma=mechanism.sigma * len(records) / size)
    noise = Rehearsal(mechanism.noise, rng.derive(seed, "plan", "noise"))
    label_Q = scaled.release(asked, noise, Context(num_queries=len(asked))).label_Q
    truth_Q = data.evaluation.pool_y
    assert truth_Q is not None
    right = float((label_Q == truth_Q).double().mean())
    return Outcome(answered=1.0, right=right, plurality=None, teacher=None, questions=len(asked))
