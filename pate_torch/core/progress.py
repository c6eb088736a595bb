"""Progress of long stages: bars on a terminal, plain lines in a pipe, and nothing if ``quiet``.

with Stages() as stages:
    train(..., progress=stages("Training 250 teachers"))
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TextIO

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as LiveDisplay
from rich.text import Text

from pate_torch.core import checks

Progress = Callable[[int, int], None]
"""Callback progress(done, total), which every long function calls as often as it likes."""
Log = Callable[[str, float, int], None]
"""Callback log(tag, value, step). The function that passes the callback decides whether the values are private."""
Callback = Callable[[str, int, int], object]
"""PRIVATE. A user's callback(stage, done, total). A stage may count the private records."""
LINE_INTERVAL_SECONDS = 60.0
"""Number of seconds between two lines of a stage in a pipe."""


def do_nothing(*_: object) -> None:
    """Ignore all arguments, as a ``Progress`` or a ``Log`` that shows nothing."""


def format_duration(seconds: float) -> str:
    """Format a duration: 12.3 as '12 s', 83 as '1:23', 4000 as '1:06:40'."""
    total_seconds = int(seconds + 0.5)
    minutes, rest = divmod(total_seconds, 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes}:{rest:02d}" if minutes < 60 else f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Stages:
    """A factory of stages that share one display. A stage is a ``Progress``.

    In a pipe a stage prints a line when it begins, once per minute, and when it is done.

    Args:
        quiet: Whether to show nothing.
        stream: Stream to write to. None for standard error.
        callback: Function that is called whenever a stage reports progress, also if ``quiet``. None to call nothing.
    """

    def __init__(self, *, quiet: bool = False, stream: TextIO | None = None, callback: Callback | None = None) -> None:
        self.quiet, self.callback = checks.boolean("quiet", quiet), callback
        self.stream = sys.stderr if stream is None else stream
        self.live_display: LiveDisplay | None = None
        console = Console(file=self.stream)
        # Console.is_terminal would be True in a file, too, if FORCE_COLOR is set.
        if not quiet and self.stream.isatty() and not console.is_dumb_terminal:
            columns = (BarColumn(bar_width=24), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
            self.live_display = LiveDisplay(TextColumn("{task.description}"), *columns, console=console)

    def __enter__(self) -> Stages:
        if self.live_display is not None:
            self.live_display.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.live_display is not None:
            self.live_display.stop()

    def __call__(self, name: str) -> Progress:
        """Begin a stage and show its name."""
        show, callback = self._begin(name), self.callback
        if callback is None:
            return show

        def report(done: int, total: int) -> None:
            show(done, total)
            callback(name, done, total)

        return report

    def _begin(self, name: str) -> Progress:
        if self.quiet:
            return do_nothing
        if self.live_display is None:
            return self._begin_lines(name)
        update = functools.partial(self.live_display.update, self.live_display.add_task(escape(name), total=None))
        return lambda done, total: update(completed=done, total=total)

    def print_message(self, line: str) -> None:
        """Print one line that belongs to no stage."""
        if self.live_display is not None:
            self.live_display.console.print(Text(line))
        elif not self.quiet:
            print(line, file=self.stream, flush=True)

    def _begin_lines(self, name: str) -> Progress:
        start = last_line = time.monotonic()
        previous_done, is_finished = 0, False
        self.print_message(f"{name} ...")

        def report(done: int, total: int) -> None:
            nonlocal start, last_line, previous_done, is_finished
            now = time.monotonic()
            if done < previous_done:  # the stage begins again, as for a student that is trained in each round
                start, last_line, is_finished = now, now, False
            previous_done, elapsed = done, format_duration(now - start)
            if done == total and done > 0 and not is_finished:
                is_finished = True
                self.print_message(f"{name}: {done}/{total} done in {elapsed}")
            elif 0 < done < total and now - last_line >= LINE_INTERVAL_SECONDS:
                last_line = now
                remaining = format_duration((now - start) * (total - done) / done)
                self.print_message(f"{name}: {done}/{total} ({done / total:.0%}), {elapsed} so far, {remaining} left")

        return report


@dataclass(eq=False)
class StageTimer:
    """A timer that adds up the seconds of each stage in ``seconds``, by the name of the stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time spent in the ``with`` block to the stage."""
        start = time.monotonic()
        yield
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.monotonic() - start, 3)
