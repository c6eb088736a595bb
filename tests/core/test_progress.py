"""Progress: plain lines in a pipe, bars on a terminal, silence when quiet."""

import io
import subprocess
import sys

import pytest

from pate_torch.core import progress
from pate_torch.core.progress import Stages, format_duration


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Clock:
    """Seconds that pass when told to."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "monotonic", lambda: self.now)


def run(stream, total=50, **options):
    with Stages(stream=stream, **options) as stages:
        stage = stages("Training teachers")
        for done in range(total + 1):
            stage(done, total)
    return stream.getvalue()


def test_a_pipe_gets_a_line_per_tenth(monkeypatch):
    time = Clock(monkeypatch)
    stream = io.StringIO()
    stage = Stages(stream=stream)("Training teachers")
    for done in range(1001):
        time.now += 0.1
        stage(done, 1000)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "Training teachers ..."
    assert [line.split()[2] for line in lines[1:-1]] == [f"{tenth}00/1000" for tenth in range(1, 10)]
    assert lines[-1] == "Training teachers: 1000/1000 done in 1:40"


def test_a_short_stage_gets_its_first_and_last_line_alone():
    lines = run(io.StringIO(), total=1000).splitlines()
    assert len(lines) == 2 and lines[1].startswith("Training teachers: 1000/1000 done in")
    assert not any("\x1b" in line or "\r" in line for line in lines)


def test_a_done_stage_is_not_told_twice():
    stream = io.StringIO()
    stage = Stages(stream=stream)("x")
    for _ in range(3):
        stage(1, 1)
    assert stream.getvalue().count("done in") == 1


def test_a_stage_may_begin_again():
    stream = io.StringIO()
    stage = Stages(stream=stream)("x")
    for done in (1, 2, 1, 2):
        stage(done, 2)
    assert stream.getvalue().count("x: 2/2 done in") == 2


def test_a_slow_tenth_is_heard_of_in_between(monkeypatch):
    time = Clock(monkeypatch)
    stream = io.StringIO()
    stage = Stages(stream=stream, line_interval_seconds=60)("Slow")
    for done in range(1, 6):
        time.now += 45
        stage(done, 1000)
    assert stream.getvalue().splitlines()[1:] == [
        "Slow: 2/1000 (0%), 1:30 so far, about 12:28:30 left",
        "Slow: 4/1000 (0%), 3:00 so far, about 12:27:00 left",
    ]


def test_the_time_left_is_in_proportion(monkeypatch):
    time = Clock(monkeypatch)
    stream = io.StringIO()
    stage = Stages(stream=stream)("Half")
    time.now += 30
    stage(25, 100)
    assert stream.getvalue().splitlines()[-1] == "Half: 25/100 (25%), 30 s so far, about 1:30 left"


def test_quiet_says_nothing():
    assert run(io.StringIO(), quiet=True) == "" and run(Terminal(), quiet=True) == ""


def test_a_terminal_gets_a_bar_with_the_time_left(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    text = run(Terminal())
    assert "Training teachers" in text and "50/50" in text and "\x1b" in text


def test_names_are_not_read_as_markup(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Stages(stream=stream) as stages:
        stages("[bold]x[/bold]")(1, 1)
    assert "[bold]x[/bold]" in stream.getvalue()


def test_colors_forced_by_the_environment_draw_no_bar_into_a_file(monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b" not in run(io.StringIO())


def test_an_empty_stage_is_done():
    stream = io.StringIO()
    Stages(stream=stream)("Nothing")(0, 0)
    assert stream.getvalue() == "Nothing ...\n"


@pytest.mark.parametrize("done,total", [(2, 1), (-1, 1), (0.5, 1), (0, -1)])
def test_impossible_counts_are_refused(done, total):
    with pytest.raises(ValueError):
        Stages(stream=io.StringIO())("x")(done, total)


def test_a_real_pipe_gets_plain_lines():
    code = "from pate_torch.core.progress import Stages\nwith Stages() as s:\n p = s('Work')\n "
    code += "[p(i, 20) for i in range(21)]"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "" and done.stderr.startswith("Work ...\n") and "\x1b" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("Work: 20/20 done in")


@pytest.mark.parametrize(
    "seconds,shown", [(0.2, "0 s"), (59.4, "59 s"), (59.6, "1:00"), (83, "1:23"), (4000, "1:06:40")]
)
def test_clock(seconds, shown):
    assert format_duration(seconds) == shown
