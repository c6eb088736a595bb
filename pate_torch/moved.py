"""Where modules are now that had another name: whoever imports the old one is told the new one, and nothing else."""

from __future__ import annotations

import sys
from collections.abc import Sequence
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
    "views": "features.views",
    "diffusion": "features.diffusion",
    "census": "voters.reverse_knn",
    "slopes": "voters.gradients",
    "leanings": "voters.gradient_sums",
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
    "runs": "run_folders",
    "planning": "plan",
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
}
"""Old name -> new name, both below ``pate_torch``."""


class _Signpost(MetaPathFinder):
    """Asked last, for modules that nobody found."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        new = MOVED.get(fullname.removeprefix("pate_torch.")) if fullname.startswith("pate_torch.") else None
        if new is not None:
            raise ModuleNotFoundError(f"{fullname} is pate_torch.{new} now (docs/migration.md)", name=fullname)


def install() -> None:
    """Let Python ask the table above before it says that there is no such module."""
    if not any(isinstance(finder, _Signpost) for finder in sys.meta_path):
        sys.meta_path.append(_Signpost())
