"""A diagnosis against learners whose learning curve, stability and vote are known."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.planning import diagnosis, pilot
from pate_torch.planning.diagnosis import XI, compute_margin_curve, diagnose_shards, explain_theory, format_shards
from pate_torch.planning.pilot import Pilot, PilotConfig
from pate_torch.privacy.records import Shards
from pate_torch.privacy.sensitive import Votes
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.training import train
from tests.tensor_data import Tensors

RIDGE = TeacherRecipe(network="logistic", optimizer="ridge", weight_decay=0.1, steps=1)


def teachers(count: int, recipe: TeacherRecipe = RIDGE) -> TeacherVotes:
    return TeacherVotes(num_teachers=count, mechanism=GNMax(sigma=1.0), num_queries=10, teacher=recipe)


@dataclass
class Known:
    """A pilot of teachers whose labels [K, Q] are known, and do not change if a record is replaced."""

    label_KQ: torch.Tensor
    truth_Q: torch.Tensor
    num_records: int = 600

    @property
    def test_points(self):
        return None, self.truth_Q

    def predict(self, method, replaces_one=False):
        return torch.nn.functional.one_hot(self.label_KQ, 2).float()


EXAMPLE_1 = torch.tensor([[1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]])


def test_voting_that_fails_is_told_from_voting_that_wins():
    """LZCW21 Examples 1 and 2: half of 60 teachers are right on each point but the first; seven in ten everywhere."""
    truth = torch.ones(400, dtype=torch.int64)
    fails = diagnose_shards(Known(EXAMPLE_1.repeat(20, 100), truth), teachers(60))
    assert fails.teacher_accuracy[0] == pytest.approx(0.5) and fails.vote_gain[0] == pytest.approx(-0.25)
    assert fails.voting == "harms" and fails.instability == (0, 0) and fails.shard_size == 10
    assert (fails.nu[16], fails.nu[17], fails.nu[49]) == (0, 0.75, 0.75)  # margins of 1/6 on three points in four
    draw = torch.from_numpy((np.random.default_rng(0).random((60, 400)) < 0.7).astype(np.int64))
    wins = diagnose_shards(Known(draw, truth), teachers(60))
    assert wins.vote_gain[0] == pytest.approx(0.3, abs=0.02) and wins.voting == "helps"
    alike = diagnose_shards(Known(draw[:1].repeat(60, 1), truth), teachers(60))
    assert alike.vote_gain[0] == 0 and alike.voting == "same"
    assert "Voting harms here" in explain_theory(fails, 10.0, 20, 1.0, 1e-5)[0]
    assert "Voting" not in explain_theory(alike, 10.0, 1, 1.0, 1e-5)[0]


def test_the_margin_curve_is_of_small_margins():
    """Definition 17 as corrected: nu(xi) grows with xi, and unanimous votes have nu = 0 below one half."""
    votes = Votes(torch.tensor([[0, 10], [5, 5], [10, 0], [3, 7]]), 10)
    np.testing.assert_allclose(compute_margin_curve(votes, np.array([0.0, 0.19, 0.2, 0.5])), [0.25, 0.25, 0.5, 1])
    assert compute_margin_curve(Votes(torch.tensor([[9, 0, 0]]), 9), XI).max() == 0


@pytest.mark.slow(reason="statistical audit: 400 intervals")
def test_the_interval_of_a_teachers_accuracy_holds_as_often_as_it_says():
    """Teachers differ, and so do points. Of 400 intervals 95 % hold; those that forget the points hold in far fewer."""
    draw, held, forgetful = np.random.default_rng(1), 0, 0
    for _ in range(400):
        probability_KQ = np.clip(0.7 + draw.normal(0, 0.05, (20, 1)) + draw.normal(0, 0.12, (1, 80)), 0, 1)
        right_KQ = torch.from_numpy((draw.random((20, 80)) < probability_KQ).astype(float))
        value, half_width = diagnosis._estimate(right_KQ.mean(1), right_KQ.mean(0))
        held += abs(value - 0.7) <= half_width
        forgetful += abs(value - 0.7) <= diagnosis._estimate(right_KQ.mean(1))[1]
    assert 0.92 <= held / 400 <= 0.995 and forgetful / 400 < 0.9


def coins(num_records: int) -> Pilot:
    """Public records that are all alike, and whose labels are fair coins."""
    y = torch.from_numpy(np.random.default_rng(2).integers(0, 2, num_records))
    parts = {"pool_x": torch.ones(20, 2), "pool_y": y[:20], "test_x": torch.ones(5, 2), "test_y": y[:5]}
    data = Tensors(name="coins", class_names=2, x=torch.ones(num_records, 2), y=y, **parts).load()
    return Pilot(PilotConfig(num_queries=100, teachers=256), data, num_records, seed=0)


def test_the_stability_of_a_mean_is_its_closed_form():
    """Logistic regression on records that are all alike predicts their mean label, which moves by (y - y')/n."""
    n = 4
    options = {"optimizer": "sgd", "momentum": 0.0, "label_smoothing": 0.0, "schedule": "constant"}
    recipe = TeacherRecipe(network="logistic", batch_size=n, steps=50, learning_rate=2.0, **options)
    found = diagnose_shards(coins(256 * n), teachers(256, recipe))
    exact = 2 * 0.25 / n**2
    value, half_width = found.instability
    assert found.num_tried == 256 and half_width < 0.2 * exact
    assert value == pytest.approx(exact, abs=2 * half_width)
    assert abs(value - exact * (n / (n - 1)) ** 2) > 2 * half_width  # one record fewer would be told apart


def sorted_clouds() -> Pilot:
    """Two clouds, the records of one after those of the other, as in a file that is sorted by class."""
    generator = torch.Generator().manual_seed(3)
    y = torch.arange(900) % 2
    x = torch.randn(900, 3, generator=generator) + 0.8 * y[:, None]
    order = 300 + y[300:].argsort()
    parts = {"pool_x": x[:200], "pool_y": y[:200], "test_x": x[200:300], "test_y": y[200:300]}
    data = Tensors(name="clouds", class_names=2, x=x[order], y=y[order], **parts).load()
    return Pilot(PilotConfig(num_queries=300, teachers=20), data, 1200, seed=0)


def test_the_learning_curve_is_that_of_a_loop_over_teachers(monkeypatch):
    """Each teacher alone, from the records of its shard: the same accuracy, vote and change by one record."""
    calls = []
    spy = lambda records, spec, shards, *rest, **named: (  # noqa: E731
        calls.append((records, spec, shards)) or train(records, spec, shards, *rest, **named)
    )
    monkeypatch.setattr(pilot, "train", spy)
    source, curve = sorted_clouds(), []
    for count in (40, 240):
        found = diagnose_shards(source, teachers(count))
        loops = []
        for records, spec, shards in calls[-2:]:
            assert shards.index_KS.shape == (20, 1200 // count)
            assert count == 240 or len(set(records.y[shards.index_KS[0]].tolist())) == 2  # a sorted file is shuffled
            alone = []
            for row in shards.index_KS:
                teacher = train(records, spec, Shards(row[None], row[None] >= 0, "replace_one"), RIDGE, seed=0)
                alone.append(teacher.predict_proba(source.test_points[0])[0])
            loops.append(torch.stack(alone))
        right_KQ = loops[0].argmax(-1) == source.test_points[1]
        vote_Q = loops[0].argmax(-1).double().mean(0) > 0.5
        assert found.teacher_accuracy[0] == pytest.approx(right_KQ.double().mean().item(), abs=1e-3)
        gain = (vote_Q == source.test_points[1]).double().mean() - right_KQ.double().mean()
        assert found.vote_gain[0] == pytest.approx(gain.item(), abs=2e-3)
        change = (loops[0] - loops[1])[..., 1].square().mean()
        assert found.instability[0] == pytest.approx(change.item(), rel=1e-3)
        before, after = (call[2].index_KS.tolist() for call in calls[-2:])
        assert {len(set(a) & set(b)) for a, b in zip(before, after, strict=True)} == {1200 // count - 1}
        curve.append(found.teacher_accuracy[0])
    assert curve[0] > curve[1] > 0.5


def test_the_table_keeps_within_80_columns_and_coins_are_promised_no_answer():
    """All points are coins: every query may fail, so no number of teachers is enough."""
    coin_KQ = torch.arange(2)[:, None].repeat(30, 50)
    coin = diagnose_shards(Known(coin_KQ, torch.ones(50, dtype=torch.int64)), teachers(60))
    assert coin.nu[1] == 1
    assert "promises no answer" in explain_theory(coin, None, 20, 1.0, 1e-5)[-1]
    wide = {"num_teachers": 100_000, "shard_size": 12_345, "teacher_accuracy": (1.0, 0.1234)}
    lines = format_shards((coin, replace(coin, **wide, vote_gain=(-0.5, 0.123))))
    assert max(map(len, lines)) <= 80 and "60     10" in lines[3]
