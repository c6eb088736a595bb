"""Stability: calibration, the errors of the papers, the loops that are executed, and the law of all answers."""

import itertools
import math

import numpy as np
import pytest
import torch
from scipy import integrate, stats

from pate_torch.accounting.accountant import compute_guarantee as accounted
from pate_torch.accounting.costs import compute_min_teachers
from pate_torch.accounting.events import DeltaEvent, PureDPEvent
from pate_torch.mechanisms.sparse_vector import (
    DistanceToInstability,
    SparseVector,
    compute_instability_distance,
)
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER, MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes
from tests.accounting.exact_divergences import move_one_vote
from tests.mechanisms.mechanism_forms import both_kinds, build, halved, soft
from tests.mechanisms.vote_laws import TINY, Recorder, chi_square, law, sparse_law


def stability(**values) -> SparseVector:
    return SparseVector(**({"epsilon": 1.0, "delta": 1e-5, "max_failures": 20} | values))


def neighbors(teachers: int, classes: int):
    for counts in itertools.product(range(teachers + 1), repeat=classes):
        if sum(counts) == teachers:
            yield from ((counts, moved) for moved in move_one_vote(counts))


PAIRS = list(neighbors(9, 3)) + list(neighbors(12, 2))


def faults(dist) -> set[str]:
    """What is wrong with a distance to instability, by brute force over neighboring votes."""
    found = set()
    for left, right in PAIRS:
        values = [dist(counts) for counts in (left, right)]
        if abs(values[0] - values[1]) > 1:
            found.add("sensitivity above 1")
        if left.index(max(left)) != right.index(max(right)) and any(values):
            found.add("above 0 where the winner differs")
    return found


def test_halved_distance_has_sensitivity_1_and_vanishes_where_the_winner_differs():
    assert faults(halved) == set()
    assert [halved((n, 0)) for n in range(8)] == [0, 0, 0, 1, 1, 2, 2, 3]


def test_printed_distances_are_caught():
    """BTT18 Algorithms 4 and 8 (minus 1) and NB20 Algorithm 5 (without)."""

    def gap(counts) -> int:
        top, second = sorted(counts)[-1:-3:-1]
        return top - second

    both = {"sensitivity above 1", "above 0 where the winner differs"}
    assert faults(lambda counts: max(0, gap(counts) - 1)) == both
    assert faults(gap) == both
    # The examples of docs/reference/papers.md, each of which moves one vote.
    assert [gap(counts) - 1 for counts in ((4, 2), (5, 1))] == [1, 3]
    assert gap((2, 4)) - 1 == 1 and ((2, 4).index(4), (3, 3).index(3)) == (1, 0)
    assert [gap(counts) for counts in ((3, 2), (2, 3))] == [1, 1]


@both_kinds
@pytest.mark.parametrize("epsilon,delta,blocks,tests", [(1.0, 1e-5, 20, 1000), (0.1, 1e-6, 3, 50), (5.0, 0.01, 1, 7)])
def test_calibration_spends_epsilon_and_delta(noise, epsilon, delta, blocks, tests):
    mechanism = stability(epsilon=epsilon, delta=delta, max_failures=blocks, noise=noise)
    scale = mechanism.make_cost(tests).noise_scale
    worst = mechanism.privacy_events(tests, 5)
    assert worst == (PureDPEvent(epsilon=2 / scale, count=blocks), DeltaEvent(delta=delta / 40))
    less_noise = (PureDPEvent(epsilon=2 / (0.999 * scale), count=blocks), worst[1])
    assert accounted(worst, delta).epsilon <= epsilon < accounted(less_noise, delta).epsilon


@pytest.mark.parametrize(("failures", "closed_form"), [(1, 953), (3, 1689), (20, 4529)])
def test_fewer_teachers_are_needed_than_the_closed_form_asks_for(failures, closed_form):
    """At epsilon 1, delta 1e-5, 200 queries; with thresholds and tests bounded apart, the exact cost takes more."""
    exact_cost = {1: 191, 3: 581, 20: 3209}
    needed = stability(max_failures=failures, failure_delta=5e-6).make_cost(200).min_teachers
    assert needed < exact_cost[failures] < closed_form
    assert needed < stability(max_failures=failures).make_cost(200).min_teachers < 1.2 * needed


@both_kinds
def test_unstable_queries_pass_within_their_share_of_delta(noise):
    """P(some query of distance 0 passes), exactly, against the failure probability, here delta/2."""
    for blocks, tests, delta in ((1, 1, 0.1), (2, 6, 0.4), (3, 8, 0.05)):
        terms = {"delta": delta, "failure_delta": delta / 2, "max_failures": blocks}
        plan = stability(epsilon=8.0, **terms, noise=noise).make_cost(tests)
        patterns = sparse_law([0] * tests, plan.threshold, plan.noise_scale, blocks, noise == "discrete")
        bad = sum(p for pattern, p in patterns.items() if any(pattern))
        assert bad <= delta / 2
        assert bad > delta / 200  # not won by a threshold beyond all reason


def test_btt18_algorithm_6_lets_unstable_queries_pass():
    """w = lambda ln(4m/delta) against Lap(2 lambda) noise: bad passes far above delta/2 = 5e-6 at m = 1000."""
    m, delta = 1000, 1e-5
    w = math.log(4 * m / delta)  # lambda = 1

    def none_passes(threshold_noise: float) -> float:
        return stats.laplace.pdf(threshold_noise) * (1 - stats.laplace.sf(w + threshold_noise, scale=2)) ** m

    held = integrate.quad(none_passes, -40, 40, points=[-20, 0, 20], limit=400)[0]
    assert 0.02 < 1 - held < 0.05
    ours = stability(delta=delta, max_failures=1).make_cost(m)
    assert ours.threshold / ours.noise_scale > 1.8 * w  # with 2 lambda, and the moving threshold allowed for


def test_number_of_teachers_is_exact_and_named():
    for w in (0.0, 0.5, 1.0, 41.3, 2408.6):
        needed = compute_min_teachers(w)
        assert halved((needed, 0)) > w >= halved((needed - 1, 0))
    mechanism = stability()
    plan = mechanism.make_cost(1000)
    assert 2000 < plan.min_teachers < 10_000
    with pytest.raises(
        ValueError, match=rf"{plan.min_teachers} .*lambda={plan.noise_scale:.1f} and w={plan.threshold:.1f}"
    ):
        mechanism.check(num_queries=1000, num_teachers=250, num_classes=10)
    mechanism.check(num_queries=1000, num_teachers=plan.min_teachers, num_classes=10)
    single = DistanceToInstability(epsilon=0.1, delta=1e-9)
    with pytest.raises(ValueError, match=str(compute_min_teachers(math.log(1e9) / 0.1))):
        single.check(num_queries=3, num_teachers=250, num_classes=10)


def loop(votes: Votes, tests, thresholds, plan, max_failures: int) -> tuple[list[int], int]:
    """LZCW21 Algorithm 2 as printed, query by query (the slow twin). Answers, and blocks started."""
    thresholds = iter(thresholds)
    w_hat, blocks, failures, answers = plan.threshold + next(thresholds), 1, 0, []
    for q, row in enumerate(votes.counts_QC.tolist()):
        if halved(row) + tests[q] > w_hat:
            answers.append(row.index(max(row)))
            continue
        answers.append(NO_ANSWER)
        failures += 1
        if failures >= max_failures:
            break
        if q + 1 < len(votes):
            w_hat, blocks = plan.threshold + next(thresholds), blocks + 1
    return answers, blocks


def votes_about(threshold: float, queries: int, seed: int) -> Votes:
    rng = np.random.default_rng(seed)
    teachers = 4 * round(threshold) + 100
    rows = []
    for shift in rng.integers(-round(threshold / 4), round(threshold / 2), queries):
        top = teachers // 2 + round(threshold) + int(shift)
        rows.append(np.roll([top, teachers - top, 0], rng.integers(0, 3)))
    rows[0] = np.array([teachers, 0, 0])  # passes for certain
    return Votes(torch.from_numpy(np.stack(rows)), teachers)


@both_kinds
@pytest.mark.parametrize("failures", [1, 2, 20])
def test_stops_at_the_last_failure_allowed_not_after_it(noise, failures):
    """BTT18 loops while failures <= T, its Algorithm 6 allows T + 2."""
    never = {"noise": noise, "max_failures": failures, "delta": 1e-12}  # ties pass with that probability at most
    mechanism = stability(**never)
    votes = Votes(torch.tensor([[10, 10]]).repeat(50, 1), 20)
    source = DryRunNoise(noise)
    answers = mechanism.release(votes, source, MechanismContext(num_queries=50))
    assert answers.label_Q.tolist() == [NO_ANSWER] * failures
    assert answers.events[0].count == failures
    again = mechanism.release(votes, source, MechanismContext(num_queries=50, rounds=2, round_index=1))
    assert len(again.label_Q) == 0 and not any(e.count for e in again.events)
    answers = soft(**never).release(votes, DryRunNoise(noise), MechanismContext(num_queries=50))
    assert answers.events[0].count == failures
    assert len(answers.label_Q) == math.ceil(failures / 2)  # two failures to a query


@both_kinds
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [[60], [1] * 60, [7, 20, 33]], ids=["at once", "one by one", "in three rounds"])
def test_stability_is_the_papers_loop_in_any_rounds(noise, sizes, seed):
    """The papers' loop sees no rounds: a threshold is drawn for a failure, and for nothing else."""
    mechanism = stability(noise=noise, epsilon=10.0, max_failures=5)
    plan = mechanism.make_cost(60)
    votes, source = votes_about(plan.threshold, 60, seed), Recorder(noise)
    labels, tests, thresholds, incurred = [], [], [], ()
    for turn, query_Q in enumerate(torch.arange(60).split(sizes)):
        context, before = MechanismContext(num_queries=60, rounds=len(sizes), round_index=turn), len(source.drawn)
        answers = mechanism.release(votes.select(query_Q), source, context)
        noises = [tensor.tolist() for _, tensor in source.drawn[before:]]
        tests, thresholds = tests + noises[0], thresholds + [value for (value,) in noises[1:]]
        labels, incurred = labels + answers.label_Q.tolist(), incurred + answers.events
    expected, blocks = loop(votes, tests, thresholds, plan, 5)
    assert labels == expected and NO_ANSWER in expected and max(expected) >= 0
    assert sum(e.count for e in incurred if isinstance(e, PureDPEvent)) == blocks == len(thresholds)
    assert sum(e.count for e in incurred if isinstance(e, DeltaEvent)) == 1


def test_a_later_call_without_its_thresholds_is_refused():
    votes = Votes(torch.tensor([[10, 10]]), 20)
    with pytest.raises(ValueError, match="needs the threshold of the first call"):
        stability().release(votes, DryRunNoise(), MechanismContext(num_queries=50, rounds=2, round_index=1))


def test_released_labels_hold_nothing_of_what_came_after_the_stop():
    """A view of the exact labels would be saved with all of them."""
    votes = Votes(torch.tensor([[10, 10]]).repeat(50, 1), 20)
    answers = stability(max_failures=2).release(votes, DryRunNoise(), MechanismContext(num_queries=50))
    assert answers.label_Q.untyped_storage().nbytes() == 8 * len(answers.label_Q)
    answers = soft(max_failures=2).release(votes, DryRunNoise(), MechanismContext(num_queries=50))
    assert answers.score_QC.untyped_storage().nbytes() == 16 * len(answers.score_QC)


@pytest.mark.parametrize("noise", ["torch", "discrete"])
def test_single_stable_passes_as_often_as_it_should(noise):
    mechanism = build("single_stable", noise, epsilon=0.5, delta=1e-3)
    size, distance = 40_000, 11
    votes = Votes(torch.tensor([[50 + distance + 1, 50 - distance - 1]]).repeat(size, 1), 100)
    label_Q = mechanism.release(votes, DryRunNoise(noise), MechanismContext(num_queries=size)).label_Q
    observed = {c: int((label_Q == c).sum()) for c in (0, NO_ANSWER)}
    for epsilon, fits in ((0.5, True), (0.75, False), (1 / 3, False)):
        passes = float(law("laplace", 1 / epsilon, noise == "discrete").sf(math.log(1e3) / 0.5 - distance))
        p = chi_square(observed, {0: passes, NO_ANSWER: 1 - passes})
        assert p > TINY if fits else p < TINY


@pytest.mark.parametrize("bins", [2, 4, 10])
def test_histograms_count_as_defined(bins):
    rng = np.random.default_rng(0)
    edges = np.arange(2 * bins + 1) / (2 * bins)  # scores on every edge, and between
    scores = rng.choice(np.concatenate([edges, rng.random(20)]), (30, 7))
    votes = SoftVotes.from_scores(torch.from_numpy(scores)[..., None], bins)
    plain, shifted = np.zeros((7, bins)), np.zeros((7, bins - 1))
    for k, q in itertools.product(range(30), range(7)):
        s = scores[k, q] * bins
        plain[q, min(int(s), bins - 1)] += 1
        for v in range(1, bins):
            shifted[q, v - 1] += v - 0.5 <= s < v + 0.5
    assert votes.counts_QSV[:, 0].tolist() == plain.tolist()
    assert votes.shifted_QSW[:, 0].tolist() == shifted.tolist()


def test_soft_distances_have_sensitivity_1_when_a_teacher_changes_all_its_scores():
    rng = np.random.default_rng(1)
    for _ in range(200):
        scores = torch.from_numpy(rng.choice([0.0, 0.1, 0.3, 0.45, 0.7, 1.0], (7, 5)))
        moved = scores.clone()
        moved[rng.integers(7)] = torch.from_numpy(rng.random(5))
        for table in ("counts_QSV", "shifted_QSW"):
            counts = [getattr(SoftVotes.from_scores(s[..., None], 4), table)[:, 0] for s in (scores, moved)]
            dist = [compute_instability_distance(c) for c in counts]
            assert (dist[0] - dist[1]).abs().max() <= 1
            differs = counts[0].argmax(1) != counts[1].argmax(1)
            assert not dist[0][differs].any() and not dist[1][differs].any()


def test_released_scores_are_bin_centers():
    mechanism = soft(delta=1e-12)  # which what is split passes with at most
    teachers = 4 * mechanism.make_cost(6).min_teachers
    scores = torch.tensor([0.1, 0.3, 0.6, 1.0, 0.0, 0.25]).repeat(teachers, 1)
    scores[::2, 5] = 0.2499  # split by an edge of the first bins, together in a shifted one
    votes = SoftVotes.from_scores(scores[..., None], mechanism.bins)
    answers = mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=6))
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
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("failures", [1, 7])
def test_soft_stability_is_the_papers_loop(noise, seed, failures):
    mechanism = soft(noise=noise, epsilon=12.0, max_failures=failures, bins=3)
    plan = mechanism.make_cost(30)
    rng = np.random.default_rng(seed)
    teachers = 6 * round(plan.threshold)
    scores = np.zeros((teachers, 30))
    for q in range(30):  # a stable first histogram, a stable shifted one, neither, or one at the threshold
        share = rng.choice([0.02, 0.5, 0.3, 0.3])
        low, high = [(0.1, 0.5), (0.3, 0.4), (0.1, 0.9), (0.5, 0.9)][rng.integers(4)]
        scores[:, q] = np.where(np.arange(teachers) < share * teachers, low, high)
    soft_votes, source = SoftVotes.from_scores(torch.from_numpy(scores)[..., None], 3), Recorder(noise)
    answers = mechanism.release(soft_votes, source, MechanismContext(num_queries=30))
    (_, z1), (_, z2), *rest = source.drawn
    expected, blocks = soft_loop(
        soft_votes.counts_QSV[:, 0].tolist(),
        soft_votes.shifted_QSW[:, 0].tolist(),
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
        SoftVotes.from_scores(tensor, 4)


@pytest.mark.parametrize(
    "counts,shifted,problem",
    [
        (torch.full((2, 1, 3), 2), torch.zeros(2, 1, 2, dtype=torch.int64), "each teacher once"),  # six of three
        (torch.ones(2, 1, 3, dtype=torch.int64), torch.full((2, 1, 2), 2), "each teacher once"),
        (torch.tensor([[[4, -1, 0]]]), torch.zeros(1, 1, 2, dtype=torch.int64), "each teacher once"),
        (torch.ones(2, 1, 3), torch.zeros(2, 1, 2), "integers"),
        (torch.ones(2, 1, 3, dtype=torch.int64), torch.zeros(2, 1, 3, dtype=torch.int64), "V - 1"),
    ],
)
def test_soft_votes_count_each_teacher_once(counts, shifted, problem):
    with pytest.raises(ValueError, match=problem):
        SoftVotes(counts, shifted, 3)


def test_histograms_with_other_bins_than_the_mechanism_are_refused():
    votes = SoftVotes.from_scores(torch.rand(5000, 2, 1), 3)
    with pytest.raises(ValueError, match=r"mechanism\.bins=4: must be 3"):
        soft(bins=4).release(votes, DryRunNoise(), MechanismContext(num_queries=2))


@both_kinds
@pytest.mark.parametrize("sizes", [[10], [4, 1, 5]], ids=["at once", "in three rounds"])
def test_of_several_classes_every_score_is_asked_about_in_turn(noise, sizes):
    """Ten queries of three classes are thirty scores of the papers' loop, which may end in the middle of a query."""
    mechanism = soft(noise=noise, epsilon=12.0, max_failures=4, bins=3)
    plan = mechanism.make_cost(10, 3)
    assert plan.threshold > mechanism.make_cost(10, 2).threshold  # thirty tests, and not ten
    rng = np.random.default_rng(1)
    teachers = 6 * round(plan.threshold)
    share = rng.choice([0.02, 0.02, 0.3], size=(10, 3))
    score = np.where(rng.random((teachers, 10, 3)) < share, 0.1, 0.9)
    votes, source = SoftVotes.from_scores(torch.from_numpy(score), 3), Recorder(noise)
    first, second, thresholds, told = [], [], [], []
    for turn, query_Q in enumerate(torch.arange(10).split(sizes)):
        before = len(source.drawn)
        context = MechanismContext(num_queries=10, rounds=len(sizes), round_index=turn)
        told.append(mechanism.release(votes.select(query_Q), source, context))
        tests, shifted, *rest = [tensor.tolist() for _, tensor in source.drawn[before:]]
        first, second, thresholds = first + tests, second + shifted, thresholds + [value for (value,) in rest]
    histograms = votes.counts_QSV.flatten(0, 1).tolist(), votes.shifted_QSW.flatten(0, 1).tolist()
    expected, blocks = soft_loop(*histograms, first, second, thresholds, plan, 4, 3)
    whole = np.array(expected[: len(expected) // 3 * 3]).reshape(-1, 3)
    assert 0 < len(whole) <= 10 and np.isnan(whole).any()
    assert np.allclose(torch.cat([one.score_QC for one in told]).numpy(), whole, equal_nan=True)
    label_Q = torch.cat([one.label_Q for one in told])
    assert label_Q.tolist() == [NO_ANSWER if np.isnan(row).any() else 2 - int(row[::-1].argmax()) for row in whole]
    assert sum(one.events[0].count for one in told) == blocks


def test_votes_are_scores_of_0_and_1():
    votes = Votes(torch.tensor([[2000, 0, 0], [0, 0, 2000]]), 2000)
    as_scores = SoftVotes.from_scores(torch.nn.functional.one_hot(torch.tensor([[0, 2]] * 2000), 3).double(), 4)
    assert as_scores.counts_QSV.flatten(0, 1).tolist() == [
        [0, 0, 0, 2000] if one else [2000, 0, 0, 0] for one in (1, 0, 0, 0, 0, 1)
    ]
    for value in (votes, as_scores):
        answers = soft(epsilon=12.0).release(value, DryRunNoise(), MechanismContext(num_queries=2))
        assert answers.label_Q.tolist() == [0, 2]
        assert answers.score_QC.tolist() == [[0.875, 0.125, 0.125], [0.125, 0.125, 0.875]]


def test_of_two_classes_one_score_is_asked_about():
    with pytest.raises(ValueError, match="second one's score alone"):
        SoftVotes.from_scores(torch.rand(3, 4, 2), 4)
    assert "tensor" not in repr(SoftVotes.from_scores(torch.rand(3, 2, 1), 4))
    assert SoftVotes.from_probabilities(torch.rand(3, 4, 5), 6).counts_QSV.shape == (4, 5, 6)
    probability = torch.rand(3, 4, 2)
    second = SoftVotes.from_scores(probability[..., 1:], 6)
    assert SoftVotes.from_probabilities(probability, 6).counts_QSV.equal(second.counts_QSV)
