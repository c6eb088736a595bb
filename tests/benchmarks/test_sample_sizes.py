"""The promised sizes: at each of them the executed mechanism does what the theorem says.

Where a bound is tight within two (``TIGHT``), half of it is shown to be too little. Proposition 18 has a simulation of
its own.
"""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from benchmarks.theory import sample_sizes as sizes
from pate_torch.accounting.accountant import compute_route_epsilons
from pate_torch.accounting.calibration import calibrate_sigma
from pate_torch.accounting.events import GaussianEvent as Event
from pate_torch.mechanisms.exponential import draw_gumbel_max
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.sparse_vector import SoftSparseVector, SparseVector
from pate_torch.planning.diagnosis import compute_proposition_18
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext
from pate_torch.privacy.sensitive import SoftVotes, Votes

ASKED = {"epsilon": 1.0, "delta": 1e-5}
M, T, BETA, RUNS = 100, 5, 0.1, 200
M_SOFT, SOFT_RUNS = 8, 40
BINS = 10
UNSTABLE = T - 1
"""Queries that may fail: the mechanism stops at the T-th failure, where the papers' loops allow one more."""


def binary(ones_Q, teachers: int) -> Votes:
    ones_Q = torch.as_tensor(ones_Q)
    return Votes(torch.stack([teachers - ones_Q, ones_Q], 1), teachers)


def answered(ones_Q, teachers: int) -> bool:
    """Whether all but the first few queries get label 1 from the sparse vector."""
    mechanism = SparseVector(**ASKED, max_failures=T)
    label_Q = mechanism.release(binary(ones_Q, teachers), DryRunNoise(), MechanismContext(num_queries=M)).label_Q
    return len(label_Q) == M and bool((label_Q[UNSTABLE:] == 1).all())


def scored(score_KQ: np.ndarray, expected_Q, error: float = 1e-9) -> bool:
    """Whether all queries get their score from the soft sparse vector."""
    mechanism = SoftSparseVector(**ASKED, max_failures=T, bins=BINS)
    votes = SoftVotes.from_scores(torch.from_numpy(score_KQ)[..., None], BINS)
    score_Q = mechanism.release(votes, DryRunNoise(), MechanismContext(num_queries=M_SOFT)).score_QC[:, 1]
    return len(score_Q) == len(expected_Q) and bool((abs(score_Q.numpy() - expected_Q) <= error).all())


def at_distance(distance: float, draw) -> bool:
    """Unanimous but for what leaves them this far from another winner; the first few tied."""
    gap, teachers = 2 * math.ceil(distance) + 2, 20_000
    ones_Q = np.full(M, (teachers + gap) // 2)
    ones_Q[:UNSTABLE] = teachers // 2
    return answered(ones_Q, teachers)


def three_in_four(teachers: float, draw) -> bool:
    """Each teacher gives the winner with probability 3/4; on the first few it tosses a coin."""
    share_Q = np.where(np.arange(M) < UNSTABLE, 0.5, 0.75)
    return answered(draw.binomial(math.ceil(teachers), share_Q), math.ceil(teachers))


def two_in_three(teachers: float, draw) -> bool:
    """The winner has a third of the votes more than the other class; on the first few they are level."""
    teachers = 6 * math.ceil(teachers / 6)
    return answered(np.where(np.arange(M) < UNSTABLE, teachers // 2, 2 * teachers // 3), teachers)


def soft_at_distance(distance: float, draw) -> bool:
    """All scores but a few in one bin; on the first few queries two bins are level, and one shifted bin holds all."""
    teachers = 4 * (math.ceil(distance) + 1)
    score_KQ = np.full((teachers, M_SOFT), 0.35)
    score_KQ[: teachers // 4] = 0.85
    score_KQ[:, :UNSTABLE] = np.where(np.arange(teachers) % 2, 0.37, 0.43)[:, None]
    return scored(score_KQ, np.where(np.arange(M_SOFT) < UNSTABLE, 0.4, 0.35))


def soft_majority(teachers: float, draw) -> bool:
    """One query, on which two thirds of the scores lie in one bin and the others in one other."""
    teachers = 3 * math.ceil(teachers / 3)
    return scored(np.where(np.arange(teachers) % 3 < 2, 0.05, 0.55)[:, None], [0.05])


def soft_three_in_four(teachers: float, draw) -> bool:
    """A score lies in the bin of its mean three times in four, else in one other; anywhere on the first few."""
    teachers = math.ceil(teachers)
    score_KQ = np.where(draw.random((teachers, M_SOFT)) < 0.75, 0.05, 0.55)
    return scored(score_KQ, np.full(M_SOFT, 0.05), error=0.05)


def gaussian_majority(teachers: float, draw) -> bool:
    """All queries, at the noise that Algorithm 1 prints: on the count of ones, so sqrt(2) of it on each class."""
    teachers = 6 * math.ceil(teachers / 6)
    sigma = math.sqrt(2) * sizes.lzcw21_algorithm_1(M, **ASKED)
    votes = binary(np.full(M, 2 * teachers // 3), teachers)
    return bool((GNMax(sigma=sigma).release(votes, DryRunNoise(), MechanismContext(num_queries=M)).label_Q == 1).all())


def unstable(cutoff: float, draw) -> bool:
    """Of 10,000 random queries those on which a third of the teachers errs, which all make their errors there."""
    return draw.binomial(10_000, 3 * 0.1) <= cutoff


def net(count: float, draw) -> bool:
    """Whether random points tell any two thresholds apart that differ on a share alpha = .05."""
    return np.diff(np.concatenate([[0], np.sort(draw.random(math.ceil(count))), [1]])).max() <= 0.05


SOFT = SoftSparseVector(**ASKED, max_failures=T, bins=BINS).make_price(M_SOFT)
CASES = {
    "btt18_corollary_3_9": (sizes.btt18_corollary_3_9(M, T, **ASKED, beta=BETA), at_distance),
    "btt18_theorem_3_11": (sizes.btt18_theorem_3_11(M, T, **ASKED, beta=BETA), three_in_four),
    "btt18_corollary_4_1": (sizes.btt18_corollary_4_1(10_000, alpha=0.1, gamma=0.0, beta=BETA), unstable),
    "btt18_theorem_5_6": (sizes.btt18_theorem_5_6(M_SOFT, T, **ASKED, beta=BETA), soft_at_distance),
    "btt18_lemma_5_13": (sizes.btt18_lemma_5_13(SOFT.noise_scale, SOFT.threshold, beta=BETA), soft_majority),
    "btt18_theorem_5_14": (
        sizes.btt18_theorem_5_14(M_SOFT, T, **ASKED, beta=BETA, n_shard=50, alpha=0.0, nu=0.1)[0],
        soft_three_in_four,
    ),
    "lzcw21_lemma_3": (sizes.lzcw21_lemma_3(M, T, **ASKED, beta=BETA), two_in_three),
    "lzcw21_theorem_28": (sizes.lzcw21_theorem_28(M, 1000, **ASKED), gaussian_majority),
    "nb20_theorem_4_1": (sizes.nb20_theorem_4_1(1, **ASKED, alpha=0.05, beta=BETA)[0], net),
}
TIGHT = {"btt18_corollary_4_1", "btt18_lemma_5_13", "lzcw21_theorem_28"}
"""Tight within two. The others' constants are the papers', several times what the mechanism takes."""


def successes(size: float, run) -> tuple[int, int]:
    """How often a run does what is promised, and of how many."""
    draw, runs = np.random.default_rng(0), SOFT_RUNS if "soft" in run.__name__ else RUNS
    return sum(bool(run(size, draw)) for _ in range(runs)), runs


SOFT_SPARSE = pytest.mark.slow(reason="statistical: 40 runs of the soft sparse vector with 100,000 teachers")


@pytest.mark.parametrize("name", [pytest.param(n, marks=SOFT_SPARSE) if n == "btt18_theorem_5_6" else n for n in CASES])
def test_at_the_promised_size_the_mechanism_does_what_is_promised(name):
    size, run = CASES[name]
    assert size < 1e5
    count, runs = successes(size, run)
    assert count >= stats.binom.ppf(1e-9, runs, 1 - BETA)


@pytest.mark.parametrize("name", sorted(TIGHT))
def test_half_of_a_tight_size_is_too_little(name):
    """BTT18 Lemma 5.13 among them: 2k/3 scores in one bin lead by k/3, which is a distance of k/6 - 1."""
    size, run = CASES[name]
    count, runs = successes(size / 2, run)
    assert stats.binom.cdf(count, runs, 1 - BETA) < 1e-9


def test_two_thirds_of_enough_scores_lie_near_their_mean():
    """Each lies there three times in four; a sixth of the teachers fail a promise of 99 %."""
    teachers = sizes.btt18_corollary_5_10(beta=0.01)
    near = np.random.default_rng(0).binomial([[teachers], [teachers // 6]], 0.75, size=(2, 20_000))
    kept = (near >= np.array([[teachers], [teachers // 6]]) * 2 / 3).mean(1)
    assert kept[0] >= 0.99 > kept[1]


@pytest.mark.parametrize("mistakes", [1, 4])
def test_three_queries_a_mistake_are_lost_at_most_and_as_many_can_be(mistakes):
    teachers = 30
    lost = int(sizes.lzcw21_lemma_4(mistakes))
    wrong_KQ = np.zeros((teachers, M), bool)
    for query in range(lost):  # each third of the teachers errs together
        wrong_KQ[query % 3 :: 3, query] = True
    assert (wrong_KQ.sum(1) == mistakes).all() and (wrong_KQ.sum(0) >= teachers / 3).sum() == lost
    assert sizes.btt18_lemma_4_2(mistakes, 1 / 3) == pytest.approx(lost)
    draw = np.random.default_rng(0)
    for _ in range(200):
        wrong_KQ = draw.random((teachers, lost + 2)).argsort(1) < mistakes  # crowded on few queries
        assert (wrong_KQ.sum(0) >= teachers / 3).sum() <= lost


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
    chosen = [draw_gumbel_max(-risk_M, epsilon * n / 2, DryRunNoise()) for _ in range(RUNS)]
    assert np.mean([risk_M[index] - risk_M.min() for index in chosen]) <= allowed


@pytest.mark.parametrize("p,regular", [(2.0, 0.25), (math.inf, 0.25)])
def test_sublevel_sets_of_a_lipschitz_loss_are_as_large_as_example_4_says(p, regular):
    """A loss that is not convex, over the square [-1, 1]^2, whose corners keep a quarter of a ball: shares counted."""
    generator = np.random.default_rng(0)
    theta = generator.uniform(-1, 1, (200_000, 2))

    def loss(theta):  # of slope at most 1 in either norm
        return np.abs(np.sin(3 * theta[:, 0]) / 3 - theta[:, 1] / 2).clip(0, 0.6) / 2

    rho, log_K = sizes.wlf16_example_4(2, lipschitz=1.0, log_volume=math.log(4), regular=regular, p=p)
    value = loss(theta)
    for t in (0.02, 0.1, 0.3):
        assert 1 / np.mean(value <= value.min() + t) <= math.exp(log_K) * t**-rho
    # A cone is as steep as it may be: there the bound is met, but for the share that ``regular`` allows.
    cone = np.linalg.norm(theta, ord=p, axis=1)
    assert 1 / np.mean(cone <= 0.5) == pytest.approx(regular * math.exp(log_K) * 0.5**-rho, rel=0.05)
    assert sizes.wlf16_example_3(50) == (0.0, math.log(50))


def test_theorem_28_clears_the_noise_it_was_derived_from():
    m, n = 500, 20_000
    K = sizes.lzcw21_theorem_28(m, n, **ASKED)
    # Algorithm 1's sigma solves sqrt(2 m ln(1/delta))/sigma + m/(2 sigma^2) = epsilon; K = 6 sigma sqrt(2 ln 2n).
    sigma = K / (6 * math.sqrt(2 * math.log(2 * n)))
    assert math.sqrt(2 * m * math.log(1e5)) / sigma + m / (2 * sigma**2) == pytest.approx(1.0)


def test_proposition_18_holds_in_simulation_with_the_fewest_teachers_its_proof_allows():
    """Margins exactly xi on all queries: with K all are answered; with half of it they are not."""
    m, xi, gamma = 300, 0.25, 0.05
    T, K = compute_proposition_18(m, nu=0.01, xi=xi, **ASKED, gamma=gamma)
    scale, threshold = sizes.lzcw21_algorithm_2(m, T, **ASKED)
    L = math.log(3 * m / gamma)
    noise_bound = scale * math.log(3 * T / gamma) + 2 * scale * L

    def spare(teachers):
        return (2 * teachers * xi - math.sqrt(2 * teachers * L)) / 2 - 1 - threshold - noise_bound

    assert spare(K - 1) < 0 <= spare(K)
    mechanism = SparseVector(epsilon=1.0, delta=1e-5, max_failures=T)
    noise, generator = DryRunNoise(insecure_seed=0), np.random.default_rng(4)

    def answered(teachers):
        votes = binary(generator.binomial(teachers, 0.5 + xi, size=m), teachers)
        answers = mechanism.release(votes, noise, MechanismContext(num_queries=m))
        return len(answers.label_Q) == m and bool((answers.label_Q == 1).all())

    assert all(answered(K) for _ in range(20))
    assert not any(answered(K // 2) for _ in range(20))
    # The printed K, with the printed w, misses the condition its own proof needs.
    printed = 3 * scale * (math.log(4 * m / 1e-5) + L) / xi
    printed_w = 3 * scale * math.log(2 * (m + T) / 1e-5)
    assert (2 * printed * xi - math.sqrt(2 * printed * L)) / 2 - 1 < printed_w + 3 * scale * L


def test_the_noise_of_algorithm_1_against_the_exact_one():
    printed = sizes.lzcw21_algorithm_1(293, epsilon=1, delta=1 / 39073)
    assert printed == pytest.approx(80.533, abs=6e-4)

    def plan(sigma):
        return [Event(mu=1 / sigma, count=293)]

    assert calibrate_sigma(plan, epsilon=1, delta=1 / 39073) == pytest.approx(60.169, abs=6e-4)
    assert compute_route_epsilons(plan(printed), 1 / 39073)["zcdp"] == pytest.approx(1.0, rel=1e-12)
