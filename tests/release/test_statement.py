"""The statement: bounds that are exact, costs that are not flattered, sentences that page and model card repeat."""

import html
import itertools
import json
import math
import re

import numpy as np
import pytest

from pate_torch.methods import gradients, reverse_knn, teacher_votes
from pate_torch.methods.base import MethodDescription
from pate_torch.privacy.records import LABEL_UNIT
from pate_torch.release import statement
from pate_torch.release.renderer import escape_markdown, render_model_card, render_page
from tests.release.reporting_demo import demo


@pytest.mark.parametrize("epsilon,delta", [(0.1, 1e-5), (1.0, 1e-3), (2.436, 1e-5), (8.0, 1e-6)])
@pytest.mark.parametrize("alarms", [1e-4, 0.01, 0.2, 0.7])
def test_attack_bound_is_reached_by_the_worst_pair_and_not_passed(epsilon, delta, alarms):
    """The pair that dominates every (epsilon, delta) mechanism, and the best test between the two (Neyman-Pearson)."""
    half = (1 - delta) / (1 + math.exp(epsilon))
    member = [delta, half * math.exp(epsilon), half, 0.0]
    power, left = 0.0, alarms
    for p, q in zip(member, member[::-1], strict=True):  # already in order of falling likelihood ratio
        used = min(q, left)
        power += p if q == 0 else p * used / q
        left -= used
    assert statement.compute_attack_bound(epsilon, delta, alarms) == pytest.approx(power, rel=1e-12)


@pytest.mark.parametrize("delta", [0.0, 1e-5, 0.1])
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 3.0, 30.0])
def test_the_advantage_bound_is_reached_by_randomized_response(epsilon, delta):
    """All 16 tests of the outcomes of the worst (epsilon, delta) mechanism: a slip that tells all, or a biased coin."""
    half = (1 - delta) / (1 + math.exp(epsilon))
    inside = np.array([delta, half * math.exp(epsilon), half, 0])
    tests = [np.array(outcomes, dtype=bool) for outcomes in itertools.product((False, True), repeat=4)]
    best = max(inside[test].sum() - inside[::-1][test].sum() for test in tests)
    assert statement.compute_advantage_bound(epsilon, delta) == pytest.approx(best, rel=1e-12)
    curve = [statement.compute_attack_bound(epsilon, delta, a) - a for a in np.linspace(0, 1, 20_001)]
    assert best - 1e-3 < max(curve) <= best + 1e-12


def test_no_epsilon_is_too_large_for_the_bound():
    assert statement.compute_advantage_bound(1e6, 1e-5) == 1.0 and statement.compute_advantage_bound(0.0, 0.25) == 0.25


def test_plain_words_quote_the_attack_bound_rounded_up():
    words = " ".join(statement.format_plain_words(demo()))
    percent = float(re.search(r"at most ([\d.]+) % of the members", words)[1])
    assert 0 <= percent / 100 - statement.compute_attack_bound(demo().claim.epsilon, 1e-5, 0.01) < 1e-3


METHODS = {
    "teachers": lambda unit: teacher_votes.describe(250, unit),
    "teachers, one trained again": lambda unit: teacher_votes.describe(250, unit, counts=True, retrains_one=True),
    "gradients": lambda unit: gradients.describe(unit, 5),
    "reverse_knn": reverse_knn.describe,
    "dpsgd": lambda unit: None,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("unit", "adjacency"), [("record", "add_remove"), ("group:user", "replace_one"), (LABEL_UNIT, "replace_one")]
)
def test_page_and_card_repeat_whole_sentences_of_every_method(method, unit, adjacency):
    """No placeholder is left open, and the page and the card say what privacy.json says."""
    description = METHODS[method](unit)
    if description is not None:
        assert MethodDescription.from_dict(json.loads(json.dumps(description.to_dict()))) == description
    numbers = {"num_teachers": 250, "rounds": 1} if "teachers" in method else {"num_teachers": 0, "rounds": 2}
    report = demo(unit=unit, adjacency=adjacency, method=description, **numbers)
    page, card = html.unescape(render_page(report)).replace("\u00a0", " "), render_model_card(report)
    claims = [*statement.format_plain_words(report), *statement.list_paragraphs("assumptions", report)]
    sentences = [*claims, *statement.list_paragraphs("not_covered", report)]
    for sentence in sentences:
        assert re.fullmatch(r"[A-Z].*[.)]", sentence) and not re.search(r" [,.:;)]|[{}]|None|  ", sentence), sentence
        assert escape_markdown(sentence) in card and sentence in page
    assert "teacher" not in " ".join(claims) or "teachers" in method
