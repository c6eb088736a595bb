"""The statement: rounding that never flatters, bounds that are exact, words that name every term."""

import json
import math
import re

import numpy as np
import pytest
from scipy.stats import binomtest

from pate_torch.accounting.formatting import format_delta, format_epsilon, format_noise_scale
from pate_torch.release import statement
from pate_torch.release.console import print_summary
from pate_torch.release.intervals import compute_wilson_interval
from pate_torch.release.renderer import build_statement, render_model_card, render_page
from pate_torch.release.report import ChargedRelease
from pate_torch.release.statement import compute_attack_bound
from tests.release.reporting_demo import demo


@pytest.mark.parametrize(
    "epsilon,shown",
    [
        (2.4353597494239, "2.436"),
        (2.0, "2.000"),
        (2.2, "2.200"),
        (0.0, "0.000"),
        (0.1000001, "0.101"),
        (0.012341, "0.0124"),
        (3e-7, "3.00E-7"),
    ],
)
def test_epsilon_is_shown_rounded_up(epsilon, shown):
    assert format_epsilon(epsilon) == shown


def test_the_two_bounds_on_attacks_go_by_their_names():
    words = statement.format_plain_words(demo())[1]
    assert "its power at 1 % false alarms" in words and "advantage" in words


def test_epsilons_beyond_all_use_are_shown_too():
    assert format_epsilon(math.inf) == "infinite"
    assert format_epsilon(2.0**100) == "1267650600228229400000000000000.000"


def test_a_shown_epsilon_is_never_below_the_true_one():
    for epsilon in np.random.default_rng(0).lognormal(0, 4, 2000):
        shown = float(format_epsilon(epsilon))
        assert epsilon <= shown <= epsilon + max(0.001, 0.011 * epsilon)


def test_delta_keeps_its_digits():
    assert format_delta(1e-5) == "1e-5"
    assert format_delta(2.559e-05) == "2.559e-5"
    assert format_delta(0.125) == "1.25e-1"


@pytest.mark.parametrize("epsilon,delta", [(0.1, 1e-5), (1.0, 1e-3), (2.436, 1e-5), (8.0, 1e-6)])
@pytest.mark.parametrize("alarms", [1e-4, 0.01, 0.2, 0.7])
def test_attack_bound_is_reached_by_the_worst_pair_and_not_passed(epsilon, delta, alarms):
    """The pair that dominates every (epsilon, delta) mechanism, and the best test between the two (Neyman-Pearson)."""
    half = (1 - delta) / (1 + math.exp(epsilon))
    member = [delta, half * math.exp(epsilon), half, 0.0]
    other = member[::-1]
    found, left = 0.0, alarms
    for p, q in zip(member, other, strict=True):  # already in order of falling likelihood ratio
        used = min(q, left)
        found += p if q == 0 else p * used / q
        left -= used
    assert compute_attack_bound(epsilon, delta, alarms) == pytest.approx(found, rel=1e-12)


@pytest.mark.parametrize("hits,size", [(0, 10), (10, 10), (951, 1000), (3, 7)])
def test_wilson_interval_agrees_with_scipy(hits, size):
    other = binomtest(hits, size).proportion_ci(0.95, method="wilson")
    assert compute_wilson_interval(hits / size, size) == pytest.approx((other.low, other.high), abs=1e-12)


def test_the_headline_names_every_term():
    line = statement.format_headline(demo(adjacency="replace_one", unit="group:user", accountant="rdp"))
    for term in ("2.436", "delta = 1e-5", "replace_one", "all records of one user", "group:user", "(rdp)"):
        assert term in line


def test_plain_words_quote_the_attack_bound_rounded_up():
    words = " ".join(statement.format_plain_words(demo()))
    percent = float(re.search(r"at most ([\d.]+) % of those that did", words)[1])
    assert 0 <= percent / 100 - compute_attack_bound(demo().claim.epsilon, 1e-5, 0.01) < 1e-3


def test_symbols_state_the_inequality():
    assert "Pr[M(D) ∈ S] ≤ exp(ε) · Pr[M(D′) ∈ S] + δ" in statement.format_inequality(demo())


def test_discrete_and_continuous_noise_are_told_apart():
    assert any("floating point" in row for row in statement.list_assumptions(demo()))
    assert not any("floating point" in row for row in statement.list_assumptions(demo(noise="discrete")))


def test_a_declared_size_is_an_assumption():
    assert any("60000" in row for row in statement.list_assumptions(demo(declared_size=60000)))


def test_without_teachers_the_statement_does_not_speak_of_them():
    report = demo(
        num_teachers=0,
        method=None,
        mechanism="dpsgd",
        queries_asked=0,
        queries_answered=0,
        epsilon_curve=(),
    )
    text = " ".join(statement.format_plain_words(report) + statement.list_assumptions(report))
    assert "teacher" not in text and "dpsgd" in text


def test_composition_tells_guarantee_total_and_cap_apart():
    names = [price.name for price in statement.list_epsilon_lines(demo(epsilon_ex_post=2.1))]
    assert names == ["This release alone", "Spent (ex post)", "All releases together", "Cap"]
    total = statement.list_epsilon_lines(demo(charged_accountant="rdp"))[1]
    assert "(rdp)" in total.route
    assert "added nothing" in statement.list_epsilon_lines(demo(reuses_labels=True))[1].note


@pytest.mark.parametrize(
    "changes",
    [
        {"epsilon": math.nan},
        {"epsilon": math.inf},
        {"epsilon": -1.0},
        {"epsilon": None},
        {"delta": 0.0},
        {"adjacency": "swap"},
        {"unit": "group:"},
        {"noise": "none"},
        {"private": 1},
        {"queries_answered": 287},
    ],
)
def test_impossible_facts_are_refused(changes):
    with pytest.raises(ValueError, match=next(iter(changes))):
        demo(**changes)


def test_another_releases_epsilon_needs_its_route():
    with pytest.raises(ValueError, match="accountant"):
        ChargedRelease(release_id="a", purpose="b", epsilon=1.0)


def test_noise_is_shown_so_that_typing_it_costs_no_more():
    for sigma, shown in ((37.3094, "37.31"), (37.3101, "37.32"), (20.0, "20"), (8.3, "8.3"), (123456.0, "123500"),
                         (0.0123401, "0.01235")):  # fmt: skip
        assert format_noise_scale(sigma) == shown and float(shown) >= sigma


def test_a_release_that_costs_only_delta_says_so_everywhere(capsys):
    report = demo(epsilon=0.0, accountant="delta", epsilon_curve=())
    print_summary(report)
    files = (
        render_page(report),
        render_model_card(report),
        json.dumps(build_statement(report), ensure_ascii=False),
        capsys.readouterr().out,
    )
    for text in files:
        words = " ".join(text.replace("|", " ").replace("\\", "").split())
        assert "only delta is paid" in words and "nothing was released" not in words
    for text in files[:3]:
        assert "delta alone, and not epsilon" in " ".join(text.split())
