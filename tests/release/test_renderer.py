"""The files of a release and the closing table: golden reports, strict JSON, a self-contained page, plain text."""

import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import nodes as jinja_nodes

from pate_torch.owner_metrics import PrivateMetrics
from pate_torch.release import renderer, statement
from pate_torch.release.renderer import (
    MAX_POINTS,
    Scale,
    build_statement,
    build_summary,
    escape_markdown,
    print_summary,
    render_model_card,
    render_page,
    thin_points,
    to_strict_json,
    write_release,
)
from tests.release.json_schema import faults, privacy_schema
from tests.release.reporting_demo import FORMS, baseline, confusion, demo, examples
from tests.worlds import Terminal

GOLDEN = Path(__file__).parent / "golden"
OWNER = PrivateMetrics(ensemble_accuracy=0.981, nonprivate_accuracy=0.993).format_rows()


def console(report, stream=None, **more) -> str:
    stream = stream or io.StringIO()
    print_summary(report, stream=stream, **more)
    return stream.getvalue()


@pytest.mark.parametrize("form", FORMS)
def test_reports_are_as_they_were(form, request):
    """Renew the files with --update-pins, and read the difference that git shows."""
    report = demo(**FORMS[form])
    content = {"summary": build_summary(report), "statement": build_statement(report) | {"software": {}}}
    found = {
        "json": re.sub(r"\d\.\d{11,}", lambda number: f"{float(number[0]):.10g}", to_strict_json(content)),
        "card": render_model_card(report),
        "txt": console(report, owner=OWNER, paths={"Released": Path("release")}),
    }
    for kind, text in found.items():
        file = GOLDEN / f"{form}.{kind}"
        text = text.replace(f'"version": "{renderer._PACKAGE_VERSION}"', '"version": ""')
        if request.config.getoption("update_pins"):
            file.write_text(text, encoding="utf-8")
        assert text == file.read_text(encoding="utf-8"), file.name


# ---- JSON ------------------------------------------------------------------------------------------------------------


def test_every_file_of_a_run_that_is_not_private_says_so_and_names_no_cost(tmp_path):
    write_release(tmp_path, demo(private=False, epsilon_ex_post=2.1234))
    texts = {file.name: file.read_text(encoding="utf-8") for file in tmp_path.iterdir()}
    assert set(texts) == {"summary.json", "privacy.json", "report.html", "README.md", "SHA256SUMS"}
    del texts["SHA256SUMS"]
    for name, text in texts.items():
        assert ('"private": false' if name == "summary.json" else "NOT PRIVATE") in text
        costs = ("2.4353", "2.436", "2.9138", "2.914", "2.1234", "2.124", "1.35647", "4.000")
        assert not any(cost in text for cost in costs) and not re.search(r"(ε|epsilon) *[=≤] *\d", text)


@pytest.mark.parametrize("changes", [*FORMS.values(), {"budget_epsilon": None, "epsilon_charged": None}])
def test_privacy_json_fits_its_schema(changes):
    assert faults(json.loads(to_strict_json(build_statement(demo(**changes)))), privacy_schema()) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
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
    ],
)
def test_the_schema_refuses_broken_statements(path, value):
    content = place = json.loads(to_strict_json(build_statement(demo())))
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    assert faults(content, privacy_schema())


# ---- templates -------------------------------------------------------------------------------------------------------

KNOWN = {"report": demo(), "statement": statement}
KNOWN |= {part: getattr(demo(), part) for part in ("record", "claim", "evaluation")}
TEMPLATES = statement.make_environment(autoescape=False)


@pytest.mark.parametrize("name", TEMPLATES.list_templates(extensions=["jinja"]))
def test_templates_name_nothing_that_is_not_there(name):
    """A run has been charged when they are filled in."""
    tree = TEMPLATES.parse(TEMPLATES.loader.get_source(TEMPLATES, name)[0])
    names = tree.find_all(jinja_nodes.Getattr)
    used = [(node.node.name, node.attr) for node in names if isinstance(node.node, jinja_nodes.Name)]
    assert [pair for pair in used if pair[0] in KNOWN and not hasattr(KNOWN[pair[0]], pair[1])] == []


EVIL = "<script>alert('x')</script>\"&"


def test_names_are_escaped_on_page_and_card():
    names = ("dataset", "mechanism", "student", "accountant", "creation_date", "release_id", "teachers_id")
    report = demo(
        **dict.fromkeys((*names, "ledger_head"), EVIL),
        unit=f"group:{EVIL}",
        parameters={EVIL: EVIL},
        class_names=(EVIL, *"123456789"),
        baselines=(baseline(EVIL, 0.5, None),),
        seconds={EVIL: 1.0},
    )
    page, card = render_page(report), render_model_card(report)
    assert "<script" not in page and "<script" not in card
    assert EVIL in words(next(node for node in read_nodes(page) if node.tag == "h1"))
    assert escape_markdown("a|b *c* <script>\n# d") == "a\\|b \\*c\\* &lt;script&gt; \\# d"


def test_the_tables_of_the_card_are_whole():
    text = render_model_card(demo(class_names=tuple("0|2*45<789")))
    tables = re.findall(r"\n\n(\|.*\|)\n(\|[ -|]*\|)\n((?:\|.*\|\n)+)", text)
    assert len(tables) == text.count("\n| --- |") == 8
    for head, rule, rows in tables:
        widths = {len(re.findall(r"(?<!\\)\|", line)) for line in (head, rule, *rows.splitlines())}
        assert len(widths) == 1, "every row has as many cells as the head"


# ---- the page --------------------------------------------------------------------------------------------------------


def read_nodes(text) -> list[ElementTree.Element]:
    """All elements of a page in which every tag that opens closes in order; ParseError else."""
    text = re.sub(r"<((?:meta|img|br)\b[^>]*)>", r"<\1/>", text).replace(" data-epsilon", ' data-epsilon=""')
    text = text.replace("<!doctype html>", "", 1).lstrip()
    return list(ElementTree.fromstring(text).iter())


def words(node) -> str:
    return " ".join(node.itertext())


def test_the_page_needs_nothing_else():
    text = render_page(demo())
    assert not re.search(
        r"https?:|//\w|url\(|@import|javascript:|data:\w", re.sub(r'src="data:image/png;base64,[^"]*"', "", text)
    )
    for node in read_nodes(text):
        assert node.tag not in {"script", "link", "iframe", "object", "embed", "base", "form"}
        assert not {"href", "srcset", "action", "background"} & set(node.attrib)
        assert not any(name.startswith("on") for name in node.attrib)
    assert "content=\"default-src 'none'" in text
    assert 'content="width=device-width, initial-scale=1"' in text and "prefers-color-scheme: dark" in text


COSTS = ("2.436", "2.914", "4.000", "1.357")


def test_every_epsilon_stands_with_delta_adjacency_unit_and_route():
    nodes, seen = read_nodes(render_page(demo())), set()
    parents = {child: node for node in nodes for child in node}

    def find_holder(node):
        """The nearest element that promises to carry an epsilon with its terms."""
        return node if "data-epsilon" in node.attrib or node not in parents else find_holder(parents[node])

    for node in (node for node in nodes if node.tag != "style"):
        for text in (node.text or "", *(child.tail or "" for child in node)):
            costs = [cost for cost in COSTS if cost in text]
            if costs or re.search(r"(ε|epsilon) *[=≤] *[\d.]+", text):
                seen.update(costs)
                holder = find_holder(node)
                assert "data-epsilon" in holder.attrib, f"{text!r} stands alone"
                assert all(term in words(holder) for term in ("1e-5", "add_remove", "record", "(gdp)")), text
    assert seen == set(COSTS)


def test_a_bare_report_has_no_empty_sections():
    bare = demo(
        student_accuracy=None, label_accuracy=None, confusion=(), epsilon_curve=(), examples=(),
        baselines=(), other_releases=(), class_names=(), budget_epsilon=None, epsilon_charged=None,
    )  # fmt: skip
    text = render_page(bare)
    sections = [node.attrib["id"] for node in read_nodes(text) if node.tag == "section"]
    assert sections == ["verdict", "privacy", "accuracy", "run", "others", "limits", "owner", "files"]
    assert "No accuracy is published" in text


def test_pictures_and_answers_are_on_the_page():
    text = render_page(demo(examples=(*examples(3), replace(examples(1)[0], label=-1))))
    pictures = [node for node in read_nodes(text) if node.tag == "img"]
    assert len(pictures) == 4 and all(picture.attrib["alt"] for picture in pictures)
    assert "no answer" in text and "96.7 to 98.5" in text


def test_many_classes_are_listed_by_their_commonest_confusions():
    report = demo(confusion=confusion(classes=30), class_names=tuple(f"class {c}" for c in range(30)))
    text = render_page(report)
    assert 'class="confusion"' not in text and "Most frequent confusions" in text
    assert "The 24 least accurate of 30 classes" in text
    worst = sorted(share.share.value for share in report.class_accuracies)[:24]
    assert [share.share.value for share in renderer.select_worst_classes(report)] == worst
    assert renderer.select_worst_classes(demo()) == list(demo().class_accuracies), "few are in their order"
    assert "class by class" not in render_page(demo(confusion=()))


def test_cap_and_guarantee_are_drawn_where_they_are_near():
    assert '"key c flat"' in render_page(demo()) and '"key a flat"' not in render_page(demo())
    far = render_page(demo(budget_epsilon=50.0))
    assert '"key c flat"' not in far and "The cap, 50.000, lies above" in far
    assert '"key a flat"' in render_page(demo(epsilon=2.7))


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(4, 6))
def test_ticks_are_round_inside_and_few(low, span, max_ticks):
    values = Scale(low, low + span).make_ticks(max_ticks)
    slack = 1e-6 * span + 1e-9 * abs(low)
    assert all(low - slack <= value <= low + span + slack for value in values) and 1 <= len(values) <= max_ticks + 1
    steps = np.diff(values)
    assert np.allclose(steps, steps[:1], rtol=1e-3, atol=1e-9)


def test_curves_place_their_points_linearly_between_zero_and_the_top():
    growth = tuple(0.01 * q for q in range(1, 287))
    text = render_page(demo(epsilon_curve=growth, budget_epsilon=None, epsilon=2.86))
    (line,) = (node for node in read_nodes(text) if node.tag == "polyline")
    x, y = np.array([[float(part) for part in point.split(",")] for point in line.attrib["points"].split()]).T
    assert np.allclose(x, 100 * np.arange(286) / 285, atol=1e-3)
    assert np.allclose(y, 100 * (1 - np.array(growth) / 1.06 / 2.86), atol=2e-3)
    thinned = thin_points([i / 10 for i in range(10_000)], MAX_POINTS)
    assert len(thinned) <= MAX_POINTS and thinned[0] == (1, 0.0) and thinned[-1] == (10_000, 999.9)


def test_dots_place_shares_on_their_scale():
    baselines = (baseline("a", 0.9, None), baseline("b", 0.5, None))
    text = render_page(demo(student_accuracy=None, label_accuracy=None, confusion=(), baselines=baselines))
    places = [float(node.attrib["cx"].rstrip("%")) for node in read_nodes(text) if node.tag == "circle"]
    assert places == pytest.approx([100 * (0.9 - 0.4) / 0.6, 100 * (0.5 - 0.4) / 0.6], abs=1e-3)


# ---- the terminal ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [io.StringIO, Terminal])
@pytest.mark.parametrize("private", [True, False])
def test_the_table_fits_80_columns(stream, private, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("TERM", "xterm")
    report = demo(
        private=private,
        dataset="a data set with a name that goes on for much longer than a line of any terminal should have to bear",
        student="x" * 120,
        parameters={f"parameter_{i}": i for i in range(12)},
        baselines=(baseline("y" * 90, 0.5, None),),
        unit="group:" + "z" * 70,
    )
    lines = re.sub(r"\x1b\[[0-9;]*m", "", console(report, stream(), owner=OWNER)).splitlines()
    assert max(map(len, lines)) <= 80


def test_a_pipe_gets_plain_text_and_whole_paths():
    path = Path("/" + "long/" * 40 + "report.html")
    text = console(demo(dataset="[red]x[/red]"), owner=OWNER, paths={"report": path})
    assert text.isascii() and "\x1b" not in text and str(path) in text and "[red]x[/red]" in text


def test_teachers_are_offered_only_if_they_can_be_queried_again():
    assert "teachers=" in console(demo()) and "teachers=" not in console(demo(teachers_reusable=False))


def test_a_warning_about_the_majority_class_is_everywhere():
    report = demo(confusion=((0, 10), (20, 70)), class_names=("no", "<yes>"), student_accuracy=0.7, examples=())
    for text in (console(report), render_model_card(report).replace("\\", ""), render_page(report)):
        assert report.majority_warning in re.sub(r"[|\s]+", " ", html.unescape(text).replace("\u00a0", " "))
