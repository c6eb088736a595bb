"""Hydra finds the package's components beside the files of conf/ and those of a user."""

import pytest
from hydra import compose

from pate_torch.cli import hydra_config
from tests.command_runs import TINY, train

MINE = "_target_: pate_torch.mechanisms.laplace.LNMax\nname: laplace\nsigma: 7.0\n"


def test_a_method_brings_its_mechanism_and_a_group_can_be_placed_elsewhere():
    with hydra_config.open_configuration():
        cfg = compose(
            "config", overrides=["method=gradients", "student=fixmatch_ensemble", "student@student.member=vat"]
        )
    assert cfg.mechanism.name == "gradient_descent" and cfg.mechanism.adjacency == "add_remove"
    assert cfg.student.member.name == "vat" and cfg.guide_student.name == "supervised"


def test_a_file_of_the_user_is_an_option_and_may_not_have_the_name_of_a_component(tmp_path, monkeypatch):
    """Hydra would mix the keys of the two."""
    (tmp_path / "mechanism").mkdir()
    for name in ("gaussian", "of_my_own"):
        (tmp_path / "mechanism" / f"{name}.yaml").write_text(MINE)
    search = f"hydra.searchpath=[file://{tmp_path}]"
    with hydra_config.open_configuration():
        cfg = compose("config", overrides=[search, "mechanism=of_my_own"])
    assert (cfg.mechanism.name, cfg.mechanism.sigma) == ("laplace", 7.0)
    with pytest.raises(ValueError, match="Give your file another name"), hydra_config.open_configuration():
        compose("config", overrides=[search, "mechanism=gaussian"])
    outcome = train(tmp_path / "home", search, "mechanism=gaussian", monkeypatch=monkeypatch)
    assert "mechanism='gaussian': is a component of pate_torch" in outcome.error


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ((), 3022),  # 40 * 604,388 / 250 / 32, rounded up
        (("num_teachers=500",), 1511),
        (("recommended.batch_size=64", "recommended.passes=20"), 756),
        (("dataset.private=302194",), 1511),
        (("dataset.extra=false",), 600),
        (("num_teachers=0",), 600),
        (("num_teachers=500", "teacher.steps=7"), 7),
    ],
)
def test_steps_follow_from_the_declared_size_of_a_shard_without_its_files(settings, steps, monkeypatch):
    monkeypatch.setattr("pate_torch.data.benchmark.Svhn.load", lambda self: pytest.fail("private records were read"))
    with hydra_config.open_configuration():
        cfg = compose("config", overrides=["dataset=svhn", "data_root=/nowhere", *settings])
        assert cfg.teacher.steps == steps


def test_a_wrong_setting_of_the_data_set_is_refused_by_its_own_key(tmp_path, monkeypatch):
    for setting in ("dataset.extra=perhaps", "dataset.test=0"):
        outcome = train(tmp_path, "dataset=svhn", setting, monkeypatch=monkeypatch, base=["quiet=true"])
        assert outcome.error.startswith(setting.split("=")[0])


def test_a_private_test_without_a_student_is_refused(tmp_path, monkeypatch):
    outcome = train(tmp_path, "private_test.share=0.1", "student=none", monkeypatch=monkeypatch, base=["quiet=true"])
    assert outcome.error.startswith("private_test.share=0.1: needs a student")
    assert not (tmp_path / "ledger.sqlite").exists()


def test_a_sweep_runs_each_value(tmp_path, monkeypatch):
    settings = [word for word in TINY if not word.startswith(("student", "mechanism"))]
    outcome = train(tmp_path, "mechanism.sigma=4,5", "student=none", monkeypatch=monkeypatch, base=["-m", *settings])
    assert outcome.code == 0, outcome.err
    assert len(list(tmp_path.glob("runs/digits/gaussian/*/release/labels.csv"))) == 2
