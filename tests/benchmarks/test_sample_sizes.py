"""The promised sizes: at each of them the executed mechanism does what the theorem says."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.theory import sample_sizes as sizes
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.mechanisms.sparse_vector import SoftSparseVector, SparseVector
from pate_torch.planning.diagnosis import compute_proposition_18
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes

ASKED = {"epsilon": 1.0, "delta": 1e-5}


def test_half_of_a_tight_size_is_too_little():
    """BTT18 Lemma 5.13: 2k/3 scores in one bin lead by k/3, which is a distance of k/6 - 1."""
    mechanism, beta, runs = SoftSparseVector(**ASKED, max_failures=5, bins=10), 0.1, 40
    cost = mechanism.make_cost(8)
    promised = sizes.btt18_lemma_5_13(cost.noise_scale, cost.threshold, beta=beta)

    def count_right(teachers):
        teachers = 3 * math.ceil(teachers / 3)
        score_KQ = np.where(np.arange(teachers) % 3 < 2, 0.05, 0.55)[:, None]
        votes = SoftVotes.from_scores(torch.from_numpy(score_KQ)[..., None], 10)
        answers = [mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=8)) for _ in range(runs)]
        return sum(bool((abs(answer.score_QC[:, 1] - 0.05) < 1e-9).all()) for answer in answers)

    assert count_right(promised) >= stats.binom.ppf(1e-9, runs, 1 - beta)
    assert stats.binom.cdf(count_right(promised / 2), runs, 1 - beta) < 1e-9


@pytest.mark.parametrize("probability", [0.5, 0.05])
def test_a_stable_learners_score_lies_near_its_mean_three_times_in_four(probability):
    """The mean of n coins: replacing one moves it by 2 p (1 - p)/n on average."""
    n = 400
    bound = sizes.btt18_lemma_5_8(n, alpha=2 * probability * (1 - probability) / n)
    score = np.random.default_rng(0).binomial(n, probability, size=4000) / n
    assert (abs(score - probability) <= bound).mean() >= 0.75


def test_the_exponential_mechanism_keeps_its_excess_risk():
    """Fifty hypotheses, each record's loss 0 or 1, their risks spread; at most what Theorem 17 allows on average."""
    n, epsilon = 50_000, 0.1
    risk_M = np.linspace(0.1, 0.6, 50)
    allowed = sizes.wlf16_theorem_17(n, epsilon=epsilon, rho=0, log_K=math.log(50))
    assert allowed < 0.3
    chosen = [draw_gumbel_max(-risk_M, epsilon * n / 2, DryRunNoise()) for _ in range(200)]
    assert np.mean([risk_M[index] - risk_M.min() for index in chosen]) <= allowed


def test_proposition_18_holds_in_simulation_with_the_fewest_teachers_its_proof_allows():
    """Margins exactly xi on all queries: with K all are answered; with half of it they are not."""
    m, xi, gamma, delta = 300, 0.25, 0.05, ASKED["delta"]
    T, K = compute_proposition_18(m, nu=0.01, xi=xi, **ASKED, gamma=gamma)
    cost = SparseVector(**ASKED, failure_delta=delta / 2, max_failures=T).make_cost(m)
    scale, L = cost.noise_scale, math.log(3 * m / gamma)
    noise_bound = scale * math.log(3 * T / gamma) + 2 * scale * L

    def spare(teachers):
        return (2 * teachers * xi - math.sqrt(2 * teachers * L)) / 2 - 1 - cost.threshold - noise_bound

    assert spare(K - 1) < 0 <= spare(K)
    mechanism = SparseVector(**ASKED, max_failures=T)
    noise, generator = DryRunNoise(insecure_seed=0), np.random.default_rng(4)

    def answered(teachers):
        ones_Q = torch.from_numpy(generator.binomial(teachers, 0.5 + xi, size=m))
        votes = Votes(torch.stack([teachers - ones_Q, ones_Q], 1), teachers)
        answers = mechanism.release(votes, noise, MechanismContext(num_queries=m))
        return len(answers.label_Q) == m and bool((answers.label_Q == 1).all())

    assert all(answered(K) for _ in range(20))
    assert not any(answered(K // 2) for _ in range(20))
    # The printed K, with the printed w, misses the condition its own proof needs.
    printed = 3 * scale * (math.log(4 * m / delta) + L) / xi
    printed_w = 3 * scale * math.log(2 * (m + T) / delta)
    assert (2 * printed * xi - math.sqrt(2 * printed * L)) / 2 - 1 < printed_w + 3 * scale * L
