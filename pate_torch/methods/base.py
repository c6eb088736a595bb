"""Who answers questions about public points: the protocol, and what its members share.

A member is one file here and one YAML in conf/method. It checks what goes with it, is prepared for queries on a public
pool, answers with sensitive values, which carry how far one privacy unit moves them, and describes itself in the words
of the privacy statement.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.progress import do_nothing
from pate_torch.methods.description import MethodDescription
from pate_torch.privacy.records import Dataset, PrivateRecords
from pate_torch.privacy.sensitive import SensitiveValue, Votes
from pate_torch.students.base import Student
from pate_torch.teachers.store import TeacherStore

if TYPE_CHECKING:
    from pate_torch.config import RunConfig
    from pate_torch.context import RunContext
    from pate_torch.teachers.ensemble import TeacherEnsemble


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class PreparedMethod:
    """PRIVATE. A method that is ready to answer queries on one public pool.

    Attributes:
        id: A random id, fresh for each release unless the user named stored teachers by it.
        sensitive: Its values on the pool, which only a mechanism opens.
        record_ledger_head: Notes the newest ledger entry with stored teachers, so that they are not used apart from
            their ledger.
        feature_PD: Releasable features of the public points, for the next questions; None: the run's.
        refit: The same method in features of a student, which is public; None: it stays as it is.
        ensemble: The teachers behind the answers, where they are here: for the owner's figures.
    """

    id: str
    sensitive: SensitiveValue
    record_ledger_head: Callable[[str], object] = do_nothing
    feature_PD: Tensor | None = None
    refit: Callable[[Student], PreparedMethod] | None = None
    ensemble: TeacherEnsemble | None = None

    @classmethod
    def from_votes(cls, run: RunContext, votes: Votes) -> PreparedMethod:
        """PRIVATE. A method of which nothing is kept but its votes, under a fresh id."""
        return cls(id=run.store.create_alias(run.store.compute_votes_fingerprint(votes)), sensitive=votes)

    def prepare_round(self, guide: Student | None) -> PreparedMethod:
        """PRIVATE. The method of a round that ``guide``, the guide student, leads to."""
        return self if guide is None or self.refit is None else self.refit(guide)


@runtime_checkable
class PrivateMethod(Protocol):
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
        """Whether the method looks at the student between rounds."""
        ...

    @property
    def releases_model(self) -> bool:
        """Whether the method fits a linear model, which is what is released."""
        ...

    def check(self, config: RunConfig) -> None:
        """Raise ValueError for what does not go with the method, whatever the data."""
        ...

    def adapt_to_data(self, data: Dataset) -> PrivateMethod:
        """This method, with what is known once there are data."""
        ...

    def check_data(self, data: Dataset, config: RunConfig) -> None:
        """Raise ValueError where the method cannot answer on these data, before anything is trained or charged."""
        ...

    def estimate_votes_per_query(self, data: Dataset, config: RunConfig) -> int | None:
        """How many votes a question gets at most, by public values; None: not known, or no votes."""
        ...

    def compute_fingerprint(self, store: TeacherStore, all_private: PrivateRecords) -> str:
        """PRIVATE. The content fingerprint of what the method answers from: no content has two accounts unnoticed."""
        ...

    def prepare(self, run: RunContext) -> PreparedMethod:
        """PRIVATE. Make the method ready to answer queries."""
        ...

    def run_worker_rank(self, data: Dataset, config: RunConfig) -> None:
        """PRIVATE. What a rank above 0 of a torchrun does while rank 0 prepares the method, where it asks for help."""
        ...

    def get_nominal_size(self, data: Dataset) -> int | None:
        """About how many records there are, as publicly declared, where the method uses that number; else None."""
        ...

    def describe(self, unit: str, config: RunConfig) -> MethodDescription:
        """What reports say of the method, where this is the privacy unit."""
        ...


@dataclass(frozen=True, kw_only=True)
class PrivateMethodBase:
    """Defaults of the protocol. A subclass gives ``name``, ``num_teachers``, ``prepare`` and ``describe``."""

    name: str = ""

    def __post_init__(self) -> None:
        checks.one_of("method.name", self.name, (type(self).name,))

    @property
    def uses_guide(self) -> bool:
        return False

    @property
    def releases_model(self) -> bool:
        return False

    def check(self, config: RunConfig) -> None:
        """Everything goes with the method."""

    def adapt_to_data(self, data: Dataset) -> PrivateMethod:
        return self  # type: ignore[return-value]

    def check_data(self, data: Dataset, config: RunConfig) -> None:
        """The method can answer on any data."""

    def estimate_votes_per_query(self, data: Dataset, config: RunConfig) -> int | None:
        return None

    def compute_fingerprint(self, store: TeacherStore, all_private: PrivateRecords) -> str:
        return store.compute_content_fingerprint(all_private)

    def run_worker_rank(self, data: Dataset, config: RunConfig) -> None:
        """Rank 0 needs no help."""

    def get_nominal_size(self, data: Dataset) -> int | None:
        return None

    def describe(self, unit: str, config: RunConfig) -> MethodDescription:
        raise NotImplementedError(f"{type(self).__name__}: must say who answers, in describe")
