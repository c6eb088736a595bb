"""What TensorBoard draws as a curve: a single number is none, and waits to be shown as a number."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from pate_torch.core.run_folders import create_protected_folder, get_runs_folder

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

RUN_ID_PATTERN = re.compile(r"\d{4}-(\d\d)-(\d\d)_(\d\d)-(\d\d)-\d\d-\d{6}(.*)")
"""How ``run_folders.get_run_id`` names a run; what follows the time is of a sweep."""


class Curves:
    """Scalars of two points and more: the first point of a tag is written with its second.

    Args:
        writer: Where to.
        prefix: Before every tag.
    """

    def __init__(self, writer: SummaryWriter, prefix: str = "") -> None:
        self.writer = writer
        self.prefix = prefix
        self.first_points: dict[str, tuple[float, int]] = {}
        self.drawn_tags: set[str] = set()

    def log(self, tag: str, value: float, step: int) -> None:
        """A ``protocols.Log``."""
        if tag not in self.drawn_tags and tag not in self.first_points:
            self.first_points[tag] = (value, step)
            return
        if tag in self.first_points:
            self._draw(tag, *self.first_points.pop(tag))
        self._draw(tag, value, step)

    def pop_single_values(self) -> dict[str, float]:
        """Take the tags that have one point alone, which become numbers and no curves."""
        single = {tag: value for tag, (value, _) in self.first_points.items()}
        self.first_points.clear()
        return single

    def close(self) -> None:
        """Write what waits still: a run cut off after one point goes on in another file."""
        for tag, point in self.first_points.items():
            self._draw(tag, *point)
        self.first_points.clear()

    def _draw(self, tag: str, value: float, step: int) -> None:
        self.drawn_tags.add(tag)
        self.writer.add_scalar(self.prefix + tag, value, step)


def link_run(folder: Path, root: Path) -> None:
    """A short name for a run's TensorBoard: ``<root>/tensorboard/digits/gaussian/1123-1738``, a link to ``folder``.

    TensorBoard calls a run by its path. Nothing is made for events that lie elsewhere than under ``<root>/runs``, or
    where the file system has no links.
    """
    folder, root = folder.absolute(), get_runs_folder(root).parent.absolute()
    run = folder.parent.parent
    if root / "runs" not in run.parents:
        return
    short_name = RUN_ID_PATTERN.sub(r"\1\2-\3\4\5", run.name)
    link_folder = root / "tensorboard" / run.relative_to(root / "runs").parent
    with contextlib.suppress(OSError):
        create_protected_folder(link_folder)
        for number in itertools.count(1):
            name = link_folder / (short_name if number == 1 else f"{short_name}.{number}")
            try:
                name.symlink_to(os.path.relpath(folder, link_folder))
                return
            except FileExistsError:
                if name.resolve() == folder.resolve():
                    return
