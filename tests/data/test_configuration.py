"""Every data set's YAML builds its class, states all its fields, and recommends the same keys."""

from dataclasses import fields

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from benchmarks.fonts.glyphs import Glyphs
from pate_torch.data.base import DatasetSource, SourceFacts
from pate_torch.data.digits import Digits
from pate_torch.data.mnist import Mnist
from pate_torch.data.svhn import Svhn
from pate_torch.data.tabular import Csv
from pate_torch.features.augmentation import Affine
from pate_torch.networks import NETWORKS
from tests import ROOT

CONF = ROOT / "conf"
RECOMMENDED = {
    *("num_teachers", "sigma", "screen_sigma", "threshold", "queries", "network", "steps", "batch_size"),
    *("augment", "student_network", "student_steps", "delta"),
}
PRIVATE_BY_NATURE = {"csv", "libsvm", "image_folder", "text", "embeddings"}
# What config.yaml recommends where a data set says nothing; a data set may.
GENERAL = set(OmegaConf.load(CONF / "config.yaml").recommended)


def read(path):
    return OmegaConf.merge(OmegaConf.load(path), {"seed": 5, "data_root": None})


@pytest.mark.parametrize("path", sorted((CONF / "dataset").glob("*.yaml")), ids=lambda path: path.stem)
def test_dataset_yaml(path):
    assert path.read_text().startswith("# @package _global_\n")
    cfg = read(path)
    source = instantiate(cfg.dataset, _convert_="all")
    assert isinstance(source, DatasetSource) and source.name == path.stem
    keys = {f.name: f for f in fields(get_class(cfg.dataset._target_))}
    assert set(cfg.dataset) - {"_target_"} == set(keys)
    preset = "roles" in keys and path.stem not in PRIVATE_BY_NATURE  # a named file of the LIBSVM collection
    for name, field in keys.items():
        if not preset and name != "seed":
            value = getattr(source, name)
            assert (tuple(value) if isinstance(value, list) else value) == field.default
    if hasattr(source, "benchmark"):
        assert source.benchmark == (path.stem not in PRIVATE_BY_NATURE)
    recommended = OmegaConf.to_container(cfg.recommended)
    assert set(recommended) - GENERAL == RECOMMENDED
    assert recommended["network"] in NETWORKS and recommended["student_network"] in NETWORKS
    assert 0 < recommended["delta"] < 1e-3 and recommended["threshold"] <= recommended["num_teachers"]
    if recommended["augment"] is not None:
        Affine(**recommended["augment"])


@pytest.mark.parametrize("source", [Digits(), Glyphs(private=60, public=30, test=10, num_classes=4)])
def test_declared_facts_are_those_of_the_loaded_data(source):
    declared, data = source.declared_facts(), source.load()
    assert declared.num_classes == data.spec.num_classes and declared.is_benchmark
    assert declared.num_private == data.spec.nominal_size and declared.num_public == len(data.pool)
    assert declared.name == data.spec.name


def test_declared_facts_of_sources_whose_files_are_elsewhere():
    facts = {"num_classes": 10, "num_private": 60_000, "num_public": 9000, "is_benchmark": True}
    assert Mnist().declared_facts() == SourceFacts(name="mnist", **facts)
    assert Mnist(private=500).declared_facts().num_private == 500
    assert Svhn().declared_facts().num_private == 73_257 and Svhn(extra=True).declared_facts().num_private == 604_388
    facts = SourceFacts(name="csv", num_classes=3, num_private=9)
    assert Csv(classes=["a", "b", "c"], nominal_size=9).declared_facts() == facts
    assert Csv().declared_facts() == SourceFacts(name="csv")
