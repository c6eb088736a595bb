"""The closing table: fits 80 columns, plain in a pipe, marks what is private, and never flatters."""

import html
import io
import re
from pathlib import Path

import pytest

from pate_torch.release.console import print_summary
from pate_torch.release.private_metrics import PrivateMetrics
from pate_torch.release.renderer import render_model_card, render_page
from pate_torch.release.statement import list_epsilon_lines
from tests.release.reporting_demo import baseline, demo

OWNER = PrivateMetrics(ensemble_accuracy=0.981, nonprivate_accuracy=0.993).format_rows()


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(report, stream=None, **more):
    stream = stream or io.StringIO()
    print_summary(report, stream=stream, **more)
    return stream.getvalue()


def test_everything_a_newcomer_needs_is_there():
    text = shown(demo(), owner=OWNER, paths={"report": Path("release/report.html")})
    flat = " ".join(text.replace("|", " ").split())
    for part in (
        "one record",
        "epsilon = 2.436, delta = 1e-5",
        "add or remove one record (add_remove)",
        "exact Gaussian accounting (gdp)",
        "epsilon = 4.000",
        "1.086 of it is left",
        "97.8 % (96.7 to 98.5) correct: fixmatch, on 1000 test points",
        "286 of 286 answered, by 250 teachers",
        "release/report.html",
    ):
        assert part in flat, part


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
    lines = re.sub(r"\x1b\[[0-9;]*m", "", shown(report, stream(), owner=OWNER)).splitlines()
    assert max(map(len, lines)) <= 80


def test_a_pipe_gets_plain_text():
    text = shown(demo(), owner=OWNER)
    assert text.isascii() and "\x1b" not in text


def test_what_is_the_owners_is_marked_line_by_line():
    lines = [line for line in shown(demo(), owner=OWNER).splitlines() if "98.1" in line or "99.3" in line]
    private = [line for line in lines if "Ensemble, no noise" in line or "Model without privacy" in line]
    assert len(private) == 2 and all("private, for the owner" in line for line in private)


def test_a_run_that_is_not_private_begins_with_it_and_shows_no_epsilon():
    text = shown(demo(private=False))
    assert "NOT PRIVATE" in text.splitlines()[0]
    assert "epsilon" not in text and "use again: free" not in text


def test_what_can_be_used_again_is_offered_and_nothing_else():
    kept, brought = shown(demo()), shown(demo(teachers_reusable=False))
    assert f"teachers={demo().record.teachers_id} (use again: charged)" in kept
    assert "teachers=" not in brought and f"{demo().record.teachers_id} (bring them again: charged)" in brought


def test_calculated_parameters_are_shown_to_six_digits():
    text = shown(demo(parameters={"sigma": 23.712345678901, "threshold": 200, "name": "x"}))
    assert "sigma = 23.7123, threshold = 200, name = x" in " ".join(text.replace("|", " ").split())


def test_paths_are_not_folded():
    path = Path("/" + "long/" * 40 + "report.html")
    assert str(path) in shown(demo(), paths={"report": path})


@pytest.mark.parametrize("hits,said", [(70, True), (89, True), (90, False)])
def test_a_result_below_the_majority_class_is_said_in_words_everywhere(hits, said):
    lost = demo(confusion=((0, 10), (90 - hits, hits)), class_names=("no", "<yes>"), student_accuracy=hits / 100,
                examples=())  # fmt: skip
    words = "Below the majority class: always saying <yes> would be right for 90.0 % of the test points."
    assert lost.majority_warning == (words if said else None)
    texts = shown(lost), render_model_card(lost).replace("\\", ""), render_page(lost).replace("\u00a0", " ")
    for text in texts:
        seen = re.sub(r"[|\s]+", " ", html.unescape(text))
        assert (words in seen) == said
    assert demo(confusion=()).majority_warning is None  # no public test labels
    assert demo(confusion=((0, 10), (90, 0)), class_names=(), student_accuracy=None).majority_warning is None


def test_the_budget_left_is_rounded_down():
    for cap, charged, left in ((4.0, 2.2, "1.800"), (4.0, 2.2001, "1.799"), (2.0, 2.2, "0.000")):
        assert (
            list_epsilon_lines(demo(budget_epsilon=cap, epsilon_charged=charged))[-1].note == f"{left} of it is left."
        )


def test_names_are_not_read_as_markup():
    assert "[red]x[/red]" in shown(demo(dataset="[red]x[/red]"))
