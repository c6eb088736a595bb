"""The papers' baselines: private over every neighbor, right where they promise, refused or warned elsewhere."""

import math
import warnings

import numpy as np
import pytest
from scipy.special import expit

from pate_torch.pac import baselines
from pate_torch.pac.boosting import split_folds
from pate_torch.pac.classes import Thresholds, fit_erm
from pate_torch.pac.nets import compute_net_size
from pate_torch.pac.sample import BelowGuaranteeWarning, Sample
from pate_torch.privacy.noise import DryRunNoise
from tests.pac.pac_audit import Spy, all_laws, sample_of, worst

quiet = pytest.mark.filterwarnings("ignore::pate_torch.pac.sample.BelowGuaranteeWarning")
POINTS = np.arange(2.0)[:, None]


def shares(records, teachers):
    """The share of shards whose ERM says 1 on each point, from the definition."""
    sample = sample_of(records)
    best = [fit_erm(Thresholds(), sample.x[block], sample.y[block]) for block in split_folds(len(records), teachers)]
    return np.mean([Thresholds().predict(h, POINTS) for h in best], axis=0)


def both(one_Q):
    """The laws of all answers as one array of positive numbers."""
    return np.concatenate([one_Q, 1 - one_Q])


@quiet
def test_df18s_vote_draws_from_a_law_that_is_private_over_every_pair():
    epsilon, alpha, n = 2.0, 0.5, 3
    teachers = math.ceil(6 * math.log(1 / alpha) / epsilon)
    assert teachers == n

    def law(records):
        return both(expit(epsilon / 2 * teachers * (2 * shares(records, teachers) - 1)))

    laws, records_U = all_laws(law, 2, n)
    loss, _, _ = worst(laws, records_U)
    assert 0.9 * epsilon / 2 < loss <= epsilon
    records, noise, runs = ((0, 0), (1, 1), (0, 1)), DryRunNoise(insecure_seed=0), 1500
    drawn = np.mean(
        [
            baselines.run_df18_vote(
                Thresholds(), sample_of(records), POINTS, epsilon=epsilon, alpha=alpha, budget=noise
            ).label_Q
            for _ in range(runs)
        ],
        axis=0,
    )  # fmt: skip
    expected = law(records)[:2]
    assert (abs(drawn - expected) <= 5 * np.sqrt(expected * (1 - expected) / runs)).all()


@quiet
def test_averaging_moves_a_prediction_by_one_shard_at_most():
    teachers, n = 2, 4
    laws, records_U = all_laws(lambda records: both(0.5 + 0.25 * shares(records, teachers)), 2, n)
    assert worst(laws, records_U)[2] == pytest.approx(0.25 / teachers)  # met, at a quarter of the law
    records, noise, runs = ((0, 0), (1, 1), (1, 0), (0, 1)), DryRunNoise(insecure_seed=0), 1500
    asked = {"gamma": 1 / teachers, "alpha": 0.4, "beta": 0.4, "budget": noise}
    found = [baselines.run_averaging(Thresholds(), sample_of(records), POINTS, **asked) for _ in range(runs)]
    drawn, expected = np.mean([f.label_Q for f in found], axis=0), shares(records, teachers)
    assert (abs(drawn - expected) <= 5 * np.sqrt(expected * (1 - expected) / runs) + 1e-12).all()
    assert found[0].price == ("stability", 0.5)


@pytest.mark.parametrize("name", ["df18", "averaging", "representation"])
def test_with_the_records_it_asks_for_it_is_as_good_as_it_says(name):
    """A threshold without errors: no warning with n records, a warning with one fewer, and the promised error."""
    generator, noise = np.random.default_rng(0), DryRunNoise(insecure_seed=1)
    x_Q = generator.random((400, 1))
    asked = {"alpha": 0.2, "budget": noise}
    if name == "df18":
        n, allowed = baselines.compute_df18_size(1, epsilon=1.0, alpha=0.2), 0.4
    elif name == "averaging":
        asked |= {"beta": 0.2}
        n, allowed = baselines.compute_averaging_size(1, gamma=0.25, alpha=0.2, beta=0.2), 0.4
    else:
        asked |= {"beta": 0.2}
        size = compute_net_size(0.05, 0.2 / 3, 1)
        n, allowed = baselines.compute_representation_size(1, epsilon=1.0, alpha=0.2, beta=0.2, reference=size), 0.2

    def run(sample):
        if name == "df18":
            return baselines.run_df18_vote(Thresholds(), sample, x_Q, epsilon=1.0, **asked).label_Q
        if name == "averaging":
            return baselines.run_averaging(Thresholds(), sample, x_Q, gamma=0.25, **asked).label_Q
        reference = baselines.draw_uniform_reference(x_Q, size, 0)
        chosen = baselines.run_representation(Thresholds(), sample, reference, epsilon=1.0, **asked)
        return Thresholds().predict(chosen.hypothesis, x_Q)

    x = generator.random(n)
    with warnings.catch_warnings():
        warnings.simplefilter("error", BelowGuaranteeWarning)
        label_Q = run(Sample(x, x >= 0.3))
    assert np.mean(label_Q != (x_Q[:, 0] >= 0.3)) <= allowed
    with pytest.warns(BelowGuaranteeWarning, match=f"n >= {n:,}"):
        run(Sample(x[1:], x[1:] >= 0.3))


@quiet
@pytest.mark.parametrize(
    "run",
    [
        lambda sample, spy: baselines.run_df18_vote(Thresholds(), sample, POINTS, epsilon=1.0, alpha=0.4, budget=spy),
        lambda sample, spy: baselines.run_averaging(
            Thresholds(), sample, POINTS, gamma=0.5, alpha=0.4, beta=0.4, budget=spy
        ),
        lambda sample, spy: baselines.run_representation(
            Thresholds(), sample, POINTS, epsilon=1.0, alpha=0.4, beta=0.4, budget=spy
        ),
    ],
    ids=["df18", "averaging", "representation"],
)
def test_it_charges_before_it_draws_and_refuses_other_neighbors(run):
    spy, x = Spy(), np.linspace(0, 1, 20)
    found = run(Sample(x, x > 0.5), spy)
    assert spy.log[0] == "charge" and spy.log.count("charge") == 1 and spy.charged == found.events
    with pytest.raises(ValueError, match="replace_one"):
        run(Sample(x, x > 0.5, "add_remove"), spy)
