"""Records among public images for the voters that are no teachers, and whole runs by configuration."""

import functools
from pathlib import Path

import numpy as np
import torch
from hydra import compose as hydra_compose

from pate_torch import networks
from pate_torch.cli import hydra_config
from pate_torch.mechanisms.gradient_descent import GradientDescent
from pate_torch.methods.gradients import GradientMethod
from pate_torch.methods.record_method import RecordMethod
from pate_torch.networks import remove_head
from pate_torch.privacy.partition import AddRemove, DatasetFacts, Partition, ReplaceOne
from pate_torch.privacy.records import Dataset, Evaluation, PrivateRecords, PublicPool
from pate_torch.privacy.sensitive import GradientSums, SensitiveRecords
from tests.worlds import IMAGES, images


def encoder() -> torch.nn.Module:
    network = networks.build("small_cnn", IMAGES.input_shape, 3, channels=(4, 8), hidden=16)
    return remove_head(networks.initialize(network, torch.Generator().manual_seed(0)))


PARTITIONS = {"add_remove": AddRemove(), "replace_one": ReplaceOne()}


def among_images(x: torch.Tensor, y: torch.Tensor, ids=None, unit: str = "record") -> Dataset:
    """These records among 60 public images; without ids, each is a unit."""
    ids = [f"u{n:02d}" for n in range(len(x))] if ids is None else ids
    pool, _ = images(60, seed=5)
    private = PrivateRecords.from_rows(x, y, np.asarray(ids), unit)
    return Dataset(IMAGES, private, PublicPool(pool), Evaluation(pool[:0], y[:0]))


def ask_records(
    method: RecordMethod, data: Dataset, partition: Partition, encoder: torch.nn.Module | None
) -> SensitiveRecords:
    """All records of ``data``, ready to be asked, in this encoder's features."""
    shards = partition.make_shards(data.private, 1, 0)
    return method.build_sensitive(data.private, shards, DatasetFacts.from_dataset(data, partition), encoder=encoder)


@functools.cache
def gradient_sums(adjacency: str = "add_remove", unit_id: tuple[str, ...] | None = None) -> GradientSums:
    """Forty records that lie among 60 public images, in 16 learnt features and a 1, in three classes."""
    method = GradientMethod(size=50, mechanism=GradientDescent(sigma=1.0, adjacency=adjacency))
    unit = "record" if unit_id is None else "group:who"
    return ask_records(method, among_images(*images(40, seed=1), unit_id, unit), PARTITIONS[adjacency], encoder())


def configured(home: Path, *overrides: str):
    folder = home / "runs" / "one" / "two" / f"run{len(list(home.glob('runs/one/two/*')))}"
    places = [f"paths.root={home}", f"paths.run={folder}", f"hydra.run.dir={folder}", "quiet=true", "device=cpu"]
    with hydra_config.open_configuration():
        return hydra_config.build_run_config(hydra_compose("config", overrides=[*overrides, *places]), folder)
