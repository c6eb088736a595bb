"""docs/errata.md: every row names the test that holds it; counter-examples without a place are executed here."""

import ast
import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy import integrate, special, stats

from benchmarks.replications.liu2021_tables import PAPER
from benchmarks.theory import sample_sizes as sizes
from benchmarks.theory.agnostic import split_folds
from pate_torch.mechanisms.exponential import compute_log_probabilities
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.planning.diagnosis import compute_proposition_18
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext
from pate_torch.privacy.sensitive import Votes
from tests import ROOT

PAGE = (ROOT / "docs" / "errata.md").read_text()


def test_every_erratum_names_a_test_that_there_is():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| where")]
    tests = {
        node.name
        for file in (ROOT / "tests").rglob("test_*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef)
    }
    named = [re.findall(r"`(test_\w+)`", row) for row in rows]
    assert len(rows) > 25 and all(named), [row for row, found in zip(rows, named, strict=True) if not found]
    assert {name for row in named for name in row} <= tests


def tsybakov(ratio_X, center, t, tau, constant):
    """P(|r(x) - center| <= t) <= C t^(tau/(1 - tau)) over equally likely points."""
    return np.mean(np.abs(np.asarray(ratio_X) - center) <= t) <= constant * t ** (tau / (1 - tau))


def test_the_tsybakov_condition_is_about_the_distance_from_one_half():
    """Labels that are certain keep no printed condition; labels that are coins keep it, and not Lemma 9's."""
    certain, coins, tau = [0.0, 1.0], [0.5, 0.5], 0.5
    t_T = np.geomspace(1e-9, 1, 50)
    assert not tsybakov(certain, 0.0, 0.0, tau, 1e9) and not tsybakov(certain, 0.0, 1e-9, tau, 1e6)
    assert all(tsybakov(certain, 0.5, t, tau, 2.0) for t in t_T)
    assert all(tsybakov(coins, 0.0, t, tau, 2.0) for t in t_T) and not tsybakov(coins, 0.5, 1e-9, tau, 1e6)
    # Lemma 9: Dis(h, Bayes) <= eta (Err(h) - Err(Bayes))^tau. Over coins every h has excess 0 and may disagree.
    excess, disagreement = abs(0.5 - 0.5), 1.0
    assert disagreement > 1e9 * excess**tau


def test_stable_queries_are_the_ones_answered():
    """Theorem 2's proof needs 'distance 0 is seldom answered'; with bottom and top swapped it is answered always."""
    plan = SparseVector(epsilon=1.0, delta=1e-5, max_failures=5).compute_scales(100)

    def passes(threshold_noise):  # of a query at distance 0, given the noise on the threshold
        return stats.laplace(scale=2 * plan.noise_scale).sf(plan.threshold + threshold_noise)

    law = stats.laplace(scale=plan.noise_scale)
    answered = integrate.quad(lambda z: law.pdf(z) * passes(z), -np.inf, np.inf, limit=500)[0]
    assert 100 * answered <= 1e-5 / 2  # as executed: top is the answer
    assert 1 - answered > 0.99999  # as the proof prints it: bottom is the answer


def test_high_margin_is_the_small_probability_of_a_small_margin():
    """Teachers that toss coins on everything have margin 0: by the printed inequality an ideal problem, nu = 0."""
    m, xi, gamma = 100, 0.3, 0.05
    margin_Q = np.zeros(m)
    assert np.mean(margin_Q > xi) <= 0 < np.mean(margin_Q <= xi)
    T, K = compute_proposition_18(m, nu=0.0, xi=xi, epsilon=1.0, delta=1e-5, gamma=gamma)
    ones_Q = np.random.default_rng(0).binomial(K, 0.5, size=m)
    votes = Votes(torch.from_numpy(np.stack([K - ones_Q, ones_Q], 1)), K)
    mechanism, context = SparseVector(epsilon=1.0, delta=1e-5, max_failures=T), MechanismContext(num_queries=m)
    assert not mechanism.release(votes, DryRunNoise(), context).answered_Q.any()


def test_a_threshold_without_fresh_noise_has_no_price():
    """Algorithm 6 prints w + 1 after a failure. Then the passes of m queries tell e^(m/(2 lambda)), whatever T."""
    scale, T, m, w = 10.0, 2, 100, 50.0
    noise = stats.laplace(scale=2 * scale)
    loss = m * math.log(noise.sf(w + 1 - (w + 1)) / noise.sf(w + 1 - w))
    assert loss == pytest.approx(m / (2 * scale)) and loss > T * 2 / scale


def test_the_vote_dimension_bounds_what_votes_can_shatter():
    """Random classes of VC dimension d, all votes of three and of five, against the bound by counting."""
    generator, shattered = np.random.default_rng(0), 0
    for d, points in itertools.product((1, 2), (5, 6)):
        members = grown(d, points, generator)
        for K in (3, 5):
            votes = majorities(members, K)
            largest = max(s for s in range(1, points + 1) if shatters(votes, s, points))
            assert largest <= sizes.lzcw21_vote_dimension(d, K)
            shattered = max(shattered, largest - d)
    assert shattered > 0  # votes are richer than their members
    for d, K in ((1, 3), (2, 10), (10, 250)):
        m = sizes.lzcw21_vote_dimension(d, K)
        assert K * d <= m <= 10 * K * d * math.log(K * d)  # O(K d ln(K d)), and never below what is printed
        dichotomies = sum(math.comb(m + 1, i) for i in range(d + 1))
        assert math.comb(dichotomies + K - 1, K) < 2 ** (m + 1)  # so many votes shatter no m + 1 points


def grown(d, points, generator):
    """Members of a class in random order, each taken if no d + 1 points are shattered by it."""
    subsets = [sum(1 << i for i in c) for c in itertools.combinations(range(points), d + 1)]
    members: list[int] = []
    for label in generator.permutation(1 << points).tolist():
        if all(len({h & s for h in [*members, label]}) < 2 ** (d + 1) for s in subsets):
            members.append(label)
    return np.array(members)


def majorities(members, K):
    """All majority votes of K members, one of them as often as you like: by how often each point is voted for."""
    bits = (members[:, None] >> np.arange(members.max().item().bit_length())) & 1
    place = (K + 1) ** np.arange(bits.shape[1])
    counts = bits @ place
    for _ in range(K - 1):
        counts = np.unique(counts[:, None] + bits @ place)
    ones = 2 * (counts[:, None] // place % (K + 1)) > K
    return set((ones @ (1 << np.arange(bits.shape[1]))).tolist())


def shatters(votes, size, points):
    subsets = (sum(1 << i for i in c) for c in itertools.combinations(range(points), size))
    return any(len({v & s for v in votes}) == 2**size for s in subsets)


def test_the_printed_intervals_are_too_narrow():
    """1.96 is 95 %; and a model that never changed would vary more over thirty test sets than Table 4 says."""
    assert 2 * stats.norm.cdf(1.96) - 1 == pytest.approx(0.95, abs=1e-4)
    assert stats.norm.ppf(0.99) > 2.3  # 98 % takes this
    size, test, splits = 8124, 1462, 30
    accuracy, printed = PAPER["mushroom"][("PSQ", math.inf)]
    law = stats.hypergeom(size, round(accuracy * size), test)
    fixed = 1.96 * law.std() / test / math.sqrt(splits)
    assert printed < fixed / 2 < fixed < printed * math.sqrt(splits)


def test_lemma_30_takes_log_K():
    """More hypotheses than n^2: the printed bound on an excess, which is never negative, is."""
    n, epsilon, hypotheses = 10, 1.0, 1000  # finitely many: rho = 0, K their number, no regularizer
    printed = 9 * (2 * math.log(n) + math.log(1 / hypotheses)) / (n * epsilon)
    assert printed < 0 < sizes.wlf16_theorem_17(n, epsilon=epsilon, rho=0, log_K=math.log(hypotheses)) - 2 * epsilon


def excess_of_two(n, epsilon, zeta):
    """Regularizer -zeta and +zeta, mean loss 2 zeta - .1 and 0: the excess of the exponential mechanism, and rate."""
    loss, g = np.array([2 * zeta - 0.1, 0.0]), np.array([-zeta, zeta])
    law = np.exp(compute_log_probabilities(-loss - g, epsilon * n / 2))
    rate = 9 * (math.log(2) + 2 * math.log(n)) / (n * epsilon) + 2 * epsilon
    return float(law @ loss), rate


def test_the_penalty_is_twice_the_regularizer():
    """(11) adds sup |g|; a regularizer may mislead by sup g - inf g, which is up to twice that."""
    zeta = 0.4
    excess, rate = excess_of_two(10**7, 1e-3, zeta)
    assert excess > rate + zeta and excess <= rate + 2 * zeta


def test_a_regularizer_of_order_one_leaves_an_excess():
    """A2 allows o(n), which a constant is: the excess stays, however many records there are."""
    assert all(excess_of_two(n, n**-0.4, 0.4)[0] > 0.69 for n in (10**6, 10**9, 10**12))


def test_a_fold_is_smaller_than_the_sample():
    """(21) has 2n for the 2n/(a + 1) of a fold: with probability delta_1 it does not hold, exactly."""
    n, a, allowed = 800, 3, 0.1
    fold = len(range(n)[split_folds(n, a + 1)[-1]])
    within = stats.binom(fold, 0.5)

    def fails(bound):
        return 1 - (within.cdf(math.floor(fold * (0.5 + bound))) - within.cdf(math.ceil(fold * (0.5 - bound)) - 1)) ** a

    assert fails(math.sqrt(math.log(2 * a / allowed) / (2 * n))) > 3 * allowed
    assert fails(math.sqrt(math.log(2 * a / allowed) / (2 * n / (a + 1)))) <= allowed


def test_the_last_fold_decides_by_minus_its_risk():
    """Theorem 18's proof has sensitivity 0 for a record *in* the last fold, q without its minus, and log(3/n)."""
    n, a = 40, 3
    wrong = np.zeros((2, n))
    wrong[1] = 1  # the second hypothesis errs always
    last = split_folds(n, a + 1)[-1]
    inside, outside = wrong.copy(), wrong.copy()
    inside[0, last.start], outside[0, 0] = 1, 1
    assert (inside[:, last].mean(1) != wrong[:, last].mean(1)).any()
    assert (outside[:, last].mean(1) == wrong[:, last].mean(1)).all()
    right, printed = (np.exp(compute_log_probabilities(sign * wrong[:, last].sum(1), 0.5)) for sign in (-1, 1))
    assert right[0] > 0.99 and printed[0] < 0.01
    assert math.log(3 / n) + 1 < 0  # records in a fold, as the statement has it


def test_a_sublevel_set_has_the_volume_of_a_ball():
    """Example 4 leaves the unit ball's volume out; for 20 dimensions that promises forty times too much."""
    d, L, t = 20, 1.0, 0.1  # F = L |h| in a ball around 0, which is regular with beta = 1
    volume = (t / L) ** d * math.exp(d / 2 * math.log(math.pi) - special.gammaln(d / 2 + 1))
    assert volume < (t / L) ** d / 30
    generator = np.random.default_rng(0)
    inside = (np.linalg.norm(generator.uniform(-t / L, t / L, (200_000, 5)), axis=1) <= t / L).mean()
    ball = math.pi**2.5 / math.gamma(3.5)
    assert inside * 2**5 == pytest.approx(ball, rel=0.02)  # the formula, where points can be counted


def test_eight_logs_over_alpha_are_too_few_queries_for_a_large_best_error():
    """Lemma 3.5: even the best hypothesis's own answers stray by more than alpha on 8 ln(1/(alpha beta))/alpha."""
    alpha, beta, best = 1e-3, 0.1, 0.4
    m = math.ceil(8 * math.log(1 / (alpha * beta)) / alpha)
    assert stats.binom.sf(math.floor(m * (best + alpha)), m, best) > 2 * beta
    hoeffding = math.ceil(math.log(1 / beta) / (2 * alpha**2))
    assert stats.binom.sf(math.floor(hoeffding * (best + alpha)), hoeffding, best) <= beta
