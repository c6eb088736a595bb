"""The one door to noise: an account of the ledger, and how a run may draw on it.

    with budget.spend(events, mechanism="gaussian") as spending:   # terms checked, worst case reserved
        answers = spending.admit(mechanism.release(votes, spending.noise, context))
        spending.incur(answers.events)
        ...                                                        # written down
                                                                   # left without an error: committed

Left by an error, the reservation stays spent. Noise is had nowhere else (but in a ``Rehearsal``, which releases
nothing), and the ledger is charged nowhere else. What outlives a ``with`` is suspended in it and resumed later:

    with budget.spend(events, mechanism="stability") as spending:
        ...
        spending.suspend(state)             # a hash of all that is needed to go on
    with budget.resume(spending.id, state) as spending: ...

What the noise is to go on with (``NoiseSource.kept``: a sparse vector's threshold) is sealed beside the ledger, which
remembers its hash with the state. A state that the ledger does not know (an older one, or one after which noise may
have been drawn) is refused, and the reservation stays spent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from pate_torch.accounting.events import Event
from pate_torch.core import checks
from pate_torch.ledger.accounts import refused_refit
from pate_torch.ledger.ledger import LABELS, Ledger, Reservation
from pate_torch.noise.source import KINDS, NoiseSource, Rehearsal, check_delta, check_noise, seal, unseal
from pate_torch.protocols import silent
from pate_torch.sensitive import Sensitivity
from pate_torch.types import Answers, Rehearsed

BY = "by "
"""The kind of noise that a library draws itself: "by opacus"."""


class Door(Protocol):
    """Where noise is had: a ``Budget``, or a ``Rehearsal`` in its place."""

    @property
    def kind(self) -> str:
        """Kind of the noise."""
        ...

    def covers(self, sensitivity: Sensitivity) -> None:
        """Refuse a value under another adjacency than the account's."""
        ...

    def spend(self, events: Iterable[Event], *, mechanism: str, what: str = LABELS) -> AbstractContextManager[Any]:
        """A ``Spending``, or the rehearsal itself: with ``noise`` to draw and ``incur`` to say what it cost."""
        ...


class _Charged(NoiseSource):
    """Noise that a spending has paid for, as long as it lasts."""

    def __init__(self, spending: Spending, kind: str, insecure_seed: int | None) -> None:
        super().__init__(kind, insecure_seed)
        self._spending = spending

    def marked(self, answers: Answers) -> Answers:
        """The answers, with the reservation that paid for them."""
        if type(answers) is not Answers:
            raise ValueError(f"answers: {type(answers).__name__} were not drawn with this noise")
        return replace(answers, spent=self._spending.id)

    def _permit(self) -> None:
        self._spending.live()
        self._spending.drew()


class Spending:
    """What one reservation has paid for, within its ``with``.

    Attributes:
        id: Id of the reservation.
        reserved: The events it pays for at worst.
        incurred: The events that came out so far; None: nothing was said of it, and all that was reserved is charged.
        secret: Whether its noise is: else nothing it draws is private.
    """

    def __init__(self, reservation: Reservation, kind: str, insecure_seed: int | None) -> None:
        self.id, self.reserved = reservation.id, reservation.events
        self.incurred: tuple[Event, ...] | None = reservation.incurred
        self._state: str | None = None
        self._digests: dict[str, str] = {}
        self._live = True
        self._unsaid = self._admissible = False
        self._noise = None if kind.startswith(BY) else _Charged(self, kind, insecure_seed)
        self._kind = kind
        self.secret = insecure_seed is None

    @property
    def noise(self) -> NoiseSource:
        """The noise that was paid for.

        Raises:
            RuntimeError: A library draws its own, or the ``with`` has been left.
        """
        self.live()
        if self._noise is None:
            raise RuntimeError(f"noise: this release's is drawn {self._kind}")
        return self._noise

    @property
    def kept(self) -> dict[str, float]:
        """PRIVATE. What the noise is to go on with when the release is resumed."""
        return {} if self._noise is None else self._noise.kept

    def admit(self, answers: Answers) -> Answers:
        """The answers, if this spending paid for them.

        Raises:
            ValueError: Any others, which are not released.
        """
        self.live()
        if type(answers) is not Answers or answers.spent != self.id:
            rehearsed = "of a rehearsal" if isinstance(answers, Rehearsed) else "not drawn with this release's noise"
            fix = "A mechanism answers by draw(), from the noise it is given."
            raise checks.fail("mechanism", type(answers).__name__, f"its answers are {rehearsed}", fix)
        if len(answers.label_Q) and not self._admissible:
            fix = "A mechanism draws from the noise it is given."
            raise checks.fail("mechanism", type(answers).__name__, "no noise was drawn for its answers", fix)
        self._admissible = False
        return answers

    def incur(self, events: Iterable[Event]) -> None:
        """Count what a part of the release cost as it came out, after its noise was drawn; the rest returns on commit.

        Where noise was drawn after the last such word, all that was reserved is charged.
        """
        self.live()
        self._unsaid = False
        self.incurred = (self.incurred or ()) + tuple(events)

    def wrote(self, digests: Mapping[str, str]) -> None:
        """Remember the SHA-256 of what was written down, by a name each: an edit of it shows against the ledger."""
        self.live()
        self._digests |= digests

    def suspend(self, state: str) -> None:
        """Leave the release open when the ``with`` is left, to be resumed where ``state``, a hash, says it stands."""
        self.live()
        if not state:
            raise checks.fail("state", state, "must be a hash of what is needed to go on")
        self._state = state

    def drew(self) -> None:
        """Note that noise was drawn, of which nothing was said yet."""
        self._unsaid = self._admissible = True

    @property
    def cost(self) -> tuple[Event, ...]:
        """What the release is charged when the ``with`` is left: all that was reserved, unless less was said."""
        return self.reserved if self._unsaid or self.incurred is None else self.incurred

    def live(self) -> None:
        """Refuse to go on once the ``with`` has been left: noise drawn afterwards would not be charged.

        Raises:
            RuntimeError: It has been left.
        """
        if not self._live:
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
        remember: Told the newest entry's hash whenever the account was charged, to be noted outside the ledger.
        only_first: Whether a charge is refused where the account has any reservation.
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
    remember: Callable[[str], object] = silent
    only_first: bool = False

    def __post_init__(self) -> None:
        if self.kind.startswith(BY):
            if self.kind == BY or self.insecure_seed is not None:
                raise checks.fail("noise", self.kind, "must name a library, which takes no insecure_noise_seed")
        else:
            check_noise(self.kind, self.insecure_seed)
        check_delta(self.kind, self.delta)

    @classmethod
    def of(
        cls, ledger: Ledger, account: str, *, fingerprint: str = "", run: str = "", insecure_seed: int | None = None
    ) -> Budget:
        """A budget on the account's own terms and of its kind of noise.

        The caller vouches that what is asked is on these terms.
        """
        terms = ledger.account(account)
        return cls(
            ledger=ledger,
            account=account,
            delta=terms.delta,
            adjacency=terms.adjacency,
            unit=terms.unit,
            fingerprint=fingerprint,
            run=run,
            kind=terms.noise,
            insecure_seed=insecure_seed,
        )

    @property
    def secret(self) -> bool:
        """Whether no outsider could know the noise; else nothing drawn is private."""
        return self.insecure_seed is None

    def check(self, events: Iterable[Event]) -> None:
        """Raise what ``spend`` would raise now; nothing is charged."""
        self._same_terms()
        account, events = self.ledger.account(self.account), tuple(events)
        if self.only_first and account.is_charged:
            raise refused_refit(account, account.filter.to_epsilon(account.filter.price(events)))
        self.ledger.check(self.account, events)

    def covers(self, sensitivity: Sensitivity) -> None:
        """Refuse a value under another adjacency than the account's.

        Raises:
            ValueError: Says which partition to use.
        """
        if sensitivity.adjacency not in (None, self.adjacency):
            what = f"is not the account's ({self.adjacency}), for which alone its charges hold"
            raise checks.fail("adjacency", sensitivity.adjacency, what, f"Use partition={self.adjacency}.")

    @contextmanager
    def spend(self, events: Iterable[Event], *, mechanism: str, what: str = LABELS) -> Iterator[Spending]:
        """Reserve these events, a whole release at its worst, and hand out noise; commit what was incurred at the end.

        A release that says nothing of what it incurred is charged in full.

        Args:
            events: Events of the worst case.
            mechanism: What draws the noise, in words.
            what: What the reservation pays for, in words.

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
            what=what,
            noise=self.kind,
            insecure=not self.secret,
            only_first=self.only_first,
            terms=self._terms,
        )
        with self._within(reservation) as spending:
            yield spending

    @contextmanager
    def resume(self, reservation: str, state: str) -> Iterator[Spending]:
        """Go on with a suspended release.

        Raises:
            LedgerError: A state that the ledger does not know.
        """
        self._same_terms()
        charge = self.ledger.claim(self.account, [reservation]).parts[reservation]
        if charge.insecure is self.secret:
            raise checks.fail("reservation", reservation, "was made with noise that was seeded where this is not")
        kept, digest = unseal(self._sealed(reservation))
        resumed = self.ledger.resume(reservation, state=state + digest)
        with self._within(resumed, kept) as spending:
            yield spending

    def stands(self, reservation: str, state: str) -> bool:
        """Whether a suspended release could be resumed from this state."""
        charge = self.ledger.charges(self.account)[reservation]
        return charge.suspended and charge.state == state + unseal(self._sealed(reservation))[1]

    def _sealed(self, reservation: str) -> Path:
        """PRIVATE. Where what a suspended release goes on with lies."""
        return self.ledger.path.with_name("suspended") / f"{reservation}.json"

    @contextmanager
    def _within(self, reservation: Reservation, kept: Mapping[str, float] | None = None) -> Iterator[Spending]:
        self.remember(self.ledger.head())
        spending = Spending(reservation, self.kind, self.insecure_seed)
        if kept:
            spending.noise.kept.update(kept)
        try:
            yield spending
        finally:
            spending._live = False
        # Only here, where nothing was raised: else the reservation stays as it is, charged at its worst.
        sealed = self._sealed(spending.id)
        if spending._state is not None:
            digest = seal(sealed, spending.kept)
            self.ledger.record(reservation, spending.cost, state=spending._state + digest)
        else:
            self.ledger.commit(reservation, spending.cost, release_id=spending.id, digests=spending._digests)
            sealed.unlink(missing_ok=True)
        self.remember(self.ledger.head())

    @property
    def _terms(self) -> dict[str, Any]:
        return {"delta": self.delta, "adjacency": self.adjacency, "unit": self.unit, "noise": self.kind}

    def _same_terms(self) -> None:
        self.ledger.same_terms(self.account, **self._terms)


__all__ = ["BY", "KINDS", "Budget", "Door", "Rehearsal", "Spending"]
