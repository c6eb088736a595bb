"""Writes the release folder of several sites: a model, the files of the protocol that prove its cost, and the report.

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
from pate_torch.methods.base import MethodDescription, ModelRelease, get_unit_column
from pate_torch.privacy import records
from pate_torch.privacy.records import DataSpec, Evaluation, PublicPool
from pate_torch.release import owner_file, renderer, store
from pate_torch.release.builder import PublicData, assemble_report
from pate_torch.release.report import AccountClaim, ChargedRelease, DistributedTrust, ReleaseReport
from pate_torch.release.store import WrittenRelease
from pate_torch.release.table_report import write_rows
from pate_torch.sites import training
from pate_torch.sites.joiner import Joiner, NoisySum
from pate_torch.sites.site import PURPOSE_SHARE
from pate_torch.sites.tables import CellCounts, ClassSums, MarginalCounts, TableKind

_NAME = "sites"
_CONTRIBUTIONS = {
    "class_sums": (
        "sums of features",
        "added the direction of its features, clipped to length 1, to the sum of its class",
    ),
    "gradients": ("gradients", "added its gradient, clipped to length 1, to the sum of each of the rounds"),
    "histogram": (
        "counts",
        "was counted once: for its class, at the one of {asked} public points to which it lies nearest",
    ),
    "marginals": (
        "marginal tables",
        "was counted once in each of some tables of combinations of values of a few columns",
    ),
    "votes": (
        "teachers",
        "reached one teacher of its site, and the teachers of the site voted on {asked} public points",
    ),
}
"""Kind of a table -> subject and predicate of the sentence on what every unit contributed."""


def write_model(
    joiner: Joiner,
    noisy: NoisySum,
    public: Mapping[str, Any],
    folder: Path,
    *,
    home: Path,
    slots: Sequence[int] = (),
) -> ReleaseReport:
    """Train a student, or fit a synthetic table, and write it with its report and proofs into a release folder.

    Args:
        joiner: The joiner.
        noisy: Newest noisy sum.
        public: PUBLIC rows, {column: cells}. Empty for a synthetic table.
        folder: Folder of the release, which exists and is empty.
        home: Folder of ``owner.yaml``, whose entry "sites" holds the statements of the joiner.
        slots: Slots of all rounds that the model was made from. By default that of the newest sum.
    """
    slots, rounds = tuple(slots or (noisy.slot,)), joiner.list_rounds()
    names = [name for slot in range(len(rounds)) for name in (f"round-{slot}.json", f"round-{slot}.public")]
    for name in ("charter.json", *names, *(f"sum-{slot}.json" for slot in slots)):
        write_atomically(folder / name, (joiner.folder / name).read_bytes())
    record, student, student_name = describe_round(joiner, noisy, slots), None, ""
    charged = joiner.compute_events(slots, joiner.charter.terms.colluding)
    if isinstance(noisy.kind, MarginalCounts):
        model = training.fit_table(noisy)
        store.save_model(model, folder)
        write_rows(folder / store.ROWS_FILE_NAME, model.sample())
        width = len(model.domain.columns)
        spec = DataSpec(  # a table has no classes
            name=_NAME,
            num_classes=2,
            class_names=("0", "1"),
            input_shape=(width,),
            mean=(0.0,) * width,
            std=(1.0,) * width,
        )
        data = _make_public_data(spec, PublicPool(torch.zeros(0, width)), {records.CATEGORIES: records.FROM_OWNER})
        written = WrittenRelease(release=ModelRelease(noisy.id, model), record=record)
    else:
        assert isinstance(noisy.kind, ClassSums | CellCounts)
        pool, answers = training.answer_public_points(noisy, public)
        origins = {records.CLASSES: records.FROM_OWNER, records.CATEGORIES: records.FROM_PUBLIC_POINTS}
        origins |= {records.NORMALIZATION_CONSTANTS: records.FROM_PUBLIC_POINTS}
        data = _make_public_data(noisy.kind.spec, pool, origins)
        answers = replace(answers, events=charged, reserved_events=charged)
        record = store.write(folder, answers, record | {"pool_sha256": compute_tensor_digest(pool.x)}, data.spec)
        student, student_name = (
            training.train_on_answers(noisy.kind, pool, answers),
            training.choose_student(answers).name,
        )
        store.save_model(student, folder)
        written = WrittenRelease(release=answers, record=record)
    report = assemble_report(
        data=data,
        written=written,
        claim=compute_claim(joiner, noisy, slots),
        student=student,
        student_name=student_name,
        owner=owner_file.read(home, _NAME),
        trust=describe_trust(joiner, slots),
    )
    renderer.write_release(folder, report)
    return report


def _make_public_data(spec: DataSpec, pool: PublicPool, provenance: Mapping[str, str]) -> PublicData:
    evaluation = Evaluation(torch.zeros(0, *spec.input_shape), torch.zeros(0, dtype=torch.int64))
    return PublicData(spec=spec, pool=pool, evaluation=evaluation, provenance=provenance)


def describe_round(joiner: Joiner, noisy: NoisySum, slots: Sequence[int]) -> dict[str, Any]:
    """Make the fields of ``release.json`` that the answers do not decide."""
    charter, kind, current_round = joiner.charter, noisy.kind, joiner.list_rounds()[noisy.slot]
    terms, length = charter.terms, math.sqrt(kind.make_change(charter.terms.adjacency).length_squared)
    parameters = {"sigma": noisy.sigma, "share": str(current_round.share), "exchanges": len(slots)}
    if isinstance(kind, MarginalCounts):
        parameters |= {"num_tables": len(kind.cliques), "order": kind.method.order, "rounds": 0}
    return {
        "dataset": _NAME,
        "noise": "discrete",
        "private": True,
        "delta": float(Fraction(terms.delta)),
        "adjacency": terms.adjacency,
        "unit": terms.unit,
        "num_teachers": sum(terms.teachers),
        "mechanism": kind.name,
        "parameters": parameters,
        "sensitivity": {"l1": None, "l2": length / kind.unit_length, "linf": None, "per": "round"},
        "answered_by": describe_method(kind, terms.unit).to_dict(),
    }


def describe_method(kind: TableKind, unit: str) -> MethodDescription:
    """Describe what the sites counted, for reports."""
    subject, contribution = _CONTRIBUTIONS[kind.name]
    one, is_table = get_unit_column(unit) or "record", isinstance(kind, MarginalCounts)
    use = "A student sees nothing but public points and this sum."
    if is_table:
        use = "A model was fitted to this sum, and the synthetic rows were drawn at random from this model."
    return MethodDescription(
        subject=subject,
        procedure=f"At its site, every {one} {contribution}. Each site added its share of noise and masks to its table "
        f"of whole numbers. The masks cancel only in the sum over all sites, and nobody saw more than this sum. {use}",
        query_sentence="{asked} public points, answered by the noisy sum of all sites",
        examples="Public points, each with the class that the noisy sum gave it. Some classes are wrong.",
        assumptions=(
            f"At a site, every {one} contributed to a round once, by its own values and public values alone.",
        ),
        uses_size=False,
        product="table" if is_table else "labels",
    )


def compute_claim(joiner: Joiner, noisy: NoisySum, slots: Sequence[int]) -> AccountClaim:
    """Compute the guarantee of the rounds in ``slots`` against t colluding sites, and the total of all rounds."""
    terms, rounds, delta = joiner.charter.terms, joiner.list_rounds(), float(Fraction(joiner.charter.terms.delta))

    def make_part(identity: str, own_slots: Sequence[int], is_current: bool) -> ChargedRelease:
        charged = joiner.compute_events(own_slots, terms.colluding)
        guarantee = accountant.compute_guarantee(charged, delta)
        return ChargedRelease(
            release_id=identity,
            purpose=f"{PURPOSE_SHARE}: {', '.join(f'round {slot}' for slot in own_slots)} of the charter",
            epsilon=guarantee.epsilon,
            accountant=guarantee.route,
            is_current=is_current,
            events=events.to_json(charged),
        )

    part, total = make_part(noisy.id, slots, True), joiner.compute_total()
    others = [(slot, current_round) for slot, current_round in enumerate(rounds) if slot not in slots]
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
        other_releases=tuple(make_part(other.digest.hex()[:16], [slot], False) for slot, other in others),
        epsilon_curve=(),
        ledger_head=None,
    )


def describe_trust(joiner: Joiner, slots: Sequence[int]) -> DistributedTrust:
    """Describe whom the guarantee trusts, and its cost against each number of colluding sites."""
    charter = joiner.charter
    guarantees = [joiner.compute_guarantee(slots, colluding) for colluding in range(len(charter.sites))]
    return DistributedTrust(
        colluding=charter.terms.colluding,
        sites={site.site: site.signing_key.hex() for site in charter.sites},
        charter_sha256=charter.digest.hex(),
        fingerprint=charter.format_fingerprint(),
        max_sites_per_unit=charter.terms.max_sites_per_unit,
        prices=tuple((guarantee.epsilon, guarantee.route) for guarantee in guarantees),
        rounds=tuple(current_round.digest.hex() for current_round in joiner.list_rounds()),
        used_slots=tuple(slots),
    )
