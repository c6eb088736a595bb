"""Progress: plain lines in a pipe, bars on a terminal, silence when quiet."""

import io
from types import SimpleNamespace

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


@pytest.fixture
def clock(monkeypatch):
    """The time, which passes where a test says so."""
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock.now)
    return clock


def report(clock, reports, stream):
    """The lines of a stage with these reports: seconds since the start, done and total."""
    stages = Stages(stream=stream)
    stage = stages("Slow")
    for seconds, done, total in reports:
        clock.now = 100.0 + seconds
        stage(done, total)
    return stages, stream.getvalue().splitlines()


@pytest.mark.parametrize(
    ("reports", "lines"),
    [
        (
            [(45, 0, 40), (90, 10, 40), (135, 20, 40), (180, 30, 40), (225, 40, 40)],
            ["10/40 (25%), 1:30 so far, 4:30 left", "30/40 (75%), 3:00 so far, 1:00 left", "40/40 done in 3:45"],
        ),
        (  # the first of a hundred teachers is done, and the next ones within the minute
            [(4, 1, 100), (8, 2, 100), (63, 16, 100), (64, 16, 100)],
            ["1/100 (1%), 4 s so far, 6:36 left", "16/100 (16%), 1:04 so far, 5:36 left"],
        ),
        ([(0, 32, 100), (20, 36, 100)], ["36/100 (36%), 20 s so far, 5:20 left"]),  # an earlier run trained 32
        ([(0, 0, 9), (1, 3, 9), (2.9, 8, 9), (3.1, 9, 9)], ["9/9 done in 3 s"]),  # too short for an estimate
        ([(1, 1, 1), (1, 1, 1), (2, 1, 1)], ["1/1 done in 1 s"]),
        ([(0, 0, 0)], []),
        (
            [(10, 5, 10), (20, 10, 10), (30, 1, 10), (32, 2, 10), (36, 4, 10), (48, 10, 10)],  # it begins again
            ["5/10 (50%), 10 s so far, 10 s left", "10/10 done in 20 s", "4/10 (40%), 6 s so far, 12 s left",
             "10/10 done in 18 s"],
        ),
    ],
    ids=["each minute", "first part", "resumed", "short", "done twice", "empty", "begun again"],
)  # fmt: skip
def test_a_pipe_gets_an_estimate_once_a_part_is_done_and_then_each_minute(clock, reports, lines):
    _, shown = report(clock, reports, io.StringIO())
    assert shown == ["Slow ...", *(f"Slow: {line}" for line in lines)]


def test_a_terminal_gets_an_estimate_once_a_part_is_done(clock, monkeypatch):
    """Also where a part takes longer than the half minute over which rich measures the speed."""
    monkeypatch.setenv("TERM", "xterm")
    stages, _ = report(clock, [(40, 1, 10)], Terminal())
    column, task = stages.live_display.columns[-1], stages.live_display.tasks[0]
    assert column.render(task).plain == "6:00 left"
    clock.now += 30
    assert column.render(task).plain == "5:30 left"
    clock.now += 1000
    assert column.render(task).plain == "0 s left"
    assert column.render(report(clock, [(40, 0, 10)], Terminal())[0].live_display.tasks[0]).plain == ""


def test_a_terminal_gets_a_bar_a_pipe_plain_lines_and_quiet_says_nothing(monkeypatch):
    assert run(io.StringIO(), quiet=True) == run(Terminal(), quiet=True) == ""
    monkeypatch.setenv("TERM", "xterm")
    text = run(Terminal(), name="[bold]x[/bold]")  # no markup
    assert "[bold]x[/bold]" in text and "[bold]found[/bold]" in text and "50/50" in text and "\x1b" in text
    monkeypatch.setenv("FORCE_COLOR", "1")
    first, last, message = run(io.StringIO(), name="Work").splitlines()
    assert first == "Work ..." and last.startswith("Work: 50/50 done in") and message == "[bold]found[/bold]"


def test_durations_are_shown_in_seconds_minutes_or_hours():
    shown = [format_duration(seconds) for seconds in (0.2, 59.4, 59.6, 83, 4000)]
    assert shown == ["0 s", "59 s", "1:00", "1:23", "1:06:40"]
