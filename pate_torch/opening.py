"""The steps that come before a release: the data, the account, the run's folder, and a call that was interrupted."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pate_torch.accounting import accountant as accounting
from pate_torch.accounting.events import PrivacyEvent
from pate_torch.accounting.filters import PrivacyFilter
from pate_torch.config import RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.core.files import compute_tensor_digest, create_private_folder
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.methods.base import MethodInputs, ModelRelease
from pate_torch.privacy.budget import Budget
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.privacy.units import drop_unusable
from pate_torch.release import store as release_store
from pate_torch.release.store import WrittenRelease
from pate_torch.release.unfinished_calls import UnfinishedCall
from pate_torch.students.store import load as load_student
from pate_torch.teachers.store import RecordHashes, TeacherStore


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DataSplits:
    """PRIVATE. The data of a run, and the records that it holds out.

    Attributes:
        data: Data without the private records that are held out.
        all_private: All private records, whose account is charged.
        validation: Records held out for choosing a student; None if none are.
        membership_holdout: Records held out for the owner's membership test; None if none are.
    """

    data: Dataset
    all_private: PrivateRecords
    validation: PrivateRecords | None = None
    membership_holdout: PrivateRecords | None = None

    @classmethod
    def from_config(cls, config: RunConfig, stages: Stages) -> DataSplits:
        """Load the data set and split it as the configuration says."""
        source, validation, membership_holdout = config.dataset, None, None
        data = source.load(stages) if isinstance(source, EncodedDataset) else source.load()
        data = drop_unusable(data, config.partition.adjacency)
        all_private = data.private
        if config.selection is not None:
            data, validation = config.selection.hold_out(data, config.partition.adjacency, config.seed)
        if config.membership is not None and not config.method.releases_model:
            data, membership_holdout = config.membership.hold_out(data, config.partition.adjacency, config.seed)
        return cls(data=data, all_private=all_private, validation=validation, membership_holdout=membership_holdout)


def make_inputs(
    config: RunConfig,
    data: Dataset,
    facts: DatasetFacts,
    stages: Stages,
    clock: StageTimer,
    ledger: Ledger | None = None,
) -> MethodInputs:
    """PRIVATE. Make what a method is prepared from."""
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


# ---- the account ----------------------------------------------------------------------------------------------------


def open_budget(
    config: RunConfig, ledger: Ledger, data: Dataset, planned_events: tuple[PrivacyEvent, ...], fingerprint: str
) -> Budget:
    """Open the data set's account, or meet its terms; refuse now what could not be charged later.

    Args:
        config: The run's choices.
        ledger: The ledger that holds the account.
        data: The data whose records the account protects.
        planned_events: Everything that is to be charged.
        fingerprint: Content fingerprint of the records, or of votes in their place.

    Raises:
        ValueError: The account has other terms, was charged in another ledger, or its records are charged to another
            account.
    """
    name, privacy, kind = data.spec.name, config.privacy, config.method.noise
    store = TeacherStore(config.root)
    _check_same_ledger(store, name, ledger)
    records = store.hash_records(data.private) if len(data.private) else None
    if not privacy.allow_duplicate_account:
        _check_duplicate_account(store, name, records, fingerprint, ledger)
    cap_by_account = read_caps(ledger)
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
        on_charge=functools.partial(store.record_charge, name, records),
    )


def read_caps(ledger: Ledger | None) -> dict[str, float]:
    """The caps of the accounts that were charged, by name: the other accounts have no fixed terms."""
    if ledger is None:
        return {}
    return {account.name: account.budget_epsilon for account in ledger.list_accounts() if account.is_charged}


def check_new_account_cap(
    config: RunConfig, name: str, planned_events: Iterable[PrivacyEvent], cap_by_account: Mapping[str, float]
) -> None:
    """Raise ValueError for a new account whose cap would refuse this run: a slip would fix the cap for good."""
    if name in cap_by_account:
        return
    planned_events, privacy = tuple(planned_events), config.privacy
    key, cap = "budget_epsilon", privacy.budget_epsilon
    if cap is None:
        key, cap = "opening_budget", privacy.opening_budget
    if not PrivacyFilter.can_admit(planned_events, epsilon=cap, delta=privacy.delta):
        guarantee = accounting.compute_guarantee(planned_events, privacy.delta)
        problem = (
            f"this run alone may cost epsilon {guarantee.epsilon:.6g} at delta {privacy.delta:g} ({guarantee.route})"
        )
        raise checks.error(f"privacy.{key}", cap, problem, f"{config.method.price_advice}, or open with a larger cap.")


def _check_same_ledger(store: TeacherStore, name: str, ledger: Ledger) -> None:
    """Raise ValueError if something in the store remembers entries of the account that the ledger lacks."""
    for file, head in store.find_ledger_heads(name).items():
        if not ledger.contains_head(head):
            problem = f"was charged in another privacy ledger than {ledger.path}: {file} remembers an entry of that one"
            fix = "Bring back the ledger.sqlite (or its newest backup) that lay beside the teachers: it remembers what "
            raise checks.error("dataset.name", name, problem, f"{fix}was released.")


def _check_duplicate_account(
    store: TeacherStore, name: str, records: RecordHashes | None, fingerprint: str, ledger: Ledger
) -> None:
    """Raise ValueError if these records are charged to another account."""
    other_accounts = [account.name for account in ledger.list_accounts() if account.name != name]
    accounts_of_same_records = (
        n for n in other_accounts if any(c.fingerprint == fingerprint for c in ledger.get_charges(n).values())
    )
    if duplicate := next(accounts_of_same_records, None) or store.find_account_of_same_units(records, other_accounts):
        problem = (
            f"shares a tenth or more of the units with account {duplicate!r}, which was charged: no total covers both"
        )
        fix = f"Use account {duplicate!r}; or say allow_duplicate_account=True (privacy.allow_duplicate_account=true), "
        fix += "and add both epsilons yourself."
        raise checks.error("account", name, problem, fix)


# ---- the folder of the run ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def run_folder_lock(config: RunConfig) -> Iterator[None]:
    """Lock the run's folder for this process, and remove what killed runs left half written in the store.

    Raises:
        ValueError: Another run writes into the folder, or has finished there.
    """
    create_private_folder(config.root, "store")
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


@contextlib.contextmanager
def open_existing_ledger(path: Path) -> Iterator[Ledger | None]:
    """Open the ledger if there is one: a run that is refused creates none."""
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
    """PRIVATE. Make the note of this call; None if its noise is seeded, or if it charges more than one reservation."""
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
    """PRIVATE. Find the same call that was interrupted: the configuration in its folder, and what it released."""
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
    """Make what ``release.json`` holds beside the answers: public configuration, and ids drawn at random."""
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
