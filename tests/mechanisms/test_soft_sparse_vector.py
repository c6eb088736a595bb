"""Soft labels by stability: histograms, scores, and the papers' loop."""

import itertools
import math

import numpy as np
import pytest
import torch

from pate_torch.mechanisms.sparse_vector import compute_instability_distance
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes
from tests.mechanisms.mechanism_forms import both_kinds, halved, soft
from tests.mechanisms.vote_laws import Recorder


@pytest.mark.parametrize("bins", [2, 4, 10])
def test_histograms_count_as_defined(bins):
    rng = np.random.default_rng(0)
    edges = np.arange(2 * bins + 1) / (2 * bins)  # scores on every edge, and between
    scores = rng.choice(np.concatenate([edges, rng.random(20)]), (30, 7))
    votes = SoftVotes(torch.from_numpy(scores)[..., None])
    plain, shifted = np.zeros((7, bins)), np.zeros((7, bins - 1))
    for k, q in itertools.product(range(30), range(7)):
        s = scores[k, q] * bins
        plain[q, min(int(s), bins - 1)] += 1
        for v in range(1, bins):
            shifted[q, v - 1] += v - 0.5 <= s < v + 0.5
    assert votes.compute_histogram(bins).tolist() == plain.tolist()
    assert votes.compute_shifted_histogram(bins).tolist() == shifted.tolist()


def test_soft_distances_have_sensitivity_1_when_a_teacher_changes_all_its_scores():
    rng = np.random.default_rng(1)
    for _ in range(200):
        scores = torch.from_numpy(rng.choice([0.0, 0.1, 0.3, 0.45, 0.7, 1.0], (7, 5)))
        moved = scores.clone()
        moved[rng.integers(7)] = torch.from_numpy(rng.random(5))
        for table in ("compute_histogram", "compute_shifted_histogram"):
            counts = [getattr(SoftVotes(s[..., None]), table)(4) for s in (scores, moved)]
            dist = [compute_instability_distance(c) for c in counts]
            assert (dist[0] - dist[1]).abs().max() <= 1
            differs = counts[0].argmax(1) != counts[1].argmax(1)
            assert not dist[0][differs].any() and not dist[1][differs].any()


def test_released_scores_are_bin_centers():
    mechanism = soft(delta=1e-12)  # which what is split passes with at most
    teachers = 4 * mechanism.compute_scales(6).min_teachers
    scores = torch.tensor([0.1, 0.3, 0.6, 1.0, 0.0, 0.25]).repeat(teachers, 1)
    scores[::2, 5] = 0.2499  # split by an edge of the first bins, together in a shifted one
    answers = mechanism.release(SoftVotes(scores[..., None]), DryRunNoise(), MechanismContext(num_queries=6))
    assert answers.score_QC[:, 1].tolist() == [0.125, 0.375, 0.625, 0.875, 0.125, 0.25]
    assert answers.label_Q.tolist() == [0, 0, 1, 1, 0, 0]
    assert answers.events[0].count == 2  # the first block ended with the first test of the last query


def soft_loop(first, second, noise_1, noise_2, thresholds, plan, max_failures: int, bins: int):
    """BTT18 Algorithm 8 inside Algorithm 6, corrected, query by query (the slow twin)."""
    thresholds = iter(thresholds)
    w_hat, blocks, failures, scores = None, 0, 0, []
    for q in range(len(first)):
        if failures >= max_failures:
            break
        answer = math.nan
        for counts, z, score in (
            (first, noise_1, lambda v: (2 * v + 1) / (2 * bins)),
            (second, noise_2, lambda v: (v + 1) / bins),
        ):
            if failures >= max_failures:
                break
            if w_hat is None:
                w_hat, blocks = plan.threshold + next(thresholds), blocks + 1
            if halved([*counts[q], 0]) + z[q] > w_hat:
                answer = score(counts[q].index(max(counts[q])))
                break
            failures, w_hat = failures + 1, None
        scores.append(answer)
    return scores, blocks


@both_kinds
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("failures", [1, 4, 7])
def test_soft_stability_is_the_papers_loop(noise, seed, failures):
    mechanism = soft(noise=noise, epsilon=12.0, max_failures=failures, bins=3)
    plan = mechanism.compute_scales(30)
    rng = np.random.default_rng(seed)
    teachers = 6 * round(plan.threshold)
    scores = np.zeros((teachers, 30))
    for q in range(30):  # a stable first histogram, a stable shifted one, neither, or one at the threshold
        share = rng.choice([0.02, 0.5, 0.3, 0.3])
        low, high = [(0.1, 0.5), (0.3, 0.4), (0.1, 0.9), (0.5, 0.9)][rng.integers(4)]
        scores[:, q] = np.where(np.arange(teachers) < share * teachers, low, high)
    soft_votes, source = SoftVotes(torch.from_numpy(scores)[..., None]), Recorder(noise)
    answers = mechanism.release(soft_votes, source, MechanismContext(num_queries=30))
    (_, z1), (_, z2), *rest = source.drawn
    expected, blocks = soft_loop(
        soft_votes.compute_histogram(3).tolist(),
        soft_votes.compute_shifted_histogram(3).tolist(),
        z1.tolist(),
        z2.tolist(),
        [float(t) for _, t in rest],
        plan,
        failures,
        3,
    )
    assert np.allclose(answers.score_QC[:, 1].numpy(), expected, equal_nan=True)
    assert answers.events[0].count == blocks == len(rest)
    assert [s != s for s in expected] == (answers.label_Q == NO_ANSWER).tolist()


@pytest.mark.parametrize(
    "scores",
    [[[0.5, math.nan]], [[1.1]], [[-0.1]], [[1]], [0.5], [[]]],
    ids=["nan", "high", "low", "int", "1-D", "empty"],
)
def test_soft_votes_refuse_what_is_not_a_score(scores):
    tensor = torch.tensor(scores) if scores != [[]] else torch.zeros(0, 3)
    with pytest.raises(ValueError, match="soft votes"):
        SoftVotes(tensor)


@both_kinds
@pytest.mark.parametrize("sizes", [[10], [4, 1, 5]], ids=["at once", "in three rounds"])
def test_of_several_classes_every_score_is_asked_about_in_turn(noise, sizes):
    """Ten queries of three classes are thirty scores of the papers' loop, which may end in the middle of a query."""
    mechanism = soft(noise=noise, epsilon=12.0, max_failures=4, bins=3)
    plan = mechanism.compute_scales(10, 3)
    assert plan.threshold > mechanism.compute_scales(10, 2).threshold  # thirty tests, and not ten
    rng = np.random.default_rng(1)
    teachers = 6 * round(plan.threshold)
    share = rng.choice([0.02, 0.02, 0.3], size=(10, 3))
    score = np.where(rng.random((teachers, 10, 3)) < share, 0.1, 0.9)
    votes, source = SoftVotes(torch.from_numpy(score)), Recorder(noise)
    first, second, thresholds, told = [], [], [], []
    for turn, query_Q in enumerate(torch.arange(10).split(sizes)):
        before = len(source.drawn)
        context = MechanismContext(num_queries=10, rounds=len(sizes), round_index=turn)
        told.append(mechanism.release(votes.select(query_Q), source, context))
        tests, shifted, *rest = [tensor.tolist() for _, tensor in source.drawn[before:]]
        first, second, thresholds = first + tests, second + shifted, thresholds + [value for (value,) in rest]
    histograms = votes.compute_histogram(3).tolist(), votes.compute_shifted_histogram(3).tolist()
    expected, blocks = soft_loop(*histograms, first, second, thresholds, plan, 4, 3)
    whole = np.array(expected[: len(expected) // 3 * 3]).reshape(-1, 3)
    assert 0 < len(whole) <= 10 and np.isnan(whole).any()
    assert np.allclose(torch.cat([one.score_QC for one in told]).numpy(), whole, equal_nan=True)
    label_Q = torch.cat([one.label_Q for one in told])
    assert label_Q.tolist() == [NO_ANSWER if np.isnan(row).any() else 2 - int(row[::-1].argmax()) for row in whole]
    assert sum(one.events[0].count for one in told) == blocks


def test_votes_are_scores_of_0_and_1():
    votes = Votes(torch.tensor([[2000, 0, 0], [0, 0, 2000]]), 2000)
    as_scores = SoftVotes(torch.nn.functional.one_hot(torch.tensor([[0, 2]] * 2000), 3).double())
    assert as_scores.compute_histogram(4).tolist() == [
        [0, 0, 0, 2000] if one else [2000, 0, 0, 0] for one in (1, 0, 0, 0, 0, 1)
    ]
    for value in (votes, as_scores):
        answers = soft(epsilon=12.0).release(value, DryRunNoise(), MechanismContext(num_queries=2))
        assert answers.label_Q.tolist() == [0, 2]
        assert answers.score_QC.tolist() == [[0.875, 0.125, 0.125], [0.125, 0.125, 0.875]]


def test_of_two_classes_one_score_is_asked_about():
    with pytest.raises(ValueError, match="second one's score alone"):
        SoftVotes(torch.rand(3, 4, 2))
    assert "tensor" not in repr(SoftVotes(torch.rand(3, 2, 1)))
    assert SoftVotes.from_probabilities(torch.rand(3, 4, 5)).score_KQS.shape == (3, 4, 5)
    assert SoftVotes.from_probabilities(torch.rand(3, 4, 2)).score_KQS.shape == (3, 4, 1)
