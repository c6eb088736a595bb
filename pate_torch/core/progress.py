"""Progress of long stages: bars on a terminal, plain lines in a pipe, and nothing if ``quiet``.

with Stages() as stages:
    train(..., progress=stages("Training 250 teachers"))
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TextIO

from pate_torch.core import checks

if TYPE_CHECKING:
    from rich.progress import Progress as LiveDisplay
    from rich.progress import Task

Progress = Callable[[int, int], None]
"""Callback progress(done, total), which every long function calls as often as it likes."""
Log = Callable[[str, float, int], None]
"""Callback log(tag, value, step). The function that passes the callback decides whether the values are private."""
Callback = Callable[[str, int, int], object]
"""PRIVATE. A user's callback(stage, done, total). A stage may count the private records."""
FIRST_LINE_SECONDS, LINE_INTERVAL_SECONDS = 3.0, 60.0  # time before the first estimate in a pipe, and between two
RESUME_SECONDS = 1.0  # time within which the first report of a stage counts as work of an earlier run


def do_nothing(*_: object) -> None:
    """Ignore all arguments, as a ``Progress`` or a ``Log`` that shows nothing."""


def check_callback(callback: Any) -> Callback | None:
    """Check for a function or None, before a charge: the callback is called after it, too."""
    if callback is not None and not callable(callback):
        raise checks.error("callback", callback, "must be a function callback(stage, done, total), or None")
    return callback


def format_duration(seconds: float) -> str:
    """Format a duration: 12.3 as '12 s', 83 as '1:23', 4000 as '1:06:40'."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


def _make_live_display(stream: TextIO) -> LiveDisplay | None:
    """Make the progress bars of a terminal. Return None if the terminal cannot redraw a line."""
    from rich import progress  # imported here, because only a terminal needs it
    from rich.console import Console
    from rich.text import Text

    class RemainingTimeColumn(progress.ProgressColumn):
        """Column of the remaining time at the mean speed so far. Rich's column needs two reports in half a minute."""

        def render(self, task: Task) -> Text:
            end = task.fields["end"]
            return Text("" if end is None else f"{format_duration(max(0.0, end - time.monotonic()))} left")

    console, name = Console(file=stream), progress.TextColumn("{task.description}", markup=False)
    columns = (progress.BarColumn(bar_width=24), progress.MofNCompleteColumn(), progress.TimeElapsedColumn())
    bars = progress.Progress(name, *columns, RemainingTimeColumn(), console=console)
    return None if console.is_dumb_terminal else bars


class Stages:
    """A factory of stages that share one display. A stage is a ``Progress``.

    In a pipe a stage prints a line when it begins, an estimate of the remaining time as soon as a part is done and then
    once per minute, and a line when it is done. Stages of a few seconds print no estimate.

    Args:
        quiet: Whether to show nothing.
        stream: Stream to write to. None for standard error.
        callback: Function that is called whenever a stage reports progress, also if ``quiet``. None to call nothing.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, callback: Callback | None = None) -> None:
        self.quiet, self.callback = checks.boolean("quiet", quiet), check_callback(callback)
        self.stream = sys.stderr if stream is None else stream
        # Rich's Console.is_terminal would be True in a file, too, if FORCE_COLOR is set.
        self.live_display = None if quiet or not self.stream.isatty() else _make_live_display(self.stream)

    def __enter__(self) -> Stages:
        if self.live_display is not None:
            self.live_display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live_display is not None:
            self.live_display.stop()

    def __call__(self, name: str) -> Progress:
        """Begin a stage and show its name."""
        task = None if self.live_display is None else self.live_display.add_task(name, total=None, end=None)
        if self.live_display is None:
            self.print_message(f"{name} ...")
        start, next_line, first_done, previous_done, is_finished = time.monotonic(), FIRST_LINE_SECONDS, 0, -1, False

        def report(done: int, total: int) -> None:
            nonlocal start, next_line, first_done, previous_done, is_finished
            now = time.monotonic()
            # Work that is reported at once was done by an earlier run. A stage begins again for each round's student.
            if done < previous_done or (previous_done < 0 and now - start < RESUME_SECONDS):
                start, next_line, first_done, is_finished = now, FIRST_LINE_SECONDS, done, False
            previous_done, elapsed = done, now - start
            left = elapsed * (total - done) / (done - first_done) if done > first_done else None
            if self.live_display is not None and task is not None:
                self.live_display.update(task, completed=done, total=total, end=None if left is None else now + left)
            elif done == total and done > 0 and not is_finished:
                is_finished = True
                self.print_message(f"{name}: {done}/{total} done in {format_duration(elapsed)}")
            elif done < total and left is not None and elapsed >= next_line:
                next_line = elapsed + LINE_INTERVAL_SECONDS
                times = f"{format_duration(elapsed)} so far, {format_duration(left)} left"
                self.print_message(f"{name}: {done}/{total} ({done / total:.0%}), {times}")
            if self.callback is not None:
                self.callback(name, done, total)

        return report

    def print_message(self, line: str) -> None:
        """Print one line that belongs to no stage."""
        if self.live_display is not None:
            self.live_display.console.print(line, markup=False, emoji=False, highlight=False)
        elif not self.quiet:
            print(line, file=self.stream, flush=True)


@dataclass(eq=False)
class StageTimer:
    """A timer of ``with`` blocks that adds up ``seconds`` by the name of the stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        start = time.monotonic()
        yield
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.monotonic() - start, 3)
