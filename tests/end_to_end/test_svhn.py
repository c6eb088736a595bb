"""SVHN's file format from training to a second student: both mechanisms, one ensemble, one account, TensorBoard.

The images are scikit-learn's digits on colored grounds, because SVHN's own files are gigabytes.
"""

import json

import numpy as np
import pytest
import scipy.io
import torchvision
from sklearn.datasets import load_digits
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from pate_torch.privacy.ledger import Ledger
from tests.command_runs import train

SIZES = {"train": 700, "extra": 600, "test": 497}
BASE = [
    *("dataset=svhn", "dataset.private=1300", "dataset.public=250", "dataset.test=247", "num_teachers=20"),
    *("teacher=logistic", "teacher.batch_size=16", "executor.workers=1", "baseline=false", "quiet=true"),
    *("student=supervised", "student.network=logistic", "student.augment=null", "student.steps=60"),
    *("guide_student.network=logistic", "guide_student.augment=null", "guide_student.steps=3"),
    *("query=random", "num_queries=100", "privacy.opening_budget=300", "membership=none"),
]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The three files: X, uint8 [32, 32, 3, N], and y, [N, 1], where 10 stands for the digit 0."""
    x, y = load_digits(return_X_y=True)
    generator = np.random.default_rng(0)
    mask = np.kron(x.reshape(-1, 1, 8, 8) / 16, np.ones((4, 4)))
    ground, lighter = generator.integers(0, 90, (2, len(y), 3, 1, 1))
    images = (ground + (150 + lighter - ground) * mask).astype(np.uint8)
    folder = tmp_path / "svhn"
    folder.mkdir()
    start = 0
    for split, size in SIZES.items():
        part = slice(start, start + size)
        labels = np.where(y[part] == 0, 10, y[part]).astype(np.uint8)[:, None]
        scipy.io.savemat(folder / f"{split}_32x32.mat", {"X": images[part].transpose(2, 3, 1, 0), "y": labels})
        start += size
    integrity = torchvision.datasets.utils.check_integrity
    monkeypatch.setattr(torchvision.datasets.svhn, "check_integrity", lambda path, md5: integrity(path))
    return folder


def read_charges(home):
    with Ledger(home / "ledger.sqlite") as ledger:
        account = ledger.get_account("svhn")
        return ledger.get_head(), account


def test_both_mechanisms_reuse_a_second_student_and_tensorboard(files, tmp_path, monkeypatch):
    home = tmp_path / "home"
    home.mkdir(mode=0o700)
    seen = set()

    def run(*settings):
        """The folder and the public summary of one run of the command."""
        outcome = train(home, f"data_root={files}", *settings, monkeypatch=monkeypatch, base=BASE)
        assert outcome.code == 0, outcome.err
        (summary,) = set(home.glob("runs/*/*/*/release/summary.json")) - seen
        seen.add(summary)
        return summary.parents[1], json.loads(summary.read_text())

    folder, gaussian = run("mechanism=gaussian", "mechanism.sigma=2")
    assert (gaussian["num_teachers"], gaussian["queries_answered"]) == (20, 100)
    # Both limits lie more than twelve standard errors above chance, a tenth, on 100 labels and on 247 test images.
    assert gaussian["label_accuracy"] > 0.5 and gaussian["student_accuracy"] > 0.35
    labels = (folder / "release" / "labels.csv").read_text().splitlines()[1:]
    assert {line.rsplit(",", 1)[1] for line in labels} == set("0123456789")  # 10 in the file is the digit 0
    events = EventAccumulator(str(folder / "private" / "tensorboard")).Reload().Tags()
    assert {"teachers/loss", "votes/gap"} <= set(events["histograms"]) and "votes/answered_share" in events["scalars"]

    (ensemble,) = home.glob("teachers/*/group_000000.safetensors")
    trained_at = ensemble.stat().st_mtime_ns
    reuse = f"teachers={gaussian['teachers_id']}"
    _, sparse = run(reuse, "mechanism=sparse_vector", "mechanism.epsilon=100", "mechanism.max_failures=1")
    assert list(home.glob("teachers/*/group_000000.safetensors")) == [ensemble]
    assert ensemble.stat().st_mtime_ns == trained_at  # no teacher was trained again
    assert sparse["mechanism"] == "sparse_vector" and sparse["queries_answered"] > 0
    # Both are on one account. Its delta is that of one release, so its epsilon may be a little above the sum of both.
    total = sparse["epsilon_charged"]
    assert max(sparse["epsilon"], gaussian["epsilon_charged"]) < total < 1.1 * (sparse["epsilon"] + gaussian["epsilon"])

    head, account = read_charges(home)
    _, second = run(f"labels={gaussian['release_id']}", "student.steps=40")
    assert read_charges(home)[0] == head and second["epsilon_charged"] == total
    assert second["student_accuracy"] > 0.3 and account.num_releases == 2


def test_a_missing_extra_file_is_refused_before_anything_is_read(files, tmp_path, monkeypatch):
    (files / "extra_32x32.mat").unlink()
    (files / "train_32x32.mat").write_bytes(b"nonsense")
    outcome = train(tmp_path / "home", f"data_root={files}", "mechanism=gaussian", monkeypatch=monkeypatch, base=BASE)
    for words in ("dataset.extra=True", str(files), "dataset.extra=false", "dataset.download=true"):
        assert words in outcome.error
    assert not list((tmp_path / "home").rglob("ledger.sqlite"))
