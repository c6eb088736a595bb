"""Votes of teachers that each site trains on disjoint shards of its own records, as PATE does at one curator.

The noisy sum over all sites is what ``mechanism=gaussian`` with counts releases at one curator, so the same student
learns from it. Other mechanisms, and privacy costs that depend on the data, need the largest count or the votes without
noise. Nobody holds those of several sites (``check_mechanism``).
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pate_torch import networks
from pate_torch.core import checks
from pate_torch.core.device import deterministic_mode
from pate_torch.core.progress import Stages, StageTimer
from pate_torch.mechanisms.gaussian import GNMax
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.privacy.ledger import open_ledger
from pate_torch.privacy.partition import PARTITIONS, DatasetFacts
from pate_torch.privacy.records import DataSpec, PrivateRecords, PublicPool
from pate_torch.privacy.sensitive import Sensitivity
from pate_torch.sites.charter import Terms
from pate_torch.sites.points import check_spec, get_raw_spec
from pate_torch.sites.rounds import MAX_INPUT
from pate_torch.sites.tables import COUNT_STEPS, KINDS, PointTable, SiteTable
from pate_torch.teachers.groups import VoteRequest
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import TeacherStore

MAX_OPTIONS, MAX_OPTION = 16, 4096
"""Largest number of sizes in the options of a teacher's network, and the largest size."""
MAX_PARAMETERS = 1 << 24
"""Largest number of parameters of a teacher."""
MAX_TRAINING_RECORDS = 1 << 24
"""Largest number of records that a teacher reads in all its steps, repeated ones counted each time."""
_DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.uint8)}
_MAXIMA = ("confident", "exponential", "interactive", "laplace", "single_stable", "soft_sparse_vector", "sparse_vector")


def check_mechanism(name: str) -> None:
    """Raise ValueError if a mechanism of one curator cannot be answered by a sum over sites."""
    if name in _MAXIMA:
        problem = "needs a maximum of the raw sum or the raw votes, and nobody holds those of several sites"
        raise checks.error("mechanism", name, problem, "Ask for votes with mechanism gaussian, which releases a sum.")


def make_recipe(settings: Mapping[str, Any]) -> TeacherRecipe:
    """Make the recipe of the teachers from PUBLIC settings, with the network "logistic" if they name no network."""
    return TeacherRecipe(**{"network": "logistic", **checks.mapping("teacher", settings, fields(TeacherRecipe))})


def check_size(teacher: TeacherRecipe, spec: DataSpec) -> None:
    """Raise ValueError if the joiner asks sites to train larger networks, or for longer, than any site does."""
    sizes: list[Any] = []
    for value in teacher.options.values():
        sizes += value if isinstance(value, list | tuple) else [value]
    if len(sizes) > MAX_OPTIONS or any(isinstance(size, int) and size > MAX_OPTION for size in sizes):
        problem = f"must be at most {MAX_OPTIONS} numbers of at most {MAX_OPTION:,}"
        raise checks.error("teacher.options", f"{len(sizes)} sizes", problem, "No site answers such a round.")
    with torch.device("meta"):  # which counts parameters without allocating them
        network = networks.build(teacher.network, spec.input_shape, spec.num_classes, **teacher.options)
    for name, size, limit in (
        ("teacher.network", networks.count_parameters(network), MAX_PARAMETERS),
        ("teacher.steps x teacher.batch_size", teacher.steps * teacher.batch_size, MAX_TRAINING_RECORDS),
    ):
        if size > limit:
            raise checks.error(name, size, f"must be at most {limit:,}", "No site answers such a round.")


@dataclass(frozen=True, kw_only=True, eq=False)
class VoteCounts(PointTable):
    """Releasable. Number of teachers that vote for each class at each question.

    Attributes:
        query_x: Questions, which are public points, [Q, ...].
        teacher: Recipe of the teachers of all sites.
        num_teachers: Number K_i of teachers of the site that counts the votes. None at the joiner.
        home: PRIVATE. Folder of the store of teachers of the site that counts the votes. None at the joiner.
    """

    name = "votes"
    query_x: Tensor
    teacher: TeacherRecipe
    num_teachers: int | None = None
    home: Path | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.teacher.start is not None:
            problem = "is learned from all public points, and a round has its questions only"
            raise checks.error("teacher.start", "", problem, "Leave it out.")
        numbers = [value for value in vars(self.teacher).values() if isinstance(value, int | float)]
        if not all(abs(number) <= MAX_INPUT for number in numbers):
            raise checks.error("teacher", "", "has numbers that exceed 2^40", "No site answers such a round.")
        check_size(self.teacher, self.spec)
        self.teacher.check(self.spec)

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.query_x), self.spec.num_classes

    def compute_squared_length(self, adjacency: str) -> int:
        """Compute the squared sensitivity, 2 Q: one vote moves from a class to another at each of Q questions.

        Under add_remove, the unit's id alone chooses the shard of all its records, and no other unit moves. Therefore
        a group with many records, or records with equal ids, reach one teacher, whether they are added, removed or
        changed. Under replace_one, the unit is a position whose shard is fixed whatever its record says, so a new
        record reaches the teacher of the old one. A teacher has one vote at each question, also without records.
        A unit with records at M sites moves one teacher at each of them, and ``compute_events`` multiplies by M.
        """
        return 2 * len(self.query_x) * COUNT_STEPS**2

    def compute_bound(self, terms: Terms) -> int:
        """Compute the number of teachers of all sites, in whole numbers of the table.

        Raises:
            ValueError: A site has no teachers, or its units cannot be assigned to them.
        """
        checks.integer("teachers", min(terms.teachers), low=1, fix="Make a charter that states them for each site.")
        for num_records, num_teachers in zip(terms.records, terms.teachers, strict=True):
            PARTITIONS[terms.adjacency].check(terms.unit, num_records or None, num_teachers)
        if terms.adjacency == "replace_one" and get_raw_spec(self.spec).is_image:
            problem = "does not hold for votes on images: another name of one file moves other files to other shards"
            raise checks.error("adjacency", terms.adjacency, problem, "Use add_remove for votes on images.")
        return sum(terms.teachers) * COUNT_STEPS

    def at_site(self, num_teachers: int, home: Path) -> VoteCounts:
        """Return these votes with the number of teachers and the store of a site."""
        return replace(self, num_teachers=num_teachers, home=home)

    def count(self, records: PrivateRecords, adjacency: str) -> SiteTable:
        """PRIVATE. Load or train the teachers of this site, and count their votes."""
        assert self.home is not None and self.num_teachers is not None
        store, device = TeacherStore(self.home), torch.device("cpu")
        digest = hashlib.sha256(json.dumps(self.spec.to_dict(), sort_keys=True).encode()).hexdigest()[:16]
        facts = DatasetFacts(
            spec=replace(self.spec, name=f"{self.spec.name} {digest}"),  # teachers of other public facts are others
            pool=PublicPool(self.query_x),
            unit=records.unit,
            partition=PARTITIONS[adjacency],
            num_units=len(records) if adjacency == "replace_one" else None,
        )
        method = TeacherVotes(num_teachers=self.num_teachers, teacher=self.teacher, mechanism=GNMax(sigma=1.0))
        options: dict[str, Any] = {"seed": 0, "device": device, "store": store, "clock": StageTimer()}
        with Stages() as stages, deterministic_mode(device), open_ledger(self.home) as ledger:
            inputs = MethodInputs(records=records, facts=facts, ledger=ledger, stages=stages, **options)
            stored, new_votes = method.load_or_train(inputs)
            count: Callable[[], Any] = lambda: new_votes or VoteRequest(self.query_x).count(stored.ensemble)  # noqa: E731
            votes = store.get_or_count_votes(stored.id, self.query_x, count)
        row, rows = votes.sensitivity, len(votes)
        sensitivity = Sensitivity(l1=rows * row.l1, l2=math.sqrt(rows) * row.l2, linf=row.linf, adjacency=adjacency)
        set_head = functools.partial(store.set_ledger_head, stored.id)
        numbers = votes.counts_QC.long().numpy() * COUNT_STEPS
        return SiteTable(numbers, sensitivity, self.unit_length, records, on_new_head=set_head)

    def to_content(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        facts = {"spec": self.spec.to_dict(), "teacher": asdict(self.teacher)}
        return facts | {"dtype": str(self.query_x.dtype)}, {"query_x": self.query_x.double().flatten(1).numpy()}

    @classmethod
    def from_content(cls, label: str, facts: dict[str, Any], arrays: dict[str, np.ndarray]) -> VoteCounts:
        spec, query_x = DataSpec.from_dict(facts["spec"]), torch.from_numpy(arrays["query_x"].copy())
        check_spec(spec, query_x.shape[1])
        query_x = query_x.to(_DTYPES[facts["dtype"]]).reshape(-1, *spec.input_shape)
        return cls(label=label, spec=spec, query_x=query_x, teacher=make_recipe(facts["teacher"]))


KINDS[VoteCounts.name] = VoteCounts
