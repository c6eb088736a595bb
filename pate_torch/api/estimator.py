"""What the estimators of scikit-learn's kind share: the account that a fit charges, its terms, and what is printed."""

from __future__ import annotations

import json
import logging
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import Any

from sklearn.base import BaseEstimator

from pate_torch.api.pate import PATE, annotate_disk_error
from pate_torch.config import RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.core.formatting import format_delta
from pate_torch.core.progress import Callback, check_callback
from pate_torch.methods.base import PrivateMethod
from pate_torch.privacy.accounts import Charge, make_account_charged_error
from pate_torch.privacy.ledger import find_account
from pate_torch.privacy.partition import PARTITIONS
from pate_torch.privacy.records import Dataset
from pate_torch.release.charges import explain_interrupts, format_charges
from pate_torch.release.store import UnfinishedCall
from pate_torch.session import ReleaseStopped
from pate_torch.teachers.store import TeacherStore

DEFAULT_CAP_EPSILON = 10.0
"""Epsilon cap of a new account without ``cap``, unless the fit costs more: then the cap is the cost of the fit."""


@dataclass(eq=False, repr=False)
class AccountEstimator(BaseEstimator):
    """Base class of estimators whose fit charges an account. ``PATEClassifier`` explains the arguments."""

    epsilon: float = 1.0
    _: KW_ONLY
    account: str | None = None
    cap: float | None = None
    delta: float = 1e-5
    adjacency: str = "add_remove"
    allow_refit: bool = False
    chosen_by: str | None = None
    allow_duplicate_account: bool = False
    spend_anyway: bool = False
    home: Path | str | None = None
    random_state: int | None = 0
    verbose: bool = True
    callback: Callback | None = None

    def _check_account(self) -> None:
        if self.account is None:
            problem = "must name the private data set, whose account pays for every release"
            raise checks.error("account", None, problem, f'For example {type(self).__name__}(account="clinic").')
        checks.positive("epsilon", self.epsilon)
        for key in ("allow_refit", "allow_duplicate_account", "spend_anyway", "verbose"):
            checks.boolean(key, getattr(self, key))
        check_callback(self.callback)

    @property
    def _home(self) -> Path:
        return run_folders.find_home(self.home)

    def _draw_seed(self) -> int:
        seed = secrets.randbelow(1 << 31) if self.random_state is None else self.random_state
        return checks.integer("random_state", seed, low=0)

    @contextmanager
    def _explain_errors(self) -> Iterator[None]:
        """Tell the owner what was charged if the fit is interrupted or stops after its first answers."""
        home, account, can_repeat = self._home, str(self.account), self.random_state is not None
        with annotate_disk_error(home, account), explain_interrupts(home, account, can_repeat=can_repeat):
            try:
                yield
            except ReleaseStopped as stopped:
                forecast, reservation_id = stopped.forecast, stopped.reservation_id
                self._announce_charge(lambda id_, _: id_ == reservation_id)
                fix = f"Pass a larger epsilon (it is {self.epsilon:g}), add records, or pass spend_anyway=True. "
                fix += "Records without a known class or a readable point do not count. "
                fix += "Another fit is a new charge, and needs allow_refit=True as well."
                raise ReleaseStopped(forecast, reservation_id, fix) from None

    def _choose_cap(self) -> float | None:
        """Return the cap for the charge, or None to keep the cap of a charged account.

        Raises:
            ValueError: The account was charged, the call was not interrupted before, and ``allow_refit`` is not set.
                The ledger checks this again at the charge.
        """
        home, name = self._home, str(self.account)
        cap, account = None if self.cap is None else checks.positive("cap", self.cap), find_account(home, name)
        may_charge = self.allow_refit or bool(UnfinishedCall.list_runs(TeacherStore(home), name))
        if account is not None and account.is_charged and not may_charge:
            raise make_account_charged_error(account, self.epsilon)
        is_new = account is None or not account.is_charged
        return max(DEFAULT_CAP_EPSILON, self.epsilon) if cap is None and is_new else cap

    def _make_pate(self, teacher: Any, *, classes: Any, unit: str, seed: int, **options: Any) -> PATE:
        """Make the ``PATE`` object of the account. Raise ValueError before training if it may not be charged."""
        return PATE(
            str(self.account),
            classes=classes,
            delta=checks.delta("delta", self.delta),
            budget_epsilon=self._choose_cap(),
            teacher=teacher,
            first_charge_only=not self.allow_refit,
            allow_duplicate_account=self.allow_duplicate_account,
            spend_anyway=self.spend_anyway,
            chosen_by=self.chosen_by,
            home=self._home,
            partition=PARTITIONS[checks.one_of("adjacency", self.adjacency, PARTITIONS)],
            unit=unit,
            seed=seed,
            verbose=self.verbose,
            callback=self.callback,
            **options,
        )

    def _make_model_config(self, pate: PATE, data: Dataset, size: int | None, epsilon: float) -> RunConfig:
        """Make the configuration of a release of a model by ``pate.teacher``, calibrated to this epsilon."""
        assert isinstance(pate.teacher, PrivateMethod)
        config = pate.make_config(replace(data, spec=replace(data.spec, nominal_size=size)), pate.teacher)
        return replace(config, privacy=replace(config.privacy, target_epsilon=epsilon))

    def _set_release(self, folder: Path) -> None:
        """Set ``release_``, ``privacy_`` and ``total_``, and announce the charges of the run."""
        self.release_ = folder
        self.privacy_: Mapping[str, Any] = json.loads((folder / "privacy.json").read_text())
        self._announce_charge(lambda _, charge: charge.run == folder.parent.name)

    def _format_terms(self, unit: str) -> str:
        terms = f"{self.adjacency}, unit {unit.partition(':')[0]}"
        return f"{type(self).__name__}, epsilon {self.epsilon:g} at delta {format_delta(self.delta)} ({terms})"

    def _announce_charge(self, is_included: Callable[[str, Charge], bool]) -> None:
        """Set ``total_``, and announce it with the included charges, which an interrupted fit may have paid."""
        account = find_account(self._home, str(self.account))
        assert account is not None
        self.total_ = account.guarantee
        charges = [charge for id_, charge in account.charges.items() if is_included(id_, charge)]
        self._announce(f"  {format_charges(self._home, account, charges)}")

    def _announce(self, line: str) -> None:
        """Log a line and, if ``verbose``, print it. The line may depend on public facts and on the ledger alone."""
        logging.getLogger(type(self).__module__).info(line.strip())
        if self.verbose:
            print(line)
