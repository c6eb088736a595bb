"""Every data set's YAML builds its class, states all its fields, and recommends the same keys."""

from dataclasses import fields

import pytest
from hydra.utils import get_class, instantiate
from omegaconf import OmegaConf

from pate_torch.data.base import DatasetSource
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
    """The content of a file, after that of the file of the same folder that it begins with."""
    content = OmegaConf.load(path)
    parents = [name.removesuffix("@_here_") for name in content.pop("defaults", []) if "@_here_" in str(name)]
    return OmegaConf.merge(*(read(path.with_stem(name)) for name in parents), content, {"seed": 5, "data_root": None})


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
    assert 0 < recommended["delta"] < 1e-3
    # The noise of the check may carry a count above a threshold that no count reaches, as in PATE 2018 on SVHN.
    assert recommended["threshold"] <= recommended["num_teachers"] + recommended["screen_sigma"]
    if recommended["augment"] is not None:
        Affine(**recommended["augment"])
