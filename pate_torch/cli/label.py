r"""Release private labels from a file of votes as labels.csv with a privacy statement, and charge the ledger.

    pate label votes=votes.npy num_classes=10 dataset.name=hospitals mechanism.sigma=40 \
        privacy.delta=1e-6
    pate label dataset=svhn                     # labels of a run without a student, with the keys of train.py

Any program may have trained the teachers of a file of votes (``methods.voting``). The owner is responsible that the
records of each privacy unit were used by one teacher only, and that ``partition`` is the adjacency. Every point of the
file is a query. conf/label.yaml and conf/account.yaml list all keys. The exit code is 0 if labels were released, and
2 if a setting is refused before a charge, or if the disk is full or read-only.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, cast

import torch
from hydra import compose as hydra_compose
from omegaconf import DictConfig, OmegaConf

from pate_torch.api.pate import InMemoryDataset
from pate_torch.cli import hydra_config
from pate_torch.cli.train import report_refusals
from pate_torch.config import RunConfig
from pate_torch.core import checks, run_folders
from pate_torch.mechanisms.base import VoteMechanism
from pate_torch.methods.voting import VotesFile
from pate_torch.pipeline import run
from pate_torch.planning.gradient_budget import suggest_settings
from pate_torch.privacy.partition import Partition
from pate_torch.privacy.records import CLASSES, FROM_OWNER, Dataset, DataSpec, Evaluation, PrivateRecords, PublicPool
from pate_torch.queries.base import Random
from pate_torch.teachers.voting import read_votes


def make_votes_dataset(spec: DataSpec, unit: str, num_points: int) -> InMemoryDataset:
    """Make a data set without records, whose public points are the row numbers of a file of votes."""
    empty_x, empty_y = torch.zeros(0, 1), torch.zeros(0, dtype=torch.int64)
    private, pool_x = PrivateRecords.from_rows(empty_x, empty_y, [], unit), torch.arange(num_points)[:, None].float()
    evaluation, provenance = Evaluation(empty_x, empty_y), {CLASSES: FROM_OWNER}
    return InMemoryDataset(Dataset(spec, private, PublicPool(pool_x), evaluation, provenance=provenance))


def build_config(cfg: DictConfig) -> RunConfig:
    """Build the run configuration from ``cfg`` (conf/label.yaml). Raise ValueError with the key of a wrong setting."""
    if cfg.privacy.target_epsilon is not None and cfg.recommended.sigma is None:
        cfg.recommended.sigma = 1.0  # calibration replaces this placeholder
    if OmegaConf.is_missing(cfg.dataset, "name") and not OmegaConf.is_missing(cfg, "votes"):
        problem = "must name the account that is charged"
        raise checks.error("dataset.name", None, problem, "For example dataset.name=hospitals.")
    values = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))
    votes = read_votes(values["votes"], **{key: values[key] for key in ("num_classes", "num_points", "num_teachers")})
    spec = DataSpec(
        name=str(values["dataset"]["name"]),
        num_classes=votes.num_classes,
        input_shape=(1,),
        class_names=tuple(map(str, values["class_names"] or range(votes.num_classes))),
        mean=(0.0,),
        std=(1.0,),
    )
    num_queries = values["num_queries"]
    return RunConfig(
        dataset=make_votes_dataset(spec, values["dataset"]["unit"], len(votes)),
        partition=hydra_config.instantiate_component(cfg, "partition", Partition),
        method=VotesFile(
            votes=votes,
            mechanism=hydra_config.instantiate_component(cfg, "mechanism", VoteMechanism),
            query=Random(name="passive", shuffle=False),
            num_queries=len(votes) if num_queries is None else num_queries,
            allow_uninformative_labels=values["privacy"]["allow_uninformative_labels"],
        ),
        privacy=hydra_config.build_privacy_config(values),
        root=run_folders.check_root(values["paths"]["root"]),
        folder=Path(values["paths"]["run"]),
        quiet=checks.boolean("quiet", values["quiet"]),
    )


@report_refusals
def main(options: argparse.Namespace) -> None:
    """Run the command."""
    with hydra_config.open_configuration():
        if any(setting.startswith("dataset=") for setting in options.settings):
            config = hydra_config.compose_labeling(options.settings)
        else:
            config = build_config(hydra_compose("label", overrides=options.settings))
    run(config, suggest_settings)
