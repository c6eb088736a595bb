"""A mixture of products: its rows, its fit to noisy tables, and the averages that it starts from."""

import itertools

import numpy as np
import pytest
import torch
from scipy import optimize, stats

from pate_torch.synthesis.mixture import (
    NoisyTables,
    ProductMixture,
    average_tables,
    draw_codes,
    estimate_independent,
    fit_mixture,
    project_to_simplex,
)

SIZES = (2, 3, 4, 2)
TARGET = 3


def draw_mixture(num_components, seed=0, sharpness=1.0):
    draw = np.random.default_rng(seed)
    columns = [draw.dirichlet(np.full(size, 1 / sharpness), num_components) for size in SIZES]
    weight_K = torch.from_numpy(draw.dirichlet(np.full(num_components, 5.0))).float()
    return ProductMixture(weight_K, tuple(torch.from_numpy(p_KS).float() for p_KS in columns))


def enumerate_joint(mixture):
    """Probability of every row, by the definition of the mixture, with one dimension for each column."""
    joint = np.zeros(SIZES)
    for row in itertools.product(*map(range, SIZES)):
        for k, weight in enumerate(mixture.weight_K.tolist()):
            joint[row] += weight * np.prod([p_KS[k, code] for p_KS, code in zip(mixture.column_KS, row, strict=True)])
    return joint


def marginal_of(joint, clique):
    """Marginal of some columns in the order of the clique."""
    summed = joint.sum(tuple(axis for axis in range(joint.ndim) if axis not in clique))
    return summed.transpose([sorted(clique).index(column) for column in clique])


def make_tables(joint, cliques, size=10_000.0, sigma=1.0, seed=None):
    """Tables of so many units, exact or with noise."""
    draw = np.random.default_rng(seed)
    counts = {clique: torch.from_numpy(size * marginal_of(joint, clique)) for clique in cliques}
    if seed is not None:
        counts = {c: t + torch.from_numpy(draw.normal(0, sigma, t.shape)) for c, t in counts.items()}
    return NoisyTables(counts, sigma)


WITH_TARGET = [tuple(sorted((*others, TARGET))) for n in (1, 2) for others in itertools.combinations(range(3), n)]


def test_rows_are_drawn_with_the_probabilities_of_the_mixture():
    mixture = draw_mixture(4)
    rows_NJ = mixture.sample(40_000, np.random.default_rng(0))
    observed = np.bincount(np.ravel_multi_index(rows_NJ.T, SIZES), minlength=np.prod(SIZES))
    expected = enumerate_joint(mixture).ravel()
    assert stats.chisquare(observed, expected / expected.sum() * len(rows_NJ)).pvalue > 1e-4
    product = np.einsum("a,b,c,d->abcd", *(marginal_of(expected.reshape(SIZES), (j,)) for j in range(4))).ravel()
    assert stats.chisquare(observed, product / product.sum() * len(rows_NJ)).pvalue < 1e-10  # columns are related


def test_codes_are_drawn_by_row_and_never_with_probability_zero():
    probability_NS = np.tile([[0.0, 0.25, 0.0, 0.75], [1.0, 0.0, 0.0, 0.0]], (4000, 1))
    code_N = draw_codes(probability_NS, np.random.default_rng(0))
    counts_S = np.bincount(code_N[::2], minlength=4)
    assert counts_S[0] == counts_S[2] == 0 and not code_N[1::2].any()
    assert stats.binomtest(int(counts_S[1]), 4000, 0.25).pvalue > 1e-4


# ---- projections and averages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_projection_equals_the_solution_of_a_quadratic_program(seed):
    draw = np.random.default_rng(seed)
    counts_S = draw.normal(20, 25, draw.integers(2, 9)).round()
    share_S = counts_S / max(1.0, counts_S.sum())
    start_S = np.full(len(share_S), 1 / len(share_S))
    solution = optimize.minimize(
        lambda p_S: ((p_S - share_S) ** 2).sum(), start_S, jac=lambda p_S: 2 * (p_S - share_S), method="SLSQP",
        bounds=[(0, None)] * len(share_S), constraints={"type": "eq", "fun": lambda p_S: p_S.sum() - 1},
        options={"ftol": 1e-14, "maxiter": 500},
    )  # fmt: skip
    found_S = project_to_simplex(torch.from_numpy(counts_S)).numpy()
    np.testing.assert_allclose(found_S, solution.x, atol=1e-6)
    assert found_S.min() >= 0 and found_S.sum() == pytest.approx(1)


def test_probabilities_and_useless_counts_are_projected_too():
    assert project_to_simplex(torch.tensor([30, 10, 60])).tolist() == pytest.approx([0.3, 0.1, 0.6])
    assert project_to_simplex(torch.tensor([-30, -10])).tolist() == [0, 1]
    assert project_to_simplex(torch.tensor([7])).tolist() == [1]


@pytest.mark.parametrize("clique", [(0,), (2, 0), (0, 2)])
def test_the_average_has_the_least_variance(clique):
    """Compare the weights of the average with the weights that minimize the variance of an unbiased mean."""
    cliques = [(0, 1, 2), (0, 2), (0, 2, 3), (1, 3)]
    shapes = {c: [SIZES[column] for column in c] for c in cliques}
    used = [c for c in cliques if set(clique) <= set(c)]
    weights = []
    for one in used:  # a table of ones in one place shows the weight of this table
        counts = {c: torch.full(shapes[c], float(c == one)) for c in cliques}
        cells = np.prod(shapes[one]) / np.prod([SIZES[column] for column in clique])
        average = average_tables(NoisyTables(counts, 1.0), clique, SIZES) / cells
        assert average.shape == tuple(SIZES[column] for column in clique)
        assert float(average.max() - average.min()) < 1e-12
        weights.append(float(average.flatten()[0]))
    variance = np.array([np.prod(shapes[c]) for c in used], dtype=float)  # up to one factor, of sums of cells
    best = (1 / variance) / (1 / variance).sum()
    assert weights == pytest.approx(best) and sum(weights) == pytest.approx(1)
    assert np.dot(np.square(weights), variance) < np.dot(np.square(np.full(len(used), 1 / len(used))), variance)


def test_the_average_keeps_the_order_of_the_columns():
    joint = enumerate_joint(draw_mixture(3))
    tables = make_tables(joint, [(0, 1, 2), (0, 2)])
    np.testing.assert_allclose(average_tables(tables, (2, 0), SIZES), 10_000 * marginal_of(joint, (2, 0)))


def test_the_number_of_units_is_the_mean_of_the_totals_by_their_variances():
    counts = {(0,): torch.tensor([40, 60]), (1, 2): torch.full((3, 4), 20)}
    assert NoisyTables(counts, 1.0).estimate_size() == pytest.approx((100 / 2 + 240 / 12) / (1 / 2 + 1 / 12))
    assert NoisyTables({(0,): torch.tensor([-40, 6])}, 1.0).estimate_size() == 1


# ---- fits --------------------------------------------------------------------------------------------------------


def distance(mixture, joint, cliques):
    """Mean total variation of some marginals."""
    difference = enumerate_joint(mixture) - joint
    return float(np.mean([np.abs(marginal_of(difference, clique)).sum() / 2 for clique in cliques]))


def test_independent_columns_have_the_counts_of_each_column_and_the_target():
    joint = enumerate_joint(draw_mixture(3, sharpness=3))
    independent = estimate_independent(make_tables(joint, WITH_TARGET), SIZES, TARGET)
    pairs = [(column, TARGET) for column in range(3)]
    assert distance(independent, joint, pairs) < 1e-6
    assert distance(independent, joint, [(0, 1, 2)]) > 0.05


@pytest.mark.parametrize("seed", [None, 5], ids=["exact", "noisy"])
def test_a_fit_recovers_a_mixture_better_than_independent_columns(seed):
    truth = draw_mixture(6, seed=3, sharpness=4)
    joint, tables = enumerate_joint(truth), make_tables(enumerate_joint(truth), WITH_TARGET, sigma=20.0, seed=seed)
    steps = []
    options = {"num_components": 24, "steps": 200, "learning_rate": 0.1}
    fitted = fit_mixture(tables, SIZES, TARGET, progress=lambda done, total: steps.append((done, total)), **options)
    independent = estimate_independent(tables, SIZES, TARGET)
    triples = [clique for clique in WITH_TARGET if len(clique) == 3]
    assert distance(fitted, joint, triples) < 0.25 * distance(independent, joint, triples)
    assert distance(fitted, joint, triples) < 0.02
    assert distance(fitted, joint, [(0, 1, 2, 3)]) < 0.5 * distance(independent, joint, [(0, 1, 2, 3)])
    assert float(fitted.weight_K.sum()) == pytest.approx(1, abs=1e-5)
    assert all(float((p_KS.sum(1) - 1).abs().max()) < 1e-5 and float(p_KS.min()) >= 0 for p_KS in fitted.column_KS)
    assert steps[-1] == (200, 200) and len(steps) == 200
    again = fit_mixture(tables, SIZES, TARGET, **options)
    assert torch.equal(again.weight_K, fitted.weight_K)  # the seed decides
    assert all(map(torch.equal, again.column_KS, fitted.column_KS))
    other = fit_mixture(tables, SIZES, TARGET, seed=1, **options)
    assert not torch.equal(other.column_KS[0], fitted.column_KS[0])


def test_tables_of_pure_noise_make_a_mixture_all_the_same():
    counts = {c: torch.full([SIZES[j] for j in c], -3) for c in WITH_TARGET}
    fitted = fit_mixture(NoisyTables(counts, 5.0), SIZES, TARGET, num_components=8, steps=5)
    assert np.isfinite(enumerate_joint(fitted)).all()
