"""Opens a run: loads its data, checks its choices, locks its folder, and opens its account.

The order keeps a refusal free of traces: a choice that cannot work is refused before a folder, a lock or a ledger is
created, and a run that the account does not admit is refused before anything is trained.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pate_torch.account import check_new_account_cap, open_budget, read_caps
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.config import DataSplits, RunConfig
from pate_torch.core import run_folders
from pate_torch.core.device import deterministic_mode
from pate_torch.core.files import compute_tensor_digest, create_private_folder
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.methods.base import MethodInputs, ModelRelease, PreparedMethod
from pate_torch.methods.feasibility import NOISE_ADVICE
from pate_torch.owner_metrics import PrivateWriter
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.release import owner_file
from pate_torch.release import store as release_store
from pate_torch.release.owner_file import OwnerFacts
from pate_torch.release.store import UnfinishedCall, WrittenRelease
from pate_torch.students.store import load as load_student
from pate_torch.teachers.store import TeacherStore

AlternativeFormatter = Callable[[RunConfig, DatasetFacts], str]
"""Suggests other settings for a run whose noise outweighs its votes."""


def make_inputs(
    config: RunConfig,
    data: Dataset,
    facts: DatasetFacts,
    stages: Stages,
    clock: StageTimer,
    ledger: Ledger | None = None,
) -> MethodInputs:
    """PRIVATE. Make the inputs of the method's ``prepare``."""
    return MethodInputs(
        records=data.private,
        facts=facts,
        seed=config.seed,
        device=config.device,
        store=TeacherStore(config.root),
        ledger=ledger,
        stages=stages,
        clock=clock,
    )


@dataclass(kw_only=True, eq=False, repr=False)
class OpenRun:
    """PRIVATE. A run whose data are loaded, whose choices are checked, and whose folder and account are open.

    Attributes:
        config: Choices of the run, completed for its data.
        splits: PRIVATE. Data of the run.
        facts: Public facts about the data.
        ledger: Ledger that holds the account.
        stages: Reports progress.
        clock: Times every stage.
        exit_stack: Closes with the run.
        budget: Budget of the account. None if nothing is charged.
        reused: Release that is taken in place of a new one. None if a new one is made.
        reservation_ids: Reservations that this run has made.
        owner: Statements of the owner of the data.
        forecast: Warning, from public values, about labels that will be mostly noise. None if there is none.
        unfinished_call: Note by which the same call finds this run again if it is interrupted. None if no call could
            use the note.
        has_private_folder: Whether the run keeps files for its owner.
        prepared: PRIVATE. Method that answered in this run. None if none has.
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
    ) -> Iterator[Self]:
        """Load the data, check the choices, lock the folder of the run, and open the account.

        Args:
            config: Choices of the run.
            clock: Times the stages. If None, a new one does.
            format_alternative: Suggests other settings if noise outweighs the votes. If None, the advice is general.

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
            run = cls(
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
            run._open_account(planned_events)
            if forecast is not None:
                stages.print_message(forecast)
            yield run

    @classmethod
    @contextlib.contextmanager
    def open_uncharged(cls, config: RunConfig, data: Dataset, clock: StageTimer) -> Iterator[Self]:
        """Open a run that charges nothing, to train teachers or a student of an earlier release."""
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

        The caller closes the ledger of the budget.
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
            create_private_folder(self.private_dir)  # a disk that refuses it does so before anything is charged

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
        """PRIVATE. Make the inputs of the method's ``prepare``, which log into the owner's TensorBoard."""
        inputs = make_inputs(self.config, self.splits.data, self.facts, self.stages, self.clock, self.ledger)
        inputs = replace(inputs, check_budget=self.check_budget)
        if self.private_writer is None:
            return inputs
        return replace(inputs, log=self.private_writer.log, log_losses=self.private_writer.log_losses)

    def check_budget(self) -> None:
        """Raise BudgetExceeded, or ValueError for other terms, if the account does not admit what the run charges."""
        if self.budget is not None:
            self.budget.check_events(self.config.privacy_events(self.facts))

    def finish(self) -> None:
        """Note, once the session is closed, that the call has ended: the same call makes a new release from now on."""
        if self.unfinished_call is not None:
            self.unfinished_call.end()


# ---- the folder of the run ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def run_folder_lock(config: RunConfig) -> Iterator[None]:
    """Lock the folder of the run for this process, and remove the unfinished files of killed runs from the store.

    Raises:
        ValueError: Another run writes into the folder, or has finished there.
    """
    create_private_folder(config.root, "store")
    store = TeacherStore(config.root)
    with contextlib.ExitStack() as exit_stack:
        with store.lock():  # otherwise, a run that begins could be taken for a killed one
            exit_stack.enter_context(run_folders.hold(config.folder))
            run_folders.remove_killed_run_files(config.root)
        if (config.folder / "release" / "summary.json").exists():
            release_store.check_unused_folder(config.folder)
        store.sweep()
        release_store.discard_incomplete(config.folder)
        yield


@contextlib.contextmanager
def open_existing_ledger(path: Path) -> Iterator[Ledger | None]:
    """Open the ledger if there is one. A run that is refused creates no ledger."""
    if not path.exists():
        yield None
        return
    with Ledger(path) as ledger:
        yield ledger


@contextlib.contextmanager
def open_reused_release(config: RunConfig, facts: DatasetFacts) -> Iterator[tuple[Ledger, WrittenRelease]]:
    """Open the ledger and read the release that ``labels`` names, with the run's folder locked for a student of it."""
    assert config.labels is not None
    release_folder = release_store.find_release(config.root, config.labels)
    with Ledger(config.ledger_path, create=False) as ledger:
        labels, record, guide = release_store.read(release_folder, facts.pool, facts.spec, ledger)
        with run_folder_lock(config):
            release_store.check_unused_folder(config.folder, labels.id)
            yield ledger, WrittenRelease(release=labels, record=record, guide=guide)


def make_unfinished_call(config: RunConfig, facts: DatasetFacts, all_private: PrivateRecords) -> UnfinishedCall | None:
    """PRIVATE. Make the note of this call. None if its noise is seeded, or if it makes more than one reservation."""
    privacy, store = config.privacy, TeacherStore(config.root)
    if privacy.insecure_noise_seed is not None or config.private_epsilon is not None or config.selection is not None:
        return None
    choices = {
        "method": repr(config.method),
        "partition": repr(config.partition),
        "seed": config.seed,
        "pool": compute_tensor_digest(facts.pool.x),
        "delta": privacy.delta,
    }

    def compute_fingerprint() -> str:
        return config.method.compute_fingerprint(store, all_private) + store.compute_fingerprint(all_private)

    return UnfinishedCall(store, facts.spec.name, choices, compute_fingerprint)


def resume_call(
    config: RunConfig, facts: DatasetFacts, unfinished_call: UnfinishedCall | None, stages: Stages
) -> tuple[RunConfig, WrittenRelease | None]:
    """PRIVATE. Find the same call that was interrupted; return the configuration with its folder, and its release."""
    if unfinished_call is None:
        return config, None
    if config.method.releases_model:
        found_model = unfinished_call.find_model(config.ledger_path)
        if found_model is None:
            return config, None
        folder, release_id = found_model
        student = load_student(folder / "release" / "student.safetensors")
        written = WrittenRelease(release=ModelRelease(release_id, student), record=make_record(config, facts))
    else:
        interruption = unfinished_call.find(config.ledger_path)
        if interruption is None:
            return config, None
        folder, committed_ids = interruption
        with Ledger(config.ledger_path, create=False) as ledger:
            labels, record, guide = release_store.read(folder / "release", facts.pool, facts.spec, ledger)
        if labels.id not in committed_ids:
            return config, None
        written = WrittenRelease(release=labels, record=record, guide=guide)
    message = f"Finishing the interrupted release {written.release.id}. It is paid for, and costs nothing more."
    stages.print_message(message)
    return replace(config, folder=folder), written


def make_record(config: RunConfig, facts: DatasetFacts) -> dict[str, Any]:
    """Make the fields of ``release.json`` other than the answers: public configuration, and ids drawn at random."""
    spec = facts.spec
    return {
        "dataset": spec.name,
        **({"pool_sha256": compute_tensor_digest(facts.pool.x)} if config.method.uses_public_points else {}),
        "noise": config.method.noise,
        "private": config.privacy.insecure_noise_seed is None,
        "seed": config.seed,
        "delta": config.privacy.delta,
        "adjacency": facts.adjacency,
        "unit": facts.unit,
        **({} if spec.encoder is None else {"encoder": spec.encoder.card_without_points.to_dict()}),
        **config.method.to_record(facts),
    }
