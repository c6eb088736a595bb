"""What K, noise and number of questions does a privacy budget allow, and what labels will they give?

    pate plan dataset=svhn privacy.budget_epsilon=2
    pate plan dataset=svhn teachers=250,500 mechanism.sigma=20,40,80 pilot.teacher_accuracy=0.83
    pate plan dataset=csv dataset.nominal_size=2000 pilot.on=digits pilot.num_classes=10 --json

The keys are those of ``train.py``; lists are tried in every combination, and without one K and sigma are halved and
doubled. ``teachers`` is here another name of ``num_teachers``. ``pilot.*``: see ``plan/pilot.py``.

Nothing is charged and no private record is read: the data set is asked for what its configuration declares, and
``load()`` is never called. The pilot's votes are simulated, or those of a small ensemble on public data. With
``pilot.on``, and neither mechanism nor voters given, per-record gradients are tried at the price of the best choice of
teachers, and recommended where more of their answers are right. The ledger is read only to say what is left. Exit code
0: a plan, even where it says that nothing works; 2: a wrong argument.
"""

from __future__ import annotations

import argparse
import copy
import functools
import itertools
import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, cast

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pate_torch.cli import hydra_config as composer
from pate_torch.cli.train import find_config_folder, format_error
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.data import locations
from pate_torch.data.embeddings import Embeddings
from pate_torch.features.encoded_dataset import EncodedDataset
from pate_torch.ledger import Account, Ledger
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.interactive import InteractiveGNMax
from pate_torch.planning import feasibility
from pate_torch.planning import report as reports
from pate_torch.planning.choice import Choice, Declared, PlanEvaluator, best, takes_probabilities
from pate_torch.planning.pilot import PUBLIC, Pilot, VoteModel, simulate_votes, trained
from pate_torch.planning.report import PlanReport
from pate_torch.protocols import DatasetSource
from pate_torch.types import Dataset

SWEPT = (
    "num_teachers",
    "num_queries",
    "mechanism",
    "mechanism.sigma",
    "mechanism.screen_sigma",
    "mechanism.threshold",
)
"""Keys that may list several values: those the table shows."""
GROUPS = {"mechanism", "voters", "query", "student", "features", "sanitiser"}
"""Keys of which a row may name another component."""

MOST_ROWS = 60
UNDECLARED_CLASSES = 2

Settings = tuple[str, ...]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code. 0: a plan was printed; 2: a wrong argument, in one line."""
    parser = _Parser(prog="pate plan", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="key=value", help="as for train.py, and pilot.*")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    try:
        args = parser.parse_intermixed_args(arguments)
        sheet = plan(args.settings)
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        return 2
    print(json.dumps(reports.payload(sheet), allow_nan=False) if args.json else reports.text(sheet))
    return 0


def plan(settings: Sequence[str]) -> PlanReport:
    """The plan report for Hydra-style settings.

    Raises:
        ValueError: A setting is wrong (or one of Hydra's own errors).
    """
    pilot_keys, rest = _compute_split_shares(settings)
    axes, fixed = _axes(rest)
    with initialize_config_dir(config_dir=find_config_folder(), version_base="1.3"):
        composed = Composer(fixed)
        votes = dict(map(_key, fixed)).get("votes", "null")
        if votes != "null":
            raise checks.error("votes", votes, "are private; a plan looks at none", "Give teachers=<how many>.")
        base = composed(tuple(f"{key}={values[0]}" for key, values in axes.items()))
        if base.labels is not None:
            raise checks.error("labels", base.labels, "are paid for", "There is nothing to plan: run train.py.")
        given = {key for key, _ in map(_key, fixed)} | set(axes)
        if not axes and "experiment" not in given:
            axes = _default_axes(base, given)
        teachers = composed.recommended_teachers or base.num_teachers
        if "mechanism.sigma" in axes and base.privacy.target_epsilon is not None:
            raise checks.error(
                "privacy.target_epsilon", base.privacy.target_epsilon, "sets mechanism.sigma; sweep one of them"
            )
        plans = {(*fixed, *row): each for row, each in _rows(composed, axes, given, teachers)}
    account, ledger = _account(base)
    declared = Declared.of(base.dataset)
    num_classes = _num_classes(declared, pilot_keys)
    if "num_teachers" in given and "num_teachers" not in axes:
        teachers = base.num_teachers  # the guess is for the one K given, else for the recommended one
    pilot = replace(pilot_keys, at_teachers=pilot_keys.at_teachers or teachers)
    places = tuple(setting for setting in fixed if _key(setting)[0] == "hydra.searchpath")
    stand_in = functools.cache(lambda: _public(pilot, base, num_classes, places))
    crowds = _crowds(pilot, base, declared, num_classes, stand_in)
    judge = PlanEvaluator(declared, pilot, crowds, stand_in, num_classes, account)
    by_choice = {judge(each, settings): each for settings, each in plans.items()}
    if pilot.on is not None and not given & {"voters", "mechanism", "experiment"}:
        by_choice |= _offered(judge, by_choice, fixed, composed)
    choices = tuple(by_choice)
    return PlanReport(
        dataset=declared.name,
        budget=judge.budget(base),
        budget_from=_budget_from(base, account),
        target=base.privacy.target_epsilon or judge.budget(base),
        pilot=_describe(pilot, declared, num_classes),
        choices=choices,
        best=best(list(choices)),
        account=account,
        ledger=ledger,
        swept=tuple(axes),
        notes=tuple(
            _notes(base, account, declared, choices, pilot, soft=any(map(takes_probabilities, by_choice.values())))
        ),
    )


# ---- from the command line to plans --------------------------------------------------------------------------------


class Composer:
    """Plans of one command line: composed once for each mechanism, the numbers then set (composing takes long).

    Args:
        fixed: The settings that all rows share.
    """

    def __init__(self, fixed: Settings) -> None:
        self._fixed, self._composed = fixed, dict[Settings, DictConfig]()

    def __call__(self, row: Settings) -> RunConfig:
        """The plan of the fixed settings and those of one row."""
        groups = tuple(setting for setting in row if _key(setting)[0] in GROUPS)
        if groups not in self._composed:
            named = {_key(setting)[0] for setting in row} & GROUPS
            kept = [setting for setting in self._fixed if _key(setting)[0].split(".")[0] not in named]
            self._composed[groups] = compose("config", overrides=[*kept, *groups])
        cfg = copy.deepcopy(self._composed[groups])
        for override in OverridesParser.create().parse_overrides([s for s in row if s not in groups]):
            OmegaConf.update(cfg, override.get_key_element(), override.value())
        plan = composer.run_config(cfg, Path("."))
        if not plan.num_teachers and not plan.method.releases_model:
            fix = "Set privacy.target_epsilon in train.py to have its noise found."
            raise checks.error("voters", plan.method.name, "has no teachers to plan", fix)
        return plan

    @property
    def recommended_teachers(self) -> int | None:
        """The K that the data set's other recommended values are for."""
        cfg = next(iter(self._composed.values()))
        return cast("int | None", OmegaConf.select(cfg, "recommended.num_teachers"))


def _key(setting: str) -> tuple[str, str]:
    """(key, value) of ``key=value``, without the marks of Hydra's grammar."""
    key, equals, value = setting.partition("=")
    if not equals and not setting.startswith("~"):
        raise ValueError(f"{setting!r}: must be key=value, as for train.py")
    return key.lstrip("+~"), value


def _compute_split_shares(settings: Sequence[str]) -> tuple[Pilot, Settings]:
    """The pilot's keys, and the others with ``teachers=<K>`` by its other name."""
    mine, rest = list[str](), list[str]()
    for setting in settings:
        key, value = _key(setting)
        if key.startswith("pilot."):
            mine.append(setting.removeprefix("pilot."))
        elif key == "pilot":
            raise checks.error(
                "pilot", value, "is a group", f"Set pilot.{', pilot.'.join(f.name for f in fields(Pilot))}."
            )
        elif key == "teachers":
            if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", value):
                raise checks.error("teachers", value, "must be a number of teachers here, or a list of them")
            rest.append(f"num_teachers={value}")
        else:
            rest.append(setting)
    keys = [_key(setting)[0] for setting in rest]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key}: given twice")
    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(mine)))
    for key in values:
        checks.one_of("pilot key", key, [f.name for f in fields(Pilot)])
    return Pilot(**values), tuple(rest)


def _axes(settings: Settings) -> tuple[dict[str, tuple[str, ...]], Settings]:
    """({key: values} of the settings that list several, the other settings)."""
    axes, fixed = dict[str, tuple[str, ...]](), list[str]()
    parser = OverridesParser.create()
    for setting in settings:
        override = parser.parse_override(setting)
        if not override.is_sweep_override():
            fixed.append(setting)
            continue
        key = override.get_key_element()
        if key not in SWEPT:
            raise ValueError(f"{key}: must have one value here; lists are for {', '.join(SWEPT)}")
        if not override.is_discrete_sweep():
            raise checks.error(key, setting, "must be a list or a range")
        axes[key] = tuple(str(value) for value in override.sweep_string_iterator())
    return axes, tuple(fixed)


def _default_axes(base: RunConfig, given: set[str]) -> dict[str, tuple[str, ...]]:
    """Half, once and twice the K and the sigma that the user left open."""
    axes = dict[str, tuple[str, ...]]()
    if "num_teachers" not in given and base.num_teachers:
        teachers = base.num_teachers
        axes["num_teachers"] = tuple(str(k) for k in dict.fromkeys((max(1, teachers // 2), teachers, 2 * teachers)))
    sigma = getattr(base.mechanism, "sigma", None)
    if "mechanism.sigma" not in given and sigma is not None and base.privacy.target_epsilon is None:
        axes["mechanism.sigma"] = tuple(f"{factor * sigma:g}" for factor in (0.5, 1, 2))
    return axes


def _rows(
    composed: Composer, axes: dict[str, tuple[str, ...]], given: set[str], teachers: int
) -> Iterator[tuple[Settings, RunConfig]]:
    """Every combination. A recommended threshold is for the recommended K: it moves in proportion."""
    if math.prod(map(len, axes.values())) > MOST_ROWS:
        raise ValueError(f"{math.prod(map(len, axes.values()))} combinations: must be at most {MOST_ROWS}")
    for values in itertools.product(*axes.values()):
        row = tuple(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        each = composed(row)
        recommended = not given & {"mechanism.threshold", "experiment"}
        if (
            isinstance(each.mechanism, ConfidentGNMax | InteractiveGNMax)
            and recommended
            and each.num_teachers != teachers
        ):
            row = (*row, f"mechanism.threshold={each.mechanism.threshold * each.num_teachers / teachers:.4g}")
            each = composed(row)
        yield row, each


def _offered(
    judge: PlanEvaluator, by_choice: dict[Choice, RunConfig], fixed: Settings, composed: Composer
) -> dict[Choice, RunConfig]:
    """Per-record gradients at the price of the best of these choices of teachers (the cheapest, where none works)."""
    priced = [choice for choice in by_choice if choice.epsilon is not None and math.isfinite(choice.epsilon)]
    chosen = best(list(by_choice)) or min(priced, key=lambda choice: choice.epsilon or 0.0, default=None)
    if chosen is None or judge.declared.size is None:
        return {}
    plan = by_choice[chosen]
    descent = feasibility.same_price(plan, plan.calibrate_noise().mechanism, judge.declared.size, judge.declared.pool)
    if descent is None:
        return {}
    encoded = isinstance(plan.dataset, EncodedDataset | Embeddings)
    images = False if encoded else None
    offered = feasibility.settings(plan, descent, images=images, encoded=encoded, questions=judge.declared.pool)
    replaced = {"num_teachers", *(_key(setting)[0].split(".")[0] for setting in offered)}
    kept = tuple(setting for setting in fixed if _key(setting)[0].split(".")[0] not in replaced)
    with initialize_config_dir(config_dir=find_config_folder(), version_base="1.3"):
        each = composed(offered)
    return {judge(each, (*kept, *offered)): each}


# ---- the pilot and the account -------------------------------------------------------------------------------------


def _num_classes(declared: Declared, pilot: Pilot) -> int:
    if declared.num_classes is not None and pilot.num_classes not in (None, declared.num_classes):
        raise checks.error("pilot.num_classes", pilot.num_classes, f"the data set declares {declared.num_classes}")
    return declared.num_classes or pilot.num_classes or UNDECLARED_CLASSES


def _crowds(
    pilot: Pilot, base: RunConfig, declared: Declared, num_classes: int, stand_in: Callable[[], Dataset]
) -> Callable[[int], VoteModel]:
    """K -> the votes to try it on."""

    def crowd(num_teachers: int) -> VoteModel:
        if pilot.on is None:
            guess = pilot.accuracy(num_teachers, num_classes)
            return simulate_votes(guess, num_classes, pilot.questions, base.seed, pilot.shared)
        shard = declared.shard(num_teachers)
        if shard is None:
            raise checks.error("dataset.nominal_size", None, "must be declared for pilot.on", "About how many records?")
        return trained(pilot, base.teacher, stand_in(), shard, base.seed)

    return crowd


def _public(pilot: Pilot, base: RunConfig, num_classes: int, places: Settings) -> Dataset:
    """The public data set that the pilot trains on; never the one that is planned for.

    Args:
        pilot: Names it.
        base: What is planned.
        num_classes: Number of classes of the data that are planned for.
        places: Where its YAML may lie, beside the package's: the command's ``hydra.searchpath``.
    """
    root = getattr(base.dataset, "root", None)
    settings = [f"dataset={pilot.on}", *places, *([] if root is None else [f"data_root={root}"])]
    with initialize_config_dir(config_dir=find_config_folder(), version_base="1.3"):
        try:
            cfg = compose("config", overrides=settings)
        except MissingConfigException as error:
            fix = f"Name one of {', '.join(PUBLIC)}, or a file of your own in a hydra.searchpath."
            raise checks.error("pilot.on", pilot.on, "is no data set here", fix) from error
        source: DatasetSource = composer.instantiate_component(cfg, "dataset", DatasetSource)
    planned = base.dataset.source if isinstance(base.dataset, EncodedDataset) else base.dataset
    if source.name == planned.name or not _of_other_files(source, planned):
        fix = "Use another public data set; two of your own files must each be named, by dataset.path."
        raise checks.error("pilot.on", pilot.on, "holds the very records that this plan must not look at", fix)
    if getattr(source, "benchmark", pilot.on in PUBLIC) is not True:
        fix = f"Use {', '.join(PUBLIC)}, or say dataset.benchmark=true in its file."
        raise checks.error(
            "pilot.on", pilot.on, "is not declared as public, and a plan looks at no private record", fix
        )
    data = source.load()
    if data.spec.num_classes != num_classes:
        allowed = f"has {data.spec.num_classes} classes, the data set {num_classes}"
        raise checks.error("pilot.on", pilot.on, allowed, "Use public data of as many classes.")
    if data.evaluation.pool_y is None:
        fix = "Give its public points a label each."
        raise checks.error("pilot.on", pilot.on, "has public points of unknown classes, and judges no plan", fix)
    if isinstance(base.dataset, EncodedDataset):
        return replace(base.dataset, source=source).encode(data, Stages(quiet=base.quiet))
    return data


def _of_other_files(stand_in: Any, planned: Any) -> bool:
    """Whether two sources are of two kinds, or of users' files of one kind that cannot be the same."""
    if type(stand_in) is not type(planned):
        return True
    if not all(hasattr(source, "benchmark") and getattr(source, "path", None) for source in (stand_in, planned)):
        return False
    return not _places(stand_in) & _places(planned)


def _places(source: Any) -> set[Path]:
    """Where a user's file may lie."""
    given = Path(source.path).expanduser()
    return {given.resolve(), (locations.get_data_root(source.root) / given).resolve()}


def _describe(pilot: Pilot, declared: Declared, num_classes: int) -> str:
    classes = f"{num_classes} classes" + ("" if declared.num_classes else " (undeclared: pilot.num_classes)")
    asked = f"{pilot.questions} questions asked at random, {classes}"
    if pilot.on is not None:
        return (
            f"{asked}; {pilot.teachers} teachers trained on {pilot.on} for {pilot.steps} steps at each shard size, or"
            " the gradients of its records."
        )
    return (
        f"{asked}; votes simulated from one guess: a teacher is right {100 * pilot.teacher_accuracy:g} % of the time "
        f"at K {pilot.at_teachers} (pilot.teacher_accuracy), its error growing as K^{pilot.exponent:g}. How many "
        "mistakes teachers share is "
        + ("not known (pilot.shared): so the wide intervals." if pilot.shared is None else f"{pilot.shared:g}.")
    )


def _account(base: RunConfig) -> tuple[Account | None, Path | None]:
    """The data set's account, if there is a ledger that has one; read, and left as it is."""
    path = base.root / "ledger.sqlite"
    if not path.exists():
        return None, None
    with Ledger(path, create=False, readonly=True) as ledger:
        found = {account.name: account for account in ledger.list_accounts()}.get(base.dataset.name)
    return found, None if found is None else path


def _budget_from(base: RunConfig, account: Account | None) -> str:
    if base.privacy.budget_epsilon is not None:
        return "privacy.budget_epsilon"
    return "privacy.opening_budget" if account is None else "the account's cap"


def _notes(
    base: RunConfig,
    account: Account | None,
    declared: Declared,
    choices: tuple[Choice, ...],
    pilot: Pilot,
    *,
    soft: bool,
) -> list[str]:
    """What a run would refuse for other reasons than K, noise and questions, and what is not known."""
    notes = []
    if declared.size is None:
        notes.append("How many private records there are is not declared (dataset.nominal_size): shards are unknown.")
    if not all(choice.num_teachers for choice in choices):
        notes.append("Per-record gradients cost the same for any num_queries: ask about all public points.")
    elif best(list(choices)) is None and pilot.on is None and declared.size is not None:
        notes.append(
            "Per-record gradients bear more noise than votes (voters=gradients mechanism=gradient_descent). A guess of "
            "votes cannot forecast them; pilot.on=<public data like yours> does, and chooses them if they are better."
        )
    if soft and pilot.on is None:
        notes.append(
            "Soft labels are forecast as if every probability were 0 or 1: a guess of votes knows none. Real ones "
            "spread over more bins, and as a rule fewer questions are answered; pilot.on=<public data like yours> "
            "tries them."
        )
    elif soft:
        notes.append(
            f"Soft labels are forecast from the probabilities of at most {pilot.teachers} teachers, drawn K times: so "
            "few fill too few bins, and fewer questions may be answered. pilot.teachers=<more> is nearer."
        )
    if account is None:
        return notes
    if base.privacy.budget_epsilon not in (None, account.budget_epsilon):
        notes.append(f"A run would be refused: the account's cap is epsilon {account.budget_epsilon:g}.")
    if base.privacy.delta != account.delta:
        notes.append(f"A run would be refused: the account was opened at delta {account.delta:g}.")
    if base.partition.adjacency != account.adjacency:
        notes.append(f"A run would be refused: the account was opened for partition={account.adjacency}.")
    return notes
