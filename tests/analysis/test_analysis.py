"""Margins, stability and the theorems' numbers, against closed forms, brute force and simulation."""

import math

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch import networks
from pate_torch.analysis import sample_sizes as sizes
from pate_torch.analysis.figures import margin_correlation, margin_distribution
from pate_torch.analysis.margins import disagreement_margin, expected_margin, high_margin_curve, share_of_ones
from pate_torch.analysis.stability import by_teachers, on_average_stability, one_by_one, quality
from pate_torch.core.rng import derive, torch_stream
from pate_torch.mechanisms.stability import Stability
from pate_torch.noise.source import Rehearsal
from pate_torch.sensitive import Votes
from pate_torch.teachers.engine import batches
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.types import Context, DataSpec


def binary(ones, K):
    ones = torch.as_tensor(ones)
    return Votes(torch.stack([K - ones, ones], 1), K)


# --- Margins -----------------------------------------------------------------------------------------------------


def test_margins_of_known_votes():
    votes, reference = binary([10, 5, 0, 7], 10), np.array([True, True, True, False])
    share = share_of_ones(votes)
    np.testing.assert_allclose(expected_margin(share), [0.5, 0.0, 0.5, 0.2])
    np.testing.assert_allclose(disagreement_margin(share, reference), [-0.5, 0.0, 0.5, 0.2])
    # In absolute value the two are the same thing, whatever the reference: hence the sign.
    np.testing.assert_allclose(np.abs(disagreement_margin(share, ~reference)), expected_margin(share))
    np.testing.assert_allclose(high_margin_curve(expected_margin(share), [0.0, 0.19, 0.2, 0.5]), [0.25, 0.25, 0.5, 1])


def test_estimated_margin_is_biased_by_half_a_standard_error_at_most():
    generator, K = np.random.default_rng(0), 100
    share = generator.binomial(K, 0.5, size=20_000) / K
    bias = expected_margin(share).mean()
    assert bias == pytest.approx(math.sqrt(1 / (2 * math.pi * K)), rel=0.05)
    assert bias < 1 / (2 * math.sqrt(K))


def test_figures_hold_the_numbers():
    generator, K = np.random.default_rng(1), 50
    votes, reference = binary(generator.binomial(K, 0.9, size=300), K), generator.random(300) < 0.8
    share = share_of_ones(votes)
    line = margin_correlation(votes, reference, queries=120).axes[0].get_lines()[1]
    np.testing.assert_allclose(line.get_xdata()[-1], expected_margin(share)[:120].sum())
    np.testing.assert_allclose(line.get_ydata()[-1], -disagreement_margin(share, reference)[:120].sum())
    figure = margin_distribution(votes, reference)
    heights = sum(patch.get_height() for patch in figure.axes[0].patches if hasattr(patch, "get_height"))
    assert heights == pytest.approx(1.0)
    curve = figure.axes[1].get_lines()[0]
    np.testing.assert_allclose(curve.get_ydata(), high_margin_curve(expected_margin(share), curve.get_xdata()))


def test_margins_refuse_what_they_are_not_defined_for():
    with pytest.raises(ValueError, match="two classes"):
        share_of_ones(Votes(torch.tensor([[1, 1, 1]]), 3))
    with pytest.raises(ValueError, match="fractions"):
        expected_margin([1.5])


# --- On-average stability ----------------------------------------------------------------------------------------


def test_stability_of_the_mean_is_its_closed_form():
    """h_D(x) = mean(y): replacing one of n changes it by (y' - y_j)/n, mean square 2 Var(y)/n^2."""
    generator, n, p = np.random.default_rng(2), 20, 0.3
    y = (generator.random(4000) < p).astype(float)
    mean = lambda x_B, y_B, points, coins: np.repeat(y_B.mean(1)[:, None], len(points), 1)  # noqa: E731
    found = on_average_stability(mean, y[:, None], y, np.zeros((2, 1)), n=n, pairs=6000, seed=0)
    assert found.alpha == pytest.approx(math.sqrt(2 * y.var()) / n, abs=4 * found.error)
    assert found.error < 0.02 * found.alpha * 2
    assert found.half_width == pytest.approx(4 * found.alpha * math.sqrt(2 * n))
    assert np.ptp(found.alpha_Q) == 0


def test_the_typical_change_is_that_of_a_mean_scaled_by_the_point():
    """h_D(x) = x mean(y) changes by x sqrt(2 Var(y))/n: most at x = 1, and by the root of the mean of x^2 over points.

    The standard error is what estimates from other pairs differ by.
    """
    generator, n, points = np.random.default_rng(4), 10, np.array([[0.0], [0.3], [1.0], [0.6]])
    y = (generator.random(4000) < 0.4).astype(float)
    scaled = lambda x_B, y_B, points, coins: y_B.mean(1)[:, None] * points.T  # noqa: E731
    found = [on_average_stability(scaled, y[:, None], y, points, n=n, pairs=1000, seed=seed) for seed in range(60)]
    exact = math.sqrt(2 * y.var()) / n
    np.testing.assert_allclose(found[0].alpha_Q, points[:, 0] * found[0].alpha, atol=1e-12)
    for estimate, error, truth in (
        ([one.alpha for one in found], found[0].error, exact),
        ([one.typical for one in found], found[0].typical_error, exact * math.sqrt((points**2).mean())),
    ):
        assert np.mean(estimate) == pytest.approx(truth, abs=4 * error / math.sqrt(60))
        assert np.std(estimate) == pytest.approx(error, rel=0.4)  # four standard errors of a standard deviation


def test_the_same_coins_go_to_both_of_a_pair():
    """A learner that answers by its coins alone is perfectly stable; with fresh coins it would not be."""
    seen = []

    def by_coins(x, y, points, coin):
        seen.append(coin)
        return np.full(len(points), np.random.default_rng(coin).random())

    x = np.arange(30.0)[:, None]
    found = on_average_stability(one_by_one(by_coins), x, x[:, 0], x[:3], n=5, pairs=7, seed=1, batch=3)
    assert found.alpha == 0 and found.error == 0
    assert len(set(seen)) == 7 and len(seen) == 14


def test_pairs_differ_in_one_record_from_outside():
    def check(x_B, y_B, points, coins):
        kept, replaced = x_B[: len(x_B) // 2], x_B[len(x_B) // 2 :]
        assert ((kept != replaced).sum(1) == 1).all()
        for row in (*kept, *replaced):
            assert len(set(row)) == len(row)
        return np.zeros((len(x_B), len(points)))

    x = np.arange(9)
    on_average_stability(check, x, x, x[:1], n=8, pairs=20, seed=2)
    with pytest.raises(ValueError, match="replacement"):
        on_average_stability(check, x, x, x[:1], n=9, pairs=20, seed=2)
    with pytest.raises(ValueError, match="scores in"):
        on_average_stability(lambda *_: np.zeros((1, 1)), x, x, x[:1], n=3, pairs=4, seed=0)


def test_a_memoriser_is_as_unstable_as_its_closed_form():
    """The nearest record's label, labels being coins: it changes if the nearest of n + 1 is the old record or the new
    one, and half of the time then: alpha^2 = 1/(n + 1), a square root where the mean has 1/n."""
    generator, n = np.random.default_rng(5), 15
    x, y = generator.random(5000), (generator.random(5000) < 0.5).astype(float)

    def nearest(x_B, y_B, points, coins):
        return np.stack([np.take_along_axis(y_B, np.abs(x_B - p).argmin(1)[:, None], 1)[:, 0] for p in points], 1)

    found = on_average_stability(nearest, x, y, np.array([0.4]), n=n, pairs=4000, seed=3)
    assert found.alpha == pytest.approx(1 / math.sqrt(n + 1), abs=4 * found.error)
    assert found.error < 0.05 * found.alpha


ROWS = DataSpec(name="rows", num_classes=2, input_shape=(2,), class_names=("0", "1"), mean=(0.0,) * 2, std=(1.0,) * 2)


def alone(recipe, soft=False):
    """``by_teachers`` written out for one data set: the plain program."""

    def fit_predict(x, y, points, coin):
        module = networks.build(recipe.network, ROWS.input_shape, 2, **recipe.options)
        networks.initialize(module, torch_stream(0, "teacher", coin, "init"))
        x, y = torch.as_tensor(x, dtype=torch.float32), torch.as_tensor(y)
        weights = list(module.parameters())
        momenta = [torch.zeros_like(w) for w in weights]
        for index in batches(0, coin, len(x), recipe.steps, recipe.batch_size).long():
            loss = torch.nn.functional.cross_entropy(module(x[index]), y[index])
            for w, m, g in zip(weights, momenta, torch.autograd.grad(loss, weights), strict=True):
                w.data -= recipe.learning_rate * m.mul_(recipe.momentum).add_(g)
        with torch.no_grad():
            logits = module(torch.as_tensor(points, dtype=torch.float32))
            return (logits.softmax(1)[:, 1] if soft else logits.argmax(1)).double().numpy()

    return one_by_one(fit_predict)


SGD = {"optimizer": "sgd", "label_smoothing": 0.0, "schedule": "constant"}


@pytest.mark.parametrize("network,options", [("logistic", {}), ("mlp", {"hidden": (6,)})])
def test_stacked_retraining_is_retraining_one_by_one(network, options):
    """Noisy labels, so that votes differ: at least 99.9 % of them are those of the plain program."""
    recipe = TeacherRecipe(network=network, options=options, steps=40, batch_size=4, learning_rate=0.1, chunk=5, **SGD)
    generator = np.random.default_rng(6)
    x, points = generator.normal(size=(60, 2)), generator.normal(size=(400, 2))
    y = ((x[:, 0] > 0) ^ (generator.random(60) < 0.3)).astype(int)
    records = np.stack([generator.permutation(60)[:12] for _ in range(12)])
    coins = [3, 9, 4] * 4
    fits = by_teachers(recipe, ROWS), alone(recipe)
    stacked, plain = (fit(x[records], y[records], points, coins) for fit in fits)
    assert (stacked == plain).mean() >= 0.999
    assert (plain != plain[0]).mean() > 0.02  # they do differ
    other = by_teachers(recipe, ROWS)(x[records], y[records], points, [c + 1 for c in coins])
    assert network == "logistic" or (stacked == other).mean() < 0.999  # and by their coins
    measured = [
        on_average_stability(fit, x, y, points, n=12, pairs=8, seed=4)
        for fit in (by_teachers(recipe, ROWS), alone(recipe))
    ]
    np.testing.assert_allclose(measured[0].alpha_Q, measured[1].alpha_Q, atol=1e-12)
    fits = by_teachers(recipe, ROWS, soft=True), alone(recipe, soft=True)
    stacked, plain = (fit(x[records], y[records], points, coins) for fit in fits)
    np.testing.assert_allclose(stacked, plain, atol=1e-4)
    assert plain.std() > 0.05


def coin_flipper(x, y, points, coin):
    """The share of ones, moved by .1 one way or the other as the coin falls, where the point says so."""
    return np.clip(y.mean() + np.where(points[:, 0] > 0, 0.1 * (-1) ** (coin % 2), 0.0), 0, 1)


def test_quality_of_a_mean_is_what_its_law_says():
    """The mean of n coins of probability .3: weak quality .3, strong quality the quantile of a hypergeometric law."""
    n, pool = 50, 4000
    x, y = np.zeros((pool, 1)), (np.arange(pool) < 3 * pool // 10).astype(np.int64)
    points = np.array([[-1.0], [1.0]])
    seeds = [seed for seed in range(20) if derive(seed, "coins", 0) % 2 != derive(seed, "coins", 1) % 2]
    found = quality(one_by_one(coin_flipper), x, y, points, n=n, models=4000, beta=0.1, seed=seeds[0])
    assert found.weak_Q == pytest.approx([0.3, 0.3], abs=0.01)
    law = stats.hypergeom(pool, 3 * pool // 10, n)
    assert found.strong_Q[0] == pytest.approx(law.ppf(0.9) / n, abs=1e-9)
    assert found.coins_Q[0] < 5 < found.coins_Q[1]  # the second learner's randomization is not consistent
    with pytest.raises(ValueError, match="even"):
        quality(one_by_one(coin_flipper), x, y, points, n=n, models=5, beta=0.1, seed=0)


@pytest.mark.slow
def test_teachers_of_known_stability_come_out_right():
    """Records that are all alike, labels that are coins. Who learns nothing never changes; who learns the majority of
    three does if the other two disagree and the new label is another: a quarter of the time."""
    generator = np.random.default_rng(7)
    x, y = np.ones((400, 2)), generator.integers(0, 2, 400)
    idle = by_teachers(TeacherRecipe(network="mlp", steps=1, learning_rate=1e-60, **SGD), ROWS)  # no float is so small
    assert on_average_stability(idle, x, y, x[:2], n=3, pairs=40, seed=0).alpha == 0
    recipe = TeacherRecipe(network="logistic", batch_size=3, steps=20, learning_rate=0.3, **SGD)
    majority = by_teachers(recipe, ROWS)
    found = on_average_stability(majority, x, y, x[:2], n=3, pairs=600, seed=0, batch=300)
    assert found.alpha == pytest.approx(0.5, abs=4 * found.error) and found.error < 0.03
    against = by_teachers(recipe, ROWS, label=0)
    assert on_average_stability(against, x, y, x[:2], n=3, pairs=600, seed=0).alpha == found.alpha


def test_teachers_that_cannot_be_retrained_are_refused():
    with pytest.raises(ValueError, match="lean_cnn"):
        by_teachers(TeacherRecipe(), ROWS)
    with pytest.raises(ValueError, match="label"):
        by_teachers(TeacherRecipe(network="logistic"), ROWS, label=2)


# --- Theorems ----------------------------------------------------------------------------------------------------

PRIVACY = {"epsilon": 1.0, "delta": 1e-5}


def test_btt18_and_lzcw21_teachers_by_hand():
    by_hand = 136 * math.log(4 * 1000 * 20 / 1e-5) * math.sqrt(20 * math.log(2e5))
    assert sizes.btt18_theorem_3_11(1000, 20, **PRIVACY, beta=0.1) == pytest.approx(by_hand)
    assert sizes.lzcw21_lemma_3(1000, 20, **PRIVACY, beta=0.1) == pytest.approx(by_hand)
    assert sizes.btt18_corollary_4_1(400, alpha=0.05, gamma=0.1, beta=0.1) == pytest.approx(
        3 * (60 + math.sqrt(200 * math.log(4000)))
    )


def test_lemma_4_2_counts_by_brute_force():
    """xi = 1/3: never more than 3B queries are got wrong by over a third of the teachers; the bound can be met."""
    generator = np.random.default_rng(3)
    for _ in range(200):
        wrong = generator.random((9, 30)) < generator.random()
        B = wrong.sum(1).max()
        assert (wrong.sum(0) > 3).sum() <= sizes.btt18_lemma_4_2(B, 1 / 3) == pytest.approx(sizes.lzcw21_lemma_4(B))


def test_theorem_28_clears_the_noise_it_was_derived_from():
    m, n = 500, 20_000
    K = sizes.lzcw21_theorem_28(m, n, **PRIVACY)
    # Algorithm 1's sigma solves sqrt(2 m ln(1/delta))/sigma + m/(2 sigma^2) = epsilon; K = 6 sigma sqrt(2 ln 2n).
    sigma = K / (6 * math.sqrt(2 * math.log(2 * n)))
    assert math.sqrt(2 * m * math.log(1e5)) / sigma + m / (2 * sigma**2) == pytest.approx(1.0)


def test_proposition_18_holds_in_simulation_with_the_fewest_teachers_its_proof_allows():
    """Margins exactly xi on all queries: with K all are answered; with half of it they are not."""
    m, xi, gamma = 300, 0.25, 0.05
    T, K = sizes.lzcw21_proposition_18(m, nu=0.01, xi=xi, **PRIVACY, gamma=gamma)
    scale, threshold = sizes.lzcw21_algorithm_2(m, T, **PRIVACY)
    L = math.log(3 * m / gamma)
    noise_bound = scale * math.log(3 * T / gamma) + 2 * scale * L

    def spare(teachers):
        return (2 * teachers * xi - math.sqrt(2 * teachers * L)) / 2 - 1 - threshold - noise_bound

    assert spare(K - 1) < 0 <= spare(K)
    mechanism = Stability(epsilon=1.0, delta=1e-5, max_failures=T)
    noise, generator = Rehearsal(insecure_seed=0), np.random.default_rng(4)

    def answered(teachers):
        votes = binary(generator.binomial(teachers, 0.5 + xi, size=m), teachers)
        answers = mechanism.release(votes, noise, Context(num_queries=m))
        return len(answers.label_Q) == m and bool((answers.label_Q == 1).all())

    assert all(answered(K) for _ in range(20))
    assert not any(answered(K // 2) for _ in range(20))
    # The printed K, with the printed w, misses the condition its own proof needs.
    printed = 3 * scale * (math.log(4 * m / 1e-5) + L) / xi
    printed_w = 3 * scale * math.log(2 * (m + T) / 1e-5)
    assert (2 * printed * xi - math.sqrt(2 * printed * L)) / 2 - 1 < printed_w + 3 * scale * L


def test_rates_have_the_exponents_they_are_known_for():
    def slope(f, a, b):
        return math.log(f(b) / f(a)) / math.log(b / a)

    n_rate = lambda n: sizes.lzcw21_theorem_10(10**9, 2, int(n), epsilon=1.0, tau=1.0)[1]  # noqa: E731
    assert slope(n_rate, 1e3, 1e4) == pytest.approx(-2, abs=0.01)
    assert slope(lambda m: sizes.lzcw21_remark_12(1, int(m), epsilon=1.0, tau=1.0), 1e4, 1e6) == pytest.approx(1)
    # With m as good as it can be, Gaussian PATE has the rate of Remark 29, (n epsilon)^{-2 tau/(4 - tau)}.
    best = lambda n: min(  # noqa: E731
        sizes.lzcw21_theorem_28_error(m, 1, int(n), epsilon=1.0, tau=0.5) for m in np.geomspace(1, n, 4000)
    )
    assert slope(best, 1e6, 1e8) == pytest.approx(-2 * 0.5 / 3.5, abs=0.005)
    active = lambda n: sizes.lzcw21_theorem_22_error(10**12, 4, int(n), **PRIVACY, theta=3.0, tau=1.0)  # noqa: E731
    assert slope(active, 1e4, 1e5) == pytest.approx(-1)
    half = lambda a: sizes.df20_theorem_1(1, gamma=0.9, alpha=a, beta=0.1)  # noqa: E731
    assert slope(half, 1e-4, 1e-5) == pytest.approx(-2, abs=0.05)
    agnostic = lambda m: sizes.nb20_theorem_3_3(int(m), 1, **PRIVACY, alpha=0.01, beta=0.1)  # noqa: E731
    assert slope(agnostic, 1e9, 1e11) == pytest.approx(0.5, abs=0.1)
    assert sizes.df20_theorem_4(9, gamma=0.1, alpha=0.1) == pytest.approx(100)
    assert sizes.wlf16_theorem_18(0.05) == 5


def test_the_rest_by_hand():
    assert sizes.btt18_claim_4_5(alpha=0.01, gamma=0.1) == pytest.approx(0.37)
    assert sizes.btt18_theorem_4_7(alpha=0.01, gamma=0.1) == pytest.approx(0.85)
    assert sizes.btt18_lemma_5_8(50, alpha=0.01) == pytest.approx(0.4)
    assert sizes.btt18_theorem_5_6(100, 5, **PRIVACY, beta=0.1) == pytest.approx(
        32 * math.log(4000 / 1e-5) * math.sqrt(20 * math.log(2e5))
    )
    assert sizes.btt18_lemma_5_13(10.0, 300.0, beta=0.1) == math.ceil(60 * math.sqrt(5) * math.log(20) + 1806)
    assert sizes.btt18_lemma_5_13(0.1, 3.0, beta=0.1) == math.ceil(72 * math.log(20))
    K, width, error = sizes.btt18_theorem_5_14(100, 5, **PRIVACY, beta=0.1, n_shard=50, alpha=0.01, nu=0.1)
    assert width == pytest.approx(1.7) and error == pytest.approx(0.85)
    assert math.isclose(K, 136 * math.log(4000 / 1e-5) * math.sqrt(10 * math.log(2e5)))
    assert sizes.btt18_corollary_3_9(100, 5, **PRIVACY, beta=0.1) == pytest.approx(
        32 * math.log(2000 / 1e-5) * math.sqrt(10 * math.log(2e5))
    )
    T = sizes.btt18_corollary_4_1(100, alpha=0.1, gamma=0.0, beta=0.1)
    ensemble = math.log(100 * T / 1e-5) * math.sqrt(T * math.log(1e5))
    asked = {**PRIVACY, "alpha": 0.1, "beta": 0.1}
    assert sizes.btt18_theorem_4_3(100, 2, **asked) == pytest.approx(
        (2 * math.log(10) + math.log(1000)) * ensemble / 0.1
    )
    assert sizes.btt18_theorem_4_4(100, 2, **asked, gamma=0.0) == pytest.approx((2 + math.log(1000)) * ensemble / 0.01)
    assert sizes.lzcw21_theorem_5(100, 2, 1000, **PRIVACY) == pytest.approx(4e-4 * math.log(1e5) + math.sqrt(0.02))
    assert sizes.lzcw21_theorem_5(1000, 8, 1000, **PRIVACY, best=0.1) == pytest.approx(
        1.3 + 10 * 0.04 + math.sqrt(0.008)
    )
    assert sizes.lzcw21_lemma_13(1, 1000, 10, gamma=0.1, tau=1.0) == pytest.approx(
        (10 * math.log(1000) + math.log(100)) / 1000
    )
    assert sizes.lzcw21_theorem_19(100, 5, 1, approximation=0.1) == pytest.approx(0.3)
    voters = sizes.lzcw21_vote_dimension(2, 10)
    assert sizes.lzcw21_theorem_20(1000, 5, 2, 10, gamma=0.1) == pytest.approx(0.02 + (voters + math.log(40)) / 200)
    queries, K = sizes.lzcw21_theorem_22(2, **PRIVACY, n=1000, alpha=0.1, gamma=0.1, theta=3.0)
    assert math.isclose(K, sizes.lzcw21_theorem_28(queries, 1000, **PRIVACY))
    assert queries == pytest.approx(3 * (1 + math.log(10)) * (2 * math.log(3) + math.log(20 * math.log(10))))
    assert sizes.lzcw21_theorem_22_error(100, 4, 1000, **PRIVACY, theta=3.0, tau=1.0) == pytest.approx(
        max(8 * math.sqrt(3 * math.log(1e5)) / 1000, 0.04)
    )
    m0, n = sizes.nb20_theorem_4_1(1, **asked)
    assert m0 == math.ceil(640 * math.log(10)) and n == sizes.nb20_theorem_3_3(m0, 1, **asked)
    assert sizes.wlf16_theorem_17(1000, epsilon=0.1, rho=0, log_K=math.log(50)) == pytest.approx(
        9 * (math.log(50) + 2 * math.log(1000)) / 100 + 0.2
    )
