"""The study of active queries to the sparse vector: its teachers, its failures, and the strategy that was tried."""

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from benchmarks.stable_questions import QUESTIONS, lost, tally
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, DataSpec, MechanismContext
from pate_torch.privacy.sensitive import Votes

SPEC = DataSpec(name="s", num_classes=2, input_shape=(2,), class_names=("a", "b"), mean=(0.0, 0.0), std=(1.0, 1.0))


def test_teachers_are_logistic_regressions():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 6, generator=generator)
    y = (x[:, 0] + 0.7 * torch.randn(300, generator=generator) > 0.4).long()
    ask = torch.randn(50, 6, generator=generator)
    votes = tally(x, y, ask, teachers=20)
    ones = sum(LogisticRegression().fit(*shard).predict(ask) for shard in zip(x.split(15), y.split(15), strict=True))
    # The intercept's penalty, 1e-3, may move a point that lies on a boundary.
    moved = np.abs(votes.counts_QC[:, 1].numpy() - ones)
    assert moved.max() <= 1 and (moved == 0).mean() > 0.9


@pytest.mark.slow(reason="statistical audit: 100,000 draws")
def test_the_chance_of_a_failure_is_the_mechanism_s():
    mechanism = SparseVector(epsilon=1.0, delta=1e-5, max_failures=1)
    ones = [500, 565, 570, 575, 640]
    votes = Votes(torch.tensor([[1000 - count, count] for count in ones]), 1000)
    context = MechanismContext(num_queries=QUESTIONS)
    for place, chance in enumerate(lost(votes, mechanism, draws=100_000)):
        one = votes.select(torch.tensor([place]))
        failed = [int(mechanism.release(one, DryRunNoise(), context).label_Q[0]) == NO_ANSWER for _ in range(1000)]
        assert abs(np.mean(failed) - chance) < 5 * 0.5 / 1000**0.5
    assert lost(votes, mechanism)[0] > 0.99 and lost(votes, mechanism)[-1] < 0.01
