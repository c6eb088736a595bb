"""PATE: one network is trained on each shard of the private records, and votes on every public point.

The algorithm (Papernot et al. 2017, 2018) has five steps. Comments in this file show where each of them happens:

    1  assign the privacy units to K disjoint shards
    2  train one teacher on each shard
    3  train one teacher a second time in a process that holds only its shard. The result must be the same, else the
       training of this teacher depends on other shards
    4  count the votes of the K teachers on every public point
    5  answer queries in rounds with a mechanism, which alone makes releasable labels of votes (``methods.labeling``)

The records of one privacy unit are in one shard, so the unit influences one teacher and one vote on every query. The
L2 sensitivity of the votes on a query is sqrt(2) under either adjacency. Under add_remove, a keyed hash of the
unit's id alone decides its shard, so adding or removing a unit changes no other shard. Under replace_one, a permutation
of positions decides the shards without reading a record.

A run does not train teachers that the store already holds (``teachers.store``).
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from pate_torch.core import checks, ranks
from pate_torch.core.files import compute_tensor_digest
from pate_torch.core.progress import do_nothing
from pate_torch.core.run_folders import check_hex_id
from pate_torch.mechanisms.sparse_vector import SoftSparseVector
from pate_torch.methods.base import MethodDescription, MethodInputs
from pate_torch.methods.labeling import PreparedLabeling
from pate_torch.methods.voting import VotingMethod, describe
from pate_torch.privacy.partition import DatasetFacts, assign_shards
from pate_torch.privacy.sensitive import SoftVotes, Votes
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.groups import VoteRequest
from pate_torch.teachers.independence import RetrainingCheck
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import EnsembleFinder, Identity, StoredEnsemble
from pate_torch.teachers.training import train


@dataclass(frozen=True, kw_only=True)
class TeacherVotes(VotingMethod):
    """PATE with teachers of one architecture, each of which votes on every public point independently.

    Attributes:
        num_teachers: Number K of teachers.
        teacher: Recipe by which one teacher is trained on its shard.
        teachers_id: Id of a stored ensemble, from the store or from an earlier release. None to use a stored ensemble
            that was trained in the same way on the same records, or to train a new one.
        alias: Id that the release shows in place of ``teachers_id``. Only the store can resolve an alias. None to show
            ``teachers_id`` or, if this is None, a new alias.
    """

    name: str = "teachers"
    num_teachers: int
    teacher: TeacherRecipe = field(default_factory=TeacherRecipe)
    teachers_id: str | None = None
    alias: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("num_teachers", self.num_teachers, low=1)
        if self.teachers_id is not None:
            check_hex_id("teachers", self.teachers_id)

    @property
    def ensemble_size(self) -> int:
        return self.num_teachers

    @property
    def is_soft(self) -> bool:
        """Whether the mechanism opens the class probabilities of the teachers instead of their votes."""
        return self.mechanism.soft

    def validate(self, facts: DatasetFacts) -> None:
        super().validate(facts)
        with checks.prefixed_errors("teacher"):
            self.teacher.check(facts.spec)
        nominal_size = facts.spec.nominal_size
        fix = f"About {nominal_size} private records are declared, and every teacher needs at least one."
        checks.integer("num_teachers", self.num_teachers, low=1, high=nominal_size, fix=fix)
        facts.partition.check(facts.unit, facts.num_units, self.num_teachers)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        counts = self.mechanism.releases_counts
        return describe(self.num_teachers, facts.unit, counts=counts, soft=self.is_soft, retrains_one=True)

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        """PRIVATE. Load or train the teachers, and count their votes. ``PreparedLabeling.release`` is step 5."""
        stored_teachers, new_votes = self.load_or_train(inputs)  # steps 1 to 3, and 4 for new teachers
        store, pool_x, ensemble = inputs.store, inputs.facts.pool.x, stored_teachers.ensemble

        def count_votes() -> Votes | SoftVotes:  # step 4 for stored teachers
            request = self._make_vote_request(inputs, all_ranks=False)
            return request.count(ensemble, inputs.device, inputs.stages("Counting votes"))

        with inputs.clock("votes"):
            count: Callable[[], Any] = count_votes if new_votes is None else lambda: new_votes
            variant = self._get_vote_variant(inputs)
            votes = count() if self.is_soft else store.get_or_count_votes(stored_teachers.id, pool_x, count, variant)
        prepared = PreparedLabeling.from_method(self, inputs, votes)
        fingerprint = stored_teachers.identity.fingerprint
        prepared.id = self.alias or self.teachers_id or store.create_alias(fingerprint, stored_teachers.id)
        prepared.votes, prepared.ensemble = votes if isinstance(votes, Votes) else None, ensemble
        prepared.on_ledger_head = functools.partial(store.set_ledger_head, stored_teachers.id)
        return prepared

    def load_or_train(self, inputs: MethodInputs) -> tuple[StoredEnsemble, Votes | SoftVotes | None]:
        """PRIVATE. Load the teachers from the store, or train them. Return them, and the votes of new teachers."""
        with inputs.clock("partition"):
            identity = self.make_identity(inputs)
        finder = EnsembleFinder(inputs.store, inputs.ledger, identity, inputs.stages.print_message)
        if self.teachers_id is not None:
            return finder.load(self.teachers_id), None
        return finder.find_or_train(functools.partial(self._train, inputs), inputs.check_budget)

    def _train(self, inputs: MethodInputs, folder: Path) -> tuple[TeacherEnsemble, Votes | SoftVotes]:
        """PRIVATE. Train one teacher on each shard, and count the votes. Under torchrun, every rank does its share."""
        facts, seed, device = inputs.facts, inputs.seed, inputs.device

        def retrain_one(trial: RetrainingCheck) -> None:  # step 3
            progress = inputs.stages("Training one teacher a second time")
            try:
                trial.run(facts.pool.x, device)
            except ValueError:
                shutil.rmtree(folder, ignore_errors=True)  # these teachers must not be used
                raise
            progress(1, 1)

        shards = assign_shards(facts.partition, inputs.records, self.num_teachers, seed)  # step 1
        with inputs.clock("start"):
            learn = self.teacher.learn_trunk if ranks.is_main() else do_nothing  # machines differ in the last bits
            trunk = ranks.broadcast_object(learn(facts.pool, facts.spec, seed, device, inputs.stages))
        votes = list[Votes | SoftVotes]()
        with inputs.clock("teachers"):
            ensemble = train(  # steps 2 and 4
                inputs.records,
                facts.spec,
                shards,
                self.teacher,
                seed=seed,
                device=device,
                executor=inputs.executor,
                trunk=trunk,
                folder=folder,
                request=self._make_vote_request(inputs, all_ranks=True),
                progress=inputs.stages(f"Training {self.num_teachers} teachers"),
                log=inputs.log,
                on_losses=inputs.log_losses,
                on_retraining_check=retrain_one,
                on_votes=votes.append,
                print_message=inputs.stages.print_message,
            )
        return ensemble, votes[0]

    def _make_vote_request(self, inputs: MethodInputs, *, all_ranks: bool) -> VoteRequest:
        """Make the request for the votes, on rank 0 alone or, with ``all_ranks``, on every rank of torchrun."""
        bins = self.mechanism.bins if self.is_soft and isinstance(self.mechanism, SoftSparseVector) else None
        vote, variant = self._make_vote(inputs, all_ranks=all_ranks), self._get_vote_variant(inputs)
        return VoteRequest(inputs.facts.pool.x, vote, bins, variant)

    def _make_vote(self, inputs: MethodInputs, *, all_ranks: bool) -> Callable[[Tensor], Tensor] | None:
        """PRIVATE. Make the function ``vote`` of ``TeacherEnsemble.predict``. None if teachers vote independently."""
        return None

    def _get_vote_variant(self, inputs: MethodInputs) -> str:
        """Return a key of the settings that decide the votes. Empty if only the teachers and the pool decide them."""
        return ""

    # ---- teachers of earlier runs and of other ranks --------------------------------------------------------------

    def make_identity(self, inputs: MethodInputs) -> Identity:
        """PRIVATE. Make the identity of this run's teachers from the records, the seed and the settings of training."""
        pool = {} if self.teacher.start is None else {"pool": compute_tensor_digest(inputs.facts.pool.x)}
        return Identity(
            dataset=inputs.facts.spec.name,
            fingerprint=inputs.store.compute_fingerprint(inputs.records),
            partition=dataclasses.asdict(inputs.facts.partition),  # type: ignore[call-overload]
            configuration=dataclasses.asdict(self.teacher) | pool,
            seed=inputs.seed,
            num_teachers=self.num_teachers,
        )

    def check_stored(self, inputs: MethodInputs) -> None:
        if self.teachers_id is not None:
            inputs.store.load_manifest(self.teachers_id)  # refuses a wrong id before the store creates its secret key
            finder = EnsembleFinder(inputs.store, inputs.ledger, self.make_identity(inputs))
            finder.load(self.teachers_id)

    def assist(self, inputs: MethodInputs) -> None:
        with inputs.store.try_lock_training(self.make_identity(inputs)) as (checkpoint_dir, owns_checkpoints):
            self._train(inputs, checkpoint_dir)
            if owns_checkpoints:  # rank 0 runs on another machine, and has received the files by now
                shutil.rmtree(checkpoint_dir, ignore_errors=True)
