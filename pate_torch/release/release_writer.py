"""What TensorBoard may show the public: ``release/tensorboard``. The teachers' side is ``PrivateWriter``.

Curves where there is time, single numbers in the table of runs (HPARAMS) and in text. Plain tags, one run, one layout.
A run that is not private shows no epsilon, and every tag of it says so.
"""

from __future__ import annotations

import re
from datetime import datetime, time
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.summary.writer.record_writer import RecordWriter
from torch.utils.tensorboard import SummaryWriter

from pate_torch.core import checks
from pate_torch.core.files import SHARED_FILE_MODE, atomic_replacement
from pate_torch.core.run_folders import create_protected_folder
from pate_torch.release.curves import Curves
from pate_torch.release.figures import MAX_CLASSES, number_points, plot_confusion, plot_examples, thin_points
from pate_torch.release.renderer import render_model_card
from pate_torch.release.report import ReleaseReport

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STUDENT_PREFIX = "student/"


class ReleaseWriter:
    """Writes release/tensorboard: ``log`` while the student learns, ``write`` once at the end, ``close``.

    Args:
        folder: The folder for the events.
        private: Whether the noise was secret.
    """

    def __init__(self, folder: Path, *, private: bool) -> None:
        self.folder = folder
        self.prefix = "" if checks.boolean("private", private) else "NOT_PRIVATE/"
        create_protected_folder(folder)
        self.writer = SummaryWriter(str(folder))
        self.curves = Curves(self.writer, self.prefix)

    def log(self, tag: str, value: float, step: int) -> None:
        """A ``protocols.Log`` for a student.

        Raises:
            ValueError: The tag is not a student's: the writer was handed to the teachers' training by mistake.
        """
        if not tag.startswith(STUDENT_PREFIX):
            raise checks.error(
                "tag", tag, f"must begin with {STUDENT_PREFIX!r} in a release", "Log it to the private writer."
            )
        self.curves.log(tag, value, step)

    def write(self, report: ReleaseReport) -> None:
        """Write all that is known at the end."""
        if bool(self.prefix) == report.private:
            raise checks.error("private", report.private, "must be what the writer was opened with")
        self.writer.add_text(f"{self.prefix}privacy_statement", render_model_card(report))
        if report.private:
            self._write_epsilons(report)
        logged_tags = self.curves.drawn_tags | self.curves.first_points.keys()
        for tag, points in report.student_curves.items():
            for step, value in points if tag not in logged_tags else ():
                self.log(tag if tag.startswith(STUDENT_PREFIX) else STUDENT_PREFIX + tag, value, step)
        if 0 < len(report.confusion) <= MAX_CLASSES:
            self._write_figure("student_test/confusion", plot_confusion(report))
        if report.examples is not None and report.examples.label:
            self._write_figure("labels/answered", plot_examples(report))
        self._write_layout(report)
        self._write_hparams(report)

    def _write_epsilons(self, report: ReleaseReport) -> None:
        curves = {
            "privacy/epsilon": number_points(report.epsilon_curve),
            "privacy/epsilon_all_releases": number_points(report.account_curve),
            "privacy/budget_left": number_points(_compute_budget_left(report)),
        }
        events = self.writer.file_writer
        assert events is not None, "written after close"
        for tag, points in curves.items():
            for question, value in thin_points(points) if len(points) > 1 else ():
                events.add_summary(_make_scalar(tag, value, report.terms), int(question))

    def _write_figure(self, tag: str, figure: Figure) -> None:
        self.writer.add_figure(self.prefix + tag, figure, close=False)

    def _write_layout(self, report: ReleaseReport) -> None:
        layout: dict[str, dict[str, list[Any]]] = {}
        if report.private and report.epsilon_curve:
            epsilon_tags = [r"privacy/epsilon$", r"privacy/epsilon_all_releases$"]
            layout[f"Privacy: {report.terms}"] = {
                "epsilon by question": ["Multiline", epsilon_tags],
                "budget left by question": ["Multiline", [r"privacy/budget_left$"]],
            }
        tags = sorted(self.curves.drawn_tags)
        if tags:
            layout["Student"] = {tag: ["Multiline", [f"{re.escape(self.prefix + tag)}$"]] for tag in tags}
        if layout:
            self.writer.add_custom_scalars(layout)

    def _write_hparams(self, report: ReleaseReport) -> None:
        """One row of the table of runs. Its first columns, by the alphabet, are shown: the results and their terms."""
        results = {
            "accuracy_labels": report.label_accuracy,
            "accuracy_student": report.student_accuracy,
            "epsilon": report.epsilon,
            "epsilon_terms": report.terms if report.private else None,
            "total_epsilon": report.epsilon_charged,
            "total_left": report.budget_left if report.private else None,
            **self.curves.pop_single_values(),
        }
        settings = {
            "dataset": report.dataset,
            "mechanism": report.mechanism,
            **{f"mechanism.{name}": value for name, value in report.parameters.items()},
            "student": report.student or "",
            "num_teachers": report.num_teachers,
            "queries_asked": report.queries_asked,
            "private": report.private,
        }
        row = {self.prefix + name: value for name, value in results.items()} | settings
        self.writer.add_hparams({name: value for name, value in row.items() if value is not None}, {}, run_name=".")

    def close(self) -> None:
        """Close, and take out the machine's name and every time but the day: the files are about to be published.

        How long it took from one event to the next may follow from private records.
        """
        self.curves.close()
        self.writer.close()
        number, day = 0, datetime.combine(datetime.now(), time()).timestamp()
        for file in sorted(self.folder.glob("events.out.tfevents.*.*")):
            while (new_file := self.folder / f"events.out.tfevents.{number:04d}").exists():
                number += 1
            with atomic_replacement(new_file, SHARED_FILE_MODE) as temporary, temporary.open("wb") as stream:
                record_writer = RecordWriter(stream)
                for record in RawEventFileLoader(str(file)).Load():
                    event = Event.FromString(record)
                    event.wall_time = day
                    record_writer.write(event.SerializeToString())
            file.unlink()

    def __enter__(self) -> ReleaseWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _compute_budget_left(report: ReleaseReport) -> list[float]:
    """Question by question: the cap less what was reserved by then."""
    if report.budget_epsilon is None:
        return []
    return [max(0.0, report.budget_epsilon - value) for value in report.account_curve]


def _make_scalar(tag: str, value: float, terms: str) -> Summary:
    """A scalar in double precision whose card carries the terms: SummaryWriter's own has no place for them."""
    plugin = SummaryMetadata.PluginData(plugin_name="scalars")
    # The default smoothing trails a rising curve, and so shows a price below the true one.
    description = f"{terms}. Set Smoothing to 0: the smoothed line is not the price."
    metadata = SummaryMetadata(plugin_data=plugin, summary_description=description)
    tensor = TensorProto(double_val=[value], dtype="DT_DOUBLE")
    return Summary(value=[Summary.Value(tag=tag, tensor=tensor, metadata=metadata)])
