"""The audit: its statistics, the faults it must find, and the twins it must let pass."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch.audit import command as audit_module
from pate_torch.audit.command import _compute_epsilon_bound, audit, audit_outcomes, load_mechanism, main
from pate_torch.audit.pairs import AuditSetting, NeighborPair, SoftPair, make_worst_pairs
from pate_torch.mechanisms import distance_to_instability, sparse_vector
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.mechanisms.soft_sparse_vector import SoftSparseVector
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.sensitive import Votes
from tests.configurations import list_options
from tests.mechanisms.vote_laws import CERTAIN

NAMES = list_options("mechanism")


# -- statistics -----------------------------------------------------------------------------------------------------


def test_bounds_are_clopper_pearson():
    for p_hits, q_hits in ((40, 3), (200, 0), (100, 200), (0, 5)):
        exact = [
            stats.binomtest(hits, 200).proportion_ci(confidence_level=0.98, method="exact") for hits in (p_hits, q_hits)
        ]
        found = float(_compute_epsilon_bound(p_hits, 200, q_hits, 200, 0.001, 0.02))
        if exact[0].low > 0.001:
            assert found == pytest.approx(math.log((exact[0].low - 0.001) / exact[1].high), rel=1e-9)
        else:
            assert found == -math.inf


def response(truth: int, epsilon: float, runs: int, rng) -> np.ndarray:
    """Randomized response: exactly epsilon-DP."""
    keep = rng.random(runs) < 1 / (1 + math.exp(-epsilon))
    return np.where(keep, truth, 1 - truth)


def test_proves_nearly_all_of_randomized_response_and_never_more():
    rng = np.random.default_rng(0)
    sides = [response(truth, 1.0, 200_000, rng) for truth in (0, 1)]
    assert 0.95 < audit_outcomes(*sides, delta=0.0).epsilon <= 1.0


def test_confidence_holds_over_many_audits():
    rng = np.random.default_rng(1)
    false = sum(
        audit_outcomes(response(0, 0.5, 400, rng), response(1, 0.5, 400, rng), delta=0.0).epsilon > 0.5
        for _ in range(300)
    )
    assert false <= stats.binom.ppf(0.9999, 300, 0.05)


def test_composition_is_seen_through_independent_and_dependent_queries():
    rng = np.random.default_rng(2)
    many = [np.stack([response(t, 0.5, 60_000, rng) for _ in range(4)], 1) for t in (0, 1)]
    assert 1.5 < audit_outcomes(*many, delta=0.0).epsilon <= 2.0
    # Each column alone says nothing; their parity says all: only whole rows show it.
    first = [rng.integers(0, 2, 20_000) for _ in (0, 1)]
    parity = [np.stack([x, x ^ response(t, 1.0, 20_000, rng)], 1) for t, x in enumerate(first)]
    assert 0.8 < audit_outcomes(*parity, delta=0.0).epsilon <= 1.0


def test_delta_is_granted():
    """A mechanism that gives its input away with probability 1 % is (0, 0.01)-DP."""
    rng = np.random.default_rng(3)
    sides = [np.where(rng.random(50_000) < 0.01, truth, 2) for truth in (0, 1)]
    assert audit_outcomes(*sides, delta=0.0).epsilon > 3
    assert audit_outcomes(*sides, delta=0.0125).epsilon < 0.02


def test_nothing_is_proven_from_equal_laws_or_few_runs():
    rng = np.random.default_rng(4)
    assert audit_outcomes(*rng.integers(0, 5, (2, 5000)), delta=1e-5).epsilon == 0
    assert audit_outcomes(np.zeros(6, int), np.ones(6, int), delta=1e-5).epsilon < 1
    for wrong in (np.zeros((6, 2), int), np.zeros(2, int)):
        with pytest.raises(ValueError, match="outcomes"):
            audit_outcomes(np.zeros(6, int), wrong, delta=1e-5)


def test_pairs_must_be_neighbors():
    left = torch.tensor([[5, 5], [9, 1]])
    assert NeighborPair(name="ok", left_QC=left, right_QC=left + torch.tensor([-1, 1])).num_queries == 2
    with pytest.raises(ValueError, match="neighbors"):
        NeighborPair(name="two moved", left_QC=left, right_QC=left + torch.tensor([-2, 2]))
    with pytest.raises(ValueError, match="teachers"):  # a tie that gives one teacher two votes
        NeighborPair(name="ties twice", left_QC=left, right_QC=left + torch.tensor([0, 1]))


# -- mechanisms -----------------------------------------------------------------------------------------------------


def run(name: str, *, runs: int, keep: str = "", queries: int | None = None, overrides: tuple[str, ...] = ()):
    """The audit of one mechanism, on the pairs whose name contains ``keep``."""
    mechanism, setting = load_mechanism(name, overrides, 1e-5)
    pairs = [p for p in make_worst_pairs(mechanism, queries or setting.queries) if keep in p.name]
    return audit(mechanism, pairs, runs=runs, independent=mechanism.has_independent_queries, confidence=CERTAIN)


# name: a pair on which it shows much, runs and queries enough to find the fault there, values besides the YAML's
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
ONE_BY_ONE = {"sparse_vector", "soft_sparse_vector", "gradient_descent"}
"""Whose runs are made one by one: half a minute each. Their noise is held to its law with every mechanism's."""
SLOW_LOOPS = [pytest.param(name, marks=pytest.mark.slow) if name in ONE_BY_ONE else name for name in NAMES]


class Halved(DryRunNoise):
    """Half of the noise that is asked for."""

    def draw_gaussian(self, shape, sigma, device):
        return super().draw_gaussian(shape, sigma / 2, device)

    def draw_laplace(self, shape, scale, device):
        return super().draw_laplace(shape, scale / 2, device)

    def draw_gumbel(self, shape, device):
        return super().draw_gumbel(shape, device) / 2


class Quartered(Halved):
    """Half of that."""

    def draw_gaussian(self, shape, sigma, device):
        return super().draw_gaussian(shape, sigma / 2, device)

    def draw_laplace(self, shape, scale, device):
        return super().draw_laplace(shape, scale / 2, device)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name,runs,keep,queries",
    [
        ("sparse_vector", 60_000, "the last", 8),
        ("soft_sparse_vector", 40_000, "soft, the last", 3),
        ("gradient_descent", 200_000, "one", 1),
    ],
)
def test_half_the_noise_of_what_runs_one_by_one_is_found(name, runs, keep, queries, monkeypatch):
    """Takes six times as many runs as a quarter, and more."""
    monkeypatch.setattr(audit_module, "DryRunNoise", Halved)
    faulty = run(name, runs=runs, keep=keep, queries=queries)
    assert not faulty.is_sound and faulty.proven > faulty.claimed


@pytest.mark.parametrize("name", SLOW_LOOPS)
def test_too_little_noise_is_found_and_all_of_it_passes(name, monkeypatch):
    """Half of it; of mechanisms whose runs are made one by one, a quarter."""
    keep, runs, queries, overrides = DECISIVE[name]
    honest = run(name, runs=max(runs // 2, 5_000), keep=keep, queries=queries, overrides=overrides)
    assert honest.is_sound and honest.proven > 0  # something is seen; how much power there is, the fault shows
    monkeypatch.setattr(
        audit_module, "DryRunNoise", Quartered if "sparse_vector" in name or name == "gradient_descent" else Halved
    )
    faulty = run(name, runs=runs, keep=keep, queries=queries, overrides=overrides)
    assert not faulty.is_sound and faulty.proven > faulty.claimed == honest.claimed and not faulty.faults


@pytest.mark.parametrize(
    "name,keep",
    [
        pytest.param("gaussian", "gap 2", marks=pytest.mark.slow),  # the most runs
        ("laplace", "gap 3"),
        ("single_stable", "one way"),
    ],
)
def test_half_of_the_integer_noise_is_found_and_all_of_it_passes(name, keep, monkeypatch):
    _, runs, queries, _ = DECISIVE[name]
    assert run(name, runs=runs, keep=keep, queries=queries, overrides=("noise=discrete",)).is_sound
    monkeypatch.setattr(audit_module, "DryRunNoise", Halved)
    assert not run(name, runs=2 * runs, keep=keep, queries=queries, overrides=("noise=discrete",)).is_sound


def printed_distance(counts_QC: torch.Tensor) -> torch.Tensor:
    """BTT18's top - second - 1, whose sensitivity is 2."""
    best = counts_QC.topk(2, dim=1).values
    return (best[:, 0] - best[:, 1] - 1).clamp(min=0)


def printed_pair(threshold: float, queries: int) -> NeighborPair:
    """Votes whose printed distance stands at the threshold, moved by 2 at once; the last row against the others."""
    gap = 2 * round(threshold / 2) + 2
    top = torch.tensor([[500 + gap // 2, 500 - gap // 2]])
    lower = top + torch.tensor([[-1, 1]])
    rows = [top.repeat(queries - 1, 1), lower.repeat(queries - 1, 1)] if queries > 1 else [top[:0], top[:0]]
    last = [lower, top] if queries > 1 else [top, lower]
    return NeighborPair(name="printed", left_QC=torch.cat([rows[0], last[0]]), right_QC=torch.cat([rows[1], last[1]]))


def test_sensitivity_2_priced_as_1_is_found_in_a_single_query(monkeypatch):
    mechanism = distance_to_instability.DistanceToInstability(epsilon=1.0, delta=1e-7)
    pair = printed_pair(mechanism.threshold, 1)
    tried = {"runs": 500_000, "independent": True, "confidence": CERTAIN}
    assert audit(mechanism, [pair], **tried).is_sound
    monkeypatch.setattr(distance_to_instability, "compute_instability_distance", printed_distance)
    result = audit(mechanism, [pair], **tried)
    assert not result.is_sound and result.proven > 1.5 > result.claimed


@pytest.mark.slow
def test_sensitivity_2_priced_as_1_is_found_in_the_sparse_vector(monkeypatch):
    """With the least lambda, which has none of the slack of BTT18's."""
    mechanism, _ = load_mechanism("sparse_vector", (), 1e-5)
    monkeypatch.setattr(sparse_vector, "compute_instability_distance", printed_distance)
    pair = printed_pair(mechanism.compute_scales(8).threshold, 8)
    assert not audit(mechanism, [pair], runs=20_000).is_sound


class Sixteenth(Quartered):
    """A quarter of that."""

    def draw_laplace(self, shape, scale, device):
        return super().draw_laplace(shape, scale / 4, device)


class RightForTwoClasses(SoftSparseVector):
    """A sixteenth of the noise where there are more."""

    def _draw_scores(self, counts_SV, shifted_SV, num_classes, noise, context):
        return super()._draw_scores(
            counts_SV, shifted_SV, num_classes, noise if num_classes == 2 else Sixteenth(), context
        )


def test_too_little_noise_on_scores_of_several_classes_is_found_by_pairs_of_several():
    honest, _ = load_mechanism("soft_sparse_vector", (), 1e-5)
    faulty = RightForTwoClasses(epsilon=honest.epsilon, delta=honest.delta, max_failures=1, bins=honest.bins)
    hard, soft = (pair for pair in make_worst_pairs(honest, 3) if "the last" in pair.name)
    assert (hard.make_votes("left").num_classes, soft.make_votes("left").num_classes) == (2, 3)
    assert audit(faulty, [hard], runs=700, confidence=CERTAIN).is_sound
    result = audit(faulty, [soft], runs=700, confidence=CERTAIN)
    assert not result.is_sound and result.proven > result.claimed and not result.faults


def test_one_teacher_alone_may_move_between_soft_sides():
    left, opinions = torch.tensor([[5, 5], [9, 1]]), torch.tensor([[0.2, 0.2, 0.6], [0.5, 0.5, 0.0]])
    moved = torch.tensor([-1, 1])
    with pytest.raises(ValueError, match="one teacher"):  # another one in either query
        SoftPair(name="two", left_QC=left, right_QC=left + moved, probability_2C=opinions)
    pair = SoftPair(name="one", left_QC=left[:1], right_QC=left[:1] + moved, probability_2C=opinions)
    assert pair.make_votes("left").score_KQS[:, 0, 2].tolist() == pytest.approx([0.6] * 5 + [0.0] * 5)
    assert pair.make_votes("right").score_KQS[:, 0, 2].tolist() == pytest.approx([0.6] * 4 + [0.0] * 6)


class ChargedOnce(ConfidentGNMax):
    """The check is paid for once, not per query."""

    def _make_events(self, asked, answered):
        screen, answer = super()._make_events(asked, answered)
        return dataclasses.replace(screen, count=min(asked, 1)), answer


def test_a_threshold_charged_once_is_found():
    values = {"sigma": 30.0, "screen_sigma": 2.0, "threshold": 100.0}
    results = []
    for cls in (ConfidentGNMax, ChargedOnce):
        mechanism = cls(**values)
        pairs = [p for p in make_worst_pairs(mechanism, 30) if p.name == "at the threshold"]
        results.append(audit(mechanism, pairs, runs=30_000, independent=True, confidence=CERTAIN))
    assert results[0].is_sound and not results[1].is_sound
    assert results[1].proven > results[1].claimed


class Uncharged(GNMax):
    """Pays at the worst case for one query fewer than it answers."""

    def privacy_events(self, num_queries, rounds=1):
        return super().privacy_events(max(0, num_queries - 1))

    def release(self, votes, noise, context):
        return dataclasses.replace(
            super().release(votes, noise, context), events=GNMax(sigma=self.sigma).privacy_events(len(votes))
        )


def test_events_beyond_the_worst_case_are_found():
    result = audit(Uncharged(sigma=50.0), make_worst_pairs(Uncharged(sigma=50.0), 2), runs=200, independent=True)
    assert not result.is_sound and "incurred" in result.faults[0]


class Seeded(DryRunNoise):
    """Looks private, and draws from a published seed."""

    def __init__(self, kind: str = "torch") -> None:
        super().__init__(kind, 1337)


class SeededInside(GNMax):
    """Ignores the source it is given."""

    def draw(self, votes, noise, context):
        return super().draw(votes, DryRunNoise(insecure_seed=1337), context)


@pytest.mark.parametrize("name", NAMES)
def test_a_seeded_generator_is_found(name, monkeypatch):
    monkeypatch.setattr(audit_module, "DryRunNoise", Seeded)
    assert any("seeded" in fault for fault in run(name, runs=300, keep=DECISIVE[name][0]).faults)


@pytest.mark.parametrize("independent", [True, False])
def test_a_generator_seeded_inside_the_mechanism_is_found(independent):
    mechanism = SeededInside(sigma=3.0)
    result = audit(mechanism, make_worst_pairs(mechanism, 2), runs=300, independent=independent)
    assert not result.is_sound and result.faults


def test_a_tie_that_counts_twice_is_refused():
    with pytest.raises(ValueError, match="one teacher, one vote"):
        Votes(torch.tensor([[4, 4, 3]]), 10)


# -- the command ----------------------------------------------------------------------------------------------------


def test_command_prints_both_figures_and_exits_0(capsys):
    assert main(["mechanism=gaussian", "sigma=5", "--runs", "2000", "--queries", "1", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["sound"] and 0 <= found["proven"] <= found["claimed"] and found["queries"] == 1
    assert main(["mechanism=laplace", "mechanism.sigma=5", "--runs", "2000"]) == 0
    text = capsys.readouterr().out
    assert "claimed epsilon" in text and "proven epsilon" in text and "no fault found" in text


def test_command_exits_1_on_a_fault(monkeypatch, capsys):
    monkeypatch.setattr(audit_module, "DryRunNoise", Halved)
    assert main(["mechanism=single_stable", "--runs", "20000"]) == 1
    assert "REFUTED" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments,complaint",
    [
        (["mechanism=gausian"], "gaussian"),
        (["sigma=3"], "mechanism=<name>"),
        (["mechanism=gaussian", "sigm=3"], "sigma"),
        (["mechanism=gaussian", "sigma=0"], "sigma"),
        (["mechanism=exponential", "noise=discrete"], "noise"),
        (["mechanism=gaussian", "--runs", "3"], "runs"),
        (["mechanism=gaussian", "--delta", "2"], "delta"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_command_exits_2_on_a_wrong_argument(arguments, complaint, capsys):
    assert main(arguments) == 2
    assert complaint in capsys.readouterr().err


def test_every_mechanism_has_pairs_that_pass_its_own_check():
    for name in NAMES:
        mechanism, setting = load_mechanism(name, (), 1e-5)
        assert isinstance(setting, AuditSetting)
        for pair in make_worst_pairs(mechanism, setting.queries):
            pair.check(mechanism)


@pytest.mark.slow
@pytest.mark.parametrize("noise", ["torch", "discrete"])
@pytest.mark.parametrize("name", NAMES)
def test_full_audit(name, noise, capsys):
    expected = (
        2 if noise == "discrete" and name in ("exponential", "gradient_descent") else 0
    )  # which have no such form
    assert main([f"mechanism={name}", f"noise={noise}", f"--confidence={CERTAIN}"]) == expected, capsys.readouterr().out
