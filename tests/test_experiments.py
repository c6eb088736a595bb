"""Every experiment composes into what it says it is, and runs at a tiny size."""

import json
import sys
from pathlib import Path

import pytest
from hydra import compose as hydra_compose

from pate_torch import pipeline
from pate_torch.accounting import accountant as accounting
from pate_torch.cli import hydra_config
from pate_torch.cli import train as command
from pate_torch.config import Study
from pate_torch.teachers.recipe import PublicStart
from tests import ROOT

REPLICATIONS = ROOT / "benchmarks" / "conf"
EXPERIMENTS = sorted(
    file.stem
    for conf in (Path(command.find_config_folder()), REPLICATIONS)
    for file in (conf / "experiment").glob("*.yaml")
)


def configured(home: Path, *overrides: str):
    folder = home / "runs" / "one" / "two" / "three"
    places = [f"paths.root={home}", f"paths.run={folder}", f"hydra.run.dir={folder}", "quiet=true", "device=cpu"]
    with hydra_config.open_configuration():
        cfg = hydra_compose("config", overrides=[*overrides, *places])
    study = None if cfg.study is None else hydra_config.instantiate_component(cfg, "study", Study)
    return hydra_config.build_run_config(cfg, folder), study


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name, tmp_path):
    plan, study = configured(tmp_path, f"experiment={name}", f"hydra.searchpath=[file://{REPLICATIONS}]")
    assert (study is not None) == (name in {"liu2021_table4", "five_papers"})
    methods = {"dpsgd_baseline": "dpsgd", "mnist_low_epsilon": "gradients", "mnist_reverse_knn": "reverse_knn"}
    transductive = ("mnist_pate", "mnist_prototypes", "labels_only")
    default = "teachers_transductive" if name in transductive else "teachers"
    assert plan.method.name == methods.get(name, default)


def test_prototypes_are_asked_of_a_thousand_teachers_from_a_public_start_below_a_tenth(tmp_path):
    plan, _ = configured(tmp_path, "experiment=mnist_prototypes")
    assert plan.dataset.name == "mnist" and plan.method.num_teachers == 1000
    assert accounting.compute_guarantee(plan.method.privacy_events(), plan.privacy.delta).epsilon < 0.1
    assert isinstance(plan.method.teacher.start, PublicStart) and plan.method.mechanism.counts
    # One recipe for teachers, queries and student is learnt once.
    assert plan.method.features == plan.method.teacher.start.features == plan.student.features
    other, _ = configured(tmp_path, "experiment=mnist_prototypes", "mechanism=confident")
    assert (other.method.mechanism.name, other.method.mechanism.sigma) == ("confident", 245)


@pytest.mark.parametrize("kind,adjacency", [("AddRemove", "add_remove"), ("ReplaceOne", "replace_one")])
def test_a_partition_of_ones_own_says_what_a_neighbor_is(kind, adjacency, tmp_path, monkeypatch):
    """Not the name of its file, which is the user's to choose."""
    (tmp_path / "wards.py").write_text(f"from pate_torch.privacy.partition import {kind}\nclass Wards({kind}): pass\n")
    (tmp_path / "mine" / "partition").mkdir(parents=True)
    (tmp_path / "mine" / "partition" / "by_ward.yaml").write_text("_target_: wards.Wards\nname: by_ward\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "wards", raising=False)
    found = (f"hydra.searchpath=[file://{tmp_path}/mine]", "partition=by_ward")
    for asked in (("method=reverse_knn", "mechanism=histogram"), ("method=gradients", "mechanism=gradient_descent")):
        plan, _ = configured(tmp_path, *found, *asked)
        assert plan.partition.name == "by_ward"
        assert plan.method.mechanism.adjacency == adjacency == plan.partition.adjacency


@pytest.mark.slow(reason="composes nine configurations")
def test_digits_vote_together_and_other_data_only_where_they_are_told_to(tmp_path):
    assert configured(tmp_path)[0].method.neighbors == 6
    assert configured(tmp_path, "method=teachers")[0].method.name == "teachers"
    for name in ("svhn", "cifar10", "mnist", "a9a", "csv dataset.path=x.csv dataset.label=y dataset.name=x"):
        assert configured(tmp_path, *f"dataset={name}".split())[0].method.name == "teachers"
    for name in ("dataset=mnist method=teachers_transductive", "experiment=mnist_pate"):
        assert configured(tmp_path, *name.split())[0].method.neighbors == 6


@pytest.mark.slow(reason="at toy size every experiment runs in tests/end_to_end/test_pins.py")
def test_dpsgd_runs_on_digits_at_the_cost_of_the_run_it_is_held_against(tmp_path):
    overrides = ("mechanism.sigma=10", "num_queries=20")
    held, _ = configured(tmp_path, "experiment=dpsgd_baseline", *overrides, "method.steps=60")
    pipeline.run(held)
    found = json.loads((held.folder / "release" / "summary.json").read_text())
    plan, _ = configured(tmp_path, *overrides)
    assert found["epsilon"] == pytest.approx(
        accounting.compute_guarantee(plan.method.mechanism.privacy_events(20), plan.privacy.delta).epsilon, rel=2e-6
    )
    assert found["num_teachers"] == 0 and found["student_accuracy"] > 0.5  # chance: a tenth
