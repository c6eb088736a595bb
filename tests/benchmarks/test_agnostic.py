"""Relabeling, sub-sample and aggregate, and AgPrivCl: exact constants and exact budgets."""

import itertools
import math

import numpy as np
import pytest
from scipy.stats import binom

from benchmarks.theory.agnostic import (
    RELABEL_FACTOR,
    AgPrivClPlan,
    compute_shard_votes,
    draw_with_replacement,
    relabel,
    run_ag_priv_cl,
    run_sub_samp,
    split_folds,
)
from benchmarks.theory.classes import Listed
from pate_torch.accounting.events import PureDPEvent
from pate_torch.hypotheses.classes import Thresholds
from pate_torch.hypotheses.sample import BelowGuaranteeWarning, Sample, compute_net_size
from pate_torch.mechanisms.sparse_vector import SparseVector
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER
from tests.hypotheses.exact_laws import Spy, charges_first, fit, neighbors, quiet, sample_of, universe

ASKED = {"epsilon": 1.0, "delta": 1e-5, "alpha": 0.1, "beta": 0.1}


def plan_of(n, num_queries, vc_dimension=1, **options):
    return AgPrivClPlan(n=n, num_queries=num_queries, vc_dimension=vc_dimension, **{**ASKED, **options})


# --- Relabeling ------------------------------------------------------------------------------------------------------


def relabel_law(records):
    """{labeled sample: probability}, thresholds, from the definition."""
    x = sorted({x for x, _ in records})
    cuts = [-math.inf, *(v + 0.5 for v in x)]
    weight = {tuple(a >= t for a, _ in records): math.exp(-sum((a >= t) != y for a, y in records) / 2) for t in cuts}
    total = sum(weight.values())
    return {tuple(zip((a for a, _ in records), labels, strict=True)): w / total for labels, w in weight.items()}


def test_relabel_draws_from_its_law():
    records, noise = ((0, 0), (1, 1), (1, 0), (2, 1)), DryRunNoise(insecure_seed=0)
    law = relabel_law(records)
    counts = dict.fromkeys(law, 0)
    for _ in range(2000):
        done = relabel(Thresholds(), sample_of(records), noise=noise)
        counts[tuple(zip(done.x[:, 0].astype(int).tolist(), done.y.tolist(), strict=True))] += 1
    assert fit(list(counts.values()), list(law.values())) > 1e-4
    squared = np.array(list(law.values())) ** 2
    assert fit(list(counts.values()), squared / squared.sum()) < 1e-6


def test_relabeling_multiplies_the_cost_by_its_factor_at_most():
    """A = randomized response on every record (e-DP): after relabel above e, at most e + 2 ln(1 + e^1/2), exactly."""
    epsilon, records_U, n = 0.5, universe(2), 3
    outputs = list(itertools.product(records_U, repeat=n))
    keep, other = math.exp(epsilon), 1.0
    norm = keep + (len(records_U) - 1) * other

    def law(records):
        out = np.zeros(len(outputs))
        for labeled, p in relabel_law(records).items():
            for o, output in enumerate(outputs):
                same = sum(a == b for a, b in zip(labeled, output, strict=True))
                out[o] += p * keep**same / norm**n
        return out

    laws = {records: law(records) for records in outputs}
    loss = max(float(np.log(laws[r] / laws[s]).max()) for r in laws for s in neighbors(r, records_U))
    assert epsilon < loss <= epsilon + math.log(RELABEL_FACTOR)
    assert math.log(RELABEL_FACTOR) < 3  # NB20 Lemma 3.1


def test_relabeling_leaves_delta_as_it_is():
    """A tells all with probability d, else nothing: (0, d)-DP. After relabel (ln F, d) holds, exactly; (ln F, d/2) does
    not, and neither does (0, d): delta is used up, and F is needed. NB20 Lemma 3.1 would say 4 e d.
    """
    d, records_U = 0.3, universe(3)
    # A neighbor that shares no point tells itself apart for certain; one that shares them shifts the dichotomies.
    laws = {records: relabel_law(records) for records in itertools.product(records_U, repeat=3)}

    def excess(epsilon, left, right):
        """Hockey-stick divergence; the outcomes: nothing told, or the relabeled sample."""
        silent = max(0.0, (1 - d) * (1 - math.exp(epsilon)))
        return silent + sum(max(0.0, d * (p - math.exp(epsilon) * right.get(o, 0.0))) for o, p in left.items())

    F = math.log(RELABEL_FACTOR)
    pairs = [(laws[r], laws[s]) for r in laws for s in neighbors(r, records_U)]
    worst_F = max(excess(F, *pair) for pair in pairs)
    assert d / 2 < worst_F <= d + 1e-12

    # The factor acts where nothing new is told: the common points' labels alone.
    def common(law):
        table = {}
        for labeled, p in law.items():
            table[labeled[:-1]] = table.get(labeled[:-1], 0.0) + p
        return table

    moved = max(
        excess(0.0, common(laws[r]), common(laws[(*r[:-1], new)])) for r in laws for new in records_U if new != r[-1]
    )
    assert 0 < moved < d


# --- The plan --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.01, 3.5, 80.0])
@pytest.mark.parametrize("constants", ["paper", "sharp"])
def test_no_epsilon_is_passed(epsilon, constants):
    """Where the whole sample is drawn, relabeling and epsilon* are all there is."""
    plan = plan_of(10_000, 50, epsilon=epsilon, constants=constants, resample=True)
    assert plan.total_cost[0] <= epsilon and plan.total_cost[1] <= ASKED["delta"] * (1 + 1e-12)
    assert plan.total_cost[0] <= math.log(RELABEL_FACTOR) + plan.inner_cost[0]


@pytest.mark.parametrize("delta", [0.3, 1e-2, 1e-9])
@pytest.mark.parametrize("constants", ["paper", "sharp"])
def test_the_plan_adds_up_to_the_privacy_asked_for(delta, constants):
    """Each step of the proof, recomputed with scipy from the plan's own numbers."""
    n, m = 200_000, 50
    plan = plan_of(n, m, delta=delta, constants=constants, resample=True)
    inner_epsilon, inner_delta = plan.inner_cost
    tail = float(binom.sf(plan.max_draws, plan.subset_size, 1 / plan.subset_size))
    assert tail <= inner_delta / 2 < binom.sf(plan.max_draws - 1, plan.subset_size, 1 / plan.subset_size)
    hat_epsilon, hat_delta = plan.record_cost
    mechanism = plan.mechanism
    pure = math.fsum(e.count * e.epsilon for e in mechanism.privacy_events(m) if isinstance(e, PureDPEvent))
    proved = [(mechanism.epsilon, mechanism.delta), (pure, mechanism.failure_delta)]
    assert any(e <= hat_epsilon * (1 + 1e-12) and d <= hat_delta * (1 + 1e-12) for e, d in proved)
    assert hat_epsilon * plan.max_draws <= inner_epsilon * (1 + 1e-12)
    group = hat_delta * sum(math.exp(i * hat_epsilon) for i in range(plan.max_draws))
    assert group + tail <= inner_delta * (1 + 1e-9)
    q = plan.subset_size / n
    assert math.log1p(q * (RELABEL_FACTOR * math.exp(inner_epsilon) - 1)) <= 1.0 + 1e-9
    assert q * inner_delta <= delta * (1 + 1e-9)
    if constants == "paper":
        assert plan.subset_size == math.floor(n / 56)
        assert inner_epsilon == pytest.approx(min(1.0, 0.1 * math.sqrt(m * 0.1)))
        # NB20's own (looser) chain holds as well: e^(epsilon* + 3), 4 e delta.
        assert math.log1p(q * math.expm1(inner_epsilon + 3)) <= 1.0 and q * 4 * math.e * delta <= delta
    else:
        assert plan.total_cost == pytest.approx((1.0, delta), rel=1e-3) or inner_delta == 0.5


def test_the_resampling_trap_at_delta_one_tenth():
    """ln(2/delta) = 2.9957 draws are exceeded with probability 0.080 > 0.05; the plan takes the exact quantile."""
    plan = plan_of(100_000, 50, delta=0.1)
    printed = math.floor(math.log(2 / 0.1))
    trap = float(binom.sf(printed, plan.subset_size, 1 / plan.subset_size))
    assert trap == pytest.approx(0.080, abs=5e-4) and trap > 0.05
    assert plan.max_draws == 3 > printed
    # The printed epsilon_hat, delta_hat do not add up to delta.
    inner_epsilon = plan.inner_cost[0]
    hat_epsilon = inner_epsilon / math.log(20)
    hat_delta = 0.1 / (2 * math.exp(inner_epsilon) * math.log(20))
    group = hat_delta * sum(math.exp(i * hat_epsilon) for i in range(printed))
    assert trap + group > 0.1
    assert plan_of(10**6, 50).max_draws == 8  # and at 1e-5 the printed 12.2 is wasteful


def test_exact_delta_of_resampling_with_the_plan_and_with_the_trap():
    """The worst (e, d)-DP mechanism under r copies of a record, mixed over r, exactly: the plan keeps its delta.

    The printed epsilon_hat and delta_hat break the proof at delta = 0.1 and not the guarantee: the records drawn too
    often are, most of them, drawn only once too often. To pay as if every record were drawn once breaks both.
    """
    plan = plan_of(100_000, 50, delta=0.1, constants="sharp", resample=True)

    def excess(target, hat_epsilon, hat_delta):
        total = 0.0
        for r in range(1, 30):
            p = binom.pmf(r, plan.subset_size, 1 / plan.subset_size)
            given = hat_delta * sum(math.exp(i * hat_epsilon) for i in range(r))
            e = r * hat_epsilon
            reveal = max(0.0, (math.exp(e) - math.exp(target)) / (1 + math.exp(e)))
            total += p * min(1.0, given + reveal)
        return total

    assert excess(plan.inner_cost[0], *plan.record_cost) <= plan.inner_cost[1]
    often = math.log(2 / 0.1)
    assert excess(1.0, 1 / often, 0.1 / (2 * math.e * often)) < 0.1 < excess(1.0, 1.0, 0.0)


@pytest.mark.slow(reason="sizes of five plans of 1e12 records")
def test_what_the_accuracy_takes():
    """T/3 of the queries may be got wrong by a teacher, once in 8 K/beta: exact here, and certain with the paper's."""
    alpha, beta, d, n = 0.1, 0.1, 1, 10**12
    m = plan_of(n, 50).min_queries
    plan = plan_of(n, m, d, constants="sharp")
    K, T = plan.min_teachers, plan.mechanism.max_failures
    assert m * alpha / 4 >= T and math.exp(-2 * m * (3 * alpha / 8) ** 2) <= beta / 8
    assert m > 8 * math.log(1 / (alpha * beta)) / alpha  # NB20 Lemma 3.5's, for a best error of the order of alpha
    # A shard of so many records is a net for disagreements of ``apart`` and more, but with probability beta/(8 K).
    shard = plan.min_n * plan.subset_size / n / K
    apart = next(
        a for a in np.geomspace(1e-5, 0.1, 2000) if compute_net_size(a, beta / (8 * K), d) <= shard * (1 + 1e-9)
    )
    assert binom.sf(T // 3, m, apart) == pytest.approx(beta / (8 * K), rel=0.2)
    assert binom.sf(T // 3, m, alpha / 12) > 0.5
    # More queries than these only need more records by their logarithms and their teachers.
    assert plan.min_n < plan_of(n, 10 * m, d, constants="sharp").min_n


def test_without_resampling_a_record_reaches_one_teacher():
    plan = plan_of(10**8, 50, resample=False)
    assert plan.max_draws == 1 and (plan.mechanism.epsilon, plan.mechanism.delta) == plan.inner_cost
    assert plan.num_teachers < plan_of(10**8, 50).num_teachers / 4
    assert plan_of(10**8, 50).resample is True and plan_of(10**8, 50, constants="sharp").resample is False


def test_cutoff_is_nb20s():
    m, alpha, beta = 4000, 0.1, 0.05
    printed = max(1, m * alpha / 8 + math.sqrt(3 * m * alpha * math.log(m / beta)) / 4)
    assert plan_of(10**6, m, beta=beta).mechanism.max_failures == math.ceil(printed)


# --- Sub-sampling ----------------------------------------------------------------------------------------------------


def test_draws_with_replacement_are_uniform():
    repeats = draw_with_replacement(6, 30_000, DryRunNoise(insecure_seed=5))
    assert fit(np.bincount(repeats, minlength=6), [1 / 6] * 6) > 1e-4


def test_shards_cover_the_sample_once_and_one_record_moves_one_vote():
    assert [b.stop - b.start for b in split_folds(11, 4)] == [3, 3, 3, 2]
    generator = np.random.default_rng(0)
    x, y = generator.normal(size=(30, 1)), generator.random(30) < 0.5
    queries = np.linspace(-2, 2, 9)[:, None]
    votes = compute_shard_votes(Thresholds(), Sample(x, y), 7, queries).counts_QC
    for i in range(30):
        other = y.copy()
        other[i] = ~other[i]
        moved = compute_shard_votes(Thresholds(), Sample(x, other), 7, queries).counts_QC - votes
        assert moved.abs().max() <= 1


# --- The algorithms ----------------------------------------------------------------------------------------------

CORNERS = np.arange(4.0)[:, None]
# LZCW21 Example 1: three hypotheses of error 1/2, whose majority has error 3/4.
VOTING_FAILS = Listed([lambda x, other=other: np.isin(x[:, 0], (0, other)) for other in (1, 2, 3)])


def always_one(n, seed=0):
    return Sample(np.random.default_rng(seed).integers(0, 4, size=n).astype(float), np.ones(n))


@quiet
def test_agprivcl_is_right_where_plain_voting_fails():
    sample = always_one(110_000)
    asked = {"epsilon": 1.0, "delta": 1e-2, "alpha": 0.2, "beta": 0.2}
    plan = plan_of(sample.n, 4, **asked, constants="sharp")
    mechanism = SparseVector(epsilon=1.0, delta=1e-2, max_failures=1)
    voting = {"num_teachers": 8 * plan.num_teachers, "mechanism": mechanism, "budget": DryRunNoise(insecure_seed=1)}
    plain = run_sub_samp(VOTING_FAILS, sample, CORNERS, **voting)
    assert plain.label_Q.tolist() == [1, 0, 0, 0]  # error 3/4
    noise = DryRunNoise(insecure_seed=0)
    answers = run_ag_priv_cl(VOTING_FAILS, sample, CORNERS, **asked, budget=noise, constants="sharp")
    assert answers.events == plan.events and plan.total_cost == pytest.approx((1.0, 1e-2), rel=1e-3)
    assert int((answers.label_Q != 1).sum()) == 2  # error 1/2, the best of the class


@quiet
def test_sub_samp_pads_what_it_never_reached_and_charges_the_worst_case():
    """On three corners a third of the teachers disagree, which is too close; two failures end the run."""
    spy, mechanism = Spy(), SparseVector(epsilon=0.5, delta=1e-3, max_failures=2)
    teachers = 2 * mechanism.make_cost(4).min_teachers
    asked = {"num_teachers": teachers, "mechanism": mechanism, "budget": spy}
    answers = run_sub_samp(VOTING_FAILS, always_one(10 * teachers), CORNERS, **asked)
    assert answers.label_Q.tolist() == [1, *[NO_ANSWER] * 3]
    assert spy.charged == mechanism.privacy_events(4) and charges_first(spy)


@quiet
def test_too_few_teachers_for_the_threshold_are_refused_before_a_charge():
    """One teacher fewer than the fewest that can pass; with so many, a unanimous vote is above the threshold."""
    spy, mechanism = Spy(), SparseVector(epsilon=0.5, delta=1e-3, max_failures=2)
    fewest = mechanism.make_cost(4).min_teachers
    distance = math.ceil(fewest / 2) - 1  # of a unanimous vote
    assert distance - 1 <= mechanism.make_cost(4).threshold < distance
    asked = {"mechanism": mechanism, "budget": spy}
    with pytest.raises(ValueError, match=rf"num_teachers={fewest - 1}: must be at least {fewest}"):
        run_sub_samp(VOTING_FAILS, always_one(4000), CORNERS, num_teachers=fewest - 1, **asked)
    assert spy.log == []
    run_sub_samp(VOTING_FAILS, always_one(4000), CORNERS, num_teachers=fewest, **asked)
    assert charges_first(spy)
    spy = Spy()
    with pytest.raises(ValueError, match=r"num_teachers=35: must be at least 2,165"):
        run_ag_priv_cl(
            VOTING_FAILS, always_one(4000), CORNERS, epsilon=0.5, delta=1e-3, alpha=0.2, beta=0.2, budget=spy
        )
    assert spy.log == []


@quiet
@pytest.mark.parametrize("resample", [True, False])
def test_agprivcl_charges_what_is_proved_before_it_draws(resample):
    spy, run = Spy(), {"epsilon": 0.5, "delta": 1e-3, "alpha": 0.2, "beta": 0.2, "resample": resample}
    n = 400_000 if resample else 100_000
    run |= {"asked_teachers": plan_of(n, 4, VOTING_FAILS.vc_dimension, **run).mechanism.make_cost(4).min_teachers}
    run_ag_priv_cl(VOTING_FAILS, always_one(n), CORNERS, **run, budget=spy)
    plan = plan_of(n, 4, VOTING_FAILS.vc_dimension, **run)
    assert charges_first(spy) and spy.charged == plan.events
    proved = plan.total_cost
    assert 0 < proved[0] < 0.2 * 0.5 and 0 < proved[1] < 0.02 * 1e-3  # printed constants: a fraction of what was asked


def test_bad_input_is_refused_before_a_charge():
    asked = {**ASKED, "budget": (spy := Spy())}
    with pytest.raises(ValueError, match=r"sub-sample .* is empty.*n >= 56"):
        run_ag_priv_cl(Thresholds(), sample_of(((0, 1),) * 55), [0.0], **asked)
    with pytest.warns(BelowGuaranteeWarning), pytest.raises(ValueError, match="num_teachers"):
        run_ag_priv_cl(Thresholds(), sample_of(((1, 1),) * 120), [0.0], **asked, asked_teachers=3)
    assert spy.log == []
