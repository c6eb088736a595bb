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
from typing import TYPE_CHECKING, Any

from pate_torch.cli.site import Commands, add_command, run_subcommand, write_file
from pate_torch.sites.options import add_encoder_options, get_encoder_files

if TYPE_CHECKING:
    from pate_torch.sites.charter import Charter
    from pate_torch.sites.joiner import Joiner
    from pate_torch.sites.tables import TableKind


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return 0 if it succeeds, and 2 if it is refused."""
    parser = argparse.ArgumentParser(
        prog="pate join", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    charter, keys, ask, total, train = (add_command(commands, name, text) for name, (text, _) in _COMMANDS.items())
    for each in (charter, keys, ask, total, train):
        each.add_argument("--folder", type=Path, default=Path("join"), help="folder of the joiner (default: join)")
    charter.add_argument("files", type=Path, nargs="+", help="key file of each site")
    charter.add_argument(
        "--colluding", type=int, required=True, help="number t of sites that may collude with the joiner"
    )
    charter.add_argument("--classes", type=int, default=2, help="number of classes (default: 2)")
    charter.add_argument("--max-records", type=int, required=True, help="upper bound on the number of all records")
    neighbors = "difference between neighbors: a unit more or less, or another record (default: add_remove)"
    charter.add_argument("--adjacency", default="add_remove", choices=("add_remove", "replace_one"), help=neighbors)
    charter.add_argument("--records", type=int, nargs="+", help="number of records of each site, under replace_one")
    charter.add_argument(
        "--teachers",
        type=int,
        nargs="+",
        default=[0],
        help="number of teachers of each site, or one number for all sites",
    )
    charter.add_argument("--unit", default="record", help="privacy unit: record, or group:COLUMN (default: record)")
    charter.add_argument(
        "--max-sites-per-unit",
        type=int,
        default=1,
        help="number of sites at which a unit may have records (default: 1)",
    )
    charter.add_argument("--delta", default="1/100000", help="delta, as a fraction (default: 1/100000)")
    keys.add_argument("files", type=Path, nargs="+", help="confirmation file of each site")
    for each, name in ((charter, "charter.json"), (keys, "keys.json")):
        each.add_argument("--out", type=Path, default=Path(name), help=f"file for the sites (default: {name})")
    ask.add_argument("kind", metavar="KIND", help="kind of table: class_sums, gradients, histogram, marginals or votes")
    ask.add_argument(
        "--epsilon", type=float, required=True, help="largest epsilon of the round, or of all steps of gradients"
    )
    ask.add_argument("--label", help="column of the class")
    ask.add_argument("--classes", nargs="+", default=[], help="name of each class")
    ask.add_argument(
        "--questions", type=int, default=100, help="number of public points that histogram or votes ask (default: 100)"
    )
    ask.add_argument(
        "--mechanism", default="gaussian", help="mechanism of votes; only gaussian, because its counts can be added"
    )
    ask.add_argument("--teacher", nargs="+", default=[], metavar="KEY=VALUE", help="settings of the teachers of votes")
    ask.add_argument("--schema", type=Path, help="YAML file that declares the columns of marginals")
    ask.add_argument(
        "--order",
        type=int,
        default=2,
        help="number of columns beside the target in each table of marginals (default: 2)",
    )
    ask.add_argument(
        "--num-records-about", type=int, help="public estimate of all records (default: the charter's bound)"
    )
    ask.add_argument("--steps", type=int, default=8, help="rounds of gradients; each call asks for one (default: 8)")
    ask.add_argument("--clip", type=float, default=0.5, help="clipping norm of gradients (default: .5)")
    ask.add_argument("--again", action="store_true", help="ask for a step whose round failed, at the full price")
    total.add_argument("files", type=Path, nargs="+", help="answer of each site")
    total.add_argument("--round", type=int, help="number of an older round (default: the newest)")
    for each in (ask, train):
        each.add_argument("--public", type=Path, help="public rows (CSV, Parquet), or images (folder, .npy, .npz)")
        each.add_argument("--separator", default=",", help="separator of a CSV file (default: a comma)")
    ask.add_argument("--text", metavar="COLUMN", help="column of the texts, if points are texts")
    ask.add_argument("--encoder", nargs="+", metavar="KEY=VALUE", help="settings of features.encoder.Encoder")
    add_encoder_options(train)
    train.add_argument("--out", type=Path, required=True, help="new folder for everything that may be published")
    return run_subcommand(_COMMANDS, parser.parse_args(arguments))


def _charter(parsed: argparse.Namespace) -> None:
    from pate_torch.sites.charter import Terms, read_charter

    count = len(parsed.files)
    terms = Terms(
        colluding=parsed.colluding,
        adjacency=parsed.adjacency,
        unit=parsed.unit,
        delta=parsed.delta,
        classes=parsed.classes,
        max_records=parsed.max_records,
        max_sites_per_unit=parsed.max_sites_per_unit,
        teachers=tuple(parsed.teachers) * (count if len(parsed.teachers) == 1 else 1),
        records=tuple(parsed.records or (0,) * count),
    )
    raw = _open_joiner(parsed).create_charter(_read_all(parsed.files), terms)
    write_file(parsed.out, raw, "Send it to all sites.")
    print(f"The sites compare these words, without you: {read_charter(raw).format_fingerprint()}")


def _keys(parsed: argparse.Namespace) -> None:
    write_file(parsed.out, _open_joiner(parsed).bundle(_read_all(parsed.files)), "Send it to all sites.")


def _ask(parsed: argparse.Namespace) -> None:
    from pate_torch.core import checks
    from pate_torch.core.formatting import format_delta, format_epsilon
    from pate_torch.sites.rounds import KINDS
    from pate_torch.sites.tables import Descent
    from pate_torch.sites.training import ask_step
    from pate_torch.sites.votes import check_mechanism

    for name in (parsed.kind, parsed.mechanism):
        check_mechanism(name)
    checks.one_of("kind", parsed.kind, KINDS)
    checks.one_of("--mechanism", parsed.mechanism, ("gaussian",))
    joiner = _open_joiner(parsed)
    kind = _make_kind(parsed, joiner.charter)
    if isinstance(kind, Descent):
        slot, raw, _ = ask_step(joiner, kind, parsed.epsilon, again=parsed.again)
    else:
        slot, raw, _ = joiner.ask(kind, parsed.epsilon)
    slots = joiner.list_slots(slot)
    price = joiner.compute_guarantees(slots)[joiner.charter.terms.colluding]
    print(f"Send {joiner.folder / f'round-{slot}.json'} ({len(raw):,} bytes) and round-{slots[0]}.public to all sites.")
    before = f"With the {len(slots) - 1} round(s) before, each site will have charged"
    print(
        f"{'Each site will charge' if len(slots) == 1 else before} epsilon {format_epsilon(price.epsilon)} at delta "
        f"{format_delta(price.delta)} ({price.adjacency}, unit {price.unit}, accountant {price.route})."
    )


def _make_kind(parsed: argparse.Namespace, charter: Charter) -> TableKind:
    """Make what the round counts from the schema, or from the public rows."""
    from pate_torch.core import checks
    from pate_torch.sites import training

    if parsed.kind == "marginals":
        if parsed.schema is None:
            raise checks.error("--schema", None, "must declare the columns of marginals")
        from pate_torch.api.synthesizer import read_domain

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
    joiner = _open_joiner(parsed)
    slot, _ = joiner.sum(_read_all(parsed.files), parsed.round)
    print(f"The sum is in {joiner.folder / f'sum-{slot}.json'}. Send it to all sites before the next round.")


def _train(parsed: argparse.Namespace) -> None:
    from pate_torch.core import run_folders
    from pate_torch.release.renderer import check_empty_folder, print_summary
    from pate_torch.sites.release import write_model
    from pate_torch.sites.tables import MarginalCounts

    joiner, release = _open_joiner(parsed), parsed.out
    check_empty_folder("--out", release)
    noisy = joiner.load_sum()
    public = {} if isinstance(noisy.kind, MarginalCounts) else _read_public(parsed)
    run_folders.create_protected_folder(release)
    encoder, home = get_encoder_files(parsed), Path(run_folders.get_home_folder())
    print_summary(write_model(joiner, noisy, public, release, home=home, encoder=encoder))
    print(f"Everything that may be published is in {release}.")


def _open_joiner(parsed: argparse.Namespace) -> Joiner:
    from pate_torch.sites.joiner import Joiner

    return Joiner(parsed.folder)


def _read_all(files: Sequence[Path]) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in files}


def _read_public(parsed: argparse.Namespace) -> dict[str, Any]:
    from pate_torch.core import checks
    from pate_torch.sites.points import read_columns

    if parsed.public is None:
        raise checks.error("--public", None, "must name a file of public rows")
    return read_columns("--public", parsed.public, parsed.separator)


def _make_encoder(settings: Sequence[str] | None) -> Any:
    from pate_torch.core import checks
    from pate_torch.features.encoder import Encoder

    if settings is None:
        return None
    return Encoder(**checks.mapping("--encoder", _read_settings("--encoder", settings), fields(Encoder)))


def _read_settings(option: str, settings: Sequence[str]) -> dict[str, Any]:
    """Read settings KEY=VALUE, whose values are YAML."""
    import yaml

    from pate_torch.core import checks

    values = {}
    for setting in settings:
        key, _, text = setting.partition("=")
        try:
            values[key] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise checks.error(option, setting, "must be KEY=VALUE with a value in YAML") from None
    return values


_COMMANDS: Commands = {
    "charter": ("write who takes part, and on what terms", _charter),
    "keys": ("bundle the confirmations of all sites", _keys),
    "ask": ("write the file of a round", _ask),
    "sum": ("add up the answers of all sites", _sum),
    "train": ("train a student or a synthetic table from the newest sum", _train),
}
