"""Modules and settings that had another name: the error for an old name states the new one."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from importlib.abc import MetaPathFinder
from types import ModuleType

MOVED = {
    "checks": "core.checks",
    "rng": "core.rng",
    "threads": "core.parallel",
    "progress": "core.progress",
    "teachers.files": "core.files",
    "locks": "core.locks",
    "discrete_noise": "noise.discrete",
    "ledger_accounts": "ledger.accounts",
    "ledger_chain": "ledger.chain",
    "ledger_file": "ledger.database",
    "ledger_review": "ledger.review",
    "ledger_command": "ledger.command",
    "graph": "features.neighbors",
    "representation": "features.contrastive",
    "augment": "features.augmentation",
    "views": "features.augmentation",
    "features.views": "features.augmentation",
    "queries.coreset": "queries.clusters",
    "queries.entropy": "queries.uncertainty",
    "queries.geometry": "queries.clusters",
    "queries.margin": "queries.uncertainty",
    "queries.medoids": "queries.clusters",
    "queries.order": "queries.random",
    "queries.passive": "queries.random",
    "queries.prototypes": "queries.clusters",
    "queries.prototypes_then_margin": "queries.clusters",
    "census": "voters.reverse_knn",
    "slopes": "voters.gradients",
    "leanings": "sensitive",
    "roll": "voters.records",
    "foreign_votes": "voters.votes_file",
    "teachers.transduction": "voters.transductive",
    "belief": "students.label_posterior",
    "selecting": "students.selection",
    "command": "cli.train",
    "compose": "cli.hydra_config",
    "runs_command": "cli.list_runs",
    "audit_pairs": "audit.pairs",
    "membership": "audit.membership",
    "api": "estimator",
    "labelling": "aggregation",
    "released": "release_store",
    "runplan": "config",
    "runs": "core.run_folders",
    "planning": "plan",
    "mechanisms.descent": "mechanisms.gradient_descent",
    "students.carried": "students.self_training",
    "students.carrying": "students.label_propagation",
    "teachers.optimisers": "core.optimizers",
    "teachers.optimizers": "core.optimizers",
    "plan.sheet": "plan.report",
    "plan.declared": "plan.choice",
    "owner_view": "reporting.owner",
    "preflight": "context",
    "ensembling": "voters.teachers",
    "releasing": "pipeline",
    "students.rounds": "students.task",
    "students.answering": "students.linear_model",
    "results": "reporting.build",
    "reporting.released": "reporting.report",
    "reporting.page": "reporting.render",
    "reporting.card": "reporting.render",
    "reporting.charts": "reporting.figures",
    "reporting.table": "reporting.console",
    "voters.gradient_sums": "sensitive",
    "run_folders": "core.run_folders",
    "journal": "label.journal",
    "chance": "plan.chance",
    "sanitising": "published_price",
    "teachers.processes": "teachers.workers",
    "teachers.worker": "teachers.workers",
    "teachers.shared_memory": "teachers.workers",
    "teachers.checkpoints": "teachers.training",
    "students.alignment": "students.fixmatch",
    "teachers.panel": "voters.panel",
    "accounting.exact": "accounting.data_dependent.exact",
    "accounting.outcome_laws": "accounting.data_dependent.outcome_laws",
    "accounting.price": "accounting.data_dependent.price",
    "accounting.price_of_q": "accounting.data_dependent.price_of_q",
    "accounting.sanitised_release": "accounting.data_dependent.sanitised_release",
    "accounting.smooth_sensitivity": "accounting.data_dependent.smooth_sensitivity",
    "accounting.vote_rows": "accounting.data_dependent.vote_rows",
}
"""Old name -> new name, both below ``pate_torch``."""
NAMES = {
    "types": dict.fromkeys(
        ("CellHistogram", "ONE_COUNT", "ONE_VOTE", "Sensitivity", "Votes", "of_each_record", "one_vector"), "sensitive"
    ),
    "protocols": {"Sensitive": "sensitive"},
}
"""Names that left a module which is still there, and the module where they are now."""
FONTS = {f"data.{name}": f"benchmarks.fonts.{name}" for name in ("drawn", "glyphs", "handwriting")}
"""Tuning aids: old name below ``pate_torch`` -> new name in a checkout."""


SETTINGS = {
    "voting=inductive": "voters=teachers",
    "voting=transductive": "voters=teachers_transductive",
    "voting=census": "voters=reverse_knn",
    "voting=slopes": "voters=gradients",
    "voting.reach": "voters.alpha",
    "voting.neighbours": "voters.neighbors",
    "voting": "voters",
    "representation": "features",
    "recommended.representation_steps": "recommended.features_steps",
    "student@refit=carried": "student@guide_student=same",
    "student@refit": "student@guide_student",
    "refit": "guide_student",
    "student=carried": "student=self_training",
    "student.carried": "student.propagation",
    "student.generations": "student.num_generations",
    "student.representation": "student.features",
    "teacher.start.representation": "teacher.start.features",
    "student.reach": "student.alpha",
    "student.reach_later": "student.alpha_later",
    "student.trust": "student.keep_fraction",
    "student.trust_later": "student.keep_fraction_later",
    "student.neighbours": "voters.neighbors",
    "student.unlabelled_batch": "student.unlabeled_batch",
    "recommended.unlabelled_batch": "recommended.unlabeled_batch",
    "mechanism=descent": "mechanism=gradient_descent",
    "mechanism.cut": "mechanism.clip_norm",
    "mechanism.early": "mechanism.early_noise_multiplier",
    "mechanism.first": "mechanism.first_step_size",
    "mechanism.rate": "mechanism.step_size",
    "teacher.optimiser": "teacher.optimizer",
    "experiment=mnist_census": "experiment=mnist_reverse_knn",
}
"""Settings that had another name: what is written now. A key stands for all that begins with it and a dot."""
GONE = {
    "experiment=mnist_succession": "is gone: no better than one round on MNIST; use experiment=mnist_pate",
    "student=successive": "is gone: no better than one round on MNIST; use student=fixmatch",
    "teacher.start.diffusion": "is gone: heads over the learnt features alone get as many labels right",
    "dataset=glyphs": "is a tuning aid of a checkout now: add --config-dir benchmarks/conf",
    "dataset=handwriting": "is a tuning aid of a checkout now: add --config-dir benchmarks/conf",
    "pilot.on=glyphs": "is a tuning aid of a checkout now: use pilot.on=digits, or other public data by its name",
    "succession": "is gone: no better than one round on MNIST; use student=fixmatch",
}


def renamed(settings: Iterable[str]) -> str | None:
    """The message for the first setting that has an old name; None: all names are current.

    To be asked only where a setting was not found: a user's own component may have a key of such a name.
    """
    for setting in settings:
        key, _, value = setting.lstrip("~+").partition("=")
        for old, why in GONE.items():
            if old in (setting, key) or key.startswith(f"{old}."):
                return f"{setting}: {why} (docs/migration.md)."
        new = SETTINGS.get(f"{key}={value}")
        parts = key.split(".")
        for size in range(len(parts), 0, -1):
            found = SETTINGS.get(".".join(parts[:size]))
            if new is None and found is not None:
                new = ".".join([found, *parts[size:]]) + (f"={value}" if value else "")
        if new is not None:
            return f"{setting}: is {new} now (docs/migration.md)."
    return None


def absent(module: str, name: str) -> Exception:
    """The error for a name that a module does not have: states where it is now."""
    new = NAMES.get(module.removeprefix("pate_torch."), {}).get(name)
    if new is None:
        return AttributeError(f"module {module!r} has no attribute {name!r}")
    return ImportError(f"{module}.{name} is pate_torch.{new}.{name} now (docs/migration.md)", name=module)


class _Signpost(MetaPathFinder):
    """Asked last, for modules that nobody found."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        old = fullname.removeprefix("pate_torch.") if fullname.startswith("pate_torch.") else ""
        new = f"pate_torch.{MOVED[old]}" if old in MOVED else FONTS.get(old)
        if new is not None:
            raise ModuleNotFoundError(f"{fullname} is {new} now (docs/migration.md)", name=fullname)


def install() -> None:
    """Make Python look into the table of old modules before it reports that there is no such module."""
    if not any(isinstance(finder, _Signpost) for finder in sys.meta_path):
        sys.meta_path.append(_Signpost())
