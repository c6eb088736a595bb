"""Teachers: one network for each shard of the private records, and one vote of each on every public point."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

from pate_torch.core import checks
from pate_torch.core.files import compute_tensor_digest
from pate_torch.core.progress import Stages, do_nothing
from pate_torch.core.run_folders import check_hex_id
from pate_torch.methods.base import PreparedMethod, PrivateMethodBase
from pate_torch.methods.description import MethodDescription, format_each_unit
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.partition import assign_shards
from pate_torch.privacy.records import Dataset
from pate_torch.privacy.sensitive import SensitiveValue, SoftVotes, Votes
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import TeacherEnsemble
from pate_torch.teachers.independence import Trial
from pate_torch.teachers.store import Identity, StoredEnsemble, TeacherStore
from pate_torch.teachers.training import train

if TYPE_CHECKING:
    from pate_torch.config import RunConfig
    from pate_torch.context import RunContext

Tally = Callable[[TeacherEnsemble], Tensor]
"""PRIVATE. Some of the teachers -> the counts of their votes on the public points, int32 [P, C]."""


@dataclass(frozen=True, kw_only=True)
class TeacherVotes(PrivateMethodBase):
    """Each votes on every public point by itself.

    Attributes:
        num_teachers: K. A unit's records lie in one shard, so that one unit moves one vote on every question.
        teachers_id: Id of an ensemble to use again, or that a release showed for it; None: one trained before on the
            same records, or a new one, under a fresh id.
        alias: Fresh id that the release shows for ``teachers_id``; None: ``teachers_id`` itself, which the user named.
    """

    name: str = "teachers"
    num_teachers: int
    teachers_id: str | None = None
    alias: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.integer("num_teachers", self.num_teachers, low=1)
        if self.teachers_id is not None:
            check_hex_id("teachers", self.teachers_id)

    def check(self, config: RunConfig) -> None:
        """Raise ValueError where there is nothing to ask teachers."""
        if config.labels is not None and self.teachers_id is not None:
            fix = "Leave out teachers."
            raise checks.error("labels", config.labels, "a release is reused without teachers", fix)

    def check_data(self, data: Dataset, config: RunConfig) -> None:
        """Raise ValueError where no teacher can learn from these data, or stored ones are of other data."""
        try:
            config.teacher.check(data.spec)
        except ValueError as error:
            raise ValueError(checks.prefix_error_key("teacher", error)) from error
        nominal_size = data.spec.nominal_size
        fix = f"About {nominal_size} private records are declared, and every teacher needs one of its own."
        checks.integer("num_teachers", self.num_teachers, low=1, high=nominal_size, fix=fix)
        assign_shards(config.partition, data.private, self.num_teachers, config.seed)
        if self.teachers_id is not None:
            store, path = TeacherStore(config.root), config.ledger_path
            store.load_manifest(self.teachers_id)  # a wrong id is refused before the fingerprint leaves its key behind
            with Ledger(path) if path.exists() else contextlib.nullcontext() as ledger:
                load_reusable(self.teachers_id, store, self.make_identity(data, config), ledger)

    def estimate_votes_per_query(self, data: Dataset, config: RunConfig) -> int | None:
        return self.num_teachers

    def make_identity(self, data: Dataset, config: RunConfig) -> Identity:
        """PRIVATE. The identity of this run's teachers, down to the content of the records."""
        pool = {} if config.teacher.start is None else {"pool": compute_tensor_digest(data.pool.x)}
        return Identity(
            dataset=data.spec.name,
            fingerprint=TeacherStore(config.root).compute_fingerprint(data.private),
            partition=dataclasses.asdict(config.partition),  # type: ignore[call-overload]
            configuration=config.teacher.to_configuration() | pool,
            seed=config.seed,
            num_teachers=self.num_teachers,
        )

    def describe(self, unit: str, config: RunConfig) -> MethodDescription:
        counts = getattr(config.mechanism, "counts", False)
        return describe(self.num_teachers, unit, counts=counts, soft=self.is_soft(config), retrains_one=True)

    # ---- training -----------------------------------------------------------------------------------------------

    def prepare(self, run: RunContext) -> PreparedMethod:
        """PRIVATE. The ensemble, and its votes on the public pool."""
        stored_teachers, is_new = self.load_or_train(run)

        def count_votes() -> Votes:
            # Only where every rank has just trained do the ranks ask together.
            return self._count_votes(stored_teachers.ensemble, run.data, run.config, run.stages, all_ranks=is_new)

        with run.clock("votes"):
            votes = run.store.get_or_count_votes(
                stored_teachers.id, run.data.pool.x, count_votes, self._get_vote_variant(run.config)
            )
        record_ledger_head = functools.partial(run.store.set_ledger_head, stored_teachers.id)
        alias = (
            self.alias
            or self.teachers_id
            or run.store.create_alias(stored_teachers.identity.fingerprint, stored_teachers.id)
        )
        sensitive: SensitiveValue = votes
        if self.is_soft(run.config):
            progress, device = run.stages("Asking for probabilities"), run.config.device
            sensitive = SoftVotes.from_probabilities(
                stored_teachers.ensemble.predict_proba(run.data.pool.x, device=device, progress=progress)
            )
        return PreparedMethod(
            id=alias, sensitive=sensitive, record_ledger_head=record_ledger_head, ensemble=stored_teachers.ensemble
        )

    def load_or_train(self, run: RunContext) -> tuple[StoredEnsemble, bool]:
        """PRIVATE. The stored ensemble asked for, one trained before in the same way on the same data, or a new one.

        Where another process trains them, this one waits for it, and takes over where it was killed.

        Returns:
            The ensemble, and whether it is new.
        """
        config, data = run.config, run.data
        with run.clock("partition"):
            shards = assign_shards(config.partition, data.private, self.num_teachers, config.seed)
            identity = self.make_identity(data, config)
        stored_teachers = self._find_stored_teachers(run, identity)
        if stored_teachers is not None:
            return stored_teachers, False
        run.check_budget()  # training may take hours

        def report_wait(holder: str) -> None:
            run.stages.print_message(f"These teachers are being trained by {holder}; waiting for them.")

        with run.store.lock_training(identity, report_wait) as checkpoints:
            stored_teachers = self._find_stored_teachers(run, identity)  # whoever was waited for has trained them
            if stored_teachers is not None:
                return stored_teachers, False
            run.check_budget()  # or has failed, and others have charged the account meanwhile
            distributed.broadcast_text(distributed.TRAIN)
            with run.clock("start"):
                trunk = distributed.learn_public_trunk(config.teacher, data, config.seed, config.device, run.stages)

            def check_retraining(trial: Trial) -> None:
                progress = run.stages("Training one teacher again, alone")
                try:
                    trial.run(data.pool.x, config.device)
                except ValueError:
                    shutil.rmtree(checkpoints, ignore_errors=True)  # these teachers are not to be used
                    raise
                progress(1, 1)

            with run.clock("teachers"):
                ensemble = train(
                    data.private,
                    data.spec,
                    shards,
                    config.teacher,
                    seed=config.seed,
                    device=config.device,
                    trunk=trunk,
                    checkpoint_dir=checkpoints,
                    progress=run.stages(f"Training {self.num_teachers} teachers"),
                    log=do_nothing if run.private_writer is None else run.private_writer.log,
                    on_losses=do_nothing if run.private_writer is None else run.private_writer.log_losses,
                    on_trial=check_retraining,
                )
            head = run.ledger.get_head()
            teachers_id = run.store.save(ensemble, identity, head)
            shutil.rmtree(checkpoints, ignore_errors=True)
        return StoredEnsemble(id=teachers_id, ensemble=ensemble, identity=identity, ledger_head=head), True

    def run_worker_rank(self, data: Dataset, config: RunConfig) -> None:
        """PRIVATE. Do the part of a torchrun's rank above 0 while rank 0 trains: its share of training and of votes."""
        stages = Stages(quiet=True)
        shards = assign_shards(config.partition, data.private, self.num_teachers, config.seed)
        with TeacherStore(config.root).try_lock_training(self.make_identity(data, config)) as (
            checkpoints,
            owns_checkpoints,
        ):
            ensemble = train(
                data.private,
                data.spec,
                shards,
                config.teacher,
                seed=config.seed,
                device=config.device,
                trunk=distributed.learn_public_trunk(config.teacher, data, config.seed, config.device, stages),
                checkpoint_dir=checkpoints,
            )
            self._count_votes(ensemble, data, config, stages, all_ranks=True)
            if owns_checkpoints:  # on a machine of its own; by now rank 0 has stored the ensemble
                shutil.rmtree(checkpoints, ignore_errors=True)

    def _find_stored_teachers(self, run: RunContext, identity: Identity) -> StoredEnsemble | None:
        teachers_id = self.teachers_id or run.store.find(identity)
        if teachers_id is None:
            return None
        stored_teachers = load_reusable(teachers_id, run.store, identity, run.ledger)
        if self.teachers_id is None:
            run.stages.print_message(f"Reusing teachers {teachers_id}: same data, same configuration.")
        return stored_teachers

    # ---- votes --------------------------------------------------------------------------------------------------

    def _count_votes(
        self, ensemble: TeacherEnsemble, data: Dataset, config: RunConfig, stages: Stages, *, all_ranks: bool
    ) -> Votes:
        """PRIVATE. Count the votes; ``all_ranks``: whether every rank asks its share of the teachers."""
        tally = self._tally(data, config, stages, all_ranks=all_ranks)
        return distributed.count_votes(ensemble, tally, len(data.pool), across_ranks=all_ranks)

    def _tally(self, data: Dataset, config: RunConfig, stages: Stages, *, all_ranks: bool) -> Tally:
        progress = stages("Counting votes")
        return lambda teachers: teachers.tally(data.pool.x, device=config.device, progress=progress)

    def is_soft(self, config: RunConfig) -> bool:
        """Whether their probabilities are opened, and not their votes."""
        return bool(getattr(config.mechanism, "soft", False))

    def _get_vote_variant(self, config: RunConfig) -> str:
        """Names what decides the votes beside the teachers and the pool; empty where nothing does."""
        return ""


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
