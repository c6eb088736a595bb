"""Who answers questions about public points: the protocol, and what its members share.

A member is one file here and one YAML in conf/voters. It checks what goes with it, is fitted to be asked about a public
pool, answers with sensitive values, which carry how far one privacy unit moves them, and describes itself in the words
of the privacy statement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from pate_torch.core import checks
from pate_torch.methods.description import VotersDescription
from pate_torch.protocols import Student, do_nothing
from pate_torch.sensitive import SensitiveValue, Votes
from pate_torch.teachers.store import TeacherStore
from pate_torch.types import Dataset, PrivateData

if TYPE_CHECKING:
    from pate_torch.config import RunConfig
    from pate_torch.context import RunContext
    from pate_torch.teachers.ensemble import TeacherEnsemble


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FittedVoters:
    """PRIVATE. Voters, ready to be asked about one public pool.

    Attributes:
        id: A random id, fresh for each release unless the user named these voters by it.
        sensitive: Their values on the pool, which only a mechanism opens.
        remember: Notes the newest ledger entry with stored teachers, so that they are not used apart from their ledger.
        feature_PD: Releasable features of the public points, for the next questions; None: the run's.
        refit: The same voters in features of a student, which is public; None: they stay as they are.
        ensemble: The teachers behind the answers, where they are here: for the owner's figures.
    """

    id: str
    sensitive: SensitiveValue
    remember: Callable[[str], object] = do_nothing
    feature_PD: Tensor | None = None
    refit: Callable[[Student], FittedVoters] | None = None
    ensemble: TeacherEnsemble | None = None

    @classmethod
    def of_votes(cls, run: RunContext, votes: Votes) -> FittedVoters:
        """PRIVATE. Voters of whom nothing is kept but their votes, under a fresh id."""
        return cls(id=run.store.create_alias(run.store.compute_votes_fingerprint(votes)), sensitive=votes)

    def for_round(self, guide: Student | None) -> FittedVoters:
        """PRIVATE. The voters of a round that ``guide``, the guide student, leads to."""
        return self if guide is None or self.refit is None else self.refit(guide)


@runtime_checkable
class Voters(Protocol):
    """Who answers: a frozen dataclass of choices."""

    @property
    def name(self) -> str:
        """The name that ``release.json`` gives."""
        ...

    @property
    def num_teachers(self) -> int:
        """How many have one vote on every question; 0 where records answer for themselves."""
        ...

    @property
    def uses_guide(self) -> bool:
        """Whether they look at the student between rounds."""
        ...

    @property
    def releases_model(self) -> bool:
        """Whether they fit a linear model, which is what is released."""
        ...

    def check(self, config: RunConfig) -> None:
        """Raise ValueError for what does not go with them, whatever the data."""
        ...

    def for_data(self, data: Dataset) -> Voters:
        """These voters, with what is known once there are data."""
        ...

    def validate_for(self, data: Dataset, config: RunConfig) -> None:
        """Raise ValueError where they cannot answer on these data, before anything is trained or charged."""
        ...

    def votes_per_question(self, data: Dataset, config: RunConfig) -> int | None:
        """How many votes a question gets at most, by public values; None: not known, or no votes."""
        ...

    def fingerprint(self, store: TeacherStore, everyone: PrivateData) -> str:
        """PRIVATE. The content fingerprint of what they answer from: it never has two accounts unnoticed."""
        ...

    def fitted(self, run: RunContext) -> FittedVoters:
        """PRIVATE. Make them ready to be asked."""
        ...

    def assist(self, data: Dataset, config: RunConfig) -> None:
        """PRIVATE. What a rank above 0 of a torchrun does while rank 0 makes them ready, where rank 0 asks for it."""
        ...

    def declared(self, data: Dataset) -> int | None:
        """About how many records there are, as publicly declared, where they use it; else None."""
        ...

    def description(self, unit: str, config: RunConfig) -> VotersDescription:
        """What reports say of them, where this is the privacy unit."""
        ...


@dataclass(frozen=True, kw_only=True)
class VotersBase:
    """Defaults of the protocol. A subclass gives ``name``, ``num_teachers``, ``fitted`` and ``description``."""

    name: str = ""

    def __post_init__(self) -> None:
        checks.one_of("voters.name", self.name, (type(self).name,))

    @property
    def uses_guide(self) -> bool:
        return False

    @property
    def releases_model(self) -> bool:
        return False

    def check(self, config: RunConfig) -> None:
        """Everything goes with them."""

    def for_data(self, data: Dataset) -> Voters:
        return self  # type: ignore[return-value]

    def validate_for(self, data: Dataset, config: RunConfig) -> None:
        """They can answer on any data."""

    def votes_per_question(self, data: Dataset, config: RunConfig) -> int | None:
        return None

    def fingerprint(self, store: TeacherStore, everyone: PrivateData) -> str:
        return store.compute_content_fingerprint(everyone)

    def assist(self, data: Dataset, config: RunConfig) -> None:
        """Rank 0 needs no help."""

    def declared(self, data: Dataset) -> int | None:
        return None

    def description(self, unit: str, config: RunConfig) -> VotersDescription:
        raise NotImplementedError(f"{type(self).__name__}: must say who answers, in description")
