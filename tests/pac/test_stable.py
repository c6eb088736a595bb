"""Stable and private predictors (DF20): exact stability and privacy over every pair of neighbors."""

import itertools
import math

import numpy as np
import pytest
from scipy.special import expit

from pate_torch.accounting.events import DeltaEvent, PureDPEvent
from pate_torch.mechanisms.exponential import compute_log_probabilities
from pate_torch.pac import nets, stable
from pate_torch.pac.classes import Intervals, Thresholds
from pate_torch.pac.sample import BelowGuaranteeWarning, Sample
from pate_torch.pac.stable import (
    compute_flipping_gamma,
    compute_predictor_epsilon,
    compute_private_predictor_size,
    compute_stability,
    compute_stable_predictor_size,
    plan_private_predictor,
    run_private_prediction,
    run_private_predictor,
    run_stable_predictor,
)
from pate_torch.privacy.noise import DryRunNoise
from tests.pac.pac_audit import Spy, all_laws, fit, neighbors, sample_of, sauer_shelah, universe, worst

quiet = pytest.mark.filterwarnings("ignore::pate_torch.pac.sample.BelowGuaranteeWarning")
ASKED = np.arange(3.0)[:, None]


def stable_law(hypotheses, sample, index, x_Q, gamma):
    """P(answer = 1) on each of x_Q, given the subset ``index``, by the package's candidates."""
    candidates, utility = stable._enumerate_candidates(hypotheses, sample, index)
    return np.exp(compute_log_probabilities(utility, gamma / 2)) @ np.stack(
        [hypotheses.predict(h, x_Q) for h in candidates]
    )


def private_predictor_law(hypotheses, sample, index, x_Q, *, eta, num_teachers):
    """P(answer = 1) on each of x_Q before the flip, given the subset, by the package's candidates and votes."""
    candidates, utility = stable._enumerate_candidates(hypotheses, sample, index)
    answer_MQ = [stable._compute_vote_probability(hypotheses, sample, h, x_Q, eta, num_teachers) for h in candidates]
    return np.exp(compute_log_probabilities(utility, 1 / (eta * sample.n))) @ np.stack(answer_MQ)


def brute_prediction(records, size, gamma, queries=(0, 1, 2)):
    """P(answer = 1) of DF20 Theorem 1's algorithm for thresholds, from the definition, over all subsets."""
    total = np.zeros(len(queries))
    subsets = list(itertools.combinations(range(len(records)), size))
    for index in subsets:
        seen = sorted({records[i][0] for i in index})
        # The library puts a cut half-way between neighboring values of the subset.
        cuts = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(seen)), math.inf]
        weight = np.array([math.exp(-gamma / 2 * sum((x >= t) != y for x, y in records)) for t in cuts])
        answers = np.array([[float(q >= t) for q in queries] for t in cuts])
        total += (weight / weight.sum()) @ answers
    return total / len(subsets)


def both(p):
    """The law over (query, answer) pairs as one array of positive numbers."""
    return np.concatenate([p, 1 - p])


@pytest.mark.parametrize("size,n", [(1, 4), (2, 4)])
def test_stability_holds_over_every_pair_of_neighbors(size, n):
    gamma = size / n
    laws, records_U = all_laws(lambda r: brute_prediction(r, size, gamma), 3, n)
    moved = worst({r: both(p) for r, p in laws.items()}, records_U)[2]
    sharp = compute_stability(gamma, size / n, "sharp")
    assert moved <= sharp + 1e-12 < 3 * gamma
    assert sharp <= 1.25 * gamma
    assert moved > 0.9 * math.tanh(gamma / 4)  # the exponential mechanism's part is met


def test_the_law_is_the_definitions():
    records = ((0, 0), (1, 1), (2, 0), (1, 1))
    sample, size, gamma = sample_of(records), 2, 0.5
    subsets = [np.array(i) for i in itertools.combinations(range(4), size)]
    found = np.mean([stable_law(Thresholds(), sample, i, ASKED, gamma) for i in subsets], axis=0)
    np.testing.assert_allclose(found, brute_prediction(records, size, gamma), rtol=1e-12)


@quiet
def test_stable_predictor_draws_from_its_law():
    """And not from the law that scores on the subset only, or at twice the rate."""
    records = ((0, 0), (1, 1), (2, 1), (2, 1), (0, 1), (1, 1))
    draws, spy = 4000, Spy(1)
    queries = np.full((draws, 1), 1.0)
    done = run_stable_predictor(
        Thresholds(),
        sample_of(records),
        queries,
        gamma=0.34,
        alpha=0.4,
        subset_size=2,
        budget=spy,
        constants="sharp",
    )
    ones = int(done.label_Q.sum())
    law = brute_prediction(records, 2, 0.34)[1]
    assert fit([ones, draws - ones], [law, 1 - law]) > 1e-3
    doubled = brute_prediction(records, 2, 0.34 * 2.5)[1]
    assert fit([ones, draws - ones], [doubled, 1 - doubled]) < 1e-4
    assert done.events == spy.charged == (DeltaEvent(delta=compute_stability(0.34, 2 / 6, "sharp"), count=draws),)
    assert spy.log[0] == "charge"


# --- Corollary 1 -------------------------------------------------------------------------------------------------


def exact_epsilon(gamma, alpha, size, n):
    """The largest ln ratio of one flipped prediction over every data set, neighbor, query and answer."""
    laws, records_U = all_laws(lambda r: brute_prediction(r, size, gamma), 3, n)
    flipped = {r: both(alpha + (1 - 2 * alpha) * p) for r, p in laws.items()}
    return worst(flipped, records_U)[0]


def test_private_prediction_is_private_over_every_pair_of_neighbors():
    n, size, alpha = 4, 2, 0.3
    # A subset of two records of four needs gamma >= 1/2: epsilon is solved for, not chosen.
    epsilon = math.log1p((1 - 2 * alpha) * compute_stability(0.5, 0.5, "sharp") / alpha)
    assert compute_flipping_gamma(epsilon, alpha, "sharp") == pytest.approx(0.5)
    assert compute_flipping_gamma(6 * 0.5 / alpha, alpha) == pytest.approx(0.5)
    assert 0.4 * epsilon < exact_epsilon(0.5, alpha, size, n) <= epsilon
    # The audit sees faults: no flip, or a gamma six times too large.
    assert exact_epsilon(0.5, 1e-9, size, n) > epsilon
    assert exact_epsilon(6 * 0.5, alpha, size, n) > epsilon


def test_the_gamma_fault_is_not_a_breach():
    """gamma = epsilon alpha/2 where the proof needs epsilon alpha/6: Lemma 7's 3 gamma is too loose to tell them apart.

    The sharp bound admits gamma up to 0.8 epsilon alpha, and the exact loss at epsilon alpha/2 stays below epsilon.
    """
    alpha = 0.2
    for epsilon in (0.1, 0.5, 1.0, 2.5):
        assert compute_flipping_gamma(epsilon, alpha) == pytest.approx(epsilon * alpha / 6)
        assert compute_flipping_gamma(epsilon, alpha, "sharp") > epsilon * alpha / 2
    epsilon = 2 * 0.25 / alpha
    assert exact_epsilon(epsilon * alpha / 2, alpha, 1, 4) < epsilon
    # The paper's own chain would break all the same: 3 gamma = 1.5 epsilon alpha is too much for a small alpha.
    epsilon, alpha = 0.05, 0.05
    assert math.log1p((1 - 2 * alpha) * 3 * (epsilon * alpha / 2) / alpha) > epsilon
    assert math.log1p((1 - 2 * alpha) * 3 * (epsilon * alpha / 6) / alpha) <= epsilon


@quiet
def test_private_prediction_flips_and_charges_every_prediction():
    records = ((0, 0), (2, 1)) * 60
    draws, spy, alpha, epsilon = 1500, Spy(2), 0.3, 0.9
    done = run_private_prediction(
        Thresholds(),
        sample_of(records),
        np.full((draws, 1), 2.0),
        epsilon=epsilon,
        alpha=alpha,
        budget=spy,
        subset_size=5,
    )
    assert done.events == spy.charged == (PureDPEvent(epsilon=epsilon, count=draws),) and spy.log[0] == "charge"
    gamma = epsilon * alpha / 6
    # Every record is at 0 or 2, so the candidates are the cuts -inf, 1, inf unless the subset saw one value only.
    one_value = 2 * math.comb(60, 5) / math.comb(120, 5)
    middle = lambda: np.exp(-gamma / 2 * np.array([60.0, 0.0, 60.0]))  # noqa: E731
    with_cut = middle()[:2].sum() / middle().sum()
    p = (1 - one_value) * with_cut + one_value * 0.5
    law = alpha + (1 - 2 * alpha) * p
    ones = int(done.label_Q.sum())
    assert fit([ones, draws - ones], [law, 1 - law]) > 1e-3
    assert fit([ones, draws - ones], [p, 1 - p]) < 1e-6  # not flipped


# --- Theorem 2 ---------------------------------------------------------------------------------------------------


def brute_predictor(records, index, eta, teachers, queries):
    """P(answer = 1 | subset) of Theorem 2's algorithm for thresholds, before the flip, from the definition."""
    n = len(records)
    seen = sorted({records[i][0] for i in index})
    cuts = [-math.inf, *((a + b) / 2 for a, b in itertools.pairwise(seen)), math.inf]
    weight = np.array([math.exp(-sum((x >= t) != y for x, y in records) / (eta * n)) for t in cuts])
    answers = np.zeros((len(cuts), len(queries)))
    bounds = np.linspace(0, n, teachers + 1).astype(int)
    for row, cut in zip(answers, cuts, strict=True):
        ones = np.zeros(len(queries))
        for a, b in itertools.pairwise(bounds):
            part = [(x, x >= cut) for x, _ in records[a:b]]
            values = sorted({x for x, _ in part})
            options = [-math.inf, *((u + v) / 2 for u, v in itertools.pairwise(values)), math.inf]
            best = min(options, key=lambda t: sum((x >= t) != y for x, y in part))
            ones += [q >= best for q in queries]
        row[:] = expit((2 * ones - teachers) / (2 * eta * n))
    return (weight / weight.sum()) @ answers


def test_private_predictor_law_is_the_definitions():
    records, queries = ((0, 0), (1, 1), (2, 0), (1, 1)), (0.0, 1.0, 2.0)
    for index in itertools.combinations(range(4), 2):
        found = private_predictor_law(Thresholds(), sample_of(records), np.array(index), ASKED, eta=0.5, num_teachers=2)
        np.testing.assert_allclose(found, brute_predictor(records, index, 0.5, 2, queries), rtol=1e-12)


@pytest.mark.parametrize("eta", [0.5, 1.0])
def test_every_lemma_of_the_private_predictor_holds_exactly(eta):
    """Lemma 11 (same subset, neighboring samples), Lemma 10 (net subsets) and the total: 2 points, n = 4, n' = 3."""
    n, size, teachers, alpha = 4, 3, 2, 0.2
    records_U, queries = universe(2), (0.0, 1.0)
    subsets = list(itertools.combinations(range(n), size))
    laws = {
        r: {i: both(brute_predictor(r, i, eta, teachers, queries)) for i in subsets}
        for r in itertools.product(records_U, repeat=n)
    }
    spread = (eta * (n - 1) + 1) / (eta * n)
    lemma_10, lemma_11 = 4 * math.exp(3 * spread), math.exp(3 / (eta * n))
    factor = (1 + lemma_10 * size / (n - size)) * lemma_11
    for records, law in laws.items():
        # Lemma 11 needs the subset's candidates to stay: compare where the odd record is outside the subset.
        for j, new in itertools.product(range(n), records_U):
            other = (*records[:j], new, *records[j + 1 :])
            for index in subsets:
                if j not in index:
                    assert (law[index] <= lemma_11 * laws[other][index] * (1 + 1e-12)).all()
        for index, j in itertools.product(subsets, range(n)):
            if j in index:
                rest = [records[i][0] for i in index if i != j]
                others = [records[i][0] for i in range(n) if i != j]
                if uncovered(rest, others) <= eta * (n - 1):
                    (swap,) = set(range(n)) - set(index)
                    twin = tuple(sorted((*(i for i in index if i != j), swap)))
                    assert (law[index] <= lemma_10 * law[twin] * (1 + 1e-12)).all()
        flipped = alpha + (1 - 2 * alpha) * np.mean(list(law.values()), axis=0)
        for other in neighbors(records, records_U):
            theirs = alpha + (1 - 2 * alpha) * np.mean(list(laws[other].values()), axis=0)
            assert (flipped <= (factor + size / n) * theirs).all()


def uncovered(net, points):
    """The most of ``points`` on which two thresholds can differ that agree on ``net``."""
    cuts = [-math.inf, *(p + 0.5 for p in sorted({*net, *points}))]
    return max(
        sum((p >= s) != (p >= t) for p in points) for s in cuts for t in cuts if all((p >= s) == (p >= t) for p in net)
    )


def test_the_price_is_the_explicit_formula():
    n, subset, eta = 10**6, 100, 0.01
    paper = math.log((1 + 4 * math.e**6 * subset / (n - subset)) * math.exp(3 / (eta * n)) + subset / n)
    assert compute_predictor_epsilon(n, subset, eta) == pytest.approx(paper, rel=1e-12)
    sharp = compute_predictor_epsilon(n, subset, eta, "sharp")
    assert sharp < paper / 10
    # eta n = 1 is where the paper's 2 eta n is what it claims to be: both agree there up to (1 - eta)/(eta n) -> 1.
    assert compute_predictor_epsilon(10**6, 5, 1e-6, "sharp") == pytest.approx(
        compute_predictor_epsilon(10**6, 5, 1e-6), rel=1e-4
    )
    # What "n' about epsilon n" costs: the first factor alone.
    assert math.log1p(4 * math.e**6 * 0.01 / 0.99) == pytest.approx(2.85, abs=0.01)
    assert math.log1p(4 * math.e**6 * 1e-4) == pytest.approx(0.15, abs=0.01)


def test_the_private_predictor_refuses_what_it_cannot_keep():
    sample, noise = Sample(np.zeros(3000), np.ones(3000)), DryRunNoise()
    with pytest.raises(ValueError, match=r"must exceed the net"):
        run_private_predictor(Thresholds(), sample, [0.0], alpha=0.1, budget=noise)
    with pytest.raises(ValueError, match=r"one prediction costs .* it takes n >="):
        run_private_predictor(Thresholds(), sample, [0.0], alpha=0.3, eta=0.3, epsilon=0.5, budget=noise)
    needed = compute_private_predictor_size(1, epsilon=1.0, alpha=0.1, constants="sharp")
    plan = plan_private_predictor(needed, 1, alpha=0.1, constants="sharp")
    assert plan.epsilon <= 1.0 < plan_private_predictor(needed - 1, 1, alpha=0.1, constants="sharp").epsilon


@pytest.mark.parametrize("d", [1, 2, 7])
@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.3, 0.45])
def test_the_default_eta_meets_every_condition_of_lemma_8(d, alpha):
    eta = stable.compute_default_resolution(d, alpha)
    n = compute_private_predictor_size(d, epsilon=0.5, alpha=alpha, constants="sharp")
    plan = plan_private_predictor(n, d, alpha=alpha, constants="sharp")
    assert plan.eta == eta <= alpha
    assert plan.subset_size >= max(nets.compute_net_size(alpha, alpha, d), nets.compute_net_size(eta, alpha, d) + 1)
    assert n >= nets.compute_uniform_size(alpha, 0.1, d) and 1 / (eta * n) <= 0.5 and plan.subset_size <= 0.5 * n
    assert n >= 2 * nets.compute_log_sauer_shelah(plan.subset_size, d) / (2 / (eta * n) * alpha)
    assert n // plan.num_teachers >= nets.compute_realizable_size(alpha, alpha, d)
    # A unanimous vote says otherwise with probability alpha at most.
    assert expit(-plan.num_teachers / (2 * eta * n)) <= alpha


def test_an_eta_that_no_n_is_enough_for_is_warned_about():
    """A quarter of the records it takes, and teachers of too few records each: a larger n cures the first alone."""
    largest = stable.compute_max_eta(1, 0.3, nets.compute_net_size(0.3, 0.3, 1) + 1)
    n = 2 * compute_private_predictor_size(1, epsilon=1.0, alpha=0.3, eta=0.3, constants="sharp")
    sample = Sample(np.zeros(n), np.ones(n))
    with pytest.warns(BelowGuaranteeWarning, match=rf"\(1/eta >= {1 / largest:,.0f}, here 3\)"):
        run_private_predictor(Thresholds(), sample, [0.0], alpha=0.3, eta=0.3, budget=DryRunNoise(), constants="sharp")


@quiet
def test_private_predictor_draws_what_it_charges():
    generator = np.random.default_rng(0)
    x = (generator.random(500) < 0.9).astype(float)
    sample, spy, draws, alpha = Sample(x, x > 0.5), Spy(3), 220, 0.3
    done = run_private_predictor(Thresholds(), sample, np.full((draws, 1), 1.0), alpha=alpha, eta=0.3, budget=spy)
    plan = plan_private_predictor(500, 1, alpha=alpha, eta=0.3)
    assert done.events == spy.charged == (PureDPEvent(epsilon=plan.epsilon, count=draws),) and spy.log[0] == "charge"
    law = private_predictor_law(
        Thresholds(), sample, np.arange(plan.subset_size), np.array([[1.0]]), eta=0.3, num_teachers=plan.num_teachers
    )[0]
    law = alpha + (1 - 2 * alpha) * law
    ones = int(done.label_Q.sum())
    assert fit([ones, draws - ones], [law, 1 - law]) > 1e-3
    assert fit([ones, draws - ones], [1 - law, law]) < 1e-6


# --- Nets ----------------------------------------------------------------------------------------------------------


def test_net_sizes_are_large_enough_in_simulation_and_smallest():
    """Random subsets of the promised size are eta-nets for intervals; far smaller ones are not."""
    generator, eta, beta = np.random.default_rng(1), 0.2, 0.1
    m = nets.compute_net_size(eta, beta, 2)

    def gap(size):  # two intervals that agree on the net differ by at most two of its gaps
        ends = np.sort(np.concatenate([[0.0, 1.0], generator.random(size)]))
        return float(np.sort(np.diff(ends))[-2:].sum())

    assert np.mean([gap(m) > eta for _ in range(200)]) <= beta
    # The same for how often two hypotheses disagree, which squares the growth function.
    assert nets.compute_uniform_size(0.1, beta, 2) < nets.compute_uniform_size(0.1, beta, 2, differences=True)
    size = nets.compute_uniform_size(0.3, beta, 1, differences=True)

    def astray(points):  # two thresholds disagree on an interval: the largest and smallest discrepancy of a CDF
        ends = np.sort(generator.random(points))
        return np.ptp(np.concatenate([np.arange(1, points + 1) / points - ends, np.arange(points) / points - ends]))

    assert np.mean([astray(size) > 0.3 for _ in range(200)]) <= beta < np.mean([astray(12) > 0.3 for _ in range(200)])
    assert np.mean([gap(10) > eta for _ in range(200)]) > beta
    holds = lambda k: (  # noqa: E731
        math.log(2) + 2 * nets.compute_log_sauer_shelah(2 * k, 2) - eta * k / 2 * math.log(2) <= math.log(beta)
    )
    assert holds(m) and not holds(m - 1)
    assert Intervals().vc_dimension == 2


@pytest.mark.parametrize("n,d", [(0, 2), (1, 1), (10, 3), (200, 5), (3, 7), (10**18, 4)])
def test_log_sauer_shelah(n, d):
    assert nets.compute_log_sauer_shelah(n, d) == pytest.approx(math.log(sauer_shelah(n, d)), rel=1e-12)


def test_smallest_finds_the_first():
    for first in (1, 2, 7, 1000):
        assert nets.find_smallest(lambda n, f=first: n >= f) == first


def test_bad_input_is_refused_and_small_samples_are_warned_about():
    sample = sample_of(((0, 1),) * 9)
    with pytest.raises(ValueError, match=r"subset of at most gamma n records is empty.*n >= 10"):
        run_stable_predictor(Thresholds(), sample, [0.0], gamma=0.1, alpha=0.2, budget=DryRunNoise())
    with pytest.raises(ValueError, match="is empty"):
        run_private_prediction(Thresholds(), sample, [0.0], epsilon=0.1, alpha=0.1, budget=DryRunNoise())
    with pytest.raises(ValueError, match="subset"):
        run_stable_predictor(Thresholds(), sample, [0.0], gamma=0.3, alpha=0.2, subset_size=5, budget=DryRunNoise())
    with pytest.raises(ValueError, match="stability of"):
        run_stable_predictor(Thresholds(), sample, [0.0], gamma=0.5, alpha=0.2, budget=DryRunNoise())
    with pytest.raises(ValueError, match="coin"):
        run_private_prediction(Thresholds(), sample, [0.0], epsilon=1.0, alpha=0.5, budget=DryRunNoise())
    with pytest.raises(ValueError, match="replace_one"):
        run_stable_predictor(
            Thresholds(),
            Sample(np.zeros(9), np.ones(9), "add_remove"),
            [0.0],
            gamma=0.3,
            alpha=0.2,
            budget=DryRunNoise(),
        )
    with pytest.warns(BelowGuaranteeWarning, match="stable predictor: n = 9"):
        run_stable_predictor(Thresholds(), sample, [0.0], gamma=0.3, alpha=0.2, budget=DryRunNoise())
    big = Sample(np.zeros(10**5), np.ones(10**5))
    asked = {"gamma": 0.1, "alpha": 0.3, "budget": DryRunNoise()}
    assert len(run_stable_predictor(Thresholds(), big, [0.0], **asked).label_Q) == 1  # no warning
    with pytest.warns(BelowGuaranteeWarning, match=f"subset >= {nets.compute_net_size(0.3, 0.3, 1)}, here 2"):
        run_stable_predictor(Thresholds(), big, [0.0], **asked, subset_size=2)
    assert compute_stable_predictor_size(1, gamma=0.1, alpha=0.1) < compute_stable_predictor_size(
        1, gamma=0.01, alpha=0.1
    )
    assert stable.compute_default_resolution(1, 0.1) > stable.compute_default_resolution(3, 0.1)
