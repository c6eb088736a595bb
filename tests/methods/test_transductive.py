"""Transductive votes: what they compute, and that one record still moves one teacher and nobody else's rounding."""

import dataclasses
import json
from functools import partial

import numpy as np
import pytest
import torch

from benchmarks.fonts.glyphs import Glyphs
from pate_torch import pipeline
from pate_torch.core.executors import Workers
from pate_torch.features.neighbors import build_neighbor_graph, compute_coordinates
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.transductive import TransductiveTeacherVotes
from pate_torch.privacy.partition import AddRemove
from pate_torch.privacy.records import PrivateRecords
from pate_torch.teachers import voting
from pate_torch.teachers.groups import VoteRequest
from pate_torch.teachers.training import TeacherRecipe, train
from tests import killed_runs
from tests.run_configs import changed
from tests.teachers.teacher_world import recipe, records, select, shards_of, spec

SHARDS = [*(list(range(k * 9, k * 9 + 9)) for k in range(10)), []]


@pytest.fixture(scope="module")
def pool():
    return records(60, seed=7).x


@pytest.fixture(scope="module")
def ensemble():
    return train(records(120), spec(), shards_of(SHARDS), recipe(), seed=0)


def joint_vote(where, **changes):
    method = TransductiveTeacherVotes(mechanism=GNMax(sigma=1.0), num_teachers=1, **changes)
    return method.build_vote(where)


def jointly(pool, **changes):
    return joint_vote(compute_coordinates(pool, spec()), **changes)


def probabilities(ensemble, pool) -> np.ndarray:
    """[K, P, C], read off the ensemble part by part."""
    out = torch.zeros(len(ensemble), len(pool), 4)

    def hear(rows, parts):
        for start, logits in parts:
            out[rows, start : start + logits.shape[1]] = logits.softmax(2)

    ensemble.forward_batches(pool, hear)
    return out.double().numpy()


@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("alpha", [0.0, 0.5, 0.95])
def test_votes_are_the_closed_form(ensemble, pool, balance, alpha):
    """A twin in NumPy: proportional fitting, then the inverse of 1 - alpha W."""
    weight = build_neighbor_graph(compute_coordinates(pool, spec()), 6).weight_PP.toarray().astype(np.float64)
    expected, lead = [], []
    for p in probabilities(ensemble, pool)[:-1]:
        for _ in range(20 if balance else 0):
            p = p / p.sum(1, keepdims=True)
            p = p * (0.25 / p.mean(0))
        p = p / p.sum(1, keepdims=True)
        carried = (1 - alpha) * np.linalg.solve(np.eye(len(p)) - alpha * weight, p)
        expected.append(carried.argmax(1))
        lead.append(np.diff(np.sort(carried, 1)[:, -2:], axis=1)[:, 0] / carried.max(1))
    found = ensemble.predict(pool, vote=jointly(pool, alpha=alpha, balance=balance))
    clear = np.stack(lead) > 0.01  # what carrying stops short of decides the rest
    assert clear.mean() > 0.8
    assert np.array_equal(found[:-1].numpy()[clear], np.stack(expected)[clear])
    assert (found[-1] == 0).all()  # nobody in that shard


def test_without_alpha_or_balance_they_are_the_plain_votes(ensemble, pool):
    assert torch.equal(ensemble.predict(pool, vote=jointly(pool, alpha=0, balance=False)), ensemble.predict(pool))


def test_one_record_moves_one_teacher(ensemble, pool):
    """Its neighbors in the chunk and on the machine keep every vote."""
    private = records(120)
    x, y = private.x.clone(), private.y.clone()
    x[40], y[40] = 255 - x[40], (y[40] + 1) % 4
    other = train(PrivateRecords.from_rows(x, y, private.unit_id), spec(), shards_of(SHARDS), recipe(), seed=0)
    vote = jointly(pool)
    before, after = ensemble.predict(pool, vote=vote), other.predict(pool, vote=vote)
    assert {int(k) for k in (before != after).any(1).nonzero()} <= {4}
    counts = voting.count_votes(before, 4), voting.count_votes(after, 4)
    assert int((counts[0].counts_QC - counts[1].counts_QC).abs().sum(1).max()) <= 2


def test_a_teacher_votes_alike_in_any_company(ensemble, pool):
    vote = jointly(pool)
    everyone = ensemble.predict(pool, vote=vote)
    for part in (slice(0, None, 2), slice(1, None, 3), slice(5, 6)):
        assert torch.equal(select(ensemble, part).predict(pool, vote=vote), everyone[part])


def test_a_teacher_that_diverged_has_one_vote(ensemble, pool):
    params = {name: p.clone() for name, p in ensemble.params.items()}
    for p in params.values():
        p[3] = torch.nan
    broken = dataclasses.replace(ensemble, groups=[params])
    found, before = (e.predict(pool, vote=jointly(pool)) for e in (broken, ensemble))
    assert (found[3] == 0).all()
    keep = torch.arange(len(ensemble)) != 3
    assert torch.equal(found[keep], before[keep])


def test_teachers_that_vote_where_they_are_trained_give_these_votes(ensemble, pool, tmp_path):
    vote, votes = jointly(pool), []
    counted = voting.count_votes(ensemble.predict(pool, vote=vote), 4).counts_QC
    options = {"executor": Workers(workers=2), "folder": tmp_path, "on_votes": votes.append}
    train(records(120), spec(), shards_of(SHARDS), recipe(), seed=0, request=VoteRequest(pool, vote), **options)
    assert torch.equal(votes[0].counts_QC, counted)


SOURCE = Glyphs(private=400, public=200, test=50, num_classes=4, size=10, rotate=6, shear=4, shift=0.4, noise=0.05)
RECIPE = TeacherRecipe(network="mlp", steps=60, batch_size=8, augment=None, label_smoothing=0.1)


@pytest.fixture(scope="module")
def glyphs():
    data = SOURCE.load()
    shards = AddRemove().make_shards(data.private, 40, seed=0)
    return data, train(data.private, data.spec, shards, RECIPE, seed=0)


def right(prediction_KP, data) -> float:
    return float((prediction_KP == data.evaluation.pool_y).double().mean())


@pytest.mark.slow(reason="statistics of forty teachers")
def test_teachers_of_ten_records_are_right_more_often(glyphs):
    """Shares help by themselves, and so does the graph; over a graph of nonsense teachers are right less often."""
    data, ensemble = glyphs
    place = compute_coordinates(data.pool.x, data.spec)
    mixed = place[torch.randperm(len(place), generator=torch.Generator().manual_seed(0))]

    def accuracy(where, **changes):
        return right(ensemble.predict(data.pool.x, vote=joint_vote(where, **changes)), data)

    plain = right(ensemble.predict(data.pool.x), data)
    assert accuracy(place, alpha=0) > plain + 0.01
    assert accuracy(place, balance=False) > plain + 0.02
    assert accuracy(place) > plain + 0.05
    assert accuracy(mixed, balance=False) < plain - 0.01


@pytest.mark.parametrize(
    "wrong", [{"neighbors": 0}, {"alpha": -0.1}, {"alpha": 1.0}, {"alpha": float("nan")}, {"balance": "yes"}], ids=str
)
def test_bad_choices_name_the_key(wrong):
    with pytest.raises(ValueError, match=f"method.{next(iter(wrong))}"):
        TransductiveTeacherVotes(mechanism=GNMax(sigma=1.0), num_teachers=1, **wrong)


@pytest.fixture
def plan(tmp_path):
    given = {
        "dataset": SOURCE,
        "teacher": RECIPE,
        "mechanism": GNMax(sigma=4.0),
        "method": partial(TransductiveTeacherVotes, num_teachers=40),
    }
    return killed_runs.plan(tmp_path, "first", **given, num_queries=6, delta=1e-5)


def test_a_run_votes_jointly_keeps_those_votes_apart_and_says_so(plan):
    pipeline.run(plan)
    record = json.loads((plan.folder / "release" / "release.json").read_text())
    assert record["voters"] == "teachers_transductive"
    (kept,) = (plan.root / "teachers").glob("[0-9a-f]*/votes/*.safetensors")
    other = changed(plan, folder=plan.folder.parent / "other", method=partial(TeacherVotes, num_teachers=40))
    pipeline.run(other)
    again = json.loads((other.folder / "release" / "release.json").read_text())
    assert again["voters"] == "teachers"
    assert again["teachers_id"] != record["teachers_id"] and again["release_id"] != record["release_id"]
    assert len(list(kept.parent.glob("*.safetensors"))) == 2  # the same teachers, asked otherwise


def test_a_pool_of_one_is_refused_before_anything_is_charged(plan):
    alone = changed(plan, dataset=dataclasses.replace(SOURCE, public=1), num_queries=1)
    with pytest.raises(ValueError, match="method='teachers_transductive': needs at least two public points"):
        pipeline.run(alone)
    assert not (plan.root / "ledger.sqlite").exists()
