"""What a run works with: its folders, the account that it charges, and how far it has come.

A choice that cannot work is refused before the run's folder is held; what the account's cap does not admit, before
anything is trained or drawn.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.config import RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.core.device import deterministic_mode
from pate_torch.core.files import compute_tensor_digest, create_private_folder
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.features.contrastive import learn_encoder
from pate_torch.methods.base import PreparedMethod
from pate_torch.planning import feasibility
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Dataset, PrivateRecords, Release
from pate_torch.privacy.sensitive import CellHistogram, Votes
from pate_torch.privacy.units import drop_unusable
from pate_torch.release import owner_file
from pate_torch.release import store as release_store
from pate_torch.release.private_writer import PrivateWriter
from pate_torch.release.report import OwnerFacts
from pate_torch.release.unfinished_calls import UnfinishedCall
from pate_torch.students.base import Student
from pate_torch.teachers.account_records import AccountRecords, RecordHashes
from pate_torch.teachers.store import TeacherStore


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataSplits:
    """PRIVATE. The data, split as the configuration says.

    Attributes:
        data: Without the private records that are held out.
        all_private: All private records, whose account is charged.
        validation: Those held out for choosing a student; None: none are.
        membership_holdout: Those held out for the owner's membership test; None: none are.
    """

    data: Dataset
    all_private: PrivateRecords
    validation: PrivateRecords | None = None
    membership_holdout: PrivateRecords | None = None

    @classmethod
    def from_config(cls, config: RunConfig, stages: Stages | None = None) -> DataSplits:
        """Load the data set and split it."""
        source, validation, membership_holdout = config.dataset, None, None
        data = source.load(stages) if isinstance(source, EncodedDataset) else source.load()
        data = drop_unusable(data, config.partition.adjacency)
        all_private = data.private
        if config.selection is not None:
            data, validation = config.selection.hold_out(data, config.partition.adjacency, config.seed)
        if config.membership is not None:
            data, membership_holdout = config.membership.hold_out(data, config.partition.adjacency, config.seed)
        return cls(data=data, all_private=all_private, validation=validation, membership_holdout=membership_holdout)


@dataclass(kw_only=True, eq=False, repr=False)
class RunContext:
    """PRIVATE. One run under way.

    Attributes:
        config: Its choices, completed for its data.
        splits: Its data.
        ledger: The ledger that holds the account.
        stages: Reports progress, and times every stage.
        budget: The account's budget; None where nothing is charged.
        reused_release: The release that is learnt from in place of new labels; None: labels are to be bought.
        reservation_ids: The reservations that this run has made.
        owner: What only the owner can say of the data, for the statement.
        forecast: A forecast of the labels from public values, where noise outweighs the votes.
        exit_stack: Closes with the run; None outside a run's folder.
        unfinished_call: By which the same call finds this run again if it is interrupted; None: nothing is bought.
    """

    config: RunConfig
    splits: DataSplits
    ledger: Ledger
    stages: Stages
    clock: StageTimer
    budget: Budget | None = None
    reused_release: LabelRelease | None = None
    reservation_ids: list[str] = field(default_factory=list)
    owner: OwnerFacts = field(default_factory=OwnerFacts)
    forecast: str | None = None
    exit_stack: contextlib.ExitStack | None = None
    unfinished_call: UnfinishedCall | None = None

    @property
    def data(self) -> Dataset:
        """PRIVATE. The data without the records that are held out."""
        return self.splits.data

    @property
    def all_private(self) -> PrivateRecords:
        """PRIVATE. All private records, with those that are held out."""
        return self.splits.all_private

    @property
    def store(self) -> TeacherStore:
        """PRIVATE. The teachers under the run's root."""
        return TeacherStore(self.config.root)

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
        """PRIVATE. The run's TensorBoard; None outside a run's folder."""
        if self.exit_stack is None:
            return None
        create_private_folder(self.private_dir)
        return self.exit_stack.enter_context(contextlib.closing(PrivateWriter(self.private_dir / "tensorboard")))

    def check_budget(self) -> None:
        """Refuse a run whose release could not be charged.

        Raises:
            BudgetExceeded: The cap does not admit it.
            ValueError: It does not keep the account's terms.
        """
        if self.budget is not None:
            self.budget.check_events(self.config.privacy_events(self.data.spec.num_classes))

    def finish(self) -> None:
        """Note that the call has ended: the same call makes a new release from now on."""
        if self.unfinished_call is not None:
            self.unfinished_call.end()

    def learn_encoder(self) -> nn.Module | None:
        """The encoder of the public points, learnt from them alone; None: the points are taken as they are."""
        config = self.config
        return learn_encoder(config.features, self.data, config.seed, config.device, self.stages)

    @classmethod
    @contextlib.contextmanager
    def open(
        cls,
        config: RunConfig,
        clock: StageTimer | None = None,
        format_alternative: feasibility.AlternativeFormatter | None = None,
    ) -> Iterator[RunContext]:
        """Load the data, refuse what cannot work, hold the run's folder and open the account.

        Args:
            config: The run's choices.
            clock: Times the stages; None: a new one.
            format_alternative: Says what to ask for where noise outweighs the votes; None: settings of train.py.

        Raises:
            ValueError: A choice cannot work; nothing has been charged or trained.
            BudgetExceeded: The account's cap does not admit this run.
        """
        clock = StageTimer() if clock is None else clock
        with Stages(quiet=config.quiet) as stages, contextlib.ExitStack() as exit_stack:
            exit_stack.enter_context(deterministic_mode(config.device))
            with clock("data"):
                splits = DataSplits.from_config(config, stages)
            config = config.adapt_to_data(splits.data, stages)
            owner = owner_file.read(config.root, splits.data.spec.name)
            planned_events = config.privacy_events(splits.data.spec.num_classes)
            reused_release = forecast = unfinished_call = None
            if config.labels is None:
                config.check_data(splits.data)
                cap_by_account: dict[str, float] = {}
                if config.ledger_path.exists():  # which a refusal does not leave behind
                    with Ledger(config.ledger_path) as ledger:
                        cap_by_account = _read_caps(ledger)
                check_new_account_cap(config, splits.data.spec.name, planned_events, cap_by_account)
                forecast = feasibility.forecast_warning(config, splits.data, config.mechanism, format_alternative)
                unfinished_call = _make_unfinished_call(config, splits)
                config, reused_release = _resume_call(config, splits.data, unfinished_call, stages)
                exit_stack.enter_context(run_folder_lock(config))
                ledger = exit_stack.enter_context(Ledger(config.ledger_path))
            else:
                run_folders.find_release(config.root, config.labels)
                config.check_data(splits.data)
                ledger = exit_stack.enter_context(Ledger(config.ledger_path, create=False))
                release_parts = release_store.read(
                    config.root, config.labels, splits.data.pool, splits.data.spec, ledger
                )
                reused_release = LabelRelease(labels=release_parts[0], facts=release_parts[1], guide=release_parts[2])
                exit_stack.enter_context(run_folder_lock(config))
                release_store.check_unused_folder(config.folder, reused_release.labels.id)
            run = cls(
                config=config,
                splits=splits,
                ledger=ledger,
                stages=stages,
                clock=clock,
                reused_release=reused_release,
                owner=owner,
                forecast=forecast,
                exit_stack=exit_stack,
                unfinished_call=unfinished_call,
                reservation_ids=[]
                if reused_release is None or config.labels is not None
                else [reused_release.labels.id],
            )
            if planned_events:
                record_fingerprint = run.store.compute_content_fingerprint(run.all_private)
                fingerprint = (
                    record_fingerprint
                    if config.labels
                    else config.method.compute_fingerprint(run.store, run.all_private)
                )
                run.budget = open_budget(config, ledger, splits.data, planned_events, fingerprint)
                if not run.reservation_ids:
                    run.budget.check_events(planned_events)
            if forecast is not None:
                stages.print_message(forecast)
            if config.trains_student:
                create_private_folder(run.private_dir)  # a closed disk is found out before anything is charged
            yield run


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class LabelRelease:
    """Labels, bought in this run or found from an earlier one.

    Attributes:
        labels: Releasable: the questions, and what was answered.
        facts: Releasable: ``release.json``.
        guide: Releasable: the student of all rounds but the last, where the student that is published goes on from it.
        method: PRIVATE. Who answered; None: the method is not here.
        raw_votes: PRIVATE. The votes behind the answers, in one table; None: they were not given in this run.
    """

    labels: Release
    facts: dict[str, Any]
    guide: Student | None = None
    method: PreparedMethod | None = None
    raw_votes: Votes | CellHistogram | None = None


@contextlib.contextmanager
def run_folder_lock(config: RunConfig) -> Iterator[None]:
    """Lock the run's folder for this process, and clear the store of what killed runs left half written.

    Raises:
        ValueError: Another run writes into the folder, or has finished there.
    """
    create_private_folder(config.root)
    store = TeacherStore(config.root)
    with contextlib.ExitStack() as exit_stack:
        with store.lock():  # so that a run that begins is not taken for one that was killed
            exit_stack.enter_context(run_folders.hold(config.folder))
            run_folders.remove_killed_run_files(config.root)
        if (config.folder / "release" / "summary.json").exists():
            release_store.check_unused_folder(config.folder)
        store.sweep()
        release_store.discard_incomplete(config.folder)
        yield


def _make_unfinished_call(config: RunConfig, splits: DataSplits) -> UnfinishedCall | None:
    """PRIVATE. This call, by all that decides its labels; None where seeded noise is no release, or it buys more."""
    if (
        config.privacy.insecure_noise_seed is not None
        or config.private_epsilon is not None
        or config.selection is not None
    ):
        return None
    store, name = TeacherStore(config.root), splits.data.spec.name
    keys = ("method", "mechanism", "query", "features", "guide_student", "partition", "teacher", "seed")
    facts: dict[str, Any] = {key: repr(getattr(config, key)) for key in (*keys, "num_queries", "num_rounds")}
    facts |= {
        "pool": compute_tensor_digest(splits.data.pool.x),
        "delta": config.privacy.delta,
        "noise": config.privacy.noise,
    }

    def compute_fingerprint() -> str:
        return config.method.compute_fingerprint(store, splits.all_private) + store.compute_fingerprint(
            splits.all_private
        )

    return UnfinishedCall(store, name, facts, compute_fingerprint)


def _resume_call(
    config: RunConfig, data: Dataset, unfinished_call: UnfinishedCall | None, stages: Stages
) -> tuple[RunConfig, LabelRelease | None]:
    """PRIVATE. The configuration in the folder of the same call that was interrupted, and the labels that it bought."""
    interruption = None if unfinished_call is None else unfinished_call.find(config.ledger_path)
    if interruption is None:
        return config, None
    folder, committed_ids = interruption
    with Ledger(config.ledger_path, create=False) as ledger:
        labels, facts, guide = release_store.read_folder(folder / "release", data.pool, data.spec, ledger)
    if labels.id not in committed_ids:
        return config, None
    stages.print_message(f"Finishing the interrupted release {labels.id}. It is paid for, and costs nothing more.")
    return replace(config, folder=folder), LabelRelease(labels=labels, facts=facts, guide=guide)


# ---- the account ---------------------------------------------------------------------------------------------------


def open_budget(
    config: RunConfig,
    ledger: Ledger,
    data: Dataset,
    planned_events: tuple[PrivacyEvent, ...],
    fingerprint: str,
    *,
    kind: str | None = None,
) -> Budget:
    """Open the data set's account, or meet its terms; refuse now what could not be charged later.

    Args:
        config: The run's choices.
        ledger: The ledger that holds the account.
        data: Whose account it is.
        planned_events: Everything that is to be charged.
        fingerprint: Content fingerprint of the records, or of votes in their place.
        kind: Kind of noise; None: the configuration's.
    """
    name, privacy = data.spec.name, config.privacy
    kind = privacy.noise if kind is None else kind
    _check_same_ledger(config, name, ledger)
    store = TeacherStore(config.root)
    records = AccountRecords(store, name, RecordHashes.from_data(data.private, store) if len(data.private) else None)
    _check_duplicate_account(config, records, fingerprint, ledger)
    cap_by_account = _read_caps(ledger)
    check_new_account_cap(config, name, planned_events, cap_by_account)
    cap = privacy.budget_epsilon
    ledger.open_account(
        name,
        budget_epsilon=cap_by_account.get(name, privacy.opening_budget) if cap is None else cap,
        delta=privacy.delta,
        adjacency=config.partition.adjacency,
        unit=data.private.unit,
        planned_events=planned_events,
        noise=kind,
    )
    return Budget(
        ledger=ledger,
        account=name,
        delta=privacy.delta,
        adjacency=config.partition.adjacency,
        unit=data.private.unit,
        fingerprint=fingerprint,
        run=config.folder.name,
        kind=kind,
        insecure_seed=privacy.insecure_noise_seed,
        first_charge_only=privacy.first_charge_only,
        on_charge=records.record_ledger_head,
    )


def _read_caps(ledger: Ledger) -> dict[str, float]:
    """The caps of the accounts that were charged: the others have no fixed terms."""
    return {account.name: account.budget_epsilon for account in ledger.list_accounts() if account.is_charged}


def check_new_account_cap(
    config: RunConfig, name: str, planned_events: Iterable[PrivacyEvent], cap_by_account: Mapping[str, float]
) -> None:
    """Refuse to open an account for a run that its own cap would refuse: a slip would fix the cap for good.

    Args:
        config: The run's choices.
        name: Name of the account.
        planned_events: Everything that is to be charged.
        cap_by_account: The accounts that exist, by name.

    Raises:
        ValueError: The account is new and the run passes its cap.
    """
    if name in cap_by_account:
        return
    planned_events, privacy = tuple(planned_events), config.privacy
    key = "opening_budget" if privacy.budget_epsilon is None else "budget_epsilon"
    budget = getattr(privacy, key)
    if not PrivacyFilter.can_admit(planned_events, epsilon=budget, delta=privacy.delta):
        guarantee = accounting.compute_guarantee(planned_events, privacy.delta)
        raise checks.error(
            f"privacy.{key}",
            budget,
            f"this run alone may cost epsilon {guarantee.epsilon:.6g} at delta {privacy.delta:g} ({guarantee.route})",
            "Ask fewer questions (num_queries), add noise (mechanism.sigma), or open with a larger cap.",
        )


def _check_same_ledger(config: RunConfig, name: str, ledger: Ledger) -> None:
    """Raise ValueError where something under this root remembers entries of the account that the ledger lacks."""
    for file, head in TeacherStore(config.root).find_ledger_heads(name).items():
        if not ledger.contains_head(head):
            raise checks.error(
                "dataset.name",
                name,
                f"was charged in another privacy ledger than {ledger.path}: {file} remembers an entry that it lacks",
                "Bring back the ledger.sqlite (or its newest backup) that lay beside the teachers: it remembers what "
                "was released.",
            )


def _check_duplicate_account(config: RunConfig, records: AccountRecords, fingerprint: str, ledger: Ledger) -> None:
    """Raise ValueError where these records are charged to another account, unless the owner says they may be."""
    if config.privacy.allow_duplicate_account:
        return
    other_accounts = [account.name for account in ledger.list_accounts() if account.name != records.account]
    accounts_of_same_records = (
        n for n in other_accounts if any(c.fingerprint == fingerprint for c in ledger.get_charges(n).values())
    )
    if duplicate := next(accounts_of_same_records, None) or records.find_duplicate(other_accounts):
        problem = (
            f"shares a tenth or more of the units with account {duplicate!r}, which was charged: no total covers both"
        )
        fix = f"Use account {duplicate!r}; or say allow_duplicate_account=True (privacy.allow_duplicate_account=true), "
        fix += "and add both epsilons yourself."
        raise checks.error("account", records.account, problem, fix)
