"""Exact divergences against closed forms, mpmath, adaptive quadrature and enumeration of all neighbors."""

import itertools
import math
import tracemalloc

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import integrate, special, stats

from pate_torch.accounting.data_dependent import exact, outcome_laws, theorems, vote_rows
from pate_torch.accounting.data_dependent.price import price
from pate_torch.accounting.outcomes import Confident, Exponential, Gnmax, Lnmax

ORDERS = np.array([1.05, 1.5, 2, 3, 8, 32, 100])
DENSE = 1 + np.geomspace(0.02, 300, 97)


def adaptive_law(model, row) -> np.ndarray:
    """The slow twin: the same probabilities by adaptive quadrature, class by class, or by direct evaluation."""
    row = np.asarray(row, dtype=float)
    match model:
        case Exponential(rate=rate):
            weight = np.exp(rate * (row - row.max()))
            return weight / weight.sum()
        case Lnmax(scale=scale):
            noise, points, reach = stats.laplace(scale=scale), sorted(set(row)), 60 * scale
        case Gnmax(sigma=sigma) | Confident(sigma=sigma):
            noise, points, reach = stats.norm(scale=sigma), sorted(set(row)), 15 * sigma
    edges = [row.min() - reach, *points, row.max() + reach / 15, row.max() + reach]

    def integrand(x, c):
        return noise.pdf(x - row[c]) * np.prod(noise.cdf(x - np.delete(row, c)))

    law = np.array(
        [
            sum(
                integrate.quad(integrand, low, high, args=(c,), epsabs=0, epsrel=1e-12)[0]
                for low, high in itertools.pairwise(edges)
            )
            for c in range(len(row))
        ]
    )
    if isinstance(model, Confident):
        passed = stats.norm.sf(model.threshold, loc=row.max(), scale=model.screen_sigma)
        failed = stats.norm.cdf(model.threshold, loc=row.max(), scale=model.screen_sigma)
        return np.append(passed * law, failed)
    return law


def renyi(p, q, order) -> float:
    return float(special.logsumexp(order * np.log(p) + (1 - order) * np.log(q)) / (order - 1))


def brute_force(model, row, orders, direction, laws) -> np.ndarray:
    """Every neighbor of the row, one vote moved, order by order."""
    worst = np.zeros(len(orders))
    for a, b in itertools.permutations(range(len(row)), 2):
        if row[a] == 0:
            continue
        moved = list(row)
        moved[a] -= 1
        moved[b] += 1
        p, q = laws(tuple(row)), laws(tuple(moved))
        pairs = [(p, q)] if direction == "forward" else [(p, q), (q, p)]
        worst = np.maximum(worst, [max(renyi(*pair, order) for pair in pairs) for order in orders])
    return worst


SMALL = [
    Gnmax(sigma=2.0),
    Gnmax(sigma=0.6),
    Lnmax(scale=1.5),
    Exponential(rate=0.4),
    Confident(screen_sigma=1.5, threshold=4.0, sigma=2.0),
]


@pytest.mark.parametrize("model", SMALL, ids=str)
@pytest.mark.parametrize("direction", exact.DIRECTIONS)
def test_every_small_histogram_against_enumeration_and_adaptive_quadrature(model, direction):
    cache: dict[tuple[int, ...], np.ndarray] = {}

    def law(row):
        order = np.argsort(row)[::-1]
        key = tuple(np.asarray(row)[order])
        if key not in cache:
            cache[key] = adaptive_law(model, key)
        out = cache[key].copy()
        out[order] = cache[key][: len(row)]
        return out

    rows = np.array([r for r in itertools.product(range(7), repeat=3) if sum(r) == 6 and list(r) == sorted(r)[::-1]])
    bracket = exact.exact_rows(model, rows, ORDERS, direction)
    cap = theorems.data_independent_rdp(model, ORDERS)
    for i, row in enumerate(rows):
        slow = np.minimum(brute_force(model, row, ORDERS, direction, law), cap)
        assert bracket.upper[i] == pytest.approx(slow, rel=1e-8, abs=1e-11)
        assert (bracket.upper[i] - bracket.lower[i] <= 1e-9 + 1e-8 * bracket.upper[i]).all()


# ---- the laws --------------------------------------------------------------------------------------------------------


def two_class_log_law(model, gap) -> tuple[float, float]:
    """C = 2 in closed form: Phi(gap/(sigma sqrt 2)), and 1 - (2 + x) e^{-x}/4 with x = gap/scale."""
    with mpmath.workdps(60):
        if isinstance(model, Gnmax):
            loses = mpmath.erfc(mpmath.mpf(gap) / (2 * mpmath.mpf(model.sigma))) / 2
        else:
            x = mpmath.mpf(gap) / mpmath.mpf(model.scale)
            loses = (2 + x) * mpmath.exp(-x) / 4
        return float(mpmath.log1p(-loses)), float(mpmath.log(loses))


@pytest.mark.parametrize("model", [Gnmax(sigma=40.0), Gnmax(sigma=10.0), Gnmax(sigma=1.5), Lnmax(scale=20.0)], ids=str)
@pytest.mark.parametrize("gap", [0, 2, 50, 230, 250])
def test_two_classes_in_closed_form_however_far_apart(model, gap):
    """Up to gap/sigma = 167, where 32 Gauss-Hermite nodes lose ln P by units from gap/sigma = 23 on."""
    row = np.array([[(250 + gap) // 2, (250 - gap) // 2]])
    laws = outcome_laws.laws(model, row, 250)
    wins, loses = two_class_log_law(model, gap)
    assert laws.log_p_UO[0, 1] == pytest.approx(loses, abs=laws.error)
    assert laws.log_p_UO[0, 0] == pytest.approx(wins, abs=laws.error)
    assert laws.error < 1e-9


@pytest.mark.parametrize("classes", [3, 10, 60])
@pytest.mark.parametrize("model", [Gnmax(sigma=40.0), Gnmax(sigma=7.0), Lnmax(scale=20.0), Lnmax(scale=4.0)], ids=str)
def test_quadrature_error_is_as_proved(model, classes, monkeypatch):
    """A rule built for an error of 1e-6 is off by less than that, and one for 1e-14 agrees with one for 1e-25."""
    rng = np.random.default_rng(classes)
    rows = vote_rows.group(rng.multinomial(100, rng.dirichlet(np.full(classes, 0.3)), 3)).rows_UC
    rule = outcome_laws.laplace_rule if isinstance(model, Lnmax) else outcome_laws.gaussian_rule

    def law(step):
        monkeypatch.setattr(outcome_laws, "_STEP", step)
        rule.cache_clear()
        return outcome_laws.laws(model, rows, 100)

    try:
        rough, usual, fine = law(1e-6), law(1e-14), law(1e-25)
    finally:
        rule.cache_clear()
    for part in ("log_p_UO", "log_q_MO"):
        assert np.abs(getattr(rough, part) - getattr(fine, part)).max() < 1e-6
        assert np.abs(getattr(usual, part) - getattr(fine, part)).max() < usual.error


@pytest.mark.parametrize("model", [Gnmax(sigma=12.0), Lnmax(scale=6.0), Exponential(rate=0.1)], ids=str)
def test_neighbors_are_the_laws_of_the_moved_rows(model):
    row = np.array([[60, 25, 10, 4, 1, 0, 0]])
    laws = outcome_laws.laws(model, row, 100)
    found = {tuple(np.round(np.sort(q), 9)) for q in laws.log_q_MO}
    expected = set()
    for a, b in itertools.permutations(range(7), 2):
        if row[0, a]:
            moved = row[0].copy()
            moved[a] -= 1
            moved[b] += 1
            direct = outcome_laws.laws(model, np.sort(moved)[::-1][None], 100).log_p_UO[0]
            expected.add(tuple(np.round(np.sort(direct), 9)))
    assert found == expected


@pytest.mark.parametrize(("sigma", "gap"), [(20.0, 250), (40.0, 250), (60.0, 100), (40.0, 0)])
def test_tiny_divergences_keep_their_relative_precision(sigma, gap):
    """Unanimous votes at sigma 20 cost some 1e-18; computed from the closed form for two classes in 60 digits."""
    top = (250 + gap) // 2
    bracket = exact.exact_rdp(Gnmax(sigma=sigma), [[top, 250 - top]], ORDERS)
    with mpmath.workdps(60):

        def law(n):
            loses = mpmath.erfc(mpmath.mpf(2 * n - 250) / (2 * mpmath.mpf(sigma))) / 2
            return 1 - loses, loses

        slow = []
        for order in ORDERS:
            a = mpmath.mpf(float(order))
            worst = mpmath.mpf(0)
            for other in (top - 1, min(top + 1, 250)):
                for p, q in ((law(top), law(other)), (law(other), law(top))):
                    s = sum(x**a * y ** (1 - a) for x, y in zip(p, q, strict=True))
                    worst = max(worst, mpmath.log(s) / (a - 1))
            slow.append(float(min(worst, a / mpmath.mpf(sigma) ** 2)))
    assert (bracket.lower <= np.array(slow) * (1 + 1e-12)).all()
    assert (bracket.upper >= np.array(slow) * (1 - 1e-12)).all()
    assert bracket.upper == pytest.approx(slow, rel=1e-5)


def every_class(model, row, num_teachers) -> tuple[np.ndarray, dict[tuple[int, int], np.ndarray]]:
    """The slow twin: ln of the law of a row, and of all its neighbors by (from, to): C^3 X products."""
    rule, row, classes = outcome_laws._rule(model, num_teachers, len(row)), np.asarray(row), np.arange(len(row))
    integrand_CX = rule.log_mass_NX[row] + rule.log_cdf_NX[row].sum(0)
    scale_C = integrand_CX.max(1)
    mass_CX = np.exp(integrand_CX - scale_C[:, None])
    from_ACX = rule.cdf_fewer_NX[row][:, None] * mass_CX
    from_ACX[classes, classes] = mass_CX * rule.pdf_fewer_NX[row]
    moved_ACB = from_ACX @ rule.cdf_more_NX[row].T
    to_AB = rule.cdf_fewer_NX[row] @ (mass_CX * rule.pdf_more_NX[row]).T
    laws = {}
    for a, b in itertools.permutations(classes, 2):
        law_C = moved_ACB[a, :, b].copy()
        law_C[b] = to_AB[a, b]
        laws[a, b] = np.log(law_C) + scale_C
    return np.log(mass_CX.sum(1)) + scale_C, laws


SPARSE = [
    [60, 25, 10, 4, 1, 0, 0, 0, 0],
    [20, 20, 20, 20, 20, 0, 0, 0, 0],
    [95, 1, 1, 1, 1, 1, 0, 0, 0],
    [100] + 8 * [0],
]
NOISY = [Gnmax(sigma=12.0), Gnmax(sigma=40.0), Lnmax(scale=6.0)]


@pytest.mark.parametrize("floats", [1, 5000, 2**17])
@pytest.mark.parametrize("model", NOISY, ids=str)
def test_laws_by_distinct_counts_are_their_slow_twin(model, floats, monkeypatch):
    monkeypatch.setattr(outcome_laws, "_CHUNK_FLOATS", floats)
    rows = np.array(SPARSE)
    laws, kinds = outcome_laws.laws(model, rows, 100), outcome_laws._kinds(rows, False)
    for u, row in enumerate(rows):
        log_p, log_q = every_class(model, row, 100)
        assert np.abs(laws.log_p_UO[u] - log_p).max() < laws.error
        here = np.flatnonzero(laws.row_M == u)
        for m in here:
            assert np.abs(laws.log_q_MO[m] - log_q[kinds.a_M[m], kinds.b_M[m]]).max() < laws.error
        # Every neighbor has the counts of one of those: nothing is left out.
        found = {tuple(sorted([row[kinds.a_M[m]], -1 - row[kinds.b_M[m]]])) for m in here}
        pairs = itertools.permutations(range(9), 2)
        assert found == {tuple(sorted([row[a], -1 - row[b]])) for a, b in pairs if row[a]}
        assert len(here) == len(found)


@pytest.mark.parametrize(
    "model", [*NOISY, Exponential(rate=0.1), Confident(screen_sigma=9, threshold=60, sigma=12)], ids=str
)
def test_merged_outcomes_have_the_same_divergences(model):
    rows = np.array(SPARSE)
    whole, merged = (outcome_laws.laws(model, rows, 100, merged=flag) for flag in (False, True))
    assert merged.log_q_MO.shape[1] < whole.log_q_MO.shape[1] and np.array_equal(merged.row_M, whole.row_M)
    (low, high), (least, most) = (exact._rows(laws, DENSE, "two_sided") for laws in (whole, merged))
    assert (np.maximum(low, least) <= np.minimum(high, most)).all()
    assert most == pytest.approx(high, rel=1e-7, abs=1e-12)


def test_a_thousand_classes_take_megabytes():
    """Beside the rule's tables, 10 MB; an array of C^3 numbers would have 8 GB."""
    rng = np.random.default_rng(0)
    votes = np.array([rng.multinomial(100, rng.dirichlet(np.full(1000, 0.03))) for _ in range(5)])
    model = Gnmax(sigma=40.0)
    assert exact.affordable(model, votes)
    tracemalloc.start()
    try:
        bracket = exact.exact_rdp(model, votes, DENSE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**26
    assert (bracket.upper < 5 * theorems.data_independent_rdp(model, DENSE)).all()
    assert (bracket.upper - bracket.lower <= 2e-3 * bracket.upper).all()


def test_what_takes_long_is_known_before():
    rng = np.random.default_rng(1)
    large = rng.multinomial(10_000, rng.dirichlet(np.full(1000, 0.3)), 200)
    for model in (Gnmax(sigma=40.0), Lnmax(scale=100.0), Exponential(rate=0.05)):
        assert not exact.affordable(model, large)
    usual = rng.multinomial(250, rng.dirichlet(np.full(10, 0.3)), 10_000)
    assert all(exact.affordable(model, usual) for model in (Gnmax(sigma=2.0), Gnmax(sigma=40.0), Exponential(rate=0.1)))
    assert outcome_laws.num_nodes(Lnmax(scale=20.0), 250, 11) == outcome_laws.laplace_rule(20.0, 250, 11).num_nodes
    assert outcome_laws.num_nodes(Gnmax(sigma=20.0), 250, 11) == outcome_laws.gaussian_rule(20.0, 250, 11).num_nodes


# ---- the search over moves and orders --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model",
    [Gnmax(sigma=40.0), Lnmax(scale=20.0), Exponential(rate=0.05), Confident(screen_sigma=90, threshold=150, sigma=40)],
    ids=str,
)
@pytest.mark.parametrize("direction", exact.DIRECTIONS)
def test_skipping_moves_by_convexity_changes_nothing(model, direction):
    rng = np.random.default_rng(4)
    votes = np.array([rng.multinomial(250, rng.dirichlet(np.full(10, c))) for c in (0.05, 0.1, 0.2, 0.3, 1, 3)])
    together = exact.exact_rdp(model, votes, DENSE, direction)
    alone = np.array([exact.exact_rdp(model, votes, [order], direction).upper[0] for order in DENSE])
    assert together.upper == pytest.approx(alone, rel=1e-12)


def test_orders_may_come_unsorted_and_twice():
    votes, orders = [[200, 30, 20]], np.array([30.0, 2.0, 8.0, 2.0])
    one = exact.exact_rdp(Gnmax(sigma=40), votes, orders).upper
    each = [exact.exact_rdp(Gnmax(sigma=40), votes, [a]).upper[0] for a in orders]
    assert one == pytest.approx(each, rel=1e-12)


def test_a_release_is_the_sum_over_its_queries():
    rng = np.random.default_rng(5)
    votes = rng.multinomial(100, [0.8, 0.1, 0.05, 0.05], 150)
    total = exact.exact_rdp(Gnmax(sigma=20), votes, ORDERS).upper
    each = sum(exact.exact_rdp(Gnmax(sigma=20), [row], ORDERS).upper for row in votes)
    assert total == pytest.approx(each, rel=1e-9)


# ---- order among the prices ------------------------------------------------------------------------------------------

models = st.one_of(
    st.builds(Gnmax, sigma=st.floats(0.5, 60)),
    st.builds(Lnmax, scale=st.floats(0.7, 40)),
    st.builds(Exponential, rate=st.floats(0.01, 2)),
    st.builds(Confident, screen_sigma=st.floats(0.5, 60), threshold=st.floats(-5, 60), sigma=st.floats(0.5, 60)),
)
histograms = st.lists(st.integers(0, 12), min_size=2, max_size=6).filter(lambda row: sum(row) > 0)


@settings(max_examples=150, deadline=None)
@given(model=models, row=histograms)
def test_forward_at_most_theorem_and_two_sided_and_all_at_most_data_independent(model, row):
    forward = exact.exact_rdp(model, [row], ORDERS, "forward")
    two_sided = exact.exact_rdp(model, [row], ORDERS, "two_sided")
    theorem = theorems.theorem_rdp(model, [row], ORDERS)
    cap = theorems.data_independent_rdp(model, ORDERS) * (1 + 1e-12)
    assert (forward.lower <= forward.upper).all() and (two_sided.lower <= two_sided.upper).all()
    assert (forward.lower <= theorem * (1 + 1e-12)).all()
    assert (forward.upper <= two_sided.upper * (1 + 1e-12)).all()
    assert (two_sided.upper <= cap).all() and (theorem <= cap).all()
    # Renyi divergence grows with its order, and (a - 1) times it is convex.
    assert (np.diff(two_sided.upper) >= -1e-9 * two_sided.upper[1:]).all()


def test_without_the_cap_the_divergence_is_below_it_anyway():
    """Post-processing: the argmax tells less than the noisy histogram; so the cap never cuts a true value."""
    rows = vote_rows.group([r for r in itertools.product(range(9), repeat=3) if sum(r) == 8]).rows_UC
    for model in SMALL:
        bracket = exact.exact_rows(model, rows, ORDERS)
        assert (bracket.lower < theorems.data_independent_rdp(model, ORDERS)).all()


def test_the_reverse_direction_passes_the_theorem():
    """Why the theorem's price is called forward: some two-sided divergence lies strictly above it."""
    rows = vote_rows.group([r for r in itertools.product(range(21), repeat=3) if sum(r) == 20]).rows_UC
    model = Gnmax(sigma=3.0)
    theorem = theorems.theorem_rows(model, rows, ORDERS)
    assert (exact.exact_rows(model, rows, ORDERS, "forward").lower <= theorem * (1 + 1e-12)).all()
    assert (exact.exact_rows(model, rows, ORDERS, "two_sided").lower > theorem * 1.01).any()


def test_exact_beats_the_theorem_by_a_wide_margin_on_clear_votes():
    rng = np.random.default_rng(0)
    votes = rng.multinomial(250, [0.7, 0.2, 0.05, 0.02, 0.01, 0.01, 0.01, 0, 0, 0], 50)
    exact_price = exact.exact_rdp(Gnmax(sigma=40), votes, ORDERS).upper
    assert (exact_price < 0.8 * theorems.theorem_rdp(Gnmax(sigma=40), votes, ORDERS)).all()


def test_noise_too_small_for_float64_falls_back_to_the_data_independent_price():
    for model in (Gnmax(sigma=0.1), Lnmax(scale=0.01), Confident(screen_sigma=1, threshold=9, sigma=0.1)):
        bracket = exact.exact_rdp(model, [[10, 0, 0]], ORDERS)
        assert bracket.upper == pytest.approx(theorems.data_independent_rdp(model, ORDERS))
        assert (bracket.lower == 0).all()


def test_confident_far_from_its_threshold():
    """Always above by 50 sigma: GNMax's price. Always below by 50 sigma: nearly nothing is ever released."""
    votes, sure, orders = [[240, 6, 4]], Gnmax(sigma=40), ORDERS[:6]  # order 100 already sees events of e^-1250
    above = exact.exact_rdp(Confident(screen_sigma=4, threshold=40, sigma=40), votes, orders)
    assert above.upper == pytest.approx(exact.exact_rdp(sure, votes, orders).upper, rel=1e-6)
    below = exact.exact_rdp(Confident(screen_sigma=4, threshold=440, sigma=40), votes, orders)
    assert (below.upper < 1e-30).all()


# ---- the one door ----------------------------------------------------------------------------------------------------


def test_price_dispatches_and_refuses():
    votes, model = [[200, 30, 20]], Gnmax(sigma=40)
    for direction in exact.DIRECTIONS:
        assert price(model, votes, ORDERS, adaptive=False, direction=direction) == pytest.approx(
            exact.exact_rdp(model, votes, ORDERS, direction).upper
        )
    assert price(model, votes, ORDERS, adaptive=False, method="theorem", direction="forward") == pytest.approx(
        theorems.theorem_rdp(model, votes, ORDERS)
    )
    with pytest.raises(ValueError, match="adaptive"):
        price(model, votes, ORDERS, adaptive=True)
    with pytest.raises(ValueError, match="forward"):
        price(model, votes, ORDERS, adaptive=False, method="theorem")
    with pytest.raises(ValueError, match="method"):
        price(model, votes, ORDERS, adaptive=False, method="exakt")
    with pytest.raises(ValueError, match="direction"):
        price(model, votes, ORDERS, adaptive=False, direction="backward")
    with pytest.raises(ValueError, match="model"):
        price(None, votes, ORDERS, adaptive=False)


@pytest.mark.parametrize("orders", [[], [1], [math.nan]])
def test_malformed_orders_are_refused(orders):
    with pytest.raises(ValueError, match="order"):
        exact.exact_rdp(Gnmax(sigma=40), [[3, 1]], orders)
