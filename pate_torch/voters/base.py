"""Who answers questions about public points: the protocol, and what its members share.

A member is one file here and one YAML in conf/voters. It checks what goes with it, is fitted to be asked about a public
pool, and answers with sensitive values, which carry how far one privacy unit moves them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from pate_torch.core import checks
from pate_torch.data.partition import deal
from pate_torch.networks import feature_extractor
from pate_torch.protocols import Progress, Sensitive, Student, silent
from pate_torch.types import Dataset, Shards, Votes
from pate_torch.voters.register import VoterRegister

if TYPE_CHECKING:
    from pate_torch.config import RunConfig
    from pate_torch.context import RunContext
    from pate_torch.teachers.ensemble import Ensemble


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class FittedVoters:
    """PRIVATE. Voters, ready to be asked about one public pool.

    Attributes:
        id: A random id: the same voters keep it.
        answers: Sensitive values on the pool, which only a mechanism opens.
        remember: Notes the newest ledger entry, so that they are not used apart from their ledger.
        feature_PD: Releasable features of the public points, in which records answer; None: they use none.
        refit: The same voters in features of a student, which is public; None: they stay as they are.
        ensemble: The teachers behind the answers, where they are here: for the owner's figures.
    """

    id: str
    answers: Sensitive
    remember: Callable[[str], None]
    feature_PD: Tensor | None = None
    refit: Callable[[Student], FittedVoters] | None = None
    ensemble: Ensemble | None = None

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
    def guided(self) -> bool:
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

    def fingerprint(self, run: RunContext) -> str:
        """PRIVATE. A keyed hash of what they answer from: the same content never has two accounts unnoticed."""
        ...

    def fitted(self, run: RunContext) -> FittedVoters:
        """PRIVATE. Make them ready to be asked."""
        ...

    def assist(self, data: Dataset, config: RunConfig) -> None:
        """PRIVATE. What a rank above 0 of a torchrun does while rank 0 makes them ready, where rank 0 asks for it."""
        ...

    def facts(self, data: Dataset, config: RunConfig) -> dict[str, Any]:
        """Public choices that decide their answers beside the records, by name."""
        ...

    def declared(self, data: Dataset) -> int | None:
        """About how many records there are, as publicly declared, where they use it; else None."""
        ...


@dataclass(frozen=True, kw_only=True)
class VotersBase:
    """Defaults of the protocol. A subclass gives ``name`` its default, ``num_teachers`` and ``fitted``."""

    name: str = ""

    def __post_init__(self) -> None:
        checks.one_of("voters.name", self.name, (type(self).name,))

    @property
    def guided(self) -> bool:
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

    def fingerprint(self, run: RunContext) -> str:
        return run.store.content(run.everyone)

    def registered(self, run: RunContext, votes: Votes) -> FittedVoters:
        """PRIVATE. These votes, under the random id that they had before, or a new one."""
        register = VoterRegister(run.store)
        registered = register.register_votes(votes, run.data.spec.name, run.ledger)
        remember = functools.partial(register.set_ledger_head, registered)
        return FittedVoters(id=registered.id, answers=votes, remember=remember)

    def assist(self, data: Dataset, config: RunConfig) -> None:
        """Rank 0 needs no help."""

    def facts(self, data: Dataset, config: RunConfig) -> dict[str, Any]:
        return {}

    def declared(self, data: Dataset) -> int | None:
        return None


@dataclass(frozen=True, kw_only=True)
class RecordVoters(VotersBase):
    """Records that answer for themselves, each by a function of itself and of public values.

    A subclass defines how they are asked (``ask``).

    Attributes:
        mechanism: The mechanism that prices their answers.
    """

    mechanism: ClassVar[str]

    @property
    def num_teachers(self) -> int:
        return 0

    @property
    def guided(self) -> bool:
        """Whether a later round lies in features of the student: always."""
        return True

    def check(self, config: RunConfig) -> None:
        """Raise ValueError for options of teachers, and where one record's answer is not its own."""
        if config.sanitiser is not None:
            fix = "Leave out sanitiser: every record answers for itself."
            raise checks.fail("voters", self.name, "cannot be combined with sanitiser", fix)
        given = config.mechanism.name
        if given != self.mechanism:
            what, fix = f"cannot be combined with mechanism={given}", f"Use mechanism={self.mechanism}."
            raise checks.fail("voters", self.name, what, fix)
        capacity = getattr(config.partition, "capacity", None)
        if capacity is not None:
            what = f"cannot be combined with voters={self.name}: a record more would displace another's answer"
            raise checks.fail("partition.capacity", capacity, what, "Leave out partition.capacity.")
        adjacency = config.partition.adjacency
        given = getattr(config.mechanism, "adjacency", adjacency)
        if given != adjacency:
            raise checks.fail("mechanism.adjacency", given, f"must be the partition's, {adjacency}")

    def validate_for(self, data: Dataset, config: RunConfig) -> None:
        """Raise ValueError where the partition's adjacency does not hold for these units."""
        deal(config.partition, data.private, 1, config.seed)

    def ask(
        self,
        data: Dataset,
        shards: Shards,
        *,
        encoder: nn.Module | None,
        device: torch.device | str = "cpu",
        progress: Progress = silent,
    ) -> Sensitive:
        """PRIVATE. The records of all shards, ready to answer under the shards' adjacency.

        Args:
            data: The run's data.
            shards: Which hold the records.
            encoder: Normalized points -> features, learnt from the public points or a released student's; None: the
                normalized points themselves.
            device: Device of the encoding.
            progress: Called with (done, total) records.
        """
        raise NotImplementedError(f"{type(self).__name__}: must say how its records answer, in ask")

    def fitted(self, run: RunContext) -> FittedVoters:
        """PRIVATE. The records in features of the public points; in later rounds, in those of the student."""

        def ask(encoder: nn.Module | None) -> Any:
            shards = deal(run.config.partition, run.data.private, 1, run.config.seed)
            progress = run.stages("Encoding every record")
            return self.ask(run.data, shards, encoder=encoder, device=run.config.device, progress=progress)

        def refit(guide: Student) -> FittedVoters:
            answers = ask(feature_extractor(guide.module))
            return replace(first, answers=answers, feature_PD=answers.place_PD)

        register = VoterRegister(run.store)
        registered = register.known(run.store.fingerprint(run.data.private), run.data.spec.name, 0, run.ledger)
        remember = functools.partial(register.set_ledger_head, registered)
        with run.clock("records"):
            answers = ask(run.encoder())
        first = FittedVoters(id=registered.id, answers=answers, remember=remember, refit=refit)
        return first
