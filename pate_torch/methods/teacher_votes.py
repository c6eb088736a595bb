"""Teachers: one network for each shard of the private records, and one vote of each on every public point.

PATE in four steps (Papernot et al. 2017, 2018):

    1  deal the privacy units to K disjoint shards (``privacy.partition``)
    2  train one teacher on each shard; train one of them again, alone, and compare: it must come out the same
    3  count the votes of all teachers on every public point
    4  answer questions in rounds through a mechanism (``methods.labeling``), which alone opens the votes

One privacy unit reaches one shard, hence one teacher, hence one vote on every question: the L2 sensitivity of the votes
on a question is sqrt(2) under either adjacency. Under add_remove a keyed hash of the unit's id alone decides its shard,
so one unit more or less moves no other; under replace_one a permutation of positions does, which reads no record.
"""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.files import compute_tensor_digest
from pate_torch.core.run_folders import check_hex_id
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.methods import feasibility
from pate_torch.methods.base import MethodInputs
from pate_torch.methods.description import MethodDescription, format_each_unit
from pate_torch.methods.labeling import LabelingMethod, PreparedLabeling
from pate_torch.privacy.facts import DatasetFacts
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import assign_shards
from pate_torch.privacy.sensitive import SensitiveValue, SoftVotes, Votes
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import TeacherEnsemble, tally_over_ranks
from pate_torch.teachers.independence import Trial
from pate_torch.teachers.recipe import TeacherRecipe
from pate_torch.teachers.store import Identity, StoredEnsemble, TeacherStore
from pate_torch.teachers.training import train

Tally = Callable[[TeacherEnsemble], Tensor]
"""PRIVATE. Some of the teachers -> the counts of their votes on the public points, int32 [P, C]."""


@dataclass(frozen=True, kw_only=True)
class VotingMethod(LabelingMethod):
    """Base of the methods in which teachers vote, whoever trained them."""

    mechanism: VoteMechanism

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.mechanism, VoteMechanism):
            fix = "Use mechanism=gaussian; or method=reverse_knn with histogram, gradients with gradient_descent."
            problem = f"cannot be combined with method={self.name}: it opens no votes of teachers"
            raise checks.error("mechanism", self.mechanism.name, problem, fix)

    def validate(self, facts: DatasetFacts) -> None:
        super().validate(facts)
        num_teachers, num_classes = self.ensemble_size, facts.spec.num_classes
        assert num_teachers is not None
        self.mechanism.check(
            num_queries=self.num_queries, num_teachers=num_teachers, num_classes=num_classes, rounds=self.num_rounds
        )
        feasibility.check_informative(
            self.mechanism,
            num_teachers=num_teachers,
            num_classes=num_classes,
            allow_uninformative=self.allow_uninformative_labels,
        )

    def forecast_warning(self, facts: DatasetFacts) -> str | None:
        assert self.ensemble_size is not None
        return feasibility.format_low_signal_warning(
            self.mechanism, self.ensemble_size, facts.spec.num_classes, self.num_queries
        )

    def from_votes(self, inputs: MethodInputs, votes: Votes, *, are_from_records: bool = True) -> PreparedLabeling:
        """PRIVATE. The method ready to answer from these votes, of which nothing else is kept, under a fresh id.

        Args:
            inputs: What the session gave.
            votes: PRIVATE. The votes on the public points.
            are_from_records: Whether the records of this run, and no others, trained the teachers. The fresh id is then
                tied to these records, so that the owner's membership test knows who the members are; else to the votes.
        """
        store, prepared = inputs.store, PreparedLabeling.from_method(self, inputs, votes)
        known_by = (
            store.compute_fingerprint(inputs.records) if are_from_records else store.compute_votes_fingerprint(votes)
        )
        prepared.id = store.create_alias(known_by)
        prepared.votes = votes
        return prepared


@dataclass(frozen=True, kw_only=True)
class TeacherVotes(VotingMethod):
    """Each votes on every public point by itself.

    Attributes:
        num_teachers: K. A unit's records lie in one shard, so that one unit moves one vote on every question.
        teacher: How one network is trained on a shard.
        teachers_id: Id of a stored ensemble to use again, as the store or an earlier release shows it; None: use an
            ensemble that was trained before in the same way on the same records, else train one.
        alias: What the release shows in place of ``teachers_id``: a fresh id, which the store alone can resolve. None:
            show ``teachers_id``, because the user named it.
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
        """Whether the teachers' probabilities are opened, and not their votes."""
        return self.mechanism.soft

    def validate(self, facts: DatasetFacts) -> None:
        """Raise ValueError where no teacher can learn from these data, or their answers could be no use."""
        super().validate(facts)
        with checks.prefixed_errors("teacher"):
            self.teacher.check(facts.spec)
        nominal_size = facts.spec.nominal_size
        fix = f"About {nominal_size} private records are declared, and every teacher needs one of its own."
        checks.integer("num_teachers", self.num_teachers, low=1, high=nominal_size, fix=fix)
        facts.partition.check(facts.unit, facts.num_units, self.num_teachers)

    def describe(self, facts: DatasetFacts) -> MethodDescription:
        counts = self.mechanism.releases_counts
        return describe(self.num_teachers, facts.unit, counts=counts, soft=self.is_soft, retrains_one=True)

    # ---- private: training ----------------------------------------------------------------------------------------

    def prepare(self, inputs: MethodInputs) -> PreparedLabeling:
        """PRIVATE. Train the ensemble or find it again, and count its votes on the public pool."""
        stored_teachers, is_new = self.load_or_train(inputs)
        pool_x, ensemble = inputs.facts.pool.x, stored_teachers.ensemble

        def count_votes() -> Votes:
            # Only where every rank has just trained do the ranks ask together.
            return self._count_votes(ensemble, inputs, all_ranks=is_new)

        with inputs.clock("votes"):
            votes = inputs.store.get_or_count_votes(
                stored_teachers.id, pool_x, count_votes, self._get_vote_variant(inputs)
            )
        sensitive: SensitiveValue = votes
        if self.is_soft:
            progress = inputs.stages("Asking for probabilities")
            probability_KPC = ensemble.predict_proba(pool_x, device=inputs.device, progress=progress)
            sensitive = SoftVotes.from_probabilities(probability_KPC)
        prepared = PreparedLabeling.from_method(self, inputs, sensitive)
        prepared.id = self.alias or self.teachers_id or _create_alias(stored_teachers, inputs.store)
        prepared.votes, prepared.ensemble = None if self.is_soft else votes, ensemble
        prepared.on_ledger_head = functools.partial(inputs.store.set_ledger_head, stored_teachers.id)
        return prepared

    def check_stored(self, inputs: MethodInputs) -> None:
        if self.teachers_id is not None:
            inputs.store.load_manifest(self.teachers_id)  # a wrong id is refused before a fingerprint's key is made
            load_reusable(self.teachers_id, inputs.store, self.make_identity(inputs), inputs.ledger)

    def make_identity(self, inputs: MethodInputs) -> Identity:
        """PRIVATE. The identity of this run's teachers, down to the content of the records."""
        pool = {} if self.teacher.start is None else {"pool": compute_tensor_digest(inputs.facts.pool.x)}
        return Identity(
            dataset=inputs.facts.spec.name,
            fingerprint=inputs.store.compute_fingerprint(inputs.records),
            partition=dataclasses.asdict(inputs.facts.partition),  # type: ignore[call-overload]
            configuration=self.teacher.to_configuration() | pool,
            seed=inputs.seed,
            num_teachers=self.num_teachers,
        )

    def load_or_train(self, inputs: MethodInputs) -> tuple[StoredEnsemble, bool]:
        """PRIVATE. The stored ensemble asked for, one trained before in the same way on the same data, or a new one.

        Where another process trains them, this one waits for it, and takes over where it was killed.

        Returns:
            The ensemble, and whether it is new.
        """
        store, ledger = inputs.store, inputs.ledger
        assert ledger is not None
        with inputs.clock("partition"):
            identity = self.make_identity(inputs)
        stored_teachers = self._find_stored_teachers(inputs, identity)
        if stored_teachers is not None:
            return stored_teachers, False
        inputs.check_budget()  # training may take hours

        def report_wait(holder: str) -> None:
            inputs.stages.print_message(f"These teachers are being trained by {holder}; waiting for them.")

        with store.lock_training(identity, report_wait) as checkpoints:
            stored_teachers = self._find_stored_teachers(inputs, identity)  # whoever was waited for has trained them
            if stored_teachers is not None:
                return stored_teachers, False
            inputs.check_budget()  # or has failed, and others have charged the account meanwhile
            distributed.broadcast_object(distributed.TRAIN)

            def check_retraining(trial: Trial) -> None:
                progress = inputs.stages("Training one teacher again, alone")
                try:
                    trial.run(inputs.facts.pool.x, inputs.device)
                except ValueError:
                    shutil.rmtree(checkpoints, ignore_errors=True)  # these teachers are not to be used
                    raise
                progress(1, 1)

            ensemble = self._train(
                inputs,
                checkpoint_dir=checkpoints,
                progress=inputs.stages(f"Training {self.num_teachers} teachers"),
                log=inputs.log,
                on_losses=inputs.log_losses,
                on_trial=check_retraining,
            )
            head = ledger.get_head()
            teachers_id = store.save(ensemble, identity, head)
            shutil.rmtree(checkpoints, ignore_errors=True)
        return StoredEnsemble(id=teachers_id, ensemble=ensemble, identity=identity, ledger_head=head), True

    def assist(self, inputs: MethodInputs) -> None:
        """PRIVATE. Do the part of a torchrun's rank above 0 while rank 0 trains: its share of training and of votes."""
        with inputs.store.try_lock_training(self.make_identity(inputs)) as (checkpoints, owns_checkpoints):
            ensemble = self._train(inputs, checkpoint_dir=checkpoints)
            self._count_votes(ensemble, inputs, all_ranks=True)
            if owns_checkpoints:  # on a machine of its own; by now rank 0 has stored the ensemble
                shutil.rmtree(checkpoints, ignore_errors=True)

    def _train(self, inputs: MethodInputs, **options: Any) -> TeacherEnsemble:
        """PRIVATE. One network for each shard."""
        facts, seed, device = inputs.facts, inputs.seed, inputs.device
        shards = assign_shards(facts.partition, inputs.records, self.num_teachers, seed)
        with inputs.clock("start"):
            trunk = self.teacher.learn_trunk(facts.pool, facts.spec, seed, device, inputs.stages)
        with inputs.clock("teachers"):
            return train(
                inputs.records, facts.spec, shards, self.teacher, seed=seed, device=device, trunk=trunk, **options
            )

    def _find_stored_teachers(self, inputs: MethodInputs, identity: Identity) -> StoredEnsemble | None:
        teachers_id = self.teachers_id or inputs.store.find(identity)
        if teachers_id is None:
            return None
        stored_teachers = load_reusable(teachers_id, inputs.store, identity, inputs.ledger)
        if self.teachers_id is None:
            inputs.stages.print_message(f"Reusing teachers {teachers_id}: same data, same configuration.")
        return stored_teachers

    # ---- private: votes -------------------------------------------------------------------------------------------

    def _count_votes(self, ensemble: TeacherEnsemble, inputs: MethodInputs, *, all_ranks: bool) -> Votes:
        """PRIVATE. Count the votes; ``all_ranks``: whether every rank asks its share of the teachers."""
        tally = self._make_tally(inputs, all_ranks=all_ranks)
        if all_ranks:
            return tally_over_ranks(ensemble, tally, len(inputs.facts.pool))
        return Votes(tally(ensemble), len(ensemble))

    def _make_tally(self, inputs: MethodInputs, *, all_ranks: bool) -> Tally:
        progress, pool_x = inputs.stages("Counting votes"), inputs.facts.pool.x
        return lambda teachers: teachers.tally(pool_x, device=inputs.device, progress=progress)

    def _get_vote_variant(self, inputs: MethodInputs) -> str:
        """Names what decides the votes beside the teachers and the pool; empty where nothing does."""
        return ""


def _create_alias(stored_teachers: StoredEnsemble, store: TeacherStore) -> str:
    """A fresh id that a release shows for an ensemble."""
    return store.create_alias(stored_teachers.identity.fingerprint, stored_teachers.id)


def describe(
    num_teachers: int, unit: str, *, counts: bool = False, soft: bool = False, retrains_one: bool = False
) -> MethodDescription:
    """What reports say of teachers.

    Args:
        num_teachers: K.
        unit: Privacy unit.
        counts: Whether the noisy votes leave, too.
        soft: Whether they give probabilities, of which scores leave.
        retrains_one: Whether one of them, where there are several, was trained again alone.
    """
    retraining_clause = (
        f" 1 of {num_teachers} tried: one teacher, drawn at random, was trained again in a process that held only its "
        "own share, and came out the same."
    )
    extra_output = ", with the noisy votes behind them," if counts else ", with a score of each class," if soft else ""
    action = "gave class probabilities for" if soft else "voted on"
    noise_target = "how far they agree" if soft else "the votes"
    return MethodDescription(
        subject="teachers",
        procedure=f"{num_teachers} teachers, each trained on its own share of the records, {action} {{asked}} public "
        f"questions. The mechanism {{mechanism}} added noise to {noise_target}, and only its {{answered}} answers"
        f"{extra_output} left. A student sees nothing but public points and these answers.",
        query_sentence=f"{{answered}} of {{asked}} answered, by {num_teachers} teachers",
        examples="Public points, each with the label the noisy vote gave it. Noise and teachers err: some are wrong.",
        assumptions=(
            f"{format_each_unit(unit)} reached exactly one of the {num_teachers} teachers, and no teacher learnt "
            "anything from outside its own share." + (retraining_clause if retrains_one and num_teachers > 1 else ""),
        ),
        public_time=True,
    )


def load_reusable(teachers_id: str, store: TeacherStore, identity: Identity, ledger: Ledger | None) -> StoredEnsemble:
    """PRIVATE. The stored ensemble called ``teachers_id``.

    Raises:
        ValueError: It is unknown, damaged, of other data, or apart from its ledger.
    """
    stored_teachers = store.load(teachers_id)
    # Votes of other data, or under another partition, would be charged to the wrong account.
    for key, fix in (
        ("dataset", "Set dataset.name to the name they were trained under."),
        ("num_teachers", "Set num_teachers to theirs."),
        ("partition", "Use the partition they were trained with."),
        ("fingerprint", "They were trained on other records of the same name; train new ones by leaving out teachers."),
    ):
        if getattr(stored_teachers.identity, key) != getattr(identity, key):
            stored_value = "another one" if key == "fingerprint" else repr(getattr(stored_teachers.identity, key))
            raise checks.error("teachers", teachers_id, f"were trained with {key} {stored_value}", fix)
    if stored_teachers.ledger_head is not None and (
        ledger is None or not ledger.contains_head(stored_teachers.ledger_head)
    ):
        raise checks.error(
            "teachers",
            teachers_id,
            "were used with another privacy ledger than the one here",
            "Bring back the ledger.sqlite that lay beside them: it remembers what was released.",
        )
    return stored_teachers
