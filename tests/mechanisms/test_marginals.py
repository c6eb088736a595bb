"""Noisy marginal tables: their sensitivity by brute force, their cost for any number of tables, and their noise."""

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch.accounting.accountant import compute_guarantee
from pate_torch.accounting.events import GaussianEvent, ZCDPEvent
from pate_torch.audit import audit
from pate_torch.mechanisms.marginals import Marginals
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext
from pate_torch.privacy.sensitive import MarginalTables, make_table_sensitivity

SIZES = (2, 3, 2)
CELLS = list(itertools.product(*map(range, SIZES)))
"""All rows that one unit can have."""
CLIQUE_SETS = [[(0,)], [(1,), (2,)], [(0, 1), (0, 2), (1, 2)], [(0, 1, 2), (0,), (1, 2), (0, 2)]]
CONTEXT = MechanismContext(num_queries=1)
ADJACENCIES = pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])


def count(rows, cliques, adjacency="add_remove"):
    codes_UJ = torch.tensor(rows, dtype=torch.int64).reshape(len(rows), len(SIZES))
    return MarginalTables.from_units(codes_UJ, SIZES, cliques, adjacency)


@pytest.mark.parametrize("cliques", CLIQUE_SETS)
def test_the_counts_are_those_of_each_combination_of_values(cliques):
    rows = [CELLS[i] for i in np.random.default_rng(0).integers(len(CELLS), size=50)]
    expected = [
        sum(tuple(row[column] for column in clique) == values for row in rows)
        for clique in cliques
        for values in itertools.product(*(range(SIZES[column]) for column in clique))
    ]
    assert count(rows, cliques).counts_M.tolist() == expected
    assert not count([], cliques).counts_M.any() and len(count([], cliques).counts_M) == len(expected)
    assert "tensor" not in repr(count(rows, cliques))


@ADJACENCIES
@pytest.mark.parametrize("cliques", CLIQUE_SETS)
def test_the_sensitivity_is_the_largest_distance_between_neighbors(cliques, adjacency):
    rest = [(0, 2, 1), (1, 0, 1), (0, 2, 1)]
    others = [[]] if adjacency == "add_remove" else [[cell] for cell in CELLS]
    largest = {"l1": 0.0, "l2": 0.0, "linf": 0.0}
    for cell, other in itertools.product(CELLS, others):
        change_M = (count([*rest, cell], cliques).counts_M - count([*rest, *other], cliques).counts_M).double()
        for norm, order in {"l1": 1, "l2": 2, "linf": math.inf}.items():
            largest[norm] = max(largest[norm], float(change_M.norm(order)))
    stated = make_table_sensitivity(len(cliques), adjacency)
    assert largest == {norm: pytest.approx(getattr(stated, norm)) for norm in largest}
    mechanism = Marginals(sigma=1.0, adjacency=adjacency, num_tables=len(cliques))
    assert stated == mechanism.max_sensitivity == count(rest, cliques, adjacency).sensitivity


@ADJACENCIES
@pytest.mark.parametrize("noise", ["torch", "discrete"])
def test_any_number_of_tables_costs_at_most_mu(adjacency, noise):
    draw = np.random.default_rng(0)
    for mu in [0.1, 1.0, 3.0, *np.exp(draw.uniform(-7, 3, 15))]:
        (one,) = Marginals.from_mu(mu, 1, adjacency, noise).privacy_events()
        for num_tables in [1, 2, 3, 7, 50, *draw.integers(2, 10**6, 10).tolist()]:
            made = Marginals.from_mu(mu, num_tables, adjacency, noise)
            (event,) = made.privacy_events()
            if noise == "torch":
                assert isinstance(event, GaussianEvent) and mu * (1 - 1e-11) < event.mu <= min(mu, one.mu)
            else:
                assert isinstance(event, ZCDPEvent) and mu**2 / 2 * (1 - 1e-11) < event.rho <= min(mu**2 / 2, one.rho)
            squared = num_tables * {"add_remove": 1, "replace_one": 2}[adjacency]
            assert made.sigma == pytest.approx(math.sqrt(squared) / mu)
    first, second = (Marginals.from_mu(0.7, m, adjacency, noise).privacy_events() for m in (1, 9))
    assert compute_guarantee(second, 1e-5).epsilon <= compute_guarantee(first, 1e-5).epsilon


def draw_noisy(tables, mechanism, runs):
    noise = DryRunNoise(mechanism.noise)
    answers = [mechanism.release(tables, noise, CONTEXT) for _ in range(runs)]
    assert {answer.events for answer in answers} == {mechanism.privacy_events()}
    counts = torch.stack([answer.noisy_counts.counts_QC[0] for answer in answers])
    assert counts.dtype == torch.int64
    return counts.double().numpy()


@pytest.mark.parametrize("noise", ["torch", "discrete"])
def test_the_noise_has_the_scale_that_is_paid_for_and_no_other(noise):
    tables = count([CELLS[i % 12] for i in range(40)], [(0, 1), (1, 2)])
    mechanism = Marginals(sigma=9.0, adjacency="add_remove", num_tables=2, noise=noise)
    noise_RM = draw_noisy(tables, mechanism, 1500) - tables.counts_M.numpy()
    jittered = noise_RM.ravel() + np.random.default_rng(0).uniform(-0.5, 0.5, noise_RM.size)
    assert stats.kstest(jittered, stats.norm(scale=9.0).cdf).pvalue > 1e-4
    for wrong in (0.5, 0.85, 1.15, 2):
        assert stats.kstest(jittered, stats.norm(scale=9.0 * wrong).cdf).pvalue < 1e-4
    correlation = np.corrcoef(noise_RM.T) - np.eye(len(tables.counts_M))
    assert np.abs(correlation).max() < 4.5 / math.sqrt(len(noise_RM))  # the counts have independent noise


@dataclass(frozen=True, kw_only=True)
class ThirdOfNoise(Marginals):
    """A planted fault: a third of the noise that is paid for."""

    def draw(self, votes, noise, context):
        part = Marginals(sigma=self.sigma / 3, adjacency=self.adjacency, num_tables=self.num_tables, noise=self.noise)
        answers = part.draw(votes, noise, context)
        return type(answers)(answers.label_Q, self.privacy_events(), noisy_counts=answers.noisy_counts)


@pytest.mark.parametrize(
    "noise,num_tables,adjacency",
    [("torch", 9, "add_remove"), ("torch", 4, "replace_one"), ("discrete", 4, "add_remove")],
)
def test_an_audit_finds_a_third_of_the_noise_and_no_fault_in_the_whole(noise, num_tables, adjacency):
    results = {}
    for kind in (Marginals, ThirdOfNoise):
        distance = make_table_sensitivity(num_tables, adjacency).l2
        mechanism = kind(sigma=distance / 1.2, adjacency=adjacency, num_tables=num_tables, noise=noise)
        results[kind] = audit(mechanism, mechanism.worst_case_neighbors(1), runs=2500, delta=1e-2)
    assert results[Marginals].is_sound and results[Marginals].proven > 0.2
    assert not results[ThirdOfNoise].is_sound and results[ThirdOfNoise].proven > results[ThirdOfNoise].claimed


def test_other_tables_than_those_that_are_paid_for_are_refused():
    noise = DryRunNoise()
    with pytest.raises(ValueError, match="sensitivity"):
        Marginals(sigma=3.0, adjacency="add_remove", num_tables=1).release(count([], [(0,), (1,)]), noise, CONTEXT)
    with pytest.raises(ValueError, match="adjacency"):
        Marginals(sigma=3.0, adjacency="add_remove").release(count([], [(0,)], "replace_one"), noise, CONTEXT)
    with pytest.raises(ValueError, match=r"noise\.kind='torch'"):
        Marginals(sigma=3.0, adjacency="add_remove", noise="discrete").release(count([], [(0,)]), noise, CONTEXT)
    for wrong in ({"num_tables": 0}, {"sigma": 0.0}, {"adjacency": "both"}):
        with pytest.raises(ValueError, match=rf"mechanism\.{next(iter(wrong))}="):
            Marginals(**({"sigma": 1.0, "adjacency": "add_remove"} | wrong))
