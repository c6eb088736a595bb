"""Trained teachers: their predictions do not depend on batches or threads, and every teacher has one vote."""

import pytest
import torch

from pate_torch import networks
from pate_torch.privacy.sensitive import SoftVotes
from pate_torch.teachers import ensemble as ensemble_module
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.training import train
from tests.teachers.teacher_world import even_shards, recipe, records, spec

X = records(50).x


@pytest.fixture(scope="module")
def ensemble():
    return train(records(50), spec(), even_shards(24, 2), recipe(steps=4), seed=0)


def test_predictions_are_those_of_each_module_in_every_batch_size(ensemble, monkeypatch):
    whole = ensemble.predict(X)
    monkeypatch.setattr(ensemble_module, "CPU_POINTS", 7)
    assert torch.equal(whole, ensemble.predict(X))
    for k in range(len(ensemble)):
        module = networks.rebuild(ensemble.network)
        module.load_state_dict({name: p[k] for name, p in ensemble.params.items()})
        logits = module(spec().normalize(X))
        assert torch.equal(whole[k], logits.argmax(1))
        torch.testing.assert_close(ensemble.predict_proba(X)[k], logits.softmax(1))


def test_probabilities_do_not_depend_on_the_addresses_of_the_parameters():
    """Views of a file start at any multiple of 4 bytes; on some processors, products of few classes round by it."""
    ensemble = train(records(24, 3), spec(3), even_shards(8, 3), recipe(network="logistic", options={}), seed=0)
    whole = ensemble.predict_proba(X)
    for offset in range(1, 16, 2):
        buffers = {name: torch.empty(p.numel() + offset) for name, p in ensemble.params.items()}
        shifted = {name: buffers[name][offset:].view_as(p).copy_(p) for name, p in ensemble.params.items()}
        moved = TeacherEnsemble(ensemble.network, [shifted], ensemble.trained_K, spec(3))
        assert torch.equal(moved.predict_proba(X), whole)


def test_threads_give_the_same_predictions_and_are_left_as_they_were(ensemble):
    one, seen = ensemble.predict(X), []
    try:
        torch.set_num_threads(3)
        three = ensemble.predict(X, progress=lambda done, _: seen.append(done))
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(1)
    assert torch.equal(one, three) and seen == [8, 16, 24]


def test_a_diverged_teacher_still_votes_once(ensemble):
    params = {name: p.clone() for name, p in ensemble.params.items()}
    next(iter(params.values()))[1] = float("nan")
    diverged = TeacherEnsemble(ensemble.network, [params], ensemble.trained_K, spec())
    assert not diverged.predict(X)[1].any()
    assert torch.equal(diverged.count_votes(X).counts_QC.sum(1).long(), torch.full((50,), 24))
    untrained = TeacherEnsemble(ensemble.network, [ensemble.params], torch.zeros(24, dtype=torch.bool), spec())
    assert untrained.predict_proba(X)[..., 0].eq(1).all()


@pytest.mark.parametrize("bins", [2, 7])
def test_probabilities_are_counted_in_parts_as_all_at_once(ensemble, bins, monkeypatch):
    trained_K = torch.arange(24) != 5
    ensemble = TeacherEnsemble(ensemble.network, [ensemble.params], trained_K, spec())
    whole = SoftVotes.from_probabilities(ensemble.predict_proba(X), bins)  # the slow twin, [K, Q, C] at once
    sizes, count_bins = [], ensemble_module.count_bins
    spy = lambda scores, bins: (sizes.append(scores.shape), count_bins(scores, bins))[1]  # noqa: E731
    monkeypatch.setattr(ensemble_module, "count_bins", spy)
    monkeypatch.setattr(ensemble_module, "CPU_POINTS", 7)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        parts = ensemble.tally_probabilities(X, bins)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(parts.counts_QSV.long(), whole.counts_QSV)
    assert torch.equal(parts.shifted_QSW.long(), whole.shifted_QSW)
    assert parts.num_teachers == 24 and max(k * q for k, q, _ in sizes) == 8 * 7  # never all probabilities
