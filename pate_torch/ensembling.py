"""The private half of a run: the ensemble (found, resumed or trained) and its votes on the public pool."""

from __future__ import annotations

import dataclasses
import functools
import shutil
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pate_torch import networks, release_store
from pate_torch.config import Plan
from pate_torch.core import checks
from pate_torch.core.progress import Clock, Stages
from pate_torch.data.partition import deal
from pate_torch.features.neighbors import coordinates
from pate_torch.ledger import Ledger
from pate_torch.networks import beneath
from pate_torch.protocols import Log, Student, silent
from pate_torch.reporting.private import PrivateBoard
from pate_torch.teachers import distributed
from pate_torch.teachers.ensemble import Ensemble
from pate_torch.teachers.store import Identity, Stored, TeacherStore, pool_hash
from pate_torch.teachers.training import Losses, train
from pate_torch.teachers.trunk import Trunk
from pate_torch.types import Dataset, PrivateData, Shards, Votes
from pate_torch.voters.gradient_sums import Leanings
from pate_torch.voters.reverse_knn import Records
from pate_torch.voters.transductive import Jointly
from pate_torch.voters.votes_file import Register

TRAIN, BASELINE, DONE = "train", "baseline", "done"
"""What rank 0 of a torchrun tells the others to do."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Teachers:
    """PRIVATE. The ensemble of a run and what it says of the public pool.

    ``ensemble`` is None where records answer for themselves, and where only votes were brought; ``fingerprint`` then
    stands for the records, which are not here.
    ``remember``: notes the newest ledger entry, so that these teachers are not used apart from their ledger.
    """

    id: str
    ensemble: Ensemble | None
    votes: Votes | Records | Leanings
    reused: bool
    fingerprint: str
    remember: Callable[[str], None]


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Loaded:
    """PRIVATE. data: without the private records kept from the teachers, for choosing a student (``validation``) or for
    the owner's membership test (``others``); None: none are. everyone: all private records, whose account is charged.
    """

    data: Dataset
    everyone: PrivateData
    validation: PrivateData | None = None
    others: PrivateData | None = None


def load(plan: Plan) -> Loaded:
    """The data set, parted as the plan says."""
    data, validation, others = plan.source.load(), None, None
    everyone = data.private
    if plan.selection is not None:
        data, validation = plan.selection.hold_out(data, plan.partition.adjacency, plan.seed)
    if plan.membership is not None:
        data, others = plan.membership.hold_out(data, plan.partition.adjacency, plan.seed)
    return Loaded(data=data, everyone=everyone, validation=validation, others=others)


def identify(plan: Plan, data: Dataset, store: TeacherStore) -> Identity:
    """PRIVATE. What decides the teachers of this run, down to the content of the records."""
    pool = {} if plan.recipe.start is None else {"pool": pool_hash(data.pool.x)}
    return Identity(
        dataset=data.spec.name,
        fingerprint=store.fingerprint(data.private),
        partition=dataclasses.asdict(plan.partition),  # type: ignore[call-overload]
        configuration=plan.recipe.configuration() | pool,
        seed=plan.seed,
        num_teachers=plan.num_teachers,
    )


def _at_hand(plan: Plan, store: TeacherStore, identity: Identity, ledger: Ledger, stages: Stages) -> Stored | None:
    """The ensemble that was asked for, or one trained before in the same way on the same data."""
    found = plan.teachers or store.find(identity)
    if found is None:
        return None
    stored = reusable(found, store, identity, ledger)
    if plan.teachers is None:
        stages.say(f"Reusing teachers {found}: same data, same configuration.")
    return stored


def obtain_ensemble(
    plan: Plan,
    data: Dataset,
    store: TeacherStore,
    ledger: Ledger,
    stages: Stages,
    clock: Clock,
    *,
    afford: Callable[[], object] = silent,
    log: Log = silent,
    losses: Losses = silent,
) -> tuple[Stored, bool]:
    """The ensemble that was asked for, one trained before in the same way on the same data, or a new one (True).

    Where another process trains them, this one waits for it, and takes over where it was killed. ``afford`` raises when
    the release that new teachers are for would be refused: training may take hours.
    """
    with clock("partition"):
        shards = deal(plan.partition, data.private, plan.num_teachers, plan.seed)
        identity = identify(plan, data, store)
    stored = _at_hand(plan, store, identity, ledger, stages)
    if stored is not None:
        return stored, False
    afford()

    def wait(holder: str) -> None:
        stages.say(f"These teachers are being trained by {holder}; waiting for them.")

    with store.training(identity, wait) as checkpoints:
        stored = _at_hand(plan, store, identity, ledger, stages)  # whoever was waited for has trained them
        if stored is not None:
            return stored, False
        afford()  # or has failed, and others have charged the account meanwhile
        distributed.broadcast_text(TRAIN)
        with clock("start"):
            trunk = public_trunk(plan, data, stages)
        with clock("teachers"):
            ensemble = train(
                data.private,
                data.spec,
                shards,
                plan.recipe,
                seed=plan.seed,
                device=plan.device,
                trunk=trunk,
                checkpoint_dir=checkpoints,
                progress=stages(f"Training {plan.num_teachers} teachers"),
                log=log,
                losses=losses,
            )
        head = ledger.head()
        found = store.save(ensemble, identity, head)
        shutil.rmtree(checkpoints, ignore_errors=True)
    return Stored(id=found, ensemble=ensemble, identity=identity, ledger_head=head), True


def public_trunk(plan: Plan, data: Dataset, stages: Stages) -> Trunk | None:
    """Features that teachers start from, learnt from the public points alone; None where they start from nothing."""
    start = plan.recipe.start
    if start is None:
        return None
    trunk = None
    if distributed.is_main():
        progress = stages("Learning features from public points")
        trunk = start.learn(data.pool.x, data.spec, seed=plan.seed, device=plan.device, progress=progress)
    return distributed.share_trunk(trunk, data.spec)


def learn_features(plan: Plan, data: Dataset, stages: Stages) -> Tensor | None:
    """Features of the public points, learnt without labels, [P, D]; None when questions look at the points as they are.

    A student that starts from the same recipe and seed finds the encoder learnt already.
    """
    if plan.representation is None:
        return None
    progress = stages("Learning features of the public points")
    return plan.representation.features(data.pool.x, data.spec, seed=plan.seed, device=plan.device, progress=progress)


def joint_voting(plan: Plan, data: Dataset, stages: Stages, *, together: bool = True) -> Jointly | None:
    """How a teacher votes on the public pool, over rank 0's features of it; None: on each point by itself.

    together: every rank asks for it; else this one alone does.
    """
    if plan.transduction is None:
        return None
    feature_PD = None
    if distributed.is_main():
        learnt = learn_features(plan, data, stages)
        feature_PD = coordinates(data.pool.x, data.spec) if learnt is None else learnt
    if together or feature_PD is None:
        shared = distributed.share_tensors(None if feature_PD is None else {"features": feature_PD})
        feature_PD = shared["features"]
    return plan.transduction.among(feature_PD)


def _manner(plan: Plan) -> str:
    """Names what decides the votes beside the teachers and the pool; empty where nothing does."""
    if plan.transduction is None:
        return ""
    learnt = {} if plan.representation is None else dataclasses.asdict(plan.representation) | {"seed": plan.seed}
    return release_store.key({"transduction": dataclasses.asdict(plan.transduction), "representation": learnt})[:16]


def consult(
    plan: Plan,
    data: Dataset,
    stored: Stored,
    store: TeacherStore,
    stages: Stages,
    *,
    reused: bool,
    together: bool = False,
) -> Teachers:
    """PRIVATE. A stored ensemble and its votes on the public pool, counted or found. together: see ``joint_voting``."""

    def ask() -> Votes:
        jointly = joint_voting(plan, data, stages, together=together)
        progress = stages("Counting votes")
        return distributed.votes(
            stored.ensemble, data.pool.x, device=plan.device, progress=progress, jointly=jointly, together=together
        )

    return Teachers(
        id=stored.id,
        ensemble=stored.ensemble,
        votes=store.votes_cached(stored.id, data.pool.x, ask, _manner(plan)),
        reused=reused,
        fingerprint=stored.identity.fingerprint,
        remember=functools.partial(store.set_ledger_head, stored.id),
    )


def obtain_teachers(
    plan: Plan,
    data: Dataset,
    store: TeacherStore,
    ledger: Ledger,
    stages: Stages,
    clock: Clock,
    board: PrivateBoard,
    afford: Callable[[], object],
) -> Teachers:
    """The ensemble (``obtain_ensemble``) and its votes on the public pool."""
    stored, fresh = obtain_ensemble(
        plan, data, store, ledger, stages, clock, afford=afford, log=board.log, losses=board.losses
    )
    with clock("votes"):
        # Only where every rank has just trained do the ranks ask together.
        return consult(plan, data, stored, store, stages, reused=plan.teachers is not None, together=fresh)


def _encoder(plan: Plan, data: Dataset, stages: Stages | None = None) -> nn.Module | None:
    """What gives features learnt from the public points alone; None where nothing does. stages: shown where it may take
    long, None where it has been learnt before.
    """
    if plan.representation is None:
        return None
    progress = silent if stages is None else stages("Learning features of the public points")
    return plan.representation.learn(data.pool.x, data.spec, seed=plan.seed, device=plan.device, progress=progress)


def census(plan: Plan, data: Dataset, stages: Stages, student: Student | None = None) -> Records | Leanings:
    """PRIVATE. Records in features of the public points; once there is a student, in its features."""
    assert plan.census is not None
    encoder = _encoder(plan, data, stages) if student is None else beneath(student.module)
    return plan.census.records(
        data,
        deal(plan.partition, data.private, 1, plan.seed),
        encoder=encoder,
        device=plan.device,
        progress=stages("Asking every record"),
    )


def convene(plan: Plan, data: Dataset, store: TeacherStore, ledger: Ledger, stages: Stages) -> Teachers:
    """PRIVATE. The records themselves, ready to be asked."""
    register = Register(store)
    fingerprint = store.fingerprint(data.private)
    enrolled = register.known(fingerprint, data.spec.name, 0, ledger)
    return Teachers(
        id=enrolled.id,
        ensemble=None,
        votes=census(plan, data, stages),
        reused=False,
        fingerprint=fingerprint,
        remember=functools.partial(register.set_ledger_head, enrolled),
    )


def enrol(votes: Votes, dataset: str, store: TeacherStore, ledger: Ledger) -> Teachers:
    """Votes of teachers that are not in the store: trained elsewhere, or of a kind that is not kept."""
    register = Register(store)
    enrolled = register.enrol(votes, dataset, ledger)
    return Teachers(
        id=enrolled.id,
        ensemble=None,
        votes=votes,
        reused=False,
        fingerprint=enrolled.fingerprint,
        remember=functools.partial(register.set_ledger_head, enrolled),
    )


def reusable(name: str, store: TeacherStore, here: Identity, ledger: Ledger | None) -> Stored:
    """The stored ensemble called ``name``. ValueError: unknown, damaged, of other data, or apart from its ledger."""
    stored = store.load(name)
    _same_data(stored.identity, here, name)
    if stored.ledger_head is not None and (ledger is None or not ledger.head_contains(stored.ledger_head)):
        raise checks.fail(
            "teachers",
            name,
            "were used with another privacy ledger than the one here",
            "Bring back the ledger.sqlite that lay beside them: it remembers what was released.",
        )
    return stored


def _same_data(stored: Identity, here: Identity, name: str) -> None:
    """Refuse teachers of other data, or under another partition: their votes would be charged to the wrong account."""
    for key, fix in (
        ("dataset", "Set dataset.name to the name they were trained under."),
        ("num_teachers", "Set num_teachers to theirs."),
        ("partition", "Use the partition they were trained with."),
        ("fingerprint", "They were trained on other records of the same name; train new ones by leaving out teachers."),
    ):
        if getattr(stored, key) != getattr(here, key):
            there = "another one" if key == "fingerprint" else repr(getattr(stored, key))
            raise checks.fail("teachers", name, f"were trained with {key} {there}", fix)


def nonprivate(plan: Plan, data: Dataset, stages: Stages) -> Ensemble:
    """PRIVATE. One network trained on every private record: an ensemble of one, with a longer recipe.

    It spends nothing because it is shown to nobody but the owner (or belongs to a public benchmark).
    """
    everyone = Shards(
        torch.arange(len(data.private))[None], torch.ones(1, len(data.private), dtype=torch.bool), "replace_one"
    )
    recipe = dataclasses.replace(plan.recipe, batch_size=max(plan.recipe.batch_size, min(128, len(data.private))))
    trunk = public_trunk(plan, data, stages)
    progress = stages("Training a model without privacy")
    return train(
        data.private, data.spec, everyone, recipe, seed=plan.seed, device=plan.device, trunk=trunk, progress=progress
    )


def nonprivate_with_peers(plan: Plan, data: Dataset, stages: Stages) -> Ensemble:
    distributed.broadcast_text(BASELINE)
    return nonprivate(plan, data, stages)


def logits_of_one(ensemble: Ensemble, x: Tensor) -> Tensor:
    """PRIVATE. Logits, float32 [B, C], of the first teacher on raw points."""
    spec = ensemble.spec
    if ensemble.trunk is not None:
        x, spec = ensemble.trunk.features(x, "cpu"), ensemble.trunk.spec
    module = networks.rebuild(ensemble.network)
    module.load_state_dict({name: parameter[0].float() for name, parameter in ensemble.params.items()})
    return Student(ensemble.network, module, spec).logits(x)


def assist(plan: Plan) -> None:
    """What the ranks above 0 of a torchrun do: train their teachers, ask them, and nothing with noise or the ledger."""
    data = load(plan).data
    quiet, store = Stages(quiet=True), TeacherStore(plan.root)
    while (order := distributed.broadcast_text("")) != DONE:
        if order == TRAIN:
            shards = deal(plan.partition, data.private, plan.num_teachers, plan.seed)
            with store.assisting(identify(plan, data, store)) as (checkpoints, mine):
                ensemble = train(
                    data.private,
                    data.spec,
                    shards,
                    plan.recipe,
                    seed=plan.seed,
                    device=plan.device,
                    trunk=public_trunk(plan, data, quiet),
                    checkpoint_dir=checkpoints,
                )
                jointly = joint_voting(plan, data, quiet)
                distributed.votes(ensemble, data.pool.x, device=plan.device, jointly=jointly)
                if mine:  # on a machine of its own; by now rank 0 has stored the ensemble
                    shutil.rmtree(checkpoints, ignore_errors=True)
        elif order == BASELINE:
            nonprivate(plan, data, quiet)
