"""Progress of every long stage: bars with the time left on a terminal, plain lines in a pipe, nothing when quiet.

    with Stages() as stages:
        train(..., progress=stages("Training 250 teachers"))

A stage is a ``Progress``: it is called as stage(done, total), as often as its caller likes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import TextIO

from rich import progress as rich_progress
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from pate_torch.core import checks

Progress = Callable[[int, int], None]
"""Called as progress(done, total) by everything that takes long."""

Log = Callable[[str, float, int], None]
"""Called as log(tag, value, step); what is private is decided by who passes it."""


def do_nothing(*_: object) -> None:
    """A Progress and a Log that shows nothing."""


SHORT_STAGE_SECONDS = 2.0  # seconds in which a stage needs no line but its last


def format_duration(seconds: float) -> str:
    """12.3 -> '12 s', 83 -> '1:23', 4000 -> '1:06:40'."""
    total_seconds = int(seconds + 0.5)
    hours, remaining_seconds = divmod(total_seconds, 3600)
    if hours:
        return f"{hours}:{remaining_seconds // 60:02d}:{remaining_seconds % 60:02d}"
    return (
        f"{remaining_seconds // 60}:{remaining_seconds % 60:02d}"
        if remaining_seconds >= 60
        else f"{remaining_seconds} s"
    )


class _Stage:
    """One stage, which knows when it began."""

    def __init__(self, stages: Stages, name: str) -> None:
        self.stages, self.name = stages, name
        self.start_time, self.done, self.total = time.monotonic(), 0, 0
        self.task: rich_progress.TaskID | None = None
        self.next_share = 0.1  # the share of the work at which the next plain line is due
        self.last_line_time = self.start_time

    def __call__(self, done: int, total: int) -> None:
        checks.integer("total", total, low=0)
        checks.integer("done", done, low=0, high=total)
        if done < self.done:  # begun again, as a student is that guides several rounds
            self.start_time = self.last_line_time = time.monotonic()
            self.next_share = 0.1
        self.done, self.total = done, total
        self.stages._update_display(self)

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.start_time


class Stages:
    """A factory of stages that share one display.

    In a pipe a stage prints at most one line per tenth of its work, and one each ``line_interval_seconds`` seconds
    where a tenth takes longer, so that a log of an hour's run stays readable.

    Args:
        quiet: Show nothing.
        stream: Where to; None: standard error.
        line_interval_seconds: Seconds between lines of a slow stage in a pipe.
    """

    def __init__(
        self, *, quiet: bool = False, stream: TextIO | None = None, line_interval_seconds: float = 60.0
    ) -> None:
        self.quiet = checks.boolean("quiet", quiet)
        self.line_interval_seconds = checks.positive("line_interval_seconds", line_interval_seconds)
        self.stream = sys.stderr if stream is None else stream
        self.live_display: rich_progress.Progress | None = None
        console = Console(file=self.stream)
        # Not Console.is_terminal: FORCE_COLOR would draw bars into a file.
        if not quiet and self.stream.isatty() and not console.is_dumb_terminal:
            self.live_display = rich_progress.Progress(
                rich_progress.TextColumn("{task.description}"),
                rich_progress.BarColumn(bar_width=24),
                rich_progress.MofNCompleteColumn(),
                rich_progress.TimeElapsedColumn(),
                _TimeLeftColumn(),
                console=console,
            )

    def __enter__(self) -> Stages:
        if self.live_display is not None:
            self.live_display.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live_display is not None:
            self.live_display.stop()

    def __call__(self, name: str) -> _Stage:
        """A new stage, shown at once, so that what runs is named before its first step is done."""
        stage = _Stage(self, name)
        if self.live_display is not None:
            stage.task = self.live_display.add_task(escape(name), total=None)
        elif not self.quiet:
            self._write_line(f"{name} ...")
        return stage

    def print_message(self, line: str) -> None:
        """Print one line that is no stage: what was found and reused, for instance."""
        if self.live_display is not None:
            self.live_display.console.print(Text(line))
        elif not self.quiet:
            self._write_line(line)

    def _update_display(self, stage: _Stage) -> None:
        if self.live_display is not None and stage.task is not None:
            self.live_display.update(stage.task, completed=stage.done, total=stage.total)
        elif not self.quiet:
            self._print_share(stage)

    def _print_share(self, stage: _Stage) -> None:
        share = stage.done / stage.total if stage.total else 1.0
        is_overdue = time.monotonic() - stage.last_line_time >= self.line_interval_seconds
        has_new_tenth = share >= stage.next_share and stage.seconds >= SHORT_STAGE_SECONDS
        is_complete = share >= 1 and stage.next_share <= 1  # told once
        if stage.done == 0 or not (has_new_tenth or is_overdue or is_complete):
            return
        stage.last_line_time = time.monotonic()
        stage.next_share = 2.0 if share >= 1 else (int(share * 10 + 1e-9) + 1) / 10
        elapsed = format_duration(stage.seconds)
        if share >= 1:
            self._write_line(f"{stage.name}: {stage.done}/{stage.total} done in {elapsed}")
        else:
            time_left = format_duration(stage.seconds * (1 - share) / share)
            self._write_line(
                f"{stage.name}: {stage.done}/{stage.total} ({share:.0%}), {elapsed} so far, about {time_left} left"
            )

    def _write_line(self, text: str) -> None:
        print(text, file=self.stream, flush=True)


class _TimeLeftColumn(rich_progress.TimeRemainingColumn):
    """Rich's estimate, with the word that says what it is."""

    def render(self, task: rich_progress.Task) -> Text:
        return Text("") if task.finished else Text.assemble(super().render(task), " left")


@dataclass(eq=False)
class StageTimer:
    """Seconds per stage."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Add the time spent within this ``with`` to the stage."""
        start_time = time.monotonic()
        yield
        self.seconds[stage] = round(self.seconds.get(stage, 0.0) + time.monotonic() - start_time, 3)
