"""The method that PATEClassifier takes follows from public facts alone, and its noise costs what is asked."""

from dataclasses import replace

import pytest

from pate_torch.accounting import gdp
from pate_torch.methods import feasibility
from pate_torch.planning.autoconfig import PublicFacts, choose_method, needs_self_training

SIZES = {"num_records": 30_000, "num_public": 3000, "num_classes": 2}
ROWS = PublicFacts(epsilon=1.0, delta=1e-5, adjacency="add_remove", has_groups=False, is_image=False, **SIZES)
IMAGES, ENCODED, UNKNOWN = replace(ROWS, is_image=True), replace(ROWS, is_encoded=True), replace(ROWS, num_records=None)


@pytest.mark.parametrize(
    "facts,name,features",
    [
        (ROWS, "gradients", "fourier"),
        (IMAGES, "gradients", "contrastive"),
        (ENCODED, "gradients", None),
        (UNKNOWN, "gradients", "fourier"),
        (replace(UNKNOWN, has_groups=True), "gradients", "fourier"),
        (replace(UNKNOWN, has_own_teacher=True), "teachers", None),
    ],
    ids=["rows", "images", "encoded", "unknown", "groups", "a teacher of the user"],
)
def test_the_rule_goes_by_public_facts(facts, name, features):
    config = choose_method(facts)
    assert config.name == name and (config.features and config.features.name) == features


def test_the_rule_weighs_epsilon_and_says_why():
    assert "the number of public points" in choose_method(UNKNOWN, "teachers").reason
    noisy, clear = (choose_method(replace(ENCODED, epsilon=e)).mechanism for e in (0.05, 2.0))
    assert [needs_self_training(ENCODED, 30_000, mechanism) for mechanism in (noisy, clear)] == [True, False]
    assert not needs_self_training(ROWS, 30_000, noisy) and needs_self_training(IMAGES, 30_000, clear)
    assert choose_method(ROWS, "dpsgd").name == "dpsgd"
    hopeless = choose_method(replace(UNKNOWN, num_public=50, epsilon=0.1), "teachers")
    assert "no better than the most frequent class" in hopeless.expectation


def test_teachers_of_rows_are_ridge_regressions_unless_something_else_is_asked():
    small = choose_method(ROWS, "teachers")
    assert small.num_teachers == 2500 and small.teacher.optimizer == "ridge" and small.num_queries == 3000
    assert small.mechanism.counts and small.features == small.teacher.start.features
    assert choose_method(replace(ROWS, num_records=1_000_000), "teachers").num_teachers == 4000
    encoded = choose_method(ENCODED, "teachers")
    assert (encoded.teacher.start, encoded.features) == (None, None) and encoded.mechanism.counts
    for facts in ({"is_image": True}, {"has_groups": True}, {"has_own_teacher": True}):
        large = choose_method(replace(ROWS, **facts), "teachers")
        assert (large.num_teachers, large.teacher, large.features, large.mechanism.counts) == (300, None, None, False)
    unknown = choose_method(UNKNOWN, "teachers")  # 3,000 public points tell little of how many records there are
    assert unknown.num_teachers == 30 and unknown.teacher == small.teacher
    chosen = choose_method(ROWS, num_teachers=50)
    assert chosen.num_teachers == 50 and chosen.teacher is None


def test_questions_leave_the_lead_that_a_right_label_needs_within_a_quarter_of_the_votes():
    facts = replace(ROWS, has_own_teacher=True, num_records=300_000)
    few, many = (choose_method(replace(facts, epsilon=epsilon), "teachers") for epsilon in (0.5, 2.0))
    assert 10 < few.num_queries < many.num_queries <= 1000
    noisier = replace(few.mechanism, sigma=1.5 * few.mechanism.sigma)
    leads = [feasibility.compute_break_even_lead(mechanism, 2) for mechanism in (few.mechanism, noisier)]
    assert leads[0] <= few.num_teachers / 4 < leads[1]


@pytest.mark.parametrize("method", ["teachers", "gradients"])
@pytest.mark.parametrize("epsilon", [0.3, 5.0])
def test_the_noise_costs_what_is_asked(method, epsilon):
    config = choose_method(replace(ROWS, epsilon=epsilon), method)
    (event,), (count,) = config.mechanism.privacy_events(config.num_queries), config.class_counts.privacy_events()
    assert count.mu**2 == pytest.approx(0.05 * (count.mu**2 + event.count * event.mu**2))
    total_mu = (count.mu**2 + event.count * event.mu**2) ** 0.5
    assert gdp.compute_epsilon(total_mu, 1e-5) == pytest.approx(epsilon, rel=1e-6)


def test_no_cost_depends_on_the_number_of_records():
    """A declared number may be wrong, and a noisy one is known only after the cost was reserved."""
    for facts in (ROWS, IMAGES, ENCODED):
        assert choose_method(facts) == choose_method(replace(facts, num_records=None))
