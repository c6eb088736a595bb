"""The exponential mechanism and what is built on it alone: exact laws, exact privacy, right draws."""

import itertools
import math

import numpy as np
import pytest

from benchmarks.theory.classes import Listed
from pate_torch.accounting import rdp
from pate_torch.accounting.accountant import compute_delta as accounting_delta
from pate_torch.accounting.events import BoundedRangeEvent
from pate_torch.mechanisms import exponential as mechanism
from pate_torch.mechanisms.exponential import compute_log_probabilities, draw_gumbel_max, draw_model_index
from pate_torch.pac import exponential
from pate_torch.pac.boosting import compute_high_confidence_size, run_high_confidence, split_folds
from pate_torch.pac.classes import Thresholds
from pate_torch.pac.exponential import run_exponential_mechanism
from pate_torch.pac.logistic import compute_convex_size
from pate_torch.pac.sample import BelowGuaranteeWarning, Sample
from pate_torch.pac.semi_private import compute_sspp_private_size, compute_sspp_public_size, run_sspp
from pate_torch.privacy.noise import DryRunNoise
from tests.pac.pac_audit import Spy, all_laws, fit, sample_of, worst

quiet = pytest.mark.filterwarnings("ignore::pate_torch.pac.sample.BelowGuaranteeWarning")
DOMAIN = np.arange(3.0)


def brute_law(records, candidates, rate):
    """P(t) ~ exp(-rate errors(t)) for thresholds, from the definition."""
    weight = [math.exp(-rate * sum((x >= t) != y for x, y in records)) for t in candidates]
    return np.array(weight) / sum(weight)


@pytest.fixture
def executed(monkeypatch):
    """Runs an algorithm and returns the exact law it draws from, instead of a draw."""

    def law_of(run, module=exponential):
        seen = []
        monkeypatch.setattr(
            module,
            "draw_gumbel_max",
            lambda u, rate, noise: seen.append(np.exp(compute_log_probabilities(u, rate))) or 0,
        )
        run()
        return seen[-1]

    return law_of


@quiet
def test_sspp_is_private_over_every_pair_of_neighbors(executed):
    """All 6^3 data sets over three points: executed law = brute force; loss and range at most epsilon, nearly met."""
    epsilon, hypotheses = 0.8, Thresholds()
    cuts = hypotheses.enumerate_representatives(DOMAIN[:, None])

    def law(records):
        run = lambda: run_sspp(hypotheses, sample_of(records), DOMAIN, epsilon=epsilon, budget=DryRunNoise())  # noqa: E731
        found = executed(run)
        np.testing.assert_allclose(found, brute_law(records, cuts, epsilon / 2), rtol=1e-12)
        return found

    laws, records_U = all_laws(law, 3, 3)
    loss, span, _ = worst(laws, records_U)
    assert span <= epsilon + 1e-9 and loss <= epsilon
    assert span > 0.99 * epsilon  # the event charged is not just an upper bound
    doubled = {records: law**2 / (law**2).sum() for records, law in laws.items()}
    assert worst(doubled, records_U)[1] > 1.9 * epsilon  # a rate without the 1/2 would be caught


@quiet
@pytest.mark.parametrize(
    "records",
    [
        ((0, 0), (1, 1), (2, 1), (1, 0)),
        *(pytest.param(records, marks=pytest.mark.slow) for records in [((2, 1),) * 5, ((0, 0), (1, 0), (2, 0))]),
    ],
)
def test_sspp_draws_from_its_law(records):
    noise, epsilon = DryRunNoise(insecure_seed=1), 1.0
    counts = np.zeros(4)
    for _ in range(3000):
        counts[run_sspp(Thresholds(), sample_of(records), DOMAIN, epsilon=epsilon, budget=noise).index] += 1
    cuts = Thresholds().enumerate_representatives(DOMAIN[:, None])
    assert fit(counts, brute_law(records, cuts, epsilon / 2)) > 1e-4
    assert fit(counts, brute_law(records, cuts, epsilon)) < 1e-6


def test_gumbel_max_stays_in_log_space():
    """Utilities whose exponentials over- and underflow; a chi-square test that rejects twice and half the rate."""
    utility, rate = np.array([-1e6, -1e6 - 3, -1e6 - 6, -4e6]), 0.25
    noise = DryRunNoise(insecure_seed=2)
    counts = np.bincount([draw_gumbel_max(utility, rate, noise) for _ in range(4000)], minlength=4)
    assert counts[3] == 0
    law = np.exp(compute_log_probabilities(utility, rate))[:3]
    assert fit(counts[:3], law) > 1e-4
    for wrong in (rate / 2, rate * 1.5):
        assert fit(counts[:3], np.exp(compute_log_probabilities(utility, wrong))[:3]) < 1e-6


@pytest.mark.parametrize("adjacency,steps", [("replace_one", (-1, 0, 1)), ("add_remove", (0, 1))])
def test_selection_prices_both_adjacencies_exactly(executed, adjacency, steps):
    epsilon, sensitivity = 0.9, 2
    base = np.array([5, 9, 7])

    def law(errors):
        run = lambda: draw_model_index(errors, epsilon, DryRunNoise(), adjacency=adjacency, sensitivity=sensitivity)  # noqa: E731
        return executed(run, mechanism)

    spans = {}
    for move in itertools.product((-1, 0, 1), repeat=3):
        ratio = np.log(law(base)) - np.log(law(base + sensitivity * np.array(move)))
        spans[move] = np.ptp(ratio)
    inside = max(span for move, span in spans.items() if set(move) <= set(steps))
    assert inside == pytest.approx(epsilon, abs=1e-9)
    # The add/remove rate would be twice too high for replace-one.
    assert max(spans.values()) == pytest.approx(epsilon * (2 if adjacency == "add_remove" else 1), abs=1e-9)


def test_selection_finds_the_best():
    spy = Spy(3)
    assert draw_model_index(np.array([400, 50, 300]), 1.0, spy, adjacency="replace_one") == 1
    counts = np.zeros(3)
    for _ in range(3000):
        counts[draw_model_index(np.array([4, 2, 3]), 1.0, spy, adjacency="add_remove")] += 1
    law = np.exp([-4.0, -2.0, -3.0])
    assert fit(counts, law / law.sum()) > 1e-4
    assert fit(counts, np.sqrt(law) / np.sqrt(law).sum()) < 1e-6


def test_one_candidate_costs_nothing():
    free = Spy()
    constant = Listed([lambda x: np.ones(len(x)), lambda x: x[:, 0] > -1])
    big, public = Sample(np.zeros(10**6), np.ones(10**6)), np.zeros(compute_sspp_public_size(1, alpha=0.5, beta=0.5))
    assert run_sspp(constant, big, public, epsilon=1.0, budget=free).events == ()
    assert free.log == []


# --- WLF16 Theorem 18 --------------------------------------------------------------------------------------------


def boosted_law(records, cuts, epsilon, rounds):
    """The law of the final candidate, by enumerating the folds' winners."""
    parts = [records[block] for block in split_folds(len(records), rounds + 1)]
    law = np.zeros(len(cuts))
    for winners in itertools.product(range(len(cuts)), repeat=rounds):
        reach = math.prod(brute_law(p, cuts, epsilon / 2)[w] for p, w in zip(parts[:-1], winners, strict=True))
        final = brute_law(parts[-1], [cuts[w] for w in winners], epsilon / 2)
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


def test_boosting_keeps_the_price_of_a_bounded_range_but_not_the_range():
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
        for order, price in zip(
            (1.01, 2.0, 8.0, 64.0), rdp.compute_curve(charged, (1.01, 2.0, 8.0, 64.0)), strict=True
        ):
            assert math.log((p**order * q ** (1 - order)).sum()) / (order - 1) <= price
        for e in (0.0, 0.3, 0.7):
            assert np.maximum(p - math.exp(e) * q, 0).sum() <= accounting_delta(charged, e)


def test_boosting_is_as_good_as_it_says_with_the_fewest_records_it_asks_for():
    """Thresholds of error 0, .3 and .5: with the n of the bound, the bad ones are chosen too rarely to break it."""
    asked = {"epsilon": 1.0, "alpha": 0.2, "failure": 0.2}
    n, cuts, rounds = compute_high_confidence_size(3, **asked), [0.5, 0.8, 1.0], 3

    def bound(k):
        xi = 2 * math.log(3) / k + math.sqrt(math.log(3) / (2 * k))
        return math.e * xi + 2 * math.sqrt(math.log(6 * rounds / 0.2) / (2 * k)) + 2 * math.log(3 * rounds / 0.2) / k

    assert math.ceil(math.log(3 / 0.2)) == rounds and n % (rounds + 1) == 0
    assert bound(n // (rounds + 1)) <= 0.2 < bound(n // (rounds + 1) - 1)
    generator, noise, bad = np.random.default_rng(0), DryRunNoise(insecure_seed=8), 0
    for _ in range(60):
        x = generator.random(n)
        bad += run_high_confidence(Thresholds(), cuts, Sample(x, x >= 0.5), budget=noise, **asked).index > 0
    assert bad <= 60 * 0.2
    with pytest.warns(BelowGuaranteeWarning, match=rf"excess error 0.2 with probability 0.8: n >= {n:,}"):
        run_high_confidence(Thresholds(), cuts, Sample(x[1:], x[1:] >= 0.5), budget=noise, **asked)


@quiet
def test_boosting_costs_one_epsilon_not_two_and_draws_from_its_law():
    epsilon, cuts = 1.2, [-np.inf, 0.5, np.inf]
    laws, records_U = all_laws(lambda records: boosted_law(records, cuts, epsilon, 2), 2, 3)
    loss, span, _ = worst(laws, records_U)
    assert span <= epsilon + 1e-9 and loss <= epsilon
    records = ((0, 0), (1, 1), (0, 1), (1, 1), (1, 1))
    noise, counts = DryRunNoise(insecure_seed=4), np.zeros(3)
    for _ in range(2500):
        done = run_high_confidence(Thresholds(), cuts, sample_of(records), epsilon=epsilon, failure=0.5, budget=noise)
        counts[done.index] += 1
    assert done.events == (BoundedRangeEvent(eta=epsilon),)
    assert fit(counts, boosted_law(records, cuts, epsilon, 2)) > 1e-4
    assert fit(counts, boosted_law(records, cuts, 2.5 * epsilon, 2)) < 1e-6


def test_boosting_takes_log_three_over_failure_folds():
    with pytest.raises(ValueError, match="6 folds"):
        run_high_confidence(
            Thresholds(), [0.0, 1.0], sample_of(((0, 1),) * 5), epsilon=1.0, failure=0.03, budget=DryRunNoise()
        )
    assert [b.stop - b.start for b in split_folds(11, 4)] == [3, 3, 3, 2]


# --- The continuous case -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_the_convex_excess_is_dimension_over_rate(dimension):
    """By quadrature over the radius: |theta| over a ball has excess D/rate as the ball grows, and never more."""
    for radius in (0.5, 3.0, 40.0):
        r = np.linspace(0, radius, 200_001)
        weight = r ** (dimension - 1) * np.exp(-r)
        excess = (weight * r).sum() / weight.sum()
        assert excess <= dimension * (1 + 1e-3)
    assert excess == pytest.approx(dimension, rel=1e-3)
    assert compute_convex_size(dimension, epsilon=0.5, alpha=0.1, loss_range=2.0) == pytest.approx(80 * dimension)


# --- Bad input ---------------------------------------------------------------------------------------------------


@quiet
def test_charge_comes_before_noise_and_can_refuse():
    class Empty(Spy):
        def spend(self, events, **facts):
            raise RuntimeError("over budget")

    records = ((0, 0), (1, 1), (2, 1)) * 3
    for run in (
        lambda budget: run_sspp(Thresholds(), sample_of(records), DOMAIN, epsilon=1.0, budget=budget, alpha=0.99),
        lambda budget: run_high_confidence(
            Thresholds(), [0.5, 1.5], sample_of(records), epsilon=1.0, failure=0.5, budget=budget
        ),
    ):
        spy = Empty()
        with pytest.raises(RuntimeError, match="over budget"):
            run(spy)
        assert spy.log == []
        spy = Spy()
        run(spy)
        assert spy.log[0] == "charge" and spy.log.count("charge") == 1 and "draw" in spy.log


def test_below_the_guarantee_it_warns_and_above_it_does_not():
    n = math.ceil(2 * math.log(3) / (1.0 * 0.2))
    cuts = [0.5, 1.5, 2.5]
    for size in (n, n - 1):
        sample = sample_of(((1, 1),) * size)
        run = lambda s=sample: run_exponential_mechanism(  # noqa: E731
            Thresholds(), cuts, s, epsilon=1.0, budget=DryRunNoise(), alpha=0.2
        )
        if size < n:
            with pytest.warns(BelowGuaranteeWarning, match=r"excess empirical error 0\.2"):
                run()
        else:
            run()
    assert compute_sspp_private_size(1, epsilon=1.0, alpha=0.1, beta=0.1) > compute_sspp_private_size(
        1, epsilon=1.0, alpha=0.2, beta=0.1
    )


def test_sspp_counts_public_points_too():
    """Too few do not cover the class; too many make a cover that takes more records to choose from."""
    asked = {"epsilon": 0.01, "alpha": 0.4, "beta": 0.4}
    enough = compute_sspp_public_size(1, alpha=0.4, beta=0.4)
    n = compute_sspp_private_size(1, **asked)
    assert (
        n
        == compute_sspp_private_size(1, **asked, num_public=enough)
        < compute_sspp_private_size(1, **asked, num_public=10 * enough)
    )
    run = {**asked, "budget": DryRunNoise()}
    sample = Sample(np.zeros(n), np.ones(n))
    run_sspp(Thresholds(), sample, np.linspace(0, 1, enough), **run)
    with pytest.warns(BelowGuaranteeWarning, match=rf"public points >= {enough}, here {enough - 1}"):
        run_sspp(Thresholds(), sample, np.linspace(0, 1, enough - 1), **run)
    with pytest.warns(BelowGuaranteeWarning, match="excess error 0.4 with probability 0.6: n >="):
        run_sspp(Thresholds(), sample, np.linspace(0, 1, 10 * enough), **run)


def test_bad_input_is_refused():
    far = Sample(np.zeros(3), np.ones(3), adjacency="add_remove")
    with pytest.raises(ValueError, match="replace_one"):
        run_sspp(Thresholds(), far, DOMAIN, epsilon=1.0, budget=DryRunNoise())
    near = Sample(np.zeros(3), np.ones(3))
    for epsilon in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="epsilon"):
            run_sspp(Thresholds(), near, DOMAIN, epsilon=epsilon, budget=DryRunNoise())
    with pytest.raises(ValueError, match="public_x"):
        run_sspp(Thresholds(), near, np.zeros((0, 1)), epsilon=1.0, budget=DryRunNoise())
    with pytest.raises(ValueError, match="candidates"):
        run_exponential_mechanism(Thresholds(), [], near, epsilon=1.0, budget=DryRunNoise())
    for errors in (np.array([0.1, 0.2]), np.array([-1, 2]), np.array([], dtype=int), np.array([[1, 2]])):
        with pytest.raises(ValueError, match="errors_M"):
            draw_model_index(errors, 1.0, DryRunNoise(), adjacency="replace_one")
    with pytest.raises(ValueError, match="finite"):
        compute_log_probabilities(np.array([0.0, np.nan]), 1.0)


def test_any_loss_is_private_at_its_sensitivity():
    """Losses in [-1, 1], two records, every neighbor: the range is met exactly at range/n, not at 2 range/n."""
    epsilon, n, loss_range, table = 0.7, 2, 2.0, {z: np.array([z, -z, 0.0, z * z]) for z in (-1.0, -0.5, 0.0, 1.0)}
    laws = {
        records: compute_log_probabilities(
            -np.mean([table[z] for z in records], axis=0), epsilon / (2 * loss_range / n)
        )
        for records in itertools.product(table, repeat=n)
    }
    spans = [
        np.ptp(laws[one] - laws[other])
        for one, other in itertools.product(laws, repeat=2)
        if sum(a != b for a, b in zip(one, other, strict=True)) == 1
    ]
    assert 0.99 * epsilon < max(spans) <= epsilon + 1e-9
