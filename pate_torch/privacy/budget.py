"""The one provider of noise: an account of the ledger, and how a run may draw on it.

    with budget.spend(events, mechanism="gaussian") as spending:   # terms checked, worst case reserved
        answers = spending.accept(mechanism.release(votes, spending.noise, context))
        spending.record_cost(answers.events)
        ...                                                        # written down
                                                                   # left without an error: committed

Left by an error, the reservation stays spent. Noise is had nowhere else (but in a ``DryRunNoise``, which releases
nothing), and the ledger is charged nowhere else. What outlives a ``with`` is suspended in it and resumed later:

    with budget.spend(events, mechanism="sparse_vector") as spending:
        ...
        spending.suspend(state)             # a hash of all that is needed to go on
    with budget.resume(spending.id, state) as spending: ...

What the noise is to go on with (``NoiseSource.state``: a sparse vector's threshold) is sealed beside the ledger, which
remembers its hash with the state. A state that the ledger does not know (an older one, or one after which noise may
have been drawn) is refused, and the reservation stays spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pate_torch.accounting.events import PrivacyEvent
from pate_torch.core import checks
from pate_torch.core.progress import do_nothing
from pate_torch.privacy.accounts import account_charged_error
from pate_torch.privacy.ledger import PURPOSE_LABELS, Ledger, Reservation
from pate_torch.privacy.noise import (
    NOISE_KINDS,
    DryRunNoise,
    NoiseSource,
    check_delta,
    check_noise,
    load_noise_state,
    save_noise_state,
)
from pate_torch.privacy.records import Answers, DryRunAnswers
from pate_torch.privacy.sensitive import Sensitivity

LIBRARY_NOISE_PREFIX = "by "
"""The kind of noise that a library draws itself: "by opacus"."""


class NoiseProvider(Protocol):
    """Where noise is had: a ``Budget``, or a ``DryRunNoise`` in its place."""

    @property
    def kind(self) -> str:
        """Kind of the noise."""
        ...

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Refuse a value under another adjacency than the account's."""
        ...

    def spend(
        self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = PURPOSE_LABELS
    ) -> AbstractContextManager[Any]:
        """A ``Spending``, or the ``DryRunNoise`` itself: ``noise`` draws, ``record_cost`` says what the draws cost."""
        ...


class _ChargedNoise(NoiseSource):
    """Noise that a spending has paid for, as long as it lasts."""

    def __init__(self, spending: Spending, kind: str, insecure_seed: int | None) -> None:
        super().__init__(kind, insecure_seed)
        self._spending = spending

    def stamp(self, answers: Answers) -> Answers:
        """The answers, with the reservation that paid for them."""
        if type(answers) is not Answers:
            raise ValueError(f"answers: {type(answers).__name__} were not drawn with this noise")
        return replace(answers, reservation_id=self._spending.id)

    def _check_draw_allowed(self) -> None:
        self._spending._check_active()
        self._spending._mark_drawn()


class Spending:
    """What one reservation has paid for, within its ``with``.

    Attributes:
        id: Id of the reservation.
        reserved_events: The events it pays for at worst.
        incurred_events: The events that came out so far; None: nothing was said of it, and all that was reserved is
            charged.
        secret: Whether its noise is: else nothing it draws is private.
    """

    def __init__(
        self,
        reservation: Reservation,
        kind: str,
        insecure_seed: int | None,
        adjacency: str,
        record_in_ledger: Callable[[Spending], object],
    ) -> None:
        self._record_in_ledger = record_in_ledger
        self.id, self.reserved_events = reservation.id, reservation.reserved_events
        self.incurred_events: tuple[PrivacyEvent, ...] | None = reservation.incurred_events
        self._suspended_state: str | None = None
        self._digests: dict[str, str] = {}
        self._is_active = True
        self._has_unrecorded_noise = self._has_fresh_noise = False
        self._noise = None if kind.startswith(LIBRARY_NOISE_PREFIX) else _ChargedNoise(self, kind, insecure_seed)
        self._kind, self._adjacency = kind, adjacency
        self.secret = insecure_seed is None

    @property
    def noise(self) -> NoiseSource:
        """The noise that was paid for.

        Raises:
            RuntimeError: A library draws its own, or the ``with`` has been left.
        """
        self._check_active()
        if self._noise is None:
            raise RuntimeError(f"noise: this release's is drawn {self._kind}")
        return self._noise

    @property
    def noise_state(self) -> dict[str, float]:
        """PRIVATE. What the noise is to go on with when the release is resumed."""
        return {} if self._noise is None else self._noise.state

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Refuse a value under another adjacency than the account's."""
        check_adjacency(sensitivity, self._adjacency)

    def accept(self, answers: Answers) -> Answers:
        """The answers, if this spending paid for them.

        Raises:
            ValueError: Any others, which are not released.
        """
        self._check_active()
        if type(answers) is not Answers or answers.reservation_id != self.id:
            origin = "of a dry run" if isinstance(answers, DryRunAnswers) else "not drawn with this release's noise"
            fix = "A mechanism answers by draw(), from the noise it is given."
            raise checks.error("mechanism", type(answers).__name__, f"its answers are {origin}", fix)
        if len(answers.label_Q) and not self._has_fresh_noise:
            fix = "A mechanism draws from the noise it is given."
            raise checks.error("mechanism", type(answers).__name__, "no noise was drawn for its answers", fix)
        self._has_fresh_noise = False
        return answers

    def record_cost(self, events: Iterable[PrivacyEvent]) -> None:
        """Count what a part of the release cost as it came out, after its noise was drawn; the rest returns on commit.

        Where noise was drawn after the last such word, all that was reserved is charged.
        """
        self._check_active()
        self._has_unrecorded_noise = False
        self.incurred_events = (self.incurred_events or ()) + tuple(events)

    def record_files(self, digests: Mapping[str, str]) -> None:
        """Remember the SHA-256 of what was written down, by a name each: an edit of it shows against the ledger."""
        self._check_active()
        self._digests |= digests

    def record_first_answers(self, digests: Mapping[str, str]) -> None:
        """Write the SHA-256 of a first stage's answers into the ledger, before anything depends on them.

        Raises:
            ValueError: The first stage drew noise and did not say what that cost, so that the rest could be charged
                without it.
        """
        self.record_files(digests)
        if self._has_unrecorded_noise or self.incurred_events is None:
            fix = "Call spending.record_cost(events) after the draw."
            raise checks.error("first_answers", None, "does not say what its answers cost", fix)
        self._has_fresh_noise = False
        self._record_in_ledger(self)

    def suspend(self, state_digest: str) -> None:
        """Leave the release open after the ``with``, to be resumed where ``state_digest``, a hash, says it stands."""
        self._check_active()
        if self._digests:  # these are committed with the release, which is not over
            raise ValueError("files: record them where the release is committed, not where it is suspended")
        if not state_digest:
            raise checks.error("state", state_digest, "must be a hash of what is needed to go on")
        self._suspended_state = state_digest

    def _mark_drawn(self) -> None:
        """Note that noise was drawn, of which nothing was said yet."""
        self._has_unrecorded_noise = self._has_fresh_noise = True

    @property
    def charged_events(self) -> tuple[PrivacyEvent, ...]:
        """What the release is charged when the ``with`` is left: all that was reserved, unless less was said."""
        return (
            self.reserved_events if self._has_unrecorded_noise or self.incurred_events is None else self.incurred_events
        )

    def _check_active(self) -> None:
        """Refuse to go on once the ``with`` has been left: noise drawn afterwards would not be charged.

        Raises:
            RuntimeError: It has been left.
        """
        if not self._is_active:
            raise RuntimeError(f"spending {self.id}: is over; noise drawn now would not be charged")


@dataclass(frozen=True, kw_only=True, eq=False)
class Budget:
    """An account of a private data set, under the terms that a run was built for, which must be the account's own.

    Attributes:
        ledger: Holds the account.
        account: Its name.
        delta: Delta of the account.
        adjacency: Neighboring relation.
        unit: What the privacy unit is.
        fingerprint: Content fingerprint of the records, or of votes in their place.
        run: Name of the run's folder.
        kind: Kind of noise (``NoiseSource``); "by <library>" where a library draws its own, which then has an account
            of its own.
        insecure_seed: Makes noise repeatable, and the run not private.
        on_charge: Told the newest entry's hash whenever the account was charged, to be noted outside the ledger.
        first_charge_only: Whether a charge is refused where the account has any reservation.
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
    on_charge: Callable[[str], object] = do_nothing
    first_charge_only: bool = False

    def __post_init__(self) -> None:
        if self.kind.startswith(LIBRARY_NOISE_PREFIX):
            if self.kind == LIBRARY_NOISE_PREFIX or self.insecure_seed is not None:
                raise checks.error("noise", self.kind, "must name a library, which takes no insecure_noise_seed")
        else:
            check_noise(self.kind, self.insecure_seed)
        check_delta(self.kind, self.delta)

    @classmethod
    def from_account(
        cls, ledger: Ledger, account: str, *, fingerprint: str = "", run: str = "", insecure_seed: int | None = None
    ) -> Budget:
        """A budget on the account's own terms and of its kind of noise.

        The caller vouches that what is asked is on these terms.
        """
        account_terms = ledger.get_account(account)
        return cls(
            ledger=ledger,
            account=account,
            delta=account_terms.delta,
            adjacency=account_terms.adjacency,
            unit=account_terms.unit,
            fingerprint=fingerprint,
            run=run,
            kind=account_terms.noise,
            insecure_seed=insecure_seed,
        )

    @property
    def secret(self) -> bool:
        """Whether no outsider could know the noise; else nothing drawn is private."""
        return self.insecure_seed is None

    def check_events(self, events: Iterable[PrivacyEvent]) -> None:
        """Raise what ``spend`` would raise now; nothing is charged."""
        self._check_terms()
        account, events = self.ledger.get_account(self.account), tuple(events)
        if self.first_charge_only and account.is_charged:
            raise account_charged_error(account, account.filter.to_epsilon(account.filter.compute_cost(events)))
        self.ledger.check_events(self.account, events)

    def check_adjacency(self, sensitivity: Sensitivity) -> None:
        """Refuse a value under another adjacency than the account's.

        Raises:
            ValueError: Says which partition to use.
        """
        check_adjacency(sensitivity, self.adjacency)

    @contextmanager
    def spend(
        self, events: Iterable[PrivacyEvent], *, mechanism: str, purpose: str = PURPOSE_LABELS
    ) -> Iterator[Spending]:
        """Reserve these events, a whole release at its worst, and hand out noise; commit what was incurred at the end.

        A release that says nothing of what it incurred is charged in full.

        Args:
            events: Events of the worst case.
            mechanism: What draws the noise, in words.
            purpose: What the reservation pays for, in words.

        Raises:
            ValueError: The account was opened on other terms or of another kind of noise; nothing has been drawn or
                charged.
            BudgetExceeded: Its cap would be passed; likewise.
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
            first_charge_only=self.first_charge_only,
            terms=self._terms,
        )
        with self._open_spending(reservation) as spending:
            yield spending

    @contextmanager
    def resume(self, reservation: str, state_digest: str) -> Iterator[Spending]:
        """Go on with a suspended release.

        Raises:
            LedgerError: A state that the ledger does not know.
        """
        self._check_terms()
        charge = self.ledger.make_claim(self.account, [reservation]).charges[reservation]
        if charge.insecure is self.secret:
            raise checks.error("reservation", reservation, "was made with noise that was seeded where this is not")
        noise_state, digest = load_noise_state(self._get_state_path(reservation))
        resumed_reservation = self.ledger.resume(reservation, state_digest=state_digest + digest)
        with self._open_spending(resumed_reservation, noise_state) as spending:
            yield spending

    def can_resume(self, reservation: str, state_digest: str) -> bool:
        """Whether a suspended release could be resumed from this state."""
        charge = self.ledger.get_charges(self.account)[reservation]
        return (
            charge.is_suspended
            and charge.state_digest == state_digest + load_noise_state(self._get_state_path(reservation))[1]
        )

    def _get_state_path(self, reservation: str) -> Path:
        """PRIVATE. Where what a suspended release goes on with lies."""
        return self.ledger.path.with_name("suspended") / f"{reservation}.json"

    @contextmanager
    def _open_spending(
        self, reservation: Reservation, noise_state: Mapping[str, float] | None = None
    ) -> Iterator[Spending]:
        self.on_charge(self.ledger.get_head())

        def record_in_ledger(spending: Spending) -> None:
            self.ledger.record(reservation, spending.charged_events, digests=spending._digests)

        spending = Spending(reservation, self.kind, self.insecure_seed, self.adjacency, record_in_ledger)
        if noise_state:
            spending.noise.state.update(noise_state)
        try:
            yield spending
        finally:
            spending._is_active = False
        # Only here, where nothing was raised: else the reservation stays as it is, charged at its worst.
        state_path = self._get_state_path(spending.id)
        if spending._suspended_state is not None:
            digest = save_noise_state(state_path, spending.noise_state)
            self.ledger.record(reservation, spending.charged_events, state_digest=spending._suspended_state + digest)
        else:
            self.ledger.commit(reservation, spending.charged_events, release_id=spending.id, digests=spending._digests)
            state_path.unlink(missing_ok=True)
        self.on_charge(self.ledger.get_head())

    @property
    def _terms(self) -> dict[str, Any]:
        return {"delta": self.delta, "adjacency": self.adjacency, "unit": self.unit, "noise": self.kind}

    def _check_terms(self) -> None:
        self.ledger.check_terms(self.account, **self._terms)


def check_adjacency(sensitivity: Sensitivity, adjacency: str) -> None:
    """Raise ValueError for a value under another adjacency than the account's."""
    if sensitivity.adjacency not in (None, adjacency):
        message = f"is not the account's ({adjacency}), for which alone its charges hold"
        raise checks.error("adjacency", sensitivity.adjacency, message, f"Use partition={adjacency}.")


__all__ = ["LIBRARY_NOISE_PREFIX", "NOISE_KINDS", "Budget", "DryRunNoise", "NoiseProvider", "Spending"]
