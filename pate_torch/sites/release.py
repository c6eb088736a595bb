"""Writes the release folder of several sites: a model, its report, and the files of the protocol that prove its cost.

The joiner has no private records, no account and no ledger. All facts of the report come from the charter, the round
files, their public files and the noisy sums, which may be published.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch

from pate_torch.accounting import accountant, events
from pate_torch.core.files import compute_tensor_digest, write_atomically
from pate_torch.methods import gradients, reverse_knn, synthetic, voting
from pate_torch.methods.base import MethodDescription, ModelRelease
from pate_torch.privacy import records
from pate_torch.privacy.records import DataSpec, Evaluation, PublicPool
from pate_torch.release import owner_file, renderer, store
from pate_torch.release.builder import PublicData, build_report
from pate_torch.release.report import AccountClaim, ChargedRelease, ReleaseReport
from pate_torch.release.store import WrittenRelease
from pate_torch.release.table_report import write_rows
from pate_torch.sites import training
from pate_torch.sites.charter import Terms
from pate_torch.sites.joiner import Joiner, NoisySum
from pate_torch.sites.points import EncoderFiles
from pate_torch.sites.site import PURPOSE_SHARE
from pate_torch.sites.tables import MarginalCounts, PointTable, TableKind

_NAME = "sites"
_MECHANISMS = {
    "class_sums": "gradient_descent",
    "gradients": "gradient_descent",
    "histogram": "histogram",
    "marginals": "marginals",
    "votes": "gaussian",
}
"""Kind of a table -> name of the mechanism that one curator would use."""


def write_model(
    joiner: Joiner,
    noisy: NoisySum,
    public: Mapping[str, Any],
    folder: Path,
    *,
    home: Path,
    encoder: EncoderFiles = None,
) -> ReleaseReport:
    """Train a student, or fit a synthetic table, and write it with its report and proofs into a release folder.

    The model pays for all rounds that have a sum among those that were planned together with the round of ``noisy``.

    Args:
        joiner: The joiner.
        noisy: Newest noisy sum.
        public: PUBLIC rows, {column: cells}. Empty for a synthetic table.
        folder: Folder of the release, which exists and is empty.
        home: Folder of ``owner.yaml``, whose entry "sites" holds the statements of the joiner.
        encoder: Files of the encoder that the public file names. None if it names none.
    """
    rounds = joiner.load_rounds()
    slots = [slot for slot in joiner.list_slots(noisy.slot) if rounds[slot].has_sum]
    names = {"charter.json", *(f"round-{slot}.json" for slot in range(len(rounds)))}
    names |= {each.round.public_name for each in rounds} | {f"sum-{slot}.json" for slot in slots}
    for name in names:
        write_atomically(folder / name, (joiner.folder / name).read_bytes())
    record, student, student_name = make_record(joiner, noisy, slots), None, ""
    if isinstance(noisy.kind, MarginalCounts):
        data, written = _write_table(noisy, record, folder)
    else:
        assert isinstance(noisy.kind, PointTable)
        pool, answers = training.answer_public_points(noisy, public, encoder)
        charged, spec = joiner.compute_events(slots), noisy.kind.spec
        answers = replace(answers, events=charged, reserved_events=charged)
        record = store.write(folder, answers, record | {"pool_sha256": compute_tensor_digest(pool.x)}, spec)
        student, student_name = training.train_on_answers(noisy.kind, pool, answers)
        store.save_model(student, folder)
        data = _make_public_data(spec, pool, records.FROM_PUBLIC_POINTS)
        written = WrittenRelease(release=answers, record=record)
    report = build_report(
        data=data,
        written=written,
        reservation_ids=[noisy.id],
        ledger=compute_claim(joiner, noisy, slots),
        student=student,
        student_name=student_name,
        seconds={},
        owner=owner_file.read(home, _NAME),
        chosen_by=None,
        model={},
        trust=describe_trust(joiner, slots),
    )
    renderer.write_release(folder, report)
    return report


def _write_table(noisy: NoisySum, record: dict[str, Any], folder: Path) -> tuple[PublicData, WrittenRelease]:
    """Fit a synthetic table to noisy marginal tables, and write its model and its rows."""
    model = training.fit_table(noisy)
    store.save_model(model, folder)
    write_rows(folder, model.sample())
    shape = (len(model.domain.columns),)
    classes = ("0", "1")  # a table has neither points nor classes, and a data set must have them
    spec = DataSpec(name=_NAME, num_classes=2, class_names=classes, input_shape=shape, mean=(0.0,), std=(1.0,))
    data = _make_public_data(spec, PublicPool(torch.zeros(0, *shape)), records.FROM_OWNER)
    return data, WrittenRelease(release=ModelRelease(noisy.id, model), record=record)


def _make_public_data(spec: DataSpec, pool: PublicPool, categories_origin: str) -> PublicData:
    evaluation = Evaluation(pool.x[:0], torch.zeros(0, dtype=torch.int64))
    provenance = {records.CLASSES: records.FROM_OWNER, records.CATEGORIES: categories_origin}
    return PublicData(spec=spec, pool=pool, evaluation=evaluation, provenance=provenance)


def make_record(joiner: Joiner, noisy: NoisySum, slots: Sequence[int]) -> dict[str, Any]:
    """Make the fields of ``release.json`` that do not depend on the answers."""
    terms, kind, share = joiner.charter.terms, noisy.kind, joiner.load_rounds()[noisy.slot].round.share
    parameters = {"sigma": noisy.sigma, "share": str(share), "exchanges": len(slots)}
    if isinstance(kind, MarginalCounts):
        parameters |= {"num_tables": len(kind.cliques), "order": kind.method.order or 1, "rounds": 0}
    length = math.sqrt(kind.compute_squared_length(terms.adjacency)) / kind.unit_length
    return {
        "dataset": _NAME,
        "noise": "discrete",
        "private": True,
        "delta": float(Fraction(terms.delta)),
        "adjacency": terms.adjacency,
        "unit": terms.unit,
        "num_teachers": sum(terms.teachers),
        "mechanism": _MECHANISMS[kind.name],
        "parameters": parameters,
        "sensitivity": {"l1": None, "l2": length, "linf": None, "per": "round"},
        "answered_by": describe_method(kind, terms, len(slots)).to_dict(),
    }


def describe_method(kind: TableKind, terms: Terms, num_rounds: int) -> MethodDescription:
    """Describe the method of one curator that the rounds replace, for reports."""
    match _MECHANISMS[kind.name]:
        case "gradient_descent":
            return gradients.describe(terms.unit, num_rounds)
        case "histogram":
            return reverse_knn.describe(terms.unit)
        case "marginals":
            return synthetic.describe(terms.unit)
    return voting.describe(sum(terms.teachers), terms.unit, counts=True)


def compute_claim(joiner: Joiner, noisy: NoisySum, slots: Sequence[int]) -> AccountClaim:
    """Compute the guarantee of the rounds in ``slots`` against t colluding sites, and the total of all rounds."""
    terms, delta = joiner.charter.terms, float(Fraction(joiner.charter.terms.delta))

    def make_part(identity: str, own_slots: Sequence[int]) -> ChargedRelease:
        charged = joiner.compute_events(own_slots)
        cost, purpose = accountant.compute_guarantee(charged, delta), f"{PURPOSE_SHARE}, {len(own_slots)} round(s)"
        part = ChargedRelease(release_id=identity, purpose=purpose, epsilon=cost.epsilon, accountant=cost.route)
        return replace(part, is_current=own_slots == slots, events=events.to_json(charged))

    part, total = make_part(noisy.id, slots), joiner.compute_guarantees()[terms.colluding]
    others = [(slot, each.round.digest) for slot, each in enumerate(joiner.load_rounds()) if slot not in slots]
    return AccountClaim(
        delta=delta,
        adjacency=terms.adjacency,
        unit=terms.unit,
        private=True,
        epsilon=part.epsilon,
        accountant=part.accountant,
        epsilon_ex_post=part.epsilon,
        parts=(part,),
        epsilon_charged=total.epsilon,
        charged_accountant=total.route,
        epsilon_charged_ex_post=total.epsilon,
        budget_epsilon=None,
        other_releases=tuple(make_part(digest.hex()[:16], (slot,)) for slot, digest in others),
        epsilon_curve=(),
        ledger_head=None,
    )


def describe_trust(joiner: Joiner, slots: Sequence[int]) -> dict[str, Any]:
    """Describe whom the guarantee trusts, and its cost against each number u of colluding sites.

    The cost for u = 0 is that against readers who see the results only.
    """
    costs = joiner.compute_guarantees(slots)
    charter, digests = joiner.charter, [each.round.digest.hex() for each in joiner.load_rounds()]
    return {
        "colluding": charter.terms.colluding,
        "charter_sha256": charter.digest.hex(),
        "fingerprint": charter.format_fingerprint(),
        "max_sites_per_unit": charter.terms.max_sites_per_unit,
        "sites": tuple({"name": site.site, "signing_key": site.signing_key.hex()} for site in charter.sites),
        "costs": tuple({"colluding": u, "epsilon": g.epsilon, "route": g.route} for u, g in costs.items()),
        "rounds": tuple({"sha256": digest, "used": slot in slots} for slot, digest in enumerate(digests)),
    }
