"""GNMax: ties, and noisy counts with their noise, their cost, and an audit that sees them."""

import dataclasses
import math

import numpy as np
import pytest
import torch
from scipy import stats

from pate_torch.audit import audit
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import MechanismContext, NoisyCounts
from pate_torch.privacy.sensitive import Votes
from tests.mechanisms.mechanism_forms import both_kinds, build
from tests.mechanisms.vote_laws import CERTAIN, has_this_scale_alone, law


@pytest.mark.parametrize("name", ["gaussian", "laplace"])
def test_ties_of_integer_noise_go_to_the_lowest_class(name):
    mechanism = build(name, "discrete", sigma=0.01)  # exp(-100): no noise is ever drawn
    counts_QC = torch.tensor([[5, 5, 5], [3, 6, 6], [1, 5, 9]]).repeat(50, 1)
    votes = Votes(counts_QC, 15)
    answers = mechanism.release(votes, DryRunNoise("discrete"), MechanismContext(num_queries=150))
    assert answers.label_Q.tolist() == [0, 1, 2] * 50


SIGMA = 6.0


@both_kinds
def test_counts_are_whole_votes_with_the_noise_that_is_priced(noise):
    counts_QC, mechanism = torch.tensor([[30, 15, 5]]).repeat(40_000, 1), GNMax(sigma=SIGMA, counts=True, noise=noise)
    answers = mechanism.release(Votes(counts_QC, 50), DryRunNoise(noise), MechanismContext(num_queries=len(counts_QC)))
    noisy_QC = answers.noisy_counts.counts_QC
    assert noisy_QC.dtype == torch.int64 and answers.noisy_counts.sigma == SIGMA
    assert torch.equal(noisy_QC.argmax(1), answers.label_Q)
    drawn = (noisy_QC - counts_QC).numpy().astype(float) + np.random.default_rng(0).uniform(-0.5, 0.5, noisy_QC.shape)

    def p(factor):  # half-way between whole votes the law is exact, and the dither makes straight lines of the rest
        edges = np.arange(-100, 101) + 0.5
        below = law("gaussian", factor * SIGMA, noise == "discrete").cdf(edges)
        return stats.kstest(drawn[:, 0], lambda x: np.interp(x, edges, below)).pvalue

    assert has_this_scale_alone(p)
    correlation = np.corrcoef(drawn.T)[np.triu_indices(3, 1)]
    assert abs(correlation).max() < 7 / math.sqrt(len(drawn))  # every class has noise of its own
    label_alone = dataclasses.replace(mechanism, counts=False)
    assert answers.events == mechanism.privacy_events(len(counts_QC)) == label_alone.privacy_events(len(counts_QC))
    assert mechanism.make_outcome_model() is None  # no data-dependent cost is claimed for counts


@pytest.mark.slow(reason="statistical audit: 100,000 draws")
@both_kinds
def test_the_audit_sees_the_counts_and_not_the_label_alone(noise):
    """Counts with a third of the noise behind a label with all of it."""

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Leaky(GNMax):
        def release(self, votes, noise, context):
            hidden = super().release(votes, noise, context)
            shown = GNMax(sigma=self.sigma / 3, counts=True, noise=self.noise).release(votes, noise, context)
            return dataclasses.replace(hidden, noisy_counts=NoisyCounts(shown.noisy_counts.counts_QC, self.sigma))

    mechanism = GNMax(sigma=3.0, noise=noise)
    pairs = mechanism.worst_case_neighbors(2)
    sure = {"delta": 1e-5, "confidence": CERTAIN}
    for honest in (mechanism, dataclasses.replace(mechanism, counts=True)):
        found = audit(honest, pairs, runs=100_000, **sure)
        assert found.is_sound and found.proven > found.claimed / 4
    assert not audit(Leaky(sigma=3.0, noise=noise), pairs, runs=40_000, **sure).is_sound
