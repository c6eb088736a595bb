"""The audit: its statistics, the faults it must find, and the twins it must let pass."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch import audit as audit_module
from pate_torch.accounting import ConfidentCost
from pate_torch.audit import audit, audit_outcomes, check_plan, load_mechanism
from pate_torch.cli.main import main as pate
from pate_torch.mechanisms import sparse_vector
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.neighboring_values import make_soft_pair, make_vote_pair
from pate_torch.mechanisms.sparse_vector import SoftSparseVector
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.sensitive import Votes
from tests.configurations import list_options
from tests.mechanisms.vote_laws import CERTAIN

NAMES = list_options("mechanism")
STATISTICAL = pytest.mark.slow(reason="statistical audit: up to 600,000 draws a side")


# -- statistics -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p_hits,q_hits", [(40, 3), (200, 0), (100, 200), (0, 5)])
def test_bounds_are_clopper_pearson(p_hits, q_hits):
    p, q = (stats.binomtest(n, 200).proportion_ci(confidence_level=0.98, method="exact") for n in (p_hits, q_hits))
    expected = math.log((p.low - 0.001) / q.high) if p.low > 0.001 else -math.inf
    bound = audit_module._compute_epsilon_bound(p_hits, 200, q_hits, 200, 0.001, 0.02)
    assert float(bound) == pytest.approx(expected, rel=1e-9)


def respond(truth: int, epsilon: float, runs: int, rng) -> np.ndarray:
    """Randomized response: exactly epsilon-DP."""
    keep = rng.random(runs) < 1 / (1 + math.exp(-epsilon))
    return np.where(keep, truth, 1 - truth)


def test_proves_nearly_all_of_randomized_response_and_never_more():
    rng = np.random.default_rng(0)
    sides = [respond(truth, 1.0, 200_000, rng) for truth in (0, 1)]
    assert 0.95 < audit_outcomes(*sides, delta=0.0).epsilon <= 1.0


@pytest.mark.slow(reason="statistical audit: 300 audits")
def test_confidence_holds_over_many_audits():
    rng = np.random.default_rng(1)
    sides = ([respond(truth, 0.5, 400, rng) for truth in (0, 1)] for _ in range(300))
    false = sum(audit_outcomes(*both, delta=0.0).epsilon > 0.5 for both in sides)
    assert false <= stats.binom.ppf(0.9999, 300, 0.05)


def test_composition_is_seen_through_independent_and_dependent_queries():
    rng = np.random.default_rng(2)
    many = [np.stack([respond(t, 0.5, 60_000, rng) for _ in range(4)], 1) for t in (0, 1)]
    assert 1.5 < audit_outcomes(*many, delta=0.0).epsilon <= 2.0
    # Each column alone says nothing; their parity says all: only whole rows show it.
    first = [rng.integers(0, 2, 20_000) for _ in (0, 1)]
    parity = [np.stack([x, x ^ respond(t, 1.0, 20_000, rng)], 1) for t, x in enumerate(first)]
    assert 0.8 < audit_outcomes(*parity, delta=0.0).epsilon <= 1.0


def test_delta_is_granted_and_nothing_is_proven_from_equal_laws_or_few_runs():
    """A mechanism that gives its input away with probability 1 % is (0, 0.01)-DP."""
    rng = np.random.default_rng(3)
    sides = [np.where(rng.random(50_000) < 0.01, truth, 2) for truth in (0, 1)]
    assert audit_outcomes(*sides, delta=0.0).epsilon > 3
    assert audit_outcomes(*sides, delta=0.0125).epsilon < 0.02
    assert audit_outcomes(*rng.integers(0, 5, (2, 5000)), delta=1e-5).epsilon == 0
    assert audit_outcomes(np.zeros(6, int), np.ones(6, int), delta=1e-5).epsilon < 1
    for wrong in (np.zeros((6, 2), int), np.zeros(2, int)):
        with pytest.raises(ValueError, match="outcomes"):
            audit_outcomes(np.zeros(6, int), wrong, delta=1e-5)


# -- mechanisms -----------------------------------------------------------------------------------------------------


def run(name: str, keep: str, runs: int, queries: int | None = None, overrides: tuple[str, ...] = ()):
    """The audit of one mechanism, on the pairs whose name contains ``keep``."""
    mechanism, setting = load_mechanism(name, overrides, 1e-5)
    pairs = [pair for pair in mechanism.worst_case_neighbors(queries or setting.queries) if keep in pair.name]
    return audit(mechanism, pairs, runs=runs, confidence=CERTAIN)


# name: a pair on which it shows much, runs and queries enough to find the fault there, values besides the defaults
DECISIVE = {
    "gaussian": ("gap 2 sigma", 600_000, 1, ()),
    "laplace": ("gap 3 sigma", 300_000, 1, ()),
    "exponential": ("gap 2 sigma", 300_000, 1, ()),
    "confident": ("gap 2 sigma", 600_000, 1, ("screen_sigma=20",)),
    "interactive": ("gap 2 sigma", 600_000, 1, ("screen_sigma=20",)),
    "histogram": ("one more", 600_000, 1, ()),
    "gradient_descent": ("one record", 10_000, 1, ()),
    "single_stable": ("all moved one way", 100_000, 2, ()),
    "sparse_vector": ("the last", 6_000, 8, ()),
    "soft_sparse_vector": ("soft, the last", 20_000, 8, ()),
}
LARGE_SUPPORT = [pytest.param(name, marks=STATISTICAL) for name in ("gaussian", "laplace")]
ONE_BY_ONE = ("sparse_vector", "soft_sparse_vector", "gradient_descent")
"""Mechanisms whose runs are made one by one: half a minute each."""


def marked(quick):
    """All mechanisms; those that are not ``quick`` are audited nightly."""
    return [name if name in quick else pytest.param(name, marks=STATISTICAL) for name in NAMES]


def scale_noise(share: float = 1 / 2):
    """Too little noise: this share of what is asked for."""

    class ScaledNoise(DryRunNoise):
        def draw_gaussian(self, shape, sigma, device):
            return super().draw_gaussian(shape, sigma * share, device)

        def draw_laplace(self, shape, scale, device):
            return super().draw_laplace(shape, scale * share, device)

        def draw_gumbel(self, shape, device):
            return super().draw_gumbel(shape, device) * share

    return ScaledNoise


@STATISTICAL
@pytest.mark.parametrize(
    "name,keep,runs,queries",
    [
        ("sparse_vector", "the last", 60_000, 8),
        ("soft_sparse_vector", "soft, the last", 40_000, 3),
        ("gradient_descent", "one", 200_000, 1),
    ],
)
def test_half_the_noise_of_what_runs_one_by_one_is_found(name, keep, runs, queries, monkeypatch):
    """Takes six times as many runs as a quarter, and more."""
    monkeypatch.setattr(audit_module, "DryRunNoise", scale_noise())
    faulty = run(name, keep, runs, queries)
    assert not faulty.is_sound and faulty.proven > faulty.claimed


@pytest.mark.parametrize("name", marked(quick=("laplace", "exponential")))
def test_too_little_noise_is_found_and_all_of_it_passes(name, monkeypatch):
    """Half of it; of mechanisms whose runs are made one by one, a quarter."""
    keep, runs, *options = DECISIVE[name]
    honest = run(name, keep, max(runs // 2, 5_000), *options)
    assert honest.is_sound and honest.proven > 0  # something is seen; how much power there is, the fault shows
    monkeypatch.setattr(audit_module, "DryRunNoise", scale_noise(1 / 4 if name in ONE_BY_ONE else 1 / 2))
    faulty = run(name, keep, runs, *options)
    assert not faulty.is_sound and faulty.proven > faulty.claimed == honest.claimed and not faulty.faults


@pytest.mark.parametrize(
    "name", [*(pytest.param(n, marks=STATISTICAL) for n in ("gaussian", "laplace")), "single_stable"]
)
def test_half_of_the_integer_noise_is_found_and_all_of_it_passes(name, monkeypatch):
    keep, runs, queries, _ = DECISIVE[name]
    assert run(name, keep, runs, queries, ("noise=discrete",)).is_sound
    monkeypatch.setattr(audit_module, "DryRunNoise", scale_noise())
    assert not run(name, keep, 2 * runs, queries, ("noise=discrete",)).is_sound


def compute_printed_distance(counts_QC: torch.Tensor) -> torch.Tensor:
    """BTT18's top - second - 1, whose sensitivity is 2."""
    best = counts_QC.topk(2, dim=1).values
    return (best[:, 0] - best[:, 1] - 1).clamp(min=0)


def make_printed_pair(threshold: float, queries: int):
    """Votes whose printed distance stands at the threshold, moved by 2 at once; the last row against the others."""
    gap = 2 * round(threshold / 2) + 2
    top = torch.tensor([[500 + gap // 2, 500 - gap // 2]])
    lower = top + torch.tensor([[-1, 1]])
    if queries == 1:
        return make_vote_pair("printed", top, lower)
    sides = (torch.cat([a.repeat(queries - 1, 1), b]) for a, b in ((top, lower), (lower, top)))
    return make_vote_pair("printed", *sides)


def test_sensitivity_2_priced_as_1_is_found_in_a_single_query(monkeypatch):
    mechanism = sparse_vector.DistanceToInstability(epsilon=1.0, delta=1e-7)
    pairs = [make_printed_pair(mechanism.threshold, 1)]
    assert audit(mechanism, pairs, runs=50_000, confidence=CERTAIN).is_sound
    monkeypatch.setattr(sparse_vector, "compute_instability_distance", compute_printed_distance)
    result = audit(mechanism, pairs, runs=500_000, confidence=CERTAIN)
    assert not result.is_sound and result.proven > 1.5 > result.claimed


@STATISTICAL
def test_sensitivity_2_priced_as_1_is_found_in_the_sparse_vector(monkeypatch):
    """With the least lambda, which has none of the slack of BTT18's."""
    mechanism, _ = load_mechanism("sparse_vector", (), 1e-5)
    monkeypatch.setattr(sparse_vector, "compute_instability_distance", compute_printed_distance)
    pair = make_printed_pair(mechanism.make_cost(8).threshold, 8)
    assert not audit(mechanism, [pair], runs=20_000).is_sound


class RightForTwoClasses(SoftSparseVector):
    """A sixteenth of the noise where there are more."""

    def _draw_scores(self, counts_SV, shifted_SV, num_classes, noise, context):
        noise = noise if num_classes == 2 else scale_noise(1 / 16)()
        return super()._draw_scores(counts_SV, shifted_SV, num_classes, noise, context)


@STATISTICAL
def test_too_little_noise_on_scores_of_several_classes_is_found_by_pairs_of_several():
    honest, _ = load_mechanism("soft_sparse_vector", (), 1e-5)
    faulty = RightForTwoClasses(epsilon=honest.epsilon, delta=honest.delta, max_failures=1, bins=honest.bins)
    hard, soft = (pair for pair in honest.worst_case_neighbors(3) if "the last" in pair.name)
    assert (hard.left.num_classes, soft.left.num_classes) == (2, 3)
    assert audit(faulty, [hard], runs=700, confidence=CERTAIN).is_sound
    result = audit(faulty, [soft], runs=700, confidence=CERTAIN)
    assert not result.is_sound and result.proven > result.claimed and not result.faults


class CheckedOnce(ConfidentCost):
    def make_events(self, num_checked, num_answered):
        screen, answer = super().make_events(num_checked, num_answered)
        return dataclasses.replace(screen, count=min(num_checked, 1)), answer


class ChargedOnce(ConfidentGNMax):
    """The check is paid for once, not per query."""

    @property
    def cost(self):
        return CheckedOnce(self.sigma, screen_sigma=self.screen_sigma, threshold=self.threshold)


@STATISTICAL
@pytest.mark.parametrize("mechanism_class,is_sound", [(ConfidentGNMax, True), (ChargedOnce, False)])
def test_a_threshold_charged_once_is_found(mechanism_class, is_sound):
    mechanism = mechanism_class(sigma=30.0, screen_sigma=2.0, threshold=100.0)
    pairs = [pair for pair in mechanism.worst_case_neighbors(30) if pair.name == "at the threshold"]
    result = audit(mechanism, pairs, runs=30_000, confidence=CERTAIN)
    assert result.is_sound == is_sound == (result.proven <= result.claimed)


class Uncharged(GNMax):
    """Pays at the worst case for one query fewer than it answers."""

    def privacy_events(self, num_queries, rounds=1):
        return super().privacy_events(max(0, num_queries - 1))

    def release(self, votes, noise, context):
        events = GNMax(sigma=self.sigma).privacy_events(len(votes))
        return dataclasses.replace(super().release(votes, noise, context), events=events)


def test_events_beyond_the_worst_case_are_found():
    mechanism = Uncharged(sigma=50.0)
    result = audit(mechanism, mechanism.worst_case_neighbors(2), runs=200)
    assert not result.is_sound and "incurred" in result.faults[0]


@pytest.mark.parametrize("name", marked(quick=set(NAMES) - set(ONE_BY_ONE)))
def test_a_seeded_generator_is_found(name, monkeypatch):
    """It looks private, and draws from a published seed."""
    monkeypatch.setattr(audit_module, "DryRunNoise", lambda kind: DryRunNoise(kind, 1337))
    assert any("seeded" in fault for fault in run(name, DECISIVE[name][0], 300).faults)


class SeededInside(GNMax):
    """Ignores the source it is given."""

    def draw(self, votes, noise, context):
        return super().draw(votes, DryRunNoise(insecure_seed=1337), context)


class SeededOneByOne(SeededInside):
    has_independent_queries = False


@pytest.mark.parametrize("mechanism_class", [SeededInside, SeededOneByOne])
def test_a_generator_seeded_inside_the_mechanism_is_found(mechanism_class):
    mechanism = mechanism_class(sigma=3.0)
    result = audit(mechanism, mechanism.worst_case_neighbors(2), runs=100)
    assert not result.is_sound and result.faults


# -- neighbors ------------------------------------------------------------------------------------------------------


def test_pairs_must_be_neighbors():
    left, opinions = torch.tensor([[5, 5], [9, 1]]), torch.tensor([[0.2, 0.2, 0.6], [0.5, 0.5, 0.0]])
    moved = torch.tensor([-1, 1])
    assert make_vote_pair("ok", left, left + moved).num_queries == 2
    for make, message in (
        (lambda: make_vote_pair("two moved", left, left + 2 * moved), "neighbors"),
        (lambda: make_vote_pair("one teacher has two votes", left, left + torch.tensor([0, 1])), "teachers"),
        (lambda: Votes(torch.tensor([[4, 4, 3]]), 10), "one teacher, one vote"),
        (lambda: make_soft_pair("two teachers", left, left + 2 * moved, opinions, 4), "one teacher"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
    pair = make_soft_pair("one", left[:1], left[:1] + moved, opinions, 4)
    assert pair.left.counts_QSV[0, 2].tolist() == [5, 0, 5, 0]  # 0.0 and 0.6
    assert pair.right.counts_QSV[0, 2].tolist() == [6, 0, 4, 0]


@pytest.mark.parametrize("name", NAMES)
def test_every_mechanism_has_pairs_that_pass_its_own_check(name):
    mechanism, setting = load_mechanism(name, (), 1e-5)
    pairs = mechanism.worst_case_neighbors(setting.queries)
    for pair in pairs:
        check_plan(mechanism, pair)
    assert pairs


# -- the command ----------------------------------------------------------------------------------------------------


def test_command_prints_both_figures_and_exits_0_or_1_on_a_fault(capsys, monkeypatch):
    assert pate(["audit", "mechanism=gaussian", "sigma=5", "--runs", "2000", "--queries", "1", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["sound"] and 0 <= result["proven"] <= result["claimed"] and result["queries"] == 1
    assert pate(["audit", "mechanism=laplace", "mechanism.sigma=5", "--runs", "2000"]) == 0
    text = capsys.readouterr().out
    assert "claimed epsilon" in text and "proven epsilon" in text and "no fault found" in text
    monkeypatch.setattr(audit_module, "DryRunNoise", scale_noise())
    assert pate(["audit", "mechanism=single_stable", "--runs", "20000"]) == 1
    assert "REFUTED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,complaint",
    [
        ("mechanism=gausian", "gaussian"),
        ("sigma=3", "mechanism=<name>"),
        ("mechanism=gaussian sigm=3", "sigma"),
        ("mechanism=gaussian sigma=0", "sigma"),
        ("mechanism=exponential noise=discrete", "noise"),
        ("mechanism=gaussian --runs 3", "runs"),
        ("mechanism=gaussian --delta 2", "delta"),
    ],
)
def test_command_exits_2_on_a_wrong_argument(arguments, complaint, capsys):
    assert pate(["audit", *arguments.split()]) == 2
    assert complaint in capsys.readouterr().err


@STATISTICAL
@pytest.mark.parametrize("noise", ["torch", "discrete"])
@pytest.mark.parametrize("name", NAMES)
def test_full_audit(name, noise, capsys):
    has_no_such_noise = noise == "discrete" and name == "exponential"
    code = pate(["audit", f"mechanism={name}", f"noise={noise}", f"--confidence={CERTAIN}"])
    assert code == (2 if has_no_such_noise else 0), capsys.readouterr().out
