"""Names that others rely on: commands, configuration keys, and files beside those that the pins hold."""

import json
import runpy
import shutil

import pytest
from hydra import compose
from omegaconf import OmegaConf

from pate_torch.cli import hydra_config
from tests import ROOT
from tests.command_runs import QUIET_LOG, TINY, train

KEYS = """
    seed data_root num_teachers num_queries teachers labels votes noise insecure_noise_seed baseline quiet paths.root
    dataset.path dataset.download mechanism.sigma mechanism.screen_sigma mechanism.threshold
    privacy.delta privacy.budget_epsilon privacy.opening_budget
    executor.workers executor.chunk
"""
COMMANDS = [
    *("train.py --help", "pate audit --help", "pate plan --help", "pate label --help"),
    *("pate ledger verify", "pate ledger show", "pate ledger export"),
]


def test_every_key_is_there():
    with hydra_config.open_configuration():
        found = compose("config", overrides=["dataset=svhn", "mechanism=confident"])
    for key in KEYS.split():
        parent, _, name = key.rpartition(".")
        assert name in (OmegaConf.select(found, parent) if parent else found), key


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        assert train(home, monkeypatch=patch).code == 0
    return home


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_is_there(command, home, monkeypatch, capsys):
    name, *words = command.split()
    words += QUIET_LOG if name == "train.py" else []
    monkeypatch.setenv("PATE_HOME", str(home))
    monkeypatch.setattr("sys.argv", [name, *words])
    with pytest.raises(SystemExit) as stop:
        if name == "pate":
            runpy.run_module("pate_torch", run_name="__main__")
        else:
            runpy.run_path(str(ROOT / name), run_name="__main__")
    assert not stop.value.code and capsys.readouterr().out


def test_files_lie_where_they_are_looked_for(home):
    """The pins hold the files of the run's folder and the fields in them."""
    (run,) = home.glob("runs/digits/gaussian/*")
    (manifest,) = home.glob("teachers/*/manifest.json")
    assert {"group_000000.safetensors", "votes"} <= {path.name for path in manifest.parent.iterdir()}
    assert {"fingerprint", "partition", "configuration", "seed"} <= json.loads(manifest.read_text()).keys()
    assert (home / "ledger.sqlite").exists()
    for private in (home / "teachers", manifest.parent, run / "private"):
        assert private.stat().st_mode & 0o777 == 0o700 and list(private.glob("README*")), private


def test_ids_of_teachers_and_labels_are_taken_up_by_the_keys_that_name_them(home, tmp_path, monkeypatch):
    home = shutil.copytree(home, tmp_path / "copy")
    (file,) = home.glob("runs/digits/gaussian/*/release/summary.json")
    ids = json.loads(file.read_text())
    reused = ("student=vat", "student.network=logistic", "student.augment=null", "student.steps=3")
    tiny = [word for word in TINY if not word.startswith(("student", "num_teachers"))]  # the teachers have their number
    assert train(home, *reused, f"teachers={ids['teachers_id']}", monkeypatch=monkeypatch, base=tiny).code == 0
    assert train(home, f"labels={ids['release_id']}", monkeypatch=monkeypatch).code == 0
