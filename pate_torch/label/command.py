"""Answer a file of votes and nothing more: labels.csv with its price, charged to the ledger as every release is.

    python -m pate_torch.label votes=votes.npy num_classes=10 dataset.name=hospitals mechanism.sigma=40 \\
        privacy.delta=1e-6

The votes may come from teachers trained anywhere (``voters.votes_file``); the owner vouches that every privacy unit
reached one of them, and ``partition`` states the adjacency. Every point of the file is a question. All keys:
conf/label.yaml. Exit codes: 0 done; 2 a bad choice of the user's with nothing charged, or a disk that is full or
closed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pate_torch import chance, preflight, results, run_folders
from pate_torch.cli import hydra_config
from pate_torch.cli.train import configuration, explain
from pate_torch.config import Partition, Plan, calibrated
from pate_torch.core import checks
from pate_torch.core.progress import Clock, Stages
from pate_torch.ensembling import enrol
from pate_torch.ledger import Ledger
from pate_torch.pipeline import claimed, open_budget, worst_case
from pate_torch.protocols import Mechanism
from pate_torch.queries.passive import Passive
from pate_torch.releasing import obtain_release
from pate_torch.reporting.released import ReleasedReport
from pate_torch.reporting.table import show_closing
from pate_torch.students.supervised import Supervised
from pate_torch.teachers.store import TeacherStore
from pate_torch.teachers.training import TeacherRecipe
from pate_torch.types import Dataset, DataSpec, Evaluation, PrivateData, PublicPool, Votes
from pate_torch.voters.votes_file import Register, read


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Stands in for a data set of which only votes are here: its public points are the rows of a file."""

    spec: DataSpec
    unit: str
    size: int

    @property
    def name(self) -> str:
        return self.spec.name

    def load(self) -> Dataset:
        """No private records, no test points."""
        nothing, no_label = torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
        row = torch.arange(self.size, dtype=torch.float32)[:, None]
        private = PrivateData(nothing, no_label, np.array([], dtype=str), self.unit)
        return Dataset(self.spec, private, PublicPool(row), Evaluation(nothing, no_label))


def answer(plan: Plan, votes: Votes) -> ReleasedReport:
    """Answer the first ``plan.num_queries`` of these votes; writes the release folder.

    Raises ValueError for a plan that cannot work, and BudgetExceeded, before anything is drawn or charged.
    """
    data, clock = plan.source.load(), Clock()
    name = data.spec.name
    mechanism = calibrated(plan)
    planned = worst_case(plan, mechanism, data)
    preflight.refuse(plan, data, mechanism, planned, training=False)
    forecast = chance.foretold(plan, data, mechanism)
    with claimed(plan), Ledger(preflight.ledger_path(plan)) as ledger, Stages(quiet=plan.quiet) as stages:
        if forecast is not None:
            stages.say(forecast)
        store = TeacherStore(plan.root)
        budget = open_budget(plan, ledger, data, planned, Register(store).content(votes))
        teachers = enrol(votes, name, store, ledger)
        with clock("labels"):
            release, record, reused = obtain_release(plan, data, teachers, mechanism, budget, stages)
        teachers.remember(ledger.head())
        report = results.report(
            data=data,
            release=release,
            record=record,
            paid=[] if reused else [release.id],
            student=None,
            student_name="",
            ledger=ledger,
            seconds=clock.seconds,
        )
        (plan.folder / "release").mkdir(parents=True, exist_ok=True)
        results.write_release(plan.folder / "release", report)
    return report


def build(cfg: DictConfig) -> tuple[Plan, Votes]:
    """The plan and the votes that ``cfg`` (conf/label.yaml) names. Raises ValueError, with the offending key."""
    if cfg.privacy.target_epsilon is not None and cfg.recommended.sigma is None:
        cfg.recommended.sigma = 1.0  # to be calibrated: any starting value will do
    resolved = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    votes = read(
        resolved["votes"],
        num_classes=resolved["num_classes"],
        num_points=resolved["num_points"],
        num_teachers=resolved["num_teachers"],
    )
    classes = resolved["class_names"] or range(votes.num_classes)
    spec = DataSpec(
        name=str(resolved["dataset"]["name"]),
        num_classes=votes.num_classes,
        input_shape=(1,),
        class_names=tuple(map(str, classes)),
        mean=(0.0,),
        std=(1.0,),
    )
    rows = Rows(spec=spec, unit=resolved["dataset"]["unit"], size=len(votes))
    unused = Supervised(network="logistic")  # nothing is trained here
    privacy, asked = resolved["privacy"], resolved["num_queries"]
    return Plan(
        source=rows,
        partition=hydra_config.component(cfg, "partition", Partition),
        recipe=TeacherRecipe(),
        mechanism=hydra_config.component(cfg, "mechanism", Mechanism),
        strategy=Passive(),
        student=unused,
        refit=unused,
        root=run_folders.checked_root(resolved["paths"]["root"]),
        folder=Path(resolved["paths"]["run"]),
        seed=0,
        num_teachers=votes.num_teachers,
        num_queries=len(votes) if asked is None else asked,
        noise=resolved["noise"],
        insecure_noise_seed=resolved["insecure_noise_seed"],
        delta=privacy["delta"],
        budget_epsilon=privacy["budget_epsilon"],
        opening_budget=privacy["opening_budget"],
        target_epsilon=privacy["target_epsilon"],
        second_account=privacy["second_account"],
        allow_chance=privacy["allow_chance"],
        baseline=False,
        quiet=checks.boolean("quiet", resolved["quiet"]),
    ), votes


def main(arguments: Sequence[str] | None = None) -> int:
    """The command. 0: done; 2: a bad choice of the user's, with nothing charged."""
    parser = argparse.ArgumentParser(prog="python -m pate_torch.label", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("settings", nargs="*", metavar="key=value", help="votes=, num_classes=, dataset.name=, ...")
    settings = parser.parse_intermixed_args(arguments).settings
    try:
        with initialize_config_dir(version_base="1.3", config_dir=configuration()):
            plan, votes = build(hydra_compose("label", overrides=settings))
        report = answer(plan, votes)
    except (ValueError, OSError, HydraException, OmegaConfBaseException) as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        return 2
    if not plan.quiet:
        show_closing(report, places={"Released": plan.folder / "release"})
    return 0
