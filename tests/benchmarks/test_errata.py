"""docs/reference/papers.md: every erratum names the test that holds it; other counter-examples are executed here."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from scipy import integrate, optimize, special, stats

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

PAGE = (ROOT / "docs" / "reference" / "papers.md").read_text().partition("## Errata")[2]


def test_every_erratum_names_a_test_that_there_is():
    rows = [line for line in PAGE.splitlines() if line.startswith("| ") and not line.startswith("| where")]
    texts = [file.read_text() for file in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
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
    plan = SparseVector(epsilon=1.0, delta=1e-5, max_failures=5).make_cost(100)

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


def test_a_threshold_without_fresh_noise_has_no_cost():
    """Algorithm 6 prints w + 1 after a failure. Then the passes of m queries tell e^(m/(2 lambda)), whatever T."""
    scale, T, m, w = 10.0, 2, 100, 50.0
    noise = stats.laplace(scale=2 * scale)
    loss = m * math.log(noise.sf(w + 1 - (w + 1)) / noise.sf(w + 1 - w))
    assert loss == pytest.approx(m / (2 * scale)) and loss > T * 2 / scale


def test_a_first_threshold_without_noise_has_no_cost():
    """BTT18 Algorithms 6 and 8 draw the threshold after a failure only: until then m passes tell m/(2 lambda)."""
    scale, m, w = 10.0, 100, 50.0
    noise = stats.laplace(scale=2 * scale)
    loss = m * math.log(noise.sf(w - w) / noise.sf(w - (w - 1)))  # m queries at distance w, and at w - 1 next door
    assert loss == pytest.approx(m / (2 * scale)) and loss > 2 / scale  # what Algorithm 3 pays for a block


@pytest.mark.parametrize("epsilon,delta,T", [*itertools.product((0.1, 1.0), (1e-9, 1e-5), (1, 20, 500))])
def test_the_noise_of_soft_labels_needs_no_second_half_of_delta(epsilon, delta, T):
    """2T blocks of 2/lambda at delta/2 cost epsilon by advanced composition, with ln(2/delta) as in Algorithm 6."""
    printed = math.sqrt(64 * T * math.log(2 / delta)) / epsilon
    by_the_proof = math.sqrt(32 * (2 * T) * math.log(2 / (delta / 2))) / epsilon  # Algorithm 3 at 2T and delta/2
    assert by_the_proof > 1.01 * printed

    def cost(noise_scale):
        block = 2 / noise_scale
        return block * math.sqrt(2 * 2 * T * math.log(1 / (delta / 2))) + 2 * T * block * math.expm1(block)

    assert cost(printed) <= epsilon < cost(printed / 2.2)


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


def label_by_lines(point_P):
    """The dichotomies that indicators of lines make, as bits: lines a x + b y = c with small integers a, b and c."""
    x_P, y_P = np.array(point_P).T
    a_L, b_L, c_L = (g.ravel() for g in np.meshgrid(*[np.arange(-9, 10)] * 3))
    proper_L = (a_L != 0) | (b_L != 0)
    on_LP = np.outer(a_L[proper_L], x_P) + np.outer(b_L[proper_L], y_P) == c_L[proper_L, None]
    return np.unique(on_LP @ (1 << np.arange(len(point_P))))


def test_votes_of_two_lines_shatter_five_points():
    """K = 2, d = 2: a dimension of 5 at least, against Kd = 4. LZCW21 votes 1[sum >= K/2], so two lines are united."""
    assert len(label_by_lines([(0, 0), (0, 1)])) == 4
    grid = list(itertools.product(range(3), repeat=2))
    assert all(len(label_by_lines(three)) < 8 for three in itertools.combinations(grid, 3))  # d = 2, and no more
    line_H = label_by_lines([(1, 0), (2, 0), (0, 0), (0, 1), (0, 3)])
    bits_HP = (line_H[:, None] >> np.arange(5)) & 1
    vote_HHP = bits_HP[:, None] + bits_HP[None] >= 2 / 2
    assert set((vote_HHP @ (1 << np.arange(5))).ravel().tolist()) == set(range(32))
    assert sizes.lzcw21_vote_dimension(2, 2) >= 5


def test_a_vote_of_an_odd_number_contains_unions():
    """With the constant 1 in the class, 2k - 1 members say what k of them say together: k - 1 others are constant."""
    generator = np.random.default_rng(0)
    member_H = np.append(generator.choice(2**6 - 1, size=8, replace=False), 2**6 - 1)
    for k in (2, 3):
        unions = {int(np.bitwise_or.reduce(some)) for some in itertools.combinations_with_replacement(member_H, k)}
        assert unions <= majorities(member_H, 2 * k - 1)


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

    printed = math.sqrt(math.log(2 * a / allowed) / (2 * n))
    assert fails(printed) == pytest.approx(0.358, abs=5e-4)
    assert 1 - within.cdf(math.floor(fold * (0.5 + printed))) ** a == pytest.approx(
        0.192, abs=5e-4
    )  # risk too high only
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


# ---- DF20 ------------------------------------------------------------------------------------------------------------


def test_nets_are_about_hypotheses_that_agree():
    """Cuts between the first and the last of 100 points: by the print those two points are a net at alpha = 0."""
    label_HX = np.arange(100) >= np.arange(1, 100)[:, None]
    differ_HHX = label_HX[:, None] != label_HX[None]
    share_HH = differ_HHX.mean(2)

    def compute_worst_share(related_HH):
        return share_HH[related_HH].max(initial=0)

    ends, tenths = [0, 99], list(range(0, 100, 10))
    assert compute_worst_share(differ_HHX[..., ends].all(2)) == 0
    assert compute_worst_share(~differ_HHX[..., ends].any(2)) == pytest.approx(0.98)
    assert compute_worst_share(~differ_HHX[..., tenths].any(2)) == pytest.approx(0.09)  # a net, as the proofs use it


def test_sauer_and_shelah_count_points():
    """Lemma 2 has (em/d)^d with an m that it does not define: it must be n."""
    for n, d in itertools.product(range(3, 40), range(1, 38)):
        if n <= d + 1:
            continue
        dichotomies = sum(math.comb(n, i) for i in range(d + 1))
        assert dichotomies <= (math.e * n / d) ** d
        assert d > 1 or dichotomies > math.e * (n // 3) / d  # a third of the points would not do


def test_the_proof_of_lemma_9_ends_at_six_alpha():
    """What its steps leave room for, with alpha = beta = .01: an excess error above 4 alpha, and both events."""
    alpha = beta = 0.01
    # L_D(best), L_S(best), E min over the net, E L_S(h'), E L_D(h'), E L_D(h): rows @ errors <= room.
    rows = [
        [-1, 1, 0, 0, 0, 0],  # uniform convergence of the best
        [0, alpha - 1, 1, 0, 0, 0],  # no net with probability alpha: then an error of 1
        [0, 0, -1, 1, 0, 0],  # the exponential mechanism
        [0, 0, 0, -1, 1, 0],  # uniform convergence of what it chose
        [0, 0, 0, 0, -1, 1],  # the learner of the realizable case
    ]
    room = [alpha, (1 - alpha) * alpha + alpha, alpha, alpha, alpha]
    found = optimize.linprog([1, 0, 0, 0, 0, -1], A_ub=rows, b_ub=room, bounds=(0, 1))
    assert 5.9 * alpha < -found.fun <= 6 * alpha
    place = (np.arange(1000) + 0.5) / 1000  # uniform convergence and (10) may fail at different samples
    assert np.mean((place > beta) & (place < 1 - beta)) == pytest.approx(1 - 2 * beta)


def weigh_cuts(records, points, eta):
    """A cut for each labeling of ``points`` by thresholds, and exp(-L_S/eta) on the records."""
    seen = sorted(set(points))
    cuts = np.array([-np.inf, *((a + b) / 2 for a, b in itertools.pairwise(seen)), np.inf])
    x_N, y_N = np.array(records, dtype=float).T
    return cuts, np.exp(-((x_N >= cuts[:, None]) != y_N).mean(1) / eta)


def predict_mixture(records, points, eta, query_Q):
    """h_{S,T}(x) of (8) with the learner of the realizable case left out."""
    cuts, weights = weigh_cuts(records, points, eta)
    return weights @ (np.array(query_Q) >= cuts[:, None]) / weights.sum()


def test_weights_add_up_over_the_hypotheses_they_belong_to():
    """(8) defines h_{S,T} for any T and divides by a sum over another class, that of a subset of the sample."""
    records, T, subset = [(0, 0), (1, 0), (2, 1)], [0, 0.6, 1.2, 1.8], [1, 2]
    _, weights = weigh_cuts(records, T, eta=1.0)
    _, others = weigh_cuts(records, subset, eta=1.0)
    assert weights[:-1].sum() / others.sum() > 1  # "the probability" that the label of a point at 5 is 1
    assert predict_mixture(records, T, 1.0, [5.0])[0] == pytest.approx(1 - weights[-1] / weights.sum())


def test_the_equality_of_lemma_10_is_about_the_neighbor():
    """(12) has one term on both sides of =. By its proof the second has the subset of S', and its loss is that of S."""
    eta, query_Q = 0.5, [0.0, 1.0, 2.0, 3.0]
    left = [(1, 1), (0, 0), (2, 1), (3, 0)]
    right = [(3, 0), *left[1:]]
    points = {id(sample): [x for x, _ in sample] for sample in (left, right)}

    def predict(records, origin, index):
        return predict_mixture(records, [points[id(origin)][i] for i in index], eta, query_Q)

    for index in itertools.combinations(range(4), 2):
        same = np.allclose(predict(left, left, index), predict(left, right, index))
        assert same == (0 not in index)
        assert not np.allclose(predict(left, left, index), predict(right, right, index))
