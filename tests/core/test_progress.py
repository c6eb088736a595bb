"""Progress: plain lines in a pipe, bars on a terminal, silence when quiet."""

import io

import pytest

from pate_torch.core import progress
from pate_torch.core.progress import Stages, format_duration
from tests.worlds import Terminal


def run(stream, name="Training teachers", total=50, **options):
    with Stages(stream=stream, **options) as stages:
        stage = stages(name)
        for done in range(total + 1):
            stage(done, total)
        stages.print_message("[bold]found[/bold]")
    return stream.getvalue()


def test_a_pipe_gets_a_line_each_minute(monkeypatch):
    seconds = iter(range(100, 100 + 45 * 6, 45))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(seconds))
    stream = io.StringIO()
    stage = Stages(stream=stream)("Slow")
    for done in (0, 10, 20, 30, 40):
        stage(done, 40)
    assert stream.getvalue().splitlines() == [
        "Slow ...",
        "Slow: 10/40 (25%), 1:30 so far, 4:30 left",
        "Slow: 30/40 (75%), 3:00 so far, 1:00 left",
        "Slow: 40/40 done in 3:45",
    ]


@pytest.mark.parametrize(
    ("counts", "lines"),
    [([(1, 1)] * 3, 1), ([(1, 2), (2, 2), (1, 2), (2, 2)], 2), ([(0, 0)], 0)],
    ids=["done twice", "begun again", "empty"],
)
def test_each_pass_of_a_stage_is_done_once(counts, lines):
    stream = io.StringIO()
    stage = Stages(stream=stream)("x")
    for done, total in counts:
        stage(done, total)
    assert stream.getvalue().count("done in") == lines and stream.getvalue().startswith("x ...\n")


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_quiet_says_nothing(stream):
    assert run(stream, quiet=True) == ""


def test_a_terminal_gets_a_bar_and_names_are_not_read_as_markup(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = run(Terminal(), name="[bold]x[/bold]")
    assert "[bold]x[/bold]" in text and "[bold]found[/bold]" in text and "50/50" in text and "\x1b" in text


def test_a_pipe_gets_plain_lines_whatever_colors_are_forced(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    first, last, message = run(io.StringIO(), name="Work").splitlines()
    assert first == "Work ..." and last.startswith("Work: 50/50 done in") and message == "[bold]found[/bold]"


def test_durations_are_shown_in_seconds_minutes_or_hours():
    shown = [format_duration(seconds) for seconds in (0.2, 59.4, 59.6, 83, 4000)]
    assert shown == ["0 s", "59 s", "1:00", "1:23", "1:06:40"]
