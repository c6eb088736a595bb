"""Forecast of labels by a small ensemble that is trained on public data. No private vote is used.

The ensemble is trained on shards of the planned size, and K votes are drawn from its vote shares. A small ensemble is
less accurate than a large ensemble, so the forecast is too low. With 64 teachers, the error is one percentage point if
the noise is an eighth of the votes, and up to seven points without noise (docs/experiments/forecasts.md).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from pate_torch.core import checks, rng
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.partition import ReplaceOne, select
from pate_torch.privacy.records import Dataset, MechanismContext
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.training import train
from pate_torch.teachers.voting import count_votes

MIN_PILOT_TEACHERS, MAX_PILOT_STEPS = 4, 300
MAX_PILOT_QUERIES = 50_000


@dataclass(frozen=True, kw_only=True)
class PilotConfig:
    """Options of a pilot.

    Attributes:
        dataset: Name of a public data set, as for ``dataset=``, or the path (with a dot or a slash) of labeled public
            records of the planned kind. None to run no pilot, or to diagnose the planned benchmark itself.
        num_queries: Smallest number of simulated queries.
        teachers: Largest number of teachers that are trained.
    """

    dataset: str | None = None
    num_queries: int = 2000
    teachers: int = 64

    def __post_init__(self) -> None:
        if self.dataset is not None:
            checks.nonempty_string("pilot.dataset", self.dataset)
        checks.integer("pilot.num_queries", self.num_queries, low=100, high=MAX_PILOT_QUERIES)
        checks.integer("pilot.teachers", self.teachers, low=MIN_PILOT_TEACHERS)


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Forecast of the share of the queries that are answered, and of the accuracy of the answers, None without any."""

    answer_rate: float
    accuracy: float | None


@dataclass(frozen=True)
class Pilot:
    """A public data set on which methods are simulated.

    The private side of ``data`` takes the place of the ``num_records`` planned private records. ``seed`` is that of
    teachers, votes and noise, which all depend on public data only.
    """

    config: PilotConfig
    data: Dataset
    num_records: int
    seed: int
    _predictions: dict[tuple[int, bool], Tensor] = field(default_factory=dict)

    @functools.cached_property
    def test_points(self) -> tuple[Tensor, Tensor]:
        """Points [Q, ...] that no teacher is trained on, and their classes [Q]."""
        evaluation, size = self.data.evaluation, self.config.num_queries
        assert evaluation.pool_y is not None
        x, y = torch.cat([self.data.pool.x[:size], evaluation.x]), torch.cat([evaluation.pool_y[:size], evaluation.y])
        return x[:size], y[:size]

    def forecast(self, method: LabelingMethod) -> Forecast | None:
        """Forecast the labels of the method. Return None for methods without teachers and for soft labels."""
        if not isinstance(method, TeacherVotes) or method.is_soft:  # few teachers fill too few bins of soft labels
            return None
        votes = count_votes(self.predict(method).argmax(-1), self.data.spec.num_classes)
        return simulate_release(method, votes, self.test_points[1], min_queries=self.config.num_queries, seed=self.seed)

    def predict(self, method: TeacherVotes, *, replaces_one: bool = False) -> Tensor:
        """Train a small ensemble on public shards of the planned size, and return its probabilities [K, Q, C].

        With ``replaces_one``, one record of each shard is another record, and the teachers have the same randomness.
        Raise ValueError if there are too few data.
        """
        shard_size = self.num_records // method.num_teachers
        config, data, recipe, key = self.config, self.data, method.teacher, (shard_size, replaces_one)
        if key in self._predictions:
            return self._predictions[key]
        num_teachers = min(config.teachers, method.num_teachers, len(data.private) // max(shard_size, 1))
        if shard_size < 1 or num_teachers < min(MIN_PILOT_TEACHERS, method.num_teachers):
            problem = f"has {len(data.private)} records, too few for {MIN_PILOT_TEACHERS} teachers of {shard_size} each"
            raise checks.error("pilot.dataset", config.dataset, problem, "Use more public data or more teachers.")
        # The records are shuffled, because files are often sorted by class.
        order_N = rng.make_numpy_generator(self.seed, "plan", "records").permutation(len(data.private))
        records = replace(select(data.private, order_N[: num_teachers * shard_size]), unit="record")
        shards = ReplaceOne().make_shards(records, num_teachers, self.seed)
        if replaces_one:
            shards.index_KS[:, 0] = shards.index_KS[:, 0].roll(1)
        recipe = replace(recipe, steps=min(recipe.steps, MAX_PILOT_STEPS))
        trunk = None if recipe.start is None else recipe.start.learn(data.pool.x, data.spec, seed=self.seed)
        ensemble = train(records, data.spec, shards, recipe, seed=self.seed, trunk=trunk)
        self._predictions[key] = ensemble.predict_proba(self.test_points[0])
        return self._predictions[key]


def simulate_release(
    method: TeacherVotes, pilot_votes: Votes, truth_Q: Tensor, *, min_queries: int, seed: int
) -> Forecast:
    """Draw K votes per query from the pilot's vote shares, and answer them by the mechanism.

    Whole releases are simulated, because some mechanisms stop early. No value is private, so continuous noise is
    seeded. Rows of a plan with the same K and the same number of queries have the same votes.
    """
    mechanism, num_teachers, size = method.mechanism, method.num_teachers, min(method.num_queries, MAX_PILOT_QUERIES)
    index_Q = torch.arange(math.ceil(min_queries / size) * size) % len(pilot_votes.counts_QC)
    share_QC = pilot_votes.counts_QC.double().numpy() / pilot_votes.num_teachers
    counts_QC = rng.make_numpy_generator(seed, "plan", "votes").multinomial(num_teachers, share_QC[index_Q])
    votes = Votes(torch.from_numpy(counts_QC), num_teachers)
    noise_seed = rng.derive_seed(seed, "plan", "noise") if mechanism.noise == "torch" else None
    noise, num_answered, num_correct = DryRunNoise(mechanism.noise, noise_seed), 0, 0
    for rows in torch.arange(len(index_Q)).split(size):
        context = MechanismContext(num_queries=method.num_queries, rounds=method.num_rounds)
        label_Q = mechanism.release(votes.select(rows), noise, context).label_Q
        num_answered += int((label_Q >= 0).sum())
        num_correct += int((label_Q == truth_Q[index_Q[rows]][: len(label_Q)]).sum())
    accuracy = num_correct / num_answered if num_answered else None
    return Forecast(answer_rate=num_answered / len(index_Q), accuracy=accuracy)
