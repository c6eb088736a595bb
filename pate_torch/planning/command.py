"""What K, noise and number of questions does a privacy budget allow, and what labels will they give?

    pate plan dataset=svhn privacy.budget_epsilon=2
    pate plan dataset=svhn teachers=250,500 mechanism.sigma=20,40,80 pilot.teacher_accuracy=0.83
    pate plan dataset=csv dataset.nominal_size=2000 pilot.dataset=digits pilot.num_classes=10 --json

The keys are those of ``train.py``; lists are tried in every combination, and without one K and sigma are halved and
doubled. ``teachers`` is here another name of ``num_teachers``. ``pilot.*``: see ``planning/pilot.py``.

Nothing is charged and no private record is read: the data set is asked for what its configuration declares, and
``load()`` is never called. The pilot's votes are simulated, or those of a small ensemble on public data. With
``pilot.dataset``, and neither mechanism nor method given, per-record gradients are tried at the price of the best
choice of teachers, and recommended where more of their answers are right. The ledger is read only to say what is left.
Exit code 0: a plan, even where it says that nothing works; 2: a wrong argument.
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
from pate_torch.cli.train import format_error
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.progress import Stages
from pate_torch.core.run_folders import find_config_folder
from pate_torch.data.base import DatasetSource
from pate_torch.data.embeddings import Embeddings
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.mechanisms.confident import ConfidentGNMax
from pate_torch.mechanisms.interactive import InteractiveGNMax
from pate_torch.planning import feasibility
from pate_torch.planning import report as reports
from pate_torch.planning.choice import Choice, DeclaredFacts, PlanEvaluator, select_best, takes_probabilities
from pate_torch.planning.pilot import PUBLIC_DATASETS, PilotConfig, VoteModel, simulate_votes, train_vote_model
from pate_torch.planning.report import PlanReport
from pate_torch.privacy.accounts import Account
from pate_torch.privacy.ledger import Ledger
from pate_torch.privacy.records import Dataset

SWEEP_KEYS = (
    "num_teachers",
    "num_queries",
    "mechanism",
    "mechanism.sigma",
    "mechanism.screen_sigma",
    "mechanism.threshold",
)
"""Keys that may list several values: those the table shows."""
GROUP_KEYS = {"mechanism", "method", "query", "student", "features", "private_epsilon"}
"""Keys of which a row may name another component."""

MAX_ROWS = 60
DEFAULT_NUM_CLASSES = 2

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
        report = plan(args.settings)
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {format_error(error)}", file=sys.stderr)
        return 2
    print(json.dumps(reports.to_payload(report), allow_nan=False) if args.json else reports.format_report(report))
    return 0


def plan(settings: Sequence[str]) -> PlanReport:
    """The plan report for Hydra-style settings.

    Raises:
        ValueError: A setting is wrong (or one of Hydra's own errors).
    """
    pilot_options, other_settings = _split_pilot_options(settings)
    axes, fixed_settings = _parse_axes(other_settings)
    with initialize_config_dir(config_dir=find_config_folder(), version_base="1.3"):
        compose_plan = PlanComposer(fixed_settings)
        votes = dict(map(_parse_setting, fixed_settings)).get("votes", "null")
        if votes != "null":
            raise checks.error("votes", votes, "are private; a plan looks at none", "Give teachers=<how many>.")
        base = compose_plan(tuple(f"{key}={values[0]}" for key, values in axes.items()))
        if base.labels is not None:
            raise checks.error("labels", base.labels, "are paid for", "There is nothing to plan: run train.py.")
        explicit_keys = {key for key, _ in map(_parse_setting, fixed_settings)} | set(axes)
        if not axes and "experiment" not in explicit_keys:
            axes = _make_default_axes(base, explicit_keys)
        teachers = compose_plan.recommended_teachers or base.num_teachers
        if "mechanism.sigma" in axes and base.privacy.target_epsilon is not None:
            raise checks.error(
                "privacy.target_epsilon", base.privacy.target_epsilon, "sets mechanism.sigma; sweep one of them"
            )
        plans = {
            (*fixed_settings, *row): config
            for row, config in _iterate_rows(compose_plan, axes, explicit_keys, teachers)
        }
    account, ledger_path = _find_account(base)
    facts = DeclaredFacts.from_source(base.dataset)
    num_classes = _get_num_classes(facts, pilot_options)
    if "num_teachers" in explicit_keys and "num_teachers" not in axes:
        teachers = base.num_teachers  # the guess is for the one K given, else for the recommended one
    pilot = replace(pilot_options, at_teachers=pilot_options.at_teachers or teachers)
    search_paths = tuple(setting for setting in fixed_settings if _parse_setting(setting)[0] == "hydra.searchpath")
    proxy_dataset = functools.cache(lambda: _load_proxy_dataset(pilot, base, num_classes, search_paths))
    votes_by_num_teachers = _make_votes_by_num_teachers(pilot, base, facts, num_classes, proxy_dataset)
    evaluate = PlanEvaluator(facts, pilot, votes_by_num_teachers, proxy_dataset, num_classes, account)
    plan_by_choice = {evaluate(config, settings): config for settings, config in plans.items()}
    if pilot.dataset is not None and not explicit_keys & {"method", "mechanism", "experiment"}:
        plan_by_choice |= _evaluate_gradients(evaluate, plan_by_choice, fixed_settings, compose_plan)
    choices = tuple(plan_by_choice)
    return PlanReport(
        dataset=facts.name,
        budget=evaluate.get_budget(base),
        budget_source=_format_budget_source(base, account),
        target=base.privacy.target_epsilon or evaluate.get_budget(base),
        pilot=_describe(pilot, facts, num_classes),
        choices=choices,
        best_choice=select_best(list(choices)),
        account=account,
        ledger_path=ledger_path,
        sweep_keys=tuple(axes),
        notes=tuple(
            _make_notes(
                base, account, facts, choices, pilot, soft=any(map(takes_probabilities, plan_by_choice.values()))
            )
        ),
    )


# ---- from the command line to plans --------------------------------------------------------------------------------


class PlanComposer:
    """Plans of one command line: composed once for each mechanism, the numbers then set (composing takes long).

    Args:
        fixed_settings: The settings that all rows share.
    """

    def __init__(self, fixed_settings: Settings) -> None:
        self._fixed_settings, self._config_by_groups = fixed_settings, dict[Settings, DictConfig]()

    def __call__(self, row: Settings) -> RunConfig:
        """The plan of the fixed settings and those of one row."""
        groups = tuple(setting for setting in row if _parse_setting(setting)[0] in GROUP_KEYS)
        if groups not in self._config_by_groups:
            group_keys = {_parse_setting(setting)[0] for setting in row} & GROUP_KEYS
            fixed_settings = [
                setting
                for setting in self._fixed_settings
                if _parse_setting(setting)[0].split(".")[0] not in group_keys
            ]
            self._config_by_groups[groups] = compose("config", overrides=[*fixed_settings, *groups])
        cfg = copy.deepcopy(self._config_by_groups[groups])
        for override in OverridesParser.create().parse_overrides([s for s in row if s not in groups]):
            OmegaConf.update(cfg, override.get_key_element(), override.value())
        plan = composer.build_run_config(cfg, Path("."))
        if not plan.num_teachers and not plan.method.releases_model:
            fix = "Set privacy.target_epsilon in train.py to have its noise found."
            raise checks.error("method", plan.method.name, "has no teachers to plan", fix)
        return plan

    @property
    def recommended_teachers(self) -> int | None:
        """The K that the data set's other recommended values are for."""
        cfg = next(iter(self._config_by_groups.values()))
        return cast("int | None", OmegaConf.select(cfg, "recommended.num_teachers"))


def _parse_setting(setting: str) -> tuple[str, str]:
    """(key, value) of ``key=value``, without the marks of Hydra's grammar."""
    key, equals, value = setting.partition("=")
    if not equals and not setting.startswith("~"):
        raise ValueError(f"{setting!r}: must be key=value, as for train.py")
    return key.lstrip("+~"), value


def _split_pilot_options(settings: Sequence[str]) -> tuple[PilotConfig, Settings]:
    """The pilot's keys, and the others with ``teachers=<K>`` by its other name."""
    pilot_settings, other_settings = list[str](), list[str]()
    for setting in settings:
        key, value = _parse_setting(setting)
        if key.startswith("pilot."):
            pilot_settings.append(setting.removeprefix("pilot."))
        elif key == "pilot":
            raise checks.error(
                "pilot", value, "is a group", f"Set pilot.{', pilot.'.join(f.name for f in fields(PilotConfig))}."
            )
        elif key == "teachers":
            if not re.fullmatch(r"\d{1,9}(,\d{1,9})*", value):
                raise checks.error("teachers", value, "must be a number of teachers here, or a list of them")
            other_settings.append(f"num_teachers={value}")
        else:
            other_settings.append(setting)
    keys = [_parse_setting(setting)[0] for setting in other_settings]
    for key in keys:
        if keys.count(key) > 1:
            raise ValueError(f"{key}: given twice")
    values = cast(dict[str, Any], OmegaConf.to_container(OmegaConf.from_dotlist(pilot_settings)))
    for key in values:
        checks.one_of("pilot key", key, [f.name for f in fields(PilotConfig)])
    return PilotConfig(**values), tuple(other_settings)


def _parse_axes(settings: Settings) -> tuple[dict[str, tuple[str, ...]], Settings]:
    """({key: values} of the settings that list several, the other settings)."""
    axes, fixed_settings = dict[str, tuple[str, ...]](), list[str]()
    parser = OverridesParser.create()
    for setting in settings:
        override = parser.parse_override(setting)
        if not override.is_sweep_override():
            fixed_settings.append(setting)
            continue
        key = override.get_key_element()
        if key not in SWEEP_KEYS:
            raise ValueError(f"{key}: must have one value here; lists are for {', '.join(SWEEP_KEYS)}")
        if not override.is_discrete_sweep():
            raise checks.error(key, setting, "must be a list or a range")
        axes[key] = tuple(str(value) for value in override.sweep_string_iterator())
    return axes, tuple(fixed_settings)


def _make_default_axes(base: RunConfig, explicit_keys: set[str]) -> dict[str, tuple[str, ...]]:
    """Half, once and twice the K and the sigma that the user left open."""
    axes = dict[str, tuple[str, ...]]()
    if "num_teachers" not in explicit_keys and base.num_teachers:
        teachers = base.num_teachers
        axes["num_teachers"] = tuple(str(k) for k in dict.fromkeys((max(1, teachers // 2), teachers, 2 * teachers)))
    sigma = getattr(base.mechanism, "sigma", None)
    if "mechanism.sigma" not in explicit_keys and sigma is not None and base.privacy.target_epsilon is None:
        axes["mechanism.sigma"] = tuple(f"{factor * sigma:g}" for factor in (0.5, 1, 2))
    return axes


def _iterate_rows(
    compose_plan: PlanComposer, axes: dict[str, tuple[str, ...]], explicit_keys: set[str], recommended_teachers: int
) -> Iterator[tuple[Settings, RunConfig]]:
    """Every combination. A recommended threshold is for the recommended K: it moves in proportion."""
    if math.prod(map(len, axes.values())) > MAX_ROWS:
        raise ValueError(f"{math.prod(map(len, axes.values()))} combinations: must be at most {MAX_ROWS}")
    for values in itertools.product(*axes.values()):
        row = tuple(f"{key}={value}" for key, value in zip(axes, values, strict=True))
        row_plan = compose_plan(row)
        is_recommended = not explicit_keys & {"mechanism.threshold", "experiment"}
        if (
            isinstance(row_plan.mechanism, ConfidentGNMax | InteractiveGNMax)
            and is_recommended
            and row_plan.num_teachers != recommended_teachers
        ):
            threshold = row_plan.mechanism.threshold * row_plan.num_teachers / recommended_teachers
            row = (*row, f"mechanism.threshold={threshold:.4g}")
            row_plan = compose_plan(row)
        yield row, row_plan


def _evaluate_gradients(
    evaluate: PlanEvaluator,
    plan_by_choice: dict[Choice, RunConfig],
    fixed_settings: Settings,
    compose_plan: PlanComposer,
) -> dict[Choice, RunConfig]:
    """Per-record gradients at the price of the best of these choices of teachers (the cheapest, where none works)."""
    priced_choices = [
        choice for choice in plan_by_choice if choice.epsilon is not None and math.isfinite(choice.epsilon)
    ]
    teacher_choice = select_best(list(plan_by_choice)) or min(
        priced_choices, key=lambda choice: choice.epsilon or 0.0, default=None
    )
    if teacher_choice is None or evaluate.facts.num_records is None:
        return {}
    plan = plan_by_choice[teacher_choice]
    gradients = feasibility.match_label_price(
        plan, plan.calibrate_noise().mechanism, evaluate.facts.num_records, evaluate.facts.num_public
    )
    if gradients is None:
        return {}
    is_encoded = isinstance(plan.dataset, EncodedDataset | Embeddings)
    is_image = False if is_encoded else None
    overrides = feasibility.gradient_overrides(
        plan, gradients, is_image=is_image, is_encoded=is_encoded, num_queries=evaluate.facts.num_public
    )
    replaced_keys = {"num_teachers", *(_parse_setting(setting)[0].split(".")[0] for setting in overrides)}
    other_settings = tuple(
        setting for setting in fixed_settings if _parse_setting(setting)[0].split(".")[0] not in replaced_keys
    )
    with initialize_config_dir(config_dir=find_config_folder(), version_base="1.3"):
        gradient_plan = compose_plan(overrides)
    return {evaluate(gradient_plan, (*other_settings, *overrides)): gradient_plan}


# ---- the pilot and the account -------------------------------------------------------------------------------------


def _get_num_classes(facts: DeclaredFacts, pilot: PilotConfig) -> int:
    if facts.num_classes is not None and pilot.num_classes not in (None, facts.num_classes):
        raise checks.error("pilot.num_classes", pilot.num_classes, f"the data set declares {facts.num_classes}")
    return facts.num_classes or pilot.num_classes or DEFAULT_NUM_CLASSES


def _make_votes_by_num_teachers(
    pilot: PilotConfig, base: RunConfig, facts: DeclaredFacts, num_classes: int, proxy_dataset: Callable[[], Dataset]
) -> Callable[[int], VoteModel]:
    """K -> the votes to try it on."""

    def make_votes(num_teachers: int) -> VoteModel:
        if pilot.dataset is None:
            accuracy = pilot.compute_accuracy(num_teachers, num_classes)
            return simulate_votes(accuracy, num_classes, pilot.num_queries, base.seed, pilot.error_correlation)
        shard_size = facts.compute_shard_size(num_teachers)
        if shard_size is None:
            raise checks.error(
                "dataset.nominal_size", None, "must be declared for pilot.dataset", "About how many records?"
            )
        return train_vote_model(pilot, base.teacher, proxy_dataset(), shard_size, base.seed)

    return make_votes


def _load_proxy_dataset(pilot: PilotConfig, base: RunConfig, num_classes: int, search_paths: Settings) -> Dataset:
    """The public data set that the pilot trains on; never the one that is planned for.

    Args:
        pilot: Names it.
        base: What is planned.
        num_classes: Number of classes of the data that are planned for.
        search_paths: Where its YAML may lie, beside the package's: the command's ``hydra.searchpath``.
    """
    root = base.dataset.declared_facts().root
    settings = [f"dataset={pilot.dataset}", *search_paths, *([] if root is None else [f"data_root={root}"])]
    with initialize_config_dir(config_dir=find_config_folder(), version_base="1.3"):
        try:
            cfg = compose("config", overrides=settings)
        except MissingConfigException as error:
            fix = f"Name one of {', '.join(PUBLIC_DATASETS)}, or a file of your own in a hydra.searchpath."
            raise checks.error("pilot.dataset", pilot.dataset, "is no data set here", fix) from error
        source: DatasetSource = composer.instantiate_component(cfg, "dataset", DatasetSource)
    planned_source = base.dataset.source if isinstance(base.dataset, EncodedDataset) else base.dataset
    if source.name == planned_source.name or not _is_distinct_source(source, planned_source):
        fix = "Use another public data set; two of your own files must each be named, by dataset.path."
        raise checks.error(
            "pilot.dataset", pilot.dataset, "holds the very records that this plan must not look at", fix
        )
    if not source.declared_facts().is_benchmark:
        fix = f"Use {', '.join(PUBLIC_DATASETS)}, or say dataset.benchmark=true in its file."
        raise checks.error(
            "pilot.dataset", pilot.dataset, "is not declared as public, and a plan looks at no private record", fix
        )
    data = source.load()
    if data.spec.num_classes != num_classes:
        problem = f"has {data.spec.num_classes} classes, the data set {num_classes}"
        raise checks.error("pilot.dataset", pilot.dataset, problem, "Use public data of as many classes.")
    if data.evaluation.pool_y is None:
        fix = "Give its public points a label each."
        raise checks.error(
            "pilot.dataset", pilot.dataset, "has public points of unknown classes, and judges no plan", fix
        )
    if isinstance(base.dataset, EncodedDataset):
        return replace(base.dataset, source=source).encode(data, Stages(quiet=base.quiet))
    return data


def _is_distinct_source(proxy_source: DatasetSource, planned_source: DatasetSource) -> bool:
    """Whether two sources are of two kinds, or of users' files of one kind that cannot be the same."""
    if type(proxy_source) is not type(planned_source):
        return True
    proxy_paths, planned_paths = proxy_source.declared_facts().paths, planned_source.declared_facts().paths
    return bool(proxy_paths and planned_paths) and not proxy_paths & planned_paths


def _describe(pilot: PilotConfig, facts: DeclaredFacts, num_classes: int) -> str:
    classes = f"{num_classes} classes" + ("" if facts.num_classes else " (undeclared: pilot.num_classes)")
    query_text = f"{pilot.num_queries} questions asked at random, {classes}"
    if pilot.dataset is not None:
        return (
            f"{query_text}; {pilot.teachers} teachers trained on {pilot.dataset} for {pilot.steps} steps at each shard "
            "size, or the gradients of its records."
        )
    return (
        f"{query_text}; votes simulated from one guess: a teacher is right {100 * pilot.teacher_accuracy:g} % of the "
        f"time at K {pilot.at_teachers} (pilot.teacher_accuracy), its error growing as K^{pilot.exponent:g}. How many "
        "mistakes teachers share is "
        + (
            "not known (pilot.error_correlation): so the wide intervals."
            if pilot.error_correlation is None
            else f"{pilot.error_correlation:g}."
        )
    )


def _find_account(base: RunConfig) -> tuple[Account | None, Path | None]:
    """The data set's account, if there is a ledger that has one; read, and left as it is."""
    path = base.root / "ledger.sqlite"
    if not path.exists():
        return None, None
    with Ledger(path, create=False, readonly=True) as ledger:
        matching_account = {account.name: account for account in ledger.list_accounts()}.get(base.dataset.name)
    return matching_account, None if matching_account is None else path


def _format_budget_source(base: RunConfig, account: Account | None) -> str:
    if base.privacy.budget_epsilon is not None:
        return "privacy.budget_epsilon"
    return "privacy.opening_budget" if account is None else "the account's cap"


def _make_notes(
    base: RunConfig,
    account: Account | None,
    facts: DeclaredFacts,
    choices: tuple[Choice, ...],
    pilot: PilotConfig,
    *,
    soft: bool,
) -> list[str]:
    """What a run would refuse for other reasons than K, noise and questions, and what is not known."""
    notes = []
    if facts.num_records is None:
        notes.append("How many private records there are is not declared (dataset.nominal_size): shards are unknown.")
    if not all(choice.num_teachers for choice in choices):
        notes.append("Per-record gradients cost the same for any num_queries: ask about all public points.")
    elif select_best(list(choices)) is None and pilot.dataset is None and facts.num_records is not None:
        notes.append(
            "Per-record gradients bear more noise than votes (method=gradients mechanism=gradient_descent). A guess of "
            "votes cannot forecast them; pilot.dataset=<public data like yours> does, and chooses them if they are "
            "better."
        )
    if soft and pilot.dataset is None:
        notes.append(
            "Soft labels are forecast as if every probability were 0 or 1: a guess of votes knows none. Real ones "
            "spread over more bins, and as a rule fewer questions are answered; pilot.dataset=<public data like yours> "
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
