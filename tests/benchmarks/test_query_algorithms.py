"""Algorithms beside those of ``pate learn``: their laws and costs, exactly on small worlds."""

import functools
import itertools
import math

import numpy as np
import pytest
from scipy.special import expit
from scipy.stats import norm

from benchmarks.replications import query_algorithms
from benchmarks.replications.query_algorithms import (
    plan_relabeled,
    run_df18_vote,
    run_high_confidence,
    run_relabeled_gnmax,
    run_unv_priv_cl,
)
from benchmarks.theory import agnostic
from benchmarks.theory.agnostic import RELABEL_FACTOR, AgPrivClPlan, split_folds
from pate_torch.accounting import rdp
from pate_torch.accounting.accountant import compute_delta as accounting_delta
from pate_torch.accounting.events import BoundedRangeEvent, PureDPEvent
from pate_torch.hypotheses.classes import Thresholds, fit_erm
from pate_torch.hypotheses.sample import Sample
from pate_torch.mechanisms.exponential import compute_log_probabilities
from pate_torch.privacy.noise import DryRunNoise
from tests.hypotheses.exact_laws import (
    Spy,
    all_laws,
    both,
    charges_first,
    fit,
    neighbors,
    quiet,
    sample_of,
    threshold_law,
    universe,
    worst,
)

POINTS = np.arange(2.0)[:, None]


def boosted_law(records, cuts, epsilon, rounds):
    """The law of the final candidate, by enumerating the folds' winners."""
    parts = [records[block] for block in split_folds(len(records), rounds + 1)]
    law = np.zeros(len(cuts))
    for winners in itertools.product(range(len(cuts)), repeat=rounds):
        reach = math.prod(threshold_law(p, cuts, epsilon / 2)[w] for p, w in zip(parts[:-1], winners, strict=True))
        final = threshold_law(parts[-1], [cuts[w] for w in winners], epsilon / 2)
        for place, w in enumerate(winners):
            law[w] += reach * final[place]
    return law


def winners_law(errors_FM, epsilon):
    """The law of the final candidate from error counts in the folds, the last fold's last: two rounds."""
    first, second = (
        np.exp(-epsilon / 2 * np.asarray(e)) / np.exp(-epsilon / 2 * np.asarray(e)).sum() for e in errors_FM[:2]
    )
    weight = np.exp(-epsilon / 2 * np.asarray(errors_FM[2]))
    pair = np.outer(first, second) / (weight[:, None] + weight[None])
    return (pair * weight[:, None]).sum(1) + (pair * weight[None]).sum(0)


def test_boosting_keeps_the_cost_of_a_bounded_range_but_not_the_range():
    """One record of the last fold, which moves the errors of two candidates up and of one down.

    Averaged over the winners, log ratios span 1.7 epsilon: the output's law has no range of epsilon. No Renyi
    divergence and no hockey-stick exceeds what is charged, all the same.
    """
    epsilon, folds_before = 1.0, ([13, 6, 14, 1], [12, 0, 11, 13])
    law, other = (winners_law((*folds_before, last), epsilon) for last in ([1, 2, 12, 9], [1, 3, 13, 8]))
    ratio = np.log(law / other)
    assert np.ptp(ratio) > 1.7 * epsilon and np.abs(ratio).max() <= epsilon
    charged = (BoundedRangeEvent(eta=epsilon),)
    for p, q in ((law, other), (other, law)):
        for order in (1.01, 2.0, 8.0, 64.0):
            divergence = math.log((p**order * q ** (1 - order)).sum()) / (order - 1)
            assert divergence <= rdp.compute_curve(charged, (order,))[0]
        for e in (0.0, 0.3, 0.7):
            assert np.maximum(p - math.exp(e) * q, 0).sum() <= accounting_delta(charged, e)


@pytest.mark.slow(reason="statistical audit: 2,500 draws")
def test_boosting_costs_one_epsilon_not_two_and_draws_from_its_law():
    epsilon, cuts = 1.2, [-np.inf, 0.5, np.inf]
    loss, span, _ = worst(all_laws(lambda records: boosted_law(records, cuts, epsilon, 2), 2, 3))
    assert span <= epsilon + 1e-9 and loss <= epsilon
    records = ((0, 0), (1, 1), (0, 1), (1, 1), (1, 1))
    noise, counts = DryRunNoise(insecure_seed=4), np.zeros(3)
    for _ in range(2500):
        done = run_high_confidence(Thresholds(), cuts, sample_of(records), epsilon=epsilon, failure=0.5, budget=noise)
        counts[done.index] += 1
    assert done.events == (BoundedRangeEvent(eta=epsilon),)
    assert fit(counts, boosted_law(records, cuts, epsilon, 2)) > 1e-4
    assert fit(counts, boosted_law(records, cuts, 2.5 * epsilon, 2)) < 1e-6


@pytest.mark.parametrize("epsilon,delta,m", [(0.5, 1e-5, 50), (1.0, 1e-5, 163), (3.0, 1e-3, 10)])
def test_the_plan_adds_up_to_what_is_asked(epsilon, delta, m):
    """Each step of the proof, recomputed with scipy from the plan's own numbers."""
    n = 200_000
    plan = plan_relabeled(n, m, epsilon=epsilon, delta=delta)
    mu = math.sqrt(2 * m) / plan.sigma
    e = plan.inner_cost[0]
    curve = norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2)
    assert curve == pytest.approx(plan.inner_cost[1], rel=1e-6)
    share = plan.subset_size / n
    assert math.log1p(share * (RELABEL_FACTOR * math.exp(e) - 1)) == pytest.approx(plan.total_cost[0])
    assert plan.total_cost[0] <= epsilon and share * plan.inner_cost[1] <= delta * (1 + 1e-9)
    assert plan.total_cost[0] > 0.999 * epsilon
    assert plan.num_teachers == plan.subset_size // 30


def test_no_rounding_puts_the_cost_above_what_was_asked():
    """From sub-samples that leave nothing for the votes to those that leave nearly all."""
    for n, epsilon, delta in itertools.product((3000, 6499, 10**6, 10**9), (0.1, 0.5, 1.0, 4.0), (1e-9, 1e-4)):
        plan = plan_relabeled(n, 50, epsilon=epsilon, delta=delta, shard=10)
        assert 0 < plan.total_cost[0] <= epsilon and 0 < plan.total_cost[1] <= delta


@functools.cache
def law_of_part(part, teachers, sigma):
    """P(answer = 1) on x = 1, given the sub-sample: over all relabelings, and the noise."""
    x, y = np.array([[float(a)] for a, _ in part]), np.array([bool(b) for _, b in part])
    candidates = Thresholds().enumerate_representatives(x)
    wrong = np.array([(Thresholds().predict(h, x) != y).sum() for h in candidates])
    ones = []
    for h in candidates:
        label = Thresholds().predict(h, x)
        best = [fit_erm(Thresholds(), x[block], label[block]) for block in split_folds(len(part), teachers)]
        votes = sum(bool(Thresholds().predict(b, np.array([[1.0]]))[0]) for b in best)
        ones.append(norm.cdf((2 * votes - teachers) / (math.sqrt(2) * sigma)))
    return float(np.exp(compute_log_probabilities(-wrong, 0.5)) @ ones)


def law_of(records, size, teachers, sigma):
    """The exact law of one answer on x = 1, over all sub-samples too."""
    one = np.mean([law_of_part(part, teachers, sigma) for part in itertools.combinations(records, size)])
    return np.array([one, 1 - one])


@pytest.mark.parametrize("size", [2, 4])
def test_the_cost_holds_exactly_over_every_neighbor_of_a_small_world(size):
    """Two points, four records, a teacher for each that is drawn: no hockey-stick above the total's delta.

    Without sub-sampling a tenth of the last total epsilon is passed, so the test can tell.
    """
    n, sigma = 4, 0.8
    mu, share = math.sqrt(2) / sigma, size / n
    laws = {r: law_of(r, size, size, sigma) for r in itertools.product(universe(2), repeat=n)}
    pairs = [(laws[records], laws[other]) for records in laws for other in neighbors(records, universe(2))]
    p, q = (np.array(side) for side in zip(*pairs, strict=True))

    def passed(epsilon):
        return np.maximum(p - math.exp(epsilon) * q, 0).sum(1).max()

    for e in (0.0, 0.5, 1.5, 3.0, 8.0):
        epsilon = math.log1p(share * (RELABEL_FACTOR * math.exp(e) - 1))
        delta = share * (norm.cdf(-e / mu + mu / 2) - math.exp(e) * norm.cdf(-e / mu - mu / 2))
        assert passed(epsilon) <= delta
    assert size < n or passed(epsilon / 10) > delta


def test_it_answers_right_where_plain_voting_fails_and_charges_before_it_draws():
    """NB20's example: every second label a coin on the left; the best of the class is found by relabeling."""
    generator = np.random.default_rng(0)
    n = 40_000
    x = generator.random(n)
    y = np.where(generator.random(n) < 0.35, x < 0.5, x >= 0.5)
    spy, x_Q = Spy(), generator.random((60, 1))
    answers = run_relabeled_gnmax(Thresholds(), Sample(x, y), x_Q, epsilon=2.0, delta=1e-5, budget=spy)
    assert charges_first(spy) and spy.charged == answers.events
    assert np.mean(answers.label_Q.numpy() == (x_Q[:, 0] >= 0.5)) > 0.9


@quiet
def test_the_two_stages_of_unvprivcl_really_run_at_their_shares(monkeypatch):
    """The planted fault: both stages at the full epsilon. What is executed is compared with what is charged."""
    executed, plan, draw = [], agnostic._make_plan, query_algorithms.draw_gumbel_max
    monkeypatch.setattr(agnostic, "_make_plan", lambda **k: executed.append(k["epsilon"]) or plan(**k))
    noted = lambda u, rate, n: executed.append(2 * rate) or draw(u, rate, n)  # noqa: E731
    monkeypatch.setattr(query_algorithms, "draw_gumbel_max", noted)
    run = {"delta": 1e-3, "alpha": 0.2, "beta": 0.2, "constants": "sharp"}
    x, spy, x_Q = np.random.default_rng(0).integers(0, 4, 4000), Spy(), np.arange(4.0)[:, None]
    answers, chosen = run_unv_priv_cl(Thresholds(), Sample(x, x > 1), x_Q, epsilon=6.0, budget=spy, **run)
    assert math.fsum(executed) == pytest.approx(6.0)  # as printed, NB20 Algorithm 4 would spend 12
    first = AgPrivClPlan(n=4000, num_queries=4, vc_dimension=1, epsilon=3.0, **run)
    assert charges_first(spy) and spy.charged == chosen.events == (*first.events, BoundedRangeEvent(eta=3.0))
    assert answers.label_Q.tolist() == Thresholds().predict(chosen.hypothesis, x_Q).tolist() == [0, 0, 1, 1]


@quiet
def test_unvprivcl_gives_its_first_stage_what_it_takes_to_answer_or_charges_nothing():
    """Half of epsilon is the default, and three quarters where the teachers of half cannot pass the threshold."""
    run = {"delta": 1e-3, "alpha": 0.2, "beta": 0.2, "constants": "sharp"}
    x, x_Q, shares = np.random.default_rng(0).integers(0, 4, 4000), np.arange(4.0)[:, None], []
    for epsilon in np.geomspace(0.05, 2.0, 12):
        spy = Spy()
        try:
            _, chosen = run_unv_priv_cl(Thresholds(), Sample(x, x > 1), x_Q, epsilon=epsilon, budget=spy, **run)
        except ValueError as refusal:
            assert "num_teachers" in str(refusal) and spy.log == []
            shares.append(1.0)
            continue
        assert spy.charged == chosen.events
        shares.append(1 - chosen.events[-1].eta / epsilon)
        plan = AgPrivClPlan(n=4000, num_queries=4, vc_dimension=1, epsilon=shares[-1] * epsilon, **run)
        assert plan.num_teachers >= plan.mechanism.make_cost(4).min_teachers
    assert shares == sorted(shares, reverse=True)
    assert {round(share, 3) for share in shares} >= {1.0, 0.75, 0.5}


def shares(records, teachers):
    """The share of shards whose ERM says 1 on each point, from the definition."""
    sample = sample_of(records)
    best = [fit_erm(Thresholds(), sample.x[block], sample.y[block]) for block in split_folds(len(records), teachers)]
    return np.mean([Thresholds().predict(h, POINTS) for h in best], axis=0)


def test_df18s_vote_draws_from_a_law_that_is_private_over_every_pair():
    epsilon, alpha, n = 2.0, 0.5, 3
    teachers = math.ceil(6 * math.log(1 / alpha) / epsilon)
    assert teachers == n

    def law(records):
        return both(expit(epsilon / 2 * teachers * (2 * shares(records, teachers) - 1)))

    loss, _, _ = worst(all_laws(law, 2, n))
    assert 0.9 * epsilon / 2 < loss <= epsilon
    records, draws, spy = ((0, 0), (1, 1), (0, 1)), 2000, Spy()
    x_Q = np.repeat(POINTS, draws, axis=0)
    label_Q = run_df18_vote(Thresholds(), sample_of(records), x_Q, epsilon=epsilon, alpha=alpha, budget=spy)
    assert spy.charged == (PureDPEvent(epsilon=epsilon, count=len(x_Q)),) and charges_first(spy)
    drawn, expected = label_Q.reshape(2, draws).mean(1), law(records)[:2]
    assert (abs(drawn - expected) <= 5 * np.sqrt(expected * (1 - expected) / draws)).all()
