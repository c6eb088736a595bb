"""What TensorBoard may show the world: ``release/tensorboard``. The teachers' side is ``private.PrivateBoard``.

Plain tags, one run, one layout. A run that is not private shows no epsilon, and every tag of it says so.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from torch.utils.tensorboard import SummaryWriter

from pate_torch.core import checks
from pate_torch.reporting.card import card
from pate_torch.reporting.charts import thinned
from pate_torch.reporting.released import ReleasedReport

if TYPE_CHECKING:  # drawing costs a second to import, and is done once, at the end of a run
    from matplotlib.figure import Figure

MAX_PICTURES = 20
STUDENT = "student/"


class ReleaseBoard:
    """Writes release/tensorboard. ``log`` while the student learns, ``write`` once at the end, ``close``.

    ``log`` takes the student's tags only: handed to the teachers' training by mistake, it raises ValueError.
    """

    def __init__(self, folder: Path, *, private: bool) -> None:
        self.folder = folder
        self.prefix = "" if checks.boolean("private", private) else "NOT_PRIVATE/"
        self.logged: set[str] = set()
        folder.mkdir(parents=True, exist_ok=True)
        self.writer = SummaryWriter(str(folder))

    def log(self, tag: str, value: float, step: int) -> None:
        """A ``protocols.Log`` for a student."""
        if not tag.startswith(STUDENT):
            raise checks.fail("tag", tag, f"must begin with {STUDENT!r} in a release", "Log it to the private board.")
        self.logged.add(tag)
        self.writer.add_scalar(self.prefix + tag, value, step)

    def write(self, report: ReleasedReport) -> None:
        """All that is known at the end."""
        if bool(self.prefix) == report.private:
            raise checks.fail("private", report.private, "must be what the board was opened with")
        self.writer.add_text(f"{self.prefix}privacy_statement", card(report))
        if report.private:
            self._epsilons(report)
        for tag, points in report.student_curves.items():
            for step, value in points if tag not in self.logged else ():
                self.log(tag if tag.startswith(STUDENT) else STUDENT + tag, value, step)
        if report.confusion:
            self._figure("student_test/confusion", confusion_figure(report))
        if report.examples is not None and report.examples.label:
            self._figure("labels/answered", examples_figure(report))
        self._layout(report)
        self._hparams(report)

    def _epsilons(self, report: ReleasedReport) -> None:
        curves: dict[str, Sequence[float]] = {"privacy/epsilon": report.epsilon_curve}
        if report.account_curve:
            curves["privacy/epsilon_all_releases"] = report.account_curve
        events = self.writer.file_writer
        assert events is not None, "written after close"
        for tag, values in curves.items():
            for question, value in thinned([(q, v) for q, v in enumerate(values, start=1)]):
                events.add_summary(_described(tag, value, report.terms), int(question))
        for question, value in thinned(_budget_left(report)):
            events.add_summary(_described("privacy/budget_left", value, report.terms), int(question))

    def _figure(self, tag: str, figure: Figure) -> None:
        self.writer.add_figure(self.prefix + tag, figure, close=False)

    def _layout(self, report: ReleasedReport) -> None:
        layout: dict[str, dict[str, list[Any]]] = {}
        if report.private and report.epsilon_curve:
            spent = [r"privacy/epsilon$", r"privacy/epsilon_all_releases$"]
            layout[f"Privacy: {report.terms}"] = {
                "epsilon by question": ["Multiline", spent],
                "budget left by question": ["Multiline", [r"privacy/budget_left$"]],
            }
        tags = sorted(self.logged)
        if tags:
            layout["Student"] = {tag: ["Multiline", [f"{re.escape(self.prefix + tag)}$"]] for tag in tags}
        if layout:
            self.writer.add_custom_scalars(layout)

    def _hparams(self, report: ReleasedReport) -> None:
        """One row of the comparison of runs: an epsilon stands beside its delta, adjacency, unit and route."""
        given: dict[str, Any] = {
            "dataset": report.dataset,
            "mechanism": report.mechanism,
            **{f"mechanism.{name}": value for name, value in report.parameters.items() if value is not None},
            "student": report.student,
            "num_teachers": report.num_teachers,
            "queries_asked": report.queries_asked,
            "delta": report.delta,
            "adjacency": report.adjacency,
            "unit": report.unit,
            "accountant": report.accountant,
            "private": report.private,
        }
        results = {
            "result/student_accuracy": report.student_accuracy,
            "result/label_accuracy": report.label_accuracy,
            "result/epsilon": report.claimed_epsilon,
            "result/epsilon_all_releases": report.claimed_epsilon_charged,
        }
        shown = {self.prefix + tag: value for tag, value in results.items() if value is not None}
        self.writer.add_hparams(given, shown, run_name=".")

    def close(self) -> None:
        """Close, and take the machine's name out of the file names: they are about to be published."""
        self.writer.close()
        number = 0
        for file in sorted(self.folder.glob("events.out.tfevents.*.*")):
            while (free := self.folder / f"events.out.tfevents.{number:04d}").exists():
                number += 1
            file.rename(free)

    def __enter__(self) -> ReleaseBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _budget_left(report: ReleasedReport) -> list[tuple[float, float]]:
    """(question, cap less what was reserved by then): one point where only the end is known."""
    if report.budget_epsilon is None or report.budget_left is None:
        return []
    if report.account_curve:
        return [(q, max(0.0, report.budget_epsilon - value)) for q, value in enumerate(report.account_curve, start=1)]
    return [(report.queries_asked, report.budget_left)]


def _described(tag: str, value: float, terms: str) -> Summary:
    """A scalar in double precision whose card carries the terms: SummaryWriter's own has no place for them."""
    kind = SummaryMetadata.PluginData(plugin_name="scalars")
    # The default smoothing trails a rising curve, and so shows a price below the true one.
    words = f"{terms}. Set Smoothing to 0: the smoothed line is not the price."
    metadata = SummaryMetadata(plugin_data=kind, summary_description=words)
    tensor = TensorProto(double_val=[value], dtype="DT_DOUBLE")
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])


def confusion_figure(report: ReleasedReport) -> Figure:
    """The student's test counts, shaded by share of the row."""
    counts = np.array(report.confusion)
    size = len(counts)
    side = min(12.0, 1.6 + 0.36 * size)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(side, side), layout="constrained")
    axes = figure.subplots()
    share = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    axes.imshow(share, cmap="Blues", vmin=0, vmax=1)
    names = [report.class_name(c) for c in range(size)]
    axes.set_xticks(range(size), names, rotation=0 if max(map(len, names)) < 3 else 60)
    axes.set_yticks(range(size), names)
    axes.set_xlabel("said")
    axes.set_ylabel("true")
    for true, guess in zip(*np.nonzero(counts), strict=True):
        ink = "white" if share[true, guess] > 0.5 else "black"
        axes.text(guess, true, str(counts[true, guess]), ha="center", va="center", color=ink, fontsize=10)
    return figure


def examples_figure(report: ReleasedReport) -> Figure:
    """Some public points, each under the label released for it."""
    shown = report.examples
    assert shown is not None
    count = min(MAX_PICTURES, len(shown.label))
    columns = min(5, count)
    rows = -(-count // columns)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(0.9 * columns, 1.2 * rows), layout="constrained")
    for place, axes in enumerate(figure.subplots(rows, columns, squeeze=False).flat):
        axes.axis("off")
        if place < count:
            image = np.moveaxis(shown.image[place], 0, 2)
            axes.imshow(image if image.shape[2] == 3 else image[..., 0], cmap="gray", vmin=0, vmax=255)
            label = shown.label[place]
            axes.set_title(report.class_name(label) if label >= 0 else "no answer", fontsize=12)
    return figure
