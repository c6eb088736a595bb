"""The algorithms of ``pate learn``: their problems, costs and sizes, and audits on two tiny neighbors."""

import itertools
import math
import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PureDPEvent
from pate_torch.audit import audit_outcomes
from pate_torch.hypotheses import exponential
from pate_torch.hypotheses.algorithms import (
    ALGORITHMS,
    LearnOptions,
    Problem,
    make_hypothesis_class,
    make_problems,
    plan_events,
)
from pate_torch.hypotheses.classes import Stumps, Thresholds
from pate_torch.hypotheses.sample import Sample
from pate_torch.privacy.noise import DryRunNoise
from tests import ROOT
from tests.end_to_end.documents import table as table_of
from tests.hypotheses.exact_laws import Spy, charges_first, quiet
from tests.hypotheses.point_worlds import data_of, facts_of


def test_a_replaced_record_moves_no_other():
    """The same order, the same public points; in every problem one record differs, and the shares add up."""
    generator = np.random.default_rng(0)
    x, y = generator.random((30, 2)), generator.integers(0, 3, 30)
    other_x, other_y = x.copy(), y.copy()
    other_x[7], other_y[7] = [0.9, 0.1], (y[7] + 1) % 3
    left, right = (
        make_problems(data_of(a, b, 3).private, facts_of(data_of(a, b, 3)), LearnOptions(), 0, 1e-5)
        for a, b in ((x, y), (other_x, other_y))
    )
    assert len(left) == 3
    changed = set()
    for one, other in zip(left, right, strict=True):
        differ = (one.sample.x != other.sample.x).any(1) | (one.sample.y != other.sample.y)
        assert differ.sum() == 1 and np.array_equal(one.public_x, other.public_x)
        scaled_differ = (one.scaled_sample.x != other.scaled_sample.x).any(1)
        assert (scaled_differ == (one.sample.x != other.sample.x).any(1)).all()
        changed.add(int(differ.argmax()))
    assert len(changed) == 1 and sum(p.options.epsilon for p in left) == pytest.approx(1.0)


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_unusable_record_is_no_error_of_any_rule(name, monkeypatch):
    """What is drawn does not depend on the class that stands in its place, and does where the record is usable."""
    monkeypatch.setattr(Problem, "compute_answer_epsilon", lambda *_: 5.0)
    generator = np.random.default_rng(0)
    x, is_usable = generator.random((200, 2)), np.arange(200) < 50
    learned = {}
    for marks, filler in itertools.product((True, False), (0, 1)):
        data = data_of(x, np.where(is_usable, x[:, 0] > 0.5, filler).astype(int))
        private = replace(data.private, usable_N=torch.from_numpy(is_usable)) if marks else data.private
        options = LearnOptions(epsilon=100.0, alpha=0.2, points=10)
        (part,) = make_problems(private, facts_of(data), options, 0, 1e-5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            learned[marks, filler] = str(ALGORITHMS[name].learn(part, DryRunNoise(insecure_seed=1)))
        if marks and name == "exponential":
            candidates = part.make_quantile_hypotheses()
            rows = x[is_usable], x[is_usable, 0] > 0.5
            brute_force = [int((part.hypotheses.predict(h, rows[0]) != rows[1]).sum()) for h in candidates]
            assert part.hypotheses.count_errors(candidates, *part.sample.usable).tolist() == brute_force
    assert learned[True, 0] == learned[True, 1]
    assert learned[False, 0] != learned[False, 1]


def test_a_finite_class_has_cuts_of_every_feature():
    """Features whose public values have the same quantiles are two features all the same."""
    generator = np.random.default_rng(0)
    data = data_of(generator.random((30, 3)), np.arange(30) % 2)
    (part,) = make_problems(data.private, facts_of(data), LearnOptions(cuts=4), 0, 1e-5)
    part.public_x[:, 1] = generator.permutation(part.public_x[:, 0])
    found = part.make_quantile_hypotheses()
    assert {(h.feature, h.is_above) for h in found[2:]} == {(f, a) for f in range(3) for a in (True, False)}
    assert len(found) == 2 + 3 * 4 * 2
    assert len({h.threshold for h in found[2:] if h.feature == 2}) == 4


@pytest.mark.parametrize(
    "option",
    [
        *({"hypotheses": "trees"}, {"constants": "best"}, {"epsilon": 0}, {"alpha": 2.0}, {"beta": 0.0}),
        *({"points": 0}, {"cuts": 0}, {"radius": -1.0}, {"ridge": math.nan}),
    ],
    ids=str,
)
def test_impossible_options_are_refused(option):
    with pytest.raises(ValueError, match=f"^{next(iter(option))}="):
        LearnOptions(**option)


def test_data_that_no_class_accepts_are_refused():
    data = data_of(np.zeros((4, 2)), np.arange(4) % 2)
    (part,) = make_problems(data.private, facts_of(data), LearnOptions(points=41), 0, 1e-5)
    with pytest.raises(ValueError, match="points=41: must be at most 40"):
        part.select_points(20)
    with pytest.raises(ValueError, match="takes 1 feature"):
        make_hypothesis_class("thresholds", 2)
    assert make_hypothesis_class("thresholds", 1) == Thresholds() and make_hypothesis_class("stumps", 2) == Stumps(2)
    images = data_of(np.zeros((4, 2)), np.arange(4) % 2, shape=(1, 1, 2))
    with pytest.raises(ValueError, match="must be a table of features"):
        make_problems(images.private, facts_of(images), LearnOptions(), 0, 1e-5)
    groups = data_of(np.zeros((4, 2)), np.arange(4) % 2, units=["a", "a", "b", "b"], unit="group:patient")
    with pytest.raises(ValueError, match="the privacy unit is group:patient"):
        facts_of(groups).check_adjacency()


def neighbor_problem(n, has_extra_positive, options):
    """A quarter of n records at 0, labeled 0, and half of those at 1 labeled 1; one more is, or is not."""
    x, y = np.full((n, 1), 1.0), np.zeros(n, dtype=bool)
    x[: n // 4] = 0.0
    y[n // 4 : n // 4 + (n - n // 4) // 2] = True
    y[-1] = has_extra_positive
    order = np.random.default_rng(0).permutation(n)
    scaled_x = np.concatenate([x, np.ones((n, 1))], axis=1) / np.sqrt(2)
    return Problem(
        hypotheses=make_hypothesis_class(options.hypotheses, 1), sample=Sample(x[order], y[order]),
        public_x=np.tile([[0.0], [1.0]], (4, 1)), scaled_sample=Sample(scaled_x[order], y[order]),
        options=options, delta=1e-5,
    )  # fmt: skip


@quiet
@pytest.mark.parametrize("name", sorted(ALGORITHMS))
def test_a_quote_draws_nothing_and_is_what_is_charged(name):
    side = neighbor_problem(1024, True, LearnOptions(constants="sharp", points=4, alpha=0.3))
    events, spy = plan_events(ALGORITHMS[name], side, "torch"), Spy()
    ALGORITHMS[name].learn(side, spy)
    assert events and spy.charged == events and charges_first(spy)
    assert accounting.compute_guarantee(events, 1e-5).epsilon <= side.options.epsilon * (1 + 1e-9)


@quiet
@pytest.mark.parametrize("num_classes,epsilon,delta", [(2, 0.5, 1e-4), (3, 2.0, 1e-5)])
def test_predictions_cost_all_of_epsilon_and_no_more(num_classes, epsilon, delta):
    """Equal shares of epsilon, 1/m each, would leave 20 to 40 % of it unspent."""
    data = data_of(np.random.default_rng(0).random((900, 2)), np.arange(900) % num_classes, num_classes)
    options = LearnOptions(epsilon=epsilon, constants="sharp")
    parts = make_problems(data.private, facts_of(data), options, 0, delta)
    events = [e for part in parts for e in plan_events(ALGORITHMS["private-prediction"], part, "torch")]
    assert sum(e.count for e in events) == 20 * len(parts)
    assert 0.99 * epsilon < accounting.compute_guarantee(events, delta).epsilon <= epsilon
    shares = [PureDPEvent(epsilon=epsilon / 20 / len(parts), count=e.count) for e in events]
    assert accounting.compute_guarantee(shares, delta).epsilon < 0.85 * epsilon


@pytest.mark.parametrize("name", ["sspp", "exponential"])
@pytest.mark.parametrize("num_classes", [2, 3])
def test_a_certificate_counts_the_candidates_that_are_drawn_from(name, num_classes, monkeypatch):
    data = data_of(np.random.default_rng(0).random((900, 2)), np.arange(900) % num_classes, num_classes)
    part = make_problems(data.private, facts_of(data), LearnOptions(epsilon=0.9), 0, 1e-5)[0]
    drawn = []
    right = exponential.draw_gumbel_max
    monkeypatch.setattr(exponential, "draw_gumbel_max", lambda u, *rest: drawn.append(len(u)) or right(u, *rest))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan_events(ALGORITHMS[name], part, "torch")
    facts = ALGORITHMS[name].certify(part)
    problems = len(data.spec.class_names) if num_classes > 2 else 1
    share = 0.1 / problems / 3
    expected = exponential.compute_excess_risk(900, drawn[0], 0.9 / problems, (share, share, share))
    assert facts["num_candidates"] == drawn[0] > 40 and facts["excess_risk"] == pytest.approx(expected)
    assert ("each rule for one class" in facts["certificate"]) == (num_classes > 2)
    assert ALGORITHMS["convex"].certify(part) == ALGORITHMS["private-prediction"].certify(part) == {}


def test_the_sizes_are_the_theorems():
    sizes = {name: a.compute_size(LearnOptions(), 3) for name, a in ALGORITHMS.items()}
    assert sizes["sspp"][0] == exponential.compute_sspp_private_size(3, epsilon=1.0, alpha=0.1, beta=0.1)
    size, words = sizes["exponential"]
    assert size == pytest.approx(2 * math.log(40) / 0.1) and "40 hypotheses" in words
    assert sizes["convex"][0] == pytest.approx(2 * 3 * 3.0 / 0.1)
    sharp = ALGORITHMS["private-prediction"].compute_size(LearnOptions(constants="sharp"), 3)
    assert sharp[0] < sizes["private-prediction"][0] / 4 and "20 predictions" in sharp[1]


def test_the_page_lists_every_algorithm():
    listed = {row[0].strip("`") for row in table_of(ROOT / "docs" / "howto" / "hypotheses.md", "algorithms")[1:]}
    assert listed == set(ALGORITHMS)


def proven_epsilon(name, options, n, runs):
    """The epsilon that many runs on the two neighbors prove, and the one that is claimed, at delta = 1e-5."""
    sides, algorithm = [neighbor_problem(n, extra, options) for extra in (True, False)], ALGORITHMS[name]

    def draw_outcome(side, noise):
        hypothesis = algorithm.learn(side, noise)
        if algorithm.is_linear:
            return ([[0.0, 1.0], [1.0, 1.0]] @ hypothesis > 0).astype(int)
        return side.hypotheses.predict(hypothesis, np.array([[0.0], [1.0]])).astype(int)

    outcomes = [
        np.array([draw_outcome(side, noise) for _ in range(runs)])
        for side, noise in zip(sides, (DryRunNoise(insecure_seed=1), DryRunNoise(insecure_seed=2)), strict=True)
    ]
    claimed = accounting.compute_guarantee(plan_events(algorithm, sides[0], "torch"), 1e-5).epsilon
    return audit_outcomes(*outcomes, delta=1e-5).epsilon, claimed


@quiet
@pytest.mark.slow(reason="statistical audit: 3,000 draws of each algorithm")
@pytest.mark.parametrize("name,n", [("sspp", 8), ("exponential", 8), ("convex", 64), ("private-prediction", 64)])
def test_no_algorithm_is_proven_to_spend_more_than_it_claims(name, n):
    asked = LearnOptions(hypotheses="thresholds", points=2, alpha=0.3, ridge=0.5, constants="sharp")
    proven, claimed = proven_epsilon(name, asked, n, 1500)
    assert proven <= claimed <= 1.0
    assert name not in ("sspp", "exponential") or proven > 0.1


@quiet
@pytest.mark.slow(reason="statistical audit: 1,000 draws")
def test_an_audit_refutes_six_times_the_rate(monkeypatch):
    right = exponential.draw_gumbel_max
    monkeypatch.setattr(exponential, "draw_gumbel_max", lambda u, rate, noise: right(u, 6 * rate, noise))
    proven, claimed = proven_epsilon("sspp", LearnOptions(hypotheses="thresholds", points=2), 8, 500)
    assert proven > claimed
