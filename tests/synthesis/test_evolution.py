"""Rounds of votes: nearest candidates by brute force, weights by hand, and a relation that no small table shows."""

import itertools

import numpy as np
import pytest

from pate_torch.synthesis.evolution import Candidates, Pool, make_distances

SIZES, ORDERED = (3, 5, 2, 6), (False, True, False, True)


def draw_codes(count, seed, sizes=SIZES):
    draw = np.random.default_rng(seed)
    return np.stack([draw.integers(size, size=count) for size in sizes], 1)


def measure(row, other):
    """Distance of two rows in units of 2^-16, by its definition."""
    total = 0
    for a, b, size, is_ordered in zip(row.tolist(), other.tolist(), SIZES, ORDERED, strict=True):
        is_number = is_ordered and a > 0 and b > 0
        total += 0 if a == b else abs(a - b) * 65536 // (size - 1) if is_number else 65536
    return total


def test_the_nearest_candidate_is_found_and_ties_go_to_the_first():
    candidates = Candidates(draw_codes(40, 0), SIZES, ORDERED)
    rows_NF, num_ties = draw_codes(500, 1), 0
    for row, nearest in zip(rows_NF, candidates.find_nearest(rows_NF), strict=True):
        distances = [measure(row, other) for other in candidates.codes_MF]
        num_ties += distances.count(min(distances)) > 1
        assert nearest == distances.index(min(distances))
    assert num_ties > 50


def test_the_nearest_candidate_of_a_row_does_not_depend_on_other_rows(monkeypatch):
    candidates, rows_NF = Candidates(draw_codes(30, 0), SIZES, ORDERED), draw_codes(200, 1)
    nearest_N = candidates.find_nearest(rows_NF)
    order = np.random.default_rng(2).permutation(200)[:77]
    assert (candidates.find_nearest(rows_NF[order]) == nearest_N[order]).all()
    assert [int(candidates.find_nearest(row[None])[0]) for row in rows_NF] == nearest_N.tolist()
    monkeypatch.setattr("pate_torch.synthesis.evolution._BLOCK_ROWS", 7)
    assert (candidates.find_nearest(rows_NF) == nearest_N).all()
    assert candidates.find_nearest(rows_NF[:0]).shape == (0,)


def test_distances_of_codes():
    assert make_distances(3, is_ordered=False).tolist() == [[0, 65536, 65536], [65536, 0, 65536], [65536, 65536, 0]]
    ordered = make_distances(5, is_ordered=True)
    assert ordered[1].tolist() == [65536, 0, 16384, 32768, 49152] and (ordered == ordered.T).all()
    assert make_distances(1, is_ordered=True).tolist() == [[0]]


# ---- pools -------------------------------------------------------------------------------------------------------


def test_a_pool_keeps_the_class_frequencies_of_its_rows_and_holds_every_class_of_each_row():
    rows_NJ = draw_codes(300, 0)
    rows_NJ[:, 2] = 0  # a class that no row has gets no weight
    pool = Pool.from_rows(rows_NJ, 0, SIZES, ORDERED)
    assert len(pool.codes_NJ) == 900 and pool.weight_N.sum() == pytest.approx(1)
    assert (pool.codes_NJ.reshape(300, 3, 4)[:, :, 1:] == rows_NJ[:, None, 1:]).all()
    assert (pool.codes_NJ.reshape(300, 3, 4)[:, :, 0] == [0, 1, 2]).all()
    classes = np.bincount(pool.codes_NJ[:, 0], pool.weight_N, 3)
    assert classes == pytest.approx(np.bincount(rows_NJ[:, 0], minlength=3) / 300)
    own_N = np.repeat(rows_NJ[:, 0], 3) == pool.codes_NJ[:, 0]
    assert pool.weight_N[own_N].sum() > 0.9 and pool.weight_N[~own_N].min() > 0
    unused = Pool.from_rows(rows_NJ, 2, SIZES, ORDERED)
    assert unused.weight_N[unused.codes_NJ[:, 2] == 1].sum() == 0


def test_candidates_are_distinct_rows_of_the_pool_without_its_target():
    pool = Pool.from_rows(draw_codes(50, 0), 1, SIZES, ORDERED)
    candidates = pool.choose_candidates(200, np.random.default_rng(0))
    known = {tuple(row) for row in np.delete(pool.codes_NJ, 1, axis=1).tolist()}
    chosen = [tuple(row) for row in candidates.codes_MF.tolist()]
    assert len(set(chosen)) == len(chosen) and set(chosen) <= known
    assert candidates.sizes == (3, 2, 6) and candidates.ordered == (False, False, True)
    cell_N = pool.find_cells(candidates)
    nearest_N = candidates.find_nearest(np.delete(pool.codes_NJ, 1, axis=1))
    assert (cell_N == nearest_N * 5 + pool.codes_NJ[:, 1]).all()


def make_pool(weight_N):
    """Two candidates with two classes each: one row in the cells 0, 1 and 2, and two rows in cell 3."""
    codes_NJ = np.array([[0, 0], [1, 0], [0, 1], [1, 1], [1, 1]])
    return Pool(codes_NJ, np.array(weight_N), 0, (2, 2), (False, False)), np.array([0, 1, 2, 3, 3])


def test_weights_without_noise_are_the_counts_of_the_cells():
    pool, cell_N = make_pool([0.25, 0.25, 0.25, 0.125, 0.125])
    weight_N = pool.reweight(cell_N, np.array([[60, 20], [0, 20]]), sigma=1e-9).weight_N
    assert weight_N == pytest.approx([0.6, 0.2, 0, 0.1, 0.1])


def test_weights_with_noise_are_shrunk_to_the_pool():
    pool, cell_N = make_pool([0.4, 0.2, 0.2, 0.1, 0.1])
    counts_M, sigma = np.array([70.0, 10.0, 15.0, 5.0]), 10.0  # 100 units; the pool has 40, 20, 20 and 20
    own_M = np.array([40.0, 20.0, 20.0, 20.0])
    squared = 30**2 + 10**2 + 5**2 + 15**2  # 1250, of which 4 * 100 are noise
    variation = (squared - 400) / (1600 + 3 * 400)
    share_M = variation * own_M**2 / (variation * own_M**2 + 100)
    target_M = own_M + share_M * (counts_M - own_M)
    weight_N = pool.reweight(cell_N, counts_M.reshape(2, 2).astype(int), sigma).weight_N
    assert np.bincount(cell_N, weight_N) == pytest.approx(target_M / target_M.sum())
    assert weight_N[3] == weight_N[4]  # rows of one cell keep their ratio
    assert 0.4 < weight_N[0] < 0.7


def test_weights_do_not_change_where_counts_differ_from_the_pool_by_noise_alone():
    pool, cell_N = make_pool([0.4, 0.2, 0.2, 0.1, 0.1])
    assert pool.reweight(cell_N, np.array([[41, 19], [20, 20]]), sigma=10.0).weight_N == pytest.approx(pool.weight_N)
    assert pool.reweight(cell_N, np.full((2, 2), -50), sigma=1.0) is pool  # no weight would be left


def test_rows_vary_within_their_cell_and_class():
    sizes = (3, 20, 20, 20)
    pool = Pool.from_rows(draw_codes(400, 0, sizes), 0, sizes, (False, True, True, True))
    candidates = pool.choose_candidates(6, np.random.default_rng(0))
    cell_N = pool.find_cells(candidates)
    varied = pool.vary(cell_N, np.random.default_rng(1))
    assert varied.codes_NJ.shape == pool.codes_NJ.shape and varied.weight_N.sum() == pytest.approx(1)
    known = {tuple(row) for row in pool.codes_NJ.tolist()}
    new = [row for row in varied.codes_NJ.tolist() if tuple(row) not in known]
    assert len(new) > 10  # some rows are new combinations
    values = [set(pool.codes_NJ[:, j]) for j in range(4)]
    assert all(code in values[j] for row in new for j, code in enumerate(row))
    one_cell = np.arange(len(pool.codes_NJ))  # no two rows share a cell, so nothing is exchanged
    alone = pool.vary(one_cell, np.random.default_rng(1))
    assert {tuple(row) for row in alone.codes_NJ.tolist()} <= known


# ---- what rounds are for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [0, 2])
def test_rounds_find_a_parity_of_four_columns_which_no_smaller_table_shows(rounds):
    """The class is the parity of four of eight binary columns: all tables of four columns look independent."""
    draw, sigma = np.random.default_rng(0), 2.0
    units = draw.integers(2, size=(20_000, 9))
    units[:, 8] = units[:, :4].sum(1) % 2
    for columns in itertools.combinations(range(8), 3):  # the largest tables that are counted
        table = np.histogramdd(units[:, (*columns, 8)], bins=2)[0] / len(units)
        assert np.abs(table - 1 / 16).max() < 0.01
    pool = Pool.from_rows(draw.integers(2, size=(8000, 9)), 8, (2,) * 9, (False,) * 9)
    for round_index in range(rounds):
        candidates = pool.choose_candidates(2000, draw)
        near_U = candidates.find_nearest(units[:, :8])
        counts_MC = np.bincount(near_U * 2 + units[:, 8], minlength=2 * len(candidates.codes_MF)).reshape(-1, 2)
        cell_N = pool.find_cells(candidates)
        pool = pool.reweight(cell_N, counts_MC + draw.normal(0, sigma, counts_MC.shape).round().astype(int), sigma)
        pool = pool if round_index == rounds - 1 else pool.vary(cell_N, draw)
    rows = pool.codes_NJ[draw.choice(len(pool.codes_NJ), size=5000, p=pool.weight_N)]
    accuracy = float((rows[:, :4].sum(1) % 2 == rows[:, 8]).mean())
    assert accuracy > 0.9 if rounds else abs(accuracy - 0.5) < 0.05
