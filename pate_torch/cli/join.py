r"""Collect and add up the answers of sites that do not trust each other, and train on the noisy sum.

    pate join charter *.key --colluding 3 --classes 2 --max-records 100000 --out charter.json
    pate join keys    *.confirmed --out keys.json
    pate join ask     class_sums --epsilon 0.5 --public public.csv --label y --classes no yes     # round-0.json
    pate join ask     class_sums --epsilon 0.5 --public scans/ --label y --classes no yes \
                      --encoder network=torchvision:resnet18 weights=resnet18.pth license=BSD-3-Clause
    pate join ask     marginals --epsilon 0.5 --schema schema.yaml
    pate join ask     gradients --epsilon 0.5 --steps 8 --public public.csv ...   # the same again after each sum
    pate join ask     votes --epsilon 0.5 --public public.csv --label y --classes no yes --questions 100
    pate join sum     *.answer-0.pate                                                             # sum-0.json
    pate join train   --public public.csv --out release/

The joiner has no private records, and no command of the joiner charges an account. Files for the sites lie in --folder.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from pate_torch.api.synthesizer import read_domain
from pate_torch.cli.site import write_file
from pate_torch.core import checks, run_folders
from pate_torch.core.formatting import format_delta, format_epsilon
from pate_torch.features.encoder import Encoder
from pate_torch.release.renderer import check_empty_folder, print_summary
from pate_torch.sites import training
from pate_torch.sites.charter import Charter, Terms, read_charter
from pate_torch.sites.joiner import Joiner
from pate_torch.sites.options import get_encoder_files
from pate_torch.sites.points import read_columns
from pate_torch.sites.release import write_model
from pate_torch.sites.rounds import KINDS
from pate_torch.sites.tables import Descent, MarginalCounts, TableKind
from pate_torch.sites.votes import check_mechanism


def main(parsed: argparse.Namespace) -> int:
    """Run one subcommand and return its exit code."""
    commands = {"charter": _charter, "keys": _keys, "ask": _ask, "sum": _sum, "train": _train}
    commands[parsed.command](parsed)
    return 0


def _charter(parsed: argparse.Namespace) -> None:
    count = len(parsed.files)
    names = ("colluding", "adjacency", "unit", "delta", "classes", "max_records", "max_sites_per_unit")
    terms = Terms(
        **{name: getattr(parsed, name) for name in names},
        teachers=tuple(parsed.teachers) * (count if len(parsed.teachers) == 1 else 1),
        records=tuple(parsed.records or (0,) * count),
    )
    raw = Joiner(parsed.folder).create_charter(_read_all(parsed.files), terms)
    write_file(parsed.out, raw, "Send it to all sites.")
    print(f"The sites compare these words, without you: {read_charter(raw).format_fingerprint()}")


def _keys(parsed: argparse.Namespace) -> None:
    write_file(parsed.out, Joiner(parsed.folder).bundle(_read_all(parsed.files)), "Send it to all sites.")


def _ask(parsed: argparse.Namespace) -> None:
    check_mechanism(parsed.kind)
    checks.one_of("kind", parsed.kind, KINDS)
    joiner = Joiner(parsed.folder)
    kind = _make_kind(parsed, joiner.charter)
    if isinstance(kind, Descent):
        slot, raw, _ = training.ask_step(joiner, kind, parsed.epsilon, again=parsed.again)
    else:
        slot, raw, _ = joiner.ask(kind, parsed.epsilon)
    slots = joiner.list_slots(slot)
    cost = joiner.compute_guarantees(slots)[joiner.charter.terms.colluding]
    print(f"Send {joiner.folder / f'round-{slot}.json'} ({len(raw):,} bytes) and round-{slots[0]}.public to all sites.")
    before = f"With the {len(slots) - 1} round(s) before, each site will have charged"
    print(
        f"{'Each site will charge' if len(slots) == 1 else before} epsilon {format_epsilon(cost.epsilon)} at delta "
        f"{format_delta(cost.delta)} ({cost.adjacency}, unit {cost.unit}, accountant {cost.route})."
    )


def _make_kind(parsed: argparse.Namespace, charter: Charter) -> TableKind:
    """Make what the round counts from the schema, or from the public rows."""
    if parsed.kind == "marginals":
        if parsed.schema is None:
            raise checks.error("--schema", None, "must declare the columns of marginals")
        return training.make_marginal_counts(read_domain(parsed.schema), parsed.order)
    if parsed.label is None or len(parsed.classes) != charter.terms.classes:
        problem = f"must name the {charter.terms.classes} classes of the charter, and --label their column"
        raise checks.error("--classes", parsed.classes, problem)
    public, options = _read_public(parsed), {"text": parsed.text, "encoder": _make_encoder(parsed.encoder)}
    facts = (public, parsed.label, parsed.classes)
    if parsed.kind == "histogram":
        return training.make_cell_counts(*facts, parsed.questions, **options)
    if parsed.kind == "votes":
        teacher = _read_settings("--teacher", parsed.teacher)
        return training.make_vote_counts(*facts, parsed.questions, teacher=teacher, **options)
    steps = parsed.steps if parsed.kind == "gradients" else 1
    num_public = len(next(iter(public.values())))
    about = parsed.num_records_about or charter.terms.max_records
    if parsed.num_records_about is None:
        print(f"Planned for {about:,} records, the bound of the charter. Plan better with a rough public number of all")
        print("records at all sites: --num-records-about.")
    options["effective_dim"] = training.plan_directions(charter, parsed.epsilon, num_public, about, steps)
    if parsed.kind == "class_sums":
        return training.make_class_sums(*facts, **options)
    return training.make_descent(*facts, parsed.steps, parsed.clip, **options)


def _sum(parsed: argparse.Namespace) -> None:
    joiner = Joiner(parsed.folder)
    slot, _ = joiner.sum(_read_all(parsed.files), parsed.round)
    print(f"The sum is in {joiner.folder / f'sum-{slot}.json'}. Send it to all sites before the next round.")


def _train(parsed: argparse.Namespace) -> None:
    joiner, release = Joiner(parsed.folder), parsed.out
    check_empty_folder("--out", release)
    noisy = joiner.load_sum()
    public = {} if isinstance(noisy.kind, MarginalCounts) else _read_public(parsed)
    run_folders.create_protected_folder(release)
    encoder, home = get_encoder_files(parsed), run_folders.find_home()
    print_summary(write_model(joiner, noisy, public, release, home=home, encoder=encoder))
    print(f"Everything that may be published is in {release}.")


def _read_all(files: Sequence[Path]) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in files}


def _read_public(parsed: argparse.Namespace) -> dict[str, Any]:
    if parsed.public is None:
        raise checks.error("--public", None, "must name a file of public rows")
    return read_columns("--public", parsed.public, parsed.separator)


def _make_encoder(settings: Sequence[str] | None) -> Any:
    if settings is None:
        return None
    return Encoder(**checks.mapping("--encoder", _read_settings("--encoder", settings), fields(Encoder)))


def _read_settings(option: str, settings: Sequence[str]) -> dict[str, Any]:
    values = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise checks.error(option, setting, "must be KEY=VALUE with a value in YAML") from None
    return values
