"""Released reports: nothing private enters by type, files are strict, and a run that is not private claims nothing."""

import html
import json
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from jinja2 import nodes

from pate_torch.methods import gradients, reverse_knn, teacher_votes
from pate_torch.methods.description import MethodDescription
from pate_torch.privacy.records import LABEL_UNIT, PrivateRecords
from pate_torch.privacy.sensitive import Votes
from pate_torch.release import figures, statement
from pate_torch.release.renderer import (
    build_statement,
    build_summary,
    escape_markdown,
    render_model_card,
    render_page,
    to_strict_json,
    write_release,
)
from pate_torch.release.report import Example
from tests.release.json_schema import faults, privacy_schema
from tests.release.reporting_demo import EPSILON, demo

FIXED_KEYS = [
    "schema_version",
    "dataset",
    "mechanism",
    "student",
    "num_teachers",
    "queries_asked",
    "queries_answered",
    "epsilon",
    "epsilon_ex_post",
    "delta",
    "accountant",
    "adjacency",
    "unit",
    "epsilon_charged",
    "epsilon_charged_ex_post",
    "budget_epsilon",
    "student_accuracy",
    "label_accuracy",
    "private",
    "teachers_id",
    "release_id",
    "ledger_head",
    "seconds",
]


def test_summary_has_the_fixed_keys_unrounded(tmp_path):
    write_release(tmp_path, demo())
    read = json.loads((tmp_path / "summary.json").read_text(), parse_constant=pytest.fail)
    assert list(read) == FIXED_KEYS
    assert read["epsilon"] == EPSILON and read["private"] is True and read["schema_version"] == 1


def test_summary_of_a_run_that_is_not_private_claims_no_epsilon():
    read = build_summary(demo(private=False, epsilon_ex_post=2.0))
    assert list(read) == FIXED_KEYS
    assert read["private"] is False
    assert read["epsilon"] is read["epsilon_ex_post"] is read["epsilon_charged"] is None


VOTES = Votes(torch.tensor([[3, 1], [0, 4]]), 4)
DATA = PrivateRecords.from_rows(torch.zeros(2, 3), torch.zeros(2, dtype=torch.int64), np.array(["a", "b"]))


@pytest.mark.parametrize("thing", [VOTES, DATA, torch.ones(2), np.ones(2), np.float32(1), Fraction(1, 2), {1, 2}, b"x"])
@pytest.mark.parametrize(
    "place",
    [
        lambda x: {"parameters": {"sigma": x}},
        lambda x: {"baselines": (x,)},
        lambda x: {"confusion": ((x,),)},
        lambda x: {"epsilon_curve": (x,)},
        lambda x: {"examples": (x,)},
        lambda x: {"teachers_id": x},
    ],
)
def test_nothing_but_plain_values_enters(thing, place):
    with pytest.raises((TypeError, ValueError)):
        demo(**place(thing))


def test_the_refusal_of_votes_names_field_and_type():
    with pytest.raises(TypeError, match=r"parameters.sigma: Votes may not enter"):
        demo(parameters={"sigma": VOTES})


@pytest.mark.parametrize(
    "changes",
    [
        {"student_accuracy": math.nan},
        {"label_accuracy": 1.2},
        {"parameters": {"sigma": math.inf}},
        {"seconds": {"teachers": math.nan}},
        {"epsilon_charged": math.nan},
        {"epsilon_curve": (1.0, math.nan)},
    ],
)
def test_nan_and_infinity_are_refused(changes):
    with pytest.raises(ValueError):
        demo(**changes)


def test_strict_json_refuses_nan():
    with pytest.raises(ValueError):
        to_strict_json({"x": math.nan})


def test_curves_must_fit_and_never_fall():
    with pytest.raises(ValueError, match="one value per question"):
        demo(epsilon_curve=(1.0, 2.0))
    with pytest.raises(ValueError, match="never falls"):
        demo(queries_asked=2, queries_answered=2, epsilon_curve=(2.0, 1.0))


def test_a_report_cannot_be_changed():
    report = demo()
    with pytest.raises(AttributeError):
        report.claim.epsilon = 1.0
    with pytest.raises(AttributeError):
        report.claim = None
    with pytest.raises(TypeError):
        report.record.parameters["sigma"] = 1.0


def test_examples_are_pictures_that_the_page_carries_itself():
    with pytest.raises(ValueError, match=r"example\.picture"):
        Example(picture="https://example.org/1.png", label=1, query=1)


def test_class_accuracies_are_the_diagonal_over_the_rows():
    report = demo(confusion=((8, 2), (0, 0)), class_names=("a", "b"))
    first, second = report.class_accuracies
    assert first.name == "a" and first.share.value == 0.8 and first.share.size == 10 and second is None


def test_every_file_of_a_run_that_is_not_private_says_so_and_names_no_price(tmp_path):
    write_release(tmp_path, demo(private=False, epsilon_ex_post=2.1234))
    texts = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert set(texts) == {"summary.json", "privacy.json", "report.html", "README.md", "SHA256SUMS"}
    del texts["SHA256SUMS"]
    for name, text in texts.items():
        assert ('"private": false' if name == "summary.json" else "NOT PRIVATE") in text
        assert not any(price in text for price in ("2.4353", "2.436", "2.9138", "2.914", "2.1234", "2.124"))


def test_a_report_that_is_not_private_holds_no_epsilon():
    report = demo(private=False, epsilon_ex_post=2.1, parts=demo().claim.other_releases)
    assert (
        report.claim.epsilon
        is report.claim.epsilon_ex_post
        is report.claim.epsilon_charged
        is report.claim.epsilon_charged_ex_post
        is None
    )
    assert report.claim.epsilon_curve == ()
    assert all(part.epsilon is None for part in (*report.claim.parts, *report.claim.other_releases))


# --- privacy.json against its schema


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"private": False},
        {"epsilon_ex_post": 2.1, "unit": "group:user", "adjacency": "replace_one"},
        {"budget_epsilon": None, "epsilon_charged": None, "other_releases": ()},
    ],
)
def test_privacy_json_fits_its_schema(changes, tmp_path):
    write_release(tmp_path, demo(**changes))
    read = json.loads((tmp_path / "privacy.json").read_text(), parse_constant=pytest.fail)
    assert faults(read, privacy_schema()) == []


def _broken():
    for path, value in [
        (("guarantee", "epsilon"), "2.4"),
        (("guarantee", "epsilon"), -1),
        (("guarantee", "delta"), 0),
        (("guarantee", "adjacency"), "swap"),
        (("guarantee", "unit"), "person"),
        (("guarantee", "route"), ""),
        (("private",), "yes"),
        (("assumptions",), []),
        (("surprise",), 1),
        (("other_releases", 0, "epsilon"), True),
        (("mechanism", "num_teachers"), 2.5),
    ]:
        broken = json.loads(json.dumps(build_statement(demo())))
        place = broken
        for step in path[:-1]:
            place = place[step]
        place[path[-1]] = value
        yield broken


def test_the_schema_refuses_broken_statements():
    assert faults(build_statement(demo()), privacy_schema()) == []
    for broken in _broken():
        assert faults(broken, privacy_schema())


def test_privacy_json_of_a_run_that_is_not_private_holds_no_price():
    text = json.dumps(build_statement(demo(private=False)))
    assert "NOT PRIVATE" in text and "2.4353" not in text and "2.436" not in text and "1.35647" not in text


# --- the templates

KNOWN = {"report": demo(), "statement": statement, "figures": figures}
KNOWN |= {part: getattr(demo(), part) for part in ("record", "claim", "evaluation")}
WITH_FACTS = {"statement.jinja", "sections.jinja", "report.html.jinja", "model_card.md.jinja", "charts.html.jinja"}
TEMPLATES = statement.make_environment(autoescape=False)


@pytest.mark.parametrize("name", TEMPLATES.list_templates(extensions=["jinja"]))
def test_templates_name_nothing_that_is_not_there(name):
    """A run has been charged when they are filled in."""
    tree = TEMPLATES.parse(TEMPLATES.loader.get_source(TEMPLATES, name)[0])
    used = [(node.node.name, node.attr) for node in tree.find_all(nodes.Getattr) if isinstance(node.node, nodes.Name)]
    used = [(thing, attribute) for thing, attribute in used if thing in KNOWN]
    assert bool(used) == (name in WITH_FACTS)
    assert [name for name in used if not hasattr(KNOWN[name[0]], name[1])] == []


VOTERS = {
    "teachers": lambda unit: teacher_votes.describe(250, unit),
    "teachers who were tried": lambda unit: teacher_votes.describe(250, unit, counts=True, retrains_one=True),
    "gradients": lambda unit: gradients.describe(unit, 5),
    "reverse_knn": reverse_knn.describe,
    "nobody": lambda unit: None,
}


@pytest.mark.parametrize("who", VOTERS)
@pytest.mark.parametrize("unit", ["record", "group:user", LABEL_UNIT])
@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_every_kind_of_release_is_told_in_whole_sentences_on_page_and_card(who, unit, adjacency):
    voters = VOTERS[who](unit)
    assert voters is None or MethodDescription.from_dict(json.loads(json.dumps(voters.to_dict()))) == voters
    number = {"num_teachers": 250, "rounds": 1} if who.startswith("teachers") else {"num_teachers": 0, "rounds": 2}
    report = demo(unit=unit, adjacency=adjacency, method=voters, **number)
    shown = html.unescape(render_page(report)).replace("\u00a0", " ")
    for tell in (statement.format_plain_words, statement.list_assumptions, statement.list_exclusions):
        for sentence in tell(report):
            assert re.fullmatch(r"[A-Z].*[.)]", sentence) and not re.search(r" [,.:;)]|[{}]|None|  ", sentence), (
                sentence
            )
            assert escape_markdown(sentence) in render_model_card(report) and sentence in shown


# --- the model card


def test_the_card_states_privacy_accuracy_and_files():
    text = render_model_card(demo())
    for part in ("epsilon = 2.436", "delta = 1e-5", "add\\_remove", "unit: record", "(gdp)", "97.8 %", "labels.csv"):
        assert part in text
    tables = re.findall(r"\n\n(\|.*\|)\n(\|[ -|]*\|)\n((?:\|.*\|\n)+)", text)
    assert len(tables) == text.count("\n| --- |") == 6
    for head, rule, rows in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *rows.splitlines())}
        assert len(widths) == 1, "every row has as many cells as the head"


@pytest.mark.parametrize(
    "takes,words,command",
    [
        ("rows", "an array [N, features]", None),
        ("table", "a DataFrame with the columns of the data", "pate predict . new.csv > predictions.csv"),
        ("images", "uint8 images [N, channels, height, width]", "pate predict . images/ > predictions.csv"),
    ],
)
def test_the_card_says_how_to_use_the_student(takes, words, command):
    text = render_model_card(demo(input_kind=takes))
    assert f'student = load_student(".")\nstudent.predict_names(new), student.predict_proba(new)  # {words}\n' in text
    assert (command or "pate predict") in text if command else "pate predict" not in text


def test_the_card_of_a_run_that_is_not_private_says_so_and_shows_no_epsilon():
    text = render_model_card(demo(private=False))
    assert text.count("NOT PRIVATE") >= 3
    assert "2.436" not in text and "may be published;" not in text


def test_names_cannot_change_the_card():
    assert escape_markdown("a|b *c* <script>\n# d") == "a\\|b \\*c\\* &lt;script&gt; \\# d"
    text = render_model_card(demo(dataset="<script>x</script>", class_names=tuple("0|2*45<789")))
    assert "<script>" not in text
