"""Makes a release from its first step to its last. Only ``PrivateLabeler`` releases answers without this module.

    with ReleaseSession.open(config) as session:      # check the choices, lock the folder, open the account
        written = session.run()                       # prepare, reserve, draw noise, write, commit
        student = session.fit(written)                # train the student: post-processing, which is free
        report = session.publish(written, student)    # write the reports of release/ and private/
    session.finish()                                  # from now on, the same call makes a new release

The first step is in ``opening.py``. It refuses choices that cannot work before it locks the folder, and a run that the
cap of the account does not admit before anything is trained.

A process that dies before the reservation has charged nothing. After the reservation, the worst case stays charged: if
the answers were written, the same call continues this release at no further cost; if not, it makes and charges a new
one. A reservation that was committed is found again by the same call until ``finish``.

Two options add a reservation each: the choice of a student by private records (``fit``), and a test on held-out units
(``test``).
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

from pate_torch import owner_metrics
from pate_torch.core import run_folders
from pate_torch.core.progress import do_nothing
from pate_torch.data.encoded_dataset import ENCODER_FOLDER, EncodedDataset
from pate_torch.methods.base import FirstAnswers, ModelForecast, ModelRelease, PrivateMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.opening import OpenRun, make_record
from pate_torch.owner_metrics import PrivateMetrics
from pate_torch.privacy.records import Release
from pate_torch.release import store as release_store
from pate_torch.release.builder import build_report
from pate_torch.release.renderer import print_summary, write_release
from pate_torch.release.report import ReleaseReport
from pate_torch.release.store import MODEL_FILE_NAME, WrittenRelease, save_model
from pate_torch.release.table_report import write_rows
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.labels import make_student_task
from pate_torch.students.private_test import read_test, release_test
from pate_torch.students.store import save as save_student
from pate_torch.synthesis.model import TableModel

NamedStudent = tuple[str, Student]
MAX_OUTSIDE_SHARE = 0.05
"""Share of private values outside the public range, beyond the share due to chance, above which a warning is shown."""


class ReleaseStopped(ValueError):
    """A release that stopped after its first answers, because no skill is expected of its model.

    Attributes:
        forecast: Forecast from the first answers.
        reservation_id: Id of the reservation that paid for the first answers.
    """

    def __init__(
        self,
        forecast: ModelForecast,
        reservation_id: str,
        fix: str = "Use more records or a larger privacy.target_epsilon, or set privacy.spend_anyway=true.",
    ) -> None:
        problem = "The noisy class counts show too few records for the noise, so the release stopped there"
        super().__init__(f"{problem}, and only the counts are charged. Forecast: {forecast}. {fix}")
        self.forecast, self.reservation_id = forecast, reservation_id


@dataclass(kw_only=True, eq=False, repr=False)
class ReleaseSession(OpenRun):
    """PRIVATE. An open run, with the steps of a release as methods."""

    # ---- the release ----------------------------------------------------------------------------------------------

    def run(self) -> WrittenRelease:
        """Make the release, or return the earlier or interrupted release that the run continues from.

        1. Prepare the method: train teachers, count votes, encode records. All results so far are private.
        2. Check again that the account admits everything that this run charges: others may have charged it since.
        3. Reserve the worst case of the method's privacy events in the ledger.
        4. Draw the noise, which only the reservation gives out, and open the noisy answers.
        5. Write the answers into ``release/``.
        6. Commit the reservation, with the hashes of the written files.

        A method with a first stage is prepared after step 3, from the answers of that stage. If these answers show that
        no skill is expected of the model, the release stops: the reservation is committed with the events of these
        answers, which are a release of their own.

        Raises:
            ReleaseStopped: The first answers stopped the release. Only these answers are charged.
        """
        if self.reused is not None:
            return self.reused
        config, method, budget, pool = self.config, self.config.method, self.budget, self.facts.pool
        assert budget is not None
        inputs, stopped_by, digests = self.make_inputs(), None, {}
        prepared = None if method.has_first_stage else method.prepare(inputs)  # step 1
        self.check_budget()  # step 2: the choice of a student must not fail after the labels are paid for
        release_store.check_unused_folder(config.folder)
        if prepared is not None:
            prepared.check(budget, pool)
        if self.unfinished_call is not None:
            self.unfinished_call.begin(config.folder)
        events = method.privacy_events(self.facts)
        with budget.spend(events, mechanism=method.mechanism_name, purpose=method.purpose) as spending:  # step 3
            if prepared is None:
                first_answers = method.draw_first_answers(inputs.records, self.facts, spending)
                digests = release_store.write_first_answers(self.release_dir, first_answers)
                spending.record_first_answers(digests)
                method, stopped_by = self._continue_from(first_answers)
                if stopped_by is None:
                    prepared = method.prepare(replace(inputs, first_answers=first_answers))
                    prepared.check(budget, pool)
            if prepared is None:
                spending.stop()  # the block ends without an error, so that the rest of the reservation is returned
            else:
                # This time may be published. All that hashes the private records, such as the commit, lies outside.
                with self.clock("labels"):
                    release = prepared.release(pool, spending)  # step 4
                    record = make_record(replace(config, method=method), self.facts) | digests
                    record |= {"teachers_id": prepared.id} if prepared.id else {}
                    record, digests = self._write_answers(release, record, prepared.guide)  # step 5
                spending.record_files(digests)  # step 6 follows when the block ends without an error
        if prepared is None:
            assert stopped_by is not None
            self.finish()
            raise ReleaseStopped(stopped_by, spending.id)
        prepared.on_ledger_head(self.ledger.get_head())
        self.reservation_ids.append(release.id)
        self.prepared = prepared
        return WrittenRelease(release=release, record=record, guide=prepared.guide)

    def _write_answers(
        self, release: Release | ModelRelease, record: dict[str, Any], guide: Student | None
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Write the answers into ``release/``. Return the record of the release and the hashes for the ledger."""
        if isinstance(release, ModelRelease):
            digests = save_model(release.model, self.release_dir)
            if isinstance(release.model, TableModel):
                digests |= write_rows(self.release_dir, release.model.sample(seed=self.config.seed))
            return record, digests
        facts = self.facts
        record = release_store.write(self.release_dir, release, record, facts.spec, guide, facts.pool.names)
        return record, release_store.select_digests(record)

    def _continue_from(self, first_answers: FirstAnswers) -> tuple[PrivateMethod, ModelForecast | None]:
        """Adapt the method to its first answers. Also return the forecast that stops the release, or None."""
        method = self.config.method.adapt(first_answers, self.facts)
        if method.privacy_events(self.facts) != self.config.method.privacy_events(self.facts):
            raise ValueError("first_answers: a setting that the cost depends on changed. The reservation stays spent.")
        forecast = method.forecast_model(first_answers, self.facts)
        if forecast is not None:
            self.stages.print_message(f"Forecast from noisy class counts: {forecast}.")
        outside = first_answers.estimate_outside_share(first_answers.estimate_size(self.facts.num_units))
        chance_share = 2 / (len(self.facts.pool) + 1)  # of a column, for points of the same population
        if outside > MAX_OUTSIDE_SHARE + chance_share:
            share = f"about {100 * outside:.0f} % of the private values or more"
            problem = f"{share} lie outside the range of the public points"
            warnings.warn(f"public: {problem}. Are they in other units, or of another population?", stacklevel=2)
        has_no_skill = forecast is not None and forecast.skill <= 0 and not self.config.privacy.spend_anyway
        return method, forecast if has_no_skill else None

    # ---- the student ----------------------------------------------------------------------------------------------

    def fit(self, written: WrittenRelease) -> NamedStudent | None:
        """Train and save the student. With ``selection``, train several students and let private records choose one.

        Training is free, but the choice is charged. A released model is itself the student.

        Returns:
            Name of the student, and the student. None if the configuration has no student.

        Raises:
            ValueError: No query was answered.
        """
        config, facts = self.config, self.facts
        if isinstance(written.release, ModelRelease):
            model = written.release.model
            return (config.method.student_name, model) if isinstance(model, Student) else None
        if not config.trains_student:
            return None
        labels, method = written.labels, config.method
        if not bool(labels.answered_Q.any()):
            raise ValueError(
                f"mechanism: none of the {len(labels.query_Q)} queries was answered, so there is nothing to learn "
                "from. Take more teachers, fewer queries, a larger epsilon or, for a mechanism with a threshold, a "
                "lower mechanism.threshold."
            )
        releases_guide = isinstance(method, LabelingMethod) and method.releases_guide
        task = make_student_task(facts.spec, facts.pool, labels)
        first_answers = release_store.read_first_answers(self.release_dir)
        frequency_C = None if first_answers is None else first_answers.estimate_frequencies()
        guide = written.guide if releases_guide else None
        task = replace(task, guide=guide, frequency_C=frequency_C, search=self.search)

        def train_student(name: str, algorithm: StudentAlgorithm) -> Student:
            progress = self.stages(f"Training the student ({name})")
            log = do_nothing if self.private_writer is None else self.private_writer.log
            return algorithm.fit(task, seed=config.seed, device=config.device, progress=progress, log=log)

        with self.clock("student"):
            if config.selection is None:
                assert config.student is not None
                name, student = config.student.name, train_student(config.student.name, config.student)
            else:
                validation, budget = self.splits.validation, self.budget
                assert validation is not None and budget is not None
                name, student, id_ = config.selection.choose(train_student, validation=validation, budget=budget)
                self.reservation_ids.append(id_)
        run_folders.create_protected_folder(self.release_dir)
        save_student(student, self.release_dir / MODEL_FILE_NAME)
        if isinstance(config.dataset, EncodedDataset):
            config.dataset.publish(self.release_dir / ENCODER_FOLDER)
        return name, student

    def test(self, named_student: NamedStudent | None) -> NamedStudent | None:
        """Test the student on held-out units, which is charged, and return the student with its temperature.

        Without ``private_test`` the student is returned as it is.
        """
        mechanism, file = self.config.test_mechanism, self.release_dir / MODEL_FILE_NAME
        if mechanism is None or named_student is None:
            return named_student
        assert self.budget is not None and self.splits.test is not None
        (name, student), records, pool_x = named_student, self.splits.test, self.facts.pool.x
        progress = self.stages("Testing the student on held-out units")
        test, student = release_test(student, file, records, pool_x, mechanism, self.budget, progress)
        self.reservation_ids.append(test.id)
        return name, student

    # ---- reports --------------------------------------------------------------------------------------------------

    def publish(
        self, written: WrittenRelease, named_student: NamedStudent | None, *, shows_table: bool = True
    ) -> ReleaseReport:
        """Write the report of the release into ``release/``, and the owner's metrics into ``private/``.

        Args:
            written: Release that is reported.
            named_student: Name of the student, and the student. None if the configuration has no student, in which case
                nothing is written into ``private/``.
            shows_table: Whether to print the closing table.
        """
        paths, rows = {"Released": self.release_dir}, None
        if named_student is None:
            report = self.write_report(written, None)
        else:
            config, splits, prepared = self.config, self.splits, self.prepared
            owner_metrics.save_votes(written, prepared, self.private_dir, self.private_writer)
            with self.clock("owner"):
                metrics, model = owner_metrics.compute_metrics(config, splits, written, prepared, self.stages)
            report = self.write_report(written, named_student, metrics)  # first: an attack may fail
            claim = self.ledger.make_claim(self.facts.spec.name, [written.release.id, *self.reservation_ids])
            metrics = owner_metrics.complete_metrics(metrics, config, splits, written, named_student[1], model, claim)
            metrics = replace(metrics, forecast=self.forecast, seconds=dict(self.clock.seconds))
            metrics = replace(metrics, neighbor_recall=min(self.search.recalls, default=None))
            metrics.write(self.private_dir / "summary.json")
            if self.private_writer is not None:
                self.private_writer.log_metrics(metrics)
            paths["Private"], rows = self.private_dir, metrics.format_rows()
        if shows_table:
            print_summary(report, owner=rows, paths=paths | {"Ledger": self.ledger.place})
        return report

    def write_report(
        self, written: WrittenRelease, named_student: NamedStudent | None, metrics: PrivateMetrics | None = None
    ) -> ReleaseReport:
        """Write the report of a release, and of its student unless this is None, into ``release/``."""
        run_folders.create_protected_folder(self.release_dir)
        name, student = named_student or ("", None)
        report = build_report(
            data=self.splits.data,
            written=written,
            reservation_ids=self.reservation_ids,
            student=student,
            student_name=name,
            ledger=self.ledger,
            seconds=self.clock.seconds,
            owner=self.owner,
            chosen_by=self.config.privacy.chosen_by,
            baselines=() if metrics is None else owner_metrics.make_public_baselines(self.splits.data, metrics),
            includes_encoder=(self.release_dir / ENCODER_FOLDER).is_dir(),
            model={} if student is None else self.config.method.describe_model(student),
            private_test=None if student is None else read_test(self.release_dir / MODEL_FILE_NAME, "student_sha256"),
            seed=self.config.seed,
        )
        write_release(self.release_dir, report)
        return report
