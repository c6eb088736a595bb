"""The only provider of noise for a release: it reserves the worst case in the ledger before it hands out noise.

    with budget.spend(events, mechanism="gaussian") as spending:   # check the terms, reserve the worst case
        answers = spending.accept(mechanism.release(votes, spending.noise, context))
        spending.record_cost(answers.events)
        ...                                                        # write the answers
                                                                   # commit, if no error was raised

If the block ends with an error, or the process dies, the worst case stays charged. No other module charges the
ledger. The only other noise source is ``DryRunNoise``, whose answers cannot be released.

A release that takes several calls is suspended by ``spending.suspend(state)``, with a hash of everything that is needed
to continue, and resumed by ``with budget.resume(spending.id, state) as spending``. Noise that the next call needs again
(``NoiseSource.state``, such as the threshold of a sparse vector) is stored on this machine, where alone the release can
be resumed, and the ledger stores its hash together with the state. Only the newest recorded state can be resumed, and
only once, because noise may be drawn after it. If that call does not record a new state, the worst case stays charged.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.progress import do_nothing
from pate_torch.privacy.accounts import PURPOSE_LABELS
from pate_torch.privacy.chain import check_own_process
from pate_torch.privacy.ledger import Ledger, Reservation
from pate_torch.privacy.noise import NoiseSource, check_delta, check_noise, load_noise_state, save_noise_state
from pate_torch.privacy.records import Answers, DryRunAnswers
from pate_torch.privacy.sensitive import Sensitivity

_LIBRARY_NOISE_PREFIX = "by "  # noise of the kind "by opacus" is drawn by this library


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """The terms under which a run charges an account. The ledger refuses terms that differ from those of the account.

    Attributes:
        fingerprint: Content fingerprint of the records, or of votes in their place.
        run: Name of the run's folder.
        kind: Kind of noise: "torch" (continuous), "discrete", or "by <library>" if a library draws the noise. An
            account admits one kind only. Secret bits come from the operating system for either kind.
        insecure_seed: Seed that makes noise repeatable and the run not private. None for secret noise.
        on_new_head: Function that stores the hash of the newest ledger entry outside the ledger, after each entry.
        first_charge_only: Whether a charge is refused if the account has any reservation.
        once: Beginning of ``run`` that no other charge of the account may have. Empty for no such rule.
        held_out: Id of the rule by which the records of this run leave out units for tests. Empty for no such rule.
    """

    ledger: Ledger
    account: str
    delta: float
    adjacency: str
    unit: str
    fingerprint: str
    run: str
    kind: str = "torch"
    insecure_seed: int | None = None
    on_new_head: Callable[[str], object] = do_nothing
    first_charge_only: bool = False
    once: str = ""
    held_out: str = ""

    def __post_init__(self) -> None:
        if not self.is_library_noise:
            check_noise(self.kind, self.insecure_seed)
        elif self.kind == _LIBRARY_NOISE_PREFIX or self.insecure_seed is not None:
            problem = "must be 'by <library>', and such noise takes no insecure_noise_seed"
            raise checks.error("noise", self.kind, problem)
        check_delta(self.kind, self.delta)

    @classmethod
    def from_account(cls, ledger: Ledger, account: str, **options: Any) -> Budget:
        """Make a budget with the terms and the kind of noise of an existing account.

        The caller must ensure that the values to be released have these terms. ``options`` are the other attributes.
        """
        stored = ledger.get_account(account)
        terms = {"delta": stored.delta, "adjacency": stored.adjacency, "unit": stored.unit, "kind": stored.noise}
        terms["held_out"] = stored.held_out
        return cls(ledger=ledger, account=account, **({"fingerprint": "", "run": ""} | options | terms))

    @property
    def secret(self) -> bool:
        """Whether the noise is secret. Answers drawn with seeded noise are not private."""
        return self.insecure_seed is None

    @property
    def is_library_noise(self) -> bool:
        return self.kind.startswith(_LIBRARY_NOISE_PREFIX)

    @property
    def _terms(self) -> dict[str, Any]:
        return {key: getattr(self, key) for key in ("delta", "adjacency", "unit", "held_out")} | {"noise": self.kind}

    @property
    def _conditions(self) -> dict[str, Any]:
        return {"terms": self._terms, "first_charge_only": self.first_charge_only, "once": self.once}

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Raise ValueError if the value has another adjacency than the account."""
        if sensitivity.adjacency not in (None, self.adjacency):
            message = f"is not the adjacency of the account ({self.adjacency}), for which all charges were computed"
            raise checks.error("adjacency", sensitivity.adjacency, message, f"Use partition={self.adjacency}.")

    def check_events(self, events: Iterable[PrivacyEvent]) -> None:
        """Raise the error that ``spend`` would raise for these events now. Nothing is charged."""
        self.ledger.check_events(self.account, events, **self._conditions)

    @contextmanager
    def spend(
        self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = PURPOSE_LABELS
    ) -> Iterator[Spending]:
        """Reserve the worst case of a release, hand out noise, and commit the incurred events at the end.

        Args:
            events: Events of the worst case. All of them are charged if the release records no cost.
            mechanism: Name of the mechanism that draws the noise.
            purpose: Purpose of the reservation, in words.

        Raises:
            ValueError: The account has other terms or another kind of noise. Nothing was drawn or charged.
            BudgetExceeded: The release would exceed the cap. Nothing was drawn or charged.
        """
        reservation = self.ledger.reserve(
            self.account,
            events,
            fingerprint=self.fingerprint,
            mechanism=mechanism,
            run=self.run,
            purpose=purpose,
            noise=self.kind,
            insecure=not self.secret,
            **self._conditions,
        )
        with self._open_spending(reservation, {}) as spending:
            yield spending

    @contextmanager
    def resume(self, reservation: str, state_digest: str) -> Iterator[Spending]:
        """Continue a suspended release.

        Raises:
            LedgerError: The state is not the newest recorded state, or noise may have been drawn after it.
            ValueError: The release was begun with secret noise and this budget has seeded noise, or vice versa.
        """
        self.ledger.check_terms(self.account, **self._terms)
        charge = self.ledger.make_claim(self.account, [reservation]).charges[reservation]
        if charge.insecure is self.secret:
            kind = "seeded" if charge.insecure else "secret"
            raise checks.error("reservation", reservation, f"must be resumed with {kind} noise, as it was begun")
        noise_state, noise_digest = load_noise_state(self._get_state_path(reservation))
        resumed_reservation = self.ledger.resume(reservation, state_digest=state_digest + noise_digest)
        with self._open_spending(resumed_reservation, noise_state) as spending:
            yield spending

    def can_resume(self, reservation: str, state_digest: str) -> bool:
        """Whether ``resume`` would accept this state of a suspended release."""
        charge = self.ledger.get_charges(self.account)[reservation]
        _, noise_digest = load_noise_state(self._get_state_path(reservation))
        return charge.is_suspended and charge.state_digest == state_digest + noise_digest

    def _get_state_path(self, reservation: str) -> Path:
        return self.ledger.home / "suspended" / f"{reservation}.json"

    @contextmanager
    def _open_spending(self, reservation: Reservation, noise_state: Mapping[str, float]) -> Iterator[Spending]:
        self.on_new_head(self.ledger.get_head())
        spending = Spending(self, reservation)
        if noise_state:
            spending.noise.state.update(noise_state)
        try:
            yield spending
        finally:
            spending._is_active = False
        # These lines run only if nothing was raised. Otherwise the reservation stays charged at its worst case.
        state_path, events = self._get_state_path(spending.id), spending.events_to_commit
        if spending._suspended_state is not None:
            noise_digest = save_noise_state(state_path, {} if spending._noise is None else spending._noise.state)
            self.ledger.record(reservation, events, state_digest=spending._suspended_state + noise_digest)
        else:
            digests, is_stopped = spending._digests, spending._is_stopped
            self.ledger.commit(reservation, events, release_id=spending.id, digests=digests, is_stopped=is_stopped)
            state_path.unlink(missing_ok=True)
        self.on_new_head(self.ledger.get_head())


class Spending:
    """A reservation that hands out noise and records costs until its ``with`` block ends.

    Attributes:
        id: Id of the reservation.
        reserved_events: Reserved events, the worst case.
        incurred_events: Events incurred so far. None if no cost was recorded, so that all reserved events are charged.
        secret: Whether the noise is secret. Answers drawn with seeded noise are not private.
    """

    def __init__(self, budget: Budget, reservation: Reservation) -> None:
        self.id, self.reserved_events, self.secret = reservation.id, reservation.reserved_events, budget.secret
        self.incurred_events: tuple[PrivacyEvent, ...] | None = reservation.incurred_events
        self._budget, self._pid = budget, os.getpid()
        self._noise = None if budget.is_library_noise else _ChargedNoise(self, budget.kind, budget.insecure_seed)
        self._digests: dict[str, str] = {}
        self._suspended_state: str | None = None
        self._is_active, self._is_stopped = True, False
        self._has_unrecorded_noise = self._has_fresh_noise = False

    @property
    def noise(self) -> NoiseSource:
        """Source of the noise that was paid for.

        Raises:
            RuntimeError: The block has ended, or a library draws the noise.
            LedgerError: This process is a fork of the one that reserved the noise.
        """
        self._check_active()
        if self._noise is None:
            raise RuntimeError(
                f"noise: this release has no noise source, because its noise is drawn {self._budget.kind}"
            )
        return self._noise

    @property
    def events_to_commit(self) -> tuple[PrivacyEvent, ...]:
        """Events that the commit charges: the incurred events if all costs were recorded, else the reserved events."""
        if self.incurred_events is None or self._has_unrecorded_noise:
            return self.reserved_events
        return self.incurred_events

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        self._budget.check_adjacency(sensitivity)

    def accept(self, answers: Answers) -> Answers:
        """Return the answers after checking that they were drawn with this noise, since the last accepted answers.

        Raises:
            ValueError: The answers were drawn with other noise, or no noise was drawn for them.
        """
        self._check_active()
        problem = ""
        if type(answers) is not Answers or answers.reservation_id != self.id:
            origin = "of a dry run" if isinstance(answers, DryRunAnswers) else "not drawn with this release's noise"
            problem = f"its answers are {origin}"
        elif len(answers.label_Q) and not self._has_fresh_noise:
            problem = "no noise was drawn for its answers"
        if problem:
            fix = "Override the mechanism's draw(), which must use the noise in its argument, and call release()."
            raise checks.error("mechanism", type(answers).__name__, problem, fix)
        self._has_fresh_noise = False
        return answers

    def record_cost(self, events: Iterable[PrivacyEvent]) -> None:
        """Record the events that a part of the release incurred, after its noise was drawn.

        The commit lowers the charge from the reserved events to the recorded ones. If noise is drawn after the last
        call of this method, the charge stays as it was reserved.
        """
        self._check_active()
        self._has_unrecorded_noise = False
        self.incurred_events = (self.incurred_events or ()) + tuple(events)

    def record_files(self, digests: Mapping[str, str]) -> None:
        """Store the SHA-256 of written files, by name, in the ledger, which reveals a later edit of these files."""
        self._check_active()
        self._digests |= digests

    def record_first_answers(self, digests: Mapping[str, str]) -> None:
        """Write the SHA-256 of the answers of a first stage into the ledger, before any step depends on these answers.

        Raises:
            ValueError: The first stage drew noise and did not record its cost, so the release could be charged
                without this cost.
        """
        self.record_files(digests)
        if self._has_unrecorded_noise or self.incurred_events is None:
            fix = "Call spending.record_cost(events) after the draw."
            raise checks.error("first_answers", None, "did not record the cost of its answers", fix)
        self._has_fresh_noise = False
        self._budget.ledger.record(self.id, self.events_to_commit, digests=self._digests)

    def stop(self) -> None:
        """End the release after its first answers: the commit charges them alone and marks the release as stopped."""
        self._check_active()
        if not self._digests:
            raise ValueError("files: only a release whose first answers were recorded can be stopped")
        self._is_stopped = True

    def suspend(self, state_digest: str) -> None:
        """Leave the release open after the ``with`` block, to be resumed from a state with this hash."""
        self._check_active()
        if self._digests:
            raise ValueError("files: record files in the call that finishes the release; a suspended one stores none")
        if not state_digest:
            raise checks.error("state", state_digest, "must be a hash of the state that is needed to continue")
        self._suspended_state = state_digest

    def _check_active(self) -> None:
        if not self._is_active:
            raise RuntimeError(f"spending {self.id}: its with block has ended; noise drawn now would not be charged")
        check_own_process(self._pid)  # a fork would draw other noise, and one reservation pays for one draw


class _ChargedNoise(NoiseSource):
    """Noise that a ``Spending`` has paid for. Drawing is possible until the ``with`` block of the spending ends."""

    def __init__(self, spending: Spending, kind: str, insecure_seed: int | None) -> None:
        super().__init__(kind, insecure_seed)
        self._spending = spending

    def stamp(self, answers: Answers) -> Answers:
        if type(answers) is not Answers:
            raise ValueError(f"answers: {type(answers).__name__} were not drawn with this noise")
        return replace(answers, reservation_id=self._spending.id)

    def _check_draw_allowed(self) -> None:
        self._spending._check_active()
        self._spending._has_unrecorded_noise = self._spending._has_fresh_noise = True
