"""Opens a run: loads its data, checks its choices, locks its folder, and opens the account that it charges.

The order matters. A choice that cannot work is refused before a folder, a lock or a ledger is created, and a run that
the account does not admit is refused before anything is trained.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.filters import NO_COST, PrivacyFilter
from pate_torch.config import DataSplits, RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.core.device import deterministic_mode
from pate_torch.core.files import compute_tensor_digest, create_private_folder
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.features.neighbors import NeighborSearch
from pate_torch.methods.base import MethodInputs, PreparedMethod
from pate_torch.methods.feasibility import NOISE_ADVICE
from pate_torch.owner_metrics import PrivateWriter
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger, open_existing_ledger, open_ledger
from pate_torch.privacy.partition import DatasetFacts
from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.release import owner_file
from pate_torch.release import store as release_store
from pate_torch.release.charges import explain_interrupts
from pate_torch.release.owner_file import OwnerFacts
from pate_torch.release.store import UnfinishedCall, WrittenRelease
from pate_torch.students.private_test import format_size_warning
from pate_torch.teachers.store import RecordHashes, TeacherStore

AlternativeFormatter = Callable[[RunConfig, DatasetFacts], str]
"""Function that suggests other settings for a run whose noise outweighs its votes."""


def make_inputs(
    config: RunConfig, data: Dataset, facts: DatasetFacts, stages: Stages, clock: StageTimer, ledger: Ledger | None
) -> MethodInputs:
    """PRIVATE. Make the inputs of the method's ``prepare``."""
    return MethodInputs(
        records=data.private,
        facts=facts,
        seed=config.seed,
        device=config.device,
        executor=config.executor,
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
        stages: Display of progress.
        clock: Timer of the stages.
        exit_stack: Stack of the resources that are closed with the run.
        budget: Budget of the account. None if nothing is charged.
        reused: Earlier or interrupted release that the run continues from. None if the run makes a new release.
        reservation_ids: Ids of the reservations that this run has made.
        owner: Statements of the owner of the data.
        forecast: Warning, from public values, that labels will be mostly noise. None if no warning is due.
        unfinished_call: Note by which the same call finds this run again after an interruption. None if the call
            cannot be resumed.
        has_private_folder: Whether the run writes files for the owner of the data.
        prepared: PRIVATE. Method that answered in this run. None before a release, and for a reused release.
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
        cls, config: RunConfig, clock: StageTimer | None = None, format_alternative: AlternativeFormatter | None = None
    ) -> Iterator[Self]:
        """Load the data, check the choices, lock the folder of the run, and open the account.

        Args:
            config: Choices of the run.
            clock: Timer of the stages. None to start a new timer.
            format_alternative: Function that suggests settings if noise outweighs the votes. None for general advice.

        Raises:
            ValueError: A choice cannot work. Nothing has been charged or trained.
            BudgetExceeded: The account's cap does not admit this run.
        """
        clock = StageTimer() if clock is None else clock
        with Stages(quiet=config.quiet, callback=config.callback) as stages, contextlib.ExitStack() as exit_stack:
            exit_stack.enter_context(deterministic_mode(config.device))
            with clock("data"):
                splits = DataSplits.from_config(config, stages)
            facts = DatasetFacts.from_dataset(splits.data, config.partition)
            config = config.complete(facts, stages)
            exit_stack.enter_context(explain_interrupts(config.root, facts.spec.name))
            owner = owner_file.read(config.root, facts.spec.name)
            config.validate(facts)
            planned_events = config.privacy_events(facts)
            reused = unfinished_call = forecast = None
            if config.labels is None:
                with open_existing_ledger(config.root) or contextlib.nullcontext() as existing_ledger:
                    config.method.check_stored(make_inputs(config, splits.data, facts, stages, clock, existing_ledger))
                    _check_new_account_cap(config, facts.spec.name, planned_events, _read_caps(existing_ledger))
                if (forecast := config.method.format_noise_warning(facts)) is not None:
                    forecast += f" {NOISE_ADVICE if format_alternative is None else format_alternative(config, facts)}"
                unfinished_call = _make_unfinished_call(config, facts, splits.all_private)
                config, reused = _resume_call(config, facts, unfinished_call, stages)
                exit_stack.enter_context(_run_folder_lock(config))
                ledger = exit_stack.enter_context(open_ledger(config.root))
            else:
                ledger, reused = exit_stack.enter_context(_open_reused_release(config, facts))
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
            run._open_budget(planned_events)
            if forecast is not None:
                stages.print_message(forecast)
            if text := format_size_warning(config.private_test, facts.spec.nominal_size or facts.num_units):
                stages.print_message(text)
            yield run

    @classmethod
    @contextlib.contextmanager
    def open_uncharged(cls, config: RunConfig, data: Dataset, clock: StageTimer) -> Iterator[Self]:
        """Open a run that charges nothing, to train teachers or a student of an earlier release."""
        create_private_folder(config.root, "store")
        with (
            open_ledger(config.root) as ledger,
            Stages(quiet=config.quiet, callback=config.callback) as stages,
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
    def open_account(cls, config: RunConfig, splits: DataSplits, planned_events: tuple[PrivacyEvent, ...]) -> Budget:
        """Open the account of these records, for releases that span calls and processes (``Spending.suspend``).

        The caller closes the ledger of the budget.
        """
        create_private_folder(config.root, "store")
        fingerprint = config.method.compute_fingerprint(TeacherStore(config.root), splits.all_private)
        return _open_account(config, open_ledger(config.root), splits, planned_events, fingerprint)

    def _open_budget(self, planned_events: tuple[PrivacyEvent, ...]) -> None:
        """Open the account if anything is charged, and create the owner's folder."""
        config, store, records = self.config, TeacherStore(self.config.root), self.splits.all_private
        if planned_events:
            if config.labels is None:
                fingerprint = config.method.compute_fingerprint(store, records)
            else:
                fingerprint = store.compute_content_fingerprint(records)
            self.budget = _open_account(config, self.ledger, self.splits, planned_events, fingerprint)
            if not self.reservation_ids:
                self.budget.check_events(planned_events)
        if self.has_private_folder:
            create_private_folder(self.private_dir)  # now, so that a full disk stops the run before anything is charged

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
        """PRIVATE. Writer of the owner's TensorBoard. None if the run writes no files for the owner."""
        if not self.has_private_folder:
            return None
        create_private_folder(self.private_dir)
        return self.exit_stack.enter_context(contextlib.closing(PrivateWriter(self.private_dir / "tensorboard")))

    @functools.cached_property
    def search(self) -> NeighborSearch:
        """Search for the neighbors of public points, which all stages of the run share."""
        return NeighborSearch(self.stages)

    def make_inputs(self) -> MethodInputs:
        """PRIVATE. Make the inputs of the method's ``prepare``, with logging into the owner's TensorBoard."""
        inputs = make_inputs(self.config, self.splits.data, self.facts, self.stages, self.clock, self.ledger)
        inputs = replace(inputs, check_budget=self.check_budget, search=self.search)
        if self.private_writer is None:
            return inputs
        return replace(inputs, log=self.private_writer.log, log_losses=self.private_writer.log_losses)

    def check_budget(self) -> None:
        """Check that the account admits everything that the run charges.

        Raises:
            BudgetExceeded: The charges exceed the cap.
            ValueError: The account has other terms.
        """
        if self.budget is not None:
            self.budget.check_events(self.config.privacy_events(self.facts))

    def finish(self) -> None:
        """Record that the call has ended, so that the same call makes a new release. The run must be closed before."""
        if self.unfinished_call is not None:
            self.unfinished_call.end()


# ---- the account ----------------------------------------------------------------------------------------------------


def _open_account(
    config: RunConfig, ledger: Ledger, splits: DataSplits, planned_events: tuple[PrivacyEvent, ...], fingerprint: str
) -> Budget:
    """Open the account of a data set, or check that its terms are those of this run.

    ``planned_events`` are all events that the run charges, and ``fingerprint`` is that of the records, or of votes in
    their place.

    Raises:
        ValueError: The account has other terms, was charged in another ledger, or its records are charged to another
            account; or it is new and its cap would refuse this run.
    """
    name, private, privacy, kind = splits.data.spec.name, splits.all_private, config.privacy, config.method.noise
    store = TeacherStore(config.root)
    _check_same_ledger(store, name, ledger)
    records = store.hash_records(private) if len(private) else None
    if not privacy.allow_duplicate_account:
        _check_duplicate_account(store, name, records, fingerprint, ledger)
    cap_by_account = _read_caps(ledger)
    _check_new_account_cap(config, name, planned_events, cap_by_account)
    cap = privacy.budget_epsilon
    terms: dict[str, Any] = {"delta": privacy.delta, "adjacency": config.partition.adjacency, "unit": private.unit}
    terms["held_out"] = splits.held_out
    ledger.open_account(
        name,
        budget_epsilon=cap_by_account.get(name, privacy.opening_budget) if cap is None else cap,
        planned_events=planned_events,
        noise=kind,
        delta_reserve=privacy.delta_reserve,
        filter=privacy.filter,
        **terms,
    )
    return Budget(
        ledger=ledger,
        account=name,
        fingerprint=fingerprint,
        run=config.folder.name,
        kind=kind,
        insecure_seed=privacy.insecure_noise_seed,
        first_charge_only=privacy.first_charge_only,
        on_new_head=functools.partial(store.record_charge, name, records),
        **terms,
    )


def _read_caps(ledger: Ledger | None) -> dict[str, float]:
    """Return the cap of each charged account, by name. The terms of the other accounts are not fixed yet."""
    accounts = () if ledger is None else ledger.list_accounts()
    return {account.name: account.budget_epsilon for account in accounts if account.is_charged}


def _check_new_account_cap(
    config: RunConfig, name: str, planned_events: tuple[PrivacyEvent, ...], cap_by_account: Mapping[str, float]
) -> None:
    """Raise ValueError for a new account whose cap would refuse this run, because the first charge fixes the cap."""
    if name in cap_by_account:
        return
    privacy = config.privacy
    key, cap = "budget_epsilon", privacy.budget_epsilon
    if cap is None:
        key, cap = "opening_budget", privacy.opening_budget
    account_filter = PrivacyFilter.from_planned_events(
        planned_events, epsilon=cap, delta=privacy.delta, delta_reserve=privacy.delta_reserve, kind=privacy.filter
    )
    cost = account_filter.compute_cost(account_filter.choose_failures(planned_events, NO_COST))
    if cost.delta > account_filter.delta_reserve:
        problem = f"is less than {cost.delta:.3g}, the probability with which this run alone may fail"
        fix = f"Reserve more when the account opens, but less than privacy.delta={privacy.delta:g}, or raise both."
        raise checks.error("privacy.delta_reserve", account_filter.delta_reserve, problem, fix)
    if not account_filter.admits(NO_COST, cost):
        guarantee = accounting.compute_guarantee(planned_events, privacy.delta)
        epsilon = guarantee.epsilon
        problem = f"this run alone may cost epsilon {epsilon:.6g} at delta {privacy.delta:g} ({guarantee.route})"
        problem += ", and more by the filter of a new account" * (epsilon <= cap)
        raise checks.error(f"privacy.{key}", cap, problem, f"{config.method.cost_advice}, or open with a larger cap.")


def _check_same_ledger(store: TeacherStore, name: str, ledger: Ledger) -> None:
    """Raise ValueError if a file of the store holds the hash of an entry of the account that the ledger lacks."""
    for file, head in store.find_ledger_heads(name).items():
        if not ledger.contains_head(head):
            problem = f"was charged in another privacy ledger than {ledger.place}: {file} remembers one of its entries"
            fix = "Restore the ledger.sqlite that lay beside the teachers, or its newest backup, or set PATE_LEDGER."
            raise checks.error("dataset.name", name, problem, fix)


def _check_duplicate_account(
    store: TeacherStore, name: str, records: RecordHashes | None, fingerprint: str, ledger: Ledger
) -> None:
    """Raise ValueError if these records are charged to another account."""
    others = [account.name for account in ledger.list_accounts() if account.name != name]
    matches = (n for n in others if any(c.fingerprint == fingerprint for c in ledger.get_charges(n).values()))
    if duplicate := next(matches, None) or store.find_account_of_same_units(records, others):
        problem = f"shares a tenth or more of the units with account {duplicate!r}, which was charged"
        problem += ", and the epsilon of either account does not cover both"
        fix = f"Use account {duplicate!r}. If a second account is meant, set privacy.allow_duplicate_account=true"
        fix += ", and add both epsilons yourself."
        raise checks.error("account", name, problem, fix)


# ---- the folder of the run ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _run_folder_lock(config: RunConfig) -> Iterator[None]:
    """Lock the folder of the run for this process, and remove the unfinished files of killed runs from the store.

    Raises:
        ValueError: Another run writes into the folder, or has finished there.
    """
    create_private_folder(config.root, "store")
    store = TeacherStore(config.root)
    with contextlib.ExitStack() as exit_stack:
        with store.lock():  # without this lock, another process could take a run that begins for a killed one
            run_folders.remove_killed_run_files(config.root)  # before this run takes its lock, for which it would wait
            exit_stack.enter_context(run_folders.hold_run_folder(config.folder))
        if (config.folder / "release" / "summary.json").exists():
            release_store.check_unused_folder(config.folder)
        store.sweep()
        release_store.discard_incomplete(config.folder)
        yield


@contextlib.contextmanager
def _open_reused_release(config: RunConfig, facts: DatasetFacts) -> Iterator[tuple[Ledger, WrittenRelease]]:
    """Open the ledger, read the release that ``config.labels`` names, and lock the folder of the run."""
    assert config.labels is not None
    release_folder = release_store.find_release(config.root, config.labels)
    with open_ledger(config.root, create=False) as ledger:
        written = release_store.read(release_folder, facts.pool, facts.spec, ledger)
        with _run_folder_lock(config):
            release_store.check_unused_folder(config.folder, written.release.id)
            yield ledger, written


def _make_unfinished_call(config: RunConfig, facts: DatasetFacts, all_private: PrivateRecords) -> UnfinishedCall | None:
    """PRIVATE. Make the note of this call. None if its noise is seeded, or if it makes more than one reservation."""
    privacy, store = config.privacy, TeacherStore(config.root)
    if privacy.insecure_noise_seed is not None or config.selection is not None:
        return None
    choices = {
        "method": repr(config.method),
        "private_test": repr(config.test_mechanism),
        "partition": repr(config.partition),
        "seed": config.seed,
        "pool": compute_tensor_digest(facts.pool.x),
        "delta": privacy.delta,
    }

    @functools.cache
    def compute_fingerprint() -> str:
        return config.method.compute_call_fingerprint(store, all_private)

    return UnfinishedCall(store, facts.spec.name, choices, compute_fingerprint)


def _resume_call(
    config: RunConfig, facts: DatasetFacts, unfinished_call: UnfinishedCall | None, stages: Stages
) -> tuple[RunConfig, WrittenRelease | None]:
    """PRIVATE. Find the same call that was interrupted; return the configuration with its folder, and its release."""
    if unfinished_call is None:
        return config, None
    if config.method.releases_model:
        found_model = unfinished_call.find_model()
        if found_model is None:
            return config, None
        folder, release = found_model
        digests: dict[str, str] = {}
        if (first_answers := release_store.read_first_answers(folder / "release")) is not None:
            config = replace(config, method=config.method.adapt(first_answers, facts))
            digests = release_store.write_first_answers(folder / "release", first_answers)
        written = WrittenRelease(release=release, record=make_record(config, facts) | digests)
    else:
        interruption = unfinished_call.find()
        if interruption is None:
            return config, None
        folder, committed_ids = interruption
        with open_ledger(config.root, create=False) as ledger:
            written = release_store.read(folder / "release", facts.pool, facts.spec, ledger)
        if written.release.id not in committed_ids:
            return config, None
    message = f"Finishing the interrupted release {written.release.id}. It is paid for, and costs nothing more"
    message += "." if not config.private_test else ", but for its test on held-out units."
    stages.print_message(message)
    return replace(config, folder=folder), written


def make_record(config: RunConfig, facts: DatasetFacts) -> dict[str, Any]:
    """Make the fields of ``release.json`` that hold the public configuration, before any answer is known."""
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
