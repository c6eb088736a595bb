"""The one place that opens, charges, writes and reports a release.

    with ReleaseSession.open(config) as session:      # refuses what cannot work, locks the folder, opens the account
        written = session.run()                       # reserve the worst case, draw noise, write, commit
        student = session.fit(written)                # post-processing, which is free
        report = session.publish(written, student)    # write the report, and the owner's figures
    session.finish()                                  # forget the call: the same call makes a new release from now on

Two options charge a reservation of their own: a student that private records choose (``fit``), and a data-dependent
price that is published (``publish_private_price``). Nothing else writes into release/ and private/.

A choice that cannot work is refused before the run's folder is locked; what the account's cap does not admit, before
anything is trained or drawn. A release that is interrupted after its reservation stays charged at its worst case.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.formatting import format_delta, format_epsilon
from pate_torch.config import RunConfig
from pate_torch.core import run_folders
from pate_torch.core.device import deterministic_mode
from pate_torch.core.files import create_private_folder
from pate_torch.core.progress import Stages, StageTimer, do_nothing
from pate_torch.data.encoded_dataset import ENCODER_FOLDER, EncodedDataset
from pate_torch.methods.base import MethodInputs, ModelRelease, PreparedMethod
from pate_torch.methods.feasibility import NOISE_ADVICE
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.voting import VotingMethod
from pate_torch.opening import (
    DataSplits,
    check_new_account_cap,
    make_inputs,
    make_record,
    make_unfinished_call,
    open_budget,
    open_existing_ledger,
    open_reused_release,
    read_caps,
    resume_call,
    run_folder_lock,
)
from pate_torch.owner_metrics import add_student_metrics, attack_released_student, compute_owner_metrics, save_votes
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Dataset
from pate_torch.release import owner_file
from pate_torch.release import store as release_store
from pate_torch.release.builder import build_report
from pate_torch.release.owner_file import OwnerFacts
from pate_torch.release.private_metrics import PrivateMetrics, PrivateWriter, make_public_baselines
from pate_torch.release.renderer import print_summary, write_release
from pate_torch.release.report import ReleaseReport
from pate_torch.release.store import WrittenRelease
from pate_torch.release.unfinished_calls import UnfinishedCall, save_model
from pate_torch.students.base import Student, StudentAlgorithm
from pate_torch.students.labels import make_student_task
from pate_torch.students.store import save as save_student
from pate_torch.teachers.store import TeacherStore

AlternativeFormatter = Callable[[RunConfig, DatasetFacts], str]
"""Suggests other settings for a run whose noise outweighs its votes."""

NamedStudent = tuple[str, Student]


@dataclass(kw_only=True, eq=False, repr=False)
class ReleaseSession:
    """PRIVATE. One release under way.

    Attributes:
        config: Choices of the run, completed for its data.
        splits: PRIVATE. Data of the run.
        facts: Public facts about the data.
        ledger: Ledger that holds the account.
        stages: Reports progress.
        clock: Times every stage.
        exit_stack: Closes with the session.
        budget: Budget of the account; None if nothing is charged.
        reused: Release that is taken in place of a new one; None if a new one is made.
        reservation_ids: Reservations that this run has made.
        owner: Statements of the owner of the data.
        forecast: Warning, from public values, about labels that will be mostly noise; None if there is none.
        unfinished_call: Note by which the same call finds this run again if it is interrupted; None if nothing is
            charged.
        has_private_folder: Whether the run keeps files for its owner.
        prepared: PRIVATE. Method that answered in this session; None if none has.
    """

    config: RunConfig
    splits: DataSplits
    facts: DatasetFacts
    ledger: Ledger
    stages: Stages
    clock: StageTimer
    exit_stack: contextlib.ExitStack
    budget: Budget | None = None
    reused: WrittenRelease | None = None
    reservation_ids: list[str] = field(default_factory=list)
    owner: OwnerFacts = field(default_factory=OwnerFacts)
    forecast: str | None = None
    unfinished_call: UnfinishedCall | None = None
    has_private_folder: bool = False
    prepared: PreparedMethod | None = None

    # ---- opening --------------------------------------------------------------------------------------------------

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        config: RunConfig,
        clock: StageTimer | None = None,
        format_alternative: AlternativeFormatter | None = None,
    ) -> Iterator[ReleaseSession]:
        """Load the data, refuse what cannot work, lock the run's folder and open the account.

        Args:
            config: The run's choices.
            clock: Times the stages; a new one if None.
            format_alternative: Suggests other settings if noise outweighs the votes; general advice if None.

        Raises:
            ValueError: A choice cannot work; nothing has been charged or trained.
            BudgetExceeded: The account's cap does not admit this run.
        """
        clock = StageTimer() if clock is None else clock
        with Stages(quiet=config.quiet) as stages, contextlib.ExitStack() as exit_stack:
            exit_stack.enter_context(deterministic_mode(config.device))
            with clock("data"):
                splits = DataSplits.from_config(config, stages)
            facts = DatasetFacts.from_dataset(splits.data, config.partition)
            config = config.complete(facts, stages)
            config = replace(config, root=config.method.find_ledger_folder(config.root, facts, stages))
            owner = owner_file.read(config.root, facts.spec.name)
            config.validate(facts)
            planned_events = config.privacy_events(facts)
            reused = unfinished_call = forecast = None
            if config.labels is None:
                with open_existing_ledger(config.ledger_path) as existing_ledger:
                    config.method.check_stored(make_inputs(config, splits.data, facts, stages, clock, existing_ledger))
                    check_new_account_cap(config, facts.spec.name, planned_events, read_caps(existing_ledger))
                if (warning := config.method.forecast_warning(facts)) is not None:
                    advice = NOISE_ADVICE if format_alternative is None else format_alternative(config, facts)
                    forecast = f"{warning} {advice}"
                unfinished_call = make_unfinished_call(config, facts, splits.all_private)
                config, reused = resume_call(config, facts, unfinished_call, stages)
                exit_stack.enter_context(run_folder_lock(config))
                ledger = exit_stack.enter_context(Ledger(config.ledger_path))
            else:
                ledger, reused = exit_stack.enter_context(open_reused_release(config, facts))
            session = cls(
                config=config,
                splits=splits,
                facts=facts,
                ledger=ledger,
                stages=stages,
                clock=clock,
                exit_stack=exit_stack,
                reused=reused,
                owner=owner,
                forecast=forecast,
                unfinished_call=unfinished_call,
                reservation_ids=[reused.release.id] if reused is not None and config.labels is None else [],
                has_private_folder=config.trains_student or config.method.releases_model,
            )
            session._open_account(planned_events)
            if forecast is not None:
                stages.print_message(forecast)
            yield session

    @classmethod
    @contextlib.contextmanager
    def open_uncharged(cls, config: RunConfig, data: Dataset, clock: StageTimer) -> Iterator[ReleaseSession]:
        """Open a session that charges nothing: to train teachers, or a student of a release that is here."""
        create_private_folder(config.root, "store")
        with (
            Ledger(config.ledger_path) as ledger,
            Stages(quiet=config.quiet) as stages,
            contextlib.ExitStack() as exit_stack,
        ):
            exit_stack.enter_context(deterministic_mode(config.device))
            yield cls(
                config=config,
                splits=DataSplits(data=data, all_private=data.private),
                facts=DatasetFacts.from_dataset(data, config.partition),
                ledger=ledger,
                stages=stages,
                clock=clock,
                exit_stack=exit_stack,
                owner=owner_file.read(config.root, data.spec.name),
            )

    @classmethod
    def open_account(cls, config: RunConfig, data: Dataset, planned_events: tuple[PrivacyEvent, ...]) -> Budget:
        """Open the account of these records, for releases that span calls and processes (``Spending.suspend``).

        The ledger stays open: whoever is given the budget closes it.
        """
        create_private_folder(config.root, "store")
        fingerprint = config.method.compute_fingerprint(TeacherStore(config.root), data.private)
        return open_budget(config, Ledger(config.ledger_path), data, planned_events, fingerprint)

    def _open_account(self, planned_events: tuple[PrivacyEvent, ...]) -> None:
        """Open the account if anything is charged, and create the owner's folder."""
        config, store, records = self.config, TeacherStore(self.config.root), self.splits.all_private
        if planned_events:
            if config.labels is None:
                fingerprint = config.method.compute_fingerprint(store, records)
            else:
                fingerprint = store.compute_content_fingerprint(records)
            self.budget = open_budget(config, self.ledger, self.splits.data, planned_events, fingerprint)
            if not self.reservation_ids:
                self.budget.check_events(planned_events)
        if self.has_private_folder:
            create_private_folder(self.private_dir)  # a closed disk is found out before anything is charged

    # ---- folders and inputs ---------------------------------------------------------------------------------------

    @property
    def release_dir(self) -> Path:
        """The folder that may be published."""
        return self.config.folder / "release"

    @property
    def private_dir(self) -> Path:
        """PRIVATE. The folder for the owner alone."""
        return self.config.folder / "private"

    @functools.cached_property
    def private_writer(self) -> PrivateWriter | None:
        """PRIVATE. The owner's TensorBoard; None if the run keeps no files for its owner."""
        if not self.has_private_folder:
            return None
        create_private_folder(self.private_dir)
        return self.exit_stack.enter_context(contextlib.closing(PrivateWriter(self.private_dir / "tensorboard")))

    def make_inputs(self) -> MethodInputs:
        """PRIVATE. Make what the method is prepared from."""
        inputs = make_inputs(self.config, self.splits.data, self.facts, self.stages, self.clock, self.ledger)
        inputs = replace(inputs, check_budget=self._check_budget)
        if self.private_writer is None:
            return inputs
        return replace(inputs, log=self.private_writer.log, log_losses=self.private_writer.log_losses)

    def _check_budget(self) -> None:
        """Raise BudgetExceeded, or ValueError for other terms, if the account does not admit what the run charges."""
        if self.budget is not None:
            self.budget.check_events(self.config.privacy_events(self.facts))

    # ---- the release ----------------------------------------------------------------------------------------------

    def run(self) -> WrittenRelease:
        """Prepare the method, reserve its worst case, draw its noise, write what it releases, and commit."""
        if self.reused is not None:
            return self.reused
        config, method, budget = self.config, self.config.method, self.budget
        assert budget is not None
        inputs, record, pool = self.make_inputs(), make_record(config, self.facts), self.facts.pool
        prepared = None if method.has_first_stage else method.prepare(inputs)
        with self.clock("labels"):
            self._check_budget()  # all of it: labels that no student can be chosen from would be paid for in vain
            release_store.check_unused_folder(config.folder)
            if prepared is not None:
                prepared.check(budget, pool)
            if self.unfinished_call is not None:
                self.unfinished_call.begin(config.folder)
            events, name = method.privacy_events(self.facts), method.mechanism_name
            with budget.spend(events, mechanism=name, purpose=method.purpose) as spending:
                if prepared is None:
                    first_answers = method.first_answers(inputs.records, spending)
                    digests = release_store.write_first_answers(self.release_dir, first_answers)
                    spending.record_first_answers(digests)  # they decide what is asked next: the ledger has their hash
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
                spending.record_files(digests)
        prepared.record_ledger_head(self.ledger.get_head())
        self.reservation_ids.append(release.id)
        self.prepared = prepared
        return WrittenRelease(release=release, record=record, guide=prepared.guide)

    def publish_private_price(self, written: WrittenRelease) -> str | None:
        """Publish the data-dependent price if it is wanted, at a price of its own; return a message for the owner."""
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
            The student's name, and the student; None if none is wanted. A model that was released is the student.

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
            written: The release.
            named_student: The student's name, and the student. None if only labels are wanted: the owner then gets no
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
            metrics = add_student_metrics(metrics, self.config, self.splits, named_student[1])
            membership = attack_released_student(
                self.config,
                self.splits,
                written,
                named_student[1],
                nonprivate,
                events=claim.reserved_events,
                is_private=claim.is_private,
            )
            seconds = dict(self.clock.seconds)
            metrics = replace(metrics, forecast=self.forecast, membership=membership, seconds=seconds)
            metrics.write(self.private_dir / "summary.json")
            if self.private_writer is not None:
                self.private_writer.log_metrics(metrics)
            paths, rows = paths | {"Private": self.private_dir}, metrics.format_rows()
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

    def finish(self) -> None:
        """Note, once the session is closed, that the call has ended: the same call makes a new release from now on."""
        if self.unfinished_call is not None:
            self.unfinished_call.end()
