"""The one place that opens, charges, writes and reports a release.

    with ReleaseSession.open(config) as session:      # check the choices, lock the folder, open the account
        written = session.run()                       # prepare, reserve, draw noise, write, commit
        student = session.fit(written)                # train the student: post-processing, which is free
        report = session.publish(written, student)    # write the reports of release/ and private/
    session.finish()                                  # the same call makes a new release from now on

``opening.py`` holds the first step. A choice that cannot work is refused before the folder is locked; a run that the
cap of the account does not admit is refused before anything is trained or drawn. A release that is interrupted after
its reservation stays charged at its worst case.

Two options make a reservation of their own: a student that private records choose (``fit``), and the publication of
the data-dependent price (``publish_private_price``). Nothing else writes into release/ and private/.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.core import run_folders
from pate_torch.core.progress import do_nothing
from pate_torch.data.encoded_dataset import ENCODER_FOLDER, EncodedDataset
from pate_torch.methods.base import ModelRelease
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.voting import VotingMethod
from pate_torch.opening import OpenRun, make_record
from pate_torch.owner_metrics import (
    PrivateMetrics,
    complete_owner_metrics,
    compute_owner_metrics,
    make_public_baselines,
    save_votes,
)
from pate_torch.release import store as release_store
from pate_torch.release.builder import build_report
from pate_torch.release.renderer import print_summary, write_release
from pate_torch.release.report import ReleaseReport
from pate_torch.release.store import WrittenRelease, save_model
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.labels import make_student_task
from pate_torch.students.store import save as save_student

NamedStudent = tuple[str, Student]


@dataclass(kw_only=True, eq=False, repr=False)
class ReleaseSession(OpenRun):
    """PRIVATE. One release under way. Its attributes are those of the open run."""

    # ---- the release ----------------------------------------------------------------------------------------------

    def run(self) -> WrittenRelease:
        """Make the release, or return the release that the user named or an interrupted call has made.

        1. Prepare the method: train teachers, count votes, encode records. Everything so far is private.
        2. Check that the account admits everything that this run charges.
        3. Reserve the worst case of the method's privacy events in the ledger.
        4. Draw the noise, which only the reservation gives out, and open the noisy answers.
        5. Write the answers into ``release/``.
        6. Commit the reservation, with the hashes of the written files.

        A method with a first stage is prepared after step 3, from the answers of that stage.
        """
        if self.reused is not None:
            return self.reused
        config, method, budget, pool = self.config, self.config.method, self.budget, self.facts.pool
        assert budget is not None
        inputs, record = self.make_inputs(), make_record(config, self.facts)
        prepared = None if method.has_first_stage else method.prepare(inputs)
        with self.clock("labels"):
            self.check_budget()  # for the choice of a student, too: labels without it would be paid for in vain
            release_store.check_unused_folder(config.folder)
            if prepared is not None:
                prepared.check(budget, pool)
            if self.unfinished_call is not None:
                self.unfinished_call.begin(config.folder)
            events = method.privacy_events(self.facts)
            with budget.spend(events, mechanism=method.mechanism_name, purpose=method.purpose) as spending:
                if prepared is None:
                    first_answers = method.first_answers(inputs.records, spending)
                    digests = release_store.write_first_answers(self.release_dir, first_answers)
                    spending.record_first_answers(digests)  # the ledger has their hash before they decide anything
                    record |= digests
                    prepared = method.prepare(replace(inputs, first_answers=first_answers))
                    prepared.check(budget, pool)
                release = prepared.release(pool, spending)
                record |= {"teachers_id": prepared.id} if prepared.id else {}
                if isinstance(release, ModelRelease):
                    digests = save_model(release.student, self.release_dir)
                else:
                    record = release_store.write(
                        self.release_dir, release, record, self.facts.spec, prepared.guide, pool.names
                    )
                    digests = release_store.select_digests(record)
                spending.record_files(digests)  # leaving the block commits
        prepared.record_ledger_head(self.ledger.get_head())
        self.reservation_ids.append(release.id)
        self.prepared = prepared
        return WrittenRelease(release=release, record=record, guide=prepared.guide)

    def publish_private_price(self, written: WrittenRelease) -> str | None:
        """Publish the data-dependent price, which has a price itself; return a message. None if it is not wanted."""
        config, method, prepared = self.config, self.config.method, self.prepared
        if config.private_epsilon is None or written.release.id not in self.reservation_ids:
            return None
        assert self.budget is not None and isinstance(method, VotingMethod)
        assert prepared is not None and prepared.votes is not None
        plan, delta = config.plan_private_epsilon(self.facts.spec.num_classes), config.privacy.delta
        votes = prepared.votes.select(written.labels.query_Q)
        epsilon, reservation_id = config.private_epsilon.publish(
            plan, method.mechanism, votes, self.budget, delta, self.release_dir
        )
        self.reservation_ids.append(reservation_id)
        prepared.record_ledger_head(self.ledger.get_head())
        return (
            f"  Private epsilon  epsilon = {format_epsilon(epsilon)} at delta = {format_delta(delta)}"
            f" with confidence {plan.confidence:g} (forward, {config.partition.adjacency},\n"
            f"                   unit {self.facts.unit}, this publication included)"
        )

    # ---- the student ----------------------------------------------------------------------------------------------

    def fit(self, written: WrittenRelease) -> NamedStudent | None:
        """Train and save the student, or several students of which private records choose one, at a price.

        Returns:
            Name of the student, and the student. None if no student is wanted. A released model is itself the student.

        Raises:
            ValueError: No question was answered.
        """
        config, facts = self.config, self.facts
        if isinstance(written.release, ModelRelease):
            return config.method.student_name, written.release.student
        if not config.trains_student:
            return None
        labels, method = written.labels, config.method
        if not bool(labels.answered_Q.any()):
            raise ValueError(
                f"mechanism: none of the {len(labels.query_Q)} questions was answered, so there is nothing to learn "
                "from. Take more teachers, fewer questions, a larger epsilon or, if there is one, a lower "
                "mechanism.threshold."
            )
        releases_guide = isinstance(method, LabelingMethod) and method.releases_guide
        task = make_student_task(facts.spec, facts.pool, labels)
        task = replace(task, guide=written.guide if releases_guide else None)

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
        save_student(student, self.release_dir / "student.safetensors")
        if isinstance(config.dataset, EncodedDataset):
            config.dataset.publish(self.release_dir / ENCODER_FOLDER)
        return name, student

    # ---- reports --------------------------------------------------------------------------------------------------

    def publish(
        self, written: WrittenRelease, named_student: NamedStudent | None, *, shows_table: bool = True
    ) -> ReleaseReport:
        """Write what may be published into ``release/``, and what the owner alone may see into ``private/``.

        Args:
            written: Release.
            named_student: Name of the student, and the student. None if only labels are wanted: the owner then gets no
                files.
            shows_table: Whether to print the closing table.
        """
        paths, rows = {"Released": self.release_dir}, None
        if named_student is None:
            report = self.write_report(written, None)
        else:
            save_votes(written, self.prepared, self.private_dir, self.private_writer)
            with self.clock("owner"):
                metrics, nonprivate = compute_owner_metrics(
                    self.config, self.splits, written, self.prepared, self.stages
                )
            report = self.write_report(written, named_student, metrics)  # before anything that an attack could stop
            claim = self.ledger.make_claim(self.facts.spec.name, [written.release.id, *self.reservation_ids])
            metrics = complete_owner_metrics(
                metrics, self.config, self.splits, written, named_student[1], nonprivate, claim
            )
            metrics = replace(metrics, forecast=self.forecast, seconds=dict(self.clock.seconds))
            metrics.write(self.private_dir / "summary.json")
            if self.private_writer is not None:
                self.private_writer.log_metrics(metrics)
            paths["Private"], rows = self.private_dir, metrics.format_rows()
        if shows_table:
            print_summary(report, owner=rows, paths=paths | {"Ledger": self.ledger.path.absolute()})
        return report

    def write_report(
        self,
        written: WrittenRelease,
        named_student: NamedStudent | None,
        metrics: PrivateMetrics | None = None,
    ) -> ReleaseReport:
        """Write the report of a release, and of its student if there is one, into ``release/``."""
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
            baselines=() if metrics is None else make_public_baselines(self.splits.data, metrics),
            includes_encoder=(self.release_dir / ENCODER_FOLDER).is_dir(),
        )
        write_release(self.release_dir, report)
        return report
