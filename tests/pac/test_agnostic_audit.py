"""AgPrivCl as a whole, run many times on neighboring samples: honest it keeps its price, with a fault it is found out.

A fault must be large, or the runs many, to pass a claim whose proof is loose: relabeling alone can leak all of the
1.949 that it is charged for, but the sparse vector only part of its epsilon*, and amplification by sub-sampling adds
slack of its own. So:

- amplification charged for a sub-sample that is not random is found in some hundred runs, at delta = 0.1 with
  resampling too;
- a tenth of the noise in some hundred, half of it only in tens of thousands: the slow test;
- paying for one copy of a record that resampling draws up to three times: by no sampling. Copies move the votes one
  by one, and the sparse vector smooths them. ``test_pac_agnostic`` has that trap exactly, for the worst mechanism.
"""

import math

import numpy as np
import pytest
from scipy import stats

from pate_torch.audit.command import audit_outcomes
from pate_torch.pac import agnostic
from pate_torch.pac.agnostic import RELABEL_FACTOR, plan_ag_priv_cl, run_ag_priv_cl
from pate_torch.pac.sample import Sample
from pate_torch.privacy.noise import DryRunNoise
from pate_torch.privacy.records import NO_ANSWER
from tests.pac.pac_audit import Table

pytestmark = pytest.mark.filterwarnings("ignore::pate_torch.pac.sample.BelowGuaranteeWarning")

COMMON, LEFT, RIGHT, SECOND = 0.0, 1.0, 2.0, 3.0
"""The point of the common records, the odd record's on either side, and a second point of the common teachers."""


class Less(DryRunNoise):
    """A share of the noise that is asked for; sub-samples as they are asked for."""

    share = 1.0

    def draw_laplace(self, shape, scale, device):
        return super().draw_laplace(shape, scale * self.share, device)

    def draw_gumbel(self, shape, device):
        return super().draw_gumbel(shape, device) * self.share


def plain(queries):
    """Where the common records are labeled 1, the odd one's teacher votes against the others on the left.

    Labels of COMMON, LEFT, RIGHT, then of the queries. No hypothesis labels (COMMON, LEFT) by (1, 0), none (COMMON,
    RIGHT) by (0, 1): so the odd point extends a common 1 in one way on the left and in two on the right, a common 0 the
    other way round, which with odd labels 0 and 1 makes the whole of RELABEL_FACTOR. A teacher takes the first
    hypothesis that has its one record's label.
    """
    zeros, ones = [0] * queries, [1] * queries
    return Table([[0, 0, 0, *zeros], [0, 1, 0, *zeros], [1, 1, 1, *ones], [1, 1, 0, *ones]])


def pressed(queries):
    """As ``plain``, and on the last query the odd one's teacher votes the other way than on those before.

    So one record moves both the threshold and the test that fails, as the sparse vector's proof has it. A common
    teacher's second record, at SECOND, is labeled 1; the first three hypotheses label it 0, so that relabeling does
    not choose them, but the odd one's teacher, who has no such record, takes them first.
    """
    front = queries - 1
    odd = [[0, 0, 1, 0, *[1] * front, 0], [0, 0, 0, 0, *[1] * front, 0], [0, 1, 0, 0, *[0] * front, 1]]
    zeros, ones = [0] * queries, [1] * queries
    return Table([*odd, [0, 0, 0, 1, *zeros], [0, 1, 0, 1, *zeros], [1, 1, 1, 1, *ones], [1, 1, 0, 1, *ones]])


def sides(y, *, second=False):
    """The two samples: records at COMMON with labels y (each with one at SECOND beside it, if so), and the odd one."""
    points, labels = np.full(len(y), COMMON), np.asarray(y)
    if second:
        points = np.stack([points, np.full(len(y), SECOND)], 1).ravel()
        labels = np.stack([labels, np.ones(len(y))], 1).ravel()
    return [Sample(np.append(points, odd), np.append(labels, odd == RIGHT)) for odd in (LEFT, RIGHT)]


def near(plan, queries, above, *, even=False):
    """The teachers whose unanimous vote stands so far above the threshold."""
    return 2 * (math.floor(plan.mechanism.compute_scales(queries).threshold) + above) + (2 if even else 3)


def outcomes(hypotheses, samples, queries, runs, *, share=1.0, **options):
    """The labels of so many runs on each side, [runs, queries]. The queries are the last points of the table."""
    points = hypotheses.labels_MP.shape[1]
    x_Q = np.arange(points - queries, points, dtype=float)
    for seed, sample in enumerate(samples):
        noise = Less(insecure_seed=seed)
        noise.share = share
        answers = [run_ag_priv_cl(hypotheses, sample, x_Q, budget=noise, **options) for _ in range(runs)]
        yield np.stack([a.label_Q.numpy() for a in answers])


def proven(*args, delta, **options):
    """The largest epsilon that the runs prove."""
    return audit_outcomes(*outcomes(*args, delta=delta, **options), delta=delta).epsilon


def proven_by(event, *args, delta, **options):
    """The same from one event, fixed before the runs and likelier on the right: nothing is spent on looking for it."""
    left, right = (
        stats.binomtest(int((labels == event).all(1).sum()), len(labels)).proportion_ci(0.95)
        for labels in outcomes(*args, delta=delta, **options)
    )
    return math.log((right.low - delta) / left.high) if right.low > delta else 0.0


def options_of(epsilon, delta, inner_epsilon, resample, queries, above, **even):
    """A plan with the sharp constants, which waste least, and the teachers for it."""
    asked = {"epsilon": epsilon, "delta": delta, "inner_epsilon": inner_epsilon, "resample": resample}
    asked |= {"alpha": 0.02, "beta": 0.2, "constants": "sharp"}
    return {**asked, "num_teachers": near(plan_ag_priv_cl(10**6, queries, 2, **asked), queries, above, **even)}


# --- Amplification -----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    "epsilon,delta,inner_epsilon,resample,above,runs",
    [(0.5, 0.01, 1.0, False, 4, 300), (0.2, 0.1, 3.0, True, 6, 600)],
    ids=["delta=0.01", "delta=0.1, resampled"],
)
def test_a_sub_sample_that_is_not_random_is_found(epsilon, delta, inner_epsilon, resample, above, runs, monkeypatch):
    """The first n' records, always, at the price of a random n' of n."""
    options = options_of(epsilon, delta, inner_epsilon, resample, 1, above)
    K = options["num_teachers"]
    n = math.ceil((K + 0.5) * 10**8 / plan_ag_priv_cl(10**8, 1, 2, **options).subset_size)
    assert plan_ag_priv_cl(n, 1, 2, **options).subset_size == K  # every teacher has one record
    first = np.arange(K - 1) < K // 2 - 1  # two more 0s than 1s
    samples = [Sample(np.roll(s.x, 1, axis=0), np.roll(s.y, 1)) for s in sides([*first, *(np.arange(n - K) % 2 == 0)])]
    assert proven(plain(1), samples, 1, runs // 3, **options) <= epsilon
    monkeypatch.setattr(agnostic, "draw_without_replacement", lambda n, size, noise: np.arange(size))
    assert proven(plain(1), samples, 1, runs, **options) > epsilon


# --- Noise -------------------------------------------------------------------------------------------------------


def test_a_tenth_of_the_noise_is_found():
    """The whole sample is drawn, so that only noise protects: epsilon = ln F + epsilon*."""
    epsilon = math.log(RELABEL_FACTOR) + 1
    options = options_of(epsilon, 0.03, 1.0, False, 2, 2, even=True)
    samples = sides(np.arange(options["num_teachers"] - 1) < options["num_teachers"] // 2 - 1)
    assert plan_ag_priv_cl(samples[0].n, 2, 2, **options).subset_size == samples[0].n
    assert proven(plain(2), samples, 2, 300, **options) <= epsilon
    assert proven(plain(2), samples, 2, 700, share=0.1, **options) > epsilon


@pytest.mark.slow
@pytest.mark.parametrize("share,runs,sound", [(1.0, 20_000, True), (0.5, 40_000, False)], ids=["honest", "halved"])
def test_half_of_the_noise_is_found_in_many_runs(share, runs, sound):
    """All in front are answered 1, and the last is not answered."""
    epsilon = math.log(RELABEL_FACTOR) + 2
    options = options_of(epsilon, 0.005, 2.0, False, 4, 0)
    samples = sides(np.arange(options["num_teachers"] - 1) < options["num_teachers"] // 2 - 1, second=True)
    event = [1, 1, 1, NO_ANSWER]
    assert (proven_by(event, pressed(4), samples, 4, runs, share=share, **options) <= epsilon) == sound
