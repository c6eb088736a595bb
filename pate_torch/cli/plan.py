"""Print the privacy cost of a choice of K, noise and queries, and the vote margin that useful labels need.

    pate plan dataset=svhn privacy.budget_epsilon=2
    pate plan dataset=svhn teachers=250,500 mechanism.sigma=20,40,80
    pate plan dataset=csv dataset.nominal_size=2000 pilot.dataset=digits --json

``pate plan`` and ``pate diagnose`` take the same arguments. The keys are those of ``train.py``; ``teachers`` stands for
``num_teachers``. A plan contains every combination of the listed values. Without a list, a plan also tries half and
twice the sigma and, with a pilot (``planning/pilot.py``), half and twice K. A pilot tries the choices on the public
data ``pilot.dataset``: a benchmark, or a file of labeled records. ``pate plan public.csv`` also makes this file the
run's ``dataset.public_path``.

    pate diagnose public.csv dataset.path=private.csv dataset.label=income dataset.nominal_size=20000

``pate diagnose`` measures teachers on these data first, chooses K, mechanism and queries, and reads no ledger.

Nothing is charged, and no private record is read: a plan uses what the settings declare about the data set, and never
loads its records. The ledger is read for the remaining budget. The exit code is 0 if a plan is printed, even if none of
the choices works, and 2 for a wrong argument.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf

from pate_torch.api.messages import reword_errors
from pate_torch.cli import hydra_config
from pate_torch.cli.train import report_refusals
from pate_torch.config import RunConfig
from pate_torch.core import checks
from pate_torch.core.formatting import format_delta
from pate_torch.core.progress import Stages
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.data.encoded_dataset import EncodedDataset
from pate_torch.data.file_source import FileSource
from pate_torch.data.labels_only import LabelPrivacyDataset
from pate_torch.data.tabular import Embeddings
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.labeling import LabelingMethod
from pate_torch.methods.teacher_votes import TeacherVotes
from pate_torch.methods.voting import VotesFile, VotingMethod
from pate_torch.planning import gradient_budget
from pate_torch.planning.choice import Choice, PlanEvaluator, PlanReport, format_report, get_parameters, select_best
from pate_torch.planning.diagnosis import ShardDiagnosis, diagnose_shards
from pate_torch.planning.pilot import Pilot, PilotConfig
from pate_torch.privacy.ledger import find_account

Settings = tuple[str, ...]
Axes = dict[str, Settings]

SWEEP_KEYS = (
    *("num_teachers", "num_queries", "mechanism"),
    *("mechanism.sigma", "mechanism.screen_sigma", "mechanism.threshold"),
)
"""Keys that may list several values. The table of the plan has a column for each of them."""
MAX_ROWS = 60
DIAGNOSED_MECHANISMS: dict[str, Axes] = {"gaussian": {}, "sparse_vector": {"mechanism.max_failures": ("1", "4", "16")}}
PILOT_ADVICE = "Set it to a public benchmark, a file of public records, or your data set file with benchmark: true."
DEFAULT_NUM_CLASSES = 2


@report_refusals
def main(options: argparse.Namespace) -> None:
    """Run ``pate plan`` or ``pate diagnose``."""
    is_short = any(setting.startswith("teachers=") for setting in options.settings)
    with reword_errors({r"^(method\.)?num_teachers(?==)": "teachers" if is_short else "num_teachers"}):
        report = plan(options.settings, diagnoses=options.command == "diagnose")
    print(report.to_json() if options.json else format_report(report))


def plan(settings: Sequence[str], *, diagnoses: bool = False) -> PlanReport:
    """Evaluate these settings, or those that ``diagnoses`` finds for them. Raise ValueError if a setting is wrong."""
    options, axes, fixed_settings = _parse_settings(settings)
    keys = {_get_key(setting) for setting in fixed_settings} | set(axes)
    with hydra_config.open_configuration():
        first_values = (f"{key}={values[0]}" for key, values in axes.items())
        cfg = compose("config", overrides=[*fixed_settings, *first_values])
        base = build_plan(cfg)
        facts, terms = base.dataset.declared_facts(), base.privacy
        account = None if diagnoses else find_account(base.root, base.dataset.name)
        if "mechanism.sigma" in axes and terms.target_epsilon is not None:
            problem = "cannot be combined with a list for mechanism.sigma, because it determines mechanism.sigma"
            raise checks.error("privacy.target_epsilon", terms.target_epsilon, problem, "Omit one of the two keys.")
        has_pilot, shards = diagnoses or options.dataset is not None, tuple[ShardDiagnosis, ...]()
        pilot = _make_pilot(options, base, fixed_settings) if has_pilot else None
        num_classes = pilot.data.spec.num_classes if pilot else facts.num_classes or DEFAULT_NUM_CLASSES
        evaluate = PlanEvaluator(facts=facts, num_classes=num_classes, account=account, pilot=pilot)
        if diagnoses:
            plans, shards = _diagnose(evaluate, base, fixed_settings, keys)
        else:
            if not axes and "experiment" not in keys:
                axes = make_default_axes(base, keys, has_pilot=has_pilot)
            composed = {axes.get("mechanism", (None,))[0]: cfg}
            plans = {evaluate(*row): row[0] for row in _iterate_rows(composed, fixed_settings, axes, keys)}
    budget, source = evaluate.get_budget(base), "privacy.opening_budget" if account is None else "the account's cap"
    return PlanReport(
        dataset=facts.name,
        budget_epsilon=budget,
        budget_source=source if terms.budget_epsilon is None else "privacy.budget_epsilon",
        delta=terms.delta,
        choices=tuple(plans),
        notes=(*_make_notes(evaluate, options), *cfg.recommended.measured, *_suggest_gradients(plans, facts)),
        shards=shards,
    )


def _diagnose(
    evaluate: PlanEvaluator, base: RunConfig, settings: Settings, keys: set[str]
) -> tuple[dict[Choice, RunConfig], tuple[ShardDiagnosis, ...]]:
    """Measure teachers for several sizes of a shard, and find the best choice of each mechanism for each size."""
    pilot, method = evaluate.pilot, base.method
    assert pilot is not None
    for key in keys:
        if key.startswith(("num_", "mechanism")):
            raise ValueError(f"{key}: must not be set, because the diagnosis recommends it. Omit it, or use pate plan.")
    if not isinstance(method, TeacherVotes):
        raise checks.error("method", method.name, "must be a method of teachers", "Omit method.")
    settings += () if "query" in keys else ("query=random",)  # a pilot asks the points in random order
    if base.privacy.target_epsilon is None:
        settings += (f"privacy.target_epsilon={evaluate.get_budget(base):g}",)
    max_size, max_queries = min(len(pilot.data.private), pilot.num_records) // 16, len(pilot.data.pool)
    counts = sorted({pilot.num_records // max(1, max_size // 3**step) for step in range(5)})
    queries = sorted({max(min(10, max_queries), max_queries // 4**step) for step in range(3)})
    shards = tuple(diagnose_shards(pilot, replace(method, num_teachers=count)) for count in counts)
    plans, composed = dict[Choice, RunConfig](), dict[str | None, DictConfig]()
    for count, (name, options) in itertools.product(counts, DIAGNOSED_MECHANISMS.items()):
        axes = {"num_teachers": (f"{count}",), "mechanism": (name,), "num_queries": (*map(str, queries),), **options}
        rows = {evaluate(*row): row[0] for row in _iterate_rows(composed, settings, axes, set(axes))}
        best = select_best(tuple(rows)) or next(iter(rows))
        plans[best] = rows[best]
    return {choice: plan for choice, plan in plans.items() if choice.problem is None} or plans, shards


def build_plan(cfg: DictConfig) -> RunConfig:
    """Build the configuration of a run of train.py. Raise ValueError if the method cannot be planned."""
    plan = hydra_config.build_run_config(cfg, Path("."))
    if isinstance(plan.method, VotesFile):
        problem = "must not be set, because votes are private and a plan reads only public facts"
        raise checks.error("votes", str(plan.method.path), problem, "Set teachers=<number of teachers> instead.")
    if plan.labels is not None:
        problem = "must not be set, because the labels of a stored release cost nothing"
        raise checks.error("labels", plan.labels, problem, "Run train.py with these settings.")
    if not isinstance(plan.method, VotingMethod | GradientMethod):
        fix = "Set privacy.target_epsilon in train.py to calibrate the noise of this method."
        raise checks.error("method", plan.method.name, "cannot be planned: it has no teachers", fix)
    return plan


def _get_key(setting: str) -> str:
    return setting.partition("=")[0].lstrip("+~")


def _parse_settings(settings: Sequence[str]) -> tuple[PilotConfig, Axes, Settings]:
    """Split settings into options of the pilot, keys with a list of values, and all other settings."""
    options, axes, fixed_settings = dict[str, Any](), Axes(), dict[str, str]()
    if files := [setting for setting in settings if "=" not in setting and not setting.startswith("~")][:1]:
        defaults = [] if any(setting.startswith("dataset=") for setting in settings) else ["dataset=csv"]
        defaults += [f"dataset.public_path={files[0]}", f"pilot.dataset={files[0]}"]
        settings = [*defaults, *(setting for setting in settings if setting != files[0])]
        if {".", "/"} & set(files[0]) and not Path(files[0]).exists():
            raise checks.error("PUBLIC", files[0], "does not exist", "Name a file of labeled public records.")
    for setting in settings:
        setting = f"num_{setting}" if setting.startswith("teachers=") else setting
        if "=" not in setting and not setting.startswith("~"):
            raise ValueError(f"{setting!r}: must be a setting key=value of train.py")
        override, key = OverridesParser.create().parse_override(setting), _get_key(setting)
        if key in axes or key in fixed_settings:
            raise ValueError(f"{key}: is set twice. Set it once, for example to a list {key}=1,2.")
        if key.startswith("pilot."):
            name = checks.one_of("pilot key", key.removeprefix("pilot."), [f.name for f in fields(PilotConfig)])
            options[name] = override.value()
        elif not override.is_sweep_override():
            fixed_settings[key] = setting
        elif key not in SWEEP_KEYS or not override.is_discrete_sweep():
            raise ValueError(f"{key}: must have one value. Lists and ranges are allowed for {', '.join(SWEEP_KEYS)}.")
        else:
            axes[key] = tuple(str(value) for value in override.sweep_string_iterator())
    return PilotConfig(**options), axes, tuple(fixed_settings.values())


def make_default_axes(base: RunConfig, explicit_keys: set[str], *, has_pilot: bool) -> Axes:
    """Make the default lists: half, one and two times sigma and, with a pilot, K, unless the user set the key."""
    method, axes = base.method, Axes()
    assert isinstance(method, LabelingMethod)
    if "num_teachers" not in explicit_keys and method.ensemble_size and has_pilot:
        sizes = max(1, method.ensemble_size // 2), method.ensemble_size, 2 * method.ensemble_size
        axes["num_teachers"] = tuple(map(str, dict.fromkeys(sizes)))
    sigma = get_parameters(method).get("sigma")
    if "mechanism.sigma" not in explicit_keys and sigma is not None and base.privacy.target_epsilon is None:
        axes["mechanism.sigma"] = tuple(f"{factor * sigma:g}" for factor in (0.5, 1, 2))
    return axes


def _iterate_rows(
    composed: dict[str | None, DictConfig], fixed_settings: Settings, axes: Axes, keys: set[str]
) -> Iterator[tuple[RunConfig, Settings]]:
    """Configure every combination. A recommended threshold is valid for the recommended K, and is scaled with K.

    ``composed`` keeps what Hydra, which takes long, composed for each value of the key mechanism, or for None.
    """
    num_rows = math.prod(map(len, axes.values()))
    if num_rows > MAX_ROWS:
        raise ValueError(f"{', '.join(axes)}: {num_rows} combinations, but at most {MAX_ROWS} are allowed")
    for values in itertools.product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        settings = (*fixed_settings, *(f"{key}={value}" for key, value in row.items()))
        mechanism = row.pop("mechanism", None)
        if mechanism not in composed:
            composed[mechanism] = compose("config", overrides=[*fixed_settings, f"mechanism={mechanism}"])
        cfg = composed[mechanism].copy()
        for key, value in row.items():
            OmegaConf.update(cfg, key, OverridesParser.create().parse_override(f"{key}={value}").value())
        if "threshold" in cfg.mechanism and not keys & {"mechanism.threshold", "experiment"}:
            factor = cfg.num_teachers / cfg.recommended.num_teachers
            if factor != 1:
                cfg.mechanism.threshold = float(f"{cfg.mechanism.threshold * factor:.4g}")
                settings += (f"mechanism.threshold={cfg.mechanism.threshold:g}",)
        yield build_plan(cfg), settings


def _make_pilot(options: PilotConfig, base: RunConfig, fixed_settings: Settings) -> Pilot:
    """Load the public data of the pilot, else the planned benchmark. Raise ValueError if they may be private."""

    def refuse(problem: str) -> ValueError:
        return checks.error("pilot.dataset", options.dataset, problem, PILOT_ADVICE)

    planned = base.dataset
    while isinstance(planned, EncodedDataset | LabelPrivacyDataset):
        planned = planned.source
    planned_facts, source = planned.declared_facts(), planned
    if {".", "/"} & set(options.dataset or ""):
        if not isinstance(planned, FileSource):
            raise refuse(f"must not be a file, because dataset={planned_facts.name} is not in files of the user")
        files: dict[str, Any] = {"path": options.dataset, "public_path": None, "test_path": None, "benchmark": True}
        files |= {"roles": "hash", "fractions": (0.5, 0.4, 0.1)}  # half of the records train teachers
        source = replace(planned, name=f"{planned.name}.public", **files)
    elif options.dataset is not None:
        overrides = [f"dataset={options.dataset}", *(s for s in fixed_settings if _get_key(s) == "hydra.searchpath")]
        overrides += [] if planned_facts.root is None else [f"data_root={planned_facts.root}"]
        try:
            cfg = compose("config", overrides=overrides)
        except MissingConfigException as error:
            raise refuse("does not exist in the configuration") from error
        source = hydra_config.instantiate_component(cfg, "dataset", DatasetSource)
    facts = source.declared_facts()
    private_paths = {place for path in planned_facts.paths for place in (path, *path.parents)}
    pairs = itertools.product(filter(Path.exists, facts.paths), filter(Path.exists, planned_facts.paths))
    is_linked = any(path.samefile(other) for path, other in pairs)  # also by a hard link
    are_other_files = facts.paths and private_paths and not (facts.paths & private_paths or is_linked)
    is_same = facts.name == planned_facts.name or (type(source) is type(planned) and not are_other_files)
    if is_same and source is not planned:
        rule = "must not hold the private records: dataset.path must name another file, which need not be here"
        raise refuse(rule)
    if not facts.is_benchmark:
        raise refuse("must be declared as public, because a plan reads no private record")
    if planned_facts.num_private is None:
        fix = "Set it to the approximate number of private records."
        raise checks.error("dataset.nominal_size", None, "must be set together with a pilot", fix)
    data, num_classes = source.load(), planned_facts.num_classes
    if data.evaluation.pool_y is None or data.spec.num_classes != (num_classes or data.spec.num_classes):
        actual = "no labels" if data.evaluation.pool_y is None else f"labels of {data.spec.num_classes} classes"
        raise refuse(f"must have public points with labels of {num_classes or 'all'} classes, but has {actual}")
    if isinstance(base.dataset, EncodedDataset):
        data = replace(base.dataset, source=source).encode(data, Stages(quiet=base.quiet))
    return Pilot(options, data, planned_facts.num_private, base.seed)


def _make_notes(evaluate: PlanEvaluator, options: PilotConfig) -> Iterator[str]:
    facts, account = evaluate.facts, evaluate.account
    if facts.num_classes is None and evaluate.pilot is None:
        yield f"{DEFAULT_NUM_CLASSES} classes are assumed. Declare them by dataset.classes."
    if facts.num_private is None:
        yield "Shard sizes are unknown. Declare the number of private records by dataset.nominal_size."
    if evaluate.pilot is not None:
        source = options.dataset or facts.name
        yield f"The forecasts are measured on {source}, and apply to data that resemble it."
    if account is not None:
        spent = "no total (NOT PRIVATE)" if account.guarantee is None else f"epsilon {account.guarantee.epsilon:.4g}"
        state = f"{'is closed, and ' if account.is_closed else ''}has spent {spent} of {account.budget_epsilon:g}"
        terms = f"at delta {format_delta(account.delta)}, {account.adjacency}"
        yield f"Account {account.name} {state} {terms}. The column fits refers to the remaining budget."


def _suggest_gradients(plans: Mapping[Choice, RunConfig], facts: SourceFacts) -> Iterator[str]:
    """Suggest per-record gradients at the cost of the best choice of teachers, unless noise outweighs gradients."""
    affordable = [choice for choice in plans if choice.epsilon and choice.verdict != "over"]
    choice = select_best(tuple(plans)) or min(affordable, key=lambda choice: choice.epsilon or 0.0, default=None)
    if choice is None or facts.num_private is None:
        return
    plan, terms = plans[choice], plans[choice].privacy
    if not isinstance(plan.method, TeacherVotes):
        return
    priced_plan = replace(plan, method=plan.method.calibrate(terms.target_epsilon, terms.delta))
    gradients = gradient_budget.match_label_cost(priced_plan, facts.num_private, facts.num_public)
    if gradients is not None and not gradients.is_noise_dominated:
        is_encoded = isinstance(plan.dataset, EncodedDataset | Embeddings)
        settings = gradient_budget.format_gradient_settings(plan, gradients, False if is_encoded else None, is_encoded)
        yield gradient_budget.suggest_gradients(gradients, settings)
